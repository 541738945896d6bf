"""The node as real processes, driven over a real ROUTER, sending to a real TCP receiver
in this process.
"""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from orchestrator.errors import SpliceError
from orchestrator.processes.restarts import EXIT_AFRESH
from orchestrator.protocol.config import ParallelConfig, TrainerConfig
from orchestrator.protocol.messages import (
    AbortSend,
    ExportHf,
    Forward,
    ForwardBackward,
    KlSpec,
    LeaveTransferGroup,
    LoadAdapter,
    LoadCheckpoint,
    LossSpec,
    Manifest,
    OpenTransferGroup,
    OptimParams,
    OptimStep,
    PlanPublication,
    ReleaseMemory,
    Rendezvous,
    SaveCheckpoint,
    SendWeights,
    Shutdown,
    TrainLora,
    TrainMerged,
    UseLayout,
    WireChunk,
    WireLayout,
    batch_specs,
)
from tests.trainer_node import bounds
from tests.trainer_node.conftest import REPO, Started, child_env
from tests.trainer_node.data import arrays, training
from tests.trainer_node.harm import spoil
from tests.trainer_node.metrics_page import SAMPLER, documented
from tests.trainer_node.served_node import TOKEN, Orchestrator, node, rank_process
from tests.trainer_node.tiny import VOCAB
from tests.trainer_node.tools import slow_check, unfreeable
from tests.weight_transfer.peer import in_chunks, receive_chunks
from trainer_node.node import EXIT_DIVERGED
from weight_transfer.digest import tensor_digest
from weight_transfer.groups import join_tcp

CHUNK_BYTES = 1 << 16


class Receiver:
    """A replica of one worker: joins, then receives once per call of `receive`."""

    def __init__(self, rendezvous: dict) -> None:
        self._where = Rendezvous.model_validate(rendezvous)
        self.group = None
        self.error: Exception | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._thread = threading.Thread(target=self._join, daemon=True)
        self._thread.start()

    def _join(self) -> None:
        self.group = join_tcp(self._where, rank=self._where.senders, deadline_s=30)

    def receive(
        self, manifest: Manifest, layout: WireLayout, *, leave_at: int | None = None
    ) -> None:
        """Receive the layout's chunks, or leave before one of them."""
        self._thread.join(30)
        self.tensors = {}
        order = [chunk.tensors for chunk in layout.chunks]

        def run() -> None:
            try:
                receive_chunks(
                    self.group, manifest, order[:leave_at], deadline_s=30, load=self.tensors.update
                )
            except SpliceError as error:
                self.error = error
            if leave_at is not None:
                self.group.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def done(self) -> dict[str, torch.Tensor]:
        self._thread.join(40)
        assert not self._thread.is_alive()
        assert self.error is None, self.error
        return self.tensors

    def close(self) -> None:
        self._thread.join(40)
        if self.group is not None:
            self.group.close()


def open_group(control: Orchestrator) -> Receiver:
    request_id = control.start(OpenTransferGroup, transport="tcp", replicas={"inference-0": 1})
    listening = control.pump(until="Progress", request_id=request_id).message
    receiver = Receiver(listening.detail["rendezvous"]["inference-0"])
    assert control.finish(request_id).message.kind == "Completed"
    return receiver


def manifest_order(manifest: Manifest) -> WireLayout:
    return WireLayout(
        chunks=tuple(
            WireChunk(kind="reload", tensors=tuple(c)) for c in in_chunks(manifest, CHUNK_BYTES)
        )
    )


def use_layout(
    control: Orchestrator, layout: WireLayout, part: Sequence[int] | None = None
) -> None:
    result, _ = control.ok(UseLayout, layout=layout.model_dump(mode="python"), part=part)
    assert result == {"why_not": None}


def check_publication(
    control: Orchestrator,
    receiver: Receiver,
    manifest: Manifest,
    *,
    version: int,
    changed_only: bool = False,
    layout: WireLayout | None = None,
) -> dict[str, torch.Tensor]:
    """Send what was planned last, in manifest order if no layout is given."""
    request_id = control.start(SendWeights, version=version, changed_only=changed_only)
    receiver.receive(manifest, layout or manifest_order(manifest))
    tensors = receiver.done()
    envelope = control.finish(request_id)
    assert envelope.message.kind == "Completed", envelope.message
    assert {"export", "merge", "wire"} <= set(envelope.message.result["seconds"])
    digests = np.frombuffer(envelope.buffers[0], dtype=np.int64)
    assert digests.tolist() == [int(tensor_digest(tensors[s.name])) for s in manifest.tensors]
    return tensors


