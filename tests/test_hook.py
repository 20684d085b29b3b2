"""What runs in the place of DeepSpeed's methods; without an engine."""

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
from deepspeed_ucp.engine_state import KEY, Carried, carry, get_config
from deepspeed_ucp.errors import CheckpointError, DiskFullError, MismatchError, UcpError
from deepspeed_ucp.sources.files import SEAL
from tests.synth import Model, Param, Topology, build_files, random_state, write_checkpoint, write_files

MODEL = Model((Param("a", (3, 5)),))


class FakeEngine(SimpleNamespace):
    """An engine that only has its configuration."""

    optimizer = None
    global_rank, global_steps = 0, 3

    def use_node_local_storage(self) -> bool:
        return False

    def load_universal_checkpoint(self) -> bool:
        return False


def call(engine: FakeEngine, *args: Any, **kwargs: Any) -> list[Any]:
    """What DeepSpeed's own load was called with."""
    seen: list[Any] = []

    def original(engine: Any, load_dir: Any, **options: Any) -> tuple[str, dict[str, Any]]:
        seen.append((load_dir, options))
        return "path", {"client": 1}

    assert hook._load_checkpoint(original, engine, *args, **kwargs) == ("path", {"client": 1})
    return seen


def test_with_the_plugin_off_deepspeeds_own_load_gets_every_argument() -> None:
    engine = FakeEngine(_config=SimpleNamespace(ucp_config=None))
    (seen,) = call(engine, "dir", "tag", load_module_strict=False, load_optimizer_states=False, new_option=3)
    assert seen == (
        "dir",
        {
            "tag": "tag",
            "load_module_strict": False,
            "load_optimizer_states": False,
            "load_lr_scheduler_states": True,
            "load_module_only": False,
            "custom_load_fn": None,
            "new_option": 3,
        },
    )
    assert not hasattr(engine, "ucp_report")


@pytest.mark.parametrize("late", [False, True])
def test_an_error_of_deepspeeds_own_load_says_that_the_plugin_is_off(
    late: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1, 2), tag="tag")
    facts: dict[str, Any] = {"data-parallel ranks": 3}
    config = SimpleNamespace(_param_dict={}, **({} if late else {"ucp_config": None}))
    told = _fail(FakeEngine(_config=config), tmp_path, facts) or caplog.text
    assert "data-parallel ranks 2 → 3" in told
    assert ("made before deepspeed_ucp was imported" in told) is late
    assert '"checkpoint": {"universal": true}' in told


@pytest.mark.parametrize("checkpoint", [{"universal": False}, {}])
def test_other_errors_stay_as_they_are(checkpoint: dict[str, Any], tmp_path: Path) -> None:
    """Of the same topology, and of an engine that has the plugin off in so many words."""
    write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1, 2), tag="tag")
    engine = FakeEngine(_config=SimpleNamespace(_param_dict={"checkpoint": checkpoint}, ucp_config=None))
    assert not _fail(engine, tmp_path, {"data-parallel ranks": 3 if checkpoint else 2})
    assert not _fail(engine, tmp_path / "nowhere", {"data-parallel ranks": 3})


def _fail(engine: FakeEngine, folder: Path, facts: dict[str, Any]) -> str:
    """The notes of the error of a load that fails, in an engine with these facts."""

    def original(*_: Any, **__: Any) -> None:
        raise AssertionError("its own words")

    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    own = lambda _, tag: (*(str(Path(tag) / name) for name in names), facts)  # noqa: E731
    with (
        mock.patch("deepspeed_ucp.load.disabled.describe_own_files", own),
        pytest.raises(AssertionError, match="its own words") as raised,
    ):
        hook._load_checkpoint(original, engine, str(folder), "tag")
    return "".join(getattr(raised.value, "__notes__", []))


def test_an_engine_from_before_the_import_has_the_plugin_off() -> None:
    assert get_config(FakeEngine(_config=SimpleNamespace())) is None


def test_nothing_to_resume_is_deepspeeds_business(tmp_path: Path) -> None:
    engine = FakeEngine(_config=SimpleNamespace(ucp_config=UniversalConfig()))
    assert len(call(engine, str(tmp_path))) == 1
    assert (engine.ucp_report.direct, engine.ucp_report.reason) == (False, "nothing to resume")


