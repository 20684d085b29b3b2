"""The hook: ``engine.load_checkpoint`` of engines that have the plugin on, and batch sizes at ``initialize``.

What runs in the place of three methods of DeepSpeed (:mod:`deepspeed_ucp.attach`):
``DeepSpeedEngine.load_checkpoint``; ``DeepSpeedConfig._configure_train_batch_size``, which sees the ds_config with the
world size; ``DeepSpeedEngine._check_for_duplicates``, where the optimizer passes by as the user made it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .atoms import AtomicIndex
from .attach import install, is_default_on, is_installed, uninstall
from .collection import pause_collection
from .comm import Comm, connect
from .config import UniversalConfig, adapt_batch, check_batch, fit_batch, parse_config
from .convert import ConvertOptions, ConvertReport, convert_index, default_destination
from .errors import CheckpointError, UcpError, UnsupportedError
from .load import (
    LoadArguments,
    LoadReport,
    has_masters,
    join_groups,
    list_live_rules,
    load_direct,
    read_rules,
    take_census,
)
from .patterns import RuleSet
from .sources import check_tag, open_checkpoint, read_latest
from .targets import Target, open_target
from .targets.finish import refresh_untied_copies
from .topology import ATOMIC, find_differences

logger = logging.getLogger("deepspeed_ucp")


def get_config(engine: Any) -> UniversalConfig | None:
    """The plugin's options for an engine; None where it is off."""
    return getattr(engine._config, "ucp_config", None)


def _configure_train_batch_size(original: Callable[..., Any], config: Any) -> None:
    """At ``initialize``: validate ``checkpoint.universal``, and make or refuse the batch size for this world."""
    options = parse_config(config._param_dict, is_default_on())
    config.ucp_config = options
    if options is not None:
        read_rules(options.patterns)  # what is wrong with them is told here, not hours later
        _fit_batch_sizes(config, options)
    original(config)


def _fit_batch_sizes(config: Any, options: UniversalConfig) -> None:
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    gas, world = config.gradient_accumulation_steps, config.world_size
    if not all(value is None or (isinstance(value, int) and value > 0) for value in (train, micro, gas)):
        return  # DeepSpeed's own messages are for these
    if train is not None and options.preserve_batch_size and not fit_batch(train, micro, gas, world):
        fit = adapt_batch(train, micro, world)
        if fit is not None:
            config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps = fit
            logger.info(
                "train_batch_size %d kept on %d ranks: micro batch %s → %d, gradient accumulation %s → %d",
                *(train, world, micro, fit[0], gas, fit[1]),
            )
            return
    check_batch(train, micro, gas, world)


