"""The special cases of a load: one module each, which is imported only if its gate in :data:`REGISTRY` is open.

The common code knows :class:`Extension` alone, and calls the hooks of the active extensions.
"""

from __future__ import annotations

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

    def prepare(self, target: Any) -> None:
        """Prepare the engine for a load."""

    def complete_extras(self, target: Any, extras: list[Any]) -> list[Any]:
        """Return the tensors without optimizer, completed."""
        return extras

    def commit(self) -> None:
        """Finish the fill: everything is verified, and the live buffers have their values."""

    def open_masters(self, target: Any, number: int) -> AbstractContextManager[Any]:
        """Context manager in which the masters of ``target.flats[number]`` are in memory."""
        return nullcontext()

    def relink(self, target: Any) -> None:
        """Adapt the engine to new optimizer states."""

    def discard(self) -> None:
        """Release what a load needed, also if it failed."""


def _never(_: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Row:
    """A special case, and the gates that decide whether its module is imported.

    Attributes:
        name: for the report of a load.
        source: module of this package, and class.
        in_save: gate of a save whose first headers have been read.
        in_engine: gate of a DeepSpeed engine.
    """

    name: str
    source: str
    in_save: Callable[[Any], bool] = _never
    in_engine: Callable[[Any], bool] = _never

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


REGISTRY = [
    Row("nvme", "swapped:Swapped", in_save=_saves_swap_files),
    Row("seal", "seal:SealedSave", in_save=_is_sealed),
    Row("nvme", "nvme:Nvme", in_engine=_swaps_to_nvme),
]
"""All special cases. Hooks run in this order."""


def find_for_save(save: Any) -> list[Extension]:
    """Return new extensions for a save whose first headers have been read."""
    return [row.make() for row in REGISTRY if row.in_save(save)]


def find_for_engine(engine: Any) -> list[Extension]:
    """Return new extensions for a DeepSpeed engine."""
    return [row.make() for row in REGISTRY if row.in_engine(engine)]


def list_names(*groups: Iterable[Extension]) -> tuple[str, ...]:
    """Return the names of active extensions, each once, in the order of the registry."""
    active = {extension.name for group in groups for extension in group}
    return tuple(dict.fromkeys(row.name for row in REGISTRY if row.name in active))
