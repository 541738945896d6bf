"""What a served version has of a LoRA update, for each way of rounding it; one process, no server.

`matrix`: a policy trains on sums for 20 steps, and each way of serving it (`fidelity_policy.WAYS`)
is compared with the unmerged policy. `loop-fp32` and `loop-bf16`: the sampler has the served
weights, so what a version lacks reaches the next step. All but `loop-bf16` compute in fp32.

    J             mean probability of the right answer on held-out sums; the peer is the trained J
    gain          (J - J_base) / (J_trained - J_base), and its standard error over the sums
    kl, gap       KL(trained, served) and mean |log-prob gap| of held-out tokens, in nats
    served_share  <delta, W' - W> / <delta, delta>; changed_share: elements with W' != W
    rho           rms(delta) / rms(W)
    differs       share of elements that differ from the previous step's version

FP8 changes the base too: `gain_own_base` compares with the base served in the same way.

SPLICE_BENCH_FIDELITY_MODELS has the models: "smollm2=DIR:sigma,coder=DIR". The word after the
colon hides the grid of a GGUF (`fidelity_policy.jittered`). With the same prefix, _PARTS, _LR,
_LOOP_LR, _RANKS (a loop has the first), _SEEDS and _STEPS select cells, so that several processes
can share them, each with its own --out. _HELD_OUT (120) is the number of sums and _LOOP_STEPS (30)
the length of a loop. The file is written after each case.

`python -m benchmarks.fidelity FILE...` prints Markdown tables of the files.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, cast, get_args

import torch
from transformers import AutoTokenizer

from benchmarks import clusters, harness
from benchmarks.fidelity_policy import WAYS, Forward, Jitter, Policy, Rows, merged
from benchmarks.fidelity_task import HeldOut, Sums, Training, probabilities, right_rows
from benchmarks.harness import Case, Result
from orchestrator.errors import ConfigError
from orchestrator.protocol.config import RoundingMode

PREFIX = "SPLICE_BENCH_FIDELITY_"
ALPHA = {8: 16.0, 32: 32.0}
LOOPS = {
    "loop-fp32": "nearest/native nearest/served stochastic/native stochastic/served "
    "stochastic_new/native",
    "loop-bf16": "nearest/native nearest/served stochastic/native stochastic/fused "
    "stochastic/served",
}
"""Way of serving / the trainer's forward pass. In fp32 `fused` is `native`."""
PARTS = ("matrix", *LOOPS)
LOOP_EVERY = 3
"""Steps between two measurements of J in a loop."""
KL_ROWS = 256
"""Tokens whose KL is computed at a time, in fp64."""


USUAL = {
    "PARTS": ",".join(PARTS), "LR": "1e-6,1e-5,1e-4,1e-3", "LOOP_LR": "1e-5,1e-4", "RANKS": "8,32",
    "SEEDS": "1,2,3", "STEPS": "1,5,20", "LOOP_STEPS": "30", "HELD_OUT": "120", "TEXT_TOKENS": "64",
}  # fmt: skip # a table
SMALL = {
    "LR": "1e-3", "LOOP_LR": "1e-3", "RANKS": "8", "SEEDS": "1", "STEPS": "1,2", "LOOP_STEPS": "1",
    "HELD_OUT": "6", "TEXT_TOKENS": "8",
}  # fmt: skip # a table
KINDS: Mapping[str, Any] = {"PARTS": str, "LR": float, "LOOP_LR": float}
"""What the words of a setting are; others are whole numbers."""
Plan = Mapping[str, Sequence[Any]]


def run(*, device: str, small: bool) -> Iterator[Case]:
    """Cells one by one; with `small` those of a tiny random model."""
    torch.set_float32_matmul_precision("highest")
    plan = plan_of(SMALL if small else os.environ, prefix="" if small else PREFIX)
    with TemporaryDirectory() as folder:
        models: Mapping[str, tuple[Path, Jitter]] = (
            {"tiny": (clusters.make_model("tiny-dense", Path(folder) / "model"), "none")}
            if small
            else models_of(os.environ.get(f"{PREFIX}MODELS", ""))
        )
        for name, (path, jitter) in models.items():
            tokenizer = AutoTokenizer.from_pretrained(path)
            sums = Sums(tokenizer, held_out=plan["HELD_OUT"][0], by_parity=small)
            for part in plan["PARTS"]:
                dtype = torch.bfloat16 if part == "loop-bf16" else torch.float32
                policy = Policy(path, dtype=dtype, device=device, jitter=jitter)
                cells = _matrix if part == "matrix" else _loops
                yield from cells(policy, sums, plan, {"part": part, "model": name})


