"""Batches ahead of their jobs at a real trainer: the same bits and the same refusals as without."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from orchestrator.protocol.frames import Envelope
from orchestrator.protocol.messages import (
    DropBatch,
    Forward,
    ForwardBackward,
    LoadCheckpoint,
    OptimParams,
    OptimStep,
    ReleaseMemory,
    SaveCheckpoint,
    Shutdown,
    StageBatch,
    TrainLora,
    TrainMerged,
    batch_specs,
    forward_specs,
)
from tests.trainer_node.data import arrays
from tests.trainer_node.test_node import Orchestrator, node, training
from trainer_node.batch import BatchError
from trainer_node.staging import MOST_HELD, Staging


def files(folder: Path) -> dict[str, bytes]:
    """What a step left on the disk; the index of the state has a random id, generators are no numbers of the step, the marker has their hashes."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return {name: data for name, data in found.items() if not name.startswith(("rank_", "state/.metadata", "COMPLETE"))}


class Ahead:
    """A node whose batches are sent while a forward pass runs."""

    def __init__(self, control: Orchestrator) -> None:
        self.control = control
        values = arrays()
        tokens, lengths = values["tokens"], values["sequence_lengths"]
        self.scoring = {"tensors": forward_specs(num_sequences=len(lengths), num_tokens=len(tokens))}
        self.scored = [tokens.tobytes(), lengths.tobytes()]

    def stage(self, job_id: str, fields: dict, buffers: list[bytes]) -> None:
        """While another request runs."""
        running = self.control.start(Forward, self.scored, **self.scoring)
        message = StageBatch(job_id=job_id, tensors=fields["tensors"], loss=fields.get("loss"))
        self.control._send(message, buffers)
        assert self.control.finish(running).message.kind == "Completed"

    def both(self, kind, fields: dict, buffers: list[bytes], *, job_id: str, reset: str = "", **more) -> list:
        """The request's ends, (message, buffers): with its batch, then, put back to the checkpoint `reset`, with the batch staged."""
        whole = self.control.ask(kind, buffers, **fields, **more)
        if reset:
            self.control.ok(LoadCheckpoint, checkpoint_dir=reset)
        self.stage(job_id, fields, buffers)
        return [whole, self.control.ask(kind, staged=job_id, **fields, **more)]


def same_end(whole, named) -> None:
    """Metrics, buffers or refusal; what was measured in seconds aside."""
    (a, a_buffers), (b, b_buffers) = whole, named
    assert a_buffers == b_buffers
    a, b = a.model_dump(exclude={"request_id"}), b.model_dump(exclude={"request_id"})
    for end in (a, b):
        result = end.get("result", {})
        result.pop("seconds", None)
        metrics = result.get("metrics", {})
        result["metrics"] = {k: v for k, v in metrics.items() if not k.startswith("seconds")}
    assert a == b


def check_routing(ahead: Ahead, batch: dict, buffers: list[bytes], *, start: str) -> None:
    """Experts of the model are replayed; others are refused in the same words, which leaves what is pending."""
    sizes = {"num_sequences": len(arrays()["sequence_lengths"]), "num_tokens": len(arrays()["tokens"])}
    fields = batch | {"tensors": batch_specs(**sizes, optional=["routed_experts"], routing=(2, 2))}
    experts = np.tile(np.array([3, 1], dtype=np.int32), (sizes["num_tokens"], 2, 1))
    ahead.control.ok(LoadCheckpoint, checkpoint_dir=start)
    ends = ahead.both(ForwardBackward, fields, [*buffers, experts.tobytes()], job_id="routed", reset=start)
    assert ends[0][0].kind == "Completed"
    same_end(*ends)
    ends = ahead.both(ForwardBackward, fields, [*buffers, (experts + 2).tobytes()], job_id="badly-routed")
    assert (ends[0][0].code, "is [5, 3], not 2 different experts below 4" in ends[0][0].message) == ("bad_input", True)
    same_end(*ends)


def test_what_comes_when_staging_has_ended_is_not_kept():
    def share(envelope, *, stop=None):
        if envelope is not None:
            raise MemoryError("no room for the batch")

    staging = Staging(lambda *_: None, share=share, is_root=True)
    for n in range(4):
        staging.receive(
            Envelope(
                message=StageBatch(job_id=f"j{n}", tensors=batch_specs(num_sequences=1, num_tokens=1), loss=None), buffers=()
            )
        )
        staging._thread.join(10) if n == 0 else None
    assert not staging.holds("j0") and staging._inbox.empty() and not staging._held
    assert staging.claim("j3", timeout_s=5) is None


