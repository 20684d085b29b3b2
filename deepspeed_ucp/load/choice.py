"""Choose the loader: DeepSpeed's, if it is known to be right, or the direct load."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..comm import Comm
from ..engine.base import Target
from ..engine.coverage import OWN_LOAD, UnknownLayoutError, describe_own_files
from ..engine.engines import open_target
from ..engine.finish import check_scheduler, list_scaling_changes
from ..engine.guard import check_states
from ..engine.known import list_unknown
from ..engine.parallel import live_universal_info
from ..errors import CheckpointError, MismatchError, UnsupportedError, shorten
from ..extensions.registry import name_active
from ..formats.deepspeed.files import PUBLISHED, holds_atoms, list_entries, resolve_published, scan_if_there
from ..formats.deepspeed.naming import CHANGING, Naming
from ..formats.deepspeed.ownfiles import compare_own_files, list_own_globals, read_own_hints, read_state_tree
from ..formats.open import survey_checkpoint
from ..io.memory import identify_host
from ..io.paths import is_url
from ..model.index import AtomicIndex, to_integer
from ..model.storage import number_layer
from ..model.topology import find_differences, list_undescribed, number_groups
from ..plan.settling import list_shapes, settle_index
from ..stream.reader import verify_records
from ..tensor_parallel.metadata import INFO, from_universal_info
from ..tensor_parallel.rules import find_renamed
from .client import check_trusted
from .context import LoadContext

Choice = tuple[str, Target | None, AtomicIndex | None]
"""The chosen loader: the reason for the log, the live engine's buffers, and the checkpoint for the direct load.

The buffers are None if only DeepSpeed knows the engine's layout. Without a checkpoint DeepSpeed loads.
"""


def choose_loader(context: LoadContext, folder: str, also: Sequence[str] = ()) -> Choice:
    """Choose between DeepSpeed's load and the direct load (collective).

    Args:
        folder: the tag's folder.
        also: its folders in further places.

    Raises:
        UnsupportedError: the engine is not covered, and DeepSpeed's load is not known to be right.
    """
    atomic = context.loads_universal and any(context.comm.gather_results(lambda: has_atoms(folder)))
    try:
        target, naming = inspect_engine(context)
    except UnknownLayoutError as error:
        if not atomic:
            return _require_own_files(context, folder, str(error))
        if not context.config.trust_pickle:
            context.comm.run(lambda: check_trusted(list_own_globals(folder, context.comm.rank, context.comm.size)))
        return f"load_universal is on, this is an atomic checkpoint, and {error}", None, None
    doubts: list[str] = []
    if context.engine.use_node_local_storage() and not atomic:
        doubts = find_own_differences(context, folder, target)
        if not doubts and context.config.same_topology != "direct":
            return _choose_own_load(context, folder, _NODE_LOCAL, target)
    if not doubts:
        is_direct = context.config.same_topology == "direct"
        doubts += ["load_universal is on, but this is no atomic checkpoint"] * (context.loads_universal and not atomic)
        doubts += ['the topology is unchanged, and "same_topology": "direct" is set'] * is_direct
    return _compare(context, folder, also, target, naming, doubts)


_BELOW = f"the files are in a folder below the tag ({PUBLISHED}), which DeepSpeed's own load does not read"

_NODE_LOCAL = "every node keeps its own files (use_node_local_storage)"


def inspect_engine(context: LoadContext) -> tuple[Target, Naming]:
    """Describe the engine; gather its names, which stage-0 saves lack (collective)."""
    opened: list[Target] = []

    def describe() -> tuple[bool, dict[str, str], StageGroups | None]:
        check_states(context.engine, with_states=context.with_states)
        target = open_target(context.engine)
        opened.append(target)
        # Without pipeline and distributed parameters all ranks have the same groups.
        groups = list_stage_groups(target) if target.parallel.pp > 1 or target.is_uneven else None
        return bool(target.flats), target.list_keys(), groups

    answers = context.comm.gather_results(describe)
    target = opened[0]
    if any(groups for *_, groups in answers):
        groups, hyper, order = join_groups(groups for *_, groups in answers)
    else:
        groups, hyper, order = target.live_groups(), target.live_hyper(), target.list_names()
    has_masters = any(has for has, *_ in answers)  # a pipeline stage may lack masters
    naming = Naming(
        groups,
        hyper,
        order=order,
        dual_pipe=hasattr(target.engine.module, "phase_bounds"),  # DualPipeV: a forward and a backward stage per rank
        keys={key: name for _, keys, _ in answers for key, name in keys.items()},
        rename=partial(find_renamed, rules=context.rules),
        ep=target.ep,
        list_recorded=target.list_state_dict_names,
        weights_only=not (context.with_states and has_masters),
    )
    return target, naming


Group = list[tuple[str, bool]]
"""The parameters of a param group: (name in the module, owned by the optimizer)."""

JoinedGroups = tuple[list[Group], list[dict[str, Any]], dict[str, str]]
"""Param groups, their hyper-parameters, and the names of the module's parameters (:meth:`Target.list_names`)."""

