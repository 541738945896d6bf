"""What a replica serves, after each event; no vLLM."""

from inference_node.node.served import Served

SERVING = Served().planned(has_part=True).begun().arrived(4).committed(4)


def test_a_commit_serves_what_was_received():
    received = Served().begun().arrived(0)
    assert not received.is_serving and received.is_undecided and not received.is_committed(0)
    served = received.committed(0)
    assert served.is_serving and served.is_committed(0) and not served.is_undecided
    assert not served.is_committed(1)


def test_a_new_update_replaces_what_waits():
    waits = SERVING.begun().arrived_in_shadow(5)
    assert waits.is_serving and waits.in_shadow == 5 and waits.why_given_up("x") is None
    assert waits.begun().in_shadow is None and not waits.dropped().is_undecided
    assert SERVING.arrived(5).begun().received is None


def test_a_swap_that_commits_waits_for_its_confirmation():
    swapped = SERVING.arrived_in_shadow(5).begun().swapped_and_committed(5)
    assert swapped.is_committed(5) and swapped.is_undecided
    assert swapped.why_given_up("x") == "version 5 was committed with its swap, then given up: x"
    assert not swapped.confirmed().is_undecided and swapped.confirmed().why_given_up("x") is None
    later = swapped.begun()  # its confirmation was lost
    assert later.is_undecided


def test_a_poisoned_replica_serves_again_with_the_next_commit():
    received = SERVING.arrived(5)
    assert received.why_given_up("x") == "version 5 was received but not committed: x"
    poisoned = received.now_poisoned("half written")
    assert not poisoned.is_serving and not poisoned.is_undecided and not poisoned.is_committed(4)
    assert poisoned.begun().arrived(5).committed(5).is_committed(5)


def test_a_partial_update_needs_its_base():
    assert SERVING.why_no_base(None) is None and SERVING.why_no_base(4) is None
    wrong = "this partial update requires version 5; the replica serves 4"
    assert SERVING.why_no_base(5) == wrong
    assert Served().why_no_base(5) == wrong.replace("4", "nothing")
    why = SERVING.now_poisoned("half written").why_no_base(4)
    assert why is not None and "is poisoned: half written" in why
    why = SERVING.planned(has_part=False).why_no_base(4)
    assert why is not None and "send PrepareUpdate first" in why
