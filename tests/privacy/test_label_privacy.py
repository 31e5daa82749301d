"""Private labels at the label party: losses, predictions, refusals, repeated draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.serverapp import Grid
from imputation_cases import REPEATABLE, aligned_app, start
from resume_cases import PowerCutError, cut_at
from torch import Tensor, nn
from torch.distributions import Normal
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
    weights,
)

from flower_vfl import (
    ConfigError,
    CrossEntropy,
    InProcessGrid,
    LabelParty,
    LabelPrivacy,
    Leakage,
    MeanSquaredError,
    Objective,
    PartyError,
    PassiveParty,
    vertical_client_app,
)
from flower_vfl.metrics import adaptive_calibration_error
from flower_vfl.objectives import GAFM
from flower_vfl.parties.imputation.label_imputer import BatchLabels
from flower_vfl.privacy.mechanisms import Mechanism
from flower_vfl.privacy.private_labels import PrivateLabels
from flower_vfl.protocol import replay as sessions
from flower_vfl.protocol.messages import Verb
from flower_vfl.strategies import Checkpoints, Defense, VerticalStrategy

THREE = math.log(3.0)  # keeps a binary label with probability 3/4


class Identity(nn.Module):
    """A top model whose output is the embedding."""

    def forward(self, embedding: Tensor) -> Tensor:
        return embedding


def private(objective: Objective, known: Tensor, text: str) -> PrivateLabels:
    """Return the drawn labels of a party without gaps, with a loss that was chosen."""
    privacy = LabelPrivacy.from_text(text)
    found = PrivateLabels(
        privacy, objective, objective.encode(known), range(len(known))
    )
    found.draw(7, torch.arange(len(known)), torch.arange(len(known)))
    found.choose(privacy.loss, gaps=False)
    return found


def taken(found: PrivateLabels) -> Tensor:
    """Return what the loss gets of all rows."""
    batch = found.batch(
        BatchLabels(found.used, found.used), torch.arange(len(found.true))
    )
    return batch.used


# Losses, against values worked by hand.

LOGITS = [-1.2, 0.4, 0.0, 2.5, -0.3, 0.8, 1.1, -2.0]
BINARY = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])


def hand(loss: str, logit: float, answer: float) -> float:
    """Return the loss of one answer, kept with probability 3/4."""
    p = 1.0 / (1.0 + math.exp(-logit))
    q = 1.0 - p
    if loss == "forward":
        return -math.log(0.75 * p + 0.25 * q if answer else 0.25 * p + 0.75 * q)
    if loss == "plain":
        return -math.log(p if answer else q)
    # The inverse of ((3/4, 1/4), (1/4, 3/4)) is ((3/2, -1/2), (-1/2, 3/2)).
    share = 1.5 if answer else -0.5
    return -(share * math.log(p) + (1.0 - share) * math.log(q))


@pytest.mark.parametrize("loss", ["plain", "unbiased", "forward"])
def test_losses_of_a_binary_answer(loss: str) -> None:
    objective = CrossEntropy(Identity())
    found = private(objective, BINARY, f"epsilon={THREE!r},loss={loss}")
    assert 0 < int((found.used != BINARY).sum()) < 8  # some were changed
    value = objective.loss(torch.tensor(LOGITS), taken(found))
    expected = map(partial(hand, loss), LOGITS, found.used.tolist())
    assert float(value) == pytest.approx(sum(expected) / 8, rel=1e-5)


@pytest.mark.parametrize("loss", ["plain", "unbiased", "forward"])
def test_losses_of_three_classes(loss: str) -> None:
    """ε = ln 2 keeps a class with probability 1/2, and draws each other with 1/4."""
    objective = CrossEntropy(Identity(), 3)
    known = torch.arange(12) % 3
    found = private(objective, known, f"epsilon={math.log(2.0)!r},loss={loss}")
    logits = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    value = objective.loss(logits, taken(found))
    expected = 0.0
    for row, answer in zip(
        logits.softmax(dim=1).tolist(), found.used.tolist(), strict=True
    ):
        if loss == "forward":
            expected -= math.log(0.25 + 0.25 * row[answer])
        elif loss == "plain":
            expected -= math.log(row[answer])
        else:  # 4·(answer) − (1, 1, 1) has the mean of the class
            shares = [3.0 if k == answer else -1.0 for k in range(3)]
            expected -= sum(s * math.log(p) for s, p in zip(shares, row, strict=True))
    assert float(value) == pytest.approx(expected / 12, rel=1e-5)


@pytest.mark.parametrize("classes", [2, 3, 6])
def test_the_unbiased_loss_is_that_of_true_labels_in_the_mean(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean is taken over the mechanism's own probabilities, not over draws."""
    answers = torch.arange(classes)
    monkeypatch.setattr(Mechanism, "randomise", lambda *given: answers)
    objective = CrossEntropy(Identity(), classes)
    found = private(objective, answers, "epsilon=0.7,loss=unbiased")
    channel = found.mechanism.channel  # type: ignore[union-attr]
    width = 1 if classes == 2 else classes
    logits = torch.randn(1, width, generator=torch.Generator().manual_seed(1))
    by_answer = [objective.loss(logits, taken(found)[a : a + 1]) for a in answers]
    clean = CrossEntropy(Identity(), classes)
    for label in answers:
        mean = sum(float(channel[label, a] * by_answer[a]) for a in answers)
        truth = clean.loss(logits, clean.encode(label.reshape(1)))
        assert mean == pytest.approx(float(truth), rel=1e-5)


