"""Presents an HF checkpoint folder to Megatron-Bridge: a checked config and a lazy state dict.

The folder has config.json, and safetensors unless weights are random. Bridge takes `HfCheckpoint`
for its own `PreTrainedCausalLM`. The vocabulary's rows are padded to what Megatron allocates.
Raises `ConfigError` only.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from orchestrator.errors import ConfigError
from orchestrator.protocol import topology
from orchestrator.protocol.config import without_weights
from trainer_node.hf import fp8_blocks, language_part

log = logging.getLogger("splice.trainer")
ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError,
          RuntimeError, SafetensorError, StrictDataclassError, TypeError,
          ValueError)  # fmt: skip # a list of names
"""What transformers may raise of a value in a config, or of a checkpoint."""
_UNUSED = re.compile(r"(?:^|\.)(?:mtp\.|rotary_emb\.|masked_bias$)")
"""Tensors that no trainer reads: further tokens' heads, and buffers of old releases."""
_KEPT_WIDE = "e_score_correction_bias"
_ROUNDED = {"F16": "float16", "F32": "float32", "F64": "float64"}
"""Dtypes with more bits than bfloat16 has."""
SAMPLE_BYTES = 64
"""Length of a sample of `fingerprint`."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file with the permissions of the user's umask. The library's own files
    are readable only by the user."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


def auto_config(folder: Path) -> Any:
    """The folder's config by transformers.

    Raises:
        ConfigError: no config.json, or transformers cannot read it.
    """
    import transformers

    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"no config.json in {folder}; `model` must be an HF checkpoint folder")
    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except ERRORS as error:
        kind = None
        with contextlib.suppress(ValueError, AttributeError):  # no JSON, or no object
            kind = json.loads(file.read_text()).get("model_type")
        if kind is None or kind in transformers.CONFIG_MAPPING:
            raise ConfigError(f"transformers cannot read {file}: {error}") from error
        # transformers' own text says to install another version.
        raise ConfigError(
            f"{file}: transformers {transformers.__version__}, which the trainer runs on, knows no "
            f"model_type {kind!r}. splice cannot train it until Megatron-Bridge and that version do"
        ) from error


def read_config(folder: Path) -> Any:
    """The folder's config, by transformers 4 or 5; for a multimodal model, that of its language
    part.

    Raises:
        ConfigError: no config.json, transformers cannot read it, or a layer that Bridge would build
            otherwise without a word.
    """
    config, file = auto_config(folder), folder / "config.json"
    raw = json.loads(file.read_text())
    if fp8_blocks.is_block_scaled(folder):
        del config.quantization_config  # the trainer has bf16
    raw = topology.language_part(raw)
    experts = {raw[k] for k in ("num_experts", "num_local_experts") if raw.get(k) is not None}
    if len(experts) > 1:
        raise ConfigError(
            f"{file}: num_experts and num_local_experts differ: {sorted(experts)}; make them agree"
        )
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"{file}: dense layers among MoE layers (mlp_only_layers, decoder_sparse_step) are "
            "not supported"
        )
    return language_part.text_config(config)


class _Keys:
    """The checkpoint's keys, or every key without a checkpoint.

    Args:
        names: the checkpoint's; None: random weights.
        hidden: a tied output layer, which is not a key even if a file has it.
    """

    def __init__(self, names: Collection[str] | None, *, hidden: str | None) -> None:
        self._names, self._hidden = names, hidden

    def __contains__(self, name: object) -> bool:
        if name == self._hidden:
            return False
        return self._names is None or name in self._names

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names or () if name in self)

    def has_glob(self, pattern: str) -> bool:
        """Whether a tensor's name matches, under Bridge's method name; none does without a
        checkpoint."""
        return bool(fnmatch.filter(self, pattern))

    def get_all_keys(self) -> _Keys:
        """Return the tensors' names, under Bridge's method name."""
        return self


class _State(Mapping[str, torch.Tensor]):
    """Name -> tensor, read when asked for; KeyError without one, because Bridge probes.

    Block-scaled FP8 is read as bf16.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        *,
        vocab_tensors: Sequence[str],
        padded_vocab: int,
        source: _Keys,
    ) -> None:
        self.source, self._files = source, files
        self._scaled = fp8_blocks.weights_of(files)
        self._vocab_tensors, self._padded_vocab = vocab_tensors, padded_vocab

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        scales = self._read(name + fp8_blocks.SUFFIX) if name in self._scaled else None
        tensor = fp8_blocks.read(name, self._read(name), scales)
        missing = self._padded_vocab - tensor.shape[0]
        if name in self._vocab_tensors and missing > 0:
            tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
        return tensor

    def _read(self, name: str) -> torch.Tensor:
        with _reading(self._files[name]), safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, ValueError, LookupError) as error:
        raise ConfigError(
            f"{path} cannot be read: {type(error).__name__}: {error}; is it complete?"
        ) from error


