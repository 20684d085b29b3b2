"""How a conversion is dealt to nodes and workers: BLOOM's 176 B parameters; the executor's threads in virtual time."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from deepspeed_ucp.plan.conversion import RANGE, plan_conversion

BALANCED = 1.05


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the benchmark, which is a folder of scripts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    return importlib.import_module("simulation")


def test_the_parameter_list_is_that_of_bloom(simulation: ModuleType) -> None:
    shapes = simulation.list_bloom()
    assert simulation.count_parameters(shapes) == 176_247_271_424
    assert shapes["h.69.mlp.dense_4h_to_h.weight"] == (14336, 57344)
    assert len(shapes) == 5 + 70 * 12


@pytest.mark.parametrize("nodes", [5, 64])
def test_nodes_shares_of_bloom(simulation: ModuleType, nodes: int) -> None:
    plan = plan_conversion(simulation.list_outputs(simulation.list_bloom()), nodes)
    assert sum(plan.shares) == 12 * simulation.count_parameters(simulation.list_bloom())
    assert max(plan.shares) <= BALANCED * sum(plan.shares) / nodes
    assert max(batch.nbytes for batches in plan.nodes for batch in batches) <= RANGE


def test_workers_shares_of_bloom_on_8_nodes(simulation: ModuleType) -> None:
    found = simulation.simulate(simulation.list_bloom(), 8, 8, simulation.Store())
    assert len(found.workers) == 64
    assert found.node_imbalance <= BALANCED
    assert found.worker_imbalance <= BALANCED


def test_a_skewed_model_is_balanced_all_the_same(simulation: ModuleType) -> None:
    """One parameter is two thirds of the model: it is cut."""
    shapes = {"embedding": (1 << 20, 512), **{f"layer.{n}": (512, 512) for n in range(1000)}}
    found = simulation.simulate(shapes, 8, 8, simulation.Store(), 1 << 20)
    assert found.node_imbalance <= BALANCED
    assert found.worker_imbalance <= 1.1


@pytest.mark.parametrize(("nodes", "workers"), [(1, 1), (1, 4), (2, 2), (8, 8)], ids=str)
def test_the_executor_does_as_planned(simulation: ModuleType, nodes: int, workers: int) -> None:
    """Its threads, with reads and writes that sleep in virtual time, take as long as the plan alone says."""
    shapes, store = simulation.list_bloom(layers=4, hidden=512, vocabulary=8960), simulation.Store()
    planned = simulation.simulate(shapes, nodes, workers, store, 1 << 20)
    executed = simulation.execute_virtually(shapes, nodes, workers, store, 1 << 20)
    assert executed.nodes == planned.nodes
    assert sum(executed.workers) == sum(planned.workers) == 12 * simulation.count_parameters(shapes)
    assert executed.seconds == pytest.approx(planned.seconds, rel=0.05)


def test_workers_wait_at_the_same_time(simulation: ModuleType) -> None:
    """What is slow is the store, so four times the workers are nearly four times as fast."""
    shapes, store = simulation.list_bloom(layers=4, hidden=512, vocabulary=8960), simulation.Store()
    seconds = [simulation.execute_virtually(shapes, 1, workers, store, 1 << 20).seconds for workers in (1, 4)]
    assert 3.5 < seconds[0] / seconds[1] <= 4.01
