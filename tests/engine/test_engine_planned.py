"""The bytes that `ds_ucp plan` expects of a resume of experts are those that the load reports."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.examine.degrees import parse_degrees
from deepspeed_ucp.examine.resume import check_resume
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.testing import WorldPool
from tests.support.engines import experts as engine_experts

NATIVE = engine_experts.Spread
KINDS: list[tuple[Any, Any, list[Any]]] = [
    (
        engine_experts,
        NATIVE(4, 1, "bf16", (2, 4)),
        [NATIVE(2, 2, "fp32", (2, 1), data_first=True), NATIVE(4, 1, "bf16", (4, 4)), NATIVE(2, 0, "bf16", (2, 2))],
    )
]
if find_spec("deepspeed.module_inject.auto_ep_layer"):
    from tests.support.engines import autoep as engine_autoep

    FUSED = engine_autoep.Spread
    KINDS.append(
        (
            engine_autoep,
            FUSED(4, 3, "bf16", 2),
            [FUSED(2, 3, "fp32", 2, data_first=True), FUSED(4, 1, "bf16", 4), FUSED(2, 2, "fp32", 1)],
        )
    )


@pytest.mark.parametrize(("kind", "source", "targets"), KINDS, ids=["deepspeed", "autoep"][: len(KINDS)])
def test_a_plan_is_what_the_load_reports(
    kind: Any, source: Any, targets: list[Any], tmp_path: Path, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    ucp_worlds.get(source.world).run(kind.save, source, str(tmp_path), 1)
    index = open_checkpoint(str(tmp_path / "global_step3"), Comm())
    for target in targets:
        with subtests.test(target=str(target)):
            reports = ucp_worlds.get(target.world).run(kind.load_planned, target, str(tmp_path))
            found = check_resume(index, parse_degrees(describe(target), index.run.topology))
            assert found.obstacles == []
            assert (sum(read for read, *_ in reports), {state for *_, state in reports}) == (found.read, {found.state})


def describe(spread: Any) -> str:
    """Return the degrees for `--target`."""
    ep = max(spread.degrees) if hasattr(spread, "degrees") else spread.ep
    return f"dp={spread.world},ep={ep},zero={spread.stage},precision={spread.precision}"
