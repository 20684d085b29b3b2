"""Mixture-of-experts in a save of DeepSpeed."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from ...errors import CheckpointError, UnsupportedError
from ...formats.deepspeed.builder import Builder, SavedRank
from ...formats.deepspeed.files import Key, read_model_rank, read_shard_ranks, scan_folder, sort_roles, strip_writer
from ...formats.deepspeed.headers import FileBatch, FileHeader, Piece, batch_files, select_files
from ...formats.deepspeed.reading import as_list
from ...formats.deepspeed.save import Save, find_degrees
from ...formats.deepspeed.zero import GroupShare
from ...formats.findings import Finding
from ...model.flat import Cut, Shape, join_parameters
from ...model.index import AtomicIndex
from ...model.storage import COPY, MASTER, MODULE, AtomKey, PartitionedState, are_alike, strip_compiled
from ...model.topology import is_enabled
from ...model.wrappers import Form
from ..registry import SaveExtension
from . import stage0
from .autoep import find_router_aliases, read_folding, read_placements
from .files import (
    ROLES,
    ExpertFiles,
    align_save,
    complete_header,
    count_tp_shards,
    find_compact,
    infer_degrees,
    list_holders,
    name_experts_files,
    name_optims,
    name_unwritten_models,
)
from .names import count_experts, cut_number, find_expert, find_layer, is_expert, name_experts, read_name

_MOST_ENTRIES = 2_000_000  # of a list of layers, and experts of a layer

_NEVER_SAVED = (
    "DeepSpeed writes no model states of a tensor-parallel rank if a rank before it holds the same experts, and the "
    "other parameters of such a rank are lost. Save with at least as many expert-parallel ranks as tensor-parallel "
    "ones and without use_data_before_expert_parallelism, or with expert tensor parallelism."
)


class SavedExperts(ExpertFiles, SaveExtension):
    """A save with experts."""

    is_uneven = True
    name_optimizers = stage0.name_optimizers
    add_optimizers = stage0.add_optimizers

    # -- the files of a save

    def read_facts(
        self, tree: Mapping[Any, Any], read: Callable[[str, Callable[[Any], Any]], Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the facts in a state file, and the writing rank that AutoEP records.

        Returns:
            ``experts``: number of experts of each layer; ``placements``: prefix of the experts' parameter names →
            placement, for AutoEP's layers. ``folding``: (tensor-parallel, expert-parallel) rank, under AutoTP;
            ``ep_rank``: expert-parallel rank, in model states.
        """
        key = "ds_autoep_layers" if "ds_autoep_layers" in tree else "autoep_layers"
        layers = as_list(tree.get(key))
        placements = read(key, lambda value: read_placements(as_list(value)))
        facts = {"experts": read("num_experts", _read_counts), "placements": placements}
        return facts, {
            "folding": read("folding", read_folding),
            "ep_rank": layers[0].get("ep_rank") if layers else None,
        }

    def open_save(self, save: Save, find: Callable[[str, Iterable[Key]], FileHeader | None] | None) -> None:
        """Add the names of the experts' files.

        Complete the header of the first rank's model states, and read those of later pipeline stages.
        """
        chosen = {strip_writer(name): name for name in save.where.entries if name not in save.copies}
        save.names |= sort_roles(ROLES, chosen)
        model, optims = save.first[0].model, save.names["expert_optim"]
        if find is None or model is None or not model.facts["experts"]:
            return
        optim = save.first[1] if save.first[1:] else find("expert_optim", (key for key in optims if key[0] == 0))
        save.first[0] = first = infer_degrees(save, complete_header(save.first[0], optim), find)
        if first.model and first.model.module is not None:
            pp, tp = find_degrees(save, first.model)
            keys = [(mp, 0) for mp in range(tp, pp * tp, tp) if (mp, 0) in save.names["model"]]
            self.stages = [header for key in keys if (header := find("model", [key]))]

    def name_files(self, save: Save) -> dict[str, str]:
        """Name the experts' files and, with a reason, model states that are not written.

        ZeRO 3 has experts in the model states.
        """
        unwritten = dict.fromkeys(name_unwritten_models(save), _NEVER_SAVED)
        return unwritten | dict.fromkeys(self._name_expert_files(save), "")

    def _name_expert_files(self, save: Save) -> Iterator[str]:
        first = save.first
        model = first[0].model
        if model is None or not model.facts["experts"] or read_shard_ranks(first[0].name) is not None:
            return
        _, tp = find_degrees(save, model)
        tp_shards = count_tp_shards(save, tp)
        for stage, header in enumerate([first[0], *self.stages]):
            model_ranks = range(stage * tp, (stage + 1) * tp)
            yield from name_experts_files(
                save, header.model.facts.get("experts", ()) if header.model else (), model_ranks, tp_shards
            )
            if header.model and (len(first) == 1 or header.model.optim):
                yield from name_optims(save, header.model.optim, model_ranks, tp_shards)

    def arrange(self, save: Save, headers: Mapping[str, FileHeader]) -> list[Finding]:
        """Take the experts' headers, align param groups, and complete model states."""
        align_save(save)
        for role in ROLES:
            names = sorted(save.names[role].items())
            save.further[role] = {key: headers[name] for key, name in names if name in headers}
        self.files, self.optims = save.further["expert"], save.further["expert_optim"]
        for mp, models in enumerate(save.models):
            optim_headers = [*save.shards[mp], *(header for (rank, _), header in self.optims.items() if rank == mp)]
            models[:1] = [complete_header(header, *optim_headers[:1]) for header in models[:1]]
        self.tp_shards = count_tp_shards(save, save.tp)
        return []

    def verify_save(self, save: Save, comm: Any) -> list[Finding]:
        facts, file = save.model(0).facts, save.main
        if not (is_enabled(file.config, "expert_parallel") and facts["experts"] and not facts["placements"]):
            return []
        text = (
            f"{save.path(file)}: is a mixture-of-experts checkpoint of AutoEP without a placement of the experts, "
            "which this release does not convert. DeepSpeed itself can resume it in the topology that wrote it."
        )
        return [Finding("unsupported", file.name, text)]

    def describe_own_files(self, tree: Mapping[str, Any], path: str) -> dict[str, Any]:
        layers = tree.get("ds_autoep_layers", tree.get("autoep_layers")) or []
        pattern, make_key, _ = ROLES["expert_optim"]
        ranks = [make_key(match)[0] for match in map(pattern.fullmatch, scan_folder(os.path.dirname(path))) if match]
        return {
            "experts per layer": as_list(tree.get("num_experts")),
            "expert-parallel ranks": ranks.count(read_model_rank(os.path.basename(path))),
            "AutoEP placement": [layer.get("expert_placement") for layer in layers],
        }

    # -- the index

    def list_group_files(self, save: Save, mp: int, group: int) -> list[FileHeader]:
        """Return a stage's optimizer files if a group's experts are spread over TP ranks."""
        first = save.shards[mp][0].optim
        if self.is_over_tp(save) and first and group < len(first.groups) and first.groups[group].get("moe"):
            return [save.shard(mp // save.tp, rank) for rank in range(save.dp * save.tp)]
        return []

    def find_shapes(self, save: Save, mp: int, name: str) -> set[Shape]:
        """Return the shapes that files of single experts imply for a rank's parameter."""
        files = [header for (_, _, rank), header in self.files.items() if rank in self.list_sharing(save, mp)]
        pieces = {key: piece for header in files for key, piece in (header.layer or {}).items()}
        placements = {
            strip_compiled(layer): experts for layer, experts in save.model(mp).facts.get("placements", {}).items()
        }
        if layer := find_layer(name, placements):
            fused = [piece for key, piece in pieces.items() if key.rpartition(".")[0] == name]
            return {(len(numbers), *piece.shape) for numbers in placements[layer] for piece in fused}
        wanted = cut_number(name)
        return {piece.shape for key, piece in pieces.items() if find_expert(key) and cut_number(key) == wanted}

    def assign_group(self, save: Save, mp: int, number: int, group: Sequence[tuple[str, Shape]]) -> list[GroupShare]:
        """Determine which ranks hold which experts of a group.

        The model states number each rank's experts from 0. The number of experts on a rank follows from the experts'
        files, as a group may lack frozen ones. Without experts the result is empty.

        Raises:
            CheckpointError: the number of files or AutoEP's placement contradict the group.
        """
        placements, optim = save.model(mp).facts.get("placements", {}), save.shards[mp][0].optim
        counts = optim.partition_count if optim else ()
        expert_counts = count_experts(name for name, _ in group) if self.files else {}
        if not expert_counts and not any(find_layer(name, placements) for name, _ in group):
            return []
        over_tp = self.is_over_tp(save)
        replicas = counts[number] if number < len(counts) else save.dp
        holders = _find_holders(save, mp, replicas, over_tp=over_tp)
        _check_placements(save, mp, group, len(holders))
        numbers: dict[str, Sequence[Sequence[int]]] = {
            layer: [range(index * share, (index + 1) * share) for index in range(len(holders))]
            for layer, share in _count_on_rank(save, expert_counts, self.counts, len(holders)).items()
        }
        numbers |= {layer: placement for layer, placement in placements.items() if placement}
        local, is_named = dict(group), over_tp or len(holders) > 1
        named = [
            name_experts(name, shape, numbers[layer])
            if (layer := find_layer(name, numbers))
            else [{name: shape}] * len(holders)
            for name, shape in group
        ]
        shares = []
        for index, (ranks, *parts) in enumerate(zip(holders, *named, strict=True)):
            if over_tp or (save.is_sharded and is_named):
                _check_writers(save, mp // save.tp, index, ranks, over_tp=over_tp)
            shares.append(GroupShare(ranks, local, dict(zip(local, parts, strict=True)), over_tp, is_named))
        return shares

    def find_ties(self, save: Save, header: FileHeader, module: Mapping[str, Piece]) -> dict[str, str]:
        """Find the ties of AutoEP's router, and of experts in model states.

        Model states keep the experts of a layer with a second name. They belong to the first expert-parallel rank,
        whose numbers are valid for the whole layer. ``shared_params`` lacks a second name below the same parent.

        Raises:
            UnsupportedError: not exactly one layer has the same bytes in its experts' files.
        """
        model = header.model or save.model(0)
        owned = {strip_compiled(name) for group in model.param_shapes or () for name, _ in group}
        aliases = find_router_aliases(model.facts.get("placements", ()), model.module or {})
        ties = {alias: name for alias, name in aliases.items() if not {*map(strip_compiled, (alias, name))} <= owned}
        named: dict[str, dict[str, Piece]] = defaultdict(dict)
        for name, piece in module.items() if self.files else ():
            if name not in save.model(0).shared and (read := read_name(name)):
                named[read.layer][name.removeprefix(read.layer)] = piece
        saved: dict[str, dict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        for expert in self.files.values() if named else ():
            for name, piece in (expert.layer or {}).items():
                layer = cut_number(name)[0]
                saved[layer][name.removeprefix(layer)].append(piece)
        for layer, pieces in named.items():
            twins = [twin for twin, parts in saved.items() if _are_same(pieces, parts)]
            trained = next((end for end in pieces if strip_compiled(f"{layer}{end}") in owned), None)
            if trained is not None or len(twins) != 1:
                holders = f"the experts of {', '.join(twins)} have" if twins else "no layer of experts has"
                fault = f"{holders} the same bytes" if trained is None else "the optimizer has it under this name"
                raise UnsupportedError(
                    f"holds {layer}{trained or next(iter(pieces))}, which by its name is an expert's, but {fault}. "
                    "DeepSpeed itself can resume it in the topology that wrote it.",
                    path=save.path(header),
                )
            ties |= {f"{layer}{end}": f"{twins[0]}{end}" for end in pieces}
        return ties

    def add_tensors(self, builder: Builder, optimized: set[str], tied: Collection[str]) -> None:
        """Add the tensors of the experts' files; tensor-parallel ranks may share experts."""
        save, over_tp = builder.save, self.is_over_tp(builder.save)
        seen: dict[str, Piece] = {}
        ranks = {mp: SavedRank(mp // save.tp, mp % save.tp) for *_, mp in self.files}
        compact: dict[int, list[FileHeader]] = defaultdict(list)
        for (_, expert, mp), header in self.files.items():
            layer_and_expert = find_compact(header)
            if layer_and_expert is None or layer_and_expert[1] != expert:
                _check_expert(save, header, expert)
            if not over_tp and layer_and_expert:
                compact[mp].append(header)
            else:
                _add_expert(builder, ranks[mp], header, seen if over_tp else None, optimized)
        batches = batch_files(chain(*compact.values()))
        for mp, headers in compact.items():
            for batch in select_files(batches, headers):
                _add_batch(builder, ranks[mp], batch, optimized)

    def complete_index(self, index: AtomicIndex, builder: Builder) -> AtomicIndex:
        unnoticed = (*index.unnoticed, *self._list_unnoticed(index, builder))
        return replace(index, unnoticed=unnoticed, fused=self._count_fused(builder.save, index.atoms))

    def _list_unnoticed(self, index: AtomicIndex, builder: Builder) -> Iterator[str]:
        """Describe state that DeepSpeed's load silently restores wrongly."""
        topology = index.topology
        if self.optims and not builder.save.main.config and topology.precision == "float32":
            yield "states of experts' optimizers, which DeepSpeed looks for in the model states alone"
        if any(map(is_expert, builder.aliases)):
            yield "tied experts, which DeepSpeed's load replaces by those of the first rank"
        if topology.traits.form is Form.PARTITIONS and any(
            "expert" in param.name
            and not any(COPY in storage.states for storage in storages)
            and any(MASTER in storage.states for storage in storages)
            for param, storages in index.atoms.storages.items()
        ):
            yield (
                "weights that the model states lack, since DeepSpeed takes all below a module named 'expert' for "
                "experts"
            )

    def _count_fused(self, save: Save, atoms: Iterable[AtomKey]) -> dict[str, int]:
        """Return AutoEP's fused parameters → number of experts in each."""
        counts = {
            strip_compiled(layer): sum(map(len, numbers))
            for layer, numbers in save.model(0).facts.get("placements", {}).items()
        }
        if not counts:
            return {}
        names = [key.name.rpartition(".")[0] for key in atoms if is_expert(key.name)]
        return {name: counts[layer] for name in names if (layer := name[: name.rfind(".") + 1]) in counts}


def _read_counts(value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(count for count in value if isinstance(count, int) and 0 < count <= _MOST_ENTRIES)
    # Older releases write one number for all layers, or 1 or 0 without experts.
    return (value,) if isinstance(value, int) and 1 < value <= _MOST_ENTRIES else ()


def _check_writers(save: Save, stage: int, ep_index: int, ranks: range, *, over_tp: bool) -> None:
    """Verify the rank that AutoEP recorded in each file of an expert-parallel rank.

    Under ZeRO 3 such a save has no copies of the experts to compare.
    """
    for rank in ranks:
        shard, header = save.shard(stage, rank), save.models[stage * save.tp + rank % save.tp]
        folding = shard.writer.get("folding")
        if over_tp and folding not in (None, (rank % save.tp, ep_index)):
            raise CheckpointError(
                f"is of tensor- and expert-parallel rank {folding}, but its name and the degrees require "
                f"{(rank % save.tp, ep_index)}. The file belongs to another run; put the right one back.",
                path=save.path(shard),
            )
        if save.is_sharded and (ep_rank := header[rank // save.tp].writer.get("ep_rank")) != ep_index:
            raise CheckpointError(
                f"is of expert-parallel rank {ep_rank}, but the degrees require {ep_index}. The file belongs to "
                "another run; put the right one back.",
                path=save.path(header[rank // save.tp]),
            )


def _count_on_rank(save: Save, counts: Mapping[str, int], totals: Mapping[str, int], degree: int) -> dict[str, int]:
    """Return layer → number of experts on one expert-parallel rank.

    Args:
        counts: layer → experts in a rank's param group.
        totals: layer → experts with files.
    """
    for layer, count_held in counts.items():
        total = totals.get(strip_compiled(layer), 0)
        if total % degree or total // degree < count_held:
            raise CheckpointError(
                f"lists {count_held} experts in {layer} on each of {degree} expert-parallel ranks, but {total} experts "
                "of the layer have files. The folder lacks files or mixes two saves.",
                path=save.path(save.main),
            )
    return {layer: totals.get(strip_compiled(layer), 0) // degree for layer in counts}


def _are_same(pieces: Mapping[str, Piece], saved: Mapping[str, Sequence[Piece]]) -> bool:
    """Return True if each piece has the bytes of one of the saved ones of its name."""
    return all(
        any(are_alike((piece.contents, other.contents)) for other in saved.get(name, ()))
        for name, piece in pieces.items()
    )


def _find_holders(save: Save, mp: int, replicas: int, *, over_tp: bool) -> list[range]:
    """List ranks by their experts; CheckpointError if ``replicas`` is no divisor."""
    ranks = save.dp * save.tp if over_tp else save.dp
    if replicas < 1 or ranks % replicas:
        raise CheckpointError(
            f"has a param group in {replicas} partitions, which does not divide the {ranks} ranks that hold the model. "
            "The file is of another save.",
            path=save.path(save.shards[mp][0]),
        )
    return list_holders(save, mp, ranks // replicas, over_tp=over_tp)


def _check_placements(save: Save, mp: int, group: Sequence[tuple[str, Shape]], degree: int) -> None:
    placements = save.model(mp).facts.get("placements", {})
    for name, shape in group:
        placement = placements.get(find_layer(name, placements) or "", ())
        if placement and (len(placement) != degree or any(shape[:1] != (len(experts),) for experts in placement)):
            raise CheckpointError(
                f"{name} of shape {shape} is spread over {degree} expert-parallel ranks, but the expert placement has "
                f"{[len(experts) for experts in placement]} experts on the ranks. The file is of another save.",
                path=save.path(save.models[mp][0]),
            )


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
    for name in header.layer or {}:
        if (read := read_name(name)) is None or read.number != expert:
            raise CheckpointError(
                f"holds {name}, which is not of expert {expert}. The file "
                "belongs to another expert or run; put the right one back.",
                path=save.path(header),
            )


def _add_batch(builder: Builder, rank: SavedRank, batch: FileBatch, optimized: set[str]) -> None:
    """Add tensors of experts' files with one template as buffers partitioned by file."""
    states, parts, headers = [], len(batch.headers), batch.headers
    names = list(zip(*(header.layer or {} for header in headers), strict=True))
    for piece, named in enumerate(names):
        first = batch.make_first_piece(piece)
        buffer = join_parameters(0, named, [first.shape] * parts, parts=parts, partition=first.numel)
        records, begins = builder.number_records(batch, piece), batch.pick(piece, "start")
        storage = PartitionedState(buffer, first.dtype, records, begins)
        states.append((first.shape, {COPY: storage}, {MODULE: storage}))
    for index, (header, *local) in enumerate(zip(headers, *names, strict=True)):
        for name, (shape, copies, modules) in zip(local, states, strict=True):
            builder.add_storage(rank, name, shape, index, copies if name in optimized else modules, header)