def check_part(
    control: Orchestrator, receiver: Receiver, manifest: Manifest, at_0: dict, at_1: dict
) -> None:
    """Nothing but what has an adapter differs from @0; sent by itself it has the same bytes, and
    everything can be sent again after it.
    """
    names = [s.name for s in manifest.tensors]
    assert {n for n in names if not torch.equal(at_0[n], at_1[n])} <= {
        names[i] for i in manifest.changed
    }
    assert control.refused(SendWeights, version=1, changed_only=True).code == "not_ready"
    whole = manifest_order(manifest).model_dump(mode="python")
    lacking = control.refused(UseLayout, layout=whole, part=manifest.changed[:-1])
    assert lacking.code == "plan_refused" and names[manifest.changed[-1]] in lacking.message
    assert (
        control.refused(UseLayout, layout=whole, part=(*manifest.changed, len(names))).code
        == "plan_refused"
    )
    more = tuple(
        sorted({*manifest.changed, 0})
    )  # the embedding, as if it shared a layer with one of them
    use_layout(control, manifest_order(manifest.part(more)), more)
    for part, changed_only in (
        (manifest.part(more), True),
        (manifest, False),
        (manifest.part(more), True),
    ):
        sent = check_publication(control, receiver, part, version=1, changed_only=changed_only)
        assert all(torch.equal(t, at_1[n]) for n, t in sent.items())
    control.ok(UseLayout, layout=whole)
    assert control.refused(SendWeights, version=1, changed_only=True).code == "not_ready"


def check_that_rot_is_refused(control: Orchestrator, whole: Path, *, ranks: int) -> None:
    """One bit of any file, whichever rank wrote it; a load that fails names the file and what can
    be loaded.
    """
    rotten = whole.with_name("rotten")
    shutil.copytree(whole, rotten)
    files = [path for path in rotten.rglob("*") if path.is_file() and path.name != "COMPLETE"]
    assert {f"rank_{r}.pt" for r in range(ranks)} | {"meta.json", ".metadata"} < {
        path.name for path in files
    }
    assert len([path for path in files if path.suffix == ".distcp"]) == ranks
    for path in files:
        spoil(path)
        refused = control.refused(LoadCheckpoint, checkpoint_dir=str(rotten))
        assert (
            refused.code == "checkpoint_failed"
            and f"{path} has changed since it was written" in refused.message
        )
        assert (
            f"load another checkpoint of {whole.parent}" in refused.message
            and whole.name in refused.message
        )
        spoil(path)
    shutil.rmtree(rotten)


