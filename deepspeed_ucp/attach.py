"""Attaches the hook to the classes of DeepSpeed, and of the trainers around it, as soon as they exist; no library is
imported for that.

Methods are wrapped at class level, functions in the module that calls them (:data:`TABLE`). The wrappers import what
takes their place when they are first called: by then the library and torch are there, whichever was imported first. A
trainer that runs without DeepSpeed never calls it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

logger = logging.getLogger("deepspeed_ucp")

_ENGINE = "deepspeed.runtime.engine"
"""The module whose import brings all of DeepSpeed's classes that are wrapped."""

_CONFIG, _PARTITIONS = "deepspeed.runtime.config", "deepspeed.runtime.zero.partition_parameters"
_PIPELINE, _BUILDER = "deepspeed.runtime.pipe.engine", "deepspeed.ops.op_builder.builder"


class Wrapped(NamedTuple):
    """What is wrapped, and with what.

    Attributes:
        after: module after whose import it is wrapped.
        module: where it is; ``after`` has imported it.
        name: of a method, as ``Class.method``, or of a function.
        room: module of this package that has what takes its place.
        replacement: a function there; called with the original, and what that is called with.
        newer: releases that we are for may lack it, and need nothing there; of anything else a warning tells.
    """

    after: str
    module: str
    name: str
    room: str
    replacement: str
    newer: bool = False


TABLE = [
    Wrapped(_ENGINE, _ENGINE, "DeepSpeedEngine.load_checkpoint", "hook", "_load_checkpoint"),
    Wrapped(_ENGINE, _CONFIG, "DeepSpeedConfig._configure_train_batch_size", "hook", "_configure_train_batch_size"),
    Wrapped(_ENGINE, _ENGINE, "DeepSpeedEngine._check_for_duplicates", "hook", "_check_for_duplicates"),
    Wrapped(_ENGINE, _ENGINE, "DeepSpeedEngine._configure_checkpointing", "hook", "_configure_checkpointing"),
    Wrapped(_ENGINE, _ENGINE, "DeepSpeedEngine.save_checkpoint", "hook", "_save_checkpoint"),
    Wrapped(_ENGINE, _ENGINE, "DeepSpeedEngine._commit_decoupled_checkpoint", "hook", "_commit_save", newer=True),
    Wrapped(_ENGINE, _ENGINE, "DeepSpeedEngine.forward", "hook", "_forward"),
    Wrapped(_ENGINE, _ENGINE, "DeepSpeedEngine.backward", "hook", "_backward"),
    Wrapped(_ENGINE, _ENGINE, "DeepSpeedEngine._take_model_step", "hook", "_take_model_step"),
    Wrapped(_PIPELINE, _PIPELINE, "PipelineEngine.train_batch", "hook", "_train_batch"),
    Wrapped(_BUILDER, _BUILDER, "OpBuilder.jit_load", "compiling", "jit_load", newer=True),
]
"""All that is wrapped, of DeepSpeed first."""

_HF, _ACCELERATE, _SCHEDULER = "transformers.trainer", "accelerate.accelerator", "accelerate.scheduler"
TABLE += [
    Wrapped(_HF, _HF, "Trainer.train", "trainers.huggingface", "train"),
    Wrapped(_HF, _HF, "Trainer._load_optimizer_and_scheduler", "trainers.huggingface", "load_scheduler"),
    Wrapped(_HF, _HF, "Trainer._save_optimizer_and_scheduler", "trainers.huggingface", "save_optimizer_and_scheduler"),
    Wrapped(_HF, _HF, "Trainer.compute_loss", "trainers.huggingface", "compute_loss"),
    Wrapped(_HF, _HF, "Trainer._inner_training_loop", "trainers.huggingface", "inner_training_loop"),
    Wrapped(_HF, _HF, "Trainer.set_initial_training_values", "trainers.huggingface", "set_initial_training_values"),
    Wrapped(_HF, _HF, "deepspeed_load_checkpoint", "trainers.huggingface", "load_engine"),
    Wrapped(_HF, _HF, "Trainer._load_rng_state", "trainers.huggingface", "load_rng_state"),
    Wrapped(_HF, _HF, "Trainer._finalize_training", "trainers.huggingface", "finalize_training", newer=True),
    Wrapped(_HF, _HF, "rotate_checkpoints", "trainers.huggingface", "rotate_checkpoints", newer=True),
    Wrapped(_ACCELERATE, _ACCELERATE, "Accelerator._prepare_deepspeed", "trainers.accelerating", "prepare_deepspeed"),
    Wrapped(_ACCELERATE, _ACCELERATE, "Accelerator.save_state", "trainers.accelerating", "save_state"),
    Wrapped(_ACCELERATE, _ACCELERATE, "Accelerator.load_state", "trainers.accelerating", "load_state"),
    Wrapped(_ACCELERATE, _SCHEDULER, "AcceleratedScheduler.step", "trainers.accelerating", "step_scheduler"),
]

_MEGATRON, _TRAINING = "megatron.checkpointing", "megatron.training"  # Megatron-DeepSpeed's
TABLE += [
    Wrapped(_MEGATRON, _MEGATRON, "load_checkpoint", "trainers.megatron", "load_checkpoint"),
    Wrapped(_TRAINING, _TRAINING, "_create_ds_config_dict", "trainers.megatron", "create_ds_config", newer=True),
]

