"""Turns a match of checkpoint and engine into destinations and wants: what has to be read, and where it goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..atoms import COPY, MASTER, MODULE, Atom, AtomicIndex
from ..errors import MismatchError, shorten
from ..plan import Want
from ..plan.match import Match, pick_weight
from ..plan.share import Segment, share_wants
from ..targets import Extra, Flat, Target
from ..targets.base import flatten
from ..targets.optimizer import Kept, probe_optimizer, restore_scalar
from .sinks import TensorSink

WEIGHTS_ONLY = "load with load_optimizer_states=False (weights only)"


@dataclass(slots=True)
class States:
    """Optimizer states of one flat buffer on their way: tensors by name, scalars by name.

    ``lazy``: the optimizer makes missing states in its next step, so that none may be left to it.
    """

    flat: Flat
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    lazy: bool = True


@dataclass(frozen=True, slots=True)
class Blank:
    """Elements [low, high) of a tensor that no atom fills: padding, or a state that the source does not have."""

    tensor: torch.Tensor
    low: int
    high: int
    fresh: bool


@dataclass(slots=True)
class Job:
    """Everything one rank does in a load.

    Attributes:
        sinks: destinations by buffer number.
        own: wants of this rank alone.
        shared: wants that all ranks have in common, in the same order everywhere.
        touched: atoms that some rank reads.
        states: optimizer states to attach once all is verified.
        blanks: what to zero.
        segments: who reads what of the shared wants.
    """

    sinks: list[TensorSink] = field(default_factory=list)
    own: list[Want] = field(default_factory=list)
    shared: list[Want] = field(default_factory=list)
    touched: dict[tuple[str, str], Atom] = field(default_factory=dict)
    states: list[States] = field(default_factory=list)
    blanks: list[Blank] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def take_share(self, rank: int, size: int) -> None:
        """Divide the shared wants among the ranks; this one's share joins its own wants."""
        shares, self.segments = share_wants(self.shared, size)
        self.own += shares[rank]

    @property
    def state_bytes(self) -> int:
        """Bytes of all atoms that are read."""
        return sum(atom.nbytes for atom in self.touched.values())


def make_job(index: AtomicIndex, target: Target, match: Match, extras: list[Extra], *, with_states: bool) -> Job:
    """Build the job of this rank.

    Raises:
        MismatchError: the saved optimizer is of another kind, or its states cannot be cut.
    """
    maker = _JobMaker(index, target, match, with_states)
    if with_states:
        maker.check_optimizer()
    for flat in target.flats:
        maker.add_master(flat)
        if with_states and flat.holder is not None:
            maker.add_states(flat)
    for extra in extras:
        maker.add_extra(extra)
    return maker.job


