"""Conversion of a checkpoint in a folder, like ``ds_ucp convert``."""

from __future__ import annotations

from typing import Any

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import ConvertOptions, convert_index, default_destination
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.latest import find_checkpoint
from deepspeed_ucp.stream.report import OutputReport
from deepspeed_ucp.tensor_parallel.rules import from_config


def convert_checkpoint(
    source: str,
    destination: str | None = None,
    *,
    comm: Comm | None = None,
    patterns: Any = None,
    groups: Any = None,
    options: ConvertOptions | None = None,
) -> OutputReport:
    """Convert a tag, or the tag that ``latest`` names; collective."""
    comm = comm or Comm()
    folder = comm.once(lambda: find_checkpoint(source))
    rules = comm.run(lambda: from_config(patterns))
    index = open_checkpoint(folder, comm, Naming(groups=groups))
    to = destination or default_destination(folder)
    return convert_index(index, folder, to, comm, options or ConvertOptions(), rules=rules)
