"""The ``checkpoint.universal`` section, and batch sizes that fit a world."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .errors import ConfigError, describe_faults, describe_type

SECTION = "checkpoint.universal"
ENVIRONMENT = "DEEPSPEED_UCP"
"""Environment variable with defaults for engines: a key of ``WORDS``, or a section as JSON."""

WORDS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
"""Word in the variable, in any case → on or off."""

Argument = Literal["load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only"]


def _expand_home(value: Any) -> Any:
    return [*map(os.path.expanduser, value)] if isinstance(value, list) else value and os.path.expanduser(value)


class SaveTier(BaseModel):
    """A destination of saves from memory: a folder of tags, or its URL."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    place: str
    every: int = Field(default=1, ge=1)
    keep: int | None = Field(default=None, ge=1)

    _find_home = field_validator("place")(_expand_home)


class SaveOptions(BaseModel):
    """Options of non-blocking saves (docs/guide.md); ``"save": true`` takes defaults."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    memory: str = "/dev/shm"
    to: list[SaveTier] = []
    wait_s: float = Field(default=600, ge=0)
    copies: int = Field(default=0, ge=0, le=1)
    address: str | None = None

    @field_validator("to")
    @classmethod
    def _refuse_duplicates(cls, to: list[SaveTier]) -> list[SaveTier]:
        places = [tier.place.rstrip("/") if "://" in tier.place else os.path.abspath(tier.place) for tier in to]
        if twice := next((tier.place for tier, path in zip(to, places, strict=True) if places.count(path) > 1), None):
            raise ValueError(f"{twice} is named twice: a place has one `every` and one `keep`")
        return to


class UniversalConfig(BaseModel):
    """One engine's options (docs/guide.md); ``"universal": true`` takes the defaults."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    mode: Literal["direct", "atomic"] = "direct"
    atomic_dir: str | None = None
    verify: Literal["crc", "off"] = "crc"
    window_mb: int = Field(default=256, ge=16)
    threads: int = Field(default=0, ge=0, le=256)
    preserve_batch_size: bool = False
    patterns: str | dict[str, Any] | list[Any] | None = None
    seal: bool = False
    fallback: bool = False
    require: bool = False
    param_groups: Literal["saved", "live"] = "saved"
    total_batch: Literal["saved", "live"] = "saved"
    same_topology: Literal["deepspeed", "direct"] = "deepspeed"
    arguments: dict[Argument, bool] = {}
    also: list[str] = []
    storage_options: dict[str, Any] | None = None
    save: SaveOptions | None = None
    hang_timeout_s: float = Field(default=1800, ge=0)
    trust_pickle: bool = False

    _find_home = field_validator("atomic_dir", "also")(_expand_home)

    def with_tiers(self) -> UniversalConfig:
        """Return a copy whose ``also`` includes the destinations of saves."""
        tiers = [tier.place for tier in self.save.to] if self.save else []
        return self.model_copy(update={"also": [*self.also, *tiers]}) if tiers else self

    @field_validator("save", mode="before")
    @classmethod
    def _convert_bool(cls, value: object) -> object:
        return ({} if value else None) if isinstance(value, bool) else value


def parse_config(ds_config: Mapping[str, Any], defaults: Iterable[tuple[str, object]] = ()) -> UniversalConfig | None:
    """Read ``checkpoint.universal`` of a ds_config; None if the plugin is off.

    Args:
        defaults: sources of options that the ds_config overrides, as for :func:`merge_options`.

    Raises:
        ConfigError: a key is unknown, a value has a wrong type, or ``load_universal`` is set too.
    """
    section = ds_config.get("checkpoint") or {}
    value = section.get("universal", False)
    explicit = [(f'ds_config: "{SECTION}"', False if value is None else value)] if "universal" in section else []
    options = merge_options([*defaults, *explicit])
    if options and explicit and section.get("load_universal"):  # by default, each loader serves its kind of folders
        raise ConfigError(
            'ds_config: "checkpoint.load_universal" (DeepSpeed\'s offline universal checkpoint) and '
            f'"{SECTION}" are both on; keep one of them.'
        )
    return options


