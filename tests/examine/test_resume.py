"""`ds_ucp plan` and the load give equal verdicts and equal numbers of bytes read and restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import ConfigError, UcpError
from deepspeed_ucp.examine.degrees import Degrees, parse_degrees
from deepspeed_ucp.examine.resume import DEEPSPEED, OURS, check_resume
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import AtomKey, count
from deepspeed_ucp.model.topology import Topology as Saved
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.properties.samples import PLAIN as SMALL
from tests.support.expertmodels import expert_trips
from tests.support.exports import open_model
from tests.support.ranks import run_ranks
from tests.support.reshard import (
    PATIENT,
    FakeTarget,
    Options,
    examples,
    make_targets,
    open_for,
    prepare_rank,
    temporary_folder,
)
from tests.support.reshard import plan as plan_reads
from tests.support.reshard3d import Trip, draw_state, expect, make_config, make_pipeline, make_plain, trips
from tests.synth import ExpertLayer, Model, Param, Run, Topology, random_state, write_checkpoint

MODEL = replace(SMALL, buffers={**SMALL.buffers, "mask": torch.linspace(0, 1, 5)})
SOURCE = Saved(1, "bf16", "bfloat16", dp=4)


def degrees_of(topology: Topology) -> Degrees:
    precision, ep = str(topology.dtype).removeprefix("torch."), max(topology.ep or (1,))
    return Degrees(topology.dp, topology.tp, topology.pp, 1, ep, topology.stage, topology.row.name, precision)


def measure_load(folder: Path, targets: Sequence[FakeTarget], options: Options) -> tuple[AtomicIndex, int, int]:
    """Return the index, and the bytes that all ranks of a load read and restore."""

    def work(number: int, comm: Comm) -> tuple[AtomicIndex, int, int]:
        index = open_for(folder, targets[number], comm)
        rank = prepare_rank(index, targets[number], comm, options)
        plan_reads(rank, options)
        assert rank.plan is not None
        return index, sum(read.nbytes for read in rank.reads), index.atoms.count_bytes(rank.fill_plan.touched)

    results = run_ranks(len(targets), work)
    return results[0][0], sum(nbytes for _, nbytes, _ in results), results[0][2]


PAIRS = [
    (Topology(1, 4, "bf16"), Topology(1, 2, "bf16")),
    (Topology(1, 4, "bf16"), Topology(3, 3, "bf16")),
    (Topology(2, 3, "fp16"), Topology(0, 2, "fp16")),
    (Topology(3, 3, "bf16", sub_group_size=100), Topology(2, 4, "bf16")),
    (Topology(1, 3, "bf16", "bf16"), Topology(3, 2, "bf16")),
    (Topology(0, 1, "bf16", "fused"), Topology(2, 3, "bf16")),
    (Topology(0, 2), Topology(3, 4)),
    (Topology(2, 3, elastic=True), Topology(0, 3, "fp32")),
]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda topology: topology.label)
def test_the_resume_check_counts_the_bytes_of_a_load(source: Topology, target: Topology, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 1, precision=source.precision), source)
    index, read, state = measure_load(folder, make_targets(MODEL, target), Options(config=PATIENT))
    check = check_resume(index, degrees_of(target))
    assert (check.obstacles, check.loader, check.read, check.state) == ([], OURS, read, state)
    assert check.checkpoint == sum(path.stat().st_size for path in folder.glob("*.pt"))
    assert check.files == len(list(folder.glob("*.pt")))


def compare_trip(trip: Trip, folder: Path) -> None:
    """Check that the counts equal a load's, except if only the live model's shapes determine a pattern."""
    config = make_config(trip.source.model)
    targets = expect(trip.source, trip.target).make_targets()
    index, read, state = measure_load(trip.source.write(folder), targets, Options(config=config))
    check = check_resume(index, degrees_of(trip.target), from_config(config.patterns))
    uneven = ("equal parts", "shares are not whole", "pipeline")
    assert not [text for text in check.obstacles if not any(words in text for words in uneven)]
    if not check.obstacles and check.loader == OURS:
        assert (check.read, check.state) == (read, state)


BLOCKS = [("column", "norm", "row", "qkv"), ("column", "gate_up", "bias"), ("column", "router", "experts"), ("column",)]
PIPELINE = make_pipeline(BLOCKS, frozen=("router",))
PLAIN = make_plain(("column", "norm", "row", "qkv", "gate_up", "experts", "word", "router"), frozen=("router",))
PAIRS_3D = [
    (PIPELINE, Topology(1, 2, tp=2, pp=2), Topology(1, 2, tp=1, pp=1)),
    (PIPELINE, Topology(1, 2, tp=2, pp=2), Topology(3, 3)),
    (PIPELINE, Topology(1, 1), Topology(1, 2, tp=2, pp=2)),
    (PIPELINE, Topology(1, 2, pp=3), Topology(0, 2, tp=2)),
    (PLAIN, Topology(3, 2, tp=2), Topology(3, 3, tp=2)),
    (PLAIN, Topology(2, 2, tp=2), Topology(3, 5)),
]


@pytest.mark.parametrize(("model", "source", "target"), PAIRS_3D, ids=lambda v: getattr(v, "label", ""))
def test_the_check_counts_bytes_of_a_3d_load(model: Model, source: Topology, target: Topology, tmp_path: Path) -> None:
    compare_trip(Trip(draw_state(model, source), target), tmp_path)


@examples(15)
@given(trips())
def test_the_resume_check_counts_the_bytes_of_any_3d_load(trip: Trip) -> None:
    with temporary_folder() as folder:
        compare_trip(trip, folder)


@pytest.mark.parametrize("fused", [False, True], ids=["experts", "autoep"])
@examples(25)
@given(data=st.data())
def test_the_resume_check_counts_the_bytes_of_a_load_of_experts(fused: bool, data: st.DataObject) -> None:
    if fused:
        pytest.importorskip("deepspeed.checkpoint.autoep_affine", reason="DeepSpeed before 0.19 has no AutoEP")
    source, target = data.draw(expert_trips(fused=fused))
    with temporary_folder() as folder:
        targets = make_targets(source.model, target)
        index, read, state = measure_load(source.write(folder), targets, Options(config=PATIENT))
        check = check_resume(index, degrees_of(target))
    if any("ep=" in text for text in check.obstacles):
        return
    # Without checksums only a live engine reveals the two names of a router.
    again = sum(count(param.shape) for param in source.model.params if param.untold) if source.legacy else 0
    assert check.loader == OURS and check.read - read == check.state - state
    assert check.read - read in (0, 2 * again, 4 * again)


FAULTS: dict[str, Callable[[AtomicIndex], AtomicIndex]] = {
    "keeps states that are not element-wise": lambda index: replace(
        index, irregular={AtomKey("a.weight", "row"): "shape (9,)"}, optimizer="Adafactor"
    ),
    "not contiguous": lambda index: replace(index, unreadable={AtomKey("a.weight", "fp32"): "it is not contiguous"}),
    "no optimizer states": lambda index: replace(index, stateless="There are no optimizer states."),
}


@pytest.mark.parametrize("words", FAULTS)
def test_refusals_of_the_load_are_obstacles_of_the_resume_check(words: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, MODEL, random_state(MODEL, 1), Topology(1, 2))
    target = make_targets(MODEL, Topology(1, 3))[0]
    index = FAULTS[words](open_for(next(tmp_path.glob("global_step*")), target))
    with pytest.raises(UcpError, match=words):
        prepare_rank(index, target, Comm())
    assert words in " ".join(check_resume(index, parse_degrees("dp=3", index.topology)).obstacles)
    assert check_resume(index, parse_degrees("dp=2", index.topology)).loader == DEEPSPEED


@pytest.mark.parametrize(
    ("saved", "dp", "fits"),
    [
        ({}, 7, True),
        ({"train_batch_size": 8}, 4, True),
        ({"train_batch_size": 8}, 3, False),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}, 4, False),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4,
          "checkpoint": {"universal": {"preserve_batch_size": True}}}, 4, True),
        ({"train_batch_size": "auto"}, 3, True),
        ({"train_batch_size": 8.0}, 3, False),
        ({"train_batch_size": 8.0, "train_micro_batch_size_per_gpu": 2.0}, 4, True),
    ],
)  # fmt: skip
def test_the_check_reports_invalid_batch_sizes(saved: dict[str, Any], dp: int, fits: bool, tmp_path: Path) -> None:
    run = Run(ds_config={**Topology(1, 2).ds_config(), "train_micro_batch_size_per_gpu": None, **saved})
    index = open_model(tmp_path, Topology(1, 2), MODEL, run=run)
    degrees = parse_degrees(f"dp={dp}", index.topology)
    check = check_resume(index, degrees)
    assert (not check.obstacles) == fits
    assert fits or "Alternatives: " in check.obstacles[0]
    assert bool(check.batch.get("change")) == ("checkpoint" in saved)
    assert not check_resume(index, degrees, train_batch=dp * 2).obstacles


def open_experts(folder: Path, degrees: tuple[int, int]) -> AtomicIndex:
    names = [f"h.{layer}.mlp.deepspeed_moe.experts.deepspeed_experts.{e}.w" for layer in (0, 1) for e in range(4)]
    layers = tuple(ExpertLayer(f"h.{layer}.mlp", 4) for layer in (0, 1))
    model = Model((Param("dense", (5,)), *(Param(name, (6,)) for name in names)), experts=layers)
    return open_model(folder, Topology(1, 4, ep=degrees), model)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("dp=4,ep=3", "ep=3 must divide the data-parallel ranks and the experts of each layer"),
        ("dp=4,ep=2,zero=3", "under ZeRO 0, 1 and 2"),
        ("dp=1,pp=2,zero=2", "refuses ZeRO-2 and ZeRO-3 with pipeline parallelism"),
        ("dp=2,ep=2", ""),
    ],
)
def test_impossible_degrees_are_obstacles(target: str, text: str, tmp_path: Path) -> None:
    index = open_experts(tmp_path, (2, 2))
    check = check_resume(index, parse_degrees(target, index.topology))
    assert text in " ".join(check.obstacles) and bool(text) == bool(check.obstacles)


def test_another_placement_of_experts_at_equal_degrees_is_no_obstacle(tmp_path: Path) -> None:
    index = open_experts(tmp_path, (2, 4))
    check = check_resume(index, parse_degrees("dp=4,ep=4", index.topology))
    assert (check.loader, check.obstacles) == (OURS, []) and check.read > 0


def test_rename_rules_change_the_names_of_the_resume_check(tmp_path: Path) -> None:
    index = open_model(tmp_path, Topology(1, 2), MODEL)
    rules = from_config({"rename": [{"from": "a.(?P<x>.*)", "to": "b.{x}"}]})
    check = check_resume(index, parse_degrees("dp=2", index.topology), rules)
    assert (check.loader, check.obstacles) == (OURS, []) and check.state > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp=3", Degrees(3, zero=1, wrapper="bf16", precision="bfloat16")),
        ("dp=3,tp=2,pp=1,zero=3", Degrees(3, 2, zero=3, wrapper="zero3", precision="bfloat16")),
        (" dp=2, sp = 4,zero=2 ", Degrees(2, sp=4, zero=2, wrapper="zero12", precision="bfloat16")),
        ("dp=2,zero=0,pp=2", Degrees(2, pp=2, wrapper="bf16", precision="bfloat16")),
        ("dp=2,zero=0,precision=fp32", Degrees(2)),
        ("dp=2,zero=0,precision=fp16", Degrees(2, wrapper="fp16_fused", precision="float16")),
        ("dp=4,ep=2", Degrees(4, ep=2, zero=1, wrapper="bf16", precision="bfloat16")),
    ],
)
def test_degrees_are_parsed(text: str, expected: Degrees) -> None:
    assert parse_degrees(text, SOURCE) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=3,xp=2", "'xp=2'"),
        ("dp=3,dp=2", "each once"),
        ("dp=3,presicion=bf16", "Did you mean 'precision'?"),
        ("dp", "'dp'"),
        ("dp=0", "dp is an integer from 1 to 1,048,576, found '0'"),
        ("dp=2,zero=4", "zero is an integer from 0 to 3, found '4'"),
        ("tp=2", "dp is missing"),
        ("dp=2,precision=int8", "precision 'int8' cannot be planned"),
        ("dp=99999999999", "from 1 to 1,048,576, found '99999999999'"),
        ("dp=1024,tp=1024,pp=2", "at most 1,048,576 ranks"),
    ],
)
def test_wrong_degrees_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_degrees(text, SOURCE)
    assert message in str(error.value)


def test_the_number_of_ranks_implies_dp_and_the_partitions() -> None:
    assert parse_degrees("tp=2,pp=3,zero=1", SOURCE, world=48).dp == 8
    for text, world in (("tp=2,pp=3", 50), ("dp=4,tp=2", 48)):
        with pytest.raises(ConfigError, match=f"--ranks {world} is not the product"):
            parse_degrees(text, SOURCE, world=world)
    with pytest.raises(ConfigError, match="precision 'float64' cannot be planned"):
        parse_degrees("dp=2", replace(SOURCE, precision="float64"))
    degrees = parse_degrees("dp=2,sp=4,zero=3", SOURCE)
    assert (degrees.world, degrees.shards, degrees.to_topology(SOURCE).dp) == (8, 8, 8)
