"""A plugin of pytest for vLLM's tests of its HTTP API: in place of `vllm serve`, they get a server that runs already.

What they import of vLLM and torch is not there. Every name of it is a mock, so tests of vLLM's own code fail."""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import anthropic
import openai
import requests

_ABSENT = ("vllm", "torch", "transformers")
_UTILS = "tests.utils"
_URL = os.environ["ROOT_URL"]
_SETTINGS = {"api_key": "none", "max_retries": 0}


class RemoteOpenAIServer:
    """Has what the tests use of vLLM's class of this name."""

    DUMMY_API_KEY = _SETTINGS["api_key"]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.url_root = _URL

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([_URL, *(part.strip("/") for part in parts if part)])

    def get_client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{_URL}/v1", **_SETTINGS, **settings)

    def get_async_client(self, **settings: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{_URL}/v1", **_SETTINGS, **settings)

    def get_client_anthropic(self, **settings: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=_URL, **_SETTINGS, **settings)

    def get_async_client_anthropic(self, **settings: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=_URL, **_SETTINGS, **settings)


class _Tokenizer:
    """The tokenizer of the served model, over HTTP."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        asked = {"prompt": text, "add_special_tokens": add_special_tokens}
        return requests.post(f"{_URL}/tokenize", json=asked).json()["tokens"]

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return mock.Mock(input_ids=self.encode(text, add_special_tokens))

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return requests.post(f"{_URL}/detokenize", json={"tokens": [*tokens]}).json()["prompt"]


class _Absent(ModuleType):
    """A module that is not there."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_tokenizer":
            return lambda *_, **__: _Tokenizer()
        return type(name, (Exception,), {}) if name.endswith("Error") else mock.MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname != _UTILS and fullname.partition(".")[0] not in _ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Absent(spec.name)
        if spec.name == _UTILS:
            vars(module)["RemoteOpenAIServer"] = RemoteOpenAIServer
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
