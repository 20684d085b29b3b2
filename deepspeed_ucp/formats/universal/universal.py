"""Read atomic checkpoints with a manifest, and DeepSpeed's universal checkpoints.

``deepspeed/checkpoint/ds_to_universal.py`` writes a folder per parameter (joined over tensor-parallel ranks and
partitions) and the optimizer's param groups of rank 0, and copies the model states. It omits a pipeline's layer files,
and thus buffers and frozen parameters. Below stage 3 ``zero`` has 32-bit copies of the first tensor-parallel rank's
frozen parameters, which are ignored: the model states have the originals.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ...comm import Comm
from ...errors import CheckpointError, MismatchError, raise_first, shorten
from ...extensions.registry import find_for_fused
from ...io.paths import Entry, choose_map, is_url
from ...io.store import note_listed
from ...model.index import AtomicIndex, GroupInfo
from ...model.records import Record
from ...model.storage import MASTER, MODULE, AtomKey, ParamKey, are_alike, count, strip_compiled
from ...model.topology import Topology
from ...model.wrappers import ATOMIC, ZERO_STAGE_KEY, find_wrapper
from ...plan.derive import split
from ...tensor_parallel.layout import Shape
from ...tensor_parallel.metadata import INFO, from_universal_info
from ...tensor_parallel.recorded import record_pattern
from ...torchsave.objects import TensorRef
from ...torchsave.torchfile import read_header
from ..deepspeed.builder import Builder, SavedRank
from ..deepspeed.files import MANIFEST, ZERO, holds_atoms, scan_folder
from ..deepspeed.headers import FileHeader, OptimHeader, Piece
from ..deepspeed.index import find_saved_precision, make_index
from ..deepspeed.module import add_modules
from ..deepspeed.reading import as_int, make_piece, read_field, read_file, read_inner, read_optim
from ..deepspeed.save import Save, arrange_headers, describe_offload, find_foreign_files, name_model_files
from ..deepspeed.zero import add_frozen_zero3
from ..findings import WARNING, Finding, explain_form, make_error
from ..locations import FileTable
from .upstream import CAT_DIM, EQUAL_PARTS, VOCABULARY, read_keys

if TYPE_CHECKING:  # pydantic takes long to import
    from .index import Manifest

_OPTIMIZER = f"{ZERO}/optimizer_state.pt"
_PARAM = "param"
_TEMPORARY = "tmp"
_STEP = "step"


def survey_atomic(where: FileTable, comm: Comm) -> tuple[AtomicIndex | None, list[Finding], Manifest | None]:
    """Return the index, findings and manifest of a checkpoint (collective).

    DeepSpeed's universal checkpoint has no manifest (None), and its faults are raised. With a manifest, one rank reads
    only this file, and sizes are checked; else all headers are read. Each atom has one shard of the logical shape. The
    checkpoint must be whole in one place that every rank sees.
    """
    from .index import find_manifest, open_conversion

    place, *others = _choose_places(where)
    folder = where.folders[place]
    manifest = comm.once(lambda: find_manifest(folder))
    if isinstance(manifest, Finding):
        return None, [manifest], None
    if manifest is None:
        source = _read_headers(FileTable.of(folder, where.visible[place]), comm)
        index, notes = comm.run(lambda: _build(source))
        return index, [Finding("dropped", "", f"{folder}: {note}", WARNING) for note in notes], None
    places = [near for near in where.near if near == place or near in others] if others else []
    return *open_conversion(folder, manifest, [where.folders[near] for near in places], comm), manifest


def _choose_places(where: FileTable) -> list[int]:
    """Return the numbers of the places where every rank sees an atomic checkpoint.

    Raises:
        CheckpointError: there are none.
    """
    views = [view.places for view in where.views] or [where.visible]
    common = [place for place in range(len(where.folders)) if all(holds_atoms(view[place]) for view in views)]
    if not common:
        text = "some ranks see an atomic checkpoint, others do not. Put all of it where every rank sees it."
        raise CheckpointError(text, path=where.folder)
    return common


# -- DeepSpeed's universal checkpoints ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParamHeader:
    """The header of a file in a parameter's folder.

    Attributes:
        file: the file, by its path relative to the checkpoint's folder.
        piece: the tensor; None in ``step.pt``.
        value, dtype: the number, and its dtype if it is a 0-dim tensor.
        keys: the converter's entries about joining the tensor.
        count: number of atoms in a fused parameter; 0 for other parameters.
    """

    file: FileHeader
    piece: Piece | None = None
    value: Any = None
    dtype: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    count: int = 0


@dataclass(frozen=True, slots=True)
class UniversalHeaders:
    """The headers of DeepSpeed's universal checkpoint.

    Attributes:
        save: the copied model states, without optimizer files.
        optim: param groups and the source's ZeRO stage; at stage 3 also data-parallel rank 0's states.
        params: folder in ``zero`` → state → file.
        shapes: parameter of the optimizer → local shape by tensor-parallel rank.
        flats: parameter of the optimizer → number of its flat buffer; None if unknown.
    """

    save: Save
    optim: OptimHeader
    params: dict[str, dict[str, ParamHeader]]
    shapes: dict[str, dict[int, Shape]]
    flats: dict[str, int | None]


def _make_missing_error(folder: str, names: str) -> CheckpointError:
    text = f"lacks {names}: the conversion by ds_to_universal was interrupted, or the copy is not complete"
    return CheckpointError(f"{text}. Convert or copy again.", path=folder, kind="missing")


def _read_headers(where: FileTable, comm: Comm) -> UniversalHeaders:
    """Read a universal checkpoint's headers, each on one rank (collective)."""
    folder = where.folder
    entries = comm.once(lambda: _list_zero_folder(where))
    note_listed(os.path.join(folder, ZERO), entries)  # any rank may read a file whose header another rank has read
    files = _group_by_param(entries)
    names = [*files]
    params = comm.share(names, lambda name: _read_param(folder, name, files[name]), choose_map(folder))
    optim = comm.once(lambda: _read_optimizer(folder))
    save = _read_models(where, optim.stage, comm)
    by_name = dict(zip(map(strip_compiled, names), params, strict=True))
    return UniversalHeaders(save, optim, by_name, *comm.run(lambda: _read_param_shapes(save, optim)))


