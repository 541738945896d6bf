"""The reports of all workers of one replica, put together. Pure."""

from __future__ import annotations

import array
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inference_node.shared.reports import (
    MAX_REFUSALS,
    NAMES_SHOWN,
    Findings,
    PartDigest,
    PartKey,
    WorkerDigests,
    hashable,
    some,
)
from orchestrator.errors import ManifestError, VerificationError
from orchestrator.protocol.messages import Fp8Group, Fp8Weights, Manifest
from weight_transfer import edges

ITS_LAYER = "its layer is reloaded"
Int64 = npt.NDArray[np.int64]


# ------------------------------------------ the plan


def judge(manifest: Manifest, workers: Sequence[Findings]) -> None:
    """Refuse a manifest that the replica could not load whole. Pure.

    Raises:
        ManifestError: names tensors that no worker takes, that a loader refuses, that would be
            rounded, or that get no data.
    """
    problems: list[str] = []
    refused = {name: why for worker in workers for name, why in worker.refused.items()}
    unknown = [
        s.name
        for s in manifest.tensors
        if s.name not in refused and not any(s.name in w.loaded for w in workers)
    ]
    if refused:
        problems.append(f"the model refuses {some([f'{n} ({why})' for n, why in refused.items()])}")
    if unknown and len(refused) < MAX_REFUSALS:
        problems.append(f"the model has no place for {some(unknown)}")
    for spec in manifest.tensors:
        taken = {part for w in workers for part in map(hashable, w.loaded.get(spec.name, ()))}
        count = sum(math.prod(size) for _, size, _ in taken)
        if taken and count < spec.numel:
            problems.append(
                f"only {count} of {spec.numel} elements of {spec.name} are taken; "
                f"its shape {spec.shape} does not fit"
            )
    lossy = {name: why for w in workers for name, why in w.lossy.items()}
    if lossy:
        problems.append(f"dtypes differ: {some([f'{n} {why}' for n, why in lossy.items()])}")
    uncovered = {name: why for w in workers for name, why in w.uncovered.items()}
    if uncovered and not refused:
        problems.append(f"no data for {some([f'{n} ({why})' for n, why in uncovered.items()])}")
    if problems:
        raise ManifestError("; ".join(problems[:NAMES_SHOWN]))


def merged_groups(per_worker: list[list[Fp8Group]]) -> Fp8Weights | None:
    """The groups of all workers of a replica. None: none of them is FP8. Pure.

    Raises:
        ManifestError: two workers group a tensor in different ways.
    """
    by_first: dict[tuple[int, ...], Fp8Group] = {g.tensors: g for gs in per_worker for g in gs}
    if not by_first:
        return None
    indices = [i for tensors in by_first for i in tensors]
    if len(set(indices)) != len(indices):
        raise ManifestError("the workers of this replica keep FP8 weights in different groups")
    return Fp8Weights(groups=tuple(by_first[t] for t in sorted(by_first)))


def refuse_reload(manifest: Manifest, reload: Sequence[int], reasons: Collection[str] = ()) -> None:
    """Refuse to send FP8 weights through vLLM's loaders, which take bf16. Pure.

    Args:
        reasons: why tensors cannot be put in place.

    Raises:
        ManifestError: names the tensors, and a reason.
    """
    stuck = [manifest.tensors[i] for i in reload]
    names = [spec.name for spec in stuck if spec.dtype == "float8_e4m3fn"]
    if names:
        why = f" ({min(reasons)})" if reasons else ""
        raise ManifestError(
            f"FP8 weights cannot be put in place: {some(names)}{why}; serve this model in bf16"
        )


def explain(
    manifest: Manifest,
    reasons: Mapping[str, Collection[int]],
    reload: Collection[int],
    *,
    within: Collection[int],
) -> dict[str, str]:
    """Reason -> one example among the indices `within`, for `WireLayout.why_not_live`. Pure."""
    named = {why: sorted(set(indices) & set(within)) for why, indices in reasons.items()}
    known = {i for indices in named.values() for i in indices}
    named[ITS_LAYER] = sorted((set(reload) & set(within)) - known)
    return {why: manifest.tensors[indices[0]].name for why, indices in named.items() if indices}


# ------------------------------------------ digests


