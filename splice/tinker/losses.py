"""Tinker's losses as splice's: which batch and which `LossSpec`. Pure.

A datum of L tokens and L targets becomes one sequence of L + 1 tokens, the input and its last
target. Targets must therefore be the next tokens. Under the prompt they may be 0, because a
position counts only if it carries loss.

Shapes: L = tokens of a datum's input, T = tokens of all sequences, N = positions of all data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.protocol.messages import LossSpec, TensorSpec, batch_specs, forward_specs
from splice.client.batches import Batch
from splice.tinker.refused import malformed, unsupported
from splice.tinker.wire import Array, Datum, PassRequest

_POLICY_INPUTS = frozenset({"target_tokens", "logprobs", "advantages"})
INPUTS: dict[str, frozenset[str]] = {
    "cross_entropy": frozenset({"target_tokens", "weights"}),
    "importance_sampling": _POLICY_INPUTS,
    "ppo": _POLICY_INPUTS,
    "cispo": _POLICY_INPUTS,
}
"""Loss -> its inputs. Tinker's other losses are refused by name."""
THRESHOLDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Bounds of the importance ratio in `ppo` and `cispo`, with Tinker's defaults."""
METRICS = {
    "loss": "loss:sum",
    "tokens": "tokens:sum",
    "num_sequences": "num_sequences:sum",
    "entropy_mean": "entropy:mean",
}
POLICY_METRICS = METRICS | {
    "kl_sampler_mean": "kl_sampler:mean",
    "logprob_gap_mean": "logprob_gap:mean",
    "logprob_gap_max": "logprob_gap:max",
    "clip_fraction": "clip_fraction:mean",
}
"""splice's metric -> its name for the SDK, which ends in how chunks of a batch combine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A checked request. Arrays are float32 [N], the data end to end."""

    loss: LossSpec
    temperature: float
    """Divides the logits of the policy that trains; 1 for a linear loss."""
    tokens: tuple[Array, ...]
    """Each sequence, input and last target."""
    is_asked: tuple[Array, ...]
    """Where the target is the next token, [L] of each datum: the log-probs that mean something."""
    factors: Array
    """Weights or advantages: what multiplies a position's term of the loss."""
    sampler_logprobs: Array
    mask: Array

    @property
    def is_linear(self) -> bool:
        """Whether the loss is minus the sum of factor times log-prob."""
        return self.loss.name == "linear"

    @property
    def lengths(self) -> list[int]:
        """Positions of each datum."""
        return [len(asked) for asked in self.is_asked]

    def batch(self) -> Batch:
        """Return the batch to train on."""
        rows = [self._rows(v * self.mask) for v in (self.mask, self.factors, self.sampler_logprobs)]
        tokens, lengths = self._sequences()
        temperatures = [np.full(len(lengths), self.temperature, "<f4")]
        optional = ("temperatures",) if self.temperature != 1.0 else ()
        specs = batch_specs(num_sequences=len(lengths), num_tokens=len(tokens), optional=optional)
        return _batch(specs, [tokens, lengths, *rows, *temperatures[: len(optional)]])

    def _sequences(self) -> tuple[Array, Array]:
        lengths = np.array([len(tokens) for tokens in self.tokens], "<i4")
        return np.concatenate(self.tokens).astype("<i4"), lengths

    def _rows(self, values_N: Array) -> Array:
        """[N] -> [T]: nothing predicts a sequence's first token."""
        starts = np.cumsum([0, *self.lengths[:-1]])
        return np.insert(values_N, starts, 0.0).astype("<f4")

    def by_datum(self, logprobs_T: Array) -> list[Array]:
        """[T] -> [L] of each datum: 0 where the target is not the next token."""
        ends = np.cumsum([len(tokens) for tokens in self.tokens])
        parts = np.split(logprobs_T, ends[:-1])
        return [p[1:] * asked for p, asked in zip(parts, self.is_asked, strict=True)]


def _batch(specs: tuple[TensorSpec, ...], arrays: Sequence[Array]) -> Batch:
    return Batch(specs=specs, buffers=tuple(array.tobytes() for array in arrays))


def plan(request: PassRequest, *, temperature: float = 1.0) -> Pass:
    """Check a request against its loss.

    Args:
        temperature: of the policy that a loss with sampler log-probs trains.

    Raises:
        Refused: a loss, a parameter or an input that this server lacks; targets that are not the
            next tokens.
    """
    if request.loss not in INPUTS:
        raise unsupported(
            f"loss_fn {request.loss!r} is not supported; there are {', '.join(sorted(INPUTS))}"
        )
    spec = loss_spec(request.loss, request.config)
    is_linear = spec.name == "linear"
    columns: dict[str, list[Array]] = {"factors": [], "sampler": [], "mask": []}
    tokens, asked = [], []
    for i, datum in enumerate(request.data):
        _check_inputs(i, datum, request.loss)
        factors = datum.inputs["weights" if is_linear else "advantages"]
        sampler = np.zeros_like(factors) if is_linear else datum.inputs["logprobs"]
        mask = (factors != 0) | (sampler != 0)
        sequence, is_next = shifted(i, datum, mask, is_strict=request.is_forward_only)
        tokens.append(sequence)
        asked.append(is_next)
        for name, values in (("factors", factors), ("sampler", sampler), ("mask", mask)):
            columns[name].append(values.astype("<f4"))
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    return Pass(
        loss=spec,
        temperature=1.0 if is_linear else temperature,
        tokens=tuple(tokens),
        is_asked=tuple(asked),
        factors=joined["factors"],
        sampler_logprobs=joined["sampler"],
        mask=joined["mask"],
    )


