"""Slurm on this machine: slurmctld, and two slurmd as nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

from tests.platforms.jobs import RECIPES, kill_all, make_environment, wait_for
from tests.support.ports import find_port

NODES = ("n1", "n2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "sinfo", "scancel")
MARK = "UCP_SLURM_NODE"  # set in the environment of a node's daemon and its steps
# A requeued job waits for cred_expire: at least 5 s, by default 120 s.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def find_missing() -> str:
    """Return the reason why no cluster can run here, or an empty string."""
    if missing := [program for program in PROGRAMS if not shutil.which(program)]:
        return f"{', '.join(missing)} missing (Debian: slurmctld slurmd slurm-client slurm-wlm-basic-plugins)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Cluster:
    """A running cluster; its daemons write to ``output``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output, self._configuration = folder, folder / "daemons", folder / "slurm.conf"
        for name in ("state", *NODES):
            (folder / name).mkdir()
        fields = {"host": socket.gethostname(), "folder": folder, "ports": [find_port() for _ in range(3)]}
        self._configuration.write_text(CONFIGURATION.format(**fields))
        self._start("slurmctld", "-D", "-i")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node, **{MARK: node})
        wait_for("the cluster", lambda: self.find_states() == dict.fromkeys(NODES, "idle"), self.output)

    def _make_environment(self, **variables: str) -> dict[str, str]:
        return make_environment(SLURM_CONF=str(self._configuration), **variables)

    def _start(self, program: str, *options: str, **variables: str) -> None:
        with self.output.open("ab") as output:
            subprocess.Popen([program, *options], env=self._make_environment(**variables), stdout=output, stderr=output)

    def ask(self, *command: str, **variables: str) -> str:
        environment = self._make_environment(**variables)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def submit(self, output: Path, *command: str, options: tuple[str, ...] = (), **variables: str) -> str:
        """Submit the recipe with a script and its arguments; return the number of the job."""
        recipe = str(RECIPES / "slurm" / "train.sbatch")
        sbatch = ["--parsable", f"--output={output}", *options]
        return self.ask("sbatch", *sbatch, recipe, *command, RANKS_PER_NODE="1", **variables)

    def find_states(self) -> dict[str, str]:
        return dict(line.split() for line in self.ask("sinfo", "-h", "-N", "-o", "%N %T").splitlines())

    def find_job(self, number: str) -> dict[str, str]:
        fields = self.ask("scontrol", "-o", "show", "job", number).split()
        return dict(each.split("=", 1) for each in fields if "=" in each)

    def wait_for_end(self, number: str, output: Path | None = None) -> dict[str, str]:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(f"the end of job {number}", lambda: self.find_job(number).get("JobState") in over, output)
        return self.find_job(number)

    def lose(self, node: str) -> None:
        """Kill all processes of a node and report it as down, which Slurm would detect only after SlurmdTimeout."""
        for mark in (f"{MARK}={node}", f"SLURMD_NODENAME={node}"):
            kill_all(f"SLURM_CONF={self._configuration}", mark)
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
