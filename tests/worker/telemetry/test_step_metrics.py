"""The metrics of a replica count all that is in the stats of its steps."""

from tokenbus.worker.engine.process import ipc
from tokenbus.worker.engine.scheduling.plan import LogitsSummary
from tokenbus.worker.telemetry.metrics import ReplicaMetrics, WorkerMetrics

COUNTED = {
    "preemptions": ("tokenbus_worker_preemptions_total", {}),
    "restored_tokens": ("tokenbus_worker_preempted_tokens_total", {"kind": "restored"}),
    "recomputed_tokens": ("tokenbus_worker_preempted_tokens_total", {"kind": "recomputed"}),
    "evicted_blocks": ("tokenbus_worker_evicted_blocks_total", {}),
    "offloaded_bytes": ("tokenbus_worker_kv_transferred_bytes_total", {"direction": "offload"}),
    "onloaded_bytes": ("tokenbus_worker_kv_transferred_bytes_total", {"direction": "onload"}),
    "follower_tokens": ("tokenbus_worker_follower_tokens_total", {}),
    "saved_checkpoints": ("tokenbus_worker_checkpoints_total", {"event": "saved"}),
    "restored_checkpoints": ("tokenbus_worker_checkpoints_total", {"event": "restored"}),
    "evicted_checkpoints": ("tokenbus_worker_checkpoints_total", {"event": "evicted"}),
    "poisoned_shares": ("tokenbus_worker_poisoned_shares_total", {}),
    "ahead_tokens": ("tokenbus_worker_next_turn_tokens_total", {"event": "computed"}),
    "used_ahead_tokens": ("tokenbus_worker_next_turn_tokens_total", {"event": "used"}),
}


def samples(metrics: WorkerMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in metrics.families()
        for metric in family.collect()
        for sample in metric.samples
    }


def test_every_count_of_a_step_is_added_to_a_counter_that_is_exported_from_the_start() -> None:
    metrics = WorkerMetrics()
    replica = ReplicaMetrics(metrics, "m", "w1")
    names = list(COUNTED)
    for expected in (dict.fromkeys(names, 0), {name: 2 * count for count, name in enumerate(names, 1)}):
        if any(expected.values()):
            counts = {name: count for count, name in enumerate(names, 1)}
            for _ in range(2):
                replica.observe(ipc.StepStats(ipc.StepKind.DECODE, 0.1, 0.0, **counts))
        replica.add_up()
        found = samples(metrics)
        for name, (metric, labels) in COUNTED.items():
            own = frozenset(({"model": "m", "worker_id": "w1"} | labels).items())
            assert found[metric, own] == expected[name], name


def test_steps_and_the_times_between_tokens_are_shown_once_each_and_by_kind() -> None:
    metrics = WorkerMetrics()
    replica = ReplicaMetrics(metrics, "m", "w1")
    own = frozenset({"model": "m", "worker_id": "w1"}.items())
    kinds = [ipc.StepKind.DECODE, ipc.StepKind.MIXED, ipc.StepKind.DECODE]
    for times in (1, 2):
        for kind in kinds:
            replica.observe(ipc.StepStats(kind, 0.25, 0.5))
        replica.token_interval(0.25, 3)
        for _ in range(2):
            replica.add_up()
        found = samples(metrics)
        for kind, count in (("decode", 2), ("mixed", 1), ("prefill", 0)):
            assert found["tokenbus_worker_step_seconds_count", own | {("kind", kind)}] == count * times
        assert found["tokenbus_worker_inference_seconds_total", own] == 0.75 * times
        assert found["tokenbus_worker_device_gap_seconds_total", own] == 1.5 * times
        assert found["tokenbus_worker_inter_token_latency_seconds_count", own] == 3 * times


def test_many_steps_are_counted_before_anyone_looks() -> None:
    metrics = WorkerMetrics()
    replica = ReplicaMetrics(metrics, "m", "w1")
    own = frozenset({"model": "m", "worker_id": "w1"}.items())
    for _ in range(1_500):
        replica.observe(ipc.StepStats(ipc.StepKind.DECODE, 0.25, 0.0))
        replica.token_interval(0.25, 1)
    found = samples(metrics)
    assert found["tokenbus_worker_inference_seconds_total", own] == 256.0
    assert found["tokenbus_worker_inter_token_latency_seconds_count", own] == 1_023


def test_the_memory_of_checkpoints_is_that_of_the_last_step() -> None:
    metrics = WorkerMetrics()
    replica = ReplicaMetrics(metrics, "m", "w1")
    own = frozenset({"model": "m", "worker_id": "w1"}.items())
    for size in (0, 700, 300):
        replica.observe(ipc.StepStats(ipc.StepKind.DECODE, 0.1, 0.0, checkpoint_bytes=size))
        replica.add_up()
        assert samples(metrics)["tokenbus_worker_checkpoint_bytes", own] == size


def test_logits_are_those_of_the_last_row_that_was_looked_at_and_what_is_no_number_is_counted_by_kind() -> None:
    metrics = WorkerMetrics()
    replica = ReplicaMetrics(metrics, "m", "w1")
    row = LogitsSummary(0, 0, 0, 3, 1.5, -2.0, 4.0)
    for logits, non_finite in ((row, (1, 2, 3)), (None, (1, 0, 0))):
        stats = ipc.StepStats(ipc.StepKind.DECODE, 0.1, 0.0, logits=logits, non_finite_logits=non_finite)
        replica.observe(stats)
    replica.add_up()
    found = samples(metrics)
    own = {"model": "m", "worker_id": "w1"}
    seen = {
        label: found[f"tokenbus_worker_{name}", frozenset((own | {key: label}).items())]
        for name, key, label in (
            *(("logits", "stat", stat) for stat in ("mean", "smallest", "largest")),
            *(("non_finite_logits_total", "kind", kind) for kind in ("nan", "inf", "-inf")),
        )
    }
    assert seen == {"mean": 1.5, "smallest": -2.0, "largest": 4.0, "nan": 2.0, "inf": 2.0, "-inf": 3.0}


def test_constraints_and_engines_that_were_given_up_are_counted_from_zero_on() -> None:
    metrics = WorkerMetrics()
    replica = ReplicaMetrics(metrics, "m", "w1")
    refusals, engines = "tokenbus_worker_constraint_refusals_total", "tokenbus_worker_poisoned_engines_total"
    own = {"model": "m", "worker_id": "w1"}
    for count in (0, 1):
        found = samples(metrics)
        assert found[refusals, frozenset({**own, "reason": "given_up"}.items())] == count
        assert found[engines, frozenset(own.items())] == count
        replica.constraint_refusals.labels("given_up").inc()
        replica.poisoned_engines.inc()


def test_only_a_model_on_demand_shows_how_much_memory_it_may_take() -> None:
    metrics = WorkerMetrics()
    ReplicaMetrics(metrics, "m", "w1")
    shown = {name for name, _ in samples(metrics)}
    assert "tokenbus_worker_memory_budget_bytes" not in shown
    assert "tokenbus_worker_kv_usage_ratio" in shown
