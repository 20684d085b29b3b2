"""Saves of trainers that are on their way for as long as a test wants. Imported on the ranks only."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed_ucp.saves.saver import Saver, list_savers
from deepspeed_ucp.saves.writer import is_locked
from tests.support.until import wait_until


def look(folder: str) -> dict[str, bool]:
    """Checkpoints in a folder, and whether the engine's state is in them."""
    found = (each for each in Path(folder).iterdir() if each.is_dir()) if os.path.isdir(folder) else ()
    return {each.name: (each / "latest").exists() for each in found}


def settle() -> None:
    """Wait until what is in memory is written."""
    for saver in list_savers():
        assert not saver.is_first or saver.finish()


@contextmanager
def hold() -> Iterator[None]:
    """Inside, there is no writer, and one is waited for for a second; until then it has written all, and afterwards
    another one goes on."""
    settle()
    for saver in list_savers():  # told of nothing it might still be looking for more
        saver._end_writer()
        wait_until(lambda saver=saver: not is_locked(saver.job))
    former = [(saver, saver.options) for saver in list_savers()]
    for saver, options in former:
        saver.options = options.model_copy(update={"wait_s": 1.0})
    with mock.patch.object(Saver, "tell_writer"):
        yield
    for saver, options in former:
        saver.options = options
        if saver.is_first:
            saver.tell_writer()


def make_holder(folder: str, held: tuple[int, ...], told: list[dict[str, bool]]) -> Any:
    """A callback of Hugging Face's Trainer that holds the saves of some steps, and notes what is there after each."""
    from transformers import TrainerCallback

    class Holder(TrainerCallback):  # type: ignore[misc]
        holding: Any = None

        def lose(self) -> None:
            """The machine with what is held, if something is."""
            if self.holding is not None:
                for saver in list_savers():
                    shutil.rmtree(saver.job.folder, ignore_errors=True)
                self.holding.__exit__(None, None, None)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == held[0]:
                self.holding = hold()
                self.holding.__enter__()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            told.append(look(folder))
            if self.holding is not None and state.global_step == held[-1]:
                self.holding.__exit__(None, None, None)
                self.holding = None
                settle()

    return Holder()
