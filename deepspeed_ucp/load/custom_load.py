"""``custom_load_fn``: the user's own way of giving the saved weights to the module."""

from __future__ import annotations

import torch

from ..atoms import COPY, MASTER, MODULE, Atom, AtomicIndex
from ..comm import Comm
from ..config import UniversalConfig
from ..io.filesystems import count_readers
from ..io.read import MemorySink
from ..plan import Want
from ..stream.checks import Checks
from ..stream.reader import AtomReader
from ..targets import Target
from .context import LoadContext


def assemble_module(index: AtomicIndex, config: UniversalConfig) -> dict[str, torch.Tensor]:
    """The whole saved module as a state dict on the CPU, in the dtypes that the module states had.

    ZeRO 3 saves no such copy: there the fp32 masters stand in, as in DeepSpeed's own consolidation. Every rank reads
    and holds the whole of it, as ``custom_load_fn`` asks for; its checksums are verified.

    Raises:
        CheckpointError: a file is damaged.
    """
    weights: dict[str, Atom] = {}
    for state in (MASTER, COPY, MODULE):  # later ones win
        weights.update({k.name: atom for k, atom in index.stored.atoms.items() if k.state == state and not k.instance})
    tensors = {name: torch.empty(atom.shape, dtype=getattr(torch, atom.dtype)) for name, atom in weights.items()}
    memory = [memoryview(tensor.view(-1).view(torch.uint8).numpy()) for tensor in tensors.values()]
    sinks = [MemorySink(each, tensor.element_size()) for each, tensor in zip(memory, tensors.values(), strict=True)]
    wants = [Want(atom, 0, atom.numel, number, 0) for number, atom in enumerate(weights.values())]
    checks, threads = Checks(), config.threads or count_readers(index.run.state_file)
    with AtomReader(index, checksum=config.verify == "crc") as reader:
        checks.add(reader.read_all(wants, sinks, threads))
        if reader.checksum:
            checks.verify(index, Comm(), threads=threads)
    tensors.update({alias: tensors[name] for alias, name in index.model.aliases.items() if name in tensors})
    return tensors


def run_custom_load(job: LoadContext, source: dict[str, torch.Tensor], target: Target, *, masters_follow: bool) -> None:
    """Call ``custom_load_fn(src=state dict, dst=module)`` on every rank, as DeepSpeed does; collective.

    Args:
        source: the whole saved module; it gets the keys of the live module's own state dict.
        masters_follow: make the masters from what the function left in the module (no optimizer states are loaded).
    """
    load_fn = job.arguments.custom_load_fn
    keys = {name: key for key, name in target.list_keys().items()}
    source = {keys.get(name, name): tensor for name, tensor in source.items()}
    with job.report.phase("custom"):
        if load_fn is not None:
            with target.whole_parameters():
                job.comm.run(lambda: load_fn(src=source, dst=target.engine.module))
        if masters_follow:
            job.comm.run(target.refresh_masters)
