"""The kit is worth something only if it catches engines that break the rules: here each rule is broken on purpose."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

import msgspec
import pytest

from tests.contracts import (
    adapter_rules,
    cache_rules,
    constraint_rules,
    driving,
    kit,
    reasoning_rules,
    resume_rules,
    stream_rules,
)
from tests.support.arithmetic import ArithmeticRunner, exchanging, make_config
from tests.support.engines import Recorder, demo_engine, thread_engine
from tokenbus.protocol.wire import errors, internal, messages
from tokenbus.worker.contract import contract, engine_output, engine_request
from tokenbus.worker.contract.contract import ContractError, StreamValidator


class Honest:
    """Passes everything on to a real engine; subclasses break one thing."""

    def __init__(self) -> None:
        self.inner = thread_engine(lambda _: ArithmeticRunner(exchanging(make_config()), step_s=0.002))
        self.sinks: dict[str, engine_output.Sink] = {}
        self.on_kv_events = lambda removed, stored: None
        self.inner.on_kv_events = self.blocks

    @property
    def token_bytes(self) -> Sequence[bytes]:
        return self.inner.token_bytes

    def blocks(self, removed: list[int], stored: list[tuple[int, int]]) -> None:
        self.on_kv_events(removed, stored)

    def retain_session(self, tenant: str, session_id: str, ttl_s: float) -> None:
        self.inner.retain_session(tenant, session_id, ttl_s)

    def clear_cache(self) -> None:
        self.inner.clear_cache()

    async def start(self, worker_id: str) -> contract.EngineConfig:
        return await self.inner.start(worker_id)

    def generate(self, request: engine_request.EngineRequest, sink: engine_output.Sink) -> None:
        self.inner.generate(self.request(request), self.sink(request, sink))

    def request(self, request: engine_request.EngineRequest) -> engine_request.EngineRequest:
        return request

    def sink(self, request: engine_request.EngineRequest, sink: engine_output.Sink) -> engine_output.Sink:
        return lambda output: self.output(request, output, sink)

    def output(
        self, request: engine_request.EngineRequest, output: engine_output.Output, sink: engine_output.Sink
    ) -> None:
        sink(output)

    def abort(self, key: str) -> None:
        self.inner.abort(key)

    def release(self, key: str) -> None:
        self.inner.release(key)

    async def export_blocks(
        self, prefix: contract.CachedPrefix, first: int, max_blocks: int, *, is_last: bool = False
    ) -> tuple[int, list[bytes]]:
        return await self.inner.export_blocks(prefix, first, max_blocks, is_last=is_last)

    def put_blocks(self, prefix: contract.CachedPrefix, first: int, blocks: list[bytes]) -> None:
        self.inner.put_blocks(prefix, first, blocks)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return self.inner.prefill_tokens_per_s

    async def tokenize(self, request: internal.Tokenize) -> list[int]:
        return await self.inner.tokenize(request)

    async def embed(self, request: internal.Embed) -> internal.EmbedResult:
        return await self.inner.embed(request)

    async def rerank(self, request: internal.Rerank) -> internal.RerankResult:
        return await self.inner.rerank(request)

    async def load_adapter(self, path: str) -> str:
        return await self.inner.load_adapter(path)

    def unload_adapter(self, digest: str) -> None:
        self.inner.unload_adapter(digest)

    def tokenizer_bundle(self) -> bytes | None:
        return self.inner.tokenizer_bundle()

    def load(self) -> messages.Load:
        return self.inner.load()

    async def died(self) -> str:
        return await self.inner.died()

    async def drain(self) -> None:
        await self.inner.drain()

    async def cleanup(self) -> None:
        await self.inner.cleanup()


def replace(value: msgspec.Struct, **changes: object) -> msgspec.Struct:
    return msgspec.structs.replace(value, **changes)


class SaysTheTerminalTwice(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        sink(output)
        if output.finish_reason:
            sink(output)


class SpeaksAfterTheTerminal(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        sink(output)
        if output.finish_reason:
            asyncio.get_running_loop().call_soon(sink, engine_output.Output(token_ids=[], text=""))


class ForgetsTheTerminal(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        if not output.finish_reason:
            sink(output)


class MixesEmbeddingsUp(Honest):
    async def embed(self, request: internal.Embed) -> internal.EmbedResult:
        return await self.inner.embed(replace(request, inputs=request.inputs[::-1]))


class MixesScoresUp(Honest):
    async def rerank(self, request: internal.Rerank) -> internal.RerankResult:
        return await self.inner.rerank(replace(request, documents=request.documents[::-1]))


class ForgetsADocument(Honest):
    async def rerank(self, request: internal.Rerank) -> internal.RerankResult:
        return await self.inner.rerank(replace(request, documents=request.documents[:1]))


class TakesAnyAdapter(Honest):
    async def load_adapter(self, path: str) -> str:
        return "digest"


class ForgetsAnEmbedding(Honest):
    async def embed(self, request: internal.Embed) -> internal.EmbedResult:
        return await self.inner.embed(replace(request, inputs=request.inputs[:1]))


class CallsLengthStop(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        changes = {"finish_reason": messages.FinishReason.STOP, "stop_match": 0} if output.finish_reason else {}
        sink(replace(output, **changes))


class CountsWrong(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        if output.usage:
            usage = replace(output.usage, completion_tokens=output.usage.completion_tokens + 1)
            output = replace(output, usage=usage)
        sink(output)


class LosesATokenId(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        sink(replace(output, token_ids=output.token_ids[1:]) if output.finish_reason else output)


class SaysNothingWasCached(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        sink(replace(output, usage=replace(output.usage, cached_tokens=0)) if output.usage else output)


class SaysOneTooManyWasCached(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        if output.usage:
            output = replace(output, usage=replace(output.usage, cached_tokens=output.usage.cached_tokens + 1))
        sink(output)


class SharesWithEverySalt(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, cache_salt="")


class SharesWithEveryTenant(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, tenant="")


class CachesWhatItMustNot(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, cache_prompt=True)


class AnswersAWarmUp(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, is_warm_up=False)


class SharesNothing(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, cache_salt=request.key)


class KeepsNewBlocksToItself(Honest):
    def blocks(self, removed, stored):  # type: ignore[no-untyped-def]
        pass


class NeverSaysThatBlocksAreGone(Honest):
    def blocks(self, removed, stored):  # type: ignore[no-untyped-def]
        self.on_kv_events([], stored)


class NamesTheWrongParent(Honest):
    def blocks(self, removed, stored):  # type: ignore[no-untyped-def]
        self.on_kv_events(removed, [(name ^ 1, name) for _, name in stored])


class OverlooksStopTokens(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, sampling=replace(request.sampling, stop_token_ids=()))


class OverlooksStopStrings(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, stop=())


class LetsTheStopStringOut(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        out = isinstance(output.stop_match, str)
        sink(replace(output, text=output.text + output.stop_match) if out else output)


class SwallowsHeldText(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        swallow = request.stop and output.finish_reason is messages.FinishReason.LENGTH
        sink(replace(output, text="") if swallow else output)


class StopsTooEarly(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, sampling=replace(request.sampling, min_tokens=0))


class IgnoresTheSeed(Honest):
    count = 0

    def request(self, request):  # type: ignore[no-untyped-def]
        self.count += 1
        return replace(request, sampling=replace(request.sampling, seed=self.count))


class AlwaysTheSameSeed(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, sampling=replace(request.sampling, seed=0))


class MixesStreamsUp(Honest):
    """Gives each stream the tokens of its neighbour once there are two."""

    def sink(self, request, sink):  # type: ignore[no-untyped-def]
        self.sinks[request.key] = sink

        def take(output: engine_output.Output) -> None:
            keys = list(self.sinks)
            other = self.sinks[keys[keys.index(request.key) - 1]]
            if output.finish_reason:
                del self.sinks[request.key]
            (sink if output.finish_reason else other)(output)

        return take


class CancelsWhenItLikes(Honest):
    def abort(self, key: str) -> None:
        asyncio.get_running_loop().call_later(0.05, self.inner.abort, key)


class NeverCancels(Honest):
    def abort(self, key: str) -> None:
        pass


class HoldsFewerThanItSays(Honest):
    async def start(self, worker_id: str) -> contract.EngineConfig:
        config = await self.inner.start(worker_id)
        return replace(config, max_num_seqs=config.max_num_seqs * 2)  # type: ignore[return-value]


class RefusesWhatFits(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.inner = thread_engine(lambda _: ArithmeticRunner(make_config(context_length=128), step_s=0.002))

    async def start(self, worker_id: str) -> contract.EngineConfig:
        config = await self.inner.start(worker_id)
        return replace(config, context_length=256)  # type: ignore[return-value]


class AnswersWhatItRefuses(Honest):
    def generate(self, request: engine_request.EngineRequest, sink: engine_output.Sink) -> None:
        try:
            super().generate(request, sink)
        except errors.RequestError:
            sink(engine_output.Output(token_ids=[], text=""))
            raise


class AcceptsEverything(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, token_ids=[token_id % 50 for token_id in request.token_ids])


class ReportsLoadForEver(Honest):
    def load(self) -> messages.Load:
        return replace(self.inner.load(), running=1)  # type: ignore[return-value]


class FailsAbortsOfTheUnknown(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()

    def generate(self, request: engine_request.EngineRequest, sink: engine_output.Sink) -> None:
        self.keys.add(request.key)
        super().generate(request, sink)

    def abort(self, key: str) -> None:
        if key not in self.keys:
            raise KeyError(key)
        self.inner.abort(key)


class GivesBlocksToEverySalt(Honest):
    async def export_blocks(self, prefix, first, max_blocks, *, is_last=False):  # type: ignore[no-untyped-def]
        return await self.inner.export_blocks(replace(prefix, tenant="one", cache_salt="a"), first, max_blocks)


class PutsNothing(Honest):
    def put_blocks(self, prefix, first, blocks):  # type: ignore[no-untyped-def]
        pass


class FillsGaps(Honest):
    given: ClassVar[list[bytes]] = []

    async def export_blocks(self, prefix, first, max_blocks, *, is_last=False):  # type: ignore[no-untyped-def]
        found = await self.inner.export_blocks(prefix, first, max_blocks, is_last=is_last)
        self.given[:] = self.given if first or not found[1] else found[1]
        return found

    def put_blocks(self, prefix, first, blocks):  # type: ignore[no-untyped-def]
        self.inner.put_blocks(prefix, 0, self.given[:first] + blocks)


class HoldsNothingBack(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, is_held=False)


class NeverCancelsWhatItHoldsBack(Honest):
    def abort(self, key: str) -> None:
        pass

    def release(self, key: str) -> None:
        pass


class ForgetsWhatItIsGiven(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, resumed=None)


class PassesOffGivenTokensAsNew(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        sink(replace(output, resumed_texts=None))


class GivesAllGivenTextToTheFirstToken(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        if output.is_resumed:
            output = replace(output, resumed_texts=[output.text, *([""] * (len(output.token_ids) - 1))])
        sink(output)


class TakesGivenTokensForPrompt(Honest):
    """Passes the given tokens on as the end of the prompt, so that the engine counts them as none of its own."""

    def request(self, request):  # type: ignore[no-untyped-def]
        if request.resumed is None:
            return request
        token_ids = request.resumed.token_ids
        left = request.sampling.max_tokens - len(token_ids)
        sampling = replace(request.sampling, max_tokens=max(1, left))
        return replace(request, token_ids=request.token_ids + token_ids, sampling=sampling, resumed=None)

    def sink(self, request, sink):  # type: ignore[no-untyped-def]
        resumed = request.resumed
        if resumed is None:
            return sink
        texts = [self.token_bytes[token_id].decode(errors="replace") for token_id in resumed.token_ids]
        sink(engine_output.Output(token_ids=resumed.token_ids, text="".join(texts), resumed_texts=texts))
        count, prompt = len(resumed.token_ids), len(request.token_ids)

        def take(output: engine_output.Output) -> None:
            if (usage := output.usage) is not None:
                completion = usage.completion_tokens + count
                output = replace(output, usage=replace(usage, prompt_tokens=prompt, completion_tokens=completion))
            sink(replace(output, first_token=None))

        return take


class ForgetsGivenLogprobs(Honest):
    def __init__(self) -> None:
        super().__init__()
        self.inner = thread_engine(lambda _: ArithmeticRunner(make_config(features=("generate", "logprobs"))))

    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        logprobs = [] if output.is_resumed else [engine_output.Logprob(one, -1.0) for one in output.token_ids]
        sink(replace(output, logprobs=logprobs))


class SamplesOnWhenItIsComplete(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens + 1))


class EndsWhatIsCompleteAtOnce(Honest):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        sink(output)
        if output.is_resumed and len(request.resumed.token_ids) == request.sampling.max_tokens:
            sink(engine_output.Output(token_ids=[], text="", finish_reason=messages.FinishReason.LENGTH))


class CutsWhatEndsTooEarly(Honest):
    def request(self, request):  # type: ignore[no-untyped-def]
        if request.resumed is None:
            return request
        sampling = replace(request.sampling, max_tokens=len(request.resumed.token_ids) + 20)
        return replace(request, sampling=sampling)


class OfADemo(Honest):
    """Passes everything on to an engine that keeps to constraints."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = demo_engine()
        self.inner.on_kv_events = self.blocks


