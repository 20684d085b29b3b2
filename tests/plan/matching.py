"""Indexes that have only names and shapes, and live engines to match with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from deepspeed_ucp.model.index import AtomicIndex, GroupInfo
from deepspeed_ucp.model.storage import COPY, MASTER, MODULE, Atom, Fragments, ParamKey
from deepspeed_ucp.model.view import EngineView
from deepspeed_ucp.plan.match import Match, match_parameters
from tests.plan import planning

Shapes = Mapping[str, tuple[int, ...]]


def make_index(
    trained: Shapes,
    module: Shapes | None = None,
    groups: Sequence[Sequence[str]] = (),
    aliases: Mapping[str, str] | None = None,
    instances: Mapping[str, int] | None = None,
    tp: int = 1,
) -> AtomicIndex:
    held = [(name, state, shape) for name, shape in trained.items() for state in (MASTER, COPY)]
    held += [(name, MODULE, shape) for name, shape in (module or {}).items()]
    numbers = dict(instances or {})
    atoms = [
        Atom.of(name, state, [(shape, Fragments("float32", []))] * tp, number)
        for name, state, shape in held
        for number in range(numbers.get(name, 1))
    ]
    infos = tuple(GroupInfo(tuple(map(read_param, names)), {}) for names in groups)
    return planning.make_index(atoms, tp=tp, groups=infos, aliases=dict(aliases or {}), instances=numbers)


def read_param(name: str) -> ParamKey:
    """Parse ``t``, or ``t 1`` for the copy of the second stage that holds it."""
    plain, _, number = name.partition(" ")
    return ParamKey(plain, int(number or 0))


def match(
    index: AtomicIndex, owned: Shapes, extras: Shapes | None = MappingProxyType({}), *, tp: int = 1, **options: Any
) -> Match:
    """Match a live engine whose tensor-parallel ranks all have these shapes; `extras` may be None."""
    chosen = {"strict": True, "with_states": True}
    chosen.update({key: options.pop(key) for key in tuple(options) if key in chosen})
    trained, others = ({name: (shape,) * tp for name, shape in (held or {}).items()} for held in (owned, extras))
    view = EngineView(trained, None if extras is None else others, **options)
    return match_parameters(index, view, **chosen).require()
