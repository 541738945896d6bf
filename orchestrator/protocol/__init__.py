"""The control protocol: message types, wire frames, and the node's end of the control socket.

All packages import this one. It needs pydantic, msgpack and pyzmq only.
"""
