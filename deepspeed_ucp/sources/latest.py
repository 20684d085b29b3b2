"""Which checkpoint a folder means: the tags in it, and ``latest``, which names one of them."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from difflib import SequenceMatcher

from ..errors import CheckpointError, shorten, suggest
from ..io.opened import explain_failure
from ..io.paths import find_tag_folder, normalize
from ..io.staging import LATEST as UNIVERSAL
from ..io.store import exists, is_folder, read_small
from .files import (
    PUBLISHED,
    find_foreign,
    has_states,
    holds_atoms,
    is_state_file,
    list_entries,
    scan_folder,
    scan_if_there,
)
from .findings import COPY, NOTE, WARNING, Finding

LATEST = "latest"
"""Names the newest tag; ``latest_universal`` names the newest atomic checkpoint."""

_TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's: the number of the newest iteration, or ``release``; Megatron-DeepSpeed writes it beside ``latest``."""

_BUCKET = re.compile(r"(s3a?|gs|gcs|az|abfss?)://[^/]+")

LOST = "lost+found"
"""Folder in the root of a file system, which root alone may list."""

_SIBLINGS = 32
"""Folders that are searched for the checkpoint that a mistyped path may mean."""

_LONGEST = 4096
"""Bytes of the longest path that the system takes."""


def read_tag(path: str) -> str:
    """The tag that a ``latest`` file names: a folder beside it, or one further down.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it cannot be read, is no regular file, is empty, or leads out of its folder.
    """
    try:
        data = read_small(path, _LONGEST + 1)
        tag = data.decode("utf-8").strip()
    except FileNotFoundError:
        if os.path.islink(path):
            raise CheckpointError("cannot be read (it is a link to nothing).", path=path) from None
        raise
    except NotADirectoryError:
        folder, file = os.path.split(os.path.dirname(path))
        raise CheckpointError("is a file. Name the folder that it lies in.", path=os.path.join(folder, file)) from None
    except OSError as error:
        raise explain_failure(path, "read", error) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"cannot be read ({error}).", path=path) from error
    if not tag:
        known = shorten(find_tags(os.path.dirname(path) or "."))
        raise CheckpointError(f"{path} is empty; write the wanted tag into it ({known}).")
    if len(data) > _LONGEST or not tag.isprintable():
        raise CheckpointError(f"holds {tag[:80]!r}…, which is no tag; write the wanted tag into it.", path=path)
    if os.path.isabs(tag) or ".." in tag.split("/"):
        raise CheckpointError(
            f"names {tag!r}, which lies outside of the folder. A tag is a folder beside that file: write one "
            "into it, or name the checkpoint's own folder.",
            path=path,
        )
    return tag


def read_latest(load_dir: str, *, universal: bool = False, foreign: bool = False) -> str | None:
    """The tag in ``latest``, ``latest_universal`` or Megatron's file of that kind; None where nothing is to be resumed.

    Args:
        load_dir: the folder of all tags, or that of one tag, which has its name (:func:`find_folder`).
        universal: the other way round.
        foreign: the folder may be a checkpoint of another format.

    Raises:
        CheckpointError: there is neither although checkpoints lie there, or the file does not name a tag.
    """
    for name in (UNIVERSAL, LATEST) if universal else (LATEST, UNIVERSAL):
        try:
            return read_tag(os.path.join(load_dir, name))
        except FileNotFoundError:
            continue
    if is_checkpoint(load_dir):
        return os.path.basename(normalize(load_dir))
    tags = find_tags(load_dir)
    if foreign and not tags and holds_foreign(load_dir):
        return os.path.basename(normalize(load_dir))
    if foreign and not tags and (tracked := _read_tracked(load_dir)) is not None:
        return tracked
    if not tags:
        _check_bucket(load_dir)
        return None
    raise CheckpointError(
        f"{os.path.join(load_dir, LATEST)} is missing, but {load_dir} holds checkpoints: {shorten(tags)}. Resuming "
        "from scratch would lose them: name one (tag=… of load_checkpoint, or its folder), or write it into that file."
    )


def _read_tracked(folder: str) -> str | None:
    """The folder of the iteration that Megatron names as the newest; None where it names none.

    Raises:
        CheckpointError: what it names is no iteration.
    """
    path = os.path.join(folder, _TRACKER)
    try:
        told = read_tag(path)
    except FileNotFoundError:
        return None
    if told == "release":
        return told
    if not re.fullmatch(r"\d{1,18}", told, re.ASCII):
        raise CheckpointError(f"holds {told!r:.80}, which is no iteration. Name a checkpoint's own folder.", path=path)
    return f"iter_{int(told):07d}"


