"""The live optimizer in a load: whether saved states fit, and their restoration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..engine.base import Target, dtype_name
from ..engine.optimizer import StateKinds, depends_on_cut, probe_optimizer, restore_hyper, restore_scalar
from ..engine.references import update_in_place
from ..engine.rule import KEEP_LIVE, find_doubt, find_edits, find_one_sided, find_other_rule, read_configured
from ..errors import MismatchError, shorten
from ..formats.deepspeed.headers import Unread
from ..model.index import AtomicIndex
from ..model.storage import COPY, MASTER, MODULE, ParamKey
from ..model.topology import drop_labels
from ..model.view import EngineBuffer
from ..model.wrappers import USE_MUON
from ..plan.match import Match
from ..plan.settling import describe_irregular
from ..plan.wants import find_states, join_states
from .context import LoadContext

WEIGHTS_ONLY = "load with load_optimizer_states=False (weights only)"

_NEW = (
    "{}: new or thawed; their optimizer states are zero under the step count of the others in their buffer or group, "
    "which makes Adam's first updates of them larger than at a start. In a separate param group they would start at "
    "step 0."
)
_STATELESS = "{}: no optimizer state was saved for these parameters; it starts from zero"
_ELSEWHERE = "no optimizer state was saved for the parameters that are trained here: the states of {} start from zero"
_BARE = (
    "the saved optimizer kept no states: the states of {} start from zero. If it is another optimizer, the saved "
    'hyper-parameters are not meant for it ("param_groups": "live" keeps this run\'s)'
)
_UNKNOWN = (
    "{}: its step cannot be tried on a copy, so the saved states ({}) are restored without a comparison with its own"
)
_UNEVEN = (
    "{}: its step depends on how ZeRO cuts the parameters; its state is restored exactly, but the next losses are not "
    "those of the saved topology"
)


@dataclass(slots=True)
class States:
    """Optimizer states of a flat buffer to restore: tensors and scalars by name.

    ``flat`` has the dtypes of the tensors. ``lazy``: the optimizer is known to create missing states in its next step.
    Otherwise it may rely on the states that it has.
    """

    flat: EngineBuffer
    tensors: dict[str, torch.Tensor]
    scalars: dict[str, Any]
    lazy: bool


def _allocate_state(flat: EngineBuffer, state: str, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a state; in a file if the buffer is swapped (or raise DiskFullError)."""
    if flat.swap is None:
        return torch.empty(flat.find_shape(state), dtype=dtype, device=flat.tensor.device)
    allocated: torch.Tensor = flat.swap.make(flat.buffer.partition, state)
    return allocated


