"""``ds_ucp supervise`` with real processes; ssh and the launcher are stand-ins (:mod:`tests.supervise.standins`)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.config import ENVIRONMENT
from deepspeed_ucp.heartbeat import VARIABLE
from deepspeed_ucp.supervise.supervisor import _write_exports, describe_code
from tests.supervise.standins import Stage, build, is_running, kill, wait_until

A, B = "127.0.0.2", "127.0.0.3"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return build(tmp_path)


def assert_nothing_is_left(stage: Stage) -> None:
    wait_until(lambda: not any(map(is_running, stage.pids())))


def test_a_launch_that_fails_is_started_again_and_goes_on(stage: Stage) -> None:
    assert stage.run(command=stage.launch(steps=5, fail_1=3)) == 0
    assert stage.names() == ["starting", "running", "failed", "restarting", "starting", "running", "finished"]
    (failed,) = stage.find("failed")
    assert (failed["rank"], failed["code"], failed["error"]) == (1, 1, "RuntimeError: broken at 3 on rank 1")
    assert failed["step"] in (2, 3)
    assert stage.find("finished")[0]["step"] == 5
    assert len(stage.pids()) == 4
    assert_nothing_is_left(stage)


def test_a_script_that_always_fails_at_one_step_is_given_up_with_its_error(stage: Stage) -> None:
    assert stage.run(command=stage.launch(steps=5, always_0=3)) == 1
    assert stage.names().count("starting") == 3
    (last,) = stage.find("gave_up")
    assert "3 times after step" in last["reason"]
    assert last["error"].endswith("RuntimeError: broken at 3 on rank 0\n")
    assert "Traceback" in last["error"]
    assert last["first"].endswith("RuntimeError: broken at 3 on rank 0")
    line = (stage.folder / "output").read_text().rstrip().splitlines()[-1]
    assert line == f"ds_ucp supervise: given up: {last['reason']}. The last time {last['first']}"


def test_restarts_are_limited(stage: Stage) -> None:
    """What follows a rank that alone was told to go, as on a host that is drained, is one of them."""
    assert stage.run("--max-restarts", "1", command=stage.launch(go_1=2, always_0=3)) == 1
    drained, failed = stage.find("failed")
    # What is heard at once, after a pause of the supervisor, has no order: the launcher has told the other one to go.
    assert drained["code"] == 143 and drained["rank"] in (0, 1)
    assert (failed["code"], failed["rank"]) == (1, 0)
    assert "1 restarts were allowed" in stage.find("gave_up")[0]["reason"]
    assert stage.names().count("starting") == 2


def test_a_host_that_does_not_answer_is_left_out_until_it_does(stage: Stage) -> None:
    hostfile = stage.write_hosts(A, B)
    (stage.folder / "wait").touch()
    with stage.supervise("--hostfile", hostfile, "--settle", "2", command=stage.launch(steps=4)) as process:
        stage.wait_for_ranks()
        for folder in stage.folder.glob("ds_ucp_supervise_*"):  # as what tidies /tmp up does after weeks
            shutil.rmtree(folder)
        (stage.folder / "down" / B).touch()
        kill(stage.pids(B))
        wait_until(lambda: stage.names().count("starting") == 2)
        (stage.folder / "wait").unlink()
        assert process.wait(timeout=120) == 0
    first, second = stage.find("starting")
    assert (first["hosts"], second["hosts"]) == ({A: 1, B: 1}, {A: 1})
    assert stage.find("restarting")[0]["lost"] == [B]
    assert not list(stage.folder.glob("ds_ucp_supervise_*"))
    assert_nothing_is_left(stage)


def test_too_few_hosts_are_waited_for(stage: Stage) -> None:
    hostfile = stage.write_hosts(A, B)
    (stage.folder / "down" / A).touch()
    with stage.supervise("--min-nodes", "2", command=["deepspeed", "--hostfile", hostfile, *stage.launch(3)[1:]]) as p:
        wait_until(lambda: "waiting" in stage.names())
        assert "starting" not in stage.names()
        (stage.folder / "down" / A).unlink()
        assert p.wait(timeout=120) == 0
    assert stage.find("waiting")[0] | {"time": 0} == {
        "event": "waiting", "time": 0, "answering": [B], "missing": [A], "needed": 2,
    }  # fmt: skip
    assert stage.find("starting")[0]["hosts"] == {A: 1, B: 1}


def test_they_are_not_waited_for_for_ever(stage: Stage) -> None:
    hostfile = stage.write_hosts(A, B)
    (stage.folder / "down" / A).touch()
    options = ("--min-nodes", "2", "--wait", "0.5", "--hostfile", hostfile)
    assert stage.run(*options, command=stage.launch()) == 1
    assert stage.find("gave_up")[0]["missing"] == [A]


def test_a_rank_that_is_stopped_hangs_the_launch_which_is_started_again(stage: Stage) -> None:
    (stage.folder / "wait").touch()
    with stage.supervise("--hang", "10", command=stage.launch(steps=4, stop_1=2)) as process:
        wait_until(lambda: "hanging" in stage.names())
        (stage.folder / "wait").unlink()
        assert process.wait(timeout=120) == 0
    hanging, *_ = stage.find("hanging")
    assert hanging["seconds"] >= 10
    assert hanging["ranks"] == 2
    assert stage.find("failed")[0]["reason"].startswith("no rank has ended a step for")
    assert_nothing_is_left(stage)


@pytest.mark.parametrize(
    ("number", "platform", "code"),
    [(signal.SIGTERM, "", 0), (signal.SIGTERM, "KUBERNETES_SERVICE_HOST", 143), (signal.SIGUSR1, "", 0)],
    ids=["SIGTERM", "SIGTERM in a pod", "SIGUSR1"],
)
def test_signals_go_on_to_every_rank(stage: Stage, number: signal.Signals, platform: str, code: int) -> None:
    """What is around the supervisor would take 0 for the end of the job, which has not done its work."""
    if platform:
        stage.environment[platform] = "10.96.0.1"
    (stage.folder / "wait").touch()
    with stage.supervise(command=stage.launch(steps=4), through="nohup") as process:
        stage.wait_for_ranks()
        process.send_signal(signal.SIGHUP)  # which nohup has it ignore
        process.send_signal(number)
        told = stage.folder / "signals"
        wait_until(lambda: told.exists() and len(told.read_text().splitlines()) == 2)
        (stage.folder / "wait").unlink()
        assert process.wait(timeout=120) == code
    assert sorted(told.read_text().split("\n")) == ["", f"0 {number:d}", f"1 {number:d}"]
    assert stage.find("signal")[0]["ranks"] == 2
    assert stage.names()[-1] == ("stopped" if number == signal.SIGTERM else "finished")
    assert stage.names().count("starting") == 1
    assert_nothing_is_left(stage)


@pytest.mark.parametrize(("number", "times", "settle"), [(signal.SIGTERM, 1, "0.5"), (signal.SIGINT, 2, "600")])
def test_a_launch_that_does_not_go_is_ended(stage: Stage, number: int, times: int, settle: str) -> None:
    """In time, or when it is interrupted a second time; a shell has what it runs in the background ignore that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = ["sh", "-c", "trap '' TERM INT; touch $STANDIN/there; sleep 1000 & wait; sleep 1000"]
    with stage.supervise("--settle", settle, command=command) as p:
        wait_until((stage.folder / "there").exists)
        for time in range(times):
            p.send_signal(number)
            wait_until(lambda time=time: stage.names().count("signal") > time)
        assert p.wait(timeout=120) == 128 + number
    assert stage.names()[-1] == "stopped"


