"""Keys of tensors in a module's custom state dict."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ucp.extensions.registry import REGISTRY
from deepspeed_ucp.extensions.statedict import ModuleStateDict


class Renaming(torch.nn.Module):
    """A module whose state dict omits a layer's name and adds a computed tensor."""

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
def test_keys_of_a_state_dict_are_matched_by_their_tensors(detached: bool) -> None:
    found = ModuleStateDict()
    keys = found.ask(Renaming(detached=detached))
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert keys == {name: f"inner.{name}" for name in names}
    assert (set(found.others), found.made) == ({"made", "kept"}, {"made"})


def test_the_state_dict_of_a_plain_module_is_not_computed() -> None:
    (gate,) = (row.in_engine for row in REGISTRY if row.name == "state_dict")
    hooked = torch.nn.Linear(3, 3)
    hooked.register_state_dict_post_hook(lambda *_: None)
    for module, is_custom in ((torch.nn.Linear(3, 3), False), (Renaming(detached=False), True), (hooked, True)):
        assert gate(SimpleNamespace(module=torch.nn.Sequential(module))) is is_custom


def test_computed_tensors_that_differ_from_loaded_ones_are_found() -> None:
    target: Any = SimpleNamespace(engine=SimpleNamespace(module=Renaming(detached=False)))
    before = ModuleStateDict()
    assert before.describe_differences(target) == ""
    before.others["made"].fill_(3.0)
    before.others["kept"].fill_(3.0)
    assert before.describe_differences(target).startswith("made: ")
