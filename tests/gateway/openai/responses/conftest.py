import pytest

from tokenbus.gateway.openai.responses import endpoints


@pytest.fixture(autouse=True)
def _short_ids(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Ids are random: here all responses are `resp_r`, except in tests that store them."""
    if "stored" not in request.node.path.name:
        monkeypatch.setattr(endpoints.secrets, "token_hex", lambda num_bytes: "r")
