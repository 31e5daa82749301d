"""What the messages give away: sizes, and nothing that links ids, lists or phases."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from rings import align, make_members, relay, rows_as_bytes

from flower_vfl.alignment import encode_ids
from flower_vfl.alignment.elements import Elements, Group, order_of
from flower_vfl.alignment.groups import Modp, jacobi, make_group
from flower_vfl.alignment.messages import RoundMessage
from flower_vfl.alignment.psu import PsiParty, PsuParty

SETS = [
    [f"person-{n}" for n in r] for r in (range(0, 24), range(12, 30), range(20, 44))
]


OWN = ("blinded", "p1")  # list of the last of two parties


def recorded(
    sets: list[list[str]], kind: type[PsuParty] = PsuParty, group: str = "ristretto255"
) -> list[RoundMessage]:
    messages: list[RoundMessage] = []
    align(sets, kind, group, tap=messages.append)
    return messages


@pytest.mark.parametrize("kind", [PsuParty, PsiParty])
@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("group", ["ristretto255", "modp2048"])
def test_no_id_no_hash_and_no_element_in_two_lists(
    kind: type[PsuParty], parties: int, group: str
) -> None:
    sets = SETS[:parties]
    messages = recorded(sets, kind, group)
    made = make_group(group)
    every = sorted(set().union(*sets))
    encoded = encode_ids(every)
    hashes = {
        text
        for context in (b"", b"session")
        for text in rows_as_bytes(made.hash(encoded, context))
    }
    seen: Counter[bytes] = Counter()
    for message in messages:
        elements = rows_as_bytes(message.elements)
        blob = b"".join(elements)
        assert not any(name.encode() in blob for name in every)
        assert not hashes & set(elements)
        # the universal ids go to several; a complete list meets those of others; and
        # of two parties, the last one finds its own ids in the union that it raises
        alone = parties == 2 and (message.header.phase, message.header.owner) == OWN
        if message.header.phase != "universe" and not complete(message, parties):
            seen.update([] if alone else elements)
    assert seen and max(seen.values()) == 1


def complete(message: RoundMessage, parties: int) -> bool:
    """Whether all have raised it: it is on its way to the merging party."""
    return message.header.phase == "first" and message.header.hop == parties


@pytest.mark.parametrize("parties", [2, 3])
def test_each_receiver_sees_no_element_twice_but_the_merging_party(
    parties: int,
) -> None:
    messages = recorded(SETS[:parties])
    for number in range(parties):
        mine = [each for each in messages if each.header.receiver == f"p{number}"]
        seen = Counter(text for each in mine for text in rows_as_bytes(each.elements))
        if parties == 2 and number:  # its own ids, which it knows in the union anyway
            twice = {text for text, times in seen.items() if times > 1}
            (own,) = [e for e in mine if (e.header.phase, e.header.owner) == OWN]
            assert twice == set(rows_as_bytes(own.elements))
            assert max(seen.values()) == 2
        elif number or parties == 2:
            assert max(seen.values()) == 1
        else:  # it sees which parties share an id, but not the id
            assert 1 < max(seen.values()) <= parties


@pytest.mark.parametrize("shared", [False, True])
def test_three_parties_need_a_key_of_its_own_for_the_blinded_list(shared: bool) -> None:
    """With the key of the first list, p1 would find the ids of p2 in the union."""
    members = make_members(SETS)
    for member in members:
        keys = member.party._keys
        assert keys is not None
        if shared:
            member.party._keys = (keys[0], keys[0], keys[2])
            member.party._check_new = lambda _: None  # type: ignore[method-assign]
    own = members[1].party._keys
    assert own is not None
    seen: dict[tuple[str, str, int], Elements] = {}

    def tap(message: RoundMessage) -> None:
        header = message.header
        if header.receiver == "p1":
            seen[header.phase, header.owner, header.hop] = message.elements

    relay(members, tap)
    group = make_group()
    without_own = group.power(seen["union", "", 1], pow(own[0], -1, group.order))
    blinded = set(rows_as_bytes(seen["blinded", "p2", 2]))
    found = blinded & set(rows_as_bytes(without_own))
    assert found == (blinded if shared else set())


def test_order_does_not_depend_on_the_order_of_the_ids() -> None:
    """The same keys and ids in two orders give the same messages, byte for byte."""
    shuffled = [random.Random(1).sample(ids, len(ids)) for ids in SETS]
    outcomes = []
    keys = None
    for sets in (SETS, shuffled):
        members = make_members(sets)
        if keys is None:
            keys = [member.party._keys for member in members]
        for member, same in zip(members, keys, strict=True):
            member.party._keys = same
        messages: list[RoundMessage] = []
        relay(members, messages.append)
        outcomes.append([each.elements.tobytes() for each in messages])
    assert outcomes[0] == outcomes[1]


def test_the_order_of_a_list_says_nothing_about_the_next() -> None:
    """Ranks of the same ids in two lists are uncorrelated: 400 ids, |r| < 0.2."""
    members = make_members([[*range(400)], [1]])
    assert members[0].party._keys is not None
    s1, s2, s3 = members[0].party._keys
    group = make_group()
    hashed = group.hash(encode_ids([*range(400)]), b"session")
    ranks = [
        np.argsort(order_of(group.power(hashed, key)))
        for key in (s1, s2, group.product(s1, s3))
    ]
    table = np.corrcoef([np.arange(400), *ranks])
    assert np.abs(table - np.eye(4)).max() < 0.2


@pytest.mark.parametrize("bits", [2048, 3072])
def test_jacobi_symbols_are_all_one(bits: int) -> None:
    prime = 2 * make_group(f"modp{bits}").order + 1
    for message in recorded([["a", "b", "c"], ["b", "c", "d"]], group=f"modp{bits}"):
        for text in rows_as_bytes(message.elements):
            assert jacobi(int.from_bytes(text, "big"), prime) == 1


def test_without_the_square_the_symbol_would_link() -> None:
    """The check above can fail: odd exponentiations keep the symbol of a raw hash."""
    prime = Modp(2048).prime
    raw = [random.Random(n).getrandbits(2000) for n in range(40)]
    before = [jacobi(value, prime) for value in raw]
    assert [jacobi(pow(v, 12345, prime), prime) for v in raw] == before
    assert set(before) == {1, -1}


def test_sizes_are_all_that_depends_on_the_ids() -> None:
    """Other ids with the same sizes and overlaps give messages of the same shapes."""

    def shapes(sets: list[list[str]]) -> list[tuple[object, ...]]:
        return [(each.header, each.elements.shape) for each in recorded(sets)]

    renamed = [[name[::-1] + "!" for name in ids] for ids in SETS]
    assert shapes(SETS) == shapes(renamed)


def random_elements(group: Group, count: int) -> Elements:
    """Return elements that nobody knows anything about."""
    names = [random.randbytes(16) for _ in range(count)]
    return group.hash(names, b"simulated")


def simulated(
    real: list[RoundMessage], group: Group, party: PsuParty
) -> list[RoundMessage]:
    """Return the view of p0 or p1 out of its own ids and the sizes (Algorithm 2).

    The peer's elements are random; only how many are shared is as in the real run.
    """
    assert party._keys is not None
    s1, s2, s3 = party._keys
    sizes, shared = {"p0": 24, "p1": 18}, 12
    mine = sizes.pop(party.name)
    (peer,) = sizes.values()
    unknown = random_elements(group, mine)
    other = np.concatenate([unknown[:shared], random_elements(group, peer - shared)])
    universe = random_elements(group, mine + peer - shared)
    rest = group.product(s2, s3)
    lists = {
        ("first", "p0", 2): group.power(unknown, s1),
        ("first", "p0" if party.name == "p1" else "p1", 1): other,
        ("union", "", 1): universe,
        ("universe", "", 2): group.power(universe, rest),
        ("blinded", party.name, 2): universe[:mine],
    }
    outcome = []
    for message in real:
        elements = lists[message.header.phase, message.header.owner, message.header.hop]
        if message.header.phase != "blinded":
            elements = elements[order_of(elements)]
        outcome.append(replace(message, elements=elements))
    return outcome


@pytest.mark.parametrize("place", [0, 1])
def test_a_simulator_that_knows_only_sizes_gives_the_same_view(place: int) -> None:
    """A party runs to its end with a peer that is random; no marginal test differs."""
    members, name = make_members(SETS[:2]), f"p{place}"
    keys = members[place].party._keys
    messages: list[RoundMessage] = []
    real = relay(members, messages.append)[name]
    view = [message for message in messages if message.header.receiver == name]

    party = make_members(SETS[:2])[place]
    party.party._keys = keys
    fake = simulated(view, make_group(), party.party)
    assert [each.elements.shape for each in fake] == [e.elements.shape for e in view]
    started = party.start()
    sent = [message for each in fake for message in party.receive(each)]
    assert party.aligned is not None
    assert party.aligned.counts == real.counts
    assert len(party.aligned.universe) == len(real.universe)
    replies = [each for each in messages if each.header.sender == name]
    assert Counter(each.elements.shape for each in [*started, *sent]) == Counter(
        each.elements.shape for each in replies
    )
    for one, other in zip(view, fake, strict=True):
        assert is_uniform(one.elements) and is_uniform(other.elements)


def is_uniform(elements: Elements) -> bool:
    """Whether the bits of the middle bytes are balanced, within six deviations."""
    bits = np.unpackbits(elements[:, 1:31])
    return bool(abs(bits.mean() - 0.5) < 6 * 0.5 / np.sqrt(bits.size))
