"""Ray Train with DeepSpeed and the plugin's environment variable: a node is lost, another joins and is drained."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.platforms.jobs import BOUND, RECIPES, ROOT, Run, make_environment, read_end, wait_for

SCRIPT = RECIPES / "ray" / "train.py"
STEPS, PACE, LOOK_EVERY = 300, 0.1, 4.0
SAVE_EVERY = 30  # 3 s apart: Ray registers checkpoints every 2 s (RAY_TRAIN_HEALTH_CHECK_INTERVAL_S)
MISSING = [name for name in ("ray", "pyarrow") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} missing (pip install 'ray[train]')"),
    pytest.mark.exhaustive,  # minutes: Ray detects the loss of a node slowly
]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without workers. Each node has one worker."""
    from ray.cluster_utils import Cluster

    start = tmp_path / "start"  # stands for site-packages, which has the `.pth` file of an installed package
    start.mkdir()
    (start / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(ROOT)!r})\n")
    more = {"PYTHONPATH": f"{start}{os.pathsep}{ROOT}", "RAY_AUTH_MODE": "disabled"}
    for name, value in make_environment(**more).items():
        monkeypatch.setenv(name, value)
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield found
    finally:
        found.shutdown()


def find_losses() -> dict[int, float]:
    """Return the losses of an uninterrupted run with plain torch."""
    recipe = runpy.run_path(str(SCRIPT))
    model = recipe["make_model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["CONFIG"]["optimizer"]["params"]["lr"])
    losses = {}
    for step in range(STEPS):
        loss = recipe["find_loss"](model, recipe["draw_samples"](step))
        losses[step + 1] = loss.item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.timeout(600)
def test_a_ray_run_resumes_with_the_available_workers(cluster: Any, tmp_path: Path) -> None:
    """It resumes from the last save after a crash, and from the current step after a notice, with equal losses."""
    _, lost = (cluster.add_node(num_cpus=1) for _ in range(2))
    run, record = Run(tmp_path), tmp_path / "record"
    options = {"storage": tmp_path / "runs", "record": record, "steps": STEPS, "pace": PACE, "save_every": SAVE_EVERY}
    options["look_every"] = LOOK_EVERY
    command = [sys.executable, SCRIPT, *(each for name, value in options.items() for each in (f"--{name}", value))]

    def read() -> list[dict[str, Any]]:
        return [json.loads(line) for line in record.read_text().split("\n")[:-1]] if record.exists() else []

    def find_starts() -> list[tuple[int, int, int]]:
        """Return for each start the number of workers, the first and the last step."""
        steps: dict[int, list[dict[str, Any]]] = {}
        for each in read():
            steps.setdefault(each["pid"], []).append(each)
        return [(each[0]["world"], each[0]["step"], each[-1]["step"]) for each in steps.values()]

    def wait_for_start(starts: int, world: int, steps: int) -> None:
        """Wait until the last of ``starts`` starts has ``world`` workers and has taken ``steps`` steps."""

        def look() -> bool:
            assert process.poll() is None, f"{find_starts()}\n{read_end(run.output)}"
            found = find_starts()
            return len(found) == starts and found[-1][0] == world and found[-1][2] - found[-1][1] >= steps

        wait_for(f"start {starts} with {world} workers", look, run.output)

    with run.start(*command, RAY_ADDRESS=cluster.address) as process:
        wait_for_start(1, world=2, steps=2 * SAVE_EVERY + 3)
        cluster.remove_node(lost, allow_graceful=False)
        wait_for_start(2, world=1, steps=2)
        going = cluster.add_node(num_cpus=1)
        wait_for_start(3, world=2, steps=2)
        notified = find_starts()[-1][2]
        drain(cluster.address, going.node_id)
        wait_for_start(4, world=1, steps=2)
        run.wait_for_end(process)
    (_, first, ended), (_, second, alone), (_, third, _), (_, fourth, last) = find_starts()
    assert first == 1 and last == STEPS
    for begun, before in ((second, ended), (third, alone)):  # Ray may count a save late
        assert (begun - 1) % SAVE_EVERY == 0 and 0 <= before - (begun - 1) < 2 * SAVE_EVERY
    assert 1 < second < third
    assert fourth - 1 >= notified
    losses, taken = find_losses(), read()
    assert {each["step"] for each in taken} == set(losses)
    worst = max(abs(each["loss"] - losses[each["step"]]) / losses[each["step"]] for each in taken)
    assert worst < BOUND, worst
    output = run.output.read_text()
    assert output.count("deepspeed_ucp is on by the environment variable") >= 4
    assert output.count("deepspeed_ucp loads it, ZeRO-1 dp=2") == 2
    assert output.count("deepspeed_ucp loads it, ZeRO-1 dp=1") == 1


def drain(address: str, node: str) -> None:
    """Drain a node, like clouds before they reclaim a spot instance."""
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address, "--node-id", node]
    subprocess.run([*command, *reason, "--deadline-remaining-seconds", "12"], check=True, capture_output=True)
