"""A whole reshard in one process: every rank's targets, plans and reads over a synthesised checkpoint.

No engine and no process group: a `FakeTarget` has one rank's buffers as DeepSpeed would lay them out, full of a
sentinel; `load` plans and reads for every rank in turn and copies what ranks would send each other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from deepspeed_ucp.atoms import AtomicIndex
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.io import read_requests
from deepspeed_ucp.io.checksum import Checked, join_checks, verify_records
from deepspeed_ucp.load.direct import _attach
from deepspeed_ucp.load.job import Job, make_job
from deepspeed_ucp.load.sinks import TensorSink
from deepspeed_ucp.plan import Request, plan_load
from deepspeed_ucp.plan.geometry import Cut
from deepspeed_ucp.plan.match import Match, match_groups, match_parameters
from deepspeed_ucp.plan.share import Segment
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.targets import Extra, Flat, Target
from tests.synth import (
    Model,
    Param,
    Run,
    State,
    Topology,
    build_files,
    partition_layout,
    random_state,
    write_checkpoint,
)
from tests.synth.files import model_file, optim_file
from tests.synth.layout import stage3_slice
from tests.synth.reader import _buffers

SENTINEL = -8.25
"""What target buffers hold before a load; no synthesised value is equal to it."""

LIVE_LR = 0.125
"""Learning rate of fresh optimizers."""

CHUNK = 64
"""Bytes: small, so that every case has many requests."""


# -- targets ----------------------------------------------------------------------------------------------------------


class FakeTarget(Target):
    """One rank of a live engine of a topology: sentinel-filled buffers and a real optimizer over them."""

    def __init__(self, model: Model, topology: Topology, rank: int, optimizer: Any = torch.optim.AdamW) -> None:
        self.model, self.kind, self.rank = model, topology, rank
        self.layout, self.engine = [], None
        self.aliases = {p.name: p.alias_of for p in model.params if p.alias_of is not None}
        self.flats = []
        self.collect()
        self.owned = {name for flat in self.flats for name in flat.names}
        groups = [[f.holder for f in self.flats if f.group == g] for g in range(len(model.groups))]
        self.wrapped = optimizer([{"params": params} for params in groups], lr=LIVE_LR)
        self.others = self._make_extras()

    def collect(self) -> None:
        kind, held = self.kind.kind, partition_layout(self.model, self.kind)
        for flat in held[self.rank if self.kind.stage else 0]:
            if kind == "raw" and not _find(self.model, flat.names[0]).trains:
                continue
            holder = torch.full((flat.numel,), SENTINEL)
            if kind in ("raw", "unfused"):
                holder = holder.view(_find(self.model, flat.names[0]).shape)
            cuts = [Cut(part.name, part.start, part.numel, part.offset) for part in flat.slices]
            master = holder.requires_grad_().detach().view(-1)
            self.flats.append(Flat(flat.group, flat.names, cuts, master, holder, replicated=self.kind.stage == 0))

    def shape_of(self, name: str) -> tuple[int, ...]:
        return _find(self.model, name).shape

    def extras(self) -> list[Extra]:
        return list(self.others)

    def _make_extras(self) -> list[Extra]:
        found = [self._extra(param) for param in self.model.owners if param.name not in self.owned]
        for name, value in self.model.buffers.items():
            found.append(Extra(name, tuple(value.shape), fill_like(value.reshape(-1)), True))
        return found

    def _extra(self, param: Param) -> Extra:
        if self.kind.stage < 3:
            whole = torch.full((param.numel,), SENTINEL, dtype=self.kind.dtype)
            return Extra(param.name, param.shape, whole, False)
        part = stage3_slice(param, self.kind.dp, self.rank)
        held = torch.full((part.numel,), SENTINEL, dtype=self.kind.dtype)
        return Extra(param.name, param.shape, held, False, part.start, replicated=False)

    def live_groups(self) -> list[list[tuple[str, bool]]]:
        return [[(param.name, param.trains) for param in group] for group in self.model.groups]

    def refresh_copies(self) -> None:
        """There are no copies."""


def fill_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the same kind full of bytes that no synthesised value has."""
    out = torch.empty_like(tensor)
    out.view(torch.uint8).fill_(0x5A if tensor.dtype != torch.bool else 1)
    return out


