"""Stage 0 saves no names: states follow the module's saved order or the user's groups; else a load is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import ConfigError, MismatchError
from deepspeed_ucp.extensions.experts.names import is_expert, name_first_expert
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import ModuleOrder, Naming, number_names
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.topology import find_differences
from tests.support.contents import check_content
from tests.support.reshard import FakeTarget, load, make_targets, open_for
from tests.support.reshard3d import draw_state, make_pipeline
from tests.synth import Model, Param, State, Topology, build_files, random_state, write_files

KINDS = [Topology(0), Topology(0, 1, "bf16", "fused"), Topology(0, 1, "fp16", "unfused")]
WRAPPERS = pytest.mark.parametrize("wrapper", KINDS, ids=lambda wrapper: wrapper.label)
SAVED = ("norm", "a.weight", "a.bias", "frozen", "b.weight", "b.bias", "empty", "c.weight")
OTHER = ("b.weight", "b.bias", "c.weight", "a.weight", "a.bias", "empty", "frozen", "norm")


def define(names: Sequence[str], group: Callable[[str], int] = lambda name: 0) -> Model:
    """Define a model of equal layers, a frozen and an empty parameter, in the order of ``names``."""

    def make(name: str) -> Param:
        shape = {"weight": (3, 3), "empty": (0, 2)}.get(name.rpartition(".")[2], (3,))
        return Param(name, shape, group(name), frozen=name == "frozen")

    return Model(tuple(map(make, names)), {"count": torch.arange(3)})


def by_decay(name: str) -> int:
    return int(not name.endswith("weight"))


def save(folder: Path, model: Model, topology: Topology) -> State:
    state = random_state(model, 3, precision=topology.precision)
    write_files(folder, build_files(model, state, topology))
    return state


def refuse(folder: Path, target: FakeTarget, text: str) -> None:
    """Check that states are refused and weights, which have names, load."""
    with pytest.raises(MismatchError, match=f"in another order .*{text}.* load with load_optimizer_states=False"):
        open_for(folder, target)
    assert open_checkpoint(str(folder), Comm(), Naming(weights_only=True)).atoms


def compare(index: AtomicIndex, target: FakeTarget) -> list[str]:
    saved = index.topology
    return find_differences(saved, replace(saved, flats=tuple(target.layout)))


class Backwards(FakeTarget):
    def live_groups(self) -> list[list[tuple[str, bool]]]:
        return [group[::-1] for group in super().live_groups()]


@WRAPPERS
@pytest.mark.parametrize("group", [lambda name: 0, by_decay], ids=["one-group", "decay"])
def test_states_follow_the_modules_saved_order(wrapper: Topology, group: Callable[[str], int], tmp_path: Path) -> None:
    """The topologies differ, because DeepSpeed's load would follow the live order."""
    saved, live = define(SAVED, group), define(OTHER, group)
    state = save(tmp_path, saved, wrapper)
    for target in (wrapper, Topology(1, 2), Topology(3, 2, "bf16")):
        targets = make_targets(live, target)
        index = open_for(tmp_path, targets[0])
        check_content(load(index, targets), state)
        if target == wrapper:
            (difference,) = compare(index, targets[0])
            assert "parameter order" in difference
    unchanged = FakeTarget(saved, wrapper, 0)
    assert not compare(open_for(tmp_path, unchanged), unchanged)


@WRAPPERS
def test_a_tied_parameter_has_the_index_of_its_first_name(wrapper: Topology, tmp_path: Path) -> None:
    middle = define(["a.weight", "b.weight"]).params
    saved = Model((Param("head", (3, 3)), *middle, Param("embed", (3, 3), alias_of="head")))
    live = Model((*middle[::-1], Param("embed", (3, 3)), Param("head", (3, 3), alias_of="embed")))
    state = save(tmp_path, saved, wrapper)
    targets = make_targets(live, Topology(1, 2))
    atoms = {{"head": "embed"}.get(name, name): held for name, held in state.atoms.items()}
    scalars = {{"head": "embed"}.get(name, name): held for name, held in state.scalars.items()}
    check_content(load(open_for(tmp_path, targets[0]), targets), replace(state, atoms=atoms, scalars=scalars))


