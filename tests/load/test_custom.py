"""The whole module as a state dict, for users' own load functions."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.errors import RemoteError
from deepspeed_ucp.extensions.custom_load import CustomLoad, assemble_module
from deepspeed_ucp.load.context import LoadContext, LoadReport
from tests.support.cases import Case, cases
from tests.support.ranks import World
from tests.support.reshard import PATIENT, examples, make_targets, open_for, temporary_folder
from tests.synth import read_state


@examples(60)
@given(case=cases(max_dp=5))
def test_the_module_is_assembled_in_the_dtypes_that_it_had(case: Case) -> None:
    with temporary_folder() as folder:
        path = case.write(folder)
        saved = read_state(path, case.model, case.topology)
        tensors = assemble_module(open_for(path, make_targets(case.model, case.topology)[0]), PATIENT)
    for param in case.model.params:
        value = saved.atoms[param.alias_of or param.name]["fp32"]
        trained_zero3 = case.topology.stage == 3 and param.trains and param.group is not None
        expected = value if trained_zero3 else value.to(case.topology.dtype)
        found = tensors[param.name]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(found, expected)
    for name, value in case.model.buffers.items():
        assert torch.equal(tensors[name], value)
    assert set(tensors) == {param.name for param in case.model.params} | set(case.model.buffers)


def test_one_rank_without_memory_for_its_masters_ends_all_ranks() -> None:
    def run(rank: int, comm: Comm) -> None:
        def refresh() -> None:
            if rank == 1:
                raise MemoryError

        target: Any = SimpleNamespace(
            whole_parameters=nullcontext, engine=SimpleNamespace(module=None), refresh_masters=refresh, list_keys=dict
        )
        report, work = LoadReport(direct=True, reason=""), SimpleNamespace(touched=[])
        job = LoadContext(None, comm, UniversalConfig(), report, custom_load_fn=lambda src, dst: None)
        CustomLoad().change_engine(job, target, work)

    assert [type(each) for each in World(3).run(run)] == [RemoteError] * 3