def gradient(objective: CrossEntropy, logits: Tensor, answers: Tensor) -> Tensor:
    leaf = logits.clone().requires_grad_()
    objective.loss(leaf, answers).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return leaf.grad


def test_plain_loss_of_gaussian_noise_is_linear() -> None:
    objective, logits = CrossEntropy(Identity()), torch.tensor(LOGITS)
    found = private(objective, BINARY, "auc=0.8,mechanism=gaussian,loss=plain")
    answers = taken(found)
    assert not set(answers.tolist()) & {0.0, 1.0}
    expected = (torch.sigmoid(logits) - answers) / 8
    torch.testing.assert_close(gradient(objective, logits, answers), expected)


@pytest.mark.parametrize("classes", [2, 4])
def test_forward_loss_of_gaussian_noise_is_its_likelihood(classes: int) -> None:
    objective = CrossEntropy(Identity(), classes)
    known = torch.arange(8) % classes
    found = private(objective, known, "auc=0.8,mechanism=gaussian,loss=forward")
    answers, sigma = taken(found), found.mechanism.sigma  # type: ignore[union-attr]
    logits = torch.randn(8, classes, generator=torch.Generator().manual_seed(1))
    leaf = logits.clone().requires_grad_()
    if classes == 2:
        likelihood = Normal(torch.tensor([0.0, 1.0]), sigma).log_prob(answers[:, None])
    else:
        normal = Normal(torch.eye(classes), sigma)
        likelihood = normal.log_prob(answers[:, None, :]).sum(dim=2)
    (-(leaf.log_softmax(dim=1) + likelihood).logsumexp(dim=1).mean()).backward()
    assert leaf.grad is not None
    given = logits[:, 1] - logits[:, 0] if classes == 2 else logits
    expected = leaf.grad[:, 1] if classes == 2 else leaf.grad
    torch.testing.assert_close(gradient(objective, given, answers), expected)


@pytest.mark.parametrize("loss", ["plain", "forward"])
def test_losses_of_laplace_noise(loss: str) -> None:
    objective = MeanSquaredError(Identity(), center=10.0, scale=5.0)
    found = private(
        objective, torch.tensor([3.0, 12.0, 25.0]), f"auc=0.8,low=0,high=20,loss={loss}"
    )
    noisy, outputs = found.used.tolist(), [0.5, -0.2, 0.1]
    errors = [o - (y - 10.0) / 5.0 for o, y in zip(outputs, noisy, strict=True)]
    power = 1 if loss == "forward" else 2
    expected = sum(abs(e) ** power for e in errors) / 3
    value = objective.loss(torch.tensor(outputs), taken(found))
    assert float(value) == pytest.approx(expected, rel=1e-5)


def test_other_objectives_learn_answers_as_they_are() -> None:
    found = private(GAFM(WIDTH), BINARY, "auc=0.8,mechanism=gaussian")
    assert found.losses == ["plain"] and found.loss == "plain"
    assert set(taken(found).tolist()) == {0.0, 1.0}


# Predictions are probabilities of true labels.

SLOW = partial(torch.optim.Adam, lr=0.005)


