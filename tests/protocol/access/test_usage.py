"""Sums of what was used: keys of entries, reports, days, and CSV."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.protocol.access import usage
from tokenbus.protocol.access.usage import Counts, UsageKind, UsageName, UsageQuery, UsageRow, UsageSum

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
DAY = "2026-11-24"
CHAT = UsageKind("generate")


def query(**fields: object) -> UsageQuery:
    return UsageQuery(DAY, DAY)._replace(**fields)


def counts(requests: int = 1, prompt: int = 0, completion: int = 0, **errors: int) -> Counts:
    return Counts(requests=requests, prompt_tokens=prompt, completion_tokens=completion, errors=errors)


@given(NAMES | st.just(""), NAMES | st.just(""), NAMES | st.just(""))
def test_a_name_comes_back_from_the_key_of_its_entry(tenant: str, key: str, model: str) -> None:
    name = UsageName(DAY, tenant, "" if key == "-" else key, model)
    assert usage.parse_key(usage.entry_key(name, "shard")) == (name, "shard")


@pytest.mark.parametrize(
    "key", ["", "a.b.c.d", "2026-11-24.a.b.c", "2026-1-2.a.b.c.d", "2026-13-01.a.-.c.d", f"{DAY}.=GG.-.a.s"]
)
def test_what_is_no_key_of_an_entry_is_refused_with_a_value_error(key: str) -> None:
    with pytest.raises(ValueError):
        usage.parse_key(key)


def test_values_come_back_and_those_of_later_versions_are_read_without_what_is_new() -> None:
    rows = {CHAT: counts(2, 10, 5, overloaded=1), UsageKind("generate", "pirate"): counts(1, 3, 4)}
    assert usage.decode(usage.encode_rows(rows)) == usage.Stored(rows)
    folded = usage.Stored(rows, {"s": usage.shard_of(3, rows)}, ["t"])
    assert usage.decode(usage.encode(folded)) == folded
    later = b'{"v":2,"new":[1],"rows":[{"operation":"embed","requests":1,"seconds":3}]}'
    assert usage.decode(later) == usage.Stored({UsageKind("embed"): counts(1)})
    for bad in (b"", b"[]", b'{"rows":[{"requests":1}]}', b'{"rows":[{"operation":"x","requests":-1}]}'):
        with pytest.raises(ValueError):
            usage.decode(bad)


def test_a_report_has_the_sums_of_each_group_in_order_and_leaves_out_what_was_not_asked_for() -> None:
    found = UsageSum(query(group_by=("tenant", "adapter"), tenant=None, model="chat"))
    entries = [
        (UsageName(DAY, "b", "k1", "chat"), {CHAT: counts(1, 10)}),
        (UsageName(DAY, "a", "k2", "chat"), {CHAT: counts(1, 5), UsageKind("generate", "pirate"): counts(4)}),
        (UsageName(DAY, "a", "k3", "chat"), {CHAT: counts(2, 7, cancelled=1)}),
        (UsageName(DAY, "a", "k3", "other"), {CHAT: counts(100)}),
    ]
    for number, (name, rows) in enumerate(entries):
        found.add(usage.entry_key(name, str(number)), usage.encode_rows(rows))
    found.add("nonsense", b"{}")
    found.add(usage.entry_key(UsageName(DAY, "a", "", "chat"), "x"), b"nonsense")
    found.end_day()
    assert found.num_unreadable == 2
    assert found.rows() == [
        UsageRow(("a", ""), counts(3, 12, cancelled=1)),
        UsageRow(("a", "pirate"), counts(4)),
        UsageRow(("b", ""), counts(1, 10)),
    ]
    assert usage.total_of(found.rows()) == counts(8, 22, cancelled=1)


def test_a_shard_that_is_folded_counts_once_whether_or_not_it_is_still_there() -> None:
    name = UsageName(DAY, "a", "", "chat")
    folded = usage.encode(usage.Stored({CHAT: counts(10)}, {"s1": usage.shard_of(7, {CHAT: counts(3)})}, ["s0"]))
    for is_there in (True, False):
        found = UsageSum(query(group_by=()))
        found.add(usage.entry_key(name, usage.FOLDED), usage.encode_rows({CHAT: counts(1)}))  # read before it grew
        if is_there:
            found.add(usage.entry_key(name, "s1"), usage.encode_rows({CHAT: counts(4)}))
            found.add(usage.entry_key(name, "s0"), usage.encode_rows({CHAT: counts(100)}))
        found.add(usage.entry_key(name, usage.FOLDED), folded)
        found.end_day()
        assert found.rows() == [UsageRow((), counts(14 if is_there else 13))]


def test_a_report_with_too_many_rows_says_what_to_ask_for_instead() -> None:
    found = UsageSum(query(group_by=("key",)), max_groups=2)
    for key in "ab":
        found.add(usage.entry_key(UsageName(DAY, "t", key, "m"), "s"), usage.encode_rows({CHAT: counts()}))
    found.end_day()
    found.add(usage.entry_key(UsageName(DAY, "t", "c", "m"), "s"), usage.encode_rows({CHAT: counts()}))
    with pytest.raises(usage.TooManyRowsError, match="more than 2 rows: ask for fewer days, or group by less than key"):
        found.end_day()


@pytest.mark.parametrize(
    ("text", "day"),
    [("today", DAY), ("yesterday", "2026-11-23"), ("1d", DAY), ("7d", "2026-11-18"), ("2026-02-28", "2026-02-28")],
)
def test_a_day_is_a_date_a_word_or_a_number_of_days_with_today(text: str, day: str) -> None:
    assert usage.parse_day(text, DAY) == day


@pytest.mark.parametrize(
    "text", ["", "2026-2-3", "20260203", "2026-02-30", "d", "-1d", "99999d", "7 d", "tomorrow", "²d"]
)
def test_anything_else_is_no_day(text: str) -> None:
    with pytest.raises(ValueError, match="must be a day such as 2026-11-24, got"):
        usage.parse_day(text, DAY)


def test_a_range_of_days_is_neither_reversed_nor_endless() -> None:
    usage.check_days(DAY, DAY)
    with pytest.raises(ValueError, match="is after the last"):
        usage.check_days(DAY, "2026-11-23")
    with pytest.raises(ValueError, match="at most 3660 days"):
        usage.check_days("2010-01-01", DAY)


def test_dimensions_are_known_and_in_a_fixed_order() -> None:
    assert usage.parse_group_by("model, day,model") == ("day", "model")
    assert usage.parse_group_by("") == ()
    with pytest.raises(ValueError, match="must be some of day, tenant, key, model, adapter, operation, got 'user'"):
        usage.parse_group_by("day,user")


def test_names_in_csv_are_no_formulas_and_no_further_cells() -> None:
    names = ["=1+1", "+1", "-1", "@x", "\t=1", 'a,"b"\r\nc', "plain", ""]
    rows = [UsageRow((one,), counts(1, 2, 3, internal=1)) for one in names]
    lines = list(csv.reader(io.StringIO("".join(usage.csv_lines(("model",), rows)), newline="")))
    assert lines[0] == [
        "model",
        "requests",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "total_tokens",
        "errors",
    ]
    assert [line[0] for line in lines[1:]] == [
        *("'=1+1", "'+1", "'-1", "'@x", "'\t=1", 'a,"b"\r\nc', "plain", "(other)"),
    ]
    assert all(line[1:] == ["1", "2", "0", "3", "5", "1"] for line in lines[1:])
