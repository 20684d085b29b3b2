"""Checkpoints of ``torch.distributed.checkpoint``: FSDP's, Accelerate's, Lightning's, torchtitan's.

Keys are those of the nested state dict, joined by dots; what is model and what optimizer follows from the form of
``torch.distributed.checkpoint.state_dict``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ...comm import Comm
from ...errors import UnsupportedError, shorten
from ..compare import find_other_step
from ..findings import Finding
from ..reading import explain_form
from ..table import FileTable
from .blocks import UNCHECKED, DcpFolder, read_blocks
from .contents import NEITHER, Contents, StoredTensor, count_steps, is_number, list_left
from .names import DCP, REFUSAL

_STATE, _GROUPS, _MEMBERS = "state.", "param_groups.", "params"
_IN_GROUPS = re.compile(r"(?:(?<=\.)|^)param_groups\.")
_IN_OPTIMIZER = re.compile(r"(?:(?<=\.)|^)(?:state|param_groups)\.")
_MODEL = re.compile(r"(?:^|\.)model\.$")
_DOT, _DEEPEST = re.compile(r"\."), 64
"""What a key is cut at, and how often: what the model's keys begin with has few words."""

_APART = ("dataloader.", "lr_scheduler.", "optimizer.", "train_state.")
"""What stands beside the model's own names where these have no common beginning (torchtitan)."""

_STEP = "train_state.step"
"""The key of torchtitan's own count."""

_UNNAMED = (
    "its optimizer states have numbers, not names: nothing tells whose they are. Save with "
    "torch.distributed.checkpoint.state_dict.get_state_dict, or load the weights alone (load_optimizer_states=False)"
)

_MEGATRON = "param_to_group_meta."
_BY_MEGATRON = (
    "its optimizer states are those of Megatron-FSDP (fsdp_dtensor), which are not read. Load the weights alone "
    "(load_optimizer_states=False)"
)


