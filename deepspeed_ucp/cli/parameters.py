"""What a checkpoint's index tells about each parameter, as rows for people and for JSON."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..atoms import COPY, MASTER, MODULE, Atom, AtomicIndex, ParamKey, count
from ..patterns import Pattern, Settled, Unique
from ..patterns.recorded import ORIGIN, read_pattern, record_pattern

TRAINED, FROZEN, BUFFER, WEIGHTS = "trained", "frozen", "buffer", "weights"
_LAYER_FILE = re.compile(r"layer_(\d+)-[^/]*$")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter or buffer of a checkpoint.

    Attributes:
        name: as in the model.
        instance: which of the pipeline stages that hold it under this name.
        kind: ``trained``, ``frozen`` (no optimizer owns it), ``buffer``, or ``weights`` where no optimizer is known.
        shape, numel: logical shape and its elements, None where nothing tells how its shards make up the whole.
        shards: shape on each tensor-parallel rank.
        dtype: of the master, or of the module's own tensor.
        copy: dtype of the model's copy of a trained parameter, None without one.
        states: state → dtype, masters first, copies left out.
        pattern, origin: how tensor parallelism cuts it (None: nothing tells), and what settled that.
        group: number of its param group, or None.
        scalars: the optimizer's scalars.
        aliases: names that are tied to it.
        fragments: per state the number of contiguous pieces in files.
        files: names of the files that hold a part of a state.
        nbytes: of all states as stored, replicas of tensor-parallel ranks included, copies not.
        copy_bytes: of the copies.
        why: unsettled: the rule to give.
    """

    name: str
    instance: int
    kind: str
    shape: tuple[int, ...] | None
    numel: int | None
    shards: tuple[tuple[int, ...], ...]
    dtype: str
    copy: str | None
    states: dict[str, str]
    pattern: str | None
    origin: str
    group: int | None
    scalars: dict[str, Any]
    aliases: tuple[str, ...]
    fragments: dict[str, int]
    files: tuple[str, ...]
    nbytes: int
    copy_bytes: int
    why: dict[str, Any] = field(default_factory=dict)

    @property
    def param(self) -> ParamKey:
        """What the index calls it."""
        return ParamKey(self.name, self.instance)

    @property
    def label(self) -> str:
        """What people call it."""
        return str(self.param)


def list_parameters(index: AtomicIndex, settled: Settled) -> list[Parameter]:
    """All parameters and buffers in the model's order."""
    atoms: dict[ParamKey, dict[str, Atom]] = defaultdict(dict)
    for key, atom in index.stored.atoms.items():
        atoms[key.param][key.state] = atom
    groups = {param: number for number, group in enumerate(index.run.groups) for param in group.members}
    aliases: dict[str, list[str]] = defaultdict(list)
    for alias, name in index.model.aliases.items():
        aliases[name].append(alias)
    return [
        _make_row(index, settled, param, atoms[param], groups.get(param), aliases.get(param.name, ()))
        for param in order_params(index)
    ]


