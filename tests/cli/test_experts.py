"""What the commands tell, and make, of checkpoints with experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.cli.experts import write_numbers
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.forecast.degrees import Degrees
from deepspeed_ucp.forecast.experts import find_moved_experts
from deepspeed_ucp.sources import open_checkpoint
from tests.synth import ExpertLayer, Model, Param, State, Topology, random_state, write_checkpoint

Run = Callable[..., tuple[int, dict[str, Any]]]

AUTOEP = pytest.mark.skipif(not find_spec("deepspeed.module_inject.auto_ep_layer"), reason="DeepSpeed before 0.19")


def make_model(*, fused: bool = False) -> Model:
    """Two layers of four experts each, with a gate."""
    layers = tuple(ExpertLayer(f"h.{number}.mlp", 4, fused) for number in range(2))
    params = [Param("wte", (8, 6))]
    for layer in layers:
        params.append(Param(f"{layer.name}.gate.weight", (4, 6)))
        ends = {"w1": (5, 6), "w2": (6, 5), "w3": (5, 6)} if fused else {"fc.weight": (5, 6), "fc.bias": (5,)}
        names = [(f"{layer.prefix}{n}.{end}", end) for n in range(4) for end in ends]
        if fused:
            names = [(f"{layer.prefix}{end}.{n}", end) for end in ends for n in range(4)]
        params += [Param(name, ends[end]) for name, end in names]
    return Model(tuple(params), experts=layers)


def write(folder: Path, topology: Topology, *, fused: bool = False) -> tuple[Path, State]:
    model = make_model(fused=fused)
    state = random_state(model, 1, precision=topology.precision)
    return write_checkpoint(folder, model, state, topology), state


SPREADS = [
    pytest.param(Topology(1, 4, "bf16", ep=(2, 4)), False, [[0, 2], [1, 3]], [[0, 1], [2, 3]], id="two degrees"),
    pytest.param(
        Topology(2, 4, ep=(2, 2), data_first=True), False, [[0, 1], [2, 3]], [[0, 1], [2, 3]], id="data first"
    ),
    pytest.param(Topology(2, 4, ep=(1, 1)), False, [[0, 1, 2, 3]], [[0, 1, 2, 3]], id="every rank all"),
    pytest.param(
        Topology(3, 4, ep=(2, 2), dealt=True), True, [[0, 2], [1, 3]], [[0, 2], [1, 3]], id="autoep", marks=AUTOEP
    ),
]


@pytest.mark.parametrize(("topology", "fused", "ranks", "experts"), SPREADS)
def test_which_ranks_hold_which_experts_is_told(
    topology: Topology, fused: bool, ranks: list[Any], experts: list[Any], tmp_path: Path, run_json: Run
) -> None:
    path, _ = write(tmp_path, topology, fused=fused)
    code, told = run_json("inspect", path)
    first, second = told["experts"]
    assert (code, told["findings"], told["topology"]["ep"]) == (0, [], max(topology.ep))
    assert [first[key] for key in ("experts", "ep")] == [4, topology.ep[0]]
    assert (second["ep"], len(second["held"])) == (topology.ep[1],) * 2
    assert first["layer"] == "h.0.mlp"
    assert [each["ranks"] for each in first["held"]] == ranks
    assert [each["experts"] for each in first["held"]] == experts
    assert told["client_state"]["keys"].keys() <= {"universal_checkpoint_info"}


def test_layers_alike_share_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 2)))
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "h.{0-1}.mlp             4   2  0, 2: 0-1; 1, 3: 2-3" in shown
    assert "h.{0-1}.mlp.deepspeed_moe.experts.deepspeed_experts.{0-3}.fc.weight" in shown
    assert "ZeRO-1 dp=4 ep=2 bfloat16 (zero12)" in shown


def test_one_experts_parameter(tmp_path: Path, run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 4)))
    name = "h.0.mlp.deepspeed_moe.experts.deepspeed_experts.3.fc.weight"
    _, told = run_json("inspect", path, "--param", name)
    assert told["expert"] == {"layer": "h.0.mlp", "number": 3, "of": 4, "ranks": [1, 3]}
    assert {"_".join(each["file"].split("_")[:5]) for each in told["layout"][0]["shards"][0]["fragments"]} <= {
        "bf16_zero_pp_rank_1",
        "bf16_zero_pp_rank_3",
    }
    assert main(["inspect", str(path), "--param", name]) == 0
    assert "3 of the 4 of h.0.mlp, held by ranks 1, 3" in capsys.readouterr().out
    assert run_json("inspect", path, "--param", "wte")[1]["expert"] is None


def test_what_was_spread_otherwise_is_no_difference(tmp_path: Path, run_json: Run) -> None:
    one, _ = write(tmp_path / "one", Topology(1, 4, ep=(2, 4)))
    other, _ = write(tmp_path / "other", Topology(2, 4, ep=(1, 2), data_first=True))
    code, told = run_json("diff", one, other)
    assert (code, told["tensors"]) == (0, [])


def test_a_conversion_knows_its_layers_and_not_who_held_them(tmp_path: Path, run_json: Run) -> None:
    path, _ = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 4)))
    assert run_json("convert", path, tmp_path / "out")[0] == 0
    assert run_json("verify", tmp_path / "out")[0] == run_json("diff", path, tmp_path / "out")[0] == 0
    told = run_json("inspect", tmp_path / "out")[1]["experts"]
    assert [(each["experts"], each["ep"], each["held"]) for each in told] == [(4, None, None)] * 2
    code, planned = run_json("plan", tmp_path / "out", "--target", "dp=4,ep=4.2,zero=1")
    assert (code, planned["loader"]) == (0, "deepspeed_ucp")


def test_weights_of_experts_are_exported(tmp_path: Path, run_json: Run) -> None:
    path, state = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 4)))
    assert run_json("export", path, tmp_path / "out", "--dtype", "fp32")[0] == 0
    exported: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(file)
    assert exported.keys() == state.atoms.keys()
    assert all(torch.equal(exported[name], held["fp32"]) for name, held in state.atoms.items())


def test_a_damaged_experts_file_is_told_with_its_parameter(tmp_path: Path, run_json: Run) -> None:
    path, _ = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 4)))
    file = path / "layer_1_expert_2_mp_rank_00_model_states.pt"
    data = bytearray(file.read_bytes())
    where = torch.load(file, map_location="meta", weights_only=False)
    offset = next(iter(where.values())).untyped_storage()._checkpoint_offset
    data[offset] ^= 1
    file.write_bytes(data)
    code, told = run_json("verify", path)
    (fault,) = told["faults"]
    assert (code, fault["file"]) == (1, file.name)
    assert "h.1.mlp.deepspeed_moe.experts.deepspeed_experts.2.fc.weight" in json.dumps(fault)


def test_a_plan_of_the_saved_placement_is_left_to_deepspeed(tmp_path: Path, run_json: Run) -> None:
    path, _ = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 4)))
    assert run_json("plan", path, "--target", "dp=4,ep=2.4")[1]["loader"] == "DeepSpeed"
    told = run_json("plan", path, "--target", "dp=4,ep=4.2")[1]
    assert told["loader"] == "deepspeed_ucp"
    assert [text.split(".")[0] for text in told["differences"]] == ["experts of h"] * 2
    assert run_json("plan", path, "--target", "dp=4,ep=2.4,data_first=1")[1]["loader"] == "deepspeed_ucp"


def test_experts_over_tensor_parallel_ranks_are_the_live_models_to_spread(tmp_path: Path) -> None:
    """A plan of the saved topology is left to DeepSpeed all the same."""
    path, _ = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 4)))
    index = open_checkpoint(str(path), Comm())
    assert find_moved_experts(index, Degrees(4, zero=1, ep=(4,)))
    assert find_moved_experts(index, Degrees(2, 2, zero=1, ep=(4,))) == []


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("dp=4,ep=3", "ep=3 has to divide the 4 data-parallel ranks and the 4 experts of h.0.mlp."),
        ("dp=4,ep=2.2.2", "ep=2.2.2 is for 3 layers of experts, found 2"),
        ("dp=4,ep=2,zero=3", "under ZeRO 0, 1 and 2"),
    ],
)
def test_degrees_that_cannot_be_are_told(target: str, told: str, tmp_path: Path, run_json: Run) -> None:
    path, _ = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 4)))
    code, found = run_json("plan", path, "--target", target)
    assert code == 1
    assert told in found["obstacles"][0]


@AUTOEP
@pytest.mark.parametrize(
    ("target", "told"), [("dp=4,ep=2,tp=2", "only the live model"), ("dp=4,ep=2.4", "one expert-")]
)
def test_degrees_that_autoep_does_not_have(target: str, told: str, tmp_path: Path, run_json: Run) -> None:
    path, _ = write(tmp_path, Topology(1, 4, "bf16", ep=(2, 2)), fused=True)
    assert told in run_json("plan", path, "--target", target)[1]["obstacles"][0]


def test_long_lists_of_numbers_are_cut_short() -> None:
    assert write_numbers([0, 1, 2, 5]) == "0-2, 5"
    assert write_numbers(range(0, 64, 8)) == "0, 8, …, 56"


def write_dense(folder: Path) -> Path:
    """Experts as Hugging Face's models hold them: a run without AutoEP."""
    experts = {"gate_up_proj": (4, 6, 2), "down_proj": (4, 2, 3)}
    params = [Param(f"h.mlp.experts.{name}", shape) for name, shape in experts.items()]
    model = Model((Param("wte", (8, 6)), Param("h.mlp.gate.weight", (4, 2)), *params))
    return write_checkpoint(folder, model, random_state(model, 1, precision="bf16"), Topology(1, 2, "bf16"))


