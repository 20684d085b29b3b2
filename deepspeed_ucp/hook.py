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
from dataclasses import dataclass
from functools import cache, partial
from types import TracebackType
from typing import Any

from .attach import get_default
from .comm import Comm, connect, is_shared
from .config import SECTION, UniversalConfig, choose_batch, parse_config, read_environment
from .engine_state import collect, hand_out
from .errors import CheckpointError, RemoteError, UcpError, count_of, describe_changes
from .heartbeat import report_step
from .io.paths import is_url
from .io.store import begin_reading, end_reading, set_storage_options
from .load.context import LoadArguments
from .load.disabled import load_switched_off
from .load.resume import resume
from .patterns import from_config
from .preemption import end_step
from .sources.open import lacks_states, seal_folder
from .sources.seal import remove_seal
from .targets.coverage import writes_states
from .targets.guard import guard_engine
from .writer import find_other_writer, finish_save, is_decoupled

logger = logging.getLogger("deepspeed_ucp")

_SHOWN = 160
"""Characters of an error on ranks that do not tell it in full."""

_HEAD_START = 0.5
"""Seconds that these wait before they end: a launcher then ends the others, of which the first is to have its say."""


FIRST_RELEASE, END_OF_RELEASES = (0, 16, 0), (0, 20, 0)
BROKEN_RELEASES = [(0, 18, 7), (0, 18, 8), (0, 18, 9)]
"""Releases of DeepSpeed, as ``setup.cfg`` has them."""


def get_config(engine: Any) -> UniversalConfig | None:
    """The plugin's options for an engine; None where it is off."""
    return getattr(engine._config, "ucp_config", None)


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


def _configure_train_batch_size(original: Callable[..., Any], config: Any) -> None:
    """At ``initialize``: validate ``checkpoint.universal``, and make or refuse the batch size for this world."""
    options = read_options(config._param_dict)
    config.ucp_config = options
    if options is not None:
        show_decisions()
        if config.global_rank == 0:
            tell_untested(sys.modules["deepspeed"].__version__)
        shorten_uncaught()
        connect()  # from here on others that wait for this rank know that it lives
        from_config(options.patterns)  # what is wrong with them is told here, not hours later
        if options.storage_options is not None:
            set_storage_options(options.storage_options)
        begin_reading(options.also)
        _fit_batch_sizes(config, options)
    original(config)


@cache
def tell_untested(release: str) -> None:
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
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    gas, world = config.gradient_accumulation_steps, config.world_size
    if not all(value is None or (isinstance(value, int) and value > 0) for value in (train, micro, gas)):
        return  # DeepSpeed's own messages are for these
    fit = choose_batch(train, micro, gas, world, preserve=options.preserve_batch_size)
    if fit is not None:
        config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps = fit
        changes = describe_changes(("micro batch", micro, fit[0]), ("gradient accumulation", gas, fit[1]))
        _tell_once(f"train_batch_size {train} kept on {count_of(world, 'rank')}: {changes}")


@cache
def _tell_once(text: str) -> None:
    """Once in a process: trainers make DeepSpeed's configuration several times."""
    logger.info("%s", text)


