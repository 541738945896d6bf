"""From OpenAI answers to a training batch: token ids, log-probs, rewards, GRPO's advantages.

    reply = http.post("/v1/completions", json={..., **ASK}).json()
    group = [(c, reward(c.text)) for c in completions_of(reply)]    # the answers to one prompt
    batch = grpo_batch(groups)
    client.train_merged(batch, LossSpec(name="grpo"), OptimParams(lr=1e-5))

The batch must have the very tokens and log-probs of the sampler: encoding the text again may give
other tokens. Ask for them with `ASK` or `ASK_CHAT`.
"""

from __future__ import annotations

import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.protocol.messages import TensorSpec, batch_specs
from splice.client.advantages import GAE, AdvantageName, advantages_of

_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
"""The second one: vLLM need not decode each token of the log-probs separately."""
ASK = {"logprobs": 0, **_IDS}
"""What a request to /v1/completions needs in addition to prompt and sampling settings."""
ASK_CHAT = {"logprobs": True, **_IDS}
"""The same for /v1/chat/completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The experts that the sampler's routers chose.

    Attributes:
        experts: int32 of [tokens, layers, top_k], in this order.
    """

    experts: array.array[int]
    layers: int
    top_k: int

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.experts) // (self.layers * self.top_k)

    def rows(self, start: int, stop: int) -> array.array[int]:
        """The experts of some tokens."""
        width = self.layers * self.top_k
        return self.experts[start * width : stop * width]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled answer. `answer_ids` and `logprobs` (nats) have the same length.

    Attributes:
        sampled: which of `answer_ids` the model sampled, in a conversation of several turns. The
            others carry no loss, and their log-probs are 0. Empty: all.
        routing: the experts of all tokens but the last, which no layer has seen yet; prompt
            included.
        temperature: at which it was sampled; the log-probs are those of that temperature.
        finish_reason: "length" if `max_tokens` cut the answer off.
        versions: those that sampled its tokens, in order; several if a publication came between.
        made_by: for each of `answer_ids`, the version that sampled it, as in a batch's `versions`.
            Empty: not known.
        tool_calls: those of a chat's answer, as OpenAI's API has them: `id`, `type` and `function`,
            with `name` and `arguments`, a JSON text. vLLM then needs `--tool-call-parser`.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float = 1.0
    text: str = ""
    finish_reason: str | None = None
    versions: tuple[int, ...] = ()
    made_by: tuple[int, ...] = ()
    sampled: tuple[bool, ...] = ()
    routing: Routing | None = None
    tool_calls: tuple[dict[str, Any], ...] = field(default=(), hash=False)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation, with its tool calls."""
        calls = {"tool_calls": list(self.tool_calls)} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text, **calls}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Specs and raw buffers, as every training method takes them."""

    specs: tuple[TensorSpec, ...]
    buffers: tuple[bytes, ...]


def completions_of(reply: Mapping[str, Any], *, temperature: float = 1.0) -> list[Completion]:
    """Return the answers in a reply of /v1/completions or /v1/chat/completions.

    Args:
        temperature: that of the request. Replies do not repeat it.

    Raises:
        ConfigError: the reply has no token ids or log-probs; names what the request lacked. Or it
            is an error; says which.
    """
    if "choices" not in reply:
        said = reply.get("error", reply.get("detail", reply))
        text = said.get("message", said) if isinstance(said, Mapping) else said
        raise ConfigError(f"the server answered with an error, not with answers: {text!s:.2000}")
    return [_completion(choice, reply, temperature) for choice in reply["choices"]]


def _completion(
    choice: Mapping[str, Any], reply: Mapping[str, Any], temperature: float
) -> Completion:
    is_chat = "message" in choice
    prompt_ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
    answer_ids, given = choice.get("token_ids"), choice.get("logprobs")
    if prompt_ids is None or answer_ids is None or given is None:
        ask = ASK_CHAT if is_chat else ASK
        raise ConfigError(
            f"the reply has no token ids or no log-probs; send {ask} with the request"
        )
    logprobs = [t["logprob"] for t in given["content"]] if is_chat else given["token_logprobs"]
    if len(logprobs) != len(answer_ids):
        raise ConfigError(
            f"the reply has {len(answer_ids)} token ids and {len(logprobs)} log-probs; "
            "a request with `echo` or a tool parser does this"
        )
    return Completion(
        prompt_ids=tuple(prompt_ids),
        answer_ids=tuple(answer_ids),
        logprobs=tuple(map(float, logprobs)),
        temperature=temperature,
        text=(choice["message"].get("content") or "") if is_chat else choice["text"],
        finish_reason=choice.get("finish_reason"),
        versions=_versions(reply),
        made_by=_made_by(_versions(reply), len(answer_ids)),
        tool_calls=tuple(choice["message"].get("tool_calls") or ()) if is_chat else (),
    )


def _versions(reply: Mapping[str, Any]) -> tuple[int, ...]:
    """Return those that the reply lists, or the one of its name."""
    _, _, version = str(reply.get("model", "")).rpartition("@")
    named = (int(version),) if version.isdecimal() else ()
    return tuple(reply.get("versions", named))


def _made_by(versions: tuple[int, ...], count: int) -> tuple[int, ...]:
    """A reply does not say where a version ends, so tokens of several may all be mixed."""
    if not versions:
        return ()
    return (versions[0] if len(versions) == 1 else -1 - versions[-1],) * count