@pytest.mark.parametrize(("name", "ranks", "parallel"), [("dense_tied", 1, {}), ("moe", 2, {"expert": 2})])
def test_the_same_bits_and_the_same_refusals(name: str, ranks: int, parallel: dict, models, tmp_path: Path) -> None:
    with node(models[name], tmp_path, ranks=ranks, **parallel) as (control, process):
        ahead = Ahead(control)
        start = str(tmp_path / "start")
        control.ok(SaveCheckpoint, version=0, checkpoint_dir=start)
        fields, buffers = training()

        # Six steps, durable.
        many = fields | {"version": 1, "mini_batch_sequences": 2, "epochs": 2}
        control.ok(TrainMerged, buffers, checkpoint_dir=str(tmp_path / "whole"), **many)
        control.ok(LoadCheckpoint, checkpoint_dir=start)
        ahead.stage("steps", fields, buffers)
        result, _ = control.ok(TrainMerged, staged="steps", checkpoint_dir=str(tmp_path / "named"), **many)
        assert [phase for _, phase, _ in control.progress] == ["training"] * 7 + ["saving"]
        assert control.progress[0][2] == {"staged": True}
        assert [m["num_sequences"] for m in result["steps"]] == [2, 2, 1] * 2
        assert result["metrics"]["tokens"] == sum(m["tokens"] for m in result["steps"])
        whole, named = files(tmp_path / "whole"), files(tmp_path / "named")
        assert "adapter/adapter_model.safetensors" in whole and whole == named

        # Gradients, then a step; and a forward pass, whose batch waits in host memory while the model is offloaded.
        control.ok(LoadCheckpoint, checkpoint_dir=start)
        batch = {"loss": fields["loss"], "tensors": fields["tensors"]}
        same_end(*ahead.both(ForwardBackward, batch, buffers, job_id="gradients", reset=start))
        control.ok(OptimStep, optim=OptimParams(lr=1e-2))
        whole = control.ask(Forward, ahead.scored, **ahead.scoring)
        ahead.stage("scores", ahead.scoring, ahead.scored)
        control.ok(ReleaseMemory)
        same_end(whole, control.ask(Forward, staged="scores", **ahead.scoring))

        # Refused batches: the same code, phase and words; what is pending stays.
        control.ok(ForwardBackward, buffers, **batch)
        for field, value, said in (
            ("tokens", -7, "tokens[1] = -7"),
            ("advantages", np.nan, "advantages[1] = nan is not finite"),
        ):
            values = arrays()
            values[field][10] = value
            _, bad = training(values)
            ends = ahead.both(TrainLora, fields, bad, job_id=f"bad-{field}", output_dir=str(tmp_path / "never"))
            assert (ends[0][0].code, ends[0][0].phase, said in ends[0][0].message) == ("bad_input", "training", True)
            same_end(*ends)
        assert not (tmp_path / "never").exists()

        if name == "moe":
            check_routing(ahead, batch, buffers, start=start)

        # Not there: never was, dropped, or taken already. Nothing changes, and the request goes through with its batch.
        ahead.stage("dropped", fields, buffers)
        control.urgent(DropBatch(job_id="dropped"))
        for job_id in ("never", "dropped", "scores"):
            refused = control.refused(ForwardBackward, staged=job_id, **batch)
            assert (refused.code, job_id in refused.message) == ("not_staged", True)
        assert control.ok(ForwardBackward, buffers, **batch)[0]["pending_batches"] == 2

        control.urgent(Shutdown())
        assert process.wait(60) == 0


def envelope(job_id: str, kind=StageBatch) -> Envelope:
    more = {"tensors": (), "loss": None} if kind is StageBatch else {}
    return Envelope(message=kind(job_id=job_id, **more))


def test_what_is_held_is_bounded_and_what_is_claimed_stays() -> None:
    """Newest first to stay; a claimed batch is nobody else's; a refusal is raised where the batch is asked for."""

    def check(message, buffers):
        if message.job_id == "bad":
            raise BatchError("sequence 0: no good")
        return message.job_id

    staging = Staging(check, share=lambda envelope, stop=None: envelope, is_root=True)
    names = [f"job-{i}" for i in range(MOST_HELD + 2)]
    staging.receive(envelope(names[0]))
    claimed = staging.claim(names[0], timeout_s=5)
    for name in names[1:]:
        staging.receive(envelope(name))
    assert claimed.result(5) == names[0]
    assert [n for n in names if staging.holds(n)] == names[2:]
    staging.receive(envelope(names[-1], DropBatch))
    assert staging.claim(names[-1], timeout_s=0.05) is None
    staging.receive(envelope("bad"))
    with pytest.raises(BatchError, match="no good"):
        staging.claim("bad", timeout_s=5).result(5)
    staging.close()


def test_a_broken_group_turns_staging_off() -> None:
    """The batches of jobs are then not here, which their requests are told; a rank that waits for one hears of it at once."""
    broken = threading.Event()

    def share(envelope, *, stop=None):
        broken.wait(10)
        raise RuntimeError("Connection closed by peer")

    staging = Staging(lambda *_: None, share=share, is_root=False)
    threading.Timer(0.1, broken.set).start()
    assert staging.claim("job", timeout_s=20) is None
    staging.receive(envelope("job"))
    assert not staging.holds("job")
    staging.close()
