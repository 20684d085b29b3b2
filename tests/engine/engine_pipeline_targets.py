"""Small pipelines whose layers are letters, and what the ranks of the pipeline tests do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANKS = 4
BATCH, MICRO = 12, 3
WIDTH = 6
STEPS = (2, 2)


@dataclass(frozen=True)
class Launch:
    """One launch on `RANKS` ranks.

    Attributes:
        layers: a letter each. E: an embedding-like layer with a weight that DeepSpeed ties and a shift that it does
            not; H: its head, which uses both; e and h: the same without the shift. B: a block, N: a norm, f: a
            function.
        pp: stages; the data-parallel degree is what they leave.
        stage: ZeRO stage.
        method: `partition_method`.
    """

    layers: str
    pp: int
    stage: int = 1
    precision: str = "fp32"
    method: str = "uniform"
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        method = "" if self.method == "uniform" else self.method.replace(":", "-")
        return "-".join(filter(None, [f"pp{self.pp}-zero{self.stage}-{self.precision}", method, *self.config]))

    @property
    def ds_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": MICRO,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # DeepSpeed's clipping cannot do without parameters
            "steps_per_print": 1000000,
        }
        if self.precision != "fp32":
            config[self.precision] = {"enabled": True}
        return {**config, **self.config}


@dataclass
class Local:
    """What one rank tells: its stage, its parameters' ordinals, its state, the losses after it, and who loaded it."""

    stage: int
    ordinals: dict[str, tuple[int, int, bool]]
    state: Any
    losses: list[float]
    direct: bool | None = None


def save(launch: Launch, folder: str) -> Local:
    """Train, save, go on."""
    return _with_clean_groups(_save, launch, folder)


def resume(launch: Launch, folder: str) -> Local:
    """Load into a model of other random weights, go on."""
    return _with_clean_groups(_resume, launch, folder)


def _save(launch: Launch, folder: str) -> Local:
    engine = make_engine(launch, launch.ds_config, seed=0)
    train(engine, STEPS[0])
    engine.save_checkpoint(folder)
    return _tell(engine)


def _resume(launch: Launch, folder: str) -> Local:
    engine = make_engine(launch, {**launch.ds_config, "checkpoint": {"universal": True}}, seed=1)
    engine.load_checkpoint(folder)
    return _tell(engine)


def _tell(engine: Any) -> Local:
    from deepspeed_ucp.targets import find_place, open_target
    from deepspeed_ucp.testing.capture import capture

    report = getattr(engine, "ucp_report", None)
    instances = open_target(engine).instances()
    ordinals = {name: (each.ordinal, each.count, each.tied) for name, each in instances.items()}
    state = capture(engine)
    direct = report.direct if report is not None else None
    return Local(find_place(engine).pp_rank, ordinals, state, train(engine, STEPS[1]), direct)


def make_engine(launch: Launch, ds_config: dict[str, Any], seed: int) -> Any:
    """A PipelineEngine; matrices with weight decay, the rest without."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(seed)
    module = PipelineModule(
        [make_layer(letter) for letter in launch.layers],
        num_stages=launch.pp,
        loss_fn=lambda found, wanted: (found.float() - wanted.float()).square().mean(),
        partition_method=launch.method,
    )
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 2e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=ds_config)
    return engine


def make_layer(letter: str) -> Any:
    """A layer specification by its letter."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from engine_pipeline_layers import Block, Embedding, head, scale
    from torch import nn

    if letter == "f":
        return scale
    if letter in "EH":
        return TiedLayerSpec("embed", Embedding, WIDTH, True, forward_fn=head if letter == "H" else None)
    if letter in "eh":
        return TiedLayerSpec("embed", Embedding, WIDTH, False, forward_fn=head if letter == "h" else None)
    return LayerSpec(Block, WIDTH) if letter == "B" else LayerSpec(nn.LayerNorm, WIDTH)


def train(engine: Any, steps: int) -> list[float]:
    """The loss of each step; every data-parallel rank takes its share of one global batch."""
    return [float(engine.train_batch(data_iter=_batches(engine))) for _ in range(steps)]


