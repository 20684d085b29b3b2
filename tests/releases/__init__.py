"""`make test-releases`: the engine matrix on several releases of DeepSpeed and of what is around it."""

from __future__ import annotations

from importlib.metadata import version
from typing import NamedTuple

from packaging.version import Version

DEEPSPEED = Version(version("deepspeed"))


class Known(NamedTuple):
    """What a release cannot do for reasons of its own.

    Attributes:
        since, before: the first release that has it, and the first that has not any more.
        tests: how the ids of tests begin that would show it; from "tests/" on.
        reason: in a few words, for the README's table.
    """

    since: str
    before: str
    tests: tuple[str, ...]
    reason: str

    @property
    def here(self) -> bool:
        """Whether it is so with the DeepSpeed that is installed."""
        return Version(self.since) <= DEEPSPEED < Version(self.before)


ENGINE = "engine/test_engine_"
KNOWN = [
    Known("0.16", "0.19.8", ("DualPipeV",), "no DualPipeV"),
    Known("0.16", "0.19.8", ("gathers",), "ZeRO 3 waits for the last one of its gathers alone"),
    Known("0.17.6", "0.18.5", ("saves/zero0-bf16",), "bf16 without ZeRO saves no optimizer states"),
    Known(
        *("0.16", "0.17.6"),
        (
            "experts/zero0-bf16",
            f"{ENGINE}experts.py::test_every_expert_comes_back[zero0-bf16",
            f"{ENGINE}experts_3d.py::test_every_expert",
        ),
        "experts do not train with BF16_Optimizer on a CPU",
    ),
    Known("0.16", "0.17", (f"{ENGINE}3d.py::test_resumes[dense",), "pipelines tie no weight of a module below another"),
    Known("0.16", "0.17", (f"{ENGINE}convert.py",), "upstream's conversion cuts beyond the end of a tensor"),
    Known("0.16", "0.17", (f"{ENGINE}muon.py",), "no Muon"),
    Known("0.17", "0.19.8", (f"{ENGINE}muon.py",), "Muon's momentum differs between ranks, or its gathers fail"),
    Known("0.16", "0.19.8", (f"{ENGINE}nvme.py",), "states on NVMe cannot be trained or looked at on a CPU"),
    Known("0.16", "0.19.8", (f"{ENGINE}autotp.py",), "AutoTP does not tell how it cuts (a load asks for rules)"),
    Known("0.16", "0.19.8", ("autoep/others",), "no AutoEP at ZeRO 3 or beside AutoTP"),
    Known("0.18", "0.19.8", (f"{ENGINE}offload.py::test_torch_autocast",), "torch_autocast skips steps of one rank"),
    Known("0.16", "0.19.8", ("accelerate/zero3",), "ZeRO 3 accumulates gradients otherwise than ZeRO 2"),
]
"""Tests that are skipped with these reasons, or cases that they leave out; what is not here passes or fails. Bounds are
as close as the releases that were run."""


def find_reason(nodeid: str) -> str | None:
    """Why a test is not for the installed DeepSpeed."""
    found = (each for each in KNOWN if each.here and nodeid.removeprefix("tests/").startswith(each.tests))
    return next((each.reason for each in found), None)
