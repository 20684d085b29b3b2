"""Parsers and options that commands share, and how they open a checkpoint.

Modules that read checkpoints are imported inside functions, so that ``--help`` does not load them. Readers of options
raise ConfigError for an invalid value.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from ..errors import CheckpointError, ConfigError, raise_first, suggest
from .printing import show_progress

if TYPE_CHECKING:
    from ..comm import Comm
    from ..model.index import AtomicIndex
    from ..tensor_parallel.rules import RuleSet

logger = logging.getLogger("deepspeed_ucp")

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

REPORT_KEYS = (
    "phases (seconds by name); spans; bytes_read; format; source; destination; reused; tensors; parameters; dtypes; "
    "files (bytes by name); state_bytes; bytes_written; nodes; workers; seconds"
)
"""Keys of the JSON of `convert` and `export`."""


def make_formatter(prog: str) -> argparse.HelpFormatter:
    """Make the formatter of help texts, which keeps the lines of examples."""
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=find_width())


class Parser(argparse.ArgumentParser):
    """Suggests the option, command or choice that a wrong one resembles."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = suggest(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{value!r} is unknown: {near}" if near else error.message) from None

    def refuse(self, extra: Sequence[str], command: str | None = None) -> NoReturn:
        """Exit with an error for arguments that no option of ``command`` takes."""
        commands: Any = next((action.choices for action in self._get_positional_actions() if action.choices), {})
        parser: Parser = commands.get(command, self)
        near = [
            suggest(argument.partition("=")[0], parser._option_string_actions)
            for argument in extra
            if argument[:2] == "--"
        ]
        parser.error(" ".join([f"unrecognized arguments: {' '.join(extra)}", *(f"({hint})" for hint in near if hint)]))


def find_width() -> int:
    """Return the width of help texts in columns."""
    return max(40, min(shutil.get_terminal_size().columns - 2, 100))


