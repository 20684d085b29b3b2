"""Writes an atomic checkpoint's files without atoms: client and optimizer state.

Objects of the source's files are copied without running their code (``torchsave.rewrite``). One ``optimizer_state.pt``
serves upstream's loaders of all stages: ZeRO 1/2 and BF16 read ``param_groups`` and the scaler at its top
(``runtime/base_optimizer.py``), ZeRO 3 reads ``optimizer_state_dict`` in it (``runtime/zero/stage3.py``).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..engine_state import KEY
from ..formats.deepspeed.files import CLIENT, sort_names
from ..formats.deepspeed.ownfiles import find_state_file
from ..formats.deepspeed.reading import select_extra_states
from ..formats.deepspeed.save import DEEPSPEEDS
from ..formats.deepspeed.seal import SealedFile
from ..formats.universal.index import STATE_FILE, is_plain
from ..io.disk import explain_full
from ..model.index import AtomicIndex, GroupInfo
from ..model.wrappers import WRAPPERS, ZERO_STAGE_KEY
from ..stream.reader import read_state_file
from ..torchsave.objects import Global, PickledObject, make_instance, pack_scalar
from ..torchsave.repickle import PROTOCOL
from ..torchsave.rewrite import count_bytes, save_parts
from ..torchsave.torchfile import TorchFile, read_header
from ..torchsave.zipframe import make_tensor

MODEL_STATES_ZERO3: Final = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""The name under which upstream's stage-3 engines look for the same file."""
OPTIMIZER_STATE: Final = "zero/optimizer_state.pt"

_EMPTIED = ("optimizer", "frozen_param_fragments")
"""Entries of a model-states file that hold only tensors of the model (``load.client``)."""

_INNER = tuple({row.inner: None for row in WRAPPERS.values() if row.inner})
"""Keys of the wrapped optimizer's state in wrappers."""

_SHARDED = {"param_slice_mappings", *_INNER, *(key for row in WRAPPERS.values() for key in row.keys)} - {ZERO_STAGE_KEY}
"""Entries of an optimizer's state that belong to one rank of the source."""

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_OLDEST = "0.16.0"  # upstream refuses a file without a version; any recent one serves for a source without a version
_KEPT_BYTES = 1 << 16  # other entries with larger tensors are partitions of one rank


def write_states(index: AtomicIndex, folder: str) -> dict[str, SealedFile]:
    """Write the files without atoms; return them by relative path. The caller syncs."""
    if index.format:  # a foreign checkpoint has only counters
        main = TorchFile("", 0, {}, 0, "", {**index.counters, "ds_version": _OLDEST}, PROTOCOL, {}, ())
    else:
        main = read_state_file(index, index.state_file)
    saved = _as_dict(main.tree)
    with explain_full(folder):
        client = _save(main, _strip_model(saved), os.path.join(folder, STATE_FILE), {})
        _link(os.path.join(folder, STATE_FILE), os.path.join(folder, MODEL_STATES_ZERO3))
        os.makedirs(os.path.join(folder, "zero"), exist_ok=True)
        file, state = _find_optimizer(index, main)
        common, added = _describe_optimizer(index, file, state, saved)
        return {
            STATE_FILE: client,
            MODEL_STATES_ZERO3: client,
            OPTIMIZER_STATE: _save(file, common, os.path.join(folder, OPTIMIZER_STATE), added),
            **dict(_write_client_states(index, folder)),
        }


def find_dropped_client(index: AtomicIndex) -> list[str]:
    """Return client-state keys of ZeRO 3, of which only the first rank's is converted."""
    if index.format or index.topology.zero_stage != 3 or index.topology.dp == 1:
        return []
    return sorted(map(str, _as_dict(read_header(index.state_file).tree).keys() - {*DEEPSPEEDS, KEY}))


def _save(file: TorchFile, tree: Any, path: str, added: Mapping[str, bytes]) -> SealedFile:
    size, crc = save_parts(file, tree, path, added)
    return SealedFile(size=size, crc=crc)


def _write_client_states(index: AtomicIndex, folder: str) -> Iterator[tuple[str, SealedFile]]:
    if index.format:
        return
    tp, pp = index.written_degrees
    for rank in range(1, tp * pp):
        if (path := find_state_file(index, rank)) is None:
            continue
        file, name = read_state_file(index, path), f"{CLIENT}/mp_rank_{rank:02d}_model_states.pt"
        os.makedirs(os.path.join(folder, CLIENT), exist_ok=True)
        yield name, _save(file, _strip_model(_as_dict(file.tree)), os.path.join(folder, name), {})


