"""Opening headers with odd values ends in an index or in findings that name the file."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.open import survey_checkpoint
from tests.formats.parallel import tail_cut
from tests.formats.test_parallel import PIPE
from tests.synth import Model, Param, Topology, build_files, random_state, write_files

MODEL = Model(
    (Param("a", (3, 5)), Param("b", (7,), group=1), Param("fixed", (2, 2), frozen=True)), {"n": torch.arange(3)}
)
ODD: list[Any] = [
    *(None, True, -1, 0, 1 << 70, 10**5000, 1.5, float("nan"), "x", "", b"x"),
    *([], [[]], (), {}, {"a": 1}, {1: []}, {(1, 2): 3}),
    *(torch.ones(2), torch.tensor(3.0), torch.ones(0), torch.ones(3, 5, dtype=torch.int8), torch.Size([4]), {1, 2}),
]
CASES = [
    (MODEL, Topology(0)),
    (MODEL, Topology(0, 1, "fp16", "fused")),
    (MODEL, Topology(1, 2, "bf16")),
    (MODEL, Topology(3, 2)),
    (MODEL, Topology(1, 2, "bf16", "bf16")),
    (MODEL, Topology(1, 2, elastic=True)),
    (PIPE, Topology(1, 2, "bf16", tp=2, pp=2)),
]

Place = tuple[Any, Any]


def list_places(tree: Any) -> list[Place]:
    """List (container, key) of all values in an object tree, including the loss scaler's fields."""
    entries = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    if type(tree).__name__.endswith("LossScaler"):
        entries = list(vars(tree).items())
    return [*((tree, key) for key, _ in entries), *(place for _, value in entries for place in list_places(value))]


def copy(content: Any) -> Any:
    stream = io.BytesIO()
    torch.save(content, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def put(place: Place, value: Any) -> None:
    tree, key = place
    if isinstance(tree, (dict, list)):
        tree[key] = value
    else:
        setattr(tree, key, value)


@pytest.mark.parametrize(("model", "topology"), CASES, ids=lambda each: each.label if hasattr(each, "label") else "")
def test_an_odd_value_anywhere_is_named_or_harmless(tmp_path: Path, model: Model, topology: Topology) -> None:
    state = random_state(model, 0, precision=topology.precision, topology=topology)
    files = build_files(model, state, topology, cut=tail_cut)
    write_files(tmp_path, files)
    draw = random.Random(0)
    for _ in range(40):
        name = draw.choice(sorted(files))
        content = copy(files[name])
        place, value = draw.choice(list_places(content)), draw.choice(ODD)
        put(place, value)
        write_files(tmp_path, {name: content})
        report = survey_checkpoint(str(tmp_path), Comm(), Naming(groups="module"))
        assert report.index is not None or report.findings
        for fault in report.findings:
            named = any(each in fault.text for each in files) or fault.kind == "missing"  # of more ranks
            assert fault.warning or named, (name, place[1], value, fault)
        write_files(tmp_path, {name: files[name]})


@pytest.mark.parametrize(
    ("key", "value"),
    [("frozen_param_shapes", {}), ("mp_world_size", 0), ("dp_world_size", -1), ("dp_world_size", None)],
)
def test_an_odd_value_in_all_model_states_is_named_or_harmless(tmp_path: Path, key: str, value: Any) -> None:
    files = build_files(MODEL, random_state(MODEL, 0), Topology(3, 2))
    write_files(tmp_path, {name: {**each, key: value} if "model" in name else each for name, each in files.items()})
    report = survey_checkpoint(str(tmp_path), Comm())
    assert report.index is None
    assert all(any(name in fault.text for name in files) for fault in report.findings if not fault.warning)
