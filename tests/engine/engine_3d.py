"""The example's GPT under TP × PP × SP × DP × ZeRO: launches, what the ranks do, how their shards make up the model.

Everything here is said by the model's definition and in plain torch: which name a build gives to a parameter, along
which dimension it is cut, and in which blocks.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_gpt"
BATCH = 8  # samples per step, all data-parallel ranks together
STEPS = (2, 2)
LAYERS = 3

_SIZES = {"layers": LAYERS, "hidden": 32, "heads": 8, "context": 16, "vocabulary": 256, "vocabulary_divisor": 8}
_LLAMA = {"kv_heads": 4, "ffn": 48, "swiglu": True, "rmsnorm": True, "rotary": True, "untied": True, "bias": False}
MODELS: dict[str, dict[str, Any]] = {
    "dense": _SIZES,  # tied, learned positions, LayerNorm, GELU
    "llama": {**_SIZES, **_LLAMA},
    "moe": {**_SIZES, **_LLAMA, "experts": 4, "ffn": 16},
    "padded": {**_SIZES, "vocabulary": 257},  # 264, 272, 288 rows under tp 1, 2, 4
    "padded-llama": {**_SIZES, **_LLAMA, "vocabulary": 257},
    "short": {**_SIZES, "layers": 0},  # embedding, norm, output
    "megatron": _SIZES,  # with Megatron's attributes only
    "megatron-llama": {**_SIZES, **_LLAMA},
    "unmarked": _SIZES,  # without any attributes
    "interleaved": {**_SIZES, "kv_heads": 4},  # another fused query, key and value, grouped
    "extras": _SIZES,  # with frozen parameters and buffers
}


@dataclass(frozen=True)
class Launch:
    """One topology; the data-parallel degree is what the world leaves.

    Attributes:
        fp32_grads: gradients are accumulated in fp32, which makes DeepSpeed take BF16_Optimizer under pipelines.
    """

    tp: int = 1
    pp: int = 1
    stage: int = 1
    precision: str = "fp32"
    pipeline: bool = True
    sp: int = 1
    method: str = "type:transformer"
    fp32_grads: bool = False
    world: int = 4

    def __str__(self) -> str:
        degrees = [
            f"{key}{degree}" for key, degree in (("tp", self.tp), ("pp", self.pp), ("sp", self.sp)) if degree > 1
        ]
        parts = [*degrees, f"dp{self.world // (self.tp * self.pp * self.sp)}", f"zero{self.stage}"]
        parts += [self.precision] * (self.precision != "fp32") + ["fp32grads"] * self.fp32_grads
        parts += ["plain"] * (not self.pipeline) + [self.method] * (self.method != "type:transformer")
        return "-".join(parts)

    @property
    def loses_copies(self) -> bool:
        """Stage 0 in fp32 has no masters, and DeepSpeed writes no layer file for a tied layer with a forward_fn."""
        return self.pp > 1 and self.stage == 0 and self.precision == "fp32"

    @property
    def ds_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": self.stage},
            "gradient_clipping": 0.0,  # stage 0 with a pipeline clips by another norm than the others
            "steps_per_print": 1 << 30,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        }
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        if self.fp32_grads:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config


@dataclass
class Local:
    """What one rank tells: where it stands, its state, the losses after that, and what was said while it loaded."""

    pp_rank: int
    tp_rank: int
    state: Any
    losses: list[float] = field(default_factory=list)
    direct: bool | None = None
    reason: str = ""
    log: list[tuple[str, str]] = field(default_factory=list)
    layers: tuple[int, int] = (0, 0)
    client_state: dict[str, Any] | None = None


def make_trainer(
    model: str, launch: Launch, universal: Any = None, *, seed: int = 1, checkpoint: dict[str, Any] | None = None
) -> Any:
    """The example's engine; other weights with another seed, but always the same text.

    Args:
        universal: the plugin's options.
        checkpoint: the whole section, in their place.
    """
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    from config import Degrees, GPTConfig  # type: ignore[import-not-found]
    from training import Trainer  # type: ignore[import-not-found]

    config = GPTConfig(**MODELS[model], seed=seed)
    degrees = Degrees(launch.tp, launch.pp, launch.sp, launch.pipeline, launch.method)
    checkpoint = checkpoint or ({"universal": universal} if universal is not None else {})
    ds_config = {**launch.ds_config, **({"checkpoint": checkpoint} if checkpoint else {})}
    with _CHANGES.get(model, nullcontext)():
        trainer = Trainer(config, degrees, ds_config)
    trainer.config = replace(config, seed=1)
    return trainer


@contextmanager
def _empty_stage() -> Iterator[None]:
    """The second of four stages has no layers. It gives its optimizer an empty group, which DeepSpeed drops."""
    import training
    from deepspeed.runtime import utils

    cuts = {4: [0, 2, 2, 3, 4], 2: [0, 2, 4], 1: [0, 4]}
    group = training.group_parameters
    with (
        mock.patch.object(training, "group_parameters", lambda *args: group(*args) or [{"params": []}]),
        mock.patch.object(utils, "partition_uniform", lambda num_items, num_parts: cuts[num_parts]),
    ):
        yield


@contextmanager
def _extras() -> Iterator[None]:
    """Layers with frozen parameters (a cut and a replicated one) and buffers (a cut and a replicated one)."""
    import gpt  # type: ignore[import-not-found]
    import torch

    class ParallelTransformerLayer(gpt.ParallelTransformerLayer):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any, parallel: Any, index: int) -> None:
            super().__init__(config, parallel, index)
            self.mlp.dense_4h_to_h.weight.requires_grad_(False)
            self.mlp.dense_4h_to_h.bias.requires_grad_(False)
            line = parallel.tensor
            whole = torch.arange(config.hidden) * config.seed + index
            self.register_buffer("span", whole.float().chunk(line.size)[line.rank].clone())
            self.register_buffer("passes", torch.full((2,), index * config.seed))

        def forward(self, x: Any) -> Any:
            if self.training:
                self.passes += 1
            return super().forward(x)

    with mock.patch.object(gpt, "ParallelTransformerLayer", ParallelTransformerLayer):
        yield


@contextmanager
def _megatron(*, marked: bool = True) -> Iterator[None]:
    """Megatron's attributes, which say nothing of what is fused in a parameter; or none at all."""
    import gpt
    import layers

    make = layers.make_parameter

    def make_plainly(*args: Any, **options: Any) -> Any:
        parameter = make(*args, **options)
        parallel, dim = parameter.tensor_model_parallel, parameter.partition_dim
        vars(parameter).clear()
        if marked:
            vars(parameter).update(tensor_model_parallel=parallel, partition_dim=dim, partition_stride=1)
        return parameter

    with (
        mock.patch.object(layers, "make_parameter", make_plainly),
        mock.patch.object(gpt, "make_parameter", make_plainly),
    ):
        yield


