"""Check that a run resumed under another launch equals the uninterrupted run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_ucp.model.topology import find_precision
from deepspeed_ucp.testing.world import DEFAULT_TIMEOUT, WorldPool

TrainFn = Callable[[dict[str, Any]], Generator[Any, None, None]]

LOSS_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2}
"""Allowed relative gap between a resumed loss and the uninterrupted one, by the coarser precision of the two launches.

The restored state is compared bit by bit, so the gap is only rounding (fp32 has 24 bits, fp16 11, bf16 8), amplified by
a few optimizer steps."""

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Launch:
    """A launch of a training.

    Attributes:
        ds_config: the DeepSpeed configuration, a dict. `train_batch_size` should be the same in both launches.
    """

    world_size: int
    ds_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ResumeReport:
    """Result of `assert_resume_equivalent`.

    Attributes:
        parameters: number of parameters compared.
        states: number of tensors compared bit by bit: masters, 16-bit values, optimizer states, buffers.
        direct: True if the plugin's loader ran, False for DeepSpeed's (same topology), None if unknown.
        max_loss_gap: largest relative gap between a resumed loss and the uninterrupted one.
        reference_losses: losses of the uninterrupted run after the save, averaged over its ranks.
        resumed_losses: losses of the resumed run, averaged over its ranks.
    """

    parameters: int
    states: int
    direct: bool | None
    max_loss_gap: float
    reference_losses: tuple[float, ...]
    resumed_losses: tuple[float, ...]


def assert_resume_equivalent(
    train_fn: TrainFn,
    *,
    source: Launch | Mapping[str, Any],
    target: Launch | Mapping[str, Any],
    steps: tuple[int, int] = (3, 3),
    loss_tolerance: float | None = None,
    directory: str | Path | None = None,
    worlds: WorldPool | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> ResumeReport:
    """Check that a run saved under `source` resumes exactly under `target`.

    The source trains `steps[0]` steps, saves, and trains `steps[1]` more: the reference. The target loads the save and
    is compared with the source at its save: masters, 16-bit values and optimizer states bit by bit, frozen parameters,
    buffers, hyper-parameters, counters and the scheduler. Then it trains `steps[1]` steps, whose losses must match.

    Args:
        train_fn: a generator function of an importable module (or a `functools.partial` of one) that takes the
            DeepSpeed configuration as a dict. It yields the engine first, and then the loss of each step as a float.
            The batch of a step may depend on `engine.global_steps` only, and rank r of n takes the r-th n-th of it.
        source: the launch that saves; a dict `{"world_size": 4, "ds_config": {...}}` is accepted.
        target: the launch that resumes. Its `checkpoint.universal` defaults to true.
        steps: optimizer steps before and after the save.
        loss_tolerance: allowed relative gap between losses (default: `LOSS_TOLERANCE` of the coarser precision).
        directory: folder of the checkpoint (default: a temporary one).
        worlds: pool of worlds (default: a new one).
        timeout: timeout of each launch in seconds.

    Raises:
        AssertionError: something differs. It names the parameter, the state, the first index and both values.
        Exception: from `train_fn`, the save or the load on a rank (see `World.run`).

    Example:
        >>> target = Launch(3, {"train_batch_size": 12, "zero_optimization": {"stage": 3}})
        >>> assert_resume_equivalent(train, source=Launch(4, {"train_batch_size": 12}), target=target).direct
        True
    """
    from deepspeed_ucp.testing import ranks

    source, target = (launch if isinstance(launch, Launch) else Launch(**launch) for launch in (source, target))
    config = dict(target.ds_config)
    config["checkpoint"] = {"universal": True, **config.get("checkpoint", {})}
    with ExitStack() as stack:
        if worlds is None:
            worlds = stack.enter_context(WorldPool(timeout=timeout))
        if directory is None:
            made = tempfile.TemporaryDirectory(prefix="ucp-resume-", ignore_cleanup_errors=True)
            directory = stack.enter_context(made)
        options, folder = {"timeout": timeout}, str(directory)
        world = worlds.get(source.world_size)
        reference = _average(world.run(ranks.run_source, train_fn, dict(source.ds_config), steps, folder, **options))
        world = worlds.get(target.world_size)
        answers = world.run(ranks.run_target, train_fn, config, steps[1], folder, **options)
    for rank, (_, differences, _) in enumerate(answers):
        if differences:
            shown = "".join(f"\n  {difference}" for difference in differences[:20])
            more = f"\n  and {len(differences) - 20} more" if len(differences) > 20 else ""
            raise AssertionError(
                f"the state that was loaded differs from the saved one (rank {rank}; saved on {source.world_size} "
                f"ranks, loaded on {target.world_size}):{shown}{more}"
            )
    if loss_tolerance is None:
        precisions = (find_precision(launch.ds_config) for launch in (source, target))
        loss_tolerance = max(LOSS_TOLERANCE[_SHORT[precision]] for precision in precisions)
    resumed = _average([losses for *_, losses in answers])
    gap = _compare_losses(reference, resumed, loss_tolerance)
    return ResumeReport(**answers[0][0], max_loss_gap=gap, reference_losses=reference, resumed_losses=resumed)


def _compare_losses(reference: Sequence[float], resumed: Sequence[float], tolerance: float) -> float:
    """Return the largest relative gap; AssertionError if it is above ``tolerance``."""
    gaps = [abs(want - got) / max(abs(want), 1e-12) for want, got in zip(reference, resumed, strict=True)]
    for step, gap in enumerate(gaps):
        if not gap <= tolerance:  # also refuses NaN
            raise AssertionError(
                f"step {step + 1} after the resume: the uninterrupted run's loss is {reference[step]!r}, "
                f"the resumed one's {resumed[step]!r}, a relative gap of {gap:.2e} > {tolerance:.2e}"
            )
    return max(gaps, default=0.0)


def _average(losses: list[list[float]]) -> tuple[float, ...]:
    return tuple(sum(step) / len(step) for step in zip(*losses, strict=True))
