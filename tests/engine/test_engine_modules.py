"""Modules with another order, another state dict or shared parts: what a load and an export make of them."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from safetensors.torch import load_file

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedParameter
from deepspeed_ucp.testing.ranks import train as train_steps
from tests.export.test_dcp import read_all
from tests.export.test_safetensors import check_same
from tests.support.engines.cases import allow_fp16_on_cpu, enable, forget_autocast
from tests.support.engines.ranks import Load, Local, load_each, save

# --- stage 0 in the saved topology: DeepSpeed's load matches by position, which fits only the saved order

RENAMED = {"patterns": {"rename": [{"from": r"(?P<x>[abc])\.(?P<y>.*)", "to": "{x}{x}.{y}"}]}}


class Layers(torch.nn.Module):
    """Layers that compute in alphabetical order, in any order of definition."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names.split():
            self.add_module(name, torch.nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _, layer in sorted(self.named_children()):
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def train_ordered(
    names: str, precision: str, options: Any = True, *, trains: bool = True, seed: int = 9
) -> Generator[Any, None, None]:
    """Yields a stage-0 engine, then the loss of each step."""
    allow_fp16_on_cpu()
    torch.manual_seed(seed)
    module = Layers(names)
    config = {"train_batch_size": 1, "checkpoint": {"universal": options}, **enable(precision)}
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01) if trains else None
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    yield engine
    while True:
        torch.manual_seed(engine.global_steps)
        loss = engine(torch.randn(1, 6).to(next(module.parameters())))
        engine.backward(loss)
        engine.step()
        yield loss.item()


def list_tensors(parameter: CapturedParameter) -> dict[str, torch.Tensor]:
    masters = {} if parameter.fp32 is None else {"fp32": parameter.fp32}
    return {"value": parameter.value, **masters, **parameter.tensors}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_are_those_of_their_names(
    precision: str, tmp_path: Path, ucp_worlds: WorldPool, subtests: pytest.Subtests
) -> None:
    world = ucp_worlds.get(1)
    (saved,) = world.run(save, partial(train_ordered, "b a c", precision, seed=1), str(tmp_path), (3,))
    trainings = {
        "same": partial(train_ordered, "b a c", precision),
        "moved": partial(train_ordered, "a b c", precision),
        "renamed": partial(train_ordered, "bb aa cc", precision, RENAMED),
        "no optimizer": partial(train_ordered, "c b a", precision, trains=False),
    }
    for kind, training in trainings.items():
        ((local,),) = world.run(load_each, training, [Load(str(tmp_path))])
        with subtests.test(kind=kind):
            assert local.direct == (kind != "same"), local.reason
            assert kind != "moved" or "parameter order" in local.reason
            assert local.state.counters["global_steps"] == 3
            assert len(local.state.parameters) == 6
            for name, parameter in local.state.parameters.items():
                found = list_tensors(parameter)
                before = saved.state.parameters[name[1:] if kind == "renamed" else name]
                states = {"fp32", "exp_avg", "exp_avg_sq"} if kind != "no optimizer" else set()
                assert found.keys() == {"value", *states}
                assert [state for state, tensor in found.items() if not tensor.equal(list_tensors(before)[state])] == []
                assert kind == "no optimizer" or parameter.scalars == before.scalars


# --- models whose state dict renames tensors of the module, and has additional ones

BLOCKS = 4


