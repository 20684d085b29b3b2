"""``ds_ucp completion``: the scripts are valid, and complete commands and options."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deepspeed_ucp.cli.completion import SHELLS, make_script
from deepspeed_ucp.cli.dispatch import COMMANDS, main


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    found = {shell: folder / shell for shell in SHELLS}
    for shell, path in found.items():
        path.write_text(make_script(shell))
    return found


def complete(script: Path, *words: str, folder: Path | None = None) -> set[str]:
    """What bash offers behind these words."""
    line = " ".join(f"'{word}'" for word in words)
    ask = (
        f"source {script}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words) - 1}\n"
        "_shtab_ds_ucp 2>/dev/null\nprintf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True, cwd=folder)
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_valid(shell: str, scripts: dict[str, Path]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n", scripts[shell]], check=True)


def test_commands_complete(scripts: dict[str, Path]) -> None:
    assert complete(scripts["bash"], "ds_ucp", "") >= set(COMMANDS)
    assert complete(scripts["bash"], "ds_ucp", "in") == {"inspect"}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["inspect", "--pl"], {"--plot"}),
        (["inspect", "--pa"], {"--param", "--patterns"}),
        (["export", "a", "b", "--format", ""], {"safetensors", "dcp"}),
        (["completion", ""], set(SHELLS)),
        (["plan", "--tar"], {"--target"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_complete(words: list[str], offered: set[str], scripts: dict[str, Path]) -> None:
    assert complete(scripts["bash"], "ds_ucp", *words) >= offered


def test_folders_complete(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoint.txt").write_text("")
    assert complete(scripts["bash"], "ds_ucp", "inspect", "check", folder=tmp_path) == {"checkpoints"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_shell_knows_every_command(name: str, scripts: dict[str, Path]) -> None:
    for shell in SHELLS:
        assert name in scripts[shell].read_text(), shell


def test_the_command_prints_the_script(scripts: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == scripts["bash"].read_text().rstrip("\n")
    with pytest.raises(SystemExit):
        main(["completion", "fish"])
