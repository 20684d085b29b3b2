"""Which files one save consists of, and whether files belong together: same step, same run, same number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError, shorten
from .files import NO_AXIS, Listing
from .headers import FileHeader, ModelHeader, OptimHeader

_EVERYWHERE: tuple[str, ...] = ("kind", "stage", "scaler", "clip_grad", "elastic")
_IN_ONE_STAGE: tuple[str, ...] = ("kind", "stage", "groups", "scaler", "clip_grad", "elastic")
_IN_ONE_RANK: tuple[str, ...] = ("kind", "stage", "groups", "scaler", "clip_grad", "alignment", "elastic")


@dataclass(slots=True)
class Save:
    """The headers of one save by role; model-parallel rank ``pp_rank * tp + tp_rank``.

    Attributes:
        pp, tp: pipeline and tensor parallel degrees.
        models: per model-parallel rank the model states (of every data-parallel rank under ZeRO 3).
        shards: per model-parallel rank the optimizer states by data-parallel rank; empty lists at stage 0.
        layers: per tensor-parallel rank the layer files of a pipeline by layer.
    """

    listing: Listing
    pp: int
    tp: int
    models: list[list[FileHeader]]
    shards: list[list[FileHeader]]
    layers: list[dict[int, FileHeader]] = field(default_factory=list)

    @property
    def main(self) -> FileHeader:
        """The model states of the first rank, which has what is the same everywhere."""
        return self.models[0][0]

    @property
    def is_pipeline(self) -> bool:
        """Whether the model's tensors lie in layer files."""
        return self.main.model is not None and self.main.model.module is None

    @property
    def is_sharded(self) -> bool:
        """Whether model states are saved by every data-parallel rank (ZeRO 3), without the parameters' elements."""
        return self.main.name in self.listing.model_zero3.values()

    def model(self, mp: int) -> ModelHeader:
        """What the first data-parallel rank of a model-parallel rank says about the model."""
        model = self.models[mp][0].model
        if model is None:
            raise CheckpointError(f"{self.path(self.models[mp][0])}: holds no model states.")
        return model

    def path(self, header: FileHeader) -> str:
        """Full path of a file."""
        return self.listing.path(header.name)


def find_degrees(listing: Listing, model: ModelHeader) -> tuple[int, int]:
    """(pipeline, tensor) parallel degrees of a save; older releases store only their product.

    Raises:
        CheckpointError: the layer files of a pipeline do not fit the number of ranks.
    """
    ranks = int(model.counters.get("mp_world_size", 1))
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


def name_files(listing: Listing, first: Sequence[FileHeader]) -> list[str]:
    """The files of a save besides ``first`` (a model header and, where there is one, an optimizer header).

    Raises:
        CheckpointError: naming the files that are missing.
    """
    model = first[0].model
    if model is None:
        return []
    expected = expect_files(listing, first)
    if absent := [name for found, name in expected if found is None]:
        pp, tp = find_degrees(listing, model)
        dp = int(model.counters.get("dp_world_size", 1))
        ranks = f"{dp} data-parallel ranks" + (f" of {pp * tp} model-parallel ones" if pp * tp > 1 else "")
        raise CheckpointError(
            f"{listing.folder}: {shorten(absent)} missing; the checkpoint was saved by {ranks} and "
            "needs all of their files. Copy them here or load another tag."
        )
    known = {header.name for header in first}
    return [found for found, _ in expected if found is not None and found not in known]