@pytest.mark.parametrize(
    ("name", "ranks", "parallel"), [("dense_tied", 1, {}), ("moe", 2, {"expert": 2})]
)
def test_a_whole_life(
    name: str, ranks: int, parallel: dict, models, torchrun, tmp_path: Path
) -> None:
    """Every request, failures in between, and a clean end."""
    from tests.trainer_node.references import peft_merged

    with node(models[name], tmp_path, torchrun, ranks=ranks, **parallel) as (control, process):
        assert control.hello.run_token == TOKEN
        assert control.hello.packages["megatron-core"]
        assert control.ready.detail["trainable_parameters"] > 0
        assert control.refused(SendWeights, version=0).code == "not_ready"
        base = load_file(models[name] / "model.safetensors")
        manifest = Manifest.model_validate(control.ok(PlanPublication)[0])
        assert {s.name: s.shape for s in manifest.tensors} == {
            n: tuple(t.shape) for n, t in base.items()
        }
        control.ok(SaveCheckpoint, version=0, checkpoint_dir=str(tmp_path / "v0"))
        receiver = open_group(control)
        assert "send UseLayout first" in control.refused(SendWeights, version=0).message
        use_layout(control, manifest_order(manifest))
        at_0 = check_publication(control, receiver, manifest, version=0)
        assert all(torch.equal(at_0[n], t) for n, t in base.items())

        fields, buffers = training()
        result, _ = control.ok(
            TrainMerged, buffers, version=1, checkpoint_dir=str(tmp_path / "v1"), **fields
        )
        assert [phase for _, phase, _ in control.progress] == ["training", "saving"]
        assert result["metrics"]["grad_norm"] > 0
        assert set(result["metrics"]) == documented(
            "all", SAMPLER, "steps", "LoRA versions", "LoRA, on policy, every 10 steps"
        )
        assert result["metrics"]["gap_weights_mean"] == 0.0  # B is zero
        assert set(result["steps"][0]) == documented("all", SAMPLER, "steps")
        assert 0 < result["seconds"]["to_first_forward"] < result["seconds"]["train"] + 1
        released, _ = control.ok(ReleaseMemory)
        assert released["offloaded_bytes"] > sum(t.nbytes for t in base.values()) // (2 * ranks)
        assert released["resident_bytes"] == 0
        at_1 = check_publication(
            control, receiver, manifest, version=1
        )  # the groups stayed, the weights came back
        theirs = peft_merged(models[name], tmp_path / "v1" / "adapter")
        assert all(torch.equal(at_1[n], theirs[n]) for n in at_1)

        check_part(control, receiver, manifest, at_0, at_1)
        bad = arrays()
        bad["tokens"][10] = 300
        fields, bad_buffers = training(bad)
        refused = control.refused(
            TrainMerged, bad_buffers, version=2, checkpoint_dir=str(tmp_path / "v2"), **fields
        )
        assert refused.code == "bad_input"
        assert "sequence 1: tokens[1] = 300" in refused.message
        huge = arrays()
        huge["sampler_logprobs"] = np.where(huge["loss_mask"] > 0, -3e38, 0).astype(np.float32)
        huge["advantages"] = -huge["loss_mask"]
        fields, huge_buffers = training(huge)
        refused = control.refused(
            TrainMerged, huge_buffers, version=2, checkpoint_dir=str(tmp_path / "v2"), **fields
        )
        assert refused.code == "non_finite_gradient"
        assert not (tmp_path / "v2").exists()
        said = (tmp_path / "node.log").read_text()
        assert "failed while training: the gradient's norm is" in said
        assert "Traceback" not in said, "a refusal says all"
        unchanged = check_publication(control, receiver, manifest, version=1)
        assert all(torch.equal(unchanged[n], at_1[n]) for n in at_1)
        missing = control.refused(LoadCheckpoint, checkpoint_dir=str(tmp_path / "nowhere"))
        assert missing.code == "checkpoint_failed"

        fields, buffers = training()
        control.ok(TrainLora, buffers, output_dir=str(tmp_path / "lora"), **fields)
        assert {p.name for p in (tmp_path / "lora").iterdir()} == {
            "adapter_model.safetensors",
            "adapter_config.json",
        }
        check_that_rot_is_refused(control, tmp_path / "v1", ranks=ranks)
        unchanged = check_publication(control, receiver, manifest, version=1)
        assert not all(torch.equal(unchanged[n], at_1[n]) for n in at_1), (
            "a load that failed changed the trainer"
        )
        assert control.ok(LoadCheckpoint, checkpoint_dir=str(tmp_path / "v1"))[0]["version"] == 1
        restored = check_publication(control, receiver, manifest, version=1)
        assert all(torch.equal(restored[n], at_1[n]) for n in at_1)

        # Nobody receives: the watchdog's message ends the send, the next one says what to do, and a
        # new group works.
        check_aborts(control)
        receiver.close()
        assert control.refused(SendWeights, version=1).code == "not_ready"
        receiver = open_group(control)
        check_publication(control, receiver, manifest, version=1)
        control.ok(LeaveTransferGroup)
        receiver.close()
        control.urgent(Shutdown())
        assert process.wait(60) == 0


def check_aborts(control: Orchestrator, *, changed_only: bool = False) -> None:
    """A send that nobody receives and one that waits for it: each ends for the reason that was
    given for it, and neither for another's.
    """
    running = control.start(SendWeights, version=1, changed_only=changed_only)
    time.sleep(0.5)
    waiting = control.start(SendWeights, version=1)
    control.urgent(AbortSend(reason="not mine", request_id="of-another-transfer"))
    control.urgent(AbortSend(reason="before its turn", request_id=waiting))
    time.sleep(0.5)
    control.urgent(AbortSend(reason="a test said so", request_id=running))
    for request_id, reason in ((running, "a test said so"), (waiting, "before its turn")):
        failed = control.finish(request_id).message
        assert (failed.kind, failed.code) == (
            "Failed",
            "transfer_aborted",
        ) and reason in failed.message, failed
        control.progress = []


def layout_of(manifest: Manifest, num_chunks: int) -> WireLayout:
    """Every num_chunks-th tensor."""
    chunks = [tuple(range(c, len(manifest.tensors), num_chunks)) for c in range(num_chunks)]
    return WireLayout(chunks=tuple(WireChunk(kind="staged", tensors=c) for c in chunks))