def test_ranks_end_with_their_supervisor(stage: Stage) -> None:
    (stage.folder / "wait").touch()
    with stage.supervise(command=stage.launch()) as process:
        stage.wait_for_ranks()
        process.kill()
        assert_nothing_is_left(stage)
    assert "the watcher at 127.0.0.1" in (stage.folder / "output").read_text()


def test_what_a_launch_leaves_is_ended_when_it_is_killed_and_when_it_is_done(stage: Stage) -> None:
    (stage.folder / "wait").touch()
    launch = " ".join(stage.launch(4, leave_0=1, leave_1=4))
    with stage.supervise("--settle", "1", command=["sh", "-c", f'{launch} & echo $! > "$STANDIN/it"; wait']) as p:
        stage.wait_for_ranks()
        told = stage.folder / "left"
        wait_until(lambda: told.exists() and told.read_text())
        left = int(told.read_text())
        before = [*stage.pids(), left]
        os.kill(int((stage.folder / "it").read_text()), signal.SIGKILL)
        wait_until(lambda: stage.names().count("starting") == 2)
        assert not any(map(is_running, before))
        (stage.folder / "wait").unlink()
        assert p.wait(timeout=120) == 0
    assert int((stage.folder / "left").read_text()) != left
    assert not is_running(int((stage.folder / "left").read_text()))
    assert_nothing_is_left(stage)


