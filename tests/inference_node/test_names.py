"""An operation has its message's name at every level, and what is called by a string exists."""

from __future__ import annotations

import inspect
import re

from inference_node.server import actions
from inference_node.server.alias import Alias
from inference_node.server.traffic import Traffic
from inference_node.worker.extension import SpliceWorkerExtension


def in_snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def test_each_message_has_the_action_of_its_name() -> None:
    table = actions.Actions(Traffic(Alias(name="tiny"), set()))._requests
    for message, action in table.items():
        assert action.__name__ == f"_{in_snake_case(message.__name__)}"


def test_the_workers_have_the_methods_that_the_actions_call() -> None:
    called = set(re.findall(r'"(splice_\w+)"', inspect.getsource(actions)))
    assert called and called == {n for n in vars(SpliceWorkerExtension) if n.startswith("splice_")}
