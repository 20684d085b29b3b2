"""Find the checkpoint in a folder: its tags, ``latest``, and older tags.

All functions raise CheckpointError if a folder cannot be listed, a file cannot be read, or there is no such checkpoint.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from typing import NamedTuple

from ..errors import CheckpointError, OutOfReachError, UcpError, shorten, suggest
from ..io.interface import explain_failure
from ..io.paths import UPLOAD, find_tag_folder, normalize
from ..io.staging import LATEST as UNIVERSAL
from ..io.store import exists, find_change_time, is_folder, read_small
from .deepspeed.files import (
    PUBLISHED,
    SEAL,
    find_foreign_format,
    has_states,
    holds_atoms,
    holds_counters,
    is_state_file,
    list_entries,
    list_published,
    resolve_published,
    scan_folder,
    scan_if_there,
)
from .deepspeed.reading import read_file
from .findings import COPY, NOTE, WARNING, Finding

LATEST = "latest"
"""Names the newest tag; ``latest_universal`` names the newest atomic checkpoint."""

_TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file with the number of the newest iteration, or ``release``."""

_BUCKET = re.compile(r"(s3a?|gs|gcs|az|abfss?)://[^/]+")

_KILLED = re.compile(rf"\..+({re.escape(UPLOAD)}.+|\.ucp-partial)")
"""Names of the hidden folders that a killed save or conversion leaves."""

LOST = "lost+found"
"""Folder in the root of a file system that only root may list."""

_SIBLINGS = 32  # maximum number of folders that are searched after a mistyped path
_LONGEST = 4096  # maximum bytes of a path


def read_tag(path: str) -> str:
    """Read a ``latest`` file's tag, a relative path; FileNotFoundError without it."""
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
            f"names {tag!r}, which is outside of the folder. Write the name of a subfolder into the file, or name the "
            "checkpoint's own folder.",
            path=path,
        )
    return tag


def read_latest(load_dir: str, *, universal: bool = False, foreign: bool = False) -> str | None:
    """Return the tag that ``latest`` or a similar file names; None without tags.

    Args:
        load_dir: folder of all tags, or of one tag (:func:`find_folder`).
        universal: read ``latest_universal`` first.
        foreign: accept a checkpoint of another format, and read Megatron's tracker.

    Raises:
        CheckpointError: there are checkpoints without such a file, or later ones than it names; or it names no tag.
    """
    for name in (UNIVERSAL, LATEST) if universal else (LATEST, UNIVERSAL):
        try:
            tag = read_tag(os.path.join(load_dir, name))
        except FileNotFoundError:
            continue
        if name == UNIVERSAL and not universal:
            _refuse_later(load_dir, tag)
        return tag
    if is_checkpoint(load_dir):
        return os.path.basename(normalize(load_dir))
    tags = find_tags(load_dir)
    if foreign and not tags and holds_foreign(load_dir):
        return os.path.basename(normalize(load_dir))
    if foreign and not tags and (tracked := _read_megatron_tracker(load_dir)) is not None:
        return tracked
    if not tags:
        _check_bucket(load_dir)
        return None
    raise CheckpointError(
        f"{os.path.join(load_dir, LATEST)} is missing, but {load_dir} holds checkpoints: {shorten(tags)}. Resuming "
        "from scratch would lose them: name one (tag=… of load_checkpoint, or its folder), or write it into that file."
    )


def _refuse_later(load_dir: str, converted: str) -> None:
    """Raise if tags are later than the atomic checkpoint taken without ``latest``."""
    step = find_age([os.path.join(load_dir, converted)]).step
    ages = _find_ages([load_dir]) if step >= 0 else {}
    if later := [tag for tag, age in ages.items() if age.step > step]:
        raise CheckpointError(
            f"{os.path.join(load_dir, LATEST)} is missing, and {UNIVERSAL} names {converted} of step {step}, but there "
            f"are later checkpoints: {shorten(later)}. Name one (tag=… of load_checkpoint, or its folder), or write it "
            "into that file."
        )


