"""Saved parameters under the live model's names, by the user's ``rename`` rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from ..errors import MismatchError, shorten
from ..model import AtomicIndex
from ..model.view import Shapes
from ..tensor_parallel import Facts, Rename, RuleSet, list_renames, rename_names
from .settling import list_weights


def apply_renames(
    index: AtomicIndex, live: Shapes, rules: Sequence[RuleSet], aliases: Iterable[str] = ()
) -> dict[str, str]:
    """Return the saved name of each live name that ``rename`` rules give to a saved parameter.

    A rule applies if the live model does not have the saved name. One set of rules therefore serves both directions,
    and a run that resumes under its own names.

    Args:
        live: local shapes of the live model's tensors, by tensor-parallel rank.
        aliases: further names of these tensors.

    Raises:
        MismatchError: the rules are not of this checkpoint, or the model holds matrices transposed.
        ConfigError: a rule names a group or a variable that does not exist.
    """
    renames = list_renames(rules)
    if not renames:
        return {}
    saved = list_shapes(index)
    renamed = find_renamed(list_names(index), {*live, *aliases}, renames)
    if renamed:
        for rule_set in (rule_set for rule_set in rules if rule_set.renames):
            rule_set.check(Facts.of(index.model.hints, saved))
    odd = []
    for new, old in renamed.items():
        mine, theirs = saved.get(old, ()), live.get(new, ())
        if mine != theirs and len(mine) == len(theirs) == 1 and len(mine[0]) == 2 and mine[0][::-1] == theirs[0]:
            odd.append(f"{new} {theirs[0]}, saved {mine[0]}")
    if odd:
        raise MismatchError(
            f"rename: {shorten(odd)}: the model holds its matrices transposed, as Hugging Face's GPT-2 does (Conv1D); "
            "no rule transposes. Take a model of linear layers, such as GPTBigCode."
        )
    return renamed


def find_renamed(saved: Set[str], live: Set[str], renames: Sequence[Rename]) -> dict[str, str]:
    """Return live name → saved name of the saved names that are not live and that rules give a live one."""
    return {new: old for old, new in rename_names(sorted(saved - live), renames, live).items() if new in live}


def list_names(index: AtomicIndex) -> set[str]:
    """Return all names in a checkpoint."""
    return {param.name for param in index.stored.atoms.storages} | set(index.model.aliases)


def list_shapes(index: AtomicIndex) -> Shapes:
    """Return the local shapes of the weights by tensor-parallel rank."""
    return {name: tuple(shard.shape for shard in atom.shards) for name, atom in list_weights(index).items()}
