"""Saves with the plugin: unchanged, normal after a resume, and passed over if damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.formats.deepspeed.files import SEAL
from deepspeed_ucp.testing import WorldPool
from tests.support.engines.cases import Case, pair_id
from tests.support.engines.ranks import Load, attempt_each, differences, files_that_differ, load_each, save

SEALED = {"seal": True}
OPTIONS = {"model": "mixed", "scheduler": True}
PAIRS = [
    (Case(1, 3, "bf16"), Case(3, 2, "bf16").on()),
    (Case(3, 3), Case(1, 2).on()),
    (Case(0, 3), Case(2, 2).on()),
    (Case(2, 2, "fp16"), Case(0, 3, "fp16").on()),
    (Case(3, 2, "bf16"), Case(3, 3, "bf16").on(**SEALED)),
    (Case(1, 2), Case(1, 3).on(**SEALED)),
    (Case(3, 2), Case(0, 3).on()),
    (Case(0, 2, "bf16"), Case(1, 3, "bf16", config={"data_types": {"grad_accum_dtype": "fp32"}}).on()),
]


@pytest.fixture(scope="module")
def again(sources: Any, ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Resume one case under another and save at once; made once."""
    made: dict[str, str] = {}

    def find(pair: tuple[Case, Case]) -> str:
        if pair_id(pair) not in made:
            folder = str(tmp_path_factory.mktemp("again"))
            loads = [Load(str(sources.get(pair[0], **OPTIONS).folder), again=folder)]
            for (local,) in ucp_worlds.get(pair[1].dp).run(load_each, pair[1].training(**OPTIONS), loads):
                assert local.direct
            made[pair_id(pair)] = folder
        return made[pair_id(pair)]

    return find


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_save_right_after_a_resume(
    pair: tuple[Case, Case], sources: Any, again: Callable[..., str], ucp_worlds: WorldPool
) -> None:
    """DeepSpeed without the plugin loads the source's state; the files have DeepSpeed's structure."""
    source, target = pair
    loads = [Load(again(pair))]
    for (local,) in ucp_worlds.get(target.dp).run(load_each, target.training(**OPTIONS), loads, plugin=False):
        assert local.direct is None
        assert differences(sources.get(source, **OPTIONS).folder, local.state) == []
    own = target.but(config={key: value for key, value in target.config.items() if key != "checkpoint"})
    assert describe_files(Path(again(pair))) == describe_files(sources.get(own, **OPTIONS).folder)


def describe_files(folder: Path) -> dict[str, Any]:
    """Return the keys, types, shapes and dtypes in each file of states."""
    paths = sorted(folder.rglob("*_states.pt"))
    return {str(path.relative_to(folder)): describe_value(torch.load(path, weights_only=False)) for path in paths}


def describe_value(value: Any) -> Any:
    if torch.is_tensor(value):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, dict):
        return {str(key): describe_value(item) for key, item in value.items() if key != "ds_config"}
    if isinstance(value, list | tuple):
        return [describe_value(item) for item in value]
    return type(value).__name__


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_there_and_back(
    pair: tuple[Case, Case], sources: Any, again: Callable[..., str], ucp_worlds: WorldPool
) -> None:
    """A state is unchanged after a resume in another topology and back."""
    source, target = pair
    assert any(Path(again(pair)).rglob(SEAL)) == (target.config["checkpoint"]["universal"] == SEALED)
    back = source.on()
    for (local,) in ucp_worlds.get(back.dp).run(load_each, back.training(**OPTIONS), [Load(again(pair))]):
        assert local.direct
        assert differences(sources.get(source, **OPTIONS).folder, local.state) == []


# On one rank stage 3 has no padding, which DeepSpeed saves uninitialised.
@pytest.mark.parametrize("case", [Case(stage, 1 + (stage < 3), "bf16").on() for stage in (0, 1, 2, 3)], ids=str)
def test_plugin_does_not_change_a_save(case: Case, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The same training with and without the plugin writes files with the same contents."""
    folders = [str(tmp_path / name) for name in ("with", "without")]
    for folder, plugin in zip(folders, (True, False), strict=True):
        ucp_worlds.get(case.dp).run(save, case.training(**OPTIONS), folder, plugin=plugin)
    assert files_that_differ(*folders) == []
    assert any(Path(folders[0]).rglob("*_states.pt"))


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    middle = len(data) // 2
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:middle] if how == "cut off" else data[:middle] + b"damage" + data[middle + 6 :])


NEWEST = "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
FALLBACK = [
    *((how, Case(1, 3), Case(2, 2)) for how in ("missing", "cut off", "damaged")),
    pytest.param("damaged", Case(1, 2), Case(1, 2), marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("how", "source", "target"), FALLBACK, ids=str)
def test_the_newest_whole_checkpoint_is_taken_when_asked(
    how: str, source: Case, target: Case, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    ucp_worlds.get(source.dp).run(save, source.training(**OPTIONS), str(tmp_path), steps=(2, 1))
    damage(tmp_path / NEWEST, how)
    world, loads = ucp_worlds.get(2), [Load(str(tmp_path))]
    for (attempt,) in world.run(attempt_each, target.on().training(**OPTIONS), loads) if source != target else ():
        assert attempt.error == "CheckpointError" and attempt.changed == []
    for rank, (local,) in enumerate(world.run(load_each, target.on(fallback=True).training(**OPTIONS), loads)):
        assert local.state.counters["global_steps"] == 2
        warnings = local.list_messages("WARNING", "skipped")
        assert len(warnings) == (rank == 0) and all(Path(NEWEST).name in text for text in warnings)


def test_where_none_is_whole_all_are_named(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    ucp_worlds.get(3).run(save, Case(1, 3).training(**OPTIONS), str(tmp_path), steps=(1, 1))
    for tag in ("global_step1", "global_step2"):
        (tmp_path / tag / Path(NEWEST).name).unlink()
    training = Case(2, 2).on(fallback=True).training(**OPTIONS)
    for (attempt,) in ucp_worlds.get(2).run(attempt_each, training, [Load(str(tmp_path))]):
        assert attempt.error == "CheckpointError" and attempt.changed == []
        for words in ("none of its 2 checkpoints", "global_step1", "global_step2"):
            assert words in attempt.message