def make_targets(model: Model, topology: Topology, optimizer: Any = torch.optim.AdamW) -> list[FakeTarget]:
    """All ranks of a run."""
    return [FakeTarget(model, topology, rank, optimizer) for rank in range(topology.dp)]


def _find(model: Model, name: str) -> Param:
    return next(param for param in model.params if param.name == name)


# -- loading ----------------------------------------------------------------------------------------------------------


class Rank(Comm):
    """One of several ranks that are run one after the other."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class CountingSink:
    """A sink that notes how often each element of its tensor is written."""

    def __init__(self, sink: TensorSink, counts: np.ndarray) -> None:
        self.sink, self.counts = sink, counts

    def view(self, position: int, nbytes: int) -> memoryview | None:
        found = self.sink.view(position, nbytes)
        if found is not None:
            self.counts[position : position + nbytes // self.sink.itemsize] += 1
        return found

    def store(self, position: int, data: memoryview) -> None:
        self.counts[position : position + data.nbytes // self.sink.stored.itemsize] += 1
        self.sink.store(position, data)


@dataclass
class Loaded:
    """One rank after a load: its job, what it read, how often each element was written (by tensor)."""

    target: FakeTarget
    job: Job
    match: Match
    extras: list[Extra]
    requests: Sequence[Request] = ()
    checks: list[Checked] = field(default_factory=list)
    counts: dict[int, tuple[torch.Tensor, np.ndarray]] = field(default_factory=dict)
    counted: bool = True

    def count(self, tensor: torch.Tensor) -> np.ndarray:
        """Writes per element of a tensor."""
        return self.counts.setdefault(tensor.data_ptr(), (tensor, np.zeros(tensor.numel(), np.int64)))[1]


def open_for(folder: Path | str, target: FakeTarget) -> AtomicIndex:
    """The index, with the target's groups to name a stage-0 source's parameters."""
    return open_checkpoint(str(folder), Comm(), target.live_groups())


def prepare(
    index: AtomicIndex, target: FakeTarget, size: int, *, with_states: bool = True, strict: bool = True
) -> Loaded:
    """Match, job and share of one rank."""
    extras = target.extras()
    match = match_parameters(
        index,
        target.owned_shapes(),
        {extra.name: extra.shape for extra in extras},
        target.aliases,
        strict=strict,
        with_states=with_states,
    )
    if with_states:
        match_groups(index, target.group_members(), match)
    job = make_job(index, target, match, extras, with_states=with_states)
    job.take_share(target.rank, size)
    return Loaded(target, job, match, extras)


def load(
    index: AtomicIndex, targets: Sequence[FakeTarget], *, chunk: int = CHUNK, with_states: bool = True
) -> list[Loaded]:
    """Load a checkpoint into all ranks of a run."""
    ranks = [prepare(index, target, len(targets), with_states=with_states) for target in targets]
    for rank in ranks:
        read(index, rank, len(ranks), chunk)
    verify(index, ranks)
    exchange(ranks)
    for rank in ranks:
        finish(index, rank, with_states=with_states)
    return ranks


def read(index: AtomicIndex, rank: Loaded, size: int, chunk: int = CHUNK) -> None:
    """One rank's plan, carried out."""
    job = rank.job
    plan = plan_load(job.own, job.touched.values(), index.records, rank.target.rank, size, chunk)
    stats = read_requests(
        plan.requests,
        index.records,
        index.files,
        [CountingSink(sink, rank.count(sink.target)) for sink in job.sinks],
        threads=2,
        make_scratch=lambda nbytes: memoryview(bytearray(nbytes)),
        checksum=True,
    )
    assert stats.nbytes == plan.nbytes == sum(request.nbytes for request in plan.requests)
    assert stats.requests == len(plan.requests)
    rank.requests, rank.checks = plan.requests, join_checks(plan.requests, stats.crcs) if plan.requests else []


