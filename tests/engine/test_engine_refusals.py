"""Refusals: every rank raises the same error, and the engine is unchanged.

One engine of each kind refuses all its cases, one after the other, and then trains.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.covering import is_exhaustive
from tests.support.damage import flip_largest
from tests.support.engines import nvme
from tests.support.engines.cases import SMALL, Case, make_engine
from tests.support.engines.driver import STEPS, Change, Check, Engines, Outcome, Row, Saved, Source, refuse
from tests.support.engines.experts import BELOW, Spread
from tests.support.engines.kinds import Kind
from tests.support.engines.ranks import edit

ZERO0, ZERO1, ZERO3 = Case(0, 3), Case(1, 3), Case(3, 3)
BF16 = Case(2, 3, "bf16")
TO_ZERO3 = Case(3, 2)
TARGETS = {0: Case(1, 2), 1: TO_ZERO3, 2: Case(2, 2, "bf16"), 3: Case(2, 2)}
TAG, LATER = f"global_step{STEPS[0]}", STEPS[0] + 1
MODEL = "mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"

ENGINES: dict[str, tuple[Kind, dict[str, Any], list[Source]]] = {}
"""Kind, options and refused sources of each engine."""


def add(
    name: str,
    source: Kind,
    *words: str,
    change: Change | None = None,
    target: Kind | None = None,
    saved: Mapping[str, Any] | None = None,
    live: Mapping[str, Any] | None = None,
    check: Check | None = None,
    **more: Any,
) -> None:
    """Add a load that every rank refuses.

    Args:
        words: parts of the message, or types of the error.
        target: by default `TARGETS` of the source's stage.
    """
    model = SMALL if isinstance(source, Case) else {}
    kind, options = target or TARGETS[source.stage], {**model, **(live or {})}
    _, _, sources = ENGINES.setdefault(f"{kind.home} {kind!r} {options}", (kind, options, []))
    options = {**model, **(saved or {})}
    sources.append(Source(source, options, change=change, check=check or refuse(*words), name=name, **more))


# --- damage


def at(name: str, do: Callable[[Path], object]) -> Change:
    """Return a function that copies a run and changes one file."""

    def change(_engines: Engines, run: Path, folder: Path) -> None:
        shutil.copytree(run, folder, dirs_exist_ok=True)
        do(folder / TAG / name)

    return change


def swap(source: Source, name: str) -> Change:
    def change(engines: Engines, run: Path, folder: Path) -> None:
        shutil.copytree(run, folder, dirs_exist_ok=True)
        other = engines.saved(source).folder / f"global_step{source.steps[0]}"
        shutil.copy(other / name, folder / TAG / name)

    return change


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
    "empty": lambda path: os.truncate(path, 0),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "end-cut": lambda path: os.truncate(path, path.stat().st_size - 50),
    "bit-flipped": flip_largest,
    "no-zip": lambda path: path.write_bytes(b"not a checkpoint" * 100),
}


def add_damaged() -> None:
    for case, name in ((ZERO0, MODEL), (ZERO1, OPTIM.format(1)), (ZERO3, OPTIM.format(1))):
        for damage, do in DAMAGES.items():
            word = TAG if (case, damage) == (ZERO0, "missing") else name
            add(damage, case, "CheckpointError", word, change=at(name, do))
        add("unreadable-on-rank-1", case, "CheckpointError", "_states.pt", "rank 1", unreadable="_states.pt")
    for rank in (0, 2):
        name = "bf16_" + OPTIM.format(rank)
        add(f"bit-flipped-{rank}", BF16, "CheckpointError", name, change=at(name, flip_largest))
    lora = {"model": "lora", "optimizer": "adamw_uniform"}
    add("frozen parameter", ZERO1, "CheckpointError", MODEL, change=at(MODEL, flip_largest), saved=lora, live=lora)
    rename, latest = lambda path: path.write_text("global_step9"), "../latest"
    add("no-latest", ZERO1, "CheckpointError", "latest", TAG, change=at(latest, Path.unlink))
    add("missing-tag", ZERO1, "CheckpointError", "global_step9", TAG, change=at(latest, rename))
    add("no-such-tag", ZERO1, "CheckpointError", "no_such_tag", TAG, arguments={"tag": "no_such_tag"})


def add_planted() -> None:
    """Add code in files: in the same topology (DeepSpeed's load would run it) and in another."""

    def check(saved: Saved, outcome: Outcome, name: str = "") -> None:
        outcome.check_refused("UnsupportedError", name, "posix.mkdir", "trust_pickle")
        assert not (saved.folder / "code-was-run").exists()

    two = Case(1, 2)
    for case, name, target in (
        (ZERO1, MODEL, None),
        (ZERO3, f"zero_pp_rank_0_{MODEL}", None),
        (two, MODEL, two),
        (two, OPTIM.format(1), two),
        (two, MODEL, TO_ZERO3),
    ):
        add(f"code-in-{name}", case, change=at(name, plant), target=target, check=partial(check, name=name))


_ANOTHER_RULE = ("MismatchError", "like those of Adam", "RAdam", '"param_groups": "live"')


def add_unfit() -> None:
    """Add another model, param groups or optimizer; each engine loads sources of every stage.

    The states of row_mean are not element-wise at any stage: two of the sources are exhaustive.
    """
    weights, uniform = "load_optimizer_states=False", {"optimizer": "adamw_uniform"}
    unfit: list[tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any], Case]] = [
        ("renamed", ("MismatchError", "head.weight", "last.weight"), {}, {"model": "renamed"}, TO_ZERO3),
        ("deeper", ("MismatchError", "gain"), {}, {"model": "deeper"}, TARGETS[0]),
        ("wider", ("MismatchError", "first.weight", "(7, 13)", "(9, 13)"), {}, {"model": "wider"}, TARGETS[3]),
        ("lacking", ("MismatchError", "gain"), {"model": "deeper"}, {}, TO_ZERO3),
        ("momentum", ("MismatchError", "exp_avg", weights), {}, {"optimizer": "momentum"}, TO_ZERO3),
        ("lion", ("MismatchError", "exp_avg", weights), {}, {"optimizer": "lion"}, TARGETS[0]),
        ("radam", (*_ANOTHER_RULE, weights), {}, {"optimizer": "radam"}, TO_ZERO3),
        ("row_mean", ("factored", weights), {"optimizer": "row_mean"}, {"optimizer": "row_mean"}, TARGETS[3]),
        ("uniform", ("MismatchError", "group", "first.weight", "first.bias"), {}, uniform, TO_ZERO3),
    ]
    for name, words, saved, live, target in unfit:
        for case in (ZERO1, ZERO0, ZERO3)[: 1 if name == "row_mean" and not is_exhaustive() else 3]:
            add(name, case, *words, saved=saved, live=live, target=target)
    # DeepSpeed's load would accept it: its states have the same names.
    add("radam-in-the-same-topology", ZERO1, *_ANOTHER_RULE, target=ZERO1, live={"optimizer": "radam"})
    # Stage 0 saves optimizer states by position; the shapes show another order.
    add("in-another-order", ZERO0, "MismatchError", live={"reverse_groups": True})


