"""The trainer and the replicas of a publication: requests, aborts and transfer groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from orchestrator.control.open_requests import Answer
from orchestrator.control.router import ControlRouter
from orchestrator.errors import JobFailed, NodeLost, SpliceError
from orchestrator.protocol.messages import (
    AbortSend,
    AbortUpdate,
    AnyMessage,
    ErrorCode,
    InferenceDetail,
    JoinTransferGroup,
    LeaveAlias,
    LeaveTransferGroup,
    OpenRelay,
    OpenTransferGroup,
    Progress,
    ReceiveWeights,
    Rendezvous,
    SendWeights,
    SwapWeights,
    TrainerDetail,
)
from orchestrator.publication.answers import RelayAnswer, all_or_first_error, valid
from orchestrator.publication.config import PublicationConfig
from orchestrator.publication.report import Report

log = logging.getLogger("splice.publisher")
LEAVE_S = 30.0


class Members:
    """Requests to trainer and replicas, and the transfer groups that they share."""

    def __init__(self, *, router: ControlRouter, config: PublicationConfig) -> None:
        self.router, self._config = router, config
        self.joined: dict[str, str] = {}
        """Node in the transfer groups -> its life."""
        self._in_chain = False
        self._asked: dict[str, str] = {}
        """Node -> its newest request that an abort can end."""

    @property
    def trainer_process(self) -> str:
        """The trainer's incarnation."""
        return self.router.peers["trainer"].hello.incarnation

    def lives(self, node_ids: Sequence[str]) -> dict[str, str]:
        """Node -> `Peer.life`, for each node that is known."""
        return {i: self.router.peers[i].life for i in node_ids if i in self.router.peers}

    # ------------------------------------------------------------ asking and telling

    async def ask_all(
        self, replicas: Sequence[str], make: Callable[[str], AnyMessage], *, phase: str
    ) -> dict[str, Answer]:
        """Send each replica its request; the first failure ends the wait."""
        answers = await all_or_first_error(
            self.router.request(r, make(r), phase=phase) for r in replicas
        )
        return dict(zip(replicas, answers, strict=True))

    async def ask(
        self,
        node_id: str,
        request: OpenTransferGroup | SendWeights | ReceiveWeights | SwapWeights,
        *,
        phase: str,
        on_progress: Callable[[str, Progress], None] | None = None,
    ) -> Answer:
        """Send a request that an abort can end."""
        self._asked[node_id] = request.request_id
        return await self.router.request(node_id, request, phase=phase, on_progress=on_progress)

    async def abort(self, replicas: Sequence[str], why: str) -> None:
        """End the transfer under way.

        A restarted orchestrator does not know the requests' ids; its aborts then end any transfer.
        """
        await self._abort_send(why)
        for replica in replicas:
            await self._abort_update(replica, why)

    async def exclude(self, replica: str, why: str) -> None:
        """Have a replica drop its update and serve nothing, because the alias has one version."""
        await self._abort_update(replica, why)
        timeout_s = self._config.commit_timeout_s
        # Nobody waits for the answer: an excluded replica must not hold up the others.
        leave = LeaveAlias(deadline_s=timeout_s, reason=why)
        await self._tell(replica, leave)

    async def _abort_send(self, why: str) -> None:
        request_id = self._asked.get("trainer")
        await self._tell("trainer", AbortSend(reason=why, request_id=request_id))

    async def _abort_update(self, replica: str, why: str) -> None:
        await self._tell(replica, AbortUpdate(reason=why, request_id=self._asked.get(replica)))

    async def _tell(self, node_id: str, message: AbortSend | AbortUpdate | LeaveAlias) -> None:
        try:
            await self.router.send(node_id, message)
        except NodeLost as error:
            log.warning("could not send %s to %s: %s", message.kind, node_id, error)

    # ------------------------------------------------------------ transfer groups

    async def join(self, replicas: Sequence[str], *, report: Report, chain: bool = False) -> None:
        """Join trainer and replicas in transfer groups, once for each set of processes.

        Args:
            chain: whether each replica passes on what it receives, if all have as many workers.

        Raises:
            JobFailed | NodeLost: a node did not join, or was restarted meanwhile.
        """
        members = ["trainer", *replicas]
        wanted = self.lives(members)
        if wanted == self.joined and chain == self._in_chain:
            return
        self._check_nccl(replicas)
        self.joined = {}
        self._in_chain = chain
        chain = chain and len({d.workers for d in self._details(replicas).values()}) == 1
        report("joining", {"replicas": list(replicas)})
        listening: asyncio.Future[dict[str, Rendezvous]] = (
            asyncio.get_running_loop().create_future()
        )

        async def stop_listening(why: str) -> None:
            """Without this abort the trainer waits for the others until its deadline."""
            listening.cancel()
            await self._abort_send(why)

        await all_or_first_error(
            [
                self._open(replicas[:1] if chain else replicas, listening),
                self._join_all(replicas, listening, chain=chain),
            ],
            on_error=stop_listening,
        )
        if self.lives(members) != wanted:
            raise NodeLost(
                "the trainer or a replica was restarted while the transfer group was opened"
            )
        self.joined = wanted

    def _details(self, replicas: Sequence[str]) -> dict[str, InferenceDetail]:
        details = {r: self.router.peers[r].detail for r in replicas}
        if again := sorted(r for r, detail in details.items() if not detail):
            raise NodeLost(f"{', '.join(again)} has started again and is not ready yet")
        return {r: InferenceDetail.model_validate(d) for r, d in details.items()}

    def has_edges(self, replicas: Sequence[str]) -> bool:
        """Whether several ranks send, or a replica has several workers that receive."""
        trainer = TrainerDetail.model_validate(self.router.peers["trainer"].detail)
        workers = [detail.workers for detail in self._details(replicas).values()]
        return trainer.ranks > 1 or max(workers) > 1

    def _check_nccl(self, replicas: Sequence[str]) -> None:
        """NCCL joins no group of two versions, and its error code names neither."""
        if self._config.transport != "nccl":
            return
        ours = self.router.peers["trainer"].hello.packages.get("nccl")
        found = {r: detail.packages.get("nccl") for r, detail in self._details(replicas).items()}
        other = {r: theirs for r, theirs in found.items() if ours and theirs and theirs != ours}
        if other:
            replica, theirs = next(iter(other.items()))
            raise JobFailed(
                code=ErrorCode.PLAN_REFUSED,
                node=replica,
                phase="joining the transfer group",
                message=f"the trainer has NCCL {ours} and vLLM has NCCL {theirs} "
                f"({', '.join(other)}); NCCL joins no group of two versions",
                remedy=f"install nvidia-nccl-cu13=={theirs} in the trainer's environment "
                "(uv pip install --no-deps), then start the trainer again",
            )

    async def _open(
        self, replicas: Sequence[str], listening: asyncio.Future[dict[str, Rendezvous]]
    ) -> None:
        """Have the trainer open a group for each replica; `listening` receives their addresses."""

        def on_progress(_: str, progress: Progress) -> None:
            if progress.phase == "listening" and not listening.done():
                at = progress.detail.get("rendezvous") or {}
                listening.set_result({r: valid("trainer", Rendezvous, at.get(r)) for r in replicas})

        request = OpenTransferGroup(
            deadline_s=self._config.join_timeout_s,
            transport=self._config.transport,
            replicas={r: detail.workers for r, detail in self._details(replicas).items()},
        )
        phase = "opening the transfer group"
        await self.ask("trainer", request, phase=phase, on_progress=on_progress)

    async def _join_all(
        self,
        replicas: Sequence[str],
        listening: asyncio.Future[dict[str, Rendezvous]],
        *,
        chain: bool,
    ) -> None:
        timeout_s = self._config.join_timeout_s
        try:
            where = await asyncio.wait_for(listening, timeout_s)
        except TimeoutError:
            raise JobFailed(
                code=ErrorCode.TRANSFER_TIMEOUT,
                node="trainer",
                phase="opening the transfer group",
                message=f"the trainer did not say where it listens within {timeout_s:g} s",
                remedy="look at the trainer's log",
            ) from None
        first, last = replicas[0], replicas[-1]
        before = await self._open_relays(replicas, where[first].host) if chain else {}
        await self.ask_all(
            replicas,
            lambda r: JoinTransferGroup(
                deadline_s=timeout_s,
                rendezvous=where[first if chain else r],
                before=before.get(r, ()),
                relays=chain and r != last,
            ),
            phase="joining the transfer group",
        )

    async def _open_relays(
        self, replicas: Sequence[str], host: str
    ) -> dict[str, tuple[Rendezvous, ...]]:
        """Have all but the last replica listen. Returns where each but the first one joins."""
        answers = await self.ask_all(
            replicas[:-1],
            lambda _: OpenRelay(
                deadline_s=self._config.join_timeout_s,
                transport=self._config.transport,
                towards=host,
            ),
            phase="joining the transfer group",
        )
        opened = [valid(r, RelayAnswer, a[0].result).rendezvous for r, a in answers.items()]
        return dict(zip(replicas[1:], opened, strict=True))

    async def leave_all(self) -> None:
        """Have all members leave their groups; the next publication joins them again.

        Logs failures, because a member may have ended.
        """
        joined, self.joined = self.joined, {}
        replicas = [i for i in joined if i != "trainer" and self.router.is_connected(i)]
        for node_id in ["trainer", *replicas] if joined else ():
            leave = LeaveTransferGroup(deadline_s=LEAVE_S)
            try:
                await self.router.request(node_id, leave, phase="leaving the transfer group")
            except SpliceError as error:
                log.warning("%s did not leave the transfer group: %s", node_id, error)
