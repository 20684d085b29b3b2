"""The special cases of a load: one module each, which is imported only if its gate in :data:`REGISTRY` is open.

The common code knows :class:`Extension` alone, and calls the hooks of the active extensions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any


class Extension:
    """One special case. A hook that a class does not override does nothing.

    A save, an engine and a load have an instance each, which may keep state. The hooks in the order of a resume:

    1. of an engine (:func:`find_for_engine`): :meth:`complete_target`
    2. of a save (:func:`find_for_save`): :meth:`list_hosts`, :meth:`add_files`, :meth:`verify_save`
    3. of an engine and its load: :meth:`prepare`, :meth:`complete_extras`, :meth:`commit`, :meth:`open_masters`,
       :meth:`relink`; at the end, and after an error, :meth:`discard`

    Attributes:
        name: of its row in the registry.
    """

    name = ""

    # -- a save (:class:`deepspeed_ucp.formats.deepspeed.save.Save`) and its index

    def list_hosts(self, save: Any, comm: Any) -> dict[str, list[str]]:
        """Return the names of the files that each machine had when the save was written (collective)."""
        return {}

    def add_files(self, save: Any) -> list[Any]:
        """Add files without a header to a save whose headers are arranged; return findings."""
        return []

    def verify_save(self, save: Any, comm: Any) -> list[Any]:
        """Return findings about a save whose headers have been read and compared (collective)."""
        return []

    # -- an engine (:class:`deepspeed_ucp.engine.Target`)

    def complete_target(self, target: Any) -> None:
        """Complete the description of an engine whose buffers have been collected."""

    def list_keys(self) -> dict[str, str]:
        """Map keys of the module's state dict to names of parameters or buffers, if they differ."""
        return {}

    def prepare(self, target: Any) -> None:
        """Prepare the engine for a load."""

    def complete_extras(self, target: Any, extras: list[Any]) -> list[Any]:
        """Return the tensors without optimizer, completed."""
        return extras

    # -- a load (:class:`deepspeed_ucp.load.context.LoadContext`)

    def find_renamed(self, saved: Any, live: Any, rules: Any) -> dict[str, str]:
        """Return live name → saved name of the saved names to which the user's rules give a live name."""
        return {}

    def refuse(self, job: Any, index: Any, target: Any) -> None:
        """Raise UcpError if the checkpoint cannot be loaded into the engine."""

    def adapt(self, adaptation: Any) -> None:
        """Adapt a checkpoint and an engine (:class:`deepspeed_ucp.plan.match.Adaptation`) to each other."""

    def log_changes(self, index: Any, resized: Any, *, with_states: bool) -> None:
        """Log differences of the engine's tensors from the saved ones, on rank 0."""

    def read_more(self, job: Any, work: Any) -> None:
        """Read what no rank wants for its buffers alone (collective)."""

    def change_engine(self, job: Any, target: Any, work: Any) -> None:
        """Change the engine before its buffers are filled; an error marks it as unusable (collective)."""

    def commit(self) -> None:
        """Finish the fill: everything is verified, and the live buffers have their values."""

    def open_masters(self, target: Any, number: int) -> AbstractContextManager[Any]:
        """Context manager in which the masters of ``target.flats[number]`` are in memory."""
        return nullcontext()

    def relink(self, target: Any) -> None:
        """Adapt the engine to new optimizer states."""

    def describe_differences(self) -> str:
        """Describe values of the loaded engine that differ from the saved ones; empty without any."""
        return ""

    def discard(self) -> None:
        """Release what a load needed, also if it failed."""