StageGroups = tuple[int, list[Group], list[dict[str, Any]], dict[str, str]]
"""A pipeline stage, and its :data:`JoinedGroups`."""


def list_stage_groups(target: Target) -> StageGroups | None:
    """Return this rank's param groups, or None if another rank reports the same ones."""
    parallel = target.parallel
    if not (target.is_first_replica and (parallel.tp_rank == 0 or target.unsharded)):
        return None
    groups = [[item for item in group if target.reports(item[0])] for group in target.live_groups()]
    return parallel.pp_rank, groups, target.live_hyper(), target.list_names()


def join_groups(reports: Iterable[StageGroups | None]) -> JoinedGroups:
    """Join the param groups of all pipeline stages, with parameters in layer order.

    :func:`~deepspeed_ucp.model.topology.number_groups` identifies the groups of different stages. The layers of a stage
    need not be consecutive (DualPipeV).
    """
    stages: dict[int, tuple[list[dict[str, bool]], list[dict[str, Any]]]] = {}
    order: dict[str, str] = {}
    for stage, pairs, hyper, names in filter(None, reports):
        order.update(names)
        known, _ = stages.setdefault(stage, ([{} for _ in pairs], hyper))
        for members, more in zip(known, pairs, strict=True):  # ranks differ in their distributed parameters
            members.update(more)
    if len(stages) == 1:
        ((only, hyper),) = stages.values()
        return [list(members.items()) for members in only], hyper, order
    ordered = [stages[stage] for stage in sorted(stages)]
    joined: dict[int, tuple[dict[str, bool], dict[str, Any]]] = {}
    numbers = number_groups([hyper for _, hyper in ordered], CHANGING)
    for (groups, hyper), group_numbers in zip(ordered, numbers, strict=True):
        for group, fields, number in zip(groups, hyper, group_numbers, strict=False):
            members, _ = joined.setdefault(number, ({}, fields))
            members.update((name, owned) for name, owned in group.items() if name not in members)
    return (
        [sorted(members.items(), key=lambda member: number_layer(member[0])) for members, _ in joined.values()],
        [fields for _, fields in joined.values()],
        dict(sorted(order.items(), key=lambda names: number_layer(names[1]))),
    )


def has_atoms(folder: str) -> bool:
    """Return True if a folder that this rank sees is an atomic checkpoint."""
    try:
        return holds_atoms(list_entries(folder))
    except CheckpointError:
        return False


def list_unproven(context: LoadContext, target: Target | None, index: AtomicIndex | None = None) -> list[str]:
    """List reasons to doubt DeepSpeed's load even if the topology is unchanged.

    Args:
        target: this rank's; None if only DeepSpeed can load into the engine.
        index: the checkpoint; None if each rank has read only its own files.
    """
    doubts = ['"param_groups" is "live"'] * (context.config.param_groups == "live" and context.with_states)
    doubts += ['"resize" rules'] * any(rule_set.resizes for rule_set in context.rules)
    if target is not None:
        arguments = {
            "load_optimizer_states": not context.load_optimizer_states,
            "load_module_only": context.load_module_only,
            "load_module_strict": not context.load_module_strict,
            "custom_load_fn": context.custom_load_fn is not None,
        }
        doubts += [name for name, is_given in arguments.items() if is_given]
        doubts += list_unknown(target, index)
    if target is not None and index is not None:
        doubts += target.list_optimizer_changes(index) if context.with_states else ()
        doubts = doubts or list_other_orders(context, target, index)  # the direct load compares the orders itself
    named = shorten(dict.fromkeys(doubts))
    return [f"DeepSpeed's own load is not known to be right with: {named}"] if doubts else []


