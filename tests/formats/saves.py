"""Files of synthesised saves: made, changed before they are written, and opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.model.index import AtomicIndex
from tests.synth import Layer, Model, Param, Run, Topology, build_files, random_state, write_files

Files = dict[str, dict[str, Any]]
Change = Callable[[Files], Files]

STATES = "mp_rank_00_model_states.pt"

PLAIN = Model(
    (
        Param("a.col", (7, 5)),
        Param("a.row", (3, 6)),
        Param("a.norm", (5,), group=1),
        Param("frozen.col", (6, 2), frozen=True),
        Param("few.col", (2, 3), group=1),
        Param("b.mix", (8, 3)),
        Param("head", (7, 5), alias_of="a.col"),
    ),
    {"count": torch.arange(3), "scale": torch.tensor(2.5)},
)
WORD, POSITION = "tied_modules.embed.col", "tied_modules.embed.position"
PIPE = Model(
    (
        Param(WORD, (9, 3), tied=True),
        Param(POSITION, (4, 3), group=1),
        Param("tied_modules.embed.fixed", (2,), frozen=True),
        Param("1.col", (7, 3)),
        Param("1.bias", (7,), group=1, frozen=True),
        Param("2.row", (3, 6)),
        Param("2.norm", (3,), group=1),
        Param("4.mix", (8, 5)),
        Param("5.norm", (5,), group=1),
    ),
    {"1.count": torch.arange(3), "tied_modules.embed.scale": torch.ones(1)},
    (Layer("embed"), Layer(), Layer(), Layer(file=False), Layer(), Layer(), Layer("embed", file=False)),
)


def shard(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def tail_cut(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Cuts by the parameter's last word: columns in uneven widths, rows, blocks of both, or not at all."""
    kind = name.rpartition(".")[2]
    if kind.startswith("col"):
        return tensor.tensor_split(tp, 0)[rank]
    if kind.startswith("row"):
        return tensor.tensor_split(tp, 1)[rank]
    if kind.startswith("mix"):
        return torch.cat([half.tensor_split(tp, 0)[rank] for half in tensor.chunk(2)])
    return tensor


def make_files(
    model: Model, topology: Topology, seed: int = 0, run: Run | None = None, *, zero: Any = (), **drawn: Any
) -> Files:
    """Return the contents of a save's files by name.

    Args:
        zero: further keys of the ds_config's `zero_optimization`.
        drawn: options of `random_state`.
    """
    state = random_state(model, seed, precision=topology.precision, topology=topology, **drawn)
    files = build_files(model, state, topology, run or Run(), cut=tail_cut)
    return edit("", lambda content: content.get("ds_config", {}).get("zero_optimization", {}).update(zero))(files)


def edit(part: str, work: Callable[[Any], object]) -> Change:
    """Change the contents of files whose names contain `part`, in place."""

    def change(files: Files) -> Files:
        for name, content in files.items():
            if part in name:
                work(content)
        return files

    return change


def assign(part: str, **fields: Any) -> Change:
    return edit(part, lambda content: content.update(fields))


def find_states(content: Any) -> Any:
    """Return the state dict of the wrapped optimizer."""
    state = content["optimizer_state_dict"]
    return state.get("base_optimizer_state") or state["optimizer_state_dict"]


def open_files(folder: Path, files: Files, naming: Naming | None = None, *, legacy: bool = False) -> AtomicIndex:
    write_files(folder, files, legacy=legacy)
    return open_checkpoint(str(folder), Comm(), naming)


def open_alone(folder: Path | str) -> AtomicIndex:
    return open_checkpoint(str(folder), Comm())


def check_refused(folder: Path | str, text: str, kind: Any = CheckpointError) -> None:
    """Check that a folder is refused with a message."""
    with pytest.raises(kind, match=text):
        open_alone(folder)
