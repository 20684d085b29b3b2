"""Which files one save consists of, and what each of them is of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ..errors import CheckpointError
from .files import NO_AXIS, NO_LAYER, Listing, name_expert
from .headers import FileHeader, ModelHeader, OptimHeader

_GROUP = re.compile(r"ep_size_([1-9]\d{0,3})", re.ASCII)


@dataclass(slots=True)
class Save:
    """The headers of one save by role; model-parallel rank ``pp_rank * tp + tp_rank``.

    Attributes:
        pp, tp: pipeline and tensor parallel degrees.
        dp: data-parallel ranks, by the model states.
        models: per model-parallel rank the model states (of every data-parallel rank under ZeRO 3).
        shards: per model-parallel rank the optimizer states by data-parallel rank; empty lists at stage 0.
        layers: per tensor-parallel rank the layer files of a pipeline by layer.
        experts: files of one expert each.
        expert_optims: optimizer states of stage 0 by expert-parallel rank.
    """

    listing: Listing
    pp: int
    tp: int
    dp: int
    models: list[list[FileHeader]]
    shards: list[list[FileHeader]]
    layers: list[dict[int, FileHeader]] = field(default_factory=list)
    experts: list[FileHeader] = field(default_factory=list)
    expert_optims: list[FileHeader] = field(default_factory=list)

    @property
    def main(self) -> FileHeader:
        """The model states of the first rank, which has what is the same everywhere."""
        return self.models[0][0]

    @property
    def zero(self) -> dict[str, Any]:
        """The ds_config's ``zero_optimization``."""
        return self.main.config.get("zero_optimization") or {}

    @property
    def headers(self) -> list[FileHeader]:
        """All headers: model states, optimizer states, layers, experts."""
        layers = (held.values() for held in self.layers)
        return [*chain(*self.models), *chain(*self.shards), *chain(*layers), *self.experts, *self.expert_optims]

    @property
    def is_pipeline(self) -> bool:
        """Whether the model's tensors lie in layer files."""
        return self.main.model is not None and self.main.model.module is None

    @property
    def is_sharded(self) -> bool:
        """Whether model states are saved by every data-parallel rank (ZeRO 3), without the parameters' elements."""
        return self.main.name in self.listing.model_zero3.values()

    @property
    def first_models(self) -> list[ModelHeader]:
        """What the first data-parallel rank of each model-parallel rank says about the model."""
        return [self.model(mp) for mp in range(len(self.models))]

    def model(self, mp: int) -> ModelHeader:
        """What the first data-parallel rank of a model-parallel rank says about the model."""
        model = self.models[mp][0].model
        if model is None:
            raise CheckpointError(f"{self.path(self.models[mp][0])}: holds no model states.")
        return model

    def optim(self, mp: int) -> OptimHeader:
        """The optimizer in a model-parallel rank's model states (stage 0)."""
        optim = self.model(mp).optim
        if optim is None:
            raise CheckpointError(f"{self.path(self.models[mp][0])}: holds no optimizer state.")
        return optim

    def list_globals(self) -> dict[str, str]:
        """Classes and functions that the files' pickles name → path of the first file that does."""
        found: dict[str, str] = {}
        for header in self.headers:
            for name in header.globals:
                found.setdefault(name, self.path(header))
        return found

    def path(self, header: FileHeader) -> str:
        """Full path of a file."""
        return self.listing.path(header.name)


def count_ranks(model: ModelHeader) -> tuple[int, int]:
    """(model-parallel, data-parallel) ranks that a file of model states tells of."""
    return model.counters.get("mp_world_size") or 1, model.counters.get("dp_world_size") or 1


def find_degrees(listing: Listing, model: ModelHeader) -> tuple[int, int]:
    """(pipeline, tensor) parallel degrees of a save; older releases store only their product.

    Raises:
        CheckpointError: the layer files of a pipeline do not fit the number of ranks.
    """
    ranks, _ = count_ranks(model)
    if model.degrees and model.degrees[0] * model.degrees[1] == ranks:
        return model.degrees
    if model.module is not None:
        return 1, ranks
    tp = len({max(tp, 0) for _, tp in listing.layers}) or 1
    if ranks % tp:
        raise CheckpointError(
            f"{listing.folder}: saved by {ranks} model-parallel ranks, its layer files are of {tp} tensor-parallel "
            "ones. The folder lacks files or mixes two saves."
        )
    return ranks // tp, tp


