"""Saves in memory without any engine: made files, a record, a writer in this process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import UcpError
from deepspeed_ucp.saves import coordination, places, to_folder, to_store
from deepspeed_ucp.saves.memory import LOCK, Destination, Job, Snapshot
from deepspeed_ucp.saves.writer import SaveWriter
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.sources.older import is_sealed
from tests.convert.conversions import write_source

TAG = "global_step3"

PATIENCE = 120.0
"""Seconds for what is to come: longer than a busy machine takes."""

MODULES = (places, coordination, to_folder, to_store)
"""Modules that write a save to a place."""

SETTINGS = {"keep": 1, "wait_s": PATIENCE, "storage_options": None}
"""Of a writer."""


def make_save(
    job: Job, *folders: str | Destination, tag: str = TAG, keep: int | None = None, **changes: Any
) -> Snapshot:
    """The next save of a job: whole, of other weights than the last one."""
    number = max(job.list_numbers(), default=0) + 1
    folder = Path(job.find_folder(number))
    made = write_source(folder, number)
    if tag != TAG:
        (folder / tag).parent.mkdir(exist_ok=True)
        made.rename(folder / tag)
    (folder / "zero_to_fp32.py").write_text("# a script")
    places = tuple(each if isinstance(each, Destination) else Destination(each, keep) for each in folders)
    save = Snapshot(job.name, number, places[0].folder, tag, number, True, 0, 1, places, str(folder))
    save = replace(save, **changes)
    save.write_record()
    return save


def find_step(name: str) -> Callable[..., Any]:
    """Return a function that a writer calls, by its name in the modules that write a save."""
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


@contextmanager
def replace_steps(steps: Mapping[str, object]) -> Iterator[None]:
    """Replace functions by name in all modules that write a save."""
    with ExitStack() as stack:
        for module in MODULES:
            held = {name: step for name, step in steps.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **held) if held else nullcontext())
        yield


def set_counter(folder: Path, key: str, value: object) -> None:
    """Change a value in all model states of a tag."""
    for path in folder.glob("*model_states.pt"):
        torch.save({**torch.load(path, weights_only=False), key: value}, path)


def write(job: Job, *, wait: float = PATIENCE) -> bool:
    """What a new writer does with what is pending; whether nothing failed."""
    return SaveWriter(job, 1, wait).write_pending()


@contextmanager
def run_writer(writer: SaveWriter) -> Iterator[Callable[[], object]]:
    """Run a writer as its process does, in a thread, to its end; what tells it of a save."""
    read, write = os.pipe()
    with open(read) as lines, open(write, "wb", buffering=0) as told, mock.patch.object(sys, "stdin", lines):
        thread = threading.Thread(target=writer.run)
        thread.start()
        try:
            yield lambda: told.write(b"\n")
        finally:
            told.close()
            thread.join()


def is_whole(folder: str) -> bool:
    """Whether a tag's folder has a seal, and its files are those that were sealed."""
    try:
        open_checkpoint(folder, Comm())
    except UcpError:
        return False
    return is_sealed([os.path.dirname(folder)], os.path.basename(folder))


def strip(content: dict[str, bytes]) -> dict[str, bytes]:
    """Without the seal."""
    return {name: data for name, data in content.items() if name != "ucp_seal.json"}


def find_writer(job: Job) -> int:
    """The number of the process that writes a job's saves: it has the lock's file, the one that started it has not."""
    lock = os.path.join(job.folder, LOCK)
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = job.folder.encode() in (path / "cmdline").read_bytes()
            if is_ours and any(os.readlink(each) == lock for each in (path / "fd").iterdir()):
                return int(path.name)
    raise AssertionError("there is no writer")
