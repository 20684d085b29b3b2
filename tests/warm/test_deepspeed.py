"""The real launcher and `ds_ucp run`, whose second start is warm, for a script that knows nothing of the plugin."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.supervise.standins import ROOT, Stage, find_port, wait_until
from tests.warm.kit import SITE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RANK = """
import importlib, json, os, pathlib, sys, time
warm = b"template.py" in pathlib.Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
import torch, deepspeed
folder, rank = pathlib.Path(sys.argv[-1]), os.environ["RANK"]
assert sys.argv[1:-1] == ["--local_rank=" + rank], sys.argv
drawn = torch.rand(4).tolist()
vars(importlib.import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None  # a minute to compile
deepspeed.init_distributed("gloo", verbose=False)
module = torch.nn.Linear(64, 64)
optimizer = {"type": "Adam", "params": {"torch_adam": True}}  # DeepSpeed's own would be compiled, too
config = {"train_batch_size": 2, "optimizer": optimizer, "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
engine.load_checkpoint(str(folder / "run"))
resumed = engine.global_steps == 1 and engine.ucp_report is not None
loss = engine(torch.ones(1, 64)).sum()
engine.backward(loss)
engine.step()
summed = (torch.ones(1 << 22) * 2).sum().item()
again = folder / f"again-{rank}"
told = folder / f"told-{rank}-{again.exists():d}"
found = [warm, resumed, drawn, summed, torch.get_num_threads(), rank]
told.with_suffix(".part").write_text(json.dumps(found))
os.replace(told.with_suffix(".part"), told)
if not again.exists():
    engine.save_checkpoint(str(folder / "run"))
    again.touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    os._exit(3)
"""


def test_the_second_start_of_the_deepspeed_launcher_and_its_ranks_is_warm(tmp_path: Path) -> None:
    stage = Stage(tmp_path, warm=True)
    beside = os.path.dirname(sys.executable)
    other = ("PYTEST_CURRENT_TEST", "PYTHONUNBUFFERED")
    own = {name: value for name, value in os.environ.items() if name not in other}
    stage.environment.update(own, PATH=f"{beside}:{os.environ['PATH']}", DS_ACCELERATOR="cpu")
    stage.environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "rank.py").write_text(RANK)
    lines = [f"#!{sys.executable}", "import sys", "from deepspeed_ucp.cli import main", "sys.exit(main())"]
    (tmp_path / "ds_ucp").write_text("\n".join(lines))
    (tmp_path / "ds_ucp").chmod(0o755)
    options = ("--num_gpus", "2", "--no_python", "--master_port", str(find_port()))
    command = ["deepspeed", *options, str(tmp_path / "ds_ucp"), "run", str(tmp_path / "rank.py"), str(tmp_path)]
    with stage.supervise("--settle", "5", command=command) as process:
        begun = [tmp_path / f"again-{rank}" for rank in (0, 1)]
        wait_until(lambda: stage.find("template") and all(path.exists() for path in begun), 400)
        (tmp_path / "go").touch()
        assert process.wait(timeout=400) == 0
    (made,) = stage.find("template")
    assert made["megabytes"] > 100 and made["modules"] > 2000
    told = [[json.loads((tmp_path / f"told-{rank}-{start}").read_text()) for rank in (0, 1)] for start in (0, 1)]
    assert [each[:2] for start in told for each in start] == [[False, False]] * 2 + [[True, True]] * 2
    assert len({tuple(each[2]) for start in told for each in start}) == 4
    for fresh, warm in zip(*told, strict=True):
        assert warm[3:] == fresh[3:]
