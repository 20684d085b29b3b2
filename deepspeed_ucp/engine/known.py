"""Topologies that DeepSpeed's own load restores correctly if they are unchanged.

The plugin loads all others. Its load gives the same bits and verifies them. A row or an option is in the table only if
a test covers it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..model.index import AtomicIndex
from ..model.storage import MODULE, AtomKey
from .base import Target
from .coverage import has_drawn
from .finish import compare_scales, find_helpers

_PLAIN = frozenset({"16 bit", "tensor parallelism", "a pipeline", "frozen parameters"})
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
"""Known options of an engine by optimizer wrapper and ZeRO stage, for a strict load of all states of a ``torch.save``.
Tests: ``test_engine_hook.py`` (all rows, offload, frozen parameters), ``test_engine_parallel.py``,
``test_engine_nvme.py`` and ``test_engine_resumes.py`` (hpZ)."""

_HARMLESS = """
    stage offload_optimizer offload_param cpu_offload cpu_offload_param cpu_offload_use_pin_memory
    contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
    allgather_bucket_size allgather_sequential overlap_comm sub_group_size prefetch_bucket_size
    param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance
    gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save module_granularity_threshold
    use_all_reduce_for_fetch_params ignore_unused_parameters legacy_stage1 round_robin_gradients
    memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
    enable_sanity_checks leaf_module
"""
"""Fields of ``zero_optimization`` that do not affect a save or its load, or that are part of the topology.

Without ``compute_grad_norm`` DeepSpeed's load fails halfway if the saved run clipped gradients.
"""


def list_unknown(target: Target, index: AtomicIndex | None = None) -> list[str]:
    """Describe engine features for which DeepSpeed's load is not known to be correct.

    Args:
        index: the checkpoint, or None if each rank knows only its own files.
    """
    topology = target.topology
    row = KNOWN.get((topology.wrapper, topology.zero_stage))
    if row is None:
        return [f"{topology.wrapper} at ZeRO stage {topology.zero_stage}"]
    unknown = [option for option in _list_options(target) if option not in row]
    if index is None and any(flat.dtype != "float32" for flat in target.flats):
        unknown.append("masters in 16 bit")  # torch casts states to their dtype, and only an index has the states'
    if index is not None and topology.zero_stage == 3:  # whose load compares only sizes
        unknown += _list_other_frozen(target, index)
    if index is not None and index.helpers is not None:  # DeepSpeed fails if it is not saved, or ignores it
        live = {key for key, helper in find_helpers(target.engine).items() if helper is not None}
        unknown += [f"{key} on one side only" for key in sorted(live.symmetric_difference(index.helpers))]
    if index is not None and compare_scales(target.wrapped, index.scaler):
        unknown.append("another loss scale")  # DeepSpeed would replace this run's by the saved one
    return unknown + list(index.unnoticed if index else ())


def _list_other_frozen(target: Target, index: AtomicIndex) -> Iterator[str]:
    """Describe parameters without optimizer whose saved kind or shape differs."""
    for name in sorted(target.params.keys() - target.owned):
        saved = index.find(index.resolve(name), MODULE)
        if saved is None and AtomKey(name, MODULE) not in index.unreadable:
            yield f"{name}, which was not saved as a parameter without optimizer"
        elif saved is not None and saved.shards[target.tp_shard_of(name)].shape != target.shape_of(name):
            yield f"{name}, which was saved in another shape"


def _list_options(target: Target) -> Iterator[str]:
    """Name all options in use, except harmless ones."""
    engine, topology = target.engine, target.topology
    pipeline = topology.pp > 1 or hasattr(engine, "is_pipe_parallel")
    frozen = target.params.keys() - target.owned
    options = {
        "16 bit": topology.precision != "float32",
        "tensor parallelism": topology.tp > 1,
        "a pipeline": pipeline,
        "frozen parameters": bool(frozen),
        f"offload {topology.offload}": topology.offload != "none/none",
        "node-local files": engine.use_node_local_storage() and pipeline,  # one node writes files that others read
        **{option: True for extension in target.extensions for option in extension.list_unknown(target)},
        "a data sampler that has drawn": has_drawn(engine),  # DeepSpeed's load adds the saved clusters to its own
        # The only reader without torch's ``weights_only``, which refuses objects in ZeRO's files.
        f"a {(reader := type(engine.checkpoint_engine).__name__)}": reader != "TorchCheckpointEngine",
    }
    yield from (option for option, is_on in options.items() if is_on)
    if not target.traits.has_copies:  # else masters are loaded, and weights made from them (`refresh_after_own_load`)
        yield from (f"{name} (in no layer file)" for name in target.unfiled())
    zero, harmless = engine._config.zero_config, _HARMLESS.split()
    for name, field in type(zero).model_fields.items():
        if name not in harmless and getattr(zero, name) != field.get_default(call_default_factory=True):
            yield f"zero_optimization.{name}"