def _never(*_: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Row:
    """A special case, and the gates that decide whether its module is imported.

    Attributes:
        name: for the report of a load.
        source: module of this package, and class.
        in_save: gate of a save whose first headers have been read.
        in_engine: gate of a DeepSpeed engine.
        in_rules: gate of the user's sets of rules.
        in_load: gate of a load's context, index and target.
    """

    name: str
    source: str
    in_save: Callable[[Any], bool] = _never
    in_engine: Callable[[Any], bool] = _never
    in_rules: Callable[[Any], bool] = _never
    in_load: Callable[[Any, Any, Any], bool] = _never

    def make(self) -> Extension:
        """Import the module and return a new instance."""
        module, _, kind = self.source.partition(":")
        extension: Extension = getattr(import_module(f"{__package__}.{module}"), kind)()
        extension.name = self.name
        return extension


# -- gates -------------------------------------------------------------------------------------------------------------


def _is_sealed(save: Any) -> bool:
    return "ucp_seal.json" in save.where.entries


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


def _keeps_momentum(engine: Any) -> bool:
    return bool(getattr(engine.optimizer, "muon_momentum_buffer_partitioned_groups_flat", None))


def _renames(rules: Iterable[Any]) -> bool:
    return any(rule_set.renames for rule_set in rules)


def _resizes(rules: Iterable[Any]) -> bool:
    return any(rule_set.resizes for rule_set in rules)


def _is_pretrained(_: Any, __: Any, target: Any) -> bool:
    """Return True for a model of transformers or PEFT, unless a pipeline distributes it."""
    names = {"transformers.modeling_utils": "PreTrainedModel", "peft.peft_model": "PeftModel"}
    kinds = tuple(getattr(sys.modules[module], kind) for module, kind in names.items() if module in sys.modules)
    return target.place.pp == 1 and any(isinstance(child, kinds) for _, child in target.engine.module.named_modules())


def _loads_by_function(job: Any, *_: Any) -> bool:
    return job.arguments.custom_load_fn is not None


def _holds_experts(_: Any, index: Any, __: Any) -> bool:
    return any(".experts." in param.name for param in index.stored.atoms.storages)


REGISTRY = [
    Row("nvme", "swapped:Swapped", in_save=_saves_swap_files),
    Row("seal", "seal:SealedSave", in_save=_is_sealed),
    Row("nvme", "nvme:Nvme", in_engine=_swaps_to_nvme),
    Row("muon", "muon:MuonMomentum", in_engine=_keeps_momentum),
    Row("state_dict", "statedict:ModuleStateDict", in_engine=_has_own_state_dict),
    Row("custom load", "custom_load:CustomLoad", in_load=_loads_by_function),
    Row("hugging face", "huggingface:HuggingFace", in_load=_is_pretrained),
    Row("experts", "autoep:FusedExperts", in_load=_holds_experts),
    Row("rename", "rename:Renames", in_rules=_renames),
    Row("resize", "resize:ResizedRows", in_rules=_resizes),
]
"""All special cases. Hooks run in this order."""


def find_for_save(save: Any) -> list[Extension]:
    """Return new extensions for a save whose first headers have been read."""
    return [row.make() for row in REGISTRY if row.in_save(save)]


def find_for_engine(engine: Any) -> list[Extension]:
    """Return new extensions for a DeepSpeed engine."""
    return [row.make() for row in REGISTRY if row.in_engine(engine)]


def find_for_rules(rules: Any) -> list[Extension]:
    """Return new extensions for the user's sets of rules."""
    return [row.make() for row in REGISTRY if row.in_rules(rules)]


def find_for_load(job: Any, index: Any, target: Any, rules: Any) -> list[Extension]:
    """Return the extensions of a load: the engine's, and new ones for the user's rules and the load's context."""
    known = {extension.name: extension for extension in target.extensions}
    active = (row for row in REGISTRY if row.name in known or row.in_rules(rules) or row.in_load(job, index, target))
    return [known.get(row.name) or row.make() for row in active]


def name_active(extensions: Iterable[Extension], more: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names of active extensions, and more names, each once, in the order of the registry."""
    active = {*more, *(extension.name for extension in extensions)}
    return tuple(dict.fromkeys(row.name for row in REGISTRY if row.name in active))
