"""``ds_ucp plan``: what it says, how it ends, and the paper's trillion parameters on the command line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.cli.dispatch import main
from deepspeed_ucp.cli.numbers import duration
from tests.support.huge import make_gpt, save_sparse, write_gpt
from tests.synth import Model, Param, Run, Topology, random_state, write_checkpoint

MODEL = Model((Param("wte", (40, 9)), Param("h.0.norm", (9,), group=1), Param("h.0.attn", (27, 9))))
RULES = '[{"match": "wte|.*attn", "pattern": "shard-v"}, {"match": ".*norm", "pattern": "replicate"}]'
Plan = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    write_small(tmp_path, Topology(1, 4, "bf16"))
    return tmp_path


def write_small(folder: Path, topology: Topology, **config: Any) -> None:
    run = Run(ds_config={**topology.ds_config(), "train_batch_size": 48, **config})
    write_checkpoint(folder, MODEL, random_state(MODEL, 1, precision=topology.precision), topology, run=run)


@pytest.fixture(name="plan")
def _plan(run_json: Plan) -> Plan:
    return lambda folder, target, *options: run_json("plan", folder, "--target", target, *options)


def test_it_tells_at_a_glance(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--target", "dp=3,zero=3", "--read-gbs", "2", "--net-gbs", "1", "--all"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    starts = {line[0]: line for line in lines if line}
    assert starts["from"][1:] == ["ZeRO-1", "dp=4", "bfloat16", "(zero12)"]
    assert starts["to"][1:] == ["ZeRO-3", "dp=3", "bfloat16", "(zero3),", "3", "ranks"]
    assert starts["loads"][1:] == ["deepspeed_ucp"]
    assert starts["batch"][-1] == "fits"
    for title in ("checkpoint", "needs", "reads", "opens", "receives", "engine's", "rank", "resume", "assumed"):
        assert title in starts, title


def test_json_tells_everything(folder: Path, plan: Plan) -> None:
    code, told = plan(folder, "dp=3,zero=3", "--read-gbs", "2")
    numel = sum(param.numel for param in MODEL.params)
    assert (code, told["possible"], told["loader"], told["exact"]) == (0, True, "deepspeed_ucp", True)
    assert told["degrees"]["world"] == len(told["ranks"]) == 3
    assert told["totals"]["state"] == told["totals"]["needed"] == 12 * numel
    assert told["totals"]["read"] == sum(rank["read"] for rank in told["ranks"])
    size = sum(file.stat().st_size for file in folder.glob("*/*.pt"))
    assert told["totals"]["checkpoint"] == size
    assert told["seconds"]["checkpoint"] == pytest.approx(size / 2e9)
    assert told["per_rank"]["read"]["most"] == max(rank["read"] for rank in told["ranks"])
    held = sum(-(-param.numel // 3) for param in MODEL.params)
    assert {rank["engine"] for rank in told["ranks"]} == {held * (4 + 8 + 2)}


def test_a_sample_tells_the_same_as_the_plan_of_all(folder: Path, plan: Plan) -> None:
    _, every = plan(folder, "dp=6,zero=2", "--exact")
    code, some = plan(folder, "dp=6,zero=2", "--sample", "3")
    assert (code, some["exact"], [rank["rank"] for rank in some["ranks"]]) == (0, False, [0, 2, 5])
    keys = ("needed", "read", "requests", "files", "received", "sent", "engine")
    for rank in some["ranks"]:
        assert {key: rank[key] for key in keys} == {key: every["ranks"][rank["rank"]][key] for key in keys}
    assert some["totals"]["read"] == every["totals"]["read"]


def test_the_saved_topology_is_left_to_deepspeed(folder: Path, plan: Plan) -> None:
    code, told = plan(folder, "dp=4")
    assert (code, told["loader"], told["differences"], told["ranks"]) == (0, "DeepSpeed", [], [])


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("dp=1,pp=2,zero=2", "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"),
        ("dp=2,ep=2", "no experts that ep=2 could spread"),
        ("dp=1,pp=3,zero=1", "3 pipeline stages, but the parameters' names tell of 1 layers"),
        ("dp=2,tp=2,zero=1", "wte: (40, 9) on 1 rank in the checkpoint"),
        ("dp=5,zero=1", "train_batch_size 48 cannot be made by 5 data-parallel ranks"),
    ],
)
def test_what_is_not_possible_is_told_with_the_reason(folder: Path, plan: Plan, target: str, told: str) -> None:
    code, found = plan(folder, target)
    assert (code, found["possible"]) == (1, False)
    assert told in " ".join(found["obstacles"])


def test_unsettled_patterns_come_with_rules_to_paste(folder: Path, plan: Plan) -> None:
    _, found = plan(folder, "dp=2,tp=3,zero=1")
    (text,) = found["obstacles"]
    assert '"match": "h\\\\.\\\\d+\\\\.attn"' in text
    assert "--patterns" in text
    code, found = plan(folder, "dp=2,tp=5,zero=1", "--patterns", RULES)
    assert (code, found["obstacles"]) == (
        1,
        ["The model and the checkpoint cannot be brought together: h.0.attn: dimension 0: 27 does not divide into "
         "5 equal parts. A live model may tell by itself (AutoTP, Megatron's attributes, its own shapes); a plan knows "
         "the checkpoint and the rules that it is given (--patterns)."],
    )  # fmt: skip


def test_rules_settle_them(tmp_path: Path, plan: Plan) -> None:
    model = Model((Param("wte", (40, 9)), Param("h.0.norm", (9,), group=1), Param("h.0.attn", (28, 9))))
    write_checkpoint(tmp_path, model, random_state(model, 1), Topology(1, 2))
    code, found = plan(tmp_path, "dp=2,tp=2,zero=1", "--patterns", RULES)
    assert (code, found["patterns"]) == (0, {"the user's rules": 3})
    assert any("equal parts" in text for text in found["assumed"])


@pytest.mark.parametrize(
    ("universal", "fits"), [(None, False), (True, False), ({"preserve_batch_size": True}, True)], ids=str
)
def test_batch_sizes_are_those_of_the_saved_config(tmp_path: Path, plan: Plan, universal: Any, fits: bool) -> None:
    section = {"checkpoint": {"universal": universal}}
    write_small(tmp_path, Topology(1, 4, "bf16"), train_micro_batch_size_per_gpu=8, **section)
    code, found = plan(tmp_path, "dp=8,zero=1")
    assert (code, found["batch"]["fits"]) == (int(not fits), fits)
    assert plan(tmp_path, "dp=8,zero=1", "--train-batch-size", "32")[0] == 0


def test_nodes_tell_the_number_of_ranks(folder: Path, plan: Plan) -> None:
    _, found = plan(folder, "sp=2,zero=3", "--nodes", "3", "--ranks-per-node", "4")
    assert (found["degrees"]["dp"], found["degrees"]["world"], len(found["ranks"])) == (6, 12, 12)


def test_a_damaged_checkpoint_ends_with_2(folder: Path, plan: Plan) -> None:
    next(folder.glob("*/*optim_states.pt")).write_bytes(b"PK")
    code, found = plan(folder, "dp=3")
    assert code == 2
    assert "no zip directory" in found["error"]


# -- a trillion parameters --------------------------------------------------------------------------------------------

LAYERS, HIDDEN, VOCABULARY = 125, 25600, 51200
WRITERS = Topology(1, 4, "bf16", tp=8, pp=16)
"""512 ranks: 128 model files, 512 optimizer files, 1016 layer files."""


@pytest.fixture(name="trillion", scope="module")
def _trillion() -> Iterator[Path]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # disks take long to remove sparse files
    with tempfile.TemporaryDirectory(prefix="trillion-", dir=memory) as folder:
        yield write_gpt(Path(folder), make_gpt(LAYERS, HIDDEN, VOCABULARY), WRITERS, train_batch_size=1536)


def test_sparse_files_are_what_torch_saves(tmp_path: Path) -> None:
    import torch

    with torch.device("meta"):
        weight = torch.empty(1000, 30)
    save_sparse({"a": weight, "b": weight[2:4], "step": torch.tensor(7.0)}, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt")
    assert (found["a"].shape, found["step"].item()) == ((1000, 30), 7.0)
    assert found["b"].untyped_storage().data_ptr() == found["a"].untyped_storage().data_ptr()


@pytest.mark.exhaustive
def test_the_papers_largest_checkpoint_takes_fifty_seconds(trillion: Path, plan: Plan) -> None:
    options = ("--read-gbs", "273", "--patterns", "megatron-gpt", "--sample", "1")
    code, found = plan(trillion, "dp=384,zero=3", *options)
    assert code == 0, found["obstacles"]
    totals, parameters = found["totals"], LAYERS * (12 * HIDDEN**2 + 13 * HIDDEN)
    assert totals["checkpoint"] == pytest.approx(13.8e12, rel=0.002)
    assert found["seconds"]["checkpoint"] == pytest.approx(50.5, abs=0.1)
    assert 12 * parameters < totals["state"] < 12.1 * parameters  # masters and two states, no 16-bit copies
    assert 1 <= totals["ratio"] < 1.002  # the last stage's copy of the embedding lies in records that are needed
    assert found["seconds"]["aggregate"] == pytest.approx(12 / 14 * 50.5, rel=0.005)
    assert totals["headers"] == 2 + -(-(totals["files"] - 2) // 384)
    (rank,) = found["ranks"]
    assert rank["read"] == pytest.approx(totals["read"] / 384, rel=0.01)
    assert rank["peak"] <= 3 * (256 << 20) / 8
    assert sum(file.stat().st_blocks for file in trillion.rglob("*.pt")) * 512 < 200 << 20


@pytest.mark.exhaustive
def test_the_text_shows_the_whole_and_what_the_resume_reads(trillion: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--target", "tp=8,pp=48,dp=2", "--read-gbs", "273", "--sample", "2"]
    assert main(["plan", str(trillion), *options]) == 0
    text = capsys.readouterr().out
    assert "the whole checkpoint once  50.6 s" in text
    assert "what the resume reads      43.4 s" in text
    assert "12.6 TiB (13.8 TB)" in text
    assert "in stages of near equal bytes that end with a layer" in text
    assert "2 of 768 ranks, exactly" in text


@pytest.mark.exhaustive
def test_the_papers_largest_checkpoint_is_safe_after_fifty_seconds(trillion: Path, plan: Plan) -> None:
    options = ("--patterns", "megatron-gpt", "--sample", "1", "--memory-gbs", "1000", *SAVES)
    code, found = plan(trillion, "dp=4,tp=8,pp=16,zero=1", *options)
    assert code == 0, found["obstacles"]
    own, stored, _ = found["saves"]["ways"]
    assert own["stall"] == pytest.approx(50.5, abs=0.1)
    assert stored["safe"] == pytest.approx(stored["stall"] + own["stall"])


# -- how often to save ------------------------------------------------------------------------------------------------

SAVES = ("--mtbf", "4h", "--restart", "2m", "--read-gbs", "273", "--write-gbs", "273")


def test_the_textbook_case_of_as_many_parameters(run_json: Plan) -> None:
    line = ["plan", "--params", "985.7e9", "--ranks", "8192", "--target", "tp=8,pp=64", *SAVES, "--against", "4h"]
    code, found = run_json(*line, "--net-gbs", "25")
    assert (code, found["saves"]["mtbf"], found["saves"]["size"]["nodes"]) == (0, 14400, 1024)
    assert found["saves"]["size"]["total"] == found["totals"]["checkpoint"] == pytest.approx(13.8e12, rel=1e-3)
    four, own, stored, neighbour, memory = found["saves"]["ways"]
    assert own["stall"] == found["seconds"]["save"] == pytest.approx(50.5, abs=0.1)
    assert stored["safe"] == pytest.approx(own["stall"] + stored["stall"])
    # A node has 8 of 8192 partitions, and one of 64 stages' 16-bit copies.
    assert found["saves"]["size"]["node"] == pytest.approx(985.7e9 * (12 / 1024 + 2 / 64), rel=1e-6)
    assert four["interval"]["seconds"] == 14400
    shares = [way["interval"]["trains"] for way in (four, own, stored, neighbour, memory)]
    assert shares == sorted(shares) and shares[0] < 0.6 and shares[2] > 0.96


def test_a_checkpoint_of_the_same_topology_and_of_another(folder: Path, plan: Plan) -> None:
    size = sum(file.stat().st_size for file in folder.glob("*/*.pt"))
    numel = sum(param.numel for param in MODEL.params)
    for target in ("dp=4", "dp=6,zero=2"):
        code, found = plan(folder, target, *SAVES, "--ranks-per-node", "2", "--every", "3")
        assert (code, found["saves"]["size"]["total"]) == (0, 14 * numel)
        assert 14 * numel < size  # files have headers
        assert [way["every"] for way in found["saves"]["ways"]] == [1, 3, 1]
    assert "A node has" not in " ".join(found["assumed"])
    assert plan(folder, "dp=5,zero=1", *SAVES)[1].get("saves") is None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--mtbf", "8h"], "--mtbf needs --read-gbs, --write-gbs, --restart too"),
        (["--every", "2", "--stall", "1s"], "--stall, --every: it tells how often to save, with --mtbf alone"),
        (["--ranks-per-node", "8"], "--ranks-per-node: a plan without a checkpoint"),
        ([*SAVES, "--nodes", "8"], "--nodes: a plan without a checkpoint"),
    ],
)
def test_options_that_do_not_tell_how_often(more: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "1B", "--ranks", "8", *more]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("8h", 28800), ("30m", 1800), ("1h30m", 5400), ("2.5s", 2.5), ("1d", 86400), ("0.5h1s", 1801)],
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["8", "", "h", "0h", "-1h", "8 h", "1s1h", "nans", "infh", "1e3s", f"{'9' * 400}s", "8x"]
)
def test_a_time_is_one(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--params", "1B", "--ranks", "8", f"--mtbf={text}"])
    assert "argument --mtbf: a time such as 8h, 30m, 1h30m or 2.5s is needed" in capsys.readouterr().err


# -- without a checkpoint ---------------------------------------------------------------------------------------------


def test_without_a_checkpoint_the_needs_of_a_run_are_told(run_json: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "--params", "70e9", "--stage", "3", "--ranks", "512", "--read-gbs", "100", "--write-gbs", "50"]
    code, told = run_json(*line)
    assert (code, told["possible"], told["params"]) == (0, True, 70_000_000_000)
    each = -(-70_000_000_000 // 512)
    assert told["memory"] == {
        "weights": 2 * each,
        "gradients": 2 * each,
        "masters": 4 * each,
        "states": 8 * each,
        "total": 16 * each,
    }
    assert told["totals"]["checkpoint"] == 12 * 70_000_000_000
    assert (told["seconds"]["load"], told["seconds"]["save"]) == (pytest.approx(8.4), pytest.approx(16.8))
    assert main(line) == 0
    text = capsys.readouterr().out
    for part in ("ZeRO-3 dp=512", "70.0 G parameters", "2.04 GiB", "782 GiB", "a save at 50 GB/s takes 16.8 s"):
        assert part in text, part
    assert run_json("plan", "--params", "1B", "--stage", "2", "--ranks", "4", "--target", "pp=2")[0] == 1


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--ranks", "4"], "Name a checkpoint"),
        (["--params", "1B", "--ranks", "4", "--exact"], "--exact: a plan without a checkpoint"),
        (["--params", "1B", "--ranks", "4", "--patterns", "x"], "--patterns: a plan without a checkpoint"),
        (["--params", "1B", "--ranks", "4", "--target", "zero=3"], "told by --stage"),
        (["--params", "1B", "--ranks", "4", "--target", "ep=2"], "with a checkpoint alone"),
        (["--params", "1B", "--ranks", "3", "--target", "tp=2"], "3 ranks are not tp=2"),
        (["--params", "1B", "--ranks", "3", "--net-gbs", "2"], "give --read-gbs too"),
        (["folder", "--target", "dp=2", "--params", "1B"], "--params: a plan of a checkpoint"),
        (["folder"], "--target is missing"),
    ],
)
def test_the_two_kinds_of_plan_are_not_mixed(more: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *more]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("text", ["many", "0", "-1", "1e30", "nan"])
def test_a_number_of_parameters_is_one(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", f"--params={text}", "--ranks", "4"])
    assert "a number such as 70e9" in capsys.readouterr().err
