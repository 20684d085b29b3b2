"""Invariants of a load with tensor and pipeline parallelism, for every rank in one process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.engine.parallel import ParallelState
from deepspeed_ucp.errors import CheckpointError, MismatchError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.load.prepare import check_alike
from deepspeed_ucp.model.view import EngineView
from tests.support.cases import pair_id
from tests.support.covering import all_turns, params
from tests.support.direct import check_loaded, run_refused
from tests.support.ranks import run_ranks
from tests.support.reshard import FakeTarget, examples, groups_of, open_everywhere, temporary_folder
from tests.support.reshard3d import (
    KINDS,
    PIPELINE,
    PIPELINES,
    PLAIN,
    PLAINS,
    VOCAB,
    SavedRun,
    Trip,
    draw_state,
    edit,
    expect,
    load_numbers,
    load_wanted,
    make_config,
    make_pipeline,
    make_plain,
    number_ranks,
    refuse,
    resume,
    trips,
)
from tests.synth import Layer, Local, Model, Param, Run, State, Topology, bidirectional, interleaved

NARROW = [
    Topology(0, 1, tp=3),
    Topology(0, 1, "bf16", "unfused", tp=3),
    Topology(0, 1, "bf16", "fused", tp=4),
    Topology(0, 1, "bf16", "bf16", tp=3),
    Topology(3, 2, tp=3),
]
NARROW_TARGETS = [Topology(0, 1), Topology(1, 2, tp=4), Topology(0, 1, "bf16", "fused", tp=2)]
THREE = make_pipeline([["column", "norm"], ["row"], ["column"], ["gate_up", "bias"]])
MOVED_FROM = [
    Topology(1, 2, pp=3),
    Topology(1, 1, "bf16", tp=2, pp=2, placement=interleaved(6, 2, 2)),
    Topology(1, 2, pp=2, placement=bidirectional(6, 2)),
    Topology(1, 1, "bf16", "bf16", pp=4, placement=bidirectional(6, 4)),
    Topology(0, 1, pp=3, placement=((0, 1, 2), (), (3, 4, 5))),
]
MOVED_TO = [
    Topology(1, 2),
    Topology(1, 1, pp=2, placement=((0, 1), (2, 3, 4, 5))),
    Topology(1, 1, pp=2, placement=((0, 1, 2, 3, 4), (5,))),
    Topology(1, 1, "bf16", pp=3, placement=interleaved(6, 3, 2)),
    Topology(1, 2, "bf16", "bf16", pp=2, placement=interleaved(6, 2, 3)),
    Topology(0, 1, "bf16", "bf16", tp=2, pp=2, placement=bidirectional(6, 2)),
    Topology(1, 1, pp=4, placement=bidirectional(6, 4)),
    Topology(0, 1, pp=4, placement=((0, 1), (), (2, 3, 4), (5,))),
]


UNEVEN = [
    (Topology(1, 1, pp=3), Topology(1, 2)),
    (Topology(1, 2), Topology(1, 1, pp=3)),
    (Topology(0, 1, pp=3), Topology(1, 1, "bf16", "bf16", tp=2, pp=2)),
    (Topology(1, 1, "bf16", "bf16", pp=3), Topology(0, 1, pp=2)),
]
ROWS: list[tuple[str, Model, list[Any]]] = [
    ("pipeline", PIPELINE, all_turns(PIPELINES, PIPELINES, 1, pair_id)),
    ("plain", PLAIN, all_turns(PLAINS, PLAINS, 1, pair_id)),
    # A parameter with fewer rows than ranks: some wrappers omit it on a rank without rows.
    ("narrow", make_plain(["column", "norm", "router", "few", "row"], frozen=["router"]),
     all_turns(NARROW, NARROW_TARGETS, 1, pair_id)),
    ("moved", THREE,
     all_turns(MOVED_FROM, MOVED_TO, 1, lambda row: "→".join(f"{each.label} {each.placement}" for each in row))),
    # DeepSpeed drops empty groups: group 0 of a stage without matrices is the second group of the others.
    ("groups", make_pipeline([["column", "bias"], ["norm"], ["bias", "row"]], tied=False),
     params(UNEVEN, (), pair_id)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "source", "target"),
    [
        pytest.param(model, *row.values, id=f"{name}-{row.id}", marks=row.marks)
        for name, model, rows in ROWS
        for row in rows
    ],
)
def test_every_kind_of_run_loads_into_every_other(
    model: Model, source: Topology, target: Topology, tmp_path: Path
) -> None:
    resume(draw_state(model, source), target, tmp_path)


DEGREES = [(1, 2), (2, 1), (2, 4), (4, 2), (3, 2), (2, 3), (4, 4)]
HYBRIDS = [("hybrid4", (1, 4)), ("hybrid4", (4, 1)), ("hybrid2", (2, 1)), ("hybrid2", (1, 2))]


@pytest.mark.parametrize(
    ("kind", "degrees"), [*all_turns(sorted(set(KINDS) - {"hybrid2", "hybrid4", "positions"}), DEGREES, 1), *HYBRIDS]
)
def test_every_pattern_loads_at_other_degrees(kind: str, degrees: tuple[int, int], tmp_path: Path) -> None:
    source, target = (Topology(2, 2, tp=tp) for tp in degrees)
    resume(draw_state(make_plain(["column", kind] if kind != "column" else [kind]), source), target, tmp_path)


@examples(120)
@given(trip=trips())
def test_any_topology_loads_into_any_other(trip: Trip) -> None:
    note(f"{trip.source.topology.label} {trip.source.topology.placement}→{trip.target.label} {trip.target.placement}")
    with temporary_folder() as folder:
        resume(trip.source, trip.target, folder, **trip.options)


def test_a_pipeline_save_loads_without_a_pipeline(tmp_path: Path) -> None:
    """Names differ by the layer's prefix, which a rename rule maps."""
    source = draw_state(make_pipeline([["column", "norm"], ["row", "bias"]], tied=False), Topology(1, 1, tp=2, pp=2))
    rename = {"from": r"(?P<layer>\d+)\.(?P<rest>.*)", "to": "body.layers.{layer+3}.{rest}"}
    config = make_config(source.model)
    config = config.model_copy(update={"patterns": {**config.patterns, "rename": [rename]}})  # type: ignore[dict-item]
    atoms = {rename_layer(name): states for name, states in source.state.atoms.items()}
    scalars = {rename_layer(name): states for name, states in source.state.scalars.items()}
    params = tuple(replace(param, name=rename_layer(param.name)) for param in source.model.params)
    buffers = {rename_layer(name): value for name, value in source.model.buffers.items()}
    wanted = SavedRun(Model(params, buffers), Topology(3, 2, tp=1), State(atoms, scalars, source.state.groups))
    load_wanted(source.write(tmp_path), wanted, config)


