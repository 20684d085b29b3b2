"""Wrap methods of DeepSpeed and trainers when their modules are imported.

Methods are wrapped in their class, functions in the module that calls them (:data:`TABLE`). A wrapper imports its
replacement at its first call. A trainer that runs without DeepSpeed is left alone.
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
"""Its import defines all wrapped classes of DeepSpeed."""

_CONFIG, _PIPELINE = "deepspeed.runtime.config", "deepspeed.runtime.pipe.engine"
_BUILDER = "deepspeed.ops.op_builder.builder"


class Wrapped(NamedTuple):
    """One method or function that is wrapped.

    Attributes:
        module: it is wrapped after the import of this module, in which it is found by its name.
        name: ``Class.method``, or a function.
        wrapper_module: module of this package that has the replacement.
        replacement: function there, called with the original and its arguments.
        newer: older supported releases lack it and do not need it; else a warning is logged if it is missing.
        home: the module that has the name instead, which ``module`` imports.
    """

    module: str
    name: str
    wrapper_module: str
    replacement: str
    newer: bool = False
    home: str = ""


TABLE = [
    Wrapped(_ENGINE, "DeepSpeedEngine.load_checkpoint", "hook", "_load_checkpoint"),
    Wrapped(
        _ENGINE, "DeepSpeedConfig._configure_train_batch_size", "hook", "_configure_train_batch_size", home=_CONFIG
    ),
    Wrapped(_ENGINE, "DeepSpeedEngine._check_for_duplicates", "hook", "_check_for_duplicates"),
    Wrapped(_ENGINE, "DeepSpeedEngine._configure_checkpointing", "hook", "_configure_checkpointing"),
    Wrapped(_ENGINE, "DeepSpeedEngine.save_checkpoint", "hook", "_save_checkpoint"),
    Wrapped(_ENGINE, "DeepSpeedEngine._commit_decoupled_checkpoint", "hook", "_commit_save", newer=True),
    Wrapped(_ENGINE, "DeepSpeedEngine.forward", "hook", "_forward"),
    Wrapped(_ENGINE, "DeepSpeedEngine.backward", "hook", "_backward"),
    Wrapped(_ENGINE, "DeepSpeedEngine._take_model_step", "hook", "_take_model_step"),
    Wrapped(_PIPELINE, "PipelineEngine.train_batch", "hook", "_train_batch"),
    Wrapped(_BUILDER, "OpBuilder.jit_load", "compiling", "jit_load", newer=True),
]
"""All wrapped methods and functions, DeepSpeed's first."""

_HF, _ACCELERATE = "transformers.trainer", "accelerate.accelerator"
TABLE += [
    Wrapped(_HF, "Trainer.train", "trainers.huggingface", "train"),
    Wrapped(_HF, "Trainer._load_optimizer_and_scheduler", "trainers.huggingface", "load_scheduler"),
    Wrapped(_HF, "Trainer._save_optimizer_and_scheduler", "trainers.huggingface", "save_optimizer_and_scheduler"),
    Wrapped(_HF, "Trainer.compute_loss", "trainers.huggingface", "compute_loss"),
    Wrapped(_HF, "Trainer._inner_training_loop", "trainers.huggingface", "inner_training_loop"),
    Wrapped(_HF, "Trainer.set_initial_training_values", "trainers.huggingface", "set_initial_training_values"),
    Wrapped(_HF, "deepspeed_load_checkpoint", "trainers.huggingface", "load_engine"),
    Wrapped(_HF, "Trainer._load_rng_state", "trainers.huggingface", "load_rng_state"),
    Wrapped(_HF, "Trainer._finalize_training", "trainers.huggingface", "finalize_training", newer=True),
    Wrapped(_HF, "rotate_checkpoints", "trainers.huggingface", "rotate_checkpoints", newer=True),
    Wrapped(_ACCELERATE, "Accelerator._prepare_deepspeed", "trainers.accelerating", "prepare_deepspeed"),
    Wrapped(_ACCELERATE, "Accelerator.prepare_data_loader", "trainers.accelerating", "prepare_data_loader"),
    Wrapped(_ACCELERATE, "Accelerator.save_state", "trainers.accelerating", "save_state"),
    Wrapped(_ACCELERATE, "Accelerator.load_state", "trainers.accelerating", "load_state"),
    Wrapped(_ACCELERATE, "AcceleratedScheduler.step", "trainers.accelerating", "step_scheduler"),
]

_MEGATRON, _TRAINING = "megatron.checkpointing", "megatron.training"  # Megatron-DeepSpeed's
TABLE += [
    Wrapped(_MEGATRON, "load_checkpoint", "trainers.megatron", "load_checkpoint"),
    Wrapped(_TRAINING, "_create_ds_config_dict", "trainers.megatron", "create_ds_config", newer=True),
]

