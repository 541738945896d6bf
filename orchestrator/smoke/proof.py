"""The proof: served log-probs against a reference that shares no code with ours (PEFT merges in fp32, transformers scores).

In fp32, for every version k: |served@k - reference@k| < tau, and |served@k - reference@(k-1)| > 10 tau, so that the check can tell versions
apart. And for every class of weights the reference with one perturbed tensor of that class differs by more than 2 tau, so that the
check would notice. The perturbation is 1 % noise, or 10 % or 100 % where the model shows less; of experts, one that gets tokens is perturbed.

In bf16 a served log-prob differs from an fp32 computation on the same weights because activations are rounded, by how much depends on the
model (a mixture of experts changes its routing). The yardstick is measured: transformers on the same bf16 weights, once in fp32 and once in
bf16. The served difference, in the median over tokens (a token that is routed elsewhere is an outlier, in both), may be at most twice
that one, and must be less than half of the difference to the version before.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import SpliceError
from orchestrator.smoke.served import Logprobs, max_difference, median_difference

REFERENCE_TIMEOUT_S = 600.0


class ProofError(SpliceError, RuntimeError):
    """The reference could not be computed."""


@dataclass(slots=True, kw_only=True)
class Proof:
    """Differences in nats; `failures` is empty where every check held."""

    tau: float
    """fp32: largest allowed difference; bf16: unused."""
    rounding: dict[int, float] = field(default_factory=dict)
    """bf16: median difference that rounding alone makes, by transformers."""
    median_to_own: dict[int, float] = field(default_factory=dict)
    median_to_previous: dict[int, float] = field(default_factory=dict)
    to_own: dict[int, float] = field(default_factory=dict)
    to_previous: dict[int, float] = field(default_factory=dict)
    perturbed: dict[str, float] = field(default_factory=dict)
    share_changed: dict[int, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def run_reference(
    *,
    python: Path,
    model: Path,
    dtype: str,
    trained: Mapping[str, Path],
    sequences: Sequence[Sequence[int]],
    work_dir: Path,
    visible: float,
) -> dict[str, object]:
    """Score `sequences` with every version, in a process of its own.

    Args:
        trained: version -> a PEFT adapter for `model`, or a whole HF checkpoint.
        visible: change of a log-prob that a perturbation must exceed, in nats.

    Raises:
        ProofError: the process failed; quotes the end of its output.
    """
    request, out = work_dir / "reference.request.json", work_dir / "reference.json"
    request.write_text(
        json.dumps(
            {
                "model": str(model), "dtype": dtype, "sequences": [list(s) for s in sequences], "perturb": True, "visible": visible,
                "trained": {k: str(v) for k, v in trained.items()},
            }
        )
    )  # fmt: skip
    argv = [str(python), "-m", "trainer_node.reference", "--request", str(request), "--out", str(out)]
    # Many small operations: a thread pool of all cores of a large host takes longer to wake than they do.
    env = {"OMP_NUM_THREADS": str(min(4, os.cpu_count() or 1))} | os.environ
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=REFERENCE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ProofError(
            f"the reference took more than {REFERENCE_TIMEOUT_S:.0f} s; use --no-proof for a model this large"
        ) from error
    if done.returncode != 0:
        raise ProofError(f"the reference failed: {' '.join(argv)}\n{(done.stdout + done.stderr)[-3000:]}")
    result: dict[str, object] = json.loads(out.read_text())
    return result


def judge(
    *,
    tau: float,
    served: Mapping[int, Logprobs],
    reference: Mapping[str, Logprobs],
    rounded: Mapping[str, Logprobs] | None = None,
) -> Proof:
    """Compare every served version with its own reference and with the one before.

    `rounded`: the reference computed in bf16; given where the model is served in bf16, None for the sharp fp32 criterion.
    """
    proof = Proof(tau=tau)
    for version, logprobs in sorted(served.items()):
        own, previous = reference[str(version)], reference.get(str(version - 1))
        proof.to_own[version], proof.median_to_own[version] = max_difference(logprobs, own), median_difference(logprobs, own)
        if previous is not None:
            proof.to_previous[version] = max_difference(logprobs, previous)
            proof.median_to_previous[version] = median_difference(logprobs, previous)
        if rounded is None:
            _judge_sharply(proof, version)
        else:
            proof.rounding[version] = median_difference(rounded[str(version)], own)
            _judge_rounded(proof, version)
    return proof


def _judge_sharply(proof: Proof, version: int) -> None:
    own, previous = proof.to_own[version], proof.to_previous.get(version)
    if not own < proof.tau:
        proof.failures.append(f"@{version}: served differs from its reference by {own:.2e}, more than tau = {proof.tau:.0e}")
    if previous is not None and not previous > 10 * proof.tau:
        proof.failures.append(f"@{version}: served differs from @{version - 1}'s reference by only {previous:.2e}")


def _judge_rounded(proof: Proof, version: int) -> None:
    own, rounding, previous = proof.median_to_own[version], proof.rounding[version], proof.median_to_previous.get(version)
    if not own <= 2 * rounding:
        proof.failures.append(
            f"@{version}: served differs from its reference by {own:.2e} in the median, bf16 rounding explains only {rounding:.2e}"
        )
    if previous is not None and not own < previous / 2:
        proof.failures.append(
            f"@{version}: served is no nearer to its own reference ({own:.2e}) than to @{version - 1}'s ({previous:.2e})"
        )


def visible(tau: float, *, sharp: bool) -> float:
    """Nats by which a perturbed tensor must move a log-prob, so that served-against-perturbed exceeds tau; in bf16 any."""
    return 2 * tau if sharp else 0.0


def judge_sensitivity(proof: Proof, perturbed: Mapping[str, float], *, sharp: bool) -> None:
    """Every class's perturbation must be visible."""
    proof.perturbed = dict(perturbed)
    if not perturbed:
        proof.failures.append("the reference perturbed no weights")
    for name, difference in perturbed.items():
        if sharp and not difference > visible(proof.tau, sharp=sharp):
            proof.failures.append(
                f"a perturbation of {name} moves the log-probs by only {difference:.2e}; the check would miss it"
            )
