"""Parameters of another shape in the live model, on every rank of many topologies, to the bit."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.errors import MismatchError
from tests.support.reshard import SENTINEL
from tests.support.reshard3d import SavedRun, draw_state, load_wanted, make_config, make_pipeline, make_plain, refuse
from tests.synth import State, Topology


def resize(source: SavedRun, topology: Topology, sizes: dict[str, int], rules: dict[str, Any]) -> SavedRun:
    """Compute, with numpy, the state of a run with other sizes: kept rows, and new ones by the rules.

    `sizes`: kind → rows in the target, which holds the sentinel before the load.
    """
    params, atoms = [], {}
    for param in source.model.params:
        kind = param.name.rpartition(".")[2]
        rule = rules.get(kind, {})
        shape = list(param.shape)
        shape[0] = sizes.get(kind, shape[0])
        params.append(replace(param, shape=tuple(shape)))
        copies = [name for name in source.state.atoms if name.partition("#")[0] == param.name]
        for name, state, value in ((copy, *each) for copy in copies for each in source.state.atoms[copy].items()):
            saved = value.numpy()
            kept = min(rule.get("keep", len(saved)), len(saved), shape[0])
            made = np.zeros((shape[0], *saved.shape[1:]), saved.dtype)
            made[:kept] = saved[:kept]
            if state == "fp32" and rule.get("new", "live") == "live":
                made[kept:] = SENTINEL
            if state == "fp32" and rule.get("new") == "mean":
                made[kept:] = sum(saved[:kept].astype(np.float64)) / kept
            atoms.setdefault(name, {})[state] = torch.from_numpy(made)
    state = State(atoms, source.state.scalars, source.state.groups)
    return SavedRun(replace(source.model, params=tuple(params)), topology, state)


def make_rules(source: SavedRun, rules: dict[str, Any]) -> UniversalConfig:
    patterns = dict(make_config(source.model).patterns)  # type: ignore[arg-type]
    for rule in patterns["rules"]:
        rule.pop("vocab", None)
    del patterns["original_vocab_size"]
    written = [{"match": rf".*\.{kind}", **rule} for kind, rule in rules.items()]
    return UniversalConfig(threads=1, patterns={**patterns, "resize": written})


GROWN = {"word": 24, "column": 24}
MIXED: dict[str, Any] = {"word": {"new": "mean", "keep": 11}, "column": {}}
SHRUNK = {"word": 6, "column": 24}
GIVEN_UP: dict[str, Any] = {"word": {"shrink": True}, "column": {"new": "zero"}}


@pytest.mark.parametrize(("sizes", "rules"), [(GROWN, MIXED), (SHRUNK, GIVEN_UP)], ids=["grown", "shrunk"])
@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (Topology(1, 2, "bf16"), Topology(2, 3, "bf16")),
        (Topology(3, 2), Topology(0, 1)),
        (Topology(0, 1, "bf16", "bf16"), Topology(3, 3, "bf16", sub_group_size=10)),
        (Topology(1, 1, tp=2), Topology(1, 2, "bf16", "bf16", tp=2)),
        (Topology(2, 2, tp=3), Topology(1, 1)),
        (Topology(1, 2), Topology(3, 2, tp=2)),
        (Topology(1, 1, tp=2), Topology(0, 2, tp=3)),
    ],
    ids=lambda topology: topology.label,
)
def test_a_resize_keeps_common_rows_and_initializes_new_rows_by_rule(
    saved: Topology, live: Topology, sizes: dict[str, int], rules: dict[str, Any], tmp_path: Path
) -> None:
    source = draw_state(make_plain(["column", "norm", "word", "row"]), saved)
    wanted = resize(source, live, sizes, rules)
    load_wanted(source.write(tmp_path), wanted, make_rules(source, rules))


def test_a_resize_is_logged_and_a_later_save_loads_unchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same rules have no effect on a save that has the new shapes."""
    source = draw_state(make_plain(["column", "word", "row"]), Topology(1, 1))
    wanted = resize(source, Topology(1, 2), GROWN, MIXED)
    rules, lines = make_rules(source, MIXED), []
    for folder, held in (("first", source), ("later", wanted)):
        (tmp_path / folder).mkdir()
        load_wanted(held.write(tmp_path / folder), wanted, rules)
        lines.append([record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING])
        caplog.clear()
    states = "the optimizer states of new rows are zero under the old step count, so Adam's first updates there"
    assert lines == [
        [
            "resize: body.column: 12 → 24: 12 new rows keep the live model's values",
            "resize: body.word: 12 → 24: 11 of 12 rows are kept, 1 left out; 13 new ones are the mean of the 11 that "
            "are kept",
            f"resize: {states} are up to 3.2 × lr",
        ],
        [],
    ]


@pytest.mark.parametrize(
    ("sizes", "rule", "words"),
    [
        ({"word": 24}, {}, r"body\.word: .*\(12, 4\).*\(24, 4\)"),
        ({"word": 6}, {"match": r".*\.word"}, r"the model has 6 of 12 rows; \"shrink\": true leaves the last ones out"),
        ({"gate_up": 48}, {"match": r".*\.gate_up"}, r"body\.gate_up is fused, so that new rows at its end"),
        ({"experts": 72}, {"match": r".*\.experts"}, r"body\.experts is fused"),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_invalid_sizes_and_resize_rules_are_refused(
    sizes: dict[str, int], rule: dict[str, Any], words: str, tp: int, tmp_path: Path
) -> None:
    source = draw_state(make_plain(["column", *sizes]), Topology(1, 1, tp=tp))
    wanted = resize(source, Topology(1, 1, tp=tp if "word" in sizes else 1), sizes, {})
    patterns: Any = make_rules(source, {}).patterns
    config = UniversalConfig(threads=1, patterns={**patterns, "resize": [rule] if rule else []})
    text = refuse(source.write(tmp_path), wanted, config, MismatchError, words)
    shown = r'"patterns": {"resize": [{"match": "body\\.word"}]}'
    assert (shown in text) == (not rule)


def test_each_stage_of_a_pipeline_resizes_its_own_copy(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"word": {"new": "mean"}, "column": {"new": "zero"}}
    for number, saved in enumerate((Topology(1, 1, pp=2), Topology(1, 1, "bf16", "bf16", tp=2, pp=2))):
        source = draw_state(make_pipeline([["column"], ["row"]]), saved)
        wanted = resize(source, replace(saved, dp=2), {"word": 24, "column": 24}, rules)
        (folder := tmp_path / str(number)).mkdir()
        load_wanted(source.write(folder), wanted, make_rules(source, rules), in_place=not number)
