"""Models with another vocabulary than the saved one, in real engines."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ucp.testing.capture import CapturedEngine, CapturedParameter
from tests.support.covering import is_exhaustive
from tests.support.damage import flip_largest
from tests.support.engines.cases import Case
from tests.support.engines.driver import STEPS, Engines, Outcome, Saved
from tests.support.engines.kinds import ON_CPU, allow_fp16_on_cpu, forget_autocast, take_step
from tests.support.engines.ranks import Load
from tests.support.exports import check_same

ROWS, WIDER = 11, 14
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
class Vocabulary(Case):
    """An engine of a `Speaker`: rows of its vocabulary, and rules for them."""

    rows: int = ROWS
    patterns: Any = None

    @property
    def universal(self) -> Any:
        return {"patterns": self.patterns} if self.patterns else None

    def find_tolerance(self, source: Any) -> float | None:
        return {"fp32": 1e-6, "fp16": 2e-2, "bf16": 5e-2}[self.precision]

    def make(self, seed: int, **options: Any) -> Any:
        allow_fp16_on_cpu()
        forget_autocast()
        torch.manual_seed(seed)
        model = Speaker(self.rows, **options)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.8, 0.95))
        return deepspeed.initialize(model=model, optimizer=optimizer, config=self.ds_config)[0]

    @staticmethod
    def step(engine: Any) -> float:
        """Train on the saved vocabulary."""
        generator = torch.Generator().manual_seed(engine.global_steps)
        batch = torch.randint(ROWS, (60, 5), generator=generator).chunk(dist.get_world_size())[dist.get_rank()]
        scores = engine(batch[:, :4])
        return take_step(engine, nn.functional.cross_entropy(scores[:, :ROWS].float(), batch[:, 4]))


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
            new = torch.zeros(WIDER - ROWS, *value.shape[1:])
            if state == "fp32":
                new = list_states(live.parameters[name])[state][ROWS:]
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

    ``tests/load/test_resize.py`` has the other rules, and tensor parallelism. Whole and partitioned masters always run.
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
            mean = sum(before.double()) / ROWS
            rows = [mean.to(torch.bfloat16).expand(WIDER - ROWS, *before.shape[1:])] if len(held.value) == WIDER else []
            check_same({"value": held.value}, {"value": torch.cat([before, *rows])})
        check_losses(saved, each)
