"""A small checkpoint of each kind of source, written without engines, and all commands and loads that read it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import UcpError
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.stream.duplicates import check_samples
from tests.support import foreign
from tests.support.contents import check_content
from tests.support.conversion import convert_checkpoint
from tests.support.reshard import load, make_targets, open_for
from tests.synth import ExpertLayer, Layer, Model, Param, Run, State, Topology, random_state, write_checkpoint

TAG = "global_step3"
PLAIN = Model(
    (
        Param("a.weight", (30, 17)),
        Param("a.bias", (7,), group=1),
        Param("frozen", (3, 5), frozen=True),
        Param("tied", (30, 17), alias_of="a.weight"),
    ),
    {"count": torch.arange(3)},
)
ONE_GROUP = Model((Param("a.weight", (30, 17)), Param("a.bias", (7,))), {"count": torch.arange(3)})
"""For stage 0, which saves no names: one group has the module's order."""
PIPE = Model(
    (
        Param("tied_modules.embed.word", (12, 3), tied=True),
        Param("1.up", (24, 15)),
        Param("1.bias", (7,), group=1),
        Param("2.up", (24, 11)),
        Param("2.bias", (5,), group=1),
    ),
    {"1.count": torch.arange(3)},
    (Layer("embed"), Layer(), Layer(), Layer("embed", file=False)),
)
EXPERTS = Model(
    (
        Param("dense", (30, 17)),
        Param("gate", (4, 5), group=1),
        *(Param(f"mlp.deepspeed_moe.experts.deepspeed_experts.{n}.w", (12, 7), group=1) for n in range(4)),
    ),
    {"count": torch.arange(3)},
    experts=(ExpertLayer("mlp", 4),),
)
FUSED = Model(
    (Param("dense", (30, 17)), *(Param(f"mlp.experts.{w}.{n}", (12, 7)) for w in ("w1", "w2") for n in range(4))),
    {"count": torch.arange(3)},
    experts=(ExpertLayer("mlp", 4, fused=True),),
)
RULES = [
    {"match": r"\d+\.up", "pattern": "shard-v"},
    {"match": r"tied_modules\.embed\.word", "pattern": "shard-v"},
    {"match": r"\d+\.bias", "pattern": "replicate"},
]


@dataclass(frozen=True)
class Source:
    """A kind of source."""

    name: str
    topology: Topology
    model: Model = PLAIN
    legacy: bool = False
    atomic: bool = False

    def __str__(self) -> str:
        return self.name

    def state(self, seed: int = 0, **options: Any) -> State:
        topology = self.topology
        return random_state(self.model, seed, precision=topology.precision, topology=topology, **options)

    def write(self, root: Path, *, seed: int = 0, run: Run | None = None, **options: Any) -> Path:
        """Write a checkpoint into `root`. Return its tag's folder."""
        state = self.state(seed, **options)
        path = write_checkpoint(
            root, self.model, state, self.topology, run=run or Run(), cut=cut_rows, legacy=self.legacy, tag=TAG
        )
        if not self.atomic:
            return path
        convert_checkpoint(str(path), str(root / "atomic"))
        return root / "atomic"


