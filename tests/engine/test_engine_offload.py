"""Engines with states on unusual devices: restored states, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.support.engines.cases import Case
from tests.support.engines.driver import Engines, Outcome, Row, Saved, Source, refuse
from tests.support.engines.kinds import ON_CPU
from tests.support.engines.standins import Stood

pytest.importorskip("deepspeed.runtime.zenflow", reason="DeepSpeed before ZenFlow and SuperOffload")
pytestmark = pytest.mark.timeout(600)  # DeepSpeed compiles an operator at the first time

WEIGHTS = {"load_optimizer_states": False}
CPU = {"device": "cpu"}
PARTIAL = Stood(3, 2, "bf16", "split", zero={"offload_optimizer": {**CPU, "ratio": 0.5}, "sub_group_size": 9})
SUPER = Stood(3, 2, "bf16", "superoffload", zero={**PARTIAL.zero, "offload_optimizer": {**CPU, "super_offload": True}})
ZENFLOW = {"topk_ratio": 0.3, "update_interval": 2, "select_strategy": "step", "select_interval": 4}


def check_weights(saved: Saved, outcome: Outcome) -> None:
    outcome.check(saved, direct=True, optimizer_states=False, losses=False)


def check_selected(saved: Saved, outcome: Outcome) -> None:
    """Check the weights, of which selected columns are newer than the masters."""
    values = {name: state.value for name, state in outcome.state.parameters.items()}
    before = saved.state.parameters
    assert all(torch.equal(state.value, values[name]) for name, state in before.items())
    assert any(each.fp32 is not None and not torch.equal(each.value, each.fp32.bfloat16()) for each in before.values())


def list_rows() -> Iterator[Row]:
    for kind, engine, words in (
        (PARTIAL, "offload_optimizer.ratio", "ratio 0.5 kept it"),
        (SUPER, "SuperOffload", "SuperOffload kept it"),
    ):
        # DeepSpeed neither saves nor loads the moments. Only the weights can be restored.
        row = partial(Row, options={"model": "plain", "optimizer": "cpu_adam"}, exhaustive=kind == SUPER)
        source = partial(Source, kind.on())
        yield row(kind, [source(check=refuse("UnsupportedError", engine))], "moments")
        refused, weights = source(check=refuse("MismatchError", words)), source(arguments=WEIGHTS, check=check_weights)
        yield row(Case(1, 3, "bf16"), [refused, weights], f"moments-{kind.stand_in}")
    for stage in (3, 2):
        # `engine.offload_states` leaves copies in the states of ZeRO 3, which are stale after the next step.
        row = partial(Row, options={"model": "plain", "optimizer": "fused_adam"}, exhaustive=stage == 2)
        kind = Stood(stage, 2, stand_in="offloaded")
        away, back = (partial(Source, kind, steps=steps) for steps in ((0, 2), (1, 2)))
        yield row(Case(1, 3), [away(), back()], f"offloaded-{stage}", compared={"direct": True})
        yield row(kind, [each(check=refuse("UnsupportedError", "reload_states()")) for each in (away, back)])
    # ZeRO++ saves quantized frozen weights without their scales.
    kind = Stood(3, 2, "fp16", "quantized", zero={"zero_quantized_nontrainable_weights": True})
    row = partial(Row, options={"model": "table"}, exhaustive=True)
    yield row(kind, [Source(Case(1, 3, "fp16"), check=refuse("UnsupportedError", "table: a quantized parameter"))])
    words = "table (module): a frozen parameter saved quantized"
    yield row(Case(2, 3, "fp16"), [Source(kind.on(), check=refuse("UnsupportedError", words))])
    for stage in (1, 2, 3):
        # On a CPU ZenFlow runs on one rank, under ZeRO 3 only before it selects columns.
        zero = {**ON_CPU, "zenflow": {**ZENFLOW, "full_warm_up_rounds": 10 * (stage == 3)}}
        config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "gradient_accumulation_steps": 2}
        kind = Stood(stage, 1, "bf16", "zenflow", zero=zero, config={**config, "train_batch_size": 120})
        row = partial(Row, options={"model": "a b c"}, exhaustive=stage > 1)
        source = partial(Source, kind.on(), steps=(5, 0))
        yield row(kind, [source(check=refuse("UnsupportedError", "runs ZenFlow"))])
        refused = refuse("UnsupportedError", "was saved by ZenFlow")
        weights = source(arguments=WEIGHTS, check=refused if stage == 3 else check_selected)
        yield row(Case(2, 3, "bf16"), [source(check=refused), weights], f"zenflow{stage}")


@pytest.mark.parametrize("row", [row.param for row in list_rows()])
def test_states_on_unusual_devices_are_restored_or_refused(
    row: Row, engines: Engines, subtests: pytest.Subtests
) -> None:
    if "zenflow" in str(row):
        engines.build("cpu_adam")
    engines.resume(row, subtests)
