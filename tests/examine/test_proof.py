"""`ds_ucp verify --against`: a seal or manifest proves a folder and names changed files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import ConfigError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats.deepspeed.files import MANIFEST, SEAL
from deepspeed_ucp.formats.deepspeed.seal import SealedFile, read_seal
from deepspeed_ucp.formats.open import seal_folder
from tests.formats.saves import shard
from tests.support.conversion import convert_checkpoint
from tests.support.ranks import run_ranks
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a.weight", (30, 50)), Param("a.bias", (7,), group=1), Param("fixed", (3, 4), frozen=True)))
MASTER, OTHER = "zero/a.weight/fp32.pt", shard(1)


def write(folder: Path, seed: int = 0) -> Path:
    return write_checkpoint(folder, MODEL, random_state(MODEL, seed), Topology(3, 3))


def verify(folder: Path, against: object = None, comm: Comm | None = None) -> list[tuple[str, str]]:
    found = verify_checkpoint(str(folder), comm, against=str(against) if against else None)
    return [(fault.kind, fault.file) for fault in found.faults]


@pytest.fixture
def proofs(tmp_path: Path) -> dict[str, Path]:
    """A folder, its seal in another place, and the manifest of its conversion."""
    folder = write(tmp_path)
    seal_folder(str(folder), Comm())
    shutil.move(folder / SEAL, tmp_path / "kept.json")
    convert_checkpoint(str(folder))
    return {"folder": folder, "seal": tmp_path / "kept.json", "manifest": Path(f"{folder}_universal") / MANIFEST}


@pytest.mark.parametrize("kind", ["seal", "manifest"])
def test_a_proof_passes_proven_files_and_names_others(proofs: dict[str, Path], tmp_path: Path, kind: str) -> None:
    folder, against = proofs["folder"], str(proofs[kind])
    assert verify(folder, against) == []
    shutil.copy(write(tmp_path / "other", seed=1) / OTHER, folder / OTHER)
    assert verify_checkpoint(str(folder)).whole
    assert verify(folder, against) == [("seal", OTHER)]
    ranks = run_ranks(3, lambda _, comm: verify(folder, against, comm))
    assert ranks == [[("seal", OTHER)]] * 3
    assert main(["verify", str(folder), "--against", against]) == 1
    (folder / OTHER).unlink()
    assert verify(folder, against) == [("missing", OTHER)]


def test_a_manifest_proves_its_folder(proofs: dict[str, Path], tmp_path: Path) -> None:
    atomic = proofs["manifest"].parent
    kept = str(shutil.copy(atomic / MANIFEST, tmp_path / "manifest.json"))
    other = convert_checkpoint(str(write(tmp_path / "other", seed=1))).destination
    assert verify(atomic, kept) == []
    assert {("seal", MASTER), ("seal", "zero/a.bias/exp_avg.pt")} <= {*verify(Path(other), kept)}


def test_a_proof_names_missing_files_and_changed_manifest_entries(proofs: dict[str, Path]) -> None:
    """The missing files are named in no header, and the changed atoms have unchanged files."""
    seal = read_seal(str(proofs["seal"]))
    more = seal.model_copy(update={"files": {**seal.files, "client/more.pt": SealedFile(size=1, crc=2)}})
    proofs["seal"].write_bytes(more.dump())
    assert verify(proofs["folder"], proofs["seal"]) == [("missing", "client/more.pt")]
    seal, atomic = read_seal(str(proofs["manifest"])), proofs["manifest"].parent
    for atom in seal.index["atoms"]:
        atom[5] += 64 * (atom[:2] == ["a.weight", "fp32"])
    proofs["manifest"].write_bytes(seal.dump())
    assert ("seal", MASTER) in verify(atomic)


@pytest.mark.parametrize("text", [None, "", "{}", "[" * 9999])
def test_invalid_proofs_are_refused(proofs: dict[str, Path], tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "proof").write_text(text)
    with pytest.raises(ConfigError, match="--against: neither a seal .ucp_seal.json, .*proof: ") as error:
        verify_checkpoint(str(proofs["folder"]), against=str(tmp_path / "proof"))
    assert ("there is no such file" in str(error.value)) == (text is None)
    assert "pydantic" not in str(error.value) and "validation error" not in str(error.value)
    assert len(error.value.args) == 1