class Quantized(torch.nn.Module):
    """A frozen weight of bytes, as in Linear4bit, with scales that only the state dict contains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8 * BLOCKS, 1, dtype=torch.uint8), requires_grad=False)
        self.absmax = torch.ones(BLOCKS)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax if keep_vars else self.absmax.detach()
        header = json.dumps({"blocks": BLOCKS}).encode()
        destination[f"{prefix}weight.quant_state"] = torch.tensor(list(header), dtype=torch.uint8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.absmax.mean().to(x.dtype) * 1e-3


class Body(torch.nn.Module):
    """A module whose state dict renames the norm, by a hook."""

    def __init__(self, *, bytes_first: bool) -> None:
        super().__init__()
        if bytes_first:
            self.base = Quantized()
        self.up = torch.nn.Linear(6, 10)
        if not bytes_first:
            self.base = Quantized()
        self.norm = torch.nn.BatchNorm1d(10)
        self.frozen = torch.nn.Linear(10, 6)
        self.frozen.requires_grad_(False)
        self._register_state_dict_hook(_rename)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.up(self.base(x))))


def _rename(module: Any, state: Any, prefix: str, metadata: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}norm.")]:
        state[key.replace(f"{prefix}norm.", f"{prefix}bn.")] = state.pop(key)


class WithHead(torch.nn.Module):
    """A value head around a model, whose names have no prefix in the state dict."""

    def __init__(self, *, bytes_first: bool) -> None:
        super().__init__()
        self.pretrained = Body(bytes_first=bytes_first)
        self.v_head = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.v_head(self.pretrained(x)).float().square().mean()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = self.pretrained.state_dict(*args, **kwargs)
        for key, value in self.v_head.state_dict(*args, **kwargs).items():
            found[f"v_head.{key}"] = value
        return found


def train_quantized(stage: int, seed: int, options: Any = True, *, persist: bool = False) -> Generator[Any, None, None]:
    """Yields an engine, then the loss of each step."""
    forget_autocast()
    torch.manual_seed(seed)
    module = WithHead(bytes_first=stage < 3)  # ZeRO 3 takes the first parameter's dtype for the model's
    with torch.no_grad():
        module.pretrained.base.absmax.copy_(torch.rand(BLOCKS) + seed)
        module.pretrained.base.weight.copy_(torch.randint(256, (8 * BLOCKS, 1)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10**4 * persist},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"universal": options},
        "steps_per_print": 10**6,
    }
    trained = [param for param in module.parameters() if param.requires_grad]
    engine = deepspeed.initialize(model=module, model_parameters=trained, config=config)[0]
    yield engine
    while True:
        torch.manual_seed(10 * engine.global_steps)
        loss = engine(torch.randn(4, 6).to(engine.device))
        engine.backward(loss)
        engine.step()
        yield loss.item()


def read(engine: Any) -> dict[str, torch.Tensor]:
    """Read parameters, buffers and scales, whole."""
    params = list(engine.module.parameters())
    partitioned = any(hasattr(param, "ds_id") for param in params)
    with GatheredParameters(params) if partitioned else nullcontext():
        found = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    found.update((name, value.clone()) for name, value in engine.module.named_buffers())
    return {**found, "absmax": engine.module.pretrained.base.absmax.clone()}


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, Local]]:
    """By stage the folder of a save, and the model at the save."""
    found = {}
    for stage in (0, 1, 2, 3):
        folder = str(tmp_path_factory.mktemp("heads"))
        found[stage] = folder, ucp_worlds.get(2).run(save, partial(train_quantized, stage, 1), folder, read=read)[0]
    return found


@pytest.mark.parametrize(("source", "target"), [(0, 3), (1, 2), (2, 0), (3, 1), (3, 3)])
def test_everything_comes_back(
    source: int, target: int, saved: dict[int, tuple[str, Local]], ucp_worlds: WorldPool
) -> None:
    """Trained and frozen weights, statistics, counters, and scales of quantized weights."""
    folder, before = saved[source]
    training = partial(train_quantized, target, 2, {"same_topology": "direct"})
    (local,), _ = ucp_worlds.get(2).run(load_each, training, [Load(folder, steps=2)], read=read)
    assert local.state.keys() == before.state.keys()
    assert [name for name, value in before.state.items() if not torch.equal(local.state[name], value)] == []
    assert not [text for text in local.list_messages("WARNING") if "differs" not in text]


def evaluate_after_fit(folder: str) -> tuple[list[float], float]:
    """Load into an evaluating engine around a module that has trained on. Returns two losses, and the expected one."""
    trained = train_quantized(3, 1, persist=True)
    engine = next(trained)
    train_steps(trained, 2)
    engine.save_checkpoint(folder)
    engine.module.eval()
    expected = evaluate(engine)
    engine.module.train()
    train_steps(trained, 2)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
    config["checkpoint"] = {"universal": True}
    tester = deepspeed.initialize(model=engine.module, config=config)[0]
    tester.module.eval()
    tester.load_checkpoint(folder, load_optimizer_states=False)
    found = [evaluate(tester), evaluate(tester)]
    tester.destroy()
    engine.destroy()
    return found, expected


def evaluate(engine: Any) -> float:
    torch.manual_seed(5)
    with torch.no_grad():
        return float(engine(torch.randn(4, 6).to(engine.device)))


def test_an_evaluating_engine_around_a_module_that_has_trained(ucp_worlds: WorldPool, tmp_path: Path) -> None:
    """Small parameters that ZeRO 3 keeps gathered are updated by the load."""
    for found, expected in ucp_worlds.get(2).run(evaluate_after_fit, str(tmp_path)):
        assert found == [expected, expected]


# --- modules that a model registers under several names, in exports


class Net(torch.nn.Module):
    """A block and a norm are registered twice; a weight is shared by two modules.

    Args:
        unclear: of the second layer two siblings may be the first one.
    """

    def __init__(self, *, unclear: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        if unclear:
            self.other = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        self.again = self.layer
        self.norm = torch.nn.BatchNorm1d(4)
        self.second_norm = self.norm
        self.embed, self.head = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.embed(self.second_norm(self.again(self.norm(self.layer(x)))))).square().mean()


def train_shared(stage: int, *, unclear: bool) -> Generator[Any, None, None]:
    """Yields an engine, then the loss of each step."""
    torch.manual_seed(0)
    model = Net(unclear=unclear)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"universal": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    yield engine
    while True:
        loss = engine(torch.randn(2, 4))
        engine.backward(loss)
        engine.step()
        yield loss.item()


def read_state_dict(engine: Any) -> dict[str, torch.Tensor]:
    params = list(engine.module.parameters())
    with GatheredParameters(params, enabled=engine.zero_optimization_stage() == 3):
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


AGAIN = [f"again.{layer}.{kind}" for layer in (0, 1) for kind in ("bias", "weight")]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_exports_have_every_name(tmp_path: Path, ucp_worlds: WorldPool, stage: int) -> None:
    """As torch's state dict has them; in files of Hugging Face's each tensor is there once."""
    work = save, partial(train_shared, stage, unclear=False), str(tmp_path / "it"), (1,)
    held = ucp_worlds.get(2).run(*work, read=read_state_dict)[0].state
    assert main(["convert", str(tmp_path / "it/global_step1"), str(tmp_path / "atomic/global_step1")]) == 0
    for name in ("it", "atomic"):
        for kind in ("dcp", "hf"):
            assert main(["export", str(tmp_path / name), str(tmp_path / name / kind), "--to", kind]) == 0
        check_same(read_all(tmp_path / name / "dcp")["model"], held)
        once = load_file(tmp_path / name / "hf/model.safetensors")
        check_same(once, {key: held[key] for key in once})
        ties = {"head.weight", *(key for key in held if key.startswith(("again.", "second_norm.")))}
        assert once.keys() == held.keys() - ties


def test_what_zero3_does_not_record_is_named(
    tmp_path: Path, ucp_worlds: WorldPool, capsys: pytest.CaptureFixture[str]
) -> None:
    work = save, partial(train_shared, 3, unclear=True), str(tmp_path / "it"), (1,)
    held = ucp_worlds.get(1).run(*work, read=read_state_dict)[0].state
    assert main(["export", str(tmp_path / "it"), str(tmp_path / "out"), "--to", "dcp"]) == 0
    warnings = capsys.readouterr().err
    written = read_all(tmp_path / "out")["model"]
    assert held.keys() - written.keys() == {*AGAIN}
    assert torch.equal(written["second_norm.weight"], held["second_norm.weight"])
    assert "again.0.bias" in warnings and "are not written" in warnings
