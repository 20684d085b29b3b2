"""What a module's own state dict calls its tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_ucp.targets.statedict import StateDict, ask_state_dict, find_changed


class Renaming(torch.nn.Module):
    """Holds a layer under a name that its state dict leaves out, and makes a tensor of its own."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.inner, self.twin = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)
        self.twin.bias = self.inner.bias
        self.scale, self.kept, self.detached = 2.0, torch.ones(2), detached

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = self.inner.state_dict(keep_vars=not self.detached)
        found.update(self.twin.state_dict(prefix="twin.", keep_vars=not self.detached))
        return {**found, "made": torch.tensor([self.scale]), "kept": self.kept, "_extra_state": torch.ones(1)}


@pytest.mark.parametrize("detached", [False, True])
def test_names_by_what_they_hold(detached: bool) -> None:
    told = ask_state_dict(Renaming(detached=detached))
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert told.keys == {name: f"inner.{name}" for name in names}
    assert (set(told.others), told.made) == ({"made", "kept"}, {"made"})


def test_a_plain_module_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3))
    monkeypatch.setattr(torch.nn.Module, "_save_to_state_dict", lambda *_: pytest.fail("was asked"))
    assert ask_state_dict(module) == StateDict()


def test_what_the_module_makes_otherwise_than_a_load_wrote_it() -> None:
    module = Renaming(detached=False)
    told = ask_state_dict(module)
    assert find_changed(module, told) == []
    told.others["made"].fill_(3.0)
    told.others["kept"].fill_(3.0)
    assert find_changed(module, told) == ["made"]
