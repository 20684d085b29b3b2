"""Kinds of engines: how each is configured, trained, read, joined and compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from torch import Tensor

from deepspeed_ucp.testing import LOSS_TOLERANCE
from tests.support.engines.reading import join, read_states

ON_CPU = {"offload_optimizer": {"device": "cpu"}}
SUMS_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
"""Makes DeepSpeed use BF16_Optimizer for bf16 at stage 1."""


def enable(precision: str) -> dict[str, Any]:
    """Return the section of a ds_config for a precision, empty for fp32."""
    scale = {"initial_scale_power": 8} if precision == "fp16" else {}
    return {} if precision == "fp32" else {precision: {"enabled": True, **scale}}


@dataclass(frozen=True)
class Kind:
    """An engine. A subclass or its module has ``make``, ``step`` and perhaps ``read_states``.

    Attributes:
        precision: "fp32", "bf16" or "fp16".
        zero: further keys of ``zero_optimization``.
        config: further keys of the ds_config.
    """

    stage: int = 1
    world: int = 2
    precision: str = "fp32"
    zero: dict[str, Any] = field(default_factory=dict, kw_only=True)
    config: dict[str, Any] = field(default_factory=dict, kw_only=True)

    batch: ClassVar[int] = 8
    """Samples per step, all ranks together."""

    universal: ClassVar[Any] = None
    """The plugin's section while the engine saves; None: the plugin is off."""

    client_state: ClassVar[Any] = None
    """Client state of saves; by default the one that the training attached to its engine."""

    def __str__(self) -> str:
        parts = [f"zero{self.stage}", self.precision, f"of{self.world}"]
        for each in fields(self)[3:]:
            value = getattr(self, each.name)
            if value != (each.default if each.default_factory is MISSING else each.default_factory()):
                parts += _describe(each.name, value)
        return "-".join(parts)

    @property
    def home(self) -> Any:
        return type(self) if hasattr(self, "make") else sys.modules[type(self).__module__]

    @property
    def ds_config(self) -> dict[str, Any]:
        return self.make_config()

    def make_config(self, zero: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        return {
            "train_batch_size": self.batch,
            # The default bucket has 5e8 elements; the tests hash all memory of an engine.
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 1 << 20, **(zero or {}), **self.zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            "steps_per_print": 1 << 30,
            **({"checkpoint": {"universal": self.universal}} if self.universal else {}),
            **enable(self.precision),
            **more,
            **self.config,
        }

    @property
    def operator(self) -> str:
        """Optimizer whose operator DeepSpeed compiles for the engine, or ""."""
        return "fused_adam" if self.ds_config.get("optimizer", {}).get("type") == "Muon" else ""

    def but(self, **changes: Any) -> Any:
        return replace(self, **changes)

    def on(self, **options: Any) -> Any:
        return self.but(config={**self.config, "checkpoint": {"universal": options or True}})

    def saving(self, memory: Path, **options: Any) -> Any:
        """Return the kind with saves into a memory folder."""
        return self.on(save={"memory": str(memory), "wait_s": 240, **options})

    def live(self) -> Any:
        """Return the kind with the plugin on, unless its configuration turns it off."""
        section = {"universal": self.universal or True, **self.config.get("checkpoint", {})}
        return self.but(config={**self.config, "checkpoint": section})

    def training(self, seed: int = 0, folder: str = "", **options: Any) -> Any:
        """Return the function that makes and trains an engine.

        Args:
            folder: for files of the engine outside its saves.
        """
        return partial(run, self, seed, {**self.list_options(folder), **options})

    def surround(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def list_options(self, folder: str) -> dict[str, Any]:
        """List arguments of ``make`` that depend on the folder of a run."""
        return {}

    @property
    def read(self) -> Callable[[Any], Any]:
        """Function that reads the states of a rank; collective."""
        return getattr(self.home, "read_states", read_states)  # type: ignore[no-any-return]

    def join(self, ranks: Sequence[Any]) -> Any:
        return join([local.state for local in ranks])

    def keep(self, state: Any) -> Any:
        return state

    def compare(self, saved: Any, loaded: Any, *, buffers: bool = True) -> tuple[int, list[str]]:
        """Compare joined states to the bit. Return the number of compared tensors, and the differences."""
        found = [f"{key} is on one side alone" for key in saved.keys() ^ loaded.keys()]
        for (name, state), tensor in loaded.items():
            if (name, state) not in saved or (state == "buffer" and not buffers):
                continue
            master = saved.get((name, "fp32")) if state == "copy" else None
            wanted = self.adjust(state, saved[name, state] if master is None else master, tensor)
            if state in ("copy", "buffer", "momentum_buffer"):  # in the engine's dtype
                wanted = wanted.to(tensor.dtype)
            if tensor.dtype != wanted.dtype or not torch.equal(tensor, wanted):
                found.append(f"{name}: {state} differs")
        return len(loaded), found

    def is_direct(self, source: Any) -> bool:
        """Return True if the plugin's loader loads `source` into this engine."""
        return source != self  # type: ignore[no-any-return]

    def find_refusal(self, source: Any) -> str:
        """Return a part of the error message of a load of `source`; empty if it succeeds."""
        return ""

    def find_tolerance(self, source: Any) -> float | None:
        """Return the largest relative gap of losses; None if they are not comparable."""
        return max(LOSS_TOLERANCE[each.precision] for each in (self, source))  # type: ignore[no-any-return]

    def adjust(self, state: str, saved: Tensor, loaded: Tensor) -> Tensor:
        """Return the saved tensor in the form of this engine."""
        return saved


def _describe(name: str, value: Any) -> list[str]:
    if isinstance(value, dict):
        return list(map(str, value))
    if isinstance(value, bool | str):
        return [name if value is True else f"no-{name}" if value is False else value]
    return [name + ".".join(map(str, value)) if isinstance(value, tuple) else f"{name}{value}"]


# --- on the ranks


def run(kind: Kind, seed: int, options: Mapping[str, Any]) -> Generator[Any, None, None]:
    torch._dynamo.config.disable = True  # Muon's compiled update needs minutes; names of compiled models stay
    with kind.surround():
        prepare(seed, fp16=not getattr(kind, "muon", False))
        engine = kind.home.make(kind, seed, **options)
        yield engine
        while True:
            yield kind.home.step(engine)


def prepare(seed: int, *, fp16: bool = True) -> None:
    """Prepare the process for an engine: undo what DeepSpeed keeps of earlier ones for the whole process.

    Groups of experts are named by the degree and not by the order of ranks.

    Args:
        fp16: allow fp16 on a CPU without AMX-FP16, which torch supports. Muon's steps would use it and take minutes.
    """
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    groups._EXPERT_PARALLEL_GROUP.clear()
    groups._EXPERT_DATA_PARALLEL_GROUP.clear()
    groups.mpu = None
    autocast: Any = sys.modules.get("deepspeed.runtime.torch_autocast")
    if autocast is not None:
        autocast.TORCH_AUTOCAST_INITIALIZED, autocast.TORCH_AUTOCAST_DTYPE = False, None
    CPU_Accelerator.is_fp16_supported = lambda self: fp16
    CPU_Accelerator.supported_dtypes = lambda self: [torch.float, torch.bfloat16, torch.float16]  # used by 0.16
    torch.manual_seed(seed)


def mean_square(output: Tensor, _label: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def take_step(engine: Any, loss: Tensor) -> float:
    """Make a step of the engine. Return the mean of the loss over all ranks."""
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total.item() / dist.get_world_size())


def step_on_noise(
    engine: Any,
    shape: Sequence[int],
    part: tuple[int, int] | None = None,
    loss_of: Callable[[Tensor, Tensor], Tensor] = mean_square,
    label: Callable[[Tensor], Tensor] = lambda own: own,
) -> float:
    """Train on a batch that depends on the step's number. Return the mean loss over all ranks.

    Args:
        shape: of a whole batch.
        part: number of this rank's part of the batch, and number of parts; by default rank and world size.
    """
    rank, parts = part or (dist.get_rank(), dist.get_world_size())
    batch = torch.randn(*shape, generator=torch.Generator().manual_seed(engine.global_steps))
    own = batch.chunk(parts)[rank].to(engine.device, next(engine.module.parameters()).dtype)
    if isinstance(engine.module, PipelineModule):
        micros = own.split(engine.train_micro_batch_size_per_gpu())
        return float(engine.train_batch(iter([(each, label(each)) for each in micros])))
    return take_step(engine, loss_of(engine(own), label(own)))
