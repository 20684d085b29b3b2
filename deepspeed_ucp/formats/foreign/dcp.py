"""Checkpoints of ``torch.distributed.checkpoint`` from FSDP, Accelerate, Lightning and torchtitan.

Keys of the nested state dict are joined by dots. Model and optimizer are separated by the form that
``torch.distributed.checkpoint.state_dict`` gives them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ...model.flat import Shape
from ..deepspeed.gather import find_other_step
from ..deepspeed.reading import explain_form
from ..findings import Finding
from ..places import FileTable
from .blocks import UNCHECKED, BlockEntry, Metadata, read_blocks
from .contents import NEITHER, Contents, StoredTensor, TensorBlock, count_steps, is_number, list_ignored
from .names import DCP, REFUSAL

_STATE, _GROUPS, _MEMBERS = "state.", "param_groups.", "params"
_IN_GROUPS = re.compile(r"(?:(?<=\.)|^)param_groups\.")
_IN_OPTIMIZER = re.compile(r"(?:(?<=\.)|^)(?:state|param_groups)\.")
_MODEL = re.compile(r"(?:^|\.)model\.$")
_DOT, _DEEPEST = re.compile(r"\."), 64
"""Separator of a key, and the maximum number of words in the prefix of the model's keys."""

_APART = ("dataloader.", "lr_scheduler.", "optimizer.", "train_state.")
"""Prefixes of other keys if the model's keys have no common prefix (torchtitan)."""

_STEP = "train_state.step"
"""Key of torchtitan's step counter."""

_UNNAMED = (
    "its optimizer states have numbers, not names, so their parameters are unknown. Save with "
    "torch.distributed.checkpoint.state_dict.get_state_dict, or load only the weights (load_optimizer_states=False)"
)

_MEGATRON = "param_to_group_meta."
_BY_MEGATRON = (
    "its optimizer states are those of Megatron-FSDP (fsdp_dtensor), which are not read. Load only the weights "
    "(load_optimizer_states=False)"
)