class OptimizerMatch:
    """The checkpoint's states for the live optimizer, by flat buffer."""

    def __init__(self, index: AtomicIndex, target: Target, match: Match) -> None:
        self.index, self.target, self.match = index, target, match
        self.probes: dict[tuple[int, str, int], StateKinds | None] = {}

    def saved_params(self, flat: EngineBuffer) -> list[ParamKey]:
        """Return the saved parameters whose states a flat buffer's parameters take."""
        return [self.match.params[name] for name in flat.names if name in self.match.params]

    def saved_states(self, flat: EngineBuffer) -> dict[str, str]:
        """Return the states that the checkpoint has for a flat buffer, with their dtypes."""
        return join_states(self.index, flat.buffer, self.match)

    def probe(self, flat: EngineBuffer) -> StateKinds | None:
        """Return the live optimizer's states for the group, by the saved hyper-parameters."""
        key = (flat.group, flat.dtype, flat.tensor.dim())
        if key not in self.probes:
            hyper = self.match.hyper.get(flat.group, {})
            self.probes[key] = probe_optimizer(self.target.optimizer, self.target.param_group(flat), hyper, flat.tensor)
        return self.probes[key]

    def check(self) -> None:
        """Raise MismatchError if the live optimizer cannot continue from saved states."""
        if fault := next(filter(None, self._find_faults()), ""):
            raise MismatchError(f"{fault} {WEIGHTS_ONLY}.")

    def _find_faults(self) -> Iterator[str]:
        if text := describe_irregular(self.index):
            yield f"{text} To continue,"
        saved, tp = self.index.topology, self.target.parallel.tp
        is_muon = any(hyper.get(USE_MUON) for hyper in self.match.hyper.values())
        if is_muon and saved.traits.is_positional and saved.tp != tp:
            yield (
                "Stage 0 saves no parameter names, and DeepSpeed's Muon sorts its parameters by their local shapes, "
                f"which tp {saved.tp} → {tp} changes. Resume at the saved degree under ZeRO, whose saves have names, or"
            )
        tensors = sorted(  # such as an average of the weights: they would keep the values of the fresh run
            f"{key} ({value.kind})"
            for hyper in self.match.hyper.values()
            for key, value in hyper.items()
            if isinstance(value, Unread) and value.has_tensors
        )
        if tensors:
            yield (
                f"The optimizer keeps tensors in its param groups: {shorten(dict.fromkeys(tensors))}. They cannot be "
                "cut for another topology. To continue,"
            )
        seen: set[tuple[int, int, tuple[str, ...]]] = set()
        for flat in self.target.flats:
            key = flat.group, flat.tensor.dim(), tuple(self.saved_states(flat))
            if key not in seen:
                seen.add(key)
                yield self._find_fault(flat, key[-1])
            yield self._find_gap(flat, key[-1])

    def _find_gap(self, flat: EngineBuffer, stored: tuple[str, ...]) -> str:
        """Describe a parameter that lacks saved states which others of its buffer have."""
        for param in self.saved_params(flat):
            states = find_states(self.index, param)
            if 0 < len(states) < len(stored):
                fact = f"The checkpoint has {', '.join(states)} of {param}, and {', '.join(stored)} of others."
                return f"{fact} To continue,"
        return ""

    def _find_fault(self, flat: EngineBuffer, stored: tuple[str, ...]) -> str:
        """Describe why the optimizer cannot continue from the ``stored`` states, or ""."""
        kept = self.probe(flat)
        if kept is None or not (stored or any(self.index.scalars.get(param) for param in self.saved_params(flat))):
            return ""
        kind, group = type(self.target.optimizer).__name__, self.target.param_group(flat)
        if kept.other:
            listed = [f"{name} ({description})" for name, description in kept.other.items()]
            return f"{kind} keeps states that are not element-wise: {shorten(listed)}. To continue,"
        if set(stored) != set(kept.elementwise):
            return (
                f"The checkpoint's optimizer ({self.index.optimizer or 'not named'}) keeps "
                f"{', '.join(stored) or 'no state'} for {shorten(flat.names, 3)}; this run's {kind} keeps "
                f"{', '.join(sorted(kept.elementwise)) or 'no state'}. Continue with the saved run's optimizer, or"
            )
        # States that the saved hyper-parameters would switch off (``amsgrad``) against this run's configuration.
        switched = stored and flat.group in self.match.hyper
        unswitched = probe_optimizer(self.target.optimizer, group, {}, flat.tensor) if switched else None
        if unswitched and (lacking := sorted(set(unswitched.elementwise) - set(stored))):
            return (
                f"This run's {kind} keeps {', '.join(lacking)} by its hyper-parameters, the checkpoint's did not: the "
                "saved hyper-parameters would switch that off. Configure the optimizer as in the saved run, or"
            )
        saved, configured = self.match.hyper.get(flat.group, {}), self.index.configured
        if rule := find_other_rule(self.target.optimizer, self.target.optimizer.param_groups[group], saved, configured):
            return (
                f"The checkpoint's optimizer has another update rule: {rule}. Continue with the saved run's optimizer, "
                f"or set {KEEP_LIVE} to continue with this run's rule if it needs no other states, or"
            )
        scalars = set().union(*(self.index.scalars.get(param, ()) for param in self.saved_params(flat)))
        if stored and (lacking := sorted(set(kept.scalars) - scalars)):
            return (
                f"This run's {kind} needs {', '.join(lacking)} of each parameter, which the checkpoint's optimizer did "
                "not keep. Continue with the saved run's optimizer, or"
            )
        return ""

    def find_live_states(self, flat: EngineBuffer) -> dict[str, torch.Tensor]:
        """Return the element-wise states that the optimizer has in memory already."""
        states = self.target.optimizer.state.get(flat.tensor, {})
        tensors = {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}
        if flat.swap is not None:  # a state in a swap file is not in memory
            tensors = {name: value for name, value in tensors.items() if not getattr(value, "swappable", True)}
        return {name: value for name, value in tensors.items() if value.shape == flat.find_shape(name)}

    def make_states(self, flat: EngineBuffer) -> States:
        """Return a flat buffer's states to restore: the optimizer's, or new memory."""
        kept, live, tensors = self.probe(flat), self.find_live_states(flat), {}
        for state, stored in self.saved_states(flat).items():
            dtype = kept.elementwise.get(state) if kept and state not in flat.whole else None
            make = partial(_allocate_state, flat, state, dtype or getattr(torch, stored))
            if 0 not in flat.find_shape(state):  # padding alone
                tensors[state] = live[state] if state in live else make()
        dtypes = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}
        described = replace(flat, states=dtypes, live=live.keys() & tensors.keys())
        return States(described, tensors, self._join_scalars(flat), kept is not None and kept.lazy)

    def list_notes(self) -> list[str]:
        """Describe states that start from zero, and steps that depend on the cut."""
        index, target, notes = self.index, self.target, list[str]()
        has_trained = bool(index.groups) and bool(index.foreign or index.counters.get("global_steps"))
        kind = type(target.optimizer).__name__
        if new := dict.fromkeys(name for flat in target.flats for name in self._list_stateless(flat)):
            notes.append(_NEW.format(shorten(new)))
        bare = [flat for flat in target.flats if not self._has_states(flat)]
        if len(bare) < len(target.flats):
            saved = {param for group in index.groups for param in group.members}
            if trained := [name for flat in bare for name in flat.names if self.match.params.get(name) in saved]:
                notes.append(_STATELESS.format(shorten(trained)))
        elif has_trained and any((kept := self.probe(flat)) and kept.elementwise for flat in bare):
            others = {*index.atoms.list_states()} - {MASTER, MODULE, COPY}
            notes.append((_ELSEWHERE if others or any(index.scalars.values()) else _BARE).format(kind))
        unknown = [self.saved_states(flat) for flat in target.flats if self.probe(flat) is None]
        if names := sorted(set().union(*unknown)):
            notes.append(_UNKNOWN.format(kind, ", ".join(names)))
        firsts = {flat.group: flat for flat in reversed(target.flats)}
        if any(depends_on_cut(target.optimizer, target.param_group(flat), flat.tensor) for flat in firsts.values()):
            notes.append(_UNEVEN.format(kind))
        return notes

    def _list_stateless(self, flat: EngineBuffer) -> list[str]:
        """List parameters without saved states that get the restored step count of others.

        The others are in the same flat buffer, or in the param group if it has the count (FusedAdam).
        """
        stepped = {param for param in self.saved_params(flat) if self.index.scalars.get(param)}
        if not stepped and self.match.hyper.get(flat.group, {}).get("step"):
            saved = (
                param for number in self.match.groups.get(flat.group, ()) for param in self.index.groups[number].members
            )
            stepped = {param for param in saved if find_states(self.index, param)}
        return [name for name in flat.names if stepped and self.match.params.get(name) not in stepped]

    def _has_states(self, flat: EngineBuffer) -> bool:
        scalars = self.index.scalars
        return bool(self.saved_states(flat)) or any(scalars.get(param) for param in self.saved_params(flat))

    def _join_scalars(self, flat: EngineBuffer) -> dict[str, Any]:
        """Return the scalars of a buffer's parameters.

        Raises:
            MismatchError: they differ; the buffer has one step count.
        """
        joined: dict[str, tuple[Any, ParamKey]] = {}
        for param in self.saved_params(flat):
            for key, value in self.index.scalars.get(param, {}).items():
                known, origin = joined.setdefault(key, (value, param))
                if known != value:
                    raise MismatchError(
                        f"{key} differs between parameters that share a flat buffer here: {origin} has {known}, "
                        f"{param} has {value}. Put them into separate param groups, or {WEIGHTS_ONLY}."
                    )
        kept = self.probe(flat)
        return {key: restore_scalar(key, value, kept) for key, (value, _) in joined.items()}


