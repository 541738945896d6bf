"""run.toml: one file with the settings of all roles of a run.

    run.toml + --set a.b=c -> RunFile -> OrchestratorConfig, TrainerConfig, InferenceConfig

Every role reads the same file, on one host or on several. What two roles share (`name`, `model`,
`device`, `dtype`) is at the top and may be set for only one role in its table. Relative paths are
relative to the file. `splice config schema` prints every key.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, ValidationError, model_validator

from orchestrator.config import OrchestratorConfig, OrchestratorSettings
from orchestrator.errors import ConfigError
from orchestrator.protocol.config import (
    HUB_ID,
    Device,
    InferenceConfig,
    Settings,
    TrainerConfig,
    check_alias_name,
)
from orchestrator.protocol.curve import peer_keys
from orchestrator.protocol.messages.mistakes import config_error
from orchestrator.publication.config import PublicationConfig
from orchestrator.storage import layout
from orchestrator.storage.files import replace_file
from splice.client.advantages import GAE

FILE_NAME, RUN_JSON = "run.toml", "run.json"
"""What a user writes, and what `splice up` and `Cluster` write into the run's folder."""
ENDPOINT_FILE = "endpoint"
MOST_GPUS = 4096
"""Largest number of GPUs that a table may count."""
KEYS, CLIENT_KEYS = "keys", "client"
"""Folder of a run's keys in its folder, if a launcher made them, and that of its clients within."""
ENDPOINT, TOKEN = "SPLICE_ENDPOINT", "SPLICE_RUN_TOKEN"
"""Environment variables of nodes and clients that do not see the run's folder."""
_SHARED = {
    "trainer": ("model", "device", "dtype"),
    "inference": ("model", "device", "dtype", "name"),
}
BY_DEVICE: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "": {"dtype": "float32"},
        "trainer": {"transport": "tcp"},
        "inference": {
            "transport": "tcp",
            "max_model_len": 512,
            "max_num_seqs": 64,
            "enforce_eager": True,
        },
    },
    "cuda": {
        "": {"dtype": "bfloat16"},
        "trainer": {"transport": "nccl"},
        "inference": {
            "transport": "nccl",
            "max_model_len": "auto",
            "max_num_seqs": 256,
            "enforce_eager": False,
        },
    },
}
"""Device -> table of the file ("": the top) -> defaults that depend on the device."""
_SHARED_BY_PUBLISHERS = {
    "rounding": ("publication", "trainer"),
    "rollout_weights": ("publication", "trainer"),
    "transport": ("trainer", "inference", "publication"),
}
"""Key -> the tables that have it, first the one that users should set."""
_PATHS = (("model",), ("run_dir",), ("trainer", "model"), ("trainer", "adapter"),
          ("trainer", "python"), ("inference", "model"), ("inference", "python"),
          ("orchestrator", "curve_dir"))  # fmt: skip  # a list


TRAINING = frozenset({"data", "loop", "sampling", "loss", "optim", "eval"})
"""Tables of what a run trains: `splice.train.sections.TrainFile` has them, other readers do not."""


class TrainerSection(TrainerConfig):
    """The trainer: `TrainerConfig`, and how to start it."""

    python: Path = Field(default_factory=lambda: Path(sys.executable))
    """Interpreter of the trainer environment: a path, or a command's name."""
    gpus: tuple[int, ...] = ()
    """CUDA devices on its host, one for each rank. A number, such as 8: the first ones."""
    max_restarts: int = Field(default=2, ge=0)
    """Restarts after crashes within an hour. Crashes before the last training request do not
    count."""


class InferenceSection(InferenceConfig):
    """The inference nodes: `InferenceConfig` of each, and how to start them."""

    python: Path = Field(default_factory=lambda: Path(sys.executable))
    """Interpreter of the inference environment: a path, or a command's name."""
    replicas: int = Field(default=1, ge=1)
    """Inference nodes. They share `gpus` evenly, and `port` counts up."""


class RouterSection(Settings):
    """One URL in front of the inference nodes; see `splice.replica_router`."""

    enabled: bool | None = None
    """Whether `splice up` starts it. Without a value: if there are several inference nodes."""
    host: str = "127.0.0.1"
    """Address on which it listens. 0.0.0.0: all of this host's addresses."""
    port: int = Field(default=0, ge=0, le=65535)
    """Its port. With 0 the kernel chooses; RUN_DIR/router has the URL."""