_EXPERT_KEYS = ("ds_autoep_layers", "expert_parameter_patterns")
"""Keys that a save adds to the model's ``universal_checkpoint_info``."""


def list_other_orders(context: LoadContext, target: Target, index: AtomicIndex) -> list[str]:
    """Describe shards with another order of elements, which the direct load refuses."""
    info = live_universal_info(target.engine) if target.parallel.tp > 1 else None
    if info is None or _is_same_info(index.hints.get(INFO), info):
        return []
    saved, shapes = {name: index.resolve(name) for name in target.params}, list_shapes(index)
    target_shapes = {name: shapes[name] for name in saved.values() if name in shapes}
    try:
        live = from_universal_info(info, source="target").follow(saved)
        settled = settle_index(index, context.rules, target_shapes, [live])
    except (MismatchError, UnsupportedError):  # one side's metadata cannot be read: no contradiction is known
        return []
    return [f"another order of elements in {shorten(settled.wrong)}"] if settled.wrong else []


def _is_same_info(saved: dict[str, Any] | None, live: dict[str, Any]) -> bool:
    return {key: value for key, value in (saved or {}).items() if key not in _EXPERT_KEYS} == live


def _require_own_files(context: LoadContext, folder: str, why: str) -> Choice:
    """Choose DeepSpeed's load; UnsupportedError if the topology differs (collective)."""
    if is_url(folder):
        text = f"{why}: only DeepSpeed's own load can read it, which reads no URLs. Copy it to a folder."
        raise context.comm.common(UnsupportedError(text, path=folder))
    differences = find_own_differences(context, folder)
    if differences:
        text = (
            f"{why}: only DeepSpeed's own load can read it, and only in an unchanged topology. Differences: "
            f"{shorten(differences, 4)}. Resume in the topology that saved it. {OWN_LOAD}"
        )
        raise context.comm.common(UnsupportedError(text, path=folder))
    return _choose_own_load(context, folder, why)


def find_own_differences(context: LoadContext, folder: str, target: Target | None = None) -> list[str]:
    """List why DeepSpeed's load cannot use each rank's own files (collective)."""

    def compare() -> list[str]:
        try:
            model, optim, facts = describe_own_files(context.engine, folder)
            differing = compare_own_files(model, optim, facts)
            if target is not None and int(context.engine.mp_world_size) > 1 and not differing:
                info, saved = live_universal_info(context.engine), read_own_hints(model).get(INFO)
                if info is not None and saved and not _is_same_info(saved, info):
                    differing.append("another universal_checkpoint_info")  # the direct load compares the orders
        except CheckpointError as error:
            if target is None:
                raise
            differing = [str(error)]
        entries = scan_if_there(folder)
        if PUBLISHED in entries:
            differing.append(_BELOW)
        return [*list_unproven(context, target), *differing]

    return list(dict.fromkeys(text for part in context.comm.gather_results(compare) for text in part))


def _choose_own_load(context: LoadContext, folder: str, why: str, target: Target | None = None) -> Choice:
    """Choose DeepSpeed's load, after a check of the pickled classes (collective)."""
    engine, comm = context.engine, context.comm
    if not context.config.trust_pickle:
        # Every rank checks a part of a shared folder; the ranks that see a node's files share them.
        viewers = comm.gather_results(lambda: _identify_folder(folder) if engine.use_node_local_storage() else ())
        folder_id = viewers[comm.rank]
        part, parts = viewers[: comm.rank].count(folder_id), viewers.count(folder_id)
        comm.run(lambda: check_trusted(list_own_globals(folder, part, parts)))
    return f"{why}; same topology by each rank's own files", target, None


def _identify_folder(folder: str) -> tuple[object, ...]:
    """Return an identity of a folder, equal on ranks of one machine and container."""
    status = os.stat(folder)
    return identify_host(), socket.gethostname(), status.st_dev, status.st_ino


