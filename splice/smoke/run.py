"""The smoke run, from checkpoint to report.

checkpoint -> trainer + vLLM ready -> @0 -> [rollouts -> TrainMerged -> @k] * steps
           -> TrainLora -> proof -> report
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import httpx
from rich.console import Console
from rich.markup import escape

from orchestrator.errors import ConfigError, SpliceError
from orchestrator.protocol.messages import (
    InitialSync,
    JobOf,
    JobResult,
    LossSpec,
    OptimParams,
    PublishResult,
    TrainLora,
    TrainMerged,
    TrainMergedResult,
)
from splice.client.batches import Batch, grpo_batch
from splice.client.clients import run_watched
from splice.cluster import Cluster
from splice.smoke import proof as proving
from splice.smoke import rollouts, served
from splice.smoke.config import TAU, SmokeConfig, check
from splice.smoke.display import Display
from splice.smoke.report import SmokeReport, print_table

T = TypeVar("T")
Result = TypeVar("Result", bound=JobResult)
HTTP_TIMEOUT_S = 120.0
_REPORTED = {
    *("version", "alias", "metrics", "bytes_sent", "mode", "why_in_place", "canary", "sent"),
    *("num_tensors", "num_verified", "unverified", "states", "attempts"),
}
"""Fields of a publication's result that the report repeats."""
_SETTINGS = ("steps", "lr", "num_prompts", "group_size", "max_tokens", "proof")


def run_smoke(
    config: SmokeConfig, *, console: Console, check_interrupts: Callable[[], None] = lambda: None
) -> SmokeReport:
    """Run the smoke test. The report is written even if a check failed.

    Args:
        check_interrupts: called between pieces of work; raises KeyboardInterrupt to end the run.

    Raises:
        ConfigError: bad input; no process was started.
    """
    model_config, run = check(config), config.run
    report = SmokeReport(model=str(run.model), device=run.device, dtype=run.trainer.dtype)
    report.settings = _settings(config)
    started_s = time.monotonic()
    with Display(console) as display:
        try:
            with Cluster(
                run,
                trainer_module=config.trainer_module,
                on_wait=display.phase,
                measures_memory=True,
            ) as cluster:
                report.seconds["start"] = time.monotonic() - started_s
                vocab_size = int(model_config["vocab_size"])
                _Smoke(
                    config,
                    cluster,
                    display,
                    report,
                    vocab_size=vocab_size,
                    check_interrupts=check_interrupts,
                ).run()
                report.peak_memory_bytes = cluster.launcher.peak_bytes
                report.is_complete = True
        except ConfigError:
            raise
        except (SpliceError, OSError, httpx.HTTPError) as error:
            check_interrupts()  # an interrupted process may have failed and hidden the interrupt
            report.failures.append(f"{type(error).__name__}: {error}")
        finally:
            report.seconds["total"] = time.monotonic() - started_s
            if config.report is not None:
                report.write(config.report)
    print_table(report, console)
    return report


