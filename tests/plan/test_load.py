"""Read requests, offset by offset, of small cases made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_ucp.atoms import Atom, Fragment, Record
from deepspeed_ucp.plan import Part, Request, Want, plan_load
from deepspeed_ucp.plan.load import DISCARD, MAX_PARTS


def make_atom(name: str, numel: int, *fragments: tuple[int, int, int, int], dtype: str = "float32") -> Atom:
    """Fragments as (start, numel, record, byte offset)."""
    return Atom(name, "fp32", (numel,), dtype, tuple(Fragment(*fragment) for fragment in fragments))


def make_plan(
    wants: Sequence[Want], records: Sequence[Record], *, rank: int = 0, size: int = 1, chunk: int = 1 << 20
) -> tuple[Request, ...]:
    """Requests of one rank, by record and offset for others than rank 0; every wanted atom counts as touched."""
    plan = plan_load(wants, [want.atom for want in wants], records, rank, size, chunk)
    assert plan.nbytes == sum(request.nbytes for request in plan.requests)
    return plan.requests if rank == 0 else tuple(sorted(plan.requests, key=lambda r: (r.record, r.offset)))


def dp4() -> tuple[Atom, list[Record]]:
    """12 elements in four ranks' files, 3 each, behind a header of 64 bytes."""
    atom = make_atom("w", 12, (0, 3, 0, 0), (3, 3, 1, 0), (6, 3, 2, 0), (9, 3, 3, 0))
    return atom, [Record(file, 64, 12, 0) for file in range(4)]


def test_dp4_to_dp3_the_middle_rank_reads_the_end_of_one_file_and_the_start_of_the_next() -> None:
    atom, records = dp4()
    assert make_plan([Want(atom, 4, 4, buffer=5, offset=100)], records, rank=1, size=3) == (
        Request(1, 4, 8, (Part(8, 5, 100),)),
        Request(2, 0, 8, (Part(8, 5, 102),)),
    )