def grpo_batch(
    groups: Sequence[Sequence[tuple[Completion | Sequence[Completion], float]]],
    *,
    divides_by_std: bool = True,
    advantages: AdvantageName | None = None,
) -> Batch:
    """Return a batch of groups of (answer, reward). A group has the answers to one prompt.

    Only sampled tokens carry loss. An answer of several sequences counts once in its group's mean,
    and each of its sequences has its advantage. An answer without tokens counts in the mean and is
    then left out.

    Args:
        divides_by_std: see `group_advantages`. Without it a group whose rewards differ little
            counts little.
        advantages: a name of `splice.client.advantages`, in place of `divides_by_std`. gae: as
            `gae_batch`.

    Raises:
        ConfigError: no answer has a token.
    """
    if advantages == GAE:
        return gae_batch([pair for group in groups for pair in group])
    kept = [group for group in groups if group]
    name = advantages or ("grpo" if divides_by_std else "dr_grpo")
    found = advantages_of([[reward for _, reward in group] for group in kept], name)
    rows = [
        (sequence, advantage)
        for group, own in zip(kept, found, strict=True)
        for (answer, _), advantage in zip(group, own, strict=True)
        for sequence in ((answer,) if isinstance(answer, Completion) else answer)
        if sequence.answer_ids
    ]
    return batch_of(rows)


def gae_batch(
    answers: Sequence[tuple[Completion | Sequence[Completion], float | Sequence[float]]],
) -> Batch:
    """Return a batch of (answer, reward), for a loss with `value`: the trainer's value head makes
    the advantages.

    A reward is that of the whole answer, and belongs to its last sampled token; or one for each
    answer token. Each sequence of an answer of several has the whole reward, as if it were the
    only one.

    Raises:
        ConfigError: no answer has a token.
    """
    return batch_of(
        [
            (sequence, reward)
            for answer, reward in answers
            for sequence in ((answer,) if isinstance(answer, Completion) else answer)
            if sequence.answer_ids
        ],
        are_rewards=True,
    )


def sft_batch(answers: Sequence[Completion]) -> Batch:
    """Return a batch of given answers, for the loss `cross_entropy`. They need no log-probs.

    Raises:
        ConfigError: no answer has a token.
    """
    return batch_of([(answer, 1.0) for answer in answers if answer.answer_ids])


def batch_of(
    rows: Sequence[tuple[Completion, float | Sequence[float]]], *, are_rewards: bool = False
) -> Batch:
    """Return a batch of (sequence, advantage), with one advantage or that of each answer token.

    Args:
        are_rewards: they are rewards, for a loss with `value`. One is that of the last sampled
            token.

    Raises:
        ConfigError: there are no rows.
    """
    if not rows:
        raise ConfigError("no answer has a token; a batch needs at least one")
    tokens, lengths, versions = array.array("i"), array.array("i"), array.array("i")
    mask, advantages, logprobs, temperatures = (array.array("f") for _ in range(4))
    spans = any(len(set(completion.made_by)) > 1 for completion, _ in rows)
    for completion, advantage in rows:
        prompt, answer = len(completion.prompt_ids), len(completion.answer_ids)
        sampled = [float(s) for s in completion.sampled] or [1.0] * answer
        tokens.extend((*completion.prompt_ids, *completion.answer_ids))
        lengths.append(prompt + answer)
        mask.extend([0.0] * prompt + sampled)
        each = [advantage] * answer if isinstance(advantage, int | float) else advantage
        if are_rewards and isinstance(advantage, int | float):
            last = max((i for i, s in enumerate(sampled) if s), default=0)
            each = [advantage * (i == last) for i in range(answer)]
        advantages.extend([0.0] * prompt)
        advantages.extend(a * s for a, s in zip(each, sampled, strict=True))
        logprobs.extend((*([0.0] * prompt), *(completion.logprobs or [0.0] * answer)))
        temperatures.append(completion.temperature)
        made_by = completion.made_by
        versions.extend((*([0] * prompt), *made_by) if spans else made_by[:1] or (0,))
    experts, routing = _routed_experts([completion for completion, _ in rows])
    # Given answers have none, and those that a user cut have another number.
    is_known = all(len(c.made_by) == len(c.answer_ids) for c, _ in rows)
    specs = batch_specs(
        num_sequences=len(lengths),
        num_tokens=len(tokens),
        optional=[
            "temperatures",
            *(["routed_experts"] if experts else []),
            *(["rewards"] if are_rewards else []),
            *(["versions"] if is_known else []),
        ],
        routing=routing,
        by_token=["versions"] if spans else [],
    )
    buffers: list[array.array[Any]] = [
        tokens,
        lengths,
        mask,
        array.array("f", bytes(4 * len(tokens))) if are_rewards else advantages,
        logprobs,
        *experts,
        temperatures,
        *([advantages] if are_rewards else []),
        *([versions] if is_known else []),
    ]
    return Batch(specs=specs, buffers=tuple(buffer.tobytes() for buffer in buffers))


def _routed_experts(
    sequences: Sequence[Completion],
) -> tuple[list[array.array[int]], tuple[int, int]]:
    """The buffer, if the sequences have routings, with the model's layers and experts per token.

    The last token of a sequence gets the experts of the one before: nothing depends on them.

    Raises:
        ConfigError: some sequences have a routing and others have none, or one is too short.
    """
    found = [sequence.routing for sequence in sequences if sequence.routing is not None]
    if not found:
        return [], (0, 0)
    if len(found) != len(sequences):
        raise ConfigError(
            f"{len(sequences) - len(found)} of {len(sequences)} sequences have no routed experts; "
            "either all of a batch are replayed or none"
        )
    experts = array.array("i")
    for sequence, routing in zip(sequences, found, strict=True):
        last = len(sequence.prompt_ids) + len(sequence.answer_ids) - 1
        if len(routing) < last:
            raise ConfigError(
                f"a sequence of {last + 1} tokens has routed experts of only {len(routing)}"
            )
        experts.extend(routing.rows(0, last))
        experts.extend(routing.rows(last - 1, last))
    return [experts], (found[0].layers, found[0].top_k)
