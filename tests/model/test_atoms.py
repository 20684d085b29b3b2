"""Atoms and their coverage."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.model.storage import ITEMSIZE, Atom, Fragment, Fragments, check_coverage, count


def make_shard(shape: tuple[int, ...], *spans: tuple[int, int], dtype: str = "float32") -> Any:
    return shape, Fragments(dtype, [Fragment(start, numel, index, 0) for index, (start, numel) in enumerate(spans)])


def make_atom(shape: tuple[int, ...], *spans: tuple[int, int]) -> Atom:
    return Atom.of("layer.weight", "exp_avg", [make_shard(shape, *spans, dtype="bfloat16")])


def check(atom: Atom) -> None:
    check_coverage(atom, lambda fragment: f"shard{fragment.record}.pt")


def test_an_atoms_size_is_the_sum_of_its_shards() -> None:
    assert [count(shape) for shape in ((), (3,), (2, 5), (4, 0, 2))] == [1, 3, 10, 0]
    assert make_atom((2, 5)).nbytes == 20
    atom = Atom.of("w", "fp32", [make_shard((2, 5), (0, 10)), make_shard((1, 5), (0, 5)), make_shard((0, 5))])
    assert (atom.shape, atom.numel, atom.nbytes) == ((2, 5), 15, 60)
    for covered in (atom, make_atom((7,), (0, 3), (3, 4)), make_atom((), (0, 1)), make_atom((0, 3))):
        check(covered)


def test_item_sizes_equal_torchs() -> None:
    import torch

    known = {name: getattr(torch, name).itemsize for name in ITEMSIZE if hasattr(torch, name)}
    assert known == {name: ITEMSIZE[name] for name in known}


SECOND_CUT = Atom.of("layer.weight", "exp_avg", (make_shard((2, 5), (0, 10)), make_shard((2, 5), (0, 4), (5, 5))))


@pytest.mark.parametrize(
    ("atom", "text"),
    [
        (make_atom((7,), (0, 3), (4, 3)), r"elements \[3, 4\) are missing; the next fragment is in shard1.pt"),
        (make_atom((7,), (1, 6)), r"elements \[0, 1\) are missing; the next fragment is in shard0.pt"),
        (make_atom((7,), (0, 4), (2, 5)), r"elements \[2, 4\) are covered twice; the next fragment is in shard1.pt"),
        (make_atom((7,), (0, 7), (0, 7)), r"elements \[0, 7\) are covered twice"),
        (make_atom((7,), (0, 6)), r"has 7 elements, the fragments hold 6 \(last fragment in shard0.pt\)"),
        (make_atom((7,), (0, 8)), r"has 7 elements, the fragments hold 8"),
        (make_atom((7,)), r"has 7 elements, the fragments hold 0\."),
        (SECOND_CUT, r", shape \(2, 5\), tensor-parallel rank 1\): elements \[4, 5\)"),
    ],
    ids=["gap", "late start", "overlap", "twice", "short", "long", "nothing", "second rank"],
)
def test_gaps_and_overlaps_are_refused_with_name_range_and_file(atom: Atom, text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as error:
        check(atom)
    assert str(error.value).startswith("layer.weight (exp_avg")
