"""Patterns of a checkpoint's parameters: proofs of replicas, precedence of rules, and the file that an error names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from deepspeed_ucp.errors import MismatchError, UnsupportedError
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import Records
from deepspeed_ucp.model.storage import MASTER, MODULE, Atom, Fragment, Fragments
from deepspeed_ucp.plan.settling import list_weights, settle_index
from deepspeed_ucp.tensor_parallel.kinds import Replicate, ShardV
from deepspeed_ucp.tensor_parallel.metadata import INFO
from deepspeed_ucp.tensor_parallel.rules import from_attributes, from_config
from deepspeed_ucp.tensor_parallel.settle import EQUAL
from tests.plan import planning

WHOLE = {"b": ((4,), (4,), (4,), (4,))}
"""Four ranks that each hold the whole tensor."""


def make_index(
    crcs: Sequence[int | None], offsets: Sequence[int] | None = None, hints: Mapping[str, Any] | None = None
) -> AtomicIndex:
    """Build a buffer with four elements on every tensor-parallel rank, each in a record with a checksum."""
    at = offsets or [0] * len(crcs)
    shards = [((4,), Fragments("float32", [Fragment(0, 4, number, offset)])) for number, offset in enumerate(at)]
    atom = Atom.of("b", MODULE, shards)
    records = Records.of([(0, 32 * number, 32, crc) for number, crc in enumerate(crcs)])
    fields = {"buffers": frozenset({"b"}), "hints": dict(hints or {})}
    return planning.make_index([atom], records, len(crcs), **fields)


def test_checksums_prove_that_a_buffer_is_a_replica() -> None:
    settled = settle_index(make_index([7, 7])).require()
    assert (settled.patterns, settled.origin) == ({"b": Replicate()}, {"b": EQUAL})
    assert settle_index(make_index([7, 7]), target=WHOLE).pairs["b"][1].replicated
    assert settle_index(make_index([7, 7]), degree=4).pairs["b"][1].local_shapes == WHOLE["b"]


@pytest.mark.parametrize(
    ("crcs", "offsets"), [([None, None], [0, 0]), ([7, 8], [0, 0]), ([7, 7], [0, 16])], ids=["none", "other", "place"]
)
def test_a_tensor_without_proof_or_rule_has_no_pattern(crcs: Sequence[int | None], offsets: Sequence[int]) -> None:
    """Neither equal shapes nor different offsets in equal records prove equal bytes."""
    index = make_index(crcs, offsets)
    for settled in (settle_index(index), settle_index(index, degree=4)):
        assert list(settled.open) == ["b"]
        with pytest.raises(MismatchError, match="is not known"):
            settled.require()


@pytest.mark.parametrize("crc", [7, None])
def test_the_users_rules_take_precedence(crc: int | None) -> None:
    rules = from_config([{"match": "b", "pattern": "shard-v"}])
    settled = settle_index(make_index([crc, crc]), rules, {"b": ((2,),) * 4}).require()
    assert settled.patterns["b"] == ShardV()
    settled = settle_index(make_index([crc, crc]), rules, WHOLE)
    assert settled.wrong["b"].startswith("logical shape (8,) in the checkpoint, (16,) in the model")


@pytest.mark.parametrize("crcs", [[7, 7], [7, 8], [None, None]], ids=["equal", "other", "unknown"])
def test_autotps_rule_for_unnamed_parameters_does_not_apply_to_buffers(crcs: Sequence[int | None]) -> None:
    index = make_index(crcs, hints={INFO: {"autotp_unsupported_parameter_patterns": {}}})
    settled = settle_index(index)
    assert (settled.patterns, list(settled.open)) == (({"b": Replicate()}, []) if crcs[1] == 7 else ({}, ["b"]))
    assert settle_index(replace(index, buffers=frozenset())).patterns == {"b": ShardV()}


def test_invalid_metadata_is_reported_with_its_file() -> None:
    index = make_index([7, None], hints={INFO: {"affine_map": ["b"]}})
    text = r"tag/mp_rank_00_model_states.pt: universal_checkpoint_info: an entry is"
    with pytest.raises(UnsupportedError, match=text):
        settle_index(index)
    rules = from_config([{"match": "b", "pattern": "replicate"}])
    assert settle_index(index, rules).require().patterns["b"] == Replicate()
    live = [from_attributes({"b": {"tensor_model_parallel": True, "partition_dim": 0}})]
    with pytest.raises(MismatchError, match="b: .4,. on 2 ranks .*; universal_checkpoint_info: .* is malformed"):
        settle_index(index, from_config({"rename": {"c": "d"}}), {"b": ((8,),)}, live).require()


def test_list_weights_prefers_masters_to_module_tensors() -> None:
    shards = [((4,), Fragments("float32", []))]
    atoms = [Atom.of("a", state, shards) for state in ("exp_avg", MODULE, MASTER)]
    atoms += [Atom.of("b", state, shards) for state in ("exp_avg", MODULE)]
    weights = list_weights(planning.make_index(atoms))
    assert {name: atom.state for name, atom in weights.items()} == {"a": MASTER, "b": MODULE}
