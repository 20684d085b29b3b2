"""``docs/cli.md`` and the help describe every command, option and exit code."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator

import pytest

from deepspeed_ucp.cli.dispatch import COMMANDS, build_parser, main
from tests.cli.samples import DOCS, find_section

TEXT = (DOCS / "cli.md").read_text(encoding="utf-8")
EXAMPLES = [
    pytest.param(*found, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, found in enumerate(
        re.findall(r"```console\n\$ ds_ucp (plan --params [^\n]*)\n(.*?)```", page.read_text(), re.DOTALL)
    )
]
"""Command lines in the docs with reproducible output, and this output."""

SHARED = "What all commands share"
GENERAL = {
    *("-h", "--help", "--json", "-q", "--quiet", "--debug", "--patterns", "--groups", "--also", "--also-b"),
    *("--storage-option", "--workers", "--window-mb"),
}
"""Options that the shared section describes."""


def find_parser(name: str) -> argparse.ArgumentParser:
    (commands,) = (a for a in build_parser((name,))._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices[name]  # type: ignore[no-any-return]


def list_actions(name: str) -> list[argparse.Action]:
    """The options and arguments of a command that its help shows."""
    return [each for each in find_parser(name)._actions if each.help != argparse.SUPPRESS]


def list_flags(name: str) -> set[str]:
    return {flag for action in list_actions(name) for flag in action.option_strings}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_docs_and_the_help_have_the_options_of_a_command(name: str) -> None:
    section, shown = find_section(name), find_parser(name).format_help()
    assert f"ds_ucp {name}" in section and f"[`{name}`](#{name})" in TEXT
    assert f"usage: ds_ucp {name}" in shown and f"ds_ucp {name}" in shown.partition("examples:")[2]
    for action in list_actions(name):
        assert action.help, action.dest
        for flag in action.option_strings or [str(action.metavar)]:
            place = find_section(SHARED) if flag in GENERAL else section
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", place), f"{name}: {flag} is not documented"
    rows = re.findall(r"^\| (`-.*?|\[shared options\].*) \|", section, re.MULTILINE)
    assert {flag for row in rows for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", row)} <= list_flags(name)


def list_texts() -> Iterator[str]:
    """All string literals of the package, f-strings without their values."""
    for path in sorted((DOCS.parent / "deepspeed_ucp").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_name_existing_commands_and_options() -> None:
    """Such as ``ds_ucp NAME --option``."""
    lines = [found for text in list_texts() for found in re.findall(r"`ds_ucp ([a-z]+)([^`]*)`", text)]
    assert len(lines) > 20
    for name, rest in lines:
        assert name in COMMANDS, name
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)) <= list_flags(name), (name, rest)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "run"])
def test_help_lists_shared_options_last(name: str) -> None:
    specific, _, shared = find_parser(name).format_help().partition("\nshared options:\n")
    usage, lists = specific.split("\n\n", 1)
    shared = shared.partition("\nexamples:")[0]
    assert set(re.findall(r"^  (-[\w-]+)", lists, re.MULTILINE)) & GENERAL <= {"-h"}
    assert GENERAL >= set(re.findall(r"^  (-[\w-]+)", shared, re.MULTILINE)) >= {"--json", "-q", "--debug"}
    flags = [flag for flag in re.findall(r"\[(-[\w-]+)", usage) if flag != "-h"]
    assert [flag in GENERAL for flag in flags] == sorted(flag in GENERAL for flag in flags)


def test_exit_codes_are_documented() -> None:
    for code in (0, 1, 2, 130):
        assert re.search(rf"^\| {code} \|", find_section(SHARED), re.MULTILINE)


@pytest.mark.parametrize(("line", "shown"), EXAMPLES)
def test_the_docs_show_the_output_of_a_command(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 0
    parts = [re.escape(part.strip("\n")) for part in re.split(r"^…$", shown, flags=re.MULTILINE)]
    assert re.fullmatch(".*".join(parts), capsys.readouterr().out.strip("\n"), re.DOTALL)


def test_the_docs_have_examples() -> None:
    assert [case.id for case in EXAMPLES] == ["cli-0", "cli-1"]
