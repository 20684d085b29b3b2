"""A dry run: whether a checkpoint can be resumed at some topology, and what every rank would do, without an engine.

The loader's own planning runs for all ranks in one process; where that would take long, for a sample of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..atoms import ITEMSIZE, AtomicIndex, to_integer
from ..config import UniversalConfig, choose_batch
from ..errors import ConfigError, MismatchError
from ..io.store import exists
from ..io.threads import MOST
from ..patterns import RuleSet
from ..plan import ReadSizes, list_claims
from ..plan.predicted import predict_renames
from ..plan.rounds import plan_ranks
from ..plan.settling import describe_irregular, describe_unreadable
from ..plan.wants import Wants, is_replicated
from ..sources.files import MANIFEST, list_sizes
from ..sources.ownfiles import read_state_tree
from ..stream.duplicates import spread_evenly
from ..topology import find_differences
from .degrees import Degrees
from .estimate import LoadTotals, RankFigures, measure_plan
from .experts import find_moved_experts
from .sample import Sampler
from .target import ForecastTarget, predict_target

MOST_RANKS, MOST_CLAIMS = 64, 100_000
"""Up to which all ranks are planned exactly; beyond, a sample is."""
SAMPLES, SAMPLED_BLOCKS = 5, 25_000
"""Ranks in a sample at most, and blocks that they read together; three ranks are planned in any case."""
_AGAIN = (
    "The engine is a fresh one. One that has trained reads a second time, when all is verified, what it has no memory "
    "to keep apart until then; so does one whose weights are their own masters, from the page cache."
)
_HINT = (
    " A live model may tell by itself (AutoTP, Megatron's attributes, its own shapes); a plan knows the checkpoint and "
    "the rules that it is given (--patterns)."
)
_FOREIGN = "not DeepSpeed's own format"
_RENAMED = "parameters under other names, or in other forms, by rename rules"
_LED = (
    "The model is the one that the rename rules lead to: all that match are carried out, those of the other direction "
    "too. A parameter of three dimensions [experts, …] is cut into its experts, others are copied to each."
)
_SIZES = "Sizes are the saved ones: how resize rules change them only the live model tells."
DEEPSPEED, OURS = "DeepSpeed", "deepspeed_ucp"


@dataclass(frozen=True, slots=True)
class BatchFit:
    """Batch sizes of the saved ds_config and whether the target's data-parallel ranks can make them."""

    train: int | None
    micro: int | None
    gas: int | None
    fits: bool
    text: str = ""


@dataclass(slots=True)
class DryRun:
    """What a resume would be.

    Attributes:
        degrees: of the target.
        obstacles: why it is not possible; empty where it is.
        loader: who loads: ``deepspeed_ucp``, or ``DeepSpeed`` where the topology is the saved one.
        differences: what differs between the topologies.
        batch: of the saved ds_config.
        assumed: what only the live model tells, and what was assumed instead.
        origin: what settled the patterns → how many parameters.
        ranks: figures of the ranks that were planned.
        exact: all ranks were planned.
        totals: all ranks together; None where nothing was planned.
    """

    degrees: Degrees
    obstacles: list[str] = field(default_factory=list)
    loader: str = OURS
    differences: list[str] = field(default_factory=list)
    batch: BatchFit = field(default_factory=lambda: BatchFit(None, None, None, True))
    assumed: list[str] = field(default_factory=list)
    origin: dict[str, int] = field(default_factory=dict)
    ranks: list[RankFigures] = field(default_factory=list)
    exact: bool = True
    totals: LoadTotals | None = None

    @property
    def possible(self) -> bool:
        """Whether the resume is possible."""
        return not self.obstacles


def dry_run(
    index: AtomicIndex,
    degrees: Degrees,
    rules: Sequence[RuleSet] = (),
    *,
    config: UniversalConfig | None = None,
    train_batch: int | None = None,
    exact: bool | None = None,
    samples: int | None = None,
) -> DryRun:
    """Plan a resume at other degrees.

    Args:
        index: the checkpoint.
        degrees: of the target.
        rules: the user's.
        config: window and threads.
        train_batch: a ``train_batch_size`` to take instead of the saved one.
        exact: plan all ranks (True), or a sample of them (False); None chooses by the amount of work.
        samples: how many ranks a sample has; None chooses by the amount of work.

    Raises:
        CheckpointError: the state file cannot be read.
    """
    run, config = DryRun(degrees), config or UniversalConfig()
    run.obstacles += degrees.refused
    run.obstacles += find_faults(index)
    run.batch = check_batch_size(read_saved_config(index), degrees.dp, train_batch)
    if not run.batch.fits:
        run.obstacles.append(run.batch.text)
    saved = replace(index.run.topology, flats=())
    run.differences = [_FOREIGN] if index.run.format else find_differences(saved, degrees.topology(saved))
    try:
        made = predict_renames(index, rules, degrees.experts)
        if made.renamed or made.index is not index:
            run.differences.append(_RENAMED)
        run.differences = run.differences or find_moved_experts(index, degrees)
        if not run.differences:
            run.loader = DEEPSPEED
        if not run.differences or degrees.refused:
            return run
        found = predict_target(index, degrees, rules)
    except MismatchError as error:
        run.obstacles.append(f"{error}{_HINT if index.run.topology.tp != degrees.tp else ''}")
        return run
    rules_told = [_LED, *made.notes] if _RENAMED in run.differences else []
    sizes = [_SIZES] if any(each.resizes for each in rules) else []
    run.origin, run.assumed = dict(found.origin), [*rules_told, *sizes, *found.assumed, _AGAIN]
    measure(index, found, run, config, exact=exact, samples=samples)
    return run