def _list_zero_folder(where: FileTable) -> dict[str, Entry]:
    """List ``zero``; in an object store including its subfolders.

    A store lists a thousand files at once.

    Raises:
        CheckpointError: the conversion was interrupted, or files are missing.
    """
    folder = where.folder
    if _TEMPORARY in where.entries:
        raise CheckpointError(
            f"holds {_TEMPORARY}, where ds_to_universal keeps fragments while it works; the conversion was "
            "interrupted. Convert again; if it was run with --keep_temp_folder, remove that folder.",
            path=folder,
        )
    entries = scan_folder(os.path.join(folder, ZERO), deep=is_url(folder))
    params = _group_by_param(entries)
    if not params or os.path.basename(_OPTIMIZER) not in entries:
        raise _make_missing_error(folder, _OPTIMIZER if params else "every parameter's folder")
    return entries


def _group_by_param(entries: Mapping[str, Entry]) -> dict[str, list[str]]:
    """Group files by parameter.

    Lists are empty for a local folder, whose subfolders are not listed yet.
    """
    by_param = defaultdict[str, list[str]](list)
    for name, entry in sorted(entries.items()):
        param, _, file = name.partition("/")
        if file or entry.is_folder:
            by_param[param] += [file] * bool(file)
    return dict(by_param)


