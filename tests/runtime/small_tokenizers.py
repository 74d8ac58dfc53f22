"""Small tokenizers of the kinds that models ship: whatever ids they are given, they have a text for."""

from __future__ import annotations

import tokenizers
from leafsum.ranks.tiny import ensure_tiny
from leafsum.runtime.tokenizer import Tokenizer
from tokenizers import decoders, models

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
BYTES = (0x0A, 0x20, 0x41, 0x80, 0x82, 0xAC, 0xBF, 0xE2, 0xE2, 0xF0, 0xFF)
"""A newline, a space, a letter, the bytes of a euro sign, and some that seldom make a character."""

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in BYTES]
WORDS = ["a", "b", "ab", "END", ".", "ü", "日本", "\N{REPLACEMENT CHARACTER}"]
PIECES = [b"a", b" a", b"END", b"E", b"ND", b"\n", b"\n\n", b"\xe2", b"\xe2\x82", b"\xac", b"\x82\xac", b"\xf0\x9f"]
PIECES += [b"\x98", b"\x80", b"\x98\x80x", b"\xff", b"\xc3", b"\xbcE", b"\xe6\x97\xa5", b"a\xe6\x97", b"\xa5b"]
"""Of byte-level tokenizers: one byte or several, which may begin and end inside a character."""


def of_words(words: list[str], decoder: decoders.Decoder | None) -> Tokenizer:
    """One id a word, then two special tokens, an added one, and an id that has no token."""
    words = list(dict.fromkeys(words))
    backend = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<bos>", "<eos>"])
    backend.add_tokens(["added one"])
    return Tokenizer(backend, None, {})


def spelt(piece: bytes) -> str:
    """Bytes as byte-level tokenizers write them."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    characters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return "".join(characters[byte] for byte in piece)


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    return [tokenizer._backend.token_to_id(token) for token in tokens]


def ids_of_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Character by character, and byte by byte where a character has no token."""
    found = []
    for character in text:
        token_id = tokenizer._backend.token_to_id(SPACE if character == " " else character)
        if token_id is not None and character.isascii():
            found.append(token_id)
        elif tokenizer.has_byte_fallback:
            found += ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in character.encode()))
        else:
            found += ids_of(tokenizer, *(spelt(bytes([byte])) for byte in character.encode()))
    return found


def tiny() -> Tokenizer:
    found = Tokenizer.open(ensure_tiny())
    assert found is not None
    return found


def make_all() -> dict[str, Tokenizer]:
    spaced = [*WORDS, *(SPACE + word for word in WORDS), SPACE]
    to_space = decoders.Replace(SPACE, " ")
    first_space = decoders.Strip(" ", 1, 0)
    return {
        "tiny": tiny(),
        "byte level": of_words([spelt(piece) for piece in PIECES], decoders.ByteLevel()),
        "byte fallback": of_words(
            [*spaced, *BYTE_TOKENS],
            decoders.Sequence([to_space, decoders.ByteFallback(), decoders.Fuse(), first_space]),
        ),
        "byte fallback, three spaces": of_words(
            [*spaced, *BYTE_TOKENS],
            decoders.Sequence([to_space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 0)]),
        ),
        "metaspace": of_words(spaced, decoders.Metaspace()),
        "word pieces": of_words([*WORDS, *("##" + word for word in WORDS)], decoders.WordPiece()),
        "end of word": of_words([*WORDS, *(word + "</w>" for word in WORDS)], decoders.BPEDecoder()),
        "repeats": of_words([*WORDS, "|", "<pad>"], decoders.CTC()),
        "words": of_words(WORDS, None),
    }
