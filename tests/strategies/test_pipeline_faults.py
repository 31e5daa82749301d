"""A pipelined run that is cut, resumed, rewound, or loses replies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from pipeline_cases import (
    EPOCHS,
    STEPS,
    rich,
    run,
    stateless,
    strategy,
)
from resume_cases import CountingTransform, PowerCutError
from torch import Tensor
from vertical_cases import (
    HookedGrid,
    PushedGrid,
    assert_equal,
    final_states,
    losses,
    rich_app,
    simple_parties,
)

from flower_vfl import (
    Batch,
    ConfigError,
    Leakage,
    ResidentGrid,
    in_process,
    resident,
)
from flower_vfl.parties.checkpoints import DirectoryStore, from_bytes, to_bytes
from flower_vfl.protocol import replay as sessions
from flower_vfl.protocol.messages import Content, Verb, read, request
from flower_vfl.strategies import (
    Checkpoints,
    Defense,
    VerticalStrategy,
)
from flower_vfl.strategies.messenger import NoReplyError


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with rich(folder) as grid:
        return run(folder, grid)


def cut(message: Message, seen: dict[str, int], verb: Verb, count: int) -> None:
    seen["count"] = seen.get("count", 0) + (message.metadata.message_type == verb)
    if seen["count"] == count:
        raise PowerCutError


@pytest.mark.parametrize(
    ("kind", "verb", "count", "every"),
    [
        pytest.param(HookedGrid, Verb.TRAIN_STEP, 4, 3, id="in mid-epoch"),
        pytest.param(PushedGrid, Verb.TRAIN_STEP, 9, 1, id="one at every step"),
        pytest.param(PushedGrid, Verb.FORWARD, 15, 4, id="one party ahead"),
        pytest.param(HookedGrid, Verb.BACKWARD, 2, 5, id="at the end of an epoch"),
        pytest.param(PushedGrid, Verb.EVALUATE, 2, 5, id="while an epoch is evaluated"),
    ],
)
def test_a_resumed_run_ends_as_the_undisturbed_one(
    kind: type[HookedGrid],
    verb: Verb,
    count: int,
    every: int,
    undisturbed: list[object],
    tmp_path: Path,
) -> None:
    seen: dict[str, int] = {}
    saved = {"checkpoints": Checkpoints(every, tmp_path, keep_final=True)}
    with rich(tmp_path) as grid, pytest.raises(PowerCutError):
        run(tmp_path, kind(grid, lambda m: cut(m, seen, verb, count)), **saved)
    with rich(tmp_path) as grid:
        assert_equal(run(tmp_path, kind(grid), resume=True, **saved), undisturbed)


@pytest.mark.parametrize(
    ("kind", "party", "verb", "count"),
    [
        (HookedGrid, "label", Verb.TRAIN_STEP, 7),
        (PushedGrid, "passive-2", Verb.TRAIN_STEP, 7),
        pytest.param(PushedGrid, "label", Verb.EVALUATE, 2, id="while it evaluates"),
    ],
)
def test_a_party_that_loses_its_memory_is_rewound(
    kind: type[HookedGrid],
    party: str,
    verb: Verb,
    count: int,
    undisturbed: list[object],
    tmp_path: Path,
) -> None:
    grid = rich(tmp_path)
    seen = {"steps": 0, "lost": 0, "asked": 0}

    def lose_memory(message: Message) -> None:
        seen["steps"] += message.metadata.message_type == Verb.TRAIN_STEP.value
        seen["asked"] += message.metadata.message_type == verb.value
        if seen["asked"] == count and not seen["lost"]:
            seen["lost"] = 1
            [found] = [
                key
                for key, session in sessions.sessions.items()
                if session.party.name == party and key[0] == grid.run.run_id
            ]
            del sessions.sessions[found]

    assert_equal(run(tmp_path, kind(grid, lose_memory)), undisturbed)
    assert seen["lost"] and seen["steps"] > EPOCHS * STEPS  # steps were repeated


def test_ctrl_c_waits_for_the_steps_under_way(
    undisturbed: list[object], tmp_path: Path
) -> None:
    class Impatient(CountingTransform):
        def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
            if batch.step == 2 and batch.party == "passive-1":
                os.kill(os.getpid(), signal.SIGINT)
            return super().__call__(gradient, batch)

    Impatient.__name__ = CountingTransform.__name__  # the resumed run has that one
    saved = {"checkpoints": Checkpoints(0, tmp_path, keep_final=True)}
    with rich(tmp_path) as grid, pytest.raises(KeyboardInterrupt):
        run(tmp_path, grid, defense=Defense([Impatient()], noise_seed=2), **saved)
    [tag] = DirectoryStore(tmp_path / "label").tags()
    assert tag in ("step-2", "step-3", "step-4")
    kept = DirectoryStore(tmp_path / "passive-1").load(tag)
    assert [each["step"] - kept["step"] for each in kept["waiting"]] == [1, 2]
    with rich(tmp_path) as grid:
        assert_equal(run(tmp_path, grid, resume=True, **saved), undisturbed)


def lose_every_third() -> Callable[[Message], Message | None]:
    """Return a hook that loses every third reply once."""
    seen: list[str] = []

    def after(reply: Message) -> Message | None:
        key = f"{reply.metadata.group_id}-{reply.metadata.src_node_id}"
        seen.append(key)
        return None if len(set(seen)) % 3 == 0 and seen.count(key) == 1 else reply

    return after


def lost_node() -> Callable[[Message], Message | None]:
    """Return a hook that makes a session end: errors for all that is under way."""
    seen: list[str] = []

    def after(reply: Message) -> Message | None:
        turn = int(reply.metadata.group_id)
        key = f"{turn}-{reply.metadata.src_node_id}"
        seen.append(key)
        if turn % 5 < 2 or reply.metadata.src_node_id != 2 or seen.count(key) > 1:
            return reply
        error = Error(ErrorCode.NODE_UNAVAILABLE, "lost its session")
        return Message(error, reply_to=reply_to(reply))

    return after


def reply_to(reply: Message) -> Message:
    """Return a message that an error can answer like a reply did."""
    message = Message(reply.content, reply.metadata.src_node_id, "query")
    name = reply.metadata.reply_to_message_id
    message.metadata.__dict__["_message_id"] = name
    return message


@pytest.mark.parametrize(
    ("kind", "make", "hook"),
    [
        (HookedGrid, rich, lost_node),
        (HookedGrid, stateless, lose_every_third),
        (PushedGrid, rich, lost_node),
        (PushedGrid, rich, lose_every_third),
    ],
)
def test_a_lost_reply_is_asked_for_again(
    kind: type[HookedGrid],
    make: Callable[[Path], Any],
    hook: Callable[[], Any],
    undisturbed: list[object],
    tmp_path: Path,
) -> None:
    """No party trains twice, though it has handled later requests already."""
    grid = kind(make(tmp_path), after=hook())
    assert_equal(run(tmp_path, grid), undisturbed)


def test_what_was_under_way_in_a_session_that_ends_is_sent_again(
    undisturbed: list[object], tmp_path: Path
) -> None:
    """The node stays in memory; it has done some of the work, but not all."""
    seen = {"steps": 0}
    app = resident(rich_app())
    with ResidentGrid(rich(tmp_path, app), reopen=True) as grid:

        def end_session(message: Message) -> None:
            seen["steps"] += message.metadata.message_type == Verb.FORWARD.value
            if seen["steps"] in (9, 16):  # each party gets one
                seen["steps"] += 1
                server = grid._server
                assert server is not None
                with server.condition:
                    server.end(server.sessions[2], "for the test")

        assert_equal(run(tmp_path, PushedGrid(grid, end_session)), undisturbed)
    assert seen["steps"] > 16


def test_a_party_that_never_answers_is_named() -> None:
    def after(reply: Message) -> Message | None:
        asked = reply.metadata
        silent = asked.message_type == Verb.FORWARD and asked.src_node_id == 3
        return None if silent and int(asked.group_id) > 9 else reply

    for kind in (HookedGrid, PushedGrid):
        label, passive = simple_parties()
        grid = kind(in_process([label, *passive]), after=after)
        made = VerticalStrategy(batch_size=6, pipeline=2, progress=False)
        with pytest.raises(NoReplyError, match="did not answer 2 requests") as caught:
            made.start(grid, num_rounds=1)
        assert (caught.value.party, caught.value.step) == ("passive-2", 5)


def test_a_leak_limit_stops_at_the_same_step_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    """The label party is not ahead of the step that exceeds the limit."""
    folders = [tmp_path / name for name in ("whole", "stopped")]
    found = []
    for folder in folders:
        limit = {"limit": 0.51, "window": 4, "action": "stop"} if found else {}
        options = {"leakage": Leakage(("norm",), **limit)}
        with rich(folder) as grid:
            result = strategy(folder, 2, **options).start(grid, num_rounds=EPOCHS)
        found.append(result)
    assert "leak limit" in found[1].stopped
    stopped = DirectoryStore(folders[1] / "label").load("final")["step"]
    assert stopped % STEPS  # in mid-epoch
    with rich(folders[1]) as grid:
        made = strategy(folders[1], 2, leakage=Leakage(("norm",)))
        result = made.start(grid, num_rounds=EPOCHS, resume=True)
    assert_equal(final_states(folders[1]), final_states(folders[0]))
    assert losses(result) == losses(found[0])


def test_a_resumed_run_has_the_same_pipeline(tmp_path: Path) -> None:
    with rich(tmp_path) as grid:
        strategy(tmp_path, 2).start(grid, num_rounds=1)
    with rich(tmp_path) as grid, pytest.raises(ConfigError, match="pipeline was 2"):
        strategy(tmp_path, 1).start(grid, num_rounds=2, resume=True)


def test_a_node_answers_again_what_can_be_under_way_and_nothing_older() -> None:
    label, passive = simple_parties()
    with in_process([label, *passive]) as grid:
        made = VerticalStrategy(batch_size=6, pipeline=2, progress=False)
        training = made.connect(grid)
        for index in range(6):
            training.step(1, index)
        [turns] = [
            sorted(session.replies)
            for key, session in sessions.sessions.items()
            if key[0] == grid.run.run_id and session.party is passive[0]
        ]
        assert len(turns) == 7  # of the gradients of steps 1 to 5, among others
        state = from_bytes(to_bytes(passive[0].state_dict()))
        for turn in turns:
            [reply] = grid.send_and_receive([request(Verb.FORWARD, 2, turn, Content())])
            assert "error" not in read(reply).config
        asked = request(Verb.FORWARD, 2, turns[0] - 1, Content())
        [reply] = grid.send_and_receive([asked])
        assert f"got request {turns[0] - 1} after" in read(reply).text("error")
        assert_equal(from_bytes(to_bytes(passive[0].state_dict())), state)