def verify(index: AtomicIndex, ranks: Sequence[Loaded]) -> None:
    """Every rank answers for its records."""
    gathered = [check for rank in ranks for check in rank.checks]
    for number in range(len(ranks)):
        verify_records(gathered, index.records, index.files, number, len(ranks))


def exchange(ranks: Sequence[Loaded]) -> None:
    """What owners would broadcast. Ranks number their buffers each for themselves, the rest has to be alike."""
    for rank in ranks[1:]:
        alike = [[(s.owner, s.offset, s.numel) for s in r.job.segments] for r in (ranks[0], rank)]
        assert alike[0] == alike[1]
    for segments in zip(*(rank.job.segments for rank in ranks), strict=True):
        views = [_view(rank, segment) for rank, segment in zip(ranks, segments, strict=True)]
        for number, (rank, segment) in enumerate(zip(ranks, segments, strict=True)):
            if number != segment.owner:
                views[number].copy_(views[segment.owner])
                counts = rank.count(rank.job.sinks[segment.buffer].target)
                counts[segment.offset : segment.offset + segment.numel] += 1


def _view(rank: Loaded, segment: Segment) -> torch.Tensor:
    return rank.job.sinks[segment.buffer].tensor.narrow(0, segment.offset, segment.numel)


def finish(index: AtomicIndex, rank: Loaded, *, with_states: bool = True) -> None:
    """Padding, proxies, and the optimizer."""
    for sink in rank.job.sinks:
        sink.settle()
    for blank in rank.job.blanks:
        blank.tensor[blank.low : blank.high].zero_()
        rank.count(blank.tensor)[blank.low : blank.high] += 1
    if with_states:
        _attach(index, rank.target, rank.job, rank.match)


# -- what has to be there ---------------------------------------------------------------------------------------------


def check_content(ranks: Sequence[Loaded], expected: State) -> None:
    """Every rank holds bitwise what a run of its topology with the state ``expected`` holds (invariants 2 and 3)."""
    model, topology = ranks[0].target.model, ranks[0].target.kind
    own = ({"lr": LIVE_LR},) * len(model.groups)  # an elastic checkpoint has no hyper-parameters: the live ones stay
    expected = replace(expected, groups=expected.groups or own)
    files = build_files(model, expected, topology)
    for rank in ranks:
        check_masters(rank, files)
        check_extras(rank, files, expected)
    for group, hyper in zip(ranks[0].target.wrapped.param_groups, expected.groups, strict=True):
        for rank in ranks:
            assert {key: group[key] for key in hyper} == dict(hyper), rank


def saved_buffers(files: dict[str, Any], rank: Loaded) -> list[dict[str, torch.Tensor]]:
    """Per live flat buffer what its rank's file holds: master and states, scalars."""
    model, topology, number = rank.target.model, rank.target.kind, rank.target.rank
    if topology.stage:
        optimizer = files[optim_file(topology, number)]["optimizer_state_dict"]
    else:
        optimizer = files[model_file(topology, 0)]["optimizer"]
    flats = partition_layout(model, topology)[number if topology.stage else 0]
    entries = [dict(_buffers(optimizer, topology, i)) for i in range(len(flats))]
    if topology.kind == "raw":
        module = files[model_file(topology, 0)]["module"]
        entries = [{"fp32": module[flat.names[0]], **entry} for flat, entry in zip(flats, entries, strict=True)]
        return [e for flat, e in zip(flats, entries, strict=True) if _find(model, flat.names[0]).trains]
    return entries


