"""``ds_ucp inspect``: what a checkpoint holds, where, and what is missing; header-only."""

from __future__ import annotations

import argparse
import logging
import os
import re
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..comm import Comm, join_launch
from ..errors import ConfigError, MismatchError, UcpError, shorten
from .common import ERROR, OK, add_checkpoint_options, add_command, emit, open_index, read_rules, resolve, tell

if TYPE_CHECKING:
    from ..atoms import AtomicIndex
    from .parameters import Parameter
    from .survey import Finding, Survey

logger = logging.getLogger("deepspeed_ucp")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "inspect",
        help="show what a checkpoint holds, where, and what is missing",
        description="Show a checkpoint's topology, step, optimizer, parameters, sizes, and what is missing or odd.\n"
        "Only the headers of its files are read, and no code of them is run. A damaged checkpoint is told file by\n"
        "file, with exit code 2.",
        examples="""
            ds_ucp inspect checkpoints/
            ds_ucp inspect checkpoints/global_step1000 --all
            ds_ucp inspect checkpoints/ --param h.0.mlp.weight
            ds_ucp inspect checkpoints/ --patterns megatron-gpt --plot map.png
            ds_ucp inspect checkpoints/ --json | jq .totals
        """,
    )
    add_checkpoint_options(parser)
    parser.add_argument(
        "-a", "--all", action="store_true", help="one line per parameter; layers of equal form unfolded"
    )
    parser.add_argument(
        "-p", "--param", metavar="NAME", help="one parameter in detail: its name, or a regular expression that fits one"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw which rank's files hold which part of the model (png, svg, pdf; needs matplotlib)",
    )


def run(options: argparse.Namespace) -> int:
    """Show the checkpoint; 2 where it does not open. The ranks of a launch share the reading of headers."""
    with join_launch() as comm:
        folder = ""
        with comm.together():
            folder, rules = resolve(options.checkpoint), read_rules(options)
        try:
            index, findings = _open(options, folder, comm)
        except (MismatchError, ConfigError):
            raise
        except UcpError as error:
            if not comm.rank:
                _show_damage(options, folder, error)
            return ERROR
        if not comm.rank:
            survey = make_survey(index, folder, rules)
            survey.findings.extend(findings)
            _show(options, survey)
    return OK


def _show(options: argparse.Namespace, survey: Survey) -> None:
    if options.plot:
        from .plot import draw_map

        draw_map(survey, options.plot)
    if options.param:
        _show_parameter(options, survey)
    else:
        from .summary import write_summary

        emit(options, survey.to_data(), write_summary(survey, unfold=options.all))
    if options.plot and not options.quiet:
        tell(f"ds_ucp: drew {options.plot}")


def _open(options: argparse.Namespace, folder: str, comm: Comm) -> tuple[AtomicIndex, list[Finding]]:
    """The index; without the optimizer's states where these have no names and ``--groups`` is not given."""
    from .survey import Finding

    level = logger.level
    logger.setLevel(logging.ERROR)  # what would be a warning is a finding of the report
    try:
        return open_index(options, folder, comm), []
    except MismatchError as error:
        if options.groups:
            raise
        text = f"the optimizer's states have no names; give --groups ({error})"
        return open_index(options, folder, comm, weights_only=True), [Finding("unnamed", text)]
    finally:
        logger.setLevel(level)


def make_survey(index: AtomicIndex, folder: str, rules: Sequence[Any] = ()) -> Survey:
    """All that there is to tell about a checkpoint that opens.

    Args:
        rules: the user's, for parameters that the checkpoint does not settle.

    Raises:
        CheckpointError: the state file is damaged.
    """
    from .parameters import list_parameters, settle_patterns
    from .survey import Survey, count_totals, find_findings, list_files, read_client_keys, tell_origin

    settling = settle_patterns(index, rules)
    rows = list_parameters(index, settling)
    client, version = read_client_keys(index)
    findings = find_findings(index, folder, rows, settling)
    files = list_files(index, folder)
    totals, written = count_totals(index, files, rows), tell_origin(index, folder, version)
    return Survey(folder, index, rows, files, totals, client, written, findings)


def _show_parameter(options: argparse.Namespace, survey: Survey) -> None:
    from .summary import detail_parameter, write_detail

    detail = detail_parameter(survey.index, pick_parameter(survey, options.param))
    emit(options, detail, write_detail(detail))


def pick_parameter(survey: Survey, wanted: str) -> Parameter:
    """The parameter of that name (or tied to it), or the one whose name a regular expression fits.

    Raises:
        ConfigError: none or several fit.
    """
    name = survey.index.resolve(wanted)
    rows = {row.name: row for row in survey.parameters}
    if name in rows:
        return rows[name]
    try:
        found = [each for each in rows if re.search(wanted, each)]
    except re.error as error:
        raise ConfigError(f"--param: {wanted!r} is neither a parameter nor a regular expression ({error}).") from None
    if len(found) != 1:
        fits = f"{wanted!r} fits {shorten(found)}; name one" if found else f"nothing is named like {wanted!r}"
        known = "" if found else f" (the checkpoint holds {shorten(list(rows))})"
        raise ConfigError(f"--param: {fits}{known}.")
    return rows[found[0]]


def _show_damage(options: argparse.Namespace, folder: str, error: UcpError) -> None:
    """What can still be told, and the error."""
    from .damage import examine_folder, write_damage

    data = examine_folder(folder, error)
    emit(options, data, write_damage(data))
    if options.debug:
        tell(traceback.format_exc().rstrip())
    tell(f"ds_ucp: error: {str(error).removeprefix(f'{folder}{os.sep}')}")
