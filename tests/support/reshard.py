"""A whole reshard in one process: every rank's targets, plans and reads over a synthesised checkpoint.

Without engines and process groups: a `FakeTarget` has one rank's buffers in DeepSpeed's layout, and `load` runs the
loader's code for every rank, in threads of `tests.support.ranks`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine.base import Target
from deepspeed_ucp.engine.parallel import Instance, ParallelState
from deepspeed_ucp.extensions.experts.engine import LiveExperts, LocalExperts, share_out
from deepspeed_ucp.extensions.registry import find_for_load
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.load.choice import join_groups, list_stage_groups
from deepspeed_ucp.load.context import LoadContext, LoadReport
from deepspeed_ucp.load.destinations import FillPlan, TensorSink
from deepspeed_ucp.load.prepare import prepare
from deepspeed_ucp.load.states import attach_states
from deepspeed_ucp.load.transfer import Transfer
from deepspeed_ucp.model.flat import FlatBuffer, join_reserved
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import CopyItem, Read
from deepspeed_ucp.model.view import EngineBuffer
from deepspeed_ucp.model.wrappers import Form
from deepspeed_ucp.plan.rounds import WINDOW_PARTS, LoadPlan
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.support.covering import stride
from tests.support.ranks import run_ranks
from tests.synth import (
    ExpertLayer,
    Flat,
    Model,
    Param,
    State,
    Topology,
    group_layouts,
    own_models,
    own_state,
    partition_layout,
)
from tests.synth.description import find_seat
from tests.synth.experts import degree_of, find_layer, held_layers, list_held, list_replicas
from tests.synth.layout import count_parts, stage3_slice

SENTINEL = -8.25
"""Value of target buffers before a load; no synthesised value equals it."""

LIVE_LR = 0.125
"""Learning rate of fresh optimizers."""

CHUNK = 64
"""Bytes per block. A small number gives every case many requests and rounds."""

PATIENT = UniversalConfig(threads=1)


# -- targets ----------------------------------------------------------------------------------------------------------


class FakeTarget(Target):
    """One rank of a live engine: sentinel-filled buffers and a real optimizer over them.

    Args:
        model: parameters of this model-parallel rank, in local shapes.
        rank: data-parallel rank.
    """

    def __init__(
        self,
        model: Model,
        topology: Topology,
        rank: int,
        optimizer: Any = torch.optim.AdamW,
        *,
        parallel: ParallelState | None = None,
        copies: Mapping[str, Instance] | None = None,
        module: torch.nn.Module | None = None,
    ) -> None:
        self.model, self.kind, self.rank = model, topology, rank
        self.own = own_models(model, topology)[rank]
        self.parallel = parallel or ParallelState(0, 1, 0, 1, rank, topology.dp)
        layers = {layer.prefix: hold_experts(model, topology, layer, rank) for layer in held_layers(model)}
        self.extensions = [LiveExperts()] if layers else []
        self.shares = share_out(layers, [param.name for param in self.own.params])
        self.copies = dict(copies or {})
        self.layers: tuple[int, ...] = ()
        self.recorded: Callable[[], list[str]] | None = None
        self.wrapper = topology.row.name
        stage = {"zero_optimization_stage": lambda: topology.stage}
        self.layout, self.engine = [], SimpleNamespace(module=module or torch.nn.Module(), **stage)
        self.aliases = {p.name: p.alias_of for p in model.params if p.alias_of is not None}
        held = {name for param in self.own.owners for name in param.atoms}
        self.unsharded = {name for name in held if topology.folds_experts and find_layer(model, name)}
        self.params = {p.name: torch.zeros(0, requires_grad=not p.frozen) for p in model.owners if p.name in held}
        self.flats, self.made_from = [], []
        self.collect()
        groups = [[f.tensor for f in self.flats if f.group == g] for g in range(len(self.own.groups))]
        fixed = own_state(State({}, groups=({},) * len(model.groups)), self.own).groups
        made = [{"params": params, **each} for params, each in zip(groups, fixed, strict=True)]
        self.wrapped = optimizer(made, lr=LIVE_LR) if self.flats else None
        self.owned = {name for flat in self.flats for name in flat.names} | self._find_empty()
        self.others = self._make_extras()

    def collect(self) -> None:
        row = self.kind.row
        for flat in own_layout(self.model, self.kind, self.rank):
            if not row.has_copies and not find_param(self.model, flat.names[0]).trains:
                continue
            holder = torch.full((flat.numel,), SENTINEL)
            if row.form is Form.SINGLE:
                holder = holder.view(flat.own[0].shape)
            part = self.own.seat(flat.group, self.kind, self.rank)[0] if self.kind.partitions else 0
            self.add_flat(lay_flat(self.own, self.kind, flat), part, holder.requires_grad_())
            self.made_from.append([] if not row.has_copies else [self.flats[-1].data.bfloat16()])
            assert self.flats[-1].buffer.cuts(part) == list(flat.slices)

    def instances(self) -> dict[str, Instance]:
        return self.copies

    def shape_of(self, name: str) -> tuple[int, ...]:
        return find_param(self.model, name).shape

    def extras(self) -> list[EngineBuffer]:
        return list(self.others)

    def _make_extras(self) -> list[EngineBuffer]:
        found = [self._extra(find_param(self.model, name)) for name in self.params if name not in self.owned]
        for name, value in self.model.buffers.items():
            found.append(self.make_whole(name, fill_like(value.reshape(-1)).view(value.shape), is_buffer=True))
        return found

    def _extra(self, param: Param) -> EngineBuffer:
        if self.kind.stage < 3:
            whole = torch.full(param.shape, SENTINEL, dtype=self.kind.dtype)
            return self.make_whole(param.name, whole)
        part = stage3_slice(param, self.kind.dp, self.rank)
        held = torch.full((part.numel,), SENTINEL, dtype=self.kind.dtype)
        return self.make_buffer(join_reserved(0, (param.name,), (param.shape,), self.kind.dp), self.rank, held)

    def live_groups(self) -> list[list[tuple[str, bool]]]:
        return [[(name, param.trains) for param in group for name in param.atoms] for group in self.own.groups]

    def find_copies(self, flat: int) -> list[torch.Tensor]:
        return self.made_from[flat]

    def refresh_copies(self) -> None:
        """Do nothing: no test reads the copies after a load."""

    @property
    def label(self) -> str:
        return f"{self.kind.label} stage {self.parallel.pp_rank} tp {self.parallel.tp_rank} dp {self.rank}"


def own_layout(model: Model, topology: Topology, rank: int) -> tuple[Flat, ...]:
    return partition_layout(model, topology)[rank if topology.partitions or model.experts else 0]


def hold_experts(model: Model, topology: Topology, layer: ExpertLayer, rank: int) -> LocalExperts:
    degree, seat, folded = degree_of(model, topology, layer), find_seat(model, topology, rank), topology.folds_experts
    replicas, numbers = list_replicas(topology, degree, seat), list_held(layer, topology, degree, seat)
    ranks = (
        replicas
        if folded
        else range(model.lane, topology.dp * topology.tp, topology.tp)[replicas.start : replicas.stop : replicas.step]
    )
    held = ranks if folded or degree > 1 else None
    return LocalExperts(degree, held, folded, replicas[0] == seat, numbers)


def lay_flat(own: Model, topology: Topology, flat: Flat) -> FlatBuffer:
    """Convert a flat buffer of a rank's module to the package's description."""
    names, shapes = [param.name for param in flat.own], [param.shape for param in flat.own]
    parts = count_parts(own, flat.group, topology) if topology.partitions else 1
    gaps = group_layouts(own, topology)[flat.group].paddings if topology.flattens else ()
    (buffer,) = topology.row.lay_out(flat.group, names, shapes, parts, flat.numel, gaps)
    return buffer


def fill_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a like tensor full of bytes that no synthesised value has."""
    out = torch.empty_like(tensor)
    out.view(torch.uint8).fill_(0x5A if tensor.dtype != torch.bool else 1)
    return out


