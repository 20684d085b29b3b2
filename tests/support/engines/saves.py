"""What ranks do in the tests of saves by way of memory. Imported on the ranks only."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters

from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.io.store import list_tree
from deepspeed_ucp.saves.removing import WRITTEN
from deepspeed_ucp.saves.saving import _count_saved
from deepspeed_ucp.testing.capture import CapturedEngine, capture
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.engines.cases import make_engine, train_engine
from tests.support.engines.ranks import uninstalled
from tests.support.until import wait_until


def close_saver(saver: Any) -> None:
    """End a saver as a preempted process does: its saves stay in memory for the next load."""
    saver.keeps_memory = True
    saver.close()


def save_each(
    ds_config: dict[str, Any], folder: str, steps: int, seed: int = 0, own: str = "", **arguments: Any
) -> list[Any]:
    """Train and save after each step, into another folder by DeepSpeed alone; what was held at each save.

    Args:
        arguments: of the save by DeepSpeed alone.
    """
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
                engine.save_checkpoint(own, client_state={"number": number}, **arguments)
    close_saver(saver)
    engine.destroy()
    return states


def save_at_odd_times(ds_config: dict[str, Any], folder: str, own: str) -> None:
    """Before the first step, in the midst of one, and once more under that tag; by DeepSpeed alone, too."""
    engine = make_engine(ds_config)
    trained = train_engine(engine)
    for micro_steps, tag in ((0, None), (1, "twice"), (1, "twice")):
        train_steps(trained, micro_steps)
        with uninstalled():
            engine.save_checkpoint(own, tag=tag)
        engine.save_checkpoint(folder, tag=tag)
        saver = find_state(engine).saver
        assert tag or not saver.is_first or saver.wait(60)  # else it gives way to the next one
    close_saver(saver)
    engine.destroy()


def save_weights_too(ds_config: dict[str, Any], folder: str) -> list[str]:
    """A save, and the 16-bit weights right after it; the names of those that are not what they are in the engine."""
    engine = make_engine(ds_config)
    train_steps(train_engine(engine), 1)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "weights.bin")
    dist.barrier()  # the first rank writes it
    found = torch.load(os.path.join(folder, "weights.bin"), weights_only=True)
    with GatheredParameters(list(engine.module.parameters())):
        named = engine.module.state_dict()
        differing = [name for name, tensor in named.items() if name not in found or not tensor.equal(found[name])]
    close_saver(find_state(engine).saver)
    engine.destroy()
    return differing


def save_without_room(ds_config: dict[str, Any], folder: str) -> None:
    engine = make_engine(ds_config)
    train_steps(train_engine(engine), 1)
    with mock.patch("deepspeed_ucp.saves.saver.count_free", return_value=1000):
        engine.save_checkpoint(folder)
    engine.destroy()


def load(
    ds_config: dict[str, Any], folder: str, tag: str | None = None, model: str = "mixed"
) -> tuple[Any, Any, CapturedEngine, float]:
    """What a load returns, what the engine then holds, and the loss of the next step."""
    engine = make_engine(ds_config, model, seed=99)
    path, client_state = engine.load_checkpoint(folder, tag=tag)
    state = capture(engine)
    loss = next(itertools.islice(train_engine(engine), 1))
    engine.destroy()
    return path, client_state, state, loss


def load_bytes(ds_config: dict[str, Any], folder: str) -> tuple[str, int, int]:
    """From where a load has come, the bytes that this rank has read, and those that all of them need."""
    engine = make_engine(ds_config, seed=99)
    path, _ = engine.load_checkpoint(folder)
    report = engine.ucp_report
    engine.destroy()
    return path, report.bytes_read, report.state_bytes


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
    close_saver(find_state(engine).saver)
    engine.destroy()


def foresee(ds_config: dict[str, Any], free: int) -> tuple[str, int, int]:
    """What a new engine tells with so many bytes free, and what a save of it is reckoned to take, before a step and
    after one."""
    with (
        mock.patch("deepspeed_ucp.saves.saving.count_free", return_value=free),
        mock.patch("deepspeed_ucp.saves.saving.logger.info") as told,
    ):
        engine = make_engine(ds_config)
    before = _count_saved(engine)
    train_steps(train_engine(engine), 1)
    after = _count_saved(engine)
    engine.destroy()
    return "".join(call.args[0] % call.args[1:] for call in told.call_args_list), before, after


def with_options(options: dict[str, Any], work: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """`work` with the plugin on for all engines, and these options."""
    with mock.patch.dict(os.environ, DEEPSPEED_UCP=json.dumps(options)):
        return work(*args, **more)


def wait_for_marks(place: str) -> None:
    """Wait until what nodes told each other by in the tags of a place is gone, a moment after all was there."""
    wait_until(lambda: not any(WRITTEN in name for name in list_tree(place)))
