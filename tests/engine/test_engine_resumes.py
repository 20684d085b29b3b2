"""Resumes between all ZeRO stages, precisions and data-parallel sizes, and of variants of engines.

Every kind of engine is a source and a target. Most pairs are exhaustive, because `load/test_reshard.py` combines every
kind of files with every kind of buffers in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from tests.support.covering import cover, few, turns
from tests.support.engines.cases import MIXED, SMALL, Case
from tests.support.engines.driver import STEPS, Engines, Outcome, Row, Saved, Source
from tests.support.engines.kinds import ON_CPU, SUMS_IN_FP32, Kind
from tests.support.engines.sequence import FLOATS, WAYS, Spread
from tests.support.engines.standins import Stood

STAGES, PRECISIONS = (0, 1, 2, 3), ("fp32", "bf16", "fp16")
EVERY_TENSOR = {"least": 38}
"""Number of masters, values and two moments of eight trained parameters, of frozen ones and buffers."""
RELEASES = pytest.mark.releases
Mixed = partial(Row, options=MIXED, compared=EVERY_TENSOR, marks=[RELEASES])


def rotate(values: Sequence[Any], first: int) -> list[Any]:
    return [*values[first % len(values) :], *values[: first % len(values)]]


# --- the matrix

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def check_cast(saved: Saved, outcome: Outcome) -> None:
    """Check that only rank 0 warns about another precision."""
    before, after = (DTYPES[each.kind.precision] for each in (saved, outcome))
    for rank, local in enumerate(outcome.ranks):
        found = local.list_messages("WARNING", "differs from the saved one: precision ")
        assert [f"precision {before} → {after}" in text for text in found] == [True] * (before != after and not rank)


def size_of(stage: int, precision: str, turn: int = 0) -> int:
    """Return 2, 3 or 4 ranks, each with every stage and with every precision."""
    return (2, 3, 4)[(stage + PRECISIONS.index(precision) + turn) % 3]


def list_matrix() -> list[Row]:
    pairs, found = cover(STAGES, PRECISIONS, STAGES, PRECISIONS), []
    every = [Case(stage, world, precision) for stage, precision, world in product(STAGES, PRECISIONS, (2, 3, 4))]
    chosen = turns(STAGES, PRECISIONS, 1)
    for stage, precision in product(STAGES, PRECISIONS):
        sources = [
            Case(s, size_of(s, p, 1), p)
            for s, p, *to in pairs
            if to == [stage, precision] and not find_reason(f"saves/zero{s}-{p}")
        ]
        first = stage + PRECISIONS.index(precision)  # each source is the first of one engine
        target, is_more = Case(stage, size_of(stage, precision), precision), (stage, precision) not in chosen
        found.append(Mixed(target, rotate(sources, first), "matrix", check=check_cast, exhaustive=is_more))
        found += [
            Mixed(Case(stage, world, precision), rotate(every, 7 * stage + world), "all", exhaustive=True)
            for world in (2, 3, 4)
        ]
    return found


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
IS_OLDEST = Version("0.17") > DEEPSPEED

# --- options on one side or on both

ROUND_ROBIN = {"round_robin_gradients": True}
ALL_ON_CPU = {**ON_CPU, "offload_param": {"device": "cpu"}, **SCATTERED}
CLIPPING = {"gradient_clipping": 0.1}
LEGACY = {"checkpoint": {"checkpoint_serialization": False}}  # files that are no zips
# Without "replica" DeepSpeed's writer factory fails below stage 3. With it all data-parallel ranks concurrently write
# different bytes to one file of model states, which may then be unreadable.
REPLICA = {"type": "python", "data_parallel": "replica"}
WRITER, DECOUPLED = ({"checkpoint": {"writer": {**REPLICA, **more}}} for more in ({}, {"decoupled": True}))


def small(size: int) -> dict[str, int]:
    return {"sub_group_size": size}


ODD_SOURCES = [
    Case(2, 3, zero=ROUND_ROBIN),
    Case(1, 4, zero=ROUND_ROBIN),
    Case(3, 3, zero=small(30)),
    Case(3, 2, "bf16", zero=small(9)),
    Case(3, 3, zero=SCATTERED),
    Case(2, 3, "bf16", zero=ON_CPU),
    Case(3, 2, "bf16", zero=ALL_ON_CPU),
    Case(1, 3, "fp16", config={"fp16": {"enabled": True, "loss_scale": 64}}),
    Case(1, 3, "bf16", config=LEGACY),
    Case(3, 3, config=LEGACY),
    Case(1, 1, "bf16", config=WRITER),
    Case(3, 3, config=WRITER),
]
"""Each into an engine of every second stage; otherwise one of each kind into an engine of stage 3."""
ZERO_INIT = {"zero_init": True}
ODD_TARGETS: list[tuple[Case, list[Case], dict[str, Any]]] = [
    (Case(2, 2, zero=ROUND_ROBIN), [Case(1, 3), Case(2, 3, zero=ROUND_ROBIN)], {}),
    (Case(0, 3, "bf16"), [Case(2, 4, "bf16", zero=ROUND_ROBIN), Case(3, 2, "bf16", zero=small(9))], {}),
    (Case(3, 2, zero=small(1)), [Case(1, 3)], ZERO_INIT),
    (
        Case(3, 3, "bf16", zero={"stage3_param_persistence_threshold": 100000}).on(verify="off"),
        [Case(1, 2, "bf16")],
        {},
    ),
    (Case(3, 3, "bf16", zero=SCATTERED).on(threads=1, window_mb=16), [Case(1, 2, "bf16")], {}),
    (Case(1, 2, zero=ON_CPU).on(mode="direct"), [Case(1, 3)], {}),
    (Case(3, 2, "bf16", zero=ON_CPU).on(threads=3), [Case(3, 3, "bf16"), Case(1, 3, "bf16")], {}),
    (Case(3, 2, zero=small(9)), [Case(3, 2, zero=small(50)), Case(2, 2)], {}),
    (Case(3, 3, zero=ALL_ON_CPU), [Case(3, 2, zero=ALL_ON_CPU)], {}),
    (Case(3, 2, config=CLIPPING), [Case(1, 3, config=CLIPPING)], {}),
]


def list_odd() -> list[Row]:
    """List saves before the first step, for a fresh and for a trained engine, and other unusual saves."""
    found = []
    for stage in STAGES:
        unstepped = [Source(Case((3 * stage + k) % 4, 3), steps=(0, 2)) for k in range(1, 5)]
        sources = [*unstepped, *ODD_SOURCES[stage % 2 :: 2], unstepped[0]]
        found.append(Row(Case(stage, 2), sources, "odd", MIXED, marks=[RELEASES], exhaustive=True))
    unstepped = [Source(Case(0, 3), steps=(0, 2))]
    sources = [*unstepped, *(ODD_SOURCES[number] for number in (0, 2, 5, 9, 10)), *unstepped]
    found.append(Row(Case(3, 2), sources, "odd", MIXED, marks=[RELEASES]))
    for number, (target, saved, live) in enumerate(ODD_TARGETS):
        is_more = number not in (0, 2, 4, 5)
        found.append(Row(target, saved, "odd", MIXED, live, marks=[RELEASES], exhaustive=is_more))
    # DeepSpeed's old elastic format has no param groups: live hyper-parameters are kept.
    elastic = [Case(1, 3, zero={"elastic_checkpoint": True})]
    found.append(Row(Case(3, 2), elastic, "elastic"))
    found += [Row(target, elastic, "elastic", exhaustive=True) for target in (Case(1, 2), Case(0, 3))]
    # The process of a decoupled writer reads the tensors after the save: the model must not change buffers meanwhile.
    return [*found, Row(Case(2, 3), [Case(3, 2, config=DECOUPLED)], options=SMALL, exhaustive=True)]


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

TENSORS = {"amsgrad": 3, "sgd": 0, "momentum": 1, "lion": 1, "adagrad_uniform": 1}


def list_optimizers() -> list[Row]:
    found = []
    for name, stage in product(TENSORS, STAGES):

        def check(_saved: Saved, outcome: Outcome, name: str = name) -> None:
            assert outcome.count == 4 * (2 + TENSORS[name])

        sources, is_more = [Case((stage + turn) % 4, 3) for turn in (2, 3)], (name, stage) not in OPTIMIZERS
        options = {**SMALL, "optimizer": name}
        steps = [Source(each, steps=(2, 2)) for each in few(sources, 1)]  # amsgrad's states differ after two steps
        found.append(Row(Case(stage, 2), steps, "optimizer", options, check=check, exhaustive=is_more))
    return found


OPTIMIZERS = turns(list(TENSORS), STAGES, 1)
OFFLOADED = few([Case(1, 3, zero=ON_CPU), Case(0, 3)], 1)
FUSED = {"model": "mixed", "optimizer": "fused_adam"}
"""Has a CPU build; stage 0 in 16 bits uses the flat FP16_Optimizer with it."""
BF16_OPTIMIZER = Case(1, 3, "bf16", config=SUMS_IN_FP32)
INTO = [Case(stage, 2, precision) for stage in STAGES for precision in ("bf16", "fp32")]


def check_group_steps(saved: Saved, outcome: Outcome) -> None:
    """FusedAdam counts steps for a group: at stage 0 in fp32 only the last parameter's file has them."""
    found = compare(saved.state, outcome.state)[1]
    assert len(found) == 6 and all(text.endswith(f"state step: saved 0.0, loaded {STEPS[0]}.0") for text in found)
    assert outcome.losses == pytest.approx(saved.losses, rel=1e-4)


