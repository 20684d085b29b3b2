"""Models under TP × PP × SP × DP × ZeRO on a few ranks, and the join of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspeed_ucp.engine.parallel import find_parallel_state
from deepspeed_ucp.testing.capture import CapturedEngine, CapturedParameter, capture
from deepspeed_ucp.testing.compare import compare
from tests.support.engines import gpt as engine_gpt
from tests.support.engines import letters as engine_letters
from tests.support.engines import llama as engine_llama
from tests.support.engines.kinds import SUMS_IN_FP32, Kind
from tests.support.engines.ranks import Local


def capture_rank(engine: Any) -> Any:
    """Capture an engine and its place."""
    found: Any = capture(engine)
    found.parallel = find_parallel_state(engine)
    return found


@dataclass(frozen=True)
class Launch(Kind):
    """One model in one topology; the world size and the other degrees determine the data-parallel degree.

    Attributes:
        model: of the example's GPT, a Llama, or letters of layers.
        method: `partition_method` of a pipeline.
        fp32_grads: accumulate gradients in fp32, which makes DeepSpeed use BF16_Optimizer at stage 1.
        dual: every pipeline rank holds two stages (DualPipeV).
        nested: the engine saves `module` as Megatron-DeepSpeed does without a pipeline.
    """

    world: int = 4
    tp: int = 1
    pp: int = 1
    sp: int = 1
    model: str = "dense"
    pipeline: bool = True
    method: str = "type:transformer"
    fp32_grads: bool = False
    dual: bool = False
    nested: bool = False
    patterns: Any = None

    @property
    def home(self) -> Any:
        families = (each for each in (engine_gpt, engine_llama) if self.model in each.MODELS)
        return next(families, engine_letters)

    @property
    def universal(self) -> Any:
        return {"patterns": self.patterns} if self.patterns else None

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.sp)

    @property
    def loses_copies(self) -> bool:
        """Stage 0 in fp32 has no masters, and DeepSpeed writes no layer file for a tied layer with a forward_fn."""
        return self.pp > 1 and self.stage == 0 and self.precision == "fp32"

    @property
    def ds_config(self) -> dict[str, Any]:
        # Stage 0 with a pipeline clips by another norm than other stages.
        more = SUMS_IN_FP32 if self.fp32_grads else {}
        micro = 1 if self.dual else self.batch // self.dp
        optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
        return self.make_config(train_micro_batch_size_per_gpu=micro, optimizer=optimizer, **more)

    @property
    def read(self) -> Callable[[Any], CapturedEngine]:
        return capture_rank

    def join(self, ranks: Sequence[Local]) -> CapturedEngine:
        return join(ranks, self.model)

    def keep(self, state: CapturedEngine) -> CapturedEngine:
        if not self.loses_copies:
            return state
        return replace(state, parameters={name: each for name, each in state.parameters.items() if "#" not in name})

    def compare(self, saved: CapturedEngine, loaded: CapturedEngine, *, ignored: str = "\0") -> tuple[int, list[str]]:
        """Compare with the expected state, except differences that begin with a word."""
        count, differences = compare(expect(saved, loaded), loaded)
        return count, [each for each in differences if not each.startswith(ignored)]

    def is_direct(self, source: Any) -> bool:
        """Return True except in the same topology, unless DeepSpeed would not restore all parameters.

        Sequence parallelism is folded into data parallelism.
        """
        same = self.but(sp=1, patterns=None, nested=False, config={}) == source.but(sp=1, patterns=None, config={})
        is_ours = self.loses_copies or (self.pp > 1 and (self.stage, self.precision) == (0, "bf16"))
        return is_ours or not same


def pipe(tp: int = 1, pp: int = 1, stage: int = 1, precision: str = "fp32", **more: Any) -> Launch:
    return Launch(stage, more.pop("world", 4), precision, tp=tp, pp=pp, **more)


def plain(tp: int = 1, stage: int = 1, **more: Any) -> Launch:
    return pipe(tp, stage=stage, pipeline=False, **more)


def resume(source: Launch, target: Launch, patterns: Any = None) -> tuple[Launch, Launch]:
    """Return source and target, with rules that rename parameters if only one of them is a pipeline."""
    if source.pipeline != target.pipeline and patterns is None:
        patterns = {"rename": engine_gpt.renames(source.model, to_pipeline=target.pipeline)}
    return source, target.but(model=source.model, patterns=patterns)


def find_name(name: str, model: str) -> str:
    return engine_gpt.find_name(name, model) if model in engine_gpt.MODELS else name


def find_blocks(name: str, model: str) -> Any:
    """Return the dimension and blocks along which a parameter is cut; None: replicated."""
    home = Launch(model=model).home
    return None if home is engine_letters else home.find_blocks(name, model)


# --- join of all ranks


def join(locals_: Sequence[Local], model: str) -> CapturedEngine:
    """Join all ranks to the whole model, under the names of one build.

    A parameter of several stages is there once for each: "name", "name#1", … in the order of the stages.
    """
    by_place: dict[tuple[int, int], Local] = {}
    for local in locals_:  # data- and sequence-parallel ranks are replicas
        twin = by_place.setdefault((local.state.parallel.pp_rank, local.state.parallel.tp_rank), local)
        differences = compare(twin.state, local.state)[1]
        assert not differences, differences
    parameters: dict[str, CapturedParameter] = {}
    buffers: dict[str, Any] = {}
    for stage in sorted({stage for stage, _ in by_place}):
        shards = [by_place[place].state for place in sorted(by_place) if place[0] == stage]
        for name in shards[0].parameters:
            plain = find_name(name, model)
            whole = _join_parameter([shard.parameters[name] for shard in shards], plain, model)
            parameters[_number(plain, parameters)] = whole
        for name in shards[0].buffers:
            plain = find_name(name, model)
            buffers[_number(plain, buffers)] = join_tensors([shard.buffers[name] for shard in shards], plain, model)
    return replace(by_place[0, 0].state, parameters=parameters, buffers=buffers)


def _number(name: str, found: Mapping[str, Any]) -> str:
    copies = count_copies(name, found)
    return f"{name}#{copies}" if copies else name


def count_copies(name: str, found: Mapping[str, Any]) -> int:
    return sum(each.partition("#")[0] == name.partition("#")[0] for each in found)


def _join_parameter(shards: Sequence[CapturedParameter], name: str, model: str) -> CapturedParameter:
    if find_blocks(name, model):
        shards = [shard for shard in shards if shard.value.numel()]  # DeepSpeed does not optimize empty ones
    first = shards[0]
    assert all(shard.scalars == first.scalars and shard.hyper == first.hyper for shard in shards)

    def united(tensors: list[Any]) -> Any:
        return None if tensors[0] is None else join_tensors(tensors, name, model)

    return replace(
        first,
        value=united([shard.value for shard in shards]),
        fp32=united([shard.fp32 for shard in shards]),
        tensors={key: united([shard.tensors[key] for shard in shards]) for key in first.tensors},
    )


def join_tensors(shards: Sequence[Any], name: str, model: str) -> Any:
    cut = find_blocks(name, model)
    if cut is None:
        assert all(torch.equal(shard, shards[0]) for shard in shards), f"{name}: replicas differ"
        return shards[0]
    dim, blocks = cut
    if not blocks:
        return torch.cat(list(shards), dim)
    parts = [shard.split([width // len(shards) for width in blocks], dim) for shard in shards]
    return torch.cat([torch.cat(block, dim) for block in zip(*parts, strict=True)], dim)


def expect(saved: CapturedEngine, loaded: CapturedEngine) -> CapturedEngine:
    """Return the expected state of an engine with the parameters of `loaded` after a load of `saved`.

    DeepSpeed saves the buffers of the first stage only: layers with a `forward_fn` have no file. A vocabulary loses its
    last padding rows, or gets new ones of zeros.
    """
    parameters = {
        name: _fit_rows(saved.parameters[_pick(name, saved.parameters, loaded.parameters)], len(state.value))
        for name, state in loaded.parameters.items()
    }
    lost = {name: state for name, state in saved.parameters.items() if "#" not in name and name not in parameters}
    buffers = {name: saved.buffers[name.partition("#")[0]] for name in loaded.buffers}
    return replace(saved, parameters={**parameters, **lost}, buffers=buffers)


def _pick(name: str, saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> str:
    """Return the name of the saved copy for a live one."""
    plain, _, number = name.partition("#")
    old, new = count_copies(plain, saved), count_copies(plain, loaded)
    if old == new or not number:
        return name
    assert min(old, new) <= 2, "stages in between have no counterpart"
    return f"{plain}#{old - 1}" if old > 1 else plain


def _fit_rows(state: CapturedParameter, rows: int) -> CapturedParameter:
    def fit(tensor: Any) -> Any:
        if len(tensor) <= rows:
            return torch.cat([tensor, tensor.new_zeros((rows - len(tensor), *tensor.shape[1:]))])
        return tensor[:rows]

    tensors = {key: fit(tensor) for key, tensor in state.tensors.items()}
    return replace(state, value=fit(state.value), fp32=None if state.fp32 is None else fit(state.fp32), tensors=tensors)
