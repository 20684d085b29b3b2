"""``ds_ucp diff``: compares two checkpoints of any topologies, tensor by tensor."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, pluralize
from . import common
from .printing import FAULT, OK, emit, format_count, format_table, list_fields

if TYPE_CHECKING:
    from ..examine.diff import AtomDifference, Difference
    from ..examine.values import ValueDifference
    from ..model.index import AtomicIndex

ROWS = 20
"""Lines of the table without ``--all``."""


def add_parser(commands: common.Commands) -> None:
    """Add the parser of the command."""
    parser = common.add_command(
        commands,
        "diff",
        description="Compare two checkpoints of any topologies and formats: every parameter and optimizer state "
        "as a logical tensor, to the bit; hyper-parameters, counters, loss scaler, scheduler and client state. "
        "Topology is no difference. Masters are rounded if the other side has only weights of a smaller type. "
        "Exit code 0: equal (or within --tolerance); 1: different; 2: an error.",
        examples=r"""
            ds_ucp diff run1/global_step1000 run2/global_step1000
            ds_ucp diff checkpoints/ checkpoints/global_step1000_universal --json
            ds_ucp diff before after --states fp32 --only 'layers\.0\.' --tolerance 1e-6
            ds_ucp diff --config checkpoints/global_step1000 ds_config.json
        """,
        keys="a; b; equal; compared, numel, converted (numbers of tensors, of their elements, and of tensors of two "
        "dtypes); atoms (tensors that differ); values (other differences); notes; unused (rules); tolerance. With "
        "--config: a, b, equal, values, notes",
    )
    common.add_checkpoint(parser, "a", "A")
    common.add_checkpoint(parser, "b", "B")
    parser.add_argument("--only", default="", metavar="REGEX", help="parameters whose names match somewhere")
    text = "these states of them, such as fp32,exp_avg; nothing but tensors"
    parser.add_argument("--states", default="", metavar="NAMES", help=text)
    text = "let values pass that are no further apart"
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="ATOL", help=text)
    parser.add_argument("--all", action="store_true", help="a line for every tensor that differs")
    text = "compare ds_config and hyper-parameters instead; A and B may be files of a ds_config, too"
    parser.add_argument("--config", action="store_true", help=text)
    common.add_shared_options(parser, checkpoint=True, patterns=True, second="b", window=64)


def run(options: argparse.Namespace) -> int:
    """Compare; collective under mpirun and torchrun."""
    from ..comm import join_launch
    from ..examine.diff import DiffOptions, diff_checkpoints

    if options.config:
        return _compare_settings(options)
    if not options.tolerance >= 0:
        raise ConfigError("--tolerance must be a number of at least 0.")
    how = DiffOptions(
        **common.read_work_options(options, least=1),
        only=options.only,
        states=frozenset(filter(None, map(str.strip, options.states.split(",")))),
        tolerance=options.tolerance,
    )
    with join_launch() as comm:
        rules = comm.run(lambda: common.read_rules(options))
        (_, left), (_, right) = (common.open_index(options, *side, comm) for side in _list_sides(options))
        common.warn_unused_groups(options, left, right)
        difference = diff_checkpoints(left, right, comm, how, rules=rules)
    data = {"a": options.a, "b": options.b, "equal": difference.equal, **list_fields(difference)}
    emit(options, data, format_difference(difference, everything=options.all))
    return OK if difference.equal else FAULT


def _compare_settings(options: argparse.Namespace) -> int:
    """Compare ds_configs and hyper-parameters of saves or files; return the exit code."""
    from ..examine.settings import compare_configs, compare_hyper
    from ..examine.values import compare_values

    if options.only or options.states or options.tolerance:
        raise ConfigError("--config compares no tensors: leave --only, --states and --tolerance out.")
    (left, mine), (right, theirs) = (_open_settings(options, *side) for side in _list_sides(options))
    common.warn_unused_groups(options, *(index for index in (left, right) if index))
    values, notes = compare_configs(mine, theirs)
    if left and right:
        values += [value for value in compare_values(left, right, {}, lambda name: True) if value.section != "scalar"]
    elif left:
        values += compare_hyper(left, theirs, is_left=True)
    elif right:
        values += compare_hyper(right, mine, is_left=False)
    data = {"a": options.a, "b": options.b, "equal": not values, "values": values, "notes": notes}
    verdict = f"different: {pluralize(len(values), 'value')}" if values else "equal: ds_config and hyper-parameters"
    emit(options, data, [verdict, *(f"note: {note}" for note in notes), *map(_describe_value, values)])
    return FAULT if values else OK


def _list_sides(options: argparse.Namespace) -> Iterable[tuple[str, list[str]]]:
    return (options.a, options.also), (options.b, options.also_b)


def _open_settings(
    options: argparse.Namespace, path: str, also: Sequence[str]
) -> tuple[AtomicIndex | None, Mapping[str, Any]]:
    """Return a save's index and ds_config; for a ds_config file the index is None."""
    from ..comm import Comm
    from ..examine.settings import read_config
    from ..formats.deepspeed.ownfiles import read_saved_config
    from ..io.store import is_file

    if is_file(path):
        return None, read_config(path)
    _, index = common.open_index(options, path, also, Comm())
    config = read_saved_config(index)
    if not config:
        raise ConfigError(f"--config: {path} has no ds_config. Name a save of DeepSpeed, or a file.")
    return index, config


