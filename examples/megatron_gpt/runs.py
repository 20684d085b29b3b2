"""Train, save, resume, and gather the full state for a comparison bit by bit, on all ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from training import Trainer

from deepspeed_ucp.testing.capture import capture

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from config import Degrees, GPTConfig
    from parallel import Line

    State = dict[str, np.ndarray]  # "fp32", "exp_avg", "exp_avg_sq": fp32 arrays; "step"
    Atoms = dict[tuple[str, int], State]  # by name and instance: a tied module has one on each of its stages

PLUGIN = "plugin"


@dataclass(frozen=True)
class Job:
    """A run on `ranks` ranks to global step `steps`.

    Attributes:
        order_seed: None keeps the order of every batch's samples; a number shuffles them, which changes only the order
            of sums.
        forget_moments: set the optimizer's moments to zero after the load, as an example of a wrong resume.
    """

    config: GPTConfig
    degrees: Degrees
    ranks: int
    ds_config: Mapping[str, Any]
    steps: int
    order_seed: int | None = None
    forget_moments: bool = False


@dataclass
class Outcome:
    """The result of a rank.

    Attributes:
        losses: by global step.
        atoms: the state of this rank's stage, gathered at the save or after the load.
        loader: the loader, from the plugin's report.
    """

    losses: dict[int, float] = field(default_factory=dict)
    atoms: dict[str, State] = field(default_factory=dict)
    loader: str = ""


def train_source(job: Job, directory: str, save_at: int) -> Outcome:
    """Train to `save_at`, save, and continue to the end of the job."""
    trainer, outcome = Trainer(job.config, job.degrees, job.ds_config), Outcome()
    _train(trainer, job, outcome, save_at)
    trainer.save(directory)
    outcome.atoms = gather_atoms(trainer)
    _train(trainer, job, outcome, job.steps)
    return outcome


def resume(job: Job, directory: str) -> Outcome:
    """Resume from `directory` and train to the end of the job."""
    trainer, outcome = Trainer(job.config, job.degrees, job.ds_config), Outcome()
    if not trainer.load(directory):
        raise FileNotFoundError(f"there is no checkpoint in {directory}")
    report = getattr(trainer.engine, "ucp_report", None)
    outcome.loader = PLUGIN if report is not None and report.direct else "DeepSpeed"
    outcome.atoms = gather_atoms(trainer)
    if job.forget_moments:
        forget_moments(trainer)
    _train(trainer, job, outcome, job.steps)
    return outcome


def _train(trainer: Trainer, job: Job, outcome: Outcome, until: int) -> None:
    while trainer.step < until:
        order = None
        if job.order_seed is not None:
            generator = torch.Generator().manual_seed(job.order_seed * 1_000_003 + trainer.step)
            order = torch.randperm(trainer.engine.train_batch_size(), generator=generator)
        loss = trainer.train_step(order)
        outcome.losses[trainer.step] = loss


def forget_moments(trainer: Trainer) -> None:
    optimizer = getattr(trainer.engine.optimizer, "optimizer", trainer.engine.optimizer)
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].zero_()


def gather_atoms(trainer: Trainer) -> dict[str, State]:
    """Gather the full fp32 masters and optimizer states of this rank's stage, by name, on the first rank of the stage.

    Public functions of DeepSpeed gather over data-parallel ranks, and the attributes of the model's parameters tell how
    to join tensor-parallel parts. No loading code of the plugin is used. Zero is added to each value, because
    DeepSpeed's gathering at ZeRO 1 and 2 is a sum, which loses the sign of a zero.
    """
    parallel, atoms = trainer.parallel, {}
    parameters = dict(trainer.engine.module.named_parameters())
    for name, found in capture(trainer.engine).parameters.items():
        tensors = {"fp32": found.fp32, **found.tensors}
        whole = {key: join_parts(value, parameters[name], parallel.tensor) for key, value in tensors.items()}
        atoms[name] = {key: (value.float() + 0.0).numpy() for key, value in whole.items()}
        atoms[name] |= {key: np.array([value], dtype=np.float32) for key, value in found.scalars.items()}
    return {
        plain_name(number_expert(name, trainer), trainer.config.layers): state
        for name, state in atoms.items()
        if is_first(trainer, is_expert=EXPERT in name)
    }


EXPERT = ".deepspeed_experts."


def is_first(trainer: Trainer, *, is_expert: bool) -> bool:
    """Return True on the first of the ranks with equal parameters. Expert-parallel ranks have different experts."""
    parallel = trainer.parallel
    ranks = parallel.experts.size if is_expert else 1
    return parallel.tensor.rank == 0 and parallel.sequence_data.rank < ranks


def number_expert(name: str, trainer: Trainer) -> str:
    """Replace the number of an expert on its rank by its number in the layer."""
    before, found, rest = name.partition(EXPERT)
    number, _, end = rest.partition(".")
    line = trainer.parallel.experts
    count = trainer.config.experts // line.size
    return f"{before}{found}{line.rank * count + int(number)}.{end}" if found else name


def join_parts(part: torch.Tensor, parameter: Any, line: Line) -> torch.Tensor:
    """Join a tensor of which every rank of `line` has a part, cut as its parameter is."""
    parts = [torch.empty_like(part) for _ in range(line.size)]
    dist.all_gather(parts, part.contiguous(), group=line.group)
    dim = parameter.partition_dim
    if dim < 0:
        if any(not torch.equal(other, part) for other in parts):
            raise ValueError("a replicated parameter differs between tensor-parallel ranks")
        return part
    stride = parameter.partition_stride
    widths = getattr(parameter, "partition_sizes", None) or [part.shape[dim] // stride] * stride
    blocks = zip(*(piece.split(widths, dim) for piece in parts), strict=True)
    return torch.cat([piece for block in blocks for piece in block], dim)


def plain_name(name: str, layers: int) -> str:
    """Return a name that is the same in both builds."""
    name = name.removeprefix("language_model.").removeprefix("encoder.").removeprefix("embedding.")
    name = re.sub(r"^(tied_modules\.embed|1)\.(?=word_|position_)", "", name)
    name = re.sub(r"^\d+\.lm_head", "output_layer", name)
    name = name.replace(f"{layers + 2}.", "final_layernorm.", 1) if name.startswith(f"{layers + 2}.") else name
    return re.sub(r"^(\d+)\.", lambda found: f"layers.{int(found[1]) - 2}.", name)


def merge_stages(outcomes: Iterable[Outcome]) -> Atoms:
    """Merge the atoms of all stages. `outcomes` are ordered by rank, and so by stage."""
    atoms: Atoms = {}
    for outcome in outcomes:
        for name, state in outcome.atoms.items():
            instance = sum(name == other for other, _ in atoms)
            atoms[name, instance] = state
    return atoms


def count_differing_bits(saved: Atoms, loaded: Atoms) -> tuple[int, int]:
    """Count the bits that differ, and the compared tensors.

    An instance that the source lacks is compared with the source's first one. If the padding of a table differs, only
    the common rows are compared.

    Raises:
        ValueError: the parameters or states have different names.
    """
    bits, tensors = 0, 0
    if {name for name, _ in saved} != {name for name, _ in loaded}:
        raise ValueError(f"different parameters: {sorted({n for n, _ in saved} ^ {n for n, _ in loaded})}")
    for (name, instance), state in loaded.items():
        source = saved.get((name, instance), saved[name, 0])
        if source.keys() != state.keys():
            raise ValueError(f"{name}: states {sorted(source)} were saved, {sorted(state)} are loaded")
        for key, value in state.items():
            rows = min(len(value), len(source[key]))
            pair = (np.ascontiguousarray(side[:rows]).view(np.uint8) for side in (source[key], value))
            bits += int(np.unpackbits(np.bitwise_xor(*pair)).sum())
            tensors += 1
    return bits, tensors
