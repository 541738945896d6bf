"""What must be equal before a version is committed: digests and log-probs. Pure.

N = tensors of a manifest, T = tokens of the canary's prompt.
"""

from __future__ import annotations

import array
import math
import statistics
from collections.abc import Mapping, Sequence

from orchestrator.control.open_requests import Answer
from orchestrator.errors import JobFailed, VerificationError
from orchestrator.protocol.messages import Manifest
from orchestrator.publication.answers import ReceiveAnswer, digests_of, valid

CANARY_TOKENS = 12
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.5}
"""Largest median difference of the log-probs in nats, by the manifest's coarsest dtype.

fp32: ten times the smoke proof's 1e-4, for other kernels. bf16: rounding gives 0.013 on a
tiny mixture, and more with more layers and routers. A wrong model differs by about a nat or more.
"""


def canary_prompt(manifest: Manifest) -> tuple[int, ...]:
    """Tokens that every vocabulary of this model has, spread over its lower half."""
    embeddings = (t for t in manifest.tensors if t.name.endswith("embed_tokens.weight"))
    rows = next((t.shape[0] for t in embeddings), 64)
    return tuple(3 + (7919 * (n + 1)) % max(1, rows // 2 - 3) for n in range(CANARY_TOKENS))


def canary_difference(ours: bytes, theirs: bytes) -> float:
    """Median difference of two float32 [T] log-prob buffers, without the first token.

    Infinite if the lengths differ or a value is not finite.
    """
    if len(ours) != len(theirs) or len(ours) % 4:
        return math.inf
    ours_T, theirs_T = array.array("f", ours), array.array("f", theirs)
    if not all(map(math.isfinite, (*ours_T, *theirs_T))):
        return math.inf
    return statistics.median(abs(x - y) for x, y in zip(ours_T[1:], theirs_T[1:], strict=True))


def canary_failures(manifest: Manifest, nats: Mapping[str, float]) -> dict[str, VerificationError]:
    """Replica -> its error, for each median difference above the tolerance."""
    allowed = max(CANARY_TOLERANCE.get(t.dtype, 0.5) for t in manifest.tensors)
    return {
        replica: VerificationError(
            f"{replica}: the served log-probs of a fixed prompt differ from the trainer's by "
            f"{difference:.2g} nats in the median; {allowed:g} are allowed. Every digest agrees, "
            "so vLLM and Megatron do not compute the same model, or vLLM rounds more (an FP8 KV "
            "cache, another dtype). Compare their configurations and versions; "
            "publication.canary = false serves the version all the same"
        )
        for replica, difference in nats.items()
        if not difference <= allowed
    }


def digest_mismatches(
    *, manifest: Manifest, sent: bytes, live: bytes, unverified: Sequence[str] = ()
) -> list[str]:
    """Names of the tensors whose live digest differs from the sender's.

    Both buffers are int64 [N] in manifest order.

    Raises:
        VerificationError: a buffer is not as long as the manifest.
    """
    ours_N, theirs_N = array.array("q", sent), array.array("q", live)
    wanted = len(manifest.tensors)
    if len(ours_N) != wanted or len(theirs_N) != wanted:
        raise VerificationError(
            f"expected {wanted} digests, got {len(ours_N)} from the trainer "
            f"and {len(theirs_N)} from the replica"
        )
    if sent == live:
        return []
    skip = set(unverified)
    names = [t.name for t in manifest.tensors]
    pairs = zip(names, ours_N, theirs_N, strict=True)
    return [name for name, a, b in pairs if a != b and name not in skip]


def compare(
    received: Mapping[str, Answer], *, manifest: Manifest, sent: bytes, what: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Compare each replica's digests with the trainer's.

    Returns: replica -> what is wrong with its tensors; tensor that could not be read back -> why.
    """
    problems: dict[str, str] = {}
    unverified: dict[str, str] = {}
    for replica, answer in received.items():
        try:
            skipped = valid(replica, ReceiveAnswer, answer[0].result).unverified
            live = digests_of(replica, answer, count=len(manifest.tensors))
        except JobFailed as error:
            problems[replica] = str(error)
            continue
        unverified |= skipped
        wrong = digest_mismatches(manifest=manifest, sent=sent, live=live, unverified=list(skipped))
        if wrong:
            problems[replica] = (
                f"{replica}: {len(wrong)} of {len(manifest.tensors)} {what} tensors are not what "
                f"the trainer sent, first {', '.join(wrong[:5])}"
            )
    return problems, unverified
