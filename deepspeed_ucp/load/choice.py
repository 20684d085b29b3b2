"""Who loads a checkpoint: DeepSpeed in an unchanged topology where its own load is known to be right, else we do."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..atoms import AtomicIndex, to_integer
from ..comm import Comm
from ..errors import CheckpointError, UnsupportedError, shorten
from ..io.memory import identify_host
from ..io.paths import is_url
from ..patterns import from_config, list_renames
from ..plan.renames import find_renamed
from ..sources.files import PUBLISHED, holds_atoms, list_entries, resolve_published, scan_if_there
from ..sources.naming import Naming
from ..sources.open import survey_checkpoint
from ..sources.ownfiles import compare_own_files, list_own_globals
from ..stream.checks import verify_records
from ..targets import Target, open_target
from ..targets.coverage import OWN_LOAD, UnknownLayoutError, describe_own_files
from ..targets.guard import check_states
from ..targets.known import list_unknown
from ..topology import find_differences, list_untold
from .client import check_trusted
from .context import LoadContext
from .inventory import JoinedGroups, StageGroups, join_groups, list_stage_groups

logger = logging.getLogger("deepspeed_ucp")


@dataclass(frozen=True, slots=True)
class LoaderChoice:
    """Who loads a checkpoint.

    Attributes:
        reason: why, in words.
        target: the live engine's buffers; None where DeepSpeed alone knows them.
        index: the checkpoint, where the direct load runs; None leaves it to DeepSpeed.
    """

    reason: str
    target: Target | None = None
    index: AtomicIndex | None = None


def choose_loader(job: LoadContext, folder: str, also: Sequence[str] = (), *, upstream: bool = False) -> LoaderChoice:
    """Compare the checkpoint's topology with the engine's, from headers only; collective.

    Args:
        folder: the tag's folder.
        also: the same in further places.
        upstream: the ds_config has ``load_universal`` on, which DeepSpeed itself does with atomic checkpoints.

    Raises:
        UnsupportedError: an engine that is not covered, unless DeepSpeed's own load is known to be right.
    """
    atomic = upstream and any(job.comm.each(lambda: has_atoms(folder)))
    try:
        live = look_at_engine(job)
    except UnknownLayoutError as error:
        if not atomic:
            return _trust_own_files(job, folder, str(error))
        if not job.config.trust_pickle:
            job.comm.run(lambda: check_trusted(list_own_globals(folder, job.comm.rank, job.comm.size)))
        return LoaderChoice(f"load_universal is on, this is an atomic checkpoint, and {error}")
    own: list[str] = []
    if job.engine.use_node_local_storage() and not atomic:
        own = find_own_differences(job, folder, live.target)
        if not own and job.config.same_topology != "direct":
            return _leave_own_files(job, folder, _NODE_LOCAL, live.target)
    return _compare(job, folder, also, live, own, upstream=upstream and not atomic)


_BELOW = f"the files are in a folder below the tag ({PUBLISHED}), where DeepSpeed's own load does not look"

_NODE_LOCAL = "every node keeps its own files (use_node_local_storage)"


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """What a checkpoint is held against before it is planned.

    Attributes:
        target: this rank's buffers.
        has_masters: some rank's optimizer owns parameters (a pipeline stage may have none).
        keys: of all ranks' state dicts, those that are no names of parameters or buffers, with these names.
        groups: param groups over all ranks, and the module's parameters.
    """

    target: Target
    has_masters: bool
    keys: dict[str, str]
    groups: JoinedGroups


def look_at_engine(job: LoadContext) -> LiveEngine:
    """The engine, and what ranks have to tell of theirs; collective, once.

    Raises:
        UcpError: it is not covered, or must not be loaded in this way.
    """
    opened: list[Target] = []

    def look() -> tuple[bool, dict[str, str], StageGroups | None]:
        check_states(job.engine, with_states=job.arguments.with_states)
        target = open_target(job.engine)
        opened.append(target)
        # Without pipeline and experts all ranks have the same, which need not travel.
        groups = list_stage_groups(target) if target.place.pp > 1 or target.experts else None
        return bool(target.flats), target.list_keys(), groups

    answers = job.comm.each(look)
    target = opened[0]
    keys = {key: name for _, held, _ in answers for key, name in held.items()}
    if any(groups for *_, groups in answers):
        joined = join_groups(groups for *_, groups in answers)
    else:
        joined = target.live_groups(), target.live_hyper(), target.list_names()
    return LiveEngine(target, any(has for has, *_ in answers), keys, joined)


def has_atoms(folder: str) -> bool:
    """Whether a folder that this rank sees is an atomic checkpoint."""
    try:
        return holds_atoms(list_entries(folder))
    except CheckpointError:
        return False


def list_unproven(job: LoadContext, target: Target | None, index: AtomicIndex | None = None) -> list[str]:
    """Why DeepSpeed's own load of an unchanged topology is not known to be right here, in words.

    Args:
        target: this rank's; None where DeepSpeed alone knows the engine, whose own load is all there is.
        index: the checkpoint; None where each rank knows its own files alone.
    """
    arguments, by_default = job.arguments, type(job.arguments)()
    doubts = ['"param_groups" is "live"'] * (job.config.param_groups == "live" and arguments.with_states)
    doubts += ['"resize" rules'] * any(each.resizes for each in from_config(job.config.patterns))
    if target is not None:
        asked = ("load_optimizer_states", "load_module_only", "load_module_strict", "custom_load_fn")
        doubts += [name for name in asked if getattr(arguments, name) != getattr(by_default, name)]
        doubts += list_unknown(target, index)
    if target is not None and index is not None and arguments.with_states:
        doubts += target.find_other_kinds(index)
    return [f"DeepSpeed's own load is not known to be right with: {shorten(doubts)}"] if doubts else []


def _trust_own_files(job: LoadContext, folder: str, why: str) -> LoaderChoice:
    """Leave a load to DeepSpeed where each rank's own files tell the live topology; collective.

    Raises:
        UnsupportedError: they tell another one, or hold classes that are not known to be harmless.
    """
    if is_url(folder):
        raise UnsupportedError(
            f"{why}, so that only DeepSpeed's own load can read it, which reads no URLs.", path=folder
        )
    differences = find_own_differences(job, folder)
    if differences:
        raise UnsupportedError(
            f"{why}, so that only DeepSpeed's own load can read it, which is right in an unchanged topology "
            f"alone. Here differ: {shorten(differences, 4)}. Resume in the topology that saved it. {OWN_LOAD}",
            path=folder,
        )
    return _leave_own_files(job, folder, why)


def find_own_differences(job: LoadContext, folder: str, target: Target | None = None) -> list[str]:
    """Why DeepSpeed's own load cannot go by each rank's own files, in words; collective, the same on every rank.

    Args:
        target: the engine's buffers, where they are known.
    """

    def compare() -> list[str]:
        try:
            differing = compare_own_files(*describe_own_files(job.engine, folder))
        except CheckpointError as error:
            if target is None:
                raise
            differing = [str(error)]
        entries = scan_if_there(folder)
        if PUBLISHED in entries:
            differing.append(_BELOW)
        return [*list_unproven(job, target), *differing]

    return list(dict.fromkeys(text for part in job.comm.each(compare) for text in part))


def _leave_own_files(job: LoadContext, folder: str, why: str, target: Target | None = None) -> LoaderChoice:
    """Leave a load to DeepSpeed, whose files tell the live topology; collective.

    Raises:
        UnsupportedError: they hold classes that are not known to be harmless.
    """
    engine, comm = job.engine, job.comm
    if not job.config.trust_pickle:
        # Of a shared folder every rank looks at a part; a node's own files are looked at by those ranks that see them.
        viewers = comm.each(lambda: _identify_folder(folder) if engine.use_node_local_storage() else ())
        own = viewers[comm.rank]
        part, parts = viewers[: comm.rank].count(own), viewers.count(own)
        comm.run(lambda: check_trusted(list_own_globals(folder, part, parts)))
    return LoaderChoice(f"{why}; same topology by each rank's own files", target)


def _identify_folder(folder: str) -> tuple[object, ...]:
    """The same on ranks that see the same folder: on one machine, and there in one container."""
    place = os.stat(folder)
    return identify_host(), socket.gethostname(), place.st_dev, place.st_ino


def _compare(
    job: LoadContext, folder: str, also: Sequence[str], live: LiveEngine, own: Sequence[str], *, upstream: bool
) -> LoaderChoice:
    """Hold the checkpoint's index against the live engine's layout; collective.

    Args:
        own: why DeepSpeed's own load cannot read each node's own files, in words.
    """
    comm, target = job.comm, live.target
    rename = partial(find_renamed, renames=list_renames(from_config(job.config.patterns)))
    groups, hyper, order = live.groups
    naming = Naming(groups, hyper, order=order, dual=target.is_dual, keys=live.keys, rename=rename, ep=target.ep)
    without = not (job.arguments.with_states and live.has_masters)
    naming = replace(naming, record=target.list_recorded, weights_only=without)
    survey = survey_checkpoint(folder, comm, naming, also=also)

    def look() -> list[str]:
        index = survey.require()
        if index.run.format:
            return [index.limits.unchecked]  # a reason without words, where all of it is checked
        return _list_differences(index, target) or _list_elsewhere(index, folder) or list_unproven(job, target, index)

    reasons = [text for part in comm.each(look) for text in part] or list(own) or list(_list_wishes(job, upstream))
    index = survey.require()
    job.report.saved = index.run.job
    if comm.rank == 0:
        survey.log_warnings()
    changes = list_changes(index, target, to_integer(job.engine.train_batch_size()))
    if comm.rank == 0 and changes:
        logger.warning("%s: this run differs from the saved one: %s", folder, ", ".join(changes))
    if not reasons and job.config.fallback and job.config.verify == "crc":
        reasons = find_damage(index, comm, others=bool(also))
    if not reasons:
        if not job.config.trust_pickle:
            comm.alike(lambda: check_trusted(index.run.globals))
        return LoaderChoice(f"same topology ({index.run.topology.describe()})", target=target)
    told = [f"{index.run.written} → {target.topology.describe()}", "; ".join(dict.fromkeys(list_untold(reasons)))]
    return LoaderChoice(": ".join(filter(None, told)), target, index)


def _list_wishes(job: LoadContext, upstream: bool) -> Iterator[str]:
    """Why ours is to load although DeepSpeed's own would be right, in words."""
    if upstream:
        yield "load_universal is on, this is a normal checkpoint"
    if job.config.same_topology == "direct":
        yield 'the same topology, "same_topology" is "direct"'


