"""Experts in all forms: fused, of AutoEP, of DeepSpeed, in upstream's universal format, and in models of the hub."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.cli import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.export.safetensors import export_safetensors
from deepspeed_ucp.export.tensors import ExportOptions
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.latest import find_checkpoint
from tests.support.conversion import convert_checkpoint
from tests.support.covering import is_exhaustive, params
from tests.support.engines.driver import Engines, Outcome, Row, Saved, Source
from tests.support.engines.ranks import Load
from tests.support.upstream import to_universal

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed before 0.19 has no AutoEP")

from tests.support.engines.autoep import Spread


def auto(stage: int, world: int, **more: Any) -> Spread:
    return Spread(stage, world, ep=2, biased=False, **more)


def fused(stage: int, world: int, **more: Any) -> Spread:
    return Spread(stage, world, kind="fused", **more)


def native(stage: int, world: int, ep: int = 2) -> Spread:
    return Spread(stage, world, ep=ep, kind="native")


EXPERT = r"(?P<x>.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<e>\d+)\.(?P<w>w[123])\.weight"
NAMES = {
    EXPERT: "{x}.experts.{w}.{e}",
    r"(?P<x>.*)\.deepspeed_moe\.gate\.wg\.weight": "{x}.router.gate.weight",
    r"(?P<x>.*)\.experts\.(?P<w>w[123])\.(?P<e>\d+)": "{x}.deepspeed_moe.experts.deepspeed_experts.{e}.{w}.weight",
    r"(?P<x>.*)\.router\.gate\.weight": "{x}.deepspeed_moe.gate.wg.weight",
}
RENAMED = {"patterns": {"rename": [{"from": saved, "to": live} for saved, live in NAMES.items()]}}
"""Between DeepSpeed's layers and AutoEP's."""


def check_copies(saved: Saved, outcome: Outcome) -> None:
    for key in (key for key in saved.state if key[1] == "copy"):
        assert torch.equal(outcome.state[key], saved.state[key].view(outcome.state[key].shape)), key


SOURCES = [fused(1, 2), fused(3, 2), auto(2, 2), auto(3, 2)]
TARGETS = [auto(1, 2), auto(3, 2), fused(3, 2), fused(1, 1), auto(3, 4)]
WEIGHTS = Source(SOURCES[2], arguments={"load_optimizer_states": False}, check=check_copies)
ROWS = [
    Row(target, [form for form in SOURCES if form.kind != target.kind], exhaustive=number != 1)
    for number, target in enumerate(TARGETS)
]
ROWS += [
    Row(fused(3, 2), [WEIGHTS], "weights"),
    Row(TARGETS[1].on(**RENAMED), [native(1, 2)]),
    Row(native(2, 2).on(**RENAMED), SOURCES[2:]),
]


@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_experts_load_in_another_form(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)


def test_a_load_of_experts_in_another_form_and_a_save_have_no_difference(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The load is through an atomic checkpoint, and the save follows it directly."""
    saved, again = engines.saved(SOURCES[2]), str(tmp_path / "again")
    target = fused(3, 2).on(mode="atomic", atomic_dir=str(tmp_path / "atomic"))
    (outcome,) = engines.load(target, Load(str(saved.folder), again=again, steps=2))
    outcome.check(saved, direct=True)
    for paths in ([str(saved.folder), again], [again, str(saved.folder)]):
        options = ["--only", "", "--states", "fp32,exp_avg,exp_avg_sq"]
        assert main(["diff", *paths, *options]) == 0, capsys.readouterr().out


# --- upstream's universal form

UNIVERSAL = {"checkpoint": {"universal": False, "load_universal": True}}
AUTOEP = [Spread(1, 4, "bf16", 2), Spread(3, 2)]
if is_exhaustive():
    AUTOEP += [
        Spread(2, 4, "bf16", 2, data_first=True),
        Spread(2, 4, ep=4),
        Spread(3, 4, "bf16", 2),
        Spread(3, 2, zero={"sub_group_size": 100}),
    ]
Converted = list[tuple[Path, Saved]]


