"""The hook: ``engine.load_checkpoint`` of engines that have the plugin on, and batch sizes at ``initialize``.

What runs in the place of DeepSpeed's methods (:mod:`deepspeed_ucp.attach`):
``DeepSpeedEngine.load_checkpoint``; ``DeepSpeedConfig._configure_train_batch_size``, which sees the ds_config with the
world size; ``DeepSpeedEngine._check_for_duplicates``, where the optimizer passes by as the user made it; the ends of a
save, after which a seal can be written; the ends of a step, at which a job that is to end saves.
"""

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
from .atoms import to_integer
from .attach import get_default
from .beacon.torchelastic import set_limit
from .comm import Comm, connect
from .config import ENVIRONMENT, SECTION, UniversalConfig, choose_batch, parse_config, read_environment
from .elastic_agent import end_with_agent
from .engine_state import collect, find_state, get_config, hand_out
from .errors import CheckpointError, UcpError, count_of, describe_changes, let_go
from .io.store import set_storage_options
from .load.context import LoadArguments
from .load.disabled import load_switched_off
from .load.resume import resume
from .patterns import from_config
from .preemption import save_if_signaled
from .saves.finding import find_in_memory
from .saves.saving import foresee_saves, save_into_memory
from .sealing import seal_last, seal_late, seal_save
from .targets.guard import guard_engine
from .uncaught import find_fault, shorten_uncaught
from .writer import finish_save, is_decoupled, protect_writer

logger = logging.getLogger("deepspeed_ucp")

FIRST_RELEASE, END_OF_RELEASES = (0, 16, 0), (0, 20, 0)
BROKEN_RELEASES = [(0, 18, 7), (0, 18, 8), (0, 18, 9)]
"""Releases of DeepSpeed, as ``setup.cfg`` has them."""


def show_decisions() -> None:
    """Let the plugin's INFO lines through, which tell who loads and why, unless the script has chosen a level."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [deepspeed_ucp] %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def read_options(ds_config: Mapping[str, Any]) -> UniversalConfig | None:
    """The plugin's options for an engine with this ds_config; None where it is off."""
    defaults = [read_environment(os.environ), ("deepspeed_ucp.install(default_on=…)", get_default())]
    return parse_config(ds_config, defaults)


def is_on_by_environment(ds_config: Mapping[str, Any]) -> bool:
    """Whether an engine would have the plugin off if it were not for the environment."""
    return parse_config(ds_config, [("", get_default())]) is None


def _configure_train_batch_size(original: Callable[..., Any], config: Any) -> None:
    """At ``initialize``: validate ``checkpoint.universal``, and make or refuse the batch size for this world."""
    end_with_agent()
    options = read_options(config._param_dict)
    config.ucp_config = options
    if options is not None:
        show_decisions()
        if config.global_rank == 0:
            warn_untested(sys.modules["deepspeed"].__version__)
            if is_on_by_environment(config._param_dict):
                _log_once(f"deepspeed_ucp is on by the environment variable {ENVIRONMENT}")
        shorten_uncaught()
        set_limit(options.hang_timeout_s)
        connect()  # from here on others that wait for this rank know that it lives
        from_config(options.patterns)  # what is wrong with them is told here, not hours later
        if options.storage_options is not None:
            set_storage_options(options.storage_options)
        _fit_batch_sizes(config, options)
    original(config)


@cache
def warn_untested(release: str) -> None:
    """Warn, once in a process, of a release of DeepSpeed outside of those that we are for."""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:3]))
    if not FIRST_RELEASE <= numbers < END_OF_RELEASES:
        fit = "is none that deepspeed_ucp is made for (0.16.0 to 0.19.x): loads may fail or lack state"
    elif numbers in BROKEN_RELEASES:
        fit = "cannot take a step at ZeRO 1 and 2: its flat buffers are still part of autograd's graph"
    else:
        return
    logger.warning("DeepSpeed %s %s. Take another release, or test yours with assert_resume_equivalent.", release, fit)


def _fit_batch_sizes(config: Any, options: UniversalConfig) -> None:
    given = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    train, micro, gas, world = map(to_integer, (*given, config.world_size))
    if not all(value is None or (isinstance(value, int) and value > 0) for value in (train, micro, gas, world)):
        return  # DeepSpeed's own messages are for these
    fit = choose_batch(train, micro, gas, world, preserve=options.preserve_batch_size)
    if fit is not None:
        config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps = fit
        changes = describe_changes(("micro batch", micro, fit[0]), ("gradient accumulation", gas, fit[1]))
        _log_once(f"train_batch_size {train} kept on {count_of(world, 'rank')}: {changes}")


@cache
def _log_once(text: str) -> None:
    """Once in a process: trainers make DeepSpeed's configuration several times."""
    logger.info("%s", text)


def _configure_checkpointing(original: Callable[..., Any], engine: Any, *args: Any) -> None:
    """At ``initialize``, once the optimizer exists: protect DeepSpeed's writer, and log the memory that saves take."""
    protect_writer(engine)
    original(engine, *args)
    config = get_config(engine)
    if config is not None and config.save is not None:
        foresee_saves(engine, config)


