"""Reshards with tensor and pipeline parallelism: models of every pattern, all ranks' targets, expected contents.

The name of a parameter determines its cut (``KINDS``): as a function on torch tensors, independent of the package, and
as a rule for the loader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine.parallel import Instance, ParallelState
from deepspeed_ucp.extensions.experts.names import is_expert
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.support.cases import topologies
from tests.support.contents import check_content, check_reads
from tests.support.direct import run_load, run_refused
from tests.support.ranks import run_ranks
from tests.support.reshard import FakeTarget, Loaded, Options, load_rank, open_everywhere, open_for
from tests.synth import (
    Layer,
    Local,
    Model,
    Param,
    Run,
    State,
    Topology,
    bidirectional,
    build_local_files,
    instance_names,
    interleaved,
    random_state,
    split,
    write_files,
)
from tests.synth.stages import holders

VOCAB = 11
"""Rows of the vocabulary without padding, which fills it to a multiple of ``DIVISOR`` × TP."""
DIVISOR = 3

Cutter = Callable[[torch.Tensor, int, int], torch.Tensor]


# -- how tensors are cut ----------------------------------------------------------------------------------------------


def cut_even(dim: int) -> Cutter:
    return lambda tensor, tp, rank: tensor.chunk(tp, dim)[rank]


def cut_uneven(dim: int) -> Cutter:
    """The first ranks hold more; with few rows the last ranks are empty."""
    return lambda tensor, tp, rank: tensor.tensor_split(tp, dim)[rank]


def cut_parts(sizes: Sequence[int], dim: int = 0, blocks: int = 1, unit: Sequence[int] | None = None) -> Cutter:
    """Every part of every block is cut; a ``unit`` of each part is not divided, and the cut may be uneven."""

    def cut(tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
        held = []
        for block in tensor.chunk(blocks, dim):
            for number, part in enumerate(block.split(list(sizes), dim)):
                units = part.split(unit[number] if unit else 1, dim)
                mine = torch.arange(len(units)).tensor_split(tp)[rank]
                held += [units[index] for index in mine.tolist()]
        return torch.cat(held, dim) if held else tensor.narrow(dim, 0, 0)

    return cut


def cut_grid(tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Two ranks along dimension 0, the others along dimension 1."""
    return tensor if tp == 1 else tensor.chunk(2, 0)[rank // (tp // 2)].chunk(tp // 2, 1)[rank % (tp // 2)]


@dataclass(frozen=True)
class Kind:
    """A pattern: logical shape, cut, rule, and the degrees that it fits."""

    shape: tuple[int, ...]
    cut: Cutter
    rule: dict[str, Any]
    degrees: tuple[int, ...] = (1, 2, 3, 4)


def whole(tensor: torch.Tensor, _tp: int, _rank: int) -> torch.Tensor:
    return tensor


KINDS: dict[str, Kind] = {
    "norm": Kind((7,), whole, {"pattern": "replicate"}),
    "router": Kind((3, 5), whole, {"pattern": "replicate"}),
    "column": Kind((12, 5), cut_even(0), {"pattern": "shard-v"}),
    "bias": Kind((12,), cut_even(0), {"pattern": "shard-v"}),
    "row": Kind((5, 12), cut_even(1), {"pattern": "shard-h"}),
    "conv": Kind((2, 3, 12), cut_even(2), {"pattern": "shard-h", "dim": 2}),
    "columns_uneven": Kind((7, 3), cut_uneven(0), {"pattern": "shard-v"}),
    "rows_uneven": Kind((3, 10), cut_uneven(1), {"pattern": "shard-h", "dim": 1}),
    "few": Kind((2, 3), cut_uneven(0), {"pattern": "shard-v"}),  # with TP 4 two ranks hold nothing
    "qkv": Kind((48, 3), cut_parts((24, 12, 12)), {"pattern": "shard-nc", "parts": [24, 12, 12]}),
    "qkv_uneven": Kind((20, 3), cut_parts((10, 5, 5), unit=(2, 1, 1)), {"pattern": "shard-nc", "parts": [10, 5, 5]}),
    "gate_up": Kind((24, 2), cut_parts((12, 12)), {"pattern": "shard-nc", "parts": [1, 1]}),
    "experts": Kind((36, 2), cut_parts((12,), blocks=3), {"pattern": "shard-nc", "blocks": 3}),
    "experts_in": Kind((2, 24), cut_parts((12,), dim=1, blocks=2), {"pattern": "shard-nc", "blocks": 2, "dim": 1}),
    "hybrid4": Kind((4, 6), cut_grid, {"pattern": "shard-hy", "grid": [2, 2]}, (1, 4)),
    "hybrid2": Kind((4, 6), cut_grid, {"pattern": "shard-hy", "grid": [2, 1]}, (1, 2)),
    "word": Kind((VOCAB, 4), cut_even(0), {"pattern": "shard-v", "vocab": True}),
    "positions": Kind((5, 4), whole, {"pattern": "replicate"}),
}


def cut(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    return KINDS[name.partition("#")[0].rpartition(".")[2]].cut(tensor, tp, rank)


def cut_dense(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    return tensor if is_expert(name) else cut(name, tensor, tp, rank)


def make_config(model: Model, **options: Any) -> UniversalConfig:
    kinds = sorted({param.name.rpartition(".")[2] for param in model.params} & KINDS.keys())
    rules = [{"match": rf".*\.{kind}", **KINDS[kind].rule} for kind in kinds]
    return UniversalConfig(threads=1, patterns={"rules": rules, "original_vocab_size": VOCAB}, **options)


def pad_vocab(tp: int) -> int:
    """Return the rows with padding (Megatron's ``make-vocab-size-divisible-by``)."""
    return -(-VOCAB // (DIVISOR * tp)) * DIVISOR * tp


def fit_model(model: Model, topology: Topology) -> Model:
    """Return the model of a run of this topology, with a padded vocabulary."""
    rows = pad_vocab(topology.tp)
    params = [
        replace(param, shape=(rows, *param.shape[1:])) if param.name.endswith(".word") else param
        for param in model.params
    ]
    return replace(model, params=tuple(params))


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedRun:
    """A synthesised run with its state, by model-parallel rank; ``model`` has the padding of this topology."""

    model: Model
    topology: Topology
    state: State

    @property
    def locals(self) -> dict[int, Local]:
        return split(self.model, self.state, self.topology, cut_dense if self.topology.folds_experts else cut)

    def equalize(self) -> SavedRun:
        """Return the run with equal copies of each parameter on all stages."""
        atoms = {name: self.state.atoms[name.partition("#")[0]] for name in self.state.atoms}
        return replace(self, state=replace(self.state, atoms=atoms))

    def write(self, folder: Path, run: Run | None = None) -> Path:
        write_files(folder, build_local_files(self.locals, self.topology, run or Run(garbage=float("nan"))))
        return folder

    def make_targets(self, modules: Sequence[torch.nn.Module] | None = None) -> list[FakeTarget]:
        """Make all ranks in DeepSpeed's order: pipeline stage, data, tensor parallelism."""
        top, locals_ = self.topology, self.locals
        places = [
            ParallelState(t, top.tp, p, top.pp, d, top.dp)
            for p in range(top.pp)
            for d in range(top.dp)
            for t in range(top.tp)
        ]
        return [self._make_target(parallel, locals_[parallel.mp_rank], modules) for parallel in places]

    def _make_target(
        self, parallel: ParallelState, local: Local, modules: Sequence[torch.nn.Module] | None
    ) -> FakeTarget:
        copies = self._find_copies(local.model, parallel.pp_rank)
        module = modules[parallel.tp_rank] if modules else None
        target = FakeTarget(
            local.model, self.topology, parallel.dp_rank, parallel=parallel, copies=copies, module=module
        )
        target.layers = local.layers
        return target

    def _find_copies(self, local: Model, stage: int) -> dict[str, Instance]:
        tied = {param.name for param in self.model.params if param.tied}
        found = {}
        for name in [*(param.name for param in local.owners), *local.buffers]:
            stages = holders(self.model, self.topology, name)
            if len(stages) > 1:
                found[name] = Instance(stages.index(stage), len(stages), name in tied)
        return found


def draw_state(model: Model, topology: Topology, seed: int = 0, **options: Any) -> SavedRun:
    """Draw a run with a random state; copies of one parameter have different states."""
    fitted = fit_model(model, topology)
    return SavedRun(
        fitted, topology, random_state(fitted, seed, precision=topology.precision, topology=topology, **options)
    )


def expect(source: SavedRun, topology: Topology) -> SavedRun:
    """Return the run of another topology after it has loaded the source, independent of the package."""
    model = fit_model(source.model, topology)
    old, new = instance_names(source.model, source.topology), instance_names(model, topology)
    atoms, scalars = {}, {}
    for param in model.owners:
        olds = [name for name in old.get(param.name, (param.name,)) if is_saved(source, name)]
        news = new.get(param.name, (param.name,))
        for ordinal, name in enumerate(news):
            origin = olds[pick(ordinal, len(news), len(olds))]
            atoms[name] = {key: fit_rows(value, param.shape) for key, value in source.state.atoms[origin].items()}
            if origin in source.state.scalars:
                scalars[name] = source.state.scalars[origin]
    return SavedRun(model, topology, State(atoms, scalars, source.state.groups))


def is_saved(source: SavedRun, name: str) -> bool:
    """Return True if a copy is in the files: without masters, a layer without a file has no copy."""
    plain, _, number = name.partition("#")
    if source.topology.kind != "raw" or not number or not plain.startswith("tied_modules."):
        return True
    if source.model.experts:  # then a stage's tensors are in its model states
        return True
    key = plain.split(".")[1]
    layers = [index for index, layer in enumerate(source.model.layers) if layer.tied == key and layer.file]
    stage = holders(source.model, source.topology, plain)[int(number)]
    held = source.locals[stage * source.topology.tp].layers
    return bool(set(layers) & set(held))


def pick(ordinal: int, count: int, saved: int) -> int:
    """Return the saved copy for a live one: of the same stage, or the first, the last, or the nearest in between."""
    if count == saved or ordinal == 0:
        return ordinal
    return saved - 1 if ordinal == count - 1 else min(ordinal, saved - 1)


def fit_rows(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Keep the padding rows of both sides; new ones are zero."""
    if value.shape == shape or value.shape[1:] != shape[1:]:
        return value
    fitted = torch.zeros(shape, dtype=value.dtype)
    rows = min(len(value), len(fitted))
    fitted[:rows] = value[:rows]
    return fitted


# -- loading ----------------------------------------------------------------------------------------------------------


def open_run(saved_run: SavedRun, folder: Path, run: Run | None = None) -> AtomicIndex:
    saved_run.write(folder, run)
    return open_everywhere(folder, saved_run.make_targets())


def rules_of(saved_run: SavedRun) -> Any:
    return from_config(make_config(saved_run.model).patterns)


def load_all(
    folder: Path, targets: Sequence[FakeTarget], config: UniversalConfig, **options: Any
) -> tuple[AtomicIndex, list[Loaded]]:
    chosen = Options(config=config, **options)

    def work(rank: int, comm: Any) -> tuple[AtomicIndex, Loaded]:
        index = open_for(folder, targets[rank], comm)
        return index, load_rank(index, targets[rank], comm, chosen)

    results = run_ranks(len(targets), work)
    return results[0][0], [loaded for _, loaded in results]


def load_wanted(
    folder: Path, wanted: SavedRun, config: UniversalConfig, **options: Any
) -> tuple[AtomicIndex, list[Loaded]]:
    """Open and load on every rank of a run; check every byte in memory and every byte that is read."""
    index, ranks = load_all(folder, wanted.make_targets(), config, **options)
    check_content(ranks, wanted.state, wanted.locals)
    check_reads(index, ranks, options.get("chunk", 64))
    return index, ranks


def resume(source: SavedRun, topology: Topology, folder: Path, **options: Any) -> tuple[SavedRun, list[Loaded]]:
    """Write the source, and load it into another topology with :func:`load_wanted`."""
    source.write(folder)
    wanted = expect(source, topology)
    return wanted, load_wanted(folder, wanted, make_config(source.model), **options)[1]


def edit(source: SavedRun, change: Callable[[Mapping[int, Local]], None], folder: Path) -> Path:
    """Write a checkpoint whose ranks hold values that no state describes."""
    held = source.locals
    change(held)
    write_files(folder, build_local_files(held, source.topology, Run()))
    return folder


def refuse(folder: Path, wanted: SavedRun, config: UniversalConfig, kind: type[Exception], text: str) -> str:
    """Check that every rank raises the same error, and that nothing has changed; returns the message."""
    targets = wanted.make_targets()
    raised, message = run_refused(open_everywhere(folder, targets), targets, config)
    assert raised is kind and re.search(text, message), message
    return message


def number_ranks(folder: Path) -> set[int]:
    """Number the ranks in their client states: tens for the data-parallel, ones for the model-parallel rank."""
    numbers = set()
    for path in folder.glob("*mp_rank_*model_states.pt"):
        data, model = (int(number) for number in re.findall(r"rank_(\d+)", f"rank_0_{path.name}")[-2:])
        numbers.add(number := 10 * data + model)
        torch.save({**torch.load(path, weights_only=False), "number": number}, path)
    return numbers


def load_numbers(index: AtomicIndex, targets: Sequence[FakeTarget], config: UniversalConfig) -> list[int]:
    """Load on all ranks; return the numbers that they get, by model-parallel and data-parallel rank."""
    results = run_ranks(len(targets), lambda rank, comm: run_load(index, targets[rank], comm, config))
    assert len({report.state_bytes for _, report, _ in results}) == 1
    places = [(each.parallel.mp_rank, each.parallel.dp_rank) for each in targets]
    return [number for _, number in sorted(zip(places, (client["number"] for *_, client in results), strict=True))]


# -- models and topologies --------------------------------------------------------------------------------------------

EMBED = (
    Param("tied_modules.embed.word", (VOCAB, 4), tied=True),
    Param("tied_modules.embed.positions", (5, 4)),
)


def make_layer(number: int | str, kinds: Iterable[str], frozen: Iterable[str] = ()) -> tuple[Param, ...]:
    """Make the parameters of a layer; vectors have a second group, which a stage may lack."""
    frozen = set(frozen)
    return tuple(
        Param(f"{number}.{kind}", KINDS[kind].shape, group=int(len(KINDS[kind].shape) == 1), frozen=kind in frozen)
        for kind in kinds
    )


def make_pipeline(blocks: Sequence[Iterable[str]], *, tied: bool = True, frozen: Iterable[str] = ()) -> Model:
    """Make a PipelineModule: an embedding that the last layer shares, and blocks between them."""
    frozen = tuple(frozen)
    params = list(EMBED) if tied else []
    buffers = {}
    for number, kinds in enumerate(blocks, int(tied)):
        params += make_layer(number, kinds, frozen)
        buffers[f"{number}.count"] = torch.tensor([number, 3])
    ends = (Layer("embed"), Layer("embed", file=False)) if tied else ()
    return Model(tuple(params), buffers, (*ends[:1], *[Layer()] * len(blocks), *ends[1:]))


def make_plain(kinds: Sequence[str], frozen: Iterable[str] = ()) -> Model:
    return Model(make_layer("body", kinds, frozen), {"body.count": torch.arange(3)})


ALL = ["norm", "router", "column", "bias", "row", "conv", "columns_uneven", "rows_uneven", "qkv", "gate_up"]
PIPELINE = make_pipeline([ALL, ["column", "experts", "qkv_uneven"], ["row", "bias", "experts_in"]], frozen=("router",))

PIPELINES = [
    Topology(1, 2, "fp32"),
    Topology(1, 1, "bf16", tp=2),
    Topology(1, 2, "bf16", pp=2),
    Topology(1, 2, "bf16", "bf16", tp=2, pp=2),
    Topology(0, 1, "fp32", tp=2, pp=2),
    Topology(1, 1, tp=4, pp=1),
    Topology(0, 1, "bf16", "bf16", tp=3, pp=3),
]

PLAIN = make_plain([*ALL, "experts", "experts_in", "qkv_uneven", "few", "word"], frozen=["router", "row"])

PLAINS = [
    Topology(0, 1, tp=2),
    Topology(1, 2, "bf16", tp=2),
    Topology(2, 2, tp=3),
    Topology(3, 2, "bf16", tp=2),
    Topology(3, 3, sub_group_size=10),
    Topology(2, 1, "bf16", tp=4),
    Topology(3, 1, tp=4),
]


@dataclass(frozen=True)
class Trip:
    source: SavedRun
    target: Topology
    options: dict[str, Any] = field(default_factory=dict)


@st.composite
def trips(draw: st.DrawFn) -> Trip:
    """Draw pipelines and plain models of random kinds, from any topology to any other."""
    degrees = draw(st.tuples(st.sampled_from((1, 2, 3, 4)), st.sampled_from((1, 2, 3, 4))))
    fitting = [kind for kind, each in KINDS.items() if {*degrees} <= {*each.degrees}]
    usable = [kind for kind in fitting if kind not in ("word", "positions")]
    kinds = st.lists(st.sampled_from(usable), min_size=1, max_size=4, unique=True)
    if draw(st.integers(0, 3)):
        model = draw_pipeline(draw, kinds)
        source, target = (draw_topology(draw, tp, model) for tp in degrees)
        if source.kind == "raw":  # its files do not record the placement of layers
            source = replace(source, placement=None)
    else:
        chosen = [*draw(kinds), *draw(st.sampled_from(((), ("word",))))]
        loose = [kind for kind in chosen if kind not in ("column", "norm")]  # every group trains something
        model = make_plain(list(dict.fromkeys(["column", "norm", *chosen])), frozen=loose[:1])
        source, target = (replace(draw(topologies(max_dp=3)), tp=tp) for tp in degrees)
    stepped = {} if draw(st.integers(0, 6)) else {"states": (), "step": None}
    held = draw_state(model, source, draw(st.integers(0, 99)), **stepped)
    options = {"chunk": draw(st.sampled_from((16, 64, 1024))), "min_direct": draw(st.sampled_from((1, 16, 1 << 20)))}
    return Trip(held, target, options)


def draw_pipeline(draw: st.DrawFn, kinds: st.SearchStrategy[list[str]]) -> Model:
    """Draw a pipeline; every block trains a matrix, for every stage to have a parameter under ZeRO."""
    blocks = [list(dict.fromkeys(["column", *draw(kinds)])) for _ in range(draw(st.integers(1, 4)))]
    return make_pipeline(blocks, tied=draw(st.booleans()), frozen=draw(st.sampled_from(((), ("router", "row")))))


def draw_topology(draw: st.DrawFn, tp: int, model: Model) -> Topology:
    """Draw stage 0 or 1 with contiguous, interleaved or bidirectional layers."""
    pp = draw(st.integers(1, min(len(model.layers), 3)))
    placement = None
    if pp == 2 and draw(st.booleans()):
        placement = bidirectional(len(model.layers), 2)
    elif pp > 1 and draw(st.booleans()):
        placement = interleaved(len(model.layers), pp, 2)
    if placement and not all(placement):
        placement = None
    stage, precision, wrapper = draw(
        st.sampled_from(
            ((0, "fp32", None), (0, "bf16", "bf16"), (1, "fp32", None), (1, "bf16", None), (1, "bf16", "bf16"))
        )
    )
    return Topology(stage, draw(st.integers(1, 2)), precision, wrapper, tp=tp, pp=pp, placement=placement)
