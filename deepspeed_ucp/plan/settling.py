"""The readable part of a checkpoint, and how tensor parallelism cuts parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ..errors import CheckpointError, MismatchError, UnsupportedError, shorten
from ..model.index import AtomicIndex
from ..model.storage import COPY, MASTER, MODULE, Atom, AtomKey, ParamStorage, are_alike
from ..model.view import Shapes
from ..tensor_parallel.metadata import INFO, from_universal_info
from ..tensor_parallel.recorded import from_recorded
from ..tensor_parallel.rules import RuleSet, from_arguments
from ..tensor_parallel.settle import Settled, settle


def settle_index(
    index: AtomicIndex,
    rules: Sequence[RuleSet] = (),
    target: Shapes | None = None,
    live: Sequence[RuleSet] = (),
    *,
    names: Collection[str] | None = None,
    degree: int | None = None,
) -> Settled:
    """Find how a checkpoint and a target cut each parameter.

    The user's rules take precedence over the checkpoint's metadata, and these over a live engine's. A buffer with equal
    bytes on all ranks is a replica unless a rule contradicts.

    Args:
        target: saved name → local shape per tensor-parallel rank; None without a target (conversions).
        live: rule sets of a live engine, by saved names.
        names: the parameters to settle; default: everything, or those of the target.
        degree: of a target whose shapes are not known.
    """
    weights = list_weights(index)
    source = {name: tuple(shard.shape for shard in atom.shards) for name, atom in weights.items()}
    buffers = {name: is_replica(index, weights[name]) for name in index.buffers if name in weights}
    wanted = sorted(names if names is not None else source if target is None else target)
    ordered = order_rules(index, rules, live)
    return settle(wanted, source, target, ordered, index.hints, degree=degree, buffers=buffers)


def order_rules(index: AtomicIndex, rules: Sequence[RuleSet], live: Sequence[RuleSet] = ()) -> list[RuleSet]:
    """Return rule sets by precedence: the user's, the checkpoint's, a live engine's.

    Raises:
        UnsupportedError: the checkpoint's metadata is not of DeepSpeed's form, and there are no rules of the user.
    """
    ordered = [*rules, from_recorded(index.recorded)] if index.recorded else list(rules)
    if info := index.hints.get(INFO):
        try:
            ordered.append(from_universal_info(info))
        except MismatchError as error:
            if not rules:
                raise UnsupportedError(f"{error}. Give the model's patterns.", path=index.state_file) from error
            # The user's rules alone count: others may contradict the metadata.
            return [*ordered, RuleSet(INFO, hints=dict.fromkeys(list_names(index), str(error)))]
    if index.hints.get("args"):
        ordered.append(from_arguments())
    return [*ordered, *live]


def list_weights(index: AtomicIndex) -> dict[str, Atom]:
    """Return one atom per name: its master, else the module's tensor, else any."""
    return {key.name: index.atoms[key] for key, _ in _pick_weights(index)}


def _pick_weights(index: AtomicIndex) -> Iterable[tuple[AtomKey, list[ParamStorage]]]:
    """Return keys and storages of :func:`list_weights`, without building the atoms."""
    best: dict[str, tuple[int, AtomKey, list[ParamStorage]]] = {}
    for param, shards in index.atoms.storages.items():
        for rank, state in enumerate((MASTER, MODULE, COPY, *shards[0].states)):
            if matching := [shard for shard in shards if state in shard.states]:
                if param.name not in best or rank < best[param.name][0]:
                    best[param.name] = rank, param.atom(state), matching
                break
    return ((key, shards) for _, key, shards in best.values())


def list_names(index: AtomicIndex) -> set[str]:
    """Return all names in a checkpoint."""
    return {param.name for param in index.atoms.storages} | set(index.aliases)


def list_shapes(index: AtomicIndex) -> Shapes:
    """Return the local shapes of the weights by tensor-parallel rank."""
    return {key.name: tuple([shard.shape for shard in shards]) for key, shards in _pick_weights(index)}


def is_replica(index: AtomicIndex, atom: Atom) -> bool:
    """Return True if all tensor-parallel ranks hold the same bytes by their checksums."""
    if len(atom.shards) == 1:
        return True
    parts = [(shard.shape, shard.list_fragments(atom.state)) for shard in atom.shards]
    if any(len(fragments) != 1 for _, fragments in parts):
        return False
    records = [(shape, part, index.records[part.record]) for shape, (part,) in parts]
    return are_alike((shape, atom.dtype, part.offset, record.nbytes, record.crc) for shape, part, record in records)


def refuse_unreadable(index: AtomicIndex, states: Callable[[str], bool] = lambda _: True) -> None:
    """Raise UnsupportedError if the bytes of a tensor in these states cannot be cut."""
    faults = sorted(index.unreadable.items())
    if listed := [f"{key.param} ({key.state}): {fault}" for key, fault in faults if states(key.state)]:
        raise UnsupportedError(
            f"{index.state_file}: {shorten(listed)}. Tensors that are not contiguous can be resumed in the topology "
            "that saved them, and saved again with contiguous tensors; the others are not in the checkpoint."
        )


def refuse_stateless(index: AtomicIndex) -> None:
    """Raise CheckpointError if there are no optimizer states to continue from."""
    if index.stateless:
        raise CheckpointError(index.stateless)


def describe_irregular(index: AtomicIndex) -> str:
    """Describe saved optimizer states that cannot be resharded, or return ""."""
    listed = [f"{key.param}.{key.state} ({description})" for key, description in sorted(index.irregular.items())]
    if not listed:
        return ""
    return (
        f"{index.optimizer or 'The saved optimizer'} keeps states that are not element-wise, or not in the files, "
        f"and cannot be united or cut for another topology: {shorten(listed)}."
    )
