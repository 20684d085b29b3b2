"""The files of saves with experts: names, missing and contradictory files, second names, and compact headers."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import CheckpointError, UnsupportedError
from deepspeed_ucp.extensions.experts.files import NO_LAYER, ROLES
from deepspeed_ucp.extensions.experts.saved import SavedExperts
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.files import sort_roles
from deepspeed_ucp.formats.deepspeed.headers import FileHeader, HeaderDelta, HeaderTemplate, Piece, encode_header
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.open import survey_checkpoint
from deepspeed_ucp.model.records import Record
from tests.formats.saves import STATES, Files, edit, make_files, open_alone, open_files
from tests.formats.saves import assign as set_fields
from tests.support.expertmodels import FUSED, NATIVE, NATIVES
from tests.support.ranks import run_ranks
from tests.synth import ExpertLayer, Model, Param, Topology, random_state, write_checkpoint
from tests.synth.expertfiles import expert_file


def test_file_names_determine_roles() -> None:
    layer, expert = "layer_2_expert_13_mp_rank_01", "expert_3_mp_rank_00"
    optim = "expp_rank_5_mp_rank_01_optim_states.pt"
    names = [f"{layer}_model_states.pt", f"{expert}_model_states.pt", optim]
    found = sort_roles(ROLES, {name: name for name in names})
    assert found == {"expert": {(2, 13, 1): names[0], (NO_LAYER, 3, 0): names[1]}, "expert_optim": {(1, 5): optim}}
    assert {ROLES["expert"].make_name(*key) for key in found["expert"]} == {*names[:2]}


WHOLE = Topology(1, 2, tp=2, ep=(4,))
CUT = replace(WHOLE, ep=(2,), cut_experts=True)
SPREADS = [
    *((replace(each, stage=stage), False) for each in (WHOLE, CUT) for stage in (0, 1)),
    (replace(CUT, data_first=True), False),
    (replace(WHOLE, data_first=True), False),
    (replace(WHOLE, ep=(2,)), False),
    (replace(WHOLE, ep=(1,)), True),
    *((replace(WHOLE, stage=stage, ep=(2,), data_first=True), True) for stage in (0, 1)),
]
"""Topologies, and whether both tensor-parallel ranks have the first experts, so that one of them saves nothing."""


def write(folder: Path, topology: Topology) -> Path:
    state = random_state(NATIVES, 0)
    return write_checkpoint(folder, NATIVES, state, topology, cut=lambda _, tensor, tp, rank: tensor.chunk(tp)[rank])


def list_findings(folder: Path, kind: str) -> set[str]:
    return {each.file for each in survey_checkpoint(str(folder), Comm()).findings if each.kind == kind}


@pytest.mark.parametrize(("topology", "is_lost"), SPREADS, ids=lambda each: getattr(each, "label", ""))
def test_missing_files_of_experts_are_named(topology: Topology, is_lost: bool, tmp_path: Path) -> None:
    """A whole expert may be in a file of any tensor-parallel rank."""
    path, away = write(tmp_path, topology), tmp_path / "away"
    lost = {"mp_rank_01_model_states.pt"} if is_lost else set()
    assert list_findings(path, "missing") == lost
    for name in sorted({*os.listdir(path)} - {STATES}):
        (path / name).rename(away)
        (found,) = list_findings(path, "missing") - lost
        lane = "mp_rank_0." if topology.folds_experts and "exp" in name else " "
        assert re.sub(lane, "", found) == re.sub(lane, "", name)
        away.rename(path / name)


def test_cut_experts_of_an_earlier_save_are_no_part_of_whole_ones(tmp_path: Path) -> None:
    """The param groups decide, as there are files of both forms."""
    for topology in (CUT, WHOLE):
        path = write(tmp_path, topology)
    assert list_findings(path, "missing") == set()
    assert {key.name for key in open_alone(path).atoms} == {param.name for param in NATIVES.params}


@pytest.mark.parametrize(("topology", "shards"), [(WHOLE, 1), (CUT, 2)], ids=["whole", "cut"])
def test_files_of_weights_alone_show_whether_experts_are_cut(topology: Topology, shards: int, tmp_path: Path) -> None:
    path = write(tmp_path, topology)
    for file in path.glob("*optim_states.pt"):
        file.unlink()
    index = open_checkpoint(str(path), Comm(), Naming(weights_only=True))
    assert [len(atom.shards) for key, atom in index.atoms.items() if NATIVE in key.name] == [shards] * 4


# -- files that contradict each other about the ranks of experts ------------------------------------------------------


def drop_experts(files: Files, *numbers: int) -> Files:
    """Remove the files of some experts, and their number from the model states."""
    kept = {name: each for name, each in files.items() if not any(f"expert_{number}_" in name for number in numbers)}
    return set_fields(STATES, num_experts=[4 - len(numbers)])(kept)


def place_experts(files: Files, *ranks: list[int]) -> Files:
    def change(content: Any) -> None:
        for layer in content.get("ds_autoep_layers", ()):
            layer["affine_maps"], layer["ep_size"] = None, len(ranks)
            layer["expert_placement"]["ranks"] = [{"rank": n, "experts": held} for n, held in enumerate(ranks)]

    return edit("model_states", change)(files)


CONTRADICTIONS: list[tuple[Model, tuple[int, ...], Callable[..., Files], list[Any], str]] = [
    (NATIVES, (2,), drop_experts, [1, 2, 3], "but 1 experts of the layer have files"),
    (NATIVES, (2,), drop_experts, [3], "but 3 experts of the layer have files"),
    *((FUSED, (degree,), place_experts, ranks, r"w1 of shape .*, 4, 3\) is spread over")
      for degree, ranks in ((1, [[0, 1], [2, 3]]), (4, [[0, 1], [2, 3]]), (2, [[0, 1, 2], [3]]))
      if find_spec("deepspeed.checkpoint.autoep_affine")),
]  # fmt: skip


PAIR = Model(
    tuple(Param(f"{layer}{NATIVE}{n}.w", (4, 3)) for layer in "ab" for n in range(2)),
    experts=(ExpertLayer("a", 2), ExpertLayer("b", 2)),
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (4, "has a param group in 4 partitions, which does not divide the 2 ranks"),
        *((count, rf"was saved by \(2, 2, {count}\) ranks, the model states say 2") for count in (0, 3, 16)),
    ],
)
def test_partitions_that_do_not_divide_the_ranks_are_refused(count: int, text: str, tmp_path: Path) -> None:
    """Degrees of two layers differ. Four ranks may hold a whole expert, two hold one that is cut."""
    files = make_files(PAIR, replace(CUT, ep=(2, 1)))
    for name, content in files.items():
        if "optim_states" in name:
            content["optimizer_state_dict"]["partition_count"][-1] = count
    with pytest.raises(CheckpointError, match=text):
        open_files(tmp_path, files)


@pytest.mark.parametrize(("model", "ep", "change", "options", "text"), CONTRADICTIONS)
def test_files_that_contradict_each_other_about_experts_are_refused(
    model: Model, ep: tuple[int, ...], change: Callable[..., Files], options: list[Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=text):
        open_files(tmp_path, change(make_files(model, Topology(1, 4, ep=ep)), *options))


def test_an_expert_with_a_permuted_copy_counts(tmp_path: Path) -> None:
    """The header of its file is not compact."""
    files, name = make_files(NATIVES, Topology(1, 4, ep=(2,))), f"body{NATIVE}3.w"
    held = files[expert_file(0, 3)]
    held[name] = held[name].t().contiguous().t()
    index = open_files(tmp_path, files)
    assert index.find(name, "fp32") and not index.find(name, "copy")


def test_a_parameter_is_an_expert_only_with_an_experts_file(tmp_path: Path) -> None:
    name = f"body{NATIVE}0.w"
    index = open_files(tmp_path, make_files(Model((Param(name, (2, 3)),)), Topology(1, 4)))
    assert index.find(name, "fp32")


# -- a layer of experts with a second name --------------------------------------------------------------------------

EQUAL = (1.0, 9.0)
TWINS = Model(
    tuple(Param(f"{layer}{NATIVE}0.{end}", (2, 3)) for layer in "ab" for end in "wb"),
    experts=(ExpertLayer("a", 1), ExpertLayer("b", 1)),
)


def open_twins(
    folder: Path,
    a: tuple[float, float],
    b: tuple[float, float],
    again: tuple[float, float],
    stage: int = 1,
    **recorded: Any,
) -> dict[str, str]:
    """Return the ties of a save with two layers of one expert, and a second name of one of these layers.

    Args:
        a, b, again: values of the weight and the bias under each name.
        stage: of ZeRO; of stage 0 only weights are read.
    """
    files = make_files(TWINS, Topology(stage, 1))
    for number, values in enumerate((a, b)):
        held = files[expert_file(number, 0)]
        for name, value in zip(list(held), values, strict=True):
            held[name] = torch.full((2, 3), value)
    second = {f"again{NATIVE}0.{end}": torch.full((2, 3), value) for end, value in zip("wb", again, strict=True)}
    files[STATES]["module"] |= second
    files[STATES] |= recorded
    return dict(open_files(folder, files, Naming(weights_only=stage == 0)).aliases)


TIES = {f"again{NATIVE}0.{end}": f"b{NATIVE}0.{end}" for end in "wb"}


def test_equal_biases_do_not_make_a_tie(tmp_path: Path) -> None:
    """Two layers have biases of zero. The second name is tied to the layer with which all its tensors are equal."""
    assert open_twins(tmp_path / "values", (1, 9), (2, 9), (2, 9)) == TIES
    assert open_twins(tmp_path / "recorded", EQUAL, EQUAL, EQUAL, shared_params=TIES) == TIES


TRAINED = [{f"{layer}{NATIVE}0.{end}": torch.Size((2, 3)) for layer in ("a", "b", "again") for end in "wb"}]


@pytest.mark.parametrize(
    ("values", "recorded", "text"),
    [
        (((1, 9), (2, 8), (2, 9)), {}, "no layer of experts has the same bytes"),
        (((1, 9), (2, 9), (2, 9)), {"param_shapes": TRAINED}, "in again.*but 0 experts of the layer have files"),
        (((1, 9), (2, 9), (2, 9)), {"param_shapes": TRAINED, "stage": 0}, "but the optimizer has it under this name"),
        ((EQUAL, EQUAL, EQUAL), {}, r"the experts of a\..*, b\..* have the same bytes"),
    ],
    ids=["some tensors equal", "trained", "trained, weights", "ambiguous"],
)
def test_layers_that_may_have_no_second_name_are_refused(
    values: Any, recorded: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, UnsupportedError), match=text):
        open_twins(tmp_path, *values, **recorded)


def test_a_trained_router_is_no_tie() -> None:
    """Two parameters of the optimizer are not tied, even if their values are equal."""
    piece = Piece(Record(0, 24, 1), 0, (2, 3), "float32")
    module = {"m.router.gate.weight": piece, "m.gate.gate.weight": piece}
    for names in (["m.router.gate.weight"], [*module]):
        shapes = [[(f"_orig_mod.{name}", (2, 3)) for name in names]]
        model = SimpleNamespace(shared={}, facts={"placements": {"m.experts.": ()}}, module=module, param_shapes=shapes)
        save: Any = SimpleNamespace(model=lambda _, model=model: model, path=str)
        ties = SavedExperts().find_ties(save, SimpleNamespace(model=None), module)  # type: ignore[arg-type]
        assert ties == ({"m.gate.gate.weight": "m.router.gate.weight"} if len(names) == 1 else {})


# -- compact headers of files that differ only in offsets -------------------------------------------------------------


def test_headers_are_sent_against_a_template_for_each_kind_of_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, decode, sent = write(tmp_path, Topology(1, 4, ep=(2,))), HeaderDelta.decode, list[HeaderDelta]()
    monkeypatch.setattr(HeaderDelta, "decode", lambda self, known: (sent.append(self), decode(self, known))[1])
    alone = open_alone(path)
    assert len(sent) == 3 + 4  # rank 0 reads the first optimizer file before; each expert has a file
    assert len({(each.template, "expert" in each.name) for each in sent}) == 2
    sent.clear()
    assert run_ranks(2, lambda _, comm: open_checkpoint(str(path), comm)) == [alone, alone]
    assert len({(each.template, "expert" in each.name) for each in sent}) == 2


LAYER, PIECE = f"body{NATIVE}0.", Piece(Record(64, 24, 7), 0, (2, 3), "float32")


@pytest.mark.parametrize(
    "tensors",
    [
        {f"{LAYER}w": PIECE, "dense": PIECE},
        {f"{LAYER}w": PIECE, f"{LAYER}b": replace(PIECE, shape=(0,))},
        {f"{LAYER}w": PIECE, f"{LAYER}b": replace(PIECE, fault="permuted")},
        {},
    ],
    ids=["no common prefix", "empty", "faulty", "nothing"],
)
def test_headers_that_differ_in_more_than_offsets_are_not_encoded(tensors: dict[str, Piece]) -> None:
    header = FileHeader("expert", 1, layer=tensors)
    assert encode_header(header, HeaderTemplate(FileHeader("first", 1)), {}) is header


def test_tensors_of_one_record_share_it_in_a_decoded_header() -> None:
    header = FileHeader("expert", 1, layer={f"{LAYER}w": PIECE, f"{LAYER}b": replace(PIECE, offset=12, shape=(3,))})
    delta = encode_header(header, HeaderTemplate(FileHeader("first", 1)), {})
    assert isinstance(delta, HeaderDelta)
    again = pickle.loads(pickle.dumps(delta)).decode({})
    assert replace(again, layer=dict(again.layer or {})) == header
    assert HeaderTemplate(again).firsts == [0, 0]
