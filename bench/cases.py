"""The table of cases: checkpoints, and the loads and commands that are measured on them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from commands import run_command
from engines import Engine, Topology
from fingerprint import STATES, sum_whole
from harness import EXCESS, MOST_EXTRA_MIB, TAG, Bench, Case, Command, Floor, Load, Source
from megatron import MegatronEngine
from safetensors import safe_open

PLUGIN = {"universal": True}
DIRECT = {"universal": {"same_topology": "direct"}}
UPSTREAM = {"load_universal": True}
PYTHON_M = (sys.executable, "-m")

DATA_PARALLEL = Source("ZeRO-1, 4 ranks", Engine(4, 1), ("--inject_missing_state",))
# The metadata names parameters of other variants of the model too: --no_strict.
PARALLEL = Source("TP2 PP2, ZeRO-1", MegatronEngine(4, tp=2, pp=2), ("--no_strict",), ("--patterns", "megatron-gpt"))

SOURCES = (DATA_PARALLEL, PARALLEL)


@dataclass(frozen=True)
class Section:
    """A section of docs/benchmarks.md; `about` may contain `{size_m}` and `{state_gib}`."""

    title: str
    about: str
    source: Source
    cases: tuple[Case, ...]


def make_floor(ranks: int) -> Case:
    return Case(f"floor-{ranks}", f"floor, {ranks} processes", Floor(ranks), hidden=True)


def make_load(
    name: str, title: str, topology: Topology, floor: float | None, upstream: str = "", *, read: float = EXCESS
) -> Case:
    """Make a case of the plugin.

    Args:
        floor: limit of its ratio to the floor of as many ranks.
        read: limit of the bytes read over the bytes of state.
    """
    limits = {"most_read": read, "most_extra_mib": MOST_EXTRA_MIB}
    goal = 15 if upstream == "upstream" else None
    return Case(name, title, Load(topology), (f"floor-{topology.ranks}", floor), (upstream, goal), **limits)


def make_upstream(name: str, title: str, topology: Topology) -> Case:
    return Case(name, title, Load(topology, with_plugin=False, is_upstream=True), (f"floor-{topology.ranks}", None))


LOADS = (
    *map(make_floor, (2, 3, 4)),
    Case("deepspeed", "DeepSpeed's own, 4 ranks ZeRO-1", Load(Engine(4, 1), with_plugin=False)),
    Case("deepspeed-on", "DeepSpeed's own, 4 ranks ZeRO-1, the plugin on", Load(Engine(4, 1, PLUGIN), is_direct=False)),
    make_load("ours-4", "ours, 4 ranks ZeRO-1", Engine(4, 1, DIRECT), None),
    make_upstream("upstream", "upstream, 2 ranks ZeRO-1", Engine(2, 1, UPSTREAM)),
    make_load("ours-2", "ours, 2 ranks ZeRO-1", Engine(2, 1, PLUGIN), 1.15, "upstream"),
    make_load("ours-3", "ours, 3 ranks ZeRO-1", Engine(3, 1, PLUGIN), 1.15, "upstream"),
    make_load("ours-zero3", "ours, 2 ranks ZeRO-3", Engine(2, 3, PLUGIN), 1.15, "upstream"),
    make_load("ours-fp32", "ours, 2 ranks ZeRO-1 in fp32", Engine(2, 1, PLUGIN, "fp32"), 1.2),
)

PARALLEL_LOADS = (
    *map(make_floor, (2, 4)),
    make_upstream("upstream-dp2", "upstream, TP1 PP1 DP2", MegatronEngine(2, checkpoint=UPSTREAM)),
    make_upstream("upstream-tp4", "upstream, TP4", MegatronEngine(4, tp=4, checkpoint=UPSTREAM)),
    make_load("ours-dp2", "ours, TP1 PP1 DP2", MegatronEngine(2, checkpoint=PLUGIN), 1.15, "upstream-dp2"),
    # It cuts row-parallel weights finer than the save.
    make_load("ours-tp4", "ours, TP4", MegatronEngine(4, tp=4, checkpoint=PLUGIN), 1.4, "upstream-tp4", read=1.10),
)


def copy_states(bench: Bench) -> list[str]:
    """Copy the files that contain masters and moments."""
    return ["cp", "-t", str(bench.output.parent), *map(str, (bench.checkpoint / TAG).glob("*_optim_states.pt"))]


def copy_weights(bench: Bench) -> list[str]:
    """Copy the files of an export."""
    return ["cp", "-r", str(bench.weights), str(bench.output)]


def convert_upstream(bench: Bench) -> list[str]:
    folders = ("--input_folder", str(bench.checkpoint / TAG), "--output_folder", str(bench.output))
    return [*PYTHON_M, "deepspeed.checkpoint.ds_to_universal", *bench.source.upstream_options, *folders]


def convert_upstream_by_two(bench: Bench) -> list[str]:
    return [*convert_upstream(bench), "--num_extract_workers", "2", "--num_merge_workers", "2"]


def convert_ours(bench: Bench) -> list[str]:
    folders = (str(bench.checkpoint), str(bench.output))
    return [*PYTHON_M, "deepspeed_ucp", "convert", *folders, *bench.source.options, "--quiet"]


def export_upstream(bench: Bench) -> list[str]:
    script = str(bench.checkpoint / "zero_to_fp32.py")
    return [sys.executable, script, str(bench.checkpoint), str(bench.output), "--safe_serialization"]


def export_ours(bench: Bench) -> list[str]:
    return [*PYTHON_M, "deepspeed_ucp", "export", str(bench.checkpoint), str(bench.output), "--to", "hf", "--quiet"]


def keep_weights(bench: Bench) -> None:
    """Make an export next to the checkpoint, once."""
    if not bench.weights.exists():
        command = [str(bench.weights) if each == str(bench.output) else each for each in export_ours(bench)]
        if run_command(command, bench.folder / "command.log").code:
            raise RuntimeError(f"ds_ucp export failed: see {bench.folder / 'command.log'}")


def verify_ours(bench: Bench) -> list[str]:
    return [*PYTHON_M, "deepspeed_ucp", "verify", str(bench.checkpoint), "--quiet"]


def check_converted(bench: Bench) -> None:
    """Compare the states in the atomic checkpoint with the saved ones."""
    for name in bench.saved:
        folder = bench.output / "zero" / name
        states = {state: torch.load(folder / f"{state}.pt", mmap=True, weights_only=True)["param"] for state in STATES}
        compare_states(bench, name, states)


def check_exported(bench: Bench) -> None:
    """Compare the exported weights with the saved masters."""
    files = [safe_open(path, "pt") for path in sorted(bench.output.glob("*.safetensors"))]
    homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)
    for name in bench.saved:
        compare_states(bench, name, {"fp32": homes[name].get_tensor(name)})


def compare_states(bench: Bench, name: str, states: dict[str, torch.Tensor]) -> None:
    for state, values in states.items():
        if sum_whole(values) != bench.saved[name][state]:
            raise RuntimeError(f"{bench.output}: {state} of {name} differs from the saved values")


CONVERSIONS = (
    Case("floor-cp", "floor: `cp` of the optimizer's files", Command(copy_states)),
    Case("upstream-convert", "upstream, defaults", Command(convert_upstream, is_upstream=True), ("floor-cp", None)),
    Case(
        "upstream-convert-2",
        "upstream, 2 workers extracting, 2 merging",
        Command(convert_upstream_by_two, is_upstream=True),
        ("floor-cp", None),
    ),
    Case(
        "ours-convert",
        "ours, `ds_ucp convert`",
        Command(convert_ours, check=check_converted),
        ("floor-cp", 1.0),
        ("upstream-convert", 10),
        most_read=EXCESS,
        most_written=EXCESS,
    ),
)

EXPORTS = (
    Case("floor-weights", "floor: `cp` of the exported weights", Command(copy_weights, keep_weights)),
    Case(
        "upstream-export",
        "upstream, `zero_to_fp32.py --safe_serialization`",
        Command(export_upstream, is_upstream=True),
    ),
    Case(
        "ours-export",
        "ours, `ds_ucp export`",
        Command(export_ours, check=check_exported),
        ("floor-weights", 1.1),
        ("upstream-export", 5),
    ),
)

VERIFICATIONS = (
    Case("floor-files", "floor: all files read", Floor(1, "*.pt")),
    Case("ours-verify", "ours, `ds_ucp verify`", Command(verify_ours), ("floor-files", None)),
)

SECTIONS: Sequence[Section] = (
    Section(
        "Other ranks, other ZeRO stage",
        "A GPT of {size_m:.0f} M parameters, saved by 4 ranks under ZeRO-1 in bf16: {state_gib:.2f} GiB of masters and "
        "moments.",
        DATA_PARALLEL,
        LOADS,
    ),
    Section(
        "Atomic checkpoints: `ds_ucp convert`",
        "Upstream is `python -m deepspeed.checkpoint.ds_to_universal`; the floor is `cp` of masters and moments. "
        "*Seconds* include the interpreter's start, *durable* and the ratios also sync(2). *Peak MiB* counts all "
        "processes.",
        DATA_PARALLEL,
        CONVERSIONS,
    ),
    Section(
        "Consolidated weights: `ds_ucp export`",
        "The fp32 weights as safetensors. Upstream is the script in every checkpoint folder.",
        DATA_PARALLEL,
        EXPORTS,
    ),
    Section(
        "Checking a checkpoint: `ds_ucp verify`",
        "The floor reads the same files once with as many threads, without an interpreter's start.",
        DATA_PARALLEL,
        VERIFICATIONS,
    ),
    Section(
        "Other tensor and pipeline parallelism",
        "The GPT of examples/megatron_gpt with {size_m:.0f} M parameters, saved by 4 ranks (TP2 PP2 DP1) under ZeRO-1 "
        "in bf16: {state_gib:.2f} GiB of state without replicas. TP4 cuts row-parallel weights finer than the save, "
        "and may read 1.10 times the state.",
        PARALLEL,
        PARALLEL_LOADS,
    ),
    Section("`ds_ucp convert` of TP2 PP2", "As above.", PARALLEL, CONVERSIONS),
)
