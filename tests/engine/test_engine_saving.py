"""Saves: the plugin changes nothing in them, and one after a resume is a normal checkpoint of the new topology."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.sources.files import SEAL
from deepspeed_ucp.testing import WorldPool
from tests.support.engines import ranks as engine_ranks
from tests.support.engines.cases import Case, pair_id
from tests.support.engines.ranks import Load, load_each

ON = {"checkpoint": {"universal": True}}
SEALED = {"checkpoint": {"universal": {"seal": True}}}
OPTIONS = {"model": "mixed", "scheduler": True}
PAIRS = [
    (Case(1, 3, "bf16"), Case(3, 2, "bf16", config=ON)),
    (Case(3, 3), Case(1, 2, config=ON)),
    (Case(0, 3), Case(2, 2, config=ON)),
    (Case(2, 2, "fp16"), Case(0, 3, "fp16", config=ON)),
    (Case(3, 2, "bf16"), Case(3, 3, "bf16", config=SEALED)),
    (Case(1, 2), Case(1, 3, config=SEALED)),
    (Case(3, 2), Case(0, 3, config=ON)),
    (Case(0, 2, "bf16"), Case(1, 3, "bf16", config={**ON, "data_types": {"grad_accum_dtype": "fp32"}})),
]


@pytest.fixture(scope="module")
def again(sources: Any, ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """What a resume of one case under another saves right after it; made once."""
    made: dict[str, str] = {}

    def save(pair: tuple[Case, Case]) -> str:
        if pair_id(pair) not in made:
            folder = str(tmp_path_factory.mktemp("again"))
            loads = [Load(str(sources.get(pair[0], **OPTIONS).folder), again=folder)]
            for (local,) in ucp_worlds.get(pair[1].dp).run(load_each, pair[1].training(**OPTIONS), loads):
                assert local.direct
            made[pair_id(pair)] = folder
        return made[pair_id(pair)]

    return save


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_save_right_after_a_resume(
    pair: tuple[Case, Case], sources: Any, again: Callable[..., str], ucp_worlds: WorldPool
) -> None:
    """DeepSpeed itself, without the plugin, loads it and has the source's state; its files look like its own."""
    source, target = pair
    loads = [Load(again(pair))]
    for (local,) in ucp_worlds.get(target.dp).run(load_each, target.training(**OPTIONS), loads, plugin=False):
        assert local.direct is None
        assert engine_ranks.differences(str(sources.get(source, **OPTIONS).folder), local.state) == []
    own = target.but(config={key: value for key, value in target.config.items() if key != "checkpoint"})
    native = str(sources.get(own, **OPTIONS).folder)
    assert engine_ranks.structure(again(pair)) == engine_ranks.structure(native)


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_there_and_back(
    pair: tuple[Case, Case], sources: Any, again: Callable[..., str], ucp_worlds: WorldPool
) -> None:
    """The state that went to another topology and came back is the one that left."""
    source, target = pair
    assert any(Path(again(pair)).rglob(SEAL)) == (target.config is SEALED)
    back = source.but(config={**source.config, **ON})
    for (local,) in ucp_worlds.get(back.dp).run(load_each, back.training(**OPTIONS), [Load(again(pair))]):
        assert local.direct
        assert engine_ranks.differences(str(sources.get(source, **OPTIONS).folder), local.state) == []


# On one rank stage 3 has no padding, which DeepSpeed saves uninitialised.
@pytest.mark.parametrize("case", [Case(stage, 1 + (stage < 3), "bf16", config=ON) for stage in (0, 1, 2, 3)], ids=str)
def test_plugin_does_not_change_a_save(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The same training with the plugin and without it leaves the same files with the same contents."""
    folders = [str(tmp_path / name) for name in ("with", "without")]
    for folder, plugin in zip(folders, (True, False), strict=True):
        ucp_worlds.get(case.dp).run(engine_ranks.save, case.training(**OPTIONS), folder, plugin=plugin)
    assert engine_ranks.files_that_differ(*folders) == []
    assert any(Path(folders[0]).rglob("*_states.pt"))


@pytest.mark.parametrize("what", ["missing", "cut off", "damaged"])
def test_the_newest_whole_checkpoint_is_taken_when_asked(what: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    source, target, folder = Case(1, 3), Case(2, 2), str(tmp_path)
    ucp_worlds.get(3).run(engine_ranks.save, source.training(**OPTIONS), folder, steps=(2, 1))
    newest = tmp_path / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = newest.read_bytes()
    middle = len(data) // 2
    if what == "missing":
        newest.unlink()
    else:
        newest.write_bytes(data[:middle] if what == "cut off" else data[:middle] + b"damage" + data[middle + 6 :])
    world, loads = ucp_worlds.get(2), [Load(folder)]
    asked = target.but(config={"checkpoint": {"universal": {"fallback": True}}})
    for (attempt,) in world.run(engine_ranks.attempt_each, target.but(config=ON).training(**OPTIONS), loads):
        assert attempt.error == "CheckpointError" and attempt.changed == []
    for rank, (local,) in enumerate(world.run(load_each, asked.training(**OPTIONS), loads)):
        assert local.state.counters["global_steps"] == 2
        warned = [text for level, text in local.log if level == "WARNING" and "passed over" in text]
        assert len(warned) == (rank == 0) and all(newest.name in text for text in warned)


@pytest.mark.exhaustive
def test_damage_is_passed_over_in_the_same_topology_too(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    folder, case = str(tmp_path), Case(1, 2, config={"checkpoint": {"universal": {"fallback": True}}})
    ucp_worlds.get(2).run(engine_ranks.save, case.training(**OPTIONS), folder, steps=(2, 1))
    newest = tmp_path / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = newest.read_bytes()
    middle = len(data) // 2
    newest.write_bytes(data[:middle] + b"damage" + data[middle + 6 :])
    for (local,) in ucp_worlds.get(2).run(load_each, case.training(**OPTIONS), [Load(folder)]):
        assert local.state.counters["global_steps"] == 2


def test_where_none_is_whole_all_are_named(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    folder = str(tmp_path)
    ucp_worlds.get(3).run(engine_ranks.save, Case(1, 3).training(**OPTIONS), folder, steps=(1, 1))
    for tag in ("global_step1", "global_step2"):
        (tmp_path / tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    asked = Case(2, 2, config={"checkpoint": {"universal": {"fallback": True}}})
    for (attempt,) in ucp_worlds.get(2).run(engine_ranks.attempt_each, asked.training(**OPTIONS), [Load(folder)]):
        assert attempt.error == "CheckpointError" and attempt.changed == []
        assert "none of its 2 checkpoints" in attempt.message
        assert "global_step1" in attempt.message and "global_step2" in attempt.message
