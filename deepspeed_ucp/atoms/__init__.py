"""The atomic view of a checkpoint: atoms, where their fragments lie, and what belongs to them.

Pure data: no torch, no files. An atom is one (parameter, state) of the model, whole; the index says which byte ranges
of which files make it up (Lian et al., ATC'25, section 4: the atomic checkpoint as the common representation).
"""

from .atom import Atom, Atoms, are_alike, check_coverage
from .held import FileRef, Fragment, Fragments, ParamStorage, PartitionedState, Record, Records, Shard
from .index import (
    ASKED,
    BATCH_SIZES,
    BEGUN,
    AtomicIndex,
    GroupInfo,
    Limits,
    ModelInfo,
    RunState,
    SavedJob,
    StoredAtoms,
    Use,
)
from .keys import (
    COPY,
    ITEMSIZE,
    MASTER,
    MODULE,
    TIED,
    AtomKey,
    ParamKey,
    count,
    find_owner,
    number_layer,
    strip_compiled,
)

__all__ = [
    "ASKED",
    "BATCH_SIZES",
    "BEGUN",
    "COPY",
    "ITEMSIZE",
    "MASTER",
    "MODULE",
    "TIED",
    "Atom",
    "AtomKey",
    "AtomicIndex",
    "Atoms",
    "FileRef",
    "Fragment",
    "Fragments",
    "GroupInfo",
    "Limits",
    "ModelInfo",
    "ParamKey",
    "ParamStorage",
    "PartitionedState",
    "Record",
    "Records",
    "RunState",
    "SavedJob",
    "Shard",
    "StoredAtoms",
    "Use",
    "are_alike",
    "check_coverage",
    "count",
    "find_owner",
    "number_layer",
    "strip_compiled",
]
