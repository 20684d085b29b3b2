"""Optimizer states in swap files: the order of the parameters assigns them, or they are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import ConvertOptions, convert_index
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.files import SEAL
from deepspeed_ucp.formats.open import seal_folder, survey_checkpoint
from deepspeed_ucp.model.index import AtomicIndex
from tests.convert.conversions import read_bytes
from tests.formats.saves import check_index, open_alone
from tests.support.cases import Case
from tests.support.conversion import convert_checkpoint
from tests.support.damage import flip
from tests.support.ranks import run_ranks
from tests.synth import Model, Param, Run, State, Topology, build_files, random_state
from tests.synth.files import optim_file
from tests.synth.swap import swap_out, write_swapped

MODEL = Model(
    (
        Param("pos", (4, 6)),
        Param("layer.0.weight", (9, 5)),
        Param("layer.0.bias", (5,), group=1),
        Param("layer.0.base", (8, 8), frozen=True),
        Param("layer.1.weight", (9, 5)),
        Param("layer.1.bias", (6,), group=1),
        Param("head", (9, 5)),
    ),
    {"n": torch.arange(3)},
)
TOPOLOGY = Topology(3, 2, sub_group_size=24)
"""Sub-groups: pos and layer.0.weight; layer.1.weight and head; the biases."""

LARGE = Model((Param("a", (600, 900)), Param("b", (7,), group=1)))

Files = dict[str, dict[str, Any]]
RANK1 = "offloaded_tensors/rank01"


ORDER = [param.name for param in MODEL.owners]


def number(first: int = 0, step: int = 1, names: Iterable[str] = ORDER) -> dict[str, int]:
    """Number parameters as DeepSpeed does, by default in the order of the module."""
    return {name: first + step * place for place, name in enumerate(names)}


def write(
    folder: Path,
    chosen: tuple[int, ...] = (0, 1),
    numbers: dict[str, int] | None = None,
    *,
    topology: Topology = TOPOLOGY,
    model: Model = MODEL,
    seed: int = 0,
    edit: Callable[[Files], object] = lambda files: None,
    lost: bool = False,
    drawn: dict[str, Any] | None = None,
    **options: Any,
) -> State:
    """Write a save whose `chosen` sub-groups are swapped, by default numbered in module order.

    `edit` changes the files; `lost` omits the swap files; `drawn` are options of the state, `options` of `swap_out`.
    """
    state = random_state(model, seed, **(drawn or {}))
    files = build_files(model, state, topology, Run(garbage=float("nan")))
    swaps = swap_out(
        files, topology, numbers or number(names=[param.name for param in model.owners]), chosen, **options
    )
    edit(files)
    write_swapped(folder, files, {} if lost else swaps)
    return state


def open_folder(folder: Path, size: int = 1) -> AtomicIndex:
    if size == 1:
        return open_alone(folder)
    return run_ranks(size, lambda _rank, comm: open_checkpoint(str(folder), comm))[0]


def check(index: AtomicIndex, state: State, model: Model = MODEL, topology: Topology = TOPOLOGY) -> None:
    check_index(index, Case(model, topology, state, legacy=False), state)


def set_aio(value: Any) -> Callable[[Files], object]:
    return lambda files: [tree["ds_config"].update(aio=value) for tree in files.values()]


CONSTRUCTED = sorted(ORDER, key=lambda name: "." not in name)
"""The order of ``zero.Init``: parameters of child modules before the module's."""
FROZEN_FIRST = number(names=sorted(ORDER, key=lambda name: name != "layer.0.base"))
READ: dict[str, dict[str, Any]] = {
    **{
        f"{chosen} from {first}": {"chosen": chosen, "numbers": number(first)}
        for chosen, first in product([(0,), (1,), (0, 1), (0, 1, 2)], [0, 40])
    },
    "before the first step": {"drawn": {"step": None}},
    "padded for three threads": {"threads": 3},
    "numbered as constructed": {"chosen": (0, 1, 2), "numbers": number(3, names=CONSTRUCTED)},
    "numbered with gaps": {"chosen": (0, 1, 2), "numbers": number(3, 5)},
    "numbered as constructed with gaps": {"chosen": (0, 1, 2), "numbers": number(0, 2, CONSTRUCTED)},
    "numbered frozen first": {"chosen": (0, 1, 2), "numbers": FROZEN_FIRST},
    "aio with text": {"edit": set_aio({"block_size": "auto"})},
    "aio with odd numbers": {"edit": set_aio({"block_size": -1, "intra_op_parallelism": True})},
    "aio that is no section": {"edit": set_aio(7)},
    "aio without value": {"edit": set_aio(None)},
}


@pytest.mark.parametrize("case", READ)
def test_swapped_states_are_read(tmp_path: Path, case: str) -> None:
    state = write(tmp_path, **READ[case])
    check(open_folder(tmp_path, 2), state)


