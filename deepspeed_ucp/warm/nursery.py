"""Keeps a template: has one made of what ranks tell, in the background, and made anew when that changes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..secrets import hide_values
from . import handover

Recipe = dict[str, Any]
"""What a template is made from: of JSON's types, for any node of the same software (:meth:`Nursery.recipe`)."""

_TEMPLATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "template.py")
_NEEDED = ("deepspeed", "numpy", "torch")
"""Packages without which a template is worth nothing."""

_MOST_WITHOUT = 8

_TRIAL = 60.0
"""Seconds for a process that is forked on trial to show that it can compute, beside ranks that take the processors."""

_REST = 30.0
"""Seconds for the rest of a message that has begun to come."""

_KEY = ("program", "executable", "options", "cwd", "environment", "affinity", "origins", "set", "touched")


@dataclass(slots=True, eq=False)
class _Made:
    """A template's process.

    Attributes:
        own: what it is made from.
        process: it.
        control: its line, which it ends with.
        held: the modules that it has imported, or has tried to.
        is_ready: it can be asked.
    """

    own: Recipe
    process: subprocess.Popen[bytes]
    control: socket.socket
    held: set[str]
    is_ready: bool = False


class Nursery:
    """Keeps a process from which ranks are forked, on this machine.

    Whoever starts ranks puts :meth:`environment` into theirs. The first rank of this machine tells at its first step
    what it has imported (:mod:`deepspeed_ucp.warm.learning`); a template is made of that, and the ranks of later
    launches are forked from it. Where it does not fit, or is not ready, they start as ever.

    A template is a child of this process, its children are the ranks: :meth:`pids` is for who ends all its descendants.

    Args:
        log: gets an event ``template`` for each that is ready (``seconds``, ``modules``, ``megabytes``: its share of
            memory, ``megabytes_alone``; ``without``: why there are packages that it could not have imported), with a
            ``reason`` where there is none, and with ``refused`` for each reason why a rank was not forked, once.
    """

    def __init__(self, log: Callable[..., None]) -> None:
        self.log, self.name = log, secrets.token_hex(8)
        self._lock, self._closed = threading.Condition(), False  # told of when a template comes, or none does
        self._current: _Made | None = None
        self._next: _Made | None = None
        self._old: list[_Made] = []
        self._without: dict[str, str] = {}
        self._unfit: Recipe | None = None
        self._refused: set[str] = set()
        self._is_stale = self._is_second = False
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(handover.name_socket(self.name, "learn"))
        self._server.listen(16)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)  # with what hears it
        self._thread = threading.Thread(target=self._serve, daemon=True, name="nursery")
        self._thread.start()

    def environment(self) -> dict[str, str]:
        """What ranks, and the launcher of ranks, are to find in their environment."""
        return {handover.VARIABLE: self.name}

    def learn(self, recipe: Recipe) -> None:
        """Have a template made, unless there is one that has all of this; it is ready after some seconds.

        Args:
            recipe: another nursery's :meth:`recipe`, or what a rank tells.
        """
        own = self._localize(recipe)
        with self._lock:
            newest = self._next or self._current
            known = self._unfit if newest is None else None if self._is_stale else newest.own
            held = newest.held if newest is not None else set(known["modules"] if known else ())
            is_known = known is not None and all(known.get(name) == own.get(name) for name in _KEY)
            if is_known and held.issuperset(own["modules"]):
                return
            if newest is not None and newest is self._next:
                self._drop(newest)
            self._is_stale = False
            self._without.clear()
            self._make(own)

    def recipe(self) -> Recipe | None:
        """What the newest template is made from, for other machines; None as long as nothing has been learned.

        Its environment is told as what differs from this process's own, without what looks like a secret: a template
        without that fits no rank that has it.
        """
        with self._lock:
            newest = self._next or self._current
            own = newest.own if newest is not None else self._unfit
        if own is None:
            return None
        here = {name: value for name, value in os.environ.items() if not handover.is_late(name)}
        there = own["environment"]
        changes = {
            name: there.get(name)
            for name in {*here, *there}
            if here.get(name) != there.get(name) and hide_values(there.get(name), name) == there.get(name)
        }
        return {**{name: own[name] for name in own if name not in ("environment", "cwd")}, "changes": changes}

    @property
    def is_ready(self) -> bool:
        """Whether there is a template to fork from now, though another one may be on its way."""
        with self._lock:  # one that has ended may not have been noticed yet
            return self._current is not None and self._current.process.poll() is None

    def wait_ready(self, timeout: float) -> bool:
        """Wait for the template that is being made, or will be in the place of one that has ended, at the most so many
        seconds; whether there is one then."""
        with self._lock:
            self._lock.wait_for(lambda: self._next is None and (self._current is None or self.is_ready), timeout)
            return self.is_ready

    def pids(self) -> Collection[int]:
        """The templates, which are no ranks: of processes that were listed before this was called, all of them."""
        with self._lock:
            made = [self._current, self._next, *self._old]
            return {each.process.pid for each in made if each is not None}

    def close(self) -> None:
        """End the templates, and the ranks that they have forked."""
        with self._lock:
            self._closed = True
        self._thread.join()
        for each in (self._current, self._next, *self._old):
            if each is not None:
                self._drop(each)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _localize(self, recipe: Recipe) -> Recipe:
        """With an environment and a folder of this machine."""
        environment = recipe["environment"] if "environment" in recipe else {**os.environ, **recipe["changes"]}
        kept = {
            name: value
            for name, value in environment.items()
            if value is not None and (not handover.is_late(name) or handover.hides_devices(name, value))
        }
        return {"cwd": os.getcwd(), **recipe, "environment": kept}

    def _make(self, own: Recipe) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_REST)
        modules = [name for name in own["modules"] if name.partition(".")[0] not in self._without]
        command = [own["executable"], *own["options"], _TEMPLATE, str(theirs.fileno())]
        nothing = subprocess.DEVNULL
        recipe = json.dumps({**own, "modules": modules, "nursery": self.name, "trial": _TRIAL})
        with theirs, self._lock:
            try:
                with open(os.memfd_create("recipe"), "w+b") as told:
                    told.write(recipe.encode())
                    told.seek(0)
                    process = subprocess.Popen(
                        command, env=own["environment"], cwd=own["cwd"], stdin=told, stdout=nothing, stderr=nothing,
                        pass_fds=[theirs.fileno()], start_new_session=True,
                    )  # fmt: skip
            except OSError as error:
                ours.close()
                self._give_up(own, str(error))
                return
            self._next = made = _Made(own, process, ours, set(own["modules"]))
        self._selector.register(ours, selectors.EVENT_READ, partial(self._hear, made))

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(timeout=0.1):
                key.data()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            if (connection := handover.accept(self._server)) is not None:
                self._selector.register(connection, selectors.EVENT_READ, partial(self._hear_rank, connection))

    def _hear_rank(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        with connection, contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError):
            connection.settimeout(_REST)
            self.learn(handover.receive(connection)[0])

    def _hear(self, made: _Made) -> None:
        try:
            told, _ = handover.receive(made.control)
        except (OSError, EOFError, ValueError):
            self._lose(made)
            return
        with self._lock:
            if "refused" in told:
                self._is_stale = self._is_stale or bool(told["changed"])
                if told["refused"] not in self._refused:
                    self._refused.add(told["refused"])
                    self.log("template", refused=told["refused"])
            elif made is not self._next:
                return  # another one is made by now
            elif "unfit" in told:
                self._avoid(made, told["unfit"], told["packages"])
            elif "built" in told:
                self._retire()
                made.held |= set(told["built"])
            else:
                self._current, self._next, made.is_ready = made, None, True
                self._lock.notify_all()
                without = {"without": list(dict.fromkeys(self._without.values()))} if self._without else {}
                self.log("template", **told["ready"], **without)

    def _avoid(self, made: _Made, reason: str, packages: list[str]) -> None:
        """Make it without the package that it cannot have, the first one, and the one that imports it."""
        self._drop(made)
        more = [name for name in packages if name not in self._without and name not in _NEEDED]
        if not more or packages[0] in _NEEDED or len(self._without) >= _MOST_WITHOUT:
            self._give_up(made.own, reason)
        else:
            self._without.update(dict.fromkeys(more, reason))
            self._make(made.own)

    def _give_up(self, own: Recipe, reason: str) -> None:
        self._retire()
        with self._lock:
            self._unfit, self._next = own, None
            self._lock.notify_all()
        self.log("template", reason=f"{reason}: every start is a fresh one")

    def _retire(self) -> None:
        """Let the template that there was fork nothing more; it stays for the ranks that it has forked."""
        with self._lock:
            if self._current is not None:
                with contextlib.suppress(OSError):
                    self._current.control.send(b"r")
                self._old.append(self._current)
                self._current = None

    def _lose(self, made: _Made) -> None:
        """A template has ended: as it should, when it was retired, or by who is short of memory; that one once more."""
        with self._lock:  # whoever waits for a template waits for the one that comes in its place
            was_needed, is_last = made is self._current or made is self._next, self._next in (None, made)
            self._drop(made)
            reason = f"it has ended with {made.process.returncode}"
            if was_needed and is_last and made.is_ready and not self._is_second:
                self._is_second = True
                self.log("template", reason=f"{reason}: it is made again")
                self._make(made.own)
            elif was_needed and is_last:
                self._give_up(made.own, reason)

    def _drop(self, made: _Made) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(made.control)
        made.control.close()
        until = time.monotonic() + 2.0
        while made.process.poll() is None and time.monotonic() < until and made.is_ready:
            time.sleep(0.01)
        made.process.kill()
        made.process.wait()
        with self._lock:
            self._old = [each for each in self._old if each is not made]
            self._current = None if made is self._current else self._current
            self._next = None if made is self._next else self._next
            self._lock.notify_all()


def choose_nursery(log: Callable[..., None]) -> Nursery | None:
    """A nursery, where the system can have one (Linux)."""
    if not os.path.isdir("/proc/self/ns"):
        return None
    try:
        return Nursery(log)
    except OSError as error:  # of the socket, as in a sandbox
        log("template", reason=f"{error}: every start is a fresh one")
        return None
