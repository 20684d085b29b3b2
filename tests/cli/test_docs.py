"""``docs/cli.md`` tells of every command, option, exit code and key of the JSON."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed_ucp.cli.dispatch import COMMANDS, build_parser, main
from tests.cli.samples import list_actions, make_gpt, write_sample
from tests.synth import Topology

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "cli.md").read_text(encoding="utf-8")
FORETOLD = [
    pytest.param(*found, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, found in enumerate(
        re.findall(r"```console\n\$ ds_ucp (plan --params [^\n]*)\n(.*?)```", page.read_text(), re.DOTALL)
    )
]
"""Command lines whose output is the same wherever they are given, and what pages show of it."""

SAVES = "--mtbf 8h --restart 1m --read-gbs 1 --write-gbs 1"
SHARED = "What all commands share"
GENERAL = {
    *("-h", "--help", "--json", "-q", "--quiet", "--debug", "--patterns", "--groups", "--also", "--also-b"),
    *("--storage-option", "--workers", "--window-mb"),
}
"""Options that commands share, which the shared section tells; a command's own section names all others."""


def find_section(title: str) -> str:
    """A section's text up to the next heading of the same level."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert match, f"docs/cli.md has no section {title!r}"
    return match[1]


def find_parser(name: str) -> argparse.ArgumentParser:
    (commands,) = (a for a in build_parser((name,))._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices[name]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_told(name: str) -> None:
    own = find_section(name)
    assert f"ds_ucp {name}" in own
    assert f"[`{name}`](#{name})" in TEXT
    for action in list_actions(find_parser(name)):
        for flag in action.option_strings or [str(action.metavar)]:
            told = re.compile(rf"(?<![\w-]){re.escape(flag)}(?![\w-])")
            where = find_section(SHARED) if flag in GENERAL else own
            assert told.search(where), f"{name}: {flag} is not told"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_is_told_that_is_not_there(name: str) -> None:
    rows = re.findall(r"^\| (`-.*?|\[shared options\].*) \|", find_section(name), re.MULTILINE)
    known = {flag for action in list_actions(find_parser(name)) for flag in action.option_strings}
    told = {flag for row in rows for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", row)}
    assert told <= known


def list_texts() -> Iterator[str]:
    """All string literals of the package, f-strings without their values."""
    for path in sorted((DOCS.parent / "deepspeed_ucp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_name_commands_and_options_that_exist() -> None:
    """A message that advises ``ds_ucp NAME --option`` must not lead to an option that was removed."""
    told = [found for text in list_texts() for found in re.findall(r"`ds_ucp ([a-z]+)([^`]*)`", text)]
    assert len(told) > 20
    for name, rest in told:
        assert name in COMMANDS, name
        seen = {each for action in list_actions(find_parser(name)) for each in action.option_strings}
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)) <= seen, (name, rest)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "run"])
def test_help_lists_a_commands_own_options_before_shared_ones(name: str) -> None:
    own, _, shared = find_parser(name).format_help().partition("\nshared options:\n")
    usage, lists = own.split("\n\n", 1)
    shared = shared.partition("\nexamples:")[0]
    assert set(re.findall(r"^  (-[\w-]+)", lists, re.MULTILINE)) & GENERAL <= {"-h"}
    assert GENERAL >= set(re.findall(r"^  (-[\w-]+)", shared, re.MULTILINE)) >= {"--json", "-q", "--debug"}
    flags = [flag for flag in re.findall(r"\[(-[\w-]+)", usage) if flag != "-h"]
    assert [flag in GENERAL for flag in flags] == sorted(flag in GENERAL for flag in flags)


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_exit_codes_are_told(code: int) -> None:
    assert re.search(rf"^\| {code} \|", find_section(SHARED), re.MULTILINE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("docs"), Topology(1, 2, "bf16"), make_gpt(2))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("convert", ["{checkpoint}", "{out}/atomic"]),
        ("list", ["{checkpoint}"]),
        ("inspect", ["{checkpoint}"]),
        ("plan", ["{checkpoint}", "--target", "dp=3,zero=3"]),
        ("plan", ["--params", "1B", "--ranks", "8"]),
        ("plan", f"--params 1B --ranks 8 {SAVES}".split()),
        ("verify", ["{checkpoint}"]),
        ("diff", ["{checkpoint}", "{checkpoint}"]),
        ("diff", ["{checkpoint}", "{checkpoint}", "--config"]),
        ("export", ["{checkpoint}", "{out}/weights"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_key_of_the_json_is_told(
    name: str, arguments: list[str], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [text.format(checkpoint=checkpoint, out=tmp_path) for text in arguments]
    assert main([name, *filled, "--json"]) == 0
    told = set(re.findall(r"`(\w+)`", find_section(name).rpartition("JSON: ")[2]))
    assert set(json.loads(capsys.readouterr().out)) <= told


@pytest.mark.parametrize(("line", "shown"), FORETOLD)
def test_what_is_foretold_in_the_docs_is_what_the_command_prints(
    line: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 0
    parts = [re.escape(part.strip("\n")) for part in re.split(r"^…$", shown, flags=re.MULTILINE)]
    assert re.fullmatch(".*".join(parts), capsys.readouterr().out.strip("\n"), re.DOTALL)


def test_pages_show_what_is_foretold() -> None:
    assert [case.id for case in FORETOLD] == ["benchmarks-0", "cli-0", "cli-1"]
