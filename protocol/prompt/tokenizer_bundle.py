"""Everything needed to make a model's prompts, as workers send it to routers; `prompt.py` uses it."""

import msgspec
import xxhash

from tokenbus.protocol.wire import internal, limits


class FimTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens with which a fill-in-the-middle model marks the text around the gap."""

    prefix: int
    suffix: int
    middle: int


class PromptRules(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model's metadata needed to make a prompt."""

    special_tokens: dict[str, int]
    chat_template: str | None = None
    bos_token: str = ""
    eos_token: str = ""
    bos_token_id: int | None = None
    add_bos: bool = False
    """Whether every prompt begins with BOS."""
    vocab_size: int
    fim: FimTokens | None = None
    """None where the vocabulary has no such tokens."""


class TokenizerBundle(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a router needs to make a model's prompts without the model's files."""

    tokenizer_json: str
    """A tokenizer in the format of the `tokenizers` library, without special tokens."""
    rules: PromptRules


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TokenizerBundle)


def pack(bundle: TokenizerBundle) -> bytes:
    return _encoder.encode(bundle)


def bundle_digest(packed: bytes) -> str:
    """Returns the hash that identifies a bundle in cards, so that routers fetch each bundle once."""
    return xxhash.xxh3_128_hexdigest(packed)


def to_parts(packed: bytes) -> list[internal.TokenizerPart]:
    """Splits a packed bundle into messages that are small enough for any broker."""
    digest = bundle_digest(packed)
    starts = range(0, len(packed), limits.PART_BYTES)
    return [
        internal.TokenizerPart(
            digest=digest, part=number, parts=len(starts), data=packed[start : start + limits.PART_BYTES]
        )
        for number, start in enumerate(starts)
    ]


def from_parts(parts: list[internal.TokenizerPart], digest: str) -> TokenizerBundle:
    """Joins the parts, in order, into a bundle. Raises ValueError if its digest differs, or if it is malformed."""
    packed = b"".join(part.data for part in parts)
    if bundle_digest(packed) != digest:
        raise ValueError("the tokenizer bundle does not have the digest that the card announced")
    return unpack(packed)


def unpack(packed: bytes) -> TokenizerBundle:
    """Returns a packed bundle's contents. Raises ValueError if it is malformed."""
    try:
        return _decoder.decode(packed)
    except msgspec.DecodeError as error:
        raise ValueError(f"the tokenizer bundle is malformed: {error}") from error
