"""``ds_ucp run``: an untouched training script with the plugin on, under any launcher."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .common import add_command
from .printing import OK

if TYPE_CHECKING:
    from .common import Commands


def add_parser(commands: Commands) -> None:
    """The command line."""
    run = add_command(
        commands,
        "run",
        help="run a training script with the plugin on",
        description="Run SCRIPT with the plugin installed and on for every engine whose ds_config does not say\n"
        '"checkpoint": {"universal": false}. The script itself needs no change.',
        examples="""
            deepspeed --no_python ds_ucp run train.py --deepspeed_config ds_config.json
            torchrun --nproc-per-node 8 --no-python ds_ucp run train.py
            mpirun -np 8 ds_ucp run train.py
        """,
        general=False,
    )
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module name, as for python -m")
    run.add_argument("script", metavar="SCRIPT", help="the training script")
    run.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="passed to the script")


def run(options: argparse.Namespace) -> int:
    """Run the script; its errors and its exit code are its own."""
    run_script(options.script, [*options.launcher, *options.args], is_module=options.module)
    return OK


def run_script(script: str, args: Sequence[str], *, is_module: bool) -> None:
    """Run a script as ``python SCRIPT ARGS…`` would, the plugin installed and on by default."""
    import deepspeed_ucp

    deepspeed_ucp.install(default_on=True)
    sys.argv = [script, *args]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.path[0:1] = [os.path.dirname(os.path.abspath(script))]
    runpy.run_path(script, run_name="__main__")