class RunFile(Settings):
    """Everything that is to be known about a run."""

    LOOP: ClassVar[Literal["train", "sft"]] = "train"
    """The command that runs its loop, where it has one."""
    name: Annotated[str, AfterValidator(check_alias_name)]
    """The served alias; versions are served as name@N."""
    model: Path
    """Folder with a Hugging Face checkpoint, or a Hub id: org/name, or org/name@revision."""
    run_dir: Path = Path("run")
    """Folder of the run: journal, endpoint, token, logs, versions."""
    device: Device = "cpu"
    """Where trainer and vLLM run. Without this key: cuda if the file names `gpus`, else cpu."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations."""
    orchestrator: OrchestratorSettings = OrchestratorSettings()
    """The orchestrator."""
    publication: PublicationConfig = PublicationConfig()
    """How versions are published."""
    trainer: TrainerSection
    """The trainer, and how to start it."""
    inference: InferenceSection
    """The inference nodes, and how to start them."""
    router: RouterSection = RouterSection()
    """One URL in front of the inference nodes."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, values: Any) -> Any:
        """Fill what depends on the device, and what the roles take from the top of the file."""
        if not isinstance(values, dict):
            return values
        loop, trainer = values.get("loop"), values.get("trainer", {})
        is_gae = isinstance(loop, dict) and loop.get("advantages") == GAE
        if is_gae and isinstance(trainer, dict):
            values = {**values, "trainer": {"value_head": True, **trainer}}
        known = set(cls.model_fields)
        values = {k: v for k, v in values.items() if k in known or k not in TRAINING}
        values = _share_publishing(values)
        tables = _counted({role: values.get(role, {}) for role in _SHARED})
        has_gpus = any(isinstance(own, dict) and own.get("gpus") for own in tables.values())
        device = values.get("device", "cuda" if has_gpus else "cpu")
        defaults = BY_DEVICE.get(device if isinstance(device, str) else "", BY_DEVICE["cpu"])
        shared = {"device": device, **defaults[""], **values}
        for role, keys in _SHARED.items():
            own = tables[role]
            if isinstance(own, dict):
                taken = {key: shared[key] for key in keys if key in shared}
                shared[role] = {**defaults[role], **taken, **own}
        trainer, inference = shared.get("trainer"), shared.get("inference")
        if isinstance(trainer, dict) and isinstance(inference, dict):
            is_exact = trainer.get("numerics") == "exact"
            if inference.setdefault("exact", is_exact) != is_exact:
                raise ValueError(
                    f"inference.exact is {inference['exact']}, and trainer.numerics "
                    f"{trainer.get('numerics', 'adapters')!r}; give only trainer.numerics"
                )
            if is_exact:
                trainer["sampler_parallel"] = inference.get("tensor_parallel", 1)
        return _share_publishing(shared)

    @model_validator(mode="after")
    def _devices(self) -> Self:
        gpus, each = self.inference.gpus, self.inference.tensor_parallel
        if self.inference.device == "cuda" and len(gpus) != each * self.inference.replicas:
            raise ValueError(
                f"inference.gpus has {len(gpus)} GPUs; {self.inference.replicas} replicas of "
                f"tensor_parallel {each} need {each * self.inference.replicas}"
            )
        ranks = self.trainer.parallel.world_size
        if self.trainer.device == "cuda" and self.trainer.gpus and ranks % len(self.trainer.gpus):
            raise ValueError(
                f"trainer.gpus has {len(self.trainer.gpus)} GPUs for {ranks} ranks "
                "(trainer.parallel.world_size); each rank needs one, as many on each host"
            )
        devices = self.trainer.device, self.inference.device
        if self.trainer.numerics == "exact" and len({*devices}) > 1:
            raise ValueError(
                f"numerics = 'exact' does not go with trainer.device = {devices[0]!r} and "
                f"inference.device = {devices[1]!r}, whose bits differ; use one for both"
            )
        return self

    # ------------------------------------------------------------ what the roles take from it

    @property
    def has_router(self) -> bool:
        """Whether a router is in front of the inference nodes."""
        own = self.router.enabled
        return self.inference.replicas > 1 if own is None else own

    def orchestrator_config(self, *, run_token: str, resume: bool) -> OrchestratorConfig:
        """Return the orchestrator's settings."""
        publication = self.publication
        if self.trainer.follow is not None:  # nothing there can score the canary
            publication = publication.model_copy(update={"canary": False})
        return OrchestratorConfig(
            **dict(self.orchestrator),
            run_dir=self.run_dir,
            run_token=run_token,
            name=self.name,
            publication=publication,
            replicas=self.inference.replicas,
            resume=resume,
        )

    def trainer_config(self) -> TrainerConfig:
        """Return the trainer's settings."""
        own = set(TrainerSection.model_fields) - set(TrainerConfig.model_fields)
        return TrainerConfig(**self.trainer.model_dump(exclude=own))

    def inference_config(self, index: int) -> InferenceConfig:
        """Return the settings of one inference node.

        Raises:
            ConfigError: there is no such replica.
        """
        section = self.inference
        if not 0 <= index < section.replicas:
            raise ConfigError(
                f"inference node {index} is not one of the {section.replicas} of inference.replicas"
            )
        own = set(InferenceSection.model_fields) - set(InferenceConfig.model_fields)
        each = section.tensor_parallel
        more: dict[str, Any] = {
            "gpus": section.gpus[index * each : (index + 1) * each],
            "port": section.port + index if section.port else 0,
            "extra_args": (*self.trainer_config().adapter_arguments, *section.extra_args),
        }
        return InferenceConfig(**section.model_dump(exclude=own) | more)

    # ------------------------------------------------------------ what the run's folder knows

    def endpoint(self) -> str:
        """Where nodes and clients reach the orchestrator."""
        return find_endpoint(self.run_dir)

    def token(self) -> str:
        """Return the run's secret."""
        return find_token(self.run_dir)