def probabilities(text: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return predictions, the same without conversion, and the true probabilities."""
    rows, stream = 6000, torch.Generator().manual_seed(3)
    x = torch.randn(rows, 4, generator=stream)
    truth = torch.sigmoid(1.2 * x[:, 0] - 0.8 * x[:, 3] - 0.7)
    known = (torch.rand(rows, generator=stream) < truth).long()
    torch.manual_seed(0)
    privacy = LabelPrivacy.from_text(text) if text else None
    bent = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    objective = CrossEntropy(bent)
    label = LabelParty(
        known, objective, optimizer=SLOW, label_privacy=privacy, device="cpu"
    )
    parts = [x[:, :2], x[:, 2:]]
    passive = [
        PassiveParty(p, nn.Linear(2, 1), optimizer=SLOW, device="cpu") for p in parts
    ]
    train([label, *passive], epochs=8, batch_size=256, seed=1)
    with torch.no_grad():
        joined = torch.cat(
            [p.model(part) for p, part in zip(passive, parts, strict=True)], 1
        )  # type: ignore[misc]
        found = objective.predict(joined)
        objective.calibration = None
        return found, objective.predict(joined), truth


@pytest.mark.parametrize(
    ("text", "converted"),
    [
        ("auc=0.8,loss=plain", True),
        ("auc=0.8,loss=unbiased", False),
        ("auc=0.8,loss=forward", False),
        ("auc=0.8,mechanism=gaussian,loss=plain", False),
        ("auc=0.8,mechanism=gaussian,loss=forward", False),
    ],
)
def test_predictions_are_probabilities_of_true_labels(
    text: str, converted: bool
) -> None:
    found, raw, truth = probabilities(f"{text},key=3")
    labels_of_it = (
        torch.rand(6000, generator=torch.Generator().manual_seed(9)) < truth
    ).long()
    error = adaptive_calibration_error(found, labels_of_it)
    assert error < 0.035  # without privacy 0.024
    assert float((found - truth).abs().mean()) < 0.05
    if converted:
        assert adaptive_calibration_error(raw, labels_of_it) > 3.0 * error
    else:
        assert torch.equal(found, raw)


# Settings that are refused.


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("auc=0.4", "auc must be between 0.5 and 1, got 0.4"),
        ("auc=1.0", "auc must be between 0.5 and 1"),
        ("auc=nan", "'auc' must be a number"),
        ("epsilon=0", "epsilon must be above 0"),
        ("auc=0.65,epsilon=1", "either auc=0.65 or epsilon=1"),
        ("loss=plain", "either auc=0.65 or epsilon=1"),
        ("auc=0.65,sigma=3", "unknown parameter 'sigma'"),
        (
            "auc=0.65,mechanism=marvell",
            "'mechanism' must be one of auto, rand.*marvell",
        ),
        (
            "auc=0.65,loss=backward",
            "must be one of auto, plain, unbiased, forward, got 'backward'",
        ),
        ("auc=0.65,delta=0", "delta must be between"),
        ("auc=0.65,budget=leak", "label budget 'leak'; known: auc, epsilon"),
        ("0.65", "key=value"),
    ],
)
def test_bad_texts(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LabelPrivacy.from_text(text)


def refused(match: str, *text: str, **options: Any) -> PartyError:
    """Train with private labels; return the error of the label party."""
    own = {n: options.pop(n) for n in ("trust_server",) if n in options}
    label, passive = simple_parties(label_privacy=LabelPrivacy.from_text(*text), **own)
    before = weights(label, *passive)
    with pytest.raises(PartyError, match=match) as caught:
        train([label, *passive], **options)
    assert caught.value.party == "label" and caught.value.remedy
    assert_equal(weights(label, *passive), before)  # it was refused before a step
    return caught.value


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"leakage": Leakage(limit=0.6)},
            "leak limit looks at true labels.*leave it out",
        ),
        (
            {"leakage": Leakage(("norm",), layers=True), "trust_server": True},
            "layers.*show true labels.*without label privacy",
        ),
        (
            {"leakage": Leakage(membership="joint"), "trust_server": True},
            "membership with labels.*without label privacy",
        ),
        (
            {
                "leakage": Leakage(("norm",)),
                "defense": Defense("iso"),
                "trust_server": True,
            },
            r"measured there.*Defense\(\.\.\., at=\"label\"\)",
        ),
    ],
)
def test_what_would_act_on_true_labels(options: dict[str, Any], match: str) -> None:
    refused(match, "auc=0.7", **options)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("auc=0.7,mechanism=laplace", "'laplace' is not for a binary task"),
        ("epsilon=1,prior=0.2+0.3+0.5", "prior must be 2 weights"),
        ("auc=0.7,mechanism=gaussian,loss=unbiased", "'unbiased'.*plain, forward"),
        ("auc=0.7,canaries=2", "canaries are measured with the leakage"),
    ],
)
def test_what_does_not_fit_classes(text: str, match: str) -> None:
    refused(match, text, valid_fraction=0.2)


def test_too_many_canaries() -> None:
    given = {"valid_fraction": 0.2, "leakage": Leakage(("norm",))}
    refused("canaries must be at most half of the 36", "auc=0.7,canaries=19", **given)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("auc=0.7", "publicly known range, low=... and high="),
        ("auc=0.7,low=3,high=3", "publicly known range"),
        (
            "auc=0.7,mechanism=randomised-response,low=0,high=1",
            "'randomised-response' is not for a regression",
        ),
        ("auc=0.7,low=0,high=40,loss=unbiased", "'unbiased'.*use plain, forward"),
    ],
)
def test_what_does_not_fit_a_regression(text: str, match: str) -> None:
    _, passive = simple_parties()
    objective = MeanSquaredError(nn.Linear(2 * WIDTH, 1))
    privacy = LabelPrivacy.from_text(text)
    label = LabelParty(features(0)[:, 0] + 20, objective, label_privacy=privacy)
    with pytest.raises(PartyError, match=match) as caught:
        train([label, *passive])
    assert caught.value.party == "label" and caught.value.remedy


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "auc=0.7,mechanism=gaussian",
            "Gaussian noise would tell.*randomised-response",
        ),
        ("auc=0.7,loss=unbiased", "'unbiased'.*use plain, forward"),
    ],
)
def test_what_does_not_fit_synthetic_labels(
    text: str, match: str, tmp_path: Path
) -> None:
    app = aligned_app(REPEATABLE, label_privacy=LabelPrivacy.from_text(text))
    with pytest.raises(PartyError, match=match) as caught:
        start(app, tmp_path)
    assert caught.value.party == "label" and caught.value.remedy


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            "budget=auc=0.6",
            "has no bound.*label-dp with auc=0.6.*marvell:auc=0.6,over=run",
        ),
        ("budget=epsilon=1", r"has no bound; use label-dp with epsilon=1 \(label-dp"),
        ("auc=0.7,budget=auc=0.6", "auc 0.6 for everything.*has auc 0.7"),
        (
            "epsilon=2,budget=epsilon=1.5",
            "has epsilon 2; use label-dp with epsilon=1.5",
        ),
    ],
)
def test_a_budget_that_a_run_exceeds(text: str, match: str) -> None:
    refused(match, text)


def test_a_budget_that_a_run_keeps() -> None:
    for text in ("auc=0.6,budget=auc=0.6", "epsilon=1,budget=epsilon=1"):
        text += ",loss=plain"
        label, passive = simple_parties(label_privacy=LabelPrivacy.from_text(text))
        train([label, *passive], epochs=1)


def test_the_ledger_adds_up_trainings(tmp_path: Path) -> None:
    """The same draws again are free; another mechanism is not."""

    def trained(text: str) -> Tensor:
        given = (
            f"{text},loss=plain,ledger={tmp_path / 'ledger.json'},budget=epsilon=1.5"
        )
        label, passive = simple_parties(label_privacy=LabelPrivacy.from_text(given))
        result = train([label, *passive], epochs=1)[1]
        assert result.label_privacy["epsilon"] == 1.0  # type: ignore[attr-defined]
        assert label.private is not None
        return label.private.used

    first = trained("epsilon=1")
    assert torch.equal(trained("epsilon=1"), first)
    with pytest.raises(
        PartyError, match=r"label.*epsilon 1\.5 for everything.*epsilon 2"
    ):
        trained("epsilon=1.0000001")
    assert torch.equal(trained("epsilon=1"), first)  # what was refused does not count


# The same draws again.


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
    measured = sorted(astuple(each) for each in result.records)
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


@pytest.mark.parametrize("count", [1, 3, 9, 14, 15])
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


@pytest.mark.parametrize(
    "choose", [lambda count: -1, lambda count: count % 2], ids=["new", "two in turn"]
)
def test_without_a_process_that_stays_the_labels_are_the_same(
    choose: Callable[[int], int],
    undisturbed: tuple[list[Any], Tensor],
    tmp_path: Path,
) -> None:
    made = Made(AUDITED)
    grid = StatelessGrid(made.app(), 3, {"state-dir": str(tmp_path)}, choose)
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
        pytest.raises(PartyError, match="the run that is resumed had") as caught,
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
