"""Topology: everything about a checkpoint or an engine that decides which bytes a rank holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from .flat import FlatBuffer
from .wrappers import ATOMIC, BARE, Wrapper, find_wrapper

_DESCRIBED = frozenset({"zero_stage", "wrapper", "precision", "dp", "tp", "pp", "sp", "ep"})


@dataclass(frozen=True, slots=True)
class Topology:
    """What a checkpoint was written by, or what an engine is. Equal topologies hold equal bytes on every rank.

    Attributes:
        dp: ranks over which ZeRO partitions (sequence parallelism folded in); 1 at stage 0, where nothing is cut.
        tp, pp, sp, ep: tensor, pipeline, sequence and expert parallel degrees.
        zero_stage: 0 to 3.
        wrapper: name of a row of :data:`~deepspeed_ucp.wrappers.WRAPPERS`.
        precision: dtype of the model's parameters, as ``float32``, ``bfloat16`` or ``float16``.
        undeclared: that is not fp32, and the ds_config switches no other precision on, by which files are named.
        master: dtype of the master weights; without a wrapper of the first parameter.
        elastic: optimizer states are saved without padding (``elastic_checkpoint``).
        offload: device of optimizer and parameter offload, as ``optimizer/param``.
        flats: the flat buffers in order, with the module's own spelling of names.
    """

    zero_stage: int
    wrapper: str
    precision: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1
    undeclared: bool = False
    master: str = "float32"
    elastic: bool = False
    offload: str = "none/none"
    flats: tuple[FlatBuffer, ...] = ()

    @property
    def traits(self) -> Wrapper:
        """What its optimizer wrapper does to masters and states."""
        return find_wrapper(self.wrapper)

    @property
    def is_atomic(self) -> bool:
        """Whether it is that of an atomic checkpoint."""
        return self.wrapper == ATOMIC

    def describe(self) -> str:
        """One short phrase for messages: ``ZeRO-1 dp=4 bfloat16 (zero12)``."""
        told = {"dp": self.wrapper != BARE, **{key: getattr(self, key) > 1 for key in ("tp", "pp", "sp", "ep")}}
        degrees = "".join(f" {key}={getattr(self, key)}" for key, is_told in told.items() if is_told)
        return f"ZeRO-{self.zero_stage}{degrees} {self.precision} ({self.wrapper})"


def number_groups(stages: Sequence[Sequence[Mapping[str, Any]]], ignored: Collection[str] = ()) -> list[list[int]]:
    """Numbers in the whole model of each pipeline stage's param groups.

    DeepSpeed drops the groups that are empty on a stage, so that a group's place there means nothing: the n-th one of
    those with the same hyper-parameters is the n-th of these on every stage.

    Args:
        stages: by stage the hyper-parameters of its groups.
        ignored: hyper-parameters that may differ.
    """
    numbers: dict[tuple[str, int], int] = {}
    found = []
    for groups in stages:
        kinds = [repr(sorted((k, repr(value)) for k, value in group.items() if k not in ignored)) for group in groups]
        keys = [(kind, kinds[:place].count(kind)) for place, kind in enumerate(kinds)]
        found.append([numbers.setdefault(key, len(numbers)) for key in keys])
    return found


_SWITCHES = {"bfloat16": ("bf16", "bfloat16"), "float16": ("fp16",)}


def find_precision(config: Mapping[str, Any]) -> str:
    """Dtype to which a ds_config casts the model's parameters; ``float32`` where it switches none on."""
    return next((dtype for dtype, names in _SWITCHES.items() if enabled(config, *names)), "float32")


def enabled(config: Mapping[str, Any], *names: str) -> bool:
    """Whether a section of a ds_config is switched on, under one of its names."""
    return any(bool((config.get(name) or {}).get("enabled")) for name in names)


def list_untold(differences: Iterable[str]) -> list[str]:
    """Of what differs, in words, that which the two sides' descriptions do not show."""
    return [text for text in differences if text.split(" ", 1)[0] not in _DESCRIBED]


def find_differences(source: Topology, target: Topology) -> list[str]:
    """What differs between two topologies, in words; empty when they hold the same bytes on every rank.

    Flat buffers follow from all else: they are told of where nothing else differs.
    """
    passed = {"flats"} | ({"dp"} if BARE in (source.wrapper, target.wrapper) else set())
    names = [field.name for field in fields(Topology) if field.name not in passed]
    sides = [(name, getattr(source, name), getattr(target, name)) for name in names]
    differences = [f"{name} {old} → {new}" for name, old, new in sides if old != new]
    if differences:
        return differences
    if len(source.flats) != len(target.flats):
        return [f"parameter layout: {len(source.flats)} → {len(target.flats)} parts"]
    flats = zip(source.flats, target.flats, strict=True)
    same = _list_names(source) == _list_names(target)
    other = (f"parameter layout: {_compare_flats(old, new, same)}" for old, new in flats if old != new)
    return list(islice(other, 1))


def _list_names(topology: Topology) -> list[str]:
    return sorted(name for flat in topology.flats for name in flat.names)


def _compare_flats(old: FlatBuffer, new: FlatBuffer, same: bool) -> str:
    """What differs; ``same`` says that all flat buffers together hold the same parameters."""
    if old.names != new.names:
        return "parameter order" if same else f"parameters ({len(old.names)} → {len(new.names)} or other names)"
    if old.shapes != new.shapes:
        shapes = zip(old.names, old.shapes, new.shapes, strict=True)
        return next(f"{name} {before} → {after}" for name, before, after in shapes if before != after)
    counts = (("param group", old.group, new.group), ("partitions", old.parts, new.parts))
    found = [f"{name} {before} → {after}" for name, before, after in counts if before != after]
    others = {
        "held by other ranks": old.ranks != new.ranks,
        "cut by parameter on one side alone": old.by_parameter != new.by_parameter,
        "tensors that are cut as one": old.tensors != new.tensors,
        f"partition {old.partition} → {new.partition} elements": old.partition != new.partition,
    }
    found += [text for text, differs in others.items() if differs]
    return found[0] if found else "parameter alignment"
