"""`make test-releases`: the engine matrix on several releases of DeepSpeed and its dependencies."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import NamedTuple

from packaging.version import Version


@cache
def find_version(package: str) -> Version:
    """Return the installed version; cached, because each test calls it."""
    return Version(version(package))


DEEPSPEED = find_version("deepspeed")


class Known(NamedTuple):
    """A defect or missing feature of a release.

    Attributes:
        since, before: first release with it, and first release without it.
        tests: parts of the ids of tests that would fail.
        reason: text in the table of docs/releases.md.
    """

    since: str
    before: str
    tests: tuple[str, ...]
    reason: str
    package: str = "deepspeed"

    @property
    def here(self) -> bool:
        """True for the installed release."""
        return Version(self.since) <= find_version(self.package) < Version(self.before)


_EXPERTS = "experts do not train with BF16_Optimizer on a CPU"

KNOWN = [
    Known("0.16", "0.19.8", ("DualPipeV",), "no DualPipeV"),
    Known("0.16", "0.17", ("[alst-", "to_alst"), "no ALST"),
    Known("0.16", "0.19.8", ("gathers",), "ZeRO 3 waits for the last one of its gathers alone"),
    Known(
        *("0.16", "0.17.6"),
        ("experts/zero0-bf16", "experts.py::test_states_of_experts_are_restored[zero0-bf16"),
        _EXPERTS,
    ),
    Known("0.16", "0.19.2", ("engine_experts.py::test_states_of_experts_are_restored[3d",), _EXPERTS),
    Known("0.16", "0.17", ("parallel.py::test_resumes[dense",), "pipelines tie no weight of a module below another"),
    Known("0.16", "0.18.6", ("engine_convert.py",), "upstream's conversion cuts beyond the end of a tensor"),
    Known(
        *("0.17.6", "0.18.5"),
        ("zero0-bf16", "fp32_grads", "bf16_optimizer", "lora-zero3-bf16"),
        "bf16 without ZeRO or with fp32 gradients saves no optimizer states",
    ),
    Known(
        *("2.5", "2.6"),
        ("zero0-bf16-of4-pp2", "fp32_grads", "bf16_optimizer", "restored[muon"),
        "BF16_Optimizer gathers into views, which torch 2.5 refuses",
        package="torch",
    ),
    Known("2.5", "2.6", ("trainers_hf.py",), "transformers resumes with torch 2.6 or newer", package="torch"),
    Known("0.17.6", "0.18.6", ("fused_to_unfused",), "FP16_Optimizer takes no step"),
    Known("0.17.6", "0.18.6", ("eBff-zero1",), "ZeRO 1 fails on a rank without parameters"),
    Known(
        *("0.17.6", "0.18.6"),
        (
            "accelerate.py::test_accelerate_continues_in_another_world",
            "hf.py::test_one_rank",
            "lightning.py::test_lightning_runs_resume",
        ),
        "ZeRO 2 loses accumulated gradients",
    ),
    Known(
        *("0.18.6", "0.19.8"),
        ("accelerate.py::test_accelerate_continues_in_another_world",),
        "with Accelerate, ZeRO 0 to 2 divide accumulated gradients twice",
    ),
    Known("0.16", "0.19.8", ("engine_nvme.py",), "states on NVMe or Muon's momentum cannot be trained on a CPU"),
    Known("0.16", "0.19.8", ("autotp-",), "AutoTP does not tell how it cuts (a load asks for rules)"),
    Known("0.16", "0.19.8", ("autoep/others",), "no AutoEP at ZeRO 3 or beside AutoTP"),
    Known("0.17.6", "0.19.8", ("torch_autocast",), "torch_autocast skips steps of one rank"),
]
"""Reasons of skipped tests and cases; all others pass or fail. Bounds are limited to the releases that were run."""


@cache
def _list_here() -> list[Known]:
    return [each for each in KNOWN if each.here]


def find_reason(nodeid: str) -> str | None:
    """Return the reason to skip a test with the installed releases; loads of other releases' saves always run."""
    found = (each for each in _list_here() if any(part in nodeid for part in each.tests))
    return None if "saves_of_other_releases" in nodeid else next((each.reason for each in found), None)
