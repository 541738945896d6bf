"""Where a loop's numbers go: TensorBoard, W&B, MLflow, trackio.

`LoopConfig.sinks` chooses. Each tool's own environment variables configure it: WANDB_PROJECT,
WANDB_MODE, MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, TRACKIO_PROJECT, TRACKIO_DIR. A loop
that is started again continues its run there.

    train/*     metrics of the trainer               rollout/*  metrics of the rollouts
    seconds/*   what `Step.seconds` has              balance/*  shares of the step's time
    version     the version that the step made       others     from `Loop.note`

The same numbers also have TRL's names (`TRL_NAMES`, `train/rewards/NAME/mean`), so that a dashboard
made for TRL finds them. WANDB_NAME names the run of W&B, which also gets a table of samples.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

from orchestrator.errors import ConfigError
from splice.rl.background import Background
from splice.rl.config import SinkName

PROJECT = "splice"
"""Project or experiment, where the tool's environment variables name none."""
TRL_NAMES = {
    "rollout/reward_mean": "train/reward",
    "rollout/reward_std": "train/reward_std",
    "rollout/groups_without_signal": "train/frac_reward_zero_std",
    "rollout/answer_tokens": "train/completions/mean_length",
    "rollout/truncated": "train/completions/clipped_ratio",
    "train/kl_mean": "train/kl",
    "train/entropy_mean": "train/entropy",
    "train/lr": "train/learning_rate",
    "train/clip_fraction": "train/clip_ratio/region_mean",
    "seconds/step": "train/step_time",
}
"""Our name -> TRL's (GRPOTrainer, as its W&B run has it)."""
TABLE_ROWS = 32
"""Most samples of a step in a table."""
CLOSE_S = 30.0
"""Longest time in which a sink may write what is left when the loop ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """What a sink is told about its loop. `loop` is the same after a restart."""

    folder: Path
    loop: str
    alias: str
    config: Mapping[str, Any]

    @property
    def run_name(self) -> str:
        """Name of the run in each tool."""
        return f"{self.alias}-{self.loop}"


def with_trl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics, also under TRL's names."""
    parts = "rollout/rewards/"
    more = {TRL_NAMES[name]: value for name, value in metrics.items() if name in TRL_NAMES}
    means = {
        f"train/rewards/{name.removeprefix(parts)}/mean": value
        for name, value in metrics.items()
        if name.startswith(parts)
    }
    return {**metrics, **more, **means}


class Sink(Protocol):
    """One tool. Its methods may raise anything and take long; they run on a separate thread."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""

    def close(self) -> None:
        """Write what is left, and end."""


class TensorBoard:
    """Event files in LOOP/tensorboard, without tensorboardX's thread, which dies of an error."""

    def __init__(self, facts: LoopFacts) -> None:
        events = importlib.import_module("tensorboardX.event_file_writer")
        self._event = importlib.import_module("tensorboardX.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboardX.proto.summary_pb2").Summary
        folder = facts.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        suffix = f".{os.getpid()}.{time.monotonic_ns()}"  # the name itself has only seconds
        self._events = events.EventsWriter(str(folder / "events"), suffix)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append an event and flush it."""
        values = [self._summary.Value(tag=name, simple_value=v) for name, v in metrics.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._events.write_event(event)
        self._events.flush()

    def close(self) -> None:
        """Close the file."""
        self._events.close()


class Wandb:
    """A run of Weights & Biases, with the loop's id."""

    def __init__(self, facts: LoopFacts) -> None:
        wandb, self._newest = importlib.import_module("wandb"), 0
        self._table = wandb.Table
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", facts.run_name),
            id=facts.loop,
            resume="allow",
            reinit="create_new",  # next to the user's own run
            dir=str(facts.folder),
            config=dict(facts.config),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics."""
        self._newest = max(self._newest, step)  # it drops what comes for an older step
        self._run.log(dict(metrics), step=self._newest)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log samples, which all have the same columns."""
        self._newest = max(self._newest, step)
        columns = list(rows[0])
        table = self._table(columns=columns, data=[[row[c] for c in columns] for row in rows])
        self._run.log({"samples": table}, step=self._newest)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class Mlflow:
    """A run of MLflow, tagged with the loop's id; without a tracking URI in LOOP/mlflow.db."""

    def __init__(self, facts: LoopFacts) -> None:
        self._entities = importlib.import_module("mlflow.entities")
        default = f"sqlite:///{facts.folder.absolute() / 'mlflow.db'}"
        uri = os.environ.get("MLFLOW_TRACKING_URI", default)
        self._client = importlib.import_module("mlflow").MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        wanted = f"tags.`splice.loop` = '{facts.loop}'"
        runs = self._client.search_runs([experiment], filter_string=wanted, max_results=1)
        tags = {"splice.loop": facts.loop}
        run = runs[0] if runs else self._client.create_run(
            experiment, run_name=facts.run_name, tags=tags
        )  # fmt: skip
        self._run_id = run.info.run_id
        if not runs:
            for key, value in facts.config.items():
                self._client.log_param(self._run_id, key, str(value)[:500])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics in one request."""
        now_ms, metric = int(time.time() * 1000), self._entities.Metric
        # It refuses a whole request for one name, such as a reward's part "it's short".
        named = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items()}
        found = [metric(name, value, now_ms, step) for name, value in named.items()]
        self._client.log_batch(self._run_id, metrics=found)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


class Trackio:
    """A run of trackio, in its local database."""

    def __init__(self, facts: LoopFacts) -> None:
        self._run = importlib.import_module("trackio").init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=facts.run_name,
            resume="allow",
            config=dict(facts.config),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


_SINKS: dict[SinkName, tuple[str, Callable[[LoopFacts], Sink]]] = {
    "tensorboard": ("tensorboardX", TensorBoard),
    "wandb": ("wandb", Wandb),
    "mlflow": ("mlflow", Mlflow),
    "trackio": ("trackio", Trackio),
}
"""Name -> its package, and how to open it."""
assert set(_SINKS) == set(get_args(SinkName))


def check(names: Sequence[SinkName]) -> None:
    """Refuse sinks whose packages are not installed.

    Raises:
        ConfigError: names the package and the setting.
    """
    for name in names:
        package, _ = _SINKS[name]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"the sink {name!r} needs the package {package}, which is not installed: "
                f"pip install {package}, or leave it out of LoopConfig.sinks"
            )


class SinkThread:
    """One sink, opened at its first write, on its own thread. A failure loses that write.

    A sink that could not be opened is opened again at the next write.
    """

    def __init__(self, name: SinkName, facts: LoopFacts) -> None:
        self._facts, self._open = facts, _SINKS[name][1]
        self._sink: Sink | None = None
        self._background = Background(name)

    @property
    def problem(self) -> str:
        """What was lost and why; empty if nothing was."""
        return self._background.problem

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics over; returns at once."""
        self._background.call(lambda: self._write(step, metrics))

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Hand samples over, for a sink that has tables; returns at once."""
        self._background.call(lambda: self._write_table(step, rows))

    def _opened(self) -> Sink:
        if self._sink is None:
            self._sink = self._open(self._facts)
        return self._sink

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._opened().write(step, metrics)

    def _write_table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        sink = self._opened()
        if isinstance(sink, Wandb):
            sink.table(step, rows)

    def _close(self) -> None:
        if self._sink is not None:
            self._sink.close()

    def close(self) -> None:
        """Write what is left, for at most `CLOSE_S`."""
        self._background.call(self._close)
        self._background.close(timeout_s=CLOSE_S)