for _package, _fabric in (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")):
    _STRATEGY, _LOOP = f"{_package}.strategies.deepspeed", f"{_package}.loops.training_epoch_loop"
    _FABRIC = f"{_fabric}.fabric"
    _PRECISION = f"{_package}.plugins.precision.deepspeed"
    TABLE += [
        Wrapped(_STRATEGY, "DeepSpeedStrategy.load_checkpoint", "trainers.lightning", "load_checkpoint"),
        Wrapped(_STRATEGY, "DeepSpeedStrategy.save_checkpoint", "trainers.lightning", "save_checkpoint"),
        Wrapped(_STRATEGY, "DeepSpeedStrategy.remove_checkpoint", "trainers.lightning", "remove_checkpoint"),
        Wrapped(_STRATEGY, "DeepSpeedStrategy.teardown", "trainers.lightning", "teardown"),
        Wrapped(_PRECISION, "DeepSpeedPrecision.backward", "trainers.lightning", "backward"),
        Wrapped(_LOOP, "_TrainingEpochLoop.on_run_start", "trainers.lightning", "on_run_start"),
        Wrapped(_FABRIC, "Fabric._setup_dataloader", "trainers.lightning", "setup_dataloader"),
    ]

_originals: dict[tuple[Any, str], Any] = {}
"""(class or module, name) → wrapped method or function; None if the class inherited it."""

_settings: dict[str, Any] = {"default_on": None}

_reported_missing: set[Wrapped] = set()


def install(*, default_on: bool | Mapping[str, Any] | None = None) -> None:
    """Import DeepSpeed and wrap its methods; repeated calls only set ``default_on``.

    Args:
        default_on: True, or a mapping of options, turns the plugin on for engines whose ds_config does not mention it.
            Options in a ds_config take precedence.

    Raises:
        ImportError: DeepSpeed is not installed.

    Example:
        >>> deepspeed_ucp.install(default_on={"fallback": True})
        >>> engine, *_ = deepspeed.initialize(model=model, config=ds_config)
    """
    if default_on is not None:
        _settings["default_on"] = default_on
    _wrap_methods(importlib.import_module(_ENGINE))
    install_when_imported()


def install_when_imported() -> None:
    """Wrap methods of imported libraries now, of others right after their import."""
    _finder.awake = True
    if _finder not in sys.meta_path:  # never removed: another thread's import would skip a finder
        sys.meta_path.insert(0, _finder)
    for name in dict.fromkeys(wrapped.module for wrapped in TABLE):
        if name not in sys.modules:
            continue
        module = importlib.import_module(name)  # waits for an import in another thread
        if not getattr(module.__spec__, "_initializing", False):
            _wrap_methods(module)
        else:
            library = "DeepSpeed" if name == _ENGINE else name.partition(".")[0]
            logger.warning(
                f"deepspeed_ucp was imported by the import of {library}: call deepspeed_ucp.install() after it."
            )


class _Finder:
    """Import finder that wraps the methods of the table's modules after execution."""

    def __init__(self) -> None:
        self.awake = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not self.awake or all(name != wrapped.module for wrapped in TABLE):
            return None
        finders = [finder.find_spec for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (find(name, path, target) for find in finders)), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute_and_wrap, spec.loader)  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def _execute_and_wrap(loader: Any, module: ModuleType) -> None:
    del loader.exec_module  # uncovers the method of its class
    loader.exec_module(module)
    if _finder.awake:
        _wrap_methods(module)


def uninstall() -> None:
    """Restore the wrapped methods, and wrap no further libraries."""
    _finder.awake = False
    for (owner, name), original in _originals.items():
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _originals.clear()
    _settings["default_on"] = None


def get_default() -> bool | Mapping[str, Any] | None:
    """Return the last ``default_on`` given to :func:`install`; None without one."""
    return _settings["default_on"]  # type: ignore[no-any-return]


def _wrap_methods(module: ModuleType) -> None:
    for wrapped in TABLE:
        if wrapped.module == module.__name__:
            kind, _, name = wrapped.name.rpartition(".")
            home = importlib.import_module(wrapped.home) if wrapped.home else module
            _wrap_method(getattr(home, kind, None) if kind else home, name, wrapped)
    if module.__name__ == _ENGINE and not hasattr(module.DeepSpeedEngine, "ucp_report"):
        module.DeepSpeedEngine.ucp_report = None


def _wrap_method(owner: Any, name: str, wrapped: Wrapped) -> None:
    if (owner, name) in _originals:
        return
    if not hasattr(owner, name):
        if not wrapped.newer and wrapped not in _reported_missing:
            _reported_missing.add(wrapped)
            library = wrapped.module.partition(".")[0]
            logger.warning(
                f"this release of {library} has no {wrapped.name}, which deepspeed_ucp replaces: a resume may lose "
                "state. Use a release listed in docs/trainers.md."
            )
        return
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _ENGINE not in sys.modules:  # a trainer without DeepSpeed
            return original(*args, **kwargs)
        wrappers = importlib.import_module(f"{__package__}.{wrapped.wrapper_module}")
        return getattr(wrappers, wrapped.replacement)(original, *args, **kwargs)

    _originals[owner, name] = vars(owner).get(name)
    setattr(owner, name, wrapper)