def check_chunks(
    control: Orchestrator,
    receiver: Receiver,
    manifest: Manifest,
    layout: WireLayout,
    wanted: dict,
    *,
    changed_only: bool,
) -> None:
    tensors = check_publication(
        control, receiver, manifest, version=1, changed_only=changed_only, layout=layout
    )
    assert all(torch.equal(tensors[s.name], wanted[s.name]) for s in manifest.tensors)


def test_one_job_is_profiled(models, torchrun, tmp_path: Path) -> None:
    """Rank 0 writes what it did in the chosen version's training, in Chrome's trace format."""
    versions, model = tmp_path / "run" / "versions", models["dense_tied"]
    fields, buffers = training()
    more = {"ranks": 2, "tensor": 2, "profile_versions": (2,)}
    with node(model, tmp_path, torchrun, **more) as (control, _):
        for version in (1, 2, 3):
            folder = str(versions / str(version))
            control.ok(TrainMerged, buffers, version=version, checkpoint_dir=folder, **fields)
    (path,) = (tmp_path / "run" / "profiles").iterdir()
    assert path.name == "2.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"aten::mm", "aten::embedding"} <= names, sorted(names)[:50]


@pytest.mark.parametrize(
    ("name", "ranks", "parallel"), [("dense_tied", 2, {"tensor": 2}), ("moe", 2, {"expert": 2})]
)
def test_several_ranks_send_in_the_receivers_order(
    name: str, ranks: int, parallel: dict, models, torchrun, tmp_path: Path
) -> None:
    """Whole and part; a receiver that leaves in the middle and one that never comes: the next send
    has the right bytes.
    """
    from tests.trainer_node.references import peft_merged

    with node(models[name], tmp_path, torchrun, ranks=ranks, **parallel) as (control, process):
        manifest = Manifest.model_validate(control.ok(PlanPublication)[0])
        part = manifest.part(manifest.changed)
        whole_layout, part_layout = layout_of(manifest, 6), layout_of(part, 4)
        fields, buffers = training()
        control.ok(TrainMerged, buffers, version=1, checkpoint_dir=str(tmp_path / "v1"), **fields)
        wanted = peft_merged(models[name], tmp_path / "v1" / "adapter")
        for layout, indices in ((whole_layout, None), (part_layout, manifest.changed)):
            use_layout(control, layout, indices)
        assert control.refused(SendWeights, version=1).code == "not_ready"  # and no rank waits
        receiver = open_group(control)
        check_chunks(control, receiver, manifest, whole_layout, wanted, changed_only=False)
        check_chunks(control, receiver, part, part_layout, wanted, changed_only=True)
        control.ok(ReleaseMemory)
        check_chunks(control, receiver, manifest, whole_layout, wanted, changed_only=False)

        request_id = control.start(SendWeights, version=1)
        receiver.receive(manifest, whole_layout, leave_at=2)
        failed = control.finish(request_id).message
        assert (failed.kind, failed.code) == ("Failed", "transfer_failed"), failed
        receiver.close()
        assert control.refused(SendWeights, version=1).code == "not_ready"
        receiver = open_group(control)
        check_chunks(control, receiver, manifest, whole_layout, wanted, changed_only=False)

        check_aborts(control, changed_only=True)
        receiver.close()
        receiver = open_group(control)
        request_id = control.start(SendWeights, version=1, deadline_s=3.0)  # nobody receives
        failed = control.finish(request_id).message
        assert (failed.kind, failed.code) == ("Failed", "transfer_timeout"), failed
        receiver.close()
        receiver = open_group(control)
        check_chunks(control, receiver, part, part_layout, wanted, changed_only=True)
        receiver.close()
        control.urgent(Shutdown())
        assert process.wait(60) == 0


