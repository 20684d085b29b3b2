"""The deepspeed launcher's command line: which hosts it is for, and the same for those that are left."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import ConfigError, advise
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

    def select(self, hosts: Hosts) -> dict[str, int]:
        """Those of a hostfile's hosts that ``--include`` and ``--exclude`` leave.

        Raises:
            ConfigError: they name another one, or leave none.
        """
        included, excluded = (_list_slots(self.find(name) or "") for name in ("--include", "--exclude"))
        unknown = [host for host in (*included, *excluded) if host not in hosts]
        if unknown:
            advice = advise(unknown[0], hosts, f"Take one of {', '.join(hosts)}.")
            raise ConfigError(f"--include, --exclude: the hostfile does not name {unknown[0]}. {advice}")
        left = {
            host: slots
            for host, slots in hosts.items()
            if host in (included or hosts) and not _is_excluded(excluded.get(host), slots)
        }
        if not left:
            raise ConfigError(
                "--include, --exclude: no host of the hostfile is left. Include one more, or exclude one less."
            )
        return left

    def narrow(self, hostfile: str, hosts: Hosts, lost: Sequence[str]) -> Command:
        """The same on the hosts that are left; no option names another one.

        Args:
            hostfile: names them.
            lost: others that the launch is for.
        """
        options = [_leave_out(key, value, hosts) for key, value in self.options if key != "--hostfile"]
        if lost:  # the launcher finds it out: it may have been a lost host's
            options = [option for option in options if option is not None and option[0] != "--master_addr"]
        kept = [option for option in options if option is not None]
        if len(hosts) == 1 and ("--force_multi", None) not in kept:
            # Unless told not to, the launcher starts a lone host's ranks on this machine, whichever it is, and asks it
            # over ssh, although nothing else goes that way.
            here: list[tuple[str, str | None]] = [("--no_ssh_check", None), ("--master_addr", "127.0.0.1")]
            settled = here if is_local(next(iter(hosts))) else [("--force_multi", None)]
            kept = [*(option for option in kept if option[0] not in dict(settled)), *settled]
        return replace(self, options=(("--hostfile", hostfile), *kept))


def _leave_out(key: str, value: str | None, hosts: Hosts) -> tuple[str, str | None] | None:
    if key not in ("--include", "--exclude") or value is None:
        return key, value
    kept = "@".join(part for part in value.split("@") if part.split(":")[0] in hosts)
    return (key, kept) if kept else None


def _list_slots(value: str) -> dict[str, set[str]]:
    """Of ``a:0,1@b``: the slots that are named by host, none where all are meant."""
    parts = [part.partition(":") for part in value.split("@") if part]
    return {host: set(filter(None, slots.split(","))) for host, _, slots in parts}


def _is_excluded(named: set[str] | None, slots: int) -> bool:
    """Whether a host's named slots are all that it has; none named are all."""
    return named is not None and (not named or len(named) >= slots)


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
