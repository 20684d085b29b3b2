"""File names in a DeepSpeed checkpoint folder (engine.py ``_get_ckpt_name``).

Functions that list folders raise CheckpointError if a folder cannot be listed or holds the files of two saves.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any, NamedTuple

from ...errors import CheckpointError, UnsupportedError, shorten
from ...io.interface import explain_failure
from ...io.jsonfile import read_json
from ...io.paths import UPLOAD, Entry
from ...io.staging import MANIFEST
from ...io.store import list_folder, list_tree
from ..foreign.names import PARTS, find_format, is_foreign

NO_AXIS = -1
"""Tensor-parallel rank of a layer file without one in its name: the process topology had no model axis."""

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL_ZERO3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_PIPELINE = re.compile(r"layer_\d+-.*model_states\.pt")

_STATES = re.compile(r".*(model|optim)_states\.pt(?:-\d+\.\d+)?", re.ASCII)
_COPY = re.compile(r"(.*_states\.pt)-(\d{1,9})\.(\d{1,9})", re.ASCII)
_LEGACY = re.compile(r"mp_rank_\d+(?:_\d+)*")
_UPLOAD = re.compile(rf"{re.escape(UPLOAD)}[\w.-]+", re.ASCII)
_SWAP = re.compile(r"offloaded_tensors/rank(\d{1,9})/(?:([^/]+)-)?(\d{1,9})_(\d{1,9})\.tensor\.swp", re.ASCII)

OFFLOADED = "offloaded_tensors"
"""Folder with a subfolder per rank for optimizer states that an engine swapped to NVMe."""

ZERO = "zero"
"""Folder of an atomic checkpoint with a subfolder per parameter."""

CLIENT = "client"
"""Folder of an atomic checkpoint with the client states of all model-parallel ranks except the first."""

SEAL = "ucp_seal.json"

PUBLISHED = "ucp_published.json"
"""File of a tag that names the folder below it with the tag's files (:func:`resolve_published`)."""

_POINTER_BYTES = 1 << 12  # size limit of ``ucp_published.json``


def list_entries(folder: str) -> dict[str, Entry]:
    """List a checkpoint's files and subfolders by name; other files are omitted.

    Links are followed, also out of the folder: content-addressed stores consist of links. A FIFO or a dangling link is
    listed with 0 bytes and cannot be opened (:mod:`deepspeed_ucp.io.store`).
    """
    entries = scan_folder(folder)
    chosen = {
        name: entry
        for name, entry in entries.items()
        if entry.is_folder or _STATES.fullmatch(name) or name in (MANIFEST, SEAL, PUBLISHED)
    }
    if OFFLOADED in chosen and chosen[OFFLOADED].is_folder:
        below = scan_folder(os.path.join(folder, OFFLOADED), deep=True)
        chosen |= {path: entry for name, entry in below.items() if read_swap_name(path := f"{OFFLOADED}/{name}")}
    if not any(_STATES.fullmatch(name) for name in chosen) and not holds_atoms(chosen):
        chosen |= _list_foreign(folder, entries)
    return chosen


def resolve_published(folder: str, entries: Container[str] = (PUBLISHED,)) -> str:
    """Return the folder with a tag's files, which ``ucp_published.json`` may name.

    Args:
        entries: names in the folder, if known; if that file is not among them, it is not read.
    """
    path = os.path.join(folder, PUBLISHED)
    if PUBLISHED not in entries:
        return folder
    try:
        name = read_json(path, most=_POINTER_BYTES).get("folder")
    except (FileNotFoundError, NotADirectoryError):
        return folder
    if not (isinstance(name, str) and _UPLOAD.fullmatch(name)):
        raise CheckpointError(f"names {name!r:.80}, which is no folder of a save. Restore the file.", path=path)
    return os.path.join(folder, name)


