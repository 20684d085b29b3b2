"""``DEEPSPEED_UCP=1`` enables the plugin at the start of Python."""

from __future__ import annotations

import pkgutil
import subprocess

import pytest

import deepspeed_ucp_startup as startup
from deepspeed_ucp import attach, config
from tests.support.interpreter import FAKE, ROOT, run_python

START = f"import site, sys; site.addsitedir({str(ROOT)!r})\n"
"""Code that runs the ``.pth`` file of this checkout, which an installation has in site-packages."""
SHOW = "print([name for name in ('deepspeed_ucp_startup', 'deepspeed_ucp') if name in sys.modules])\n"


def run(code: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code after the ``.pth`` file. The variables are set too late for an installed ``.pth`` file."""
    return run_python(*flags, "-c", f"import os\nos.environ.update({variables!r})\n" + FAKE + START + code)


def test_python_imports_no_module_of_the_plugin_without_the_variable() -> None:
    assert run(SHOW).stdout == "[]\n"


@pytest.mark.parametrize("flag", ["-B", "-I", "-E"])
def test_the_plugin_is_imported_with_deepspeed_if_the_variable_is_set(flag: str) -> None:
    """It is not imported earlier, because that takes time, and only once, even if the line runs twice."""
    code = SHOW + START + SHOW + "import deepspeed; show()\n" + SHOW
    code += "print(sum(type(each).__name__ == '_Waker' for each in sys.meta_path))"
    before, again, wrapped, after, wakers = run(code, flag, DEEPSPEED_UCP='{"seal": true}').stdout.splitlines()
    assert before == again == "['deepspeed_ucp_startup']"
    assert wrapped == "[True, True] None"
    assert after == "['deepspeed_ucp_startup', 'deepspeed_ucp']"
    assert wakers == "1"


@pytest.mark.parametrize("word", ["0", " False ", "off"])
def test_words_for_off_in_the_variable_disable_the_plugin(word: str) -> None:
    assert run("import deepspeed; show(); " + SHOW, DEEPSPEED_UCP=word).stdout.splitlines() == [
        "[False, False] absent",
        "['deepspeed_ucp_startup']",
    ]


def test_the_start_file_of_pep_829_calls_the_function_of_the_pth_file() -> None:
    assert pkgutil.resolve_name((ROOT / "deepspeed_ucp.start").read_text().strip()) is startup.start


def test_the_words_for_off_equal_those_of_the_configuration() -> None:
    assert set(startup.OFF) - {""} == {word for word, on in config.WORDS.items() if not on}
    assert startup.SWITCH == config.ENVIRONMENT


def test_the_import_of_every_wrapped_library_imports_the_plugin() -> None:
    """A library would be wrapped too late after its import has begun."""
    assert set(startup.LIBRARIES) == {each.module.partition(".")[0] for each in attach.TABLE}


def test_an_error_at_the_start_of_python_is_one_line() -> None:
    broken = "sys.modules['deepspeed_ucp'] = None\n"
    done = run(broken + "import deepspeed; show()", DEEPSPEED_UCP="1")
    assert done.stdout.splitlines() == ["[False, False] absent"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("deepspeed_ucp: not switched on in this process (ModuleNotFoundError: ")
