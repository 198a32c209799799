"""The workers: their requests, steps, memory and cache."""

from deploy.dashboards.promql import MODEL_FILTER, WORKER_FILTER, increase, max_of, quantile, rate, sum_of
from deploy.dashboards.spec import MODEL, WORKER, Dashboard, Panel, Query, Row

_P = "tokenbus_worker"
_NAME = "{{worker_id}}"


def _rate(metric: str, by: str = "worker_id") -> str:
    return rate(f"{_P}_{metric}_total", WORKER_FILTER, by)


_REQUESTS = (
    Panel(
        "Requests running, and their limit",
        "If the number stays at the limit while others wait, add workers; if it stays below the limit while others "
        "wait, KV memory is short.",
        "short",
        (
            Query(sum_of(f"{_P}_requests_running", WORKER_FILTER, "worker_id"), f"{_NAME} running"),
            Query(sum_of(f"{_P}_max_num_seqs", WORKER_FILTER, "worker_id"), f"{_NAME} limit"),
        ),
    ),
    Panel(
        "Requests waiting for a lane",
        "If a worker always has some, it is full: the routers' queues will grow next.",
        "short",
        (Query(sum_of(f"{_P}_requests_waiting", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Prompt tokens still to compute",
        "If the number grows on one worker only, its requests have their prefixes cached there and nowhere else: see "
        "the routers' policy; if it grows on all, prompts arrive faster than they are computed.",
        "suffix: tok",
        (Query(sum_of(f"{_P}_queued_prefill_tokens", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Requests finished, by reason",
        "If `error` grows, `request_finished` in this worker's log has the codes.",
        "reqps",
        (Query(_rate("requests", "worker_id, finish_reason"), f"{_NAME} {{{{finish_reason}}}}"),),
        "stacked",
    ),
    Panel(
        "Requests refused, by code",
        "Routers retry elsewhere where they can. If `overloaded` persists, routers expect capacity that does not "
        "exist: see the gaps in their events.",
        "reqps",
        (Query(_rate("refusals", "worker_id, code"), f"{_NAME} {{{{code}}}}"),),
        "stacked",
    ),
    Panel(
        "Streams that no router guards",
        "They end together with their worker. If there are any for more than a few seconds, no router takes the "
        "worker's offers: see the runbook of the alert.",
        "short",
        (Query(sum_of(f"{_P}_streams_unguarded", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "LoRA adapters of each worker",
        "Adapters that requests may use. Workers of a model should have the same number. If one has fewer, its log "
        "says why (`adapter_failed`).",
        "short",
        (Query(sum_of(f"{_P}_adapters", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Requests cancelled because their client was gone",
        "Their reply subjects had no listener any more. If there are many, the broker's log says whether it cuts off "
        "clients that read too slowly (`Slow Consumer`); otherwise clients end, or lose their connection, without a "
        "cancel.",
        "short",
        (Query(increase(f"{_P}_clients_gone_total", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Streams that are held",
        "Open streams that nothing is published for, because their clients or their routers are out of reach. If there "
        "are many at a time, a link between brokers is down (`link_suspected` in the log); they flow again once it is "
        "up, or end after `--link-patience-s`.",
        "short",
        (
            Query(sum_of(f"{_P}_streams_held", WORKER_FILTER, "worker_id"), _NAME),
            Query(increase(f"{_P}_held_streams_total", WORKER_FILTER, "worker_id"), f"{_NAME} held"),
            Query(increase(f"{_P}_released_streams_total", WORKER_FILTER, "worker_id"), f"{_NAME} released"),
        ),
    ),
    Panel(
        "Inputs embedded per second",
        "If the rate stays 0 although clients request embeddings, the router dashboard shows how those requests end.",
        "suffix: /s",
        (Query(_rate("embeddings"), _NAME),),
    ),
    Panel(
        "Tokens of embedded inputs per second",
        "A generative worker embeds inputs between the steps of its streams. If streams slow down while there are "
        "many, let other workers embed: with `--pooling none` a worker only generates.",
        "suffix: /s",
        (Query(_rate("embedded_tokens"), _NAME),),
    ),
    Panel(
        "Documents scored per second",
        "If the rate stays 0 although clients rank documents, the router dashboard shows how those requests end.",
        "suffix: /s",
        (Query(_rate("scored_documents"), _NAME),),
    ),
)

_STEPS = (
    Panel(
        "Duration of steps, by kind",
        "Median and 95th percentile. If steps with prompts far exceed --step-target-ms, streams stutter; if decode "
        "steps grow, contexts grow too, or another program uses the cores.",
        "s",
        (
            Query(quantile(0.5, f"{_P}_step_seconds", WORKER_FILTER, "kind"), "{{kind}} p50"),
            Query(quantile(0.95, f"{_P}_step_seconds", WORKER_FILTER, "kind"), "{{kind}} p95"),
        ),
    ),
    Panel(
        "Tokens computed, and tokens sampled",
        "If many are computed and few sampled, the device is busy with prompts: more cache hits help most.",
        "suffix: tok/s",
        (
            Query(_rate("computed_tokens"), f"{_NAME} computed"),
            Query(_rate("generation_tokens"), f"{_NAME} sampled"),
        ),
    ),
    Panel(
        "Device time, computing and idle with work to do",
        "Shares of each second. If the device is idle for more than a few percent, the worker's process lacks CPU: "
        "give it more, or the engine fewer --threads.",
        "percentunit",
        (
            Query(_rate("inference_seconds"), f"{_NAME} computing"),
            Query(_rate("device_gap_seconds"), f"{_NAME} idle"),
        ),
    ),
    Panel(
        "Age of the step in progress",
        "If the age only rises, the step hangs: after --step-timeout-s the engine is killed, and its streams continue "
        "in a new one.",
        "s",
        (Query(max_of(f"{_P}_step_age_seconds", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Engine restarts, by worker",
        "If there are any, `engine_died` in the worker's log says why: a request that crashes engines, a device that "
        "hangs, or too little memory.",
        "short",
        (Query(increase(f"{_P}_engine_restarts_total", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Workers ready for requests",
        "1 if ready, else 0. If a worker stays at 0, its /readyz and its log say why.",
        "short",
        (Query(max_of(f"{_P}_ready", WORKER_FILTER, "worker_id"), _NAME),),
    ),
)

_MEMORY = (
    Panel(
        "KV blocks, by state",
        "Blocks are used by running requests, cached for later ones, or free. If nearly all are used, requests wait: "
        "raise --kv-tokens, or halve the size of a token with --cache-type-k q8_0.",
        "short",
        (Query(sum_of(f"{_P}_kv_blocks", WORKER_FILTER, "worker_id, state"), f"{_NAME} {{{{state}}}}"),),
        "stacked",
    ),
    Panel(
        "KV blocks in total",
        "If it differs between workers of one model, their settings or the memory of their machines differ.",
        "short",
        (Query(sum_of(f"{_P}_kv_total_blocks", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Device memory of the KV cache",
        "0 if unknown. If it differs between workers of one model, their settings or the memory of their machines "
        "differ.",
        "bytes",
        (
            Query(sum_of(f"{_P}_kv_bytes", WORKER_FILTER, "worker_id"), _NAME),
            Query(sum_of(f"{_P}_kv_used_bytes", WORKER_FILTER, "worker_id"), f"{_NAME} used"),
        ),
    ),
    Panel(
        "KV memory that workers of one process share",
        "The memory that a worker holds now, its share if all want as much as they can get, and its cap; memory "
        "beyond the share is borrowed. If all hold their shares and requests wait, raise --kv-budget.",
        "bytes",
        (
            Query(
                sum_of(f"{_P}_kv_pool_bytes", f'{WORKER_FILTER},part!="budget"', "worker_id, part"),
                f"{_NAME} {{{{part}}}}",
            ),
        ),
    ),
    Panel(
        "KV memory reclaimed for other workers of the process",
        "Bytes per second, of idle prefixes and of preempted sequences. If sequences keep being preempted, the models "
        "are busy at the same time: raise --kv-budget.",
        "Bps",
        (Query(rate(f"{_P}_kv_reclaimed_bytes_total", WORKER_FILTER, "worker_id, kind"), f"{_NAME} {{{{kind}}}}"),),
    ),
    Panel(
        "Memory that engines were planned to take, by part",
        "The log line `memory_planned` has the total. If an engine takes more, as its process shows, lower "
        "--kv-tokens or --host-cache-mib, and report it.",
        "bytes",
        (Query(sum_of(f"{_P}_memory_planned_bytes", WORKER_FILTER, "worker_id, part"), f"{_NAME} {{{{part}}}}"),),
        "stacked",
    ),
    Panel(
        "KV blocks fetched from other workers and given to them",
        "Bytes per second. If blocks are fetched constantly, the routers spread requests that share prefixes: see "
        "their dashboard for the policy.",
        "Bps",
        (
            Query(rate(f"{_P}_kv_fetched_bytes_total", WORKER_FILTER, "worker_id"), f"{_NAME} fetched"),
            Query(rate(f"{_P}_kv_given_bytes_total", WORKER_FILTER, "worker_id"), f"{_NAME} given"),
        ),
    ),
    Panel(
        "Fetches of KV blocks, by outcome",
        "Most should be `complete`. If many are `timeout` or `partial`, the network is too slow for them; if they are "
        "`lost`, a worker does not answer; if they are `refused` or `corrupt`, the log says which worker gave them.",
        "ops",
        (Query(rate(f"{_P}_kv_fetches_total", WORKER_FILTER, "outcome"), "{{outcome}}"),),
    ),
    Panel(
        "Duration of fetches of KV blocks",
        "The time until the last block has arrived, or until the worker has given up. If it nears 5 s, the limit of "
        "fetches, computing the prompts would be as fast.",
        "s",
        (Query(quantile(0.95, f"{_P}_kv_fetch_seconds", WORKER_FILTER, "worker_id"), f"{_NAME} p95"),),
    ),
    Panel(
        "Workers that read KV blocks here",
        "At most two at a time read what a worker has, and eight what it computes for them. If it stays at two on a "
        "worker that computes nothing for others, the others compute what they could fetch.",
        "short",
        (Query(sum_of(f"{_P}_kv_leases", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Prompts computed for other workers",
        "Per second, by outcome: at workers that compute for others, and at those that wait for them. Most should be "
        "`complete`. If many are `timeout`, the others are slower than routers expect; if they are `busy`, there are "
        "too few; if they are `lost`, one does not answer.",
        "ops",
        (
            Query(rate(f"{_P}_remote_prefills_total", WORKER_FILTER, "outcome"), "computed: {{outcome}}"),
            Query(rate(f"{_P}_remote_prefills_awaited_total", WORKER_FILTER, "outcome"), "awaited: {{outcome}}"),
        ),
    ),
    Panel(
        "Prompt tokens found cached",
        "The share of prompt tokens that were cached. If it is much lower on one worker than on others, that one has "
        "just started, or routers miss its events.",
        "percentunit",
        (
            Query(
                f"{_rate('prefix_cache_hits_tokens')} / {_rate('prefix_cache_queries_tokens')}",
                _NAME,
            ),
        ),
    ),
    Panel(
        "Cached blocks evicted per second",
        "If many are evicted and hits fall, the working set is larger than the memory: raise --host-cache-mib.",
        "suffix: blocks/s",
        (Query(_rate("evicted_blocks"), _NAME),),
    ),
    Panel(
        "Sequences preempted, by worker",
        "Sequences that lost their KV blocks to others, which used more than expected, and continue later. If it "
        "keeps happening, raise --kv-tokens or add workers.",
        "short",
        (Query(increase(f"{_P}_preemptions_total", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Tokens of next turns computed ahead and used",
        "What the next turns of conversations begin with, computed while the engine was idle, and how much of it the "
        "turns that came have used. If little is used, --no-speculative-prefill saves the work.",
        "suffix: tokens/s",
        (Query(_rate("next_turn_tokens", "worker_id, event"), f"{_NAME} {{{{event}}}}"),),
    ),
    Panel(
        "Requests that failed in a row",
        "Since the last success, with errors that another worker may not have. If it reaches 10, all requests fail "
        "there: see request_finished in the worker's log, and restart it. Until then routers avoid it.",
        "short",
        (Query(sum_of(f"{_P}_failures_in_a_row", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Parts of steps with non-finite numbers, by worker",
        "The model computed NaN or infinity, and the parts are computed again. If one adapter or prompt causes it "
        "(step_poisoned in the log names the requests), unload the adapter or check the model's files. An engine "
        "whose memory keeps such numbers is replaced: if that happens more than once, check the device.",
        "short",
        (
            Query(increase(f"{_P}_poisoned_shares_total", WORKER_FILTER, "worker_id"), _NAME),
            Query(increase(f"{_P}_poisoned_engines_total", WORKER_FILTER, "worker_id"), f"{_NAME} engines replaced"),
        ),
    ),
    Panel(
        "Memory of devices, used and free",
        "The host's is what the machine has within the limit of the container. If little of the host is free, lower "
        "--host-cache-mib or --kv-tokens before the system kills a process; another program on the machine counts too.",
        "bytes",
        (
            Query(
                max_of(f"{_P}_device_memory_bytes", WORKER_FILTER, "worker_id, device, state"),
                f"{_NAME} {{{{device}}}} {{{{state}}}}",
            ),
        ),
    ),
    Panel(
        "Memory of processes",
        "Resident memory of frontend and engine. If the engine's grows for days with the same load, restart it and "
        "report it; weights that are mapped from a file count as far as they were read.",
        "bytes",
        (Query(max_of(f"{_P}_resident_bytes", WORKER_FILTER, "worker_id, process"), f"{_NAME} {{{{process}}}}"),),
    ),
    Panel(
        "Uptime of processes",
        "0 if there is no engine. If it keeps falling, the log says why the process ended.",
        "s",
        (Query(max_of(f"{_P}_uptime_seconds", WORKER_FILTER, "worker_id, process"), f"{_NAME} {{{{process}}}}"),),
    ),
    Panel(
        "Logits: mean, smallest and largest",
        "All of a single row; one row per second is checked. Usual values depend on the model. If it changes and the "
        "model did not, check its file, its adapters and the device.",
        "short",
        (Query(max_of(f"{_P}_logits", WORKER_FILTER, "worker_id, stat"), f"{_NAME} {{{{stat}}}}"),),
    ),
    Panel(
        "Non-finite logits, by kind",
        "Most come with parts of steps with non-finite numbers, and step_poisoned in the log counts them for each. If "
        "some come without such parts, the output matrix of the model's file is damaged.",
        "short",
        (Query(increase(f"{_P}_non_finite_logits_total", WORKER_FILTER, "worker_id, kind"), f"{_NAME} {{{{kind}}}}"),),
    ),
    Panel(
        "Tokens of preempted sequences, by how they came back",
        "Restored from the cache, or computed again. If many are computed again, raise --host-cache-mib.",
        "suffix: tokens/s",
        (Query(_rate("preempted_tokens", "worker_id, kind"), f"{_NAME} {{{{kind}}}}"),),
        "stacked",
    ),
    Panel(
        "KV blocks that requests are expected to use",
        "As a share of all blocks; above 1, requests wait for memory. If it stays there, raise --kv-tokens or add "
        "workers.",
        "percentunit",
        (Query(sum_of(f"{_P}_kv_expected_ratio", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Tokens expected of the next answer",
        "The mean of the last 64 answers; requests start when there is room for this many tokens. If it is far above "
        "what most answers have, a few clients ask for very long ones.",
        "suffix: tokens",
        (Query(sum_of(f"{_P}_expected_answer_tokens", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Copies in host memory",
        "Blocks that can be restored, or given to other workers, without being computed. If the number has stopped "
        "growing while blocks are evicted, --host-cache-mib is used up.",
        "short",
        (Query(sum_of(f"{_P}_host_cache_blocks", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Blocks that clients have asked to keep",
        "Blocks that are evicted after all others, or such checkpoints. If they stay at half of the cache, they are "
        "kept for less time than requested: raise --host-cache-mib, or lower --kept-share or --max-kept-s.",
        "short",
        (Query(sum_of(f"{_P}_kept_blocks", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Blocks that new engines have recovered",
        "Copies of KV blocks that an engine had made before it died, or a worker before it restarted. If more are "
        "discarded than a few torn ones after a crash, remove the files of --keep-cache.",
        "short",
        (
            Query(increase(f"{_P}_host_cache_recovered_blocks_total", WORKER_FILTER, "worker_id"), _NAME),
            Query(
                increase(f"{_P}_host_cache_discarded_slots_total", WORKER_FILTER, "worker_id, reason"),
                f"{_NAME} discarded: {{{{reason}}}}",
            ),
        ),
    ),
    Panel(
        "Fetched blocks that were refused",
        "Keys or values of another worker were NaN or infinite, so that prompts are computed. If it continues, drain "
        "the worker that gave them: blocks_fetched in the log has its name.",
        "short",
        (Query(increase(f"{_P}_kv_refused_blocks_total", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "Bytes that new engines have recovered",
        "The size of these copies. If it stays near --host-cache-mib, a larger one would save more.",
        "bytes",
        (Query(increase(f"{_P}_host_cache_recovered_bytes_total", WORKER_FILTER, "worker_id"), _NAME),),
    ),
    Panel(
        "KV moved between device and host memory",
        "Cached prefixes and preempted sequences. If it is many times what is computed, the memory is too small.",
        "Bps",
        (Query(_rate("kv_transferred_bytes", "worker_id, direction"), f"{_NAME} {{{{direction}}}}"),),
        "stacked",
    ),
    Panel(
        "Checkpoints, by event",
        "Of models with windows or recurrent layers: saved, restored for a request, evicted to make room. If many "
        "are evicted and few restored, raise --host-cache-mib.",
        "suffix: /s",
        (Query(_rate("checkpoints", "worker_id, event"), f"{_NAME} {{{{event}}}}"),),
    ),
    Panel(
        "Memory of checkpoints",
        "Host memory of checkpoints. If it stays far below --host-cache-mib, less is enough.",
        "bytes",
        (Query(sum_of(f"{_P}_checkpoint_bytes", WORKER_FILTER, "worker_id"), _NAME),),
    ),
)

_CONSTRAINTS = (
    Panel(
        "Constrained requests, by language",
        "Requests whose output has to follow a schema, a regex, a choice or a grammar. If there are many, the panels "
        "beside this one show what they cost and save.",
        "reqps",
        (Query(_rate("constrained_requests", "worker_id, kind"), f"{_NAME} {{{{kind}}}}"),),
        "stacked",
    ),
    Panel(
        "Time to compile a constraint",
        "Median and 99th percentile. A request starts once its constraint is compiled: small ones one at a time on "
        "each worker, the others in processes of their own, two at a time. "
        "If it takes long, clients send very large schemas or grammars, or a new one each time.",
        "s",
        (
            Query(quantile(0.5, f"{_P}_constraint_compile_seconds", WORKER_FILTER, "worker_id"), f"{_NAME} p50"),
            Query(quantile(0.99, f"{_P}_constraint_compile_seconds", WORKER_FILTER, "worker_id"), f"{_NAME} p99"),
        ),
    ),
    Panel(
        "Constraints that were refused",
        "By reason. too_costly took more time or memory to compile than allowed, given_up did so during generation, "
        "and neither affects other requests. If a client keeps sending new ones, it is attacking, or needs a smaller "
        "schema.",
        "reqps",
        (Query(_rate("constraint_refusals", "worker_id, reason"), f"{_NAME} {{{{reason}}}}"),),
        "stacked",
    ),
    Panel(
        "Share of forced tokens",
        "The share of tokens that constraints forced, so that no step sampled them. If it is near 0, constraints "
        "leave most of the text open.",
        "percentunit",
        (Query(f"{_rate('follower_tokens')} / {_rate('generation_tokens')}", _NAME),),
    ),
)

_ANSWERS = (
    Panel(
        "Tool calls in answers",
        "Calls in answers, by whether they were complete. If many are not, answers reach `max_tokens` in the middle of "
        "a call, or stop strings end them there.",
        "cps",
        (Query(_rate("tool_calls", "worker_id, complete"), f"{_NAME} complete={{{{complete}}}}"),),
        "stacked",
    ),
    Panel(
        "Share of reasoning",
        "The share of the sampled tokens that belong to the reasoning before an answer. If answers take too long, turn "
        "reasoning off with the template's variable (`chat_template_kwargs`), or limit it (`reasoning.max_tokens`).",
        "percentunit",
        (Query(f"{_rate('reasoning_tokens')} / {_rate('generation_tokens')}", _NAME),),
    ),
    Panel(
        "Reasoning that was closed",
        "Answers whose reasoning was closed because its budget was spent. If these are most of them, clients ask for "
        "less than the model needs.",
        "cps",
        (Query(_rate("reasoning_budgets_spent"), _NAME),),
    ),
)

_ON_DEMAND = (
    Panel(
        "Models, by state",
        "The models that are loaded, and those that come and go. If two models keep taking turns, there is not enough "
        "memory for both: raise --memory-budget-mib, or move one to another worker.",
        "short",
        (Query(sum_of(f"{_P}_model_state", WORKER_FILTER, "model, worker_id, state"), "{{model}} {{state}}"),),
        "stacked",
    ),
    Panel(
        "Memory of the loaded models, and the budget",
        "As estimated from their files. If the budget is never used up, others could be pinned.",
        "bytes",
        (
            Query(sum_of(f"{_P}_memory_reserved_bytes", MODEL_FILTER, "instance"), "{{instance}} reserved"),
            Query(max_of(f"{_P}_memory_budget_bytes", MODEL_FILTER, "instance"), "{{instance}} budget"),
        ),
    ),
    Panel(
        "Loads and unloads",
        "Loads by outcome, unloads by reason. If loads fail, `model_not_loaded` in the worker's log says why.",
        "short",
        (
            Query(increase(f"{_P}_model_loads_total", WORKER_FILTER, "model, outcome"), "{{model}} load {{outcome}}"),
            Query(
                increase(f"{_P}_model_unloads_total", WORKER_FILTER, "model, reason"), "{{model}} unload: {{reason}}"
            ),
        ),
    ),
    Panel(
        "Time to load a model",
        "95th percentile. If it is much longer than on an idle machine, the disk is slow, or others use all cores.",
        "s",
        (Query(quantile(0.95, f"{_P}_model_load_seconds", WORKER_FILTER, "model"), "{{model}}"),),
    ),
    Panel(
        "Workers that load",
        "1 while an engine is being started. If it stays 1, the engine's log says what it waits for.",
        "short",
        (Query(sum_of(f"{_P}_loading", WORKER_FILTER, "model, worker_id"), "{{model}} {{worker_id}}"),),
    ),
)
DASHBOARD = Dashboard(
    "worker",
    "Tokenbus worker",
    "Requests, steps, memory and cache of workers.",
    (MODEL, WORKER),
    (
        Row("Requests", _REQUESTS),
        Row("Steps", _STEPS),
        Row("Constraints", _CONSTRAINTS),
        Row("Tools and reasoning", _ANSWERS),
        Row("Memory and cache", _MEMORY),
        Row("Models on demand", _ON_DEMAND),
    ),
)
