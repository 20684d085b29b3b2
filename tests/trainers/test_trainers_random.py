"""Random states that trainers write to one file per rank, restored in other worlds."""

from __future__ import annotations

from pathlib import Path

import pytest
import trainers_random

from deepspeed_ucp import CheckpointError
from deepspeed_ucp.testing import WorldPool

pytestmark = pytest.mark.parametrize("kind", ["hf", "accelerate"])


def expect(ranks: int, rank: int) -> tuple[float, ...]:
    trainers_random.seed(1000 * ranks + rank)
    return trainers_random.draw()


def test_saved_ranks_keep_their_states(kind: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """New ranks derive theirs, the same at each resume; files of an older, larger save are ignored."""
    for ranks in (3, 1, 2):
        trainers_random.save(str(tmp_path), kind, ranks)
    drawn = ucp_worlds.get(3).run(trainers_random.restore, str(tmp_path), kind, 2)
    assert drawn[:2] == [expect(2, 0), expect(2, 1)]
    assert drawn[2] not in [expect(2, 0), expect(2, 1), expect(3, 2)]
    assert ucp_worlds.get(3).run(trainers_random.restore, str(tmp_path), kind, 2) == drawn
    assert ucp_worlds.get(1).run(trainers_random.restore, str(tmp_path), kind, 2) == [expect(2, 0)]


def test_one_rank_grows(kind: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """A single rank has no axis along which states differ, so all ranks take its state."""
    trainers_random.save(str(tmp_path), kind, 1)
    assert ucp_worlds.get(2).run(trainers_random.restore, str(tmp_path), kind, 1) == [expect(1, 0)] * 2


def test_a_missing_state_is_derived(kind: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    trainers_random.save(str(tmp_path), kind, 3)
    (missing,) = (path for path in tmp_path.iterdir() if "_1." in path.name)
    missing.unlink()
    drawn = ucp_worlds.get(3).run(trainers_random.restore, str(tmp_path), kind, 3)
    assert [drawn[0], drawn[2]] == [expect(3, 0), expect(3, 2)]
    assert drawn[1] not in (drawn[0], drawn[2])


def test_a_damaged_file_is_refused_by_all(kind: str, tmp_path: Path, ucp_worlds: WorldPool) -> None:
    trainers_random.save(str(tmp_path), kind, 2)
    (damaged,) = (path for path in tmp_path.iterdir() if "_1." in path.name)
    damaged.write_bytes(damaged.read_bytes()[:-30])
    with pytest.raises(CheckpointError, match=damaged.name):
        ucp_worlds.get(2).run(trainers_random.restore, str(tmp_path), kind, 2)
