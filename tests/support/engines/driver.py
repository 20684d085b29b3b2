"""One driver for engines of every kind: it saves with one, loads with another, and compares to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from deepspeed_ucp.testing import World, WorldPool
from tests.support.conversion import convert_checkpoint
from tests.support.engines.cases import build_op
from tests.support.engines.kinds import Kind
from tests.support.engines.ranks import Load, Local, load_each, save
from tests.support.upstream import to_universal

STEPS = (1, 2)
"""Steps before and after a save, or after a load: the second loss depends on restored optimizer states."""

UPSTREAM = {"checkpoint": {"universal": False, "load_universal": True}}
"""Lets DeepSpeed load an atomic checkpoint."""

OPERATORS = {"cpu_adam": "CPUAdamBuilder", "fused_adam": "FusedAdamBuilder", "cpu_lion": "CPULionBuilder"}


@dataclass
class Saved:
    """A saved run: its folder, its ranks and their joined state at the save, and the losses after it."""

    kind: Kind
    folder: Path
    ranks: Sequence[Local]

    @cached_property
    def state(self) -> Any:
        """The joined state in the files."""
        return self.kind.keep(self.kind.join(self.ranks))

    @cached_property
    def losses(self) -> list[float]:
        return average_losses(self.ranks)


@dataclass
class Outcome:
    """One load on all ranks: their error messages, or the engines and their joined state."""

    kind: Kind
    ranks: Sequence[Local]

    def __post_init__(self) -> None:
        self.errors = [local.error for local in self.ranks if local.error]
        assert len(self.errors) in (0, len(self.ranks)), "some ranks alone refuse the load"
        self.losses = average_losses(self.ranks)

    @cached_property
    def state(self) -> Any:
        return self.kind.join(self.ranks)

    def list_messages(self, level: str, part: str = "") -> list[str]:
        """List the messages of rank 0."""
        return self.ranks[0].list_messages(level, part)

    def check_refused(self, *words: str, changed: bool = False) -> str:
        """Check that all ranks refuse with one error and keep their engine. Return type and message.

        Args:
            words: parts of the message, or types of the error.
            changed: DeepSpeed raises it, and changes the engine.
        """
        assert self.errors, "the load was not refused"
        assert len(set(self.errors)) == 1, self.errors
        text, kinds = self.errors[0], self.ranks[0].kinds
        for word in words:
            assert word in text or word in kinds, text
        if not changed:
            assert "UcpError" in kinds, text
            assert {(*local.changed, local.held) for local in self.ranks} == {(0,)}, self.ranks[0].changed
        return text

    def check(
        self,
        saved: Saved,
        *,
        direct: bool | None = None,
        losses: bool = True,
        tolerance: float | None = None,
        least: int = 1,
        **options: Any,
    ) -> None:
        """Compare the loader, all states to the bit, the client state and the losses with the saved run.

        Rank 0 alone logs the load; DeepSpeed's load runs once or not at all. No report means that the plugin is off.

        Args:
            direct: the plugin's loader is expected; by default `is_direct` of the kind.
            tolerance: of losses; by default `find_tolerance` of the kind.
        """
        assert not self.errors, self.errors[0]
        expected = self.kind.is_direct(saved.kind) if direct is None else direct
        is_off = self.kind.config.get("checkpoint", {}).get("universal") is False
        for rank, local in enumerate(self.ranks):
            assert (local.direct is None) == is_off
            assert (bool(local.direct), local.calls) == (expected, int(not expected)), local.reason
            assert len(local.list_messages("INFO", " loaded in ")) == (rank == 0 and not is_off)
        self.count, differences = self.kind.compare(saved.state, self.state, **options)
        assert not differences, "\n".join(differences[:20])
        assert self.count >= least
        for local in self.ranks:
            known = {key: local.client_state.get(key) for key in saved.ranks[0].client_state}
            assert known == saved.ranks[0].client_state
        gap = self.kind.find_tolerance(saved.kind) if tolerance is None else tolerance
        if losses and gap is not None and self.losses:
            assert self.losses == pytest.approx(saved.losses, rel=gap, abs=0), (self.losses, saved.losses, gap)


Check = Callable[[Saved, Outcome], object]
Change = Callable[["Engines", Path, Path], object]


def refuse(*words: str, **options: bool) -> Check:
    """Return the check that a load is refused with these words."""
    return lambda _saved, outcome: outcome.check_refused(*words, **options)


def convert(_engines: Engines, run: Path, folder: Path, **options: Any) -> None:
    report = convert_checkpoint(str(run), str(folder / "step_universal"), **options)
    assert report.tensors and not report.reused


def convert_upstream(_engines: Engines, run: Path, folder: Path) -> None:
    to_universal(run / (run / "latest").read_text().strip(), folder / "step_universal")


def average_losses(ranks: Sequence[Local]) -> list[float]:
    """Return the losses of each step as means over all ranks."""
    return [sum(each) / len(each) for each in zip(*(local.losses for local in ranks), strict=True)]


@dataclass(frozen=True)
class Source:
    """A run that an engine loads.

    Attributes:
        options: of its ``make``, which the loading engine does not have.
        arguments: of `load_checkpoint`.
        steps: before and after the save.
        change: takes the driver, the folder of the run and a new one, which it fills; the engine loads this.
        unreadable: files whose name contains this cannot be opened on rank 1.
        check: takes the saved run and the outcome, instead of the usual comparison.
        name: for the id, if others have the same values.
    """

    kind: Kind
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[int, int] = STEPS
    change: Change | None = None
    unreadable: str = ""
    check: Check | None = None
    name: str = ""

    def __str__(self) -> str:
        texts = [str(self.kind), *map(str, self.options.values()), *self.arguments, self.name]
        return "-".join(filter(None, texts))


@dataclass(frozen=True)
class Row:
    """One engine that loads several runs in turn. State that a load leaves behind changes the next load.

    Attributes:
        options: of ``make`` of both sides.
        live: of ``make`` of only the target.
        check: takes the saved run and the outcome after the comparison.
        compared: arguments of `Outcome.check`.
    """

    target: Kind
    sources: Sequence[Kind | Source]
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    live: Mapping[str, Any] = field(default_factory=dict)
    check: Check | None = None
    compared: Mapping[str, Any] = field(default_factory=dict)
    exhaustive: bool = False
    marks: Sequence[Any] = ()

    def __str__(self) -> str:
        options = [
            str(value) for value in (*self.options.values(), *self.live.values()) if value not in (True, "mixed")
        ]
        return "-".join([*filter(None, [self.name]), str(self.target), *options, f"from{len(self.sources)}"])

    @property
    def param(self) -> Any:
        marks = [pytest.mark.exhaustive] * self.exhaustive
        return pytest.param(self, id=str(self), marks=[*self.marks, *marks])


class Engines:
    """Runs engines of every kind on worlds; shared runs are saved once."""

    def __init__(self, worlds: WorldPool, root: Path) -> None:
        self.worlds, self._root, self._count = worlds, root, 0
        self._saved: dict[str, Saved] = {}
        self._changed: dict[tuple[str, Change], Saved] = {}
        self._built: set[str] = set()

    def get(self, kind: Kind) -> World:
        return self.worlds.get(kind.world)

    def save(
        self,
        kind: Kind,
        folder: object = None,
        seed: int = 1,
        *,
        steps: Sequence[int] = STEPS[:1],
        after: int = STEPS[1],
        plugin: bool = True,
        **options: Any,
    ) -> Saved:
        """Save a run of `kind` into `folder`, by default a new one; with several steps once after each."""
        self.build(options.get("optimizer") or kind.operator)
        place = Path(str(folder)) if folder else self._make_folder()
        training = kind.training(seed, str(place), **options)
        more = {"after": after, "client_state": kind.client_state, "plugin": plugin, "read": kind.read}
        return Saved(kind, place, self.get(kind).run(save, training, str(place), tuple(steps), **more))

    def saved(self, kind: Kind | Source, **options: Any) -> Saved:
        """Save a run at the first call, from distinct weights, and change its files; do not change the folder."""
        source = kind if isinstance(kind, Source) else Source(kind)
        options = {**options, **source.options}
        key = f"{source.kind!r} {source.steps} {sorted(options.items(), key=str)}"
        if key not in self._saved:
            seed, (before, after) = crc32(key.encode()) % 9973, source.steps
            self._saved[key] = self.save(source.kind, seed=seed, steps=(before,), after=after, **options)
        run = self._saved[key]
        if source.change is None:
            return run
        if (key, source.change) not in self._changed:
            folder = self._make_folder()
            source.change(self, run.folder, folder)
            self._changed[key, source.change] = replace(run, folder=folder)
        return self._changed[key, source.change]

    def load(
        self,
        kind: Kind,
        *loads: object,
        plugin: bool = True,
        read_before: bool = False,
        **options: Any,
    ) -> list[Outcome]:
        """Make the loads one after the other in one engine of `kind`.

        Args:
            loads: a folder (two steps follow its load), a saved run or a `Load`.
        """
        self.build(options.get("optimizer") or kind.operator)
        made = [each if isinstance(each, Load) else self.make_load(each) for each in loads]
        training = (kind.live() if plugin else kind).training(77, str(self._make_folder()), **options)
        more = {"read": kind.read, "read_before": read_before, "catch": True}
        answers = self.get(kind).run(load_each, training, made, plugin, **more)
        return [Outcome(kind, each) for each in zip(*answers, strict=True)]

    def make_load(self, folder: object) -> Load:
        """Make the load of a folder or a saved run, followed by as many steps as the run has trained."""
        if isinstance(folder, Saved):
            return Load(str(folder.folder), steps=len(folder.losses))
        return Load(str(folder), steps=STEPS[1])

    def resume(self, row: Row, subtests: pytest.Subtests) -> list[Outcome]:
        """Load all sources of a row in one engine; each is a subtest."""
        sources = [each if isinstance(each, Source) else Source(each) for each in row.sources]
        runs = [self.saved(source, **row.options) for source in sources]
        loads = [
            Load(str(run.folder), dict(each.arguments), each.unreadable, steps=0 if each.arguments else len(run.losses))
            for each, run in zip(sources, runs, strict=True)
        ]
        outcomes = self.load(row.target, *loads, **{**row.options, **row.live})
        for source, run, outcome in zip(sources, runs, outcomes, strict=True):
            with subtests.test(source=str(source)):
                if source.check:
                    source.check(run, outcome)
                elif refusal := row.target.find_refusal(source.kind):
                    outcome.check_refused(refusal)
                else:
                    outcome.check(run, **row.compared)
                if row.check:
                    row.check(run, outcome)
        return outcomes

    def build(self, optimizer: str | None) -> None:
        """Let DeepSpeed compile the operator of an optimizer, which takes a minute once per machine."""
        builder = next((op for name, op in OPERATORS.items() if (optimizer or "").startswith(name)), None)
        if builder and builder not in self._built:
            self.worlds.get(1).run(build_op, builder, timeout=500)
            self._built.add(builder)

    def _make_folder(self) -> Path:
        self._count += 1
        path = self._root / str(self._count)
        path.mkdir()
        return path


def choose(
    targets: Sequence[Any], sources: Sequence[Any], chosen: Mapping[int, Sequence[int]], name: str = "", **more: Any
) -> list[Row]:
    """List rows: the chosen numbers of targets and sources, and every target from all sources as exhaustive ones."""
    rows = [
        Row(targets[target], [sources[place] for place in places], name, **more) for target, places in chosen.items()
    ]
    return rows + [Row(target, sources, name, exhaustive=True, **more) for target in targets]