def _link(path: str, second_path: str) -> None:
    """Link a file under a second name; copy it if the file system has no hard links."""
    if os.path.lexists(second_path):
        os.unlink(second_path)
    try:
        os.link(path, second_path)
    except OSError:
        shutil.copyfile(path, second_path)


def _strip_model(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """Remove a model-states file's tensors, except the modules' extra states."""
    entries = {key: None if key in _EMPTIED else value for key, value in saved.items()}
    if isinstance(entries.get("module"), dict):
        entries["module"] = select_extra_states(saved)
    if "mp_world_size" in entries:  # upstream's loader compares it with the number of model-states files
        entries["mp_world_size"] = 1
    return entries


def _find_optimizer(index: AtomicIndex, main: TorchFile) -> tuple[TorchFile, Any]:
    """Return the source's first file with optimizer state, and the state or None."""
    folder = os.path.dirname(index.state_file)
    if index.format:
        return main, None
    if index.topology.is_atomic:
        file = read_state_file(index, os.path.join(folder, OPTIMIZER_STATE))
        return file, file.tree
    paths = {os.path.basename(file.path): file.path for file in index.files}  # in any of several places
    listed = sort_names(folder, paths.keys())[0]["optim"]
    if not listed:
        return main, _as_dict(main.tree).get("optimizer")
    first = min(listed, key=lambda key: key[1:])
    file = read_state_file(index, paths[listed[first]])
    return file, _as_dict(file.tree).get("optimizer_state_dict")


def _as_dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _describe_optimizer(
    index: AtomicIndex, file: TorchFile, state: Any, main: Mapping[Any, Any]
) -> tuple[dict[Any, Any], dict[str, bytes]]:
    """Return the dictionary of ``optimizer_state.pt``, and its additional storages."""
    saved = _as_dict(state)
    entries = {
        key: value for key, value in saved.items() if key not in _SHARDED and count_bytes(file, value) <= _KEPT_BYTES
    }
    if index.scaler and "loss_scaler" not in entries:
        entries |= {
            "loss_scaler": _make_scaler(index.scaler, main),
            "dynamic_loss_scale": bool(index.scaler["dynamic"]),
        }
    versions = (entries.get("ds_version"), _as_dict(file.tree).get("ds_version"), main.get("ds_version"))
    groups = _list_groups(index.groups, saved)
    step, added = _describe_step(index)
    inner = {"state": {0: step}, "param_groups": groups}
    common = {"ds_version": next((v for v in versions if v), _OLDEST), "param_groups": groups}
    return {**entries, **common, "optimizer_state_dict": inner}, added


def _list_groups(groups: Sequence[GroupInfo], saved: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Return an optimizer's param groups, each with its flat buffer as parameter."""
    inner = next((_as_dict(saved[key]) for key in _INNER if key in saved), saved)
    originals = [_as_dict(group) for group in inner.get("param_groups") or ()]
    listed = []
    for i, group in enumerate(groups):
        original = originals[i] if i < len(originals) else {}
        hyper = {key: value if is_plain(value) else original.get(key) for key, value in group.hyper.items()}
        listed.append({**hyper, "params": [i]})
    return listed


def _describe_step(index: AtomicIndex) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the first parameter's step, used by upstream's stage 3, and its storage."""
    counted = (index.scalars.get(param, {}) for group in index.groups for param in group.members)
    steps = [scalars["step"] for scalars in counted if "step" in scalars]
    steps += [group.hyper["step"] for group in index.groups if "step" in group.hyper]
    if not steps or not is_plain(steps[0]):
        return {}, {}
    if dtype := index.scalar_dtypes.get("step"):
        return {"step": make_tensor("step", dtype, 1, ())}, {"step": pack_scalar(dtype, steps[0])}
    return {"step": steps[0]}, {}


def _make_scaler(scaler: Mapping[str, Any], main: Mapping[Any, Any]) -> PickledObject:
    """Return DeepSpeed's scaler object, which the FP16 wrappers save as plain fields."""
    if not scaler["dynamic"]:
        return make_instance(_SCALERS, "LossScaler", {"cur_scale": scaler["cur_scale"], "dynamic": False})
    config = _as_dict(_as_dict(main.get("ds_config")).get("fp16"))
    fields = {
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_scale": config.get("min_loss_scale", 1),
        "delayed_shift": config.get("hysteresis", 2),
        "cur_hysteresis": config.get("hysteresis", 2),
        "consecutive_hysteresis": config.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
        "dtype": Global("torch", "float16"),
    }
    return make_instance(_SCALERS, "DynamicLossScaler", {**fields, **scaler})
