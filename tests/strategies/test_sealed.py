"""Sealed training: equal to the unsealed run, and nothing for the server to read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alignment_cases import make_parties
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import context_to_proto
from flwr.serverapp import Grid
from resident_cases import PlainGrid
from resume_cases import PowerCutError, cut_at
from sealed_cases import (
    EPOCHS,
    NAMES,
    RecordingGrid,
    make_label,
    pinned,
    sealed_app,
    sealed_grid,
    strategy,
)
from torch import Tensor
from vertical_cases import (
    HookedGrid,
    StatelessGrid,
    assert_equal,
    final_states,
    losses,
    make_passive,
    scores,
    simple_parties,
)

from flower_vfl import (
    Batch,
    ConfigError,
    InProcessGrid,
    Leakage,
    NodePolicy,
    PartyError,
    VerticalStrategy,
    in_process,
    resident,
    vertical_client_app,
)
from flower_vfl.alignment import AlignmentSettings, Identity
from flower_vfl.alignment.keys import key_text, write_key
from flower_vfl.grids.resident import ResidentGrid
from flower_vfl.protocol import replay
from flower_vfl.protocol.messages import Content, Verb, read, request
from flower_vfl.strategies import Checkpoints, Defense, build_defense

Outcome = list[object]


def outcome(grid: Grid, folder: Path, sealed: bool = True, **start: Any) -> Outcome:
    result = strategy(sealed).start(grid, num_rounds=EPOCHS, **start)
    return [final_states(folder), losses(result), scores(result)]


@pytest.fixture(scope="module")
def unsealed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("unsealed")
    with sealed_grid(folder) as grid:
        return outcome(grid, folder, sealed=False)


def test_one_process(unsealed: Outcome, tmp_path: Path) -> None:
    with sealed_grid(tmp_path) as grid:
        assert_equal(outcome(grid, tmp_path), unsealed)
        live = [s for key, s in replay.sessions.items() if key[0] == grid.run.run_id]
        assert [len(session.seals.keys) for session in live if session.seals] == [
            4,
            2,
            2,
        ]


@pytest.mark.parametrize("rows", [5, 8192])  # of which an evaluation goes ahead
def test_several_batches_under_way(rows: int, tmp_path: Path) -> None:
    """In one process, and where only the node state survives, after a power cut."""
    found = []
    grids: list[Callable[[Path], Grid]] = [
        sealed_grid,
        lambda folder: StatelessGrid(sealed_app(), 3, {"state-dir": str(folder)}),
    ]
    for number, make in enumerate(grids):
        folder, sealed = tmp_path / str(number), number > 0
        saved = Checkpoints(every=4, keep_final=True, folder=folder)
        given: dict[str, Any] = {"pipeline": 2, "batch_size": 6, "checkpoints": saved}
        given["evaluation_rows"] = rows
        if sealed:
            with pytest.raises(PowerCutError):
                cut = cut_at(make(folder), Verb.TRAIN_STEP, 4)
                strategy(sealed, **given).start(cut, num_rounds=EPOCHS)
        made = strategy(sealed, **given)
        result = made.start(make(folder), num_rounds=EPOCHS, resume=sealed)
        found.append([final_states(folder), losses(result), scores(result)])
    assert_equal(*found)


@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(lambda count: -1, id="a new process per message"),
        pytest.param(lambda count: count // 4 % 2, id="two processes, now and then"),
    ],
)
def test_flowers_messages(
    choose: Callable[[int], int], unsealed: Outcome, tmp_path: Path
) -> None:
    grid = StatelessGrid(sealed_app(), 3, {"state-dir": str(tmp_path)}, choose)
    assert_equal(outcome(grid, tmp_path), unsealed)


def test_resident_sessions(unsealed: Outcome, tmp_path: Path) -> None:
    plain = PlainGrid(resident(sealed_app()), 3)
    for context in plain.contexts.values():
        context.node_config["state-dir"] = str(tmp_path)
    with ResidentGrid(plain) as grid:
        assert_equal(outcome(grid, tmp_path), unsealed)


def test_a_resumed_run_has_new_keys(unsealed: Outcome, tmp_path: Path) -> None:
    settings, keys = pinned(), []
    kept = Checkpoints(every=4, keep_final=True, folder=tmp_path)
    with sealed_grid(tmp_path, settings) as grid, pytest.raises(PowerCutError):
        first = RecordingGrid(grid)
        cut = cut_at(first, Verb.TRAIN_STEP, 6)
        strategy(checkpoints=kept).start(cut, num_rounds=EPOCHS)
    keys += first.session_keys()
    with sealed_grid(tmp_path, settings) as grid:
        second = RecordingGrid(grid)
        strategy(checkpoints=kept).start(second, num_rounds=EPOCHS, resume=True)
    keys += second.session_keys()
    assert_equal(final_states(tmp_path), unsealed[0])
    assert len(set(keys)) == len(keys) == 6


@pytest.mark.parametrize(("party", "stateless"), [(NAMES[0], True), (NAMES[1], False)])
def test_a_rewound_run_has_new_keys(
    party: str, stateless: bool, unsealed: Outcome, tmp_path: Path
) -> None:
    config = {"state-dir": str(tmp_path)}
    seen = {"steps": 0}
    inner: Any = InProcessGrid(sealed_app(), 3, config)
    if stateless:
        inner = StatelessGrid(sealed_app(), 3, config)
    number = NAMES.index(party)

    def lose_memory(message: Message) -> None:
        seen["steps"] += message.metadata.message_type == Verb.TRAIN_STEP
        if seen["steps"] != 5:
            return
        seen["steps"] += 1
        if stateless:
            node = {"partition-id": number, "num-partitions": 3}
            empty = Context(99, 11 + number, node, RecordDict(), config)
            inner.contexts[11 + number] = context_to_proto(empty).SerializeToString()
        else:
            del replay.sessions[inner.run.run_id, 1 + number]

    grid = RecordingGrid(HookedGrid(inner, lose_memory))
    assert_equal(outcome(grid, tmp_path), unsealed)
    keys = grid.session_keys()
    assert len(set(keys)) == len(keys) == 6


def test_after_a_private_set_union(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a union are in another order each time, so both runs resume one."""
    compare = "flower_vfl.strategies.checkpoints._compare"
    monkeypatch.setattr(
        compare, lambda part, now: None
    )  # would refuse another `sealed`
    settings = pinned()
    given = {"batch_size": 8, "alignment": "psu", "valid_fraction": 0.0}

    def run(name: str, sealed: bool, epochs: int, resume: bool) -> Any:
        folder = tmp_path / name
        parties = make_parties()
        kept = Checkpoints(every=2, keep_final=True, folder=folder)
        with in_process(parties, settings) as grid:
            for context in grid._contexts.values():
                context.run_config["state-dir"] = str(folder)
            made = strategy(sealed, checkpoints=kept, **given)
            made.start(grid, num_rounds=epochs, resume=resume)
        return final_states(folder)

    run("first", True, 1, False)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    sealed = run("first", True, 3, True)
    assert_equal(sealed, run("second", False, 3, True))
    assert sealed["label"]["step"] > 6


