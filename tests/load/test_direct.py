"""The direct load as a whole: two passes, all or nothing, on every rank alike; the engine is a stand-in."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ucp.atoms import AtomicIndex, AtomKey
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import CheckpointError, MismatchError, RemoteError, StorageError, UnsupportedError
from deepspeed_ucp.io.threads import count_threads
from deepspeed_ucp.load import direct, exchange, transfer
from deepspeed_ucp.load.context import LoadArguments, LoadContext, LoadReport
from deepspeed_ucp.load.destinations import Buffer, Destinations
from deepspeed_ucp.load.direct import load_direct
from deepspeed_ucp.load.exchange import CollectiveReader
from deepspeed_ucp.load.prepare import Work
from deepspeed_ucp.load.transfer import Transfer, negotiate
from deepspeed_ucp.plan import LoadPlan, ReadSizes
from deepspeed_ucp.plan.rounds import BLOCK
from deepspeed_ucp.sources import open_checkpoint
from tests.load.test_reshard import AWKWARD, KINDS, flip, take_a_step
from tests.plan import planning
from tests.support.covering import cover, params
from tests.support.curriculum import make_sampler
from tests.support.held import without_collector
from tests.support.ranks import World, run_ranks
from tests.support.reshard import SENTINEL, FakeTarget, Loaded, check_content, groups_of, make_targets, open_for
from tests.synth import (
    Model,
    Param,
    Run,
    State,
    Topology,
    build_files,
    random_state,
    write_checkpoint,
    write_files,
)

ZERO1 = Topology(1, 3)
PLAIN = Model((Param("a", (7, 13)), Param("b", (5, 7), group=1), Param("frozen", (9,), frozen=True)))


class Scheduler:
    """An lr scheduler."""

    def __init__(self) -> None:
        self.loaded: Any = None

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


class Restored(Scheduler):
    """Of which code runs when a pickle restores it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class FakeEngine:
    """As much of an engine as the end of a load touches."""

    lr_scheduler: Any
    random_ltd_scheduler: Any = None
    training_dataloader: Any = None
    module = torch.nn.Module()

    def __init__(self, target: FakeTarget, steps: int = 0) -> None:
        self.optimizer, self.lr_scheduler = target.wrapped, Scheduler()
        self.global_steps, self.global_samples, self.skipped_steps = steps, 0, 0
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None

    def random_ltd_enabled(self) -> bool:
        return self.random_ltd_scheduler is not None

    def train_batch_size(self) -> int:
        return 4


def write(folder: Path, topology: Topology, model: Model = PLAIN, run: Run | None = None) -> tuple[Path, State]:
    state = random_state(model, 0, precision=topology.precision)
    return write_checkpoint(folder, model, state, topology, run=run or Run(garbage=float("nan"))), state


def start(folder: Path, source: Topology = ZERO1, run: Run | None = None) -> tuple[Path, State, FakeTarget]:
    """Write a checkpoint, and make the target of one rank under ZeRO 2."""
    path, state = write(folder, source, run=run)
    return path, state, FakeTarget(PLAIN, Topology(2), 0)


def run_load(
    index: AtomicIndex,
    target: FakeTarget,
    comm: Comm | None = None,
    config: UniversalConfig | None = None,
    module: torch.nn.Module | None = None,
    engine: FakeEngine | None = None,
    **arguments: Any,
) -> tuple[FakeEngine, LoadReport, dict[str, Any]]:
    engine, report = engine or FakeEngine(target), LoadReport(True, "test")
    engine.module = module or engine.module
    job = LoadContext(engine, comm or Comm(), config or UniversalConfig(), LoadArguments(**arguments), report)
    return engine, report, load_direct(job, index, target)


def check_loaded(targets: list[FakeTarget], state: State) -> None:
    work = Work(planning.make_index([]))
    check_content([Loaded(target, work, target.extras(), counted=False) for target in targets], state)


def have_memory(monkeypatch: pytest.MonkeyPatch, much: bool) -> None:
    """So that what nothing gives back is filled apart, or in a second pass."""
    monkeypatch.setattr(transfer, "measure_available", lambda: 1 << 40 if much else 0)


def check_untouched(target: FakeTarget, lr: float = 0.125) -> None:
    """No buffer, state or hyper-parameter has changed."""
    for flat in target.flats:
        assert flat.data.eq(SENTINEL).all()
    for extra in target.extras():
        if not extra.is_buffer:
            assert extra.data.eq(SENTINEL).all()
    assert not target.wrapped.state
    assert all(group["lr"] == lr for group in target.wrapped.param_groups)


# -- one rank ---------------------------------------------------------------------------------------------------------


ONE_RANK = [Topology(0), Topology(0, 1, "bf16", "fused"), Topology(2), Topology(3, 1, "bf16", sub_group_size=30)]


@pytest.mark.parametrize(
    ("source", "target", "verify"),
    params(
        cover(KINDS, ONE_RANK, ["crc", "off"]),
        product(KINDS, ONE_RANK, ["crc", "off"]),
        lambda row: f"{row[0].label}→{row[1].label}-{row[2]}",
    ),
)
def test_one_rank(source: Topology, target: Topology, verify: str, tmp_path: Path) -> None:
    path, state = write(tmp_path, source, AWKWARD)
    rank = FakeTarget(AWKWARD, target, 0)
    run_load(open_for(path, rank), rank, config=UniversalConfig(verify=verify))  # type: ignore[arg-type]
    check_loaded([rank], replace(state, groups=()) if source.keeps_lean_states else state)


