"""Every format of another library in engines of every kind, compared to the bit with that library's reader."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open

from deepspeed_ucp.testing import WorldPool
from tests.support.covering import params, turns
from tests.support.engines.reading import States
from tests.support.exports import read_all

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed before 0.19 has no AutoEP")

from tests.support.engines import foreign as engine_foreign
from tests.support.engines.autoep import PIPELINE
from tests.support.engines.driver import Engines, Outcome
from tests.support.engines.foreign import LIVE, MATRICES, STEPS, VECTORS, Target
from tests.support.engines.kinds import ON_CPU
from tests.support.engines.ranks import Load

Tree = tuple[dict[str, Any], dict[str, dict[str, Any]]]
"""Weights by name, and states by parameter."""

TARGETS = [
    Target(0),
    Target(1, precision="bf16"),
    Target(2, precision="fp16", zero=ON_CPU),
    Target(3, precision="bf16"),
    Target(3, zero={**ON_CPU, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}),
    Target(1, compiled=True),
    Target(0, precision="bf16", half="client"),
    Target(2, precision="bf16", half="masters"),
    Target(1, tp=2),
    Target(3, 4, "bf16", tp=2),
    Target(1, pp=2),
    Target(0, precision="bf16", pp=2),
    Target(1, precision="bf16", kind="autoep", ep=2),
    Target(3, kind="autoep", ep=2),
]


FSDP: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "flattened": (3, {"flatten": True}),
    "fsdp2-tp": (4, {"tp": 2}),
    "accelerate": (2, {"apart": True}),
    "bf16": (2, {"dtype": "bfloat16"}),
}
"""Runs that torch.distributed.checkpoint saves: ranks and options."""

WEIGHTS = ("safetensors", "bin")
SOURCES = (*WEIGHTS, *FSDP)


@dataclass(frozen=True)
class Saved:
    """A checkpoint, its states by its library's reader, and the losses after the save."""

    folder: Path
    states: States
    losses: list[float]


class Sources(dict[str, Saved]):
    """Checkpoints by format, written at the first access."""

    def __init__(self, worlds: WorldPool, root: Path) -> None:
        super().__init__()
        self.worlds, self.root = worlds, root

    def __missing__(self, name: str) -> Saved:
        folder = self.root / name
        if name in FSDP:
            ranks, options = FSDP[name]
            losses = self.worlds.get(ranks).run(engine_foreign.save, str(folder), **options)[0]
            states = engine_foreign.take_apart(*(read_folders if options.get("apart") else read_nested)(folder))
        else:
            weights, trained = read_nested(self["fsdp2"].folder)
            weights |= {key: weights[key.replace(".back.", ".mix.")] for key in weights if ".back." in key}
            folder.mkdir()
            losses, read = [], WRITERS[name](folder, weights)
            states = engine_foreign.take_apart(read, {name: {} for name in trained})
        self[name] = Saved(folder, states, losses)
        return self[name]


def read_nested(folder: Path) -> Tree:
    """Read like torch; keys of flattened states contain parameters' names."""
    tree = read_all(folder)
    weights, states = tree["model"], tree["optim"].get("state")
    if states is None:
        states = {name: {} for name in weights if f"state.{name}.step" in tree["optim"]}
        for name, held in states.items():
            begin = f"state.{name}."
            held.update({key[len(begin) :]: each for key, each in tree["optim"].items() if key.startswith(begin)})
    return weights, states


def read_folders(folder: Path) -> Tree:
    """Read Accelerate's folders."""
    model, optimizer = read_all(folder / "pytorch_model_fsdp_0"), read_all(folder / "optimizer_0")
    return model["model"], optimizer["optimizer"]["state"]


def write_safetensors(folder: Path, weights: dict[str, Any]) -> dict[str, Any]:
    """Write several files and an index. Return the tensors that the library reads."""
    save_torch_state_dict(weights, folder, max_shard_size=1000)
    assert (folder / "model.safetensors.index.json").exists()
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - it is no dict
    return found


def write_bin(folder: Path, weights: dict[str, Any]) -> dict[str, Any]:
    torch.save(weights, folder / "pytorch_model.bin")
    return dict(torch.load(folder / "pytorch_model.bin"))


WRITERS = {"safetensors": write_safetensors, "bin": write_bin}