class Withhold:
    """Withholds every second gradient of one party."""

    requires_labels = False

    def __call__(self, gradient: Tensor, batch: Batch) -> Tensor | None:
        return None if batch.party == "passive-1" and batch.step % 2 else gradient

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_gradient_that_the_label_party_withholds(tmp_path: Path) -> None:
    found = []
    for sealed in (False, True):
        folder = tmp_path / str(sealed)
        with sealed_grid(folder, defense=Withhold()) as grid:
            found.append(outcome(grid, folder, sealed))
    assert_equal(*found)


def test_predictions_are_for_the_server_if_the_node_says_so() -> None:
    with sealed_grid(policy=NodePolicy(report_predictions="none")) as grid:
        made = strategy()
        made.start(grid, num_rounds=1)
        with pytest.raises(PartyError, match="report-predictions") as caught:
            made.predict("test")
        assert caught.value.party == "label"
    found = []
    for sealed in (False, True):
        with sealed_grid() as grid:
            made = strategy(sealed)
            made.start(grid, num_rounds=1)
            found.append(made.predict("test"))
    assert np.array_equal(*found)


@pytest.mark.parametrize("hide", [0, 10])
def test_predictions_are_served_to_the_party_that_asks(hide: int) -> None:
    answers = []
    for sealed in (False, True):
        label, passive = simple_parties(2 if hide else 1)
        settings = pinned(NAMES[: 1 + len(passive)])
        grid = RecordingGrid(in_process([label, *passive], settings))
        made = VerticalStrategy(batch_size=16, progress=False, sealed=sealed)
        made.start(grid, num_rounds=1)
        passive[0].questions = [7, 3]
        grid.arrays.clear()
        for _ in range(2):  # asking again is another question
            made.serve("passive-1", hide=hide)
        answers.append(passive[0].answers)
        assert {array.dtype for array in grid.arrays} == {
            "uint8" if sealed else "float32"
        }
    assert len(answers[0]) == 2 and torch.equal(*answers)


