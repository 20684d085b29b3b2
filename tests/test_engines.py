"""docs/engines.md lists every engine, section and field that the installed DeepSpeed defines."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from pkgutil import iter_modules, walk_packages
from typing import Any

import deepspeed
import pytest
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
}
"""Section or model → fields without effect on checkpoints. The page does not list them."""

NEUTRAL_SECTIONS = """
    CSVConfig CometConfig CommsLoggerConfig CompileConfig DeepSpeedMonitorConfig DeepSpeedThroughputTimerConfig
    DeepSpeedZeroLeafModuleConfig HybridEngineConfig TensorBoardConfig WandbConfig activation_checkpointing aio
    autotuning flops_profiler timers
"""
"""Sections and models without effect on checkpoints: logs, measurements, compilation, I/O of swap files."""


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


def list_lacking(page: dict[str, set[str]], fields: Iterable[str], *names: str) -> list[str]:
    """List the fields that are not below the first heading with one of these names of their section."""
    for name in names:
        if headings := [heading for heading in page if f"`{name}`" in heading]:
            return sorted(set(fields).difference(*(page[heading] for heading in headings)))
    return [] if {*names} & {*NEUTRAL_SECTIONS.split()} else sorted(fields)


HELPERS = """
    CPUAdam Exception ImportError LossScaleConfig LossScaleProfile NoopTimer NotImplementedError PipelineModule
    Stage1And2ZeroOptimizer Stage3ZeroOptimizer ValueError ZeRORuntimeException ZeroStageEnum
"""
"""Other classes, and other names of optimizers, in the engine's methods that create optimizers."""


def list_optimizers() -> Iterator[str]:
    """Yield the names of classes in the engine's methods that create optimizers, without helpers."""
    engine = importlib.import_module("deepspeed.runtime.engine")
    for name, method in vars(engine.DeepSpeedEngine).items():
        if re.fullmatch(r"_(configure|return)_(\w+_)?optimizer|get_optimizer_configuration", name):
            names = (*method.__code__.co_names, *method.__code__.co_varnames)
            yield from {each for each in names if re.match(r"[A-Z]\w*[a-z]", each)}.difference(HELPERS.split())


def list_engines() -> Iterator[str]:
    """Yield the names of engines, pipelines and wrappers. Subclasses count, even if another class creates them."""
    import_all("deepspeed.runtime", "deepspeed.pipe")
    for base in (
        importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine,
        importlib.import_module("deepspeed.pipe").PipelineModule,
        importlib.import_module("deepspeed.runtime.base_optimizer").DeepSpeedOptimizer,
    ):
        for kind in list_subclasses(base):
            if kind.__module__.startswith("deepspeed.") and kind.__name__ != "ZeROOptimizer":  # tests define some, too
                yield re.sub("(ZenFlowZeroOptimizer)(Sequential|Parallel)", r"…\2", kind.__name__)


def import_all(*packages: str) -> None:
    for package in packages:
        path = importlib.import_module(package).__path__
        for module in walk_packages(path, f"{package}.", onerror=lambda _: None):
            with suppress(Exception):  # modules of an accelerator or package that is missing
                importlib.import_module(module.name)


def list_writers() -> Iterator[str]:
    package = importlib.import_module("deepspeed.runtime.checkpoint_engine")
    for module in iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    constants = importlib.import_module("deepspeed.runtime.model_checkpointing.constants")
    yield from (kind.__name__ for kind in list_subclasses(package.checkpoint_engine.CheckpointEngine))
    yield from (*constants.CHECKPOINT_WRITER_TYPES, *constants.CHECKPOINT_DATA_PARALLEL_UNITS)


def list_devices() -> Iterator[str]:
    yield from importlib.import_module("deepspeed.runtime.zero.offload_config").OffloadDeviceEnum


PLUMBING = {"activation_checkpointing", "checkpoint_engine", "comm", "data_pipeline", "fp16", "model_checkpointing"}
PLUMBING |= {"pipe", "superoffload", "swap_tensor", "zero"}


def list_packages() -> Iterator[str]:
    """Yield the names of the runtime's packages, of which a new one may be a new kind of engine."""
    runtime = importlib.import_module("deepspeed.runtime")
    yield from {module.name for module in iter_modules(runtime.__path__) if module.ispkg} - PLUMBING


def list_autoep() -> Iterator[str]:
    kind = importlib.import_module("deepspeed.module_inject.auto_ep_config").AutoEPConfig
    yield from (field.name for field in fields(kind) if not field.name.startswith("_"))


WRAPPERS = {"DeepSpeedZeroOptimizer", "FP16_Optimizer", "ZenFlowZeroOptimizer", "FusedAdam", "MuAdam"}


@pytest.mark.parametrize(
    ("list_names", "headings", "known"),
    [
        (list_optimizers, ("Optimizer wrappers", "Optimizers"), WRAPPERS),
        (list_engines, ("",), {"PipelineEngine", "SuperOffloadOptimizer_Stage3"}),
        (list_writers, ("Checkpoint writers",), {"TorchCheckpointEngine"}),
        (list_devices, ("Offload",), {"nvme"}),
        (list_packages, ("",), {"zenflow"}),
        (list_autoep, ("`expert_parallel`: `AutoEPConfig`",), {"autoep_size"}),
    ],
)
def test_the_page_lists_every_name(
    list_names: Any, headings: tuple[str, ...], known: set[str], page: dict[str, set[str]]
) -> None:
    names = set(list_names())
    assert known <= names
    assert names.difference(*(page[heading] for heading in headings)) == set()


def test_the_page_lists_every_field_of_every_section_model(page: dict[str, set[str]]) -> None:
    kinds = {kind.__name__: kind for kind in list_models()}
    assert len(kinds) > 15
    lacking = {
        name: list_lacking(page, [field.alias or each for each, field in kind.model_fields.items()], name)
        for name, kind in kinds.items()
    }
    assert {name: each for name, each in lacking.items() if each} == {}


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
    top = {name for name, *more in read_keys if not more} - page["Top level: `DeepSpeedConfig`"]
    lacking = [path for path in read_keys if path[1:] and list_lacking(page, path[-1:], ".".join(path[:-1]), path[0])]
    assert (top, lacking) == (set(), [])


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
