"""AutoTP: a Hugging Face Llama resumes at another tensor-parallel degree, uneven heads and empty shards included."""

from __future__ import annotations

import deepspeed
import pytest
from engine_autotp import BATCH, RANKS, Launch, Runs, join, mean_losses, widths
from packaging.version import Version

from deepspeed_ucp.testing import LOSS_TOLERANCE, WorldPool
from deepspeed_ucp.testing.compare import compare

pytestmark = pytest.mark.skipif(
    Version(deepspeed.__version__) < Version("0.19"), reason="AutoTP's training tells its layout from 0.19 on"
)

BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"

# Not stage 3 with empty shards: DeepSpeed's own forward refuses parameters without elements there.
ROUTES = {
    "even": [
        (Launch(2, 1), Launch(1, 3)),
        (Launch(2, 1), Launch(4, 2)),
        (Launch(2, 1), Launch(2, 3)),
        (Launch(4, 2, "bf16"), Launch(2, 1, "bf16")),
        (Launch(1, 3), Launch(2, 2)),
        (Launch(1, 3), Launch(4, 3)),
    ],
    "uneven": [
        (Launch(2, 3, "bf16"), Launch(1, 3, "bf16")),
        (Launch(2, 3, "bf16"), Launch(4, 1, "bf16")),
        (Launch(4, 0), Launch(2, 2)),
        (Launch(4, 0), Launch(1, 0)),
        (Launch(4, 1), Launch(2, 3)),
        (Launch(1, 1, "bf16", BF16_OPTIMIZER), Launch(2, 0, "bf16")),
        (Launch(1, 1, "bf16", BF16_OPTIMIZER), Launch(4, 2, "bf16")),
    ],
}


@pytest.fixture(scope="module")
def runs(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ucp_worlds, tmp_path_factory.mktemp("autotp"))


@pytest.mark.parametrize(
    ("model", "source", "target"),
    [pytest.param(model, *route, id=f"{model}-{route[0]}->{route[1]}") for model in ROUTES for route in ROUTES[model]],
)
def test_resumes_at_another_degree(model: str, source: Launch, target: Launch, runs: Runs) -> None:
    saved, resumed = runs.saved(source, model), runs.resumed(source, target, model)
    assert all(local.direct for local in resumed)
    count, differences = compare(join(saved, model == "uneven"), join(resumed, model == "uneven"))
    assert count > 0
    assert not differences, "\n".join(differences)
    tolerance = LOSS_TOLERANCE["bf16" if "bf16" in (source.precision, target.precision) else "fp32"]
    assert mean_losses(resumed) == pytest.approx(mean_losses(saved), rel=tolerance)


def test_same_degree_is_deepspeeds_own_load(runs: Runs) -> None:
    source = Launch(2, 1)
    resumed = runs.resumed(source, source, "even")
    assert [local.direct for local in resumed] == [False] * RANKS
    assert not compare(join(runs.saved(source, "even"), False), join(resumed, False))[1]


def test_the_cases_are_what_they_say(runs: Runs) -> None:
    """Three key-value heads: two ranks hold two and one, and of four the last holds none."""
    assert widths(runs.saved(Launch(2, 1), "even"), Q_PROJ, 0) == [16, 16]
    assert widths(runs.saved(Launch(2, 3, "bf16"), "uneven"), Q_PROJ, 0) == [16, 8]
    assert widths(runs.saved(Launch(4, 0), "uneven"), Q_PROJ, 0) == [8, 8, 8, 0]
    assert BATCH % RANKS == 0
