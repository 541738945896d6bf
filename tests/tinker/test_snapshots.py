"""Old snapshots are served again: whose turn it is, and what the trainer goes through."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrator.errors import NodeLost
from splice.tinker.books import INITIAL, Books
from splice.tinker.refused import Refused
from splice.tinker.snapshots import Snapshots
from tests.tinker.messages import sft
from tests.tinker.serving import fake_run, serving

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def run(tmp_path, monkeypatch):
    with fake_run(tmp_path, monkeypatch) as (run, trainer, replica):
        run.fake_trainer, run.replica = trainer, replica
        yield run


@pytest.fixture
def books(tmp_path):
    books = Books(tmp_path / "books.sqlite")
    books.set_fact("initial", {"folder": "f", "is_base": True, "version": 0})
    books.set_served(0, INITIAL)
    yield books
    books.close()


class Turns:
    """Snapshots whose weights are numbers: what is served, and who saw what."""

    def __init__(self, books: Books) -> None:
        self.books, self.version, self.seen, self.switches = books, 0, [], []
        self.running, self.most_running = 0, 0
        self.snapshots = Snapshots(books, self.serve_again)

    def serve_again(self, snapshot: int) -> None:
        self.switches.append(snapshot)
        if snapshot > 90:
            raise Refused(422, f"{snapshot} is gone")
        self.publish(snapshot)

    def publish(self, snapshot: int | None = None) -> None:
        self.version += 1
        self.books.set_served(self.version, f"s{self.version}", snapshot=snapshot)

    async def sample(self, snapshot: int, seconds: float = 0.01) -> None:
        async with self.snapshots.turn(snapshot) as version:
            served = self.books.fact("served")
            assert (served["snapshot"], served["version"]) == (snapshot, version)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            await asyncio.sleep(seconds)
            self.running -= 1
            assert self.books.fact("served") == served, "it changed under the sample"
        self.seen.append(snapshot)


def test_samples_of_one_snapshot_run_together_and_others_wait_their_turn(books):
    async def go():
        turns = Turns(books)
        order = [0, 3, 0, 3, 5, 0]
        tasks = []
        for snapshot in order:
            tasks.append(asyncio.ensure_future(turns.sample(snapshot, 0.1)))
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        assert sorted(turns.seen) == sorted(order)
        assert turns.switches == [3, 0, 5], "who waits for the same shares a turn"
        assert turns.most_running > 1, "they did not run together"

    asyncio.run(go())


def test_a_stream_of_samples_lets_others_in(books):
    async def go():
        turns = Turns(books)
        stop = asyncio.Event()

        async def stream():
            while not stop.is_set():
                await turns.sample(0)

        streams = [asyncio.ensure_future(stream()) for _ in range(8)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(turns.sample(7), 10)
        stop.set()
        await asyncio.gather(*streams)

    asyncio.run(go())


def test_nothing_is_sampled_while_another_thread_publishes(books):
    async def go():
        turns = Turns(books)

        def publish() -> None:
            with turns.snapshots.publishing():
                turns.publish()

        with ThreadPoolExecutor() as pool:
            loop = asyncio.get_running_loop()
            work = [loop.run_in_executor(pool, publish) for _ in range(3)]
            await asyncio.gather(*work, *(turns.sample(n % 3) for n in range(30)))
        assert len(turns.seen) == 30

    asyncio.run(go())


def test_a_sample_that_comes_during_a_publication_waits_for_it(books):
    async def go():
        turns = Turns(books)
        begun, go_on = threading.Event(), threading.Event()

        def publish() -> None:
            with turns.snapshots.publishing():
                begun.set()
                go_on.wait(10)
                turns.publish()

        with ThreadPoolExecutor() as pool:
            work = asyncio.get_running_loop().run_in_executor(pool, publish)
            await asyncio.to_thread(begun.wait, 10)
            sample = asyncio.ensure_future(turns.sample(0))  # still noted as served
            await asyncio.sleep(0.05)
            assert turns.seen == []
            go_on.set()
            await asyncio.gather(work, sample)
        assert turns.seen == turns.switches == [0]

    asyncio.run(go())


def test_a_snapshot_that_is_gone_fails_its_own_samples_alone(books):
    async def go():
        turns = Turns(books)
        held = asyncio.ensure_future(turns.sample(0, 0.05))
        await asyncio.sleep(0)
        found = await asyncio.gather(
            turns.sample(91), turns.sample(91), turns.sample(4), return_exceptions=True
        )
        await held
        assert [isinstance(f, Refused) for f in found] == [True, True, False]
        assert turns.switches == [91, 4]

    asyncio.run(go())


def test_a_snapshot_that_is_gone_leaves_nothing_behind(books, monkeypatch):
    """Its error is held by no frame that it holds."""
    held = []

    class Held:
        pass

    def gone(self, snapshot):
        local = Held()
        held.append(weakref.ref(local))
        raise Refused(422, f"{snapshot} is gone")

    monkeypatch.setattr(Turns, "serve_again", gone)

    async def go():
        turns = Turns(books)
        for _ in range(2):
            with contextlib.suppress(Refused):
                await turns.sample(91)
        await asyncio.sleep(0.01)
        # The loop's idle thread may still hold the last call.
        assert held[0]() is None

    gc.disable()
    try:
        asyncio.run(go())
    finally:
        gc.enable()


@pytest.mark.parametrize("when", [0.0, 0.02, 0.06])
def test_a_cancelled_sample_leaves_its_place(books, when):
    async def go():
        turns = Turns(books)
        held = asyncio.ensure_future(turns.sample(0, 0.05))
        await asyncio.sleep(0)
        cancelled = asyncio.ensure_future(turns.sample(1, 5.0))
        await asyncio.sleep(when)
        cancelled.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cancelled
        await asyncio.wait_for(turns.sample(2), 5)
        await held

    asyncio.run(go())


def test_a_sample_cancelled_as_its_turn_comes_gives_it_back(books):
    async def go():
        turns = Turns(books)
        snapshots, real = turns.snapshots, turns.snapshots._next
        cancelled = asyncio.ensure_future(turns.sample(1, 5.0))

        def after_turn() -> None:
            real()
            if snapshots._users:  # it was given, and has not been taken
                cancelled.cancel()

        snapshots._next = after_turn
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert turns.seen == [] and turns.switches == [1]
        await asyncio.wait_for(turns.sample(2), 5)

    asyncio.run(go())


# ---------------------------------------------------------------- over fake nodes


async def published(caller, seq_id: int) -> int:
    """The snapshot of a publication."""
    body = {"model_id": caller.model, "sampling_session_seq_id": seq_id, "seq_id": seq_id}
    made = await caller.result(await caller.post("save_weights_for_sampler", body))
    return caller.service.books.sampler(made["sampling_session_id"])["version"]


async def stepped(caller, seq_id: int) -> None:
    await caller.result(
        await caller.post("forward_backward", sft(model_id=caller.model, seq_id=seq_id))
    )
    await caller.result(await caller.step(seq_id + 1))


async def two_snapshots(caller) -> tuple[int, int]:
    await caller.new_session()
    await caller.new_model()
    await stepped(caller, 1)
    first = await published(caller, 3)
    await stepped(caller, 4)
    return first, await published(caller, 6)


def test_weights_are_the_snapshots_and_the_trainer_keeps_its_own(run):
    async def go():
        async with serving(run.dir, old_snapshots=2) as caller:
            service, trainer = caller.service, run.fake_trainer
            first, second = await two_snapshots(caller)
            trained = list(trainer.weights)
            async with service.sampling._turn(first) as version:
                assert version == second + 1 and service.books.served_snapshot() == first
                assert run.replica.live == [w - 1 for w in trained], "the snapshot's"
                assert trainer.weights == trained, "the trainer's own are back"
            async with service.sampling._turn(second) as version:
                assert version == second + 2 and run.replica.live == trained
            async with service.sampling._turn(0):  # the run's first state
                assert run.replica.live == [w - 2 for w in trained]
            await stepped(caller, 7)
            assert trainer.weights == [w + 1 for w in trained], "it continues where it was"
            assert await published(caller, 9) == second + 4
            with pytest.raises(Refused, match="the newest 2 snapshots are kept"):
                async with service.sampling._turn(first):
                    pass
            folders = sorted(p.name for p in (run.dir / "tinker").glob("*.snapshot"))
            assert len(folders) == 2, "older ones are deleted"

    asyncio.run(go())


def test_a_publication_whose_outcome_is_lost_gives_nobody_other_weights(run, monkeypatch):
    async def go():
        async with serving(run.dir, old_snapshots=2) as caller:
            first, second = await two_snapshots(caller)
            trained, training = list(run.fake_trainer.weights), caller.service.training
            real = training._jobs.publish

            def is_lost(*args):
                real(*args)
                raise NodeLost("no answer")

            with monkeypatch.context() as patch:
                patch.setattr(training._jobs, "publish", is_lost)
                with pytest.raises(NodeLost):
                    training.serve_again(first)
            assert run.replica.live != trained, "the old snapshot is served"
            async with caller.service.sampling._turn(second):
                assert run.replica.live == trained

            jobs = [training._publish_state(job, job) for job in ("one", "two", "one")]
            assert jobs == sorted(set(jobs)), "an earlier outcome is no present version"

    asyncio.run(go())


def test_without_old_snapshots_a_state_that_was_served_again_is_sampled(run):
    """A server with --old-snapshots left its state under another version than the first."""

    async def go():
        async with serving(run.dir, old_snapshots=2) as caller:
            first, second = await two_snapshots(caller)
            async with caller.service.sampling._turn(first) as version:
                pass
        async with serving(run.dir) as caller:
            async with caller.service.sampling._turn(first) as again:
                assert again == version == second + 1
            async with caller.service.sampling._turn(second) as gone:
                assert gone == second, "vLLM refuses this name"

    asyncio.run(go())


def test_pending_gradients_are_not_lost(run):
    """An old snapshot waits for the step; without one it is refused."""

    async def go():
        async with serving(run.dir, old_snapshots=2, gap_timeout_s=1.0) as caller:
            first, _ = await two_snapshots(caller)
            trained = list(run.fake_trainer.weights)
            body = sft(model_id=caller.model, seq_id=7)
            await caller.result(await caller.post("forward_backward", body))
            with pytest.raises(Refused, match="while gradients wait"):
                async with caller.service.sampling._turn(first):
                    pass
            waiting = asyncio.ensure_future(
                asyncio.to_thread(caller.service.training.serve_again, first)
            )
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await caller.result(await caller.step(8))
            await waiting
            assert run.fake_trainer.weights == [w + 1 for w in trained]

    asyncio.run(go())


@pytest.mark.parametrize("after", ["save", "load", "publish"])
def test_a_process_that_ends_within_leaves_no_other_weights(run, after, monkeypatch):
    """Whatever step it ended after, the next request trains the trainer's own state."""

    async def go():
        async with serving(run.dir, old_snapshots=2) as caller:
            first, second = await two_snapshots(caller)
            trained, training = list(run.fake_trainer.weights), caller.service.training
            real = getattr(training._jobs, after)

            def ends(*args):
                real(*args)
                raise SystemExit

            monkeypatch.setattr(training._jobs, after, ends)
            monkeypatch.setattr(training, "_put_back", lambda: None)
            with pytest.raises(SystemExit):
                training.serve_again(first)
            monkeypatch.undo()
            model = caller.model
        async with serving(run.dir, old_snapshots=2) as caller:
            caller.model = model
            await stepped(caller, 7)
            assert run.fake_trainer.weights == [w + 1 for w in trained]
            async with caller.service.sampling._turn(second) as version:
                assert caller.service.training._jobs.served_version() == version
                assert run.replica.live == trained

    asyncio.run(go())
