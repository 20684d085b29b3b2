"""Which saved parameter and param group a live one continues."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from deepspeed_ucp.atoms import COPY, MASTER, MODULE, Atom, AtomicIndex, Atoms, GroupInfo, ParamKey, Shard
from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.patterns import parse_renames, rename_names
from deepspeed_ucp.plan.match import Match, TargetInventory, match_groups, match_parameters, pick_instance, pick_weight
from tests.plan import planning

Shapes = Mapping[str, tuple[int, ...]]


def make_index(
    trained: Shapes,
    module: Shapes | None = None,
    groups: Sequence[Sequence[str]] = (),
    aliases: Mapping[str, str] | None = None,
    instances: Mapping[str, int] | None = None,
    tp: int = 1,
) -> AtomicIndex:
    """Trained parameters have a master and a copy, others the module's tensor; every shard has the given shape."""
    held = [(name, state, shape) for name, shape in trained.items() for state in (MASTER, COPY)]
    held += [(name, MODULE, shape) for name, shape in (module or {}).items()]
    numbers = dict(instances or {})
    atoms = [
        Atom(name, state, "float32", (Shard(shape, ()),) * tp, number)
        for name, state, shape in held
        for number in range(numbers.get(name, 1))
    ]
    infos = tuple(GroupInfo(tuple(map(read_param, names)), {}) for names in groups)
    return planning.make_index(atoms, tp=tp, groups=infos, aliases=dict(aliases or {}), instances=numbers)


def read_param(name: str) -> ParamKey:
    """``t``, or ``t 1`` for the copy of the second stage that holds it."""
    plain, _, number = name.partition(" ")
    return ParamKey(plain, int(number or 0))


def match(index: AtomicIndex, owned: Shapes, extras: Shapes | None = None, *, tp: int = 1, **options: Any) -> Match:
    """Every tensor-parallel rank of the live engine has the given shapes."""
    chosen = {"strict": True, "with_states": True}
    chosen.update({key: options.pop(key) for key in tuple(options) if key in chosen})
    shapes = [{name: (shape,) * tp for name, shape in held.items()} for held in (owned, extras or {})]
    return match_parameters(index, TargetInventory(*shapes, **options), **chosen).require()


def test_names_and_shapes_that_agree_match() -> None:
    found = match(make_index({"a": (2, 3)}, {"b": (4,)}), {"a": (2, 3)}, {"b": (4,)})
    assert (found.saved, found.skipped) == ({"a": "a", "b": "b"}, [])


def test_every_difference_is_listed() -> None:
    index = make_index({"a": (2, 3), "gone": (1,)}, {"b": (4,)})
    with pytest.raises(MismatchError) as error:
        match(index, {"a": (3, 2), "new": (7,)}, {"b": (4,)})
    for text in (
        "a: shape (2, 3) in the checkpoint, (3, 2) in the model",
        "new (7,): not in the checkpoint",
        "gone: in the checkpoint, not in the model",
        "load_module_strict=False",
    ):
        assert text in str(error.value)


def test_a_lenient_load_passes_missing_and_extra_ones_over() -> None:
    found = match(make_index({"a": (2,), "gone": (1,)}), {"a": (2,), "new": (7,)}, strict=False)
    assert found.saved == {"a": "a"}
    assert len(found.skipped) == 2


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_of_which_nothing_is_in_the_checkpoint_is_refused(strict: bool) -> None:
    """As where it is wrapped: a lenient load would train from scratch."""
    told = r"Nothing of the model is in the checkpoint by name. Model: net.a. Checkpoint: a, b. .*\"rename\""
    with pytest.raises(MismatchError, match=told):
        match(make_index({"a": (2,), "b": (2,)}), {"net.a": (2,)}, strict=strict)


def test_a_lenient_load_still_refuses_other_shapes() -> None:
    with pytest.raises(MismatchError, match=r"a: shape \(2, 2\)") as error:
        match(make_index({"a": (2, 2)}), {"a": (2, 3)}, strict=False)
    assert "load_module_strict" not in str(error.value)


