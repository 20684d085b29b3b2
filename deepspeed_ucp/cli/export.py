"""``ds_ucp export``: write weights (and optimizer state) for other libraries."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from ..errors import ConfigError, pluralize
from ..io.paths import join_path
from . import common
from .printing import OK, emit, format_bytes, format_count, format_duration, list_fields

if TYPE_CHECKING:
    from ..comm import Comm
    from ..export.tensors import ExportOptions
    from ..model.index import AtomicIndex
    from ..stream.report import OutputReport

DTYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp64": "float64",
    "fp8-e4m3": "float8_e4m3fn",
    "fp8-e5m2": "float8_e5m2",
    "stored": None,
}

_parse_size = common.make_quantity_type(
    {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30},
    "a size such as 500MB, 5GB or 2GiB",
    whole=True,
)


def add_parser(commands: common.Commands) -> None:
    """Add the parser of the command."""
    parser = common.add_command(
        commands,
        "export",
        description="Write a checkpoint's consolidated weights for Hugging Face (safetensors), or weights "
        "and optimizer state for torch.distributed.checkpoint (dcp), which FSDP2, Accelerate, the Trainer and "
        "torchtitan load. Weights are read from the fp32 masters in the files of all ranks, with bounded memory; every "
        "byte is compared with its checksum from training. OUT is a new folder; it appears when it is complete.",
        examples=r"""
            ds_ucp export checkpoints/ weights/ --dtype bf16
            ds_ucp export checkpoints/global_step1000 weights/ --like my-model/ --max-shard-size 2GB
            ds_ucp export out/checkpoint-300/ adapter/ --adapter
            ds_ucp export checkpoints/ weights/ --rename '(?P<n>\d+)\.(?P<rest>.*)=h.{n-2}.{rest}'
            ds_ucp export checkpoints/ step-1000/ --to dcp --layout torchtitan
            ds_ucp export out/checkpoint-300/ fsdp/checkpoint-300/ --to dcp --layout accelerate
            mpirun -np 8 --map-by ppr:1:node ds_ucp export checkpoints/ weights/
        """,
        keys=common.REPORT_KEYS,
    )
    common.add_checkpoint(parser)
    parser.add_argument("out", metavar="OUT", help="folder to create")
    text = "format: Hugging Face (safetensors), or torch.distributed.checkpoint (default: hf)"
    parser.add_argument("--to", choices=("hf", "dcp"), default="hf", help=text)
    text = "element type of floating weights and buffers; `stored` keeps that of each tensor (default: fp32)"
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help=text)
    text = "hf: bytes per file, such as 500MB or 2GiB (default: 5GB)"
    parser.add_argument("--max-shard-size", type=_parse_size, metavar="SIZE", help=text)
    text = (
        "hf: a model (folder, or id of a cached model of the hub) with the same names and shapes; its config and "
        "tokenizer are copied into OUT"
    )
    parser.add_argument("--like", metavar="MODEL", help=text)
    parser.add_argument("--adapter", action="store_true", help="hf: write only an adapter, in PEFT's format")
    parser.add_argument("--merge", action="store_true", help=argparse.SUPPRESS)  # refused by `_check_options`
    parser.add_argument("--adapter-name", metavar="NAME", help="name of the adapter (default: default)")
    text = "adapter_config.json, or its folder (default: the folder of the checkpoint, where trainers put it)"
    parser.add_argument("--adapter-config", metavar="PATH", help=text)
    text = (
        "drop or copy tensors that are tied to another one (default: drop in safetensors, as save_pretrained does; "
        "copy in dcp, as in a model's state dict)"
    )
    parser.add_argument("--tied", choices=("drop", "copy"), help=text)
    text = (
        "new name for parameters whose full saved name matches; {group} and {group-2} insert named groups. Can be "
        "repeated, the first match counts; applied before the renames in --patterns"
    )
    parser.add_argument("--rename", metavar="REGEX=NAME", action="append", default=[], help=text)
    parser.add_argument("--strip-prefix", default="", metavar="TEXT", help="remove the prefix TEXT from names")
    text = "keep the rows that pad a vocabulary (default: remove them if the patterns give its size)"
    parser.add_argument("--keep-padding", action="store_true", help=text)
    text = "exclude parameters that the saved run did not train, but not buffers (as in zero_to_fp32.py)"
    parser.add_argument("--exclude-frozen-parameters", action="store_true", help=text)
    parser.add_argument("--weights-only", action="store_true", help="dcp: exclude the optimizer")
    text = (
        "dcp: keys as from get_state_dict (torch), with flatten_optimizer_state_dict (flattened), of torchtitan, or "
        "folders of Accelerate and the Trainer, with their other files from the checkpoint's folder (default: torch)"
    )
    parser.add_argument("--layout", choices=("torch", "flattened", "torchtitan", "accelerate"), help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export at OUT")
    common.add_shared_options(parser, checkpoint=True, patterns=True, window=256)


def run(options: argparse.Namespace) -> int:
    """Export; collective under mpirun and torchrun."""
    from ..comm import join_launch
    from ..formats.foreign.names import CONFIG
    from ..io.store import exists

    _check_options(options)
    with join_launch() as comm:
        only_weights = options.to == "hf" or options.weights_only
        _, index = common.open_index(options, options.checkpoint, options.also, comm, weights_only=only_weights)
        common.warn_unused_groups(options, index)
        report = _export(options, index, comm)
        tensors, files = pluralize(report.tensors, "tensor"), pluralize(len(report.files), "file")
        rate = format_bytes(report.bytes_read / max(report.seconds, 1e-9))
        lines = [
            f"{report.destination}: {tensors} ({format_count(report.parameters)} parameters, "
            f"{'/'.join(report.dtypes)}), {format_bytes(report.bytes_written)} in {files}, in "
            f"{format_duration(report.seconds)} ({rate}/s read)."
        ]
        if options.to == "hf" and not (options.adapter or exists(join_path(report.destination, CONFIG))):
            hint = "export with --like MODEL, or copy it and the tokenizer's files."
            lines.append(f"from_pretrained needs a {CONFIG} there: {hint}")
        emit(options, list_fields(report), lines)
    return OK


def _check_options(options: argparse.Namespace) -> None:
    of_others = {"hf": ["weights_only", "layout"], "dcp": ["like", "adapter", "max_shard_size"]}
    if options.merge:
        raise ConfigError("--merge: export with --adapter, then merge the adapter with PEFT's merge_and_unload.")
    if not options.adapter and (options.adapter_name or options.adapter_config):
        raise ConfigError("--adapter-name and --adapter-config need --adapter.")
    if options.adapter and options.like:
        raise ConfigError("--like needs a full model, but --adapter writes only an adapter. Remove one of them.")
    given = [f"--{name.replace('_', '-')}" for name in of_others[options.to] if getattr(options, name)]
    if given:
        raise ConfigError(f"--to {options.to} has no {', '.join(given)}.")


def _export(options: argparse.Namespace, index: AtomicIndex, comm: Comm) -> OutputReport:
    rules = comm.run(lambda: common.read_rules(options))
    how = comm.run(lambda: _read_options(options, os.path.dirname(index.state_file)))
    if options.to == "hf":
        from ..export.like import find_model
        from ..export.safetensors import MAX_SHARD, export_safetensors

        like = comm.run(lambda: options.like and find_model(options.like))
        most = options.max_shard_size or MAX_SHARD
        return export_safetensors(index, options.out, comm, how, rules=rules, max_shard=most, like=like)
    from ..export.dcp import export_dcp

    layout = options.layout or "torch"
    return export_dcp(index, options.out, comm, how, rules=rules, weights_only=options.weights_only, layout=layout)


def _read_options(options: argparse.Namespace, folder: str) -> ExportOptions:
    from ..export.tensors import ExportOptions
    from ..formats.foreign.adapter import read_config
    from ..tensor_parallel.rename import parse_renames

    pairs = [text.rpartition("=") for text in options.rename]
    if invalid := next(("".join(pair) for pair in pairs if not all(pair[:2])), None):
        raise ConfigError(f"--rename {invalid!r}: REGEX=NAME is needed, such as 'model\\.(?P<rest>.*)={{rest}}'.")
    return ExportOptions(
        dtype=DTYPES[options.dtype],
        tied=options.tied,
        keep_padding=options.keep_padding,
        frozen=not options.exclude_frozen_parameters,
        strip_prefix=options.strip_prefix,
        renames=parse_renames([{"from": regex, "to": name} for regex, _, name in pairs]),
        overwrite=options.overwrite,
        adapter=(options.adapter_name or "default") if options.adapter else "",
        adapter_config=read_config(options.adapter_config, folder) if options.adapter else {},
        **common.read_work_options(options, least=8),
    )
