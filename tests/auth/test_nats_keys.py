"""Keys in NATS's forms, as its own library reads them."""

import nkeys
import pytest

from tokenbus.auth import nats_keys, seeds
from tokenbus.auth.nats_keys import ACCOUNT, CURVE, SERVER, USER, SealingKey, Signer


def test_a_seed_is_one_that_the_library_reads() -> None:
    seed = nats_keys.new_seed(ACCOUNT)
    pair = nkeys.from_seed(seed.encode())
    signer = Signer(seed)
    assert signer.public == pair.public_key.decode()
    assert pair.verify(b"content", signer.sign(b"content"))
    assert nats_keys.is_signed(b"content", signer.sign(b"content"), ACCOUNT, signer.public)


@pytest.mark.parametrize("prefix", [ACCOUNT, CURVE, SERVER, USER])
def test_a_key_is_read_only_as_one_of_its_kind_and_whole(prefix: int) -> None:
    text = nats_keys.encode_key(prefix, bytes(range(32)))
    assert nats_keys.decode_key(prefix, text) == bytes(range(32))
    changed = text[:-3] + ("A" if text[-3] != "A" else "B") + text[-2:]
    other = USER if prefix != USER else SERVER
    for kind, wrong in (
        (other, text),
        (prefix, changed),
        (prefix, text[:-8]),
        (prefix, ""),
        (prefix, "ü"),
        (prefix, "1"),
    ):
        with pytest.raises(ValueError, match="nkey"):
            nats_keys.decode_key(kind, wrong)


@pytest.mark.parametrize("wrong", [b"", b"short", bytes(64), bytes(65)])
def test_a_signature_of_another_length_or_content_is_none(wrong: bytes) -> None:
    signer = Signer(nats_keys.new_seed(ACCOUNT))
    assert not nats_keys.is_signed(b"content", wrong, ACCOUNT, signer.public)
    assert not nats_keys.is_signed(b"other", signer.sign(b"content"), ACCOUNT, signer.public)


def test_what_is_sealed_is_opened_only_by_its_receiver_and_as_it_was() -> None:
    service, broker, stranger = (SealingKey(nats_keys.new_seed(CURVE)) for _ in range(3))
    sealed = broker.seal(b"a key", service.public)
    assert nats_keys.is_sealed(sealed)
    assert b"a key" not in sealed
    assert service.open(sealed, broker.public) == b"a key"
    for opener, sender, content in (
        (stranger, broker.public, sealed),
        (service, stranger.public, sealed),
        (service, broker.public, sealed[:-1] + bytes([sealed[-1] ^ 1])),
        (service, broker.public, b"xkv1"),
        (service, "", sealed),
        (service, Signer(nats_keys.new_seed(ACCOUNT)).public, sealed),
        (service, nats_keys.encode_key(CURVE, bytes(32)), sealed),  # a point of small order
    ):
        with pytest.raises(ValueError, match=r"sealed|nkey"):
            opener.open(content, sender)


def test_seeds_are_made_once_and_only_their_owner_reads_them(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "callout.seeds"
    made = seeds.create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert seeds.create(path).signer.public == made.signer.public
    shown = f"{made!r} {made.signer!r} {made.sealing!r}"
    assert not any(seed in shown for seed in path.read_text().split())
    path.chmod(0o640)
    assert seeds.read(path)
    path.chmod(0o604)
    with pytest.raises(ValueError, match="chmod 600"):
        seeds.read(path)


@pytest.mark.parametrize(
    "content", ["", "x", "SAAA SXAA", "{user} {curve}", "{account}", "{curve} {account}", "\ud800"]
)
def test_a_file_without_both_seeds_is_refused_and_not_shown(tmp_path, content: str) -> None:  # type: ignore[no-untyped-def]
    made = {
        "account": nats_keys.new_seed(ACCOUNT),
        "curve": nats_keys.new_seed(CURVE),
        "user": nats_keys.new_seed(USER),
    }
    path = tmp_path / "callout.seeds"
    path.write_text(content.format(**made), errors="replace")
    path.chmod(0o600)
    with pytest.raises(ValueError, match="auth-init") as refused:
        seeds.read(path)
    assert not any(seed in str(refused.value) for seed in made.values())