def test_an_exit_code_of_0_is_not_believed_where_all_ranks_were_killed(stage: Stage) -> None:
    stage.environment["STANDIN_FORGIVES"] = "1"
    assert stage.run(command=stage.launch(4, die_0=3)) == 0
    (failed,) = stage.find("failed")
    # The launcher may take leave of the rank before its exit status has been read.
    reasons = ("was ended by SIGKILL after step 2", "has gone without a word after step 2")
    assert failed["reason"].endswith(reasons) and failed["rank"] in (0, 1)  # it kills the other one, too
    assert stage.find("finished")[0]["step"] == 4


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (1, "it ended with 1"),
        (247, "it ended with 247, as where SIGKILL has ended a rank"),
        (143, "it ended with 143, as where SIGTERM has ended a rank"),
        (-9, "SIGKILL ended it"),
    ],
)
def test_exit_codes_are_told_by_their_signals(code: int, told: str) -> None:
    """256 - 9 is the deepspeed launcher's, 128 + 15 a shell's."""
    assert describe_code(code) == told


def test_the_exit_code_of_a_launch_that_a_signal_ended_is_a_shells(stage: Stage) -> None:
    assert stage.run("--max-restarts", "0", command=["bash", "-c", "kill -9 $$"]) == 128 + signal.SIGKILL


def test_of_a_launch_without_the_plugin_it_is_told_once_what_is_not_seen(stage: Stage) -> None:
    assert stage.run("--max-restarts", "1", command=["sh", "-c", "exit 3"]) == 3
    assert stage.names().count("starting") == 2
    (told,) = stage.find("unheard")
    assert "DEEPSPEED_UCP=1" in told["reason"]


@pytest.mark.parametrize(
    "option", [("--hang", "-1"), ("--settle", "nan"), ("--min-nodes", "0"), ("--max-restarts", "x")]
)
def test_numbers_have_limits(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["supervise", *option, "--", "true"])
    assert f"argument {option[0]}: invalid number from" in capsys.readouterr().err


def test_a_program_that_is_not_there_is_an_error(stage: Stage) -> None:
    assert stage.run(command=["/nowhere/deepspeed", "train.py"]) == 2
    assert "/nowhere/deepspeed: No such file" in (stage.folder / "output").read_text()


FAILING = """
import os, pathlib, sys, time
from deepspeed_ucp import heartbeat
from tests.supervise.standins import is_running
heartbeat.report_step(1)
there = pathlib.Path({folder!r}, "there")
if os.environ["RANK"] == "1":
    there.with_name("next").write_text(str(os.getpid())); os.replace(there.with_name("next"), there)
    {end}
while not there.exists() or is_running(int(there.read_text())):
    time.sleep(0.01)
time.sleep({rest})
raise ConnectionError("closed by peer")
"""


@pytest.mark.parametrize(
    ("end", "rest", "told"),
    [
        ("sys.exit(1)", 600, "ended with 1"),
        ("os._exit(17)", 0.2, "ended with 17"),
        ("os.kill(os.getpid(), 9)", 0.2, "(was ended by SIGKILL|has gone without a word) after"),
    ],
    ids=["exit-while-another-hangs", "at-once", "killed"],
)
def test_the_rank_that_failed_first_is_named_and_not_waited_for(end: str, rest: float, told: str, stage: Stage) -> None:
    """Its launcher may notice nothing, and others may tell of it before they end themselves."""
    (stage.folder / "rank.py").write_text(FAILING.format(end=end, rest=rest, folder=str(stage.folder)))
    ranks = " & ".join(f"RANK={rank} {sys.executable} {stage.folder / 'rank.py'}" for rank in (0, 1))
    command = ["bash", "-c", f"{ranks} & wait; exit 1"]
    assert stage.run("--settle", "2", "--max-restarts", "0", command=command) == 1
    (failed,) = stage.find("failed")
    assert failed["rank"] == 1
    assert re.match(f"rank 1 on .* {told}", failed["reason"])  # bash may take leave of it before anybody looks


def test_what_switches_the_plugin_on_reaches_every_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the quotes that DeepSpeed's launcher puts around it; its own file of variables counts first."""
    value = '{"patterns": "a\\\\b $HOME `id`"}'
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(ENVIRONMENT, value)
    Path(".deepspeed_env").write_text("MINE=1\n")
    (name, text), *others = (line.split("=", 1) for line in Path(_write_exports(".", "line")).read_text().splitlines())
    done = subprocess.run(["bash", "-c", f'printf %s "{text}"'], capture_output=True, text=True, check=True)
    assert (name, done.stdout) == (ENVIRONMENT, value)
    assert others == [["MINE", "1"], [VARIABLE, "line"]]
