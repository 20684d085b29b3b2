"""Replacements of DeepSpeed's methods: loads, saves, steps, initialize."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from . import beacon, snapshots
from .attach import get_default
from .beacon.torchelastic import set_limit
from .comm import Comm, connect
from .config import ENVIRONMENT, SECTION, UniversalConfig, choose_batch, parse_config, read_environment
from .elastic_agent import end_with_agent
from .engine.guard import guard_engine
from .engine_state import collect, find_state, get_config, load_carried, note_step
from .errors import CheckpointError, UcpError, clear_frames, describe_changes, pluralize
from .io.store import set_storage_options
from .load.resume import load_without_plugin, resume
from .model.index import to_integer
from .preemption import save_if_signaled
from .saves.saver import save_into_memory
from .saves.search import find_in_memory
from .saves.sizes import estimate_saves
from .sealing import seal_last, seal_late, seal_save
from .tensor_parallel.rules import from_config
from .uncaught import find_fault, shorten_uncaught
from .writer import finish_save, is_decoupled, protect_writer

logger = logging.getLogger("deepspeed_ucp")


def show_decisions() -> None:
    """Show the plugin's INFO lines unless the script has set a level."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [deepspeed_ucp] %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def read_options(ds_config: Mapping[str, Any]) -> UniversalConfig | None:
    """Return the options for an engine with this ds_config, or None if it is off."""
    defaults = [read_environment(os.environ), ("deepspeed_ucp.install(default_on=…)", get_default())]
    return parse_config(ds_config, defaults)


def _configure_train_batch_size(original: Callable[..., Any], config: Any) -> None:
    """Validate ``checkpoint.universal`` and fit batch sizes, once ds_config is parsed."""
    end_with_agent()
    options = read_options(config._param_dict)
    config.ucp_config = options
    if options is not None:
        show_decisions()
        if config.global_rank == 0:
            warn_untested(sys.modules["deepspeed"].__version__)
            if parse_config(config._param_dict, [("", get_default())]) is None:
                _log_once(f"deepspeed_ucp is on by the environment variable {ENVIRONMENT}")
        shorten_uncaught()
        set_limit(options.hang_timeout_s)
        connect()  # peers that wait for this rank can see from now on that it is alive
        from_config(options.patterns)  # raises now, not at the load
        if options.storage_options is not None:
            set_storage_options(options.storage_options)
        _fit_batch_sizes(config, options)
    original(config)


@cache
def warn_untested(release: str) -> None:
    """Warn once per process about an unsupported or broken release (``setup.cfg``)."""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:3]))
    if not (0, 16, 0) <= numbers < (0, 20, 0):
        fault = "is not supported by deepspeed_ucp (0.16.0 to 0.19.x are): loads may fail or lose state"
    elif (0, 18, 7) <= numbers <= (0, 18, 9):
        fault = "cannot take a step at ZeRO 1 and 2: its flat buffers are still part of autograd's graph"
    else:
        return
    logger.warning("DeepSpeed %s %s. Use another release, or test it with assert_resume_equivalent.", release, fault)


def _fit_batch_sizes(config: Any, options: UniversalConfig) -> None:
    given = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    train, micro, gas, world = map(to_integer, (*given, config.world_size))
    if not all(value is None or (isinstance(value, int) and value > 0) for value in (train, micro, gas, world)):
        return  # DeepSpeed reports these
    fit = choose_batch(train, micro, gas, world, preserve=options.preserve_batch_size)
    if fit is not None:
        config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps = fit
        changes = describe_changes(("micro batch", micro, fit[0]), ("gradient accumulation", gas, fit[1]))
        _log_once(f"train_batch_size {train} kept on {pluralize(world, 'rank')}: {changes}")


@cache
def _log_once(text: str) -> None:
    """Log once per process: trainers make DeepSpeed's configuration several times."""
    logger.info("%s", text)


def _configure_checkpointing(original: Callable[..., Any], engine: Any, *args: Any) -> None:
    """Protect DeepSpeed's writer, and log saves' memory, once the optimizer exists."""
    protect_writer(engine)
    original(engine, *args)
    config = get_config(engine)
    if config is not None and config.save is not None:
        estimate_saves(engine, config)


