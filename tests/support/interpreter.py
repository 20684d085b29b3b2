"""New interpreters on this checkout, and a stand-in for DeepSpeed in them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

FAKE = """
import sys, types, importlib.abc, importlib.machinery, threading, time

SOURCES = {
    "deepspeed": "import fake_hooks; fake_hooks.early(); from . import runtime; from .runtime import engine",
    "deepspeed.runtime": "",
    "deepspeed.runtime.config": "class DeepSpeedConfig:\\n    def _configure_train_batch_size(self): return 'own'",
    "deepspeed.runtime.engine": "import fake_hooks; from . import config; fake_hooks.inner()\\n"
        "class DeepSpeedEngine:\\n    def load_checkpoint(self): return 'own'\\n"
        "    def _check_for_duplicates(self): pass\\n    save_checkpoint = _take_model_step = load_checkpoint\\n"
        "    _configure_checkpointing = forward = backward = load_checkpoint\\n"
        "fake_hooks.late()",
}
hooks = sys.modules["fake_hooks"] = types.ModuleType("fake_hooks")
hooks.early = hooks.inner = hooks.late = lambda: None

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name in SOURCES:
            package = name in ("library", "deepspeed", "deepspeed.runtime")
            return importlib.machinery.ModuleSpec(name, self, is_package=package)
    def exec_module(self, module):
        exec(SOURCES[module.__name__], module.__dict__)

sys.meta_path.insert(0, Finder())

def show():
    engine = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    config = sys.modules["deepspeed.runtime.config"].DeepSpeedConfig
    methods = engine.load_checkpoint, config._configure_train_batch_size
    print([hasattr(method, "__wrapped__") for method in methods], getattr(engine, "ucp_report", "absent"))
"""
"""Code that replaces DeepSpeed, which takes seconds to import."""


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the settings of the plugin and of torchrun; check that it succeeds."""
    settings = ("DEEPSPEED_UCP", "TORCHELASTIC")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done
