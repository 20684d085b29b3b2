"""Turns a match of checkpoint and engine into destinations and wants: what has to be read, and where it goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..atoms import COPY, MASTER, MODULE, Atom, AtomicIndex, AtomKey, ParamKey
from ..errors import MismatchError, shorten
from ..flat import Cut
from ..io.cast import average
from ..patterns import Layout
from ..plan import View, Want
from ..plan.locate import find_shards
from ..plan.match import Match, pick_weight
from ..targets import Extra, Flat, Target
from ..targets.base import flatten
from ..targets.optimizer import Kept, probe_optimizer, restore_scalar
from .sinks import Buffer, TensorSink, find_gaps

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
    """Elements [low, high) of a buffer that are zeroed before reading: no atom fills them, or not all of them.

    Padding, a state that the source does not have, new rows of a padded vocabulary.
    """

    buffer: Buffer
    low: int
    high: int

    def zero(self) -> None:
        """Zero them."""
        self.buffer.memory[self.low : self.high].zero_()


@dataclass(frozen=True, slots=True)
class Mean:
    """Elements [low, high) of a buffer become the mean of copies that were read into memory of their own (Partial)."""

    buffer: Buffer
    low: int
    high: int
    copies: tuple[torch.Tensor, ...]

    def settle(self) -> None:
        """Take the mean."""
        self.buffer.memory[self.low : self.high].copy_(average(self.copies))


@dataclass(slots=True)
class Job:
    """Everything one rank does in a load.

    Attributes:
        buffers: destinations.
        sinks: destinations by number, several of one buffer where atoms of several dtypes go there.
        wants: what this rank needs.
        touched: atoms that it needs something of.
        states: optimizer states to attach once all is verified.
        blanks: what to zero.
        means: what to average.
        grown: vocabulary parameters that get new rows.
    """

    buffers: list[Buffer] = field(default_factory=list)
    sinks: list[TensorSink] = field(default_factory=list)
    wants: list[Want] = field(default_factory=list)
    touched: dict[AtomKey, Atom] = field(default_factory=dict)
    states: list[States] = field(default_factory=list)
    blanks: list[Blank] = field(default_factory=list)
    means: list[Mean] = field(default_factory=list)
    grown: dict[str, tuple[int, int]] = field(default_factory=dict)

    def commit(self) -> None:
        """Bring everything that was read to where it belongs."""
        for mean in self.means:
            mean.settle()
        for buffer in self.buffers:
            buffer.commit()


def make_job(
    index: AtomicIndex,
    target: Target,
    match: Match,
    extras: list[Extra],
    layouts: Mapping[str, tuple[Layout, Layout]],
    *,
    with_states: bool,
) -> Job:
    """Build the job of this rank.

    Args:
        layouts: by saved name, how source and target cut a tensor; those that neither cuts are not in it.

    Raises:
        MismatchError: the saved optimizer is of another kind, or its states cannot be cut.
    """
    maker = _JobMaker(index, target, match, layouts, with_states)
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
    def __init__(
        self,
        index: AtomicIndex,
        target: Target,
        match: Match,
        layouts: Mapping[str, tuple[Layout, Layout]],
        with_states: bool,
    ) -> None:
        self.index, self.target, self.match, self.with_states = index, target, match, with_states
        self.layouts, self.tp_rank = layouts, target.place.tp_rank
        self.job = Job()
        self.probes: dict[tuple[int, torch.dtype, int], Kept | None] = {}
        self.states_of: dict[ParamKey, set[str]] = defaultdict(set)
        for key in index.atoms:
            if key.state not in (MASTER, MODULE, COPY):
                self.states_of[key.param].add(key.state)

    def saved_params(self, flat: Flat) -> list[ParamKey]:
        return [self.match.params[name] for name in flat.names if name in self.match.params]

    def saved_states(self, flat: Flat) -> list[str]:
        found: set[str] = set()
        return sorted(found.union(*(self.states_of[param] for param in self.saved_params(flat))))

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
        if kept is None or not (have or any(self.index.scalars.get(param) for param in self.saved_params(flat))):
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
            if name in self.match.params:
                atoms[name] = pick_weight(self.index, self.match.params[name], True, self.with_states)
        buffer = self._add_buffer(flat.master, fresh=False)
        self._fill(flat, atoms, buffer)
        for low, high in flat.gaps():
            self._blank(buffer, low, high)

    def add_states(self, flat: Flat) -> None:
        kept = self.probe(flat)
        result = States(flat, scalars=self._join_scalars(flat), lazy=kept is None or kept.lazy)
        live = self.target.optimizer.state.get(flat.holder, {})
        for state in self.saved_states(flat):
            tensor, fresh = self._state_tensor(flat, live.get(state), state)
            result.tensors[state] = tensor
            atoms = {name: self._find_state(name, state) for name in flat.names}
            buffer = self._add_buffer(flatten(tensor), fresh)
            self._fill(flat, atoms, buffer)
            for low, high in find_gaps(buffer.spans, tensor.numel()):
                self._blank(buffer, low, high)
        self.job.states.append(result)

    def _find_state(self, name: str, state: str) -> Atom | None:
        param = self.match.params.get(name)
        return None if param is None else self.index.find(param.name, state, param.instance)

    def _add_buffer(self, tensor: torch.Tensor, fresh: bool) -> Buffer:
        self.job.buffers.append(Buffer(tensor, fresh))
        return self.job.buffers[-1]

    def _blank(self, buffer: Buffer, low: int, high: int) -> None:
        self.job.blanks.append(Blank(buffer, low, high))
        buffer.spans.append((low, high))

    def _fill(self, flat: Flat, atoms: dict[str, Atom | None], buffer: Buffer) -> None:
        """Let atoms fill this rank's cuts of a buffer."""
        numbers: dict[str, int] = {}
        self.job.touched.update({atom.key: atom for atom in atoms.values() if atom})
        for cut in flat.cuts:
            atom = atoms.get(cut.name)
            if atom is None:
                continue
            if atom.dtype not in numbers:
                numbers[atom.dtype] = self._add_sink(TensorSink(buffer, atom.dtype))
            self._want(atom, cut, buffer, numbers[atom.dtype])

    def _add_sink(self, sink: TensorSink) -> int:
        self.job.sinks.append(sink)
        return len(self.job.sinks) - 1

    def _want(self, atom: Atom, cut: Cut, buffer: Buffer, number: int) -> None:
        """Want a part of this rank's shard of an atom; ``cut.name`` is the live name."""
        buffer.spans.append((cut.offset, cut.offset + cut.numel))
        layouts = self.layouts.get(self.match.params[cut.name].name)
        if layouts is None:
            self.job.wants.append(Want(atom, cut.start, cut.numel, number, cut.offset))
            return
        source, target = layouts
        if source.mean:
            self._want_mean(atom, cut, buffer, layouts)
            return
        if source.shape[0] < target.shape[0]:  # padding rows of the vocabulary that the source does not have
            self._blank(buffer, cut.offset, cut.offset + cut.numel)
            self.job.grown[atom.name] = (source.shape[0], target.shape[0])
        view = View(source, target, self.tp_rank, find_shards(source, target, self.tp_rank))
        self.job.wants.append(Want(atom, cut.start, cut.numel, number, cut.offset, view))

    def _want_mean(self, atom: Atom, cut: Cut, buffer: Buffer, layouts: tuple[Layout, Layout]) -> None:
        """Want every shard's values, in memory of their own."""
        copies = tuple(torch.empty(cut.numel, dtype=getattr(torch, atom.dtype)) for _ in atom.shards)
        for shard, copy in enumerate(copies):
            number = self._add_sink(TensorSink(Buffer(copy, fresh=True), atom.dtype))
            self.job.wants.append(Want(atom, cut.start, cut.numel, number, 0, View(*layouts, self.tp_rank, (shard,))))
        self.job.means.append(Mean(buffer, cut.offset, cut.offset + cut.numel, copies))

    def _state_tensor(self, flat: Flat, live: Any, state: str) -> tuple[torch.Tensor, bool]:
        """The tensor that receives a state: the live one, or fresh memory in the dtype that the optimizer wants."""
        like = flat.holder if flat.holder is not None else flat.master
        if isinstance(live, torch.Tensor) and live.shape == like.shape:
            return live, False
        kept = self.probe(flat)
        dtype = kept.elementwise.get(state) if kept else None
        if dtype is None:
            first = next(param for param in self.saved_params(flat) if state in self.states_of[param])
            dtype = getattr(torch, self.index.atoms[AtomKey(first.name, state, first.instance)].dtype)
        return torch.empty(like.shape, dtype=dtype, device=like.device), True

    def _join_scalars(self, flat: Flat) -> dict[str, Any]:
        """The scalars that a flat buffer's parameters have in common.

        Raises:
            MismatchError: they differ, which a flat buffer with one step count cannot express.
        """
        joined: dict[str, tuple[Any, ParamKey]] = {}
        for param in self.saved_params(flat):
            for key, value in self.index.scalars.get(param, {}).items():
                known, origin = joined.setdefault(key, (value, param))
                if known != value:
                    raise MismatchError(
                        f"{key} differs between parameters that share a flat buffer here: {origin} has {known}, "
                        f"{param} has {value}. Put them into param groups of their own, or {WEIGHTS_ONLY}."
                    )
        kept = self.probe(flat)
        return {key: restore_scalar(key, value, kept) for key, (value, _) in joined.items()}

    def add_extra(self, extra: Extra) -> None:
        if extra.name not in self.match.params:
            return
        atom = pick_weight(self.index, self.match.params[extra.name], False, self.with_states)
        if atom is None:
            return
        self.job.touched[atom.key] = atom
        if extra.tensor.numel():
            buffer = self._add_buffer(extra.tensor, fresh=False)
            number = self._add_sink(TensorSink(buffer, atom.dtype))
            self._want(atom, Cut(extra.name, extra.start, extra.tensor.numel(), 0), buffer, number)
