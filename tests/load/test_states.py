"""The live optimizer compared with the saved one, and saves without files of optimizer states."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW, NAdam

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.convert import ConvertOptions, convert_index
from deepspeed_ucp.errors import CheckpointError, MismatchError
from deepspeed_ucp.examine.degrees import parse_degrees
from deepspeed_ucp.examine.resume import check_resume
from deepspeed_ucp.examine.verify import list_findings
from deepspeed_ucp.export.dcp import export_dcp
from deepspeed_ucp.export.safetensors import export_safetensors
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.open import open_checkpoint, survey_checkpoint
from deepspeed_ucp.load.prepare import describe_rounding
from deepspeed_ucp.model.flat import join_parameters
from deepspeed_ucp.model.storage import MASTER, MODULE
from deepspeed_ucp.model.view import EngineBuffer, EngineView
from deepspeed_ucp.plan.wants import Wants
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.support.direct import Eager, check_loaded, check_untouched, run_load
from tests.support.reshard import FakeTarget, Loaded, Options, load, open_for, prepare_rank, take_a_step
from tests.support.reshard3d import draw_state, load_all, make_config, make_pipeline
from tests.synth import Model, Param, Run, State, Topology, build_files, random_state, write_checkpoint, write_files

MODEL = Model((Param("a", (7, 3)), Param("b", (5,), group=1), Param("c", (4,))))

Files = dict[str, dict[str, Any]]


def make_files(model: Model = MODEL, topology: Topology | None = None) -> Files:
    return build_files(model, random_state(model, 0), topology or Topology(2, 2), Run())


def prepare(folder: Path, files: Files, live: Model = MODEL, optimizer: Any = AdamW, **options: Any) -> Loaded:
    target = FakeTarget(live, Topology(1), 0, optimizer)
    write_files(folder, files)
    return prepare_rank(open_for(folder, target), target, Comm(), Options(**options))


def test_an_optimizer_state_that_saved_hyper_parameters_disable_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="keeps max_exp_avg_sq by its hyper-parameters.*would switch that off"):
        prepare(tmp_path, make_files(), optimizer=partial(AdamW, amsgrad=True))


def change_groups(files: Files, **fields: Any) -> Files:
    for name, tree in files.items():
        if "optim_states" in name:
            for group in tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
                group.update(fields)
    return files


class Old(AdamW):
    """AdamW as in torch before 2.7."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            del group["decoupled_weight_decay"]


RULES: dict[str, tuple[Any, dict[str, Any], str, str]] = {
    "NAdam": (NAdam, {}, "like those of Adam, this run's optimizer is NAdam", "needs mu_product of each parameter"),
    "RAdam": (torch.optim.RAdam, {}, "like those of Adam, this run's optimizer is RAdam", ""),
    "AdamW": (AdamW, {"decoupled_weight_decay": False}, "decoupled_weight_decay False → True", ""),
    "Adam": (torch.optim.Adam, {"decoupled_weight_decay": True}, "True → False .weight_decay 0.01", ""),
    "maximize": (AdamW, {"maximize": True}, "maximize True → False", ""),
    "amsgrad": (AdamW, {"amsgrad": True}, "amsgrad True → False", "this run's AdamW keeps exp_avg, exp_avg_sq. "),
    "the same": (AdamW, {"decoupled_weight_decay": True, "fused": True, "foreach": False}, "", ""),
    "older torch": (AdamW, {}, "", ""),
    "to older torch": (Old, {"decoupled_weight_decay": True}, "", ""),
    "no decay": (AdamW, {"decoupled_weight_decay": False, "weight_decay": 0.0}, "", ""),
}


@pytest.mark.parametrize("case", RULES)
def test_another_update_rule_is_refused_unless_the_live_groups_are_kept(case: str, tmp_path: Path) -> None:
    optimizer, saved, refused, refused_live = RULES[case]
    states = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if "amsgrad" in saved else []))
    files = change_groups(build_files(MODEL, random_state(MODEL, 0, states), Topology(2, 2), Run()), **saved)
    live = UniversalConfig(threads=1, param_groups="live")
    for folder, expected, options in (("saved", refused, {}), ("live", refused_live, {"config": live})):
        if not expected:
            prepare(tmp_path / folder, files, optimizer=optimizer, **options)
            continue
        with pytest.raises(MismatchError, match="load_optimizer_states=False") as error:
            prepare(tmp_path / folder, files, optimizer=optimizer, **options)
        assert re.search(expected, str(error.value))
        assert ('"param_groups": "live"' in str(error.value)) is (folder == "saved")


