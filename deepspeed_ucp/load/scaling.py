"""LoRA of another rank: which factor leaves the product of its matrices as it was, and how moments follow it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..atoms import COPY, MASTER, MODULE, AtomicIndex
from ..comm import Comm
from ..errors import MismatchError, UcpError, shorten
from ..patterns import Resized, RuleSet
from ..patterns.adapters import read_live
from ..plan.wants import Scaling, Wants
from ..sources.foreign.adapter import find_scaling, read_config
from ..targets import Target
from ..targets.optimizer import find_degrees
from .states import WEIGHTS_ONLY, OptimizerMatch


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """What is told of the saved run's adapter.

    Attributes:
        config: PEFT's ``adapter_config.json``; empty where there is none.
        fault: why, in words.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""

    def scale_all(self, resizes: MutableMapping[str, Resized], names: Mapping[str, str], target: Target) -> None:
        """Find the factors that the adapters' configurations tell: the saved scaling by the live one's.

        Args:
            resizes: by saved name what becomes of this rank's parameters; it is changed.
            names: live name → saved name.

        Raises:
            MismatchError: one is not told.
        """
        adapters = {found.adapter for name in names.values() if (found := read_live(name)) and found.kind}
        for live, saved in names.items():
            if (how := resizes.get(saved)) and how.scale is None:
                is_told = self.config and len(adapters) == 1
                before = find_scaling(self.config, saved, how.saved) if is_told else None
                now = target.find_scaling(live)
                if not before or not now:
                    told = self.fault.rstrip(".") or "the live model has no LoRA of PEFT's there"
                    told = f"adapters {shorten(sorted(adapters))} have one configuration" if len(adapters) > 1 else told
                    raise MismatchError(
                        f'{live}: "scale": "lora" is the factor of the saved product (alpha / rank) by that of the '
                        f'live one: {told}. Give it: "scale": "<saved>/<live>".'
                    )
                resizes[saved] = replace(how, scale=before / now)


def read_adapter(index: AtomicIndex, rules: Iterable[RuleSet], comm: Comm) -> SavedAdapter:
    """The saved adapter's configuration, from beside the checkpoint, where a rule asks for it; collective then."""
    if not any(each.factor is None for one in rules for each in one.resizes):
        return SavedAdapter()

    def read() -> SavedAdapter:
        try:
            return SavedAdapter(read_config(None, os.path.dirname(index.run.state_file)))
        except (UcpError, OSError) as error:
            return SavedAdapter(fault=str(error) if isinstance(error, UcpError) else f"adapter_config.json: {error}")

    return comm.once(read)


def follow_gradients(wants: Wants, optimizer: OptimizerMatch) -> list[Scaling]:
    """The scalings of what a rank wants, those of states by the factor that their parameter's gradients get.

    Raises:
        MismatchError: how a state follows these is not known.
    """
    found, degrees = [], dict[tuple[int, Any], dict[str, int]]()
    for each in wants.scalings:
        state, number = wants.buffers[each.buffer].slot
        if state in (MASTER, MODULE, COPY):
            found.append(each)
            continue
        flat, target = optimizer.target.flats[number], optimizer.target
        if (kind := (flat.group, flat.dtype)) not in degrees:
            hyper = optimizer.match.hyper.get(flat.group, {})
            degrees[kind] = find_degrees(target.optimizer, target.param_group(flat), hyper, flat.holder)
        if (degree := degrees[kind].get(state)) is None:
            raise MismatchError(
                f"resize: {state} of {flat.name} would have to follow the scale of its "
                f"weight, and how {type(target.optimizer).__name__} makes it is not known. Give the new LoRA the "
                f"alpha by which the scale is 1, or {WEIGHTS_ONLY}."
            )
        found.append(replace(each, factor=each.factor**-degree))
    return found
