"""Saved parameters under the live model's names, by the user's ``rename`` rules."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..errors import MismatchError, shorten
from ..model.index import AtomicIndex
from ..model.view import Shapes
from ..plan.match import Adaptation
from ..plan.settling import list_names, list_shapes
from ..tensor_parallel.facts import Facts
from ..tensor_parallel.rename import find_idle
from ..tensor_parallel.rules import RuleSet, find_renamed, list_renames
from .registry import Extension

logger = logging.getLogger("deepspeed_ucp")


class Renames(Extension):
    """The user's ``rename`` rules."""

    def adapt(self, adaptation: Adaptation) -> None:
        index, view, rules = adaptation.index, adaptation.view, adaptation.rules
        renamed = apply_renames(index, view.shapes, rules, view.aliases)
        adaptation.view = replace(view, renamed=renamed)
        reported = [rule_set for rule_set in rules if rule_set.reported]
        if adaptation.log and (idle := find_idle(list_names(adaptation.saved), list_renames(reported))):
            logger.info("patterns: %s", shorten(idle))


def apply_renames(
    index: AtomicIndex, live: Shapes, rules: Sequence[RuleSet], aliases: Iterable[str] = ()
) -> dict[str, str]:
    """Map live names to the saved parameters that ``rename`` rules give them.

    A rule applies if the live model does not have the saved name. One set of rules therefore serves both directions,
    and a run that resumes under its own names.

    Args:
        live: local shapes of the live model's tensors, by tensor-parallel rank.

    Raises:
        MismatchError: the rules are not of this checkpoint, or the model holds matrices transposed.
        ConfigError: a rule names a group or a variable that does not exist.
    """
    saved = list_shapes(index)
    renamed = find_renamed(list_names(index), {*live, *aliases}, rules)
    if renamed:
        for rule_set in (rule_set for rule_set in rules if rule_set.renames):
            rule_set.check(Facts.of(index.hints, saved))
    transposed = []
    for new, old in renamed.items():
        before, after = saved.get(old, ()), live.get(new, ())
        if before != after and len(before) == len(after) == 1 and len(before[0]) == 2 and before[0][::-1] == after[0]:
            transposed.append(f"{new} {after[0]}, saved {before[0]}")
    if transposed:
        raise MismatchError(
            f"rename: {shorten(transposed)}: the model holds its matrices transposed, as Hugging Face's GPT-2 does "
            "(Conv1D); no rule transposes. Take a model of linear layers, such as GPTBigCode."
        )
    return renamed
