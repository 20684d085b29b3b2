"""The dry run against the loader: every rank's bytes, requests, files and exchange, to the byte."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.atoms import ITEMSIZE, AtomicIndex, AtomKey
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.forecast.degrees import MAX_GROUP, Degrees, parse_degrees
from deepspeed_ucp.forecast.dryrun import DryRun, check_batch_size, dry_run, measure
from deepspeed_ucp.forecast.estimate import measure_plan
from deepspeed_ucp.forecast.sample import Sampler
from deepspeed_ucp.forecast.target import EXPERTS, ForecastTarget, predict_target
from deepspeed_ucp.io import shared
from deepspeed_ucp.patterns import from_config
from deepspeed_ucp.sources import open_checkpoint
from tests.support.expertmodels import expert_trips
from tests.support.ranks import run_ranks
from tests.support.reshard import (
    PATIENT,
    Case,
    FakeTarget,
    Loaded,
    Options,
    examples,
    make_targets,
    open_for,
    prepare_rank,
    read,
    temporary_folder,
)
from tests.support.reshard3d import Held, Trip, draw_state, expect, make_config, make_pipeline, make_plain, trips
from tests.synth import ExpertLayer, Model, Param, Topology, random_state, write_checkpoint

WRAPPERS = {"raw": "torch", "fused": "fp16_fused", "unfused": "fp16_unfused", "bf16": "bf16"}
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MODEL = Model(
    (
        Param("wte", (40, 9)),
        Param("h.0.norm", (9,), group=1),
        Param("h.0.attn", (27, 9)),
        Param("h.0.frozen", (5, 7), frozen=True),
        Param("h.1.norm", (9,), group=1),
        Param("h.1.attn", (27, 9)),
        Param("head", (40, 9), alias_of="wte"),
        Param("ln", (11,), group=1),
    ),
    {"count": torch.arange(3), "mask": torch.linspace(0, 1, 5)},
)


def degrees_of(topology: Topology) -> Degrees:
    """The virtual counterpart of a synthesised topology."""
    kind = topology.kind
    wrapper = WRAPPERS.get(kind, "zero3" if topology.stage == 3 else "zero12")
    sub_group = topology.sub_group_size or 1_000_000_000
    return Degrees(
        topology.dp, topology.tp, topology.pp, 1, topology.stage, wrapper, PRECISIONS[topology.precision],
        sub_group=sub_group, ep=topology.ep or (1,), data_first=topology.data_first,
        max_group=topology.max_group or MAX_GROUP,
    )  # fmt: skip


def choose_blocks(case: int, config: UniversalConfig = PATIENT) -> Options:
    """Small blocks with many rounds, or larger ones of which hardly any part is granted."""
    chunk, window, min_direct = ((64, 2048, 16), (512, 16384, 64), (1024, 65536, 1 << 20))[case % 3]
    return Options(chunk, window, min_direct, config=config)


def predict(index: AtomicIndex, target: ForecastTarget, options: Options) -> DryRun:
    run = DryRun(target.degrees)
    measure(index, target, run, UniversalConfig(threads=1), exact=True, sizes=options.sizes)
    return run


def compare(index: AtomicIndex, ranks: Sequence[Loaded], run: DryRun, target: ForecastTarget, options: Options) -> None:
    """What the loader did is what was foretold, rank by rank, by the plan of all and by samples."""
    files = [record.file for record in index.stored.records]
    sampler = Sampler(index, target, options.sizes)
    assert len(ranks) == len(run.ranks) == target.ranks
    for number, (rank, foretold) in enumerate(zip(ranks, run.ranks, strict=True)):
        assert rank.plan is not None
        done = measure_plan(rank.plan, number, files, 1)
        assert {key: getattr(foretold, key) for key in done} == done, rank.target.label
        assert foretold.needed == count_wanted(rank), rank.target.label
        sampled = sampler.measure(number, target.wants(number), 1)
        assert sampled.keys() == done.keys()
        for key in ("read", "requests", "files", "received", "sent"):
            assert sampled[key] == done[key], rank.target.label
    assert run.totals is not None
    assert run.totals.read == sum(rank.plan.nbytes for rank in ranks if rank.plan)
    assert run.totals.state == sum(index.stored.atoms[key].nbytes for key in ranks[0].work.touched)
    assert run.totals.exchanged == sum(rank.received for rank in run.ranks) == sum(rank.sent for rank in run.ranks)


@pytest.fixture(scope="module", autouse=True)
def machines() -> Iterator[None]:
    """Every rank has a machine of its own, as a dry run takes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared, "identify_host", lambda: str(threading.get_ident()))
        yield


