"""The direct load against a stand-in engine: two passes, all or nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine_state import find_state
from deepspeed_ucp.errors import CheckpointError, DiskFullError, RemoteError, UcpError, UnsupportedError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.load import transfer
from deepspeed_ucp.load.transfer import Transfer
from deepspeed_ucp.model.index import AtomicIndex
from tests.support.covering import stride
from tests.support.damage import flip, flip_bit
from tests.support.direct import (
    PLAIN,
    REFUSED,
    STATES,
    ZERO1,
    FakeEngine,
    Restored,
    change_file,
    check_loaded,
    check_untouched,
    have_memory,
    run_load,
    start,
    write,
)
from tests.support.held import without_collector
from tests.support.ranks import World, run_ranks
from tests.support.reshard import SENTINEL, FakeTarget, groups_of, make_targets, open_for, take_a_step
from tests.support.swapped import ALIGNED, MODEL, SwappedTarget
from tests.synth import Model, Run, State, Topology


def test_a_state_file_with_a_damaged_pickle_is_read_from_the_next_place(tmp_path: Path) -> None:
    """Its header was read in the first place; its objects are read in the nearest."""
    run = Run(client_state={"rng": torch.arange(100), "mine": "a long text of the client"})
    path, state, rank = start(tmp_path / "first", run=run)
    near = tmp_path / "near"
    shutil.copytree(path, near)
    index = open_checkpoint(str(path), Comm(), Naming(*groups_of(rank, Comm())[:1]), also=[str(near)])
    index = replace(index, files=tuple(replace(file, places=file.places[::-1]) for file in index.files))
    flip(near / STATES, (near / STATES).read_bytes().index(b"a long text"))
    _, _, client = run_load(index, rank)
    assert client["mine"] == "a long text of the client" and client["rng"].equal(torch.arange(100))
    check_loaded([rank], state)


# -- two passes, all or nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "state"), [("a", "fp32"), ("b", "exp_avg"), ("b", "exp_avg_sq"), ("frozen", "module")]
)
@pytest.mark.parametrize("topology", [Topology(0), Topology(2), Topology(3)], ids=lambda t: t.label)
@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_a_damaged_record_is_refused_and_leaves_the_engine_unchanged(
    trained: bool, topology: Topology, name: str, state: str, tmp_path: Path
) -> None:
    path, _ = write(tmp_path, ZERO1)
    rank = FakeTarget(PLAIN, topology, 0)
    if trained:
        take_a_step(rank.wrapped)
    before, index = keep_values([rank]), open_for(path, rank)
    flip_bit(index, name, state)
    with pytest.raises(CheckpointError, match=r"states.pt: the \d+ bytes at \d+ have CRC32 .* damaged"):
        run_load(index, rank)
    assert all(now.equal(old) for now, old in zip(list_tensors(rank), before, strict=True))
    if not trained:
        check_untouched(rank)


Change = Callable[[Path], object]
SHARD = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def replace_shard(path: Path) -> None:
    other, _ = write(path / "other", Topology(1, 3, "bf16"), seed=5)
    shutil.move(other / SHARD, path / SHARD)


def change_module(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda path: change_file(
        path / STATES, lambda tree: tree["module"].update({name: change(tree["module"][name])})
    )


RNG = Run(client_state={"rng": torch.arange(100)})
CUSTOM, SCHEDULED = Run(client_state={"mine": Restored()}), Run(lr_scheduler=REFUSED)


def damage_client_tensor(path: Path) -> None:
    flip(path / STATES, (path / STATES).read_bytes().index(torch.arange(100).numpy().tobytes()) + 17)


def damage_module(path: Path) -> None:
    flip_bit(open_checkpoint(str(path), Comm()), "a", "copy")


PERMUTE = change_module("frozen", lambda tensor: tensor.t().contiguous().t())
REFUSALS: dict[str, tuple[Run, Change, type[Exception], str, dict[str, Any]]] = {
    "shard of another run": (Run(), replace_shard, CheckpointError, f"{SHARD}: its fp32 weights differ", {}),
    "client class": (CUSTOM, str, UnsupportedError, "Restored", {"trust_pickle": True}),
    "client tensor": (RNG, damage_client_tensor, CheckpointError, "Nothing was changed", {"verify": "off"}),
    "scheduler": (SCHEDULED, str, RemoteError, "of another kind", {}),
    "permuted": (Run(), PERMUTE, UnsupportedError, r"frozen \(module\): its memory is not contiguous", {}),
    "edited weight": (Run(), change_module("a", lambda tensor: tensor * 3), CheckpointError, '"verify": "off"',
                      {"verify": "off"}),
    "damaged module": (Run(), damage_module, CheckpointError, "Nothing was changed", {}),
}  # fmt: skip
"""Saved run, change of its files, the refusal, and options with which the load succeeds."""


@pytest.mark.parametrize(("run", "change", "kind", "text", "accepted"), REFUSALS.values(), ids=REFUSALS)
def test_a_refused_load_leaves_the_engine_unchanged(
    run: Run, change: Change, kind: type[Exception], text: str, accepted: dict[str, Any], tmp_path: Path
) -> None:
    """Nor does it call ``custom_load_fn`` with a damaged module."""
    path, state, rank = start(tmp_path, Topology(1, 3, "bf16"), run)
    change(path)
    index, engine, given = open_for(path, rank), FakeEngine(rank), dict[str, Any]()
    load_fn = (lambda src, dst: given.update(src)) if change is damage_module else None
    with pytest.raises(kind, match=text):
        run_load(index, rank, engine=engine, custom_load_fn=load_fn)
    assert not given and not (find_state(engine).broken and change is damage_module)
    check_untouched(rank)
    if accepted:
        run_load(index, rank, config=UniversalConfig(**accepted))
        check_loaded([rank], state)


def test_one_error_lists_all_reasons_of_a_refusal(tmp_path: Path) -> None:
    path, _ = write(tmp_path, Topology(1, 2), run=Run(client_state={"mine": Restored()}))
    params = (*PLAIN.params[:-1], replace(PLAIN.params[-1], name="other"))
    rank = FakeTarget(replace(PLAIN, params=params), Topology(2), 0)
    rank.group_members = lambda: {0: ("a", "b")}  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError) as raised:
        run_load(open_for(path, rank), rank)
    for line, text in zip(str(raised.value).splitlines(), ("Restored", "other", "param groups"), strict=True):
        assert text in line
    check_untouched(rank)


def after_verification(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    check = Transfer.verify

    def check_and_go_on(transfer: Transfer) -> int:
        nbytes = check(transfer)
        then()
        return nbytes

    monkeypatch.setattr(Transfer, "verify", check_and_go_on)
    monkeypatch.setattr(transfer, "_PAUSE", 0.0)
    monkeypatch.setattr(transfer, "_ATTEMPTS", 1)


def keep_values(targets: list[FakeTarget]) -> list[torch.Tensor]:
    return [tensor.clone() for target in targets for tensor in list_tensors(target)]


def list_tensors(target: FakeTarget) -> list[torch.Tensor]:
    states = [value for entry in target.wrapped.state.values() for value in entry.values()]
    tensors = [flat.data for flat in target.flats] + [extra.data for extra in target.extras()]
    return [*tensors, *(state for state in states if isinstance(state, torch.Tensor))]


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_file_change_after_verification_is_detected_by_the_second_pass(
    passes: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load in a single pass has already read the old bytes and succeeds."""
    have_memory(monkeypatch, passes == 1)
    path, state, rank = start(tmp_path)
    take_a_step(rank.wrapped)
    index, engine = open_for(path, rank), FakeEngine(rank, steps=1)
    after_verification(monkeypatch, lambda: flip_bit(index, name, "fp32"))
    if passes == 1:
        run_load(index, rank, engine=engine)
        check_loaded([rank], state)
        return
    with pytest.raises(CheckpointError, match=r"states.pt: was written to .* must not be used") as caught:
        run_load(index, rank, engine=engine)
    assert find_state(engine).broken == str(caught.value)


