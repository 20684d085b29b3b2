"""Convert the object tree of a state file to a :class:`~.headers.FileHeader`.

All readers raise the errors of :func:`read_file`. :func:`~..findings.explain_form` converts all other errors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from ...errors import CheckpointError, UnsupportedError, shorten
from ...extensions.registry import REGISTRY, find_for_tree
from ...io.memory import pause_collection
from ...io.paths import join_path
from ...model.flat import Shape
from ...model.index import BATCH_SIZES, HELPERS, INITIAL_SIZES, SCRIPT_BATCH, SHUFFLED, Use, to_integer
from ...model.records import Record
from ...model.storage import ITEMSIZE, strip_compiled
from ...model.wrappers import SCALER_STATE, ZERO_STAGE_KEY, Form, Wrapper, find_saved
from ...torchsave.objects import (
    PickledObject,
    TensorRef,
    describe,
    has_more_parts,
    is_dtype,
    is_int64,
    is_setting_int,
    is_storage,
    to_number,
    unwrap_enum,
    walk,
)
from ...torchsave.repickle import write_pickle
from ...torchsave.torchfile import TorchFile, read_header
from ..findings import REPORT, explain_form
from .files import holds_counters, is_state_file, strip_writer
from .headers import FileHeader, ModelHeader, OptimHeader, Piece, TensorStates, Unread
from .hints import read_hints
from .save import read_marks

EXTRA_STATE = "_extra_state"
"""Suffix of keys of ``torch.nn.Module.get_extra_state``: an object, not one of the model's tensors."""

_COMMON_GLOBALS = frozenset(
    (
        *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter"),
        *("torch._tensor._rebuild_from_type_v2", "torch.Size", "collections.OrderedDict", "builtins.set"),
    )
)
"""Globals of nearly every state file, all harmless (``load.client``)."""

T = TypeVar("T")

_COUNTED = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size")
_EMPTY = Record(0, 0, None)
_MOST_ENTRIES = 2_000_000  # of a module's state_dict
_MOST_PARTS = 100_000  # of a hyper-parameter or a saved ds_config, written out in full
_MOST_RANKS = 1 << 20
_LONGEST_NUMBER = 9  # characters of an integer that a ds_config has as text


def read_file(folder: str, name: str) -> FileHeader:
    """Read one state file's header.

    Raises:
        CheckpointError: damaged, or saved under another name (another rank's or run's file).
        UnsupportedError: a value of an unexpected type or form, or an optimizer wrapper that is not covered.
    """
    path = join_path(folder, name)
    with pause_collection():
        file = read_header(path)
        if file.saved_as != strip_writer(name).removesuffix(".pt") and is_state_file(f"{file.saved_as}.pt"):
            raise CheckpointError(
                f"was saved as {file.saved_as}.pt and renamed or copied since; it holds another rank's or "
                "run's state. Put the original file back.",
                path=path,
            )
        if not isinstance(file.tree, dict):
            raise CheckpointError(
                f"holds a {type(file.tree).__name__}, a DeepSpeed state file holds a dict.", path=path
            )
        with explain_form(path):
            return _convert(file, name)


def list_globals(file: TorchFile) -> tuple[Use, ...]:
    """Return the uncommon classes and functions that a file's pickle names."""
    uses = (use for use in file.uses.values() if use.custom_methods or use.kind not in _COMMON_GLOBALS)
    rare = (use for use in uses if use.custom_methods or not (is_storage(use.kind) or is_dtype(use.kind)))
    return tuple(dict.fromkeys([*rare, *file.members]))


WRITERS = "writers"
"""Key for the sections of a ds_config that select another writer than ``torch.save``."""


_SECTIONS = (
    *("zero_optimization", "bf16", "bfloat16", "fp16", "data_types", "torch_autocast"),
    *("optimizer", "aio", *(section for row in REGISTRY for section in row.sections)),
)
"""Sections of a ds_config that the index uses."""


