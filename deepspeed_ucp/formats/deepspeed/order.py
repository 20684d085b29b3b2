"""Infers the order of a stage-0 optimizer's parameters from the order of the saved module's state dict.

An optimizer usually has the module's order: ``model.parameters()``, or groups filled in a loop over them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import MismatchError
from ...model import find_owner, strip_compiled
from ...model.experts import is_expert, read_name
from .headers import Shape
from .module import match_names, read_module
from .naming import CHANGING, GroupNames, Naming
from .save import Save

Place = tuple[int, int]
"""(number of a parameter's unit, its place in the unit); the order among units is not compared."""

Places = Mapping[str, Place]
"""Form of a parameter's name → place."""

_LAST = (1 << 62, 0)


def _name_form(name: str) -> str:
    """Return the name, or for an expert the name of its layer's first expert."""
    found = read_name(name)
    if found is None:
        return name
    return f"{found.layer}{found.end}.0" if found.fused else f"{found.layer}0{found.end}"


def number_names(names: Iterable[str], unit: Callable[[str], int] = is_expert) -> dict[str, Place]:
    """Number names in their order.

    Args:
        unit: returns the number of a name's unit; default: experts are one, as their files order only themselves.
    """
    places: dict[str, Place] = {}
    for place, name in enumerate(names):
        places.setdefault(_name_form(name), (unit(name), place))
    return places


@dataclass(frozen=True, slots=True)
class ModuleOrder:
    """The orders of the parameters in the live and in the saved module.

    Attributes:
        path: of the file with the saved order.
        now: places in the live module.
        before: places in the saved module.
        shapes: form of a name → shape in the saved module.
        pipeline: each layer's file orders only the layer's parameters.
        record: returns the places in the live module's state dict, whose order may differ.
    """

    path: str
    now: Places
    before: Places
    shapes: Mapping[str, Shape]
    pipeline: bool = False
    record: Callable[[], Places] | None = None

    def follow(self, groups: GroupNames, hyper: Sequence[Mapping[str, Any]]) -> GroupNames:
        """Return the live optimizer's param groups in the saved order.

        Args:
            groups: with the files' names.
            hyper: their hyper-parameters.

        Raises:
            MismatchError: the module has another order, and the saved optimizer's order is not certain.
        """
        held = [self._list_known(group) for group in groups]
        moved = [names for names in held if self._differ(names, self.now)]
        swapped = [names for names in self._list_alike(held, hyper) if self._differ(names, self.now)]
        recorded = self.record() if self.record and (moved or swapped) else self.now
        if not any(self._differ(names, recorded) for names in (*moved, *swapped)):
            return groups
        if doubt := self._find_doubt(moved, swapped, recorded):
            names = (moved or swapped)[0]
            pair = zip(_sort(names, self.now), _sort(names, self.before), strict=True)
            one, other = next(both for both in pair if both[0] != both[1])
            raise MismatchError(
                f"this run's module defines its parameters in another order ({one} before {other}; in the "
                f"checkpoint behind it), and {doubt}. Stage 0 saves optimizer states by position, without names: "
                "define the modules in the saved order, or load with load_optimizer_states=False.",
                path=self.path,
            )
        pairs = zip(held, groups, strict=True)
        return [self._move(group, names) if names in moved else group for names, group in pairs]

    def is_kept(self, group: Iterable[tuple[str, bool]]) -> bool:
        """Return True if a group of the live optimizer has the module's order."""
        names = self._list_known(group)
        return all(self._is_sorted([name for name in names if is_expert(name) == which]) for which in (True, False))

    def _is_sorted(self, names: list[str]) -> bool:
        return names == _sort(names, self.now)

    def _find_doubt(self, moved: Sequence[list[str]], swapped: Sequence[list[str]], recorded: Places) -> str:
        """Explain why the saved optimizer's order is uncertain; empty if it is certain."""
        affected = [name for names in (*moved, *swapped) for name in names]
        if _sort(affected, recorded) != _sort(affected, self.now):
            return "the model's state_dict has a different order, which hides the saved module's"
        if self.pipeline:
            return "their order in the optimizers of a pipeline's stages is not known"
        if swapped:
            return "param groups of the same sizes may have changed places as well"
        if any(map(is_expert, affected)):
            return "the places of experts among them are not known"
        if not all(map(self._is_sorted, moved)):
            return "the optimizer has them in a different order"
        return ""

    def _list_known(self, group: Iterable[tuple[str, bool]]) -> list[str]:
        """Return the forms of a group's names that have a place in both modules."""
        forms = dict.fromkeys(_name_form(strip_compiled(name)) for name, _ in group)
        return [form for form in forms if form in self.now and form in self.before]

    def _list_alike(self, held: Sequence[list[str]], hyper: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """Return the first parameters of groups with equal hyper-parameters and shapes, together."""
        alike: dict[tuple[str, str], list[str]] = defaultdict(list)
        for number, names in enumerate(held):
            fields = hyper[number] if number < len(hyper) else {}
            fixed = sorted((key, repr(value)) for key, value in fields.items() if key not in CHANGING)
            sizes = sorted(self.shapes[name] for name in names)
            alike[str(fixed), str(sizes)] += _sort(names, self.now)[:1]
        return list(alike.values())

    def _differ(self, names: list[str], places: Places) -> bool:
        return _sort(names, places) != _sort(names, self.before)

    def _move(self, group: Sequence[tuple[str, bool]], names: list[str]) -> list[tuple[str, bool]]:
        """Return a group with the parameters ``names`` in the saved order."""
        items = {strip_compiled(item[0]): item for item in group}
        moved = dict(zip(names, _sort(names, self.before), strict=True))
        return [items[moved.get(name, name)] for name in items]


def _sort(names: Iterable[str], places: Places) -> list[str]:
    return sorted(names, key=lambda name: places.get(name, _LAST))


def compare_modules(save: Save, naming: Naming) -> ModuleOrder:
    """Compare the order of the live module with the saved module and its experts' files."""
    tensors = dict(read_module(save, save.main, naming.order))
    layers = {layer: file.layer or {} for (layer, *_), file in save.experts.items()}
    for layer in sorted(layers):
        tensors |= layers[layer]
    before = number_names(tensors)
    for name, first in naming.order.items():  # a tied parameter has the place of the first of its names
        if (other := _name_form(name)) in before:
            before[_name_form(first)] = min(before.get(_name_form(first), _LAST), before[other])
    shapes = {_name_form(name): piece.shape for name, piece in tensors.items()}
    shapes |= {_name_form(first): shapes[name] for name, first in naming.order.items() if name in shapes}
    record = partial(_read_record, naming, nested=save.model(0).nested) if naming.record else None
    return ModuleOrder(save.path(save.main), number_names(naming.order.values()), before, shapes, record=record)


def _read_record(naming: Naming, *, nested: bool) -> Places:
    names = [*naming.record()] if naming.record else []
    found = match_names(names, set(naming.order)) if nested else {}
    return number_names(found.get(name, name) for name in names)


def compare_layers(save: Save, naming: Naming, shapes: Mapping[str, Shape]) -> ModuleOrder:
    """Compare the orders within a pipeline's layers; ``shapes`` are in the order of the layers' files."""
    owners: dict[str, int] = {}
    before = number_names(shapes, lambda name: owners.setdefault(find_owner(name), len(owners)))
    now = number_names(naming.order.values(), lambda name: owners.get(find_owner(name), -1))
    return ModuleOrder(save.path(save.main), now, before, shapes, pipeline=True)
