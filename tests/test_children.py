"""Children of a rank when all processes of the job are signaled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.covering import is_exhaustive
from tests.support.interpreter import ROOT, run_python
from tests.support.until import wait_until


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_only_the_parent_ends_a_protected_child(method: str) -> None:
    done = run_python("-m", "tests.support.signaled", method)
    found = json.loads(done.stdout)
    held = found.pop("held")
    assert not done.stderr
    wait_until(lambda: not os.path.exists(f"/proc/{held}"))
    assert found == {
        "unprotected": 2 if method == "forkserver" else 1,  # child and fork server
        "ping": "alive",
        "end_program": -signal.SIGTERM,
        "end_grandchild": -signal.SIGTERM,
        "end_forked": -signal.SIGTERM,
        "terminated": -signal.SIGTERM,
        "handler": 5,
        "handler elsewhere": 5,
        "stubborn": -signal.SIGKILL,
    }


LOADERS = """
import os, signal, subprocess, sys
import torch
from types import SimpleNamespace
from torch.utils.data import DataLoader, Dataset, _utils
from deepspeed_ucp import preemption


class Samples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, sample):
        while sample == 7:
            signal.pause()
        return sample


if __name__ == "__main__":
    _utils.MP_STATUS_CHECK_INTERVAL = 0.2
    engine = SimpleNamespace(global_steps=1, save_checkpoint=lambda folder, **_: print("saved"))
    preemption.follow(engine, "folder")
    options = [dict(multiprocessing_context=method) for method in ("fork", "spawn", "forkserver")]
    options += [dict(each, persistent_workers=True) for each in options[:2]]
    options = options if "all" in sys.argv else options[:4:3]
    loaders = [iter(DataLoader(Samples(), **{"num_workers": 2, "prefetch_factor": 1, **each})) for each in options]
    for each in loaders:
        next(each)
    survive = lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpgid(0)}"], check=True, preexec_fn=survive)
    for each in loaders:
        assert [int(next(each)) for _ in range(5)] == [1, 2, 3, 4, 5]
        assert all(worker.is_alive() for worker in each._workers)
    loaders[0]._shutdown_workers()  # with SIGTERM, as one of them hangs
    try:
        preemption.save_if_signaled(engine)
    finally:
        print("ends", [worker.is_alive() for worker in loaders[0]._workers])
"""


def test_data_loader_workers_survive_a_signal_until_the_save(tmp_path: Path) -> None:
    """The whole process group is signaled. Hung workers neither delay the exit of the process nor survive it.

    Forked workers are tested always; other start methods, which import torch, under `-m exhaustive`.
    """
    script = tmp_path / "loaders.py"
    script.write_text(LOADERS)
    with (tmp_path / "output").open("w") as output:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "UCP_TEST": str(tmp_path)}
        command = [sys.executable, str(script), *["all"] * is_exhaustive()]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(300)
        finally:
            process.kill()
    output = (tmp_path / "output").read_text()
    assert code == 0 and output.splitlines()[-2:] == ["saved", "ends [False, False]"], output