def _pick_config(config: Any) -> dict[str, Any]:
    if not isinstance(config, dict):  # a path
        return {}
    sections = {key: config[key] for key in _SECTIONS if isinstance(config.get(key), dict)}
    if has_more_parts(sections, _MOST_PARTS):
        raise ValueError(f"sections of more than {_MOST_PARTS} parts")
    if "zero_optimization" in sections:
        sections["zero_optimization"] = normalize_zero(sections["zero_optimization"])
    picked: dict[str, Any] = {key: _keep_plain(section) for key, section in sections.items()}
    picked |= {key: True for row in REGISTRY for key in row.flags if config.get(key) is True}
    picked[WRITERS] = [key for key in ("nebula", "datastates_ckpt") if config.get(key)]
    section = config.get("checkpoint")
    if isinstance(section, dict) and section.get("writer"):
        picked[WRITERS].append("checkpoint.writer")
    return picked


def _keep_plain(section: dict[Any, Any]) -> dict[Any, Any]:
    """Return a ds_config's section with plain values, names of dtypes and enum values."""
    read = (
        (key, _keep_plain(value) if isinstance(value, dict) else unwrap_enum(value)) for key, value in section.items()
    )
    return {key: value for key, value in read if _is_plain(value)}


def normalize_zero(section: dict[Any, Any]) -> dict[Any, Any]:
    """Return a ``zero_optimization`` section whose stage and shard size are integers."""
    normalized = dict(section)
    for key in ("stage", "mics_shard_size"):
        if normalized.get(key) is not None:
            value = normalized[key]
            normalized[key] = int(value) if isinstance(value, str) and len(value) < _LONGEST_NUMBER else as_int(value)
    if normalized.get("stage") not in (None, 0, 1, 2, 3):
        raise ValueError(f"ZeRO stage {normalized['stage']!r:.40}")
    return normalized


def _read_shard_size(config: dict[str, Any], counters: dict[str, Any]) -> int:
    """Return the ranks of a MiCS group, of which the first saves; 0 without MiCS."""
    zero = config.get("zero_optimization") or {}
    size: int = zero.get("mics_shard_size", -1)  # DeepSpeed up to 0.18
    ranks = counters.get("dp_world_size") or 1
    if zero.get("stage") != 3 or size < 0:
        return 0
    if not 0 < size <= ranks or ranks % size:
        raise ValueError(f"mics_shard_size {size!r:.40} of {ranks} data-parallel ranks")
    return size


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (str, bytes, float)) or is_setting_int(value)


def locate(ref: TensorRef, storages: Mapping[str, Record]) -> Piece:
    """Return a tensor's place in its file; in an empty record if it has no storage."""
    record = storages.get(ref.storage.key, _EMPTY)
    itemsize = ITEMSIZE.get(ref.dtype)
    if itemsize is None:
        return Piece(record, 0, ref.shape, ref.dtype, f"dtype {ref.dtype} is not covered")
    return Piece(record, ref.offset * itemsize, ref.shape, ref.dtype, ref.fault)


def _convert(file: TorchFile, name: str) -> FileHeader:
    """Convert the tree of a file of layers, model or optimizer states, by its name."""
    tree = file.tree
    facts, writer = dict[str, Any](), dict[str, Any]()
    for extension in find_for_tree(tree):
        more_facts, more_writer = extension.read_facts(tree, partial(read_field, file, tree))
        facts |= more_facts
        writer |= more_writer
    header = FileHeader(name, file.size, file.header_crc, list_globals(file), writer=writer, checked=not file.unchecked)
    if "model_states" in name and not holds_counters(os.path.basename(name)):
        return replace(header, layer=_read_tensors(file, tree), extras=tuple(select_extra_states({"module": tree})))
    header = replace(
        header,
        config=read_field(file, tree, "ds_config", _pick_config),
        marks=read_marks(tree, file.writer),
    )
    if "model_states" in name:
        model = replace(_read_model(file, tree), facts=facts)
        with explain_form(file.path, "ds_config", tree.get("ds_config")):
            size = _read_shard_size(header.config, model.counters)
        return replace(header, model=replace(model, shard_size=size))
    state = tree.get("optimizer_state_dict", tree.get("optimizer"))  # the latter in files of extensions
    if not isinstance(state, dict):
        raise CheckpointError("has no optimizer_state_dict.", path=file.path)
    return replace(header, optim=read_optim(file, state))