ADAMS = [
    *(
        Row(Case(stage, 2, zero=ON_CPU), OFFLOADED, options={"optimizer": "cpu_adam"}, exhaustive=stage < 3)
        for stage in (1, 2, 3)
    ),
    Row(Case(3, 2, zero=ON_CPU), [Case(2, 3, zero=ON_CPU)], "", {**SMALL, "optimizer": "cpu_lion"}, exhaustive=True),
    Row(Case(0, 3, "fp16"), [Case(2, 2, "bf16")], "fused", FUSED, exhaustive=True),
    Row(Case(0, 2, "bf16"), [Case(0, 3, "fp16"), Case(3, 3)], "fused", FUSED),
    Row(Case(3, 3, "bf16"), [Case(0, 2, "bf16")], "fused", FUSED, exhaustive=True),
    Row(Case(0, 3), [Case(0, 3, "fp16")], "fused", FUSED, exhaustive=True),
    *(
        Row(Case(stage, 2), [Source(Case(0, 3), check=check_group_steps)], "fused", FUSED, exhaustive=stage < 3)
        for stage in (1, 2, 3)
    ),
    # The same Adam in DeepSpeed's fused kernel and in torch's: FP16_Optimizer to FP16_UnfusedOptimizer.
    *(
        Row(target, [source], "fused_to_unfused", {**SMALL, "optimizer": "fused_adam"},
            {"optimizer": "adam_like_fused"}, compared={"direct": True}, marks=[RELEASES], exhaustive=target.world > 2)
        for source, target in ((Case(0, 2, "fp16"),) * 2, (Case(0, 2, "bf16"), Case(0, 3, "bf16")))
    ),
    Row(BF16_OPTIMIZER, few([BF16_OPTIMIZER.but(world=4), *(Case(stage, 2, p) for stage in STAGES
        for p in ("bf16", "fp16")), Case(1, 3, "bf16")], 2), "bf16_optimizer", MIXED, marks=[RELEASES]),
    *(
        Row(target, [BF16_OPTIMIZER, BF16_OPTIMIZER.but(world=4)], "bf16_optimizer", MIXED, marks=[RELEASES],
            exhaustive=True)
        for number, target in enumerate(INTO)
    ),
]  # fmt: skip

