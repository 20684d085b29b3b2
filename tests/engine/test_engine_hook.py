"""The hook itself: when it steps in, and that it leaves everything else alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.sources.latest import find_checkpoint
from deepspeed_ucp.testing import ResumeReport, WorldPool
from deepspeed_ucp.testing.compare import compare
from tests.support.engines import ranks as engine_ranks
from tests.support.engines.cases import Case, pair_id
from tests.support.engines.ranks import Load

ON = {"checkpoint": {"universal": True}}
PLAIN = {"model": "plain"}
ASKED = {"checkpoint": {"universal": {"same_topology": "direct"}}}


OTHER = [(Case(1, 3), Case(1, 2)), (Case(1, 2), Case(2, 2)), (Case(3, 2), Case(3, 2, "bf16"))]
SMOKE = pytest.mark.engine_smoke
SAME = [pytest.param(Case(s, 2, p), marks=SMOKE) for s in (0, 1, 2, 3) for p in ("fp32", "bf16")]


OFFLOADED = [
    Case(2, 2, "bf16", {"offload_optimizer": {"device": "cpu"}}),
    Case(3, 2, zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
]


@pytest.mark.releases
@pytest.mark.parametrize("case", [*SAME, *(Case(stage, 2, "fp16") for stage in (0, 1, 2, 3)), *OFFLOADED], ids=str)
def test_same_topology_is_left_to_deepspeed(case: Case, sources: Any, ucp_worlds: WorldPool) -> None:
    """Its own load runs once, one INFO line says why and one when it has ended, and the state is the saved one."""
    check_own_load(case, "plain", sources, ucp_worlds)


@pytest.mark.parametrize("case", [Case(0, 2), Case(0, 2, "bf16"), Case(1, 2)], ids=str)
def test_frozen_parameters_below_zero_3_are_left_to_it(case: Case, sources: Any, ucp_worlds: WorldPool) -> None:
    check_own_load(case, "frozen", sources, ucp_worlds)


def check_own_load(case: Case, model: str, sources: Any, ucp_worlds: WorldPool) -> None:
    source = sources.get(case, model=model)
    answers = ucp_worlds.get(case.dp).run(
        engine_ranks.watch_own_load, case.but(config=ON).training(model=model), str(source.folder)
    )
    if case.stage == 0 and any(source.folder.rglob("bf16_zero_*")):  # before 0.19: BF16_Optimizer, which is ours
        assert [answer["direct"] for answer in answers] == [True] * case.dp
        return
    for rank, answer in enumerate(answers):
        assert answer["calls"] == 1
        assert answer["direct"] is False
        assert "same topology" in answer["reason"]
        assert [" loaded in " in text for text in answer["info"]] == ([False, True] if rank == 0 else [])
        assert engine_ranks.differences(str(source.folder), answer["state"]) == []


@pytest.mark.parametrize("case", [Case(0, 2, "bf16"), Case(1, 2, "bf16"), Case(2, 2), Case(3, 2, "fp16")], ids=str)
def test_same_topology_is_ours_where_it_is_asked_for(case: Case, sources: Any, ucp_worlds: WorldPool) -> None:
    """It gives to the bit what DeepSpeed's own load gives, and training goes on alike."""
    world, loads = ucp_worlds.get(case.dp), [Load(str(sources.get(case, **PLAIN).folder), steps=2)]
    ours = world.run(engine_ranks.load_each, case.but(config=ASKED).training(**PLAIN), loads)
    theirs = world.run(engine_ranks.load_each, case.training(**PLAIN), loads, plugin=False)
    assert ours[0][0].path == theirs[0][0].path
    for (mine,), (own,) in zip(ours, theirs, strict=True):
        assert mine.direct
        assert compare(own.state, mine.state)[1] == []
        assert mine.losses == own.losses


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "sent"])
def test_partitions_are_gathered_in_place(shared: bool, ucp_worlds: WorldPool) -> None:
    """Of one element, and of several slices."""
    for partition in (1, (5 << 20) + 3):
        assert ucp_worlds.get(2).run(engine_ranks.gather_partitions, partition, shared=shared) == [True, True]


@pytest.mark.parametrize("pair", OTHER, ids=pair_id)
def test_another_topology_is_not(pair: tuple[Case, Case], sources: Any, ucp_worlds: WorldPool) -> None:
    source, target = pair[0], pair[1].but(config=ON)
    folder = str(sources.get(source, **PLAIN).folder)
    answers = ucp_worlds.get(target.dp).run(engine_ranks.watch_own_load, target.training(**PLAIN), folder)
    for rank, answer in enumerate(answers):
        assert answer["calls"] == 0
        assert answer["direct"] is True
        assert [" loaded in " in text for text in answer["info"]] == ([False, True] if rank == 0 else [])
        told = ("WARNING", "this run differs from the saved one: precision float32 → bfloat16")
        found = [(level, text.partition(": ")[2]) for level, text in answer["changes"]]
        assert found == ([told] if source.precision != target.precision and rank == 0 else [])


def test_another_total_batch_is_told_in_the_same_topology_too(sources: Any, ucp_worlds: WorldPool) -> None:
    source = Case(1, 2)
    target = source.but(config={**ON, "train_batch_size": 30})
    own = find_checkpoint(str(sources.get(source, **PLAIN).folder))  # which DeepSpeed takes for a folder without any
    first, other = ucp_worlds.get(2).run(engine_ranks.watch_own_load, target.training(**PLAIN), own)
    assert (first["direct"], other["changes"]) == (False, [])
    assert first["calls"] == 1 and Path(first["path"]).parent == Path(own)
    ((level, text),) = first["changes"]
    assert (level, text.partition("saved one: ")[2]) == ("WARNING", "total batch 60 → 30")