class FailingReads:
    """Storage that fails at the n-th read after `arm`: `once`, or from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, *, once: bool) -> None:
        self.number, self.once, self.count, self.armed = number, once, 0, False
        self.preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.read)

    def read(self, fd: int, views: list[memoryview], offset: int) -> int:
        if self.armed:
            self.count += 1
            if self.count == self.number or (self.count > self.number and not self.once):
                raise OSError(5, "Input/output error")
        return self.preadv(fd, views, offset)

    def arm(self) -> None:
        self.armed = True


@pytest.mark.parametrize("verify", ["crc", "off"])
@pytest.mark.parametrize(
    ("trained", "much"), [(True, True), (True, False), (False, True)], ids=["apart", "two passes", "in place"]
)
def test_a_read_error_leaves_the_engine_unchanged_or_blocks_it(
    trained: bool, much: bool, verify: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail one read of a load on two ranks, for growing read numbers until the load has no such read.

    By default every twelfth read, others in each case; all reads under `-m exhaustive`.
    """
    have_memory(monkeypatch, much)
    path, state = write(tmp_path, Topology(1, 3))
    config = UniversalConfig(verify=verify, threads=1)  # type: ignore[arg-type]
    monkeypatch.setattr(transfer, "_ATTEMPTS", 1)
    blocked, index = 0, open_for(path, make_targets(PLAIN, Topology(3, 2))[0])
    turn = (2 * trained + much) % 3 + 3 * (verify == "off")
    step = stride(12)
    for number in range(1 + 2 * turn % step, 999, step):
        targets = make_targets(PLAIN, Topology(3, 2))
        if trained:
            for target in targets:
                take_a_step(target.wrapped)
        before = keep_values(targets)
        engines = [FakeEngine(target, steps=int(trained)) for target in targets]
        with monkeypatch.context() as patch:
            failing = FailingReads(patch, number, once=True)
            failing.arm()
            work = lambda rank, comm: run_load(index, targets[rank], comm, config, engine=engines[rank])  # noqa: B023, E731
            results = World(2).run(work)
        if failing.count < number:
            break
        texts = {str(result) for result in results}
        assert len(texts) == 1 and "states.pt: cannot be read at byte" in texts.pop()
        same = all(now.equal(then) for now, then in zip(keep_values(targets), before, strict=True))
        messages = [find_state(engine).broken for engine in engines]
        assert same if messages == ["", ""] else messages == [str(result) for result in results]
        blocked += not same
    check_loaded(targets, state)
    few = 0 if trained else sum(len(target.extras()) for target in targets)  # these cannot be recomputed
    assert number > 8 and (blocked <= few) == much


