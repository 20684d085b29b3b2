"""The readers by format, and the index of a folder that is of one of them."""

from __future__ import annotations

from typing import Protocol

from ...atoms import AtomicIndex
from ...comm import Comm
from ..findings import Finding
from ..table import FileTable
from . import adapter, dcp, names, safetensors, statedict
from .contents import Contents, make_index


class Reader(Protocol):
    """Reads the headers of a format's files, each by one rank; collective.

    Raises:
        CheckpointError: damaged, missing or contradicting files; the same on every rank.
        UnsupportedError: a kind that is not covered.
    """

    def __call__(self, where: FileTable, comm: Comm, /) -> tuple[Contents, list[Finding]]: ...


READERS: dict[str, Reader] = {
    names.DCP: dcp.read_contents,
    names.SAFETENSORS: safetensors.read_contents,
    names.STATE_DICT: statedict.read_contents,
    names.ADAPTER: adapter.read_contents,
}


def survey_foreign(where: FileTable, comm: Comm, kind: str) -> tuple[AtomicIndex, list[Finding]]:
    """The index of a foreign checkpoint, and what is odd about it; collective.

    Args:
        kind: its format.

    Raises:
        CheckpointError, UnsupportedError: as of :class:`Reader`.
    """
    chosen = where.choose(lambda name: names.holds(kind, name))
    contents, findings = READERS[kind](chosen, comm)
    return comm.alike(lambda: make_index(contents, chosen)), findings
