"""Made checkpoints whose frozen parameters lie beside the tag, as saves have them that write these once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from deepspeed_ucp.saves.files import MappedFiles, Stable, save_over
from deepspeed_ucp.saves.frozen import split_state
from deepspeed_ucp.sources.files import name_base_file
from deepspeed_ucp.sources.frozen import write_reference
from deepspeed_ucp.sources.seal import SealedFile
from deepspeed_ucp.torchsave.records import sum_directory

NAME = "ucp_frozen-0123456789ab"


def take_out(folder: Path, names: Iterable[str], base: str = NAME) -> Path:
    """Take parameters out of a tag's files; the folder that has them then."""
    names, files, beside = frozenset(names), {}, folder.parent / base
    beside.mkdir(exist_ok=True)
    for path in sorted(folder.glob("*model_states.pt")):
        state = torch.load(path, weights_only=False)
        layer = re.match(r"layer_(\d+)-", path.name)
        own = {name.removeprefix(f"{int(layer[1])}.") for name in names if layer} or names
        if layer and int(layer[1]) not in {int(name.partition(".")[0]) for name in names if name[0].isdigit()}:
            own = {name.rpartition(".")[2] for name in names if name.startswith("tied_modules.")}
        rest, frozen, taken = split_state(state, path.name, frozenset(own))
        if taken:
            path.unlink()
            save_over(rest, str(path), Stable(), MappedFiles(wanted=False))
            made = beside / name_base_file(path.name)
            save_over(frozen, str(made), Stable(), MappedFiles(wanted=False))
            files[made.name] = describe(made)
    write_reference(str(folder), base, files)
    return beside


def describe(path: Path) -> SealedFile:
    """What a tag tells of a file of its base."""
    return SealedFile(size=os.path.getsize(path), crc=sum_directory(str(path)) or 0)