def read_contents(where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read the metadata files, and the headers of all blocks in the data files; collective.

    Raises:
        CheckpointError: a file is damaged or missing, or metadata and data disagree.
        UnsupportedError: blocks were transformed (compressed), or there is no model among them.
    """
    blocks = read_blocks(where, comm)

    def interpret() -> tuple[Contents, list[Finding]]:
        with explain_form(where.path(blocks.head)):
            return _Interpreter(blocks).make()

    return comm.alike(interpret)


class _Interpreter:
    """Tells model and optimizer apart by their keys."""

    def __init__(self, blocks: DcpFolder) -> None:
        self.blocks, self.told, self.where, self.head = blocks, blocks.told, blocks.where, blocks.head
        told = self.told
        keys = [*told.tensors, *told.values]
        roots = {key[: at.start()] for key in keys for at in islice(_IN_GROUPS.finditer(key), _DEEPEST)}
        begins = (
            (key, key[: at.start()])
            for key in keys
            for at in reversed([*islice(_IN_OPTIMIZER.finditer(key), _DEEPEST)])
        )
        self.roots = {key: begin for key, begin in begins if begin in roots}  # of several the shortest
        self.names: dict[str, tuple[str, str]] = {}
        for key in told.tensors:
            if (root := self.roots.get(key)) is not None and key[len(root) :].startswith(_STATE):
                self.names[key] = self._split(key, root)

    def make(self) -> tuple[Contents, list[Finding]]:
        """What there is, and what is left out.

        Raises:
            CheckpointError, UnsupportedError: as of :func:`read_contents`.
        """
        if any("/shard_" in key for key in self.told.values):
            raise UnsupportedError(REFUSAL, path=self.where.folder)
        prefix = self._find_model()
        left = [key for key in self.told.tensors if key not in self.roots and (prefix or not key.startswith(_APART))]
        weights = {key[len(prefix) :]: key for key in left if key.startswith(prefix)}
        if not weights:
            raise UnsupportedError(
                f"holds no model's tensors by name, only {shorten(self.told.tensors)}.", path=self.where.path(self.head)
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
        steps = [held["step"] for held in scalars.values() if "step" in held]
        steps += [hyper["step"] for _, hyper in groups if "step" in hyper]
        by_megatron = any(_MEGATRON in key for key in (*self.told.tensors, *self.told.values))
        reason = _UNNAMED if numbered else _BY_MEGATRON if by_megatron else ""
        contents = Contents(
            DCP,
            self.head,
            {name: self.blocks.make_tensor(key) for name, key in weights.items()},
            states,
            scalars,
            groups,
            counters=count_steps(steps),
            stateless=f"{self.where.path(self.head)}: {reason}." if reason else "",
            scalar_dtypes=dtypes,
            unchecked=UNCHECKED,
        )
        findings, run = self._list_left(prefix, weights), contents.counters.get("global_steps")
        for key in (key for key, (_, shape, _) in self.told.tensors.items() if key.endswith(_STEP) and not shape):
            findings += find_other_step(self.where.path(self.head), run, self.blocks.find_value(key))
        return contents, findings

    def _read_states(
        self, weights: Mapping[str, str]
    ) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, dict[str, Any]], dict[str, str]]:
        """The optimizer's states by parameter, its numbers by parameter, and the dtypes of these.

        Args:
            weights: name → key of the model's tensors.
        """
        states: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        scalars: dict[str, dict[str, Any]] = defaultdict(dict)
        dtypes: dict[str, str] = {}
        for key, (name, state) in self.names.items():
            dtype, shape, _ = self.told.tensors[key]
            if is_number(state, shape, self.told.tensors[weights[name]][1] if name in weights else None):
                scalars[name][state], dtypes[state] = self.blocks.find_value(key), dtype
            else:
                states[name][state] = self.blocks.make_tensor(key)
        return states, scalars, dtypes

    def _split(self, key: str, root: str) -> tuple[str, str]:
        """Parameter and state that a key of the optimizer's is of."""
        path = self.told.paths.get(key, ())
        if len(path) > 2 and path[-3] == _STATE[:-1]:
            return str(path[-2]), str(path[-1])
        name, _, state = key[len(root) + len(_STATE) :].rpartition(".")
        return name, state

    def _find_model(self) -> str:
        """What the keys of the model's tensors begin with."""
        keys = [key for key in self.told.tensors if key not in self.roots]
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
        firsts = {str(path[0]) for key in keys if len(path := self.told.paths.get(key, (key,))) > 1}
        nested = [key for key in keys if len(self.told.paths.get(key, (key,))) > 1]
        if len(nested) == len(keys) and len(firsts) == 1:
            return f"{firsts.pop()}."
        return "model." if any(key.startswith("model.") for key in nested) else ""

    def _list_groups(self) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Param groups: as lists of names, or where every parameter has hyper-parameters of its own, those alike."""
        optimizers = defaultdict[str, dict[str, dict[str, Any]]](lambda: defaultdict(dict))
        for key in [*self.told.values, *self.told.tensors]:
            root = self.roots.get(key)
            if root is not None and key.startswith(_GROUPS, len(root)):
                owner, _, name = key[len(root) + len(_GROUPS) :].rpartition(".")
                optimizers[root][owner][name] = self.blocks.find_value(key)
        for _, held in sorted(optimizers.items()):
            if all(isinstance(hyper.get(_MEMBERS), (list, tuple)) for hyper in held.values()):
                for number in sorted(held, key=int):
                    hyper = held[number]
                    members = hyper.pop(_MEMBERS)
                    yield tuple(map(str, members)), hyper
                continue
            alike: dict[str, list[str]] = defaultdict(list)
            for owner, hyper in held.items():
                alike[repr(sorted(hyper.items()))].append(owner)
            for owners in alike.values():
                yield tuple(owners), held[owners[0]]

    def _list_left(self, prefix: str, weights: Mapping[str, str]) -> list[Finding]:
        """What is in the checkpoint and not loaded, as a warning."""
        taken = {*weights.values(), *self.names}
        keys = [key for key in (*self.told.tensors, *self.told.values) if key not in taken]
        left = dict.fromkeys(".".join(key.split(".")[:2]) for key in keys if key not in self.roots)
        return list_left(left, NEITHER, self.where.path(self.head), self.head)
