"""A stand-in for an engine that saves through memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed_ucp.config import SaveOptions, UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.saves.memory import Job, find_root, name_job
from deepspeed_ucp.saves.saver import Saver, save_into_memory
from tests.convert.conversions import write_source
from tests.saves.saving import PATIENCE, TAG, is_whole


class Engine(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(
            local_rank=0, global_steps=3, optimizer=None, module=SimpleNamespace(parameters=list),
            save_non_zero_checkpoint=False, checkpoint_engine=None,
        )  # fmt: skip

    def use_node_local_storage(self) -> bool:
        return False


def write_tag(folder: str, tag: str) -> None:
    """Write a checkpoint as DeepSpeed does."""
    write_source(Path(folder)).rename(Path(folder) / tag)


class Training:
    """An engine that saves to ``destination`` through ``memory``, below a folder.

    Attributes:
        given: the folders passed to DeepSpeed's save.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.destination, self.memory = folder, folder / "destination", folder / "memory"
        self.engine, self.given = Engine(), list[str]()
        self.config = UniversalConfig(save=SaveOptions(memory=str(self.memory), **{"wait_s": PATIENCE, **options}))

    def save(
        self,
        tag: str = TAG,
        destination: str = "destination",
        write: Callable[[str, str], object] = write_tag,
        *,
        is_snapshot: bool = False,
    ) -> bool:
        """Save; return True if the save is in memory."""

        def note(folder: str) -> None:
            self.given.append(folder)
            write(folder, tag)

        to = destination if "://" in destination else str(self.folder / destination)
        return save_into_memory(self.engine, self.config, to, tag, note, latest=True, is_snapshot=is_snapshot)[1]

    @property
    def saver(self) -> Saver:
        found = find_state(self.engine).saver
        assert isinstance(found, Saver)
        return found

    @property
    def job(self) -> Job:
        return self.saver.job

    def is_whole(self, *tags: str) -> bool:
        """Return True if the destination has complete saves with these tags."""
        return all(is_whole(str(self.destination / tag)) for tag in tags)

    @property
    def latest(self) -> str:
        return (self.destination / "latest").read_text()

    @property
    def log(self) -> str:
        return Path(self.job.folder, "log").read_text()

    def make_job(self) -> Job:
        return Job(os.path.join(find_root(str(self.memory)), name_job()))