def read_field(file: TorchFile, tree: Mapping[Any, Any], key: str, read: Callable[[Any], T]) -> T:
    """Return ``read`` of an entry of a dict; ``read`` gets None for a missing entry."""
    value = tree.get(key)
    with explain_form(file.path, key, value):
        return read(value)


def make_piece(file: TorchFile, value: Any, label: str) -> Piece:
    """Return a tensor's place in the file; refuse another value, or missing bytes."""
    if not isinstance(value, TensorRef):
        raise CheckpointError(f"{label} is no tensor but {describe(value)}.", path=file.path)
    piece = locate(value, file.storages)
    if piece.offset + piece.numel * ITEMSIZE.get(piece.dtype, 0) > piece.record.nbytes:
        raise CheckpointError(f"the bytes of {label} are not all there; the file is damaged.", path=file.path)
    return piece


def _read_model(file: TorchFile, tree: dict[Any, Any]) -> ModelHeader:
    """Read a file of model states; the caller applies :func:`explain_form`."""
    saved, field = tree.get("module"), partial(read_field, file, tree)
    module = None if saved is None else field("module", partial(_read_tensors, file))
    optimizer = tree.get("optimizer")
    optim = read_optim(file, optimizer) if isinstance(optimizer, dict) else None
    fragments = tree.get("frozen_param_fragments") or {}
    frozen = _key_by_atom_name((name, make_piece(file, value, name)) for name, value in fragments.items())
    frozen_shapes = field("frozen_param_shapes", lambda named: _key_by_atom_name(_as_shapes(named or {}).items()))
    if lacking := frozen.keys() - frozen_shapes.keys():
        raise ValueError(f"no shape for {shorten(sorted(lacking))}")
    pieces = (*(module or {}).values(), *frozen.values(), *(optim.list_pieces() if optim else ()))
    known, entries = {piece.record for piece in pieces}, saved.items() if isinstance(saved, dict) else ()
    return ModelHeader(
        module=module,
        nested=any(isinstance(value, dict) and not str(key).endswith(EXTRA_STATE) for key, value in entries),
        buffers=field("buffer_names", _as_names),
        param_shapes=field("param_shapes", _read_group_shapes),
        frozen_shapes=frozen_shapes,
        frozen=frozen,
        shared=dict(field("shared_params", _as_pairs)),
        counters=_read_counters(file, tree),
        batch=field("ds_config", _read_counts),
        optim=optim,
        client_storages=tuple(record for record in file.storages.values() if record not in known and record.nbytes),
        degrees=field("checkpoint_parallel_dimensions", _read_degrees),
        hints=read_hints(tree),
        helpers=tuple(key for key in HELPERS if tree.get(key) is not None),
    )


def _read_counters(file: TorchFile, tree: dict[Any, Any]) -> dict[str, Any]:
    counters = {key: read_field(file, tree, key, partial(_as_count, key=key)) for key in _COUNTED if key in tree}
    ranks = (counters.get("dp_world_size") or 1) * (counters.get("mp_world_size") or 1)
    if ranks > _MOST_RANKS:
        raise ValueError(f"saved by {ranks} ranks")
    return counters


def _read_tensors(file: TorchFile, module: dict[Any, Any]) -> dict[str, Piece]:
    """Return the tensors of a state_dict, nested or not, by names joined with dots."""
    if not isinstance(module, dict):
        raise TypeError("a module's state_dict is expected")
    return _key_by_atom_name((name, make_piece(file, value, name)) for name, value in _walk_tensors(module))


