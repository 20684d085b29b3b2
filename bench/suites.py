"""What is measured: checkpoints, the loads of each of them, and what each load is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import dcp
import engines
from engines import Engine
from experts import ExpertEngine
from floor import DIRECT, Piece, file_pieces, state_pieces
from megatron import RENAME, Topology
from offline import CONVERT, EXPORT, SCALING, VERIFY, Job
from report import LOAD, Case

if TYPE_CHECKING:
    from pathlib import Path

    from ranks import Body
    from report import Results

FEW, WIDE = 4, 16  # streams of a rank from a store; the latter is the default (`io.paths`)
OURS = {"universal": True}
ASKED = {"universal": {"same_topology": "direct"}}
UPSTREAM = {"load_universal": True}
FAST = {"own": 1, "upstream": 15, "floor": 1.15, **LOAD}
NEAR = {"floor": 1.15, **LOAD}
CUT = {"floor": 1.4, **LOAD, "read": 1.10}
TAG = ("ours-tag-2", "÷ that of a tag")


def list_floors(*worlds: int) -> dict[str, int]:
    """Floors of so many processes, through the page cache and past it."""
    return {f"floor-{world}{way}": world for world in worlds for way in ("", DIRECT)}


def make_floor_cases(*worlds: int) -> tuple[Case, ...]:
    ways = (("", ""), (DIRECT, ", O_DIRECT"))
    return tuple(Case(f"floor-{n}{way}", f"floor, {n} processes{told}") for n in worlds for way, told in ways)


@dataclass(frozen=True)
class Suite:
    """A checkpoint and its loads.

    Attributes:
        source: the topology that saves it.
        topologies, floors: case → the topology that loads it, or the number of processes that read its bytes.
        short: the source in a few words.
        about: of the section; `{size_m}` and `{state_gib}` are filled in.
        conversion_options: of upstream's conversion.
        patterns: options of ours that say how tensor parallelism cuts parameters.
        share: of the parameters that are asked for, where this suite's engines need more memory than the others'.
        save_body, load_body: see `engines`.
        find_pieces: what the floors read of a checkpoint's folder.
        getters: case → the number of processes that GET those bytes from an object store, and of each one's streams.
        stored: cases that load from there.
    """

    name: str
    title: str
    short: str
    about: str
    source: Any
    topologies: Mapping[str, Any]
    floors: Mapping[str, int]
    cases: tuple[Case, ...]
    save_body: Callable[[Any, float, Path], Body] = engines.save_body
    load_body: Callable[[Any, float, Path | str, str, bool], Body] = engines.load_body
    conversion_options: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    share: float = 1.0
    find_pieces: Callable[[Path], list[Piece]] = state_pieces
    getters: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    stored: frozenset[str] = frozenset()

    def tell(self, results: Results) -> str:
        return self.about.format(size_m=results.parameters / 1e6, state_gib=results.state_bytes / (1 << 30))


DATA_PARALLEL = Suite(
    name="dp",
    title="Other ranks, other ZeRO stage",
    short="ZeRO-1, 4 ranks",
    about="""A GPT of {size_m:.0f} M parameters, saved by 4 ranks under ZeRO-1 in