@pytest.fixture(scope="module")
def autoep(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Convert each source with our converter and upstream's. Return the folders and the saved runs."""
    found = []
    for spread in AUTOEP:
        folder, saved = tmp_path_factory.mktemp("autoep"), engines.saved(spread)
        (folder / "ours").mkdir()
        convert_checkpoint(find_checkpoint(str(saved.folder)), str(folder / "ours" / "step_universal"))
        to_universal(Path(find_checkpoint(str(saved.folder))), folder / "theirs" / "step_universal")
        (folder / "theirs" / "latest_universal").write_text("step_universal")
        found.append((folder, saved))
    return found


def test_converted_files_of_experts_equal_upstreams(autoep: Converted, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and values are equal, including the moments of every expert. The commands read both."""
    for folder, saved in autoep:
        theirs = sorted((folder / "theirs").rglob("zero/*experts*/*.pt"))
        assert len(theirs) == 2 * 3 * 4 - (saved.kind.stage == 3) * 6  # of ZeRO 3 the step is elsewhere
        for path in theirs:
            have = torch.load(folder / "ours" / path.relative_to(folder / "theirs"), weights_only=False)
            want = torch.load(path, weights_only=False)
            if isinstance(want, dict):
                assert torch.equal(have.pop("param"), want.pop("param")), path
            assert have == want, path
        for by in ("ours", "theirs"):
            universal = str(folder / by / "step_universal")
            assert (
                main(["diff", find_checkpoint(str(saved.folder)), universal, "--states", "fp32,exp_avg,exp_avg_sq"])
                == 0
            ), by
            assert main(["verify", universal]) == 0, (folder, by)
            capsys.readouterr()
            assert main(["inspect", universal, "--param", "model.layers.0.mlp.experts.w1.3"]) == 0
            assert "5, 6" in capsys.readouterr().out.replace("×", ",").replace(" x ", ", ")


BY_US = [(Spread(1, 2, ep=2), "ours", True), (Spread(3, 2, "bf16", 2), "theirs", True)]
UPSTREAM = [(each, "ours", False) for each in (Spread(2, 2, ep=2), Spread(3, 4, "bf16", 2), Spread(1, 4, "bf16", 4))]
MORE = [(BY_US[0][0], "theirs", True), (BY_US[1][0], "ours", True), *UPSTREAM]


@pytest.mark.parametrize(
    ("target", "by", "direct"), params([*BY_US, UPSTREAM[0]], MORE, lambda row: "-".join(map(str, row)))
)
def test_both_loaders_load_the_conversions_of_both(
    target: Spread, by: str, direct: bool, autoep: Converted, engines: Engines, subtests: pytest.Subtests
) -> None:
    """Upstream loads our files without buffers, and not between ZeRO 3 and other stages."""
    rows = [each for each in autoep if direct or (each[1].kind.stage == 3) == (target.stage == 3)]
    kind = target if direct else target.but(config=UNIVERSAL)
    for (folder, saved), outcome in zip(rows, engines.load(kind, *(each / by for each, _ in rows)), strict=True):
        with subtests.test(source=str(saved.kind), folder=str(folder)):
            outcome.check(saved, direct=direct, buffers=direct)


FOLDED = [
    Spread(1, 4, ep=2, tp=2),
    Spread(0, 4, ep=4, tp=2),
    Spread(0, 4, "bf16", 2),
    Spread(3, 4, "bf16", 2, tp=2),
]


@pytest.mark.parametrize("source", params(FOLDED[1:2], FOLDED, str))
def test_experts_under_tp_or_at_stage_0_are_converted(source: Spread, engines: Engines, tmp_path: Path) -> None:
    """Upstream's converter supports neither."""
    saved, out = engines.saved(source), str(tmp_path / "step_universal")
    convert_checkpoint(find_checkpoint(str(saved.folder)), out, groups=None if source.stage else "module")
    (outcome,) = engines.load(Spread(3, 2, ep=2), tmp_path)
    outcome.check(saved)


def test_upstream_loads_converted_native_experts_only_at_degree_1(engines: Engines, tmp_path: Path) -> None:
    """At other degrees it would load local expert 0 on every rank. It refuses our files."""
    saved = engines.saved(native(1, 2))
    convert_checkpoint(str(saved.folder), str(tmp_path / "step_universal"))
    (refused,) = engines.load(native(1, 2).but(config=UNIVERSAL), tmp_path)
    refused.check_refused("AssertionError: Expert param dim 0", changed=True)
    (outcome,) = engines.load(native(1, 2, ep=1).but(config=UNIVERSAL), tmp_path)
    outcome.check(saved, direct=False)


# --- models of the hub: training under AutoEP, export under the hub's names, loads without it

NAMES: dict[str, tuple[int, Any]] = {
    "mixtral": (2, {"stage": 3}),
    "deepseek": (1, {"stage": 2, "ep": 2}),
}
"""By model the ZeRO stage of training, and the stage and expert-parallel degree of a new run."""

CLOSE = {"rtol": 0, "atol": 1e-6}  # AutoEP sums an expert's tokens in another order


@pytest.fixture(scope="module")
def hub() -> Any:
    """Import the models late: every worker collects this module, and the import takes seconds."""
    pytest.importorskip("transformers", minversion="5.0", reason="AutoEP knows transformers' fused experts alone")
    return importlib.import_module("tests.support.engines.hub")


@pytest.mark.parametrize("name", NAMES)
def test_an_autoep_runs_export_is_a_model_of_the_hub(hub: Any, name: str, engines: Engines, tmp_path: Path) -> None:
    stage, begun = NAMES[name]
    trained, _ = engines.save(hub.Kind(stage, model=name, ep=2), tmp_path).state
    index = open_checkpoint(str(next(tmp_path.glob("global_step*"))), Comm(), Naming(weights_only=stage == 3))
    kind, config = hub.MODELS[name]
    config.save_pretrained(tmp_path / "hf")
    export_safetensors(index, str(tmp_path / "out"), options=ExportOptions(), like=str(tmp_path / "hf"))
    model, info = kind.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model.eval()(input_ids=hub.TOKENS).logits
    torch.testing.assert_close(logits, trained, **CLOSE)
    _, dense = load_model(engines, hub.Kind(1, 1, model=name), tmp_path)
    exported = model.state_dict()
    assert dense.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[key]) for key, tensor in dense.items())
    again, _ = load_model(engines, hub.Kind(model=name, **begun), tmp_path / "out")  # with names of the hub
    torch.testing.assert_close(again, trained, **CLOSE)


def load_model(engines: Engines, kind: Any, folder: Path) -> Any:
    (outcome,) = engines.load(kind, Load(str(folder)))
    assert not outcome.errors, outcome.errors[0]
    return outcome.state


def test_all_stages_of_a_pipeline_read_a_hub_model_equally(hub: Any, engines: Engines) -> None:
    """Only one stage contains the model with rename rules, but all ranks must read the checkpoint equally."""
    folder = str(engines.save(hub.Stages(1), steps=(1,), after=0).folder)
    refused, taken = engines.load(hub.Stages(0), Load(folder), Load(folder, {"load_module_strict": False}))
    refused.check_refused("MismatchError", "0.bert.embeddings.position_ids: in the checkpoint, not in the model")
    assert not taken.errors and [local.state for local in taken.ranks] == [1, 1]
