"""One rank of thousands up to its plan, by the functions of a load: headers, index, match, wants, claims, plan."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from claims import Claims
from collectives import AllRanks, ScriptedComm, make_empty_messages, record_message
from jobs import JOBS, QUICK_JOBS, Job
from meters import peak_resident_bytes, release_free_memory, reset_peak, resident_bytes

from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.extensions.registry import find_for_load
from deepspeed_ucp.formats import open as opening
from deepspeed_ucp.formats.deepspeed import gather as gathering
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.locations import find_files
from deepspeed_ucp.formats.open import open_checkpoint
from deepspeed_ucp.io.memory import pause_collection
from deepspeed_ucp.io.paths import Entry
from deepspeed_ucp.io.read import Checked, merge_checks
from deepspeed_ucp.load import prepare as preparing
from deepspeed_ucp.load.choice import join_groups, list_stage_groups
from deepspeed_ucp.load.context import LoadContext, LoadReport
from deepspeed_ucp.load.destinations import Buffer, FillPlan
from deepspeed_ucp.load.prepare import prepare, view_engine
from deepspeed_ucp.load.transfer import choose_memory, negotiate
from deepspeed_ucp.plan.rounds import MIN_DIRECT, SELF_READ, WINDOW_PARTS, LoadPlan, split_claims_by_owner
from deepspeed_ucp.stream import duplicates
from deepspeed_ucp.stream.reader import route_checks
from deepspeed_ucp.tensor_parallel.rules import from_config

FOLDER = "/checkpoints/global_step1000"
STATES = ("fp32", "exp_avg", "exp_avg_sq")
PER_NODE = 8
WINDOW = UniversalConfig().window_mb << 20
ALL_JOBS = JOBS | QUICK_JOBS


@dataclass
class Script:
    """The messages to some ranks; most are the same for all of them.

    Attributes:
        entries: sizes of the folder's files.
        headers: pickled headers by file; a rank may read any of them.
        messages: pickled messages of all ranks by step.
        tables: by planned rank, the claims of each rank on its blocks.
        masks: by step, the records and atoms that some rank needs.
    """

    entries: dict[str, int]
    headers: dict[str, bytes]
    messages: dict[str, list[bytes]] = field(default_factory=dict)
    tables: dict[int, list[Any]] = field(default_factory=dict)
    masks: dict[str, Any] = field(default_factory=dict)


@contextmanager
def replace_folder(entries: Mapping[str, int], read: Any) -> Iterator[None]:
    """Replace the checkpoint's folder by a listing and a function that reads a header."""
    listing = {name: Entry(size, 0.0) for name, size in entries.items()}
    with ExitStack() as stack:
        for module, name, value in (
            (opening, "find_files", partial(find_files, list_place=lambda folder: listing)),
            (gathering, "read_file", lambda folder, name: read(name)),
            (preparing, "check_instances", lambda *_: None),  # reads elements
            (Buffer, "detect_recomputable", _try_in_place),  # reads the memory of a live engine
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def _try_in_place(buffer: Buffer) -> bool:
    """Behave as before the first step, when masters equal their copies."""
    buffer.fill_first = True
    return True


def make_script(job: Job, ranks: Iterable[int]) -> Script:
    """Prepare the messages to some ranks of a job."""
    headers = {header.name: header for header in job.source.make_headers()}
    entries = {name: header.size for name, header in headers.items()}
    everyone = AllRanks(0, job.ranks)
    with replace_folder(entries, headers.__getitem__), pause_collection():
        index = open_checkpoint(FOLDER, everyone)
    script = Script(entries, {name: pickle.dumps(header) for name, header in headers.items()}, everyone.shared)
    del headers
    script.messages |= _record_reports(job)
    claims = Claims(index, job)
    claimed = np.zeros(len(index.records), np.bool_)
    claimed[claims.touched] = True
    atoms = index.atoms
    needed = [[state in STATES for state in atoms.list_states()]] * len(atoms.storages)
    script.masks = {"transfer.negotiate": claimed, "prepare._join_touched": np.array(needed, np.bool_).reshape(-1)}
    script.tables = {rank: _make_tables(claims, rank, job.ranks) for rank in ranks}
    return script


def _make_tables(claims: Claims, rank: int, ranks: int) -> list[Any]:
    """Return the tables of claims on a rank's blocks, by the rank that claims."""
    owned = list(claims.blocks.owned(rank, claims.touched))
    claimed, single = claims.list_claims(set(owned)), replace(claims.blocks, size=1)  # this rank owns all these blocks
    return [split_claims_by_owner(claimed.get(each, ()), single)[0][0] for each in range(ranks)]


def gather_groups(target: Any, comm: Any) -> Any:
    """Gather the param groups of all ranks, as a load does (`inspect_engine`)."""
    return join_groups(comm.gather_results(lambda: list_stage_groups(target)))


def _record_reports(job: Job) -> dict[str, list[bytes]]:
    """Return the messages of the ranks that report for their replicas; the other ranks send none."""
    inventory, groups = make_empty_messages(job.ranks), make_empty_messages(job.ranks)
    for rank in job.reporters:
        target = job.target.make_target(rank)
        inventory[rank] = record_message(rank, job.ranks, lambda comm, t=target: view_engine(t, [], comm))
        groups[rank] = record_message(rank, job.ranks, lambda comm, t=target: gather_groups(t, comm))
    return {"prepare.view_engine": inventory, "scale_plan.gather_groups": groups}


@dataclass
class Planned:
    """One rank's result.

    Attributes:
        seconds: processor time up to the plan.
        peak_bytes: peak memory up to the plan, beyond the start.
        headers, most_headers: headers that it read, and its share of all files.
        records: records of the checkpoint.
        requests: number of its reads.
        received: bytes received up to the plan, by step.
        received_later: bytes received after it: checksums and samples.
    """

    seconds: float
    peak_bytes: int
    headers: int
    most_headers: int
    records: int
    requests: int
    received: dict[str, int]
    received_later: dict[str, int]


class Planner:
    """The steps of a load up to the plan."""

    def __init__(self, job: Job, script: Script, rank: int) -> None:
        self.job, self.script, self.rank = job, script, rank
        self.read: set[str] = set()
        self._granted: list[Any] = []

    def plan(self) -> Planned:
        job, script = self.job, self.script
        target = job.target.make_target(self.rank)
        exchanges = [self._take_tables, self._answer, list]
        comm = ScriptedComm(self.rank, job.ranks, script.messages, exchanges, script.masks)
        release_free_memory()
        before = resident_bytes()
        reset_peak()
        start = time.process_time()
        with replace_folder(script.entries, self._read), pause_collection():
            index = open_checkpoint(FOLDER, comm, Naming(*gather_groups(target, comm)))
            config, report = UniversalConfig(patterns=job.target.patterns), LoadReport(direct=True, reason="")
            rules = from_config(job.target.patterns)
            load = LoadContext(None, comm, config, report, rules)
            load = replace(load, extensions=find_for_load(load, index, target, rules))
            fill_plan = prepare(load, index, target, with_states=True)
            choose_memory(fill_plan.buffers, WINDOW, comm, prefer_memory=False)
            near = np.arange(job.ranks) // PER_NODE == self.rank // PER_NODE
            plan = negotiate(fill_plan.wants, fill_plan.index, comm, WINDOW // WINDOW_PARTS, near)
            seconds, received = time.process_time() - start, dict(comm.received)
            peak = peak_resident_bytes() - before
            comm.received.clear()
            exchange_checks(fill_plan, plan, comm)
        return Planned(
            seconds=seconds,
            peak_bytes=peak + sum(len(message) for messages in script.messages.values() for message in messages),
            headers=len(self.read),
            most_headers=-(-(len(script.entries) - 2) // job.ranks),
            records=len(index.records),
            requests=len(plan.reads),
            received=received,
            received_later=dict(comm.received),
        )

    def _read(self, name: str) -> Any:
        self.read.add(name)
        return pickle.loads(self.script.headers[name])  # noqa: S301 (of this program)

    def _take_tables(self, tables: list[Any]) -> list[Any]:
        self._granted = [(table[:, 4] == 1) & (table[:, 2] >= MIN_DIRECT) for table in tables]
        return self.script.tables[self.rank]

    def _answer(self, answers: list[Any]) -> list[Any]:
        """Let other owners grant long claims and serve short ones in the first round, as nearly all would."""
        others = [
            np.stack([np.where(each, SELF_READ, 0), np.zeros_like(each)], 1).astype(np.int64) for each in self._granted
        ]
        return [answers[rank] if rank == self.rank else each for rank, each in enumerate(others)]


def exchange_checks(fill_plan: FillPlan, plan: LoadPlan, comm: ScriptedComm) -> None:
    """Exchange checksums and samples after the plan, without reading; each rank sends as many checksums as this one."""
    read = [Checked(each.record, each.offset, each.nbytes, 0) for each in plan.reads]
    route_checks(merge_checks(read), fill_plan.index, comm)
    with mock.patch.object(duplicates, "compare_pairs", side_effect=lambda *_: comm.run(int)):
        duplicates.check_samples(fill_plan.index, fill_plan.touched, comm)


def make_job_script(name: str, ranks: Iterable[int]) -> Script:
    """Prepare the messages to some ranks of a named job."""
    return make_script(ALL_JOBS[name], ranks)


def plan_rank(name: str, script: Script, rank: int) -> Planned:
    """Plan one rank of a named job."""
    return Planner(ALL_JOBS[name], script, rank).plan()