def check_that_one_rank_fails_for_all(
    control: Orchestrator, process: Started, folder: Path
) -> None:
    """By exceptions of other libraries' own types; the ranks stay in step, nothing changes, and
    nothing is left on the disk.
    """
    shutil.copytree(folder / "saved", folder / "damaged")
    marker = folder / "damaged" / "COMPLETE"
    marker.write_text(
        json.dumps({"files": json.loads(marker.read_text())["files"]})
    )  # as before checkpoints had hashes
    rng = folder / "damaged" / "rank_1.pt"
    rng.write_bytes(b"?" * rng.stat().st_size)
    refused = control.refused(LoadCheckpoint, checkpoint_dir=str(folder / "damaged"))
    assert (refused.code, "rank 1 UnpicklingError" in refused.message) == (
        "checkpoint_failed",
        True,
    ), refused
    rank_0 = rank_process(process, 0)
    was = rank_0.rlimit(psutil.RLIMIT_FSIZE)
    rank_0.rlimit(psutil.RLIMIT_FSIZE, (2000, was[1]))  # as on a full disk
    full = control.refused(ExportHf, output_dir=str(folder / "full"), shard_bytes=100_000)
    unsaved = control.refused(SaveCheckpoint, version=1, checkpoint_dir=str(folder / "unsaved"))
    rank_0.rlimit(psutil.RLIMIT_FSIZE, was)
    assert (full.code, unsaved.code) == ("checkpoint_failed", "checkpoint_failed"), (full, unsaved)
    assert not [p.name for p in folder.iterdir() if "full" in p.name or "unsaved" in p.name]


def check_gap(control: Orchestrator, logprobs: np.ndarray) -> None:
    """A gap to the sampler that rounding does not explain is said; beyond the job's bound the job
    fails. Nothing is pending afterwards.
    """
    values = arrays()
    for sampled, warned in (
        (logprobs * values["loss_mask"], False),
        (values["sampler_logprobs"], True),
    ):
        fields, buffers = training(values | {"sampler_logprobs": sampled})
        said, _ = control.ok(
            ForwardBackward, buffers, loss=fields["loss"], tensors=fields["tensors"]
        )
        assert ["Usual causes: a temperature" in text for text in said["warnings"]] == [
            True
        ] * warned
    bounded, buffers = training(max_logprob_gap=1e-3)
    refused = control.refused(
        ForwardBackward, buffers, loss=bounded["loss"], tensors=bounded["tensors"]
    )
    assert (refused.code, "max_logprob_gap is 0.001" in refused.message) == ("logprob_gap", True)
    assert "Gradients pending from 2 batches before it were dropped" in refused.message


def check_refused_batches(
    control: Orchestrator, batch: dict, buffers: list[bytes], folder: Path
) -> None:
    """What this model cannot train on is refused before any of it runs, whatever the request."""
    sizes = {
        "num_sequences": len(arrays()["sequence_lengths"]),
        "num_tokens": len(arrays()["tokens"]),
    }
    routed = batch_specs(**sizes, optional=["routed_experts"], routing=(2, 2))
    experts = np.zeros(routed[-1].shape, np.int32).tobytes()
    nowhere = KlSpec(coefficient=0.1, reference="adapter", adapter_dir=str(folder / "nowhere"))
    bad, never = arrays(), folder / "never"
    bad["advantages"][10] = np.nan
    for fields, sent, said in (
        ({"loss": LossSpec(name="unheard_of")}, buffers, "no loss 'unheard_of'"),
        (
            {"loss": LossSpec(name="cross_entropy", normalize_by="sequences")},
            buffers,
            "pending batches came with",
        ),
        ({"loss": LossSpec(name="cross_entropy", kl=nowhere)}, buffers, "no PEFT adapter"),
        ({"tensors": routed}, [*buffers, experts], "with 0 experts"),
        ({}, training(bad)[1], "advantages[1] = nan is not finite"),
    ):
        steps = {"optim": OptimParams(lr=1e-2), "mini_batch_sequences": 2, "output_dir": str(never)}
        for kind, more in ((ForwardBackward, {}), (TrainLora, steps)):
            refused = control.refused(kind, sent, **(batch | fields | more))
            assert (refused.code, refused.steps_taken, said in refused.message) == (
                "bad_input",
                0,
                True,
            ), refused
    assert not never.exists()


def check_metrics_of_several_steps(control, folder: Path) -> None:
    fields, buffers = training()
    job = {"mini_batch_sequences": 2, "output_dir": str(folder)}
    result, _ = control.ok(TrainLora, buffers, **fields, **job)
    first, *others = result["steps"]
    assert len(others) == 2
    for metrics in (result["metrics"], *result["steps"]):
        assert set(metrics) == documented("all", SAMPLER, "steps")
    whole = result["metrics"]
    assert whole["tokens"] == sum(step["tokens"] for step in result["steps"])
    assert whole["staleness_steps"] == first["staleness_steps"] == others[0]["staleness_steps"] - 1
    assert min(first["tokens_per_s"], *(s["tokens_per_s"] for s in others)) <= whole["tokens_per_s"]
    assert 0 < first["entropy_mean"] < np.log(VOCAB) and whole["kl_sampler_mean"] > 0


