"""The ``ds_ucp`` program: errors, output, exit codes, and ``ds_ucp run``."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import deepspeed_ucp
from deepspeed_ucp import attach, hook
from deepspeed_ucp.cli import common, dispatch
from deepspeed_ucp.cli.common import find_folders, read_rules
from deepspeed_ucp.cli.dispatch import load_command, main, split_launcher_arguments
from deepspeed_ucp.cli.export import _parse_size
from deepspeed_ucp.cli.plan import _parse_time
from deepspeed_ucp.cli.printing import emit, format_bytes, format_count, format_duration, to_json
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.errors import CheckpointError, ConfigError
from tests.cli.samples import find_parser, write_sample
from tests.support.damage import flip_largest
from tests.support.mpi import needs_mpi, run_mpi
from tests.support.ranks import World, current_rank
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
def _restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ds_ucp"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(attach._settings, "default_on", None)
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


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
def test_the_launchers_local_rank_argument_is_removed(argv: list[str], launcher: list[str], ours: list[str]) -> None:
    assert split_launcher_arguments(argv) == (launcher, ours)


@pytest.mark.parametrize("first", [["--local_rank=1", "run", "{}"], ["--local_rank=1", "run", "-m", "train"]], ids=str)
@pytest.mark.parametrize("arguments", [["--lr", "1e-3"], ["-m", "--help", "--"]], ids=str)
def test_run_executes_a_script_like_python_with_the_plugin_on(
    first: list[str], arguments: list[str], script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It executes a module, too. Arguments after the script are passed to it."""
    if "-m" in first:
        monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out.json"
    assert main([*(each.format(script) for each in first), *arguments, str(out)]) == 0
    seen = [str(script), "--local_rank=1", *arguments, str(out)]
    assert json.loads(out.read_text()) == ["__main__", seen, str(tmp_path), True, True, 7]


def test_run_passes_on_exit_codes_and_errors_of_a_script(tmp_path: Path) -> None:
    for code, kind in (("exit(3)", SystemExit), ("1 / 0", ZeroDivisionError), ("open('nofile')", OSError)):
        (tmp_path / "ends.py").write_text(code)
        with pytest.raises(kind) as end:
            main(["run", str(tmp_path / "ends.py")])
        assert getattr(end.value, "code", 3) == 3


def test_run_of_a_missing_script_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"ds_ucp run: {tmp_path}: a folder without __main__.py (in ")
    assert main(["run", "nofile.py"]) == 2
    assert capsys.readouterr().err.startswith(f"ds_ucp run: nofile.py: no such file (in {os.getcwd()}). Name the ")


@pytest.mark.parametrize("argv", [[], ["run"], ["--local_rank=0"], ["fly", "x.py"]], ids=str)
def test_an_invalid_command_line_shows_the_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert "usage: ds_ucp" in err and "ARGS" not in err


def test_commands_print_no_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "options.json").write_text('{"secret": "hunter2"')
    invalid = "--config: a JSON object or a file with one is needed: Expecting ',' delimiter: line 1 column 21"
    for line, message in (
        (["run", "--config", '{"secret": "hunter2"', "x.py"], invalid),
        (["run", "--config", str(tmp_path / "options.json"), "x.py"], invalid),
        (["run", "--config", '\'{"secret": "hunter2"}', "x.py"], "is needed: No such file or directory"),
        (["inspect", "x", "--storage-option", "hunter2"], "use KEY=VALUE"),
    ):
        assert main(line) == 2
        printed = capsys.readouterr().err
        assert message in printed and "hunter2" not in printed
    assert json.loads(to_json({"folder": "https://me:hunter2@host/run"})) == {"folder": "https://…@host/run"}


SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def configure(section: object, *sizes: Any, world: float = 4) -> SimpleNamespace:
    """Call the hook of the batch sizes with the fields of a DeepSpeedConfig that it uses."""
    values = dict(zip_longest(SIZES, sizes))
    params = {} if section == "silent" else {"checkpoint": {"universal": section}}
    config = SimpleNamespace(_param_dict=params, **values, world_size=world, global_rank=1, configured=False)
    hook._configure_train_batch_size(lambda seen: setattr(seen, "configured", True), config)
    assert config.configured
    return config


