"""Infer each pipeline stage's layers at stage 0 from sizes and shapes of states."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations

from ...errors import MismatchError, shorten
from ...model.flat import Shape
from ...model.storage import TIED, count, find_owner, number_layer, strip_compiled
from .builder import LayerNames
from .headers import FileHeader, OptimHeader, Piece
from .naming import GroupNames, NamedOptimizer, Naming, compare_layers, describe_misfit, fits, group_sizes, pick_names
from .save import Save

logger = logging.getLogger("deepspeed_ucp")

_MAX_TIED = 6  # largest number of tied modules whose combinations are tried


@dataclass(frozen=True, slots=True)
class _Stage:
    """The tied modules and layers of a pipeline stage."""

    tied: tuple[str, ...]
    layers: tuple[int, ...]


def place_layers(save: Save, naming: Naming, live: GroupNames) -> list[NamedOptimizer]:
    """Name each optimizer's parameters; a stage is tied modules, then a run of layers.

    Args:
        live: param groups of the live optimizer over all its ranks, in the layers' order.

    Raises:
        MismatchError: no division of the layers fits the states, or several do; a DualPipeV's fits as well and the
            live pipeline is one; or the live layers have another order.
    """
    module = [_TensorParallelRank(save, tp, live) for tp in range(save.tp)]
    if naming.order:
        compare_layers(save, naming, module[0].shapes).follow(live, naming.hyper)
    for only_owned in (False, True):
        named = pick_names(live, only_owned)
        divisions = list(_Search(save, named, module[0].shapes).run())
        if len(divisions) > 1:
            raise MismatchError(
                "the layers of the pipeline's stages cannot be derived from the sizes of their states "
                f"({_describe(divisions[0])}, or {_describe(divisions[1])}). Load with load_optimizer_states=False.",
                path=save.path(save.main),
            )
        if divisions:
            _warn_two_ways(save, _TwoWays(save, named, module[0].shapes), dual_pipe=naming.dual_pipe)
            return [_name_rank(save, mp, divisions[0], named, module[mp % save.tp]) for mp in range(len(save.models))]
    for mp in range(save.tp):
        if any(strip_compiled(name) not in module[mp].shapes for group in live for name, _ in group):
            misfit = describe_misfit(save.optim(mp), save.model(mp), module[mp].shapes, live)
            raise MismatchError(misfit, path=save.path(save.models[mp][0]))
    raise MismatchError(
        f"no division of the layers into {save.pp} runs fits the states that the pipeline's "
        "stages saved. Stage 0 saves no parameter names, so the param groups must be made as in the saved run; or "
        "load with load_optimizer_states=False.",
        path=save.path(save.main),
    )


def _warn_two_ways(save: Save, search: _TwoWays, *, dual_pipe: bool) -> None:
    """Warn if the stages may be a DualPipeV's; raise if the live pipeline is one."""
    optim = save.optim(0)
    if optim.traits.has_copies or not any(tensor.states for tensor in optim.tensors):
        return
    if save.count_accumulation_steps() < 2 * save.pp or not search.fits():  # DualPipeV needs as many micro batches
        return
    path = save.path(save.main)
    if dual_pipe:
        raise MismatchError(
            "stage 0 in fp32 does not save which layers a stage held, and these may be a PipelineModule's or "
            "a DualPipeVModule's. Load with load_optimizer_states=False; or, in the topology that was saved, set "
            '"checkpoint": {"universal": false} for DeepSpeed\'s own load.',
            path=path,
        )
    logger.warning(
        "%s: stage 0 in fp32 does not save which layers a stage held; they are taken for a PipelineModule's. If a "
        "DualPipeVModule saved them, load with load_optimizer_states=False",
        path,
    )


def _describe(stages: Sequence[_Stage]) -> str:
    return " | ".join(shorten([*stage.tied, *stage.layers], 4) or "nothing" for stage in stages)


