"""The union of all messages, told apart by `kind`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, TypeAdapter

from orchestrator.protocol.messages import answers, client, inference, jobs, peers, trainer

AnyMessage = (
    # client -> orchestrator
    client.SubmitJob | client.CancelJob | client.GetStatus | client.Subscribe | client.StopRun
    # client -> orchestrator -> trainer
    | jobs.NextBatch
    # orchestrator -> trainer and launcher
    | jobs.RunJob
    | trainer.PlanPublication | trainer.OpenTransferGroup | trainer.UseLayout
    | trainer.EncodeChanges | trainer.SendWeights | trainer.AbortSend
    | trainer.ReleaseMemory | trainer.StartTrainer | trainer.StopTrainer
    # orchestrator -> inference node
    | inference.OpenRelay | inference.JoinTransferGroup | inference.LeaveTransferGroup
    | inference.PrepareUpdate | inference.UseEdges | inference.PrepareShadow
    | inference.ReceiveWeights | inference.SwapWeights | inference.CheckCanary
    | inference.CommitUpdate | inference.AbortUpdate | inference.LeaveAlias
    # peers, and answers
    | peers.Hello | peers.Welcome | peers.Rejected | peers.Ready | peers.Unready
    | peers.NodeEnded | peers.EndedDuring | peers.Heartbeat | peers.Shutdown
    | answers.Progress | answers.Completed | answers.Failed | answers.Cancelled | client.Status
)  # fmt: skip  # grouped by direction

ANY_MESSAGE: TypeAdapter[AnyMessage] = TypeAdapter(
    Annotated[AnyMessage, Field(discriminator="kind")]
)
