"""The direct load against a stand-in engine: values, counters and states; several ranks; two passes, all or nothing."""

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
from unittest import mock

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine.parallel import Place
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import CheckpointError, MismatchError, RemoteError, StorageError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.io.threads import count_threads
from deepspeed_ucp.load import direct, transfer
from deepspeed_ucp.load.context import LoadContext, LoadReport
from deepspeed_ucp.load.destinations import Buffer, FillPlan
from deepspeed_ucp.load.direct import _match_extra_states
from deepspeed_ucp.load.transfer import Transfer
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import Records
from deepspeed_ucp.model.topology import Topology as SavedTopology
from deepspeed_ucp.plan.rounds import BLOCK
from tests.support.cases import AWKWARD, KINDS
from tests.support.covering import cover, params, stride
from tests.support.curriculum import make_sampler
from tests.support.damage import flip, flip_bit, write_checksums
from tests.support.direct import (
    PLAIN,
    REFUSED,
    STATES,
    ZERO1,
    FakeEngine,
    Restored,
    Scheduler,
    change_file,
    check_loaded,
    check_untouched,
    have_memory,
    make_job,
    run_load,
    run_refused,
    start,
    write,
)
from tests.support.held import without_collector
from tests.support.ranks import World, current_rank, run_ranks
from tests.support.reshard import SENTINEL, FakeTarget, groups_of, make_targets, open_for, take_a_step
from tests.synth import Model, Param, Run, State, Topology


