"""Starts a run where its file is not: as a Slurm job, on a Ray cluster, or as a JobSet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import ConfigError
from splice.client.run_file import RunFile, stop_command
from splice.cluster import keys, kubernetes, ray_launcher, slurm, up

Place = Literal["host", "slurm", "ray", "k8s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Where a run starts, and what only that place needs; see `splice up --help`."""

    on: Place
    dry_run: bool = False
    gpus_per_host: int = 8
    cpus_per_gpu: int = 8
    memory_per_gpu: int = 64
    sbatch: str = ""
    ray_address: str = "auto"
    trainer_image: str = ""
    inference_image: str = ""
    claim: str = "splice-run"

    def start(
        self,
        run: RunFile,
        *,
        resume: bool,
        publish: bool,
        timeout_s: float,
        on_wait: Callable[[str], None],
        data_folder: Path | None = None,
    ) -> dict[str, Any]:
        """Write, submit or place the run, with its keys.

        Args:
            data_folder: folder of the loop's data. The loop is then one of the roles, and ends the
                run.

        Returns: `script` and `submitted` of Slurm, `manifest` of Kubernetes, the URLs of Ray.

        Raises:
            ConfigError: the settings cannot work there, or it refuses them; says why.
            NodeLost: a role on Ray was not ready in time.
        """
        if self.dry_run and self.on not in ("slurm", "k8s"):
            raise ConfigError("--dry-run is for --on slurm and --on k8s")
        if self.on == "k8s" and not self.dry_run:
            raise ConfigError("--on k8s writes a manifest and no more: add --dry-run")
        if up.is_alive(up.read_state(run.run_dir)):
            raise ConfigError(  # its clients would take the keys that are made here
                f"the run in {run.run_dir} is up on this host; end it with "
                f"`{stop_command(run.run_dir)}`, or choose another run_dir"
            )
        if self.on != "k8s":
            up.refuse_used(run, resume=resume)
        run.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        run = keys.provide(run)
        if self.on == "ray":
            return ray_launcher.up(
                run,
                address=self.ray_address,
                publish=publish and data_folder is None,
                timeout_s=timeout_s,
                on_wait=on_wait,
                data_folder=data_folder,
            )
        if self.on == "slurm":
            path = slurm.write_script(
                run,
                gpus_per_host=self.gpus_per_host,
                cpus_per_gpu=self.cpus_per_gpu,
                options=self.sbatch,
                data_folder=data_folder,
            )
            return {
                "script": str(path),
                "submitted": None if self.dry_run else slurm.submit(path),
            }
        text = kubernetes.manifest(
            run,
            trainer_image=self.trainer_image,
            inference_image=self.inference_image,
            claim=self.claim,
            cpus_per_gpu=self.cpus_per_gpu,
            memory_per_gpu=self.memory_per_gpu,
            data_folder=data_folder,
        )
        path = run.run_dir / "jobset.json"
        path.write_text(text)
        return {"manifest": str(path)}
