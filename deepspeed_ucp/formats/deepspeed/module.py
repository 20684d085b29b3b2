"""Builds MODULE and COPY atoms from module dicts or a pipeline's layer files.

These are buffers and parameters without optimizer (MODULE), and the model's copies of optimized parameters (COPY).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise

from ...errors import CheckpointError, UnsupportedError, shorten
from ...model import COPY, MODULE, TIED, are_alike, count, number_layer
from .builder import Builder, LayerNames, SavedRank, list_ranks
from .headers import FileHeader, Piece
from .save import Save

TiedModule = tuple[str, int]
"""A tied module's key, and a stage that holds it."""

_DEEPEST = 64
"""Depth of modules that is searched for repeated ones; names may come from a hostile file."""


def add_tensors(builder: Builder, tied: Collection[str] = ()) -> None:
    """Add the tensors of all model states and layer files, and their ties to the builder's ``aliases``.

    Args:
        builder: with ranks that have the optimizers' parameters.
        tied: names of parameters of a pipeline's tied modules, if the model states lack them.

    Raises:
        CheckpointError: a layer with parameters has no file.
        UnsupportedError: names in a nested dict are ambiguous; or files of several tied modules have buffers or frozen
            parameters and cannot be distinguished.
    """
    if builder.save.is_pipeline:
        _LayerFiles(builder, tied).add()
    else:
        add_modules(builder, builder.optimized)


def add_modules(builder: Builder, optimized: set[str]) -> None:
    """Add the ``module`` dicts of all model-parallel ranks, and their ties to the builder's ``aliases``.

    Args:
        builder: of a model with its tensors in model states; under ZeRO 3 these hold only buffers.
        optimized: parameters that an optimizer owns on some rank.

    Raises:
        UnsupportedError: names in a nested dict are ambiguous.
    """
    save, is_sharded = builder.save, builder.save.is_sharded
    modules = [read_module(save, models[0], optimized) for models in save.models]
    ranks, instances = list_ranks(save, [list(tensors) for tensors in modules])
    builder.instances.update(instances)
    for mp, rank in enumerate(ranks):
        header, model = save.models[mp][0], save.model(mp)
        ties, buffers = find_ties(save, header, modules[mp]), set(model.buffers)
        for name, piece in drop_ties(modules[mp], ties):
            # Under ZeRO 3 parameters have no elements here; other tensors come from a custom state dict.
            has_data = piece.numel and name not in model.frozen_shapes if is_sharded else True
            if name in buffers or (has_data and name not in optimized):
                builder.add(rank, name, MODULE, header, piece)
            elif name in optimized and not is_sharded:
                builder.add(rank, name, COPY, header, piece)
        if is_sharded and mp == 0:
            ties, ambiguous = _tie_repeated(modules[mp], {*optimized, *model.frozen_shapes, *buffers}, ties)
            builder.ambiguous = tuple(ambiguous)
        builder.aliases = {**ties, **builder.aliases}
    for extension in save.extensions:
        extension.add_tensors(builder, optimized)


