"""The synthesiser by itself: layouts by hand, and that what is written is what is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from .compare import differences
from .description import Model, Param, Run, State, Topology, assert_same_state, random_state
from .files import build_files, write_checkpoint
from .layout import Slice, group_layouts, partition_layout, recorded_offsets, sub_groups
from .reader import read_state

if TYPE_CHECKING:
    from pathlib import Path

MODEL = Model(
    (
        Param("a.weight", (7, 13)),
        Param("a.bias", (7,), frozen=True),
        Param("b.weight", (5, 7), group=1),
        Param("empty", (0, 3)),
        Param("one", (1,), group=1),
        Param("tied", (7, 13), alias_of="a.weight"),
        Param("c.weight", (3, 5)),
        Param("outside", (3,), group=None, frozen=True),
        Param("alone", (1,), group=2),
    ),
    {"count": torch.arange(3)},
)

ABC = Model((Param("a", (3,)), Param("b", (5,)), Param("c", (4,))))

TOPOLOGIES = [
    *(Topology(0, 2, precision) for precision in ("fp32", "bf16", "fp16")),
    *(Topology(0, 2, precision, "fused") for precision in ("bf16", "fp16")),
    *(Topology(stage, dp, precision) for stage in (1, 2, 3) for dp in (1, 2, 5) for precision in ("fp32", "bf16")),
    *(Topology(stage, 16, "fp16") for stage in (1, 3)),
    *(Topology(1, dp, "bf16", "bf16") for dp in (1, 3, 16)),
    *(Topology(2, dp, round_robin=True, parameter_alignment=padded) for dp in (2, 3) for padded in (True, False)),
    *(Topology(3, 3, sub_group_size=size) for size in (1, 10, 31)),
    Topology(1, 3, "bf16", elastic=True),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.label)
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_reading_inverts_writing(tmp_path: Path, topology: Topology, legacy: bool) -> None:
    state = random_state(MODEL, 0, precision=topology.precision)
    folder = write_checkpoint(tmp_path, MODEL, state, topology, run=Run(garbage=float("nan")), legacy=legacy)
    read = read_state(folder, MODEL, topology)
    assert (tmp_path / "latest").read_text() == folder.name == "global_step3"
    assert_same_state(read if read.groups else State(read.atoms, read.scalars, state.groups), state)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.label)
def test_every_trained_element_lies_in_one_place(topology: Topology) -> None:
    placed = [
        (part.name, part.start + index)
        for flats in partition_layout(MODEL, topology)
        for flat in flats
        for part in flat.slices
        for index in range(part.numel)
    ]
    wanted = [
        (param.name, index)
        for param in MODEL.owners
        if param.group is not None
        for index in range(param.numel)
        if param.trains or topology.kind == "raw"
    ]
    assert sorted(placed) == sorted(wanted)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.label)
def test_slices_stay_inside_their_buffer_and_apart(topology: Topology) -> None:
    for flat in (flat for flats in partition_layout(MODEL, topology) for flat in flats):
        ends = [0, *(part.offset + part.numel for part in flat.slices)]
        assert all(part.offset >= end for part, end in zip(flat.slices, ends[:-1], strict=True))
        assert ends[-1] <= flat.numel


def test_zero1_pads_the_group_to_twice_dp() -> None:
    first, last = partition_layout(ABC, Topology(1, 3))[::2]
    assert (first[0].numel, first[0].padding) == (4, 0)
    assert first[0].slices == (Slice("a", 0, 0, 3), Slice("b", 0, 3, 1))
    assert (last[0].numel, last[0].padding, last[0].slices) == (4, 0, (Slice("c", 0, 0, 4),))


def test_zero1_books_padding_on_every_rank_that_has_some() -> None:
    model = Model((Param("a", (3,)),))
    assert [flats[0].padding for flats in partition_layout(model, Topology(1, 4))] == [0, 1, 2, 2]


def test_bf16_optimizer_books_all_padding_on_the_last_rank() -> None:
    model = Model((Param("a", (3,)),))
    assert [flats[0].padding for flats in partition_layout(model, Topology(1, 4, "bf16", "bf16"))] == [0, 0, 0, 5]


def test_round_robin_deals_parameters_to_ranks() -> None:
    (layout,) = group_layouts(ABC, Topology(2, 2, round_robin=True))
    assert [param.name for param in layout.params] == ["a", "c", "b"]
    assert layout.offsets == (0, 3, 7)


def test_round_robin_without_alignment_records_offsets_that_are_wrong() -> None:
    (layout,) = group_layouts(ABC, Topology(2, 2, round_robin=True))
    assert recorded_offsets(layout, ABC.groups[0]) == (0, 3, 8)


def test_alignment_starts_parameters_at_16_bytes_and_leaves_the_last_unpadded() -> None:
    (layout,) = group_layouts(ABC, Topology(2, 2, "bf16", parameter_alignment=True, round_robin=True))
    assert (layout.offsets, layout.paddings, layout.used) == ((0, 8, 16), (5, 4, 0), 21)
    assert recorded_offsets(layout, ABC.groups[0]) == (0, 16, 8)


def test_zero3_cuts_each_parameter_and_closes_sub_groups_when_full() -> None:
    topology = Topology(3, 2, sub_group_size=4)
    assert [[param.name for param in group] for group in sub_groups(ABC.params, topology)] == [["a", "b"], ["c"]]
    second_rank = partition_layout(ABC, topology)[1]
    assert second_rank[0].slices == (Slice("a", 2, 0, 1), Slice("b", 3, 2, 2))
    assert [flat.numel for flat in second_rank] == [5, 2]


def test_before_the_first_step_there_are_no_states() -> None:
    state = random_state(MODEL, 0, states=(), step=None)
    optimizer = build_files(MODEL, state, Topology(2, 2))["zero_pp_rank_1_mp_rank_00_optim_states.pt"]
    assert optimizer["optimizer_state_dict"]["base_optimizer_state"]["state"] == {}


def test_a_parameter_without_gradient_has_no_state_at_stage_0_and_zeros_in_a_flat_buffer() -> None:
    state = random_state(MODEL, 0, without=("b.weight",))
    raw = build_files(MODEL, state, Topology(0))["mp_rank_00_model_states.pt"]["optimizer"]
    assert sorted(raw["state"]) == [0, 3, 5, 6]  # 1 is frozen, 2 empty, 4 never had a gradient
    flat = build_files(MODEL, state, Topology(1))["zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert not flat["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["exp_avg"][:35].any()


def test_wrappers_that_a_stage_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="'fused' is no wrapper of stage 1 in bf16"):
        Topology(1, 2, "bf16", "fused")


def test_differences_tell_tensors_apart_by_storage() -> None:
    padded = torch.zeros(4)
    assert list(differences({"x": padded[:3]}, {"x": torch.zeros(3)})) == [".x: storage size 16 is not 12"]
    assert list(differences({"x": padded[1:]}, {"x": padded[:3]})) == [".x: storage offset 1 is not 0"]