def _check_for_duplicates(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Note the user's param groups by name, before a wrapper flattens them: stage 0 saves refer to them by position."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    groups = [[names.get(id(param)) for param in group["params"]] for group in optimizer.param_groups]
    if all(name is not None for group in groups for name in group):
        engine._ucp_param_groups = groups
    return original(engine, optimizer)


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
    if (unsealed := getattr(engine, _UNSEALED, None)) is not None:
        _seal(engine, unsealed, is_last=True)
    saved = original(engine, save_dir, tag, collect(engine, client_state), *args, **more)
    report_step(engine.global_steps)
    if not is_decoupled(engine):
        seal_save(engine, save_dir, f"global_step{engine.global_steps}" if tag is None else tag)
    return saved


def _commit_decoupled_checkpoint(original: Callable[..., Any], engine: Any) -> Any:
    """The end of a save by a writer of its own, some steps later."""
    save = engine.checkpoint_engine.get_commit_info()
    committed = original(engine)
    if save is not None:
        seal_save(engine, save.save_dir, save.tag)
    return committed


def seal_save(engine: Any, save_dir: Any, tag: Any) -> None:
    """Write the seal of a save, or remove that of an earlier save under its tag; collective.

    The save is done by now: whatever keeps it from being sealed is a warning.
    """
    config = get_config(engine)
    if config is None:
        return
    comm, folder = connect(), os.path.join(str(save_dir), str(tag))
    if comm.rank == 0 and not is_url(str(save_dir)) and writes_states(engine) and lacks_states(folder):
        logger.warning(
            "%s: this DeepSpeed has saved no optimizer states, as releases 0.17.6 to 0.18.4 do in bf16 without "
            "ZeRO or with fp32 gradients: training cannot go on from it. Save at ZeRO stage 1, or with another release",
            folder,
        )
    if is_url(str(save_dir)):  # what lies behind it is another save
        if comm.rank == 0:
            told = "%s: DeepSpeed saves to local folders alone; it has made %s, which no load from the URL finds"
            logger.warning(told, save_dir, os.path.abspath(folder))
        return
    local = engine.use_node_local_storage()
    try:
        comm.run(lambda: remove_seal(folder) if comm.rank == 0 or local else None)
    except (UcpError, OSError) as error:
        _tell_unsealed(folder, comm, str(error))
    else:
        if config.seal:
            _seal(engine, _Unsealed(folder, local))


@dataclass
class _Unsealed:
    """A save that is to be sealed.

    Attributes:
        local: every node has a folder of its own.
        writer: what writes its files after the save has ended; empty where they are all to be there.
        steps: that have been taken since.
    """

    folder: str
    local: bool
    writer: str = ""
    steps: int = 0


_UNSEALED = "_ucp_unsealed"
"""Attribute of an engine: its last save, while what is no writer of DeepSpeed's still writes it."""


def _seal(engine: Any, save: _Unsealed, *, is_last: bool = False) -> None:
    """Seal a save, or have the coming steps try again where its files are still being written; collective.

    Args:
        is_last: it is not tried again.
    """
    comm = connect()
    setattr(engine, _UNSEALED, None)
    try:
        seal_folder(save.folder, comm, local=save.local)
    except (UcpError, OSError) as error:
        save.writer = save.writer or find_other_writer(engine)
        if not save.writer or is_last or not (isinstance(error, CheckpointError) and is_shared(error)):
            late = f"{save.writer} writes it, and had not ended by now: " if save.writer else ""
            _tell_unsealed(save.folder, comm, f"{late}{error}")
            return
        setattr(engine, _UNSEALED, save)
        if not save.steps:
            told = f"{save.writer} writes its files after the save. The step that finds all of them seals it."
            _tell_unsealed(save.folder, comm, told)


def _tell_unsealed(folder: str, comm: Comm, why: str) -> None:
    if comm.rank == 0:
        logger.warning("%s: is not sealed: %s", folder, why)


def _seal_late(engine: Any) -> None:
    """At the end of a step: seal a save whose files came after it; tried at longer and longer intervals; collective."""
    save: _Unsealed | None = getattr(engine, _UNSEALED, None)
    if save is not None:
        save.steps += 1
        if save.steps & (save.steps - 1) == 0:
            _seal(engine, save)


def _take_model_step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> None:
    """The optimizer's step, then a word to who watches, and a look at what the job has been told."""
    if get_config(engine) is not None:
        finish_save(engine)  # a pipeline's step would change what is being written
    original(engine, *args, **kwargs)
    report_step(engine.global_steps)
    _seal_late(engine)
    end_step(engine)


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
        raise error.with_traceback(None) from find_fault(error)


def _overrule(wanted: dict[str, Any], config: UniversalConfig) -> None:
    """Take the configuration's arguments in the place of the caller's, with a word."""
    changed = {str(name): value for name, value in config.arguments.items() if wanted[name] != value}
    if changed and connect().rank == 0:
        told = ", ".join(f"{name}={value}" for name, value in changed.items())
        logger.warning('load_checkpoint(%s), as "%s": {"arguments": …} says, not its caller', told, SECTION)
    wanted.update(changed)


def find_fault(error: UcpError) -> BaseException | None:
    """What an error was raised from that was not raised on purpose; of others the text says all, and no trace more."""
    cause: BaseException | None = error if isinstance(error, RemoteError) else None
    while isinstance(cause, UcpError):
        cause = cause.__cause__
    return cause


def shorten_uncaught() -> None:
    """Let what ends this process be one line, where it is an error that another rank tells in full."""
    if getattr(sys.excepthook, "func", None) is not _report_uncaught:
        sys.excepthook = partial(_report_uncaught, sys.excepthook)


def _report_uncaught(
    former: Callable[..., object], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if isinstance(error, UcpError) and error.shared:
        error.__cause__ = find_fault(error)
    if isinstance(error, UcpError) and error.echo and error.__cause__ is None:
        text = str(error).partition("\n")[0]
        error, trace = kind(f"{text[:_SHOWN]}{'…' * (len(text) > _SHOWN)} (all of it on rank 0)"), None
        time.sleep(_HEAD_START)
    former(kind, error, trace)


def _load(
    engine: Any, load_dir: str, tag: Any, wanted: dict[str, Any], own: Callable[..., Any], unknown: list[str]
) -> tuple[str | None, dict[str, Any] | None]:
    config = get_config(engine)
    if config is None:
        path, client_state = load_switched_off(engine, load_dir, tag, own)
    else:
        arguments, begin = LoadArguments(**wanted), time.monotonic()
        try:
            with connect():
                path, client_state = resume(engine, load_dir, tag, arguments, config, own, unknown=unknown)
        finally:
            end_reading()
        if path is not None and engine.global_rank == 0:
            seconds = time.monotonic() - begin
            logger.info("%s: loaded in %.1f s, step %d", os.path.dirname(path), seconds, engine.global_steps)
    if client_state is not None:
        with guard_engine(engine, with_states=False):
            hand_out(engine, client_state, wanted=not wanted["load_module_only"], together=config is not None)
    return path, client_state
