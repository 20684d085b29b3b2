"""Loads and exports of modules with another order, another state dict, shared parts or another vocabulary."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from safetensors.torch import load_file
from torch import Tensor, nn

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.testing.capture import CapturedEngine, CapturedParameter
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.support.covering import is_exhaustive, params
from tests.support.damage import flip_largest
from tests.support.engines.cases import Built, Case, Idle, compute_loss, make_engine, train_engine
from tests.support.engines.driver import STEPS, Engines, Outcome, Row, Saved
from tests.support.engines.kinds import ON_CPU, take_step
from tests.support.engines.ranks import Load
from tests.support.exports import check_same, read_all

# --- stage 0 in the saved topology: DeepSpeed's load matches by position, which fits only the saved order

RENAMED = {"patterns": {"rename": [{"from": r"(?P<x>[abc])\.(?P<y>.*)", "to": "{x}{x}.{y}"}]}}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stage_0_states_follow_names_if_the_order_of_layers_changes(precision: str, engines: Engines) -> None:
    case, options = Case(0, 1, precision), {"optimizer": "adamw_uniform"}
    saved = engines.saved(case, model="b a c", **options)
    (same,) = engines.load(case, saved, model="b a c", **options)
    same.check(saved)
    (moved,) = engines.load(case, saved, model="a b c", **options)
    moved.check(saved, direct=True)
    assert "parameter order" in moved.ranks[0].reason
    renamed, parameters = replace(saved), saved.state.parameters
    renamed.state = replace(saved.state, parameters={name[0] + name: each for name, each in parameters.items()})
    (outcome,) = engines.load(case.on(**RENAMED), saved, model="bb aa cc", **options)
    outcome.check(renamed, direct=True, least=12)
    (idle,) = engines.load(Idle(0, 1, precision), Load(str(saved.folder)), model="c b a")
    idle.check(saved, direct=True, optimizer_states=False)


# --- models whose state dict renames tensors of the module, and has additional ones

BLOCKS = 4


class Quantized(nn.Module):
    """A frozen weight of bytes, like Linear4bit, with scales that only the state dict contains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8 * BLOCKS, 1, dtype=torch.uint8), requires_grad=False)
        self.absmax = torch.ones(BLOCKS)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax if keep_vars else self.absmax.detach()
        header = json.dumps({"blocks": BLOCKS}).encode()
        destination[f"{prefix}weight.quant_state"] = torch.tensor(list(header), dtype=torch.uint8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.absmax.mean().to(x.dtype) * 1e-3


def make_body(*, bytes_first: bool) -> nn.Module:
    """Make a module whose state dict renames the norm, by a hook."""
    first = [("base", Quantized()), ("up", nn.Linear(6, 10))]
    others = {"norm": nn.BatchNorm1d(10), "frozen": nn.Linear(10, 6).requires_grad_(False)}
    body = nn.Sequential(OrderedDict([*first[:: 1 if bytes_first else -1], *others.items()]))
    body._register_state_dict_hook(_rename)
    return body


def _rename(module: Any, state: Any, prefix: str, metadata: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}norm.")]:
        state[key.replace(f"{prefix}norm.", f"{prefix}bn.")] = state.pop(key)


class WithHead(nn.Module):
    """A value head around a model. The state dict has the model's names without a prefix."""

    def __init__(self, *, bytes_first: bool) -> None:
        super().__init__()
        self.pretrained = make_body(bytes_first=bytes_first)
        self.v_head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.v_head(self.pretrained(x)).float().square().mean()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = self.pretrained.state_dict(*args, **kwargs)
        for key, value in self.v_head.state_dict(*args, **kwargs).items():
            found[f"v_head.{key}"] = value
        return found


class Whole(Built):
    """An engine of a module whose output is its loss; the state is the state dict."""

    @staticmethod
    def step(engine: Any) -> float:
        torch.manual_seed(10 * engine.global_steps)
        return take_step(engine, engine(torch.randn(4, 6).to(engine.device)))

    @staticmethod
    def read(engine: Any) -> dict[str, Tensor]:
        params = list(engine.module.parameters())
        with GatheredParameters(params, enabled=engine.zero_optimization_stage() == 3):
            return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}

    def join(self, ranks: Sequence[Any]) -> dict[str, Tensor]:
        return ranks[0].state

    def compare(self, saved: Any, loaded: Any, **options: Any) -> tuple[int, list[str]]:
        assert saved.keys() == loaded.keys()
        return len(saved), [name for name, value in saved.items() if not torch.equal(loaded[name], value)]


class Heads(Whole):
    """An engine of `WithHead`."""

    def build(self) -> nn.Module:
        module = WithHead(bytes_first=self.stage < 3)  # ZeRO 3 uses the first parameter's dtype as the model's
        module.pretrained.base.absmax.copy_(torch.rand(BLOCKS) + torch.rand(()))
        module.pretrained.base.weight.data.copy_(torch.randint(256, (8 * BLOCKS, 1)))
        return module