def test_other_numbers_of_rows_are_left_to_patterns() -> None:
    """A vocabulary's padding may be what differs; no pattern says so of the others."""
    found = match(make_index({"a": (4, 2), "b": (3,)}), {"a": (6, 2), "b": (3,)})
    assert list(found.resized) == ["a"]
    with pytest.raises(MismatchError, match=r"b: shape .* in the model, a: shape \(4, 2\)"):
        match(make_index({"a": (4, 2), "b": (3, 4)}), {"a": (6, 2), "b": (3, 5)})


def test_a_rule_to_paste_is_one_for_all_vocabularies() -> None:
    tables = {"embed.weight": (8, 3), "lm_head.weight": (8, 3)}
    with pytest.raises(MismatchError) as error:
        match(make_index({"b": (3, 4), **tables}), {"b": (3, 5), **dict.fromkeys(tables, (9, 3))})
    told = str(error.value)
    assert (
        told.count('"original_vocab_size"')
        == told.count(r'{"match": "embed\\.weight|lm_head\\.weight", "pattern"')
        == 1
    )


def test_what_the_sources_converter_left_out_keeps_its_value() -> None:
    """Frozen parameters and buffers alone; what is trained has to be there."""
    index = make_index({"a": (2,)}).change(dropped="the converter leaves buffers out")
    assert match(index, {"a": (2,)}, {"buffer": (3,)}).kept == ["buffer"]
    with pytest.raises(MismatchError, match=r"b \(2,\): not in the checkpoint"):
        match(index, {"a": (2,), "b": (2,)}, {})
    with pytest.raises(MismatchError, match=r"buffer \(3,\): not in the checkpoint"):
        match(make_index({"a": (2,)}), {"a": (2,)}, {"buffer": (3,)})


@pytest.mark.parametrize(
    ("trained", "frozen", "text"),
    [
        ({}, {"a": (2,)}, "a is trained here and was not in the saved run"),
        ({"a": (2,)}, {}, "a was trained in the saved run and is not here"),
    ],
    ids=["frozen→trained", "trained→frozen"],
)
def test_freezing_or_thawing_takes_the_weight_and_says_so(trained: Shapes, frozen: Shapes, text: str) -> None:
    index = make_index(trained, frozen)
    live = ({"a": (2,)}, {}) if frozen else ({}, {"a": (2,)})
    found = match(index, *live)
    assert found.saved == {"a": "a"}
    (note,) = found.notes
    assert note.startswith(text)
    assert match(index, *live, with_states=False).notes == []


def test_a_thawed_parameter_joins_the_group_of_the_others() -> None:
    index = make_index({"a": (2,)}, {"b": (2,)}, [["a"]])
    found = match(index, {"a": (2,), "b": (2,)})
    match_groups(index, {0: ("a", "b")}, found)
    assert found.groups == {0: (0,)}
    apart = match(index, {"a": (2,), "b": (2,)})
    match_groups(index, {0: ("a",), 1: ("b",)}, apart)
    assert apart.groups == {0: (0,)}


@pytest.mark.parametrize(
    ("name", "wants_master", "with_states", "state"),
    [
        ("a", True, True, MASTER),
        ("a", True, False, COPY),
        ("a", False, True, COPY),
        ("b", False, True, MODULE),
        ("b", True, True, MODULE),
        ("b", True, False, MODULE),
    ],
)
def test_weights_alone_come_from_the_module(name: str, wants_master: bool, with_states: bool, state: str) -> None:
    """As DeepSpeed's own load takes them: they may have been edited before the save."""
    atom = pick_weight(make_index({"a": (2,)}, {"b": (2,)}), ParamKey(name), wants_master, with_states)
    assert atom is not None
    assert atom.state == state


def test_a_copy_is_no_master() -> None:
    index = make_index({"a": (2,)})
    index = index.change(atoms=Atoms.of(atom for atom in index.stored.atoms.values() if atom.state != MASTER))
    assert pick_weight(index, ParamKey("a"), True, True) is None


