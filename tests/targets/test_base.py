"""What every target has in common."""

from __future__ import annotations

import torch

from deepspeed_ucp.atoms import strip_compiled
from deepspeed_ucp.targets.base import dtype_name, flatten


def test_names_dtypes_and_memory() -> None:
    assert strip_compiled("_orig_mod.layer._orig_mod.weight") == "layer.weight"
    assert dtype_name(torch.bfloat16) == "bfloat16"
    tensor = torch.zeros(2, 3, requires_grad=True)
    flat = flatten(tensor)
    flat[4] = 1
    assert tensor[1, 1] == 1
    assert flatten(torch.zeros(3, 2).t()).shape == (2, 3)