def test_operations(models, torchrun, tmp_path: Path) -> None:
    """Forward, two forward_backward, a step, an export that transformers loads; bad input, a
    skipped step and a dropped gradient.
    """
    from transformers import AutoModelForCausalLM

    from orchestrator.protocol.messages import forward_specs

    values = arrays()
    tokens, lengths = values["tokens"], values["sequence_lengths"]
    asked = {"tensors": forward_specs(num_sequences=len(lengths), num_tokens=len(tokens))}
    scoring = [tokens.tobytes(), lengths.tobytes()]
    fields, buffers = training()
    batch = {"loss": LossSpec(name="cross_entropy"), "tensors": fields["tensors"]}

    model = shutil.copytree(models["dense_untied"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    with node(model, tmp_path, torchrun, ranks=2, pipeline=2) as (control, process):
        assert control.refused(OptimStep).code == "not_ready"
        _, found = control.ok(Forward, scoring, **asked)
        first = np.frombuffer(found[0], np.float32)
        assert first.shape == tokens.shape
        assert np.count_nonzero(first == 0) == len(lengths)

        bad = tokens.copy()
        bad[10] = -7
        refused = control.refused(Forward, [bad.tobytes(), lengths.tobytes()], **asked)
        assert (refused.code, "sequence 1: tokens[1] = -7" in refused.message) == (
            "bad_input",
            True,
        )

        check_gap(control, first)
        assert "Traceback" not in (tmp_path / "node.log").read_text()
        control.ok(
            SaveCheckpoint,
            version=3,
            checkpoint_dir=str(tmp_path / "saved"),
            client_state={"row": 9},
        )
        one, _ = control.ok(ForwardBackward, buffers, **batch)
        assert one["pending_batches"] == 1 and set(one["metrics"]) == documented("all")
        loss_mask = values["loss_mask"] == 1
        assert one["metrics"]["loss"] == pytest.approx(
            -first[loss_mask].mean(), abs=bounds.scores()
        )
        check_refused_batches(control, batch, buffers, tmp_path)
        assert control.ok(ForwardBackward, buffers, **batch)[0]["pending_batches"] == 2
        step, _ = control.ok(OptimStep, optim=OptimParams(lr=1e-2))
        assert step["metrics"]["num_batches"] == 2 and step["metrics"]["staleness_steps"] == 0
        assert set(step["metrics"]) == documented("all", "steps")
        _, found = control.ok(Forward, scoring, **asked)
        trained = np.frombuffer(found[0], np.float32)
        assert trained[loss_mask].mean() > first[loss_mask].mean() + 0.01
        _, found = control.ok(Forward, scoring, **asked, adapters=False)
        assert np.array_equal(np.frombuffer(found[0], np.float32), first)

        theirs = tmp_path / ".hf.new" / "theirs"
        theirs.parent.mkdir()
        theirs.touch()
        assert (
            "no checkpoint of ours"
            in control.refused(
                ExportHf, output_dir=str(tmp_path / "hf"), shard_bytes=100_000
            ).message
        )
        theirs.rename(theirs.with_name("BEGUN"))  # as if an export of ours had died
        result, _ = control.ok(ExportHf, output_dir=str(tmp_path / "hf"), shard_bytes=100_000)
        assert not theirs.parent.exists() and not (tmp_path / "hf" / "BEGUN").exists()
        assert len(result["files"]) > 2
        taken = control.refused(ExportHf, output_dir=str(tmp_path / "hf"), shard_bytes=100_000)
        assert taken.code == "checkpoint_failed" and "choose another folder" in taken.message
        assert "The trainer is unchanged" in taken.remedy, "nothing needs to be loaded"
        assert {p.name for p in tmp_path.iterdir() if p.name.startswith(".")} == set()
        assert len({p.stat().st_mode for p in (tmp_path / "hf").iterdir()}) == 1
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
        assert exported.dtype is torch.float32
        start = 0
        for length in lengths:
            ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))
            with torch.no_grad():
                scored = (
                    exported(input_ids=ids[None])
                    .logits[0, :-1]
                    .log_softmax(-1)
                    .gather(-1, ids[1:, None])[:, 0]
                )
            assert (
                np.abs(scored.numpy() - trained[start + 1 : start + length]).max()
                <= bounds.scores()
            )
            start += length

        measured = LossSpec(kl=KlSpec(coefficient=0))
        later, _ = control.ok(ForwardBackward, buffers, loss=measured, tensors=fields["tensors"])
        assert set(later["metrics"]) == documented("all", SAMPLER, "all, with a KL term")
        assert later["metrics"]["kl_mean"] > 0, "a step away from the base"
        assert later["warnings"] == [], "off policy by one step"
        assert later["metrics"]["staleness_steps"] == 1
        control.ok(ReleaseMemory)
        assert control.ok(ReleaseMemory)[0]["resident_bytes"] == 0
        huge = arrays()
        huge["sampler_logprobs"] = np.where(huge["loss_mask"] > 0, -3e38, 0).astype(np.float32)
        huge["advantages"] = -huge["loss_mask"]
        fields, huge_buffers = training(huge)
        control.ok(ForwardBackward, huge_buffers, loss=fields["loss"], tensors=fields["tensors"])
        refused = control.refused(OptimStep)
        assert refused.code == "non_finite_gradient"
        assert "gradients of 2 batches were dropped. Steps skipped so far: 1." in refused.message
        _, found = control.ok(Forward, scoring, **asked)
        assert np.array_equal(np.frombuffer(found[0], np.float32), trained)

        check_metrics_of_several_steps(control, tmp_path / "adapter")
        control.ok(ForwardBackward, buffers, **batch)
        refused = control.refused(LoadAdapter, adapter_dir=str(tmp_path / "hf"))
        assert (refused.code, "no PEFT adapter" in refused.message) == ("bad_input", True)
        loaded, _ = control.ok(LoadAdapter, adapter_dir=str(tmp_path / "saved" / "adapter"))
        assert loaded["dropped_batches"] == 1
        _, found = control.ok(Forward, scoring, **asked)
        assert np.array_equal(np.frombuffer(found[0], np.float32), first)
        control.ok(ForwardBackward, buffers, **batch)
        check_that_one_rank_fails_for_all(control, process, tmp_path)
        loaded, _ = control.ok(LoadCheckpoint, checkpoint_dir=str(tmp_path / "saved"))
        assert (loaded["version"], loaded["client_state"], loaded["dropped_batches"]) == (
            3,
            {"row": 9},
            1,
        )
        assert control.refused(OptimStep).code == "not_ready"
        _, found = control.ok(Forward, scoring, **asked)
        assert np.array_equal(np.frombuffer(found[0], np.float32), first)

        link = tmp_path / "link"
        link.symlink_to(tmp_path / "linked")
        for version in (5, 6):
            control.ok(SaveCheckpoint, version=version, checkpoint_dir=str(link))
        assert control.ok(LoadCheckpoint, checkpoint_dir=str(link))[0]["version"] == 6

        shutil.copytree(tmp_path / "saved", tmp_path / ".saved.old")  # as a crash may have left it
        saved, _ = control.ok(
            SaveCheckpoint,
            version=4,
            checkpoint_dir=str(tmp_path / "next"),
            delete_after=(str(tmp_path / "saved"), str(tmp_path / "hf"), str(link)),
        )
        assert list(saved["not_deleted"]) == [str(tmp_path / "hf")]
        control.urgent(Shutdown())
        assert process.wait(60) == 0
        assert link.is_symlink() and not [
            p.name for p in tmp_path.iterdir() if "saved" in p.name or p.name == "linked"
        ]