def format_difference(difference: Difference, *, everything: bool = False) -> list[str]:
    """Return a difference's lines, verdict first; layers share lines by default."""
    groups: dict[object, list[AtomDifference]] = {}
    for atom in difference.atoms:
        key = (atom.name, atom.instance) if everything else _replace_numbers(atom.label)
        groups.setdefault((key, atom.state, atom.kind), []).append(atom)
    rows = [_make_row(atoms) for atoms in groups.values()]
    shown = rows if everything else rows[:ROWS]
    lines = [_format_verdict(difference)]
    lines += [f"note: {note}" for note in difference.notes] + [f"unused: {rule}" for rule in difference.unused]
    if shown:
        header = ("tensor", "state", "difference", "elements", "first at", "largest |Δ|", "relative")
        lines += format_table(shown, header, right=(3, 5, 6))
    if len(shown) < len(rows):
        lines.append(f"… {pluralize(len(rows) - len(shown), 'more line')}; --all shows all, --json too")
    return [*lines, *map(_describe_value, difference.values)]


def _replace_numbers(name: str) -> str:
    """Replace numbers in a name by stars: ``layers.*.mlp.dense_4h_to_h.weight``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _make_row(atoms: Sequence[AtomDifference]) -> tuple[str, ...]:
    worst = atoms[0]
    more = f", worst {worst.label}" if worst.kind == "values" else ""
    name = worst.label if len(atoms) == 1 else f"{_replace_numbers(worst.label)} ({len(atoms)}{more})"
    dtypes = f" ({', '.join(worst.dtypes)})" if worst.dtypes[0] != worst.dtypes[1] else ""
    if worst.kind != "values":
        return (name, worst.state, (worst.text or worst.kind) + dtypes, "", "", "", "")
    in_padding = not worst.tally.differing
    tallies = [atom.padding if in_padding else atom.tally for atom in atoms]
    counts = [format_count(sum(values)) for values in zip(*((t.differing, t.numel) for t in tallies), strict=True)]
    place = str(list(worst.index)) + (f" of tp rank {worst.shard}" if worst.shard is not None else "")
    sizes = f"{tallies[0].largest:.3g}", f"{tallies[0].relative:.3g}"
    return (name, worst.state, "padding rows" if in_padding else f"values{dtypes}", " of ".join(counts), place, *sizes)


def _describe_value(value: ValueDifference) -> str:
    more = f" and {len(value.names) - 1} more" if len(value.names) > 1 else ""
    where = f" ({value.names[0]}{more})" if value.names else ""
    return f"{value.section} {value.key}: {value.left} ≠ {value.right}{where}"


def _format_verdict(difference: Difference) -> str:
    compared = f"{pluralize(difference.compared, 'tensor')} ({format_count(difference.numel)} elements) compared"
    if difference.converted:
        compared += f", {difference.converted} of two dtypes by value"
    if not difference.atoms and not difference.values:
        return f"equal: {compared}"
    counts = (len(difference.atoms), "tensor"), (len(difference.values), "other value")
    parts = [f"{pluralize(number, noun)} differ{'s' * (number == 1)}" for number, noun in counts if number]
    verdict = f"equal within {difference.tolerance:g}" if difference.equal else "different"
    return f"{verdict}: {', '.join(parts)}; {compared}"
