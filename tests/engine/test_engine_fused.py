"""Experts in other forms: fused, AutoEP's, upstream's universal one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.cli import main
from deepspeed_ucp.convert import convert_checkpoint
from deepspeed_ucp.testing import WorldPool
from tests.support.covering import params
from tests.support.engines.driver import Engines, Saved
from tests.support.upstream import to_universal

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed before 0.19 has no AutoEP")

from tests.support.engines.autoep import Spread
from tests.support.engines.ranks import Load, load_each


def auto(world: int, stage: int, **more: Any) -> Spread:
    return Spread(world, stage, "fp32", 2, biased=False, **more)


def fused(world: int, stage: int, **more: Any) -> Spread:
    return Spread(world, stage, "fp32", 1, kind="fused", **more)


def native(world: int, stage: int, ep: int = 2) -> Spread:
    return Spread(world, stage, "fp32", ep, kind="native")


SOURCES = [fused(2, 1), fused(2, 3), auto(2, 2), auto(2, 3)]
TARGETS = [auto(2, 1), auto(2, 3), fused(2, 3), fused(1, 1), auto(4, 3)]


@pytest.mark.parametrize("target", params(TARGETS[1:3], TARGETS, str))
def test_experts_change_their_form(target: Spread, engines: Engines, subtests: pytest.Subtests) -> None:
    sources = [form for form in SOURCES if form.kind != target.kind]
    engines.go_on(target, sources, subtests)


RENAMES = [
    {
        "from": r"(?P<x>.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<e>\d+)\.(?P<w>w[123])\.weight",
        "to": "{x}.experts.{w}.{e}",
    },
    {"from": r"(?P<x>.*)\.deepspeed_moe\.gate\.wg\.weight", "to": "{x}.router.gate.weight"},
    {
        "from": r"(?P<x>.*)\.experts\.(?P<w>w[123])\.(?P<e>\d+)",
        "to": "{x}.deepspeed_moe.experts.deepspeed_experts.{e}.{w}.weight",
    },
    {"from": r"(?P<x>.*)\.router\.gate\.weight", "to": "{x}.deepspeed_moe.gate.wg.weight"},
]
"""Between DeepSpeed's layers and AutoEP's."""


@pytest.mark.parametrize(
    ("target", "sources"),
    [(TARGETS[1], (native(2, 1),)), (native(2, 2), tuple(SOURCES[2:]))],
    ids=["autoep", "native"],
)
def test_experts_change_their_names(
    target: Spread, sources: tuple[Spread, ...], engines: Engines, subtests: pytest.Subtests
) -> None:
    engines.go_on(target, sources, subtests, checkpoint={"universal": {"patterns": {"rename": RENAMES}}})


def test_weights_alone_and_atomic_checkpoints_change_their_form(engines: Engines, tmp_path: Path) -> None:
    source, target = SOURCES[2], fused(2, 3)
    saved = engines.saved(source)
    atomic = {"universal": {"mode": "atomic", "atomic_dir": str(tmp_path)}}
    (outcome,) = engines.load(target, saved.folder, checkpoint=atomic)
    outcome.check(target, source, saved)
    (outcome,) = engines.load(target, saved.folder, arguments={"load_optimizer_states": False})
    for key in (key for key in saved.states if key[1] == "copy"):
        assert torch.equal(outcome.states[key], saved.states[key].view(outcome.states[key].shape)), key


def test_what_changed_its_form_is_the_same_to_the_command_line(
    engines: Engines, ucp_worlds: WorldPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, again = engines.saved(SOURCES[2]).folder, str(tmp_path / "again")
    ucp_worlds.get(2).run(load_each, fused(2, 3).training(77), [Load(saved, again=again)], read=id)
    for paths in ([saved, again], [again, saved]):
        options = ["--only", "", "--states", "fp32,exp_avg,exp_avg_sq"]
        assert main(["diff", *paths, *options]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (SOURCES[2], auto(2, 1, experts=8), "{0-1}.mlp: 4 experts in the checkpoint, 8 in the model"),
        (auto(2, 1, experts=8), TARGETS[1], "{0-1}.mlp: 8 experts in the checkpoint, 4 in the model"),
        (SOURCES[2], fused(2, 1, experts=8), "experts"),
        (SOURCES[0], auto(2, 1, experts=8), "experts"),
        (SOURCES[0], fused(2, 3, experts=8), "gate_up_proj"),
    ],
    ids=["more", "fewer", "more-fused", "fused-more", "both-fused"],
)
def test_other_experts_are_refused(source: Spread, target: Spread, words: str, engines: Engines) -> None:
    (refused,) = engines.load(target, engines.saved(source).folder)
    refused.check_refused("MismatchError", words)


# --- upstream's universal form

UNIVERSAL = {"universal": False, "load_universal": True}
AUTOEP = [Spread(4, 1, "bf16", 2), Spread(4, 2, "bf16", 2, data_first=True), Spread(2, 3, "fp32", 1)]
if os.environ.get("UCP_EXHAUSTIVE"):
    AUTOEP += [
        Spread(4, 2, "fp32", 4),
        Spread(4, 3, "bf16", 2),
        Spread(2, 3, "fp32", 1, options=(("sub_group_size", 100),)),
    ]
UPSTREAMS = [Spread(4, 1, "bf16", 4), Spread(2, 2, "fp32", 2), Spread(4, 3, "bf16", 2)]


@pytest.fixture(scope="module")
def autoep(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> dict[Spread, tuple[Path, Saved]]:
    """Convert each source with our converter and upstream's. Returns the folders and the saved runs."""
    found = {}
    for spread in AUTOEP:
        folder, saved = tmp_path_factory.mktemp("autoep"), engines.saved(spread)
        (folder / "ours").mkdir()
        convert_checkpoint(str(find_tag(saved)), str(folder / "ours" / "step_universal"))
        to_universal(find_tag(saved), folder / "theirs" / "step_universal")
        (folder / "theirs" / "latest_universal").write_text("step_universal")
        found[spread] = folder, saved
    return found


