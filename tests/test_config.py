"""The ``checkpoint.universal`` section, and batch sizes on another world."""

from __future__ import annotations

import json
import re
import traceback
from typing import Any

import hjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ucp.config import WORDS, UniversalConfig, adapt_batch, choose_batch, parse_config, read_environment
from deepspeed_ucp.errors import ConfigError
from tests.support.reshard import examples

ON = [("ds_ucp run", True)]


def parse(value: Any) -> UniversalConfig | None:
    return parse_config({"checkpoint": {"universal": value}})


def test_folder_options_expand_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    options = {"also": ["~/mirror", "s3://bucket/~/run"], "atomic_dir": "~/atoms", "save": {"to": [{"place": "~/run"}]}}
    config = parse_config({"checkpoint": {"universal": options}})
    assert config is not None and config.save is not None
    assert config.also == ["/home/me/mirror", "s3://bucket/~/run"]
    assert (config.atomic_dir, config.save.to[0].place) == ("/home/me/atoms", "/home/me/run")


def test_every_option_has_a_default_and_can_be_set() -> None:
    given = {
        "mode": "atomic",
        "atomic_dir": "/fast",
        "verify": "off",
        "window_mb": 16,
        "threads": 3,
        "preserve_batch_size": True,
        "patterns": "bloom",
        "seal": True,
        "fallback": True,
        "require": True,
        "param_groups": "live",
        "total_batch": "live",
        "same_topology": "direct",
        "arguments": {"load_module_only": True},
        "also": ["/local", "s3://bucket/run"],
        "storage_options": {"endpoint_url": "http://localhost:9000"},
        "save": {
            "memory": "/local/nvme",
            "to": [{"place": "s3://bucket/run", "every": 10, "keep": 5}],
            "wait_s": 60.0,
            "copies": 1,
            "address": "$POD_IP",
        },
        "hang_timeout_s": 90.5,
        "trust_pickle": True,
    }
    found = parse(given)
    assert found is not None and found.model_dump() == given
    assert parse(True) == parse({}) == UniversalConfig()


def test_the_guide_and_the_example_have_every_option_and_its_default(pytestconfig: pytest.Config) -> None:
    options = UniversalConfig().model_dump()
    config = hjson.loads((pytestconfig.rootpath / "ds_configs" / "zero1_bf16.json").read_text(encoding="utf-8"))
    assert config["checkpoint"]["universal"] == options
    page = (pytestconfig.rootpath / "docs" / "guide.md").read_text(encoding="utf-8")
    section = re.search(r"^## Options\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL)
    assert section
    documented = dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", section[1], re.MULTILINE))
    assert documented == {name: "none" if value is None else json.dumps(value) for name, value in options.items()}


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"windowmb": 64}, "windowmb"),
        ({"mode": "Direct"}, "mode"),
        ({"mode": 3}, "mode.*direct"),
        ({"atomic_dir": True}, "atomic_dir"),
        ({"verify": "md5"}, "verify"),
        ({"window_mb": "256"}, "window_mb"),
        ({"window_mb": 15}, "window_mb"),
        ({"threads": -1}, "threads"),
        ({"threads": 257}, "threads"),
        ({"preserve_batch_size": 1}, "preserve_batch_size"),
        ({"patterns": 3}, "patterns"),
        ({"save": 1}, "save"),
        ({"save": {"copies": 2}}, "save"),
        ({"save": {"to": [{"every": 2}]}}, "save"),
        ({"save": {"too": []}}, "save"),
        ({"save": {"to": [{"place": "run"}, {"place": "./run/", "every": 10}]}}, "run is named twice"),
        ({"patterns": ("bloom",)}, "patterns"),
        ({"storage_options": "anon"}, "storage_options"),
        ({"hang_timeout_s": -1}, "hang_timeout_s"),
        ({1: 2}, "1"),
        ({"mode": "Direct", "window_mb": 15}, "mode: Input should be 'direct' or 'atomic' .found 'Direct'.*found 15"),
    ],
    ids=str,
)
def test_unknown_keys_and_wrong_types_are_refused(value: dict[Any, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint.universal.*{named}") as error:
        parse(value)
    listed = all(key in str(error.value) for key in UniversalConfig.model_fields)
    assert listed == (named == "1")  # a key that resembles no option
    assert ":  =" not in str(error.value)


@pytest.mark.parametrize("key", ["preserve_batch", "preserve-batch-size", "Preserve_Batch_Sise"])
def test_an_unknown_key_suggests_only_the_nearest_option(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: .*Did you mean 'preserve_batch_size'") as error:
        parse({key: True})
    assert "window_mb" not in str(error.value)
    with pytest.raises(ConfigError, match="'dirct'.*Did you mean 'direct'"):
        parse({"mode": "dirct"})


@pytest.mark.parametrize("value", ["true", "yes", 1, 0, 3, [], ["direct"], 2.5], ids=repr)
def test_sections_of_another_type_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="must be true, false or an object") as error:
        parse(value)
    assert f"a value of type {type(value).__name__}." in str(error.value)


@pytest.mark.parametrize("value", [True, {}])
def test_both_universal_checkpoints_at_once_are_refused(value: Any) -> None:
    for defaults in ([], ON):
        with pytest.raises(ConfigError, match="load_universal.*both on"):
            parse_config({"checkpoint": {"load_universal": True, "universal": value}}, defaults)


def test_later_sources_override_earlier_ones() -> None:
    environment = read_environment({"DEEPSPEED_UCP": ' {"patterns": "bloom", "threads": 2, "seal": true} '})
    defaults = [environment, ("install", {"threads": 3})]
    found = parse_config({}, defaults)
    assert found == UniversalConfig(patterns="bloom", threads=3, seal=True)
    section = {"universal": {"seal": False, "window_mb": 32}}
    assert parse_config({"checkpoint": section}, defaults) == UniversalConfig(patterns="bloom", threads=3, window_mb=32)
    assert parse_config({"checkpoint": {"universal": True}}, defaults) == found
    assert parse_config({"checkpoint": {"universal": False}}, defaults) is None
    assert parse_config({"checkpoint": {"load_universal": True}}, defaults) == found
    assert parse_config({}, [environment, ("install", False)]) is None
    assert parse_config({}, [environment, ("install", None)]) is not None
    assert parse_config({}, [read_environment({}), ("install", None)]) is None


@pytest.mark.parametrize("word", WORDS)
def test_a_word_in_the_environment_turns_the_plugin_on(word: str) -> None:
    source = read_environment({"DEEPSPEED_UCP": f" {word.title()} "})
    assert parse_config({}, [source]) == (UniversalConfig() if WORDS[word] else None)
    assert parse_config({"checkpoint": {"universal": True}}, [source]) == UniversalConfig()
    assert parse_config({}, [source, ("install", True)]) == UniversalConfig()


OPENRLHF = {"zero_optimization": {"stage": 3, "sub_group_size": "auto"}, "checkpoint": {"load_universal": False}}
HUGGING_FACE = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}


@pytest.mark.parametrize(
    ("written", "on"),
    [
        ({}, True),
        ({"checkpoint": {"universal": None}}, False),
        ({"checkpoint": {"load_universal": True, "universal": False}}, False),
        (OPENRLHF, True),
        (OPENRLHF | {"checkpoint": {"load_universal": True}}, True),  # it loads atomic tags
        (HUGGING_FACE, True),  # the defaults of TRL and Axolotl
        (HUGGING_FACE | {"checkpoint": {}}, True),
        (HUGGING_FACE | {"checkpoint": None}, True),
        (HUGGING_FACE | {"checkpoint": {"tag_validation": "Ignore", "use_node_local_storage": True}}, True),
        (OPENRLHF | {"checkpoint": {"load_universal": False, "universal": False}}, False),
    ],
)
def test_only_false_and_null_turn_a_default_off(written: dict[str, Any], on: bool) -> None:
    assert parse_config(written) is None
    assert parse_config(written, ON) == (UniversalConfig() if on else None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "as JSON"),
        ("2", "true, false or an object"),
        ('{"seals": 1}', "seals"),
        ("yes", "line 1 column 1"),
        ('{"storage_options": {"secret": "hunter2"}', "as JSON"),
        ('{"storage_options": "{\\"secret\\": \\"hunter2\\"}"}', "storage_options"),
        ('{"storage_options": ["hunter2"]}', "storage_options"),
        (
            '{"secret": "hunter2", "mode": ["hunter2"], "threads": "hunter2"}',
            "secret.*mode.*threads|mode.*threads.*secret",
        ),
        ('[{"secret": "hunter2"}]', "true, false or an object"),
        ('"hunter2"', "true, false or an object"),
    ],
)
def test_an_invalid_environment_variable_is_named_without_secrets(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"environment variable DEEPSPEED_UCP .*{named}") as error:
        parse_config({}, [read_environment({"DEEPSPEED_UCP": text})])
    assert "hunter2" not in "".join(traceback.format_exception(error.value))


