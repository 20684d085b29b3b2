"""Invariants of a load, over generated models, states and pairs of topologies, for every rank in one process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine import engines
from deepspeed_ucp.engine.engines import open_target
from deepspeed_ucp.errors import CheckpointError, MismatchError, RemoteError
from deepspeed_ucp.extensions.custom_load import CustomLoad, assemble_module
from deepspeed_ucp.load.context import LoadContext, LoadReport
from deepspeed_ucp.model.wrappers import WRAPPERS, Form, Wrapper
from tests.support.cases import AWKWARD, KINDS, Case, cases, keep_what_travels, pair_id, resume, topologies
from tests.support.contents import check_content, check_load, touched_records
from tests.support.covering import all_turns
from tests.support.damage import flip
from tests.support.ranks import World
from tests.support.reshard import (
    PATIENT,
    FakeTarget,
    examples,
    load,
    make_targets,
    open_for,
    take_a_step,
    temporary_folder,
)
from tests.synth import Model, Param, Run, State, Topology, build_files, random_state, read_state, write_files

# -- invariants 1 to 4 over everything ------------------------------------------------------------------------------


@examples(350)
@given(case=cases(), target=topologies(), chunk=st.sampled_from((16, 64, 1000)), in_place=st.booleans())
def test_any_topology_loads_into_any_other(case: Case, target: Topology, chunk: int, in_place: bool) -> None:
    note(f"{case.topology.label}→{target.label}")
    with temporary_folder() as folder:
        resume(case, target, folder, chunk=chunk, in_place=in_place)


TABLE = torch.arange(12.0)
MODELS = {
    "awkward": AWKWARD,
    # A learned temperature: its states have the shape of a scalar, but are states.
    "zero-dimensional": Model((Param("w", (3, 5)), Param("t", ()), Param("u", (), 1), Param("v", (), frozen=True))),
    # A trainable parameter that no optimizer was given is in the module states; ZeRO 3 does not save it.
    "loose": Model((Param("w", (3, 5)), Param("loose", (7,), group=None))),
    # One table in many layers, or a view of it: bytes that several buffers share are read once and verified.
    "shared": Model((Param("w", (3, 5)),), {"a": TABLE, "b": TABLE, "c": TABLE[3:7], "d.count": torch.ones(1)}),
}


def list_pairs(name: str) -> list[Any]:
    kinds = [kind for kind in KINDS if name != "loose" or kind.stage < 3]
    targets, count = (kinds, 2) if name == "awkward" else ([kinds[at] for at in (0, 2, 3, -2)], 1)
    rows = all_turns(kinds, targets, count, pair_id)
    return [pytest.param(name, *row.values, id=f"{name}-{row.id}", marks=row.marks) for row in rows]


@pytest.mark.parametrize(("name", "source", "target"), [row for name in MODELS for row in list_pairs(name)])
def test_every_kind_of_topology_loads_into_every_other(
    name: str, source: Topology, target: Topology, tmp_path: Path
) -> None:
    state = random_state(MODELS[name], 7, precision=source.precision)
    resume(Case(MODELS[name], source, state, False), target, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_states_of_another_precision_are_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    """The saved optimizer kept moments of this dtype, the live one keeps fp32."""
    model = Model((Param("a", (7, 3)), Param("b", (5,))))
    state = random_state(model, 0, dtype=dtype)
    path = Case(model, Topology(1, 3), state, False).write(tmp_path)
    fp32 = {name: {key: value.float() for key, value in atoms.items()} for name, atoms in state.atoms.items()}
    check_load(path, model, Topology(2, 2), replace(state, atoms=fp32))


# -- invariant 2 ----------------------------------------------------------------------------------------------------


@examples(80)
@given(case=cases(max_dp=5), there=topologies(max_dp=5))
def test_a_load_and_a_load_back_restore_the_first_state(case: Case, there: Topology) -> None:
    """A→B→A: the state of B, which is known to the bit, is saved in B's format and loaded into A."""
    note(f"{case.topology.label}→{there.label}→{case.topology.label}")
    with temporary_folder() as folder:
        saved, _ = resume(case, there, folder / "a")
        back = replace(case, topology=there, state=replace(saved, groups=saved.groups or case.state.groups))
        held, again = resume(back, case.topology, folder / "b")
        check_content(again, keep_what_travels(saved, held, case, there))


# -- checksums ------------------------------------------------------------------------------------------------------


@examples(60)
@given(data=st.data(), case=cases(max_dp=4), target=topologies(max_dp=4))
def test_a_flipped_bit_anywhere_in_a_read_record_is_detected(data: st.DataObject, case: Case, target: Topology) -> None:
    """The bit may be in padding, or in bytes that only another rank reads."""
    case = replace(case, legacy=False)
    with temporary_folder() as folder:
        targets = make_targets(case.model, target)
        index = open_for(case.write(folder), targets[0])
        number = data.draw(st.sampled_from(sorted(touched_records(load(index, targets)))))
        record, path = index.records[number], Path(index.files[index.records.files[number]].path)
        flip(path, record.offset + data.draw(st.integers(0, record.nbytes - 1)), data.draw(st.integers(0, 7)))
        with pytest.raises(CheckpointError, match=f"{path.name}: the {record.nbytes} bytes at"):
            load(index, make_targets(case.model, target))