def describe_hyper(context: LoadContext, target: Target, index: AtomicIndex, match: Match) -> list[str]:
    """Describe the hyper-parameters that differ, and those that the checkpoint lacks."""
    if not match.groups:
        return []
    engine, optimizer, takes_saved = context.engine, target.optimizer, context.config.param_groups == "saved"
    groups = {flat.group: optimizer.param_groups[target.param_group(flat)] for flat in target.flats}
    saved = {number: drop_labels(index.groups[number].hyper) for numbers in match.groups.values() for number in numbers}
    pairs = [(groups[live], saved[number]) for live, numbers in sorted(match.groups.items()) for number in numbers]
    with_scheduler, scheduler = context.load_lr_scheduler_states, engine.lr_scheduler
    notes = [
        find_edits(
            optimizer, pairs, scheduler, index.configured, takes_saved=takes_saved, with_scheduler=with_scheduler
        )
    ]
    if takes_saved:
        notes += [find_one_sided(optimizer, pairs)]
        notes += [find_doubt(optimizer, *pair, index.configured, read_configured(engine)) for pair in pairs]
    return list(dict.fromkeys(filter(None, notes)))


def attach_states(target: Target, states: list[States], match: Match) -> None:
    """Give states, scalars and hyper-parameters to the optimizer."""
    optimizer = target.optimizer
    for restored in states:
        live = optimizer.state.get(restored.flat.tensor)
        scalars = {key: update_in_place((live or {}).get(key), value) for key, value in restored.scalars.items()}
        entry = {**scalars, **restored.tensors}
        if not entry:
            if restored.lazy or restored.flat.swap is not None:
                optimizer.state.pop(restored.flat.tensor, None)
            elif live is not None:
                _reset(live)
        elif live is None:
            optimizer.state[restored.flat.tensor] = entry
        else:
            live.clear()
            live.update(entry)
    for flat in target.flats:
        if flat.group in match.hyper:
            restore_hyper(optimizer.param_groups[target.param_group(flat)], match.hyper[flat.group])
    target.relink()


def _reset(state: dict[str, Any]) -> None:
    """Zero a state in place: old Adagrads (torch < 2.10) do not create it again."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            value.zero_()
        elif isinstance(value, (int, float)):
            state[name] = type(value)(0)
