"""Models of other vocabularies than the saved one, in real engines."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_ucp.testing import World, WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine, CapturedParameter
from tests.export.test_safetensors import check_same
from tests.support.engines.cases import allow_fp16_on_cpu, enable, forget_autocast
from tests.support.engines.kinds import take_step
from tests.support.engines.parallel import Launch, Runs, join
from tests.support.engines.ranks import Load, Local, load_each, save

ROWS, WIDER = 11, 14
"""Rows of the saved vocabulary, which are all that batches and losses use, and of a larger one."""

VOCABULARY = r"(embed|head)\..*"
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
class Kind:
    """An engine on two ranks: ZeRO stage, precision, rows and options of the model, and its rules."""

    stage: int = 1
    precision: str = "fp32"
    rows: int = ROWS
    options: dict[str, Any] = field(default_factory=dict)
    offload: bool = False
    patterns: Any = None

    def train(self) -> Generator[Any, None, None]:
        """Yields the engine, then the loss of each step over the saved vocabulary."""
        allow_fp16_on_cpu()
        forget_autocast()
        torch.manual_seed(1)
        model = Speaker(self.rows, **self.options)
        offload = {"offload_optimizer": {"device": "cpu"}} if self.offload else {}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": self.stage, **offload},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "checkpoint": {"universal": {"patterns": self.patterns}},
            **enable(self.precision),
        }
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.8, 0.95))
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        yield engine
        while True:
            generator = torch.Generator().manual_seed(engine.global_steps)
            batch = torch.randint(ROWS, (8, 5), generator=generator).chunk(dist.get_world_size())[dist.get_rank()]
            scores = engine(batch[:, :4])
            yield take_step(engine, nn.functional.cross_entropy(scores[:, :ROWS].float(), batch[:, 4]))


def save_run(world: World, kind: Kind, folder: Path) -> tuple[CapturedEngine, list[float]]:
    """Train, save and train on. Returns the saved state and the losses after it."""
    local = world.run(save, kind.train, str(folder), (3,), after=2)[0]
    return local.state, local.losses


def load_runs(world: World, kind: Kind, *folders: Path) -> list[Local]:
    """Load one folder after the other, and train on if the saved vocabulary fits."""
    loads = [Load(str(folder), steps=2 * (kind.rows >= ROWS)) for folder in folders]
    return world.run(load_each, kind.train, loads, read_before=True, catch=True)[0]  # type: ignore[no-any-return]


def list_states(parameter: CapturedParameter) -> dict[str, Tensor]:
    """Return the master and the optimizer states."""
    assert parameter.fp32 is not None
    return {"fp32": parameter.fp32, **parameter.tensors}


def find_mean(weight: Tensor) -> Tensor:
    """Return the mean of the rows, summed one after the other in float64."""
    return torch.from_numpy(np.asarray(sum(weight.numpy().astype(np.float64)) / len(weight))).float()


def grow(saved: CapturedEngine, live: CapturedEngine, rows: int, new: str) -> dict[str, dict[str, Tensor]]:
    """Return masters and states of a vocabulary of so many rows, by name."""
    found = {name: list_states(each) for name, each in saved.parameters.items()}
    kept = min(rows, ROWS)
    for name in (name for name in found if name.startswith(("embed", "head"))):
        for state, value in found[name].items():
            added = torch.zeros(rows - kept, *value.shape[1:])
            if state == "fp32" and new == "live":
                added = list_states(live.parameters[name])["fp32"][kept:]
            elif state == "fp32" and new == "mean":
                added = find_mean(value[:kept]).expand_as(added)
            found[name][state] = torch.cat([value[:kept], added])
    return found


def check(state: CapturedEngine, wanted: Mapping[str, Mapping[str, Tensor]], precision: str) -> None:
    """Masters, states and 16-bit copies, to the bit."""
    assert state.parameters.keys() == wanted.keys()
    for name, each in state.parameters.items():
        check_same(list_states(each), dict(wanted[name]))
        check_same({"value": each.value}, {"value": wanted[name]["fp32"].to(DTYPES[precision])})
        assert each.scalars["step"] == 3


def make_kinds(rows: int, new: str, options: Mapping[str, Any] | None = None, **rule: Any) -> list[Kind]:
    patterns = {"resize": [{"match": VOCABULARY, "new": new, **rule}]}
    every = [Kind(stage, precision) for stage, precision in ((0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16"))]
    every += [Kind(0, "bf16"), Kind(3, "fp32"), Kind(2, "fp32", offload=True)]
    return [replace(kind, rows=rows, patterns=patterns, options=dict(options or {})) for kind in every]


def test_a_vocabulary_grows_at_every_stage(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """New rows keep the live model's values, again in an engine that has trained, and after a load that failed."""
    folder, damaged, world = tmp_path / "saved", tmp_path / "damaged", ucp_worlds.get(2)
    saved, losses = save_run(world, Kind(1), folder)
    shutil.copytree(folder, damaged)
    spoil(next(damaged.glob("*/*optim_states.pt")))
    for kind in make_kinds(WIDER, "live"):
        first, failed, again = load_runs(world, kind, folder, damaged, folder)
        for each in (first, again):
            check(each.state, grow(saved, each.before, WIDER, "live"), kind.precision)
            tolerance = {"fp32": 1e-6, "fp16": 2e-2, "bf16": 5e-2}[kind.precision]
            assert each.losses == pytest.approx(losses, rel=tolerance)
            rows, states = [line for line in each.list_messages("WARNING") if line.startswith("resize")]
            assert rows.startswith("resize: embed.weight, head.bias, head.weight: 11 → 14: 3 new rows keep the live")
            assert states.startswith("resize: the optimizer states of new rows are zero under the old step count")
        assert "CRC32" in failed.error
        for name, before in failed.before.parameters.items():
            after = failed.state.parameters[name]
            check_same({**list_states(after), "value": after.value}, {**list_states(before), "value": before.value})


