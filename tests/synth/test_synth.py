"""Tests of the synthesiser without DeepSpeed: reading inverts writing, and cases that no real engine saves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch
from deepspeed.runtime.utils import partition_uniform

from .compare import differences
from .description import Layer, Model, Param, Run, State, Topology, assert_same_state, random_state
from .engines3d import Case3D
from .files import build_files, write_checkpoint
from .megatron import megatron_args, nested_module, old_universal_info, universal_info
from .parallel import local_models, split
from .reader import read_locals
from .stages import bidirectional, contiguous, instance_names, interleaved

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

WORD, POSITION = "tied_modules.embed.word", "tied_modules.embed.position"

PIPE = Model(
    (
        Param("1.up", (8, 3)),
        Param("1.bias", (8,), group=1, frozen=True),
        Param(WORD, (12, 3), tied=True),
        Param(POSITION, (5, 3)),
        Param("2.down", (3, 8)),
        Param("2.empty", (0, 3)),
        Param("4.norm", (3,), group=1),
        Param("4.loose", (3,), group=None),
    ),
    {"1.count": torch.arange(3), "tied_modules.embed.scale": torch.ones(1)},
    (Layer("embed"), Layer(), Layer(), Layer(file=False), Layer(), Layer(), Layer("embed")),
)
PLAIN = Model((Param("up", (8, 3)), Param("down", (3, 8), group=1), Param("norm", (3,), frozen=True)))

PIPE_TOPOLOGIES = [
    Topology(1, 2, "bf16", tp=2, pp=2),
    Topology(1, 3, pp=4, placement=((0, 1), (2, 3), (4,), (5, 6))),
    Topology(1, 2, "bf16", "bf16", tp=2, pp=3),
    Topology(1, 2, pp=9),
    Topology(1, 2, tp=2, pp=2, placement=interleaved(7, 2, 2)),
    Topology(1, 2, pp=2, placement=bidirectional(7, 2)),
    Topology(1, 1, "bf16", tp=2, pp=4, placement=bidirectional(7, 4)),
    Topology(0, 2, "fp32", pp=2, tp=2),
    Topology(0, 2, "bf16", pp=2),
    Topology(0, 2, "fp16", pp=2),
    Topology(1, 2),
]
PLAIN_TOPOLOGIES = [
    Topology(0, 2, tp=2),
    Topology(0, 1, "fp16", "fused", tp=4),
    *(Topology(stage, 3, "bf16", tp=2) for stage in (1, 2, 3)),
]
CASES = [*product([MODEL], TOPOLOGIES), *product([PIPE], PIPE_TOPOLOGIES), *product([PLAIN], PLAIN_TOPOLOGIES)]
cut = Case3D(Topology(1)).cut


def _draw(model: Model, topology: Topology) -> State:
    return random_state(model, 0, precision=topology.precision, topology=topology)


@pytest.mark.parametrize(("model", "topology"), CASES, ids=lambda each: getattr(each, "label", ""))
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_reading_inverts_writing(tmp_path: Path, model: Model, topology: Topology, legacy: bool) -> None:
    state, run = _draw(model, topology), Run(garbage=float("nan"))
    folder = write_checkpoint(tmp_path, model, state, topology, cut=cut, run=run, legacy=legacy)
    assert (tmp_path / "latest").read_text() == folder.name == "global_step3"
    read = read_locals(folder, local_models(model, topology, cut), topology)
    expected = split(model, state, topology, cut)
    assert read.keys() == expected.keys() == set(range(topology.mp))
    for mp, found in read.items():
        wanted = expected[mp].state
        assert_same_state(found if found.groups else replace(found, groups=wanted.groups), wanted)


@pytest.mark.parametrize("layers", range(1, 14))
@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
def test_contiguous_stages_equal_deepspeeds_uniform_ones(layers: int, pp: int) -> None:
    bounds = partition_uniform(layers, pp)
    assert contiguous(layers, pp) == tuple(tuple(range(bounds[rank], bounds[rank + 1])) for rank in range(pp))


def test_placements_by_hand() -> None:
    assert interleaved(8, 2, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert bidirectional(8, 4) == ((0, 1, 6, 7), (2, 3, 4, 5), (2, 3, 4, 5), (0, 1, 6, 7))
    with pytest.raises(ValueError, match="even number of ranks, not 3"):
        bidirectional(8, 3)


def test_instances_are_those_that_several_stages_hold() -> None:
    assert instance_names(PIPE, Topology(1, pp=2)) == {name: (name, f"{name}#1") for name in (WORD, POSITION)}
    assert instance_names(PIPE, Topology(1, pp=1)) == {}
    both = instance_names(PIPE, Topology(1, pp=4, placement=bidirectional(7, 4)))
    assert both["2.down"] == ("2.down", "2.down#1")
    assert set(both) == {param.name for param in PIPE.params}


def test_tied_weights_are_equal_on_all_stages_and_the_rest_of_a_tied_module_is_not() -> None:
    topology = Topology(1, pp=2)
    first, last = (local.state.atoms for local in split(PIPE, _draw(PIPE, topology), topology).values())
    assert torch.equal(first[WORD]["fp32"], last[WORD]["fp32"])
    assert not torch.equal(first[WORD]["exp_avg"], last[WORD]["exp_avg"])
    assert not torch.equal(first[POSITION]["fp32"], last[POSITION]["fp32"])


def test_instances_of_a_real_run_have_equal_states() -> None:
    topology = Topology(1, pp=2)
    state = random_state(PIPE, 0, topology=topology, equal_instances=True)
    assert torch.equal(state.atoms[f"{WORD}#1"]["exp_avg"], state.atoms[WORD]["exp_avg"])
    assert not torch.equal(state.atoms[f"{POSITION}#1"]["fp32"], state.atoms[POSITION]["fp32"])


def test_a_missing_instance_has_the_values_of_the_plain_name() -> None:
    first, last = split(PIPE, random_state(PIPE, 0), Topology(1, pp=2)).values()
    assert torch.equal(first.state.atoms[POSITION]["exp_avg"], last.state.atoms[POSITION]["exp_avg"])


def test_older_releases_do_not_write_the_degrees() -> None:
    topology = Topology(1, 3, tp=2, pp=2)
    for written in (True, False):
        files = build_files(PIPE, _draw(PIPE, topology), topology, Run(parallel_dimensions=written), cut=cut)
        assert ("checkpoint_parallel_dimensions" in files["mp_rank_03_model_states.pt"]) is written


def test_ranks_are_edited_apart() -> None:
    topology = Topology(1, tp=2)
    left, right = split(PLAIN, _draw(PLAIN, topology), topology, cut).values()
    left.state.atoms["norm"]["fp32"].zero_()
    assert right.state.atoms["norm"]["fp32"].all()


def test_invalid_topologies_are_refused() -> None:
    state = _draw(PIPE, Topology(1))
    with pytest.raises(ValueError, match="'fused' is no wrapper of stage 1 in bf16"):
        Topology(1, 2, "bf16", "fused")
    with pytest.raises(ValueError, match="no pipelines under ZeRO 2"):
        Topology(2, pp=2)
    with pytest.raises(ValueError, match="tp=2 needs a cut"):
        split(PIPE, state, Topology(1, tp=2))
    with pytest.raises(ValueError, match="needs the model's layers"):
        split(PLAIN, random_state(PLAIN, 0), Topology(1, pp=2))
    with pytest.raises(ValueError, match=r"leaves out the layers \[6\]"):
        split(PIPE, state, Topology(1, pp=2, placement=((0, 1, 2), (3, 4, 5))))
    tied = Model((Param("0.a", (2,)), Param("1.b", (2,), alias_of="0.a")), layers=(Layer(), Layer()))
    with pytest.raises(ValueError, match=r"aliases of parameters of other stages: \['1.b'\]"):
        split(tied, random_state(tied, 0), Topology(1, pp=2))


def test_megatron_names_no_row_parallel_parameters_without_tensor_parallelism() -> None:
    key = "parameter_with_row_parallelism_patterns"
    assert key not in universal_info(megatron_args(), 13)
    two = universal_info(megatron_args(tensor_model_parallel_size=2, no_pipeline_parallel=True), 13)
    assert two[key][1] == r"language_model.encoder.layers.\d+.self_attention.dense.weight"
    assert r"\d+.mlp.self_attention.dense.weight" in old_universal_info(megatron_args(), 13)[key]


def test_megatrons_nested_module_is_read_by_full_names(tmp_path: Path) -> None:
    names = ("embedding.word_embeddings.weight", "encoder.layers.0.mlp.up", "encoder.final_layernorm.weight")
    model = Model(tuple(Param(f"language_model.{name}", (4, 2)) for name in names))
    topology = Topology(0, tp=2)
    state = _draw(model, topology)
    folder = write_checkpoint(tmp_path, model, state, topology, run=Run(nest=nested_module), cut=cut)
    module = torch.load(folder / "mp_rank_01_model_states.pt", weights_only=False)["module"]["language_model"]
    assert list(module["embedding"]["word_embeddings"]) == ["weight"]
    assert list(module["encoder"]) == ["layers.0.mlp.up", "final_layernorm.weight"]
    read = read_locals(folder, local_models(model, topology, cut), topology)
    assert_same_state(read[1], split(model, state, topology, cut)[1].state)


def test_differences_tell_tensors_apart_by_storage() -> None:
    padded = torch.zeros(4)
    assert list(differences({"x": padded[:3]}, {"x": torch.zeros(3)})) == [".x: storage size 16 is not 12"]
    assert list(differences({"x": padded[1:]}, {"x": padded[:3]})) == [".x: storage offset 1 is not 0"]
