"""Refusals: every rank raises the same error, and the engine is unchanged.

One engine of each kind refuses all its cases, one after the other, and trains then.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import muon
from tests.support.engines.cases import Case, make_engine
from tests.support.engines.driver import STEPS, Engines, Outcome, Source
from tests.support.engines.experts import BELOW, Spread
from tests.support.engines.kinds import Kind
from tests.support.engines.ranks import Load, edit

ZERO0, ZERO1, ZERO3 = Case(0, 3), Case(1, 3), Case(3, 3)
BF16 = Case(2, 3, "bf16")
TO_ZERO3 = Case(3, 2)
TARGETS = {0: Case(1, 2), 1: TO_ZERO3, 2: Case(2, 2, "bf16"), 3: Case(2, 2)}
TAG, LATER = f"global_step{STEPS[0]}", f"global_step{sum(STEPS)}"
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
        saved: options of the source's ``make``.
        live: options of the engine's ``make``.
        again: the source saves a second time, two steps later.
    """

    name: str
    source: Kind
    words: tuple[str, ...] = ()
    kind: str = "CheckpointError"
    damage: Callable[[Path, Engines], object] | None = None
    target: Kind | None = None
    saved: Mapping[str, Any] = field(default_factory=dict)
    live: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    unreadable: str = ""
    again: bool = False

    def __str__(self) -> str:
        return f"{self.source}-{self.name}"

    @property
    def engine(self) -> tuple[Kind, dict[str, Any]]:
        """Kind and options of the engine."""
        model = {"model": "plain"} if isinstance(self.source, Case) else {}
        return self.target or TARGETS[self.source.stage], {**model, **self.live}

    def prepare(self, engines: Engines, root: Path) -> Load:
        model = {"model": "plain"} if isinstance(self.source, Case) else {}
        if self.again:
            folder = engines.save(self.source, root / str(self), steps=STEPS, after=0).folder
        else:
            folder = engines.saved(self.source, **{**model, **self.saved}).folder
        if self.damage is not None:
            if not self.again:
                folder = shutil.copytree(folder, root / str(self))
            self.damage(folder, engines)
        return Load(str(folder), dict(self.arguments), unreadable=self.unreadable)

    def check(self, outcome: Outcome) -> None:
        outcome.check_refused(*self.words)
        kinds = outcome.ranks[0].kinds
        assert self.kind in kinds and "UcpError" in kinds, outcome.errors[0]


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


def at(name: str, do: Callable[[Path], object]) -> Callable[[Path, Engines], object]:
    """Return a function that changes one file."""
    return lambda folder, _engines: do(folder / TAG / name)


def swap(
    case: Case, steps: tuple[int, int] = STEPS, world: int = 0, **options: Any
) -> Callable[[Path, Engines], object]:
    """Return a function that replaces rank 1's shard by another run's."""
    name = find_optim(case, 1)

    def run(folder: Path, engines: Engines) -> None:
        source = Source(case.but(world=world or case.world), {"model": "plain", **options}, steps=steps)
        other = engines.saved(source).folder
        shutil.copy(other / f"global_step{steps[0]}" / name, folder / TAG / name)

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
        found.append(Refused("another-step", case, (first,), damage=swap(case, (STEPS[0] + 1, 1))))
        found += [Refused("another-run", case, (first,), damage=swap(case, (STEPS[0], 1)))] * (case is not ZERO3)
        found += [Refused("another-size", case, (first,), damage=swap(case, world=2))] * (case is not BF16)
    return found


