"""The direct load against a stand-in engine: values, counters and states; several ranks."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine.parallel import ParallelState
from deepspeed_ucp.errors import MismatchError, RemoteError, StorageError, UnsupportedError
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
from tests.support.covering import cover, params
from tests.support.curriculum import make_sampler
from tests.support.damage import write_checksums
from tests.support.direct import (
    PLAIN,
    STATES,
    ZERO1,
    FakeEngine,
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
from tests.support.ranks import World, current_rank, run_ranks
from tests.support.reshard import SENTINEL, FakeTarget, make_targets, open_for, take_a_step
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
PLACED: Any = SimpleNamespace(parallel=ParallelState(0, 1, 0, 1, 0, 1))


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
    "asks its extensions": (direct, "_check_extensions"),
    "looks for its state file": (direct, "_find_own_file"),
    "lists its claims": (transfer, "list_claims"),
    "plans its blocks": (transfer, "make_owner_plan"),
    "plans its reads": (transfer, "make_plan"),
    "prepares its reads": (transfer, "choose_device_copies"),
    "reads": (Transfer, "_execute"),
    "fills its buffers": (FillPlan, "commit"),
    "makes its copies": (FakeTarget, "refresh_copies"),
}
"""Functions of a load."""
COLLECTIVE = {"fills its buffers": "refresh_copies", "makes its copies": "gather_copies"}
"""After the engine has changed: the next collective call of DeepSpeed."""


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MemoryError(), RemoteError, "out of memory"),
        (OSError(5, "Input/output error"), StorageError, "a file: Input/output error (EIO)"),
    ],
    ids=["memory", "storage"],
)
@pytest.mark.parametrize("where", FAILING)
def test_a_failure_on_one_rank_is_raised_on_all_ranks(
    where: str, error: Exception, kind: type, text: str, culprit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (owner, name), collective = FAILING[where], COLLECTIVE.get(where, "")
    path, _ = write(tmp_path, ZERO1)
    targets = make_targets(PLAIN, Topology(3, 3))
    index, work, reached = open_for(path, targets[0]), getattr(owner, name), list[int]()

    def fail(*args: Any) -> Any:
        if culprit == (args[0].comm.rank if name == "_execute" else current_rank()):  # other threads read
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
