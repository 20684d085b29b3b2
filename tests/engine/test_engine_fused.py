"""Experts in other forms: fused, AutoEP's, DeepSpeed's own, upstream's universal one; more of them and fewer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.cli import main
from deepspeed_ucp.convert import convert_checkpoint
from deepspeed_ucp.testing import WorldPool
from tests.support.covering import params
from tests.support.engines.driving import Engines, Saved
from tests.support.engines.going_on import States, join
from tests.support.upstream import to_universal

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed before 0.19 has no AutoEP")

from tests.support.engines import fused as engine_fused
from tests.support.engines.autoep import Spread
from tests.support.engines.fused import Form

OWN = "deepspeed_moe.experts.deepspeed_experts"
NATIVE = r"(?P<x>.*)\.deepspeed_moe\.experts\.deepspeed_experts"
RENAMES = [
    {"from": NATIVE + r"\.(?P<e>\d+)\.(?P<w>w[123])\.weight", "to": "{x}.experts.{w}.{e}"},
    {"from": r"(?P<x>.*)\.deepspeed_moe\.gate\.wg\.weight", "to": "{x}.router.gate.weight"},
    {
        "from": r"(?P<x>.*)\.experts\.(?P<w>w[123])\.(?P<e>\d+)",
        "to": "{x}.deepspeed_moe.experts.deepspeed_experts.{e}.{w}.weight",
    },
    {"from": r"(?P<x>.*)\.router\.gate\.weight", "to": "{x}.deepspeed_moe.gate.wg.weight"},
    {"from": NATIVE + r"\.(?P<e>\d+)\.w1\.weight", "to": "{x}.experts.gate_up_proj", "part": "1/2"},
    {"from": NATIVE + r"\.(?P<e>\d+)\.w3\.weight", "to": "{x}.experts.gate_up_proj", "part": "2/2"},
    {"from": NATIVE + r"\.(?P<e>\d+)\.w2\.weight", "to": "{x}.experts.down_proj"},
    {"from": r"(?P<x>.*)\.deepspeed_moe\.gate\.wg\.weight", "to": "{x}.gate.weight"},
    {"from": r"(?P<x>.*)\.experts\.gate_up_proj", "to": f"{{x}}.{OWN}.{{e}}.w1.weight", "part": "1/2"},
    {"from": r"(?P<x>.*)\.experts\.gate_up_proj", "to": f"{{x}}.{OWN}.{{e}}.w3.weight", "part": "2/2"},
    {"from": r"(?P<x>.*)\.experts\.down_proj", "to": f"{{x}}.{OWN}.{{e}}.w2.weight"},
    {"from": r"(?P<x>.*)\.gate\.weight", "to": "{x}.deepspeed_moe.gate.wg.weight"},
]
"""Between DeepSpeed's own layers, AutoEP's and fused ones; between the latter two the family `autoep` knows more."""

ANY = {"universal": {"patterns": {"family": "autoep", "rename": RENAMES}}}

SOURCES = [Form(2, 1, "fused"), Form(2, 3, "fused"), Form(2, 2, "autoep", ep=2), Form(2, 3, "autoep", ep=2)]
SOURCES += [Form(2, 1, "native", ep=2)]
TARGETS = [
    Form(2, 1, "autoep", ep=2),
    Form(2, 3, "autoep", ep=2),
    Form(2, 3, "fused"),
    Form(1, 1, "fused"),
    Form(2, 2, "native", ep=2),
    Form(4, 3, "autoep", ep=2),
]


@pytest.mark.parametrize(
    "target", params([(TARGETS[at],) for at in (1, 2, 4)], [(each,) for each in TARGETS], lambda row: str(row[0]))
)
def test_experts_change_their_form(target: Form, engines: Engines, subtests: pytest.Subtests) -> None:
    sources = [form for form in SOURCES if form.kind != target.kind]
    engines.go_on(target, sources, subtests, checkpoint=ANY)


def test_weights_alone_and_atomic_checkpoints_change_their_form(
    engines: Engines, ucp_worlds: WorldPool, tmp_path: Path
) -> None:
    source, target = SOURCES[2], Form(2, 3, "fused")
    saved = engines.saved(source)
    atomic = {"universal": {**ANY["universal"], "mode": "atomic", "atomic_dir": str(tmp_path)}}
    (outcome,) = engines.load(target, saved.folder, checkpoint=atomic)
    outcome.check(target, source, saved)
    weights = join(ucp_worlds.get(2).run(engine_fused.load_weights, target, saved.folder, ANY))
    check_same(weights, {key: tensor for key, tensor in saved.states.items() if key[1] == "copy"})


@pytest.mark.parametrize(("source", "target"), [(SOURCES[2], Form(2, 3, "fused")), (SOURCES[1], TARGETS[4])], ids=str)
def test_what_changed_its_form_is_the_same_to_the_command_line(
    source: Form,
    target: Form,
    engines: Engines,
    ucp_worlds: WorldPool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rules = {"family": "autoep", "rename": RENAMES}
    saved = engines.saved(source).folder
    ucp_worlds.get(2).run(engine_fused.load_and_tell, target, saved, ANY, str(tmp_path / "again"))
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    paths = [saved, str(tmp_path / "again")]
    options = ["--patterns", str(tmp_path / "rules.json"), "--only", "", "--states", "fp32,exp_avg,exp_avg_sq"]
    assert main(["diff", *paths, *options]) == 0, capsys.readouterr().out
    assert main(["diff", *paths]) == 1


def check_same(states: States, expected: States) -> None:
    assert states.keys() == expected.keys()
    for key, tensor in states.items():
        assert torch.equal(tensor, expected[key].view(tensor.shape)), key


# --- other numbers of experts

ROUTER = {"from": r".*\.router\.gate\.weight", "to": None}


def load(world: Any, form: Form, folder: str, rename: list[Any], again: Path, **arguments: Any) -> tuple[str, States]:
    checkpoint = {"universal": {"patterns": {"rename": rename}}}
    answers = world.run(engine_fused.load_and_tell, form, folder, checkpoint, str(again), **arguments)
    return " ".join(answers[0][0]), join([states for _, states in answers])


def check_experts(states: States, expected: States, source: Any) -> None:
    """Every expert is the saved one that `source` tells; what has no experts is as it was, but for routers."""
    assert {state for name, state in states if ".experts." in name} == {"copy", "fp32", "exp_avg", "exp_avg_sq"}
    for (name, state), tensor in states.items():
        stem, _, number = name.rpartition(".")
        if ".experts." in name:
            assert torch.equal(tensor, expected[f"{stem}.{source(int(number))}", state]), (name, state)
        elif ".gate." not in name and ".router." not in name:
            assert torch.equal(tensor, expected[name, state]), (name, state)


@pytest.mark.parametrize(
    ("source", "target", "expression", "choose"),
    [
        (Form(2, 2, "autoep", ep=2), Form(2, 1, "autoep", 8, ep=2), "e % 4", lambda e: e % 4),
        (Form(2, 1, "autoep", 8, ep=2), Form(2, 3, "autoep", 4, ep=2), "2 * e + 1", lambda e: 2 * e + 1),
    ],
    ids=["more", "fewer"],
)
def test_other_numbers_of_experts_take_a_rule(
    source: Form, target: Form, expression: str, choose: Any, engines: Engines, ucp_worlds: WorldPool, tmp_path: Path
) -> None:
    saved, world = engines.saved(source), ucp_worlds.get(2)
    folder, expected = saved.folder, saved.states
    (refused,) = engines.load(target, folder)
    refused.check_refused(
        f"model.layers.{{0-1}}.mlp: {source.experts} experts in the checkpoint, {target.experts} in the model",
        r'"from": "(?P<x>.*\\.experts\\.w[123])\\.{e ',
        "model.layers.0.mlp.router.gate.weight: shape",
        '"to": null',
    )
    rule = {"from": rf"(?P<x>.*\.experts\.w[123])\.{{{expression}}}", "to": "{x}.{e}"}
    told, _ = load(world, target, folder, [rule], tmp_path / "refused")
    assert "MismatchError" in told and "a row for each expert" in told
    told, states = load(world, target, folder, [rule, ROUTER], tmp_path / "again")
    assert "MismatchError" not in told
    assert ("are copies of" in told) is (target.experts > source.experts)
    left = "model.layers.{0-1}.mlp.experts.w{1-3}.{0,2,4,6}" in told
    assert left is (target.experts < source.experts)
    assert "model.layers.{0-1}.mlp.router.gate.weight keep the new model's values" in told
    check_experts(states, expected, choose)
    # The same configuration goes on once the run has saved: the rules have nothing left to do.
    target = Form(1, 1, "autoep", target.experts)
    told, again = load(ucp_worlds.get(1), target, str(tmp_path / "again"), [rule, ROUTER], tmp_path / "on")
    assert "MismatchError" not in told and "rename" not in told
    check_same(again, states)


def test_a_plain_layer_becomes_experts_by_copying(engines: Engines, ucp_worlds: WorldPool, tmp_path: Path) -> None:
    saved = engines.saved(Form(2, 1, "one"))
    folder, expected = saved.folder, saved.states
    rules = [{"from": r"(?P<x>.*)\.(?P<w>w[123])\.weight", "to": "{x}.experts.{w}.{e}"}]
    world, target = ucp_worlds.get(2), Form(2, 3, "autoep", ep=2)
    told, _ = load(world, target, folder, rules, tmp_path / "refused")
    assert "model.layers.0.mlp.router.gate.weight (4, 6): not in the checkpoint" in told
    fresh = {"from": None, "to": r".*\.router\.gate\.weight"}
    told, states = load(world, target, folder, [*rules, fresh], tmp_path / "again")
    assert "MismatchError" not in told
    assert "model.layers.{0-1}.mlp.experts.w{1-3}.{0-3} are copies of" in told
    for (name, state), tensor in states.items():
        stem, _, number = name.rpartition(".")
        if number.isdigit():
            head, _, param = stem.rpartition(".experts.")
            assert torch.equal(tensor, expected[f"{head}.{param}.weight", state]), (name, state)
        elif ".gate." not in name:
            assert torch.equal(tensor, expected[name, state]), (name, state)


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
    """By source the folder of what our converter and upstream's make of its save."""
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


