"""Converting from Python."""

from __future__ import annotations

from typing import Any

from ..comm import Comm
from ..patterns import from_config
from ..sources import open_checkpoint
from ..sources.latest import find_checkpoint
from ..stream.report import OutputReport
from .driver import ConvertOptions, convert_index


def convert_checkpoint(
    source: str,
    destination: str | None = None,
    *,
    comm: Comm | None = None,
    patterns: Any = None,
    groups: Any = None,
    options: ConvertOptions | None = None,
) -> OutputReport:
    """Write a checkpoint as an atomic checkpoint (``ds_ucp convert``); collective over ``comm``.

    Args:
        source: a folder with ``latest``, or the folder of one tag.
        destination: folder to be made; by default the source's with ``_universal`` behind.
        comm: the ranks that convert together, one per node as a rule; None converts alone.
        patterns: how tensor parallelism cuts parameters, as ``checkpoint.universal.patterns`` in a ds_config.
        groups: names of a stage-0 source's parameters (``"module"``, or a list of names per param group).
        options: workers, memory, overwriting.

    Raises:
        UcpError: the source is damaged or not covered, or the destination may not be written; the same on every rank.
    """
    comm = comm or Comm()
    folder, rules = comm.run(lambda: (find_checkpoint(source), from_config(patterns)))
    index = open_checkpoint(folder, comm, groups=groups)
    return convert_index(
        index, folder, destination or default_destination(folder), comm, options or ConvertOptions(), rules=rules
    )


def default_destination(folder: str) -> str:
    """Where the atomic checkpoint of a tag's folder goes by default: beside it."""
    return f"{folder.rstrip('/')}_universal"