bf16: {state_gib:.2f} GiB of fp32 masters and AdamW's moments. The store is an S3 server on this machine: 200 MB/s a
stream, the first byte after 20 ms; its floor is plain GETs. With 4 streams it sets the pace, with 16 (the default) it
shares the processors with its readers.""",
    source=Engine(4, 1),
    topologies={
        "deepspeed": Engine(4, 1),
        "ours-2": Engine(2, 1, OURS),
        "ours-3": Engine(3, 1, OURS),
        "ours-z3-2": Engine(2, 3, OURS),
        "ours-fp32-2": Engine(2, 1, OURS, "fp32"),
        "ours-s3-2": Engine(2, 1, {"universal": {"threads": FEW}}),
        "ours-s3-2-wide": Engine(2, 1, {"universal": {}}),
        "on-4": Engine(4, 1, OURS),
        "ours-same-4": Engine(4, 1, ASKED),
        "upstream": Engine(2, 1, UPSTREAM),
    },
    floors=list_floors(2, 3, 4),
    cases=(
        *make_floor_cases(2, 3, 4),
        Case("deepspeed", "DeepSpeed's own, 4 ranks ZeRO-1"),
        Case("on-4", "DeepSpeed's own, 4 ranks ZeRO-1, the plugin on", limits={"index": 0.02}),
        Case("ours-same-4", "ours, 4 ranks ZeRO-1", "floor-4", limits={"own": 0.5, **LOAD}),
        Case("upstream", "upstream, 2 ranks ZeRO-1", floor="floor-2"),
        Case("ours-2", "ours, 2 ranks ZeRO-1", "floor-2", "upstream", FAST),
        Case("ours-3", "ours, 3 ranks ZeRO-1", "floor-3", "upstream", FAST),
        Case("ours-z3-2", "ours, 2 ranks ZeRO-3", "floor-2", "upstream", FAST),
        Case("ours-fp32-2", "ours, 2 ranks ZeRO-1 in fp32", "floor-2", limits={"floor": 1.2, **LOAD}),
        Case("floor-s3-2", f"floor of the store, 2 processes of {FEW} streams"),
        Case("floor-s3-2-wide", f"floor of the store, 2 processes of {WIDE} streams"),
        Case(
            "ours-s3-2",
            f"ours, 2 ranks ZeRO-1, from the store, {FEW} streams",
            "floor-s3-2",
            limits={"floor": 1 / 0.9, **LOAD},
        ),
        Case(
            "ours-s3-2-wide",
            f"ours, 2 ranks ZeRO-1, from the store, {WIDE} streams",
            "floor-s3-2-wide",
            limits={"floor": 1 / 0.9, **LOAD},
        ),
    ),
    conversion_options=("--inject_missing_state",),
    getters={"floor-s3-2": (2, FEW), "floor-s3-2-wide": (2, WIDE)},
    stored=frozenset(["ours-s3-2", "ours-s3-2-wide"]),
)

RENAMED = {"universal": {"patterns": {"rename": RENAME}}}

PARALLEL = Suite(
    name="3d",
    title="Other tensor and pipeline parallelism",
    short="TP2 PP2, ZeRO-1",
    about="""The GPT of examples/megatron_gpt with {size_m:.0f} M
parameters, saved by 4 ranks (TP2 PP2 DP1) under ZeRO-1 in bf16: {state_gib:.2f} GiB of state without replicas. TP4 cuts
row-parallel weights finer than the save, and may read 1.10 times the state.""",
    source=Topology(4, tp=2, pp=2),
    topologies={
        "ours-dp2": Topology(2, checkpoint=OURS),
        "ours-tp4": Topology(4, tp=4, checkpoint=OURS),
        "ours-z3": Topology(2, stage=3, checkpoint=RENAMED),
        "upstream-dp2": Topology(2, checkpoint=UPSTREAM),
        "upstream-tp4": Topology(4, tp=4, checkpoint=UPSTREAM),
        "upstream-z3": Topology(2, stage=3, checkpoint=UPSTREAM),
    },
    floors=list_floors(2, 4),
    cases=(
        *make_floor_cases(2, 4),
        Case("upstream-dp2", "upstream, TP1 PP1 DP2", floor="floor-2"),
        Case("upstream-tp4", "upstream, TP4", floor="floor-4"),
        Case("upstream-z3", "upstream, 2 ranks ZeRO-3", floor="floor-2"),
        Case("ours-dp2", "ours, TP1 PP1 DP2", floor="floor-2", upstream="upstream-dp2", limits=NEAR),
        Case("ours-tp4", "ours, TP4", floor="floor-4", upstream="upstream-tp4", limits=CUT),
        Case(
            "ours-z3", "ours, 2 ranks ZeRO-3", floor="floor-2", upstream="upstream-z3", limits={"floor": 1.15, **LOAD}
        ),
    ),
    conversion_options=("--no_strict",),  # the metadata names parameters of other variants of the model too
    patterns=("--patterns", "megatron-gpt"),
)

EXPERTS = Suite(
    name="moe",
    title="Other expert-parallel degree",
    short="EP4, ZeRO-1",
    about="""A GPT of {size_m:.0f} M parameters with 8 experts a layer (`deepspeed.moe`),
saved by 4 ranks at degree 4 under ZeRO-1 in bf16: {state_gib:.2f} GiB of state. 2 ranks load it at degree 2. Upstream's
conversion fails on distributed experts.""",
    source=ExpertEngine(4, 1, ep=4),
    topologies={
        "deepspeed": ExpertEngine(4, 1, ep=4),
        "ours-ep2": ExpertEngine(2, 1, OURS, ep=2),
    },
    floors=list_floors(2),
    cases=(
        *make_floor_cases(2),
        Case("deepspeed", "DeepSpeed's own, 4 ranks EP4"),
        Case("ours-ep2", "ours, 2 ranks EP2", "floor-2", "none", {"own": 1, "floor": 1.5, **LOAD}),
    ),
)

EVERYWHERE = Suite(
    name="stage0",
    title="All of the state on every rank",
    short="ZeRO-1, 4 ranks",
    about="""The same with {size_m:.0f} M parameters and {state_gib:.2f} GiB of
