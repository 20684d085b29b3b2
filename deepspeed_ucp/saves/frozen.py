"""Frozen parameters, which are saved once: on the ranks, what they are, and which save still has them as they are.

DeepSpeed's own files go through :meth:`FrozenBase.write`, which leaves the frozen parameters out, as DeepSpeed does
with ``exclude_frozen_parameters``; with the first save it writes them, in files of their own, to a folder in the job's
memory: the base. Each save has links to these files beside its tag, and a file that names them.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import re
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..comm import Comm
from ..errors import UcpError, count_of
from ..experts import cut_number, find_expert, read_name
from ..sources.files import BASE, holds_run, holds_state_dict, name_base_file
from ..sources.frozen import write_reference
from ..sources.reading import ORDER
from ..sources.seal import SealedFile
from ..targets import open_target
from ..torchsave.records import sum_directory
from .files import MappedFiles, Stable, save_over
from .memory import link_file

logger = logging.getLogger("deepspeed_ucp")

_SAMPLED = 8
"""Elements of each tensor that are looked at besides its version, about."""

_LAYER = re.compile(r"layer_(\d+)-")

_APART = ("module", "frozen_param_shapes", "frozen_param_fragments")
"""Keys of model states under which parameters are, by name."""


@dataclass(frozen=True)
class FrozenParameters:
    """The parameters of a rank that no optimizer changes.

    Attributes:
        names: of all of them, each name of a tied one.
        tensors: what the rank holds of each.
        digest: of names, shapes and element types, where the tensors lie, how often they have been changed, and some
            of their elements.
        owned: by ``id`` those that the optimizer owns.
        excluded: they are those that DeepSpeed leaves out of a save by itself.
        fault: why they cannot be told from others, in words.
    """

    names: frozenset[str] = frozenset()
    tensors: tuple[torch.Tensor, ...] = ()
    digest: bytes = b""
    owned: frozenset[int] = frozenset()
    excluded: bool = True
    fault: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(each.numel() * each.element_size() for each in self.tensors)


def look_at_frozen(engine: Any, known: FrozenParameters | None) -> FrozenParameters:
    """An engine's, on this rank; ``known``: what they were before."""
    named = list(engine.module.named_parameters(remove_duplicate=False))
    try:
        owned = known.owned if known else _list_owned(engine)
        still = [(name, param) for name, param in named if not param.requires_grad]
        frozen = {name: param for name, param in still if id(param) not in owned}
        held = {name: getattr(param, "ds_tensor", param).detach() for name, param in frozen.items()}
        digest = _digest(held, {name: getattr(param, "ds_shape", param.shape) for name, param in frozen.items()})
    except (UcpError, RuntimeError, TypeError, NotImplementedError) as error:
        return FrozenParameters(fault=str(error))
    tensors = {tensor.data_ptr(): tensor for tensor in held.values()}
    return FrozenParameters(frozenset(frozen), tuple(tensors.values()), digest, owned, len(still) == len(frozen))


def _list_owned(engine: Any) -> frozenset[int]:
    target = open_target(engine)
    return frozenset(id(target.params[name]) for name in target.owned & target.params.keys())


