"""One instance of every message of the wire, and the script that writes down their bytes.

`python -m tests.protocol.wire.golden` writes golden.json. Run it only for an added optional field or another order of
keys: everything else that changes a byte is version 2 of the wire."""

import json
from pathlib import Path
from typing import TypedDict

import msgspec

from tokenbus.protocol.wire import block_hash, codec, errors, internal, messages
from tokenbus.protocol.wire.params import GenerationParams

PATH = Path(__file__).parent / "golden.json"


class Entry(TypedDict):
    message: str
    what: str
    json: str | None
    """None for internal messages, which are never JSON."""
    msgpack: str
    """In hex."""


CALL = messages.ToolCallDelta(
    index=0, id="c1", type="function", function=messages.FunctionDelta(name="f", arguments='{"a": 1')
)
USAGE = messages.Usage(prompt_tokens=12, completion_tokens=3, total_tokens=15, cached_tokens=8)
RATE_LIMITS = messages.RateLimits(requests=messages.RateLimit(limit=60, remaining=4, reset_ms=1_500.0))
TIMINGS = messages.Timings(queue_ms=0.5, prefill_ms=20.25, ttft_ms=21.0, decode_ms=30.0, total_ms=51.5)
LOAD = messages.Load(
    running=2, waiting=1, queued_prefill_tokens=300, used_blocks=5, cached_blocks=6, free_blocks=53, step_age_ms=4.5
)
FIRST_TOKEN = internal.FirstToken(stream_no=7, cached_tokens=64, queue_ms=0.5, prefill_ms=20.25, max_tokens=900)
ROUTING = messages.RoutingReport(
    chosen="w1",
    policy="cost",
    candidates=[
        messages.Candidate(worker_id="w1", cost=1.5, overlap_blocks=2, prefill_blocks=1, decode_blocks=3, state="ready")
    ],
)
CARD = messages.Card(
    worker_id="w1",
    epoch="1760000000000-abcdef",
    model="qwen2.5-0.5b",
    source="qwen2.5-0.5b-instruct-q4_k_m.gguf",
    engine="gguf",
    engine_version="0.3.36",
    context_length=32_768,
    max_num_seqs=16,
    max_num_batched_tokens=2_048,
    hash_scheme="xxh3_64:8f1d2c3b4a596877",
    features=["generate"],
    state=messages.WorkerState.READY,
    host="host-1",
    pids=messages.Pids(front=101, engine=102),
    versions={"tokenbus": "0.1.0"},
)
COUNTS = messages.WorkerCounts(
    workers=3, states={"ready": 2, "silent": 1}, running=4, waiting=1, generated_tokens=9_000
)
HEALTH = messages.WorkerHealth(
    devices=[
        messages.DeviceHealth(name="host", kind="cpu", total_bytes=1 << 34, free_bytes=1 << 33),
        messages.DeviceHealth(
            name="CUDA0", kind="gpu", total_bytes=1 << 36, free_bytes=5, description="NVIDIA H100", layers=24
        ),
    ],
    front_bytes=81_920_000,
    engine_bytes=4_294_967_296,
    uptime_s=86_400.5,
    engine_uptime_s=60.0,
)
FULL_CARD = codec.replace(
    CARD,
    health=HEALTH,
    kv_block_size=16,
    total_kv_blocks=4_096,
    host_kv_blocks=65_536,
    kv_checkpoints=True,
    takes_passed_on=True,
    process="host-1-101",
    process_run="1752650000000-0badcafe",
    broker="NBROKER",
    network="cluster-1",
    kv_identity="8f1d2c3b4a596877",
    kv_token_bytes=12_288,
    watched=messages.WorkerTracking(events="live", indexed_blocks=11, lost_events=2, booked=1),
    tokenizer_digest="99aa06d3014798d86001c324468d497f",
    chat_format_digest="0f343b0931126a20f133d67c2b018a3b",
    previous=messages.PreviousEpoch(epoch="1750000000000-abcdef", seq=41),
    earlier=[messages.PreviousEpoch(epoch="1740000000000-abcdef", seq=-1)],
    adapters=[messages.CardAdapter(name="style", digest="7bd09cb0", tenants=["acme"])],
    embeddings=messages.CardEmbeddings(dimensions=896, pooling="last", max_input_tokens=2_048),
    role=messages.WorkerRole.DECODE,
    site="eu-1",
    loadable=True,
    load=LOAD,
)
ROUTER = messages.RouterStats(
    router_id="r1",
    models=["m*"],
    decisions=7,
    decisions_per_s=0.5,
    decision_p50_us=70.0,
    decision_p99_us=150.5,
    waiting=3,
    indexed_blocks=11,
    predicted_hit_rate=0.25,
    hit_rate=0.5,
    refused_cards=[messages.RefusedCard(worker_id="w9", model="m", reason="its blocks differ")],
    refused_messages=4,
    continued=2,
    passed_on=3,
    uploads=1,
    upload_bytes=65_536,
)
ERROR = errors.make_error(errors.Code.OVERLOADED, "the queue holds 64 of 64", retry_after_ms=250.0)
HASHES = [0xFEDCBA9876543210, 1, 2**64 - 1]

