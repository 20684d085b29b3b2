"""A resume: find the tag, decide who loads it, write an atomic checkpoint first where one is wanted, load."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..atoms import AtomicIndex
from ..comm import Comm, connect, is_shared
from ..config import UniversalConfig
from ..convert import ConvertOptions, convert_index, default_destination
from ..errors import CheckpointError, OutOfReachError, UcpError, UnsupportedError, shorten
from ..io.memory import identify_host, pause_collection
from ..io.paths import is_url, normalize
from ..io.store import begin_reading, set_storage_options
from ..io.threads import limit_torch
from ..patterns import RuleSet, from_config, list_renames
from ..plan.feeds import find_renamed, list_names
from ..sources import open_checkpoint
from ..sources.files import holds_atoms, list_entries
from ..sources.latest import is_sealed, list_older, list_unsealed
from ..sources.ownfiles import compare_own_files, list_own_globals
from ..stream.checks import Checks
from ..stream.report import OutputReport
from ..targets import Target, open_target
from ..targets.coverage import OWN_LOAD, UnknownLayoutError, describe_own_files, list_shared, list_unsaved
from ..targets.finish import refresh_after_own_load
from ..targets.guard import BROKEN, check_states, mark, release
from ..topology import ATOMIC, find_differences
from .census import join_groups, list_live_rules, take_census
from .client import check_trusted
from .direct import has_masters, load_direct
from .job import LoadArguments, LoadJob, LoadReport
from .report import write_report
from .tags import find_folders, find_tag, tell_nothing

logger = logging.getLogger("deepspeed_ucp")

Loaded = tuple[str | None, dict[str, Any] | None]
"""What ``load_checkpoint`` returns: the path of the state file and the client state, or two times None."""


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


def resume(
    engine: Any,
    load_dir: str,
    tag: Any,
    arguments: LoadArguments,
    config: UniversalConfig,
    own: Callable[..., Loaded],
    *,
    unknown: Sequence[str] = (),
) -> Loaded:
    """What runs in the place of ``engine.load_checkpoint``; collective.

    Args:
        engine: has the plugin on.
        own: DeepSpeed's own load, with all of the caller's arguments.
        unknown: arguments that only it knows.

    Raises:
        UcpError: the same on every rank.
    """
    if config.storage_options is not None:
        set_storage_options(config.storage_options)
    begin_reading([load_dir, *config.also])  # other ranks than the first would begin when that has found the tag
    comm, report = connect(), LoadReport(direct=False, reason="nothing to resume")
    engine.ucp_report = report
    upstream = bool(engine.load_universal_checkpoint())
    found = find_tag(load_dir, tag, comm, universal=upstream, fallback=config.fallback, also=config.also)
    if found is None:
        tell_nothing((load_dir, *config.also), comm, require=config.require)
        return own()
    comm.run(lambda: check_states(engine, with_states=arguments.with_states))
    job = LoadJob(engine, comm, config, arguments, report)
    if engine.use_node_local_storage() and not upstream:
        own = partial(own, tag=found)  # DeepSpeed writes `latest` on the first rank's node alone
    is_own = find_folders([load_dir], found, comm) == [load_dir]
    if tag is not None or is_own or not config.fallback:
        loaded = _resume_tag(job, load_dir, found, own, upstream=upstream, unknown=unknown)
    else:
        loaded = _resume_first_whole(job, load_dir, found, own, upstream=upstream, unknown=unknown)
    write_report(job, loaded[0])
    return loaded


def _resume_first_whole(job: LoadJob, load_dir: str, newest: str, own: Callable[..., Loaded], **more: Any) -> Loaded:
    """Resume from the newest tag that is whole; collective.

    Raises:
        CheckpointError: none is, or one was found damaged when the engine was being filled.
        UcpError: what is no fault of a tag's files; an older one is not to be taken because of it.
    """
    marked = getattr(job.engine, BROKEN, None)  # an earlier load's mark is no reason to leave the older tags alone
    passed: list[str] = []
    for tag, is_cut_off in _list_candidates(job, (load_dir, *job.config.also), newest):
        if is_cut_off:
            passed.append(f"{os.path.join(load_dir, tag)}: has no seal; its save may have been cut off.")
            continue
        try:
            loaded = _resume_tag(job, load_dir, tag, partial(own, tag=tag), **more)
        except CheckpointError as error:
            if isinstance(error, OutOfReachError) or getattr(job.engine, BROKEN, None) is not marked:
                raise
            passed.append(str(error))
        else:
            if passed and job.comm.rank == 0:
                logger.warning("%s: resumed from %s; passed over: %s", load_dir, tag, " ".join(passed))
            return loaded
    raise CheckpointError(f"{load_dir}: none of its {len(passed)} checkpoints is whole: {' '.join(passed)}")


def _list_candidates(job: LoadJob, places: Sequence[str], newest: str) -> Iterator[tuple[str, bool]]:
    """The tags from the newest on, and whether each lacks the seal that others have; collective.

    Older ones are looked for where they are wanted: a further place that is out of reach keeps no whole tag from being
    loaded, but it may hold the next older one.

    Raises:
        CheckpointError: a place cannot be listed.
    """
    is_first = not job.config.seal or job.comm.once(lambda: is_sealed(places, newest))
    if is_first:
        yield newest, False

    def look() -> tuple[list[str], set[str]]:
        tags = list_older(places, newest)
        return tags, list_unsealed(places, tags) if job.config.seal else set()

    tags, unsealed = job.comm.once(look)
    yield from ((tag, tag in unsealed) for tag in tags[is_first:])


def _resume_tag(
    job: LoadJob, load_dir: str, tag: str, own: Callable[[], Loaded], *, upstream: bool, unknown: Sequence[str]
) -> Loaded:
    """Resume from one tag; collective."""
    engine, comm, report, arguments = job.engine, job.comm, job.report, job.arguments
    folder, *also = find_folders((load_dir, *job.config.also), tag, comm)
    if folder == load_dir:  # DeepSpeed looks for the tag below the folder that it is given
        own = partial(own, load_dir=os.path.dirname(normalize(load_dir)), tag=tag)
    with report.phase("index"), pause_collection():
        decision = decide(job, folder, also, upstream=upstream)
    report.reason, report.direct = decision.reason, decision.index is not None
    if comm.rank == 0:
        who = "deepspeed_ucp" if report.direct else "DeepSpeed"
        logger.info("%s: %s is to load it, %s", folder, who, decision.reason)
        for text in list_unsaved(engine) if arguments.with_states else ():
            logger.warning("%s: %s", folder, text)
    if decision.index is None or decision.target is None:
        with report.phase("own load"):
            return _load_own(job, own, decision.target)
    if unknown:
        raise UnsupportedError(f"load_checkpoint got arguments that this release does not know: {shorten(unknown)}.")
    return _load(job, folder, decision.index, decision.target)


def _load_own(job: LoadJob, own: Callable[[], Loaded], target: Target | None) -> Loaded:
    """DeepSpeed's own load, and what it leaves stale; it changes the engine as it reads.

    Whatever cuts it short, an interrupt too, leaves an engine that is not to be used.
    """
    with_states = job.arguments.with_states
    try:
        loaded = own()
        if target is not None:
            refresh_after_own_load(target, job.comm, with_states=with_states)
    except BaseException as error:
        told = mark(job.engine, error, with_states=with_states)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(told)
        raise
    release(job.engine)
    return loaded


def decide(job: LoadJob, folder: str, also: Sequence[str] = (), *, upstream: bool = False) -> LoaderChoice:
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
        target = job.comm.run(lambda: open_target(job.engine))
    except UnknownLayoutError as error:
        if not atomic:
            return _trust_own_files(job, folder, str(error))
        if not job.config.trust_pickle:
            job.comm.run(lambda: check_trusted(list_own_globals(folder, job.comm.rank, job.comm.size)))
        return LoaderChoice(f"load_universal is on, this is an atomic checkpoint, and {error}")
    own: list[str] = []
    if job.engine.use_node_local_storage() and not atomic:
        own = find_own_differences(job, folder, target)
        if not own and job.config.same_topology != "direct":
            return _leave_own_files(job, folder, _NODE_LOCAL, target)
    return _compare(job, folder, also, target, own, upstream=upstream and not atomic)


_NODE_LOCAL = "every node keeps its own files (use_node_local_storage)"


def has_atoms(folder: str) -> bool:
    """Whether a folder that this rank sees is an atomic checkpoint."""
    try:
        return holds_atoms(list_entries(folder))
    except CheckpointError:
        return False


def _trust_own_files(job: LoadJob, folder: str, why: str) -> LoaderChoice:
    """Leave a load to DeepSpeed where each rank's own files tell the live topology; collective.

    Raises:
        UnsupportedError: they tell another one, or hold classes that are not known to be harmless.
    """
    if is_url(folder):
        raise UnsupportedError(f"{folder}: {why}, so that only DeepSpeed's own load can read it, which reads no URLs.")
    differences = find_own_differences(job, folder)
    if differences:
        raise UnsupportedError(
            f"{folder}: {why}, so that only DeepSpeed's own load can read it, which is right in an unchanged topology "
            f"alone. Here differ: {shorten(differences, 4)}. Resume in the topology that saved it. {OWN_LOAD}"
        )
    return _leave_own_files(job, folder, why)


def find_own_differences(job: LoadJob, folder: str, target: Target | None = None) -> list[str]:
    """Why DeepSpeed's own load cannot go by each rank's own files, in words; collective, the same on every rank.

    Args:
        target: the engine's buffers, where they are known: what its load would lose of them counts as well.
    """
    engine = job.engine

    def compare() -> list[str]:
        lost: list[str] = []
        if target is not None:
            lost += [f"{text}, which it does not restore" for text in list_lost(target, job.arguments)]
            lost += list_shared(engine)
        lost += list_kept(job)
        try:
            differing = compare_own_files(*describe_own_files(engine, folder))
        except CheckpointError as error:
            if target is None:
                raise
            differing = [str(error)]
        return [*lost, *differing]

    return list(dict.fromkeys(text for part in job.comm.each(compare) for text in part))


def _leave_own_files(job: LoadJob, folder: str, why: str, target: Target | None = None) -> LoaderChoice:
    """Leave a load to DeepSpeed, whose files tell the live topology; collective.

    Raises:
        UnsupportedError: they hold classes that are not known to be harmless.
    """
    engine, comm = job.engine, job.comm
    if not job.config.trust_pickle:
        # Of a shared folder every rank looks at a part; a node's own files are looked at by those ranks that see them.
        viewers = comm.each(lambda: _identify_folder(folder) if engine.use_node_local_storage() else ())
        comm.run(lambda: _check_own_files(folder, viewers, comm.rank))
    return LoaderChoice(f"{why}; same topology by each rank's own files", target)


def _identify_folder(folder: str) -> tuple[object, ...]:
    """The same on ranks that see the same folder: on one machine, and there in one container."""
    place = os.stat(folder)
    return identify_host(), socket.gethostname(), place.st_dev, place.st_ino


def _check_own_files(folder: str, viewers: Sequence[tuple[object, ...]], rank: int) -> None:
    """Refuse code in this rank's part of the files that those see together whose entry in ``viewers`` is the same."""
    own = viewers[rank]
    check_trusted(list_own_globals(folder, viewers[:rank].count(own), viewers.count(own)))


