"""``ds_ucp preflight``: some seconds of tests that a node has to pass before it trains."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from .common import Commands, add_command
from .printing import FAULT, OK, emit, format_table

if TYPE_CHECKING:
    from ..supervise.preflight.judging import Report, Verdict


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "preflight",
        help="test nodes for some seconds before they train",
        description="Test this machine, or all hosts of a hostfile at once: memory, disk, matrix products of "
        "processors and accelerators against themselves and each other, links between them. Exit code 0: none fails; "
        "1: one does; 2: an error.",
        examples="""
            ds_ucp preflight
            ds_ucp preflight /local/scratch --json
            ds_ucp preflight --hostfile hosts
        """,
    )
    text = "the folder whose disk is tested (default: that of temporary files)"
    parser.add_argument("folder", metavar="DIR", nargs="?", default="", help=text)
    parser.add_argument("--hostfile", metavar="FILE", help="test its hosts, over pdsh or ssh, and not this machine")


def run(options: argparse.Namespace) -> int:
    """Test; 1 where one fails."""
    from ..supervise.hosts import Reach, find_own_address, is_alone, read_hostfile
    from ..supervise.preflight.asking import HERE, Preflight, ask_here

    hosts = read_hostfile(options.hostfile) if options.hostfile else {HERE: 0}
    ask = ask_here if is_alone(hosts) else Reach().ask
    preflight = Preflight(ask, find_own_address(hosts), options.folder, lambda *_, **__: None)
    reports, verdict = preflight.test(hosts)
    data = {
        host: {"faults": verdict.faults.get(host, []), "report": None if isinstance(report, str) else report}
        for host, report in reports.items()
    }
    emit(options, {"hosts": data, "notes": verdict.notes}, _write(reports, verdict))
    return FAULT if verdict.faults else OK


def _write(reports: Mapping[str, Report | str], verdict: Verdict) -> Iterator[str]:
    """A table of the lowest figures, with a column for each host where these are few; then what is wrong."""
    from ..supervise.preflight.asking import summarize
    from ..supervise.preflight.judging import MEASURES

    figures = {host: {} if isinstance(report, str) else summarize(report) for host, report in reports.items()}
    shown = [what for what in MEASURES if any(what in each for each in figures.values())]
    rows = [
        [host, *(f"{each[what]:,.0f}" if what in each else "-" for what in shown)] for host, each in figures.items()
    ]
    header = ["", *(f"{what}, {MEASURES[what].unit}" for what in shown)]
    if len(rows) < len(shown):
        header, *rows = map(list, zip(header, *rows, strict=True))
    yield from format_table(rows, header, right=range(1, len(header)))
    yield ""
    for host, faults in verdict.faults.items():
        yield from (f"{host}: {fault}" for fault in faults)
    yield from verdict.notes
    yield f"{len(reports) - len(verdict.faults)} of {len(reports)} pass"
