"""The proof: compares served log-probs with an independent reference.

PEFT merges in fp32 and transformers scores, so the reference shares no code with splice.

In fp32, every version k must pass two checks with a tolerance tau: TAU, or 100 times what
transformers itself rounds, if that is more (a deep model). |served@k - reference@k| < tau, and
|served@k - reference@(k-1)| > 10 tau, so that the check can tell versions apart. For every class of
weights, perturbing one tensor must change the reference by more than 2 tau, so that the check would
notice it. The perturbation is 1 % noise, or 10 % or 100 % where the model is less sensitive. Among
experts, one that receives tokens is perturbed.

In bf16, rounded activations move a served log-prob away from an fp32 computation on the same
weights. The size of the difference depends on the model, since experts may change their routing.
transformers measures it: the same bf16 weights, once computed in fp32 and once in bf16. The median
served difference over tokens may be at most RANGE times the measured one. The median ignores tokens
that are routed elsewhere. An update may move a log-prob by less than rounding does, so the versions
are told apart over all tokens: the served log-probs must have moved all the way from the previous
reference to their own (`way`), not half of it and not one and a half times. If rounding RANGE times
the measured one could hide that, the update is too small to prove anything, and the proof fails.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import SpliceError
from orchestrator.processes.python import python_command, python_environment
from splice.smoke.served import (
    Logprobs,
    is_way_visible,
    max_difference,
    median_difference,
    way,
)

RANGE = 2.0
"""bf16: what vLLM may round, in times of what transformers rounds."""
REFERENCE_TIMEOUT_S = 600.0
REFERENCE_S_PER_GB = 1200.0
"""Of the checkpoint's weights, beyond REFERENCE_TIMEOUT_S: a model is scored some 50 times."""


class ProofError(SpliceError, RuntimeError):
    """The reference could not be computed."""


@dataclass(slots=True, kw_only=True)
class Figures:
    """One version's differences in nats, under the report's names. None: there is no previous
    version, or only bf16 has it."""

    max_logprob_diff: float
    median_logprob_diff: float
    diff_to_previous: float | None = None
    median_diff_to_previous: float | None = None
    median_rounding_diff: float | None = None
    """bf16: median difference of transformers' bf16 and fp32 results."""
    way_from_previous: float | None = None
    """bf16: how far what is served came from the previous reference (0) to its own (1)."""


@dataclass(slots=True, kw_only=True)
class Proof:
    """`failures` is empty if every check held."""

    tau: float
    """fp32: the largest allowed difference in nats. bf16: unused."""
    versions: dict[int, Figures] = field(default_factory=dict)
    perturbed: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def run_reference(
    *,
    python: Path,
    model: Path,
    dtype: str,
    trained: Mapping[str, Path],
    sequences: Sequence[Sequence[int]],
    work_dir: Path,
    tau: float | None,
    rounding_seed: int | None,
) -> dict[str, object]:
    """Score `sequences` with every version, in a separate process.

    Args:
        trained: version -> a PEFT adapter for `model`, or a whole HF checkpoint.
        tau: fp32: the least tolerance, in nats. The answer has the one that fits the model.
        rounding_seed: of the trainer's stochastic rounding. None: it rounds to nearest.

    Raises:
        ProofError: the process failed. The text quotes the end of its output.
    """
    request, out = work_dir / "reference.request.json", work_dir / "reference.json"
    asked = {
        "model": str(model),
        "dtype": dtype,
        "sequences": [list(s) for s in sequences],
        "perturb": True,
        "trained": {k: str(v) for k, v in trained.items()},
        **({} if tau is None else {"tau": tau}),
        **({} if rounding_seed is None else {"rounding_seed": rounding_seed}),
    }
    request.write_text(json.dumps(asked))
    argv = python_command(python, "-m", "trainer_node.tools.reference")
    argv += ["--request", str(request), "--out", str(out)]
    # Many small operations: waking a large host's thread pool takes longer than they do.
    threads = str(min(4, os.cpu_count() or 1))
    env = python_environment({"OMP_NUM_THREADS": threads, **os.environ})
    size_gb = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9
    timeout_s = REFERENCE_TIMEOUT_S + REFERENCE_S_PER_GB * size_gb
    try:
        done = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ProofError(
            f"the reference took more than {timeout_s:.0f} s; "
            "use --no-proof for a model of this size"
        ) from error
    if done.returncode != 0:
        raise ProofError(
            f"the reference failed: {' '.join(argv)}\n{(done.stdout + done.stderr)[-3000:]}"
        )
    result: dict[str, object] = json.loads(out.read_text())
    return result


def judge(
    *,
    tau: float,
    served: Mapping[int, Logprobs],
    reference: Mapping[str, Logprobs],
    rounded: Mapping[str, Logprobs] | None = None,
) -> Proof:
    """Compare every served version with its own reference and with the previous one.

    Args:
        rounded: the reference computed in bf16, for a model served in bf16. None selects the sharp
            fp32 criterion.
    """
    proof = Proof(tau=tau)
    for version, logprobs in sorted(served.items()):
        own, previous = reference[str(version)], reference.get(str(version - 1))
        found = proof.versions[version] = Figures(
            max_logprob_diff=max_difference(logprobs, own),
            median_logprob_diff=median_difference(logprobs, own),
        )
        if previous is not None:
            found.diff_to_previous = max_difference(logprobs, previous)
            found.median_diff_to_previous = median_difference(logprobs, previous)
        if rounded is None:
            proof.failures += _judge_sharply(found, version, tau)
            continue
        own_rounded = rounded[str(version)]
        found.median_rounding_diff = rounding = median_difference(own_rounded, own)
        if not found.median_logprob_diff <= RANGE * rounding < math.inf:
            proof.failures.append(
                f"@{version}: served differs from its reference by "
                f"{found.median_logprob_diff:.2e} in the median, bf16 rounding explains only "
                f"{rounding:.2e}"
            )
        if previous is not None:
            found.way_from_previous = come = way(logprobs, own, previous)
            if not is_way_visible(own, own_rounded, previous, times=RANGE):
                proof.failures.append(
                    f"@{version} differs too little from @{version - 1} to be told apart from it "
                    "over bf16 rounding: pass a larger --lr"
                )
            elif not abs(come - 1) < 0.5:
                proof.failures.append(
                    f"@{version}: served came {come:.0%} of the way from @{version - 1}'s "
                    "reference to its own"
                )
    return proof


def _judge_sharply(found: Figures, version: int, tau: float) -> Iterator[str]:
    own, previous = found.max_logprob_diff, found.diff_to_previous
    if not own < tau:
        yield (
            f"@{version}: served differs from its reference by {own:.2e}, more than tau = {tau:.0e}"
        )
    if previous is not None and not previous > 10 * tau:
        yield f"@{version}: served differs from @{version - 1}'s reference by only {previous:.2e}"


def judge_sensitivity(proof: Proof, perturbed: Mapping[str, float], *, sharp: bool) -> None:
    """Check that the perturbation of every class of weights is visible."""
    proof.perturbed = dict(perturbed)
    if not perturbed:
        proof.failures.append("the reference perturbed no weights")
    for name, difference in perturbed.items():
        if sharp and not difference > 2 * proof.tau:
            proof.failures.append(
                f"a perturbation of {name} moves the log-probs by only {difference:.2e}; "
                "the check would miss it"
            )
