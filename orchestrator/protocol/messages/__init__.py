"""Every message of the control protocol, as frozen pydantic models told apart by `kind`.

The orchestrator sends *requests* to nodes. A node answers with `Progress` messages, numbered from 0
without gaps, and then one terminal message: `Completed`, `Failed` or `Cancelled`. A *job* goes from
a client to the orchestrator and follows the same rules, with its `job_id` as the request id. The
same id sent twice gets the first outcome.

Tensors never travel in a body. A body's `tensors` field lists dtype and shape of the raw buffers
that follow it as frames, in order.
"""

# ruff: noqa: F403  - this module is the flat list of names
from orchestrator.protocol.messages.answers import *
from orchestrator.protocol.messages.any_message import *
from orchestrator.protocol.messages.base import *
from orchestrator.protocol.messages.batches import *
from orchestrator.protocol.messages.client import *
from orchestrator.protocol.messages.inference import *
from orchestrator.protocol.messages.jobs import *
from orchestrator.protocol.messages.json_fields import *
from orchestrator.protocol.messages.manifest import *
from orchestrator.protocol.messages.peers import *
from orchestrator.protocol.messages.results import *
from orchestrator.protocol.messages.trainer import *