def test_a_lost_replica_and_no_joiner(models, torchrun, tmp_path: Path) -> None:
    """Nobody joins: the deadline ends it. A replica that goes away: the send fails. The node serves
    on.
    """
    with node(models["dense_untied"], tmp_path, torchrun) as (control, _):
        alone = {"transport": "tcp", "replicas": {"inference-0": 1}}
        assert (
            control.refused(OpenTransferGroup, deadline_s=1.0, **alone).code == "transfer_timeout"
        )
        manifest = Manifest.model_validate(control.ok(PlanPublication)[0])
        use_layout(control, manifest_order(manifest))
        receiver = open_group(control)
        receiver.close()
        assert control.refused(SendWeights, deadline_s=5.0, version=0).code in {
            "transfer_failed",
            "transfer_timeout",
            "transfer_aborted",
        }
        receiver = open_group(control)
        check_publication(control, receiver, manifest, version=0)
        receiver.close()


def test_a_model_that_only_bridge_can_export_is_sent_in_manifest_order(
    models, torchrun, tmp_path: Path
) -> None:
    """Whole and part. Of a replica that takes nothing the ranks hear before they give up waiting in
    the export's collectives.
    """
    with node(
        models["dense_untied"],
        tmp_path,
        torchrun,
        ranks=2,
        module="tests.trainer_node.bridged",
        tensor=2,
    ) as (control, _):
        manifest = Manifest.model_validate(control.ok(PlanPublication)[0])
        part = manifest.part(manifest.changed)
        refused, _ = control.ok(UseLayout, layout=layout_of(manifest, 3).model_dump(mode="python"))
        assert refused == {"why_not": "a test said so"}
        assert control.refused(SendWeights, version=0).code == "not_ready"
        use_layout(control, manifest_order(manifest))
        use_layout(control, manifest_order(part), manifest.changed)
        base = load_file(models["dense_untied"] / "model.safetensors")
        receiver = open_group(control)
        check_chunks(
            control, receiver, manifest, manifest_order(manifest), base, changed_only=False
        )
        check_chunks(control, receiver, part, manifest_order(part), base, changed_only=True)
        request_id = control.start(SendWeights, version=1, deadline_s=58.0)
        assert control.finish(request_id).message.code == "transfer_timeout"
        receiver.close()
        receiver = open_group(control)
        check_chunks(
            control, receiver, manifest, manifest_order(manifest), base, changed_only=False
        )
        receiver.close()