def _read_param(folder: str, name: str, files: Sequence[str]) -> dict[str, ParamHeader]:
    files = files or sorted(scan_folder(os.path.join(folder, ZERO, name)))
    if f"{MODULE}.pt" in files:
        text = (
            f"{folder}/{MANIFEST} is missing: {ZERO}/{name}/{MODULE}.pt was written by `ds_ucp convert`, which writes "
            "it last. Copy the whole folder, or convert again."
        )
        raise CheckpointError(text, findings=[Finding("missing", MANIFEST, text)])
    return {file[:-3]: _read_param_file(folder, f"{ZERO}/{name}/{file}") for file in files if file.endswith(".pt")}


def _read_param_file(folder: str, name: str) -> ParamHeader:
    path = os.path.join(folder, name)
    file = read_header(path)
    tree, header = file.tree, FileHeader(name, file.size, crc=file.header_crc)
    with explain_form(path):
        if isinstance(tree, dict):
            if _PARAM not in tree:
                raise CheckpointError(
                    f"has no {_PARAM!r} but {sorted(map(str, tree))}; another kind of file.", path=path
                )
            keys = {key: tree[key] for key in (CAT_DIM, EQUAL_PARTS, VOCABULARY) if isinstance(tree.get(key), int)}
            piece = make_piece(file, tree[_PARAM], name)
            counts = (extension.count_fused(tree, piece.shape, path) for extension in find_for_fused(tree))
            return ParamHeader(header, piece, keys=keys, count=max(counts, default=0))
        if isinstance(tree, TensorRef):  # a step, or a flat tensor of stage 3 without tensor parallelism
            piece = make_piece(file, tree, name)
            value, dtype = (None, "") if tree.data is None else (tree.item(), tree.dtype)
            return ParamHeader(header, piece, value, dtype)
        if isinstance(tree, (int, float)):
            return ParamHeader(header, value=tree)
        raise CheckpointError(f"holds a {type(tree).__name__}, neither a tensor nor a number.", path=path)


def _read_optimizer(folder: str) -> OptimHeader:
    """Read the optimizer's header, with the ZeRO stage of the source.

    For stage 3 it includes the states of data-parallel rank 0, else only the param groups.
    """
    path = os.path.join(folder, _OPTIMIZER)
    file = read_header(path)
    with explain_form(path):
        tree = file.tree
        if not isinstance(tree, dict) or not isinstance(tree.get("param_groups"), list):
            raise CheckpointError("has no param_groups; it is no optimizer state of ds_to_universal.", path=path)
        if find_wrapper("zero3").has_saved(tree):
            return read_optim(file, tree)
        wrapper = find_wrapper("zero12" if ZERO_STAGE_KEY in tree else "bf16")
        header = read_inner(file, tree, {"param_groups": tree["param_groups"]}, wrapper, [])
        return replace(
            header, stage=read_field(file, tree, ZERO_STAGE_KEY, lambda stage: 0 if stage is None else as_int(stage))
        )


def _read_models(where: FileTable, stage: int, comm: Comm) -> Save:
    folder = where.folder
    save, main = comm.run(lambda: _find_main(where, stage))
    first = comm.once(lambda: read_file(folder, main))
    names = name_model_files(save, first)[1:]
    if absent := [name for name in names if name not in where.entries]:
        raise _make_missing_error(folder, shorten(absent))
    arrange_headers(save, [first, *comm.share(names, lambda name: read_file(folder, name), choose_map(folder))])
    raise_first([make_error(find_foreign_files(save))])
    return save


def _find_main(where: FileTable, stage: int) -> tuple[Save, str]:
    """Return the :class:`Save` that names files, and the first rank's model states."""
    save = Save.of(where)
    main = save.name("model_zero3" if stage == 3 else "model", 0, 0)
    if main not in where.entries:
        raise _make_missing_error(where.folder, f"{main}, which a checkpoint converted from stage {stage} has")
    return save, main


