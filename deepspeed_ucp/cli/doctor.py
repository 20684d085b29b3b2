"""``ds_ucp doctor``: one file that tells who is to find a fault what there is, without secrets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import site
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from ..errors import ConfigError, StorageError, UcpError, escape
from ..secrets import hide_text, hide_values
from ..version import __version__
from .common import Commands, add_checkpoint_options, add_command
from .inspect import look_at, opens
from .printing import FAULT, OK, emit, find_rank, format_bytes, to_json

FILE = "ds_ucp_doctor.txt"
TITLE = "# ds_ucp doctor"

PACKAGES = (
    "deepspeed", "torch", "numpy", "transformers", "accelerate", "peft", "lightning", "pytorch-lightning", "torchdata",
    "fsspec", "s3fs", "gcsfs", "adlfs", "pydantic", "isal", "google-re2", "ml_dtypes", "psutil", "mpi4py",
)  # fmt: skip
ENVIRONMENT = (
    "DEEPSPEED_UCP", "DEEPSPEED_UCP_TEMPLATE",
    "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TORCH_EXTENSIONS_DIR", "TMPDIR",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NNODES", "SLURM_NTASKS",
    "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "FSSPEC_S3_ENDPOINT_URL",
)  # fmt: skip
"""What of the environment is told; all else may be a secret."""

_LINES, _BYTES = 400, 1 << 20
"""Of an error's file the last lines, and of how many bytes at its end."""


def add_parser(commands: Commands) -> None:
    """The command line."""
    parser = add_command(
        commands,
        "doctor",
        help="write one file about versions, checkpoint and error, to be sent with a report",
        description="Write one file with versions, machine, ds_config, topology, what inspect says, and an error. "
        "Secrets are left out: values of keys that look like one, users in URLs, and of the environment all but a list "
        "of names. Read it before you send it. Exit code 0: written; 1: written, and the checkpoint does not open; 2: "
        "an error.",
        examples="""
            ds_ucp doctor checkpoints/ --config ds_config.json --error error.txt
            ds_ucp doctor checkpoints/ --error train.log --out /tmp/report.txt
            ds_ucp doctor
        """,
    )
    add_checkpoint_options(parser, needed=False)
    text = "the run's ds_config (default: the one that is saved in the checkpoint)"
    parser.add_argument("--config", metavar="FILE", help=text)
    text = f"a log or traceback, of which the last {_LINES} lines are taken; - is standard input"
    parser.add_argument("--error", metavar="FILE", help=text)
    parser.add_argument("--out", metavar="FILE", default=FILE, help=f"the file to be written (default: {FILE})")


def run(options: argparse.Namespace) -> int:
    """Write the file; 1 where the checkpoint does not open."""
    data: dict[str, Any] = {
        "versions": dict(_list_versions()),
        "machine": dict(_describe_machine(options.checkpoint)),
        "environment": {name: _read_variable(name) for name in ENVIRONMENT if name in os.environ},
        **_examine(options),
    }
    if options.config:
        from ..examine.settings import read_config

        data["ds_config"] = hide_values(read_config(options.config))
    data["error"] = _read_error(options.error) if options.error else []
    if not find_rank():
        _write(options.out, data)
    lines = [f"wrote {options.out}: read it before you send it"]
    if not data["opens"]:
        lines.append(f"the checkpoint does not open: {data['fault']}")
    emit(options, {"file": options.out, **data}, lines)
    return OK if data["opens"] else FAULT


def _list_versions() -> Iterator[tuple[str, str]]:
    yield "deepspeed_ucp", __version__
    yield "python", platform.python_version()
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _describe_machine(checkpoint: str | None) -> Iterator[tuple[str, str]]:
    import psutil

    from ..io.filesystems import find_kind
    from ..io.paths import is_url

    yield "system", platform.platform()
    yield "start of Python", _describe_start()
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    memory = psutil.virtual_memory()
    yield "memory", f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    if checkpoint and not is_url(checkpoint) and os.path.exists(checkpoint):
        free = format_bytes(psutil.disk_usage(checkpoint).free)
        yield "file system", f"{find_kind(checkpoint) or 'unknown'}, {free} free"


