"""``ds_ucp supervise``: a launch that is started again when it fails, on the hosts that are left."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..errors import ConfigError
from .common import Commands, add_command
from .printing import print_message

if TYPE_CHECKING:
    from ..supervise.command import Command

T = TypeVar("T", int, float)

_DEFAULT_HOSTFILE = "/job/hostfile"
"""Where the deepspeed launcher looks without ``--hostfile``."""


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "supervise",
        help="start a launch again when it fails, on the hosts that are left",
        description="Run PROGRAM, and run it again when it fails, hangs, or loses a host, on those hosts that still "
        "answer. What happens is told as one JSON line per event.",
        examples="""
            DEEPSPEED_UCP=1 ds_ucp supervise -- deepspeed train.py --deepspeed_config ds_config.json
            ds_ucp supervise --hostfile hosts --min-nodes 2 -- deepspeed --module deepspeed_ucp run train.py
            ds_ucp supervise --preflight --hostfile hosts -- deepspeed train.py
            ds_ucp supervise --hang 120 --log events.jsonl -- deepspeed --num_gpus 8 train.py
        """,
        general=False,
    )
    add = parser.add_argument
    add("--hostfile", metavar="FILE", help="hosts and slots (default: the deepspeed command's own)")
    count, seconds = _at_least(int, 0), _at_least(float, 0)
    text = "hosts without which nothing is started (default: 1)"
    add("--min-nodes", type=_at_least(int, 1), default=1, metavar="N", help=text)
    add("--max-restarts", type=count, default=100, metavar="N", help="restarts in all (default: 100)")
    text = "seconds without a step after which a launch hangs (default: 600; 0: never)"
    add("--hang", type=seconds, default=600.0, metavar="SECONDS", help=text)
    text = "seconds to the first step (default: 1800; 0: no limit)"
    add("--start", type=seconds, default=1800.0, metavar="SECONDS", help=text)
    text = "seconds that a launch has to end by itself, after a signal or a rank's failure (default: 30)"
    add("--settle", type=seconds, default=30.0, metavar="SECONDS", help=text)
    text = "seconds to wait for enough hosts (default: 1800)"
    add("--wait", type=seconds, default=1800.0, metavar="SECONDS", help=text)
    text = "test every host before each start, and leave out those that fail (ds_ucp preflight)"
    add("--preflight", action="store_true", help=text)
    text = "the folder whose disk --preflight tests (default: that of temporary files)"
    add("--preflight-dir", default="", metavar="DIR", help=text)
    text = "let every rank import everything itself, also after a restart (docs/restarts.md)"
    add("--no-warm", action="store_true", help=text)
    add("--log", metavar="FILE", help="append the events to FILE instead of writing them to stderr")
    add("--steps", metavar="FILE", help="append the seconds of every step by rank to FILE (`ds_ucp report --steps`)")
    add("--debug", action="store_true", help="show the traceback of an error")
    add("program", metavar="PROGRAM", nargs=argparse.REMAINDER, help="behind `--`: the launcher and its arguments")


def _at_least(kind: Callable[[str], T], least: int) -> Callable[[str], T]:
    """An option's type: a number that is not below this one."""

    def parse(text: str) -> T:
        number = kind(text)
        if not number >= least:
            raise ValueError
        return number

    parse.__name__ = f"number from {least} on"  # of argparse's message
    return parse


def run(options: argparse.Namespace) -> int:
    """Supervise; returns the exit code of the last launch."""
    from ..supervise.command import parse_command
    from ..supervise.hosts import read_hostfile
    from ..supervise.log import make_log
    from ..supervise.policy import RestartLimits
    from ..supervise.supervisor import Settings, Supervisor
    from ..supervise.watch import Patience

    command = parse_command(options.program[options.program[:1] == ["--"] :])
    path = find_hostfile(options.hostfile, command)
    hosts = None if path is None else command.select(read_hostfile(path))
    if options.min_nodes > len(hosts or (path,)):
        raise ConfigError(
            f"--min-nodes {options.min_nodes}: {path or 'this machine alone'} has {len(hosts or (path,))}. Take no "
            "more than that, or name a hostfile with more hosts."
        )
    settings = Settings(
        min_nodes=options.min_nodes,
        limits=RestartLimits(restarts=options.max_restarts),
        patience=Patience(start=options.start, step=options.hang),
        settle=options.settle,
        wait=options.wait,
        preflight=options.preflight_dir if options.preflight else None,
        steps=options.steps,
        warm=not options.no_warm,
    )
    supervisor = Supervisor(command, hosts, settings, make_log(options.log))
    code = supervisor.run()
    if supervisor.verdict:
        print_message(f"ds_ucp supervise: {supervisor.verdict}")
    return code


def find_hostfile(given: str | None, command: Command) -> str | None:
    """The hostfile that counts; None where the launch is this machine's alone.

    Raises:
        ConfigError: one is given for a program that takes none.
    """
    if given is not None and not command.takes_hosts:
        raise ConfigError(f"--hostfile: {command.program[0]} is not the deepspeed launcher, which alone takes one.")
    if not command.takes_hosts or ("--no_ssh", None) in command.options:
        return None
    path = given or command.find("--hostfile")
    return path or (_DEFAULT_HOSTFILE if os.path.isfile(_DEFAULT_HOSTFILE) else None)
