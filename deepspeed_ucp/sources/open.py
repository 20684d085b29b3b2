"""Opens a checkpoint folder: decides what it is, reads each header once over all ranks, builds the AtomicIndex."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..atoms import COPY, MODULE, AtomicIndex, count, strip_compiled
from ..comm import Comm
from ..errors import CheckpointError, MismatchError, UnsupportedError, shorten
from ..topology import FlatGroup, Topology
from .builder import Builder
from .files import Listing, compare_listings, find_leftovers, list_sizes, sort_files
from .headers import FileHeader, ModelHeader, OptimHeader, read_file
from .stage0 import GroupNames, build_stage0
from .zero import add_frozen_zero3, build_zero3, build_zero12

logger = logging.getLogger("deepspeed_ucp")


def open_checkpoint(
    folder: str,
    comm: Comm,
    live_groups: GroupNames | None = None,
    live_hyper: Sequence[Mapping[str, Any]] = (),
    *,
    weights_only: bool = False,
) -> AtomicIndex:
    """Read the headers of a checkpoint folder (each file by one rank) into the atomic view; collective.

    Args:
        folder: the tag's folder.
        comm: the ranks that load.
        live_groups: param groups of the live optimizer, which name the parameters of a stage-0 source.
        live_hyper: their hyper-parameters, which tell whether they are in the saved order.
        weights_only: the optimizer's states are not wanted, so that a stage-0 source needs no naming.

    Raises:
        CheckpointError: missing, damaged, foreign or differing files; the same error on every rank.
        UnsupportedError: a kind of checkpoint that is not covered.
        MismatchError: stage 0 with other param groups than the live ones.
    """
    listing = _list_everywhere(folder, comm)
    first = _read_first(listing, comm)
    headers = _read_rest(listing, first, comm)
    with comm.together():
        try:
            return _build(listing, headers, live_groups, live_hyper)
        except MismatchError:
            if not weights_only:
                raise
            return _build(listing, headers, None, (), optimizer=False)


def _list_everywhere(folder: str, comm: Comm) -> Listing:
    with comm.together():
        sizes = list_sizes(folder)
    listings = comm.gather(sizes)
    with comm.together():
        compare_listings(folder, listings)
        return sort_files(folder, sizes)


def _read_first(listing: Listing, comm: Comm) -> list[FileHeader]:
    """Rank 0 finds out what the folder holds from one model file and one optimizer file."""
    found: list[FileHeader] = []
    with comm.together():
        if comm.rank == 0:
            found = _choose(listing)
    return comm.broadcast(found)  # type: ignore[no-any-return]


def _choose(listing: Listing) -> list[FileHeader]:
    """The model header and, where there is one, dp rank 0's optimizer header, of the checkpoint in the folder."""
    candidates = []
    plain = read_file(listing.folder, listing.model) if listing.model else None
    sharded = read_file(listing.folder, listing.model_zero3[0]) if 0 in listing.model_zero3 else None
    shard = _read_shard0(listing, plain, ("zero12", "bf16"))
    if plain and plain.model and plain.model.optim:
        candidates.append([plain])  # shards of ZeRO 1/2 beside it lost their model file to it: leftovers
    elif plain and shard:
        candidates.append([plain, shard])
    shard = _read_shard0(listing, sharded, ("zero3",))
    if sharded and shard:
        candidates.append([sharded, shard])
    if len(candidates) > 1:
        raise CheckpointError(
            f"{listing.folder}: holds the files of two saves ({candidates[0][0].name} and {candidates[1][-1].name} do "
            "not belong together). Remove the older save's files."
        )
    if candidates:
        return candidates[0]
    if plain and plain.model and plain.model.module and not listing.optim:
        return [plain]  # the weights alone: enough for load_optimizer_states=False
    raise CheckpointError(
        f"{listing.folder}: the optimizer states that go with {_first_name(plain, sharded)} are missing "
        f"({shorten(sorted(listing.sizes))}). Copy the whole folder, or load with load_optimizer_states=False where "
        "the model states hold the weights (ZeRO 0-2)."
    )


def _first_name(*headers: FileHeader | None) -> str:
    return next((header.name for header in headers if header), "the model states")


def _read_shard0(listing: Listing, model: FileHeader | None, kinds: tuple[str, ...]) -> FileHeader | None:
    """Dp rank 0's optimizer file that goes with a model file."""
    if model is None:
        return None
    for prefix in _prefixes(listing, model):
        name = listing.optim.get((prefix, 0))
        header = read_file(listing.folder, name) if name else None
        if header and header.optim and header.optim.kind in kinds:
            return header
    return None


def _prefixes(listing: Listing, model: FileHeader) -> list[str]:
    """Prefixes of optimizer files, the saved precision's own first (engine.py ``_get_zero_ckpt_prefix``)."""
    config = model.model.config if model.model else {}
    expected = "bf16_" if _enabled(config, "bf16", "bfloat16") else ""
    others = sorted({prefix for prefix, _ in listing.optim} - {expected})
    return [expected, *others]


