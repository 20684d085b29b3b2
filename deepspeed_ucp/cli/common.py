"""What the commands share: options, finding and opening a checkpoint, output, figures in words."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Generator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..comm import Comm
from ..errors import ConfigError
from ..patterns import from_config
from ..sources import open_checkpoint
from ..sources.latest import find_checkpoint as resolve

if TYPE_CHECKING:
    from ..atoms import AtomicIndex
    from ..patterns import RuleSet

OK = 0
FAULT = 1
"""A fault or a difference was found, or a plan is impossible."""
ERROR = 2
"""Bad usage, unreadable files, a refusal."""
INTERRUPTED = 130
BROKEN_PIPE = 141

_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Descriptions and examples as they stand, options beside their help, no wider than can be read."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=find_width())

    def _iter_indented_subactions(self, action: argparse.Action) -> Generator[argparse.Action, None, None]:
        """Commands are not indented further: argparse reckons their column without that."""
        yield from action._get_subactions() if isinstance(action, argparse._SubParsersAction) else ()


def find_width() -> int:
    """Columns of help texts."""
    return max(40, min(shutil.get_terminal_size().columns - 2, 100))


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    *,
    help: str,
    description: str,
    examples: str,
    general: bool = True,
) -> argparse.ArgumentParser:
    """Add a command's parser with its examples, and the options that all commands have (``general``).

    Args:
        help: one line without a full stop, for ``ds_ucp --help``.
        examples: command lines, one a line.
    """
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    parser = commands.add_parser(
        name,
        help=help,
        description=fill_paragraphs(description),
        epilog=f"examples:\n{lines}\n",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    if general:
        add_general_options(parser)
    return parser


def fill_paragraphs(text: str) -> str:
    """Text broken at the terminal's width; an empty line separates paragraphs."""
    return "\n\n".join(textwrap.fill(" ".join(part.split()), find_width()) for part in text.split("\n\n"))


def add_general_options(parser: argparse.ArgumentParser) -> None:
    """``--json``, ``--quiet``, ``--debug``."""
    general = parser.add_argument_group("output")
    general.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    general.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no warnings")
    general.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_checkpoint_options(
    parser: argparse.ArgumentParser, *names: str, help: str = "", patterns: bool = True, groups: bool = True
) -> None:
    """Positional checkpoints (``options.checkpoint`` by default), ``--patterns`` and ``--groups``."""
    for name in names or ("checkpoint",):
        metavar = "CKPT" if name == "checkpoint" else name.upper()
        what = help or "a folder that holds `latest`, the folder of one tag, or an atomic checkpoint"
        parser.add_argument(name, metavar=metavar, help=what)
    if patterns:
        parser.add_argument(
            "--patterns",
            metavar="RULES",
            help="how tensor parallelism cuts parameters: a family, a YAML file, or rules as JSON (docs/patterns.md)",
        )
    if groups:
        parser.add_argument(
            "--groups",
            metavar="NAMES",
            help="parameter names of a stage-0 checkpoint's optimizer, which it does not name itself: `module` (it was "
            "given model.parameters()), or a YAML/JSON file with a list of names per param group",
        )


def open_index(
    options: argparse.Namespace, path: str | None = None, comm: Comm | None = None, *, weights_only: bool = False
) -> AtomicIndex:
    """The index of ``options.checkpoint`` (or ``path``), named by ``--groups`` where it is given; collective.

    Raises:
        UcpError: what :func:`~deepspeed_ucp.sources.open_checkpoint` raises.
    """
    comm = comm or Comm()
    with comm.together():
        folder = resolve(options.checkpoint if path is None else path)
        groups = read_groups(getattr(options, "groups", None))
    return open_checkpoint(folder, comm, groups=groups, weights_only=weights_only)


def read_groups(value: str | None) -> str | list[list[str]] | None:
    """``--groups``: ``module`` as it is, a file's list of names per param group, or None.

    Raises:
        ConfigError: the file cannot be read or is no list of lists of names.
    """
    if value is None or value == "module":
        return value
    import yaml

    try:
        with open(value, encoding="utf-8") as stream:
            groups = yaml.safe_load(stream)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--groups: {value} cannot be read: {error}") from None
    is_nested = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    if not is_nested or not all(isinstance(name, str) for group in groups for name in group):
        raise ConfigError(
            f"--groups: {value} has to hold a list of names per param group, such as [[a.weight], [a.bias]]."
        )
    return [list(group) for group in groups]


