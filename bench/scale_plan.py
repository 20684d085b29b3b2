"""One rank of thousands, up to its plan, on the load's own path: headers, index, match, wants, claims, judgement.

python bench/scale_plan.py --job moe-10k --script FILE --make 0 8191     works out what these ranks are told
python bench/scale_plan.py --job moe-10k --script FILE --rank 8191       plans, and prints measurements as JSON
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from collectives import AllRanks, ToldComm, count_rows, overhear, silence
from grid import PER_NODE
from jobs import JOBS, Job
from meters import peak_resident_bytes, reset_peak, resident_bytes
from ranks import release_free_memory
from sample import JobTarget, Sampler

from deepspeed_ucp.config import UniversalConfig
from deepspeed_ucp.engine.base import Target
from deepspeed_ucp.formats import places
from deepspeed_ucp.formats.deepspeed import gather as gathering
from deepspeed_ucp.formats.deepspeed.naming import Naming
from deepspeed_ucp.formats.open import open_checkpoint
from deepspeed_ucp.io.checksum import Checked, merge_checks
from deepspeed_ucp.io.memory import pause_collection
from deepspeed_ucp.io.paths import Entry
from deepspeed_ucp.load import prepare as preparing
from deepspeed_ucp.load.context import LoadArguments, LoadContext, LoadReport
from deepspeed_ucp.load.destinations import Buffer
from deepspeed_ucp.load.inventory import join_groups, list_stage_groups, view_engine
from deepspeed_ucp.load.prepare import Work, prepare
from deepspeed_ucp.load.transfer import choose_memory, negotiate
from deepspeed_ucp.plan import LoadPlan, ReadSizes, address_claims
from deepspeed_ucp.plan.rounds import MIN_DIRECT, SELF_READ, SameNode
from deepspeed_ucp.stream import duplicates
from deepspeed_ucp.stream.checks import find_answering, send_checks

FOLDER = "/checkpoints/global_step1000"
COPY_BYTES = 2
"""Of an element of a 16-bit copy."""

STATES = ("fp32", "exp_avg", "exp_avg_sq")
WINDOW = UniversalConfig().window_mb << 20
SIZES = ReadSizes.from_window(WINDOW)


@dataclass
class Script:
    """The messages that ranks receive; most are the same for all ranks.

    Attributes:
        entries: sizes of the folder's files.
        headers: by file, pickled, as a rank may have to read any.
        told: messages of all ranks by step, pickled.
        tables: of each rank that plans, by rank the claims on its blocks.
        masks: by step what some rank needs: records, atoms.
    """

    entries: dict[str, int]
    headers: dict[str, bytes]
    told: dict[str, list[bytes]] = field(default_factory=dict)
    tables: dict[int, list[Any]] = field(default_factory=dict)
    masks: dict[str, Any] = field(default_factory=dict)


@contextmanager
def stand_in(entries: Mapping[str, int], read: Any) -> Iterator[None]:
    """A folder in memory: its listing, and what reads a header."""
    listing = {name: Entry(size, 0.0) for name, size in entries.items()}
    with ExitStack() as stack:
        for module, name, value in (
            (places, "list_entries", lambda folder: listing),
            (gathering, "read_file", lambda folder, name: read(name)),
            (preparing, "check_instances", lambda *_: None),  # which reads some elements
            (Buffer, "fill_in_place", _fill_in_place),  # which looks at memory that there is none of
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def _fill_in_place(buffer: Buffer) -> bool:
    """As before the first step, when masters are what their copies make."""
    buffer.uncommitted = True
    return True


def make_script(job: Job, ranks: Iterable[int]) -> Script:
    """What some ranks of a job are told."""
    headers = {header.name: header for header in job.source.headers()}
    entries = {name: header.size for name, header in headers.items()}
    everyone = AllRanks(0, job.ranks)
    with stand_in(entries, headers.__getitem__), pause_collection():
        index = open_checkpoint(FOLDER, everyone)
    script = Script(entries, {name: pickle.dumps(header) for name, header in headers.items()}, everyone.shared)
    del headers
    script.told |= _ask_tellers(job)
    sampler = Sampler(JobTarget(index, job), SIZES)
    claimed = np.zeros(len(index.stored.records), np.bool_)
    claimed[sampler.touched] = True
    atoms = index.stored.atoms
    needed = [[state in STATES for state in atoms.list_states()]] * len(atoms.storages)
    script.masks = {"transfer.negotiate": claimed, "prepare._join_touched": np.array(needed, np.bool_).reshape(-1)}
    script.tables = {rank: _list_tables(sampler, rank, job.ranks) for rank in ranks}
    return script


def _list_tables(sampler: Sampler, rank: int, ranks: int) -> list[Any]:
    """By rank the claims on a rank's blocks."""
    owned = list(sampler.blocks.owned(rank, sampler.touched))
    claims, one = (
        sampler.list_claims(set(owned)),
        replace(sampler.blocks, size=1),
    )  # all of these blocks are this rank's
    return [address_claims(claims.get(each, ()), one)[0][0] for each in range(ranks)]


