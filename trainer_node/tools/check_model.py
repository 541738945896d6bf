"""Checks that the trainer builds, computes and exports a model as transformers does.

    python -m trainer_node.tools.check_model --model FOLDER [--whole] [--out report.json]

By default a small model of the same kind takes the place of the real one: fewer layers, experts
and heads, narrower, windows of 16 tokens, limits that bind (`lower_limits`), random weights in
every tensor. Everything else of config.json stays. `--whole` takes the folder's own weights, in
fp32 and in this host's memory.

    built        Bridge has the architecture, and the trainer refuses nothing
    exported     each name and byte of the checkpoint comes out again
    log-probs    of packed sequences equal transformers', within its own rounding
    gradient     its norm equals transformers'
    config       every number of the config that moves transformers' log-probs was in the comparison

Rounding is measured: transformers computes in fp32 and in fp64. The trainer may be `MARGIN` times
as far from fp64 as transformers in fp32 is. A field of the config counts if another value moves
transformers' log-probs by more than `SEEN` times that bound; the trainer then has the right value
of it.

Every norm of transformers' gets the config's epsilon, as in Megatron and vLLM: transformers leaves
two of multi-latent attention at 1e-6.

Axes: T = tokens of all sequences, V = vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from orchestrator.errors import ConfigError, SpliceError
from orchestrator.protocol import hub
from orchestrator.protocol.config import TrainerConfig, check_model_folder
from orchestrator.protocol.messages import LossSpec
from trainer_node.hf import fp8_blocks, language_part
from trainer_node.hf.checkpoint import ERRORS, auto_config, tensor_files
from trainer_node.tools import admission
from trainer_node.tools.make_checkpoint import VOCAB_SIZE, write_tokenizer

if TYPE_CHECKING:
    from trainer_node.training.batch import Batch

LENGTHS = (21, 70, 34)
"""Of the sequences: beyond the small windows and the chunks (64) of the gated delta rule."""
MARGIN = 10.0
FLOOR = 2e-5
"""Nats, and parts of a gradient's norm, that are always allowed."""
SEEN = 5.0
AT_MOST = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_nextn_predict_layers": 0,
}  # fmt: skip # a table
"""Sizes of the small model. Its tokenizer is `make_checkpoint`'s."""
FEWEST_LAYERS = 2
LOWER = (0.1, 0.01, 0.001)
"""Parts of a number that has no effect at its own size: a limit binds at one of them."""


@dataclass(slots=True)
class Row:
    """One line of the report."""

    name: str
    ok: bool
    text: str


@dataclass(slots=True, kw_only=True)
class Report:
    """What was found. `rows` ends with the first check that could not be made."""

    model: str
    architecture: str
    whole: bool
    rows: list[Row] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    """Fields of the config that the comparison of log-probs has checked."""
    unseen: list[str] = field(default_factory=list)
    """Numbers of the config that do not move transformers' log-probs."""

    @property
    def ok(self) -> bool:
        """Whether the model may be trained."""
        return all(row.ok for row in self.rows)


# ---------------------------------------------------------------- a small model of the same kind