def _check_for_duplicates(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Note the user's param groups by name, before a wrapper flattens them: stage 0 saves refer to them by position."""
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
    """DeepSpeed's own save, with what the engine carries; the seal is written when all files are there, as
    ``checkpoint.universal.seal`` asks."""
    seal_last(engine)
    tag = f"global_step{engine.global_steps}" if tag is None else tag
    by_itself = isinstance(client_state, snapshots.Prepared)
    client_state = client_state if by_itself else collect(engine, client_state)

    more |= dict(zip(("save_latest", "exclude_frozen_parameters"), args, strict=False))

    def write(folder: Any) -> Any:
        return original(engine, folder, tag, client_state, **more)

    config, in_memory = get_config(engine), False
    if config is None or config.save is None:
        saved = write(save_dir)
    else:
        latest = bool(more.get("save_latest", True))
        saved, in_memory = save_into_memory(
            engine, config, str(save_dir), str(tag), write, latest=latest, by_itself=by_itself
        )
        if not by_itself:
            snapshots.note_save(engine, str(save_dir), latest=latest)
    beacon.report_step(engine.global_steps)
    if not (in_memory or is_decoupled(engine)):
        seal_save(engine, save_dir, tag)
    return saved


def _commit_save(original: Callable[..., Any], engine: Any) -> Any:
    """The end of a save by a writer of its own, some steps later."""
    save = engine.checkpoint_engine.get_commit_info()
    committed = original(engine)
    if save is not None:
        seal_save(engine, save.save_dir, save.tag)
    return committed


def _take_model_step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> None:
    """The optimizer's step, then a word to who watches, and a look at what the job has been told."""
    with beacon.phase("step"):
        if get_config(engine) is not None:
            finish_save(engine)  # a pipeline's step would change what is being written
        original(engine, *args, **kwargs)
    schedule = getattr(engine, "lr_scheduler", None)
    beacon.report_step(engine.global_steps, getattr(schedule, "total_num_steps", None))
    seal_late(engine)
    save_if_signaled(engine)
    snapshots.end_step(engine)


@beacon.phase("train_batch")
def _train_batch(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """A pipeline's step, which begins here for all of its stages."""
    snapshots.begin_step(engine)
    return original(engine, *args, **kwargs)


@beacon.phase("forward")
def _forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


@beacon.phase("backward")
def _backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


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
    """DeepSpeed's own load where the plugin is off, else a resume.

    Raises:
        UcpError: the same on every rank; where nothing catches it, the first rank prints it and the others a line each.
    """
    wanted: dict[str, Any] = {
        "load_module_strict": load_module_strict,
        "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
        "custom_load_fn": custom_load_fn,
    }
    config = get_config(engine)
    if config is not None:
        _overrule(wanted, config)
    own = partial(original, engine, load_dir=load_dir, tag=tag, **wanted, **kwargs)
    try:
        return _load(engine, str(load_dir), tag, wanted, own, sorted(kwargs))
    except UcpError as error:
        if not error.shared:
            raise
        let_go(error)
        raise error.with_traceback(None) from find_fault(error)


def _overrule(wanted: dict[str, Any], config: UniversalConfig) -> None:
    """Take the configuration's arguments in the place of the caller's, with a word."""
    changed = {str(name): value for name, value in config.arguments.items() if wanted[name] != value}
    if changed and connect().rank == 0:
        told = ", ".join(f"{name}={value}" for name, value in changed.items())
        logger.warning('load_checkpoint(%s), as "%s": {"arguments": …} says, not its caller', told, SECTION)
    wanted.update(changed)


def _load(
    engine: Any, load_dir: str, tag: Any, wanted: dict[str, Any], own: Callable[..., Any], unknown: list[str]
) -> tuple[str | None, dict[str, Any] | None]:
    config = get_config(engine)
    if config is None:
        path, client_state = load_switched_off(engine, load_dir, tag, own)
    else:
        arguments, begin = LoadArguments(**wanted), time.monotonic()
        with connect() as comm:
            found = _load_from_memory(engine, load_dir, tag, arguments, config, own, unknown, comm)
            everywhere = config.with_tiers()
            path, client_state = found or resume(engine, load_dir, tag, arguments, everywhere, own, unknown=unknown)
        if path is not None and engine.global_rank == 0:
            seconds = time.monotonic() - begin
            logger.info("%s: loaded in %.1f s, step %d", os.path.dirname(path), seconds, engine.global_steps)
    snapshots.note_load(engine)
    if client_state is not None:
        with guard_engine(engine, with_states=False):
            hand_out(engine, client_state, wanted=not wanted["load_module_only"], together=config is not None)
    return path, client_state


def _load_from_memory(
    engine: Any,
    load_dir: str,
    tag: Any,
    arguments: LoadArguments,
    config: UniversalConfig,
    own: Callable[..., Any],
    unknown: list[str],
    comm: Comm,
) -> Any:
    """Load what is newer in the nodes' memory than in its place; None where nothing is; collective.

    What all ranks find damaged there, before it has changed anything, is a warning.
    """
    found = find_in_memory(config, load_dir, tag, comm)
    if found is None:
        return None
    if comm.rank == 0:
        logger.info("%s: taken from memory, tag %s of step %d: %s", load_dir, found.tag, found.step, found.folder)
    own, marked = partial(own, load_dir=found.folder, tag=found.tag), find_state(engine).broken
    everywhere = config.model_copy(update={"also": [*found.copies, *config.also]})
    try:
        return resume(engine, found.folder, found.tag, arguments, everywhere, own, unknown=unknown)
    except CheckpointError as error:
        if find_state(engine).broken is not marked or (comm.size > 1 and not error.shared):
            raise
        if comm.rank == 0:
            logger.warning("%s: what memory holds cannot be loaded: %s", load_dir, error)
        let_go(error)
        return None
