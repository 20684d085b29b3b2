"""Full tensors equal the original tensors before the cut, for every pattern, topology and range."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, MismatchError
from deepspeed_ucp.io.read import Checked
from deepspeed_ucp.model.storage import COPY, MASTER, AtomKey, Atoms
from deepspeed_ucp.stream.full_tensors import assemble_full_tensors
from deepspeed_ucp.stream.reader import AtomReader, verify_reads
from deepspeed_ucp.tensor_parallel.kinds import ShardH
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.support.damage import flip_bit
from tests.support.reshard import examples, open_everywhere, temporary_folder
from tests.support.reshard3d import SavedRun, draw_state, make_config, make_plain, open_run, rules_of, trips
from tests.support.wholes import check_atoms, read_whole
from tests.synth import Topology, write_files
from tests.synth.files import build_local_files


@given(trip=trips(), step=st.sampled_from((None, 1, 5, 64)))
@examples(120)
def test_full_tensors_are_the_inverse_of_the_cut(trip: Any, step: int | None) -> None:
    with temporary_folder() as folder:
        index = open_run(trip.source, folder)
        wholes = assemble_full_tensors(index, rules_of(trip.source))
        assert not any(key.state == COPY and index.find(key.name, MASTER, key.instance) for key in wholes.tensors)
        with AtomReader(index) as reader:
            checks = list[Checked]()
            assert check_atoms(reader, wholes.tensors, trip.source, step, checks) > 0
        verify_reads(checks, index, Comm())


def make_plain_source(tp: int) -> SavedRun:
    return draw_state(make_plain(("norm", "row", "qkv", "column")), Topology(1, 2, tp=tp))


def test_every_source_byte_is_read_once(tmp_path: Path) -> None:
    saved_run = make_plain_source(2)
    index = open_run(saved_run, tmp_path)
    wholes = assemble_full_tensors(index, rules_of(saved_run))
    checks = list[Checked]()
    with AtomReader(index) as reader:
        for whole in wholes.tensors.values():
            read_whole(reader, whole, 7, checks)
    touched = {check.record for check in checks}
    rest = verify_reads(checks, index, Comm())
    assert sum(check.nbytes for check in checks) + rest == sum(index.records[number].nbytes for number in touched)


def test_adjacent_items_are_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, small parameters that are adjacent in a partition."""
    saved_run = draw_state(make_plain(("norm", "column", "bias")), Topology(1, 1))
    index = open_run(saved_run, tmp_path)
    wholes = assemble_full_tensors(index)
    calls: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, *rest: (calls.append(len(views)), real(fd, views, *rest))[1])
    masters = [
        whole for whole in sorted(wholes.tensors.values(), key=lambda whole: whole.place) if whole.atom.state == MASTER
    ]
    wants = [whole.want(0, whole.numel) for whole in masters]
    with AtomReader(index) as reader:
        reader.read_tensors(wants, [memoryview(bytearray(want.nbytes)) for want in wants])
    groups = len({(index.records.files[whole.place[0]], whole.place[0]) for whole in masters})
    assert len(calls) == groups < len(wants)


def test_differing_replicas_are_refused_or_averaged_by_a_rule(tmp_path: Path) -> None:
    saved_run, key = make_plain_source(2), AtomKey("body.norm", MASTER)
    locals_ = saved_run.locals
    locals_[1].state.atoms["body.norm"]["fp32"][3:] += 1
    write_files(tmp_path, build_local_files(locals_, saved_run.topology))
    index = open_everywhere(tmp_path, saved_run.make_targets())
    patterns = dict(make_config(saved_run.model).patterns or {})
    patterns["rules"] = [
        {"match": r".*\.norm", "pattern": "partial"} if rule["match"] == r".*\.norm" else rule
        for rule in patterns["rules"]
    ]
    refused, averaged = (assemble_full_tensors(index, rules) for rules in (rules_of(saved_run), from_config(patterns)))
    with AtomReader(index) as reader:
        with pytest.raises(MismatchError, match=r"body\.norm \(fp32\).*ranks 0 and 1.*element 3"):
            read_whole(reader, refused.tensors[key])
        found = read_whole(reader, averaged.tensors[key])
    both = [locals_[rank].state.atoms["body.norm"]["fp32"] for rank in (0, 1)]
    assert torch.equal(found, torch.stack(both).double().mean(0).float())


def test_unknown_patterns_are_refused_with_suggested_rules(tmp_path: Path) -> None:
    index = open_run(make_plain_source(2), tmp_path)
    with pytest.raises(MismatchError, match=r"body\.row.*not known|not known.*body\.row"):
        assemble_full_tensors(index)


def test_patterns_of_whole_tensors_are_kept_for_later_cuts(tmp_path: Path) -> None:
    """A rule that contradicts a whole shape is refused."""
    saved_run = make_plain_source(1)
    index = open_run(saved_run, tmp_path)
    wholes = assemble_full_tensors(index, rules_of(saved_run))
    assert wholes.patterns["body.row"] == ShardH()
    assert wholes.tensors[AtomKey("body.row", MASTER)].view is None
    with pytest.raises(MismatchError, match=r"body\.norm"):
        assemble_full_tensors(index, from_config([{"match": r"body\.norm", "pattern": "shard-h"}]))


@pytest.mark.parametrize("place", ["atom", "padding"])
def test_a_flipped_bit_is_detected_in_a_full_tensor(tmp_path: Path, place: str) -> None:
    """It is in an atom's bytes, or in padding outside all atoms."""
    saved_run = draw_state(make_plain(("norm",)), Topology(1, 2))
    index = open_run(saved_run, tmp_path)
    whole = assemble_full_tensors(index).tensors[AtomKey("body.norm", MASTER)]
    last = whole.atom.shards[0].list_fragments(whole.atom.state)[-1]
    padded = last.offset + last.numel * 4 < index.records[last.record].nbytes
    assert place == "atom" or padded, "the last partition is padded"
    flip_bit(index, "body.norm", MASTER, last.offset if place == "atom" else -1)
    checks = list[Checked]()
    with AtomReader(index) as reader:
        read_whole(reader, whole, checks=checks)
    with pytest.raises(CheckpointError, match="CRC32"):
        verify_reads(checks, index, Comm())


def test_the_users_rule_applies_to_buffers_that_are_equal_on_all_ranks(tmp_path: Path) -> None:
    """Equal zeros of a first step must not determine the pattern."""
    saved_run = make_plain_source(2)
    index = open_run(saved_run, tmp_path)
    rules = make_config(saved_run.model).patterns["rules"]
    shapes = []
    for more in ([], [{"match": r".*\.count", "pattern": "shard-v"}]):
        wholes = assemble_full_tensors(index, from_config([*rules, *more]))
        shapes.append(wholes.tensors[AtomKey("body.count", "module")].shape)
    assert shapes == [(3,), (6,)]


def test_copies_without_masters_are_kept(tmp_path: Path) -> None:
    """They are the weights of a folder without files of masters."""
    with_masters = open_run(draw_state(make_plain(("norm", "column")), Topology(1, 2, precision="bf16")), tmp_path)
    copies = {key for key in with_masters.atoms if key.state == COPY}
    assert copies
    assert not copies & assemble_full_tensors(with_masters).tensors.keys()
    kept = Atoms.of(atom for key, atom in with_masters.atoms.items() if key.state != MASTER)
    assert copies <= assemble_full_tensors(replace(with_masters, atoms=kept)).tensors.keys()
