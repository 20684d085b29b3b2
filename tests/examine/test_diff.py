"""`ds_ucp diff`: checkpoints of one state are equal in all topologies, and a changed element is located."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import ConfigError, MismatchError
from deepspeed_ucp.examine.diff import AtomDifference, Difference, DiffOptions, Tally, compare, diff_checkpoints
from deepspeed_ucp.examine.values import ABSENT
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import AtomKey
from deepspeed_ucp.plan import conversion
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.support.ranks import run_ranks
from tests.support.reshard import examples, temporary_folder
from tests.support.reshard3d import (
    VOCAB,
    SavedRun,
    draw_state,
    expect,
    make_pipeline,
    make_plain,
    open_run,
    rules_of,
    trips,
)
from tests.synth import (
    Model,
    Param,
    Run,
    State,
    Topology,
    build_local_files,
    random_state,
    write_checkpoint,
    write_files,
)

RUN = Run(global_samples=100, garbage=math.nan, client_state={"epoch": 2})
KINDS = ("norm", "row", "qkv", "column", "gate_up", "few")


def diff_runs(a: SavedRun, b: SavedRun, folder: Path, rules: Any = None, **options: Any) -> Difference:
    left, right = open_run(a, folder / "a", RUN), open_run(b, folder / "b", RUN)
    return diff_checkpoints(left, right, None, DiffOptions(**options), rules=rules_of(a) if rules is None else rules)


def edit(saved_run: SavedRun, name: str, state: str, place: tuple[int, ...], value: float) -> SavedRun:
    atoms = {key: dict(states) for key, states in saved_run.state.atoms.items()}
    atoms[name][state] = atoms[name][state].clone()
    atoms[name][state][place] = value
    return replace(saved_run, state=replace(saved_run.state, atoms=atoms))


def find_real(difference: Difference, source: SavedRun, target: Topology) -> list[AtomDifference]:
    """List differences that resharding does not explain: no instances of fewer stages and no rounded masters."""
    narrowed = target.precision != source.topology.precision
    return [a for a in difference.atoms if not a.instance and not (narrowed and a.state == "module")]


def fit_target(trip: Any) -> Topology:
    """Replace targets with unrecorded placements: stage-0 files allow only contiguous layers on a stage."""
    return replace(trip.target, placement=None) if trip.target.kind == "raw" else trip.target


@examples(30)
@given(trip=trips())
def test_resharding_makes_no_difference(trip: Any) -> None:
    saved_run, target = trip.source, fit_target(trip)
    with temporary_folder() as folder:
        difference = diff_runs(saved_run, expect(saved_run, target), folder)
    if not any("#" in name for name in saved_run.state.atoms):
        assert find_real(difference, saved_run, target) == []
    assert [each for each in difference.values if not any("(instance" in name for name in each.names)] == []
    assert difference.compared > 0


@examples(20)
@given(trip=trips(), data=st.data())
def test_one_changed_element_is_located(trip: Any, data: st.DataObject) -> None:
    saved_run, target = trip.source, fit_target(trip)
    other = expect(saved_run, target)
    names = [
        (name, state)
        for name, states in other.state.atoms.items()
        for state, value in states.items()
        if value.numel() and "#" not in name and "word" not in name and "tied" not in name
        if not next(param for param in other.model.params if param.name == name).frozen
    ]
    if not names:
        return
    name, state = data.draw(st.sampled_from(names))
    shape = other.state.atoms[name][state].shape
    place = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    with temporary_folder() as folder:
        difference = diff_runs(saved_run, edit(other, name, state, place, -9.5), folder)
    (atom,) = find_real(difference, saved_run, target)
    value = float(saved_run.state.atoms[name][state][place])
    replicas = 1 if atom.shard is None else target.tp  # without a pattern every rank's shard is compared
    assert (atom.name, atom.state, atom.kind) == (name, state, "values")
    assert 1 <= atom.tally.differing <= replicas
    assert atom.tally.largest == abs(value + 9.5)
    assert atom.tally.relative == pytest.approx(abs(value + 9.5) / max(abs(value), 9.5))
    assert atom.shard is not None or atom.index == place


def test_differing_replicas_are_refused_or_located(tmp_path: Path) -> None:
    saved_run = draw_state(make_plain(KINDS), Topology(1, 2, tp=2))
    parted = saved_run.locals
    parted[1].state.atoms["body.norm"]["fp32"][3] += 1.0
    write_files(tmp_path / "a", build_local_files(parted, saved_run.topology, RUN))
    a = open_checkpoint(str(tmp_path / "a"), Comm())
    b = open_run(expect(saved_run, Topology(1, 2)), tmp_path / "b", RUN)
    with pytest.raises(MismatchError, match=rf"^{tmp_path}/a: body.norm \(fp32\) is replicated"):
        diff_checkpoints(a, b, rules=rules_of(saved_run))
    (atom,) = diff_checkpoints(a, open_run(saved_run, tmp_path / "c", RUN), rules=rules_of(saved_run)).atoms
    assert (atom.name, atom.index, atom.shard, atom.tally.differing) == ("body.norm", (3,), 1, 1)


def test_diff_needs_a_pattern_only_for_different_cuts(tmp_path: Path) -> None:
    """With equal cuts an element is located by rank and index in the shard."""
    saved_run = draw_state(make_plain(KINDS), Topology(1, 3, tp=2))
    other = expect(saved_run, Topology(3, 2, tp=2))
    assert diff_runs(saved_run, other, tmp_path / "equal", rules=()).equal
    (atom,) = diff_runs(saved_run, edit(other, "body.row", "exp_avg", (3, 7), 50.0), tmp_path / "other", rules=()).atoms
    assert (atom.index, atom.shard) == ((3, 1), 1)
    with pytest.raises(MismatchError, match=r"How .* body\.column: .* ranks in A, .* in B; body\.qkv"):
        diff_runs(saved_run, expect(saved_run, Topology(1, 2, tp=1)), tmp_path / "cut", rules=())


def test_other_shapes_are_a_difference(tmp_path: Path) -> None:
    left = draw_state(make_plain(("column", "row")), Topology(1, 2))
    model = replace(left.model, params=tuple(replace(p, shape=(9, 5)) for p in left.model.params[:1]))
    right = replace(left, model=replace(model, params=(*model.params, left.model.params[1])))
    atoms = {**left.state.atoms, "body.column": {k: v[:9] for k, v in left.state.atoms["body.column"].items()}}
    difference = diff_runs(left, replace(right, state=replace(left.state, atoms=atoms)), tmp_path, rules=())
    assert {(a.name, a.state, a.kind) for a in difference.atoms} == {
        ("body.column", state, "shape") for state in ("fp32", "exp_avg", "exp_avg_sq")
    }
    assert "(12, 5) ≠ (9, 5)" in difference.atoms[0].text
    assert not difference.equal


def test_padding_rows_of_the_vocabulary_are_counted_separately(tmp_path: Path) -> None:
    saved_run = draw_state(make_plain(("column", "word")), Topology(1, 2, tp=3))
    other = expect(saved_run, Topology(1, 2, tp=1))
    rows = [len(each.state.atoms["body.word"]["fp32"]) for each in (saved_run, other)]
    assert rows[0] != rows[1]
    difference = diff_runs(saved_run, other, tmp_path / "equal")
    assert difference.equal
    assert any(f"body.word (fp32): {rows[0]} rows in A, {rows[1]} in B" in note for note in difference.notes)
    changed = edit(other, "body.word", "fp32", (VOCAB, 2), 7.0)
    (atom,) = diff_runs(saved_run, changed, tmp_path / "padding").atoms
    assert (atom.tally.differing, atom.padding.differing, atom.index) == (0, 1, (VOCAB, 2))
    (atom,) = diff_runs(saved_run, edit(changed, "body.word", "fp32", (1, 1), 7.0), tmp_path / "both").atoms
    assert (atom.tally.differing, atom.padding.differing, atom.index) == (1, 1, (1, 1))


def test_copies_on_several_stages_are_compared_separately(tmp_path: Path) -> None:
    model = make_pipeline([["column", "norm"], ["row", "column"]])
    saved_run = draw_state(model, Topology(1, 2, "bf16", tp=2, pp=2))
    same = expect(saved_run, Topology(1, 1, "bf16", tp=1, pp=2))
    assert diff_runs(saved_run, same, tmp_path / "same").equal
    name = "tied_modules.embed.positions"
    (atom,) = diff_runs(saved_run, edit(same, f"{name}#1", "exp_avg", (2, 3), 5.0), tmp_path / "edited").atoms
    assert (atom.name, atom.instance, atom.index) == (name, 1, (2, 3))
    fewer = expect(saved_run, Topology(1, 2, "bf16", pp=1))
    difference = diff_runs(saved_run, fewer, tmp_path / "fewer")
    assert {atom.instance for atom in difference.atoms} == {1}, "the second stage's own values are gone"
    alike = saved_run.equalize()
    assert diff_runs(alike, expect(alike, fewer.topology), tmp_path / "alike").equal


# -- without tensor parallelism ---------------------------------------------------------------------------------------

MODEL = Model((Param("a", (30, 50)), Param("b", (7,), group=1), Param("c.0", (4, 5)), Param("c.1", (4, 5))))


TWO = Topology(1, 2)
STATE = random_state(MODEL, 0)


def save(folder: Path, state: State = STATE, topology: Topology = TWO, model: Model = MODEL, **run: Any) -> AtomicIndex:
    path = write_checkpoint(folder, model, state, topology, run=replace(RUN, **run))
    return open_checkpoint(str(path), Comm(), Naming(model.live_groups))


def change(state: State, name: str, key: str, value: torch.Tensor) -> State:
    return replace(state, atoms={**state.atoms, name: {**state.atoms[name], key: value}})


@pytest.fixture
def left(tmp_path: Path) -> AtomicIndex:
    return save(tmp_path / "left")


def test_the_largest_difference_is_listed_first(tmp_path: Path, left: AtomicIndex) -> None:
    state = STATE
    for name, by in (("a", 1e-4), ("b", 3.0), ("c.0", 2.0), ("c.1", math.nan)):
        state = change(state, name, "fp32", state.atoms[name]["fp32"] + by)
    right = save(tmp_path / "b", state)
    difference = diff_checkpoints(left, right)
    assert [atom.name for atom in difference.atoms] == ["c.1", "b", "c.0", "a"]
    assert difference.atoms[1].tally.differing == 7
    for tolerance, equal in ((1e-5, False), (1e-3, True)):
        difference = diff_checkpoints(left, right, options=DiffOptions(only="^a$", tolerance=tolerance))
        assert (difference.equal, len(difference.atoms)) == (equal, 1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"only": "nothing"}, "select no tensor"),
        ({"states": ("copy", "exp_avg"), "only": "nothing"}, "select no tensor"),
        ({"states": ("exp_av", "fp32")}, "neither checkpoint has exp_av. Did you mean 'exp_avg'"),
    ],
    ids=str,
)
def test_a_selection_without_tensors_is_refused(options: Any, text: str, tmp_path: Path) -> None:
    sides = [save(tmp_path / name, topology=Topology(1, 2, "bf16")) for name in "ab"]
    with pytest.raises(ConfigError, match=text):
        diff_checkpoints(*sides, options=DiffOptions(**options))


def test_other_dtypes_are_compared_by_value(tmp_path: Path) -> None:
    narrow = {n: {k: v.to(torch.bfloat16) if k != "fp32" else v for k, v in s.items()} for n, s in STATE.atoms.items()}
    atoms = {name: {key: value.float() for key, value in states.items()} for name, states in narrow.items()}
    a = save(tmp_path / "a", replace(STATE, atoms=atoms))
    difference = diff_checkpoints(a, save(tmp_path / "b", replace(STATE, atoms=narrow), Topology(1, 3)))
    assert (difference.equal, difference.converted) == (True, 8)
    narrow["a"]["exp_avg"][3, 4] += 1
    (atom,) = diff_checkpoints(a, save(tmp_path / "c", replace(STATE, atoms=narrow), Topology(1, 3))).atoms
    assert (atom.dtypes, atom.index) == (("float32", "bfloat16"), (3, 4))


TIED = Model((*MODEL.params[:3], replace(MODEL.params[3], alias_of="c.0")))


@pytest.mark.parametrize(
    ("second", "equal", "kinds"),
    [
        (MODEL.params[3], True, []),
        (MODEL.params[3], False, ["values"] * 3),
        (Param("c.1", (4, 5), frozen=True), True, []),  # as FSDP saves it, without optimizer states
        (Param("c.1", (4, 5), frozen=True), False, ["values"]),
        (Param("c.1", (2, 5), frozen=True), False, ["shape"]),
    ],
)
def test_a_tie_of_only_one_side_is_compared_by_its_copies(
    second: Param, equal: bool, kinds: list[str], tmp_path: Path
) -> None:
    model = Model((*MODEL.params[:3], second))
    state = random_state(model, 0)
    same = replace(state, atoms={**state.atoms, "c.1": state.atoms["c.0"]})
    twice = save(tmp_path / "twice", same if equal else state, model=model)
    tied = save(tmp_path / "tied", same, model=TIED)
    for sides, name in (((twice, tied), "c.1"), ((tied, twice), "c.1" if "shape" in kinds else "c.0")):
        found = diff_checkpoints(*sides)
        assert [(atom.name, atom.kind) for atom in found.atoms] == [(name, kind) for kind in kinds]
        assert found.equal == (not kinds)
    assert diff_checkpoints(tied, twice, options=DiffOptions(only="c.1")).equal == (not kinds)


def test_tensors_that_are_not_compared_are_noted(left: AtomicIndex) -> None:
    row, frozen = AtomKey("a", "row"), AtomKey("b", "module")
    odd = replace(left, irregular={row: "shape (9,)"}, unreadable={frozen: "quantized"})
    (note,) = diff_checkpoints(left, odd).notes
    assert note == "B: not compared, since they cannot be read as whole tensors: a (row), b (module)"
    assert not diff_checkpoints(odd, left, options=DiffOptions(only="c")).notes


def test_rename_rules_translate_names_of_a_comparison(tmp_path: Path, left: AtomicIndex) -> None:
    model = Model(tuple(replace(param, name=f"module.{param.name}") for param in MODEL.params))
    state = State(*({f"module.{name}": v for name, v in each.items()} for each in (STATE.atoms, STATE.scalars)))
    right = save(tmp_path / "b", replace(state, groups=STATE.groups), model=model)
    rules = from_config({"rules": [], "rename": [{"from": "(?P<name>.*)", "to": "module.{name}"}]})
    assert diff_checkpoints(left, right, rules=rules).equal
    assert not diff_checkpoints(left, right).equal
    for only in ("^a$", "module.a"):  # the name in either checkpoint
        difference = diff_checkpoints(left, right, None, DiffOptions(only=only), rules=rules)
        assert (difference.equal, difference.compared) == (True, 3)


# -- values other than elements ---------------------------------------------------------------------------------------


def list_values(difference: Difference) -> dict[tuple[str, str], tuple[Any, Any]]:
    return {(each.section, each.key): (each.left, each.right) for each in difference.values}


def test_scalars_and_hyper_parameters_are_compared_by_parameter(tmp_path: Path, left: AtomicIndex) -> None:
    groups = [dict(group) for group in STATE.groups]
    groups[1]["lr"], groups[1]["betas"], groups[1]["new"] = 0.25, (0.5, 0.999), True
    scalars = {**STATE.scalars, "b": {"step": torch.tensor(8.0)}}
    difference = diff_checkpoints(left, save(tmp_path / "b", replace(STATE, groups=tuple(groups), scalars=scalars)))
    assert list_values(difference) == {
        ("scalar", "step"): (3.0, 8.0),
        ("hyper-parameter", "lr"): (5e-4, 0.25),
        ("hyper-parameter", "betas"): ((0.9, 0.999), (0.5, 0.999)),
        ("hyper-parameter", "new"): (ABSENT, True),
    }
    assert {each.names for each in difference.values} == {("b",)}
    assert not difference.equal


@pytest.mark.parametrize("lacking", ["b", "abc"])
def test_scalars_of_only_one_side_are_a_difference(left: AtomicIndex, lacking: str) -> None:
    """Foreign checkpoints have no entry for a parameter without scalars."""
    right = replace(left, scalars={key: held for key, held in left.scalars.items() if key.name[0] not in lacking})
    names = {name for name in STATE.scalars if name[0] in lacking}
    for sides, expected in (((left, right), (3.0, ABSENT)), ((right, left), (ABSENT, 3.0))):
        difference = diff_checkpoints(*sides)
        assert list_values(difference) == {("scalar", "step"): expected} and not difference.equal
        assert {name for each in difference.values for name in each.names} == names


class Schedule:
    def __init__(self, rate: float) -> None:
        self.rate = rate


def test_objects_in_hyper_parameters_are_compared_without_running_code(tmp_path: Path) -> None:
    def write(name: str, rate: float) -> AtomicIndex:
        groups = tuple({**group, "schedule": Schedule(rate)} for group in STATE.groups)
        return save(tmp_path / name, replace(STATE, groups=groups))

    a = write("a", 0.5)
    assert diff_checkpoints(a, write("b", 0.5)).equal
    assert {key for _, key in list_values(diff_checkpoints(a, write("c", 0.25)))} == {"schedule"}


def test_other_orders_and_missing_hyper_parameters_are_no_difference(tmp_path: Path, left: AtomicIndex) -> None:
    model = Model(tuple(replace(param, group=1 - (param.group or 0)) for param in MODEL.params))
    right = save(tmp_path / "order", replace(STATE, groups=STATE.groups[::-1]), Topology(2, 3), model)
    assert diff_checkpoints(left, right).equal
    difference = diff_checkpoints(left, save(tmp_path / "elastic", topology=Topology(1, 3, elastic=True)))
    assert difference.equal, difference.values
    assert "B keeps no hyper-parameters" in difference.notes


def test_differences_in_counters_scaler_and_clipping_are_listed(tmp_path: Path) -> None:
    state = random_state(MODEL, 0, precision="fp16")
    a = save(tmp_path / "a", state, Topology(1, 2, "fp16"))
    b = save(tmp_path / "b", state, Topology(2, 3, "fp16"), global_steps=5, skipped_steps=1, clip_grad=0.5)
    keys = {key for section, key in list_values(diff_checkpoints(a, b))}
    assert keys >= {"global_steps", "skipped_steps", "clip_grad", "cur_iter"}
    assert not keys & {"dp_world_size", "mp_world_size"}
    assert diff_checkpoints(a, save(tmp_path / "c", state, Topology(3, 1, "fp16"))).equal


CLIENT: dict[str, Any] = {
    "epoch": 2,
    "args": {"lr": 0.1, "names": ["x", "y"], "shape": (1, 2)},
    "rng": torch.arange(10),
    "best": torch.tensor(0.5),
    "counts": np.arange(3),
    "nan": math.nan,
}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"epoch": 3}, "epoch"),
        ({"args": {**CLIENT["args"], "lr": 0.2}}, "args.lr"),
        ({"args": {**CLIENT["args"], "names": ["x", "z"]}}, "args.names.1"),
        ({"args": {**CLIENT["args"], "names": ["x"]}}, "args.names.1"),
        ({"args": {**CLIENT["args"], "more": 1}}, "args.more"),
        ({"rng": torch.arange(10) + 1}, "rng"),
        ({"rng": torch.arange(10.0)}, "rng"),
        ({"best": torch.tensor(0.75)}, "best"),
        ({"counts": np.arange(3) + 1}, "counts"),
        ({"added": "x"}, "added"),
        ({"long": 10**5000}, "long"),
    ],
)
def test_client_state_is_compared_by_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    a = save(tmp_path / "a", client_state=CLIENT)
    difference = diff_checkpoints(a, save(tmp_path / "b", topology=Topology(3, 2), client_state={**CLIENT, **changes}))
    assert [section for section, _ in list_values(difference)] == ["client"] * len(difference.values)
    assert all(len(f"{each.left}{each.right}") < 200 for each in difference.values)
    assert any(name == key or name.startswith(f"{key}.") for _, name in list_values(difference)), difference.values


class Evil:
    """Ends the process if it is unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('client state was run')",))