def _read_param_shapes(save: Save, optim: OptimHeader) -> tuple[dict[str, dict[int, Shape]], dict[str, int | None]]:
    """Return ``shapes`` and ``flats`` of :class:`UniversalHeaders`.

    They are in ``param_shapes`` of the model states, by group or (stage 3) by sub-group.
    """
    shapes: dict[str, dict[int, Shape]] = {}
    flats: dict[str, int | None] = {}
    for mp, model in enumerate(save.first_models):
        if model.param_shapes is None:
            raise CheckpointError(
                "has no param_shapes, so that the parameters of its param groups are "
                "not known. It is no checkpoint that ds_to_universal converts.",
                path=save.path(save.models[mp][0]),
            )
        for index, group in enumerate(model.param_shapes):
            for name, shape in group:
                shapes.setdefault(strip_compiled(name), {})[mp % save.tp] = tuple(shape)
                is_known = len(model.param_shapes) == len(optim.owners)
                flats.setdefault(strip_compiled(name), index if is_known else None)
    return shapes, flats


def _build(source: UniversalHeaders) -> tuple[AtomicIndex, list[str]]:
    """Build the index; return it with notes for warnings."""
    save, builder = source.save, Builder(source.save)
    notes: list[str] = []
    for name in source.shapes:
        _add_param(builder, source, name)
    _add_scalars(builder, source, notes)
    notes += _note_shared_by_stages(source)
    dropped = _add_rest(builder, source, set(source.shapes), notes)
    _check_states(source)
    atoms = builder.finish_atoms()
    masters = [atom.dtype for atom in atoms.values() if atom.state == MASTER]
    topology = Topology(
        zero_stage=source.optim.stage or int(save.zero.get("stage") or 0),
        wrapper=ATOMIC,
        precision=find_saved_precision(save, atoms),
        master=masters[0] if masters else "float32",
        offload=describe_offload(save.zero),
    )
    index = make_index(builder, atoms, source.optim, topology, _make_groups(source, notes))
    index = replace(index, recorded=_read_patterns(source), dropped=dropped, degrees=(save.tp, save.pp))
    files = {name: source.params.get(name, {}).get(MASTER) for name in source.shapes}
    return split(index, {name: file.count for name, file in files.items() if file and file.count}), notes


def _add_param(builder: Builder, source: UniversalHeaders, name: str) -> None:
    """Add the atoms of a parameter, with the fp32 master's shape."""
    shapes, states = source.shapes[name], source.params.get(name, {})
    master = states.get(MASTER)
    if master is None and not any(count(shape) for shape in shapes.values()):
        nothing = Piece(Record(0, 0, None), 0, shapes[min(shapes)], "float32")
        builder.add(SavedRank(), name, MASTER, source.save.main, nothing)
        return
    if master is None or master.piece is None:
        file = f"zero/{name}/{MASTER}.pt"
        error = _make_missing_error(source.save.folder, f"{file}, although {source.save.main.name} lists the parameter")
        raise CheckpointError(str(error), findings=[Finding("missing", file, str(error))])
    shape = _find_shape(source, master, master.piece, shapes)
    for state, header in states.items():
        if state == _STEP:
            continue
        if header.piece is None or header.piece.shape != master.piece.shape:
            shape_there = header.piece.shape if header.piece else "a number"
            text = f"holds {shape_there}, {MASTER}.pt {master.piece.shape}. The file is of another run."
            raise CheckpointError(text, path=f"{source.save.folder}/{header.file.name}")
        builder.add(SavedRank(), name, state, header.file, replace(header.piece, shape=shape))


def _find_shape(source: UniversalHeaders, header: ParamHeader, piece: Piece, shapes: Mapping[int, Shape]) -> Shape:
    """Return a parameter's logical shape.

    The converter writes tensors of stage 3 without tensor parallelism flat, and vocabularies without padding.
    """
    local = shapes[min(shapes)]
    has_same_rows = len(piece.shape) == len(local) and piece.shape[1:] == local[1:]
    may_differ = header.count or (header.keys.get(VOCABULARY) and piece.shape < local)
    if source.save.tp > 1 or piece.shape == local or (has_same_rows and may_differ):
        return piece.shape
    if piece.shape == (count(local),):
        return local
    text = f"has shape {piece.shape}, {source.save.main.name} says {local}. The file belongs to another run."
    raise CheckpointError(text, path=f"{source.save.folder}/{header.file.name}")


