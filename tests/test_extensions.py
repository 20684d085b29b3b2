"""The registry of special cases: a plain resume imports no case, and one file adds a case."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from deepspeed_ucp import extensions
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, MismatchError
from deepspeed_ucp.extensions import registry
from deepspeed_ucp.extensions.registry import SpecialCase
from deepspeed_ucp.formats import open_checkpoint
from tests.support.direct import PLAIN, run_load
from tests.support.interpreter import run_python
from tests.support.ports import find_port
from tests.support.reshard import FakeTarget, open_for
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

RESUME = """
import sys, torch, deepspeed, deepspeed_ucp
def start(stage):
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}}, "checkpoint": {"universal": True}}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
engine = start(1)
engine.backward(engine(torch.ones(1, 6, dtype=torch.bfloat16)).float().sum())
engine.step()
engine.save_checkpoint(sys.argv[1])
engine = start(3)
engine.load_checkpoint(sys.argv[1])
print(engine.ucp_report.direct, engine.ucp_report.extensions)
print(*sorted(name for name in sys.modules if name.startswith("deepspeed_ucp.extensions.")))
"""


@pytest.mark.engine
def test_a_plain_resume_imports_no_extension(tmp_path: Path) -> None:
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_port()}
    done = run_python("-c", RESUME, str(tmp_path), **{key: str(value) for key, value in place.items()})
    assert done.stdout.splitlines()[-2:] == ["True ()", "deepspeed_ucp.extensions.registry"]


def test_every_row_of_the_registry_names_an_extension() -> None:
    for row in registry.REGISTRY:
        hooks = {name for name in vars(type(row.make())) if not name.startswith("_")}
        assert any(hooks & vars(kind).keys() for kind in (registry.SaveExtension, registry.Extension)), row


MADE_UP = '''
from dataclasses import replace

from deepspeed_ucp.errors import MismatchError
from deepspeed_ucp.extensions.registry import Extension, SaveExtension
from deepspeed_ucp.formats.findings import Finding


class MadeUp(SaveExtension, Extension):
    """Saves of three ranks, and engines with a parameter `a`."""

    def verify_save(self, save, comm):
        return [Finding("odd", save.main.name, f"{save.path(save.main)}: three ranks are odd.")]

    def refuse(self, context, index, target):
        if context.load_module_only:
            raise MismatchError("not for weights alone")

    def adapt(self, adaptation):
        adaptation.view = replace(adaptation.view, renamed={"a": "old"})
'''


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a special case by one file and one row."""
    (tmp_path / "made_up.py").write_text(MADE_UP)
    monkeypatch.setattr(extensions, "__path__", [*extensions.__path__, str(tmp_path)])
    row = SpecialCase(
        "made up",
        "made_up:MadeUp",
        in_save=lambda save: len(save.names["optim"]) == 3,
        in_load=lambda job, index, target: "a" in target.params,
    )
    monkeypatch.setattr(registry, "REGISTRY", [*registry.REGISTRY, row])
    monkeypatch.delitem(sys.modules, "deepspeed_ucp.extensions.made_up", raising=False)


@pytest.mark.usefixtures("made_up")
def test_one_file_adds_a_case_of_a_save(tmp_path: Path) -> None:
    two, three = (write_checkpoint(tmp_path / str(dp), PLAIN, random_state(PLAIN, 0), Topology(1, dp)) for dp in (2, 3))
    open_checkpoint(str(two), Comm())
    assert "deepspeed_ucp.extensions.made_up" not in sys.modules
    with pytest.raises(CheckpointError, match="three ranks are odd"):
        open_checkpoint(str(three), Comm())


@pytest.mark.usefixtures("made_up")
def test_one_file_adds_a_case_of_a_load(tmp_path: Path) -> None:
    old, new = (Model((Param(name, (7, 13)), Param("b", (5,)))) for name in ("old", "a"))
    path = write_checkpoint(tmp_path / "tag", old, state := random_state(old, 0), Topology(1, 2))
    target = FakeTarget(new, Topology(3), 0)
    _, report, _ = run_load(open_for(path, target), target)
    assert report.extensions == ("made up",)
    assert torch.equal(target.flats[0].data[:91], state.atoms["old"]["fp32"].view(-1))
    with pytest.raises(MismatchError, match="not for weights alone"):
        run_load(open_for(path, target), target, load_module_only=True)