def test_equal_objects_in_client_states_are_equal_without_running_code(tmp_path: Path) -> None:
    client = {**CLIENT, "evil": Evil()}
    a = save(tmp_path / "a", client_state=client)
    b = save(tmp_path / "b", topology=Topology(0, 1), client_state=dict(reversed(client.items())))
    assert diff_checkpoints(a, b).equal


def test_scheduler_states_are_compared(tmp_path: Path, left: AtomicIndex) -> None:
    a, b = (save(tmp_path / str(last), lr_scheduler={"last": last}) for last in (3, 4))
    assert list_values(diff_checkpoints(a, b)) == {("client", "lr_scheduler.last"): (3, 4)}
    ((key, (absent, value)),) = list_values(diff_checkpoints(left, b)).items()
    assert key == ("client", "lr_scheduler") and absent in (ABSENT, None) and value == "{'last': 4}"


@pytest.mark.parametrize("topology", [Topology(0), TWO, Topology(3, 2)], ids=lambda t: t.label)
def test_extra_states_of_modules_are_compared(tmp_path: Path, topology: Topology) -> None:
    def write(name: str, *numbers: float) -> AtomicIndex:
        extra = {"layer._extra_state": {"amax": torch.tensor(numbers)}} if numbers else {}
        return save(tmp_path / name, topology=topology, nest=lambda module: {**module, **extra})

    a = write("a", 1.0, 2.0)
    assert diff_checkpoints(a, write("b", 1.0, 2.0)).equal
    assert [*list_values(diff_checkpoints(a, write("c", 1.0, 3.0)))] == [("client", "module.layer._extra_state.amax")]
    assert [*list_values(diff_checkpoints(a, write("d")))] == [("client", "module.layer._extra_state")]


