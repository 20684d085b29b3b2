"""Compare a save with its seal (:mod:`deepspeed_ucp.formats.deepspeed.seal`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ..comm import Comm
from ..errors import UcpError
from ..formats.deepspeed.files import SEAL
from ..formats.deepspeed.headers import FileHeader
from ..formats.deepspeed.save import Save
from ..formats.deepspeed.seal import compare_file, read_seal
from ..formats.findings import Finding, from_failure
from .registry import SaveExtension


class SealedSave(SaveExtension):
    """A save with a seal."""

    def verify_save(self, save: Save, comm: Comm) -> list[Finding]:
        """Return faults of files that differ from the seal; set swap files' checksums."""
        where = save.where
        faults, crcs = where.once(SEAL, lambda: _compare(where.list_folders(SEAL)[0], save.headers), comm)
        for states in save.swaps.values():
            for state, header in states.items():
                if header.swap is not None and header.name in crcs:
                    record = header.swap.record._replace(crc=crcs[header.name])
                    states[state] = replace(header, swap=replace(header.swap, record=record))
        return faults


def _compare(folder: str, headers: Sequence[FileHeader]) -> tuple[list[Finding], dict[str, int]]:
    """Return faults of files that differ from the seal, and CRC32s of swap files.

    Both are empty if the seal has been removed.
    """
    try:
        seal = read_seal(os.path.join(folder, SEAL))
    except FileNotFoundError:
        return [], {}
    except UcpError as error:
        return [from_failure("seal", SEAL, error)], {}
    faults = [compare_file(folder, header.name, header.size, header.crc, seal) for header in headers]
    crcs = {header.name: seal.files[header.name].crc for header in headers if header.swap and header.name in seal.files}
    return [fault for fault in faults if fault], crcs
