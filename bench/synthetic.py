"""A Megatron-style GPT of any size as names and shapes, and the headers that a checkpoint of it would have: no bytes.

The parameters, their names and how tensor parallelism cuts them are those of `examples/megatron_gpt`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from deepspeed_ucp.formats.deepspeed.headers import FileHeader, ModelHeader, OptimHeader, Piece, TensorStates
from deepspeed_ucp.model import count
from deepspeed_ucp.model.flat import FlatBuffer, join_parameters
from deepspeed_ucp.torchsave.records import FileRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Shape = tuple[int, ...]

TIED = "tied_modules.embed."
ALIGNMENT = 64  # bytes, of records in a torch.save file
STEP = 1000
HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "maximize": False, "foreach": None}


@dataclass(frozen=True)
class Parameter:
    """A parameter by its pipeline name; `dim` is the dimension that tensor parallelism cuts, None where it is whole.

    `layer` is the pipeline's layer, -1 and -2 for the tied embedding at its beginning and at its end.
    """

    layer: int
    name: str
    shape: Shape
    dim: int | None

    def local_shape(self, tp: int) -> Shape:
        return tuple(size // tp if axis == self.dim else size for axis, size in enumerate(self.shape))

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1


@dataclass(frozen=True)
class Sizes:
    """Depth, width, attention heads, vocabulary (with padding) and sequence length of a GPT."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 51200
    sequence: int = 2048

    @property
    def parameters(self) -> int:
        """Elements of all parameters, the tied embedding counted once."""
        return sum(count(p.shape) for stage in self.stages(1) for p in stage)

    def stages(self, pp: int) -> list[list[Parameter]]:
        """The parameters of each of `pp` pipeline stages; the embedding's at both ends, unless they are one stage.

        A stage's tied modules are in front of its layers, as `PipelineModule` registers them.
        """
        bounds = [self.layers * stage // pp for stage in range(pp + 1)]
        stages = [[p for i in range(low, high) for p in self._block(i)] for low, high in pairwise(bounds)]
        stages[0] = [*self._embedding(), *stages[0]]
        stages[-1] += self._norm(self.layers + 2, "")
        if pp > 1:
            stages[-1] = [*self._embedding(), *stages[-1]]
        return stages

    def _embedding(self) -> list[Parameter]:
        return [
            Parameter(-1, f"{TIED}word_embeddings.weight", (self.vocabulary, self.hidden), 0),
            Parameter(-1, f"{TIED}position_embeddings.weight", (self.sequence, self.hidden), None),
        ]

    def _norm(self, layer: int, name: str) -> list[Parameter]:
        return [Parameter(layer, f"{layer}.{name}{kind}", (self.hidden,), None) for kind in ("weight", "bias")]

    def _block(self, index: int) -> list[Parameter]:
        layer, hidden = index + 2, self.hidden
        columns = {"self_attention.query_key_value": 3 * hidden, "mlp.dense_h_to_4h": 4 * hidden}
        rows = {"self_attention.dense": hidden, "mlp.dense_4h_to_h": 4 * hidden}
        held = [*self._norm(layer, "input_layernorm."), *self._norm(layer, "post_attention_layernorm.")]
        for name, width in columns.items():
            held.append(Parameter(layer, f"{layer}.{name}.weight", (width, hidden), 0))
            held.append(Parameter(layer, f"{layer}.{name}.bias", (width,), 0))
        for name, width in rows.items():
            held.append(Parameter(layer, f"{layer}.{name}.weight", (hidden, width), 1))
            held.append(Parameter(layer, f"{layer}.{name}.bias", (hidden,), None))
        return held

    def client_state(self, tp: int, pp: int) -> dict[str, Any]:
        """Return the client state that Megatron-DeepSpeed saves, as the index keeps it."""
        whole = [
            r"\d+\.input_layernorm\..*",
            r"\d+\.post_attention_layernorm\..*",
            rf"{self.layers + 2}\.(weight|bias)",
        ]
        whole += [r"\d+\.self_attention\.dense\.bias", r"\d+\.mlp\.dense_4h_to_h\.bias"]
        whole += [r"tied_modules\.embed\.position_embeddings\.weight"]
        fused = {"weight": [[self.hidden] * 3, self.hidden], "bias": [[self.hidden] * 3]}
        return {
            "args": {
                "num_layers": self.layers,
                "hidden_size": self.hidden,
                "num_attention_heads": self.heads,
                "padded_vocab_size": self.vocabulary,
                "seq_length": self.sequence,
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
            },
            "checkpoint_version": 3.0,
            "iteration": STEP,
            "universal_checkpoint_info": {
                "universal_checkpoint_version": 0.4,
                "original_vocab_size": self.vocabulary,
                "vocabulary_parameter_patterns": [r"tied_modules\.embed\.word_embeddings\.weight"],
                "tp_replicated_parameter_patterns": whole,
                "parameter_with_row_parallelism_patterns": [
                    r"\d+\.self_attention\.dense\.weight",
                    r"\d+\.mlp\.dense_4h_to_h\.weight",
                ],
                "parameter_with_sub_params": [
                    {"patterns": [rf"\d+\.self_attention\.query_key_value\.{kind}"], "shape": shape, "partition_dim": 0}
                    for kind, shape in fused.items()
                ],
            },
        }


def split_groups(held: Iterable[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    """Megatron's two param groups: matrices, and what is not decayed."""
    held = list(held)
    return [p for p in held if p.is_matrix], [p for p in held if not p.is_matrix]


def pad_flat(numel: int, dp: int) -> int:
    """Elements of ZeRO-1's flat buffer of a group (stage_1_and_2.py: `nccl_start_alignment_factor` is 2)."""
    return -(-numel // (2 * dp)) * 2 * dp


@dataclass(frozen=True)
class Source:
    """A ZeRO-1 bf16 checkpoint of a GPT by `tp` × `pp` × `dp` ranks, as headers."""

    sizes: Sizes
    tp: int
    pp: int
    dp: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def headers(self) -> list[FileHeader]:
        """Of all files, the first rank's model states in front."""
        stages = self.sizes.stages(self.pp)
        found = [self._model(mp, stages[mp // self.tp]) for mp in range(self.pp * self.tp)]
        for mp in range(self.pp * self.tp):
            found += [self._optimizer(mp, rank, stages[mp // self.tp]) for rank in range(self.dp)]
        return found + list(self._layers(stages))

    @property
    def _config(self) -> dict[str, Any]:
        """The keys of a usual ds_config."""
        return {
            "train_batch_size": 2048,
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10,
            "zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 500_000_000},
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100_000, "warmup_num_steps": 2000}},
            "checkpoint": {"universal": True},
        }

    def _model(self, mp: int, held: list[Parameter]) -> FileHeader:
        groups = split_groups(held)
        counters = {"global_steps": STEP, "global_samples": STEP * 2048, "skipped_steps": 0}
        model = ModelHeader(
            module=None,
            nested=False,
            buffers=(),
            param_shapes=tuple(tuple((p.name, p.local_shape(self.tp)) for p in group) for group in groups),
            frozen_shapes={},
            frozen={},
            shared={},
            counters={**counters, "dp_world_size": self.dp, "mp_world_size": self.tp * self.pp},
            optim=None,
            degrees=(self.pp, self.tp),
            hints=self.sizes.client_state(self.tp, self.pp),
        )
        return FileHeader(f"mp_rank_{mp:02d}_model_states.pt", 20_000, model=model, config=self._config)

    def _optimizer(self, mp: int, rank: int, held: list[Parameter]) -> FileHeader:
        parts = []
        for group, decay in zip(split_groups(held), (0.1, 0.0), strict=True):
            shapes = [p.local_shape(self.tp) for p in group]
            partition = pad_flat(sum(map(count, shapes)), self.dp) // self.dp
            flat = join_parameters(0, [p.name for p in group], shapes, parts=self.dp, partition=partition)
            parts.append((flat, rank, {**HYPER, "weight_decay": decay}))
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
        return make_optimizer(name, parts, self._config)

    def _layers(self, stages: list[list[Parameter]]) -> Iterator[FileHeader]:
        layers: dict[int, list[Parameter]] = {}
        for p in (p for stage in stages for p in stage if p.layer >= 0):
            layers.setdefault(p.layer, []).append(p)
        layers[1] = layers[self.sizes.layers + 3] = [p for p in stages[0] if p.layer < 0]
        for layer, held in sorted(layers.items()):
            for tp in range(self.tp):
                yield self._layer(layer, tp, held)

    def _layer(self, layer: int, tp: int, held: list[Parameter]) -> FileHeader:
        names = [p.name.removeprefix(TIED).removeprefix(f"{layer}.") for p in held]
        tensors, end = make_tensors(zip(names, (p.local_shape(self.tp) for p in held), strict=True))
        return FileHeader(f"layer_{layer:02d}-model_{tp:02d}-model_states.pt", end, layer=tensors)


def make_optimizer(
    name: str, parts: Iterable[tuple[FlatBuffer, int, Mapping[str, Any]]], config: Mapping[str, Any]
) -> FileHeader:
    """Make the header of a rank's optimizer states at ZeRO 1.

    Args:
        parts: of each param group the flat buffer, the rank's part of it, and the hyper-parameters.
    """
    masters, states, slices, paddings, groups, counts = [], [], [], [], [], []
    end = 0
    for flat, part, hyper in parts:
        partition, total = flat.partition, flat.offsets[-1] + count(flat.shapes[-1])
        padding = min(max((part + 1) * partition - total, 0), partition)
        pieces = []
        for numel in (partition - padding, partition, partition):
            pieces.append(make_piece(end, (numel,), "float32"))
            end = align(end + 4 * numel)
        masters.append(pieces[0])
        states.append(TensorStates({"exp_avg": pieces[1], "exp_avg_sq": pieces[2]}, {"step": float(STEP)}))
        slices.append(tuple((cut.name, cut.offset, cut.numel) for cut in flat.cuts(part)))
        paddings.append(padding)
        groups.append(dict(hyper))
        counts.append(flat.parts)
    optim = OptimHeader(
        kind="zero12",
        stage=1,
        masters=tuple(masters),
        tensors=tuple(states),
        groups=tuple(groups),
        owners=tuple(range(len(groups))),
        slices=tuple(slices),
        partition_count=tuple(counts),
        paddings=tuple(paddings),
        clip_grad=1.0,
    )
    return FileHeader(name, end, optim=optim, config=dict(config))


def make_tensors(held: Iterable[tuple[str, Shape]]) -> tuple[dict[str, Piece], int]:
    """Lay 16-bit tensors out in a file; return them and its size."""
    tensors, end = {}, 0
    for name, shape in held:
        tensors[name] = make_piece(end, shape, "bfloat16")
        end = align(end + 2 * count(shape))
    return tensors, end


def make_piece(offset: int, shape: Shape, dtype: str) -> Piece:
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    return Piece(FileRecord(f"data/{offset}", offset, itemsize * count(shape), offset % 0xFFFF_FFFF), 0, shape, dtype)


def align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
