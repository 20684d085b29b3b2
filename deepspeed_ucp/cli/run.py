"""``ds_ucp run``: runs an unmodified training script with the plugin on."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from typing import Any

from ..errors import ConfigError, UcpError
from . import common
from .printing import ERROR, OK, print_message


def add_parser(commands: common.Commands) -> None:
    """Add the parser of the command."""
    parser = common.add_command(
        commands,
        "run",
        description="Run SCRIPT with the plugin installed and on for every engine whose ds_config does not say "
        '"checkpoint": {"universal": false}. The script itself needs no change. Options of the plugin reach every '
        "engine; an option in the ds_config takes precedence.",
        examples="""
            deepspeed --module deepspeed_ucp run train.py --deepspeed_config ds_config.json   (any number of nodes)
            torchrun --nproc-per-node 8 --no-python ds_ucp run train.py
            mpirun -np 8 ds_ucp run train.py
            ds_ucp run --config '{"patterns": "megatron-gpt", "fallback": true}' pretrain_gpt.py ...
        """,
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module name, as for python -m")
    text = 'options of "checkpoint": {"universal": …} (docs/guide.md#options): a JSON object, or a file with one'
    parser.add_argument("--config", metavar="JSON", help=text)
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    rest = parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="passed to the script")
    rest.required = False  # before Python 3.13 argparse asks for it


def run(options: argparse.Namespace) -> int:
    """Run the script like ``python SCRIPT``, with its errors and its exit code."""
    script = options.script
    try:
        default = _read_default(options.config)
        is_empty = os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py"))
        if not options.module and (is_empty or not os.access(script, os.R_OK)):
            why = "cannot be read" if os.path.exists(script) else "no such file"
            why = "a folder without __main__.py" if is_empty else why
            advice = "Name the training script, after the options of ds_ucp."
            raise ConfigError(f"{script}: {why} (in {os.getcwd()}). {advice}")
    except UcpError as error:
        print_message(f"ds_ucp run: {error}")
        return ERROR
    from .. import install

    install(default_on=default)
    sys.argv = [script, *options.launcher, *options.args]
    if options.module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0:1] = [os.path.dirname(os.path.abspath(script))]
        runpy.run_path(script, run_name="__main__")
    return OK


def _read_default(text: str | None) -> bool | dict[str, Any]:
    """Read ``--config``, a JSON object or its file; True without one.

    The options apply to engines whose ds_config does not set them. Errors do not quote the text, which may contain
    secrets.
    """
    from ..config import merge_options
    from ..tensor_parallel.rules import from_config

    if text is None:
        return True
    wanted = "--config: a JSON object or a file with one is needed"
    try:
        if not text.lstrip().startswith("{"):
            with open(text, encoding="utf-8") as file:
                text = file.read()
        given = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        is_json = bool({*text} & {*'{"'})  # misspelt; the text may contain secrets
        raise ConfigError(f"{wanted}: {error.strerror if is_json and isinstance(error, OSError) else error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f'{wanted}, such as {{"fallback": true}}.')
    if "patterns" in given:
        from_config(given["patterns"])
    merge_options([("--config", given)])
    return given or True
