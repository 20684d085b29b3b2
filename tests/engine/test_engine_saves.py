"""Saves by way of memory: DeepSpeed's own files, whole before anything names them, and loads from memory."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.errors import ConfigError
from deepspeed_ucp.sources.seal import read_seal
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.compare import compare
from tests.support.covering import Row, params
from tests.support.engines import ranks as engine_ranks
from tests.support.engines import saves as engine_saves
from tests.support.engines.cases import Case
from tests.support.engines.ranks import files_that_differ

CASES = [Case(1, 2, "bf16"), Case(3, 3), Case(0, 2), Case(2, 1, "fp16")]
OTHER_SIZES = [(CASES[1],), (CASES[3],)]
"""Of two ranks ``test_engine_saves_pairs.py`` has the files of every kind."""


def name_case(row: Row) -> str:
    return str(row[0])


def saving(case: Case, memory: Path, **options: Any) -> dict[str, Any]:
    save = {"memory": str(memory), "wait_s": 60, **options}
    return case.but(config={"checkpoint": {"universal": {"save": save}}}).ds_config


@pytest.mark.parametrize("case", params(OTHER_SIZES, [(case,) for case in CASES], name_case))
def test_the_files_are_those_of_deepspeeds_own_save(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    world = ucp_worlds.get(case.dp)
    world.run(
        engine_saves.save_each, saving(case, tmp_path / "memory"), str(tmp_path / "saved"), 2, own=str(tmp_path / "own")
    )
    check_files(tmp_path, 2)


def check_files(folder: Path, count: int) -> None:
    engine_saves.wait_for_marks(str(folder / "saved"))
    assert len(list((folder / "saved").glob("*/ucp_seal.json"))) == count
    differing = files_that_differ(str(folder / "own"), str(folder / "saved"))
    assert [name for name in differing if os.path.basename(name) != "ucp_seal.json"] == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_saves_at_step_0_in_the_midst_of_a_step_and_twice_under_one_tag(
    case: Case, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    config = {**saving(case, tmp_path / "memory"), "gradient_accumulation_steps": 2}
    folders = str(tmp_path / "saved"), str(tmp_path / "own")
    ucp_worlds.get(case.dp).run(engine_saves.save_at_odd_times, config, *folders)
    check_files(tmp_path, 2)
    assert {path.name for path in (tmp_path / "saved").glob("*/")} == {"global_step0", "twice"}
    assert (tmp_path / "saved" / "latest").read_text() == "twice"


@pytest.mark.parametrize("target", [Case(1, 2, "bf16"), Case(3, 3)], ids=str)
def test_a_load_takes_the_newest_of_memory_and_place(target: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """In the topology that saved and in another one; what lies in the place counts where memory has nothing newer."""
    source, folder, memory = Case(1, 2, "bf16"), str(tmp_path / "saved"), tmp_path / "memory"
    states = ucp_worlds.get(2).run(engine_saves.save_each, saving(source, memory), folder, 2)[0]
    config = saving(target, memory)
    for found in ucp_worlds.get(target.dp).run(engine_saves.load, config, folder):
        assert found[0].startswith(str(memory)) and found[1]["number"] == 1
        assert compare(states[1], found[2])[1] == []
    for found in ucp_worlds.get(target.dp).run(engine_saves.load, config, folder, tag="global_step1"):
        assert found[0].startswith(folder) and found[1]["number"] == 0
        assert compare(states[0], found[2])[1] == []
    (tmp_path / "saved" / "latest").write_text("global_step1")  # who writes that wants it
    for found in ucp_worlds.get(target.dp).run(engine_saves.load, config, folder):
        assert found[0].startswith(folder) and found[1]["number"] == 0
    (tmp_path / "saved" / "latest").write_text("global_step2")
    (tmp_path / "saved" / "global_step2" / "ucp_seal.json").unlink()  # DeepSpeed alone saves without
    for found in ucp_worlds.get(target.dp).run(engine_saves.load, config, folder):
        assert found[0].startswith(folder) and found[1]["number"] == 1
    shutil.rmtree(memory)
    for found in ucp_worlds.get(target.dp).run(engine_saves.load, config, folder):
        assert found[0].startswith(folder) and found[1]["number"] == 1


@pytest.mark.parametrize("case", [Case(1, 2, "bf16"), Case(3, 2, "bf16")], ids=str)
def test_weights_that_are_saved_beside_a_pending_save_are_there(
    case: Case, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """`save_16bit_model` tells the writer of checkpoints that a save begins and ends."""
    zero = {"stage3_gather_16bit_weights_on_model_save": True} if case.stage == 3 else {}
    config = saving(case.but(zero=zero), tmp_path / "memory")
    for differing in ucp_worlds.get(2).run(engine_saves.save_weights_too, config, str(tmp_path / "saved")):
        assert differing == []
    assert (tmp_path / "saved" / "latest").read_text() == "global_step1"
    assert (tmp_path / "saved" / "global_step1" / "ucp_seal.json").exists()


def test_without_room_a_save_is_deepspeeds_own(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    config = saving(Case(2, 2), tmp_path / "memory")
    ucp_worlds.get(2).run(engine_saves.save_without_room, config, str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "latest").read_text() == "global_step1"
    assert not list((tmp_path / "memory").rglob("*_states.pt"))


def test_nodes_hold_a_part_of_each_save(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """All of them together have the newest one; when one is gone, the place has it."""
    folder, memory, variable = str(tmp_path / "saved"), str(tmp_path / "memory"), Path("$NODE_MEMORY")
    saver = saving(Case(1, 2, "bf16"), variable)
    world = ucp_worlds.get(2)
    states = world.run(engine_saves.on_nodes, engine_saves.save_each, memory, saver, folder, 2)[0]
    parts = [{path.name for path in (tmp_path / "memory" / f"node{node}").rglob("*_states.pt")} for node in range(2)]
    assert all(parts) and not parts[0] & parts[1]
    assert len(list(tmp_path.glob("saved/*/ucp_seal.json"))) == 2
    loader = saving(Case(3, 2), variable)
    for found in world.run(engine_saves.on_nodes, engine_saves.load, memory, loader, folder):
        assert found[0].startswith(memory) and found[1]["number"] == 1
        assert compare(states[1], found[2])[1] == []
    shutil.rmtree(tmp_path / "memory" / "node1")
    for found in world.run(engine_saves.on_nodes, engine_saves.load, memory, loader, folder):
        assert found[0].startswith(folder) and found[1]["number"] == 1
        assert compare(states[1], found[2])[1] == []


def test_nodes_with_folders_of_their_own_are_saved_as_deepspeed_does(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """No node could tell whether all have theirs: nothing would ever be sealed. Of one node the folder is as any."""
    save = {"memory": str(tmp_path / "memory$RANK"), "copies": 1}
    local = Case(1, 2, "bf16", config={"checkpoint": {"use_node_local_storage": True, "universal": {"save": save}}})
    world = ucp_worlds.get(2)
    saved = world.run(engine_ranks.on_nodes, engine_ranks.save, local.training(), str(tmp_path))
    parts = [{path.name for path in (tmp_path / f"node{node}").rglob("*optim_states.pt")} for node in range(2)]
    assert all(parts) and not parts[0] & parts[1]
    other = local.but(stage=3, precision="fp32")
    for found in world.run(engine_ranks.on_nodes, engine_ranks.load_one, other.training(), str(tmp_path)):
        assert found.direct and compare(saved[0].state, found.state)[1] == []
    save["memory"] = str(tmp_path / "memory")
    folder = str(tmp_path / "one")
    for states in world.run(engine_saves.save_each, local.ds_config, folder, 1):
        (found, *_) = world.run(engine_saves.load, local.ds_config, folder)
        assert found[0].startswith(str(tmp_path / "memory")) and compare(states[0], found[2])[1] == []


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_lost_node_is_no_loss(lost: int, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Its neighbour has its part; what is left resumes on fewer ranks, or beside an empty node, without any place."""
    folder, memory, variable = tmp_path / "saved", tmp_path / "memory", Path("$NODE_MEMORY")
    saver = saving(Case(1, 2, "bf16"), variable, copies=1)
    saved = ucp_worlds.get(2).run(engine_saves.on_nodes, engine_saves.save_each, str(memory), saver, str(folder), 2)
    shutil.rmtree(folder)
    for each in (saving(Case(3, 2), variable), saving(Case(1, 2, "bf16"), variable)):
        read = ucp_worlds.get(2).run(engine_saves.on_nodes, engine_saves.load_bytes, str(memory), each, str(folder))
        assert all(path.startswith(str(memory)) for path, *_ in read)
        assert sum(count for _, count, _ in read) <= 1.02 * read[0][2]  # though two nodes have each
        for found in ucp_worlds.get(2).run(engine_saves.on_nodes, engine_saves.load, str(memory), each, str(folder)):
            assert compare(saved[0][1], found[2])[1] == []
    shutil.rmtree(memory / f"node{lost}")
    (memory / f"node{1 - lost}").rename(memory / "left")
    for target in (Case(3, 1), Case(2, 2), Case(1, 2, "bf16"), Case(0, 2)):
        shutil.rmtree(memory / "node1", ignore_errors=True)
        shutil.copytree(memory / "left", memory / "node0", dirs_exist_ok=True)
        world, loader = ucp_worlds.get(target.dp), saving(target, variable)
        for found in world.run(engine_saves.on_nodes, engine_saves.load, str(memory), loader, str(folder)):
            assert found[0].startswith(str(memory)) and found[1]["number"] == 1
            assert compare(saved[0][1], found[2])[1] == []


