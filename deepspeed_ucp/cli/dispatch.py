"""Entry point of ``ds_ucp``: runs commands and converts errors to exit codes."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from ..errors import UcpError
from ..version import __version__
from .common import Parser, make_formatter, read_storage_options
from .printing import BROKEN_PIPE, ERROR, INTERRUPTED, Lines, emit, find_rank, prepare_streams, print_message

GROUPS = {
    "train": {"run": "run a training script with the plugin on"},
    "examine": {
        "list": "list the checkpoints of a folder, and the one that a resume takes",
        "inspect": "show the contents of a checkpoint, and its faults",
        "verify": "check every byte of a checkpoint",
        "diff": "compare two checkpoints of any topologies",
        "plan": "check whether a checkpoint loads at another topology",
    },
    "write": {
        "convert": "write a checkpoint as an atomic (universal) checkpoint",
        "export": "write safetensors, or all state for torch.distributed.checkpoint",
    },
}
"""Purpose → command → help. Commands are modules with ``add_parser(commands)`` and ``run(options) -> exit code``."""

COMMANDS = tuple(name for group in GROUPS.values() for name in group)

_EPILOG = """\
exit codes:
  0    done; nothing wrong was found
  1    a fault or a difference was found, or a plan is impossible
  2    an error: bad usage, unreadable or refused input
  130  interrupted

`ds_ucp COMMAND --help` shows a command's options and examples.
"""


def build_parser(names: Sequence[str] = COMMANDS) -> Parser:
    """Build the command line of all commands, or of some."""
    usage = "ds_ucp [--version] [-h] COMMAND …"
    lines = ["Elastic resume for DeepSpeed checkpoints."]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:9}{text}" for name, text in group.items())]
    text = "\n".join(lines)
    parser = Parser("ds_ucp", usage, text, _EPILOG, formatter_class=make_formatter, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ds_ucp {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="ds_ucp"
    )
    for name in names:
        load_command(name).add_parser(commands)
    return parser


def load_command(name: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(f".{name}", __package__)


def split_launcher_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's arguments (``--local_rank=N``, put first), and the others."""
    ours, launcher = list(argv), []
    while ours and ours[0].split("=")[0] in ("--local_rank", "--local-rank"):
        launcher.append(ours.pop(0))
        if "=" not in launcher[-1] and ours:
            launcher.append(ours.pop(0))
    return launcher, ours


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    launcher, ours = split_launcher_arguments(sys.argv[1:] if argv is None else argv)
    if ours[:1] == ["run"]:  # streams, errors and interrupts are the script's
        options = _parse(ours)
        options.launcher = launcher
        return int(load_command("run").run(options))
    prepare_streams()
    if not ours:
        build_parser().print_help(sys.stderr)
        raise SystemExit(ERROR)
    options = _parse(ours)
    try:
        with _show_warnings(quiet=options.quiet):
            return _run_command(options)
    except KeyboardInterrupt:
        trace = f"\n{traceback.format_exc()}".rstrip() if options.debug else ""
        print_message(f"ds_ucp: interrupted{trace}")
        return INTERRUPTED
    except BrokenPipeError:
        return BROKEN_PIPE


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = build_parser(tuple(name for name in COMMANDS if argv[:1] == [name]) or COMMANDS)
    options, left = parser.parse_known_args(argv)
    # Before Python 3.13 argparse does not assign a DST behind options.
    if len(left) == 1 and not left[0].startswith("-") and getattr(options, "destination", "") is None:
        options.destination = left.pop()
    if left:
        parser.refuse(left, options.command)
    return options


def _run_command(options: argparse.Namespace) -> int:
    """Run a command and return its exit code; print an error as one line."""
    from ..comm import describe_os_error
    from ..io.store import set_storage_options

    try:
        if options.storage_option:
            set_storage_options(read_storage_options(options.storage_option))
        return int(load_command(options.command).run(options))
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the last resort: one line instead of a traceback
        if options.debug:
            print_message(traceback.format_exc().rstrip())
        elif isinstance(error, UcpError) and error.echo:
            return ERROR
        hint = "" if options.debug else " (a fault of ds_ucp itself; --debug shows where)"
        text = f"{type(error).__name__}: {error}{hint}"
        if isinstance(error, UcpError | OSError):
            text = str(error) if isinstance(error, UcpError) else describe_os_error(error)
        print_message(f"ds_ucp: error: {text}")
        if options.json:
            findings = {"findings": error.findings} if isinstance(error, UcpError) and error.findings else {}
            emit(options, {"error": text, "kind": type(error).__name__, **findings}, ())
        return ERROR


@contextmanager
def _show_warnings(*, quiet: bool) -> Iterator[None]:
    """Print the package's log as short lines on rank 0's stderr while a command runs."""
    log = logging.getLogger("deepspeed_ucp")
    before, propagate, handler = log.level, log.propagate, Lines()
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.ERROR if quiet or find_rank() else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = propagate
        log.setLevel(before)
