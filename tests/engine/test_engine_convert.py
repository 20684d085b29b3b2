"""Atomic checkpoints in live engines: conversions load under DeepSpeed's `load_universal` and under the plugin."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import deepspeed_ucp
from deepspeed_ucp.testing.capture import CapturedEngine
from tests.support.conversion import convert_checkpoint
from tests.support.covering import params
from tests.support.engines import cases
from tests.support.engines.cases import Case
from tests.support.engines.driver import Engines, Saved
from tests.support.engines.gpt import MODELS
from tests.support.engines.kinds import SUMS_IN_FP32
from tests.support.engines.parallel import Launch, pipe, plain, resume
from tests.support.upstream import to_universal

UPSTREAM = {"checkpoint": {"universal": False, "load_universal": True}}
MANIFEST = "ucp_manifest.json"
Converted = Callable[..., Saved]


@pytest.fixture(scope="module")
def converted(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Replace a run's checkpoint by an atomic one of our converter, or of upstream's; made once."""
    made: dict[str, Saved] = {}

    def find(case: Any, convert: Callable[[Path, Path], None] = convert_here, **options: Any) -> Saved:
        key = f"{case}{convert.__name__}{sorted(options.items())}"
        if key not in made:
            saved, folder = engines.saved(case, **options), tmp_path_factory.mktemp("converted")
            convert(saved.folder, folder)
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

BF16, BULK = Case(1, 2, "bf16"), {"model": "bulk", "scheduler": True}
UNIFORM = {**BULK, "optimizer": "adamw_uniform"}
ROUTES = [
    (Case(1, 3, "bf16", config=SUMS_IN_FP32), [BF16, BF16.but(config=SUMS_IN_FP32)], BULK),
    (Case(1, 1, "fp16"), [Case(2, 2, "fp16")], BULK),
    # Upstream gives all of stage 3's param groups the first one's hyper-parameters.
    (Case(3, 1), [Case(3, 2), Case(1, 2)], UNIFORM),
    (Case(2, 3), [Case(1, 2)], {"model": "bulk", "optimizer": "amsgrad"}),
]
MORE = [
    (Case(2, 3), [Case(1, 2)], BULK),
    (Case(1, 1, "bf16"), [BF16.but(config=SUMS_IN_FP32)], BULK),
    (Case(3, 3, "bf16"), [Case(3, 2, "bf16"), Case(2, 2, "bf16")], UNIFORM),
    (Case(2, 3), [Case(1, 2)], {"model": "bulk", "optimizer": "momentum"}),
    (Case(1, 1), [Case(1, 2), Case(3, 2)], BULK),
    (Case(1, 2), [Case(1, 2)], BULK),
    (Case(2, 3, "bf16"), [Case(3, 2, "bf16")], BULK),
]


@pytest.mark.parametrize(
    ("target", "sources", "options"),
    params(ROUTES, MORE, lambda row: f"{row[0]}-{row[2].get('optimizer', 'adamw')}"),
)
def test_upstream_loads_what_we_write(
    target: Case, sources: list[Case], options: dict[str, Any], converted: Converted, engines: Engines
) -> None:
    runs = [converted(source, **options) for source in sources]
    outcomes = engines.load(target.but(config={**target.config, **UPSTREAM}), *runs, **options)
    for run, outcome in zip(runs, outcomes, strict=True):
        outcome.check(run, direct=False, least=12)
        assert outcome.ranks[0].direct is None  # the plugin was off


# --- the plugin


@dataclass(frozen=True)
class OnByDefault(Case):
    """A case whose ds_config sets `load_universal`, as a script has it that `ds_ucp run` starts."""

    @property
    def home(self) -> Any:
        return cases

    def live(self) -> Any:
        return self.but(config={"checkpoint": {"load_universal": True}})

    def surround(self) -> AbstractContextManager[Any]:
        return on_by_default()


@contextmanager
def on_by_default() -> Any:
    deepspeed_ucp.install(default_on=True)
    try:
        yield
    finally:
        deepspeed_ucp.install(default_on=False)


ALONE, BOTH = [Case(1, 2)], [BF16, Case(3, 2)]
OURS: list[tuple[Case, list[Case], Callable[..., None]]] = [
    # Masters, states, 16-bit values, tied and frozen parameters, buffers, groups, scheduler, counters.
    (Case(3, 2), BOTH, convert_upstream),
    # Frozen parameters, buffers and every group's hyper-parameters too, which DeepSpeed's loader drops.
    (OnByDefault(1, 3), ALONE, convert_here),
]
EXHAUSTIVE = [
    (target, BOTH, convert_upstream)
    for target in (Case(0, 1, "bf16"), Case(1, 3), Case(2, 3, "bf16"), Case(3, 1, "bf16"))
]
EXHAUSTIVE += [(OnByDefault(3, 2, "bf16"), ALONE, convert_here)]


@pytest.mark.releases
@pytest.mark.parametrize(
    ("target", "sources", "convert"), params(OURS, EXHAUSTIVE, lambda row: f"{row[0]}-{row[2].__name__}")
)
def test_the_plugin_loads_what_either_writes(
    target: Case, sources: list[Case], convert: Any, converted: Converted, engines: Engines
) -> None:
    runs = [converted(source, convert, scheduler=True) for source in sources]
    for run, outcome in zip(runs, engines.load(target, *runs, scheduler=True), strict=True):
        outcome.check(run, direct=True)


