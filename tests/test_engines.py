"""docs/engines.md lists every engine, section and field that the installed DeepSpeed defines."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from enum import Enum
from pathlib import Path
from pkgutil import iter_modules, walk_packages
from typing import Any

import deepspeed
import pytest
import torch
from packaging.version import Version

pytestmark = pytest.mark.skipif(
    Version(deepspeed.__version__) < Version("0.19"), reason="the page is of the release that make test installs"
)

PAGE = Path(__file__).parents[1] / "docs" / "engines.md"
CONFIG = "deepspeed.runtime.config_utils"


NEUTRAL = {
    "DeepSpeedConfig": """
        activation_checkpointing aio amp autotuning comet comms_logger communication_data_type compile
        compression_training csv_monitor curriculum_learning dataloader_drop_last disable_allgather
        disable_python_gc dump_state eigenvalue elasticity flops_profiler gradient_allreduce_op
        gradient_predivide_factor graph_harvesting hybrid_engine log_level managed_gradient_accumulation
        memory_breakdown nebula prescale_gradients progressive_layer_drop quantize_training
        seq_parallel_communication_data_type sequence_parallel_size sparse_attention sparse_gradients
        steps_per_print tensorboard timers vocabulary_size wall_clock_breakdown wandb weight_quantization
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """,
    "zero_optimization": """
        allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload_use_pin_memory
        enable_sanity_checks leaf_module legacy_stage1 log_trace_cache_warnings memory_efficient_linear overlap_comm
        override_module_apply pipeline_loading_checkpoint reduce_bucket_size reduce_scatter save_16bit_model
        stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save
        stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
        stage3_module_granularity_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params
        use_multi_rank_bucket_allreduce
    """,
    "zero_optimization.offload_param": "buffer_count buffer_size max_in_cpu nvme_path pin_memory",
    "zero_optimization.offload_optimizer": """
        buffer_count cpuadam_cores_perc fast_init nvme_path pin_memory pipeline_read pipeline_write
    """,
    "bf16": "check_grad_overflow immediate_grad_update",
    "checkpoint": "tag_validation",
    "checkpoint.writer": "io_buffer_double io_buffer_size show_statistics",
    "tensor_parallel": "keep_module_on_host kernel_inject tp tp_overlap_comm vocab_parallel_ce_backend",
    "tensor_parallel.tp": "mpu tp_group",
    "expert_parallel": """
        async_split_plan combine_impl comm_backend comm_max_tokens_per_rank comm_num_sm comm_qp_margin
        disable_triton_grouped_mm expert_activation gate_up_impl num_expert_groups num_limited_groups route_norm
        route_scale routed_scaling_factor row_weighting_impl score_apply score_func top_k top_k_attr use_grouped_mm
        validate_folding_routing
    """,
    "Sections that change nothing": """
        throughput
        CSVConfig CometConfig CommsLoggerConfig CompileConfig DeepSpeedMonitorConfig DeepSpeedThroughputTimerConfig
        DeepSpeedZeroLeafModuleConfig HybridEngineConfig TensorBoardConfig WandbConfig activation_checkpointing aio
        api_key arg_mappings autoep_non_moe autotuning block_size classes comet comms_logger
        contiguous_memory_optimization cpu_checkpointing csv_monitor debug debug_log deepcompile detailed
        double_buffer enable_cuda_graph enabled end_profile_step experiment_key experiment_name exps_dir fast
        flops_profiler free_activation free_activation_threshold group hidden_size inference_tp_size
        intra_op_parallelism job_name keep_all_input_tensors keep_int_input_tensors max_out_tokens
        max_train_batch_size max_train_micro_batch_size_per_gpu metric metric_path min_train_batch_size
        min_train_micro_batch_size_per_gpu mode model_info model_info_path module_depth mp_size name_suffixes names
        num_layers num_params num_tuning_micro_batch_sizes number_checkpoints offload_activation
        offload_activation_pin_memory offload_opt_states offload_parameters online output_file output_path
        overlap_events overwrite partition_activations passes pin_parameters prof_all prof_ops profile profile_step
        project queue_depth recompute_fwd_factor release_inference_cache results_dir samples_log_interval
        single_submit start_profile_step symmetric_memory sync_after_allgather sync_after_reduce
        sync_before_allgather sync_before_reduce synchronize_checkpoint_boundary synchronized team tensorboard
        top_modules tp_gather_partition_size tuner_early_stopping tuner_num_trials tuner_type use_gds verbose wandb
        workspace
    """,
}
"""Section or model → fields without effect on checkpoints. The page does not list them."""


@pytest.fixture(scope="module")
def page() -> dict[str, set[str]]:
    """Map each heading to the words in backticks in it and below it, with neutral fields; "" is the whole page."""
    found: dict[str, set[str]] = defaultdict(set)
    heading = ""
    for line in PAGE.read_text().splitlines():
        heading = line.lstrip("# ") if line.startswith("#") else heading
        words = {word for text in re.findall(r"`([^`]+)`", line) for word in (text, *re.split(r"[ ./:]+", text))}
        found[heading] |= words
        found[""] |= words
    for name, words in NEUTRAL.items():
        for heading in [each for each in found if f"`{name}`" in each] or [name]:
            found[heading] |= {*words.split()}
            found[""] |= {*words.split()}
    return found


def find_section(page: dict[str, set[str]], *names: str) -> set[str]:
    """Return the words below the first heading that has one of these names, or below that of neutral sections."""
    for name in names:
        if headings := [heading for heading in page if f"`{name}`" in heading]:
            return set().union(*(page[heading] for heading in headings))
    return page["Sections that change nothing"]


def test_the_page_lists_every_optimizer_class_of_an_engine(page: dict[str, set[str]]) -> None:
    known = page["Optimizer wrappers"] | page["Optimizers"]
    classes = set(list_optimizers())
    assert {"DeepSpeedZeroOptimizer", "FP16_Optimizer", "ZenFlowZeroOptimizer", "FusedAdam", "MuAdam"} <= classes
    assert classes - known == set()


def list_optimizers() -> Iterator[str]:
    """Yield the names of optimizer classes in the engine's methods that create optimizers, without helpers."""
    engine = importlib.import_module("deepspeed.runtime.engine")
    for name, method in vars(engine.DeepSpeedEngine).items():
        if re.fullmatch(r"_(configure|return)_(\w+_)?optimizer|get_optimizer_configuration", name):
            yield from _list_classes(method, vars(engine))


