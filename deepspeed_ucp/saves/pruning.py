"""Which tags of a folder are spare, by wholeness and step, and taking them away."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointError, count_of
from ..examine.tags import TRAINER_STATE, TagReport, find_saves, is_trainers, leaves_weights, look_at_tag
from ..io.jsonfile import read_json
from ..io.paths import Entry, is_url
from ..io.staging import LATEST as UNIVERSAL
from ..io.store import list_tree, remove
from ..sources.files import BASE, FROZEN, SEAL, holds_optimizer, resolve_published, scan_folder
from ..sources.latest import LATEST, read_tag
from ..sources.seal import read_seal
from .removing import choose_spare, is_saved, remove_tag, remove_tree

KEEP, STRIP, REMOVE = "keep", "strip", "remove"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a tag, or of a folder of frozen tensors.

    Attributes:
        name: of its folder in the place: of the tag, of a trainer's folder around it, or of frozen tensors.
        action: ``keep``, ``strip`` (of its optimizer's files) or ``remove``.
        why: in words.
        nbytes: of the files that go.
        is_fault: it stays for what somebody should look at.
        tag: None of frozen tensors.
    """

    name: str
    action: str
    why: str
    nbytes: int = 0
    is_fault: bool = False
    tag: TagReport | None = None


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """What stays.

    Attributes:
        keep: so many of the newest whole tags.
        every: and those whose step is a multiple of it; 0: none.
        strip: of the others the weights.
    """

    keep: int
    every: int = 0
    strip: bool = False


def plan_pruning(folder: str, options: PruneOptions) -> list[Verdict]:
    """What becomes of every tag of a folder, the newest first, and of frozen tensors that no tag names then.

    Raises:
        CheckpointError: it is one tag's own folder or holds none; what names others cannot be read; or it holds other
            folders of tags alone, of which we do not know whether they may go.
        OSError: something cannot be listed.
    """
    found = [path for path in find_saves(folder, foreign=False) if not path.startswith(BASE)]
    if found == ["."]:
        raise CheckpointError("is one checkpoint's own folder; name the folder that holds all of them.", path=folder)
    saves = sorted((look_at_tag(folder, path) for path in found), key=lambda save: save.age, reverse=True)
    place = _Place(folder, saves, options)
    verdicts = [place.judge(save) for save in saves]
    return [*verdicts, *_judge_frozen(folder, verdicts, place.whole)]


