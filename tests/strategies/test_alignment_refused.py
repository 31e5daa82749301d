"""Settings, ids and parties with which ids cannot be aligned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from alignment_cases import (
    IDS,
    NAMES,
    TRUSTING,
    handshakes_of,
    make_parties,
    make_strategy,
)
from flwr.app import Message
from vertical_cases import HookedGrid

from flower_vfl import ConfigError, PartyError, in_process
from flower_vfl.alignment import AlignmentSettings, Identity
from flower_vfl.protocol.messages import Verb, read


def test_a_party_without_pins_and_trust_refuses() -> None:
    own = {**dict.fromkeys(NAMES, TRUSTING), "passive-2": AlignmentSettings()}
    with in_process(make_parties(), own) as grid:
        with pytest.raises(PartyError, match="pin them, or declare the") as caught:
            make_strategy().connect(grid)
        assert caught.value.party == "passive-2"
        assert not handshakes_of(grid)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (AlignmentSettings(pins={"label": b"1" * 32}), "needs a private key"),
        (
            AlignmentSettings(Identity(), {"label": b"1" * 32, "passive-1": b"2" * 32}),
            "is not its own key",
        ),
        (AlignmentSettings(Identity(), {}), "is pinned for the party 'label'"),
        (replace(TRUSTING, methods=("psi",)), "does not take part in 'psu', only in"),
        (replace(TRUSTING, normalise="upper"), "unknown normaliser 'upper'"),
    ],
)
def test_settings_of_a_party_that_cannot_work(
    settings: AlignmentSettings, problem: str
) -> None:
    own = {"label": TRUSTING, "passive-1": settings}
    with in_process(make_parties(IDS[:2]), own) as grid:
        with pytest.raises(PartyError, match=problem) as caught:
            make_strategy().connect(grid)
        assert caught.value.party == "passive-1"
        assert not handshakes_of(grid)


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (["a", "A", "b"], r"1 of 3 ids repeat an earlier one after normalisation"),
        ([1.5, 2.0, 3.5], "id at position 0: an id is a text.*not a float"),
        ([True, False, 7], "position 0.*not a bool"),
    ],
)
def test_ids_that_cannot_be_aligned(ids: list[object], problem: str) -> None:
    def lower(given: Any) -> Any:
        return given.lower() if isinstance(given, str) else given

    own = replace(TRUSTING, normalise=lower)
    grid = in_process(make_parties([IDS[0], ids]), own)
    with pytest.raises(PartyError, match=problem) as caught:
        make_strategy().connect(grid)
    assert caught.value.party == "passive-1"


def test_a_party_without_ids() -> None:
    parties = make_parties(IDS[:2])
    parties[1].ids = None
    grid = in_process(parties)
    with pytest.raises(PartyError, match="'passive-1': has no ids to align"):
        make_strategy().connect(grid)


def test_an_empty_intersection_is_an_error() -> None:
    with in_process(make_parties([[1, 2, 3], [4, 5]])) as grid:
        with pytest.raises(ConfigError, match="no id in common"):
            make_strategy("psi", padding=3).connect(grid)
        assert not handshakes_of(grid)


@pytest.mark.parametrize("stage", ["begin", "keys", "relay", "finish", "apply"])
def test_a_party_that_vanishes_is_named_with_the_phase(stage: str) -> None:
    gone: list[int] = []

    def vanish(message: Message) -> None:
        node = message.metadata.dst_node_id
        if message.metadata.message_type == Verb.ALIGN and node == 2:
            gone.extend([node] * (read(message).text("stage") == stage))

    def lose(reply: Message) -> Message | None:
        return None if reply.metadata.src_node_id in gone else reply

    with in_process(make_parties()) as inner:
        grid = HookedGrid(inner, vanish, lose)
        with pytest.raises(PartyError, match="while ids were aligned") as caught:
            make_strategy().connect(grid, timeout=0.1)
        assert caught.value.party == "passive-1"
        assert "did not answer 2 requests" in str(caught.value)
        assert "nothing of it was kept" in str(caught.value)
        assert not handshakes_of(inner)
