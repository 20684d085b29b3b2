"""Layer files of a pipeline → the names of the tensors in them, and MODULE and COPY atoms.

A layer's file has the keys of the layer's own state_dict; PipelineModule calls its parameters ``<layer>.<key>``, those
of a tied module ``tied_modules.<tied key>.<key>`` (runtime/pipe/module.py, ``_build`` and ``save_state_dict``). Which
layer is a tied one, and which stage wrote a file, is not recorded: it is concluded from names and shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..atoms import COPY, MODULE, are_alike, strip_compiled
from ..errors import CheckpointError, UnsupportedError, shorten
from .builder import Builder, Seat
from .family import Save
from .headers import FileHeader, Piece
from .module import drop_ties
from .stages import Stages

logger = logging.getLogger("deepspeed_ucp")

TIED = "tied_modules."


@dataclass(slots=True)
class Known:
    """What the ranks' own files say about their part of the model.

    Attributes:
        optimized: per pipeline stage the parameters that an optimizer owns, with their shapes on each
            tensor-parallel rank.
        others: per pipeline stage buffers, and frozen parameters where they are recorded.
    """

    optimized: list[dict[str, dict[int, tuple[int, ...]]]]
    others: list[set[str]]
    spans: list[tuple[int, int] | None] = field(default_factory=list)
    contiguous: bool = True
    layers: set[int] = field(default_factory=set)
    tied: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Sort names by layer: ``layers`` that have names of their own, ``tied`` modules' keys by stage."""
        for stage, (owned, others) in enumerate(zip(self.optimized, self.others, strict=True)):
            held: set[int] = set()
            for name in (*owned, *others):
                head, _, key = name.removeprefix(TIED).partition(".")
                if name.startswith(TIED):
                    self.tied.setdefault(head, {}).setdefault(stage, set()).add(key)
                elif head.isdigit():
                    held.add(int(head))
            self.layers |= held
            self.spans.append((min(held), max(held)) if held else None)
        spans = [span for span in self.spans if span]
        self.contiguous = all(low[1] < high[0] for low, high in pairwise(spans))

    def find_tied(self, layer: int, tp: int, tensors: Mapping[str, Piece]) -> list[tuple[str, int]]:
        """(tied key, stage) of the modules that a layer's file can be of: same keys, same shapes, right place."""
        return [
            (key, stage)
            for key, stages in self.tied.items()
            for stage, keys in stages.items()
            if keys <= set(tensors) and self._has_shapes(key, stage, tp, tensors) and self._can_hold(stage, layer)
        ]

    def _has_shapes(self, key: str, stage: int, tp: int, tensors: Mapping[str, Piece]) -> bool:
        owned = self.optimized[stage]
        shapes = {name: owned[f"{TIED}{key}.{name}"] for name in tensors if f"{TIED}{key}.{name}" in owned}
        return all(tensors[name].shape == found.get(tp, tensors[name].shape) for name, found in shapes.items())

    def _can_hold(self, stage: int, layer: int) -> bool:
        """Whether a layer can lie on a stage, where stages are runs of layers; elsewhere all can."""
        if not self.contiguous:
            return True
        before = [span[1] for span in self.spans[:stage] if span]
        after = [span[0] for span in self.spans[stage + 1 :] if span]
        return max(before, default=-1) < layer < min(after, default=layer + 1)