@WRAPPERS
def test_an_optimizer_in_another_order_needs_the_saved_module(wrapper: Topology, tmp_path: Path) -> None:
    save(tmp_path, define(SAVED), wrapper)
    refuse(tmp_path, Backwards(define(OTHER), Topology(1), 0), "the optimizer has them in a different order")
    alike = define(["a.weight", "b.weight", "c.weight"])
    save(tmp_path / "alike", alike, wrapper)
    index = open_for(tmp_path / "alike", Backwards(alike, Topology(1), 0))
    assert [group.names for group in index.groups] == [("c.weight", "b.weight", "a.weight")]


@WRAPPERS
def test_groups_of_equal_sizes_may_be_swapped_and_are_refused(wrapper: Topology, tmp_path: Path) -> None:
    """The save does not show the order in which the script filled the groups."""
    names = ["a.weight", "a.bias", "b.weight", "b.bias"]

    def by_layer(name: str) -> int:
        return int(name.startswith("b"))

    def by_layer_from_behind(name: str) -> int:
        return int(name.startswith("a"))

    save(tmp_path, define(names, by_layer), wrapper)
    for groups in (by_layer, by_layer_from_behind):
        refuse(tmp_path, FakeTarget(define(names[2:] + names[:2], groups), Topology(1), 0), "changed places")


@WRAPPERS
def test_states_are_refused_if_a_reordered_state_dict_hides_the_order(wrapper: Topology, tmp_path: Path) -> None:
    """Both state dicts are sorted by name. A live one in the saved order shows no change."""
    saved = define(SAVED)
    files = build_files(saved, random_state(saved, 3, precision=wrapper.precision), wrapper)
    for file in files.values():
        file["module"] = dict(sorted(file["module"].items()))
    write_files(tmp_path, files)
    target = FakeTarget(saved, wrapper, 0)
    target.recorded = lambda: sorted(SAVED)
    index = open_for(tmp_path, target)
    assert not compare(index, target)
    other = FakeTarget(define(OTHER), wrapper, 0)
    other.recorded = lambda: sorted(SAVED, reverse=True)
    refuse(tmp_path, other, "the model's state_dict has a different order")


def follow(before: Sequence[str], now: Sequence[str], **options: bool) -> list[list[str]]:
    """Return the saved order of an optimizer with one group, from the modules' orders."""
    unit = (lambda name: int(name[0])) if options else is_expert
    places = [number_names(map(name_first_expert, names), unit) for names in (now, before)]
    apart = "the places of experts among them are not known"
    order = ModuleOrder("path", *places, dict.fromkeys(places[1], ()), form=name_first_expert, apart=apart, **options)
    return [[name for name, _ in group] for group in order.follow([[(name, True) for name in now]], ())]


def test_the_order_in_each_pipeline_layer_is_compared_with_its_file() -> None:
    """The order of stages, which register tied modules first, is inferred elsewhere."""
    layers = ["0.w", "0.v", "1.w", "1.v"]
    assert follow(layers, layers[2:] + layers[:2], pipeline=True) == [layers[2:] + layers[:2]]
    with pytest.raises(MismatchError, match="1.v before 1.w; in the checkpoint behind it.*pipeline's stages"):
        follow(layers, ["0.w", "0.v", "1.v", "1.w"], pipeline=True)


def test_the_order_of_experts_is_compared_with_their_files() -> None:
    expert = "moe.deepspeed_moe.experts.deepspeed_experts"
    names = ["in", f"{expert}.0.w", f"{expert}.0.b", f"{expert}.1.w", f"{expert}.1.b", "out"]
    assert follow(["in", "out", f"{expert}.3.w", f"{expert}.3.b"], names) == [names]
    with pytest.raises(MismatchError, match="the places of experts among them are not known"):
        follow(["out", "in", *names[1:5]], names)
    with pytest.raises(MismatchError, match="experts.0.w before .*experts.0.b; in the checkpoint behind it"):
        follow(["in", "out", f"{expert}.0.b", f"{expert}.0.w"], names)


