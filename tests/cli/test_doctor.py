"""``ds_ucp doctor``: one file with what is needed to find a fault, and without secrets."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.cli import doctor
from deepspeed_ucp.cli.dispatch import main
from tests.cli.samples import DS_CONFIG, make_gpt, write_sample
from tests.synth import Topology

SECRET = "S3cr3tS3cr3t"
LOG = f"""Traceback (most recent call last):
  File "train.py", line 3
deepspeed_ucp.errors.CheckpointError: https://user:{SECRET}@host/run: damaged
export AWS_SECRET_ACCESS_KEY={SECRET}
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    monkeypatch.setenv("DEEPSPEED_UCP", json.dumps({"seal": True, "storage_options": {"anything": SECRET}}))


def save(**client: Any) -> Path:
    config = {**DS_CONFIG, "zero_optimization": {"stage": 1}, "wandb": {"api_key": SECRET, "team": "t"}}
    return write_sample("saved", Topology(1, 2, "bf16"), make_gpt(1), ds_config=config, client_state=client)


def test_one_file_tells_all_but_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    save(epoch=2, hub_token=SECRET)
    Path("train.log").write_text(LOG)
    assert main(["doctor", "saved", "--error", "train.log"]) == 0
    shown, told = capsys.readouterr(), Path(doctor.FILE).read_text(encoding="utf-8")
    for text in ("deepspeed 0.", "torch 2.", '"team": "t"', "ZeRO-1 dp=2 bfloat16", "h.0.mlp", '"seal": true', "epoch"):
        assert text in told, text
    assert "CheckpointError: https://…@host/run: damaged" in told
    assert SECRET not in told + shown.out + shown.err
    assert not {"MY_PASSWORD", "PATH"} & set(told.split())
    assert sorted(path.name for path in Path().iterdir()) == [doctor.FILE, "saved", "train.log"]


def test_a_checkpoint_that_does_not_open_is_told_all_the_same(run_json: Any) -> None:
    next(save().glob("*rank_1*optim_states.pt")).unlink()
    code, found = run_json("doctor", "saved")
    assert (code, found["opens"]) == (1, False)
    assert any("optim_states.pt" in line and "missing" in line for line in found["checkpoint"])
    code, found = run_json("doctor", "nowhere")
    assert (code, found["checkpoint"]) == (1, ["nowhere does not exist."])


def test_a_fault_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch, run_json: Any) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError(f"password={SECRET}")

    monkeypatch.setattr(doctor, "look_at", fail)
    code, found = run_json("doctor", "saved")
    assert (code, found["checkpoint"][-1]) == (1, "ZeroDivisionError: password=(hidden)")


def test_a_configuration_may_be_given_and_a_log_piped(monkeypatch: pytest.MonkeyPatch, run_json: Any) -> None:
    Path("ds_config.json").write_text(f'{{"train_batch_size": 8, /* why */ "comet": {{"api_key": "{SECRET}"}}}}')
    monkeypatch.setattr("sys.stdin", io.StringIO("line\n" * 1000 + LOG))
    code, found = run_json("doctor", "--config", "ds_config.json", "--error", "-")
    assert (code, found["ds_config"]) == (0, {"train_batch_size": 8, "comet": {"api_key": "(hidden)"}})
    assert found["error"][-1] == "export AWS_SECRET_ACCESS_KEY=(hidden)"
    assert len(found["error"]) == 400


@pytest.mark.parametrize(
    ("there", "told"), [(True, "DEEPSPEED_UCP is looked at (here/deepspeed_ucp.pth)"), (False, "in none of here")]
)
def test_whether_the_environment_is_looked_at(
    there: bool, told: str, monkeypatch: pytest.MonkeyPatch, run_json: Any
) -> None:
    monkeypatch.setattr("site.getsitepackages", lambda: ["here"])
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)
    Path("here").mkdir()
    if there:
        Path("here/deepspeed_ucp.pth").touch()
    assert told in run_json("doctor")[1]["machine"]["start of Python"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--out", "mine.txt"], "mine.txt: is there, and no earlier report"),
        (["--out", "nowhere/x"], "nowhere/x: cannot be written (No such file or directory)"),
        (["--error", "nowhere"], "--error: nowhere cannot be read"),
        (["--config", "mine.txt"], "mine.txt: is no ds_config"),
    ],
)
def test_nothing_of_others_is_written_over(more: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.txt").write_text("{")
    assert main(["doctor", *more]) == 2
    assert told in capsys.readouterr().err
    assert Path("mine.txt").read_text() == "{"
    assert main(["doctor"]) == main(["doctor"]) == 0
