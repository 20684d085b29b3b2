"""``docs/cli.md`` contains the help of every command; messages name existing options; examples are reproducible."""

from __future__ import annotations

import argparse
import ast
import os
import re
from functools import cache

import pytest

from deepspeed_ucp.cli.dispatch import COMMANDS, build_parser, main
from tests.cli.samples import DOCS, find_parser

EXAMPLES = [
    pytest.param(*found, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, found in enumerate(
        re.findall(r"```console\n\$ ds_ucp (plan --params [^\n]*)\n(.*?)```", page.read_text(), re.DOTALL)
    )
]
"""Command lines in the docs with reproducible output, and this output."""

MARK = "writes the help of each command -->\n"
SHARED = re.compile(r"\nshared options:\n(  .*\n)+")


def list_actions(name: str) -> list[argparse.Action]:
    """List the options and arguments of a command that its help shows."""
    return [each for each in find_parser(name)._actions if each.help != argparse.SUPPRESS]


def shorten_help(name: str) -> str:
    """Return the help without lists of options in the usage, and without texts that are once on the page."""
    text = SHARED.sub("", find_parser(name).format_help())
    text = re.sub(r"(\[-[^\]]*\]\s+)+", "[OPTIONS] ", text, count=1)
    text = re.sub(r"  (-h, --help|\w+) +(show this help|a folder \(or URL\) with) .*\n( {20,}.*\n)*", "", text)
    return text.replace("positional arguments:\n\n", "").partition("\nexamples:\n")[0]


def test_docs_cli_md_has_the_help_of_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """``UPDATE_GOLDEN=1`` rewrites the page."""
    monkeypatch.setenv("COLUMNS", "100")
    path = DOCS / "cli.md"
    page = path.read_text(encoding="utf-8")
    _, _, groups = str(build_parser().description).partition("\n\n")
    sections = [f"\n## Commands\n\n```text\n{groups}\n```\n"]
    sections += [f"\n## {name}\n\n```text\n{shorten_help(name)}```\n" for name in COMMANDS]
    shared = SHARED.search(find_parser("diff").format_help())
    assert shared
    sections.append(f"\n## Shared options\n\nAll commands but `run` have them.\n\n```text\n{shared[0].strip()}\n```\n")
    expected = "".join([*page.partition(MARK)[:2], *sections])
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(expected, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_examples_and_describes_all_options(name: str) -> None:
    shown = find_parser(name).format_help()
    assert f"usage: ds_ucp {name}" in shown and f"ds_ucp {name}" in shown.partition("examples:")[2]
    flags = {flag for action in list_actions(name) for flag in action.option_strings}
    assert name == "run" or flags >= {"--json", "--quiet", "--debug"}
    assert all(action.help for action in list_actions(name))


@cache
def list_texts() -> tuple[str, ...]:
    """Return all string literals of the package, f-strings without their values."""
    paths = sorted((DOCS.parent / "deepspeed_ucp").rglob("*.py"))
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    joined = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    plain = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts = ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts) for parts in joined]
    return (*plain, *texts)


def test_messages_name_existing_commands_and_options() -> None:
    lines = [found for text in list_texts() for found in re.findall(r"`ds_ucp ([a-z]+)([^`]*)`", text)]
    assert len(lines) > 20
    for name, rest in lines:
        assert name in COMMANDS, name
        flags = {flag for action in list_actions(name) for flag in action.option_strings}
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest)) <= flags, (name, rest)


def list_quotes() -> list[str]:
    """List messages that the guide quotes: its list of errors, and its log lines."""
    page = (DOCS / "guide.md").read_text(encoding="utf-8")
    _, _, errors = page.partition("\n## Errors\n")
    lines = page.partition("\n### Log lines\n")[2].partition("\n`engine.ucp_report`")[0]
    assert errors and lines
    quotes = re.findall(r"`([^`\n]+)`", lines)
    return [*re.findall(r"^\* `([^`]+)`: ", errors, re.MULTILINE), *(text for text in quotes if " " in text)]


@pytest.mark.parametrize("quote", list_quotes())
def test_the_guide_quotes_messages_of_the_package(quote: str) -> None:
    """Values in the messages are an ellipsis or an example."""
    for part in re.split(r"…|, |: |\d[\d.]*|deepspeed_ucp|DeepSpeed", quote):
        fragment = part.strip(" ()_,;:")
        assert len(fragment) < 4 or any(fragment in text for text in list_texts())


def test_exit_codes_and_an_example_are_documented() -> None:
    codes = re.findall(r"^\| (\d+) \|", (DOCS / "cli.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert (codes, len(EXAMPLES)) == (["0", "1", "2", "130", "141"], 1)


@pytest.mark.parametrize(("line", "shown"), EXAMPLES)
def test_the_docs_show_the_output_of_a_command(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 0
    parts = [re.escape(part.strip("\n")) for part in re.split(r"^…$", shown, flags=re.MULTILINE)]
    assert re.fullmatch(".*".join(parts), capsys.readouterr().out.strip("\n"), re.DOTALL)
