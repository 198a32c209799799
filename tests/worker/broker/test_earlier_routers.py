"""A process learns of routers that know no beats by the snapshots that they want, and that they are gone by probes."""

from tokenbus.worker.broker.earlier_routers import EarlierRouters


def test_after_a_start_and_after_a_reconnect_routers_have_three_seconds_to_ask() -> None:
    routers = EarlierRouters(100.0)
    assert not routers.are_none(102.9)
    assert routers.are_none(103.0)
    routers.reconnected(200.0)
    assert not routers.are_none(202.9)
    assert routers.are_none(203.0)


def test_a_router_of_an_earlier_version_counts_until_nothing_listens_where_it_asked() -> None:
    routers = EarlierRouters(0.0)
    routers.heard("_INBOX.a", 10.0)
    routers.heard("_INBOX.b", 10.0)
    assert routers.to_probe(11.9) is None
    assert routers.to_probe(12.0) == "_INBOX.a"
    assert routers.to_probe(13.9) is None
    routers.gone(14.0)
    assert not routers.are_none(14.0)
    assert routers.to_probe(14.0) == "_INBOX.b"
    routers.gone(14.0)
    assert routers.are_none(14.0)
    assert routers.to_probe(20.0) is None


def test_a_notice_that_belongs_to_no_probe_proves_nothing() -> None:
    routers = EarlierRouters(0.0)
    routers.heard("_INBOX.a", 10.0)
    routers.gone(10.0)
    assert not routers.are_none(10.0)


def test_only_so_many_inboxes_are_remembered() -> None:
    routers = EarlierRouters(0.0)
    for number in range(5_000):
        routers.heard(f"_INBOX.{number}", 10.0)
    assert len(routers) == 1_024
    assert routers.to_probe(12.0) == f"_INBOX.{5_000 - 1_024}"