# -- without an engine: the user describes the param groups -----------------------------------------------------------

ONE_GROUP = Model(
    (
        Param("body.weight", (3, 5)),
        Param("body.bias", (3,)),
        Param("tied", (3, 5), alias_of="body.weight"),
        Param("head.weight", (5, 3)),
    ),
    {"body.count": torch.arange(3)},
)
TWO_GROUPS = Model(tuple(Param(p.name, p.shape, group=int(len(p.shape) == 1)) for p in ONE_GROUP.owners))
NAMES = [["body.weight", "head.weight"], ["body.bias"]]


def open_named(folder: Path, groups: Any) -> AtomicIndex:
    return open_checkpoint(str(folder), Comm(), Naming(groups=groups))


@WRAPPERS
@pytest.mark.parametrize(("model", "groups"), [(ONE_GROUP, "module"), (TWO_GROUPS, NAMES)], ids=["module", "names"])
def test_groups_by_name_replace_a_live_engine(model: Model, groups: Any, wrapper: Topology, tmp_path: Path) -> None:
    """The names are in ``model.parameters()``'s order: ties once, no buffers."""
    state = save(tmp_path, model, wrapper)
    index = open_named(tmp_path, groups)
    wanted = [["body.weight", "body.bias", "head.weight"]] if groups == "module" else NAMES
    assert [list(group.names) for group in index.groups] == wanted
    check_content(load(index, make_targets(model, Topology(3, 2))), state)


def test_groups_by_name_that_do_not_match_are_refused(tmp_path: Path) -> None:
    save(tmp_path, TWO_GROUPS, KINDS[1])
    with pytest.raises(MismatchError, match=r"groups of \[30, 3\] elements; here: \[body.weight, body.bias"):
        open_named(tmp_path, "module")


@pytest.mark.parametrize("groups", ["modules", [], ["body.weight"], [[1]]], ids=str)
def test_invalid_values_of_groups_by_name_are_refused(groups: Any, tmp_path: Path) -> None:
    save(tmp_path, ONE_GROUP, KINDS[0])
    with pytest.raises(ConfigError, match="list of lists of parameter names is needed, found"):
        open_named(tmp_path, groups)


def test_groups_by_name_of_a_pipeline_list_each_layer(tmp_path: Path) -> None:
    """Its files do not record tied layers."""
    model = make_pipeline([["column"], ["row"]], tied=False)
    held = draw_state(model, Topology(0, 1, pp=2))
    folder = held.write(tmp_path)
    with pytest.raises(MismatchError, match="a pipeline's files do not say .* Give the names of each group"):
        open_named(folder, "module")
    index = open_named(folder, [[param.name for param in model.params]])
    assert [set(group.names) for group in index.groups] == [{key.name for key in index.atoms if key.state == "fp32"}]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["same", "swapped"])
def test_groups_whose_hyper_parameters_are_in_another_order_are_refused(order: Sequence[int], tmp_path: Path) -> None:
    """Their sizes are equal, so that only the hyper-parameters show the order."""
    model = Model((Param("a", (3,)), Param("b", (3,), group=1)))
    state = random_state(model, 0)
    groups = tuple({**group, "weight_decay": decay} for group, decay in zip(state.groups, (0.1, 0.0), strict=True))
    write_files(tmp_path, build_files(model, replace(state, groups=groups), Topology(0)))
    naming = Naming(model.live_groups, [groups[number] for number in order])
    if order == (0, 1):
        assert [group.names for group in open_checkpoint(str(tmp_path), Comm(), naming).groups] == [("a",), ("b",)]
        return
    with pytest.raises(MismatchError, match=r"hyper-parameters in another order \(.*weight_decay"):
        open_checkpoint(str(tmp_path), Comm(), naming)