def read_optim(file: TorchFile, state: dict[str, Any]) -> OptimHeader:
    """Read an optimizer's state dict according to the wrapper that saved it."""
    wrapper = find_saved(state)
    if wrapper is None:
        text = f"optimizer state with keys {sorted(map(str, state))} is a wrapper that is not covered. {REPORT}"
        raise UnsupportedError(text, path=file.path)
    masters: list[Any] = state[wrapper.keys[0]] if wrapper.has_copies else []
    if wrapper.form is Form.SINGLE:
        masters = [tensor for group in masters for tensor in group]
    inner: Any = state.get(wrapper.inner) if wrapper.inner else state
    elastic = wrapper.form is Form.PARTITIONS and isinstance(inner, list)
    if elastic:  # a list of states, one per group
        step = state.get("base_optimizer_state_step")
        groups = [{"params": [number]} | ({} if step is None else {"step": step}) for number in range(len(inner))]
        inner = {"state": dict(enumerate(inner)), "param_groups": groups}
    header = replace(read_inner(file, state, inner or {}, wrapper, masters), elastic=elastic)
    if wrapper.form is Form.PARTITIONS:
        return _add_slices(file, header, state)
    return _add_holders(file, header, state) if wrapper.form is Form.RESERVED else header


def _add_slices(file: TorchFile, header: OptimHeader, state: dict[str, Any]) -> OptimHeader:
    """Add the stage, slices and paddings that ZeRO 1 and 2 and the BF16 wrapper save."""
    field = partial(read_field, file, state)
    if state.get("param_slice_mappings") is None:
        text = "no param_slice_mappings; saved by a DeepSpeed release too old. Load and save it with a newer one."
        raise UnsupportedError(text, path=file.path)
    return replace(
        header,
        stage=field(ZERO_STAGE_KEY, lambda stage: header.stage if stage is None else as_int(stage)),
        slices=field("param_slice_mappings", lambda groups: tuple(map(_read_slices, groups))),
        paddings=field("group_paddings", _as_ints),
        alignment=field("param_alignment_paddings", lambda groups: tuple(map(_as_ints, as_list(groups)))),
    )


