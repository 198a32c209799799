"""Rules of optional features: a model supports each as the contract says, or refuses it as unsupported."""

import json
import re
import time
from typing import Any

from tokenbus.conformance.probing import field_types, schemas, stream_checks
from tokenbus.conformance.probing.assertions import BrokenError, SkippedError, expect, shorten
from tokenbus.conformance.probing.exchange import Exchange
from tokenbus.conformance.probing.probe import Probe, short_request, skip_if_unsupported

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
_CLOSING_TOKENS = 600
"""Tokens that may close reasoning at the most: some that are waited for, a message of the worker's, the marker."""
_KEEPALIVE_S = 4.5
"""No worker sends an empty chunk earlier than this; the contract says 5 s."""
_FEATURES: dict[str, object] = {
    "logprobs": 1,
    "prompt_logprobs": 1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
    "regex": "a+",
    "choice": ["a", "b"],
    "grammar": 'root ::= "a"',
    "tools": [_TOOL],
    "reasoning": {"max_tokens": 1},
    "return_progress": True,
    "resume_from": {"token_ids": [1]},
    "routing": {"explain": True},
}


async def supported_or_refused(probe: Probe) -> None:
    """A feature that the model lacks is refused as unsupported, with the field's name in param."""
    for name, value in _FEATURES.items():
        is_chat = name in ("tools", "reasoning")
        given = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
        answer = await probe.ask(given | {"max_tokens": 4, name: value})
        if answer.messages[-1].get("error") is not None:
            try:
                param = f"{name}.max_tokens" if name == "reasoning" else name
                stream_checks.check_refusal(answer.messages[-1:], "unsupported", param=param)
            except BrokenError as error:
                raise BrokenError(f"{name}: {error}") from error