def check_masters(rank: Loaded, files: dict[str, Any]) -> None:
    """Masters, states and scalars of one rank, every element written once, padding zero."""
    where = f"{rank.target.kind.label} rank {rank.target.rank}"
    for flat, saved in zip(rank.target.flats, saved_buffers(files, rank), strict=True):
        kept = dict(rank.target.wrapped.state.get(flat.holder, {}))
        assert kept.keys() == saved.keys() - {"fp32"}, f"{where} {flat.names}"
        assert (flat.holder in rank.target.wrapped.state) == bool(kept), f"{where}: an empty state"
        for key, value in saved.items():
            live = flat.master if key == "fp32" else kept[key]
            if key != "fp32" and value.dim() == 0 and key == "step":
                assert live == value, f"{where} {flat.names} {key}"
                continue
            assert live.shape == (flat.master if key == "fp32" else flat.holder).shape
            check_filled(live.detach().reshape(-1), value.detach().reshape(-1), f"{where} {flat.names} {key}")
            check_counts(rank, live, f"{where} {flat.names} {key}")


def check_extras(rank: Loaded, files: dict[str, Any], expected: State) -> None:
    """Frozen and unoptimized parameters, and buffers."""
    model = rank.target.model
    for extra in rank.extras:
        if extra.is_buffer:
            value = model.buffers[extra.name].reshape(-1)
        else:
            value = expected.atoms[extra.name]["fp32"].reshape(-1).to(extra.tensor.dtype)
        value = value[extra.start : extra.start + extra.tensor.numel()]
        check_filled(extra.tensor, value, extra.name)
        check_counts(rank, extra.tensor, extra.name)


def check_filled(live: torch.Tensor, saved: torch.Tensor, what: str) -> None:
    """The saved elements, bit by bit, then zeros (ZeRO 1/2 saves masters without their padding)."""
    assert live.dtype == saved.dtype, what
    head, tail = live[: saved.numel()], live[saved.numel() :]
    assert head.numel() == saved.numel(), what
    same = head.contiguous().view(torch.uint8).equal(saved.contiguous().view(torch.uint8))
    assert same, f"{what}: {head} is not {saved}"
    assert not tail.view(torch.uint8).any(), f"{what}: padding {tail}"


def check_counts(rank: Loaded, live: torch.Tensor, what: str) -> None:
    """Every element written exactly once."""
    if live.numel() and rank.counted:
        assert (rank.count(live.detach()) == 1).all(), f"{what}: written {rank.count(live.detach())} times"


def check_reads(index: AtomicIndex, ranks: Sequence[Loaded], chunk: int = CHUNK) -> None:
    """Every byte of every touched record is read exactly once over all ranks, no request is too long (invariant 4)."""
    read = {}
    for request in (request for rank in ranks for request in rank.requests):
        assert 0 < request.nbytes <= chunk
        assert sum(part.nbytes for part in request.parts) == request.nbytes
        counts = read.setdefault(request.record, np.zeros(index.records[request.record].nbytes, np.int64))
        counts[request.offset : request.offset + request.nbytes] += 1
    touched = {f.record for atom in ranks[0].job.touched.values() for f in atom.fragments}
    assert read.keys() == touched
    for record, counts in read.items():
        assert (counts == 1).all(), f"record {record}: read {counts} times"


# -- cases ------------------------------------------------------------------------------------------------------------