@contextmanager
def _interleaved() -> Iterator[None]:
    """Attention whose fused weight is [q, k, v of head group 0; q, k, v of head group 1; …], as in Megatron-LM."""
    import gpt

    class SelfAttention(gpt.SelfAttention):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            share, width = self.config.heads // self.config.key_heads, self.config.head_width
            groups = self.query_key_value(x).view(batch, length, -1, share + 2, width)
            query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in groups.split((share, 1, 1), 3))
            key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
            attended = gpt.F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return self.dense(attended.transpose(1, 2).reshape(batch, length, -1))

    def build(config: Any, parallel: Any, name: str, blocks: Any) -> Any:
        fused = name.endswith("query_key_value")
        return column(config, parallel, name, (sum(blocks),) if fused else blocks)

    column = gpt.ColumnParallelLinear
    with (
        _megatron(),
        mock.patch.object(gpt, "ColumnParallelLinear", build),
        mock.patch.object(gpt, "SelfAttention", SelfAttention),
    ):
        yield


_CHANGES: dict[str, Callable[[], Any]] = {
    "extras": _extras,
    "short": _empty_stage,
    "megatron": _megatron,
    "megatron-llama": _megatron,
    "unmarked": partial(_megatron, marked=False),
    "interleaved": _interleaved,
}
"""What is changed in the example while an engine is built for a model."""


def save(model: str, launch: Launch, folder: str) -> Local:
    """Train, save, go on."""
    trainer = make_trainer(model, launch)
    train(trainer, STEPS[0])
    trainer.save(folder)
    local = tell(trainer)
    local.losses = train(trainer, STEPS[1])
    trainer.engine.destroy()
    return local


def resume(
    model: str,
    launch: Launch,
    folder: str,
    patterns: Any = None,
    arguments: dict[str, Any] | None = None,
    again: str = "",
) -> Local:
    """Load into a model of other weights, go on.

    Args:
        patterns: of the plugin's options.
        arguments: further arguments of `load_checkpoint`.
        again: save there right after the load.
    """
    trainer = make_trainer(model, launch, {"patterns": patterns} if patterns else True, seed=2)
    with _listen() as log:
        _, client_state = trainer.engine.load_checkpoint(folder, **(arguments or {}))
    local = tell(trainer)
    local.log, local.client_state = log, client_state
    report = trainer.engine.ucp_report
    local.direct, local.reason = report.direct, report.reason
    if again:
        trainer.save(again)
    local.losses = train(trainer, STEPS[1])
    trainer.engine.destroy()
    return local