class _Smoke:
    """The steps of one run. Failed checks are added to `report.failures`."""

    def __init__(
        self,
        config: SmokeConfig,
        cluster: Cluster,
        display: Display,
        report: SmokeReport,
        *,
        vocab_size: int,
        check_interrupts: Callable[[], None],
    ) -> None:
        self._check_interrupts = check_interrupts
        self._config, self._cluster, self._display, self._report = config, cluster, display, report
        self._run = config.run
        self._vocab_size = vocab_size
        self._base_url = cluster.base_urls[0]
        self._served: dict[int, served.Logprobs] = {}
        self._trained: dict[str, Path] = {}
        self._sequences: list[list[int]] = []
        self._rewards: dict[int, float] = {}

    def run(self) -> None:
        self._note_packages()
        self._publish_first()
        for step in range(1, self._config.steps + 1):
            self._train_and_publish(step)
        if self._run.trainer.finetuning_type == "lora":
            self._train_lora()
        if self._config.proof:
            self._prove()

    # ------------------------------------------------------------ steps

    def _publish_first(self) -> None:
        name = self._run.name
        result = self._job(InitialSync(), f"{name}@0")
        self._http(self._prepare_probes)
        self._after_version(result, reward=None, rollout_s=0.0)

    def _job(self, job: JobOf[Result], label: str, buffers: Sequence[bytes] = ()) -> Result:
        """Run a job, show its progress, and look at the roles meanwhile."""
        return run_watched(
            self._cluster.client,
            job,
            look=self._cluster.launcher.check,
            buffers=buffers,
            on_progress=lambda progress: self._display.on_progress(label, progress),
        )

    async def _prepare_probes(self, http: httpx.AsyncClient) -> None:
        self._rewards = await rollouts.answer_token_ids(http, model=self._run.name)
        prompts = []
        for text in rollouts.PROMPTS[:4]:
            response = await http.post("/tokenize", json={"model": self._run.name, "prompt": text})
            response.raise_for_status()
            prompts.append(response.json()["tokens"])
        self._sequences = served.probe_sequences(vocab_size=self._vocab_size, prompts=prompts)

    def _train_and_publish(self, step: int) -> None:
        batch, reward, rollout_s = self._rollouts(step)
        job = TrainMerged(
            loss=LossSpec(name="grpo", allowed_token_ids=tuple(sorted(self._rewards))),
            optim=OptimParams(lr=self._config.lr),
            tensors=batch.specs,
        )
        label = f"{self._run.name}@{step}"
        result = self._job(job, label, batch.buffers)
        self._check_metrics(step, result.metrics)
        for text in result.warnings:
            self._display.done(escape(f"@{step}: {text}"))
        self._after_version(result, reward=reward, rollout_s=rollout_s)

    def _rollouts(self, step: int) -> tuple[Batch, float, float]:
        """Return a batch, its mean reward, and the seconds that it took."""
        job = f"{self._run.name}@{step}" if step <= self._config.steps else "TrainLora"
        self._display.phase(f"{job}: rollouts from {self._run.name}@{step - 1}")
        started_s = time.monotonic()
        config = self._config
        prompts = rollouts.choose_prompts(count=config.num_prompts, seed=step)
        groups = self._http(
            lambda http: rollouts.sample(
                http,
                model=self._run.name,
                prompts=prompts,
                rewards=self._rewards,
                group_size=config.group_size,
                max_tokens=config.max_tokens,
                seed=step,
            )
        )
        versions = rollouts.versions_of(groups)
        if versions != {step - 1}:
            self._fail(
                f"@{step}: rollouts came from versions {sorted(versions)}, expected {step - 1}"
            )
        return grpo_batch(groups), rollouts.mean_reward(groups), time.monotonic() - started_s

    def _after_version(
        self, result: PublishResult, *, reward: float | None, rollout_s: float
    ) -> None:
        version = result.version
        metrics = result.metrics if isinstance(result, TrainMergedResult) else {}
        seconds = {"rollout": rollout_s, **result.seconds}
        self._trained[str(version)] = self._what_was_trained(result)
        self._served[version] = self._http(
            lambda http: served.prompt_logprobs(
                http, model=f"{self._run.name}@{version}", sequences=self._sequences
            )
        )
        try:
            self._http(lambda http: served.check_alias(http, name=self._run.name, version=version))
        except served.ServedError as error:
            self._fail(f"@{version}: {error}")
        if result.unverified:
            self._display.done(escape(f"@{version}: not verified by digest: {result.unverified}"))
        row = result.model_dump(mode="json", include=_REPORTED) | {
            "loss": metrics.get("loss"),
            "tokens": metrics.get("tokens"),
            "reward": reward,
            "seconds": seconds,
            "max_logprob_diff": None,
        }
        self._report.versions.append(row)
        loss = "" if row["loss"] is None else f", loss {row['loss']:.4f}, reward {reward:.3f}"
        self._display.done(
            f"[bold]{escape(result.alias)}[/bold] is served: {result.num_tensors} tensors "
            f"({result.sent}), {result.bytes_sent / 1e6:.1f} MB, "
            f"pause {seconds['pause'] * 1e3:.0f} ms{loss}"
        )

    def _check_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        for name in ("grad_norm", "tokens"):
            value = metrics.get(name)
            if value is None or not value > 0:
                self._fail(
                    f"@{step}: the job's {name} is {value}; nothing was learned. Where every "
                    "answer had the same reward, take a smaller --lr"
                )
        gap = metrics.get("logprob_gap_max")
        if gap is None or (self._run.trainer.dtype == "float32" and not gap < TAU):
            self._fail(
                f"@{step}: trainer and sampler disagree on the sampled tokens' log-probs by {gap}"
            )

    def _train_lora(self) -> None:
        batch, _, rollout_s = self._rollouts(self._config.steps + 1)
        output_dir = self._run.run_dir.absolute() / "lora_job"
        job = TrainLora(
            loss=LossSpec(name="grpo", allowed_token_ids=tuple(sorted(self._rewards))),
            optim=OptimParams(lr=self._config.lr),
            tensors=batch.specs,
            output_dir=str(output_dir),
        )
        result = self._job(job, "TrainLora", batch.buffers)
        files = {p.name for p in output_dir.iterdir()}
        if not {"adapter_config.json", "adapter_model.safetensors"} <= files:
            self._fail(f"TrainLora left {sorted(files)} in {output_dir}, not a PEFT adapter")
        self._trained["lora_job"] = output_dir
        seconds = {"rollout": rollout_s, **result.seconds}
        self._report.lora_job = {
            "output_dir": str(output_dir),
            "metrics": result.metrics,
            "seconds": seconds,
        }
        self._http(
            lambda http: served.check_alias(http, name=self._run.name, version=self._config.steps)
        )
        self._display.done(
            "TrainLora wrote a PEFT adapter; "
            f"{escape(self._run.name)}@{self._config.steps} is still served"
        )

    def _prove(self) -> None:
        self._display.phase("proof: merging by PEFT and scoring by transformers")
        started_s = time.monotonic()
        sharp = self._run.trainer.dtype == "float32"
        trainer = self._run.trainer
        answer: dict[str, Any] = proving.run_reference(
            python=self._run.trainer.python,
            model=self._run.trainer.model,
            dtype=self._run.trainer.dtype,
            trained=self._trained,
            sequences=self._sequences,
            work_dir=self._run.run_dir,
            tau=TAU if sharp else None,
            rounding_seed=trainer.seed if trainer.rounding == "stochastic" else None,
        )
        proof = proving.judge(
            tau=answer["tau"],
            served=self._served,
            reference=answer["logprobs"],
            rounded=None if sharp else answer["rounded_logprobs"],
        )
        proving.judge_sensitivity(proof, answer["perturbed"], sharp=sharp)
        moved = self._moved_by_lora_job(answer["logprobs"])
        if sharp and moved is not None and not moved > 10 * proof.tau:
            proof.failures.append(
                f"the adapter that TrainLora wrote equals the previous one: {moved:.1e} nats apart"
            )
        for row in self._report.versions:
            row |= asdict(proof.versions[row["version"]])
        self._report.proof = {
            "tau": proof.tau if sharp else None,
            "perturbed": proof.perturbed,
            "perturbed_noise": answer["perturbed_noise"],
            "share_changed": answer.get("share_changed", {}),
            "lora_job_moved": moved,
            "seconds": time.monotonic() - started_s,
        }
        for failure in proof.failures:
            self._fail(failure)

    def _moved_by_lora_job(self, logprobs: dict[str, served.Logprobs]) -> float | None:
        """Nats between the `TrainLora` job's adapter and the last version; None without a job."""
        if "lora_job" not in logprobs:
            return None
        return served.max_difference(logprobs["lora_job"], logprobs[str(self._config.steps)])

    # ------------------------------------------------------------ helpers

    def _what_was_trained(self, result: PublishResult) -> Path:
        """The reference's input: the version's adapter, or for full parameters its HF export."""
        if self._run.trainer.finetuning_type == "lora":
            return Path(result.checkpoint_dir) / "adapter"
        folder = self._run.run_dir.absolute() / "exported" / str(result.version)
        if self._config.proof:
            folder.parent.mkdir(exist_ok=True)
            self._cluster.client.export_hf(str(folder))
        return folder

    def _http(self, call: Any) -> Any:
        async def go() -> Any:
            async with httpx.AsyncClient(
                base_url=self._base_url, timeout=HTTP_TIMEOUT_S, trust_env=False
            ) as http:
                coroutine: Coroutine[Any, Any, Any] = call(http)
                return await coroutine

        result = asyncio.run(go())
        self._check_interrupts()
        return result

    def _fail(self, text: str) -> None:
        self._report.failures.append(text)
        self._display.done(f"[red]failed[/red] {escape(text)}")

    def _note_packages(self) -> None:
        for node in self._cluster.client.status().nodes:
            self._report.packages[node.node_id] = dict(node.packages)
            self._report.gpus[node.node_id] = list(node.gpus)


def _settings(config: SmokeConfig) -> dict[str, Any]:
    return {
        **{n: getattr(config, n) for n in _SETTINGS},
        "run": config.run.model_dump(mode="json"),
        "tau": TAU,
    }
