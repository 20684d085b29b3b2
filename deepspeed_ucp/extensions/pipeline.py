"""Tied modules of a :class:`~deepspeed.pipe.PipelineModule`."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import TiedLayerSpec

from ..engine import Instance, Target
from ..model import strip_compiled
from .registry import Extension


class TiedStages(Extension):
    """An engine with a pipeline.

    A :class:`~deepspeed.pipe.PipelineModule` builds a ``TiedLayerSpec`` once per stage that uses its key and registers
    it as ``tied_modules.<key>``.
    """

    def find_instances(self, target: Target) -> dict[str, Instance]:
        """Return the parameters and buffers of tied modules that other stages have too, by name."""
        module = target.engine.module
        instances = {}
        for tie in _list_ties(module):
            stages = sorted(tie.stages)
            for name, tensor in (*tie.copy.named_parameters(), *tie.copy.named_buffers()):
                instance = Instance(stages.index(module.stage_id), len(stages), id(tensor) in tie.tied)
                instances[strip_compiled(f"{tie.name}.{name}")] = instance
        return {name: instance for name, instance in instances.items() if instance.count > 1}

    def find_unfiled(self, target: Target) -> set[str]:
        """Return the parameters of tied modules that DeepSpeed's load of a pipeline's weights does not restore.

        A use with a ``forward_fn`` has no layer file. After the files are read, a tied weight is copied from the first
        stage that uses the module (``_synchronize_tied_weights``); other parameters keep their stage's values.
        """
        module, names = target.engine.module, set()
        for tie in _list_ties(module):
            for name, param in tie.copy.named_parameters():
                source = min(tie.stages) if id(param) in tie.tied else module.stage_id
                if source not in tie.filed:
                    names.add(strip_compiled(f"{tie.name}.{name}"))
        return names


class _Tie(NamedTuple):
    """A tied module on this stage.

    Attributes:
        name: its name in the pipeline.
        copy: this stage's copy.
        stages: stages that use the module.
        filed: stages that write a layer file of it.
        tied: ids of the parameters that DeepSpeed keeps equal.
    """

    name: str
    copy: torch.nn.Module
    stages: set[int]
    filed: set[int]
    tied: set[int]


def _list_ties(module: Any) -> Iterator[_Tie]:
    for key, copy in module.tied_modules.items():
        specs = {i: spec for i, spec in enumerate(module._layer_specs) if isinstance(spec, TiedLayerSpec)}
        uses = [(module.stage_owner(i), spec.forward_fn is None) for i, spec in specs.items() if spec.key == key]
        stages, filed = {stage for stage, _ in uses}, {stage for stage, has_file in uses if has_file}
        tied = {id(attrgetter(attribute)(copy)) for attribute in module.tied_weight_attrs[key]}
        yield _Tie(f"tied_modules.{key}", copy, stages, filed, tied)