R = TypeVar("R", bound=RunFile)


def _counted(tables: dict[str, Any]) -> dict[str, Any]:
    """Replace numbers of GPUs by as many GPUs from 0: first the trainer's, then those after."""
    taken: set[int] = set()
    for role, own in tables.items():
        gpus = own.get("gpus") if isinstance(own, dict) else None
        if type(gpus) is int and 0 <= gpus <= MOST_GPUS:
            free = (gpu for gpu in itertools.count() if gpu not in taken)
            tables = tables | {role: own | {"gpus": list(itertools.islice(free, gpus))}}
        gpus = tables[role].get("gpus") if isinstance(own, dict) else None
        taken |= set(filter(lambda gpu: type(gpu) is int, gpus or ()))
    return tables


def _share_publishing(values: dict[str, Any]) -> dict[str, Any]:
    """Give all sides of a publication one `rounding` and one `transport`, whichever table has it.

    Raises:
        ValueError: two tables differ.
    """
    for key, roles in _SHARED_BY_PUBLISHERS.items():
        tables = {role: values.get(role, {}) for role in roles}
        if not all(isinstance(table, dict) for table in tables.values()):
            return values  # pydantic says so
        found = {f"{role}.{key}": table[key] for role, table in tables.items() if key in table}
        if any(value != next(iter(found.values())) for value in found.values()):
            said = " and ".join(f"{name} is {value!r}" for name, value in found.items())
            raise ValueError(f"{said}; give only {roles[0]}.{key}")
        if found:
            own = {key: next(iter(found.values()))}
            values = values | {role: table | own for role, table in tables.items()}
    return values


def node_file(run: RunFile, node_id: str, text: str) -> Path:
    """Write a node's configuration where its processes read it; returns the path.

    A restart writes nothing, so that it succeeds on a full disk.
    """
    run.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = run.run_dir / f"{node_id}.json"
    if not path.exists() or path.read_text() != text:
        replace_file(path, text)
    return path


def find_endpoint(run_dir: Path) -> str:
    """Return the endpoint: what the orchestrator wrote into the run's folder, or SPLICE_ENDPOINT.

    Raises:
        ConfigError: neither is there.
    """
    return _read(run_dir / ENDPOINT_FILE, variable=ENDPOINT)


def find_token(run_dir: Path) -> str:
    """Return the token: what the orchestrator wrote into the run's folder, or SPLICE_RUN_TOKEN.

    Raises:
        ConfigError: neither is there.
    """
    return _read(run_dir / "token", variable=TOKEN)