def _read_megatron_tracker(folder: str) -> str | None:
    """Return the folder of Megatron's newest iteration; None without its tracker."""
    path = os.path.join(folder, _TRACKER)
    try:
        iteration = read_tag(path)
    except FileNotFoundError:
        return None
    if iteration == "release":
        return iteration
    if not re.fullmatch(r"\d{1,18}", iteration, re.ASCII):
        text = f"holds {iteration!r:.80}, which is no iteration. Name a checkpoint's own folder."
        raise CheckpointError(text, path=path)
    return f"iter_{int(iteration):07d}"


def is_checkpoint(folder: str) -> bool:
    """Return True for the folder of a tag or of an atomic checkpoint."""
    entries = scan_if_there(folder)
    return PUBLISHED in entries or any(map(is_state_file, entries)) or holds_atoms(entries)


def holds_foreign(folder: str) -> bool:
    """Return True for a foreign checkpoint that holds no tags."""
    is_one = leads_to_folder(folder) and find_foreign_format(list_entries(folder)) is not None
    return is_one and not find_tags(folder)  # a trainer's folder has weights and the engine's tag


def find_folder(load_dir: str, tag: str) -> str:
    """Return a tag's folder: a subfolder, or ``load_dir`` if that is the tag's folder."""
    below = os.path.join(load_dir, tag)
    is_own = os.path.basename(normalize(load_dir)) == tag and not leads_to_folder(below)
    is_own = is_own and (is_checkpoint(load_dir) or holds_foreign(load_dir))
    return load_dir if is_own else below


_UNUSABLE = (
    (r"checkpoint-\d+", "a trainer's output folder: name one of its checkpoints, {0}"),
    (r".*\.ckpt", "a folder of Lightning's: name one of its checkpoints, {0}"),
    (r"adapter_config\.json", "a PEFT adapter without its weights (adapter_model.safetensors)"),
    (r"zero_to_fp32\.py", "leftovers of removed checkpoints"),
)
"""Pattern of file names → description of a folder without a checkpoint; {0} is the list of these names."""


def describe_content(folder: str) -> str:
    """Describe a folder without a checkpoint, and the remedy; "" if missing or empty."""
    if not leads_to_folder(folder):
        return "is a file or a broken link: name the folder that holds the tags" if exists(folder) else ""
    entries = {name: entry for name, entry in scan_folder(folder).items() if name != LOST}
    for pattern, text in _UNUSABLE:
        matches = sorted(name for name in entries if re.fullmatch(pattern, name))
        if matches:
            matches.sort(key=lambda name: (len(name), name))
            return f"looks like {text.format(shorten(matches))}"
    folders = sorted(name for name, entry in entries.items() if entry.is_folder)
    paths = {name: os.path.join(folder, name) for name in folders}
    further = [name for name, path in paths.items() if exists(os.path.join(path, LATEST)) or holds_foreign(path)]
    if further:
        return f"holds folders of checkpoints: name one of them, {shorten(further)}"
    seen = sorted(name for name in entries if not name.startswith("."))
    return f"holds {shorten(seen)}, none of them a checkpoint" if seen else ""


def find_siblings(folder: str) -> list[str]:
    """Return sibling folders with DeepSpeed's checkpoints, most similar names first.

    Only the ``_SIBLINGS`` most similar names are searched. Folders that cannot be listed are skipped.
    """
    parent, base = os.path.split(normalize(folder))
    names = [name for name in _list_folders(parent) if name != base]
    names.sort(key=lambda name: (-SequenceMatcher(None, name, base).ratio(), name))
    siblings = []
    for name in names[:_SIBLINGS]:
        path = os.path.join(parent, name)
        with suppress(CheckpointError, OSError):
            siblings += [name] if exists(os.path.join(path, LATEST)) or has_states(path) else []
    return siblings


def _check_bucket(load_dir: str) -> None:
    """Raise if the bucket is missing: a typo must not silently restart training.

    A missing folder in the bucket is fine: the first save creates it.
    """
    if (match := _BUCKET.match(load_dir)) is None:
        return
    with suppress(OSError):  # permission for a folder of a bucket does not imply permission for the bucket
        if not exists(match[0]):
            raise CheckpointError(f"there is no bucket {match[0]}; check its name and the endpoint.", path=load_dir)


