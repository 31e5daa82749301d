"""Lists, messages and steps that a party of a handshake refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from rings import make_members

from flower_vfl.alignment.elements import ListError, order_of
from flower_vfl.alignment.groups import Ristretto255, make_group
from flower_vfl.alignment.handshake import Member
from flower_vfl.alignment.messages import RoundMessage
from flower_vfl.alignment.psu import PsuParty
from flower_vfl.errors import ConfigError, PartyError


def at(phase: str, hop: int, owner: str) -> Callable[[RoundMessage], bool]:
    def matches(message: RoundMessage) -> bool:
        header = message.header
        return (header.phase, header.hop, header.owner) == (phase, hop, owner)

    return matches


def run_with(
    change: Callable[[RoundMessage], list[RoundMessage]],
    where: Callable[[RoundMessage], bool],
    may_be_over: bool = False,
) -> list[Member]:
    """Run three parties while one kind of message is replaced; return the members."""
    members = make_members([[1, 2, 3, 4], [3, 4, 5], [1, 9]])
    by_name = {member.name: member for member in members}
    messages = [message for member in members for message in member.start()]
    while messages:
        following = []
        for message in messages:
            for each in change(message) if where(message) else [message]:
                try:
                    following += by_name[each.header.receiver].receive(each)
                except PartyError:
                    receiver = by_name[each.header.receiver]
                    if not may_be_over:
                        assert receiver.aligned is None
                    assert receiver.party._keys is None
                    assert receiver.party._mine is None
                    raise
        messages = following
    return members


WHERE = [
    ("first", 1, "p0"),
    ("first", 2, "p0"),
    ("first", 3, "p0"),
    ("first", 3, "p2"),
    ("blinded", 1, "p1"),
    ("blinded", 3, "p1"),
    ("union", 1, ""),
    ("union", 2, ""),
    ("universe", 3, ""),
]


def with_elements(message: RoundMessage, elements: np.ndarray) -> list[RoundMessage]:
    return [replace(message, elements=elements)]


def identity(message: RoundMessage) -> list[RoundMessage]:
    changed = message.elements.copy()
    changed[0] = 0
    return with_elements(message, changed)


def off_curve(message: RoundMessage) -> list[RoundMessage]:
    changed = message.elements.copy()
    changed[-1] = 255
    return with_elements(message, changed)


def one_less(message: RoundMessage) -> list[RoundMessage]:
    return with_elements(message, message.elements[:-1])


def repeated(message: RoundMessage) -> list[RoundMessage]:
    changed = message.elements.copy()
    changed[1] = changed[0]
    return with_elements(message, changed)


def second_encoding(message: RoundMessage) -> list[RoundMessage]:
    """Send one point twice: once with bit 255, which libsodium 1.0.18 ignores."""
    changed = message.elements.copy()
    changed[-1] = changed[0]
    changed[-1, 31] |= 0x80
    return with_elements(message, changed[order_of(changed)])


def twice(message: RoundMessage) -> list[RoundMessage]:
    return [message, message]


def too_wide(message: RoundMessage) -> list[RoundMessage]:
    return with_elements(message, np.repeat(message.elements, 2, axis=1))


@pytest.mark.parametrize(
    "change",
    [identity, off_curve, one_less, repeated, second_encoding, twice, too_wide],
)
@pytest.mark.parametrize("where", WHERE)
def test_a_bad_list_ends_the_handshake_and_names_the_sender(
    change: Callable[[RoundMessage], list[RoundMessage]], where: tuple[str, int, str]
) -> None:
    bad: list[RoundMessage] = []

    def noting(message: RoundMessage) -> list[RoundMessage]:
        bad.append(message)
        return change(message)

    if change is one_less and where[0] == "union":
        # the next party cannot know the size, but those that have seen it do
        with pytest.raises(
            PartyError, match=r"universal ids are 5 instead of 6|have no universal"
        ):
            run_with(noting, at(*where), may_be_over=True)
        return
    with pytest.raises(PartyError) as caught:
        run_with(noting, at(*where), may_be_over=change is twice)
    assert caught.value.party == bad[0].header.sender
    problems = dict.fromkeys((off_curve, second_encoding), "canonical")
    problem = {identity: "is the identity", **problems}.get(change, "")
    assert problem in str(caught.value)
    assert "nothing of it was kept" in str(caught.value)


@pytest.mark.parametrize("checked", [False, True])
def test_two_encodings_of_a_point_do_not_blame_an_honest_party(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchecked, p1 raises both to the same element, and p2 refuses the list of p1."""
    if not checked:
        monkeypatch.setattr(Ristretto255, "_check_last_bit", lambda *_: None)
    with pytest.raises(PartyError) as caught:
        run_with(second_encoding, at("first", 1, "p0"))
    assert caught.value.party == ("p0" if checked else "p1")
    assert ("canonical" if checked else "repeats") in str(caught.value)


