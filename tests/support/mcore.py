"""Megatron-Core on CPUs: its own models, optimizers and ``torch_dist`` checkpoints; run on the ranks of a world.

Nothing of Megatron-Core is replaced but what asks for a GPU, and the processes that write the files.
"""

from __future__ import annotations

import copy
import os
import queue
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "max_position_embeddings": 12,
    "vocab_size": 61,
    "make_vocab_size_divisible_by": 8,
}

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "num_query_groups": 2,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    },
    "moe": {"num_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "swiglu": True},
}
"""What they have beside :data:`SIZES`, in the words of Megatron-LM's arguments."""


class _OnCpu(TorchFunctionMode):
    """What is asked of a GPU is had of the CPU, and tensors say that they are a GPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _write(transforms: Any, msc: bool, rank: int, buckets: Any, results: Any) -> None:
    """Megatron-Core's writing, without a process for each file."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    told, counts = queue.Queue[Any](), queue.Queue[int]()
    for number, bucket in enumerate(buckets):
        counts.put(number)
        FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, told, counts, False)
    results.put(dict(told.get() for _ in buckets))


@contextmanager
def join_groups(*, tp: int = 1, pp: int = 1, ep: int = 1) -> Iterator[None]:
    """Megatron-Core's groups of ranks, on CPUs: enough for models; nothing is changed of tensors."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.moe import moe_utils

    with ExitStack() as stack:
        for where, name, what in (
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (get_cuda_rng_tracker(), "fork", lambda *_: nullcontext()),
            (moe_utils, "te_general_gemm", None),  # the package forgets to say so without Transformer Engine
        ):
            stack.enter_context(mock.patch.object(where, name, what, create=where is moe_utils))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep
        )
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


@contextmanager
def on_cpu(*, tp: int = 1, pp: int = 1, ep: int = 1) -> Iterator[None]:
    """The same, for its optimizers and checkpoints too: everything of these is made and called inside."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    writer = filesystem_async.FileSystemWriterAsync
    with (
        join_groups(tp=tp, pp=pp, ep=ep),
        mock.patch.object(filesystem_async, "_results_queue", queue.Queue[Any]()),
        mock.patch.object(writer, "write_preloaded_data_multiproc", staticmethod(_write)),
        _OnCpu(),
    ):
        yield


def make_args(model: str, *, tp: int = 1, pp: int = 1, ep: int = 1, **changes: Any) -> Namespace:
    """Megatron-LM's arguments of a model, as far as they tell of it, with the vocabulary as it is padded."""
    args: dict[str, Any] = {
        **SIZES,
        "num_query_groups": SIZES["num_attention_heads"],
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
        "num_experts": None,
        "moe_router_topk": 2,
        "params_dtype": torch.float32,
        **MODELS[model],
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        **changes,
    }
    args["group_query_attention"] = args["num_query_groups"] != args["num_attention_heads"]
    args["kv_channels"] = args["hidden_size"] // args["num_attention_heads"]
    unit = args["make_vocab_size_divisible_by"] * tp
    args["padded_vocab_size"] = -(-args["vocab_size"] // unit) * unit
    return Namespace(**args)


def build(args: Namespace, *, seed: int = 1, **config: Any) -> Any:
    """Megatron-Core's GPT of a kind, this rank's part of it; under :func:`join_groups`.

    Args:
        config: more of its ``TransformerConfig``.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(seed)
    experts = {"num_moe_experts": args.num_experts, "moe_router_topk": args.moe_router_topk, "moe_grouped_gemm": False}
    made = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        normalization=args.normalization,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=args.add_bias_linear,
        params_dtype=args.params_dtype,
        pipeline_dtype=args.params_dtype,
        bf16=args.params_dtype == torch.bfloat16,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        sequence_parallel=args.num_experts is not None and args.tensor_model_parallel_size > 1,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **(experts if args.num_experts else {}),
        **config,
    )
    spec = get_gpt_layer_local_spec(args.num_experts, False, normalization=args.normalization)
    model = GPTModel(
        made,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return model.to(args.params_dtype)


def make_batch(args: Namespace, step: int, size: int = 2) -> dict[str, torch.Tensor]:
    """What a model's ``forward`` takes to give a loss of each token."""
    length = args.max_position_embeddings
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, args.vocab_size, (size, length + 1), generator=generator)
    return {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(length).expand(size, -1),
        "attention_mask": ~torch.ones(1, 1, length, length, dtype=torch.bool).tril(),
    }


