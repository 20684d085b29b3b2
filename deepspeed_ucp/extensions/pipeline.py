"""Tied modules of a :class:`~deepspeed.pipe.PipelineModule`."""

from __future__ import annotations

from operator import attrgetter

from deepspeed.pipe import TiedLayerSpec

from ..engine.base import Target
from ..engine.parallel import Instance
from ..model.storage import strip_compiled
from .registry import Extension


class TiedStages(Extension):
    """An engine with a pipeline.

    A :class:`~deepspeed.pipe.PipelineModule` builds a ``TiedLayerSpec`` once per stage that uses its key and registers
    it as ``tied_modules.<key>``.
    """

    def find_instances(self, target: Target) -> dict[str, Instance]:
        """Return this stage's parameters and buffers of tied modules, by name.

        A use with a ``forward_fn`` has no layer file. After DeepSpeed's load has read the files, a tied weight is
        copied from the first stage that uses the module (``_synchronize_tied_weights``); other parameters keep their
        stage's values. A pipeline with experts saves the ranks' whole modules instead of layers.
        """
        module, instances = target.engine.module, {}
        specs = {i: spec for i, spec in enumerate(module._layer_specs) if isinstance(spec, TiedLayerSpec)}
        for key, copy in module.tied_modules.items():
            uses = [(module.stage_owner(i), spec.forward_fn is None) for i, spec in specs.items() if spec.key == key]
            stages, filed = sorted({stage for stage, _ in uses}), {stage for stage, has_file in uses if has_file}
            tied = {id(attrgetter(attribute)(copy)) for attribute in module.tied_weight_attrs[key]}
            for name, tensor in (*copy.named_parameters(), *copy.named_buffers()):
                source = stages[0] if id(tensor) in tied else module.stage_id
                instances[strip_compiled(f"tied_modules.{key}.{name}")] = Instance(
                    stages.index(module.stage_id),
                    len(stages),
                    id(tensor) in tied,
                    source in filed or getattr(target.engine, "has_moe_layers", False),
                )
        return instances
