"""Every fixed limit of the wire. Anything an operator may change is a setting, defined elsewhere."""

MAX_ID_BYTES = 128
MAX_NAME_BYTES = 128
"""Model, tenant, worker and router names. Together they must stay far below the broker's limit for a subject."""
MAX_VALUES = 1 << 19
"""Lists, objects and strings of one request; strings don't count while there are fewer lists and objects."""
MAX_EMBED_INPUTS = 2_048
"""Inputs of one embed request."""
MAX_RERANK_DOCUMENTS = 1_000
"""Documents of one rerank request."""
DEFAULT_CALL_TIMEOUT_MS = 60_000.0
"""The `timeout_ms` of requests that generate nothing, such as those for embeddings and tokens."""
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1_024
MAX_STOP_TOKEN_IDS = 128
MAX_MESSAGES = 4_096
MAX_TOOLS = 128
MAX_TOOL_NAME_CHARS = 128
"""Names of tools from MCP servers begin with the server's name."""
MAX_TOOL_PROPERTIES = 4_000
"""The properties of all tools of a request. At this limit, their grammar takes about a second to compile."""
MAX_TOOL_VALUES = 20_000
"""The objects and arrays in the parameters of all tools of a request. Routers and workers stand still for about 0.2 s
while they read as many."""
MAX_TOOL_BYTES = 64 * 1024
"""Size of one tool, as JSON: name, description and parameters."""
MAX_SALT_BYTES = 256
DEFAULT_CACHE_TTL_MS = 300_000.0
MAX_CACHE_TTL_MS = 86_400_000.0
"""A prefix is kept for a client for at most this long."""
MAX_EFFORT_BYTES = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 4_096
MAX_LOGIT_BIAS = 1e6
MAX_TEMPLATE_BYTES = 256 * 1024
MAX_TEMPLATE_VALUES = 20_000
"""The members and items of all objects and arrays in the template arguments of a request."""
MAX_NESTING = 64
"""Levels to which the free-form parts of a request (template arguments, tools, schemas) may nest."""
MAX_SCHEMA_BYTES = 64 * 1024
"""A JSON schema, as JSON."""
MAX_SCHEMA_PROPERTIES = 1_000
"""Properties and definitions of all objects in a schema together."""
MAX_SCHEMA_PATTERNS = 64
"""`patternProperties` in a schema: each is compared with every other one."""
MAX_REGEX_BYTES = 16 * 1024
MAX_CHOICES = 1_000
MAX_CHOICE_BYTES = 64 * 1024
"""All choices together."""
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_GRAMMAR_RULES = 500
MAX_ADAPTERS = 4
"""LoRA adapters of one request."""
MAX_ADAPTER_SCALE = 4.0
MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID = 2**32 - 1

PART_BYTES = 48 * 1024
"""Size of one part of a tokenizer bundle or snapshot, which fits in a message of a broker with 64 KiB."""
UPLOAD_PART_BYTES = 256 * 1024
"""Size of one part of a large message, if the broker allows that much: other messages of
# the connection wait for no longer than one part takes."""
UPLOAD_IDLE_S = 10.0
"""A large message that receives no part for this long is given up."""
UPLOAD_TTL_S = 120.0
"""Time for all parts of a large message."""
MAX_PAGE_WORKERS = 1_024
"""Workers in a page of `models`."""
MAX_TENANT_UPLOADS = 64
"""Large messages of one tenant that one router may be receiving."""
MAX_COMPLETE_UPLOADS = 4_096
"""Complete large messages whose last part may still arrive again."""
MAX_INTERNAL_BYTES = 64 * 1024 * 1024
"""A large message between routers and workers."""
MAX_BUNDLE_BYTES = 64 * 1024 * 1024
RENDER_CPU_S = 2.0
"""CPU time that a chat template may take to compile, or to render one conversation."""
RENDER_STALL_S = 5.0
"""A process that renders templates and gets no CPU time for this long is replaced."""
RENDER_BYTES = 1 << 30
"""Address space of the process that renders templates."""
RENDER_KEPT_BYTES = 128 << 20
"""A process that renders templates is ended if it still holds more memory than this after a conversation."""
RENDERED_GROWTH = 4
"""Characters that a chat template may produce for each byte of a conversation, beyond `MAX_TEMPLATE_BYTES`."""
MAX_CONTROL_LINE_BYTES = 4_000
"""Subject and reply subject of one message, with some overhead; the broker closes a connection at 4,096."""
MAX_INBOX_BYTES = 2_048
"""A client's reply subject; it must fit into `MAX_CONTROL_LINE_BYTES` together with the reply subject of a chunk."""
MAX_TOLD_ANSWER_BYTES = 24 * 1024
"""The largest answer that the end of a stream may have, as MessagePack: an entry of the event log has to fit in the
smallest message."""
MAX_TOLD_ANSWER_BYTES = 24 * 1024
"""The largest answer that the end of a stream may have: an entry of the event log fits in the smallest message."""
MESSAGE_RESERVE_BYTES = 4 * 1024
"""Room that a message needs beyond its body, for subject, reply subject and headers."""

TICK_S = 0.25
"""Every process checks its timers this often."""
STREAM_KEEPALIVE_S = 5.0
"""A stream with nothing to send sends an empty chunk this often."""
FIRST_EVENT_SEQ = 1
"""Number of the first entry of an event log."""
HEARTBEAT_S = 0.25
"""The event log of a worker that is not idle carries at least one message in this time."""
BEAT_S = 1.0
"""A process speaks for its idle workers at least this often."""
MAX_BEAT_S = 10.0
"""The longest time that a beat can promise to be followed by another within."""
MAX_PROCESS_WORKERS = 1_024
"""Workers that one beat can speak for."""
WORKER_SUSPECT_AFTER_S = 1.0
"""Silence after which a worker gets no new requests; twice the promised time if that is longer."""
WORKER_LOST_AFTER_S = 2.0
"""Silence after which a worker counts as lost; four times the promised time if that is longer."""
DISCOVERY_WAIT_S = 0.5
"""A router collects cards for this long before it takes requests."""
ACCEPT_TIMEOUT_S = 0.5
"""A router waits this long for a worker to accept a request."""
ENDED_STREAM_TTL_S = 60.0
"""A stream that has ended can be published again for this long."""
MAX_ENDED_STREAM_BYTES = 64 * 1024 * 1024
REPLAY_INTERVAL_S = 0.2
"""A stream is published again at most this often."""
WITHDRAWN_TTL_S = 10.0
"""A drop or cancel of an unknown request is remembered for this long."""
MAX_WITHDRAWN = 10_000
MODEL_NOT_FOUND_AFTER_S = 60.0
"""A router younger than this answers `no_worker` for a model that it has not seen."""
MAX_REMOTE_PREFILLS = 8
"""Prompts that a worker computes for others at a time."""
