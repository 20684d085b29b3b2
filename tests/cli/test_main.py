"""The ``ds_ucp`` command as such, and ``ds_ucp run``: an untouched script under every launcher."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace, _SubParsersAction
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_ucp
from deepspeed_ucp import attach, hook
from deepspeed_ucp.cli import dispatch
from deepspeed_ucp.cli.common import read_rules
from deepspeed_ucp.cli.dispatch import COMMANDS, GROUPS, build_parser, main, split_launcher_arguments
from deepspeed_ucp.cli.printing import (
    emit,
    format_bytes,
    format_count,
    format_duration,
    format_table,
    show_progress,
    to_json,
)
from deepspeed_ucp.cli.run import run_script
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.errors import CheckpointError
from tests.cli.samples import list_actions, write_sample
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

SCRIPT = """
import json, sys, types
from deepspeed_ucp import attach, hook
import neighbour
silent = types.SimpleNamespace(_param_dict={}, train_batch_size=None, train_micro_batch_size_per_gpu=None,
                               gradient_accumulation_steps=None, world_size=1, global_rank=1)
hook._configure_train_batch_size(lambda config: None, silent)
with open(sys.argv[-1], "w") as out:
    json.dump([__name__, sys.argv, sys.path[0], bool(silent.ucp_config), bool(attach._originals), neighbour.VALUE], out)
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
    attach._settings["default_on"] = None


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A training script with a module of its own beside it."""
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def read(path: Path) -> list[object]:
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


def test_a_script_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, told in (
        (["run", "nofile.py"], f"ds_ucp run: nofile.py: no such file (in {os.getcwd()}). Name the training script"),
        (["run", "-m", "nowhere.at_all"], "ds_ucp run: --module nowhere.at_all: there is no such module"),
        (["run", "-m", "os.nothing"], "ds_ucp run: --module os.nothing: there is no such module"),
    ):
        assert main(argv) == 2
        assert capsys.readouterr().err.startswith(told)
    (tmp_path / "lacks.py").write_text("open('nofile')")  # its own errors stay its own
    with pytest.raises(FileNotFoundError):
        main(["run", str(tmp_path / "lacks.py")])


@pytest.mark.parametrize("argv", [[], ["run"], ["--local_rank=0"], ["fly", "x.py"]], ids=str)
def test_a_wrong_command_line_shows_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert "usage: ds_ucp" in capsys.readouterr().err


def test_options_that_may_be_secrets_are_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "options.json").write_text('{"secret": "hunter2"')
    for text in ('{"secret": "hunter2"', str(tmp_path / "options.json")):
        assert main(["run", "--config", text, "x.py"]) == 2
        told = capsys.readouterr().err
        assert "--config: a JSON object or a file with one is needed: Expecting ',' delimiter: line 1 column 21" in told
        assert "hunter2" not in told
    assert main(["inspect", "x", "--storage-option", "hunter2"]) == 2
    told = capsys.readouterr().err
    assert "KEY=VALUE is wanted" in told
    assert "hunter2" not in told
    assert json.loads(to_json({"folder": "https://me:hunter2@host/run"})) == {"folder": "https://…@host/run"}


class FakeConfig:
    """As much of a DeepSpeedConfig as the batch hook looks at."""

    def __init__(
        self, section: object, train: int | None = None, micro: int | None = None, gas: int | None = None
    ) -> None:
        self._param_dict = {"checkpoint": {"universal": section}} if section != "silent" else {}
        self.train_batch_size, self.train_micro_batch_size_per_gpu = train, micro
        self.gradient_accumulation_steps, self.global_rank = gas, 1
        self.world_size: float = 4
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


def test_options_of_a_run_reach_every_engine(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEEPSPEED_UCP", '{"patterns": "bloom", "fallback": true}')
    assert configure(FakeConfig("silent")).ucp_config == UniversalConfig(patterns="bloom", fallback=True)
    rules = [{"match": "x", "pattern": "shard-v"}]
    text = json.dumps({"patterns": rules, "trust_pickle": True, "threads": 2})
    (tmp_path / "options.json").write_text(text)
    for config in (text, str(tmp_path / "options.json")):
        assert main(["run", "--config", config, str(script), str(tmp_path / "out.json")]) == 0
        found = configure(FakeConfig({"threads": 1})).ucp_config
        assert found == UniversalConfig(patterns=rules, trust_pickle=True, fallback=True, threads=1)
    for wrong in ('{"patterns": "blooom"}', '{"verify": "md5"}', '{"window_mb": 1}', '{"patern": 1}', "[1]", "absent"):
        assert main(["run", "--config", wrong, str(script)]) == 2
        key = wrong.split('"')[1] if "{" in wrong else wrong
        assert key in (told := capsys.readouterr().err) and told.startswith("ds_ucp run: ")
    assert main(["run", "--config", "{}", str(script), str(tmp_path / "out.json")]) == 0


def test_the_batch_is_refused_only_where_the_plugin_is_on() -> None:
    assert configure(FakeConfig(False, 63, 4, 4)).train_batch_size == 63
    with pytest.raises(deepspeed_ucp.ConfigError, match="train_batch_size 63 cannot be made by 4"):
        configure(FakeConfig(True, 63, 4, 4))


def test_preserve_batch_size_changes_the_accumulation() -> None:
    kept = configure(FakeConfig({"preserve_batch_size": True}, 64, 4, 2))
    assert (kept.train_batch_size, kept.train_micro_batch_size_per_gpu, kept.gradient_accumulation_steps) == (64, 4, 4)
    with pytest.raises(deepspeed_ucp.ConfigError, match="62"):
        configure(FakeConfig({"preserve_batch_size": True}, 62, 4, 2))


def test_a_world_that_sequence_parallelism_makes_a_float(caplog: pytest.LogCaptureFixture) -> None:
    config = FakeConfig({"preserve_batch_size": True}, 72, 4, 2)
    config.world_size = 4.0
    with caplog.at_level("INFO", logger="deepspeed_ucp"):
        kept = configure(config)
    sizes = (kept.train_batch_size, kept.train_micro_batch_size_per_gpu, kept.gradient_accumulation_steps)
    assert repr(sizes) == "(72, 3, 6)"
    assert "train_batch_size 72 kept on 4 ranks: micro batch 4 → 3, gradient accumulation 2 → 6" in caplog.text


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
        assert not attach._originals
        assert DeepSpeedEngine.load_checkpoint is wrapped.__wrapped__  # type: ignore[attr-defined]
        deepspeed_ucp.uninstall()
    finally:
        deepspeed_ucp.install()
    assert attach._originals


# -- all commands -----------------------------------------------------------------------------------------------------


def set_command(monkeypatch: pytest.MonkeyPatch, run: Callable[[Namespace], int]) -> None:
    """Puts something else in the place of what ``ds_ucp inspect`` does."""
    monkeypatch.setattr("deepspeed_ucp.cli.inspect.run", run)


def fail(error: BaseException) -> Callable[[Namespace], int]:
    def run(options: Namespace) -> int:
        raise error

    return run


def test_help_lists_every_command_in_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMANDS == ("run", "list", "inspect", "verify", "diff", "plan", "convert", "export")
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    for title, names in GROUPS.items():
        section = shown.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert re.findall(r"^  (\w+) +\S", section, re.MULTILINE) == list(names)
    assert "usage: ds_ucp [--version] [-h] COMMAND" in shown and "130" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help_and_every_command_examples(name: str) -> None:
    (commands,) = (action for action in build_parser((name,))._actions if isinstance(action, _SubParsersAction))
    for action in list_actions(commands.choices[name]):
        assert action.help, action.option_strings or action.dest
    shown = commands.choices[name].format_help()
    assert f"usage: ds_ucp {name}" in shown and f"ds_ucp {name}" in shown.partition("examples:")[2]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"ds_ucp {deepspeed_ucp.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (CheckpointError("x.pt is damaged."), 2, "ds_ucp: error: x.pt is damaged.\n"),
        (
            PermissionError(13, "Permission denied", "x.pt"),
            2,
            "ds_ucp: error: x.pt: Permission denied (EACCES). Check its permissions, or those of its folder.\n",
        ),
        (KeyError("x"), 2, "ds_ucp: error: KeyError: 'x' (a fault of ds_ucp itself; --debug shows where)\n"),
        (KeyboardInterrupt(), 130, "ds_ucp: interrupted\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_are_lines_and_exit_codes(
    error: BaseException, code: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_command(monkeypatch, fail(error))
    assert main(["inspect", "x"]) == code
    assert capsys.readouterr().err == told
    assert main(["inspect", "x", "--debug"]) == code
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert type(error).__name__ in shown


def test_the_echo_of_another_rank_s_error_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = CheckpointError("[rank 0] x.pt is damaged.")
    error.echo = True
    set_command(monkeypatch, fail(error))
    assert main(["inspect", "x"]) == 2
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_is_no_error() -> None:
    code = (
        "import sys\nfrom deepspeed_ucp.cli import inspect, printing\nfrom deepspeed_ucp.cli.dispatch import main\n"
        "inspect.run = lambda options: printing.write_out('line\\n' * 100000) or 0\nsys.exit(main(['inspect', 'x']))"
    )
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("line\n141\n", "")


SAYING = """
import os, sys
from deepspeed_ucp.cli import dispatch, inspect
from deepspeed_ucp.cli.printing import emit, print_message
def run(options):
    opened = os.open(os.devnull, os.O_RDONLY)
    emit(options, {"name": "\\xfc\\u2192\\U0001f600"}, ["1 \\u2192 2 \\u2026 \\xfc"])
    print_message(f"done {opened > 2}")
    return 1
