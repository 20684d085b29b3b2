"""Checkpoints of other libraries in engines of every kind, exports to them and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.export.dcp import make_scaler
from deepspeed_ucp.testing import WorldPool
from deepspeed_ucp.testing.capture import CapturedEngine
from tests.support import fsdp_run
from tests.support.covering import few, params, turns
from tests.support.engines.cases import Built, Case, NetCase
from tests.support.engines.driver import Engines
from tests.support.engines.ranks import Load
from tests.support.engines.reading import States
from tests.support.exports import check_same, load_all, read_all
from tests.support.foreign import write_dcp

pytest.importorskip("deepspeed.module_inject.auto_ep_layer", reason="DeepSpeed before 0.19 has no AutoEP")

from tests.support.engines import foreign as engine_foreign
from tests.support.engines.driver import Outcome
from tests.support.engines.foreign import MATRICES, STEPS, VECTORS, Target
from tests.support.engines.kinds import ON_CPU

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


@pytest.fixture(scope="module")
def sources(ucp_worlds: WorldPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Return a function that returns the checkpoint of a format, written at the first call."""
    root = tmp_path_factory.mktemp("foreign")

    @cache
    def write(name: str) -> Saved:
        folder, losses = root / name, list[float]()
        if name in FSDP:
            ranks, options = FSDP[name]
            losses = ucp_worlds.get(ranks).run(engine_foreign.save, str(folder), **options)[0]
            states = engine_foreign.take_apart(*read(folder))
        else:
            weights, trained = read(write("fsdp2").folder)
            weights |= {key: weights[key.replace(".back.", ".mix.")] for key in weights if ".back." in key}
            folder.mkdir()
            states = engine_foreign.take_apart(WRITERS[name](folder, weights), {name: {} for name in trained})
        return Saved(folder, states, losses)

    return write


def read(folder: Path) -> Tree:
    """Read like torch, from one folder or Accelerate's two; keys of flattened states contain parameters' names."""
    if (folder / "optimizer_0").exists():
        model, optimizer = (read_all(folder / name) for name in ("pytorch_model_fsdp_0", "optimizer_0"))
        return model["model"], optimizer["optimizer"]["state"]
    tree = read_all(folder)
    weights, states = tree["model"], tree["optim"].get("state")
    if states is None:
        states = {name: {} for name in weights if f"state.{name}.step" in tree["optim"]}
        for name, held in states.items():
            begin = f"state.{name}."
            held.update({key[len(begin) :]: each for key, each in tree["optim"].items() if key.startswith(begin)})
    return weights, states


def write_safetensors(folder: Path, weights: dict[str, Any]) -> dict[str, Any]:
    """Write several files and an index. Return the tensors that the library reads."""
    save_torch_state_dict(weights, folder, max_shard_size=1000)
    assert (folder / "model.safetensors.index.json").exists()
    return load_all(folder)


def write_bin(folder: Path, weights: dict[str, Any]) -> dict[str, Any]:
    torch.save(weights, folder / "pytorch_model.bin")
    return dict(torch.load(folder / "pytorch_model.bin"))


WRITERS = {"safetensors": write_safetensors, "bin": write_bin}


# --- into engines


ROWS = turns(TARGETS, SOURCES, 1)
TURNS = [(target, tuple(source for source in SOURCES if (target, source) in ROWS)) for target in TARGETS]
REST = (TARGETS[1], TARGETS[5], TARGETS[9], TARGETS[11], TARGETS[13])
"""Exhaustive targets: others are of the same kind, or only names differ (``test_engine_resumes.py``)."""
CHOSEN = [row for row in TURNS if row[0] not in REST]
EVERY = [*TURNS, *((target, SOURCES) for target in TARGETS)]