def test_an_engine_whose_data_cannot_go_on_is_not_used() -> None:
    """It is filled by then."""

    class Stepping(FakeEngine):
        def step(self) -> str:
            return "stepped"

    engine = Stepping(_config=SimpleNamespace(ucp_config=None))

    def refuse(_: Any) -> None:
        raise MismatchError("other samples")

    def load(*_: Any, **__: Any) -> tuple[str, dict[str, Any]]:
        return "path", {KEY: {"data": {}}}

    carry(engine, "data", Carried(dict, refuse))
    with pytest.raises(MismatchError, match=r"other samples.*must not be used"):
        hook._load_checkpoint(load, engine, "dir", "tag")
    with pytest.raises(CheckpointError, match="other samples"):
        engine.step()
    carry(engine, "data", Carried(dict, lambda _: None))
    assert hook._load_checkpoint(load, engine, "dir", "tag") == ("path", {})
    assert engine.step() == "stepped"


@pytest.mark.parametrize("on", [False, True])
def test_with_the_plugin_off_ranks_tell_each_other_nothing(on: bool, tmp_path: Path) -> None:
    """DeepSpeed's own load may be called on some ranks alone."""
    engine = FakeEngine(_config=SimpleNamespace(ucp_config=UniversalConfig() if on else None))
    with mock.patch("deepspeed_ucp.engine_state.connect") as connect:
        connect.return_value.rank, connect.return_value.each.return_value = 0, [[]]
        call(engine, str(tmp_path))
    assert connect.return_value.each.called is on


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
def test_who_loads_is_shown_unless_the_script_chose_a_level(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A save in which DeepSpeed writes the files of ``folder``."""

    def original(_engine: Any, save_dir: Any, tag: Any, *args: Any) -> bool:
        assert (save_dir, args) == (str(folder.parent), ({"client": 1},))
        write_checkpoint(folder.parent, MODEL, random_state(MODEL, 0), Topology(1, 2), tag=folder.name)
        return True

    assert hook._save_checkpoint(original, engine, str(folder.parent), tag, {"client": 1})


def make_engine(**options: Any) -> FakeEngine:
    return FakeEngine(
        _config=SimpleNamespace(ucp_config=UniversalConfig(**options)),
        checkpoint_engine=SimpleNamespace(is_decoupled=lambda: False),
        global_steps=7,
    )


def test_a_save_is_sealed_and_a_later_one_without_seal_removes_it(tmp_path: Path) -> None:
    save(make_engine(), tmp_path / "tag")
    assert not (tmp_path / "tag" / SEAL).exists()
    save(make_engine(seal=True), tmp_path / "tag")
    assert (tmp_path / "tag" / SEAL).exists()
    save(make_engine(), tmp_path / "tag")
    assert not (tmp_path / "tag" / SEAL).exists()
    save(make_engine(seal=True), tmp_path / "global_step7", tag=None)
    assert (tmp_path / "global_step7" / SEAL).exists()


def test_a_writer_of_its_own_seals_when_it_is_done(tmp_path: Path) -> None:
    engine, told = make_engine(seal=True), SimpleNamespace(save_dir=str(tmp_path), tag="tag")
    engine.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: True, get_commit_info=lambda: told)
    save(engine, tmp_path / "tag")
    assert not (tmp_path / "tag" / SEAL).exists()
    hook._commit_save(lambda _: None, engine)
    assert (tmp_path / "tag" / SEAL).exists()


def test_a_pipelines_step_comes_after_the_end_of_its_save() -> None:
    """Its writer may still read what the step changes, and DeepSpeed's pipelines never see to its end."""
    done: list[str] = []
    engine = make_engine()
    engine.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: True)
    engine._commit_decoupled_checkpoint = lambda: done.append("commit")
    hook._take_model_step(lambda *_: done.append("step"), engine, None)
    assert done == ["commit", "step"]
    engine._config.ucp_config = None
    hook._take_model_step(lambda *_: done.append("step"), engine, None)
    assert done == ["commit", "step", "step"]


def test_a_save_that_cannot_be_sealed_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(seal=True)
    assert hook._save_checkpoint(lambda *_: True, engine, str(tmp_path / "nowhere"), "tag")
    assert "is not sealed" in caplog.text


class LateWriter:
    """Has the files of a save written later, by something that is not DeepSpeed."""

    def is_decoupled(self) -> bool:
        return False