def test_dp4_to_dp8_every_rank_reads_its_own_part_only() -> None:
    atom, records = dp4()
    plans = [
        make_plan([Want(atom, low, min(2, 12 - low), 0, 0)], records, rank=low // 2, size=8) for low in range(0, 12, 2)
    ]
    assert [[(r.record, r.offset, r.nbytes) for r in plan] for plan in plans] == [
        [(0, 0, 8)],
        [(0, 8, 4), (1, 0, 4)],
        [(1, 4, 8)],
        [(2, 0, 8)],
        [(2, 8, 4), (3, 0, 4)],
        [(3, 4, 8)],
    ]


def test_dp4_to_dp1_one_rank_reads_everything_into_consecutive_positions() -> None:
    atom, records = dp4()
    plan = make_plan([Want(atom, 0, 12, 0, 0)], records)
    assert [request.parts for request in plan] == [(Part(12, 0, position),) for position in (0, 3, 6, 9)]


def test_neighbours_in_a_record_become_one_request_for_several_buffers() -> None:
    first, second = make_atom("a", 3, (0, 3, 0, 0)), make_atom("b", 2, (0, 2, 0, 12))
    records = [Record(0, 64, 20, 0)]
    assert make_plan([Want(second, 0, 2, 1, 7), Want(first, 0, 3, 0, 0)], records) == (
        Request(0, 0, 20, (Part(12, 0, 0), Part(8, 1, 7))),
    )


def test_neighbouring_records_stay_apart() -> None:
    """Also where the offset in the second would follow the end in the first."""
    first, second = make_atom("a", 3, (0, 3, 0, 0)), make_atom("b", 2, (0, 2, 1, 12))
    records = [Record(0, 64, 12, 0), Record(0, 76, 20, 0)]
    plan = make_plan([Want(first, 0, 3, 0, 0), Want(second, 0, 2, 0, 3)], records, size=2)
    assert [(r.record, r.offset, r.nbytes) for r in plan] == [(0, 0, 12), (1, 12, 8)]


def test_requests_follow_files_and_offsets_whatever_the_order_of_records_and_wants() -> None:
    atoms = [make_atom(name, 1, (0, 1, record, 0)) for name, record in (("a", 0), ("b", 1), ("c", 2))]
    records = [Record(1, 64, 4, 0), Record(0, 200, 4, 0), Record(0, 64, 4, 0)]
    plan = make_plan([Want(atom, 0, 1, 0, i) for i, atom in enumerate(atoms)], records)
    assert [request.record for request in plan] == [2, 1, 0]


def test_requests_are_cut_at_the_chunk_at_whole_elements() -> None:
    atom = make_atom("w", 5, (0, 5, 0, 0))
    plan = make_plan([Want(atom, 0, 5, 0, 3)], [Record(0, 0, 20, 0)], chunk=10)
    assert plan == (
        Request(0, 0, 8, (Part(8, 0, 3),)),
        Request(0, 8, 8, (Part(8, 0, 5),)),
        Request(0, 16, 4, (Part(4, 0, 7),)),
    )


def test_positions_count_elements_of_any_size() -> None:
    atom = make_atom("w", 6, (0, 6, 0, 2), dtype="bfloat16")
    plan = make_plan([Want(atom, 1, 4, 0, 9)], [Record(0, 0, 14, 0)], chunk=4, rank=1, size=2)
    assert plan == (Request(0, 4, 4, (Part(4, 0, 9),)), Request(0, 8, 4, (Part(4, 0, 11),)))


def test_padding_is_read_for_the_checksum_by_one_rank_and_joins_its_neighbours() -> None:
    atoms = [make_atom("a", 2, (0, 2, 0, 0)), make_atom("b", 1, (0, 1, 0, 12))]
    wants = [Want(atom, 0, atom.numel, 0, i) for i, atom in enumerate(atoms)]
    assert make_plan(wants, [Record(0, 64, 20, 0)]) == (
        Request(0, 0, 20, (Part(8, 0, 0), Part(4, DISCARD, 0), Part(4, 0, 1), Part(4, DISCARD, 0))),
    )


def test_padding_of_record_n_goes_to_rank_n_modulo_size() -> None:
    atoms = [make_atom(f"a{i}", 1, (0, 1, i, 0)) for i in range(4)]
    records = [Record(i, 0, 12, 0) for i in range(4)]
    plans = [plan_load([], atoms, records, rank, 3, 64).requests for rank in range(3)]
    assert [[(r.record, r.offset, r.nbytes) for r in plan] for plan in plans] == [
        [(0, 4, 8), (3, 4, 8)],
        [(1, 4, 8)],
        [(2, 4, 8)],
    ]


def test_bytes_that_two_atoms_share_are_no_padding() -> None:
    atoms = [make_atom("a", 4, (0, 4, 0, 0)), make_atom("b", 2, (0, 2, 0, 4))]
    assert plan_load([], atoms, [Record(0, 0, 16, 0)], 0, 1, 64).requests == ()


def test_records_that_nobody_touches_are_not_read() -> None:
    atom = make_atom("a", 1, (0, 1, 1, 0))
    plan = make_plan([Want(atom, 0, 1, 0, 0)], [Record(0, 0, 100, 0), Record(0, 100, 4, 0)])
    assert [(request.record, request.nbytes) for request in plan] == [(1, 4)]


def test_a_request_has_no_more_parts_than_the_kernel_takes() -> None:
    atoms = [make_atom(f"a{i}", 1, (0, 1, 0, 4 * i)) for i in range(600)]
    plan = make_plan([Want(atom, 0, 1, 0, 2 * i) for i, atom in enumerate(atoms)], [Record(0, 0, 2400, 0)])
    assert [len(request.parts) for request in plan] == [MAX_PARTS, 600 - MAX_PARTS]
    assert [request.offset for request in plan] == [0, 4 * MAX_PARTS]


def test_wanting_nothing_reads_nothing() -> None:
    atom, records = dp4()
    assert plan_load([], [], records, 0, 1, 64).requests == ()
    assert plan_load([Want(make_atom("e", 0), 0, 0, 0, 0)], [], records, 0, 1, 64).requests == ()
    assert plan_load([Want(atom, 3, 0, 0, 0)], [], records, 0, 1, 64).requests == ()
