"""Refusals: every rank raises the same error, and the engine is unchanged.

One engine of each kind refuses all its cases, one after the other, and trains then.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from tests.support.engines.cases import Case, make_engine
from tests.support.engines.ranks import Load, attempt_each

ZERO0, ZERO1, ZERO3 = Case(0, 3), Case(1, 3), Case(3, 3)
BF16 = Case(2, 3, "bf16")
TO_ZERO3 = Case(3, 2).on()
TARGETS = {0: Case(1, 2).on(), 1: TO_ZERO3, 2: Case(2, 2, "bf16").on(), 3: Case(2, 2).on()}
TAG = "global_step3"
MODEL = "mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def find_optim(case: Case, rank: int) -> str:
    """Return the name of a rank's file of optimizer states."""
    return ("bf16_" if case.precision == "bf16" else "") + OPTIM.format(rank)


@dataclass(frozen=True)
class Refused:
    """A load that every rank refuses.

    Attributes:
        words: parts of the message.
        kind: of error.
        damage: changes a copy of the checkpoint's folder.
        target: by default `TARGETS` of the source's stage.
        saved: options of the source's training.
        live: options of the engine.
    """

    name: str
    source: Case
    words: tuple[str, ...] = ()
    kind: str = "CheckpointError"
    damage: Callable[[Path, Any], object] | None = None
    target: Case | None = None
    saved: dict[str, Any] = field(default_factory=dict)
    live: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    unreadable: str = ""

    def __str__(self) -> str:
        return f"{self.source}-{self.name}"

    @property
    def engine(self) -> tuple[Case, dict[str, Any]]:
        """Case and options of the engine."""
        return self.target or TARGETS[self.source.stage], {"model": "plain", **self.live}

    def prepare(self, sources: Any, root: Path) -> Load:
        folder = sources.get(self.source, **{"model": "plain", **self.saved}).folder
        if self.damage is not None:
            folder = shutil.copytree(folder, root / str(self))
            self.damage(folder, sources)
        return Load(str(folder), self.arguments, unreadable=self.unreadable)


# --- damage


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


def at(name: str, do: Callable[[Path], object]) -> Callable[[Path, Any], object]:
    """Return a function that changes one file."""
    return lambda folder, _sources: do(folder / TAG / name)


def swap(
    case: Case, *steps: tuple[int, int], step: int = 3, dp: int = 0, **options: Any
) -> Callable[[Path, Any], object]:
    """Return a function that replaces rank 1's shard by another run's."""
    name = find_optim(case, 1)

    def run(folder: Path, sources: Any) -> None:
        other = sources.get(case.but(dp=dp or case.dp), *steps, model="plain", **options).folder
        shutil.copy(other / f"global_step{step}" / name, folder / TAG / name)

    return run


