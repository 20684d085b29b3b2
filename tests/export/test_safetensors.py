"""Exported weights equal the run's to the bit, and files equal those of the safetensors library."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.convert import ConvertOptions, convert_index
from deepspeed_ucp.errors import CheckpointError, ConfigError, MismatchError, UnsupportedError
from deepspeed_ucp.export import output
from deepspeed_ucp.export.dcp import export_dcp
from deepspeed_ucp.export.safetensors import export_safetensors, lay_out, split_shards
from deepspeed_ucp.export.tensors import ExportOptions, Tensor
from deepspeed_ucp.formats import open_checkpoint
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.foreign.weights import DTYPES
from deepspeed_ucp.io.cast import FLOATING, cast
from deepspeed_ucp.io.memory import Scratch
from deepspeed_ucp.model.index import AtomicIndex
from deepspeed_ucp.model.storage import MASTER, Atom
from deepspeed_ucp.stream.full_tensors import FullTensor
from deepspeed_ucp.tensor_parallel.rename import Rename
from deepspeed_ucp.tensor_parallel.rules import from_config
from tests.support.cases import Case, cases
from tests.support.damage import flip_bit
from tests.support.exports import MODEL, TOPOLOGIES, check_same, load_all, make_gpt2, open_model
from tests.support.ranks import World, run_ranks
from tests.support.reshard import examples, temporary_folder
from tests.support.reshard3d import VOCAB, SavedRun, draw_state, make_pipeline, make_plain, open_run, rules_of, trips
from tests.synth import Model, Param, Run, Topology, random_state, write_checkpoint
from tests.synth.engines import describe


def expect_weights(model: Model, seed: int, topology: Topology, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    atoms = random_state(model, seed, precision=topology.precision).atoms
    found = {name: states["fp32"] for name, states in atoms.items()} | dict(model.buffers)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in found.items()}


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.label)
def test_exported_files_equal_those_of_the_safetensors_library(tmp_path: Path, topology: Topology, dtype: str) -> None:
    index, options = open_model(tmp_path, topology), ExportOptions(dtype=dtype)
    report = export_safetensors(index, str(tmp_path / "out"), options=options)
    save_file(expect_weights(MODEL, 0, topology, getattr(torch, dtype)), tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    assert report.files == {"model.safetensors": (tmp_path / "expected").stat().st_size}
    assert (report.tensors, report.parameters) == (7, 15 + 7700 + 4 + 1)


@pytest.mark.parametrize("source", [Topology(0), Topology(1, 2), Topology(3, 2)], ids=lambda t: t.label)
def test_frozen_parameters_can_be_excluded(tmp_path: Path, source: Topology) -> None:
    options = ExportOptions(frozen=False)
    export_safetensors(open_model(tmp_path, source), str(tmp_path / "out"), options=options)
    everything = {*expect_weights(MODEL, 0, source, torch.float32)}
    assert set(load_all(tmp_path / "out")) == everything - {param.name for param in MODEL.params if param.frozen}
    if source.stage == 0:  # the optimizer's parameters have no names
        index = open_checkpoint(next(str(each) for each in tmp_path.glob("global*")), Comm(), Naming(weights_only=True))
        with pytest.raises(ConfigError, match="does not record which parameters were trained.*--groups"):
            export_safetensors(index, str(tmp_path / "out"), options=options)


@given(case=cases())
@examples(40)
def test_an_export_of_any_run_has_its_weights(case: Case) -> None:
    with temporary_folder() as folder:
        index = open_checkpoint(str(case.write(folder / "in")), Comm(), Naming(case.model.live_groups))
        export_safetensors(index, str(folder / "out"), options=ExportOptions(workers=2))
        found = load_all(folder / "out")
    saved = {name: states["fp32"] for name, states in case.state.atoms.items()}
    buffers = {n: v.float() if v.is_floating_point() else v for n, v in case.model.buffers.items()}
    for name, value in {**saved, **buffers}.items():
        if name in found or value.numel():  # files do not list parameters without elements
            check_same({name: found[name]}, {name: value})
    assert set(found) <= {*saved, *buffers}


def cut_padding(saved_run: SavedRun) -> dict[str, torch.Tensor]:
    """Return the logical weights of a run from the first stage that has them, without the vocabulary's padding."""
    plain = {name: states["fp32"] for name, states in saved_run.state.atoms.items() if "#" not in name}
    return {name: value[:VOCAB] if name.endswith("word") else value for name, value in plain.items()}


