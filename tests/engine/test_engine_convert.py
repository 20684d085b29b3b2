"""Atomic checkpoints in live engines: conversions load under DeepSpeed's `load_universal` and under the plugin."""

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
from tests.support.engines.cases import Case, directly, pair_id, train, training
from tests.support.engines.gpt import MODELS, renames
from tests.support.engines.parallel import Launch, Runs, compare_joined, expect, join
from tests.support.engines.ranks import Local
from tests.support.upstream import to_universal

REFERENCE = "resume_reference.pt"  # the state at the save, which `save_run` writes
UPSTREAM = {"universal": False, "load_universal": True}
BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
MANIFEST = "ucp_manifest.json"

ResumeEach = Callable[..., None]


@pytest.fixture(scope="module")
def converted(sources: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SavedRun]:
    """Replace a run's checkpoint by an atomic one of our converter, or of upstream's; made once."""
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


# --- DeepSpeed's loader
# It requires that every rank has a part of every param group: "bulk" is large enough.

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


UNIFORM = {"model": "bulk", "optimizer": "adamw_uniform", "scheduler": True}
UPSTREAM_ROWS = params(
    [
        *((target, saved, {"model": "bulk", "scheduler": True}) for target, saved in ROUTES[2:6]),
        *((target, saved, UNIFORM) for target, saved in UNIFORM_ROUTES),
        *((Case(2, 3), [Case(1, 2)], {"model": "bulk", "optimizer": name}) for name in ("amsgrad", "momentum")),
    ],
    [(target, saved, {"model": "bulk", "scheduler": True}) for target, saved in ROUTES],
    lambda row: f"{row[0]}-{row[2].get('optimizer', 'adamw')}",
)


@pytest.mark.parametrize(("target", "saved", "options"), UPSTREAM_ROWS)
def test_upstream_loads_what_we_write(
    target: Case, saved: list[Case], options: dict[str, Any], converted: Any, resume_each: ResumeEach
) -> None:
    case = target.but(config={**target.config, "checkpoint": UPSTREAM})
    resume_each(saved, case, check_upstream, get=converted, **options)


# --- upstream's converter


@pytest.mark.releases
@pytest.mark.parametrize(
    "target",
    params([Case(0, 1, "bf16"), Case(3, 2), Case(1, 3)], [Case(2, 3, "bf16"), Case(3, 1, "bf16")], str),
)
def test_what_upstream_converted_is_resumed(target: Case, converted: Any, resume_each: ResumeEach) -> None:
    """Masters, states, 16-bit values, tied and frozen parameters, buffers, groups, scheduler, counters: bit by bit."""
    get = partial(converted, convert=convert_upstream)
    resume_each([BF16, Case(3, 2)], target, directly, get=get, scheduler=True)


@pytest.mark.parametrize("target", [Case(1, 3), Case(3, 2, "bf16")], ids=str)
def test_load_universal_where_the_plugin_is_on_by_default(target: Case, converted: Any, ucp_worlds: WorldPool) -> None:
    """Frozen parameters, buffers and every group's hyper-parameters too, which DeepSpeed's loader drops."""
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


def load(worlds: WorldPool, saved: SavedRun, target: Case, options: dict[str, Any], **universal: Any) -> ResumeReport:
    """Load a run in mode "atomic" under another case, compare bit by bit, train on."""
    case = target.on(mode="atomic", **universal)
    (check,) = resume_runs(training(**options), [saved], case.launch, worlds)
    return check()


ATOMIC_ROUTES = [
    (Case(1, 2, "bf16"), Case(3, 3, "bf16")),
    (Case(3, 2), Case(1, 3)),
    (Case(0, 2), Case(2, 3)),
    (Case(0, 2, "bf16"), Case(3, 1, "bf16")),
]


@pytest.mark.parametrize(("source", "target"), params(ATOMIC_ROUTES[:2], ATOMIC_ROUTES, pair_id))
def test_a_launch_converts_then_loads_and_the_next_takes_what_is_there(
    source: Case, target: Case, sources: Any, ucp_worlds: WorldPool, tmp_path: Path
) -> None:
    options = {"model": "mixed", "scheduler": True}
    saved = replace(sources.get(source, **options), folder=tmp_path / "run")
    shutil.copytree(sources.get(source, **options).folder, saved.folder)
    before = list_files(saved.folder)
    first = load(ucp_worlds, saved, target, options)
    assert (first.direct, first.parameters) == (True, 10)
    (manifest,) = saved.folder.glob(f"*_universal/{MANIFEST}")
    written = list_files(saved.folder)
    assert {name: written[name] for name in before} == before  # the source is unchanged
    assert load(ucp_worlds, saved, target.but(dp=2), options).direct
    assert list_files(saved.folder) == written
    assert (saved.folder / "latest_universal").read_text() == manifest.parent.name


def test_another_folder_for_what_a_launch_writes(sources: Any, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    saved = sources.get(Case(1, 2), model="plain")
    before = list_files(saved.folder)
    assert load(ucp_worlds, saved, Case(3, 3), {"model": "plain"}, atomic_dir=str(tmp_path / "fast")).direct
    assert list_files(saved.folder) == before
    assert len([*(tmp_path / "fast").glob(f"*_universal/{MANIFEST}")]) == 1


def list_files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, inode and time of every file of a checkpoint, without locks and `latest` files."""
    found = {str(path.relative_to(folder)): path.stat() for path in folder.glob("*/**/*") if path.is_file()}
    return {name: (stat.st_size, stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


# --- tensor and pipeline parallelism

TP2_PP2 = Launch(2, 2)
WORDS = "language_model.embedding.word_embeddings.weight"
FAMILIES = {"dense": "megatron-gpt", "padded": "megatron-gpt"}  # "llama" needs no rules
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
    """Return a state with the first copy of tied parameters (the last stage's positions are idle), without padding."""

    def clear(tensor: Any) -> Any:
        cleared = tensor.clone()
        cleared[MODELS[model]["vocabulary"] :] = 0
        return cleared

    kept = {name: each for name, each in state.parameters.items() if "#" not in name}
    words = kept[WORDS]
    tensors = {key: clear(tensor) for key, tensor in words.tensors.items()}
    kept[WORDS] = replace(words, value=clear(words.value), fp32=clear(words.fp32), tensors=tensors)
    return replace(state, parameters=kept)


# --- states that upstream drops

Plain = partial(Launch, pipeline=False)
POSITIONS = "position_embeddings.weight"  # not tied by the example: stages have different values


def load_moved(runs: Runs, source: Launch, target: Launch) -> tuple[list[Local], list[Local]]:
    """Convert a save by upstream and load it. Returns the ranks of the source and of the target."""
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
    """Return True for states that upstream drops: buffers, frozen parameters, all but one copy of several stages."""
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