class IgnoresConstraints(OfADemo):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, constraint=None)

    def sink(self, request, sink):  # type: ignore[no-untyped-def]
        if request.constraint is not None:
            sink(engine_output.Output(token_ids=[], text="", is_constraint_ready=True))
        return sink


class ForgetsTheConstraintOfWhatIsResumed(OfADemo):
    def request(self, request):  # type: ignore[no-untyped-def]
        return request if request.resumed is None else replace(request, constraint=None)


class ConstrainsFromTheBeginning(OfADemo):
    def request(self, request):  # type: ignore[no-untyped-def]
        constraint = request.constraint
        return replace(request, constraint=constraint and replace(constraint, preamble=""))


class NeverSaysThatAConstraintIsReady(OfADemo):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        if not output.is_constraint_ready:
            sink(output)


class GreetsBeforeItRefuses(OfADemo):
    def sink(self, request, sink):  # type: ignore[no-untyped-def]
        if request.constraint is not None:
            sink(engine_output.Output(token_ids=[], text=""))
        return sink


class NamesNoFieldWhenItRefuses(OfADemo):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        sink(output if output.error is None else replace(output, error=replace(output.error, param=None)))


class InsistsOnMinTokens(OfADemo):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        if output.finish_reason is None or request.sampling.min_tokens < 50:
            sink(output)