def load(folder: Path, targets: Sequence[FakeTarget], options: Options) -> tuple[AtomicIndex, list[Loaded]]:
    """Open, plan and read on every rank with the loader's own code, which counts what it reads."""

    def work(number: int, comm: Comm) -> tuple[AtomicIndex, Loaded]:
        index = open_for(folder, targets[number], comm)
        rank = prepare_rank(index, targets[number], comm, options)
        read(rank, options)
        return index, rank

    results = run_ranks(len(targets), work)
    return results[0][0], [rank for _, rank in results]


def count_wanted(rank: Loaded) -> int:
    return sum(want.numel * ITEMSIZE[want.atom.dtype] for want in rank.work.wants.wants)


PAIRS = [
    (Topology(1, 4, "bf16"), Topology(1, 2, "bf16")),
    (Topology(1, 4, "bf16"), Topology(3, 3, "bf16")),
    (Topology(2, 2), Topology(2, 5)),
    (Topology(2, 3, "fp16"), Topology(0, 2, "fp16")),
    (Topology(3, 4), Topology(3, 3)),
    (Topology(3, 3, "bf16", sub_group_size=100), Topology(2, 4, "bf16")),
    (Topology(3, 2), Topology(3, 7, sub_group_size=30)),
    (Topology(1, 3, "bf16", "bf16"), Topology(1, 4, "bf16", "bf16")),
    (Topology(1, 3, "bf16", "bf16"), Topology(3, 2, "bf16")),
    (Topology(0, 1, "bf16", "fused"), Topology(2, 3, "bf16")),
    (Topology(0, 2), Topology(3, 4)),
    (Topology(0, 1, "fp16", "unfused"), Topology(1, 3, "fp16")),
    (Topology(2, 4, round_robin=True), Topology(3, 2)),
    (Topology(1, 2, parameter_alignment=True), Topology(1, 3)),
    (Topology(2, 3, elastic=True), Topology(0, 3, "fp32")),
]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda topology: topology.label)
def test_it_foretells_what_every_rank_does(source: Topology, target: Topology, tmp_path: Path) -> None:
    options = choose_blocks(PAIRS.index((source, target)))
    state = random_state(MODEL, 1, precision=source.precision)
    folder = write_checkpoint(tmp_path, MODEL, state, source)
    targets = make_targets(MODEL, target)
    index, ranks = load(folder, targets, options)
    virtual = predict_target(index, degrees_of(target))
    compare(index, ranks, predict(index, virtual, options), virtual, options)