def find_tag(saved: Saved) -> Path:
    folder = Path(saved.folder)
    return folder / (folder / "latest").read_text().strip()


def test_our_files_are_upstreams(autoep: dict[Spread, tuple[Path, Saved]]) -> None:
    """Keys and values; the moments of every expert among them."""
    for spread, (folder, _) in autoep.items():
        theirs = sorted((folder / "theirs").rglob("zero/*experts*/*.pt"))
        assert len(theirs) == 2 * 3 * 4 - (spread.stage == 3) * 6  # of ZeRO 3 the step is elsewhere
        for path in theirs:
            have = torch.load(folder / "ours" / path.relative_to(folder / "theirs"), weights_only=False)
            want = torch.load(path, weights_only=False)
            if isinstance(want, dict):
                assert torch.equal(have.pop("param"), want.pop("param")), path
            assert have == want, path


@pytest.mark.parametrize("target", params(UPSTREAMS[1:], UPSTREAMS, str))
def test_upstream_loads_what_we_write(
    target: Spread, autoep: dict[Spread, tuple[Path, Saved]], engines: Engines, subtests: pytest.Subtests
) -> None:
    """Upstream does not load buffers."""
    rows = {spread: each for spread, each in autoep.items() if (spread.stage == 3) == (target.stage == 3)}
    outcomes = engines.load(target, *(folder / "ours" for folder, _ in rows.values()), checkpoint=UNIVERSAL)
    for (source, (_, saved)), outcome in zip(rows.items(), outcomes, strict=True):
        with subtests.test(source=str(source)):
            outcome.check(target, source, saved, direct=False, buffers=False)


FOLDED = [
    Spread(4, 1, "fp32", 2, tp=2),
    Spread(4, 0, "fp32", 4, tp=2),
    Spread(4, 0, "bf16", 2),
    Spread(4, 2, "bf16", 4, tp=4),
    Spread(4, 3, "bf16", 2, tp=2),
]


@pytest.mark.parametrize("source", params(FOLDED[1:2], FOLDED, str))
def test_experts_beside_tensor_parallelism_and_of_stage_0_are_converted(
    source: Spread, engines: Engines, tmp_path: Path
) -> None:
    """Upstream's converter supports neither."""
    target, saved = Spread(2, 3, "fp32", 2), engines.saved(source)
    out = str(tmp_path / "step_universal")
    convert_checkpoint(str(find_tag(saved)), out, groups=None if source.stage else "module")
    (outcome,) = engines.load(target, tmp_path)
    outcome.check(target, source, saved)


def test_the_command_line_knows_both_writers(
    autoep: dict[Spread, tuple[Path, Saved]], capsys: pytest.CaptureFixture[str]
) -> None:
    for spread, (folder, saved) in autoep.items():
        tag = str(find_tag(saved))
        for by in ("ours", "theirs"):
            universal = str(folder / by / "step_universal")
            assert main(["diff", tag, universal, "--states", "fp32,exp_avg,exp_avg_sq"]) == 0, (spread, by)
            assert main(["verify", universal]) == 0, (spread, by)
            capsys.readouterr()
            assert main(["inspect", universal, "--param", "model.layers.0.mlp.experts.w1.3"]) == 0
            assert "5, 6" in capsys.readouterr().out.replace("×", ",").replace(" x ", ", ")


def test_upstream_takes_its_own_experts_at_degree_1_alone(engines: Engines, tmp_path: Path) -> None:
    """At other degrees it would load local expert 0 on every rank; it refuses our files."""
    source, target = native(2, 1), native(2, 1, ep=1)
    saved = engines.saved(source)
    convert_checkpoint(saved.folder, str(tmp_path / "step_universal"))
    (refused,) = engines.load(native(2, 2), tmp_path, checkpoint=UNIVERSAL)
    refused.check_refused("AssertionError: Expert param dim 0")
    (outcome,) = engines.load(target, tmp_path, checkpoint=UNIVERSAL)
    outcome.check(target, source, saved, direct=False)


EITHER = [(Spread(2, 1, "fp32", 2), "ours"), (Spread(4, 3, "bf16", 4), "theirs")]
ALL = [(target, by) for target, _ in EITHER for by in ("ours", "theirs")]


@pytest.mark.parametrize(("target", "by"), params(EITHER, ALL, lambda row: f"{row[0]}-{row[1]}"))
def test_we_load_what_either_wrote(
    target: Spread, by: str, autoep: dict[Spread, tuple[Path, Saved]], engines: Engines, subtests: pytest.Subtests
) -> None:
    outcomes = engines.load(target, *(folder / by for folder, _ in autoep.values()))
    for (source, (_, saved)), outcome in zip(autoep.items(), outcomes, strict=True):
        with subtests.test(source=str(source)):
            outcome.check(target, source, saved, direct=True)
