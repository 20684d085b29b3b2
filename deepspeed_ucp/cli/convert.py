"""``ds_ucp convert``: writes a checkpoint as an atomic checkpoint."""

from __future__ import annotations

import argparse
import logging

from ..errors import pluralize
from . import common
from .printing import OK, emit, format_bytes, format_duration, list_fields

logger = logging.getLogger("deepspeed_ucp")


def add_parser(commands: common.Commands) -> None:
    """Add the parser of the command."""
    parser = common.add_command(
        commands,
        "convert",
        description="Write each parameter and optimizer state of a checkpoint as a separate file, in the layout of "
        "DeepSpeed's universal checkpoints, with a manifest. Loads do not need it: engine.load_checkpoint reads normal "
        'checkpoints of any topology. Use it to move to another cluster, for DeepSpeed\'s "load_universal", or to look '
        "into a checkpoint. The output appears when it is complete and verified; a killed conversion starts again. The "
        "source is never changed.",
        examples="""
            ds_ucp convert checkpoints/
            ds_ucp convert checkpoints/global_step1000 /fast/global_step1000_universal --workers 16
            ds_ucp convert checkpoints/ --patterns megatron-gpt
            mpirun -np 8 --map-by ppr:1:node ds_ucp convert checkpoints/
            torchrun --nnodes 8 --nproc-per-node 1 --no-python ds_ucp convert checkpoints/
        """,
        keys=common.REPORT_KEYS,
    )
    common.add_checkpoint(parser, "source", "SOURCE")
    text = "folder to be made (default: the tag's folder + _universal)"
    parser.add_argument("destination", metavar="DST", nargs="?", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace another atomic checkpoint at DST")
    parser.add_argument("--no-latest", action="store_true", help="leave latest_universal as it is")
    text = "do not compare the source's bytes with the checksums stored with them"
    parser.add_argument("--no-verify", action="store_true", help=text)
    common.add_shared_options(parser, checkpoint=True, patterns=True, window=256)


def run(options: argparse.Namespace) -> int:
    """Convert; collective under mpirun and torchrun."""
    from ..comm import join_launch
    from ..convert import ConvertOptions, convert_index, default_destination
    from ..tensor_parallel.rules import list_renames

    how = ConvertOptions(
        **common.read_work_options(options, least=16),
        verify=not options.no_verify,
        overwrite=options.overwrite,
        latest=not options.no_latest,
    )
    with join_launch() as comm:
        rules = comm.run(lambda: common.read_rules(options))
        if list_renames(rules) or any(rule.resizes for rule in rules):
            logger.warning("--patterns: rename and resize rules are for loads; the saved names and shapes are written")
        folder, index = common.open_index(options, options.source, options.also, comm)
        common.warn_unused_groups(options, index)
        destination = options.destination or default_destination(folder)
        report = convert_index(index, folder, destination, comm, how, rules=rules)
        text = f"{report.destination}: already there, made of the same checkpoint."
        if not report.reused:
            rate = format_bytes(report.state_bytes / max(report.seconds, 1e-9))
            written = f"{pluralize(report.tensors, 'tensor')}, {format_bytes(report.bytes_written)}"
            text = f"{report.destination}: {written} in {format_duration(report.seconds)} ({rate}/s)."
        emit(options, list_fields(report), [text])
    return OK