def resume_upstream(model: str, launch: Launch, folder: str) -> Local:
    """DeepSpeed's own load of a universal checkpoint into a model of other weights, go on."""
    trainer = make_trainer(model, launch, seed=2, checkpoint={"load_universal": True})
    path, client_state = trainer.engine.load_checkpoint(folder)
    assert path is not None
    local = tell(trainer)
    local.client_state = client_state
    local.losses = train(trainer, STEPS[1])
    trainer.engine.destroy()
    return local


def load_plainly(model: str, launch: Launch, folder: str) -> Local:
    """DeepSpeed's own load, without the plugin."""
    import deepspeed_ucp

    deepspeed_ucp.uninstall()
    try:
        trainer = make_trainer(model, launch, seed=3)
        assert trainer.load(folder)
        local = _mend_copies(tell(trainer))
        local.losses = train(trainer, STEPS[1])
    finally:
        deepspeed_ucp.install()
    trainer.engine.destroy()
    return local


def _mend_copies(local: Local) -> Local:
    """DeepSpeed writes no layer file for a tied layer with a forward_fn: it makes these copies in its next step."""
    for name, state in local.state.parameters.items():
        if local.pp_rank and name.startswith("tied_modules.") and state.fp32 is not None:
            state.value = state.fp32.to(state.value.dtype)
    return local


@dataclass
class Refusal:
    """What became of a load that should be refused."""

    error: str = ""
    message: str = ""
    changed: list[str] = field(default_factory=list)
    loss: float = float("nan")


def attempt(model: str, launch: Launch, folder: str, patterns: Any = None, unreadable: str = "") -> Refusal:
    """Try to load; the error, what it changed in the engine, and the loss of a step after it."""
    from engine_ranks import _blocked, fingerprint

    trainer = make_trainer(model, launch, {"patterns": patterns} if patterns else True, seed=2)
    before, result = fingerprint(trainer.engine), Refusal()
    try:
        with _blocked(unreadable if trainer.parallel.tensor.rank == 1 else ""):
            trainer.engine.load_checkpoint(folder)
    except Exception as error:  # noqa: BLE001 - the error is what the test looks at
        result.error, result.message = type(error).__name__, str(error)
    after = fingerprint(trainer.engine)
    result.changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    result.loss = trainer.train_step()
    trainer.engine.destroy()
    return result


def shift_master(folder: Path, name: str, by: float) -> None:
    """Add a number to what tensor-parallel rank 1 saved of a parameter's fp32 master (ZeRO 1 and 2)."""
    import torch

    found = 0
    for path in sorted(folder.glob("*/*zero_pp_rank_*_mp_rank_01_optim_states.pt")):
        content = torch.load(path, weights_only=False)
        state = content["optimizer_state_dict"]
        for flat, names in zip(state["single_partition_of_fp32_groups"], state["param_slice_mappings"], strict=True):
            if name in names:
                flat.data.narrow(0, names[name].start, names[name].numel).add_(by)
                found += names[name].numel
        torch.save(content, path)
    assert found


def tell(trainer: Any) -> Local:
    """Where this rank stands and what it holds; collective."""
    from deepspeed_ucp.testing.capture import capture

    parallel, module = trainer.parallel, trainer.engine.module
    layers = (module._local_start, module._local_stop) if trainer.degrees.pipeline else (0, 0)
    return Local(parallel.pipe.rank, parallel.tensor.rank, capture(trainer.engine), layers=layers)


def train(trainer: Any, steps: int) -> list[float]:
    """The losses of some steps, over the whole batch."""
    return [trainer.train_step() for _ in range(steps)]


@contextmanager
def _listen() -> Iterator[list[tuple[str, str]]]:
    found: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    log = logging.getLogger("deepspeed_ucp")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


# --- one name for each parameter


def find_name(name: str, layers: int) -> str:
    """The plain build's name of a parameter of either build."""
    if name.startswith("tied_modules.embed."):
        return name.replace("tied_modules.embed.", "language_model.embedding.")
    found = re.fullmatch(r"(\d+)\.(.*)", name)
    if found is None:
        return name
    number, rest = int(found[1]), found[2]
    if number == 1:
        return f"language_model.embedding.{rest}"
    if number == layers + 2:
        return f"language_model.encoder.final_layernorm.{rest}"
    if number == layers + 3:
        return f"language_model.output_layer.{rest.removeprefix('lm_head.')}"
    return f"language_model.encoder.layers.{number - 2}.{rest}"