def _compare(
    job: LoadJob, folder: str, also: Sequence[str], target: Target, own: Sequence[str], *, upstream: bool
) -> LoaderChoice:
    """Hold the checkpoint's index against the live engine's layout; collective.

    Args:
        own: why DeepSpeed's own load cannot read each node's own files, in words.
    """
    comm, arguments, report = job.comm, job.arguments, job.report
    weights_only = not (arguments.with_states and has_masters(target, comm))
    rename = partial(find_renamed, renames=list_renames(from_config(job.config.patterns)))
    options: dict[str, Any] = {"dual": target.is_dual, "rename": rename, "also": also}
    named = join_groups(target, comm)
    index = open_checkpoint(folder, comm, *named, weights_only=weights_only, **options)
    report.saved = index.run.job
    changes = list_changes(index, target, comm.size, job.engine.train_batch_size())
    if comm.rank == 0 and changes:  # another number of ranks is what a resume is for
        level = logging.INFO if all(text.startswith("ranks ") for text in changes) else logging.WARNING
        logger.log(level, "%s: this run differs from the saved one: %s", folder, ", ".join(changes))
    found = comm.each(lambda: _list_differences(index, target, arguments) or find_scattered(index, folder))
    everyone = [text for part in found for text in part] or list(own) or list_kept(job)
    if upstream:
        everyone.append("load_universal is on, this is a normal checkpoint")
    if job.config.same_topology == "direct" and not everyone:
        everyone.append('the same topology, "same_topology" is "direct"')
    if is_url(folder):
        everyone.append("DeepSpeed's own load reads no URLs")
    if not everyone and job.config.fallback and job.config.verify == "crc":
        everyone += find_damage(index, comm, others=bool(also))
    if not everyone:
        if not job.config.trust_pickle:
            comm.run(lambda: check_trusted(index.run.globals))
        return LoaderChoice(f"same topology ({index.run.topology.describe()})", target=target)
    told = "; ".join(dict.fromkeys(everyone))
    return LoaderChoice(f"{index.run.topology.describe()} → {target.topology.describe()}: {told}", target, index)


