"""``ds_ucp run``: an untouched training script with the plugin on, under any launcher."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, UcpError
from .common import Commands, add_command, read_patterns
from .printing import ERROR, OK, print_message


def _read_json(text: str) -> Any:
    """For argparse, which of other errors would tell the text, and that may hold secrets."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None


_FLAGS = {
    "trust_pickle": "allow custom Python classes in client states; only for checkpoints you trust",
    "preserve_batch_size": "keep train_batch_size on other numbers of ranks by changing accumulation and micro batch",
    "fallback": "where the newest checkpoint is not whole, take the newest one before it that is",
    "require": "a load that finds nothing to resume is an error, not the begin of a new run",
    "seal": "write a seal after each save",
}
_VALUES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "patterns": (
        "RULES",
        str,
        "how tensor parallelism cuts parameters, what is renamed or resized: a family, a file, or rules",
    ),
    "param_groups": ("WHOSE", str, "hyper-parameters of the param groups: saved (default) or live"),
    "total_batch": ("WHOSE", str, "samples of a step in trainers that count steps: saved (default) or live"),
    "same_topology": ("WHO", str, "who loads where nothing has changed: deepspeed (default) or direct (ours)"),
    "verify": ("HOW", str, "check what is read: crc (default) or off"),
    "mode": ("MODE", str, "direct (default), or atomic: write an atomic checkpoint first"),
    "atomic_dir": ("DIR", str, "where mode atomic writes (default: beside the checkpoint)"),
    "also": ("PLACES", _read_json, "further folders or URLs that hold the same tags, as a list in JSON"),
    "save": ("JSON", _read_json, "saves that do not stop training: true, or their options as an object"),
    "arguments": ("JSON", _read_json, "arguments of load_checkpoint for trainers that pass none on, as an object"),
    "storage_options": ("JSON", _read_json, "options of the stores behind URLs, as an object"),
    "hang_timeout_s": (
        "SECONDS",
        float,
        "seconds without progress after which the torchrun agent kills a rank, if it has a timer (default: 1800)",
    ),
    "window_mb": ("MB", int, "memory per rank for data on its way (default: 256)"),
    "threads": ("N", int, "reading threads per rank (default: from its cores)"),
}
"""Options of ``checkpoint.universal``: what stands for the value, its type, and the help; in ``_FLAGS`` the help."""


def add_parser(commands: Commands) -> None:
    """The command line."""
    run = add_command(
        commands,
        "run",
        help="run a training script with the plugin on",
        description="Run SCRIPT with the plugin installed and on for every engine whose ds_config does not say\n"
        '"checkpoint": {"universal": false}. The script itself needs no change. Options of the plugin reach every '
        "engine; where a ds_config gives one itself, that counts.",
        examples="""
            deepspeed --no_python ds_ucp run train.py --deepspeed_config ds_config.json
            torchrun --nproc-per-node 8 --no-python ds_ucp run train.py
            mpirun -np 8 ds_ucp run train.py
            deepspeed --module deepspeed_ucp run --patterns megatron-gpt pretrain_gpt.py ...   (any number of nodes)
        """,
        general=False,
    )
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module name, as for python -m")
    plugin = run.add_argument_group("options of the plugin (docs/guide.md)")
    for name, text in _FLAGS.items():
        plugin.add_argument(_write_flag(name), action="store_true", default=None, help=text)
    for name, (metavar, kind, text) in _VALUES.items():
        plugin.add_argument(_write_flag(name), metavar=metavar, type=kind, help=text)
    run.add_argument("script", metavar="SCRIPT", help="the training script")
    run.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="passed to the script")


def _write_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(options: argparse.Namespace) -> int:
    """Run the script; its errors and its exit code are its own."""
    try:
        default = read_default(options)
        _check_script(options.script, is_module=options.module)
    except UcpError as error:
        print_message(f"ds_ucp run: {error}")
        return ERROR
    run_script(options.script, [*options.launcher, *options.args], is_module=options.module, default_on=default)
    return OK


def _check_script(script: str, *, is_module: bool) -> None:
    """Refuse what Python cannot run, as its own errors would be a traceback of ours.

    Raises:
        ConfigError: there is no such script, or module.
    """
    if not is_module and not os.access(script, os.R_OK):
        why = "cannot be read" if os.path.exists(script) else "no such file"
        raise ConfigError(f"{script}: {why} (in {os.getcwd()}). Name the training script, behind ds_ucp's own options.")
    if is_module and not _has_module(script):
        raise ConfigError(f"--module {script}: there is no such module. Name one that `python -m` would run.")


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a package that it would be in
        return False


def read_default(options: argparse.Namespace) -> bool | dict[str, Any]:
    """What engines have whose ds_config does not say otherwise.

    Raises:
        ConfigError: an option has a value that it cannot have.
    """
    from ..config import merge_options
    from ..patterns import from_config

    given = {name: getattr(options, name) for name in (*_FLAGS, *_VALUES)}
    given = {name: value for name, value in given.items() if value is not None}
    if "patterns" in given:
        given["patterns"] = read_patterns(given["patterns"])
        from_config(given["patterns"])
    merge_options([("what the command line says", given)])
    return given or True


def run_script(
    script: str, args: Sequence[str], *, is_module: bool, default_on: bool | Mapping[str, Any] = True
) -> None:
    """Run a script as ``python SCRIPT ARGS…`` would, the plugin installed and on by default."""
    import deepspeed_ucp

    deepspeed_ucp.install(default_on=default_on)
    sys.argv = [script, *args]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.path[0:1] = [os.path.dirname(os.path.abspath(script))]
    runpy.run_path(script, run_name="__main__")