def _check_states(source: UniversalHeaders) -> None:
    """Check that the parameters of a flat buffer have the same state names.

    A group without gradients has no states. No parameter that the model states do not list may have states.
    """
    groups = defaultdict[int | None, list[str]](list)
    for name, flat in source.flats.items():
        if any(map(count, source.shapes[name].values())):
            groups[flat].append(name)
    for names in groups.values():
        everything = sorted(set().union(*(source.params.get(name, {}) for name in names)))
        pairs = ((name, state) for name in names for state in everything if state not in source.params.get(name, {}))
        if lacking := [f"{name}/{state}.pt" for name, state in pairs]:
            text = f"{shorten(lacking)}, although other parameters of the same group have such files"
            raise _make_missing_error(f"{source.save.folder}/zero", text)
    strangers = [name for name, states in source.params.items() if set(states) - {MASTER} and name not in source.shapes]
    if strangers:
        raise CheckpointError(
            f"{shorten(strangers)} have optimizer states, but {source.save.main.name} does not list them. The folder "
            "holds the files of two runs; convert into a new folder.",
            path=f"{source.save.folder}/zero",
        )


def _add_scalars(builder: Builder, source: UniversalHeaders, notes: list[str]) -> None:
    """Add the optimizer's scalars from files or (stage 3) from rank 0's states.

    If there are none, take the step from the counters, with a note.
    """
    trained = [name for name in source.shapes if set(source.params.get(name, {})) - {MASTER}]
    for name in trained:
        if source.save.is_sharded:
            _add_zero3_scalars(builder, source, name, source.flats[name] or 0)
        elif header := source.params[name].get(_STEP):
            if header.value is None:
                builder.irregular.setdefault(AtomKey(name, _STEP), "a tensor of several elements")
            else:
                builder.add_scalars(ParamKey(name), {_STEP: header.value}, header.file)
                if header.dtype:
                    builder.scalar_dtypes.setdefault(_STEP, header.dtype)
    if trained and not builder.scalars and not any(_STEP in hyper for hyper in source.optim.groups):
        counters = source.save.model(0).counters
        step = int(counters.get("global_steps", 0)) - int(counters.get("skipped_steps", 0))
        builder.scalars.update({ParamKey(name): {_STEP: step} for name in trained})
        notes.append(f"the converter kept no step of the optimizer; the step {step} of the counters is used")


def _add_zero3_scalars(builder: Builder, source: UniversalHeaders, name: str, flat: int) -> None:
    """Add a parameter's scalars from its sub-group in rank 0's states."""
    tensors = source.optim.tensors
    if flat >= len(tensors):
        raise CheckpointError(
            f"has states of {len(tensors)} sub-groups, {source.save.main.name} says more. The file belongs to another "
            "run.",
            path=f"{source.save.folder}/zero/optimizer_state.pt",
        )
    tensor = tensors[flat]
    builder.add_scalars(ParamKey(name), dict(tensor.scalars), source.save.main)
    for scalar, piece in tensor.zero_dim.items():
        builder.scalar_dtypes.setdefault(scalar, piece.dtype)
    for state, kind in tensor.other.items():
        builder.irregular.setdefault(AtomKey(name, state), kind)


def _add_rest(builder: Builder, source: UniversalHeaders, optimized: set[str], notes: list[str]) -> str:
    """Add buffers, frozen parameters and ties that the model states hold whole.

    Returns:
        Why some may be missing; empty if all are there.
    """
    save = source.save
    if not save.is_pipeline and save.tp == save.pp == 1:
        if save.is_sharded:
            add_frozen_zero3(builder, SavedRank(), save.models[0], optimized)
        add_modules(builder, optimized)
        return ""
    builder.aliases = dict(save.model(0).shared)
    if save.is_pipeline:
        dropped = "DeepSpeed's ds_to_universal does not keep a pipeline's buffers and frozen parameters"
        notes.append(f"{dropped}; a load leaves them as the new model has them")
        return dropped
    missing = _add_replicas(builder, source, optimized | set(builder.aliases))
    if not missing:
        return ""
    dropped = "DeepSpeed's ds_to_universal does not unite the tensor-parallel shards of frozen parameters and buffers"
    notes.append(f"{dropped}: {shorten(missing)}; a load leaves them as the new model has them")
    return dropped