def rename_layer(name: str) -> str:
    layer, _, rest = name.partition(".")
    return f"body.layers.{int(layer) + 3}.{rest}"


# -- tied modules -----------------------------------------------------------------------------------------------------

TIED3 = Model(
    (
        Param("tied_modules.embed.word", (VOCAB, 4), tied=True),
        Param("tied_modules.embed.positions", (5, 4)),
        Param("1.column", (12, 5)),
        Param("3.column", (12, 5)),
    ),
    layers=(Layer("embed"), Layer(), Layer("embed"), Layer(), Layer("embed")),
)
POSITIONS = "tied_modules.embed.positions"
STAGES = {
    1: Topology(1, 2),
    2: Topology(1, 1, pp=2),
    3: Topology(1, 1, pp=3, placement=((0, 1), (2, 3), (4,))),
}


@pytest.mark.parametrize(("saved", "live"), [(a, b) for a in STAGES for b in STAGES], ids=str)
def test_each_stage_restores_its_copy_of_a_tied_weight(
    saved: int, live: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With fewer stages the first stage's copy is used, with a warning: DeepSpeed ties only ``tied_weight_attr``."""
    source = draw_state(TIED3, STAGES[saved])
    wanted, _ = resume(source, STAGES[live], tmp_path)
    assert wanted.state.atoms[POSITIONS]["fp32"].equal(source.state.atoms[POSITIONS]["fp32"])
    if saved == live > 1:
        assert wanted.state.atoms.keys() == source.state.atoms.keys()
    warned = [record.getMessage() for record in caplog.records if "tied" in record.getMessage()]
    assert len(warned) == int(saved > 1 and saved != live)
    if warned:
        assert POSITIONS in warned[0]
        assert "word" not in warned[0]
        assert "first stage" in warned[0]


@pytest.mark.parametrize("at", [0, 10], ids=["sampled", "not sampled"])
def test_copies_of_both_pipeline_directions_must_be_equal(at: int, tmp_path: Path) -> None:
    source = draw_state(THREE, Topology(1, 1, pp=2, placement=bidirectional(6, 2)))

    def change(ranks: Mapping[int, Local]) -> None:
        ranks[1].state.atoms["2.row"]["fp32"].view(-1)[at] += 1

    text = r"2\.row is held by 2 pipeline stages with different values; they must be equal"
    wanted = expect(source, Topology(1, 2))
    refuse(edit(source, change, tmp_path), wanted, make_config(source.model), CheckpointError, text)


def test_layers_of_an_interleaved_pipeline_without_names_are_refused(tmp_path: Path) -> None:
    """Stage 0 in fp32 saves no names of masters: the files do not show the layers of interleaved stages."""
    source = draw_state(THREE, Topology(0, 1, pp=2, placement=interleaved(6, 2, 2)))
    targets = expect(source, Topology(1, 1)).make_targets()
    with pytest.raises(MismatchError, match="no division of the layers into 2 runs fits"):
        open_everywhere(source.write(tmp_path), targets)


V_SHAPED = ((0, 3), (1, 2))
"""The layers of two ranks of a DualPipeV: down and back up."""
BLOCKS = replace(make_pipeline([["column", "norm"]] * 4, tied=False), buffers={})
"""Blocks of equal sizes."""
UNLIKE = replace(make_pipeline([["column"], ["row"], ["column", "norm"], ["row", "bias"]], tied=False), buffers={})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_without_names_load_into_the_layers_of_a_dualpipev(precision: str, tmp_path: Path) -> None:
    """Stage 0 without a pipeline: the live groups name its states, in the order of the layers instead of the stages."""
    saved_run = draw_state(BLOCKS, Topology(0, 1, precision))
    replace(saved_run, model=replace(BLOCKS, layers=())).write(tmp_path)
    wanted = expect(saved_run, Topology(1, 1, pp=2, placement=V_SHAPED))
    load_wanted(tmp_path, wanted, make_config(BLOCKS))


@pytest.mark.parametrize(
    ("model", "batch", "is_ambiguous"),
    [
        (BLOCKS, {"gradient_accumulation_steps": 3}, False),
        (BLOCKS, {"gradient_accumulation_steps": 4}, True),
        (BLOCKS, {"train_batch_size": 12}, False),
        (BLOCKS, {"train_batch_size": 16}, True),
        (UNLIKE, {"gradient_accumulation_steps": 4}, False),
    ],
)
def test_ambiguous_layers_without_names_are_reported(
    model: Model, batch: dict[str, int], is_ambiguous: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sizes may not distinguish DualPipeV's layers from consecutive ones; DualPipeV takes 2 × 2 micro batches."""
    source = draw_state(model, Topology(0, 1, pp=2))
    config = source.topology.ds_config() | batch
    folder, one, two = source.write(tmp_path, Run(ds_config=config)), Comm(), Comm()
    targets = [expect(source, Topology(1, 1)).make_targets()[0] for _ in range(2)]
    text = "may be a PipelineModule's or a DualPipeVModule's"
    assert open_checkpoint(str(folder), one, Naming(*groups_of(targets[0], one), dual_pipe=False))
    assert ("If a DualPipeVModule saved them" in caplog.text) == is_ambiguous
    with pytest.raises(MismatchError, match=text) if is_ambiguous else nullcontext():
        open_checkpoint(str(folder), two, Naming(*groups_of(targets[1], two), dual_pipe=True))


# -- the whole load ---------------------------------------------------------------------------------------------------


TP2_PP2, ZERO3 = Topology(1, 2, tp=2, pp=2), Topology(3, 2, tp=2)


@pytest.mark.parametrize("verify", ["crc", "off"])
@pytest.mark.parametrize(
    ("source", "target", "loaded"),
    [
        (TP2_PP2, Topology(1, 1, tp=2, pp=2), [0, 1, 2, 3]),
        (TP2_PP2, Topology(0, 2, tp=2, pp=2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (TP2_PP2, Topology(1, 1, tp=4), [0] * 4),
        (TP2_PP2, Topology(2, 2), [0, 0]),
        (Topology(1, 2, "bf16", tp=2, pp=2), Topology(1, 2, "bf16"), [0, 0]),
        (Topology(1, 2), Topology(1, 1, "bf16", "bf16", tp=2, pp=2), [0] * 4),
        (Topology(0, 1, tp=2, pp=2), Topology(1, 1, tp=4), [0] * 4),
        (ZERO3, Topology(2, 2, tp=2), [0, 10, 1, 11]),
        (ZERO3, Topology(3, 1, tp=2), [0, 1]),
        (ZERO3, Topology(3, 3, tp=2), [0, 0, 0, 1, 1, 1]),
        (ZERO3, Topology(3, 4), [0] * 4),
    ],
    ids=lambda t: t.label if isinstance(t, Topology) else "",
)
def test_each_rank_restores_its_client_state_at_the_same_degrees(
    source: Topology, target: Topology, loaded: list[int], verify: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron keeps random states there. Data-parallel ranks have separate files under ZeRO 3."""
    caplog.set_level(logging.INFO, "deepspeed_ucp")
    saved_run = draw_state(PLAIN if source == ZERO3 else PIPELINE, source)
    saved_run.write(tmp_path)
    saved = number_ranks(tmp_path)
    wanted = expect(saved_run, target)
    targets, config = wanted.make_targets(), make_config(saved_run.model, verify=verify)
    assert load_numbers(open_everywhere(tmp_path, targets), targets, config) == loaded
    check_loaded(targets, wanted.state, wanted.locals)
    assert ("other ranks' client states are not loaded" in caplog.text) is (saved != {*loaded})


def test_a_tensor_that_only_one_tensor_parallel_rank_has_is_refused(tmp_path: Path) -> None:
    more, fewer = (draw_state(make_plain(kinds), Topology(1, 1, tp=2)) for kinds in (["column", "norm"], ["column"]))
    index = open_everywhere(more.write(tmp_path), more.make_targets())
    kind, text = run_refused(index, [more.make_targets()[0], fewer.make_targets()[1]], make_config(more.model))
    assert kind is MismatchError and "Tensor-parallel ranks hold different tensors: body.norm are not on" in text


def test_a_model_that_differs_from_rank_0s_is_refused() -> None:
    stage = make_stage(0, ["a", "b"], dp_rank=1)
    check_alike(EngineView({"a": ((2,),), "b": ((2,),)}), stage)
    with pytest.raises(MismatchError, match=r"Data-parallel ranks hold different .*here b \(2,\), not on rank 0"):
        check_alike(EngineView({"a": ((2,),), "b": ((3,),)}), stage)
    with pytest.raises(MismatchError, match=r"here a \(2,\), b \(2,\)"):
        check_alike(EngineView(), stage)


# -- param groups of several ranks ------------------------------------------------------------------------------------


def make_stage(pp_rank: int, *groups: list[str], decay: Sequence[float] = (0.1, 0.1), dp_rank: int = 0) -> FakeTarget:
    """Make a rank of one of two stages, with parameters of equal shape; the first has a second name, `tied`."""
    params = [Param(name, (2,), number) for number, names in enumerate(groups) for name in names]
    tied = Param("tied", (2,), alias_of=groups[0][0])
    parallel = ParallelState(0, 1, pp_rank, 2, dp_rank, 1)
    target = FakeTarget(Model((*params, tied)), Topology(1, 2), dp_rank, parallel=parallel)
    for group, value in zip(target.wrapped.param_groups, decay, strict=False):
        group.update(weight_decay=value, lr=0.1 + pp_rank)
    return target


def test_param_groups_join_across_stages_if_one_stage_lacks_the_first() -> None:
    stages = [make_stage(0, ["0.w"], ["0.b"], decay=(0.1, 0.0)), make_stage(1, ["1.b"], decay=(0.0,))]
    for joined, hyper, order in run_ranks(2, lambda rank, comm: groups_of(stages[rank], comm)):
        assert list(order.values()) == ["0.w", "0.b", "1.b", "1.b"] and order["tied"] == "1.b"
        assert joined == [[("0.w", True)], [("0.b", True), ("1.b", True)]]
        assert [fields["weight_decay"] for fields in hyper] == [0.1, 0.0]


def test_a_joined_param_group_has_the_experts_of_all_ranks() -> None:
    ranks = [make_stage(0, ["dense"], ["e.0"]), make_stage(0, ["dense"], ["e.1"])]
    for joined, hyper, _ in run_ranks(2, lambda rank, comm: groups_of(ranks[rank], comm)):
        assert joined == [[("dense", True)], [("e.0", True), ("e.1", True)]]
        assert len(hyper) == 2


def test_a_joined_param_group_names_a_parameter_of_two_stages_once() -> None:
    stages = [make_stage(0, ["t", "0.w"]), make_stage(1, ["t", "1.w"])]
    joined, *_ = run_ranks(2, lambda rank, comm: groups_of(stages[rank], comm))[0]
    assert [name for name, _ in joined[0]] == ["t", "0.w", "1.w"]
