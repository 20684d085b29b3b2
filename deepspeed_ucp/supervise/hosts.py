"""Hostfiles, and which of their hosts answer, asked as the deepspeed launcher reaches them."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..errors import ConfigError

Hosts = Mapping[str, int]
"""Slots by host, in the launcher's order."""

_LINE = re.compile(r"^(\S+)\s+slots=(\d+)")
_AT_ONCE = 64
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "PasswordAuthentication=no")


def read_hostfile(path: str) -> dict[str, int]:
    """Slots by host of a file as the launcher reads it: ``worker-1 slots=8`` a line, ``#`` before a comment.

    Raises:
        ConfigError: it cannot be read, a line is of another form, a host stands there twice, or there is none.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            lines = [line.strip() for line in stream]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the hostfile cannot be read: {error}.") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("#"):
            continue
        found = _LINE.match(line)
        if found is None or found[1].startswith("-"):
            raise ConfigError(f"{path}, line {number}: expected `HOST slots=N`, found {line!r}.")
        if not _is_name(found[1]):
            raise ConfigError(
                f"{path}, line {number}: {found[1]!r} is no name of a host: each part between dots has 1 to 63 "
                "characters. Correct it."
            )
        if found[1] in hosts:
            raise ConfigError(f"{path}, line {number}: {found[1]} stands there twice. Keep one of its lines.")
        hosts[found[1]] = int(found[2])
    if not hosts:
        raise ConfigError(f"{path}: names no host. Write a line `HOST slots=N` for each.")
    return hosts


def _is_name(host: str) -> bool:
    """Whether the system can be asked for a host of that name."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def write_hostfile(path: str, hosts: Hosts) -> None:
    """Write what :func:`read_hostfile` reads."""
    with open(path, "w", encoding="utf-8") as stream:
        stream.writelines(f"{host} slots={slots}\n" for host, slots in hosts.items())


def is_local(host: str) -> bool:
    """Whether a host's address is one of this machine's."""
    if host == "localhost":
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.bind((found[0][4][0], 0))
    except OSError:
        return False
    return True


def is_alone(hosts: Hosts) -> bool:
    """Whether there is no host but this machine."""
    return not hosts or (len(hosts) == 1 and is_local(next(iter(hosts))))


def is_from(host: str, name: str, address: str) -> bool:
    """Whether who says that its machine has this name, and calls from this address, is on a host of a hostfile."""
    if host == name:
        return True
    try:
        found = socket.getaddrinfo(find_ssh_name(host), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return address in {entry[4][0] for entry in found}


def find_own_address(hosts: Hosts) -> str:
    """This machine's address as the hosts reach it: the loopback where all of them are this machine."""
    for host in hosts:
        if is_local(host):
            continue
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((find_ssh_name(host), 9))  # nothing is sent: the system tells which way it would go
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def find_ssh_name(host: str) -> str:
    """What ssh's own configuration calls a host; the same name where it does not say, or there is no ssh."""
    try:
        done = subprocess.run(
            ["ssh", "-G", host], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return host
    words = (line.split() for line in done.stdout.splitlines())
    return next((found[1] for found in words if found[:1] == ["hostname"] and len(found) == 2), host)


class Reach:
    """How commands get to hosts: by pdsh or ssh, as the launcher's own do.

    Args:
        launcher: of the deepspeed command (``--launcher``); pdsh is used where it is that and installed, else ssh.
        port: ``--ssh_port``.
        timeout: seconds after which a host that has not answered does not.
    """

    def __init__(self, launcher: str = "pdsh", port: str | None = None, timeout: float = 15.0) -> None:
        self.timeout = timeout
        port_options = [] if port is None else ["-p", port]
        if launcher == "pdsh" and shutil.which("pdsh"):
            self._command = ["pdsh", "-S", "-w"]
            own = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
            appended = " ".join([own, *_SSH_OPTIONS, *port_options]).strip()
            self._environment = {**os.environ, "PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": appended}
        else:
            self._command, self._environment = ["ssh", *_SSH_OPTIONS, *port_options], dict(os.environ)

    def run(self, host: str, *command: str) -> bool:
        """Run a command on a host; whether it could be, and ended well, in time."""
        try:
            done = subprocess.run(
                [*self._command, host, *command],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=self.timeout,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def ask(self, host: str, command: str, seconds: float) -> str:
        """Run a shell command on a host; the last line of what it said, or how it ended."""
        return run_for_words([*self._command, host, command], seconds, self._environment)

    def find_answering(self, hosts: Hosts, command: str = "true") -> dict[str, int]:
        """Those of the hosts that answer, in their order; all are asked at once, by a shell command that ends well.

        A lone host that is this machine is not asked: the launcher starts its ranks without ssh.
        """
        if is_alone(hosts):
            return dict(hosts)
        with ThreadPoolExecutor(max_workers=min(_AT_ONCE, max(1, len(hosts)))) as pool:
            answers = list(pool.map(lambda host: self.run(host, command), hosts))
        return {host: slots for (host, slots), answer in zip(hosts.items(), answers, strict=True) if answer}


def run_for_words(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> str:
    """Run a command to its end, or until it has taken too long; the last line of what it said, or how it ended."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:.0f} s"
    except OSError as error:
        return str(error)
    last = done.stdout.decode(errors="replace").rstrip().rpartition("\n")[2]
    return last[-500:] or f"it ended with {done.returncode}"