def test_stale_states_in_the_state_file_are_ignored(tmp_path: Path) -> None:
    """Pipelined swapping reuses the buffers of swapped sub-groups; their size reveals swapped ones."""
    state = write(tmp_path, (0,), topology=Topology(3, 2), model=LARGE, pipelined=True)
    check(open_folder(tmp_path), state, LARGE, Topology(3, 2))


def test_swap_files_of_another_engine_are_leftovers(tmp_path: Path) -> None:
    """DeepSpeed copies the whole swap folder, including files of an earlier engine with other sub-groups."""
    write(tmp_path, (0,), topology=Topology(3, 2, sub_group_size=60), seed=1)
    state = write(tmp_path)
    report = survey_checkpoint(str(tmp_path), Comm())
    left = [finding.file for finding in report.findings if finding.kind == "leftover"]
    states = product((0, 1), ("", "exp_avg-", "exp_avg_sq-"))
    assert left == [f"offloaded_tensors/rank0{rank}/{state}0_6.tensor.swp" for rank, state in states]
    check(report.require(), state)
    assert verify_checkpoint(str(tmp_path)).whole


def test_swap_files_of_two_engines_of_one_model_are_refused(tmp_path: Path) -> None:
    for first in (0, 7):
        write(tmp_path, numbers=number(first), seed=first)
    with pytest.raises(CheckpointError, match="could be 0_1, 4_6 or 7_8, 11_13.*remove the files of the other engines"):
        open_folder(tmp_path)


def test_swap_files_of_two_engines_are_distinguished_by_size(tmp_path: Path) -> None:
    wide = Model(tuple(Param(p.name, (40, *p.shape[1:]), p.group, p.frozen) for p in MODEL.params), MODEL.buffers)
    write(tmp_path, (0, 1, 2), number(7), topology=Topology(3, 2, sub_group_size=100), model=wide)
    state = write(tmp_path)
    check(open_folder(tmp_path), state)


def forget_offload(files: Files) -> None:
    for tree in files.values():
        del tree["ds_config"]["zero_optimization"]["offload_optimizer"]


def make_complex(files: Files) -> None:
    for rank in range(2):
        held = files[optim_file(TOPOLOGY, rank)]["optimizer_state_dict"]["fp32_flat_groups"]
        held[0] = torch.empty(0, dtype=torch.complex32)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "numbers in no order": (
        {"chosen": (0, 1, 2), "numbers": number(names=reversed(ORDER))},
        "no choice of them follows the order.*3 swapped sub-groups",
    ),
    "no swap files": ({"lost": True}, "holds swap files of parameters none; no choice of them"),
    "no swapping in the ds_config": (
        {"chosen": (0,), "lost": True, "edit": forget_offload},
        "sub-group 0 has 0 elements, 35 are expected",
    ),
    "masters of an unknown dtype": (
        {"chosen": (0,), "lost": True, "edit": make_complex},
        "sub-group 0 has 0 elements, 35 are expected",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unreadable_swapped_saves_are_refused(tmp_path: Path, case: str) -> None:
    options, text = REFUSED[case]
    write(tmp_path, **options)
    with pytest.raises(CheckpointError, match=text):
        open_folder(tmp_path)


def test_a_missing_file_is_reported_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / RANK1 / "exp_avg-0_1.tensor.swp").unlink()
    with pytest.raises(CheckpointError, match=rf"{RANK1}/exp_avg-0_1.tensor.swp is missing; it holds exp_avg of pos, "):
        open_folder(tmp_path, 2)
    (finding,) = [each for each in survey_checkpoint(str(tmp_path), Comm()).findings if each.is_fault]
    assert (finding.kind, finding.file) == ("missing", f"{RANK1}/exp_avg-0_1.tensor.swp")
    assert main(["verify", str(tmp_path)]) == 1


@pytest.mark.parametrize("nbytes", [0, 1023])
def test_a_truncated_swap_file_is_reported_by_name(tmp_path: Path, nbytes: int) -> None:
    write(tmp_path)
    path = tmp_path / RANK1 / "4_6.tensor.swp"
    path.write_bytes(path.read_bytes()[:nbytes])
    text = rf"{path}: has {nbytes} bytes, fp32 of layer.1.weight, head .*1024"
    with pytest.raises(CheckpointError, match=text):
        open_folder(tmp_path)


def test_a_swap_file_that_is_too_long_is_a_warning(tmp_path: Path) -> None:
    """DeepSpeed does not truncate an earlier engine's file."""
    state = write(tmp_path)
    for name in ("4_6.tensor.swp", "exp_avg-0_1.tensor.swp"):
        with open(tmp_path / RANK1 / name, "ab") as stream:
            stream.write(b"x" * 1024)
    report = survey_checkpoint(str(tmp_path), Comm())
    check(report.require(), state)
    (warning,) = [finding for finding in report.findings if finding.kind == "inconsistent"]
    assert not warning.is_fault and warning.names == (f"{RANK1}/4_6.tensor.swp", f"{RANK1}/exp_avg-0_1.tensor.swp")
    seal_folder(str(tmp_path), Comm())
    check(open_folder(tmp_path), state)
    assert verify_checkpoint(str(tmp_path)).whole


