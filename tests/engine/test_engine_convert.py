"""Atomic checkpoints and live engines: DeepSpeed's own `load_universal` takes what a conversion writes; so do we."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_cases import Case, pair_id, training
from engine_gpt import MODELS
from engine_parallel import Launch, Runs, expect, join

from deepspeed_ucp.convert import convert_checkpoint
from deepspeed_ucp.testing import LOSS_TOLERANCE, ResumeReport, WorldPool
from deepspeed_ucp.testing.capture import EngineState
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.resume import SavedRun, resume_each

REFERENCE = "resume_reference.pt"  # what the source run left beside its checkpoint, for the comparison
UPSTREAM = {"universal": False, "load_universal": True}
ATOMIC: dict[str, Any] = {"universal": {"mode": "atomic"}}
BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
MANIFEST = "ucp_manifest.json"

Convert = Callable[..., SavedRun]


@pytest.fixture(scope="module")
def converted(sources: Any, tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """A run of which only the atomic checkpoint is left; made once."""
    made: dict[str, SavedRun] = {}

    def convert(case: Case, **options: Any) -> SavedRun:
        key = f"{case}{sorted(options.items())}"
        if key not in made:
            saved = sources.get(case, **options)
            folder = tmp_path_factory.mktemp("converted")
            report = convert_checkpoint(str(saved.folder), str(folder / f"step{len(made)}_universal"))
            assert report.tensors
            assert not report.reused
            shutil.copy(saved.folder / REFERENCE, folder)
            made[key] = replace(saved, folder=folder)
        return made[key]

    return convert


@pytest.fixture
def load(ucp_worlds: WorldPool) -> Callable[..., ResumeReport]:
    """`load(saved, target, checkpoint, **options)`: load it under another case, compare bit by bit, go on."""

    def run(saved: SavedRun, target: Case, checkpoint: dict[str, Any], **options: Any) -> ResumeReport:
        case = target.but(config={**target.config, "checkpoint": checkpoint})
        (check,) = resume_each(training(**options), [saved], case.launch, ucp_worlds)
        return check()

    return run


# --- DeepSpeed's own loader
# It takes for granted that every rank holds some of every param group: "bulk" is large enough.

ROUTES = [
    (Case(1, 2), Case(1, 1)),
    (Case(1, 2), Case(1, 2)),
    (Case(1, 2), Case(2, 3)),
    (Case(1, 2, "bf16"), Case(1, 3, "bf16", config=BF16_OPTIMIZER)),
    (Case(1, 2, "bf16", config=BF16_OPTIMIZER), Case(1, 1, "bf16")),
    (Case(1, 2, "bf16", config=BF16_OPTIMIZER), Case(1, 3, "bf16", config=BF16_OPTIMIZER)),
    (Case(2, 2, "fp16"), Case(1, 1, "fp16")),
    (Case(3, 2), Case(1, 1)),
    (Case(3, 2, "bf16"), Case(2, 3, "bf16")),
]
# Upstream gives all of stage 3's param groups the first one's hyper-parameters.
UNIFORM_ROUTES = [
    (Case(3, 2), Case(3, 1)),
    (Case(3, 2, "bf16"), Case(3, 3, "bf16")),
    (Case(1, 2), Case(3, 1)),
    (Case(2, 2, "bf16"), Case(3, 3, "bf16")),
]


@pytest.mark.parametrize("pair", ROUTES, ids=pair_id)
def test_upstream_loads_what_we_write(
    pair: tuple[Case, Case], converted: Convert, load: Callable[..., ResumeReport]
) -> None:
    options = {"model": "bulk", "scheduler": True}
    report = load(converted(pair[0], **options), pair[1], UPSTREAM, **options)
    assert report.direct is None  # the plugin was off
    assert report.parameters == 4
    assert report.states >= 16


@pytest.mark.parametrize("pair", UNIFORM_ROUTES, ids=pair_id)
def test_upstreams_stage_3_loads_what_we_write(
    pair: tuple[Case, Case], converted: Convert, load: Callable[..., ResumeReport]
) -> None:
    options = {"model": "bulk", "optimizer": "adamw_uniform", "scheduler": True}
    report = load(converted(pair[0], **options), pair[1], UPSTREAM, **options)
    assert report.direct is None
    assert report.states >= 16


@pytest.mark.parametrize("optimizer", ["amsgrad", "momentum"])
def test_upstream_loads_other_optimizers(optimizer: str, converted: Convert, load: Callable[..., ResumeReport]) -> None:
    options = {"model": "bulk", "optimizer": optimizer}
    assert load(converted(Case(1, 2), **options), Case(2, 3), UPSTREAM, **options).direct is None


# --- mode "atomic"

ATOMIC_ROUTES = [
    (Case(1, 2, "bf16"), Case(3, 3, "bf16")),
    (Case(3, 2), Case(1, 3)),
    (Case(0, 2), Case(2, 3)),
    (Case(0, 2, "bf16"), Case(3, 1, "bf16")),
]


@pytest.mark.parametrize("pair", ATOMIC_ROUTES, ids=pair_id)
def test_a_launch_converts_then_loads_and_the_next_takes_what_is_there(
    pair: tuple[Case, Case], sources: Any, load: Callable[..., ResumeReport], tmp_path: Path
) -> None:
    options = {"model": "mixed", "scheduler": True}
    saved = replace(sources.get(pair[0], **options), folder=tmp_path / "run")
    shutil.copytree(sources.get(pair[0], **options).folder, saved.folder)
    before = list_files(saved.folder)
    first = load(saved, pair[1], ATOMIC, **options)
    assert first.direct
    assert first.parameters == 10
    (manifest,) = saved.folder.glob(f"*_universal/{MANIFEST}")
    written = list_files(saved.folder)
    assert {name: written[name] for name in before} == before  # the source is as it was
    second = load(saved, pair[1].but(dp=2), ATOMIC, **options)
    assert second.direct
    assert list_files(saved.folder) == written
    assert (saved.folder / "latest_universal").read_text() == manifest.parent.name


def test_another_folder_for_what_a_launch_writes(
    sources: Any, load: Callable[..., ResumeReport], tmp_path: Path
) -> None:
    options = {"model": "plain"}
    saved = sources.get(Case(1, 2), **options)
    before = list_files(saved.folder)
    checkpoint = {"universal": {"mode": "atomic", "atomic_dir": str(tmp_path / "fast")}}
    assert load(saved, Case(3, 3), checkpoint, **options).direct
    assert list_files(saved.folder) == before
    assert len([*(tmp_path / "fast").glob(f"*_universal/{MANIFEST}")]) == 1


def list_files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Size, inode and time of every file of a checkpoint; neither locks nor what names the newest."""
    found = {str(path.relative_to(folder)): path.stat() for path in folder.glob("*/**/*") if path.is_file()}
    return {name: (stat.st_size, stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


# --- tensor and pipeline parallelism

TP2_PP2 = Launch(2, 2)
WORDS = "language_model.embedding.word_embeddings.weight"
FAMILIES = {"dense": "megatron-gpt", "padded": "megatron-gpt"}  # of "llama" the checkpoint itself says everything
ROUTES_3D = {
    "dense": [Launch(1, 2, world=2), Launch(2, 1, world=2), Launch(2, 2), Launch(1, 1, world=2)],
    "padded": [Launch(1, 2, world=2), Launch(2, 1, world=2)],
    "llama": [Launch(2, 1, world=2), Launch(1, 1, world=2)],
}


@pytest.fixture(scope="module")
def converted_3d(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def convert(model: str) -> str:
        if model not in made:
            runs.saved(model, TP2_PP2)
            folder = tmp_path_factory.mktemp("converted-3d")
            source, destination = runs.folder(model, TP2_PP2), str(folder / "step_universal")
            convert_checkpoint(source, destination, patterns={"family": FAMILIES.get(model)})
            made[model] = str(folder)
        return made[model]

    return convert


@pytest.mark.parametrize(
    ("model", "target"),
    [
        pytest.param(model, target, id=f"{model}-{TP2_PP2}→{target}")
        for model, targets in ROUTES_3D.items()
        for target in targets
    ],
)
def test_upstream_loads_other_parallelism(
    model: str, target: Launch, runs: Runs, converted_3d: Callable[[str], str]
) -> None:
    """Fused query, key and value, row-parallel weights, padded vocabularies, tied embeddings."""
    folder, saved = converted_3d(model), runs.saved(model, TP2_PP2)
    loaded = runs.load(model, target, {"load_universal": True}, folder)
    got = join(loaded, model)
    count, differences = compare(expect(keep_what_upstream_knows(join(saved, model), model), got), got)
    assert count > 80
    assert not differences, "\n".join(differences[:20])
    if model != "padded":  # rows of padding take part in the loss
        assert loaded[0].losses == pytest.approx(saved[0].losses, rel=LOSS_TOLERANCE["fp32"])


def keep_what_upstream_knows(state: EngineState, model: str) -> EngineState:
    """One value of what several stages hold (the last one's positions are idle); no padding of the vocabulary."""
    kept = {name: each for name, each in state.parameters.items() if "#" not in name}
    rows = MODELS[model]["vocabulary"]
    kept[WORDS] = replace(
        kept[WORDS],
        value=clear_rows(kept[WORDS].value, rows),
        fp32=clear_rows(kept[WORDS].fp32, rows),
        tensors={key: clear_rows(tensor, rows) for key, tensor in kept[WORDS].tensors.items()},
    )
    return replace(state, parameters=kept)


def clear_rows(tensor: Any, low: int) -> Any:
    """A copy without what is in the rows from `low` on."""
    cleared = tensor.clone()
    cleared[low:] = 0
    return cleared