PUBLIC: list[tuple[str, messages.Message]] = [
    ("the simplest", messages.GenerateRequest(prompt="Hello")),
    (
        "everything",
        messages.GenerateRequest(
            id="r-1",
            messages=[
                messages.ChatMessage(role="system", content="Be brief."),
                messages.ChatMessage(
                    role="user", content=[messages.ContentPart(type="text", text="Grüß Gott \U0001f600")]
                ),
                messages.ChatMessage(role="assistant", tool_calls=[{"id": "c1", "function": {"name": "f"}}]),
                messages.ChatMessage(role="tool", content="42", name="f", tool_call_id="c1"),
            ],
            max_tokens=64,
            min_tokens=1,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            repetition_last_n=64,
            presence_penalty=-0.5,
            frequency_penalty=0.5,
            seed=4_294_967_295,
            stop=["\n\n", "END"],
            stop_token_ids=[2, 4_294_967_295],
            ignore_eos=False,
            logit_bias={"50": -1.5},
            logprobs=2,
            prompt_logprobs=1,
            prompt_logprobs_from=3,
            response_format=messages.ResponseFormat(
                type="json_schema",
                json_schema=messages.JsonSchema(schema={"type": "object"}, name="n", strict=True, description="d"),
            ),
            regex="a+",
            choice=["yes", "no"],
            grammar='root ::= "a"',
            tools=[{"type": "function", "function": {"name": "f"}}],
            tool_choice="auto",
            parallel_tool_calls=False,
            parse_output=False,
            reasoning=messages.ReasoningOptions(max_tokens=512, effort="low", optional=True),
            chat_template_kwargs={"thinking": False, "n": None},
            lora=[messages.Lora(name="style", scale=0.5)],
            cache_prompt=True,
            cache_salt="salt",
            cache_control=messages.CacheControl(ttl_ms=60_000.0),
            session_id="s",
            priority=-5,
            timeout_ms=1500.5,
            stream=True,
            resume_from=messages.ResumeFrom(token_ids=[1, 2], hash_scheme="xxh3-64:m"),
            return_token_ids=True,
            return_sampling=True,
            return_progress=True,
            routing=messages.RoutingOptions(worker_id="w1", policy="cost", explain=True),
            copy_of="r0",
        ),
    ),
    ("a gap", messages.GenerateRequest(prompt="def f(", suffix="return x")),
    (
        "a message to continue",
        messages.GenerateRequest(
            messages=[messages.ChatMessage(role="assistant", content="The")], continue_final_message=True
        ),
    ),
    ("token ids", messages.GenerateRequest(token_ids=[0, 1, 4_294_967_295], stop="x")),
    (
        "a head",
        messages.Chunk(id="r-1", worker_id="w1", model="qwen2.5-0.5b", created=1_760_000_000, hash_scheme="xxh3-64:m"),
    ),
    ("a router's empty chunk", messages.Chunk(id="r-1", worker_id=None, model="m", created=1_760_000_000)),
    ("text", messages.Chunk(id="r-1", attempt=1, offset=3, tokens=2, text_offset=9, text=" wörld\n")),
    ("a token whose text is held back", messages.Chunk(id="r-1", offset=5, tokens=1, text_offset=17)),
    (
        "token ids and logprobs",
        messages.Chunk(
            id="r-1",
            tokens=1,
            text="a",
            token_ids=[97],
            logprobs=[
                messages.TokenLogprob(
                    id=97,
                    text="a",
                    bytes=[97],
                    logprob=-0.25,
                    top=[messages.TokenAlternative(id=195, text="\ufffd", bytes=[195], logprob=-1.5)],
                )
            ],
        ),
    ),
    (
        "log probabilities of the prompt",
        messages.Chunk(
            id="r-1",
            prompt_offset=0,
            prompt_logprobs=[
                messages.PromptLogprob(id=97, text="a", bytes=[97], logprob=None, rank=None, top=[]),
                messages.PromptLogprob(
                    id=98,
                    text="b",
                    bytes=[98],
                    logprob=-1.5,
                    rank=2,
                    top=[messages.TokenAlternative(id=99, text="c", bytes=[99], logprob=-0.25)],
                ),
            ],
        ),
    ),
    (
        "progress",
        messages.Chunk(id="r-1", progress=messages.Progress(prompt_tokens=100, processed_tokens=64, cached_tokens=32)),
    ),
    (
        "a head with the sampling",
        messages.Chunk(
            id="r-1",
            worker_id="w1",
            sampling=messages.SamplingReport(
                temperature=0.5,
                top_p=0.9,
                top_k=40,
                min_p=0.0,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                seed=7,
                max_tokens=100,
            ),
        ),
    ),
    (
        "a terminal at a stop string",
        messages.Chunk(
            id="r-1",
            offset=2,
            tokens=1,
            text_offset=4,
            finish_reason=messages.FinishReason.STOP,
            worker_id="w1",
            model="m",
            created=1_760_000_000,
            usage=USAGE,
            timings=TIMINGS,
            rate_limits=RATE_LIMITS,
            stop_match="END",
            routing=ROUTING,
        ),
    ),
    (
        "a terminal behind fetched blocks",
        messages.Chunk(
            id="r-1",
            finish_reason=messages.FinishReason.LENGTH,
            usage=USAGE,
            timings=codec.replace(TIMINGS, fetched_tokens=8, fetch_ms=1.5),
        ),
    ),
    (
        "a terminal at a stop token",
        messages.Chunk(id="r-1", finish_reason=messages.FinishReason.STOP, usage=USAGE, timings=TIMINGS, stop_match=2),
    ),
    (
        "a terminal of an answer that was stopped",
        messages.Chunk(
            id="r-1", finish_reason=messages.FinishReason.LENGTH, usage=USAGE, stopped_by=messages.StoppedBy.OPERATOR
        ),
    ),
    (
        "a terminal with tool calls",
        messages.Chunk(id="r-1", finish_reason=messages.FinishReason.TOOL_CALLS, tool_calls=[CALL]),
    ),
    ("nothing yet, while the model is loaded", messages.Chunk(id="r-1", worker_id=None, load_progress=0.25)),
    (
        "reasoning, and a call that begins",
        messages.Chunk(id="r-1", offset=3, tokens=2, reasoning_offset=4, reasoning="mm", tool_calls=[CALL]),
    ),
    (
        "more of a call",
        messages.Chunk(
            id="r-1",
            offset=5,
            tokens=1,
            tool_calls=[
                messages.ToolCallDelta(index=0, arguments_offset=2, function=messages.FunctionDelta(arguments='"é"}'))
            ],
        ),
    ),
    ("a refusal", messages.Chunk(id="", finish_reason=messages.FinishReason.ERROR, error=ERROR)),
    ("yes", messages.CancelReply(cancelled=True)),
    ("from a token on", messages.ResyncRequest(offset=17)),
    ("from a token of the prompt on", messages.ResyncRequest(offset=0, prompt_offset=5)),
    ("yes", messages.ResyncReply(found=True)),
    ("from no token", messages.ResyncReply(found=True, error=ERROR)),
    ("of an announcement", messages.UploadReply(upload="tokenbus.v1.upload.default.0f1e.2d3c")),
    ("of a part", messages.UploadReply(upload="tokenbus.v1.upload.default.0f1e.2d3c", received=262_144)),
    ("an error", messages.UploadReply(error=ERROR)),
    ("one text", messages.EmbedRequest(input="Hello")),
    (
        "everything",
        messages.EmbedRequest(
            id="e-1", input=["a", [1, 2]], dimensions=64, encoding="base64", normalize=False, timeout_ms=60_000.0
        ),
    ),
    ("floats", messages.EmbedReply(id="e-1", model="m", embeddings=[[0.5, -1.0]], usage=USAGE)),
    (
        "limits",
        messages.EmbedReply(id="e-1", model="m", embeddings=[[0.5, -1.0]], usage=USAGE, rate_limits=RATE_LIMITS),
    ),
    ("base64", messages.EmbedReply(id="e-1", model="m", embeddings=["AAAAPw=="], usage=USAGE)),
    ("an error", messages.EmbedReply(id="e-1", error=ERROR)),
    (
        "everything",
        messages.CacheRequest(id="h-1", session_id="s", cache_control=messages.CacheControl(ttl_ms=0.0)),
    ),
    ("told", messages.CacheReply(id="h-1", model="m")),
    ("limits", messages.CacheReply(id="h-1", model="m", rate_limits=RATE_LIMITS)),
    ("an error", messages.CacheReply(id="h-1", error=ERROR)),
    ("a text", messages.TokenizeRequest(prompt="Hello")),
    ("the tokenizer", messages.TokenizeRequest(prompt="", return_tokenizer=True)),
    (
        "everything",
        messages.TokenizeRequest(
            id="t-1",
            messages=[messages.ChatMessage(role="user", content="Hello")],
            tools=[{"type": "function", "function": {"name": "f"}}],
            chat_template_kwargs={"thinking": False},
            continue_final_message=False,
            add_special_tokens=False,
            only_count=True,
            timeout_ms=60_000.0,
        ),
    ),
    ("token ids", messages.TokenizeReply(id="t-1", model="m", count=2, token_ids=[1, 2], context_length=512)),
    ("an open prompt", messages.TokenizeReply(id="t-1", model="m", count=2, context_length=512, continues=True)),
    ("only the count", messages.TokenizeReply(id="t-1", model="m", count=2, context_length=512)),
    (
        "the tokenizer",
        messages.TokenizeReply(
            id="t-1",
            model="m",
            count=0,
            tokenizer=messages.TokenizerInfo(
                vocab_size=512, bos_token="<s>", eos_token="</s>", adds_bos=True, chat_template="{{ messages }}"
            ),
        ),
    ),
    ("an error", messages.TokenizeReply(id="t-1", error=ERROR)),
    ("everything", messages.DetokenizeRequest(id="t-1", token_ids=[1, 2], timeout_ms=60_000.0)),
    ("each token", messages.DetokenizeRequest(token_ids=[1], return_pieces=True)),
    ("a text", messages.DetokenizeReply(id="t-1", model="m", text="Grüß")),
    (
        "each token",
        messages.DetokenizeReply(
            id="t-1", model="m", text="\ufffd", pieces=[messages.TokenPiece(text="\ufffd", bytes=[195])]
        ),
    ),
    ("an error", messages.DetokenizeReply(id="t-1", error=ERROR)),
    ("a query", messages.RerankRequest(query="Which?", documents=["this", "that"])),
    (
        "all fields",
        messages.RerankRequest(id="k-1", query="Which?", documents=["this"], top_n=1, timeout_ms=5_000.0),
    ),
    (
        "results",
        messages.RerankReply(
            id="k-1",
            model="m",
            results=[
                messages.RankedDocument(index=1, relevance_score=2.5),
                messages.RankedDocument(index=0, relevance_score=-0.5),
            ],
            usage=USAGE,
        ),
    ),
    ("limits", messages.RerankReply(id="k-1", model="m", results=[], usage=USAGE, rate_limits=RATE_LIMITS)),
    ("an error", messages.RerankReply(id="k-1", error=ERROR)),
    ("what must be there", CARD),
    ("everything", FULL_CARD),
    (
        "two models",
        messages.ModelsReply(
            models=[
                messages.ServedModel(model="m", context_length=512, features=["generate"], workers=[FULL_CARD]),
                messages.ServedModel(model="n", context_length=0, features=[], workers=[]),
            ],
            limits=messages.ServerLimits(max_request_bytes=524_288),
            router=ROUTER,
        ),
    ),
    (
        "truncated",
        messages.ModelsReply(
            models=[messages.ServedModel(model="m", context_length=512, features=["generate"])],
            limits=messages.ServerLimits(max_request_bytes=524_288),
            truncated=True,
        ),
    ),
    ("who is there?", messages.FleetRequest()),
    ("a digest with all workers", messages.FleetRequest(router_id="router-1", whole=True)),
    (
        "all workers",
        messages.FleetDigest(
            router_id="router-1",
            router=ROUTER,
            life="0123456789abcdef",
            seq=1,
            parts=1,
            whole=True,
            joined=[
                messages.WorkerSheet(
                    number=0,
                    worker_id="w1",
                    model="m",
                    engine="gguf",
                    host="h",
                    max_num_seqs=8,
                    since_ms=1_760_000_000_000,
                )
            ],
            workers=[messages.WorkerNumbers(0, "ready", running=2, max_running=8, tokens_per_s=35.5, events="live")],
            memory=[messages.WorkerMemory(0, 92, 512, 3, [("host", 24_000, 20_000)])],
        ),
    ),
    (
        "what has changed",
        messages.FleetDigest(
            router_id="router-1",
            life="0123456789abcdef",
            seq=2,
            part=1,
            parts=2,
            left=[0],
            queues=[messages.ModelQueue("m", 3, 1), messages.ModelQueue("n", 0, 2, 0.5)],
        ),
    ),
    ("refused", messages.FleetDigest(router_id="router-1", error=ERROR)),
    (
        "limits",
        messages.FleetDigest(
            router_id="router-1",
            limits=[
                messages.ClientLimits(tenant="acme", key_id="abcdefghij", rate_limits=RATE_LIMITS, refused=2),
                messages.ClientLimits(tenant="acme", open=3, max_open=8),
            ],
        ),
    ),
    ("the latest", messages.TraceRequest()),
    ("one", messages.TraceRequest(id="r-1")),
    ("those that were slow or failed", messages.TraceRequest(failed=True, slower_than_ms=1_000.0, limit=20)),
    (
        "one that survived its worker",
        messages.TraceReply(
            router_id="router-1",
            requests=[
                messages.RequestTrace(
                    id="r-1",
                    model="m",
                    received_at_ms=1_760_000_000_000,
                    state="stop",
                    tokenize_ms=1.5,
                    attempts=[
                        messages.TraceAttempt(
                            worker_id="w1",
                            begun_ms=2.0,
                            accepted_ms=3.0,
                            policy="kv",
                            candidates=2,
                            held_tokens=64,
                            most_held_tokens=64,
                            left_ms=2_500.0,
                            left="lost",
                            heard_ms=500.0,
                        ),
                        messages.TraceAttempt(
                            worker_id="w2", begun_ms=2_501.0, accepted_ms=2_502.0, continued_ms=2_600.0, tokens=7
                        ),
                    ],
                    worker_queue_ms=0.5,
                    prefill_ms=20.0,
                    total_ms=3_000.0,
                    prompt_tokens=70,
                    cached_tokens=64,
                    completion_tokens=20,
                    gaps=[0, 0, 0, 12, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
                )
            ],
            truncated=True,
        ),
    ),
    ("refused", messages.TraceReply(router_id="router-1", error=ERROR)),
    ("all", messages.ModelsRequest()),
    ("a page", messages.ModelsRequest(model="m", after="m.w1", limit=2)),
    (
        "a page",
        messages.ModelsReply(
            models=[
                messages.ServedModel(
                    model="m",
                    context_length=512,
                    features=["generate"],
                    summary=COUNTS,
                    engines=["gguf"],
                    engine_bytes=4_096,
                    since_ms=1_760_000_000_000,
                    workers=[CARD],
                )
            ],
            limits=messages.ServerLimits(max_request_bytes=524_288),
            summary=messages.FleetCounts(models=1, **msgspec.structs.asdict(COUNTS)),
            next="m.w1",
        ),
    ),
    (
        "no page",
        messages.ModelsReply(models=[], limits=messages.ServerLimits(max_request_bytes=524_288), error=ERROR),
    ),
    (
        "what is not served now",
        messages.ModelsReply(
            models=[],
            limits=messages.ServerLimits(max_request_bytes=524_288, max_upload_bytes=16_777_216),
            unserved=["m"],
        ),
    ),
]

RUN = internal.Run(
    request_id="default:r-1",
    attempt=0,
    epoch="1760000000000-abcdef",
    router_id="router-1",
    reply="_INBOX.a.b",
    encoding=codec.Encoding.JSON,
    token_ids=block_hash.pack_token_ids([1, 2, 4_294_967_295]),
    params=GenerationParams(),
)

LAST_WORDS = messages.Chunk(
    id="r-1",
    offset=1,
    finish_reason=messages.FinishReason.LENGTH,
    usage=USAGE,
    timings=TIMINGS,
    stopped_by=messages.StoppedBy.SHUTDOWN,
)

INTERNAL: list[tuple[str, messages.Message]] = [
    ("what must be there", RUN),
    ("of an API key", codec.replace(RUN, key_id="abcdefghij", charged_tokens=300, rate_limits=RATE_LIMITS)),
    (
        "everything",
        internal.Run(
            request_id="acme=20inc:r-1",
            attempt=3,
            epoch="1760000000000-abcdef",
            router_id="router-1",
            router_network="eu-1",
            reply="_INBOX_acme.a.b",
            encoding=codec.Encoding.MSGPACK,
            token_ids=block_hash.pack_token_ids([1]),
            adapters=[internal.RunAdapter(digest="7bd09cb0", scale=0.5)],
            params=GenerationParams(
                lora=[messages.Lora(name="style", scale=0.5)],
                max_tokens=64,
                min_tokens=1,
                temperature=0.0,
                top_p=0.9,
                top_k=40,
                min_p=0.05,
                seed=7,
                stop=["END"],
                stop_token_ids=[2],
                ignore_eos=True,
                stream=False,
                return_token_ids=True,
                cache_prompt=False,
                cache_salt="salt",
                cache_control=messages.CacheControl(ttl_ms=60_000.0),
                session_id="s",
                priority=-5,
            ),
            is_chat=True,
            age_ms=12.5,
            remaining_ms=1500.5,
            resume_from=internal.RunResume(
                token_ids=block_hash.pack_token_ids([5, 6]),
                logprobs=b"\x00\xff",
                cached_tokens=3,
                queue_ms=1.5,
                prefill_ms=2.5,
                elapsed_ms=99.0,
            ),
            expected_cached_tokens=2,
            fetch_from=internal.FetchSource(worker_id="w2", epoch="1760000000001-abcdef", leg_ms=812.5),
            routing=ROUTING,
            routing_options=messages.RoutingOptions(policy="kv"),
            copy_of="r0",
        ),
    ),
    ("accepted", internal.RunReply(accepted=True)),
    ("refused", internal.RunReply(accepted=False, error=ERROR, same_reply=True)),
    ("cancelled before", internal.RunReply(accepted=False, error=ERROR, cancelled=True)),
    ("drop", internal.Control(op="drop", request_id="default:r-1", attempt=2)),
    ("moved", internal.Control(op="drop", request_id="default:r-1", attempt=2, moved=True)),
    (
        "a client's resync",
        internal.Control(op="resync", request_id="acme:r-1", body=b'{"offset": 3}', content_type="application/json"),
    ),
    ("drain", internal.Control(op="drain")),
    ("drain at once", internal.Control(op="drain", grace_s=0.0, handover_s=2.5)),
    ("stop", internal.Control(op="stop", request_id="default:r-1")),
    ("a session", internal.Control(op="retain", tenant="acme", session_id="s", ttl_ms=60_000.0)),
    ("take", internal.Take(request_id="default:r-1", attempt=2, known_tokens=3, router_id="r-2")),
    (
        "taken",
        internal.TakeReply(
            ok=True,
            epoch="1760000000000-abcdef",
            num_tokens=5,
            token_ids=block_hash.pack_token_ids([11, 13]),
            logprobs=b"\x00\xff",
            first_token=FIRST_TOKEN,
        ),
    ),
    ("taken with its end", internal.TakeReply(ok=True, epoch="e", num_tokens=1, last_words=LAST_WORDS)),
    ("not there", internal.TakeReply(ok=False, epoch="1760000000000-abcdef")),
    ("of a stream", internal.Guard(run=RUN, stream_no=7, hash_scheme="0" * 32)),
    ("of a request that no worker has", internal.Guard(run=codec.replace(RUN, epoch=""))),
    ("of a request with an end", internal.Guard(run=codec.replace(RUN, epoch=""), last_words=LAST_WORDS)),
    (
        "guarded",
        internal.GuardReply(request_id="default:r-1", attempt=2, accepted=True, router_id="router-1"),
    ),
    ("two idle workers", internal.Beat(epoch="1760000000000-abcdef", next_ms=1_000.0, seqs={"w-1": 41, "w-2": 7})),
    ("by a router that follows beats", internal.SnapshotRequest(follows_beats=True)),
    (
        "a part of a listing",
        internal.ListingRequest(
            asked=messages.ModelsRequest(model="m", limit=2),
            tenant="acme",
            encoding=codec.Encoding.JSON,
            max_bytes=65_024,
        ),
    ),
    ("are they yours?", internal.GuardCheck(request_ids=["default:r-1", "default:r-2"])),
    (
        "are they still?",
        internal.GuardCheck(
            request_ids=["default:r-1", "default:r-2"], attempts=[1, 2], epoch="1760000000000-abcdef", number=7
        ),
    ),
    ("one is not", internal.Unguarded(router_id="router-1", request_ids=["default:r-2"])),
    ("all are", internal.Unguarded(router_id="router-1", request_ids=[], passes_on=True)),
    (
        "it guards the stream and passes on",
        internal.GuardReply(request_id="default:r-1", attempt=2, accepted=True, router_id="router-1", passes_on=True),
    ),
    ("by a router that passes on", codec.replace(RUN, passes_on=True)),
    ("of a conversation", codec.replace(RUN, wants_answer=True, wants_reasoning=True)),
    (
        "next turn",
        internal.NextTurn(
            request_id="default:r-1",
            epoch="1760000000000-abcdef",
            num_known=40,
            token_ids=block_hash.pack_token_ids([11, 13]),
        ),
    ),
    (
        "one has moved",
        internal.Unguarded(
            router_id="router-1",
            request_ids=[],
            moved={"default:r-1": 1},
            doubtful=["default:r-2"],
            number=7,
            network="eu-1",
        ),
    ),
    (
        "load",
        internal.Control(
            op="load", model="org/repo:Q4_K_M", served_name="chat", replicas=2, settings={"context_length": 4096}
        ),
    ),
    (
        "an adapter to load",
        internal.Control(op="load_adapter", adapter="style", path="/adapters/style.gguf", tenants=["acme"]),
    ),
    ("an adapter to unload", internal.Control(op="unload_adapter", adapter="style")),
    ("done", internal.ControlReply(ok=True)),
    ("dropped", internal.ControlReply(ok=True, epoch="1760000000000-abcdef")),
    ("loading", internal.ControlReply(ok=True, progress=0.5)),
    ("loaded", internal.ControlReply(ok=True, progress=1.0, worker_ids=["w-2", "w-3"])),
    ("not done", internal.ControlReply(ok=False, error=ERROR)),
    (
        "texts and token ids to embed",
        internal.Embed(inputs=["Hello", [1, 2]], dimensions=64, normalize=False, remaining_ms=5_000.0),
    ),
    (
        "texts to embed, which may be taken back",
        internal.Embed(inputs=["Hello"], remaining_ms=5_000.0, call_id="0123456789abcdef", tenant="acme"),
    ),
    (
        "documents, which may be taken back",
        internal.Rerank(
            query="Which?", documents=["this"], remaining_ms=5_000.0, call_id="0123456789abcdef", tenant="acme"
        ),
    ),
    ("taken back", internal.AbortCall(call_id="0123456789abcdef")),
    ("embeddings", internal.EmbedResult(vectors=b"\x00\x00\x80?", prompt_tokens=3)),
    ("no embeddings", internal.EmbedResult(error=ERROR)),
    ("documents", internal.Rerank(query="Which?", documents=["this", "that"], remaining_ms=5_000.0)),
    ("scores", internal.RerankResult(scores=b"\x00\x00\x80?\x00\x00\x00?", prompt_tokens=9)),
    ("no scores", internal.RerankResult(error=ERROR)),
    ("a text", internal.Tokenize(text="Hello")),
    (
        "a conversation",
        internal.Tokenize(
            messages=[messages.ChatMessage(role="user", content="Hello")],
            chat_template_kwargs={"thinking": True},
            tools=[{"type": "function", "function": {"name": "f"}}],
            max_tokens=4_095,
        ),
    ),
    ("a gap", internal.Tokenize(text="def f(", suffix="return x")),
    (
        "a message to continue",
        internal.Tokenize(
            messages=[messages.ChatMessage(role="assistant", content="The")], continue_final_message=True
        ),
    ),
    ("without BOS", internal.Tokenize(text="Hello", add_special_tokens=False)),
    ("token ids", internal.TokenizeResult(token_ids=block_hash.pack_token_ids([1, 2]))),
    ("an error", internal.TokenizeResult(error=ERROR)),
    ("two tokens", internal.Detokenize(token_ids=block_hash.pack_token_ids([1, 2]))),
    ("each token", internal.Detokenize(token_ids=block_hash.pack_token_ids([1]), return_pieces=True)),
    ("a text", internal.DetokenizeResult(text="Grüß")),
    ("each token", internal.DetokenizeResult(text="a", pieces=[b"a"])),
    ("an error", internal.DetokenizeResult(error=ERROR)),
    (
        "blocks of a prompt",
        internal.BlockLeaseRequest(
            identity="8f1d2c3b4a596877",
            epoch="1760000000000-abcdef",
            tenant="acme=20inc",
            cache_salt="salt",
            adapters=[internal.RunAdapter(digest="7bd09cb0", scale=0.5)],
            token_ids=block_hash.pack_token_ids([1, 2]),
            first=3,
            computed_for="acme=20inc:r-1",
            priority=-5,
        ),
    ),
    ("a lease", internal.BlockLease(lease="0f1e2d3c", num_blocks=2)),
    ("none now", internal.BlockLease(busy=True)),
    ("a part", internal.BlockRead(lease="0f1e2d3c", block=4, offset=262_144, num_bytes=65_536)),
    ("the end of a lease", internal.BlockRead(lease="0f1e2d3c")),
    ("a part", internal.BlockPart(data=b"\x00\x01\xff", checksum=2**64 - 1)),
    ("gone", internal.BlockPart()),
    ("not there yet", internal.BlockPart(later=True)),
    (
        "the second of three",
        internal.TokenizerPart(digest="99aa06d3014798d86001c324468d497f", part=1, parts=3, data=b"\x00\x01\xff"),
    ),
    (
        "a heartbeat",
        internal.Events(
            worker_id="w1", epoch="1760000000000-abcdef", seq=0, load=LOAD, state=messages.WorkerState.READY
        ),
    ),
    (
        "everything",
        internal.Events(
            worker_id="w1",
            epoch="1760000000000-abcdef",
            seq=18_446_744_073_709_551_615,
            load=LOAD,
            state=messages.WorkerState.DRAINING,
            health=HEALTH,
            cleared=True,
            removed=[HASHES[0]],
            stored=[internal.BlockRun(parent=HASHES[2], hashes=HASHES)],
            started=[
                internal.Started(id="default:r-1", stream_no=7, attempt=2, prompt_tokens=100, router_id="router-1")
            ],
            finished=["default:r-2"],
            stream_nos=block_hash.pack_token_ids([7, 3, 7]),
            token_ids=block_hash.pack_token_ids([11, 12, 13]),
            logprobs={7: b"\x00\xff"},
            first_tokens=[FIRST_TOKEN],
            fetches=[
                internal.Fetched(
                    stream_no=7,
                    worker_id="w2",
                    fetched_tokens=64,
                    fetched_bytes=786_432,
                    fetch_ms=3.5,
                    was_leg=True,
                )
            ],
            legs=["default:r-4"],
            failed=["default:r-2"],
            taken=["default:r-3"],
            stranded=["default:r-5"],
            ends=[
                internal.StreamEnd(
                    id="default:r-2",
                    router_id="router-1",
                    finish_reason=messages.FinishReason.ERROR,
                    code="internal",
                    prompt_tokens=100,
                    cached_tokens=64,
                    completion_tokens=7,
                )
            ],
            guardians={7: "router-2"},
        ),
    ),
    ("of an entry", internal.Seal(epoch="1760000000000-abcdef", seq=41)),
    ("without tokens", internal.SnapshotRequest()),
    ("with tokens", internal.SnapshotRequest(known_tokens={"default:r-1": 3}, wants_others=True)),
    (
        "the first of two",
        internal.SnapshotPart(
            worker_id="w1",
            epoch="1760000000000-abcdef",
            seq=41,
            part=0,
            parts=2,
            runs=[internal.BlockRun(parent=0, hashes=HASHES)],
            running=[
                internal.RunningRequest(
                    id="default:r-1",
                    attempt=1,
                    stream_no=7,
                    num_tokens=5,
                    token_ids=block_hash.pack_token_ids([11, 13]),
                    logprobs=b"\x00\xff",
                    first_token=FIRST_TOKEN,
                    router_id="router-1",
                )
            ],
            load=LOAD,
            ends=[internal.StreamEnd(id="default:r-6", finish_reason=messages.FinishReason.STOP)],
        ),
    ),
]


def entries() -> list[Entry]:
    """Returns the content of golden.json."""
    written = [(what, message, True) for what, message in PUBLIC] + [
        (what, message, False) for what, message in INTERNAL
    ]
    return [
        Entry(
            message=type(message).__name__,
            what=what,
            json=codec.encode(message, codec.Encoding.JSON).decode() if public else None,
            msgpack=codec.encode(message, codec.Encoding.MSGPACK).hex(),
        )
        for what, message, public in written
    ]


if __name__ == "__main__":
    PATH.write_text(json.dumps(entries(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
