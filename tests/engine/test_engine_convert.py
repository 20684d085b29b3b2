"""Atomic checkpoints in live engines: conversions load with DeepSpeed's `load_universal` and with the plugin."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import deepspeed_ucp
from deepspeed_ucp.testing.capture import CapturedEngine
from tests.support.covering import params
from tests.support.engines import cases
from tests.support.engines.cases import MIXED, Case
from tests.support.engines.driver import UPSTREAM, Engines, Outcome, Row, Saved, Source, convert, convert_upstream
from tests.support.engines.gpt import MODELS
from tests.support.engines.kinds import SUMS_IN_FP32
from tests.support.engines.parallel import pipe, plain, resume

MANIFEST = "ucp_manifest.json"

# --- DeepSpeed's loader
# It requires that every rank has a part of every param group: "bulk" is large enough.

BF16, BULK = Case(1, 2, "bf16"), {"model": "bulk", "scheduler": True}
UNIFORM = {**BULK, "optimizer": "adamw_uniform"}
ROUTES: list[tuple[Case, list[Case], dict[str, Any]]] = [
    (Case(1, 3, "bf16", config=SUMS_IN_FP32), [BF16, BF16.but(config=SUMS_IN_FP32)], BULK),
    (Case(1, 1, "fp16"), [Case(2, 2, "fp16")], BULK),
    # Upstream gives all of stage 3's param groups the first one's hyper-parameters.
    (Case(3, 1), [Case(3, 2), Case(1, 2)], UNIFORM),
    # The others are exhaustive.
    (Case(2, 3), [Case(1, 2)], {"model": "bulk", "optimizer": "amsgrad"}),
    (Case(2, 3, "bf16"), [Case(3, 2, "bf16"), BF16], BULK),
    (Case(1, 1), [Case(1, 2), Case(3, 2)], BULK),
]

ROWS = [
    Row(
        target.but(config={**target.config, **UPSTREAM}),
        [Source(source, change=convert) for source in sources],
        "upstream",
        options,
        compared={"direct": False, "least": 12},
        exhaustive=number > 2,
    )
    for number, (target, sources, options) in enumerate(ROUTES)
]

# --- the plugin


@dataclass(frozen=True)
class OnByDefault(Case):
    """A case whose ds_config sets `load_universal`, like a script that `ds_ucp run` starts."""

    @property
    def home(self) -> Any:
        return cases

    def live(self) -> Any:
        return self.but(config={"checkpoint": {"load_universal": True}})

    @contextmanager
    def surround(self) -> Any:
        deepspeed_ucp.install(default_on=True)
        try:
            yield
        finally:
            deepspeed_ucp.install(default_on=False)


OURS = [Source(Case(1, 2), change=convert)]
THEIRS = [Source(source, change=convert_upstream) for source in (BF16, Case(3, 2))]
CHOSEN = [
    # Masters, states, 16-bit values, tied and frozen parameters, buffers, groups, scheduler, counters.
    (Case(3, 2), THEIRS),
    # In addition frozen parameters, buffers and every group's hyper-parameters, which DeepSpeed's loader drops.
    (OnByDefault(1, 3), OURS),
    # The others are exhaustive.
    (Case(0, 1, "bf16"), THEIRS),
    (Case(1, 3), THEIRS),
    (OnByDefault(3, 2, "bf16"), OURS),
]
Direct = partial(Row, name="plugin", options=MIXED, compared={"direct": True}, marks=[pytest.mark.releases])
ROWS += [Direct(*row, exhaustive=number > 1) for number, row in enumerate(CHOSEN)]

# --- mode "atomic"

ATOMIC_ROUTES = [(Case(1, 2, "bf16"), Case(3, 3, "bf16")), (Case(3, 2), Case(1, 3)), (Case(0, 2), Case(2, 3))]


@pytest.mark.parametrize(("source", "target"), params(ATOMIC_ROUTES[:1], ATOMIC_ROUTES))
def test_the_first_launch_converts_a_save_and_the_next_reuses_the_conversion(
    source: Case, target: Case, engines: Engines, tmp_path: Path
) -> None:
    saved = engines.saved(source, **MIXED)
    saved = replace(saved, folder=shutil.copytree(saved.folder, tmp_path / "run"))
    files = [list_files(saved.folder)]
    for case in (target, target.but(world=2)):
        (outcome,) = engines.load(case.on(mode="atomic"), saved, **MIXED)
        outcome.check(saved, direct=True)
        files.append(list_files(saved.folder))
    before, first, second = files
    assert {name: first[name] for name in before} == before  # the source is unchanged
    assert first == second
    (manifest,) = saved.folder.glob(f"*_universal/{MANIFEST}")
    assert (saved.folder / "latest_universal").read_text() == manifest.parent.name
    saved = engines.saved(source, **MIXED)
    files = list_files(saved.folder)
    (outcome,) = engines.load(target.on(mode="atomic", atomic_dir=str(tmp_path / "fast")), saved, **MIXED)
    outcome.check(saved, direct=True)
    assert list_files(saved.folder) == files
    assert len([*(tmp_path / "fast").glob(f"*_universal/{MANIFEST}")]) == 1


def list_files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return size, inode and time of every file of a checkpoint, without locks and `latest` files."""
    found = {str(path.relative_to(folder)): path.stat() for path in folder.glob("*/**/*") if path.is_file()}
    return {name: (stat.st_size, stat.st_ino, stat.st_mtime_ns) for name, stat in found.items()}


