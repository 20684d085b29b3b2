"""Runs work in a private mount namespace."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.crash import run_child

_NEWNS, _NEWUSER = 0x00020000, 0x10000000


def run_in_namespace(work: Callable[[], object]) -> None:
    """Run work in a forked child with a private mount namespace; skip the test if the system does not allow it.

    Raises:
        AssertionError: the work raised an error.
    """
    mount = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "x", "/mnt"]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this system does not let a process mount file systems")
    user, group = os.getuid(), os.getgid()

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(_NEWNS | _NEWUSER) == 0, os.strerror(ctypes.get_errno())
        for name, text in {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}.items():
            Path("/proc/self", name).write_text(text)
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        work()

    assert run_child(run) == 0