def list_planted() -> list[Refused]:
    """List code in files: in the same topology (DeepSpeed's load would run it) and in another."""
    two = Case(1, 2)
    places = [
        (ZERO1, MODEL, None),
        (ZERO3, f"zero_pp_rank_0_{MODEL}", None),
        (two, MODEL, two),
        (two, OPTIM.format(1), two),
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
    same = {"target": ZERO1, "live": {"optimizer": "radam"}}
    found.append(Refused("radam-in-the-same-topology", ZERO1, _ANOTHER_RULE, "MismatchError", **same))
    # Stage 0 saves optimizer states by position; the shapes show another order.
    return [*found, Refused("in-another-order", ZERO0, (), "MismatchError", live={"reverse_groups": True})]


_ANOTHER_RULE = ("like those of Adam", "RAdam", '"param_groups": "live"')


def list_experts() -> list[Refused]:
    """List experts, and the momentum of Muon."""
    two, later = Spread(0, 2, ep=(2, 1), residual="residual"), "expp_rank_1_mp_rank_00_optim_states.pt"
    residual = Spread(0, 2, ep=(2, 2), residual=BELOW)
    border, elastic = "zero_pp_rank_1_mp_rank_00_optim_states.pt", muon.Kind(1, 2, zero={"elastic_checkpoint": True})

    def add_to_momentum(folder: Path, _engines: Engines) -> None:
        def add(tree: Any) -> None:
            tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["momentum_buffer"][0] += 1

        edit(next(folder.rglob(f"*{border}")), add)

    # No file records the degrees of two layers of the same shapes. In the same topology DeepSpeed's load uses their
    # order, which changes at every start.
    degrees = ("several such degrees", "load_optimizer_states=False")
    found = [Refused("degrees", two, degrees, "MismatchError", target=to) for to in (two, two.but(stage=1))]
    # At stage 0 in fp32 no other file has the states of the experts' optimizer, nor the residual's masters.
    copy = lambda folder, _: shutil.copy(folder / LATER / later, folder / TAG / later)  # noqa: E731
    words: tuple[str, ...] = (f"{later}: the optimizer's step differs",)
    again = {"arguments": {"tag": TAG}, "damage": copy, "again": True}
    found.append(
        Refused("another-step", two.but(ep=(2, 2)), words, target=two.but(stage=1, precision="bf16", ep=1), **again)
    )
    lost = (f"not in the checkpoint: layers.1.{BELOW}.mlp.",)
    found += [Refused("lost", residual, lost, "MismatchError", target=to) for to in (residual, residual.but(stage=1))]
    # DeepSpeed truncates the momentum like a padded partition, and loads rank 0's on every rank.
    shape = ("momentum_buffer (shape",)
    found += [Refused("elastic", elastic, shape, "MismatchError", target=to) for to in (elastic, muon.Kind(3, 2))]
    # The files of both ranks have the whole momentum of a parameter on the border of two partitions.
    words = ("square.weight (momentum_buffer)", border)
    found.append(Refused("momentum", muon.Kind(1, 2), words, damage=add_to_momentum, target=muon.Kind(3, 1)))
    return found


def list_autoep() -> list[Refused]:
    """List placements and numbers of AutoEP's experts."""
    from tests.support.engines.autoep import Spread as Auto
    from tests.support.engines.autoep import move_experts

    def change_rank(folder: Path, _engines: Engines) -> None:  # ZeRO 3 has no copies to compare
        path = next(folder.rglob("zero_pp_rank_1_mp_rank_00_model_states.pt"))
        edit(path, lambda tree: tree["ds_autoep_layers"][0].update(ep_rank=0))

    four, copies = Auto(1, 4, "bf16", 4), ("its fp32 weights differ from the model states",)
    source = Auto(1, 4, "bf16", 2)
    found = [Refused("moved", source, copies, damage=lambda folder, _: move_experts(folder), target=four)]
    rank = ("is of expert-parallel rank 0",)
    found.append(Refused("another-rank", source.but(stage=3), rank, damage=change_rank, target=four))
    one, fused = Auto(2, 2, ep=2, biased=False), Auto(1, 2, kind="fused")
    more = one.but(stage=1, experts=8)
    numbers: list[tuple[Kind, Kind, str]] = [
        (one, more, "{0-1}.mlp: 4 experts in the checkpoint, 8 in the model"),
        (more, one.but(stage=3), "{0-1}.mlp: 8 experts in the checkpoint, 4 in the model"),
        (one, fused.but(experts=8), "experts"),
        (fused, more, "experts"),
        (fused, fused.but(stage=3, experts=8), "gate_up_proj"),
    ]
    return [*found, *(Refused("number", here, (words,), "MismatchError", target=to) for here, to, words in numbers)]


CASES: dict[str, list[Refused]] = {}
"""By engine."""
AUTOEP = list_autoep() if find_spec("deepspeed.module_inject.auto_ep_layer") else []
for each in (*list_damaged(), *list_foreign(), *list_planted(), *list_unfit(), *list_experts(), *AUTOEP):
    case, options = each.engine
    CASES.setdefault("-".join([case.home.__name__, str(case), *map(str, options.values())]), []).append(each)


@pytest.mark.parametrize("engine", CASES)
def test_refused(engine: str, engines: Engines, tmp_path: Path, subtests: pytest.Subtests) -> None:
    target, options = CASES[engine][0].engine
    loads = [case.prepare(engines, tmp_path) for case in CASES[engine]]
    outcomes = engines.load(target, *loads, **options)
    assert not list(tmp_path.glob("*/code-was-run"))
    for case, outcome in zip(CASES[engine], outcomes, strict=True):
        with subtests.test(case=str(case)):
            case.check(outcome)


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
    ],
    ids=str,
)  # fmt: skip
def test_configuration_that_cannot_be(
    dp: int, config: dict[str, Any], words: tuple[str, ...], engines: Engines
) -> None:
    """The engine is not built; ``tests/test_config.py`` has all faults."""
    plain = Case(1, dp).ds_config
    if "train_batch_size" in config:
        del plain["gradient_accumulation_steps"]
    answers = engines.worlds.get(dp).run(initialize_error, {**plain, **config})
    assert len(set(answers)) == 1
    kind, message = answers[0]
    assert kind == "ConfigError"
    for word in words:
        assert word in message
