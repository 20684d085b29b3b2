"""Starts the writer of saves: ``python …/deepspeed_ucp/saves/__main__.py FOLDER``, by path and not by ``-m``.

``-m`` would search the working directory for every module first, and the path itself would add this folder.
"""

import os
import sys


def _import_package(folder: str) -> None:
    """Import the package from its folder, although ``sys.path`` may have another one of that name."""
    from importlib.util import module_from_spec, spec_from_file_location

    name = os.path.basename(folder)
    spec = spec_from_file_location(name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
    if spec is not None and spec.loader is not None:
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "__main__":
    if os.fork():  # not a child of the rank: a launcher that ends the rank's children would end the writer too
        os._exit(0)
    folder = os.path.dirname(os.path.abspath(__file__))
    if sys.path[0] == folder:  # it is missing with PYTHONSAFEPATH
        del sys.path[0]
    _import_package(os.path.dirname(folder))
    from deepspeed_ucp.saves.writer import main

    sys.exit(main(*sys.argv[1:]))
