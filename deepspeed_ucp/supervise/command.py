"""The deepspeed launcher's command line: which hosts it is for, and the same for those that are left."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import ConfigError
from .hosts import Hosts, is_local

_FLAGS = frozenset({
    "--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid",
    "--bind_cores_to_rank", "-q", "--quiet", "-h", "--help",
})  # fmt: skip
"""Options of the launcher that take no value; all others do."""

_SAME = {"-H": "--hostfile", "-i": "--include", "-e": "--exclude"}


@dataclass(frozen=True, slots=True)
class Command:
    """A launch.

    Attributes:
        program: the launcher.
        options: its own options: (name, value), None where it takes none.
        script: what it runs, with arguments.
        takes_hosts: it is the deepspeed launcher, whose options are known.
    """

    program: tuple[str, ...]
    options: tuple[tuple[str, str | None], ...] = ()
    script: tuple[str, ...] = ()
    takes_hosts: bool = False

    def find(self, name: str) -> str | None:
        """An option's value; the last one counts."""
        return next((value for key, value in reversed(self.options) if key == name), None)

    def words(self) -> list[str]:
        """As a command line."""
        options = [word for pair in self.options for word in pair if word is not None]
        return [*self.program, *options, *self.script]

    def narrow(self, hostfile: str, hosts: Hosts, lost: Sequence[str]) -> Command:
        """The same on the hosts that are left.

        Args:
            hostfile: names them.
            lost: the others, which no option may name any more.
        """
        options = [_leave_out(key, value, lost) for key, value in self.options if key != "--hostfile"]
        if lost:  # the launcher finds it out: it may have been a lost host's
            options = [option for option in options if option is not None and option[0] != "--master_addr"]
        kept = [option for option in options if option is not None]
        if len(hosts) == 1 and ("--force_multi", None) not in kept:
            kept += _settle_lone(next(iter(hosts)))
        return replace(self, options=(("--hostfile", hostfile), *kept))


def _settle_lone(host: str) -> list[tuple[str, str | None]]:
    """Options for one host: unless told not to, the launcher starts its ranks on this machine, whichever it is, and
    asks it over ssh, although nothing else goes that way."""
    if not is_local(host):
        return [("--force_multi", None)]
    return [("--no_ssh_check", None), ("--master_addr", "127.0.0.1")]


def _leave_out(key: str, value: str | None, lost: Sequence[str]) -> tuple[str, str | None] | None:
    if key not in ("--include", "--exclude") or value is None:
        return key, value
    kept = "@".join(part for part in value.split("@") if part.split(":")[0] not in lost)
    return (key, kept) if kept else None


def parse_command(words: Sequence[str]) -> Command:
    """Take a command line apart: ``deepspeed OPTIONS SCRIPT ARGS``, or any other program as it is.

    Raises:
        ConfigError: there is none, or deepspeed's has no script.
    """
    if not words:
        raise ConfigError("supervise: no command. Give it behind `--`: ds_ucp supervise -- deepspeed train.py …")
    at = _find_options(words)
    if at is None:
        return Command(tuple(words))
    options: list[tuple[str, str | None]] = []
    program, rest = tuple(words[:at]), list(words[at:])
    while rest and rest[0].startswith("-"):
        name, has_value, value = rest.pop(0).partition("=")
        name = _SAME.get(name, name)
        if name in _FLAGS:
            options.append((name, None))
        elif has_value:
            options.append((name, value))
        elif rest:
            options.append((name, rest.pop(0)))
    if not rest:
        raise ConfigError(f"supervise: {' '.join(words)}: no training script behind deepspeed's own options.")
    return Command(program, tuple(options), tuple(rest), takes_hosts=True)


def _find_options(words: Sequence[str]) -> int | None:
    """Where the options of deepspeed begin; None for another program."""
    if os.path.basename(words[0]) in ("deepspeed", "ds"):
        return 1
    module = ("-m", "deepspeed.launcher.runner")
    return next((at + 2 for at in range(len(words) - 1) if tuple(words[at : at + 2]) == module), None)