@pytest.mark.parametrize("value", [torch.arange(5.0), [torch.arange(3), torch.arange(2)]], ids=["tensor", "list"])
def test_tensors_in_param_groups_are_refused_by_name(value: Any, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="keeps tensors in its param groups: ema"):
        prepare(tmp_path, change_groups(make_files(), ema=value))


@pytest.mark.parametrize("value", [torch.relu_, [torch.float32], (torch.float32, 1), {"kept": torch.float32}])
def test_param_group_values_that_are_not_numbers_are_ignored(value: Any, tmp_path: Path) -> None:
    prepare(tmp_path, change_groups(make_files(), hook=value))


class Counting(AdamW):
    """AdamW with its step count in the param groups, like DeepSpeed's FusedAdam."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[param].setdefault(name, torch.zeros_like(param))


@pytest.mark.parametrize("live", [Topology(1), Topology(0)], ids=lambda t: t.label)
@pytest.mark.parametrize(("optimizer", "step"), [(AdamW, 3), (Counting, 3), (Counting, 0)])
def test_new_parameters_start_at_the_step_of_their_group_if_it_is_shared(
    optimizer: Any, step: int, live: Topology, tmp_path: Path
) -> None:
    """At stage 0 each parameter has a separate step count, unless the param group holds it."""
    counts = optimizer is Counting
    files = build_files(MODEL, random_state(MODEL, 0, step=None if counts else step), Topology(2, 2), Run())
    write_files(tmp_path, change_groups(files, step=step) if counts else files)
    target = FakeTarget(Model((*MODEL.params, Param("new", (3,)))), live, 0, optimizer)
    rank = prepare_rank(open_for(tmp_path, target), target, Comm(), Options(strict=False))
    notes = [note for note in rank.fill_plan.match.notes if "new or thawed" in note]
    assert [note.split(":")[0] for note in notes] == ["new"] * bool(step if counts else live.stage)


def test_a_thawed_parameter_restores_its_weight_and_has_new_states(tmp_path: Path) -> None:
    saved = Model((Param("a", (7, 3)), Param("b", (5,), frozen=True)))
    live = Model((Param("a", (7, 3)), Param("b", (5,))))
    state = random_state(saved, 0)
    path = write_checkpoint(tmp_path, saved, state, Topology(2, 2))
    target = FakeTarget(live, Topology(1), 0)
    (rank,) = load(open_for(path, target), [target])
    (flat,) = target.flats
    assert flat.data[:21].equal(state.atoms["a"]["fp32"].reshape(-1))
    assert flat.data[21:26].equal(state.atoms["b"]["fp32"].reshape(-1))
    assert not target.wrapped.state[flat.tensor]["exp_avg"][21:].any()
    assert [note.split(":")[0] for note in rank.fill_plan.match.notes] == [
        "b is trained here and was not trained in the saved run",
        "b",
    ]


@pytest.mark.parametrize("topology", [Topology(0), Topology(1), Topology(3)], ids=lambda t: t.label)
@pytest.mark.parametrize("optimizer", [AdamW, torch.optim.Adagrad, Eager])
def test_a_separate_thawed_group_restarts_in_a_used_engine(optimizer: Any, topology: Topology, tmp_path: Path) -> None:
    """Its next step equals that of a fresh engine, even if the optimizer creates states only at construction."""
    keys = ("exp_avg", "exp_avg_sq") if optimizer is AdamW else ("sum",)
    saved = Model((Param("a", (7, 3)), Param("b", (5,), None, frozen=True)))
    live = Model((Param("a", (7, 3)), Param("b", (5,), 1)))
    state = random_state(saved, 0, keys, step=None if optimizer is Eager else 3)
    given = optimizer([torch.zeros(1)], lr=0.01).param_groups[0]
    state = replace(state, groups=({key: value for key, value in given.items() if key != "params"},))
    path = write_checkpoint(tmp_path, saved, state, Topology(2, 2))
    stepped = []
    for trained in (False, True):
        target = FakeTarget(live, topology, 0, optimizer)
        if trained:
            take_a_step(target.wrapped)
        load(open_for(path, target), [target])
        take_a_step(target.wrapped)
        stepped.append([(flat.data.detach(), target.wrapped.state[flat.tensor]) for flat in target.flats])
    for (fresh, states), (loaded, again) in zip(*stepped, strict=True):
        assert loaded.equal(fresh)
        assert {key: torch.as_tensor(each).tolist() for key, each in again.items()} == {
            key: torch.as_tensor(each).tolist() for key, each in states.items()
        }


class Closed(AdamW):
    """An optimizer whose step cannot be probed, like LBFGS."""

    def step(self, closure: Any = None) -> None:
        closure()


NO_STATES = "the saved optimizer kept no states"
FRESH = {"states": (), "step": None}
NOTES: list[tuple[Any, dict[str, Any], Model, list[str]]] = [
    (Closed, {}, MODEL, [r"\(exp_avg, exp_avg_sq\) are restored without a comparison"]),
    (AdamW, {}, Model(MODEL.params, {"inv_freq": torch.ones(3)}),
     ["^inv_freq: a buffer that the saved state dict leaves out"]),
    (torch.optim.SGD, FRESH, MODEL, []),
    *((each, FRESH, MODEL, [NO_STATES]) for each in (AdamW, torch.optim.Adagrad)),
    (torch.optim.Adafactor, FRESH, MODEL, [NO_STATES, "depends on how ZeRO cuts"]),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "saved", "live", "texts"), NOTES)
def test_states_that_a_load_cannot_compare_or_restore_are_reported(
    optimizer: Any, saved: dict[str, Any], live: Model, texts: list[str], tmp_path: Path
) -> None:
    files = build_files(MODEL, random_state(MODEL, 0, **saved), Topology(2, 2), Run())
    files["mp_rank_00_model_states.pt"]["buffer_names"] = list(live.buffers)
    notes = prepare(tmp_path, files, live, optimizer).fill_plan.match.notes
    assert all(re.search(text, note) for text, note in zip(texts, notes, strict=True))


def test_param_groups_live_restores_states_but_not_hyper_parameters(tmp_path: Path) -> None:
    """The saved run had all parameters in one group, like Megatron-DeepSpeed at ZeRO 3."""
    one = Model(tuple(Param(param.name, param.shape) for param in MODEL.params))
    files = make_files(one, Topology(3, 2))
    with pytest.raises(MismatchError, match='"param_groups": "live"'):
        prepare(tmp_path / "saved", files)
    rank = prepare(tmp_path / "live", files, config=UniversalConfig(threads=1, param_groups="live"))
    assert [sorted(states.tensors) for states in rank.fill_plan.states] == [["exp_avg", "exp_avg_sq"]] * 2
    assert all("lr" not in hyper for hyper in rank.fill_plan.match.hyper.values())


@pytest.mark.parametrize(
    ("state", "stored", "dtype", "text"),
    [
        ("fp32", "float32", "bfloat16", "fp32 is rounded from float32 to bfloat16"),
        ("exp_avg", "float16", "bfloat16", "exp_avg is rounded from float16 to bfloat16"),
        ("exp_avg", "bfloat16", "float16", "exp_avg is rounded from bfloat16 to float16"),
        ("exp_avg", "bfloat16", "float32", ""),
        ("module", "float32", "bfloat16", "x: rounded from float32 to bfloat16"),
        ("module", "int64", "int32", "x: rounded from int64 to int32"),
        ("module", "int8", "uint8", "x: rounded from int8 to uint8"),
        ("module", "bfloat16", "float32", ""),
        ("module", "int32", "int64", ""),
        ("module", "float32", "int64", "module of float32 in the checkpoint is int64 here"),
        ("fp32", "int8", "float32", "fp32 of int8 in the checkpoint is float32 here"),
        ("fp32", "float8_e4m3fn", "float32", "fp32 of float8_e4m3fn in the checkpoint is float32 here"),
    ],
)
def test_states_stored_in_a_lower_precision_are_reported(state: str, stored: str, dtype: str, text: str) -> None:
    is_weight = state in (MASTER, MODULE)
    buffer = join_parameters(0, ("x",), ((4,),))
    held = EngineBuffer(buffer, 0, 0, dtype if is_weight else stored, {} if is_weight else {state: dtype})
    view = EngineView(extras=[held]) if state == MODULE else EngineView(flats=[held])
    wants = Wants([(state, 0)], [(0, stored)])
    notes = describe_rounding(wants, view)
    assert len(notes) == bool(text)
    assert "".join(notes).startswith(text)


# -- saves without files of optimizer states --------------------------------------------------------------------------


WEIGHTS = Model((Param("a", (7, 13)), Param("b", (5, 7), group=1), Param("frozen", (9,), frozen=True)))


def lose(folder: Path, topology: Topology) -> tuple[Path, State]:
    """Write a save without files of optimizer states; for stage 0 in bf16 as DeepSpeed 0.17.6 writes it."""
    state = random_state(WEIGHTS, 0, precision=topology.precision)
    files = build_files(WEIGHTS, state, topology)
    if topology.stage == 0:
        zero = build_files(WEIGHTS, state, Topology(1, topology.dp, topology.precision))
        for name, tree in files.items():
            tree.update(optimizer=None, param_shapes=zero[name]["param_shapes"])
    write_files(folder, {name: tree for name, tree in files.items() if "optim_states" not in name})
    return folder, state


LOST = [Topology(1, 3), Topology(2, 2, "bf16"), Topology(0, 2, "bf16", "fused")]


@pytest.mark.parametrize("source", LOST, ids=lambda each: each.label)
@pytest.mark.parametrize("target", [None, Topology(3), Topology(0)], ids=["same", "zero3", "stage0"])
def test_weights_load_without_optimizer_files_only_on_request(
    source: Topology, target: Topology | None, tmp_path: Path
) -> None:
    path, state = lose(tmp_path, source)
    rank = FakeTarget(WEIGHTS, target or source, 0)
    prefix = "bf16_" if source.precision == "bf16" else ""
    missing = f"{prefix}zero_pp_rank_{{0-{source.dp - 1}}}_mp_rank_00_optim_states.pt missing"
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"^.*load_optimizer_states=False.*$") as error:
            run_load(open_for(path, rank), rank, load_module_strict=strict)
        assert ("DeepSpeed 0.17.6 to 0.18.4 do not write them" if source.stage == 0 else missing) in str(error.value)
        assert len(str(error.value).splitlines()) == 1
        check_untouched(rank)
    run_load(open_for(path, rank), rank, load_optimizer_states=False)
    weights = {name: {"fp32": atoms["fp32"].to(source.dtype).float()} for name, atoms in state.atoms.items()}
    check_loaded([rank], State(weights, {}, ()))


def test_states_that_older_releases_never_wrote_are_not_reported_as_missing_files(tmp_path: Path) -> None:
    """DeepSpeed 0.17.6 to 0.18.4 use FP16_UnfusedOptimizer for bf16 with fp32 gradients, at ZeRO 1."""
    topology = Topology(1, 2, "bf16")
    tree = build_files(WEIGHTS, random_state(WEIGHTS, 0, precision="bf16"), topology)["mp_rank_00_model_states.pt"]
    tree["ds_config"]["data_types"] = {"grad_accum_dtype": "fp32"}
    write_files(tmp_path, {"mp_rank_00_model_states.pt": tree})
    rank = FakeTarget(WEIGHTS, topology, 0)
    with pytest.raises(CheckpointError, match=r"do not write them .* or with fp32 gradients"):
        run_load(open_for(tmp_path, rank), rank)


@pytest.mark.parametrize("source", LOST, ids=lambda each: each.label)
def test_commands_report_missing_optimizer_files(source: Topology, tmp_path: Path) -> None:
    """They report neither a save without ZeRO nor a complete one."""
    path, _ = lose(tmp_path / "in", source)
    report = survey_checkpoint(str(path), Comm())
    index = report.require()
    assert index.topology.describe().startswith(f"ZeRO-{source.stage} ")
    assert index.topology.describe().endswith("(optimizer states missing)")
    assert any("load_optimizer_states=False" in each.text for each in list_findings(report))
    check = check_resume(index, parse_degrees("dp=3", index.topology))
    assert any("load_optimizer_states=False" in text for text in check.obstacles)
    out = str(tmp_path / "out")
    with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
        convert_index(index, str(path), out, Comm(), ConvertOptions())
    with pytest.raises(Exception, match="--weights-only"):
        export_dcp(index, out, Comm(), ExportOptions())
    assert export_safetensors(index, out, Comm(), ExportOptions()).tensors == 3


def test_a_save_of_a_run_without_optimizer_loads_weights_only(tmp_path: Path) -> None:
    """For example, a save of an evaluation: no file is missing, but training cannot continue from it."""
    files = build_files(WEIGHTS, random_state(WEIGHTS, 0), Topology(0))
    for tree in files.values():
        tree["optimizer"] = None
    write_files(tmp_path, files)
    rank = FakeTarget(WEIGHTS, Topology(1), 0)
    index = open_for(tmp_path, rank)
    assert index.topology.describe() == "ZeRO-0 float32 (none)"
    with pytest.raises(CheckpointError, match=r"had no optimizer.*load_optimizer_states=False"):
        run_load(index, rank, load_module_strict=False)
    run_load(index, rank, load_optimizer_states=False)


TIED = make_pipeline([["column", "norm"], ["row"]])


@pytest.mark.parametrize("files", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize(
    "source", [Topology(1, 2, pp=2), Topology(1, 1, "bf16", "bf16", pp=2, tp=2)], ids=lambda each: each.label
)
def test_tied_modules_load_without_optimizer_files(source: Topology, files: tuple[bool, bool], tmp_path: Path) -> None:
    """DeepSpeed ties only the embedding's weight. A stage without a file gets other weights from another stage."""
    first, *others, last = TIED.layers
    model = replace(TIED, layers=(replace(first, file=files[0]), *others, replace(last, file=files[1])))
    held = draw_state(model, source)
    held.write(tmp_path)
    for path in tmp_path.glob("*optim_states.pt"):
        path.unlink()
    config, targets = make_config(model), held.make_targets()
    index, _ = load_all(tmp_path, targets, config, with_states=False)
    assert index.stateless
    for parallel, flat in ((rank.parallel, flat) for rank in targets for flat in rank.flats):
        for cut in flat.buffer.cuts(flat.part):
            stage = parallel.pp_rank if all(files) or "positions" not in cut.name else files.index(True)
            local = held.locals[stage * parallel.tp + parallel.tp_rank]
            weight = local.state.atoms[cut.name]["fp32"].to(source.dtype).float().reshape(-1)
            assert flat.data[cut.offset : cut.offset + cut.numel].equal(weight[cut.start :][: cut.numel])
    again = held.make_targets()
    with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
        load_all(tmp_path, again, config, strict=False)
    rules = from_config(config.patterns)
    assert export_safetensors(index, f"{tmp_path}-out", Comm(), ExportOptions(), rules=rules).tensors == 7


@pytest.mark.parametrize("source", [*LOST[:2], Topology(3, 2)], ids=lambda each: each.label)
def test_weights_load_if_a_file_of_optimizer_states_is_missing_except_under_zero_3(
    source: Topology, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A load with states is refused."""
    write_files(tmp_path, build_files(WEIGHTS, random_state(WEIGHTS, 0, precision=source.precision), source))
    next(tmp_path.glob("*zero_pp_rank_1_*optim_states.pt")).unlink()
    for weights_only in (False, True)[: 1 + (source.stage == 3)]:
        with pytest.raises(CheckpointError, match="optim_states.pt is missing"):
            open_checkpoint(str(tmp_path), Comm(), Naming(weights_only=weights_only))
        assert not caplog.records
    if source.stage < 3:
        index = open_checkpoint(str(tmp_path), Comm(), Naming(weights_only=True))
        assert index.stateless and not index.find("a", "fp32") and index.find("a", "copy")
        assert "only weights are loaded" in caplog.text
