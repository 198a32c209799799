"""LangChain's standard tests of integrations, for those that talk to this system.

`MODEL` answers what makes sense; the suite says which tests need a model that does."""

import os

from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

MODEL = os.environ["MODEL"]
_COMMON = {"model": MODEL, "temperature": 0}
_OPENAI = {"base_url": os.environ["BASE_URL"], "api_key": "none", "max_retries": 0}
_ANTHROPIC = {"base_url": os.environ["ROOT_URL"], "api_key": "none", "max_retries": 0, "max_tokens": 500}
_OLLAMA = {"base_url": os.environ["ROOT_URL"]}


class TestOpenAIChat(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params = {**_COMMON, **_OPENAI, "stream_usage": True}
    supports_json_mode = True
    model_override_value = MODEL


class TestOpenAIResponses(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params = {**_COMMON, **_OPENAI, "use_responses_api": True}
    supports_json_mode = True
    model_override_value = MODEL


class TestAnthropic(ChatModelIntegrationTests):
    chat_model_class = ChatAnthropic
    chat_model_params = {**_COMMON, **_ANTHROPIC}
    model_override_value = MODEL


class TestOllama(ChatModelIntegrationTests):
    chat_model_class = ChatOllama
    chat_model_params = {**_COMMON, **_OLLAMA}
    supports_json_mode = True
    has_tool_choice = False  # nor has Ollama's API
    model_override_value = MODEL


class TestOpenAIEmbeddings(EmbeddingsIntegrationTests):
    embeddings_class = OpenAIEmbeddings
    embedding_model_params = {**_OPENAI, "model": "embedder", "check_embedding_ctx_length": False}


class TestOllamaEmbeddings(EmbeddingsIntegrationTests):
    embeddings_class = OllamaEmbeddings
    embedding_model_params = {**_OLLAMA, "model": "embedder"}
