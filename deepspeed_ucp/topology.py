"""Topology: everything about a checkpoint or an engine that decides which bytes a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import islice

from .flat import FlatBuffer

ATOMIC = "atomic"
"""Wrapper of an atomic checkpoint: whole tensors, which nothing wraps."""

BARE = "none"
"""Wrapper of an engine below ZeRO 3 without optimizer, and of its saves: nothing is partitioned, on any ranks."""

STATELESS = "optimizer states missing"
"""Wrapper of a save that has lost them: its trained parameters have copies alone."""


@dataclass(frozen=True, slots=True)
class Topology:
    """What a checkpoint was written by, or what an engine is. Equal topologies hold equal bytes on every rank.

    Attributes:
        dp: ranks over which ZeRO partitions (sequence parallelism folded in); 1 at stage 0, where nothing is cut.
        tp, pp, sp, ep: tensor, pipeline, sequence and expert parallel degrees.
        zero_stage: 0 to 3.
        wrapper: ``zero12``, ``zero3``, ``zero3_inference``, ``bf16``, ``fp16_fused``, ``fp16_unfused``, ``torch``,
            ``none``, ``atomic`` or ``STATELESS``.
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

    def describe(self) -> str:
        """One short phrase for messages: ``ZeRO-1 dp=4 bfloat16 (zero12)``."""
        told = {"dp": self.wrapper != BARE, **{key: getattr(self, key) > 1 for key in ("tp", "pp", "sp", "ep")}}
        degrees = "".join(f" {key}={getattr(self, key)}" for key, is_told in told.items() if is_told)
        return f"ZeRO-{self.zero_stage}{degrees} {self.precision} ({self.wrapper})"


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
        return _compare_shapes(old, new)
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


def _compare_shapes(old: FlatBuffer, new: FlatBuffer) -> str:
    shapes = zip(old.names, old.shapes, new.shapes, strict=True)
    name, before, after = next(each for each in shapes if each[1] != each[2])
    return f"{name} {before} → {after}"