def _check_for_duplicates(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Note the user's param groups by name, before a wrapper flattens them: stage 0 saves refer to them by position."""
    names = {id(param): name for name, param in engine.module.named_parameters()}
    groups = [[names.get(id(param)) for param in group["params"]] for group in optimizer.param_groups]
    if all(name is not None for group in groups for name in group):
        engine._ucp_param_groups = groups
    return original(engine, optimizer)


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
    """DeepSpeed's own load where the topology is the same (or the plugin off), else ours."""
    arguments: dict[str, Any] = {
        "load_module_strict": load_module_strict,
        "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
        "custom_load_fn": custom_load_fn,
    }
    config = get_config(engine)
    if config is None:
        return original(engine, load_dir, tag=tag, **arguments, **kwargs)  # type: ignore[no-any-return]
    comm = connect()
    report = LoadReport(direct=False, reason="")
    engine.ucp_report = report
    found = _find_tag(str(load_dir), tag, comm)
    if found is None:
        report.reason = "nothing to resume"
        if comm.rank == 0:
            logger.info("%s: holds no checkpoint yet, nothing to resume", load_dir)
        return original(engine, load_dir, tag=tag, **arguments, **kwargs)  # type: ignore[no-any-return]
    folder = os.path.join(str(load_dir), found)
    with report.phase("index"), pause_collection():
        wanted = LoadArguments(**arguments)
        choice = _decide(engine, folder, comm, wanted)
    report.reason = choice.reason
    report.direct = choice.index is not None
    if comm.rank == 0:
        logger.info("%s: %s loads it, %s", folder, "deepspeed_ucp" if report.direct else "DeepSpeed", choice.reason)
    if choice.index is None or choice.target is None:
        result = original(engine, load_dir, tag=tag, **arguments, **kwargs)
        if choice.target is not None and wanted.with_states:
            refresh_untied_copies(choice.target)
        return result  # type: ignore[no-any-return]
    if kwargs:
        raise UnsupportedError(f"load_checkpoint got arguments that this release does not know: {sorted(kwargs)}.")
    index = choice.index
    # Without its optimizer an index is no whole checkpoint: a look at the weights leaves nothing behind.
    if config.mode == "atomic" and index.topology.wrapper != ATOMIC and wanted.with_states:
        with report.phase("convert"):
            index, report.converted = _convert_first(index, choice.target, folder, comm, config)
    client = _run_direct(engine, index, choice.target, comm, config, wanted, report)
    return index.state_file, client


def _convert_first(
    index: AtomicIndex, target: Target, folder: str, comm: Comm, config: UniversalConfig
) -> tuple[AtomicIndex, ConvertReport]:
    """Mode "atomic": write an atomic checkpoint with all ranks, or take the one that is there; collective."""
    rules = read_rules(config.patterns)
    census = take_census(target, (), comm)
    live: list[RuleSet] = []
    with comm.together():
        live = list_live_rules(index, census, rules)
    parent, tag = os.path.split(os.path.abspath(folder))
    destination = default_destination(os.path.join(config.atomic_dir or parent, tag))
    options = ConvertOptions(
        workers=config.threads, window=config.window_mb << 20, verify=config.verify == "crc", refresh=True
    )
    converted = convert_index(index, folder, destination, comm, options, rules=rules, live=live)
    if comm.rank == 0:
        logger.info("%s: %s", destination, "taken as it is" if converted.reused else f"{converted.atoms} atoms written")
    return open_checkpoint(destination, comm), converted


def _find_tag(load_dir: str, tag: Any, comm: Comm) -> str | None:
    """The tag that every rank sees; None where nothing was saved yet."""
    found: str | None = None
    with comm.together():
        found = read_latest(load_dir) if tag is None else str(tag)
        if found is not None:
            check_tag(load_dir, found)
    tags = comm.gather(found)
    with comm.together():
        if len(set(tags)) > 1:
            told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(tags) if value != tags[0])
            raise CheckpointError(
                f"{load_dir}: ranks see different checkpoints (rank 0: {tags[0]}, {told}). Every node needs the same "
                "folder: use a shared file system, or copy it to every node."
            )
    return found


class _Choice:
    """Who loads, and why: without an index DeepSpeed does."""

    def __init__(self, reason: str, index: AtomicIndex | None = None, target: Target | None = None) -> None:
        self.reason, self.index, self.target = reason, index, target


def _decide(engine: Any, folder: str, comm: Comm, arguments: LoadArguments) -> _Choice:
    """Compare the checkpoint's topology with the engine's, from headers only; collective.

    Engines that this package does not cover are left to DeepSpeed's own load.
    """
    if engine.use_node_local_storage():
        return _Choice("every node keeps its own files (use_node_local_storage): DeepSpeed's own load only")
    target: Target | None = None
    fault: UnsupportedError | None = None
    with comm.together():
        try:
            target = open_target(engine)
        except UnsupportedError as error:
            fault = error
    if target is None:
        return _Choice(f"the engine is not covered ({fault})")
    masters = has_masters(target, comm)
    live = join_groups(target, comm)
    index = open_checkpoint(
        folder,
        comm,
        live.names,
        live.hyper,
        weights_only=not (arguments.with_states and masters),
    )
    differences: list[str] = []
    with comm.together():
        flats = index.flats.get(target.place.mp_rank, ())
        differences = find_differences(replace(index.topology, flats=flats), target.topology)
    everyone = [text for part in comm.gather(differences) for text in part]
    if not everyone:
        return _Choice(f"same topology ({index.topology.describe()})", target=target)
    told = "; ".join(dict.fromkeys(everyone))
    return _Choice(f"{index.topology.describe()} → {target.topology.describe()}: {told}", index, target)


def _run_direct(
    engine: Any,
    index: AtomicIndex,
    target: Target,
    comm: Comm,
    config: UniversalConfig,
    arguments: LoadArguments,
    report: LoadReport,
) -> dict[str, Any]:
    if engine._optimizer_has_ckpt_event_prologue():
        engine.optimizer.checkpoint_event_prologue()
    target.prepare()
    try:
        return load_direct(engine, index, target, comm, config, arguments, report)
    finally:
        if engine._optimizer_has_ckpt_event_epilogue():
            engine.optimizer.checkpoint_event_epilogue()


__all__ = ["UcpError", "get_config", "install", "is_installed", "uninstall"]
