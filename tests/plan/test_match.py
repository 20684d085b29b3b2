"""Which saved parameter and param group a live one continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from deepspeed_ucp.atoms import COPY, MASTER, MODULE, Atom, AtomicIndex, GroupInfo
from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.plan.match import Match, match_groups, match_parameters, pick_weight
from deepspeed_ucp.topology import Topology

Shapes = Mapping[str, tuple[int, ...]]


def make_index(
    trained: Shapes,
    module: Shapes | None = None,
    groups: Sequence[Sequence[str]] = (),
    aliases: Mapping[str, str] | None = None,
) -> AtomicIndex:
    """Trained parameters have a master and a copy, others the module's tensor."""
    atoms = {
        (name, state): Atom(name, state, shape, "float32", ())
        for name, shape in trained.items()
        for state in (MASTER, COPY)
    }
    atoms.update({(name, MODULE): Atom(name, MODULE, shape, "float32", ()) for name, shape in (module or {}).items()})
    return AtomicIndex(
        files=(),
        records=(),
        atoms=atoms,
        scalars={},
        groups=tuple(GroupInfo(tuple(names), {}) for names in groups),
        aliases=dict(aliases or {}),
        shapes=dict(trained),
        buffers=frozenset(),
        counters={},
        scaler={},
        clip_grad=None,
        state_file="mp_rank_00_model_states.pt",
        topology=Topology(1, "zero12", "float32"),
    )


def match(index: AtomicIndex, owned: Shapes, extras: Shapes | None = None, **options: Any) -> Match:
    aliases = options.pop("aliases", {})
    return match_parameters(index, owned, extras or {}, aliases, **{"strict": True, "with_states": True, **options})


def test_names_and_shapes_that_agree_match() -> None:
    found = match(make_index({"a": (2, 3)}, {"b": (4,)}), {"a": (2, 3)}, {"b": (4,)})
    assert (found.names, found.skipped) == ({"a": "a", "b": "b"}, [])


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
    assert found.names == {"a": "a"}
    assert len(found.skipped) == 2


def test_a_lenient_load_still_refuses_other_shapes() -> None:
    with pytest.raises(MismatchError, match=r"a: shape \(2,\)") as error:
        match(make_index({"a": (2,)}), {"a": (3,)}, strict=False)
    assert "load_module_strict" not in str(error.value)


@pytest.mark.parametrize(
    ("trained", "frozen", "text"),
    [
        ({}, {"a": (2,)}, "as a trained parameter, there it is frozen"),
        ({"a": (2,)}, {}, "as a frozen one, there it is trained"),
    ],
    ids=["frozen→trained", "trained→frozen"],
)
def test_trained_and_frozen_are_not_swapped_where_states_are_loaded(trained: Shapes, frozen: Shapes, text: str) -> None:
    index = make_index(trained, frozen)
    live = ({"a": (2,)}, {}) if frozen else ({}, {"a": (2,)})
    with pytest.raises(MismatchError, match=text):
        match(index, *live)
    assert match(index, *live, with_states=False).names == {"a": "a"}


def test_weights_come_from_the_master_or_the_module() -> None:
    index = make_index({"a": (2,)}, {"b": (2,)})
    picked = [
        pick_weight(index, name, wants_master, with_states)
        for name, wants_master, with_states in (
            ("a", True, True),
            ("b", False, True),
            ("a", False, False),
            ("b", True, False),
        )
    ]
    assert [atom.state for atom in picked if atom] == [MASTER, MODULE, MASTER, MODULE]


def test_the_copy_serves_where_a_checkpoint_has_no_master() -> None:
    index = make_index({"a": (2,)})
    del index.atoms["a", MASTER]
    assert pick_weight(index, "a", True, True) is None
    found = pick_weight(index, "a", True, False)
    assert found is not None
    assert found.state == COPY


def test_ties_are_resolved_on_both_sides() -> None:
    index = make_index({"head": (2,)}, aliases={"embed": "head"})
    assert match(index, {"embed": (2,)}, aliases={"head": "embed"}).names == {"embed": "head"}
    assert match(make_index({"head": (2,)}), {"embed": (2,)}, aliases={"head": "embed"}).names == {"embed": "head"}


def test_groups_match_by_parameter_and_not_by_position() -> None:
    index = make_index({"a": (1,), "b": (1,), "c": (1,)}, groups=(["a"], ["b", "c"]))
    found = match(index, {"a": (1,), "b": (1,), "c": (1,)})
    match_groups(index, {0: ("c", "b"), 1: ("a",)}, found)
    assert found.groups == {0: 1, 1: 0}


@pytest.mark.parametrize("live", [{0: ("a", "b", "c")}, {0: ("a", "b"), 1: ("c",)}, {0: ("a",), 1: ("b",), 2: ("c",)}])
def test_groups_that_are_cut_differently_are_refused_with_both_lists(live: dict[int, tuple[str, ...]]) -> None:
    index = make_index({"a": (1,), "b": (1,), "c": (1,)}, groups=(["a"], ["b", "c"]))
    found = match(index, {"a": (1,), "b": (1,), "c": (1,)})
    with pytest.raises(MismatchError, match=r"Checkpoint: \[a\] \| \[b, c\]\. This run: ") as error:
        match_groups(index, live, found)
    assert " | ".join(f"[{', '.join(names)}]" for names in live.values()) in str(error.value)


def test_groups_without_a_known_parameter_keep_their_own_hyper_parameters() -> None:
    index = make_index({"a": (1,), "gone": (1,)}, groups=(["a", "gone"],))
    found = match(index, {"a": (1,), "new": (1,)}, strict=False)
    match_groups(index, {0: ("a",), 1: ("new",)}, found)
    assert found.groups == {0: 0}


def test_a_lenient_load_does_not_count_parameters_that_the_model_lacks() -> None:
    index = make_index({"a": (1,), "gone": (1,)}, groups=(["a"], ["gone"]))
    found = match(index, {"a": (1,)}, strict=False)
    match_groups(index, {0: ("a",)}, found)
    assert found.groups == {0: 0}