def test_a_save_without_frozen_parameters_says_how_it_is_loaded() -> None:
    index = make_index({"a": (2,)})
    with pytest.raises(MismatchError, match="exclude_frozen_parameters.*Accelerate.*Lightning"):
        match(index, {"a": (2,)}, {"frozen": (3,)})
    with pytest.raises(MismatchError, match="a missing one keeps the new model's value"):
        match(index, {"a": (2,), "new": (2,)}, {"frozen": (3,)})


def test_live_groups_keep_their_hyper_parameters_however_the_saved_run_grouped() -> None:
    index = make_index({"a": (2,), "b": (2,)}, groups=[["a", "b"]])
    index.run.groups[0].hyper.update(lr=0.5, step=3)
    members = {0: ("a",), 1: ("b",)}
    with pytest.raises(MismatchError, match='"param_groups": "live"'):
        match_groups(index, members, match(index, {"a": (2,), "b": (2,)}))
    found = match(index, {"a": (2,), "b": (2,)})
    match_groups(index, members, found, keep_live=True)
    assert found.hyper == {0: {"step": 3}, 1: {"step": 3}}
    assert found.groups == {0: (0,), 1: (0,)}
    joined = match(index := make_index({"a": (2,), "b": (2,)}, groups=[["a"], ["b"]]), {"a": (2,), "b": (2,)})
    match_groups(index, {0: ("a", "b")}, joined, keep_live=True)
    assert joined.groups == {0: (0, 1)}  # whose values are told where they are others


def test_live_groups_that_join_saved_ones_of_different_steps_are_refused() -> None:
    index = make_index({"a": (2,), "b": (2,)}, groups=[["a"], ["b"]])
    for group, step in zip(index.run.groups, (3, 5), strict=True):
        group.hyper["step"] = step
    found = match(index, {"a": (2,), "b": (2,)})
    with pytest.raises(MismatchError, match="stepped 3, 5 times"):
        match_groups(index, {0: ("a", "b")}, found, keep_live=True)


def test_what_the_model_lacks_is_found_where_the_files_hold_copies_alone() -> None:
    """A folder without the optimizer's files, of which the weights are loaded."""
    index = make_index({"a": (2,), "gone": (1,)})
    index = index.change(atoms=Atoms.of(atom for atom in index.stored.atoms.values() if atom.state == COPY))
    with pytest.raises(MismatchError, match="gone: in the checkpoint, not in the model"):
        match(index, {"a": (2,)}, {}, with_states=False)


def test_ties_are_resolved_on_both_sides() -> None:
    index = make_index({"head": (2,)}, aliases={"embed": "head"})
    assert match(index, {"embed": (2,)}, aliases={"head": "embed"}).saved == {"embed": "head"}
    assert match(make_index({"head": (2,)}), {"embed": (2,)}, aliases={"head": "embed"}).saved == {"embed": "head"}


TIED = ("shared", "encoder", "decoder", "head")


@pytest.mark.parametrize("saved", TIED)
@pytest.mark.parametrize("live", TIED)
def test_any_member_of_a_tie_supplies_the_others(live: str, saved: str) -> None:
    aliases = {name: live for name in TIED if name != live}
    for index in (make_index({saved: (2,)}), make_index({}, {saved: (2,)})):
        found = match(index, {live: (2,)}, aliases=aliases, with_states=not index.find(saved, MODULE))
        assert (found.saved, found.notes) == ({live: saved}, [])


def test_members_of_a_tie_that_are_both_trained_are_refused() -> None:
    with pytest.raises(MismatchError, match="decoder: in the checkpoint, not in the model"):
        match(make_index({"decoder": (2,), "shared": (2,)}), {"shared": (2,)}, aliases={"decoder": "shared"})


def test_groups_match_by_parameter_and_not_by_position() -> None:
    index = make_index({"a": (1,), "b": (1,), "c": (1,)}, groups=(["a"], ["b", "c"]))
    found = match(index, {"a": (1,), "b": (1,), "c": (1,)})
    match_groups(index, {0: ("c", "b"), 1: ("a",)}, found)
    assert found.groups == {0: (1,), 1: (0,)}