BLOCKS = [("column", "norm", "row", "qkv"), ("column", "gate_up", "bias"), ("column", "router", "experts"), ("column",)]
PIPELINE = make_pipeline(BLOCKS, frozen=("router",))
PLAIN = make_plain(("column", "norm", "row", "qkv", "gate_up", "experts", "word", "router"), frozen=("router",))
PAIRS_3D = [
    (PIPELINE, Topology(1, 2, tp=2, pp=2), Topology(1, 1, tp=2, pp=2)),
    (PIPELINE, Topology(1, 2, tp=2, pp=2), Topology(1, 2, tp=1, pp=1)),
    (PIPELINE, Topology(1, 2, tp=2, pp=2), Topology(3, 3)),
    (PIPELINE, Topology(1, 1, "bf16", "bf16", tp=3, pp=2), Topology(1, 2, "bf16", tp=2, pp=3)),
    (PIPELINE, Topology(1, 2, pp=3), Topology(0, 2, tp=2)),
    (PIPELINE, Topology(1, 1), Topology(1, 2, tp=2, pp=2)),
    (PIPELINE, Topology(1, 2, tp=2), Topology(1, 3, tp=4, pp=2)),
    (PLAIN, Topology(3, 2, tp=2), Topology(3, 3, tp=2)),
    (PLAIN, Topology(3, 2, tp=4), Topology(2, 2, tp=2)),
    (PLAIN, Topology(2, 2, tp=2), Topology(3, 5)),
    (PLAIN, Topology(0, 1, tp=2), Topology(3, 2, tp=1)),
]


def label_pair(value: Any) -> str:
    return value.label if isinstance(value, Topology) else "pipeline" if value is PIPELINE else "plain"


@pytest.mark.parametrize(("model", "source", "target"), PAIRS_3D, ids=label_pair)
def test_it_foretells_what_every_rank_of_a_3d_target_does(
    model: Model, source: Topology, target: Topology, tmp_path: Path
) -> None:
    held = draw_state(model, source)
    wanted = expect(held, target)
    compare_trip(held, wanted.make_targets(), target, tmp_path, PAIRS_3D.index((model, source, target)))


def compare_trip(held: Held, targets: Sequence[FakeTarget], target: Topology, folder: Path, case: int) -> None:
    """With the live model's own shapes and stages."""
    config = make_config(held.model)
    options = choose_blocks(case, config)
    index, ranks = load(held.write(folder), targets, options)
    rules, shapes, stages = from_config(config.patterns), live_shapes(targets), live_stages(targets)
    virtual = predict_target(index, degrees_of(target), rules, shapes=shapes, stages=stages)
    compare(index, ranks, predict(index, virtual, options), virtual, options)


@examples(10)
@given(trips(), st.integers(0, 2))
def test_it_foretells_any_trip(trip: Trip, case: int) -> None:
    with temporary_folder() as folder:
        compare_trip(trip.source, expect(trip.source, trip.target).make_targets(), trip.target, folder, case)


def live_shapes(targets: Sequence[FakeTarget]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Local shapes of the engine's tensors per tensor-parallel rank."""
    found: dict[str, dict[int, tuple[int, ...]]] = {}
    for target in targets:
        for name, shape in target.owned_shapes().items():
            found.setdefault(name, {})[target.place.tp_rank] = shape
        for extra in target.extras():
            found.setdefault(extra.name, {})[target.place.tp_rank] = extra.shape
    return {name: tuple(shapes[rank] for rank in sorted(shapes)) for name, shapes in found.items()}


def live_stages(targets: Sequence[FakeTarget]) -> dict[str, tuple[int, ...]]:
    """The stages that hold each tensor."""
    found: dict[str, set[int]] = {}
    for target in targets:
        for name in (*target.owned_shapes(), *(extra.name for extra in target.extras())):
            found.setdefault(name, set()).add(target.place.pp_rank)
    return {name: tuple(sorted(stages)) for name, stages in found.items()}


def test_a_part_of_the_work_goes_through_rounds_in_these_cases(tmp_path: Path) -> None:
    """Else the comparison would say little about them."""
    source, target = Topology(2, 3, "fp16"), Topology(0, 2, "fp16")
    folder = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 1, precision="fp16"), source)
    index = open_checkpoint(str(folder), Comm())
    run = predict(index, predict_target(index, degrees_of(target)), choose_blocks(0))
    assert all(rank.rounds > 3 and rank.received and rank.sent for rank in run.ranks)


