"""``DEEPSPEED_UCP=1`` turns the plugin on at the start of Python."""

from __future__ import annotations

import pkgutil
import subprocess

import pytest

import deepspeed_ucp_startup as startup
from deepspeed_ucp import attach, config
from tests.support.interpreter import FAKE, ROOT, run_python

START = f"import site, sys; site.addsitedir({str(ROOT)!r})\n"
"""The start of Python with the ``.pth`` file of this checkout, which an installation has in site-packages."""
SHOW = "print([name for name in ('deepspeed_ucp_startup', 'deepspeed_ucp') if name in sys.modules])\n"


def run(code: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code after the start of Python; an installed ``.pth`` file does not see the variables, which are set late."""
    return run_python(*flags, "-c", f"import os\nos.environ.update({variables!r})\n" + FAKE + START + code)


def test_without_the_variable_nothing_is_imported() -> None:
    assert run(SHOW).stdout == "[]\n"


@pytest.mark.parametrize("flag", ["-B", "-I", "-E"])
def test_with_the_variable_the_plugin_comes_with_deepspeed(flag: str) -> None:
    """Not before, since it takes a while to import; once, although an environment may run the line twice."""
    code = SHOW + START + SHOW + "import deepspeed; show()\n" + SHOW
    code += "print(sum(type(each).__name__ == '_Waker' for each in sys.meta_path))"
    before, again, wrapped, after, wakers = run(code, flag, DEEPSPEED_UCP='{"seal": true}').stdout.splitlines()
    assert before == again == "['deepspeed_ucp_startup']"
    assert wrapped == "[True, True] None"
    assert after == "['deepspeed_ucp_startup', 'deepspeed_ucp']"
    assert wakers == "1"


@pytest.mark.parametrize("word", ["0", " False ", "off"])
def test_off_is_off(word: str) -> None:
    assert run("import deepspeed; show(); " + SHOW, DEEPSPEED_UCP=word).stdout.splitlines() == [
        "[False, False] absent",
        "['deepspeed_ucp_startup']",
    ]


def test_the_file_that_replaces_the_line_names_what_it_calls() -> None:
    """The file of PEP 829, for newer Pythons."""
    assert pkgutil.resolve_name((ROOT / "deepspeed_ucp.start").read_text().strip()) is startup.start


def test_the_words_for_off_are_the_configurations() -> None:
    assert set(startup.OFF) - {""} == {word for word, on in config.WORDS.items() if not on}
    assert startup.SWITCH == config.ENVIRONMENT


def test_every_library_that_is_wrapped_wakes_it() -> None:
    """A library whose import has begun would be wrapped too late."""
    assert set(startup.LIBRARIES) == {each.module.partition(".")[0] for each in attach.TABLE}


def test_an_error_is_one_line() -> None:
    broken = "sys.modules['deepspeed_ucp'] = None\n"
    done = run(broken + "import deepspeed; show()", DEEPSPEED_UCP="1")
    assert done.stdout.splitlines() == ["[False, False] absent"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("deepspeed_ucp: not switched on in this process (ModuleNotFoundError: ")
