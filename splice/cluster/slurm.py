"""`splice up --on slurm`: an sbatch script that runs each role of a run.toml as a job step.

    hosts 0..H-1: the trainer's      hosts H..: inference nodes, as many as fit on each
    host 0 also runs the orchestrator

All hosts see the run's folder, where the nodes find endpoint and token. Slurm's cgroups number the
GPUs of each step from 0 (`ConstrainDevices=yes`).
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.processes.python import python_command
from splice.client.run_file import RunFile
from splice.cluster.roles import Role, numbered_from_0, roles_of

SCRIPT, FILE = "slurm.sh", "slurm.json"
ENDPOINT_S = 120
"""Time for the orchestrator to bind, in seconds."""
RENDEZVOUS_PORT = 29400
CPUS_PER_GPU = 8


def write_script(
    run: RunFile,
    *,
    gpus_per_host: int,
    cpus_per_gpu: int = CPUS_PER_GPU,
    options: str = "",
    data_folder: Path | None = None,
) -> Path:
    """Write the script and the file that its roles read into the run's folder.

    Args:
        gpus_per_host: GPUs of one host of the partition.
        cpus_per_gpu: CPUs of a role for each of its GPUs.
        options: more options of sbatch, such as "--partition=gpu --time=4:00:00".
        data_folder: folder of the loop's data, as in `roles_of`. The job ends with the loop.

    Raises:
        ConfigError: the settings cannot work on several hosts, or a role fits on no host.
    """
    text = script(
        run,
        gpus_per_host=gpus_per_host,
        cpus_per_gpu=cpus_per_gpu,
        options=options,
        data_folder=data_folder,
    )
    logs = run.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    run.run_dir.chmod(0o700)
    (run.run_dir / FILE).write_text(numbered_from_0(run))
    path = run.run_dir / SCRIPT
    path.write_text(text)
    return path


def submit(path: Path) -> str:
    """Submit the script; returns what sbatch printed.

    Raises:
        ConfigError: there is no sbatch here, or it refused.
    """
    try:
        done = subprocess.run(
            ["sbatch", str(path)], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"cannot run sbatch: {error}; submit {path} on a host of the cluster"
        ) from error
    if done.returncode:
        raise ConfigError(f"sbatch refused {path}: {done.stderr.strip()}")
    return done.stdout.strip()


def answers() -> bool:
    """Whether this host can reach a cluster, as a login node can: a machine may have Slurm's
    programs for another reason."""
    try:
        asked = subprocess.run(
            ["sinfo", "--noheader"], capture_output=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def script(
    run: RunFile,
    *,
    gpus_per_host: int,
    cpus_per_gpu: int = CPUS_PER_GPU,
    options: str = "",
    data_folder: Path | None = None,
) -> str:
    """Return the script.

    Raises:
        ConfigError: as `write_script`.
    """
    orchestrator, trainer, *others = roles_of(
        run, run.run_dir / FILE, is_spread=True, data_folder=data_folder
    )
    _step = partial(_step_of, cpus_per_gpu=cpus_per_gpu)
    needed = max(role.gpus for role in (trainer, *others))
    if needed > gpus_per_host:
        raise ConfigError(f"a role needs {needed} GPUs on one host, which has {gpus_per_host}")
    own = " --set trainer.host=$HEAD"
    if trainer.hosts > 1:
        own += f" --nodes {trainer.hosts} --node-rank $SLURM_NODEID"
        own += f" --rendezvous $HEAD:{RENDEZVOUS_PORT}"
    steps, num_hosts = [_step(trainer, more=own)], trainer.hosts
    for index, role in enumerate(others):
        if role.kind == "inference":
            per_host = gpus_per_host // role.gpus if role.gpus else role.copies
            host = trainer.hosts + index // per_host
            steps.append(_step(role, first=host))
            num_hosts = host + 1
        else:
            steps.append(_step(role) + f"\n{role.name.upper()}=$!")
    head = ["--job-name=splice", f"--nodes={num_hosts}"]
    if needed:
        head += [f"--gpus-per-node={gpus_per_host}", "--ntasks-per-node=1"]
        head += [f"--cpus-per-task={gpus_per_host * cpus_per_gpu}"]
    head += [f"--output={run.run_dir / 'logs' / 'slurm.log'}", *shlex.split(options)]
    return _SCRIPT.format(
        head="\n".join(f"#SBATCH {option}" for option in head),
        run_dir=shlex.quote(str(run.run_dir)),
        orchestrator=_step(orchestrator),
        wait_s=ENDPOINT_S,
        steps="\n".join(steps),
    )


def _step_of(role: Role, *, cpus_per_gpu: int, first: int = 0, more: str = "") -> str:
    """Return the command of a job step.

    Args:
        first: number of its first host.
        more: further arguments, with variables that the host's shell fills in.
    """
    command = shlex.join(python_command(sys.executable, "-m", "splice", *role.command)) + more
    variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in role.environment.items())
    share = "--overlap"
    if role.gpus:  # an exact step without a number of CPUs gets one
        share = f"--exact --gpus-per-node={role.gpus} --cpus-per-task={role.gpus * cpus_per_gpu}"
    return (
        f"srun --job-name={role.name} --relative={first} --nodes={role.hosts} "
        f"--ntasks={role.hosts} --ntasks-per-node=1 {share} --kill-on-bad-exit=1 \\\n"
        f'  --output="$RUN/logs/{role.name}.log" --open-mode=append \\\n'
        f"  bash -c {shlex.quote(f'export {variables}; exec {command}')} &"
    )


_SCRIPT = """#!/bin/bash
{head}
# Written by `splice up --on slurm`. The token is in the run's folder, never here.
set -u
export RUN={run_dir}
# The batch host is host 0. A name may mean loopback there, so roles get its address.
HEAD=${{SPLICE_HEAD:-$(hostname -I | cut -d " " -f 1)}}
export HEAD
# A killed orchestrator leaves its file. A living one keeps the lock, and this one is refused.
endpoint() {{ stat -c "%i %y" "$RUN/endpoint" 2>/dev/null; }}
KILLED=$(endpoint)

{orchestrator}
ORCHESTRATOR=$!
for _ in $(seq {wait_s}); do
  [ "$(endpoint)" != "$KILLED" ] && break
  kill -0 "$ORCHESTRATOR" 2>/dev/null || break
  sleep 1
done
if [ "$(endpoint)" = "$KILLED" ]; then
  echo "the orchestrator did not bind; read $RUN/logs/orchestrator.log" >&2
  kill "$ORCHESTRATOR" 2>/dev/null
  exit 1
fi
rm -f "$RUN/router"

{steps}

if [ -n "${{LOOP:-}}" ]; then
  # It ends the run. Whatever it ends with, the job does.
  wait "$LOOP"
  CODE=$?
  [ "$CODE" = 0 ] || exit "$CODE"
fi
# `splice stop` ends the orchestrator, and it ends the nodes.
wait "$ORCHESTRATOR"
CODE=$?
[ -z "${{ROUTER:-}}" ] || kill "$ROUTER"
wait
exit "$CODE"
"""