class Code:
    """Creates a folder when it is unpickled."""

    def __init__(self, folder: str):
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def plant(path: Path) -> None:
    saved = torch.load(path, weights_only=False)
    torch.save({**saved, "planted": Code(str(path.parents[1] / "code-was-run"))}, path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: truncate(path, 0),
    "half": lambda path: truncate(path, path.stat().st_size // 2),
    "end-cut": lambda path: truncate(path, path.stat().st_size - 50),
    "bit-flipped": flip,
    "no-zip": lambda path: path.write_bytes(b"not a checkpoint" * 100),
}


def list_damaged() -> list[Refused]:
    found = []
    for case, name in ((ZERO0, MODEL), (ZERO1, OPTIM.format(1)), (ZERO3, OPTIM.format(1))):
        for damage, do in DAMAGES.items():
            words = (TAG,) if (case, damage) == (ZERO0, "missing") else (name,)
            found.append(Refused(damage, case, words, damage=at(name, do)))
        found.append(Refused("unreadable-on-rank-1", case, ("_states.pt", "rank 1"), unreadable="_states.pt"))
    found += [
        Refused(f"bit-flipped-{rank}", BF16, (OPTIM.format(rank),), damage=at(find_optim(BF16, rank), flip))
        for rank in (0, 2)
    ]
    lora = {"model": "lora", "optimizer": "adamw_uniform"}
    found.append(Refused("bit-of-a-frozen-parameter", ZERO1, (MODEL,), damage=at(MODEL, flip), saved=lora, live=lora))
    rename, latest = lambda path: path.write_text("global_step9"), "../latest"
    return [
        *found,
        Refused("no-latest", ZERO1, ("latest", TAG), damage=at(latest, Path.unlink)),
        Refused("latest-names-a-missing-tag", ZERO1, ("global_step9", TAG), damage=at(latest, rename)),
        Refused("no-such-tag", ZERO1, ("no_such_tag", TAG), arguments={"tag": "no_such_tag"}),
    ]


def list_foreign() -> list[Refused]:
    """List shards of another rank, step, run (which stage 3 does not record) or world size."""
    found = []
    for case in (ZERO1, BF16, ZERO3):
        first, second = find_optim(case, 1), find_optim(case, 2)
        repeat = at(first, lambda path, second=second: shutil.copy(path, path.with_name(second)))  # type: ignore[misc]
        found.append(Refused("duplicate", case, ("_mp_rank_00_optim_states.pt",), damage=repeat))
        found.append(Refused("another-step", case, (first,), damage=swap(case, (4, 1), step=4)))
        found += [Refused("another-run", case, (first,), damage=swap(case, seed=1))] * (case is not ZERO3)
        found += [Refused("another-size", case, (first,), damage=swap(case, dp=2))] * (case is not BF16)
    return found


def list_planted() -> list[Refused]:
    """List code in files: in the same topology (DeepSpeed's load would run it) and in another."""
    two = Case(1, 2)
    places = [
        (ZERO1, MODEL, None),
        (ZERO3, f"zero_pp_rank_0_{MODEL}", None),
        (two, MODEL, two.on()),
        (two, OPTIM.format(1), two.on()),
        (two, MODEL, TO_ZERO3),
    ]
    words = ("posix.mkdir", "trust_pickle")
    return [
        Refused(
            f"code-in-{name}-to-{target}",
            case,
            (name, *words),
            "UnsupportedError",
            damage=at(name, plant),
            target=target,
        )
        for case, name, target in places
    ]


def list_unfit() -> list[Refused]:
    """List another model, param groups or optimizer; each engine loads sources of every stage."""
    weights = "load_optimizer_states=False"
    uniform = {"optimizer": "adamw_uniform"}
    unfit: list[tuple[str, str, tuple[str, ...], dict[str, Any], dict[str, Any], Case]] = [
        ("renamed", "MismatchError", ("head.weight", "last.weight"), {}, {"model": "renamed"}, TO_ZERO3),
        ("deeper", "MismatchError", ("gain",), {}, {"model": "deeper"}, TARGETS[0]),
        ("wider", "MismatchError", ("first.weight", "(7, 13)", "(9, 13)"), {}, {"model": "wider"}, TARGETS[3]),
        ("lacking", "MismatchError", ("gain",), {"model": "deeper"}, {}, TO_ZERO3),
        ("momentum", "MismatchError", ("exp_avg", weights), {}, {"optimizer": "momentum"}, TO_ZERO3),
        ("lion", "MismatchError", ("exp_avg", weights), {}, {"optimizer": "lion"}, TARGETS[0]),
        ("radam", "MismatchError", (*_ANOTHER_RULE, weights), {}, {"optimizer": "radam"}, TO_ZERO3),
        ("row_mean", "UcpError", ("factored", weights), {"optimizer": "row_mean"}, {"optimizer": "row_mean"},
         TARGETS[3]),
        ("uniform", "MismatchError", ("group", "first.weight", "first.bias"), {}, uniform, TO_ZERO3),
    ]  # fmt: skip
    found = [
        Refused(name, case, words, kind, saved=saved, live=live, target=target)
        for name, kind, words, saved, live, target in unfit
        for case in (ZERO0, ZERO1, ZERO3)
    ]
    # DeepSpeed's load would accept it: its states have the same names.
    same = {"target": ZERO1.on(), "live": {"optimizer": "radam"}}
    found.append(Refused("radam-in-the-same-topology", ZERO1, _ANOTHER_RULE, "MismatchError", **same))
    # Stage 0 saves optimizer states by position; the shapes show another order.
    return [*found, Refused("in-another-order", ZERO0, (), "MismatchError", live={"reverse_groups": True})]


_ANOTHER_RULE = ("like those of Adam", "RAdam", '"param_groups": "live"')


CASES: dict[str, list[Refused]] = {}
"""By engine."""
for each in (*list_damaged(), *list_foreign(), *list_planted(), *list_unfit()):
    case, options = each.engine
    CASES.setdefault("-".join([str(case), *map(str, options.values())]), []).append(each)


@pytest.mark.parametrize("engine", CASES)
def test_refused(engine: str, sources: Any, ucp_worlds: WorldPool, tmp_path: Path, subtests: pytest.Subtests) -> None:
    target, options = CASES[engine][0].engine
    loads = [case.prepare(sources, tmp_path) for case in CASES[engine]]
    answers = ucp_worlds.get(target.dp).run(attempt_each, target.training(**options), loads)
    assert not list(tmp_path.glob("*/code-was-run"))
    for case, ranks in zip(CASES[engine], zip(*answers, strict=True), strict=True):
        with subtests.test(case=str(case)):
            first = ranks[0]
            assert first.error, "the load was not refused"
            assert case.kind in first.kinds and "UcpError" in first.kinds, f"{first.error}: {first.message}"
            for word in case.words:
                assert word in first.message
            for attempt in ranks:
                assert (attempt.error, attempt.message) == (first.error, first.message)
                assert (attempt.changed, attempt.held) == ([], 0)
                assert attempt.loss > 0


def universal(value: Any, **sizes: int) -> dict[str, Any]:
    return {"checkpoint": {"universal": value}, **sizes}


def initialize_error(ds_config: dict[str, Any]) -> tuple[str, str]:
    """Return type and message of the error of `deepspeed.initialize`, or empty strings."""
    try:
        make_engine(ds_config, "plain").destroy()
    except Exception as error:  # noqa: BLE001 - the test checks the error
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("dp", "config", "words"),
    [
        (3, universal(True, train_batch_size=8), ("8", "3", "6 or 9")),
        (2, universal(True, train_batch_size=12, train_micro_batch_size_per_gpu=4),
         ("12", "8 or 16", "preserve_batch_size")),
        (3, universal(True, train_batch_size=12, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2),
         ("12",)),
        (2, {"checkpoint": {"universal": True, "load_universal": True}}, ("load_universal",)),
        (2, universal({"wndow_mb": 3}), ("wndow_mb", "Did you mean 'window_mb'?")),
        (2, universal({"window_mb": "many"}), ("window_mb", "type str")),
        (2, universal({"verify": "md5"}), ("verify", "md5", "crc")),
        (2, universal({"mode": 3}), ("mode", "direct")),
        (2, universal("yes"), ("type str", "true")),
        (2, universal(3), ("type int", "true")),
    ],
    ids=str,
)  # fmt: skip
def test_configuration_that_cannot_be(
    dp: int, config: dict[str, Any], words: tuple[str, ...], ucp_worlds: WorldPool
) -> None:
    """Impossible batch sizes, unknown keys and wrong types: the engine is not built."""
    plain = Case(1, dp).ds_config
    if "train_batch_size" in config:
        del plain["gradient_accumulation_steps"]
    answers = ucp_worlds.get(dp).run(initialize_error, {**plain, **config})
    assert len(set(answers)) == 1
    kind, message = answers[0]
    assert kind == "ConfigError"
    for word in words:
        assert word in message
