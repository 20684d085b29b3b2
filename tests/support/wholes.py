"""Read the full tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deepspeed_ucp.io.read import Checked
from deepspeed_ucp.model.storage import AtomKey
from deepspeed_ucp.stream.full_tensors import FullTensor
from deepspeed_ucp.stream.reader import AtomReader
from tests.support.reshard3d import SavedRun
from tests.synth.stages import atom_key


def read_whole(
    reader: AtomReader, whole: FullTensor, step: int | None = None, checks: list[Checked] | None = None
) -> torch.Tensor:
    """Read a logical tensor in ranges of ``step`` elements."""
    checks = [] if checks is None else checks
    data = bytearray(whole.nbytes)
    view = memoryview(data)
    step = step or max(whole.numel, 1)
    for start in range(0, whole.numel, step):
        numel = min(step, whole.numel - start)
        into = view[start * whole.itemsize : (start + numel) * whole.itemsize]
        checks.extend(reader.read_tensors([whole.want(start, numel)], [into]))
    if not data:
        return torch.empty(whole.shape, dtype=getattr(torch, whole.dtype))
    return torch.frombuffer(data, dtype=getattr(torch, whole.dtype)).view(whole.shape)


def check_atoms(
    reader: AtomReader,
    wholes: Mapping[tuple[str, str], FullTensor],
    held: SavedRun,
    step: int | None,
    checks: list[Checked] | None = None,
) -> int:
    """Check the atoms that the run holds and the files keep, to the bit; returns their number."""
    seen = 0
    for name, states in held.state.atoms.items():
        for state, value in states.items():
            whole = wholes.get(AtomKey(*atom_key(name, state)))
            if whole is None or not value.numel():
                continue
            found = read_whole(reader, whole, step, checks)
            assert found.shape == value.shape, (name, state)
            assert torch.equal(found.view(torch.uint8), value.contiguous().view(torch.uint8)), (name, state)
            seen += 1
    return seen