def gather_groups(target: Any, comm: Any) -> Any:
    """Gather the param groups of all ranks, as a load does (`inspect_engine`)."""
    return join_groups(comm.each(lambda: list_stage_groups(target)))


def _ask_tellers(job: Job) -> dict[str, list[bytes]]:
    """Return the messages of the ranks that report for their replicas; the other ranks send none."""
    inventory, groups = silence(job.ranks), silence(job.ranks)
    for rank in job.reporters:
        target = job.make_target(rank)
        inventory[rank] = overhear(rank, job.ranks, lambda comm, t=target: view_engine(t, [], comm))
        groups[rank] = overhear(rank, job.ranks, lambda comm, t=target: gather_groups(t, comm))
    return {"inventory.view_engine": inventory, "scale_plan.gather_groups": groups}


@dataclass
class Planned:
    """One rank's result: seconds by phase, peak memory beyond the start, its plan, and the bytes that it received.

    Attributes:
        phases: seconds of the processor.
        clock_seconds: the same by the clock, which knows of other programs too.
        seconds_behind: of what follows the plan, reading and copying left out (:func:`follow`).
    """

    phases: dict[str, float]
    clock_seconds: float
    peak_bytes: int
    seconds_behind: float
    files: int
    headers: int
    most_headers: int
    records: int
    atoms: int
    read_bytes: int
    requests: int
    rounds: int
    claims: int
    steps: dict[str, dict[str, int]]


def follow(work: Work, plan: LoadPlan, target: Target, comm: ToldComm) -> None:
    """What the ranks tell each other behind the plan of a fresh engine: its one pass, checksums, samples, copies.

    Nothing is read. Another rank is taken to have as many checksums for this one as this one has for it.
    """
    _exchange(plan, comm)
    read = [Checked(each.record, each.offset, each.nbytes, 0) for each in plan.reads]
    send_checks(merge_checks(read), find_answering(work.index.stored, comm), comm)
    comm.run(int)
    with mock.patch.object(duplicates, "compare_pairs", side_effect=lambda *_: comm.run(int)):
        duplicates.check_samples(work.index, work.touched, comm)
    held = [(flat.buffer.partition, flat.buffer.parts) for flat in target.flats]
    received = sum(COPY_BYTES * numel * (parts - 1) for numel, parts in held)
    comm.note("copies", received, sum(COPY_BYTES * numel for numel, _ in held))


def _exchange(plan: LoadPlan, comm: ToldComm) -> None:
    """The agreements and exchanges of a pass, as :class:`~deepspeed_ucp.load.exchange.CollectiveReader` makes them."""
    comm.run(int)
    for each in plan.rounds:
        for step in range(each.steps):
            comm.run(int)
            sends, claims = each.select_exchange(comm.rank, step, plan.same_node)
            received, sent = (sum(one.nbytes for ones in part for one in ones) for part in (claims, sends))
            comm.note("rounds", received, sent)
    comm.run(int)