def stop_command(run_dir: Path) -> str:
    """Return what a user types to end the run; a run.toml may name another folder."""
    return f"splice stop {shlex.quote(str(run_dir))}"


def run_folder(path: Path) -> Path:
    """Return a run's folder, given it or a folder with a run.toml.

    Raises:
        ConfigError: its layout is of another version of splice.
    """
    folder = load(path).run_dir if (path / FILE_NAME).is_file() else path
    layout.check(folder)
    return folder


def find_run(run_dir: Path) -> dict[str, Any]:
    """Return endpoint and token as a client's keywords.

    Args:
        run_dir: as `run_folder` takes it.

    Raises:
        ConfigError: one of them is not there.
    """
    run_dir = run_folder(run_dir)
    found: dict[str, Any] = {
        "endpoint": find_endpoint(run_dir),
        "run_token": find_token(run_dir),
        "endpoint_file": run_dir / ENDPOINT_FILE,
    }
    if (keys := run_dir / KEYS / CLIENT_KEYS).is_dir():
        found["curve"] = peer_keys("", role="client", node_id="", folder=keys)
    return found


def _read(path: Path, *, variable: str) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        if os.environ.get(variable):
            return os.environ[variable]
        raise ConfigError(
            f"no {path.name} in {path.parent} ({error.strerror}): start the orchestrator first "
            f"(`splice up`, after a stop or a crash with --resume; or `splice serve`), or set "
            f"{variable}"
        ) from None


def load(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read the file; `overrides` are `a.b=value`, with the value as in TOML or a bare word.

    Raises:
        ConfigError: names file, key, allowed values and the nearest right one.
    """
    return load_as(RunFile, path, overrides)


def load_as(model: type[R], path: Path, overrides: Sequence[str] = ()) -> R:
    """Read the file as this model: `TrainFile` also has what the run trains. See `load`."""
    path = path / FILE_NAME if path.is_dir() else path
    values = read(path)
    for override in overrides:
        set_value(values, override)
    return _built(model, values, source=path)


def folder_of(path: Path) -> Path:
    """Return the folder to which a file's relative paths belong."""
    return (path if path.is_dir() else path.parent).absolute()


def read(path: Path) -> dict[str, Any]:
    """Read the values of a run.toml, or of a JSON file with the same keys.

    Raises:
        ConfigError: there is none, or it is neither TOML nor JSON.
    """
    path = path / FILE_NAME if path.is_dir() else path
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}; `splice init DIR` makes one"
        ) from error
    except ValueError as error:  # of either decoder, with line and column
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return values


def build(values: dict[str, Any], *, source: Path) -> RunFile:
    """Return the run with these values. Relative paths are relative to the source's folder.

    Raises:
        ConfigError: names source, key, allowed values and the nearest right one.
    """
    return _built(RunFile, values, source=source)


def _built(model: type[R], values: dict[str, Any], *, source: Path) -> R:
    values.setdefault("run_dir", str(RunFile.model_fields["run_dir"].default))
    for keys in _PATHS:
        _resolve(values, keys, source.absolute().parent)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise config_error(error, model=model, source=str(source)) from None


def absolute(run: RunFile) -> RunFile:
    """Return the run with absolute paths; relative ones are relative to the working folder."""
    return build(run.model_dump(mode="json"), source=Path(FILE_NAME))


def set_value(values: dict[str, Any], override: str) -> None:
    """Set one value, such as `trainer.seed=7`.

    Raises:
        ConfigError: the override is not written so, or names a table within a value.
    """
    name, equals, text = override.partition("=")
    *tables, key = name.strip().split(".")
    if not equals or not key:
        raise ConfigError(f"--set {override!r}: write it as key=value, such as trainer.seed=7")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word, such as bfloat16
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ConfigError(f"--set {override!r}: {table} is a value, not a table")
    values[key] = value


def _resolve(values: dict[str, Any], keys: tuple[str, ...], folder: Path) -> None:
    *tables, key = keys
    for table in tables:
        values = values.get(table, {})
    if not isinstance(values, dict) or not isinstance(value := values.get(key), str):
        return
    found = folder / Path(value).expanduser()
    is_command = key == "python" and "/" not in value
    is_hub_id = key == "model" and HUB_ID.match(value) and not found.exists()
    if not is_command and not is_hub_id:
        values[key] = os.path.abspath(found)