def wrap(module: Any, *, distributed: bool = True, lr: float = 1e-2) -> tuple[Any, Any]:
    """Megatron-Core's data-parallel model and its Adam: the distributed optimizer, or the one with whole states."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = DistributedDataParallel(
        module.config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), module
    )
    half = module.config.params_dtype == torch.bfloat16
    options = OptimizerConfig(
        lr=lr,
        weight_decay=0.1,
        clip_grad=0.0,
        bf16=half,
        params_dtype=module.config.params_dtype,
        use_distributed_optimizer=distributed,
    )
    return model, get_megatron_optimizer(options, [model])


def train(model: Any, optimizer: Any, args: Namespace, steps: range) -> list[float]:
    """Train; the losses. In pipelines gradients are drawn instead, as no loss of a stage is there to be had."""
    losses = []
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        if args.pipeline_model_parallel_size == args.tensor_model_parallel_size == 1:
            loss = model(**make_batch(args, step)).float().mean()
            loss.backward()
            losses.append(loss.item())
        else:
            for name, param in model.named_parameters():
                generator = torch.Generator().manual_seed(sum(map(ord, name)) + step)
                param.main_grad.copy_(torch.randn(param.shape, generator=generator))
        model.finish_grad_sync()
        optimizer.step()
    return losses


def save(
    folder: str,
    model: str = "gpt",
    *,
    steps: int = 2,
    further: int = 0,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    distributed: bool = True,
    sharding: str = "fully_reshardable",
    entry: bool = False,
    metadata: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train and save into ``folder/iter_…``, named by ``latest_checkpointed_iteration.txt``, as Megatron-LM does.

    Args:
        further: steps that are taken after the save.
        distributed: with Megatron-Core's distributed optimizer, which shares states among data-parallel ranks.
        sharding: how that one saves.
        entry: put what is no tensor among the blocks, as releases from 0.19 on do, and not into ``common.pt``.
        metadata: more of what ``sharded_state_dict`` takes (``non_homogeneous_layers``, ``singleton_local_shards``).
        more: of the ``TransformerConfig``.
        changes: of the arguments.

    Returns:
        What Megatron-Core reads of it, by its keys, each tensor whole, and the losses.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    args = make_args(model, tp=tp, pp=pp, ep=ep, **changes)
    with on_cpu(tp=tp, pp=pp, ep=ep):
        module = build(args, **(more or {}))
        wrapped, optimizer = wrap(module, distributed=distributed)
        losses = train(wrapped, optimizer, args, range(steps))
        told = {"chained_optim_avoid_prefix": True, **(metadata or {})}
        if distributed:
            told["distrib_optim_sharding_type"] = sharding
        weights = module.sharded_state_dict(metadata=told)
        state = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": steps,
            "model": weights,
            "optimizer": optimizer.sharded_state_dict(copy.copy(weights), metadata=told),
            "opt_param_scheduler": {"max_lr": 1e-2, "num_steps": steps},
        }
        place = Path(folder) / f"iter_{steps:07d}"
        if dist.get_rank() == 0:
            place.mkdir(parents=True)
        dist.barrier()
        if entry:
            tensors, common = save_preprocess({**state, "content_metadata": told})
            state = {**tensors, "common": ShardedObject("common_state", common, (1,), (0,), replica_id=dist.get_rank())}
        dist_checkpointing.save(state, str(place), content_metadata=told)
        expected = read_whole(place)
        dist.barrier()
        if dist.get_rank() == 0:
            (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(steps))
            if entry:
                (place / "common.pt").unlink()  # which Megatron-Core before 0.19 needs for reading
        dist.barrier()
        losses += train(wrapped, optimizer, args, range(steps, steps + further))
        return expected, losses


def read_whole(folder: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """What Megatron-Core reads of a checkpoint's tensors, each whole, by its keys; under :func:`on_cpu`."""
    from megatron.core.dist_checkpointing import load_plain_tensors

    found = load_plain_tensors(str(folder))
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
