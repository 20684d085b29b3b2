"""How others save in memory: torch's `async_save` by a process of its own, and DLRover's flash checkpoint."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import _async_process_executor

import deepspeed_ucp

SOCKETS = Path("/tmp/ckpt_sock")  # DLRover's own; a folder of each run's name in it


class Peer(Protocol):
    """Saves of an engine, on one rank."""

    def save(self, number: int) -> None:
        """Returns when training may go on. Numbers rise."""
        ...

    def finish(self) -> None:
        """Wait until nothing of it is at work any more."""
        ...

    def free(self) -> None:
        """Give its memory back; the next save has to find it anew."""
        ...


class TorchSaver:
    """`torch.distributed.checkpoint.async_save` as fast as it goes here: staged into shared memory that is kept.

    Its default stages into new memory at each save, and copies that again for its process.

    Args:
        state: tensors under names that no two ranks share.
    """

    def __init__(self, state: Callable[[], Mapping[str, torch.Tensor]], folder: str) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.state, self.folder, self._pending = state, folder, None
        self._make_stager = lambda: DefaultStager(StagingOptions(False, True, False, False))
        self._stager = self._make_stager()

    def save(self, number: int) -> None:
        self._pending = self._begin(self.state(), f"{self.folder}/step{number}")

    def _begin(self, state: Mapping[str, torch.Tensor], folder: str) -> Any:
        from torch.distributed.checkpoint import async_save
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return async_save(
            dict(state), checkpoint_id=folder, async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )  # fmt: skip

    def finish(self) -> None:
        self._pending.result()

    def free(self) -> None:
        self._stager.close()
        self._stager = self._make_stager()
        rank = torch.distributed.get_rank()
        # Its process holds what it was sent last.
        self._begin({f"small{rank}": torch.zeros(1)}, f"{self.folder}/small").result()

    def close(self) -> None:
        """End its process."""
        self._stager.close()
        _async_process_executor._CHECKPOINT_PROCESS = None


class FlashSaver:
    """DLRover's flash checkpoint into memory. 0.6.1 is older than DeepSpeed's present call of `torch.save`."""

    def __init__(self, engine: Any, folder: str) -> None:
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer

        self.folder, self._kind = folder, StorageType.MEMORY
        self._checkpointer = DeepSpeedCheckpointer(engine, folder)
        agent = self._checkpointer._ckpt_agent
        take = agent.save
        agent.save = lambda state_dict, path, **_: take(state_dict, path)

    def save(self, number: int) -> None:
        deepspeed_ucp.uninstall()
        try:
            self._checkpointer.save_checkpoint(self.folder, number, storage_type=self._kind)
        finally:
            deepspeed_ucp.install()
        if self._checkpointer._async_save_engine._cached_step != number:
            raise RuntimeError("DLRover has left a save out")

    def finish(self) -> None:
        """Nothing goes on behind it: the copy is the save."""

    def free(self) -> None:
        self._checkpointer._ckpt_agent.state_dict.clear()
        handler = self._checkpointer._async_save_engine._shm_handler
        memory, handler.shared_memory, handler._buffer_size = handler.shared_memory, None, 0
        memory.unlink()
        memory.close()


def start_flash(folder: str, run: str) -> None:
    """Make DLRover importable, and start its saver on local rank 0: before an engine has memory to be forked with.

    Args:
        folder: that DLRover is installed in.
        run: a name that nothing else has; of its sockets and its shared memory.
    """
    sys.path.append(folder)
    os.environ["TORCHELASTIC_RUN_ID"] = run
    from dlrover.trainer.torch.flash_checkpoint.deepspeed_engine import DeepSpeedCheckpointEngine
    from dlrover.trainer.torch.flash_checkpoint.engine import start_saver_process

    DeepSpeedCheckpointEngine.saver_proc = start_saver_process()


def remove_flash(run: str) -> None:
    """What a run of DLRover's has left behind."""
    shutil.rmtree(SOCKETS / run, ignore_errors=True)
    for left in Path("/dev/shm").glob(f"{run}_*"):
        left.unlink(missing_ok=True)