@pytest.mark.parametrize("verify", ["crc", "off"])
def test_an_optimizer_with_live_states(verify: str, tmp_path: Path) -> None:
    path, state, rank = start(tmp_path)
    take_a_step(rank.wrapped)
    run_load(open_for(path, rank), rank, config=UniversalConfig(verify=verify))  # type: ignore[arg-type]
    check_loaded([rank], state)


@pytest.mark.parametrize("passes", [1, 2])
def test_the_report_counts_what_was_done(passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_memory(monkeypatch, passes == 1)
    path, _, rank = start(tmp_path)
    take_a_step(rank.wrapped)
    _, report, _ = run_load(open_for(path, rank), rank, engine=FakeEngine(rank, steps=1))
    numel = 7 * 13 + 5 * 7
    assert report.state_bytes == 4 * (3 * numel + 9)
    padding = 4 * 3 * ((-91 % 6) + (-35 % 6))
    assert report.state_bytes <= report.bytes_read <= report.state_bytes + padding
    assert 0 < report.bytes_again <= report.bytes_read if passes == 2 else report.bytes_again == 0
    assert report.requests > 0
    assert {"plan", "read", "verify", "fill", "finish"} <= set(report.phases)
    assert all(seconds >= 0 for seconds in report.phases.values())


def test_without_checks_every_byte_is_still_counted_once(tmp_path: Path) -> None:
    path, _, rank = start(tmp_path)
    _, report, _ = run_load(open_for(path, rank), rank, config=UniversalConfig(verify="off"))
    assert report.bytes_read >= report.state_bytes


def test_counters_scheduler_and_client_state_come_back(tmp_path: Path) -> None:
    run = Run(
        global_steps=12, global_samples=345, skipped_steps=2, lr_scheduler={"last": 11}, client_state={"epoch": 4}
    )
    path, _, rank = start(tmp_path, run=run)
    engine, _, client = run_load(open_for(path, rank), rank)
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (12, 345, 2)
    assert (engine.loaded_checkpoint_dp_world_size, engine.loaded_checkpoint_mp_world_size) == (3, 1)
    assert engine.lr_scheduler.loaded == {"last": 11}
    assert client["epoch"] == 4
    assert not {"module", "optimizer", "lr_scheduler", "global_steps"} & set(client)


def test_without_the_scheduler(tmp_path: Path) -> None:
    path, _, rank = start(tmp_path, run=Run(lr_scheduler={"last": 11}))
    engine, _, client = run_load(open_for(path, rank), rank, load_lr_scheduler_states=False)
    assert engine.lr_scheduler.loaded is None
    assert client["lr_scheduler"] == {"last": 11}


class Rates(Scheduler):
    """One of torch's, whose state holds the rates that it has set."""

    def load_state_dict(self, state: Any) -> None:
        self._last_lr = state["rates"]


class Cycle(Rates):
    """DeepSpeed's OneCycle, which sets betas too."""

    __module__ = "deepspeed.runtime.lr_schedules"

    def get_lr(self) -> Any:
        return self._last_lr

    def get_mom(self) -> Any:
        return [(rate, 0.5) for rate in self._last_lr]


@pytest.mark.parametrize(
    ("source", "kept", "grouped"),
    [
        (Topology(1, 3), "live", True),
        (Topology(1, 3, elastic=True), "saved", True),
        (Topology(1, 3), "saved", False),
        (Topology(1, 3), "saved", True),
    ],
    ids=["live", "elastic", "no groups", "saved"],
)
def test_groups_that_stay_the_live_ones_have_the_schedulers_rates(
    source: Topology, kept: Any, grouped: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which would set them after the first step only. Where the save has no hyper-parameters that is told."""
    path, state = write(tmp_path, source, run=Run(lr_scheduler={"rates": [0.5, 0.25]}))
    takes_saved = source == Topology(1, 3) and kept == "saved" and grouped
    for scheduler in (Rates(), Cycle(), None):
        rank = FakeTarget(PLAIN, Topology(2), 0)
        engine, index = FakeEngine(rank), open_for(path, rank)
        engine.lr_scheduler = scheduler
        index = index if grouped else index.change(groups=())
        live = [group["betas"] for group in rank.wrapped.param_groups]
        run_load(index, rank, config=UniversalConfig(param_groups=kept), engine=engine)
        groups = rank.wrapped.param_groups
        rates = [each["lr"] for each in state.groups] if takes_saved else [0.5, 0.25] if scheduler else [0.125] * 2
        assert [group["lr"] for group in groups] == rates
        if not takes_saved:
            cycled = [(0.5, 0.5), (0.25, 0.5)] if isinstance(scheduler, Cycle) else live
            assert [group["betas"] for group in groups] == cycled
    rank = FakeTarget(PLAIN, Topology(2), 0)
    leave = {"engine": FakeEngine(rank), "load_lr_scheduler_states": False}
    run_load(open_for(path, rank), rank, config=UniversalConfig(param_groups="live"), **leave)
    assert [group["lr"] for group in rank.wrapped.param_groups] == [0.125] * 2
    assert ("the saved param groups do not tell lr, betas" in caplog.text) is source.elastic


@pytest.mark.parametrize("kept", ["saved", "live"])
@pytest.mark.parametrize("owned", [True, False])
def test_edited_hyper_parameters_are_told_once(
    kept: Any, owned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With both values, and whose are taken; not a learning rate that a scheduler of this run sets."""
    path, _ = write(tmp_path, Topology(1, 3))

    def work(number: int, comm: Comm) -> None:
        rank = FakeTarget(PLAIN, Topology(2, 2), number, partial(torch.optim.AdamW, weight_decay=0.5))
        engine = FakeEngine(rank)
        engine.lr_scheduler = Rates() if owned else None
        config = UniversalConfig(param_groups=kept)
        run_load(open_for(path, rank, comm), rank, comm, engine=engine, config=config)

    with caplog.at_level(logging.WARNING, "deepspeed_ucp"):
        run_ranks(2, work)
    (told,) = [each for each in caplog.messages if "hyper-parameters" in each]
    assert "weight_decay 0.01 → 0.5" in told
    assert ("lr 0.001 → 0.125 (1 of 2 param groups)" in told) is not owned
    assert ("the saved ones are taken" if kept == "saved" else "this run's are kept") in told


@pytest.mark.parametrize("live", [True, False])
def test_what_only_one_side_has_is_told(live: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A schedule that begins anew, and a state that nothing takes; once, by the first rank."""
    held: dict[str, Any] = {} if live else {key: {"last": 11} for key in ("lr_scheduler", "random_ltd", "data_sampler")}
    path, _ = write(tmp_path, Topology(1, 3), run=Run(global_steps=12, **held))

    def work(number: int, comm: Comm) -> None:
        rank = FakeTarget(PLAIN, Topology(2, 2), number)
        engine = FakeEngine(rank)
        engine.lr_scheduler = engine.random_ltd_scheduler = Scheduler() if live else None
        engine.training_dataloader = SimpleNamespace(data_sampler=make_sampler(tmp_path, number)) if live else None
        run_load(open_for(path, rank, comm), rank, comm, engine=engine)
        leave = {"load_lr_scheduler_states": False}
        run_load(open_for(path, rank, comm), rank, comm, engine=FakeEngine(rank), **leave)  # asked for: not told

    with caplog.at_level(logging.WARNING, "deepspeed_ucp"):
        run_ranks(2, work)
    told = [each for each in caplog.messages if "lr_scheduler" in each]
    assert len(told) == 1
    side = "only this engine has" if live else "only the checkpoint has"
    assert f"{side} lr_scheduler, random_ltd, data_sampler" in told[0]
    assert "step 12" in told[0] or not live


def test_without_optimizer_states(tmp_path: Path) -> None:
    path, state, rank = start(tmp_path)
    engine, report, _ = run_load(open_for(path, rank), rank, load_optimizer_states=False)
    check_loaded([rank], State({name: {"fp32": atoms["fp32"]} for name, atoms in state.atoms.items()}, {}, ()))
    assert not rank.wrapped.state
    assert rank.wrapped.param_groups[0]["lr"] == 0.125
    assert engine.global_steps == 3
    assert report.state_bytes == 4 * (7 * 13 + 5 * 7 + 9)


def test_the_module_only(tmp_path: Path) -> None:
    path, state, rank = start(tmp_path, run=Run(lr_scheduler={"last": 11}))
    engine, _, _ = run_load(open_for(path, rank), rank, load_module_only=True)
    check_loaded([rank], State({name: {"fp32": atoms["fp32"]} for name, atoms in state.atoms.items()}, {}, ()))
    assert not rank.wrapped.state
    assert (engine.global_steps, engine.lr_scheduler.loaded) == (0, None)
    states = path / "mp_rank_00_model_states.pt"
    tree = torch.load(states, weights_only=False)
    torch.save({key: value for key, value in tree.items() if key != "global_steps"}, states)
    run_load(open_for(path, rank), rank, load_module_only=True)
    with pytest.raises(UnsupportedError, match=f"{states.name}: has no global_steps.*load_module_only=True"):
        run_load(open_for(path, rank), rank)


def test_a_lenient_load_passes_parameters_over_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, state = write(tmp_path, Topology(1, 3))
    grown = Model((*PLAIN.params, Param("new", (4,))))
    rank = FakeTarget(grown, Topology(0), 0)
    with pytest.raises(MismatchError, match=r"new \(4,\): not in the checkpoint"):
        run_load(open_for(path, rank), rank)
    check_untouched(rank)
    caplog.set_level(logging.WARNING, "deepspeed_ucp")
    run_load(open_for(path, rank), rank, load_module_strict=False)
    assert "new (4,): not in the checkpoint" in caplog.text
    kept = {flat.names[0]: flat for flat in rank.flats}
    assert kept["new"].data.eq(SENTINEL).all()
    assert kept["a"].data.equal(state.atoms["a"]["fp32"].view(-1))


@pytest.mark.parametrize("source", [Topology(1, 2, "bf16"), Topology(2, 3), Topology(3, 2)], ids=lambda t: t.label)
def test_a_save_without_frozen_parameters_leaves_them_as_they_are(
    source: Topology, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``save_checkpoint(exclude_frozen_parameters=True)``, as for adapters."""
    state = random_state(PLAIN, 0, precision=source.precision)
    files = build_files(PLAIN, state, source)
    for name, content in files.items():
        if "model_states" in name:
            content["module"].pop("frozen", None)
            content["frozen_param_shapes"] = content["frozen_param_fragments"] = None
    write_files(tmp_path, files)
    rank = FakeTarget(PLAIN, Topology(2), 0)
    with pytest.raises(MismatchError, match=r"frozen \(9,\): not in the checkpoint.*load_module_strict=False"):
        run_load(open_for(tmp_path, rank), rank)
    check_untouched(rank)
    with caplog.at_level(logging.INFO, "deepspeed_ucp"):
        run_load(open_for(tmp_path, rank), rank, load_module_strict=False)
    told = [(each.levelname, each.getMessage()) for each in caplog.records if "frozen tensor" in each.getMessage()]
    kept = "1 frozen tensor not in the checkpoint, the live values stay: frozen"
    assert told == [("INFO", f"load_module_strict=False: {kept}")]
    assert rank.extras()[0].data.eq(SENTINEL).all()
    masters = torch.cat([state.atoms[name]["fp32"].view(-1) for name in ("a", "b")])
    held = torch.cat([flat.data[: sum(cut.numel for cut in flat.buffer.cuts(flat.part))] for flat in rank.flats])
    assert held.equal(masters)


class WithExtraState(torch.nn.Module):
    """A module that saves an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.amax: Any = None

    def get_extra_state(self) -> Any:
        return self.amax

    def set_extra_state(self, state: Any) -> None:
        self.amax = state


@pytest.mark.parametrize("extra", [{"amax": [1.0, 2.0]}, b"bytes", 3], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("source", [Topology(0), Topology(1, 2, "bf16"), Topology(3, 2)], ids=lambda t: t.label)
def test_extra_states_of_modules_come_back(source: Topology, extra: Any, tmp_path: Path) -> None:
    files = build_files(PLAIN, random_state(PLAIN, 0, precision=source.precision), source)
    for name, content in files.items():
        if "model_states" in name:
            content["module"]["layer._extra_state"] = extra
    write_files(tmp_path, files)
    rank = FakeTarget(PLAIN, Topology(2), 0)
    with pytest.raises(MismatchError, match="layer._extra_state"):
        run_load(open_for(tmp_path, rank), rank)
    check_untouched(rank)
    module = torch.nn.ModuleDict({"layer": WithExtraState()})
    run_load(open_for(tmp_path, rank), rank, module=module)
    assert module["layer"].amax == extra


# -- all or nothing ---------------------------------------------------------------------------------------------------


def damage(index: AtomicIndex, name: str, state: str) -> None:
    """Flip a bit in the middle of an atom's last fragment."""
    fragment = index.stored.atoms[AtomKey(name, state)].shards[0].fragments[-1]
    record = index.stored.records[fragment.record]
    flip(Path(index.stored.files[record.file].path), record.offset + fragment.offset + 4 * (fragment.numel // 2), 3)


@pytest.mark.parametrize(
    ("name", "state"), [("a", "fp32"), ("b", "exp_avg"), ("b", "exp_avg_sq"), ("frozen", "module")]
)
@pytest.mark.parametrize("topology", [Topology(0), Topology(2), Topology(3)], ids=lambda t: t.label)
def test_a_damaged_record_leaves_the_engine_as_it_was(
    topology: Topology, name: str, state: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, Topology(1, 3))
    rank = FakeTarget(PLAIN, topology, 0)
    index = open_for(path, rank)
    damage(index, name, state)
    with pytest.raises(CheckpointError, match=r"states.pt: the \d+ bytes at \d+ have CRC32 .* damaged"):
        run_load(index, rank)
    check_untouched(rank)


def test_a_damaged_record_leaves_live_states_as_they_were(tmp_path: Path) -> None:
    path, _, rank = start(tmp_path)
    take_a_step(rank.wrapped)
    before = [value.clone() for entry in rank.wrapped.state.values() for value in entry.values()]
    masters = [flat.data.clone() for flat in rank.flats]
    index = open_for(path, rank)
    damage(index, "b", "exp_avg")
    with pytest.raises(CheckpointError, match="damaged"):
        run_load(index, rank)
    after = [value for entry in rank.wrapped.state.values() for value in entry.values()]
    assert all(left.equal(right) for left, right in zip(before, after, strict=True))
    assert all(left.equal(flat.data) for left, flat in zip(masters, rank.flats, strict=True))


def test_a_damaged_copy_of_the_module_is_found_before_the_engine_changes(tmp_path: Path) -> None:
    """``custom_load_fn`` alone is given it."""
    path, _ = write(tmp_path, Topology(1, 3, "bf16"))
    rank, given = FakeTarget(PLAIN, Topology(2), 0), dict[str, Any]()
    index = open_for(path, rank)
    damage(index, "a", "copy")
    engine = FakeEngine(rank)
    with pytest.raises(CheckpointError, match="Nothing was changed"):
        run_load(index, rank, engine=engine, custom_load_fn=lambda src, dst: given.update(src))
    assert not given and not find_state(engine).broken
    check_untouched(rank)


def test_a_foreign_shard_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    path, _ = write(tmp_path, Topology(1, 2))
    other = write_checkpoint(tmp_path / "other", PLAIN, random_state(PLAIN, 5), Topology(1, 2))
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (path / name).write_bytes((other / name).read_bytes())
    rank = FakeTarget(PLAIN, Topology(2), 0)
    with pytest.raises(CheckpointError, match=f"{name}: its fp32 weights are not those of the model states"):
        run_load(open_for(path, rank), rank)
    check_untouched(rank)


def test_a_client_state_that_is_refused_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    path, _, rank = start(tmp_path, Topology(1, 2), run=Run(client_state={"mine": Restored()}))
    with pytest.raises(UnsupportedError, match="Restored"):
        run_load(open_for(path, rank), rank)
    check_untouched(rank)
    run_load(open_for(path, rank), rank, config=UniversalConfig(trust_pickle=True))
    assert not rank.flats[0].data.eq(SENTINEL).any()


def test_all_objections_are_one_message(tmp_path: Path) -> None:
    """Else each would cost a launch: the client state, the parameters, and the param groups."""
    path, _ = write(tmp_path, Topology(1, 2), run=Run(client_state={"mine": Restored()}))
    params = (*PLAIN.params[:-1], replace(PLAIN.params[-1], name="other"))
    rank = FakeTarget(replace(PLAIN, params=params), Topology(2), 0)
    rank.group_members = lambda: {0: ("a", "b")}  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError) as told:
        run_load(open_for(path, rank), rank)
    lines = str(told.value).splitlines()
    assert len(lines) == 3, lines
    for line, text in zip(lines, ("Restored", "other", "param groups"), strict=True):
        assert text in line
    check_untouched(rank)


def after_verification(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Do something once everything has been read and verified."""
    check = Transfer.verify

    def check_and_go_on(transfer: Transfer) -> int:
        nbytes = check(transfer)
        then()
        return nbytes

    monkeypatch.setattr(Transfer, "verify", check_and_go_on)
    monkeypatch.setattr(exchange, "_PAUSE", 0.0)
    monkeypatch.setattr(exchange, "_ATTEMPTS", 1)


def keep_values(targets: list[FakeTarget]) -> list[torch.Tensor]:
    """A copy of everything that a load may write to."""
    return [t.clone() for target in targets for t in list_tensors(target)]


def list_tensors(target: FakeTarget) -> list[torch.Tensor]:
    states = [value for entry in target.wrapped.state.values() for value in entry.values()]
    tensors = [flat.data for flat in target.flats] + [extra.data for extra in target.extras()]
    return [*tensors, *(state for state in states if isinstance(state, torch.Tensor))]


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_file_that_changes_after_it_was_read_changes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_memory(monkeypatch, True)
    path, state, rank = start(tmp_path)
    take_a_step(rank.wrapped)
    index = open_for(path, rank)
    after_verification(monkeypatch, lambda: damage(index, name, "fp32"))
    run_load(index, rank, engine=FakeEngine(rank, steps=1))
    check_loaded([rank], state)


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_file_that_changes_between_two_passes_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_memory(monkeypatch, False)
    path, _, rank = start(tmp_path)
    take_a_step(rank.wrapped)
    index, engine = open_for(path, rank), FakeEngine(rank)
    after_verification(monkeypatch, lambda: damage(index, name, "fp32"))
    with pytest.raises(CheckpointError, match=r"states.pt: was written to .* must not be used") as caught:
        run_load(index, rank, engine=engine)
    assert find_state(engine).broken == str(caught.value)


class FailingReads:
    """The storage fails at the n-th read of those that follow; `once`, or from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, *, once: bool) -> None:
        self.number, self.once, self.count, self.armed = number, once, 0, False
        self.preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.read)

    def read(self, fd: int, views: list[memoryview], offset: int) -> int:
        if self.armed:
            self.count += 1
            if self.count == self.number or (self.count > self.number and not self.once):
                raise OSError(5, "Input/output error")
        return self.preadv(fd, views, offset)

    def arm(self) -> None:
        self.armed = True


@pytest.mark.parametrize("verify", ["crc", "off"])
@pytest.mark.parametrize(
    ("trained", "much"), [(True, True), (True, False), (False, True)], ids=["apart", "two passes", "in place"]
)
def test_a_fault_at_any_read_leaves_the_engine_as_it_was_or_marks_it(
    trained: bool, much: bool, verify: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of a load on two ranks fail once, in turn; the last load has more reads than are made.

    Every sixth one, another sixth with each way of loading; all of them under `-m exhaustive`.
    """
    have_memory(monkeypatch, much)
    path, state = write(tmp_path, Topology(1, 3))
    config = UniversalConfig(verify=verify, threads=1)  # type: ignore[arg-type]
    monkeypatch.setattr(exchange, "_ATTEMPTS", 1)
    marked, index = 0, open_for(path, make_targets(PLAIN, Topology(3, 2))[0])
    turn = (2 * trained + much) % 3 + 3 * (verify == "off")
    first, stride = (1, 1) if os.environ.get("UCP_EXHAUSTIVE") else (1 + turn, 6)
    for number in range(first, 999, stride):
        targets = make_targets(PLAIN, Topology(3, 2))
        if trained:
            for target in targets:
                take_a_step(target.wrapped)
        before = keep_values(targets)
        engines = [FakeEngine(target, steps=int(trained)) for target in targets]
        failing = FailingReads(monkeypatch, number, once=True)
        failing.arm()
        results = World(2).run(lambda rank, comm: run_load(index, targets[rank], comm, config, engine=engines[rank]))  # noqa: B023
        monkeypatch.undo()
        have_memory(monkeypatch, much)
        monkeypatch.setattr(exchange, "_ATTEMPTS", 1)
        if failing.count < number:
            break
        texts = {str(result) for result in results}
        assert len(texts) == 1 and "states.pt: cannot be read at byte" in texts.pop()
        same = all(now.equal(then) for now, then in zip(keep_values(targets), before, strict=True))
        told = [find_state(engine).broken for engine in engines]
        assert same if told == ["", ""] else told == [str(result) for result in results]
        marked += not same
    check_loaded(targets, state)
    few = 0 if trained else sum(len(target.extras()) for target in targets)  # nothing makes those again
    assert number > 8 and (marked <= few) == much


def test_what_fails_for_a_moment_in_the_second_pass_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    have_memory(monkeypatch, False)
    path, state = write(tmp_path, Topology(1, 3))
    targets = make_targets(PLAIN, Topology(3, 2))
    for target in targets:
        take_a_step(target.wrapped)
    index, failing = open_for(path, targets[0]), FailingReads(monkeypatch, 2, once=True)
    after_verification(monkeypatch, failing.arm)
    monkeypatch.setattr(exchange, "_ATTEMPTS", 2)
    run_ranks(2, lambda rank, comm: run_load(index, targets[rank], comm, UniversalConfig(threads=1)))
    check_loaded(targets, state)
    assert "trying again" in caplog.text


def test_what_a_read_held_that_failed_is_given_back_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = iter(range(3))
    monkeypatch.setattr(exchange, "_PAUSE", 0.0)
    with without_collector() as failing:

        def read(*_: Any) -> list[Any]:
            assert failing.held == 0
            return [] if next(attempts) % 3 == 2 else failing.fail(CheckpointError("cannot be read."))

        reader = SimpleNamespace(_read_again=read)
        assert CollectiveReader.read_rest(reader) == []  # type: ignore[arg-type]
        assert not list(attempts)


def test_an_engine_that_was_left_half_loaded_is_usable_after_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state, rank = start(tmp_path)
    take_a_step(rank.wrapped)
    index, engine = open_for(path, rank), FakeEngine(rank)
    with monkeypatch.context() as patch:
        have_memory(patch, False)
        failing = FailingReads(patch, 1, once=False)
        after_verification(patch, failing.arm)
        with pytest.raises(CheckpointError, match="must not be used"):
            run_load(index, rank, engine=engine)
    assert find_state(engine).half_states
    run_load(index, rank, engine=engine)
    assert not find_state(engine).broken
    assert not find_state(engine).half_states
    check_loaded([rank], state)


def test_an_interrupt_while_the_engine_is_filled_marks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, rank = start(tmp_path)
    index, engine = open_for(path, rank), FakeEngine(rank)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rank, "refresh_copies", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_load(index, rank, engine=engine)
    assert "must not be used" in find_state(engine).broken


def test_a_file_that_goes_away_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    path, _, rank = start(tmp_path)
    index = open_for(path, rank)
    (path / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_2_.*: cannot be opened"):
        run_load(index, rank)
    check_untouched(rank)


# -- several ranks ----------------------------------------------------------------------------------------------------


SEVERAL = [Topology(3, 2), Topology(2, 3), Topology(3, 5), Topology(0, 3)]


@pytest.mark.parametrize(
    ("source", "target", "verify"),
    params(
        cover(KINDS[:7], SEVERAL, ["crc", "off"]),
        product(KINDS[:7], SEVERAL, ["crc", "off"]),
        lambda row: f"{row[0].label}→{row[1].label}-{row[2]}",
    ),
)
def test_several_ranks(source: Topology, target: Topology, verify: str, tmp_path: Path) -> None:
    path, state = write(tmp_path, source)
    targets = make_targets(PLAIN, target)
    index = open_for(path, targets[0])
    config = UniversalConfig(verify=verify, threads=1)  # type: ignore[arg-type]
    results = run_ranks(target.dp, lambda rank, comm: run_load(index, targets[rank], comm, config))
    check_loaded(targets, state)
    read = sum(report.bytes_read for _, report, _ in results)
    atoms = [atom for atom in index.stored.atoms.values() if atom.state != "copy"]
    touched = {f.record for atom in atoms for f in atom.shards[0].fragments}
    total = sum(index.stored.records[record].nbytes for record in touched)
    state = sum(report.state_bytes for _, report, _ in results[:1])
    assert read == total if verify == "crc" else state <= read <= total  # padding is read for the checksums alone
    assert len({repr(client) for _, _, client in results}) == 1


def test_a_damaged_record_ends_all_ranks_with_one_error(tmp_path: Path) -> None:
    path, _ = write(tmp_path, Topology(1, 3))
    targets = make_targets(PLAIN, Topology(3, 4))
    index = open_for(path, targets[0])
    damage(index, "b", "exp_avg")
    results = World(4).run(lambda rank, comm: run_load(index, targets[rank], comm))
    assert {type(result) for result in results} == {CheckpointError}
    assert len({str(result) for result in results}) == 1
    assert "damaged" in str(results[0])
    for target in targets:
        check_untouched(target)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_one_ranks_mismatch_ends_all_ranks(culprit: int, tmp_path: Path) -> None:
    path, _ = write(tmp_path, Topology(1, 3))
    targets = make_targets(PLAIN, Topology(3, 3))
    targets[culprit] = FakeTarget(Model((Param("a", (13, 7)), *PLAIN.params[1:])), Topology(3, 3), culprit)
    index = open_for(path, targets[0])
    results = World(3).run(lambda rank, comm: run_load(index, targets[rank], comm))
    assert {type(result) for result in results} == {MismatchError}
    assert {str(result) for result in results} == {str(results[0])}
    assert f"[rank {culprit}]" in str(results[0])
    for target in targets:
        check_untouched(target)


def test_one_rank_that_cannot_look_for_its_state_file_ends_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write(tmp_path, Topology(1, 3))
    targets = make_targets(PLAIN, Topology(1, 2))
    index = open_for(path, targets[0])

    def look(_index: AtomicIndex, target: Any) -> None:
        if target is targets[1]:
            raise OSError("the store does not answer")

    monkeypatch.setattr(direct, "_find_own_file", look)
    results = World(2).run(lambda rank, comm: run_load(index, targets[rank], comm))
    assert [type(each) for each in results] == [StorageError] * 2


NO_MEMORY = MemoryError(), "out of memory"
FAILING: dict[str, tuple[Any, str, Callable[[Any], torch.Tensor], Exception, str, str]] = {
    "looks at its buffers": (Buffer, "fill_in_place", lambda buffer: buffer.tensor, *NO_MEMORY, ""),
    "prepares its reads": (exchange, "choose_uploads", lambda sinks: sinks[0].buffer.tensor, *NO_MEMORY, ""),
    "reads": (
        CollectiveReader,
        "_work",
        lambda reader: reader.into.sinks[0].buffer.tensor if reader.into.sinks else torch.empty(0),
        OSError(5, "Input/output error"),
        "a file: Input/output error (EIO)",
        "",
    ),
    "fills its buffers": (Destinations, "commit", lambda into: into.buffers[0].tensor, *NO_MEMORY, "refresh_copies"),
    "makes its copies": (
        FakeTarget,
        "refresh_copies",
        lambda target: target.flats[0].data,
        *NO_MEMORY,
        "gather_copies",
    ),
}
"""What fails, the tensor by which a rank is known there, the error; and what is collective in DeepSpeed after it."""


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("where", FAILING)
def test_one_rank_that_fails_ends_all_ranks(
    where: str, culprit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, find_tensor, error, text, collective = FAILING[where]
    path, _ = write(tmp_path, Topology(1, 3))
    targets = make_targets(PLAIN, Topology(3, 3))
    index, work, reached = open_for(path, targets[0]), getattr(owner, name), list[int]()

    def fail(*args: Any) -> Any:
        if find_tensor(args[0]).data_ptr() == targets[culprit].flats[0].data.data_ptr():
            raise error
        return work(*args)

    monkeypatch.setattr(owner, name, fail)
    if collective:
        monkeypatch.setattr(FakeTarget, collective, lambda _: reached.append(1))
    results = World(3).run(lambda rank, comm: run_load(index, targets[rank], comm))
    ((kind, told),) = {(type(result), str(result)) for result in results}
    assert f"[rank {culprit}] {text}" in told and not reached
    assert where != "reads" or (kind, told) == (StorageError, f"[rank {culprit}] {text}")
    if collective:
        assert "must not be used" in told
        return
    for target in targets:
        check_untouched(target)


# -- memory -----------------------------------------------------------------------------------------------------------


NO_PLAN = LoadPlan([], [])


@pytest.mark.parametrize("window_mb", [16, 64, 256])
@pytest.mark.parametrize("threads", [0, 1, 200])
def test_scratch_memory_stays_within_the_window(window_mb: int, threads: int, tmp_path: Path) -> None:
    """Beside it rounds stage, send and receive a quarter of the window each."""
    path, _, rank = start(tmp_path)
    config = UniversalConfig(window_mb=window_mb, threads=threads)
    made = CollectiveReader(open_for(path, rank), Destinations(), [NO_PLAN], Comm(), config, [None])
    assert 1 <= made.threads <= (threads or count_threads())
    assert made.threads * BLOCK <= (window_mb << 20) // 4


def test_memory_that_is_filled_for_the_first_time_is_to_lie_in_large_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(exchange.LargePages, "add", lambda self, address, nbytes: asked.append((address, nbytes)))
    path, _ = write(tmp_path, Topology(1, 3))
    live, apart, states = (Buffer(torch.ones(6), uncommitted=each) for each in (False, False, True))
    apart.stage_aside()
    into = Destinations([live, apart, states])
    index = open_for(path, FakeTarget(PLAIN, Topology(2), 0))
    CollectiveReader(index, into, [NO_PLAN], Comm(), UniversalConfig(), [None])
    assert asked == [(apart.memory.data_ptr(), 24), (states.tensor.data_ptr(), 24)]


@pytest.mark.parametrize("size", [1, 3])
def test_a_load_never_sees_a_whole_large_parameter_twice(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are bounded by the block and rounds by the window, whatever the parameter's size."""
    plans: list[LoadPlan] = []

    def plan_finely(*args: Any) -> LoadPlan:
        plans.append(negotiate(*args[:-2], ReadSizes.within(40_000, 4096, 1024), args[-1]))
        return plans[-1]

    monkeypatch.setattr(transfer, "negotiate", plan_finely)
    model = Model((Param("a", (30_000,)),))
    path, state = write(tmp_path, Topology(1, 3), model)
    targets = make_targets(model, Topology(0, size))
    index = open_for(path, targets[0])
    run_ranks(size, lambda rank, comm: run_load(index, targets[rank], comm, UniversalConfig(threads=1)))
    check_loaded(targets, state)
    assert max(request.nbytes for plan in plans for request in plan.requests) <= 4096
    rounds = [each for plan in plans for each in plan.rounds]
    assert bool(rounds) == (size > 1)
    assert all(each.staged <= max(40_000 // 4, 4096) for each in rounds)
    assert all(each.sent == 0 for each in rounds)  # to ranks of one machine


# -- what others keep in the file -------------------------------------------------------------------------------------


def test_a_damaged_client_tensor_is_found(tmp_path: Path) -> None:
    run = Run(garbage=0.0, client_state={"rng": torch.arange(100)})
    path, _ = write(tmp_path, Topology(2, 3), run=run)
    target = FakeTarget(PLAIN, Topology(1), 0)
    index = open_for(path, target)
    (number,) = index.run.client_records
    record = index.stored.records[number]
    flip(Path(index.stored.files[record.file].path), record.offset + 17)
    with pytest.raises(CheckpointError, match="Nothing was changed"):
        run_load(index, target)
    check_untouched(target)
    run_load(index, target, config=UniversalConfig(verify="off"))


def test_a_damaged_client_tensor_is_refused_with_the_place_of_another_copy(tmp_path: Path) -> None:
    run = Run(garbage=0.0, client_state={"rng": torch.arange(100)})
    path, _ = write(tmp_path, Topology(2, 3), run=run)
    shutil.copytree(path, tmp_path / "other")
    target = FakeTarget(PLAIN, Topology(1), 0)
    index = open_checkpoint(str(path), Comm(), also=[str(tmp_path / "other")])
    (number,) = index.run.client_records
    record = index.stored.records[number]
    flip(Path(index.stored.files[record.file].places[0]), record.offset + 17)
    with pytest.raises(CheckpointError, match=r"one of the copies .* is damaged\. Nothing was changed"):
        run_load(index, target)
    check_untouched(target)


def test_a_scheduler_that_refuses_its_state_leaves_the_buffers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write(tmp_path, Topology(2, 3), run=Run(garbage=0.0, lr_scheduler={"last_batch_iteration": 2}))
    target = FakeTarget(PLAIN, Topology(1), 0)

    def refuse(self: Scheduler, state: dict[str, Any]) -> None:
        raise KeyError("of another kind")

    monkeypatch.setattr(Scheduler, "load_state_dict", refuse)
    with pytest.raises(RemoteError, match="of another kind"):
        run_load(open_for(path, target), target)
    check_untouched(target)


def test_a_permuted_tensor_is_refused_by_name_when_it_is_needed(tmp_path: Path) -> None:
    model = Model((Param("a", (4, 3)), Param("frozen", (4, 3), frozen=True)))
    state = random_state(model, 0)
    files = build_files(model, state, Topology(2, 2), Run())
    module = files["mp_rank_00_model_states.pt"]["module"]
    module["frozen"] = module["frozen"].t().contiguous().t()
    path = tmp_path / "tag"
    write_files(path, files)
    target = FakeTarget(model, Topology(1), 0)
    index = open_for(path, target)  # an index all the same: in the same topology DeepSpeed's own load takes it
    with pytest.raises(UnsupportedError, match=r"frozen \(module\): its memory is not contiguous"):
        run_load(index, target)
    check_untouched(target)


def test_copies_changed_on_purpose_load_without_checks(tmp_path: Path) -> None:
    model = Model((Param("a", (40, 3)),))
    state = random_state(model, 0, precision="bf16")
    files = build_files(model, state, Topology(2, 2, "bf16"), Run())
    files["mp_rank_00_model_states.pt"]["module"]["a"].mul_(3)
    path = tmp_path / "tag"
    write_files(path, files)
    target = FakeTarget(model, Topology(1), 0)
    with pytest.raises(CheckpointError, match='"verify": "off"'):
        run_load(open_for(path, target), target)
    run_load(open_for(path, target), target, config=UniversalConfig(verify="off"))
    check_loaded([target], state)


def test_a_state_file_whose_pickle_is_damaged_is_read_in_the_next_place(tmp_path: Path) -> None:
    """Its header has been read in the first place, its objects are read in the nearest."""
    run = Run(client_state={"rng": torch.arange(100), "mine": "a long text of the client"})
    path, state = write(tmp_path / "first", Topology(1, 3), run=run)
    near = tmp_path / "near"
    shutil.copytree(path, near)
    rank = FakeTarget(PLAIN, Topology(2), 0)
    index = open_checkpoint(str(path), Comm(), *groups_of(rank, Comm())[:1], also=[str(near)])
    files = tuple(replace(file, places=file.places[::-1]) for file in index.stored.files)
    index = index.change(files=files)
    file = near / Path(index.run.state_file).name
    flip(file, file.read_bytes().index(b"a long text"))
    _, _, client = run_load(index, rank)
    assert client["mine"] == "a long text of the client" and client["rng"].equal(torch.arange(100))
    check_loaded([rank], state)