def merge_options(sources: Iterable[tuple[str, object]]) -> UniversalConfig | None:
    """Merge options from several sources; None means that the plugin is off.

    Args:
        sources: (name for messages, value). A value is True, False, an object of options, or None (no statement). Later
            sources override earlier ones, option by option.

    Raises:
        ConfigError: a value is invalid, or has an unknown key or one of the wrong type.
    """
    on, options = False, dict[str, Any]()
    for source, value in sources:
        if value is None:
            continue
        if not isinstance(value, (bool, Mapping)):
            raise ConfigError(
                f"{source} must be true, false or an object, found {describe_type(value)}. {describe_keys()}"
            )
        on = value is not False
        if isinstance(value, Mapping):
            try:
                UniversalConfig.model_validate(dict(value))
            except ValidationError as error:
                keys = (name for model in (UniversalConfig, SaveOptions, SaveTier) for name in model.model_fields)
                faults = describe_faults(error, keys, describe_keys())
                raise ConfigError(f"{source} is not valid: {faults}") from None
            options |= value
    return UniversalConfig.model_validate(options) if on else None


def read_environment(variables: Mapping[str, str]) -> tuple[str, object]:
    """Read the environment variable as a source for :func:`merge_options`.

    Raises:
        ConfigError: it is neither a word nor JSON. The message does not quote the text, which may have secrets.
    """
    source, text = f"the environment variable {ENVIRONMENT}", variables.get(ENVIRONMENT, "").strip()
    if text.lower() in WORDS:
        return source, WORDS[text.lower()]
    try:
        return source, json.loads(text) if text else None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} must be 1, 0, or an object as JSON: {error}") from None


def describe_keys() -> str:
    """Describe the valid keys with types and defaults, for error messages."""
    parts = []
    for name, field in UniversalConfig.model_fields.items():
        kind = getattr(field.annotation, "__name__", "")
        if kind == "Literal":
            kind = " | ".join(repr(choice) for choice in field.annotation.__args__)  # type: ignore[union-attr]
        parts.append(f"{name}: {kind or str(field.annotation).replace('typing.', '')} = {field.default!r}")
    return "Valid keys: " + ", ".join(parts) + "."


def adapt_batch(train: int, micro: int | None, world: int) -> tuple[int, int] | None:
    """Return (micro, gas) that keep ``train`` with the largest micro up to ``micro``."""
    if world < 1 or train % world:
        return None
    share = train // world
    best = max(d for d in range(1, min(micro or share, share) + 1) if share % d == 0)
    return best, share // best


def choose_batch(
    train: int | None, micro: int | None, gas: int | None, world: int, *, preserve: bool = False
) -> tuple[int, int] | None:
    """Check a ``train_batch_size`` for ``world`` data-parallel ranks.

    Args:
        preserve: allow other (micro, gas) values (``preserve_batch_size``).

    Returns:
        New (micro, gas) values, or None if the given ones fit.

    Raises:
        ConfigError: the given values do not fit, and ``preserve`` is false or no values fit.
    """
    per_step, is_complete = world * (micro or 1) * (gas or 1), micro and gas
    if train is None or train == per_step or not (is_complete or train % per_step):
        return None
    fit = adapt_batch(train, micro, world)
    if preserve and fit:
        return fit
    around = (per_step,) if is_complete else (train // per_step * per_step, -(-train // per_step) * per_step)
    sizes = " or ".join(str(size) for size in dict.fromkeys(around) if size > 0)
    advice = f"train_batch_size {sizes} fits {world} data-parallel ranks"
    if fit:
        advice += (
            f"; train_micro_batch_size_per_gpu {fit[0]} with gradient_accumulation_steps {fit[1]} keeps it on {world} "
            f'ranks ("checkpoint": {{"universal": {{"preserve_batch_size": true}}}} does that automatically)'
        )
    raise ConfigError(
        f"ds_config: train_batch_size {train} cannot be made by {world} data-parallel ranks "
        f"(train_micro_batch_size_per_gpu {micro or 'free'}, gradient_accumulation_steps {gas or 'free'}). "
        f"Alternatives: {advice}."
    )