inspect.run = run
sys.exit(dispatch.main(["inspect", "x", *sys.argv[1:]]))
"""


def run_python(
    code: str, *argv: str, redirect: str = "", encoding: str = "utf-8"
) -> subprocess.CompletedProcess[bytes]:
    """A child's exit code and what it wrote; ``redirect`` as a shell has it."""
    line = f"{shlex.join([sys.executable, '-c', code, *argv])} {redirect}"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    return subprocess.run(["bash", "-c", line], capture_output=True, check=False, env=environment)


def test_a_closed_stdout_leaves_the_exit_code() -> None:
    """And its number is not that of a file that is opened later, which would be written to."""
    done = run_python(SAYING, redirect=">&-")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"done True\n")
    done = run_python(SAYING, redirect=">&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


def test_a_stdout_that_cannot_be_written_is_an_error() -> None:
    done = run_python(SAYING, redirect=">/dev/full")
    told = b"ds_ucp: error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("ascii", rb"1 -> 2 ... \xfc"), ("latin-1", b"1 -> 2 ... \xfc"), ("utf-8", "1 → 2 … ü".encode())],
)
def test_signs_that_an_encoding_lacks_are_replaced(encoding: str, shown: bytes) -> None:
    done = run_python(SAYING, encoding=encoding)
    assert (done.returncode, done.stdout) == (1, shown + b"\n"), done.stderr
    done = run_python(SAYING, "--json", encoding=encoding)
    assert json.loads(done.stdout) == {"name": "ü→\U0001f600"}, done.stderr


