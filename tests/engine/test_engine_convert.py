"""Atomic checkpoints and live engines: DeepSpeed's own `load_universal` takes what a conversion writes; so do we."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import deepspeed_ucp
from deepspeed_ucp.convert import convert_checkpoint
from deepspeed_ucp.testing import LOSS_TOLERANCE, ResumeReport, WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine
from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.resume import SavedRun
from deepspeed_ucp.testing.resume import resume_each as resume_runs
from tests.support.covering import params
from tests.support.engines.cases import Case, pair_id, train, training
from tests.support.engines.gpt import MODELS, renames
from tests.support.engines.parallel import Launch, Runs, compare_joined, expect, join
from tests.support.engines.ranks import Local
from tests.support.upstream import to_universal

REFERENCE = "resume_reference.pt"  # what the source run left beside its checkpoint, for the comparison
UPSTREAM = {"universal": False, "load_universal": True}
ATOMIC: dict[str, Any] = {"universal": {"mode": "atomic"}}
BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
MANIFEST = "ucp_manifest.json"

ResumeEach = Callable[..., None]


@pytest.fixture(scope="module")
def converted(sources: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SavedRun]:
    """A run of which only the atomic checkpoint is left, by our converter or by upstream's; made once."""
    made: dict[str, SavedRun] = {}

    def find(case: Case, convert: Callable[[Path, Path], None] = convert_here, **options: Any) -> SavedRun:
        key = f"{case}{convert.__name__}{sorted(options.items())}"
        if key not in made:
            saved = sources.get(case, **options)
            folder = tmp_path_factory.mktemp("converted")
            convert(saved.folder, folder)
            shutil.copy(saved.folder / REFERENCE, folder)
            made[key] = replace(saved, folder=folder)
        return made[key]

    return find


def convert_here(root: Path, folder: Path) -> None:
    report = convert_checkpoint(str(root), str(folder / "step_universal"))
    assert report.tensors
    assert not report.reused


def convert_upstream(root: Path, folder: Path) -> None:
    tag = (root / "latest").read_text().strip()
    to_universal(root / tag, folder / f"{tag}_universal")


# --- DeepSpeed's own loader
# It takes for granted that every rank holds some of every param group: "bulk" is large enough.

BF16 = Case(1, 2, "bf16")
ROUTES = [
    (Case(1, 1), [Case(1, 2), Case(3, 2)]),
    (Case(1, 2), [Case(1, 2)]),
    (Case(2, 3), [Case(1, 2)]),
    (Case(1, 3, "bf16", config=BF16_OPTIMIZER), [BF16, BF16.but(config=BF16_OPTIMIZER)]),
    (Case(1, 1, "bf16"), [BF16.but(config=BF16_OPTIMIZER)]),
    (Case(1, 1, "fp16"), [Case(2, 2, "fp16")]),
    (Case(2, 3, "bf16"), [Case(3, 2, "bf16")]),
]
# Upstream gives all of stage 3's param groups the first one's hyper-parameters.
UNIFORM_ROUTES = [
    (Case(3, 1), [Case(3, 2), Case(1, 2)]),
    (Case(3, 3, "bf16"), [Case(3, 2, "bf16"), Case(2, 2, "bf16")]),
]


def check_upstream(_source: Case, _target: Case, report: ResumeReport) -> None:
    assert report.direct is None  # the plugin was off
    assert report.parameters == 4
    assert report.states >= 12


def upstream(target: Case) -> Case:
    return target.but(config={**target.config, "checkpoint": UPSTREAM})


@pytest.mark.parametrize(("target", "saved"), params(ROUTES[2:6], ROUTES, lambda row: str(row[0])))
def test_upstream_loads_what_we_write(target: Case, saved: list[Case], converted: Any, resume_each: ResumeEach) -> None:
    resume_each(saved, upstream(target), check_upstream, get=converted, model="bulk", scheduler=True)


@pytest.mark.parametrize(("target", "saved"), [pytest.param(*route, id=str(route[0])) for route in UNIFORM_ROUTES])
def test_upstreams_stage_3_loads_what_we_write(
    target: Case, saved: list[Case], converted: Any, resume_each: ResumeEach
) -> None:
    options = {"model": "bulk", "optimizer": "adamw_uniform", "scheduler": True}
    resume_each(saved, upstream(target), check_upstream, get=converted, **options)


@pytest.mark.parametrize("optimizer", ["amsgrad", "momentum"])
def test_upstream_loads_other_optimizers(optimizer: str, converted: Any, resume_each: ResumeEach) -> None:
    options = {"model": "bulk", "optimizer": optimizer}
    resume_each([Case(1, 2)], upstream(Case(2, 3)), check_upstream, get=converted, **options)


# --- upstream's converter


@pytest.mark.releases
@pytest.mark.parametrize(
    "target",
    params(
        [(Case(0, 1, "bf16"),), (Case(3, 2),), (Case(1, 3),)],
        [(Case(2, 3, "bf16"),), (Case(3, 1, "bf16"),)],
        lambda row: str(row[0]),
    ),
)
def test_what_upstream_converted_is_resumed(target: Case, converted: Any, resume_each: ResumeEach) -> None:
    """Masters, states, 16-bit values, tied and frozen parameters, buffers, groups, scheduler, counters: bit by bit."""

    def check(_source: Case, _target: Case, report: ResumeReport) -> None:
        assert report.direct

    get = partial(converted, convert=convert_upstream)
    resume_each([BF16, Case(3, 2)], target, check, get=get, scheduler=True)


