"""Forged client states: objects of harmless classes that are used to run code, or to take memory or time."""

from __future__ import annotations

import argparse
import types
from pathlib import Path

import pytest
import torch

from deepspeed_ucp.errors import UnsupportedError
from deepspeed_ucp.load.client import check_trusted
from deepspeed_ucp.model.index import Use
from tests.support.clients import RUNS, Settings, check_names, edit_pickle, read_trusting_nothing, write

CLASSES = Settings.__module__


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


CLASS, KEEP, KEPT, LOSE = name(CLASSES, "Settings"), b"r\0\0\1\0", b"j\0\0\1\0", b"0"
CLASS_NAME = f"{CLASSES}.Settings"
EMPTY, CALL, ONE = b")\x81", b"R", b"K\1"
VALUE = CLASS + EMPTY
SETSTATE = text("__setstate__") + name("__builtin__", "set")
FROZEN = name(CLASSES, "Frozen") + EMPTY + b"}" + text("value") + ONE + b"sb"
HASHED = b"(" + FROZEN + b"l"
NAMESPACE, ATTRIBUTES = name("argparse", "Namespace") + EMPTY, name(CLASSES, "Attributes")
SIMPLE, ORDERED = name("types", "SimpleNamespace"), name("collections", "OrderedDict")
FRACTION, DECIMAL = name("fractions", "Fraction"), name("decimal", "Decimal")
UUID, UUID_STATE = name("uuid", "UUID") + EMPTY, b"}" + text("int") + ONE + b"s"
TENSOR = (
    name("torch._tensor", "_rebuild_from_type_v2")
    + (b"(" + name("builtins", "complex") + name("builtins", "complex") + b")}" + SETSTATE + b"st")
    + b"R"
)
VALUES = {
    "called": CLASS + text("a") + b"\x85" + CALL,
    "called with keywords": CLASS + b")}" + text("name") + ONE + b"s\x92",
    "called and lost": CLASS + KEEP + text("a") + b"\x85" + CALL + LOSE + KEPT + EMPTY,
    "an instance is called": VALUE + b")" + CALL,
    "an instance is called and lost": CLASS + KEEP + EMPTY + b")" + CALL + LOSE + KEPT + EMPTY,
    "filled": VALUE + b"(" + ONE + b"e",
    "filled and lost": b"]" + CLASS + KEEP + EMPTY + b"(" + ONE + b"e" + LOSE + KEPT + EMPTY + b"a",
    "given entries": VALUE + ONE + ONE + b"s",
    "given to a call": name("__builtin__", "slice") + VALUE + b"\x85" + CALL,
    "deep in a call": name("__builtin__", "bytearray") + b"]" + VALUE + b"a\x85" + CALL,
    "its class is given to a call": name("collections", "defaultdict") + CLASS + KEEP + b"\x85R0" + KEPT + EMPTY,
    "hashed": b"}" + VALUE + ONE + b"s",
    "attributes by a tuple": VALUE + b"N}" + text("name") + ONE + b"s\x86b",
    "the state of what a call makes": name("collections", "Counter") + b")R}" + text("a") + VALUE + b"sb",
}
"""Values that are more than objects with attributes."""
COSTLY = {
    "a list of a range": name("__builtin__", "list") + name("__builtin__", "xrange") + b"J\xff\xff\xff\x7f\x85R\x85R",
    "a number by an exponent": FRACTION + text("1e999999999") + b"\x85R",
    "a number of a decimal": name("__builtin__", "int") + DECIMAL + text("1e999999999") + b"\x85R\x85R",
    "a fraction of a decimal": FRACTION + DECIMAL + text("1e9") + b"\x85R\x85R",
    "a partial that is called": name("functools", "partial")
    + name("__builtin__", "bytearray")
    + b"\x85RJ\xff\xff\xff\x7f\x85R",
}
"""Small objects that make large ones."""
STEERED = {
    "of a value": VALUE + b"}" + SETSTATE + b"sb" + HASHED + b"b",
    "of an object": NAMESPACE + b"}" + SETSTATE + b"sb" + HASHED + b"b",
    "of a method": NAMESPACE + b"}" + text("append") + name("__builtin__", "hash") + b"sbNa",
    "by an entry": ATTRIBUTES + EMPTY + SETSTATE + b"s" + HASHED + b"b",
    "by an entry of a list": ATTRIBUTES + EMPTY + text("extend") + name("__builtin__", "set") + b"s(" + HASHED + b"e",
    "of a tensor": TENSOR + HASHED + b"b",
    "of a namespace": SIMPLE + b"}" + SETSTATE + b"s\x85R" + HASHED + b"b",
    "by keywords": SIMPLE + b")}" + SETSTATE + b"s\x92" + HASHED + b"b",
    "of an ordered dict": ORDERED + b")R}" + SETSTATE + b"sb" + HASHED + b"b",
    "by an argument": ATTRIBUTES + b"}" + SETSTATE + b"s\x85R" + HASHED + b"b",
}
"""Objects that take ``__setstate__``, ``append`` or similar methods from the file."""
HASHES = {
    "of a uuid": UUID + UUID_STATE + text("is_safe") + FROZEN + b"sb",
    "of a uuid, later": b"(" + UUID_STATE + KEEP + UUID + KEPT + b"b" + KEPT + text("is_safe") + FROZEN + b"s0l",
    "of a uuid, nested": UUID + UUID_STATE + text("is_safe") + b"K\1\x85sb",
}
"""UUIDs whose `int` is not a number, so that hashing them runs code."""
MEMBERS = {
    attribute: name(module, attribute) + ONE + b"\x85R}" + text("_value_") + text("other") + b"sb"
    for module, attribute in ((CLASSES, "Colour"), ("deepspeed.runtime.zero.config", "ZeroStageEnum"))
}
"""Changes of an enum's members, which the whole process shares."""
FORGED = {
    kind: (forged, words)
    for table, words in (
        (VALUES, r"consent \(.*Settings"),
        (COSTLY, "consent"),
        (STEERED, "consent|state is not a dictionary"),
        (HASHES, r"consent \(.*uuid.UUID"),
        (MEMBERS, r"consent \(.*(Colour|ZeroStageEnum)"),
    )
    for kind, forged in table.items()
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_pickles_are_refused_and_run_no_code(kind: str, tmp_path: Path) -> None:
    """The check before DeepSpeed's load refuses them, too. `trust_pickle` for a class does not allow calls of it."""
    forged, words = FORGED[kind]
    path = write(tmp_path, {"mine": "here"})

    def forge(data: bytes) -> bytes:
        assert data.count(text("here")) == 1
        return data.replace(text("here"), forged)

    edit_pickle(path, forge)
    RUNS.clear()
    for look in (read_trusting_nothing, check_names):
        with pytest.raises(UnsupportedError, match=words):
            look(path)
        if kind in STEERED:
            consent = torch.serialization.safe_globals([argparse.Namespace, types.SimpleNamespace])
            with consent, pytest.raises(UnsupportedError, match=words):
                look(path)
    assert not RUNS


def test_a_class_that_is_harmless_as_a_value_is_refused_in_a_call() -> None:
    value, called = Use(CLASS_NAME, value=True), Use(CLASS_NAME)
    for uses in ([value, called], [called]):
        with pytest.raises(UnsupportedError, match="Settings"):
            check_trusted(dict.fromkeys(uses, "x.pt"))
    check_trusted({value: "x.pt"})