def _list_classes(method: Any, scope: dict[str, Any]) -> Iterator[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            try:
                module = importlib.import_module("." * node.level + (node.module or ""), "deepspeed.runtime")
            except ImportError:  # from a package that is not installed
                yield from (each.name for each in node.names)
                continue
            scope = {**scope, **{each.asname or each.name: getattr(module, each.name) for each in node.names}}
    for node in ast.walk(tree):
        kind = _resolve(node, scope)
        if isinstance(kind, type) and not issubclass(kind, (Enum, Exception, torch.nn.Module)):
            yield from {kind.__name__} - {"NoneType", "LossScaleConfig", "NoopTimer"}


def _resolve(node: ast.AST, scope: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return scope.get(node.id)
    return getattr(_resolve(node.value, scope), node.attr, None) if isinstance(node, ast.Attribute) else None


def test_the_page_lists_every_engine_pipeline_and_wrapper(page: dict[str, set[str]]) -> None:
    """Subclasses count, too, even if another class creates them."""
    import_all("deepspeed.runtime", "deepspeed.pipe")
    bases = (
        importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine,
        importlib.import_module("deepspeed.pipe").PipelineModule,
        importlib.import_module("deepspeed.runtime.base_optimizer").DeepSpeedOptimizer,
    )
    kinds = [kind for base in bases for kind in list_subclasses(base) if kind.__module__.startswith("deepspeed.")]
    names = {kind.__name__ for kind in kinds} - {"ZeROOptimizer"}  # tests define some, too
    names = {re.sub("(ZenFlowZeroOptimizer)(Sequential|Parallel)", r"…\2", name) for name in names}
    assert {"PipelineEngine", "SuperOffloadOptimizer_Stage3"} <= names
    assert names - page[""] == set()


def import_all(*packages: str) -> None:
    for package in packages:
        path = importlib.import_module(package).__path__
        for module in walk_packages(path, f"{package}.", onerror=lambda _: None):
            with suppress(Exception):  # modules of an accelerator or package that is missing
                importlib.import_module(module.name)


def test_the_page_lists_every_checkpoint_engine_and_writer(page: dict[str, set[str]]) -> None:
    package = importlib.import_module("deepspeed.runtime.checkpoint_engine")
    for module in iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    constants = importlib.import_module("deepspeed.runtime.model_checkpointing.constants")
    engines = {kind.__name__ for kind in list_subclasses(package.checkpoint_engine.CheckpointEngine)}
    names = {*engines, *constants.CHECKPOINT_WRITER_TYPES, *constants.CHECKPOINT_DATA_PARALLEL_UNITS}
    assert len(names) >= 10
    assert names - page["Checkpoint writers"] == set()


def test_the_page_lists_every_offload_device(page: dict[str, set[str]]) -> None:
    devices = importlib.import_module("deepspeed.runtime.zero.offload_config").OffloadDeviceEnum
    assert {each.value for each in devices} - page["Offload"] == set()


def test_the_page_lists_every_package_of_the_runtime(page: dict[str, set[str]]) -> None:
    """A new package may be a new kind of engine."""
    runtime = importlib.import_module("deepspeed.runtime")
    packages = {module.name for module in iter_modules(runtime.__path__) if module.ispkg}
    plumbing = {"activation_checkpointing", "checkpoint_engine", "comm", "data_pipeline", "fp16", "model_checkpointing"}
    plumbing |= {"pipe", "superoffload", "swap_tensor", "zero"}
    assert packages - plumbing - page[""] == set()


def test_the_page_lists_every_field_of_every_section_model(page: dict[str, set[str]]) -> None:
    lacking = {}
    kinds = list(list_models())
    assert len(kinds) > 15
    for kind in kinds:
        known = find_section(page, kind.__name__)
        names = {field.alias or name for name, field in kind.model_fields.items()}
        lacking[kind.__name__] = names - known if kind.__name__ in page[""] else {"all of it"}
    assert {name: sorted(each) for name, each in lacking.items() if each} == {}


def list_subclasses(kind: type) -> Iterator[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from list_subclasses(each)


def list_models() -> Iterator[Any]:
    """Yield the models of sections of a training's ds_config. Engines for inference save no checkpoints."""
    root = Path(deepspeed.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = ".".join(("deepspeed", *path.relative_to(root).with_suffix("").parts))
        if not name.startswith("deepspeed.inference") and "(DeepSpeedConfigModel)" in path.read_text():
            importlib.import_module(name.removesuffix(".__init__"))
    for kind in list_subclasses(importlib.import_module(CONFIG).DeepSpeedConfigModel):
        if kind.__module__.startswith("deepspeed.") and not kind.__module__.startswith("deepspeed.inference"):
            yield kind


def test_the_page_lists_every_field_of_autoep(page: dict[str, set[str]]) -> None:
    kind = importlib.import_module("deepspeed.module_inject.auto_ep_config").AutoEPConfig
    names = {field.name for field in fields(kind) if not field.name.startswith("_")}
    assert names - find_section(page, "AutoEPConfig") == set()


class RecordedSection(dict[str, Any]):
    """A section of a ds_config that records the keys that are read from it."""

    def __init__(self, path: tuple[str, ...], read_keys: set[tuple[str, ...]], parts: dict[str, Any]) -> None:
        super().__init__(parts)
        self.path, self.read_keys = path, read_keys

    def __contains__(self, key: object) -> bool:
        self.read_keys.add((*self.path, str(key)))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.read_keys.add((*self.path, key))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read_keys.add((*self.path, key))
        return super().get(key, default)

    def keys(self) -> Any:
        """Return the section, so that `key in section.keys()` is recorded, too."""
        return self

    def __copy__(self) -> RecordedSection:
        return self

    def __bool__(self) -> bool:
        return True


def test_the_page_lists_every_key_that_deepspeedconfig_reads(page: dict[str, set[str]]) -> None:
    read_keys = find_read_keys()
    assert {("optimizer", "type"), ("checkpoint", "writer", "decoupled"), ("data_types", "param_dtype")} <= read_keys
    top = page["Top level: `DeepSpeedConfig`"]
    lacking = [
        ".".join(path)
        for path in sorted(read_keys)
        if path[-1] not in (find_section(page, ".".join(path[:-1]), path[0]) if path[1:] else top)
    ]
    assert lacking == []


def find_read_keys() -> set[tuple[str, ...]]:
    """Return the paths of the keys that DeepSpeedConfig reads; each may be a section with further keys."""
    config = importlib.import_module("deepspeed.runtime.config").DeepSpeedConfig
    read_keys: set[tuple[str, ...]] = {()}
    done: set[tuple[str, ...]] = set()
    while todo := {path for path in read_keys if len(path) < 3} - done:
        for path in todo:
            section: Any = RecordedSection(path, read_keys, {})
            for depth in reversed(range(len(path))):
                section = RecordedSection(path[:depth], read_keys, {path[depth]: section})
            if path:
                section.setdefault("train_batch_size", 1)
            with suppress(Exception):  # many keys are no sections, and removed keys are refused
                config(section)
        done |= todo
    return read_keys - {()}
