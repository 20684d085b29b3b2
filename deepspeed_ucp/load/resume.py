"""A resume: the replacement of ``engine.load_checkpoint``.

The order of calls:

1. :func:`.tags.find_tag` finds the tag to load. Without one :func:`.absent.report_absent` logs it, and DeepSpeed loads.
2. :func:`.choice.choose_loader` reads the headers (:func:`~deepspeed_ucp.formats.open.survey_checkpoint`), compares the
   saved topology with the engine's and chooses the loader: DeepSpeed (then the load ends here) or the direct load.
3. In mode "atomic", :func:`convert_first` writes an atomic checkpoint, and the load goes on from there.
4. :func:`.direct.load_direct` loads. :func:`.prepare.prepare` matches engine and checkpoint and lists this rank's
   wants.
5. :func:`~deepspeed_ucp.plan.wants.list_wants` computes the wants and :func:`.destinations.bind` gives them memory.
6. :func:`.transfer.negotiate` turns the wants of all ranks into a plan of reads and rounds of exchange for each rank.
7. :meth:`.transfer.Transfer.read` reads everything once, into memory that may be changed before verification.
8. :meth:`.transfer.Transfer.verify` compares the checksums and the replicas; all ranks agree on the result.
9. :func:`~deepspeed_ucp.engine.guard.guard_engine` marks the engine if anything fails from here on.
10. :meth:`.transfer.Transfer.fill` brings the rest to the engine: from separate memory, or in a second pass.
11. The 16-bit copies are made from the masters, and states, scaler, counters and schedulers are restored.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..comm import Comm, connect, is_shared
from ..config import UniversalConfig
from ..convert import ConvertOptions, convert_index, default_destination
from ..engine import Target
from ..engine.coverage import list_unsaved
from ..engine.finish import refresh_after_own_load, wait_behind_reads
from ..engine.guard import mark, release
from ..engine.references import keep_references
from ..engine.rule import watch_edits
from ..engine_state import find_state, list_save_folders
from ..errors import CheckpointError, OutOfReachError, UcpError, UnsupportedError, clear_frames, pluralize, shorten
from ..formats import open_checkpoint
from ..formats.older import is_sealed, list_older, list_unsealed
from ..io.memory import pause_collection
from ..io.paths import normalize
from ..io.store import set_storage_options
from ..io.threads import limit_torch
from ..model import AtomicIndex
from ..plan.renames import find_renamed, list_names
from ..stream.report import OutputReport
from ..tensor_parallel import RuleSet, from_config, list_renames
from .absent import report_absent
from .choice import choose_loader
from .context import LoadArguments, LoadContext, LoadReport
from .direct import load_direct
from .inventory import list_live_rules, view_engine
from .tags import find_all_tags, find_folders, find_tag, suggest_fallback

logger = logging.getLogger("deepspeed_ucp")

Loaded = tuple[str | None, dict[str, Any] | None]
"""The result of ``load_checkpoint``: the path of the state file and the client state, or twice None."""


def resume(
    engine: Any,
    load_dir: str,
    tag: Any,
    arguments: LoadArguments,
    config: UniversalConfig,
    deepspeed_load: Callable[..., Loaded],
    *,
    unknown: Sequence[str] = (),
) -> Loaded:
    """Load a checkpoint into an engine, in the place of ``engine.load_checkpoint`` (collective).

    Args:
        engine: an engine that has the plugin on.
        deepspeed_load: DeepSpeed's load, with all of the caller's arguments.
        unknown: arguments that only DeepSpeed's load knows.

    Raises:
        UcpError: the same on every rank.
    """
    if config.storage_options is not None:
        set_storage_options(config.storage_options)
    comm, report = connect(), LoadReport(direct=False, reason="nothing to resume")
    engine.ucp_report = report
    upstream = bool(engine.load_universal_checkpoint())
    places, can_fall_back = (load_dir, *config.also), tag is None and not config.fallback
    with suggest_fallback(comm, lambda: can_fall_back and bool(find_all_tags(places))):
        chosen = find_tag(load_dir, tag, comm, universal=upstream, fallback=config.fallback, also=config.also)
    if chosen is None:
        report_absent(places, comm, require=config.require, saved_to=list_save_folders(engine))
        return deepspeed_load()
    job = LoadContext(engine, comm, config, arguments, report)
    if engine.use_node_local_storage() and not upstream:
        deepspeed_load = partial(deepspeed_load, tag=chosen)  # DeepSpeed writes `latest` on the first rank's node alone
    is_tag_folder = find_folders([load_dir], chosen, comm) == [load_dir]
    if tag is None and config.fallback and not is_tag_folder:
        return _resume_first_whole(job, load_dir, chosen, deepspeed_load, unknown)
    can_fall_back &= not is_tag_folder
    with suggest_fallback(comm, lambda: can_fall_back and not find_all_tags(places) <= {chosen}):
        return _resume_tag(job, load_dir, chosen, deepspeed_load, unknown)


def _resume_first_whole(
    job: LoadContext, load_dir: str, newest: str, deepspeed_load: Callable[..., Loaded], unknown: Sequence[str]
) -> Loaded:
    """Resume from the newest complete tag (collective).

    Raises:
        CheckpointError: no tag is complete, or one was found damaged after the engine had been changed.
        UcpError: an error that is no fault of a tag's files, and no reason to take an older one.
    """
    marked = find_state(job.engine).broken  # a mark of an earlier load does not keep older tags from being tried
    passed: list[str] = []
    for tag, is_cut_off in _list_candidates(job, (load_dir, *job.config.also), newest):
        if is_cut_off:
            passed.append(f"{os.path.join(load_dir, tag)}: has no seal; its save may have been cut off.")
            continue
        try:
            loaded = _resume_tag(job, load_dir, tag, partial(deepspeed_load, tag=tag), unknown)
        except CheckpointError as error:
            if isinstance(error, OutOfReachError) or find_state(job.engine).broken is not marked:
                raise
            passed.append(str(error))
            clear_frames(error)
        else:
            if passed and job.comm.rank == 0:
                logger.warning("%s: resumed from %s; skipped: %s", load_dir, tag, " ".join(passed))
            return loaded
    raise CheckpointError(f"none of its {len(passed)} checkpoints is whole: {' '.join(passed)}", path=load_dir)


def _list_candidates(job: LoadContext, places: Sequence[str], newest: str) -> Iterator[tuple[str, bool]]:
    """Yield the tags from the newest on, and whether each lacks the seal that others have (collective).

    Older tags are listed only when they are needed: a further place that is out of reach does not prevent the load of a
    complete tag, but it may hold the next older one.

    Raises:
        CheckpointError: a place cannot be listed.
    """
    is_first = not job.config.seal or job.comm.once(lambda: is_sealed(places, newest))
    if is_first:
        yield newest, False
    tags = job.comm.once(lambda: list_older(places, newest))
    unsealed = job.comm.once(lambda: list_unsealed(places, tags)) if job.config.seal else set()
    yield from ((tag, tag in unsealed) for tag in tags[is_first:])


def _resume_tag(
    job: LoadContext, load_dir: str, tag: str, deepspeed_load: Callable[..., Loaded], unknown: Sequence[str]
) -> Loaded:
    """Resume from one tag (collective)."""
    engine, comm, report, arguments = job.engine, job.comm, job.report, job.arguments
    folder, *also = find_folders((load_dir, *job.config.also), tag, comm)
    if folder == load_dir:  # DeepSpeed looks for the tag below its argument
        deepspeed_load = partial(deepspeed_load, load_dir=os.path.dirname(normalize(load_dir)), tag=tag)
    with report.phase("index"), pause_collection():
        choice = choose_loader(job, folder, also, upstream=bool(engine.load_universal_checkpoint()))
    report.reason, report.direct = choice.reason, choice.index is not None
    if comm.rank == 0:
        loader = "deepspeed_ucp" if report.direct else "DeepSpeed"
        logger.info("%s: %s loads it, %s", folder, loader, choice.reason)
        for text in list_unsaved(engine) if arguments.with_states else ():
            logger.warning("%s: %s", folder, text)
    if choice.index is None or choice.target is None:
        with report.phase("own load"):
            return _run_deepspeed_load(job, deepspeed_load, choice.target)
    if unknown:
        raise UnsupportedError(f"load_checkpoint got arguments that this release does not know: {shorten(unknown)}.")
    return _load(job, folder, choice.index, choice.target)


def _run_deepspeed_load(job: LoadContext, deepspeed_load: Callable[[], Loaded], target: Target | None) -> Loaded:
    """Run DeepSpeed's load and refresh the data that it leaves stale.

    The load changes the engine while it reads: any exception, even an interrupt, marks the engine as unusable.
    """
    with_states = job.arguments.with_states
    describe_edits = watch_edits(job.engine, with_scheduler=job.arguments.load_lr_scheduler_states)
    try:
        with wait_behind_reads(job.engine, job.comm), keep_references(job.engine):
            loaded = deepspeed_load()
        if target is not None:
            refresh_after_own_load(target, job.comm, with_states=with_states)
    except BaseException as error:
        note = mark(job.engine, error, with_states=with_states)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(note)
        raise
    if job.comm.rank == 0 and (note := describe_edits(loaded[1])):
        logger.warning("%s: %s", loaded[0], note)
    release(job.engine)
    return loaded


def _load(job: LoadContext, folder: str, index: AtomicIndex, target: Target) -> Loaded:
    """Run the direct load, in mode "atomic" from a new atomic checkpoint (collective)."""
    if index.is_weights_alone and not job.arguments.load_module_only:
        if job.comm.rank == 0:
            logger.warning(
                "%s: holds weights alone, in %s: the optimizer keeps its states and steps (a new one starts at 0), and "
                "nothing else is restored",
                folder,
                index.run.topology.precision,
            )
        job = replace(job, arguments=replace(job.arguments, load_module_only=True))
    # Without optimizer states an index is not a complete checkpoint: a load of weights alone writes none.
    if job.config.mode == "atomic" and not index.run.topology.is_atomic and job.arguments.with_states:
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
    """End DeepSpeed's load event (collective); skipped after an error of one rank alone, which would wait for ever."""
    if engine._optimizer_has_ckpt_event_epilogue():
        engine.optimizer.checkpoint_event_epilogue()


def convert_first(
    index: AtomicIndex, target: Target, folder: str, comm: Comm, config: UniversalConfig
) -> tuple[AtomicIndex, OutputReport]:
    """Write an atomic checkpoint with all ranks, or reuse an existing one (collective)."""
    rules = from_config(config.patterns)
    view = view_engine(target, (), comm)

    def list_rules() -> list[RuleSet]:
        renamed = find_renamed(list_names(index), {*view.shapes, *view.aliases}, list_renames(rules))
        return list_live_rules(view, {name: renamed.get(name, name) for name in view.attributes})

    live = comm.run(list_rules)
    parent, tag = os.path.split(normalize(folder))
    destination = default_destination(os.path.join(config.atomic_dir or parent, tag))
    options = ConvertOptions(
        workers=config.threads, window=config.window_mb << 20, verify=config.verify == "crc", refresh=True
    )
    converted = convert_index(index, folder, destination, comm, options, rules=rules, live=live)
    if comm.rank == 0:
        done = "reused" if converted.reused else f"{pluralize(converted.tensors, 'tensor')} written"
        logger.info("%s: %s", destination, done)
    return open_checkpoint(destination, comm), converted