def find_damage(index: AtomicIndex, comm: Comm, *, others: bool) -> list[str]:
    """What is damaged, in words, of the files that DeepSpeed's own load would read: the first place's; collective.

    That load does not look at checksums.

    Args:
        others: there are further places, so that ours may load what it cannot.

    Raises:
        CheckpointError: something is, and there are none.
    """
    own = tuple(replace(file, places=()) for file in index.stored.files)
    try:
        verify_records(index.change(files=own), range(len(index.stored.records)), comm)
    except CheckpointError as error:
        if not others:
            raise
        return [str(error)]
    return []


def list_changes(index: AtomicIndex, target: Target, total_batch: int) -> list[str]:
    """What of the job around the engine differs from the saved one, in words; degrees are told with who loads.

    Args:
        total_batch: samples of a step of it.
    """
    saved, untold = index.run.job, index.run.format or index.run.topology.is_atomic
    facts = (
        ("total batch", saved.total_batch, total_batch),
        ("precision", None if untold else index.run.topology.precision, target.topology.precision),
    )
    return [f"{name} {old} → {new}" for name, old, new in facts if old not in (None, new)]


def _list_differences(index: AtomicIndex, target: Target) -> list[str]:
    saved = index.run.flats.get(target.place.mp_rank, ())
    flats = tuple(flat for flat in saved if flat.ranks is None or target.place.stage_rank in flat.ranks)
    return find_differences(replace(index.run.topology, flats=flats), target.topology)


def _list_elsewhere(index: AtomicIndex, folder: str) -> list[str]:
    """What DeepSpeed's own load would not find of a checkpoint, in words."""
    if is_url(folder):
        return ["DeepSpeed's own load reads no URLs"]
    if resolve_published(folder) != folder:
        return [_BELOW]
    if index.stored.access.is_partial:
        return ["its files lie on several nodes"]
    inside = os.path.join(folder, "")  # what lies beside it has no such path
    return [] if all(file.path.startswith(inside) for file in index.stored.files) else ["some files lie elsewhere"]
