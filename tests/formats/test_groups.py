"""Stage 0 without an engine: the user describes the optimizer's param groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import ConfigError, MismatchError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from tests.support.reshard import check_content, load, make_targets
from tests.support.reshard3d import draw_state, make_pipeline
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

ONE_GROUP = Model(
    (
        Param("body.weight", (3, 5)),
        Param("body.bias", (3,)),
        Param("tied", (3, 5), alias_of="body.weight"),
        Param("head.weight", (5, 3)),
    ),
    {"body.count": torch.arange(3)},
)
TWO_GROUPS = Model(tuple(Param(p.name, p.shape, group=int(len(p.shape) == 1)) for p in ONE_GROUP.owners))
NAMES = [["body.weight", "head.weight"], ["body.bias"]]
WRAPPERS = [Topology(0), Topology(0, 1, "bf16", "fused"), Topology(0, 1, "fp16", "unfused")]


def write(folder: Path, model: Model, topology: Topology) -> str:
    return str(write_checkpoint(folder, model, random_state(model, 3, precision=topology.precision), topology))


def open_named(folder: str, groups: Any) -> Any:
    return open_checkpoint(folder, Comm(), Naming(groups=groups))


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda t: t.label)
@pytest.mark.parametrize(("model", "groups"), [(ONE_GROUP, "module"), (TWO_GROUPS, NAMES)], ids=["module", "names"])
def test_named_groups_are_as_good_as_an_engine(model: Model, groups: Any, wrapper: Topology, tmp_path: Path) -> None:
    """Names in ``model.parameters()``'s order: ties once, buffers not at all."""
    index = open_named(write(tmp_path, model, wrapper), groups)
    wanted = [["body.weight", "body.bias", "head.weight"]] if groups == "module" else NAMES
    assert [list(group.names) for group in index.run.groups] == wanted
    check_content(load(index, make_targets(model, Topology(3, 2))), random_state(model, 3, precision=wrapper.precision))


def test_groups_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, TWO_GROUPS, WRAPPERS[1])
    with pytest.raises(MismatchError, match=r"groups of \[30, 3\] elements; this run: \[body.weight, body.bias"):
        open_named(folder, "module")


@pytest.mark.parametrize("groups", ["modules", [], ["body.weight"], [[1]]], ids=str)
def test_invalid_groups_are_refused(groups: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="list of lists of parameter names is needed, found"):
        open_named(write(tmp_path, ONE_GROUP, WRAPPERS[0]), groups)


def test_named_groups_of_other_stages_are_not_needed(tmp_path: Path) -> None:
    assert open_named(write(tmp_path, ONE_GROUP, Topology(1, 2)), "module").run.groups[0].names[0] == "body.weight"


def test_a_pipelines_groups_are_named_one_by_one(tmp_path: Path) -> None:
    """Its files do not record tied layers."""
    model = make_pipeline([["column"], ["row"]], tied=False)
    held = draw_state(model, Topology(0, 1, pp=2))
    folder = str(held.write(tmp_path))
    with pytest.raises(MismatchError, match="a pipeline's files do not say .* Give the names of each group"):
        open_named(folder, "module")
    index = open_named(folder, [[param.name for param in model.params]])
    assert [set(group.names) for group in index.run.groups] == [
        {key.name for key in index.stored.atoms if key.state == "fp32"}
    ]