def examples(count: int) -> settings:
    """How many cases; UCP_EXAMPLES=N multiplies them and draws new ones."""
    factor = int(os.environ.get("UCP_EXAMPLES", "0"))
    return settings(
        max_examples=count * max(factor, 1),
        derandomize=not factor,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for one case."""
    with tempfile.TemporaryDirectory(prefix="ucp-") as folder:
        yield Path(folder)


BUFFERS = (
    torch.arange(3),
    torch.tensor([True, False, True]),
    torch.linspace(0, 1, 5),
    torch.tensor(7),
    torch.tensor([[1.5, -0.0]], dtype=torch.float16),
    torch.zeros(0, 2),
    torch.arange(5, dtype=torch.uint8),
    torch.tensor([1 + 2j]),
)

SHAPES = st.one_of(
    st.integers(2, 40).map(lambda n: (n,)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.just((1,)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)),
)


@st.composite
def models(draw: st.DrawFn, max_params: int = 6, max_groups: int = 3) -> Model:
    """Every group has at least one parameter that trains, as DeepSpeed's wrappers need it."""
    groups = draw(st.integers(1, max_groups))
    params = [Param(f"g{group}.first", draw(SHAPES), group) for group in range(groups)]
    params += [_draw_param(draw, f"p{index}", groups) for index in range(draw(st.integers(0, max_params - groups)))]
    params = draw(st.permutations(params))
    owners = [param for param in params if param.numel]
    if draw(st.booleans()):
        owner = draw(st.sampled_from(owners))
        params = [*params, Param("tied", owner.shape, owner.group, owner.frozen, alias_of=owner.name)]
    chosen = draw(st.lists(st.integers(0, len(BUFFERS) - 1), max_size=3, unique=True))
    return Model(tuple(params), {f"buffer{index}": BUFFERS[index] for index in chosen})


def _draw_param(draw: st.DrawFn, name: str, groups: int) -> Param:
    kind = draw(st.sampled_from(("plain", "plain", "plain", "frozen", "loose", "empty")))
    group = draw(st.integers(0, groups - 1))
    if kind == "frozen":
        return Param(name, draw(SHAPES), group, frozen=True)
    if kind == "loose":
        return Param(name, draw(SHAPES), None, frozen=True)
    if kind == "empty":
        return Param(name, draw(st.sampled_from(((0,), (0, 3), (2, 0)))), group)
    return Param(name, draw(SHAPES), group)


@st.composite
def topologies(draw: st.DrawFn, max_dp: int = 9) -> Topology:
    """Any wrapper at any size."""
    stage = draw(st.sampled_from((0, 1, 2, 3)))
    precision = draw(st.sampled_from(("fp32", "bf16", "fp16")))
    dp = draw(st.integers(1, max_dp))
    if stage == 0:
        return Topology(0, min(dp, 3), precision, None if precision == "fp32" else draw(WRAPPERS16))
    if stage == 3:
        return Topology(3, dp, precision, sub_group_size=draw(st.sampled_from((None, 1, 7, 20))))
    if stage == 1 and precision == "bf16" and draw(st.booleans()):
        return Topology(1, dp, "bf16", "bf16")
    return Topology(
        stage,
        dp,
        precision,
        round_robin=draw(st.booleans()),
        parameter_alignment=draw(st.booleans()),
        elastic=draw(st.sampled_from((False, False, True))),
    )


WRAPPERS16 = st.sampled_from(("fused", "unfused"))


@st.composite
def states(draw: st.DrawFn, model: Model, precision: str) -> State:
    """Stepped, before the first step, or with parameters that never got a gradient."""
    seed = draw(st.integers(0, 99))
    if draw(st.integers(0, 5)) == 0:
        return random_state(model, seed, states=(), step=None, precision=precision)
    trained = [param.name for param in model.owners if param.trains and param.group is not None]
    without = tuple(draw(st.lists(st.sampled_from(trained), max_size=2, unique=True)))
    return random_state(model, seed, precision=precision, without=without, step=draw(st.integers(1, 5)))


@dataclass(frozen=True)
class Case:
    """A checkpoint to write."""

    model: Model
    topology: Topology
    state: State
    legacy: bool

    def write(self, folder: Path, run: Run | None = None) -> Path:
        """Write it; ZeRO 3's padding is poisoned."""
        run = run or Run(garbage=float("nan"))
        return write_checkpoint(folder, self.model, self.state, self.topology, run=run, legacy=self.legacy)


@st.composite
def cases(draw: st.DrawFn, max_dp: int = 9) -> Case:
    """Model, topology, state and file format."""
    model, topology = draw(models()), draw(topologies(max_dp))
    return Case(model, topology, draw(states(model, topology.precision)), draw(st.integers(0, 4)) == 0)


def flatten_all(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One 1-D tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
