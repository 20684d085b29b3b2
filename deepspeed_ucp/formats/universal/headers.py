"""Read the headers of a folder of DeepSpeed's converter (``deepspeed/checkpoint/ds_to_universal.py``).

The converter writes a folder per parameter (joined over tensor-parallel ranks and partitions) and the optimizer's param
groups of rank 0, and copies the model states. It omits a pipeline's layer files, and thus buffers and frozen
parameters. Below stage 3 ``zero`` has 32-bit copies of the first tensor-parallel rank's frozen parameters, which are
ignored: the model states have the originals.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...comm import Comm
from ...errors import CheckpointError, shorten
from ...extensions.registry import find_for_fused
from ...io.paths import Entry, choose_map, is_url
from ...io.store import note_listed
from ...model import MODULE, strip_compiled
from ...model.wrappers import STAGE, find_wrapper
from ...tensor_parallel.layout import Shape
from ...torchsave.objects import TensorRef
from ...torchsave.torchfile import TorchFile, read_header
from ..deepspeed.compare import find_foreign_files
from ..deepspeed.files import MANIFEST, ZERO, scan_folder
from ..deepspeed.headers import FileHeader, OptimHeader, Piece
from ..deepspeed.reading import HeaderReader, as_stage, explain_form, read_file
from ..deepspeed.save import Save, arrange_headers, name_model_files
from ..findings import Finding, make_error
from ..places import FileTable
from .upstream import CAT_DIM, EQUAL_PARTS, VOCABULARY

OPTIMIZER = f"{ZERO}/optimizer_state.pt"
PARAM = "param"
_TEMPORARY = "tmp"


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
    """The headers of a converted folder.

    Attributes:
        save: the copied model states, without optimizer files.
        optim: the optimizer's param groups, at stage 3 with the states of data-parallel rank 0.
        stage: ZeRO stage of the source.
        params: folder in ``zero`` → state → file.
        shapes: parameter of the optimizer → local shape by tensor-parallel rank.
        flats: parameter of the optimizer → its flat buffer; None if unknown.
    """

    folder: str
    save: Save
    optim: OptimHeader
    stage: int
    params: dict[str, dict[str, ParamHeader]]
    shapes: dict[str, dict[int, Shape]]
    flats: dict[str, int | None]


def make_incomplete(folder: str, names: str) -> CheckpointError:
    """Return the error for missing files."""
    text = (
        f"lacks {names}: the conversion by ds_to_universal was interrupted, or the copy is not complete. Convert or "
        "copy again."
    )
    return CheckpointError(text, path=folder, kind="missing")


def read_headers(folder: str, sizes: dict[str, int], comm: Comm) -> UniversalHeaders:
    """Read the headers of a converted folder, each on one rank; collective."""
    entries = comm.once(lambda: _list_params(folder, sizes))
    note_listed(os.path.join(folder, ZERO), entries)  # any rank may read a file whose header another rank has read
    files = _sort_by_param(entries)
    names = [*files]
    params = comm.share(names, lambda name: _read_param(folder, name, files[name]), choose_map(folder))
    optim, stage = comm.once(lambda: _read_optimizer(folder))
    save = _read_models(folder, sizes, stage, comm)
    by_name = dict(zip(map(strip_compiled, names), params, strict=True))
    return UniversalHeaders(folder, save, optim, stage, by_name, *comm.run(lambda: _list_owned(save, optim)))


def _list_params(folder: str, sizes: Mapping[str, int]) -> dict[str, Entry]:
    """List ``zero``; in an object store, which lists a thousand files at once, including its subfolders."""
    if _TEMPORARY in sizes:
        raise CheckpointError(
            f"holds {_TEMPORARY}, where ds_to_universal keeps fragments while it works; the conversion was "
            "interrupted. Convert again; if it was run with --keep_temp_folder, remove that folder.",
            path=folder,
        )
    entries = scan_folder(os.path.join(folder, ZERO), deep=is_url(folder))
    params = _sort_by_param(entries)
    if not params or os.path.basename(OPTIMIZER) not in entries:
        lacking = OPTIMIZER if params else "every parameter's folder"
        raise make_incomplete(folder, lacking)
    return entries


def _sort_by_param(entries: Mapping[str, Entry]) -> dict[str, list[str]]:
    """Return the listed files by parameter."""
    by_param = defaultdict[str, list[str]](list)
    for name, entry in sorted(entries.items()):
        param, _, file = name.partition("/")
        if file or entry.is_folder:
            by_param[param] += [file] * bool(file)
    return dict(by_param)


def _read_param(folder: str, name: str, files: Sequence[str]) -> dict[str, ParamHeader]:
    """Read the headers of a parameter's files by state."""
    files = files or sorted(scan_folder(os.path.join(folder, ZERO, name)))
    if f"{MODULE}.pt" in files:
        text = (
            f"{folder}/{MANIFEST} is missing: {ZERO}/{name}/{MODULE}.pt was written by `ds_ucp convert`, which writes "
            "it last. Copy the whole folder, or convert again."
        )
        raise CheckpointError(text, findings=[Finding("missing", MANIFEST, text)])
    return {file[:-3]: _read_file(folder, f"{ZERO}/{name}/{file}") for file in files if file.endswith(".pt")}


