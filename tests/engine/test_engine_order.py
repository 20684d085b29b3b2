"""Stage 0 in the saved topology, where DeepSpeed's own load goes by positions: only where these are the saved ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from tests.support.engines import order as engine_order


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_are_those_of_their_names(
    precision: str, tmp_path: Path, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    ((truth, found),) = ucp_worlds.get(1).run(engine_order.load_each, str(tmp_path), precision)
    assert {state for _, state in truth} >= {"weight", "fp32", "exp_avg", "exp_avg_sq"}
    for kind, (direct, reason, states) in found.items():
        with subtests.test(kind=kind):
            assert direct == (kind != "same"), reason
            expected = {
                (name.replace(name[0], name[0] * (1 + (kind == "renamed")), 1), state): value
                for (name, state), value in truth.items()
                if kind != "no optimizer" or state == "weight"
            }
            assert states.keys() == expected.keys()
            assert [key for key, value in expected.items() if not torch.equal(states[key], value)] == []
    assert "parameter order" in found["moved"][1]
