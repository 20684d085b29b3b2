"""Attaches the hook to DeepSpeed's classes as soon as they exist; DeepSpeed itself is not imported for that.

Methods are wrapped at class level (:mod:`deepspeed_ucp.hook`). The wrappers import the hook when they are first
called: by then DeepSpeed and torch are there, whichever was imported first.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger("deepspeed_ucp")

_ENGINE = "deepspeed.runtime.engine"
"""The module whose import brings all classes that are wrapped."""

_METHODS = (
    (_ENGINE, "DeepSpeedEngine", "load_checkpoint", "_load_checkpoint"),
    ("deepspeed.runtime.config", "DeepSpeedConfig", "_configure_train_batch_size", "_configure_train_batch_size"),
    (_ENGINE, "DeepSpeedEngine", "_check_for_duplicates", "_check_for_duplicates"),
    (_ENGINE, "DeepSpeedEngine", "save_checkpoint", "_save_checkpoint"),
    (_ENGINE, "DeepSpeedEngine", "_commit_decoupled_checkpoint", "_commit_decoupled_checkpoint"),
    (_ENGINE, "DeepSpeedEngine", "_take_model_step", "_take_model_step"),
)
"""Module, class, method, and the hook's function that takes its place."""

_originals: dict[tuple[type, str], Callable[..., Any]] = {}
_settings = {"default_on": False}


def install(*, default_on: bool | None = None) -> None:
    """Import DeepSpeed and wrap its methods; a second call changes nothing but ``default_on``, if it is given.

    Args:
        default_on: engines whose ds_config says nothing have the plugin on (``ds_ucp run`` does that).

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    if default_on is not None:
        _settings["default_on"] = default_on
    _attach(importlib.import_module(_ENGINE))


def install_when_imported() -> None:
    """Wrap DeepSpeed's methods now if it has been imported, else as soon as it is."""
    module = sys.modules.get(_ENGINE)
    if module is None:
        _watcher.awake = True
        if _watcher not in sys.meta_path:  # it stays: to remove it would make other threads' imports skip a finder
            sys.meta_path.insert(0, _watcher)
    elif _is_initializing(importlib.import_module(_ENGINE)):  # another thread's import has ended here, our own has not
        logger.warning("deepspeed_ucp was imported by DeepSpeed's own import: call deepspeed_ucp.install() after it.")
    else:
        _attach(module)


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


class _Watcher:
    """Finds the engine's module as the other finders do, and attaches to it right after it has run."""

    def __init__(self) -> None:
        self.awake = False

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name != _ENGINE or not self.awake:
            return None
        self.awake = False
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.awake = True
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_execute, spec.loader)  # type: ignore[method-assign]
        return spec


_watcher = _Watcher()


def _execute(loader: Any, module: ModuleType) -> None:
    del loader.exec_module  # the class's own again
    loader.exec_module(module)
    if _watcher.awake:
        _attach(module)


def uninstall() -> None:
    """Put DeepSpeed's own methods back; if it has not been imported yet, leave it alone."""
    _watcher.awake = False
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
    _settings["default_on"] = False


def is_default_on() -> bool:
    """Whether engines whose ds_config says nothing have the plugin on."""
    return _settings["default_on"]


def _attach(module: ModuleType) -> None:
    for home, owner, name, replacement in _METHODS:
        _wrap(getattr(importlib.import_module(home), owner), name, replacement)
    if not hasattr(module.DeepSpeedEngine, "ucp_report"):
        module.DeepSpeedEngine.ucp_report = None


def _wrap(owner: type, name: str, replacement: str) -> None:
    if (owner, name) in _originals or not hasattr(owner, name):
        return
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = importlib.import_module(f"{__package__}.hook")
        return getattr(hook, replacement)(original, self, *args, **kwargs)

    _originals[owner, name] = original
    setattr(owner, name, wrapper)
