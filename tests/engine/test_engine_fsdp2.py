"""What `ds_ucp export --to dcp` writes goes on under FSDP2, which knows nothing of DeepSpeed."""

from __future__ import annotations

from pathlib import Path

from deepspeed_ucp.testing import WorldPool
from tests.export import fsdp_run
from tests.export.test_dcp import save_trained
from tests.export.test_safetensors import check_same
from tests.synth import Topology


def test_fsdp2_goes_on(tmp_path: Path, ucp_worlds: WorldPool) -> None:
    """Two ranks load it and take two steps: losses and every weight are those of the run that never stopped."""
    folder = save_trained(tmp_path, Topology(3, 4))
    model, optimizer = fsdp_run.build()
    losses = fsdp_run.train(model, optimizer, range(5))
    result, _ = ucp_worlds.get(2).run(fsdp_run.resume, str(folder))
    assert result["losses"] == losses[3:]
    check_same(result["model"], dict(model.state_dict()))
    for name, param in model.named_parameters():
        check_same(result["optim"]["state"][name], optimizer.state[param])
