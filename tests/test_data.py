"""Sample order: each step has the samples of an uninterrupted run, in any history of worlds and interruptions."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from deepspeed_ucp import engine_state
from deepspeed_ucp.comm import Comm
from deepspeed_ucp.data import ElasticSampler, ElasticStream, Order
from deepspeed_ucp.engine_state import KEY, Carried, collect, load_carried, note_step
from deepspeed_ucp.errors import CheckpointError, ConfigError, MismatchError
from tests.support.ranks import run_ranks


@pytest.fixture(autouse=True)
def end_workers() -> Iterator[None]:
    """End the workers of a test's DataLoaders: the garbage collector would wait 5 s for each, in some other test."""
    yield
    if torch.multiprocessing.active_children():
        for each in gc.get_objects():
            if hasattr(type(each), "_shutdown_workers"):
                each._shutdown_workers()


BATCH = 12
WORLDS = (1, 2, 3, 4, 6, 12)


def make_engine(samples: float = 0, **more: Any) -> SimpleNamespace:
    sizes = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    methods = {name: lambda size=size: size for name, size in sizes.items()}
    return SimpleNamespace(global_samples=samples, **methods, **more)


def make_sampler(rank: int, world: int, **more: Any) -> ElasticSampler:
    return ElasticSampler(**{"dataset": 100, "total_batch": BATCH, "seed": 7, **more}, rank=rank, world=world)


def read(shard: int, start: int) -> Iterator[int]:
    return iter(range(shard * 1000 + start, shard * 1000 + 1000))


SIZES = (17, 40, 1, 0, 25, 33)


def make_stream(rank: int, world: int, **more: Any) -> ElasticStream[int]:
    options: dict[str, Any] = {"sizes": SIZES, "total_batch": BATCH, "seed": 3, **more}
    shards = options.pop("shards", range(len(options["sizes"])))
    return ElasticStream(shards, options.pop("sizes"), read, rank=rank, world=world, **options)


def step_ranks(orders: Sequence[Order], steps: int) -> list[list[int]]:
    """Draw the samples of each step, of all ranks in order; a new iteration starts after each epoch."""
    share = BATCH // len(orders)
    readers = [chain.from_iterable(repeat(order)) for order in orders]
    return [[sample for reader in readers for sample in islice(reader, share)] for _ in range(steps)]


HISTORY = st.lists(st.tuples(st.sampled_from(WORLDS), st.integers(1, 9)), min_size=1, max_size=6)
KINDS = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "by weight": {"weights": np.arange(1, 101)},
    "by length": {"lengths": np.arange(100) % 17},
}


def check_history(make: Callable[..., Order], history: list[tuple[int, int]], **options: Any) -> None:
    """Run a history of (world, steps); each step has the samples of the uninterrupted run on one rank."""
    whole = step_ranks([make(0, 1, **options)], sum(steps for _, steps in history))
    done, state = 0, None
    for world, steps in history:
        orders = [make(rank, world, **options) for rank in range(world)]
        for order in orders:
            if state is not None:
                order.set_state(state)
        assert step_ranks(orders, steps) == whole[done : done + steps]
        done += steps
        state = orders[0].get_state()  # only whole steps have been drawn
        assert state["consumed"] == done * BATCH


@given(HISTORY, st.sampled_from(sorted(KINDS)))
def test_any_history_of_worlds_trains_on_the_same_samples(history: list[tuple[int, int]], kind: str) -> None:
    check_history(make_sampler, history, **KINDS[kind])


@given(HISTORY, st.sampled_from([None, 6]), st.booleans())
def test_any_history_of_worlds_reads_the_same_shards(history: Any, lanes: int | None, shuffle: bool) -> None:
    history = [(world, steps) for world, steps in history if (lanes or BATCH) % world == 0]
    check_history(make_stream, history, lanes=lanes, shuffle=shuffle)


@pytest.mark.parametrize(
    ("make", "samples"),
    [
        (make_sampler, range(100)),
        (make_stream, [1000 * shard + place for shard, size in enumerate(SIZES) for place in range(size)]),
    ],
)
def test_an_epoch_drops_less_than_a_step_and_the_next_has_another_order(make: Any, samples: Sequence[int]) -> None:
    first, second = make(0, 1), make(0, 1)
    second.set_epoch(1)
    taken = list(first)
    assert len({*taken} & {*samples}) == len(taken) == len(samples) // BATCH * BATCH
    assert taken != list(second)


