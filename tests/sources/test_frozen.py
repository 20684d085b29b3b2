"""Frozen parameters beside a tag: one checkpoint with it for whoever reads it, and told by name where they are not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from deepspeed_ucp.atoms import AtomicIndex
from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError
from deepspeed_ucp.examine.diff import diff_checkpoints
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.patterns import from_config
from deepspeed_ucp.plan.match import lacks_frozen
from deepspeed_ucp.sources import open_checkpoint
from deepspeed_ucp.sources.open import seal_folder
from tests.convert.conversions import read_bytes
from tests.sources.test_index import check_index, name_groups
from tests.support.frozen import NAME, take_out
from tests.support.ranks import run_ranks
from tests.support.reshard import Case, cases, examples, open_for, temporary_folder
from tests.support.reshard3d import make_config, trips
from tests.synth import Model, Param, Run, Topology, random_state, read_state, write_checkpoint

MODEL = Model(
    (Param("base.weight", (30, 64), frozen=True), Param("low.weight", (4, 64)), Param("fixed", (3,), frozen=True))
)
FROZEN = ("base.weight", "fixed")
MAIN = f"../{NAME}/mp_rank_00_frozen_states.pt"


ZERO1 = Topology(1, 2)


def write(place: Path, topology: Topology = ZERO1, seed: int = 0, *, sealed: bool = False) -> Path:
    """A tag whose frozen parameters lie beside it."""
    folder = write_checkpoint(place, MODEL, random_state(MODEL, seed, precision=topology.precision), topology)
    take_out(folder, FROZEN)
    if sealed:
        seal_folder(str(folder), Comm())
    return folder


@examples(40)
@given(case=cases())
def test_a_tag_with_its_base_is_the_whole_checkpoint(case: Case) -> None:
    """Whatever the stage: atoms, groups, ties, buffers and the order in which stage 0 has its states."""
    names = {param.name for param in case.model.params if param.frozen}
    with temporary_folder() as place:
        folder = case.write(place)
        whole = open_checkpoint(str(folder), Comm(), name_groups(case.model))
        state = read_state(folder, case.model, case.topology)
        take_out(folder, names)
        index = open_checkpoint(str(folder), Comm(), name_groups(case.model))
        check_index(index, case, state)
        assert list(index.stored.atoms) == list(whole.stored.atoms)
        assert (index.run.groups, index.run.flats, index.model) == (whole.run.groups, whole.run.flats, whole.model)
        assert names <= {key.name for key in index.stored.atoms} | set(index.model.aliases)


@examples(40)
@given(trip=trips())
def test_parallel_ranks_have_bases_of_their_own(trip: Any) -> None:
    """Pipelines' layers, tied ones among them, and tensor-parallel ranks."""
    held, targets = trip.source, trip.source.make_targets()
    with temporary_folder() as place:
        folder = held.write(place / "tag", Run())

        def open_it() -> AtomicIndex:
            return run_ranks(len(targets), lambda rank, comm: open_for(folder, targets[rank], comm))[0]

        shutil.copytree(folder, place / "whole")
        take_out(folder, {param.name for param in held.model.params if param.frozen})
        split, folder = open_it(), place / "whole"
        whole = open_it()
        assert set(split.stored.atoms) == set(whole.stored.atoms)
        found = diff_checkpoints(split, whole, rules=from_config(make_config(held.model).patterns))
        assert (found.atoms, found.values) == ((), ()) and found.compared


@pytest.mark.parametrize("topology", [Topology(0), Topology(2, 2, "bf16"), Topology(3, 3)], ids=str)
def test_a_tag_is_verified_with_its_base(topology: Topology, tmp_path: Path) -> None:
    folder = write(tmp_path, topology, sealed=True)
    found = verify_checkpoint(str(folder))
    assert found.whole and not found.faults[1:] and found.others == ()
    assert sum(file.name.startswith("../") for file in found.files) == (3 if topology.stage == 3 else 1)
    assert not lacks_frozen(open_checkpoint(str(folder), Comm(), weights_only=True))


