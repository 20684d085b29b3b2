"""What ends the processes of a launch, and what tells of it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from pathlib import Path

import pytest

from deepspeed_ucp.errors import ConfigError
from deepspeed_ucp.supervise.log import make_log
from deepspeed_ucp.supervise.processes import make_sweep
from tests.supervise.standins import is_running, wait_until


def test_a_sweep_ends_what_was_started_with_a_word_and_what_that_has_forked(tmp_path: Path) -> None:
    word, others = secrets.token_hex(8), secrets.token_hex(8)
    child, there = tmp_path / "child", tmp_path / "there"
    command = ["sh", "-c", f"(sleep 600) & echo $! > {child}; mv {child} {there}; sleep 600"]
    swept = subprocess.Popen(command, env={**os.environ, "LINE": f"host:1:{word}"})
    kept = subprocess.Popen(["sleep", "600"], env={**os.environ, "LINE": f"host:1:{others}"})
    try:
        wait_until(there.exists)
        subprocess.run(make_sweep(word), shell=True, check=True)
        assert swept.wait(timeout=120) == -9
        wait_until(lambda: not is_running(int(there.read_text())))
        subprocess.run(make_sweep(word), shell=True, check=True)
        assert kept.poll() is None
    finally:
        for process in (swept, kept):
            process.kill()
            process.wait()


def test_a_sweep_is_for_no_word_that_others_may_have() -> None:
    with pytest.raises(ValueError, match="too short"):
        make_sweep("")


def test_a_full_disk_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tell = make_log("/dev/full", pid=7)
    tell("running", ranks=2)
    complaint, line = capsys.readouterr().err.splitlines()
    assert "/dev/full: nothing can be written there (No space left on device)" in complaint
    assert json.loads(line) | {"time": 0} == {"event": "running", "time": 0, "pid": 7, "ranks": 2}


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        make_log(str(tmp_path / "none" / "events"))
