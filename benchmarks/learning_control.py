"""The control of `benchmarks.learning`: one process that samples from the weights it trains, by
transformers, PEFT and torch.optim only.

Nothing of splice's is used but the task and the group-relative advantages.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.learning_task import Row, Task, reward
from splice.client.advantages import group_advantages

Answer = tuple[list[int], list[int]]
"""Prompt ids, answer ids."""
PROMPT_TOKENS = 128
"""Prompts are padded to a multiple, so that compiled decoding has few shapes."""
MICRO_BATCH_TOKENS = 1024
"""Logits of a vocabulary of 150,000 take gigabytes; a step's gradient is the same sum."""


class Control:
    """A model, its optimizer, and how it samples.

    Args:
        full: train every parameter (fp32 masters of bf16 weights), not an adapter.
    """

    def __init__(self, model: Path, task: Task, *, seed: int, full: bool, device: str) -> None:
        torch.manual_seed(seed)
        self.task, self.device = task, device
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
        self.sampler: Any = self.model
        """Plain transformers, with the weights of the present step."""
        self.generation = self.model.generation_config
        if not full:
            self.sampler = copy.deepcopy(self.model)
            lora = LoraConfig(
                r=task.rank, lora_alpha=task.alpha, target_modules="all-linear", lora_dropout=0.0
            )
            self.model = get_peft_model(self.model, lora)
        self.learned = [p for p in self.model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.learned]
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=task.full_lr if full else task.lora_lr,
            betas=(task.beta1, task.beta2),
            eps=1e-8,
            weight_decay=0.0,
        )

    @torch.no_grad()
    def merge(self) -> None:
        """Give the sampler the base's weights with the adapter merged in, by PEFT."""
        if self.sampler is self.model:
            return
        bases = {
            name.removeprefix("base_model.model.").removesuffix(".base_layer"): module.weight
            for name, module in self.model.named_modules()
            if name.endswith(".base_layer")
        }
        before = {name: weight.detach().clone() for name, weight in bases.items()}
        self.model.merge_adapter()
        for name, weight in bases.items():
            self.sampler.get_submodule(name).weight.copy_(weight)
        self.model.unmerge_adapter()
        for name, weight in bases.items():
            weight.copy_(before[name])

    @torch.no_grad()
    def sample(self, rows: list[Row], *, temperature: float) -> list[Answer]:
        """An answer to each row, the ending token included."""
        self.merge()
        size = self.task.num_prompts * self.task.group_size
        return [
            answer
            for at in range(0, len(rows), size)
            for answer in self._sample(rows[at : at + size], temperature=temperature)
        ]

    def _sample(self, rows: list[Row], *, temperature: float) -> list[Answer]:
        prompts = [
            self.tokenizer.apply_chat_template(
                r["messages"], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for r in rows
        ]
        width = -(-max(map(len, prompts)) // PROMPT_TOKENS) * PROMPT_TOKENS
        ends = self.generation.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        pad = self.tokenizer.pad_token_id
        pad = ends[0] if pad is None else pad
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor(
            [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device
        )
        found = self.sampler.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self.task.max_tokens,
            pad_token_id=pad,
            repetition_penalty=1.0,
            top_k=0,
            top_p=1.0,
            **({"do_sample": False} if temperature == 0 else {"do_sample": True}),
            temperature=temperature or 1.0,
            # On a GPU transformers compiles the decoding of a static cache: eager takes 9 s a step.
            cache_implementation="static",
        )
        return [
            (prompt, _until(line, ends))
            for prompt, line in zip(prompts, found[:, width:].tolist(), strict=True)
        ]

    def rewards(self, rows: list[Row], answers: list[Answer]) -> list[float]:
        """One for each answer."""
        return [
            reward(row, self.tokenizer.decode(ids, skip_special_tokens=True))
            for row, (_, ids) in zip(rows, answers, strict=True)
        ]

    def train(self, answers: list[Answer], advantages: list[float]) -> None:
        """One step of `-sum A log p / tokens`: on policy, GRPO's gradient."""
        tokens = sum(len(ids) for _, ids in answers)
        size = max(1, MICRO_BATCH_TOKENS // max(len(p) + len(a) for p, a in answers))
        for at in range(0, len(answers), size):
            some = answers[at : at + size]
            width = max(len(p) + len(a) for p, a in some)
            ids = torch.zeros(len(some), width, dtype=torch.long)
            mask, weight = torch.zeros_like(ids), torch.zeros(len(some), width)
            for i, (prompt, answer) in enumerate(some):
                length = len(prompt) + len(answer)
                ids[i, :length] = torch.tensor(prompt + answer)
                mask[i, :length] = 1
                weight[i, len(prompt) : length] = advantages[at + i]
            ids, mask, weight = (t.to(self.device) for t in (ids, mask, weight))
            logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
            loss = torch.zeros((), device=self.device)
            for line, target, given in zip(logits, ids[:, 1:], weight[:, 1:], strict=True):
                logprobs = line.float().log_softmax(-1).gather(-1, target[:, None])[:, 0]
                loss = loss - (given * logprobs).sum()
            (loss / tokens).backward()
        for master, parameter in zip(self.masters, self.learned, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, self.task.max_grad_norm)
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.learned, strict=True):
            parameter.data.copy_(master.detach())


def _until(ids: list[int], ends: list[int]) -> list[int]:
    """The ids up to the first ending token, with it."""
    stop = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]


def run(
    curve: Any, training: list[Row], held_out: list[Row], control: Control, *, limit_s: float
) -> None:
    """All steps, or those that begin within the limit; each is written to the curve."""
    task, end_s = control.task, time.monotonic() + limit_s

    def evaluate(step: int) -> None:
        rewards = control.rewards(held_out, control.sample(held_out, temperature=0.0))
        curve.add("evaluations", step=step, accuracy=sum(rewards) / len(rewards))

    evaluate(0)
    for step in range(1, task.steps + 1):
        if time.monotonic() > end_s:
            return
        first = (step - 1) * task.num_prompts
        chosen = [training[i % len(training)] for i in range(first, first + task.num_prompts)]
        rows = [row for row in chosen for _ in range(task.group_size)]
        began_s = time.monotonic()
        answers = control.sample(rows, temperature=1.0)
        sampled_s = time.monotonic()
        rewards = control.rewards(rows, answers)
        groups = [rewards[i : i + task.group_size] for i in range(0, len(rewards), task.group_size)]
        control.train(answers, [a for group in groups for a in group_advantages(group)])
        curve.add(
            "steps",
            step=step,
            reward=sum(rewards) / len(rewards),
            answer_tokens=sum(len(ids) for _, ids in answers) / len(answers),
            sampling_s=sampled_s - began_s,
            training_s=time.monotonic() - sampled_s,
        )
        if step % task.evaluate_every == 0 or step == task.steps:
            evaluate(step)
