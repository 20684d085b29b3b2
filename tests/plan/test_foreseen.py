"""The model that rename rules lead to: held against models that have it, to which the rules are carried out alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deepspeed_ucp.atoms import MASTER, Atoms
from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.patterns import from_config, list_renames
from deepspeed_ucp.plan.predicted import predict_renames, predict_shapes
from deepspeed_ucp.plan.renames import apply_renames
from tests.plan.test_recast import make_index, read

Shapes = Mapping[str, tuple[int, ...]]

HF = {"h.mlp.experts.gate_up_proj": (4, 6, 2), "h.mlp.experts.down_proj": (4, 2, 3), "h.mlp.gate.weight": (4, 2)}
AUTOEP = {
    **{f"h.mlp.experts.{w}.{e}": (2, 3) if w == "w2" else (3, 2) for w in ("w1", "w2", "w3") for e in range(4)},
    "h.mlp.router.gate.weight": (4, 2),
}
MANY = {f"x.w.{e}": (3, 2) for e in range(8)}
COUNTING = [{"from": r"x\.w\.{e // 2}", "to": "x.w.{e}"}]
FUSED = [{"from": r"x\.up\.{e % 4}", "to": "x.up.{e}"}]
UPCYCLING = [{"from": r"x\.(?P<w>w\d)", "to": "x.experts.{w}.{e}"}]

CASES: dict[str, tuple[Shapes, Shapes, Any, int | None]] = {
    "hugging face to autoep": (HF, AUTOEP, "autoep", None),
    "autoep to hugging face": (AUTOEP, HF, "autoep", None),
    "more": ({f"x.w.{e}": (3, 2) for e in range(4)}, MANY, {"rename": COUNTING}, 8),
    "as many": (MANY, MANY, {"rename": COUNTING}, None),
    "more in one": ({"x.up": (4, 3, 2)}, {"x.up": (8, 3, 2)}, {"rename": FUSED}, 8),
    "copied": ({"x.w1": (3, 2)}, {f"x.experts.w1.{e}": (3, 2) for e in range(4)}, {"rename": UPCYCLING}, 4),
    "renamed": ({"2.w": (3,), "b": (1,)}, {"h.1.w": (3,), "b": (1,)}, {"rename": {"2.w": "h.1.w"}}, None),
    "left out": ({"a": (3,), "b": (1,)}, {"b": (1,)}, {"rename": [{"from": "a", "to": None}]}, None),
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_that_a_load_has(case: str, tp: int) -> None:
    saved, live, patterns, experts = CASES[case]
    rules = from_config(patterns)
    shapes = {name: (shape,) * tp for name, shape in live.items()}
    assert (
        predict_shapes({name: (shape,) * tp for name, shape in saved.items()}, list_renames(rules), experts) == shapes
    )
    if tp > 1 and case == "more in one":
        return
    index, data = make_index(saved, tp=tp)
    foreseen, loaded = predict_renames(index, rules, experts), apply_renames(index, shapes, rules)
    assert (foreseen.renamed, foreseen.made, foreseen.notes) == (loaded.renamed, loaded.made, loaded.notes)
    for name in live:
        old = foreseen.renamed.get(name, name)
        assert np.array_equal(read(foreseen.index, data, old), read(loaded.index, data, old)), name


@pytest.mark.parametrize(
    ("saved", "rules", "experts", "words"),
    [
        ({"x.w1": (3, 2)}, UPCYCLING, None, r"of how many experts a layer is made only the model tells"),
        ({"x.w1": (4, 3, 2)}, UPCYCLING, 8, r"holds 4 experts, not 8: .* arithmetic of \{e\}"),
        (MANY, [{"from": r"x\.w\.{e * 2}", "to": "x.w.{e}"}], 5, "lets the saved number 8 feed x.w.4"),
        (MANY, [{"from": r"x\.w\.{n * 2}", "to": "x.w.{n}"}], None, r"numbers \{n\} there are only a live model tells"),
    ],
)
def test_what_the_rules_do_not_tell(saved: Shapes, rules: Sequence[Any], experts: int | None, words: str) -> None:
    index, _ = make_index(saved)
    with pytest.raises(MismatchError, match=words):
        predict_renames(index, from_config({"rename": rules}), experts)


def test_a_rule_that_matches_scalars_too() -> None:
    index, data = make_index({"x.up": (4, 3, 2), "scale": ()})
    made = predict_renames(index, from_config({"rename": {"from": r"(?P<x>.*)\.{e % 4}", "to": "{x}.{e}"}}), 8)
    assert read(made.index, data, "x.up").shape == (8, 3, 2)
    assert read(made.index, data, "scale").shape == ()


def test_copies_alone_are_renamed_too() -> None:
    """Where the optimizer's files are not wanted."""
    index, _ = make_index({"2.w": (3,)})
    atoms = Atoms.of(replace(atom, state="copy") for atom in index.stored.atoms.values() if atom.state == MASTER)
    rules = from_config({"rename": {"from": r"2\.w", "to": "h.w"}})
    assert apply_renames(index.change(atoms=atoms), {"h.w": ((3,),)}, rules).renamed == {"h.w": "2.w"}