def check_warnings(_saved: Saved, outcome: Outcome) -> None:
    assert not [text for text in outcome.list_messages("WARNING") if "differs" not in text]


# ZeRO 0 to 2 fill the same whole tensors; ZeRO 3 fills partitions.
Direct = partial(Row, compared={"direct": True, "losses": False}, check=check_warnings)
ROWS = [
    Direct(Heads(target).on(same_topology="direct"), [Heads(source) for source in sources], exhaustive=target in (0, 2))
    for target, sources in {3: (0, 1, 3), 1: (3,), 2: (1,), 0: (2,)}.items()
]


@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_modules_with_their_own_state_dict_are_restored(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    """This includes trained and frozen weights, statistics, counters, and scales of quantized weights."""
    engines.resume(row, subtests)


def evaluate_after_fit(folder: str) -> tuple[list[float], float]:
    """Load into an evaluating engine around a further trained module. Return two losses and the expected one."""
    engine = make_engine(Case(3, 2).ds_config, "plain")
    train_steps(train_engine(engine), 2)
    engine.save_checkpoint(folder)
    expected = evaluate(engine)
    engine.module.train()
    train_steps(train_engine(engine), 2)
    tester = deepspeed.initialize(model=engine.module, config=Case(3, 2).on().ds_config)[0]
    tester.module.eval()
    tester.load_checkpoint(folder, load_optimizer_states=False)
    found = [evaluate(tester), evaluate(tester)]
    tester.destroy()
    engine.destroy()
    return found, expected


@torch.no_grad()
def evaluate(engine: Any) -> float:
    engine.module.eval()
    return compute_loss(engine).item()


def test_a_load_into_an_evaluating_engine_updates_gathered_parameters(engines: Engines, tmp_path: Path) -> None:
    """ZeRO 3 keeps small parameters gathered. The engine's module has trained before."""
    for found, expected in engines.worlds.get(2).run(evaluate_after_fit, str(tmp_path)):
        assert found == [expected, expected]


# --- modules that a model registers under several names, in exports


class Net(nn.Module):
    """Two names of a block, a norm and a weight; ``unclear``: the first one may be of either of two siblings."""

    def __init__(self, *, unclear: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        if unclear:
            self.other = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.again = self.layer
        self.norm = nn.BatchNorm1d(6)
        self.second_norm = self.norm
        self.embed, self.head = (nn.Linear(6, 6, bias=False) for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.embed(self.second_norm(self.again(self.norm(self.layer(x)))))).square().mean()


@dataclass(frozen=True)
class Shared(Whole):
    unclear: bool = False

    def build(self) -> nn.Module:
        return Net(unclear=self.unclear)


AGAIN = [f"again.{layer}.{kind}" for layer in (0, 1) for kind in ("bias", "weight")]


def export(folder: Path, name: str, kind: str) -> Path:
    """Export the checkpoint of this name below a folder."""
    out = folder / f"{name}-{kind}"
    assert main(["export", str(folder / name), str(out), "--to", kind]) == 0
    return out


@pytest.mark.parametrize("stage", params([1, 3], [2]))
def test_exports_have_every_name_of_a_shared_module(tmp_path: Path, engines: Engines, stage: int) -> None:
    """The names equal those of torch's state dict. Hugging Face's files contain each tensor once."""
    held = engines.save(Shared(stage), tmp_path / "it", steps=(1,)).state
    assert main(["convert", str(tmp_path / "it/global_step1"), str(tmp_path / "atomic/global_step1")]) == 0
    for name in ("it", "atomic"):
        check_same(read_all(export(tmp_path, name, "dcp"))["model"], held)
        once = load_file(export(tmp_path, name, "hf") / "model.safetensors")
        check_same(once, {key: held[key] for key in once})
        ties = {"head.weight", *(key for key in held if key.startswith(("again.", "second_norm.")))}
        assert once.keys() == held.keys() - ties


def test_an_export_logs_names_that_zero_3_does_not_record(
    tmp_path: Path, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    held = engines.save(Shared(3, 1, unclear=True), tmp_path / "it", steps=(1,)).state
    written, warnings = read_all(export(tmp_path, "it", "dcp"))["model"], capsys.readouterr().err
    assert held.keys() - written.keys() == {*AGAIN}
    assert torch.equal(written["second_norm.weight"], held["second_norm.weight"])
    assert "again.0.bias" in warnings and "are not written" in warnings


# --- vocabularies of another size

WORDS, WIDER = 11, 14
"""Rows of the saved vocabulary, the only ones that batches and losses use, and of a larger one."""

VOCABULARY = r"(embed|head)\..*"
LIVE = {"resize": [{"match": VOCABULARY, "new": "live"}]}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Speaker(nn.Module):
    """Tokens to scores of tokens."""

    def __init__(self, rows: int, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, rows)
        if tied:
            self.head.weight = self.embed.weight
        for each in (self.embed, self.head) if frozen else ():
            each.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@dataclass(frozen=True)
class Vocabulary(Built):
    """An engine of a `Speaker`: rows of its vocabulary, and rules for them."""

    rows: int = WORDS
    patterns: Any = None

    @property
    def universal(self) -> Any:
        return {"patterns": self.patterns} if self.patterns else None

    def find_tolerance(self, source: Any) -> float | None:
        return {"fp32": 1e-6, "fp16": 2e-2, "bf16": 5e-2}[self.precision]

    def build(self, **options: bool) -> nn.Module:
        return Speaker(self.rows, **options)

    @staticmethod
    def step(engine: Any) -> float:
        """Train on the saved vocabulary."""
        generator = torch.Generator().manual_seed(engine.global_steps)
        batch = torch.randint(WORDS, (60, 5), generator=generator).chunk(dist.get_world_size())[dist.get_rank()]
        scores = engine(batch[:, :4])
        return take_step(engine, nn.functional.cross_entropy(scores[:, :WORDS].float(), batch[:, 4]))


def check_losses(saved: Saved, outcome: Outcome) -> None:
    assert outcome.losses == pytest.approx(saved.losses, rel=outcome.kind.find_tolerance(saved.kind))


def list_states(parameter: CapturedParameter) -> dict[str, Tensor]:
    assert parameter.fp32 is not None
    return {"fp32": parameter.fp32, **parameter.tensors}


def grow(saved: CapturedEngine, live: CapturedEngine) -> dict[str, dict[str, Tensor]]:
    """Return masters and states of a larger vocabulary, by name: new rows keep the live masters, and have no states."""
    found = {name: list_states(each) for name, each in saved.parameters.items()}
    for name in (name for name in found if name.startswith(("embed", "head"))):
        for state, value in found[name].items():
            new = torch.zeros(WIDER - WORDS, *value.shape[1:])
            if state == "fp32":
                new = list_states(live.parameters[name])[state][WORDS:]
            found[name][state] = torch.cat([value, new])
    return found


def check(state: CapturedEngine, wanted: Mapping[str, Mapping[str, Tensor]], precision: str) -> None:
    assert state.parameters.keys() == wanted.keys()
    for name, each in state.parameters.items():
        check_same(list_states(each), dict(wanted[name]))
        check_same({"value": each.value}, {"value": wanted[name]["fp32"].to(DTYPES[precision])})
        assert each.scalars["step"] == STEPS[0]


def test_a_vocabulary_grows_at_every_stage(tmp_path: Path, engines: Engines) -> None:
    """New rows keep the live model's values, also in an engine that has trained, and after a failed load.

    ``tests/load/test_reshard_patterns.py`` has the other rules, and tensor parallelism. Whole and partitioned masters
    always run.
    """
    tied = {"tied": True}
    damaged, saved = tmp_path / "damaged", engines.saved(Vocabulary(1), **tied)
    shutil.copytree(saved.folder, damaged)
    flip_largest(next(damaged.glob("*/*optim_states.pt")))
    every = [(0, "fp32"), (1, "bf16"), (3, "bf16"), (2, "fp16"), (0, "bf16"), (3, "fp32")]
    kinds = [Vocabulary(stage, 2, precision, WIDER, LIVE) for stage, precision in every]
    kinds += [Vocabulary(2, 2, "fp32", WIDER, LIVE, zero=ON_CPU)]
    loads = [Load(str(folder), steps=2) for folder in (saved.folder, damaged, saved.folder)]
    for kind in kinds if is_exhaustive() else kinds[:3]:
        first, failed, again = engines.load(kind, *loads, read_before=True, **tied)
        for each in (first, again):
            check(each.state, grow(saved.state, each.ranks[0].before), kind.precision)
            check_losses(saved, each)
            rows, states = [line for line in each.list_messages("WARNING") if line.startswith("resize")]
            assert rows.startswith("resize: embed.weight, head.bias: 11 → 14: 3 new rows keep the live")
            assert states.startswith("resize: the optimizer states of new rows are zero under the old step count")
        failed.check_refused("CRC32")


def test_the_plugin_resizes_a_frozen_vocabulary_in_an_unchanged_topology(engines: Engines) -> None:
    """The optimizer's states have the saved shapes, so only the module shows the difference. One case is in 16 bits."""
    frozen, rules = {"frozen": True}, {"resize": [{"match": VOCABULARY, "new": "mean"}]}
    saved = engines.saved(Vocabulary(1, 2, "bf16"), **frozen)
    for stage in (1, 3):
        kind, load = Vocabulary(stage, 2, "bf16", WIDER, rules), Load(str(saved.folder), steps=2)
        (each,) = engines.load(kind, load, **frozen)
        assert not each.errors, each.errors[0]
        for name, held in each.state.parameters.items():
            before = saved.state.parameters[name].value
            mean = sum(before.double()) / WORDS
            rows = mean.to(torch.bfloat16).expand(len(held.value) - len(before), *before.shape[1:])
            check_same({"value": held.value}, {"value": torch.cat([before, rows])})
        check_losses(saved, each)
