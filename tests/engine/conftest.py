"""Source runs that many tests share: each is trained and saved once per session."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.testing import ResumeReport, WorldPool
from deepspeed_ucp.testing.resume import SavedRun, save_run
from deepspeed_ucp.testing.resume import resume_each as resume_each_of
from tests.support.engines.cases import Case, build_op, is_direct, training
from tests.support.engines.driver import Engines
from tests.support.engines.parallel import Runs

STEPS = (3, 2)
"""Steps before and after a save, or after a load: the second loss depends on restored optimizer states."""
DEFAULTS = {"model": "mixed", "optimizer": "adamw", "scheduler": False}


Source = Case | tuple[Case, dict[str, Any]]
"""A case, and options of its training that the loading engine does not have."""


class Sources:
    """Saved runs by case and options, from different weights."""

    def __init__(self, worlds: WorldPool, root: Path):
        self._worlds = worlds
        self._root = root
        self._runs: dict[str, SavedRun] = {}

    def get(self, case: Case, steps: tuple[int, int] = STEPS, **options: Any) -> SavedRun:
        """Save `training(**options)` under `case` at the first call; do not change its folder."""
        chosen = {**DEFAULTS, "seed": sum(map(ord, str(case))), **options}
        key = json.dumps([case.dp, case.ds_config, steps, sorted(chosen.items())], sort_keys=True)
        if key not in self._runs:
            folder = self._root / f"source{len(self._runs)}"
            self._runs[key] = save_run(training(**chosen), case.launch, steps, folder, self._worlds)
        return self._runs[key]


@pytest.fixture(scope="session")
def runs(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of the example's GPT."""
    return Runs(ucp_worlds, tmp_path_factory.mktemp("3d"))


@pytest.fixture(scope="session")
def sources(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(ucp_worlds, tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def engines(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(ucp_worlds, tmp_path_factory.mktemp("engines"))


@pytest.fixture
def resume_each(sources: Sources, ucp_worlds: WorldPool, subtests: pytest.Subtests) -> Callable[..., None]:
    """`resume_each(sources, target, check, **options)`: one engine loads all sources, each in a subtest.

    `live` overrides the options of the engine; `get` returns the run of a source.
    """

    def run(
        cases: Sequence[Source],
        target: Case,
        check: Callable[[Case, Case, ResumeReport], None] = is_direct,
        *,
        live: dict[str, Any] | None = None,
        get: Callable[..., SavedRun] = sources.get,
        loss_tolerance: float | None = None,
        **options: Any,
    ) -> None:
        pairs = [case if isinstance(case, tuple) else (case, {}) for case in cases]
        saves = [get(case, **{**options, **own}) for case, own in pairs]
        options.pop("steps", None)
        train = training(**{**options, **(live or {})})
        judges = resume_each_of(train, saves, target.launch, ucp_worlds, loss_tolerance=loss_tolerance)
        for (case, own), judge in zip(pairs, judges, strict=True):
            with subtests.test("-".join([f"{case}→{target}", *map(str, own.values())])):
                check(case, target, judge())

    return run


@pytest.fixture(scope="session")
def compiled_op(ucp_worlds: WorldPool) -> Callable[[str], None]:
    """Let DeepSpeed compile an operator, which takes a minute at the first time on a machine."""
    built: set[str] = set()

    def build(name: str) -> None:
        if name not in built:
            ucp_worlds.get(1).run(build_op, name, timeout=500)
            built.add(name)

    return build


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