def find_damage(index: AtomicIndex, comm: Comm, *, others: bool) -> list[str]:
    """What is damaged, in words, of the files that DeepSpeed's own load would read: the first place's; collective.

    Args:
        others: there are further places, so that ours may load what it cannot.

    Raises:
        CheckpointError: something is, and there are none.
    """
    own = tuple(replace(file, places=()) for file in index.stored.files)
    try:
        verify_all(index.change(files=own), comm)
    except CheckpointError as error:
        if not others:
            raise
        return [str(error)]
    return []


def verify_all(index: AtomicIndex, comm: Comm) -> None:
    """Hold every record against its checksum, at which DeepSpeed's own load does not look; collective.

    Raises:
        CheckpointError: one is damaged; the same on every rank.
    """
    checks = Checks()
    checks.touch(range(len(index.stored.records)) if comm.rank == 0 else ())
    checks.verify(index, comm)


def list_changes(index: AtomicIndex, target: Target, ranks: int, total_batch: int) -> list[str]:
    """What of the job around the engine differs from the saved one, in words.

    Args:
        ranks: of this job.
        total_batch: samples of a step of it.
    """
    saved, whole = index.run.job, index.run.topology.wrapper == ATOMIC
    facts = (
        ("total batch", saved.total_batch, total_batch),
        ("ranks", saved.ranks, ranks),
        ("precision", target.topology.precision if whole else index.run.topology.precision, target.topology.precision),
    )
    return [f"{name} {old} → {new}" for name, old, new in facts if old not in (None, new)]


