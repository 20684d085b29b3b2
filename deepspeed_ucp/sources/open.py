"""Opens a checkpoint folder: decides what it is, reads each header once over all ranks, builds the AtomicIndex."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..atoms import AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError, MismatchError, shorten
from .atomic import open_atomic
from .family import name_files
from .files import Listing, compare_listings, find_leftovers, holds_atoms, list_sizes, sort_files
from .headers import FileHeader
from .index import build_index, enabled
from .naming import GroupNames, NamedGroups
from .reading import read_file

logger = logging.getLogger("deepspeed_ucp")


def open_checkpoint(
    folder: str,
    comm: Comm,
    live_groups: GroupNames | None = None,
    live_hyper: Sequence[Mapping[str, Any]] = (),
    *,
    groups: NamedGroups | None = None,
    weights_only: bool = False,
) -> AtomicIndex:
    """Read the headers of a checkpoint folder (each file by one rank) into the atomic view; collective.

    An atomic checkpoint (with a manifest, or as DeepSpeed's ``ds_to_universal`` writes it) is opened as well.

    Args:
        folder: the tag's folder.
        comm: the ranks that load.
        live_groups: param groups of the live optimizer, which name the parameters of a stage-0 source.
        live_hyper: their hyper-parameters, which tell whether they are in the saved order.
        groups: what a stage-0 source's optimizer was given, without a live engine: ``"module"`` for
            ``model.parameters()`` in one group, or the names of each group's parameters in order.
        weights_only: the optimizer's states are not wanted, so that a stage-0 source needs no naming.

    Raises:
        CheckpointError: missing, damaged, foreign or differing files; the same error on every rank.
        UnsupportedError: a kind of checkpoint that is not covered.
        MismatchError: stage 0 with other param groups than the live ones.
    """
    sizes = _list_everywhere(folder, comm)
    if holds_atoms(sizes):
        return open_atomic(folder, comm, sizes)
    listing = Listing(folder, sizes)
    with comm.together():
        listing = sort_files(folder, sizes)
    first = _read_first(listing, comm)
    headers = _read_rest(listing, first, comm)
    with comm.together():
        try:
            return build_index(listing, headers, live_groups, live_hyper, groups=groups)
        except MismatchError:
            if not weights_only:
                raise
            return build_index(listing, headers, live_groups, optimizer=False)


def _list_everywhere(folder: str, comm: Comm) -> dict[str, int]:
    """Every rank lists the folder. Digests are compared first: whole listings of thousands of ranks are long."""
    with comm.together():
        sizes = list_sizes(folder)
    digest = hashlib.sha256(repr(sorted(sizes.items())).encode()).digest()
    if len(set(comm.gather(digest))) > 1:
        listings = comm.gather(sizes)
        with comm.together():
            compare_listings(folder, listings)
    return sizes


def _read_first(listing: Listing, comm: Comm) -> list[FileHeader]:
    """Rank 0 finds out what the folder holds from one model file and one optimizer file."""
    found: list[FileHeader] = []
    with comm.together():
        if comm.rank == 0:
            found = _choose(listing)
    return comm.broadcast(found)  # type: ignore[no-any-return]


def _choose(listing: Listing) -> list[FileHeader]:
    """The model header and, where there is one, dp rank 0's optimizer header, of the checkpoint in the folder."""
    candidates = []
    plain = read_file(listing.folder, listing.model[0]) if 0 in listing.model else None
    sharded = read_file(listing.folder, listing.model_zero3[0, 0]) if (0, 0) in listing.model_zero3 else None
    shard = _read_shard0(listing, plain, ("zero12", "bf16"))
    if plain and plain.model and plain.model.optim and plain.model.optim.kind != "bf16":
        candidates.append([plain])  # shards of ZeRO 1/2 beside it lost their model file to it: leftovers
    elif plain and shard:
        candidates.append([plain, shard])
    shard = _read_shard0(listing, sharded, ("zero3",))
    if sharded and shard:
        candidates.append([sharded, shard])
    if len(candidates) > 1:
        raise CheckpointError(
            f"{listing.folder}: holds the files of two saves ({candidates[0][0].name} and {candidates[1][-1].name} do "
            "not belong together). Remove the older save's files."
        )
    if candidates:
        return candidates[0]
    if plain and plain.model and (plain.model.module or listing.layers) and not listing.optim:
        return [plain]  # the weights alone: enough for load_optimizer_states=False
    raise CheckpointError(
        f"{listing.folder}: the optimizer states that go with {_first_name(plain, sharded)} are missing "
        f"({shorten(sorted(listing.sizes))}). Copy the whole folder, or load with load_optimizer_states=False where "
        "the model states hold the weights (ZeRO 0-2)."
    )


def _first_name(*headers: FileHeader | None) -> str:
    return next((header.name for header in headers if header), "the model states")


def _read_shard0(listing: Listing, model: FileHeader | None, kinds: tuple[str, ...]) -> FileHeader | None:
    """Dp rank 0's optimizer file that goes with a model file."""
    if model is None:
        return None
    for prefix in _prefixes(listing, model):
        name = listing.optim.get((prefix, 0, 0))
        header = read_file(listing.folder, name) if name else None
        if header and header.optim and header.optim.kind in kinds:
            return header
    return None


def _prefixes(listing: Listing, model: FileHeader) -> list[str]:
    """Prefixes of optimizer files, the saved precision's own first (engine.py ``_get_zero_ckpt_prefix``)."""
    config = model.model.config if model.model else {}
    expected = "bf16_" if enabled(config, "bf16", "bfloat16") else ""
    others = sorted({prefix for prefix, _, _ in listing.optim} - {expected})
    return [expected, *others]


def _read_rest(listing: Listing, first: list[FileHeader], comm: Comm) -> list[FileHeader]:
    """The other shards' headers, each read by one rank; the first ones in front."""
    with comm.together():
        names = name_files(listing, first)
    mine: list[FileHeader] = []
    with comm.together():
        further = {name for (_, rank), name in listing.model_zero3.items() if rank}
        mine = [
            _slim(read_file(listing.folder, name), first[0], repeats=name in further)
            for name in names[comm.rank :: comm.size]
        ]
    by_name = {header.name: header for part in comm.gather(mine) for header in part}
    headers = first + [by_name[name] for name in names]
    if comm.rank == 0 and (left := find_leftovers(listing, [header.name for header in headers])):
        logger.warning("%s: ignoring files of an earlier save: %s", listing.folder, shorten(left))
    return headers


def _slim(header: FileHeader, first: FileHeader, *, repeats: bool) -> FileHeader:
    """A header without what the first ranks' headers tell as well (``repeats``): headers travel to all ranks."""
    model = header.model
    if model is None or first.model is None:
        return header
    hints = {} if model.hints == first.model.hints else model.hints
    if repeats:
        model = replace(model, module={}, buffers=(), param_shapes=(), shared={})
        hints = {}
    return replace(header, model=replace(model, hints=hints, others=()))
