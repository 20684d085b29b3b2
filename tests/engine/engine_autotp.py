"""Hugging Face Llamas under AutoTP: launches, what the ranks do, and how tensor-parallel shards make up a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANKS = 4
BATCH = 12  # samples per step; all data-parallel ranks together
VOCABULARY = 67  # odd: its rows are cut unevenly
STEPS = (2, 2)

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
ROWS = ("o_proj", "down_proj")

LLAMAS: dict[str, dict[str, Any]] = {
    "even": {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4},
    # 3 key-value heads on 2 ranks: 2 and 1; on 4 ranks the last one holds no attention. The tied embedding is cut.
    "uneven": {
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
}


@dataclass(frozen=True)
class Launch:
    """One AutoTP launch on `RANKS` ranks: the data-parallel degree is what `tp` leaves."""

    tp: int
    stage: int
    precision: str = "fp32"
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([f"tp{self.tp}-zero{self.stage}-{self.precision}", *self.config])

    @property
    def ds_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_batch_size": BATCH,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1000000,
        }
        if self.tp > 1:
            config["tensor_parallel"] = {"autotp_size": self.tp}
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        return {**config, **self.config}


@dataclass
class Local:
    """What one rank tells: its tensor-parallel rank, its state, the losses after it, and who loaded it."""

    tp_rank: int
    state: Any
    losses: list[float]
    direct: bool | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


def save(launch: Launch, model: str, folder: str) -> Local:
    """Train, save, go on."""
    engine = make_engine(launch.ds_config, model, seed=0)
    train(engine, STEPS[0])
    engine.save_checkpoint(folder)
    return _tell(engine, launch)


def resume(launch: Launch, model: str, folder: str) -> Local:
    """Load into a model of other random weights, go on."""
    engine = make_engine({**launch.ds_config, "checkpoint": {"universal": True}}, model, seed=1)
    engine.load_checkpoint(folder)
    return _tell(engine, launch)


def _tell(engine: Any, launch: Launch) -> Local:
    from deepspeed_ucp.targets import find_place
    from deepspeed_ucp.testing.capture import capture

    place = find_place(engine)
    assert (place.tp, place.dp) == (launch.tp, RANKS // launch.tp), place
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in engine.module.named_parameters()}
    report = getattr(engine, "ucp_report", None)
    state = capture(engine)
    return Local(
        find_place(engine).tp_rank,
        state,
        train(engine, STEPS[1]),
        report.direct if report is not None else None,
        shapes,
    )


def make_engine(ds_config: dict[str, Any], model: str, seed: int) -> Any:
    """A tiny Llama with random weights; matrices with weight decay, the rest without."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": 22, "num_hidden_layers": 2, "max_position_embeddings": 16}
    module = LlamaForCausalLM(LlamaConfig(**{**sizes, **LLAMAS[model]}))
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 2e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=ds_config)
    return engine


def train(engine: Any, steps: int) -> list[float]:
    """The loss of each step; every data-parallel rank takes its share of one global batch."""
    import torch

    from deepspeed_ucp.targets import find_place

    place = find_place(engine)
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(1000 + engine.global_steps)
        tokens = torch.randint(0, VOCABULARY, (BATCH, 8), generator=generator).chunk(place.dp)[place.dp_rank]
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def join(locals_: Sequence[Local], tied: bool) -> Any:
    """The whole state, from the ranks' shards: cut as Megatron-LM's paper has it, with whatever widths they have.

    Every rank of the same tensor-parallel rank must tell the same.
    """
    from deepspeed_ucp.testing.capture import EngineState
    from deepspeed_ucp.testing.compare import compare

    by_rank: dict[int, Local] = {}
    for local in locals_:
        twin = by_rank.setdefault(local.tp_rank, local)
        count, differences = compare(twin.state, local.state)
        assert count and not differences, differences
    shards = [by_rank[rank].state for rank in sorted(by_rank)]
    first: Any = shards[0]
    parameters = {
        name: _join_parameter([shard.parameters[name] for shard in shards], find_cut(name, tied and len(shards) > 1))
        for name in first.parameters
    }
    return EngineState(parameters, first.buffers, first.counters, first.scheduler, first.loss_scale)


def find_cut(name: str, tied: bool) -> int | None:
    """The dimension along which AutoTP cuts a Llama's parameter; None where every rank holds the whole."""
    layer, kind = name.split(".")[-2:]
    if layer in COLUMNS or (tied and layer == "embed_tokens"):
        return 0
    return 1 if layer in ROWS and kind == "weight" else None


def _join_parameter(shards: Sequence[Any], dim: int | None) -> Any:
    from deepspeed_ucp.testing.capture import ParameterState

    if dim is not None:
        shards = [shard for shard in shards if shard.value.numel()]  # DeepSpeed does not optimize empty ones
    first = shards[0]
    return ParameterState(
        value=_join_tensors([shard.value for shard in shards], dim),
        fp32=_join_tensors([shard.fp32 for shard in shards], dim),
        tensors={key: _join_tensors([shard.tensors[key] for shard in shards], dim) for key in first.tensors},
        scalars=first.scalars,
        hyper=first.hyper,
    )


def _join_tensors(shards: Sequence[Any], dim: int | None) -> Any:
    import torch

    if dim is not None:
        return torch.cat(list(shards), dim)
    assert all(torch.equal(shard, shards[0]) for shard in shards), "replicas differ"
    return shards[0]


class Runs:
    """Saved runs by what they were made of."""

    def __init__(self, worlds: Any, root: Path):
        self.worlds, self.root = worlds, root
        self._saved: dict[tuple[str, str], list[Local]] = {}

    def folder(self, launch: Launch, model: str) -> str:
        """Where a run is saved."""
        return str(self.root / f"{launch}-{model}")

    def saved(self, launch: Launch, model: str) -> list[Local]:
        """The ranks of a run that has been saved."""
        key = (str(launch), model)
        if key not in self._saved:
            self._saved[key] = self.worlds.get(RANKS).run(save, launch, model, self.folder(launch, model))
        return self._saved[key]

    def resumed(self, source: Launch, target: Launch, model: str) -> list[Local]:
        """The ranks of a run that goes on from a saved one."""
        self.saved(source, model)
        return list(self.worlds.get(RANKS).run(resume, target, model, self.folder(source, model)))


def mean_losses(locals_: Sequence[Local]) -> list[float]:
    """Over all ranks, step by step."""
    return [sum(step) / len(step) for step in zip(*(local.losses for local in locals_), strict=True)]


def widths(locals_: Sequence[Local], name: str, dim: int) -> list[int]:
    """Sizes of a parameter along a dimension, by tensor-parallel rank."""
    found: Mapping[int, int] = {local.tp_rank: local.shapes[name][dim] for local in locals_}
    return [found[rank] for rank in sorted(found)]
