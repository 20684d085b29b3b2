"""Compare the state files of one rank with its live engine, without an index.

Engines of unknown layout, and nodes with local files, are loaded by DeepSpeed itself from exactly these files, which is
correct if an engine like the live one saved them. All functions raise CheckpointError if a file cannot be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ...extensions.registry import REGISTRY, find_for_tree
from ...io.store import is_file
from ...model.index import AtomicIndex, Use
from ...model.topology import find_precision
from ...torchsave.objects import unwrap_enum
from ...torchsave.torchfile import read_header
from ..findings import explain_form
from .files import CLIENT, ZERO, scan_folder
from .hints import read_hints
from .reading import as_list, list_globals, normalize_zero

_STATE_ENDINGS = ("model_states.pt", "optim_states.pt")  # suffixes of all files that DeepSpeed may unpickle

ORDER = "order of parameters"
"""Fact: the names in the module's state dict, as stage 0 saves states by position. Names of one side are ignored."""

_SHOWN = 120  # maximum characters of a value in a message


def find_state_file(index: AtomicIndex, mp_rank: int, dp_rank: int = 0) -> str | None:
    """Return a saved rank's state file; None if there is only the first rank's.

    It may be in another place than the first file, or on another machine.

    Args:
        dp_rank: data-parallel rank (ZeRO 3).
    """
    folder, name = os.path.split(index.state_file)
    name = name.replace("mp_rank_00", f"mp_rank_{mp_rank:02d}").replace("zero_pp_rank_0_", f"zero_pp_rank_{dp_rank}_")
    pattern = re.escape(name)
    if index.topology.tp == index.topology.pp == 1:  # ALST's files may have the sequence-parallel rank there
        pattern = pattern.replace("_mp_rank_00_", r"_mp_rank_\d+_")
    candidates = [file.path for file in index.files if re.fullmatch(pattern, os.path.basename(file.path))]
    if index.access.is_partial:
        return next((path for path in candidates if path != index.state_file), None)
    paths = (*candidates, os.path.join(folder, name), os.path.join(folder, CLIENT, name))
    return next((path for path in paths if path != index.state_file and is_file(path)), None)


def read_state_tree(index: AtomicIndex) -> Any:
    """Return the state file's tree as inert data; empty for a foreign checkpoint."""
    return {} if index.format else read_header(index.state_file).tree


def read_saved_config(index: AtomicIndex) -> Mapping[str, Any]:
    """Return the ds_config of the saved run; empty if the state file has none."""
    tree = read_state_tree(index)
    config = tree.get("ds_config") if isinstance(tree, dict) else None
    return config if isinstance(config, dict) else {}


def compare_own_files(model: str, optim: str | None, live: Mapping[str, Any]) -> list[str]:
    """Describe the differences between a rank's files and the live engine.

    Args:
        model: path of the rank's model states.
        optim: path of its ZeRO optimizer states; None at stage 0.
        live: facts about the engine (:func:`deepspeed_ucp.engine.coverage.describe_own_files`).
    """
    missing = [path for path in (model, optim) if path is not None and not is_file(path)]
    if missing:
        return [f"{path} is missing" for path in missing]
    tree, others = read_header(model).tree, read_header(optim).tree if optim else {}
    with explain_form(model):
        saved, facts = _list_saved_facts(model, tree, others), dict(live)
    orders = saved[ORDER], facts.pop(ORDER, ())
    names = set(orders[0]).intersection(orders[1])
    before, now = ([name for name in order if name in names] for order in orders)
    moved = [f"{ORDER} {one} → {other}" for one, other in zip(before, now, strict=True) if one != other][:1]
    return moved + [
        f"{key} {_clip(saved.get(key))} → {_clip(value)}" for key, value in facts.items() if saved.get(key) != value
    ]


def read_own_hints(model: str) -> dict[str, Any]:
    """Return plain data about the model in a rank's file (:func:`.hints.read_hints`)."""
    with explain_form(model):
        return read_hints(read_header(model).tree)


def list_own_globals(folder: str, member: int, members: int) -> dict[Use, str]:
    """Return uncommon classes and functions of the state files → first such file.

    Args:
        member, members: number of this process, and of all processes that share the files.
    """
    entries, paths = scan_folder(folder), dict[Use, str]()
    names = [name for name in entries if name.endswith(_STATE_ENDINGS)]
    atoms = scan_folder(os.path.join(folder, ZERO), deep=True) if ZERO in entries else {}
    names += [f"{ZERO}/{name}" for name in atoms if name.endswith(".pt")]
    for path in sorted(os.path.join(folder, name) for name in names)[member::members]:
        for use in list_globals(read_header(path)):
            paths.setdefault(use, path)
    return paths


def _clip(value: Any) -> str:
    text = "not recorded" if value is None else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _list_saved_facts(model: str, tree: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    config = tree.get("ds_config")
    config = config if isinstance(config, dict) else {}  # a path
    state = others.get("optimizer_state_dict") or {}
    shapes = as_list(tree.get("param_shapes"))
    facts = {
        "ZeRO stage": normalize_zero(config.get("zero_optimization") or {}).get("stage") or 0,
        "precision": find_precision(config),
        "data-parallel ranks": tree.get("dp_world_size"),
        "model-parallel ranks": tree.get("mp_world_size"),
        **{flag: bool(config.get(flag, False)) for row in REGISTRY for flag in row.flags},
        **{fact: value for row in REGISTRY for fact, value in row.facts.items()},
        ORDER: list(tree.get("module") or ()),
        "parameters": [[(str(name), tuple(shape)) for name, shape in group.items()] for group in shapes],
        "partitions": [int(unwrap_enum(count)) for count in as_list(state.get("partition_count"))],
        "partition groups": state.get("ds_zero_partition_groups"),
    }
    for extension in find_for_tree(tree):
        facts |= extension.describe_own_files(tree, model)
    return facts