def carry_out(folder: str, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Take away what is to go, the oldest first; what has changed meanwhile stays, and is told of.

    Raises:
        CheckpointError: `latest` cannot be followed any more.
        OSError: something cannot be removed.
    """
    done = {each.name: _carry_out(folder, each) for each in reversed(verdicts) if each.tag}
    done |= {each.name: _carry_out_frozen(folder, each) for each in verdicts if not each.tag}
    return [done[each.name] for each in verdicts]


def _carry_out(folder: str, each: Verdict) -> Verdict:
    tag = each.tag
    if tag is None or each.action == KEEP:
        return each
    if file := _find_name(_read_names(folder), tag):
        return replace(each, action=KEEP, why=f"`{file}` names it by now", nbytes=0)
    held: Mapping[str, Entry] = {}
    with suppress(FileNotFoundError):
        held = list_tree(tag.folder)
    if held != tag.files:
        return replace(each, action=KEEP, why="its files have changed meanwhile", nbytes=0)
    if each.action == STRIP:
        remove_tag(folder, tag.path, holds_optimizer)
        return each
    if tag.path != each.name:
        remove(os.path.join(folder, each.name, TRAINER_STATE))
    remove_tag(folder, tag.path)
    if tag.path != each.name:
        remove_tree(folder, each.name)
    return each


def _carry_out_frozen(folder: str, each: Verdict) -> Verdict:
    if each.action == REMOVE:
        if each.name in _list_frozen(folder, ()):  # by a save that has begun
            return replace(each, action=KEEP, why="a tag names it by now", nbytes=0)
        remove_tree(folder, each.name)
    return each


class _Place:
    """A folder of tags, or of a trainer's folders, which are kept or removed as units.

    Args:
        saves: all that lie there, the newest first.

    Attributes:
        whole: units that are whole, the newest first.

    Raises:
        CheckpointError: there are neither tags nor a trainer's folders; what names others cannot be read.
    """

    def __init__(self, folder: str, saves: Sequence[TagReport], options: PruneOptions) -> None:
        self.folder, self.saves, self.options = folder, saves, options
        self.by_trainer = not any(_is_own(save) for save in saves)
        self.units = {_name(save): save for save in saves if self._is_unit(save)}
        if not self.units:
            raise CheckpointError(_describe_foreign(saves[0]), path=os.path.join(folder, _name(saves[0])))
        self.whole = [
            save for save in self.units.values() if not (save.fault or save.is_doubtful or _describe_odd(save))
        ]
        self.stays = self._find_stays(_read_names(folder))

    def _is_unit(self, save: TagReport) -> bool:
        if not self.by_trainer:
            return _is_own(save)
        is_alone = sum(_name(each) == _name(save) for each in self.saves) == 1
        return is_alone and is_trainers(os.path.dirname(save.folder))

    def judge(self, save: TagReport) -> Verdict:
        """What becomes of one of its saves."""
        name = _name(save)
        if self.units.get(name) is not save:
            return Verdict(save.path, KEEP, _describe_foreign(save), tag=save)
        if name in self.stays:
            return Verdict(name, KEEP, self.stays[name], is_fault=save.is_doubtful, tag=save)
        why = f"older than the newest {count_of(self.options.keep, 'whole one')}"
        if save.fault:
            why = f"not whole, and {self._find_later(save)}, which is newer, is"
        return (_judge_weights(name, save, why) if self.options.strip else None) or Verdict(
            name, REMOVE, why, self._count_bytes(save), tag=save
        )

    def _count_bytes(self, save: TagReport) -> int:
        """Of what goes with a unit."""
        if self.by_trainer:
            return sum(entry.size for entry in list_tree(os.path.dirname(save.folder)).values())
        return sum(entry.size for name, entry in save.files.items() if is_saved(name))

    def _find_stays(self, named: Mapping[str, str]) -> dict[str, str]:
        """Why those stay that do."""
        stays = {name: why for name, save in self.units.items() if (why := self._find_reason(save, named))}
        order = [_name(save) for save in reversed(self.whole)]
        spare = choose_spare(order, self.options.keep, ())
        for name in order[len(spare) :]:
            stays.setdefault(name, f"one of the newest {self.options.keep} whole ones")
        for name in [name for name in order if self.units[name].age.sealed][-1:]:
            stays.setdefault(name, "the newest one with a seal")  # a load with "fallback" and "seal" takes no other
        for last in sorted(self.whole, key=lambda save: save.changed)[-1:]:  # of a run that went back: `latest` comes
            stays.setdefault(_name(last), "the one that was written last")
        waiting = list(stays)
        while waiting:
            by = waiting.pop()
            for name in self._list_references(self.units[by]):
                if name in self.units and name not in stays:
                    stays[name] = f"{by} names it"
                    waiting.append(name)
        return stays

    def _find_reason(self, save: TagReport, named: Mapping[str, str]) -> str:
        """Why one stays whatever the others are; empty where it need not."""
        every = self.options.every
        if file := _find_name(named, save):
            return f"`{file}` names it"
        if odd := _describe_odd(save):
            return odd
        if every and save.age.step >= 0 and save.age.step % every == 0:
            return f"one every {every} steps"
        if save.is_doubtful:
            return f"whether it is whole cannot be told: {save.describe_fault() or 'what wrote it is not covered'}"
        if save.fault and not self._find_later(save):
            return "not whole; it may still be growing, as none that is whole was written after it"
        return ""

    def _find_later(self, save: TagReport) -> str:
        """A whole one of a later step that was written after everything in ``save``; empty without any."""
        later = (each for each in self.whole if save.age.step < each.age.step and 0 < save.changed < each.age.time)
        return next(map(_name, later), "")

    def _list_references(self, save: TagReport) -> set[str]:
        """What in this folder a unit needs: by its seal, a link or its frozen tensors, or as a trainer's best one."""
        above, published = os.path.dirname(save.path), resolve_published(save.folder)
        paths = [os.path.join(save.path, name) for name in _read_sealed(published)]
        paths += [os.path.join(above, name) for name in _read_frozen(published)]
        paths += [os.path.basename(name) for name in (_read_best(os.path.join(self.folder, above)) if above else ())]
        if not is_url(self.folder):
            place = os.path.realpath(self.folder)
            real = (os.path.realpath(os.path.join(save.folder, name)) for name in save.files)
            paths += [os.path.relpath(path, place) for path in real]
        return {os.path.normpath(path).split("/")[0] for path in paths} - {_name(save)}


def _name(save: TagReport) -> str:
    """Of what is kept or removed with a tag: its own folder, or the one around it."""
    return save.path.split("/")[0]


def _is_own(save: TagReport) -> bool:
    return "/" not in save.path


def _read_names(folder: str) -> dict[str, str]:
    """By path in a folder which of `latest` and `latest_universal` names it."""
    found = dict[str, str]()
    for name in (UNIVERSAL, LATEST):
        with suppress(FileNotFoundError):
            found[os.path.normpath(read_tag(os.path.join(folder, name)))] = name
    return found


def _find_name(named: Mapping[str, str], save: TagReport) -> str:
    return named.get(save.path) or named.get(_name(save)) or ""


def _describe_odd(save: TagReport) -> str:
    """What something is that is no save to be counted; empty where it is one."""
    if _name(save).startswith("."):
        return "a save that grows aside, or what is left of one"
    if not is_url(save.folder) and (os.path.islink(save.folder) or os.path.islink(os.path.dirname(save.folder))):
        return "a link"
    return "an atomic checkpoint" if save.is_atomic else ""


def _describe_foreign(save: TagReport) -> str:
    """Why a folder around a tag is left alone, and what to do."""
    above = os.path.basename(os.path.dirname(save.folder))
    if above.endswith(".ckpt"):
        told = "is a folder of Lightning's, whose ModelCheckpoint knows which is the best: have it remove the others "
        return f"{told}(save_top_k), or remove whole folders by hand."
    if re.fullmatch(r"checkpoint_\d+", above):
        told = "looks like a folder of Accelerate's, where nothing tells whether all of it was written: have it remove "
        return f"{told}old ones (ProjectConfiguration(total_limit=…)), or remove whole folders by hand."
    return "is a folder of tags by itself: prune that one."


def _judge_weights(name: str, save: TagReport, why: str) -> Verdict | None:
    """What becomes of one that would be removed, of which the weights are to stay; None where they are not there."""
    nbytes = sum(entry.size for path, entry in save.files.items() if holds_optimizer(path))
    if not (nbytes or save.fault) or save.weights_only:
        told = "its weights alone are left" if save.weights_only else "its optimizer has no files of its own"
        return Verdict(name, KEEP, told, tag=save)
    if leaves_weights(save.folder):
        return Verdict(name, STRIP, why, nbytes, tag=save)
    if save.fault:
        return None
    told = "its weights cannot be left alone, as at ZeRO 3: write them elsewhere first (ds_ucp export)"
    return Verdict(name, KEEP, told, is_fault=True, tag=save)


def _judge_frozen(folder: str, verdicts: Iterable[Verdict], whole: Sequence[TagReport]) -> list[Verdict]:
    """What becomes of folders of frozen tensors: one that no tag names may be a save's that has just begun."""
    names = sorted(name for name, each in scan_folder(folder).items() if each.is_folder and name.startswith(BASE))
    gone = [each.name for each in verdicts if each.action == REMOVE]
    named, found = _list_frozen(folder, gone) if names else set(), list[Verdict]()
    for name in names:
        held = list_tree(os.path.join(folder, name)).values()
        changed = max((entry.changed for entry in held), default=0.0)
        if name in named:
            found.append(Verdict(name, KEEP, "a tag names it"))
        elif whole and 0 < changed < whole[0].age.time:
            found.append(Verdict(name, REMOVE, "no tag names it", sum(entry.size for entry in held)))
        else:
            found.append(Verdict(name, KEEP, "no tag names it yet"))
    return found


def _list_frozen(folder: str, gone: Iterable[str]) -> set[str]:
    """Folders of frozen tensors that something in a folder names, hidden or not, but for what is ``gone``."""
    gone, files = {*gone}, list_tree(folder)
    above = [os.path.dirname(path) for path in files if os.path.basename(path) == FROZEN]
    left = [os.path.join(folder, each) for each in above if each.split("/")[0] not in gone]
    return {os.path.basename(os.path.normpath(name)) for each in left for name in _read_frozen(each)}


def _read_frozen(folder: str) -> list[str]:
    """What a tag names as the folder of its frozen tensors, relative to where the tag lies; none where it has all."""
    told = _read_json(os.path.join(folder, FROZEN))
    return [] if told is None else [_get_text(told, "folder", os.path.join(folder, FROZEN))]


def _read_best(folder: str) -> list[str]:
    """What a trainer's folder names as the best one."""
    told = _read_json(os.path.join(folder, TRAINER_STATE)) or {}
    best = isinstance(told, dict) and told.get("best_model_checkpoint")
    return [best] if isinstance(best, str) else []


def _read_sealed(folder: str) -> list[str]:
    """Names in a seal; none where there is none that can be read."""
    with suppress(FileNotFoundError, CheckpointError):
        return list(read_seal(os.path.join(folder, SEAL)).files)
    return []


def _read_json(path: str) -> Any:
    """What a file holds; None where there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return read_json(path, advice="What it needs is not known; nothing is removed.")
    except FileNotFoundError:
        return None


def _get_text(told: Any, key: str, path: str) -> str:
    value = told.get(key) if isinstance(told, dict) else None
    if not isinstance(value, str):
        raise CheckpointError(f"names no {key}, so that what it needs is not known; nothing is removed.", path=path)
    return value