class _JobMaker:
    def __init__(self, index: AtomicIndex, target: Target, match: Match, with_states: bool) -> None:
        self.index, self.target, self.match, self.with_states = index, target, match, with_states
        self.job = Job()
        self.probes: dict[tuple[int, torch.dtype, int], Kept | None] = {}
        self.states_of: dict[str, set[str]] = defaultdict(set)
        for name, state in index.atoms:
            if state not in (MASTER, MODULE, COPY):
                self.states_of[name].add(state)

    def saved_names(self, flat: Flat) -> list[str]:
        return [self.match.names[name] for name in flat.names if name in self.match.names]

    def saved_states(self, flat: Flat) -> list[str]:
        found: set[str] = set()
        return sorted(found.union(*(self.states_of[name] for name in self.saved_names(flat))))

    def probe(self, flat: Flat) -> Kept | None:
        """What the live optimizer keeps for the flat buffer's group, with the saved hyper-parameters."""
        like = flat.holder if flat.holder is not None else flat.master
        key = (flat.group, flat.master.dtype, like.dim())
        if key not in self.probes:
            group = self.match.groups.get(flat.group)
            hyper = self.index.groups[group].hyper if group is not None else {}
            self.probes[key] = probe_optimizer(self.target.optimizer, self.target.param_group(flat), hyper, like)
        return self.probes[key]

    def check_optimizer(self) -> None:
        if self.index.irregular:
            listed = [f"{name} ({what})" for name, what in sorted(self.index.irregular.items())]
            raise MismatchError(
                f"{self.index.optimizer or 'The saved optimizer'} keeps states that are not element-wise and cannot be "
                f"cut for another topology: {shorten(listed)}. To go on, {WEIGHTS_ONLY}."
            )
        seen: set[tuple[int, int, tuple[str, ...]]] = set()
        for flat in self.target.flats:
            have = tuple(self.saved_states(flat))
            if flat.holder is None or (flat.group, flat.holder.dim(), have) in seen:
                continue
            seen.add((flat.group, flat.holder.dim(), have))
            self._check_group(flat, have)

    def _check_group(self, flat: Flat, have: tuple[str, ...]) -> None:
        kept = self.probe(flat)
        if kept is None or not (have or any(self.index.scalars.get(name) for name in self.saved_names(flat))):
            return
        kind = type(self.target.optimizer).__name__
        if kept.other:
            listed = [f"{name} ({what})" for name, what in kept.other.items()]
            raise MismatchError(
                f"{kind} keeps states that are not element-wise: {shorten(listed)}. To go on, {WEIGHTS_ONLY}."
            )
        if set(have) != set(kept.elementwise):
            raise MismatchError(
                f"The checkpoint's optimizer ({self.index.optimizer or 'not named'}) keeps "
                f"{', '.join(have) or 'no state'} for {shorten(flat.names, 3)}; this run's {kind} keeps "
                f"{', '.join(sorted(kept.elementwise)) or 'no state'}. Train on with the saved run's optimizer, or "
                f"{WEIGHTS_ONLY}."
            )

    def add_master(self, flat: Flat) -> None:
        atoms = {}
        for name in flat.names:
            if name in self.match.names:
                atoms[name] = pick_weight(self.index, self.match.names[name], True, self.with_states)
        self._fill(flat, atoms, flat.master, fresh=False)
        self.job.blanks += [Blank(flat.master, low, high, False) for low, high in flat.gaps()]

    def add_states(self, flat: Flat) -> None:
        kept = self.probe(flat)
        result = States(flat, scalars=self._join_scalars(flat), lazy=kept is None or kept.lazy)
        live = self.target.optimizer.state.get(flat.holder, {})
        for state in self.saved_states(flat):
            tensor, fresh = self._state_tensor(flat, live.get(state), state)
            result.tensors[state] = tensor
            atoms = {name: self.index.atoms.get((self.match.names.get(name, ""), state)) for name in flat.names}
            covered = self._fill(flat, atoms, flatten(tensor), fresh)
            spans = _complement(covered, tensor.numel())
            self.job.blanks += [Blank(flatten(tensor), low, high, fresh) for low, high in spans]
        self.job.states.append(result)

    def _fill(
        self, flat: Flat, atoms: dict[str, Atom | None], tensor: torch.Tensor, fresh: bool
    ) -> list[tuple[int, int]]:
        """Let atoms fill this rank's cuts of ``tensor``; returns the element ranges that they cover."""
        buffers: dict[str, int] = {}
        covered = []
        self.job.touched.update({(atom.name, atom.state): atom for atom in atoms.values() if atom})
        for cut in flat.cuts:
            atom = atoms.get(cut.name)
            if atom is None:
                continue
            if atom.dtype not in buffers:
                buffers[atom.dtype] = self._add_sink(TensorSink(tensor, atom.dtype, fresh))
            self._want(Want(atom, cut.start, cut.numel, buffers[atom.dtype], cut.offset), flat.replicated)
            covered.append((cut.offset, cut.offset + cut.numel))
        return covered

    def _add_sink(self, sink: TensorSink) -> int:
        self.job.sinks.append(sink)
        return len(self.job.sinks) - 1

    def _want(self, want: Want, replicated: bool) -> None:
        (self.job.shared if replicated else self.job.own).append(want)

    def _state_tensor(self, flat: Flat, live: Any, state: str) -> tuple[torch.Tensor, bool]:
        """The tensor that receives a state: the live one, or fresh memory in the dtype that the optimizer wants."""
        like = flat.holder if flat.holder is not None else flat.master
        if isinstance(live, torch.Tensor) and live.shape == like.shape:
            return live, False
        kept = self.probe(flat)
        dtype = kept.elementwise.get(state) if kept else None
        if dtype is None:
            names = [name for name in self.saved_names(flat) if state in self.states_of[name]]
            dtype = getattr(torch, self.index.atoms[names[0], state].dtype)
        return torch.empty(like.shape, dtype=dtype, device=like.device), True

    def _join_scalars(self, flat: Flat) -> dict[str, Any]:
        """The scalars that a flat buffer's parameters have in common.

        Raises:
            MismatchError: they differ, which a flat buffer with one step count cannot express.
        """
        joined: dict[str, tuple[Any, str]] = {}
        for name in self.saved_names(flat):
            for key, value in self.index.scalars.get(name, {}).items():
                known, origin = joined.setdefault(key, (value, name))
                if known != value:
                    raise MismatchError(
                        f"{key} differs between parameters that share a flat buffer here: {origin} has {known}, {name} "
                        f"has {value}. Put them into param groups of their own, or {WEIGHTS_ONLY}."
                    )
        kept = self.probe(flat)
        return {key: restore_scalar(key, value, kept) for key, (value, _) in joined.items()}

    def add_extra(self, extra: Extra) -> None:
        if extra.name not in self.match.names:
            return
        atom = pick_weight(self.index, self.match.names[extra.name], False, self.with_states)
        if atom is None:
            return
        self.job.touched[atom.name, atom.state] = atom
        if extra.tensor.numel():
            buffer = self._add_sink(TensorSink(extra.tensor, atom.dtype, fresh=False))
            self._want(Want(atom, extra.start, extra.tensor.numel(), buffer, 0), extra.replicated)


def _complement(spans: Iterable[tuple[int, int]], total: int) -> list[tuple[int, int]]:
    found, position = [], 0
    for low, high in [*sorted(spans), (total, total)]:
        if low > position:
            found.append((position, low))
        position = max(position, high)
    return found
