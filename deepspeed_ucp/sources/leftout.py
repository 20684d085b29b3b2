"""What ``ds_to_universal`` leaves out, as far as the copied model states have it: buffers and frozen parameters."""

from __future__ import annotations

from ..atoms import MODULE, are_alike
from ..errors import MismatchError, shorten
from ..patterns import from_universal_info
from ..patterns.regex import Matcher
from .atomic.headers import UniversalHeaders
from .builder import Builder
from .hints import INFO
from .module import add_modules
from .ranks import ModelRank
from .zero import add_frozen_zero3


def add_rest(builder: Builder, part: UniversalHeaders, optimized: set[str], notes: list[str]) -> str:
    """Buffers, frozen parameters and ties, from the model states as far as these hold them whole.

    Returns:
        Why some may be missing.
    """
    save = part.save
    if not save.is_pipeline and save.tp == save.pp == 1:
        if part.is_sharded:
            add_frozen_zero3(builder, ModelRank(), save.models[0], optimized)
        add_modules(builder, save, optimized)
        return ""
    builder.aliases = dict(save.model(0).shared)
    if save.is_pipeline:
        dropped = "DeepSpeed's ds_to_universal does not keep a pipeline's buffers and frozen parameters"
        notes.append(f"{dropped}; a load leaves them as the new model has them")
        return dropped
    lost = _add_replicas(builder, part, optimized | set(builder.aliases))
    if not lost:
        return ""
    dropped = "DeepSpeed's ds_to_universal does not unite the tensor-parallel shards of frozen parameters and buffers"
    notes.append(f"{dropped}: {shorten(lost)}; a load leaves them as the new model has them")
    return dropped


def _add_replicas(builder: Builder, part: UniversalHeaders, others: set[str]) -> list[str]:
    """Buffers that every tensor-parallel rank has alike, by their checksums; returns what cannot be had whole."""
    ranks = [part.save.model(tp).module or {} for tp in range(part.save.tp)]
    buffers = set(part.save.model(0).buffers)
    lost = [name for name in part.save.model(0).frozen_shapes if name not in others]
    for name, piece in ranks[0].items():
        if name in others or (part.is_sharded and name not in buffers):
            continue
        held = [rank[name] for rank in ranks if name in rank]
        if name in buffers and len(held) == len(ranks) and are_alike(each.contents for each in held):
            builder.add(ModelRank(), name, MODULE, part.save.main, piece)
        elif name not in lost:
            lost.append(name)
    return lost


def _read_shared(part: UniversalHeaders) -> tuple[Matcher, ...]:
    """What the checkpoint says to be alike on all pipeline stages."""
    try:
        return from_universal_info(part.save.model(0).hints.get(INFO)).shared
    except MismatchError:
        return ()


def tell_copies(part: UniversalHeaders) -> list[str]:
    """Parameters of several pipeline stages: the converter joins all stages' files under one name, the last one counts.

    Those that the checkpoint says to be alike are taken from the first stage.
    """
    save = part.save
    stages: dict[str, int] = {}
    for stage in range(save.pp):
        for name in save.model(stage * save.tp).owned:
            stages[name] = stages.get(name, 0) + 1
    shared = _read_shared(part)
    copies = sorted(n for n, held in stages.items() if held > 1 and not any(match(n) for match in shared))
    told = "of parameters that several pipeline stages hold the converter kept one stage's values, whichever it was"
    return [f"{told}: {shorten(copies)}"] if copies else []