INTERRUPTED = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from deepspeed_ucp.cli import main
sys.exit(main(["inspect", "x"]))
"""


def test_an_interrupt_while_modules_are_imported_is_no_traceback() -> None:
    done = run_python(INTERRUPTED)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"ds_ucp: interrupted\n")


READING = (["list"], ["inspect"], ["verify"], ["convert"], ["diff", "{}"], ["plan", "--target", "dp=2"])


def test_a_destination_may_stand_behind_options() -> None:
    for line in ("convert a --also b c", "convert a c --also b", "convert --also b a c"):
        options = dispatch._parse(line.split())
        assert (options.source, options.also, options.destination) == ("a", ["b"], "c"), line
    for line in ("convert a --also b c d", "convert a --unknown", "convert a --unknown b", "inspect a --also b c"):
        with pytest.raises(SystemExit):
            dispatch._parse(line.split())


@pytest.mark.parametrize("kind", ["none", "file", "empty"])
@pytest.mark.parametrize("argv", READING, ids=" ".join)
def test_where_no_checkpoint_is_the_error_is_a_line_and_json(
    argv: list[str], kind: str, tmp_path: Path, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    path = str(tmp_path / kind)
    told = [argv[0], path, *(text.format(path) for text in argv[1:])]
    code, data = run_json(*told)
    assert (code, data["kind"]) == (2, "CheckpointError")
    assert data["error"].startswith(path)
    assert main(told) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"ds_ucp: error: {data['error']}\n")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("saved"), Topology(1, 2, "bf16"))


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_further_place_that_is_not_there_is_told(
    command: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(saved), "--also", str(tmp_path / "nowhere")]) == 0
    assert f"{tmp_path / 'nowhere'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["inspect {0} -q", "plan {0} --target dp=3,zero=3 -q", "export {0} {1} --dtype bf16", "verify {0}", ""]
)
def test_commands_need_neither_torch_nor_deepspeed(line: str, saved: Path, tmp_path: Path) -> None:
    """Nor does the parser of all of them, which `--help` builds, need anything large."""
    code = "import sys\nfrom deepspeed_ucp.cli.dispatch import build_parser, main\nbuild_parser()\n"
    code += "code = main(sys.argv[1:]) if sys.argv[1:] else 'numpy' in sys.modules\n"
    code += "sys.exit(code or ' '.join(sorted({'torch', 'deepspeed', 'matplotlib', 'mpi4py'} & set(sys.modules))) or 0)"
    done = run_python(code, *line.format(saved, tmp_path / "out").split())
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_line_of_an_error_can_be_forged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\nFAULT forged\x1b[2J\u202e"
    set_command(monkeypatch, fail(CheckpointError(f"{name} is damaged.", "second line")))
    main(["inspect", "x"])
    told = "ds_ucp: error: a\\nFAULT forged\\x1b[2J\\u202e is damaged.\n    second line\n"
    assert capsys.readouterr().err == told
    set_command(monkeypatch, fail(KeyError(name)))
    main(["inspect", "x", "--debug"])
    assert not re.search("^FAULT|\x1b|\u202e", capsys.readouterr().err, re.MULTILINE)


HOSTILE = "a\nFAULT [forged] all is lost\x1b[2J\u202e"


def test_no_name_in_a_checkpoint_can_forge_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model((Param(HOSTILE, (4, 3)), Param("b", (3,))), buffers={f"{HOSTILE} b": torch.ones(2)})
    tags = []
    for seed in (0, 1):
        write_checkpoint(tmp_path / str(seed), model, random_state(model, seed), Topology(1, 2), tag="tag")
        tags.append(str(tmp_path / str(seed) / "tag"))
    first = tags[0]
    for argv in (
        ["inspect", first, "--all"],
        ["inspect", first, "-p", HOSTILE],
        ["inspect", first, "--json"],
        ["inspect", first, "-p", "nothing"],
        ["list", first],
        ["verify", first],
        ["diff", *tags],
        ["diff", *tags, "--json"],
        ["plan", first, "--target", "dp=3"],
        ["convert", first, str(tmp_path / "out")],
        ["verify", str(tmp_path / "out")],
        ["export", first, str(tmp_path / "weights"), "--dtype", "bf16", "--debug"],
    ):
        main(argv)
        shown = capsys.readouterr()
        assert not re.search("^ *FAULT|[^ -~\n…→×≠Δ·]", shown.out + shown.err, re.MULTILINE), argv


def test_the_library_s_warnings_are_short_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: Namespace) -> int:
        logging.getLogger("deepspeed_ucp").info("not this")
        logging.getLogger("deepspeed_ucp").warning("%d files", 3)
        return 0

    set_command(monkeypatch, run)
    assert main(["inspect", "x"]) == 0
    assert capsys.readouterr().err == "ds_ucp: warning: 3 files\n"
    main(["inspect", "x", "--quiet"])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    main(["inspect", "x"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("key", ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_only_rank_0_prints(key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank in ("1", "0"):
        monkeypatch.setenv(key, rank)
        emit(Namespace(json=False), {}, ["text"])
        assert capsys.readouterr().out == ("text\n" if rank == "0" else "")


def test_a_rank_without_a_launch_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Clusters set RANK for containers, in which somebody may type a command."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    emit(Namespace(json=False), {}, ["text"])
    assert capsys.readouterr().out == "text\n"


def test_json_is_what_every_parser_reads(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"a": float("nan"), 3: (1, None), "inf": [float("-inf")], "set": {"y", "x"}, "path": Path("/x"), "t": True}
    emit(Namespace(json=True), data, ())
    assert json.loads(capsys.readouterr().out) == {
        "a": "nan",
        "3": [1, None],
        "inf": ["-inf"],
        "set": ["x", "y"],
        "path": "/x",
        "t": True,
    }


@pytest.mark.parametrize(
    ("write", "cases"),
    [
        (format_bytes, {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 15 << 20: "15.0 MiB", 1023.6 * 1024: "1.00 MiB"}),
        (format_count, {0: "0", 999: "999", 1000: "1.00 k", 304_123_456: "304 M"}),
        (format_duration, {0.416: "0.42 s", 50: "50 s", 119.6: "2 min 00 s", 7199: "119 min 59 s", 7500: "2 h 05 min"}),
        (format_duration, {float("inf"): "for ever"}),
    ],
)
def test_figures_in_words(write: Callable[[float], str], cases: dict[float, str]) -> None:
    assert {value: write(value) for value in cases} == cases


def test_tables_are_aligned() -> None:
    assert format_table([("a", 1), ("bcd", 22)], ("x", "n"), right=(1,)) == ["x     n", "a     1", "bcd  22"]
    assert format_table([]) == []


def test_the_bar_is_off_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(Namespace(quiet=False, json=False), 10, "work") as add:
        add(10)
    assert capsys.readouterr().err == ""


def test_rules_are_a_family_a_file_or_json(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("- {match: a, pattern: shard-v}")
    assert read_rules(Namespace(patterns=None)) == ()
    assert read_rules(Namespace(patterns="megatron-gpt"))[0].name == "family megatron-gpt"
    assert "rules.yaml" in read_rules(Namespace(patterns=str(tmp_path / "rules.yaml")))[0].name
    assert read_rules(Namespace(patterns='[{"match": "a", "pattern": "shard-v"}]'))[0].by == "user"
    with pytest.raises(deepspeed_ucp.ConfigError, match="neither a family, a file nor JSON"):
        read_rules(Namespace(patterns="[{"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["verfy", "x"], "argument COMMAND: 'verfy' is unknown: did you mean 'verify'?"),
        (["nothing", "x"], "argument COMMAND: invalid choice: 'nothing'"),
        (["verify", "x", "--agianst", "y"], "unrecognized arguments: --agianst y (did you mean '--against'?)"),
        (["verify", "x", "--header_only"], "(did you mean '--headers-only'?)"),
        (["verify", "x", "--zzz"], "unrecognized arguments: --zzz\n"),
        (["export", "x", "y", "--to", "hff"], "argument --to: 'hff' is unknown: did you mean"),
    ],
    ids=str,
)
def test_a_misspelt_name_is_told_with_the_right_one(
    line: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert told in printed
    assert f"usage: ds_ucp {line[0] if line[0] in ('verify', 'export') else ''}" in printed
