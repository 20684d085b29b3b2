"""Folders that DeepSpeed's converter (``deepspeed/checkpoint/ds_to_universal.py``) wrote → the atomic view.

It writes a folder per parameter (tensor-parallel shards united, ZeRO's partitions joined), the optimizer's param groups
as rank 0 had them, and copies the model states. It leaves a pipeline's layer files behind, and with them buffers and
frozen parameters; below stage 3 it puts 32-bit copies of the first tensor-parallel rank's into ``zero``, which are
passed over: the model states have the originals.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...atoms import MODULE, AtomicIndex, strip_compiled
from ...comm import Comm
from ...errors import CheckpointError
from ..family import Save, arrange, find_strangers, name_model_files
from ..files import MANIFEST, ZERO, Listing, sort_files
from ..findings import WARNING, Finding, make_error
from ..reading import read_file
from .paramfile import ParamHeader, UniversalHeaders, read_optimizer_file, read_param_file
from .united import build_united

OPTIMIZER = f"{ZERO}/optimizer_state.pt"
_TEMPORARY = "tmp"


def open_universal(folder: str, sizes: dict[str, int], comm: Comm) -> tuple[AtomicIndex, list[Finding]]:
    """The index of a folder that ``ds_to_universal`` wrote, and warnings; each header is read by one rank; collective.

    Args:
        folder: the checkpoint's folder.
        sizes: what it holds.
        comm: the ranks that load.

    Raises:
        CheckpointError: half-made, damaged, or of several runs.
        UnsupportedError: a kind that is not covered.
    """
    params = comm.once(lambda: _list_params(folder, sizes))
    parts = comm.each(lambda: {name: _read_param(folder, name) for name in params[comm.rank :: comm.size]})
    gathered = {name: held for part in parts for name, held in part.items()}
    optim, stage = comm.once(lambda: read_optimizer_file(folder, OPTIMIZER))
    save = _read_models(folder, sizes, stage, comm)
    part = UniversalHeaders(folder, save, optim, stage, {strip_compiled(name): gathered[name] for name in params})
    index, notes = comm.run(lambda: build_united(part))
    return index, [Finding("dropped", "", f"{folder}: {note}", WARNING) for note in notes]


def _list_params(folder: str, sizes: Mapping[str, int]) -> list[str]:
    """The parameters' folders.

    Raises:
        CheckpointError: the conversion was not finished.
    """
    if _TEMPORARY in sizes:
        raise CheckpointError(
            f"{folder}: holds {_TEMPORARY}, where ds_to_universal keeps fragments while it works; the conversion was "
            "interrupted. Convert again; if it was run with --keep_temp_folder, remove that folder."
        )
    try:
        with os.scandir(os.path.join(folder, ZERO)) as entries:
            found = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        raise CheckpointError(f"{folder}/{ZERO}: cannot be listed ({error.strerror or error}).") from error
    if not found or not os.path.isfile(os.path.join(folder, OPTIMIZER)):
        lacking = OPTIMIZER if found else "every parameter's folder"
        raise CheckpointError(
            f"{folder}: {lacking} is missing; the conversion by ds_to_universal was interrupted, or the copy is not "
            "complete. Convert or copy again."
        )
    return found


def _read_param(folder: str, name: str) -> dict[str, ParamHeader]:
    """The headers of a parameter's files by state."""
    try:
        files = sorted(os.listdir(os.path.join(folder, ZERO, name)))
    except OSError as error:
        raise CheckpointError(f"{folder}/{ZERO}/{name}: cannot be listed ({error.strerror or error}).") from error
    if f"{MODULE}.pt" in files:
        raise CheckpointError(
            f"{folder}/{MANIFEST} is missing: {ZERO}/{name}/{MODULE}.pt was written by `ds_ucp convert`, which writes "
            "it last. Copy the whole folder, or convert again."
        )
    return {file[:-3]: read_param_file(folder, f"{ZERO}/{name}/{file}") for file in files if file.endswith(".pt")}


def _read_models(folder: str, sizes: dict[str, int], stage: int, comm: Comm) -> Save:
    """The copied model states of every rank, each header read by one rank.

    Raises:
        CheckpointError: some are missing or belong to another run.
    """
    listing = comm.run(lambda: _sort(folder, sizes, stage))
    first = comm.once(lambda: read_file(folder, _first_name(listing, stage)))
    names = comm.run(lambda: name_model_files(listing, first))
    parts = comm.each(lambda: [read_file(folder, name) for name in names[comm.rank :: comm.size]])
    by_name = {header.name: header for part in parts for header in part}
    save = arrange(listing, [first, *(by_name[name] for name in names)])
    error = make_error(find_strangers(save))
    if error is not None:
        raise error
    return save


def _sort(folder: str, sizes: dict[str, int], stage: int) -> Listing:
    listing = sort_files(folder, sizes)
    if (stage == 3 and (0, 0) not in listing.model_zero3) or (stage < 3 and 0 not in listing.model):
        wanted = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        raise CheckpointError(
            f"{folder}: {wanted} is missing, which a checkpoint converted from stage {stage} has. The conversion was "
            "interrupted, or the copy is not complete. Convert or copy again."
        )
    return listing


def _first_name(listing: Listing, stage: int) -> str:
    return listing.model_zero3[0, 0] if stage == 3 else listing.model[0]