class _TensorParallelRank:
    """The layer files of one tensor-parallel rank by parameter names.

    Attributes:
        layers: tensors of layers that are not tied.
        tied: tied module → layer → file that may be the module's.
    """

    def __init__(self, save: Save, tp: int, live: GroupNames) -> None:
        names = LayerNames.of([strip_compiled(name) for group in live for name, _ in group])
        self.shapes: dict[str, Shape] = {}
        self.layers: dict[str, tuple[FileHeader, Piece]] = {}
        self.tied: dict[str, dict[int, FileHeader]] = {}
        for layer, header in save.layers[tp].items():
            tensors = header.layer or {}
            prefix, fitting = f"{layer}.", names.find_tied(layer, tensors)
            if len(fitting) != 1:
                self.layers.update({f"{prefix}{key}": (header, piece) for key, piece in tensors.items()})
            else:
                prefix = f"{TIED}{fitting[0]}."
                self.tied.setdefault(fitting[0], {})[layer] = header
            self.shapes.update({f"{prefix}{key}": piece.shape for key, piece in tensors.items()})


class _Search:
    """Search for divisions into runs of layers, with every choice of tied modules."""

    def __init__(self, save: Save, named: Sequence[Sequence[str]], shapes: Mapping[str, Shape]) -> None:
        self.save, self.named, self.shapes = save, named, shapes
        names = [name for group in named for name in group]
        self.layers = sorted({number_layer(name) for name in names if not name.startswith(TIED)})
        self.tied = list(dict.fromkeys(find_owner(name) for name in names if name.startswith(TIED)))
        self.buffers = [{find_owner(name) for name in save.model(stage * save.tp).buffers} for stage in range(save.pp)]

    def run(self) -> Iterator[list[_Stage]]:
        if len(self.tied) > _MAX_TIED or any(name not in self.shapes for group in self.named for name in group):
            return
        yield from self._divide(0, 0)

    def _divide(self, stage: int, first: int) -> Iterator[list[_Stage]]:
        """Yield divisions of the layers from ``first`` on into ``stage`` and later ones."""
        if stage == self.save.pp:
            if first == len(self.layers):
                yield []
            return
        for candidate in self._list_candidates(stage, first):
            for rest in self._divide(stage + 1, first + len(candidate.layers)):
                placed = [candidate, *rest]
                if stage or set(self.tied) <= {key for other in placed for key in other.tied}:
                    yield placed

    def _list_candidates(self, stage: int, first: int) -> Iterator[_Stage]:
        """Yield the runs of layers from ``first`` on that fit a stage's states."""
        optim = self.save.optim(stage * self.save.tp)
        weights, wanted = self._weigh(optim), sum(group_sizes(optim))
        for size in range(len(self.tied) + 1):
            for tied in combinations(self.tied, size):
                total = sum(weights[key] for key in tied)
                for last in range(first, len(self.layers) + 1):
                    total += weights[str(self.layers[last - 1])] if last > first else 0
                    if total > wanted:
                        break
                    candidate = _Stage(tied, tuple(self.layers[first:last]))
                    if total == wanted and self._has_buffers(stage, candidate) and self._fits(optim, candidate):
                        yield candidate

    def _weigh(self, optim: OptimHeader) -> Counter[str]:
        """Count the parameters, or elements for flat groups, of each layer or tied module."""
        weights: Counter[str] = Counter()
        for name in (name for group in self.named for name in group):
            weights[find_owner(name)] += count(self.shapes[name]) if optim.traits.is_flat else 1
        return weights

    def _has_buffers(self, stage: int, candidate: _Stage) -> bool:
        """Return True if a stage's layers have exactly the buffers that the stage lists."""
        layers = {str(layer) for layer in self.layers}
        owners = {str(layer) for layer in candidate.layers} | set(candidate.tied)
        listed = self.buffers[stage] & (layers | set(self.tied))
        others = set().union(*self.buffers) & layers - self.buffers[stage]
        return listed <= owners and not others & owners

    def _fits(self, optim: OptimHeader, candidate: _Stage) -> bool:
        groups = fit_stage(self.named, candidate, optim, self.shapes)
        if groups is None:
            return False
        names = [name for group in groups for name in group]
        if optim.traits.is_flat or len(names) != len(optim.tensors):
            return True
        pairs = zip(names, optim.tensors, strict=True)
        return all(not h.states or any(p.shape == self.shapes[n] for p in h.states.values()) for n, h in pairs)