def test_client_states_of_all_model_parallel_ranks_are_compared(tmp_path: Path) -> None:
    saved_run = draw_state(make_plain(KINDS), Topology(1, 2, tp=2))
    sides = [open_run(saved_run, tmp_path / name, RUN) for name in "ab"]
    path = tmp_path / "b" / "mp_rank_01_model_states.pt"
    torch.save(torch.load(path, weights_only=False) | {"epoch": 3, "random": torch.ones(2)}, path)
    difference = diff_checkpoints(sides[0], open_checkpoint(str(tmp_path / "b"), Comm()), rules=rules_of(saved_run))
    assert {key for _, key in list_values(difference)} == {"epoch (mp rank 1)", "random (mp rank 1)"}
    difference = diff_runs(saved_run, expect(saved_run, TWO), tmp_path / "cut")
    assert difference.equal
    assert "client states of other model-parallel ranks than the first are not compared" in difference.notes


def test_shared_parts_of_client_states_are_compared_once(tmp_path: Path, left: AtomicIndex) -> None:
    """Otherwise lists that contain their predecessor twice need exponential time."""
    chains = []
    for end in (1, 2):
        nested: Any = [end]
        for depth in range(60):
            nested = (nested, nested) if end == depth % 2 else [nested, nested]
        chains.append(save(tmp_path / str(end), client_state={"nested": nested}))
    for a, b in (chains, (left, chains[0]), chains[::-1]):
        assert 0 < len([key for section, key in list_values(diff_checkpoints(a, b)) if "nested" in key]) <= 2


