"""Which tokens of a real vocabulary a grammar allows: the very ones that llama.cpp's grammar sampler does."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.text.tokenizer import Tokenizer
from spanmesh_proto import windows_pb2 as wire
from spanmesh_proto.errors import ProtocolError
from stages.grammar.automaton import DEAD, TokenMasks, TokenTexts, TokenTree
from stages.grammar.session_grammar import Grammars, make_automaton
from tests.support.llama_grammar import LlamaGrammar

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root ::= (expr "=" ws term "\n")+
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*
"""
SPEECH = 'root ::= ("The " | "A ") [a-z]{3,9} " " (verb " "){1,2} .* "."\nverb ::= "is" | "was" | "isn\'t"'
UNICODE = "root ::= [α-ωéü一-龥]+ [^ -~]? [\\U0001F300-\\U0001F6FF]*"
GRAMMARS = {"json": JSON, "arithmetic": ARITHMETIC, "speech": SPEECH, "unicode": UNICODE}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def tree(tokenizer: Tokenizer) -> TokenTree:
    return TokenTree.of(tokenizer.texts)


@pytest.fixture(scope="module")
def vocab(smollm2_path: Path) -> Iterator[object]:
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(smollm2_path).encode(), params)
    yield llama_cpp.llama_model_get_vocab(model)
    llama_cpp.llama_model_free(model)


@pytest.mark.model
@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_it_allows_what_llama_cpp_allows(
    tokenizer: Tokenizer, tree: TokenTree, vocab: object, grammar: str
) -> None:
    """Along random texts, at every token, over the whole vocabulary."""
    random = Random(grammar)
    masks = TokenMasks(make_automaton(grammar), tree)
    texts = tokenizer.texts
    # llama.cpp follows bytes that no UTF-8 text can hold, such as 0xFF, as far as they look like a beginning,
    # and takes a NUL for the end of a text.
    is_text = np.array([_begins_text(piece) and piece != b"\0" for piece in texts.pieces])
    nul = texts.pieces.index(b"\0")
    counts = []
    for _ in range(3):
        theirs = LlamaGrammar(vocab, grammar, texts.pieces, texts.end_tokens)
        state = masks.automaton.start
        for _ in range(14):
            mask = masks.mask(state)
            assert not (mask & ~is_text & (np.arange(mask.size) != nul)).any()
            mask = mask & is_text
            allowed = theirs.allowed() & is_text
            differ = np.flatnonzero(mask != allowed)
            assert not differ.size, [texts.pieces[token] for token in differ[:9]]
            counts.append(int(mask.sum()))
            whole = [token for token in np.flatnonzero(mask) if _is_text(texts.pieces[token])]
            token = int(random.choice(whole))
            assert masks.allows(state, token)
            if token in texts.end_tokens:
                break
            theirs.accept(token)
            state = masks.after(state, token)
        theirs.close()
    assert max(counts) > min(counts) > 0, "a grammar that always allows the same would show little"


@pytest.mark.model
def test_parts_of_a_character_lead_to_it(tokenizer: Tokenizer, tree: TokenTree) -> None:
    """A letter that the vocabulary has only as single bytes; no end may come between them."""
    letter = "\U0001f6de"
    ids = tokenizer.encode(letter, add_special=False, parse_special=False)
    assert len(ids) > 1
    masks = TokenMasks(make_automaton(f'root ::= "{letter}"*'), tree)
    end = next(iter(tokenizer.end_tokens))
    states = list(itertools.accumulate(ids, masks.after, initial=masks.automaton.start))
    assert states[-1] == states[0] != DEAD
    assert [masks.allows(state, end) for state in states] == [True, *[False] * (len(ids) - 1), True]


def _begins_text(piece: bytes) -> bool:
    """Whether it is the beginning of a UTF-8 text, or of a part of one that begins inside a character."""
    inside = piece.lstrip(bytes(range(0x80, 0xC0)))
    try:
        inside.decode()
    except UnicodeDecodeError as error:
        rest = inside[error.start :]
        if error.end != len(inside) or not 0xC2 <= rest[0] <= 0xF4:
            return False
    return len(piece) - len(inside) <= 3


def _is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


PIECES = st.lists(
    st.text('ab"{}:, é😀', max_size=4).map(str.encode) | st.binary(max_size=3), min_size=1, max_size=40
)


