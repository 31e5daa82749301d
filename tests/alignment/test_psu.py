from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rings import Counting, align, make_members, texts

from flower_vfl.alignment import (
    Alignment,
    Letter,
    ListError,
    Member,
    PsiParty,
    PsuParty,
    encode_ids,
    make_group,
    padding_delta,
    relay,
)
from flower_vfl.alignment.padding import dummy_messages, shared_dummies
from flower_vfl.errors import ConfigError, PartyError

GROUP_NAMES = ["ristretto255", "modp2048", "modp3072"]


def check_union(sets: Sequence[Sequence[object]], found: Sequence[Alignment]) -> None:
    """The mapping is a bijection, equal ids meet and no others."""
    union = set().union(*map(set, sets))
    universe = texts(found[0].universe)
    assert len(universe) == len(set(universe)) == len(union)
    uid: dict[object, bytes] = {}
    for ids, each in zip(sets, found, strict=True):
        assert texts(each.universe) == universe
        assert len(each.positions) == len(ids)
        for given_id, position in zip(ids, each.positions, strict=True):
            element = universe[position]
            assert uid.setdefault(given_id, element) == element
    assert set(uid) == union
    assert sorted(uid.values()) == universe


def check_intersection(
    sets: Sequence[Sequence[object]], found: Sequence[Alignment]
) -> None:
    shared = set(sets[0]).intersection(*map(set, sets))
    universe = texts(found[0].universe)
    for ids, each in zip(sets, found, strict=True):
        assert texts(each.universe) == universe
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


@settings(max_examples=60, deadline=None)
@given(id_sets(), st.sampled_from([0, 3]))
def test_union_and_intersection_of_random_sets(
    sets: list[list[object]], padding: int
) -> None:
    union = align(sets, PsuParty)
    check_union(sets, union)
    check_intersection(sets, align(sets, PsiParty, padding=padding))


@pytest.mark.parametrize("group", GROUP_NAMES[1:])
@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(sets=id_sets())
def test_every_group(group: str, sets: list[list[object]]) -> None:
    check_union(sets, align(sets, group=group))
    check_intersection(sets, align(sets, PsiParty, group))


@pytest.mark.parametrize("group", GROUP_NAMES)
@pytest.mark.parametrize(
    "sets",
    [
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
    ],
)
def test_edges(sets: list[list[object]], group: str) -> None:
    check_union(sets, align(sets, group=group))
    check_intersection(sets, align(sets, PsiParty, group))


