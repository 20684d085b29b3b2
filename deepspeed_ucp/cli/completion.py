"""``ds_ucp completion``: completion scripts for shells, made from the commands' own parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .common import add_command
from .printing import OK, write_out

if TYPE_CHECKING:
    from .common import Commands

SHELLS = ("bash", "zsh", "tcsh")
_FOLDERS = frozenset({"CKPT", "SOURCE", "DST", "OUT", "A", "B", "DIR"})
_FILES = frozenset({"FILE", "RULES", "NAMES", "SCRIPT", "PROGRAM"})


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "completion",
        help="print a shell's completion script",
        description="Print a script that completes commands, options and folders in a shell.",
        examples="""
            eval "$(ds_ucp completion bash)"       # in ~/.bashrc
            ds_ucp completion bash > ~/.local/share/bash-completion/completions/ds_ucp
            ds_ucp completion zsh > ~/.zfunc/_ds_ucp
            ds_ucp completion tcsh > ~/.ds_ucp.tcsh
        """,
        general=False,
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"one of {', '.join(SHELLS)}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    write_out(make_script(options.shell))
    return OK


def make_script(shell: str) -> str:
    """The completion script of a shell (``bash``, ``zsh`` or ``tcsh``)."""
    import shtab

    from .dispatch import build_parser

    parser = build_parser()
    for action in list_actions(parser):
        if action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for choice in commands._choices_actions:  # shells show the lines of ``ds_ucp --help`` beside the commands
        commands.choices[choice.dest].description = str(choice.help)
    return str(shtab.complete(parser, shell))


def list_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every option and positional argument of a parser and its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from list_actions(command)
