"""Targets, refused features, state dicts, and unchanged topologies that DeepSpeed loads, with fake engines."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from pydantic import BaseModel
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_ucp import rng
from deepspeed_ucp.engine import engines
from deepspeed_ucp.engine.base import flatten
from deepspeed_ucp.engine.coverage import UnknownLayoutError, check_engine, list_pending, list_unsaved
from deepspeed_ucp.engine.engines import OffloadOnlyTarget, Zero12Target, open_target
from deepspeed_ucp.engine.known import KNOWN, list_unknown
from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.extensions.experts.engine import LiveExperts, LocalExperts
from deepspeed_ucp.extensions.nvme import Nvme
from deepspeed_ucp.extensions.registry import REGISTRY
from deepspeed_ucp.extensions.statedict import ModuleStateDict
from deepspeed_ucp.model.wrappers import WRAPPERS
from tests.support.curriculum import make_sampler
from tests.support.reshard import FakeTarget
from tests.synth import Model, Param, Topology


def test_only_a_contiguous_tensor_becomes_a_view_of_one_dimension() -> None:
    tensor = torch.zeros(2, 3, requires_grad=True)
    assert (flatten(tensor).shape, flatten(tensor).data_ptr()) == ((6,), tensor.data_ptr())
    assert flatten(torch.zeros(3, 2).t()).shape == (2, 3)


def test_prefetched_partitions_are_released() -> None:
    """The load fills the file on NVMe. A partition in memory would replace it and is never written back."""
    target = FakeTarget(Model((Param("a", (2, 3)), Param("b", (4,)))), Topology(3), 0)
    released: list[Any] = []
    for status, param in zip(("AVAILABLE", "NOT_AVAILABLE"), target.params.values(), strict=True):
        swapper = SimpleNamespace(
            synchronize_reads=lambda: released.append("waited"), remove_partition_and_release_buffers=released.extend
        )
        param.nvme_swapper = swapper
        param.ds_tensor = SimpleNamespace(final_location="nvme", status=PartitionedParamStatus[status])
    target.extensions = [Nvme()]
    target.prepare()
    assert len(released) == 2 and released[0] == "waited" and released[1] is target.params["a"]


class Copies(TorchDispatchMode):
    """Records the number of elements of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_masters_are_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to a GPU needs memory for the conversion of one piece instead of a partition."""
    flat, master = torch.zeros(22, dtype=torch.bfloat16), torch.arange(11.0)
    target: Any = Zero12Target.__new__(Zero12Target)
    target.wrapper = "zero12"
    target.wrapped = SimpleNamespace(**{name: [None] for name in Zero12Target.attributes["zero12"]})
    target.wrapped.bit16_groups_flat, target.wrapped.single_partition_of_fp32_groups = [flat], [master]
    target.wrapped.parallel_partitioned_bit16_groups = [flat.view(2, 11)]
    monkeypatch.setattr(engines.ds_comm, "get_rank", lambda group: 1)
    monkeypatch.setattr(engines, "_PIECE", 4)
    with Copies() as copies:
        target.refresh_copies()
    assert flat.tolist() == [0.0] * 11 + master.tolist()
    assert copies.sizes == [4, 4, 3]


def test_copies_on_accelerators_are_gathered_by_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed moves them to the host if torch cannot gather an accelerator's tensors."""
    calls = list[Any]()
    monkeypatch.setattr(engines.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(engines.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(engines.ds_comm, "all_gather_into_tensor", lambda *args, group: calls.extend((*args, group)))
    flat = torch.zeros(6, device="meta")
    engines.gather_in_place(flat, "group")
    whole, part, group = calls
    assert (whole is flat, part.storage_offset(), part.numel(), group) == (True, 3, 3, "group")


def test_the_partitioning_degree_of_zero_3_for_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Any = OffloadOnlyTarget.__new__(OffloadOnlyTarget)
    target.wrapped = SimpleNamespace(dp_process_group="group")
    monkeypatch.setattr(engines.ds_comm, "get_world_size", lambda group: {"group": 2}[group])
    assert target.dp == 2


# --- features that are refused


def make_engine(optimizer: Any = None, *, zero: dict[str, Any] | None = None, **more: Any) -> Any:
    sections = {"offload_optimizer": None, "offload_param": None, **(zero or {})}
    config = SimpleNamespace(zero_config=SimpleNamespace(**sections))
    module = more.pop("module", torch.nn.Linear(2, 2))
    return SimpleNamespace(_config=config, module=module, optimizer=optimizer, **more)


def make_sharded_lora() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].lora_config, module[1].zero_shards = object(), 2
    return module


OFFLOADED = SimpleNamespace(offloaded_states=[SimpleNamespace(value="hp_params")])
PARTIAL = SimpleNamespace(backup_optimizer=object(), subgroup_to_device={0: "cuda", 1: "cpu"})
SUPER, ONE_BIT = (type(name, (), {})() for name in ("SuperOffloadOptimizer_Stage3", "OnebitAdam"))
OFF = '"universal": false'


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        pytest.param(make_engine(zenflow=True), ("ZenFlow", OFF), id="zenflow"),
        pytest.param(make_engine(SUPER), ("SuperOffload", "another process", OFF), id="super"),
        pytest.param(make_engine(OFFLOADED), ("offload_states", "(hp_params)", "reload_states()", OFF), id="offloaded"),
        pytest.param(make_engine(PARTIAL), ("offload_optimizer.ratio", "(0)", "ratio 1", OFF), id="partial offload"),
        pytest.param(make_engine(module=make_sharded_lora()), ("base_weight_sharding", "(1)", OFF), id="lora"),
        pytest.param(make_engine(SimpleNamespace()), (), id="unknown layout"),
    ],
)
def test_state_that_no_load_restores_is_refused(engine: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        open_target(engine)
    assert isinstance(caught.value, UnknownLayoutError) == (not words)
    for word in words:
        assert word in str(caught.value)


def test_supported_engines_are_not_refused() -> None:
    muon = SimpleNamespace(use_muon=True, save_muon_momentum_buffer_in_memory=True)
    on_cpu = SimpleNamespace(backup_optimizer=object(), subgroup_to_device={0: "cpu"}, offloaded_states=set())
    check_engine(make_engine(on_cpu))
    for device in ("cpu", "nvme"):
        place = SimpleNamespace(device=SimpleNamespace(value=device))
        check_engine(make_engine(muon, zero={"offload_optimizer": place, "offload_param": place}, zenflow=False))


@pytest.mark.parametrize(
    ("engine", "listed"),
    [
        (make_engine(zero={"zero_quantized_nontrainable_weights": True}), ["zero_quantized_nontrainable_weights"]),
        (make_engine(zero={"zero_quantized_nontrainable_weights": False}), []),
        (make_engine(SimpleNamespace(optimizer=ONE_BIT)), ["1-bit optimizers"]),
        (make_engine(ONE_BIT), ["1-bit optimizers"]),
    ],
)
def test_unsaved_state_is_listed(engine: Any, listed: list[str]) -> None:
    assert [text.partition(":")[0] for text in list_unsaved(engine)] == listed


@pytest.mark.parametrize(("done", "boundary", "listed"), [(4, None, []), (5, None, ["1 of the 2"]), (5, True, [])])
def test_a_step_that_has_begun_is_listed(done: int, boundary: bool | None, listed: list[str]) -> None:
    """DeepSpeed keeps its gradients through a load, and ends the step one micro batch later."""
    engine = make_engine(micro_steps=done, gradient_accumulation_steps=lambda: 2)
    engine._is_gradient_accumulation_boundary = boundary
    assert [re.findall(r"\d of the \d", text) for text in list_pending(engine)] == [[each] for each in listed]
    assert list_pending(make_engine()) == []


def test_a_curriculum_sampler_is_listed_unless_it_is_followed(tmp_path: Path) -> None:
    engine = make_engine(training_dataloader=SimpleNamespace(data_sampler=make_sampler(tmp_path)))
    assert [text.partition(":")[0] for text in list_unsaved(engine)] == ["curriculum learning"]
    rng.follow(engine)
    assert list_unsaved(engine) == []


def test_secondary_copies_of_frozen_parameters_are_dropped() -> None:
    """DeepSpeed's ``invalidate_secondary_tensor`` drops only secondary copies of trained parameters."""
    target = FakeTarget(Model((Param("a", (2, 3)), Param("frozen", (4,), frozen=True))), Topology(3), 0)
    for param in target.params.values():
        param.ds_secondary_tensor = torch.ones(2)
    target.drop_secondary_copies()
    assert all(param.ds_secondary_tensor is None for param in target.params.values())


# --- keys of tensors in a module's custom state dict


class Renaming(torch.nn.Module):
    """A module whose state dict omits a layer's name and adds a computed tensor."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.inner, self.twin = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3)
        self.twin.bias = self.inner.bias
        self.scale, self.kept, self.detached = 2.0, torch.ones(2), detached

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = self.inner.state_dict(keep_vars=not self.detached)
        found.update(self.twin.state_dict(prefix="twin.", keep_vars=not self.detached))
        return {**found, "made": torch.tensor([self.scale]), "kept": self.kept, "_extra_state": torch.ones(1)}


@pytest.mark.parametrize("detached", [False, True])
def test_keys_of_a_state_dict_are_matched_by_their_tensors(detached: bool) -> None:
    found = ModuleStateDict()
    keys = found.inspect(Renaming(detached=detached))
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert keys == {name: f"inner.{name}" for name in names}
    assert (set(found.others), found.computed) == ({"made", "kept"}, {"made"})


def test_the_state_dict_of_a_plain_module_is_not_computed() -> None:
    (gate,) = (row.in_engine for row in REGISTRY if row.name == "state_dict")
    hooked = torch.nn.Linear(3, 3)
    hooked.register_state_dict_post_hook(lambda *_: None)
    for module, is_custom in ((torch.nn.Linear(3, 3), False), (Renaming(detached=False), True), (hooked, True)):
        assert gate(SimpleNamespace(module=torch.nn.Sequential(module))) is is_custom


def test_computed_tensors_that_differ_from_loaded_ones_are_found() -> None:
    target: Any = SimpleNamespace(engine=SimpleNamespace(module=Renaming(detached=False)))
    before = ModuleStateDict()
    assert before.describe_differences(target) == ""
    before.others["made"].fill_(3.0)
    before.others["kept"].fill_(3.0)
    assert before.describe_differences(target).startswith("made: ")


# --- DeepSpeed loads an unchanged topology only in configurations that are known to be restored


class Zero(BaseModel):
    """Fields of ``zero_optimization``: a harmless one, two that change saves or loads, and one of a future release."""

    reduce_bucket_size: int = 1
    compute_grad_norm: bool = True
    elastic_checkpoint: bool = False
    other_layout: int = 0


class TorchCheckpointEngine:
    """A reader that loads ZeRO's files."""


class FastCheckpointEngine:
    """A reader that refuses ZeRO's files."""


def make(row: tuple[str, int] = ("zero12", 1), **differs: Any) -> Any:
    wrapper, stage = row
    topology = {"wrapper": wrapper, "zero_stage": stage, "precision": "float32", "tp": 1, "pp": 1}
    topology |= {"offload": "none/none", **differs.pop("topology", {})}
    engine: dict[str, Any] = {"checkpoint_engine": TorchCheckpointEngine(), "use_node_local_storage": lambda: False}
    engine |= {"_config": SimpleNamespace(zero_config=differs.pop("zero", Zero())), **differs.pop("engine", {})}
    shares = differs.pop("experts", {})
    plain: dict[str, Any] = {
        "extensions": [LiveExperts()] if shares else [],
        "shares": shares,
        "params": {"a": 0},
        "owned": {"a"},
        "flats": [SimpleNamespace(dtype="float32")],
        "unfiled": list,
        "traits": WRAPPERS["zero12"],
    }
    return SimpleNamespace(
        topology=SimpleNamespace(**topology),
        engine=SimpleNamespace(**engine),
        parallel=SimpleNamespace(tp=topology["tp"]),
        **plain | differs,
    )


def hold(degree: int, unsharded: bool = False) -> LocalExperts:
    return LocalExperts(degree, None, unsharded, True, ())


UNKNOWN: dict[str, tuple[Any, str]] = {
    "wrapper": (make(("zero9", 9)), "zero9 at ZeRO stage 9"),
    "stage": (make(("bf16", 0)), "bf16 at ZeRO stage 0"),
    "masters in 16 bit": (make(flats=[SimpleNamespace(dtype="bfloat16")]), "masters in 16 bit"),
    "reader": (make(engine={"checkpoint_engine": FastCheckpointEngine()}), "a FastCheckpointEngine"),
    "nvme": (make(("zero3", 3), topology={"offload": "nvme/none"}), "offload nvme/none"),
    "elastic": (make(zero=Zero(elastic_checkpoint=True)), "zero_optimization.elastic_checkpoint"),
    "no norm": (make(zero=Zero(compute_grad_norm=False)), "zero_optimization.compute_grad_norm"),
    "release to come": (make(zero=Zero(other_layout=2)), "zero_optimization.other_layout"),
    "tensor parallelism at ZeRO 3": (make(("zero3", 3), topology={"tp": 2}), "tensor parallelism"),
    "degrees": (make(experts={"x": hold(2), "y": hold(4)}), "experts of other ranks or degrees"),
    "folded": (make(topology={"tp": 4}, experts={"x": hold(2, True)}), "experts of other ranks or degrees"),
    "frozen experts": (
        make(("zero12", 2), params={"a": 0, "moe.experts.w1.3": 0}, experts={"moe.experts.": hold(2)}),
        "frozen experts",
    ),
    "layer files": (
        make(("torch", 0), unfiled=lambda: ["tied.w"], traits=WRAPPERS["torch"]),
        "tied.w (in no layer file)",
    ),
    "node files": (
        make(experts={"x": hold(2)}, engine={"use_node_local_storage": lambda: True}),
        "node-local files",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_options_with_unknown_effect_are_listed(case: str) -> None:
    target, text = UNKNOWN[case]
    assert list_unknown(target) == [text]


@pytest.mark.parametrize(
    "target",
    [
        *(make(row, topology={"precision": "bfloat16"}, zero=Zero(reduce_bucket_size=5)) for row in KNOWN),
        make(params={"a": 0, "b": 0}, experts={"x": hold(2)}, topology={"tp": 2, "pp": 2}),
        make(("zero3", 3), topology={"offload": "cpu/cpu"}),
    ],
    ids=lambda target: f"{target.topology.wrapper}-{target.topology.zero_stage}",
)
def test_known_options_are_not_listed(target: Any) -> None:
    assert list_unknown(target) == []


@pytest.mark.parametrize(
    ("helpers", "scheduler", "scaler", "unknown"),
    [
        ((), None, {}, []),
        (("lr_scheduler",), object(), {"dynamic": True}, []),
        (("lr_scheduler",), None, {"dynamic": False, "cur_scale": 8.0}, ["lr_scheduler on", "another loss scale"]),
        (("random_ltd",), object(), {}, ["lr_scheduler on", "random_ltd on"]),
        (None, object(), {}, []),
    ],
)
def test_state_of_one_side_is_listed(helpers: Any, scheduler: Any, scaler: dict[str, Any], unknown: list[str]) -> None:
    engine = {"lr_scheduler": scheduler, "random_ltd_enabled": lambda: False}
    wrapped = SimpleNamespace(loss_scaler=SimpleNamespace(dynamic=True, cur_scale=512.0))
    index: Any = SimpleNamespace(helpers=helpers, scaler=scaler, unnoticed=())
    found = list_unknown(make(engine=engine, wrapped=wrapped), index)
    assert len(found) == len(unknown) and all(map(str.startswith, found, unknown))
