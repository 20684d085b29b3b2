"""Atomic checkpoints as sources: a conversion loads into any topology, with the manifest's patterns alone."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, note

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.convert import ConvertOptions, convert_index
from deepspeed_ucp.errors import CheckpointError, MismatchError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import COPY
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.support.cases import AWKWARD, pair_id
from tests.support.contents import check_load
from tests.support.damage import flip
from tests.support.direct import STATES
from tests.support.ranks import World
from tests.support.reshard import PATIENT, FakeTarget, examples, make_targets, open_everywhere, temporary_folder
from tests.support.reshard3d import (
    SavedRun,
    Trip,
    draw_state,
    expect,
    fit_rows,
    load_all,
    load_numbers,
    load_wanted,
    make_config,
    make_pipeline,
    make_plain,
    number_ranks,
    trips,
)
from tests.synth import Model, Param, Topology, build_files, random_state, write_files

PIPELINE = make_pipeline([["column", "norm", "router", "row"], ["qkv", "experts"], ["gate_up", "bias"]])
PLAIN = make_plain(["column", "norm", "router", "qkv_uneven", "few", "word", "row"], frozen=["router", "row"])


def convert(source: Path, targets: Sequence[FakeTarget], config: UniversalConfig = PATIENT) -> tuple[AtomicIndex, Path]:
    """Convert a checkpoint whose parameters live ranks name, if needed; return its index, and the output."""
    index = open_everywhere(source, targets)
    out = source.parent / "atomic"
    convert_index(index, str(source), str(out), Comm(), ConvertOptions(workers=1), rules=from_config(config.patterns))
    return index, out


def convert_run(held: SavedRun, folder: Path) -> tuple[AtomicIndex, Path]:
    """Write a run below a folder, and convert it."""
    return convert(held.write(folder / "tag"), held.make_targets(), make_config(held.model))


def resume(source: SavedRun, topology: Topology, folder: Path) -> AtomicIndex:
    """Convert a run's checkpoint and load it into another topology; check every byte."""
    _, out = convert_run(source, folder)
    return load_wanted(out, expect(source, topology), PATIENT)[0]


PIPELINE_PAIRS = [
    (Topology(1, 2, "bf16", tp=2, pp=2), Topology(0, 1, tp=3)),
    (Topology(0, 1, "fp32", tp=2, pp=2), Topology(1, 2, "bf16", pp=3)),
    (Topology(1, 2, pp=3), Topology(1, 1, "bf16", "bf16", tp=4, pp=2)),
]
PLAIN_PAIRS = [
    (Topology(3, 2, "bf16", tp=2), Topology(1, 1, tp=4)),
    (Topology(2, 2, "bf16", tp=4), Topology(3, 3, "bf16")),
    (Topology(0, 1, "bf16", "fused", tp=3), Topology(0, 1, "bf16", "unfused", tp=2)),
    (Topology(1, 2), Topology(2, 1, tp=4)),
    (Topology(1, 1, tp=3), Topology(3, 2)),
]


@pytest.mark.parametrize("pair", [*PIPELINE_PAIRS, *PLAIN_PAIRS], ids=pair_id)
def test_conversions_load_at_other_degrees_and_paddings(pair: tuple[Topology, Topology], tmp_path: Path) -> None:
    """Vocabularies (18 rows at TP 3, else 12), frozen parameters and buffers."""
    index = resume(draw_state(PIPELINE if pair in PIPELINE_PAIRS else PLAIN, pair[0]), pair[1], tmp_path)
    assert (index.topology.wrapper, index.topology.tp, index.topology.dp) == ("atomic", 1, 1)


@examples(20)
@given(trip=trips())
def test_any_topology_loads_into_any_other_through_a_conversion(trip: Trip) -> None:
    note(f"{trip.source.topology.label} {trip.source.topology.placement}→{trip.target.label} {trip.target.placement}")
    with temporary_folder() as folder:
        resume(trip.source, trip.target, folder)


ZEROS = [
    Topology(0, 1, "bf16", "fused"),
    Topology(0, 2, "fp16", "unfused"),
    Topology(2, 5, "fp16", round_robin=True, parameter_alignment=True),
    Topology(1, 3, elastic=True),
    Topology(3, 7, "bf16", sub_group_size=10),
]


@pytest.mark.parametrize("source", ZEROS, ids=lambda t: t.label)
def test_every_wrapper_is_converted_and_loaded(source: Topology, tmp_path: Path) -> None:
    """Tied, frozen, empty, one-element and unoptimized parameters, buffers of all dtypes."""
    state = random_state(AWKWARD, 7, precision=source.precision)
    write_files(tmp_path / "tag", build_files(AWKWARD, state, source))
    index, out = convert(tmp_path / "tag", make_targets(AWKWARD, source))
    for target in (Topology(0, 1), Topology(3, 2, "bf16")):
        kept = state if index.groups and index.groups[0].hyper else replace(state, groups=())
        check_load(out, AWKWARD, target, kept)