def _read_rest(listing: Listing, first: list[FileHeader], comm: Comm) -> list[FileHeader]:
    """The other shards' headers, each read by one rank; the first ones in front."""
    with comm.together():
        names = _name_rest(listing, first)
    mine: list[FileHeader] = []
    with comm.together():
        mine = [read_file(listing.folder, name) for name in names[comm.rank :: comm.size]]
    by_name = {header.name: header for part in comm.gather(mine) for header in part}
    headers = first + [by_name[name] for name in names]
    if comm.rank == 0 and (left := find_leftovers(listing, [header.name for header in headers])):
        logger.warning("%s: ignoring files of an earlier save: %s", listing.folder, shorten(left))
    return headers


def _name_rest(listing: Listing, first: list[FileHeader]) -> list[str]:
    model = first[0].model
    if len(first) == 1 or model is None:
        return []
    dp = int(model.counters.get("dp_world_size", 1))
    prefix = next(p for (p, rank), name in listing.optim.items() if name == first[1].name)
    wanted = [(f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", (prefix, rank)) for rank in range(1, dp)]
    absent = [name for name, key in wanted if key not in listing.optim]
    names = [listing.optim[key] for _, key in wanted if key in listing.optim]
    if first[0].name != listing.model:
        expected = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(1, dp)]
        absent += [name for rank, name in enumerate(expected, 1) if rank not in listing.model_zero3]
        names += [listing.model_zero3[rank] for rank in range(1, dp) if rank in listing.model_zero3]
    if absent:
        raise CheckpointError(
            f"{listing.folder}: {shorten(absent)} missing; the checkpoint was saved by {dp} data-parallel ranks and "
            "needs all of their files. Copy them here or load another tag."
        )
    return names


def _build(
    listing: Listing,
    headers: list[FileHeader],
    live: GroupNames | None,
    live_hyper: Sequence[Mapping[str, Any]],
    *,
    optimizer: bool = True,
) -> AtomicIndex:
    builder = Builder(listing.folder)
    main = headers[0]
    model = main.model
    if model is None or model.nested or (model.module is None):
        raise UnsupportedError(
            f"{listing.path(main.name)}: holds a nested or empty module state (model or pipeline parallelism), which "
            "this release does not convert."
        )
    _refuse_parallel(listing, model)
    shards = [header for header in headers if header.optim is not None]
    models = [header for header in headers if header.model is not None]
    _check_family(listing, models, shards)
    file = builder.file(listing.path(main.name), main.size)
    flats: tuple[FlatGroup, ...] = ()
    if not shards:
        for group in model.param_shapes or ():
            builder.shapes.update({strip_compiled(name): tuple(shape) for name, shape in group})
        flats = build_stage0(builder, main, live, live_hyper) if optimizer else ()
    elif shards[0].optim and shards[0].optim.kind == "zero3":
        flats = build_zero3(builder, model, shards)
        add_frozen_zero3(builder, models)
    else:
        flats = build_zero12(builder, model, shards)
    optim = model.optim or (shards[0].optim if shards else None)
    aliases = _add_module(builder, model, file, sharded=bool(optim and optim.kind == "zero3"))
    client = tuple(builder.record(file, blob) for blob in model.others)
    atoms = builder.finish_atoms()
    return AtomicIndex(
        files=tuple(builder.files),
        records=tuple(builder.records),
        atoms=atoms,
        scalars=builder.scalars,
        groups=tuple(builder.groups),
        aliases=aliases,
        shapes=builder.shapes,
        buffers=frozenset(strip_compiled(name) for name in model.buffers),
        counters=model.counters,
        scaler=optim.scaler if optim else {},
        clip_grad=optim.clip_grad if optim else None,
        state_file=listing.path(main.name),
        topology=_describe(model, optim, shards, flats),
        optimizer=_optimizer_name(model.config),
        irregular=builder.irregular,
        unreadable=builder.unreadable,
        client_records=client,
    )


def _refuse_parallel(listing: Listing, model: ModelHeader) -> None:
    degree = int(model.counters.get("mp_world_size", 1))
    if degree > 1:
        raise UnsupportedError(
            f"{listing.folder}: saved with {degree} model-parallel ranks (tensor or pipeline), which this release does "
            "not convert."
        )


def _check_family(listing: Listing, models: list[FileHeader], shards: list[FileHeader]) -> None:
    """All files come from one save: same step, same groups, same kind, same number of ranks.

    Raises:
        CheckpointError: a file of another step, run or world size.
    """
    reference = models[0].model
    for header in models[1:]:
        if reference and header.model and header.model.counters != reference.counters:
            raise CheckpointError(
                f"{listing.path(header.name)}: has counters {header.model.counters}, {models[0].name} has "
                f"{reference.counters}. The file belongs to another step or run; put the right one back."
            )
    dp = len(shards)
    for header in shards:
        fault = _find_stranger(header, shards[0], dp)
        if reference and reference.config and header.config and header.config != reference.config:
            fault = fault or f"its ds_config differs from that of {models[0].name}"
        if fault:
            raise CheckpointError(
                f"{listing.path(header.name)}: {fault}. The file belongs to another step, run or world size; put the "
                "right one back."
            )


def _find_stranger(header: FileHeader, first: FileHeader, dp: int) -> str:
    optim, other = header.optim, first.optim
    if optim is None or other is None:
        return "holds no optimizer state"
    if any(count != dp for count in optim.partition_count):
        return f"was saved by {optim.partition_count} ranks, the model states say {dp}"
    for field in ("kind", "stage", "groups", "scaler", "clip_grad", "alignment", "elastic"):
        mine, theirs = getattr(optim, field), getattr(other, field)
        if mine != theirs:
            return f"{field} differs from {first.name} ({_contrast(mine, theirs)})"
    if header.config != first.config:
        return f"its ds_config differs from that of {first.name}"
    return ""


def _contrast(mine: Any, theirs: Any) -> str:
    if isinstance(mine, tuple) and isinstance(theirs, tuple) and len(mine) == len(theirs):
        for index, (left, right) in enumerate(zip(mine, theirs, strict=True)):
            if left != right and isinstance(left, dict) and isinstance(right, dict):
                keys = [key for key in left if left.get(key) != right.get(key)]
                return f"group {index}: " + ", ".join(f"{key} {left.get(key)} ≠ {right.get(key)}" for key in keys)
    return f"{mine} ≠ {theirs}"


def _add_module(builder: Builder, model: ModelHeader, file: int, sharded: bool) -> dict[str, str]:
    """Tensors of the module states: buffers, parameters without optimizer, copies of optimized ones. Returns ties."""
    aliases = {
        strip_compiled(a): strip_compiled(n) for a, n in model.shared.items() if not _is_empty(model, a, sharded)
    }
    buffers = {strip_compiled(name) for name in model.buffers}
    seen: dict[tuple[Any, int, tuple[int, ...]], str] = {}
    for raw, piece in (model.module or {}).items():
        name = strip_compiled(raw)
        if name in aliases:
            continue
        if piece.numel and (first := seen.setdefault((piece.blob, piece.offset, piece.shape), name)) != name:
            aliases[name] = first
            continue
        optimized = name in builder.shapes
        if name in buffers or not (optimized or sharded):
            builder.add(name, MODULE, piece.shape, file, piece)
        elif optimized and not sharded:
            builder.add(name, COPY, piece.shape, file, piece)
    return aliases


def _is_empty(model: ModelHeader, name: str, sharded: bool) -> bool:
    """Parameters without elements share no storage, though ``shared_params`` ties all of them together."""
    if name in model.frozen_shapes:
        return count(tuple(model.frozen_shapes[name])) == 0
    piece = (model.module or {}).get(name)
    return not sharded and piece is not None and piece.numel == 0


def _describe(
    model: ModelHeader, optim: OptimHeader | None, shards: list[FileHeader], flats: tuple[FlatGroup, ...]
) -> Topology:
    zero = model.config.get("zero_optimization") or {}
    kind = optim.kind if optim else "none"
    stage = {"zero12": optim.stage if optim else 0, "zero3": 3, "bf16": int(zero.get("stage", 1))}.get(kind, 0)
    master = optim.masters[0].dtype if optim and optim.masters else "float32"
    return Topology(
        zero_stage=stage,
        wrapper=kind,
        precision=_precision(model, flats),
        dp=max(len(shards), 1),
        master=master,
        elastic=bool(optim and optim.elastic),
        offload=f"{_device(zero.get('offload_optimizer'))}/{_device(zero.get('offload_param'))}",
        flats=flats,
    )


def _precision(model: ModelHeader, flats: Sequence[FlatGroup]) -> str:
    module = model.module or {}
    optimized = [name for flat in flats for name in flat.names if name in module]
    trained = optimized or [name for name in module if name not in model.buffers]
    if trained:
        return module[trained[0]].dtype
    if _enabled(model.config, "bf16", "bfloat16"):
        return "bfloat16"
    return "float16" if _enabled(model.config, "fp16") else "float32"


def _enabled(config: dict[str, Any], *names: str) -> bool:
    return any(bool((config.get(name) or {}).get("enabled")) for name in names)


def _device(section: Any) -> str:
    return str(section.get("device") or "none") if isinstance(section, dict) else "none"


def _optimizer_name(config: dict[str, Any]) -> str | None:
    section = config.get("optimizer")
    name = section.get("type") if isinstance(section, dict) else None
    return str(name) if name else None
