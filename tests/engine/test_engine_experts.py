"""DeepSpeed's experts and AutoEP's under other degrees of parallelism, numbers of ranks, stages and precisions."""

from __future__ import annotations

import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.releases import find_reason
from tests.support.covering import few, params
from tests.support.engines import experts
from tests.support.engines.driver import Engines, Outcome, Row, Saved, Source, choose, convert, refuse
from tests.support.engines.experts import BELOW
from tests.support.engines.ranks import edit

Spread, Degrees = partial(experts.Spread, residual="residual"), experts.Spread
HAS_AUTOEP = find_spec("deepspeed.module_inject.auto_ep_layer") is not None
SOURCES = [
    Spread(1, 4, "bf16", (2, 2)),
    Spread(2, 4, "fp32", (2, 1), data_first=True),
    Spread(1, 2, "fp32", (1, 1)),
    Spread(1, 4, "fp32", (2, 4), shuffled=True),
    Spread(0, 4, "fp32", (4, 4)),
    Spread(0, 4, "bf16", (2, 2), data_first=True),
]
SOURCES = [each for each in SOURCES if not find_reason(f"experts/zero{each.stage}-{each.precision}")]
TARGETS = [
    Spread(1, 4, "bf16", (2, 2)),
    Spread(2, 4, "fp32", (4, 2), shuffled=True),
    Spread(2, 2, "bf16", (2, 1), data_first=True),
    Spread(1, 1, "fp32", (1, 1)),
    Spread(0, 4, "fp32", (2, 2)),
    Spread(0, 2, "bf16", (1, 1)),
]


ROWS = choose(TARGETS, SOURCES, {2: (3,), 5: (5,)} if len(SOURCES) == 6 else {0: (0, 1), 2: (2,)})
"""Stages, orders of ranks and numbers of experts per rank; below, rows into stage 1 need the plugin, too."""

# --- with tensor and pipeline parallelism

SOURCES_3D = [
    Degrees(1, 4, "bf16", tp=2, ep=2),
    Degrees(2, 4, tp=2, ep=4),
    Degrees(1, 4, tp=2, ep=2, cut=True),
    Degrees(0, 4, "bf16", tp=2, ep=4),
    Degrees(0, 4, "bf16", tp=2, ep=2, cut=True),
    Degrees(1, 4, "bf16", ep=2, pp=2),
    Degrees(0, 4, ep=2, pp=2),
    Degrees(1, 4, "bf16", tp=2, ep=1, pp=2, cut=True, fp32_grads=True),
    Degrees(1, 4, "bf16", tp=2, ep=(2, 4), shuffled=True),
]
TARGETS_3D = [
    Degrees(1, 4, "bf16", tp=2, ep=2),
    Degrees(2, 4, tp=2, ep=2, cut=True),
    Degrees(0, 4, tp=2, ep=4),
    Degrees(1, 4, "bf16", tp=2, ep=2, fp32_grads=True),
    Degrees(1, 4, "bf16", tp=2, ep=2, pp=2),
    Degrees(0, 4, tp=2, ep=1, pp=2, cut=True),
    Degrees(2, 2, "bf16", ep=2),
    Degrees(2, 4, tp=2, ep=(4, 2), shuffled=True),
    Degrees(0, 4, ep=2, pp=2),
]


def check_copies(saved: Saved, outcome: Outcome) -> None:
    """Compare the model's copies, which the files of single experts hold."""
    assert not outcome.errors, outcome.errors[0]
    copies = {key for key in saved.state if key[1] == "copy"}
    assert copies == {key for key in outcome.state if key[1] == "copy"}
    for key in copies:
        found = outcome.state[key]
        assert torch.equal(found, saved.state[key].view(found.shape).to(found.dtype)), key


ALONE = [
    Source(SOURCES_3D[place], arguments={"load_optimizer_states": False}, check=check_copies) for place in (0, 3, 4, 5)
]
"""Folded and cut experts and a pipeline."""
TURNS, BENT = Degrees(1, 4, ep=2, pp=2, turns=True, dual=True), Degrees(2, 4, "bf16", tp=2, ep=4, turns=True)
BIDIRECTIONAL = [TURNS, TURNS.but(dual=False), BENT]
ROWS += choose(TARGETS_3D, SOURCES_3D, {1: (3,), 4: (2,)}, "3d")
ROWS += [Row(TARGETS_3D[6], ALONE[3:], "weights")]
ROWS += [Row(TARGETS_3D[place], ALONE, "weights", exhaustive=True) for place in (0, 1, 4, 6)]
if not find_reason("DualPipeV"):  # always without experts, in test_engine_parallel.py
    ROWS += [Row(target, [TURNS], "DualPipeV", exhaustive=True) for target in BIDIRECTIONAL]
    ROWS += [Row(TURNS, [source], "DualPipeV", exhaustive=True) for source in BIDIRECTIONAL[1:]]

