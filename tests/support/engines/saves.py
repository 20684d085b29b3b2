"""What ranks do in the tests of saves by way of memory. Imported on the ranks only."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch.distributed as dist

from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.engines.cases import make_engine, train_engine
from tests.support.engines.ranks import uninstalled


def save_each(ds_config: dict[str, Any], folder: str, steps: int, seed: int = 0, own: str = "") -> list[Any]:
    """Train and save after each step, into another folder by DeepSpeed alone; what was held at each save."""
    engine = make_engine(ds_config, seed=seed)
    trained, states = train_engine(engine), list[CapturedEngine]()
    for number in range(steps):
        train_steps(trained, 1)
        engine.save_checkpoint(folder, client_state={"number": number})
        states.append(capture(engine))
        saver = find_state(engine).saver
        assert not saver.is_first or saver.wait(60)
        if own:
            with uninstalled():
                engine.save_checkpoint(own, client_state={"number": number})
    saver.close()
    engine.destroy()
    return states


def save_without_room(ds_config: dict[str, Any], folder: str) -> None:
    engine = make_engine(ds_config)
    train_steps(train_engine(engine), 1)
    with mock.patch("deepspeed_ucp.saves.saver._count_free", return_value=1000):
        engine.save_checkpoint(folder)
    engine.destroy()


def load(ds_config: dict[str, Any], folder: str, tag: str | None = None) -> tuple[Any, Any, CapturedEngine, float]:
    """What a load returns, what the engine then holds, and the loss of the next step."""
    engine = make_engine(ds_config, seed=99)
    path, client_state = engine.load_checkpoint(folder, tag=tag)
    state = capture(engine)
    loss = next(itertools.islice(train_engine(engine), 1))
    engine.destroy()
    return path, client_state, state, loss


def on_nodes(work: Callable[..., Any], memory: str, *args: Any, **options: Any) -> Any:
    """`work` as if every rank were a node of its own, whose memory is another folder."""
    rank = os.environ["RANK"]
    with mock.patch.dict(os.environ, LOCAL_RANK="0", NODE_MEMORY=os.path.join(memory, f"node{rank}")):
        return work(*args, **options)


def save_where_memory_runs_full(ds_config: dict[str, Any], folder: str) -> None:
    """On the last rank, in its second save."""
    engine = make_engine(ds_config)
    trained, full = train_engine(engine), mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    for number in range(3):
        train_steps(trained, 1)
        is_full = number == 1 and dist.get_rank() == dist.get_world_size() - 1
        with mock.patch("deepspeed_ucp.saves.saver.save_over", full) if is_full else nullcontext():
            engine.save_checkpoint(folder)
    find_state(engine).saver.close()
    engine.destroy()
