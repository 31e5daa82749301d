"""Encoding of ids as bytes, and dummy ids that blur the size of the intersection.

An id is a text, an integer or bytes: ``1``, ``"1"`` and ``b"1"`` are three ids. Floats
are refused: a table makes them of an integer column with gaps, and two tables need not
round in the same way. Errors name positions, never an id, because they end up in logs.

All parties know one pool of ``2 * padding`` dummy ids, and each adds a secret half of
it, drawn for this session: the number of dummies that two parties share is random.
docs/alignment.md says what this hides, and from whom.
"""

import math
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from flower_vfl.errors import ConfigError, check_name, require

Id = str | int | bytes
Normaliser = Callable[[Id], Id]

_SHOWN = 5  # positions in an error
_SEPARATORS = str.maketrans("", "", " \t\u00a0-.()/\u2010\u2011\u2013")


def plain(given: object) -> Id:
    """Return an id as Python's own text, integer or bytes."""
    if isinstance(given, str):
        return str.__str__(given)  # the value of an enumeration's member
    if isinstance(given, bytes):
        return bytes(given)
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        return int(given)
    raise ConfigError(
        f"an id is a text, an integer or bytes, not a {type(given).__name__}"
    )


def encode_id(given: object) -> bytes:
    """Return the encoding of one id: type, length, value."""
    value = plain(given)
    if isinstance(value, str):
        try:
            kind, text = b"s", unicodedata.normalize("NFC", value).encode()
        except UnicodeEncodeError:
            raise ConfigError("an id is not valid Unicode") from None
    elif isinstance(value, int):
        kind = b"i"
        text = value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
    else:
        kind, text = b"b", value
    return kind + len(text).to_bytes(8, "big") + text


def encode_ids(
    ids: Iterable[object], normalise: Normaliser | str | None = None
) -> list[bytes]:
    """Return the encoding of every id; equal ids are an error.

    Parameters
    ----------
    ids : Iterable[object]
        Texts, integers or bytes.
    normalise : Normaliser | str | None (default: None)
        Maps different spellings of an id to one: a function, or a name of
        `NORMALISERS`.

    Examples
    --------
    >>> encode_ids(["a@x.org"]) == encode_ids([" A@x.org"], "lower_email")
    True
    """
    if not callable(normalise):
        check_name("normaliser", normalise or "none", NORMALISERS)
        normalise = NORMALISERS[normalise or "none"]
    messages: list[bytes] = []
    for position, given in enumerate(ids):
        try:
            messages.append(encode_id(normalise(plain(given))))
        except ConfigError as error:
            raise ConfigError(f"id at position {position}: {error}") from None
        except Exception as error:  # of a normaliser; its message may hold the id
            problem = f"the normaliser failed with {type(error).__name__}"
            raise ConfigError(f"id at position {position}: {problem}") from None
    first: dict[bytes, int] = {}
    repeats = [
        f"{first[message]} and {position}"
        for position, message in enumerate(messages)
        if first.setdefault(message, position) != position
    ]
    if repeats:
        shown = ", ".join(repeats[:_SHOWN])
        shown += ", ..." if len(repeats) > _SHOWN else ""
        raise ConfigError(
            f"{len(repeats)} of {len(messages)} ids repeat an earlier one after "
            f"normalisation (positions {shown}); keep one row per id"
        )
    return messages


def lower_email(given: Id) -> Id:
    """Return an e-mail address in lower case, without surrounding blanks.

    Parameters
    ----------
    given : Id
        A text with one ``@`` and something on either side of it.

    Examples
    --------
    >>> lower_email(" Ada@Example.org")
    'ada@example.org'
    """
    if not isinstance(given, str):
        raise ConfigError(f"an e-mail address is a text, not a {type(given).__name__}")
    text = unicodedata.normalize("NFKC", given).strip().lower()
    name, at, host = text.rpartition("@")
    if not (name and at and host) or "@" in name or any(map(str.isspace, text)):
        raise ConfigError("this is not an e-mail address")
    return text


def e164(given: Id) -> Id:
    """Return a phone number in the format E.164: ``+``, country code, number.

    Blanks, dashes, dots, slashes and brackets are removed, and ``00`` at the start
    becomes ``+``. A number without a country code is refused, because a guess could
    give two people the same id.

    Parameters
    ----------
    given : Id
        A text.

    Examples
    --------
    >>> e164("0049 (30) 123-456")
    '+4930123456'
    """
    if not isinstance(given, str):
        kind = type(given).__name__
        raise ConfigError(f"a phone number is a text, not a {kind}: the + gets lost")
    text = unicodedata.normalize("NFKC", given)
    if "(0)" in text:  # +44 (0)20: the zero is not dialled from abroad
        raise ConfigError("a phone number must not contain '(0)'; omit that zero")
    text = text.translate(_SEPARATORS)
    if text.startswith("00"):
        text = "+" + text[2:]
    digits = text[1:]
    if not (text.startswith("+") and digits.isascii() and digits.isdigit()):
        raise ConfigError("this is no phone number with country code: +49 30 1234")
    if digits.startswith("0") or not 7 <= len(digits) <= 15:
        raise ConfigError("an E.164 number has 7 to 15 digits and starts with 1 to 9")
    return text


def _whole_number(given: Id) -> Id:
    """Return a whole number without leading zeros or zeros after a decimal point."""
    found = re.fullmatch(r"([+-]?[0-9]{1,99})(\.0*)?", str(given).strip())
    if not found:
        raise ConfigError("this is not a whole number")
    return str(int(found[1]))


NORMALISERS: dict[str, Normaliser] = {
    "none": plain,
    "lower_email": lower_email,
    "e164": e164,
    "whole_number": _whole_number,
}


def spelled_alike(first: set[str], second: set[str]) -> tuple[str, str, str] | None:
    """Return a normaliser with which more ids are equal, and an id of either table."""
    found, most = None, len(first & second)
    if most == min(len(first), len(second)):
        return None
    for name, change in NORMALISERS.items():
        forms: list[dict[Id, str]] = [{}, {}]
        for ids, form in zip((first, second), forms, strict=True):
            for each in sorted(ids):
                with suppress(ConfigError):
                    form[change(each)] = each
        equal = [form for form in forms[0] if form in forms[1]]
        if len(equal) > most:
            most = len(equal)
            other = next(form for form in equal if forms[0][form] != forms[1][form])
            found = name, forms[0][other], forms[1][other]
    return found


def dummy_messages(padding: int) -> list[bytes]:
    """Return a secret random half of the pool of dummy ids."""
    require(padding >= 0, "padding", "at least 0", padding)
    chosen = secrets.SystemRandom().sample(range(2 * padding), padding)
    return [b"d" + (8).to_bytes(8, "big") + n.to_bytes(8, "big") for n in chosen]


def padding_delta(padding: int, epsilon: float) -> float:
    """Return the δ for which the blurred size is (ε, δ)-differentially private.

    Parameters
    ----------
    padding : int
        Number of dummy ids of each party.
    epsilon : float
        ε, at least 0.

    Examples
    --------
    >>> print(f"{padding_delta(100, 0.5):.4f}")
    0.0056
    """
    from scipy.stats import hypergeom  # a second, which no run needs

    require(epsilon >= 0, "epsilon", "at least 0", epsilon)
    shared = hypergeom(2 * padding, padding, padding)  # number of common dummies
    chances = shared.pmf(np.arange(padding + 2))
    shifted = np.append(0.0, chances[:-1])  # one id more in the intersection
    excess = np.maximum(chances - math.exp(epsilon) * shifted, 0).sum()
    return float(min(1.0, excess))
