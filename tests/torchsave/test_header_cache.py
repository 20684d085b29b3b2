"""Many ``torch.save`` files of few forms in one file: each form is parsed once, with the same results and errors."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_ucp.errors import UcpError
from deepspeed_ucp.torchsave import torchfile
from deepspeed_ucp.torchsave.objects import TensorRef

SHAPES = ((64, 6), (7,), (1,), (), (0, 3), (900,))
Parts = list[tuple[int, int]]


@pytest.fixture(scope="module")
def written() -> tuple[bytes, Parts]:
    """Three rounds of tensors with several shapes and dtypes, and of other values."""
    data, parts = b"", []
    for number in range(3):
        values = [torch.randn(shape) + number for shape in SHAPES]
        values += [values[0].bfloat16(), values[0].t(), values[0][3:5], torch.tensor(number), torch.ones(2).double()]
        for value in [*values, number, [values[1], values[1] + 1]]:
            file = io.BytesIO()
            torch.save(value, file)
            parts.append((len(data), len(file.getvalue())))
            data += file.getvalue()
    return data, parts


def to_plain(tree: Any) -> Any:
    if isinstance(tree, list):
        return [to_plain(part) for part in tree]
    if not isinstance(tree, TensorRef):
        return tree
    return tree.storage.key, tree.offset, tree.shape, tree.stride, tree.dtype, tree.data


def read(path: Path, parts: Sequence[tuple[int, int]]) -> list[Any]:
    return [(to_plain(header.tree), header.storages) for header in torchfile.read_parts(str(path), parts)]


def test_each_form_is_parsed_once(
    written: tuple[bytes, Parts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, parts = written
    (tmp_path / "it").write_bytes(data)
    alone = [read(tmp_path / "it", [part])[0] for part in parts]
    opened = []
    list_zip = torchfile.list_zip
    monkeypatch.setattr(torchfile, "list_zip", lambda *args: opened.append(1) or list_zip(*args))
    assert read(tmp_path / "it", parts) == alone
    kinds = len(parts) // 3
    assert len(opened) == kinds + 2 * 3  # numbers, pairs of tensors and empty tensors are not cached


def test_damage_is_found_with_the_cache_too(written: tuple[bytes, Parts], tmp_path: Path) -> None:
    """Only damage in local headers of other records, which the cache does not need, may go unnoticed."""
    data, parts = written
    draw = np.random.default_rng(0)
    kinds = len(parts) // 3
    refused = 0
    for turn in range(400):
        first, second = parts[turn % kinds], parts[turn % kinds + kinds]
        at = second[0] + int(draw.integers(second[1]))
        changed = bytearray(data)
        changed[at] ^= 1 << int(draw.integers(8))
        (tmp_path / "it").write_bytes(changed)
        found = None
        with suppress(UcpError):
            found = read(tmp_path / "it", [first, second])
        try:
            alone = [read(tmp_path / "it", [part])[0] for part in (first, second)]
        except UcpError:
            refused += 1
            _, storages = found[1] if found else (None, {"": None})
            assert all(record is None or at >= record.offset + record.nbytes for record in storages.values())
        else:
            assert found == alone
    assert refused > 50