def add_command(commands: Commands, name: str, *, description: str, examples: str, keys: str = "") -> Parser:
    """Add a command's parser; ``keys`` are those of the object that ``--json`` prints."""
    width = find_width()
    epilog = f"examples:\n{textwrap.indent(inspect.cleandoc(examples), '  ')}\n"
    if keys:
        lines = textwrap.wrap(keys, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        epilog += "\nkeys of the JSON object:\n" + "\n".join(lines) + "\n"
    return commands.add_parser(
        name,
        description=textwrap.fill(description, width),
        epilog=epilog,
        formatter_class=make_formatter,
        allow_abbrev=False,
    )


def add_checkpoint(parser: Parser, name: str = "checkpoint", metavar: str = "CKPT", *, needed: bool = True) -> None:
    """Add a positional checkpoint."""
    text = "a folder (or URL) with `latest`, of one tag, or of another format (docs/formats.md)"
    parser.add_argument(name, metavar=metavar, help=text, nargs=None if needed else "?")


def add_shared_options(
    parser: Parser, *, checkpoint: bool = False, patterns: bool = False, second: str = "", window: int = 0
) -> None:
    """Add the group of shared options; call it last, as help lists them in this order.

    Args:
        second: name of a second checkpoint, for ``--also-NAME``.
        window: default of ``--window-mb``; 0 for a command without ``--workers`` and ``--window-mb``.
    """
    add = parser.add_argument_group("shared options").add_argument
    if patterns:
        text = "how tensor parallelism cuts parameters, and renames: a family, a YAML file, or JSON (docs/patterns.md)"
        add("--patterns", metavar="RULES", help=text)
    if checkpoint:
        text = (
            "parameter names of a stage-0 checkpoint's optimizer: `module` (it was given model.parameters()), or a "
            "YAML/JSON file with a list of names per param group"
        )
        add("--groups", metavar="NAMES", help=text)
        text = "a further folder or URL of the same tag, for files that are missing in the places before it"
        add("--also", metavar="PLACE", action="append", default=[], help=text)
    if second:
        add(f"--also-{second}", metavar="PLACE", action="append", default=[], help=f"the same for {second.upper()}")
    text = "option of the stores behind URLs, such as endpoint_url=http://host:9000; VALUE is JSON or text"
    add("--storage-option", action="append", metavar="KEY=VALUE", help=text)
    if window:
        add("--workers", type=int, default=0, metavar="N", help="threads per node (default: from its cores)")
        text = f"memory per node for data in transit (default: {window})"
        add("--window-mb", type=int, default=window, metavar="MB", help=text)
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("-q", "--quiet", action="store_true", help="no progress bar, no warnings")
    add("--debug", action="store_true", help="show the traceback of an error")


def make_quantity_type(units: Mapping[str, float], expected: str, *, whole: bool = False) -> Callable[[str], Any]:
    """Return an option's ``type``: parses a positive sum of numbers with ``units``."""
    term = rf"(\d+(?:\.\d+)?(?:E\d\d?)?) ?({'|'.join(sorted(units, key=len, reverse=True))})"

    def parse(text: str) -> float:
        is_valid = re.fullmatch(f"(?:{term})+", text.strip().upper(), re.ASCII)
        terms = re.findall(term, text.upper(), re.ASCII) if is_valid else []
        value = sum(float(number) * units[unit] for number, unit in terms)
        if not value or (whole and value % 1):
            raise argparse.ArgumentTypeError(f"{expected} is needed, found {text!r}")
        return int(value) if whole else value

    return parse


def read_work_options(options: argparse.Namespace, *, least: int) -> dict[str, Any]:
    """Return the fields of ``WorkOptions``; ``least`` is the smallest window in MiB."""
    if options.workers < 0 or options.window_mb < least:
        raise ConfigError(f"--workers must not be negative, --window-mb not below {least}.")
    return {
        "workers": options.workers,
        "window": options.window_mb << 20,
        "bar": lambda total: show_progress(options, total, options.command),
    }


def open_index(
    options: argparse.Namespace, path: str, also: Sequence[str], comm: Comm, *, weights_only: bool = False
) -> tuple[str, AtomicIndex]:
    """Open a checkpoint; return its tag's folder and its index (collective)."""
    from ..formats import open_checkpoint
    from ..formats.deepspeed.naming import Naming

    groups = comm.run(lambda: read_groups(options.groups))
    folder, *also = find_folders(path, also, comm)
    return folder, open_checkpoint(folder, comm, Naming(groups=groups, weights_only=weights_only), also=also)


def warn_unused_groups(options: argparse.Namespace, *indexes: AtomicIndex) -> None:
    """Warn if ``--groups`` is given although all checkpoints name their parameters."""
    from ..formats.deepspeed.naming import UNUSED

    if options.groups and not any(index.topology.traits.is_positional for index in indexes):
        logger.warning("%s", UNUSED)


def find_folders(path: str, also: Sequence[str], comm: Comm) -> list[str]:
    """Find the tag's folder in each place, unseen places last (collective).

    The first place in which a rank sees a tag names it. A place that is a tag's folder stands for it under any name.
    """
    from ..formats.latest import find_checkpoint, leads_to_folder
    from ..io.paths import normalize

    def look(place: str) -> tuple[str, str]:
        try:
            return os.path.relpath(find_checkpoint(place), place), ""
        except CheckpointError as error:
            return "", str(error)

    places = (path, *also)
    looks = comm.gather_results(lambda: [look(place) for place in places])
    tags = [next((tag for tag, _ in looks if tag), "") for looks in zip(*looks, strict=True)]
    if not any(tags):
        comm.run(lambda: raise_first([CheckpointError(looks[0][0][1])]))
    pairs = sorted(zip(places, tags, strict=True), key=lambda pair: not pair[1])  # places that no rank sees come last
    first, tag = pairs[0]
    if tag == "." and also:  # a copy under another name: further places name the tag
        name = os.path.basename(normalize(first))
        below = [os.path.join(place, name) for place in places]
        is_known = any(comm.gather_results(lambda: any(leads_to_folder(path) for path in below)))
        tag = name if is_known else next((other for other in tags if other not in ("", ".")), name)
    return [place if seen == "." else os.path.join(place, tag) for place, seen in pairs]


def read_groups(value: str | None) -> str | list[list[str]] | None:
    """Read ``--groups``: ``module``, or a file with a list of names per param group."""
    if value is None or value == "module":
        return value
    import yaml

    from ..comm import describe_os_error

    try:
        with open(value, encoding="utf-8") as stream:
            groups = yaml.safe_load(stream)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        text = describe_os_error(error) if isinstance(error, OSError) else f"{value}: {error}"
        raise ConfigError(f"--groups: {text.rstrip('.')}. Pass `module`, or a YAML or JSON file.") from None
    is_nested = isinstance(groups, list) and groups and all(isinstance(group, list) for group in groups)
    if not is_nested or not all(isinstance(name, str) for group in groups for name in group):
        raise ConfigError(
            f"--groups: {value} must have a list of names per param group, such as [[a.weight], [a.bias]]."
        )
    return [list(group) for group in groups]


def read_storage_options(given: Sequence[str]) -> dict[str, Any]:
    """Parse ``--storage-option``; values are JSON or text."""
    options: dict[str, Any] = {}
    for argument in given:
        key, equals, value = argument.partition("=")
        if not key or not equals:
            raise ConfigError("--storage-option: use KEY=VALUE, such as anon=true.")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def read_rules(options: argparse.Namespace) -> tuple[RuleSet, ...]:
    """Read the rules of ``--patterns``: a family, a file, or JSON; empty without it."""
    from ..tensor_parallel.rules import from_config

    given = options.patterns
    if given is not None and given.lstrip().startswith(("[", "{")):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--patterns: neither a family, a file nor JSON: {error}") from None
    return from_config(given)
