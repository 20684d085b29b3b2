"""Indexes with split and joined parameters, compared with numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.model.index import AtomicIndex, GroupInfo
from deepspeed_ucp.model.records import Records
from deepspeed_ucp.model.storage import MASTER, Atom, Atoms, Fragment, Fragments, ParamKey
from deepspeed_ucp.plan.derive import MOST_FUSED, DerivedParam, Slice, can_fuse, derive, fuse, split
from tests.plan import planning

Shapes = Mapping[str, tuple[int, ...]]
STATES = (MASTER, "exp_avg")


def make_index(shapes: Shapes, *, cut: int = 5, tp: int = 1, **fields: Any) -> tuple[AtomicIndex, np.ndarray]:
    """Make parameters whose elements are numbered through a record, in fragments of at most `cut` in reverse order."""
    atoms, position = [], 0
    for state in STATES:
        for name, shape in shapes.items():
            shards = []
            for _ in range(tp):
                numel = int(np.prod(shape))
                parts = [(start, min(cut, numel - start)) for start in range(0, numel, cut)]
                placed = []
                for start, size in reversed(parts):
                    placed.append(Fragment(start, size, 0, 4 * position))
                    position += size
                shards.append((shape, Fragments("float32", placed[::-1])))
            atoms.append(Atom.of(name, state, shards))
    index = planning.make_index(atoms, Records.of([(0, 0, 4 * position, None)]), tp=tp, **fields)
    return index, np.arange(position)


def read(index: AtomicIndex, data: np.ndarray, name: str, state: str = MASTER, lane: int = 0) -> np.ndarray:
    atom = index.find(name, state)
    assert atom is not None
    shard = atom.shards[lane]
    fragments = shard.find(state, 0, shard.numel)
    parts = [data[f.offset // 4 : f.offset // 4 + f.numel] for f in fragments]
    starts = np.cumsum([0, *(len(part) for part in parts)])
    assert [f.start for f in fragments] == list(starts[:-1])
    return np.concatenate(parts).reshape(shard.shape)


def test_fusing_and_splitting_are_inverse() -> None:
    shapes = {"a": (2,), "x.w1.0": (2, 3), "x.w1.1": (2, 3), "x.w1.2": (2, 3)}
    members = tuple(map(ParamKey, shapes))
    index, data = make_index(
        shapes, fused={"x.w1": 3}, scalars={key: {"step": 4} for key in members}, groups=(GroupInfo(members, {}),)
    )
    fused = fuse(index)
    for state in STATES:
        wanted = np.stack([read(index, data, f"x.w1.{expert}", state) for expert in range(3)])
        assert np.array_equal(read(fused, data, "x.w1", state), wanted)
    assert fused.scalars == {ParamKey("a"): {"step": 4}, ParamKey("x.w1"): {"step": 4}}
    assert fused.groups[0].names == ("a", "x.w1")
    back = split(fused, fused.fused)
    assert set(back.atoms) == set(index.atoms)
    assert replace(back, atoms=index.atoms) == index
    for name in shapes:
        assert np.array_equal(read(back, data, name, "exp_avg"), read(index, data, name, "exp_avg"))


def test_repeated_fragments_are_split() -> None:
    index, _ = make_index({"x": (4, 2)}, cut=8)
    index.repeated[index.find("x", MASTER).key] = ((0, Fragment(1, 6, 0, 400)),)  # type: ignore[union-attr]
    found = derive(index, {f"x.{e}": DerivedParam((Slice("x", e, 4),), 1) for e in range(4)}).repeated
    assert [(key.name, each) for key, (each,) in found.items()] == [
        ("x.0", (0, Fragment(1, 1, 0, 400))),
        ("x.1", (0, Fragment(0, 2, 0, 404))),
        ("x.2", (0, Fragment(0, 2, 0, 412))),
        ("x.3", (0, Fragment(0, 1, 0, 420))),
    ]


def test_experts_split_from_blocks_are_blocks() -> None:
    """Experts cut along their columns have as many pieces as there are blocks of columns."""
    shape = (4, 3, 10)
    columns = [Fragment.of_block((0, 0, 5 * at), (4, 3, 5), shape, 0, 240 * at) for at in (0, 1)]
    atom = Atom.of("x", MASTER, [(shape, Fragments("float32", columns, shape))])
    index = planning.make_index([atom], Records.of([(0, 0, 480, None)]))
    derived = derive(index, {f"x.{e}": DerivedParam((Slice("x", e, 4),), 2) for e in range(4)})
    data = np.arange(120).reshape(4, 3, 2, 5).transpose(2, 0, 1, 3).reshape(-1)
    for expert in range(4):
        (shard,) = derived.atoms[f"x.{expert}", MASTER, 0].shards
        assert (shard.shape, len(shard.list_fragments(MASTER))) == ((3, 10), 2)
        assert read(derived, data, f"x.{expert}").tolist() == np.arange(120).reshape(4, 3, 10)[expert].tolist()


@pytest.mark.parametrize("what", ["states", "step counts", "hyper-parameters"])
def test_experts_that_were_saved_differently_cannot_be_joined(what: str) -> None:
    keys = ParamKey("a.0"), ParamKey("a.1")
    index, _ = make_index(
        {"a.0": (2,), "a.1": (2,)},
        scalars={key: {"step": number if what == "step counts" else 1} for number, key in enumerate(keys)},
        groups=tuple(GroupInfo((k,), {"lr": n if what[0] == "h" else 1}) for n, k in enumerate(keys)),
    )
    if what == "states":
        left = [atom for key, atom in index.atoms.items() if key[:2] != ("a.1", "exp_avg")]
        index = replace(index, atoms=Atoms.of(left))
    with pytest.raises(MismatchError, match=f"x joins a.0 and a.1, which were saved with different {what}"):
        derive(index, {"x": DerivedParam((Slice("a.0"), Slice("a.1")), 1)})


@pytest.mark.parametrize(
    ("shapes", "name", "dims", "words"),
    [
        ({"a": (3, 2)}, "a", 2, r"a.0: 3 elements of a are no whole rows of \(2,\)"),
        ({"a": (2,), "x.0": (1,), "x.1": (1,)}, "x", 1, r"has x.0, x.1 itself, which a would fill too"),
    ],
    ids=["rows are cut", "already there"],
)
def test_halves_that_cannot_be_derived_are_refused(shapes: Shapes, name: str, dims: int, words: str) -> None:
    index, _ = make_index(shapes)
    with pytest.raises(MismatchError, match=words):
        derive(index, {f"{name}.{number}": DerivedParam((Slice("a", number, 2),), dims) for number in range(2)})


@pytest.mark.parametrize(
    ("shape", "parts", "fits"),
    [
        ((MOST_FUSED, 2), MOST_FUSED, True),
        ((MOST_FUSED + 1, 2), MOST_FUSED + 1, False),
        *(((3, 2), parts, parts == 3) for parts in (-3, 0, 2, 3)),
        *((shape, len(shape), False) for shape in ((), (1, 0))),
    ],
    ids=str,
)
def test_a_file_may_declare_as_many_atoms_as_the_tensor_has_rows(
    shape: tuple[int, ...], parts: int, fits: bool
) -> None:
    """At most 16,384, so that a small file cannot make a large index."""
    assert can_fuse(shape, parts) == fits