class SamplesForcedTokensWithoutLogprobs(OfADemo):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        sink(replace(output, logprobs=output.logprobs if len(output.text) == 1 else []))


class OverlooksCancelsWhileItCompiles(OfADemo):
    def abort(self, key: str) -> None:
        asyncio.get_running_loop().call_later(0.3, self.inner.abort, key)


class OverlooksStopsInConstrainedOutputs(OfADemo):
    def request(self, request):  # type: ignore[no-untyped-def]
        return request if request.constraint is None else replace(request, stop=())


class LetsReasoningGoOn(OfADemo):
    def request(self, request):  # type: ignore[no-untyped-def]
        return replace(request, reasoning_limit=None)


class ForgetsTheMessage(OfADemo):
    def request(self, request):  # type: ignore[no-untyped-def]
        limit = request.reasoning_limit
        return replace(request, reasoning_limit=limit and replace(limit, message=""))


class CountsReasoningFromWhereItResumes(OfADemo):
    def request(self, request):  # type: ignore[no-untyped-def]
        limit, resumed = request.reasoning_limit, request.resumed
        if limit is None or resumed is None:
            return request
        return replace(request, reasoning_limit=replace(limit, max_tokens=limit.max_tokens + len(resumed.token_ids)))


class ForcesTheMarkerWithoutLogprobs(OfADemo):
    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        sink(replace(output, logprobs=[] if output.reasoning == "" else output.logprobs))