@pytest.mark.parametrize("config", [{}, {"data_types": {"grad_accum_dtype": "fp32"}}], ids=str)
def test_masters_are_restored_whatever_deepspeeds_own_load_makes_them_of(
    config: dict[str, Any], resume_each: Callable[..., None]
) -> None:
    """In the same topology it would make them of the 16-bit copies."""

    def check(_source: Case, _target: Case, report: ResumeReport) -> None:
        assert report.direct

    case = Case(1, 2, "bf16", zero={"load_from_fp32_weights": False}, config=config)
    resume_each([case], case, check, **PLAIN)


@pytest.mark.parametrize("case", [Case(1, 2), Case(2, 2, "bf16"), Case(0, 2, "bf16")], ids=str)
def test_experts_are_left_to_deepspeed_in_the_same_topology_alone(
    case: Case, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """With another expert-parallel degree its own load would mix up the experts' states (test_engine_experts.py)."""
    world, folder, on = ucp_worlds.get(2), str(tmp_path), case.but(config=ON)
    world.run(engine_ranks.save, case.training(model="experts2"), folder, plugin=False)
    for answer in world.run(engine_ranks.watch_own_load, on.training(model="experts2"), folder):
        assert (answer["calls"], answer["direct"]) == (1, False)
        assert answer["reason"].startswith("same topology (") and "ep=2" in answer["reason"]
    for answer in world.run(engine_ranks.watch_own_load, on.training(model="experts1"), folder):
        assert (answer["calls"], answer["direct"]) == (0, True)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_files_of_every_nodes_own(stage: int, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """DeepSpeed's own load where each node has its own ranks' files, else ours, to the bit as from one folder."""
    options = {"universal": {"seal": True}, "use_node_local_storage": True}
    local = Case(stage, 2, "bf16", config={"checkpoint": options})
    other, world = local.but(stage=4 - stage), ucp_worlds.get(2)
    world.run(engine_ranks.on_nodes, engine_ranks.save, local.training(**PLAIN), str(tmp_path))
    assert [(tmp_path / f"node{node}" / "latest").exists() for node in range(2)] == [True, False]
    for answer in world.run(engine_ranks.on_nodes, engine_ranks.watch_own_load, local.training(**PLAIN), str(tmp_path)):
        assert (answer["calls"], answer["direct"]) == (1, False)
        assert "each rank's own files" in answer["reason"]
    for node in (1, 0):  # of the model states below ZeRO 3, which each node has, the first rank's stay
        shutil.copytree(tmp_path / f"node{node}", tmp_path / "shared", dirs_exist_ok=True)
    plain = other.but(config={"checkpoint": {"universal": True}})
    whole = world.run(engine_ranks.load_one, plain.training(**PLAIN), str(tmp_path / "shared"))
    for turn in (0, 1):
        apart = world.run(engine_ranks.on_nodes, engine_ranks.load_one, other.training(**PLAIN), str(tmp_path), turn)
        for one, two in zip(whole, apart, strict=True):
            assert two.direct
            assert compare(one.state, two.state)[1] == []
            assert (one.client_state, one.losses) == (two.client_state, two.losses)
    moved = world.run(engine_ranks.on_nodes, engine_ranks.load_one, local.training(**PLAIN), str(tmp_path), 1)
    own = world.run(engine_ranks.on_nodes, engine_ranks.load_one, local.training(**PLAIN), str(tmp_path))
    for one, two in zip(own, moved, strict=True):
        assert (one.direct, two.direct) == (False, True)
        assert compare(one.state, two.state)[1] == []


@pytest.mark.parametrize("config", [{}, {"checkpoint": {"universal": False}}, {"checkpoint": {}}], ids=str)
def test_without_the_flag(config: dict[str, Any], sources: Any, ucp_worlds: WorldPool) -> None:
    case = Case(1, 2, config=config)
    folder = str(sources.get(Case(1, 2), **PLAIN).folder)
    for answer in ucp_worlds.get(2).run(engine_ranks.watch_own_load, case.training(**PLAIN), folder):
        told = [answer[key] for key in ("calls", "info", "changes", "direct", "reason")]
        assert told == [1, [], [], None, ""]


def test_install_twice_and_uninstall(ucp_worlds: WorldPool) -> None:
    assert ucp_worlds.get(2).run(engine_ranks.install_twice_and_uninstall) == [[True] * 4] * 2


def test_engines_with_and_without_in_one_process(sources: Any, ucp_worlds: WorldPool) -> None:
    folder = str(sources.get(Case(1, 3), **PLAIN).folder)
    on, off = Case(1, 2, config=ON), Case(1, 2)
    for answer in ucp_worlds.get(2).run(engine_ranks.two_engines, on.ds_config, off.ds_config, folder):
        assert answer["differences"] == []
        assert "world size" in answer["error"]
        assert not hasattr(Exception, "add_note") or "imported but off for this engine" in answer["error"]
        assert answer["reports"] == [True, None]


@pytest.mark.parametrize(
    ("dp", "sizes", "expected"),
    [
        (2, {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}, (12, 3, 2)),
        (
            3,
            {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
            (12, 2, 2),
        ),
        (2, {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3}, (12, 3, 2)),
    ],
)
def test_preserve_batch_size(
    dp: int, sizes: dict[str, int], expected: tuple[int, int, int], ucp_worlds: WorldPool
) -> None:
    config = Case(1, dp, config={"checkpoint": {"universal": {"preserve_batch_size": True}}}).ds_config
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        del config[key]
    assert ucp_worlds.get(dp).run(engine_ranks.batch_sizes, {**config, **sizes}) == [expected] * dp
