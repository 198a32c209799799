"""What a child process gets of its parent's environment."""

import pytest

from tokenbus.protocol.process.child_environment import child_environment, without_secrets

SECRETS = (
    *("TOKENBUS_NATS_PASSWORD", "TOKENBUS_NATS_TOKEN", "TOKENBUS_NATS", "TOKENBUS_API_KEYS", "TOKENBUS_CALLOUT_ISSUER"),
    *(
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "OPENAI_API_KEY",
        "PGPASSWORD",
    ),
    *("GOOGLE_CREDENTIALS", "github_token"),
)
PLAIN = (
    *("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_CACHE", "HOME"),
    *("TOKENIZERS_PARALLELISM", "TOKENBUS_LOG", "TOKENBUS_DEBUG", "KEYBOARD", "GGML_CUDA_FORCE_MMQ", "PYTHONHASHSEED"),
)


@pytest.mark.parametrize("name", SECRETS)
def test_a_child_gets_no_credentials(name: str) -> None:
    assert without_secrets({name: "x"}) == {}


@pytest.mark.parametrize("name", PLAIN)
def test_a_child_gets_what_computing_needs(name: str) -> None:
    assert without_secrets({name: "x"}) == {name: "x"}


def test_what_is_given_to_a_child_comes_before_what_it_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENBUS_LOG", "info")
    monkeypatch.setenv("TOKENBUS_NATS_PASSWORD", "secret")
    environment = child_environment(TOKENBUS_LOG="debug")
    assert environment["TOKENBUS_LOG"] == "debug"
    assert "secret" not in environment.values()