def read_rules(options: argparse.Namespace) -> tuple[RuleSet, ...]:
    """The rules of ``--patterns``: a family, a file, or JSON written out; empty without it.

    Raises:
        ConfigError: they cannot be read.
    """
    value = options.patterns
    if value is None or not value.lstrip().startswith(("[", "{")):
        return from_config(value)
    try:
        return from_config(json.loads(value))
    except json.JSONDecodeError as error:
        raise ConfigError(f"--patterns: neither a family, a file nor JSON: {error}") from None


def find_rank() -> int:
    """This process's rank under mpirun, torchrun, srun or the deepspeed launcher; 0 without a launcher.

    ``RANK`` alone is no launch: clusters set it for whole containers, in which people type commands.
    """
    names = (*(("RANK",) if "LOCAL_RANK" in os.environ else ()), *_MPI_RANKS)
    return next((int(os.environ[key]) for key in names if os.environ.get(key, "").isdigit()), 0)


def emit(options: argparse.Namespace, data: Mapping[str, Any], text: str) -> None:
    """Print a result, on rank 0 only: ``data`` under ``--json``, else ``text``."""
    if find_rank():
        return
    print(to_json(data) if options.json else text.rstrip("\n"))


def to_json(data: Any) -> str:
    """JSON that every parser reads: numbers that JSON has not become the strings ``nan``, ``inf``, ``-inf``."""
    return json.dumps(_to_plain(data), indent=2, ensure_ascii=False, allow_nan=False)


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(_to_plain, value), key=str)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (str, int)):
        return value.value if isinstance(value, Enum) else value
    return str(value)


def format_bytes(nbytes: float) -> str:
    """Bytes in binary units with three digits: ``512 B``, ``1.50 GiB``."""
    return _scale(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), " ")


def format_count(count: float) -> str:
    """A count with three digits: ``512``, ``304 M``, ``1.02 T``."""
    return _scale(count, 1000, ("", "k", "M", "G", "T", "P"), " ").rstrip()


def _scale(value: float, base: int, units: Sequence[str], space: str) -> str:
    at = 0
    while at + 1 < len(units) and abs(value) >= base - 0.5:
        value, at = value / base, at + 1
    digits = 0 if at == 0 and value == int(value) else max(0, 2 - int(math.log10(max(abs(value), 1))))
    return f"{value:.{digits}f}{space}{units[at]}"


def format_duration(seconds: float) -> str:
    """Seconds as ``0.42 s``, ``50 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if not math.isfinite(seconds):
        return "for ever"
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_table(rows: Sequence[Sequence[object]], header: Sequence[str] = (), *, right: Sequence[int] = ()) -> str:
    """Columns aligned with two spaces between; ``right`` names the columns that are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in ([header, *rows] if header else rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))] if cells else []
    lines = []
    for row in cells:
        padded = [c.rjust(w) if at in right else c.ljust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


class Progress:
    """A bar of bytes with rate and time left on stderr; a context manager, and ``add`` may be called by any thread.

    There is none where stderr is no terminal, on ranks other than 0, under ``--quiet`` and under ``--json``.
    """

    def __init__(self, options: argparse.Namespace, total: int, what: str, *, unit: str = "B") -> None:
        from tqdm import tqdm

        silent = options.quiet or options.json or bool(find_rank()) or not sys.stderr.isatty()
        self._bar = tqdm(
            total=total, desc=what, unit=unit, unit_scale=True, unit_divisor=1024 if unit == "B" else 1000,
            disable=silent, dynamic_ncols=True, mininterval=0.2, leave=False,
        )  # fmt: skip

    def add(self, amount: int) -> None:
        """``amount`` more is done."""
        with self._bar.get_lock():
            self._bar.update(amount)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


class Lines(logging.Handler):
    """Log records as short lines on stderr: ``ds_ucp: warning: …``, around a progress bar that may be there."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        tell(f"ds_ucp: {kind}{record.getMessage()}")


def tell(line: str) -> None:
    """A line on stderr that leaves a progress bar whole."""
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(line, file=sys.stderr)
    else:
        print(line, file=sys.stderr)
