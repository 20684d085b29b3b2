"""Random states that trainers write to one file per rank, restored in other worlds."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from deepspeed_ucp import CheckpointError
from deepspeed_ucp.model.index import SavedJob
from deepspeed_ucp.rng import Generator, list_generators
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.trainers import accelerating, huggingface, randomness
from deepspeed_ucp.trainers.randomness import States, restore_ranks
from tests.support.engines.ranks import listen

pytestmark = pytest.mark.parametrize("kind", ["hf", "accelerate"])

SAVED = {"hf": ("python", "numpy", "cpu"), "accelerate": ("random_state", "numpy_random_seed", "torch_manual_seed")}
NAMES = {"hf": "rng_state_{}.pth", "accelerate": "random_states_{}.pkl"}


def save(folder: Path, kind: str, ranks: int) -> str:
    """Write the files of all ranks of a job like the trainers; return the folder."""
    for rank in range(ranks):
        seed(1000 * ranks + rank)
        states = dict(zip(SAVED[kind], (random.getstate(), np.random.get_state(), torch.get_rng_state()), strict=True))  # noqa: NPY002
        name = "rng_state.pth" if (kind, ranks) == ("hf", 1) else NAMES[kind].format(rank)
        torch.save(states, folder / name)
    return str(folder)


def read(folder: str, kind: str, ranks: int, rank: int) -> States:
    return huggingface.read_random(folder, ranks, rank) if kind == "hf" else accelerating.read_random(folder, rank)


def seed(value: int) -> None:
    random.seed(value)
    np.random.seed(value)  # noqa: NPY002
    torch.manual_seed(value)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()  # noqa: NPY002


def restore(folder: str, kind: str, ranks: int) -> tuple[float, ...]:
    """Restore the states of a job with this number of ranks; return numbers that this rank draws next."""
    engine: Any = SimpleNamespace(seq_data_parallel_group=dist.group.WORLD, mp_world_size=1)
    seed(77)
    restore_ranks(engine, folder, SavedJob(ranks, 1, 6, 8, 1), partial(read, folder, kind, ranks))
    return draw()


def expect(ranks: int, rank: int) -> tuple[float, ...]:
    seed(1000 * ranks + rank)
    return draw()


def test_saved_ranks_keep_random_states_new_ranks_derive_them(kind: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """New ranks derive equal states at each resume. Files of an older, larger save are ignored."""
    *_, folder = (save(tmp_path, kind, ranks) for ranks in (3, 1, 2))
    drawn = ucp_worlds.get(3).run(restore, folder, kind, 2)
    assert drawn[:2] == [expect(2, 0), expect(2, 1)]
    assert drawn[2] not in [expect(2, 0), expect(2, 1), expect(3, 2)]
    assert ucp_worlds.get(3).run(restore, folder, kind, 2) == drawn
    assert ucp_worlds.get(1).run(restore, folder, kind, 2) == [expect(2, 0)]


def test_all_ranks_restore_the_random_states_of_a_single_rank(kind: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """A single rank has no axis along which states differ."""
    folder = save(tmp_path, kind, 1)
    assert ucp_worlds.get(2).run(restore, folder, kind, 1) == [expect(1, 0)] * 2
    for rank, (_, heard) in enumerate(ucp_worlds.get(2).run(restore_accelerator, folder, kind)):
        assert any("with which all 2 continue" in text for text in heard) is (rank == 0)


def test_a_missing_random_state_is_derived(kind: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    folder = save(tmp_path, kind, 3)
    (tmp_path / NAMES[kind].format(1)).unlink()
    drawn = ucp_worlds.get(3).run(restore, folder, kind, 3)
    assert [drawn[0], drawn[2]] == [expect(3, 0), expect(3, 2)]
    assert drawn[1] not in (drawn[0], drawn[2])


def test_damaged_random_states_are_an_error_on_all_ranks(kind: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    folder, damaged = save(tmp_path, kind, 2), tmp_path / NAMES[kind].format(1)
    damaged.write_bytes(damaged.read_bytes()[:-30])
    with pytest.raises(CheckpointError, match=damaged.name):
        ucp_worlds.get(2).run(restore, folder, kind, 2)


def restore_accelerator(folder: str, kind: str) -> tuple[list[int], list[str]]:
    """Restore on a rank with an accelerator; return the accelerator's seeds and the log."""
    seeds: list[int] = []
    accelerator = Generator(read=tuple, write=seeds.extend, seed=seeds.append)
    generators = {**list_generators(), "accelerator": accelerator}
    with listen() as heard, mock.patch.object(randomness, "list_generators", return_value=generators):
        restore(folder, kind, 1)
    return seeds, [text for _, text in heard]


def test_an_accelerators_missing_random_state_is_derived(kind: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The saved run used CPUs."""
    folder = save(tmp_path, kind, 1)
    ((seeds, heard),) = ucp_worlds.get(1).run(restore_accelerator, folder, kind)
    assert len(seeds) == 1 and any("random states derived instead of restored on ranks 0" in text for text in heard)
    assert ucp_worlds.get(1).run(restore_accelerator, folder, kind)[0][0] == seeds


@pytest.mark.parametrize(("offsets", "rank", "chosen"), [((0, 4, 0, 0), 3, 1), ((4, 4, 0, 0), 3, 3), ((0, 0), 3, 1)])
def test_an_accelerator_restores_the_random_state_of_its_rank(
    kind: str, offsets: tuple[int, ...], rank: int, chosen: int, tmp_path: Path
) -> None:
    """More devices are visible than ranks run on the node."""
    folder, path = save(tmp_path, kind, 4), tmp_path / NAMES[kind].format(rank)
    states = [torch.tensor([device, *[0] * 7, each, *[0] * 7]).byte() for device, each in enumerate(offsets)]
    key = "cuda" if kind == "hf" else "torch_cuda_manual_seed"
    torch.save({**torch.load(path, weights_only=False), key: states}, path)
    with mock.patch.object(randomness, "get_accelerator", return_value=SimpleNamespace(device_name=lambda: "cuda")):
        assert read(folder, kind, 4, rank)["accelerator"] == (bytes(states[chosen].tolist()),)