class Arrivals:
    """The parts that a replica's workers digest on arrival.

    The order is the manifest's, and within a tensor that of `Findings.loaded`.

    Args:
        direct: indices of the tensors that do not take the reload path.
        loaded: for each worker, HF name -> the (first index, size, index strides) of its parts.

    Axes: P = parts of one worker, S = different parts, N = tensors of the manifest.
    """

    def __init__(
        self,
        manifest: Manifest,
        direct: Iterable[int],
        loaded: Sequence[Mapping[str, Sequence[Any]]],
    ) -> None:
        self._manifest, self._direct = manifest, sorted(direct)
        slots: dict[tuple[int, PartKey], int] = {}
        self._slots = [
            np.array([slots.setdefault(p, len(slots)) for p in self._parts(found)], np.int64)
            for found in loaded
        ]
        self._owner_S = np.array([index for index, _ in slots], np.int64)
        self.covered = dict.fromkeys(self._direct, 0)
        for index, key in slots:
            self.covered[index] += math.prod(key[1])
        self.is_everything = self.covered == {i: t.numel for i, t in enumerate(manifest.tensors)}
        """Whether every element of every tensor is digested on arrival."""

    @classmethod
    def of_pieces(cls, manifest: Manifest, tables: Sequence[str]) -> Arrivals:
        """The pieces that workers receive, each in the order in which its shadow digests them.

        The server answers no request meanwhile, so this has no loop in Python.

        Args:
            tables: of `UseEdges`, in the order of the workers' answers.
        """
        made = cls(manifest, range(len(manifest.tensors)), ())
        found = []
        for text in tables:
            pieces = edges.from_text(text, columns=edges.TABLE_COLUMNS)[1:, 3:]
            found.append(pieces[np.argsort(pieces[:, 0], kind="stable")])
        different, slots = np.unique(np.concatenate(found), axis=0, return_inverse=True)
        ends = np.cumsum([len(pieces) for pieces in found])
        made._slots = np.split(slots.reshape(-1), ends[:-1])
        made._owner_S = different[:, 0]
        covered_N = np.zeros(len(manifest.tensors), np.int64)
        np.add.at(covered_N, made._owner_S, different[:, 2] * different[:, 4])
        made.covered = dict(enumerate(covered_N.tolist()))
        made.is_everything = covered_N.tolist() == [t.numel for t in manifest.tensors]
        return made

    def _parts(self, loaded: Mapping[str, Sequence[Any]]) -> Iterator[tuple[int, PartKey]]:
        for index in self._direct:
            for part in loaded.get(self._manifest.tensors[index].name, ()):
                yield index, hashable(part)

    def add_up(self, arrived: Sequence[Sequence[int]]) -> tuple[Int64, set[int]]:
        """Digests [N] of what arrived; and the indices whose copies differ between workers.

        It runs within the pause, for up to 40,000 tensors: no loop in Python, and no torch, whose
        threads can take 20 ms to begin on a busy host.

        Raises:
            VerificationError: a worker digested another number of parts.
        """
        digests = [np.asarray(c, np.int64) for c in arrived]
        if [len(d) for d in digests] != [len(s) for s in self._slots]:
            raise VerificationError(
                f"workers digested {[len(d) for d in digests]} parts, "
                f"not {[len(s) for s in self._slots]}"
            )
        value_S, wrong = np.zeros_like(self._owner_S), set[int]()
        for slot_P, digest_P in zip(self._slots, digests, strict=True):
            value_S[slot_P] = digest_P
        for slot_P, digest_P in zip(self._slots, digests, strict=True):
            wrong |= set(self._owner_S[slot_P[value_S[slot_P] != digest_P]].tolist())
        total_N = np.zeros(len(self._manifest.tensors), np.int64)
        np.add.at(total_N, self._owner_S, value_S)  # modulo 2^64
        return total_N, wrong

    def by_index(self, total_N: Int64) -> dict[int, int]:
        """The digests of the tensors that were digested on arrival, by index."""
        totals = total_N.tolist()
        return {i: totals[i] for i in self._direct}


def combine(
    manifest: Manifest, workers: Sequence[WorkerDigests], arrivals: Arrivals | None = None
) -> tuple[Sequence[int], dict[str, str]]:
    """The digest of every tensor in order, 0 if unverified; and why tensors are unverified. Pure.

    Parts with the same elements are replicas, which must agree and count once. Different parts are
    shards, which add up.

    Raises:
        VerificationError: replicas disagree, or parts do not cover a tensor; names the tensors.
    """
    unverified = {name: why for worker in workers for name, why in worker.unverified.items()}
    digests: list[int] = []
    wrong: list[str] = []
    worker_digests = [w.arrived for w in workers if w.arrived is not None]
    arrived, disagree = dict[int, int](), set[int]()
    if arrivals is not None and worker_digests:
        total_N, disagree = arrivals.add_up(worker_digests)
        if arrivals.is_everything and not disagree:
            return array.array("q", total_N.tobytes()), unverified
        arrived = arrivals.by_index(total_N)
    for index, spec in enumerate(manifest.tensors):
        if index not in arrived and spec.name in unverified:
            digests.append(0)
            continue
        if arrivals is not None and index in arrived:
            digest, covered, agree = arrived[index], arrivals.covered[index], index not in disagree
        else:
            digest, covered, agree = _add_up(
                [p for w in workers for p in w.parts.get(spec.name, ())]
            )
        if not agree:
            wrong.append(f"{spec.name} (its live copies disagree)")
        if covered != spec.numel:
            wrong.append(f"{spec.name} ({covered} of {spec.numel} elements found)")
        digests.append(digest)
    if wrong:
        raise VerificationError(f"live tensors are wrong: {', '.join(dict.fromkeys(wrong[:8]))}")
    return digests, unverified


def _add_up(found: Sequence[PartDigest]) -> tuple[int, int, bool]:
    """One tensor's digest, its number of elements, and whether copies of its parts agree."""
    parts = {p.key: p for p in found}
    agree = all(parts[p.key].digest == p.digest for p in found)
    return _wrap(sum(p.digest for p in parts.values())), sum(p.numel for p in parts.values()), agree


def _wrap(value: int) -> int:
    """The value as int64, modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
