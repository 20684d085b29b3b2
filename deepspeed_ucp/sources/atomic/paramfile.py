"""Headers of the files that DeepSpeed's ``ds_to_universal`` writes: one tensor or number each, and the optimizer's."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from ...errors import CheckpointError, UnsupportedError
from ...torchsave.objects import TensorRef, to_member
from ...torchsave.torchfile import TorchFile, read_header
from ..family import Save
from ..headers import OptimHeader, Piece
from ..reading import HeaderReader, explain_damage

PARAM = "param"
_EXPERT = "is_expert_param"
_KEYS = ("cat_dim", "param_n_sub_params", "vocab_tensor")


@dataclass(frozen=True, slots=True)
class ParamHeader:
    """One file of a parameter's folder.

    Attributes:
        name: path relative to the checkpoint's folder.
        size, crc: of the file, and CRC32 of its zip directory.
        piece: its tensor; None in ``step.pt``.
        value, dtype: its number, with the dtype where it is a 0-dim tensor.
        keys: how the converter says that it united the tensor.
    """

    name: str
    size: int
    crc: int
    piece: Piece | None = None
    value: Any = None
    dtype: str = ""
    keys: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UniversalHeaders:
    """What a converted folder's headers say.

    Attributes:
        save: the copied model states, without optimizer files.
        optim: the optimizer's param groups, of stage 3 with data-parallel rank 0's states.
        stage: ZeRO stage of the source.
        params: per folder in ``zero`` its files by state.
    """

    folder: str
    save: Save
    optim: OptimHeader
    stage: int
    params: dict[str, dict[str, ParamHeader]]

    @property
    def is_sharded(self) -> bool:
        """Whether the source was of ZeRO 3."""
        return self.stage == 3


def read_param_file(folder: str, name: str) -> ParamHeader:
    """Read the header of a parameter's file.

    Raises:
        CheckpointError: damaged, or no tensor.
        UnsupportedError: an expert's parameter.
    """
    path = os.path.join(folder, name)
    with explain_damage(path):
        return _describe(read_header(path), name)


def _describe(file: TorchFile, name: str) -> ParamHeader:
    tree = file.tree
    if isinstance(tree, dict):
        if tree.get(_EXPERT):
            raise UnsupportedError(f"{file.path}: an expert's parameter; mixture-of-experts models are not covered.")
        if PARAM not in tree:
            raise CheckpointError(f"{file.path}: has no {PARAM!r} but {sorted(map(str, tree))}; another kind of file.")
        keys = {key: tree[key] for key in _KEYS if isinstance(tree.get(key), int)}
        return ParamHeader(name, file.size, file.crc, HeaderReader(file).piece(tree[PARAM], name), keys=keys)
    if isinstance(tree, TensorRef):  # a step, or of stage 3 without tensor parallelism: flat, without a dict
        piece = HeaderReader(file).piece(tree, name)
        value, dtype = (None, "") if tree.data is None else (tree.item(), tree.dtype)
        return ParamHeader(name, file.size, file.crc, piece, value, dtype)
    if isinstance(tree, (int, float)):
        return ParamHeader(name, file.size, file.crc, value=tree)
    raise CheckpointError(f"{file.path}: holds a {type(tree).__name__}, neither a tensor nor a number.")


def read_optimizer_file(folder: str, name: str) -> tuple[OptimHeader, int]:
    """The optimizer's part of a converted checkpoint, and the ZeRO stage that it came from.

    Stage 3's still has all of data-parallel rank 0's states; of the others the param groups remain.

    Raises:
        CheckpointError: damaged, or of another kind.
    """
    path = os.path.join(folder, name)
    file = read_header(path)
    tree = file.tree
    if not isinstance(tree, dict) or not isinstance(tree.get("param_groups"), list):
        raise CheckpointError(f"{path}: has no param_groups; it is no optimizer state of ds_to_universal.")
    reader = HeaderReader(file)
    try:
        if "fp32_flat_groups" in tree:
            return reader.read_optim(tree), 3
        state = {**tree, "optimizer_state_dict": {"param_groups": tree["param_groups"]}}
        kind = "zero12" if "zero_stage" in tree else "bf16"
        return reader.read_flat(state, kind, []), int(to_member(tree.get("zero_stage", 0)))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{path}: cannot be read ({type(error).__name__}: {error}); it is damaged.") from error