@given(trip=trips(), nodes=st.integers(1, 2))
@examples(20)
def test_an_export_of_a_tensor_or_pipeline_parallel_run_has_whole_weights(trip: Any, nodes: int) -> None:
    with temporary_folder() as folder:
        index = open_run(trip.source, folder / "in")
        run_ranks(nodes, lambda rank, comm: export_run(index, trip.source, folder / "out", comm))
        found = load_all(folder / "out")
    weights = cut_padding(trip.source)
    assert set(found) <= set(weights) | set(trip.source.model.buffers)
    assert {name for name, value in weights.items() if value.numel()} <= set(found)
    check_same({name: found[name] for name in weights if name in found}, {n: weights[n] for n in weights if n in found})


def export_run(index: AtomicIndex, saved_run: SavedRun, to: Path, comm: Comm | None = None, **options: Any) -> Any:
    return export_safetensors(
        index, str(to), comm, ExportOptions(**{"workers": 2, **options}), rules=rules_of(saved_run), max_shard=400
    )


@pytest.mark.parametrize("keep", [False, True], ids=["cut", "kept"])
def test_padding_rows_are_removed_unless_kept(tmp_path: Path, keep: bool, caplog: pytest.LogCaptureFixture) -> None:
    saved_run = draw_state(make_plain(("word", "norm")), Topology(1, 2, tp=2))
    caplog.set_level("INFO", "deepspeed_ucp")
    export_run(open_run(saved_run, tmp_path / "in"), saved_run, tmp_path / "out", keep_padding=keep)
    whole = saved_run.state.atoms["body.word"]["fp32"]
    assert len(whole) > VOCAB
    check_same({"w": load_all(tmp_path / "out")["body.word"]}, {"w": whole if keep else whole[:VOCAB]})
    assert (f"body.word ({VOCAB} of {len(whole)} rows)" in caplog.text) != keep


def test_an_export_of_an_atomic_checkpoint_has_the_same_bytes(tmp_path: Path) -> None:
    """Its manifest contains the patterns, including the rows of the vocabulary."""
    saved_run = draw_state(make_plain(("word", "qkv", "row", "norm"), frozen=("row",)), Topology(1, 2, "bf16", tp=2))
    index = open_run(saved_run, tmp_path / "in")
    rules = rules_of(saved_run)
    convert_index(index, str(tmp_path / "in"), str(tmp_path / "atomic"), Comm(), ConvertOptions(), rules=rules)
    export_safetensors(index, str(tmp_path / "one"), rules=rules)
    export_safetensors(open_checkpoint(str(tmp_path / "atomic"), Comm()), str(tmp_path / "two"))
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert len(load_file(one)["body.word"]) == VOCAB


