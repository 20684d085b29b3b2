"""Replacements of DeepSpeed's methods, without an engine."""

from __future__ import annotations

import configparser
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.requirements import Requirement

from deepspeed_ucp import hook, sealing, uncaught
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine_state import KEY, Carried, carry
from deepspeed_ucp.errors import CheckpointError, DiskFullError, MismatchError, UcpError
from deepspeed_ucp.formats.deepspeed.files import SEAL
from tests.support.direct import UpstreamEngine
from tests.synth import Model, Param, Topology, build_files, random_state, write_checkpoint, write_files

MODEL = Model((Param("a", (3, 5)),))


class FakeEngine(UpstreamEngine, SimpleNamespace):
    """An engine that has only a configuration."""

    global_rank, global_steps = 0, 3


def call(engine: FakeEngine, *args: Any, **kwargs: Any) -> mock.Mock:
    """Call the hook of a load; return the mock of DeepSpeed's load."""
    original = mock.Mock(return_value=("path", {"client": 1}))
    assert hook._load_checkpoint(original, engine, *args, **kwargs) == ("path", {"client": 1})
    return original


def test_a_load_with_the_plugin_off_passes_all_arguments_to_deepspeed() -> None:
    engine = FakeEngine(_config=SimpleNamespace(ucp_config=None))
    given = {"load_module_strict": False, "load_optimizer_states": False, "new_option": 3}
    others = {"load_lr_scheduler_states": True, "load_module_only": False, "custom_load_fn": None}
    load = call(engine, "dir", "tag", **given)
    load.assert_called_once_with(engine, load_dir="dir", tag="tag", **given, **others)
    assert not hasattr(engine, "ucp_report")


@pytest.mark.parametrize(
    ("config", "folder", "ranks", "notes"),
    [
        ({"_param_dict": {}, "ucp_config": None}, ".", 3, True),
        ({"_param_dict": {}}, ".", 3, "made before deepspeed_ucp was imported"),
        ({"_param_dict": {"checkpoint": {"universal": False}}, "ucp_config": None}, ".", 3, False),
        ({"_param_dict": {"checkpoint": {}}, "ucp_config": None}, ".", 2, False),
        ({"_param_dict": {"checkpoint": {}}, "ucp_config": None}, "nowhere", 3, False),
    ],
    ids=["off", "made-early", "off-on-purpose", "same-topology", "no-checkpoint"],
)
def test_an_error_of_deepspeeds_load_recommends_the_plugin_if_it_would_help(
    config: dict[str, Any], folder: str, ranks: int, notes: bool | str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1, 2), tag="tag")
    engine, facts = FakeEngine(_config=SimpleNamespace(**config)), {"data-parallel ranks": ranks}
    fail = mock.Mock(side_effect=AssertionError("its own words"))
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    own = lambda _, tag: (*(str(Path(tag) / name) for name in names), facts)  # noqa: E731
    with (
        mock.patch("deepspeed_ucp.load.resume.describe_own_files", own),
        pytest.raises(AssertionError, match="its own words") as raised,
    ):
        hook._load_checkpoint(fail, engine, str(tmp_path / folder), "tag")
    found = "".join(getattr(raised.value, "__notes__", []))
    if notes:
        assert "data-parallel ranks 2 → 3" in found and '"checkpoint": {"universal": true}' in found
        assert ("made before deepspeed_ucp was imported" in found) is (notes is not True)
    else:
        assert not found


def test_an_engine_is_blocked_if_its_data_cannot_be_restored() -> None:
    """At that point its weights have been loaded."""
    engine = FakeEngine(_config=SimpleNamespace(ucp_config=None))
    load: Any = lambda *_, **__: ("path", {KEY: {"data": {}}})  # noqa: E731
    carry(engine, "data", Carried(dict, mock.Mock(side_effect=MismatchError("other samples"))))
    with pytest.raises(MismatchError, match=r"other samples.*must not be used"):
        hook._load_checkpoint(load, engine, "dir", "tag")
    with pytest.raises(CheckpointError, match="other samples"):
        engine.step()
    carry(engine, "data", Carried(dict, lambda _: None))
    assert hook._load_checkpoint(load, engine, "dir", "tag") == ("path", {})
    assert engine.step() == "stepped"


