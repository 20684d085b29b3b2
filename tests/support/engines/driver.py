"""Saves with one engine and loads with another, compared to the bit; run in the test's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from tests.support.covering import params
from tests.support.engines.kinds import Kind, States
from tests.support.engines.ranks import Load, Local, load_each, save


@dataclass
class Saved:
    """A saved run: its folder, the states at the save, and each rank's losses after it."""

    folder: str
    states: States
    losses: list[list[float]]


@dataclass
class Outcome:
    """The outcome of one load on all ranks: each rank's error message, or the engines and their joined states."""

    errors: list[str]
    ranks: Sequence[Local] = ()
    states: States = field(default_factory=dict)

    @classmethod
    def join(cls, kind: Kind, ranks: Sequence[Local]) -> Outcome:
        errors = [local.error for local in ranks if local.error]
        if errors:
            assert len(errors) == len(ranks), "some ranks alone refuse the load"
            return cls(errors)
        return cls([], ranks, kind.join([local.state for local in ranks]))

    def check_refused(self, *words: str) -> None:
        """Check that every rank refuses the load, with these words in its message."""
        assert self.errors, "the load was not refused"
        for error in self.errors:
            for word in words:
                assert word in error, error

    def check(
        self, target: Kind, source: Kind, saved: Saved, *, direct: bool | None = None, buffers: bool = True
    ) -> None:
        """Compare the loader, all states to the bit, and the losses with the saved run.

        Args:
            direct: the plugin's loader is expected; by default `target.is_direct`.
        """
        assert not self.errors, self.errors[0]
        assert {bool(local.direct) for local in self.ranks} == {target.is_direct(source) if direct is None else direct}
        assert self.states.keys() == saved.states.keys()
        for (name, state), tensor in self.states.items():
            master = saved.states.get((name, "fp32")) if state == "copy" else None
            wanted = target.adjust(state, saved.states[name, state] if master is None else master, tensor)
            if state in ("copy", "buffer", "momentum_buffer"):  # in the engine's dtype
                wanted = wanted.to(tensor.dtype)
            if state != "buffer" or buffers:
                assert tensor.dtype == wanted.dtype and torch.equal(tensor, wanted), (name, state)
        tolerance = target.find_tolerance(source)
        if tolerance is not None:
            for local, expected in zip(self.ranks, saved.losses, strict=False):
                assert local.losses == pytest.approx(expected, **tolerance)


class Engines:
    """Runs engines of every kind on worlds; shared runs are saved once."""

    def __init__(self, worlds: WorldPool, root: Path) -> None:
        self._worlds, self._root, self._count = worlds, root, 0
        self._saved: dict[Any, Saved] = {}

    def save(self, kind: Kind, folder: object = None, seed: int = 1, *, again: bool = False, **options: Any) -> Saved:
        """Save a run of `kind` into `folder`, by default a new one; `again`: and once more two steps later."""
        place = self._make_folder() if folder is None else str(folder)
        training, steps = kind.training(seed, place, **options), (3, 2) if again else (3,)
        ranks = self._worlds.get(kind.world).run(save, training, place, steps, after=2 * (not again), read=kind.read)
        return Saved(place, kind.join([local.state for local in ranks]), [local.losses for local in ranks])

    def saved(self, kind: Kind) -> Saved:
        """Save a run of `kind` at the first call, from distinct weights; do not change the folder."""
        if kind not in self._saved:
            self._saved[kind] = self.save(kind, seed=10 * len(self._saved) + 1)
        return self._saved[kind]

    def load(
        self,
        kind: Kind,
        *folders: object,
        tag: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        plugin: bool = True,
        **options: Any,
    ) -> list[Outcome]:
        """Load one folder after the other into one engine of `kind`, each followed by two steps.

        Args:
            arguments: of `load_checkpoint`.
            options: of the kind's ``make``.
        """
        loads = [Load(str(folder), {"tag": tag, **(arguments or {})}, steps=2) for folder in folders]
        work = load_each, kind.training(77, self._make_folder(), **options), loads, plugin
        answers = self._worlds.get(kind.world).run(*work, read=kind.read, catch=True)
        return [Outcome.join(kind, each) for each in zip(*answers, strict=True)]

    def load_by_deepspeed(self, kind: Kind, folder: str) -> list[list[float]]:
        """Load by DeepSpeed alone. Returns each rank's losses of two steps."""
        work = load_each, kind.training(77, self._make_folder()), [Load(folder, steps=2)], False
        return [local.losses for (local,) in self._worlds.get(kind.world).run(*work, read=id)]

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
    """Loads of a damaged or unusual save that every rank refuses.

    Attributes:
        words: parts of the error message.
        damage: changes the folder of the save.
        again: the run saves a second time before.
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


def list_rows(targets: Sequence[Any], sources: Sequence[Any], chosen: Mapping[int, Sequence[int]]) -> list[Any]:
    """List parameters (target, sources): the chosen numbers, and every target from all sources as exhaustive ones."""
    rows = [(targets[target], tuple(sources[place] for place in places)) for target, places in chosen.items()]
    every = [(target, tuple(sources)) for target in targets]
    return params(rows, [*rows, *every], lambda row: f"{row[0]}-from-{len(row[1])}")


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the contents of a file of `torch.save`."""
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)