def cut_rows(name: str, tensor: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Cut matrices by rows; vectors stay whole."""
    return tensor.chunk(tp)[rank] if name.endswith(("up", "word")) else tensor


SOURCES = [
    Source("stage0", Topology(0), ONE_GROUP),
    Source("stage0-fused-bf16", Topology(0, 1, "bf16", "fused"), ONE_GROUP),
    Source("zero1", Topology(1, 3)),
    Source("zero1-legacy", Topology(1, 3), legacy=True),
    Source("zero1-bf16opt", Topology(1, 2, "bf16", "bf16")),
    Source("zero2-bf16", Topology(2, 3, "bf16")),
    Source("zero3", Topology(3, 3)),
    Source("zero3-legacy-bf16", Topology(3, 2, "bf16"), legacy=True),
    Source("pipeline", Topology(1, 2, "bf16", tp=2, pp=2), PIPE),
    Source("atomic", Topology(2, 2, "bf16"), atomic=True),
    Source("experts", Topology(1, 4, "bf16", ep=(2,)), EXPERTS),
]
if find_spec("deepspeed.module_inject.auto_ep_layer"):
    SOURCES.append(Source("autoep-zero3", Topology(3, 4, "bf16", ep=(2,), dealt=True), FUSED))


@dataclass(frozen=True)
class Foreign(Source):
    """A checkpoint of another library."""

    format: foreign.Format = foreign.FORMATS[0]

    def write(self, root: Path, *, seed: int = 0, run: Run | None = None, **options: Any) -> Path:
        (root / TAG).mkdir(parents=True)
        self.format.write(root / TAG, self.model, self.state(seed, **options))
        return root / TAG

    def expect(self) -> State:
        """Return the expected state after a load."""
        state = self.state()
        weights = {name: {"fp32": held["fp32"]} for name, held in state.atoms.items()}
        return State(weights, {}, ()) if self.format.alone else state


FOREIGN = [Foreign(each.name, Topology(0), each.model or PLAIN, format=each) for each in foreign.FORMATS]


# -- ways to read a checkpoint ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The faults that one command or load finds.

    Attributes:
        text: all messages, or "".
        files: faulty files, if they are reported separately from the text.
    """

    text: str = ""
    files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text)

    def names(self, file: str) -> bool:
        return file in self.files or file in self.text


def try_to(work: Callable[[], object]) -> Verdict:
    """Call a function. Return its UcpError; other errors are bugs."""
    try:
        work()
    except UcpError as error:
        return Verdict(str(error))
    return Verdict()


def run_cli(*argv: str) -> tuple[int, dict[str, Any]]:
    """Run a command. Return its exit code and its JSON; unexpected errors are bugs."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*argv, "--json"])
    assert "a fault of ds_ucp itself" not in err.getvalue(), err.getvalue()
    text = out.getvalue()
    return code, json.loads(text) if text.strip() else {"error": err.getvalue()}


def verify(folder: Path, source: Source, *options: str) -> Verdict:
    """Run `ds_ucp verify`, without its warnings."""
    code, answer = run_cli("verify", str(folder), *groups_option(source), *options)
    faults = [fault for fault in answer.get("faults", ()) if fault["severity"] == "fault"]
    assert (code == 0) == (not faults and "error" not in answer), answer
    names = [path.name for path in folder.rglob("*")]
    for fault in faults:
        named = any(name in fault["text"] for name in names)
        assert fault["file"] or named or "missing" in fault["text"], fault
    text = "\n".join([*(fault["text"] for fault in faults), answer.get("error", "")]).strip()
    return Verdict(text, tuple(fault["file"] for fault in faults if fault["file"]))


def groups_option(source: Source) -> list[str]:
    return ["--groups=module"] if source.model is ONE_GROUP else []


def inspect(folder: Path, source: Source) -> Verdict:
    """Run `ds_ucp inspect`."""
    code, answer = run_cli("inspect", str(folder), *groups_option(source))
    if code == 0:
        return Verdict()
    faults = [each for each in answer.get("findings", ()) if each["severity"] == "fault"]
    files = tuple(each["file"] for each in faults if each["file"])
    return Verdict("\n".join([answer["error"], *(each["text"] for each in faults)]), files)


def open_folder(folder: Path, source: Source) -> Verdict:
    return try_to(lambda: open_checkpoint(str(folder), Comm(), Naming(source.model.live_groups)))


def load_folder(folder: Path, source: Source) -> Verdict:
    """Load into another topology, and check the bits if it is not refused. With tensor parallelism convert instead."""
    if source.model.layers:
        return try_to(lambda: convert_checkpoint(str(folder), str(folder.parent / "out"), patterns={"rules": RULES}))
    return try_to(lambda: load_targets(folder, source))


def load_targets(folder: Path, source: Source) -> None:
    targets = make_targets(source.model, Topology(2, 2))
    index = open_for(folder, targets[0])
    check_samples(index, index.atoms, Comm())
    if isinstance(source, Foreign):
        check_content(load(index, targets, with_states=not source.format.alone), source.expect())
    else:
        check_content(load(index, targets), source.state())