# -- execution --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_comparison_and_report_equal_results(tmp_path: Path, left: AtomicIndex, size: int) -> None:
    state = change(STATE, "a", "fp32", STATE.atoms["a"]["fp32"] + 1)
    right = save(tmp_path / "b", state, Topology(3, 3))
    results = run_ranks(size, lambda rank, comm: diff_checkpoints(left, right, comm))
    assert all(result == diff_checkpoints(left, right) for result in results)


def test_every_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "ALIGNMENT", 512)
    monkeypatch.setattr("deepspeed_ucp.stream.full_tensors.ALIGNMENT", 512)
    saved_run = draw_state(make_plain(KINDS), Topology(2, 3, tp=2))
    a, b = open_run(saved_run, tmp_path / "a", RUN), open_run(expect(saved_run, Topology(3, 2)), tmp_path / "b", RUN)
    done: list[int] = []
    bar = mock.Mock(return_value=nullcontext(done.append))
    difference = diff_checkpoints(a, b, options=DiffOptions(window=12 * 512, bar=bar), rules=rules_of(saved_run))
    assert difference.equal
    bar.assert_called_once_with(sum(done))
    assert sum(done) == sum(atom.nbytes for atom in b.atoms.values() if atom.state != "copy") * 2
    assert len(done) > 10