def plan_of(words: Mapping[str, str], *, prefix: str = PREFIX) -> Plan:
    """Each setting's values: of the words given, else of USUAL.

    Raises:
        ConfigError: an unknown part.
    """
    plan = {
        name: [KINDS.get(name, int)(word) for word in words.get(prefix + name, usual).split(",")]
        for name, usual in USUAL.items()
    }
    if unknown := set(plan["PARTS"]) - set(PARTS):
        raise ConfigError(f"{PREFIX}PARTS has {unknown}; the parts are {', '.join(PARTS)}")
    return plan


def models_of(words: str) -> dict[str, tuple[Path, Jitter]]:
    """Folder and jitter of each model.

    Raises:
        ConfigError: none, or an unknown jitter.
    """
    found = {}
    for word in filter(None, words.split(",")):
        name, _, place = word.partition("=")
        folder, _, jitter = place.partition(":")
        found[name] = Path(folder), cast(Jitter, jitter or "none")
    if not found or not {jitter for _, jitter in found.values()} <= set(get_args(Jitter)):
        raise ConfigError(
            f'set {PREFIX}MODELS to "name=folder,name=folder:JITTER"; a JITTER is one of '
            + ", ".join(get_args(Jitter))
        )
    return found


def _training(policy: Policy, sums: Sums, cell: Mapping[str, Any], forward: Forward) -> Training:
    policy.adapt(rank=cell["rank"], alpha=cell["alpha"], seed=cell["seed"])
    return Training(policy, sums, lr=cell["lr"], seed=cell["seed"], forward=forward)


def _cell(at: Mapping[str, str], lr: float, rank: int, seed: int) -> dict[str, Any]:
    return {**at, "lr": lr, "rank": rank, "alpha": ALPHA.get(rank, float(rank)), "seed": seed}


def _case(cell: Mapping[str, Any], last: str, j: float, trained: float, **more: Any) -> Case:
    name = "{model}/{part}/lr{lr:g}/rank{rank}/seed{seed}/".format(**cell) + last
    return Case(
        name=name, metric="J", unit="probability", samples=(j,), peer="trained",
        peer_samples=(trained,), settings={**cell, **more},
    )  # fmt: skip # a list


# ------------------------------------------------------------ one update, every way of serving


def _matrix(policy: Policy, sums: Sums, plan: Plan, at: Mapping[str, str]) -> Iterator[Case]:
    held = HeldOut.of(policy, sums, text_tokens=plan["TEXT_TOKENS"][0])
    zeros = policy.deltas()
    bases = [_right(policy, held.right, "native")]
    policy.serve("fp8_fp32", zeros, version=0)
    bases.append(_right(policy, held.right, "served"))
    for lr, rank, seed in itertools.product(*(plan[n] for n in ("LR", "RANKS", "SEEDS"))):
        cell, began_s, previous = _cell(at, lr, rank, seed), time.monotonic(), zeros
        training = _training(policy, sums, cell, "native")
        for step in range(1, max(plan["STEPS"]) + 1):
            if step in plan["STEPS"]:
                previous = policy.deltas()
            training.step("native")
            if step not in plan["STEPS"]:
                continue
            for way, numbers in _compared(policy, held, bases, previous, version=step):
                j, trained = numbers.pop("J"), numbers.pop("J_trained")
                yield _case(cell, f"step{step}/{way}", j, trained, step=step, way=way, **numbers)
        print(f"{cell}: {time.monotonic() - began_s:.1f} s", flush=True)


@torch.no_grad()
def _right(policy: Policy, rows: Rows, mode: Forward) -> torch.Tensor:
    """The probability of each right answer."""
    policy.use(mode)
    return probabilities(policy.logprobs(rows), rows)