def expect_files(listing: Listing, first: Sequence[FileHeader]) -> list[tuple[str | None, str]]:
    """(name in the folder or None, name that is expected) of every file of the save that ``first`` belongs to.

    Raises:
        CheckpointError: a pipeline's layer files are of no save, or of two.
    """
    model = first[0].model
    if model is None:
        return []
    pp, tp = find_degrees(listing, model)
    dp = int(model.counters.get("dp_world_size", 1))
    expected = _name_models(listing, first[0], pp * tp, dp)
    if len(first) > 1:
        prefix = next(prefix for (prefix, _, _), name in listing.optim.items() if name == first[1].name)
        expected += [
            (listing.optim.get((prefix, mp, rank)), f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt")
            for mp in range(pp * tp)
            for rank in range(dp)
        ]
    if model.module is None:
        expected += _name_layers(listing, tp)
    return expected


def name_model_files(listing: Listing, first: FileHeader) -> list[str]:
    """The other ranks' model states of the save that ``first`` belongs to.

    Raises:
        CheckpointError: naming the files that are missing.
    """
    model = first.model
    if model is None:
        return []
    ranks = int(model.counters.get("mp_world_size", 1))
    expected = _name_models(listing, first, ranks, int(model.counters.get("dp_world_size", 1)))
    if absent := [name for found, name in expected if found is None]:
        raise CheckpointError(
            f"{listing.folder}: {shorten(absent)} missing; the conversion was interrupted or the copy is not complete. "
            "Convert or copy again."
        )
    return [found for found, _ in expected if found is not None and found != first.name]


def _name_models(listing: Listing, first: FileHeader, ranks: int, dp: int) -> list[tuple[str | None, str]]:
    if first.name in listing.model.values():
        return [(listing.model.get(mp), f"mp_rank_{mp:02d}_model_states.pt") for mp in range(ranks)]
    return [
        (listing.model_zero3.get((mp, rank)), f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt")
        for mp in range(ranks)
        for rank in range(dp)
    ]


def _name_layers(listing: Listing, tp: int) -> list[tuple[str | None, str]]:
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
        return [(listing.layers[layer, NO_AXIS], "") for layer in sorted(plain)]
    return [
        (listing.layers.get((layer, rank)), f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
        for layer in sorted(numbered)
        for rank in range(tp)
    ]


def arrange(listing: Listing, headers: Sequence[FileHeader]) -> Save:
    """Give every header its role; the first one is the first rank's model states.

    Raises:
        CheckpointError: model-parallel ranks without files.
    """
    model = headers[0].model
    if model is None:
        raise CheckpointError(f"{listing.path(headers[0].name)}: holds no model states.")
    pp, tp = find_degrees(listing, model)
    by_name = {header.name: header for header in headers}
    save = Save(listing, pp, tp, [[] for _ in range(pp * tp)], [[] for _ in range(pp * tp)], [{} for _ in range(tp)])
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
            save.layers[max(rank, 0)][layer] = by_name[name]
    return save


def check_family(save: Save) -> None:
    """All files come from one save: same step, same groups, same kind, same number of ranks.

    Raises:
        CheckpointError: a file of another step, run or world size.
    """
    for _, text in find_strangers(save):
        raise CheckpointError(text)


def find_strangers(save: Save) -> Iterator[tuple[str, str]]:
    """(file, what tells it) of every file of another step, run or world size; held against the first rank's files."""
    reference = save.model(0)
    for header in (header for models in save.models for header in models):
        model = header.model
        if model is None or (model.counters, model.degrees) != (reference.counters, reference.degrees):
            found = f"{model.counters} {model.degrees or ''}" if model else "none"
            yield (
                header.name,
                f"{save.path(header)}: has counters {found}, {save.main.name} has {reference.counters} "
                f"{reference.degrees or ''}. The file belongs to another step or run; put the right one back.",
            )
    for mp, shards in enumerate(save.shards):
        for rank, header in enumerate(shards):
            fault = _find_stranger(save, header, mp, rank)
            if reference.config and header.config and header.config != reference.config:
                fault = fault or f"its ds_config differs from that of {save.main.name}"
            yield from _tell_stranger(save, header, fault)
    for mp, models in enumerate(save.models[1:], 1):
        yield from _tell_stranger(save, models[0], _compare_wrappers(save, mp))


def _tell_stranger(save: Save, header: FileHeader, fault: str) -> Iterator[tuple[str, str]]:
    if fault:
        yield (
            header.name,
            f"{save.path(header)}: {fault}. The file belongs to another step, run or world size; put the right one "
            "back.",
        )


def _find_stranger(save: Save, header: FileHeader, mp: int, rank: int) -> str:
    """What tells that an optimizer file is not of this save: it is compared with the nearest first rank's."""
    optim = header.optim
    dp = len(save.shards[mp])
    if optim is None:
        return "holds no optimizer state"
    if any(count != dp for count in optim.partition_count):
        return f"was saved by {optim.partition_count} ranks, the model states say {dp}"
    if rank:
        first, fields = save.shards[mp][0], _IN_ONE_RANK
    elif mp % save.tp:
        first, fields = save.shards[mp - mp % save.tp][0], _IN_ONE_STAGE
    else:
        first, fields = save.shards[0][0], _EVERYWHERE
    fault = _compare(optim, first.optim, fields, first.name) if first.optim else "has no mate"
    if not fault and header.config != first.config:
        return f"its ds_config differs from that of {first.name}"
    return fault


def _compare_wrappers(save: Save, mp: int) -> str:
    """Stage 0 keeps the optimizer in the model states."""
    stage = mp - mp % save.tp
    optim, first = save.model(mp).optim, save.model(stage).optim
    origin = save.model(0).optim
    if (optim is None) != (origin is None):
        return f"{'has no' if optim is None else 'holds an'} optimizer state, unlike {save.main.name}"
    if optim is None or first is None or origin is None:
        return ""
    fault = _compare(optim, first, _IN_ONE_STAGE, save.models[stage][0].name)
    return fault or _compare(optim, origin, _EVERYWHERE, save.main.name)


def _compare(optim: OptimHeader, other: OptimHeader, fields: Iterable[str], name: str) -> str:
    for attribute in fields:
        mine, theirs = getattr(optim, attribute), getattr(other, attribute)
        if mine != theirs:
            return f"{attribute} differs from {name} ({_contrast(mine, theirs)})"
    return ""


def _contrast(mine: Any, theirs: Any) -> str:
    if isinstance(mine, tuple) and isinstance(theirs, tuple) and len(mine) == len(theirs):
        for index, (left, right) in enumerate(zip(mine, theirs, strict=True)):
            if left != right and isinstance(left, dict) and isinstance(right, dict):
                keys = [key for key in left if left.get(key) != right.get(key)]
                return f"group {index}: " + ", ".join(f"{key} {left.get(key)} ≠ {right.get(key)}" for key in keys)
    return f"{mine} ≠ {theirs}"