def _tie_repeated(
    tensors: Mapping[str, Piece], owned: Collection[str], ties: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Find ties of modules that are registered under several names of one parent.

    ZeRO 3's model states have no elements that show these ties, and ``shared_params`` omits them, because DeepSpeed
    visits each child of a module once. The original is a sibling with the same names and the same buffers.

    Args:
        tensors: the module's state dict, in its order.
        owned: names of parameters and buffers with separate tensors.
        ties: the known ties.

    Returns:
        All ties, and the names for which several siblings are possible.
    """
    lost = {name for name, piece in tensors.items() if not (piece.numel or name in owned or name in ties)}
    if not lost:
        return {**ties}, []
    below: dict[str, dict[str, str]] = defaultdict(dict)  # module → rest of a name → name
    for name in tensors:
        for at in islice((at for at, letter in enumerate(name) if letter == "."), _DEEPEST):
            below[name[:at]][name[at + 1 :]] = name
    siblings: dict[tuple[str, frozenset[str]], list[str]] = defaultdict(list)
    for module, rests in below.items():
        siblings[_find_parent(module), frozenset(rests)].append(module)
    without = lost | ties.keys()
    whole = {module for module, rests in below.items() if without >= {*rests.values()} and lost & {*rests.values()}}
    all_ties = dict(ties)
    for module in (module for module in whole if _find_parent(module) not in whole):
        rests = below[module]
        twins = [
            twin
            for twin in siblings[_find_parent(module), frozenset(rests)]
            if twin not in whole and all(ties.get(name) in (None, below[twin][rest]) for rest, name in rests.items())
        ]
        if len(twins) == 1:
            all_ties |= {name: below[twins[0]][rest] for rest, name in rests.items()}
    return all_ties, sorted(lost - all_ties.keys())


def _find_parent(module: str) -> str:
    return module.rpartition(".")[0]


def rename_keys(save: Save, keys: Mapping[str, str]) -> None:
    """Rename state-dict keys to names of parameters and buffers in model states and layer files, in place.

    Args:
        save: is changed in place.
        keys: key of a state dict → name, if they differ.
    """

    def rename(tensors: Mapping[str, Piece], prefix: str = "") -> dict[str, Piece]:
        prefixed = {f"{prefix}{key}": piece for key, piece in tensors.items()}
        named = {key: keys.get(key, key) for key in prefixed}
        clash = {key for key, name in named.items() if name != key and name in prefixed and name not in keys}
        return {(key if key in clash else named[key]).removeprefix(prefix): piece for key, piece in prefixed.items()}

    for models in save.models if keys else ():
        for place, header in enumerate(models):
            if header.model is not None and header.model.module:
                models[place] = replace(header, model=replace(header.model, module=rename(header.model.module)))
    for layers in save.layers if keys else ():
        for layer, header in layers.items():
            if header.layer is not None:
                layers[layer] = replace(header, layer=rename(header.layer, f"{layer}."))


def find_ties(save: Save, header: FileHeader, module: Mapping[str, Piece]) -> dict[str, str]:
    """Return the ties in ``shared_params``, which DeepSpeed fills on rank 0 only, and the extensions' ties.

    DeepSpeed also ties all parameters without elements to each other; these ties are dropped.

    Args:
        header: of the model states.
        module: their tensors.
    """
    model = header.model or save.model(0)
    shapes = {} if save.is_sharded else {name: piece.shape for name, piece in (model.module or {}).items()}
    shapes.update(model.frozen_shapes)
    ties = {alias: name for alias, name in save.model(0).shared.items() if count(shapes.get(alias, (1,)))}
    for extension in save.extensions:
        ties |= extension.find_ties(save, header, module)
    return ties


def drop_ties(tensors: Mapping[str, Piece], aliases: dict[str, str]) -> Iterable[tuple[str, Piece]]:
    """Yield the tensors that share no bytes with an earlier one; add the others to ``aliases``."""
    seen: dict[tuple[object, ...], str] = {}
    for name, piece in tensors.items():
        if name in aliases:
            continue
        first = seen.setdefault((piece.record, piece.offset, piece.shape), name) if piece.numel else name
        if first != name:
            aliases[name] = first
        else:
            yield name, piece


def find_all_ties(save: Save, known: Iterable[str]) -> dict[str, str]:
    """Return the ties in the first model states, alias → name: recorded ones, and names that share their bytes.

    Args:
        known: as for :func:`read_module`.
    """
    ties = find_ties(save, save.main, {})
    for _ in drop_ties(read_module(save, save.main, known), ties):
        pass
    return ties


def read_module(save: Save, header: FileHeader, known: Iterable[str]) -> dict[str, Piece]:
    """Return a file's ``module`` by parameter names; a nested dict's keys are matched with the known names.

    Args:
        save: the files.
        header: model states.
        known: parameters that an optimizer owns.

    Raises:
        UnsupportedError: names in a nested dict are ambiguous.
    """
    model = header.model
    module = (model.module if model else None) or {}
    if model is None or not model.nested:
        return module
    owned = set(known)
    named = {*owned, *model.buffers, *model.frozen_shapes}
    matched = match_names(list(module), named)
    matched_pieces = {module[key] for key in matched}
    lost = [key for key in module if key not in matched and module[key] not in matched_pieces]
    unseen = named - set(matched.values())
    # A client's state dict may omit buffers; a key without name may be any name without key.
    if lost and (unseen - owned or len(lost) > len(unseen)):
        raise UnsupportedError(
            "its module states are nested, and these have ambiguous names: "
            f"{shorten(sorted(lost or unseen))}. The model has names such as {shorten(sorted(named), 3)}. DeepSpeed "
            "itself can resume it in the topology that wrote it.",
            path=save.path(header),
        )
    return {matched[key]: piece for key, piece in module.items() if key in matched}


def match_names(keys: list[str], names: set[str]) -> dict[str, str]:
    """Map keys of a nested module dict to parameter names if exactly one pair differs only by a prefix.

    If all names match with the same prefix, it also applies to keys without known name (frozen parameters, which ZeRO
    1 does not list).
    """
    ends: dict[str, list[str]] = {}
    for key in keys:
        parts = key.split(".")
        for start in range(len(parts)):
            ends.setdefault(".".join(parts[start:]), []).append(key)
    known = set(keys)
    pairs: dict[str, str] = {}
    for name in names:
        fits = [name] if name in known else _fit(name, known, ends)
        if len(fits) == 1:
            pairs[name] = fits[0]
    used = Counter(pairs.values())
    matched = {key: name for name, key in pairs.items() if used[key] == 1}
    changes = {_find_change(key, name) for key, name in matched.items()}
    if len(changes) == 1 and len(matched) == len(names):
        cut, prefix = changes.pop()
        matched.update({key: prefix + key[len(cut) :] for key in keys if key not in matched and key.startswith(cut)})
    return matched


def _fit(name: str, keys: set[str], ends: Mapping[str, list[str]]) -> list[str]:
    parts = name.split(".")
    shorter = [tail for start in range(1, len(parts)) if (tail := ".".join(parts[start:])) in keys]
    return shorter[:1] or ends.get(name, [])


def _find_change(key: str, name: str) -> tuple[str, str]:
    """Return (prefix to remove from the key, prefix to add)."""
    if name.endswith(key):
        return "", name[: len(name) - len(key)]
    return key[: len(key) - len(name)], ""


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
        """List the tied modules that a layer's file may hold: same keys, same shapes, possible stage."""
        if any(layer in names.untied for names in self.names):
            return []
        places = []
        for stage, names in enumerate(self.names):
            shapes = self.ranks[stage][tp].shapes
            for key in names.find_tied(layer, tensors):
                same = (
                    piece.shape == shapes.get(f"{TIED}{key}.{name}", piece.shape) for name, piece in tensors.items()
                )
                if all(same) and self._can_hold(stage, layer):
                    places.append((key, stage))
        return places

    def _can_hold(self, stage: int, layer: int) -> bool:
        """Return False if a layer cannot be on a stage because all stages are runs of layers."""
        if not self._contiguous:
            return True
        before = (number for names in self.names[:stage] for number in names.untied)
        after = (number for names in self.names[stage + 1 :] for number in names.untied)
        return max(before, default=-1) < layer < min(after, default=layer + 1)

    def add(self) -> None:
        """Add all tensors; a tied module on a stage uses one of its files."""
        self._check_missing()
        aliases = self.builder.aliases = dict(self.save.model(0).shared)
        places: dict[int, list[TiedModule]] = {}
        for tp, layers in enumerate(self.save.layers):
            for layer, header in layers.items():
                tensors = header.layer or {}
                if fitting := self._find_tied(layer, tp, tensors):
                    places[layer] = [place for place in fitting if place in places.get(layer, fitting)]
                    continue
                named = {f"{layer}.{key}": piece for key, piece in tensors.items()}
                for name, piece in drop_ties(named, aliases):
                    state = COPY if name in self.optimized else MODULE
                    self.builder.add(SavedRank(tp=tp), name, state, header, piece)
        self._add_tied(places)

    def _check_missing(self) -> None:
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

    def _add_tied(self, places: Mapping[int, Sequence[TiedModule]]) -> None:
        by_key: dict[str, dict[int, set[int]]] = {}
        for layer, fitting in sorted(places.items()):
            keys = sorted({key for key, _ in fitting})
            if len(keys) == 1:
                by_key.setdefault(keys[0], {})[layer] = {stage for _, stage in fitting}
            else:
                self._skip_ambiguous(layer, keys[0] if keys else "")
        for key, stages in by_key.items():
            self._add_module(key, stages)

    def _skip_ambiguous(self, layer: int, key: str) -> None:
        """Skip a file that may belong to several modules; raise if it has more than copies of parameters."""
        header = self.save.layers[0][layer]
        if others := self._list_others(key, header):
            raise UnsupportedError(
                f"holds {shorten(others)} of a tied module, but the module or its stage is ambiguous. DeepSpeed itself "
                "can resume it in the topology that wrote it.",
                path=self.save.path(header),
            )

    def _is_optimized(self, key: str, name: str) -> bool:
        return f"{TIED}{key}.{name}" in self.optimized

    def _add_module(self, key: str, stages: Mapping[int, set[int]]) -> None:
        """Add a tied module: copies of certain stages, and its other tensors for each stage or once for all.

        ``stages``: layer → stages that may have written its file.
        """
        chosen: dict[int, int] = {}
        for layer, fitting in stages.items():
            if len(fitting) == 1:
                chosen.setdefault(min(fitting), layer)
        unsure = [layer for layer, fitting in stages.items() if len(fitting) > 1]
        for stage, layer in chosen.items():
            self._add_copies(key, layer, stage)
        if unsure and not self._are_alike(key, list(stages)):
            self._skip_ambiguous(unsure[0], key)
        self._add_others(key, list(stages)[:1] if unsure else [chosen[stage] for stage in sorted(chosen)])

    def _are_alike(self, key: str, layers: Sequence[int]) -> bool:
        """Return True if files have the same buffers and frozen parameters, by their checksums."""
        for files in self.save.layers:
            others = [self._list_others(key, files[layer]) for layer in layers]
            if any(others[0].keys() != pieces.keys() for pieces in others):
                return False
            if not all(are_alike(pieces[name].contents for pieces in others) for name in others[0]):
                return len(layers) == 1
        return True

    def _list_others(self, key: str, header: FileHeader) -> dict[str, Piece]:
        return {name: piece for name, piece in (header.layer or {}).items() if not self._is_optimized(key, name)}

    def _add_copies(self, key: str, layer: int, stage: int) -> None:
        for tp, layers in enumerate(self.save.layers):
            for name, piece in (layers[layer].layer or {}).items():
                if self._is_optimized(key, name):
                    rank = self.ranks[stage][tp]
                    self.builder.add(rank, f"{TIED}{key}.{name}", COPY, layers[layer], piece)

    def _add_others(self, key: str, layers: Sequence[int]) -> None:
        """Add the buffers and frozen parameters of one file for each stage."""
        for tp, files in enumerate(self.save.layers):
            for index, layer in enumerate(layers):
                for short, piece in self._list_others(key, files[layer]).items():
                    name = f"{TIED}{key}.{short}"
                    self.builder.add(SavedRank(tp=tp, instances={name: index}), name, MODULE, files[layer], piece)
                    if len(layers) > 1:
                        self.builder.instances[name] = len(layers)
