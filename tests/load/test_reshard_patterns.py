"""Patterns of a load with tensor parallelism: replicas, vocabularies, invalid rules, and parameters of other shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.model.storage import AtomKey
from deepspeed_ucp.stream.full_tensors import assemble_full_tensors
from deepspeed_ucp.stream.reader import AtomReader
from tests.support.contents import check_content, check_reads
from tests.support.reshard import SENTINEL
from tests.support.reshard3d import (
    KINDS,
    Kind,
    SavedRun,
    draw_state,
    edit,
    expect,
    load_all,
    load_wanted,
    make_config,
    make_pipeline,
    make_plain,
    pad_vocab,
    refuse,
    resume,
)
from tests.support.wholes import read_whole
from tests.synth import Local, Run, State, Topology, build_local_files, write_files

# -- replicas ---------------------------------------------------------------------------------------------------------


def differ(name: str, state: str, by: float, rank: int = 1) -> Callable[[Mapping[int, Local]], None]:
    def change(ranks: Mapping[int, Local]) -> None:
        ranks[rank].state.atoms[name][state].view(-1)[[1, 4]] += torch.tensor([by / 2, -by])

    return change


@pytest.mark.parametrize(
    ("param", "state", "target"),
    [
        ("norm", "fp32", Topology(1, 2)),
        ("norm", "exp_avg_sq", Topology(3, 1, tp=3)),
        ("router", "module", Topology(2, 2)),
    ],
    ids=["master", "state", "frozen"],
)
def test_differing_replicas_are_refused(param: str, state: str, target: Topology, tmp_path: Path) -> None:
    source = draw_state(make_plain(["column", "norm", "router"], frozen=["router"]), Topology(1, 1, tp=2))
    folder = edit(source, differ(f"body.{param}", "fp32" if state == "module" else state, 0.25), tmp_path)
    text = rf"body\.{param} \({state}\) is replicated .* ranks 0 and 1 .*largest difference is 2\.500e-01 at element 4"
    message = refuse(folder, expect(source, target), make_config(source.model), MismatchError, text)
    assert '"pattern": "partial"' in message


def read_tensor(folder: Path, name: str, state: str) -> list[torch.Tensor]:
    """Read a whole tensor in one range, and by rows, as conversions do."""
    index = open_checkpoint(str(folder), Comm())
    tensor = assemble_full_tensors(index).tensors[AtomKey(name, state)]
    with AtomReader(index) as reader:
        return [read_whole(reader, tensor, step) for step in (None, tensor.shape[-1])]


@pytest.fixture
def shared_rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A kind of parameter whose last four rows every rank has, and the affine maps of a model with it."""
    affine = pytest.importorskip("deepspeed.checkpoint.affine", reason="DeepSpeed before 0.19 has no affine maps")
    maps = {
        "shared": affine.segmented_map((10, 3), [(6, False), (4, True)], 0, 2, [[3, 3]]),
        "column": affine.contiguous_split_map((12, 5), [6, 6], 0),
    }

    def cut(tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
        return torch.cat([tensor[:6].chunk(tp)[rank], tensor[6:]])

    monkeypatch.setitem(KINDS, "shared", Kind((10, 3), cut, {}))
    params = {rf"^body\.{name}$": each.to_dict() for name, each in maps.items()}
    return {"universal_checkpoint_info": {"affine_map": {"version": 1, "params": params}}}


@pytest.mark.parametrize("state", ["fp32", "exp_avg"])
def test_differing_shared_rows_are_refused(state: str, shared_rows: dict[str, Any], tmp_path: Path) -> None:
    """DeepSpeed's conversion refuses them, too. At the saved degree each rank keeps its values."""
    source, run = draw_state(make_plain(["column", "shared"]), Topology(1, 2, tp=2)), Run(client_state=shared_rows)
    config, wanted = UniversalConfig(threads=1), expect(source, Topology(2, 3))
    source.write(tmp_path / "equal", run)
    load_wanted(tmp_path / "equal", wanted, config)
    for found in read_tensor(tmp_path / "equal", "body.shared", state):
        assert found.equal(source.state.atoms["body.shared"][state])
    parts = source.locals
    parts[1].state.atoms["body.shared"][state][4, 2] += 1  # row 7 of the whole
    write_files(tmp_path / "drifted", build_local_files(parts, source.topology, run))
    text = rf"body\.shared \({state}\): tensor-parallel ranks 0 and 1 have a part in common"
    refuse(tmp_path / "drifted", wanted, config, MismatchError, text)
    with pytest.raises(MismatchError, match=text):
        read_tensor(tmp_path / "drifted", "body.shared", state)
    load_all(tmp_path / "drifted", expect(source, Topology(2, 3, tp=2)).make_targets(), config)


def test_differing_replicas_are_kept_per_rank_at_the_same_degree(tmp_path: Path) -> None:
    source = draw_state(make_plain(["column", "norm"]), Topology(1, 1, tp=2))
    folder = edit(source, differ("body.norm", "fp32", 0.25), tmp_path)
    wanted = expect(source, Topology(3, 2, tp=2))
    parts = wanted.locals
    differ("body.norm", "fp32", 0.25)(parts)
    _, ranks = load_all(folder, wanted.make_targets(), UniversalConfig(threads=1))
    check_content(ranks, wanted.state, parts)


@pytest.mark.parametrize("target", [Topology(1, 2), Topology(2, 2, tp=3), Topology(0, 1, tp=4)], ids=lambda t: t.label)
def test_the_partial_rule_averages_masters_and_states(target: Topology, tmp_path: Path) -> None:
    model = make_plain(["column", "router", "norm"])
    source = draw_state(model, Topology(1, 2, tp=2))
    parts = source.locals
    torch.manual_seed(0)
    atoms = {name: dict(states) for name, states in source.state.atoms.items()}
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        shards = [parts[rank].state.atoms["body.router"][state] for rank in range(2)]
        shards[1] += torch.rand(shards[1].shape)
        atoms["body.router"][state] = (shards[0].double() + shards[1].double()).div(2).float()
    write_files(tmp_path, build_local_files(parts, source.topology, Run()))
    wanted = expect(replace(source, state=replace(source.state, atoms=atoms)), target)
    config = make_config(model)
    rules = [dict(rule) for rule in config.patterns["rules"]]  # type: ignore[call-overload,index]
    for rule in rules:
        rule["pattern"] = "partial" if rule["match"].endswith("router") else rule["pattern"]
    load_wanted(tmp_path, wanted, UniversalConfig(threads=1, patterns={"rules": rules}))


# -- unknown patterns, and contradictions -----------------------------------------------------------------------------


def test_parameters_without_a_pattern_are_listed_with_a_rule_to_paste(tmp_path: Path) -> None:
    source = draw_state(make_pipeline([["column", "qkv"], ["row"]], tied=False), Topology(1, 1, tp=2))
    wanted, folder = expect(source, Topology(1, 1, pp=2)), source.write(tmp_path)
    message = refuse(folder, wanted, UniversalConfig(threads=1), MismatchError, "is not known")
    for text in (r"0.column: (6, 5) on 2 ranks in the checkpoint, (12, 5) on 1 rank in the model", "0.qkv", "1.row"):
        assert text in message
    assert r'{"match": "\\d+\\.row", "pattern": "shard-h", "dim": 1}' in message
    assert message.count("shard-nc with parts") == 1


def test_a_rule_that_matches_nothing_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = draw_state(make_plain(["column"]), Topology(1, 1, tp=2))
    rules = [{"match": r".*\.column", "pattern": "shard-v"}, {"match": r".*\.absent", "pattern": "shard-h"}]
    wanted = expect(source, Topology(1, 2))
    config = UniversalConfig(threads=1, patterns={"rules": rules})
    load_all(source.write(tmp_path), wanted.make_targets(), config)
    assert len([text for text in caplog.messages if "absent" in text]) == 1
    assert not [text for text in caplog.messages if "column" in text]


# -- vocabulary -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [(1, 3), (3, 1), (2, 3), (3, 4), (2, 4)], ids=lambda n: f"tp{n}")
def test_vocabulary_padding_changes_with_the_degree(
    source: int, target: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deepspeed_ucp")
    saved_run = draw_state(make_plain(["column", "word"]), Topology(1, 2, tp=source))
    wanted, _ = resume(saved_run, Topology(3, 2, tp=target), tmp_path)
    old, new = pad_vocab(source), pad_vocab(target)
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        before, after = (each.state.atoms["body.word"][state] for each in (saved_run, wanted))
        assert after[: min(old, new)].equal(before[: min(old, new)])
        assert not after[old:].any()
    expected = [f"body.word: vocabulary padded to {old} rows, here to {new}"] * (new < old)
    if new > old:
        text = f"vocabulary padded to {new} rows, saved with {old}; the {new - old} new ones are zero"
        expected = [f"body.word: {text}"]
    assert [text for text in caplog.messages if "padded" in text] == expected


# -- other sources of patterns ----------------------------------------------------------------------------------------


def mark_module(marks: Mapping[str, Mapping[str, Any]]) -> torch.nn.Module:
    body = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(0)) for name in marks})
    for name, param in body.items():
        vars(param).update(marks[name])
    return torch.nn.ModuleDict({"body": body})