def test_a_defense_at_the_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'Defense\(..., at="label"\)'):
        VerticalStrategy(sealed=True, defense="iso:t=4")
    VerticalStrategy(sealed=True, defense=Defense("iso:t=4", at="label"))
    with pytest.raises(ConfigError, match="without sealing"):
        VerticalStrategy(sealed=True, leakage=Leakage(layers=True))
    with pytest.raises(ConfigError, match="without sealing"):
        VerticalStrategy(sealed=True, leakage=Leakage(membership="own"))


def test_defense_and_meter_run_at_the_label_party() -> None:
    with sealed_grid(build_defense=build_defense) as grid:
        defense = Defense("iso:t=4", at="label")
        made = strategy(leakage=Leakage(attacks=("norm",)), defense=defense)
        result = made.start(grid, num_rounds=1)
    parties = {each.party for each in result.records if each.attack == "norm"}
    assert parties == {"passive-1", "passive-2"}


def test_a_node_may_require_encryption() -> None:
    """A server that leaves it out is refused, and can do nothing with the session."""
    with sealed_grid(policy=NodePolicy(require_sealed=True)) as grid:
        strategy().start(grid, num_rounds=1)
    with sealed_grid(policy=NodePolicy(require_sealed=True)) as grid:
        with pytest.raises(PartyError, match="require-sealed") as caught:
            strategy(sealed=False).start(grid, num_rounds=1)
        assert caught.value.party == "label"
        content = Content(step=1, epoch=1)
        reply = next(
            iter(grid.send_and_receive([request(Verb.FORWARD, 2, 99, content)]))
        )
        assert "before the run was configured" in read(reply).text("error")


def test_keys_and_pins_of_the_node_configs(unsealed: Outcome, tmp_path: Path) -> None:
    keys = {name: write_key(tmp_path / f"{name}.key") for name in NAMES}
    pins = tmp_path / "pins.toml"
    lines = [f'{name} = "{key_text(key.public)}"' for name, key in keys.items()]
    pins.write_text("\n".join(lines))
    nodes = [
        {
            "partition-id": number,
            "alignment-key": str(tmp_path / f"{name}.key"),
            "alignment-pins": str(pins),
            "require-sealed": True,
        }
        for number, name in enumerate(NAMES)
    ]
    app = vertical_client_app(make_passive, make_label)
    grid = StatelessGrid(app, nodes, {"state-dir": str(tmp_path / "state")})
    assert_equal(outcome(grid, tmp_path / "state"), unsealed)


def test_without_pins_the_server_must_be_trusted() -> None:
    nobody = dict.fromkeys(NAMES, AlignmentSettings())
    with sealed_grid(settings=nobody) as grid, pytest.raises(PartyError) as caught:
        strategy().start(grid, num_rounds=1)
    assert "no public keys of the other parties are pinned" in str(caught.value)
    trusting = dict.fromkeys(NAMES, AlignmentSettings(trust_server=True))
    with sealed_grid(settings=trusting) as grid:
        strategy().start(grid, num_rounds=1)


@pytest.mark.parametrize("party", NAMES)
def test_a_wrong_pin_is_refused(party: str) -> None:
    wrong = pinned(**{party: Identity().public})
    with sealed_grid(settings=wrong) as grid, pytest.raises(PartyError) as caught:
        strategy().start(grid, num_rounds=1)
    assert "not the pinned one" in str(caught.value)
    assert caught.value.party == party


def test_a_party_that_was_not_pinned_is_refused() -> None:
    settings = pinned()
    known = dict(settings["label"].pins or {})
    del known["passive-2"]
    settings["label"] = AlignmentSettings(settings["label"].identity, known)
    with sealed_grid(settings=settings) as grid, pytest.raises(PartyError) as caught:
        strategy().start(grid, num_rounds=1)
    assert "no public key is pinned for the party 'passive-2'" in str(caught.value)


def test_the_label_party_may_trust_the_server_by_itself() -> None:
    trusting = dict.fromkeys(NAMES, AlignmentSettings(trust_server=True))
    own = {**trusting, "label": AlignmentSettings()}
    wary = sealed_grid(None, own, trust_server=False)
    with wary as grid, pytest.raises(PartyError, match="pinned"):
        strategy().start(grid, num_rounds=1)
    with sealed_grid(None, own, trust_server=True) as grid:
        strategy().start(grid, num_rounds=1)
