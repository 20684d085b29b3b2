"""Checks whether a checkpoint can be resumed at other degrees, as a load does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import choose_batch
from ..errors import MismatchError, Objections
from ..extensions.registry import find_for_names
from ..formats.deepspeed.ownfiles import read_saved_config
from ..model.flat import join_parameters
from ..model.index import AtomicIndex, to_integer
from ..model.storage import MASTER, MODULE, AtomKey
from ..model.topology import find_differences
from ..model.view import EngineBuffer, EngineView, Shapes
from ..plan import settling
from ..plan.derive import rename_all
from ..plan.locate import locate
from ..plan.match import Match, pick_instance, pick_weight
from ..plan.wants import Layouts, join_states, list_touched, list_wants
from ..tensor_parallel.rename import rename_names
from ..tensor_parallel.rules import RuleSet, list_renames
from .degrees import Degrees

DEEPSPEED, OURS = "DeepSpeed", "deepspeed_ucp"


@dataclass(slots=True)
class ResumeCheck:
    """The outcome of :func:`check_resume`.

    Attributes:
        obstacles: reasons why the resume would fail; empty if it is possible.
        loader: ``DeepSpeed`` in the saved topology, else ``deepspeed_ucp``.
        batch: saved ``train``, ``micro`` and ``gas`` sizes, and ``change``: what ``preserve_batch_size`` would change.
        patterns: source of the patterns → number of parameters.
        state: bytes of the tensors that are restored; 0 if DeepSpeed loads them.
        read: bytes that all ranks together read; 0 likewise.
        files, checkpoint: number and bytes of the checkpoint's files.
    """

    degrees: Degrees
    obstacles: list[str] = field(default_factory=list)
    loader: str = OURS
    differences: list[str] = field(default_factory=list)
    batch: dict[str, Any] = field(default_factory=dict)
    patterns: dict[str, int] = field(default_factory=dict)
    state: int = 0
    read: int = 0
    files: int = 0
    checkpoint: int = 0


def check_resume(
    index: AtomicIndex, degrees: Degrees, rules: Sequence[RuleSet] = (), *, train_batch: int | None = None
) -> ResumeCheck:
    """Check a resume like a load; ``train_batch`` replaces the saved batch size."""
    files = index.files
    check = ResumeCheck(degrees, files=len(files), checkpoint=sum(file.size for file in files))
    saved, objections = replace(index.topology, flats=()), Objections()
    differences = find_differences(saved, degrees.to_topology(saved))
    check.differences = ["not DeepSpeed's own format"] if index.format else differences
    with objections:
        check.batch = _fit_batch(read_saved_config(index), degrees.dp, train_batch)
    with objections:
        names = rename_names(sorted(settling.list_names(index)), list_renames(rules))
        renamed = {new: old for old, new in names.items() if new != old}
        if renamed:
            check.differences.append("parameters under other names by rename rules")
        named, known = rename_all(index, renamed), len(objections.errors)
        for extension in find_for_names([key.name for key in named.atoms], degrees):
            with objections:
                reasons = extension.check_degrees(named, degrees)
                check.differences += reasons if not check.differences else ()
        if not check.differences and len(objections.errors) == known:
            check.loader = DEEPSPEED
        else:
            _check_load(index, named, renamed, check, rules, objections)
    check.obstacles = [line for error in objections.errors for line in str(error).split("\n")]
    return check


def _check_load(
    index: AtomicIndex,
    named: AtomicIndex,
    renamed: Mapping[str, str],
    check: ResumeCheck,
    rules: Sequence[RuleSet],
    objections: Objections,
) -> None:
    """Collect a load's objections, in its order, and complete the check."""
    with objections:
        settling.refuse_unreadable(index)
    with objections:
        settling.refuse_stateless(index)
    if text := settling.describe_irregular(index):
        objections.errors.append(MismatchError(f"{text} Pass load_optimizer_states=False to load the weights alone."))
    if text := check.degrees.obstacle:
        objections.errors.append(MismatchError(text))
    with objections:
        names = dict.fromkeys(key.name for key in named.atoms if key.state in (MASTER, MODULE))
        local, layouts = _settle(index, {name: renamed.get(name, name) for name in names}, rules, check)
        _add_reads(named, names, local, layouts, check)


def _add_reads(index: AtomicIndex, names: Iterable[str], local: Shapes, layouts: Layouts, check: ResumeCheck) -> None:
    """Set ``state`` and ``read`` of the check, from the wants of whole stages' ranks."""
    touched: dict[AtomKey, None] = {}
    records: set[int] = set()
    for stage in range(2 if check.degrees.pp > 1 else 1):  # tied modules: the first and the last stage have a copy
        in_stage = [name for name in names if not stage or name in index.instances]
        match = Match({name: pick_instance(index, name, stage, 2) for name in in_stage})
        for rank in range(check.degrees.tp):
            view = _view_rank(index, match, local, rank)
            touched |= dict.fromkeys(list_touched(index, view, match, with_states=True))
            for want in list_wants(index, view, match, layouts, with_states=True).wants:
                records |= {item.record for item in locate(want)}
    check.state = index.atoms.count_bytes(list(touched))
    check.read = sum(index.records[record].nbytes for record in records)


def _settle(
    index: AtomicIndex, saved: Mapping[str, str], rules: Sequence[RuleSet], check: ResumeCheck
) -> tuple[Shapes, Layouts]:
    """Return target shapes by rank, and layouts; ``saved``: target's → saved name."""
    tp = check.degrees.tp
    if index.topology.tp == tp == 1:
        weights = settling.list_weights(index)
        return {name: (weights[old].shape,) for name, old in saved.items()}, {}
    settled = settling.settle_index(index, rules, names=list(saved.values()), degree=tp).require()
    check.patterns = dict(Counter(settled.origin.values()))
    layouts = {name: settled.pairs[old] for name, old in saved.items()}
    return {name: want.local_shapes for name, (_, want) in layouts.items()}, layouts


def _view_rank(index: AtomicIndex, match: Match, local: Shapes, rank: int) -> EngineView:
    """Return one tensor-parallel rank's buffers, one per parameter, unpartitioned."""
    flats, extras = [], []
    for name, param in match.params.items():
        buffer = join_parameters(0, (name,), (local[name][rank],))
        if index.find(name, MASTER, param.instance):
            flats.append(EngineBuffer(buffer, 0, rank, "float32", states=join_states(index, buffer, match)))
        elif atom := pick_weight(index, param, False, True):
            extras.append(EngineBuffer(buffer, 0, rank, atom.dtype))
    return EngineView(flats=flats, extras=extras)


def _fit_batch(saved: Mapping[str, Any], dp: int, train: int | None) -> dict[str, Any]:
    """Return saved batch sizes, and how ``preserve_batch_size`` would change them."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = [value if isinstance(value := to_integer(saved.get(key)), int) and value > 0 else None for key in keys]
    batch, micro, gas = sizes if train is None else (train, None, None)
    universal = (saved.get("checkpoint") or {}).get("universal")
    preserve = isinstance(universal, Mapping) and bool(universal.get("preserve_batch_size"))
    fit = choose_batch(batch, micro, gas, dp, preserve=preserve)
    change = f"micro batch {micro} → {fit[0]}, gradient accumulation {gas} → {fit[1]}" if fit else None
    return {"train": batch, "micro": micro, "gas": gas, "change": change}
