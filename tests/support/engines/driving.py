"""Drives engines of every kind from a test: what one saves another one loads, compared to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from tests.support.engines.going_on import Kind, Loaded, States, load_and_go_on, save_and_go_on


@dataclass
class Saved:
    """A saved run: its folder, the states at the save, and each rank's losses after it."""

    folder: str
    states: States
    losses: list[list[float]]


@dataclass
class Outcome:
    """The outcome of one load on all ranks: each rank's error message, or states and losses.

    Attributes:
        direct: whether the plugin's own loader ran, by rank.
    """

    errors: list[str]
    direct: list[bool] = field(default_factory=list)
    states: States = field(default_factory=dict)
    losses: list[list[float]] = field(default_factory=list)

    def check_refused(self, *words: str) -> None:
        """Every rank refuses the load, with these words in its error message."""
        assert self.errors, "the load was not refused"
        for error in self.errors:
            for word in words:
                assert word in error, error

    def check(
        self, target: Kind, source: Kind, saved: Saved, *, direct: bool | None = None, buffers: bool = True
    ) -> None:
        """Compare with the saved run: which loader ran, all states to the bit, and losses.

        Args:
            direct: the plugin's own loader has to run; by default as the target says.
            buffers: compare these too.
        """
        assert not self.errors, self.errors[0]
        assert set(self.direct) == {target.is_direct(source) if direct is None else direct}
        assert self.states.keys() == saved.states.keys()
        for (name, state), tensor in self.states.items():
            master = saved.states.get((name, "fp32")) if state == "copy" else None
            wanted = target.adjust(state, saved.states[name, state] if master is None else master, tensor)
            if state in ("copy", "buffer", "momentum_buffer"):  # in the engine's own dtype
                wanted = wanted.to(tensor.dtype)
            if state != "buffer" or buffers:
                assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), (name, state)
        tolerance = target.find_tolerance(source)
        if tolerance is not None:
            for own, expected in zip(self.losses, saved.losses, strict=False):
                assert own == pytest.approx(expected, **tolerance)


class Engines:
    """Runs engines of every kind on worlds; shared runs are saved once."""

    def __init__(self, worlds: WorldPool, root: Path) -> None:
        self._worlds, self._root, self._count = worlds, root, 0
        self._saved: dict[Any, Saved] = {}

    def save(self, kind: Any, folder: object = None, seed: int = 1, **options: Any) -> Saved:
        """Save a run of `kind` into `folder`, by default a new one."""
        place = self._make_folder() if folder is None else str(folder)
        answers = self._worlds.get(kind.world).run(save_and_go_on, kind, place, seed, **options)
        return Saved(place, kind.join([states for states, _ in answers]), [losses for _, losses in answers])

    def saved(self, kind: Any) -> Saved:
        """Save a run of `kind` at the first call, from weights of its own; the folder must not be changed."""
        if kind not in self._saved:
            self._saved[kind] = self.save(kind, seed=10 * len(self._saved) + 1)
        return self._saved[kind]

    def load(
        self,
        kind: Any,
        *folders: object,
        tag: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Outcome]:
        """Load one folder after the other into one engine of `kind`.

        Args:
            arguments: of `load_checkpoint`.
            options: of the kind's ``make``.
        """
        work = load_and_go_on, kind, list(map(str, folders)), self._make_folder(), tag, arguments or {}
        answers = self._worlds.get(kind.world).run(*work, **options)
        return [self._read(kind, each) for each in zip(*answers, strict=True)]

    def _read(self, kind: Any, parts: Sequence[Loaded | str]) -> Outcome:
        taken = [part for part in parts if not isinstance(part, str)]
        if len(taken) < len(parts):
            assert not taken, "some ranks alone refuse the load"
            return Outcome(list(map(str, parts)))
        direct, states, losses = zip(*taken, strict=True)
        return Outcome([], list(direct), kind.join(states), list(losses))

    def _make_folder(self) -> str:
        self._count += 1
        path = self._root / str(self._count)
        path.mkdir()
        return str(path)

    def go_on(self, target: Any, sources: Sequence[Any], subtests: pytest.Subtests, **options: Any) -> None:
        """One engine loads all sources; each is a subtest."""
        runs = [self.saved(source) for source in sources]
        outcomes = self.load(target, *(run.folder for run in runs), **options)
        for source, run, outcome in zip(sources, runs, outcomes, strict=True):
            with subtests.test(source=str(source)):
                refusal = target.find_refusal(source)
                if refusal:
                    outcome.check_refused(refusal)
                else:
                    outcome.check(target, source, run)


@dataclass(frozen=True)
class Refusal:
    """Loads of a damaged or odd save that every rank refuses.

    Attributes:
        words: parts of the error message.
        damage: changes the folder of the save.
        again: the run saves once more before that.
        tag: to load.
        options: of the kind's ``make``.
    """

    source: Any
    targets: tuple[Any, ...]
    words: tuple[str, ...]
    damage: Callable[[Path], object] = lambda _folder: None
    again: bool = False
    tag: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, engines: Engines, folder: Path) -> None:
        engines.save(self.source, folder, again=self.again, **self.options)
        self.damage(folder)
        for target in self.targets:
            (outcome,) = engines.load(target, folder, tag=self.tag, **self.options)
            outcome.check_refused(*self.words)


def name_row(row: tuple[Any, Sequence[Any]]) -> str:
    """The id of a test of a target and its sources."""
    return f"{row[0]}-from-{len(row[1])}"


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the contents of a file of `torch.save`."""
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)
