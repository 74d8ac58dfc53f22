"""Stop strings and text in pieces, against the text of the whole output after every token."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from leafsum.runtime.detokenizer import KNOWN_TOKENS, Detokenizer
from leafsum.runtime.stop_strings import CHARACTER_BYTES, Beginnings, StopFinder, first_stop
from leafsum.runtime.tokenizer import Tokenizer
from runtime.small_tokenizers import ids_of, ids_of_text, make_all

EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True)
FALL_BACK = ("byte fallback", "byte fallback, three spaces")
KINDS = ("tiny", "byte level", *FALL_BACK, "metaspace", "word pieces", "end of word", "repeats", "words")
STOPS = (
    "a",
    " ",
    "\n",
    "\n\n",
    "END",
    "NDa",
    " a b",
    "a\n",
    "ab",
    "ü",
    "ba",
    "€",
    "€€",
    "€\n",
    "日",
    "😀x",
    "A",
    ".",
    ". ",
)

tokenizers_by_kind = cache(make_all)


@pytest.fixture(params=KINDS)
def tokenizer(request) -> Tokenizer:
    return tokenizers_by_kind()[request.param]


def num_ids(tokenizer: Tokenizer) -> int:
    """And one more, which no token has."""
    return tokenizer._backend.get_vocab_size(with_added_tokens=True) + 1


@st.composite
def outputs(draw, tokenizer: Tokenizer) -> list[int]:
    """Ids of any kind, some runs of the same few among them."""
    ids = st.integers(0, num_ids(tokenizer) - 1)
    few = draw(st.lists(ids, min_size=1, max_size=5))
    return draw(st.lists(st.one_of(ids, st.sampled_from(few)), max_size=40))


def expected_end(tokenizer: Tokenizer, token_ids: list[int], stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The oracle: how many tokens there are when the text of all of them holds a stop string, and the earliest."""
    for end in range(1, len(token_ids) + 1):
        found = first_stop(tokenizer.decode(token_ids[:end]), stops)
        if found is not None:
            return end, found[1]
    return None


def found_end(tokenizer: Tokenizer, token_ids: list[int], stops: tuple[str, ...]) -> tuple[int, str] | None:
    finder = StopFinder(tokenizer, stops)
    for end, token_id in enumerate(token_ids, start=1):
        if stop := finder.push(token_id):
            return end, stop
    return None


def test_every_kind_is_tested():
    assert set(KINDS) == set(tokenizers_by_kind())
    assert {kind for kind in KINDS if tokenizers_by_kind()[kind].has_byte_fallback} == set(FALL_BACK)


def test_the_text_of_ids_is_the_text_of_their_tokens(tokenizer):
    @EXAMPLES
    @given(outputs(tokenizer))
    def check(token_ids):
        tokens = [token for token in map(tokenizer.token, token_ids) if token is not None]
        assert tokenizer.join(tokens) == tokenizer.decode(token_ids)

    check()


def test_a_stop_string_ends_an_output_where_the_whole_text_first_holds_it(tokenizer):
    @EXAMPLES
    @given(outputs(tokenizer), st.lists(st.sampled_from(STOPS), min_size=1, max_size=3).map(tuple))
    def check(token_ids, stops):
        assert found_end(tokenizer, token_ids, stops) == expected_end(tokenizer, token_ids, stops)

    check()


TEXT_OF_KIND = {"tiny": "aE €😀\n", **dict.fromkeys(FALL_BACK, "aA €\n")}
"""Characters of one byte and several, for tokenizers that can spell any text."""


@pytest.mark.parametrize("kind", TEXT_OF_KIND)
def test_a_stop_string_in_a_text_ends_it(kind):
    """Most outputs are texts, in which a stop string is found late and long runs of bytes are characters."""
    tokenizer, characters = tokenizers_by_kind()[kind], st.sampled_from(TEXT_OF_KIND[kind])
    texts = st.lists(characters, max_size=14).map("".join)

    @settings(EXAMPLES, max_examples=300)
    @given(texts, texts.filter(bool), st.integers(1, 4))
    def check(text, more, length):
        whole = text + more * 2
        stops = ("#", whole[-length:])
        token_ids = ids_of_text(tokenizer, whole)
        expected = expected_end(tokenizer, token_ids, stops)
        assert found_end(tokenizer, token_ids, stops) == expected
        told = "".join(map(Detokenizer(tokenizer).push, [*token_ids, ids_of(tokenizer, "a")[0]]))
        assert told == tokenizer.decode([*token_ids, ids_of(tokenizer, "a")[0]])

    check()