@pytest.mark.parametrize(("target", "names"), params(CHOSEN, EVERY, lambda row: f"{row[0]}-from-{'-'.join(row[1])}"))
def test_engines_restore_the_values_that_the_other_library_reads(
    target: Target,
    names: tuple[str, ...],
    sources: Callable[[str], Saved],
    engines: Engines,
    subtests: pytest.Subtests,
) -> None:
    outcomes = engines.load(target, *(Load(str(sources(name).folder), steps=2) for name in names))
    for place, (name, outcome) in enumerate(zip(names, outcomes, strict=True)):
        with subtests.test(source=name):
            check(name, sources(name), outcome, 2 * bool(place))


def check(source: str, saved: Saved, outcome: Outcome, before: int) -> None:
    """Check each rank after the load of one source; `before`: steps of the engine before it loads only weights."""
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


# --- messages, adapters, refusals

STAGES = (0, 1, 2, 3)


class Adapted(Built):
    """An engine of a zeroed model with an adapter of PEFT."""

    def build(self) -> Any:
        from tests.support.adapters import LORAS, make_peft

        model = make_peft(**LORAS["saved"])
        for param in model.parameters():
            param.data.zero_()
        return model


def load(engines: Engines, kind: Case, folder: Path) -> tuple[CapturedEngine, str]:
    (outcome,) = engines.load(kind, Load(str(folder)))
    assert not outcome.errors, outcome.errors[0]
    return outcome.state, "\n".join(text for _, text in outcome.ranks[0].log)


def test_hyper_parameters_of_an_optimizer_without_states_are_restored(tmp_path: Path, engines: Engines) -> None:
    """A plain SGD's groups are restored. A warning names an optimizer whose states start from zero.

    A conversion also lacks steps and gradient clipping.
    """
    model, adam = fsdp_run.build()
    optimizer = torch.optim.SGD([{"params": group["params"]} for group in adam.param_groups], lr=0.25)
    fsdp_run.train(model, optimizer, range(1))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "it", no_dist=True)
    assert main(["convert", str(tmp_path / "it"), str(tmp_path / "atomic")]) == 0
    for folder in (tmp_path / "it", tmp_path / "atomic"):
        state, messages = load(engines, NetCase(1, 1, config={"gradient_clipping": 1.0}), folder)
        assert {held.hyper["lr"] for held in state.parameters.values()} == {0.25}
        for words in ("the saved optimizer kept no states", "records no number of steps", "gradient clipping"):
            assert words in messages
    fsdp_run.train(model, adam, range(1))
    weights, states = get_state_dict(model, adam)
    del states["state"]["second.weight"]
    dcp.save({"model": weights, "optim": states}, checkpoint_id=tmp_path / "bare", no_dist=True)
    state, messages = load(engines, NetCase(0, 1), tmp_path / "bare")
    assert "\nsecond.weight: no optimizer state was saved" in messages
    assert [name for name, held in state.parameters.items() if not held.tensors] == ["second.weight"]


def test_an_adapter_resumes_over_its_base_model(tmp_path: Path, engines: Engines) -> None:
    """Two folders load into a model that PEFT has wrapped."""
    from tests.support.adapters import LORAS, make_base, make_peft

    make_base().save_pretrained(tmp_path / "base")
    model = make_peft(**LORAS["saved"])
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    wanted = {name: param.detach() for name, param in model.named_parameters()}
    for stage in few(STAGES, 2):
        base, adapted = engines.load(Adapted(stage, 1), *(Load(str(tmp_path / name)) for name in ("base", "peft")))
        check_same({name: each.value for name, each in adapted.state.parameters.items()}, wanted)
        assert base.list_messages("WARNING", "the checkpoint has no adapter")
        assert adapted.list_messages("WARNING", "holds no weights of its base")


