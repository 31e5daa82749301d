"""A node's own policy wins over the server's word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from flwr.app import Context
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from flower_vfl import (
    ConfigError,
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    NodePolicy,
    PartyError,
    PassiveParty,
    vertical_client_app,
)
from flower_vfl.parties.policies import reported
from flower_vfl.protocol.messages import (
    Content,
    TensorArray,
    Verb,
    read,
    request,
    to_tensor,
)
from flower_vfl.protocol.residence import RESIDENT
from flower_vfl.strategies import (
    Defense,
    EarlyStopping,
    VerticalStrategy,
    build_defense,
)
from flower_vfl.strategies.setup import setup

ROWS, WIDTH = 400, 4
OPEN: dict[str, Any] = {
    "min-batch": 1,
    "min-evaluation": 1,
    "report-loss": "all",
    "report-metrics": "all",
    "report-predictions": "all",
    "min-learning-rate": 0.0,
}


def labels() -> Tensor:
    stream = torch.Generator().manual_seed(3)
    return torch.randint(0, 2, (ROWS,), generator=stream).float()


def grid(trust: bool = False, **own: Any) -> InProcessGrid:
    """Return a label party and a passive one as nodes of a deployment."""

    def passive(context: Context) -> PassiveParty:
        stream = torch.Generator().manual_seed(1)
        data = torch.randn(ROWS, 3, generator=stream)
        return PassiveParty(data, nn.Linear(3, WIDTH), device="cpu")

    def label(context: Context) -> LabelParty:
        return LabelParty(
            labels(),
            CrossEntropy(nn.Linear(WIDTH, 1)),
            build_defense=build_defense,
            device="cpu",
        )

    config = {name.replace("_", "-"): value for name, value in own.items()}
    nodes: list[Mapping[str, Any]] = [
        {"role": "label", "trust-server": trust, **config},
        {"role": "passive", "name": "shop"},
    ]
    return InProcessGrid(vertical_client_app(passive, label), nodes)


def strategy(**options: Any) -> VerticalStrategy:
    given = {"batch_size": 40, "progress": False, "test_fraction": 0.3, **options}
    return VerticalStrategy(**given)


def losses_of_single_rows(own: dict[str, Any]) -> list[float]:
    """Ask the label party for the loss of every row alone, as a curious server."""
    training = strategy(
        batch_size=1, test_fraction=0.0, evaluate_every=0, learning_rate=1e-30
    ).connect(grid(**own), num_rounds=1)
    found = []
    for index in range(training.steps):
        zeros = TensorArray(torch.zeros(1, WIDTH))
        at = {"step": index + 1, "epoch": 1, "index": index}
        asked = {"label": Content(arrays={"shop": zeros}, **at)}
        reply = training.messenger.ask(Verb.TRAIN_STEP, asked, index + 1)["label"]
        found.append(reply.metrics["loss"])
    return found


def test_a_server_that_asks_row_by_row() -> None:
    """The first version answered: two values of the loss, one for each label."""
    found = losses_of_single_rows({**OPEN})
    order = strategy(batch_size=1, test_fraction=0.0).connect(grid(**OPEN))._schedule
    rows = torch.cat(list(order.training_batches(1)))
    score = torch.tensor(found)
    auc = roc_auc_score(labels()[rows].numpy(), score.numpy())
    assert max(auc, 1 - auc) == 1.0
    with pytest.raises(PartyError, match=r"learning rate 1e-30.*min-learning-rate"):
        losses_of_single_rows({})
    with pytest.raises(PartyError, match=r"a batch of 1 rows.*min-batch"):
        losses_of_single_rows({"min-learning-rate": 0.0})
    with pytest.raises(KeyError, match="loss"):
        losses_of_single_rows({"min-learning-rate": 0.0, "min-batch": 1})


def test_a_run_that_was_refused_cannot_go_on() -> None:
    nodes = grid()
    with pytest.raises(PartyError, match="min-batch"):
        strategy(batch_size=1).connect(nodes)
    zeros = {"shop": TensorArray(torch.zeros(1, WIDTH))}
    asked = request(Verb.TRAIN_STEP, 1, 99, Content(arrays=zeros, step=1, epoch=1))
    reply = read(next(iter(nodes.send_and_receive([asked]))))
    assert "before the run was configured" in reply.text("error")


def test_a_single_last_row_joins_the_batch_before() -> None:
    training = strategy(batch_size=93).connect(grid())
    sizes = [len(rows) for rows in training._schedule.training_batches(1)]
    assert sizes == [93, 93, 94]


def test_the_last_batch_of_an_epoch_counts() -> None:
    with pytest.raises(PartyError, match=r"20 rows as the last one.*of 124 would do"):
        strategy(batch_size=130).start(grid())


def test_what_leaves_a_label_party_that_does_not_trust_the_server() -> None:
    result = strategy().start(grid(), num_rounds=2)
    assert not any(
        "loss" in metrics for metrics in result.train_metrics_clientapp.values()
    )
    assert not any(any(each.values()) for each in result.evaluations.values())


def test_what_leaves_where_its_owner_allows_it() -> None:
    for trust, own in ((True, {}), (False, OPEN)):
        result = strategy().start(grid(trust, **own), num_rounds=2)
        assert all(
            metrics["loss"] > 0 for metrics in result.train_metrics_clientapp.values()
        )
        assert result.evaluations[2]["test"]["auc"] >= 0
    shown = strategy().start(grid(report_metrics="rounded"), num_rounds=2)
    metrics = shown.evaluations[2]["test"]
    assert metrics and all(round(v, 2) == v for v in metrics.values())


@pytest.mark.parametrize(
    ("own", "options", "words"),
    [
        ({}, {"learning_rate": 100.0}, "max-learning-rate"),
        ({"require_sealed": True}, {}, "require-sealed"),
        ({}, {"test_fraction": 0.1}, r"about 40 rows.*min-evaluation"),
        ({}, {"valid_fraction": 0.3, "early_stopping": EarlyStopping()}, "report-metr"),
    ],
)
def test_settings_outside_the_policy(
    own: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises((PartyError, ConfigError), match=words):
        strategy(**options).start(grid(**own))


def test_predictions() -> None:
    for own, words in (
        ({}, "report-predictions"),
        ({"min_evaluation": 500}, "min-evaluation"),
    ):
        asked = strategy(evaluate_every=0)
        asked.start(grid(**own))
        with pytest.raises(PartyError, match=words):
            asked.predict()
    asked = strategy(evaluate_every=0)
    asked.start(grid(report_predictions="rounded"))
    found = torch.from_numpy(asked.predict())
    assert torch.equal(found, torch.round(found, decimals=2))


def test_a_run_may_go_back_so_often_only() -> None:
    training = strategy().connect(grid(max_restores=2))
    training.checkpoint("step-0")
    training.restore("step-0")
    training.restore("step-0")
    with pytest.raises(PartyError, match=r"go back.* 3 times.*max-restores"):
        training.restore("step-0")


def test_a_server_that_configures_a_run_again_and_again() -> None:
    """Each time shows another noisy gradient of the same rows, as going back does."""
    means = {}
    for count in (0, 1, 40):
        training = strategy(
            batch_size=ROWS,
            test_fraction=0.0,
            evaluate_every=0,
            defense=Defense("iso:t=25", at="label"),
        ).connect(grid(max_restores=40))
        rows = training._schedule.training_batches(1)[0]
        stream = torch.Generator().manual_seed(4)
        sent = torch.randn(len(rows), WIDTH, generator=stream)
        found = []
        for _ in range(count + 1):
            asked = Content(arrays={"shop": TensorArray(sent)}, step=1, epoch=1)
            reply = training.messenger.ask(Verb.TRAIN_STEP, {"label": asked}, 1)
            found.append(to_tensor(reply["label"].arrays["shop"]))
            if len(found) <= count:
                setup(training.strategy, training.messenger, reuse=True)
        mean, known = torch.stack(found).mean(0), labels()[rows]
        direction = mean[known == 1].mean(0) - mean[known == 0].mean(0)
        means[count] = roc_auc_score(known.numpy(), (mean @ direction).numpy())
    assert means[0] < 0.8 and means[40] > 0.9, means
    with pytest.raises(PartyError, match=r"41 times.*max-restores"):
        setup(training.strategy, training.messenger, reuse=True)


def learned_from_errors(resident: bool, **own: Any) -> list[int]:
    """Have the loss overflow if two rows have the label 0, as a curious server.

    Returns the labels of the rows for which it did.
    """
    nodes = grid(**own)
    for context in () if resident else nodes._contexts.values():
        del context.__dict__[RESIDENT]
    training = strategy(
        evaluate_every=0, defense=Defense("iso:t=4", at="label")
    ).connect(nodes)
    label = nodes.parties()["label"]
    assert isinstance(label, LabelParty) and label.schedule is not None
    for weight in label.objective.parameters():
        torch.nn.init.ones_(weight)
    found: list[int] = []
    batches: list[dict[str, Any]] = [
        {"epoch": epoch, "index": index, "rows": rows}
        for epoch in range(1, 31)
        for index, rows in enumerate(label.schedule.training_batches(epoch))
    ]
    for step, batch in enumerate(batches, start=1):
        rows = batch.pop("rows")
        for other in range(1, len(rows)):
            sent = torch.zeros(len(rows), WIDTH)
            sent[[0, other], 0] = torch.finfo(torch.float32).max
            asked = Content(arrays={"shop": TensorArray(sent)}, step=step, **batch)
            try:
                training.messenger.ask(Verb.TRAIN_STEP, {"label": asked}, step)
            except PartyError as error:
                if "max-restores" in str(error):
                    raise
                assert error.problem == "its loss is NaN or infinite"
                found += labels()[rows[[0, other]]].tolist()
            else:  # one of the two has another label, and the step is over
                break
    return found


@pytest.mark.parametrize("resident", [True, False])
def test_a_server_that_learns_from_errors(resident: bool) -> None:
    """Without a limit they reveal labels, though the loss is not reported."""
    found = learned_from_errors(resident, min_batch=1, max_restores=1000)
    assert len(found) > 22 and not any(found)
    with pytest.raises(PartyError, match=r"after errors, 11 times.*max-restores"):
        learned_from_errors(resident)


def test_a_server_that_trains_on_one_batch_again_and_again() -> None:
    """Marvell's bound is for one epoch, which would never be over."""
    defense = Defense("marvell:auc=0.65,over=run,epochs=1", at="label")
    training = strategy(
        batch_size=200, test_fraction=0.0, evaluate_every=0, defense=defense
    ).connect(grid())
    sent = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(4))
    again: dict[str, Any] = {"arrays": {"shop": TensorArray(sent)}, "epoch": 1}
    training.messenger.ask(Verb.TRAIN_STEP, {"label": Content(step=1, **again)}, 1)
    with pytest.raises(PartyError, match="batch 0 of epoch 1, which is step 1"):
        training.messenger.ask(Verb.TRAIN_STEP, {"label": Content(step=2, **again)}, 2)


