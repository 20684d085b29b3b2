"""Headers of a folder that DeepSpeed's converter (``deepspeed/checkpoint/ds_to_universal.py``) wrote.

It writes a folder per parameter (tensor-parallel shards united, ZeRO's partitions joined), the optimizer's param groups
as rank 0 had them, and copies the model states. It leaves a pipeline's layer files behind, and with them buffers and
frozen parameters; below stage 3 it puts 32-bit copies of the first tensor-parallel rank's into ``zero``, which are
passed over: the model states have the originals.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...atoms import MODULE, strip_compiled
from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ...experts import holds_experts
from ...io.filesystems import choose_map
from ...io.paths import Entry, is_url
from ...io.store import note_listed
from ...patterns.layout import Shape
from ...torchsave.objects import TensorRef
from ...torchsave.torchfile import TorchFile, read_header
from ...wrappers import STAGE, find_wrapper
from ..compare import find_foreign_files
from ..files import MANIFEST, ZERO, Listing, scan_folder, sort_files
from ..findings import Finding, make_error
from ..headers import FileHeader, OptimHeader, Piece
from ..reading import HeaderReader, as_stage, explain_form, read_file
from ..save import Save, arrange, name_model_files
from .upstream import CAT_DIM, EQUAL_PARTS, EXPERTS, IS_EXPERT, VOCABULARY

OPTIMIZER = f"{ZERO}/optimizer_state.pt"
PARAM = "param"
_TEMPORARY = "tmp"


@dataclass(frozen=True, slots=True)
class ParamHeader:
    """One file of a parameter's folder.

    Attributes:
        file: the file itself; its name is relative to the checkpoint's folder.
        piece: its tensor; None in ``step.pt``.
        value, dtype: its number, with the dtype where it is a 0-dim tensor.
        keys: how the converter says that it united the tensor.
        experts: of a layer of AutoEP's, whose parameters lie in it one behind the other; 0 of any other parameter.
    """

    file: FileHeader
    piece: Piece | None = None
    value: Any = None
    dtype: str = ""
    keys: dict[str, Any] = field(default_factory=dict)
    experts: int = 0


@dataclass(frozen=True, slots=True)
class UniversalHeaders:
    """What a converted folder's headers say.

    Attributes:
        save: the copied model states, without optimizer files.
        optim: the optimizer's param groups, of stage 3 with data-parallel rank 0's states.
        stage: ZeRO stage of the source.
        params: per folder in ``zero`` its files by state.
        shapes: of the parameters that the optimizer owned, local ones by tensor-parallel rank.
        flats: per such parameter the flat buffer that it was in; None where that cannot be told.
    """

    folder: str
    save: Save
    optim: OptimHeader
    stage: int
    params: dict[str, dict[str, ParamHeader]]
    shapes: dict[str, dict[int, Shape]]
    flats: dict[str, int | None]


def read_headers(folder: str, sizes: dict[str, int], comm: Comm) -> UniversalHeaders:
    """All headers of a converted folder, each read by one rank; collective.

    Args:
        folder: the checkpoint's folder.
        sizes: what it holds.
        comm: the ranks that load.

    Raises:
        CheckpointError: half-made, damaged, or of several runs.
        UnsupportedError: a kind that is not covered.
    """
    held = comm.once(lambda: _list_params(folder, sizes))
    note_listed(os.path.join(folder, ZERO), held)  # each file's header is read by one rank, its bytes by any
    files = _sort_by_param(held)
    names = [*files]
    params = comm.share(names, lambda name: _read_param(folder, name, files[name]), choose_map(folder))
    optim, stage = comm.once(lambda: _read_optimizer(folder))
    save = _read_models(folder, sizes, stage, comm)
    by_name = dict(zip(map(strip_compiled, names), params, strict=True))
    return UniversalHeaders(folder, save, optim, stage, by_name, *comm.run(lambda: _list_owned(save, optim)))


def _list_params(folder: str, sizes: Mapping[str, int]) -> dict[str, Entry]:
    """What lies in ``zero``, by name; of a store, which tells a thousand files at once, what lies in its folders too.

    Raises:
        CheckpointError: the conversion was not finished.
    """
    if _TEMPORARY in sizes:
        raise CheckpointError(
            f"holds {_TEMPORARY}, where ds_to_universal keeps fragments while it works; the conversion was "
            "interrupted. Convert again; if it was run with --keep_temp_folder, remove that folder.",
            path=folder,
        )
    held = scan_folder(os.path.join(folder, ZERO), deep=is_url(folder))
    found = _sort_by_param(held)
    if not found or os.path.basename(OPTIMIZER) not in held:
        lacking = OPTIMIZER if found else "every parameter's folder"
        raise CheckpointError(
            f"{lacking} is missing; the conversion by ds_to_universal was interrupted, or the copy is not "
            "complete. Convert or copy again.",
            path=folder,
            kind="missing",
        )
    return held


def _sort_by_param(held: Mapping[str, Entry]) -> dict[str, list[str]]:
    """By parameter the names of its files, as far as they are listed."""
    found = defaultdict[str, list[str]](list)
    for name, entry in sorted(held.items()):
        param, _, file = name.partition("/")
        if file or entry.is_folder:
            found[param] += [file] * bool(file)
    return dict(found)


def _read_param(folder: str, name: str, files: Sequence[str]) -> dict[str, ParamHeader]:
    """The headers of a parameter's files by state.

    Args:
        files: their names; empty where they are not listed yet.
    """
    files = files or sorted(scan_folder(os.path.join(folder, ZERO, name)))
    if f"{MODULE}.pt" in files:
        text = (
            f"{folder}/{MANIFEST} is missing: {ZERO}/{name}/{MODULE}.pt was written by `ds_ucp convert`, which writes "
            "it last. Copy the whole folder, or convert again."
        )
        raise CheckpointError(text, findings=[Finding("missing", MANIFEST, text)])
    return {file[:-3]: _read_file(folder, f"{ZERO}/{name}/{file}") for file in files if file.endswith(".pt")}


def _read_file(folder: str, name: str) -> ParamHeader:
    """The header of a parameter's file.

    Raises:
        CheckpointError: damaged, or no tensor.
        UnsupportedError: an expert's parameter.
    """
    path = os.path.join(folder, name)
    file = read_header(path)
    with explain_form(path):
        return _describe(file, name)


def _describe(file: TorchFile, name: str) -> ParamHeader:
    tree, header = file.tree, FileHeader(name, file.size, crc=file.crc)
    if isinstance(tree, dict):
        if PARAM not in tree:
            raise CheckpointError(
                f"has no {PARAM!r} but {sorted(map(str, tree))}; another kind of file.", path=file.path
            )
        keys = {key: tree[key] for key in (CAT_DIM, EQUAL_PARTS, VOCABULARY) if isinstance(tree.get(key), int)}
        piece = HeaderReader(file).piece(tree[PARAM], name)
        return ParamHeader(header, piece, keys=keys, experts=_count_experts(file, tree, piece))
    if isinstance(tree, TensorRef):  # a step, or of stage 3 without tensor parallelism: flat, without a dict
        piece = HeaderReader(file).piece(tree, name)
        value, dtype = (None, "") if tree.data is None else (tree.item(), tree.dtype)
        return ParamHeader(header, piece, value, dtype)
    if isinstance(tree, (int, float)):
        return ParamHeader(header, value=tree)
    raise CheckpointError(f"holds a {type(tree).__name__}, neither a tensor nor a number.", path=file.path)


def _count_experts(file: TorchFile, tree: Mapping[Any, Any], piece: Piece) -> int:
    """Of an expert's parameter, which holds those of all experts of a layer, how many that are."""
    count = tree.get(EXPERTS)
    if not tree.get(IS_EXPERT):
        return 0
    if type(count) is not int or not holds_experts(piece.shape, count):
        raise UnsupportedError(
            f"is of {count!r} experts and holds {piece.shape}, which is not supported.", path=file.path
        )
    return count