class OverlooksStopsInClosedReasoning(OfADemo):
    def request(self, request):  # type: ignore[no-untyped-def]
        return request if request.reasoning_limit is None else replace(request, stop=())


class ReasonsUpToTheConstraint(OfADemo):
    def request(self, request):  # type: ignore[no-untyped-def]
        return request if request.constraint is None else replace(request, reasoning_limit=None)


class LeavesStreamsOpenAtCleanup(Honest):
    cleaning = False

    def output(self, request, output, sink):  # type: ignore[no-untyped-def]
        if not self.cleaning:
            sink(output)

    async def cleanup(self) -> None:
        self.cleaning = True
        await self.inner.cleanup()


BROKEN = {
    SaysTheTerminalTwice: stream_rules.ends_with_exactly_one_terminal,
    SpeaksAfterTheTerminal: stream_rules.ends_with_exactly_one_terminal,
    ForgetsTheTerminal: stream_rules.ends_with_exactly_one_terminal,
    CallsLengthStop: stream_rules.tells_length_truthfully,
    CountsWrong: stream_rules.tells_length_truthfully,
    LosesATokenId: stream_rules.tells_length_truthfully,
    SaysNothingWasCached: cache_rules.computes_what_is_cached_only_once,
    SaysOneTooManyWasCached: cache_rules.computes_what_is_cached_only_once,
    SharesWithEverySalt: cache_rules.keeps_caches_apart,
    SharesWithEveryTenant: cache_rules.keeps_caches_apart,
    CachesWhatItMustNot: cache_rules.leaves_nothing_where_it_must_not,
    AnswersAWarmUp: cache_rules.computes_only_the_prompt_of_a_warm_up,
    SharesNothing: cache_rules.shares_a_prefix_with_what_runs,
    KeepsNewBlocksToItself: cache_rules.tells_which_blocks_it_holds,
    NeverSaysThatBlocksAreGone: cache_rules.tells_which_blocks_it_holds,
    NamesTheWrongParent: cache_rules.tells_which_blocks_it_holds,
    OverlooksStopTokens: stream_rules.stops_at_stop_tokens,
    OverlooksStopStrings: stream_rules.stops_at_stop_strings_wherever_they_are_split,
    LetsTheStopStringOut: stream_rules.stops_at_stop_strings_wherever_they_are_split,
    SwallowsHeldText: stream_rules.releases_text_held_for_a_stop_string_that_never_comes,
    StopsTooEarly: stream_rules.does_not_stop_before_min_tokens,
    IgnoresTheSeed: stream_rules.repeats_an_answer_for_a_seed,
    AlwaysTheSameSeed: stream_rules.repeats_an_answer_for_a_seed,
    MixesStreamsUp: stream_rules.keeps_eight_interleaved_streams_apart,
    CancelsWhenItLikes: stream_rules.cancels_before_the_first_step,
    NeverCancels: stream_rules.cancels_in_mid_stream,
    HoldsFewerThanItSays: stream_rules.has_the_capacity_it_advertises,
    RefusesWhatFits: stream_rules.has_the_capacity_it_advertises,
    AnswersWhatItRefuses: stream_rules.refuses_without_a_trace,
    AcceptsEverything: stream_rules.refuses_without_a_trace,
    ReportsLoadForEver: stream_rules.drains_to_zero,
    FailsAbortsOfTheUnknown: stream_rules.ignores_aborts_of_the_unknown,
    MixesEmbeddingsUp: kit.embeds_each_input_by_itself,
    ForgetsAnEmbedding: kit.embeds_each_input_by_itself,
    TakesAnyAdapter: adapter_rules.computes_each_request_with_its_own_adapters,
    MixesScoresUp: kit.scores_each_document_by_itself,
    ForgetsADocument: kit.scores_each_document_by_itself,
    GivesBlocksToEverySalt: cache_rules.gives_no_blocks_of_others,
    PutsNothing: cache_rules.gives_blocks_that_another_engine_can_use,
    FillsGaps: cache_rules.drops_blocks_behind_a_gap,
    HoldsNothingBack: cache_rules.computes_what_is_held_back_only_once_released,
    NeverCancelsWhatItHoldsBack: cache_rules.cancels_what_is_held_back,
    ForgetsWhatItIsGiven: resume_rules.continues_a_seeded_answer_after_any_token,
    PassesOffGivenTokensAsNew: resume_rules.continues_a_seeded_answer_after_any_token,
    GivesAllGivenTextToTheFirstToken: resume_rules.continues_a_seeded_answer_after_any_token,
    TakesGivenTokensForPrompt: resume_rules.continues_a_seeded_answer_after_any_token,
    ForgetsGivenLogprobs: resume_rules.keeps_the_log_probabilities_it_is_given,
    SamplesOnWhenItIsComplete: resume_rules.ends_what_is_complete_after_it_was_accepted,
    EndsWhatIsCompleteAtOnce: resume_rules.ends_what_is_complete_after_it_was_accepted,
    CutsWhatEndsTooEarly: resume_rules.refuses_what_ends_too_early,
    IgnoresConstraints: constraint_rules.keeps_to_a_constraint_of_each_kind,
    ForgetsTheConstraintOfWhatIsResumed: constraint_rules.continues_constrained_answers_after_any_token,
    ConstrainsFromTheBeginning: constraint_rules.leaves_the_output_free_up_to_a_marker,
    NeverSaysThatAConstraintIsReady: constraint_rules.says_when_a_constraint_is_compiled,
    GreetsBeforeItRefuses: constraint_rules.refuses_a_wrong_constraint_in_a_terminal_alone,
    NamesNoFieldWhenItRefuses: constraint_rules.refuses_a_wrong_constraint_in_a_terminal_alone,
    InsistsOnMinTokens: constraint_rules.gives_min_tokens_up_where_only_the_end_may_follow,
    SamplesForcedTokensWithoutLogprobs: constraint_rules.samples_the_same_with_log_probabilities,
    OverlooksCancelsWhileItCompiles: constraint_rules.cancels_while_a_constraint_is_compiled,
    OverlooksStopsInConstrainedOutputs: constraint_rules.holds_to_lengths_and_stops,
    LetsReasoningGoOn: reasoning_rules.closes_reasoning_after_its_tokens,
    ForgetsTheMessage: reasoning_rules.ends_reasoning_with_a_message,
    CountsReasoningFromWhereItResumes: reasoning_rules.continues_after_any_token_of_closed_reasoning,
    ForcesTheMarkerWithoutLogprobs: reasoning_rules.closes_reasoning_the_same_with_log_probabilities,
    OverlooksStopsInClosedReasoning: reasoning_rules.ends_at_limits_and_stops_within_what_closes_reasoning,
    ReasonsUpToTheConstraint: reasoning_rules.closes_reasoning_in_front_of_a_constraint,
    LeavesStreamsOpenAtCleanup: stream_rules.ends_every_stream_at_cleanup,
}