NUMBERS = st.integers(1, 300)
MAYBE = st.none() | st.integers(1, 20)


@examples(300)
@given(train=NUMBERS, micro=MAYBE, gas=MAYBE, world=st.integers(1, 20))
def test_a_batch_is_accepted_or_refused_with_valid_sizes(
    train: int, micro: int | None, gas: int | None, world: int
) -> None:
    exists = any(
        m * g * world == train
        for m in ([micro] if micro else range(1, train + 1))
        for g in ([gas] if gas else range(1, train + 1))
        if m * world <= train
    )
    try:
        assert choose_batch(train, micro, gas, world) is None
        assert exists
    except ConfigError as error:
        assert not exists
        (sizes,) = re.findall(rf"train_batch_size ([\d or]+) fits {world} data-parallel ranks", str(error))
        for size in sizes.split(" or "):
            assert choose_batch(int(size), micro, gas, world) is None, size


@examples(300)
@given(train=NUMBERS, micro=MAYBE, world=st.integers(1, 20))
def test_adapting_chooses_the_largest_allowed_micro_batch(train: int, micro: int | None, world: int) -> None:
    found = adapt_batch(train, micro, world)
    if found is None:
        assert train % world
        return
    assert found[0] * found[1] * world == train
    better = [m for m in range(found[0] + 1, (micro or train) + 1) if train % (m * world) == 0]
    assert not better


def test_an_invalid_batch_is_refused_with_alternatives_or_completed() -> None:
    assert choose_batch(None, 4, 2, 3) is None
    assert choose_batch(64, 4, 4, 2, preserve=True) == (4, 8)
    with pytest.raises(ConfigError) as error:
        choose_batch(64, 4, None, 3, preserve=True)
    text = str(error.value)
    assert "train_batch_size 64 cannot be made by 3 data-parallel ranks" in text
    assert "train_micro_batch_size_per_gpu 4, gradient_accumulation_steps free" in text
    assert "train_batch_size 60 or 72 fits 3 data-parallel ranks" in text
    assert "preserve_batch_size" not in text
    with pytest.raises(ConfigError, match="gpu 4 with gradient_accumulation_steps 8 keeps it on 2"):
        choose_batch(64, 4, 2, 2)
    with pytest.raises(ConfigError, match="cannot be made by 0 data-parallel ranks"):
        choose_batch(8, 2, 2, 0)
