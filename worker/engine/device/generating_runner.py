"""Tokens and their sampling, which the runners of all models that generate have in common."""

from typing import Protocol

from tokenbus.worker.chat_format.reasoning_budget import ReasoningCloser
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.chat_format import ChatFormat
from tokenbus.worker.engine.constraints.compiler import ModelTokens
from tokenbus.worker.engine.device import features
from tokenbus.worker.engine.device.non_finite import LogitsHealth
from tokenbus.worker.engine.device.prompt_scores import PromptScores
from tokenbus.worker.engine.device.sampler import Sampler
from tokenbus.worker.engine.scheduling.row_tiles import RowTiles
from tokenbus.worker.files import model_config
from tokenbus.worker.files.device_memory import DeviceMemory
from tokenbus.worker.tokenizers.model_tokenizer import ModelTokenizer


class GeneratingModel(Protocol):
    """A loaded model, as far as its runners share what they know of it."""

    generation_config: model_config.GenerationConfig
    chat_format: ChatFormat | None

    @property
    def tokenizer(self) -> ModelTokenizer:
        """Its tokenizer."""
        ...

    def device_memory(self) -> list[DeviceMemory]:
        """Returns the memory of its devices other than the host."""
        ...


class GeneratingRunner:
    """The part of a `Runner` that follows from the model's files."""

    def __init__(self, model: GeneratingModel) -> None:
        tokenizer = model.tokenizer
        self._tokenizer = tokenizer
        self._chat_format = model.chat_format
        self.device_memory = model.device_memory
        self.tokenize, self.encode = tokenizer.tokenize, tokenizer.encode
        named = model_config.end_token_ids(model.generation_config, tokenizer.rules.special_tokens.values())
        self.end_token_ids = frozenset(one for one in tokenizer.end_token_ids | named if one < tokenizer.size)
        self.token_bytes = tokenizer.token_bytes
        self.reranker = None
        self.row_tiles: RowTiles | None = None
        self.reasoning_closer: ReasoningCloser | None = None
        self.logits = LogitsHealth()
        self.prompt_scores = PromptScores(tokenizer.size)
        self._sampler = Sampler(self.end_token_ids, tokenizer.size)

    def add_sequence(self, seq_no: int, sampling: engine_request.Sampling) -> None:
        self._sampler.add_sequence(seq_no, sampling)

    def remove_sequence(self, seq_no: int) -> None:
        self._sampler.remove_sequence(seq_no)

    def _offered(self, missing: dict[str, str], *, lora: bool, caches: bool = True) -> tuple[str, ...]:
        """Returns the features of an engine that can load adapters if `lora`, and reuses prefixes if `caches`. Finds
        out what closes reasoning; if nothing does, `missing` gets the reason."""
        model_tokens = ModelTokens(self.token_bytes, self.end_token_ids, self.encode)
        self.reasoning_closer = features.closer_of(self._chat_format, model_tokens, missing)
        return features.with_sampler(
            chat=self._tokenizer.supports_chat,
            ends=bool(self.end_token_ids),
            fim=self._tokenizer.supports_fim,
            chat_format=self._chat_format,
            lora=lora,
            caches=caches,
            closes_reasoning=self.reasoning_closer is not None,
        )
