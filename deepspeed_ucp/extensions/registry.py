"""Special cases of a load, one module each, imported if a gate in REGISTRY opens.

The common code knows the classes below alone, and calls the hooks of the active extensions. A hook that a class does
not override does nothing. The arguments are ``Any`` because this module is below the classes that the hooks get.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


class SaveExtension:
    """A special case of a save (:class:`deepspeed_ucp.formats.deepspeed.save.Save`).

    The hooks are listed in the order of their calls: for a state file (:func:`find_for_tree`), then for a save and its
    index (:func:`find_for_save`). A save has its own instances, which may keep state between the hooks.

    Attributes:
        is_uneven: data-parallel ranks hold different parameters.
    """

    name = ""
    is_uneven = False

    # -- a state file

    def read_facts(
        self, tree: Mapping[Any, Any], read: Callable[[str, Callable[[Any], Any]], Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a state file's facts and its writer's ranks; ``read(key, parse)`` helps."""
        return {}, {}

    def describe_own_files(self, tree: Mapping[str, Any], path: str) -> dict[str, Any]:
        """Return facts of model states to compare with :meth:`Extension.describe_engine`."""
        return {}

    # -- the files of a save

    def open_save(self, save: Any, find: Callable[[str, Iterable[Any]], Any] | None) -> None:
        """Add the names of further files, and complete the first headers.

        Args:
            find: returns the first readable header of a role's keys; None if the headers are complete.
        """

    def name_files(self, save: Any) -> Mapping[str, str]:
        """Map required files to a reason why DeepSpeed may omit them, or an empty text."""
        return {}

    def arrange(self, save: Any, headers: Mapping[str, Any]) -> list[Any]:
        """Store the headers of further files (name → header); return findings."""
        return []

    def verify_save(self, save: Any, comm: Any) -> list[Any]:
        """Return findings about a save whose headers are read and compared (collective)."""
        return []

    # -- the index of a save

    def list_group_files(self, save: Any, mp: int, group: int) -> list[Any]:
        """Return a group's optimizer files; empty for its model-parallel rank's files."""
        return []

    def find_shapes(self, save: Any, mp: int, name: str) -> set[Any]:
        """Return the shapes that further files give a parameter."""
        return set()

    def assign_group(self, save: Any, mp: int, number: int, group: Any) -> list[Any]:
        """Return the shares of a param group; empty if all ranks hold all parameters."""
        return []

    def name_optimizers(self, save: Any, naming: Any, live: Any) -> list[Any]:
        """Name parameters by ZeRO-0 optimizer if a model-parallel rank has several."""
        return []

    def add_optimizers(self, builder: Any, parts: Any, owned: Any) -> bool:
        """Add the states of several optimizers; return False to leave this to the caller."""
        return False

    def find_ties(self, save: Any, header: Any, module: Mapping[str, Any]) -> dict[str, str]:
        """Return further ties in model states, alias → name."""
        return {}

    def add_tensors(self, builder: Any, optimized: set[str], tied: Collection[str]) -> None:
        """Add tensors of further files; ``tied`` are names missing in pipeline states."""

    def complete_index(self, index: Any, builder: Any) -> Any:
        """Add further facts to an index, such as state that DeepSpeed fails to restore."""
        return index