def test_a_failed_read_of_the_second_pass_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    have_memory(monkeypatch, False)
    path, state = write(tmp_path, ZERO1)
    targets = make_targets(PLAIN, Topology(3, 2))
    for target in targets:
        take_a_step(target.wrapped)
    index, failing = open_for(path, targets[0]), FailingReads(monkeypatch, 2, once=True)
    after_verification(monkeypatch, failing.arm)
    monkeypatch.setattr(transfer, "_ATTEMPTS", 2)
    run_ranks(2, lambda rank, comm: run_load(index, targets[rank], comm, UniversalConfig(threads=1)))
    check_loaded(targets, state)
    assert "retrying" in caplog.text


def test_a_failed_read_releases_its_memory_before_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = iter(range(3))
    monkeypatch.setattr(transfer, "_PAUSE", 0.0)
    with without_collector() as failing:

        def read(*_: Any) -> list[Any]:
            assert failing.held == 0
            return [] if next(attempts) % 3 == 2 else failing.fail(CheckpointError("cannot be read."))

        one = SimpleNamespace(_try_second_pass=read)
        assert Transfer._run_second_pass(one) == []  # type: ignore[arg-type]
        assert not list(attempts)


def test_a_complete_load_unblocks_a_half_loaded_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, state, rank = start(tmp_path)
    take_a_step(rank.wrapped)
    index, engine = open_for(path, rank), FakeEngine(rank)
    with monkeypatch.context() as patch:
        have_memory(patch, False)
        failing = FailingReads(patch, 1, once=False)
        after_verification(patch, failing.arm)
        with pytest.raises(CheckpointError, match="must not be used"):
            run_load(index, rank, engine=engine)
    assert find_state(engine).half_states
    run_load(index, rank, engine=engine)
    assert not find_state(engine).broken
    assert not find_state(engine).half_states
    check_loaded([rank], state)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(FakeTarget, "refresh_copies", KeyboardInterrupt), (Transfer, "undo", ZeroDivisionError)],
)
def test_an_engine_is_blocked_if_refresh_copies_or_undo_raises(
    owner: type, name: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, rank = start(tmp_path)
    index, engine = open_for(path, rank), FakeEngine(rank)
    if owner is Transfer:
        flip_bit(index, "a", "fp32")
    monkeypatch.setattr(owner, name, mock.Mock(side_effect=error))
    with pytest.raises(error):
        run_load(index, rank, engine=engine)
    assert "must not be used" in find_state(engine).broken


# -- swap files (ZeRO-Infinity): new ones replace all of DeepSpeed's or none ------------------------------------------


def start_swapped(folder: Path, model: Model = MODEL) -> tuple[AtomicIndex, SwappedTarget, State]:
    path, state = write(folder, ZERO1, model)
    target = SwappedTarget(folder / "swap", Topology(3))
    return open_for(path, target), target, state


def check_file(data: bytes, tensor: torch.Tensor) -> None:
    """Check that a file holds a tensor, followed by zeros."""
    expected = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    assert data == expected + bytes(-len(expected) % (ALIGNED * tensor.element_size()))


FEWER = Model(tuple(replace(each, shape=(each.shape[0] - 2, *each.shape[1:])) for each in MODEL.params))
SOME = Model(tuple(param for param in MODEL.params if param.name in ("a", "small")))
RESIZED = {"resize": [{"match": "b", "new": "mean"}, {"match": ".*"}]}


@pytest.mark.parametrize("saved", [MODEL, FEWER], ids=["alike", "fewer rows"])
@pytest.mark.parametrize("steps", [0, 4], ids=["fresh", "trained"])
@pytest.mark.parametrize("target", [Topology(3, 1), Topology(3, 2, "bf16", sub_group_size=40)], ids=lambda t: t.label)
def test_swap_files_hold_the_same_bytes_as_memory(target: Topology, steps: int, saved: Model, tmp_path: Path) -> None:
    path, _ = write(tmp_path, Topology(1, 3, target.precision), saved)
    config = UniversalConfig(threads=1, patterns=RESIZED)
    plain = make_targets(MODEL, target)
    swapped = [SwappedTarget(tmp_path / "swap", target, rank) for rank in range(target.dp)]
    for held in (plain, swapped):
        run_ranks(
            target.dp,
            lambda rank, comm, held=held: run_load(
                open_for(path, held[rank], comm), held[rank], comm, config, engine=FakeEngine(held[rank], steps)
            ),
        )
    for one, other in zip(plain, swapped, strict=True):
        files, names = other.look(), set()
        for number, (flat, live) in enumerate(zip(one.flats, other.flats, strict=True)):
            states = one.wrapped.state[flat.tensor]
            assert other.wrapped.state[live.tensor].keys() == states.keys()
            if live.swap is None:
                assert live.data.equal(flat.data)
                continue
            for prefix, tensor in (("", flat.data), *((f"{key}-", states[key]) for key in ("exp_avg", "exp_avg_sq"))):
                names.add(name := f"{prefix}{number}_9.tensor.swp")
                check_file(files[name], tensor)
            assert float(other.wrapped.state[live.tensor]["step"]) == float(states["step"])
        check_file(files["frozen_param.tensor.swp"], one.extras()[0].data)
        assert files.keys() == {*names, "frozen_param.tensor.swp"}
        other.discard()
        assert [each.name for each in (tmp_path / "swap").iterdir() if each.suffix == ".ucp"] == [
            f"rank{rank}.ucp" for rank in range(other.rank + 1, target.dp)
        ]


def test_a_load_of_weights_keeps_swapped_states(tmp_path: Path) -> None:
    index, target, _ = start_swapped(tmp_path)
    states = target.folder / "exp_avg-0_9.tensor.swp"
    states.write_bytes(b"as it was")
    run_load(index, target, load_optimizer_states=False)
    assert states.read_bytes() == b"as it was"
    assert target.look()["0_9.tensor.swp"][:4] != np.float32(SENTINEL).tobytes()


def test_parameters_that_the_checkpoint_lacks_keep_their_values(tmp_path: Path) -> None:
    """Their swap file must be complete."""
    index, target, state = start_swapped(tmp_path, SOME)
    before = target.look()
    run_load(index, target, load_module_strict=False)
    after = np.frombuffer(target.look()["0_9.tensor.swp"], np.float32)
    assert torch.from_numpy(after[:91].copy()).equal(state.atoms["a"]["fp32"].view(-1))
    assert (after[91 : 91 + 90] == SENTINEL).all()
    assert target.look()["frozen_param.tensor.swp"] == before["frozen_param.tensor.swp"]
    (target.folder / "0_9.tensor.swp").write_bytes(bytes(100))
    with pytest.raises(UcpError, match=r"0_9.tensor.swp: has 100 bytes, 724 are expected. The swap file is damaged"):
        run_load(index, target, load_module_strict=False)


@pytest.mark.parametrize(
    ("full", "kind", "text"),
    [
        (False, CheckpointError, "the file is damaged. Nothing was changed"),
        (True, DiskFullError, r"rank0.ucp/.*: disk full.*Make room"),
    ],
    ids=["damage", "disk full"],
)
def test_an_error_before_the_swap_of_files_leaves_them_unchanged(
    full: bool, kind: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, target, _ = start_swapped(tmp_path)
    before = target.look()
    if full:
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=error))
    else:
        flip_bit(index, "b", "exp_avg_sq")
    with pytest.raises(kind, match=text):
        run_load(index, target)
    target.discard()
    assert target.look() == before and not target.wrapped.state
    assert [each.name for each in (tmp_path / "swap").iterdir()] == ["rank0"]