state, loaded at stage 0 by 4 ranks: one reads it, the others copy it.""",
    share=0.5,
    source=Engine(4, 1),
    topologies={"ours-z0-4": Engine(4, 0, OURS)},
    floors=list_floors(4),
    cases=(*make_floor_cases(4), Case("ours-z0-4", "ours, 4 ranks stage 0", "floor-4", limits={"floor": 1.5, **LOAD})),
)

PRECISION = Suite(
    name="fp32",
    title="Another precision",
    short="ZeRO-1 in fp32, 4 ranks",
    about="""The GPT of {size_m:.0f} M parameters, saved by 4 ranks under
ZeRO-1 in fp32: {state_gib:.2f} GiB of state. The target trains in bf16.""",
    source=Engine(4, 1, precision="fp32"),
    topologies={"ours-bf16-2": Engine(2, 1, OURS)},
    floors=list_floors(2),
    cases=(
        *make_floor_cases(2),
        Case("ours-bf16-2", "ours, 2 ranks ZeRO-1 in bf16", "floor-2", limits={"floor": 1.2, **LOAD}),
    ),
)

PEER = Suite(
    name="dcp",
    title="torch.distributed.checkpoint",
    short="FSDP2, 4 ranks",
    about="""{size_m:.0f} M parameters under FSDP2 in fp32, saved by
4 ranks: {state_gib:.2f} GiB of state, loaded by 2 ranks. torch's seconds include `get_state_dict` and `set_state_dict`.
*From a tag*: the same state, saved by DeepSpeed.""",
    source=dcp.Shards(4),
    topologies={
        "dcp": dcp.Shards(2),
        "ours-tag-2": dcp.Resume(Engine(2, 3, OURS), dcp.OWN_TAG),
        "ours-fsdp-2": dcp.Resume(Engine(2, 3, OURS), dcp.TAG),
    },
    floors=list_floors(2),
    cases=(
        *make_floor_cases(2),
        Case("dcp", "torch's, FSDP2 on 2 ranks", floor="floor-2", twin=TAG),
        Case("ours-tag-2", "ours, 2 ranks ZeRO-3, from a tag of 4 ranks ZeRO-3", "floor-2", limits=LOAD, twin=TAG),
        Case("ours-fsdp-2", "ours, 2 ranks ZeRO-3", "floor-2", limits={"twin": 1.15, **LOAD}, twin=TAG),
    ),
    save_body=dcp.save_body,
    load_body=dcp.load_body,
    find_pieces=partial(file_pieces, pattern="*.distcp"),
)

SUITES = (DATA_PARALLEL, EVERYWHERE, PARALLEL, EXPERTS, PRECISION, PEER)


@dataclass(frozen=True)
class Offline:
    """Commands that work on checkpoints without engines.

    Attributes:
        cases: the rows of its tables.
        sources: the suites on whose checkpoints they are measured.
    """

    name: str
    title: str
    about: str
    cases: tuple[Job, ...]
    sources: tuple[Suite, ...] = (DATA_PARALLEL,)


OFFLINE = (
    Offline(
        "convert",
        "Atomic checkpoints: `ds_ucp convert`",
        """Upstream is `python -m deepspeed.checkpoint.ds_to_universal`; the floor is
`cp` of masters and moments. *Seconds* include the interpreter's start, *durable* and the ratios also
fsync(2). *Peak MiB* counts all processes.""",
        CONVERT,
        (DATA_PARALLEL, PARALLEL),
    ),
    Offline(
        "export",
        "Consolidated weights: `ds_ucp export`",
        """The fp32 weights as safetensors. Upstream is the script in every checkpoint
folder; the floor is `cp` of the output.""",
        EXPORT,
    ),
    Offline(
        "verify",
        "Checking a checkpoint: `ds_ucp verify`",
        """The floor reads the same files once with as many threads; *÷ floor* excludes
the start-up.""",
        VERIFY,
    ),
    Offline(
        "scaling",
        "Strong scaling of a conversion",
        "The ZeRO-1 checkpoint, with all starts; the ratio is of the seconds until the output is durable.",
        SCALING,
    ),
)