@torch.no_grad()
def _compared(
    policy: Policy,
    held: HeldOut,
    bases: Sequence[torch.Tensor],
    previous: Mapping[str, torch.Tensor],
    *,
    version: int,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Every way of serving the present adapter, with its numbers; `bases` in bf16 and in FP8."""
    deltas, base_N = policy.deltas(), bases[0]
    trained_N = _right(policy, held.right, "native")
    logits = [policy.logits(rows) for rows in held.sampled]
    for way in WAYS:
        policy.serve(way, deltas, version=version)
        served_N = _right(policy, held.right, "served")
        own_N = bases[way.startswith("fp8_")]
        gain, noise = gain_of(served_N - base_N, trained_N - base_N)
        own_gain, own_noise = gain_of(served_N - own_N, trained_N - base_N)
        pairs = [_of_tokens(policy, *pair) for pair in zip(held.sampled, logits, strict=True)]
        kl_T, gap_T = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        numbers = _of_weights(policy, deltas, previous, way=way, version=version) | {
            "J": served_N.mean(), "J_trained": trained_N.mean(), "J_base": base_N.mean(),
            "J_own_base": own_N.mean(), "gain": gain, "gain_noise": noise,
            "gain_own_base": own_gain, "gain_own_base_noise": own_noise,
            "kl": kl_T.mean(), "kl_noise": kl_T.std() / len(kl_T) ** 0.5,
            "gap": gap_T.mean(), "gap_max": gap_T.max(),
        }  # fmt: skip # a list
        values = torch.stack([value.double() for value in numbers.values()])
        yield way, dict(zip(numbers, values.tolist(), strict=True))


def gain_of(gained_N: torch.Tensor, moved_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ratio of two means of the same sums, and its standard error."""
    gain = gained_N.mean() / moved_N.mean()
    noise = (gained_N - gain * moved_N).std() / len(moved_N) ** 0.5
    return gain, noise / moved_N.mean().abs()


def _of_weights(
    policy: Policy,
    deltas: Mapping[str, torch.Tensor],
    previous: Mapping[str, torch.Tensor],
    *,
    way: str,
    version: int,
) -> dict[str, torch.Tensor]:
    """Means over the layers, each counted by its elements."""
    lines, sizes = [], []
    for name, layer in policy.layers.items():
        delta, weight = deltas[name], layer.weight_OI
        start = weight
        if way.startswith("fp8_"):
            start = merged(weight, 0 * delta, way=way, name=name, version=version)
        moved = layer.served_OI - start
        before = merged(weight, previous[name], way=way, name=name, version=version - 1)
        line = [
            (moved * delta).sum() / delta.square().sum(),
            moved.count_nonzero() / moved.numel(),
            (delta.square().mean() / weight.square().mean()).sqrt(),
            (layer.served_OI != before).sum() / moved.numel(),
        ]
        lines.append(torch.stack(line))
        sizes.append(float(moved.numel()))
    weights = torch.tensor(sizes, device=lines[0].device) / sum(sizes)
    names = ("served_share", "changed_share", "rho", "differs")
    return dict(zip(names, weights @ torch.stack(lines), strict=True))


def _of_tokens(
    policy: Policy, rows: Rows, trained_TV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 KL(trained, served) and |log-prob gap| of each token; a KL is never negative."""
    kls, gaps, served_TV = [], [], policy.logits(rows)
    for at in range(0, len(served_TV), KL_ROWS):
        trained, served = (
            z_TV[at : at + KL_ROWS].double().log_softmax(-1) for z_TV in (trained_TV, served_TV)
        )
        apart = served - trained
        kls.append((trained.exp() * (apart.expm1() - apart)).sum(-1))
        labels = rows.labels_T[at : at + KL_ROWS, None]
        gaps.append(apart.gather(-1, labels)[:, 0].abs())
    return torch.cat(kls), torch.cat(gaps)


class Rescorer:
    """Compares a product's adapters with their merged versions, in fp32."""

    def __init__(self, model: Path, *, device: str) -> None:
        torch.set_float32_matmul_precision("highest")
        self._policy = Policy(model, dtype=torch.float32, device=device)
        sums = Sums(AutoTokenizer.from_pretrained(model), held_out=int(USUAL["HELD_OUT"]))
        text_tokens = int(USUAL["TEXT_TOKENS"])
        self._sampled = HeldOut.of(self._policy, sums, text_tokens=text_tokens).sampled

    @torch.no_grad()
    def numbers(self, adapter: Path, *, mode: RoundingMode, seed: int) -> dict[str, float]:
        """KL(trained, served) and mean |log-prob gap| in nats a token, of the base's samples."""
        policy = self._policy
        policy.load(adapter)
        policy.use("native")
        logits = [policy.logits(rows) for rows in self._sampled]
        # `stochastic_new` draws the thresholds from a number: here the run's seed.
        way = "nearest" if mode == "nearest" else "stochastic_new"
        policy.serve(way, policy.deltas(), version=seed)
        pairs = [_of_tokens(policy, *pair) for pair in zip(self._sampled, logits, strict=True)]
        kl_T, gap_T = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return {"kl": float(kl_T.mean()), "gap": float(gap_T.mean())}


# ------------------------------------------------------------ loops


def _loops(policy: Policy, sums: Sums, plan: Plan, at: Mapping[str, str]) -> Iterator[Case]:
    right, modes = right_rows(sums, policy.device), LOOPS[at["part"]].split()
    for lr, seed, mode in itertools.product(plan["LOOP_LR"], plan["SEEDS"], modes):
        cell, began_s = _cell(at, lr, plan["RANKS"][0], seed), time.monotonic()
        way, _, forward = mode.partition("/")
        training = _training(policy, sums, cell, cast(Forward, forward))
        curve = list(_curve(policy, training, right, way=way, steps=plan["LOOP_STEPS"][0]))
        last = curve[-1]
        yield _case(cell, mode, last["J"], last["J_trained"], mode=mode, curve=curve)
        print(f"{cell} {mode}: {time.monotonic() - began_s:.1f} s", flush=True)


def _curve(
    policy: Policy, training: Training, right: Rows, *, way: str, steps: int
) -> Iterator[dict[str, float]]:
    """A line for each version: J where it is measured, then what the step from it saw.

    J_trained is that of `fused`, which loses nothing of the adapter in either dtype.
    """
    for version in range(steps + 1):
        line: dict[str, float] = {"step": version}
        policy.serve(way, policy.deltas(), version=version)
        if version % LOOP_EVERY == 0 or version == steps:
            line["J"] = float(_right(policy, right, "served").mean())
            line["J_trained"] = float(_right(policy, right, "fused").mean())
        yield line | (training.step("served") if version < steps else {})


# ------------------------------------------------------------ tables


def summary(results: Iterable[Result]) -> str:
    """Markdown tables of the files of one or more processes: means over the seeds."""
    cells, loops = defaultdict(list), defaultdict(list)
    for case in (c for result in results for c in result.cases):
        at = case.settings
        if at["part"] == "matrix":
            numbers = {**at, "J": case.value, "J_trained": case.peer_value}
            cells[at["model"], at["lr"], at["rank"], at["step"]].append(numbers)
        else:
            loops[at["part"], at["model"], at["lr"], at["mode"]].append(at["curve"])
    fp8 = [way for way in WAYS if way.startswith("fp8_")]
    plain = [way for way in WAYS if way not in fp8]
    weights = "Share of delta in the weights (elements changed; differing from the version before)"
    own = "{gain_own_base:.1%} ± {gain_own_base_noise:.1%}"
    texts = {
        "Gain served": (plain, "{gain:.1%} ± {gain_noise:.1%}"),
        "Gain served in FP8, over FP8's base": (fp8, own),
        "KL in nats a token (mean log-prob gap)": (WAYS, "{kl:.1e} ({gap:.1e})"),
        weights: (plain, "{served_share:.2%} ({changed_share:.2%}; {differs:.2%})"),
    }
    found = []
    for title, (ways, text) in texts.items():
        lines = []
        for place, every in sorted(cells.items()):
            of_ways = [[c for c in every if c["way"] == way] for way in ways]
            first = "{rho:.1e} {J_base:.4g} {J_trained:.4g}".format(**_means(every)).split()
            texts_of_ways = [text.format(**_means(some)) if some else "" for some in of_ways]
            lines.append([*map(_word, place), *first, *texts_of_ways])
        header = ["model", "lr", "rank", "step", "rho", "J base", "J trained", *ways]
        found += [_markdown(title, header, lines)] if lines else []
    lines = []
    for loop, curves in sorted(loops.items()):
        last = len(curves[0]) - 1
        for step in (12, last) if last > 12 else (last,):
            js = [", ".join(f"{c[step][j]:.4g}" for c in curves) for j in ("J", "J_trained")]
            gap = max(line["gap"] for curve in curves for line in curve[:step])
            lines.append([*map(_word, loop), str(step), *js, f"{gap:.1e}"])
    header = ["part", "model", "lr", "mode", "step", "J served", "J trained", "largest mean gap"]
    found += [_markdown("Loops, J of each seed", header, lines)] if lines else []
    return "\n\n".join(found)


def _means(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each number; the cells of a way differ in their seed."""
    names = [name for name, value in cells[0].items() if isinstance(value, float)]
    return {name: fmean(c[name] for c in cells) for name in names}


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _markdown(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join([f"{title}:", "", *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    print(summary(harness.load(Path(path)) for path in sys.argv[1:]))