def _is_left_out(name: str, layers: int) -> bool:
    """Whether no trainer of a model with this many layers reads the tensor."""
    layer = _LAYER.search(name)
    beyond = layer is not None and int(layer.group(1)) >= layers
    return beyond or _UNUSED.search(name) is not None


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, by the index or the files' own headers.

    Raises:
        ConfigError: names a file that cannot be read.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with _reading(index):
            return {n: folder / f for n, f in json.loads(index.read_text())["weight_map"].items()}
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _reading(path), safe_open(path, framework="pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    return files


def tensor_dtypes(folder: Path) -> dict[str, str]:
    """Tensor name -> its dtype as safetensors spells it, by the files' own headers.

    Raises:
        ConfigError: names a file that cannot be read.
    """
    found: dict[str, str] = {}
    for path in sorted(set(tensor_files(folder).values())):
        with _reading(path), safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found


def fingerprint(folder: Path) -> str:
    """A hash of a checkpoint's tensors: names, dtypes, shapes, and samples from each one's
    beginning and middle. Other weights of the same model have another one; other files of the same
    weights have the same.

    Raises:
        ConfigError: names a file that cannot be read.
    """
    found = {}
    for path in sorted(set(tensor_files(folder).values())):
        with _reading(path), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            for name, tensor in json.loads(file.read(size)).items():
                if name == "__metadata__":
                    continue
                first, end = tensor["data_offsets"]
                parts = []
                for at in (first, (first + end) // 2):
                    file.seek(8 + size + at)
                    parts.append(file.read(min(SAMPLE_BYTES, end - at)))
                found[name] = repr((tensor["dtype"], tensor["shape"], parts))
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:32]


def warn_of_rounding(folder: Path, names: Collection[str]) -> None:
    """Say which of these tensors a model in bfloat16 rounds. Megatron keeps the bias by which
    experts are chosen in fp32."""
    dtypes = tensor_dtypes(folder)
    wide = sorted(
        name
        for name, dtype in dtypes.items()
        if dtype in _ROUNDED and name in names and not name.endswith(_KEPT_WIDE)
    )
    if wide:
        log.warning(
            "%d of %d tensors of the checkpoint are %s, e.g. %s; with dtype = bfloat16 they are "
            "rounded, and served so from the first version on",
            len(wide),
            len(names),
            " and ".join(sorted({_ROUNDED[dtypes[name]] for name in wide})),
            wide[0],
        )


class HfCheckpoint:
    """The object that Bridge reads: `.config`, `.state` and `.state.source.get_all_keys()`.

    Args:
        vocab_tensors: names of the embedding and, where there can be one, an output layer apart.
        padded_vocab: their rows in Megatron.
        tied: whether these are one tensor.
    """

    def __init__(
        self,
        folder: Path,
        config: Any,
        *,
        vocab_tensors: tuple[str, ...],
        padded_vocab: int,
        tied: bool,
        with_weights: bool,
    ) -> None:
        self.config, self.model_name_or_path = config, str(folder)
        self.vocab_tensors = vocab_tensors
        files = tensor_files(folder)
        self._tied_head = vocab_tensors[1] if tied and len(vocab_tensors) > 1 else None
        scales = {name + fp8_blocks.SUFFIX for name in fp8_blocks.weights_of(files)}
        source = _Keys(files.keys() - scales if with_weights else None, hidden=self._tied_head)
        self.state = _State(
            files, vocab_tensors=vocab_tensors, padded_vocab=padded_vocab, source=source
        )
        if with_weights and not len(self.state):
            raise ConfigError(without_weights(folder, random="trainer.init = 'random'"))

    @functools.cached_property
    def fingerprint(self) -> str:
        """See the function."""
        return fingerprint(Path(self.model_name_or_path))

    def left_out(self) -> set[str]:
        """The checkpoint's tensors that no trainer of this model reads or exports."""
        layers = getattr(self.config, "num_hidden_layers", 0)
        own = set(self.state.source).difference(language_part.towers(self.state))
        return {name for name in own if _is_left_out(name, layers)}

    def check_names(self, names: Collection[str]) -> None:
        """Check that the checkpoint has the tensors that the model is made of, and no other head.
        Bridge only warns of one that is missing. A warning names tensors that nobody reads.

        Raises:
            ConfigError: one is missing, or a tied head is another matrix.
        """
        missing = sorted(name for name in names if name not in self.state)
        known = (names, language_part.towers(self.state), self.left_out())
        left = sorted(set(self.state.source).difference(*known))
        if missing:
            other = f", and has {left[0]} instead" if left else ""
            raise ConfigError(
                f"the checkpoint lacks {len(missing)} of the model's tensors, e.g. {missing[0]}"
                f"{other}. It is incomplete, or Megatron-Bridge builds another model of its config"
            )
        if left:
            log.warning(
                "%d tensors of the checkpoint are not read, e.g. %s: its config.json, as "
                "Megatron-Bridge reads it, has no place for them",
                len(left),
                left[0],
            )
        embedding, head = self.vocab_tensors[0], self._tied_head
        if head is None or head not in self.state:
            return
        if not torch.equal(self.state[embedding], self.state[head]):
            raise ConfigError(
                f"config.json ties {head} to {embedding}, but the checkpoint's {head} has other "
                "values; remove it, or set tie_word_embeddings to false"
            )
