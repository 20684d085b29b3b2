"""``ds_ucp inspect``: what a checkpoint holds, where, and what is missing; header-only."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING

from ..errors import ConfigError, advise, count_of, shorten
from .common import Commands, add_checkpoint, add_command, add_shared_options, find_folders, read_groups, read_rules
from .printing import ERROR, OK, emit, print_message

if TYPE_CHECKING:
    from ..comm import Comm
    from ..patterns import RuleSet
    from ..sources.open import FolderReport
    from .parameters import Parameter
    from .survey import Survey


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "inspect",
        help="show what a checkpoint holds, where, and what is missing",
        description="Show a checkpoint's topology, step, optimizer, parameters, sizes, and what is missing or odd. "
        "Only the headers of its files are read, and no code of them is run. A checkpoint that does not open is "
        "listed with all its faults, with exit code 2.",
        examples="""
            ds_ucp inspect checkpoints/
            ds_ucp inspect checkpoints/global_step1000 --all
            ds_ucp inspect checkpoints/ --param h.0.mlp.weight
            ds_ucp inspect checkpoints/ --patterns megatron-gpt
            ds_ucp inspect checkpoints/ --json | jq .totals
        """,
    )
    add_checkpoint(parser)
    text = "one line per parameter; layers of equal form unfolded"
    parser.add_argument("-a", "--all", action="store_true", help=text)
    text = "one parameter in detail: its name, or a regular expression that fits one"
    parser.add_argument("-p", "--param", metavar="NAME", help=text)
    add_shared_options(parser, checkpoint=True, patterns=True)


def run(options: argparse.Namespace) -> int:
    """Show the checkpoint; 2 where it does not open. The ranks of a launch share the reading of headers."""
    from ..comm import join_launch

    with join_launch() as comm:
        report, rules = look_at(options, comm)
        if not comm.rank and opens(options, report):
            from .survey import make_survey

            _show(options, make_survey(report, rules))
        elif not comm.rank:
            _show_damage(options, report)
    return OK if opens(options, report) else ERROR


def look_at(options: argparse.Namespace, comm: Comm) -> tuple[FolderReport, tuple[RuleSet, ...]]:
    """What the headers of a checkpoint tell, and the rules that are given; collective.

    Raises:
        UcpError: there is no checkpoint, or what is given cannot be read.
    """
    from ..sources.naming import Naming
    from ..sources.open import survey_checkpoint

    folder, *also = find_folders(options.checkpoint, options.also, comm)
    rules, groups = comm.run(lambda: (read_rules(options), read_groups(options.groups)))
    return survey_checkpoint(folder, comm, Naming(groups=groups), also=also), rules


def opens(options: argparse.Namespace, report: FolderReport) -> bool:
    """Whether all of a checkpoint can be shown; states without names do not keep the rest from that."""
    faults = {finding.kind for finding in report.findings if not finding.warning}
    return report.index is not None and faults <= (set() if options.groups else {"unnamed"})


def _show(options: argparse.Namespace, survey: Survey) -> None:
    from .summary import detail_parameter, write_detail, write_summary

    if options.param:
        detail = detail_parameter(survey, pick_parameter(survey, options.param))
        emit(options, detail, write_detail(detail))
    else:
        emit(options, survey.data, write_summary(survey, unfold=options.all))


def pick_parameter(survey: Survey, wanted: str) -> Parameter:
    """The parameter of that name (or tied to it), or the one whose name a regular expression fits.

    Raises:
        ConfigError: none or several fit.
    """
    name = survey.index.resolve(wanted)
    rows = {row.label: row for row in survey.parameters}
    if name in rows:
        return rows[name]
    try:
        found = [each for each in rows if re.search(wanted, each)]
    except re.error as error:
        raise ConfigError(f"--param: {wanted!r} is neither a parameter nor a regular expression ({error}).") from None
    if len(found) != 1:
        if found:
            raise ConfigError(f"--param: {wanted!r} fits {shorten(found)}; name one.")
        advice = advise(wanted, rows, f"The checkpoint holds {shorten(rows)}.")
        raise ConfigError(f"--param: nothing is named like {wanted!r}. {advice}")
    return rows[found[0]]


def _show_damage(options: argparse.Namespace, report: FolderReport) -> None:
    """Print all faults of a checkpoint that does not open, and the error on stderr."""
    from ..sources.findings import fold_findings, make_error

    faults = [finding for finding in report.findings if not finding.warning]
    if any(finding.kind == "unnamed" for finding in faults):
        report.require()
    error = make_error(report.findings)
    files = [{"name": name, "size": size} for name, size in sorted(report.files.sizes.items()) if size >= 0]
    texts = (each.text.removeprefix(f"{report.folder}{os.sep}") for each in fold_findings(faults))
    lines = [f"{report.folder}: does not open, {count_of(len(faults), 'fault')}", *dict.fromkeys(texts)]
    facts = {"folder": report.folder, "error": str(error), "kind": type(error).__name__}
    emit(options, {**facts, "files": files, "findings": report.findings}, lines)
    print_message(f"ds_ucp: error: {str(error).removeprefix(f'{report.folder}{os.sep}')}")