def _check_for_duplicates(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Record the names in param groups before wrappers flatten them (stage-0 saves)."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
    if all(param in names for group in groups for param in group):
        find_state(engine).param_groups = [[names[param] for param in group] for group in groups]
    return original(engine, optimizer)


@beacon.phase("save")
def _save_checkpoint(
    original: Callable[..., Any],
    engine: Any,
    save_dir: Any,
    tag: Any = None,
    client_state: Any = None,
    *args: Any,
    **more: Any,
) -> Any:
    """Save with carried states, into memory if ``save`` is on; seal the complete save."""
    seal_last(engine)
    tag = f"global_step{engine.global_steps}" if tag is None else tag
    is_snapshot = isinstance(client_state, snapshots.Prepared)
    client_state = client_state if is_snapshot else collect(engine, client_state)

    def write(folder: Any) -> Any:
        return original(engine, folder, tag, client_state, *args, **more)

    config, in_memory = get_config(engine), False
    if config is None or config.save is None:
        saved = write(save_dir)
    else:
        latest = bool(args[0] if args else more.get("save_latest", True))
        saved, in_memory = save_into_memory(
            engine, config, str(save_dir), str(tag), write, latest=latest, is_snapshot=is_snapshot
        )
        if not is_snapshot:
            snapshots.note_save(engine, str(save_dir), latest=latest)
    beacon.report_step(engine.global_steps)
    if not (in_memory or is_decoupled(engine)):
        seal_save(engine, save_dir, tag)
    return saved


def _commit_save(original: Callable[..., Any], engine: Any) -> Any:
    """Seal a save that DeepSpeed's writer process has finished some steps later."""
    save = engine.checkpoint_engine.get_commit_info()
    committed = original(engine)
    if save is not None:
        seal_save(engine, save.save_dir, save.tag)
    return committed


def _take_model_step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> None:
    """Take the optimizer's step, report it, then save if a signal or snapshot is due."""
    with beacon.phase("step"):
        if get_config(engine) is not None:
            finish_save(engine)  # a pipeline's step would change the tensors that are being written
        original(engine, *args, **kwargs)
    note_step(engine)
    schedule = getattr(engine, "lr_scheduler", None)
    beacon.report_step(engine.global_steps, getattr(schedule, "total_num_steps", None))
    seal_late(engine)
    save_if_signaled(engine)
    snapshots.end_step(engine)


@beacon.phase("train_batch")
def _train_batch(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the snapshot that is due before a pipeline's step begins on all its stages."""
    snapshots.begin_step(engine)
    return original(engine, *args, **kwargs)


def _call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


_forward, _backward = beacon.phase("forward")(_call), beacon.phase("backward")(_call)


@beacon.phase("load")
def _load_checkpoint(
    original: Callable[..., Any],
    engine: Any,
    load_dir: Any,
    tag: Any = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> tuple[str | None, dict[str, Any] | None]:
    """Resume, or call DeepSpeed's own load if the plugin is off.

    Raises:
        UcpError: the same on every rank. If nothing catches it, rank 0 prints it in full.
    """
    arguments: dict[str, Any] = {
        "load_module_strict": load_module_strict,
        "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
        "custom_load_fn": custom_load_fn,
    }
    config = get_config(engine)
    if config is not None:
        changed = {str(name): value for name, value in config.arguments.items() if arguments[name] != value}
        if changed and connect().rank == 0:
            changes = ", ".join(f"{name}={value}" for name, value in changed.items())
            logger.warning('load_checkpoint(%s): "%s": {"arguments": …} overrides its caller', changes, SECTION)
        arguments.update(changed)
    fallback = partial(original, engine, load_dir=load_dir, tag=tag, **arguments, **kwargs)
    try:
        return _load(engine, str(load_dir), tag, arguments, fallback, sorted(kwargs))
    except UcpError as error:
        if not error.shared:
            raise
        clear_frames(error)
        raise error.with_traceback(None) from find_fault(error)


def _load(
    engine: Any, load_dir: str, tag: Any, arguments: dict[str, Any], fallback: Callable[..., Any], unknown: list[str]
) -> tuple[str | None, dict[str, Any] | None]:
    config = get_config(engine)
    if config is None:
        path, client_state = load_without_plugin(engine, load_dir, tag, fallback)
    else:
        begin, load = time.monotonic(), partial(resume, engine, arguments=arguments, unknown=unknown)
        with connect() as comm:
            loaded = _load_from_memory(engine, load_dir, tag, config, load, fallback, comm)
            path, client_state = loaded or load(load_dir, tag, config=config.with_tiers(), deepspeed_load=fallback)
        if path is not None and engine.global_rank == 0:
            seconds = time.monotonic() - begin
            logger.info("%s: loaded in %.1f s, step %d", os.path.dirname(path), seconds, engine.global_steps)
    snapshots.note_load(engine)
    if client_state is not None:
        with guard_engine(engine, with_states=False):
            load_carried(engine, client_state, wanted=not arguments["load_module_only"], together=config is not None)
    return path, client_state


def _load_from_memory(
    engine: Any,
    load_dir: str,
    tag: Any,
    config: UniversalConfig,
    load: Callable[..., Any],
    fallback: Callable[..., Any],
    comm: Comm,
) -> Any:
    """Load a save in memory newer than the stored ones, else return None (collective).

    Damage that all ranks find before the engine has changed is a warning.
    """
    newest = find_in_memory(config, load_dir, tag, comm)
    if newest is None:
        return None
    if comm.rank == 0:
        logger.info("%s: taken from memory, tag %s of step %d: %s", load_dir, newest.tag, newest.step, newest.folder)
    fallback, broken_before = partial(fallback, load_dir=newest.folder, tag=newest.tag), find_state(engine).broken
    config = config.model_copy(update={"also": [*newest.copies, *config.also]})
    try:
        return load(newest.folder, newest.tag, config=config, deepspeed_load=fallback)
    except CheckpointError as error:
        if find_state(engine).broken is not broken_before or not comm.is_common(error):
            raise
        if comm.rank == 0:
            logger.warning("%s: the save in memory cannot be loaded: %s", load_dir, error)
        clear_frames(error)
        return None
