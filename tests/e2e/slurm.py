"""A real Slurm of some nodes on this host, from the Debian packages slurm-wlm and munge.

Each node is a slurmd with its own name and port. Keys, sockets and state are in one folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.commands import free_port

MISSING = next(
    (name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None),
    None,
)
"""The first of the programs that is not here."""
CONFIG = """ClusterName=test
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName=n{n} NodeHostname={host} Port={port} CPUs=16 RealMemory=24000 State=UNKNOWN\n"


@contextlib.contextmanager
def cluster(folder: Path, *, nodes: int) -> Iterator[dict[str, str]]:
    """Run the nodes; yields the environment in which Slurm's commands reach them."""
    folder.mkdir()
    (folder / "state").mkdir()
    key, host = folder / "munge.key", socket.gethostname().partition(".")[0]
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    named = {"host": host, "folder": folder, "user": "root"}
    text = CONFIG.format(port=free_port(), **named)
    text += "".join(NODE.format(n=n, host=host, port=free_port()) for n in range(1, nodes + 1))
    (folder / "slurm.conf").write_text(text)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}",
         f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid",
         f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", f"n{n}"] for n in range(1, nodes + 1)),
    ]  # fmt: skip # one daemon each
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"daemon-{len(daemons)}.log").open("wb") as out:
                daemons.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            time.sleep(1.0)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(5)