def _list_differences(index: AtomicIndex, target: Target, arguments: LoadArguments) -> list[str]:
    saved = index.run.flats.get(target.place.mp_rank, ())
    flats = tuple(flat for flat in saved if flat.ranks is None or target.place.stage_rank in flat.ranks)
    found = find_differences(replace(index.run.topology, flats=flats), target.topology)
    return found or find_unnoticed(index, target, arguments)


def find_unnoticed(index: AtomicIndex, target: Target, arguments: LoadArguments) -> list[str]:
    """What DeepSpeed's own load would lose or not notice although the topologies are equal, in words.

    Ours runs then, which restores or refuses it.

    Args:
        index: of the whole checkpoint.
        target: this rank's, of an equal topology.
    """
    return [*index.limits.unnoticed, *list_lost(target, arguments, index)]


def find_scattered(index: AtomicIndex, folder: str) -> list[str]:
    """What DeepSpeed's own load would not find of a checkpoint, in words."""
    if index.stored.sight is not None:
        return ["its files lie on several nodes"]
    inside = os.path.join(folder, "")
    return [] if all(file.path.startswith(inside) for file in index.stored.files) else ["some files lie elsewhere"]


def list_kept(job: LoadJob) -> list[str]:
    """What of this run DeepSpeed's own load would put the saved in the place of, against the user's word."""
    keeps_groups = job.config.param_groups == "live" and job.arguments.with_states
    return ['this run\'s param groups ("param_groups" is "live")'] * keeps_groups