@pytest.mark.parametrize("parties", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", [PsuParty, PsiParty])
def test_powers_and_exchanges_are_those_of_the_formula(
    parties: int, kind: type[PsuParty]
) -> None:
    chance = random.Random(parties)
    sets = [chance.sample(range(40), 10 + 3 * number) for number in range(parties)]
    members = make_members(sets, kind)
    letters = [letter for member in members for letter in member.open()]
    by_name = {member.name: member for member in members}
    exchanges = 1
    while letters:
        exchanges += 1
        letters = [
            following
            for letter in letters
            for following in by_name[letter.receiver].take(letter)
        ]
    assert exchanges == 2 * parties + 1
    for ids, member in zip(sets, members, strict=True):
        assert member.alignment is not None
        total = sum(map(len, sets))
        aligned = len(member.alignment.universe)
        counting = member.party.group
        assert isinstance(counting, Counting)
        assert counting.powers == 2 * total + len(ids) + aligned


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
    s1, s2, s3 = keys["a"].first, keys["a"].blind, keys["a"].rest
    t1, t2, t3 = keys["p"].first, keys["p"].blind, keys["p"].rest
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

    def record(letter: Letter) -> None:
        sent[letter.phase, letter.owner, letter.hop] = texts(letter.elements)

    found = relay([Member(party) for party in parties.values()], record)
    assert sent["first", "a", 1] == listed(ids["a"], s1)  # step 3
    assert sent["first", "a", 2] == listed(ids["a"], s1, t1)  # 4
    assert sent["first", "p", 1] == listed(ids["p"], t1)  # 5
    every = [1, 2, 3, 4, 5]
    assert sent["union", "", 1] == listed(every, s1, t1, s2, s3)  # 7, 8
    universe = listed(every, s1, s2, s3, t1, t2, t3)
    assert sent["universe", "", 2] == universe  # 9, 10
    assert sorted(sent["blinded", "a", 1]) == listed(ids["a"], s2)  # 11
    assert sorted(sent["blinded", "a", 2]) == listed(ids["a"], s2, t1, t2, t3)
    assert sorted(sent["blinded", "p", 1]) == listed(ids["p"], t2)  # 12
    assert sorted(sent["blinded", "p", 2]) == listed(ids["p"], t2, s1, s2, s3)
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
        assert not party._complete and party._mine is None
        with pytest.raises(ListError, match="ended"):
            party.announce()


def test_keys_are_fresh_for_every_session() -> None:
    one, two = (align([[1, 2], [2, 3]]) for _ in range(2))
    assert not set(texts(one[0].universe)) & set(texts(two[0].universe))


def test_what_was_revealed_is_reported() -> None:
    found = align([[1, 2], [2, 3, 4]])
    for each in found:
        assert each.revealed() == {"p0": 2, "p1": 3, "aligned": 4}


# what is refused ----------------------------------------------------------------------


def at(phase: str, hop: int, owner: str) -> Callable[[Letter], bool]:
    return lambda each: (each.phase, each.hop, each.owner) == (phase, hop, owner)


def run_with(
    change: Callable[[Letter], list[Letter]],
    where: Callable[[Letter], bool],
    may_be_over: bool = False,
) -> list[Member]:
    """Run three parties while one kind of letter is replaced; return the members."""
    members = make_members([[1, 2, 3, 4], [3, 4, 5], [1, 9]])
    by_name = {member.name: member for member in members}
    letters = [letter for member in members for letter in member.open()]
    while letters:
        following = []
        for letter in letters:
            for each in change(letter) if where(letter) else [letter]:
                try:
                    following += by_name[each.receiver].take(each)
                except PartyError:
                    receiver = by_name[each.receiver]
                    if not may_be_over:
                        assert receiver.alignment is None
                    assert receiver.party._keys is None
                    assert receiver.party._mine is None
                    raise
        letters = following
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


def with_elements(letter: Letter, elements: np.ndarray) -> list[Letter]:
    return [replace(letter, elements=elements)]


def identity(letter: Letter) -> list[Letter]:
    changed = letter.elements.copy()
    changed[0] = 0
    return with_elements(letter, changed)


def off_curve(letter: Letter) -> list[Letter]:
    changed = letter.elements.copy()
    changed[-1] = 255
    return with_elements(letter, changed)


def one_less(letter: Letter) -> list[Letter]:
    return with_elements(letter, letter.elements[:-1])


def repeated(letter: Letter) -> list[Letter]:
    changed = letter.elements.copy()
    changed[1] = changed[0]
    return with_elements(letter, changed)


def twice(letter: Letter) -> list[Letter]:
    return [letter, letter]


def too_wide(letter: Letter) -> list[Letter]:
    return with_elements(letter, np.repeat(letter.elements, 2, axis=1))


@pytest.mark.parametrize(
    "change", [identity, off_curve, one_less, repeated, twice, too_wide]
)
@pytest.mark.parametrize("where", WHERE)
def test_a_bad_list_ends_the_handshake_and_names_the_sender(
    change: Callable[[Letter], list[Letter]], where: tuple[str, int, str]
) -> None:
    bad: list[Letter] = []

    def noting(letter: Letter) -> list[Letter]:
        bad.append(letter)
        return change(letter)

    if change is one_less and where[0] == "union":
        # the next party cannot know the size, but those that have seen it do
        with pytest.raises(PartyError, match=r"5 universal ids instead of 6|lack some"):
            run_with(noting, at(*where), may_be_over=True)
        return
    with pytest.raises(PartyError) as caught:
        run_with(noting, at(*where), may_be_over=change is twice)
    assert caught.value.party == bad[0].sender
    problem = {identity: "is the identity", off_curve: "canonical"}.get(change, "")
    assert problem in str(caught.value)
    assert "nothing of it was kept" in str(caught.value)


def test_an_owner_cannot_announce_two_numbers() -> None:
    with pytest.raises(PartyError, match="3 elements of 'p0', who has announced 4"):
        run_with(one_less, at("blinded", 1, "p0"))


def test_a_list_is_not_raised_under_two_keys() -> None:
    """The list of the first round as the private list would link the two."""
    firsts: dict[str, Letter] = {}

    def swap(letter: Letter) -> list[Letter]:
        if letter.phase == "first":
            firsts[letter.owner] = letter
            return [letter]
        return [replace(letter, elements=firsts[letter.owner].elements)]

    with pytest.raises(PartyError, match="raised before"):
        run_with(swap, lambda letter: letter.hop == 1 and letter.owner != "")


def test_an_unsorted_list_is_refused() -> None:
    def turned(letter: Letter) -> list[Letter]:
        return with_elements(letter, letter.elements[::-1])

    for where in WHERE:
        if where[0] != "blinded":
            with pytest.raises(PartyError, match="not sorted"):
                run_with(turned, at(*where))


def test_private_elements_in_another_order_are_still_one_bijection() -> None:
    """It gives wrong pairs, which no check can see: parties are semi-honest."""

    def turned(letter: Letter) -> list[Letter]:
        return with_elements(letter, letter.elements[::-1])

    members = run_with(turned, at("blinded", 3, "p0"))
    assert all(member.alignment is not None for member in members)


@pytest.mark.parametrize(
    "changes",
    [
        {"sender": "p2"},
        {"receiver": "p2"},
        {"owner": "p2"},
        {"owner": "stranger"},
        {"owner": ""},
        {"hop": 2},
        {"hop": 0},
        {"hop": 7},
        {"phase": "union"},
        {"phase": "universe", "owner": "", "hop": 3},
        {"phase": "other"},
    ],
)
def test_a_letter_with_another_address_is_refused(changes: dict[str, object]) -> None:
    members = make_members([[1, 2], [2, 3], [3]])
    letter = members[0].open()[0]
    members[1].open()
    with pytest.raises(PartyError):
        members[1].take(replace(letter, **changes))  # type: ignore[arg-type]
    with pytest.raises(PartyError, match="ended"):
        members[1].take(letter)


def test_no_list_is_raised_after_the_union() -> None:
    members = make_members([[1, 2], [2, 3]])
    first, blinded = members[0].open()
    members[1].open()
    back = members[1].take(first)[0]
    with pytest.raises(ListError, match="before all lists of 'p0'"):
        members[1].party.raise_union(back.elements)
    members[1].take(blinded)
    members[1].party.raise_union(back.elements)
    with pytest.raises(ListError, match="a second first list"):
        members[1].party.raise_first("p0", blinded.elements)


def test_steps_belong_to_their_party() -> None:
    members = make_members([[1, 2], [2, 3]])
    lists = members[0].open()
    with pytest.raises(ListError, match="merged by 'p0'"):
        members[1].party.collect("p0", lists[0].elements)
    with pytest.raises(ListError, match="not yet a list of every party"):
        members[0].party.merge()
    with pytest.raises(ListError, match="already"):
        members[0].party.raise_union(lists[0].elements)
    with pytest.raises(ListError, match="second first list of 'p0'"):
        members[0].party.announce()
    with pytest.raises(ListError, match="before all lists"):
        members[0].party.finish()


@pytest.mark.parametrize("ring", [["a"], ["a", "a"], ["b", "c"]])
def test_rings_that_are_none(ring: list[str]) -> None:
    with pytest.raises(ConfigError, match="two or more parties"):
        PsuParty("a", ring, [], make_group(), b"s")
    with pytest.raises(ConfigError, match="name of its own"):
        PsuParty("a", ["a", "b"], [], make_group(), b"")


# padding ------------------------------------------------------------------------------


def test_padding_blurs_the_intersection_of_a_union() -> None:
    sets = [[*range(20)], [*range(10, 40)]]
    sizes = set()
    for _ in range(12):
        found = align(sets, padding=40)
        assert [len(each.dummies) for each in found] == [40, 40]
        assert found[0].counts == {"p0": 60, "p1": 70}
        sizes.add(60 + 70 - len(found[0].universe) - 10)
        real = set(found[0].positions) | set(found[1].positions)
        assert len(real) == 40  # the union of the real ids
        assert not real & {*found[0].dummies, *found[1].dummies}
    assert len(sizes) > 2 and all(0 <= shared <= 40 for shared in sizes)


def test_shared_dummies_have_the_stated_distribution() -> None:
    from scipy.stats import hypergeom

    for padding in (1, 10, 300):
        expected = hypergeom(2 * padding, padding, padding).pmf(range(padding + 1))
        np.testing.assert_allclose(shared_dummies(padding), expected, rtol=1e-6)
    chances, counts = shared_dummies(1000), np.arange(1001)
    mean = (chances * counts).sum()
    deviation = np.sqrt((chances * (counts - mean) ** 2).sum())
    assert mean == pytest.approx(500)
    assert deviation == pytest.approx(np.sqrt(1000 / 8), rel=1e-3)


def test_dummies_are_a_random_half_of_the_pool() -> None:
    pool: set[bytes] = set()
    for _ in range(40):
        chosen = dummy_messages(5)
        assert len(set(chosen)) == 5
        pool |= set(chosen)
    assert len(pool) == 10
    assert not pool & set(encode_ids([*range(10), b"d", "d"]))
    with pytest.raises(ConfigError, match="padding"):
        dummy_messages(-1)


def test_delta_of_padding() -> None:
    # two of two dummies each, by hand: chances 1/2, 1/2 against the same moved by one
    assert padding_delta(1, 0.0) == pytest.approx(0.5)
    assert padding_delta(1, 5.0) == pytest.approx(0.5)  # no shared dummy: all is known
    assert padding_delta(0, 1.0) == 1.0
    deltas = [padding_delta(padding, 0.5) for padding in (10, 100, 1000)]
    assert deltas == sorted(deltas, reverse=True)
    assert padding_delta(1000, 0.5) < 1e-6
    with pytest.raises(ConfigError, match="epsilon"):
        padding_delta(5, -1)
