"""The control protocol: message types, wire frames, and the node's end of the control socket.

The only part of `orchestrator` that the other packages import. It needs pydantic, msgpack and pyzmq, nothing else.
"""