@pytest.mark.parametrize(
    "target", params([(each,) for each in UPSTREAMS[1:]], [(each,) for each in UPSTREAMS], lambda row: str(row[0]))
)
def test_upstream_loads_what_we_write(
    target: Spread, autoep: dict[Spread, tuple[Path, Saved]], engines: Engines, subtests: pytest.Subtests
) -> None:
    """Upstream's loader takes no buffers."""
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


@pytest.mark.parametrize("source", params([(FOLDED[1],)], [(each,) for each in FOLDED], lambda row: str(row[0])))
def test_experts_beside_tensor_parallelism_and_of_stage_0_are_converted(
    source: Spread, engines: Engines, tmp_path: Path
) -> None:
    """Upstream's converter takes none."""
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


def test_upstream_takes_its_own_experts_at_degree_1_alone(
    engines: Engines, ucp_worlds: WorldPool, tmp_path: Path
) -> None:
    """At others it would take what is local expert 0 here for everybody's first one; what we write, it refuses."""
    source, target = Form(2, 1, "native", ep=2), Form(2, 1, "native")
    saved = engines.saved(source)
    convert_checkpoint(saved.folder, str(tmp_path / "step_universal"))
    (refused,) = engines.load(Form(2, 2, "native", ep=2), tmp_path, checkpoint=UNIVERSAL)
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


def test_other_numbers_of_experts_in_one_parameter_take_a_rule(
    engines: Engines, ucp_worlds: WorldPool, tmp_path: Path
) -> None:
    saved, world = engines.saved(Form(2, 1, "fused")), ucp_worlds.get(2)
    folder, expected = saved.folder, saved.states
    rules = [{"from": r"(?P<x>.*_proj)\.{e % 4}", "to": "{x}.{e}"}, {"from": r".*\.mlp\.gate\.weight", "to": None}]
    told, _ = load(world, Form(2, 3, "fused", 8), folder, [], tmp_path / "refused")
    assert "MismatchError" in told and r'gate_up_proj\\.{e % 4}", "to": ' in told, told
    told, states = load(world, Form(2, 3, "fused", 8), folder, rules, tmp_path / "again")
    assert "MismatchError" not in told, told
    assert "_proj.{0-7} are copies of" in told and "gate.weight keep the new model's values" in told
    check_experts(states, expected, lambda e: e % 4)
