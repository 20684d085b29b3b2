"""Build MODULE and COPY atoms from module dicts or a pipeline's layer files.

These are buffers and parameters without optimizer (MODULE), and the model's copies of optimized parameters (COPY).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import islice

from ...errors import UnsupportedError, shorten
from ...model.storage import COPY, MODULE, count
from .builder import Builder, create_ranks
from .headers import FileHeader, Piece
from .save import Save

_DEEPEST = 64  # depth of modules that is searched for repeated ones; names may come from a hostile file


def add_tensors(builder: Builder, tied: Collection[str] = ()) -> None:
    """Add the tensors of all model states and layer files, and ties (``aliases``).

    Args:
        tied: names of parameters of a pipeline's tied modules, if the model states lack them.
    """
    if builder.save.is_pipeline:
        for extension in builder.save.extensions:
            extension.add_tensors(builder, builder.optimized, tied)
    else:
        add_modules(builder, builder.optimized)


def add_modules(builder: Builder, optimized: set[str]) -> None:
    """Add the ``module`` dicts of all model-parallel ranks, and ties (``aliases``).

    Args:
        builder: of a model with its tensors in model states; under ZeRO 3 these hold only buffers.
    """
    save, is_sharded = builder.save, builder.save.is_sharded
    modules = [read_module(save, models[0], optimized) for models in save.models]
    ranks, instances = create_ranks(save, [list(tensors) for tensors in modules])
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
            ties, ambiguous = _find_module_ties(modules[mp], {*optimized, *model.frozen_shapes, *buffers}, ties)
            builder.ambiguous = tuple(ambiguous)
        builder.aliases = {**ties, **builder.aliases}
    for extension in save.extensions:
        extension.add_tensors(builder, optimized, ())


def _find_module_ties(
    tensors: Mapping[str, Piece], owned: Collection[str], ties: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Find ties of modules that are registered under several names of one parent.

    ZeRO 3's model states have no elements that show these ties, and ``shared_params`` omits them, because DeepSpeed
    visits each child of a module once. The original is a sibling with the same names and the same buffers.

    Args:
        tensors: the module's state dict, in its order.
        owned: names of parameters and buffers with separate tensors.

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
    """Rename state-dict keys of a save to parameter and buffer names, in place.

    Args:
        keys: key of a state dict → name, if they differ.
    """

    def rename(tensors: Mapping[str, Piece], prefix: str = "") -> dict[str, Piece]:
        prefixed = {f"{prefix}{key}": piece for key, piece in tensors.items()}
        named = {key: keys.get(key, key) for key in prefixed}
        clash = {key for key, name in named.items() if name != key and name in prefixed and name not in keys}
        return {(key if key in clash else named[key]).removeprefix(prefix): piece for key, piece in prefixed.items()}

    for models in save.models if keys else ():
        for index, header in enumerate(models):
            model = header.require_model()
            if model.module:
                models[index] = replace(header, model=replace(model, module=rename(model.module)))
    for layers in save.layers if keys else ():
        for layer, header in layers.items():
            if header.layer is not None:
                layers[layer] = replace(header, layer=rename(header.layer, f"{layer}."))


def find_ties(save: Save, header: FileHeader, module: Mapping[str, Piece]) -> dict[str, str]:
    """Return the ties in ``shared_params``, and those that extensions find.

    DeepSpeed fills ``shared_params`` on rank 0 only. DeepSpeed also ties all parameters without elements to each other;
    these ties are dropped.
    """
    model = header.require_model()
    shapes = {} if save.is_sharded else {name: piece.shape for name, piece in (model.module or {}).items()}
    shapes.update(model.frozen_shapes)
    ties = {alias: name for alias, name in save.model(0).shared.items() if count(shapes.get(alias, (1,)))}
    for extension in save.extensions:
        ties |= extension.find_ties(save, header, module)
    return ties


def drop_ties(tensors: Mapping[str, Piece], aliases: dict[str, str]) -> Iterable[tuple[str, Piece]]:
    """Yield tensors that share no bytes with earlier ones; add others to ``aliases``."""
    seen: dict[tuple[object, ...], str] = {}
    for name, piece in tensors.items():
        if name in aliases:
            continue
        view = (piece.record, piece.offset, piece.shape, piece.dtype, piece.fault)  # other strides are another view
        first = seen.setdefault(view, name) if piece.numel else name
        if first != name:
            aliases[name] = first
        else:
            yield name, piece


def find_all_ties(save: Save, known: Iterable[str]) -> dict[str, str]:
    """Return alias → name in the first model states, as recorded or by shared bytes.

    Args:
        known: parameters that an optimizer owns.
    """
    ties = find_ties(save, save.main, {})
    for _ in drop_ties(read_module(save, save.main, known), ties):
        pass
    return ties


def read_module(save: Save, header: FileHeader, known: Iterable[str]) -> dict[str, Piece]:
    """Return a file's ``module`` by parameter names; match a nested dict's keys."""
    model = header.require_model()
    module = model.module or {}
    if not model.nested:
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
    """Map a nested dict's keys to parameter names by prefix, if only one pair fits.

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
        fits = [name] if name in known else _find_candidates(name, known, ends)
        if len(fits) == 1:
            pairs[name] = fits[0]
    used = Counter(pairs.values())
    matched = {key: name for name, key in pairs.items() if used[key] == 1}
    changes = {_find_change(key, name) for key, name in matched.items()}
    if len(changes) == 1 and len(matched) == len(names):
        cut, prefix = changes.pop()
        matched.update({key: prefix + key[len(cut) :] for key in keys if key not in matched and key.startswith(cut)})
    return matched


def _find_candidates(name: str, keys: set[str], ends: Mapping[str, list[str]]) -> list[str]:
    parts = name.split(".")
    shorter = [tail for start in range(1, len(parts)) if (tail := ".".join(parts[start:])) in keys]
    return shorter[:1] or ends.get(name, [])


def _find_change(key: str, name: str) -> tuple[str, str]:
    """Return (prefix to remove from the key, prefix to add)."""
    if name.endswith(key):
        return "", name[: len(name) - len(key)]
    return key[: len(key) - len(name)], ""