@pytest.fixture
async def broken(request: pytest.FixtureRequest) -> AsyncIterator[Honest]:
    engine = request.param()
    yield engine
    await engine.inner.cleanup()


@pytest.mark.parametrize(
    ("broken", "rule"), list(BROKEN.items()), indirect=["broken"], ids=lambda value: value.__name__
)
async def test_the_kit_catches_an_engine_that(broken: Honest, rule: kit.Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "SETTLE_S", 0.5)
    monkeypatch.setattr(Recorder.terminal, "__defaults__", (0.5,))
    monkeypatch.setattr(Recorder.until, "__defaults__", (0.5,))
    config = await broken.start("kit")
    loop_errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_errors.append(context.get("exception")))
    try:
        async with asyncio.timeout(20):
            await rule(broken, config)
    except (AssertionError, pytest.fail.Exception, TimeoutError, KeyError, errors.RequestError):
        return
    assert any(isinstance(error, ContractError) for error in loop_errors), "the broken engine passed"


class CleansUpOnlyOnce(Honest):
    cleaned = False

    async def cleanup(self) -> None:
        if self.cleaned:
            raise RuntimeError("cleaned up already")
        self.cleaned = True
        await self.inner.cleanup()


class AcceptsBeforeStart(Honest):
    def generate(self, request: engine_request.EngineRequest, sink: engine_output.Sink) -> None:
        sink(engine_output.Output(token_ids=[], text=""))