def renames(model: str, *, to_pipeline: bool) -> list[dict[str, str]]:
    """Rules that bring the names of one build to the other's."""
    layers, untied = MODELS[model]["layers"], MODELS[model].get("untied", False)
    pairs = [
        (rf"{layers + 2}\.(?P<rest>\w+)", "language_model.encoder.final_layernorm.{rest}"),
        (
            r"(?P<n>\d+)\.(?P<rest>(?:input_|post_attention_|self_attention|mlp).*)",
            "language_model.encoder.layers.{n-2}.{rest}",
        ),
        (rf"{layers + 3}\.lm_head\.weight", "language_model.output_layer.weight"),
        (r"1\.(?P<rest>.*_embeddings\.weight)", "language_model.embedding.{rest}"),
    ]
    back = [
        (r"language_model\.encoder\.final_layernorm\.(?P<rest>\w+)", f"{layers + 2}.{{rest}}"),
        (r"language_model\.encoder\.layers\.(?P<n>\d+)\.(?P<rest>.*)", "{n+2}.{rest}"),
        (r"language_model\.output_layer\.weight", f"{layers + 3}.lm_head.weight"),
        (r"language_model\.embedding\.(?P<rest>.*)", "1.{rest}"),
    ]
    chosen = back if to_pipeline else pairs
    if not untied:
        chosen = chosen[:2]
        tied = (r"tied_modules\.embed\.(?P<rest>.*)", "language_model.embedding.{rest}")
        chosen += [(r"language_model\.embedding\.(?P<rest>.*)", "tied_modules.embed.{rest}")] if to_pipeline else [tied]
    return [{"from": saved, "to": live} for saved, live in chosen]


# --- how parameters are cut


