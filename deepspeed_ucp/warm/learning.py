"""What a rank tells its nursery at its first step: what it has imported until then, and how it was started."""

from __future__ import annotations

import contextlib
import functools
import os
import site
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

from . import handover

_ANYWHERE = ("deepspeed", "deepspeed_ucp", "torch")
"""Packages that are imported ahead wherever they lie; others only from the interpreter's own folders: what a script has
beside it changes from start to start."""

_READ_BY_LIBRARIES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "NUMEXPR_", "NPY_", "MALLOC_", "TORCH_",
    "PYTORCH_", "KINETO_", "ATEN_", "LD_", "PYTHON",
)  # fmt: skip
"""Beginnings of variables that compiled libraries read while they are loaded, where nobody can look: set by the script
itself, they come too late for a template. What Python's modules read the template sees."""


def tell() -> None:
    """Tell the nursery what the next start is to find imported: a node's first rank does, once, if it has one."""
    request = dict(handover.request)
    if not request:
        return
    handover.request.clear()
    if request["program"] is None or _find_local_rank(request["environment"]) != "0":
        return
    with contextlib.suppress(OSError):
        connection = handover.reach(request["nursery"], "learn")
        if connection is not None:
            with connection:
                connection.settimeout(5.0)
                handover.send(connection, describe(request))


def _find_local_rank(environment: Mapping[str, str]) -> str:
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    return next((environment[name] for name in names if name in environment), "0")


def describe(request: Mapping[str, Any]) -> dict[str, Any]:
    """A template's recipe, from how a process was started and what it has now.

    Returns:
        ``program``, ``executable``, ``options``, ``cwd``, ``environment`` and ``affinity`` as it was started;
        ``modules`` to be imported, in the order in which it has; ``origins`` (a file by name) of what could be found
        elsewhere; ``set``: the variables of libraries that have been set since, or removed (None); ``touched`` and
        ``values``: other variables that have, and digests of what they are now.
    """
    modules = [name for name in list(sys.modules) if _is_for_all(name)]
    if "CROSS_RANK" in request["environment"]:  # the deepspeed launcher's
        modules.append("deepspeed.launcher.runner")
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if "." not in name}
    before = request["environment"]
    changed = {
        name: os.environ.get(name)
        for name in {*before, *os.environ}
        if before.get(name) != os.environ.get(name) and not _is_settled(name)
    }
    read = {name: value for name, value in changed.items() if name.startswith(_READ_BY_LIBRARIES)}
    kept = ("program", "executable", "options", "cwd", "environment", "affinity")
    return {
        **{name: request[name] for name in kept},
        "modules": modules,
        "origins": {name: path for name, path in files.items() if _is_strange(name, path)},
        "set": read,
        "touched": sorted(changed.keys() - read),
        "values": {name: handover.digest(value) for name, value in changed.items() if name not in read},
    }


_FOLDERS = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)


def _is_for_all(name: str) -> bool:
    """Whether a module comes from where no script changes it, and can be imported by its name."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    origin = getattr(spec, "origin", None)
    if spec is None or spec.name != name or not isinstance(origin, str) or name.endswith("__main__"):
        return False
    if origin in ("built-in", "frozen") or name.partition(".")[0] in _ANYWHERE:
        return True
    return _find_folder(os.path.dirname(origin)).startswith(_FOLDERS)


@functools.cache
def _find_folder(path: str) -> str:
    return os.path.join(os.path.realpath(path), "")


def _is_strange(name: str, path: object) -> bool:
    """Whether a module lies where another start may find another one: a template of which that is so is none."""
    if not isinstance(path, str) or name in ("__main__", "__mp_main__", "deepspeed_ucp_startup"):
        return False
    return name in _ANYWHERE or not _find_folder(os.path.dirname(path)).startswith(_FOLDERS)


def _is_settled(name: str) -> bool:
    """Whether a template has a variable's value in any case, or does not depend on it."""
    return handover.is_late(name) or name == handover.NVML