class Extension:
    """A special case of an engine, a load or parameters' names.

    The hooks are listed in the order of their calls: for an engine (:func:`find_for_engine`), then for a load
    (:func:`find_for_load`), which has the engine's instances too. Instances may keep state between these hooks. The
    hooks about names have new instances.
    """

    name = ""
    row: SpecialCase | None = None

    # -- an engine (:class:`deepspeed_ucp.engine.base.Target`)

    def describe_engine(self, engine: Any) -> dict[str, Any]:
        """Return facts about an engine to compare with its saved files."""
        return {}

    def find_shares(self, target: Any) -> Mapping[str, Any]:
        """Map distributed parameters and buffers to their ``engine.parallel.Share``."""
        return {}

    def complete_target(self, target: Any) -> None:
        """Complete the description of an engine whose buffers have been collected."""

    def list_keys(self, target: Any) -> dict[str, str]:
        """Map state-dict keys to the parameter and buffer names that differ from them."""
        return {}

    def find_instances(self, target: Any) -> dict[str, Any]:
        """Map this stage's tied tensors to their ``engine.parallel.Instance``."""
        return {}

    def list_unknown(self, target: Any) -> Iterable[str]:
        """Describe features with which DeepSpeed's load is not known to be right."""
        return ()

    def complete_extras(self, target: Any, extras: list[Any]) -> list[Any]:
        """Return the buffers of tensors without optimizer state, changed or extended."""
        return extras

    def prepare(self, target: Any) -> None:
        """Prepare the engine for a load."""

    def commit(self) -> None:
        """Finish the fill: everything is verified, and the live buffers have their values."""

    def open_masters(self, target: Any, number: int) -> AbstractContextManager[Any]:
        """Context manager in which the masters of ``target.flats[number]`` are in memory."""
        return nullcontext()

    def relink(self, target: Any) -> None:
        """Renew DeepSpeed's references to optimizer states after new ones were attached."""

    def discard(self) -> None:
        """Release the resources of a load, also after an error."""

    # -- a load (:class:`deepspeed_ucp.load.context.LoadContext`); any of ``in_engine``, ``in_rules``, ``in_load``

    def refuse(self, context: Any, index: Any, target: Any) -> None:
        """Raise UcpError if the checkpoint cannot be loaded into the engine."""

    def adapt(self, adaptation: Any) -> None:
        """Adapt a checkpoint and an engine to each other (``plan.match.Adaptation``)."""

    def read_more(self, context: Any, fill_plan: Any) -> None:
        """Log changes, and read further data, before the engine changes (collective)."""

    def change_engine(self, context: Any, target: Any, fill_plan: Any) -> None:
        """Change the engine before its fill; an error blocks the engine (collective)."""

    def describe_differences(self, target: Any) -> str:
        """Describe values of the loaded engine that differ from the saved ones, if any."""
        return ""

    # -- parameters' names, of an index, a model or a planned run (:func:`find_for_names`)

    def fold_faults(self, saved: Iterable[str], live: Iterable[str], faults: Any) -> tuple[Any, str]:
        """Merge name differences that have one cause; return them and a remedy, if any."""
        return faults, ""

    def cuts_groups(self, names: Iterable[str]) -> bool:
        """Return True if DeepSpeed's cut of a param group may depend on the degrees."""
        return False

    def check_degrees(self, index: Any, degrees: Any) -> list[str]:
        """Refuse a planned run's degrees; return reasons why only a load can decide."""
        return []

    def count_fused(self, tree: Mapping[Any, Any], shape: Any, path: str) -> int:
        """Return the number of atoms in a parameter's universal file; 0 if it is only one."""
        return 0

    def make_upstream_keys(self, name: str, count: int) -> dict[str, Any]:
        """Return the entries by which DeepSpeed cuts ``count`` atoms, if any."""
        return {}


def _never(*_: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class SpecialCase:
    """A special case, and the gates that decide whether its module is imported.

    Attributes:
        source: module of this package, and class.
        in_save: gate of a save whose first headers have been read.
        in_load: gate of a load's context, index and target.
        keys: gate of a state file: one of these top-level keys is set.
        fused_keys: the same of a parameter's file in DeepSpeed's universal format.
        in_names: gate of an index or a model, by its parameters' names.
        in_degrees: gate of a planned run.
        sections, flags: parts of a ds_config that the headers keep.
        facts: default values of :meth:`Extension.describe_engine`, for engines and files without the case.
    """

    name: str
    source: str
    in_save: Callable[[Any], bool] = _never
    in_engine: Callable[[Any], bool] = _never
    in_rules: Callable[[Any], bool] = _never
    in_load: Callable[[Any, Any, Any], bool] = _never
    keys: tuple[str, ...] = ()
    fused_keys: tuple[str, ...] = ()
    in_names: Callable[[Collection[str]], bool] = _never
    in_degrees: Callable[[Any], bool] = _never
    sections: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """Import the module and return a new instance."""
        module, _, kind = self.source.partition(":")
        extension = getattr(import_module(f"{__package__}.{module}"), kind)()
        extension.name, extension.row = self.name, self
        return extension


# -- gates -------------------------------------------------------------------------------------------------------------


def _saves_swap_files(save: Any) -> bool:
    section = (save.first[0].config.get("zero_optimization") or {}).get("offload_optimizer")
    return isinstance(section, dict) and section.get("device") == "nvme"


def _swaps_to_nvme(engine: Any) -> bool:
    zero = engine._config.zero_config
    sections = zero.offload_optimizer, zero.offload_param
    is_on_nvme = any(getattr(section, "device", None) == "nvme" for section in sections)
    return is_on_nvme and int(engine.zero_optimization_stage()) == 3


def _has_own_state_dict(engine: Any) -> bool:
    base = sys.modules["torch"].nn.Module

    def is_custom(module: Any) -> bool:
        kind, hooks = type(module), (module._state_dict_hooks, module._state_dict_pre_hooks)
        methods = ("state_dict", "_save_to_state_dict")
        overridden = any(getattr(kind, method) is not getattr(base, method) for method in methods)
        return overridden or "state_dict" in vars(module) or any(hooks)

    return any(map(is_custom, engine.module.modules()))


def _is_pretrained(_: Any, __: Any, target: Any) -> bool:
    """Return True for a model of transformers or PEFT outside of a pipeline."""
    names = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}
    kinds = tuple(getattr(sys.modules[module], kind) for module, kind in names.items() if module in sys.modules)
    return target.parallel.pp == 1 and any(
        isinstance(child, kinds) for _, child in target.engine.module.named_modules()
    )