# -- options of a load ----------------------------------------------------------------------------------------------


@examples(60)
@given(case=cases(max_dp=5), target=topologies(max_dp=5))
def test_weights_load_without_optimizer_states_or_with_the_module_only(case: Case, target: Topology) -> None:
    """``load_optimizer_states=False`` neither changes the optimizer nor reads its states."""
    with temporary_folder() as folder:
        path = case.write(folder)
        saved = read_state(path, case.model, case.topology)
        # The module's tensors have the model's precision; ZeRO 3 saves no module tensors.
        precision = torch.float32 if case.topology.stage == 3 else case.topology.dtype
        weights = {name: {"fp32": atoms["fp32"].to(precision).float()} for name, atoms in saved.atoms.items()}
        _, ranks = check_load(path, case.model, target, State(weights, {}, ()), with_states=False)
        assert {key.state for key in ranks[0].fill_plan.touched} <= {"fp32", "module", "copy"}


@examples(60)
@given(case=cases(max_dp=4), target=topologies(max_dp=4))
def test_live_optimizer_states_are_overwritten_in_place(case: Case, target: Topology) -> None:
    with temporary_folder() as folder:
        path = case.write(folder)
        saved = read_state(path, case.model, case.topology)
        targets = make_targets(case.model, target)
        for rank in targets:
            take_a_step(rank.wrapped)
        before = number_states(targets)
        check_content(load(open_for(path, targets[0]), targets), saved)
        assert number_states(targets) <= before


def number_states(targets: list[FakeTarget]) -> set[int]:
    states = [state for rank in targets for state in rank.wrapped.state.values()]
    return {id(value) for state in states for key, value in state.items() if key != "step"}


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_ranks_may_run_in_any_order_between_exchanges(order: tuple[int, ...], tmp_path: Path) -> None:
    resume(Case(AWKWARD, Topology(3, 3), random_state(AWKWARD, 0), False), Topology(2, 4), tmp_path, order=order)


def test_different_steps_in_one_flat_buffer_are_refused(tmp_path: Path) -> None:
    model = Model((Param("a", (3,)), Param("b", (5,))))
    files = build_files(model, random_state(model, 0), Topology(0), Run())
    files["mp_rank_00_model_states.pt"]["optimizer"]["state"][1]["step"] += 2
    write_files(tmp_path, files)
    targets = make_targets(model, Topology(1, 2))
    with pytest.raises(MismatchError, match=r"step differs .* a has 3.0, b has 5.0"):
        load(open_for(tmp_path, targets[0]), targets)
    raw = make_targets(model, Topology(0))
    (rank,) = load(open_for(tmp_path, raw[0]), raw)
    assert [float(rank.target.wrapped.state[flat.tensor]["step"]) for flat in raw[0].flats] == [3.0, 5.0]


# -- the whole module as a state dict, for `custom_load_fn` ------------------------------------------------------------


@examples(60)
@given(case=cases(max_dp=5))
def test_the_module_is_assembled_in_its_saved_dtypes(case: Case) -> None:
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


def test_one_rank_out_of_memory_for_its_masters_is_an_error_on_all_ranks() -> None:
    def run(rank: int, comm: Comm) -> None:
        def refresh() -> None:
            if rank == 1:
                raise MemoryError

        target: Any = SimpleNamespace(
            whole_parameters=nullcontext, engine=SimpleNamespace(module=None), refresh_masters=refresh, list_keys=dict
        )
        report, fill_plan = LoadReport(direct=True, reason=""), SimpleNamespace(touched=[])
        job = LoadContext(None, comm, UniversalConfig(), report, custom_load_fn=lambda src, dst: None)
        CustomLoad().change_engine(job, target, fill_plan)

    assert [type(each) for each in World(3).run(run)] == [RemoteError] * 3


# -- a new optimizer wrapper: one row of the table, and one class for its live engines --------------------------------


def make_row(form: Form, stage: int, *keys: str) -> Wrapper:
    return Wrapper("made_up", form, (stage,), ("bfloat16",), "MadeUp", keys=keys, inner="torch_states")


ROWS = {
    "partitions": make_row(Form.PARTITIONS, 1, "cuts"),
    "reserved": make_row(Form.RESERVED, 3, "rows", "zero_stage"),
    "flat": make_row(Form.FLAT, 0, "whole"),
    "single": make_row(Form.SINGLE, 0, "singles"),
}


@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize(
    "other", [Topology(0, 2, "bf16"), Topology(2, 3, "bf16"), Topology(3, 2, "bf16"), None], ids=str
)
def test_a_new_wrapper_loads_into_all_others_and_back(
    form: str, other: Topology | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, model = ROWS[form], Model((Param("a", (5, 3)), Param("b", (7,), 1), Param("c", (2, 2), 1)))
    monkeypatch.setitem(WRAPPERS, row.name, row)
    state = random_state(model, 0, precision="bf16")
    two, three, four = (Topology(row.stages[0], dp, "bf16", wrapper=row.name) for dp in (2, 3, 4))
    for source, target in ((two, other or four), (other or four, three)):
        _, ranks = resume(Case(model, source, state, False), target, tmp_path / source.label)
        assert ranks[0].fill_plan.index.topology.wrapper == source.row.name


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
