"""The first line of each command is its verdict, the exit code agrees with it, and nothing follows an obstacle."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from deepspeed_ucp.cli.dispatch import main
from tests.cli.samples import make_gpt, write_sample
from tests.cli.test_verify import flip_largest
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
STEP = "ROOT/*/global_step3: "
COMPARED = "35 tensors (13.0 k elements) compared"


class Case(NamedTuple):
    """A command line, its exit code, and the first line that it prints.

    ROOT is the folder of all checkpoints, ``*`` any text.
    """

    line: str
    code: int
    verdict: str


CASES = [
    Case("list ROOT/good", 0, "1 checkpoint, all complete; a resume takes global_step3 from storage"),
    Case("list ROOT/missing", 1, "1 checkpoint, 1 not complete; a resume takes global_step3 *, which is not complete"),
    Case("list ROOT/weights", 0, "1 checkpoint, all complete; a resume takes global_step3 from storage"),
    Case("verify ROOT/good", 0, f"{STEP}complete, all checksums match"),
    Case("verify ROOT/warned/global_step3", 0, f"{STEP}complete, all checksums match (1 warning)"),
    Case("verify ROOT/good --headers-only", 0, f"{STEP}complete by names, sizes and headers; checksums were not *"),
    Case("verify ROOT/legacy", 0, f"{STEP}complete by names and sizes; no checksums to compare"),
    Case("verify ROOT/mixed", 0, f"{STEP}complete; * KiB have no checksums to compare, the rest matches"),
    Case("verify ROOT/damaged", 1, f"{STEP}1 fault"),
    Case("verify ROOT/missing", 1, f"{STEP}1 fault"),
    Case("verify ROOT/dangling", 1, "ROOT/dangling: 1 fault"),
    Case("inspect ROOT/good", 0, f"{STEP}opens"),
    Case("inspect ROOT/missing", 2, f"{STEP}does not open. Its files:"),
    Case("diff ROOT/good ROOT/good", 0, f"equal: {COMPARED}"),
    Case("diff ROOT/good ROOT/other", 1, f"different: 2 other values differ; {COMPARED}"),
    Case("diff ROOT/good ROOT/damaged", 1, f"different: 1 tensor differs; {COMPARED}"),
    Case("diff ROOT/good ROOT/damaged --tolerance inf", 0, f"equal within inf: 1 tensor differs; {COMPARED}"),
    Case("diff --config ROOT/good ROOT/good", 0, "equal: ds_config and hyper-parameters"),
    Case("plan ROOT/good --target dp=3,zero=3", 0, "possible: deepspeed_ucp loads it on 3 ranks"),
    Case("plan ROOT/good --target dp=2,zero=1", 0, "possible: DeepSpeed loads it on 2 ranks"),
    Case("plan ROOT/good --target dp=2,ep=2", 1, "not possible"),
    Case("plan ROOT/good --target dp=5,tp=3 --read-gbs 2", 1, "not possible"),
    Case("plan --params 1B --ranks 4", 0, "possible: 6.52 GiB of memory for each rank's engine"),
    Case("plan --params 1B --ranks 4 --stage 2 --target pp=2", 1, "not possible"),
    Case("convert ROOT/good ROOT/made", 0, "ROOT/made: 35 tensors, * KiB in *"),
    Case("convert ROOT/good ROOT/made", 0, "ROOT/made: already there, made of the same checkpoint."),
    Case("export ROOT/good ROOT/weights-out", 0, "ROOT/weights-out: * tensors *"),
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and its variants."""
    root = tmp_path_factory.mktemp("verdicts")
    good = write_sample(root / "good", Topology(1, 2, "bf16"), make_gpt(1))
    for name in ("damaged", "missing", "weights", "warned", "dangling"):
        shutil.copytree(good.parent, root / name)
    flip_largest(root / "damaged" / good.name / OPTIM)
    (root / "missing" / good.name / OPTIM).unlink()
    for path in (root / "weights" / good.name).glob("*optim_states.pt"):
        path.unlink()
    (root / "warned" / "latest").write_text("global_step99")
    (root / "dangling" / "latest").write_text("global_step99")
    write_sample(root / "other", Topology(3, 1, "bf16"), make_gpt(1), global_steps=4)
    model = Model((Param("a", (30, 50)),))
    for name in ("legacy", "mixed"):
        write_checkpoint(root / name, model, random_state(model, 0), Topology(1, 2), legacy=True)
    write_checkpoint(root / "zip", model, random_state(model, 0), Topology(1, 2))
    states = next((root / "zip").glob("*/mp_rank_00_model_states.pt"))
    shutil.copy(states, next((root / "mixed").glob(f"*/{states.name}")))
    return root


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.line.replace("ROOT/", ""))
def test_the_first_line_is_the_verdict(case: Case, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(case.line.replace("ROOT", str(root)).split())
    first, *rest = capsys.readouterr().out.splitlines()
    assert code == case.code
    assert re.fullmatch(re.escape(case.verdict).replace(r"\*", ".*"), first.replace(str(root), "ROOT"))
    if case.verdict == "not possible":
        assert not [line for line in rest if "iB" in line or "assumed" in line]
