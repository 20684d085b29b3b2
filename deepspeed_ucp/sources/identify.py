"""Which save a folder holds: a file of model states, one of optimizer states that goes with it, and what they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointError, UcpError, UnsupportedError, shorten
from ..topology import find_precision
from ..wrappers import Form
from .files import Listing
from .findings import Finding, from_error
from .headers import FileHeader
from .save import complete_experts, count_ranks, expect_files, find_degrees

Look = FileHeader | Finding
"""A file's header, or why it cannot be read."""


@dataclass(frozen=True, slots=True)
class SaveFiles:
    """The files of a save.

    Attributes:
        first: headers of the first rank's model states and, where it has some, optimizer states; empty without a save.
        expected: names of all its files, whether they are there or not.
        faults: what is wrong with those that were looked at; without a save, why there is none.
    """

    first: list[FileHeader]
    expected: list[str]
    faults: list[Finding]


def identify_save(listing: Listing, read: Callable[[str], Look]) -> SaveFiles:
    """What the folder holds, from as few of its files as tell it.

    Args:
        read: looks at a file; each is looked at once.
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
    """What keeps a folder from being a save at all."""
    return [replace(each, kind="missing") if each.kind != "unsupported" else each for each in from_error(folder, error)]


class _Folder:
    """A folder's files, as far as they were looked at."""

    def __init__(self, listing: Listing, read: Callable[[str], Look]) -> None:
        self.listing, self.read = listing, read
        self.looks: dict[str, Look] = {}

    def find_first(self, files: Mapping[Any, str], keys: Iterable[Any] | None = None) -> FileHeader | None:
        """The header of the first of some files, in the order of their ranks, that can be read."""
        for key in sorted(files if keys is None else keys):
            name = files[key]
            look = self.looks[name] = self.looks.get(name) or self.read(name)
            if isinstance(look, FileHeader):
                return look
        return None

    def choose(self) -> list[FileHeader]:
        """A model header and, where there is one, an optimizer header that goes with it; both of the lowest rank's.

        Raises:
            CheckpointError: there are two saves, or the optimizer states are missing.
        """
        listing = self.listing
        plain, sharded = self.find_first(listing.model), self.find_first(listing.model_zero3)
        candidates = []
        mate = self._find_mate(plain, Form.PARTITIONS)
        if plain and plain.model and plain.model.optim and not plain.model.optim.traits.is_cut:
            candidates.append([plain])  # shards of ZeRO 1/2 beside it lost their model file to it: leftovers
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
            return [plain]  # the weights alone: enough for load_optimizer_states=False
        known = next((header.name for header in (plain, sharded) if header), "the model states")
        raise CheckpointError(
            f"the optimizer states that go with {known} are missing "
            f"({shorten(sorted(listing.sizes))}). Copy the whole folder, or load with load_optimizer_states=False "
            "where the model states hold the weights (ZeRO 0-2).",
            path=listing.folder,
        )

    def _find_mate(self, model: FileHeader | None, form: Form) -> FileHeader | None:
        """The lowest rank's optimizer file that goes with a model file; files of the saved precision's prefix come
        first.

        Prefixes: engine.py ``_get_zero_ckpt_prefix``.
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
        """The first rank's model states, with what older releases leave out of them where there are experts."""
        header, optims = first[0], self.listing.expert_optim
        beside = first[1] if first[1:] else None
        if beside is None and header.model and header.model.experts:
            beside = self.find_first(optims, (key for key in optims if key[0] == 0))
        return complete_experts(header, beside)

    def infer_degrees(self, first: FileHeader) -> FileHeader:
        """The first rank's model states with the parallel degrees that older releases do not tell.

        Of a pipeline with experts there are no layer files either; the ranks of its first stage hold the same names.
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
        """The model states of the further stages of a pipeline with experts: each tells of its own layers alone."""
        model = first.model
        if model is None or model.module is None or not model.experts:
            return []
        pp, tp = find_degrees(self.listing, model)
        stages = (mp for mp in range(tp, pp * tp, tp) if mp in self.listing.model)
        return [header for mp in stages if (header := self.find_first(self.listing.model, [mp]))]
