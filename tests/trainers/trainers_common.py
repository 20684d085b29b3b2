"""Functions of several trainers' tests that run on the ranks. Imported on the ranks only."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed_ucp.model.index import BATCH_SIZES
from deepspeed_ucp.saves.launch import WriterPipe
from deepspeed_ucp.saves.memory import has_writer
from deepspeed_ucp.saves.saver import list_savers
from tests.support.engines import ranks
from tests.support.until import wait_until


@dataclass
class Trained:
    """One rank's part of a run.

    Attributes:
        samples, rates, losses: of each step; a loss is the mean of the rank's micro batches.
        weights: trained weights at the end.
        warnings: warnings of the plugin.
    """

    samples: dict[int, list[int]] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def make_config(stage: int, universal: Any = True, **more: Any) -> dict[str, Any]:
    return {
        **dict.fromkeys(BATCH_SIZES, "auto"),
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "checkpoint": {"universal": universal},
        "steps_per_print": 1_000_000,
        **more,
    }


def agree(
    whole: Sequence[Trained], rest: Sequence[Trained], first: int, *, rate: float = 0.0, loss: float = 2e-6
) -> None:
    """Check that a resumed run has the uninterrupted one's samples, rates and losses of all steps from ``first`` on.

    Args:
        rate: relative gap of learning rates.
        loss: gap of losses.
    """
    assert list(rest[0].samples) == [step for step in whole[0].samples if step >= first]
    for step in rest[0].samples:
        taken, expected = (sorted(chain(*(each.samples[step] for each in run))) for run in (rest, whole))
        assert taken == expected, step
        assert rest[0].rates[step] == pytest.approx(whole[0].rates[step], rel=rate, abs=0), step
        mean, theirs = (sum(each.losses[step] for each in run) / len(run) for run in (rest, whole))
        assert mean == pytest.approx(theirs, abs=loss), step
    for name, weight in whole[0].weights.items():
        torch.testing.assert_close(rest[0].weights[name], weight, rtol=0, atol=2e-6)


@contextmanager
def choose_gloo(kind: str = "MULTI_CPU") -> Iterator[None]:
    """Choose gloo and the CPU for Accelerate.

    It does not use DeepSpeed without an accelerator (accelerate/state.py, ``_prepare_backend``), nor FSDP unless
    ``kind`` is MULTI_GPU.
    """
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    def set_device(self: Any) -> None:
        self.device = torch.device("cpu")

    with (
        mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
        mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", DistributedType[kind])),
        mock.patch.object(PartialState, "set_device", set_device),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        yield


@contextmanager
def listen(warnings: list[str]) -> Iterator[None]:
    with ranks.listen() as heard:
        yield
    warnings += [text for level, text in heard if level != "INFO"]


def attempt(function: Callable[..., object], *args: Any, **options: Any) -> str:
    """Return the type and message of the function's error, or an empty string."""
    try:
        function(*args, **options)
    except Exception as error:  # noqa: BLE001 - for the test
        return f"{type(error).__name__}: {error}"
    return ""


def gather_weights(engine: Any) -> dict[str, torch.Tensor]:
    import deepspeed

    named = [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]
    with deepspeed.zero.GatheredParameters([param for _, param in named]):
        return {name: param.detach().clone() for name, param in named}


# -- saves from memory that are written late --------------------------------------------------------------------------


def list_saves(folder: str) -> dict[str, bool]:
    """Map the checkpoints in a folder to True if the engine's state is complete."""
    found = (each for each in Path(folder).iterdir() if each.is_dir()) if os.path.isdir(folder) else ()
    return {each.name: (each / "latest").exists() for each in found}


def finish_writes() -> None:
    for saver in list_savers():
        assert not saver.is_owner or saver.finish()


@contextmanager
def hold_writes() -> Iterator[None]:
    """Run without a writer process (timeout 1 s); earlier saves are written before, new ones afterwards."""
    finish_writes()
    for saver in list_savers():  # the idle writer might still look for saves
        saver.writer.close()
        wait_until(lambda saver=saver: not has_writer(saver.job))
    former = [(saver, saver.options) for saver in list_savers()]
    for saver, options in former:
        saver.options = options.model_copy(update={"wait_s": 1.0})
    with mock.patch.object(WriterPipe, "notify"):
        yield
    for saver, options in former:
        saver.options = options
        if saver.is_owner:
            saver.writer.notify()