@pytest.mark.parametrize("live", [{0: ("a", "b", "c")}, {0: ("a", "b"), 1: ("c",)}, {0: ("a",), 1: ("b",), 2: ("c",)}])
def test_groups_that_are_cut_differently_are_refused_with_both_lists(live: dict[int, tuple[str, ...]]) -> None:
    index = make_index({"a": (1,), "b": (1,), "c": (1,)}, groups=(["a"], ["b", "c"]))
    found = match(index, {"a": (1,), "b": (1,), "c": (1,)})
    with pytest.raises(MismatchError, match=r"Checkpoint: \[a\] \| \[b, c\]\. This run: ") as error:
        match_groups(index, live, found)
    assert " | ".join(f"[{', '.join(names)}]" for names in live.values()) in str(error.value)


def test_groups_are_listed_by_the_names_of_this_run() -> None:
    index = make_index({"a": (1,), "b": (1,)}, groups=(["a"], ["b"]))
    found = match(index, {"x": (1,), "b": (1,)}, renamed={"x": "a"})
    with pytest.raises(MismatchError, match=r"Checkpoint: \[x\] \| \[b\]\. This run: \[x, b\]"):
        match_groups(index, {0: ("x", "b")}, found)


def test_groups_without_a_known_parameter_keep_their_own_hyper_parameters() -> None:
    index = make_index({"a": (1,), "gone": (1,)}, groups=(["a", "gone"],))
    found = match(index, {"a": (1,), "new": (1,)}, strict=False)
    match_groups(index, {0: ("a",), 1: ("new",)}, found)
    assert found.groups == {0: (0,)}


def test_a_lenient_load_does_not_count_parameters_that_the_model_lacks() -> None:
    index = make_index({"a": (1,), "gone": (1,)}, groups=(["a"], ["gone"]))
    found = match(index, {"a": (1,)}, strict=False)
    match_groups(index, {0: ("a",)}, found)
    assert found.groups == {0: (0,)}


# -- tensor parallelism, stages, other names --------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "live"), [(2, 1), (1, 2), (2, 2)], ids=["TP2→TP1", "TP1→TP2", "TP2→TP2"])
def test_shapes_of_cut_tensors_are_left_to_their_patterns(saved: int, live: int) -> None:
    index = make_index({"a": (2, 3)}, tp=saved)
    assert match(index, {"a": (4, 3)}, tp=live).saved == {"a": "a"}


def test_buffers_and_frozen_ones_may_be_left_out_of_the_comparison() -> None:
    index = make_index({"a": (2,)}, {"buffer": (4,)})
    found = match_parameters(index, TargetInventory({"a": ((2,),)}, None), strict=True, with_states=True)
    assert (found.saved, found.skipped) == ({"a": "a"}, [])


def test_renamed_parameters_are_found_under_their_saved_names() -> None:
    index = make_index({"3.w": (2,), "4.w": (2,)}, groups=(["3.w", "4.w"],))
    renamed = {"layers.0.w": "3.w", "layers.1.w": "4.w"}
    found = match(index, {"layers.0.w": (2,), "layers.1.w": (2,)}, renamed=renamed)
    assert found.saved == renamed
    match_groups(index, {0: tuple(renamed)}, found)
    assert found.groups == {0: (0,)}


@pytest.mark.parametrize(
    ("saved", "count", "taken"),
    [
        (1, 1, "0"),
        (1, 3, "000"),
        (2, 1, "0"),
        (2, 2, "01"),
        (2, 3, "011"),
        (3, 1, "0"),
        (3, 2, "02"),
        (3, 3, "012"),
        (3, 4, "0122"),
    ],
)
def test_each_stage_takes_its_own_copy(saved: int, count: int, taken: str) -> None:
    """Where one remains the first stage's, so that values of the first stage count; the last stage takes the last's."""
    index = make_index({"t": (2,)}, instances={"t": saved} if saved > 1 else None)
    params = [match(index, {"t": (2,)}, ordinals={"t": (stage, count)}).params["t"] for stage in range(count)]
    assert params == [ParamKey("t", int(number)) for number in taken]
    assert [pick_instance(index, "t", stage, count) for stage in range(count)] == params


