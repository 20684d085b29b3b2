"""`ds_ucp plan` predicts the bytes that a resume of experts reports."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.examine.degrees import parse_degrees
from deepspeed_ucp.examine.resume import check_resume
from deepspeed_ucp.sources import open_checkpoint
from tests.support.engines import experts as engine_experts
from tests.support.engines.driving import Engines

NATIVE = engine_experts.Spread
KINDS: list[tuple[Any, list[Any]]] = [
    (
        NATIVE(4, 1, "bf16", (2, 4)),
        [NATIVE(2, 2, "fp32", (2, 1), data_first=True), NATIVE(4, 1, "bf16", (4, 4)), NATIVE(2, 0, "bf16", (2, 2))],
    )
]
if find_spec("deepspeed.module_inject.auto_ep_layer"):
    from tests.support.engines import autoep as engine_autoep

    FUSED = engine_autoep.Spread
    KINDS.append(
        (
            FUSED(4, 3, "bf16", 2),
            [FUSED(2, 3, "fp32", 2, data_first=True), FUSED(4, 1, "bf16", 4), FUSED(2, 2, "fp32", 1)],
        )
    )


@pytest.mark.parametrize(("source", "targets"), KINDS, ids=["deepspeed", "autoep"][: len(KINDS)])
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
