"""The layer files of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from ..comm import Comm
from ..errors import CheckpointError, UnsupportedError, shorten
from ..formats.deepspeed.builder import Builder, LayerNames, SavedRank
from ..formats.deepspeed.files import NO_AXIS
from ..formats.deepspeed.headers import FileHeader, Piece
from ..formats.deepspeed.module import drop_ties
from ..formats.deepspeed.save import Save, find_degrees
from ..formats.findings import WARNING, Finding
from ..model.storage import COPY, MODULE, TIED, are_alike, number_layer
from .registry import SaveExtension

TiedModule = tuple[str, int]
"""A tied module's key, and a stage that holds it."""


class SavedLayers(SaveExtension):
    """A save of a pipeline, with the model's tensors in layer files."""

    def name_files(self, save: Save) -> dict[str, str]:
        model = save.first[0].model
        return dict.fromkeys(_name_layers(save, find_degrees(save, model)[1]), "") if model else {}

    def verify_save(self, save: Save, comm: Comm) -> list[Finding]:
        layers = save.layers[0] if save.layers else {}
        keys = [f"{layer}.{key}" for layer, header in sorted(layers.items()) for key in header.extras]
        text = f"extra states in a pipeline's layer files are neither loaded nor converted: {shorten(keys, 3)}."
        return [Finding("unsupported", "", f"{save.folder}: {text}", WARNING)] if keys else []

    def add_tensors(self, builder: Builder, optimized: set[str], tied: Collection[str]) -> None:
        _LayerFiles(builder, tied).add()


def _name_layers(save: Save, tp: int) -> list[str]:
    """Return the expected names of layer files.

    Layers without parameters and buffers have no file, so a layer that all ranks lack is not detected here.
    """
    files = save.names["layer"]
    plain = {layer for layer, rank in files if rank == NO_AXIS}
    numbered = {layer for layer, rank in files if 0 <= rank < tp}
    if not plain and not numbered:
        raise CheckpointError(
            "a pipeline's model states without any layer_*-model_states.pt. Copy the whole folder.", path=save.folder
        )
    if plain and numbered and tp == 1:
        raise CheckpointError(
            f"holds the layer files of two saves ({files[min(plain), NO_AXIS]} and "
            f"{files[min(numbered), 0]} do not belong together). Remove the older save's files.",
            path=save.folder,
        )
    if tp == 1 and plain:
        return [files[layer, NO_AXIS] for layer in sorted(plain)]
    return [save.name("layer", layer, rank) for layer in sorted(numbered) for rank in range(tp)]