class _TwoWays(_Search):
    """Search for divisions with a run of layers from each end per stage (DualPipeV)."""

    def fits(self) -> bool:
        """Return True if a division fits the states, with the last layer on stage 0."""
        self._seen: set[tuple[int, int, int]] = set()
        return self._fits_rest(0, 0, len(self.layers))

    def _fits_rest(self, stage: int, first: int, last: int) -> bool:
        if stage == self.save.pp:
            return first == last
        if (stage, first, last) in self._seen:
            return False
        self._seen.add((stage, first, last))
        return any(self._fits_rest(stage + 1, *rest) for rest in self._list_rests(stage, first, last))

    def _list_rests(self, stage: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of layers that may remain for the later stages."""
        optim = self.save.optim(stage * self.save.tp)
        weights, wanted = self._weigh(optim), sum(group_sizes(optim))
        sums = [0, *accumulate(weights[str(layer)] for layer in self.layers)]
        for tied in chain.from_iterable(combinations(self.tied, size) for size in range(len(self.tied) + 1)):
            untied = wanted - sum(weights[key] for key in tied)
            for begin in range(first, last + 1):
                for end in range(begin, last + (stage > 0)):
                    total = sums[begin] - sums[first] + sums[last] - sums[end]
                    candidate = _Stage(tied, tuple(self.layers[first:begin] + self.layers[end:last]))
                    if total == untied and self._has_buffers(stage, candidate) and self._fits(optim, candidate):
                        yield begin, end


def fit_stage(
    named: Sequence[Sequence[str]], stage: _Stage, optim: OptimHeader, shapes: Mapping[str, Shape]
) -> list[tuple[str, ...]] | None:
    """Return the names of a stage's saved groups, or None if they do not fit.

    A stage registers its tied modules first. DeepSpeed drops empty groups.
    """
    order = {f"{TIED}{key}": position for position, key in enumerate(stage.tied)}
    order.update({str(layer): len(order) + position for position, layer in enumerate(stage.layers)})

    def find_position(name: str) -> int | None:
        return order.get(f"{TIED}{find_owner(name)}" if name.startswith(TIED) else find_owner(name))

    placed = [[(at, name) for name in group if (at := find_position(name)) is not None] for group in named]
    groups = [tuple(name for _, name in sorted(group, key=lambda pair: pair[0])) for group in placed]
    candidates = (groups, [group for group in groups if group])
    return next((candidate for candidate in candidates if fits(candidate, optim, shapes)), None)


def _name_rank(
    save: Save, mp: int, stages: Sequence[_Stage], named: Sequence[Sequence[str]], module: _TensorParallelRank
) -> NamedOptimizer:
    stage, header, optim = stages[mp // save.tp], save.models[mp][0], save.optim(mp)
    groups = fit_stage(named, stage, optim, module.shapes)
    if groups is None:
        raise MismatchError("its states differ in size from those of its stage's first rank.", path=save.path(header))
    tensors = {name: tensor for name, tensor in module.layers.items() if number_layer(name) in stage.layers}
    for key in stage.tied:
        layers = [layer for layer in module.tied.get(key, {}) if _find_writer(stages, key, layer) == mp // save.tp]
        for layer in layers[:1]:
            file = module.tied[key][layer]
            tensors.update({f"{TIED}{key}.{name}": (file, piece) for name, piece in (file.layer or {}).items()})
    return NamedOptimizer(header, optim, groups, module.shapes, tensors, mp)


def _find_writer(stages: Sequence[_Stage], key: str, layer: int) -> int | None:
    """Return the stage that wrote a tied layer's file, by the layers around it.

    Several stages fit if they hold only tied modules; the first use of a module has the file.
    """
    for number, stage in enumerate(stages):
        before = [layer_number for other in stages[:number] for layer_number in other.layers]
        after = [layer_number for other in stages[number + 1 :] for layer_number in other.layers]
        if key in stage.tied and max(before, default=-1) < layer < min(after, default=layer + 1):
            return number
    return None
