"""The tensors of experts in model states and in files of single experts, and the second names of tensors."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import chain

from ...errors import CheckpointError, UnsupportedError
from ...formats.deepspeed.builder import Builder, SavedRank
from ...formats.deepspeed.headers import FileBatch, FileHeader, Piece, batch_files, select_files
from ...formats.deepspeed.save import Save
from ...model import COPY, MODULE, PartitionedState, are_alike
from ...model.flat import Cut, join_parameters
from .autoep import find_router_aliases
from .files import ExpertFiles, find_compact
from .names import cut_number, read_name


def find_ties(experts: ExpertFiles, save: Save, header: FileHeader, module: Mapping[str, Piece]) -> dict[str, str]:
    """Find the ties of AutoEP's router, and of experts in model states, which keep those of a layer with a second name.

    These experts belong to the first expert-parallel rank, whose numbers are valid for the whole layer.

    Raises:
        UnsupportedError: no file of an expert has the same bytes.
    """
    numbered = {name: read.number for name in module if (read := read_name(name))} if experts.files else {}
    files = [(key[1], expert_header.layer or {}) for key, expert_header in experts.files.items()] if numbered else []
    model = header.model or save.model(0)
    ties = find_router_aliases(model.facts.get("placements", ()), model.module or {})
    for name, number in numbered.items():
        twins = [
            key
            for expert, tensors in files
            for key, piece in tensors.items()
            if expert == number and cut_number(key)[1] == cut_number(name)[1]
            if are_alike((piece.contents, module[name].contents))
        ]
        if not twins:
            raise UnsupportedError(
                f"holds {name}, which by its name is an expert's, but no file of a single expert has the same bytes. "
                "DeepSpeed itself can resume it in the topology that wrote it.",
                path=save.path(header),
            )
        ties[name] = twins[0]
    return ties


def add_tensors(
    experts: ExpertFiles,
    builder: Builder,
    optimized: set[str],
    tied: Collection[str],
) -> None:
    """Add the tensors of the experts' files; several tensor-parallel ranks may have files of one expert."""
    save, over_tp = builder.save, experts.is_over_tp(builder.save)
    seen: dict[str, Piece] = {}
    ranks = {mp: SavedRank(mp // save.tp, mp % save.tp) for *_, mp in experts.files}
    compact: dict[int, list[FileHeader]] = defaultdict(list)
    for (_, expert, mp), header in experts.files.items():
        _check_expert(save, header, expert)
        if not over_tp and find_compact(header):
            compact[mp].append(header)
        else:
            _add_expert(builder, ranks[mp], header, seen if over_tp else None, optimized)
    batches = batch_files(chain(*compact.values()))
    for mp, headers in compact.items():
        for batch in select_files(batches, headers):
            _add_batch(builder, ranks[mp], batch, optimized)


def _add_expert(
    builder: Builder, rank: SavedRank, header: FileHeader, seen: dict[str, Piece] | None, optimized: set[str]
) -> None:
    """Add the tensors of one expert's file.

    Args:
        seen: tensors that another tensor-parallel rank also has, which are compared; None if experts are cut.
    """
    tensors = header.layer or {}
    rank.unsharded.update(tensors if seen is not None else ())
    for name, piece in tensors.items():
        state = COPY if name in optimized else MODULE
        first = piece if seen is None else seen.setdefault(name, piece)
        if first is piece:
            builder.add(rank, name, state, header, piece)
        elif not are_alike((first.contents, piece.contents)):
            builder.add_repeated(rank, state, [Cut(name, 0, piece.numel, 0)], header, piece)


def _check_expert(save: Save, header: FileHeader, expert: int) -> None:
    """Raise CheckpointError if a file has tensors of another expert than in its file name."""
    compact = find_compact(header)
    for name in (header.layer or {}) if compact is None or compact[1] != expert else ():
        if (read := read_name(name)) is None or read.number != expert:
            raise CheckpointError(
                f"holds {name}, which is not of expert {expert}. The file "
                "belongs to another expert or run; put the right one back.",
                path=save.path(header),
            )


def _add_batch(builder: Builder, rank: SavedRank, batch: FileBatch, optimized: set[str]) -> None:
    """Add the tensors of experts' files with one template: each tensor as a buffer with a partition per file."""
    states, parts, headers = [], len(batch.headers), batch.headers
    names = list(zip(*(header.layer or {} for header in headers), strict=True))
    for piece, named in enumerate(names):
        first = batch.make_piece(piece)
        buffer = join_parameters(0, named, [first.shape] * parts, parts=parts, partition=first.numel)
        records = array("q", builder.number_records(batch, piece))
        storage = PartitionedState(buffer, first.dtype, records, array("q", batch.pick(piece, "start")))
        states.append((first.shape, {COPY: storage}, {MODULE: storage}))
    for place, (header, *local) in enumerate(zip(headers, *names, strict=True)):
        for name, (shape, copies, others) in zip(local, states, strict=True):
            builder.add_storage(rank, name, shape, place, copies if name in optimized else others, header)