def test_samples_are_drawn_by_weight() -> None:
    drawn = list(make_sampler(0, 1, weights=[0.0] * 50 + [1.0] * 50))
    assert min(drawn) >= 50 and len(set(drawn)) < len(drawn)


def test_steps_have_samples_of_similar_length() -> None:
    lengths = np.random.RandomState(0).randint(1, 1000, 1200)
    steps = np.array(list(make_sampler(0, 1, dataset=1200, lengths=lengths))).reshape(-1, BATCH)
    spread = np.ptp(lengths[steps], axis=1).mean()
    assert sorted(steps.reshape(-1).tolist()) == list(range(1200))
    assert spread < 50 < np.ptp(lengths[np.arange(1200).reshape(-1, BATCH)], axis=1).mean()
    assert lengths[steps[0]].max() == lengths.max()


@pytest.mark.parametrize("make", [make_sampler, make_stream])
def test_float_counts_under_sequence_parallelism_are_accepted(make: Callable[..., Order]) -> None:
    """DeepSpeed divides the world by the sequence-parallel degree: total batch and samples are floats."""
    engine, plain = make_engine(), make(0, 2)
    plain.follow(engine)
    floats, order = make_engine(), make(0, 2, total_batch=float(BATCH))
    order.follow(floats)
    engine.global_samples += 3 * BATCH
    floats.global_samples += 3.0 * BATCH
    assert list(order) == list(plain)
    state = order.get_state()
    assert state == plain.get_state() and all(type(state[key]) is int for key in ("consumed", "epoch", "total_batch"))
    later = make(0, 2)
    later.set_state({**state, "consumed": float(state["consumed"])})  # the form of earlier saves
    assert list(later) == list(plain)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [make_sampler, make_stream])
@pytest.mark.parametrize(("world", "size", "warns"), [(2, 2, 0), (1, 2, 0), (1, 4, 0), (2, 6, 0), (2, 3, 1), (1, 6, 1)])
def test_batches_of_another_size_than_the_engines_are_a_warning(
    make: Any, workers: int, world: int, size: int, warns: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two ranks need three micro batches of two samples. Accelerate may split batches of four over them."""
    stream = make is make_stream
    order = make(0, world, **({"batch_size": size} if stream else {}))
    order.follow(make_engine())
    options: dict[str, Any] = {"dataset": order} if stream else {"dataset": range(100), "sampler": order}
    if stream and workers:
        loader = DataLoader(**options, batch_size=size)  # `caplog` does not see the log of a worker
    else:
        loader = DataLoader(**options, batch_size=size, num_workers=workers)
    next(iter(loader))
    assert [f"batches of {size} samples" in text for text in caplog.messages] == [True] * warns


@pytest.mark.parametrize(
    ("workers", "persistent"), [(0, False), *((workers, each) for workers in (1, 2, 3) for each in (False, True))]
)
def test_a_streams_workers_supply_batches_in_turn(workers: int, persistent: bool) -> None:
    engine = make_engine()
    stream = make_stream(0, 2, batch_size=2)
    stream.follow(engine)
    whole = make_stream(0, 2)
    loader: DataLoader[int] = DataLoader(stream, batch_size=2, num_workers=workers, persistent_workers=persistent)
    if not persistent:
        next(iter(loader))  # a later iteration starts anew
    for _ in range(2):
        expected = list(whole)
        assert torch.cat(list(loader)).tolist() == expected
        engine.global_samples += len(expected) * 2
        note_step(engine)
        whole = copy.copy(whole)


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("change", ["stop", "step", "load", "seed"])
def test_persistent_workers_refuse_a_position_other_than_their_epochs_end(start: str, change: str) -> None:
    """They may have given or prefetched an epoch of which the run trained a part, or the run may have loaded since."""
    sizes, engine = SIZES if change == "stop" else (24,), make_engine()
    stream = make_stream(0, 2, batch_size=2, sizes=sizes)
    stream.follow(engine)
    loader: DataLoader[int] = DataLoader(
        stream, batch_size=2, num_workers=2, prefetch_factor=4, persistent_workers=True, multiprocessing_context=start
    )
    state = stream.get_state()
    for count, _ in enumerate(loader, 1):
        if count % 3 == 0:
            engine.global_samples += BATCH
            note_step(engine)
        if (count, change) in ((1, "stop"), (3, "step")):
            break
    if change in ("load", "seed"):
        stream.set_state({**state, **({"consumed": BATCH} if change == "load" else {"seed": 4, "consumed": 2 * BATCH})})
    with pytest.raises(ConfigError, match="an iteration has ended within its epoch.*without persistent_workers"):
        list(loader)


def load_stateful(order: Order, **more: Any) -> Any:
    """Make a `StatefulDataLoader` over the indices of a sampler, or over a stream."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    options = {"dataset": order} if isinstance(order, ElasticStream) else {"dataset": range(100), "sampler": order}
    return torchdata.StatefulDataLoader(**options, batch_size=2, **more)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_stateful_loader_continues_in_any_world(workers: int, world: int) -> None:
    """Its state counts whole steps, because no save has the gradients of a part of a step."""
    loader = load_stateful(make_sampler(0, 2), num_workers=workers)
    given = [batch.tolist() for _, batch in zip(range(3 * 3 + 1), loader, strict=False)]  # ends within the fourth step
    state = loader.state_dict()
    orders = [make_sampler(rank, world, seed=99) for rank in range(world)]
    loaders = [load_stateful(order, num_workers=workers) for order in orders]
    for each in loaders:
        each.load_state_dict(copy.deepcopy(state))
    after = np.stack([np.concatenate(list(each)).reshape(5, -1) for each in loaders], 1).reshape(5, BATCH)
    whole = np.array(list(make_sampler(0, 1))).reshape(8, BATCH)
    assert np.concatenate(given).tolist() == whole[:4, :6].ravel().tolist()[:20]
    assert after.tolist() == whole[3:].tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [make_sampler, make_stream])
