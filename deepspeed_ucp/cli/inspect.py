"""``ds_ucp inspect``: shows a checkpoint's contents and faults from its headers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigError, advise, shorten
from . import common
from .printing import OK, emit

if TYPE_CHECKING:
    from ..model.index import AtomicIndex
    from .contents import Parameter


def add_parser(commands: common.Commands) -> None:
    """Add the parser of the command."""
    parser = common.add_command(
        commands,
        "inspect",
        description="Show a checkpoint's topology, step, optimizer, parameters, sizes and faults. Only the headers of "
        "its files are read, and no code of them is run. If a checkpoint does not open, all its faults are listed and "
        "the exit code is 2.",
        examples="""
            ds_ucp inspect checkpoints/
            ds_ucp inspect checkpoints/global_step1000 --all
            ds_ucp inspect checkpoints/ --param h.0.mlp.weight
            ds_ucp inspect checkpoints/ --patterns megatron-gpt
            ds_ucp inspect checkpoints/ --json | jq .totals
        """,
        keys="folder; written_by; topology; counters; optimizer (name, states, groups, loss_scaler, clip_grad); "
        "totals (bytes and counts); parameters, each with name, instance, kind, shape (or null), shards, dtype, copy, "
        "states, pattern (or null), origin, group, scalars, nbytes, why; ties; instances; client_state; files; "
        "findings (kind, file, text, severity, names, rules). With --param one parameter with hyper and layout",
    )
    common.add_checkpoint(parser)
    text = "one line per parameter, also for layers of equal form"
    parser.add_argument("-a", "--all", action="store_true", help=text)
    text = "show one parameter in detail: its name, or a regular expression that only it matches"
    parser.add_argument("-p", "--param", metavar="NAME", help=text)
    common.add_shared_options(parser, checkpoint=True, patterns=True)


def run(options: argparse.Namespace) -> int:
    """Show the checkpoint, or raise all its faults."""
    from ..comm import join_launch
    from ..formats.deepspeed.naming import Naming
    from ..formats.open import survey_checkpoint
    from .contents import detail_parameter, format_detail, format_summary, list_contents

    with join_launch() as comm:
        folder, *also = common.find_folders(options.checkpoint, options.also, comm)
        rules, groups = comm.run(lambda: (common.read_rules(options), common.read_groups(options.groups)))
        report = survey_checkpoint(folder, comm, Naming(groups=groups), also=also)
        faults = {finding.kind for finding in report.findings if finding.is_fault}
        is_unnamed = not groups and faults == {"unnamed"}
        index = report.index if is_unnamed and report.index else comm.run(report.require)
        if not comm.rank:
            common.warn_unused_groups(options, index)
            data = list_contents(report, index, rules)
            if options.param is not None:
                detail = detail_parameter(index, _pick_parameter(index, data["parameters"], options.param))
                emit(options, detail, format_detail(detail))
            else:
                emit(options, data, format_summary(index, data, unfold=options.all))
    return OK


def _pick_parameter(index: AtomicIndex, parameters: Sequence[Parameter], wanted: str) -> Parameter:
    """Find the parameter of a name, or the only one that a regular expression matches."""
    from .contents import get_key

    name = index.resolve(wanted)
    rows = {str(get_key(row)): row for row in parameters}
    if name in rows:
        return rows[name]
    try:
        matches = [row for row in rows if re.search(wanted, row)]
    except re.error as error:
        raise ConfigError(f"--param: {wanted!r} is neither a parameter nor a regular expression ({error}).") from None
    if len(matches) != 1:
        if matches:
            raise ConfigError(f"--param: {wanted!r} fits {shorten(matches)}; name one.")
        advice = advise(wanted, rows, f"The checkpoint holds {shorten(rows)}.")
        raise ConfigError(f"--param: nothing is named like {wanted!r}. {advice}")
    return rows[matches[0]]
