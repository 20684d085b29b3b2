"""Models whose state dict calls tensors otherwise than the module does, and holds some of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from tests.support.engines import statedict as engine_statedict

STAGES = [0, 1, 2, 3]


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    root = tmp_path_factory.mktemp("heads")
    return root, ucp_worlds.get(2).run(engine_statedict.save_each, str(root), STAGES)[0]


@pytest.mark.parametrize(("source", "target"), [(0, 3), (1, 2), (2, 0), (3, 1), (3, 3)])
def test_everything_comes_back(source: int, target: int, saved: tuple[Path, dict], ucp_worlds: WorldPool) -> None:
    """Trained and frozen weights, statistics, counters, and what quantized weights keep beside them."""
    root, truth = saved
    (found, told), _ = ucp_worlds.get(2).run(engine_statedict.load, f"{root}/{source}", target)
    assert found.keys() == truth[source].keys()
    assert [name for name, value in truth[source].items() if not torch.equal(found[name], value)] == []
    assert not [text for text in told if "differs" not in text]


def test_an_evaluating_engine_around_a_module_that_has_trained(ucp_worlds: WorldPool, tmp_path: Path) -> None:
    """Parameters that ZeRO 3 keeps gathered, as small ones, are not taken for the loaded ones."""
    for found, truth in ucp_worlds.get(2).run(engine_statedict.evaluate_after_fit, str(tmp_path)):
        assert found == [truth, truth]