async def chat(probe: Probe) -> None:
    """messages are rendered with the chat template, and content may be a string or text parts."""
    text, parts = "Hello", [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    answers = [await _short_answer(probe, messages=[{"role": "user", "content": content}]) for content in (text, parts)]
    seen = [answer.messages[-1]["usage"]["prompt_tokens"] for answer in answers]
    expect(seen[0] == seen[1], f"prompt_tokens {seen[0]} for a string, {seen[1]} for parts")


async def pinned(probe: Probe) -> None:
    """routing.worker_id sends a request to that worker."""
    if not probe.target.worker_ids:
        raise SkippedError("the models reply names no workers")
    for worker_id in probe.target.worker_ids[:4]:
        seen = (await probe.short(1, routing={"worker_id": worker_id})).messages[-1].get("worker_id")
        expect(seen == worker_id, f"answered by {shorten(seen)} instead of {worker_id}")


async def logprobs(probe: Probe) -> None:
    """logprobs gives each message exactly one entry per token."""
    for message in (await _short_answer(probe, logprobs=2)).messages:
        entries = message.get("logprobs") or []
        expect(len(entries) == message["tokens"], f"{len(entries)} logprobs for {message['tokens']} tokens")
        for entry in entries:
            field_types.check(entry, schemas.LOGPROB, "a logprob")
            expect(len(entry["top"]) <= 2, f"{len(entry['top'])} alternatives instead of 2")


async def prompt_logprobs(probe: Probe) -> None:
    """prompt_logprobs gives each token of the prompt exactly one entry, in order and before the first token; a whole
    answer has all of them."""
    streamed = await _short_answer(probe, prompt_logprobs=2)
    expected, tokens = 0, 0
    entries: list[dict[str, Any]] = []
    for message in streamed.messages:
        if not message["attempt"]:  # a router holds the request
            continue
        offset = message.get("prompt_offset")
        expect(offset == expected, f"prompt_offset {shorten(offset)} instead of {expected}")
        given = message.get("prompt_logprobs") or []
        expect(not (given and tokens), "prompt_logprobs after a token")
        tokens += message["tokens"]
        entries += given
        expected += len(given)
    usage = streamed.messages[-1]["usage"]
    expect(len(entries) == usage["prompt_tokens"], f"{len(entries)} entries for {usage['prompt_tokens']} tokens")
    for place, entry in enumerate(entries):
        field_types.check(entry, schemas.PROMPT_LOGPROB, "a log probability of the prompt")
        expect((entry["logprob"] is None) == (place == 0), f"logprob {entry['logprob']} of token {place}")
        expect(len(entry["top"]) <= (2 if place else 0), f"{len(entry['top'])} alternatives of token {place}")
    late = await _short_answer(probe, prompt_logprobs=0, prompt_logprobs_from=1, stream=False)
    terminal = late.messages[-1]
    ids = [entry["id"] for entry in terminal.get("prompt_logprobs") or []]
    expect(terminal.get("prompt_offset") == 1, f"prompt_offset {shorten(terminal.get('prompt_offset'))} instead of 1")
    expect(ids == [entry["id"] for entry in entries[1:]], "another prompt in a whole answer from token 1 on")


async def progress(probe: Probe) -> None:
    """return_progress reports how much of the prompt has been processed."""
    answer = await _short_answer(probe, return_progress=True)
    reports = [message["progress"] for message in answer.messages if message.get("progress") is not None]
    for report in reports:
        field_types.check(report, schemas.PROGRESS, "progress")
        expect(
            report["processed_tokens"] <= report["prompt_tokens"],
            f"more processed tokens than the prompt has: {report}",
        )


async def explained(probe: Probe) -> None:
    """routing.explain makes the terminal say why its worker was chosen."""
    terminal = (await _short_answer(probe, routing={"explain": True})).messages[-1]
    field_types.check(terminal.get("routing"), schemas.ROUTING, "routing")
    chosen = terminal["routing"]["chosen"]
    expect(chosen == terminal.get("worker_id"), f"chosen {chosen}, answered by {terminal.get('worker_id')}")


async def calls(probe: Probe) -> None:
    """A tool that must be called is called: the deltas add up to JSON, and the finish reason is tool_calls."""
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "pick", "description": "Picks a number.", "parameters": schema}}
    fields = {"messages": [{"role": "user", "content": "Pick 7."}], "tools": [tool], "tool_choice": "required"}
    answer = await probe.ask(fields | {"parallel_tool_calls": False, "max_tokens": 256, "temperature": 0})
    skip_if_unsupported(answer.messages[-1])
    stream_checks.check_numbers(answer.messages)
    deltas = [delta for message in answer.messages for delta in message.get("tool_calls") or ()]
    reason = answer.messages[-1].get("finish_reason")
    expect(reason == "tool_calls", f"finish_reason {reason} with {len(deltas)} deltas of calls")
    names = [delta["function"]["name"] for delta in deltas if delta["function"].get("name")]
    expect(names == ["pick"], f"calls of {shorten(names)} instead of one of pick")
    arguments = "".join(delta["function"]["arguments"] for delta in deltas)
    expect(json.loads(arguments) == {"n": 7}, f"arguments {shorten(arguments)}")
    again = await probe.ask(fields | {"stream": False, "max_tokens": 256, "temperature": 0, "tool_choice": "none"})
    expect(not again.messages[-1].get("tool_calls"), "a call although tool_choice was none")


async def continued(probe: Probe) -> None:
    """continue_final_message continues the last message; one that is not the assistant's is refused."""
    asked = {"role": "user", "content": "Count from one to four."}
    begun = {"role": "assistant", "content": "One, two,"}
    fields: dict[str, object] = {"max_tokens": 4, "temperature": 0, "continue_final_message": True}
    answer = await probe.ask({"messages": [asked, begun]} | fields)
    skip_if_unsupported(answer.messages[-1])
    stream_checks.check_numbers(answer.messages)
    whole = await probe.ask({"messages": [asked, begun]} | fields | {"continue_final_message": False})
    counts = [one.messages[-1]["usage"]["prompt_tokens"] for one in (answer, whole)]
    expect(counts[0] < counts[1], f"{counts[0]} tokens of an open prompt, {counts[1]} of one that begins a message")
    refused = await probe.ask({"messages": [asked]} | fields)
    stream_checks.check_refusal(refused.messages, "invalid_request", param="messages[0].role")


async def reasoning(probe: Probe) -> None:
    """reasoning.max_tokens bounds the reasoning of an answer; a budget below 0 or without messages is refused."""
    question: dict[str, object] = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 64}
    thinks: dict[str, object] = {"chat_template_kwargs": {"enable_thinking": True}, "temperature": 0}
    answer = await probe.ask(question | thinks | {"reasoning": {"max_tokens": 2}})
    skip_if_unsupported(answer.messages[-1])
    stream_checks.check_numbers(answer.messages)
    count = answer.messages[-1]["usage"].get("reasoning_tokens", 0)
    expect(count < 2 + _CLOSING_TOKENS, f"{count} tokens of reasoning with a budget of 2")
    for param, fields in (
        ("reasoning.max_tokens", question | {"reasoning": {"max_tokens": -1}}),
        ("reasoning", {"prompt": "x", "reasoning": {"max_tokens": 2}}),
    ):
        refused = await probe.ask(fields)
        stream_checks.check_refusal(refused.messages, "invalid_request", param=param)
    hint = await probe.ask(question | {"reasoning": {"max_tokens": 2, "optional": True}})
    expect(not hint.messages[-1].get("error"), "a budget that is optional was refused")