def _batches(engine: Any) -> Iterator[tuple[Any, Any]]:
    import torch

    from deepspeed_ucp.targets import find_place

    place = find_place(engine)
    generator = torch.Generator().manual_seed(1000 + engine.global_steps)
    share = torch.randn(BATCH, WIDTH, generator=generator).chunk(place.dp)[place.dp_rank]
    for micro in share.split(MICRO):
        yield micro.to(engine.get_data_types()[0]), micro.flip(1)


def _with_clean_groups(fn: Callable[..., Local], *args: Any) -> Local:
    """DeepSpeed keeps the pipeline's grid of a process in a global; the next engine's is another one."""
    from deepspeed.utils import groups

    try:
        return fn(*args)
    finally:
        groups.mpu = None


@dataclass
class Joined:
    """A whole pipeline: per parameter and buffer the state of every stage that holds it, in stage order."""

    parameters: dict[str, list[Any]]
    buffers: dict[str, list[Any]]
    counters: dict[str, int]


def join(locals_: Sequence[Local]) -> Joined:
    """All stages' states; the ranks of one stage must tell the same."""
    from deepspeed_ucp.testing.compare import compare

    stages: dict[int, Local] = {}
    for local in locals_:
        twin = stages.setdefault(local.stage, local)
        differences = compare(twin.state, local.state)[1]
        assert not differences, differences
    joined = Joined({}, {}, dict(locals_[0].state.counters))
    for stage in sorted(stages):
        for name, parameter in stages[stage].state.parameters.items():
            joined.parameters.setdefault(name, []).append(parameter)
        for name, buffer in stages[stage].state.buffers.items():
            joined.buffers.setdefault(name, []).append(buffer)
    return joined


def expect(saved: Joined, live: Joined) -> Joined:
    """What every stage of the live pipeline has to hold: its counterpart's copy; first from first, last from last.

    Of buffers DeepSpeed saves the first stage's only: layers with a `forward_fn` have no file.
    """
    return Joined(
        {name: _spread(saved.parameters[name], len(copies)) for name, copies in live.parameters.items()},
        {name: _spread(saved.buffers[name][:1], len(copies)) for name, copies in live.buffers.items()},
        saved.counters,
    )


def _spread(copies: list[Any], count: int) -> list[Any]:
    if count == len(copies):
        return copies
    assert min(count, len(copies)) <= 2, "stages in between have no counterpart"
    return [copies[0]] + [copies[-1]] * (count - 1)


def find_differences(saved: Joined, live: Joined, *, buffers: bool = True) -> list[str]:
    """Every difference, bit by bit, between what the stages should hold and what they hold."""
    from deepspeed_ucp.testing.capture import EngineState
    from deepspeed_ucp.testing.compare import compare

    wanted = expect(saved, live)

    def flat(joined: Joined) -> EngineState:
        parameters = {
            f"{name} of holder {k}": each for name, all_ in joined.parameters.items() for k, each in enumerate(all_)
        }
        found = {f"{name} of holder {k}": each for name, all_ in joined.buffers.items() for k, each in enumerate(all_)}
        return EngineState(parameters, found if buffers else {}, joined.counters, None, None)

    missing = [f"{name}: not in the pipeline that loads" for name in saved.parameters.keys() - live.parameters.keys()]
    return missing + compare(flat(wanted), flat(live))[1]


class Runs:
    """Saved runs by what they were made of."""

    def __init__(self, worlds: Any, root: Path):
        self.worlds, self.root = worlds, root
        self._saved: dict[str, list[Local]] = {}

    def folder(self, launch: Launch) -> str:
        """Where a run is saved."""
        return str(self.root / f"{launch.layers}-{launch}")

    def saved(self, launch: Launch) -> list[Local]:
        """The ranks of a run that has been saved."""
        key = self.folder(launch)
        if key not in self._saved:
            self._saved[key] = self.worlds.get(RANKS).run(save, launch, key)
        return self._saved[key]

    def resumed(self, source: Launch, target: Launch) -> list[Local]:
        """The ranks of a run that goes on from a saved one."""
        self.saved(source)
        return list(self.worlds.get(RANKS).run(resume, target, self.folder(source)))
