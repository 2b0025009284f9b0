"""Join tokens survive the trip through a terminal, and nothing else passes for one."""

import base64

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cluster.join_token import JoinToken, decode, encode
from spanmesh_proto.errors import InvalidJoinToken

TOKEN = JoinToken(("192.0.2.7:4100", "[2001:db8::7]:4100"), "s" * 43, bytes(range(32)), 1_900_000_000)

addresses = st.builds(
    lambda host, port: f"{host}:{port}",
    st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6).map(lambda v6: f"[{v6}]"), st.just("head.lan")),
    st.integers(1, 65535),
)
tokens = st.builds(
    JoinToken,
    addresses=st.lists(addresses, min_size=1, max_size=4).map(tuple),
    secret=st.text(min_size=1, max_size=60),
    fingerprint=st.binary(min_size=32, max_size=32),
    expires_at_s=st.integers(0, 2**40 - 1),
)


@given(tokens)
def test_decode_undoes_encode(token: JoinToken) -> None:
    assert decode(encode(token)) == token


@given(tokens, st.sampled_from(["", " ", "\n", "  \r\n"]))
def test_white_space_around_a_token_does_not_matter(token: JoinToken, space: str) -> None:
    assert decode(space + encode(token) + space) == token


def test_a_token_is_one_word_that_no_shell_changes() -> None:
    assert all(character.isalnum() or character in "-_" for character in encode(TOKEN))


@given(st.text(max_size=300))
def test_any_other_text_is_refused_as_such(text: str) -> None:
    with pytest.raises(InvalidJoinToken):
        decode(text)


@given(st.integers(1, len(encode(TOKEN)) - 1))
def test_a_token_cut_short_is_refused(length: int) -> None:
    with pytest.raises(InvalidJoinToken):
        decode(encode(TOKEN)[:length])


@pytest.mark.parametrize(
    "fields",
    [
        [1, [], "secret", bytes(32), 1],
        [1, ["host:1"], "", bytes(32), 1],
        [1, ["host:1"], "secret", bytes(31), 1],
        [1, ["host:1"], "secret", bytes(32), -1],
        [1, ["host:1"], "secret", bytes(32), "soon"],
        [1, [1], "secret", bytes(32), 1],
        [1, ["host"], "secret", bytes(32), 1],
        [1, ["a..b:1"], "secret", bytes(32), 1],
        [1, ["nul\0l:1"], "secret", bytes(32), 1],
        [1, ["h" * 64 + ":1"], "secret", bytes(32), 1],
        [1, ["host:1"], "secret", bytes(32)],
        {"version": 1},
        [],
        7,
    ],
)
def test_msgpack_of_another_shape_is_refused(fields: object) -> None:
    word = base64.urlsafe_b64encode(msgpack.packb(fields)).rstrip(b"=").decode()
    with pytest.raises(InvalidJoinToken, match="not a join token"):
        decode(word)


def test_another_version_names_both() -> None:
    word = base64.urlsafe_b64encode(msgpack.packb([2, "whatever"])).rstrip(b"=").decode()
    with pytest.raises(InvalidJoinToken, match=r"version 2, this program reads version 1"):
        decode(word)


def test_an_expired_token_says_when_it_expired() -> None:
    TOKEN.check_expiry(1_899_999_999.9)
    with pytest.raises(InvalidJoinToken, match="expired at 2030-03-17 17:46:40 UTC"):
        TOKEN.check_expiry(1_900_000_000)
