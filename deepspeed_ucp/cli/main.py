"""Entry point of ``ds_ucp``."""

from __future__ import annotations

import argparse
import logging
import runpy
import sys
from collections.abc import Sequence

_EXAMPLES = """\
examples:
  deepspeed --no_python ds_ucp run train.py --deepspeed_config ds_config.json
  torchrun --nproc-per-node 8 --no-python ds_ucp run train.py
  mpirun -np 8 ds_ucp run train.py
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="ds_ucp", description="Elastic resume for DeepSpeed checkpoints.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a training script with the plugin on",
        description="Run SCRIPT with the plugin installed and on for every engine whose ds_config does not say "
        '"checkpoint": {"universal": false}. The script itself needs no change.',
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module name, as for python -m")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="passed to the script")
    return parser


def split_launcher_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate ``--local_rank=N``, which ``deepspeed --no_python`` puts first, from our own arguments."""
    ours, launcher = list(argv), []
    while ours and ours[0].split("=")[0] in ("--local_rank", "--local-rank"):
        launcher.append(ours.pop(0))
        if "=" not in launcher[-1] and ours:
            launcher.append(ours.pop(0))
    return launcher, ours


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    launcher, ours = split_launcher_arguments(sys.argv[1:] if argv is None else argv)
    options = build_parser().parse_args(ours)
    run_script(options.script, [*launcher, *options.args], is_module=options.module)
    return 0


def run_script(script: str, args: Sequence[str], *, is_module: bool) -> None:
    """Run a script as ``python SCRIPT ARGS…`` would, the plugin installed and on by default."""
    import deepspeed_ucp

    show_decisions()
    deepspeed_ucp.install(default_on=True)
    sys.argv = [script, *args]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    import os

    sys.path[0:1] = [os.path.dirname(os.path.abspath(script))]
    runpy.run_path(script, run_name="__main__")


def show_decisions() -> None:
    """Let the plugin's INFO lines through, whatever the script does about logging."""
    log = logging.getLogger("deepspeed_ucp")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [deepspeed_ucp] %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
