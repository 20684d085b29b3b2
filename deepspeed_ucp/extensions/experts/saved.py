"""Mixture-of-experts in a save of DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...formats.deepspeed.builder import Builder
from ...formats.deepspeed.files import Key, choose_copies, read_model_rank, read_optim_ranks, scan_folder, sort_roles
from ...formats.deepspeed.headers import FileHeader
from ...formats.deepspeed.reading import as_list
from ...formats.deepspeed.save import Save, find_degrees
from ...formats.findings import Finding
from ...model import COPY, MASTER, AtomicIndex, AtomKey, strip_compiled
from ...model.flat import Shape
from ...model.topology import enabled
from ...model.wrappers import Form
from ..registry import SaveExtension
from . import stage0, tensors, zero
from .autoep import read_folding, read_placements
from .files import (
    NAME,
    ROLES,
    ExpertFiles,
    align_save,
    complete_header,
    count_tp_shards,
    infer_degrees,
    name_experts_files,
    name_optims,
    name_unwritten_models,
)
from .names import cut_number, find_expert, find_layer, is_expert

_MOST_ENTRIES = 2_000_000  # of a list of layers, and experts of a layer

_NEVER_SAVED = (
    "DeepSpeed writes no model states of a tensor-parallel rank if a rank before it holds the same experts, and the "
    "other parameters of such a rank are lost. Save with at least as many expert-parallel ranks as tensor-parallel "
    "ones and without use_data_before_expert_parallelism, or with expert tensor parallelism."
)


class SavedExperts(ExpertFiles, SaveExtension):
    """A save with experts."""

    name = NAME
    is_uneven = True
    name_optimizers = stage0.name_optimizers
    add_optimizers = stage0.add_optimizers
    deal_group = zero.deal_group
    find_ties = tensors.find_ties
    add_tensors = tensors.add_tensors

    # -- the files of a save

    def read_facts(
        self, tree: Mapping[Any, Any], read: Callable[[str, Callable[[Any], Any]], Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the facts in a state file, and the rank that wrote it, as AutoEP records it.

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
        save.names |= sort_roles(ROLES, choose_copies(save.folder, save.where.entries)[0])
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
        """Return the names of the experts' files, and of model states that DeepSpeed does not write, with the reason.

        ZeRO 3 has experts in the model states.
        """
        unwritten = dict.fromkeys(name_unwritten_models(save), _NEVER_SAVED)
        return unwritten | dict.fromkeys(self._name_files(save), "")

    def _name_files(self, save: Save) -> Iterator[str]:
        first = save.first
        model = first[0].model
        if model is None or not model.facts["experts"] or read_optim_ranks(first[0].name) is not None:
            return
        _, tp = find_degrees(save, model)
        tp_shards = count_tp_shards(save, tp)
        for stage, header in enumerate([first[0], *self.stages]):
            places = range(stage * tp, (stage + 1) * tp)
            yield from name_experts_files(
                save, header.model.facts.get("experts", ()) if header.model else (), places, tp_shards
            )
            if header.model and (len(first) == 1 or header.model.optim):
                yield from name_optims(save, header.model.optim, places, tp_shards)

    def arrange(self, save: Save, headers: Mapping[str, FileHeader]) -> list[Finding]:
        """Take the experts' headers by file name, align param groups, and complete model states."""
        align_save(save)
        for role in ROLES:
            names = sorted(save.names[role].items())
            save.further[role] = {key: headers[name] for key, name in names if name in headers}
        self.files, self.optims = save.further["expert"], save.further["expert_optim"]
        for mp, models in enumerate(save.models):
            beside = [*save.shards[mp], *(header for (rank, _), header in self.optims.items() if rank == mp)]
            models[:1] = [complete_header(header, *beside[:1]) for header in models[:1]]
        self.tp_shards = count_tp_shards(save, save.tp)
        return []

    def verify_save(self, save: Save, comm: Any) -> list[Finding]:
        """Return a fault for an AutoEP save without a placement."""
        facts, file = save.model(0).facts, save.main
        if not (enabled(file.config, "expert_parallel") and facts["experts"] and not facts["placements"]):
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
        """Return all optimizer files of a pipeline stage if the group's experts are distributed over TP ranks."""
        first = save.shards[mp][0].optim
        if self.is_over_tp(save) and first and group < len(first.groups) and first.groups[group].get("moe"):
            return [save.shard(mp // save.tp, rank) for rank in range(save.dp * save.tp)]
        return []

    def find_shapes(self, save: Save, mp: int, name: str) -> set[Shape]:
        """Return the shapes that files of single experts give a rank's parameter; AutoEP's parameters hold several."""
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

    def complete_index(self, index: AtomicIndex, builder: Builder) -> AtomicIndex:
        """Return the index with AutoEP's fused parameters, and state that DeepSpeed's load fails to restore."""
        unnoticed = (*index.unnoticed, *self._list_unnoticed(index, builder))
        return replace(index, unnoticed=unnoticed, fused=self._count_fused(builder.save, index.atoms))

    def _list_unnoticed(self, index: AtomicIndex, builder: Builder) -> Iterator[str]:
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
    """Return the experts of each layer; older releases wrote one number for all layers, or 1 or 0 without experts."""
    if isinstance(value, (list, tuple)):
        return tuple(count for count in value if isinstance(count, int) and 0 < count <= _MOST_ENTRIES)
    return (value,) if isinstance(value, int) and 1 < value <= _MOST_ENTRIES else ()