def test_a_stateful_loader_skips_neither_prefetched_samples_nor_those_that_an_engine_has_counted(
    make: Any, workers: int
) -> None:
    more = {"batch_size": 2} if make is make_stream else {}
    engine, order = make_engine(), make(0, 2, **more)
    order.follow(engine)
    batches = iter(loader := load_stateful(order, num_workers=workers))
    for _ in range(2 * 3):
        next(batches)
    engine.global_samples += 2 * BATCH
    later, again = make_engine(2 * BATCH), make(0, 2, seed=99, **more)
    client, state, expected = collect(engine, {"mine": 1}), loader.state_dict(), list(order)
    assert client[KEY]["data"]["consumed"] == 2 * BATCH
    again.follow(later)
    load_carried(later, client)
    assert client == {"mine": 1}
    loader = load_stateful(again, num_workers=workers)
    loader.load_state_dict(state)
    assert np.concatenate(list(loader)).tolist() == expected
    alone = load_stateful(make(0, 2, **more), num_workers=workers)
    alone.load_state_dict(state)
    with pytest.raises(MismatchError, match=r"Call `follow\(engine\)` in this run too"):
        list(alone)


def test_set_epoch_keeps_the_position_in_an_epoch() -> None:
    """Samples that an engine had counted before it was followed do not count."""
    engine, sampler = make_engine(5 * BATCH), make_sampler(0, 1)
    sampler.set_state({**sampler.get_state(), "consumed": 3 * BATCH})
    sampler.set_epoch(0)
    assert sampler.consumed == 3 * BATCH
    sampler.set_epoch(2)
    assert sampler.consumed == 16 * BATCH
    sampler.follow(engine)
    engine.global_samples += 9 * BATCH
    assert (sampler.epoch, sampler.consumed) == (3, 25 * BATCH)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        *((make_sampler, {"dataset": 101}), (make_sampler, {"total_batch": 24}), (make_sampler, {"shuffle": False})),
        *((make_sampler, {"weights": [1] * 100}), (make_sampler, {"lengths": range(100)})),
        *((make_stream, {"lanes": 6}), (make_stream, {"shuffle": False}), (make_stream, {"sizes": SIZES[::-1]})),
        (make_stream, {"shards": range(len(SIZES))[::-1]}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_another_order_is_refused(make: Callable[..., Order], change: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match=f"had {next(iter(change)).replace('dataset', 'size')} .* cannot continue"):
        make(0, 1, **change).set_state(make(0, 1).get_state())
    make(0, 1, **change).set_state(make(0, 3, **change).get_state())


def test_a_moved_folder_of_shards_keeps_their_order() -> None:
    saved, moved, listed = (
        make_stream(0, 1, shards=[Path(folder, name) for name in names])
        for folder, names in (("old", "abcdef"), ("new", "abcdef"), ("old", "fedcba"))
    )
    moved.set_state(saved.get_state())
    with pytest.raises(MismatchError, match="had shards"):
        listed.set_state(saved.get_state())
    assert make_stream(0, 1, shards=[object() for _ in SIZES]).describe()["shards"] is None


def test_streams_and_samplers_refuse_each_others_states() -> None:
    orders = make_stream(0, 1), make_sampler(0, 1, dataset=sum(SIZES))
    for order, other in (orders, orders[::-1]):
        with pytest.raises(MismatchError, match="had lanes (None|12), this run's has .* cannot continue"):
            order.set_state(other.get_state())


def test_another_seed_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    state = make_sampler(0, 1).get_state()
    for seed, rank, world in ((7, 0, 1), (8, 1, 2), (8, 0, 2)):
        assert not caplog.text
        make_sampler(rank, world, seed=seed).set_state(state)
    assert "continues in the order of the saved seed 7, not of this run's 8" in caplog.text


def test_a_shard_that_ends_early_is_an_error_with_its_name() -> None:
    stream = ElasticStream(["a", "b"], [12, 12], lambda _, start: range(start, 11), BATCH, rank=0, world=1, lanes=1)
    with pytest.raises(MismatchError, match="shard '[ab]' ends before its sample 11.*sizes gives it 12"):
        list(stream)


@pytest.mark.parametrize(
    ("given", "of_loader", "message"),
    [
        (None, 2, "pass its batch_size"),
        (2, 3, "of 3 samples, but ElasticStream has batch_size=2"),
        (2, None, "of 1 sample,"),
    ],
)
def test_a_stream_with_workers_needs_the_batch_size(given: int | None, of_loader: int | None, message: str) -> None:
    loader: DataLoader[int] = DataLoader(make_stream(0, 1, batch_size=given), batch_size=of_loader, num_workers=2)
    with pytest.raises(ConfigError, match=message):
        list(loader)


def test_steps_of_another_size_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine, sampler = make_engine(), make_sampler(0, 1)
    sampler.follow(engine)
    engine.global_samples += 2 * BATCH
    collect(engine, {})
    assert not caplog.text
    engine.global_samples += BATCH // 2
    collect(engine, {})
    assert "trained on 30 samples, no multiple of the 12" in caplog.text


def test_two_orders_of_an_engine_need_names(caplog: pytest.LogCaptureFixture) -> None:
    engine, first, second = make_engine(), make_sampler(0, 1), make_sampler(0, 1, seed=8)
    first.follow(engine)
    first.follow(engine)
    second.follow(engine, name="pictures")
    assert not caplog.text
    assert {name: state["seed"] for name, state in collect(engine, {})[KEY].items()} == {"data": 7, "pictures": 8}
    second.follow(engine)
    assert "is not saved any more" in caplog.text


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Attribute ``comm`` is the connection of a rank that is a thread."""
    here = threading.local()
    monkeypatch.setattr(engine_state, "connect", lambda: here.comm if hasattr(here, "comm") else Comm())
    return here


@pytest.mark.parametrize("rank", [0, 1])
def test_the_plugins_key_in_one_ranks_client_state_is_refused_on_all(rank: int, here: threading.local) -> None:
    def work(number: int, comm: Comm) -> str:
        here.comm, engine = comm, make_engine(_config=SimpleNamespace(ucp_config=object()))
        with pytest.raises(ConfigError, match='"deepspeed_ucp"') as caught:
            collect(engine, {KEY: {"mine": 1}} if number == rank else {"mine": 1})
        return str(caught.value)

    assert len(set(run_ranks(2, work))) == 1
    with pytest.raises(ConfigError, match='"deepspeed_ucp"'):  # as DeepSpeed alone saves
        collect(make_engine(), {KEY: {"mine": 1}})


def test_carried_state_that_is_not_loaded_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A sampler whose `follow` is called after the load restarts its data."""
    engine = make_engine()
    make_sampler(0, 1).follow(engine)
    client = collect(engine, {})
    load_carried(make_engine(BATCH), dict(client), wanted=False)
    assert not caplog.text
    load_carried(make_engine(BATCH), dict(client))
    assert "carries data" in caplog.text and "before load_checkpoint" in caplog.text


SOME: tuple[list[str], Any] = (["data"], {"data": 1})


@pytest.mark.parametrize(
    ("ranks", "loaded", "warning"),
    [
        ([SOME, ([], None), SOME], [[1], [], [1]], ""),
        ([SOME, (["data"], None), (["data"], {})], [[1], [], []], "carries no data for ranks 1, 2"),
        ([(["data"], None)] * 2, [[], []], "carries no data:"),
        ([([], None), (["data"], [1])], CheckpointError, "rank 1.*is a list"),
    ],
    ids=["none-on-some", "missing-on-some", "missing", "invalid-on-one"],
)
def test_some_ranks_may_carry_no_state(
    ranks: list[tuple[list[str], Any]], loaded: Any, warning: str, here: threading.local, caplog: Any
) -> None:
    """Ranks have these names in their engine and this state in their file.

    For example, middle stages of a pipeline have no data, at the save, at the load, or at both.
    """

    def work(number: int, comm: Comm) -> list[Any]:
        here.comm, (names, saved) = comm, ranks[number]
        engine, found = make_engine(), list[Any]()
        for name in names:
            engine_state.carry(engine, name, Carried(dict, found.append))
        load_carried(engine, {} if saved is None else {KEY: saved})
        return found

    if loaded is CheckpointError:
        with pytest.raises(loaded, match=warning):
            run_ranks(len(ranks), work)
        return
    assert run_ranks(len(ranks), work) == loaded
    assert warning in caplog.text and bool(warning) == bool(caplog.text)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: make_sampler(0, 5), "cannot be split evenly over 5 ranks: use a positive multiple of 5"),
    (lambda: make_sampler(0, 1, total_batch=6.5), r"total batch of 6\.5"),
    (lambda: make_sampler(0, 1, dataset=11), "fewer than the 12 .* or a smaller total batch"),
    (lambda: make_stream(0, 1, lanes=8), "8 lanes"),
    (lambda: ElasticStream(["a"], [12, 12], read, BATCH, rank=0, world=1), "2 sizes were passed for 1 shards"),
    (lambda: make_sampler(0, 1, weights=[1, 2, 3]), "3 samples were given for 100"),
    (lambda: make_sampler(0, 1, weights=[0] * 100), "weights must be finite"),
    (lambda: make_sampler(0, 1, weights=[1] * 99 + [-1]), "weights must be finite"),
    (lambda: make_sampler(0, 1, weights=[1] * 99 + [float("nan")]), "weights must be finite"),
    (lambda: make_sampler(0, 1, total_batch=24).follow(make_engine()), "12 samples a step"),
    (lambda: make_sampler(0, 1).follow(make_engine(6.5)), r"global_samples is 6\.5.*train_batch_size"),
    *((lambda make=make: make(0, 0), "world 0 is invalid") for make in (make_sampler, make_stream)),
    *((lambda make=make: make(0, -1), "world -1 is invalid") for make in (make_sampler, make_stream)),
    *((lambda make=make: make(2, 2), "rank 2 of 2 is invalid") for make in (make_sampler, make_stream)),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_invalid_arguments_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize("make", [make_sampler, make_stream])
@pytest.mark.parametrize("value", [None, -12, "12", 6.5, float("inf"), {"seed": 1.5}, {"seed": True}], ids=repr)
def test_an_invalid_state_is_refused_and_changes_nothing(make: Any, value: Any) -> None:
    order = make(0, 1)
    before, ((name, value),) = order.get_state(), (value if isinstance(value, dict) else {"consumed": value}).items()
    with pytest.raises(
        CheckpointError, match=f"has {name} {value!r}, expected an integer.* To start the data from its beginning"
    ):
        order.set_state({**before, name: value})
    with pytest.raises(CheckpointError, match=f"has {name} None"):
        order.set_state({key: each for key, each in before.items() if key != name})
    with pytest.raises(CheckpointError, match="is a list, expected a mapping"):
        order.set_state([])
    assert order.get_state() == before
