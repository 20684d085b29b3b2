"""A resume, in place of ``engine.load_checkpoint`` (terms: docs/design.md).

All ranks take these steps together; an error of one rank becomes the same error on all.

1. ``tags.find_tag``: find the tag to load on any node and in any place.
2. ``choice.inspect_engine``: describe the live engine (``engine.base.Target``).
3. ``formats.open.survey_checkpoint``: list the files, and identify the save by its first headers.
4. Read each other header on one rank, exchange them, and build the ``AtomicIndex``.
5. ``choice.choose_loader``: compare both; in a known unchanged topology DeepSpeed's own load runs, and all is done.
6. ``direct.load_direct``: let extensions refuse the load, and read the client state.
7. ``prepare.prepare``: match parameters and param groups, settle their patterns, and list this rank's wants.
8. ``transfer.negotiate``: turn wants into claims, and let the owners of the blocks plan the reads.
9. ``Transfer.read``: read everything once, and fill memory that may still change without harm.
10. ``Transfer.verify``: compare checksums and replicas. Until here every change can be undone.
11. ``Transfer.fill``: fill the engine's memory, and make the 16-bit copies from the masters.
12. ``direct._finish``: attach optimizer states, and restore counters and hyper-parameters.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..comm import connect, is_shared
from ..config import UniversalConfig
from ..convert import ConvertOptions, convert_index, default_destination
from ..engine.base import Target
from ..engine.coverage import describe_own_files, list_pending, list_unsaved
from ..engine.finish import end_load_event, refresh_after_own_load, wait_behind_reads
from ..engine.guard import block_engine, unblock_engine
from ..engine.references import keep_references
from ..engine.rule import watch_edits
from ..engine_state import find_state
from ..errors import CheckpointError, OutOfReachError, UcpError, UnsupportedError, clear_frames, pluralize, shorten
from ..formats import open_checkpoint, read_latest
from ..formats.deepspeed.ownfiles import compare_own_files
from ..formats.latest import find_folder, is_sealed, list_older, list_unsealed
from ..io.memory import pause_collection
from ..io.paths import normalize
from ..io.store import set_storage_options
from ..io.threads import limit_torch_threads
from ..model.index import AtomicIndex
from ..plan.settling import list_names
from ..stream.report import OutputReport
from ..tensor_parallel.rules import RuleSet, find_renamed, from_config
from .choice import choose_loader
from .context import LoadContext, Loaded, LoadReport
from .direct import load_direct
from .prepare import list_live_rules, view_engine
from .tags import find_all_tags, find_folders, find_tag, report_absent, suggest_fallback

logger = logging.getLogger("deepspeed_ucp")

T = TypeVar("T")


def resume(
    engine: Any,
    load_dir: str,
    tag: Any,
    arguments: Mapping[str, Any],
    config: UniversalConfig,
    deepspeed_load: Callable[..., Loaded],
    *,
    unknown: Sequence[str] = (),
) -> Loaded:
    """Load a checkpoint in place of ``engine.load_checkpoint`` (collective).

    Args:
        load_dir: the caller's folder; for saves in memory, theirs. The same holds for ``tag``.
        arguments: fields of :class:`.context.LoadContext`, after the option ``arguments`` was applied.
        deepspeed_load: DeepSpeed's load, with these and all other arguments.
        unknown: names of arguments that this plugin does not support; only DeepSpeed's load accepts them.

    Raises:
        UcpError: the same on every rank.
        Exception: an error of DeepSpeed's own load, perhaps on one rank alone.
    """
    if config.storage_options is not None:
        set_storage_options(config.storage_options)
    comm, report = connect(), LoadReport(direct=False, reason="nothing to resume")
    engine.ucp_report = report
    rules = comm.run(lambda: from_config(config.patterns))
    context = LoadContext(engine, comm, config, report, rules, load_dir, deepspeed_load, unknown, **arguments)
    may_suggest_fallback = tag is None and not config.fallback
    with suggest_fallback(comm, lambda: may_suggest_fallback and bool(find_all_tags(context.places))):
        chosen = find_tag(
            load_dir, tag, comm, universal=context.loads_universal, fallback=config.fallback, also=context.places[1:]
        )
    if chosen is None:
        state = find_state(engine)
        saved_to = [saver.save_dir for saver in (state.preemption, state.snapshots) if saver is not None]
        report_absent(context.places, comm, require=config.require, saved_to=saved_to)
        return deepspeed_load()
    is_tag_folder = find_folders([load_dir], chosen, comm) == [load_dir]
    if tag is None and config.fallback and not is_tag_folder:
        return _try_tags(context, chosen)
    may_suggest_fallback &= not is_tag_folder
    with suggest_fallback(comm, lambda: may_suggest_fallback and not find_all_tags(context.places) <= {chosen}):
        return _resume_tag(context, chosen)


def _try_tags(context: LoadContext, newest: str) -> Loaded:
    """Try the tag in ``latest``, then older tags, until one loads (collective).

    Raises:
        CheckpointError: no tag is complete, or one was found damaged after the engine had been changed.
        UcpError: an error that damaged files did not cause; older tags are not tried.
    """
    load_dir = context.load_dir
    broken_before = find_state(
        context.engine
    ).broken  # an earlier load's failure does not keep older tags from being tried
    skipped: list[str] = []
    for tag, is_unsealed in _list_candidates(context, newest):
        if is_unsealed:
            skipped.append(f"{os.path.join(load_dir, tag)}: has no seal; its save may have been cut off.")
            continue
        try:
            loaded = _resume_tag(context, tag)
        except CheckpointError as error:
            has_changed = find_state(context.engine).broken is not broken_before
            if isinstance(error, OutOfReachError) or has_changed or not context.comm.is_common(error):
                raise
            skipped.append(str(error))
            clear_frames(error)
        else:
            if skipped:
                context.warn("%s: resumed from %s; skipped: %s", load_dir, tag, " ".join(skipped))
            return loaded
    text = f"none of its {len(skipped)} checkpoints is complete: {' '.join(skipped)}"
    raise context.comm.common(CheckpointError(text, path=load_dir))


def _list_candidates(context: LoadContext, newest: str) -> Iterator[tuple[str, bool]]:
    """Yield ``newest``, then older tags; with True for a tag to skip (collective).

    A tag is skipped if the option ``seal`` is on and only other candidates have a seal.

    Older tags are listed only after the newest has failed, so an unreachable additional place does not prevent the load
    of the newest. After that it is an error, since that place may hold the next older tag.
    """
    places = context.places
    is_first = not context.config.seal or context.comm.once(lambda: is_sealed(places, newest))
    if is_first:
        yield newest, False
    tags = context.comm.once(lambda: list_older(places, newest))
    unsealed = context.comm.once(lambda: list_unsealed(places, tags)) if context.config.seal else set()
    yield from ((tag, tag in unsealed) for tag in tags[is_first:])


def _resume_tag(context: LoadContext, tag: str) -> Loaded:
    """Resume from one tag (collective)."""
    engine, comm, report = context.engine, context.comm, context.report
    folder, *also = find_folders(context.places, tag, comm)
    with report.phase("index"), pause_collection():
        report.reason, target, index = choose_loader(context, folder, also)
    report.direct = index is not None
    if comm.rank == 0:
        loader = "deepspeed_ucp" if report.direct else "DeepSpeed"
        extensions = f" (extensions: {', '.join(report.extensions)})" if report.extensions else ""
        logger.info("%s: %s loads it, %s%s", folder, loader, report.reason, extensions)
        for text in (*list_pending(engine), *(list_unsaved(engine) if context.with_states else ())):
            logger.warning("%s: %s", folder, text)
    if index is None or target is None:
        # DeepSpeed looks for `latest` and for the tag below its argument; another place or node may have `latest`.
        below = {"load_dir": os.path.dirname(normalize(folder))} if folder == context.load_dir else {}
        context = replace(context, deepspeed_load=partial(context.deepspeed_load, tag=tag, **below))
        with report.phase("own load"):
            return _run_deepspeed_load(context, folder, target)
    if context.unknown:
        names = shorten(context.unknown)
        text = f"load_checkpoint got arguments that this release does not know: {names}."
        raise comm.common(UnsupportedError(text))
    return _load_directly(context, folder, index, target)


def _run_deepspeed_load(context: LoadContext, folder: str, target: Target | None) -> Loaded:
    """Run DeepSpeed's load and refresh the data that it leaves stale.

    The load changes the engine while it reads: any exception, even an interrupt, blocks the engine.

    Raises:
        CheckpointError: DeepSpeed has loaded nothing, which it only logs.
        Exception: any other error of DeepSpeed, perhaps on one rank alone.
    """
    with_states = context.with_states
    describe_edits = watch_edits(context.engine, with_scheduler=context.load_lr_scheduler_states)
    try:
        with wait_behind_reads(context.engine, context.comm), keep_references(context.engine):
            loaded = context.deepspeed_load()
        if loaded[0] is None:
            raise CheckpointError(
                'DeepSpeed\'s own load finds no checkpoint in it. See its log, or set "same_topology": "direct".',
                path=folder,
            )
        if target is not None:
            refresh_after_own_load(target, context.comm, with_states=with_states)
    except BaseException as error:
        error.add_note(block_engine(context.engine, error, with_states=with_states))
        raise
    context.warn_all(loaded[0], lambda: filter(None, [describe_edits(loaded[1])]))
    unblock_engine(context.engine)
    return loaded


def _load_directly(context: LoadContext, folder: str, index: AtomicIndex, target: Target) -> Loaded:
    """Run the plugin's load, after a conversion in mode "atomic" (collective).

    It loads weights alone if the checkpoint has no more.
    """
    if index.is_weights_alone and not context.load_module_only:
        context.warn(
            "%s: holds weights alone, in %s: the optimizer keeps its states and steps (a new one starts at 0), and "
            "nothing else is restored",
            folder,
            index.topology.precision,
        )
        context = replace(context, load_module_only=True)
    # A load of weights alone converts nothing: without optimizer states the conversion would be incomplete.
    if context.config.mode == "atomic" and not index.topology.is_atomic and context.with_states:
        with context.report.phase("convert"):
            index, context.report.converted = convert_before_load(context, index, target, folder)
    if context.engine._optimizer_has_ckpt_event_prologue():
        context.engine.optimizer.checkpoint_event_prologue()
    try:
        context.comm.run(target.prepare)
        with limit_torch_threads():
            loaded = index.state_file, load_direct(context, index, target)
    except UcpError as error:
        if is_shared(error):
            end_load_event(context.engine)
        raise
    finally:
        target.discard()
    end_load_event(context.engine)
    return loaded


def convert_before_load(
    context: LoadContext, index: AtomicIndex, target: Target, folder: str
) -> tuple[AtomicIndex, OutputReport]:
    """Convert a checkpoint to an atomic one, or reuse a conversion (collective).

    Returns:
        The conversion's index, and a report.
    """
    comm, config, rules = context.comm, context.config, context.rules
    view = view_engine(target, (), comm)

    def list_rules() -> list[RuleSet]:
        renamed = find_renamed(list_names(index), {*view.shapes, *view.aliases}, rules)
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


def load_without_plugin(engine: Any, load_dir: str, tag: Any, deepspeed_load: Callable[[], T]) -> T:
    """Run DeepSpeed's load.

    If it fails on a checkpoint of another topology, its error gets a note.
    """
    try:
        return deepspeed_load()
    except Exception as error:
        if note := _explain_other_topology(engine, load_dir, tag):
            error.add_note(note)
        raise


def _explain_other_topology(engine: Any, load_dir: str, tag: Any) -> str:
    """Explain a failed load by differences of this rank's files from the engine.

    The text is empty if there are none, if files cannot be read, or if the ds_config switches the plugin off.
    """
    config = engine._config
    if (config._param_dict.get("checkpoint") or {}).get("universal") is False:
        return ""
    try:
        wanted = read_latest(load_dir) if tag is None else str(tag)
        folder = find_folder(load_dir, wanted or "")
        differences = compare_own_files(*describe_own_files(engine, folder)) if os.path.isdir(folder) else ()
    except Exception as error:  # noqa: BLE001 - an explanation must not hide the error
        logger.debug("%s: %s", load_dir, error)
        return ""
    if not differences:
        return ""
    late = not hasattr(config, "ucp_config")
    why = "it was made before deepspeed_ucp was imported" if late else 'its ds_config has no "checkpoint.universal"'
    do = "Import deepspeed_ucp before deepspeed.initialize, with" if late else "Write"
    return (
        f"deepspeed_ucp is imported but off for this engine: {why}. {folder} was saved in another topology "
        f'({shorten(differences, 4)}), which it resumes. {do} "checkpoint": {{"universal": true}} in the ds_config, '
        "or set the environment variable DEEPSPEED_UCP=1 on every rank (several nodes: in ~/.deepspeed_env)."
    )