def list_lost(target: Target, arguments: LoadArguments, index: AtomicIndex | None = None) -> list[str]:
    """What DeepSpeed's own load of the same topology does not restore of an engine, in words.

    Args:
        index: the checkpoint; None where each rank knows its own files alone.
    """
    return target.list_lost(
        index,
        with_states=arguments.with_states,
        module_only=arguments.load_module_only,
        strict=arguments.load_module_strict,
    )


def _load(job: LoadJob, folder: str, index: AtomicIndex, target: Target) -> Loaded:
    """The direct load, from a new atomic checkpoint in mode "atomic"; collective."""
    # Without its optimizer an index is no whole checkpoint: a look at the weights leaves nothing behind.
    if job.config.mode == "atomic" and index.run.topology.wrapper != ATOMIC and job.arguments.with_states:
        with job.report.phase("convert"):
            index, job.report.converted = convert_first(index, target, folder, job.comm, job.config)
    engine = job.engine
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()
    try:
        job.comm.run(target.prepare)
        with limit_torch():
            loaded = index.run.state_file, load_direct(job, index, target)
    except UcpError as error:
        if is_shared(error):
            _end_event(engine)
        raise
    finally:
        target.swaps.discard()
    _end_event(engine)
    return loaded


def _end_event(engine: Any) -> None:
    """DeepSpeed's end of a load; collective: after an error of one rank alone that one would wait there for ever."""
    if engine._optimizer_has_ckpt_event_epilogue():
        engine.optimizer.checkpoint_event_epilogue()


def convert_first(
    index: AtomicIndex, target: Target, folder: str, comm: Comm, config: UniversalConfig
) -> tuple[AtomicIndex, OutputReport]:
    """Mode "atomic": write an atomic checkpoint with all ranks, or take the one that is there; collective."""
    rules = from_config(config.patterns)
    census = take_census(target, (), comm)

    def tell() -> list[RuleSet]:
        renamed = find_renamed(list_names(index), {*census.shapes, *census.aliases}, list_renames(rules))
        return list_live_rules(census, {name: renamed.get(name, name) for name in census.attributes})

    live = comm.run(tell)
    parent, tag = os.path.split(normalize(folder))
    destination = default_destination(os.path.join(config.atomic_dir or parent, tag))
    options = ConvertOptions(
        workers=config.threads, window=config.window_mb << 20, verify=config.verify == "crc", refresh=True
    )
    converted = convert_index(index, folder, destination, comm, options, rules=rules, live=live)
    if comm.rank == 0:
        done = "taken as it is" if converted.reused else f"{converted.tensors} atoms written"
        logger.info("%s: %s", destination, done)
    return open_checkpoint(destination, comm), converted
