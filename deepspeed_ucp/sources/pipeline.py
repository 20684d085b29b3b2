"""Layer files of a pipeline → the names of the tensors in them, and MODULE and COPY atoms.

A layer's file has the keys of the layer's own state_dict; PipelineModule calls its parameters ``<layer>.<key>``, those
of a tied module ``tied_modules.<tied key>.<key>`` (runtime/pipe/module.py, ``_build`` and ``save_state_dict``). Which
layer is a tied one, and which stage wrote a file, is not recorded: it is concluded from names and shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..atoms import COPY, MODULE, are_alike
from ..errors import CheckpointError, UnsupportedError, shorten
from .builder import Builder
from .headers import FileHeader, Piece
from .module import drop_ties
from .ranks import TIED, ModelRank
from .save import Save


class _Stages:
    """What the ranks say about their part of the model.

    Args:
        builder: with the ranks, whose optimizers own parameters.
        save: the files, which name buffers, and frozen parameters where they are recorded.
        tied: names of tied modules' parameters, on whatever stage, where model states name no parameters.

    Attributes:
        ranks: per pipeline stage.
        optimized: parameters that an optimizer owns on some stage.
        layers: those that have names of their own.
        tied: per tied module and stage the names in it.
    """

    def __init__(self, builder: Builder, save: Save, tied: Collection[str]) -> None:
        self.optimized = builder.optimized
        self.ranks = [builder.ranks[first : first + save.tp] for first in range(0, len(builder.ranks), save.tp)]
        self.layers: set[int] = set()
        self.tied: dict[str, dict[int, set[str]]] = {}
        self._spans: list[tuple[int, int] | None] = []
        for stage, ranks in enumerate(self.ranks):
            models = [save.model(stage * save.tp + tp) for tp in range(save.tp)]
            names = {name for model in models for name in (*model.buffers, *model.frozen_shapes)}
            names.update(*(rank.shapes for rank in ranks))
            names.update(*(tied for model in models if model.param_shapes is None))
            self._add_stage(stage, names)
        spans = [span for span in self._spans if span]
        self._contiguous = all(low[1] < high[0] for low, high in pairwise(spans))

    def _add_stage(self, stage: int, names: Iterable[str]) -> None:
        layers: set[int] = set()
        for name in names:
            head, _, key = name.removeprefix(TIED).partition(".")
            if name.startswith(TIED):
                self.tied.setdefault(head, {}).setdefault(stage, set()).add(key)
            elif head.isdecimal():
                layers.add(int(head))
        self.layers |= layers
        self._spans.append((min(layers), max(layers)) if layers else None)

    def find_tied(self, layer: int, tp: int, tensors: Mapping[str, Piece]) -> list[tuple[str, int]]:
        """(tied key, stage) of the modules that a layer's file can be of: same keys, same shapes, right place."""
        return [
            (key, stage)
            for key, stages in self.tied.items()
            for stage, keys in stages.items()
            if keys <= set(tensors) and self._has_shapes(key, stage, tp, tensors) and self._can_hold(stage, layer)
        ]

    def _has_shapes(self, key: str, stage: int, tp: int, tensors: Mapping[str, Piece]) -> bool:
        shapes = self.ranks[stage][tp].shapes
        return all(piece.shape == shapes.get(f"{TIED}{key}.{name}", piece.shape) for name, piece in tensors.items())

    def _can_hold(self, stage: int, layer: int) -> bool:
        """Whether a layer can lie on a stage, where stages are runs of layers; elsewhere all can."""
        if not self._contiguous:
            return True
        before = [span[1] for span in self._spans[:stage] if span]
        after = [span[0] for span in self._spans[stage + 1 :] if span]
        return max(before, default=-1) < layer < min(after, default=layer + 1)


def add_layers(builder: Builder, save: Save, tied: Collection[str] = ()) -> None:
    """Add the tensors of all layer files, ties, and of tied buffers and frozen parameters how many stages hold one.

    Args:
        builder: of the index, with the ranks' own parameters.
        save: the files.
        tied: names of tied modules' parameters, where the model states name none (without ZeRO).

    Raises:
        CheckpointError: a layer with parameters has no file.
        UnsupportedError: a tied module's file has buffers or frozen parameters, and cannot be told from another's.
    """
    stages = _Stages(builder, save, tied)
    _check_layers(save, stages)
    builder.aliases = dict(save.model(0).shared)
    found: dict[int, list[tuple[str, int]]] = {}
    for tp, layers in enumerate(save.layers):
        for layer, header in layers.items():
            tensors = header.layer or {}
            if layer not in stages.layers and (places := stages.find_tied(layer, tp, tensors)):
                found[layer] = [place for place in places if place in found.get(layer, places)]
                continue
            named = {f"{layer}.{key}": piece for key, piece in tensors.items()}
            for name, piece in drop_ties(named, builder.aliases):
                builder.add(ModelRank(tp=tp), name, COPY if name in stages.optimized else MODULE, header, piece)
    _TiedFiles(builder, save, stages, found).add()