def test_options_of_run_apply_to_every_engine(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert configure("silent").ucp_config is None
    monkeypatch.setenv("DEEPSPEED_UCP", '{"patterns": "bloom", "fallback": true}')
    assert configure("silent").ucp_config == UniversalConfig(patterns="bloom", fallback=True)
    rules = [{"match": "x", "pattern": "shard-v"}]
    text = json.dumps({"patterns": rules, "trust_pickle": True, "threads": 2})
    (tmp_path / "options.json").write_text(text)
    for config in (text, str(tmp_path / "options.json")):
        assert main(["run", "--config", config, str(script), str(tmp_path / "out.json")]) == 0
        found = configure({"threads": 1}).ucp_config
        assert found == UniversalConfig(patterns=rules, trust_pickle=True, fallback=True, threads=1)
    for wrong in ('{"patterns": "blooom"}', '{"verify": "md5"}', '{"window_mb": 1}', '{"patern": 1}', "[1]", "absent"):
        assert main(["run", "--config", wrong, str(script)]) == 2
        key = wrong.split('"')[1] if "{" in wrong else wrong
        assert key in (printed := capsys.readouterr().err) and printed.startswith("ds_ucp run: ")
    monkeypatch.delenv("DEEPSPEED_UCP")
    assert main(["run", "--config", "{}", str(script), str(tmp_path / "out.json")]) == 0
    assert configure("silent").ucp_config == UniversalConfig()
    assert configure(False).ucp_config is None


PRESERVE = {"preserve_batch_size": True}


@pytest.mark.parametrize(
    ("section", "sizes", "expected"),
    [
        (False, (63, 4, 4), (63, 4, 4)),
        (True, (63, 4, 4), "train_batch_size 63 cannot be made by 4"),
        (PRESERVE, (64, 4, 2), (64, 4, 4)),
        (PRESERVE, (62, 4, 2), "62"),
        (PRESERVE, (72, 4, 2, 4.0), (72, 3, 6)),  # under sequence parallelism the world is a float
        *((True, (size, 4, 2), (size, 4, 2)) for size in ("auto", 0, -1, 2.5)),  # DeepSpeed reports invalid ones
    ],
)
def test_batch_sizes_are_refused_or_changed(section: object, sizes: Any, expected: Any, caplog: Any) -> None:
    world = {"world": sizes[3]} if sizes[3:] else {}
    if isinstance(expected, str):
        with pytest.raises(deepspeed_ucp.ConfigError, match=expected):
            configure(section, *sizes[:3], **world)
        return
    with caplog.at_level("INFO", logger="deepspeed_ucp"):
        kept = configure(section, *sizes[:3], **world)
    assert repr(tuple(getattr(kept, name) for name in SIZES)) == repr(expected)
    text = "train_batch_size 72 kept on 4 ranks: micro batch 4 → 3, gradient accumulation 2 → 6"
    assert (text in caplog.text) is (sizes[0] == 72)


# -- all commands -----------------------------------------------------------------------------------------------------


def replace_inspect(monkeypatch: pytest.MonkeyPatch, **behaviour: Any) -> None:
    monkeypatch.setattr("deepspeed_ucp.cli.inspect.run", mock.Mock(**behaviour))


def test_help_and_version_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: ds_ucp [--version] [-h] COMMAND" in shown and "130" in shown
    assert max(map(len, shown.splitlines())) < 80
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"ds_ucp {deepspeed_ucp.__version__}\n"


FORGED = "a\nFAULT forged\x1b[2J\u202e"
FAULTY = " (a fault of ds_ucp itself; --debug shows where)\n"


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (CheckpointError("x.pt is damaged."), 2, "ds_ucp: error: x.pt is damaged.\n"),
        (
            PermissionError(13, "Permission denied", "x.pt"),
            2,
            "ds_ucp: error: x.pt: Permission denied (EACCES). Check its permissions, or those of its folder.\n",
        ),
        (KeyError("x"), 2, f"ds_ucp: error: KeyError: 'x'{FAULTY}"),
        (KeyboardInterrupt(), 130, "ds_ucp: interrupted\n"),
        (
            CheckpointError(f"{FORGED} is damaged.", "second line"),
            2,
            "ds_ucp: error: a\\nFAULT forged\\x1b[2J\\u202e is damaged.\n    second line\n",
        ),
        (RuntimeError(FORGED), 2, f"ds_ucp: error: RuntimeError: a\n    FAULT forged\\x1b[2J\\u202e{FAULTY}"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_kind_of_error_has_a_line_and_an_exit_code(
    error: BaseException, code: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_inspect(monkeypatch, side_effect=error)
    assert main(["inspect", "x"]) == code
    assert capsys.readouterr().err == printed
    assert main(["inspect", "x", "--debug"]) == code
    shown = capsys.readouterr().err
    assert "Traceback" in shown and type(error).__name__ in shown
    assert not re.search("^FAULT|\x1b|\u202e", shown, re.MULTILINE)
    if isinstance(error, CheckpointError):  # another rank prints it
        error.echo = True
        assert (main(["inspect", "x"]), capsys.readouterr().err) == (2, "")


PRINTING = """
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


def run_python(code: str, *argv: str, redirect: str = "", encoding: str = "utf-8") -> Any:
    """Run code in a child; ``redirect`` as in a shell."""
    line = f"{shlex.join([sys.executable, '-c', code, *argv])} {redirect}"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    return subprocess.run(["bash", "-c", line], capture_output=True, check=False, env=environment)


FULL = b"ds_ucp: error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("redirect", "code", "stderr"), [(">&-", 1, b"done True\n"), (">&- 2>&-", 1, b""), (">/dev/full", 2, FULL)]
)
def test_a_closed_or_full_stdout_has_its_exit_code(redirect: str, code: int, stderr: bytes) -> None:
    """A file that is opened later does not get the closed descriptor; output would overwrite it."""
    done = run_python(PRINTING, redirect=redirect)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", stderr)


def test_a_closed_output_pipe_is_no_error() -> None:
    code = PRINTING.replace("= run\n", "= lambda options: emit(options, {}, ['line'] * 100000) or 0\n")
    done = run_python(code, redirect="| head -1; echo ${PIPESTATUS[0]}")
    assert (done.stdout, done.stderr) == (b"line\n141\n", b"")


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", rb"1 \u2192 2 \u2026 \xfc"), ("utf-8", "1 → 2 … ü".encode())]
)
def test_characters_that_an_encoding_lacks_are_escaped(encoding: str, shown: bytes) -> None:
    done = run_python(PRINTING, encoding=encoding)
    assert (done.returncode, done.stdout) == (1, shown + b"\n"), done.stderr
    done = run_python(PRINTING, "--json", encoding=encoding)
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


def test_an_interrupt_during_imports_prints_no_traceback() -> None:
    done = run_python(INTERRUPTED)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"ds_ucp: interrupted\n")


def test_a_destination_may_follow_options() -> None:
    for line in ("convert a --also b c", "convert a c --also b", "convert --also b a c"):
        options = dispatch._parse(line.split())
        assert (options.source, options.also, options.destination) == ("a", ["b"], "c"), line
    for line in ("convert a --also b c d", "convert a --unknown", "convert a --unknown b", "inspect a --also b c"):
        with pytest.raises(SystemExit):
            dispatch._parse(line.split())


@pytest.mark.parametrize("kind", ["none", "file", "empty"])
@pytest.mark.parametrize(
    "line", ["list {}", "inspect {}", "verify {}", "convert {}", "diff {0} {0}", "plan {} --target dp=2"]
)
def test_a_missing_checkpoint_is_an_error_as_text_and_json(
    line: str, kind: str, tmp_path: Path, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    path = str(tmp_path / kind)
    argv = line.format(path).split()
    code, data = run_json(*argv)
    assert (code, data["kind"]) == (2, "CheckpointError")
    assert data["error"].startswith(path)
    assert main(argv) == 2
    assert capsys.readouterr() == ("", f"ds_ucp: error: {data['error']}\n")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("saved"), Topology(1, 2, "bf16"))


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_missing_place_of_also_is_a_warning(
    command: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(saved), "--also", str(tmp_path / "nowhere")]) == 0
    assert f"{tmp_path / 'nowhere'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["inspect {0} -q", "plan {0} --target dp=3,zero=3 -q", "export {0} {1} --dtype bf16", "verify {0}", ""]
)
def test_commands_need_neither_torch_nor_deepspeed(line: str, saved: Path, tmp_path: Path) -> None:
    """The parser of all commands, which `--help` builds, does not need numpy, either."""
    code = "import sys\nfrom deepspeed_ucp.cli.dispatch import build_parser, main\nbuild_parser()\n"
    code += "code = main(sys.argv[1:]) if sys.argv[1:] else 'numpy' in sys.modules\n"
    code += "sys.exit(code or ' '.join(sorted({'torch', 'deepspeed', 'matplotlib', 'mpi4py'} & set(sys.modules))) or 0)"
    done = run_python(code, *line.format(saved, tmp_path / "out").split())
    assert (done.returncode, done.stderr) == (0, b"")


HOSTILE = "a\nFAULT [forged] all is lost\x1b[2J\u202e"


def test_newlines_in_checkpoints_are_escaped_in_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Model((Param(HOSTILE, (4, 3)), Param("b", (3,))), buffers={f"{HOSTILE} b": torch.ones(2)})
    states = [random_state(model, seed) for seed in (0, 1)]
    tags = [str(write_checkpoint(tmp_path / str(n), model, states[n], Topology(1, 2), tag="tag")) for n in (0, 1)]
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


def test_warnings_are_printed_as_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: Namespace) -> int:
        logging.getLogger("deepspeed_ucp").info("not this")
        logging.getLogger("deepspeed_ucp").warning("%d files", 3)
        return 0

    replace_inspect(monkeypatch, side_effect=run)
    assert main(["inspect", "x"]) == 0
    assert capsys.readouterr().err == "ds_ucp: warning: 3 files\n"
    main(["inspect", "x", "--quiet"])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    main(["inspect", "x"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("key", ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_only_rank_0_prints(key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """RANK is used only with LOCAL_RANK: clusters set RANK for containers in which users type commands."""
    for rank, local in (("1", "0"), ("0", "0"), ("3", "")):
        monkeypatch.setenv(key, rank)
        monkeypatch.setenv("LOCAL_RANK", local) if local else monkeypatch.delenv("LOCAL_RANK")
        emit(Namespace(json=False), {}, ["text"])
        assert capsys.readouterr().out == ("text\n" if rank == "0" or (key == "RANK" and not local) else "")


def test_json_output_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"a": float("nan"), 3: (1, None), "inf": [float("-inf")], "set": {"y", "x"}, "path": Path("/x"), "t": True}
    plain = {"a": "nan", "3": [1, None], "inf": ["-inf"], "set": ["x", "y"], "path": "/x", "t": True}
    emit(Namespace(json=True), data, ())
    assert json.loads(capsys.readouterr().out) == plain


@pytest.mark.parametrize(
    ("convert", "cases"),
    [
        (format_bytes, {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 15 << 20: "15.0 MiB", 1023.6 * 1024: "1.00 MiB"}),
        (format_count, {0: "0", 999: "999", 1000: "1.00 k", 304_123_456: "304 M"}),
        (format_duration, {0.416: "0.42 s", 50: "50 s", 119.6: "2 min 00 s", 7199: "119 min 59 s", 7500: "2 h 05 min"}),
        (format_duration, {float("inf"): "for ever"}),
        (_parse_size, {"5GB": 5 * 10**9, "1.5 mb": 1_500_000, "2GiB": 2 << 30, "700": 700}),
        (_parse_time, {"8h": 28800, "30m": 1800, "1h30m": 5400, "2.5s": 2.5, "1d": 86400, "0.5h1s": 1801}),
    ],
)
def test_numbers_are_written_and_read_with_units(convert: Callable[[Any], Any], cases: dict[Any, Any]) -> None:
    assert {value: convert(value) for value in cases} == cases


@pytest.mark.parametrize("line", ["inspect", "verify", "diff", "convert", "export"])
def test_an_option_that_one_rank_cannot_read_is_an_error_on_all_ranks(
    line: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> tuple[()]:
        if current_rank():
            raise ConfigError("this node lacks the file")
        return ()

    for name in ("read_rules", "read_groups"):
        monkeypatch.setattr(common, name, fail)
    more = {"diff": [str(saved)], "convert": [str(tmp_path / "out")], "export": [str(tmp_path / "out")]}
    options = find_parser(line).parse_args([str(saved), *more.get(line, [])], Namespace(command=line))

    def run(rank: int, comm: Comm) -> int:
        monkeypatch.setattr("deepspeed_ucp.comm.join_launch", lambda: nullcontext(comm))
        return int(load_command(line).run(options))

    assert [type(each) for each in World(2).run(run)] == [ConfigError] * 2


def test_the_patterns_option_is_a_family_a_file_or_json(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("- {match: a, pattern: shard-v}")
    assert read_rules(Namespace(patterns=None)) == ()
    assert read_rules(Namespace(patterns="megatron-gpt"))[0].name == "family megatron-gpt"
    assert "rules.yaml" in read_rules(Namespace(patterns=str(tmp_path / "rules.yaml")))[0].name
    assert read_rules(Namespace(patterns='[{"match": "a", "pattern": "shard-v"}]'))[0].source == "user"
    with pytest.raises(deepspeed_ucp.ConfigError, match="neither a family, a file nor JSON"):
        read_rules(Namespace(patterns="[{"))


@pytest.mark.parametrize(
    ("line", "message"),
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
def test_a_misspelt_name_in_a_command_line_gets_a_suggestion(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert f"usage: ds_ucp {line[0] if line[0] in ('verify', 'export') else ''}" in printed


@pytest.mark.parametrize(
    ("command", "option", "texts", "wanted"),
    [
        ("plan", "--mtbf", ["8", "", "h", "0h", "-1h", "nans", "infh", "8x"], "a time such as 8h"),
        ("plan", "--params", ["many", "0", "-1", "nan", "1.5"], "a number such as 70e9"),
        ("plan", "--ranks", ["0", "-1", "2.5", "two"], "a positive integer"),
        ("plan", "--read-gbs", ["0", "-1", "inf"], "a speed in GB/s"),
        ("export", "--max-shard-size", ["", "GB", "5 XB", "0MB", "-1GB"], "a size such as 500MB, 5GB or 2GiB"),
    ],
)
def test_invalid_numbers_are_refused(command: str, option: str, texts: list[str], wanted: str, capsys: Any) -> None:
    for text in texts:
        with pytest.raises(SystemExit):
            main([command, "in", "out", f"{option}={text}"])
        assert f"argument {option}: {wanted}" in capsys.readouterr().err


@needs_mpi
def test_ranks_of_mpirun_share_the_files_of_verify(tmp_path: Path) -> None:
    folder = write_sample(tmp_path, Topology(1, 3))
    flip_largest(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    result = run_mpi(2, ["-m", "deepspeed_ucp", "verify", str(folder), "--json"])
    assert result.returncode != 0
    found = json.loads(result.stdout[result.stdout.index("{") : result.stdout.rindex("}") + 1])
    assert [fault["kind"] for fault in found["faults"]] == ["crc"]
    assert found["read"] == found["nbytes"]


def test_commands_use_the_tag_of_the_first_place_in_all_places(tmp_path: Path) -> None:
    """A tag's folder may have any name in a further place."""
    folder, there = write_sample(tmp_path, Topology(1, 3)), tmp_path / "there"
    copy = there / folder.name
    shutil.copytree(folder, copy)
    shutil.copytree(folder, there / "newer")
    shutil.copytree(folder, tmp_path / "else" / "renamed")
    (there / "latest").write_text("newer")
    run, comm = str(folder.parent), Comm()
    assert find_folders(run, [str(there)], comm) == [str(folder), str(copy)]
    assert find_folders(str(folder), [str(there), run], comm) == [str(folder), str(copy), str(folder)]
    renamed = str(tmp_path / "else" / "renamed")
    assert find_folders(renamed, [str(there)], comm) == [renamed, str(there / "newer")]
    assert find_folders(run, [renamed], comm) == [str(folder), renamed]
    assert find_folders(str(tmp_path / "absent"), [renamed, run], comm)[:2] == [renamed, str(folder)]
    assert os.path.basename(find_folders(str(tmp_path / "absent"), [str(there)], comm)[-1]) == "newer"
