"""The model's own tensors: buffers, parameters without optimizer, copies of optimized ones → MODULE and COPY atoms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ..atoms import COPY, MODULE, count
from ..errors import UnsupportedError, shorten
from .builder import Builder
from .headers import FileHeader, ModelHeader, Piece, Shape
from .ranks import ModelRank
from .save import Save


def add_modules(builder: Builder, save: Save, optimized: set[str]) -> None:
    """Add the ``module`` dicts of all tensor-parallel ranks, and ties to the builder's ``aliases``.

    Args:
        builder: of the index.
        save: the files of a model without pipeline; of ZeRO 3 the module dict holds buffers only.
        optimized: parameters that an optimizer owns on some rank.

    Raises:
        UnsupportedError: names in a nested dict that cannot be told.
    """
    for tp in range(save.tp):
        header, model = save.models[tp][0], save.model(tp)
        ties, buffers = _find_ties(save, model), set(model.buffers)
        for name, piece in drop_ties(read_module(save, header, optimized), ties):
            if name in buffers or not (name in optimized or save.is_sharded):
                builder.add(ModelRank(tp=tp), name, MODULE, header, piece)
            elif name in optimized and not save.is_sharded:
                builder.add(ModelRank(tp=tp), name, COPY, header, piece)
        builder.aliases = builder.aliases or ties


def _find_ties(save: Save, model: ModelHeader) -> dict[str, str]:
    """``shared_params``, which DeepSpeed fills on rank 0 alone.

    It ties parameters without elements as well, all of them together, though they share no storage.
    """
    shapes = {} if save.is_sharded else {name: piece.shape for name, piece in (model.module or {}).items()}
    shapes.update(model.frozen_shapes)
    return {alias: name for alias, name in save.model(0).shared.items() if count(shapes.get(alias, (1,)))}


def drop_ties(tensors: Mapping[str, Piece], aliases: dict[str, str]) -> Iterable[tuple[str, Piece]]:
    """The tensors by name without those that share another one's bytes, which are added to ``aliases``."""
    seen: dict[tuple[object, int, Shape], str] = {}
    for name, piece in tensors.items():
        if name in aliases:
            continue
        first = seen.setdefault((piece.record, piece.offset, piece.shape), name) if piece.numel else name
        if first != name:
            aliases[name] = first
        else:
            yield name, piece


def read_module(save: Save, header: FileHeader, known: Iterable[str]) -> dict[str, Piece]:
    """A file's ``module`` by parameter names; a nested dict's keys are matched with the known names.

    Args:
        save: the files.
        header: model states.
        known: parameters that an optimizer owns.

    Raises:
        UnsupportedError: a nested dict with tensors whose names cannot be told.
    """
    model = header.model
    module = (model.module if model else None) or {}
    if model is None or not model.nested:
        return module
    owned = set(known)
    named = {*owned, *model.buffers, *model.frozen_shapes}
    found = match_names(list(module), named)
    held = {module[key] for key in found}
    lost = [key for key in module if key not in found and module[key] not in held]
    unseen = named - set(found.values())
    # A state dict of the client's own may leave buffers out; what is lost may be any of those that are not seen.
    if lost and (unseen - owned or len(lost) > len(unseen)):
        raise UnsupportedError(
            f"{save.path(header)}: its module states are nested, and these cannot be told by name: "
            f"{shorten(sorted(lost or unseen))}. The model's own names are such as {shorten(sorted(named), 3)}. It can "
            "be resumed by DeepSpeed itself in the topology that wrote it."
        )
    return {name: module[key] for key, name in found.items()}


def match_names(keys: list[str], names: set[str]) -> dict[str, str]:
    """Key of a nested module dict → parameter name, where one is the other with a prefix, and no other fits.

    Where all names match with the same prefix, keys that no name is known for (frozen parameters, which ZeRO 1 does
    not list) take it too.
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
    found = {key: name for name, key in pairs.items() if used[key] == 1}
    changes = {_find_change(key, name) for key, name in found.items()}
    if len(changes) == 1 and len(found) == len(names):
        cut, prefix = changes.pop()
        found.update({key: prefix + key[len(cut) :] for key in keys if key not in found and key.startswith(cut)})
    return found


def _fit(name: str, keys: set[str], ends: Mapping[str, list[str]]) -> list[str]:
    parts = name.split(".")
    shorter = [tail for start in range(1, len(parts)) if (tail := ".".join(parts[start:])) in keys]
    return shorter[:1] or ends.get(name, [])


def _find_change(key: str, name: str) -> tuple[str, str]:
    """(prefix that is cut off the key, prefix that is put before it)."""
    if name.endswith(key):
        return "", name[: len(name) - len(key)]
    return key[: len(key) - len(name)], ""