def _check_layers(save: Save, stages: _Stages) -> None:
    trained = {int(head) for name in stages.optimized if (head := name.partition(".")[0]).isdecimal()}
    for tp, layers in enumerate(save.layers):
        if lacking := sorted(trained - set(layers)):
            axis = "" if all(rank < 0 for _, rank in save.listing.layers) else f"-model_{tp:02d}"
            names = [f"layer_{layer:02d}{axis}-model_states.pt" for layer in lacking]
            raise CheckpointError(
                f"{save.listing.folder}: {shorten(names)} missing; these layers have parameters. Copy the whole folder."
            )


@dataclass(slots=True)
class _TiedFiles:
    """The files of tied layers: of each tied module and stage one is taken, others repeat it."""

    builder: Builder
    save: Save
    stages: _Stages
    places: dict[int, list[tuple[str, int]]]

    def add(self) -> None:
        by_key: dict[str, list[int]] = {}
        for layer, places in sorted(self.places.items()):
            keys = sorted({key for key, _ in places})
            if len(keys) > 1:
                self._pass_over(layer, keys[0])
            else:
                by_key.setdefault(keys[0], []).append(layer)
        for key, layers in by_key.items():
            self._add_module(key, layers)

    def _pass_over(self, layer: int, key: str) -> None:
        """A file that is one of several modules': copies are not needed, anything else must not be lost."""
        header = self.save.layers[0][layer]
        if others := self._list_others(key, header):
            raise UnsupportedError(
                f"{self.save.path(header)}: holds {shorten(others)} of a tied module, and which one's or which stage's "
                "cannot be told. It can be resumed by DeepSpeed itself in the topology that wrote it."
            )

    def _is_optimized(self, key: str, name: str) -> bool:
        return f"{TIED}{key}.{name}" in self.stages.optimized

    def _add_module(self, key: str, layers: Sequence[int]) -> None:
        """One tied module's files: copies where the stage is certain, the rest of each stage or once for all."""
        stages = {layer: {stage for found, stage in self.places[layer] if found == key} for layer in layers}
        chosen: dict[int, int] = {}
        for layer in layers:
            if len(stages[layer]) == 1:
                chosen.setdefault(min(stages[layer]), layer)
        unsure = [layer for layer in layers if len(stages[layer]) > 1]
        for stage, layer in chosen.items():
            self._add_copies(key, layer, stage)
        if unsure and not self._are_alike(key, layers):
            self._pass_over(unsure[0], key)
        self._add_others(key, layers[:1] if unsure else [chosen[stage] for stage in sorted(chosen)])

    def _are_alike(self, key: str, layers: Sequence[int]) -> bool:
        """Whether files have the same buffers and frozen parameters, by the checksums of their bytes."""
        for held in self.save.layers:
            others = [self._list_others(key, held[layer]) for layer in layers]
            if any(others[0].keys() != each.keys() for each in others):
                return False
            if not all(are_alike(each[name].contents for each in others) for name in others[0]):
                return len(layers) == 1
        return True

    def _list_others(self, key: str, header: FileHeader) -> dict[str, Piece]:
        return {name: piece for name, piece in (header.layer or {}).items() if not self._is_optimized(key, name)}

    def _add_copies(self, key: str, layer: int, stage: int) -> None:
        for tp, layers in enumerate(self.save.layers):
            for name, piece in (layers[layer].layer or {}).items():
                if self._is_optimized(key, name):
                    rank = self.stages.ranks[stage][tp]
                    self.builder.add(rank, f"{TIED}{key}.{name}", COPY, layers[layer], piece)

    def _add_others(self, key: str, layers: Sequence[int]) -> None:
        """Buffers and frozen parameters of one file per stage that has any."""
        for tp, held in enumerate(self.save.layers):
            for index, layer in enumerate(layers):
                for short, piece in self._list_others(key, held[layer]).items():
                    name = f"{TIED}{key}.{short}"
                    self.builder.add(ModelRank(tp=tp, instances={name: index}), name, MODULE, held[layer], piece)
                    if len(layers) > 1:
                        self.builder.instances[name] = len(layers)
