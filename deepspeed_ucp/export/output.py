"""The folder of an export: staged aside, made durable, renamed; nothing of anybody else's is ever removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..atoms import AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError
from ..io.disk import check_space, explain_full
from ..io.staging import OutputKind, Staging

_EXPORTED = re.compile(
    r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json|\.metadata|__\d+_\d+\.distcp"
)

BESIDE = re.compile(
    r"(config|generation_config|(special_tokens_map|added_tokens)|(pre)?processor_config|chat_template)\.json"
    r"|token(izer|ization)[\w.-]*|vocab\.(json|txt)|merges\.txt|[\w.-]+\.(model|jinja|tiktoken)"
)
"""Files that Hugging Face's libraries want beside the weights."""


def _is_export(folder: str) -> bool:
    return os.path.isdir(folder) and any(_EXPORTED.fullmatch(name) for name in os.listdir(folder))


EXPORT = OutputKind("an export", "export", _is_export, _EXPORTED, resumable=False, kept=BESIDE)


@contextmanager
def stage_output(index: AtomicIndex, destination: str, nbytes: int, overwrite: bool, comm: Comm) -> Iterator[str]:
    """The folder to write to; when the block ends without an error it becomes the destination; collective.

    Args:
        nbytes: what will be written.

    Raises:
        CheckpointError: the destination may not be written, or somebody else writes it.
        DiskFullError: there is not enough room.
    """
    staging = comm.run(lambda: Staging(destination, os.path.dirname(index.run.state_file), EXPORT))
    with ExitStack() as stack:
        comm.once(lambda: _begin(staging, nbytes, overwrite, stack))
        yield staging.folder
        comm.run(staging.sync)
        comm.once(lambda: staging.commit(overwrite=overwrite))


def _begin(staging: Staging, nbytes: int, overwrite: bool, stack: ExitStack) -> None:
    """Lock the destination and make the staging folder; ``stack`` ends the lock, and clears up after an error."""
    stack.enter_context(staging.lock())
    staging.check_destination(overwrite)
    staging.begin({})
    stack.enter_context(staging.attempt())
    check_space(staging.folder, nbytes)


def copy_beside(source: str, folder: str) -> list[str]:
    """Copy a model's configuration and tokenizer; returns their names.

    Raises:
        CheckpointError: there is no ``config.json``.
    """
    if not os.path.isfile(os.path.join(source, "config.json")):
        raise CheckpointError(f"{source}: holds no config.json, so it is no Hugging Face model.")
    names = sorted(name for name in os.listdir(source) if BESIDE.fullmatch(name))
    names = [name for name in names if os.path.isfile(os.path.join(source, name))]
    for name in names:
        with explain_full(folder):
            shutil.copyfile(os.path.join(source, name), os.path.join(folder, name))
    return names


def list_sizes(folder: str) -> dict[str, int]:
    """Sizes of a folder's files in bytes, by name."""
    return {name: os.stat(os.path.join(folder, name)).st_size for name in sorted(os.listdir(folder))}