# --- mode "atomic"

ATOMIC_ROUTES = [
    (Case(1, 2, "bf16"), Case(3, 3, "bf16")),
    (Case(3, 2), Case(1, 3)),
    (Case(0, 2), Case(2, 3)),
    (Case(0, 2, "bf16"), Case(3, 1, "bf16")),
]


@pytest.mark.parametrize(
    ("source", "target"), params(ATOMIC_ROUTES[:1], ATOMIC_ROUTES, lambda row: "->".join(map(str, row)))
)
def test_a_launch_converts_then_loads_and_the_next_takes_what_is_there(
    source: Case, target: Case, engines: Engines, tmp_path: Path
) -> None:
    saved = engines.saved(source, scheduler=True)
    saved = replace(saved, folder=shutil.copytree(saved.folder, tmp_path / "run"))
    files = [list_files(saved.folder)]
    for case in (target, target.but(world=2)):
        (outcome,) = engines.load(case.on(mode="atomic"), saved, scheduler=True)
        outcome.check(saved, direct=True)
        files.append(list_files(saved.folder))
    before, first, second = files
    assert {name: first[name] for name in before} == before  # the source is unchanged
    assert first == second
    (manifest,) = saved.folder.glob(f"*_universal/{MANIFEST}")
    assert (saved.folder / "latest_universal").read_text() == manifest.parent.name


def test_another_folder_for_what_a_launch_writes(engines: Engines, tmp_path: Path) -> None:
    saved = engines.saved(Case(1, 2), model="plain")
    before = list_files(saved.folder)
    case = Case(3, 3).on(mode="atomic", atomic_dir=str(tmp_path / "fast"))
    (outcome,) = engines.load(case, saved, model="plain")
    outcome.check(saved, direct=True)
    assert list_files(saved.folder) == before
    assert len([*(tmp_path / "fast").glob(f"*_universal/{MANIFEST}")]) == 1


def list_files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, inode and time of every file of a checkpoint, without locks and `latest` files."""
    found = {str(path.relative_to(folder)): path.stat() for path in folder.glob("*/**/*") if path.is_file()}
    return {name: (stat.st_size, stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


# --- tensor and pipeline parallelism

TP2_PP2 = pipe(2, 2)
WORDS = "language_model.embedding.word_embeddings.weight"
FAMILIES = {"dense": "megatron-gpt", "padded": "megatron-gpt"}  # "llama" needs no rules
ROUTES_3D = {
    "dense": [pipe(1, 2, world=2), pipe(2, world=2), pipe(2, 2), pipe(world=2)],
    "padded": [pipe(2, world=2), pipe(1, 2, world=2)],
    "llama": [pipe(world=2), pipe(2, world=2)],
}
EVERY_3D = [target.but(model=model) for model, targets in ROUTES_3D.items() for target in targets]


@pytest.mark.parametrize("target", params([EVERY_3D[place] for place in (0, 2, 4, 6)], EVERY_3D, str))
def test_upstream_loads_other_parallelism(target: Launch, engines: Engines, converted: Converted) -> None:
    """Fused query, key and value, row-parallel weights, padded vocabularies, tied embeddings."""

    def convert_family(root: Path, folder: Path) -> None:
        convert_checkpoint(str(root), str(folder / "step_universal"), patterns={"family": FAMILIES.get(target.model)})

    run = converted(TP2_PP2.but(model=target.model), convert_family)
    known = replace(run)
    known.state = keep_what_upstream_knows(run.state, target.model)
    (outcome,) = engines.load(target.but(config=UPSTREAM), run)
    losses = target.model != "padded"  # rows of padding take part in the loss
    outcome.check(known, direct=False, losses=losses, least=81)


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

POSITIONS = "position_embeddings.weight"  # not tied by the example: stages have different values
MOVED = [
    (TP2_PP2, plain(2, 3)),
    (plain(2, 2), plain(4)),
    (TP2_PP2, pipe(1, 2)),
]


def is_left_out(difference: str) -> bool:
    """Return True for states that upstream drops: buffers, frozen parameters, all but one copy of several stages."""
    return difference.startswith("buffer ") or "mlp.dense_4h_to_h." in difference or POSITIONS in difference


@pytest.mark.parametrize(("source", "target"), params(MOVED[:1], MOVED, lambda row: "->".join(map(str, row))))
def test_parallel_models_are_resumed_but_for_what_upstream_leaves_out(
    source: Launch, target: Launch, engines: Engines, converted: Converted
) -> None:
    """Frozen parameters and buffers keep the new model's values, and are named; everything else comes back."""
    source, target = resume(source.but(model="extras"), target)
    run = converted(source, convert_upstream)
    (outcome,) = engines.load(target, run)
    assert not outcome.errors and all(local.direct for local in outcome.ranks)
    first = {name: each for name, each in run.state.parameters.items() if "#" not in name}
    count, differences = target.compare(replace(run.state, parameters=first), outcome.state)
    assert count > 60
    assert not [line for line in differences if not is_left_out(line)]
    assert any("mlp.dense_4h_to_h.weight" in line for line in differences)
    warnings = " ".join(outcome.list_messages("WARNING"))
    for words in ("keep the values that the new model has", "mlp.dense_4h_to_h.weight", ".span"):
        assert words in warnings
    assert ("several pipeline stages hold" in warnings and POSITIONS in warnings) is (source.pp > 1)
