"""What travels with an engine's saves beside its state: samples in one order, random states."""

from __future__ import annotations

import signal
from itertools import chain
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.data import ElasticSampler
from deepspeed_ucp.sources.files import SEAL
from deepspeed_ucp.sources.open import survey_checkpoint
from deepspeed_ucp.testing import WorldPool
from tests.support.engines import carry as engine_carry
from tests.support.engines.cases import BATCH, Case


@pytest.mark.parametrize("stages", [(1, 2), (3, 0)], ids=str)
def test_a_run_goes_on_with_its_samples_and_random_states(
    stages: tuple[int, int], tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """Through a save of the same world, another stage, and a third rank, over two ends of an epoch."""
    first, second = (Case(stage, 2, config={"checkpoint": {"universal": True}}).ds_config for stage in stages)
    folder = str(tmp_path)
    begun = ucp_worlds.get(2).run(engine_carry.go_on, first, folder, 3, seed=1, load=False)
    again = ucp_worlds.get(2).run(engine_carry.go_on, first, folder, 2, seed=2)
    other = ucp_worlds.get(2).run(engine_carry.go_on, second, folder, 2, seed=3)
    grown = ucp_worlds.get(3).run(engine_carry.go_on, first, folder, 4, seed=4)
    for tag in tmp_path.glob("global_step*"):  # what each rank's file carries of its own is no sign of another save
        findings = survey_checkpoint(str(tag), Comm()).findings
        assert [each.text for each in findings if each.kind != "unnamed"] == []  # which stage 0 has by nature
    for before, after in ((begun, again), (again, other), (other, grown)):
        assert [each.begin for each in after[:2]] == [each.end for each in before]
    assert len({tuple(each.begin) for each in grown}) == 3
    taken = [
        list(chain.from_iterable(step))
        for part in (begun, again, other, grown)
        for step in zip(*(each.samples for each in part), strict=True)
    ]
    whole = ElasticSampler(engine_carry.SAMPLES, BATCH, rank=0, world=1, seed=1)
    expected = list(chain(whole, whole, whole))
    assert list(chain.from_iterable(taken)) == expected[: 11 * BATCH]


@pytest.mark.parametrize(
    ("number", "steps", "code"), [(signal.SIGTERM, 2, 0), (signal.SIGUSR1, 5, None)], ids=["SIGTERM", "SIGUSR1"]
)
def test_a_signal_to_one_rank_is_a_save_of_all(
    number: int, steps: int, code: int | None, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    """At the end of the step in which it came, once; then the job ends, or goes on."""
    config = Case(1, 2, config={"checkpoint": {"universal": True}, "train_batch_size": 2}).ds_config
    told = ucp_worlds.get(2).run(engine_carry.train_until_told, config, str(tmp_path), int(number), 5)
    assert {(each.steps, each.code) for each in told} == {(steps, code)}
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step2"]
    state = torch.load(tmp_path / "global_step2" / "mp_rank_00_model_states.pt", weights_only=False)
    assert (state["global_steps"], state["mine"]) == (2, 7)


@pytest.mark.parametrize("when", ["save", "load"])
def test_a_signal_in_a_save_or_load_is_a_save_after_the_next_step(
    when: str, tmp_path: Path, ucp_worlds: WorldPool
) -> None:
    config = Case(1, 2, config={"checkpoint": {"universal": True}, "train_batch_size": 2}).ds_config
    told = ucp_worlds.get(2).run(engine_carry.train_until_told, config, str(tmp_path), int(signal.SIGTERM), 5, when)
    assert {(each.steps, each.code) for each in told} == {(1, 0)}
    assert (tmp_path / "latest").read_text() == "global_step1"


@pytest.mark.exhaustive
def test_a_save_by_a_writer_of_its_own_is_whole_when_the_ranks_end(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    writer = {"type": "python", "data_parallel": "replica", "decoupled": True}
    checkpoint = {"universal": {"seal": True}, "writer": writer}
    config = Case(3, 2, config={"checkpoint": checkpoint, "train_batch_size": 2}).ds_config
    told = ucp_worlds.get(2).run(engine_carry.train_until_told, config, str(tmp_path), int(signal.SIGTERM), 5)
    assert {(each.steps, each.code) for each in told} == {(2, 0)}
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert (tmp_path / "global_step2" / SEAL).exists()
