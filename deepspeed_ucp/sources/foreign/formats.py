"""The readers by format, and the index of a folder that is of one of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NoReturn, Protocol

from ...atoms import AtomicIndex
from ...comm import Comm
from ...errors import CheckpointError, UnsupportedError, shorten
from ...io.jsonfile import read_json
from ...io.paths import join_path
from ..compare import find_late_files, find_other_step
from ..files import scan_if_there
from ..findings import WARNING, Finding
from ..latest import find_tags
from ..reading import explain_form
from ..table import FileTable
from . import adapter, dcp, names, safetensors, statedict
from .contents import NEITHER, Contents, list_left, make_index
from .headers import read_once
from .states import add_states

_WHOSE = "states by number, of which nothing tells whose they are"

_WEIGHTLESS = "states of parameters that the model there does not have"

_PACKED = re.compile(r".*(weight_scale(_inv)?|qweight|weight_packed|weight\.absmax|proj_blocks)")
"""Names of tensors that there are beside quantized weights, or in their place."""


_SHAPING = re.compile(
    r"num_.*heads|n_head|head_dim|rope_(theta|parameters)|\w*_eps\w*|layer_norm_epsilon|hidden_act\w*"
)
"""Keys of a configuration by which models of the same weights compute other numbers."""

_EMPTY = (
    "holds no tensors: there is nothing to load. Trainers leave such files beside an engine's tag under ZeRO 3 without "
    "stage3_gather_16bit_weights_on_model_save."
)


class Reader(Protocol):
    """Reads the headers of a format's files, each by one rank; collective.

    Raises:
        CheckpointError: damaged, missing or contradicting files; the same on every rank.
        UnsupportedError: a kind that is not covered.
    """

    def __call__(self, where: FileTable, comm: Comm, /) -> tuple[Contents, list[Finding]]: ...


def _refuse_megatron(where: FileTable, _: Comm, /) -> NoReturn:
    raise UnsupportedError(names.REFUSAL, path=where.folder)


READERS: dict[str, Reader] = {
    names.MEGATRON: _refuse_megatron,
    names.DCP: dcp.read_contents,
    names.SAFETENSORS: safetensors.read_contents,
    names.STATE_DICT: statedict.read_contents,
    names.ADAPTER: adapter.read_contents,
}


def survey_foreign(where: FileTable, comm: Comm, kind: str) -> tuple[AtomicIndex, list[Finding]]:
    """The index of a foreign checkpoint, and what is odd about it; collective.

    Args:
        kind: its format.

    Raises:
        CheckpointError, UnsupportedError: as of :class:`Reader`.
    """
    taken = names.pick_model(kind, [name for name in where.entries if names.holds(kind, name)])
    chosen = where.choose(taken.__contains__)
    contents, findings = READERS[kind](chosen, comm)
    if names.OPTIMIZER in where.entries and kind in (names.SAFETENSORS, names.STATE_DICT):
        contents = add_states(contents, where, comm)
    contents = adapter.name_as_live(contents)

    def unite() -> AtomicIndex:
        if not contents.weights:
            raise CheckpointError(_EMPTY, path=where.path(contents.head))
        with explain_form(where.path(contents.head)):
            return make_index(contents, where)

    index = comm.alike(unite)
    if kind != names.DCP:
        config = _read_config(where, kind, comm)
        told = {key: value for key, value in config.items() if _SHAPING.fullmatch(key)}
        index = index.change(hints={**index.model.hints, "config": told}) if told else index
        findings += [*_find_passed_over(where, kind, contents), *_find_packed(where, contents, config)]
    stray = sorted({*contents.states, *contents.scalars} - {*contents.weights, *contents.aliases})
    findings += list_left(stray, _WEIGHTLESS, where.path(contents.head), contents.head)
    return index, [*findings, *comm.once(lambda: [*_find_beside(where), *_find_mixed(where, contents)])]


def _find_mixed(where: FileTable, contents: Contents) -> list[Finding]:
    """What tells that an optimizer's states are of another save than the rest."""
    tensors = chain(contents.weights.values(), *(held.values() for held in contents.states.values()))
    if not contents.states:  # weights alone may be fetched at any time
        return []
    used = {contents.head, *(chunk.file for tensor in tensors for chunk in tensor.chunks)}
    steps, state = contents.counters.get("global_steps"), join_path(where.folder, names.TRAINER_STATE)
    return [*find_late_files(where.folder, where.entries, sorted(used)), *find_other_step(state, steps)]


def _find_beside(where: FileTable) -> list[Finding]:
    """What trainers keep beside model and optimizer, which DeepSpeed's engine has no place for; a run's checkpoints."""
    held = scan_if_there(where.folder)
    tags = sorted(name for name, each in held.items() if each.is_folder and find_tags(os.path.join(where.folder, name)))
    told = f"{where.folder}: is read itself, not the checkpoints of DeepSpeed's in {shorten(tags)}: name one of them"
    runs = [Finding("extra", tags[0], f"{told} to go on from it.", WARNING)] if tags else []
    left = sorted(filter(names.TRAINERS.fullmatch, held))
    left += [f"{names.META} (schedulers, loops)"] if names.META in held else []
    numbered = sorted(filter(names.NUMBERED.fullmatch, held))
    return [*runs, *list_left(left, NEITHER, where.folder), *list_left(numbered, _WHOSE, where.folder)]


def _find_passed_over(where: FileTable, kind: str, contents: Contents) -> Iterator[Finding]:
    """Weights in the folder that are not the model's."""
    used = {contents.head, *(chunk.file for tensor in contents.weights.values() for chunk in tensor.chunks)}
    heads = [name for name in where.entries if any(names.holds(each, name, heads=True) for each in READERS)]
    if left := sorted({*heads} - used):
        text = f"{where.folder}: {contents.head} is taken ({kind}), as Hugging Face's libraries do; not read: "
        yield Finding("extra", contents.head, text + shorten(left), WARNING)


def _read_config(where: FileTable, kind: str, comm: Comm) -> dict[str, Any]:
    """The configuration of transformers beside weights; empty without one."""

    if kind == names.ADAPTER or names.CONFIG not in where.entries:
        return {}
    return read_once(read_json, where, names.CONFIG, comm)


def _find_packed(where: FileTable, contents: Contents, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether weights are quantized, so that the elements in the files are not their values."""
    told = config.get(names.QUANTIZED)
    how = told.get("quant_method", "") if isinstance(told, dict) else ""
    how = str(how or f"{names.QUANTIZED} in {names.CONFIG}") if told else ""
    how = how or next(filter(_PACKED.fullmatch, contents.weights), "")
    if how:
        text = (
            f"{where.folder}: its weights are quantized ({how}), which only transformers unpacks. Load it there, "
            "dequantize() it, save_pretrained it, and load that folder."
        )
        yield Finding("unsupported", contents.head, text)
