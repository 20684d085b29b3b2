"""Build the index of a folder of ``ds_to_universal``: atoms, param groups, and notes on data that it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...comm import Comm
from ...errors import CheckpointError, MismatchError, shorten
from ...model import MASTER, MODULE, AtomicIndex, AtomKey, GroupInfo, ParamKey, are_alike, count
from ...model.topology import Topology
from ...model.wrappers import ATOMIC
from ...plan.derive import split
from ...tensor_parallel import from_universal_info
from ...tensor_parallel.layout import Shape
from ...tensor_parallel.metadata import INFO
from ...tensor_parallel.recorded import record_pattern
from ...tensor_parallel.regex import Matcher
from ...torchsave.records import FileRecord
from ..deepspeed.builder import Builder, SavedRank
from ..deepspeed.headers import Piece
from ..deepspeed.index import find_saved_precision, make_index
from ..deepspeed.module import add_modules
from ..deepspeed.save import describe_offload
from ..deepspeed.zero import add_frozen_zero3
from ..findings import WARNING, Finding
from .headers import ParamHeader, UniversalHeaders, make_incomplete, read_headers
from .upstream import read_keys

_STEP = "step"


def open_universal(folder: str, sizes: dict[str, int], comm: Comm) -> tuple[AtomicIndex, list[Finding]]:
    """Return the index of a folder of ``ds_to_universal``, and warnings; collective."""
    part = read_headers(folder, sizes, comm)
    index, notes = comm.run(lambda: _build(part))
    return index, [Finding("dropped", "", f"{folder}: {note}", WARNING) for note in notes]


def _build(part: UniversalHeaders) -> tuple[AtomicIndex, list[str]]:
    """Build the index; return it with notes for warnings."""
    save, builder = part.save, Builder(part.save)
    notes: list[str] = []
    for name in part.shapes:
        _add_param(builder, part, name)
    _add_steps(builder, part, notes)
    notes += _describe_copies(part)
    dropped = _add_rest(builder, part, set(part.shapes), notes)
    _check_states(part)
    atoms = builder.finish_atoms()
    masters = [atom.dtype for atom in atoms.values() if atom.state == MASTER]
    topology = Topology(
        zero_stage=part.stage or int(save.zero.get("stage") or 0),
        wrapper=ATOMIC,
        precision=find_saved_precision(save, atoms),
        master=masters[0] if masters else "float32",
        offload=describe_offload(save.zero),
    )
    groups, recorded = _make_groups(part, notes), _record_cuts(part)
    index = make_index(builder, atoms, part.optim, topology, groups, recorded=recorded, dropped=dropped)
    index = replace(index, degrees=(save.tp, save.pp))
    files = {name: part.params.get(name, {}).get(MASTER) for name in part.shapes}
    return split(index, {name: file.count for name, file in files.items() if file and file.count}), notes


def _add_param(builder: Builder, part: UniversalHeaders, name: str) -> None:
    shapes, states = part.shapes[name], part.params.get(name, {})
    master = states.get(MASTER)
    if master is None and not any(count(shape) for shape in shapes.values()):
        nothing = Piece(FileRecord("", 0, 0, None), 0, shapes[min(shapes)], "float32")
        builder.add(SavedRank(), name, MASTER, part.save.main, nothing)
        return
    if master is None or master.piece is None:
        file = f"zero/{name}/{MASTER}.pt"
        error = make_incomplete(part.folder, f"{file}, although {part.save.main.name} lists the parameter")
        raise CheckpointError(str(error), findings=[Finding("missing", file, str(error))])
    shape = _find_shape(part, master, master.piece, shapes)
    for state, header in states.items():
        if state == _STEP:
            continue
        if header.piece is None or header.piece.numel != count(shape):
            shape_there = header.piece.shape if header.piece else "a number"
            text = f"holds {shape_there}, {name} has shape {shape}. The file is of another run."
            raise CheckpointError(text, path=f"{part.folder}/{header.file.name}")
        builder.add(SavedRank(), name, state, header.file, replace(header.piece, shape=shape))


def _find_shape(part: UniversalHeaders, header: ParamHeader, piece: Piece, shapes: Mapping[int, Shape]) -> Shape:
    """Return a parameter's logical shape.

    The converter writes tensors of stage 3 without tensor parallelism flat, and vocabularies without padding.
    """
    local = shapes[min(shapes)]
    if header.count and piece.shape[1:] == local[1:]:
        return piece.shape
    if part.save.tp > 1 or piece.shape == local:
        return piece.shape
    if header.keys.get("vocab_tensor") and piece.shape[1:] == local[1:] and piece.shape[0] <= local[0]:
        return piece.shape
    if piece.shape == (count(local),):
        return local
    raise CheckpointError(
        f"has shape {piece.shape}, {part.save.main.name} says {local}. The file belongs to another run.",
        path=f"{part.folder}/{header.file.name}",
    )


def _check_states(part: UniversalHeaders) -> None:
    """Check that all parameters of a flat buffer have equal states (a group without gradients has none)."""
    groups: dict[int | None, list[str]] = {}
    for name, flat in part.flats.items():
        if any(count(shape) for shape in part.shapes[name].values()):
            groups.setdefault(flat, []).append(name)
    for names in groups.values():
        everything = set().union(*(part.params.get(name, {}) for name in names))
        lacking = [
            f"{name}/{state}.pt" for name in names for state in sorted(everything - set(part.params.get(name, {})))
        ]
        if lacking:
            raise make_incomplete(
                f"{part.folder}/zero",
                f"{shorten(lacking)}, although other parameters of the same group have such files",
            )
    strangers = [name for name, states in part.params.items() if set(states) - {MASTER} and name not in part.shapes]
    if strangers:
        raise CheckpointError(
            f"{shorten(strangers)} have optimizer states, but {part.save.main.name} does not list them. The folder "
            "holds the files of two runs; convert into a new folder.",
            path=f"{part.folder}/zero",
        )


def _add_steps(builder: Builder, part: UniversalHeaders, notes: list[str]) -> None:
    """Add the optimizer's scalars from files or (stage 3) from rank 0's states."""
    trained = [name for name in part.shapes if set(part.params.get(name, {})) - {MASTER}]
    for name in trained:
        if part.save.is_sharded:
            flat = part.flats[name]
            _add_sharded(builder, part, name, 0 if flat is None else flat)
        elif header := part.params[name].get(_STEP):
            if header.value is None:
                builder.irregular.setdefault(AtomKey(name, _STEP), "a tensor of several elements")
            else:
                builder.add_scalars(ParamKey(name), {_STEP: header.value}, header.file)
                if header.dtype:
                    builder.scalar_dtypes.setdefault(_STEP, header.dtype)
    if trained and not builder.scalars and not any(_STEP in hyper for hyper in part.optim.groups):
        counters = part.save.model(0).counters
        step = int(counters.get("global_steps", 0)) - int(counters.get("skipped_steps", 0))
        builder.scalars.update({ParamKey(name): {_STEP: step} for name in trained})
        notes.append(f"the converter kept no step of the optimizer; {step}, by the counters, is taken")


def _add_sharded(builder: Builder, part: UniversalHeaders, name: str, flat: int) -> None:
    tensors = part.optim.tensors
    if flat >= len(tensors):
        raise CheckpointError(
            f"has states of {len(tensors)} sub-groups, {part.save.main.name} says more. The file belongs to another "
            "run.",
            path=f"{part.folder}/zero/optimizer_state.pt",
        )
    tensor = tensors[flat]
    builder.add_scalars(ParamKey(name), dict(tensor.scalars), part.save.main)
    for scalar, piece in tensor.zero_dim.items():
        builder.scalar_dtypes.setdefault(scalar, piece.dtype)
    for state, kind in tensor.other.items():
        builder.irregular.setdefault(AtomKey(name, state), kind)


def _add_rest(builder: Builder, part: UniversalHeaders, optimized: set[str], notes: list[str]) -> str:
    """Add buffers, frozen parameters and ties that the model states hold whole.

    Returns:
        Why some may be missing; empty if none is.
    """
    save = part.save
    if not save.is_pipeline and save.tp == save.pp == 1:
        if part.save.is_sharded:
            add_frozen_zero3(builder, SavedRank(), save.models[0], optimized)
        add_modules(builder, optimized)
        return ""
    builder.aliases = dict(save.model(0).shared)
    if save.is_pipeline:
        dropped = "DeepSpeed's ds_to_universal does not keep a pipeline's buffers and frozen parameters"
        notes.append(f"{dropped}; a load leaves them as the new model has them")
        return dropped
    missing = _add_replicas(builder, part, optimized | set(builder.aliases))
    if not missing:
        return ""
    dropped = "DeepSpeed's ds_to_universal does not unite the tensor-parallel shards of frozen parameters and buffers"
    notes.append(f"{dropped}: {shorten(missing)}; a load leaves them as the new model has them")
    return dropped


def _add_replicas(builder: Builder, part: UniversalHeaders, others: set[str]) -> list[str]:
    """Add buffers that are equal on all tensor-parallel ranks by their checksums; return the missing names."""
    ranks = [part.save.model(tp).module or {} for tp in range(part.save.tp)]
    buffers = set(part.save.model(0).buffers)
    missing = [name for name in part.save.model(0).frozen_shapes if name not in others]
    for name, piece in ranks[0].items():
        if name in others or (part.save.is_sharded and name not in buffers):
            continue
        pieces = [rank[name] for rank in ranks if name in rank]
        if name in buffers and len(pieces) == len(ranks) and are_alike(piece.contents for piece in pieces):
            builder.add(SavedRank(), name, MODULE, part.save.main, piece)
        elif name not in missing:
            missing.append(name)
    return missing


def _describe_copies(part: UniversalHeaders) -> list[str]:
    """Describe parameters of several pipeline stages, of which the converter keeps only the last stage's files.

    Parameters that the checkpoint declares equal on all stages are excluded.
    """
    save = part.save
    stages: dict[str, int] = {}
    for stage in range(save.pp):
        for name in save.model(stage * save.tp).owned:
            stages[name] = stages.get(name, 0) + 1
    shared: tuple[Matcher, ...] = ()
    with suppress(MismatchError):
        shared = from_universal_info(save.model(0).hints.get(INFO)).shared
    copies = sorted(n for n, number in stages.items() if number > 1 and not any(match(n) for match in shared))
    text = "the converter kept the values of an arbitrary stage for parameters that several pipeline stages hold"
    return [f"{text}: {shorten(copies)}"] if copies else []


def _make_groups(part: UniversalHeaders, notes: list[str]) -> tuple[GroupInfo, ...]:
    """Return param groups with their parameters; empty if a pipeline's stages have different groups."""
    hypers = part.optim.groups
    if len(hypers) > 1 and None in part.flats.values():
        differing = sorted({key for hyper in hypers for key in hyper if any(o.get(key) != hyper[key] for o in hypers)})
        notes.append(
            "the converter kept the param groups of the first pipeline stage alone, other stages have others: the "
            f"hyper-parameters of this run are kept (the saved groups differ in {shorten(differing) or 'nothing'})"
        )
        return ()
    owners = part.optim.owners
    members: list[list[ParamKey]] = [[] for _ in hypers]
    for name, index in part.flats.items():
        members[0 if index is None or index >= len(owners) else owners[index]].append(ParamKey(name))
    return tuple(GroupInfo(tuple(names), hyper) for names, hyper in zip(members, hypers, strict=True))


def _record_cuts(part: UniversalHeaders) -> dict[str, dict[str, Any]]:
    """Return the patterns by which the converter joined tensor-parallel shards, as recorded in its files."""
    masters = {name: part.params.get(name, {}).get(MASTER) for name in part.shapes if part.save.tp > 1}
    patterns = {
        name: read_keys(master.keys, master.piece.shape) for name, master in masters.items() if master and master.piece
    }
    return {name: record_pattern(pattern) for name, pattern in patterns.items() if pattern is not None}