@pytest.mark.parametrize(("nodes", "workers"), [(1, 1), (1, 5), (3, 1), (2, 4)])
def test_any_numbers_of_nodes_and_workers_write_the_same_bytes(tmp_path: Path, nodes: int, workers: int) -> None:
    model = Model((Param("a", (1200, 1000)), Param("b", (70, 11)), Param("c", (900, 400))))
    index = open_model(tmp_path, Topology(3, 3), model)
    options = ExportOptions(workers=workers, window=8 << 20)
    reports = run_ranks(
        nodes, lambda rank, comm: export_safetensors(index, str(tmp_path / "out"), comm, options, max_shard=2 * 10**6)
    )
    save_file({"a": expect_weights(model, 0, Topology(3, 3), None)["a"]}, tmp_path / "expected", {"format": "pt"})
    assert (tmp_path / "out" / "model-00001-of-00002.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    check_same(load_all(tmp_path / "out"), expect_weights(model, 0, Topology(3, 3), None))
    assert len({report.bytes_read for report in reports}) == 1


def test_every_source_byte_is_read_once(tmp_path: Path) -> None:
    """Only records with weights are read."""
    index = open_model(tmp_path, Topology(1, 3, "bf16", parameter_alignment=True))
    report = export_safetensors(index, str(tmp_path / "out"))
    weights = [atom for atom in index.atoms.values() if atom.state in (MASTER, "module")]
    records = {f.record for atom in weights for shard in atom.shards for f in shard.list_fragments(atom.state)}
    assert report.bytes_read == sum(index.records[number].nbytes for number in records)


SPECIAL = [0.0, -0.0, 1.0, -1.5, 3e38, 1e-40, 65504.0, 65520.0, 6e-8, inf, -inf, 1.00390625, 1.01171875, nan]


@pytest.mark.parametrize("target", sorted(FLOATING))
@pytest.mark.parametrize("source", sorted(FLOATING))
def test_casts_equal_torchs(source: str, target: str) -> None:
    random = torch.Generator().manual_seed(0)
    many = torch.randn(40_000, generator=random) * 10.0 ** torch.randint(-42, 38, (40_000,), generator=random)
    values = torch.cat([torch.tensor(SPECIAL), many]).to(getattr(torch, source))
    expected = values.to(getattr(torch, target))
    into = bytearray(expected.nbytes)
    cast(memoryview(values.view(torch.uint8).numpy()), source, memoryview(into), target)
    found = torch.frombuffer(into, dtype=expected.dtype)
    same = found.view(torch.uint8).view(-1, expected.itemsize) == expected.view(torch.uint8).view(-1, expected.itemsize)
    assert bool((same.all(1) | (found.isnan() & expected.isnan())).all())


FILE = "model.safetensors"


def make_tensor(dtype: str, numel: int = 1) -> Tensor:
    return Tensor(("x",), FullTensor(Atom("x", MASTER, dtype, ()), (numel,)), (numel,), dtype)


def test_dtypes_are_in_the_order_of_the_safetensors_library(tmp_path: Path) -> None:
    dtypes = {f"x{number}": dtype for number, dtype in enumerate(DTYPES.values())}
    tensors = {name: torch.zeros(2, dtype=getattr(torch, dtype)) for name, dtype in dtypes.items()}
    save_file(tensors, tmp_path / "all", {"format": "pt"})
    laid = lay_out({name: make_tensor(dtype, 2) for name, dtype in dtypes.items()})
    assert (tmp_path / "all").read_bytes() == laid.heads[FILE] + bytes(laid.sizes[FILE] - len(laid.heads[FILE]))


@pytest.mark.parametrize(
    ("name", "dtype", "text"),
    [("x", "complex128", "complex128"), ("w\udcff", "float32", r"no names such as w\\udcff; --rename or --to dcp")],
)
def test_unsupported_types_and_names_are_refused(name: str, dtype: str, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        lay_out({name: make_tensor(dtype)})


# -- files ------------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=20), limit=st.integers(1, 60))
@examples(200)
def test_files_are_split_like_hugging_faces(sizes: list[int], limit: int) -> None:
    named = {f"t{number}": size for number, size in enumerate(sizes)}
    split = split_state_dict_into_shards_factory(
        named, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=limit
    )
    assert split_shards(named, limit) == list(split.filename_to_tensors.values())


def test_invalid_names_and_patterns_of_an_export_are_refused(tmp_path: Path) -> None:
    index, out = open_model(tmp_path, Topology(1, 2)), str(tmp_path / "out")
    for renames, text in (
        ((Rename(".*weight", "w"),), r"become w"),
        ((Rename("a.*", "x.y"), Rename("b.*", "y")), r"a\.weight and b\.weight"),
    ):
        with pytest.raises(MismatchError, match=text):
            export_safetensors(index, out, options=ExportOptions(renames=renames, strip_prefix="x."))
    index = open_run(draw_state(make_plain(("norm", "column")), Topology(1, 2, tp=2)), tmp_path / "in")
    with pytest.raises(MismatchError, match=r"body\.column"):
        export_safetensors(index, out)
    with pytest.raises(ConfigError, match="int8"):
        export_safetensors(index, out, options=ExportOptions(dtype="int8"))
    assert not (tmp_path / "out").exists()


def test_rename_rules_and_prefixes_without_a_match_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = open_model(tmp_path, Topology(1, 2))
    options = ExportOptions(renames=(Rename("a.*", "x.y"), Rename("z.*", "z")), strip_prefix="z.")
    export_safetensors(index, str(tmp_path / "out"), options=options)
    (text,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert text == "rules and prefixes that match no parameter: rename: 'z.*' matches no parameter, --strip-prefix 'z.'"
    caplog.clear()
    options = replace(options, renames=options.renames[:1], strip_prefix="x.", overwrite=True)
    export_safetensors(index, str(tmp_path / "out"), options=options)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_stage_0_without_names_exports_the_models_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = random_state(MODEL, 0, precision="fp16")
    path = write_checkpoint(tmp_path, MODEL, state, Topology(0, precision="fp16", wrapper="fused"))
    index = open_checkpoint(str(path), Comm(), Naming(weights_only=True))
    export_safetensors(index, str(tmp_path / "out"))
    assert "no fp32 weights with names, so the model's own float16 are written; if" in caplog.text
    assert torch.equal(load_all(tmp_path / "out")["b.weight"], state.atoms["b.weight"]["fp32"].half().float())


@pytest.mark.parametrize("export", [export_safetensors, partial(export_dcp, weights_only=True)], ids=["hf", "dcp"])
def test_default_casts_and_overflows_are_logged(tmp_path: Path, export: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Values that were infinite or NaN before are not logged."""
    values = torch.tensor([1.0, inf, -inf, nan])
    buffers = {"double": values.double(), "large": torch.tensor([1.0, -70000.0]), "mask": values}
    buffers["fits"] = values[:1] * 65519
    index = open_model(tmp_path, Topology(3, 2), Model((Param("a", (5,)),), buffers))
    for dtype, logged in (
        ("float16", "values too large for float16 are written as infinite, or as its largest .*: large"),
        ("float8_e4m3fn", "values too large for float8_e4m3fn .*: fits, large"),
        ("float8_e5m2", "values too large for float8_e5m2 .*: fits, large"),
        ("float32", "float64 is rounded to float32 .*: double"),
        ("bfloat16", None),
        (None, None),
    ):
        caplog.clear()
        options, out = ExportOptions(dtype=dtype), str(tmp_path / str(dtype))
        run_ranks(2, lambda rank, comm, o=options, out=out: export(index, out, comm, o))
        found = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert len(found) == (logged is not None) and all(re.fullmatch(logged, text) for text in found), found


@pytest.mark.parametrize("target", sorted(FLOATING - {"float64"}))
def test_values_beyond_the_range_of_a_dtype_are_detected(target: str) -> None:
    finfo = torch.finfo(getattr(torch, target))
    rounded = -finfo.max * (1 + finfo.eps / 8)
    for value, expected in ((finfo.max, False), (rounded, False), (finfo.max * 1.1, True), (-inf, False)):
        stored, overflowed = torch.tensor([0.0, value], dtype=torch.float64), set[str]()
        tensor = replace(make_tensor("float64", 2), dtype=target)
        tensor.convert(memoryview(stored.view(torch.uint8).numpy()), Scratch(), overflowed)
        assert (overflowed == {"x"}) is expected, value


def test_parts_that_are_not_exported_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(nest=lambda module: {**module, "layer._extra_state": b"recipe"})
    index = replace(open_model(tmp_path, Topology(1, 2), run=run), dropped="a converter omits buffers")
    export_safetensors(index, str(tmp_path / "out"), rules=from_config({"resize": [{"match": "a"}]}))
    assert "extra states of modules are not written: layer._extra_state" in caplog.text
    assert "resize rules are for loads; the saved shapes are written" in caplog.text
    assert "model_states.pt: a converter omits buffers" in caplog.text


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("export", "state"), [(export_safetensors, MASTER), (export_dcp, MASTER), (export_dcp, "exp_avg")]
)
def test_a_damaged_source_leaves_no_files(tmp_path: Path, export: Any, state: str, nodes: int) -> None:
    index = open_model(tmp_path, Topology(2, 2, "bf16"))
    flip_bit(index, "b.weight", state)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="damaged"):
        run_ranks(nodes, lambda rank, comm: export(index, str(tmp_path / "out"), comm))
    assert sorted(tmp_path.iterdir()) == before


def test_a_failed_check_on_rank_0_fails_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_model(tmp_path, Topology(1, 2))

    def refuse(*_: Any) -> list[str]:
        raise CheckpointError("a file cannot be read")

    monkeypatch.setattr(output, "find_diverged", refuse)
    found = World(2).run(lambda rank, comm: export_safetensors(index, str(tmp_path / "out"), comm))
    assert [str(each) for each in found] == ["[rank 0] a file cannot be read"] * 2


# -- memory, and loads by other libraries -----------------------------------------------------------------------------

PEAK = """
import sys
from deepspeed_ucp.cli.dispatch import main
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
small, large, out, *options = sys.argv[1:]
assert main(["export", small, out + "-small", *options, "-q"]) == 0
before = peak()
assert main(["export", large, out, *options, "-q"]) == 0
print("PEAK", peak() - before)
"""


MANY = (Param("a", (4_000, 1000)), *(Param(f"p{number}", (150, 1000)) for number in range(30)))
MEMORY = {
    "one large": (("--dtype", "fp32"), (Param("a", (15_000, 1000)), Param("b", (5_000, 1000))), 12),
    "cast": (("--dtype", "bf16"), (Param("a", (15_000, 1000)), Param("b", (5_000, 1000))), 12),
    "dcp": (("--to", "dcp"), MANY, 24),  # torch keeps the last chunk of each parameter
}
"""Options, parameters of 35 to 80 MB, and MiB beyond a window of 12 MiB."""


@pytest.mark.parametrize("case", MEMORY)
def test_memory_of_an_export_stays_within_the_window(tmp_path: Path, case: str) -> None:
    """It is measured after a small export in the same process."""
    options, params, more = MEMORY[case]
    states = {} if "dcp" in options else {"states": (), "step": None}
    paths = []
    for model in (Model((Param("a", (4, 10)),)), Model(params)):
        state, topology = random_state(model, 0, **states), Topology(3 if states else 2, 2)
        paths.append(str(write_checkpoint(tmp_path / str(len(paths)), model, state, topology)))
    command = [sys.executable, "-c", PEAK, *paths, str(tmp_path / "out"), "--window-mb", "12", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(re.findall(r"PEAK (\d+)", done.stdout)[0]) < (12 + more) << 20


@pytest.mark.parametrize("sharded", [False, True], ids=["one-file", "sharded"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_transformers_loads_an_export(tmp_path: Path, tied: bool, sharded: bool) -> None:
    from transformers import AutoModelForCausalLM

    model = make_gpt2(tmp_path / "hf", tied=tied)
    described, out = describe(model), tmp_path / "out"
    state = random_state(described, 1)
    index = open_model(tmp_path, Topology(2, 3), described, state)
    export_safetensors(index, str(out), like=str(tmp_path / "hf"), max_shard=4000 if sharded else 10**9)
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]), info
    model.load_state_dict({name: states["fp32"] for name, states in state.atoms.items()}, strict=not tied)
    tokens = torch.arange(10).view(1, 10)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("equal", [True, False], ids=["equal", "their own"])
def test_only_differing_copies_are_a_warning(equal: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two stages hold equal copies of a tied embedding, and separate position embeddings."""
    saved_run = draw_state(make_pipeline([["column"], ["row"]]), Topology(1, 2, pp=2))
    saved_run = saved_run.equalize() if equal else saved_run
    index = open_run(saved_run, tmp_path / "in")
    assert index.instances
    export_run(index, saved_run, tmp_path / "out", Comm())
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("held by several pipeline stages" in text for text in warned) != equal
    assert not any("word" in text for text in warned)
