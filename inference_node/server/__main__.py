"""vLLM's OpenAI server on an inherited socket: `python -m inference_node.server --listen-fd N ...`.

The node binds the port and keeps the socket, so no port is guessed or lost when vLLM restarts.
vLLM's own entry point always binds a new socket; otherwise this module does the same.
"""

from __future__ import annotations

import signal
import socket
import sys
from typing import Any

from inference_node import plugin
from inference_node.server import dialect


def main(argv: list[str]) -> None:
    """Serve until a signal. The first two arguments are `--listen-fd N`; the rest are vLLM's."""
    if len(argv) < 2 or argv[0] != "--listen-fd":
        raise SystemExit("usage: python -m inference_node.server --listen-fd N <vLLM arguments>")
    plugin.die_with_node()
    listener = socket.socket(fileno=int(argv[1]))
    run_server_worker, make_arg_parser, validate, cli_env_setup = dialect.server_parts()
    import uvloop
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(description="vLLM under splice"))
    host, port = listener.getsockname()[:2]
    args = parser.parse_args([*argv[2:], "--host", str(host), "--port", str(port)])
    validate(args)
    uvloop.run(_serve(run_server_worker, listener, args))


async def _serve(run_server_worker: Any, listener: socket.socket, args: Any) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("terminated")

    # Until uvicorn installs its own handlers, SIGTERM must end the start-up.
    signal.signal(signal.SIGTERM, interrupt)
    host, port = listener.getsockname()[:2]
    await run_server_worker(f"http://{host}:{port}", listener, args)


if __name__ == "__main__":
    main(sys.argv[1:])
