"""What every target has in common: flat master buffers, tensors without optimizer, and the optimizer's bookkeeping."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus, ZeroParamStatus

from ..atoms import AtomicIndex, ParamKey, count, strip_compiled
from ..engine_state import find_state
from ..errors import UnsupportedError, shorten
from ..experts import drop_fixed, find_layer, is_expert, name_experts
from ..flat import FlatBuffer, join_parameters, join_reserved
from ..plan.wants import find_states
from ..topology import Topology
from ..wrappers import Wrapper, find_wrapper
from .coverage import find_declared, name_device
from .optimizer import find_other_kind, to_plain
from .parallel import HeldExperts, Instance, find_experts, find_instances, find_place, find_unfiled
from .rule import find_doubt, find_other_rule, read_configured
from .statedict import StateDict, ask_state_dict, find_changed
from .swap import SwapFiles, SwapPlace


@dataclass(slots=True)
class LiveBuffer:
    """What this rank holds of a flat master buffer, or of a tensor that no optimizer owns.

    The latter is a frozen or unoptimized parameter, or a buffer of the module.

    Attributes:
        buffer: how parameters lie in it, over all ranks; a tensor without optimizer is alone in it.
        part: the partition that this rank holds.
        holder: the live partition, in the shape in which the optimizer keeps states for it.
        is_buffer: it is a buffer of the module.
        whole: optimizer states that the rank keeps of whole parameters, wherever its partition touches one.
        swap: where DeepSpeed swaps it to; nothing that the holder holds counts then.
    """

    buffer: FlatBuffer
    part: int
    holder: torch.Tensor
    is_buffer: bool = False
    whole: frozenset[str] = frozenset()
    swap: SwapPlace | None = None

    def find_shape(self, state: str) -> tuple[int, ...]:
        """Shape in which the optimizer keeps a state."""
        if state in self.whole:
            return (self.buffer.join_touched(self.part).partition,)
        return tuple(self.holder.shape) if self.swap is None else (self.buffer.partition,)

    @property
    def data(self) -> torch.Tensor:
        """The live partition, 1-D (of masters fp32, unless the engine keeps 16-bit ones)."""
        return flatten(self.holder)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype, wherever it is."""
        return self.holder.dtype if self.swap is None else self.swap.dtype

    def make_data(self, filled: Container[str]) -> torch.Tensor:
        """Memory to fill: the live partition, or that of a file which takes the place of the swap file later.

        Args:
            filled: names of the parameters that are filled; of others the file has to hold what there is.

        Raises:
            DiskFullError: there is no room for the file.
        """
        if self.swap is None:
            return self.data
        numel = self.buffer.partition
        return self.swap.make(numel) if all(name in filled for name in self.names) else self.swap.copy(numel)

    def make_state(self, state: str, dtype: torch.dtype) -> torch.Tensor:
        """Memory for an optimizer state that is not there yet; swapped states have the masters' dtype.

        Raises:
            DiskFullError: there is no room for it in a file.
        """
        if self.swap is None:
            return torch.empty(self.find_shape(state), dtype=dtype, device=self.holder.device)
        return self.swap.make(self.buffer.partition, state)

    @property
    def group(self) -> int:
        """Index of its param group in the optimizer."""
        return self.buffer.group

    @property
    def names(self) -> tuple[str, ...]:
        """Every parameter of the buffer over all ranks, in order."""
        return self.buffer.names

    @property
    def name(self) -> str:
        """The first of these."""
        return self.buffer.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of that one, whole."""
        return self.buffer.shapes[0]


def hold_whole(name: str, tensor: torch.Tensor, *, is_buffer: bool = False) -> LiveBuffer:
    """A tensor that every rank holds whole."""
    return LiveBuffer(join_parameters(0, (name,), (tuple(tensor.shape),)), 0, tensor, is_buffer)


def _hold_parameter(name: str, param: Any, files: SwapFiles) -> LiveBuffer:
    """What this rank holds of a parameter without optimizer: with ZeRO 3 a partition."""
    held = getattr(param, "ds_tensor", None)
    if held is None:
        return hold_whole(name, param)
    if hasattr(held, "ds_quant_scale"):
        raise UnsupportedError(
            f"{name}: a quantized parameter without optimizer cannot be filled. Switch "
            "zero_quantized_nontrainable_weights off, in the run that saves as well."
        )
    group = param.ds_process_group
    buffer = join_reserved(0, (name,), (_find_shape(param),), ds_comm.get_world_size(group=group))
    part = ds_comm.get_rank(group=group)
    if held.status != PartitionedParamStatus.AVAILABLE:
        swapper = param.nvme_swapper
        swap = SwapPlace(files, swapper.get_path(param, must_exist=True), swapper.dtype, swapper._io_aligned_numel)
        return LiveBuffer(buffer, part, held, swap=swap)
    return LiveBuffer(buffer, part, flatten(held)[: sum(cut.numel for cut in buffer.cuts(part))])


def _find_shape(param: Any) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


class Target(ABC):
    """A live engine. Subclasses know one optimizer wrapper each; they alone touch DeepSpeed's internals.

    Names and shapes are this rank's own: of its pipeline stage, as its tensor-parallel rank holds them. Experts have
    their numbers in the whole layer.

    Attributes:
        experts: layers of experts by what the names of their parameters begin with.
        experts_over_tp: parameters and buffers of experts that are spread over the tensor-parallel ranks too, whole.
        ep: expert-parallel degree; of several the largest.
        wrapper: the name of its row (:mod:`deepspeed_ucp.wrappers`).
    """

    wrapper = ""
    experts: Mapping[str, HeldExperts] = MappingProxyType({})
    experts_over_tp: Set[str] = frozenset()
    ep = 1

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.swaps = SwapFiles()
        self.place = find_place(engine)
        self.wrapped = engine.optimizer
        self.names: dict[int, str] = {}
        self.aliases: dict[str, str] = {}
        self.experts = find_experts(engine, self.place)
        self.experts_over_tp = set()
        for name, param in engine.module.named_parameters(remove_duplicate=False):
            first = self.names.setdefault(id(param), name)
            if first != name:
                pairs = zip(self._name_parts(name), self._name_parts(first), strict=True)
                self.aliases.update({strip_compiled(one): strip_compiled(other) for one, other in pairs})
        self.params: dict[str, Any] = {}
        self.places: dict[str, int] = {}
        for param in engine.module.parameters():
            self._add_parameter(param)
        self.flats: list[LiveBuffer] = []
        self.layout: list[FlatBuffer] = []
        self.collect()
        self.owned = {name for flat in self.flats for name in flat.names} | self._find_empty()

    @property
    def traits(self) -> Wrapper:
        """What the wrapper does to masters and states."""
        return find_wrapper(self.wrapper)

    @property
    def has_copies(self) -> bool:
        """Whether the model computes with copies of the masters, and not with these themselves."""
        return self.traits.has_copies

    def _add_parameter(self, param: Any) -> None:
        """Note a parameter of the module; where experts lie in it, each one's, with its place there."""
        shape, raw = _find_shape(param), self.names[id(param)]
        layer = find_layer(raw, self.experts)
        for place, (name, own) in enumerate(self._name_parts(raw, shape).items()):
            self.params[strip_compiled(name)] = param
            if own != shape:
                self.places[strip_compiled(name)] = place
            if layer is not None and self.experts[layer].over_tp:
                self.experts_over_tp |= {strip_compiled(name)}

    def _name_parts(self, name: str, shape: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
        """A name of this rank's module → the whole model's, which numbers experts otherwise."""
        return name_experts(name, shape, {layer: held.numbers for layer, held in self.experts.items()})

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank tells the others what its replicas, or those of its experts, hold as well."""
        return self.place.dp_rank == 0 or any(held.is_first_replica for held in self.experts.values())

    def speaks_for(self, name: str) -> bool:
        """Whether such a rank tells of a tensor: all that tell hold the dense ones, of which the first of them does."""
        return self.place.dp_rank == 0 or is_expert(strip_compiled(name))

    def _find_empty(self) -> set[str]:
        """Trained parameters of which this tensor-parallel rank holds no element (AutoTP: more ranks than heads).

        DeepSpeed keeps them out of the optimizer here; other ranks' optimizers own them.
        """
        if self.place.tp == 1 or self.optimizer is None:
            return set()
        return {name for name, param in self.params.items() if param.requires_grad and not count(self.shape_of(name))}

    @abstractmethod
    def collect(self) -> None:
        """Fill ``flats`` and ``layout`` from the live buffers."""

    def describe(self, params: Sequence[Any]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """Names of parameters, as the module spells them, and their shapes, ZeRO's partitioning undone."""
        return tuple(self.names[id(param)] for param in params), tuple(map(_find_shape, params))

    def add_flat(
        self,
        buffer: FlatBuffer,
        part: int,
        holder: torch.Tensor,
        whole: frozenset[str] = frozenset(),
        swap: SwapPlace | None = None,
    ) -> None:
        """Note a live buffer, whose names are as the module spells them: so a checkpoint of this engine has them."""
        if layer := next(filter(None, (find_layer(name, self.experts) for name in buffer.names)), None):
            held = self.experts[layer]
            buffer, self.ep = replace(buffer, ranks=held.ranks), max(self.ep, held.degree)
        named = zip(buffer.names, buffer.shapes, strict=True)
        buffer = buffer.split({name: self._name_parts(name, shape) for name, shape in named})
        self.layout.append(buffer)
        buffer = replace(buffer, names=tuple(map(strip_compiled, buffer.names)))
        self.flats.append(LiveBuffer(buffer, part, holder, whole=whole, swap=swap))

    @abstractmethod
    def refresh_copies(self) -> None:
        """Make the model's own copies from this rank's masters as DeepSpeed does after a step."""

    def gather_copies(self) -> None:  # noqa: B027 - most have nothing to gather
        """Complete the copies by those of other ranks, when all have made theirs; collective."""

    def find_copies(self, flat: int) -> Sequence[torch.Tensor]:
        """What a flat buffer was made from at the start: 1-D tensors, one after the other; none if not in memory.

        Args:
            flat: its number among ``flats``.
        """
        return ()

    @property
    def optimizer(self) -> Any:
        """The torch-style optimizer that keeps states and hyper-parameters, or None."""
        return getattr(self.wrapped, "optimizer", self.wrapped)

    @property
    def topology(self) -> Topology:
        """What this engine is, in the words of a checkpoint."""
        engine = self.engine
        zero, precision = engine._config.zero_config, self._find_precision()
        return Topology(
            zero_stage=int(engine.zero_optimization_stage()),
            wrapper=self.wrapper,
            precision=precision,
            dp=self.dp,
            tp=self.place.tp,
            pp=self.place.pp,
            ep=self.ep,
            undeclared=precision != find_declared(engine),
            master=dtype_name(self.flats[0].dtype) if self.flats else "float32",
            elastic=self.traits.can_be_elastic and bool(getattr(self.wrapped, "elastic_checkpoint", False)),
            offload=f"{name_device(zero.offload_optimizer)}/{name_device(zero.offload_param)}",
            flats=tuple(self.layout),
        )

    @property
    def dp(self) -> int:
        """Ranks that the masters are partitioned over."""
        return 1

    def _find_precision(self) -> str:
        """As :func:`deepspeed_ucp.sources.index.find_saved_precision` tells it of a checkpoint of this engine."""
        if (declared := find_declared(self.engine)) != "float32":
            return declared
        first = next((name for flat in self.flats for name in flat.names), next(iter(self.params), None))
        return dtype_name(self.params[first].dtype if first is not None else self.engine.get_data_types()[0])

    @property
    def is_dual(self) -> bool:
        """Whether every rank of its pipeline has a stage of the way there and one of the way back (DualPipeV)."""
        return hasattr(self.engine.module, "phase_bounds")

    def instances(self) -> dict[str, Instance]:
        """Parameters and buffers of this stage that other pipeline stages hold under the same name (tied modules)."""
        return find_instances(self.engine)

    def unfiled(self) -> list[str]:
        """Trained parameters that DeepSpeed's own load of a pipeline's layers leaves as they are."""
        return sorted(find_unfiled(self.engine) & self.owned)

    def tp_shard_of(self, name: str) -> int:
        """Which shard of a parameter, or buffer, this rank holds; experts over tensor-parallel ranks have one."""
        return 0 if name in self.experts_over_tp else self.place.tp_rank

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter as this tensor-parallel rank holds it, ZeRO's partitioning undone."""
        shape = _find_shape(self.params[name])
        return shape[1:] if name in self.places else shape

    def owned_shapes(self) -> dict[str, tuple[int, ...]]:
        """These shapes of the parameters that the optimizer owns."""
        return {name: self.shape_of(name) for name in self.params if name in self.owned}

    def group_members(self) -> dict[int, tuple[str, ...]]:
        """Parameters of each param group."""
        members: dict[int, list[str]] = {}
        for flat in self.flats:
            members.setdefault(flat.group, []).extend(flat.names)
        return {group: tuple(names) for group, names in members.items()}

    def live_groups(self) -> list[list[tuple[str, bool]]]:
        """Param groups as the user made them: (raw name, owned by the optimizer), frozen parameters included."""
        recorded = find_state(self.engine).param_groups
        if recorded is not None:
            named = [[part for name in group for part in self._name_parts(name)] for group in recorded]
            return [[(name, strip_compiled(name) in self.owned) for name in group] for group in named]
        return [[(name, True) for name in names] for _, names in sorted(self.group_members().items())]

    def list_names(self) -> dict[str, str]:
        """Every name of the module's parameters, in its order → the first name of the same parameter."""
        return {name: name for name in self.params} | self.aliases

    def list_recorded(self) -> Iterator[str]:
        """Names in the module's state dict, in its order, which may be one of the client's own."""
        keys = self.list_keys()
        todo: list[tuple[str, Any]] = [("", self.engine.module.state_dict())]
        while todo:
            name, value = todo.pop()
            if isinstance(value, Mapping):
                todo += [(f"{name}.{key}" if name else key, part) for key, part in reversed([*value.items()])]
            elif isinstance(value, torch.Tensor):
                yield keys.get(strip_compiled(name), strip_compiled(name))

    def live_hyper(self) -> list[dict[str, Any]]:
        """Hyper-parameters of these groups; of what is no plain data the type alone."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [{k: to_plain(value) for k, value in drop_fixed(group).items() if k != "params"} for group in groups]

    @cached_property
    def state_dict(self) -> StateDict:
        """How the module's own state dict differs from its parameters and buffers."""
        return ask_state_dict(self.engine.module)

    def list_keys(self) -> dict[str, str]:
        """Key of the module's own state dict → its parameter or buffer, where they differ."""
        named = ((strip_compiled(key), strip_compiled(name)) for key, name in self.state_dict.keys.items())
        return {key: name for key, name in named if not is_expert(name)}

    def describe_made(self) -> str:
        """What the module's state dict makes anew, and otherwise than it was saved, in words."""
        changed = find_changed(self.engine.module, self.state_dict)
        return f"{shorten(changed)}: the module makes them itself, and not as they were saved" if changed else ""

    def extras(self) -> list[LiveBuffer]:
        """Parameters without optimizer, persistent buffers, and what else the module's state dict holds."""
        found = [self._hold_extra(name) for name in self.params if name not in self.owned]
        persistent = set(self.engine._get_buffer_names())  # what a save writes as buffer_names
        for name, buffer in self.engine.module.named_buffers():
            if name in persistent:
                (part,) = self._name_parts(name)
                if (layer := find_layer(name, self.experts)) and self.experts[layer].over_tp:
                    self.experts_over_tp |= {strip_compiled(part)}
                found.append(hold_whole(strip_compiled(part), buffer, is_buffer=True))
        for key, tensor in self.state_dict.others.items():
            found.append(hold_whole(strip_compiled(key), tensor, is_buffer=True))
        return found

    def _hold_extra(self, name: str) -> LiveBuffer:
        param, place = self.params[name], self.places.get(name)
        if place is None:
            return _hold_parameter(name, param, self.swaps)
        if hasattr(param, "ds_tensor"):
            raise UnsupportedError(
                f"{name}: of a frozen parameter of AutoEP's experts ZeRO 3 saves nothing. Resume at ZeRO 0 to 2, or "
                "without freezing it."
            )
        return hold_whole(name, param[place])

    def param_group(self, flat: LiveBuffer) -> int:
        """Index of the optimizer's param group that holds a flat buffer (ZeRO rebuilds Adagrad with all in one)."""
        groups = self.optimizer.param_groups
        for number, group in enumerate(groups):
            if any(param is flat.holder for param in group["params"]):
                return number
        return min(flat.group, len(groups) - 1)

    def whole_parameters(self) -> AbstractContextManager[Any]:
        """Inside, ZeRO-3 parameters are whole; rank 0's changes are kept (as ``load_module_state_dict`` does)."""
        parted: list[Any] = [param for param in self.engine.module.parameters() if hasattr(param, "ds_id")]
        away = [param for param in parted if param.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        return GatheredParameters(away, modifier_rank=0)  # type: ignore[no-any-return]

    def refresh_masters(self) -> None:
        """Make the masters from the model's own copies (DeepSpeed's ``refresh_fp32_params``)."""
        refresh = getattr(self.wrapped, "refresh_fp32_params", None) or getattr(
            self.wrapped, "_restore_from_bit16_weights", None
        )
        if refresh:
            refresh()

    def prepare(self) -> None:
        """Called before the buffers are filled, when ZeRO 3 has partitioned all parameters."""
        for param in self.params.values():
            held: Any = getattr(param, "ds_tensor", None)
            if getattr(held, "final_location", None) == "nvme" and held.status != PartitionedParamStatus.NOT_AVAILABLE:
                # fetched ahead: it would hide what is filled, and never be written back
                param.nvme_swapper.synchronize_reads()
                param.nvme_swapper.remove_partition_and_release_buffers([param])

    def drop_secondary_copies(self) -> None:
        """Forget ZeRO++ hpZ's copies of the parameters, which the next forward would take for their values."""
        for param in self.params.values():
            if getattr(param, "ds_secondary_tensor", None) is not None:
                param.ds_secondary_tensor = None

    @property
    def uses_nvme(self) -> bool:
        """Whether trained parameters, or their optimizer states, are on NVMe: all of them, or the large ones."""
        return False

    def find_other_kinds(self, index: AtomicIndex) -> Iterator[str]:
        """Optimizers of another kind, whose states torch's ``load_state_dict`` takes as they are."""
        irregular: dict[ParamKey, set[str]] = defaultdict(set)
        for key in index.limits.irregular:
            irregular[key.param].add(key.state)
        groups = {param: group.hyper for group in index.run.groups for param in group.members}
        for flat in self.flats:
            params = [ParamKey(index.resolve(name)) for name in flat.names]
            saved = set().union(*(irregular.get(param, ()) for param in params))
            saved = saved.union(*(find_states(index, param) for param in params))
            hyper = next((groups[param] for param in params if param in groups), {})
            if flat.holder is not None and saved:
                scalars = set().union(*(index.run.scalars.get(param, ()) for param in params))
                group = self.param_group(flat)
                told = find_other_kind(self.optimizer, group, hyper, saved, flat.holder, scalars)
                rule = self.optimizer, self.optimizer.param_groups[group], hyper, index.run.configured
                told = told or find_other_rule(*rule) or find_doubt(*rule, read_configured(self.engine))
                yield from [told] if told else []

    def relink(self) -> None:
        """Called after optimizer states were attached: views into them are stale."""
        return


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """A live tensor as 1-D memory; non-contiguous ones cannot be destinations and come back as they are."""
    data = tensor.detach()
    return data.view(-1) if data.is_contiguous() else data


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` → ``float32``."""
    return str(dtype).removeprefix("torch.")
