"""What cannot be resumed is refused: the same clear error on every rank, at once, and the engine is as it was."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engine_ranks
import pytest
import torch
from engine_cases import Case

from deepspeed_ucp.testing import WorldPool

ON = {"checkpoint": {"universal": True}}
ZERO1, ZERO3 = Case(1, 3), Case(3, 3)
TARGETS = {1: Case(3, 2, config=ON), 3: Case(2, 2, config=ON), 0: Case(1, 2, config=ON), 2: Case(0, 2, config=ON)}
TAG = "global_step3"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture
def refuse(ucp_worlds: WorldPool) -> Callable[..., str]:
    """Runs a load that must be refused; checks what holds for every refusal; returns the message."""

    def run(folder: Path | list[Path], target: Case, kind: str, *words: str, **more: Any) -> str:
        options = {"model": "plain", **more.pop("options", {})}
        folders = [str(f) for f in (folder if isinstance(folder, list) else [folder])]
        attempts = ucp_worlds.get(target.dp).run(
            engine_ranks.attempt, target.ds_config, folders, options, timeout=60, **more
        )
        first = attempts[0]
        assert first.error, "the load was not refused"
        assert kind in first.kinds and "UcpError" in first.kinds, f"{first.error}: {first.message}"
        for word in words:
            assert word in first.message, f"{word!r} is not in: {first.message}"
        for attempt in attempts:
            assert (attempt.error, attempt.message) == (first.error, first.message)
            assert attempt.changed == []
            assert attempt.seconds < 20
            assert attempt.loss > 0
        return first.message

    return run


@pytest.fixture
def copy(sources: Any, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a saved run that may be damaged: its checkpoint folder."""

    def run(case: Case, name: str = "copy", **options: Any) -> Path:
        saved = sources.get(case, **{"model": "plain", **options})
        return shutil.copytree(saved.folder, tmp_path / name)

    return run


def truncate(path: Path, size: int) -> None:
    with path.open("r+b") as stream:
        stream.truncate(size)


def flip(path: Path, least: int = 0) -> None:
    """Flip one bit in the middle of the largest record, or of the smallest of at least `least` bytes."""
    with zipfile.ZipFile(path) as archive:
        records = sorted((i for i in archive.infolist() if "/data/" in i.filename), key=lambda i: i.file_size)
    record = next(r for r in records if r.file_size >= least) if least else records[-1]
    with path.open("r+b") as stream:
        stream.seek(record.header_offset)
        header = stream.read(30)
        name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        stream.seek(record.header_offset + 30 + name + extra + record.file_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, 1)
        stream.write(bytes([byte ^ 4]))


@dataclass(frozen=True)
class Damage:
    """Something done to one file of a checkpoint."""

    name: str
    do: Callable[[Path], None]
    words: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return self.name