def look_at_ranks(save: Save, tied: Collection[str] = ()) -> Known:
    """What the model states of all ranks say about names and shapes.

    Without ZeRO they name no parameters; ``tied`` are then those of tied modules, on whatever stage.
    """
    optimized: list[dict[str, dict[int, tuple[int, ...]]]] = [{} for _ in range(save.pp)]
    others: list[set[str]] = [set() for _ in range(save.pp)]
    for mp in range(save.pp * save.tp):
        model = save.model(mp)
        for group in model.param_shapes or ():
            for name, shape in group:
                optimized[mp // save.tp].setdefault(strip_compiled(name), {})[mp % save.tp] = tuple(shape)
        others[mp // save.tp].update(strip_compiled(name) for name in (*model.buffers, *model.frozen_shapes))
        if model.param_shapes is None:
            others[mp // save.tp].update(tied)
    return Known(optimized, others)


def add_layers(builder: Builder, save: Save, known: Known, stages: Stages) -> tuple[dict[str, str], dict[str, int]]:
    """Add the tensors of all layer files.

    Args:
        builder: of the index.
        save: the files.
        known: what the ranks say.
        stages: which of them holds what.

    Returns:
        Ties (name → the name that holds the data), and of tied buffers and frozen parameters how many stages hold one.

    Raises:
        CheckpointError: a layer with parameters has no file.
        UnsupportedError: a tied module's file has buffers or frozen parameters, and cannot be told from another's.
    """
    _check_layers(save, known)
    aliases: dict[str, str] = {strip_compiled(a): strip_compiled(n) for a, n in save.model(0).shared.items()}
    owned = {name for stage in known.optimized for name in stage}
    tied: dict[int, list[tuple[str, int]]] = {}
    for tp, layers in enumerate(save.layers):
        for layer, header in layers.items():
            tensors = {strip_compiled(key): piece for key, piece in (header.layer or {}).items()}
            if layer not in known.layers and (places := known.find_tied(layer, tp, tensors)):
                tied[layer] = [place for place in places if place in tied.get(layer, places)]
                continue
            named = {f"{layer}.{key}": piece for key, piece in tensors.items()}
            _add_tensors(builder, Seat(tp=tp), header, drop_ties(named, aliases), owned)
    return aliases, _TiedFiles(builder, save, known, stages, tied).add()


def _check_layers(save: Save, known: Known) -> None:
    for tp, layers in enumerate(save.layers):
        lacking = sorted(known.layers - set(layers))
        trained = [
            layer for layer in lacking if any(name.startswith(f"{layer}.") for part in known.optimized for name in part)
        ]
        if trained:
            axis = "" if all(rank < 0 for _, rank in save.listing.layers) else f"-model_{tp:02d}"
            names = [f"layer_{layer:02d}{axis}-model_states.pt" for layer in trained]
            raise CheckpointError(
                f"{save.listing.folder}: {shorten(names)} missing; these layers have parameters. Copy the whole folder."
            )


def _add_tensors(
    builder: Builder, seat: Seat, header: FileHeader, tensors: Iterable[tuple[str, Piece]], owned: set[str]
) -> None:
    file = builder.file(header)
    for name, piece in tensors:
        builder.add(seat, name, COPY if name in owned else MODULE, piece.shape, file, piece)


@dataclass(slots=True)
class _TiedFiles:
    """The files of tied layers: of each tied module and stage one is taken, others repeat it."""

    builder: Builder
    save: Save
    known: Known
    stages: Stages
    places: dict[int, list[tuple[str, int]]]

    def add(self) -> dict[str, int]:
        by_key: dict[str, list[int]] = {}
        for layer, places in sorted(self.places.items()):
            keys = sorted({key for key, _ in places})
            if len(keys) > 1:
                self._pass_over(layer, keys[0])
            else:
                by_key.setdefault(keys[0], []).append(layer)
        instances: dict[str, int] = {}
        for key, layers in by_key.items():
            instances.update(self._add_module(key, layers))
        return instances

    def _pass_over(self, layer: int, key: str) -> None:
        """A file that is one of several modules': copies are not needed, anything else must not be lost."""
        header = self.save.layers[0][layer]
        if others := [name for name in header.layer or {} if not self._is_optimized(key, strip_compiled(name))]:
            raise UnsupportedError(
                f"{self.save.path(header)}: holds {shorten(others)} of a tied module, and which one's or which stage's "
                "cannot be told. It can be resumed by DeepSpeed itself in the topology that wrote it."
            )

    def _is_optimized(self, key: str, name: str) -> bool:
        return any(f"{TIED}{key}.{name}" in owned for owned in self.known.optimized)

    def _add_module(self, key: str, layers: Sequence[int]) -> dict[str, int]:
        """One tied module's files: copies where the stage is certain, the rest of each stage or once for all."""
        stages = {layer: {stage for found, stage in self.places[layer] if found == key} for layer in layers}
        chosen: dict[int, int] = {}
        for layer in layers:
            if len(stages[layer]) == 1:
                chosen.setdefault(min(stages[layer]), layer)
        unsure = [layer for layer in layers if len(stages[layer]) > 1]
        for stage, layer in chosen.items():
            self._add_copies(key, layer, stage)
        if not unsure:
            return self._add_others(key, [chosen[stage] for stage in sorted(chosen)])
        if not self._are_alike(key, layers):
            self._pass_over(unsure[0], key)
        return self._add_others(key, layers[:1])

    def _are_alike(self, key: str, layers: Sequence[int]) -> bool:
        """Whether files have the same buffers and frozen parameters, by the checksums of their bytes."""
        for held in self.save.layers:
            others = [dict(self._list_others(key, held[layer])) for layer in layers]
            if any(others[0].keys() != each.keys() for each in others):
                return False
            if not all(are_alike(each[name].contents for each in others) for name in others[0]):
                return len(layers) == 1
        return True

    def _list_others(self, key: str, header: FileHeader) -> list[tuple[str, Piece]]:
        named = [(strip_compiled(raw), piece) for raw, piece in (header.layer or {}).items()]
        return [(name, piece) for name, piece in named if not self._is_optimized(key, name)]

    def _add_copies(self, key: str, layer: int, stage: int) -> None:
        for tp, layers in enumerate(self.save.layers):
            file = self.builder.file(layers[layer])
            seat = Seat(tp=tp, instances=self.stages.seats[stage * self.save.tp].instances)
            for raw, piece in (layers[layer].layer or {}).items():
                name = f"{TIED}{key}.{strip_compiled(raw)}"
                if self._is_optimized(key, strip_compiled(raw)):
                    self.builder.add(seat, name, COPY, piece.shape, file, piece)

    def _add_others(self, key: str, layers: Sequence[int]) -> dict[str, int]:
        """Buffers and frozen parameters of one file per stage that has any; returns those of several stages."""
        names = set()
        for tp, held in enumerate(self.save.layers):
            for index, layer in enumerate(layers):
                file = self.builder.file(held[layer])
                for short, piece in self._list_others(key, held[layer]):
                    name = f"{TIED}{key}.{short}"
                    names.add(name)
                    self.builder.add(Seat(tp=tp, instances={name: index}), name, MODULE, piece.shape, file, piece)
        return dict.fromkeys(names, len(layers)) if len(layers) > 1 else {}
