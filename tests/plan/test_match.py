"""Match of live parameters, ties and param groups with saved ones."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.extensions.rename import Renames, apply_renames
from deepspeed_ucp.extensions.resize import ResizedRows
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.records import Records
from deepspeed_ucp.model.storage import COPY, MASTER, MODULE, Atom, Atoms, Fragment, Fragments, ParamKey
from deepspeed_ucp.model.view import EngineView
from deepspeed_ucp.plan.match import Adaptation, are_same, match_groups, pick_weight
from deepspeed_ucp.tensor_parallel.rename import parse_renames, rename_names
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.plan import planning
from tests.plan.matching import Shapes, make_index, match, read_param

A, LAYERS_OF_ONE = {"a": (2,)}, {f"h.{number}": (2,) for number in range(40)}
THAWED = "a is trained here and was not trained in the saved run: its weight is restored, its states start from zero"
ALL_THAWED = (
    "h.0, h.1, h.2, … (40 in all) are trained here and were not trained in the saved run: weights are restored, states "
    "start from zero"
)
FROZEN = "a was trained in the saved run and is not trained here: its weight is restored, its states are left out"
NEW, GONE = "new (7,): not in the checkpoint", "gone: in the checkpoint, not in the model"
MATCHED: dict[str, tuple[AtomicIndex, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "names and shapes": (make_index(A, {"b": (4,)}), (A, {"b": (4,)}), {}, {"saved": {"a": "a", "b": "b"}}),
    "buffers left out": (make_index(A, {"b": (4,)}), (A, None), {}, {}),
    "lenient": (make_index({**A, "gone": (1,)}), ({**A, "new": (7,)},), {"strict": False}, {"skipped": [NEW, GONE]}),
    "lenient, with an adapter": (
        make_index(A),
        ({**A, "new": (7,)}, LAYERS_OF_ONE),
        {"strict": False},
        {"skipped": [NEW], "untouched": list(LAYERS_OF_ONE)},
    ),
    "other rows, left to patterns": (make_index({"a": (4, 2)}), ({"a": (6, 2)},), {}, {"resized": ["a"]}),
    "TP 2 to 1": (make_index({"a": (2, 3)}, tp=2), ({"a": (4, 3)},), {"tp": 1}, {}),
    "TP 1 to 2": (make_index({"a": (2, 3)}, tp=1), ({"a": (4, 3)},), {"tp": 2}, {}),
    "TP 2 to 2": (make_index({"a": (2, 3)}, tp=2), ({"a": (4, 3)},), {"tp": 2}, {}),
    "ties": (make_index(A, aliases={"b": "a"}), ({"b": (2,)},), {"aliases": {"a": "b"}}, {"saved": {"b": "a"}}),
    "a live tie": (make_index(A), ({"b": (2,)},), {"aliases": {"a": "b"}}, {"saved": {"b": "a"}}),
    "copies of other stages": (make_index(A, instances={"a": 3}), (A,), {"ordinals": {"a": (2, 3)}}, {}),
    "thawed": (make_index({}, A), (A,), {}, {"notes": [THAWED]}),
    "many thawed": (
        make_index({}, LAYERS_OF_ONE),
        (LAYERS_OF_ONE,),
        {},
        {"notes": [ALL_THAWED], "saved": {name: name for name in LAYERS_OF_ONE}},
    ),
    "frozen": (make_index(A), ({}, A), {}, {"notes": [FROZEN]}),
    "thawed, weights alone": (make_index({}, A), (A,), {"with_states": False}, {}),
    "frozen, weights alone": (make_index(A), ({}, A), {"with_states": False}, {}),
}
"""Checkpoint, shapes of trained and of other live tensors, options, and expected results beyond the match of `a`."""


@pytest.mark.parametrize("case", MATCHED)
def test_models_match_saved_parameters(case: str) -> None:
    index, live, options, results = MATCHED[case]
    found = match(index, *live, **options)
    lists = {"skipped": found.skipped, "untouched": found.untouched, "resized": found.resized, "notes": found.notes}
    expected = {"saved": {"a": "a"}, **{key: [] for key in lists}, **results}
    assert {"saved": found.saved, **{name: list(map(str, held)) for name, held in lists.items()}} == expected


LAYERS = {f"h.{layer}.{part}": (4, width) for layer in range(12) for width, part in enumerate("abcde", 2)}
TABLES = {"embed.weight": (8, 3), "lm_head.weight": (8, 3)}
FOREIGN = [
    "No parameter of the model has a name that is in the checkpoint. Model: net.a. Checkpoint: a, b.",
    '"rename"',
]
REFUSED: dict[str, tuple[Shapes, tuple[Shapes, Shapes], dict[str, Any], list[str]]] = {
    "every difference": (
        {"a": (2, 3), "gone": (1,)},
        ({"a": (3, 2), "new": (7,)}, {}),
        {},
        [
            "a: shape (2, 3) in the checkpoint, (3, 2) in the model",
            "new (7,): not in the checkpoint",
            "gone: in the checkpoint, not in the model",
            "load_module_strict=False",
        ],
    ),
    "wrapped model": ({"a": (2,), "b": (2,)}, ({"net.a": (2,)}, {}), {}, FOREIGN),
    "wrapped model, lenient": ({"a": (2,), "b": (2,)}, ({"net.a": (2,)}, {}), {"strict": False}, FOREIGN),
    "shape, lenient": ({"a": (2, 2)}, ({"a": (2, 3)}, {}), {"strict": False}, ["a: shape (2, 2)"]),
    "rows beside a shape": (
        {"a": (4, 2), "b": (3, 4)},
        ({"a": (6, 2), "b": (3, 5)}, {}),
        {},
        ["b: shape (3, 4) in the checkpoint, (3, 5) in the model, a: shape (4, 2)"],
    ),
    "one rule for all vocabularies": (
        {"b": (3, 4), **TABLES},
        ({"b": (3, 5), **dict.fromkeys(TABLES, (9, 3))}, {}),
        {},
        ['"original_vocab_size"', r'{"match": "embed\\.weight|lm_head\\.weight", "pattern"'],
    ),
    "vocabulary": (
        {"wte.weight": (50257, 4), "h": (3, 4)},
        ({"wte.weight": (50304, 4), "h": (3, 5)}, {}),
        {},
        [r'{"match": "wte\\.weight", "pattern": "shard-v", "vocab": true}'],
    ),
    "frozen parameters": (
        {"a": (2,)},
        ({"a": (2,)}, {"frozen": (3,)}),
        {},
        ["exclude_frozen_parameters", "Accelerate", "Lightning"],
    ),
    "frozen and new parameters": (
        {"a": (2,)},
        ({"a": (2,), "new": (2,)}, {"frozen": (3,)}),
        {},
        ["a missing one keeps the new model's value"],
    ),
    "two trained members of a tie": (
        {"decoder": (2,), "shared": (2,)},
        ({"shared": (2,)}, {}),
        {"aliases": {"decoder": "shared"}},
        ["decoder: in the checkpoint, not in the model"],
    ),
    "many differences": (
        LAYERS,
        ({name: (8, 2 * width) for name, (_, width) in LAYERS.items()}, {}),
        {},
        [
            "h.{0-11}.a: shape (4, 2) in the checkpoint, (8, 4) in the model",
            "… (60 in all)",
            "Build the model with the sizes of the saved one",
        ],
    ),
    "one saved tensor for two shapes": (
        {"a": (4, 2)},
        ({"b": (3, 2), "a": (4, 2)}, {}),
        {"renamed": {"b": "a"}},
        ["a: shape (4, 2), but (3, 2) of b; both take a"],
    ),
    "misspelt name": (
        {"head.weight": (2,), "a": (2,)},
        ({"head.weigth": (2,), "a": (2,)}, {}),
        {},
        ["head.weigth: did you mean 'head.weight'? A rename rule"],
    ),
}
"""Saved shapes, live shapes of trained and of other tensors, options, texts that the message contains once."""


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_do_not_match_are_refused(case: str) -> None:
    saved, live, options, texts = REFUSED[case]
    with pytest.raises(MismatchError) as error:
        match(make_index(saved), *live, **options)
    message = str(error.value)
    assert [message.count(text) for text in texts] == [1] * len(texts)
    assert len(message) < 800
    assert "load_module_strict" not in message or options.get("strict", True)


def test_frozen_tensors_that_a_converter_dropped_keep_live_values() -> None:
    """Buffers are kept, too. A missing trained parameter is a fault."""
    index = replace(make_index({"a": (2,)}), dropped="the converter leaves buffers out")
    assert match(index, {"a": (2,)}, {"buffer": (3,)}).left_initial == ["buffer"]
    with pytest.raises(MismatchError, match=r"b \(2,\): not in the checkpoint"):
        match(index, {"a": (2,), "b": (2,)}, {})
    with pytest.raises(MismatchError, match=r"buffer \(3,\): not in the checkpoint"):
        match(make_index({"a": (2,)}), {"a": (2,)}, {"buffer": (3,)})


def test_a_copy_is_not_used_as_a_master() -> None:
    index = make_index({"a": (2,)})
    index = replace(index, atoms=Atoms.of(atom for atom in index.atoms.values() if atom.state != MASTER))
    assert pick_weight(index, ParamKey("a"), True, True) is None


def test_param_groups_live_accepts_any_saved_groups() -> None:
    shapes = {"a": (2,), "b": (2,)}
    index = make_index(shapes, groups=[["a", "b"]])
    index.groups[0].hyper.update(lr=0.5, step=3)
    members = {0: ("a",), 1: ("b",)}
    with pytest.raises(MismatchError, match='"param_groups": "live"'):
        match_groups(index, members, match(index, shapes))
    found = match(index, shapes)
    match_groups(index, members, found, keep_live=True)
    assert found.hyper == {0: {"step": 3}, 1: {"step": 3}}
    assert found.groups == {0: (0,), 1: (0,)}
    index = make_index(shapes, groups=[["a"], ["b"]])
    joined = match(index, shapes)
    match_groups(index, {0: ("a", "b")}, joined, keep_live=True)
    assert joined.groups == {0: (0, 1)}  # differences between them are logged
    for group, step in zip(index.groups, (3, 5), strict=True):
        group.hyper["step"] = step
    with pytest.raises(MismatchError, match=r"different step counts \(3, 5\)"):
        match_groups(index, {0: ("a", "b")}, joined, keep_live=True)


def test_a_former_tie_is_reported() -> None:
    index = make_index({"a": (2,), "embed": (4,)}, {"b": (2,)}, aliases={"head": "embed", "c": "b"})
    found = match(index, {"a": (2,), "embed": (4,), "head": (4,)}, {"b": (2,), "c": (2,)})
    assert found.saved["head"] == "embed"
    assert found.notes == ["embed and head: tied in the saved run and separate here; all take the saved values"]
    assert match(index, {"a": (2,), "embed": (4,)}, {"b": (2,)}, aliases={"head": "embed", "c": "b"}).notes == []


@pytest.mark.parametrize("module", [None, {}])
def test_a_saved_copy_that_the_model_lacks_is_refused(module: Shapes | None) -> None:
    """For example, a folder without optimizer files."""
    index = make_index({"a": (2,), "gone": (1,)})
    index = replace(index, atoms=Atoms.of(atom for atom in index.atoms.values() if atom.state == COPY))
    with pytest.raises(MismatchError, match="gone: in the checkpoint, not in the model"):
        match(index, {"a": (2,)}, module, with_states=False)


TIED = ("shared", "encoder", "decoder", "head")


@pytest.mark.parametrize("saved", TIED)
@pytest.mark.parametrize("live", TIED)
def test_any_member_of_a_tie_supplies_the_other_members(live: str, saved: str) -> None:
    aliases = {name: live for name in TIED if name != live}
    for index in (make_index({saved: (2,)}), make_index({}, {saved: (2,)})):
        found = match(index, {live: (2,)}, aliases=aliases, with_states=not index.find(saved, MODULE))
        assert (found.saved, found.notes) == ({live: saved}, [])


Groups = dict[int, tuple[str, ...]]
RENAMED = {"layers.0.w": "3.w", "layers.1.w": "4.w"}
GROUPS: dict[str, tuple[Sequence[Sequence[str]], Shapes, Groups, dict[str, Any], dict[int, tuple[int, ...]]]] = {
    "by parameter": ([["a"], ["b", "c"]], {}, {0: ("c", "b"), 1: ("a",)}, {}, {0: (1,), 1: (0,)}),
    "thawed, with others": ([["a"]], {"b": (2,)}, {0: ("a", "b")}, {}, {0: (0,)}),
    "thawed, alone": ([["a"]], {"b": (2,)}, {0: ("a",), 1: ("b",)}, {}, {0: (0,)}),
    "new": ([["a", "gone"]], {}, {0: ("a",), 1: ("new",)}, {"strict": False}, {0: (0,)}),
    "removed": ([["a"], ["gone"]], {}, {0: ("a",)}, {"strict": False}, {0: (0,)}),
    "renamed": ([["3.w", "4.w"]], {}, {0: tuple(RENAMED)}, {"renamed": RENAMED}, {0: (0,)}),
    "a stage's copy": ([["a", "t"], ["t 1"]], {}, {0: ("t",)}, {"ordinals": {"t": (1, 2)}, "strict": False}, {0: (1,)}),
}
"""Saved groups, frozen parameters, live groups, options, and the saved groups that match the live ones."""


@pytest.mark.parametrize("case", GROUPS)
def test_live_groups_match_saved_groups_with_their_parameters(case: str) -> None:
    saved, frozen, live, options, expected = GROUPS[case]
    params = [read_param(name) for group in saved for name in group]
    copies = {param.name: 2 for param in params if param.instance}
    index = make_index({param.name: (2,) for param in params}, frozen, saved, instances=copies)
    found = match(index, {name: (2,) for names in live.values() for name in names}, **options)
    match_groups(index, live, found)
    assert found.groups == expected


@pytest.mark.parametrize(
    ("live", "renamed"),
    [
        ({0: ("a", "b", "c")}, {}),
        ({0: ("a", "b"), 1: ("c",)}, {}),
        ({0: ("a",), 1: ("b",), 2: ("c",)}, {}),
        ({0: ("x", "b", "c")}, {"x": "a"}),
    ],
)
def test_unmatched_groups_are_refused_with_both_lists_in_live_names(live: Groups, renamed: dict[str, str]) -> None:
    index = make_index(dict.fromkeys("abc", (1,)), groups=(["a"], ["b", "c"]))
    found = match(index, {name: (1,) for names in live.values() for name in names}, renamed=renamed)
    with pytest.raises(MismatchError) as error:
        match_groups(index, live, found)
    listed = " | ".join(f"[{', '.join(names)}]" for names in live.values())
    first = next(iter(renamed), "a")
    assert f"Checkpoint: [{first}] | [b, c]. This run: {listed}." in str(error.value)


# -- tensor parallelism, stages, other names --------------------------------------------------------------------------


def test_a_stage_whose_copy_lacks_the_weight_is_refused() -> None:
    index, shapes = make_index({**A, "t": (2,)}, instances={"t": 2}), {**A, "t": (2,)}
    index = replace(index, atoms=Atoms.of([atom for key, atom in index.atoms.items() if not key.instance]))
    assert match(index, shapes, ordinals={"t": (0, 2)}).params["t"].instance == 0
    with pytest.raises(MismatchError, match=r"t \(2,\): not in the checkpoint"):
        match(index, shapes, ordinals={"t": (1, 2)})


@pytest.mark.parametrize(
    ("saved", "live", "rule"),
    [
        ("{}", "base.{}", '{"from": "(?P<rest>.*)", "to": "base.{rest}"}'),
        ("net.{}", "{}", '{"from": "net\\\\.(?P<rest>.*)", "to": "{rest}"}'),
    ],
)
def test_a_rename_rule_is_suggested_for_names_that_differ_by_a_prefix(saved: str, live: str, rule: str) -> None:
    with pytest.raises(MismatchError) as error:
        match(make_index({saved.format(name): (2,) for name in "ab"}), {live.format(name): (2,) for name in "ab"})
    assert f'"patterns": {{"rename": [{rule}]}}' in str(error.value)
    (rename,) = parse_renames([json.loads(rule)])
    assert set(rename_names([saved.format("a")], [rename]).values()) == {live.format("a")}


# -- tied tensors that a checkpoint holds separately ------------------------------------------------------------------


Parts = list[tuple[int, int, int, int]]
"""First element, number of elements, record, byte in the record."""

HALVES = [(0, 2, 0, 0), (2, 2, 1, 0)]


def make_atoms(one: Parts, other: Parts, dtype: str = "float32", numel: int = 4) -> list[Atom]:
    copy = Atom.of("head", MODULE, [((numel,), Fragments(dtype, [Fragment(*part) for part in other]))])
    return [planning.make_atom("embed", 4, *one), copy]


def make_records(*crcs: int | None, nbytes: int = 8) -> Records:
    return Records.of([(0, nbytes * number, nbytes, crc) for number, crc in enumerate(crcs)])


IN_TWO, IN_ONE = [(0, 2, 2, 0), (2, 2, 3, 0)], [(0, 4, 1, 0)]


@pytest.mark.parametrize(
    ("one", "other", "crcs", "nbytes", "same"),
    [
        (HALVES, IN_TWO, (5, 6, 5, 6), 8, True),
        (HALVES, IN_TWO, (5, 6, 5, 7), 8, False),
        (HALVES, IN_TWO, (5, 6, 6, 5), 8, False),
        (HALVES, IN_TWO, (5, 6, 5, None), 8, None),
        (HALVES, [(0, 1, 2, 0), (1, 1, 2, 4), (2, 2, 3, 0)], (5, 6, 5, 6), 8, None),
        (HALVES, [(0, 1, 2, 4), (1, 1, 3, 0), (2, 2, 4, 0)], (5, 6, 5, 6, 7), 8, None),
        ([(0, 4, 0, 0)], IN_ONE, (5, 6), 16, False),
        ([(0, 4, 0, 0)], IN_ONE, (5, 6), 20, None),
    ],
    ids=[
        *("same", "other", "exchanged", "no checksum", "cut otherwise", "among others"),
        *("one record", "a record with further tensors, such as a flat buffer"),
    ],
)
def test_are_same_compares_checksums_of_blocks(
    one: Parts, other: Parts, crcs: tuple[int | None, ...], nbytes: int, same: bool | None
) -> None:
    atoms = make_atoms(one, other)
    index = planning.make_index(atoms, make_records(*crcs, nbytes=nbytes))
    assert are_same(index, *atoms) is same
    for odd in (None, *(make_atoms(one, other, **change)[1] for change in ({"dtype": "int32"}, {"numel": 5}))):
        assert are_same(index, atoms[0], odd) is None


@pytest.mark.parametrize(("crc", "texts"), [(5, []), (6, ["saved with other values"]), (None, ["values are used"])])
def test_a_dropped_16_bit_tie_is_compared_with_the_copy(crc: int | None, texts: list[str]) -> None:
    """The master of the remaining tensor has another dtype and is in a flat buffer with others."""
    held = [
        planning.make_atom("embed", 4, (0, 4, 0, 0)),
        planning.make_atom("embed", 4, (0, 4, 1, 0), dtype="bfloat16", state=COPY),
        planning.make_atom("head", 4, (0, 4, 2, 0), dtype="bfloat16", state=MODULE),
    ]
    records = Records.of([(0, 0, 80, 1), (0, 80, 8, 5), (0, 88, 8, crc)])
    found = match(planning.make_index(held, records), {"embed": (4,)}, {}, aliases={"head": "embed"}, strict=False)
    assert all(text in note for text, note in zip(texts, [*map(str, found.skipped), *found.notes], strict=True))


def test_a_live_tie_whose_copies_differ_is_refused() -> None:
    """A copy is skipped if it is equal, or if checksums cannot decide."""
    live, ties = {"embed": (4,)}, {"head": "embed"}
    atoms = make_atoms([(0, 4, 0, 0)], [(0, 4, 1, 0)])
    for crc in (5, None):
        assert match(planning.make_index(atoms, make_records(5, crc, nbytes=16)), live, {}, aliases=ties).skipped == []
    index = planning.make_index(atoms, make_records(5, 6, nbytes=16))
    with pytest.raises(MismatchError, match="head: tied to embed in the model, but saved with other values"):
        match(index, live, {}, aliases=ties)
    (skipped,) = match(index, live, {}, aliases=ties, strict=False).skipped
    assert skipped.name == "head"


# -- rules of the user ------------------------------------------------------------------------------------------------

BOTH_WAYS = {
    "rename": [
        {"from": r"(?P<n>\d+)\.(?P<rest>\w+)", "to": "encoder.{n-2}.{rest}"},
        {"from": r"encoder\.(?P<n>\d+)\.(?P<rest>\w+)", "to": "{n+2}.{rest}"},
    ]
}


@pytest.mark.parametrize(
    ("saved", "live", "renamed"),
    [
        (["2.w", "3.w"], ["encoder.0.w", "encoder.1.w"], {"encoder.0.w": "2.w", "encoder.1.w": "3.w"}),
        (["encoder.0.w"], ["2.w"], {"2.w": "encoder.0.w"}),
        (["2.w", "4.w"], ["2.w", "4.w", "encoder.0.w"], {}),
        (["2.w"], ["encoder.7.w"], {}),
    ],
    ids=["forth", "back", "the same name", "not in the engine"],
)
def test_rename_rules_apply_in_both_directions(saved: list[str], live: list[str], renamed: dict[str, str]) -> None:
    """A rule renames a saved name only to a name of the engine, and never renames a name that the engine has."""
    index = make_index(dict.fromkeys(saved, (2,)), instances={saved[0]: 2})
    assert apply_renames(index, dict.fromkeys(live, ((2,),)), from_config(BOTH_WAYS)) == renamed


def test_rules_without_a_match_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    resize = [{"match": "v"}, {"match": "w"}]
    rules = from_config({"rename": [{"from": "nothing", "to": "something"}], "resize": resize})
    index = make_index({"w": (2,)})
    with caplog.at_level(logging.INFO, logger="deepspeed_ucp"):
        adaptation = Adaptation(index, EngineView(), rules, None, True, index, set())
        for extension in (Renames(), ResizedRows()):
            extension.adapt(adaptation)
    assert "'nothing' matches no parameter" in caplog.text
    assert "patterns: resize: 'v' matches no parameter\n" in caplog.text and "'w' matches" not in caplog.text