def find_blocks(name: str, model: str) -> tuple[int, tuple[int, ...]] | None:
    """The dimension along which a parameter is cut and the widths of what is fused there; None: replicated.

    Without widths the dimension is one block.
    """
    sizes = {"kv_heads": 0, "ffn": 0, "swiglu": False, "experts": 0, **MODELS[model]}
    hidden, heads = sizes["hidden"], sizes["heads"]
    width, parts = sizes["ffn"] or 4 * hidden, 2 if sizes["swiglu"] else 1
    keys = (sizes["kv_heads"] or heads) * (hidden // heads)
    if name.endswith(("word_embeddings.weight", "output_layer.weight", ".span")):
        return 0, ()
    if "query_key_value" in name:
        return 0, () if model == "interleaved" else (hidden, keys, keys)
    if "dense_h_to_4h" in name:
        return 0, (width,) * parts
    if name.endswith("experts.weight1"):
        return 0, (width,) * parts * sizes["experts"]
    if name.endswith(("dense.weight", "dense_4h_to_h.weight", "experts.weight2")):
        return 1, ()
    return None


def join_tensors(shards: Sequence[Any], name: str, model: str) -> Any:
    """The whole tensor of what the tensor-parallel ranks hold."""
    import torch

    cut = find_blocks(name, model)
    if cut is None:
        assert all(torch.equal(shard, shards[0]) for shard in shards), f"{name}: replicas differ"
        return shards[0]
    dim, blocks = cut
    blocks = blocks or (sum(shard.shape[dim] for shard in shards),)
    parts = [shard.split([width // len(shards) for width in blocks], dim) for shard in shards]
    return torch.cat([torch.cat(block, dim) for block in zip(*parts, strict=True)], dim)


def join(locals_: Sequence[Local], model: str) -> Any:
    """The whole model of what all ranks hold, as an EngineState under the plain build's names.

    A parameter that several stages hold is once there for each: "name", "name#1", … in the order of the stages.
    """
    from deepspeed_ucp.testing.capture import EngineState

    by_place: dict[tuple[int, int], Local] = {}
    for local in locals_:
        _check_twin(by_place.setdefault((local.pp_rank, local.tp_rank), local), local)
    parameters: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    stages = sorted({place[0] for place in by_place})
    for stage in stages:
        shards = [by_place[place].state for place in sorted(by_place) if place[0] == stage]
        for found, told in ((parameters, "parameters"), (buffers, "buffers")):
            for name in getattr(shards[0], told):
                plain = find_name(name, MODELS[model]["layers"])
                values = [getattr(shard, told)[name] for shard in shards]
                whole = (
                    _join_parameter(values, plain, model)
                    if told == "parameters"
                    else join_tensors(values, plain, model)
                )
                found[_number(plain, found)] = whole
    first = by_place[0, 0].state
    return EngineState(parameters, buffers, first.counters, first.scheduler, first.loss_scale)


def _number(name: str, found: dict[str, Any]) -> str:
    copies = sum(each.partition("#")[0] == name for each in found)
    return f"{name}#{copies}" if copies else name


def _check_twin(first: Local, local: Local) -> None:
    """Data- and sequence-parallel ranks hold the same."""
    from deepspeed_ucp.testing.compare import compare

    _, differences = compare(first.state, local.state)
    assert not differences, differences


def _join_parameter(shards: Sequence[Any], name: str, model: str) -> Any:
    from deepspeed_ucp.testing.capture import ParameterState

    first = shards[0]
    assert all(shard.scalars == first.scalars and shard.hyper == first.hyper for shard in shards)
    return ParameterState(
        value=join_tensors([shard.value for shard in shards], name, model),
        fp32=None if first.fp32 is None else join_tensors([shard.fp32 for shard in shards], name, model),
        tensors={key: join_tensors([shard.tensors[key] for shard in shards], name, model) for key in first.tensors},
        scalars=first.scalars,
        hyper=first.hyper,
    )


def expect(saved: Any, loaded: Any) -> Any:
    """What a load of `saved` should make of an engine that holds what `loaded` names.

    Stages take their own copy back where there are as many as were saved, else the first one's. A vocabulary loses its
    last padding rows, or gets new ones of zeros.
    """
    parameters = {}
    counts = {name: _count(name, saved.parameters) for name in saved.parameters}
    for name, state in loaded.parameters.items():
        plain = name.partition("#")[0]
        own = counts.get(plain) == _count(plain, loaded.parameters)
        found = saved.parameters[name if own else plain]
        parameters[name] = _fit_rows(found, state.value.shape[0])
    return replace(saved, parameters=parameters)


def _count(name: str, parameters: dict[str, Any]) -> int:
    return sum(each.partition("#")[0] == name.partition("#")[0] for each in parameters)


def _fit_rows(state: Any, rows: int) -> Any:
    def fit(tensor: Any) -> Any:
        kept = tensor[:rows]
        return kept if len(kept) == rows else kept.new_zeros((rows, *kept.shape[1:])).index_copy(0, _range(kept), kept)

    tensors = {key: fit(tensor) for key, tensor in state.tensors.items()}
    return replace(state, value=fit(state.value), fp32=None if state.fp32 is None else fit(state.fp32), tensors=tensors)


def _range(tensor: Any) -> Any:
    import torch

    return torch.arange(len(tensor))


def compare_joined(
    saved: Sequence[Local], loaded: Sequence[Local], model: str, *, lost_copies: bool = False, **options: Any
) -> tuple[int, list[str]]:
    """How many tensors were compared, and what differs from what the load should have made.

    Args:
        lost_copies: the files hold only the first stage's copy of tied modules.
        options: of `compare`.
    """
    from deepspeed_ucp.testing.compare import compare

    got, source = join(loaded, model), join(saved, model)
    if lost_copies:
        source.parameters = {name: state for name, state in source.parameters.items() if "#" not in name}
    return compare(expect(source, got), got, **options)


class Runs:
    """Saved runs by what they were made of."""

    def __init__(self, worlds: Any, root: Path):
        self.worlds, self.root = worlds, root
        self._saved: dict[tuple[str, Launch], list[Local]] = {}
        self._resumed: dict[tuple[str, Launch, Launch], list[Local]] = {}

    def folder(self, model: str, launch: Launch) -> str:
        """Where a run is saved."""
        return str(self.root / f"{model}-{launch}".replace(":", "_"))

    def saved(self, model: str, launch: Launch) -> list[Local]:
        """The ranks of a run that has been saved."""
        if (model, launch) not in self._saved:
            found = self.run(launch, save, model, launch, self.folder(model, launch))
            self._saved[model, launch] = found
        return self._saved[model, launch]

    def resumed(self, model: str, source: Launch, target: Launch, *args: Any, **options: Any) -> list[Local]:
        """The ranks of a run that goes on from a saved one; without further arguments it is done once."""
        self.saved(model, source)
        key = (model, source, target)
        if options or any(args) or key not in self._resumed:
            found = self.run(target, resume, model, target, self.folder(model, source), *args, **options)
            if options or any(args):
                return found
            self._resumed[key] = found
        return self._resumed[key]

    def run(self, launch: Launch, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """A call on a world of the launch's size."""
        return list(self.worlds.get(launch.world).run(fn, *args, **options))
