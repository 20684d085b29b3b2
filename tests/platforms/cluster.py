"""Slurm on this machine: slurmctld, and two slurmd as nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.platforms.jobs import RECIPES, find_processes, kill, make_environment, wait_for
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


@dataclass
class Cluster:
    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        for name in ("state", *NODES):
            (self.folder / name).mkdir()
        fields = {"host": socket.gethostname(), "folder": self.folder, "ports": [find_port() for _ in range(3)]}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**fields))
        self._start("slurmctld", "-D", "-i")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node, **{MARK: node})
        wait_for("the cluster", lambda: self.find_states() == dict.fromkeys(NODES, "idle"), self.tell)

    @property
    def environment(self) -> dict[str, str]:
        return make_environment(SLURM_CONF=str(self.folder / "slurm.conf"))

    def _start(self, program: str, *options: str, **variables: str) -> None:
        with (self.folder / "daemons").open("ab") as output:
            environment = {**self.environment, **variables}
            daemon = subprocess.Popen([program, *options], env=environment, stdout=output, stderr=output)
        self.daemons.append(daemon)

    def ask(self, *command: str, **variables: str) -> str:
        environment = {**self.environment, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def submit(self, output: Path, *command: str, options: tuple[str, ...] = (), **variables: str) -> str:
        """Submit the recipe with a script and its arguments; return the number of the job."""
        recipe = str(RECIPES / "slurm" / "train.sbatch")
        sbatch = ["--parsable", f"--output={output}", *options]
        variables = {"RANKS_PER_NODE": "1", **variables}
        return self.ask("sbatch", *sbatch, recipe, *command, **variables)

    def find_states(self) -> dict[str, str]:
        return dict(line.split() for line in self.ask("sinfo", "-h", "-N", "-o", "%N %T").splitlines())

    def find_job(self, number: str) -> dict[str, str]:
        fields = self.ask("scontrol", "-o", "show", "job", number).split()
        return dict(each.split("=", 1) for each in fields if "=" in each)

    def wait_for_end(self, number: str, tell: Any = str) -> dict[str, str]:
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(f"the end of job {number}", lambda: self.find_job(number).get("JobState") in over, tell)
        return self.find_job(number)

    def lose(self, node: str) -> None:
        """Kill all processes of a node and report it as down, which Slurm would detect only after SlurmdTimeout."""
        configuration = f"SLURM_CONF={self.folder / 'slurm.conf'}"
        while pids := find_processes(configuration, f"{MARK}={node}") + find_processes(
            configuration, f"SLURMD_NODENAME={node}"
        ):
            kill(pids)
            for daemon in self.daemons:
                daemon.poll()
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def tell(self) -> str:
        return (self.folder / "daemons").read_text(errors="replace")[-3000:]

    def end(self) -> None:
        while pids := find_processes(f"SLURM_CONF={self.folder / 'slurm.conf'}"):
            kill(pids)
            for daemon in self.daemons:
                daemon.poll()