def open_small(folder: Path, topology: Topology) -> AtomicIndex:
    write_checkpoint(folder, MODEL, random_state(MODEL, 1, precision=topology.precision), topology)
    return open_checkpoint(str(next(folder.glob("global_step*"))), Comm())


def test_the_same_topology_is_deepspeeds_own_load(tmp_path: Path) -> None:
    index = open_small(tmp_path, Topology(3, 4, "bf16"))
    run = dry_run(index, parse_degrees("dp=2,sp=2,zero=3", index.run.topology))
    assert (run.possible, run.loader, run.ranks) == (True, "DeepSpeed", [])


def test_states_that_cannot_be_cut_are_an_obstacle(tmp_path: Path) -> None:
    index = open_small(tmp_path, Topology(1, 2)).change(
        irregular={AtomKey("wte", "row"): "shape (9,)"}, optimizer="Adafactor"
    )
    run = dry_run(index, parse_degrees("dp=3", index.run.topology))
    assert not run.possible
    assert "Adafactor keeps states that are not element-wise" in run.obstacles[0]


def test_large_targets_are_sampled(tmp_path: Path) -> None:
    index = open_small(tmp_path, Topology(1, 2))
    run = dry_run(index, parse_degrees("dp=999,zero=3", index.run.topology))
    assert (run.exact, [rank.rank for rank in run.ranks]) == (False, [0, 249, 499, 748, 998])
    assert run.totals is not None
    assert run.totals.needed == run.totals.state + 998 * (3 * 8 + 5 * 4)  # buffers are whole on every rank


@pytest.mark.parametrize(
    ("saved", "dp", "fits"),
    [
        ({}, 7, True),
        ({"train_batch_size": 8}, 4, True),
        ({"train_batch_size": 8}, 3, False),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}, 4, False),
        ({"train_batch_size": "auto"}, 3, True),
        ({"train_batch_size": 8.0}, 3, False),
        ({"train_batch_size": 8.0, "train_micro_batch_size_per_gpu": 2.0}, 4, True),
    ],
)
def test_batch_sizes(saved: dict[str, Any], dp: int, fits: bool) -> None:
    batch = check_batch_size(saved, dp)
    assert batch.fits == fits
    assert fits or "What would fit" in batch.text


