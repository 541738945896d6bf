"""`python -m inference_node --endpoint tcp://... --node-id inference-0 --config FILE`.

The run's token is in SPLICE_RUN_TOKEN. Exit codes:

    0           the orchestrator ended the node
    2           bad configuration, or rejected by the orchestrator: a restart changes nothing
    3           vLLM does not start or keeps ending: restart it a few times
    75          the orchestrator is gone: restart until it answers (EX_TEMPFAIL)
    128 + n     ended by signal n
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

from inference_node.shared.names import RUN_TOKEN
from orchestrator.errors import ConfigError, LinkLost, SpliceError
from orchestrator.processes.interfaces import reachable_host
from orchestrator.processes.logs import log_to_stderr
from orchestrator.processes.restarts import EXIT_CONFIG, EXIT_LINK_LOST
from orchestrator.protocol.config import InferenceConfig
from orchestrator.protocol.messages.mistakes import read_json

EXIT_FAILED = 3


def main() -> int:
    """Run the node until `Shutdown`; the exit code says why it ended."""
    parser = argparse.ArgumentParser(
        prog="inference_node", description="Supervise one vLLM server for a splice run"
    )
    parser.add_argument(
        "--endpoint", required=True, help="the orchestrator's ROUTER, tcp://host:port"
    )
    parser.add_argument("--node-id", required=True)
    parser.add_argument(
        "--config",
        required=True,
        type=Path,
        help="JSON file of orchestrator.protocol.config.InferenceConfig",
    )
    args = parser.parse_args()
    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        _run(args.endpoint, args.node_id, args.config)
    except ConfigError as error:
        sys.stderr.write(f"inference_node: {error}\n")
        return EXIT_CONFIG
    except SpliceError as error:
        sys.stderr.write(f"inference_node: {error}\n")
        return EXIT_LINK_LOST if isinstance(error, LinkLost) else EXIT_FAILED
    return 0


def _run(endpoint: str, node_id: str, config_file: Path) -> None:
    from inference_node.node.node import InferenceNode

    token = os.environ.get(RUN_TOKEN)
    if not token:
        raise ConfigError(f"set {RUN_TOKEN} to the run's token")
    config = read_json(config_file, InferenceConfig)
    if not (config.model / "config.json").is_file():
        raise ConfigError(
            f"model: {config.model} has no config.json; give a folder with an HF checkpoint"
        )
    if not config.advertised_host:
        towards = urlsplit(endpoint).hostname
        reached_at = reachable_host(config.host, towards=towards)
        config = config.model_copy(update={"advertised_host": reached_at})
    InferenceNode(config, endpoint=endpoint, node_id=node_id, run_token=token).run()


def _leave(number: int, _: object) -> None:
    # Once: a second signal must not interrupt the clean-up, which has its own deadlines.
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
