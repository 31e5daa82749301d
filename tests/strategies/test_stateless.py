"""The same run where nothing but Flower's node state survives between messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from torch import Tensor, nn
from vertical_cases import (
    COLUMNS,
    WIDTH,
    HookedGrid,
    StatelessGrid,
    assert_equal,
    features,
    final_states,
    losses,
    make_label,
    make_passive,
    rich_app,
    scores,
)

from flower_vfl import InProcessGrid, PartyError, vertical_client_app
from flower_vfl.parties.checkpoints import from_bytes, to_bytes
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.protocol.messages import Verb, read
from flower_vfl.strategies import Checkpoints, VerticalStrategy

PARTIES, EPOCHS = 3, 2


def strategy() -> VerticalStrategy:
    return VerticalStrategy(
        batch_size=16,
        seed=3,
        valid_fraction=0.2,
        evaluation_rows=5,
        progress=False,
        checkpoints=Checkpoints(every=4, keep_final=True),
    )


def outcome(grid: Grid, folder: Path) -> list[object]:
    result = strategy().start(grid, num_rounds=EPOCHS)
    return [final_states(folder), losses(result), scores(result)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("in-process")
    with InProcessGrid(rich_app(), PARTIES, {"state-dir": str(folder)}) as grid:
        return outcome(grid, folder)


@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(lambda count: -1, id="a new process per message"),
        pytest.param(lambda count: hash((count, 1)) % 3, id="three at random"),
        pytest.param(lambda count: 0 if count < 3 else 1, id="a change after hello"),
    ],
)
def test_final_states_are_bit_equal_to_one_process(
    choose: Callable[[int], int], undisturbed: list[object], tmp_path: Path
) -> None:
    grid = StatelessGrid(rich_app(), PARTIES, {"state-dir": str(tmp_path)}, choose)
    assert_equal(outcome(grid, tmp_path), undisturbed)


def test_lost_replies_do_not_train_twice(
    undisturbed: list[object], tmp_path: Path
) -> None:
    stateless = StatelessGrid(rich_app(), PARTIES, {"state-dir": str(tmp_path)})
    seen: set[str] = set()

    def lose_every_third_once(reply: Message) -> Message | None:
        key = f"{reply.metadata.group_id}-{reply.metadata.src_node_id}"
        if stateless.count % 3 or key in seen:
            return reply
        seen.add(key)
        return None

    grid = HookedGrid(stateless, after=lose_every_third_once)
    assert_equal(outcome(grid, tmp_path), undisturbed)
    assert len(seen) > 10


def test_a_second_start_is_not_taken_for_the_first(tmp_path: Path) -> None:
    """Both starts end with the same turn; a process remembers only the first."""
    now = {"process": 0}

    def two_starts(grid: Grid) -> list[float]:
        now["process"] = 0
        strategy().start(grid, num_rounds=1)
        now["process"] = 1
        second = strategy()
        second.start(grid, num_rounds=1)
        now["process"] = 0
        return list(second.predict("train"))

    expected = two_starts(InProcessGrid(rich_app(), PARTIES))
    grid = StatelessGrid(rich_app(), PARTIES, {}, lambda count: now["process"])
    assert two_starts(grid) == expected


def test_a_request_that_failed_half_way_leaves_no_trace(
    undisturbed: list[object], tmp_path: Path
) -> None:
    """The node state is that of before; a repeated request starts from there."""
    broken = {"left": 1}

    class Fragile(PassiveParty):
        def forward(self, step: int, epoch: int, index: int):  # type: ignore[no-untyped-def]
            embedding = super().forward(step, epoch, index)
            if step == 4 and broken["left"]:
                broken["left"] -= 1
                raise MemoryError("for once")
            return embedding

    def passive(context):  # type: ignore[no-untyped-def]
        party = make_passive(context)
        if context.node_config["partition-id"] == 1:
            party.__class__ = Fragile
        return party

    app = vertical_client_app(passive, make_label)
    stateless = StatelessGrid(
        app, PARTIES, {"state-dir": str(tmp_path)}, lambda count: 0
    )

    def lose_the_error(reply: Message) -> Message | None:
        return None if "error" in read(reply).config else reply

    grid = HookedGrid(stateless, after=lose_the_error)
    assert_equal(outcome(grid, tmp_path), undisturbed)
    assert broken["left"] == 0


def test_a_lost_error_is_reported_again_by_a_party_in_memory() -> None:
    def passive(context):  # type: ignore[no-untyped-def]
        party = make_passive(context)
        if context.node_config["partition-id"] == 2:
            party.embed = lambda split, index: 1 / 0  # type: ignore[assignment,return-value]
        return party

    seen = []

    def lose_the_first_error(reply: Message) -> Message | None:
        if "error" in read(reply).config:
            seen.append(reply.metadata.message_type)
            return None if len(seen) == 1 else reply
        return reply

    inner = InProcessGrid(vertical_client_app(passive, make_label), PARTIES)
    grid = HookedGrid(inner, after=lose_the_first_error)
    with pytest.raises(PartyError, match=r"'passive-2'.*ZeroDivisionError"):
        strategy().start(grid, num_rounds=1)
    assert seen == [Verb.EMBED.value] * 2


class RunningMean(nn.Module):
    """Puts a new tensor in the place of its buffer at every training step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(COLUMNS))
        self.linear = nn.Linear(COLUMNS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        output: Tensor = self.linear(x - self.mean)
        return output


def test_a_forward_pass_is_repeated_from_the_same_buffers() -> None:
    def party() -> PassiveParty:
        torch.manual_seed(0)
        made = PassiveParty(features(1), RunningMean(), name="p", device="cpu")
        made.configure(TrainingConfig(seed=1, batch_size=16))
        return made

    stays, first = party(), party()
    for index in range(3):
        gradient = torch.full((16, WIDTH), index + 1.0)
        embedding = stays.forward(index + 1, 1, index)
        assert torch.equal(first.forward(index + 1, 1, index), embedding)
        second = party()  # the graph does not survive
        second.load_state_dict(from_bytes(to_bytes(first.state_dict())))
        for each in (stays, second):
            each.backward(index + 1, gradient)
        assert_equal(second.state_dict(), stays.state_dict())
        first = second


def test_a_withheld_gradient_leaves_the_model_and_counts_as_a_step() -> None:
    torch.manual_seed(0)
    party = PassiveParty(features(1), nn.Linear(COLUMNS, WIDTH), name="p", device="cpu")
    party.configure(TrainingConfig(seed=1, batch_size=16))
    before = party.model.state_dict()["weight"].clone()
    party.forward(1, 1, 0)
    party.backward(1, None)
    assert party.step == 1
    assert torch.equal(party.model.state_dict()["weight"], before)