def is_checkpoint(folder: str) -> bool:
    """Whether a folder is one tag's, or an atomic checkpoint's.

    Raises:
        CheckpointError: it cannot be listed.
    """
    entries = scan_if_there(folder)
    return PUBLISHED in entries or any(map(is_state_file, entries)) or holds_atoms(entries)


def holds_foreign(folder: str) -> bool:
    """Whether a folder is a checkpoint of another format than DeepSpeed's, and no folder of tags.

    A trainer's folder has the weights beside the engine's tag.

    Raises:
        CheckpointError: it cannot be listed.
    """
    is_one = leads_to_folder(folder) and find_foreign(list_entries(folder)) is not None
    return is_one and not find_tags(folder)


def find_foreign_folders(folder: str) -> list[str]:
    """Subfolders that are checkpoints of another format than DeepSpeed's, sorted.

    Raises:
        CheckpointError: the folder, or one in it, cannot be listed.
    """
    names = sorted(name for name, entry in scan_if_there(folder).items() if entry.is_folder and name != LOST)
    return [name for name in names if holds_foreign(os.path.join(folder, name))]


def find_folder(load_dir: str, tag: str) -> str:
    """Where a folder has a tag: below it, or in itself, where it is that tag's own."""
    below = os.path.join(load_dir, tag)
    is_own = os.path.basename(normalize(load_dir)) == tag and not leads_to_folder(below)
    is_own = is_own and (is_checkpoint(load_dir) or holds_foreign(load_dir))
    return load_dir if is_own else below


_ODD = (
    (r"checkpoint-\d+", "a trainer's output folder: name one of its checkpoints, {0}"),
    (r".*\.ckpt", "a folder of Lightning's: name one of its checkpoints, {0}"),
    (r"adapter_config\.json", "a PEFT adapter without its weights (adapter_model.safetensors)"),
    (r"zero_to_fp32\.py", "what removed checkpoints have left"),
)
"""What tells by a name what a folder is that holds no checkpoint; {0} is what has such a name."""


def describe_content(folder: str) -> str:
    """What a folder looks like that holds no checkpoint, and what to do; empty where it is missing or empty.

    Raises:
        CheckpointError: it cannot be listed.
    """
    if not leads_to_folder(folder):
        return "is a file, or a link to nothing, where the folder of all tags is wanted" if exists(folder) else ""
    entries = {name: entry for name, entry in scan_folder(folder).items() if name != LOST}
    for pattern, text in _ODD:
        found = sorted(name for name in entries if re.fullmatch(pattern, name))
        if found:
            found.sort(key=lambda name: (len(name), name))
            return f"looks like {text.format(shorten(found))}"
    folders = sorted(name for name, entry in entries.items() if entry.is_folder)
    paths = {name: os.path.join(folder, name) for name in folders}
    further = [name for name, path in paths.items() if exists(os.path.join(path, LATEST)) or holds_foreign(path)]
    if further:
        return f"holds folders of checkpoints: name one of them, {shorten(further)}"
    seen = sorted(name for name in entries if not name.startswith("."))
    return f"holds {shorten(seen)}, none of them a checkpoint" if seen else ""


def find_siblings(folder: str) -> list[str]:
    """Other folders of its parent that hold checkpoints of DeepSpeed's; the most similar names first.

    Only the ``_SIBLINGS`` most similar names are looked at. Folders that cannot be listed are skipped.

    Raises:
        CheckpointError: the parent cannot be listed.
    """
    parent, own = os.path.split(normalize(folder))
    names = [name for name, entry in scan_if_there(parent).items() if entry.is_folder and name not in (LOST, own)]
    names.sort(key=lambda name: (-SequenceMatcher(None, name, own).ratio(), name))
    found = []
    for name in names[:_SIBLINGS]:
        path = os.path.join(parent, name)
        with suppress(CheckpointError, OSError):
            found += [name] if exists(os.path.join(path, LATEST)) or has_states(path) else []
    return found


