"""The folder of an export: staged aside, made durable, renamed; nothing of anybody else's is ever removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..atoms import AtomicIndex
from ..comm import Comm
from ..errors import CheckpointError, shorten
from ..io.disk import check_space, explain_full, sync_folder, sync_tree
from ..io.lock import hold_lock

_EXPORTED = re.compile(
    r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json|\.metadata|__\d+_\d+\.distcp"
)

BESIDE = re.compile(
    r"(config|generation_config|(special_tokens_map|added_tokens)|(pre)?processor_config|chat_template)\.json"
    r"|token(izer|ization)[\w.-]*|vocab\.(json|txt)|merges\.txt|[\w.-]+\.(model|jinja|tiktoken)"
)
"""Files that Hugging Face's libraries want beside the weights."""


class OutputFolder:
    """The destination of one export. Rank 0 alone uses it.

    Raises:
        CheckpointError: it can be no folder of its own (the root).
    """

    def __init__(self, destination: str) -> None:
        self.destination = os.path.abspath(destination)
        self.parent, self.name = os.path.split(self.destination)
        if not self.name:
            raise CheckpointError(f"{destination}: the root folder cannot hold an export; name a folder below it.")
        self.staging = os.path.join(self.parent, f".{self.name}.ucp-export")
        self.aside = os.path.join(self.parent, f".{self.name}.ucp-replaced")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only one who writes this destination; one that was being replaced when a crash came is put back.

        Raises:
            CheckpointError: another export to the same destination is running.
        """
        with explain_full(self.parent):
            os.makedirs(self.parent, exist_ok=True)
        with hold_lock(os.path.join(self.parent, f".{self.name}.ucp-lock"), f"an export to {self.destination}"):
            if os.path.isdir(self.aside) and not os.path.lexists(self.destination):
                os.rename(self.aside, self.destination)
            yield

    def check(self, source: str, overwrite: bool) -> None:
        """Refuse a destination that may not be replaced.

        Raises:
            CheckpointError: it holds the source, or anything that no export wrote; or an export, without ``overwrite``.
        """
        real = os.path.realpath(self.destination)
        if os.path.commonpath([real, os.path.realpath(source)]) == real:
            raise CheckpointError(f"{self.destination}: holds the checkpoint that is exported; write it elsewhere.")
        if not os.path.lexists(self.destination):
            return
        if os.path.islink(self.destination) or not os.path.isdir(self.destination):
            raise CheckpointError(f"{self.destination}: exists and is no folder; write elsewhere.")
        names = sorted(os.listdir(self.destination))
        strangers = [name for name in names if not (_EXPORTED.fullmatch(name) or BESIDE.fullmatch(name))]
        if strangers or (names and not any(_EXPORTED.fullmatch(name) for name in names)):
            raise CheckpointError(
                f"{self.destination}: holds what no export wrote ({shorten(strangers or names)}), so it is left alone. "
                "Write elsewhere."
            )
        if names and not overwrite:
            raise CheckpointError(f"{self.destination}: exists already. --overwrite (overwrite=True) replaces it.")

    def begin(self) -> None:
        """Make the staging folder; what an export that was killed left there goes.

        Raises:
            StorageError: the disk is full.
        """
        self.discard()
        with explain_full(self.parent):
            os.mkdir(self.staging)

    def discard(self) -> None:
        """Remove the staging folder, if there is one."""
        if os.path.islink(self.staging) or os.path.isfile(self.staging):
            os.unlink(self.staging)
        elif os.path.isdir(self.staging):
            shutil.rmtree(self.staging)

    def commit(self) -> None:
        """Make the staging folder the destination; its files are durable already.

        A model's configuration and tokenizer, which lie beside an export that is replaced, stay.
        """
        for name in os.listdir(self.destination) if os.path.isdir(self.destination) else ():
            beside, kept = (os.path.join(folder, name) for folder in (self.destination, self.staging))
            if BESIDE.fullmatch(name) and os.path.isfile(beside) and not os.path.lexists(kept):
                with explain_full(self.staging):
                    shutil.copy2(beside, kept)
        if os.path.lexists(self.aside):
            shutil.rmtree(self.aside)
        if os.path.isdir(self.destination) and os.listdir(self.destination):
            os.rename(self.destination, self.aside)
        os.rename(self.staging, self.destination)
        sync_folder(self.parent)
        if os.path.lexists(self.aside):
            shutil.rmtree(self.aside)


@contextmanager
def stage_output(index: AtomicIndex, destination: str, nbytes: int, overwrite: bool, comm: Comm) -> Iterator[str]:
    """The folder to write to; when the block ends without an error it becomes the destination; collective.

    Args:
        nbytes: what will be written.

    Raises:
        CheckpointError: the destination may not be written, or somebody else writes it.
        StorageError: there is not enough room.
    """
    output = OutputFolder(destination)
    with ExitStack() as stack:
        with comm.together():
            if comm.rank == 0:
                stack.enter_context(output.lock())
                output.check(os.path.dirname(index.state_file), overwrite)
                output.begin()
                stack.callback(output.discard)  # nothing is left of it after the commit
                check_space(output.staging, nbytes)
        yield output.staging
        with comm.together():
            sync_tree(output.staging)
        with comm.together():
            if comm.rank == 0:
                output.commit()


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