def find_near(rank: int, ranks: int) -> SameNode:
    """The ranks of one rank's machine, which see its staging memory."""
    return np.arange(ranks) // PER_NODE == rank // PER_NODE


class Planner:
    """The steps of a load up to the plan."""

    def __init__(self, job: Job, script: Script, rank: int) -> None:
        self.job, self.script, self.rank = job, script, rank
        self.phases: dict[str, float] = {}
        self.read: set[str] = set()
        self.claims = 0
        self._granted: list[Any] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.phases[name] = time.process_time() - began

    def plan(self) -> Planned:
        job, script = self.job, self.script
        target = job.make_target(self.rank)
        comm = ToldComm(self.rank, job.ranks, script.told, [self._take_tables, self._answer, list], script.masks)
        release_free_memory()
        before = resident_bytes()
        reset_peak()
        began = time.perf_counter()
        with stand_in(script.entries, self._read), pause_collection():
            with self.phase("param groups"):
                named = gather_groups(target, comm)
            with self.phase("headers, index"):
                index = open_checkpoint(FOLDER, comm, Naming(*named))
            with self.phase("inventory, match, wants"):
                config, report = UniversalConfig(patterns=job.patterns), LoadReport(direct=True, reason="")
                load = LoadContext(None, comm, config, LoadArguments(), report)
                work = prepare(load, index, target, with_states=True)
            with self.phase("claims, judgement, plan"):
                choose_memory(work.destinations.buffers, WINDOW, comm, prefer_memory=False)
                near = find_near(self.rank, job.ranks)
                plan = negotiate(work.wants, work.index, comm, SIZES, near)
            planned_in, clock_seconds = dict(self.phases), time.perf_counter() - began
            peak = peak_resident_bytes() - before
            with self.phase("behind the plan"):
                follow(work, plan, target, comm)
        told = sum(len(blob) for blobs in script.told.values() for blob in blobs)
        return Planned(
            planned_in,
            clock_seconds,
            peak + told,
            self.phases["behind the plan"],
            len(script.entries),
            len(self.read),
            -(-(len(script.entries) - 2) // job.ranks),
            len(index.stored.records),
            len(index.stored.atoms),
            plan.nbytes,
            len(plan.reads),
            len(plan.rounds),
            self.claims,
            {name: asdict(step) for name, step in comm.steps.items()},
        )

    def _read(self, name: str) -> Any:
        self.read.add(name)
        return pickle.loads(self.script.headers[name])  # noqa: S301 (of this program)

    def _take_tables(self, tables: list[Any]) -> list[Any]:
        self.claims = count_rows(tables)
        self._granted = [(table[:, 4] == 1) & (table[:, 2] >= MIN_DIRECT) for table in tables]
        return self.script.tables[self.rank]

    def _answer(self, answers: list[Any]) -> list[Any]:
        """Other owners grant long claims and serve short ones in the first round, as nearly all would."""
        told = [
            np.stack([np.where(each, SELF_READ, 0), np.zeros_like(each)], 1).astype(np.int64) for each in self._granted
        ]
        return [answers[rank] if rank == self.rank else each for rank, each in enumerate(told)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--make", type=int, nargs="+", metavar="RANK")
    args = parser.parse_args()
    job = JOBS[args.job]()
    if args.make:
        args.script.write_bytes(pickle.dumps(make_script(job, args.make)))
        return
    script = pickle.loads(args.script.read_bytes())  # noqa: S301 (of this program)
    planned = Planner(job, script, args.rank).plan()
    print(json.dumps({"title": job.title, "ranks": job.ranks, "rank": args.rank, **asdict(planned)}))


if __name__ == "__main__":
    main()
