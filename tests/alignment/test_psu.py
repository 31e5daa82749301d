"""Unions and intersections of ids: the sets, the lists sent and their cost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rings import Counting, align, make_members, relay, rows_as_bytes

from flower_vfl.alignment import AlignedIds, encode_ids
from flower_vfl.alignment.elements import ListError
from flower_vfl.alignment.groups import make_group
from flower_vfl.alignment.handshake import Member
from flower_vfl.alignment.messages import RoundMessage
from flower_vfl.alignment.psu import PsiParty, PsuParty

GROUP_NAMES = ["ristretto255", "modp2048", "modp3072"]


def check_union(sets: Sequence[Sequence[object]], found: Sequence[AlignedIds]) -> None:
    """The mapping is a bijection, equal ids meet and no others."""
    union = set().union(*map(set, sets))
    universe = rows_as_bytes(found[0].universe)
    assert len(universe) == len(set(universe)) == len(union)
    uid: dict[object, bytes] = {}
    for ids, each in zip(sets, found, strict=True):
        assert rows_as_bytes(each.universe) == universe
        assert len(each.positions) == len(ids)
        for given_id, position in zip(ids, each.positions, strict=True):
            element = universe[position]
            assert uid.setdefault(given_id, element) == element
    assert set(uid) == union
    assert sorted(uid.values()) == universe


def check_intersection(
    sets: Sequence[Sequence[object]], found: Sequence[AlignedIds]
) -> None:
    shared = set(sets[0]).intersection(*map(set, sets))
    universe = rows_as_bytes(found[0].universe)
    for ids, each in zip(sets, found, strict=True):
        assert rows_as_bytes(each.universe) == universe
        inside = [i for i, row in zip(ids, each.positions, strict=True) if row >= 0]
        assert set(inside) == shared
        assert len(universe) == len(shared)
    rows = [
        {i: row for i, row in zip(ids, each.positions, strict=True) if row >= 0}
        for ids, each in zip(sets, found, strict=True)
    ]
    assert all(each == rows[0] for each in rows)
    assert sorted(rows[0].values()) == [*range(len(shared))]


@st.composite
def id_sets(draw: st.DrawFn) -> list[list[object]]:
    parties = draw(st.integers(2, 5))
    pool = st.one_of(st.integers(-3, 8), st.sampled_from(["1", "2", "é", b"1", b""]))
    return [draw(st.lists(pool, unique=True, max_size=8)) for _ in range(parties)]


@settings(max_examples=25, deadline=None)
@given(id_sets(), st.sampled_from([0, 3]))
def test_union_and_intersection_of_random_sets(
    sets: list[list[object]], padding: int
) -> None:
    union = align(sets, PsuParty)
    check_union(sets, union)
    check_intersection(sets, align(sets, PsiParty, padding=padding))


@pytest.mark.parametrize("group", GROUP_NAMES[1:])
@settings(
    max_examples=3,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(sets=id_sets())
def test_every_group(group: str, sets: list[list[object]]) -> None:
    check_union(sets, align(sets, group=group))
    check_intersection(sets, align(sets, PsiParty, group))


EDGES: list[list[list[object]]] = [
    [[], []],
    [[], [1]],
    [[1], []],
    [[1], [1]],
    [[1], [2]],
    [[1, 2, 3], [3, 1, 2]],
    [[1, 2, 3], ["1", "2", "3"]],
    [[1, 2, 3, 4], [3, 4, 5]],
    [[], [], []],
    [[1], [1], [1], [1], [1]],
    [[1, 2], [2, 3], [3, 1], [], [9]],
]
EMPTY, SOME = EDGES[1], EDGES[7]


@pytest.mark.parametrize(
    ("sets", "group"),
    [
        pytest.param(
            sets,
            group,
            # The steps are the same in every group, and the primes' are slow.
            marks=()
            if group == GROUP_NAMES[0] or sets in (EMPTY, SOME)
            else pytest.mark.extra,
        )
        for group in GROUP_NAMES
        for sets in EDGES
    ],
)
def test_edges(sets: list[list[object]], group: str) -> None:
    check_union(sets, align(sets, group=group))
    check_intersection(sets, align(sets, PsiParty, group))


@pytest.mark.parametrize("parties", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", [PsuParty, PsiParty])
def test_exponentiations_and_exchanges_are_those_of_the_formula(
    parties: int, kind: type[PsuParty]
) -> None:
    chance = random.Random(parties)
    sets = [chance.sample(range(40), 10 + 3 * number) for number in range(parties)]
    members = make_members(sets, kind)
    messages = [message for member in members for message in member.start()]
    by_name = {member.name: member for member in members}
    exchanges = 1
    while messages:
        exchanges += 1
        messages = [
            following
            for message in messages
            for following in by_name[message.header.receiver].receive(message)
        ]
    assert exchanges == 2 * parties + 1
    for ids, member in zip(sets, members, strict=True):
        assert member.aligned is not None
        total = sum(map(len, sets))
        aligned = len(member.aligned.universe)
        counting = member.party.group
        assert isinstance(counting, Counting)
        second = len(ids) if parties > 2 else 0  # a list of its own for the blinded ids
        assert counting.exponentiations == 2 * total + second + aligned
        assert member.party.exponentiations == counting.exponentiations


def test_two_parties_compute_algorithm_1() -> None:
    """Every list is what the paper's steps give, computed by Python's own pow."""
    group = make_group("modp2048")
    prime = 2 * group.order + 1
    ids = {"a": [1, 2, 3, 4], "p": [3, 4, 5]}
    parties = {
        name: PsuParty(name, ["a", "p"], encode_ids(ids[name]), group, b"s")
        for name in ids
    }
    keys = {name: party._keys for name, party in parties.items()}
    assert keys["a"] is not None and keys["p"] is not None
    (s1, s2, s3), (t1, t2, t3) = keys["a"], keys["p"]
    hashed = {
        number: int.from_bytes(group.hash(encode_ids([number]), b"s").tobytes(), "big")
        for number in range(1, 6)
    }

    def listed(numbers: list[int], *exponents: int) -> list[bytes]:
        values = [hashed[number] for number in numbers]
        for exponent in exponents:
            values = [pow(value, exponent, prime) for value in values]
        return sorted(value.to_bytes(256, "big") for value in values)

    sent: dict[tuple[str, str, int], list[bytes]] = {}

    def record(message: RoundMessage) -> None:
        header = message.header
        sent[header.phase, header.owner, header.hop] = rows_as_bytes(message.elements)

    found = relay([Member(party) for party in parties.values()], record)
    assert sent["first", "a", 1] == listed(ids["a"], s1)  # step 3
    assert sent["first", "a", 2] == listed(ids["a"], s1, t1)  # 4
    assert sent["first", "p", 1] == listed(ids["p"], t1)  # 5
    every = [1, 2, 3, 4, 5]
    assert sent["union", "", 1] == listed(every, s1, t1, s2, s3)  # 7, 8
    universe = listed(every, s1, s2, s3, t1, t2, t3)
    assert sent["universe", "", 2] == universe  # 9, 10
    # 11 and 12, with the lists of steps 3 and 5 instead of new ones
    assert sorted(sent["blinded", "a", 2]) == listed(ids["a"], s1, t1, t2, t3)
    assert sorted(sent["blinded", "p", 2]) == listed(ids["p"], t1, s1, s2, s3)
    assert not {("blinded", "a", 1), ("blinded", "p", 1)} & set(sent)
    for name, each in found.items():
        for number, position in zip(ids[name], each.positions, strict=True):
            expected = listed([number], s1, s2, s3, t1, t2, t3)[0]
            assert universe[position] == expected


def test_nothing_is_left_after_the_end() -> None:
    members = make_members([[1, 2], [2, 3]])
    relay(members)
    for member in members:
        party = member.party
        assert party._keys is None and party._messages is None
        assert party._dummies is None
        assert not party._complete and party._mine is None
        with pytest.raises(ListError, match="ended"):
            party.announce()


def test_keys_are_fresh_for_every_session() -> None:
    one, two = (align([[1, 2], [2, 3]]) for _ in range(2))
    assert not set(rows_as_bytes(one[0].universe)) & set(rows_as_bytes(two[0].universe))


def test_what_was_revealed_is_reported() -> None:
    for each in align([[1, 2], [2, 3, 4]]):
        assert each.counts == {"p0": 2, "p1": 3}
        assert len(each.universe) == 4
