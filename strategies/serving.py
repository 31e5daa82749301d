"""Predictions for a passive party, without naming the row that it asks about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from flwr.app import Array

from flower_vfl.errors import ConfigError, unknown_name
from flower_vfl.protocol.messages import Content, Value, Verb

if TYPE_CHECKING:
    from .training import Training
    from .vertical import VerticalStrategy


def serve(strategy: VerticalStrategy, party: str, hide: int = 0) -> None:
    """Have the label party answer what a passive party asks.

    The party's node says what it asks about (``party.questions``, its own row numbers)
    and finds the predictions in ``party.answers``. See :mod:`flower_vfl.protocol.serving` for
    what travels, and what it tells.

    Parameters
    ----------
    strategy : VerticalStrategy
        After ``start``, or after ``connect`` and ``restore``.
    party : str
        Name of the asking party.
    hide : int (default: 0)
        Rows of the batch that each row hides in. 0 sends embeddings alone, for one
        passive party and a label party without features.
    """
    training = strategy._running()
    passive, label = training.participants.passive, training.participants.label
    if party not in passive:
        raise unknown_name("passive party", party, passive)
    if not hide and (len(passive) > 1 or label.shape):
        raise ConfigError(
            "other parties have features too and must know which rows are meant: let "
            "the row hide in a batch, hide=100 for example"
        )
    asked = _ask(training, party, Content({"stage": "ask", "hide": hide}))
    found: dict[str, Array] = {}
    if hide:
        for number in cast(list[int], asked.config["batches"]):
            found[str(number)] = _serve_batch(training, number, hide)
    elif asked.arrays:
        found["predictions"] = _predict(training, asked.arrays, 0, 0)
    _ask(training, party, Content({"stage": "tell", "hide": hide}, found))


def _ask(training: Training, name: str, content: Content) -> Content:
    return training.messenger.ask(Verb.SERVE, {name: content})[name]


def _serve_batch(training: Training, number: int, hide: int) -> Array:
    """Return the predictions of an agreed batch."""
    request: dict[str, Value] = {"stage": "embed", "batch": number, "hide": hide}
    requests = {name: Content(dict(request)) for name in training.participants.passive}
    replies = training.messenger.ask(Verb.SERVE, requests)
    embeddings = {name: reply.arrays[name] for name, reply in replies.items()}
    return _predict(training, embeddings, number, hide)


def _predict(
    training: Training, embeddings: Mapping[str, Array], number: int, hide: int
) -> Array:
    config: dict[str, Value] = {"stage": "predict", "batch": number, "hide": hide}
    label = training.participants.label.name
    return _ask(training, label, Content(config, embeddings)).arrays["predictions"]