def add_experts() -> None:
    two, later = Spread(0, 2, ep=(2, 1), residual="residual"), "expp_rank_1_mp_rank_00_optim_states.pt"
    residual = Spread(0, 2, ep=(2, 2), residual=BELOW)
    # No file records the degrees of two layers of the same shapes. In the same topology DeepSpeed's load uses their
    # order, which changes at every start.
    for target in (two, two.but(stage=1)):
        add("degrees", two, "MismatchError", "several such degrees", "load_optimizer_states=False", target=target)
    # At stage 0 in fp32 no other file has the states of the experts' optimizer, nor the residual's masters.
    alike, words = two.but(ep=(2, 2)), ("CheckpointError", f"{later}: the optimizer's step differs")
    change = swap(Source(alike, steps=(LATER, 1)), later)
    add("another-step", alike, *words, change=change, target=two.but(stage=1, precision="bf16", ep=1))
    for target in (residual, residual.but(stage=1)):
        add("lost", residual, "MismatchError", f"not in the checkpoint: layers.1.{BELOW}.mlp.", target=target)
    # DeepSpeed truncates the momentum like a padded partition, and loads rank 0's on every rank.
    elastic = nvme.Kind(1, 2, muon=True, small=True, zero={"elastic_checkpoint": True})
    add("elastic", elastic, "MismatchError", "momentum_buffer (shape", target=elastic)


def add_autoep() -> None:
    from tests.support.engines.autoep import Spread as Auto
    from tests.support.engines.autoep import move_experts

    def change_rank(path: Path) -> None:  # ZeRO 3 has no copies to compare
        edit(path, lambda tree: tree["ds_autoep_layers"][0].update(ep_rank=0))

    source, target = Auto(1, 2, "bf16", 2), Auto(1, 2, "bf16")
    words = ("CheckpointError", "its fp32 weights differ from the model states")
    add("moved", source, *words, change=at("", move_experts), target=target)
    words = ("CheckpointError", "is of expert-parallel rank 0")
    change = at("zero_pp_rank_1_mp_rank_00_model_states.pt", change_rank)
    add("another-rank", source.but(stage=3), *words, change=change, target=target)
    one, fused = Auto(2, 2, ep=2, biased=False), Auto(1, 2, kind="fused")
    more = one.but(stage=1, experts=8)
    add("number", one, "MismatchError", "{0-1}.mlp: 4 experts in the checkpoint, 8 in the model", target=more)
    add("number", fused, "MismatchError", "experts", target=more)
    add("number", fused, "MismatchError", "gate_up_proj", target=fused.but(stage=3, experts=8))


for add_all in (add_damaged, add_planted, add_unfit, add_experts):
    add_all()
if find_spec("deepspeed.module_inject.auto_ep_layer"):
    add_autoep()
ROWS = [Row(kind, sources, live=options) for kind, options, sources in ENGINES.values()]


@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_engines_refuse_invalid_checkpoints(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)


def initialize_error(ds_config: dict[str, Any]) -> tuple[str, str]:
    """Return type and message of the error of `deepspeed.initialize`, or empty strings."""
    try:
        make_engine(ds_config, "plain").destroy()
    except Exception as error:  # noqa: BLE001 - the test checks the error
        return type(error).__name__, str(error)
    return "", ""


def test_an_invalid_configuration_is_refused_by_initialize(engines: Engines) -> None:
    """``tests/test_config.py`` has all faults."""
    batch = {"train_batch_size": 8, "gradient_accumulation_steps": None, "checkpoint": {"universal": True}}
    both, typo = {"universal": True, "load_universal": True}, {"universal": {"wndow_mb": 3}}
    for dp, config, words in (
        (3, batch, ("8", "3", "6 or 9")),
        (2, {"checkpoint": both}, ("load_universal",)),
        (2, {"checkpoint": typo}, ("wndow_mb", "Did you mean 'window_mb'?")),
    ):
        given = {key: value for key, value in {**Case(1, dp).ds_config, **config}.items() if value is not None}
        answers = engines.worlds.get(dp).run(initialize_error, given)
        ((kind, message),) = set(answers)
        assert kind == "ConfigError" and all(word in message for word in words), message