def test_names_of_parameters_may_contain_any_character(tmp_path: Path) -> None:
    names = ("c#.weight", "c#1", "c", "c²", "9" * 5000)
    model = Model(tuple(Param(name, (4 + at, 2)) for at, name in enumerate(names)))
    state = random_state(model, 0)
    left = save(tmp_path / "a", state, model=model)
    other = state
    for by, name in enumerate(names[1:]):
        other = change(other, name, "fp32", other.atoms[name]["fp32"] - 9.0 * (by != 1))
    difference = diff_checkpoints(left, save(tmp_path / "b", other, Topology(2, 3), model)).atoms
    assert {(atom.name, atom.instance) for atom in difference} == {("c#1", 0), ("c²", 0), ("9" * 5000, 0)}


# -- without masters --------------------------------------------------------------------------------------------------

FROZEN = Model((Param("a", (3, 50)), Param("b", (7,)), Param("c", (4, 5), frozen=True)))
FULL = [Topology(1, 2, "bf16"), Topology(3, 2, "bf16"), Topology(2, 3, "fp16"), Topology(1, 2)]


def open_weights(folder: Path, topology: Topology, state: State, *, bare: bool) -> AtomicIndex:
    """Open a save without masters: by an engine without optimizer (`bare`), or without the optimizer's files."""
    saved = Topology(0, 1, topology.precision) if bare else replace(topology, stage=1)
    path = write_checkpoint(folder, FROZEN, state, saved)
    for file in [*path.glob("*optim_states.pt")]:
        file.unlink()
    if bare:
        file = path / "mp_rank_00_model_states.pt"
        torch.save({**torch.load(file, weights_only=False), "optimizer": None}, file)
    return open_checkpoint(str(path), Comm())