@pytest.mark.parametrize("place", ["engine", "torch.save"])
def test_a_save_whose_files_come_later_is_sealed_when_they_are_there(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Looked at 1, 2, 4, … steps later; what writes them is named."""
    engine, folder, looks = make_engine(seal=True), tmp_path / "tag", list[object]()
    engine.checkpoint_engine = LateWriter() if place == "engine" else None
    name = f"{__name__}.LateWriter"
    if place != "engine":
        monkeypatch.setattr(torch, "save", LateWriter().is_decoupled)
        name += ".is_decoupled"
    seal = sealing.seal_folder
    monkeypatch.setattr(sealing, "seal_folder", lambda *given, **how: looks.append(given) or seal(*given, **how))

    def step(times: int) -> int:
        before = len(looks)
        for _ in range(times):
            hook._take_model_step(lambda *_: None, engine)
        return len(looks) - before

    assert hook._save_checkpoint(lambda *_: True, engine, str(tmp_path), "tag")
    (told,) = caplog.messages
    assert told.startswith(f"{folder}: is not sealed: {name} writes its files after the save. The step that finds all")
    monkeypatch.undo()
    monkeypatch.setattr(sealing, "seal_folder", lambda *given, **how: looks.append(given) or seal(*given, **how))
    assert step(5) == 3
    write_checkpoint(tmp_path, MODEL, random_state(MODEL, 0), Topology(1, 2), tag="tag")
    assert (step(2), (folder / SEAL).exists()) == (0, False)
    assert (step(1), (folder / SEAL).exists()) == (1, True)
    assert step(9) == 0 and len(caplog.messages) == 1


def test_a_save_whose_files_never_come_is_told_at_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(seal=True)
    engine.checkpoint_engine = LateWriter()
    assert hook._save_checkpoint(lambda *_: True, engine, str(tmp_path), "first")
    caplog.clear()
    save(engine, tmp_path / "tag")
    (told,) = caplog.messages
    assert f"{tmp_path}/first: is not sealed: {__name__}.LateWriter writes it, and had not ended by now: " in told
    assert not (tmp_path / "first").exists() and (tmp_path / "tag" / SEAL).exists()


def test_a_save_that_cannot_be_sealed_does_not_keep_the_seal_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which a load would refuse it."""

    def fail(*_: Any, **__: Any) -> None:
        raise DiskFullError("no room for the seal")

    save(make_engine(seal=True), tmp_path / "tag")
    monkeypatch.setattr(sealing, "seal_folder", fail)
    save(make_engine(seal=True), tmp_path / "tag")
    assert not (tmp_path / "tag" / SEAL).exists()


def test_a_save_to_a_url_is_told_and_touches_nothing_behind_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "remove_seal", lambda folder: pytest.fail(f"removed the seal of {folder}"))
    assert hook._save_checkpoint(lambda *_: True, make_engine(), "s3://bucket/run", "tag")
    assert "s3://bucket/run: DeepSpeed saves to local folders alone" in caplog.text


@pytest.mark.parametrize(("kept", "stage"), [(False, 0), (True, 0), (False, 1)])
def test_a_release_that_drops_the_states_is_told_of_at_the_save(
    kept: bool, stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By what it has written: 0.17.6 to 0.18.4 take every engine in bf16 for one with files of optimizer states."""
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


def test_with_the_plugin_off_a_save_is_left_alone(tmp_path: Path) -> None:
    engine = FakeEngine(_config=SimpleNamespace(ucp_config=None), checkpoint_engine=SimpleNamespace(), global_steps=7)
    save(engine, tmp_path / "tag")
    assert not (tmp_path / "tag" / SEAL).exists()


@pytest.mark.parametrize("local_rank", ["0", "3"])
@pytest.mark.parametrize("echo", [False, True], ids=["first-rank", "others"])
@pytest.mark.parametrize("fault", [False, True], ids=["ours", "a-bug"])
@pytest.mark.parametrize("load", [False, True], ids=["elsewhere", "a-load"])
def test_an_error_of_all_ranks_is_printed_in_full_once(
    load: bool,
    fault: bool,
    echo: bool,
    local_rank: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 prints it with the script's calls, one rank of each other node a line. A bug keeps its trace."""
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
        calls = [line for line in printed.splitlines() if line.startswith("  File")]
        assert calls and all(__file__ in line for line in calls)


def test_other_errors_are_printed_as_ever(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_release_that_setup_cfg_does_not_admit_is_told_once(release: str, caplog: pytest.LogCaptureFixture) -> None:
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[1] / "setup.cfg")
    requirements = map(Requirement, filter(None, setup["options"]["install_requires"].splitlines()))
    (admitted,) = (each.specifier for each in requirements if each.name == "deepspeed")
    hook.warn_untested.cache_clear()
    for _ in range(2):
        hook.warn_untested(release)
    assert len(caplog.messages) == (0 if admitted.contains(release) else 1)
    assert all(text.startswith(f"DeepSpeed {release} ") for text in caplog.messages)