def test_a_dense_run_is_planned_over_expert_parallel_ranks(tmp_path: Path, run_json: Run) -> None:
    path = write_dense(tmp_path)
    assert "no experts that ep=2" in run_json("plan", path, "--target", "dp=4,ep=2")[1]["obstacles"][0]
    code, told = run_json("plan", path, "--target", "dp=4,ep=2", "--patterns", "autoep")
    assert (code, told["obstacles"], told["loader"], len(told["ranks"])) == (0, [], "deepspeed_ucp", 4)
    assert any("by rename rules" in text for text in told["differences"])
    again = run_json("plan", path, "--target", "dp=2", "--patterns", "autoep")[1]
    assert again["loader"] == "deepspeed_ucp"  # at the saved degrees too
    twice = json.dumps({"rename": [{"from": r"(?P<x>.*_proj)\.{e % 4}", "to": "{x}.{e}"}]})
    more = run_json("plan", path, "--target", "dp=2,experts=8", "--patterns", twice)[1]
    assert more["totals"]["needed"] == 12 * (48 + 8 + 8 * 18)  # eight experts of 18 elements, masters and two moments
    code, told = run_json("plan", path, "--target", "dp=4,ep=2,experts=8", "--patterns", "autoep")
    assert code == 1 and "holds 4 experts, not 8" in told["obstacles"][0]