def find_tags(load_dir: str) -> list[str]:
    """Return the complete subfolders with states, sorted; empty without ``load_dir``.

    Raises:
        CheckpointError: a subfolder cannot be listed; it may hold a checkpoint.
    """
    folders = [name for name in _list_folders(load_dir) if not _is_unfinished(load_dir, name)]
    return sorted(name for name in folders if has_states(os.path.join(load_dir, name)))


def list_unfinished(load_dir: str) -> list[str]:
    """Return the incomplete folders of killed saves and conversions, sorted."""
    return sorted(name for name in _list_folders(load_dir) if _is_unfinished(load_dir, name))


def _is_unfinished(load_dir: str, name: str) -> bool:
    return bool(_KILLED.fullmatch(name)) and not _exists(os.path.join(load_dir, name, SEAL))


def _list_folders(folder: str) -> list[str]:
    return [name for name, entry in scan_if_there(folder).items() if entry.is_folder and name != LOST]


def check_tag(load_dir: str, tag: str) -> str:
    """Return a tag's folder; if it is missing, the error lists the existing tags."""
    folder = find_folder(load_dir, str(tag))
    if not leads_to_folder(folder):
        if not leads_to_folder(load_dir):
            fact = "is a file" if exists(load_dir) else "does not exist"
            raise CheckpointError(f"no checkpoint with tag {tag!r}: {load_dir} {fact}. Check the path.", path=folder)
        tags, advice = find_tags(load_dir), COPY
        if not tags:
            tags = [name for name in sorted(_list_folders(load_dir)) if holds_foreign(os.path.join(load_dir, name))]
        known = "the folder holds no checkpoint"
        if tags:
            near = suggest(tag, tags)
            known = f"the folder holds {shorten(tags)}{f' ({near})' if near else ''}"
            advice = 'Name one of them, or a place that has this tag ("also", --also).'
        names = scan_if_there(load_dir).keys()  # weights in a folder with `latest` are not the tag
        is_bare = names and not (tags or {LATEST, UNIVERSAL} & names)
        if is_bare and (kind := find_foreign_format(list_entries(load_dir))):
            known, advice = f"the folder is itself a checkpoint, {kind}", "Load it without a tag."
        raise CheckpointError(f"no checkpoint with tag {tag!r} in {load_dir}; {known}. {advice}", path=folder)
    return folder


def find_checkpoint(path: str) -> str:
    """Find the folder of the checkpoint at ``path``, as a load does.

    ``latest`` is followed, else ``latest_universal``; a folder with state files is the checkpoint itself.
    """
    folder = path.rstrip("/") or path
    if not leads_to_folder(folder):
        _check_bucket(folder)
        fact = "is a file; name the checkpoint's folder, which holds it" if exists(folder) else "does not exist"
        raise CheckpointError(f"{folder} {fact}.")
    if not {LATEST, UNIVERSAL} & scan_folder(folder).keys() and (is_checkpoint(folder) or holds_foreign(folder)):
        return folder
    tag = read_latest(folder, foreign=True)
    if tag is None:
        content = describe_content(folder) or "is empty"
        raise CheckpointError(f"neither a checkpoint's folder nor one with `latest`: it {content}.", path=folder)
    return check_tag(folder, tag)


def leads_to_folder(path: str) -> bool:
    """Return True for a folder, also at the end of links or in an object store."""
    try:
        return is_folder(path)
    except OSError as error:
        raise explain_failure(path, "looked at", error) from error


def check_latest(folder: str, *, atomic: bool) -> list[Finding]:
    """Return a finding if the parent's ``latest`` does not name this checkpoint."""
    parent, tag = os.path.split(normalize(find_tag_folder(folder)))
    name = UNIVERSAL if atomic else LATEST
    try:
        named = read_tag(os.path.join(parent, name))
        is_there = leads_to_folder(os.path.join(parent, named))
    except FileNotFoundError:
        text = f"no `{name}` in its parent folder: load_checkpoint needs tag={tag!r}, or this folder"
        return [Finding("latest", name, text, NOTE)]
    except CheckpointError as error:
        return [Finding("latest", name, str(error), WARNING)]
    if not is_there:
        text = f"{parent}/{name}: names {named!r}, which does not exist; a load without a tag fails."
        return [Finding("latest", name, text, WARNING)]
    return [] if named == tag else [Finding("latest", name, f"`{name}` names {named!r}, not this one", NOTE)]


