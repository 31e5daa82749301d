"""The same draws again: after a resume, a rewind, a second hello, with one key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid
from resume_cases import PowerCutError, cut_at
from torch import Tensor, nn
from vertical_cases import (
    COLUMNS,
    WIDTH,
    HookedGrid,
    StatelessGrid,
    assert_equal,
    features,
    final_states,
    labels,
    losses,
    make_label,
    make_passive,
    rich_app,
    scores,
    simple_parties,
    train,
)

from flower_vfl import (
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    LabelPrivacy,
    Leakage,
    PartyError,
    PassiveParty,
    vertical_client_app,
)
from flower_vfl.protocol import replay as sessions
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.protocol.messages import Verb
from flower_vfl.strategies import Checkpoints, Defense, VerticalStrategy


class Made:
    """Keeps the label parties that an app has made."""

    def __init__(self, text: str, **options: Any) -> None:
        self.text, self.options, self.parties = text, options, []

    def app(self) -> Any:
        def label(context: Context) -> LabelParty:
            privacy = LabelPrivacy.from_text(self.text)
            party = make_label(context, label_privacy=privacy, **self.options)
            self.parties.append(party)
            return party

        return vertical_client_app(make_passive, label)

    def draws(self) -> Tensor:
        """Return the labels that the newest label party trains on."""
        found = self.parties[-1].private
        assert found is not None
        return found.used.clone()


def strategy(folder: Path | None, **options: Any) -> VerticalStrategy:
    given: dict[str, Any] = {
        "batch_size": 16,
        "seed": 5,
        "valid_fraction": 0.3,
        "progress": False,
        "defense": Defense((), at="label", noise_seed=2),
        "checkpoints": Checkpoints(every=2, keep_final=True, folder=folder),
        **options,
    }
    return VerticalStrategy(**given)


def outcome(folder: Path, result: Any) -> list[Any]:
    measured = sorted(map(tuple, result.records))
    return [final_states(folder), losses(result), scores(result), measured]


AUDITED = "auc=0.8,loss=auto,canaries=6"
LEAKAGE = Leakage(("norm", "stale"), coalitions=("all",))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Tensor]:
    folder, made = tmp_path_factory.mktemp("undisturbed"), Made(AUDITED)
    with InProcessGrid(made.app(), 3, {"state-dir": str(folder)}) as grid:
        result = strategy(folder, leakage=LEAKAGE).start(grid, num_rounds=2)
    assert {"leak", "canary_auc"} <= {each.metric for each in result.records}
    return outcome(folder, result), made.draws()


@pytest.mark.parametrize("count", [1, 9, 15])
def test_a_resumed_run_has_the_same_labels_and_ends_the_same(
    count: int, undisturbed: tuple[list[Any], Tensor], tmp_path: Path
) -> None:
    """Steps 1 to 12 are those of the three losses that are tried."""
    config = {"state-dir": str(tmp_path)}
    with (
        InProcessGrid(Made(AUDITED).app(), 3, config) as grid,
        pytest.raises(PowerCutError),
    ):
        cut = cut_at(grid, Verb.TRAIN_STEP, count)
        strategy(tmp_path, leakage=LEAKAGE).start(cut, num_rounds=2)
    made = Made(AUDITED)
    with InProcessGrid(made.app(), 3, config) as grid:
        again = strategy(tmp_path, leakage=LEAKAGE)
        result = again.start(grid, num_rounds=2, resume=True)
    assert torch.equal(made.draws(), undisturbed[1])
    assert_equal(outcome(tmp_path, result), undisturbed[0])


@pytest.mark.parametrize("party", ["label", "passive-2"])
def test_a_rewound_run_has_the_same_labels_and_ends_the_same(
    party: str, undisturbed: tuple[list[Any], Tensor], tmp_path: Path
) -> None:
    made = Made(AUDITED)
    grid = InProcessGrid(made.app(), 3, {"state-dir": str(tmp_path)})
    seen = {"steps": 0}

    def lose_memory(message: Message) -> None:
        seen["steps"] += message.metadata.message_type == Verb.TRAIN_STEP.value
        if seen["steps"] == 15:
            seen["steps"] += 1
            for key, session in list(sessions.sessions.items()):
                if key[0] == grid.run.run_id and session.party.name == party:
                    del sessions.sessions[key]

    hooked = HookedGrid(grid, lose_memory)
    result = strategy(tmp_path, leakage=LEAKAGE).start(hooked, num_rounds=2)
    assert seen["steps"] > 16
    assert torch.equal(made.draws(), undisturbed[1])
    assert_equal(outcome(tmp_path, result), undisturbed[0])


def test_without_a_process_that_stays_the_labels_are_the_same(
    undisturbed: tuple[list[Any], Tensor], tmp_path: Path
) -> None:
    made = Made(AUDITED)
    grid = StatelessGrid(made.app(), 3, {"state-dir": str(tmp_path)})
    result = strategy(tmp_path, leakage=LEAKAGE).start(grid, num_rounds=2)
    assert torch.equal(made.draws(), undisturbed[1])
    assert_equal(outcome(tmp_path, result), undisturbed[0])


def connected(made: Made, grid: Grid | None = None) -> Tensor:
    """Set a run up; return the labels that it would train on."""
    hidden = Defense((), at="label")
    strategy(None, defense=hidden).connect(grid or InProcessGrid(made.app(), 3))
    return made.draws()


def test_trainings_with_one_key_have_the_same_labels() -> None:
    first = connected(Made("auc=0.7,key=3"))
    assert torch.equal(connected(Made("auc=0.7,key=3,loss=plain")), first)
    for text in ("auc=0.7,key=4", "auc=0.71,key=3", "auc=0.7"):
        assert not torch.equal(connected(Made(text)), first), text


def test_every_run_has_its_own_key_without_one() -> None:
    made = Made("auc=0.7")
    assert not torch.equal(connected(made), connected(made))


@pytest.mark.parametrize("stateless", [True, False])
def test_a_server_that_configures_a_run_again_gets_the_same_labels(
    stateless: bool,
) -> None:
    """Otherwise it would average the noise away, one set-up after the other."""
    made = Made("auc=0.7", trust_server=False)
    nodes: list[dict[str, Any]] = [{"role": "label", "num-partitions": 3}]
    nodes[0]["min-batch"] = 1
    nodes += [{"role": "passive", "partition-id": i} for i in (1, 2)]
    grid: Grid = InProcessGrid(made.app(), nodes)
    if stateless:
        grid = StatelessGrid(made.app(), nodes, {})
    first = connected(made, grid)
    for _ in range(3):
        assert torch.equal(connected(made, grid), first)


def test_a_hello_in_a_run_does_not_bring_true_labels_back() -> None:
    """Nor does it forget the key: a server may greet whenever it likes."""
    label, passive = simple_parties(label_privacy=LabelPrivacy(auc=0.6, loss="plain"))
    train([label, *passive], epochs=1)
    assert label.private is not None
    drawn, key = label.private.used.clone(), label.private.key
    assert not torch.equal(drawn, label.private.true)
    label.describe(b"another hello")
    found = label.train_step(
        label.step + 1, 2, 0, {p.name: p.forward(p.step + 1, 2, 0) for p in passive}
    )
    rows = label.configured().training_batches(2)[0]
    assert torch.equal(found.labels, drawn[rows])
    assert label.private.key == key != 0


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        (bytes(65), "auc=0.6"),  # a server chooses the key; of digests, it is too long
        (b"", "auc=0.6,mechanism=laplace"),  # which is not for classes
    ],
    ids=["key too long", "wrong mechanism"],
)
def test_a_hello_that_fails_does_not_bring_true_labels_back(
    key: bytes, setting: str
) -> None:
    """A server may go on all the same."""
    known = labels()
    label = LabelParty(
        known,
        CrossEntropy(nn.Linear(WIDTH, 1)),
        name="bank",
        ids=[f"customer {i}" for i in range(len(known))],
        label_privacy=LabelPrivacy.from_text(setting),
        device="cpu",
    )
    with pytest.raises((ValueError, PartyError)):
        label.describe(key)
    label.configure(TrainingConfig(1, 20, parties={"shop": (WIDTH,)}))
    rows = label.configured().training_batches(1)[0]
    try:
        found = label.train_step(1, 1, 0, {"shop": torch.zeros(len(rows), WIDTH)})
    except PartyError as error:
        assert "has no labels" in str(error)
    else:
        assert label.private is not None
        assert torch.equal(found.labels, label.private.used[rows])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("auc=0.7,key=3", "auc=0.7,key=4"),
        ("auc=0.7,key=3", "auc=0.6,key=3"),
        ("auc=0.7,key=3", "auc=0.7,key=3,mechanism=gaussian"),
        ("auc=0.7", "auc=0.7,key=3"),
        ("auc=0.7", ""),
        ("", "auc=0.7"),
    ],
)
def test_other_draws_cannot_resume_a_run(
    first: str, second: str, tmp_path: Path
) -> None:
    config = {"state-dir": str(tmp_path)}

    def app(text: str) -> Any:
        named = f"{text},loss=plain" if text else ""
        return Made(named).app() if text else rich_app()

    with InProcessGrid(app(first), 3, config) as grid, pytest.raises(PowerCutError):
        strategy(tmp_path).start(cut_at(grid, Verb.TRAIN_STEP, 4), num_rounds=2)
    with (
        InProcessGrid(app(second), 3, config) as grid,
        pytest.raises(PartyError, match="the resumed run") as caught,
    ):
        strategy(tmp_path).start(grid, num_rounds=2, resume=True)
    assert caught.value.party == "label" and caught.value.remedy


def test_a_drawn_key_is_kept_by_a_resumed_run(tmp_path: Path) -> None:
    """Without key, ledger and noise seed, as in a deployment."""
    config, hidden = {"state-dir": str(tmp_path)}, Defense((), at="label")
    made = Made("auc=0.7,loss=plain", trust_server=False)
    with InProcessGrid(made.app(), 3, config) as grid, pytest.raises(PowerCutError):
        cut = cut_at(grid, Verb.TRAIN_STEP, 4)
        strategy(tmp_path, defense=hidden).start(cut, num_rounds=2)
    first = made.draws()
    with InProcessGrid(made.app(), 3, config) as grid:
        strategy(tmp_path, defense=hidden).start(grid, num_rounds=2, resume=True)
    assert len(made.parties) > 1 and torch.equal(made.draws(), first)
    assert int(final_states(tmp_path)["label"]["label_key"], 16) > 2**64


def test_two_ids_of_one_text_are_refused() -> None:
    """Their rows would have one draw, which tells whether their labels are equal."""
    label, passive = simple_parties(label_privacy=LabelPrivacy(auc=0.6))
    for party in (label, *passive):
        party.ids = [7, "7", *range(100, 100 + label.own_rows - 2)]
    with pytest.raises(PartyError, match="two ids are the same text"):
        train([label, *passive], epochs=1)


def test_ids_and_not_places_decide_about_draws() -> None:
    """The same rows in another order, or among others, have the same answers."""
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    found = {}
    for name, rows in (("as they are", torch.arange(60)), ("mixed", order)):
        objective = CrossEntropy(nn.Linear(WIDTH, 1))
        party = LabelParty(
            labels()[rows],
            objective,
            ids=[f"customer {i}" for i in rows.tolist()],
            label_privacy=LabelPrivacy(auc=0.6, key=2, loss="plain"),
        )
        passive = PassiveParty(
            features(1)[rows], nn.Linear(COLUMNS, WIDTH), ids=party.ids
        )
        train([party, passive], epochs=1)
        assert party.private is not None
        found[name] = party.private.used
    assert torch.equal(found["mixed"], found["as they are"][order])
