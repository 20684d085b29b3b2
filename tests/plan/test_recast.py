"""Indexes whose parameters are cut, joined and copied, held against numpy; and the rules that say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from deepspeed_ucp.atoms import (
    MASTER,
    Atom,
    AtomicIndex,
    Atoms,
    Fragment,
    GroupInfo,
    ParamKey,
    Record,
    Shard,
    Tile,
    Tiles,
)
from deepspeed_ucp.errors import ConfigError, MismatchError
from deepspeed_ucp.patterns import from_config
from deepspeed_ucp.plan import locate
from deepspeed_ucp.plan.derive import DerivedParam, Slice, derive, fuse_experts, split_experts
from deepspeed_ucp.plan.renames import RemappedIndex, apply_renames
from deepspeed_ucp.stream.full_tensors import FullTensor, assemble_full_tensors
from tests.plan import planning

Shapes = Mapping[str, tuple[int, ...]]
STATES = (MASTER, "exp_avg")


def make_index(shapes: Shapes, *, cut: int = 5, tp: int = 1, **fields: Any) -> tuple[AtomicIndex, np.ndarray]:
    """Parameters whose elements count through all of a record, in fragments of at most `cut`, the last ones first."""
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
                shards.append(Shard(shape, tuple(reversed(placed))))
            atoms.append(Atom(name, state, "float32", tuple(shards)))
    index = planning.make_index(atoms, [Record(0, 0, 4 * position, None)], tp=tp, **fields)
    return index, np.arange(position)


def read(index: AtomicIndex, data: np.ndarray, name: str, state: str = MASTER, lane: int = 0) -> np.ndarray:
    atom = index.find(name, state)
    assert atom is not None
    shard = atom.shards[lane]
    parts = [data[f.offset // 4 : f.offset // 4 + f.numel] for f in shard.fragments]
    starts = np.cumsum([0, *(len(part) for part in parts)])
    assert [f.start for f in shard.fragments] == list(starts[:-1])
    return np.concatenate(parts).reshape(shard.shape)


def carry_out(
    shapes: Shapes, live: Shapes, rules: Sequence[Any], tp: int = 1, **fields: Any
) -> tuple[RemappedIndex, Any]:
    index, data = make_index(shapes, tp=tp, **fields)
    made = apply_renames(index, {name: (shape,) * tp for name, shape in live.items()}, from_config({"rename": rules}))
    before = {(name, s, r): read(index, data, name, s, r) for name in shapes for s in STATES for r in range(tp)}
    names = sorted({key.name for key in made.index.stored.atoms})
    after = {(name, s, r): read(made.index, data, name, s, r) for name in names for s in STATES for r in range(tp)}
    return made, (before, after)


def test_fusing_and_splitting_are_inverse() -> None:
    shapes = {"a": (2,), "x.w1.0": (2, 3), "x.w1.1": (2, 3), "x.w1.2": (2, 3)}
    members = tuple(map(ParamKey, shapes))
    index, data = make_index(
        shapes, fused={"x.w1": 3}, scalars={key: {"step": 4} for key in members}, groups=(GroupInfo(members, {}),)
    )
    fused = fuse_experts(index)
    for state in STATES:
        wanted = np.stack([read(index, data, f"x.w1.{expert}", state) for expert in range(3)])
        assert np.array_equal(read(fused, data, "x.w1", state), wanted)
    assert fused.run.scalars == {ParamKey("a"): {"step": 4}, ParamKey("x.w1"): {"step": 4}}
    assert fused.run.groups[0].names == ("a", "x.w1")
    back = split_experts(fused, fused.model.fused)
    assert back.run == index.run and back.model == index.model
    assert set(back.stored.atoms) == set(index.stored.atoms)
    for name in shapes:
        assert np.array_equal(read(back, data, name, "exp_avg"), read(index, data, name, "exp_avg"))


def test_what_lies_in_the_files_twice_moves_along() -> None:
    index, _ = make_index({"x": (4, 2)}, cut=8)
    index.stored.repeated[index.find("x", MASTER).key] = ((0, Fragment(1, 6, 0, 400)),)  # type: ignore[union-attr]
    found = derive(index, {f"x.{e}": DerivedParam((Slice("x", e, 4),), 1) for e in range(4)}).stored.repeated
    assert [(key.name, each) for key, (each,) in found.items()] == [
        ("x.0", (0, Fragment(1, 1, 0, 400))),
        ("x.1", (0, Fragment(0, 2, 0, 404))),
        ("x.2", (0, Fragment(0, 2, 0, 412))),
        ("x.3", (0, Fragment(0, 1, 0, 420))),
    ]


@pytest.mark.parametrize("fused", [(4, 3, 2), (12, 2)], ids=["3d", "2d"])
@pytest.mark.parametrize("tp", [1, 2])
def test_one_parameter_is_cut_into_experts_and_joined_again(fused: tuple[int, ...], tp: int) -> None:
    experts = {f"m.experts.{e}.w": (3, 2) for e in range(4)}
    _, (before, after) = carry_out({"m.w": fused}, experts, [{"from": "m.w", "to": "m.experts.{e}.w"}], tp)
    for (name, state, lane), tensor in after.items():
        whole = before["m.w", state, lane].reshape(4, 3, 2)
        assert np.array_equal(tensor, whole[int(name.split(".")[2])])
    rule = {"from": r"m\.experts\.(?P<e>\d+)\.w", "to": "m.w"}
    _, (before, after) = carry_out(experts, {"m.w": fused}, [rule], tp)
    for (_, state, lane), tensor in after.items():
        parts = [before[name, state, lane] for name in experts]
        assert np.array_equal(tensor, np.stack(parts).reshape(fused))


def test_experts_of_tiles_are_tiles() -> None:
    """Experts cut along their columns: each is as many pieces as there are blocks of columns, not one for each row."""
    columns = [Tile((0, 0, 5 * at), (4, 3, 5), 0, 240 * at) for at in (0, 1)]
    atom = Atom("x", MASTER, "float32", (Shard((4, 3, 10), Tiles("float32", (4, 3, 10), tuple(columns))),))
    index = planning.make_index([atom], [Record(0, 0, 480, None)])
    made = derive(index, {f"x.{e}": DerivedParam((Slice("x", e, 4),), 2) for e in range(4)})
    data = np.arange(120).reshape(4, 3, 2, 5).transpose(2, 0, 1, 3).reshape(-1)
    for expert in range(4):
        (shard,) = made.stored.atoms[f"x.{expert}", MASTER, 0].shards
        assert (shard.shape, len(shard.pieces)) == ((3, 10), 2)
        assert read(made, data, f"x.{expert}").tolist() == np.arange(120).reshape(4, 3, 10)[expert].tolist()


def lay_shards(lanes: Sequence[Mapping[str, np.ndarray]]) -> tuple[AtomicIndex, np.ndarray]:
    """Tensor-parallel shards of masters, one behind the other in a record."""
    places: dict[str, list[Shard]] = {name: [] for name in lanes[0]}
    position = 0
    for name, tensor in ((name, tensor) for held in lanes for name, tensor in held.items()):
        places[name].append(Shard(tensor.shape, (Fragment(0, tensor.size, 0, 4 * position),)))
        position += tensor.size
    atoms = [Atom(name, MASTER, "float32", tuple(shards)) for name, shards in places.items()]
    data = np.concatenate([tensor.reshape(-1) for held in lanes for tensor in held.values()])
    return planning.make_index(atoms, [Record(0, 0, 4 * position, None)], tp=len(lanes)), data


def read_full(full: FullTensor, data: np.ndarray) -> np.ndarray:
    found = np.full(full.numel, -1)
    for run in (extent.run for extent in locate(full.want(0, full.numel, 0))):
        for number in range(run.count):
            src, dst = run.src + number * run.src_step, run.dst + number * run.dst_step
            found[dst : dst + run.width] = data[src : src + run.width]
    return found.reshape(full.shape)


def test_what_is_cut_out_of_tensor_parallel_shards_is_assembled_by_rules_of_its_own() -> None:
    """Experts fused as [experts × (gate; up), in] and [experts × out, in], of which each rank has its share of each."""
    both, out = np.arange(96).reshape(2, 2, 6, 4), np.arange(48).reshape(8, 6)
    names = "mlp.experts.weight1", "mlp.experts.w2"
    cuts = [slice(0, 3), slice(3, 6)]
    index, data = lay_shards([{names[0]: both[:, :, cut].reshape(12, 4), names[1]: out[:, cut]} for cut in cuts])
    rename: list[Any] = [
        {"from": r"mlp\.experts\.weight1", "to": "mlp.experts.w1.{e}", "part": "1/2"},
        {"from": r"mlp\.experts\.weight1", "to": "mlp.experts.w3.{e}", "part": "2/2"},
        {"from": r"mlp\.experts\.w2", "to": "mlp.experts.w2.{e}"},
    ]
    rules = from_config({"family": "mixtral-moe", "rename": rename})
    wanted = {f"mlp.experts.{w}.{e}": both[e, k] for k, w in enumerate(("w1", "w3")) for e in range(2)}
    wanted |= {f"mlp.experts.w2.{e}": out.reshape(2, 4, 6)[e] for e in range(2)}
    live = {name: (tensor.shape,) for name, tensor in wanted.items()}
    made = apply_renames(index, live, rules)
    found = {key.name: read_full(full, data) for key, full in assemble_full_tensors(made.index, rules).tensors.items()}
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], tensor) for name, tensor in wanted.items())


PARTS = [{"from": "up", "to": "w1.{e}", "part": "1/2"}, {"from": "up", "to": "w3.{e}", "part": "2/2"}]


def test_parts_of_each_expert() -> None:
    experts = {f"{w}.{e}": (3, 2) for w in ("w1", "w3") for e in range(2)}
    _, (before, after) = carry_out({"up": (2, 6, 2)}, experts, PARTS)
    for (name, state, lane), tensor in after.items():
        first = 0 if name.startswith("w1") else 3
        assert np.array_equal(tensor, before["up", state, lane][int(name[-1]), first : first + 3])
    back = [{"from": rf"{w}\.(?P<e>\d+)", "to": "up", "part": part} for w, part in (("w3", "2/2"), ("w1", "1/2"))]
    _, (before, after) = carry_out(experts, {"up": (2, 6, 2)}, back)
    wanted = [np.concatenate([before[f"{w}.{e}", MASTER, 0] for w in ("w1", "w3")]) for e in range(2)]
    assert np.array_equal(after["up", MASTER, 0], np.stack(wanted))


def test_more_experts_are_copies_and_fewer_are_chosen() -> None:
    four, eight = ({f"x.w.{e}": (2,) for e in range(count)} for count in (4, 8))
    made, (before, after) = carry_out(four, eight, [{"from": r"x\.w\.{e // 2}", "to": "x.w.{e}"}])
    for (name, state, lane), tensor in after.items():
        assert np.array_equal(tensor, before[f"x.w.{int(name[-1]) // 2}", state, lane])
    assert made.notes == ("rename: x.w.{0-7} are copies of x.w.{0-3}, optimizer states included",)
    rule = {"from": r"x\.w\.{7 - 2 * e}", "to": "x.w.{e}"}
    made, (before, after) = carry_out(eight, four, [rule])
    assert {name: int(before[f"x.w.{7 - 2 * e}", MASTER, 0][0]) for e, name in enumerate(four)} == {
        name: int(after[name, MASTER, 0][0]) for name in four
    }
    assert made.notes == ("rename: x.w.{0,2,4,6} of the checkpoint are left out",)
    made, (before, after) = carry_out(eight, eight, [rule])  # the run has saved in the meantime
    assert not made.notes and all(np.array_equal(after[key], before[key]) for key in before)


def test_layers_are_counted_as_experts_are() -> None:
    """Duplicated, dropped, and chosen by a list; other numbers in the names stay, and every state moves along."""
    of = {count: {f"h.{n}.{x}": (2,) for n in range(count) for x in ("w", "m.1.b")} for count in (2, 4, 8)}
    for live, number, chosen in (
        (8, "{n // 2}", [0, 0, 1, 1, 2, 2, 3, 3]),
        (2, "{n * 2 + 1}", [1, 3]),
        (2, "{[3, 0][n]}", [3, 0]),
    ):
        rule = {"from": rf"h\.{number}\.(?P<x>.*)", "to": "h.{n}.{x}"}
        shapes = {"embed": (3,)}
        made, (before, after) = carry_out({**of[4], **shapes}, {**of[live], **shapes}, [rule])
        assert {name for name, *_ in after} == {*of[live], "embed"}
        for (name, state, lane), tensor in after.items():
            _, n, x = (*name.split(".", 2), "", "")[:3]
            saved = f"h.{chosen[int(n)]}.{x}" if n else name
            assert np.array_equal(tensor, before[saved, state, lane])
        assert len(made.notes) == 1
        made, _ = carry_out(of[live], of[live], [rule])  # the run has saved in the meantime
        assert not made.notes


def test_what_is_left_out() -> None:
    rules = [{"from": "r", "to": None}, {"from": None, "to": "new|s"}]
    saved = {"r": (4, 2), "s": (2,), "t": (1,)}
    made, (_, after) = carry_out(saved, {**saved, "r": (8, 2), "new": (3,)}, rules)
    assert made.unfed == {"r", "new"}
    assert {name for name, _, _ in after} == {"s", "t"}
    assert made.notes[1] == "rename: new, r keep the new model's values"


def test_groups_of_experts_alone_join_those_of_the_same_hyper_parameters() -> None:
    members = [(ParamKey("a.0"), ParamKey("a.1")), (ParamKey("b"),)]
    groups = GroupInfo(members[0], {"lr": 1.0}), GroupInfo(members[1], {"lr": 1.0, "name": "dense"})
    made, _ = carry_out(
        {"a.0": (2,), "a.1": (2,), "b": (1,)},
        {"a": (4,), "b": (1,)},
        [{"from": r"a\.(?P<e>\d)", "to": "a"}],
        groups=groups,
    )
    assert [group.names for group in made.index.run.groups] == [("b", "a")]


TWO = {"x.0": (3, 2), "x.1": (3, 2)}


@pytest.mark.parametrize(
    ("saved", "live", "rule", "words"),
    [
        ({"a": (5,)}, TWO, ("a", "x.{e}"), r"a \(5,\) has to be of the size of"),
        ({"a": (6, 2)}, {"x.0": (3, 2), "x.2": (3, 2)}, ("a", "x.{e}"), "cannot be made|has to be of the size of"),
        ({"a": (12, 2)}, {"x.0": (3, 2), "x.2": (3, 2)}, ("a", "x.{e}"), "has to be of the size of"),
        ({"a": (4, 3)}, TWO, ("a", "x.{e}"), r"a \(4, 3\), which makes \(2, 3\)"),
        ({"a.0": (2,), "a.2": (2,)}, {"x": (6,)}, (r"a\.(?P<e>\d)", "x"), "not each is there once"),
        ({"a.0": (2,), "a.1": (2,)}, {"x": (6,)}, (r"a\.(?P<e>\d)", "x"), r"which makes \(4,\)"),
        (
            {"a.0": (2,), "b.0": (2,)},
            {"x": (2,)},
            (r"[ab]\.(?P<e>\d)", "x"),
            "a.0 and b.0 both feed expert 0 .* match one of them",
        ),
        ({"x.0": (3, 2)}, TWO, (r"x\.{e}", "x.{e}"), "lets the saved number 1 feed x.1"),
        ({"x.0": (3, 2)}, TWO, (r"x\.{[0][n]}", "x.{n}"), "lists 1, of which 1 is none"),
        ({"a.0": (3, 2), "a.1": (3,)}, TWO, (r"a\.{e}", "x.{e}"), "x.1 .* cannot be made"),
    ],
)
def test_rules_that_do_not_fit(saved: Shapes, live: Shapes, rule: tuple[str, str], words: str) -> None:
    with pytest.raises(MismatchError, match=words):
        carry_out(saved, live, [{"from": rule[0], "to": rule[1]}])


def test_two_rules_that_feed_the_same() -> None:
    rules = [{"from": name, "to": "x.{e}"} for name in "ab"]
    with pytest.raises(MismatchError, match="a and b both feed x.0|b and a both feed x.0"):
        carry_out({"a": (4,), "b": (4,)}, {"x.0": (2,), "x.1": (2,)}, rules)


def test_what_the_checkpoint_has_itself_is_not_made() -> None:
    with pytest.raises(MismatchError, match=r"has x.0, x.1 itself, which a is to feed"):
        carry_out({"a": (2,), "x.0": (2,), "x.1": (2,)}, {"x.0": (2,), "x.1": (2,)}, [{"from": "a", "to": "x.{e}"}])


@pytest.mark.parametrize("what", ["states", "step counts", "hyper-parameters"])
def test_experts_that_do_not_go_together(what: str) -> None:
    keys = ParamKey("a.0"), ParamKey("a.1")
    index, _ = make_index(
        {"a.0": (2,), "a.1": (2,)},
        scalars={key: {"step": number if what == "step counts" else 1} for number, key in enumerate(keys)},
        groups=tuple(GroupInfo((k,), {"lr": n if what[0] == "h" else 1}) for n, k in enumerate(keys)),
    )
    if what == "states":
        left = [atom for key, atom in index.stored.atoms.items() if key[:2] != ("a.1", "exp_avg")]
        index = index.change(atoms=Atoms.of(left))
    with pytest.raises(MismatchError, match=f"x is made of a.0 and a.1, which were saved with other {what}"):
        derive(index, {"x": DerivedParam((Slice("a.0"), Slice("a.1")), 1)})


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"from": None, "to": None}, "is needed"),
        ({"from": "a", "to": "b.{e}", "part": "3/2"}, "such as"),
        ({"from": "a.{e % 2}", "to": "b"}, r"\{e\} has to be in"),
        ({"from": "a.{n % 2}", "to": "b.{e}"}, r"\{n\} has to be in"),
        ({"from": "a", "to": "b.{e + 1}"}, "as it is and once"),
        ({"from": "x.{e ** 9}", "to": "x.{e}"}, "is not understood"),
        ({"from": "x.{e - 9}", "to": "x.{e}"}, "not a layer number"),
        ({"from": "x.{n - 9}", "to": "x.{n}"}, "not a layer number"),
        ({"from": "x.{(n, 0)}", "to": "x.{n}"}, "not understood"),
        ({"from": None, "to": "("}, "not a regular expression"),
    ],
)
def test_rules_that_are_none(rule: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        carry_out({"a": (4,), "x.0": (1,)}, {"b.0": (2,), "b.1": (2,), "x.0": (1,), "x.1": (1,)}, [rule])


def test_experts_of_one_parameter_are_counted_as_those_of_several_are() -> None:
    """A parameter [experts, …] is to a rule with arithmetic what ``name.0``, ``name.1``, … are."""
    rule = {"from": r"(?P<x>.*\.up)\.{e // 2}", "to": "{x}.{e}"}
    made, (before, after) = carry_out({"m.up": (4, 3, 2)}, {"m.up": (8, 3, 2)}, [rule])
    for state in STATES:
        assert np.array_equal(after["m.up", state, 0], before["m.up", state, 0].repeat(2, axis=0))
    assert made.notes == ("rename: m.up.{0-7} are copies of m.up.{0-3}, optimizer states included",)
    picking = {"from": r"m\.up\.{7 - 2 * e}", "to": "m.up.{e}"}
    made, (before, after) = carry_out({"m.up": (8, 3)}, {"m.up": (3, 3)}, [picking])
    assert np.array_equal(after["m.up", MASTER, 0], before["m.up", MASTER, 0][[7, 5, 3]])
    assert made.notes == ("rename: of m.up experts 0, 1, 2, 4, 6 are left out",)
    made, (before, after) = carry_out({"m.up": (4, 3, 2)}, {"m.up": (4, 3, 2)}, [rule])  # it has saved in the meantime
    assert not made.notes and np.array_equal(after["m.up", MASTER, 0], before["m.up", MASTER, 0])


def test_another_number_of_experts_in_another_form() -> None:
    fused, split = {"m.up": (4, 6, 2)}, {f"m.{w}.{e}": (3, 2) for w in ("w1", "w3") for e in range(6)}
    rules = [{"from": r"m\.up\.{e % 4}", "to": f"m.w{w}.{{e}}", "part": f"{part}/2"} for w, part in ((1, 1), (3, 2))]
    _, (before, after) = carry_out(fused, split, rules)
    for (name, state, lane), tensor in after.items():
        first = 0 if "w1" in name else 3
        assert np.array_equal(tensor, before["m.up", state, lane][int(name[-1]) % 4, first : first + 3])
    picking = [{"from": r"m\.w1\.{2 * e}", "to": "m.w1.{e}"}, {"from": r"m\.w3.*", "to": None}]
    _, (before, after) = carry_out(split, {"m.w1": (3, 3, 2)}, picking)
    wanted = np.stack([before[f"m.w1.{2 * e}", MASTER, 0] for e in range(3)])
    assert np.array_equal(after["m.w1", MASTER, 0], wanted)


def test_counted_experts_under_tensor_parallelism_are_refused() -> None:
    rule = {"from": r"m\.up\.{e % 4}", "to": "m.up.{e}"}
    with pytest.raises(MismatchError, match=r"counts the experts in m.up, of which each tensor-parallel rank has"):
        carry_out({"m.up": (4, 3, 2)}, {"m.up": (8, 3, 2)}, [rule], tp=2)
    made, _ = carry_out({"m.up": (4, 3, 2)}, {"m.up": (4, 3, 2)}, [rule], tp=2)
    assert not made.notes
