"""Errors and their messages."""

from __future__ import annotations

import logging
import pickle
from unittest import mock

import pytest

from deepspeed_ucp.comm import Comm
from deepspeed_ucp.errors import (
    CheckpointError,
    MismatchError,
    Objections,
    UcpError,
    escape,
    fold_names,
    shorten,
    suggest,
)
from deepspeed_ucp.formats.findings import Finding, from_error
from tests.support.ranks import run_ranks


def test_long_lists_are_shortened() -> None:
    assert shorten(["a", "b"]) == "a, b"
    assert shorten(range(5), 2) == "0, 1, … (5 in all)"
    assert shorten(range(2), 2) == "0, 1"
    assert shorten([]) == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [("preserve_batchsize", "did you mean 'preserve_batch_size'?"), ("SEAL", "did you mean 'seal'?"), ("xyz", "")],
)
def test_a_similar_name_is_suggested(name: str, text: str) -> None:
    assert suggest(name, ["preserve_batch_size", "seal"]) == text


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["h.0.w", "h.1.w", "h.2.w"], ["h.{0-2}.w"]),
        (["h.0.w", "h.2.w", "h.3.w"], ["h.{0,2-3}.w"]),
        (["h.0.w"], ["h.0.w"]),
        (["0.e.0.w", "0.e.1.w", "1.e.0.w", "1.e.1.w"], ["{0-1}.e.{0-1}.w"]),
        (["0.e.0.w", "0.e.1.w", "1.e.1.w"], ["0.e.{0-1}.w", "1.e.1.w"]),
        (["dense_4h.w", "x"], ["dense_4h.w", "x"]),
        (["h.1.w", "h.01.w"], ["h.1.w", "h.01.w"]),
        (["9" * 5000], ["9" * 5000]),
    ],
    ids=lambda names: "+".join(names)[:40],
)
def test_numbered_names_are_folded_in_messages(names: list[str], folded: list[str]) -> None:
    assert [name for name, _ in fold_names(zip(names, names, strict=True), lambda name: 0)] == folded


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layers.0.weight ü 层 \\d+", "layers.0.weight ü 层 \\d+"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x1b[31m\x7f\x9b", r"\x1b[31m\x7f\x9b"),
        ("\u202egnp\u2066\u200b\u2028", r"\u202egnp\u2066\u200b\u2028"),
        ("\udcff\U000e0041", r"\udcff\U000e0041"),
        ("https://me:pass@host:90/run: is gone", "https://…@host:90/run: is gone"),
        ("HTTP://token@host/a@b", "HTTP://…@host/a@b"),
        ('"s3://key:p@ss@bucket/run", "a:b@c"', '"s3://…@bucket/run", "a:b@c"'),
        ("abfs://container@account/run s3://bucket/a:b@c", "abfs://container@account/run s3://bucket/a:b@c"),
        ("http://host:80/a@b, memory://a:1/b", "http://host:80/a@b, memory://a:1/b"),
        ("s3://KEY:SEC/R+ET@bucket/a@b: x", "s3://…@bucket/a@b: x"),
        ("https://host/run?sv=2&sig=a%2F/b=: is gone", "https://host/run?sv=…&sig=…: is gone"),
        ('{"at": "https://me@host/run?token", "a?b=c": 1}', '{"at": "https://…@host/run?…", "a?b=c": 1}'),
        ("(http://host:80?to=a:b@c), why? a=b", "(http://host:80?to=…), why? a=b"),
    ],
    ids=ascii,
)
def test_errors_and_logs_are_escaped_without_passwords(text: str, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("deepspeed_ucp").warning("%s: %d", text, 3)
    assert escape(text) == str(CheckpointError(text)) == shown
    assert caplog.messages == [f"{shown}: 3"]
    assert escape(shown) == shown


def test_newlines_in_values_are_escaped_in_messages() -> None:
    error = CheckpointError("first\nforged", "second")
    assert str(error) == "first\\nforged\nsecond" and isinstance(error, RuntimeError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_joined_errors_keep_the_attributes_of_the_first() -> None:
    objections = Objections()
    with objections:
        raise CheckpointError("is damaged.", path="a.pt", kind="crc")
    with objections:
        raise MismatchError("Another shape.\nA remedy.")
    with pytest.raises(CheckpointError, match="a.pt: is damaged.\nAnother shape.") as raised:
        objections.settle()
    assert (raised.value.path, raised.value.kind) == ("a.pt", "crc")
    assert raised.value.text == "is damaged.\nAnother shape.\\nA remedy."


def test_attributes_of_errors_are_sent_between_ranks() -> None:
    """Path, kind and findings are sent as data, not parsed from the text."""
    missing = Finding("missing", "a.pt", "run/tag/a.pt is missing; copy it")
    found = (
        CheckpointError("is damaged", path="run/tag/b.pt", kind="crc"),
        CheckpointError(missing.text, findings=[missing]),
    )

    def work(rank: int, comm: Comm) -> list[UcpError]:
        with pytest.raises(CheckpointError) as caught:
            comm.run(mock.Mock(side_effect=found[rank - 1] if rank else None))
        return [pickle.loads(pickle.dumps(caught.value))]

    for rank, (error,) in enumerate(run_ranks(3, work)):
        assert str(error) == "[rank 1] run/tag/b.pt: is damaged"
        assert (error.path, error.kind, error.text, error.echo) == ("run/tag/b.pt", "crc", "is damaged", rank > 0)
        assert from_error("run/tag", error) == [Finding("crc", "b.pt", "run/tag/b.pt: is damaged")]
    assert from_error("run/tag", found[1]) == [missing]
    assert from_error("elsewhere", found[0]) == [Finding("crc", "", "run/tag/b.pt: is damaged")]
