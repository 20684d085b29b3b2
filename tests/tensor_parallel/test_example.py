"""Rules reshard the weights of the example's models, which the example cuts, to other degrees."""

from __future__ import annotations

import importlib
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deepspeed_ucp.tensor_parallel.layout import copy_runs
from deepspeed_ucp.tensor_parallel.metadata import from_universal_info
from deepspeed_ucp.tensor_parallel.rules import from_attributes, from_config
from tests.support.covering import cover, params

from .shards import follow, settle

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_gpt"
FAMILIES = {"tiny": "megatron-gpt", "tiny-llama": "megatron-llama", "tiny-moe": "mixtral-moe"}


@pytest.fixture(scope="module")
def example():
    """Import the example's modules, and remove them afterwards because their names are generic."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLE))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in ("config", "gpt", "metadata", "parallel")})
    sys.path.remove(str(EXAMPLE))
    for name in set(sys.modules) - before:
        if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def build(example):
    parameters_by_degree = {}

    def make(preset, tp):
        if (preset, tp) not in parameters_by_degree:
            one = example.parallel.Line((0,), 0, None)
            lines = [example.parallel.Line(tuple(range(tp)), rank, None) for rank in range(tp)]
            states = [SimpleNamespace(tensor=line, sequence=one, data=one, pipe=one) for line in lines]
            config = example.config.PRESETS[preset]
            parameters_by_degree[preset, tp] = [
                dict(example.gpt.GPT(config, state).named_parameters()) for state in states
            ]
        return parameters_by_degree[preset, tp]

    return make


def rule_sets(example, preset, origin, source_tp, target):
    config = example.config.PRESETS[preset]
    vocab = from_config({"original_vocab_size": config.vocabulary})
    attributes = from_attributes({name: vars(parameter) for name, parameter in target[0].items()})
    if origin == "family":
        return [*vocab, *from_config(FAMILIES[preset])]
    if origin == "attributes":
        return [*vocab, attributes]
    degrees = example.config.Degrees(tp=source_tp, pipeline=False)
    return [from_universal_info(example.metadata.universal_checkpoint_info(config, degrees)), attributes]


FACTORS = sorted(FAMILIES), ("family", "metadata", "attributes"), ((1, 2), (2, 4), (4, 1))


@pytest.mark.parametrize(("preset", "origin", "degrees"), params(cover(*FACTORS), product(*FACTORS), str))
def test_rules_reshard_the_weights_of_the_example(example, build, preset, origin, degrees):
    """Weights depend only on seed and name, so the expected shards of any degree are known."""
    first = degrees[0]
    source, target = (build(preset, degree) for degree in degrees)
    shapes = [{name: tuple(tuple(rank[name].shape) for rank in side) for name in side[0]} for side in (source, target)]
    args = vars(example.metadata.megatron_arguments(example.config.PRESETS[preset], example.config.Degrees(tp=first)))
    rules = rule_sets(example, preset, origin, first, target)
    settled = settle(list(shapes[0]), *shapes, rules, {"args": args})
    for name, (have, want) in settled.layouts.items():
        shards = [rank[name].detach().numpy().reshape(-1) for rank in source]
        for rank, live in enumerate(target):
            expected = live[name].detach().numpy().reshape(-1)
            made, writes = np.full_like(expected, np.nan), np.zeros(expected.size, dtype=int)
            for src_rank in [0] if have.replicated else range(first):
                runs = copy_runs(have, src_rank, want, rank, 0, expected.size)
                follow(runs, shards[src_rank], made, writes)
            assert (writes == 1).all(), name
            np.testing.assert_array_equal(made, expected, err_msg=name)