def list_differences(found: Difference) -> set[tuple[str, str, str]]:
    return {(atom.name, atom.state, atom.kind) for atom in found.atoms}


@pytest.mark.parametrize("bare", [False, True], ids=["without-files", "without-optimizer"])
@pytest.mark.parametrize("topology", FULL, ids=lambda t: t.label)
def test_weights_are_compared_with_rounded_masters(topology: Topology, bare: bool, tmp_path: Path) -> None:
    state = random_state(FROZEN, 0, precision=topology.precision)
    full = save(tmp_path / "full", state, topology, FROZEN)
    weights = open_weights(tmp_path / "weights", topology, state, bare=bare)
    master = state.atoms["a"]["fp32"].clone()
    master[2, 7] = 2.5
    changed = open_weights(tmp_path / "changed", topology, change(state, "a", "fp32", master), bare=bare)
    dtype = str(topology.dtype).removeprefix("torch.")
    for sides, side in (((full, weights), "A"), ((weights, full), "B")):
        found = diff_checkpoints(*sides)
        lacking = {(name, state, f"only in {side}") for name in ("a", "b") for state in ("exp_avg", "exp_avg_sq")}
        assert list_differences(found) == lacking and found.compared == len(FROZEN.params)
        note = f"masters of {side} are compared after rounding to {dtype}"
        assert (note in found.notes) == (dtype != "float32") and found.converted == 2 * (dtype != "float32")
    value = float(state.atoms["a"]["fp32"].to(topology.dtype)[2, 7])
    for names in (("fp32",), ("module",), ("copy",))[: 2 + (not bare)]:
        (atom,) = diff_checkpoints(full, changed, options=DiffOptions(states=names)).atoms
        assert (atom.name, atom.index, atom.tally.differing) == ("a", (2, 7), 1)
        assert atom.tally.largest == abs(value - 2.5)
    assert not diff_checkpoints(weights, weights).atoms