def small_config(folder: Path) -> Any:
    """A small transformers config of the folder's kind.

    Raises:
        ConfigError: transformers does not know it, or the config lacks a size.
    """
    config = language_part.text_config(auto_config(folder))
    raw = config.to_dict()
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    if lacking := [key for key in sizes if not isinstance(raw.get(key), int)]:
        raise ConfigError(
            f"{folder}/config.json ({config.model_type}) has no {', '.join(lacking)}, so no small "
            "model of its kind can be made"
        )
    if raw["num_attention_heads"] % (raw.get("num_key_value_heads") or 1):
        raise ConfigError(
            f"{folder}/config.json: num_attention_heads ({raw['num_attention_heads']}) is no "
            f"multiple of num_key_value_heads ({raw['num_key_value_heads']})"
        )
    layers = _layers(raw)
    heads = min(raw["num_attention_heads"], AT_MOST["num_attention_heads"])
    settings: dict[str, Any] = {
        key: min(raw[key], most) for key, most in AT_MOST.items() if isinstance(raw.get(key), int)
    }
    if not raw.get("head_dim") and not raw.get("qk_rope_head_dim"):
        settings["hidden_size"] = raw["hidden_size"] // raw["num_attention_heads"] * heads
    if raw.get("num_key_value_heads") == raw["num_attention_heads"]:
        settings["num_key_value_heads"] = heads
    for key, value in raw.items():
        if isinstance(value, list) and len(value) == raw["num_hidden_layers"]:
            settings[key] = value[:layers]
        if key.endswith("_token_id") and isinstance(value, int):
            settings[key] = value % settings["vocab_size"]
    settings["num_hidden_layers"] = layers
    if (raw.get("topk_group") or 1) < (raw.get("n_group") or 1):
        # Megatron ranks groups by as many experts as a token takes of each.
        of_each = max(1, min(raw["num_experts_per_tok"] // raw["topk_group"], 3))
        settings["num_experts_per_tok"] = of_each * settings["topk_group"]
    return type(config)(**{k: v for k, v in raw.items() if k not in _NOT_SETTINGS} | settings)


_NOT_SETTINGS = (
    "model_type", "transformers_version", "architectures", "quantization_config", "tower_tokens",
)  # fmt: skip # a list of names


def _layers(raw: dict[str, Any]) -> int:
    """The first layers that have every kind of layer, and each after every kind that it follows."""
    count = raw["num_hidden_layers"]
    lists = [v for v in raw.values() if isinstance(v, list) and len(v) == count]
    for layers in range(min(FEWEST_LAYERS, count), count):
        if all(_successions(v[:layers]) == _successions(v) for v in lists):
            return layers
    return count


def _successions(kinds: list[Any]) -> set[tuple[str, ...]]:
    names = list(map(str, kinds))
    return {*zip(names), *pairwise(names)}


def randomize(model: torch.nn.Module) -> None:
    """Draw every tensor at random, including those that transformers initialises to 0 or 1. A norm,
    bias, sink or decay that the trainer leaves out then changes the result."""
    biases = [(n, b) for n, b in model.named_buffers() if "bias" in n]
    for name, parameter in [*model.named_parameters(), *biases]:
        values = parameter.data
        if "norm" in name and values.dim() == 1:
            low = -0.5 if not values.any() else 0.5
            values.uniform_(low, low + 1.0)
        elif values.dim() == 1 or not values.any():
            values.normal_(0.0, 0.3)
        elif not torch.isfinite(values).all():
            values.normal_(0.0, 0.1)


def write_small(folder: Path, out: Path) -> Path:
    """Write a small random checkpoint of the folder's kind into `out`, a new folder.

    Raises:
        ConfigError: transformers has no causal language model of this kind.
    """
    import transformers

    config = small_config(folder)
    try:
        torch.manual_seed(0)
        config.initializer_range = 0.1  # log-probs far from uniform
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ERRORS as error:
        text = str(error).partition(" Model type should be one of")[0]
        why = f"{type(error).__name__}: {text}"
        if isinstance(error, KeyError):  # such as a rope_type
            why = f"it does not know {error}, which {folder}/config.json says"
        raise ConfigError(
            f"transformers cannot build a small {config.model_type}: {why}"
        ) from error
    _refuse_another_class(folder, type(model).__name__)
    config.architectures = [type(model).__name__]
    randomize(model)
    model.save_pretrained(out)
    write_tokenizer(out)
    return out


def _refuse_another_class(folder: Path, built: str) -> None:
    """The start builds what `architectures` names. A language part has its own class."""
    raw = json.loads((folder / "config.json").read_text())
    named = (raw.get("architectures") or ["nothing"])[0]
    has_parts = any(key.endswith("_config") for key in raw if key != "quantization_config")
    if named != built and not has_parts:
        raise ConfigError(
            f"{folder}/config.json names {named} in architectures, and {built} is the causal "
            f"language model of a {raw.get('model_type')}"
        )


# ---------------------------------------------------------------- transformers' side


def _one_epsilon(model: Any) -> None:
    epsilon = getattr(model.config.get_text_config(), "rms_norm_eps", None)
    for module in model.modules() if epsilon is not None else ():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = epsilon


def _tokens(config: Any) -> list[torch.Tensor]:
    """Random sequences without the padding token, for whose embedding transformers has no
    gradient."""
    generator, padding = torch.Generator().manual_seed(1), config.pad_token_id
    size = config.vocab_size - (padding is not None)
    drawn = [torch.randint(size, (n,), generator=generator) for n in LENGTHS]
    return drawn if padding is None else [ids + (ids >= padding) for ids in drawn]


class Reference:
    """transformers' model of a checkpoint, on the CPU."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",  # the others take no fp64
        ).eval()
        self.config, self.architecture = self._model.config, type(self._model).__name__
        _one_epsilon(self._model)
        self.tokens = _tokens(self.config.get_text_config())

    def log_probs(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Of each sequence's tokens but the first, end to end."""
        self._model.to(dtype)
        found = []
        for ids in self.tokens:
            logits = self._model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            found.append(logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0])
        return torch.cat(found)

    def gradient_norm(self, dtype: torch.dtype) -> float:
        """Of the summed log-probs."""
        self._model.to(dtype)
        self._model.zero_grad()
        self.log_probs(dtype).sum().backward()
        parts = [p.grad.double().norm() for p in self._model.parameters() if p.grad is not None]
        return float(torch.stack(parts).norm())

    def moves(self, only: Collection[tuple[str, ...]] = ()) -> dict[tuple[str, ...], float]:
        """Number or switch of the config, or `only` these -> the largest change of a log-prob with
        another value."""
        there = [f for f in fields(self.config.to_dict()) if not only or f[0] in only]
        found = {path: self.moved(path, value) for path, value in there}
        return {path: moved for path, moved in found.items() if moved is not None}

    @torch.no_grad()
    def moved(self, path: Sequence[str], value: Any) -> float | None:
        """The largest change of a log-prob with another value in the config; None: the model cannot
        be built with it, or has other tensors."""
        raw = copy.deepcopy(self.config.to_dict())
        inner = raw
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        before, plain = self._model, self.log_probs()
        try:
            config = type(self.config)(**{k: v for k, v in raw.items() if k not in _NOT_SETTINGS})
            config._attn_implementation = config._experts_implementation = "eager"
            other = type(before)(config).float().eval()
            _one_epsilon(other)
            other.load_state_dict(before.state_dict())
            self._model = other
            return float((self.log_probs() - plain).abs().max())
        except ERRORS:
            return None
        finally:
            self._model = before


def fields(
    config: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, another value) of the config's numbers and switches."""
    for key, value in config.items():
        at = (*path, key)
        if str(key).endswith("_token_id") or key in _NO_MATHEMATICS:
            continue
        if isinstance(value, dict):
            if not key.endswith("_config") or key == "text_config":  # the others are towers'
                yield from fields(value, at)
        elif isinstance(value, bool):
            yield at, not value
        elif isinstance(value, int):
            yield at, value + 1
        elif isinstance(value, float):
            yield at, value * (100 if value < 1e-3 else 0.9)


_NO_MATHEMATICS = (
    "max_position_embeddings",
    "initializer_range",
    "label2id",
    "id2label",
    *_NOT_SETTINGS,
)


# ---------------------------------------------------------------- the trainer's side


def batch_of(tokens: Sequence[torch.Tensor]) -> Batch:
    """Sequences with loss on all tokens but the first."""
    from trainer_node.training.batch import Batch

    mask_T = torch.cat([torch.cat([torch.zeros(1), torch.ones(len(t) - 1)]) for t in tokens])
    zeros_T = torch.zeros_like(mask_T)
    return Batch(
        tokens_T=torch.cat(list(tokens)).int(),
        loss_mask_T=mask_T,
        advantages_T=zeros_T,
        sampler_logprobs_T=zeros_T,
        lengths=tuple(map(len, tokens)),
    )


class _Trained:
    """The trainer's model of a checkpoint, on the CPU, with all parameters trainable."""

    def __init__(self, folder: Path) -> None:
        from trainer_node.training.start import start

        config = TrainerConfig(model=folder, finetuning_type="full", micro_batch_tokens=4096)
        self._trainer = start(config)

    def differences(self, folder: Path) -> tuple[int, list[str], list[str]]:
        """Number of exported tensors, what differs from the checkpoint, and what nobody reads."""
        from trainer_node.export.merged import Exporter

        files, wrong = tensor_files(folder), []
        left = set(files)
        for name, tensor in Exporter(self._trainer.model).base_tensors():
            if name not in left:
                wrong.append(f"{name} is exported, but not in the checkpoint")
                continue
            left.discard(name)
            with safe_open(files[name], framework="pt") as file:
                stored = file.get_tensor(name)
            if stored.shape != tensor.shape or not torch.equal(stored.to(tensor.dtype), tensor):
                wrong.append(f"{name} comes out with other values")
        checkpoint = self._trainer.model.checkpoint
        unread = left & checkpoint.left_out()
        missing = left.intersection(checkpoint.state.source) - unread
        wrong += [f"{name} is not exported" for name in sorted(missing)]
        return len(files) - len(left), wrong, sorted(unread)

    def run(self, tokens: Sequence[torch.Tensor]) -> tuple[torch.Tensor, float]:
        """Log-probs of each sequence's tokens but the first, packed, and the gradient's norm."""
        from trainer_node.training.gradients import finalize_gradients, global_norm

        batch, trainer = batch_of(tokens), self._trainer
        log_probs_T, _ = trainer.forward(batch)
        trainer.forward_backward(batch, LossSpec(name="cross_entropy"))
        finalize_gradients(trainer.model.params, denominator=1.0, sequence_parallel=False)
        norm = float(global_norm(trainer.model.params, trainer.model.device))
        return log_probs_T[batch.loss_mask_T > 0], norm


# ---------------------------------------------------------------- the check


def lower_limits(
    reference: Reference, moves: dict[tuple[str, ...], float], folder: Path
) -> set[tuple[str, ...]]:
    """Lower numbers in a folder's config.json that have an effect only when they are lower: a limit
    that never binds would not be compared. Returns their paths.

    Numbers of positions stay, nested ones (of the rotary embedding) too: the trainer knows only
    some of their values.
    """
    file = folder / "config.json"
    raw, lowered = json.loads(file.read_text()), set()
    for path, moved in moves.items():
        (name, *nested), number = path, raw.get(path[0])
        if moved > SEEN * FLOOR or nested or "position" in name:
            continue
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        for lower in (type(number)(number * part) for part in LOWER):
            if lower > 0 and (reference.moved(path, lower) or 0.0) > SEEN * FLOOR:
                raw[name] = lower
                lowered.add(path)
                break
    file.write_text(json.dumps(raw))
    return lowered


def check(model: Path, *, whole: bool, keep: Path | None = None) -> Report:
    """Check a checkpoint folder; see the module's docstring. Once in a process.

    Args:
        keep: a new folder for the small model.

    Raises:
        ConfigError: the folder holds no model that transformers can build.
    """
    try:
        config = json.loads((model / "config.json").read_text())
    except ValueError as error:
        raise ConfigError(f"{model}/config.json is no JSON: {error}") from error
    architecture = str((config.get("architectures") or [config.get("model_type")])[0])
    report = Report(model=str(model), architecture=architecture, whole=whole)
    try:
        fp8_blocks.is_block_scaled(model)
    except ConfigError as error:  # the small model has no quantisation
        report.rows.append(Row("built", False, str(error)))
        return report
    with tempfile.TemporaryDirectory(prefix="splice-check-") as folder:
        if whole:
            # What transformers does not know is said in a sentence.
            language_part.text_config(auto_config(model))
        used = model if whole else write_small(model, keep or Path(folder) / "model")
        reference = Reference(used)
        report.architecture = reference.architecture
        moves = reference.moves()
        if not whole and (lowered := lower_limits(reference, moves, used)):
            reference = Reference(used)
            moves |= reference.moves(lowered)
        _compare(report, reference, used, moves)
        for row in report.rows:
            row.text = row.text.replace(str(used), str(model))
        return report


def _compare(
    report: Report, reference: Reference, folder: Path, moves: dict[tuple[str, ...], float]
) -> None:
    rows = report.rows
    try:
        trained = _Trained(folder)
        rows.append(Row("built", True, report.architecture))
        count, wrong, unread = trained.differences(folder)
        log_probs_T, norm = trained.run(reference.tokens)
    except (SpliceError, *ERRORS) as error:
        what = "" if isinstance(error, SpliceError) else f"{type(error).__name__}: "
        rows.append(Row("run" if rows else "built", False, f"{what}{error}"))
        return
    text = _some(wrong, "; ") if wrong else f"{count} tensors, each byte"
    text += f". Nobody reads {_some(unread, ', ')}" if unread else ""
    rows.append(Row("exported", not wrong, text))
    with torch.no_grad():
        single_T, double_T = reference.log_probs(), reference.log_probs(torch.float64)
    bound = max(MARGIN * float((single_T - double_T).abs().max()), FLOOR)
    apart = float((log_probs_T - double_T).abs().max())
    rows.append(Row("log-probs", apart <= bound, f"{apart:.1e} nats apart, allowed {bound:.1e}"))
    theirs, exact = (reference.gradient_norm(d) for d in (torch.float32, torch.float64))
    allowed = max(MARGIN * abs(theirs - exact) / exact, FLOOR)
    relative = abs(norm - exact) / exact
    text = f"norm {norm:.4g} against {exact:.4g}: {relative:.1e} apart, allowed {allowed:.1e}"
    rows.append(Row("gradient", relative <= allowed, text))
    for path, moved in moves.items():
        (report.seen if moved > SEEN * bound else report.unseen).append(".".join(path))
    set_here = _names(json.loads((folder / "config.json").read_text()))
    idle = [name for name in report.unseen if name in set_here]
    text = f"compared: {', '.join(report.seen) or 'nothing'}"
    text += f". Not seen to change transformers' log-probs: {', '.join(idle)}" if idle else ""
    rows.append(Row("config", bool(report.seen), text))


def _some(texts: Sequence[str], between: str) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return between.join(texts[:3]) + more


def _names(raw: dict[str, Any]) -> set[str]:
    return {".".join(path) for path, _ in fields(raw)}


def print_table(report: Report) -> None:
    """The report for a person."""
    from rich.console import Console
    from rich.table import Table

    kind = "its own weights" if report.whole else "a small random model of its kind"
    table = Table(title=f"{report.model}: {report.architecture}, {kind}")
    for heading in ("check", "", "what was found"):
        table.add_column(heading)
    for row in report.rows:
        table.add_row(row.name, "[green]ok[/green]" if row.ok else "[red]no[/red]", row.text)
    Console(soft_wrap=False).print(table)


def _be_quiet() -> None:
    """Megatron and transformers have much to say about models that nobody will use."""
    import transformers

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0 if the model may be trained, 1 if not, 2 if it cannot be checked."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer_node.tools.check_model",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="HF checkpoint folder, or a hub id"
    )
    parser.add_argument("--whole", action="store_true", help="with the folder's own weights")
    parser.add_argument("--keep", type=Path, help="a new folder for the small model")
    parser.add_argument("--out", type=Path, help="file for the report, as JSON")
    args = parser.parse_args(argv)
    if args.out is not None and not args.out.absolute().parent.is_dir():
        parser.error(f"--out: no folder {args.out.absolute().parent}")
    _be_quiet()
    try:
        check_model_folder(args.model)
        model = hub.fetch(args.model) if hub.is_hub_id(args.model) else args.model
        with contextlib.redirect_stdout(io.StringIO()):  # Megatron prints
            report = check(model, whole=args.whole, keep=args.keep)
    except KeyboardInterrupt:
        return 130
    except (ConfigError, *ERRORS) as error:
        text = str(error)
        if "ignore_mismatched_sizes" in text:  # transformers points to a report that is not shown
            text = f"{args.model}: tensors have other shapes than config.json says"
        elif not isinstance(error, ConfigError):
            text = f"{args.model}: {type(error).__name__}: {text}"
        sys.stderr.write(f"{admission.SAYS}{text}\n")
        return 2
    text = json.dumps(asdict(report) | {"ok": report.ok}, indent=1)
    if args.out is not None:
        args.out.write_text(text)
    if report.ok and not args.whole:
        admission.keep(model, text)
    print_table(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
