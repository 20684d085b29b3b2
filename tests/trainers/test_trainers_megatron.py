"""Megatron-DeepSpeed's scripts: other degrees with and without ``--universal-checkpoint``, and random states."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from deepspeed_ucp import install
from deepspeed_ucp.testing import WorldPool

STEPS, CUT, RANKS = 5, 3, 2
TP2, TP1 = (2, 1, False), (1, 1, False)
PIPES = [(1, 1, True), (1, 2, True), (2, 1, True)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_gpt"
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "context": 16, "vocabulary": 256, "vocabulary_divisor": 8}
BATCH, SEED = 4, 1234


@dataclass
class Pretrained:
    """One rank's part of a run.

    Attributes:
        drawn: numbers that the tensor-parallel tracker drew before each step.
        begin: first iteration.
        consumed: Megatron's count of samples.
        universal: final value of `--universal-checkpoint`.
        section: section `checkpoint` of the ds_config.
    """

    losses: list[float]
    drawn: list[float]
    begin: int
    consumed: int
    universal: bool
    section: Any
    error: str = ""


def pretrain(
    degrees: tuple[int, int, bool],
    stage: int,
    folder: str,
    steps: int,
    *,
    save: int = -1,
    flag: bool = False,
    section: Any = None,
    default_on: Any = None,
) -> Pretrained:
    """Run a script of Megatron: build the ds_config and the engine, load, train, save.

    Args:
        degrees: tensor-parallel ranks, pipeline stages, and whether there is a pipeline.
        flag: `--universal-checkpoint`.
        section: `checkpoint` of the ds_config.
    """
    for path in (str(EXAMPLE), str(Path(__file__).with_name("standin"))):
        if path not in sys.path:
            sys.path.insert(0, path)
    if getattr(sys.modules.get("megatron"), "__file__", "") is None:  # megatron-core's namespace package
        for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
            del sys.modules[name]
    install(default_on=default_on)
    from config import Degrees, GPTConfig  # type: ignore[import-not-found]
    from megatron import checkpointing, global_vars, training  # type: ignore[import-not-found]
    from metadata import megatron_arguments  # type: ignore[import-not-found]
    from training import Trainer  # type: ignore[import-not-found]

    tp, pp, pipeline = degrees
    config = GPTConfig(**SIZES, seed=1)
    ds_config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **({} if section is None else {"checkpoint": section}),
    }
    path = Path(folder) / f"ds_config_{dist.get_rank()}.json"
    path.write_text(json.dumps(ds_config))
    args = megatron_arguments(config, Degrees(tp, pp, pipeline=pipeline))
    more = {"deepspeed_config": str(path), "universal_checkpoint": flag, "seed": SEED, "consumed_train_samples": 0}
    vars(args).update(more, save=folder, load=folder)
    global_vars.set_args(args)
    torch.manual_seed(SEED)
    ds_config = training._create_ds_config_dict()
    trainer = Trainer(config, Degrees(tp, pp, pipeline=pipeline), ds_config)
    args.tensor_rank = trainer.parallel.tensor.rank
    checkpointing.seed_tensor_ranks(SEED)
    record = Pretrained([], [], 0, 0, False, ds_config.get("checkpoint"))
    try:
        record.begin = training.load_checkpoint([trainer.engine], None, None)
    except AssertionError as error:
        record.error = str(error)
    while not record.error and trainer.step < steps:
        with get_cuda_rng_tracker().fork(checkpointing.TRACKER):
            record.drawn.append(torch.rand(1).item())
        record.losses.append(trainer.train_step())
        args.consumed_train_samples += BATCH
        if trainer.step == save:
            client_state = {**trainer.make_client_state(), "tokens": 1}
            checkpointing.save_checkpoint(trainer.step, [trainer.engine], client_state)
    record.consumed, record.universal = args.consumed_train_samples, args.universal_checkpoint
    trainer.engine.destroy()
    dist.barrier()
    install(default_on=False)
    return record


def test_megatron_scripts_resume_at_other_degrees(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    run, folder = partial(ucp_worlds.get(RANKS).run, pretrain), str(tmp_path)
    whole = run(TP2, 1, folder, STEPS, save=CUT)
    assert len({tuple(rank.drawn) for rank in whole}) == RANKS
    later = whole[0].losses[CUT:]
    for degrees, stage, options in (
        (TP1, 2, {"default_on": True}),
        (TP1, 1, {"default_on": True, "flag": True}),
        (TP1, 3, {"flag": True, "section": {"universal": {"param_groups": "live"}}}),
        (TP2, 2, {"default_on": True}),
        (TP2, 0, {"default_on": True, "flag": True}),
    ):
        resumed = run(degrees, stage, folder, STEPS, **options)
        assert [rank.error for rank in resumed] == [""] * RANKS
        assert {(rank.begin, rank.consumed) for rank in resumed} == {(CUT, STEPS * BATCH)}
        assert resumed[0].losses == pytest.approx(later, rel=1e-5)
        own = [rank.drawn for rank in resumed] == [rank.drawn[CUT:] for rank in whole]
        assert own is (degrees == TP2)
        assert {rank.universal for rank in resumed} == {degrees != TP2 or "flag" in options}
    assert resumed[0].section == {"load_universal": True}
    (off, _) = run(TP2, 1, folder, STEPS)
    assert off.error == "" and off.drawn == whole[0].drawn[CUT:], "its own load"


@pytest.mark.exhaustive
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("target", PIPES, ids=str)
@pytest.mark.parametrize("source", PIPES, ids=str)
def test_megatron_pipelines_resume_in_another_topology_and_back(
    source: tuple[int, int, bool], target: tuple[int, int, bool], flag: bool, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """The first topology then resumes a save under the same tag, next to files of a larger model-parallel degree."""
    run, folder = partial(ucp_worlds.get(RANKS).run, pretrain), str(tmp_path)
    whole = run(source, 1, folder, STEPS + 1, save=CUT)
    run(source, 1, folder, STEPS, save=STEPS, default_on=True)
    (Path(folder) / "latest").write_text(f"global_step{CUT}")
    there = run(target, 1, folder, STEPS, save=STEPS, flag=flag, default_on=True)
    again = run(target, 1, folder, STEPS + 1, flag=flag, default_on=True)
    back = run(source, 1, folder, STEPS + 1, flag=flag, default_on=True)
    assert [rank.error for rank in (*there, *again, *back)] == [""] * 3 * RANKS
    assert there[-1].losses == pytest.approx(whole[-1].losses[CUT:STEPS], rel=1e-5)
    for resumed in (again, back):  # other degrees round differently
        assert resumed[-1].losses == pytest.approx(whole[-1].losses[STEPS:], rel=1e-6)
    assert {rank.begin for rank in back} == {STEPS}
