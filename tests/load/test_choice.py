"""Choice of the loader: DeepSpeed's in an unchanged topology, unless the engine or its files differ."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.engine.coverage import UnknownLayoutError
from deepspeed_ucp.engine.known import _list_other_frozen
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.load import choice
from deepspeed_ucp.load.choice import choose_loader, find_damage, find_own_differences, list_other_orders
from tests.plan.matching import make_index
from tests.support.damage import flip
from tests.support.direct import STATES, UpstreamEngine, change_file, make_job
from tests.support.ranks import World, run_ranks
from tests.support.reshard import FakeTarget, open_for, take_a_step
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (7, 13)), Param("frozen", (4, 3), frozen=True)))


def test_files_that_deepspeeds_load_misreads_choose_the_direct_load(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1))
    files = {file: torch.load(file, weights_only=False) for file in path.glob("*_states.pt")}
    target = FakeTarget(MODEL, Topology(1), 0)
    for config in ({"checkpoint": {"writer": {"type": "fast"}}}, {"datastates_ckpt": {"host_cache_size": 1}}, {}):
        for file, tree in files.items():
            torch.save({**tree, "ds_config": {**tree["ds_config"], **config}}, file)
        assert len(open_for(path, target).unnoticed) == bool(config)
    shutil.copy(path / STATES, path / "mp_rank_01_model_states.pt")
    assert "of an earlier save" in open_for(path, target).unnoticed[0]


OPEN = (
    "The checkpoint does not record whether the saved run's Adam decoupled its weight decay (0.01), as AdamW does; "
    "this run's Adam does not. Use the same kind of Adam as the saved run."
)
"""For groups of torch before 2.7."""


MIXED = "optimizer states in another dtype than the masters (exp_avg in bfloat16, masters in float32)"
"""Torch's ``load_state_dict``, which DeepSpeed calls, casts them to the masters' dtype."""


@pytest.mark.parametrize(
    ("optimizer", "dtype", "expected"),
    [
        (partial(torch.optim.AdamW, amsgrad=True), torch.float32,
         ["optimizer states exp_avg, exp_avg_sq → exp_avg, exp_avg_sq, max_exp_avg_sq"]),
        (torch.optim.SGD, torch.float32, ["optimizer states exp_avg, exp_avg_sq → none"]),
        (torch.optim.RMSprop, torch.float32, ["optimizer states exp_avg, exp_avg_sq → square_avg"]),
        (torch.optim.AdamW, torch.float32, []),
        (torch.optim.AdamW, torch.bfloat16, [MIXED]),
        (torch.optim.Adam, torch.float32, [OPEN]),  # the direct load reports it
        (torch.optim.RAdam, torch.float32,
         ["the saved param groups are like those of Adam, this run's optimizer is RAdam"]),
    ],
)  # fmt: skip
def test_other_optimizer_states_or_rules_are_differences(
    optimizer: Any, dtype: torch.dtype, expected: list[str], tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1))
    (file,) = path.glob("*optim_states.pt")

    def convert(tree: dict[str, Any]) -> None:
        for state in tree["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["exp_avg"] = state["exp_avg"].to(dtype)

    change_file(file, convert)
    target = FakeTarget(MODEL, Topology(1), 0, optimizer)
    assert list(target.list_optimizer_changes(open_for(path, target))) == expected


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="torch 2.5")
def test_adafactors_one_row_state_does_not_count_as_another_optimizer(tmp_path: Path) -> None:
    """The row state of a matrix with one row has one element, like a step."""
    model, topology = Model((Param("token", (1, 3)), Param("a", (4, 3)))), Topology(0)
    path = write_checkpoint(tmp_path, model, random_state(model, 0), topology)
    optimizer = torch.optim.Adafactor([torch.nn.Parameter(torch.ones(param.shape)) for param in model.params])
    take_a_step(optimizer)
    change_file(path / STATES, lambda tree: tree.update(optimizer=optimizer.state_dict()))
    target = FakeTarget(model, topology, 0, torch.optim.Adafactor)
    assert list(target.list_optimizer_changes(open_for(path, target))) == []


def test_frozen_parameters_of_another_shape_or_saved_trainable_are_differences(tmp_path: Path) -> None:
    """DeepSpeed's load only compares the sizes of ZeRO 3's frozen parameters."""
    topology = Topology(3)
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), topology)
    index = open_for(path, FakeTarget(MODEL, topology, 0))
    for params, expected in (
        (MODEL.params, []),
        ((MODEL.params[0], Param("frozen", (3, 4), frozen=True)), ["frozen, which was saved in another shape"]),
        (
            (Param("a", (7, 13), frozen=True), Param("frozen", (4, 3))),
            ["a, which was not saved as a parameter without optimizer"],
        ),
    ):
        assert list(_list_other_frozen(FakeTarget(Model(params), topology, 0), index)) == expected


def test_another_order_of_elements_in_equal_shards_is_a_difference() -> None:
    """DeepSpeed's load does not reorder shards: halves of the whole, or halves of two sub-parameters."""
    index = make_index({"w": (4, 3), "v": (4,)}, tp=2)
    halves, parts = ({key: ["w"]} for key in ("vocabulary_parameter_patterns", "parameter_with_2_sub_params_cat_dim_0"))

    def ask(live: Any, saved: Any = halves, tp: int = 2, **config: Any) -> list[str]:
        engine = UpstreamEngine()
        engine.module = SimpleNamespace(universal_checkpoint_info=live)
        target: Any = SimpleNamespace(engine=engine, parallel=SimpleNamespace(tp=tp), params=dict.fromkeys(("w", "v")))
        found = replace(index, hints={"universal_checkpoint_info": saved} if saved else {})
        return list_other_orders(make_job(engine, Comm(), **config), target, found)

    assert ask(parts) == ask(halves, parts) == ["another order of elements in w"]
    assert ask(parts, {**halves, "ds_autoep_layers": []}) == ["another order of elements in w"]
    alike = [ask(halves), ask(halves, {**halves, "other": 1}), ask(None), ask(parts, tp=1), ask(parts, None)]
    alike.append(ask(parts, patterns=[{"match": "w", "pattern": "shard-v"}]))
    alike.append(ask(parts, {"affine_map": {"version": 9}}))
    assert alike == [[]] * len(alike)