class _LayerFiles:
    """A pipeline's layer files.

    Tied layers, and the stage that wrote a file, are not recorded but inferred from names and shapes.

    Attributes:
        ranks: of each pipeline stage.
        optimized: parameters that an optimizer owns on some stage.
        names: of the layers of each pipeline stage.
    """

    def __init__(self, builder: Builder, tied: Collection[str]) -> None:
        self.builder, self.save, self.optimized = builder, builder.save, builder.optimized
        self.ranks = [
            builder.ranks[first : first + self.save.tp] for first in range(0, len(builder.ranks), self.save.tp)
        ]
        self.names: list[LayerNames] = []
        for stage, ranks in enumerate(self.ranks):
            models = [self.save.model(stage * self.save.tp + tp) for tp in range(self.save.tp)]
            names = {name for model in models for name in (*model.buffers, *model.frozen_shapes)}
            names.update(*(rank.shapes for rank in ranks))
            names.update(*(tied for model in models if model.param_shapes is None))
            self.names.append(LayerNames.of(names))
        self._contiguous = all(
            max(low) < min(high)
            for low, high in pairwise(stage_names.untied for stage_names in self.names if stage_names.untied)
        )

    def _find_tied(self, layer: int, tp: int, tensors: Mapping[str, Piece]) -> list[TiedModule]:
        """List the tied modules that a layer's file may hold, by keys, shapes and stage."""
        if any(layer in names.untied for names in self.names):
            return []
        modules = []
        for stage, names in enumerate(self.names):
            shapes = self.ranks[stage][tp].shapes
            for key in names.find_tied(layer, tensors):
                same = (
                    piece.shape == shapes.get(f"{TIED}{key}.{name}", piece.shape) for name, piece in tensors.items()
                )
                if all(same) and self._can_hold(stage, layer):
                    modules.append((key, stage))
        return modules

    def _can_hold(self, stage: int, layer: int) -> bool:
        """Return False if a stage of consecutive layers cannot include a layer."""
        if not self._contiguous:
            return True
        before = (number for names in self.names[:stage] for number in names.untied)
        after = (number for names in self.names[stage + 1 :] for number in names.untied)
        return max(before, default=-1) < layer < min(after, default=layer + 1)

    def add(self) -> None:
        """Add all tensors; a tied module on a stage uses one of its files."""
        self._check_missing()
        aliases = self.builder.aliases = dict(self.save.model(0).shared)
        candidates: dict[int, list[TiedModule]] = {}
        for tp, layers in enumerate(self.save.layers):
            for layer, header in layers.items():
                tensors = header.layer or {}
                if fitting := self._find_tied(layer, tp, tensors):
                    candidates[layer] = [module for module in fitting if module in candidates.get(layer, fitting)]
                    continue
                named = {f"{layer}.{key}": piece for key, piece in tensors.items()}
                for name, piece in drop_ties(named, aliases):
                    state = COPY if name in self.optimized else MODULE
                    self.builder.add(SavedRank(tp_rank=tp), name, state, header, piece)
        self._add_tied(candidates)

    def _check_missing(self) -> None:
        """Raise CheckpointError if a layer with trained parameters has no file."""
        trained = set(map(number_layer, self.optimized)) - {-1}
        for tp, layers in enumerate(self.save.layers):
            if lacking := sorted(trained - set(layers)):
                axis = "" if all(rank < 0 for _, rank in self.save.names["layer"]) else f"-model_{tp:02d}"
                names = [f"layer_{layer:02d}{axis}-model_states.pt" for layer in lacking]
                raise CheckpointError(
                    f"{shorten(names)} missing; these layers have parameters. Copy the whole folder.",
                    path=self.save.folder,
                    kind="missing",
                )

    def _add_tied(self, candidates: Mapping[int, Sequence[TiedModule]]) -> None:
        """Add tied modules, given the modules that each layer's file may hold."""
        by_key: dict[str, dict[int, set[int]]] = {}
        for layer, fitting in sorted(candidates.items()):
            keys = sorted({key for key, _ in fitting})
            if len(keys) == 1:
                by_key.setdefault(keys[0], {})[layer] = {stage for _, stage in fitting}
            else:
                self._skip_ambiguous(layer, keys[0] if keys else "")
        for key, stages in by_key.items():
            self._add_module(key, stages)

    def _skip_ambiguous(self, layer: int, key: str) -> None:
        """Ignore a file of an unknown module or stage; raise if it has untrained tensors."""
        header = self.save.layers[0][layer]
        if untrained := self._list_untrained(key, header):
            raise UnsupportedError(
                f"holds {shorten(untrained)} of a tied module, but the module or its stage is ambiguous. DeepSpeed "
                "itself can resume it in the topology that wrote it.",
                path=self.save.path(header),
            )

    def _is_optimized(self, key: str, name: str) -> bool:
        return f"{TIED}{key}.{name}" in self.optimized

    def _add_module(self, key: str, stages: Mapping[int, set[int]]) -> None:
        """Add a tied module: its copies by stage, and its other tensors.

        The other tensors are added for each stage, or once if a file's stage is unknown.

        Args:
            stages: layer → stages that may have written its file.
        """
        chosen: dict[int, int] = {}
        for layer, fitting in stages.items():
            if len(fitting) == 1:
                stage = min(fitting)
                if stage in chosen:
                    self._compare(key, stage, chosen[stage], layer)
                chosen[stage] = layer  # the last one counts, as in DeepSpeed's load
        unsure = [layer for layer, fitting in stages.items() if len(fitting) > 1]
        for stage, layer in chosen.items():
            for rank, layers in zip(self.ranks[stage], self.save.layers, strict=False):
                for name, piece in (layers[layer].layer or {}).items():
                    if self._is_optimized(key, name):
                        self.builder.add(rank, f"{TIED}{key}.{name}", COPY, layers[layer], piece)
        if unsure and not self._are_alike(key, list(stages)):
            self._skip_ambiguous(unsure[0], key)
        self._add_untrained(key, list(stages)[:1] if unsure else [chosen[stage] for stage in sorted(chosen)])

    def _compare(self, key: str, stage: int, earlier: int, later: int) -> None:
        """Compare the parameters in two layers' files of a tied module of one stage.

        With ``parallel_write`` two data-parallel ranks write them, whose buffers may differ.

        Raises:
            CheckpointError: by their checksums they have other values.
        """
        for tp, layers in enumerate(self.save.layers):
            first, second = (layers[layer].layer or {} for layer in (earlier, later))
            buffers = {*self.save.model(stage * self.save.tp + tp).buffers}
            names = {name for name in first.keys() | second.keys() if f"{TIED}{key}.{name}" not in buffers}
            if differing := sorted(name for name in names if _differ(first.get(name), second.get(name))):
                raise CheckpointError(
                    f"holds other values of {shorten(f'{TIED}{key}.{name}' for name in differing)} than "
                    f"{layers[earlier].name}, although one module has both. One of the files is of another save or was "
                    "edited; load another tag.",
                    path=self.save.path(layers[later]),
                )

    def _are_alike(self, key: str, layers: Sequence[int]) -> bool:
        """Return True if layers' files have equal untrained tensors, by checksums."""
        for files in self.save.layers:
            untrained = [self._list_untrained(key, files[layer]) for layer in layers]
            if any(untrained[0].keys() != pieces.keys() for pieces in untrained):
                return False
            if not all(are_alike(pieces[name].contents for pieces in untrained) for name in untrained[0]):
                return len(layers) == 1
        return True

    def _list_untrained(self, key: str, header: FileHeader) -> dict[str, Piece]:
        return {name: piece for name, piece in (header.layer or {}).items() if not self._is_optimized(key, name)}

    def _add_untrained(self, key: str, layers: Sequence[int]) -> None:
        """Add buffers and frozen parameters: ``layers`` are one file for each stage."""
        for tp, files in enumerate(self.save.layers):
            for index, layer in enumerate(layers):
                for short, piece in self._list_untrained(key, files[layer]).items():
                    name = f"{TIED}{key}.{short}"
                    self.builder.add(SavedRank(tp_rank=tp, instances={name: index}), name, MODULE, files[layer], piece)
                    if len(layers) > 1:
                        self.builder.instances[name] = len(layers)


def _differ(one: Piece | None, other: Piece | None) -> bool:
    """Return True if one tensor is missing or checksums prove a difference."""
    if one is None or other is None:
        return True
    return None not in (one.record.crc, other.record.crc) and one.contents != other.contents
