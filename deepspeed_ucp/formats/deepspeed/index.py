"""Build a save's :class:`~deepspeed_ucp.model.index.AtomicIndex` from headers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import UnsupportedError, fold_names, shorten
from ...model.flat import FlatBuffer, count_rank_sets
from ...model.index import BATCH_SIZES, AtomicIndex, GroupInfo
from ...model.storage import COPY, MASTER, MODULE, Atom, AtomKey, Atoms, strip_compiled
from ...model.topology import Topology, find_precision
from ...model.wrappers import BARE, STATELESS, Form, find_wrapper
from ...torchsave.objects import is_int64
from .builder import Builder, check_steps, join_groups
from .headers import ModelHeader, OptimHeader
from .hints import join_hints
from .naming import Naming
from .reading import WRITERS
from .save import Save, describe_offload, name_shards
from .stage0 import build_stage0
from .zero import build_zero


def build_index(save: Save, naming: Naming) -> AtomicIndex:
    """Build a save's index from headers; errors as of :func:`~..open.open_checkpoint`."""
    _refuse_engines(save, naming)
    builder = Builder(save, save.tp)
    if any(save.shards):
        build_zero(builder)
    else:
        build_stage0(builder, naming)
    check_steps(save, builder.ranks, builder.scalars)
    atoms = builder.finish_atoms()
    optim, stage = _find_optim(save), int(save.zero.get("stage") or 0)
    flats = builder.ranks[0].flats
    has_lost = not optim and _had_optimizer(save)
    wrapper = optim.traits if optim else find_wrapper(STATELESS if has_lost else BARE)
    groups = join_groups(save, builder.ranks)
    precision = find_saved_precision(save, atoms, flats, groups)
    masters = (member.atom(MASTER) for group in groups for member in group.members)
    trained = next((atoms[key].dtype for key in masters if key in atoms), "float32")  # by a torch optimizer
    topology = Topology(
        zero_stage=optim.stage if optim and wrapper.records_stage else stage if optim or has_lost else 0,
        wrapper=wrapper.name,
        precision=precision,
        dp=save.dp if has_lost and stage else max(len(save.shards[0]), 1),
        tp=save.tp,
        pp=save.pp,
        ep=count_rank_sets(flats),
        undeclared=bool(save.main.config) and find_precision(save.main.config) != precision,
        master=optim.masters[0].dtype if optim and optim.masters else trained,
        elastic=bool(optim and optim.elastic),
        offload=describe_offload(save.zero),
        flats=flats,
    )
    index = make_index(builder, atoms, optim, topology, groups)
    return index if optim else replace(index, stateless=_describe_stateless(save))


def _had_optimizer(save: Save) -> bool:
    return any(model.owned for model in save.first_models)


def _describe_stateless(save: Save) -> str:
    """Explain why a save has no optimizer states, with a remedy."""
    folder, remedy = save.folder, "For the weights alone load with load_optimizer_states=False"
    if not _had_optimizer(save):
        return f"{folder}: holds no optimizer states: the run that saved it had no optimizer. {remedy}."
    in_bf16 = find_precision(save.main.config) == "bfloat16"
    in_fp32 = (save.main.config.get("data_types") or {}).get("grad_accum_dtype") == "fp32"
    if not save.zero.get("stage") or (in_bf16 and in_fp32):  # these releases skip the states of BF16_Optimizer
        return (
            f"{folder}: holds no optimizer states: DeepSpeed 0.17.6 to 0.18.4 do not write them in bf16 without ZeRO "
            f"or with fp32 gradients, so they are lost. {remedy}, or load a tag that another release saved."
        )
    names = [(name, None) for name in name_shards(save, "bf16_" * in_bf16, len(save.models), save.dp)]
    missing = shorten(name for name, _ in fold_names(names, lambda _: None))
    return f"{folder}: {missing} missing: all files of optimizer states. Copy them here or load another tag. {remedy}."


def make_index(
    builder: Builder,
    atoms: Atoms,
    optim: OptimHeader | None,
    topology: Topology,
    groups: tuple[GroupInfo, ...],
) -> AtomicIndex:
    """Combine a builder's parts, the model states, and the scaler of ``optim``."""
    save = builder.save
    model = save.model(0)
    client = tuple(builder.number_record(save.main, record) for record in model.client_storages)
    batch = {key: count for key, count in model.batch.items() if key != BATCH_SIZES[1]}  # a property of the topology
    index = AtomicIndex(
        files=tuple(builder.files),
        records=builder.records,
        atoms=atoms,
        topology=topology,
        state_file=save.path(save.main),
        repeated={key: tuple(parts) for key, parts in builder.repeated.items()},
        access=save.where.find_access([*builder.file_ids]),
        counters={**model.counters, **batch},
        scalars=builder.scalars,
        groups=groups,
        scaler=optim.scaler if optim else {},
        clip_grad=optim.clip_grad if optim else None,
        **_read_optimizer(save.main.config),
        scalar_dtypes=builder.scalar_dtypes,
        helpers=model.helpers,
        client_records=client,
        flats={mp: rank.flats for mp, rank in enumerate(builder.ranks)},
        globals=save.list_globals(),
        aliases=builder.aliases,
        buffers=frozenset(name for header in save.first_models for name in header.buffers),
        instances=builder.instances,
        hints=join_hints((save.path(headers[0]), save.model(mp).hints) for mp, headers in enumerate(save.models)),
        irregular={**builder.irregular, **_find_lost_states(save, atoms)},
        unreadable=builder.unreadable,
        unnoticed=tuple(_find_unnoticed(builder.save, topology)),
        ambiguous=builder.ambiguous,
    )
    for extension in save.extensions:
        index = extension.complete_index(index, builder)
    return index