def test_further_copies_are_not_missing_in_the_model() -> None:
    index = make_index({"t": (2,)}, instances={"t": 3})
    found = match(index, {"t": (2,)}, ordinals={"t": (2, 3)})
    assert (found.params, found.skipped) == ({"t": ParamKey("t", 2)}, [])


def test_a_group_is_found_by_a_stages_own_copy() -> None:
    index = make_index({"a": (2,), "t": (2,)}, groups=(["a", "t"], ["t 1"]), instances={"t": 2})
    found = match(index, {"a": (2,), "t": (2,)}, ordinals={"t": (1, 2)})
    match_groups(index, {0: ("t",)}, found)
    assert found.groups == {0: (1,)}


def test_many_differences_are_counted_and_shown_by_example() -> None:
    saved = {f"h.{layer}.{part}": (4, width) for layer in range(12) for width, part in enumerate("abcde", 2)}
    with pytest.raises(MismatchError) as told:
        match(make_index(saved), {name: (8, 2 * width) for name, (_, width) in saved.items()})
    assert "h.{0-11}.a: shape (4, 2) in the checkpoint, (8, 4) in the model" in str(told.value)
    assert "… (60 in all)" in str(told.value)
    assert "Build the model with the sizes of the saved one" in str(told.value)
    assert len(str(told.value)) < 400


def test_another_vocabulary_is_told_with_the_rule_for_it() -> None:
    index = make_index({"wte.weight": (50257, 4), "h": (3, 4)})
    with pytest.raises(MismatchError) as told:
        match(index, {"wte.weight": (50304, 4), "h": (3, 5)})
    assert '{"match": "wte\\\\.weight", "pattern": "shard-v", "vocab": true}' in str(told.value)


@pytest.mark.parametrize(
    ("saved", "live", "rule"),
    [
        ("{}", "base.{}", '{"from": "(?P<rest>.*)", "to": "base.{rest}"}'),
        ("net.{}", "{}", '{"from": "net\\\\.(?P<rest>.*)", "to": "{rest}"}'),
    ],
)
def test_names_that_differ_by_a_prefix_are_told_with_the_rename_rule(saved: str, live: str, rule: str) -> None:
    index = make_index({saved.format(name): (2,) for name in "ab"})
    with pytest.raises(MismatchError) as told:
        match(index, {live.format(name): (2,) for name in "ab"})
    assert f'"patterns": {{"rename": [{rule}]}}' in str(told.value)
    (rename,) = parse_renames([json.loads(rule)])
    assert set(rename_names([saved.format("a")], [rename]).values()) == {live.format("a")}


def test_a_misspelt_name_is_told_with_what_it_may_mean() -> None:
    with pytest.raises(MismatchError, match=r"head\.weigth: did you mean 'head\.weight'\? Rename rules"):
        match(make_index({"head.weight": (2,), "a": (2,)}), {"head.weigth": (2,), "a": (2,)})


def test_frozen_tensors_of_an_adapters_save_stay_as_they_are() -> None:
    live = {f"base.{number}": (2,) for number in range(40)}
    found = match(make_index({"lora": (2,)}), {"lora": (2,), "new": (2,)}, live, strict=False)
    assert found.untouched == list(live)
    assert list(map(str, found.skipped)) == ["new (2,): not in the checkpoint"]


def test_thawed_parameters_are_told_in_one_line() -> None:
    frozen = {f"h.{number}": (2,) for number in range(40)}
    found = match(make_index({"a": (2,)}, frozen), {"a": (2,), **frozen}, {})
    assert found.notes == [
        "h.0, h.1, h.2, … (40 in all) are trained here and were not in the saved run: weights are restored, states "
        "begin anew"
    ]
