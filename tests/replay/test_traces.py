"""Traces are read and workloads generated as documented, and invalid ones are refused with a reason."""

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from tokenbus.replay import generators, traces

LINE = {"timestamp": 1500, "input_length": 1000, "output_length": 7, "hash_ids": [4, 9]}


def written(folder: Path, *lines: object, zipped: bool = False) -> Path:
    path = folder / "trace.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode()
    path.write_bytes(gzip.compress(text) if zipped else text)
    return path


@pytest.mark.parametrize("zipped", [False, True])
def test_a_trace_is_read_by_time_zipped_or_not(tmp_path: Path, zipped: bool) -> None:
    found = traces.read(written(tmp_path, LINE, LINE | {"timestamp": 0}, zipped=zipped))
    assert [one.at_s for one in found] == [0.0, 1.5]
    assert found[1] == traces.TracedRequest(1.5, 1000, 7, (4, 9))


def test_equal_ids_give_equal_tokens_and_others_differ_from_their_first_token_on() -> None:
    one = traces.TracedRequest(0.0, 1000, 1, (4, 9)).token_ids(1000)
    other = traces.TracedRequest(0.0, 1024, 1, (4, 10)).token_ids(1000)
    assert len(one) == 1000
    assert one[:512] == other[:512]
    assert one[512:514] != other[512:514]
    assert max(other) < 1000


def test_ids_beyond_the_vocabulary_are_told_apart() -> None:
    seen = {tuple(traces.TracedRequest(0.0, 512, 1, (number,)).token_ids(50)[:2]) for number in range(2_000)}
    assert len(seen) == 2_000


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((), "has no requests"),
        (("{",), "line 1"),
        ((LINE, LINE | {"hash_ids": [1]}), "line 2: 1000 tokens are 2 blocks of 512, got 1"),
        ((LINE | {"output_length": 0},), "lengths must be at least 1"),
        ((LINE | {"timestamp": -1},), "timestamps at least 0"),
        ((LINE | {"hash_ids": [1, 2**31]},), "hash_ids must be 0"),
        ((LINE | {"hash_ids": ["a", "b"]},), "line 1"),
    ],
)
def test_an_invalid_trace_is_refused_with_its_line(tmp_path: Path, lines: tuple[object, ...], said: str) -> None:
    with pytest.raises(traces.TraceError, match=said):
        traces.read(written(tmp_path, *lines))


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, *[LINE] * 100, zipped=True)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(traces.TraceError):
        traces.read(path)


@pytest.mark.parametrize("name", generators.DEFAULTS)
def test_a_workload_is_the_same_for_the_same_seed_and_in_order(name: str) -> None:
    workload = generators.DEFAULTS[name]._replace(requests=300)
    made = generators.generate(name, workload, 1)
    assert made == generators.generate(name, workload, 1) != generators.generate(name, workload, 2)
    assert len(made) == 300
    assert [one.at_s for one in made] == sorted(one.at_s for one in made)
    assert all(len(one.hash_ids) == -(-one.prompt_tokens // 16) for one in made)


@pytest.mark.parametrize("name", ["shared", "conversations", "agents", "unrelated", "subagents", "documents", "tools"])
def test_requests_arrive_at_the_workloads_rate(name: str) -> None:
    workload = generators.DEFAULTS[name]._replace(requests=8_000, rate=20.0, think_s=1.0)
    made = generators.generate(name, workload, 3)
    middle = made[6_000].at_s - made[2_000].at_s  # sessions must begin before there is a rate, and end
    assert 4_000 / middle == pytest.approx(20.0, rel=0.25)


def test_bursts_have_the_same_rate_but_arrive_together() -> None:
    calm = generators.generate("shared", generators.DEFAULTS["shared"]._replace(requests=4_000, rate=20.0), 1)
    bursts = generators.generate("shared", generators.parse("shared:requests=4000,rate=20,burst=20")[1], 1)
    assert bursts[-1].at_s == pytest.approx(calm[-1].at_s, rel=0.2)
    assert len({one.at_s for one in bursts}) < 400


def test_each_turn_of_a_conversation_continues_the_last() -> None:
    made = generators.generate("paced", generators.DEFAULTS["paced"], 0)
    assert made[16].hash_ids[: len(made[0].hash_ids)] == made[0].hash_ids
    assert made[16].at_s - made[15].at_s == 2.0


def test_each_step_of_a_turn_with_tools_continues_the_last() -> None:
    made = generators.generate("tools", generators.parse("tools:requests=4,rate=0.001,fan_out=50")[1], 0)
    assert all(one.hash_ids == later.hash_ids[: len(one.hash_ids)] for one, later in itertools.pairwise(made))


def test_subagents_share_a_beginning_and_a_task_that_their_agent_has_not() -> None:
    text = "subagents:requests=4,rate=0.001,fan_out=3,groups=64,shared_tokens=1600,prompt_tokens=1600"
    agent, *others = generators.generate("subagents", generators.parse(text)[1], 0)
    assert len({one.hash_ids[:200] for one in others}) == 1
    assert len({one.hash_ids for one in others}) == 3
    assert not set(agent.hash_ids) & set(others[0].hash_ids)


def test_documents_differ_in_length_and_the_first_is_read_most() -> None:
    made = generators.generate("documents", generators.parse("documents:turns=1,groups=20")[1], 0)
    readers = Counter(one.hash_ids[0] for one in made)
    assert readers.most_common(1)[0][0] == 0
    assert len({one.prompt_tokens // 4_096 for one in made}) > 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "neither a file nor one of the workloads shared"),
        ("shared:speed=1", "no setting 'speed'"),
        ("shared:rate=x", "rate must be"),
        ("shared:turns=0", "turns must be 1"),
        ("shared:rate=nan", "rate must be"),
    ],
)
def test_an_invalid_workload_is_refused(text: str, said: str) -> None:
    with pytest.raises(generators.WorkloadError, match=said):
        generators.parse(text)