def test_the_checkpoints_stages_are_kept_where_their_number_is(tmp_path: Path) -> None:
    held = draw_state(PIPELINE, Topology(1, 2, tp=2, pp=2))
    held.write(tmp_path)
    index = open_checkpoint(str(tmp_path), Comm())
    found = predict_target(index, parse_degrees("dp=1,tp=2,pp=2", index.run.topology))
    assert any("own pipeline stages" in text for text in found.assumed)
    live = live_stages(held.make_targets())
    for number, part in enumerate(found.model_ranks):
        assert set(part.match.params) == {name for name, stages in live.items() if number // 2 in stages}


def test_experts_are_planned_whole_and_that_is_told(tmp_path: Path) -> None:
    model = Model((Param("dense", (5,)), Param("body.deepspeed_moe.experts.deepspeed_experts.0.w", (6,), group=1)))
    folder = write_checkpoint(tmp_path, model, random_state(model, 1, precision="fp32"), Topology(1, 2))
    index = open_checkpoint(str(folder), Comm())
    assert EXPERTS in predict_target(index, parse_degrees("dp=3", index.run.topology)).assumed
    planned = dry_run(index, parse_degrees("dp=3", index.run.topology), from_config("lora"))
    assert any("how resize rules change them only the live model tells" in text for text in planned.assumed)
    for target, told in (
        ("dp=2,zero=3", "experts are resumed under ZeRO 0, 1 and 2 alone"),
        ("dp=1,tp=2", "at tp > 1"),
    ):
        with pytest.raises(MismatchError, match=told):
            predict_target(index, parse_degrees(target, index.run.topology))
    spread = index.change(topology=replace(index.run.topology, ep=2))
    assert "ep 2 → 1" in dry_run(spread, parse_degrees("dp=2", spread.run.topology)).differences


def test_a_target_whose_patterns_nothing_settles_is_refused_as_by_the_loader(tmp_path: Path) -> None:
    held = draw_state(PLAIN, Topology(2, 1, tp=2))
    index = open_checkpoint(str(held.write(tmp_path)), Comm())
    with pytest.raises(MismatchError, match=r"How tensor parallelism cuts the following is not known \(8 parameters\)"):
        predict_target(index, parse_degrees("dp=2,tp=1", index.run.topology))


def foresee_experts(trip: tuple[Case, Topology], case: int) -> None:
    """A plan takes parameters in the saved order, without alignment, and in the same one on all ranks."""
    source, options = replace(trip[0], topology=replace(trip[0].topology, round_robin=False)), choose_blocks(case)
    target = replace(trip[1], round_robin=False, parameter_alignment=False, shuffled=False, dealt=False)
    with temporary_folder() as folder:
        targets = make_targets(source.model, target)
        index, ranks = load(source.write(folder), targets, options)
        virtual = predict_target(index, degrees_of(target))
        run = predict(index, virtual, options)
        compare(index, ranks, run, virtual, options)
    assert run.totals is not None
    assert run.totals.needed == sum(rank.needed for rank in run.ranks)


@examples(60)
@given(expert_trips(fused=False), st.integers(0, 2))
def test_it_foretells_any_placement_of_experts(trip: tuple[Case, Topology], case: int) -> None:
    foresee_experts(trip, case)


@examples(60)
@given(expert_trips(fused=True), st.integers(0, 2))
def test_it_foretells_any_placement_of_autoeps_experts(trip: tuple[Case, Topology], case: int) -> None:
    pytest.importorskip("deepspeed.checkpoint.autoep_affine", reason="DeepSpeed before 0.19 has no AutoEP")
    foresee_experts(trip, case)


def make_experts(*, fused: bool) -> Model:
    """Four experts between dense layers, as Hugging Face's models have them, or as AutoEP's."""
    experts = {f"{w}.{e}": (3, 4) if w == "w2" else (4, 3) for w in ("w1", "w2", "w3") for e in range(4)}
    held = {"gate_up_proj": (4, 8, 3), "down_proj": (4, 3, 4)} if fused else experts
    gate = Param("h.0.mlp.gate.weight" if fused else "h.0.mlp.router.gate.weight", (4, 3))
    params = [Param("wte", (40, 9)), gate, *(Param(f"h.0.mlp.experts.{name}", shape) for name, shape in held.items())]
    layers = () if fused else (ExpertLayer("h.0.mlp", 4, fused=True),)
    return Model((*params, Param("ln", (11,))), experts=layers)


@pytest.mark.parametrize("ep", [1, 2])
def test_it_foretells_what_rename_rules_make(ep: int, tmp_path: Path) -> None:
    """The load goes by the live model, a plan by the rules alone."""
    pytest.importorskip("deepspeed.checkpoint.autoep_affine", reason="DeepSpeed before 0.19 has no AutoEP")
    config = UniversalConfig(threads=1, patterns="autoep")
    model, source, target = make_experts(fused=True), Topology(1, 3, "bf16"), Topology(2, 4, "bf16", ep=(ep,))
    folder = write_checkpoint(tmp_path, model, random_state(model, 1, precision="bf16"), source)
    options = choose_blocks(0, config)
    index, ranks = load(folder, make_targets(make_experts(fused=False), target), options)
    virtual = predict_target(index, degrees_of(target), from_config("autoep"))
    run = predict(index, virtual, options)
    assert [rank.needed for rank in run.ranks] == [count_wanted(rank) for rank in ranks]
    assert run.totals is not None
    assert run.totals.read == sum(rank.plan.nbytes for rank in ranks if rank.plan)
