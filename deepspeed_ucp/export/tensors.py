"""Selects the tensors of an export, with their names and element types."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import CheckpointError, ConfigError, MismatchError, advise, shorten
from ..io.cast import FLOATING, cast, find_dtype
from ..io.memory import Scratch
from ..model.index import AtomicIndex
from ..model.storage import COPY, ITEMSIZE, MASTER, MODULE, WEIGHTS, AtomKey, count
from ..plan.settling import list_weights, refuse_unreadable
from ..stream.full_tensors import FullTensor, WorkOptions, assemble_full_tensors
from ..stream.reader import refuse_scattered
from ..tensor_parallel.adapters import is_in_modules_to_save, list_adapted, read_live
from ..tensor_parallel.layout import Shape
from ..tensor_parallel.rename import Rename, find_idle, rename_names
from ..tensor_parallel.rules import RuleSet, list_renames

logger = logging.getLogger("deepspeed_ucp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(WorkOptions):
    """Options of an export.

    Attributes:
        dtype: element type of floating-point weights and buffers; None keeps the stored one.
        tied: "drop" tied names, or write each as a "copy" (default: as the format's libraries do).
        keep_padding: keep the padding rows of vocabularies.
        strip_prefix: prefix to remove from names after renaming.
        renames: rules from saved names to written names; the first match counts.
        adapter: name of the only adapter to write; empty: write adapters as other parameters.
        adapter_config: its ``adapter_config.json``.
    """

    dtype: str | None = "float32"
    tied: str | None = None
    keep_padding: bool = False
    frozen: bool = True
    strip_prefix: str = ""
    renames: tuple[Rename, ...] = ()
    overwrite: bool = False
    adapter: str = ""
    adapter_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor to be exported.

    Attributes:
        names: written names: its name, and tied names.
        full: the full tensor. Its first elements are written, without padding rows.
        shape, dtype: as written.
    """

    names: tuple[str, ...]
    full: FullTensor
    shape: Shape
    dtype: str

    @property
    def numel(self) -> int:
        return count(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes written under each name."""
        return self.numel * ITEMSIZE[self.dtype]

    def convert(self, data: memoryview, scratch: Scratch, overflowed: set[str]) -> memoryview:
        """Convert stored elements to written ones, in ``scratch`` if the types differ.

        Args:
            overflowed: gets the tensor's name if elements were too large.
        """
        if self.dtype == self.full.dtype:
            return data
        into = scratch.take(data.nbytes // self.full.itemsize * ITEMSIZE[self.dtype])
        cast(data, self.full.dtype, into, self.dtype)
        if ITEMSIZE[self.dtype] <= self.full.itemsize and _overflows(data, self.full.dtype, into, self.dtype):
            overflowed.add(self.names[0])
        return into


_STEP = 1 << 16
"""Elements that are checked at once."""


def _overflows(data: memoryview, source: str, into: memoryview, target: str) -> bool:
    """Return True if a cast made finite elements infinite, or the largest finite one."""
    import ml_dtypes

    kind, finfo = f"u{ITEMSIZE[target]}", ml_dtypes.finfo(find_dtype(target))
    largest = np.array(finfo.max).view(kind)[()]
    limit = float(finfo.max) + float(finfo.eps) * 2.0 ** (finfo.maxexp - 2)  # rounds up
    stored, written = np.frombuffer(data, find_dtype(source)), np.frombuffer(into, kind)
    for low in range(0, len(stored), _STEP):
        places = np.flatnonzero((written[low : low + _STEP] << 1) >= largest << 1)  # without the sign
        values = np.abs(stored[low + places].astype(np.float64))
        if (np.isfinite(values) & (values >= limit)).any():
            return True
    return False


@dataclass(frozen=True, slots=True)
class Selection:
    """The contents of an export.

    Attributes:
        weights: weights and buffers, in the order of the state dict if known.
        states: optimizer states by atom, without copies of later pipeline stages.
        names: saved name → written name.
        resizes: whether the user gave resize rules, which only apply to loads.
        overflowed: names of tensors with elements that were too large for the written type, on this rank.
    """

    index: AtomicIndex
    weights: tuple[Tensor, ...]
    states: dict[AtomKey, Tensor]
    names: dict[str, str]
    unused: list[str]
    resizes: bool = False
    overflowed: set[str] = field(default_factory=set)

    @property
    def by_name(self) -> dict[str, Tensor]:
        """Weights and buffers by written name, tied names last."""
        first_names = {tensor.names[0]: tensor for tensor in self.weights}
        return {**first_names, **{name: tensor for tensor in self.weights for name in tensor.names[1:]}}


def select_tensors(
    index: AtomicIndex,
    rules: Sequence[RuleSet],
    options: ExportOptions,
    *,
    tied: str,
    states: Callable[[str], bool] = WEIGHTS.__contains__,
) -> Selection:
    """Select the tensors of an export; ``tied`` is the default of ``options.tied``."""
    if options.dtype is not None and options.dtype not in FLOATING:
        raise ConfigError(f"dtype: {options.dtype!r} is unknown. {advise(options.dtype, sorted(FLOATING))}")
    refuse_unreadable(index, states)
    if index.ambiguous:
        logger.warning(
            f"{index.state_file}: {shorten(index.ambiguous, 3)}: further names of shared modules. ZeRO 3 "
            "does not record the shared module, so they are not written. Load the export into such a model with "
            "strict=False."
        )
    refuse_scattered(index, "every node of an export reads its part of each")
    full = assemble_full_tensors(index, rules, states=states)
    omitted = set() if options.frozen else _find_frozen(index)
    kept = {key: atom for key, atom in full.tensors.items() if not key.instance and key.name not in omitted}
    listed = dict.fromkeys([*(key.name for key in kept), *index.aliases])
    renamed = rename_names(listed, (*options.renames, *list_renames(rules)))
    unused = [*full.unused, *find_idle(listed, options.renames)]
    if not any(name.startswith(options.strip_prefix) for name in renamed.values()):
        unused.append(f"--strip-prefix {options.strip_prefix!r}")
    names = strip_names(renamed, options.strip_prefix)
    if options.adapter:
        written = map_adapter_names(names.values(), options.adapter, options.adapter_config)
        names = {name: written[new] for name, new in names.items() if new in written}
        kept = {key: atom for key, atom in kept.items() if key.name in names}
    copies: dict[str, list[str]] = defaultdict(list)
    for alias, owner in index.aliases.items():
        if alias in names and ((options.tied or tied) == "copy" or (options.adapter and is_in_modules_to_save(alias))):
            copies[owner].append(names[alias])

    def make(atom: FullTensor, dtype: str | None, *aliases: str) -> Tensor:
        shape = atom.shape if options.keep_padding else full.cut_padding(atom)
        written = dtype if dtype and atom.dtype in FLOATING else atom.dtype
        return Tensor((names[atom.name], *aliases), atom, shape, written)

    chosen = [kept[key] for key in _order_weights(index) if key in kept]
    if not chosen:
        raise CheckpointError(
            "there are no weights to export. Export a tag with complete model states.", path=index.state_file
        )
    return Selection(
        index,
        weights=tuple(make(atom, options.dtype, *copies[atom.name]) for atom in chosen),
        states={key: make(atom, None) for key, atom in kept.items() if key.state not in WEIGHTS},
        names=names,
        unused=unused,
        resizes=any(rule.resizes for rule in rules),
    )


def _find_frozen(index: AtomicIndex) -> set[str]:
    atoms = index.atoms
    trained = atoms.list_names((MASTER, COPY))
    untrained = atoms.list_names((MODULE,)) - trained - index.buffers
    if index.foreign and untrained:
        raise ConfigError(
            f"{index.state_file}: {index.foreign} does not record which tensors are frozen parameters. Export all.",
        )
    if not trained:
        raise ConfigError(
            f"{index.state_file}: does not record which parameters were trained: stage 0 saves no names. Give "
            "them (--groups), or export all."
        )
    return untrained


def _order_weights(index: AtomicIndex) -> list[AtomKey]:
    """Return each name's weight, in the order of the state dict or else of the files."""
    keys = index.atoms
    has_copies = any(key.state == COPY for key in keys)
    first = [key.name for key in keys if has_copies and key.state in (COPY, MODULE)]
    weights = list_weights(index)
    ordered = (weights[name] for name in dict.fromkeys([*first, *(key.name for key in keys)]))
    return [atom.key for atom in ordered if atom.state in WEIGHTS]


def strip_names(renamed: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return saved name → written name without the prefix; raise if names collide."""
    stripped = {name: new.removeprefix(prefix) for name, new in renamed.items()}
    if unnamed := [name for name, new in stripped.items() if not new]:
        raise ConfigError(f"--rename and --strip-prefix leave no name for {shorten(unnamed)}.")
    if len(set(stripped.values())) < len(stripped):
        seen: dict[str, str] = {}
        clashes = [f"{seen[new]} and {name}" for name, new in stripped.items() if seen.setdefault(new, name) != name]
        raise MismatchError(f"--strip-prefix {prefix!r}: these become one name: {shorten(clashes)}.")
    return stripped


def map_adapter_names(names: Collection[str], adapter: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return saved name → name in PEFT's file; ``config["bias"]``: which are trained."""
    written = dict[str, str]()
    mode, biases = config.get("bias", "none"), {f"{module}.base_layer.bias" for module in list_adapted(names)}
    for name in names:
        tensor = read_live(name)
        if tensor is not None and tensor.adapter == adapter:
            written[name] = tensor.in_file
        elif tensor is None and (name.endswith(".bias") if mode == "all" else mode != "none" and name in biases):
            written[name] = name
    if any(map(read_live, written)):
        return written
    known = {tensor.adapter for tensor in map(read_live, names) if tensor}
    raise CheckpointError(
        f"holds no adapter {adapter!r}; it has {shorten(sorted(known))}. Name one with --adapter-name."
        if known
        else "holds no adapter of PEFT's (no lora_A, lora_B, modules_to_save)."
    )
