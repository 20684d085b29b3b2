"""Topology: the properties that determine each rank's bytes, saved or live."""

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
    """Topology of a checkpoint or an engine; equal ones have equal bytes on each rank.

    Attributes:
        dp: ranks over which ZeRO partitions, including sequence parallelism; 1 at stage 0.
        wrapper: name of a row of :data:`~deepspeed_ucp.model.wrappers.WRAPPERS`.
        precision: dtype of the model's parameters: ``float32``, ``bfloat16`` or ``float16``.
        undeclared: the precision is not fp32, but the ds_config, which determines file names, does not enable another.
        master: dtype of the master weights; without a wrapper of the first parameter.
        elastic: optimizer states are saved without padding (``elastic_checkpoint``).
        offload: devices of optimizer and parameter offload, as ``optimizer/param``.
        flats: the flat buffers in order, with the module's names.
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
        return find_wrapper(self.wrapper)

    @property
    def is_atomic(self) -> bool:
        return self.wrapper == ATOMIC

    def describe(self) -> str:
        """Return a short phrase for messages: ``ZeRO-1 dp=4 bfloat16 (zero12)``."""
        shown = {"dp": self.wrapper != BARE, **{key: getattr(self, key) > 1 for key in ("tp", "pp", "sp", "ep")}}
        degrees = "".join(f" {key}={getattr(self, key)}" for key, is_shown in shown.items() if is_shown)
        return f"ZeRO-{self.zero_stage}{degrees} {self.precision} ({self.wrapper})"


def number_groups(stages: Sequence[Sequence[Mapping[str, Any]]], ignored: Collection[str] = ()) -> list[list[int]]:
    """Return the numbers in the whole model of each pipeline stage's param groups.

    DeepSpeed drops groups that are empty on a stage, so that their indices differ between stages. The n-th group with
    given hyper-parameters is the n-th such group on every stage.

    Args:
        stages: hyper-parameters of each stage's groups.
        ignored: hyper-parameters that may differ.
    """
    numbers: dict[tuple[str, int], int] = {}
    numbered = []
    for groups in stages:
        kinds = [repr(sorted((k, repr(value)) for k, value in group.items() if k not in ignored)) for group in groups]
        keys = [(kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds)]
        numbered.append([numbers.setdefault(key, len(numbers)) for key in keys])
    return numbered


def drop_labels(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters without DeepSpeed's label of a distributed param group."""
    return {key: value for key, value in hyper.items() if not (hyper.get("moe") and key in ("moe", "name"))}


def find_label(hyper: Mapping[str, Any]) -> str:
    """Return DeepSpeed's label of a distributed param group; empty for other groups."""
    return str(hyper.get("name")) if hyper.get("moe") else ""


_SWITCHES = {"bfloat16": ("bf16", "bfloat16"), "float16": ("fp16",)}


def find_precision(config: Mapping[str, Any]) -> str:
    """Return the dtype to which a ds_config casts parameters, by default ``float32``."""
    return next((dtype for dtype, names in _SWITCHES.items() if is_enabled(config, *names)), "float32")


def is_enabled(config: Mapping[str, Any], *names: str) -> bool:
    """Return True if a section of a ds_config is enabled under one of its names."""
    return any(bool((config.get(name) or {}).get("enabled")) for name in names)


def list_undescribed(differences: Iterable[str]) -> list[str]:
    """Select the differences that are not visible in :meth:`Topology.describe`."""
    return [text for text in differences if text.split(" ", 1)[0] not in _DESCRIBED]


def find_differences(source: Topology, target: Topology) -> list[str]:
    """Describe the differences of two topologies; empty if the bytes are equal.

    Flat buffers depend on all other properties, so they are compared only if nothing else differs.
    """
    skipped = {"flats"} | ({"dp"} if BARE in (source.wrapper, target.wrapper) else set())
    names = [field.name for field in fields(Topology) if field.name not in skipped]
    sides = [(name, getattr(source, name), getattr(target, name)) for name in names]
    differences = [f"{name} {old} → {new}" for name, old, new in sides if old != new]
    if differences:
        return differences
    if len(source.flats) != len(target.flats):
        return [f"parameter layout: {len(source.flats)} → {len(target.flats)} parts"]
    flats = zip(source.flats, target.flats, strict=True)
    same = _list_param_names(source) == _list_param_names(target)
    other = (f"parameter layout: {_compare_flats(old, new, same)}" for old, new in flats if old != new)
    return list(islice(other, 1))


def _list_param_names(topology: Topology) -> list[str]:
    return sorted(name for flat in topology.flats for name in flat.names)


def _compare_flats(old: FlatBuffer, new: FlatBuffer, same: bool) -> str:
    """Describe a difference of flat buffers; ``same``: all have the same parameters."""
    if old.names != new.names:
        return "parameter order" if same else f"parameters ({len(old.names)} → {len(new.names)} or other names)"
    if old.shapes != new.shapes:
        shapes = zip(old.names, old.shapes, new.shapes, strict=True)
        return next(f"{name} {before} → {after}" for name, before, after in shapes if before != after)
    counts = (("param group", old.group, new.group), ("partitions", old.parts, new.parts))
    differences = [f"{name} {before} → {after}" for name, before, after in counts if before != after]
    others = {
        "on other ranks": old.ranks != new.ranks,
        "cut by parameter on one side only": old.by_parameter != new.by_parameter,
        "tensors that are cut as one": old.tensors != new.tensors,
        f"partition {old.partition} → {new.partition} elements": old.partition != new.partition,
    }
    differences += [text for text, differs in others.items() if differs]
    return differences[0] if differences else "parameter alignment"
