"""Check that a run resumed under another launch equals the uninterrupted run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
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
        world_size: number of ranks.
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


@dataclass(frozen=True)
class SavedRun:
    """A source launch after its run: its checkpoint folder, and the losses after the save."""

    launch: Launch
    folder: Path
    losses: tuple[float, ...]


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
    """Check that a training saved under `source` resumes under `target` as if it had never stopped.

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
    """
    source, target = _make_launch(source), _make_launch(target)
    with ExitStack() as stack:
        if worlds is None:
            worlds = stack.enter_context(WorldPool(timeout=timeout))
        if directory is None:
            made = tempfile.TemporaryDirectory(prefix="ucp-resume-", ignore_cleanup_errors=True)
            directory = stack.enter_context(made)
        saved = save_run(train_fn, source, steps, directory, worlds, timeout=timeout)
        (check,) = resume_each(train_fn, [saved], target, worlds, loss_tolerance=loss_tolerance, timeout=timeout)
        return check()


def save_run(
    train_fn: TrainFn,
    launch: Launch,
    steps: tuple[int, int],
    directory: str | Path,
    worlds: WorldPool,
    *,
    timeout: float | None = None,
) -> SavedRun:
    """First half of `assert_resume_equivalent`: train, save into `directory`, continue. Targets may share it."""
    from deepspeed_ucp.testing import ranks

    folder = Path(directory)
    world = worlds.get(launch.world_size)
    losses = world.run(ranks.run_source, train_fn, dict(launch.ds_config), steps, str(folder), timeout=timeout)
    return SavedRun(launch=launch, folder=folder, losses=_average(losses))


def resume_each(
    train_fn: TrainFn,
    saves: Sequence[SavedRun],
    target: Launch,
    worlds: WorldPool,
    *,
    loss_tolerance: float | None = None,
    timeout: float | None = None,
) -> list[Callable[[], ResumeReport]]:
    """Second half of `assert_resume_equivalent`, for several saved runs, which one engine loads in turn.

    If a load leaves state behind, the comparison of the next one shows it.

    Returns:
        For each saved run a function that returns its report, or raises an AssertionError.
    """
    from deepspeed_ucp.testing import ranks

    config = dict(target.ds_config)
    config["checkpoint"] = {"universal": True, **config.get("checkpoint", {})}
    world, folders = worlds.get(target.world_size), [str(saved.folder) for saved in saves]
    arguments = (train_fn, config, len(saves[0].losses), folders)
    answers: list[list[ranks.Resumed]] = world.run(ranks.run_target, *arguments, timeout=timeout)
    by_save = zip(saves, zip(*answers, strict=True), strict=True)
    return [partial(_make_report, saved, resumed, target, loss_tolerance) for saved, resumed in by_save]


def _make_report(saved: SavedRun, answers: Sequence[Any], target: Launch, tolerance: float | None) -> ResumeReport:
    """Make the report of one resume from the answers of all ranks."""
    launches = f"saved on {saved.launch.world_size} ranks, loaded on {target.world_size}"
    for rank, answer in enumerate(answers):
        if answer.differences:
            shown = "".join(f"\n  {difference}" for difference in answer.differences[:20])
            more = f"\n  and {len(answer.differences) - 20} more" if len(answer.differences) > 20 else ""
            raise AssertionError(
                f"the state that was loaded differs from the saved one (rank {rank}; {launches}):{shown}{more}"
            )
    if tolerance is None:
        tolerance = max(LOSS_TOLERANCE[_SHORT[find_precision(launch.ds_config)]] for launch in (saved.launch, target))
    resumed = _average([answer.losses for answer in answers])
    return ResumeReport(
        parameters=answers[0].parameters,
        states=answers[0].states,
        direct=answers[0].direct,
        max_loss_gap=_compare_losses(saved.losses, resumed, tolerance),
        reference_losses=saved.losses,
        resumed_losses=resumed,
    )


def _compare_losses(reference: Sequence[float], resumed: Sequence[float], tolerance: float) -> float:
    """Return the largest relative gap."""
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


def _make_launch(launch: Launch | Mapping[str, Any]) -> Launch:
    return launch if isinstance(launch, Launch) else Launch(**launch)
