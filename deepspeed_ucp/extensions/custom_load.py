"""Load tensors without optimizer from the saved module by a ``custom_load_fn``."""

from __future__ import annotations

from typing import Any

import torch

from ..comm import Comm
from ..config import UniversalConfig
from ..engine.base import Target
from ..errors import UnsupportedError
from ..io.paths import count_readers
from ..io.read import MemorySink
from ..model.index import AtomicIndex
from ..model.storage import COPY, MASTER, MODULE, Atom
from ..plan.locate import Want, list_reads
from ..plan.rounds import BLOCK
from ..stream.reader import AtomReader, refuse_scattered, verify_reads
from .registry import Extension


class CustomLoad(Extension):
    """A load with a ``custom_load_fn``, whose ``source`` is the whole saved module."""

    def __init__(self) -> None:
        self.source: dict[str, torch.Tensor] = {}

    def refuse(self, context: Any, index: AtomicIndex, target: Target) -> None:
        refuse_scattered(index, "custom_load_fn is given the whole module, which every rank reads")
        if target.flats and any(extension.name == "nvme" for extension in target.extensions):
            raise UnsupportedError("custom_load_fn cannot fill an engine on NVMe. Load without custom_load_fn.")
        degrees = index.topology.tp, index.topology.pp, target.parallel.tp, target.parallel.pp
        if max(degrees) > 1 or target.is_uneven:
            raise UnsupportedError(
                "custom_load_fn is given the whole module; with tensor, pipeline or expert parallelism no rank has it. "
                "Load without custom_load_fn, or in the topology that saved the checkpoint."
            )

    def read_more(self, context: Any, fill_plan: Any) -> None:
        with context.report.phase("custom"):
            self.source = context.comm.run(lambda: assemble_module(fill_plan.index, context.config))

    def change_engine(self, context: Any, target: Target, fill_plan: Any) -> None:
        """Call ``custom_load_fn(src=state dict, dst=module)`` on every rank.

        The state dict has the keys of the live module's. If no optimizer states are loaded, the masters are made from
        the module's new weights.
        """
        keys = {name: key for key, name in target.list_keys().items()}
        source, self.source = {keys.get(name, name): tensor for name, tensor in self.source.items()}, {}
        with context.report.phase("custom"):
            with target.whole_parameters():
                context.comm.run(lambda: context.custom_load_fn(src=source, dst=target.engine.module))
            if not fill_plan.touched:
                context.comm.run(target.refresh_masters)


def assemble_module(index: AtomicIndex, config: UniversalConfig) -> dict[str, torch.Tensor]:
    """Read the whole saved module as a state dict on the CPU, in its saved dtypes.

    ZeRO 3 saves no such copy: the fp32 masters replace it, as in DeepSpeed's own consolidation. Every rank reads and
    holds the whole module, as ``custom_load_fn`` requires; its checksums are verified.

    Raises:
        CheckpointError: a file is damaged.
    """
    weights: dict[str, Atom] = {}
    for state in (MASTER, COPY, MODULE):  # later ones win
        weights.update({k.name: atom for k, atom in index.atoms.items() if k.state == state and not k.instance})
    tensors = {name: torch.empty(atom.shape, dtype=getattr(torch, atom.dtype)) for name, atom in weights.items()}
    memory = [memoryview(tensor.view(-1).view(torch.uint8).numpy()) for tensor in tensors.values()]
    sinks = [MemorySink(data, tensor.element_size()) for data, tensor in zip(memory, tensors.values(), strict=True)]
    wants = [Want(atom, 0, atom.numel, number, 0) for number, atom in enumerate(weights.values())]
    threads = config.threads or count_readers(index.state_file)
    with AtomReader(index, checksum=config.verify == "crc") as reader:
        checks = reader.read_parallel(list_reads(wants, BLOCK), sinks, threads)
        if reader.checksum:
            verify_reads(checks, index, Comm(), threads=threads)
    tensors.update({alias: tensors[name] for alias, name in index.aliases.items() if name in tensors})
    return tensors