# --- models, orders, features

LORA = {"model": "lora", "optimizer": "adamw_uniform"}
OVERFLOWING = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
HYBRID = {"hybrid_engine": {"enabled": True}}
COPIES, DIRECT = {"load_from_fp32_weights": False}, {"direct": True}
HPZ = Case(3, 4, "bf16", zero={"zero_hpz_partition_size": 2})
PARTIAL = Case(3, 2, "bf16", zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "sub_group_size": 9})
AUTOCAST = {
    dtype: {"torch_autocast": {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": ["torch.nn.Linear"]}}
    for dtype in ("float16", "bfloat16")
}
CAST = [Case(stage, 3, config=AUTOCAST[dtype]) for stage, dtype in ((0, "float16"), (1, "bfloat16"), (3, "float16"))]
CASTING = [
    Case(3, 2, config=AUTOCAST["bfloat16"]),
    Case(0, 2, config=AUTOCAST["float16"]),
    Case(1, 2),
    Case(2, 2, "fp16"),
]


def check_quantized(saved: Saved, outcome: Outcome) -> None:
    """Check an engine with ZeRO++'s qwZ, whose gathers (here for the comparison, too) are in 8 bits; files are not."""
    assert all(", state value:" in text for text in compare(saved.state, outcome.state)[1])
    assert outcome.losses == pytest.approx(saved.losses, rel=0.05)


def list_variants() -> list[Row]:
    sources: list[Any] = few([Case(stage, 3, "bf16") for stage in (1, 3, 0)], 1)
    lora = partial(Row, sources=sources, name="lora", options=LORA, marks=[RELEASES])
    found = [lora(Case(stage, 2, "bf16"), exhaustive=stage != 3) for stage in STAGES]
    for stage, world in product((1, 2, 3), (2, 3, 4)):  # fewer elements than ranks
        sources = [Case(other, 4 if world < 4 else 2 + other % 2) for other in STAGES if other != stage]
        is_more = (stage, world) != (3, 3)
        found.append(Row(Case(stage, world), few(sources, 1), options={"model": "tiny"}, exhaustive=is_more))
    for model, stage in product(("empty", "compiled"), (0, 1, 2)):  # stage 3 cannot train them
        plain = [Source(Case(3, 3), SMALL)] * (model == "compiled")
        is_more = (model, stage) not in turns(["empty", "compiled"], [0, 1, 2], 1)
        options = {**SMALL, "model": model}
        found.append(Row(Case(stage, 2), [Case((stage + 1) % 3, 3), *plain], "", options, exhaustive=is_more))
    found.append(Row(Case(2, 2), [Source(Case(1, 3), {"model": "compiled"})], options=SMALL))
    orders: list[dict[str, Any]] = [{"reverse_groups": True}, {"model": "reordered"}]
    for order, stage in product(range(2), STAGES):
        # Matched by name, except from stage 0, which saves only positions; DeepSpeed's load would mix up the states.
        sources, is_more = (
            [Case(stage % 3 + 1, 3)] + [Case(stage, 2)] * (stage > 0),
            (order, stage) not in ((0, 0), (1, 3)),
        )
        row = partial(Row, Case(stage, 2), sources, f"order{order}", SMALL, orders[order], exhaustive=is_more)
        found.append(row(compared={"direct": True}))
    for stage in STAGES:  # steps that overflow are skipped and halve the loss scale; both numbers are restored
        sources = [
            Source(Case(other, 3, "fp16", config=OVERFLOWING), steps=(10, 2)) for other in rotate(STAGES, stage + 1)
        ]
        target = Case(stage, 2, "fp16", config=OVERFLOWING)
        found.append(Row(target, few(sources, 2), options=SMALL, exhaustive=stage < 3))
    hybrid = [Case(1, 2, "bf16", config=HYBRID), Case(3, 3)]  # on a CPU without inference kernels
    found.append(Row(Case(3, 2, "bf16", config=HYBRID), few(hybrid, 1), options=SMALL))
    # In the same topology DeepSpeed would restore masters from the 16-bit copies.
    for config in ({}, SUMS_IN_FP32):
        case = Case(1, 2, "bf16", zero=COPIES, config=config)
        found.append(Row(case, [case], "copies", SMALL, compared={"direct": True}, exhaustive=bool(config)))
    if find_spec("deepspeed.runtime.zenflow"):
        # ZeRO++'s hpZ keeps secondary copies of the partitions, which are stale in each load.
        found += [Row(HPZ, [Case(1, 3, "bf16"), HPZ])]
        found += [Row(Case(2, 3, "bf16"), [HPZ], exhaustive=True)]
        options = {**SMALL, "optimizer": "cpu_adam"}  # a CPU offloads all of it
        sources = [PARTIAL, PARTIAL.but(world=3), Case(1, 3, "bf16")]
        found += [Row(PARTIAL, sources, options=options, exhaustive=True)]
        # The weights are in fp32; the configuration of this run controls casts.
        gap = {"tolerance": 0.05}
        found += [
            Row(target, few(CAST, 1), "torch_autocast", compared=gap, marks=[RELEASES], exhaustive=number > 0)
            for number, target in enumerate(CASTING)
        ]
        target = Stood(3, 2, "fp16", "quantized", zero={"zero_quantized_weights": True})
        found.append(Row(target, [Source(Case(1, 3, "fp16"), check=check_quantized)], options={"model": "aligned"}))
    if find_spec("deepspeed.io"):
        found.append(
            Row(Case(1, 2), [Source(each, steps=(3, 3)) for each in few(FAST, 2)], "fast", SMALL, compared=DIRECT)
        )
    return found


# --- masters and moments in 16 bit, between each other and fp32; parameters of several dtypes


def keep(stage: int, world: int, precision: str, *, states: bool = False, offload: bool = True) -> Source:
    """Keep masters in 16 bits, and with `states` moments, too; otherwise DeepSpeed requires its CPUAdam."""
    section = {"enabled": True, f"{precision}_master_weights_and_grads": True}
    section |= {"bf16_optimizer_states": True} if states else {}
    section |= {"initial_scale_power": 8} if precision == "fp16" else {}
    optimizer = ("cpu_adam_16" if states else "cpu_adam") if offload else "adamw"
    case = Case(stage, world, precision, zero=ON_CPU if offload else {}, config={precision: section})
    return Source(case, {"optimizer": optimizer})


def list_low(stage: int, world: int) -> list[Source]:
    return [
        keep(stage, world, "bf16"),
        keep(stage, world, "bf16", states=True),
        keep(stage, world, "bf16", states=True, offload=False),
        keep(stage, world, "fp16"),
    ]


WIDE = [
    Source(Case(1, 3, "bf16", zero=ON_CPU), {"optimizer": "cpu_adam"}),
    Source(Case(3, 3, "fp16", zero=ON_CPU), {"optimizer": "cpu_adam"}),
    Source(Case(0, 3, "bf16")),
    Source(Case(2, 3)),
]
"""With masters in fp32."""
LOW = [each for stage in (1, 2, 3) for each in list_low(stage, 2)]
LOWEST = [LOW[5], LOW[10]]
"""Both kinds of moments in 16 bits, at two stages; only the second target always runs."""
HALF, TWO = {"model": "half"}, {**SMALL, "model": "two_dtypes"}
OWN_HALF = [Source(Case(stage, 3 if stage == 1 else 2), HALF) for stage in STAGES]
"""A model in bf16 without a section of it in the ds_config."""
BY_DTYPE = {**TWO, "optimizer": "adamw_by_dtype"}
KEPT = {"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["running"]}}


def check_rounding(saved: Saved, outcome: Outcome) -> None:
    """Check that states have the dtype of the optimizer's states, and that the log names each rounded one."""
    precision, moments = (
        outcome.kind.precision,
        outcome.kind.config[outcome.kind.precision].get("bf16_optimizer_states"),
    )
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    dtypes = {"fp32": low, **dict.fromkeys(("exp_avg", "exp_avg_sq"), low if moments else torch.float32)}
    trained = [each for each in outcome.state.parameters.values() if each.fp32 is not None]
    found = {(name, tensor.dtype) for each in trained for name, tensor in {**each.tensors, "fp32": each.fp32}.items()}
    assert found == set(dtypes.items())
    logged = {text.split()[0] for text in outcome.list_messages("WARNING", "is rounded")}
    if saved.kind == WIDE[3].kind:
        assert logged == {name for name, dtype in dtypes.items() if dtype != torch.float32}
    elif precision in saved.kind.config and saved.kind.config.items() <= outcome.kind.config.items():
        assert not logged


def list_lowered() -> list[Row]:
    """List rows with low precision: 32 bits are rounded once; 16 bits are restored exactly, with equal losses."""
    low, found = partial(Row, options={"model": "mixed"}), []
    for target in LOW:
        others, is_more = list_low(1 + target.kind.stage % 3, 3), target != LOWEST[1]
        sources = [*WIDE, *others, target] if is_more else [WIDE[3], others[2], target]
        # DeepSpeed's load would cast wide moments to the dtype of the masters.
        compared = {} if "bf16_optimizer_states" in target.kind.config[target.kind.precision] else DIRECT
        found.append(
            low(target.kind, sources, "low", live=target.options, compared=compared, check=check_rounding,
                exhaustive=is_more)
        )  # fmt: skip
    found.append(low(WIDE[3].kind, [LOW[3], LOWEST[1]], "wide", live=WIDE[3].options))
    found += [low(target.kind, LOW, "wide", live=target.options, exhaustive=True) for target in WIDE[:3]]
    gap = {"tolerance": LOSS_TOLERANCE["bf16"]}
    for number, target in enumerate(OWN_HALF):
        sources = [*OWN_HALF, Source(Case(1, 3, "bf16")), Source(Case(2, 3))]
        found.append(Row(target.kind, few(sources, 2), "half", SMALL, HALF, compared=gap, exhaustive=number < 3))
    # In one flat buffer parameters of several dtypes become fp32; ZeRO 3 refuses them.
    several = [Case(0, 2), Case(1, 3), Source(Case(3, 3, "bf16"), SMALL)]
    found += [Row(Case(0, 2), several, options=TWO, compared=gap)]
    found += [Row(Case(1, 2), [Case(1, 2), Case(2, 3)], options=BY_DTYPE, compared=gap)]
    # DeepSpeed casts buffers that it does not keep in fp32 to the configured dtype.
    target = Case(3, 2, "bf16", config=KEPT)
    return [*found, Row(target, [Case(1, 3, "bf16", config=KEPT), target])]


# --- sequence parallelism


def list_ways(mpu: str, stages: Sequence[int], precision: str = "fp32") -> list[Kind]:
    return [Spread(stage, precision=precision, mpu=mpu, way=way, sp=2) for stage in stages for way in WAYS]


def check_samples(saved: Saved, _outcome: Outcome) -> None:
    path = next(saved.folder.glob("global_step*/*model_states.pt"))
    samples = torch.load(path, weights_only=False)["global_samples"]
    assert samples == STEPS[0] * Spread.batch
    assert isinstance(samples, float) == (saved.kind.mpu == "alst" and saved.kind.way in FLOATS)


ALST = [
    Spread(1, mpu="alst", way="micro", sp=2),
    Spread(3, mpu="alst", way="micro-accumulation", sp=2),
    Spread(2, mpu="alst", way="train-micro", sp=4),
    Spread(3, mpu="alst", sp=4),
    Spread(1, 3),
]
ULYSSES = [Spread(1, mpu="megatron", way="micro", sp=2), Spread(2, mpu="megatron", way="all", sp=4), Spread(1, 3)]
"""Below stage 3. With such an mpu stage 3 partitions parameters only over the data-parallel ranks."""
FROM = [list_ways("alst", (1, 3)), list_ways("megatron", (1,))]
IN_BF16 = Spread(3, precision="bf16", mpu="alst", way="micro", sp=4)
Sequence_ = partial(Row, options={"scheduler": True}, check=check_samples, compared=EVERY_TENSOR)
ULYSSES_ROWS = [
    Sequence_(each, few(rotate(FROM[1], 1), 1), "ulysses", marks=[pytest.mark.engine_smoke], exhaustive=number == 1)
    for number, each in enumerate(ULYSSES)
]
ALST_ROWS = [
    *(
        Sequence_(each, few(rotate(FROM[0], 1), 1), "alst", marks=[RELEASES], exhaustive=number not in (0, 4))
        for number, each in enumerate(ALST)
    ),
    Sequence_(IN_BF16, list_ways("alst", (2,), "bf16"), "alst", marks=[RELEASES], exhaustive=True),
    Sequence_(ALST[0], [Spread(stage, 2, way="micro") for stage in (0, 1, 3)], "to_alst", exhaustive=True),
]

ROWS = [
    *list_matrix(),
    *(Row(to, [Source(kind, steps=(3, 3))], "smoke", MIXED, compared=EVERY_TENSOR, marks=[pytest.mark.engine_smoke],
          exhaustive=not IS_OLDEST) for kind, to in SMOKE),
    *list_odd(),
    *list_optimizers(),
    *ADAMS,
    *list_variants(),
    *(list_lowered() if find_spec("deepspeed.runtime.keep_in_fp32") else ()),
    *ULYSSES_ROWS,
    *(() if find_reason("to_alst") else ALST_ROWS),
]  # fmt: skip


@pytest.mark.timeout(600)  # DeepSpeed compiles an operator at the first time
@pytest.mark.parametrize("row", [row.param for row in ROWS])
def test_resumes(row: Row, engines: Engines, subtests: pytest.Subtests) -> None:
    engines.resume(row, subtests)
