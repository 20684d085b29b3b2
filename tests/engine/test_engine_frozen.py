"""Frozen parameters that are saved once: tags without them, a folder beside these, and loads of both together."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.sources.frozen import read_reference
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.compare import compare
from tests.support.covering import params
from tests.support.engines import autoep as engine_autoep
from tests.support.engines import parallel
from tests.support.engines import saves as engine_saves
from tests.support.engines.autoep import Spread, join
from tests.support.engines.cases import Case
from tests.support.engines.parallel import STEPS, Launch, Route
from tests.support.engines.ranks import Load, files_that_differ, load_each, save
from tests.support.until import wait_until

SOURCES = [Case(1, 2, "bf16"), Case(3, 2), Case(2, 2), Case(0, 2)]
TARGETS = [Case(3, 3), Case(1, 2, "bf16")]


def saving(case: Case, memory: Path, **options: Any) -> dict[str, Any]:
    save = {"memory": str(memory), "wait_s": 60, "frozen": "once", "overlap": case.precision == "bf16"}
    return case.but(config={"checkpoint": {"universal": {"save": save, **options}}}).ds_config


def name_source(row: tuple[Case]) -> str:
    return str(row[0])


@pytest.mark.parametrize(
    "source", params([(each,) for each in SOURCES[:2]], [(each,) for each in SOURCES], name_source)
)
def test_frozen_parameters_come_back_from_beside_the_tag(
    source: Case, tmp_path: Path, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    """From memory and from the place, in the same topology and others; live ones are others before the load."""
    folder, memory = tmp_path / "saved", tmp_path / "memory"
    states = ucp_worlds.get(2).run(engine_saves.save_each, saving(source, memory), str(folder), 2)[0]
    (base,) = folder.glob("ucp_frozen-*")
    assert [path.name for path in base.iterdir()] == sorted(path.name for path in base.glob("*_frozen_states.pt"))
    for target in (source, *TARGETS):
        with subtests.test(target=str(target)):
            for found in ucp_worlds.get(target.dp).run(engine_saves.load, saving(target, memory), str(folder)):
                assert found[0].startswith(str(memory))
                assert compare(states[1], found[2])[1] == []
    memory = tmp_path / "none"
    for target in (source, *TARGETS):
        with subtests.test(target=str(target), place="disk"):
            for found in ucp_worlds.get(target.dp).run(engine_saves.load, saving(target, memory), str(folder)):
                assert found[0].startswith(str(folder))
                assert compare(states[1], found[2])[1] == []


def count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("source", [Case(1, 2), Case(2, 2), Case(3, 2)], ids=str)
def test_a_tag_is_what_deepspeed_saves_without_frozen_parameters(
    source: Case, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """And that is what plain DeepSpeed loads, with `load_module_strict=False`."""
    saved, own, world = tmp_path / "saved", tmp_path / "own", ucp_worlds.get(2)
    config = saving(source, tmp_path / "memory")
    states = world.run(engine_saves.save_each, config, str(saved), 2, own=str(own), exclude_frozen_parameters=True)[0]
    more = {
        f"{tag}/{name}" for tag in ("global_step1", "global_step2") for name in ("ucp_seal.json", "ucp_frozen.json")
    }
    (base,) = saved.glob("ucp_frozen-*")
    differing = {name for name in files_that_differ(str(own), str(saved)) if not name.startswith(base.name)}
    assert differing == more
    for found in world.run(engine_saves.load_plainly, source.ds_config, str(saved)):
        for name, tensor in found.items() if source.stage < 3 else ():
            assert tensor.equal(states[1].parameters[name].value)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_has_changed_is_saved_anew(stage: int, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Values, which parameters are frozen, and all of it after a load: every tag has its own."""
    folder, memory, case = tmp_path / "saved", tmp_path / "memory", Case(stage, 2)
    states = ucp_worlds.get(2).run(engine_saves.save_and_unfreeze, saving(case, memory), str(folder))[0]
    named = [read_reference(str(folder / str(number))).folder for number in range(4)]
    assert len(set(named)) == (3 if stage == 3 else 4)
    memory = tmp_path / "none"
    for number, state in enumerate(states):
        loads = ucp_worlds.get(1).run(
            engine_saves.load, saving(Case(1, 1), memory), str(folder), tag=str(number), model="lora"
        )
        assert compare(state, loads[0][2])[1] == []
    assert states[1].parameters["base.0.weight"].value[3, 4] == 7.0
    (folder / "latest").write_text("3")
    shutil.rmtree(folder / named[3])
    config = saving(Case(1, 1), memory, fallback=True)
    (found,) = ucp_worlds.get(1).run(engine_saves.load, config, str(folder), model="lora")
    assert found[0].startswith(str(folder / "0")) and compare(states[0], found[2])[1] == []


def test_nodes_have_a_part_of_each_base(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    folder, memory, variable = str(tmp_path / "saved"), str(tmp_path / "memory"), Path("$NODE_MEMORY")
    world = ucp_worlds.get(2)
    saver = saving(Case(3, 2), variable)
    states = world.run(engine_saves.on_nodes, engine_saves.save_each, memory, saver, folder, 2)[0]
    for place in (memory, folder):
        for found in world.run(engine_saves.on_nodes, engine_saves.load, memory, saving(Case(1, 2), variable), folder):
            assert found[0].startswith(place)
            assert compare(states[1], found[2])[1] == []
        shutil.rmtree(tmp_path / "memory" / "node1", ignore_errors=True)


def test_a_pipeline_with_tensor_parallelism_has_its_layers_frozen_parameters_once(
    tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    options = {"save": {"memory": str(tmp_path / "memory"), "frozen": "once"}}
    source, target, folder = Launch(2, 2), Launch(1, 2), tmp_path / "saved"
    route = Route("extras", source, target, {"rules": [{"match": r"\d+\.span", "pattern": "shard-v"}]})
    trained = parallel.training("extras", source, {}, seed=1)
    world = ucp_worlds.get(source.world)
    saved = world.run(engine_saves.with_options, options, save, trained, str(folder), STEPS[:1], after=STEPS[1])
    wait_until((folder / "latest").exists)
    assert len(list(folder.glob("ucp_frozen-*/layer_*-frozen_states.pt"))) == 6
    loading = parallel.training("extras", target, route.checkpoint, seed=3)
    resumed = ucp_worlds.get(target.world).run(load_each, loading, [Load(str(folder), steps=STEPS[1])])
    parallel.check(route, saved, [local for (local,) in resumed])


def test_experts_have_their_frozen_parameters_once(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    options = {"save": {"memory": str(tmp_path / "memory"), "frozen": "once"}}
    source, folder, world = Spread(2, 2, "fp32", 2), tmp_path / "saved", ucp_worlds.get(2)
    answers = world.run(engine_saves.with_options, options, engine_autoep.save, source, str(folder), 1, frozen=True)
    wait_until((folder / "latest").exists)
    assert list(folder.glob("ucp_frozen-*/layer_*_expert_*_frozen_states.pt"))
    expected = join([states for states, _ in answers], source)
    answers = world.run(engine_autoep.load_each, Spread(2, 1, "fp32", 1), [str(folder)], frozen=True)
    states = join([states for ((_, states, _),) in answers], source)
    assert states.keys() == expected.keys()
    assert all(tensor.equal(expected[key]) for key, tensor in states.items())