def test_element_orders_are_compared_only_without_other_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = mock.Mock(return_value=["another order"])
    monkeypatch.setattr(choice, "list_other_orders", compare)
    monkeypatch.setattr(choice, "list_unknown", lambda *_: [])
    target: Any = SimpleNamespace(list_optimizer_changes=lambda _index: [])
    for options in ({}, {"param_groups": "live"}):
        assert choice.list_unproven(make_job(UpstreamEngine(), Comm(), **options), target, make_index({"w": (4, 3)}))
        assert compare.call_count == 1


def test_a_class_unknown_to_one_rank_is_refused_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class is known to be harmless only if its module is imported."""
    path = write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1))
    target = FakeTarget(MODEL, Topology(1), 0)
    index, ranks = open_for(path, target), iter([0, 1])
    survey = SimpleNamespace(require=lambda: index, extensions=(), log_warnings=lambda: None)

    def check(_: object) -> None:
        if next(ranks):
            raise UnsupportedError("holds objects")

    for name, result in {
        "survey_checkpoint": survey, "_list_differences": [], "_list_elsewhere": [], "list_unproven": [],
        "list_changes": [], "list_scaling_changes": [],
    }.items():  # fmt: skip
        monkeypatch.setattr(choice, name, lambda *_, result=result, **__: result)
    monkeypatch.setattr(choice, "check_trusted", check)
    engine = SimpleNamespace(train_batch_size=lambda: 4, lr_scheduler=None)

    def compare(_: int, comm: Comm) -> object:
        return choice._compare(make_job(engine, comm), str(path), (), target, Naming([], []), ())

    assert [type(each) for each in World(2).run(compare)] == [UnsupportedError] * 2


# -- engines that only DeepSpeed's load supports -----------------------------------------------------------------------


@pytest.fixture
def uncovered(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = mock.Mock(side_effect=UnknownLayoutError("the engine is of the future"))
    monkeypatch.setattr("deepspeed_ucp.load.choice.open_target", refuse)


def test_deepspeed_loads_node_local_files_after_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, folder, target = make_job(NodeLocalEngine(), Comm()), str(tmp_path), object()
    unknown, known = ["Muon's momentum"], "DeepSpeed's own load is not known to be right with: "
    monkeypatch.setattr("deepspeed_ucp.load.choice.list_unknown", lambda _target, _index: unknown)
    assert "is missing" in find_own_differences(job, folder, target)[-1]  # type: ignore[arg-type]
    torch.save(EMPTY_STATES, tmp_path / STATES)
    assert find_own_differences(job, folder, target) == [f"{known}Muon's momentum"]  # type: ignore[arg-type]
    unknown.clear()
    live = make_job(NodeLocalEngine(), Comm(), param_groups="live")
    weights = replace(live, load_module_only=True)
    for each, held, doubts in (
        (live, target, [f'{known}"param_groups" is "live"']),
        (live, None, [f'{known}"param_groups" is "live"']),
        (weights, target, [f"{known}load_module_only"]),
        (weights, None, []),
    ):
        assert find_own_differences(each, folder, held) == doubts  # type: ignore[arg-type]
    os.truncate(tmp_path / STATES, 100)
    assert "truncated or damaged" in find_own_differences(job, folder, target)[0]  # type: ignore[arg-type]
    torch.save(EMPTY_STATES, tmp_path / STATES)
    monkeypatch.setattr("deepspeed_ucp.load.choice.inspect_engine", lambda _job: (target, None))
    assert choose_loader(make_job(NodeLocalEngine(), Comm()), str(tmp_path))[1:] == (target, None)


def test_node_local_files_with_other_metadata_load_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the shapes of all ranks, and compares the orders of their elements."""
    monkeypatch.setattr("deepspeed_ucp.load.choice.list_unknown", lambda _target, _index: [])
    info, target, found = {"vocabulary_parameter_patterns": ["weight"]}, object(), []
    other = {"tp_replicated_parameter_patterns": ["weight"]}
    for saved, degree in ((info, 2), (other, 2), ({}, 2), ({**info, "ds_autoep_layers": []}, 2), (other, 1)):
        engine = NodeLocalEngine()
        engine.mp_world_size = degree
        engine.module.universal_checkpoint_info = info
        tree = {**EMPTY_STATES, "mp_world_size": degree, "universal_checkpoint_info": saved}
        torch.save(tree, tmp_path / STATES)
        found.append(find_own_differences(make_job(engine, Comm()), str(tmp_path), target))  # type: ignore[arg-type]
    assert found == [[], ["another universal_checkpoint_info"], [], [], []]