def test_of_three_nodes_one_may_be_lost(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Two that stand next to each other are more than one copy makes up for: the folder has the save."""
    folder, memory, variable = str(tmp_path / "saved"), tmp_path / "memory", Path("$NODE_MEMORY")
    saver, loader = saving(Case(3, 3), variable, copies=1), saving(Case(1, 2), variable)
    saved = ucp_worlds.get(3).run(engine_saves.on_nodes, engine_saves.save_each, str(memory), saver, folder, 2)
    shutil.rmtree(memory / "node1")
    (memory / "node2").rename(memory / "node1")
    for is_left in (True, False):
        for found in ucp_worlds.get(2).run(engine_saves.on_nodes, engine_saves.load, str(memory), loader, folder):
            assert found[0].startswith(str(memory) if is_left else folder) and found[1]["number"] == 1
            assert compare(saved[0][1], found[2])[1] == []
        shutil.rmtree(memory / "node0")
    assert set(read_seal(f"{folder}/global_step2/ucp_seal.json").hosts) <= {socket.gethostname()}


def test_memory_that_runs_full_in_a_save_makes_it_deepspeeds_own(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """No rank waits for the one that has found it, and the next save is in memory again."""
    config = saving(Case(1, 2), tmp_path / "memory")
    ucp_worlds.get(2).run(engine_saves.save_where_memory_runs_full, config, str(tmp_path / "saved"))
    assert {path.name for path in (tmp_path / "saved").glob("global_step*")} >= {"global_step2", "global_step3"}
    assert not (tmp_path / "saved" / "global_step2" / "ucp_seal.json").exists()
    assert (tmp_path / "saved" / "global_step3" / "ucp_seal.json").exists()
    assert (tmp_path / "saved" / "latest").read_text() == "global_step3"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_saves_take_is_told_when_an_engine_is_made(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """States that the first step makes are counted; counters of steps are not."""
    config, world = saving(case, tmp_path / "memory"), ucp_worlds.get(case.dp)
    answers = world.run(engine_saves.foresee, config, 1 << 30)
    told = f"a save takes about 0 MiB of {tmp_path / 'memory'} on a node, where 1,024 MiB are free"
    assert [each[0] for each in answers] == [told, *[""] * (case.dp - 1)]
    for _, before, after in answers:
        assert before <= after < before + 100
    needed = int(1.05 * sum(before for _, before, _ in answers))
    assert "older ones go before the next one is made" in world.run(engine_saves.foresee, config, needed)[0][0]
    with pytest.raises(ConfigError, match=r"where 0 MiB are free\. Give the container more memory"):
        world.run(engine_saves.foresee, config, needed - 1)