def mark(dim: int, stride: int = 1) -> dict[str, Any]:
    return {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride}


INFO = {
    "universal_checkpoint_version": 0.2,
    "parameter_with_row_parallelism_patterns": [r"body\.row"],
    "tp_replicated_parameter_patterns": [r"body\.norm"],
    "parameter_with_2_sub_params_cat_dim_0": [r"body\.gate_up"],
}
RIGHT = {"column": mark(0), "row": mark(1), "gate_up": mark(0, 2)}
WRONG = dict.fromkeys(RIGHT, mark(0))


@pytest.mark.parametrize(
    ("tp", "marks", "info", "with_rules"),
    [(1, RIGHT, None, False), (4, RIGHT, None, False), (1, WRONG, INFO, False), (1, WRONG, None, True)],
    ids=["attributes", "attributes at another degree", "the checkpoint first", "the user's rules first"],
)
def test_patterns_come_from_rules_metadata_and_attributes_in_this_order(
    tp: int, marks: dict[str, Any], info: dict[str, Any] | None, with_rules: bool, tmp_path: Path
) -> None:
    source = draw_state(make_plain(["column", "row", "gate_up", "norm"]), Topology(1, 2, tp=2))
    wanted = expect(source, Topology(2, 2, tp=tp))
    source.write(tmp_path, Run(client_state={"universal_checkpoint_info": info} if info else {}))
    config = make_config(source.model) if with_rules else UniversalConfig(threads=1)
    targets = wanted.make_targets([mark_module(marks)] * tp)
    index, ranks = load_all(tmp_path, targets, config)
    check_content(ranks, wanted.state, wanted.locals)
    check_reads(index, ranks)