DAMAGES = [
    Damage("missing", Path.unlink),
    Damage("empty", lambda path: truncate(path, 0)),
    Damage("half", lambda path: truncate(path, path.stat().st_size // 2)),
    Damage("end-cut", lambda path: truncate(path, path.stat().st_size - 50)),
    Damage("bit-flipped", flip),
    Damage("no-zip", lambda path: (path.write_bytes(b"not a checkpoint" * 100), None)[1]),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_damaged_file(stage: int, damage: Damage, copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    folder = copy(Case(stage, 3))
    name = OPTIM.format(1) if stage else "mp_rank_00_model_states.pt"
    damage.do(folder / TAG / name)
    refuse(folder, TARGETS[stage], "CheckpointError", name if stage or damage.name != "missing" else TAG)


@pytest.mark.parametrize("rank", [0, 2])
def test_bit_flipped_in_another_shard(rank: int, copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    folder = copy(Case(2, 3, "bf16"))
    flip(folder / TAG / f"bf16_{OPTIM.format(rank)}")
    refuse(folder, Case(2, 2, "bf16", config=ON), "CheckpointError", OPTIM.format(rank))


def test_bit_flipped_frozen_parameter(copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    folder = copy(Case(1, 3), model="lora", optimizer="adamw_uniform")
    flip(folder / TAG / "mp_rank_00_model_states.pt")
    options = {"model": "lora", "optimizer": "adamw_uniform"}
    refuse(folder, TARGETS[1], "CheckpointError", "mp_rank_00_model_states.pt", options=options)


@pytest.mark.parametrize("case", [ZERO1, Case(2, 3, "bf16"), ZERO3], ids=str)
def test_duplicate_shard(case: Case, copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    """Rank 1's shard lies there as rank 2's as well."""
    folder = copy(case)
    prefix = "bf16_" if case.precision == "bf16" else ""
    shutil.copy(folder / TAG / (prefix + OPTIM.format(1)), folder / TAG / (prefix + OPTIM.format(2)))
    message = refuse(folder, TARGETS[case.stage].but(precision=case.precision), "CheckpointError")
    assert OPTIM.format(1) in message or OPTIM.format(2) in message


@pytest.mark.parametrize("case", [ZERO1, Case(2, 3, "bf16"), ZERO3], ids=str)
def test_shard_of_another_step(case: Case, sources: Any, copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    folder = copy(case)
    other = sources.get(case, (4, 1), model="plain").folder / "global_step4"
    name = ("bf16_" if case.precision == "bf16" else "") + OPTIM.format(1)
    shutil.copy(other / name, folder / TAG / name)
    refuse(folder, TARGETS[case.stage].but(precision=case.precision), "CheckpointError", name)


@pytest.mark.parametrize("case", [ZERO1, Case(2, 3, "bf16")], ids=str)
def test_shard_of_another_run(case: Case, sources: Any, copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    """At stage 3 nothing in the files can tell: they hold no second copy of a weight."""
    folder = copy(case)
    other = sources.get(case, model="plain", seed=1).folder / TAG
    name = ("bf16_" if case.precision == "bf16" else "") + OPTIM.format(1)
    shutil.copy(other / name, folder / TAG / name)
    refuse(folder, TARGETS[case.stage].but(precision=case.precision), "CheckpointError", name)


@pytest.mark.parametrize("stage", [1, 3])
def test_shard_of_another_world_size(
    stage: int, sources: Any, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    folder = copy(Case(stage, 3))
    other = sources.get(Case(stage, 2), model="plain").folder / TAG
    shutil.copy(other / OPTIM.format(1), folder / TAG / OPTIM.format(1))
    refuse(folder, TARGETS[stage], "CheckpointError", OPTIM.format(1))


def test_no_latest(copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    folder = copy(ZERO1)
    (folder / "latest").unlink()
    refuse(folder, TARGETS[1], "CheckpointError", "latest", TAG)


def test_no_such_tag(copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    refuse(copy(ZERO1), TARGETS[1], "CheckpointError", "no_such_tag", TAG, arguments={"tag": "no_such_tag"})


def test_latest_names_a_missing_tag(copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    folder = copy(ZERO1)
    (folder / "latest").write_text("global_step9")
    refuse(folder, TARGETS[1], "CheckpointError", "global_step9", TAG)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_file_on_one_node_only(stage: int, copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    here, there = copy(Case(stage, 3)), copy(Case(stage, 3), "other-node")
    name = OPTIM.format(2) if stage else "mp_rank_00_model_states.pt"
    (there / TAG / name).unlink()
    refuse([here, there], TARGETS[stage], "CheckpointError", name, "rank 1")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_unreadable_on_rank_1_only(stage: int, copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    refuse(copy(Case(stage, 3)), TARGETS[stage], "CheckpointError", "_states.pt", "rank 1", unreadable="_states.pt")


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("renamed", ("head.weight", "last.weight")),
        ("deeper", ("gain",)),
        ("wider", ("first.weight", "(7, 13)", "(9, 13)")),
    ],
)
def test_other_parameters(
    model: str, words: tuple[str, ...], stage: int, sources: Any, refuse: Callable[..., str]
) -> None:
    folder = sources.get(Case(stage, 3), model="plain").folder
    refuse(folder, TARGETS[stage], "MismatchError", *words, options={"model": model})


def test_parameter_missing_in_the_model(sources: Any, refuse: Callable[..., str]) -> None:
    folder = sources.get(ZERO1, model="deeper").folder
    refuse(folder, TARGETS[1], "MismatchError", "gain")


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "lion"])
def test_optimizer_of_another_kind(optimizer: str, stage: int, sources: Any, refuse: Callable[..., str]) -> None:
    folder = sources.get(Case(stage, 3), model="plain").folder
    options = {"optimizer": optimizer}
    refuse(folder, TARGETS[stage], "MismatchError", "exp_avg", "load_optimizer_states=False", options=options)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_that_is_not_element_wise(stage: int, sources: Any, refuse: Callable[..., str]) -> None:
    folder = sources.get(Case(stage, 3), model="plain", optimizer="row_mean").folder
    options = {"optimizer": "row_mean"}
    refuse(folder, TARGETS[stage], "UcpError", "factored", "load_optimizer_states=False", options=options)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_other_param_groups(stage: int, sources: Any, refuse: Callable[..., str]) -> None:
    folder = sources.get(Case(stage, 3), model="plain").folder
    options = {"optimizer": "adamw_uniform"}
    refuse(folder, TARGETS[stage], "MismatchError", "group", "first.weight", "first.bias", options=options)


def test_stage_0_in_another_order(sources: Any, refuse: Callable[..., str]) -> None:
    """Its optimizer state is recorded by position; shapes tell that the positions are others."""
    folder = sources.get(Case(0, 3), model="plain").folder
    refuse(folder, TARGETS[0], "MismatchError", options={"reverse_groups": True})


@pytest.mark.parametrize("stage", [1, 3])
def test_code_in_a_file_is_not_run(
    stage: int, tmp_path: Path, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    folder, marker = copy(Case(stage, 3)), tmp_path / "code-was-run"
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    engine_ranks.plant_code(str(folder / TAG / name), str(marker))
    refuse(folder, TARGETS[stage], "CheckpointError", name, "mkdir", "trust_pickle")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("dp", "sizes", "words"),
    [
        (3, {"train_batch_size": 8}, ("8", "3", "6 or 9")),
        (2, {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}, ("12", "8 or 16", "preserve_batch_size")),
        (3, {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, ("12",)),
    ],
)
def test_impossible_batch_size(dp: int, sizes: dict[str, int], words: tuple[str, ...], ucp_worlds: WorldPool) -> None:
    config = Case(1, dp, config=ON).ds_config
    for key in ("train_batch_size", "gradient_accumulation_steps"):
        del config[key]
    answers = ucp_worlds.get(dp).run(engine_ranks.initialize_error, {**config, **sizes})
    assert len(set(answers)) == 1
    kind, message = answers[0]
    assert kind == "ConfigError"
    for word in words:
        assert word in message


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("stage", "name"),
    [(1, "mp_rank_00_model_states.pt"), (1, OPTIM.format(1)), (3, "mp_rank_00_model_states.pt")],
)
def test_code_in_a_file_does_not_run(
    stage: int, name: str, copy: Callable[..., Path], refuse: Callable[..., str], tmp_path: Path
) -> None:
    """In the same topology (stage 1), where DeepSpeed's own load would run it, and in another."""
    folder, sprung = copy(Case(1, 2)), tmp_path / "sprung"
    saved = torch.load(folder / TAG / name, weights_only=False)
    torch.save({**saved, "trap": Trap(sprung)}, folder / TAG / name)
    refuse(folder, Case(stage, 2, config=ON), "CheckpointError", name, "posix.mkdir", "trust_pickle")
    assert not sprung.exists()
