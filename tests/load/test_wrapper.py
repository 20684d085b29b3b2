"""A new optimizer wrapper needs one row of the table and one class for its live engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ucp.engine import engines
from deepspeed_ucp.engine.engines import open_target
from deepspeed_ucp.model.wrappers import WRAPPERS, Form, Wrapper
from tests.support.contents import check_load
from tests.synth import Model, Param, Run, Topology, build_files, random_state, read_state, write_files
from tests.synth.description import ADAMW


def make_row(form: Form, stage: int, *keys: str) -> Wrapper:
    return Wrapper("made_up", form, (stage,), ("bfloat16",), "MadeUp", keys=keys, inner="torch_states")


ROWS = {
    "partitions": make_row(Form.PARTITIONS, 1, "cuts"),
    "reserved": make_row(Form.RESERVED, 3, "rows", "zero_stage"),
    "flat": make_row(Form.FLAT, 0, "whole"),
    "single": make_row(Form.SINGLE, 0, "singles"),
}

MODEL = Model((Param("a", (5, 3)), Param("b", (7,), 1), Param("c", (2, 2), 1)))

STATE = replace(random_state(MODEL, 0, precision="bf16"), groups=({**ADAMW, "lr": 0.5}, {**ADAMW, "lr": 0.25}))

OTHERS = [Topology(0, 2, "bf16"), Topology(2, 3, "bf16"), Topology(3, 2, "bf16"), None]


@pytest.fixture(params=ROWS)
def made_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Wrapper:
    row = ROWS[request.param]
    monkeypatch.setitem(WRAPPERS, row.name, row)
    return row


def make_topology(row: Wrapper, dp: int) -> Topology:
    return Topology(row.stages[0], dp, "bf16", wrapper=row.name)


def resume(folder: Path, source: Topology, target: Topology) -> None:
    write_files(folder, build_files(MODEL, STATE, source, Run()))
    index, _ = check_load(folder, MODEL, target, read_state(folder, MODEL, source))
    assert index.topology.wrapper == source.row.name


@pytest.mark.parametrize("other", OTHERS, ids=lambda topology: topology.label if topology else "itself")
def test_a_new_wrapper_loads_into_all_others_and_back(tmp_path: Path, made_up: Wrapper, other: Topology | None) -> None:
    resume(tmp_path / "from", make_topology(made_up, 2), other or make_topology(made_up, 4))
    resume(tmp_path / "into", other or make_topology(made_up, 4), make_topology(made_up, 3))


def test_an_engine_with_a_new_wrapper_is_opened_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class MadeUpTarget(engines.WholeTarget):
        def __init__(self, engine: Any, wrapper: str) -> None:
            self.wrapped, self.wrapper = engine.optimizer, wrapper

    row = replace(ROWS["flat"], masters="my_masters", params="mine")
    monkeypatch.setitem(WRAPPERS, "made_up", row)
    monkeypatch.setitem(engines.TARGETS, "made_up", MadeUpTarget)
    held = {"my_masters": [torch.zeros(4)], "mine": [[torch.zeros(3), torch.zeros(1)]]}
    target = open_target(SimpleNamespace(module=torch.nn.Module(), optimizer=type("MadeUp", (), held)()))
    assert isinstance(target, MadeUpTarget)
    assert target.traits.has_copies
    ((params, master),) = target.list_pairs(0)
    assert params is held["mine"][0] and master is held["my_masters"][0]
