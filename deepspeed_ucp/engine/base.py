"""Base class of load targets: master buffers, other tensors, and param groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from ..engine_state import find_state
from ..errors import UnsupportedError, shorten
from ..extensions.registry import Extension, find_for_engine
from ..model.flat import FlatBuffer, join_parameters, join_reserved
from ..model.index import AtomicIndex
from ..model.storage import ParamKey, count, strip_compiled
from ..model.topology import Topology, drop_labels
from ..model.view import EngineBuffer
from ..model.wrappers import Wrapper, find_wrapper
from ..plan.wants import find_states
from .coverage import find_declared_precision
from .optimizer import find_other_kind, to_plain
from .parallel import Instance, Share, find_parallel_state
from .rule import find_doubt, find_other_rule, read_configured


def _find_shape(param: Any) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


class Target(ABC):
    """A live engine as a load target; one subclass per kind of optimizer wrapper.

    Names and shapes cover this rank's pipeline stage and tensor-parallel rank. Names are the whole model's.

    Attributes:
        wrapper: name in :mod:`deepspeed_ucp.model.wrappers`.
        unsharded: parameters and buffers that tensor-parallel ranks do not cut.
        ep: the largest degree of a :class:`~.parallel.Share`.
        names: id of a parameter → its first name in the module.
        aliases: further names of tied parameters → the first one.
        params: the module's parameters by name; a fused one has several names.
        fused_indices: name → index in a fused parameter.
        layout: the flat buffers over all ranks, under the names in a checkpoint.
        owned: parameters that the optimizer trains.
        shares: name in the module → the ranks with this distributed parameter or buffer.
    """

    wrapper: str
    unsharded: Set[str] = frozenset()
    ep = 1
    extensions: Sequence[Extension] = ()
    shares: Mapping[str, Share] = MappingProxyType({})

    def __init__(self, engine: Any, wrapper: str) -> None:
        self.engine, self.wrapper = engine, wrapper
        self.extensions = find_for_engine(engine)
        self.parallel = find_parallel_state(engine)
        self.wrapped = engine.optimizer
        self.names: dict[int, str] = {}
        self.aliases: dict[str, str] = {}
        self.unsharded = set()
        for extension in self.extensions:
            self.shares = {**self.shares, **extension.find_shares(self)}
        for name, param in engine.module.named_parameters(remove_duplicate=False):
            first = self.names.setdefault(id(param), name)
            if first != name:
                pairs = zip(self._name_parts(name), self._name_parts(first), strict=True)
                self.aliases.update({strip_compiled(one): strip_compiled(other) for one, other in pairs})
        self.params: dict[str, Any] = {}
        self.fused_indices: dict[str, int] = {}
        for param in engine.module.parameters():
            self._add_parameter(param)
        self.flats: list[EngineBuffer] = []
        self.layout: list[FlatBuffer] = []
        self.collect()
        for extension in self.extensions:
            extension.complete_target(self)
        self.owned = {name for flat in self.flats for name in flat.names} | self._find_empty()

    @property
    def traits(self) -> Wrapper:
        """The wrapper's row in :mod:`deepspeed_ucp.model.wrappers`."""
        return find_wrapper(self.wrapper)

    def _add_parameter(self, param: Any) -> None:
        """Register a parameter of the module, a fused one under several names."""
        shape, raw = _find_shape(param), self.names[id(param)]
        share = self.shares.get(raw)
        for index, (name, part) in enumerate(self._name_parts(raw, shape).items()):
            self.params[strip_compiled(name)] = param
            if part != shape:
                self.fused_indices[strip_compiled(name)] = index
            if share is not None and share.unsharded:
                self.unsharded |= {strip_compiled(name)}

    def _name_parts(self, name: str, shape: tuple[int, ...] = ()) -> dict[str, tuple[int, ...]]:
        """Map a name of this rank's module to names and shapes in the whole model."""
        share = self.shares.get(name)
        return share.name_parts(name, shape) if share else {name: shape}

    @property
    def is_uneven(self) -> bool:
        """True if data-parallel ranks hold different parameters."""
        return any(share.ranks is not None for share in self.shares.values())

    @property
    def is_first_replica(self) -> bool:
        """True if this rank is the first data-parallel rank or the first of a share."""
        return self.parallel.dp_rank == 0 or any(share.is_first_replica for share in self.shares.values())

    def reports(self, name: str) -> bool:
        """Return True if this rank, a first replica, reports a tensor to the other ranks.

        Data-parallel rank 0 reports all tensors, other ranks only distributed parameters.
        """
        return self.parallel.dp_rank == 0 or strip_compiled(name) in self._distributed

    @cached_property
    def _distributed(self) -> set[str]:
        """Names of the distributed parameters and buffers in the whole model."""
        return {strip_compiled(part) for name in self.shares for part in self._name_parts(name)}

    def _find_empty(self) -> set[str]:
        """List trained parameters that are empty on this tensor-parallel rank.

        AutoTP makes them if there are more ranks than heads. DeepSpeed omits them from this rank's optimizer, but not
        from other ranks' optimizers.
        """
        if self.parallel.tp == 1 or self.optimizer is None:
            return set()
        return {name for name, param in self.params.items() if param.requires_grad and not count(self.shape_of(name))}

    @abstractmethod
    def collect(self) -> None:
        """Fill ``flats`` and ``layout`` from the live buffers."""

    def describe(self, params: Sequence[Any]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """Return parameters' names in the module and their unpartitioned shapes."""
        return tuple(self.names[id(param)] for param in params), tuple(map(_find_shape, params))

    def add_flat(
        self, buffer: FlatBuffer, part: int, tensor: torch.Tensor, whole: frozenset[str] = frozenset()
    ) -> None:
        """Register live partition ``part`` of a buffer, with the module's names."""
        if share := next(filter(None, map(self.shares.get, buffer.names)), None):
            buffer, self.ep = replace(buffer, ranks=share.ranks), max(self.ep, share.degree)
        named = zip(buffer.names, buffer.shapes, strict=True)
        buffer = buffer.split({name: self._name_parts(name, shape) for name, shape in named})
        self.layout.append(buffer)
        buffer = replace(buffer, names=tuple(map(strip_compiled, buffer.names)))
        self.flats.append(self.make_buffer(buffer, part, tensor, whole=whole))

    def make_buffer(self, buffer: FlatBuffer, part: int, tensor: torch.Tensor, **fields: Any) -> EngineBuffer:
        """Describe a live partition; ``fields`` are passed to ``EngineBuffer``."""
        return EngineBuffer(buffer, part, self.parallel.tp_rank, dtype_name(tensor.dtype), tensor=tensor, **fields)

    def make_whole(self, name: str, tensor: torch.Tensor, *, is_buffer: bool = False) -> EngineBuffer:
        """Describe a tensor that every rank has as a whole."""
        return self.make_buffer(join_parameters(0, (name,), (tuple(tensor.shape),)), 0, tensor, is_buffer=is_buffer)

    @abstractmethod
    def refresh_copies(self) -> None:
        """Make the model's copies from this rank's masters, as DeepSpeed's step does."""

    def gather_copies(self) -> None:  # noqa: B027 - most subclasses have nothing to gather
        """Gather the copies made by other ranks (collective)."""

    def find_copies(self, flat: int) -> Sequence[torch.Tensor]:
        """List the consecutive 1-D copies of ``flats[flat]``; empty if not in memory."""
        return ()

    @property
    def optimizer(self) -> Any:
        """The torch-style optimizer with states and hyper-parameters, or None."""
        return getattr(self.wrapped, "optimizer", self.wrapped)

    @property
    def topology(self) -> Topology:
        engine = self.engine
        zero, declared = engine._config.zero_config, find_declared_precision(engine)
        devices = [getattr(section, "device", None) for section in (zero.offload_optimizer, zero.offload_param)]
        precision = declared
        if declared == "float32":  # as `find_saved_precision` finds it in this engine's saves
            first = next((name for flat in self.flats for name in flat.names), next(iter(self.params), None))
            precision = dtype_name(self.params[first].dtype if first is not None else engine.get_data_types()[0])
        return Topology(
            zero_stage=int(engine.zero_optimization_stage()),
            wrapper=self.wrapper,
            precision=precision,
            dp=self.dp,
            tp=self.parallel.tp,
            pp=self.parallel.pp,
            ep=self.ep,
            undeclared=precision != declared,
            master=self.flats[0].dtype if self.flats else "float32",
            elastic=self.traits.can_be_elastic and bool(getattr(self.wrapped, "elastic_checkpoint", False)),
            offload="/".join(str(getattr(device, "value", device) or "none") for device in devices),
            flats=tuple(self.layout),
        )

    @property
    def dp(self) -> int:
        """Number of ranks over which the masters are partitioned."""
        return 1

    def instances(self) -> dict[str, Instance]:
        """Return the tensors of tied modules that several pipeline stages have, by name."""
        return {name: instance for name, instance in self._find_tied().items() if instance.count > 1}

    def unfiled(self) -> list[str]:
        """List trained parameters that DeepSpeed's load of layer files does not restore."""
        return sorted(n for n, instance in self._find_tied().items() if n in self.owned and not instance.is_filed)

    def _find_tied(self) -> dict[str, Instance]:
        by_extension = (extension.find_instances(self) for extension in self.extensions)
        return {name: instance for instances in by_extension for name, instance in instances.items()}

    def tp_shard_of(self, name: str) -> int:
        """Return this rank's shard number of a parameter or buffer."""
        return 0 if name in self.unsharded else self.parallel.tp_rank

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the unpartitioned shape of a parameter on this tensor-parallel rank."""
        shape = _find_shape(self.params[name])
        return shape[1:] if name in self.fused_indices else shape

    def owned_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes (:meth:`shape_of`) of the parameters owned by the optimizer."""
        return {name: self.shape_of(name) for name in self.params if name in self.owned}

    def group_members(self) -> dict[int, tuple[str, ...]]:
        """Return the index of each param group → names of its parameters in ``flats``."""
        members: dict[int, list[str]] = {}
        for flat in self.flats:
            members.setdefault(flat.group, []).extend(flat.names)
        return {group: tuple(names) for group, names in members.items()}

    def live_groups(self) -> list[list[tuple[str, bool]]]:
        """List the user's param groups as (name in the module, owned by the optimizer)."""
        recorded = find_state(self.engine).param_groups
        if recorded is not None:
            named = [[part for name in group for part in self._name_parts(name)] for group in recorded]
            return [[(name, strip_compiled(name) in self.owned) for name in group] for group in named]
        return [[(name, True) for name in names] for _, names in sorted(self.group_members().items())]

    def list_names(self) -> dict[str, str]:
        """Map every parameter name, in order, to the parameter's first name."""
        return {name: name for name in self.params} | self.aliases

    def list_state_dict_names(self) -> Iterator[str]:
        """Yield names of tensors in the module's state dict, in its order."""
        keys = self.list_keys()
        todo: list[tuple[str, Any]] = [("", self.engine.module.state_dict())]
        while todo:
            name, value = todo.pop()
            if isinstance(value, Mapping):
                todo += [(f"{name}.{key}" if name else key, part) for key, part in reversed([*value.items()])]
            elif isinstance(value, torch.Tensor):
                yield keys.get(strip_compiled(name), strip_compiled(name))

    def live_hyper(self) -> list[dict[str, Any]]:
        """Return the hyper-parameters of the live param groups as plain data."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [{k: to_plain(value) for k, value in drop_labels(group).items() if k != "params"} for group in groups]

    def list_keys(self) -> dict[str, str]:
        """Map state-dict keys to the parameter and buffer names that differ from them."""
        keys: dict[str, str] = {}
        for extension in self.extensions:
            keys |= extension.list_keys(self)
        return keys

    def extras(self) -> list[EngineBuffer]:
        """Return the tensors of the module's state dict that the optimizer does not own."""
        extras = [self._make_extra(name) for name in self.params if name not in self.owned]
        persistent = set(self.engine._get_buffer_names())  # saved as buffer_names
        for name, buffer in self.engine.module.named_buffers():
            if name in persistent:
                (part,) = self._name_parts(name)
                if (share := self.shares.get(name)) and share.unsharded:
                    self.unsharded |= {strip_compiled(part)}
                extras.append(self.make_whole(strip_compiled(part), buffer, is_buffer=True))
        for extension in self.extensions:
            extras = extension.complete_extras(self, extras)
        return extras

    def _make_extra(self, name: str) -> EngineBuffer:
        """Describe a parameter without optimizer, under ZeRO 3 this rank's partition."""
        param, index = self.params[name], self.fused_indices.get(name)
        partition = getattr(param, "ds_tensor", None)
        if partition is None:
            return self.make_whole(name, param if index is None else param[index])
        if hasattr(partition, "ds_quant_scale"):
            raise UnsupportedError(
                f"{name}: a quantized parameter without optimizer cannot be filled. Switch "
                "zero_quantized_nontrainable_weights off, in the run that saves as well."
            )
        group = param.ds_process_group
        buffer = join_reserved(0, (name,), (_find_shape(param),), ds_comm.get_world_size(group=group))
        part = ds_comm.get_rank(group=group)
        return self.make_buffer(buffer, part, flatten(partition)[: sum(cut.numel for cut in buffer.cuts(part))])

    def param_group(self, flat: EngineBuffer) -> int:
        """Return the index of a flat buffer's param group."""
        groups = self.optimizer.param_groups
        for number, group in enumerate(groups):
            if any(param is flat.tensor for param in group["params"]):
                return number
        return min(flat.group, len(groups) - 1)  # ZeRO rebuilds Adagrad with a single group

    def whole_parameters(self) -> AbstractContextManager[Any]:
        """Context manager that gathers ZeRO-3 parameters; rank 0's changes are kept."""
        parted: list[Any] = [param for param in self.engine.module.parameters() if hasattr(param, "ds_id")]
        away = [param for param in parted if param.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        return GatheredParameters(away, modifier_rank=0)  # type: ignore[no-any-return]

    def refresh_masters(self) -> None:
        """Make the masters from the model's copies (DeepSpeed's ``refresh_fp32_params``)."""
        for name in ("refresh_fp32_params", "_restore_from_bit16_weights"):
            if refresh := getattr(self.wrapped, name, None):
                refresh()
                return

    def prepare(self) -> None:
        """Prepare the buffers for filling; ZeRO 3 has partitioned all parameters before."""
        for extension in self.extensions:
            extension.prepare(self)

    def drop_secondary_copies(self) -> None:
        """Delete ZeRO++ hpZ's copies, which the next forward pass would use."""
        for param in self.params.values():
            if getattr(param, "ds_secondary_tensor", None) is not None:
                param.ds_secondary_tensor = None

    def list_optimizer_changes(self, index: AtomicIndex) -> Iterator[str]:
        """Describe differences that DeepSpeed's load ignores: optimizer's kind, dtypes."""
        irregular: dict[ParamKey, set[str]] = defaultdict(set)
        for key in index.irregular:
            irregular[key.param].add(key.state)
        groups = {param: group.hyper for group in index.groups for param in group.members}
        for flat in self.flats:
            params = [ParamKey(index.resolve(name)) for name in flat.names]
            dtypes = dict(item for param in params for item in find_states(index, param).items())
            saved = set(dtypes).union(*(irregular.get(param, ()) for param in params))
            if not saved:
                continue
            if cast := [f"{state} in {dtype}" for state, dtype in dtypes.items() if dtype != flat.dtype]:
                yield f"optimizer states in another dtype than the masters ({shorten(cast)}, masters in {flat.dtype})"
            hyper = next((groups[param] for param in params if param in groups), {})
            scalars = set().union(*(index.scalars.get(param, ()) for param in params))
            group = self.param_group(flat)
            rule = self.optimizer, self.optimizer.param_groups[group], hyper, index.configured
            text = (
                find_other_kind(self.optimizer, group, hyper, saved, flat.tensor, scalars)
                or find_other_rule(*rule)
                or find_doubt(*rule, read_configured(self.engine))
            )
            if text:
                yield text

    def commit(self) -> None:
        """Finish the fill: on NVMe the new files replace DeepSpeed's."""
        for extension in self.extensions:
            extension.commit()

    def discard(self) -> None:
        """Release the resources of a load, also after an error."""
        for extension in self.extensions:
            extension.discard()

    def relink(self) -> None:
        """Renew views into the optimizer states after new states were attached."""
        for extension in self.extensions:
            extension.relink(self)


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as a 1-D view, another tensor unchanged."""
    data = tensor.detach()
    return data.view(-1) if data.is_contiguous() else data  # the latter cannot be a destination


def dtype_name(dtype: torch.dtype) -> str:
    """Convert ``torch.float32`` to ``float32``."""
    return str(dtype).removeprefix("torch.")
