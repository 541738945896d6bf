"""The canary: a replica that computes another model than the trainer is not served, however right
its digests are.
"""

from __future__ import annotations

import array
import math

import pytest

from orchestrator.errors import JobFailed
from orchestrator.protocol.messages import InitialSync, Manifest, TensorSpec
from orchestrator.publication.verification import CANARY_TOKENS, canary_difference, canary_prompt
from tests.orchestrator.run import BUFFERS, JOB, Run

OWN = [float(i) for i in range(CANARY_TOKENS)]  # what the fake trainer's forward pass says


def floats(*values):
    return array.array("f", values).tobytes()


def test_a_replica_that_computes_the_same_is_served_and_the_result_says_how_near(tmp_path):
    with Run(tmp_path) as run:
        trainer = run.trainer()
        replica = run.replica(trainer)
        replica.canary = [x + 0.0005 for x in OWN]
        first = run.client.run(InitialSync())
        assert 0.0004 < first.canary["inference-0"] < 0.0006 and "canary" in first.seconds
        assert (
            replica.log[-3:] == ["ReceiveWeights", "CheckCanary", "CommitUpdate"]
            and trainer.log[-1] == "Forward"
        )
        replica.canary = None  # it serves now
        assert run.client.run(JOB, buffers=BUFFERS).canary == {}


def test_one_that_computes_something_else_is_poisoned_and_says_so(tmp_path):
    with Run(tmp_path, attempts=2) as run:
        replica = run.replica(run.trainer())
        replica.canary = [x + 0.25 * (i % 3 > 0) for i, x in enumerate(OWN)]
        with pytest.raises(
            JobFailed,
            match=r"trainer's by 0\.25 nats.*0\.001 are allowed.*publication\.canary = false",
        ):
            run.client.run(InitialSync())
        assert replica.served == [] and run.client.status().publication == "poisoned"
        assert replica.log.count("CheckCanary") == 2 and replica.aborted.is_set()


def test_it_can_be_turned_off(tmp_path):
    with Run(tmp_path, canary=False) as run:
        replica = run.replica(run.trainer())
        run.client.run(InitialSync())
        assert "CheckCanary" not in replica.log and replica.served == [(0, [10, 20, 30])]


def test_the_prompt_is_in_the_vocabulary_and_the_difference_is_a_median():
    for rows in (8, 320, 151936):
        manifest = Manifest(
            tensors=(
                TensorSpec(name="model.embed_tokens.weight", dtype="float32", shape=(rows, 4)),
            )
        )
        prompt = canary_prompt(manifest)
        assert (
            len(prompt) == CANARY_TOKENS
            and all(0 <= t < rows for t in prompt)
            and (rows < 99 or len(set(prompt)) > 6)
        )
    assert canary_difference(floats(9, 1, 2, 3), floats(0, 1.5, 2, 3.25)) == 0.25
    assert (
        canary_difference(floats(0, 1), floats(0, math.nan))
        == canary_difference(floats(0, 1), floats(0))
        == math.inf
    )
