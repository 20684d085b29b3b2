"""Checkpoints of Megatron-Core: ``torch_dist``, a folder of ``torch.distributed.checkpoint`` and more beside it.

``metadata.json``, which is written last, tells the form. Tensors are blocks as there, under Megatron-Core's own keys.
All else (arguments, iteration, param groups) is one object, in ``common.pt`` or, since 0.19, among the blocks. Layers
are by default stacked: one tensor of all of them, with their number as dimension 0 and not in its key (megatron-core
0.16, ``transformer/transformer_block.py``, ``optimizer/{optimizer,distrib_optimizer}.py``, ``dist_checkpointing``).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...atoms import COPY, ITEMSIZE, MASTER, MODULE, count
from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, join_numbers
from ...flat import Shape
from ...io.jsonfile import read_json
from ...patterns.metadata import INFO, VOCAB_SIZE, VOCABULARY
from ...torchsave.objects import describe, has_more_parts
from ...torchsave.torchfile import read_header, read_parts
from ..findings import WARNING, Finding
from ..hints import read_hints, simplify_object
from ..reading import explain_form
from ..table import FileTable
from . import dcp
from .blocks import UNCHECKED, Blocks, read_blocks
from .contents import Chunk, Contents, StoredTensor, list_left
from .headers import read_once
from .names import BLOCKS, COMMON, FORM, MEGATRON

_BACKEND, _VERSION = "torch_dist", 1
_ENTRY = "common_state"
_ENTRY_KEY = f"{_ENTRY}/shard_0_1"
"""Key of the common state among the blocks."""

_SAMPLES = "consumed_train_samples"

_LONGEST = 1 << 16
"""Bytes of ``metadata.json``."""

_MOST_PARTS = 1_000_000
"""Of the param groups."""

_MOST_LAYERS, _MOST_PIECES = 1 << 14, 1 << 22
"""Of one stack, and blocks of all layers together."""

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_UNNAMED = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_MASTERS = ("param", "fp32_param")
_STACK = re.compile(r"(?:^|(?<=\.))layers\.(?!\d+\.)")
_EXPERT = re.compile(r"(.*\.experts\.experts\.)(\d+)\.(.*)")
_HALF = re.compile(r"(.*\.(?:weight|bias))_([wv])")

_TABLES = ("word_embeddings.weight", "output_layer.weight")
"""Ends of the names of tables of words."""

_ADVICE = (
    "Save with --dist-ckpt-optim-fully-reshardable (Megatron-LM; else distrib_optim_sharding_type "
    "'fully_reshardable'), or load the weights alone (load_optimizer_states=False)"
)

_KEYS = frozenset(
    (
        *("params", "default_config", "max_lr", "min_lr", "lr_mult", "pre_lr_mult", "wd_mult", "pre_wd_mult"),
        *("is_decoupled_lr", "is_expert_parallel", "is_vision_model_param"),
    )
)
"""Of a param group, that are Megatron's and no optimizer's."""

_BESIDE = ("opt_param_scheduler", "grad_scaler", "rng_state", "rerun_state_machine", "dataloader_state_dict")


@dataclass(frozen=True, slots=True)
class _Common:
    """What the common state tells, plain.

    Attributes:
        path: of the file that tells it.
        hints: as of :class:`~deepspeed_ucp.atoms.ModelInfo`.
        groups: param groups of all optimizers, with the step of each.
        sharding: how the distributed optimizer saved its states.
        beside: keys of what is not loaded.
    """

    path: str
    hints: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]] = ()
    sharding: str = ""
    beside: Sequence[str] = ()


def read_contents(where: FileTable, comm: Comm) -> tuple[Contents, list[Finding]]:
    """Read the metadata, the common state and the headers of all tensors' blocks; collective.

    Raises:
        CheckpointError: a file is damaged or missing, or metadata and data disagree.
        UnsupportedError: another form than ``torch_dist``.
    """
    comm.alike(lambda: _check_names(where))
    if not read_once(lambda path: _check_form(path, COMMON in where.entries), where, FORM, comm):
        return dcp.read_contents(where, comm)
    comm.alike(lambda: _require(where, BLOCKS))
    blocks = read_blocks(where, comm, values=False)
    source = comm.alike(lambda: _find_common(blocks))
    common = read_once(lambda path: _read_common(blocks, source, path), where, source, comm)

    def interpret() -> tuple[Contents, list[Finding]]:
        with explain_form(where.path(blocks.head)):
            return _Interpreter(blocks, common).make()

    return comm.alike(interpret)


def _check_names(where: FileTable) -> None:
    """Raises CheckpointError: the save did not end."""
    if FORM not in where.entries:
        raise CheckpointError(
            f"{FORM} is missing, which Megatron-Core writes last: the save was interrupted, or a copy was cut short. "
            "Take another checkpoint.",
            path=where.folder,
        )


def _require(where: FileTable, name: str) -> None:
    if name not in where.entries:
        raise CheckpointError("is missing. Copy it here, or take another checkpoint.", path=where.path(name))


def _check_form(path: str, has_common: bool) -> bool:
    """Whether the file is Megatron-Core's, and not somebody's own beside blocks."""
    told = read_json(path, most=_LONGEST, strict=True)
    if "sharded_backend" not in told and not has_common:
        return False
    form, version = told["sharded_backend"], told.get("sharded_backend_version", _VERSION)
    if form != _BACKEND:
        raise UnsupportedError(
            f"the checkpoint is of the form {form!r:.40}, and {_BACKEND!r} is read. Load it with the Megatron-LM that "
            f"saved it, and save with --ckpt-format {_BACKEND}.",
            path=path,
        )
    if version != _VERSION:
        raise UnsupportedError(
            f"is of version {version!r:.40} of {_BACKEND}, and {_VERSION} is read; update deepspeed_ucp.", path=path
        )
    return True


def _find_common(blocks: Blocks) -> str:
    """The file with the common state."""
    place = blocks.told.places.get((_ENTRY_KEY, None))
    if COMMON in blocks.where.entries or place is None:
        _require(blocks.where, COMMON)
        return COMMON
    _require(blocks.where, place.file)
    return place.file


def _read_common(blocks: Blocks, name: str, path: str) -> _Common:
    if name == COMMON:
        tree = read_header(path).tree
    else:
        (part,) = read_parts(path, [blocks.told.places[_ENTRY_KEY, None][1:]])
        tree = part.tree[0] if isinstance(part.tree, list) and len(part.tree) == 1 else part.tree
    if not isinstance(tree, dict):
        raise CheckpointError(f"holds {describe(tree)}, not Megatron-Core's common state.", path=path)
    return _take_apart(tree, path)


def _take_apart(tree: Mapping[Any, Any], path: str) -> _Common:
    content, optimizer = tree.get("content_metadata"), tree.get("optimizer")
    if has_more_parts([optimizer, content], _MOST_PARTS):
        raise CheckpointError(f"its optimizer has more than {_MOST_PARTS} parts; the file is damaged.", path=path)
    optimizers = [*_walk(optimizer)]
    beside = [key for key in _BESIDE if key in tree or any(key in each for each in optimizers)]
    sharding = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    return _Common(
        path,
        hints=read_hints(tree),
        groups=tuple(group for each in optimizers for group in _list_groups(each, path)),
        sharding=sharding if isinstance(sharding, str) else "",
        beside=tuple(beside),
    )


def _walk(held: Any) -> Iterator[Mapping[Any, Any]]:
    """An optimizer's dicts: alone, within one for 16 bits, or of several in a chain."""
    if isinstance(held, dict):
        yield held
        for key, inner in held.items():
            if key == "optimizer" or isinstance(key, int):
                yield from _walk(inner)