def _describe_start() -> str:
    """Whether ``DEEPSPEED_UCP=1`` alone switches the plugin on in the Pythons of this environment."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    names = ["deepspeed_ucp.pth", "deepspeed_ucp.start"]
    found = [path for folder in folders for name in names if os.path.exists(path := os.path.join(folder, name))]
    if not found:
        return f"DEEPSPEED_UCP alone switches nothing on: {' and '.join(names)} are in none of {', '.join(folders)}"
    return f"DEEPSPEED_UCP is looked at ({', '.join(found)})"


def _read_variable(name: str) -> str:
    """A variable's value; one that is JSON as a configuration."""
    value = os.environ[name]
    try:
        return json.dumps(hide_values(json.loads(value)))
    except ValueError:
        return hide_text(value)


def _examine(options: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint tells: whether it opens, its topology, its ds_config, and ``inspect``'s lines."""
    found: dict[str, Any] = {"opens": True, "fault": None, "topology": None, "ds_config": None, "checkpoint": []}
    if options.checkpoint is None:
        return found
    try:
        return found | _inspect(options)
    except UcpError as error:
        return found | _describe_fault(str(error), [])
    except Exception as error:  # noqa: BLE001  whatever is wrong is what the file is to tell
        return found | _describe_fault(f"{type(error).__name__}: {error}", traceback.format_exc().rstrip().split("\n"))


def _describe_fault(text: str, lines: Sequence[str]) -> dict[str, Any]:
    """Why a checkpoint does not open; ``lines`` are what the file tells of it, else the text."""
    first, *more = map(hide_text, text.split("\n"))
    return {"opens": False, "fault": first, "checkpoint": list(map(hide_text, lines)) or [first, *more]}


def _inspect(options: argparse.Namespace) -> dict[str, Any]:
    from ..comm import Comm
    from ..forecast.dryrun import read_saved_config
    from .damage import examine_folder, write_damage
    from .summary import write_summary
    from .survey import make_survey

    report, rules = look_at(options, Comm())
    if report.index is None or not opens(options, report):
        error, data = examine_folder(report)
        return _describe_fault(str(error), [*write_damage(data), "", *str(error).split("\n")])
    return {
        "topology": report.index.run.written,
        "ds_config": hide_values(read_saved_config(report.index)),
        "checkpoint": write_summary(make_survey(report, rules), unfold=False),
    }


def _read_error(path: str) -> list[str]:
    """The last lines of a log, without secrets."""
    try:
        if path == "-":
            text = sys.stdin.read()
        else:
            with open(path, "rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - _BYTES))
                text = stream.read().decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"--error: {path} cannot be read ({error.strerror}).") from None
    return hide_text(text).splitlines()[-_LINES:]


def _write(path: str, data: Mapping[str, Any]) -> None:
    """All of it as one text.

    Raises:
        StorageError: it cannot be written, or another file is there.
    """
    sections = {
        **{part: [" ".join(each) for each in data[part].items()] for part in ("versions", "machine", "environment")},
        "ds_config": to_json(data["ds_config"]).split("\n") if data["ds_config"] is not None else [],
        "topology": [data["topology"] or ""],
        "checkpoint": data["checkpoint"],
        "error": data["error"],
    }
    lines = [TITLE]
    for title, section in sections.items():
        lines += ["", f"## {title}", "", *(map(escape, section) if any(section) else ["(none)"])]
    try:
        if os.path.exists(path):
            with open(path, "rb") as earlier:
                if earlier.read(len(TITLE)) != TITLE.encode():
                    raise StorageError("is there, and no earlier report; name another file with --out.", path=path)
        with open(path, "w", encoding="utf-8") as stream:
            stream.write("\n".join(lines) + "\n")
    except OSError as error:
        raise StorageError(f"cannot be written ({error.strerror}).", path=path) from None
