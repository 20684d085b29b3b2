"""Experts in all forms: fused, of AutoEP, of DeepSpeed, in upstream's universal format, and in models of the hub."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
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
from tests.support.covering import few
from tests.support.engines.driver import (
    UPSTREAM,
    Engines,
    Outcome,
    Row,
    Saved,
    Source,
    convert,
    convert_upstream,
    refuse,
)
from tests.support.engines.ranks import Load

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed before 0.19 has no AutoEP")

from tests.support.engines.autoep import Spread

auto = partial(Spread, ep=2, biased=False)
fused, native = partial(Spread, kind="fused"), partial(Spread, ep=2, kind="native")

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

# --- upstream's universal form

AUTOEP = [
    Spread(1, 4, "bf16", 2),
    Spread(2, 4, "bf16", 2, data_first=True),
    Spread(2, 4, ep=4),
    Spread(3, 2),
    Spread(3, 4, "bf16", 2),
    Spread(3, 2, zero={"sub_group_size": 100}),
]


def list_universal() -> Iterator[Row]:
    """Yield rows of both loaders from our conversions and upstream's."""
    sources, two, three = few(AUTOEP, 2), Spread(1, 2, ep=2), Spread(3, 2, "bf16", 2)
    ours = partial(Row, name="universal", compared={"direct": True})
    theirs = partial(Row, name="upstream", compared={"direct": False, "buffers": False})
    yield ours(two, [Source(each, change=convert) for each in sources])
    yield ours(three, [Source(each, change=convert_upstream) for each in sources])
    # Upstream loads our files without buffers, and not between ZeRO 3 and other stages.
    for target in (Spread(2, 2, ep=2), Spread(3, 4, "bf16", 2), Spread(1, 4, "bf16", 4)):
        chosen = [Source(each, change=convert) for each in sources if (each.stage == 3) == (target.stage == 3)]
        yield theirs(target.but(config=UPSTREAM), chosen, exhaustive=target.stage != 2)
    # Upstream's converter supports neither experts at stage 0 nor under tensor parallelism.
    stage0 = Source(Spread(0, 4, ep=4, tp=2), change=partial(convert, groups="module"))
    yield Row(Spread(3, 2, ep=2), [stage0, *few([Source(Spread(3, 4, "bf16", 2, tp=2), change=convert)], 0)], "folded")
    # Upstream would load the native local expert 0 on every rank, and refuses our files, except at degree 1.
    check = refuse("AssertionError: Expert param dim 0", changed=True)
    yield theirs(native(1, 2).but(config=UPSTREAM), [Source(native(1, 2), change=convert, check=check)])
    yield theirs(native(1, 2, ep=1).but(config=UPSTREAM), [Source(native(1, 2), change=convert)])


ROWS += list_universal()


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


def test_converted_files_of_experts_equal_upstreams(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and values are equal, including the moments of every expert. The commands read both."""
    for spread in few(AUTOEP, 2):
        tag = find_checkpoint(str(engines.saved(spread).folder))
        folders = [engines.saved(Source(spread, change=each)).folder for each in (convert, convert_upstream)]
        theirs = sorted(folders[1].rglob("zero/*experts*/*.pt"))
        assert len(theirs) == 2 * 3 * 4 - (spread.stage == 3) * 6  # of ZeRO 3 the step is elsewhere
        for path in theirs:
            have = torch.load(folders[0] / path.relative_to(folders[1]), weights_only=False)
            want = torch.load(path, weights_only=False)
            if isinstance(want, dict):
                assert torch.equal(have.pop("param"), want.pop("param")), path
            assert have == want, path
        for folder in folders:
            universal = str(folder / "step_universal")
            assert main(["diff", tag, universal, "--states", "fp32,exp_avg,exp_avg_sq"]) == 0
            assert main(["verify", universal]) == 0
            capsys.readouterr()
            assert main(["inspect", universal, "--param", "model.layers.0.mlp.experts.w1.3"]) == 0
            assert "5, 6" in capsys.readouterr().out.replace("×", ",").replace(" x ", ", ")


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
