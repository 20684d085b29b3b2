"""``ds_ucp torchrun``: torchrun whose agents survive each other."""

from __future__ import annotations

import argparse
import traceback

from ..errors import UcpError
from .common import Commands, add_command
from .printing import ERROR, FAULT, OK, print_message


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "torchrun",
        help="torchrun whose agents survive each other, with hang detection",
        description="torchrun with its own options. A lost agent is missed within seconds, its workers end with it, "
        "the others go on without it, and workers that hang are started again. Beside torchrun's own options: "
        "--preflight tests the node before each round (--preflight-dir DIR: the folder whose disk is tested), and "
        "--rdzv-conf takes hang=SECONDS and start=SECONDS without a step, events=FILE, steps=FILE (docs/cli.md).",
        examples="""
            ds_ucp torchrun --nnodes 1:2 --nproc-per-node 8 --rdzv-endpoint /shared/rendezvous --rdzv-id job7 train.py
            ds_ucp torchrun --nnodes 2:8 --rdzv-endpoint head:29400 --rdzv-id job7 --rdzv-conf hang=120 train.py
        """,
        general=False,
    )
    text = "let every worker import everything itself, also after a restart (docs/restarts.md)"
    parser.add_argument("--no-warm", action="store_true", help=text)
    parser.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="torchrun's options, script, arguments")


def run(options: argparse.Namespace) -> int:
    """Run torchrun; its errors are its own."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from ..supervise.agents.agent import find_verdict
    from ..supervise.agents.agent import run as run_agent

    try:
        run_agent(options.args)
    except ChildFailedError:
        traceback.print_exc()
        print_message(f"ds_ucp torchrun: given up: {find_verdict() or 'a worker failed that has told nothing'}")
        return FAULT
    except UcpError as error:
        print_message(f"ds_ucp torchrun: {error}")
        return ERROR
    return OK