def _list_foreign(folder: str, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """List a foreign checkpoint's files, also those in Accelerate's subfolders."""
    subfolders = [name for name, entry in entries.items() if entry.is_folder and name.startswith(PARTS)]
    parts = {name: scan_if_there(os.path.join(folder, name)) for name in subfolders}
    below = {f"{name}/{file}": entry for name, files in parts.items() for file, entry in files.items()}
    return {name: entry for name, entry in {**entries, **below}.items() if not entry.is_folder and is_foreign(name)}


def scan_folder(folder: str, *, deep: bool = False) -> dict[str, Entry]:
    """List a folder's entries by name, or (``deep``) all files below by relative path."""
    try:
        return list_tree(folder) if deep else list_folder(folder)
    except OSError as error:
        raise explain_failure(error.filename or folder, "listed", error) from error


def scan_if_there(folder: str) -> dict[str, Entry]:
    """List the entries of a folder by name; empty if it does not exist."""
    try:
        return scan_folder(folder)
    except CheckpointError as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return {}
        raise


def list_published(
    folder: str, list_place: Callable[[str], Mapping[str, Entry]] = scan_if_there
) -> tuple[str, Mapping[str, Entry]]:
    """Return the folder with a tag's files, and its entries.

    By default a missing tag has no entries. Refuses a tag into which DeepSpeed has saved later.
    """
    entries = list_place(folder)
    published = resolve_published(folder, entries)
    if published == folder:
        return folder, entries
    later = [name for name in filter(is_state_file, entries) if entries[name].changed > entries[PUBLISHED].changed]
    if later:
        text = f"files of two saves: {shorten(sorted(later))} were written after {PUBLISHED}, which names other files"
        advice = f"To load the later ones, remove {PUBLISHED}; else remove them."
        raise CheckpointError(f"holds {text}. {advice}", path=folder)
    return published, list_place(published)


def strip_writer(name: str) -> str:
    """Remove the suffix ``-WRITER.WRITERS`` of DeepSpeed's fast writer from a name."""
    match = _match_copy(name)
    return match[1] if match else name


def _match_copy(name: str) -> re.Match[str] | None:
    return _COPY.fullmatch(name) if name[-1:].isdigit() else None  # most names end without a digit


def choose_copies(folder: str, names: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Choose the file to read among equal files of DeepSpeed's fast writer.

    Below stage 3 each writer writes the whole file as ``<name>-<writer>.<writers>``
    (``model_checkpointing/writer_factory.py``). Model states are equal; rank 0 is the first of the most writers.

    Returns:
        name without suffix → file to read; other file → file that is read instead.
    """
    groups: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
    for name in names:
        match = _match_copy(name)
        role, writer, writers = match.groups() if match else (name, 0, 0)
        groups[role].append((-int(writers), int(writer), name))
    for role, group in groups.items():
        group.sort()
        if len(group) > 1 and (_OPTIM.fullmatch(role) or group[-1][2] == role):
            two = f"{group[0][2]} and {group[-1][2]}"
            raise CheckpointError(
                f"holds the files of two saves ({two}). Remove the older save's files; DeepSpeed's fast writer leaves "
                "them if a tag is saved again with another number of writers.",
                path=folder,
            )
    chosen = {role: group[0][2] for role, group in groups.items()}
    return chosen, {name: group[0][2] for group in groups.values() for _, _, name in group[1:]}


class SwapName(NamedTuple):
    """Fields of the name of a swap file.

    Attributes:
        rank: global rank that wrote it.
        state: optimizer state; empty for a master.
        begin, end: DeepSpeed's numbers of the first and last parameters of its sub-group.
    """

    rank: int
    state: str
    begin: int
    end: int


def read_swap_name(name: str) -> SwapName | None:
    """Parse the relative path of a swap file; None for other files.

    Names: engine.py ``save_checkpoint``, swap_tensor/optimizer_utils.py ``SwapTensorContext``.
    """
    match = _SWAP.fullmatch(name)
    return _parse_swap(match) if match else None


def _parse_swap(match: re.Match[str]) -> SwapName:
    return SwapName(int(match[1]), match[2] or "", int(match[3]), int(match[4]))


Key = tuple[Any, ...]
"""The numbers in a file's name."""


class Role(NamedTuple):
    """A kind of file: pattern of its names, key of a match, DeepSpeed's name of a key."""

    pattern: re.Pattern[str]
    make_key: Callable[[re.Match[str]], Key]
    make_name: Callable[..., str]


ROLES = {
    "model": Role(_MODEL, lambda match: (int(match[1]), 0), lambda mp, _: f"mp_rank_{mp:02d}_model_states.pt"),
    "model_zero3": Role(
        _MODEL_ZERO3,
        lambda match: (int(match[2]), int(match[1])),
        lambda mp, rank: f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt",
    ),
    "optim": Role(
        _OPTIM,
        lambda match: (match[1] or "", int(match[3]), int(match[2])),
        lambda prefix, mp, rank: f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt",
    ),
    "layer": Role(
        _LAYER,
        lambda match: (int(match[1]), int(match[2] or NO_AXIS)),
        lambda layer, tp: f"layer_{layer:02d}-model_{tp:02d}-model_states.pt",
    ),
    "swap": Role(
        _SWAP,
        _parse_swap,
        lambda rank, state, begin, end: f"{OFFLOADED}/rank{rank:02d}/{state and f'{state}-'}{begin}_{end}.tensor.swp",
    ),
}
"""Roles of files, and their keys:

* model: model states, by model-parallel rank (``pp_rank * tp + tp_rank``) and 0
* model_zero3: model states of ZeRO 3, by model-parallel and data-parallel rank
* optim: optimizer states, by prefix, model-parallel and data-parallel rank
* layer: layers of a pipeline, by layer, and by tensor-parallel rank or ``NO_AXIS``
* swap: swapped optimizer states, by :class:`SwapName`
"""


def sort_names(folder: str, names: Collection[str]) -> tuple[dict[str, dict[Key, str]], dict[str, str]]:
    """Sort the files of a save by role; raise if there are no model states.

    Returns:
        role → key → file, and each file that is not read → the file with the same content that is read.
    """
    chosen, copies = choose_copies(folder, names)
    for bare in sorted(chosen):
        if _PIPELINE.fullmatch(bare) and not _LAYER.fullmatch(bare):
            raise UnsupportedError(
                f"{bare} belongs to a pipeline with axes of its own, which this release does not convert. DeepSpeed's "
                'own load takes it in the topology that wrote it, with "checkpoint": {"universal": false}.',
                path=folder,
            )
    sorted_names = sort_roles(ROLES, chosen)
    if not sorted_names["model"] and not sorted_names["model_zero3"]:
        names = sorted(names)
        if any(map(_LEGACY.fullmatch, names)):
            raise UnsupportedError(
                "is of Megatron-LM's format `torch`, a folder for each rank, which is not read. Convert it "
                "with Megatron-Bridge to Hugging Face's format, and load that.",
                path=folder,
            )
        raise CheckpointError(
            "no model states found (mp_rank_00_model_states.pt or zero_pp_rank_*_model_states.pt), only "
            f"{shorten(names) or 'nothing'}. It is not a DeepSpeed checkpoint, or the save was interrupted.",
            path=folder,
        )
    return sorted_names, copies


def sort_roles(roles: Mapping[str, Role], chosen: Mapping[str, str]) -> dict[str, dict[Key, str]]:
    """Return role → key → file; of several swap files with one key only the first.

    Args:
        chosen: name without suffix → file to read.
    """
    sorted_names: dict[str, dict[Key, str]] = {role: {} for role in roles}
    for bare, name in sorted(chosen.items()):
        for role, (pattern, make_key, _) in roles.items():
            if (match := pattern.fullmatch(bare)) and not (role == "swap" and make_key(match) in sorted_names[role]):
                sorted_names[role][make_key(match)] = name
    return sorted_names


def holds_atoms(entries: Mapping[str, Entry]) -> bool:
    """Return True for an atomic checkpoint, by this package or ``ds_to_universal``.

    A normal checkpoint that was converted into its own folder counts as a normal one.
    """
    zero = entries.get(ZERO)
    return MANIFEST in entries or (
        zero is not None and zero.is_folder and not any(_OPTIM.fullmatch(strip_writer(name)) for name in entries)
    )


def find_foreign_format(entries: Mapping[str, Entry]) -> str | None:
    """Return the format of a foreign checkpoint; None for all other folders."""
    if PUBLISHED in entries or any(map(is_state_file, entries)) or holds_atoms(entries):
        return None
    return find_format(entries)


def read_model_rank(name: str) -> int | None:
    """Parse the model-parallel rank of model states below ZeRO 3; else None."""
    match = _MODEL.fullmatch(name)
    return int(match[1]) if match else None


def read_shard_ranks(name: str) -> tuple[int, int] | None:
    """Parse the (model, data) ranks of optimizer or ZeRO-3 model states; else None."""
    if match := _OPTIM.fullmatch(strip_writer(name)):
        return int(match[3]), int(match[2])
    match = _MODEL_ZERO3.fullmatch(strip_writer(name))
    return (int(match[2]), int(match[1])) if match else None


def holds_counters(name: str) -> bool:
    """Return True for model states with the counters of the run."""
    return any(pattern.fullmatch(strip_writer(name)) for pattern in (_MODEL, _MODEL_ZERO3))


def holds_optimizer(name: str) -> bool:
    """Return True for optimizer states and swap files, by their path in a tag."""
    return strip_writer(name).endswith("optim_states.pt") or name.startswith(f"{OFFLOADED}/")


def is_state_file(name: str) -> bool:
    """Return True for the name of a state file."""
    return _STATES.fullmatch(name) is not None


def has_states(folder: str) -> bool:
    """Return True if a tag's folder holds state files or ``ucp_published.json``."""
    return any(is_state_file(name) or name == PUBLISHED for name in scan_if_there(folder))