def expect_files(listing: Listing, first: Sequence[FileHeader]) -> list[str]:
    """Names of all files of the save that ``first`` belongs to, whether they are there or not.

    Args:
        listing: the folder's files.
        first: model states, and optimizer states where the save has them.

    Raises:
        CheckpointError: a pipeline's layer files are of no save, or of two.
    """
    model = first[0].model
    if model is None:
        return []
    pp, tp = find_degrees(listing, model)
    _, dp = count_ranks(model)
    names = name_model_files(listing, first[0])
    if len(first) > 1:
        prefix = next(prefix for (prefix, _, _), name in listing.optim.items() if name == first[1].name)
        names += [
            listing.optim.get((prefix, mp, rank), f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt")
            for mp in range(pp * tp)
            for rank in range(dp)
        ]
    if model.module is None:
        names += _name_layers(listing, tp)
    if model.experts and first[0].name in listing.model.values():  # of ZeRO 3 every rank's model states have them
        names += _name_experts(listing, model.experts, pp * tp)
        if len(first) == 1:
            names += [
                f"expp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
                for mp in range(pp * tp)
                for rank in range(_count_expert_ranks(listing, model.optim))
            ]
    return names


def _count_expert_ranks(listing: Listing, optim: OptimHeader | None) -> int:
    """Expert-parallel ranks of a save at stage 0: the param groups of experts have the degree in their names."""
    names = [str(group.get("name")) for group in (optim.groups if optim else ()) if group.get("moe")]
    degrees = [int(match[1]) for name in names if (match := _GROUP.fullmatch(name))]
    return max(degrees, default=max((rank for _, rank in listing.expert_optim), default=-1) + 1)


def name_model_files(listing: Listing, first: FileHeader) -> list[str]:
    """The model states of all ranks of the save that ``first`` belongs to, whether they are there or not."""
    if first.model is None:
        return []
    ranks, dp = count_ranks(first.model)
    if first.name in listing.model.values():
        return [listing.model.get(mp, f"mp_rank_{mp:02d}_model_states.pt") for mp in range(ranks)]
    return [
        listing.model_zero3.get((mp, rank), f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt")
        for mp in range(ranks)
        for rank in range(dp)
    ]


def _name_layers(listing: Listing, tp: int) -> list[str]:
    """Layer files; layers without parameters and state have none, so only ranks that lack a layer are found here."""
    plain = {layer for layer, rank in listing.layers if rank == NO_AXIS}
    numbered = {layer for layer, rank in listing.layers if 0 <= rank < tp}
    if not plain and not numbered:
        raise CheckpointError(
            f"{listing.folder}: a pipeline's model states without any layer_*-model_states.pt. Copy the whole folder."
        )
    if plain and numbered and tp == 1:
        raise CheckpointError(
            f"{listing.folder}: holds the layer files of two saves ({listing.layers[min(plain), NO_AXIS]} and "
            f"{listing.layers[min(numbered), 0]} do not belong together). Remove the older save's files."
        )
    if tp == 1 and plain:
        return [listing.layers[layer, NO_AXIS] for layer in sorted(plain)]
    return [
        listing.layers.get((layer, rank), f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
        for layer in sorted(numbered)
        for rank in range(tp)
    ]


def _name_experts(listing: Listing, layers: Sequence[int], ranks: int) -> list[str]:
    """Files of one expert each; older releases have an expert's parts of all layers in one."""
    keys = [(layer, expert) for layer, held in enumerate(layers) for expert in range(held)]
    if listing.experts and all(layer == NO_LAYER for layer, _, _ in listing.experts):
        keys = [(NO_LAYER, expert) for expert in range(max(layers))]
    return [name_expert(*key, mp) for key in keys for mp in range(ranks)]


def arrange(listing: Listing, headers: Sequence[FileHeader]) -> Save:
    """Give every header its role; the first one is the first rank's model states.

    Raises:
        CheckpointError: it holds none.
    """
    model = headers[0].model
    if model is None:
        raise CheckpointError(f"{listing.path(headers[0].name)}: holds no model states.")
    pp, tp = find_degrees(listing, model)
    ranks, layers = range(pp * tp), [dict[int, FileHeader]() for _ in range(tp)]
    save = Save(listing, pp, tp, count_ranks(model)[1], [[] for _ in ranks], [[] for _ in ranks], layers)
    by_name = {header.name: header for header in headers}
    roles = (
        (save.models, ((mp, name) for mp, name in sorted(listing.model.items()))),
        (save.models, ((mp, name) for (mp, _), name in sorted(listing.model_zero3.items()))),
        (save.shards, ((mp, name) for (_, mp, _), name in sorted(listing.optim.items()))),
    )
    for held, names in roles:
        for mp, name in names:
            if name in by_name:
                held[mp].append(by_name[name])
    for (layer, rank), name in sorted(listing.layers.items()):
        if name in by_name:
            layers[max(rank, 0)][layer] = by_name[name]
    save.shards = [[align_groups(header, held[0].optim) for header in held] for held in save.shards]
    save.experts += [by_name[name] for _, name in sorted(listing.experts.items()) if name in by_name]
    save.expert_optims += [by_name[name] for _, name in sorted(listing.expert_optim.items()) if name in by_name]
    return save


def align_groups(header: FileHeader, first: OptimHeader | None) -> FileHeader:
    """The param groups in the order of the first rank's.

    DeepSpeed makes those of several expert-parallel degrees in the order of a set of strings, which each process has
    of its own; groups of one degree keep their order (``moe/utils.py``).
    """
    optim = header.optim
    if optim is None or first is None or optim.partition_count == first.partition_count:
        return header
    mine, wanted = (_sort(each.partition_count) for each in (optim, first))
    if len(mine) != len(wanted):
        return header
    order = [mine[wanted.index(group)] for group in range(len(mine))]

    fields = ("masters", "tensors", "groups", "slices", "partition_count", "paddings", "alignment")
    rows = {field: getattr(optim, field) for field in fields}
    moved: dict[str, Any] = {
        field: type(row)(row[group] for group in order)
        for field, row in rows.items()
        if isinstance(row, (list, tuple)) and len(row) == len(order)
    }
    return replace(header, optim=replace(optim, **moved))


def _sort(counts: Sequence[int]) -> list[int]:
    """Param groups by the number of their partitions."""
    return sorted(range(len(counts)), key=counts.__getitem__)


def describe_offload(zero: Mapping[str, Any]) -> str:
    """Devices of optimizer and parameter offload in a ds_config, as ``optimizer/param``; the deprecated keys count."""
    devices = []
    for section, deprecated in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        options = zero.get(section)
        device = options.get("device") if isinstance(options, dict) else None
        device = device or ("cpu" if zero.get(deprecated) else "none")
        devices.append("superoffload" if isinstance(options, dict) and options.get("super_offload") else str(device))
    return "/".join(devices)
