"""Source runs that many tests share: each is trained and saved once per session."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_cases import Case, build_op, is_direct, training
from engine_parallel import Runs

from deepspeed_ucp.testing import ResumeReport, WorldPool
from deepspeed_ucp.testing.resume import SavedRun, check_resume, save_run
from deepspeed_ucp.testing.resume import resume_each as resume_each_of

STEPS = (3, 3)


class Sources:
    """Saved runs by what they were made of."""

    def __init__(self, worlds: WorldPool, root: Path):
        self._worlds = worlds
        self._root = root
        self._runs: dict[str, SavedRun] = {}

    def get(self, case: Case, steps: tuple[int, int] = STEPS, **options: Any) -> SavedRun:
        """The run of `training(**options)` under `case`; its folder must not be changed."""
        key = json.dumps([case.dp, case.ds_config, steps, sorted(options.items())], sort_keys=True)
        if key not in self._runs:
            folder = self._root / f"source{len(self._runs)}"
            self._runs[key] = save_run(training(**options), case.launch, steps, folder, self._worlds)
        return self._runs[key]


@pytest.fixture(scope="session")
def runs(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of the example's GPT."""
    return Runs(ucp_worlds, tmp_path_factory.mktemp("3d"))


@pytest.fixture(scope="session")
def sources(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(ucp_worlds, tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def resume(sources: Sources, ucp_worlds: WorldPool) -> Callable[..., ResumeReport]:
    """`resume(source, target, **options)`: save under one case, compare and go on under the other."""

    def run(
        source: Case,
        target: Case,
        *,
        steps: tuple[int, int] = STEPS,
        changes: dict[str, Any] | None = None,
        loss_tolerance: float | None = None,
        **options: Any,
    ) -> ResumeReport:
        saved = sources.get(source, steps, **options)
        train_fn = training(**{**options, **(changes or {})})
        return check_resume(train_fn, saved, target.launch, ucp_worlds, loss_tolerance=loss_tolerance)

    return run


@pytest.fixture
def resume_each(sources: Sources, ucp_worlds: WorldPool, subtests: pytest.Subtests) -> Callable[..., None]:
    """`resume_each(sources, target, check, **options)`: one engine takes all of them, each is a subtest.

    Every source is trained from other weights, so that what one leaves in the engine is seen in the next.
    """

    def run(
        cases: Sequence[Case],
        target: Case,
        check: Callable[[Case, Case, ResumeReport], None] = is_direct,
        *,
        steps: tuple[int, int] = STEPS,
        **options: Any,
    ) -> None:
        saves = [sources.get(case, steps, seed=find_seed(case), **options) for case in cases]
        judges = resume_each_of(training(**options), saves, target.launch, ucp_worlds)
        for case, judge in zip(cases, judges, strict=True):
            with subtests.test(f"{case}→{target}"):
                check(case, target, judge())

    return run


def find_seed(case: Case) -> int:
    return sum(map(ord, str(case)))


@pytest.fixture(scope="session")
def compiled_op(ucp_worlds: WorldPool) -> Callable[[str], None]:
    """Has DeepSpeed compile an op of its own, which takes a minute on a machine that has not done it yet."""
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