def _add_replicas(builder: Builder, source: UniversalHeaders, others: set[str]) -> list[str]:
    """Add buffers whose checksums are equal on all tensor-parallel ranks.

    Returns:
        The names of the frozen parameters and buffers that are not added.
    """
    ranks = [source.save.model(tp).module or {} for tp in range(source.save.tp)]
    buffers = set(source.save.model(0).buffers)
    frozen = chain.from_iterable(source.save.model(tp).frozen_shapes for tp in range(source.save.tp))
    missing = [name for name in dict.fromkeys(frozen) if name not in others]
    for name in dict.fromkeys(chain(*ranks)):
        if name in others or (source.save.is_sharded and name not in buffers):
            continue
        pieces = [rank[name] for rank in ranks if name in rank]
        if name in buffers and len(pieces) == len(ranks) and are_alike(piece.contents for piece in pieces):
            builder.add(SavedRank(), name, MODULE, source.save.main, pieces[0])
        elif name not in missing:
            missing.append(name)
    return missing


def _note_shared_by_stages(source: UniversalHeaders) -> list[str]:
    """Return a note on parameters of several pipeline stages, or no note.

    The converter keeps one stage's files; which one is arbitrary. Parameters that the checkpoint declares equal on all
    stages are excluded.
    """
    save = source.save
    stages = Counter(name for stage in range(save.pp) for name in save.model(stage * save.tp).owned)
    shared: tuple[Any, ...] = ()
    with suppress(MismatchError):
        shared = from_universal_info(save.model(0).hints.get(INFO)).shared
    copies = sorted(n for n, number in stages.items() if number > 1 and not any(match(n) for match in shared))
    text = "the converter kept the values of an arbitrary stage for parameters that several pipeline stages hold"
    return [f"{text}: {shorten(copies)}"] if copies else []


def _make_groups(source: UniversalHeaders, notes: list[str]) -> tuple[GroupInfo, ...]:
    """Return param groups with parameters; empty if those of pipeline stages differ."""
    hypers = source.optim.groups
    most = 0 if source.save.is_sharded else max(len(model.param_shapes or ()) for model in source.save.first_models)
    if max(len(hypers), most) > 1 and None in source.flats.values():
        differing = sorted({key for hyper in hypers for key in hyper if any(o.get(key) != hyper[key] for o in hypers)})
        known = f"the saved groups differ in {shorten(differing) or 'nothing'}" if hypers[1:] else "it has one group"
        notes.append(
            "the converter kept the param groups of the first pipeline stage alone, other stages have others: the "
            f"hyper-parameters of this run are kept ({known})"
        )
        return ()
    owners = source.optim.owners
    members: list[list[ParamKey]] = [[] for _ in hypers]
    for name, index in source.flats.items():
        members[0 if index is None or index >= len(owners) else owners[index]].append(ParamKey(name))
    return tuple(GroupInfo(tuple(names), hyper) for names, hyper in zip(members, hypers, strict=True))


def _read_patterns(source: UniversalHeaders) -> dict[str, dict[str, Any]]:
    """Return by parameter the pattern by which the converter joined its shards."""
    patterns = dict[str, dict[str, Any]]()
    for name in source.shapes if source.save.tp > 1 else ():
        master = source.params.get(name, {}).get(MASTER)
        if master and master.piece and (pattern := read_keys(master.keys, master.piece.shape)):
            patterns[name] = record_pattern(pattern)
    return patterns
