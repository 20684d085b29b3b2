"""Imports of the package are fast, and install its hook in any order with DeepSpeed."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import textwrap
from types import ModuleType

import pytest

import deepspeed_ucp
from deepspeed_ucp import attach
from tests.support.interpreter import FAKE, run_python


def run(code: str) -> str:
    return run_python("-c", textwrap.dedent(code)).stdout.strip()


FAST = ("", ".cli.dispatch", ".formats", ".io.staging", ".plan.rounds", ".convert", ".comm", ".config", ".load")
FASTEST = (".cli.verify", ".cli.inspect", ".examine.verify", ".formats.open")


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (FAST, ["torch", "deepspeed", "mpi4py", "transformers"]),
        (FASTEST, ["pydantic", "ml_dtypes", "re2", "filelock", "obstore"]),
    ],
    ids=["commands", "verify-and-inspect"],
)
def test_modules_of_commands_import_no_slow_library(modules: list[str], absent: list[str]) -> None:
    found = run(f"""
        import importlib, sys
        for name in {modules}:
            importlib.import_module("deepspeed_ucp" + name)
            print("-", name, [heavy for heavy in {absent} if heavy in sys.modules])
    """)
    assert found.splitlines() == [f"- {name} []" for name in modules]


def test_importing_the_package_opens_no_file_socket_or_thread() -> None:
    """It imports no slow module, either."""
    found = run("""
        import sys, threading
        events, before = [], set(sys.modules)
        sys.addaudithook(lambda name, args: events.append((name, args)))
        import deepspeed_ucp
        slow = {"asyncio", "dataclasses", "inspect", "numpy", "pydantic"} & (set(sys.modules) - before)
        opened = [args[0] for name, args in events if name == "open" and not str(args[0]).endswith((".py", ".pyc"))]
        sockets = [name for name, _ in events if name.startswith("socket.") and name != "socket.__new__"]
        print(opened, sockets, threading.active_count(), slow)
    """)
    assert found == "[] [] 1 set()"


@pytest.mark.engine_smoke
def test_every_module_imports_and_has_its_exported_names() -> None:
    """Features that some releases of DeepSpeed lack must be imported at their use."""
    for module in pkgutil.walk_packages(deepspeed_ucp.__path__, "deepspeed_ucp."):
        if not module.name.endswith("__main__"):  # importing it runs the command
            imported = importlib.import_module(module.name)
            assert [name for name in getattr(imported, "__all__", ()) if not hasattr(imported, name)] == []
    assert all(getattr(deepspeed_ucp, name) for name in deepspeed_ucp.__all__)
    assert {*deepspeed_ucp.__all__} <= {*dir(deepspeed_ucp)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = deepspeed_ucp.nothing


ORDERS = {
    "ours-first": "import deepspeed_ucp, deepspeed; show()",
    "deepspeed-first": "import deepspeed, deepspeed_ucp; show()",
    "from-within-deepspeed's-import": "hooks.early = lambda: __import__('deepspeed_ucp'); import deepspeed; show()",
    "explicit": "import deepspeed_ucp; deepspeed_ucp.install(); show()",
    "uninstalled-before": "import deepspeed_ucp; deepspeed_ucp.uninstall(); import deepspeed; show()",
    "uninstalled-after": "import deepspeed_ucp, deepspeed; deepspeed_ucp.uninstall(); show()",
    "explicit-after-uninstalling": (
        "import deepspeed_ucp; deepspeed_ucp.uninstall(); import deepspeed; deepspeed_ucp.install(); show()"
    ),
    "after-an-import-that-failed": """
def fail(): raise RuntimeError
hooks.inner = fail
import deepspeed_ucp
try: import deepspeed
except RuntimeError: hooks.inner = lambda: None
import deepspeed; show()
""",
    "while-another-thread-imports-deepspeed": """
entered = threading.Event()
def slowly(): entered.set(); time.sleep(0.3)
hooks.late = slowly
thread = threading.Thread(target=__import__, args=("deepspeed",)); thread.start()
entered.wait()
import deepspeed_ucp
show(); thread.join()
""",
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_hook_is_installed_in_any_order_of_imports(order: str) -> None:
    found = run(FAKE + ORDERS[order])
    assert found.startswith("[False, False]") if order.startswith("uninstalled") else found == "[True, True] None"


def test_an_import_by_the_module_of_the_engine_warns_that_no_hook_is_installed() -> None:
    printed = run(
        FAKE
        + """
import logging; logging.basicConfig(stream=sys.stdout, format="%(message)s")
hooks.inner = lambda: __import__("deepspeed_ucp")
import deepspeed; show()
deepspeed_ucp = sys.modules["deepspeed_ucp"]; deepspeed_ucp.install(); show()
"""
    )
    warning, before, after = printed.splitlines()
    assert "call deepspeed_ucp.install() after it" in warning
    assert (before, after) == ("[False, False] absent", "[True, True] None")


# A library that uses DeepSpeed: a class, a subclass that inherits a wrapped method, and a function of another module.
LIBRARY = """
SOURCES.update({
    "library": "",
    "library.calls": "def load(): return 'original'",
    "library.trainer": "from .calls import load\\n"
        "class Base:\\n    def save(self, folder): return 'original ' + folder\\n"
        "class Trainer(Base):\\n    def train(self, steps): return 'original %d' % steps",
})
from deepspeed_ucp import attach
replaced = sys.modules["deepspeed_ucp.trainers.replaced"] = types.ModuleType("replaced")
replaced.call = lambda original, *args, **kwargs: "wrapped, " + original(*args, **kwargs)
for name in ("Trainer.train", "Trainer.save", "load", "Trainer.of_another_release", "Gone.train"):
    attach.TABLE.append(attach.Wrapped("library.trainer", name, "trainers.replaced", "call"))

def use():
    from library import calls, trainer
    print([trainer.Trainer().train(3), trainer.Trainer().save(folder="here"), trainer.load(), calls.load()])
    print(trainer.Base().save("here"), sorted(name for name in vars(trainer.Trainer) if name[0] != "_"))
"""


@pytest.mark.parametrize(
    "order",
    ["import library.trainer", "attach.uninstall(); import library.trainer; attach.install_when_imported()"],
    ids=["ours-first", "library-first"],
)
def test_a_trainers_methods_are_wrapped_after_its_import(order: str) -> None:
    """The import of the trainer does not import DeepSpeed. Without DeepSpeed the original methods run."""
    printed = run(
        FAKE
        + LIBRARY
        + order
        + "; use(); print('deepspeed' in sys.modules); import deepspeed; use(); attach.uninstall(); use()"
    )
    without_deepspeed, names, imported, wrapped, _, uninstalled, names_uninstalled = printed.splitlines()
    assert without_deepspeed == uninstalled == "['original 3', 'original here', 'original', 'original']"
    assert wrapped == "['wrapped, original 3', 'wrapped, original here', 'wrapped, original', 'original']"
    assert (names, imported) == ("original here ['save', 'train']", "False")
    assert names_uninstalled == "original here ['train']"


def test_a_missing_method_is_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A method of newer releases (`newer=True`) may be missing."""
    trainer = ModuleType("library.trainer")
    row = attach.Wrapped("library.trainer", "Trainer.of_another_release", "hook", "resume")
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    monkeypatch.setattr(attach, "TABLE", [row, row._replace(name="of_a_newer_one", newer=True)])
    for _ in range(2):
        attach.install_when_imported()
    (message,) = caplog.messages
    assert message.startswith("this release of library has no Trainer.of_another_release")