def _make_row(
    index: AtomicIndex,
    settled: Settled,
    param: ParamKey,
    atoms: Mapping[str, Atom],
    group: int | None,
    aliases: Iterable[str],
) -> Parameter:
    name, copy = param.name, atoms.get(COPY)
    states = {state: atoms[state] for state in sort_states(atoms) if state != COPY} or dict(atoms)
    main = next(iter(states.values()))
    pattern, origin = settled.patterns.get(name), settled.origin.get(name, "")
    if name in index.model.recorded:  # of an atomic checkpoint: how its source was cut
        pattern, origin = read_pattern(index.model.recorded[name]), ORIGIN
    elif pattern == Unique():
        origin = ""
    why = settled.open[name].suggest() if name in settled.open else {}
    if name in settled.wrong:
        why = {"error": f"{name}: {settled.wrong[name]}"}
    shape = settled.layouts[name][0].shape if name in settled.layouts else None
    unowned = FROZEN if knows_optimizer(index) else WEIGHTS
    used = {f.record for atom in states.values() for shard in atom.shards for f in shard.pieces}
    return Parameter(
        name=name,
        instance=param.instance,
        kind=TRAINED if MODULE not in states else BUFFER if name in index.model.buffers else unowned,
        shape=shape,
        numel=None if shape is None else count(shape),
        shards=tuple(shard.shape for shard in main.shards),
        dtype=main.dtype,
        copy=copy.dtype if copy else None,
        states={state: atom.dtype for state, atom in states.items()},
        pattern=None if pattern is None else _name_pattern(pattern),
        origin=origin,
        group=group,
        scalars=dict(index.run.scalars.get(param, {})),
        aliases=tuple(aliases),
        fragments={state: sum(len(shard.pieces) for shard in atom.shards) for state, atom in states.items()},
        files=tuple(sorted({find_file(index, record) for record in used})),
        nbytes=sum(atom.nbytes for state, atom in states.items() if state != COPY),
        copy_bytes=copy.nbytes if copy else 0,
        why=why,
    )


def knows_optimizer(index: AtomicIndex) -> bool:
    """Whether the files tell which parameters an optimizer owns."""
    return any(key.state != MODULE for key in index.stored.atoms)


def sort_states(states: Iterable[str]) -> list[str]:
    """Masters first, the module's own tensors and copies last, the optimizer's by name."""
    ends = {MASTER: 0, MODULE: 2, COPY: 3}
    return sorted(states, key=lambda state: (ends.get(state, 1), state))


def find_file(index: AtomicIndex, record: int) -> str:
    """A record's file, by its path inside the checkpoint's folder."""
    path = index.stored.files[index.stored.records[record].file].path
    return path.removeprefix(f"{os.path.dirname(index.run.state_file)}/")


def _name_pattern(pattern: Pattern) -> str:
    """A pattern as rules write it, with what differs from its defaults: ``shard-h``, ``shard-nc parts=(1,1)``."""
    recorded = record_pattern(pattern)
    kind = recorded.pop("kind")
    plain = {key: value for key, value in recorded.items() if not isinstance(value, dict)}
    return " ".join((kind, *(f"{key}={value}".replace(" ", "") for key, value in plain.items())))


def order_params(index: AtomicIndex) -> list[ParamKey]:
    """All parameters in the model's order: as the module states list them, layers by their numbers."""
    listed = [key.param for key in index.stored.atoms if key.state in (COPY, MODULE)]
    owned = [key.param for key in index.stored.atoms if key.state not in (COPY, MODULE)]
    known = set(owned)
    grouped = [param for group in index.run.groups for param in group.members if param in known]
    copied = any(key.state == COPY for key in index.stored.atoms)
    params = list(dict.fromkeys([*listed, *grouped, *owned] if copied else [*grouped, *owned, *listed]))
    layers = _find_layers(index)
    first: dict[str, int] = {}
    for at, param in enumerate(params):
        first.setdefault(split_layer(param.name)[0], at)

    def rate(param: ParamKey) -> tuple[int, int, int]:
        prefix, number = split_layer(param.name)
        return layers.get(param, len(layers)), first[prefix], number

    return sorted(params, key=rate)


def _find_layers(index: AtomicIndex) -> dict[ParamKey, int]:
    """For a pipeline, the layer in whose file a parameter's copy lies."""
    found = {}
    for key, atom in index.stored.atoms.items():
        for fragment in atom.shards[0].pieces[:1] if key.state in (COPY, MODULE) else ():
            if match := _LAYER_FILE.match(find_file(index, fragment.record)):
                found[key.param] = int(match[1])
    return found


def split_layer(name: str) -> tuple[str, int]:
    """What a layer's parameters have in front of its number, and the number (-1 without one)."""
    match = re.match(r"(.*?)(?:^|(?<=\.))(\d{1,18})\.", name)
    return (match[1], int(match[2])) if match else (name.partition(".")[0], -1)