def _find_unnoticed(save: Save, topology: Topology) -> Iterator[str]:
    """Yield parts that DeepSpeed's own load would miss or misread."""
    writers = save.main.config.get(WRITERS, ())
    yield from (f"files of another writer than torch.save ({name})" for name in writers)
    if topology.traits.form is Form.RESERVED and save.model(0).counters.get("dp_world_size", 0) > topology.dp:
        yield "data-parallel ranks that MiCS has grouped"
    if save.sp > 1:
        yield f"files named by sequence-parallel rank, of {save.sp}"


def _find_optim(save: Save) -> OptimHeader | None:
    """Return the first optimizer header, preferably one with parameters; or None."""
    optims = [model.optim for model in save.first_models if model.optim]
    optims = optims or [shards[0].optim for shards in save.shards if shards and shards[0].optim]
    return next((optim for optim in optims if optim.masters), optims[0] if optims else None)


def find_saved_precision(
    save: Save,
    atoms: Mapping[AtomKey, Atom],
    flats: tuple[FlatBuffer, ...] = (),
    groups: Sequence[GroupInfo] = (),
) -> str:
    """Return the dtype of the parameters, by the ds_config or the first optimized one."""
    model, precision = save.model(0), find_precision(save.main.config)
    if precision != "float32":
        return precision
    dtypes = {name: piece.dtype for name, piece in (model.module or {}).items() if name not in model.buffers}
    if save.is_pipeline or model.nested:
        buffers = {name for header in save.first_models for name in header.buffers}
        copies = {key.name: atom.dtype for key, atom in atoms.items() if key.state == COPY}
        others = {k.name: atom.dtype for k, atom in atoms.items() if k.state == MODULE and k.name not in buffers}
        dtypes = {**copies, **others, **copies}
    flat_names = [strip_compiled(name) for flat in flats for name in flat.names]
    names = [*flat_names, *(member.name for group in groups for member in group.members)]
    return next((dtypes[name] for name in (*names, *dtypes) if name in dtypes), "float32")


def _read_optimizer(config: Mapping[str, Any]) -> dict[str, Any]:
    section = config.get("optimizer")
    name, params = (section.get("type"), section.get("params")) if isinstance(section, dict) else (None, None)
    options = {key: params.get(key) for key in ("lr", "adam_w_mode")} if isinstance(params, dict) else {}
    plain = {key: value for key, value in options.items() if isinstance(value, float) or is_int64(value)}
    return {"optimizer": str(name) if name else None, "optimizer_params": plain}


def _refuse_engines(save: Save, naming: Naming) -> None:
    """Raise UnsupportedError for engines whose files cannot be resharded."""
    path = save.path(save.main)
    if save.zero.get("zenflow") and (save.is_sharded or not naming.weights_only):
        remedy = (
            "ZeRO 3 has transposed partitions there besides: take the weights from the run itself, with "
            "deepspeed.zero.GatheredParameters."
            if save.is_sharded
            else "The module's weights are complete: load them with load_optimizer_states=False."
        )
        raise UnsupportedError(
            "was saved by ZenFlow. The moments of the columns that it selects, which ones it selects, the "
            "gradients that it gathers between two updates, and its step are in no file, and in the masters these "
            f"columns are behind the weights. {remedy}",
            path=path,
        )
    sliced = [name for model in save.first_models for name in _list_sliced_bases(model)]
    if sliced:
        raise UnsupportedError(
            "of the frozen base weights of LoRA's OptimizedLinear only rank 0's slice was saved "
            f"(base_weight_sharding > 1): {shorten(dict.fromkeys(sliced))}. Take them from the model that the training "
            "began with, and save with base_weight_sharding 1.",
            path=path,
        )


def _list_sliced_bases(model: ModelHeader) -> list[str]:
    saved = {name: piece.shape for name, piece in (model.module or {}).items()}
    shapes = {**saved, **model.frozen_shapes, **model.owned}
    sliced = []
    for name, down in shapes.items():
        base = name.removesuffix(".lora_weight_1.weight")
        up, weight = shapes.get(f"{base}.lora_weight_2.weight"), shapes.get(f"{base}.weight")
        if base != name and up and weight and len(weight) == 1 and weight[0] < up[0] * down[-1]:
            sliced.append(f"{base}.weight")
    return sliced


def _find_lost_states(save: Save, atoms: Mapping[AtomKey, Atom]) -> dict[AtomKey, str]:
    """Return the reason why optimizer states are in no file, by atom ``moments``."""
    options, reason = save.zero.get("offload_optimizer"), ""
    ratio = options.get("ratio", 1) if isinstance(options, dict) else 1
    if describe_offload(save.zero).startswith("superoffload/"):
        reason = "not in the files: SuperOffload kept it in another process"
    elif isinstance(ratio, (int, float)) and ratio < 1:
        reason = f"not in the files: offload_optimizer.ratio {ratio} kept it in a second optimizer"
    if not reason or not save.model(0).counters.get("global_steps"):
        return {}
    with_states = {key.param for key in atoms if key.state not in (MASTER, MODULE, COPY)}
    return {key.param.atom("moments"): reason for key in atoms if key.state == MASTER and key.param not in with_states}
