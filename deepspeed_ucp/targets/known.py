"""What DeepSpeed's own load of an unchanged topology is known to get right: the rest of what is covered is ours.

Ours gives the same bits, and checks them. So a row, or an option in it, is only here because a test shows that load to
be right; what nobody has looked at is in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..atoms import MODULE, AtomicIndex, AtomKey
from ..experts import is_expert
from .coverage import has_drawn

_PLAIN = frozenset({"16 bit", "tensor parallelism", "a pipeline", "frozen parameters", "experts"})
_OFFLOAD = frozenset({"offload cpu/none", "offload cpu/cpu"})

KNOWN: dict[tuple[str, int], frozenset[str]] = {
    ("torch", 0): _PLAIN,
    ("fp16_fused", 0): _PLAIN,
    ("fp16_unfused", 0): _PLAIN,
    ("bf16", 1): _PLAIN,
    ("zero12", 1): _PLAIN | {"offload cpu/none"},
    ("zero12", 2): _PLAIN | {"offload cpu/none"},
    ("zero3", 3): _OFFLOAD | {"16 bit", "frozen parameters", "zero_optimization.zero_hpz_partition_size"},
}
"""Options that an engine may have, by optimizer wrapper and ZeRO stage, in a strict load of all states from a save by
``torch.save``. Shown by ``test_engine_hook.py`` (all rows, offload, frozen parameters, experts), ``test_engine_3d.py``,
``test_engine_muon.py`` and ``test_engine_offload.py`` (hpZ)."""

_HARMLESS = """
    stage offload_optimizer offload_param cpu_offload cpu_offload_param cpu_offload_use_pin_memory
    contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
    allgather_bucket_size allgather_sequential overlap_comm compute_grad_norm sub_group_size prefetch_bucket_size
    param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance
    gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save module_granularity_threshold
    use_all_reduce_for_fetch_params ignore_unused_parameters legacy_stage1 round_robin_gradients
    memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
    enable_sanity_checks leaf_module
"""
"""Fields of ``zero_optimization`` that change nothing of a save or its load, or that the topology has."""


def list_unknown(target: Any, index: AtomicIndex | None = None) -> list[str]:
    """What DeepSpeed's own load is not known to restore of a live engine in its own topology, in words.

    Args:
        target: the engine's (:class:`.base.Target`).
        index: the checkpoint; None where each rank knows its own files alone.
    """
    topology = target.topology
    row = KNOWN.get((topology.wrapper, topology.zero_stage))
    if row is None:
        return [f"{topology.wrapper} at ZeRO stage {topology.zero_stage}"]
    found = [option for option in _list_options(target) if option not in row]
    if index is not None and topology.zero_stage == 3:
        found += _list_other_frozen(target, index)
    return found + list(index.limits.unnoticed if index else ())


def _list_other_frozen(target: Any, index: AtomicIndex) -> Iterator[str]:
    """Parameters in no optimizer that were not so when they were saved: of ZeRO 3's it compares the sizes alone."""
    for name in sorted(target.params.keys() - target.owned):
        saved = index.find(index.resolve(name), MODULE)
        if saved is None and AtomKey(name, MODULE) not in index.limits.unreadable:
            yield f"{name}, which was not saved as a parameter without optimizer"
        elif saved is not None and saved.shards[target.tp_shard_of(name)].shape != target.shape_of(name):
            yield f"{name}, which was saved in another shape"


def _list_options(target: Any) -> Iterator[str]:
    engine, topology = target.engine, target.topology
    pipeline = topology.pp > 1 or hasattr(engine, "is_pipe_parallel")
    frozen = target.params.keys() - target.owned
    found = {
        "16 bit": topology.precision != "float32",
        "tensor parallelism": topology.tp > 1,
        "a pipeline": pipeline,
        "frozen parameters": bool(frozen),
        "frozen experts": any(map(is_expert, frozen)),  # at ZeRO 2 it gives every rank those of the first one
        _describe_experts(target): bool(target.experts),
        f"offload {topology.offload}": topology.offload != "none/none",
        # Of both one node writes what others read.
        "files of every node's own": engine.use_node_local_storage() and (pipeline or bool(target.experts)),
        "a data sampler that has drawn": has_drawn(engine),
        f"a {type(engine.checkpoint_engine).__name__}": type(engine.checkpoint_engine).__name__ != _READER,
    }
    yield from (option for option, is_on in found.items() if is_on)
    if not target.has_copies:  # else the masters come back, and the weights of them (`refresh_after_own_load`)
        yield from (f"{name} (in no layer file)" for name in target.unfiled())
    yield from _list_fields(engine._config.zero_config)


_READER = "TorchCheckpointEngine"
"""The other readers load with torch's own restrictions, which refuse what ZeRO has in its files."""


def _describe_experts(target: Any) -> str:
    """``experts`` where each process finds its own by its rank, in one order.

    It looks for an expert's file under its own tensor-parallel rank, where it is if that degree divides the
    expert-parallel one.
    """
    held = target.experts.values()
    in_turn = all(not each.over_tp or each.degree % target.place.tp == 0 for each in held)
    return "experts" if in_turn and len({each.degree for each in held}) <= 1 else "experts of other ranks or degrees"


def _list_fields(zero: Any) -> Iterator[str]:
    harmless = _HARMLESS.split()
    for name, field in type(zero).model_fields.items():
        if name not in harmless and getattr(zero, name) != field.get_default(call_default_factory=True):
            yield f"zero_optimization.{name}"
