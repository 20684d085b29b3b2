"""The topology of a planned run, and its syntax: ``dp=3,tp=2,pp=1,zero=3``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ConfigError, advise, pluralize
from ..model.topology import Topology
from ..model.wrappers import Wrapper, choose_wrapper, find_wrapper, list_selectable

MOST_RANKS = 1 << 20
_PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_KEYS = ("dp", "tp", "pp", "sp", "ep", "zero", "precision")


@dataclass(frozen=True, slots=True)
class Degrees:
    """The topology of a planned run; ``dp`` does not include ``sp``."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1
    zero: int = 0
    wrapper: str = "torch"
    precision: str = "float32"

    @property
    def world(self) -> int:
        return self.shards * self.tp * self.pp

    @property
    def shards(self) -> int:
        """Number of ranks that ZeRO partitions over, sequence-parallel ranks included."""
        return self.dp * self.sp

    @property
    def traits(self) -> Wrapper:
        return find_wrapper(self.wrapper)

    @property
    def obstacle(self) -> str:
        """Reason why DeepSpeed refuses the degrees; empty if it does not."""
        is_refused = self.pp > 1 and self.zero > 1
        return "DeepSpeed refuses ZeRO-2 and ZeRO-3 with pipeline parallelism." if is_refused else ""

    def describe(self) -> str:
        """Describe it in one phrase: ``ZeRO-3 dp=384 bfloat16 (zero3), 384 ranks``."""
        more = "".join(f" {key}={getattr(self, key)}" for key in ("tp", "pp", "sp", "ep") if getattr(self, key) > 1)
        return f"ZeRO-{self.zero} dp={self.dp}{more} {self.precision} ({self.wrapper}), {pluralize(self.world, 'rank')}"

    def to_topology(self, source: Topology) -> Topology:
        """Return the topology without flat buffers; copy other fields from ``source``."""
        traits = self.traits
        return replace(
            source,
            zero_stage=self.zero,
            wrapper=self.wrapper,
            precision=self.precision,
            dp=self.shards if traits.is_cut else 1,
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            master="float32" if self.wrapper != source.wrapper and not source.traits.has_copies else source.master,
            elastic=source.elastic and traits.can_be_elastic,
            flats=(),
        )


def parse_degrees(text: str, source: Topology, *, world: int | None = None) -> Degrees:
    """Parse ``dp=…,tp=…,zero=…``; ``source`` has the default stage and precision."""
    given: dict[str, str] = {}
    for item in (part.strip() for part in text.split(",") if part.strip()):
        key, _, value = (part.strip() for part in item.partition("="))
        if not value or key in given or key not in _KEYS:
            listed = f"It is a list such as dp=3,tp=2,pp=1,zero=3; keys: {', '.join(_KEYS)}, each once."
            advice = listed if key in _KEYS else advise(key, _KEYS, listed)
            raise ConfigError(f"--target: {item!r} in {text!r} is not understood. {advice}")
        given[key] = value
    wanted = given.pop("precision", source.precision)
    precision = _PRECISIONS.get(wanted, wanted)
    if precision not in _PRECISIONS.values():
        raise ConfigError(f"--target: precision {wanted!r} cannot be planned. {advise(wanted, _PRECISIONS)}")
    numbers = {key: _parse_number(key, value) for key, value in given.items()}
    zero, dp = numbers.pop("zero", source.zero_stage), numbers.pop("dp", None)
    wrapper = _choose_wrapper(zero, precision, numbers.get("pp", 1), source)
    degrees = Degrees(**numbers, zero=zero, wrapper=wrapper, precision=precision)
    if dp is None and world is None:
        raise ConfigError("--target: dp is missing. Add it, or give the number of ranks with --ranks.")
    if world is not None and (world % degrees.world or dp not in (None, world // degrees.world)):
        raise ConfigError(f"--ranks {world} is not the product of the degrees in --target {text!r}.")
    degrees = replace(degrees, dp=dp or (world or 0) // degrees.world)
    if degrees.world > MOST_RANKS:
        raise ConfigError(f"--target: at most {MOST_RANKS:,} ranks can be planned, found {degrees.world:,}.")
    return degrees


def _parse_number(key: str, value: str) -> int:
    least, most = (0, 3) if key == "zero" else (1, MOST_RANKS)
    number = int(value) if value.isdecimal() else -1
    if not least <= number <= most:
        raise ConfigError(f"--target: {key} is an integer from {least} to {most:,}, found {value!r}.")
    return number


def _choose_wrapper(zero: int, precision: str, pp: int, source: Topology) -> str:
    """Return the saved wrapper if DeepSpeed may choose it again, else its default."""
    if source.traits in list_selectable(zero, precision) and source.zero_stage == zero and (zero or pp == 1):
        return source.wrapper
    return choose_wrapper(zero, precision, pipeline=pp > 1).name