def test_new_rows_by_other_rules_and_fewer_rows(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The mean of the saved ones, which is the same at every stage; zero; the last ones left out; no rule."""
    world, tied = ucp_worlds.get(2), {"tied": True}
    saved, losses = save_run(world, Kind(3, options=tied), tmp_path)
    kinds = [*make_kinds(WIDER, "mean", tied)[:4], *make_kinds(WIDER, "zero", tied)[:3:2]]
    for kind in [*kinds, *make_kinds(7, "live", tied, shrink=True)[:4:3]]:
        (each,) = load_runs(world, kind, tmp_path)
        assert not each.error, each.error
        check(each.state, grow(saved, each.before, kind.rows, kind.patterns["resize"][0]["new"]), kind.precision)
        if kind.rows > ROWS:
            assert each.losses == pytest.approx(losses, rel=1e-6 if kind.precision == "fp32" else 5e-2)
    (refused,) = load_runs(world, Kind(1, rows=WIDER, options=tied), tmp_path)
    rule = r'"resize": [{"match": "embed\\.weight|head\\.bias"}]'
    assert "(11, 6) in the checkpoint, (14, 6) in the model" in refused.error and rule in refused.error


def test_frozen_rows_in_an_unchanged_topology(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The optimizer's states have the saved shapes: the plugin loads all the same, in 16 bits, too."""
    world, frozen = ucp_worlds.get(2), {"frozen": True}
    saved, losses = save_run(world, Kind(1, "bf16", options=frozen), tmp_path)
    rules = {"resize": [{"match": VOCABULARY, "new": "mean"}]}
    for stage in (1, 3):
        (each,) = load_runs(world, Kind(stage, "bf16", WIDER, frozen, patterns=rules), tmp_path)
        assert not each.error, each.error
        for name, held in each.state.parameters.items():
            before = saved.parameters[name].value
            mean = sum(before.double()) / ROWS
            rows = [mean.to(torch.bfloat16).expand(WIDER - ROWS, *before.shape[1:])] if len(held.value) == WIDER else []
            check_same({"value": held.value}, {"value": torch.cat([before, *rows])})
        assert each.losses == pytest.approx(losses, rel=5e-2)


Plain = partial(Launch, pipeline=False)
PADDED = ("padded-llama", "wider-llama", Plain(2, stage=2), (Plain(2, stage=3),), (257, 272, 304))
AUTO = ("uneven", "uneven-wider", Plain(2, stage=3, precision="bf16"), (Plain(2, stage=2), Plain(1)), (67, 67, 70))


@pytest.mark.parametrize(("model", "wider", "source", "targets", "rows"), [PADDED, AUTO], ids=["megatron", "autotp"])
def test_vocabularies_under_tensor_parallelism(
    model: str, wider: str, source: Launch, targets: Sequence[Launch], rows: tuple[int, int, int], runs: Runs
) -> None:
    """Rows match by their numbers in the whole; 257 of Megatron's rows are no padding. New rows are their mean."""
    kept, old, new = rows
    rule = {"match": ".*(embed|output_layer|lm_head).*", "new": "mean"}
    saved = join(runs.saved(model, source), model).parameters
    checkpoint, folder = {"universal": {"patterns": {"resize": [rule]}}}, runs.folder(model, source)
    for launch in targets:
        found = runs.load(wider, launch, checkpoint, folder)
        for name, each in join(found, wider).parameters.items():
            after, before = list_states(each), list_states(saved[name])
            if after["fp32"].shape == before["fp32"].shape:
                check_same(after, before)
                continue
            assert (len(before["fp32"]), len(after["fp32"])) == (old, new)
            assert {"exp_avg", "exp_avg_sq"} <= after.keys()
            mean = find_mean(before["fp32"][:kept]).expand(new - kept, -1)
            for state, value in after.items():
                added = mean if state == "fp32" else torch.zeros_like(mean)
                check_same({state: value}, {state: torch.cat([before[state][:kept], added])})
        messages = [text for _, text in found[0].log if text.startswith("resize: ")][:-1]  # the last is on states
        assert messages and all(f"{old} → {new}: " in text for text in messages)
        assert all(f"{kept} of {old} rows are kept" in text for text in messages if kept < old)


def spoil(path: Path) -> None:
    """Change a byte in the middle of a file's tensors."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