# --- tensor and pipeline parallelism

TP2_PP2 = pipe(2, 2)
WORDS = "language_model.embedding.word_embeddings.weight"
FAMILIES = {"dense": "megatron-gpt", "padded": "megatron-gpt"}  # rules; "llama" needs none
ROUTES_3D = {  # the first target of each model always runs; all targets of a model load the same files
    "dense": [pipe(1, 2, world=2), pipe(2, 2), pipe(world=2)],
    "padded": [pipe(1, 2, world=2), pipe(world=2)],
    "llama": [pipe(world=2), pipe(1, 2, world=2)],
}


def check_known(saved: Saved, outcome: Outcome) -> None:
    """Check fused query, key and value, row-parallel weights, padded vocabularies, tied embeddings."""
    known, model = replace(saved), saved.kind.model
    known.state = drop_states_without_upstream_support(saved.state, model)
    outcome.check(known, direct=False, losses=model != "padded", least=81)  # the loss depends on rows of padding


for model, targets in ROUTES_3D.items():
    change = partial(convert, patterns={"family": FAMILIES.get(model)})
    degrees = TP2_PP2 if model == "dense" else pipe(2, world=2)
    SOURCE = Source(degrees.but(model=model), change=change, check=check_known)
    ROWS += [
        Row(target.but(model=model, config=UPSTREAM), [SOURCE], "upstream", exhaustive=number > 0)
        for number, target in enumerate(targets)
    ]


def drop_states_without_upstream_support(state: CapturedEngine, model: str) -> CapturedEngine:
    """Return a state with only the first copy of tied parameters (the last stage's positions are idle), unpadded."""

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

POSITIONS = "position_embeddings.weight"  # the example does not tie them: values differ between stages
DROPPED = ("buffer ", "mlp.dense_4h_to_h.", POSITIONS)
"""Buffers, frozen parameters, further copies of several stages."""


def check_moved(saved: Saved, outcome: Outcome) -> None:
    """Check that frozen parameters and buffers keep live values with a warning, and all other states are restored."""
    assert not outcome.errors and all(local.direct for local in outcome.ranks)
    first = {name: each for name, each in saved.state.parameters.items() if "#" not in name}
    count, differences = outcome.kind.compare(replace(saved.state, parameters=first), outcome.state)
    assert count > 60
    assert not [line for line in differences if not any(words in line for words in DROPPED)]
    assert any("mlp.dense_4h_to_h.weight" in line for line in differences)
    warnings = " ".join(outcome.list_messages("WARNING"))
    for words in ("keep the values that the new model has", "mlp.dense_4h_to_h.weight", ".span"):
        assert words in warnings
    assert "several pipeline stages hold" in warnings and POSITIONS in warnings


source, target = resume(pipe(1, 2, world=2, model="extras"), plain(1, 3, world=2))
ROWS += [Row(target, [Source(source, change=convert_upstream, check=check_moved)], "moved")]


@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_conversions_load_with_deepspeed_and_the_plugin(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)
