"""The ``checkpoint.universal`` section of a ds_config, and the batch sizes that an elastic restart can make."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from .errors import ConfigError, describe_faults, describe_type

SECTION = "checkpoint.universal"
ENVIRONMENT = "DEEPSPEED_UCP"
"""Variable with defaults for engines: a word of ``WORDS``, or JSON of what the section may be."""

WORDS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
"""What the variable may say about on and off, in small or large letters."""

Argument = Literal["load_module_strict", "load_optimizer_states", "load_lr_scheduler_states", "load_module_only"]


class SaveTier(BaseModel):
    """A place that saves go to from memory.

    Attributes:
        place: a folder of tags, or its URL.
        every: of so many saves one goes there.
        keep: how many of the run's saves stay there; all unless it is said.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    place: str
    every: int = Field(default=1, ge=1)
    keep: int | None = Field(default=None, ge=1)

    @field_validator("place")
    @classmethod
    def _find_home(cls, place: str) -> str:
        return os.path.expanduser(place)


class SaveOptions(BaseModel):
    """Saves that do not stop training; ``"save": true`` takes all defaults.

    Attributes:
        memory: folder in which saves lie until they are written, and the newest ones after it: of memory, or of local
            NVMe. It may name variables of the environment.
        keep: whole saves of this run that stay there.
        to: where saves go instead of the folder that the script names.
        wait_s: seconds for which the end of the job waits for what is not written yet, and one node for another's part.
        copies: 1 keeps a copy of each node's part of a save in the next node's memory.
        address: by which the other nodes reach this one; by default that of the way to ``MASTER_ADDR``. It names
            variables of the environment.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    memory: str = "/dev/shm"
    keep: int = Field(default=1, ge=1)
    to: list[SaveTier] = []
    wait_s: float = Field(default=600, ge=0)
    copies: int = Field(default=0, ge=0, le=1)
    address: str | None = None

    @field_validator("to")
    @classmethod
    def _refuse_twice(cls, to: list[SaveTier]) -> list[SaveTier]:
        places = [tier.place.rstrip("/") if "://" in tier.place else os.path.abspath(tier.place) for tier in to]
        if twice := next((tier.place for tier, own in zip(to, places, strict=True) if places.count(own) > 1), None):
            raise ValueError(f"{twice} is named twice: a place has one `every` and one `keep`")
        return to


class UniversalConfig(BaseModel):
    """Options of the plugin for one engine; ``"universal": true`` takes all defaults.

    Attributes:
        mode: ``direct`` reads the normal checkpoint straight into the live buffers. ``atomic`` writes it as an atomic
            checkpoint first, with all ranks of the launch, and loads that; later launches take it as it is.
        atomic_dir: folder that atomic checkpoints go to, as ``<tag>_universal``; the checkpoint's own by default.
        verify: ``crc`` compares every byte read with the CRC32 that training wrote, before any live buffer changes.
        window_mb: staging memory per rank beyond the engine's own buffers, in MiB. An engine that has trained (or reads
            from a store) needs extra memory for rollback; without it, files are read twice.
        threads: reading threads per rank; 0 chooses from the cores that the rank may use.
        preserve_batch_size: keep ``train_batch_size`` on another world by changing ``gradient_accumulation_steps``, and
            ``train_micro_batch_size_per_gpu`` (never upwards) where that is not enough.
        patterns: how tensor parallelism cuts parameters, where the checkpoint and the model do not tell, and which have
            other names or shapes: the name of a family, the path of a YAML file, or rules written out.
        seal: after each save write ``ucp_seal.json`` beside its files, with their sizes and checksums. A load refuses
            files that are not those that were sealed, which nothing else may tell (another run's at the same step).
        fallback: where the newest checkpoint is not whole (files are missing or damaged, or it lacks the seal that
            ``seal`` gives), take the newest one before it that is, with a warning. What is no fault of the files, such
            as classes that need consent, is an error all the same.
        require: where there is nothing to resume, a load is an error, not the begin of a new run.
        param_groups: ``saved`` gives every param group the hyper-parameters of the saved group with its parameters.
            ``live`` keeps this run's groups with their hyper-parameters, however the saved run had grouped its
            parameters (Megatron-DeepSpeed makes other groups at ZeRO 3).
        total_batch: ``saved`` has a trainer that counts steps (Hugging Face's Trainer, Accelerate) go on with the total
            batch of the saved run: on another world the gradient accumulation, and the micro batch where needed, make
            it; else a total batch that differs is refused. ``live`` takes this run's, with a warning.
        arguments: of ``load_checkpoint``, in the place of the caller's: a trainer passes on none of them.
        same_topology: the loader of an unchanged topology: ``deepspeed``, DeepSpeed's own, or ``direct``, the
            plugin's, which is faster and compares checksums.
        also: further folders, or URLs, that hold tags as the one does that is loaded from. Each file is read in the
            nearest place that has the same one, and in the next one where that fails.
        storage_options: options of the stores behind URLs (``endpoint_url``, ``anon``, …; docs/guide.md). The
            environment gives all others.
        save: ``true`` or an object (:class:`SaveOptions`): ``save_checkpoint`` writes into memory, and a process of its
            own from there to where it is to go, while training goes on. Loads take the newest whole save of both.
        hang_timeout_s: seconds without progress after which the torchrun agent kills a rank, if the agent runs with
            ``TORCHELASTIC_ENABLE_FILE_TIMER=1``. The time starts with the first step; loads and saves do not count. It
            must be longer than the longest pause between two calls of the engine. 0 sets no timer.
        trust_pickle: allow custom Python classes in the client state, as ``torch.load(weights_only=False)`` does. Only
            for checkpoints you trust.
    """

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

    def with_tiers(self) -> UniversalConfig:
        """With the places that saves go to among those that are read."""
        tiers = [tier.place for tier in self.save.to] if self.save else []
        return self.model_copy(update={"also": [*self.also, *tiers]}) if tiers else self

    @field_validator("save", mode="before")
    @classmethod
    def _read_switch(cls, value: object) -> object:
        return ({} if value else None) if isinstance(value, bool) else value


def parse_config(ds_config: Mapping[str, Any], defaults: Iterable[tuple[str, object]] = ()) -> UniversalConfig | None:
    """Read ``checkpoint.universal`` from a ds_config dict; None means that the plugin is off for this engine.

    Args:
        defaults: what else has a say, before the ds_config; as for :func:`merge_options`.

    Raises:
        ConfigError: unknown key (the valid one that it is like is named, or all are) or wrong type, or
            ``load_universal`` is written too.
    """
    section = ds_config.get("checkpoint") or {}
    value = section.get("universal", False)
    own = [(f'ds_config: "{SECTION}"', False if value is None else value)] if "universal" in section else []
    options = merge_options([*defaults, *own])
    if options and own and section.get("load_universal"):  # by default both serve, each its own folders
        raise ConfigError(
            'ds_config: "checkpoint.load_universal" (DeepSpeed\'s offline universal checkpoint) and '
            f'"{SECTION}" are both on; keep one of them.'
        )
    return options


def merge_options(said: Iterable[tuple[str, object]]) -> UniversalConfig | None:
    """The options for an engine from all that has a say; None where the plugin is off.

    Args:
        said: by whom, for messages, and what: True, False, an object of options, or None, which says nothing. The last
            one counts, for each option apart, and about on and off.

    Raises:
        ConfigError: something is none of these, or has an unknown key or one of the wrong type.
    """
    on, options = False, dict[str, Any]()
    for who, value in said:
        if value is None:
            continue
        if not isinstance(value, (bool, Mapping)):
            raise ConfigError(
                f"{who} must be true, false or an object, found {describe_type(value)}. {describe_keys()}"
            )
        on = value is not False
        options |= _check_options(who, value) if isinstance(value, Mapping) else {}
    return UniversalConfig.model_validate(options) if on else None


def _check_options(who: str, value: Mapping[Any, Any]) -> dict[str, Any]:
    try:
        UniversalConfig.model_validate(dict(value))
    except ValidationError as error:
        keys = (name for model in (UniversalConfig, SaveOptions, SaveTier) for name in model.model_fields)
        faults = describe_faults(error, keys, describe_keys())
        raise ConfigError(f"{who} is not valid: {faults}") from None
    return dict(value)


def read_environment(variables: Mapping[str, str]) -> tuple[str, object]:
    """What the environment says, as :func:`merge_options` takes it.

    Raises:
        ConfigError: it is neither a word nor JSON; says where, and nothing of the text, which may hold secrets.
    """
    who, text = f"the environment variable {ENVIRONMENT}", variables.get(ENVIRONMENT, "").strip()
    if text.lower() in WORDS:
        return who, WORDS[text.lower()]
    try:
        return who, json.loads(text) if text else None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{who} must be 1, 0, or an object as JSON: {error}") from None


def describe_keys() -> str:
    """The valid keys with types and defaults, for error messages."""
    parts = []
    for name, field in UniversalConfig.model_fields.items():
        kind = getattr(field.annotation, "__name__", "")
        if kind == "Literal":
            kind = " | ".join(repr(choice) for choice in field.annotation.__args__)  # type: ignore[union-attr]
        parts.append(f"{name}: {kind or str(field.annotation).replace('typing.', '')} = {field.default!r}")
    return "Valid keys: " + ", ".join(parts) + "."


def fit_batch(train: int, micro: int | None, gas: int | None, world: int) -> tuple[int, int] | None:
    """Find (micro, gas) with ``micro * gas * world == train``, keeping what is given; None where impossible.

    Of what is not given, ``micro`` is as large as it can be.
    """
    if world < 1 or train % world:
        return None
    share = train // world
    micro = micro or share // (gas or 1)
    gas = gas or share // (micro or 1)
    return (micro, gas) if micro * gas == share else None


def adapt_batch(train: int, micro: int | None, world: int) -> tuple[int, int] | None:
    """(micro, gas) that keep ``train`` on ``world`` ranks with the largest micro batch that is at most ``micro``."""
    if world < 1 or train % world:
        return None
    share = train // world
    best = max(d for d in range(1, min(micro or share, share) + 1) if share % d == 0)
    return best, share // best


def suggest_batch(train: int, micro: int | None, gas: int | None, world: int) -> str:
    """What to write instead of a ``train_batch_size`` that ``world`` ranks cannot make."""
    per_step = world * (micro or 1) * (gas or 1)
    around = (train // per_step * per_step, -(-train // per_step) * per_step)
    sizes = [str(size) for size in dict.fromkeys((per_step,) if micro and gas else around) if size > 0]
    worlds = [str(w) for w in range(1, min(train, 4096) + 1) if fit_batch(train, micro, gas, w)]
    near = sorted(worlds, key=lambda w: abs(int(w) - world))[:6]
    parts = [f"train_batch_size {' or '.join(sizes)} fits {world} data-parallel ranks"]
    if near:
        parts.append(f"train_batch_size {train} fits {', '.join(sorted(near, key=int))} ranks")
    if (micro or gas) and (fit := adapt_batch(train, micro, world)):
        parts.append(
            f"train_micro_batch_size_per_gpu {fit[0]} with gradient_accumulation_steps {fit[1]} keeps it on {world} "
            f'ranks ("checkpoint": {{"universal": {{"preserve_batch_size": true}}}} does that by itself)'
        )
    return "; ".join(parts)


def choose_batch(
    train: int | None, micro: int | None, gas: int | None, world: int, *, preserve: bool = False
) -> tuple[int, int] | None:
    """Hold a ``train_batch_size`` against ``world`` data-parallel ranks.

    Args:
        preserve: other (micro, gas) may be taken (``preserve_batch_size``).

    Returns:
        The (micro, gas) that take the place of those given; None where these stay.

    Raises:
        ConfigError: no micro batch and gradient accumulation give ``train`` on ``world`` ranks; says what would fit.
    """
    if train is None or fit_batch(train, micro, gas, world):
        return None
    if preserve and (fit := adapt_batch(train, micro, world)):
        return fit
    raise ConfigError(
        f"ds_config: train_batch_size {train} cannot be made by {world} data-parallel ranks "
        f"(train_micro_batch_size_per_gpu {micro or 'free'}, gradient_accumulation_steps {gas or 'free'}). "
        f"What would fit: {suggest_batch(train, micro, gas, world)}."
    )