def test_going_back_after_a_party_was_lost_counts_once() -> None:
    training = strategy().connect(grid(max_restores=2))
    training.checkpoint("step-0")
    for _ in range(2):  # as a run does whose party has lost its memory
        setup(training.strategy, training.messenger, reuse=True)
        training.restore("step-0")
    with pytest.raises(PartyError, match=r"3 times.*max-restores"):
        training.restore("step-0")


def test_going_back_after_a_step_counts() -> None:
    """Also in a run that was configured again, which counted for itself."""
    training = strategy().connect(grid(max_restores=1))
    training.checkpoint("step-0")
    setup(training.strategy, training.messenger, reuse=True)
    zeros = {"shop": TensorArray(torch.zeros(40, WIDTH))}
    sent = Content(arrays=zeros, step=1, epoch=1)
    training.messenger.ask(Verb.TRAIN_STEP, {"label": sent}, 1)
    with pytest.raises(PartyError, match=r"2 times.*max-restores"):
        training.restore("step-0")


def test_node_configs() -> None:
    assert NodePolicy.from_node({}, strict=False) == NodePolicy()
    assert NodePolicy.from_node({"min-batch": 5}, strict=True).min_batch == 5
    assert NodePolicy.from_node({"max-learning-rate": 2}, True).max_learning_rate == 2.0
    for wrong in ({"min-batch": "5"}, {"require-sealed": 1}, {"report-loss": "some"}):
        with pytest.raises(ConfigError):
            NodePolicy.from_node(wrong, strict=False)
    assert reported({"a": 0.123}, "rounded") == {"a": 0.12}
