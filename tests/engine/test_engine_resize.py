"""Models of other vocabularies than the saved one, in real engines."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine
from tests.export.test_safetensors import check_same
from tests.support.engines import resized
from tests.support.engines.parallel import Launch, Runs, join
from tests.support.engines.resized import ROWS, Kind

WIDER = 14
VOCABULARY = r"(embed|head)\..*"
STATES = ("exp_avg", "exp_avg_sq")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def grow(saved: CapturedEngine, live: CapturedEngine, rows: int, new: str) -> dict[str, dict[str, torch.Tensor]]:
    """What a vocabulary of so many rows holds: masters and states, by name."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, each in saved.parameters.items():
        assert each.fp32 is not None and live.parameters[name].fp32 is not None
        found[name] = {"fp32": each.fp32, **each.tensors}
        if name.startswith(("embed", "head")):
            kept = min(rows, ROWS)
            mean = torch.from_numpy(np.asarray(sum(each.fp32[:kept].numpy().astype(np.float64)) / kept)).float()
            fresh = {"live": live.parameters[name].fp32[kept:], "mean": mean.expand(rows - kept, *each.fp32.shape[1:])}
            added = {"fp32": fresh.get(new, torch.zeros(rows - kept, *each.fp32.shape[1:]))}
            for state, value in found[name].items():
                ends = added.get(state, torch.zeros(rows - kept, *each.fp32.shape[1:]))
                found[name][state] = torch.cat([value[:kept], ends])
    return found


def check(state: CapturedEngine, wanted: Mapping[str, Mapping[str, torch.Tensor]], precision: str) -> None:
    """Masters, states and 16-bit copies, to the bit."""
    assert state.parameters.keys() == wanted.keys()
    for name, each in state.parameters.items():
        check_same({"fp32": each.fp32, **each.tensors}, dict(wanted[name]))
        check_same({"value": each.value}, {"value": wanted[name]["fp32"].to(DTYPES[precision])})
        assert each.scalars["step"] == 3


