"""Headers of all files of a save → :class:`~deepspeed_ucp.atoms.AtomicIndex`; no files are touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..atoms import COPY, MODULE, Atom, AtomicIndex, AtomKey, Limits, ModelInfo, RunState, StoredAtoms, strip_compiled
from ..flat import FlatBuffer
from ..topology import Topology
from .builder import Builder
from .family import Save, arrange
from .files import Listing
from .groups import check_steps, join_ranks, merge_groups
from .headers import FileHeader, ModelHeader, OptimHeader
from .hints import join_hints
from .module import add_modules
from .naming import NamedGroups
from .pipeline import add_layers, look_at_ranks
from .refused import describe_offload, find_lost_states, refuse_engines
from .slices import fill_param_shapes
from .stage0 import GroupNames, build_stage0, name_groups
from .stages import Stages, name_stages
from .zero import Built, add_frozen_zero3, build_zero3, build_zero12


def build_index(
    listing: Listing,
    headers: Sequence[FileHeader],
    live_groups: GroupNames | None = None,
    live_hyper: Sequence[Mapping[str, Any]] = (),
    *,
    groups: NamedGroups | None = None,
    optimizer: bool = True,
) -> AtomicIndex:
    """The atomic view of a save whose headers have been read.

    Args:
        listing: the folder's files.
        headers: of all files of the save, the first rank's model states in front.
        live_groups: param groups of the live optimizer (over all its ranks, in pipeline order), which name the
            parameters of a stage-0 source.
        live_hyper: their hyper-parameters, which tell whether they are in the saved order.
        groups: how the optimizer's groups were made, where there is no live engine.
        optimizer: False leaves the optimizer of a stage-0 source out; names then only tell a pipeline's tied modules.

    Raises:
        CheckpointError: files that do not belong together, or do not hold the whole state.
        UnsupportedError: a kind of checkpoint that is not covered.
        MismatchError: stage 0 with other param groups than the live ones.
    """
    save = arrange(listing, headers)
    refuse_engines(save)
    builder = Builder(listing.folder, save.tp)
    main = builder.file(save.main)
    if any(save.shards):
        stages, built, aliases, instances = _build_zero(builder, save)
    else:
        if live_groups is None and groups is not None and optimizer:
            live_groups = name_groups(save, groups)
        stages, built, aliases, instances = build_stage0(builder, save, live_groups, live_hyper, optimizer=optimizer)
    flats = {mp: part[0] for mp, part in enumerate(built)}
    check_steps(save, [part[1] for part in built], builder.scalars)
    atoms = builder.finish_atoms(stages.empty)
    optim = find_optim(save)
    client = tuple(builder.record(main, blob) for blob in save.model(0).others)
    return AtomicIndex(
        stored=StoredAtoms(
            files=tuple(builder.files),
            records=tuple(builder.records),
            atoms=atoms,
        ),
        run=RunState(
            scalars=builder.scalars,
            groups=merge_groups(join_ranks(save, [part[1] for part in built])),
            counters=save.model(0).counters,
            scaler=optim.scaler if optim else {},
            clip_grad=optim.clip_grad if optim else None,
            state_file=save.path(save.main),
            topology=_describe(save, optim, atoms, flats),
            optimizer=name_optimizer(save.model(0).config),
            client_records=client,
            flats=flats,
            scalar_dtypes=builder.scalar_dtypes,
            globals=save.list_globals(),
        ),
        model=ModelInfo(
            aliases=aliases,
            buffers=frozenset(strip_compiled(n) for mp in range(len(save.models)) for n in save.model(mp).buffers),
            instances={**stages.instances, **instances},
            hints=join_hints((save.path(models[0]), save.model(mp).hints) for mp, models in enumerate(save.models)),
        ),
        limits=Limits(
            irregular={**builder.irregular, **find_lost_states(save, atoms)},
            unreadable=builder.unreadable,
        ),
    )


def _build_zero(builder: Builder, save: Save) -> tuple[Stages, list[Built], dict[str, str], dict[str, int]]:
    """ZeRO and BF16_Optimizer, whose model states name the parameters of each rank."""
    fill_param_shapes(save)
    models = [save.model(mp) for mp in range(len(save.models))]
    names = [[strip_compiled(n) for group in model.param_shapes or () for n, _ in group] for model in models]
    stages = name_stages(save, names)
    optimized = {name for held in names for name in held}
    first = find_optim(save)
    sharded = first is not None and first.kind == "zero3"
    build = build_zero3 if sharded else build_zero12
    built = []
    for mp, seat in enumerate(stages.seats):
        built.append(build(builder, seat, models[mp], save.shards[mp]))
        if sharded:
            add_frozen_zero3(builder, seat, save.models[mp], optimized)
    if save.is_pipeline:
        known = look_at_ranks(save)
        return stages, built, *add_layers(builder, save, known, stages)
    return stages, built, add_modules(builder, save, optimized, sharded=sharded), {}


def find_optim(save: Save) -> OptimHeader | None:
    """The first optimizer header that has parameters: a pipeline stage may be without."""
    found = [save.model(mp).optim for mp in range(len(save.models))]
    found = [optim for optim in found if optim] or [shards[0].optim for shards in save.shards if shards]
    return next((optim for optim in found if optim and optim.masters), found[0] if found else None)


def _describe(
    save: Save,
    optim: OptimHeader | None,
    atoms: Mapping[AtomKey, Atom],
    flats: Mapping[int, tuple[FlatBuffer, ...]],
) -> Topology:
    model = save.model(0)
    zero = model.config.get("zero_optimization") or {}
    kind = optim.kind if optim else "none"
    stage = {"zero12": optim.stage if optim else 0, "zero3": 3, "bf16": int(zero.get("stage") or 0)}.get(kind, 0)
    return Topology(
        zero_stage=stage,
        wrapper=kind,
        precision=find_precision(save, model, atoms, flats),
        dp=max(len(save.shards[0]), 1),
        tp=save.tp,
        pp=save.pp,
        master=optim.masters[0].dtype if optim and optim.masters else "float32",
        elastic=bool(optim and optim.elastic),
        offload=describe_offload(zero),
        flats=flats[0] if flats else (),
    )


def find_precision(
    save: Save, model: ModelHeader, atoms: Mapping[AtomKey, Atom], flats: Mapping[int, tuple[FlatBuffer, ...]]
) -> str:
    """Dtype of the model's own parameters: what the ds_config casts them to, else that of the first optimized one."""
    if enabled(model.config, "bf16", "bfloat16"):
        return "bfloat16"
    if enabled(model.config, "fp16"):
        return "float16"
    module = {strip_compiled(name): piece.dtype for name, piece in (model.module or {}).items()}
    if save.is_pipeline or model.nested:
        buffers = {strip_compiled(n) for mp in range(len(save.models)) for n in save.model(mp).buffers}
        copies = {key.name: atom.dtype for key, atom in atoms.items() if key.state == COPY}
        others = {k.name: atom.dtype for k, atom in atoms.items() if k.state == MODULE and k.name not in buffers}
        module = {**others, **copies}
        ordered = [*copies, *others]
    else:
        ordered = [name for name in module if name not in {strip_compiled(n) for n in model.buffers}]
    names = [strip_compiled(name) for flat in flats.get(0, ()) for name in flat.names]
    return next((module[name] for name in (*names, *ordered) if name in module), "float32")


def enabled(config: Mapping[str, Any], *names: str) -> bool:
    """Whether a precision is switched on in a ds_config, under one of its names."""
    return any(bool((config.get(name) or {}).get("enabled")) for name in names)


def name_optimizer(config: Mapping[str, Any]) -> str | None:
    """The optimizer that a ds_config names."""
    section = config.get("optimizer")
    name = section.get("type") if isinstance(section, dict) else None
    return str(name) if name else None