@settings(max_examples=80, deadline=None)
@given(
    pieces=PIECES,
    ends=st.sets(st.integers(0, 39), max_size=2),
    grammar=st.sampled_from([JSON, 'root ::= [ab]* "é"', "root ::= .*", 'root ::= ("a" | "ab"){0,3} "b"?']),
    text=st.text('ab"{}: é😀', max_size=5),
)
def test_all_at_once_is_one_after_the_other(
    pieces: list[bytes], ends: set[int], grammar: str, text: str
) -> None:
    texts = TokenTexts(tuple(pieces), frozenset(end for end in ends if end < len(pieces)))
    masks = TokenMasks(make_automaton(grammar), TokenTree.of(texts))
    automaton = masks.automaton
    state = automaton.after(automaton.start, text.encode())
    if state == DEAD:
        state = automaton.start
    for token, piece in enumerate(pieces):
        if token in texts.end_tokens:
            expected = automaton.may_end(state)
        else:
            expected = bool(piece) and b"\xff" not in piece and automaton.after(state, piece) != DEAD
        assert masks.mask(state)[token] == masks.allows(state, token) == expected


def test_control_tokens_come_only_where_a_grammar_names_them() -> None:
    pieces = (b"", b"a", b"<", b"", b"\xff", b"\x00", b"\x03", b"")
    tree = TokenTree.of(TokenTexts(pieces, frozenset({7})))

    def allowed(grammar: str, *before: int) -> set[int]:
        masks = TokenMasks(make_automaton(grammar), tree)
        state = masks.automaton.start
        for token in before:
            state = masks.after(state, token)
        found = set(np.flatnonzero(masks.mask(state)).tolist())
        assert found == {token for token in range(len(pieces)) if masks.allows(state, token)}
        return found

    assert allowed("root ::= .*") == {1, 2, 5, 6, 7}
    assert allowed('root ::= <[3]> "a"? | "<"') == {2, 3}
    assert allowed('root ::= <[3]> "a"? | "<"', 3) == {1, 7}
    assert allowed("root ::= [^b]* <[0]> .*", 1) == {0, 1, 2, 5, 6}
    assert allowed("root ::= [^b]* <[0]> .*", 1, 0) == {1, 2, 5, 6, 7}
    # A token with a text is its text, and one that ends answers is no part of them.
    assert allowed("root ::= <[1]> | <[7]> | <[9]>") == set()


@given(pieces=PIECES, ends=st.sets(st.integers(0, 39), max_size=3))
def test_a_vocabulary_travels_unchanged(pieces: list[bytes], ends: set[int]) -> None:
    texts = TokenTexts(tuple(pieces), frozenset(end for end in ends if end < len(pieces)))
    assert TokenTexts.from_wire(texts.message, len(pieces)) == texts


def test_a_vocabulary_that_does_not_fit_is_refused() -> None:
    texts = TokenTexts((b"a", b"bc", b""), frozenset({2}))
    grammars = Grammars(n_vocab=3)
    with pytest.raises(ProtocolError, match="no vocabulary"):
        grammars.masks('root ::= "a"')
    for change, reason in (
        ({"lengths": [1, 2]}, "2 tokens, but the model has 3"),
        ({"lengths": [1, 2, 1]}, "do not have the 4 bytes"),
        ({"lengths": [1, 1, 0]}, "do not have the 2 bytes"),
        ({"lengths": [2**32 - 1] * 3}, "at most"),
        ({"texts": b"junk"}, "cannot be decompressed"),
        ({"end_tokens": [3]}, "beyond its 3"),
    ):
        message = wire.Vocabulary()
        message.CopyFrom(texts.message)
        for field, value in change.items():
            message.ClearField(field)
            if isinstance(value, bytes):
                message.texts = value
            else:
                getattr(message, field).extend(value)
        grammars.take(message)
        with pytest.raises(ProtocolError, match=reason):
            grammars.masks('root ::= "a"')
    grammars.take(texts.message)
    first = grammars.masks('root ::= "a"')
    assert grammars.masks('root ::= "a"') is first
    # How long a grammar takes shows whether it is there.
    for client in (b"ann", b"bob"):
        own = grammars.masks('root ::= "a"', client)
        assert own is not first
        assert grammars.masks('root ::= "a"', client) is own
    grammars.take(TokenTexts(texts.pieces, texts.end_tokens).message)
    assert grammars.masks('root ::= "a"') is first
    grammars.take(TokenTexts((b"b", b"bc", b""), frozenset({2})).message)
    assert not grammars.masks('root ::= "a"').mask(0).any()