async def constrained(probe: Probe) -> None:
    """The answer to a request with response_format, regex, choice or grammar conforms to it."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    for fields, accepted in (
        ({"response_format": _json_schema(schema)}, r'\{"a": [12]\}'),
        ({"regex": "[ab]{2}c"}, "[ab]{2}c"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
    ):
        answer = await _short_answer(probe, ignore_eos=False, **fields)
        expect(re.fullmatch(accepted, answer.text) is not None, f"{shorten(answer.text)} with {fields}")
        reason = answer.messages[-1].get("finish_reason")
        expect(reason == "stop", f"finish_reason {reason} with {fields}")
        stream_checks.check_numbers(answer.messages)


async def not_constrained(probe: Probe) -> None:
    """A constraint that can't be compiled is refused in a terminal alone, or after a head if that takes 5 s, with the
    field's name in param."""
    for param, fields in (
        ("response_format.json_schema.schema", {"response_format": _json_schema({"type": "poem"})}),
        ("regex", {"regex": "(a"}),
        ("grammar", {"grammar": 'root ::= "a'}),
        ("ignore_eos", {"regex": "a", "ignore_eos": True}),
        ("choice", {"regex": "a", "choice": ["a"]}),
    ):
        sent_at = time.monotonic()
        answer = await probe.ask({"prompt": "x", "max_tokens": 4, **fields})
        skip_if_unsupported(answer.messages[-1])
        before = [message for received, message in answer.pairs[:-1] if received.at - sent_at < _KEEPALIVE_S]
        stream_checks.check_refusal([*before, answer.messages[-1]], "invalid_request", param=param)


def _json_schema(schema: object) -> object:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


async def adapters(probe: Probe) -> None:
    """lora uses an adapter that is loaded, as the model's name with it does; another name is not found."""
    unknown = await probe.ask(short_request(4, lora=[{"name": probe.new_id()}]))
    skip_if_unsupported(unknown.messages[-1])
    stream_checks.check_refusal(unknown.messages, "model_not_found", param="lora")
    for name in probe.target.adapters[:2]:
        listed = await _short_answer(probe, lora=[{"name": name}])
        subject = probe.names.generate(f"{probe.target.model}:{name}", probe.tenant)
        named = await probe.send(short_request(16, id=probe.new_id()), subject=subject)
        await named.terminal()
        expect(named.text == listed.text, f"{shorten(named.text)} by the name, {shorten(listed.text)} by lora: {name}")


async def resumed(probe: Probe) -> None:
    """resume_from continues after the given tokens, and so do the offsets."""
    whole = await _short_answer(probe, return_token_ids=True)
    given = [token_id for message in whole.messages for token_id in message.get("token_ids") or []][:6]
    text_offset = next(message["text_offset"] for message in whole.messages if message["offset"] == len(given))
    answer = await _short_answer(probe, resume_from={"token_ids": given})
    rest = whole.text.encode()[text_offset:].decode()
    expect(answer.text == rest, f"{shorten(answer.text)} instead of {shorten(rest)}")
    first = next(message for message in answer.messages if message["tokens"])
    expect(first["offset"] == len(given), f"offset {first['offset']} after {len(given)} given tokens")
    seen, expected = (one.messages[-1]["usage"]["completion_tokens"] for one in (answer, whole))
    expect(seen == expected, f"completion_tokens {seen} instead of {expected}")


async def _short_answer(probe: Probe, **fields: object) -> Exchange:
    """Returns a short answer. Raises SkippedError if the model does not support the request."""
    body = short_request(16, **fields)
    if "messages" in fields:
        del body["prompt"]
    answer = await probe.ask(body)
    skip_if_unsupported(answer.messages[-1])
    error = answer.messages[-1].get("error")
    expect(error is None, f"it ends with {shorten(error)}")
    return answer