def _list_groups(optimizer: Mapping[Any, Any], path: str) -> Iterator[dict[str, Any]]:
    """The param groups of one optimizer, plain, with their steps as integers where there are any.

    Raises:
        CheckpointError: a step is no count.
    """
    groups, states = optimizer.get("param_groups"), optimizer.get("state")
    common = simplify_object(states.get("common_step")) if isinstance(states, dict) else None
    for group in map(simplify_object, groups if isinstance(groups, list) else ()):
        if not isinstance(group, dict):
            continue
        own = group.pop("step", None)
        step = common if own is None else own
        if step is None:
            yield group
            continue
        if type(step) not in (int, float) or not 0 <= step < 1 << 53 or step % 1:
            raise CheckpointError(f"tells of {step!r:.40} steps; it is damaged.", path=path)
        yield {**group, "step": int(step)}


class _Interpreter:
    """Makes tensors of layers out of stacks of them, and tells whose states and groups there are."""

    def __init__(self, blocks: Blocks, common: _Common) -> None:
        self.blocks, self.common, self.path = blocks, common, blocks.where.path(blocks.head)
        self.args: Mapping[str, Any] = common.hints.get("args", {})
        self.pieces = 0

    def make(self) -> tuple[Contents, list[Finding]]:
        """What there is, and what is left out.

        Raises:
            CheckpointError, UnsupportedError: as of :func:`read_contents`.
        """
        held: dict[str, dict[str, StoredTensor]] = defaultdict(dict)  # by state; "" of the weights
        told = self.blocks.told
        unnamed = next(filter(_UNNAMED.match, (*told.tensors, *told.values)), "")
        for key in told.tensors:
            if _UNNAMED.match(key):
                continue
            state, name = match.groups() if (match := _STATE.fullmatch(key)) else ("", key)
            state = MASTER if state in _MASTERS else state
            if state in (MODULE, COPY) or name in held[state]:
                raise CheckpointError(f"tells of {key} beside another one; it is damaged.", path=self.path)
            held[state][name] = self._unflatten(key, self.blocks.make_tensor(key))
        found = {state: self._split(tensors) for state, tensors in held.items()}
        weights = found.pop("", {})
        if not weights:
            raise UnsupportedError("holds no model's tensors.", path=self.path)
        states: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        for state, tensors in found.items():
            for name, tensor in tensors.items():
                states[name][state] = tensor
        groups, findings = self._list_groups(weights, states)
        contents = Contents(
            MEGATRON,
            self.blocks.head,
            weights,
            states,
            self._list_scalars(groups, states),
            groups,
            counters=self._read_counters(),
            stateless=f"{self.path}: {self._describe_unnamed(unnamed)}" if unnamed else "",
            hints=self._make_hints(weights),
            unchecked=UNCHECKED,
        )
        return contents, [*findings, *self._list_left()]

    def _unflatten(self, key: str, tensor: StoredTensor) -> StoredTensor:
        """The tensor itself where each block of it has been flattened and cut (``fully_sharded_model_space``).

        Of [X, Y] in blocks of [x, y] there is then [X / x, Y / y, x · y].

        Raises:
            CheckpointError: the sizes contradict each other.
        """
        whole = self.blocks.told.flattened.get(key)
        if whole is None:
            return tensor
        counts, numel = tensor.shape[:-1], tensor.shape[-1:]
        fits = len(counts) == len(whole) and all(n > 0 and size % n == 0 for n, size in zip(counts, whole, strict=True))
        block = tuple(size // n for n, size in zip(counts, whole, strict=True)) if fits else ()
        if not block or numel != (count(block),):
            raise CheckpointError(
                f"tells of {key} of shape {whole} in blocks of {tensor.shape}; it is damaged.", path=self.path
            )
        chunks, itemsize = [], ITEMSIZE[tensor.dtype]
        for chunk in tensor.chunks:
            *places, start = chunk.offsets
            if chunk.shape[:-1] != (1,) * len(block):
                raise CheckpointError(f"tells of a part of several blocks of {key}; it is damaged.", path=self.path)
            corner = [place * size for place, size in zip(places, block, strict=True)]
            for offsets, shape, at in cut_run(block, start, start + chunk.shape[-1]):
                offsets = tuple(map(sum, zip(corner, offsets, strict=True)))
                chunks.append(replace(chunk, offsets=offsets, shape=shape, begin=chunk.begin + (at - start) * itemsize))
        return StoredTensor(tensor.dtype, whole, tuple(chunks))

    def _read_counters(self) -> dict[str, int]:
        """Raises CheckpointError: something else than counts."""
        told = {"global_steps": self.common.hints.get("iteration"), "global_samples": self.args.get(_SAMPLES)}
        found = {key: value for key, value in told.items() if value is not None}
        for key, value in found.items():
            if type(value) is not int or value < 0:
                raise CheckpointError(f"its {key} is {value!r:.40}; it is damaged.", path=self.common.path)
        return found

    def _split(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Tensors of layers, gate and up in one, all experts of a layer in one.

        Raises:
            CheckpointError: something is twice, missing, or of sizes that no model has.
        """
        found: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            for layer_name, layer in self._unstack(name, tensor):
                if layer_name in found:
                    raise CheckpointError(f"tells of {layer_name} twice; it is damaged.", path=self.path)
                found[layer_name] = layer
        return self._join_experts(self._join_halves(found))

    def _unstack(self, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
        stack = _STACK.search(name)
        if stack is None:
            yield name, tensor
            return
        layers, *rest = tensor.shape or (0,)
        shape, at = tuple(rest), stack.end()
        chunks: dict[int, list[Chunk]] = defaultdict(list)
        if not 0 < layers <= _MOST_LAYERS or not count(shape):
            raise CheckpointError(f"tells of {layers} layers {shape} of {name}; it is damaged.", path=self.path)
        for chunk in tensor.chunks:
            self.pieces += chunk.shape[0]
            if self.pieces > _MOST_PIECES:
                raise UnsupportedError(f"has more than {_MOST_PIECES} blocks of layers.", path=self.path)
            stride = count(chunk.shape[1:]) * ITEMSIZE[tensor.dtype]
            for number in range(chunk.shape[0]):
                part = replace(
                    chunk, offsets=chunk.offsets[1:], shape=chunk.shape[1:], begin=chunk.begin + number * stride
                )
                chunks[chunk.offsets[0] + number].append(part)
        if missing := [layer for layer in range(layers) if layer not in chunks]:
            raise CheckpointError(f"has no block of {name} of layers {join_numbers(missing)}.", path=self.path)
        for layer in range(layers):
            made = StoredTensor(tensor.dtype, shape, tuple(chunks[layer]))
            yield from self._unstack(f"{name[:at]}{layer}.{name[at:]}", made)

    def _join_halves(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Gate and up (``_w``, ``_v``), one behind the other along the rows."""
        found: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            match = _HALF.fullmatch(name)
            other = tensors.get(f"{match[1]}_{'v' if match[2] == 'w' else 'w'}") if match else None
            if match is None or other is None:
                found[name] = tensor
            elif match[1] in tensors:
                raise CheckpointError(f"holds {match[1]} twice, whole and in two.", path=self.path)
            elif match[2] == "w":
                dim = -2 if match[1].endswith(".weight") else -1
                found[match[1]] = self._join(match[1], [tensor, other], dim)
        return found

    def _join_experts(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """All experts of a layer in one, as where they are saved so."""
        found: dict[str, StoredTensor] = {}
        held: dict[str, dict[int, StoredTensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            if match := _EXPERT.fullmatch(name):
                held[match[1] + match[3]][int(match[2])] = _prepend(tensor)
            else:
                found[name] = tensor
        for name, experts in held.items():
            if name in found or sorted(experts) != list(range(len(experts))):
                raise CheckpointError(f"has not each expert of {name} once.", path=self.path)
            found[name] = self._join(name, [experts[number] for number in range(len(experts))], 0)
        return found

    def _join(self, name: str, parts: Sequence[StoredTensor], dim: int) -> StoredTensor:
        """Tensors of one shape, one behind the other along a dimension."""
        dtype, shape = parts[0].dtype, parts[0].shape
        if any((part.dtype, part.shape) != (dtype, shape) for part in parts) or not -len(shape) <= dim < len(shape):
            raise CheckpointError(f"holds parts of {name} that do not fit each other.", path=self.path)
        dim %= len(shape)
        chunks = [
            replace(chunk, offsets=_change(chunk.offsets, dim, chunk.offsets[dim] + number * shape[dim]))
            for number, part in enumerate(parts)
            for chunk in part.chunks
        ]
        return StoredTensor(dtype, _change(shape, dim, shape[dim] * len(parts)), tuple(chunks))

    def _list_groups(
        self, weights: Mapping[str, StoredTensor], states: Mapping[str, Any]
    ) -> tuple[list[tuple[tuple[str, ...], dict[str, Any]]], list[Finding]]:
        """Names and hyper-parameters of the param groups.

        The groups are saved without their members, which follow from marks of theirs by Megatron's own rules.
        """
        members: list[list[str]] = [[] for _ in self.common.groups]
        for name in states:
            owners = self._find_groups(name, weights[name].shape if name in weights else ())
            hypers = [_strip(self.common.groups[number]) for number in owners]
            if not owners or any(hyper != hypers[0] for hyper in hypers):
                text = (
                    f"{self.path}: its param groups do not tell whose they are (of {name}), so that this run's "
                    "hyper-parameters stay."
                )
                return [], [Finding("unsaved", self.blocks.head, text, WARNING)]
            members[owners[0]].append(name)
        groups = zip(members, self.common.groups, strict=True)
        return [(tuple(names), _strip(group)) for names, group in groups if names], []

    def _list_scalars(
        self, groups: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]], states: Mapping[str, Any]
    ) -> dict[str, dict[str, float]]:
        """The steps of all parameters that have states; without groups the step that all of these have."""
        steps = {group["step"] for group in self.common.groups if "step" in group}
        found = {name: hyper["step"] for names, hyper in groups for name in names if "step" in hyper}
        if not groups and len(steps) == 1:
            found = dict.fromkeys(states, steps.pop())
        return {name: {"step": float(step)} for name, step in found.items()}

    def _find_groups(self, name: str, shape: Shape) -> list[int]:
        """Numbers of the param groups that may be a parameter's."""
        numbers = list(range(len(self.common.groups)))
        is_expert = ".experts." in name
        is_vector = name.endswith(".bias") or len(shape) == (2 if is_expert else 1)
        if self.args.get("apply_wd_to_qk_layernorm") is True and re.search(r"\b[qk]_layernorm\.", name):
            is_vector = False
        is_table = name.endswith(_TABLES)
        for mark, is_so in ((_is_experts, is_expert), (_is_undecayed, is_vector), (self._is_decoupled, is_table)):
            marked = [number for number in numbers if mark(self.common.groups[number])]
            if marked and len(marked) < len(numbers):
                numbers = marked if is_so else [number for number in numbers if number not in marked]
        return numbers

    def _is_decoupled(self, group: Mapping[str, Any]) -> bool:
        """Whether a group is of the tables of words, with a rate of their own."""
        rate = self.args.get("decoupled_lr")
        return group.get("is_decoupled_lr") is True or (rate is not None and group.get("max_lr") == rate)

    def _describe_unnamed(self, key: str) -> str:
        form = self.common.sharding or "dp_reshardable"
        return (
            f"its optimizer states are of the form {form}, in the order of the saving ranks' buffers ({key:.80}): "
            f"nothing tells whose they are. {_ADVICE}."
        )

    def _make_hints(self, weights: Mapping[str, StoredTensor]) -> dict[str, Any]:
        """Arguments and the like; from them the vocabulary (else all its rows), whose padding may differ."""
        hints = dict(self.common.hints)
        tables = {name: each.shape[0] for name, each in weights.items() if name.endswith(_TABLES) and each.shape}
        if rows := min(tables.values(), default=0):
            told = self.args.get("vocab_size")
            size = told if type(told) is int and told > 0 else rows
            size += self.args.get("tokenizer_type") == "NullTokenizer"  # which counts no end of a document
            names = [f"^{re.escape(name)}$" for name in tables]
            hints[INFO] = {VOCAB_SIZE: min(size, rows), VOCABULARY: names}
        return hints

    def _list_left(self) -> list[Finding]:
        """What is in the checkpoint and not loaded, as a warning."""
        objects = {key.partition("/")[0] for key in self.blocks.told.values}
        own = sorted(key for key in objects if not key.endswith(("_extra_state", _ENTRY)) and not _UNNAMED.match(key))
        return list_left([*self.common.beside, *own], "Megatron's own", self.path, self.blocks.head)


def cut_run(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Elements [start, stop) of a flattened tensor as blocks: of each where it lies, its shape, its first element."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,), start
        return
    inner = count(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # all within one row
        parts = [(last, start, stop)]
    else:
        if first < last:
            yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), first * inner
        parts = [(first - 1, start, first * inner), (last, last * inner, stop)]
    for row, low, high in parts:
        for offsets, block, at in cut_run(shape[1:], low - row * inner, high - row * inner):
            yield (row, *offsets), (1, *block), row * inner + at


def _prepend(tensor: StoredTensor) -> StoredTensor:
    """The same with a dimension of 1 in front."""
    chunks = [replace(chunk, offsets=(0, *chunk.offsets), shape=(1, *chunk.shape)) for chunk in tensor.chunks]
    return StoredTensor(tensor.dtype, (1, *tensor.shape), tuple(chunks))


def _change(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _strip(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that are an optimizer's."""
    return {key: value for key, value in group.items() if key not in _KEYS}


def _is_experts(group: Mapping[str, Any]) -> bool:
    return group.get("is_expert_parallel") is True


def _is_undecayed(group: Mapping[str, Any]) -> bool:
    return bool(group.get("wd_mult", group.get("pre_wd_mult")) == 0)
