"""Compare the buffers and reads of loaded ranks with an expected state, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.view import EngineBuffer
from deepspeed_ucp.plan.locate import locate
from tests.support.reshard import (
    CHUNK,
    LIVE_LR,
    Loaded,
    find_param,
    load,
    make_targets,
    open_everywhere,
    open_for,
    own_layout,
)
from tests.synth import Local, Model, Run, State, Topology, build_local_files, own_models, own_state
from tests.synth.files import model_file, optim_file
from tests.synth.optimizer import fill, optimizer_state
from tests.synth.reader import _buffers


def check_load(
    path: Path | str,
    model: Model,
    topology: Topology,
    expected: State,
    optimizer: Any = torch.optim.AdamW,
    chunk: int = CHUNK,
    **options: Any,
) -> tuple[AtomicIndex, list[Loaded]]:
    """Load a checkpoint into a run without model parallelism, and check every byte that it holds and reads."""
    targets = make_targets(model, topology, optimizer)
    index = open_everywhere(path, targets) if model.experts else open_for(path, targets[0])
    ranks = load(index, targets, chunk=chunk, **options)
    check_content(ranks, expected)
    check_reads(index, ranks, chunk)
    return index, ranks


def check_content(ranks: Sequence[Loaded], expected: State, local: Mapping[int, Local] | None = None) -> None:
    """Check that every rank has the bits of a run of its topology with the state `expected` (invariants 2 and 3).

    Args:
        local: part of each model-parallel rank, if there are several.
    """
    model, topology = ranks[0].target.model, ranks[0].target.kind
    own = ({"lr": LIVE_LR},) * len(model.groups)  # an elastic checkpoint has no hyper-parameters
    local = local or {0: Local(model, replace(expected, groups=expected.groups or own))}
    files = build_local_files(local, topology)
    for rank in ranks:
        held = local[rank.target.parallel.mp_rank].state
        check_masters(rank, files, held)
        check_extras(rank, held)
        groups = rank.target.wrapped.param_groups if rank.target.wrapped else ()
        hypers = own_state(
            held, own_models(local[rank.target.parallel.mp_rank].model, topology)[rank.target.rank]
        ).groups
        for group, hyper in zip(groups, hypers, strict=bool(groups)):
            assert {key: group[key] for key in hyper} == dict(hyper), rank.target.label


def saved_buffers(files: dict[str, Any], rank: Loaded, expected: State) -> list[dict[str, torch.Tensor]]:
    """Return master, states and scalars in the rank's file for each live flat buffer."""
    target = rank.target
    model, topology, mp = target.model, target.kind, target.parallel.mp_rank
    if topology.partitions:
        optimizer = files[optim_file(topology, target.rank, mp)]["optimizer_state_dict"]
    elif model.experts:  # which may be in the file of another lane's rank
        flats = own_layout(model, topology, target.rank)
        optimizer = optimizer_state(target.own, own_state(expected, target.own), topology, Run(), flats, target.rank)
    else:
        optimizer = files[model_file(topology, 0, mp)]["optimizer"]
    flats = own_layout(model, topology, target.rank)
    entries = [dict(_buffers(optimizer, topology, i)) for i in range(len(flats))]
    if topology.kind == "raw":
        pairs = zip(flats, entries, strict=True)
        whole = {name: held["fp32"] for name, held in expected.atoms.items()}
        entries = [{"fp32": fill(flat, {n: whole[n] for n in flat.names}), **entry} for flat, entry in pairs]
        return [e for flat, e in zip(flats, entries, strict=True) if find_param(model, flat.names[0]).trains]
    return entries


def check_masters(rank: Loaded, files: dict[str, Any], expected: State) -> None:
    """Check masters, states and scalars of one rank: every element written once, padding zero."""
    where = rank.target.label
    for flat, saved in zip(rank.target.flats, saved_buffers(files, rank, expected), strict=True):
        kept = dict(rank.target.wrapped.state.get(flat.tensor, {}))
        assert kept.keys() == saved.keys() - {"fp32"}, f"{where} {flat.names}"
        assert (flat.tensor in rank.target.wrapped.state) == bool(kept), f"{where}: an empty state"
        for key, value in saved.items():
            live = flat.data if key == "fp32" else kept[key]
            if key != "fp32" and value.dim() == 0 and key == "step":
                assert live == value, f"{where} {flat.names} {key}"
                continue
            assert live.shape == (flat.data if key == "fp32" else flat.tensor).shape
            check_filled(live.detach().reshape(-1), value.detach().reshape(-1), f"{where} {flat.names} {key}")
            check_counts(rank, live, f"{where} {flat.names} {key}")


def check_extras(rank: Loaded, expected: State) -> None:
    model = rank.target.model
    for extra in rank.extras:
        if extra.is_buffer:
            value = model.buffers[extra.name].reshape(-1)
        else:
            value = expected.atoms[extra.name]["fp32"].reshape(-1).to(extra.data.dtype)
        value = value[find_start(extra) :][: extra.data.numel()]
        check_filled(extra.data, value, f"{rank.target.label} {extra.name}")
        check_counts(rank, extra.data, f"{rank.target.label} {extra.name}")


def find_start(extra: EngineBuffer) -> int:
    return next((cut.start for cut in extra.buffer.cuts(extra.part)), 0)


def check_filled(live: torch.Tensor, saved: torch.Tensor, what: str) -> None:
    """Check for the saved elements, bit by bit, then zeros (ZeRO 1/2 saves masters without their padding)."""
    assert live.dtype == saved.dtype, what
    head, tail = live[: saved.numel()], live[saved.numel() :]
    assert head.numel() == saved.numel(), what
    same = head.contiguous().view(torch.uint8).equal(saved.contiguous().view(torch.uint8))
    assert same, f"{what}: {head} is not {saved}"
    assert not tail.view(torch.uint8).any(), f"{what}: padding {tail}"


def check_counts(rank: Loaded, live: torch.Tensor, what: str) -> None:
    """Check that every element is written once; a parameter with new rows may be zeroed before, or keep values."""
    if not live.numel() or not rank.counted:
        return
    written, zeroed = rank.count(live.detach()), rank.count_blanks(live.detach())
    assert (written <= 1).all(), f"{what}: written {written} times"
    if all(how.pads for how in rank.fill_plan.wants.resized.values()):
        assert (written + zeroed >= 1).all(), f"{what}: written {written} times, zeroed {zeroed} times"
    if not any(how.live > how.kept for how in rank.fill_plan.wants.resized.values()):
        assert (written + zeroed == 1).all(), f"{what}: written {written} times, zeroed {zeroed} times"


def check_reads(index: AtomicIndex, ranks: Sequence[Loaded], chunk: int = CHUNK) -> None:
    """Check that every byte of each touched record is read once over all ranks, in short requests (invariant 4)."""
    found = {}
    for read in (read for rank in ranks for read in rank.reads):
        assert 0 < read.nbytes <= chunk and read.count == 1
        assert sum(item.nbytes for item in read.items) in (0, read.nbytes)
        counts = found.setdefault(read.record, np.zeros(index.records[read.record].nbytes, np.int64))
        counts[read.offset : read.end] += 1
    assert found.keys() == touched_records(ranks)
    for record, counts in found.items():
        assert (counts == 1).all(), f"record {record}: read {counts} times"


def touched_records(ranks: Sequence[Loaded]) -> set[int]:
    """Return the records of which any rank needs bytes."""
    return {item.record for rank in ranks for want in rank.fill_plan.wants.wants for item in locate(want)}