def remove_folder(place: Path) -> None:
    shutil.rmtree(place / NAME)


def remove_file(place: Path) -> None:
    next((place / NAME).iterdir()).unlink()


def take_another(place: Path) -> None:
    write(place / "other", seed=1)
    shutil.copytree(place / "other" / NAME, place / NAME, dirs_exist_ok=True)


def remove_reference(place: Path) -> None:
    (place / "global_step3" / "ucp_frozen.json").unlink()


def edit_reference(place: Path) -> None:
    path = place / "global_step3" / "ucp_frozen.json"
    path.write_text(path.read_text().replace(NAME, "ucp_frozen-ffffffffffff"))


def lead_elsewhere(place: Path) -> None:
    path = place / "global_step3" / "ucp_frozen.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "folder": "../../etc"}))


FAULTS: dict[Callable[[Path], None], str] = {
    remove_folder: rf"{NAME}/mp_rank_00_frozen_states.pt is missing: it holds frozen parameters of .* Copy the whole",
    remove_file: "is missing: it holds frozen parameters",
    take_another: "is not the file with the frozen parameters that this tag was saved with",
    remove_reference: "does not name ../ucp_frozen-.*, which ucp_seal.json has",
    edit_reference: "its digest is not that of its contents",
    lead_elsewhere: r"is not the reference that was written \(folder is missing or of another form\)",
}


@pytest.mark.parametrize("break_it", FAULTS, ids=lambda each: each.__name__)
def test_what_is_wrong_with_a_base_is_an_error_that_names_it(break_it: Callable[[Path], None], tmp_path: Path) -> None:
    """Never are frozen parameters left as they are without a word."""
    folder = write(tmp_path, sealed=True)
    break_it(tmp_path)
    with pytest.raises(CheckpointError, match=FAULTS[break_it]):
        open_checkpoint(str(folder), Comm())
    assert not verify_checkpoint(str(folder)).whole


def test_damage_in_a_base_is_found_and_a_further_place_has_another_copy(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "a" / NAME / "mp_rank_00_frozen_states.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (fault,) = (each for each in verify_checkpoint(str(folder)).faults if not each.warning)
    assert fault.file == MAIN and "CRC32" in fault.text
    assert verify_checkpoint(str(folder), also=[str(tmp_path / "b" / folder.name)]).whole
    shutil.rmtree(tmp_path / "a" / NAME)
    index = open_checkpoint(str(folder), Comm(), also=[str(tmp_path / "b" / folder.name)])
    assert index.find("base.weight", "module") is not None


def test_a_link_to_a_tag_leads_to_its_base(tmp_path: Path) -> None:
    folder = write(tmp_path / "runs")
    (tmp_path / "best").symlink_to(folder)
    assert open_checkpoint(str(tmp_path / "best"), Comm()).find("fixed", "module") is not None


def test_commands_read_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What they make of a tag with its base is what they make of the whole checkpoint."""
    folder, whole = write(tmp_path / "split", sealed=True), tmp_path / "whole" / "global_step3"
    write_checkpoint(tmp_path / "whole", MODEL, random_state(MODEL, 0, precision="fp32"), ZERO1)
    for path in (folder, whole):
        assert main(["convert", str(path), str(path.parent / "atoms")]) == 0
        assert main(["export", str(path), str(path.parent / "weights")]) == 0
    for name in ("atoms", "weights"):
        left, right = (read_bytes(path.parent / name) for path in (folder, whole))
        assert left.keys() == right.keys()
        tensors = [each for each in left if each.endswith((".safetensors", "fp32.pt", "module.pt"))]
        assert tensors and all(left[each] == right[each] for each in tensors)
    capsys.readouterr()
    assert main(["diff", str(folder), str(whole)]) == 0
    assert main(["inspect", str(folder)]) == 0 and main(["list", str(folder.parent)]) == 0
    told = capsys.readouterr().out
    assert "2 frozen" in told