# --- AutoEP

if HAS_AUTOEP:
    from tests.support.engines.autoep import MOVED, move_experts
    from tests.support.engines.autoep import Spread as AutoEP

    SMALL, GATHERED = {"sub_group_size": 100}, {"stage3_param_persistence_threshold": 0}
    SOURCES_AUTO = [
        AutoEP(1, 4, "bf16", 2),
        AutoEP(2, 4, "fp32", 4),
        AutoEP(1, 2, "fp32", 1),
        AutoEP(3, 4, "bf16", 2),
        AutoEP(3, 2, "fp32", 1, zero=SMALL),
        AutoEP(2, 4, "bf16", 4, tp=2),
        AutoEP(3, 4, "bf16", 2, tp=2),
        AutoEP(0, 4, "fp32", 4, tp=2),
        AutoEP(0, 4, "bf16", 2),
        AutoEP(1, 4, "bf16", 2, tp=4),  # every expert has files of two tensor-parallel ranks
        AutoEP(1, 4, "fp32", 2, pp=2),
    ]
    TARGETS_AUTO = [
        AutoEP(1, 4, "bf16", 2),
        AutoEP(1, 4, "fp32", 4),
        AutoEP(2, 2, "bf16", 2),
        AutoEP(1, 1, "fp32", 1),
        AutoEP(3, 4, "bf16", 2),
        AutoEP(3, 4, "fp32", 2, data_first=True),
        AutoEP(3, 2, "fp32", 2, zero=GATHERED),
        AutoEP(1, 4, "bf16", 4, tp=2),
        AutoEP(3, 4, "fp32", 2, tp=2),
        AutoEP(0, 4, "bf16", 2, tp=2),
        AutoEP(2, 4, "fp32", 4, tp=4),
        AutoEP(0, 4, "bf16", 2, pp=2),
    ]
    NEW = not find_reason("autoep/others")
    FROM: Any = {6: (0, 7)} if NEW else dict.fromkeys(range(3), range(3))
    ROWS += choose(TARGETS_AUTO, SOURCES_AUTO, FROM)
    ROWS += choose(TARGETS_AUTO, SOURCES_AUTO, {7: (10,)})[:1] if NEW else []
    # At ZeRO 2 DeepSpeed would load rank 0's frozen experts on every rank: they are in the experts' files alone.
    FROZEN = [AutoEP(2, 2, "fp32", 2), AutoEP(1, 2, "fp32", 1)]
    ROWS += [
        Row(each, FROZEN[:1], "frozen", {"frozen": True}, compared={"direct": True}, exhaustive=each.stage == 1)
        for each in FROZEN
    ]

    def check_momentum(saved: Saved, _outcome: Outcome) -> None:
        """ZeRO 1 and 2 keep the momentum of a whole tensor if the partition contains a part of its experts."""
        assert any(state == "momentum_buffer" and ".experts." in name for name, state in saved.state)

    MUON = [
        AutoEP(1, 4, "bf16", 2, muon=True),
        AutoEP(2, 4, "bf16", 4, tp=2, muon=True),
        AutoEP(3, 2, "bf16", 2, muon=True),
        AutoEP(0, 2, "bf16", 1, muon=True),
    ]
    ROWS += [Row(MUON[0].but(world=2), [MUON[3].but(stage=2)], "momentum", check=check_momentum)]
    ROWS += [
        Row(each, MUON, "momentum", check=check_momentum, exhaustive=True)
        for each in (*MUON, AutoEP(2, 1, "bf16", 1, muon=True))
    ]


# --- where DeepSpeed's own load of the same topology would be wrong

SAME = [Spread(1, 2, ep=(2, 2)), Spread(0, 2, "bf16", (2, 2)), Spread(2, 2, "bf16", (2, 2))]


def check_reason(_saved: Saved, outcome: Outcome) -> None:
    reason = outcome.ranks[0].reason
    assert reason.startswith("same topology (") and "ep=2" in reason


for number, each in enumerate(SAME):
    ROWS += [Row(each, [each], "own", compared={"direct": False}, check=check_reason, exhaustive=number > 1)]
    # With another expert-parallel degree DeepSpeed would mix up the experts' states.
    ROWS += [Row(each.but(ep=(1, 1)), [each], "own", compared={"direct": True}, exhaustive=number > 0)]