def test_a_refused_foreign_checkpoint_leaves_the_engine_unchanged(tmp_path: Path, engines: Engines) -> None:
    """The engine has trained."""
    model, optimizer = fsdp_run.build()
    fsdp_run.train(model, optimizer, range(3))
    weights, states = get_state_dict(model, optimizer)
    tree, wanted = {"model": weights, "optim": states}, dict[str, tuple[str, ...]]()

    def make(name: str, *words: str) -> Path:
        wanted[name] = words
        (tmp_path / name).mkdir()
        return tmp_path / name

    def make_blocks(name: str, *words: str, tree: Any = tree) -> Path:
        write_dcp(make(name, *words), tree, lambda tensor: [2, 2][: tensor.dim()])
        return tmp_path / name

    damage = ("have CRC32 ", ", the writer stored")
    flip_tensor(make_blocks("flipped", *damage) / "__3_0.distcp", weights["first.weight"][32:, 3:])
    make_blocks("other", "shape", tree={"model": {**weights, "first.weight": torch.ones(64, 7)}})
    bad = {**tree, "optim": {**states, "param_groups": [{**states["param_groups"][0], "step": float("nan")}]}}
    make_blocks("odd", "nan for a step", tree=bad)
    save_file({**weights, "norm.bias": torch.ones(65)}, make("shapes", "norm.bias") / "model.safetensors")
    torch.save(weights, make("bin", *damage) / "pytorch_model.bin")
    flip_tensor(tmp_path / "bin" / "pytorch_model.bin", weights["second.weight"])
    save_file({"first.lora_A.weight": torch.ones(2, 6)}, make("adapter", "lora_A") / "adapter_model.safetensors")
    loads = [Load(str(tmp_path / name), before=2 * (not number)) for number, name in enumerate(wanted)]
    for words, outcome in zip(wanted.values(), engines.load(NetCase(2), *loads), strict=True):
        outcome.check_refused(*words)


def flip_tensor(path: Path, tensor: torch.Tensor) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(tensor.contiguous().numpy().tobytes()) + 9] ^= 4
    path.write_bytes(data)


# --- exports with `ds_ucp export --to dcp` under FSDP2


def test_a_run_moves_from_deepspeed_to_fsdp2_and_back(tmp_path: Path, engines: Engines, ucp_worlds: WorldPool) -> None:
    """Three ranks save, two ranks of FSDP2 continue, and one rank restores masters, states, steps and hyper-parameters.

    A warning names this engine's clipping of gradients, which the format does not record.
    """
    saved, out, there = (str(tmp_path / name) for name in ("saved", "out", "there"))
    state = engines.save(NetCase(3, 3), saved, steps=(3,)).state
    assert main(["export", saved, out, "--to", "dcp"]) == 0
    ucp_worlds.get(2).run(fsdp_run.copy, out, there)
    for stage in (1, 3):
        back, messages = load(engines, NetCase(stage, 1, config={"gradient_clipping": 0.5}), tmp_path / "there")
        assert "clips gradients at norm 0.5" in messages
        assert back.parameters.keys() == state.parameters.keys()
        check_same(back.buffers, state.buffers)
        for name, held in state.parameters.items():
            found = back.parameters[name]
            check_same({"fp32": found.fp32, **found.tensors}, {"fp32": held.fp32, **held.tensors})
            assert found.scalars == held.scalars
            assert {key: found.hyper[key] for key in held.hyper} == held.hyper
        assert back.counters["global_steps"] == 3


@pytest.mark.parametrize("overflows", [(), (3,), (0, 1, 6)])
def test_deepspeeds_scaler_continues_torchs_scaler(overflows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales are equal until the next overflow, which halves them."""
    ours = DynamicLossScaler(2.0**16, 4, 1.0, 1, False)
    monkeypatch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)
    for step in range(7):
        ours.update_scale(step in overflows)
    grad_scaler = torch.amp.GradScaler("cpu")
    grad_scaler.load_state_dict(make_scaler(vars(ours)))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    for step in range(7, 17):
        is_bad = step == 16
        grad_scaler.scale(torch.zeros(1))
        optimizer.param_groups[0]["params"][0].grad = torch.full((1,), torch.inf if is_bad else 0.0)
        grad_scaler.step(optimizer)
        grad_scaler.update()
        ours.update_scale(is_bad)
        assert grad_scaler.get_scale() == ours.cur_scale
