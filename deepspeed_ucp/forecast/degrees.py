"""The topology that a plan is asked for, from a line such as ``dp=3,tp=2,pp=1,zero=3``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import ConfigError, advise
from ..topology import Topology
from ..wrappers import Wrapper, choose_wrapper, find_wrapper, list_foreseen

SUB_GROUP = 1_000_000_000
"""ZeRO 3's default ``sub_group_size``."""

MAX_GROUP = 178_956_971
"""Elements of a rank's param group of experts at most (``moe/utils.py``, ``max_group_size``)."""

MOST_RANKS = 1 << 20
"""What memory is enough for: a plan keeps some numbers for each rank."""

_PRECISIONS = {
    **{name: name for name in ("float32", "bfloat16", "float16")},
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
_NUMBERS = ("dp", "tp", "pp", "sp", "zero", "sub_group", "max_group", "experts")
_TEXTS = ("ep", "data_first", "precision", "wrapper")
_NOT_COVERED = {
    "cp": "context parallelism",
    "etp": "expert tensor parallelism",
    "edp": "expert data parallelism",
    "hpz": "ZeRO++'s secondary partitions",
    "mics": "MiCS",
}


@dataclass(frozen=True, slots=True)
class Degrees:
    """A topology by its degrees.

    Attributes:
        dp, tp, pp, sp: data, tensor, pipeline and sequence parallel degrees.
        zero: ZeRO stage.
        wrapper, precision, master: as in :class:`~deepspeed_ucp.topology.Topology`.
        sub_group: ZeRO 3's ``sub_group_size`` in elements of one partition.
        ep: expert-parallel degree of all layers of experts, or of each in the module's order.
        data_first: ranks that hold the same experts follow each other (``use_data_before_expert_parallelism``).
        max_group: elements of a rank's param group of experts at most.
        experts: of a layer, where rename rules make another number of them.
        refused: what of the request DeepSpeed, or this package, does not do, in words.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    zero: int = 0
    wrapper: str = "torch"
    precision: str = "float32"
    master: str = "float32"
    sub_group: int = SUB_GROUP
    ep: tuple[int, ...] = (1,)
    data_first: bool = False
    max_group: int = MAX_GROUP
    experts: int | None = None
    refused: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.sp * self.tp * self.pp

    @property
    def shards(self) -> int:
        """Ranks that ZeRO partitions over (replicas at stage 0): sequence parallelism is folded in."""
        return self.dp * self.sp

    @property
    def partitions(self) -> bool:
        """Whether masters are cut over data-parallel ranks."""
        return self.traits.is_cut

    @property
    def traits(self) -> Wrapper:
        """What the wrapper does to masters and states."""
        return find_wrapper(self.wrapper)

    def describe(self) -> str:
        """One short phrase: ``ZeRO-3 dp=384 bfloat16 (zero3), 384 ranks``."""
        degrees = "".join(f" {key}={getattr(self, key)}" for key in ("tp", "pp", "sp") if getattr(self, key) > 1)
        degrees += f" ep={self.describe_ep()}" if max(self.ep) > 1 else ""
        ranks = f"{self.world} rank{'s' * (self.world > 1)}"
        return f"ZeRO-{self.zero} dp={self.dp}{degrees} {self.precision} ({self.wrapper}), {ranks}"

    def describe_ep(self) -> str:
        """The expert-parallel degrees as they are asked for: ``2``, ``2.4``."""
        return ".".join(map(str, self.ep))

    def topology(self, source: Topology) -> Topology:
        """In the words of a checkpoint; what was not asked for is as in ``source``. Without flat buffers."""
        return replace(
            source,
            zero_stage=self.zero,
            wrapper=self.wrapper,
            precision=self.precision,
            dp=self.shards if self.partitions else 1,
            tp=self.tp,
            pp=self.pp,
            ep=max(self.ep),
            master=self.master,
            elastic=source.elastic and self.traits.can_be_elastic,
            flats=(),
        )


def parse_degrees(
    text: str, source: Topology, *, world: int | None = None, sub_group: int | None = None, data_first: bool = False
) -> Degrees:
    """Read ``dp=…,tp=…,pp=…,sp=…,ep=…,zero=…,precision=…,wrapper=…``; what is left out is 1, or as in ``source``.

    Args:
        source: topology of the checkpoint.
        world: number of ranks, from which ``dp`` follows where it is left out.
        sub_group: the saved ``sub_group_size``.
        data_first: the saved ``use_data_before_expert_parallelism``.

    Raises:
        ConfigError: an unknown key, a value that is no positive number, a wrapper that does not fit.
    """
    told = _split(text)
    refused = tuple(
        f"{name} ({key}={told[key]}) is not covered by this release"
        for key, name in _NOT_COVERED.items()
        if told.get(key, "1") != "1"
    )
    numbers = {key: _number(key, told[key]) for key in _NUMBERS if key in told}
    zero = numbers.get("zero", source.zero_stage)
    asked = told.get("precision", source.precision)
    precision = _PRECISIONS.get(asked)
    if precision is None:
        whose = "" if "precision" in told else "the checkpoint's "
        raise ConfigError(f"--target: {whose}precision {asked!r} cannot be planned. {advise(asked, _PRECISIONS)}")
    pp = numbers.get("pp", 1)
    wrapper = told.get("wrapper") or _choose_wrapper(zero, precision, pp, source)
    found = Degrees(
        dp=1,
        tp=numbers.get("tp", 1),
        pp=pp,
        sp=numbers.get("sp", 1),
        zero=zero,
        wrapper=wrapper,
        precision=precision,
        master="float32" if wrapper != source.wrapper and not source.traits.has_copies else source.master,
        sub_group=numbers.get("sub_group", sub_group or SUB_GROUP),
        ep=tuple(_number("ep", part) for part in told.get("ep", "1").split(".")),
        data_first=_read_flag("data_first", told) if "data_first" in told else data_first,
        max_group=numbers.get("max_group", MAX_GROUP),
        experts=numbers.get("experts"),
        refused=refused,
    )
    _check_wrapper(found)
    if pp > 1 and zero > 1:
        refused += ("ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism (DeepSpeed refuses them together)",)
    found = replace(found, dp=_find_dp(numbers.get("dp"), found, world), refused=refused)
    if found.world > MOST_RANKS:
        raise ConfigError(f"--target: plans are made for at most {MOST_RANKS:,} ranks, found {found.world:,}.")
    return found


def _split(text: str) -> dict[str, str]:
    told: dict[str, str] = {}
    valid = (*_NUMBERS, *_TEXTS)
    for item in (each.strip() for each in text.split(",") if each.strip()):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not value or key in told or key not in (*valid, *_NOT_COVERED):
            listed = f"It is a list such as dp=3,tp=2,pp=1,zero=3; keys: {', '.join(valid)}, each once."
            advice = listed if key in valid else advise(key, valid, listed)
            raise ConfigError(f"--target: {item!r} in {text!r} is not understood. {advice}")
        told[key] = value
    return told


def _number(key: str, value: str) -> int:
    least = 0 if key == "zero" else 1
    number = int(value) if value.isdecimal() else -1
    if number < least or (key == "zero" and number > 3):
        span = "0 to 3" if key == "zero" else "a positive integer"
        raise ConfigError(f"--target: {key} is {span}, found {value!r}.")
    return number


def _read_flag(key: str, told: Mapping[str, str]) -> bool:
    if told[key] not in ("0", "1"):
        raise ConfigError(f"--target: {key} is 0 or 1, found {told[key]!r}.")
    return told[key] == "1"


def _choose_wrapper(zero: int, precision: str, pp: int, source: Topology) -> str:
    """What DeepSpeed takes (engine.py ``_do_optimizer_sanity_check``); the saved one where there is a choice."""
    if source.traits in list_foreseen(zero, precision) and source.zero_stage == zero and (zero or pp == 1):
        return source.wrapper
    return choose_wrapper(zero, precision, pipeline=pp > 1).name


def _check_wrapper(found: Degrees) -> None:
    known = [row.name for row in list_foreseen()]
    if found.wrapper not in known:
        raise ConfigError(f"--target: wrapper {found.wrapper!r} is unknown. {advise(found.wrapper, known)}")
    row = found.traits
    if row not in list_foreseen(found.zero, found.precision):
        raise ConfigError(
            f"--target: wrapper {found.wrapper} is for ZeRO {' or '.join(map(str, row.stages))} in "
            f"{' or '.join(row.precisions)}, not for ZeRO {found.zero} in {found.precision}."
        )


def _find_dp(dp: int | None, found: Degrees, world: int | None) -> int:
    """The data-parallel degree, which the number of ranks may tell."""
    others = found.tp * found.pp * found.sp
    if world is None:
        if dp is None:
            raise ConfigError("--target: dp is missing (or the number of ranks: --nodes and --ranks-per-node).")
        return dp
    if world % others or (dp is not None and dp * others != world):
        told = f"dp={dp} × " if dp is not None else ""
        raise ConfigError(
            f"--target: {world} ranks are not {told}tp={found.tp} × pp={found.pp} × sp={found.sp}"
            f"{'' if dp is not None else ' × a whole dp'}."
        )
    return world // others