@pytest.mark.parametrize("on", [False, True])
def test_a_load_with_the_plugin_off_is_not_collective(on: bool, tmp_path: Path) -> None:
    """A single rank may call DeepSpeed's load, which also gets a folder without checkpoint."""
    engine = FakeEngine(_config=SimpleNamespace(ucp_config=UniversalConfig() if on else None))
    with mock.patch("deepspeed_ucp.engine_state.connect") as connect:
        connect.return_value.rank, connect.return_value.gather_results.return_value = 0, [[]]
        assert call(engine, str(tmp_path)).call_count == 1
    assert connect.return_value.gather_results.called is on
    assert not on or (engine.ucp_report.direct, engine.ucp_report.reason) == (False, "nothing to resume")


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
def test_info_lines_are_shown_unless_the_script_has_set_a_level(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("deepspeed_ucp")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", False)
    before = log.level
    try:
        log.setLevel(level)
        for _ in range(2):
            hook.show_decisions()
            assert len(log.handlers) == 1
            assert log.isEnabledFor(logging.INFO) == (level == logging.NOTSET)
    finally:
        log.setLevel(before)


def save(engine: FakeEngine, folder: Path, *, tag: str | None = "tag") -> None:
    """Save through the hook; DeepSpeed's stand-in writes the files of ``folder``."""

    def original(_engine: Any, save_dir: Any, tag: Any, *args: Any) -> bool:
        assert (save_dir, args) == (str(folder.parent), ({"client": 1},))
        write_checkpoint(folder.parent, MODEL, random_state(MODEL, 0), Topology(1, 2), tag=folder.name)
        return True

    assert hook._save_checkpoint(original, engine, str(folder.parent), tag, {"client": 1})


def save_nothing(engine: FakeEngine, folder: object) -> None:
    """Save through the hook; DeepSpeed's stand-in writes no files."""
    assert hook._save_checkpoint(lambda *_: True, engine, str(folder), "tag")


def make_engine(**options: Any) -> FakeEngine:
    return FakeEngine(
        _config=SimpleNamespace(ucp_config=UniversalConfig(**options)),
        checkpoint_engine=SimpleNamespace(is_decoupled=lambda: False),
        global_steps=7,
    )


def test_a_save_is_sealed_and_a_later_one_without_seal_removes_it(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """A load would refuse the save because of the older seal."""
    for options in ({}, {"seal": True}, {}):
        save(make_engine(**options), tmp_path / "tag")
        assert (tmp_path / "tag" / SEAL).exists() == bool(options)
    save(make_engine(seal=True), tmp_path / "global_step7", tag=None)
    assert (tmp_path / "global_step7" / SEAL).exists()
    off = FakeEngine(_config=SimpleNamespace(ucp_config=None), checkpoint_engine=SimpleNamespace())
    save(off, tmp_path / "off")
    assert not (tmp_path / "off" / SEAL).exists()
    monkeypatch.setattr(sealing, "seal_folder", mock.Mock(side_effect=DiskFullError("no room for the seal")))
    save(make_engine(seal=True), tmp_path / "global_step7", tag=None)
    assert not (tmp_path / "global_step7" / SEAL).exists() and "is not sealed" in caplog.text


def test_a_save_passes_all_positional_arguments_to_deepspeed(tmp_path: Path) -> None:
    seen, given = list[object](), ({"client": 1}, False, True, "of a later release")
    hook._save_checkpoint(lambda _engine, *args: seen.append(args[1:]), make_engine(), str(tmp_path), "tag", *given)
    assert seen == [("tag", *given)]


def test_a_save_by_deepspeeds_decoupled_writer_is_sealed_at_its_commit(tmp_path: Path) -> None:
    engine, info = make_engine(seal=True), SimpleNamespace(save_dir=str(tmp_path), tag="tag")
    engine.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: True, get_commit_info=lambda: info)
    save(engine, tmp_path / "tag")
    assert not (tmp_path / "tag" / SEAL).exists()
    hook._commit_save(lambda _: None, engine)
    assert (tmp_path / "tag" / SEAL).exists()


def test_a_step_of_a_pipeline_waits_for_its_save_and_notifies_carried_states() -> None:
    """The writer may still read tensors that the step changes, and DeepSpeed's pipelines do not wait."""
    engine, done = make_engine(), list[Any]()
    engine.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: True)
    engine._commit_decoupled_checkpoint = lambda: done.append("commit")
    carry(engine, "data", Carried(dict, done.append, lambda: done.append("carried")))
    hook._take_model_step(lambda *_: done.append("step"), engine, None)
    engine._config.ucp_config = None
    hook._take_model_step(lambda *_: done.append("step"), engine, None)
    assert done == ["commit", "step", "carried", "step", "carried"]


class LateWriter:
    """A checkpoint engine of another library that writes the files of a save later."""

    def is_decoupled(self) -> bool:
        return False


