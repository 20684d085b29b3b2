"""DeepSpeed's experts under other expert-parallel degrees, numbers of ranks, stages and precisions."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.examine.degrees import parse_degrees
from deepspeed_ucp.examine.resume import check_resume
from deepspeed_ucp.formats import open_checkpoint
from tests.releases import find_reason
from tests.support.engines import experts as engine_experts
from tests.support.engines.driver import Engines, Refusal, list_rows
from tests.support.engines.experts import Spread

BELOW = "expert_layer"
"""A module name that makes DeepSpeed treat all parameters below as experts."""

SOURCES = [
    Spread(4, 1, "bf16", (2, 2)),
    Spread(4, 2, "fp32", (2, 1), data_first=True),
    Spread(2, 1, "fp32", (1, 1)),
    Spread(4, 1, "fp32", (2, 4), shuffled=True),
    Spread(4, 0, "fp32", (4, 4)),
    Spread(4, 0, "bf16", (2, 2), data_first=True),
]
SOURCES = [each for each in SOURCES if not find_reason(f"experts/zero{each.stage}-{each.precision}")]

TARGETS = [
    Spread(4, 1, "bf16", (2, 2)),
    Spread(4, 2, "fp32", (4, 2), shuffled=True),
    Spread(2, 2, "bf16", (2, 1), data_first=True),
    Spread(1, 1, "fp32", (1, 1)),
    Spread(4, 0, "fp32", (2, 2)),
    Spread(2, 0, "bf16", (1, 1)),
]


CHOSEN = {number: range(number % 2, len(SOURCES), 2) for number in range(len(TARGETS))}


@pytest.mark.releases
@pytest.mark.parametrize(("target", "sources"), list_rows(TARGETS, SOURCES, CHOSEN))
def test_every_expert_comes_back(
    target: Spread, sources: tuple[Spread, ...], engines: Engines, subtests: pytest.Subtests
) -> None:
    engines.go_on(target, sources, subtests)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_among_all_parameters_in_one_group(precision: str, engines: Engines, subtests: pytest.Subtests) -> None:
    """Like ``AdamW(model.parameters())`` at stage 0."""
    source = Spread(2, 0, precision, (2, 2), together=True)
    saved = engines.saved(source)
    states = next(Path(saved.folder).rglob("mp_rank_00_model_states.pt"))
    has_config = "ds_config" in torch.load(states, weights_only=False)
    targets = [source, Spread(2, 0, precision, (1, 1), together=True), Spread(2, 1, "bf16", (2, 2))]
    for target in targets if precision == "fp32" else targets[:2]:
        with subtests.test(target=str(target)):
            (outcome,) = engines.load(target, saved.folder)
            ours = source != target or not (
                has_config or precision == "bf16"
            )  # to 0.19.2 DeepSpeed's load fails in fp32
            outcome.check(target, source, saved, direct=ours)


@pytest.mark.parametrize("shuffled", [False, True])
def test_degrees_whose_groups_have_another_order_at_every_start(shuffled: bool, engines: Engines) -> None:
    """DeepSpeed's load of the same topology matches groups by number."""
    source = Spread(4, 1, "bf16", (2, 4), shuffled=not shuffled)
    saved, target = engines.saved(source), replace(source, shuffled=shuffled)
    (outcome,) = engines.load(target, saved.folder)
    outcome.check(target, source, saved, direct=True)


@pytest.mark.parametrize(
    "source",
    [
        Spread(2, 1, "fp32", (2, 2), tied=True),
        Spread(2, 0, "fp32", (1, 1), tied=True),
        Spread(2, 1, "fp32", (2, 2), residual=BELOW),
    ],
    ids=str,
)
def test_layers_of_experts_that_deepspeed_loses(source: Spread, engines: Engines, subtests: pytest.Subtests) -> None:
    """DeepSpeed saves tied experts twice, once with rank 0's model states, which every rank then loads. It drops a
    residual expert below a module with "expert" in its name, and cannot load its save.
    """
    saved = engines.saved(source)
    for target in (source, replace(source, stage=2, degrees=(1, 1)), replace(source, stage=0, degrees=(2, 2))):
        with subtests.test(target=str(target)):
            (outcome,) = engines.load(target, saved.folder)
            outcome.check(target, source, saved, direct=True)


