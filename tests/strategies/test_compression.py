"""Runs with codecs: equal on every engine, wherever the defense runs, and resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from resident_cases import PlainGrid
from resume_cases import PowerCutError, cut_at
from sealed_cases import (
    EPOCHS,
    RecordingGrid,
    TamperingGrid,
    sealed_app,
    sealed_grid,
    strategy,
)
from sklearn.metrics import roc_auc_score
from torch import Tensor
from vertical_cases import (
    WIDTH,
    HookedGrid,
    StatelessGrid,
    assert_equal,
    final_states,
    labels,
    losses,
    scores,
    simple_parties,
    train,
    weights,
)

from flower_vfl import (
    Batch,
    ConfigError,
    InProcessGrid,
    Leakage,
    PartyError,
    in_process,
    resident,
)
from flower_vfl.grids.resident import ResidentGrid
from flower_vfl.protocol.codecs import Integers, TopK
from flower_vfl.protocol.messages import GRADIENT, TensorArray, Verb, read, to_tensor
from flower_vfl.strategies import Checkpoints, Compression, Defense, build_defense
from flower_vfl.transform import AUC_BOUND

CODECS = Compression(embeddings="int8", gradients="topk:keep=0.4,feedback=true")
Outcome = list[object]


def outcome(grid: Grid, folder: Path, sealed: bool = False, **start: Any) -> Outcome:
    given = strategy(sealed, compression=CODECS)
    result = given.start(grid, num_rounds=EPOCHS, **start)
    return [final_states(folder), losses(result), scores(result)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("in-process")
    with sealed_grid(folder) as grid:
        return outcome(grid, folder)


def test_codecs_change_the_run(undisturbed: Outcome, tmp_path: Path) -> None:
    with sealed_grid(tmp_path) as grid:
        plain = strategy(False).start(grid, num_rounds=EPOCHS)
    assert losses(plain) != undisturbed[1]


def test_flowers_messages(undisturbed: Outcome, tmp_path: Path) -> None:
    grid = StatelessGrid(sealed_app(), 3, {"state-dir": str(tmp_path)})
    assert_equal(outcome(grid, tmp_path), undisturbed)


@pytest.mark.parametrize("sealed", [False, True])
def test_resident_sessions(sealed: bool, undisturbed: Outcome, tmp_path: Path) -> None:
    plain = PlainGrid(resident(sealed_app()), 3)
    for context in plain.contexts.values():
        context.node_config["state-dir"] = str(tmp_path)
    with ResidentGrid(plain) as grid:
        assert_equal(outcome(grid, tmp_path, sealed), undisturbed)


@pytest.mark.parametrize(
    ("codec", "sealed"), [("int8", False), ("topk:keep=0.4,feedback=true", True)]
)
def test_a_resumed_run_is_equal(codec: str, sealed: bool, tmp_path: Path) -> None:
    def start(grid: Grid, folder: Path, **options: Any) -> None:
        kept = Checkpoints(every=2, keep_final=True, folder=folder)
        given = strategy(sealed, compression=codec, checkpoints=kept)
        given.start(grid, num_rounds=EPOCHS, **options)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with sealed_grid(whole) as grid:
        start(grid, whole)
    app = sealed_app()
    config = {"state-dir": str(cut)}
    with InProcessGrid(app, 3, config) as grid, pytest.raises(PowerCutError):
        start(cut_at(grid, Verb.TRAIN_STEP, 6), cut)
    with InProcessGrid(app, 3, config) as grid:
        start(grid, cut, resume=True)
    assert_equal(final_states(cut), final_states(whole))


def test_a_resumed_run_has_the_same_codecs(tmp_path: Path) -> None:
    kept = Checkpoints(every=2, folder=tmp_path)
    for codec in ("int8", "float16"):
        given = strategy(False, compression=codec, checkpoints=kept)
        with sealed_grid(tmp_path) as grid:
            if codec == "int8":
                given.start(grid, num_rounds=1)
                continue
            with pytest.raises(ConfigError, match="compression was embeddings int8"):
                given.start(grid, num_rounds=2, resume=True)


@pytest.mark.parametrize("codec", ["int8", "topk:keep=0.4,feedback=true"])
def test_both_placements_of_a_defense_are_equal(codec: str) -> None:
    found = []
    for at in ("strategy", "label"):
        given = {"trust_server": True, "build_defense": build_defense}
        label, passive = simple_parties(**given)
        leakage = Leakage(("norm", "cosine"))
        defense = Defense("marvell:s=4", at=at, noise_seed=5)  # type: ignore[arg-type]
        options = {"defense": defense, "compression": codec, "leakage": leakage}
        _, result = train([label, *passive], **options)
        records = sorted(result.records, key=str)  # type: ignore[attr-defined]
        found.append([weights(label, *passive), [str(each) for each in records]])
    assert_equal(*found)


class Spy:
    """A defense that keeps the embeddings that it sees."""

    requires_labels, sees_embeddings = False, True

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor:
        assert batch.embedding is not None
        self.seen.append(batch.embedding)
        return gradient

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def test_raw_gradients_reach_the_strategy_and_defenses_see_decoded_embeddings() -> None:
    label, passive = simple_parties(1, trust_server=True)
    spy = Spy()
    with in_process([label, *passive]) as inner:
        grid = RecordingGrid(inner)
        strategy(False, compression="int8", defense=spy).start(grid, num_rounds=1)
    of_step = [c for kind, c in grid.contents if kind == Verb.TRAIN_STEP]
    sent, raw = of_step[0].arrays["passive-1"], of_step[1].arrays["passive-1"]
    assert (sent.dtype, sent.shape[1]) == ("uint8", 4 + WIDTH)
    assert (raw.dtype, raw.shape[1]) == ("float32", WIDTH)
    assert torch.equal(spy.seen[0], Integers(8).decode(to_tensor(sent), WIDTH))
    forward = [
        c for kind, c in grid.contents if kind == Verb.FORWARD and c.gradient_step
    ]
    assert forward[0].arrays[GRADIENT].dtype == "uint8"


def test_traffic_counts_what_is_sent() -> None:
    def bytes_of(codec: str) -> int:
        label, passive = simple_parties(1)
        _, result = train([label, *passive], 1, compression=codec, evaluate_every=0)
        return int(result.train_metrics_clientapp[1]["bytes"])  # type: ignore[arg-type]

    # Both directions travel twice, to and from the strategy.
    plain = bytes_of("")
    assert bytes_of("float16") * 2 == plain
    assert bytes_of("int8") * 4 * WIDTH == plain * (WIDTH + 4)


def test_the_meter_scores_what_the_party_decodes() -> None:
    """The AUC of the norms of what arrives, computed from the messages."""
    measured = {}
    for codec in ("", "topk:keep=0.3"):
        label, passive = simple_parties(1, trust_server=True)
        defense = Defense("iso:t=1", noise_seed=5)
        options: dict[str, Any] = {"sealed": False, "defense": defense}
        options["leakage"] = Leakage(("norm",))
        with in_process([label, *passive]) as inner:
            grid = RecordingGrid(inner)
            codecs = Compression(gradients=codec)
            chosen = strategy(compression=codecs, **options)
            result = chosen.start(grid, num_rounds=1)
        found = [each for each in result.records if each.name == "leak_norm/passive-1"]
        measured[codec] = {each.step: each.value for each in found}
    rows = label.configured().training_batches(1)
    for _, content in grid.contents:
        if step := content.gradient_step:
            encoded = to_tensor(content.arrays[GRADIENT])
            norms = TopK(0.3).decode(encoded, WIDTH).norm(dim=1)
            truth = labels()[rows[step - 1]]
            auc = roc_auc_score(truth, norms)
            assert measured["topk:keep=0.3"][step] == pytest.approx(auc, abs=1e-6)
    assert measured[""] != measured["topk:keep=0.3"]


@pytest.mark.parametrize("kind", ["embedding", "gradient"])
@pytest.mark.parametrize("wrong", ["short", "float", "scale"])
def test_malformed_bytes_name_the_party_and_the_step(kind: str, wrong: str) -> None:
    def change(array: Any) -> TensorArray:
        tensor = to_tensor(array).clone()
        if wrong == "short":
            return TensorArray(tensor[:, 1:])
        if wrong == "float":
            return TensorArray(tensor.float())
        tensor[0, :4] = 255  # NaN
        return TensorArray(tensor)

    def tamper(asked: Any) -> None:
        for message, content in asked:
            sent = message.metadata.message_type
            if kind == "embedding" and sent == Verb.TRAIN_STEP and content.step == 3:
                content.arrays = {k: change(a) for k, a in content.arrays.items()}
            if kind == "gradient" and content.gradient_step == 3:
                content.arrays = {GRADIENT: change(content.arrays[GRADIENT])}

    label, passive = simple_parties(1)
    with in_process([label, *passive]) as inner:
        grid = TamperingGrid(inner, tamper)
        with pytest.raises(PartyError, match=rf"'passive-1', step 3: .*{kind}"):
            strategy(False, compression="int8").start(grid, num_rounds=1)


def test_lost_replies_do_not_add_to_the_error_feedback(
    undisturbed: Outcome, tmp_path: Path
) -> None:
    lost: set[str] = set()

    def lose_once(reply: Message) -> Message | None:
        key = f"{reply.metadata.group_id}-{reply.metadata.src_node_id}"
        if len(lost) > 20 or key in lost or read(reply).turn % 3:
            return reply
        lost.add(key)
        return None

    with sealed_grid(tmp_path) as inner:
        assert_equal(outcome(HookedGrid(inner, after=lose_once), tmp_path), undisturbed)
    assert lost


@pytest.mark.parametrize("feedback", ["false", "true"])
def test_a_bound_of_one_step_does_not_cover_error_feedback(feedback: str) -> None:
    label, passive = simple_parties(1)
    label.trust_server = True
    codecs = Compression(gradients=f"topk:keep=0.3,feedback={feedback}")
    defense = Defense(build_defense("marvell:s=4"))
    _, result = train([label, *passive], compression=codecs, defense=defense)
    bounds = [each for each in result.records if each.metric == AUC_BOUND]
    assert bool(bounds) == (feedback == "false")


def test_predictions_use_decoded_embeddings() -> None:
    """The top model gets at prediction what it was trained on: one entry per row."""
    label, passive = simple_parties(1)
    given, _ = train([label, *passive], compression="topk:keep=0.3")
    found = given.predict("test")
    rows = label.configured().rows("test")
    with torch.no_grad():
        output = passive[0].model(passive[0].features[0][rows])
        kept = output.abs().argmax(1, keepdim=True)
        sparse = torch.zeros_like(output).scatter(1, kept, output.gather(1, kept))
        expected = torch.sigmoid(label.objective.top(sparse)[:, 0])  # type: ignore[operator]
    torch.testing.assert_close(torch.from_numpy(found), expected)
