"""Launches whose ranks are forked fail, hang and end as any others (``tests/supervise`` has what else there is)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from tests.supervise.standins import ROOT, build, is_running, kill, wait_until
from tests.warm.kit import SITE


def test_forked_ranks_are_ended_when_they_hang_and_with_their_supervisor(tmp_path: Path) -> None:
    stage = build(tmp_path)
    stage.warm = True
    (tmp_path / "sitecustomize.py").write_text(SITE)
    stage.environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    with stage.supervise("--hang", "10", command=stage.launch(steps=1_000_000)) as process:
        stage.wait_for_ranks()
        wait_until(lambda: stage.find("template"))
        os.kill(stage.pids()[0], signal.SIGKILL)
        wait_until(lambda: stage.names().count("running") == 2 and len(stage.pids()) == 4)
        stopped = stage.pids()[2:3]
        wait_until(lambda: kill(stopped, signal.SIGSTOP) or stage.find("hanging"))  # as often as something wakes it
        wait_until(lambda: stage.names().count("running") == 3 and len(stage.pids()) == 6)
        (hanging,) = stage.find("hanging")
        assert hanging["ranks"] == 2
        assert not any(map(is_running, stage.pids()[:4]))
        ranks = [psutil.Process(pid) for pid in stage.pids()[4:]]
        (template,) = {rank.parent() for rank in ranks}
        assert "template.py" in " ".join(template.cmdline())
        assert ranks[0].cmdline()[1:] == [str(tmp_path / "rank.py"), str(tmp_path), "1000000"]
        everything = psutil.Process(process.pid).children(recursive=True)
        assert len(everything) >= 6  # the launcher and the ranks, all of them with who is in front; the template
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_running(each.pid) for each in everything))
    assert [event.keys() >= {"modules", "megabytes"} for event in stage.find("template")] == [True]
