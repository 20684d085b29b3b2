"""Frozen parameters that a job has saved once: a folder of files beside its tags (a base), which each tag names.

A file of a base is of the form of the model states that it completes, and has what these leave out. Where headers are
read the two become one again, so that nobody else need know: a :class:`~.headers.Piece` tells where it lies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from ..errors import CheckpointError
from ..io.paths import Entry, join_path
from .files import BASE, FROZEN, find_state_name, scan_if_there
from .findings import Finding
from .headers import FileHeader, Piece
from .save import Save
from .seal import Seal, SealedFile, read_sealed, write_sealed

_Name = Annotated[str, Field(pattern=r"^[^/]+frozen_states\.pt$")]


class Reference(Seal):
    """What a tag tells of its base: the folder's name, which no other base has, and its files."""

    kind: Literal["deepspeed_ucp frozen"] = "deepspeed_ucp frozen"  # type: ignore[assignment]
    folder: str = Field(pattern=rf"^{BASE}[0-9a-f]{{12}}$")
    files: dict[_Name, SealedFile]

    @property
    def names(self) -> dict[str, SealedFile]:
        """The files by their names from the tag's folder."""
        return {f"../{self.folder}/{name}": file for name, file in self.files.items()}


def read_reference(folder: str) -> Reference | None:
    """A tag's; None where it has its frozen parameters itself.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    try:
        return read_sealed(os.path.join(folder, FROZEN), Reference)
    except FileNotFoundError:
        return None


def write_reference(folder: str, base: str, files: Mapping[str, SealedFile]) -> None:
    """Have a tag name a base.

    Raises:
        OSError: it cannot be written.
    """
    write_sealed(os.path.join(folder, FROZEN), Reference(folder=base, files=dict(sorted(files.items()))))


def list_base(folder: str) -> dict[str, Entry]:
    """Those files of its base that are beside a tag, by name; what cannot be read is told when the files are."""
    with suppress(CheckpointError):
        if (reference := read_reference(folder)) is not None:
            held = scan_if_there(join_path(folder, f"../{reference.folder}"))
            return {f"../{reference.folder}/{name}": held[name] for name in reference.files if name in held}
    return {}


def compare_base(folder: str, reference: Reference, headers: Iterable[FileHeader]) -> Iterator[Finding]:
    """Faults of files of a base that are not there, or not those that were saved."""
    found = {header.name: header for header in headers}
    for name, file in reference.names.items():
        path, header = join_path(folder, name), found.get(name)
        if header is None:
            yield Finding("missing", name, f"{path} is missing: it holds frozen parameters of {folder}. {_ADVICE}")
        elif (header.size, header.crc) != (file.size, file.crc):
            told = f"{header.size} bytes" + ("" if header.crc is None else f" and CRC32 {header.crc:08x}")
            text = f"{path}: has {told}, {folder}/{FROZEN} says {file.size} and {file.crc:08x}; it is not the file"
            yield Finding("seal", name, f"{text} with the frozen parameters that this tag was saved with. {_ADVICE}")


_ADVICE = (
    "Copy the whole folder there from where it was saved (all tags of a run may share one), or load another "
    "tag. Where the model has its frozen parameters already, as from its pretrained weights, remove "
    f"{FROZEN} and ucp_seal.json from the tag and pass load_module_strict=False."
)


def add_base(save: Save, headers: Iterable[FileHeader]) -> None:
    """Complete the model states of a save, which is changed in place, by the files of its base."""
    save.bases.update((header.name, header) for header in headers)
    own = {find_state_name(name): header for name, header in save.bases.items()}

    def complete(header: FileHeader) -> FileHeader:
        return _complete(header, own[header.name]) if header.name in own else header

    for models in save.models:
        models[:] = map(complete, models)
    for layers in save.layers:
        layers.update({layer: complete(header) for layer, header in layers.items()})
    save.experts.update({key: complete(header) for key, header in save.experts.items()})


def _complete(header: FileHeader, base: FileHeader) -> FileHeader:
    if header.layer is not None or base.model is None or header.model is None:
        return replace(header, layer=_join(header.layer or {}, base.layer or {}, base.name))
    model, more = header.model, base.model
    return replace(
        header,
        model=replace(
            model,
            module=model.module and _join(model.module, more.module or {}, base.name, more.order),
            frozen=_join(model.frozen, more.frozen, base.name),
            frozen_shapes={**more.frozen_shapes, **model.frozen_shapes},
        ),
    )


def _join(
    own: Mapping[str, Piece], more: Mapping[str, Piece], home: str, order: Sequence[str] = ()
) -> dict[str, Piece]:
    """A file's own tensors and its base's; those of both are its own."""
    held = {**{name: replace(piece, home=home) for name, piece in more.items()}, **own}
    return {name: held[name] for name in dict.fromkeys([*(name for name in order if name in held), *held])}
