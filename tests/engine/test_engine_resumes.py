"""Resumes between all ZeRO stages, precisions and data-parallel sizes, and of variants of engines.

Every kind of engine is a source and a target; `load/test_reshard.py` combines every kind of files with every kind of
buffers in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from packaging.version import Version

from deepspeed_ucp.testing.compare import compare
from deepspeed_ucp.testing.resume import LOSS_TOLERANCE
from tests.releases import DEEPSPEED, find_reason
from tests.support.covering import few
from tests.support.engines.cases import MIXED, SMALL, Case
from tests.support.engines.driver import STEPS, Engines, Outcome, Row, Saved, Source
from tests.support.engines.kinds import ON_CPU, SUMS_IN_FP32
from tests.support.engines.sequence import FLOATS, WAYS, Spread
from tests.support.engines.standins import Stood

STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "fp16")
EVERY_TENSOR = {"least": 38}
"""Number of masters, values and two moments of eight trained parameters, of frozen ones and buffers."""
Released = partial(Row, marks=[pytest.mark.releases])
Smoke = partial(Row, compared=EVERY_TENSOR, marks=[pytest.mark.engine_smoke])
DIRECT = {"direct": True}

# --- the matrix

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def check_cast(saved: Saved, outcome: Outcome) -> None:
    """Check that only rank 0 warns about another precision."""
    before, after = (DTYPES[each.kind.precision] for each in (saved, outcome))
    for rank, local in enumerate(outcome.ranks):
        found = local.list_messages("WARNING", "differs from the saved one: precision ")
        assert [f"precision {before} → {after}" in text for text in found] == [True] * (before != after and not rank)


CHOSEN = [
    (Case(0, 2), [Case(0, 3), Case(3, 3)]),
    (Case(1, 4, "bf16"), [Case(0, 4, "bf16"), Case(3, 3)]),
    (Case(2, 3, "fp16"), [Case(0, 2, "fp16")]),
    (Case(3, 2), [Case(2, 2), Case(3, 3), Case(0, 3), Case(1, 4)]),
]
EVERY = [Case(stage, world, precision) for stage, precision, world in product(STAGES, PRECISIONS, (2, 3, 4))]
# DeepSpeed 0.16 trains persistent parameters on uninitialised padding, so its losses differ from run to run.
SCATTERED = {"stage3_param_persistence_threshold": 0}
SMOKE = [
    (Case(1, 4, "bf16"), Case(3, 2, "bf16", zero=SCATTERED)),
    (Case(3, 4, "bf16", zero=SCATTERED), Case(2, 3, "bf16")),
    (Case(3, 2, zero=SCATTERED), Case(0, 3)),
    (Case(0, 2), Case(1, 3)),
]
"""A third loss is of the rate that the scheduler has set since. On newer releases the matrix has these pairs of
stages."""


def list_matrix() -> Iterator[Row]:
    matrix = partial(Released, options=MIXED, compared=EVERY_TENSOR, check=check_cast)
    for target, sources in CHOSEN:
        saved = [each for each in sources if not find_reason(f"saves/zero{each.stage}-{each.precision}")]
        yield matrix(target, saved, "matrix")
    for number, target in enumerate(EVERY):  # each source is the first of one engine
        yield matrix(target, [*EVERY[number:], *EVERY[:number]], "all", exhaustive=True)
    for source, target in SMOKE:
        yield Smoke(target, [Source(source, steps=(3, 3))], "smoke", MIXED, exhaustive=Version("0.17") <= DEEPSPEED)


# --- options on one side or on both

ROUND_ROBIN, ELASTIC = {"round_robin_gradients": True}, {"elastic_checkpoint": True}
CLIPPING = {"gradient_clipping": 0.1}
LEGACY = {"checkpoint": {"checkpoint_serialization": False}}  # files that are no zips
# Without "replica" DeepSpeed's writer factory fails below stage 3. With it all data-parallel ranks concurrently write
# different bytes to one file of model states, which may then be unreadable.
REPLICA = {"type": "python", "data_parallel": "replica"}
WRITER, DECOUPLED = ({"checkpoint": {"writer": {**REPLICA, **more}}} for more in ({}, {"decoupled": True}))


def small(size: int) -> dict[str, int]:
    return {"sub_group_size": size}


ODD = [
    Case(2, 3, zero=ROUND_ROBIN),
    Case(1, 4, zero=ROUND_ROBIN),
    Case(3, 3, zero=small(30)),
    Case(3, 2, "bf16", zero=small(9)),
    Case(2, 3, "bf16", zero=ON_CPU),
    Case(3, 3, zero=SCATTERED),
    Case(1, 3, "fp16", config={"fp16": {"enabled": True, "loss_scale": 64}}),
    Case(3, 3, config=LEGACY),
    Case(1, 3, "bf16", config=LEGACY),
    Case(1, 1, "bf16", config=WRITER),
    Case(3, 3, config=WRITER),
    Case(3, 2, "bf16", zero={**ON_CPU, "offload_param": {"device": "cpu"}, **SCATTERED}),
]


def list_odd() -> Iterator[Row]:
    """Yield saves before the first step, for a fresh and for a trained engine, and unusual saves and engines."""
    odd = partial(Released, name="odd", options=MIXED)
    unstepped = Source(Case(0, 3), steps=(0, 2))
    yield odd(Case(3, 2), [unstepped, *few(ODD, 5), unstepped])
    yield odd(Case(2, 2, zero=ROUND_ROBIN), [Case(1, 3), Case(2, 3, zero=ROUND_ROBIN)])
    yield odd(Case(3, 2, zero=small(1)), [Case(1, 3)], live={"zero_init": True})
    yield odd(Case(3, 3, "bf16", zero=SCATTERED).on(threads=1, window_mb=16), [Case(1, 2, "bf16")])
    yield odd(Case(1, 2, zero=ON_CPU).on(mode="direct"), [Case(1, 3)])
    # DeepSpeed's old elastic format has no param groups: live hyper-parameters are kept.
    yield Row(Case(3, 2), [Case(1, 3, zero=ELASTIC)], "elastic")
    more = partial(odd, exhaustive=True)
    persistent = {"stage3_param_persistence_threshold": 100000}
    yield more(Case(3, 3, "bf16", zero=persistent).on(verify="off"), [Case(1, 2, "bf16")])
    yield more(Case(3, 2, config=CLIPPING), [Case(1, 3, config=CLIPPING)])
    # The process of a decoupled writer reads the tensors after the save: the model must not change buffers meanwhile.
    yield Row(Case(2, 3), [Case(3, 2, config=DECOUPLED)], options=SMALL, exhaustive=True)


def fast(stage: int, world: int, unit: str, precision: str = "fp32", **more: object) -> Stood:
    """A save under names that DeepSpeed's load does not find; a rank of each unit or a whole machine writes a file."""
    writer = {"type": "fast", "data_parallel": unit, "io_buffer_size": 1 << 16, **more}
    return Stood(stage, world, precision, "fast", config={"checkpoint": {"writer": writer}})