# -- elements ---------------------------------------------------------------------------------------------------------

DTYPES = ["float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"]


@pytest.mark.parametrize("dtype", [*DTYPES, "complex128", "float8_e4m3fn", "float8_e5m2"])
def test_elements_of_any_dtype_are_compared(dtype: str) -> None:
    values = (torch.arange(101) % 7 - 2).abs().to(getattr(torch, dtype))
    other = values.clone()
    other[13], other[50] = other[13] == 0, other[50]
    left, right = (each.view(torch.uint8).numpy().tobytes() for each in (values, other))
    assert compare(left, left, dtype, dtype) == Tally(101)
    found = compare(left, right, dtype, dtype)
    distance = abs(complex(values[13].item()) - complex(other[13].item()))
    assert (found.differing, found.first, found.largest) == (1, 13, distance)
    assert found.relative == 1.0


@given(data=st.binary(min_size=0, max_size=64), places=st.lists(st.integers(0, 63), max_size=3))
def test_counts_and_positions_of_differences_equal_numpys(data: bytes, places: list[int]) -> None:
    left = data[: len(data) // 4 * 4]
    right = bytearray(left)
    for place in places:
        if place < len(right):
            right[place] ^= 0x41
    unequal = np.frombuffer(left, np.uint32) != np.frombuffer(right, np.uint32)
    found = compare(left, right, "float32", "float32")
    assert (found.differing, found.first) == (unequal.sum(), np.flatnonzero(unequal)[0] if unequal.any() else -1)


@pytest.mark.parametrize(
    ("left", "right", "differing", "largest"),
    [
        (np.float32([math.nan]), np.float32([math.nan]), 0, 0.0),
        (np.float32([math.nan, 1.5]), np.float64([math.nan, 1.5]), 0, 0.0),
        (np.float32([math.nan]), np.float32([1]), 1, math.inf),
        (np.float32([math.nan]), np.array([0xFFC00000], np.uint32).view(np.float32), 1, 0.0),
        (np.float32([math.inf]), np.float32([-math.inf]), 1, math.inf),
        (np.array([2**60, 2**60 + 1]), np.array([2**60, 2**60 + 2]), 1, 1.0),
        (np.array([-(2**63)]), np.array([2**63 - 1]), 1, float(2**64 - 1)),
        (np.array([0.0]), np.array([-0.0]), 1, 0.0),
    ],
)
def test_special_values_are_compared_by_bits(left: Any, right: Any, differing: int, largest: float) -> None:
    """This holds for elements of one dtype, even without a tolerance."""
    found = compare(left.tobytes(), right.tobytes(), str(left.dtype), str(right.dtype))
    assert (found.differing, found.first, found.largest) == (differing, len(left) - 1 if differing else -1, largest)
    assert not AtomDifference("x", "fp32", "values", ("float64", "float64"), tally=found).is_within(0.0)
