"""DeepSpeed's experts under tensor and pipeline parallelism."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.convert import convert_checkpoint
from tests.support.covering import params
from tests.support.engines import experts_3d as engine_experts_3d
from tests.support.engines.driver import Engines, edit, list_rows
from tests.support.engines.experts_3d import Spread

SOURCES = [
    Spread(4, 2, 2, 1, "bf16"),
    Spread(4, 2, 4, 2),
    Spread(4, 2, 4, 1, data_first=True),
    Spread(4, 2, 2, 1, cut=True),
    Spread(4, 2, 1, 2, "bf16", cut=True, data_first=True),
    Spread(4, 2, 2, 0),
    Spread(4, 2, 4, 0, "bf16"),
    Spread(4, 2, 2, 0, "bf16", cut=True),
    Spread(4, 2, 2, 1, "bf16", fp32_grads=True),
    Spread(4, 1, 2, 1, "bf16", pp=2),
    Spread(4, 1, 2, 0, pp=2),
    Spread(4, 2, 2, 1, pp=2, cut=False),
    Spread(4, 2, 1, 1, "bf16", pp=2, cut=True, fp32_grads=True),
    Spread(2, 1, 2, 1),
    Spread(4, 2, 2, 1, "bf16", second=4),
    Spread(4, 1, 2, 0, "bf16", pp=2),
    Spread(4, 2, 2, 0, "bf16", pp=2),
]

TARGETS = [
    Spread(4, 2, 2, 1, "bf16"),
    Spread(4, 2, 1, 2),
    Spread(4, 2, 4, 1, data_first=True),
    Spread(4, 2, 2, 2, cut=True),
    Spread(4, 2, 4, 0),
    Spread(4, 2, 2, 0, "bf16", cut=True),
    Spread(4, 2, 2, 1, "bf16", fp32_grads=True),
    Spread(4, 1, 2, 1, pp=2),
    Spread(4, 2, 2, 1, "bf16", pp=2),
    Spread(4, 2, 1, 0, pp=2, cut=True),
    Spread(2, 1, 2, 2, "bf16"),
    Spread(1, 1, 1, 1),
    Spread(4, 2, 4, 2, second=2),
    Spread(4, 2, 2, 0, "bf16", pp=2),
    Spread(4, 1, 2, 0, pp=2),
    Spread(4, 1, 2, 1, "bf16", pp=2),
]

CHOSEN = {0: (3, 9), 3: (6, 12), 8: (0, 3, 6)}
"""One of each kind."""


@pytest.mark.releases
@pytest.mark.parametrize(("target", "sources"), list_rows(TARGETS, SOURCES, CHOSEN))
def test_every_expert_comes_back(
    target: Spread, sources: tuple[Spread, ...], engines: Engines, subtests: pytest.Subtests
) -> None:
    engines.go_on(target, sources, subtests)


ALONE = [SOURCES[0], SOURCES[6], SOURCES[7], SOURCES[9]]
"""Folded and cut experts and a pipeline, loaded without optimizer states."""


@pytest.mark.parametrize("target", params([TARGETS[0]], [TARGETS[place] for place in (0, 3, 8, 10)], str))
def test_weights_alone(target: Spread, engines: Engines, subtests: pytest.Subtests) -> None:
    """They are the model's copies, in the files of single experts."""
    runs = [engines.saved(source) for source in ALONE]
    outcomes = engines.load(target, *(run.folder for run in runs), arguments={"load_optimizer_states": False})
    for source, run, outcome in zip(ALONE, runs, outcomes, strict=True):
        with subtests.test(source=str(source)):
            assert not outcome.errors, outcome.errors[0]
            found, expected = (
                {name: each for (name, state), each in states.items() if state == "copy"}
                for states in (outcome.states, run.states)
            )
            assert expected.keys() == found.keys()
            assert all(torch.equal(tensor, expected[name].to(tensor.dtype)) for name, tensor in found.items())


@pytest.mark.parametrize("source", params([SOURCES[9]], [SOURCES[each] for each in (1, 9, 12)], str))
def test_older_releases_do_not_tell_the_degrees(source: Spread, tmp_path: Path, engines: Engines) -> None:
    saved, target = engines.saved(source), TARGETS[10]
    shutil.copytree(saved.folder, tmp_path / "old")
    for path in (tmp_path / "old").rglob("mp_rank_*_model_states.pt"):
        edit(path, lambda tree: tree.pop("checkpoint_parallel_dimensions"))
    (outcome,) = engines.load(target, tmp_path / "old")
    outcome.check(target, source, saved)


ATOMIC = [SOURCES[place] for place in (0, 3, 9, 12)]


@pytest.mark.parametrize("source", params(ATOMIC[:1], ATOMIC, str))
def test_an_atomic_checkpoint_of_experts(source: Spread, tmp_path: Path, engines: Engines) -> None:
    saved, target = engines.saved(source), TARGETS[3]
    replicas = {"match": r".*(\.down_bias|\.wg\.weight)", "pattern": "replicate"}
    patterns = {"rules": [*engine_experts_3d.RULES["rules"], replicas]}
    convert_checkpoint(saved.folder, str(tmp_path / "step_universal"), patterns=patterns)
    (outcome,) = engines.load(target, tmp_path, tag="step_universal")
    outcome.check(target, source, saved)


DUAL = Spread(4, 1, 2, 1, pp=2, turns=True, dual=True)


THERE = [Spread(4, 1, 2, 1, pp=2, turns=True), Spread(4, 2, 4, 2, "bf16", turns=True)]
WAYS = [(DUAL, (DUAL, *THERE)), (THERE[0], (DUAL,)), (THERE[1], (DUAL,))]


@pytest.mark.parametrize(("source", "targets"), params(WAYS[:1], WAYS, lambda row: str(row[0])))
def test_experts_of_a_bidirectional_pipeline(
    source: Spread, targets: tuple[Spread, ...], engines: Engines, subtests: pytest.Subtests
) -> None:
    pytest.importorskip("deepspeed.runtime.pipe.dualpipev", reason="DeepSpeed before DualPipeV")
    for target in targets:
        with subtests.test(target=str(target)):
            (outcome,) = engines.load(target, engines.saved(source).folder)
            outcome.check(target, source, engines.saved(source))