def _check_inputs(index: int, datum: Datum, loss: str) -> None:
    missing, foreign = INPUTS[loss] - set(datum.inputs), set(datum.inputs) - INPUTS[loss]
    if missing:
        raise malformed(f"datum {index}: {loss} needs {', '.join(sorted(missing))}")
    if foreign:
        raise unsupported(
            f"datum {index}: {loss} takes {', '.join(sorted(INPUTS[loss]))}; "
            f"{', '.join(sorted(foreign))} is not supported"
        )
    for name, values in datum.inputs.items():
        if (values.dtype.kind == "i") != (name == "target_tokens"):
            wanted = "int64" if name == "target_tokens" else "float32"
            raise malformed(f"datum {index}: {name} is {values.dtype}; send {wanted}")


def shifted(index: int, datum: Datum, mask: Array, *, is_strict: bool) -> tuple[Array, Array]:
    """Return the whole sequence, and where the target is its next token.

    Args:
        is_strict: check every target but 0, because all log-probs are asked for.

    Raises:
        Refused: a target that counts is another token.
    """
    targets = datum.inputs["target_tokens"]
    last = targets[-1:].clip(min=0)  # -100 and the like, where it does not count
    sequence = np.concatenate([datum.tokens, last.astype("<i4")])
    is_next: Array = sequence[1:] == targets
    counts = mask | (targets != 0) if is_strict else mask
    for at in np.flatnonzero(counts & ~is_next)[:1]:
        raise unsupported(
            f"datum {index}: target_tokens[{at}] is {targets[at]}, but the next token of "
            f"model_input is {sequence[at + 1]}; targets must be the next tokens where they count"
        )
    return sequence, is_next


def loss_spec(loss: str, config: Mapping[str, float | str]) -> LossSpec:
    """Return splice's loss.

    Tinker's losses are sums over tokens, so the divisor is 1. Its cross_entropy is linear: minus
    the sum of weight times log-prob, with weights of any sign.

    Raises:
        Refused: a parameter that the loss does not have.
    """
    known = THRESHOLDS if loss in ("ppo", "cispo") else {}
    foreign = sorted(set(config) - set(known))
    if foreign:
        raise unsupported(
            f"loss_fn_config: {loss} takes {', '.join(sorted(known)) or 'nothing'}; "
            f"{', '.join(foreign)} is not supported"
        )
    given: dict[str, float] = {}
    for name, value in {**known, **config}.items():
        if not isinstance(value, float):
            raise malformed(f"loss_fn_config: {name} is {value!r}; send a number")
        given[name] = value
    if loss == "cross_entropy":
        return LossSpec(name="linear", normalize_by=1.0)
    if loss == "importance_sampling":
        return LossSpec(name="importance_sampling", normalize_by=1.0)
    low, high = 1.0 - given["clip_low_threshold"], given["clip_high_threshold"] - 1.0
    if not (0 <= low <= 1 and 0 <= high < float("inf")):
        raise malformed(
            "loss_fn_config: clip_low_threshold must be in [0, 1] and clip_high_threshold at least "
            f"1; got {given['clip_low_threshold']} and {given['clip_high_threshold']}"
        )
    # Without dual_clip=None, ppo takes splice's default for it.
    return LossSpec(name=loss, clip_low=low, clip_high=high, dual_clip=None, normalize_by=1.0)


def metrics_of(result: Mapping[str, float], *, is_linear: bool) -> dict[str, float]:
    """Return a training job's metrics under the SDK's names."""
    names = METRICS if is_linear else POLICY_METRICS
    return {name: float(result[ours]) for ours, name in names.items() if ours in result}


def forward_metrics(done: Pass, logprobs: Sequence[Array]) -> dict[str, float]:
    """Return the metrics of a pass without gradients: a linear loss is known from its log-probs."""
    if not done.is_linear:
        return {}
    return {"loss:sum": float(-(np.concatenate(logprobs) * done.factors).sum(dtype=np.float64))}


def one_sequence(tokens: Sequence[int]) -> Batch:
    """Return a forward pass's batch of one sequence."""
    specs = forward_specs(num_sequences=1, num_tokens=len(tokens))
    return _batch(specs, [np.asarray(tokens, "<i4"), np.array([len(tokens)], "<i4")])
