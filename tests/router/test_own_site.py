"""Calls that any worker can answer go to one of the router's own site where there is one."""

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.builders import candidates, card, events, known, named
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement.sites import OwnSite
from tokenbus.router.requests.calls.pooling import EmbedCalls
from tokenbus.router.requests.tokenization.prompt_tokenizer import PromptTokenizer

ANY: Any = None


@pytest.fixture
def fleet() -> Fleet:
    """Workers of two sites, and one that does not say where it runs, as a router at `eu` knows them."""
    made, now = Fleet(began_at=0.0, own_site=OwnSite("eu", 0.25)), time.monotonic()
    for name, site in (("a", "us"), ("b", "us"), ("c", "eu"), ("d", "")):
        made.apply_card(card(name, site=site, features=["generate", "embed"]), now)
        made.apply_events("demo", events(name), now)
    assert candidates(made, now) == ["a", "b", "c", "d"]
    return made


def test_texts_are_tokenized_at_the_routers_own_site_unless_its_workers_can_not(fleet: Fleet) -> None:
    broken: set[str] = set()
    tokenizers: Any = SimpleNamespace(is_broken=lambda worker: worker.card.worker_id in broken)
    prompts = PromptTokenizer(fleet, tokenizers, ANY, ANY, ANY, ANY)
    assert named(prompts._candidates("demo")) == ["c", "d", "a", "b"]
    broken |= {"c", "d"}
    assert named(prompts._candidates("demo")) == ["a", "b", "c", "d"]


def test_embeddings_are_computed_at_the_own_site_until_a_worker_elsewhere_has_fewer_calls(fleet: Fleet) -> None:
    calls = EmbedCalls(ANY, ANY, fleet, ANY, random.Random(1), ANY)

    chosen = []
    for _ in range(4):
        worker = calls._candidates("demo")[0]
        chosen.append(worker.card.worker_id)
        calls._open[worker.card.address] += 1
    assert set(chosen[:2]) == {"c", "d"}
    assert set(chosen[2:]) == {"a", "b"}


def test_a_lost_worker_may_be_behind_a_link_if_nothing_of_its_site_was_heard_after_it(fleet: Fleet) -> None:
    lost, own, unknown = (known(fleet, name) for name in ("a", "c", "d"))
    at = lost.last_seen_at
    assert fleet.is_cut_off(lost, at + 2.0)
    assert not fleet.is_cut_off(own, at + 2.0)
    assert not fleet.is_cut_off(unknown, at + 2.0)
    fleet.apply_events("demo", events("b", seq=2), at + 0.8)
    assert fleet.is_cut_off(lost, at + 2.5), "an idle one speaks once a second: this may have been before the cut"
    fleet.apply_events("demo", events("b", seq=3), at + 1.6)
    assert not fleet.is_cut_off(lost, at + 3.0), "that one alone has died"
    assert fleet.is_cut_off(lost, at + 3.7), "now nothing is heard of its site any more"
