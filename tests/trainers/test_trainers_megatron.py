"""Megatron-DeepSpeed's scripts: other degrees with and without ``--universal-checkpoint``, and random states."""

from __future__ import annotations

from pathlib import Path

import pytest
import trainers_megatron

from deepspeed_ucp.testing import WorldPool

STEPS, CUT, RANKS = 5, 3, 2
TP2, TP1 = (2, 1, False), (1, 1, False)
PIPES = [(1, 1, True), (1, 2, True), (2, 1, True)]


def test_scripts_change_their_degrees(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    world, folder, train = ucp_worlds.get(RANKS), str(tmp_path), trainers_megatron.pretrain
    whole = world.run(train, TP2, 1, folder, STEPS, save=CUT)
    assert len({tuple(rank.drawn) for rank in whole}) == RANKS
    later = whole[0].losses[CUT:]
    for degrees, stage, options in (
        (TP1, 2, {"default_on": True}),
        (TP1, 1, {"default_on": True, "flag": True}),
        (TP1, 3, {"flag": True, "section": {"universal": {"param_groups": "live"}}}),
        (TP2, 2, {"default_on": True}),
        (TP2, 0, {"default_on": True, "flag": True}),
    ):
        resumed = world.run(train, degrees, stage, folder, STEPS, **options)
        assert [rank.error for rank in resumed] == [""] * RANKS
        assert {(rank.begin, rank.consumed) for rank in resumed} == {(CUT, STEPS * trainers_megatron.BATCH)}
        assert resumed[0].losses == pytest.approx(later, rel=1e-5)
        own = [rank.drawn for rank in resumed] == [rank.drawn[CUT:] for rank in whole]
        assert own is (degrees == TP2)
        assert {rank.universal for rank in resumed} == {degrees != TP2 or "flag" in options}
    assert resumed[0].section == {"load_universal": True}
    (off, _) = world.run(train, TP2, 1, folder, STEPS)
    assert off.error == "" and off.drawn == whole[0].drawn[CUT:], "its own load"


@pytest.mark.exhaustive
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("target", PIPES, ids=str)
@pytest.mark.parametrize("source", PIPES, ids=str)
def test_pipelines(
    source: tuple[int, int, bool], target: tuple[int, int, bool], flag: bool, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """There and back with the same tags; files of a larger model-parallel degree remain."""
    world, folder, train = ucp_worlds.get(RANKS), str(tmp_path), trainers_megatron.pretrain
    whole = world.run(train, source, 1, folder, STEPS + 1, save=CUT)
    world.run(train, source, 1, folder, STEPS, save=STEPS, default_on=True)
    (Path(folder) / "latest").write_text(f"global_step{CUT}")
    there = world.run(train, target, 1, folder, STEPS, save=STEPS, flag=flag, default_on=True)
    again = world.run(train, target, 1, folder, STEPS + 1, flag=flag, default_on=True)
    back = world.run(train, source, 1, folder, STEPS + 1, flag=flag, default_on=True)
    assert [rank.error for rank in (*there, *again, *back)] == [""] * 3 * RANKS
    assert there[-1].losses == pytest.approx(whole[-1].losses[CUT:STEPS], rel=1e-5)
    assert again[-1].losses == back[-1].losses == pytest.approx(whole[-1].losses[STEPS:], rel=1e-5)
    assert {rank.begin for rank in back} == {STEPS}
