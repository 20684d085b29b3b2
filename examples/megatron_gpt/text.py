"""The text: the source code of the Python standard library as bytes, in an order that depends on the step alone."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import numpy as np
import torch

HELD_OUT_EVERY = 10  # every tenth file is not used for training


@functools.cache
def read_text() -> np.ndarray:
    """Read the top-level modules in the order of their names, as a uint8 array of about ten million bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(f.read_bytes() for i, f in enumerate(files) if i % HELD_OUT_EVERY), dtype=np.uint8)


def draw_batch(seed: int, step: int, samples: int, context: int) -> torch.Tensor:
    """Draw the total batch of a step, uint8 (samples, context + 1), which is equal on all ranks of all topologies."""
    text = read_text()
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(text) - context - 1, size=samples)
    return torch.from_numpy(np.stack([text[start : start + context + 1] for start in starts]))