FAST = [
    fast(1, 2, "replica"),
    fast(2, 3, "replica", "bf16"),
    fast(2, 2, "socket", io_multiplier=3),
    fast(1, 4, "machine"),
    fast(0, 2, "replica", "bf16"),
]

# --- optimizers

TENSORS = {"amsgrad": (0, 3), "sgd": (3, 0), "momentum": (2, 1), "lion": (1, 1), "adagrad_uniform": (0, 1)}
"""Stage of the target, and number of tensors of states."""
BF16_OPTIMIZER = Case(1, 3, "bf16", config=SUMS_IN_FP32)


def check_tensors(saved: Saved, outcome: Outcome, tensors: int) -> None:
    assert outcome.count == 4 * (2 + tensors)


def check_group_steps(saved: Saved, outcome: Outcome) -> None:
    """FusedAdam counts steps for a group: at stage 0 in fp32 only the last parameter's file has them."""
    found = compare(saved.state, outcome.state)[1]
    assert len(found) == 6 and all(text.endswith(f"state step: saved 0.0, loaded {STEPS[0]}.0") for text in found)
    assert outcome.losses == pytest.approx(saved.losses, rel=1e-4)


def list_optimizers() -> Iterator[Row]:
    for name, (stage, tensors) in TENSORS.items():
        source = Source(Case((stage + 2) % 4, 3), steps=(2, 2))  # amsgrad's states differ after two steps
        check = partial(check_tensors, tensors=tensors)
        yield Row(Case(stage, 2), [source], "optimizer", {**SMALL, "optimizer": name}, check=check)
    on_cpu = few([Case(1, 3, zero=ON_CPU), Case(0, 3)], 1)
    yield Row(Case(3, 2, zero=ON_CPU), on_cpu, options={"optimizer": "cpu_adam"})
    lion = {**SMALL, "optimizer": "cpu_lion"}
    yield Row(Case(3, 2, zero=ON_CPU), [Case(2, 3, zero=ON_CPU)], options=lion, exhaustive=True)
    # FusedAdam has a CPU build; stage 0 in 16 bits uses the flat FP16_Optimizer with it.
    fused = partial(Row, name="fused", options={"model": "mixed", "optimizer": "fused_adam"})
    yield fused(Case(0, 2, "bf16"), [Case(0, 3, "fp16"), Case(3, 3)])
    yield fused(Case(3, 2), [Source(Case(0, 3), check=check_group_steps)])
    yield fused(Case(3, 3, "bf16"), [Case(0, 2, "bf16")], exhaustive=True)
    # The same Adam in DeepSpeed's fused kernel and in torch's: FP16_Optimizer to FP16_UnfusedOptimizer.
    same, unfused = {**SMALL, "optimizer": "fused_adam"}, {"optimizer": "adam_like_fused"}
    yield Released(Case(0, 2, "fp16"), [Case(0, 2, "fp16")], "fused_to_unfused", same, unfused, compared=DIRECT)
    flat = partial(Released, name="bf16_optimizer", options=MIXED)
    yield flat(BF16_OPTIMIZER, [BF16_OPTIMIZER.but(world=4), Case(2, 2, "bf16")])
    yield flat(Case(3, 2, "bf16"), [BF16_OPTIMIZER], exhaustive=True)


