"""Loads of saves whose files are distributed over machines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats import locations
from deepspeed_ucp.formats.open import seal_folder
from deepspeed_ucp.model.access import READ_ALL
from tests.support.cases import Case, cases, topologies
from tests.support.contents import check_content, check_reads
from tests.support.direct import change_file, check_loaded, run_load
from tests.support.places import (
    MODEL,
    STATES,
    hold_one_shard,
    indices,
    load_scattered,
    open_place,
    scatter,
    shard,
    write,
    write_unchecked,
)
from tests.support.ranks import run_ranks
from tests.support.reshard import examples, make_targets, temporary_folder
from tests.synth import Run, Topology, random_state, read_state


@examples(40)
@given(data=st.data(), case=cases(max_dp=5), target=topologies(max_dp=5), hosts=st.integers(1, 4), times=st.booleans())
def test_files_distributed_over_machines_are_read_once(
    data: st.DataObject, case: Case, target: Topology, hosts: int, times: bool
) -> None:
    with temporary_folder() as folder:
        save = case.write(folder)
        saved = read_state(save, case.model, case.topology)
        ranks = len(make_targets(case.model, target))
        holders = st.sets(st.integers(0, min(hosts, ranks) - 1), min_size=1)
        machines = scatter(save, min(hosts, ranks), lambda _name: data.draw(holders), times=times)
        save.rename(folder / "away")
        loaded = load_scattered(machines, case.model, target)
        check_content(loaded, saved)
        check_reads(loaded[0].fill_plan.index, loaded, 64)


def test_ranks_with_equal_files_exchange_no_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = write(tmp_path, Topology(1, 4))
    monkeypatch.setattr(locations, "_sum_content", None)
    for index in indices([save] * 3):
        assert index.access == READ_ALL
        assert all(file.places == () for file in index.files)


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_modification_times_that_differ_between_machines_do_not_split_a_save(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems report other times. A large file without a directory is identified by its time."""
    save = write_unchecked(tmp_path, form) if form == "legacy" else write(tmp_path, Topology(1, 3))
    seal_folder(str(save), Comm())
    hosts = scatter(save, 2, lambda _name: [0, 1], times=False)
    folders = [hosts[0], hosts[1], hosts[1], hosts[0], hosts[0]]
    assert [index.access for index in indices(folders)] == [READ_ALL] * 5
    if form == "legacy":
        monkeypatch.setattr(locations, "_SMALL", 0)
        with pytest.raises(CheckpointError, match="is one file on"):
            indices(folders)


def test_files_that_differ_between_machines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = write(tmp_path / "a", Topology(1, 2)), write(tmp_path / "b", Topology(1, 2), seed=1)
    hosts = scatter(first, 2, lambda name: [0] if name == shard(0) else [0, 1])
    shutil.copy2(second / shard(1), hosts[1])
    monkeypatch.setattr("socket.gethostname", name_hosts("node-a", "node-b"))
    text = rf"{shard(1)}: is one file on node-a .\d+ bytes. and another on node-b .\d+ bytes.; the nodes hold different"
    with pytest.raises(CheckpointError, match=text):
        indices(hosts)


def test_a_missing_file_is_refused_with_all_machines_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = write(tmp_path, Topology(1, 4))
    hosts = scatter(save, 2, lambda name: {STATES: [0, 1], shard(3): [0], shard(0): [0], shard(1): [1]}.get(name, []))
    monkeypatch.setattr("socket.gethostname", name_hosts("node-a", "node-b"))
    files = "node-a has the files of data-parallel ranks 0 and 3; node-b has the files of data-parallel ranks 1"
    with pytest.raises(CheckpointError, match=rf"{shard(2)} is missing.*{files}"):
        indices(hosts)


def test_a_seal_identifies_the_machine_of_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = write(tmp_path, Topology(1, 3))
    hosts = scatter(save, 3, lambda name: range(3) if name == STATES else [int(name.split("_")[3])])
    monkeypatch.setattr("socket.gethostname", name_hosts("node-a", "node-b", "node-c"))
    run_ranks(3, lambda rank, comm: seal_folder(str(hosts[rank]), comm, local=True))
    assert len({(host / "ucp_seal.json").read_bytes() for host in hosts}) == 1
    monkeypatch.setattr("socket.gethostname", name_hosts("node-a", "node-c"))
    with pytest.raises(CheckpointError, match=rf"{shard(1)} is missing.*node-b had {shard(1)}; node-a has"):
        indices([hosts[0], hosts[2]])
    shutil.copy2(hosts[1] / shard(1), hosts[0])
    assert len(indices([hosts[0], hosts[2]])[0].files) == 4


def name_hosts(*names: str) -> Callable[[], str]:
    repeated = iter(names * 3)
    return lambda: next(repeated)


def test_rank_0s_model_states_provide_the_client_state(tmp_path: Path) -> None:
    """With use_node_local_storage each node's first rank writes the model states, with another client state."""
    case = Case(MODEL, Topology(1, 4, "bf16"), random_state(MODEL, 0, precision="bf16"), legacy=False)
    save = case.write(tmp_path)
    hosts = scatter(save, 2, lambda name: [0, 1] if name == STATES else [0] if name in (shard(2), shard(3)) else [1])
    change_file(hosts[0] / STATES, lambda tree: tree.update(script="of the second node"))
    change_file(hosts[1] / STATES, lambda tree: tree.update(script="of the first node, which holds rank 0"))
    index = indices(hosts)
    assert [each.access.is_partial for each in index] == [True, True]
    access = index[0].access
    states = [os.path.basename(file.path) for file in index[0].files].index(STATES)
    assert access.list_readers(states, 2).tolist() == [1]
    loaded = load_scattered(hosts, MODEL, Topology(3, 3, "bf16"))
    check_content(loaded, read_state(save, MODEL, case.topology))


def test_a_node_without_a_state_file_gets_its_objects_from_a_peer(tmp_path: Path) -> None:
    case = Case(MODEL, Topology(1, 2), random_state(MODEL, 0), legacy=False)
    save = case.write(tmp_path, Run(client_state={"epoch": 4}))
    hosts, targets = scatter(save, 2, lambda name: [int(name != STATES)]), make_targets(MODEL, Topology(1, 2))

    def load(rank: int, comm: Comm) -> Any:
        return run_load(open_place(hosts[rank], targets[rank], comm), targets[rank], comm)

    assert [client["epoch"] for *_, client in run_ranks(2, load)] == [4, 4]
    check_loaded(targets, read_state(save, MODEL, case.topology))


def test_a_nodes_model_states_of_another_step_are_refused(tmp_path: Path) -> None:
    save = write(tmp_path, Topology(1, 2))
    hosts = scatter(save, 2, hold_one_shard)
    change_file(hosts[1] / STATES, lambda tree: tree.update(global_steps=99))
    with pytest.raises(CheckpointError, match=rf"{STATES} of .*its step differs"):
        indices(hosts)
