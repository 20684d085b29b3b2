"""``ds_ucp run``: an untouched script under every launcher."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import deepspeed_ucp
from deepspeed_ucp import hook
from deepspeed_ucp.cli.main import main, split_launcher_arguments
from deepspeed_ucp.cli.run import run_script
from deepspeed_ucp.config import UniversalConfig

SCRIPT = """
import json, sys, types
from deepspeed_ucp import hook
import neighbour
silent = types.SimpleNamespace(_param_dict={}, train_batch_size=None, train_micro_batch_size_per_gpu=None,
                               gradient_accumulation_steps=None, world_size=1)
hook._configure_train_batch_size(lambda config: None, silent)
with open(sys.argv[-1], "w") as out:
    json.dump([__name__, sys.argv, sys.path[0], bool(silent.ucp_config), hook.is_installed(), neighbour.VALUE], out)
"""


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a run changes for its process."""
    monkeypatch.setattr(sys, "argv", ["ds_ucp"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    log = logging.getLogger("deepspeed_ucp")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)
    sys.modules.pop("neighbour", None)
    deepspeed_ucp.install(default_on=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training script with a module of its own beside it."""
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def read(path: Path) -> list[object]:
    import json

    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("argv", "launcher", "ours"),
    [
        (["run", "x.py", "--lr", "1"], [], ["run", "x.py", "--lr", "1"]),
        (["--local_rank=3", "run", "x.py"], ["--local_rank=3"], ["run", "x.py"]),
        (["--local-rank=3", "run", "x.py"], ["--local-rank=3"], ["run", "x.py"]),
        (["--local_rank", "3", "run", "x.py"], ["--local_rank", "3"], ["run", "x.py"]),
        (["run", "x.py", "--local_rank=3"], [], ["run", "x.py", "--local_rank=3"]),
        (["--local_rank"], ["--local_rank"], []),
        ([], [], []),
    ],
)
def test_the_launchers_argument_is_told_from_ours(argv: list[str], launcher: list[str], ours: list[str]) -> None:
    assert split_launcher_arguments(argv) == (launcher, ours)


def test_a_script_runs_as_under_python_with_the_plugin_on(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["--local_rank=1", "run", str(script), "--lr", "1e-3", str(out)]) == 0
    name, argv, path, switched_on, installed, value = read(out)
    assert name == "__main__"
    assert argv == [str(script), "--local_rank=1", "--lr", "1e-3", str(out)]
    assert path == str(tmp_path)
    assert (switched_on, installed, value) == (True, True, 7)


def test_options_behind_the_script_are_the_scripts(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    main(["run", str(script), "-m", "--help", "--", str(out)])
    assert read(out)[1] == [str(script), "-m", "--help", "--", str(out)]


def test_a_module_runs_as_under_python_m(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out.json"
    main(["run", "-m", "train", str(out)])
    name, argv, *_ = read(out)
    assert name == "__main__"
    assert argv == [str(script), str(out)]


def test_the_scripts_exit_code_and_errors_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(SystemExit) as end:
        main(["run", str(tmp_path / "ends.py")])
    assert end.value.code == 3
    (tmp_path / "fails.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        run_script(str(tmp_path / "fails.py"), [], is_module=False)


def test_decisions_are_shown(script: Path, tmp_path: Path) -> None:
    logging.getLogger("deepspeed_ucp").handlers.clear()
    main(["run", str(script), str(tmp_path / "out.json")])
    assert logging.getLogger("deepspeed_ucp").isEnabledFor(logging.INFO)
    assert len(logging.getLogger("deepspeed_ucp").handlers) == 1
    main(["run", str(script), str(tmp_path / "out.json")])
    assert len(logging.getLogger("deepspeed_ucp").handlers) == 1


@pytest.mark.parametrize("argv", [[], ["run"], ["--local_rank=0"], ["fly", "x.py"]], ids=str)
def test_a_wrong_command_line_shows_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert "usage: ds_ucp" in capsys.readouterr().err


def test_help_names_the_launchers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    assert all(launcher in shown for launcher in ("deepspeed --no_python", "torchrun", "mpirun"))


class FakeConfig:
    """As much of a DeepSpeedConfig as the batch hook looks at."""

    def __init__(
        self, section: object, train: int | None = None, micro: int | None = None, gas: int | None = None
    ) -> None:
        self._param_dict = {"checkpoint": {"universal": section}} if section != "silent" else {}
        self.train_batch_size, self.train_micro_batch_size_per_gpu = train, micro
        self.gradient_accumulation_steps, self.world_size = gas, 4
        self.ucp_config: UniversalConfig | None = None
        self.configured = False


def configure(config: FakeConfig) -> FakeConfig:
    hook._configure_train_batch_size(lambda seen: setattr(seen, "configured", True), config)
    assert config.configured
    return config


def test_ds_ucp_run_switches_engines_on_that_say_nothing() -> None:
    assert configure(FakeConfig("silent")).ucp_config is None
    deepspeed_ucp.install(default_on=True)
    assert configure(FakeConfig("silent")).ucp_config == UniversalConfig()
    assert configure(FakeConfig(False)).ucp_config is None


def test_the_batch_is_refused_only_where_the_plugin_is_on() -> None:
    assert configure(FakeConfig(False, 63, 4, 4)).train_batch_size == 63
    with pytest.raises(deepspeed_ucp.ConfigError, match="train_batch_size 63 cannot be made by 4"):
        configure(FakeConfig(True, 63, 4, 4))


def test_preserve_batch_size_changes_the_accumulation() -> None:
    kept = configure(FakeConfig({"preserve_batch_size": True}, 64, 4, 2))
    assert (kept.train_batch_size, kept.train_micro_batch_size_per_gpu, kept.gradient_accumulation_steps) == (64, 4, 4)
    with pytest.raises(deepspeed_ucp.ConfigError, match="62"):
        configure(FakeConfig({"preserve_batch_size": True}, 62, 4, 2))


@pytest.mark.parametrize("value", ["auto", 0, -1, 2.5])
def test_batch_sizes_that_are_none_are_left_to_deepspeeds_messages(value: object) -> None:
    assert configure(FakeConfig(True, value, 4, 2)).train_batch_size == value  # type: ignore[arg-type]


def test_installing_twice_wraps_once_and_uninstalling_restores() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    wrapped = DeepSpeedEngine.load_checkpoint
    deepspeed_ucp.install()
    assert DeepSpeedEngine.load_checkpoint is wrapped
    deepspeed_ucp.uninstall()
    try:
        assert not hook.is_installed()
        assert DeepSpeedEngine.load_checkpoint is wrapped.__wrapped__  # type: ignore[attr-defined]
        deepspeed_ucp.uninstall()
    finally:
        deepspeed_ucp.install()
    assert hook.is_installed()