@pytest.fixture(scope="module")
def saved(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(ucp_worlds, tmp_path_factory.mktemp("foreign"))


# --- into engines


ROWS = turns(TARGETS, SOURCES, 1)
TURNS = [(target, tuple(source for source in SOURCES if (target, source) in ROWS)) for target in TARGETS]
REST = (TARGETS[1], TARGETS[5], TARGETS[9], TARGETS[11], TARGETS[13])
"""Exhaustive targets: others are of the same kind, or only names differ (``test_engine_resumes.py``)."""
ALIKE = {"fsdp2-tp": "fsdp2"}
"""Blocks of two dimensions are exhaustive: ``tests/formats/test_foreign.py`` reads them."""

CHOSEN = [(target, tuple(ALIKE.get(each, each) for each in row)) for target, row in TURNS if target not in REST]
EVERY = [*TURNS, *((target, SOURCES) for target in TARGETS)]


@pytest.mark.parametrize(("target", "sources"), params(CHOSEN, EVERY, lambda row: f"{row[0]}-from-{'-'.join(row[1])}"))
def test_engines_restore_the_values_that_the_other_library_reads(
    target: Target, sources: tuple[str, ...], saved: Sources, engines: Engines, subtests: pytest.Subtests
) -> None:
    kind = target.on(patterns={"rename": PIPELINE}) if target.pp > 1 else target
    outcomes = engines.load(kind, *(Load(str(saved[source].folder), steps=2) for source in sources))
    for place, (source, outcome) in enumerate(zip(sources, outcomes, strict=True)):
        with subtests.test(source=source):
            check(source, saved[source], outcome, 2 * bool(place))


def check(source: str, saved: Saved, outcome: Outcome, before: int) -> None:
    """Check each rank after the load of one source.

    Args:
        before: steps of the engine before it loads only weights.
    """
    assert not outcome.errors, outcome.errors[0]
    target, ranks = outcome.kind, outcome.ranks
    found = {key: outcome.state[key] for key in check_states(outcome.state, saved.states, target)}
    steps, counters = set().union(*(rank.state.steps for rank in ranks)), {rank.state.counters for rank in ranks}
    assert all(str(rank.path).startswith(str(saved.folder)) and rank.client_state == {} for rank in ranks)
    messages = "\n".join(text for _, text in ranks[0].log)
    assert ("weights alone" in messages) == (source in WEIGHTS)
    assert ("torch.distributed.checkpoint → ZeRO-" in messages) == (source in FSDP)
    assert "clips gradients" not in messages and "ranks 1" not in messages  # these formats have no number of ranks
    if source in WEIGHTS:  # the optimizer is unchanged
        assert {state for _, state in found} <= {"exp_avg", "exp_avg_sq"}
        assert any(bool(tensor.any()) for tensor in found.values()) == bool(before)
        assert (counters, steps - {float(before)}) == ({(before, 0)}, set())
        return
    assert not found
    assert (counters, steps) == ({(STEPS, 0)}, {float(STEPS)})
    hyper = {(each, held["lr"], held["weight_decay"]) for each, held in ((True, MATRICES), (False, VECTORS))}
    assert set().union(*(rank.state.hyper for rank in ranks)) == hyper
    assert {rank.state.scale for rank in ranks} <= {None, 256.0}
    if target.precision == "fp32" and source != "bf16":
        assert outcome.losses == pytest.approx(saved.losses, rel=1e-5)


@pytest.mark.parametrize("stage", params([1], [0, 1, 2, 3]))
def test_another_number_of_param_groups_needs_param_groups_live(stage: int, engines: Engines, tmp_path: Path) -> None:
    """One saved group and two live ones are refused, or matched by name with `"param_groups": "live"`."""
    target = Target(stage)
    engines.get(target).run(engine_foreign.save, str(tmp_path), together=True)
    (refused,) = engines.load(target, tmp_path)
    refused.check_refused("param groups differ", '"param_groups": "live"')
    (outcome,) = engines.load(target.on(param_groups="live"), Load(str(tmp_path)))
    assert not check_states(outcome.state, engine_foreign.take_apart(*read_nested(tmp_path)), target)
    assert all(rank.state.steps == {float(STEPS)} for rank in outcome.ranks)
    rate, decay = LIVE["lr"], LIVE["weight_decay"]
    assert set().union(*(rank.state.hyper for rank in outcome.ranks)) == {(True, rate, decay), (False, rate, decay)}


def check_states(found: States, saved: States, target: Target) -> set[tuple[str, str]]:
    """Compare masters, moments, rounded copies and buffers to the bit. Return the keys of other states."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[target.precision]
    wanted = {}
    for (name, state), tensor in saved.items():
        if state in ("fp32", "copy"):
            wanted[name, "copy"] = tensor.to(dtype)
        if state == "buffer":
            kept = dtype if target.half == "client" else torch.float32  # DeepSpeed does not cast them
            wanted[name, state] = tensor.to(kept) if tensor.is_floating_point() else tensor
        elif state != "copy":
            wanted[name, state] = tensor.to(dtype if target.half else torch.float32)
    assert wanted.keys() <= found.keys()
    for key, tensor in wanted.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(found[key], tensor), key
    return found.keys() - wanted.keys()