# --- models, orders, features

LORA = {"model": "lora", "optimizer": "adamw_uniform"}
OVERFLOWING = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
HPZ = Case(3, 4, "bf16", zero={"zero_hpz_partition_size": 2})
PARTIAL = Case(3, 2, "bf16", zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "sub_group_size": 9})
AUTOCAST, LOW_AUTOCAST = (
    {"torch_autocast": {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": ["torch.nn.Linear"]}}
    for dtype in ("float16", "bfloat16")
)
CAST = [Case(0, 3, config=AUTOCAST), Case(1, 3, config=LOW_AUTOCAST), Case(3, 3, config=AUTOCAST)]


def check_quantized(saved: Saved, outcome: Outcome) -> None:
    """Check an engine with ZeRO++'s qwZ, whose gathers (here for the comparison, too) are in 8 bits; files are not."""
    assert all(", state value:" in text for text in compare(saved.state, outcome.state)[1])
    assert outcome.losses == pytest.approx(saved.losses, rel=0.05)


def list_variants() -> Iterator[Row]:
    yield Released(Case(3, 2, "bf16"), [Case(1, 3, "bf16")], "lora", LORA)
    yield Row(Case(3, 3), [Case(0, 4)], options={"model": "tiny"})  # fewer elements than ranks
    yield Row(Case(2, 4), [Case(3, 3), Case(1, 3)], options={"model": "tiny"}, exhaustive=True)
    empty, compiled = ({**SMALL, "model": model} for model in ("empty", "compiled"))  # stage 3 cannot train them
    yield Row(Case(0, 2), [Case(1, 3)], options=empty)
    yield Row(Case(2, 2), [Case(0, 3)], options=empty)
    yield Row(Case(1, 2), [Case(2, 3), Source(Case(3, 3), SMALL)], options=compiled)
    yield Row(Case(2, 2), [Source(Case(1, 3), {"model": "compiled"})], options=SMALL)
    # Matched by name, except from stage 0, which saves only positions; DeepSpeed's load would mix up the states.
    order = partial(Row, name="order", options=SMALL, compared=DIRECT)
    yield order(Case(0, 2), [Case(1, 3)], live={"reverse_groups": True})
    yield order(Case(3, 2), [Case(1, 3), Case(3, 2)], live={"model": "reordered"})
    # Steps that overflow are skipped and halve the loss scale; both numbers are restored.
    sources = [Source(Case(stage, 3, "fp16", config=OVERFLOWING), steps=(10, 2)) for stage in (0, 1, 2, 3)]
    yield Row(Case(3, 2, "fp16", config=OVERFLOWING), few(sources, 2), options=SMALL)
    hybrid = Case(3, 2, "bf16", config={"hybrid_engine": {"enabled": True}})  # on a CPU without inference kernels
    yield Row(hybrid, few([hybrid.but(stage=1), Case(3, 3)], 1), options=SMALL)
    # In the same topology DeepSpeed would restore masters from the 16-bit copies.
    copies = Case(1, 2, "bf16", zero={"load_from_fp32_weights": False})
    yield Row(copies, [copies], "copies", SMALL, compared=DIRECT)
    if find_spec("deepspeed.runtime.zenflow"):
        # ZeRO++'s hpZ keeps secondary copies of the partitions, which are stale in each load.
        yield Row(HPZ, [Case(1, 3, "bf16"), HPZ])
        yield Row(Case(2, 3, "bf16"), [HPZ], exhaustive=True)
        sources, options = [PARTIAL, PARTIAL.but(world=3), Case(1, 3, "bf16")], {**SMALL, "optimizer": "cpu_adam"}
        yield Row(PARTIAL, sources, options=options, exhaustive=True)  # a CPU offloads all of it
        # The weights are in fp32; the configuration of this run controls casts.
        cast = partial(Released, name="torch_autocast", compared={"tolerance": 0.05})
        yield cast(Case(3, 2, config=LOW_AUTOCAST), few(CAST, 1))
        yield cast(Case(0, 2, config=AUTOCAST), CAST, exhaustive=True)
        yield cast(Case(2, 2, "fp16"), CAST, exhaustive=True)
        target = Stood(3, 2, "fp16", "quantized", zero={"zero_quantized_weights": True})
        yield Row(target, [Source(Case(1, 3, "fp16"), check=check_quantized)], options={"model": "aligned"})
    if find_spec("deepspeed.io"):
        yield Row(Case(1, 2), [Source(each, steps=(3, 3)) for each in few(FAST, 2)], "fast", SMALL, compared=DIRECT)


# --- masters and moments in 16 bit, between each other and fp32; parameters of several dtypes


def keep(stage: int, world: int, precision: str, *, states: bool = False, offload: bool = True) -> Source:
    """Keep masters in 16 bits, and with `states` moments, too; otherwise DeepSpeed requires its CPUAdam."""
    section = {"enabled": True, f"{precision}_master_weights_and_grads": True}
    section |= {"bf16_optimizer_states": True} if states else {}
    section |= {"initial_scale_power": 8} if precision == "fp16" else {}
    optimizer = ("cpu_adam_16" if states else "cpu_adam") if offload else "adamw"
    case = Case(stage, world, precision, zero=ON_CPU if offload else {}, config={precision: section})
    return Source(case, {"optimizer": optimizer})


LOW = [
    keep(3, 2, "bf16", states=True, offload=False),
    keep(1, 3, "bf16", states=True, offload=False),
    keep(1, 2, "fp16"),
    keep(2, 2, "bf16", states=True),
    keep(3, 2, "bf16"),
]
WIDE = [
    Source(Case(2, 3)),
    Source(Case(1, 3, "bf16", zero=ON_CPU), {"optimizer": "cpu_adam"}),
    Source(Case(3, 3, "fp16", zero=ON_CPU), {"optimizer": "cpu_adam"}),
    Source(Case(0, 3, "bf16")),
]
"""With masters in fp32. From and into the first ones rows always run."""
HALF, TWO = {"model": "half"}, {**SMALL, "model": "two_dtypes"}
KEPT = {"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["running"]}}


def check_rounding(saved: Saved, outcome: Outcome) -> None:
    """Check that states have the dtype of the optimizer's states, and that the log names each rounded one."""
    precision = outcome.kind.precision
    moments = outcome.kind.config[precision].get("bf16_optimizer_states")
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    dtypes = {"fp32": low, **dict.fromkeys(("exp_avg", "exp_avg_sq"), low if moments else torch.float32)}
    trained = [each for each in outcome.state.parameters.values() if each.fp32 is not None]
    found = {(name, tensor.dtype) for each in trained for name, tensor in {**each.tensors, "fp32": each.fp32}.items()}
    assert found == set(dtypes.items())
    logged = {text.split()[0] for text in outcome.list_messages("WARNING", "is rounded")}
    if saved.kind == WIDE[0].kind:
        assert logged == {name for name, dtype in dtypes.items() if dtype != torch.float32}
    elif precision in saved.kind.config and saved.kind.config.items() <= outcome.kind.config.items():
        assert not logged


def list_lowered() -> Iterator[Row]:
    """Yield rows with low precision: 32 bits are rounded once; 16 bits are restored exactly, with equal losses."""
    low = partial(Row, options={"model": "mixed"})
    for number, target in enumerate(LOW):
        # DeepSpeed's load would cast wide moments to the dtype of the masters.
        compared = {} if "bf16_optimizer_states" in target.kind.config[target.kind.precision] else DIRECT
        row = partial(low, target.kind, live=target.options, compared=compared, check=check_rounding)
        yield row([*WIDE, *LOW] if number else [WIDE[0], LOW[1], target], "low", exhaustive=number > 0)
    yield low(WIDE[0].kind, [LOW[2], LOW[0]], "wide", live=WIDE[0].options)
    for target in WIDE[1:]:
        yield low(target.kind, LOW, "wide", live=target.options, exhaustive=True)
    gap = {"tolerance": LOSS_TOLERANCE["bf16"]}
    # A model in bf16 without a section of it in the ds_config.
    halves = [Source(Case(stage, 3 if stage == 1 else 2), HALF) for stage in STAGES]
    sources = few([*halves, Source(Case(1, 3, "bf16")), Source(Case(2, 3))], 2)
    yield Row(halves[3].kind, sources, "half", SMALL, HALF, compared=gap)
    # In one flat buffer parameters of several dtypes become fp32; ZeRO 3 refuses them.
    several = [Case(0, 2), Case(1, 3), Source(Case(3, 3, "bf16"), SMALL)]
    yield Row(Case(0, 2), several, options=TWO, compared=gap)
    yield Row(Case(1, 2), [Case(1, 2), Case(2, 3)], options={**TWO, "optimizer": "adamw_by_dtype"}, compared=gap)
    # DeepSpeed casts buffers that it does not keep in fp32 to the configured dtype.
    target = Case(3, 2, "bf16", config=KEPT)
    yield Row(target, [Case(1, 3, "bf16", config=KEPT), target])


# --- sequence parallelism


def check_samples(saved: Saved, _outcome: Outcome) -> None:
    path = next(saved.folder.glob("global_step*/*model_states.pt"))
    samples = torch.load(path, weights_only=False)["global_samples"]
    assert samples == STEPS[0] * Spread.batch
    assert isinstance(samples, float) == (saved.kind.mpu == "alst" and saved.kind.way in FLOATS)


def list_sequences(mpu: str, *targets: Spread, mark: Any) -> Iterator[Row]:
    """Yield rows of an mpu from every choice of batch sizes; the first target and plain data parallelism always run."""
    ways = [Spread(stage, mpu=mpu, way=way, sp=2) for stage in ((1, 3) if mpu == "alst" else (1,)) for way in WAYS]
    row = partial(Row, name=mpu, options={"scheduler": True}, check=check_samples, compared=EVERY_TENSOR, marks=[mark])
    for number, target in enumerate((targets[0], Spread(1, 3), *targets[1:])):
        yield row(target, few([*ways[1:], ways[0]], 1), exhaustive=number > 1)
    yield row(targets[0], [Spread(stage, 2, way="micro") for stage in (0, 1, 3)], exhaustive=True)


# With such an mpu stage 3 partitions parameters only over the data-parallel ranks.
ULYSSES = [Spread(1, mpu="megatron", way="micro", sp=2), Spread(2, mpu="megatron", way="all", sp=4)]
ALST = [
    Spread(1, mpu="alst", way="micro", sp=2),
    Spread(3, mpu="alst", way="micro-accumulation", sp=2),
    Spread(2, mpu="alst", way="train-micro", sp=4),
    Spread(3, precision="bf16", mpu="alst", way="micro", sp=4),
]
ROWS = [
    *list_matrix(),
    *list_odd(),
    *list_optimizers(),
    *list_variants(),
    *(list_lowered() if find_spec("deepspeed.runtime.keep_in_fp32") else ()),
    *list_sequences("megatron", *ULYSSES, mark=pytest.mark.engine_smoke),
    *(() if find_reason("to_alst") else list_sequences("alst", *ALST, mark=pytest.mark.releases)),
]


@pytest.mark.timeout(600)  # DeepSpeed compiles an operator at the first time
@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_resumes(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)
