"""A nursery with a folder of scripts, which run as ranks: by themselves, or forked from its template."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed_ucp.warm import handover
from deepspeed_ucp.warm.nursery import Nursery, Recipe
from tests.support.until import wait_until

ROOT = Path(__file__).parents[2]

SITE = """
import deepspeed_ucp_startup
deepspeed_ucp_startup.start()
"""
"""Python's own start, as an installed ``.pth`` file has it."""

TELL = """
from deepspeed_ucp.warm import learning
learning.tell()
"""
"""What a first step does."""

LONGEST = 120.0
"""Seconds for a script, or a template, on a machine with much to do."""

IS_WARM = "import sys; print('mark' in sys.modules)\n"
"""Whether a script finds imported what it never imports (:meth:`Kit.make`)."""


@dataclass
class Kit:
    """A folder.

    Attributes:
        events: what the nursery has told.
    """

    folder: Path
    nursery: Nursery
    events: list[dict[str, Any]] = field(default_factory=list)

    def environment(self, *, warm: bool = True, **variables: str) -> dict[str, str]:
        other = ("PYTEST_CURRENT_TEST", "PYTHONUNBUFFERED", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        own = {name: value for name, value in os.environ.items() if not handover.is_late(name) and name not in other}
        more = {"RANK": "0", "LOCAL_RANK": "0", "PYTHONPATH": f"{self.folder}:{ROOT}"}
        return {**own, **more, **(self.nursery.environment() if warm else {}), **variables}

    def write(self, text: str, name: str = "script.py") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def run(self, *words: str, warm: bool = True, flags: tuple[str, ...] = (), **options: Any) -> Any:
        """Run a script, or ``-m`` and a module, as a rank."""
        environment = self.environment(warm=warm, **options.pop("variables", {}))
        command = [sys.executable, *flags, *words]
        given = {"cwd": self.folder, "capture_output": True, "text": True, "timeout": LONGEST, **options}
        return subprocess.run(command, env=environment, check=False, **given)

    @contextmanager
    def start(self, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        command, environment = [sys.executable, "-u", *words], self.environment(**variables)
        with subprocess.Popen(
            command, env=environment, cwd=self.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def make(self, *modules: str, program: tuple[str, str] = ("script", "script.py"), **more: Any) -> bool:
        """Have a template made for a script, or a module; whether there is one."""
        self.nursery.learn(self.describe(*modules, program=program, **more))
        return self.nursery.wait_ready(LONGEST)

    def describe(self, *modules: str, program: tuple[str, str] = ("script", "script.py"), **more: Any) -> Recipe:
        if not (self.folder / "mark.py").exists():
            self.write("", "mark.py")
        return {
            "program": list(program), "executable": sys.executable, "options": [], "cwd": str(self.folder),
            "environment": self.environment(), "modules": ["mark", *modules], "origins": {}, "set": {},
            "touched": [], "values": {}, "affinity": sorted(os.sched_getaffinity(0)), **more,
        }  # fmt: skip

    def find(self, name: str) -> list[Any]:
        """What the nursery's events have under a name."""
        return [event[name] for event in self.events if name in event]

    def has_refused(self, *reasons: str) -> None:
        """Wait until the nursery has told these reasons, which it does some time after the start; and no others."""
        wait_until(lambda: len(self.find("refused")) >= len(reasons))
        assert self.find("refused") == [*reasons]

    def reach(self, what: str) -> socket.socket:
        """A connection as a rank has it."""
        connection = handover.reach(self.nursery.name, what)
        assert connection is not None
        return connection


@contextmanager
def build(folder: Path) -> Iterator[Kit]:
    events: list[dict[str, Any]] = []
    nursery = Nursery(lambda event, **fields: events.append({"event": event, **fields}))
    kit = Kit(folder, nursery, events)
    kit.write(SITE, "sitecustomize.py")
    try:
        yield kit
    finally:
        nursery.close()