def test_swapped_states_under_tensor_parallelism_are_refused(tmp_path: Path) -> None:
    topology = Topology(3, 1, tp=2)
    files = build_files(MODEL, random_state(MODEL, 0), topology, cut=lambda name, value, tp, rank: value)
    for tree in files.values():
        tree["ds_config"]["zero_optimization"]["offload_optimizer"] = {"device": "nvme"}
        if "optimizer_state_dict" in tree:
            tree["optimizer_state_dict"]["fp32_flat_groups"][0] = torch.empty(0)
    write_swapped(tmp_path, files, {})
    with pytest.raises(UnsupportedError, match="under tensor parallelism its folders cannot be assigned to ranks"):
        open_folder(tmp_path)


def test_a_seal_records_checksums_of_swap_files(tmp_path: Path) -> None:
    folder, kept = tmp_path / "tag", tmp_path / "kept.json"
    write(folder)
    assert {r.crc is None for r in open_folder(folder).records} == {True, False}
    assert verify_checkpoint(str(folder)).unchecked == 2 * 2 * 3 * 1024
    run_ranks(2, lambda _rank, comm: seal_folder(str(folder), comm))
    kept.write_bytes((folder / SEAL).read_bytes())
    assert all(record.crc is not None for record in open_folder(folder).records)
    assert verify_checkpoint(str(folder), against=str(kept)).faults == ()
    assert verify_checkpoint(str(folder)).unchecked == 0
    flip(folder / RANK1 / "exp_avg-0_1.tensor.swp", 1023)  # in the padding
    found = verify_checkpoint(str(folder)).faults
    assert [(fault.kind, fault.file) for fault in found] == [("crc", f"{RANK1}/exp_avg-0_1.tensor.swp")]
    assert "pos (exp_avg)" in found[0].names
    (folder / SEAL).unlink()
    assert verify_checkpoint(str(folder)).whole
    found = verify_checkpoint(str(folder), against=str(kept)).faults
    assert [(fault.kind, fault.file) for fault in found] == [("seal", f"{RANK1}/exp_avg-0_1.tensor.swp")]
    (folder / RANK1 / "exp_avg-0_1.tensor.swp").unlink()
    assert {fault.kind for fault in verify_checkpoint(str(folder), against=str(kept)).faults} == {"missing"}


def test_a_sealed_swap_file_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    folder, name = tmp_path / "tag", f"{RANK1}/0_1.tensor.swp"
    write(folder)
    seal_folder(str(folder), Comm())
    write(tmp_path / "other", seed=1)
    (folder / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(CheckpointError, match=f"{name}: the 1024 bytes at 0 have CRC32 .* the file is damaged"):
        convert_checkpoint(str(folder), str(tmp_path / "out"))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
def test_an_earlier_saves_swap_files_in_a_nearer_place_are_skipped(
    sealed: bool, verify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the same sizes and no identifying header."""
    monkeypatch.setattr("deepspeed_ucp.formats.locations.measure_distance", lambda path: int("nvme" not in path))
    folder, near, options = tmp_path / "tag", tmp_path / "nvme", ConvertOptions(verify=verify)
    write(folder)
    if sealed:
        seal_folder(str(folder), Comm())
    write(near, seed=1)
    convert_checkpoint(str(folder), str(tmp_path / "right"), options=options)
    index = open_checkpoint(str(folder), Comm(), also=[str(near)])
    swapped = [file for file in index.files if file.path.endswith(".swp")]
    assert {len(file.places) for file in swapped} == {1}
    assert all(file.path.startswith(str(folder)) for file in swapped)
    convert_index(index, str(folder), str(tmp_path / "out"), Comm(), options)
    assert read_bytes(tmp_path / "out") == read_bytes(tmp_path / "right")


def test_every_command_accepts_swapped_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swapped, plain = tmp_path / "swapped", tmp_path / "plain"
    write(swapped)
    write(plain, (), edit=forget_offload)
    assert main(["diff", str(swapped), str(plain)]) == 0
    for folder in (swapped, plain):
        assert main(["convert", str(folder), f"{folder}-atomic"]) == 0
        assert main(["export", str(folder), f"{folder}-exported"]) == 0
    assert main(["diff", f"{swapped}-atomic", f"{plain}-atomic"]) == 0
    assert main(["verify", f"{swapped}-atomic"]) == 0
    for command in (["inspect"], ["verify"], ["plan", "--target", "zero=1,dp=3"]):
        assert main([command[0], str(swapped), *command[1:]]) == 0, capsys.readouterr()
