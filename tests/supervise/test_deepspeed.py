"""``ds_ucp supervise`` over the real ``deepspeed`` launcher: with stand-ins for pdsh and ssh, and with two network
namespaces as two hosts, whose link is cut in the middle of a step."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.supervise.standins import ROOT, Stage, build, is_running, kill, wait_until

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(280)]

RANK = """
import os, sys, time, pathlib
if os.path.exists("/sys/class/net/cable"):
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"
folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
import deepspeed_ucp
from deepspeed_ucp import lifeline
(folder / "pids").open("a").write(f"{os.getpid()} {os.environ['RANK']} {os.environ.get('STANDIN_HOST', '')}\\n")
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
saved = folder / "saved"
step = int(saved.read_text() or 0) if saved.exists() else 0
while step < steps:
    dist.all_reduce(torch.ones(1))
    step += 1
    lifeline.beat(step)
    (folder / f"at-{dist.get_rank()}").touch()
    if dist.get_rank() == 0:
        (folder / "next").write_text(str(step)); os.replace(folder / "next", saved)
    while (folder / "wait").exists() and step > 2:
        time.sleep(0.02)
        dist.all_reduce(torch.ones(1))
"""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = build(tmp_path)
    (tmp_path / "bin" / "deepspeed").unlink()
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "wait").touch()
    beside = os.path.dirname(sys.executable)
    stage.environment["PATH"] = f"{tmp_path / 'bin'}:{beside}:{os.environ['PATH']}"
    stage.environment["DS_ACCELERATOR"] = "cpu"
    return stage


def launch(stage: Stage, *options: str) -> list[str]:
    script = [str(stage.folder / "rank.py"), str(stage.folder), "5"]
    return ["deepspeed", "--no_local_rank", "--master_port", "29611", *options, *script]


def test_a_lost_host_is_left_out(stage: Stage) -> None:
    """Its ranks are killed and its name no longer answers; the launcher goes over pdsh first, and then starts the lone
    host's ranks itself."""
    hosts = stage.write_hosts("127.0.0.2", "127.0.0.3")
    with stage.supervise(
        "--hostfile", hosts, "--settle", "5", command=launch(stage, "--master_addr", "127.0.0.1")
    ) as p:
        wait_until(lambda: all((stage.folder / f"at-{rank}").exists() for rank in (0, 1)), 120)
        wait_until(lambda: "running" in stage.names())
        (stage.folder / "down" / "127.0.0.3").touch()
        kill(stage.pids("127.0.0.3"))
        wait_until(lambda: stage.names().count("starting") == 2, 60)
        assert not any(map(is_running, stage.pids()))
        (stage.folder / "wait").unlink()
        assert p.wait(timeout=120) == 0
    first, second = stage.find("starting")
    assert (first["hosts"], second["hosts"]) == ({"127.0.0.2": 1, "127.0.0.3": 1}, {"127.0.0.2": 1})
    assert any(
        line.startswith("pdsh 127.0.0.2,127.0.0.3") for line in (stage.folder / "asked").read_text().splitlines()
    )
    assert stage.find("finished")[0]["step"] == 5


NEAR, FAR = "10.77.0.1", "10.77.0.2"
SSHD = """
ListenAddress {address}
HostKey {folder}/key
PidFile {folder}/sshd-{address}.pid
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
"""


def find_missing() -> str | None:
    """What two namespaces as two hosts need and this machine lacks."""
    if os.geteuid():
        return "root is needed to make network namespaces"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    lacking = [name for name in ("ip", "ssh", "sshd", "ssh-keygen", "pdsh") if shutil.which(name, path=path) is None]
    if lacking:
        return f"{', '.join(lacking)} not installed"
    try:
        pwd.getpwnam("sshd")
    except KeyError:
        return "sshd has no user here"
    made = subprocess.run(["ip", "netns", "add", "ucp-probe"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "ucp-probe"], check=True)
    return None


@pytest.fixture
def hosts(stage: Stage) -> Iterator[Stage]:
    """Two namespaces with a link between them, each with an sshd that lets us in; ours is the near one."""
    if (reason := find_missing()) is not None:
        pytest.skip(reason)
    folder = stage.folder
    for name in ("ssh", "pdsh"):
        (folder / "bin" / name).unlink()
    ssh = f"#!/bin/sh\nexec {shutil.which('ssh')} -i {folder}/key -o StrictHostKeyChecking=no \\\n"
    ssh += '    -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"\n'
    (folder / "bin" / "ssh").write_text(ssh)
    (folder / "bin" / "ssh").chmod(0o755)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
    os.makedirs("/run/sshd", exist_ok=True)
    with ExitStack() as undo:
        for name in ("ucp-near", "ucp-far"):
            run("ip", "netns", "add", name)
            undo.callback(run, "ip", "netns", "del", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        pair = ["name", "cable", "type", "veth", "peer", "name", "cable", "netns", "ucp-far"]
        run("ip", "-n", "ucp-near", "link", "add", *pair)
        for name, address in (("ucp-near", NEAR), ("ucp-far", FAR)):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "cable")
            run("ip", "-n", name, "link", "set", "cable", "up")
            config = folder / f"sshd-{address}"
            config.write_text(SSHD.format(address=address, folder=folder))
            sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
            server = subprocess.Popen(["ip", "netns", "exec", name, str(sshd), "-D", "-f", str(config)])
            undo.callback(server.wait)
            undo.callback(server.terminate)
        yield stage


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def test_a_partition_leaves_the_far_host_out_and_its_ranks_end(hosts: Stage) -> None:
    stage, command = hosts, launch(hosts)
    hostfile = stage.write_hosts(NEAR, FAR)
    words = [sys.executable, "-m", "deepspeed_ucp", "supervise", "--log", str(stage.folder / "events")]
    options = ["--hostfile", hostfile, "--hang", "10", "--settle", "5"]
    with ExitStack() as ends:
        process = subprocess.Popen(
            ["ip", "netns", "exec", "ucp-near", *words, *options, "--", *command], env=stage.environment, cwd=ROOT
        )
        ends.callback(process.wait)
        ends.callback(process.kill)
        wait_until(lambda: all((stage.folder / f"at-{rank}").exists() for rank in (0, 1)), 120)
        before = stage.pids()
        run("ip", "-n", "ucp-far", "link", "set", "cable", "down")
        wait_until(lambda: stage.names().count("starting") == 2, 90)
        (stage.folder / "wait").unlink()
        assert process.wait(timeout=120) == 0
        wait_until(lambda: not any(map(is_running, before)), 60)
    first, second = stage.find("starting")
    assert (first["hosts"], second["hosts"]) == ({NEAR: 1, FAR: 1}, {NEAR: 1})
    assert stage.find("restarting")[0]["lost"] == [FAR]
    assert stage.find("finished")[0]["step"] == 5