def test_the_index_of_a_conversion_equals_the_sources_except_for_byte_locations(tmp_path: Path) -> None:
    saved_run = draw_state(PIPELINE, Topology(1, 2, "bf16", tp=2, pp=2))
    index, out = convert_run(saved_run, tmp_path)
    found = open_checkpoint(str(out), Comm())
    same = ("scalars", "groups", "aliases", "buffers", "counters", "scaler", "clip_grad", "optimizer", "instances")
    for field in (*same, "hints", "scalar_dtypes", "dropped"):
        assert getattr(found, field) == getattr(index, field), field
    assert set(found.atoms) == {key for key in index.atoms if key[1] != COPY}
    assert all(len(atom.shards) == 1 for atom in found.atoms.values())
    assert all(atom.dtype == index.atoms[key].dtype for key, atom in found.atoms.items())
    assert all(record.crc is not None for record in found.records)
    assert found.topology.precision == "bfloat16"
    assert found.recorded["tied_modules.embed.word"] == {"kind": "shard-v", "vocab": 11}


def test_the_users_patterns_override_the_manifests(tmp_path: Path) -> None:
    """A wrong pattern of the user contradicts the shapes and is refused."""
    saved_run = draw_state(make_plain(["column"]), Topology(1, 1, tp=2))
    wrong = UniversalConfig(threads=1, patterns=[{"match": ".*", "pattern": "shard-h"}])
    _, out = convert_run(saved_run, tmp_path)
    with pytest.raises(MismatchError, match=r"logical shape \(12, 5\) in the checkpoint, \(3, 20\) in the model"):
        load_all(out, expect(saved_run, Topology(1, 1, tp=4)).make_targets(), wrong)


@pytest.mark.parametrize(
    ("name", "damage", "text"),
    [
        ("zero/body.column/exp_avg.pt", Path.unlink, "/exp_avg.pt is missing; the manifest lists it"),
        (
            "zero/body.column/fp32.pt",
            lambda path: os.truncate(path, 100),
            r"has 100 bytes, ucp_manifest.json says \d+ and",
        ),
        (
            STATES,
            lambda path: flip(path, path.read_bytes().index(b"PK\1\2") + 12),  # a time in its zip directory
            rf"{STATES}: has (\d+) bytes and CRC32 \w+, ucp_manifest.json says \1 and",
        ),
    ],
    ids=["missing", "short", "replaced"],
)
def test_an_invalid_converted_file_is_an_error_on_all_ranks(name: str, damage: Any, text: str, tmp_path: Path) -> None:
    _, out = convert_run(draw_state(PLAIN, Topology(1, 2)), tmp_path)
    damage(out / name)
    for error in World(3).run(lambda _rank, comm: open_checkpoint(str(out), comm)):
        assert isinstance(error, CheckpointError) and re.search(text, str(error))


VOCABULARY = Model((Param("word_embeddings.weight", (12, 3)), Param("w", (3, 5))))


@pytest.mark.parametrize("rows", [8, 18])
def test_a_rule_allows_another_vocabulary_padding_without_tensor_parallelism(rows: int, tmp_path: Path) -> None:
    """The results from a normal checkpoint and from an atomic one are equal."""
    state = random_state(VOCABULARY, 0)
    write_files(tmp_path / "tag", build_files(VOCABULARY, state, Topology(1, 2)))
    rules = [{"match": "word_embeddings.weight", "pattern": "shard-v", "vocab": True}]
    config = UniversalConfig(threads=1, patterns={"rules": rules, "original_vocab_size": 7})
    _, out = convert(tmp_path / "tag", make_targets(VOCABULARY, Topology(1, 2)), config)
    other = Model((Param("word_embeddings.weight", (rows, 3)), VOCABULARY.params[1]))
    wanted = {key: fit_rows(value, (rows, 3)) for key, value in state.atoms["word_embeddings.weight"].items()}
    fitted = replace(state, atoms={**state.atoms, "word_embeddings.weight": wanted})
    for folder, patterns in ((tmp_path / "tag", config), (out, PATIENT)):
        check_load(folder, other, Topology(3, 2), fitted, config=patterns)
    with pytest.raises(MismatchError, match=r"word_embeddings.weight: shape \(12, 3\) in the checkpoint.*vocab"):
        check_load(tmp_path / "tag", other, Topology(3, 2), fitted)


@pytest.mark.parametrize("again", [False, True], ids=["once", "converted again"])
def test_each_rank_restores_its_client_state_at_the_same_degrees(again: bool, tmp_path: Path) -> None:
    """The tensor- and pipeline-parallel degrees of the converted run, at any data-parallel degree."""
    saved_run = draw_state(make_pipeline([["column", "norm"], ["row", "bias"]]), Topology(1, 2, tp=2, pp=2))
    source = saved_run.write(tmp_path / "source")
    number_ranks(source)
    _, out = convert(source, expect(saved_run, Topology(1, 1, tp=2, pp=2)).make_targets(), make_config(saved_run.model))
    if again:
        index = open_checkpoint(str(out), Comm())
        out = tmp_path / "again"
        convert_index(index, str(tmp_path / "atomic"), str(out), Comm(), ConvertOptions(workers=1))
    opened = open_checkpoint(str(out), Comm())
    for target, epochs in (
        (Topology(1, 2, tp=2, pp=2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (Topology(1, 1, tp=4), [0] * 4),
    ):
        assert load_numbers(opened, expect(saved_run, target).make_targets(), PATIENT) == epochs