def read_contents(where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read the metadata files, and the headers of all blocks in the data files; collective."""
    head, metadata, entries = read_blocks(where, comm)

    def interpret() -> tuple[Contents, list[Finding]]:
        with explain_form(where.path(head)):
            return _Interpreter(where, head, metadata, entries).make()

    return comm.alike(interpret)


class _Interpreter:
    """Separates model and optimizer by their keys, and assembles tensors of their blocks."""

    def __init__(
        self,
        where: FileTable,
        head: str,
        metadata: Metadata,
        entries: Mapping[tuple[str, Shape | None], BlockEntry],
    ) -> None:
        self.where, self.head, self.metadata, self.entries = where, head, metadata, entries
        keys = [*metadata.tensors, *metadata.values]
        roots = {key[: at.start()] for key in keys for at in islice(_IN_GROUPS.finditer(key), _DEEPEST)}
        begins = (
            (key, key[: at.start()])
            for key in keys
            for at in reversed([*islice(_IN_OPTIMIZER.finditer(key), _DEEPEST)])
        )
        self.roots = {key: begin for key, begin in begins if begin in roots}  # of several the shortest
        self.names: dict[str, tuple[str, str]] = {}
        for key in metadata.tensors:
            if (root := self.roots.get(key)) is not None and key[len(root) :].startswith(_STATE):
                self.names[key] = self._split(key, root)

    def make(self) -> tuple[Contents, list[Finding]]:
        """Return the contents, and warnings of ignored contents."""
        if any("/shard_" in key for key in self.metadata.values):
            raise UnsupportedError(REFUSAL, path=self.where.folder)
        prefix = self._find_model()
        keys = [key for key in self.metadata.tensors if key not in self.roots and key.startswith(prefix)]
        weights = {key[len(prefix) :]: key for key in keys if prefix or not key.startswith(_APART)}
        if not weights:
            raise UnsupportedError(
                f"holds no model's tensors by name, only {shorten(self.metadata.tensors)}.",
                path=self.where.path(self.head),
            )
        groups = list(self._list_groups())
        owners = {name for name, _ in self.names.values()}.union(*(members for members, _ in groups))
        unnamed = owners - weights.keys()
        numbered = bool(unnamed) and all(name.isdecimal() for name in unnamed)
        if numbered:
            self.names.clear()
            groups.clear()
        if twice := {name for (name, _), number in Counter(self.names.values()).items() if number > 1}:
            raise UnsupportedError(
                f"several optimizers in it hold states of {shorten(sorted(twice))}. Save one of them alone.",
                path=self.where.path(self.head),
            )
        states, scalars, dtypes = self._read_states(weights)
        steps = [values["step"] for values in scalars.values() if "step" in values]
        steps += [hyper["step"] for _, hyper in groups if "step" in hyper]
        by_megatron = any(_MEGATRON in key for key in (*self.metadata.tensors, *self.metadata.values))
        reason = _UNNAMED if numbered else _BY_MEGATRON if by_megatron else ""
        contents = Contents(
            DCP,
            self.head,
            {name: self.make_tensor(key) for name, key in weights.items()},
            states,
            scalars,
            groups,
            counters=count_steps(steps),
            stateless=f"{self.where.path(self.head)}: {reason}." if reason else "",
            scalar_dtypes=dtypes,
            unchecked=UNCHECKED,
        )
        findings, run = self._list_ignored(weights), contents.counters.get("global_steps")
        for key in (key for key, (_, shape, _) in self.metadata.tensors.items() if key.endswith(_STEP) and not shape):
            findings += find_other_step(self.where.path(self.head), run, self.find_value(key))
        return contents, findings

    def _read_states(
        self, weights: Mapping[str, str]
    ) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, dict[str, Any]], dict[str, str]]:
        """Return optimizer states by parameter, numbers by parameter, and the dtypes of the numbers.

        Args:
            weights: name → key of the model's tensors.
        """
        states: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        scalars: dict[str, dict[str, Any]] = defaultdict(dict)
        dtypes: dict[str, str] = {}
        for key, (name, state) in self.names.items():
            dtype, shape, _ = self.metadata.tensors[key]
            if is_number(state, shape, self.metadata.tensors[weights[name]][1] if name in weights else None):
                scalars[name][state], dtypes[state] = self.find_value(key), dtype
            else:
                states[name][state] = self.make_tensor(key)
        return states, scalars, dtypes

    def _split(self, key: str, root: str) -> tuple[str, str]:
        """Return the parameter and the state of an optimizer's key."""
        path = self.metadata.paths.get(key, ())
        if len(path) > 2 and path[-3] == _STATE[:-1]:
            return str(path[-2]), str(path[-1])
        name, _, state = key[len(root) + len(_STATE) :].rpartition(".")
        return name, state

    def _find_model(self) -> str:
        """Return the prefix of the model's keys."""
        keys = [key for key in self.metadata.tensors if key not in self.roots]
        named = {name for name, _ in self.names.values()}
        begins = ((key, at) for key in keys for at in [0, *(dot.end() for dot in islice(_DOT.finditer(key), _DEEPEST))])
        votes = Counter(key[:at] for key, at in begins if key[at:] in named)
        if fit := [prefix for prefix, number in votes.items() if number * 2 > len(named)]:
            most = [prefix for prefix in fit if votes[prefix] == max(votes.values())]
            picked = [prefix for prefix in most if _MODEL.search(prefix)] if most[1:] else most
            if len(picked) != 1:
                raise UnsupportedError(
                    f"holds several models under the names that its optimizer has: {shorten(sorted(most))}. Save one "
                    "of them without the others.",
                    path=self.where.path(self.head),
                )
            return picked[0]
        firsts = {str(path[0]) for key in keys if len(path := self.metadata.paths.get(key, (key,))) > 1}
        nested = [key for key in keys if len(self.metadata.paths.get(key, (key,))) > 1]
        if len(nested) == len(keys) and len(firsts) == 1:
            return f"{firsts.pop()}."
        return "model." if any(key.startswith("model.") for key in nested) else ""

    def _list_groups(self) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Yield param groups: as saved, or parameters with equal hyper-parameters if each was saved with its own."""
        optimizers = defaultdict[str, dict[str, dict[str, Any]]](lambda: defaultdict(dict))
        for key in [*self.metadata.values, *self.metadata.tensors]:
            root = self.roots.get(key)
            if root is not None and key.startswith(_GROUPS, len(root)):
                owner, _, name = key[len(root) + len(_GROUPS) :].rpartition(".")
                optimizers[root][owner][name] = self.find_value(key)
        for _, groups in sorted(optimizers.items()):
            if all(isinstance(hyper.get(_MEMBERS), (list, tuple)) for hyper in groups.values()):
                for number in sorted(groups, key=int):
                    hyper = groups[number]
                    members = hyper.pop(_MEMBERS)
                    yield tuple(map(str, members)), hyper
                continue
            alike: dict[str, list[str]] = defaultdict(list)
            for owner, hyper in groups.items():
                alike[repr(sorted(hyper.items()))].append(owner)
            for owners in alike.values():
                yield tuple(owners), groups[owners[0]]

    def _list_ignored(self, weights: Mapping[str, str]) -> list[Finding]:
        """Warn of contents that are not loaded."""
        taken = {*weights.values(), *self.names}
        keys = [key for key in (*self.metadata.tensors, *self.metadata.values) if key not in taken]
        left = dict.fromkeys(".".join(key.split(".")[:2]) for key in keys if key not in self.roots)
        return list_ignored(left, NEITHER, self.where.path(self.head), self.head)

    def _find_file(self, key: str) -> str:
        """Return the path of a file with data of a key."""
        files = [place.file for (name, _), place in self.metadata.places.items() if name == key]
        return self.where.path(files[0] if files else self.head)

    def find_value(self, key: str) -> Any:
        """Return a number or another plain value."""
        shape: Shape | None = () if key in self.metadata.tensors else None
        entry = self.entries.get((key, shape)) or self.entries.get((key, None))
        if entry is None:
            raise CheckpointError(f"lists {key} without its place.", path=self.where.path(self.head))
        if entry.fault:
            raise UnsupportedError(f"{key} {entry.fault}, where a plain value is wanted.", path=self._find_file(key))
        if entry.dtype and not isinstance(entry.value, (int, float)):
            kind = f"a tensor of shape {entry.shape} of {entry.dtype}"
            raise UnsupportedError(f"{key} is {kind}, where a number is wanted.", path=self._find_file(key))
        return entry.value

    def make_tensor(self, key: str) -> StoredTensor:
        """Assemble a tensor of its blocks."""
        dtype, shape, blocks = self.metadata.tensors[key]
        chunks = []
        for offsets, size in blocks:
            entry, place = self.entries.get((key, offsets)), self.metadata.places.get((key, offsets))
            if entry is None or place is None:
                raise CheckpointError(
                    f"lists the block of {key} at {offsets} without its place; it is damaged.",
                    path=self.where.path(self.head),
                )
            if entry.fault:
                raise UnsupportedError(f"{key} {entry.fault}; save it contiguous.", path=self.where.path(place.file))
            if entry.record is None or (entry.dtype, entry.shape) != (dtype, size):
                raise CheckpointError(
                    f"holds {entry.dtype or 'no tensor'} of shape {entry.shape} for the block of {key} at {offsets}, "
                    f"of {dtype} and shape {size} by the metadata. The folder mixes files of several saves.",
                    path=self.where.path(place.file),
                )
            chunks.append(TensorBlock(offsets, size, place.file, entry.record, entry.begin))
            chunks[-1].check(key, shape, self.where)
        return StoredTensor(dtype, shape, tuple(chunks))