def export_by_rules(path: Path, out: Path, run_json: Run, rules: Any, *more: str) -> dict[str, torch.Tensor]:
    given = rules if isinstance(rules, str) else json.dumps({"rename": rules})
    assert run_json("export", path, out, "--dtype", "fp32", "--patterns", given, *more)[0] == 0
    return load_file(next(out.glob("*.safetensors")))


def test_exports_count_cut_and_join_experts(tmp_path: Path, run_json: Run) -> None:
    path, state = write(tmp_path / "saved", Topology(1, 4, "bf16", ep=(2, 4)))
    own = "h.1.mlp.deepspeed_moe.experts.deepspeed_experts"
    picked = [{"from": rf"{own}\.{{2 * e}}\.fc\.weight", "to": "picked.{e}.weight"}, {"from": ".*fc.bias", "to": None}]
    found = export_by_rules(path, tmp_path / "a", run_json, picked, "--experts", "2")
    assert {name for name in found if "h.1" in name} == {"h.1.mlp.gate.weight"}
    assert not any("bias" in name for name in found)
    for expert in range(2):
        assert torch.equal(found[f"picked.{expert}.weight"], state.atoms[f"{own}.{2 * expert}.fc.weight"]["fp32"])
    joined = [{"from": rf"(?P<x>.*)\.{own[4:]}\.(?P<e>\d)\.fc\.weight", "to": "{x}.fused"}]
    found = export_by_rules(path, tmp_path / "b", run_json, joined)
    wanted = torch.stack([state.atoms[f"{own}.{expert}.fc.weight"]["fp32"] for expert in range(4)])
    assert torch.equal(found["h.1.fused"], wanted)


def test_a_dense_export_has_autoeps_names(tmp_path: Path, run_json: Run) -> None:
    path = write_dense(tmp_path / "saved")
    plain = export_by_rules(path, tmp_path / "plain", run_json, [])
    found = export_by_rules(path, tmp_path / "out", run_json, "autoep")
    experts = {f"h.mlp.experts.w{w}.{e}" for w in (1, 2, 3) for e in range(4)}
    assert found.keys() == {"wte", "h.mlp.router.gate.weight", *experts}
    both = torch.stack([torch.cat([found[f"h.mlp.experts.w{w}.{e}"] for w in (1, 3)]) for e in range(4)])
    assert torch.equal(both, plain["h.mlp.experts.gate_up_proj"])


def test_a_save_of_stage_0_is_named_by_its_module(tmp_path: Path, run_json: Run) -> None:
    """DeepSpeed's own function takes the experts out of the one group that the optimizer was to have."""
    path, state = write(tmp_path / "saved", Topology(0, 4, "bf16", "unfused", ep=(2, 2)))
    assert run_json("convert", path, tmp_path / "out")[0] == 2
    assert run_json("convert", path, tmp_path / "out", "--groups", "module")[0] == 0
    for name, held in state.atoms.items():
        for each in ("fp32", "exp_avg"):
            found = torch.load(tmp_path / "out" / "zero" / name / f"{each}.pt", weights_only=False)["param"]
            assert torch.equal(found, held[each]), (name, each)