def test_an_owner_cannot_announce_two_numbers() -> None:
    with pytest.raises(PartyError, match="list of 'p0' has 3 elements; it announced 4"):
        run_with(one_less, at("blinded", 1, "p0"))


def test_a_list_is_not_raised_under_two_keys() -> None:
    """The list of the first round as the private list would link the two."""
    firsts: dict[str, RoundMessage] = {}

    def swap(message: RoundMessage) -> list[RoundMessage]:
        if message.header.phase == "first":
            firsts[message.header.owner] = message
            return [message]
        return [replace(message, elements=firsts[message.header.owner].elements)]

    with pytest.raises(PartyError, match="raised before"):
        run_with(swap, lambda each: each.header.hop == 1 and each.header.owner != "")


def test_an_unsorted_list_is_refused() -> None:
    def turned(message: RoundMessage) -> list[RoundMessage]:
        return with_elements(message, message.elements[::-1])

    for where in WHERE:
        if where[0] != "blinded":
            with pytest.raises(PartyError, match="not sorted"):
                run_with(turned, at(*where))


def test_private_elements_in_another_order_are_still_one_bijection() -> None:
    """It gives wrong pairs, which no check can see: parties are semi-honest."""

    def turned(message: RoundMessage) -> list[RoundMessage]:
        return with_elements(message, message.elements[::-1])

    members = run_with(turned, at("blinded", 3, "p0"))
    assert all(member.aligned is not None for member in members)


@pytest.mark.parametrize(
    "changes",
    [
        {"sender": "p2"},
        {"receiver": "p2"},
        {"owner": "p2"},
        {"owner": "unknown"},
        {"owner": ""},
        {"hop": 2},
        {"hop": 0},
        {"hop": 7},
        {"phase": "union"},
        {"phase": "universe", "owner": "", "hop": 3},
        {"phase": "other"},
    ],
)
def test_a_message_with_another_header_is_refused(changes: dict[str, object]) -> None:
    members = make_members([[1, 2], [2, 3], [3]])
    message = members[0].start()[0]
    members[1].start()
    with pytest.raises(PartyError):
        header = replace(message.header, **changes)  # type: ignore[arg-type]
        members[1].receive(replace(message, header=header))
    with pytest.raises(PartyError, match="ended"):
        members[1].receive(message)


def test_no_list_is_raised_after_the_union() -> None:
    members = make_members([[1, 2], [2, 3]])
    (first,) = members[0].start()
    members[1].start()
    with pytest.raises(ListError, match="before all lists of 'p0'"):
        members[1].party.raise_union(first.elements)
    back, _ = members[1].receive(first)
    members[1].party.raise_union(back.elements)
    for second in (members[1].party.raise_both, members[1].party.raise_first):
        with pytest.raises(ListError, match="a second first list"):
            second("p0", first.elements)


def test_steps_belong_to_their_party() -> None:
    members = make_members([[1, 2], [2, 3]])
    lists = members[0].start()
    with pytest.raises(ListError, match="merged by 'p0'"):
        members[1].party.collect("p0", lists[0].elements)
    with pytest.raises(ListError, match="cannot be merged before"):
        members[0].party.merge()
    with pytest.raises(ListError, match="already"):
        members[0].party.raise_union(lists[0].elements)
    with pytest.raises(ListError, match="second first list of 'p0'"):
        members[0].party.announce()
    with pytest.raises(ListError, match="before all lists"):
        members[0].party.finish()


@pytest.mark.parametrize("ring", [["a"], ["a", "a"], ["b", "c"]])
def test_invalid_rings(ring: list[str]) -> None:
    with pytest.raises(ConfigError, match="two or more parties"):
        PsuParty("a", ring, [], make_group(), b"s")
    with pytest.raises(ConfigError, match="unique name"):
        PsuParty("a", ["a", "b"], [], make_group(), b"")
