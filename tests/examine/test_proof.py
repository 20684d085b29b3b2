"""A seal or a manifest proves a folder: the same files pass, any other is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import convert_checkpoint
from deepspeed_ucp.errors import ConfigError
from deepspeed_ucp.examine.verify import verify_checkpoint
from deepspeed_ucp.formats.deepspeed.files import MANIFEST, SEAL
from deepspeed_ucp.formats.open import seal_folder
from tests.support.ranks import run_ranks
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

MODEL = Model((Param("a", (9, 5)), Param("b", (17,), group=1)))
OPTIM = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def write(folder: Path, seed: int = 0) -> Path:
    return write_checkpoint(folder, MODEL, random_state(MODEL, seed), Topology(3, 3))


@pytest.fixture
def proofs(tmp_path: Path) -> dict[str, Path]:
    """The folder, its seal in another place, and the manifest of its conversion."""
    folder = write(tmp_path)
    seal_folder(str(folder), Comm())
    shutil.move(folder / SEAL, tmp_path / "kept.json")
    convert_checkpoint(str(folder))
    return {"folder": folder, "seal": tmp_path / "kept.json", "manifest": Path(f"{folder}_universal") / MANIFEST}


@pytest.mark.parametrize("kind", ["seal", "manifest"])
def test_a_proof_passes_proven_files_and_names_others(proofs: dict[str, Path], tmp_path: Path, kind: str) -> None:
    folder, against = proofs["folder"], str(proofs[kind])
    assert verify_checkpoint(str(folder), against=against).faults == ()
    shutil.copy(write(tmp_path / "other", 1) / OPTIM, folder / OPTIM)
    assert verify_checkpoint(str(folder)).whole
    assert [(fault.kind, fault.file) for fault in verify_checkpoint(str(folder), against=against).faults] == [
        ("seal", OPTIM)
    ]
    assert main(["verify", str(folder), "--against", against]) == 1
    (folder / OPTIM).unlink()
    faults = verify_checkpoint(str(folder), against=against).faults
    assert {(fault.kind, fault.file) for fault in faults} == {("missing", OPTIM)}


def test_a_manifest_proves_its_folder(proofs: dict[str, Path], tmp_path: Path) -> None:
    atomic = proofs["manifest"].parent
    kept = shutil.copy(atomic / MANIFEST, tmp_path / "manifest.json")
    other = write(tmp_path / "other", 1)
    convert_checkpoint(str(other))
    assert verify_checkpoint(str(atomic), against=str(kept)).faults == ()
    faults = verify_checkpoint(f"{other}_universal", against=str(kept)).faults
    assert {"zero/a/fp32.pt", "zero/b/exp_avg.pt"} <= {fault.file for fault in faults if fault.kind == "seal"}


def test_ranks_report_the_same(proofs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(write(tmp_path / "other", 1) / OPTIM, proofs["folder"] / OPTIM)

    def work(_: int, comm: Any) -> Any:
        return verify_checkpoint(str(proofs["folder"]), comm, against=str(proofs["seal"])).faults

    results = run_ranks(3, work)
    assert results == [verify_checkpoint(str(proofs["folder"]), against=str(proofs["seal"])).faults] * 3


@pytest.mark.parametrize("text", [None, "", "{}", "[" * 9999])
def test_invalid_proofs_are_refused(proofs: dict[str, Path], tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "proof").write_text(text)
    with pytest.raises(ConfigError, match="--against: neither a seal .ucp_seal.json, .*proof: ") as error:
        verify_checkpoint(str(proofs["folder"]), against=str(tmp_path / "proof"))
    assert ("there is no such file" in str(error.value)) == (text is None)
    assert "pydantic" not in str(error.value) and "validation error" not in str(error.value)
    assert len(error.value.args) == 1