# -- parameters of another shape in the live model --------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("sizes", "rules"),
    [(GROWN, MIXED), (SHRUNK, GIVEN_UP), ({"word": 6}, {"word": {"shrink": True}})],
    ids=["grown", "shrunk", "shrunk alone"],
)
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


def test_other_sizes_are_refused_with_a_resize_rule_to_paste(tmp_path: Path) -> None:
    source = draw_state(make_plain(["column", "word"]), Topology(1, 1))
    wanted, words = resize(source, Topology(1, 1), {"word": 24}, {}), r"body\.word: .*\(12, 4\).*\(24, 4\)"
    text = refuse(source.write(tmp_path), wanted, make_rules(source, {}), MismatchError, words)
    assert r'"patterns": {"resize": [{"match": "body\\.word"}]}' in text


def test_each_stage_of_a_pipeline_resizes_its_own_copy(tmp_path: Path) -> None:
    rules: dict[str, Any] = {"word": {"new": "mean"}, "column": {"new": "zero"}}
    for number, saved in enumerate((Topology(1, 1, pp=2), Topology(1, 1, "bf16", "bf16", tp=2, pp=2))):
        source = draw_state(make_pipeline([["column"], ["row"]]), saved)
        wanted = resize(source, replace(saved, dp=2), {"word": 24, "column": 24}, rules)
        (folder := tmp_path / str(number)).mkdir()
        load_wanted(source.write(folder), wanted, make_rules(source, rules), in_place=not number)