@pytest.mark.parametrize(
    ("broken_life", "rule"),
    [(CleansUpOnlyOnce, kit.cleans_up_before_start_and_twice), (AcceptsBeforeStart, kit.refuses_before_start)],
)
async def test_the_kit_catches_a_life_in_which_an_engine(broken_life: type[Honest], rule: kit.LifecycleCheck) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError)):
        await rule(broken_life)


@pytest.mark.parametrize("rule", kit.RULES, ids=lambda rule: rule.__name__)
async def test_the_kit_passes_an_engine_that_breaks_nothing(rule: kit.Check) -> None:
    engine = Honest()
    try:
        async with asyncio.timeout(20):
            await rule(engine, await engine.start("kit"))
    finally:
        await engine.cleanup()


def test_the_validator_raises_at_the_first_output_after_a_terminal() -> None:
    asked = driving.request([1], max_tokens=1)
    validator = StreamValidator(asked, lambda output: None)
    usage = messages.Usage(prompt_tokens=1, completion_tokens=0, total_tokens=1, cached_tokens=0)
    validator(engine_output.Output(token_ids=[], text="", finish_reason=messages.FinishReason.CANCELLED, usage=usage))
    with pytest.raises(ContractError, match="after the terminal"):
        validator(engine_output.Output(token_ids=[], text=""))
