"""Messages: every one survives, and what is no message has an error of its own kind."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.test_loader import fingerprint
from tests.unit.contracts.strategies import values
from weightcache import protocol
from weightcache.client import raised
from weightcache.errors import Mismatch, ProtocolError, VersionSkew, WeightcacheError, tree
from weightcache.fingerprint import diff
from weightcache.protocol import Failure, Hello, decode, encode, failure

MESSAGES = protocol.Message.__args__


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: cls.__name__)
def test_every_message_survives(cls: type) -> None:
    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(values(cls), st.integers(0, 253))
    def check(message: Any, fds: int) -> None:
        assert decode(encode(message, fds), fds) == message

    check()


def test_tags_are_unique_and_stable() -> None:
    tags = {json.loads(encode(Hello("p", "v")))["type"], *protocol._BY_TAG}
    assert len(tags) == len(MESSAGES)
    assert {"hello", "donation-invited", "rank-report"} <= tags


@pytest.mark.parametrize("number", [0, 2, "1", None, 1.0, True, [1], 10**30])
@pytest.mark.parametrize("rest", [{}, {"type": "nothing", "fds": "x"}, {"type": ["hello"], "program": 3}])
def test_another_protocol_is_version_skew_whatever_else_is_there(number: Any, rest: dict[str, Any]) -> None:
    with pytest.raises(VersionSkew, match="install the same version"):
        decode(json.dumps({"protocol": number, **rest}).encode())


def test_no_protocol_at_all_is_version_skew() -> None:
    with pytest.raises(VersionSkew):
        decode(b'{"type": "hello"}')


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\xff\xfe", b"[]", b"1", b"null", b'"hello"', b"{", b"{}x", b"[" * 100_000, b"9" * 10_000],
)
def test_garbage_is_a_protocol_error_and_no_skew(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(data)
    assert type(caught.value) is ProtocolError


@pytest.mark.parametrize(
    "body",
    [
        {"type": "hello", "program": "p", "version": "v"},
        {"type": "hello", "program": "p", "version": "v", "fds": "0"},
        {"type": "hello", "program": "p", "version": "v", "fds": False},
        {"type": "hello", "program": "p", "version": "v", "fds": 1},
        {"type": "nothing", "fds": 0},
        {"type": None, "fds": 0},
        {"type": {}, "fds": 0},
        {"fds": 0},
        {"type": "hello", "fds": 0, "program": "p"},
        {"type": "hello", "fds": 0, "program": "p", "version": "v", "more": 1},
        {"type": "hello", "fds": 0, "program": 1, "version": "v"},
    ],
)
def test_malformed_messages(body: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(json.dumps({"protocol": protocol.PROTOCOL, **body}).encode())
    assert type(caught.value) is ProtocolError


def test_descriptors_that_were_lost_or_pushed_are_noticed() -> None:
    data = encode(protocol.Attached("s", "target", "l", ()), 3)
    for brought in (0, 2, 4):
        with pytest.raises(ProtocolError, match=f"announces 3 descriptors and brought {brought}"):
            decode(data, brought)


@pytest.mark.parametrize("cls", list(tree()), ids=lambda cls: cls.__name__)
def test_every_error_travels(cls: type[WeightcacheError]) -> None:
    sent = decode(encode(failure(cls("a sentence"))))
    assert isinstance(sent, Failure)
    error = raised(sent)
    assert type(error) is cls
    assert str(error) == "a sentence"


def test_a_mismatch_keeps_its_fields() -> None:
    differences = diff(fingerprint(dtype="a"), fingerprint(dtype="b"))
    error = raised(failure(Mismatch("differs"), differences))
    assert isinstance(error, Mismatch)
    assert [(d.field, d.cached, d.engine) for d in error.differences] == [("dtype", "a", "b")]


def test_an_unknown_code_is_still_an_error() -> None:
    error = Failure("from-the-future", "a sentence").error()
    assert type(error) is WeightcacheError
    assert error.message == "a sentence"
