"""Readers of foreign formats, and the index of a foreign folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ...io.jsonfile import read_json
from ...io.paths import join_path
from ...model.index import AtomicIndex
from ..deepspeed.files import scan_if_there
from ..deepspeed.gather import find_late_files, find_step_mismatch
from ..deepspeed.reading import EXTRA_STATE
from ..findings import WARNING, Finding, explain_form
from ..latest import find_tags
from ..locations import FileTable
from . import adapter, dcp, names, weights
from .contents import NEITHER, Contents, list_ignored, make_index, read_once

_PACKED = re.compile(r".*(weight_scale(_inv)?|qweight|weight_packed|weight\.absmax|proj_blocks)")
"""Names of tensors that accompany or replace quantized weights."""


_SHAPING = re.compile(
    r"num_.*heads|n_head|head_dim|rope_(theta|parameters)|\w*_eps\w*|layer_norm_epsilon|hidden_act\w*"
)
"""Keys of a configuration that change the results of a model with the same weights."""

_EMPTY = (
    "holds no tensors: there is nothing to load. Trainers write such files next to an engine's tag under ZeRO 3 "
    "without stage3_gather_16bit_weights_on_model_save."
)


READERS: dict[str, Callable[[FileTable, Comm], tuple[Contents, list[Finding]]]] = {
    names.DCP: dcp.read_contents,
    **{kind: partial(weights.read_contents, kind) for kind in (names.SAFETENSORS, names.STATE_DICT)},
    names.ADAPTER: adapter.read_contents,
}
"""Readers of the headers of a folder's files, each on one rank (collective).

They raise CheckpointError if files are damaged, missing or contradictory, UnsupportedError for an unknown kind, equal
on all ranks.
"""


def survey_foreign(where: FileTable, comm: Comm, kind: str) -> tuple[AtomicIndex, list[Finding]]:
    """Return the index of a foreign checkpoint, and warnings (collective)."""
    if kind == names.MEGATRON:
        raise comm.common(UnsupportedError(names.REFUSAL, path=where.folder))
    taken = names.pick_model(kind, [name for name in where.entries if names.holds(kind, name)])
    chosen = where.choose(taken.__contains__)
    contents, findings = READERS[kind](chosen, comm)
    if names.OPTIMIZER in where.entries and kind in (names.SAFETENSORS, names.STATE_DICT):
        contents, ignored = weights.add_states(contents, where, comm)
        findings += ignored
    contents = adapter.name_as_live(contents)
    extra = sorted(name for name in {*contents.weights, *contents.aliases} if name.endswith(EXTRA_STATE))
    findings += list_ignored(extra, "an extra state of a module", where.path(contents.head), contents.head)
    weights_alone = {name: tensor for name, tensor in contents.weights.items() if name not in extra}
    aliases = {alias: name for alias, name in contents.aliases.items() if alias not in extra}
    contents = replace(contents, weights=weights_alone, aliases=aliases)

    def build() -> AtomicIndex:
        if not contents.weights:
            raise CheckpointError(_EMPTY, path=where.path(contents.head))
        with explain_form(where.path(contents.head)):
            return make_index(contents, where)

    index = comm.run_replicated(build)
    if kind != names.DCP:
        has_config = kind != names.ADAPTER and names.CONFIG in where.entries  # of transformers
        config = read_once(read_json, where, names.CONFIG, comm) if has_config else {}
        shaping = {key: value for key, value in config.items() if _SHAPING.fullmatch(key)}
        index = replace(index, hints={**index.hints, "config": shaping}) if shaping else index
        findings += [*_find_unread_weights(where, kind, contents), *_find_quantized(where, contents, config)]
    stray = sorted({*contents.states, *contents.scalars} - {*contents.weights, *contents.aliases})
    reason = "states of parameters without weights in the checkpoint"
    findings += list_ignored(stray, reason, where.path(contents.head), contents.head)
    return index, [*findings, *comm.once(lambda: [*_find_other_contents(where), *_find_mixed(where, contents)])]


def _find_mixed(where: FileTable, contents: Contents) -> list[Finding]:
    """Warn if optimizer states are of another save than the weights."""
    tensors = chain(contents.weights.values(), *(states.values() for states in contents.states.values()))
    if not contents.states:  # weights may be downloaded at any time
        return []
    used = {contents.head, *(chunk.file for tensor in tensors for chunk in tensor.chunks)}
    steps, state = contents.counters.get("global_steps"), join_path(where.folder, names.TRAINER_STATE)
    return [*find_late_files(where.folder, where.entries, sorted(used)), *find_step_mismatch(state, steps)]


def _find_other_contents(where: FileTable) -> list[Finding]:
    """Warn of a trainer's ignored files, and of DeepSpeed's checkpoints in subfolders."""
    entries = scan_if_there(where.folder)
    tags = sorted(
        name for name, entry in entries.items() if entry.is_folder and find_tags(os.path.join(where.folder, name))
    )
    text = f"{where.folder}: this folder is read, not DeepSpeed's checkpoints in {shorten(tags)}. Name one of them"
    runs = [Finding("extra", tags[0], f"{text} to resume.", WARNING)] if tags else []
    ignored = sorted(filter(names.TRAINERS.fullmatch, entries))
    ignored += [f"{names.META} (schedulers, loops)"] if names.META in entries else []
    numbered = sorted(filter(names.NUMBERED.fullmatch, entries))
    unnamed = list_ignored(numbered, "states by number, without the names of their parameters", where.folder)
    return [*runs, *list_ignored(ignored, NEITHER, where.folder), *unnamed]


def _find_unread_weights(where: FileTable, kind: str, contents: Contents) -> Iterator[Finding]:
    """Warn of weights in the folder that are not read."""
    used = {contents.head, *(chunk.file for tensor in contents.weights.values() for chunk in tensor.chunks)}
    heads = [name for name in where.entries if any(names.holds(reader, name, heads=True) for reader in READERS)]
    if unread := sorted({*heads} - used):
        text = f"{where.folder}: {contents.head} is read ({kind}), as by Hugging Face's libraries; not read: "
        yield Finding("extra", contents.head, text + shorten(unread), WARNING)


def _find_quantized(where: FileTable, contents: Contents, config: Mapping[str, Any]) -> Iterator[Finding]:
    quantized = config.get(names.QUANTIZED)
    method = quantized.get("quant_method", "") if isinstance(quantized, dict) else ""
    method = str(method or f"{names.QUANTIZED} in {names.CONFIG}") if quantized else ""
    method = method or next(filter(_PACKED.fullmatch, contents.weights), "")
    if method:
        text = (
            f"{where.folder}: its weights are quantized ({method}), which only transformers unpacks. Load it there, "
            "dequantize() it, save_pretrained it, and load that folder."
        )
        yield Finding("unsupported", contents.head, text)
