"""What follows a failure, and what a hostfile and a command line come to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepspeed_ucp.errors import ConfigError
from deepspeed_ucp.supervise.command import parse_command
from deepspeed_ucp.supervise.hosts import find_own_address, find_ssh_name, is_local, read_hostfile, write_hostfile
from deepspeed_ucp.supervise.policy import Attempt, Decision, RestartLimits, decide


def follow(*steps: int | None, lost: tuple[int, ...] = (), restarts: int = 100) -> Decision:
    """The decision after launches that ended at these steps; of those at ``lost`` a host was missing."""
    return decide([Attempt(step, lost=at in lost) for at, step in enumerate(steps)], RestartLimits(restarts=restarts))


@pytest.mark.parametrize(
    ("steps", "lost", "goes_on"),
    [
        ((5, 5, 5), (), False),
        ((1, 5, 5, 5), (), False),
        ((None, None, None), (), False),
        ((5, None, None), (), False),  # from the save of step 5 it does not come to step 6
        ((5, 5), (), True),
        ((5, 5, 6), (), True),
        ((5, 6, 5), (), True),
        ((5, 5, 5), (1,), True),
        ((5, 5, 5), (0,), True),
        ((5, 5, 5, 5, 5), (1,), False),
    ],
)
def test_a_script_that_fails_thrice_at_one_step_is_at_fault(
    steps: tuple[int | None, ...], lost: tuple[int, ...], goes_on: bool
) -> None:
    decision = follow(*steps, lost=lost)
    assert (decision.pause is not None) == goes_on
    assert ("the script itself" in decision.reason) != goes_on


def test_restarts_are_counted() -> None:
    assert follow(1, 2, restarts=2).pause is not None
    assert follow(1, 2, 3, restarts=2) == Decision(None, "2 restarts were allowed")


@pytest.mark.parametrize(
    ("steps", "pause"),
    [((4,), 1), ((4, 4), 2), ((4, 2), 2), ((4, 6), 1), ((4, 4, 7, 6, 6), 4), ((9, *[8, 7] * 40), 60)],
)
def test_pauses_grow_until_a_launch_comes_further(steps: tuple[int, ...], pause: float) -> None:
    assert follow(*steps).pause == pause


def test_hostfiles_are_read_as_the_launcher_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# all\n\nworker-1 slots=4 max=8\n  worker-0   slots=2\n")
    hosts = read_hostfile(str(path))
    assert list(hosts.items()) == [("worker-1", 4), ("worker-0", 2)]
    write_hostfile(str(path), hosts)
    assert list(read_hostfile(str(path)).items()) == list(hosts.items())
    from deepspeed.launcher import runner

    assert runner.fetch_hostfile(str(path)) == hosts


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("worker-0 slots=2\nworker-0 slots=2\n", "line 2: worker-0 stands there twice. Keep one of its lines"),
        ("worker-0\n", "line 1: expected `HOST slots=N`, found 'worker-0'"),
        ("-oProxyCommand=x slots=2\n", "line 1: expected"),
        ("x" * 64 + ".org slots=2\n", "line 1: 'x{64}.org' is no name of a host: .*1 to 63 characters"),
        ("a..b slots=2\n", "line 1: 'a..b' is no name of a host"),
        ("# none\n", "names no host. Write a line `HOST slots=N`"),
    ],
)
def test_other_hostfiles_are_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_hostfile(str(path))


def test_a_hostfile_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hostfile cannot be read"):
        read_hostfile(str(tmp_path / "hosts"))


def test_this_machine_is_known() -> None:
    assert is_local("localhost")
    assert is_local("127.0.0.7")
    assert not is_local("192.0.2.1")
    assert find_own_address({"127.0.0.2": 1}) == "127.0.0.1"


def test_ssh_knows_hosts_by_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text('#!/bin/sh\n[ "$*" != "-G far" ] || echo "user me\nhostname 192.0.2.1\nport 22"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_ssh_name("far") == "192.0.2.1"
    assert find_ssh_name("near") == "near"
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_ssh_name("far") == "far"


LAUNCH = "deepspeed -H hosts --no_ssh_check --master_addr=10.0.0.1 -i a:0,1@b --master_port 29501 train.py -H x --lr 1"


def test_a_launchers_command_is_taken_apart() -> None:
    command = parse_command(LAUNCH.split())
    assert command.program == ("deepspeed",)
    assert command.find("--hostfile") == "hosts"
    assert command.find("--master_addr") == "10.0.0.1"
    assert command.find("--ssh_port") is None
    assert command.script == ("train.py", "-H", "x", "--lr", "1")


@pytest.mark.parametrize(
    ("hosts", "lost", "told"),
    [
        (
            {"a": 1, "b": 1},
            (),
            "--hostfile new --no_ssh_check --master_addr 10.0.0.1 --include a:0,1@b --master_port 29501",
        ),
        ({"127.0.0.1": 1, "b": 1}, ("a",), "--hostfile new --no_ssh_check --include b --master_port 29501"),
        # a lone host that is not this machine: the launcher would start its ranks here
        ({"b.invalid": 1}, ("a", "b"), "--hostfile new --no_ssh_check --master_port 29501 --force_multi"),
        (
            {"127.0.0.1": 1},
            ("a", "b"),
            "--hostfile new --master_port 29501 --no_ssh_check --master_addr 127.0.0.1",
        ),
    ],
)
def test_a_command_is_narrowed_to_the_hosts_that_are_left(
    hosts: dict[str, int], lost: tuple[str, ...], told: str
) -> None:
    narrowed = parse_command(LAUNCH.split()).narrow("new", hosts, lost)
    assert narrowed.words() == ["deepspeed", *told.split(), "train.py", "-H", "x", "--lr", "1"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ("", "abc"),
        ("-i c@a:1", "ac"),
        ("-e b@c:0,1", "a"),
        ("--exclude=a:0@c:1", "abc"),
        ("--include b -i c", "c"),
    ],
)
def test_hosts_are_those_that_the_launcher_would_take(options: str, left: str) -> None:
    hosts = dict.fromkeys("abc", 2)
    command = parse_command(["deepspeed", *options.split(), "train.py"])
    assert list(command.select(hosts)) == list(left)
    from deepspeed.launcher import runner

    filters = [command.find(name) or "" for name in ("--include", "--exclude")]
    assert list(runner.parse_inclusion_exclusion(hosts, *filters)) == list(left)
    assert "b" not in str(command.narrow("new", {"a": 2, "c": 2}, ()).options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("-i worker-9:0", "does not name worker-9. Take one of a, b, c"),
        ("-e a@b@c", "no host of the hostfile is left. Include one more"),
    ],
)
def test_filters_that_leave_no_host_are_refused(options: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_command(["deepspeed", *options.split(), "train.py"]).select(dict.fromkeys("abc", 2))


def test_the_launchers_own_parser_agrees() -> None:
    """All options of the installed release: which take a value decides where the script begins."""
    import argparse

    from deepspeed.launcher import runner

    found: list[argparse.ArgumentParser] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", lambda self, args=None: found.append(self))
        runner.parse_args([])
    for action in found[0]._actions:
        for name in action.option_strings:
            words = ["deepspeed", name, *([] if action.nargs == 0 else ["3"]), "train.py"]
            assert parse_command(words).script == ("train.py",), name


def test_other_programs_stay_as_they_are() -> None:
    words = ["torchrun", "--nproc-per-node", "2", "train.py"]
    assert parse_command(words).words() == words
    assert not parse_command(words).takes_hosts
    assert parse_command(["python", "-m", "deepspeed.launcher.runner", "-q", "x.py"]).script == ("x.py",)


@pytest.mark.parametrize(("words", "told"), [([], "no command"), (["deepspeed", "-q"], "no training script")])
def test_a_command_that_lacks_something_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_command(words)
