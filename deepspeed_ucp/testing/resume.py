"""Resume equivalence: a run that goes on elsewhere is the run that never stopped."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_ucp.testing.world import DEFAULT_TIMEOUT, WorldPool
from deepspeed_ucp.topology import find_precision

TrainFn = Callable[[dict[str, Any]], Generator[Any, None, None]]

LOSS_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 5e-2}
"""Allowed relative gap between a resumed loss and the uninterrupted one, by the coarser precision of the two launches.

The restored state is compared bit by bit, so the gap is only rounding: another world size adds the same numbers in
another order, another precision rounds activations and gradients elsewhere. fp32 keeps 24 bits of a number, fp16 11 and
bf16 8; a few optimizer steps amplify the last of them."""

_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Launch:
    """How a training is launched.

    Attributes:
        world_size: number of ranks.
        ds_config: the DeepSpeed configuration, a dict. `train_batch_size` should be the same in both launches.
    """

    world_size: int
    ds_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ResumeReport:
    """What `assert_resume_equivalent` found.

    Attributes:
        parameters: number of parameters compared.
        states: number of tensors compared bit by bit: masters, 16-bit values, optimizer states, buffers.
        direct: True when the plugin's own loader ran, False for DeepSpeed's (same topology), None when unknown.
        max_loss_gap: the largest relative gap between a resumed loss and the uninterrupted one.
        reference_losses: the uninterrupted run's, one per step after the save, averaged over its ranks.
        resumed_losses: the resumed run's, one per step after the load, averaged over its ranks.
    """

    parameters: int
    states: int
    direct: bool | None
    max_loss_gap: float
    reference_losses: tuple[float, ...]
    resumed_losses: tuple[float, ...]


@dataclass(frozen=True)
class SavedRun:
    """A source launch that has been run: its checkpoint folder and the losses after the save."""

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

    The source trains `steps[0]` steps, saves, and goes on for `steps[1]` more: the reference. The target loads and is
    compared with the source at its save: every parameter's fp32 master, its 16-bit value and every optimizer state bit
    by bit, frozen parameters, buffers, each parameter's hyper-parameters, counters, learning-rate scheduler. Then it
    trains `steps[1]` steps, whose losses must match the reference's.

    Args:
        train_fn: a function of an importable module (or a `functools.partial` of one) that takes the DeepSpeed
            configuration as a dict and is a generator: it yields the engine first and then, for each step that it
            trains, that step's loss as a float. The batch of a step depends on `engine.global_steps` only, and each
            rank takes its share of it: rank r of n the r-th n-th. The losses of the ranks are averaged.
        source: the launch that saves; a dict `{"world_size": 4, "ds_config": {...}}` is accepted.
        target: the launch that resumes. Its `checkpoint.universal` is set to true if it is not set.
        steps: optimizer steps before and after the save.
        loss_tolerance: allowed relative gap between losses; by default `LOSS_TOLERANCE` of the coarser precision.
        directory: where the checkpoint is written; by default a temporary folder that is removed.
        worlds: a pool of worlds to run in; by default one that is made and closed here.
        timeout: seconds for each launch.

    Returns:
        A `ResumeReport`.

    Raises:
        AssertionError: something differs. It names the parameter, the state, the first index and both values.
        Exception: what `train_fn`, the save or the load raised on a rank (see `World.run`).
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
    """The first half of `assert_resume_equivalent`: train, save into `directory`, go on. Targets may share it."""
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
    """The second half of `assert_resume_equivalent`, for several saved runs, one after the other, in one engine.

    What one of them leaves in the engine would be seen in the next one, as long as their states differ.

    Returns:
        For each saved run a function that gives its report, or raises what differs.
    """
    from deepspeed_ucp.testing import ranks

    config = dict(target.ds_config)
    config["checkpoint"] = {"universal": True, **config.get("checkpoint", {})}
    world, folders = worlds.get(target.world_size), [str(saved.folder) for saved in saves]
    arguments = (train_fn, config, len(saves[0].losses), folders)
    answers: list[list[ranks.Resumed]] = world.run(ranks.run_target, *arguments, timeout=timeout)
    by_save = zip(saves, zip(*answers, strict=True), strict=True)
    return [partial(_make_report, saved, found, target, loss_tolerance) for saved, found in by_save]


def _make_report(saved: SavedRun, answers: Sequence[Any], target: Launch, tolerance: float | None) -> ResumeReport:
    """What all ranks say of one resume."""
    launches = f"saved on {saved.launch.world_size} ranks, loaded on {target.world_size}"
    for rank, answer in enumerate(answers):
        if answer.differences:
            shown = "".join(f"\n  {difference}" for difference in answer.differences[:20])
            more = f"\n  and {len(answer.differences) - 20} more" if len(answer.differences) > 20 else ""
            raise AssertionError(
                f"the state that was loaded differs from the saved one (rank {rank}; {launches}):{shown}{more}"
            )
    if tolerance is None:
        tolerance = max(LOSS_TOLERANCE[_SHORT[find_precision(each.ds_config)]] for each in (saved.launch, target))
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
    """The largest relative gap."""
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