def take_a_step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()


def make_targets(model: Model, topology: Topology, optimizer: Any = torch.optim.AdamW) -> list[FakeTarget]:
    """Make all ranks of a run without model parallelism."""
    return [FakeTarget(model, topology, rank, optimizer) for rank in range(topology.dp)]


def find_param(model: Model, name: str) -> Param:
    return next(param for param in model.params if param.name == name)


# -- loading ----------------------------------------------------------------------------------------------------------


class CountingSink(TensorSink):
    """A sink that counts the writes of each element of its tensor."""

    def __init__(self, sink: TensorSink, counts: np.ndarray) -> None:
        self.__dict__.update(sink.__dict__)
        self.counts = counts

    def view(self, position: int, nbytes: int) -> memoryview | None:
        found = super().view(position, nbytes)
        if found is not None:
            self.counts[position : position + nbytes // self.itemsize] += 1
        return found

    def store(self, item: CopyItem, data: memoryview) -> None:
        if item.stride or super().view(item.position, item.nbytes) is None:  # else the copy asks for the view
            width = item.run // self.stored.itemsize
            for row in range(item.count):
                low = item.position + row * (item.stride or width)
                self.counts[low : low + width] += 1
        super().store(item, data)


@dataclass
class Loaded:
    """One rank after a load: plan, reads, and the number of writes of each element (by tensor)."""

    target: FakeTarget
    fill_plan: FillPlan
    extras: list[EngineBuffer]
    comm: Comm = field(default_factory=Comm)
    transfer: Transfer | None = None
    counts: dict[int, tuple[torch.Tensor, np.ndarray]] = field(default_factory=dict)
    blanks: dict[int, tuple[torch.Tensor, np.ndarray]] = field(default_factory=dict)
    counted: bool = True
    job: LoadContext | None = None

    @property
    def plan(self) -> LoadPlan | None:
        return self.transfer.plan if self.transfer else None

    @property
    def reads(self) -> list[Read]:
        return self.plan.reads if self.plan else []

    def count(self, tensor: torch.Tensor) -> np.ndarray:
        return self.counts.setdefault(tensor.data_ptr(), (tensor, np.zeros(tensor.numel(), np.int64)))[1]

    def count_blanks(self, tensor: torch.Tensor) -> np.ndarray:
        """Return the number of times that each element of a tensor is zeroed."""
        return self.blanks.setdefault(tensor.data_ptr(), (tensor, np.zeros(tensor.numel(), np.int64)))[1]


def groups_of(target: Any, comm: Comm) -> Any:
    """Return the live param groups of all ranks; collective."""
    return join_groups(comm.gather_results(lambda: list_stage_groups(target)))


def open_for(folder: Path | str, target: FakeTarget, comm: Comm | None = None) -> AtomicIndex:
    """Open an index, with the live groups to name a stage-0 source's parameters; collective."""
    comm = comm or Comm()
    groups, _, order = groups_of(target, comm)
    return open_checkpoint(str(folder), comm, Naming(groups, (), order, list_recorded=target.recorded, ep=target.ep))


def open_everywhere(folder: Path | str, targets: Sequence[FakeTarget]) -> AtomicIndex:
    """Open a folder on all ranks; return the index of rank 0."""
    return run_ranks(len(targets), lambda rank, comm: open_for(folder, targets[rank], comm))[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Options:
    """Options of a load.

    Attributes:
        chunk: bytes per block.
        window: bytes of staging memory.
        min_direct: as in `plan`.
        in_place: masters can be restored from their copies.
    """

    chunk: int = CHUNK
    window: int = 1 << 20
    min_direct: int = 16
    with_states: bool = True
    strict: bool = True
    config: UniversalConfig = PATIENT
    order: tuple[int, ...] | None = None
    in_place: bool = True


def prepare_rank(index: AtomicIndex, target: FakeTarget, comm: Comm, options: Options | None = None) -> Loaded:
    options = options or Options()
    if not options.in_place:
        target.made_from = [[] for _ in target.flats]
    with_states = options.with_states and any(comm.gather(bool(target.flats)))
    report = LoadReport(direct=True, reason="")
    rules = from_config(options.config.patterns)
    job = LoadContext(None, comm, options.config, report, rules, load_module_strict=options.strict)
    job = replace(job, extensions=find_for_load(job, index, target, rules))
    fill_plan = prepare(job, index, target, with_states=with_states)
    rank = Loaded(target, fill_plan, target.extras(), comm, job=job)
    fill_plan.sinks[:] = [CountingSink(sink, rank.count(sink.buffer.tensor)) for sink in fill_plan.sinks]
    for number, low, high in fill_plan.wants.blanks:
        rank.count_blanks(fill_plan.buffers[number].tensor)[low:high] += 1
    return rank


def load(index: AtomicIndex, targets: Sequence[FakeTarget], **options: Any) -> list[Loaded]:
    """Load a checkpoint into all ranks of a run; `options` are fields of `Options`."""
    chosen = Options(**options)
    return run_ranks(len(targets), lambda rank, comm: load_rank(index, targets[rank], comm, chosen), order=chosen.order)


def load_rank(index: AtomicIndex, target: FakeTarget, comm: Comm, options: Options) -> Loaded:
    """Load one rank, in the order of the production load; collective."""
    rank = prepare_rank(index, target, comm, options)
    transfer = plan(rank, options)
    checks, reads = transfer.read(), transfer.plan.reads
    assert sum(check.nbytes for check in checks) == sum(read.nbytes for read in reads)
    assert len(checks) == len(reads)
    assert transfer.verify() == 0
    assert rank.job
    for extension in rank.job.extensions:
        extension.read_more(rank.job, rank.fill_plan)
    for mean in rank.fill_plan.wants.means:
        rank.count(rank.fill_plan.buffers[mean.buffer].tensor)[mean.low : mean.high] += 1
    transfer.fill()
    if options.with_states and target.wrapped is not None:
        attach_states(target, rank.fill_plan.states, rank.fill_plan.match)
    return rank


def plan(rank: Loaded, options: Options) -> Transfer:
    round_bytes = max(options.window // WINDOW_PARTS, options.chunk)
    sizes = {"round_bytes": round_bytes, "block": options.chunk, "min_direct": options.min_direct}
    rank.transfer = Transfer(rank.fill_plan, rank.comm, options.config, **sizes)
    return rank.transfer


def examples(count: int) -> settings:
    """Draw `count` cases under `-m exhaustive`, otherwise a 20th. UCP_EXAMPLES=N multiplies them, with new draws."""
    factor = int(os.environ.get("UCP_EXAMPLES", "0"))
    share = max(count // stride(20), 3)
    return settings(
        max_examples=share * max(factor, 1),
        derandomize=not factor,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ucp-") as folder:
        yield Path(folder)
