"""Which files one save consists of, and whether files belong together: same step, same run, same number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError, shorten
from .files import NO_AXIS, Listing
from .findings import FAULT, Finding
from .headers import FileHeader, ModelHeader
from .marks import CLIENT, MARKS, SCHEDULER, WRITER

_EVERYWHERE = ("kind", "stage", "scaler", "clip_grad", "elastic")
"""Fields of the optimizer's headers that all ranks have alike."""


@dataclass(slots=True)
class Save:
    """The headers of one save by role; model-parallel rank ``pp_rank * tp + tp_rank``.

    Attributes:
        pp, tp: pipeline and tensor parallel degrees.
        dp: data-parallel ranks, by the model states.
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
    dp: int = 1

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

    def list_globals(self) -> dict[str, str]:
        """Classes and functions that the files' pickles name → path of the first file that does."""
        found: dict[str, str] = {}
        for group in (*self.models, *self.shards, *(layers.values() for layers in self.layers)):
            for header in group:
                for name in header.globals:
                    found.setdefault(name, self.path(header))
        return found

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
    save.dp = int(model.counters.get("dp_world_size", 1))
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


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Something that files of one save have alike: which files, what it is called, and where a header has it."""

    headers: list[FileHeader]
    what: str
    read: Callable[[FileHeader], Any]
    severity: str = FAULT


def find_strangers(save: Save) -> list[Finding]:
    """A finding for every file that is of another step, run or world size than most; of two the first one counts."""
    found: dict[str, Finding] = {}
    for finding in _check_world_sizes(save):
        found.setdefault(finding.file, finding)
    for comparison in _list_comparisons(save):
        for finding in _compare(save, comparison):
            found.setdefault(finding.file, finding)
    return list(found.values())


def _check_world_sizes(save: Save) -> Iterator[Finding]:
    for header in (header for shards in save.shards for header in shards):
        counts, dp = header.optim.partition_count if header.optim else (), save.dp
        if any(count != dp for count in counts):
            yield _tell_stranger(save, header, f"was saved by {counts} ranks, the model states say {dp}")


def _list_comparisons(save: Save) -> Iterator[_Comparison]:
    """The comparisons in the order in which they tell: the first that fails is what is told of a file."""
    models = [header for held in save.models for header in held]
    shards = [header for held in save.shards for header in held]
    yield _Comparison(models, "its step", _read_counters)
    for headers in (models, shards):
        yield from (_Comparison(headers, each, _read_optim(each)) for each in _EVERYWHERE)
    for stage in range(save.pp):
        ranks = slice(stage * save.tp, (stage + 1) * save.tp)
        for files in (save.models[ranks], save.shards[ranks]):
            yield _Comparison([header for held in files for header in held], "groups", _read_optim("groups"))
    yield from (_Comparison(held, "alignment", _read_optim("alignment")) for held in save.shards)
    yield _Comparison([h for h in (*models, *shards) if h.settings], "its ds_config", lambda h: h.settings)
    for mark, severity in MARKS.items():
        role = {WRITER: shards, SCHEDULER: models, CLIENT: models}.get(mark, [*models, *shards])
        yield _Comparison(role, mark, lambda h, mark=mark: h.marks.get(mark, ""), severity)  # type: ignore[misc]


def _read_counters(header: FileHeader) -> dict[str, Any]:
    return {**header.model.counters, "degrees": header.model.degrees} if header.model else {}


def _read_optim(attribute: str) -> Callable[[FileHeader], Any]:
    def read(header: FileHeader) -> Any:
        optim = header.optim or (header.model.optim if header.model else None)
        return getattr(optim, attribute) if optim else None

    return read


def _compare(save: Save, comparison: _Comparison) -> Iterator[Finding]:
    alike: list[tuple[Any, list[FileHeader]]] = []
    for header in comparison.headers:
        value = comparison.read(header)
        held = next((held for known, held in alike if _is_equal(known, value)), None)
        if held is None:
            alike.append((value, [header]))
        else:
            held.append(header)
    if len(alike) < 2:
        return
    usual, most = max(alike, key=lambda each: len(each[1]))
    for value, headers in alike:
        for header in headers if headers is not most else ():
            fault = f"{comparison.what} differs from that of {most[0].name} ({_contrast(value, usual)})"
            yield _tell_stranger(save, header, fault, comparison.severity)


def _is_equal(one: Any, other: Any) -> bool:
    return bool(one == other) or repr(one) == repr(other)  # NaN is not equal to itself


def _tell_stranger(save: Save, header: FileHeader, fault: str, severity: str = FAULT) -> Finding:
    text = f"{save.path(header)}: {fault}. The file belongs to another step, run or world size; put the right one back."
    return Finding("foreign", header.name, text, severity)


def _contrast(mine: Any, other: Any) -> str:
    """What two values differ in; of param groups and dicts the keys."""
    if isinstance(mine, tuple) and isinstance(other, tuple) and len(mine) == len(other):
        for index, (left, right) in enumerate(zip(mine, other, strict=True)):
            if repr(left) != repr(right) and isinstance(left, dict) and isinstance(right, dict):
                return f"group {index}: {_contrast(left, right)}"
    if isinstance(mine, dict) and isinstance(other, dict):
        keys = [key for key in {**mine, **other} if repr(mine.get(key)) != repr(other.get(key))]
        return ", ".join(f"{key} {mine.get(key)} ≠ {other.get(key)}" for key in keys)
    return f"{mine} ≠ {other}"
