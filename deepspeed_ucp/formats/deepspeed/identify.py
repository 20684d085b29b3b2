"""Identify the save in a folder: its first model and optimizer states, and the names of all its files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import CheckpointError, UcpError, UnsupportedError, shorten
from ...model.topology import find_precision
from ...model.wrappers import Form
from ..findings import Finding, from_error
from .files import Listing
from .headers import FileHeader
from .save import complete_experts, count_ranks, expect_files, find_degrees

Look = FileHeader | Finding
"""A file's header, or the fault that prevents reading it."""


@dataclass(frozen=True, slots=True)
class SaveFiles:
    """The files of a save.

    Attributes:
        first: headers of the first rank's model states and, if any, optimizer states; empty without a save.
        expected: names of all files that the save must have.
        faults: faults of the files that were read; without a save, the reason.
    """

    first: list[FileHeader]
    expected: list[str]
    faults: list[Finding]


def identify_save(listing: Listing, read: Callable[[str], Look]) -> SaveFiles:
    """Identify the save in a folder from as few files as possible.

    Args:
        read: reads a file's header; it is called once per file.
    """
    folder = _Folder(listing, read)
    try:
        first = folder.choose()
        first[0] = folder.infer_degrees(folder.complete(first))
        expected = expect_files(listing, first, folder.look_at_stages(first[0]))
    except (CheckpointError, UnsupportedError) as error:
        faults = [look for look in folder.looks.values() if isinstance(look, Finding)]
        return SaveFiles([], [], faults or explain_none(listing.folder, error))
    looks = (folder.looks.get(name) for name in expected)
    return SaveFiles(first, expected, [look for look in looks if isinstance(look, Finding)])


def explain_none(folder: str, error: UcpError) -> list[Finding]:
    """Return the findings for a folder that holds no save."""
    return [replace(each, kind="missing") if each.kind != "unsupported" else each for each in from_error(folder, error)]


class _Folder:
    """A folder's files, and the headers read so far."""

    def __init__(self, listing: Listing, read: Callable[[str], Look]) -> None:
        self.listing, self.read = listing, read
        self.looks: dict[str, Look] = {}

    def find_first(self, files: Mapping[Any, str], keys: Iterable[Any] | None = None) -> FileHeader | None:
        """Return the first readable header of some files, in the order of their ranks."""
        for key in sorted(files if keys is None else keys):
            name = files[key]
            look = self.looks[name] = self.looks.get(name) or self.read(name)
            if isinstance(look, FileHeader):
                return look
        return None

    def choose(self) -> list[FileHeader]:
        """Return the lowest rank's model header and, if any, the matching optimizer header.

        Raises:
            CheckpointError: the folder holds two saves, or optimizer states are missing.
        """
        listing = self.listing
        plain, sharded = self.find_first(listing.model), self.find_first(listing.model_zero3)
        candidates = []
        mate = self._find_mate(plain, Form.PARTITIONS)
        if plain and plain.model and plain.model.optim and not plain.model.optim.traits.is_cut:
            candidates.append([plain])  # it has overwritten the model file of any ZeRO 1/2 shards: these are leftovers
        elif plain and mate:
            candidates.append([plain, mate])
        mate = self._find_mate(sharded, Form.RESERVED)
        if sharded and mate:
            candidates.append([sharded, mate])
        if len(candidates) > 1:
            raise CheckpointError(
                f"holds the files of two saves ({candidates[0][0].name} and {candidates[1][-1].name} "
                "do not belong together). Remove the older save's files.",
                path=listing.folder,
            )
        if candidates:
            return candidates[0]
        if plain and plain.model and (plain.model.module or listing.layers) and not listing.optim:
            return [plain]  # weights only: enough for load_optimizer_states=False
        known = next((header.name for header in (plain, sharded) if header), "the model states")
        raise CheckpointError(
            f"the optimizer states that go with {known} are missing "
            f"({shorten(sorted(listing.sizes))}). Copy the whole folder, or load with load_optimizer_states=False "
            "where the model states hold the weights (ZeRO 0-2).",
            path=listing.folder,
        )

    def _find_mate(self, model: FileHeader | None, form: Form) -> FileHeader | None:
        """Return the lowest rank's optimizer header that matches a model header.

        Files with the prefix of the saved precision (engine.py ``_get_zero_ckpt_prefix``) come first.
        """
        if model is None:
            return None
        usual = "bf16_" if find_precision(model.config) == "bfloat16" else ""
        optim = self.listing.optim
        for prefix in sorted({prefix for prefix, _, _ in optim}, key=lambda each: (each != usual, each)):
            header = self.find_first(optim, (key for key in optim if key[0] == prefix))
            if header and header.optim and header.optim.traits.form is form:
                return header
        return None

    def complete(self, first: Sequence[FileHeader]) -> FileHeader:
        """Return the first rank's model header, with the fields that older releases omit from models with experts."""
        header, optims = first[0], self.listing.expert_optim
        beside = first[1] if first[1:] else None
        if beside is None and header.model and header.model.experts:
            beside = self.find_first(optims, (key for key in optims if key[0] == 0))
        return complete_experts(header, beside)

    def infer_degrees(self, first: FileHeader) -> FileHeader:
        """Return the first rank's model header with the parallel degrees that older releases do not store.

        A pipeline with experts has no layer files; ranks of its first stage hold equal names.
        """
        model = first.model
        if model is None or model.module is None or model.degrees or not model.experts:
            return first
        (ranks, _), tp = count_ranks(model), 1
        while tp < ranks and tp in self.listing.model:
            header = self.find_first(self.listing.model, [tp])
            if header is None or header.model is None or set(header.model.module or ()) != set(model.module):
                break
            tp += 1
        return replace(first, model=replace(model, degrees=(ranks // tp, tp)))

    def look_at_stages(self, first: FileHeader) -> list[FileHeader]:
        """Return the model headers of a pipeline's further stages with experts; each describes only its layers."""
        model = first.model
        if model is None or model.module is None or not model.experts:
            return []
        pp, tp = find_degrees(self.listing, model)
        stages = (mp for mp in range(tp, pp * tp, tp) if mp in self.listing.model)
        return [header for mp in stages if (header := self.find_first(self.listing.model, [mp]))]
