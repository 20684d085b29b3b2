"""The model's own tensors: buffers, parameters without optimizer, copies of optimized ones → MODULE and COPY atoms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ..atoms import COPY, MODULE, count, strip_compiled
from ..errors import UnsupportedError, shorten
from .builder import Builder, Seat
from .family import Save
from .headers import FileHeader, ModelHeader, Piece


def add_modules(builder: Builder, save: Save, optimized: set[str], *, sharded: bool) -> dict[str, str]:
    """Add the ``module`` dicts of all tensor-parallel ranks; returns ties: name → the name that holds the data.

    Args:
        builder: of the index.
        save: the files of a model without pipeline.
        optimized: parameters that an optimizer owns on some rank.
        sharded: ZeRO 3, whose module dict holds buffers only.

    Raises:
        UnsupportedError: names in a nested dict that cannot be told.
    """
    aliases: dict[str, str] = {}
    for tp in range(save.tp):
        header = save.models[tp][0]
        module = read_module(save, header, optimized)
        found = _add_module(builder, Seat(tp=tp), header, module, _ties(save, tp, sharded), optimized, sharded)
        aliases = aliases or found
    return aliases


def _ties(save: Save, tp: int, sharded: bool) -> dict[str, str]:
    """``shared_params``, which DeepSpeed fills on rank 0 alone."""
    own = save.model(tp)
    return {
        strip_compiled(alias): strip_compiled(name)
        for alias, name in save.model(0).shared.items()
        if not _is_empty(own, alias, sharded)
    }


def _is_empty(model: ModelHeader, name: str, sharded: bool) -> bool:
    """Parameters without elements share no storage, though ``shared_params`` ties all of them together."""
    if name in model.frozen_shapes:
        return count(tuple(model.frozen_shapes[name])) == 0
    piece = (model.module or {}).get(name)
    return not sharded and piece is not None and piece.numel == 0


def _add_module(
    builder: Builder,
    seat: Seat,
    header: FileHeader,
    module: Mapping[str, Piece],
    aliases: dict[str, str],
    optimized: set[str],
    sharded: bool,
) -> dict[str, str]:
    file = builder.file(header)
    buffers = {strip_compiled(name) for name in header.model.buffers} if header.model else set()
    for name, piece in drop_ties(module, aliases):
        if name in buffers or not (name in optimized or sharded):
            builder.add(seat, name, MODULE, piece.shape, file, piece)
        elif name in optimized and not sharded:
            builder.add(seat, name, COPY, piece.shape, file, piece)
    return aliases


def drop_ties(tensors: Mapping[str, Piece], aliases: dict[str, str]) -> Iterable[tuple[str, Piece]]:
    """The tensors by name without those that share another one's bytes, which are added to ``aliases``."""
    seen: dict[tuple[object, int, tuple[int, ...]], str] = {}
    for raw, piece in tensors.items():
        name = strip_compiled(raw)
        if name in aliases:
            continue
        if piece.numel and (first := seen.setdefault((piece.blob, piece.offset, piece.shape), name)) != name:
            aliases[name] = first
            continue
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
    named = {strip_compiled(name) for name in (*owned, *model.buffers, *model.frozen_shapes)}
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
