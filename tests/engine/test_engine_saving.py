"""Saves: the plugin changes nothing in them, and one after a resume is a normal checkpoint of the new topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_ranks
import pytest
from engine_cases import Case, pair_id

from deepspeed_ucp.sources.files import SEAL
from deepspeed_ucp.testing import WorldPool

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


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_save_right_after_a_resume(
    pair: tuple[Case, Case], sources: Any, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """DeepSpeed itself, without the plugin, loads it and has the source's state; its files look like its own."""
    source, target = pair
    folder, again, native = str(sources.get(source, **OPTIONS).folder), str(tmp_path / "again"), str(tmp_path / "own")
    world = ucp_worlds.get(target.dp)
    world.run(engine_ranks.resume_and_save, target.ds_config, folder, again, OPTIONS)
    for found in world.run(engine_ranks.load_without_plugin, target.ds_config, again, folder, OPTIONS):
        assert found == []
    world.run(engine_ranks.save, target.ds_config, native, OPTIONS, 3, False)
    ours, theirs = engine_ranks.structure(again), engine_ranks.structure(native)
    for described in (*ours.values(), *theirs.values()):
        for key in ("mine", "deepspeed_ucp_testing"):
            described.pop(key, None)
    assert ours == theirs


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_there_and_back(pair: tuple[Case, Case], sources: Any, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The state that went to another topology and came back is the one that left."""
    source, target = pair
    folder, away = str(sources.get(source, **OPTIONS).folder), str(tmp_path / "away")
    ucp_worlds.get(target.dp).run(engine_ranks.resume_and_save, target.ds_config, folder, away, OPTIONS)
    assert any(Path(away).rglob(SEAL)) == (target.config is SEALED)
    back = source.but(config={**source.config, **ON})
    for loaded in ucp_worlds.get(back.dp).run(engine_ranks.load, back.ds_config, away, OPTIONS):
        assert loaded.direct
        assert engine_ranks.differences(folder, loaded.state) == []


# On one rank stage 3 has no padding, which DeepSpeed saves uninitialised.
@pytest.mark.parametrize("case", [Case(stage, 1 + (stage < 3), "bf16", config=ON) for stage in (0, 1, 2, 3)], ids=str)
def test_plugin_does_not_change_a_save(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The same training with the plugin and without it leaves the same files with the same contents."""
    folders = [str(tmp_path / name) for name in ("with", "without")]
    for folder, plugin in zip(folders, (True, False), strict=True):
        ucp_worlds.get(case.dp).run(engine_ranks.save, case.ds_config, folder, OPTIONS, 2, plugin)
    assert engine_ranks.files_that_differ(*folders) == []
    assert any(Path(folders[0]).rglob("*_states.pt"))
