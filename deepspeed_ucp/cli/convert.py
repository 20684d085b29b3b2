"""``ds_ucp convert``: a checkpoint becomes an atomic checkpoint on disk."""

from __future__ import annotations

import argparse

from .common import add_checkpoint_options, add_command, read_groups, read_rules
from .figures import format_bytes, format_duration
from .printing import OK, Progress, emit


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = add_command(
        commands,
        "convert",
        help="write a checkpoint as an atomic (universal) checkpoint",
        description="Write every parameter and optimizer state of a checkpoint as files of their own, whole, in the "
        "layout of DeepSpeed's universal checkpoints, with a manifest. Loading does not need it: "
        "engine.load_checkpoint reads normal checkpoints of any topology. It is for moving to another cluster, for "
        'DeepSpeed\'s own "load_universal", and for looking. A conversion that was stopped goes on where it was; the '
        "source is never changed.",
        examples="""ds_ucp convert checkpoints/
                    ds_ucp convert checkpoints/global_step1000 /fast/global_step1000_universal --workers 16
                    ds_ucp convert checkpoints/ --patterns megatron-gpt
                    mpirun -np 8 --map-by ppr:1:node ds_ucp convert checkpoints/
                    torchrun --nnodes 8 --nproc-per-node 1 --no-python ds_ucp convert checkpoints/""",
    )
    add_checkpoint_options(parser, "source", help="a folder that holds `latest`, or the folder of one tag")
    parser.add_argument(
        "destination", metavar="DST", nargs="?", help="folder to be made (default: the tag's folder + _universal)"
    )
    parser.add_argument(
        "--workers", type=int, default=0, metavar="N", help="threads per node (default: from its cores)"
    )
    parser.add_argument(
        "--window-mb", type=int, default=256, metavar="MB", help="memory per node for data on its way (default: 256)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace another atomic checkpoint at DST")
    parser.add_argument("--no-latest", action="store_true", help="leave latest_universal as it is")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare the source's bytes with the checksums stored with them"
    )


def run(options: argparse.Namespace) -> int:
    """Convert; collective under mpirun and torchrun."""
    from ..comm import join_launch
    from ..convert import ConvertOptions, convert_index, default_destination
    from ..errors import ConfigError
    from ..sources import open_checkpoint
    from ..sources.latest import find_checkpoint

    if options.workers < 0 or options.window_mb < 16:
        raise ConfigError("--workers must not be negative, --window-mb not below 16.")
    with join_launch() as comm:
        folder = ""
        with comm.together():
            folder = find_checkpoint(options.source)
            rules = read_rules(options)
            groups = read_groups(options.groups)
        index = open_checkpoint(folder, comm, groups=groups)
        report = convert_index(
            index,
            folder,
            options.destination or default_destination(folder),
            comm,
            ConvertOptions(
                workers=options.workers,
                window=options.window_mb << 20,
                verify=not options.no_verify,
                overwrite=options.overwrite,
                latest=not options.no_latest,
                bar=lambda total: Progress(options, total, "convert"),
            ),
            rules=rules,
        )
        if report.reused:
            text = f"{report.destination}: already there, made of the same checkpoint."
        else:
            rate = report.state_bytes / max(report.seconds, 1e-9)
            again = (
                f", {format_bytes(report.resumed_bytes)} of it by an earlier attempt" if report.resumed_bytes else ""
            )
            text = (
                f"{report.destination}: {report.atoms} atoms, {format_bytes(report.bytes_written)} in "
                f"{format_duration(report.seconds)} ({format_bytes(rate)}/s){again}."
            )
        emit(options, report.to_json(), [text])
    return OK
