"""What a worker knows of routers beyond a link, and how long it may publish what they guard."""

import math

import pytest

from tokenbus.worker.broker.fence import FENCE_S
from tokenbus.worker.streams.router_reach import RouterReach


def reach(*routers: tuple[str, str], now: float = 0.0) -> RouterReach:
    """Returns what a worker at the network `here` knows of routers that have placed streams, each at a network."""
    found = RouterReach(lambda: "here")
    for router_id, network in routers:
        found.heard(router_id, now, network)
    return found


def test_a_distant_guardians_streams_may_be_published_for_a_while_after_it_was_asked() -> None:
    found = reach(("far", "there"))
    found.asked("far", 1, 10.0)
    found.answered("far", 1, "there", 10.4)
    assert found.publish_until("far") == 10.0 + FENCE_S, "the answer may have taken any part of that"


def test_a_router_at_the_same_broker_is_not_distant_when_that_is_restarted_under_another_id() -> None:
    networks = ["here"]
    found = RouterReach(lambda: networks[-1])
    for router_id, network in (("near", "here"), ("quick", "here"), ("far", "there")):
        found.heard(router_id, 0.0, network)
    found.asked("quick", 1, 1.0)
    networks.append("here, again")
    found.heard("near", 2.0, "here, again")  # a run that comes before anything else
    found.answered("quick", 1, "here, again", 2.1)
    assert [found.is_distant(one) for one in ("near", "quick", "far")] == [False, False, True]


def test_an_answer_that_comes_late_says_nothing_about_now() -> None:
    found = reach(("far", "there"))
    for number in range(1, 10):
        found.asked("far", number, float(number))
    found.answered("far", 1, "there", 9.5)
    assert found.publish_until("far") < 9.5
    assert not found.has_ruled("far", 0.5, 9.5)


@pytest.mark.parametrize("router", [("near", "here"), ("old", "")])
def test_a_guardian_of_the_same_network_or_of_an_earlier_version_need_confirm_nothing(router: tuple[str, str]) -> None:
    found = reach(router)
    assert found.publish_until(router[0]) == math.inf
    assert found.has_ruled(router[0], 1.0, 1.0)
    assert found.confirms(router[0], 100.0)
    assert not found.is_link_suspect(100.0)


@pytest.mark.parametrize("guardian", [None, "", "never heard of"])
def test_a_stream_without_a_known_guardian_waits_for_none(guardian: str | None) -> None:
    found = reach()
    assert found.publish_until(guardian) == math.inf
    assert found.has_ruled(guardian, 1.0, 1.0)


def test_a_link_is_suspect_when_none_of_a_networks_routers_can_be_reached() -> None:
    found = reach(("r1", "there"), ("r2", "there"), ("r3", "elsewhere"))
    found.no_responders("r1", 1.0)
    assert not found.is_link_suspect(1.0), "one router may be gone"
    found.asked("r2", 1, 1.0)
    assert not found.is_link_suspect(2.4)
    assert found.is_link_suspect(2.5), "the other does not answer"
    found.answered("r2", 1, "there", 2.6)
    assert not found.is_link_suspect(2.6)


def test_a_notice_is_the_first_after_an_answer_and_after_a_second_in_which_checks_had_neither() -> None:
    found = reach(("far", "there"))
    assert [found.no_responders("far", at) for at in (1.0, 1.1, 2.0, 3.0, 3.5)] == [True, False, False, True, False]
    found.asked("far", 1, 3.6)
    found.answered("far", 1, "there", 3.7)
    assert found.no_responders("far", 3.8)
    assert not found.no_responders("stranger", 3.8)


def test_a_router_that_was_last_heard_long_ago_says_nothing_about_its_link() -> None:
    found = reach(("far", "there"))
    found.no_responders("far", 1.0)
    assert found.is_link_suspect(599.0)
    assert not found.is_link_suspect(600.0)


def test_a_guardian_has_ruled_when_it_answers_a_check_sent_later_or_is_found_to_be_gone_later() -> None:
    found = reach(("far", "there"))
    found.asked("far", 1, 5.0)
    found.answered("far", 1, "there", 5.1)
    assert found.has_ruled("far", 5.0, 5.2)
    assert not found.has_ruled("far", 5.05, 5.2)
    found.no_responders("far", 6.0)
    assert not found.confirms("far", 6.0)
    assert not found.has_ruled("far", 6.1, 6.2), "the link may have come back since"
    assert found.has_ruled("far", 5.9, 6.2)


def test_an_answer_without_a_question_and_one_that_comes_twice_change_nothing() -> None:
    found = reach(("far", "there"))
    found.asked("far", 7, 3.0)
    found.answered("far", 7, "there", 3.1)
    before = found.publish_until("far")
    found.answered("far", 7, "elsewhere", 9.0)
    found.answered("far", 8, "here", 9.0)
    found.answered("stranger", 1, "there", 9.0)
    assert found.publish_until("far") == before


def test_the_routers_that_are_asked_about_a_link_are_few_distant_and_the_last_heard() -> None:
    found = reach(("near", "here"), *((f"r{number}", "there") for number in range(10)))
    found.heard("r3", 1.0, "there")
    assert found.to_ask(2.0)[0] == "r3"
    assert len(found.to_ask(2.0)) == 8
    assert "near" not in found.to_ask(2.0)


def test_the_number_of_routers_that_are_remembered_is_bounded() -> None:
    found = reach()
    for number in range(1_000):
        found.heard(f"r{number}", float(number), "there")
        for check in range(100):
            found.asked(f"r{number}", check, float(number))
    assert len(found._routers) == 256
    assert max(len(router.sent) for router in found._routers.values()) == 64
