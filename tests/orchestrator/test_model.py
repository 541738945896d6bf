"""The Publisher among nodes that fail in every way, on a clock that jumps: hypothesis looks for an
order of events that breaks a promise.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from orchestrator.control.peers import Peers
from orchestrator.control.router import ControlRouter
from orchestrator.control.waiting import Waits
from orchestrator.errors import NodeLost, SpliceError
from orchestrator.protocol.messages import LoadCheckpoint, RunJob
from orchestrator.publication import publication, publisher
from orchestrator.publication.config import PublicationConfig
from orchestrator.publication.publisher import Publisher
from orchestrator.publication.state import State, after_restart
from tests.orchestrator.virtual import MemoryJournal, Replica, Trainer, VirtualLoop, World

KINDS = {
    "trainer": (
        "OpenTransferGroup",
        "PlanPublication",
        "UseLayout",
        "SendWeights",
        "LoadCheckpoint",
        "Forward",
    ),
    "replica": (
        "JoinTransferGroup",
        "PrepareUpdate",
        "PrepareShadow",
        "ReceiveWeights",
        "SwapWeights",
        "CheckCanary",
        "CommitUpdate",
        "LeaveAlias",
    ),
}
FAULTS = st.sampled_from(
    [
        "refuse",
        "dies",
        "gone",
        "restarts",
        "hangs",
        "answers and dies",
        "answer lost",
        "nonsense",
        "mute",
        "flips",
    ],
)
EXAMPLES = int(os.environ.get("SPLICE_MODEL_EXAMPLES", "100"))
STEPS = 100


class Model(RuleBasedStateMachine):
    """One trainer, up to three replicas, one Publisher after the other."""

    @initialize(
        count=st.integers(1, 3),
        mode=st.sampled_from(["in_place", "shadow"]),
        changed=st.booleans(),
        canary=st.booleans(),
        send=st.sampled_from(["tensors", "elements"]),
    )
    def begin(self, count, mode, changed, canary, send):
        publisher.log.disabled = True  # a hundred thousand warnings
        self.loop = VirtualLoop()
        self.was_time = publisher.time
        publisher.time = publication.time = SimpleNamespace(monotonic=self.loop.time)
        self.world = World(self.loop, self.on_shown, changed_only=changed)
        self.made: dict[int, list[int]] = {}
        self.shown: dict[int, list[int]] = {}
        self.newest, self.trained = -1, 0
        self.trainer = Trainer(self.world, "trainer")
        self.replicas = [Replica(self.world, f"inference-{i}") for i in range(count)]
        self.world.members = {n.id: n for n in (self.trainer, *self.replicas)}
        self.journal = MemoryJournal()
        self.config = PublicationConfig(transport="tcp", mode=mode, canary=canary, send=send)
        self.steps: list[tuple[int, str]] = []
        self.publisher = self.a_publisher()

    def a_publisher(self):
        async def restore(folder, phase):
            load = RunJob(
                request_id="load",
                deadline_s=self.config.plan_timeout_s,
                job=LoadCheckpoint(checkpoint_dir=folder),
            )
            await self.world.request("trainer", load, phase=phase)

        return Publisher(
            router=self.world, journal=self.journal, config=self.config, restore=restore
        )

    def teardown(self):
        if hasattr(self, "loop"):
            publisher.time = publication.time = self.was_time
            publisher.log.disabled = False
            self.loop.close()

    # -------------------------------------------------------- promises that hold at every moment

    def on_shown(self, replica):
        """Never the wrong name, never two contents of one name."""
        version = replica.shown
        assert replica.live == self.made[version], f"@{version} shows what is not its content"
        assert self.shown.setdefault(version, list(replica.live)) == replica.live, (
            f"@{version} is two contents"
        )
        # The only replica commits by itself, with its swap; then the journal says at least that it
        # was going to.
        written = "paused" if replica.unconfirmed == version else "committed"
        assert (version, written) in self.journal.steps, (
            f"@{version} is served before it was {written} in the journal"
        )

    # -------------------------------------------------------- what happens

    @rule(
        fault=st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 7)), FAULTS, max_size=3),
        die_in=st.none() | st.none() | st.none() | st.integers(1, 12),
        rots=st.booleans(),
    )
    def publish(self, fault, die_in, rots):
        """`rots`: its checkpoint does, once it has been transferred whole."""
        self.train()
        self.attempt(self.newest, fault, die_in=die_in, rots=rots)

    @rule(
        fault=st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 7)), FAULTS, max_size=2)
    )
    def resync_bare(self, fault):
        """As the server does between jobs."""
        bare, version = self.publisher.bare_replicas(), self.publisher.version
        if bare and version is not None and self.trainer.up:
            self.trainer.state = self.world.disk[f"v{version}"]
            self.attempt(version, fault, only=bare)

    @rule(which=st.integers(0, 2))
    def server_restarts(self, which):
        replica = self.replicas[which % len(self.replicas)]
        if replica.up:
            replica.reset()
            replica.peer.times_ready += 1

    @rule(which=st.integers(0, 3))
    def process_is_replaced(self, which):
        node = [self.trainer, *self.replicas][which % (1 + len(self.replicas))]
        node.up = True
        node.start()

    @rule(which=st.integers(0, 2))
    def replica_goes(self, which):
        replica = self.replicas[which % len(self.replicas)]
        replica.up, replica.peer.state = False, "lost"
        replica.reset()

    @rule()
    def orchestrator_restarts(self):
        self.resume()

    @rule()
    def calm(self):
        """Where nothing fails any more, the next version is published, on every replica."""
        self.world.faults, self.journal.die_in = {}, None
        for node in self.world.members.values():
            if not node.up or node.peer.state != "ready":
                node.up = True
                node.start()
        self.train()
        assert self.attempt(self.newest, {}) is None, "it failed though nothing was wrong"
        assert [r.shown for r in self.replicas] == [self.newest] * len(self.replicas)

    # -------------------------------------------------------- helpers

    def train(self):
        """A version durable on disk; the trainer's process holds it."""
        self.newest, self.trained = self.newest + 1, self.trained + 1
        if not self.trainer.up:
            self.trainer.up = True
            self.trainer.start()
        self.trainer.peer.state = "ready"
        self.trainer.state = self.world.disk[f"v{self.newest}"] = self.trained
        self.made[self.newest] = self.world.weights(self.trained)

    def attempt(self, version, fault, *, only=None, die_in=None, rots=False):
        """What it failed with, or None."""
        there = self.world.nodes("inference")
        replicas = there if only is None else only
        if not replicas:
            return None
        self.journal.is_dead = False
        nodes = [self.trainer, *self.replicas]
        for (which, kind), what in fault.items():
            node = nodes[which % len(nodes)]
            kinds = KINDS["trainer" if node is self.trainer else "replica"]
            self.world.faults[node.id, kinds[kind % len(kinds)]] = what
        others = [] if only is None else [r for r in self.publisher.holding if r not in only]
        self.journal.die_in = die_in

        def report(phase, _):
            if rots and phase in ("shadowed", "verified"):
                self.world.disk[f"v{version}"] = self.trained + 10**6

        publication = self.publisher.publish(
            version,
            checkpoint_dir=f"v{version}",
            replicas=replicas,
            report=report,
            holder=self.trainer.peer.hello.incarnation,
            others=others,
            proves=only is not None,
        )
        try:
            self.loop.run_until_complete(self.with_all_that_follows(publication))
        except (SpliceError, OSError) as error:
            failure = error
        except asyncio.CancelledError:
            self.resume()
            self.loop.run_until_complete(asyncio.sleep(60))
            failure = NodeLost("the orchestrator was killed")
        else:
            failure = None
        finally:
            self.world.faults, self.journal.die_in = {}, None
        assert "cannot go from" not in str(failure) or fault, (
            f"an illegal step without a fault: {failure}"
        )
        assert str(failure), "it failed without a word"
        assert "a defect of the orchestrator" not in str(failure), failure
        return failure

    async def with_all_that_follows(self, publication):
        """Messages that are on their way arrive."""
        task = asyncio.ensure_future(publication)
        self.journal.on_death, self.journal.is_dead = task.cancel, False
        try:
            done, _ = await asyncio.wait([task], timeout=7200)
            assert done, "a publication waited for two hours"
            return task.result()
        finally:
            while self.world.background:
                await asyncio.sleep(1.0)
            for broken in self.world.broken:
                raise broken

    def resume(self):
        """Another orchestrator; nodes that had something under way give it up."""
        for node in self.world.members.values():
            if node.up:
                node.abort()
        self.journal.is_dead = False
        served, state = after_restart(self.journal.steps)
        self.publisher = self.a_publisher()
        self.publisher.resume(version=served, state=state)

    # -------------------------------------------------------- promises that hold between two events

    @invariant()
    def stands_still_between_publications(self):
        if hasattr(self, "publisher"):
            assert self.publisher.state in (State.IDLE, State.POISONED), self.publisher.state

    @invariant()
    def nobody_is_left_paused(self):
        """After whatever failed, every replica that can be reached was told to resume or to give
        up.
        """
        for replica in getattr(self, "replicas", ()):
            assert not (replica.up and replica.peer.state == "ready" and replica.standing), (
                f"{replica.id} was left paused"
            )

    @invariant()
    def all_or_none(self):
        """Those that the publisher counts as holding the served version show it; no other one that
        can be reached shows another.
        """
        publisher = getattr(self, "publisher", None)
        if publisher is None or publisher.state is not State.IDLE or publisher.version is None:
            return
        for replica in self.replicas:
            is_held = publisher.holding.get(replica.id) == replica.peer.life
            if replica.up and replica.peer.state == "ready":
                allowed = (publisher.version,) if is_held else (publisher.version, None)
                assert replica.shown in allowed, (
                    f"{replica.id} shows @{replica.shown}, not @{publisher.version}"
                )


Model.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestModel = Model.TestCase


def test_a_loop_without_a_deadline_fails_at_once():
    loop = VirtualLoop()

    async def forever():
        await loop.create_future()

    with contextlib.closing(loop), pytest.raises(AssertionError, match="nothing has a deadline"):
        loop.run_until_complete(forever())


def test_an_hour_takes_no_time():
    loop = VirtualLoop()
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.now == 3600
    loop.close()


def test_the_world_takes_every_argument_that_the_router_takes():
    real = vars(Peers) | vars(Waits) | vars(ControlRouter)
    names = [name for name in vars(World) if not name.startswith("_") and name in real]
    assert {"request", "send", "wait_ready", "nodes"} <= set(names)
    for name in names:
        if inspect.isfunction(real[name]):
            there = inspect.signature(real[name]).parameters
            assert there.keys() <= inspect.signature(getattr(World, name)).parameters.keys(), name