def test_a_custom_load_needs_all_experts_on_every_rank(engines: Engines) -> None:
    """Every rank numbers its experts from 0: by these names all ranks would load the first ones."""
    saved = engines.saved(Spread(2, 1, "bf16", (1, 1)))
    arguments = {"custom_load_fn": engine_experts.fill, "load_optimizer_states": False}
    (refused,) = engines.load(Spread(2, 1, "bf16", (2, 1)), saved.folder, arguments=arguments)
    refused.check_refused("UnsupportedError", "expert parallelism")
    (taken,) = engines.load(Spread(2, 2, "fp32", (1, 1)), saved.folder, arguments=arguments)
    assert not taken.errors


LATER = "expp_rank_1_mp_rank_00_optim_states.pt"
RESIDUAL = Spread(2, 0, "fp32", (2, 2), residual=BELOW)
REFUSED = {
    # No file records the degrees of two layers of the same shapes. In the same topology DeepSpeed's load uses their
    # order, which changes at every start.
    "degrees-that-stage-0-does-not-save": Refusal(
        Spread(2, 0, "fp32", (2, 1)),
        (Spread(2, 1, "fp32", (2, 1)), Spread(2, 0, "fp32", (2, 1))),
        ("MismatchError", "several such degrees", "load_optimizer_states=False"),
    ),
    "optimizer-of-another-step": Refusal(  # at stage 0 in fp32 no other file has its states
        Spread(2, 0, "fp32", (2, 2)),
        (Spread(2, 1, "bf16", (1, 1)),),
        ("CheckpointError", f"{LATER}: the optimizer's step differs"),
        damage=lambda folder: shutil.copy(folder / "global_step5" / LATER, folder / "global_step3" / LATER),
        again=True,
        tag="global_step3",
    ),
    "residual-that-no-file-holds": Refusal(  # at stage 0 there are no masters in another file
        RESIDUAL,
        (RESIDUAL, replace(RESIDUAL, stage=1)),
        ("MismatchError", f"not in the checkpoint: {BELOW}.mlp.0.weight"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, engines: Engines, tmp_path: Path) -> None:
    REFUSED[name].check(engines, tmp_path)


# --- `ds_ucp plan` predicts the bytes that a resume of experts reports

PLANNED: list[tuple[Any, list[Any]]] = [
    (
        Spread(4, 1, "bf16", (2, 4)),
        [Spread(2, 2, "fp32", (2, 1), data_first=True), Spread(4, 1, "bf16", (4, 4)), Spread(2, 0, "bf16", (2, 2))],
    )
]
if find_spec("deepspeed.module_inject.auto_ep_layer"):
    from tests.support.engines.autoep import Spread as AutoEP

    PLANNED.append(
        (
            AutoEP(4, 3, "bf16", 2),
            [AutoEP(2, 3, "fp32", 2, data_first=True), AutoEP(4, 1, "bf16", 4), AutoEP(2, 2, "fp32", 1)],
        )
    )


@pytest.mark.parametrize(("source", "targets"), PLANNED, ids=["deepspeed", "autoep"][: len(PLANNED)])
def test_a_plan_is_what_the_load_reports(
    source: Any, targets: list[Any], engines: Engines, subtests: pytest.Subtests
) -> None:
    folder = engines.saved(source).folder
    index = open_checkpoint(f"{folder}/global_step3", Comm())
    for target in targets:
        with subtests.test(target=str(target)):
            (outcome,) = engines.load(target, folder)
            found = check_resume(index, parse_degrees(describe(target), index.run.topology))
            assert found.obstacles == []
            assert sum(rank.bytes_read for rank in outcome.ranks) == found.read
            assert {rank.state_bytes for rank in outcome.ranks} == {found.state}


def describe(spread: Any) -> str:
    """Return the degrees for `--target`."""
    ep = max(spread.degrees) if hasattr(spread, "degrees") else spread.ep
    return f"dp={spread.world},ep={ep},zero={spread.stage},precision={spread.precision}"
