"""Loads, conversions and diffs agree for all names and values that torch allows in a model and an optimizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.formats import open_checkpoint
from tests.properties.samples import RULES, SOURCES, Source, groups_option, run_cli, try_to
from tests.support.contents import check_content
from tests.support.conversion import convert_checkpoint
from tests.support.reshard import examples, load, make_targets, open_for, temporary_folder
from tests.synth import Model, Param, State, Topology, random_state, read_state, write_checkpoint

TOPOLOGIES = [Topology(1, 3), Topology(2, 2, "bf16"), Topology(3, 2), Topology(1, 2, "bf16", "bf16")]

# -- names and values that torch allows -------------------------------------------------------------------------------

# A name's part is any text without dots, except the empty one: keys of a ModuleDict, attributes set with setattr.
PARTS = st.one_of(
    st.sampled_from(["c#", "a#1", "0", "weight", "step", "fp32", "param", " ", "Ünï", "漢字", "a b", "x'\"", "[0]"]),
    st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=12),
)
NAMES = st.lists(PARTS, min_size=1, max_size=3).map(".".join)

NUMBERS = st.one_of(
    st.booleans(), st.none(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=5)
)
HYPER = st.dictionaries(
    st.sampled_from(["lr", "weight_decay", "eps", "momentum", "note", "Ünï", "initial_lr"]),
    st.one_of(NUMBERS, st.tuples(NUMBERS, NUMBERS), st.lists(NUMBERS, max_size=3)),
    max_size=5,
)
SCALARS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool),
]
STATES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Model, State, Topology]:
    """Draw a small model with any names, hyper-parameters and dtypes, after one step."""
    names = draw(st.lists(NAMES, min_size=2, max_size=4, unique=True))
    params = tuple(Param(name, (2 + index, 3), index % 2) for index, name in enumerate(names))
    model = Model(params, {})
    topology = draw(st.sampled_from(TOPOLOGIES))
    state = random_state(model, draw(st.integers(0, 99)), dtype=draw(st.sampled_from(STATES)))
    scalar = torch.tensor(draw(st.integers(0, 1)), dtype=draw(st.sampled_from(SCALARS)))
    scalars = {name: {**held, "count": scalar.clone()} for name, held in state.scalars.items()}
    groups = tuple({**group, **draw(HYPER)} for group in state.groups)
    return model, replace(state, scalars=scalars, groups=groups), topology


def list_differences(left: Path, right: Path, *options: str) -> list[Any]:
    code, answer = run_cli("diff", str(left), str(right), *options)
    assert code in (0, 1), answer
    found = [answer[key] for key in ("tensors", "values", "only_left", "only_right") if answer.get(key)]
    assert (code == 0) == (not found), answer
    return found


# -- diff(x, convert(x)) is empty -------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [source for source in SOURCES if not source.atomic], ids=str)
def test_diff_finds_no_difference_in_a_conversion(source: Source, tmp_path: Path) -> None:
    path = source.write(tmp_path)
    options = groups_option(source)
    rules = RULES if source.model.layers else None
    convert_checkpoint(str(path), str(tmp_path / "out"), patterns={"rules": rules} if rules else None,
                       groups="module" if options else None)  # fmt: skip
    patterns = ["--patterns", json.dumps(rules)] if rules else []
    assert list_differences(path, tmp_path / "out", *options, *patterns) == []


@examples(60)
@given(case=drawn())
def test_an_index_and_a_conversion_keep_any_names_and_values(case: tuple[Model, State, Topology]) -> None:
    """Names that a file system does not support are refused."""
    model, state, topology = case
    note(f"{topology.label} {[param.name for param in model.params]} {state.groups}")
    with temporary_folder() as folder:
        path = write_checkpoint(folder, model, state, topology)
        index = open_checkpoint(str(path), Comm())
        assert [dict(group.hyper) for group in index.groups] == [dict(group) for group in state.groups]
        saved = {key.name: held for key, held in index.scalars.items()}
        assert saved.keys() == state.scalars.keys()
        for name, held in state.scalars.items():
            assert float(saved[name]["count"]) == float(held["count"])
            assert saved[name]["step"] == held["step"]
        refused = try_to(lambda: convert_checkpoint(str(path), str(folder / "out")))
        if refused and not all(is_common(param.name) for param in model.params):
            return
        assert not refused, refused.text
        assert list_differences(path, folder / "out") == []
        for where in (path, folder / "out"):
            code, answer = run_cli("verify", str(where))
            assert code == 0, answer


def is_common(name: str) -> bool:
    return name.isprintable() and "/" not in name and not set(name.split(".")) & {"", " "}


@examples(60)
@given(case=drawn(), target=st.sampled_from(TOPOLOGIES))
def test_a_conversion_and_its_source_load_equally(case: tuple[Model, State, Topology], target: Topology) -> None:
    """Both equal the save of a run in the target's topology, under any names."""
    model, state, topology = case
    plain = replace(state, scalars={name: {"step": held["step"]} for name, held in state.scalars.items()},
                    groups=random_state(model, 0).groups)  # fmt: skip
    with temporary_folder() as folder:
        path = write_checkpoint(folder, model, plain, topology)
        saved = read_state(path, model, topology)
        fp32 = {name: {key: value.float() for key, value in held.items()} for name, held in saved.atoms.items()}
        folders = [path]
        if all(is_common(param.name) for param in model.params):
            convert_checkpoint(str(path), str(folder / "out"))
            folders.append(folder / "out")
        for where in folders:
            targets = make_targets(model, target)
            check_content(load(open_for(where, targets[0]), targets), replace(saved, atoms=fp32))