def test_a_dead_rank_ends_the_node(models, tmp_path: Path) -> None:
    """Rank 1 is killed: torchrun ends the rest, with an exit code that says so, long before any
    collective's deadline.
    """
    with node(models["dense_untied"], tmp_path, None, ranks=2) as (_, process):
        rank_process(process, 1).kill()
        assert process.wait(90) != 0


@pytest.mark.parametrize(
    ("case", "code"),
    [("spoilt", EXIT_AFRESH), ("lost", EXIT_AFRESH), ("broken", EXIT_DIVERGED)],
)
def test_a_node_that_cannot_be_freed_answers_and_ends_with_its_code(
    case: str, code: int, models, torchrun, tmp_path: Path
) -> None:
    """After a CUDA fault the destructor of a tensor ends the process with SIGABRT."""
    module, model = unfreeable.__name__, models["dense_tied"]
    started = node(model, tmp_path, torchrun, module=module, env={"CASE": case})
    with started as (control, process):
        missing = str(tmp_path / "missing")
        assert control.refused(LoadAdapter, adapter_dir=missing).code == "bad_input"
        assert process.wait(30) == code
    assert "this was freed" not in (tmp_path / "node.log").read_text()


def test_ranks_wait_longer_for_the_first_check_than_for_each_other(
    models, torchrun, tmp_path: Path
) -> None:
    """The check of a model without a report takes half a minute and more."""
    checked = {"admission": "check", "collective_timeout_s": slow_check.CHECK_S / 2}
    module, model = slow_check.__name__, models["dense_untied"]
    with node(model, tmp_path, torchrun, ranks=2, module=module, **checked):
        pass


def test_the_ranks_end_with_a_killed_torchrun(models, tmp_path: Path) -> None:
    """Else they hold their GPUs next to the next ones, until they miss the orchestrator."""
    with node(models["dense_untied"], tmp_path, None) as (_, process):
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert any("trainer_node" in " ".join(p.cmdline()) for p in ranks)
        process.kill()
        process.wait(10)
        assert not psutil.wait_procs(ranks, timeout=10)[1]


def test_bad_topology_is_said_before_anything_is_built(models, tmp_path: Path) -> None:
    config = TrainerConfig(
        model=models["dense_tied"], parallel=ParallelConfig(tensor=1, expert=1, world_size=3)
    )
    (tmp_path / "c.json").write_text(config.model_dump_json())
    control = Orchestrator()
    command = [
        sys.executable,
        "-m",
        "trainer_node",
        "--endpoint",
        control.endpoint,
        "--config",
        str(tmp_path / "c.json"),
    ]
    try:
        process = subprocess.Popen(
            command,
            cwd=REPO,
            env=child_env() | {"SPLICE_RUN_TOKEN": TOKEN},
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            with pytest.raises(AssertionError, match="no Ready"):
                control.pump(until="Ready", deadline_s=1)
        _, stderr = process.communicate(timeout=1)
        assert process.returncode == 2, stderr
        assert "1 ranks were started" in stderr
    finally:
        control.close()