def find_faults(index: AtomicIndex) -> list[str]:
    """What in the checkpoint no other topology can take."""
    faults = [text for text in (describe_unreadable(index), index.limits.stateless) if text]
    if text := describe_irregular(index):
        faults.append(f"{text} Weights only (load_optimizer_states=False) can be loaded.")
    return faults


def read_saved_config(index: AtomicIndex) -> Mapping[str, Any]:
    """The ds_config of the run that saved; empty where the file has none.

    Raises:
        CheckpointError: the file cannot be read.
    """
    tree = read_state_tree(index)
    config = tree.get("ds_config") if isinstance(tree, dict) else None
    return config if isinstance(config, dict) else {}


def check_batch_size(saved: Mapping[str, Any], dp: int, train: int | None = None) -> BatchFit:
    """Whether ``dp`` data-parallel ranks can make the saved batch (or ``train``)."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = [value if isinstance(value := to_integer(saved.get(key)), int) and value > 0 else None for key in keys]
    if train is not None:
        sizes = [train, None, None]
    batch, micro, gas = sizes
    universal = (saved.get("checkpoint") or {}).get("universal")
    keeps = isinstance(universal, Mapping) and bool(universal.get("preserve_batch_size"))
    try:
        fit = choose_batch(batch, micro, gas, dp, preserve=keeps)
    except ConfigError as error:
        return BatchFit(batch, micro, gas, False, str(error))
    if fit is None:
        return BatchFit(batch, micro, gas, True)
    text = f"micro batch {micro} → {fit[0]}, gradient accumulation {gas} → {fit[1]} (preserve_batch_size)"
    return BatchFit(batch, micro, gas, True, text)


def measure(
    index: AtomicIndex,
    target: ForecastTarget,
    run: DryRun,
    config: UniversalConfig,
    *,
    exact: bool | None = None,
    samples: int | None = None,
    sizes: ReadSizes | None = None,
) -> None:
    """Fill in the figures of ranks and the totals.

    Args:
        sizes: None takes those for the configured window.
    """
    window = config.window_mb << 20
    sizes = sizes or ReadSizes.within(window)
    threads = sizes.limit_threads(config.threads or MOST, window)  # how many processors it will have nobody knows
    sampler = Sampler(index, target, sizes)
    wants = list_all_wants(target, exact, sizes.block)
    run.exact = bool(wants)
    if wants:
        claims = [list_claims(each.wants, sizes.block) for each in wants.values()]
        files = [record.file for record in index.stored.records]
        plans = plan_ranks(claims, index.stored.records, sizes)
        found = {rank: measure_plan(plan, rank, files, threads) for rank, plan in enumerate(plans)}
    else:
        each = max(sampler.count_bytes() // sizes.block // target.ranks, 1)
        chosen = spread_evenly(target.ranks, samples or min(max(SAMPLED_BLOCKS // each, 3), SAMPLES))
        wants = {rank: target.wants(rank) for rank in chosen}
        found = {rank: sampler.measure(rank, wants[rank], threads) for rank in chosen}
    for rank, figures in found.items():
        needed = sum(want.numel * ITEMSIZE[want.atom.dtype] for want in wants[rank].wants)
        engine = target.measure_engine(rank)
        run.ranks.append(RankFigures(rank, *target.place(rank), needed=needed, engine=engine, **figures))
    run.totals = _sum_up(index, target, run, sampler)


def list_all_wants(target: ForecastTarget, exact: bool | None, block: int) -> dict[int, Wants]:
    """What every rank wants; empty where only a sample of them is planned (``exact`` None: where all take long)."""
    if exact is False or (exact is None and target.ranks > MOST_RANKS):
        return {}
    found: dict[int, Wants] = {}
    claims = 0
    for rank in range(target.ranks):
        found[rank] = target.wants(rank)
        for want in found[rank].wants:  # about one claim per shard, and per block
            claims += len(want.view.shards) if want.view else 1
            claims += want.numel * ITEMSIZE[want.atom.dtype] // block
        if exact is None and claims > MOST_CLAIMS:
            return {}
    return found


def _sum_up(index: AtomicIndex, target: ForecastTarget, run: DryRun, sampler: Sampler) -> LoadTotals:
    folder, params = os.path.dirname(index.run.state_file), target.list_params()
    if index.run.topology.is_atomic:
        sizes = [file.size for file in index.stored.files]
    else:
        sizes = [size for size in list_sizes(folder).values() if size >= 0]
    # Rank 0 reads two headers to learn what the folder holds, and its share; of an atomic checkpoint the manifest.
    headers = min(2, len(sizes)) + -(-max(len(sizes) - 2, 0) // target.ranks)
    if exists(os.path.join(folder, MANIFEST)):
        headers = 1
    replicated = [
        atom for param in params for atom in target.atoms[param] if is_replicated(atom, target.layouts.get(param.name))
    ]
    sampled = sum(rank.received for rank in run.ranks)
    exchanged = sampled if run.exact else sampled * target.ranks // len(run.ranks)
    return LoadTotals(
        checkpoint=sum(sizes),
        files=len(sizes),
        state=sum(atom.nbytes for param in params for atom in target.atoms[param]),
        read=sampler.count_bytes(),
        needed=target.count_needed(),
        exchanged=exchanged,
        replicas=sum(2 * (atom.nbytes - atom.nbytes // len(atom.shards)) for atom in replicated),  # both of each pair
        headers=headers,
    )