def _read_optimizer(folder: str) -> tuple[OptimHeader, int]:
    """The optimizer's part of a converted checkpoint, and the ZeRO stage that it came from.

    Stage 3's still has all of data-parallel rank 0's states; of the others the param groups remain.

    Raises:
        CheckpointError: damaged, or of another kind.
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
    """The copied model states of every rank.

    Raises:
        CheckpointError: some are missing or belong to another run.
    """
    listing, main = comm.run(lambda: _find_main(folder, sizes, stage))
    first = comm.once(lambda: read_file(folder, main))
    # Experts' files it does not copy.
    names = [name for name in name_model_files(listing, first)[1:] if name not in listing.experts.values()]
    if absent := [name for name in names if name not in sizes]:
        raise CheckpointError(
            f"{shorten(absent)} missing; the conversion was interrupted or the copy is not complete. Convert "
            "or copy again.",
            path=folder,
            kind="missing",
        )
    save = arrange(listing, [first, *comm.share(names, lambda name: read_file(folder, name), choose_map(folder))])
    error = make_error(find_foreign_files(save))
    if error is not None:
        raise error
    return save


def _find_main(folder: str, sizes: dict[str, int], stage: int) -> tuple[Listing, str]:
    """What the folder holds, and the model states of the first rank."""
    listing = sort_files(folder, sizes)
    main = listing.model_zero3.get((0, 0)) if stage == 3 else listing.model.get(0)
    if main is None:
        wanted = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        raise CheckpointError(
            f"{wanted} is missing, which a checkpoint converted from stage {stage} has. The conversion was "
            "interrupted, or the copy is not complete. Convert or copy again.",
            path=folder,
            kind="missing",
        )
    return listing, main


def _list_owned(save: Save, optim: OptimHeader) -> tuple[dict[str, dict[int, Shape]], dict[str, int | None]]:
    """``param_shapes`` of all model-parallel ranks: per group below stage 3, per sub-group there."""
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
                is_told = len(model.param_shapes) == len(optim.owners)
                flats.setdefault(strip_compiled(name), index if is_told else None)
    return shapes, flats
