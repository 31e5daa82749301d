from __future__ import annotations

from enum import Enum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_vfl.alignment import NORMALISERS, e164, encode_ids, lower_email
from flower_vfl.alignment.ids import encode_id
from flower_vfl.errors import ConfigError

plain_ids = st.one_of(st.text(), st.integers(), st.binary())


def key(given_id: str | int | bytes) -> tuple[str, object]:
    import unicodedata

    if isinstance(given_id, str):
        return "text", unicodedata.normalize("NFC", given_id)
    return type(given_id).__name__, given_id


@given(plain_ids, plain_ids)
def test_two_ids_have_the_same_bytes_only_if_they_are_the_same(
    one: str | int | bytes, other: str | int | bytes
) -> None:
    assert (encode_id(one) == encode_id(other)) == (key(one) == key(other))


@given(st.lists(plain_ids, max_size=4), st.lists(plain_ids, max_size=4))
def test_bytes_of_several_ids_can_be_told_apart(
    one: list[str | int | bytes], other: list[str | int | bytes]
) -> None:
    joined = [b"".join(map(encode_id, ids)) for ids in (one, other)]
    assert (joined[0] == joined[1]) == ([*map(key, one)] == [*map(key, other)])


def test_bytes_by_hand() -> None:
    length = bytes(7)
    assert encode_id("1") == b"s" + length + b"\x01" + b"1"
    assert encode_id(1) == b"i" + length + b"\x01" + b"\x01"
    assert encode_id(-129) == b"i" + length + b"\x02" + b"\xff\x7f"
    assert encode_id(0) == b"i" + length + b"\x01\x00"
    assert encode_id(b"1") == b"b" + length + b"\x01" + b"1"
    assert encode_id("e\u0301") == encode_id("\u00e9")
    assert encode_id("A") != encode_id("a")


def test_numpy_scalars_are_their_values() -> None:
    class Colour(str, Enum):  # noqa: UP042
        RED = "red"

    assert encode_id(Colour.RED) == encode_id("red")
    assert encode_id(np.int64(7)) == encode_id(np.uint8(7)) == encode_id(7)
    assert encode_id(np.str_("x")) == encode_id("x")
    assert encode_id(np.bytes_(b"x")) == encode_id(b"x")
    assert encode_ids(np.array([1, 2])) == encode_ids([1, 2])
    assert encode_ids(np.array(["a", "b"])) == encode_ids(["a", "b"])


@pytest.mark.parametrize(
    "bad", [1.0, True, np.True_, np.float32(1), float("nan"), None, ["a"], "\ud800", 1j]
)
def test_what_is_no_id_is_refused_by_its_position(bad: object) -> None:
    with pytest.raises(ConfigError, match="id at position 2") as caught:
        encode_ids(["secret", "other", bad])
    assert "secret" not in str(caught.value)


def test_duplicates_are_counted_and_not_shown() -> None:
    ids = ["Anna@x.org", "bob@x.org", " anna@X.org", "anna@x.org ", "BOB@x.org"]
    assert len(encode_ids(ids)) == 5
    with pytest.raises(ConfigError) as caught:
        encode_ids(ids, "lower_email")
    problem = str(caught.value)
    assert "3 of 5 ids repeat" in problem
    assert "0 and 2, 0 and 3, 1 and 4" in problem
    assert "anna" not in problem.lower() and "bob" not in problem.lower()
    with pytest.raises(ConfigError, match=r"positions 0 and 1, .*, \.\.\."):
        encode_ids([7] * 20)


def test_a_failing_normaliser_does_not_show_the_id() -> None:
    def look_up(given_id: object) -> str:
        return {"known": "x"}[str(given_id)]

    with pytest.raises(ConfigError, match=r"position 1.*KeyError") as caught:
        encode_ids(["known", "private"], look_up)
    assert "private" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_names_of_normalisers() -> None:
    assert set(NORMALISERS) == {"none", "lower_email", "e164", "whole_number"}
    with pytest.raises(ConfigError, match="e164, lower_email, none"):
        encode_ids(["a"], "soundex")
    assert encode_ids(["A"], "none") == encode_ids(["A"])
    assert encode_ids(["A"], lambda text: str(text).lower()) == encode_ids(["a"])


def test_lower_email() -> None:
    assert lower_email("  Anna.Smith@Example.ORG\n") == "anna.smith@example.org"
    assert lower_email("ＡNNA@x.org") == "anna@x.org"  # full-width A
    for bad in ("", "anna", "@x.org", "anna@", "a b@x.org", "a@b@x.org"):
        with pytest.raises(ConfigError, match="not an e-mail"):
            lower_email(bad)
    with pytest.raises(ConfigError, match="not a int"):
        lower_email(5)


@pytest.mark.parametrize(
    "text",
    ["+49 30 1234567", "0049-30-1234567", "+49 (30) 123.4567", "+49/30/123 45 67"],
)
def test_e164(text: str) -> None:
    assert e164(text) == "+49301234567"


@pytest.mark.parametrize(
    "bad",
    [
        "030 1234567",
        "+49",
        "+0301234567",
        "+" + "1" * 16,
        "+49 30 CALL",
        "",
        "+44 (0)20 7946 0958",
        "+49+301234567",
        49301234567,
    ],
)
def test_e164_refuses_what_it_would_have_to_guess(bad: str | int) -> None:
    with pytest.raises(ConfigError):
        e164(bad)
