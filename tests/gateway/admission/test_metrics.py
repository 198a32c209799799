"""A gateway counts the requests that it has answered."""

import json
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.system import running_gateway


def post(url: str, body: dict[str, object]) -> int:
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_completions_are_counted_by_status_with_their_tokens_and_times(slow_url: str, tmp_path: Path) -> None:
    with running_gateway(slow_url, tmp_path, "--metrics-port", "0") as gateway:
        (page,) = gateway.log("status_page")
        messages = [{"role": "user", "content": "go"}]
        assert post(gateway.url, {"model": "slow", "messages": messages, "max_tokens": 3}) == 200
        assert post(gateway.url, {"model": "slow", "messages": []}) == 400
        with urllib.request.urlopen(f"http://127.0.0.1:{page['port']}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    found = {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    path = "/v1/chat/completions"
    assert found[f"tokenbus_gateway_requests_total {path} 200"] == 1
    assert found[f"tokenbus_gateway_requests_total {path} 400"] == 1
    assert found["tokenbus_gateway_completion_tokens_total"] == 3
    assert found["tokenbus_gateway_time_to_first_token_seconds_count"] == 1
    assert found[f"tokenbus_gateway_e2e_request_latency_seconds_count {path}"] == 2
    assert found["tokenbus_gateway_requests_open"] == 0
