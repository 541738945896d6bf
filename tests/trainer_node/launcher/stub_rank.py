"""A rank without a model: writes its environment to FOLDER/RANK.json, then does what its arguments
say.

python -m stub_rank FOLDER {waits | ends:RANK:CODE | joins}
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path


def main() -> None:
    folder, action = Path(sys.argv[1]), sys.argv[2]
    rank = os.environ.get("RANK", "0")
    facts = {
        "env": dict(os.environ),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "random": random.random(),
        "argv": sys.argv[1:],
        "fla": getattr(importlib.util.find_spec("fla"), "origin", None),
    }
    if action == "joins":
        facts |= joined()
    temp = folder / f".{rank}-{os.getpid()}"
    temp.write_text(json.dumps(facts))
    temp.replace(folder / f"{rank}.json")
    what, _, rest = action.partition(":")
    if what == "ends":
        who, _, code = rest.partition(":")
        if rank == who:
            sys.exit(int(code))
    time.sleep(60)


def joined() -> dict[str, object]:
    """The sum of all ranks, and the addresses that this process listens on."""
    import psutil
    import torch
    import torch.distributed as dist

    from orchestrator.protocol.config import ParallelConfig, TrainerConfig
    from trainer_node.ranks import rendezvous

    world = int(os.environ["WORLD_SIZE"])
    rendezvous.join(
        TrainerConfig(
            model=Path("none"), parallel=ParallelConfig(world_size=world), collective_timeout_s=60
        )
    )
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    listening = [
        c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN
    ]
    return {"sum": int(total), "listening": [[a.ip, a.port] for a in listening]}


if __name__ == "__main__":
    main()
