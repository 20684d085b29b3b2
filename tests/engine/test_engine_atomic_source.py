"""What DeepSpeed's own converter (``ds_to_universal``) made of real engines' checkpoints loads into every target."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_cases import Case, training
from engine_gpt import renames
from engine_parallel import Launch, Runs, compare_joined
from engine_ranks import Local

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.resume import SavedRun, resume_each
from tests.upstream import to_universal

STEPS = (3, 3)
ZERO1 = Case(1, 2, "bf16")
ZERO3 = Case(3, 2)
PAIRS = [
    (ZERO1, Case(0, 1, "bf16")),
    (ZERO1, Case(2, 3, "bf16")),
    (ZERO1, Case(3, 2)),
    (ZERO3, Case(1, 3)),
    (ZERO3, Case(3, 1, "bf16")),
]


def move(root: Path, folder: Path) -> None:
    """Convert the newest tag of a folder into another one, which holds nothing else then."""
    tag = (root / "latest").read_text().strip()
    to_universal(root / tag, folder / f"{tag}_universal")


@pytest.fixture(scope="module")
def converted(sources: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SavedRun]:
    """A saved run of a case of which the folder holds nothing but what the converter wrote."""
    made: dict[str, SavedRun] = {}

    def convert(case: Case, **options: Any) -> SavedRun:
        key = f"{case} {options}"
        if key not in made:
            saved = sources.get(case, STEPS, **options)
            folder = tmp_path_factory.mktemp("universal")
            move(saved.folder, folder)
            shutil.copy(saved.folder / "resume_reference.pt", folder)
            made[key] = replace(saved, folder=folder)
        return made[key]

    return convert


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}→{pair[1]}")
def test_what_upstream_converted_is_resumed(
    pair: tuple[Case, Case], converted: Callable[..., SavedRun], ucp_worlds: WorldPool
) -> None:
    """Masters, states, 16-bit values, tied and frozen parameters, buffers, groups, scheduler, counters: bit by bit."""
    options = {"scheduler": True}
    saved = converted(pair[0], **options)
    (check,) = resume_each(training(**options), [saved], pair[1].launch, ucp_worlds)
    report = check()
    assert report.direct


# --- tensor and pipeline parallelism

TP2_PP2 = Launch(2, 2)
TP2 = Launch(2, stage=2, pipeline=False)
Plain = partial(Launch, pipeline=False)
MODEL = "extras"
POSITIONS = "position_embeddings.weight"  # not tied by the example: stages have values of their own


def load(runs: Runs, source: Launch, target: Launch) -> tuple[list[Local], list[Local]]:
    """What the source held at its save, and what the target holds after it has loaded what upstream made of it."""
    saved = runs.saved(MODEL, source)
    root = Path(runs.folder(MODEL, source))
    folder = root.with_name(f"{root.name}-moved")
    if not folder.exists():
        move(root, folder)
    patterns = {"rename": renames(MODEL, to_pipeline=target.pipeline)} if source.pipeline != target.pipeline else None
    return saved, runs.load(MODEL, target, {"universal": {"patterns": patterns} if patterns else True}, str(folder))


def is_left_out(difference: str) -> bool:
    """What upstream does not keep: buffers and frozen parameters, and all but one of what stages hold each."""
    return difference.startswith("buffer ") or "mlp.dense_4h_to_h." in difference or POSITIONS in difference


@pytest.mark.parametrize(
    ("source", "target"),
    [(TP2_PP2, Launch(1, 2)), (TP2_PP2, Plain(2, stage=3)), (TP2, Plain(4, stage=1))],
    ids=str,
)
def test_parallel_models_are_resumed_but_for_what_upstream_leaves_out(
    source: Launch, target: Launch, runs: Runs
) -> None:
    """Frozen parameters and buffers keep the new model's values, and are named; everything else comes back."""
    saved, resumed = load(runs, source, target)
    assert all(local.direct for local in resumed), resumed[0].reason
    count, differences = compare_joined(saved, resumed, MODEL, lost_copies=True)
    assert count > 60
    assert not [line for line in differences if not is_left_out(line)]
    assert any("mlp.dense_4h_to_h.weight" in line for line in differences)
    told = " ".join(text for level, text in resumed[0].log if level == "WARNING")
    assert "keep the values that the new model has" in told
    assert "mlp.dense_4h_to_h.weight" in told
    assert ".span" in told
    assert ("several pipeline stages hold" in told and POSITIONS in told) is (source.pp > 1)
