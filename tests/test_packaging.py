"""The source archive passes its tests, an installation starts with Python, and links in documents are valid."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

from tests.support.covering import is_exhaustive, params

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import setup; setup(script_args=['-q', 'egg_info', '-e', {0!r}, 'sdist', '-d', {0!r}])"
FOLDERS = (".ci", "bench", "deepspeed_ucp", "docs", "ds_configs", "examples", "tests")
SUFFIXES = (".md", ".toml", ".cfg", ".txt", ".in", ".py", ".pth", ".start")
BUILD_WHEEL = "from setuptools import build_meta; build_meta.{}({!r})"
STARTS = {"deepspeed_ucp.pth", "deepspeed_ucp.start"}
QUICK = "tests/cli/test_docs.py"
"""Fast tests, which also read documents."""

DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[a-z]*/**/README.md")})


def list_ours() -> set[str]:
    found = {str(path.relative_to(ROOT)) for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()}
    found |= {path.name for path in ROOT.iterdir() if path.suffix in SUFFIXES}
    return {name for name in found if "__pycache__" not in name} | {"LICENSE", "Makefile"}


def test_the_source_archive_is_complete_and_passes_its_tests(tmp_path: Path) -> None:
    """Its tests are run only under `-m exhaustive`."""
    source = tmp_path / "source"  # the build writes into its folder
    for name in list_ours():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-c", BUILD.format(str(tmp_path))], cwd=source, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert not {name for name in list_ours() if not (unpacked / name).is_file()}
    info = (unpacked / "PKG-INFO").read_text(encoding="utf-8")
    assert re.search("^Author: the deepspeed_ucp authors$", info, re.MULTILINE)
    if not is_exhaustive():
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", QUICK]
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(command, cwd=unpacked, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize("kind", params(["build_wheel"], ["build_editable"]))
def test_the_environment_variable_starts_an_installed_plugin(kind: str, tmp_path: Path) -> None:
    """The test installs into a new virtual environment. An uninstallation removes all files."""
    source, wheels, environment = tmp_path / "source", tmp_path / "wheels", tmp_path / "venv"
    shutil.copytree(ROOT / "deepspeed_ucp", source / "deepspeed_ucp", ignore=shutil.ignore_patterns("__pycache__"))
    scripts = ("setup.py", "setup.cfg", "pyproject.toml", "deepspeed_ucp_startup.py")
    for name in (*scripts, "README.md", "LICENSE", *STARTS):
        shutil.copy(ROOT / name, source)
    wheels.mkdir()
    build = [sys.executable, "-c", BUILD_WHEEL.format(kind, str(wheels))]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    venv.create(environment)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    (wheel,) = wheels.iterdir()
    # pip would count packages in PYTHONPATH as installed.
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    install = [*pip, "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, env=without)
    assert {path.name for path in packages.iterdir()} >= STARTS

    code = "import sys, importlib.util; importlib.util.find_spec('deepspeed'); print('deepspeed_ucp' in sys.modules)"
    for value, there in {"1": "True", "0": "False"}.items():
        variables = {**os.environ, "DEEPSPEED_UCP": value}
        variables.pop("PYTHONPATH", None)
        command = [str(python), "-c", code]
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == (f"{there}\n", "")
    subprocess.run([*pip, "uninstall", "-q", "-y", "deepspeed_ucp"], check=True, capture_output=True, env=without)
    assert not list(packages.glob("*"))


def test_the_install_line_uses_tested_versions() -> None:
    lines = re.findall(r"^\$ pip install .*", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert lines
    assert all("-c constraints.txt" in line for line in lines)
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    needed = re.findall(r"^([\w-]+)", config["options"]["install_requires"], re.MULTILINE)
    assert set(needed) - {"deepspeed"} <= {name.lower() for name in pins}
    tested = ".".join(pins["torch"].split(".")[:2])
    assert f"torch 2.5 or newer (tested: {tested})" in (ROOT / "README.md").read_text(encoding="utf-8")


def list_anchors(document: Path) -> set[str]:
    """GitHub's anchors of headings: lower case, dashes for spaces, no other signs."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_has_a_target(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert not anchor or anchor in list_anchors(target), link