def _has_experts(save: Any) -> bool:
    model = save.first[0].model
    return model is not None and any(map(model.facts.get, ("experts", "placements")))


def _names_experts(names: Collection[str]) -> bool:
    return any("experts." in name for name in names)


REGISTRY = [
    SpecialCase(
        "pipeline",
        "layers:SavedLayers",
        in_save=lambda save: save.first[0].model is not None and save.first[0].model.module is None,
    ),
    SpecialCase(
        "pipeline",
        "pipeline:TiedStages",
        in_engine=lambda engine: any(kind.__name__ == "PipelineModule" for kind in type(engine.module).__mro__),
    ),
    SpecialCase(
        "experts",
        "experts.saved:SavedExperts",
        in_save=_has_experts,
        keys=("num_experts", "ds_autoep_layers", "autoep_layers", "folding"),
        sections=("expert_parallel",),
        flags=("use_data_before_expert_parallelism",),
        facts={"experts per layer": [], "AutoEP placement": []},
    ),
    SpecialCase(
        "experts", "experts.engine:LiveExperts", in_engine=lambda engine: getattr(engine, "has_moe_layers", False)
    ),
    SpecialCase("nvme", "swapped:Swapped", in_save=_saves_swap_files),
    SpecialCase("seal", "seal:SealedSave", in_save=lambda save: "ucp_seal.json" in save.where.entries),
    SpecialCase("nvme", "nvme:Nvme", in_engine=_swaps_to_nvme),
    SpecialCase(
        "muon",
        "muon:MuonMomentum",
        in_engine=lambda engine: bool(getattr(engine.optimizer, "muon_momentum_buffer_partitioned_groups_flat", None)),
    ),
    SpecialCase("state_dict", "statedict:ModuleStateDict", in_engine=_has_own_state_dict),
    SpecialCase(
        "custom load", "custom_load:CustomLoad", in_load=lambda context, _, __: context.custom_load_fn is not None
    ),
    SpecialCase("hugging face", "huggingface:HuggingFace", in_load=_is_pretrained),
    SpecialCase(
        "experts",
        "experts.index:IndexedExperts",
        fused_keys=("is_expert_param",),
        in_names=_names_experts,
        in_degrees=lambda degrees: degrees.ep > 1,
        in_load=lambda _, index, __: _names_experts([param.name for param in index.atoms.storages]),
    ),
    SpecialCase("rename", "rename:Renames", in_rules=lambda rules: any(rule_set.renames for rule_set in rules)),
    SpecialCase("resize", "resize:ResizedRows", in_rules=lambda rules: any(rule_set.resizes for rule_set in rules)),
]
"""All special cases. Hooks run in this order."""


def find_for_tree(tree: Mapping[Any, Any]) -> list[SaveExtension]:
    """Return new extensions for the facts in a state file."""
    return [row.make() for row in REGISTRY if any(tree.get(key) for key in row.keys)]


def find_for_fused(tree: Mapping[Any, Any]) -> list[Extension]:
    """Return new extensions for a parameter's file in DeepSpeed's universal format."""
    return [row.make() for row in REGISTRY if any(tree.get(key) for key in row.fused_keys)]


def find_for_save(save: Any, find: Callable[[str, Iterable[Any]], Any] | None = None) -> list[SaveExtension]:
    """Open a save whose first headers have been read: return new extensions for it.

    Args:
        find: see :meth:`SaveExtension.open_save`; a header that it completes may open the gates of later rows.
    """
    extensions: list[SaveExtension] = []
    for row in REGISTRY:
        if row.in_save(save):
            extensions.append(row.make())
            extensions[-1].open_save(save, find)
    return extensions


def find_for_engine(engine: Any) -> list[Extension]:
    """Return new extensions for a DeepSpeed engine."""
    return [row.make() for row in REGISTRY if row.in_engine(engine)]


def find_for_names(names: Collection[str], degrees: Any = None) -> list[Extension]:
    """Return new extensions for parameter names, and for a planned run's degrees."""
    return [row.make() for row in REGISTRY if row.in_names(names) or (degrees and row.in_degrees(degrees))]


def find_for_load(context: Any, index: Any, target: Any, rules: Any) -> list[Extension]:
    """Return a load's extensions in registry order: the engine's, and new ones."""
    engine_rows = [extension.row for extension in target.extensions]
    order = {id(row): at for at, row in enumerate(REGISTRY)}
    active = (row for row in REGISTRY if row.in_rules(rules) or row.in_load(context, index, target))
    extensions = [*target.extensions, *(row.make() for row in active if row not in engine_rows)]
    return sorted(extensions, key=lambda extension: order.get(id(extension.row), -1))


def name_active(extensions: Iterable[Extension | SaveExtension], more: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of active extensions and ``more`` once, in registry order."""
    active = {*more, *(extension.name for extension in extensions)}
    return tuple(dict.fromkeys(row.name for row in REGISTRY if row.name in active))