def _check_bucket(load_dir: str) -> None:
    """Who mistypes a bucket's name is not to begin from scratch; a folder of it may well be made by the first save.

    Raises:
        CheckpointError: there is no such bucket.
    """
    if (match := _BUCKET.match(load_dir)) is None:
        return
    with suppress(OSError):  # who may read one folder of a bucket need not be let look at the bucket
        if not exists(match[0]):
            raise CheckpointError(f"there is no bucket {match[0]}; check its name and the endpoint.", path=load_dir)


def find_tags(load_dir: str) -> list[str]:
    """Subfolders of ``load_dir`` that hold model or optimizer states, sorted; none where there is no such folder.

    Raises:
        CheckpointError: one of them cannot be listed: what it holds is not to be taken for nothing.
    """
    folders = [name for name, entry in scan_if_there(load_dir).items() if entry.is_folder and name != LOST]
    return sorted(name for name in folders if has_states(os.path.join(load_dir, name)))


def check_tag(load_dir: str, tag: str) -> str:
    """The folder of a tag.

    Raises:
        CheckpointError: there is none; the tags that exist are named.
    """
    folder = find_folder(load_dir, str(tag))
    if not leads_to_folder(folder):
        if not leads_to_folder(load_dir):
            fact = "is a file" if exists(load_dir) else "does not exist"
            raise CheckpointError(f"no checkpoint with tag {tag!r}: {load_dir} {fact}. Check the path.", path=folder)
        tags, advice = find_tags(load_dir) or find_foreign_folders(load_dir), COPY
        known = "the folder holds no checkpoint"
        if tags:
            near = suggest(tag, tags)
            known = f"the folder holds {shorten(tags)}{f' ({near})' if near else ''}"
            advice = 'Name one of them, or a place that has this tag ("also", --also).'
        held = scan_if_there(load_dir).keys()  # weights beside a `latest` are not what that names
        if held and not (tags or {LATEST, UNIVERSAL} & held) and (kind := find_foreign(list_entries(load_dir))):
            known, advice = f"the folder is itself a checkpoint, {kind}", "Load it without a tag."
        raise CheckpointError(f"no checkpoint with tag {tag!r} in {load_dir}; {known}. {advice}", path=folder)
    return folder


def find_checkpoint(path: str) -> str:
    """The folder of the checkpoint that ``path`` means.

    ``latest`` in it is followed, or ``latest_universal`` where there is no ``latest``; else a folder with state files
    (one tag, or an atomic checkpoint) is itself. So a load sees it, too.

    Raises:
        CheckpointError: there is nothing of that kind; what lies there is named.
    """
    folder = path.rstrip("/") or path
    if not leads_to_folder(folder):
        _check_bucket(folder)
        what = "is a file; name the checkpoint's folder, which holds it" if exists(folder) else "does not exist"
        raise CheckpointError(f"{folder} {what}.")
    if not {LATEST, UNIVERSAL} & scan_folder(folder).keys() and (is_checkpoint(folder) or holds_foreign(folder)):
        return folder
    tag = read_latest(folder, foreign=True)
    if tag is None:
        told = describe_content(folder) or "is empty"
        raise CheckpointError(f"neither a checkpoint's folder nor one with `latest`: it {told}.", path=folder)
    return check_tag(folder, tag)


def leads_to_folder(path: str) -> bool:
    """Whether a path leads to a folder.

    Raises:
        CheckpointError: that cannot be told.
    """
    try:
        return is_folder(path)
    except OSError as error:
        raise explain_failure(path, "looked at", error) from error


def check_latest(folder: str, *, atomic: bool) -> list[Finding]:
    """Return a finding if ``latest`` in the parent folder does not name this checkpoint."""
    parent, tag = os.path.split(normalize(find_tag_folder(folder)))
    name = UNIVERSAL if atomic else LATEST
    try:
        named = read_tag(os.path.join(parent, name))
        is_there = leads_to_folder(os.path.join(parent, named))
    except FileNotFoundError:
        return [
            Finding("latest", name, f"no `{name}` beside it: load_checkpoint needs tag={tag!r}, or this folder", NOTE)
        ]
    except CheckpointError as error:
        return [Finding("latest", name, str(error), WARNING)]
    if not is_there:
        text = f"{parent}/{name}: leads to {named!r}, which is not there; a load without a tag fails."
        return [Finding("latest", name, text, WARNING)]
    return [] if named == tag else [Finding("latest", name, f"`{name}` names {named!r}, not this one", NOTE)]