def test_pieces_are_certain_and_together_the_whole_text(tokenizer):
    @EXAMPLES
    @given(outputs(tokenizer))
    def check(token_ids):
        told, texts = "", Detokenizer(tokenizer)
        for end, token_id in enumerate(token_ids, start=1):
            told += texts.push(token_id)
            whole = tokenizer.decode(token_ids[:end])
            assert whole.startswith(told)
            assert tokenizer.decode(token_ids).startswith(told), "a later token has changed it"
            if not tokenizer.has_byte_fallback:
                assert len(whole) - len(told) <= 1, "only the last character may become another"

    check()


@pytest.mark.parametrize("kind", FALL_BACK)
def test_a_run_of_bytes_is_told_when_it_ends(kind):
    tokenizer = tokenizers_by_kind()[kind]
    texts = Detokenizer(tokenizer)
    ids = ids_of(tokenizer, "a", *["<0xE2>", "<0x82>", "<0xAC>"] * 30, "b")
    assert [texts.push(token_id) for token_id in ids[:-1]] == ["a"] + [""] * 90
    assert texts.push(ids[-1]) == "€" * 30 + "b"


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("tiny", ["a", "b", " "]),
        ("tiny", [b"\x80", b"\xff", b"\xe2"]),
        ("tiny", ["€"]),
        ("byte fallback", ["<0x41>"]),
        ("byte fallback", ["<0xE2>", "<0x82>", "<0xAC>"]),
        ("byte fallback", ["<0xFF>", "<0x41>"]),
        ("metaspace", ["a"]),
        ("words", ["a"]),
    ],
)
def test_the_cost_of_a_token_does_not_grow(kind, tokens, monkeypatch):
    """Counted in tokens that are joined again, by the search and by what tells text; a run of bytes is told as one."""
    tokenizer = tokenizers_by_kind()[kind]
    joined = []
    monkeypatch.setattr(Tokenizer, "join", lambda self, tokens: joined.append(len(tokens)) or real_join(self, tokens))
    if kind == "tiny":
        ids = [byte for token in tokens for byte in (token if isinstance(token, bytes) else token.encode())]
    else:
        ids = ids_of(tokenizer, *tokens)
    finder, texts = StopFinder(tokenizer, ("stop",)), Detokenizer(tokenizer)
    for token_id in ids * 300:
        assert finder.push(token_id) == ""
        texts.push(token_id)
    assert joined
    assert max(joined) <= 1 + KNOWN_TOKENS + CHARACTER_BYTES + 1
    assert len(joined) <= 4 * 300 * len(ids)


real_join = Tokenizer.join


def test_the_earliest_stop_string_is_the_reason_and_of_two_at_one_place_the_first_named():
    assert first_stop("xxENDab", ("ab", "END", "E")) == (2, "END")
    assert first_stop("xxENDab", ("ab", "E", "END")) == (2, "E")
    assert first_stop("xx", ("ab",)) is None
    assert first_stop("xx", ()) is None


@settings(EXAMPLES, max_examples=500)
@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=7), max_size=3).map(tuple),
)
def test_what_may_begin_a_stop_string_is_known_after_every_piece(pieces, stops):
    beginnings, text = Beginnings(stops), ""
    for piece in pieces:
        text += piece
        if first_stop(text, stops) is not None:
            break
        lengths = [n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops)]
        assert beginnings.push(piece) == max(lengths, default=0)


class Watched(str):
    """Counts the looks at its characters."""

    looks = 0

    def __getitem__(self, index):
        Watched.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("stop", "text"), [("a" * 4095 + "b", "a" * 8192), ("ab" * 2047 + "ac", "ab" * 4096)])
def test_a_character_costs_a_few_looks_at_a_stop_string_of_any_length(stop, text):
    Watched.looks = 0
    beginnings = Beginnings([Watched(stop)])
    assert len(stop) - 2 <= beginnings.push(text) < len(stop)
    assert Watched.looks < 5 * len(text)


@pytest.mark.parametrize(("first_words", "num_tokens"), [((), 5), (("b",), 3)])
def test_spaces_are_missing_at_the_beginning_of_an_output_only(first_words, num_tokens):
    """Three, for this decoder; the few tokens that are joined again are no beginning, and a beginning is no other."""
    tokenizer = tokenizers_by_kind()["byte fallback, three spaces"]
    token_ids, stops = ids_of(tokenizer, *first_words, *["<0x20>"] * 6), ("  ",)
    assert expected_end(tokenizer, token_ids, stops) == (num_tokens, "  ")
    assert found_end(tokenizer, token_ids, stops) == (num_tokens, "  ")