@pytest.mark.parametrize("number", [0, -1])
def test_find_damage_checks_the_files_that_deepspeed_reads(number: int, tmp_path: Path) -> None:
    """DeepSpeed reads the first place, even if another one is nearer, and torch.load compares no checksums."""
    model = Model((Param("a", (3, 5)),))
    for name in ("first", "near"):
        write_checkpoint(tmp_path / name, model, random_state(model, 0), Topology(1, 2), tag="tag")
    index = open_checkpoint(str(tmp_path / "first/tag"), Comm())
    record = index.records[number]
    path = Path(index.files[index.records.files[number]].path)
    near = str(tmp_path / "near/tag" / path.name)
    files = [replace(file, places=(near, file.path)) if file.path == str(path) else file for file in index.files]
    index = replace(index, files=tuple(files))
    flip(Path(near), record.offset, 3)
    assert run_ranks(2, lambda _, comm: find_damage(index, comm, has_others=True)) == [[], []]
    flip(path, record.offset, 3)
    for (text,) in run_ranks(2, lambda _, comm: find_damage(index, comm, has_others=True)):
        assert f"{path}: the" in text
    with pytest.raises(CheckpointError, match="the file is damaged"):
        run_ranks(2, lambda _, comm: find_damage(index, comm, has_others=False))