def _read_file(folder: str, name: str) -> ParamHeader:
    """Read the header of a parameter's file."""
    path = os.path.join(folder, name)
    file = read_header(path)
    with explain_form(path):
        return _describe(file, name)


def _describe(file: TorchFile, name: str) -> ParamHeader:
    tree, header = file.tree, FileHeader(name, file.size, crc=file.header_crc)
    if isinstance(tree, dict):
        if PARAM not in tree:
            raise CheckpointError(
                f"has no {PARAM!r} but {sorted(map(str, tree))}; another kind of file.", path=file.path
            )
        keys = {key: tree[key] for key in (CAT_DIM, EQUAL_PARTS, VOCABULARY) if isinstance(tree.get(key), int)}
        piece = HeaderReader(file).piece(tree[PARAM], name)
        counts = (extension.count_fused(tree, piece.shape, file.path) for extension in find_for_fused(tree))
        return ParamHeader(header, piece, keys=keys, count=max(counts, default=0))
    if isinstance(tree, TensorRef):  # a step, or a flat tensor of stage 3 without tensor parallelism
        piece = HeaderReader(file).piece(tree, name)
        value, dtype = (None, "") if tree.data is None else (tree.item(), tree.dtype)
        return ParamHeader(header, piece, value, dtype)
    if isinstance(tree, (int, float)):
        return ParamHeader(header, value=tree)
    raise CheckpointError(f"holds a {type(tree).__name__}, neither a tensor nor a number.", path=file.path)


def _read_optimizer(folder: str) -> tuple[OptimHeader, int]:
    """Read the optimizer's header of a converted checkpoint, and the ZeRO stage of its source.

    For stage 3 it includes the states of data-parallel rank 0, else only the param groups.
    """
    path = os.path.join(folder, OPTIMIZER)
    file = read_header(path)
    with explain_form(path):
        tree = file.tree
        if not isinstance(tree, dict) or not isinstance(tree.get("param_groups"), list):
            raise CheckpointError("has no param_groups; it is no optimizer state of ds_to_universal.", path=path)
        reader = HeaderReader(file)
        if find_wrapper("zero3").saved(tree):
            return reader.read_optim(tree), 3
        wrapper = find_wrapper("zero12" if STAGE in tree else "bf16")
        header = reader.read_flat(tree, {"param_groups": tree["param_groups"]}, wrapper, [])
        return header, reader.read_field(tree, STAGE, as_stage) or 0


def _read_models(folder: str, sizes: dict[str, int], stage: int, comm: Comm) -> Save:
    """Read the copied model states of all ranks."""
    save, main = comm.run(lambda: _find_main(folder, sizes, stage))
    first = comm.once(lambda: read_file(folder, main))
    names = name_model_files(save, first)[1:]
    if absent := [name for name in names if name not in sizes]:
        raise make_incomplete(folder, shorten(absent))
    arrange_headers(save, [first, *comm.share(names, lambda name: read_file(folder, name), choose_map(folder))])
    error = make_error(find_foreign_files(save))
    if error is not None:
        raise error
    return save


def _find_main(folder: str, sizes: dict[str, int], stage: int) -> tuple[Save, str]:
    """Return the files by role, and the name of the first rank's model states."""
    save = Save.of(FileTable.of(folder, {name: Entry(size, 0.0) for name, size in sizes.items()}))
    main = save.names["model_zero3" if stage == 3 else "model"].get((0, 0))
    if main is None:
        wanted = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        raise make_incomplete(folder, f"{wanted}, which a checkpoint converted from stage {stage} has")
    return save, main


def _list_owned(save: Save, optim: OptimHeader) -> tuple[dict[str, dict[int, Shape]], dict[str, int | None]]:
    """Return shapes and flat buffers from ``param_shapes``, by group or (stage 3) by sub-group."""
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