# -- order of tags: by step, then seal, then time ----------------------------------------------------------------------

_TRIED = 4  # maximum number of files per place that are read for the step, in case of damaged files


class Age(NamedTuple):
    """Sort key of a job's tags: later tags are greater.

    Attributes:
        step: from the model states; -1 if unknown.
        time: time of the earliest state file; later ones may be copies. 0 if unknown.
    """

    step: int = -1
    sealed: bool = False
    time: float = 0.0

    def may_precede(self, other: Age) -> bool:
        """Return True if the tag may be older; times count only if a step is unknown."""
        if -1 in (self.step, other.step):
            return self.time <= other.time or not other.time
        return self.step <= other.step


def find_newest(load_dir: str) -> str | None:
    """Return the tag that was saved last; None without tags."""
    ages = _find_ages([load_dir])
    return max(ages, key=ages.__getitem__, default=None)


def list_older(places: Sequence[str], tag: str) -> list[str]:
    """Return a tag and all older tags, newest first.

    ``places``: folders of all tags. The earliest time of a tag's copies counts.
    """
    parent = os.path.dirname(tag)
    ages = _find_ages(places, parent)
    newest = ages.pop(os.path.basename(tag), Age())
    older = [name for name, age in ages.items() if age.may_precede(newest)]
    return [tag, *(os.path.join(parent, name) for name in sorted(older, key=ages.__getitem__, reverse=True))]


def _find_ages(places: Sequence[str], parent: str = "") -> dict[str, Age]:
    """Return the ages of all tags below ``parent``, a path relative to each place."""
    folders = defaultdict[str, list[str]](list)
    for place in places:
        for name in find_tags(os.path.join(place, parent)):
            folders[name].append(os.path.join(place, parent, name))
    return {name: try_find_age(copies) for name, copies in folders.items()}


def try_find_age(folders: Sequence[str]) -> Age:
    """Return a tag's age, or an unknown one if ``ucp_published.json`` has a fault."""
    try:
        return find_age(folders)
    except OutOfReachError:
        raise
    except CheckpointError:
        return Age()


def find_age(folders: Sequence[str]) -> Age:
    """Return the age of a tag with copies in some folders."""
    listed = [*map(list_published, folders)]
    times = (entry.changed for _, entries in listed for name, entry in entries.items() if is_state_file(name))
    step = next((step for folder, entries in listed for step in _read_steps(folder, entries)), -1)
    return Age(step, any(SEAL in entries for _, entries in listed), min(filter(None, times), default=0.0))


def _read_steps(folder: str, names: Iterable[str]) -> Iterable[int]:
    for name in sorted(filter(holds_counters, names))[:_TRIED]:
        with suppress(UcpError):  # reported when the tag is loaded
            step = read_file(folder, name).require_model().counters.get("global_steps")
            if isinstance(step, int):
                yield step


def list_unsealed(places: Sequence[str], tags: Sequence[str]) -> set[str]:
    """Return the tags without a seal in any place; empty if no tag has one."""
    sealed = {tag for tag in tags if is_sealed(places, tag)}
    return set(tags) - sealed if sealed else set()


def is_sealed(places: Sequence[str], tag: str) -> bool:
    """Return True if a tag has a seal in some place; places are read in order."""
    return any(_has_seal(os.path.join(place, tag)) for place in places)


def _has_seal(folder: str) -> bool:
    if _exists(os.path.join(folder, SEAL)):
        return True
    try:
        published = resolve_published(folder)
    except OutOfReachError:
        raise
    except CheckpointError:  # reported when the tag is loaded
        return False
    return published != folder and _exists(os.path.join(published, SEAL))


def _exists(path: str) -> bool:
    try:
        find_change_time(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise explain_failure(path, "looked at", error) from error
    return True