@pytest.mark.parametrize("place", ["engine", "torch.save"])
def test_a_save_is_sealed_after_a_late_writer_has_finished(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files are checked 1, 2, 4, … steps later, and the log names their writer."""
    engine, folder, checks = make_engine(seal=True), tmp_path / "tag", list[object]()
    engine.checkpoint_engine = LateWriter() if place == "engine" else None
    name = f"{__name__}.LateWriter"
    if place != "engine":
        monkeypatch.setattr(torch, "save", LateWriter().is_decoupled)
        name += ".is_decoupled"
    seal = sealing.seal_folder

    def step(times: int) -> int:
        before = len(checks)
        for _ in range(times):
            hook._take_model_step(lambda *_: None, engine)
        return len(checks) - before

    save_nothing(engine, tmp_path)
    (message,) = caplog.messages
    assert message.startswith(f"{folder}: is not sealed: {name} writes its files after the save. The step that finds")
    monkeypatch.undo()
    monkeypatch.setattr(sealing, "seal_folder", lambda *given, **how: checks.append(given) or seal(*given, **how))
    assert step(5) == 3
    write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1, 2), tag="tag")
    assert (step(2), (folder / SEAL).exists()) == (0, False)
    assert (step(1), (folder / SEAL).exists()) == (1, True)
    assert step(9) == 0 and len(caplog.messages) == 1


def test_an_unfinished_save_is_a_warning_at_the_next_save(tmp_path: Path, caplog: Any) -> None:
    engine = make_engine(seal=True)
    engine.checkpoint_engine = LateWriter()
    save_nothing(engine, tmp_path / "first")
    caplog.clear()
    save(engine, tmp_path / "tag")
    (message,) = caplog.messages
    assert f"{tmp_path}/first/tag: is not sealed: {__name__}.LateWriter writes it, and had not ended" in message
    assert not (tmp_path / "first").exists() and (tmp_path / "tag" / SEAL).exists()


def test_a_save_to_a_url_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "remove_seal", lambda folder: pytest.fail(f"removed the seal of {folder}"))
    save_nothing(make_engine(), "s3://bucket/run")
    assert "s3://bucket/run: DeepSpeed saves to local folders alone" in caplog.text


@pytest.mark.parametrize(("kept", "stage"), [(False, 0), (True, 0), (False, 1)])
def test_optimizer_states_that_deepspeed_does_not_save_are_a_warning(
    kept: bool, stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSpeed 0.17.6 to 0.18.4 write no optimizer states for some engines in bf16."""
    wrapper = type("FP16_UnfusedOptimizer", (), {})

    def original(*_: Any) -> bool:
        topology = Topology(0, 1, "bf16", "unfused")
        files = build_files(MODEL, random_state(MODEL, 0, precision="bf16"), topology)
        files["mp_rank_00_model_states.pt"].update({} if kept else {"optimizer": None})
        write_files(tmp_path / "tag", files)
        return True

    engine = make_engine()
    engine.optimizer, engine.zero_optimization_stage = wrapper(), lambda: stage
    assert hook._save_checkpoint(original, engine, str(tmp_path), "tag")
    assert ("has saved no optimizer states" in caplog.text) == (not kept)


@pytest.mark.parametrize("local_rank", ["0", "3"])
@pytest.mark.parametrize("echo", [False, True], ids=["first-rank", "others"])
@pytest.mark.parametrize("fault", [False, True], ids=["ours", "a-bug"])
@pytest.mark.parametrize("load", [False, True], ids=["elsewhere", "a-load"])
def test_an_error_of_all_ranks_is_printed_in_full_once(
    load: bool, fault: bool, echo: bool, local_rank: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Rank 0 prints it with the script's frames, one rank of each other node as a line. Bugs keep their traceback."""
    engine = FakeEngine(_config=SimpleNamespace(ucp_config=UniversalConfig()))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(uncaught, "_HEAD_START", 0)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", local_rank)

    def fail() -> None:
        raise KeyError("oh") if fault else CheckpointError("x.pt: " + "long " * 99, "y.pt: is missing. The end.")

    def resume(*_: Any, **__: Any) -> None:
        try:
            Comm().run(fail)
        except UcpError as error:
            error.echo = echo
            raise

    monkeypatch.setattr(hook, "resume", resume)
    uncaught.shorten_uncaught()
    with pytest.raises(UcpError) as caught:
        hook._load_checkpoint(mock.Mock(), engine, "dir") if load else resume()
    sys.excepthook(caught.type, caught.value, caught.tb)
    printed = capsys.readouterr().err
    assert ("in fail" in printed) == fault
    if fault:
        assert printed.count("Traceback") == 2
    elif echo:
        assert printed.count("\n") == (local_rank == "0") and len(printed) < 300
        assert ("(all of it on rank 0)" in printed) == (local_rank == "0")
    else:
        assert printed.count("Traceback") == 1 and printed.endswith("The end.\n(This error ended ranks 0-7.)\n")


def test_other_errors_keep_pythons_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    uncaught.shorten_uncaught()
    shortened = sys.excepthook
    uncaught.shorten_uncaught()
    assert sys.excepthook is shortened
    try:
        raise CheckpointError("this rank's own")
    except CheckpointError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "release", ["0.15.4", "0.16.0", "0.18.6", "0.18.7", "0.18.9", "0.19.0", "0.19.8+cu124", "0.20.0", "0.20.0rc1"]
)
def test_an_unsupported_release_is_a_warning(release: str, caplog: pytest.LogCaptureFixture) -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[1] / "setup.cfg")
    requirements = map(Requirement, filter(None, setup["options"]["install_requires"].splitlines()))
    (admitted,) = (each.specifier for each in requirements if each.name == "deepspeed")
    hook.warn_untested.cache_clear()
    for _ in range(2):
        hook.warn_untested(release)
    assert len(caplog.messages) == (0 if admitted.contains(release) else 1)
    assert all(text.startswith(f"DeepSpeed {release} ") for text in caplog.messages)