def _digest(held: Mapping[str, torch.Tensor], shapes: Mapping[str, Iterable[int]]) -> bytes:
    told = [
        (name, tuple(shapes[name]), tuple(each.shape), str(each.dtype), each.data_ptr(), _count_changes(each))
        for name, each in held.items()
    ]
    found = hashlib.sha256(repr(told).encode())
    samples = defaultdict[torch.device, list[torch.Tensor]](list)
    for each in held.values():
        flat = each.reshape(-1)
        samples[each.device].append(flat[:: max(1, flat.numel() // _SAMPLED)].contiguous().view(torch.uint8))
    for parts in samples.values():
        found.update(memoryview(torch.cat(parts).cpu().numpy()))
    return found.digest()


def _count_changes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class FrozenBase:
    """What of a job's frozen parameters has been saved.

    Attributes:
        folder: where its files are on this node, in the job's memory.
        held: the parameters as they were.
        files: of all ranks, once they are there.
        own: by this rank's files of model states what has been left out of them.
        covers: it has all that DeepSpeed would leave out of this rank's files by itself.
        is_new: the save that is made writes it.
    """

    folder: str
    held: FrozenParameters
    files: dict[str, SealedFile] = field(default_factory=dict)
    own: dict[str, frozenset[str]] = field(default_factory=dict)
    covers: bool = True
    is_new: bool = True

    @property
    def name(self) -> str:
        """Of the folder."""
        return os.path.basename(self.folder)

    def forget(self) -> None:
        """The parameters need no longer be as they were."""
        self.held = replace(self.held, digest=b"")

    def join(self, told: Iterable[Mapping[str, SealedFile]]) -> None:
        """Note what all ranks have written, after a save that has come to its end."""
        for files in told:
            self.files = {**self.files, **files}
        self.is_new = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Of DeepSpeed's save, which need not copy what is left out."""
        return {} if self.is_new or not (self.held.excluded and self.covers) else {"exclude_frozen_parameters": True}

    def write(self, state: Any, path: str, engine: Any, write: Callable[[Any, str], None]) -> None:
        """Write a file of a tag without frozen parameters, and these to the base, if that is new.

        Args:
            write: writes what is left.

        Raises:
            OSError: the file of the base cannot be written, or there is none for this file.
        """
        name = os.path.basename(path)
        if not self.is_new and name not in self.own and (holds_run(name) or holds_state_dict(name)):
            self.forget()
            raise FileNotFoundError(f"no file has been saved that goes with {name}")
        if self.is_new:
            rest, frozen, self.own[name] = split_state(state, name, self._list_names(state, name, engine))
            if self.own[name]:
                self._write_base(frozen, name)
        else:
            rest, *_ = split_state(state, name, self.own.get(name, frozenset()))
        write(rest, path)

    def _list_names(self, state: Any, name: str, engine: Any) -> frozenset[str]:
        """Of frozen parameters, as a file has them."""
        if holds_run(name):
            return self.held.names
        if not holds_state_dict(name) or not isinstance(state, dict):
            return frozenset()
        if found := _LAYER.match(name):
            return self._list_layer(engine.module, int(found[1]))
        kinds = {cut_number(each) for each in self.held.names if find_expert(each)}
        kinds -= {cut_number(key) for key, _ in engine.module.named_parameters() if key not in self.held.names}
        return frozenset(key for key in state if self._is_experts(key, kinds))

    def _list_layer(self, module: Any, number: int) -> frozenset[str]:
        """Of frozen parameters, as the file of a pipeline's layer has them."""
        place, layers = number - getattr(module, "_local_start", number), list(getattr(module, "forward_funcs", ()))
        named = dict(layers[place].named_parameters(remove_duplicate=False)) if 0 <= place < len(layers) else None
        if named is None:
            self.covers = False
            return frozenset()
        whole = {id(param): each for each, param in module.named_parameters(remove_duplicate=False)}
        names = frozenset(key for key, param in named.items() if whole.get(id(param)) in self.held.names)
        self.covers &= all(param.requires_grad for key, param in named.items() if key not in names)
        return names

    def _is_experts(self, key: str, kinds: set[tuple[str, str]]) -> bool:
        found = read_name(key)
        if found is None:
            return False
        return f"{found.layer}{found.end}" in self.held.names if found.fused else cut_number(key) in kinds

    def _write_base(self, frozen: dict[str, Any], name: str) -> None:
        name = name_base_file(name)
        path = os.path.join(self.folder, name)
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        save_over(frozen, path, Stable(), MappedFiles(wanted=False))
        self.files[name] = SealedFile(size=os.path.getsize(path), crc=sum_directory(path) or 0)

    def add(self, folder: str, tag: str) -> None:
        """Beside a tag that has been written into memory link this node's files, and have the tag name all there are.

        Args:
            folder: of tags.

        Raises:
            OSError: as the system tells it.
        """
        beside = os.path.join(folder, os.path.dirname(tag), self.name)
        if not self.files:
            return
        os.makedirs(beside, mode=0o700, exist_ok=True)
        for name in os.listdir(self.folder) if os.path.isdir(self.folder) else ():
            link_file(os.path.join(self.folder, name), os.path.join(beside, name))
        write_reference(os.path.join(folder, tag), self.name, self.files)

    def remove(self) -> None:
        """From the job's memory; saves that name it have links of their own."""
        shutil.rmtree(self.folder, ignore_errors=True)


def split_state(state: Any, name: str, names: frozenset[str]) -> tuple[Any, dict[str, Any], frozenset[str]]:
    """What stays in a file, what its base's file has, and the names of that.

    Args:
        state: of a file of model states with this name.
        names: of the frozen parameters in it.
    """
    if not names:
        return state, {}, frozenset()
    if not holds_run(name):
        rest, frozen = _take_out(state, names)
        return rest, frozen, frozenset(frozen)
    parts = {key: state[key] for key in _APART if isinstance(state.get(key), dict)}
    split = {key: _take_out(held, names) for key, held in parts.items()}
    taken = frozenset(name for _, frozen in split.values() for name in frozen)
    if not taken:
        return state, {}, taken
    kept = {key: held if held or key == "module" else None for key, (held, _) in split.items()}
    rest, base = {**state, **kept}, {key: frozen for key, (_, frozen) in split.items()}
    module, fragments = base.get("module", {}), base.get("frozen_param_fragments", {})
    base["frozen_param_fragments"] = {  # below ZeRO 3 the module has them as well
        name: each for name, each in fragments.items() if name not in module or not module[name].numel()
    }
    return rest, {**base, ORDER: list(state.get("module") or ())}, taken


def _take_out(held: Mapping[str, Any], names: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state dict without some names, and these; of its own kind, with what it has besides."""
    rest: Any = copy.copy(held)
    return rest, {name: rest.pop(name) for name in list(rest) if name in names}


def choose_base(engine: Any, known: FrozenBase | None, folder: str, comm: Comm) -> FrozenBase | str:
    """What has the frozen parameters of the next save: what is known, or what that writes anew; collective.

    Args:
        known: what earlier saves have written.
        folder: of the job's memory.

    Returns:
        In words why the save itself has to have them, where it has.
    """
    held = look_at_frozen(engine, known.held if known else None)
    answers = comm.each(lambda: (held.fault, len(held.names), known is None or known.held.digest != held.digest))
    if fault := next((fault for fault, *_ in answers if fault), ""):
        return f"which ones are frozen cannot be told: {fault}"
    count = max(count for _, count, _ in answers)
    if not count:
        return "none is frozen"
    if known is not None and not any(is_other for *_, is_other in answers):
        return known
    base = FrozenBase(os.path.join(folder, comm.broadcast(f"{BASE}{uuid.uuid4().hex[:12]}")), held)
    if comm.rank == 0:
        why = "" if known is None else ", as they may have changed since they were saved"
        logger.info("%s of a rank saved once, in %s%s", count_of(count, "frozen parameter"), base.name, why)
    return base
