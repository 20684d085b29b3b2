"""The example's own models, each rank's weights as the example cuts them, resharded by what settles them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deepspeed_ucp.patterns import copy_runs, from_attributes, from_config, from_universal_info
from tests.patterns.settling import settle

from .shards import follow

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_gpt"
FAMILIES = {"tiny": "megatron-gpt", "tiny-llama": "megatron-llama", "tiny-moe": "mixtral-moe"}
PAIRS = [(1, 2), (2, 4), (4, 1)]


@pytest.fixture(scope="module")
def example():
    """The example's modules, which have common names, for these tests only."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLE))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in ("config", "gpt", "metadata", "parallel")})
    sys.path.remove(str(EXAMPLE))
    for name in set(sys.modules) - before:
        if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def build(example):
    """All ranks' parameters of a preset at a degree."""
    made = {}

    def make(preset, tp):
        if (preset, tp) not in made:
            one = example.parallel.Line((0,), 0, None)
            lines = [example.parallel.Line(tuple(range(tp)), rank, None) for rank in range(tp)]
            states = [SimpleNamespace(tensor=line, sequence=one, data=one, pipe=one) for line in lines]
            config = example.config.PRESETS[preset]
            made[preset, tp] = [dict(example.gpt.GPT(config, state).named_parameters()) for state in states]
        return made[preset, tp]

    return make


def rule_sets(example, preset, way, source_tp, target):
    config = example.config.PRESETS[preset]
    vocab = from_config({"original_vocab_size": config.vocabulary})
    attributes = from_attributes({name: vars(parameter) for name, parameter in target[0].items()})
    if way == "family":
        return [*vocab, *from_config(FAMILIES[preset])]
    if way == "attributes":
        return [*vocab, attributes]
    degrees = example.config.Degrees(tp=source_tp, pipeline=False)
    return [from_universal_info(example.metadata.universal_checkpoint_info(config, degrees)), attributes]


@pytest.mark.parametrize("way", ["family", "metadata", "attributes"])
@pytest.mark.parametrize("preset", sorted(FAMILIES))
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda tp: f"tp{tp}")
def test_the_examples_weights(example, build, preset, way, first, second):
    """Weights are a function of the seed and the name: any degree's shards are known without resharding."""
    source, target = build(preset, first), build(preset, second)
    shapes = [{name: tuple(tuple(rank[name].shape) for rank in side) for name in side[0]} for side in (source, target)]
    args = vars(example.metadata.megatron_arguments(example.config.PRESETS[preset], example.config.Degrees(tp=first)))
    rules = rule_sets(example, preset, way, first, target)
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
