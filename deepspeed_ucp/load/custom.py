"""``custom_load_fn``: the user's own way of giving the saved weights to the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..atoms import COPY, MASTER, MODULE, Atom, AtomicIndex
from ..comm import Comm
from ..config import UniversalConfig
from ..io.checksum import join_checks, verify_records
from ..plan import Want
from ..targets import Target
from .negotiate import negotiate
from .reader import Reader
from .sinks import Buffer, TensorSink


def assemble_module(index: AtomicIndex, config: UniversalConfig) -> dict[str, torch.Tensor]:
    """The whole saved module as a state dict on the CPU, in the dtypes that the module states had.

    ZeRO 3 saves no such copy: there the fp32 masters stand in, as in DeepSpeed's own consolidation. Every rank reads
    and holds the whole of it, as ``custom_load_fn`` asks for; its checksums are verified.

    Raises:
        CheckpointError: a file is damaged.
    """
    weights: dict[str, Atom] = {}
    for state in (MASTER, COPY, MODULE):  # later ones win
        weights.update({k.name: atom for k, atom in index.atoms.items() if k.state == state and not k.instance})
    tensors, sinks, wants = {}, [], []
    for number, (name, atom) in enumerate(weights.items()):
        flat = torch.empty(atom.numel, dtype=getattr(torch, atom.dtype))
        tensors[name] = flat.view(atom.shape)
        sinks.append(TensorSink(Buffer(flat, fresh=True), atom.dtype))
        wants.append(Want(atom, 0, atom.numel, number, 0))
    alone = Comm()
    plan = negotiate(wants, sinks, index, alone, config.window_mb << 20)
    reader = Reader(index, sinks, (), plan, alone, config)
    reader.read_fresh()
    requests, crcs = reader.checked()
    if reader.checksum:
        verify_records(join_checks(requests, crcs), index.records, index.files, 0, 1)
    tensors.update({alias: tensors[name] for alias, name in index.aliases.items() if name in tensors})
    return tensors


def run_custom_load(
    load_fn: Callable[..., Any],
    index: AtomicIndex,
    target: Target,
    comm: Comm,
    config: UniversalConfig,
    *,
    masters_follow: bool,
) -> None:
    """Call ``load_fn(src=state dict, dst=module)`` on every rank, as DeepSpeed does; collective.

    Args:
        masters_follow: make the masters from what the function left in the module (no optimizer states are loaded).
    """
    source: dict[str, torch.Tensor] = {}
    with comm.together():
        source = assemble_module(index, config)
    error: Exception | None = None
    with target.whole_parameters():
        try:
            load_fn(src=source, dst=target.engine.module)
        except Exception as caught:  # noqa: BLE001 - the user's function; re-raised on every rank
            error = caught
    comm.agree(error)
    if masters_follow:
        target.refresh_masters()
