"""AutoTP: a Hugging Face Llama resumes at another tensor-parallel degree, uneven heads and empty shards included."""

from __future__ import annotations

from functools import partial

import deepspeed
import pytest
from packaging.version import Version

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.formats import check_tag, open_checkpoint, read_latest
from deepspeed_ucp.tensor_parallel import from_universal_info
from deepspeed_ucp.tensor_parallel.affine import Mapped
from deepspeed_ucp.tensor_parallel.facts import Facts
from tests.support.covering import params, turns
from tests.support.engines.parallel import Launch, Route, Runs, compare_joined

pytestmark = pytest.mark.skipif(
    Version(deepspeed.__version__) < Version("0.19"), reason="AutoTP saves its layout since 0.19"
)

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


AutoTP = partial(Launch, pp=1, pipeline=False)

# Not stage 3 with empty shards: DeepSpeed's forward refuses parameters without elements.
SOURCES = {
    "even": [AutoTP(2), AutoTP(4, stage=2, precision="bf16"), AutoTP(1, stage=3)],
    "uneven": [AutoTP(2, stage=3, precision="bf16"), AutoTP(4, stage=0), AutoTP(1, precision="bf16", fp32_grads=True)],
}
TARGETS = {
    "even": [AutoTP(1, stage=3), AutoTP(4, stage=3), AutoTP(2, precision="bf16"), AutoTP(2)],
    "uneven": [
        AutoTP(1, stage=3, precision="bf16"),
        AutoTP(4, precision="bf16"),
        AutoTP(2, stage=3),
    ],
}
UNEVEN = [*TARGETS["uneven"], AutoTP(2, stage=2), AutoTP(1, stage=0), AutoTP(2, stage=0, precision="bf16")]
"""With exhaustive ones; these stages have the layout of an even model."""
SAME = Route("even", AutoTP(2), AutoTP(2))
ROUTES, MORE = (
    [
        Route(model, source, target)
        for model in SOURCES
        for source, target in turns(SOURCES[model], targets[model], count)
        if source != target
    ]
    for targets, count in ((TARGETS, 1), ({**TARGETS, "uneven": UNEVEN}, 2))
)


CHOSEN = [route for route in ROUTES if route.model == "uneven" or route.source.tp == 1]
"""An uneven model covers the join of shards of an even one."""


@pytest.mark.releases
@pytest.mark.parametrize("route", params(CHOSEN, MORE, str))
def test_resumes_at_another_degree(route: Route, runs: Runs) -> None:
    runs.check(route, ROUTES)


def test_same_degree_is_deepspeeds_own_load(runs: Runs) -> None:
    saved, resumed = runs.saved(SAME.model, SAME.source), runs.resumed(SAME, ROUTES)
    assert {local.direct for local in resumed} == {False}
    assert not compare_joined(saved, resumed, SAME.model)[1]


def test_the_cases_are_what_they_say(runs: Runs) -> None:
    """Three key-value heads: two ranks hold two and one; the last of four ranks holds no head."""
    assert widths(runs, "even", AutoTP(2)) == [16, 16]
    assert widths(runs, "uneven", AutoTP(2, stage=3, precision="bf16")) == [16, 8]
    assert widths(runs, "uneven", AutoTP(4, stage=0)) == [8, 8, 8, 0]


def widths(runs: Runs, model: str, launch: Launch) -> list[int]:
    """Return the rows of a query projection by tensor-parallel rank."""
    found = {local.place.tp_rank: len(local.state.parameters[Q_PROJ].value) for local in runs.saved(model, launch)}
    return [found[rank] for rank in sorted(found)]


def test_the_saved_maps_outrank_the_saved_lists(runs: Runs) -> None:
    """The maps name every parameter, and scale no piece."""
    launch = AutoTP(2, stage=3, precision="bf16")
    runs.saved("uneven", launch)
    folder = runs.folder("uneven", launch)
    index = open_checkpoint(check_tag(folder, str(read_latest(folder))), Comm())
    info = dict(index.model.hints["universal_checkpoint_info"])
    maps = info["affine_map"]["params"]
    pieces = [piece for each in maps.values() for rank in each["ranks"].values() for piece in rank["pieces"]]
    assert {piece.get("scale", 1.0) for piece in pieces} == {1.0}
    info |= {"parameter_with_row_parallelism_patterns": [".*"], "tp_replicated_parameter_patterns": [".*"]}
    names = index.stored.atoms.list_names({"exp_avg"})
    assert len(names) > 20
    assert {name for name in names if not isinstance(from_universal_info(info).find(name, Facts()), Mapped)} == set()
