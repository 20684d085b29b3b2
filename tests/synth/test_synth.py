"""Tests of the synthesiser without DeepSpeed: cases that no real engine saves."""

from __future__ import annotations

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

cut = Case3D(Topology(1)).cut


def _draw(model: Model, topology: Topology) -> State:
    return random_state(model, 0, precision=topology.precision, topology=topology)


@pytest.mark.parametrize("layers", range(1, 14))
@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
def test_contiguous_stages_equal_deepspeeds_uniform_ones(layers: int, pp: int) -> None:
    bounds = partition_uniform(layers, pp)
    assert contiguous(layers, pp) == tuple(tuple(range(bounds[rank], bounds[rank + 1])) for rank in range(pp))


def test_placements_by_hand() -> None:
    assert interleaved(8, 2, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert bidirectional(8, 4) == ((0, 1, 6, 7), (2, 3, 4, 5), (2, 3, 4, 5), (0, 1, 6, 7))


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
