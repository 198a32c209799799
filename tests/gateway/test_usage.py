"""`GET /v1/usage` and OpenAI's form of it: who sees whose usage, pages, CSV, and what is refused."""

import asyncio
import contextlib
import csv
import io
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.gateway.admission.test_tenants import Stage
from tokenbus.gateway import usage as endpoint
from tokenbus.gateway.admission.callers import Caller
from tokenbus.gateway.admission.keys import ApiKeys
from tokenbus.gateway.http.http_errors import ApiError
from tokenbus.gateway.routes import Routes
from tokenbus.protocol.access import usage
from tokenbus.protocol.access.keys import Role
from tokenbus.protocol.access.usage import Counts, UsageKind, UsageName, UsageQuery, UsageSum
from tokenbus.protocol.access.usage_store import UsageReport
from tokenbus.protocol.bus.bucket import BucketError, BucketMissingError
from tokenbus.protocol.wire import errors

DAY, NOW = "2026-11-24", 1_795_478_400.0
OPERATOR = Caller("ops", "op", Role.OPERATOR)
OURS, COMPLETIONS, EMBEDDINGS = endpoint.REPORTS


class Store:
    """Holds one entry of each tenant, key, model and day; `problem` is raised in place of an answer."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem

    async def report(self, query: UsageQuery) -> UsageReport:
        if self.problem is not None:
            raise self.problem
        found = UsageSum(query)
        for day in ("2026-11-23", DAY):
            for tenant in ("acme", "globex"):
                for key in ("", "k1", "k2"):
                    for model in ("chat", "=1+1"):
                        rows = {
                            UsageKind("generate"): Counts(requests=1, prompt_tokens=5, completion_tokens=2),
                            UsageKind("embed"): Counts(requests=1, prompt_tokens=100),
                        }
                        name = UsageName(day, tenant, key, model)
                        found.add(usage.entry_key(name, "s"), usage.encode_rows(rows))
            found.end_day()
        return UsageReport(found.rows(), 0)


def get(
    caller: Caller, report: Any = OURS, accept: str = "", store: Store | None = None, **query: str | list[str]
) -> tuple[bytes, str]:
    lists = {name.rstrip("_"): [value] if isinstance(value, str) else value for name, value in query.items()}
    return asyncio.run(report.answer(store or Store(), caller, lists, accept, NOW))


def page(caller: Caller, report: Any = OURS, **query: str | list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(caller, report, **query)[0])
    return found


def refusal(caller: Caller, report: Any = OURS, **query: str | list[str]) -> str:
    with pytest.raises(errors.RequestError) as caught:
        get(caller, report, **query)
    return f"{caught.value.error.code}: {caught.value.error.message}"


async def test_one_tenants_reports_leave_room_for_those_of_others() -> None:
    may_end = asyncio.Event()

    class SlowStore(Store):
        async def report(self, query: UsageQuery) -> UsageReport:
            if query.tenant == "acme":
                await may_end.wait()
            return await super().report(query)

    stage = Stage(ApiKeys(["one=acme", "two=globex"]))
    services: Any = SimpleNamespace(tenants=stage.tenants, usage=SlowStore())
    routes = Routes(services)

    def ask(key: str) -> asyncio.Task[Response]:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "headers": headers, "query_string": b""}
        return asyncio.create_task(routes._report(OURS, Request(scope)))

    slow = [ask("one") for _ in range(9)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        assert (await ask("two")).status_code == 200
    assert not any(one.done() for one in slow)
    may_end.set()
    assert {one.status_code for one in await asyncio.gather(*slow)} == {200}


ALL_GROUPS = {(tenant, key) for tenant in ("acme", "globex") for key in ("", "k1", "k2")}


def test_the_clock_of_this_test_shows_its_day() -> None:
    assert usage.day_at(NOW) == DAY


@pytest.mark.parametrize(
    ("caller", "groups"),
    [
        (OPERATOR, ALL_GROUPS),
        (Caller("acme", role=Role.OPERATOR, actor="oidc:someone"), ALL_GROUPS),
        (Caller("acme", role=Role.VIEWER, actor="oidc:someone"), {("acme", ""), ("acme", "k1"), ("acme", "k2")}),
        (Caller("acme", "v", Role.VIEWER), {("acme", ""), ("acme", "k1"), ("acme", "k2")}),
        (Caller("acme", "k1", Role.USER), {("acme", "k1")}),
        (Caller("acme"), {("acme", ""), ("acme", "k1"), ("acme", "k2")}),
    ],
)
def test_a_user_sees_its_key_a_viewer_its_tenant_and_an_operator_all(
    caller: Caller, groups: set[tuple[str, str]]
) -> None:
    found = page(caller, group_by="tenant,key")
    assert {(one["tenant"], one["key"]) for one in found["data"]} == groups
    assert found["total"]["requests"] == 8 * len(groups) == sum(one["requests"] for one in found["data"])
    told = page(caller, COMPLETIONS, start_time=str(int(NOW)), end_time=str(int(NOW) + 1), group_by="api_key_id")
    assert sum(one["num_model_requests"] for one in told["data"][0]["results"]) == 2 * len(groups)


def test_what_belongs_to_others_is_refused_and_what_is_ones_own_may_be_named() -> None:
    user, viewer = Caller("acme", "k1", Role.USER), Caller("acme", "v", Role.VIEWER)
    assert refusal(user, key="k2").startswith("forbidden: ")
    assert refusal(user, key="-").startswith("forbidden: ")
    assert refusal(user, tenant="globex").startswith("forbidden: ")
    assert refusal(viewer, tenant="globex").startswith("forbidden: ")
    assert refusal(viewer, COMPLETIONS, start_time="1", project_ids="globex").startswith("forbidden: ")
    assert refusal(Caller("acme"), tenant="globex").startswith("forbidden: ")
    assert page(user, tenant="acme", key="k1")["total"]["requests"] == 8
    assert page(viewer, key="-")["total"]["requests"] == 8
    assert page(OPERATOR, tenant="globex", model="chat")["total"]["requests"] == 12


def test_pages_have_all_groups_in_order_and_each_has_the_sum_of_all() -> None:
    groups, after = [], None
    while True:
        query = {"group_by": "day,key,model", "limit": "5"} | ({} if after is None else {"after": after})
        found = page(OPERATOR, **query)
        assert found["total"]["requests"] == 48
        groups += [(one["day"], one["key"], one["model"]) for one in found["data"]]
        after = found.get("next")
        assert found["has_more"] is (after is not None)
        if after is None:
            break
    assert groups == sorted(set(groups))
    assert len(groups) == 12


def test_csv_is_asked_for_by_a_header_or_a_parameter_and_has_no_formulas() -> None:
    for asked in ({"accept": "text/csv"}, {"format": "csv"}):
        body, kind = get(OPERATOR, group_by="model", **asked)
        assert kind.startswith("text/csv")
        lines = list(csv.reader(io.StringIO(body.decode(), newline="")))
        assert [line[0] for line in lines] == ["model", "'=1+1", "chat"]


def test_openais_form_has_a_bucket_for_each_day_and_a_cursor() -> None:
    start = int(NOW) - 86_400
    first = page(OPERATOR, COMPLETIONS, start_time=str(start), end_time=str(int(NOW) + 1), limit="1")
    assert [one["start_time"] for one in first["data"]] == [start]
    assert first["data"][0]["end_time"] == int(NOW)
    assert first["data"][0]["results"] == [
        {
            "object": "organization.usage.completions.result",
            "input_tokens": 60,
            "output_tokens": 24,
            "input_cached_tokens": 0,
            "num_model_requests": 12,
            "project_id": None,
            "user_id": None,
            "api_key_id": None,
            "model": None,
            "batch": None,
        }
    ]
    assert first["has_more"]
    query = {"start_time": str(start), "end_time": str(int(NOW) + 1), "page": first["next_page"]}
    second = page(OPERATOR, EMBEDDINGS, **query, **{"group_by[]": ["project_id", "model"]})
    assert [one["start_time"] for one in second["data"]] == [int(NOW)]
    assert {(one["project_id"], one["model"], one["input_tokens"]) for one in second["data"][0]["results"]} == {
        (tenant, model, 300) for tenant in ("acme", "globex") for model in ("chat", "=1+1")
    }
    assert not second["has_more"]


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"from": "last week"}, "from: must be a day such as 2026-11-24, got 'last week', today, yesterday"),
        ({"from": "today", "to": "yesterday"}, "from: the first day, 2026-11-24, is after the last"),
        ({"from": "1900-01-01"}, "from: at most 3660 days"),
        ({"group_by": "user"}, "group_by: must be some of day, tenant, key, model, adapter, operation, got 'user'"),
        ({"limit": "0"}, "limit: must be a whole number from 1 to 10,000, got '0'"),
        ({"limit": "9" * 30}, "limit: must be a whole number from 1 to 10,000"),
        ({"after": "%%%"}, "after: must be the `next` of an earlier page"),
        ({"format": "xml"}, "format: must be json or csv, got 'xml'"),
        ({"tenant": "x" * 500}, "tenant: a name must have 1 to"),
    ],
)
def test_a_bad_parameter_is_named_with_what_is_allowed(query: dict[str, str], problem: str) -> None:
    assert problem in refusal(OPERATOR, **query)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({}, "start_time: is missing"),
        ({"start_time": "1", "bucket_width": "1h"}, "bucket_width: must be 1d, since usage is kept by day"),
        ({"start_time": "1", "user_ids": "u"}, "user_ids"),
        ({"start_time": "1", "models": ["a", "b"]}, "models: may name one only"),
        ({"start_time": "1", "group_by": "batch"}, "group_by: must be some of project_id, api_key_id, model"),
        ({"start_time": "-1"}, "start_time: must be a whole number"),
    ],
)
def test_what_openais_form_can_not_say_here_is_refused(query: dict[str, str], problem: str) -> None:
    assert problem in refusal(OPERATOR, COMPLETIONS, **query)


@pytest.mark.parametrize(
    ("problem", "told", "status", "words"),
    [
        (BucketMissingError("none"), "", 404, "start them with --usage"),
        (BucketMissingError("none"), None, 404, "start them with --usage"),
        (BucketMissingError("none"), "insufficient storage", 503, "(insufficient storage): the broker needs JetStream"),
        (BucketError("away"), "", 503, "can't be read at the moment"),
    ],
)
async def test_no_usage_no_room_for_it_and_no_bucket_in_reach_are_told_apart(
    problem: Exception, told: str | None, status: int, words: str
) -> None:
    stage, asked = Stage(ApiKeys([])), Request({"type": "http", "headers": [], "query_string": b""})

    class Viewer:
        @contextlib.asynccontextmanager
        async def view_fleet(self) -> AsyncIterator["Viewer"]:
            yield self

        async def usage_problem(self) -> str | None:
            return told

    stage.tenants.gateway_client = Viewer()  # type: ignore[assignment]
    services: Any = SimpleNamespace(tenants=stage.tenants, usage=Store(problem))
    with pytest.raises(ApiError) as caught:
        await Routes(services)._report(OURS, asked)
    assert caught.value.response.status == status
    assert words in caught.value.response.message