def test_swap_files_of_a_killed_load_are_removed(tmp_path: Path) -> None:
    index, target, _ = start_swapped(tmp_path)
    left = tmp_path / "swap" / "rank0.ucp"
    left.mkdir()
    (left / "0_9.tensor.swp").write_bytes(b"half")
    (left / "other").write_bytes(b"")
    run_load(index, target)
    assert list(left.iterdir()) == []


def test_an_error_in_the_swap_of_files_blocks_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, target, _ = start_swapped(tmp_path)
    rename, done = os.replace, []

    def fail(old: str, new: str) -> None:
        if done:
            raise OSError(errno.EIO, os.strerror(errno.EIO), new)
        done.append(new)
        rename(old, new)

    monkeypatch.setattr(os, "replace", fail)
    engine = FakeEngine(target)
    with pytest.raises(Exception, match=r"tensor.swp: .*\(EIO\).*must not be used"):
        run_load(index, target, engine=engine)
    assert find_state(engine).broken


def test_swapped_buffers_do_not_count_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write(tmp_path, ZERO1, MODEL)

    def read_again(left: int) -> int:
        target = SwappedTarget(tmp_path / f"swap{left}", Topology(3))
        in_memory = [flat.data for flat in target.flats if flat.swap is None]
        assert in_memory
        for data in in_memory:
            data.copy_(torch.arange(1, data.numel() + 1))  # cannot be recomputed
        monkeypatch.setattr(transfer, "measure_available", lambda: (256 << 20) * 4 // 3 + left)
        return run_load(open_for(path, target), target, engine=FakeEngine(target, 2))[1].bytes_again

    assert read_again(200) == 0
    assert read_again(0) > 0