@pytest.mark.parametrize("verify", ["crc", "off"])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_report_counts_the_bytes_of_a_load(
    passes: int, verify: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_memory(monkeypatch, passes == 1)
    path, state, rank = start(tmp_path)
    take_a_step(rank.wrapped)
    for entry in rank.wrapped.state.values():
        entry["stale"] = 1.0  # no saved state has it
    config = UniversalConfig(verify=verify)
    _, report, _ = run_load(open_for(path, rank), rank, config=config, engine=FakeEngine(rank, steps=1))
    check_loaded([rank], state)
    numel = 7 * 13 + 5 * 7
    assert report.state_bytes == 4 * (3 * numel + 9)
    padding = 4 * 3 * ((-91 % 6) + (-35 % 6))
    assert report.state_bytes <= report.bytes_read <= report.state_bytes + padding
    is_read_again = passes == 2 and verify == "crc"
    assert 0 < report.bytes_again <= report.bytes_read if is_read_again else report.bytes_again == 0
    assert report.requests > 0
    assert {"plan", "read", "verify", "fill", "finish"} <= set(report.phases)
    assert all(seconds >= 0 for seconds in report.phases.values())


def test_report_seconds_include_phases_that_raise() -> None:
    report = LoadReport(direct=True, reason="test")
    with report.phase("read"):
        pass
    first = report.phases["read"]
    with pytest.raises(ValueError, match="oh"), report.phase("read"):
        raise ValueError("oh")
    assert report.phases["read"] > first >= 0


@pytest.mark.parametrize("with_scheduler", [True, False])
def test_counters_scheduler_and_client_state_are_restored(with_scheduler: bool, tmp_path: Path) -> None:
    counters = {"global_steps": 12, "global_samples": 345, "skipped_steps": 2}
    run = Run(**counters, lr_scheduler={"last": 11}, client_state={"epoch": 4})  # type: ignore[arg-type]
    path, _, rank = start(tmp_path, run=run)
    engine, _, client = run_load(open_for(path, rank), rank, load_lr_scheduler_states=with_scheduler)
    assert {name: getattr(engine, name) for name in counters} == counters
    assert (engine.loaded_checkpoint_dp_world_size, engine.loaded_checkpoint_mp_world_size) == (3, 1)
    assert (engine.lr_scheduler.loaded, client["epoch"]) == ({"last": 11} if with_scheduler else None, 4)
    assert not {"module", "optimizer", "global_steps"} & set(client)
    assert client.get("lr_scheduler") == (None if with_scheduler else {"last": 11})


class Rates(Scheduler):
    """A scheduler such as torch's, whose state holds the rates that it has set."""

    def load_state_dict(self, state: Any) -> None:
        self._last_lr = state["rates"]


class Cycle(Rates):
    """A scheduler such as DeepSpeed's OneCycle, which sets betas too."""

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
def test_live_param_groups_get_the_schedulers_rates(
    source: Topology, kept: Any, grouped: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, state = write(tmp_path, source, run=Run(lr_scheduler={"rates": [0.5, 0.25]}))
    takes_saved = source == Topology(1, 3) and kept == "saved" and grouped
    for scheduler in (Rates(), Cycle(), None):
        rank = FakeTarget(PLAIN, Topology(2), 0)
        engine, index = FakeEngine(rank), open_for(path, rank)
        engine.lr_scheduler = scheduler
        index = index if grouped else replace(index, groups=())
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
    assert ("the saved param groups do not have lr, betas" in caplog.text) is source.elastic


@pytest.mark.parametrize("kept", ["saved", "live"])
@pytest.mark.parametrize("owned", [True, False])
def test_edited_hyper_parameters_are_logged_once(
    kept: Any, owned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = write(tmp_path, ZERO1)

    def work(number: int, comm: Comm) -> None:
        rank = FakeTarget(PLAIN, Topology(2, 2), number, partial(torch.optim.AdamW, weight_decay=0.5))
        engine = FakeEngine(rank)
        engine.lr_scheduler = Rates() if owned else None
        config = UniversalConfig(param_groups=kept)
        run_load(open_for(path, rank, comm), rank, comm, engine=engine, config=config)

    run_ranks(2, work)
    (text,) = [each for each in caplog.messages if "hyper-parameters" in each]
    assert "weight_decay 0.01 → 0.5" in text
    assert ("lr 0.001 → 0.125 (1 of 2 param groups)" in text) is not owned
    assert ("the saved ones are taken" if kept == "saved" else "this run's are kept") in text


@pytest.mark.parametrize("live", [True, False])
def test_an_unmatched_scheduler_is_logged_once(live: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The live scheduler restarts, or no object of the engine takes the saved state."""
    names = ("lr_scheduler", "random_ltd", "data_sampler")
    saved: dict[str, Any] = {} if live else {key: {"last": 11} for key in names}
    path, _ = write(tmp_path, ZERO1, run=Run(global_steps=12))
    change_file(path / STATES, lambda tree: tree.update(saved))

    def work(number: int, comm: Comm) -> None:
        rank = FakeTarget(PLAIN, Topology(2, 2), number)
        engine = FakeEngine(rank)
        engine.lr_scheduler = engine.random_ltd_scheduler = Scheduler() if live else None
        engine.training_dataloader = SimpleNamespace(data_sampler=make_sampler(tmp_path, number)) if live else None
        run_load(open_for(path, rank, comm), rank, comm, engine=engine)
        skip = {"load_lr_scheduler_states": False}  # a choice of the caller is not logged
        run_load(open_for(path, rank, comm), rank, comm, engine=FakeEngine(rank), **skip)

    run_ranks(2, work)
    (text,) = [each for each in caplog.messages if "lr_scheduler" in each]
    assert f"only {'this engine' if live else 'the checkpoint'} has {', '.join(names)}" in text
    assert "step 12" in text or not live


@pytest.mark.parametrize("argument", ["load_optimizer_states", "load_module_only"])
def test_weights_load_without_optimizer_states_or_with_the_module_only(argument: str, tmp_path: Path) -> None:
    path, state, rank = start(tmp_path, run=Run(lr_scheduler={"last": 11}))
    is_module_only = argument == "load_module_only"
    engine, report, _ = run_load(open_for(path, rank), rank, **{argument: is_module_only})
    check_loaded([rank], State({name: {"fp32": atoms["fp32"]} for name, atoms in state.atoms.items()}, {}, ()))
    assert not rank.wrapped.state
    assert rank.wrapped.param_groups[0]["lr"] == 0.125
    assert (engine.global_steps, engine.lr_scheduler.loaded) == ((0, None) if is_module_only else (3, {"last": 11}))
    assert report.state_bytes == 4 * (7 * 13 + 5 * 7 + 9)


def test_a_save_without_global_steps_loads_only_with_load_module_only(tmp_path: Path) -> None:
    path, _, rank = start(tmp_path)
    change_file(path / STATES, lambda tree: tree.pop("global_steps"))
    run_load(open_for(path, rank), rank, load_module_only=True)
    with pytest.raises(UnsupportedError, match=f"{STATES}: has no global_steps.*load_module_only=True"):
        run_load(open_for(path, rank), rank)


def test_a_lenient_load_logs_skipped_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, state = write(tmp_path, ZERO1)
    rank = FakeTarget(Model((*PLAIN.params, Param("new", (4,)))), Topology(0), 0)
    with pytest.raises(MismatchError, match=r"new \(4,\): not in the checkpoint"):
        run_load(open_for(path, rank), rank)
    check_untouched(rank)
    run_load(open_for(path, rank), rank, load_module_strict=False)
    assert "new (4,): not in the checkpoint" in caplog.text
    kept = {flat.names[0]: flat for flat in rank.flats}
    assert kept["new"].data.eq(SENTINEL).all()
    assert kept["a"].data.equal(state.atoms["a"]["fp32"].view(-1))


@pytest.mark.parametrize("source", [Topology(1, 2, "bf16"), Topology(2, 3), Topology(3, 2)], ids=lambda t: t.label)
def test_a_save_without_frozen_parameters_needs_load_module_strict_false(
    source: Topology, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``save_checkpoint(exclude_frozen_parameters=True)``, as for adapters."""
    path, state = write(tmp_path, source)

    def exclude(tree: dict[str, Any]) -> None:
        tree["module"].pop("frozen", None)
        tree["frozen_param_shapes"] = tree["frozen_param_fragments"] = None

    for file in path.glob("*model_states*"):
        change_file(file, exclude)
    rank = FakeTarget(PLAIN, Topology(2), 0)
    with pytest.raises(MismatchError, match=r"frozen \(3, 3\): not in the checkpoint.*load_module_strict=False"):
        run_load(open_for(path, rank), rank)
    check_untouched(rank)
    with caplog.at_level(logging.INFO, "deepspeed_ucp"):
        run_load(open_for(path, rank), rank, load_module_strict=False)
    logged = [(each.levelname, each.getMessage()) for each in caplog.records if "frozen tensor" in each.getMessage()]
    kept = "1 frozen tensor not in the checkpoint, the live values stay: frozen"
    assert logged == [("INFO", f"load_module_strict=False: {kept}")]
    assert rank.extras()[0].data.eq(SENTINEL).all()
    masters = torch.cat([state.atoms[name]["fp32"].view(-1) for name in ("a", "b")])
    held = torch.cat([flat.data[: sum(cut.numel for cut in flat.buffer.cuts(flat.part))] for flat in rank.flats])
    assert held.equal(masters)


class WithExtraState(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.amax: Any = None

    def get_extra_state(self) -> Any:
        return self.amax

    def set_extra_state(self, state: Any) -> None:
        self.amax = state


@pytest.mark.parametrize("extra", [{"amax": [1.0, 2.0]}, b"bytes", 3], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("source", [Topology(0), Topology(1, 2, "bf16"), Topology(3, 2)], ids=lambda t: t.label)
def test_extra_states_of_modules_are_restored(source: Topology, extra: Any, tmp_path: Path) -> None:
    path, _ = write(tmp_path, source)
    for file in path.glob("*model_states*"):
        change_file(file, lambda tree: tree["module"].update({"layer._extra_state": extra}))
    rank = FakeTarget(PLAIN, Topology(2), 0)
    with pytest.raises(MismatchError, match="layer._extra_state"):
        run_load(open_for(path, rank), rank)
    check_untouched(rank)
    module = torch.nn.ModuleDict({"layer": WithExtraState()})
    run_load(open_for(path, rank), rank, module=module)
    assert module["layer"].amax == extra


def make_stage(layer: str, **options: Any) -> LoadContext:
    """Make a load into a model whose only layer has an extra state."""
    module = torch.nn.ModuleDict({layer: WithExtraState()})
    return LoadContext(SimpleNamespace(module=module), Comm(), UniversalConfig(), LoadReport(True, ""), **options)


LENIENT = {"load_module_strict": False}
PLACED: Any = SimpleNamespace(place=Place(0, 1, 0, 1, 0, 1))


@pytest.mark.parametrize(
    ("saved", "tp", "options", "text", "restored"),
    [
        (["layer"], 1, {}, "", 1),
        (["layer", "old"], 1, LENIENT, "passing over extra states that one side lacks: old._extra_state", 1),
        ([], 1, LENIENT, "passing over extra states that one side lacks: layer._extra_state", 0),
        (["old"], 1, {"custom_load_fn": print}, "extra states are not loaded: layer._extra_state, old._extra_state", 0),
        (["layer"], 2, {}, "get the extra states of the first saved rank: layer._extra_state", 1),
    ],
)
def test_skipped_and_merged_extra_states_are_logged(
    saved: list[str], tp: int, options: dict[str, Any], text: str, restored: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_stage("layer", **options)
    job.engine.module["layer"].amax = 1
    for degrees, of_topology in ((None, tp), ((tp, 1), 1)):  # a normal checkpoint, and its conversion
        caplog.clear()
        topology = SavedTopology(1, "zero12", "float32", tp=of_topology)
        index = AtomicIndex.of((), Records(), (), topology, "x.pt", degrees=degrees)
        found = _match_extra_states(job, index, PLACED, {f"{name}._extra_state": 3 for name in saved})
        assert len(found) == restored
        assert (text in caplog.text) if text else not caplog.text


def test_warnings_of_all_stages_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    found = [["lr"], ["lr", "betas"]]
    run_ranks(2, lambda rank, comm: make_job(None, comm).warn_all("folder", lambda: found[rank]))
    assert caplog.messages == ["folder: lr", "folder: betas"]


def test_extra_states_are_compared_over_all_stages_of_a_pipeline() -> None:
    index = AtomicIndex.of((), Records(), (), SavedTopology(1, "zero12", "float32"), "x.pt")
    saved = {"0._extra_state": 1, "1._extra_state": 2}

    def match(rank: int, comm: Comm) -> list[str]:
        return [*_match_extra_states(replace(make_stage(str(rank)), comm=comm), index, PLACED, saved)]

    assert run_ranks(2, match) == [["0._extra_state"], ["1._extra_state"]]
    assert {type(each) for each in World(3).run(match)} == {MismatchError}  # the checkpoint lacks layer 2's state


@pytest.mark.parametrize("verify", ["crc", "off"])
@pytest.mark.parametrize("checked", [True, False])
def test_files_without_checksums_are_logged(
    checked: bool, verify: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with write_checksums(checked):
        path, _, rank = start(tmp_path)
    run_load(open_for(path, rank), rank, config=UniversalConfig(verify=verify))
    assert ("damage is not detected in 4 files without checksums: " in caplog.text) is (verify == "crc" and not checked)


# -- several ranks -----------------------------------------------------------------------------------------------------


LIVE = [Topology(0), Topology(0, 1, "bf16", "fused"), Topology(3, 2), Topology(2, 3), Topology(3, 5), Topology(0, 3)]


@pytest.mark.parametrize(
    ("source", "target", "verify"),
    params(
        cover(KINDS, LIVE, ["crc", "off"], strength=1),
        product(KINDS, LIVE, ["crc", "off"]),
        lambda row: f"{row[0].label}→{row[1].label}-{row[2]}",
    ),
)
def test_a_load_restores_all_ranks(source: Topology, target: Topology, verify: str, tmp_path: Path) -> None:
    path, state = write(tmp_path, source, AWKWARD)
    targets = make_targets(AWKWARD, target)
    index, config = open_for(path, targets[0]), UniversalConfig(verify=verify, threads=1)  # type: ignore[arg-type]
    results = run_ranks(target.dp, lambda rank, comm: run_load(index, targets[rank], comm, config))
    check_loaded(targets, replace(state, groups=()) if source.keeps_lean_states else state)
    read = sum(report.bytes_read for _, report, _ in results)
    atoms = [atom for atom in index.atoms.values() if atom.state != "copy"]
    touched = {fragment.record for atom in atoms for fragment in atom.shards[0].list_fragments(atom.state)}
    total = sum(index.records[record].nbytes for record in touched)
    restored = results[0][1].state_bytes
    assert read == total if verify == "crc" else restored <= read <= total  # padding is read for the checksums alone
    assert len({repr(client) for _, _, client in results}) == 1 or source.stage == 3  # its ranks have separate files


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_mismatch_on_one_rank_is_raised_on_all_ranks(culprit: int, tmp_path: Path) -> None:
    path, _ = write(tmp_path, ZERO1)
    targets = make_targets(PLAIN, Topology(3, 3))
    targets[culprit] = FakeTarget(Model((Param("a", (13, 7)), *PLAIN.params[1:])), Topology(3, 3), culprit)
    kind, text = run_refused(open_for(path, targets[0]), targets)
    assert kind is MismatchError and f"[rank {culprit}]" in text


FAILING = {
    "looks at its buffers": (Buffer, "detect_recomputable"),
    "asks its extensions": (direct, "_ask_extensions"),
    "looks for its state file": (direct, "_find_own_file"),
    "lists its claims": (transfer, "list_claims"),
    "plans its blocks": (transfer, "make_owner_plan"),
    "plans its reads": (transfer, "make_plan"),
    "prepares its reads": (transfer, "choose_device_copies"),
    "reads": (Transfer, "_work"),
    "fills its buffers": (FillPlan, "commit"),
    "makes its copies": (FakeTarget, "refresh_copies"),
}
"""Functions of a load."""
COLLECTIVE = {"fills its buffers": "refresh_copies", "makes its copies": "gather_copies"}
"""After the engine has changed: the next collective call of DeepSpeed."""


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (MemoryError(), (RemoteError, "out of memory")),
        (OSError(5, "Input/output error"), (StorageError, "a file: Input/output error (EIO)")),
    ],
    ids=["memory", "storage"],
)
@pytest.mark.parametrize("where", FAILING)
def test_a_failure_on_one_rank_is_raised_on_all_ranks(
    where: str,
    error: Exception,
    refusal: tuple[type, str],
    culprit: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, text = refusal
    (owner, name), collective = FAILING[where], COLLECTIVE.get(where, "")
    path, _ = write(tmp_path, ZERO1)
    targets = make_targets(PLAIN, Topology(3, 3))
    index, work, reached = open_for(path, targets[0]), getattr(owner, name), list[int]()

    def fail(*args: Any) -> Any:
        if culprit == (args[0].comm.rank if name == "_work" else current_rank()):  # other threads read
            raise error
        return work(*args)

    monkeypatch.setattr(owner, name, fail)
    if collective:
        monkeypatch.setattr(FakeTarget, collective, lambda _: reached.append(1))
    raised, message = run_refused(index, targets, changed=bool(collective))
    assert (raised is kind or collective) and f"[rank {culprit}] {text}" in message and not reached
    assert ("must not be used" in message) is bool(collective)


# -- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_mb", [16, 64, 256])
@pytest.mark.parametrize("threads", [0, 1, 200])
def test_scratch_memory_stays_within_the_window(window_mb: int, threads: int, tmp_path: Path) -> None:
    """Rounds stage, send and receive a quarter of the window each."""
    path, _, rank = start(tmp_path)
    config = UniversalConfig(window_mb=window_mb, threads=threads)
    transfer = Transfer(FillPlan(open_for(path, rank)), Comm(), config)
    assert 1 <= transfer.threads <= (threads or count_threads())
    assert transfer.threads * BLOCK <= (window_mb << 20) // 4


def test_large_pages_are_requested_for_new_memory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[int, int]] = []
    monkeypatch.setattr(transfer.LargePages, "add", lambda self, address, nbytes: requests.append((address, nbytes)))
    path, _, rank = start(tmp_path)
    live, apart, states = (Buffer(torch.ones(6), fill_first=each) for each in (False, False, True))
    apart.use_separate()
    Transfer(FillPlan(open_for(path, rank), buffers=[live, apart, states]), Comm(), UniversalConfig())
    assert requests == [(apart.memory.data_ptr(), 24), (states.tensor.data_ptr(), 24)]


def test_a_state_file_with_a_damaged_pickle_is_read_from_the_next_place(tmp_path: Path) -> None:
    """Its header was read in the first place; its objects are read in the nearest."""
    run = Run(client_state={"rng": torch.arange(100), "mine": "a long text of the client"})
    path, state, rank = start(tmp_path / "first", run=run)
    near = tmp_path / "near"
    shutil.copytree(path, near)
    index = open_checkpoint(str(path), Comm(), Naming(*groups_of(rank, Comm())[:1]), also=[str(near)])
    index = replace(index, files=tuple(replace(file, places=file.places[::-1]) for file in index.files))
    flip(near / STATES, (near / STATES).read_bytes().index(b"a long text"))
    _, _, client = run_load(index, rank)
    assert client["mine"] == "a long text of the client" and client["rng"].equal(torch.arange(100))
    check_loaded([rank], state)


# -- two passes, all or nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "state"), [("a", "fp32"), ("b", "exp_avg"), ("b", "exp_avg_sq"), ("frozen", "module")]
)
@pytest.mark.parametrize("topology", [Topology(0), Topology(2), Topology(3)], ids=lambda t: t.label)
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_a_damaged_record_is_refused_and_leaves_the_engine_unchanged(
    trained: bool, topology: Topology, name: str, state: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, ZERO1)
    rank = FakeTarget(PLAIN, topology, 0)
    if trained:
        take_a_step(rank.wrapped)
    before, index = keep_values([rank]), open_for(path, rank)
    flip_bit(index, name, state)
    with pytest.raises(CheckpointError, match=r"states.pt: the \d+ bytes at \d+ have CRC32 .* damaged"):
        run_load(index, rank)
    assert all(now.equal(old) for now, old in zip(list_tensors(rank), before, strict=True))
    if not trained:
        check_untouched(rank)


def test_custom_load_fn_is_not_called_with_a_damaged_module(tmp_path: Path) -> None:
    path, _ = write(tmp_path, Topology(1, 3, "bf16"))
    rank, given = FakeTarget(PLAIN, Topology(2), 0), dict[str, Any]()
    index, engine = open_for(path, rank), FakeEngine(rank)
    flip_bit(index, "a", "copy")
    with pytest.raises(CheckpointError, match="Nothing was changed"):
        run_load(index, rank, engine=engine, custom_load_fn=lambda src, dst: given.update(src))
    assert not given and not find_state(engine).broken
    check_untouched(rank)


SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def replace_shard(path: Path) -> None:
    other, _ = write(path / "other", Topology(1, 3, "bf16"), seed=5)
    shutil.move(other / SHARD, path / SHARD)


def change_module(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda path: change_file(
        path / STATES, lambda tree: tree["module"].update({name: change(tree["module"][name])})
    )


PERMUTE = change_module("frozen", lambda tensor: tensor.t().contiguous().t())
EDIT = change_module("a", lambda tensor: tensor * 3)


RNG = Run(client_state={"rng": torch.arange(100)})
CUSTOM, SCHEDULED = Run(client_state={"mine": Restored()}), Run(lr_scheduler=REFUSED)


def damage_client_tensor(path: Path) -> None:
    flip(path / STATES, (path / STATES).read_bytes().index(torch.arange(100).numpy().tobytes()) + 17)


REFUSALS: dict[str, tuple[Run, Callable[[Path], None], type[Exception], str, dict[str, Any]]] = {
    "shard of another run": (Run(), replace_shard, CheckpointError, f"{SHARD}: its fp32 weights differ", {}),
    "client class": (CUSTOM, lambda _: None, UnsupportedError, "Restored", {"trust_pickle": True}),
    "client tensor": (RNG, damage_client_tensor, CheckpointError, "Nothing was changed", {"verify": "off"}),
    "scheduler": (SCHEDULED, lambda _: None, RemoteError, "of another kind", {}),
    "permuted": (Run(), PERMUTE, UnsupportedError, r"frozen \(module\): its memory is not contiguous", {}),
    "edited weight": (Run(), EDIT, CheckpointError, '"verify": "off"', {"verify": "off"}),
}
"""Saved run, change of its files, the refusal, and options with which the load succeeds."""


@pytest.mark.parametrize(("run", "change", "kind", "text", "accepted"), REFUSALS.values(), ids=REFUSALS)
def test_a_refused_load_leaves_the_engine_unchanged(
    run: Run, change: Callable[[Path], None], kind: type[Exception], text: str, accepted: dict[str, Any], tmp_path: Path
) -> None:
    path, state, rank = start(tmp_path, Topology(1, 3, "bf16"), run)
    change(path)
    index = open_for(path, rank)
    with pytest.raises(kind, match=text):
        run_load(index, rank)
    check_untouched(rank)
    if accepted:
        run_load(index, rank, config=UniversalConfig(**accepted))
        check_loaded([rank], state)


def test_one_error_lists_all_reasons_of_a_refusal(tmp_path: Path) -> None:
    path, _ = write(tmp_path, Topology(1, 2), run=Run(client_state={"mine": Restored()}))
    params = (*PLAIN.params[:-1], replace(PLAIN.params[-1], name="other"))
    rank = FakeTarget(replace(PLAIN, params=params), Topology(2), 0)
    rank.group_members = lambda: {0: ("a", "b")}  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError) as raised:
        run_load(open_for(path, rank), rank)
    for line, text in zip(str(raised.value).splitlines(), ("Restored", "other", "param groups"), strict=True):
        assert text in line
    check_untouched(rank)


def after_verification(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    check = Transfer.verify

    def check_and_go_on(transfer: Transfer) -> int:
        nbytes = check(transfer)
        then()
        return nbytes

    monkeypatch.setattr(Transfer, "verify", check_and_go_on)
    monkeypatch.setattr(transfer, "_PAUSE", 0.0)
    monkeypatch.setattr(transfer, "_ATTEMPTS", 1)


def keep_values(targets: list[FakeTarget]) -> list[torch.Tensor]:
    return [tensor.clone() for target in targets for tensor in list_tensors(target)]


def list_tensors(target: FakeTarget) -> list[torch.Tensor]:
    states = [value for entry in target.wrapped.state.values() for value in entry.values()]
    tensors = [flat.data for flat in target.flats] + [extra.data for extra in target.extras()]
    return [*tensors, *(state for state in states if isinstance(state, torch.Tensor))]


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_file_change_after_verification_is_detected_by_the_second_pass(
    passes: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load in a single pass has already read the old bytes and succeeds."""
    have_memory(monkeypatch, passes == 1)
    path, state, rank = start(tmp_path)
    take_a_step(rank.wrapped)
    index, engine = open_for(path, rank), FakeEngine(rank, steps=1)
    after_verification(monkeypatch, lambda: flip_bit(index, name, "fp32"))
    if passes == 1:
        run_load(index, rank, engine=engine)
        check_loaded([rank], state)
        return
    with pytest.raises(CheckpointError, match=r"states.pt: was written to .* must not be used") as caught:
        run_load(index, rank, engine=engine)
    assert find_state(engine).broken == str(caught.value)


class FailingReads:
    """Storage that fails at the n-th read after `arm`: `once`, or from then on."""

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
def test_a_read_error_leaves_the_engine_unchanged_or_blocks_it(
    trained: bool, much: bool, verify: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail one read of a load on two ranks, for growing read numbers until the load has no such read.

    By default every twelfth read, others in each case; all reads under `-m exhaustive`.
    """
    have_memory(monkeypatch, much)
    path, state = write(tmp_path, Topology(1, 3))
    config = UniversalConfig(verify=verify, threads=1)  # type: ignore[arg-type]
    monkeypatch.setattr(transfer, "_ATTEMPTS", 1)
    blocked, index = 0, open_for(path, make_targets(PLAIN, Topology(3, 2))[0])
    turn = (2 * trained + much) % 3 + 3 * (verify == "off")
    step = stride(12)
    for number in range(1 + 2 * turn % step, 999, step):
        targets = make_targets(PLAIN, Topology(3, 2))
        if trained:
            for target in targets:
                take_a_step(target.wrapped)
        before = keep_values(targets)
        engines = [FakeEngine(target, steps=int(trained)) for target in targets]
        with monkeypatch.context() as patch:
            failing = FailingReads(patch, number, once=True)
            failing.arm()
            work = lambda rank, comm: run_load(index, targets[rank], comm, config, engine=engines[rank])  # noqa: B023, E731
            results = World(2).run(work)
        if failing.count < number:
            break
        texts = {str(result) for result in results}
        assert len(texts) == 1 and "states.pt: cannot be read at byte" in texts.pop()
        same = all(now.equal(then) for now, then in zip(keep_values(targets), before, strict=True))
        messages = [find_state(engine).broken for engine in engines]
        assert same if messages == ["", ""] else messages == [str(result) for result in results]
        blocked += not same
    check_loaded(targets, state)
    few = 0 if trained else sum(len(target.extras()) for target in targets)  # these cannot be recomputed
    assert number > 8 and (blocked <= few) == much


def test_a_failed_read_of_the_second_pass_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    have_memory(monkeypatch, False)
    path, state = write(tmp_path, ZERO1)
    targets = make_targets(PLAIN, Topology(3, 2))
    for target in targets:
        take_a_step(target.wrapped)
    index, failing = open_for(path, targets[0]), FailingReads(monkeypatch, 2, once=True)
    after_verification(monkeypatch, failing.arm)
    monkeypatch.setattr(transfer, "_ATTEMPTS", 2)
    run_ranks(2, lambda rank, comm: run_load(index, targets[rank], comm, UniversalConfig(threads=1)))
    check_loaded(targets, state)
    assert "retrying" in caplog.text


def test_a_failed_read_releases_its_memory_before_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = iter(range(3))
    monkeypatch.setattr(transfer, "_PAUSE", 0.0)
    with without_collector() as failing:

        def read(*_: Any) -> list[Any]:
            assert failing.held == 0
            return [] if next(attempts) % 3 == 2 else failing.fail(CheckpointError("cannot be read."))

        one = SimpleNamespace(_try_second_pass=read)
        assert Transfer._run_second_pass(one) == []  # type: ignore[arg-type]
        assert not list(attempts)


def test_a_complete_load_unblocks_a_half_loaded_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(FakeTarget, "refresh_copies", KeyboardInterrupt), (Transfer, "undo", ZeroDivisionError)],
)
def test_an_engine_is_blocked_if_refresh_copies_or_undo_raises(
    owner: type, name: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, rank = start(tmp_path)
    index, engine = open_for(path, rank), FakeEngine(rank)
    if owner is Transfer:
        flip_bit(index, "a", "fp32")
    monkeypatch.setattr(owner, name, mock.Mock(side_effect=error))
    with pytest.raises(error):
        run_load(index, rank, engine=engine)
    assert "must not be used" in find_state(engine).broken
