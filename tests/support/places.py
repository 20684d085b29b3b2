"""Saves whose files lie on several hosts or in several places."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.model.index import AtomicIndex
from tests.support.cases import Case
from tests.support.damage import write_checksums
from tests.support.ranks import run_ranks
from tests.support.reshard import FakeTarget, Loaded, Options, groups_of, load_rank, make_targets
from tests.synth import Model, Param, Topology, random_state

MODEL = Model((Param("a.weight", (7, 13)), Param("b.bias", (5,), group=1), Param("c", (3, 5), frozen=True)))
STATES = "mp_rank_00_model_states.pt"


def shard(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def write(folder: Path, source: Topology, seed: int = 0) -> Path:
    return Case(MODEL, source, random_state(MODEL, seed, precision=source.precision), legacy=False).write(folder)


def scatter(
    save: Path, count: int, holders: Callable[[str], Iterable[int]], *, times: bool = True, name: str = "host"
) -> list[Path]:
    """Copy a save's files to the hosts that hold them; `times`: with their modification times."""
    hosts = [save.parent / f"{name}{number}" for number in range(count)]
    for host in hosts:
        host.mkdir()
    for file in sorted(save.iterdir()):
        for host in holders(file.name):
            shutil.copy2(file, hosts[host])
            if not times:
                os.utime(hosts[host] / file.name, (host + 1, host + 1))
    return hosts


def hold_one_shard(name: str) -> list[int]:
    """Give the model states to both of two hosts, and a shard to each."""
    return [0, 1] if name == STATES else [int(name.split("_")[3])]


def open_place(folder: Path, target: FakeTarget, comm: Comm, *also: Path) -> AtomicIndex:
    """Open a checkpoint as a rank of a load does (collective)."""
    places = [str(place) for place in also]
    return open_checkpoint(str(folder), comm, Naming(groups_of(target, comm)[0]), also=places)


def load_scattered(
    folders: Sequence[Path], model: Model, target: Topology, *also: Path, **options: Any
) -> list[Loaded]:
    targets = make_targets(model, target)

    def load(rank: int, comm: Comm) -> Loaded:
        index = open_place(folders[rank % len(folders)], targets[rank], comm, *also)
        return load_rank(index, targets[rank], comm, Options(**options))

    return run_ranks(len(targets), load)


def indices(folders: Sequence[Path], *also: Path) -> list[AtomicIndex]:
    places = [str(place) for place in also]
    return run_ranks(len(folders), lambda rank, comm: open_checkpoint(str(folders[rank]), comm, also=places))


def write_unchecked(folder: Path, form: str) -> Path:
    with write_checksums(False):
        return Case(MODEL, Topology(1, 3), random_state(MODEL, 0), legacy=form == "legacy").write(folder)