class Harmful:
    def __setstate__(self, state: object) -> None:
        raise AssertionError("code of a checkpoint ran")


class NodeLocalEngine:
    """The part of a stage-0 engine with node-local storage that is compared with its files."""

    optimizer = None
    has_moe_layers = False
    mp_world_size = 1
    num_experts: tuple[int, ...] = ()
    use_node_local_storage = staticmethod(lambda: True)
    bfloat16_enabled = fp16_enabled = zero_elastic_checkpoint = staticmethod(lambda: False)
    zero_optimization_stage = staticmethod(lambda: 0)

    def __init__(self, upstream: bool = False) -> None:
        self.load_universal_checkpoint = lambda: upstream
        self.module = torch.nn.Linear(2, 2)
        self._config = SimpleNamespace(
            _param_dict={}, zero_config=SimpleNamespace(offload_optimizer=None, offload_param=None)
        )

    def _get_ckpt_name(self, folder: str, tag: str) -> str:
        return f"{folder}/{tag}/{STATES}"


EMPTY_STATES = {"ds_config": {}, "mp_world_size": 1}


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize(
    ("name", "upstream"),
    [
        (STATES, False),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", False),
        (STATES, True),
        ("zero/optimizer_state.pt", True),
        ("zero/layer.weight/fp32.pt", True),
    ],
)
def test_code_in_files_that_only_deepspeed_reads_is_refused(name: str, upstream: bool, tmp_path: Path) -> None:
    (tmp_path / "zero" / "layer.weight").mkdir(parents=True)
    torch.save(EMPTY_STATES, tmp_path / STATES)
    torch.save({**EMPTY_STATES, "client": Harmful()}, tmp_path / name)
    torch.save({"client": Harmful()}, tmp_path / "of_the_user.pt")

    def choose(comm: Comm, **options: bool) -> str:
        chosen, *rest = choose_loader(make_job(NodeLocalEngine(upstream), comm, **options), str(tmp_path))
        assert rest == [None, None] and "the engine is of the future" in chosen
        return chosen

    reason = "load_universal is on" if upstream else "own files"
    for ranks in (1, 2):
        with pytest.raises(UnsupportedError, match=rf"{name}: holds objects that are not unpickled.*Harmful"):
            run_ranks(ranks, lambda _, comm: choose(comm))
    assert reason in choose(Comm(), trust_pickle=True)
    torch.save(EMPTY_STATES, tmp_path / name)
    assert reason in choose(Comm())


@pytest.mark.usefixtures("uncovered")
@pytest.mark.parametrize("folder", ["s3://bucket/run", ""])
def test_an_error_of_all_ranks_is_printed_by_rank_0_only(folder: str, tmp_path: Path) -> None:
    torch.save({**EMPTY_STATES, "mp_world_size": 2}, tmp_path / STATES)
    found = World(2).run(lambda _, comm: choose_loader(make_job(NodeLocalEngine(), comm), folder or str(tmp_path)))
    assert [(type(each), each.shared, each.echo) for each in found] == [
        (UnsupportedError, True, False),
        (UnsupportedError, True, True),
    ]


@pytest.mark.usefixtures("uncovered")
def test_code_in_the_files_of_one_node_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Two containers of one machine with separate folders."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        torch.save(EMPTY_STATES, tmp_path / str(rank) / STATES)
    torch.save({}, tmp_path / "0" / "layer_1_expert_0_mp_rank_00_model_states.pt")
    torch.save({**EMPTY_STATES, "client": Harmful()}, tmp_path / "0" / STATES)
    with pytest.raises(UnsupportedError, match=f"{STATES}.*Harmful"):
        run_ranks(2, lambda rank, comm: choose_loader(make_job(NodeLocalEngine(), comm), str(tmp_path / str(rank))))