# DeepSpeed saves tied experts twice, once with rank 0's model states, which every rank then loads. It drops a residual
# expert below a module with "expert" in its name, and cannot load its save. It matches groups by number, but their
# order changes at every start.
LOST = [
    Spread(1, 2, "fp32", (2, 2), tied=True),
    Spread(0, 2, "fp32", (1, 1), tied=True),
    Spread(1, 2, "fp32", (2, 2), residual=BELOW),
]
SHUFFLED = Spread(1, 2, "bf16", (1, 2), shuffled=True)
PAIRS = [(each, each.but(**to)) for each in LOST for to in ({}, {"stage": 2, "ep": (1, 1)}, {"stage": 0, "ep": (2, 2)})]
PAIRS += [(SHUFFLED.but(shuffled=False), SHUFFLED), (SHUFFLED, SHUFFLED.but(shuffled=False))]
ROWS += [
    Row(target, [source], f"lost-{source}", compared={"direct": True}, exhaustive=number not in (0, 4, 6, 9))
    for number, (source, target) in enumerate(PAIRS)
]

# --- a custom load needs all experts on every rank, which numbers its own from 0: all ranks would load the first ones


def check_taken(_saved: Saved, outcome: Outcome) -> None:
    assert not outcome.errors


CUSTOM = partial(
    Source,
    Spread(1, 2, "bf16", (1, 1)),
    arguments={"custom_load_fn": experts.fill, "load_optimizer_states": False},
)
ROWS += [
    Row(Spread(1, 2, "bf16", (2, 1)), [CUSTOM(check=refuse("UnsupportedError", "expert parallelism"))], "custom"),
    Row(Spread(2, 2, "fp32", (1, 1)), [CUSTOM(check=check_taken)], "custom"),
]

# --- other files


def forget_degrees(_engines: Engines, run: Path, folder: Path) -> None:
    """Write files like older releases, which do not record the degrees."""
    shutil.copytree(run, folder, dirs_exist_ok=True)
    for path in folder.rglob("mp_rank_*_model_states.pt"):
        edit(path, lambda tree: tree.pop("checkpoint_parallel_dimensions"))


REPLICAS = {"match": r".*(\.down_bias|\.wg\.weight)", "pattern": "replicate"}
convert_experts = partial(convert, patterns={"rules": [*experts.RULES["rules"], REPLICAS]})
OTHER = [(5, forget_degrees), (5, convert_experts), (7, forget_degrees), (2, convert_experts)]
ROWS += [
    Row(TARGETS_3D[6], [Source(SOURCES_3D[place], change=change)], "other files", exhaustive=number > 1)
    for number, (place, change) in enumerate(OTHER)
]
if HAS_AUTOEP:

    def move(_engines: Engines, run: Path, folder: Path) -> None:
        shutil.copytree(run, folder, dirs_exist_ok=True)
        move_experts(folder)

    def check_place(saved: Saved, outcome: Outcome) -> None:
        """Check that the placement records the rank of an expert."""
        for (name, state), tensor in saved.state.items():
            param, dot, number = name.rpartition(".")
            moved = f"{param}{dot}{MOVED[int(number)]}" if number.isdigit() else name
            assert torch.equal(outcome.state[moved, state], tensor), (name, state)

    ROWS += [Row(AutoEP(2, 2, "fp32", 2), [Source(AutoEP(3, 2, "fp32", 2), change=move, check=check_place)], "moved")]


@pytest.mark.releases
@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_states_of_experts_are_restored(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)


@pytest.mark.parametrize("precision", params(["fp32"], ["bf16"]))
def test_experts_in_one_param_group_with_all_parameters_are_restored(
    precision: str, engines: Engines, subtests: pytest.Subtests
) -> None:
    """For example, with ``AdamW(model.parameters())`` at stage 0."""
    source = Spread(0, 2, precision, (2, 2), together=True)
    saved = engines.saved(source)
    has_config = "ds_config" in torch.load(next(saved.folder.rglob("mp_rank_00_model_states.pt")), weights_only=False)
    for target in few([source, Spread(1, 2, "bf16", (2, 2)), source.but(ep=(1, 1))], 2):
        # To 0.19.2 DeepSpeed's load fails in fp32.
        ours = source != target or not (has_config or precision == "bf16")
        if target.stage == 0 or precision == "fp32":
            engines.resume(Row(target, [source], compared={"direct": ours}), subtests)