def _add_holders(file: TorchFile, header: OptimHeader, state: dict[str, Any]) -> OptimHeader:
    """Add the ranks and partitions of each sub-group, which AutoEP saves at ZeRO 3."""

    def read(groups: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(_as_ints(group["partition_ranks"]) for group in as_list(groups))

    ranks = read_field(file, state, "ds_zero_partition_groups", read)
    counts = tuple(map(len, ranks)) if ranks else header.partition_count
    return replace(header, partition_count=counts, partition_ranks=ranks)


def read_inner(
    file: TorchFile, state: dict[str, Any], inner: dict[str, Any], wrapper: Wrapper, masters: list[Any]
) -> OptimHeader:
    """Read a wrapper's masters, and the torch optimizer's state dict ``inner``."""
    groups = [dict(group) for group in inner.get("param_groups", [])]
    params = [tuple(group.pop("params", ())) for group in groups]
    named = [group.pop("param_names", None) for group in groups]
    saved, members = inner.get("state", {}), list(map(as_int, chain.from_iterable(params)))
    known = {*members, "state", "param_groups"}
    common = {
        str(key): describe(value) for key, value in [*saved.items(), *inner.items()] if value and key not in known
    }
    states = {key: _read_states(file, saved.get(key, {})) for key in members}
    for key in members[:1]:  # states of the whole optimizer are recorded with its first parameter
        states[key] = replace(states[key], other=states[key].other | common)
    expected, clip = len(groups) if wrapper.is_flat else len(members), to_number(state.get("clip_grad"))
    if wrapper.has_copies and not wrapper.is_cut and len(masters) != expected:
        raise ValueError(f"{len(masters)} fp32 weights, and optimizer states of {expected}")
    return OptimHeader(
        kind=wrapper.name,
        stage=wrapper.stages[-1],
        masters=tuple(make_piece(file, tensor, f"fp32 partition {i}") for i, tensor in enumerate(masters)),
        tensors=tuple(states[key] for key in members),
        owners=tuple(group for group, keys in enumerate(params) for _ in keys),
        groups=tuple({str(k): read_hyper(v, file.path) for k, v in group.items()} for group in groups),
        partition_count=read_field(file, state, "partition_count", _as_ints),
        scaler=_read_scaler(state),
        clip_grad=clip if isinstance(clip, float) or is_int64(clip) else None,
        names=tuple(map(_as_names, named)) if not wrapper.has_copies and named and all(named) else None,
    )


def _read_states(file: TorchFile, entries: dict[str, Any]) -> TensorStates:
    """Sort one parameter's states into the kinds of :class:`.TensorStates`."""
    states, scalars, zero_dim, other, single = {}, {}, {}, {}, {}
    for name, value in entries.items():
        state = str(name).removesuffix("_offload_buffer")
        if value is None or (state != name and state in entries):  # a stale copy that ``engine.offload_states`` leaves
            continue
        number = to_number(value)
        if isinstance(number, (float, complex)) or is_int64(number):
            scalars[str(name)] = number
            if isinstance(value, TensorRef):
                zero_dim[str(name)] = make_piece(file, value, str(name))
        elif isinstance(value, TensorRef):
            states[str(name)] = make_piece(file, value, str(name))
            if value.data is not None:
                single[str(name)] = value.item()
        else:
            other[str(name)] = describe(value)
    return TensorStates(states, scalars, zero_dim, other, single)


def select_extra_states(tree: Any) -> dict[str, Any]:
    """Return the modules' extra states in a model-states file, by their keys."""
    module = tree.get("module") if isinstance(tree, dict) else None
    entries = module.items() if isinstance(module, dict) else ()
    return {name: state for name, state in entries if str(name).endswith(EXTRA_STATE)}


def _walk_tensors(module: dict[Any, Any]) -> Iterator[tuple[str, TensorRef]]:
    """Yield tensors of nested dicts in order, shared ones at each use, up to a limit."""
    todo: list[tuple[str, Any]] = [("", module)]
    listed = 0
    while todo:
        name, value = todo.pop()
        if isinstance(value, TensorRef) and not name.endswith(EXTRA_STATE):
            yield name, value
        elif isinstance(value, dict) and not name.endswith(EXTRA_STATE):
            listed += len(value)
            if listed > _MOST_ENTRIES:
                raise ValueError(f"a module of more than {_MOST_ENTRIES} entries")
            prefix = f"{name}." if name else ""
            todo += [(f"{prefix}{key}", part) for key, part in reversed(value.items())]


def _read_counts(config: Any) -> dict[str, int]:
    """Return a ds_config's positive counts: batch sizes and the plugin's own keys."""
    keys = (*BATCH_SIZES, SCRIPT_BATCH, *INITIAL_SIZES, SHUFFLED)
    sizes = {key: to_integer(config.get(key, 0)) for key in keys} if isinstance(config, dict) else {}
    return {key: value for key, value in sizes.items() if type(value) is int and is_int64(value) and value > 0}


def _read_degrees(value: Any) -> tuple[int, int] | None:
    if not isinstance(value, dict) or not {"pp_degree", "tp_degree"} <= value.keys():
        return None
    return as_int(value["pp_degree"]), as_int(value["tp_degree"])


def _read_slices(group: Any) -> tuple[tuple[str, int, int], ...]:
    slices = []
    for name, address in group.items():
        fields = address.state if isinstance(address, PickledObject) else None
        # older releases: a namedtuple (numel, start)
        numel, start = (fields["numel"], fields["start"]) if isinstance(fields, dict) else address.args
        slices.append((name, as_int(start), as_int(numel)))
    return tuple(slices)


def _read_scaler(state: dict[str, Any]) -> dict[str, Any]:
    """Read the loss scaler's fields from an object (ZeRO) or a dict (FP16 wrappers)."""
    scaler = state.get("loss_scaler")
    if isinstance(scaler, PickledObject) and isinstance(scaler.state, dict):
        fields, dynamic = scaler.state, scaler.state.get("dynamic")
    elif "cur_scale" in state:
        fields, dynamic = state, state.get("dynamic_loss_scale")
    else:
        return {}
    numbers = {key: to_number(fields[key]) for key in SCALER_STATE if key in fields}
    for key, number in numbers.items():
        if not _is_plain(number):
            raise TypeError(f"the loss scaler's {key} is {describe(number)}")
    return {**numbers, "dynamic": bool(dynamic)}


def read_hyper(value: Any, path: str) -> Any:
    """Return a hyper-parameter as plain data, else as an :class:`Unread`."""
    if has_more_parts(value, _MOST_PARTS):
        raise UnsupportedError(f"{describe(value)} is too large for a hyper-parameter. {REPORT}", path=path)
    plain = _simplify(value)
    if _is_plain(plain):
        return plain
    is_container = isinstance(value, (TensorRef, list, tuple, dict))
    has_tensors = is_container and any(isinstance(part, TensorRef) for part in walk(value))
    return Unread(describe(value), hashlib.sha256(write_pickle(value)).hexdigest()[:16], has_tensors)


def _simplify(value: Any) -> Any:
    """Convert numbers of torch and numpy in lists, tuples and dicts to Python's."""
    if isinstance(value, dict):
        return {key: _simplify(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_simplify(item) for item in value] if isinstance(value, list) else tuple(map(_simplify, value))
    return to_number(value)


def _key_by_atom_name(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Return entries by atom name, without torch.compile's prefix; refuse duplicates."""
    stripped: dict[str, T] = {}
    for name, value in named:
        if strip_compiled(name) in stripped:
            raise ValueError(f"two tensors have the name {describe(name)}, without torch.compile's prefix")
        stripped[strip_compiled(name)] = value
    return stripped


def as_list(value: Any) -> list[Any]:
    """Convert a value, a list of values, or None to a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _as_pairs(shared: Any) -> list[tuple[str, str]]:
    pairs = shared.items() if isinstance(shared, dict) else shared or ()
    return [(one, other) for one, other in map(_as_names, pairs)]


def _read_group_shapes(groups: Any) -> tuple[tuple[tuple[str, Shape], ...], ...] | None:
    return None if groups is None else tuple(tuple(_as_shapes(group).items()) for group in as_list(groups))


def _as_names(values: Any) -> tuple[str, ...]:
    """Return atom names: names without torch.compile's prefix; refuse other types."""
    names = tuple(values or ())
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"{describe(next(name for name in names if not isinstance(name, str)))} for a name")
    return tuple(map(strip_compiled, names))


def _as_shapes(group: Any) -> dict[str, Shape]:
    """Return shapes by name as saved, with torch.compile's prefix; refuse other types."""
    _as_names(group)  # only the check
    for name, shape in group.items():
        if not isinstance(shape, tuple) or not all(is_int64(size) and size >= 0 for size in shape):
            raise TypeError(f"{describe(shape)} for the shape of {describe(name)}")
    return {name: tuple(shape) for name, shape in group.items()}


def _as_count(value: Any, key: str) -> int | None:
    return None if value is None else as_int(value, least=int(key.endswith("_world_size")))


def _as_ints(value: Any) -> tuple[int, ...]:
    return tuple(map(as_int, as_list(value)))


_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
"""DeepSpeed's names of the stages (``ZeroStageEnum``)."""


def read_stage(value: Any) -> Any:
    """Return the value of a ``ZeroStageEnum`` member, or ``value``."""
    if isinstance(value, PickledObject) and value.kind == "builtins.getattr" and len(value.args) == 2:
        return _STAGES.get(value.args[1], value)  # as Python 3.11.0 to 3.11.3 pickles a member
    return unwrap_enum(value)


def as_int(value: Any, least: int | None = None) -> int:
    """Return a whole number, also from a float, a 0-dim tensor or an enum's member."""
    number = to_integer(to_number(read_stage(value)))
    if not isinstance(number, int):
        raise TypeError(f"{describe(number)} where a whole number is expected")
    if not is_int64(number) or (least is not None and number < least):
        raise ValueError(f"{describe(number)} is out of range")
    return int(number)