for _package in ("lightning.pytorch", "pytorch_lightning"):
    _STRATEGY, _LOOP = f"{_package}.strategies.deepspeed", f"{_package}.loops.training_epoch_loop"
    _PRECISION = f"{_package}.plugins.precision.deepspeed"
    TABLE += [
        Wrapped(_STRATEGY, _STRATEGY, "DeepSpeedStrategy.load_checkpoint", "trainers.lightning", "load_checkpoint"),
        Wrapped(_STRATEGY, _STRATEGY, "DeepSpeedStrategy.save_checkpoint", "trainers.lightning", "save_checkpoint"),
        Wrapped(_STRATEGY, _STRATEGY, "DeepSpeedStrategy.remove_checkpoint", "trainers.lightning", "remove_checkpoint"),
        Wrapped(_STRATEGY, _STRATEGY, "DeepSpeedStrategy.teardown", "trainers.lightning", "teardown"),
        Wrapped(_PRECISION, _PRECISION, "DeepSpeedPrecision.backward", "trainers.lightning", "backward"),
        Wrapped(_LOOP, _LOOP, "_TrainingEpochLoop.on_run_start", "trainers.lightning", "on_run_start"),
    ]

_originals: dict[tuple[Any, str], Any] = {}
"""By owner (a class or a module) and name what was there itself; None where it was inherited."""

_settings: dict[str, Any] = {"default_on": None}

_lacking: set[Wrapped] = set()
"""Of what releases lack, that which a warning has told of."""


def install(*, default_on: bool | Mapping[str, Any] | None = None) -> None:
    """Import DeepSpeed and wrap its methods; a second call changes nothing but ``default_on``, if it is given.

    Args:
        default_on: engines whose ds_config says nothing have the plugin on (``ds_ucp run`` does that); with an object,
            with these options, which a ds_config's own say adds to.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    if default_on is not None:
        _settings["default_on"] = default_on
    _attach(importlib.import_module(_ENGINE))
    install_when_imported()


def install_when_imported() -> None:
    """Wrap now what libraries that have been imported hold of the table, else as soon as they are."""
    _finder.awake = True
    if _finder not in sys.meta_path:  # it stays: to remove it would make other threads' imports skip a finder
        sys.meta_path.insert(0, _finder)
    for name in dict.fromkeys(each.after for each in TABLE):
        if name not in sys.modules:
            continue
        module = importlib.import_module(name)  # of another thread's import this waits for the end
        if not getattr(module.__spec__, "_initializing", False):
            _attach(module)
        else:
            library = "DeepSpeed" if name == _ENGINE else name.partition(".")[0]
            logger.warning(
                f"deepspeed_ucp was imported by {library}'s own import: call deepspeed_ucp.install() after it."
            )


class _Finder:
    """Finds the table's modules as the other finders do, and attaches to each right after it has run."""

    def __init__(self) -> None:
        self.awake = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not self.awake or all(name != each.after for each in TABLE):
            return None
        finders = [each.find_spec for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        spec = next(filter(None, (find(name, path, target) for find in finders)), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute, spec.loader)  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def _execute(loader: Any, module: ModuleType) -> None:
    del loader.exec_module  # the class's own again
    loader.exec_module(module)
    if _finder.awake:
        _attach(module)


def uninstall() -> None:
    """Put back what libraries had themselves; those that have not been imported yet are left alone."""
    _finder.awake = False
    for (owner, name), original in _originals.items():
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _originals.clear()
    _settings["default_on"] = None


def get_default() -> bool | Mapping[str, Any] | None:
    """``default_on`` as :func:`install` was last given it."""
    return _settings["default_on"]  # type: ignore[no-any-return]


def _attach(module: ModuleType) -> None:
    for each in TABLE:
        if each.after == module.__name__:
            kind, _, name = each.name.rpartition(".")
            home = importlib.import_module(each.module)
            _wrap(getattr(home, kind, None) if kind else home, name, each)
    if module.__name__ == _ENGINE and not hasattr(module.DeepSpeedEngine, "ucp_report"):
        module.DeepSpeedEngine.ucp_report = None


def _wrap(owner: Any, name: str, wrapped: Wrapped) -> None:
    if (owner, name) in _originals:
        return
    if not hasattr(owner, name):
        if not wrapped.newer and wrapped not in _lacking:
            _lacking.add(wrapped)
            library = wrapped.after.partition(".")[0]
            logger.warning(
                f"this release of {library} has no {wrapped.name}, which deepspeed_ucp replaces: what it is for does "
                "not happen here. Take one of the releases that docs/trainers.md names."
            )
        return
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _ENGINE not in sys.modules:  # a trainer that runs without DeepSpeed is left alone
            return original(*args, **kwargs)
        room = importlib.import_module(f"{__package__}.{wrapped.room}")
        return getattr(room, wrapped.replacement)(original, *args, **kwargs)

    _originals[owner, name] = vars(owner).get(name)
    setattr(owner, name, wrapper)