def make_kinds(rows: int, new: str, **rule: Any) -> list[Kind]:
    patterns = {"resize": [{"match": VOCABULARY, "new": new, **rule}]}
    every = [Kind(stage, precision) for stage, precision in ((0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16"))]
    every += [Kind(0, "bf16"), Kind(3, "fp32"), Kind(2, "fp32", offload=True)]
    return [replace(kind, rows=rows, patterns=patterns) for kind in every]


def test_a_vocabulary_grows_at_every_stage(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """New rows keep the live model's values, again in an engine that has trained, and after a load that failed."""
    folder, damaged = tmp_path / "saved", tmp_path / "damaged"
    world = ucp_worlds.get(2)
    saved, losses = world.run(resized.save, Kind(1), str(folder))[0]
    shutil.copytree(folder, damaged)
    spoil(next(damaged.glob("*/*optim_states.pt")))
    kinds = make_kinds(WIDER, "live")
    found = world.run(resized.load, kinds, [str(folder), str(damaged), str(folder)])[0]
    for kind, loads in zip(kinds, found, strict=True):
        first, failed, again = loads
        for each in (first, again):
            check(each.after, grow(saved, each.before, WIDER, "live"), kind.precision)
            tolerance = {"fp32": 1e-6, "fp16": 2e-2, "bf16": 5e-2}[kind.precision]
            assert each.losses == pytest.approx(losses, rel=tolerance)
            rows, states = [line for line in each.lines if line.startswith("resize")]
            assert rows.startswith("resize: embed.weight, head.bias, head.weight: 11 → 14: 3 new rows keep the live")
            assert states.startswith("resize: the optimizer states of new rows are zero under the old step count")
        assert "CRC32" in failed.refusal
        for name, before in failed.before.parameters.items():
            after = failed.after.parameters[name]
            check_same({"fp32": after.fp32, **after.tensors}, {"fp32": before.fp32, **before.tensors})
            check_same({"value": after.value}, {"value": before.value})


def test_new_rows_by_other_rules_and_fewer_rows(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """The mean of the saved ones, which is the same at every stage; zero; the last ones left out; no rule."""
    world, folder = ucp_worlds.get(2), str(tmp_path)
    saved, losses = world.run(resized.save, Kind(3, options={"tied": True}), folder)[0]
    tied = {"tied": True}
    kinds = [replace(kind, options=tied) for kind in make_kinds(WIDER, "mean")[:4]]
    kinds += [replace(kind, options=tied) for kind in make_kinds(WIDER, "zero")[:3:2]]
    kinds += [replace(kind, options=tied) for kind in make_kinds(7, "live", shrink=True)[:4:3]]
    for kind, (each,) in zip(kinds, world.run(resized.load, kinds, [folder])[0], strict=False):
        check(each.after, grow(saved, each.before, kind.rows, kind.patterns["resize"][0]["new"]), kind.precision)
        if kind.rows > ROWS:
            assert each.losses == pytest.approx(losses, rel=1e-6 if kind.precision == "fp32" else 5e-2)
    ((refused,),) = world.run(resized.load, [Kind(1, rows=WIDER, options=tied)], [folder])[0]
    rule = r'"resize": [{"match": "embed\\.weight|head\\.bias"}]'
    assert "(11, 6) in the checkpoint, (14, 6) in the model" in refused.refusal and rule in refused.refusal


Plain = partial(Launch, pipeline=False)
PADDED = ("padded-llama", "wider-llama", Plain(2, stage=2), (Plain(2, stage=3),), (257, 272, 304))
AUTO = ("uneven", "uneven-wider", Plain(2, stage=3, precision="bf16"), (Plain(2, stage=2), Plain(1)), (67, 67, 70))


@pytest.mark.parametrize(("model", "wider", "source", "targets", "rows"), [PADDED, AUTO], ids=["megatron", "autotp"])
def test_vocabularies_under_tensor_parallelism(
    model: str, wider: str, source: Launch, targets: tuple[Launch, ...], rows: tuple[int, int, int], runs: Runs
) -> None:
    """Rows count by their numbers in the whole; of what Megatron pads 257 mean something. New ones are their mean."""
    kept, old, new = rows
    rule = {"match": ".*(embed|output_layer|lm_head).*", "new": "mean"}
    saved = join(runs.saved(model, source), model).parameters
    checkpoint, folder = {"universal": {"patterns": {"resize": [rule]}}}, runs.folder(model, source)
    for launch in targets:
        found = runs.load(wider, launch, checkpoint, folder)
        for name, held in join(found, wider).parameters.items():
            before = saved[name]
            assert held.fp32 is not None and before.fp32 is not None
            if held.fp32.shape == before.fp32.shape:
                check_same({"fp32": held.fp32, **held.tensors}, {"fp32": before.fp32, **before.tensors})
                continue
            assert (len(before.fp32), len(held.fp32)) == (old, new)
            mean = sum(before.fp32[:kept].numpy().astype(np.float64)) / kept
            check_same({"fp32": held.fp32[kept:]}, {"fp32": torch.from_numpy(mean).float().expand(new - kept, -1)})
            for state in STATES:
                assert held.tensors[state][:kept].equal(before.tensors[state][:kept])
                assert not held.tensors[state][kept:].any()
            assert held.fp32[:kept].equal(before.fp32[:kept])
        told = [text for _, text in found[0].log if text.startswith("resize: ")][:-1]  # then of its states
        assert told and all(f"{old} → {new}: " in text for text in told)
        assert all(f"{kept} of {old} rows are kept" in text for text in told if kept < old)


def test_frozen_rows_in_an_unchanged_topology(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Nothing that the optimizer owns has another shape: the plugin loads all the same, in 16 bits too."""
    world, frozen = ucp_worlds.get(2), {"frozen": True}
    saved, losses = world.run(resized.save, Kind(1, "bf16", options=frozen), str(tmp_path))[0]
    rules = {"resize": [{"match": VOCABULARY, "new": "mean"}]}
    kinds = [Kind(stage, "bf16", WIDER, frozen, patterns=rules) for stage in (1, 3)]
    for (each,) in world.run(resized.load, kinds, [str(tmp_path)])[0]:
        assert not each.refusal
        for name, held in each.after.parameters.items():
            before = saved.parameters[name].value
            mean = sum(before.double()) / ROWS
            rows = [mean.to(torch.bfloat16).expand(WIDER - ROWS, *before.shape[1:])] if len(held.value) == WIDER else []
            check_same({"value": held.value}, {"value": torch.cat([before, *rows])})
        assert each.losses == pytest.approx(losses, rel=5e-2)


def spoil(path: Path) -> None:
    """Change a byte in the midst of a file's tensors."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
