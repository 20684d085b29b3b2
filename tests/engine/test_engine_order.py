"""Stage 0 in the saved topology: DeepSpeed's load matches by position, and fits only the saved order."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedParameter
from tests.support.engines.cases import allow_fp16_on_cpu, enable
from tests.support.engines.ranks import Load, load_each, save

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


def train(
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
    (saved,) = world.run(save, partial(train, "b a c", precision, seed=1), str(tmp_path), (3,))
    trainings = {
        "same": partial(train, "b a c", precision),
        "moved": partial(train, "a b c", precision),
        "renamed": partial(train, "bb aa cc", precision, RENAMED),
        "no optimizer": partial(train, "c b a", precision, trains=False),
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