@pytest.mark.parametrize("target", [Case(1, 3), Case(3, 2, "bf16")], ids=str)
def test_load_universal_where_the_plugin_is_on_by_default(target: Case, converted: Any, ucp_worlds: WorldPool) -> None:
    """Frozen parameters, buffers and every group's hyper-parameters too, which DeepSpeed's own loader leaves out."""
    saved = [converted(Case(1, 2), scheduler=True)]
    for judge in resume_runs(train_with_load_universal, saved, target.launch, ucp_worlds):
        assert judge().direct


def train_with_load_universal(ds_config: dict[str, Any]) -> Generator[Any, None, None]:
    """Train as `ds_ucp run` does a script whose ds_config sets `load_universal`."""
    deepspeed_ucp.install(default_on=True)
    try:
        yield from train({**ds_config, "checkpoint": {"load_universal": True}}, scheduler=True)
    finally:
        deepspeed_ucp.install(default_on=False)


# --- mode "atomic"


@pytest.fixture
def load(ucp_worlds: WorldPool) -> Callable[..., ResumeReport]:
    """`load(saved, target, checkpoint, **options)`: load it under another case, compare bit by bit, go on."""

    def run(saved: SavedRun, target: Case, checkpoint: dict[str, Any], **options: Any) -> ResumeReport:
        case = target.but(config={**target.config, "checkpoint": checkpoint})
        (check,) = resume_runs(training(**options), [saved], case.launch, ucp_worlds)
        return check()

    return run


ATOMIC_ROUTES = [
    (Case(1, 2, "bf16"), Case(3, 3, "bf16")),
    (Case(3, 2), Case(1, 3)),
    (Case(0, 2), Case(2, 3)),
    (Case(0, 2, "bf16"), Case(3, 1, "bf16")),
]


@pytest.mark.parametrize(("source", "target"), params(ATOMIC_ROUTES[:2], ATOMIC_ROUTES, pair_id))
def test_a_launch_converts_then_loads_and_the_next_takes_what_is_there(
    source: Case, target: Case, sources: Any, load: Callable[..., ResumeReport], tmp_path: Path
) -> None:
    options = {"model": "mixed", "scheduler": True}
    saved = replace(sources.get(source, **options), folder=tmp_path / "run")
    shutil.copytree(sources.get(source, **options).folder, saved.folder)
    before = list_files(saved.folder)
    first = load(saved, target, ATOMIC, **options)
    assert first.direct
    assert first.parameters == 10
    (manifest,) = saved.folder.glob(f"*_universal/{MANIFEST}")
    written = list_files(saved.folder)
    assert {name: written[name] for name in before} == before  # the source is as it was
    second = load(saved, target.but(dp=2), ATOMIC, **options)
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
    "padded": [Launch(2, 1, world=2), Launch(1, 2, world=2)],
    "llama": [Launch(1, 1, world=2), Launch(2, 1, world=2)],
}
EVERY_3D = [(model, target) for model, targets in ROUTES_3D.items() for target in targets]


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
    params([EVERY_3D[place] for place in (0, 2, 4, 6)], EVERY_3D, lambda row: f"{row[0]}-{TP2_PP2}→{row[1]}"),
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


def keep_what_upstream_knows(state: CapturedEngine, model: str) -> CapturedEngine:
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


# --- what upstream leaves out

Plain = partial(Launch, pipeline=False)
POSITIONS = "position_embeddings.weight"  # not tied by the example: stages have values of their own


def load_moved(runs: Runs, source: Launch, target: Launch) -> tuple[list[Local], list[Local]]:
    """What the source held at its save, and what the target holds after it has loaded what upstream made of it."""
    saved = runs.saved("extras", source)
    root = Path(runs.folder("extras", source))
    folder = root.with_name(f"{root.name}-moved")
    if not folder.exists():
        convert_upstream(root, folder)
    patterns = (
        {"rename": renames("extras", to_pipeline=target.pipeline)} if source.pipeline != target.pipeline else None
    )
    return saved, runs.load("extras", target, {"universal": {"patterns": patterns} if patterns else True}, str(folder))


def is_left_out(difference: str) -> bool:
    """What upstream does not keep: buffers and frozen parameters, and all but one of what stages hold each."""
    return difference.startswith("buffer ") or "mlp.dense_4h_to_h." in difference or POSITIONS in difference


@pytest.mark.parametrize(
    ("source", "target"),
    params(
        [(TP2_PP2, Plain(2, stage=3)), (Plain(2, stage=2), Plain(4, stage=1))],
        [(TP2_PP2, Launch(1, 2))],
        lambda row: f"{row[0]}→{row[1]}",
    ),
)
def test_parallel_models_are_resumed_but_for_what_upstream_leaves_out(
    source: Launch, target: Launch, runs: Runs
) -> None:
    """Frozen parameters and buffers keep the new model's values, and are named; everything else comes back."""
    saved, resumed = load_moved(runs, source, target)
    assert all(local.direct for local in resumed), resumed[0].reason
    count, differences = compare_joined(saved, resumed, "extras", lost_copies=True)
    assert count > 60
    assert not [line for line in differences if not is_left_out(line)]
    assert any("mlp.dense_4h_to_h.weight" in line for line in differences)
    warnings = " ".join(resumed[0].list_messages("WARNING"))
    for words in ("keep the values that the new model has", "mlp.dense_4h_to_h.weight", ".span"):
        assert words in warnings
    assert ("several pipeline stages hold" in warnings and POSITIONS in warnings) is (source.pp > 1)