def _compare(
    context: LoadContext, folder: str, also: Sequence[str], target: Target, naming: Naming, doubts: Sequence[str]
) -> Choice:
    """Choose the loader by the checkpoint's and the engine's layout (collective).

    Args:
        doubts: reasons for the direct load in an unchanged topology.
    """
    comm = context.comm
    survey = survey_checkpoint(folder, comm, naming, also=also)

    def compare() -> tuple[list[str], list[str]]:
        """Return reasons for the direct load, and changes of scaling to warn of."""
        index = survey.require()
        changes = list_scaling_changes(target, index, with_states=context.with_states)
        if index.format:
            return [index.unchecked], changes  # an empty text if everything is checked
        differences = _list_differences(index, target) or _list_elsewhere(index, folder)
        return differences or list_unproven(context, target, index), changes

    answers = comm.gather_results(compare)
    reasons = [text for texts, _ in answers for text in texts] or list(doubts)
    index = survey.require()
    context.report.saved, context.report.extensions = index.job, name_active((*survey.extensions, *target.extensions))
    if comm.rank == 0:
        survey.log_warnings()
    changes = list_changes(index, target, to_integer(context.engine.train_batch_size()))
    changes += dict.fromkeys(text for _, texts in answers for text in texts)  # a pipeline stage may lack an optimizer
    if changes:
        context.warn("%s: this run differs from the saved one: %s", folder, ", ".join(changes))
    if not reasons and context.config.fallback and context.config.verify == "crc":
        reasons = find_damage(index, comm, has_others=bool(also))
    if not reasons:
        comm.once(lambda: _check_scheduler(context, index))
        if not context.config.trust_pickle:
            comm.run(lambda: check_trusted(index.globals))  # a rank may have imported the classes
        return f"same topology ({index.topology.describe()})", target, None
    texts = [f"{index.origin} → {target.topology.describe()}", "; ".join(dict.fromkeys(list_undescribed(reasons)))]
    return ": ".join(filter(None, texts)), target, index


def _check_scheduler(context: LoadContext, index: AtomicIndex) -> None:
    """Refuse a scheduler that fails in DeepSpeed's load, or whose schedule restarts."""
    if context.load_lr_scheduler_states and context.engine.lr_scheduler is not None:
        check_scheduler(context.engine, read_state_tree(index))


def find_damage(index: AtomicIndex, comm: Comm, *, has_others: bool) -> list[str]:
    """Verify the files of the first place, as DeepSpeed's load does not (collective).

    Args:
        has_others: after damage the direct load may succeed from further places.

    Raises:
        CheckpointError: a file is damaged, and there are no further places.
    """
    files = tuple(replace(file, places=()) for file in index.files)
    try:
        verify_records(replace(index, files=files), range(len(index.records)), comm)
    except CheckpointError as error:
        if not has_others:
            raise
        return [str(error)]
    return []


def list_changes(index: AtomicIndex, target: Target, total_batch: int) -> list[str]:
    """Describe changed batch size and precision; the loader's log line has degrees."""
    saved, is_unknown = index.job, index.format or index.topology.is_atomic
    facts = (
        ("total batch", saved.total_batch, total_batch),
        ("precision", None if is_unknown else index.topology.precision, target.topology.precision),
    )
    return [f"{name} {old} → {new}" for name, old, new in facts if old not in (None, new)]


def _list_differences(index: AtomicIndex, target: Target) -> list[str]:
    saved = index.flats.get(target.parallel.mp_rank, ())
    rank = target.parallel.dp_rank * target.parallel.tp + target.parallel.tp_rank  # in the pipeline stage
    flats = tuple(flat for flat in saved if flat.ranks is None or rank in flat.ranks)
    return find_differences(replace(index.topology, flats=flats), target.topology)


def _list_elsewhere(index: AtomicIndex, folder: str) -> list[str]:
    """Describe why DeepSpeed's load would not find all files in the folder."""
    if is_url(folder):
        return ["DeepSpeed's own load reads no URLs"]
    if resolve_published(folder) != folder:
        return [_BELOW]
    if index.access.is_partial:
        return ["its files lie on several nodes"]
    inside = os.path.join(folder, "")  # with the separator: no prefix of a sibling's name
    return [] if all(file.path.startswith(inside) for file in index.files) else ["some files lie elsewhere"]
