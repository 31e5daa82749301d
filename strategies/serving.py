"""Predictions for a passive party, without naming the row that it asks about."""

from collections.abc import Mapping
from typing import cast

from flwr.app import Array

from flower_vfl.errors import ConfigError, check_name
from flower_vfl.protocol.config import Value
from flower_vfl.protocol.messages import Content, Verb

from .messenger import Messenger
from .setup import Participants


def serve(
    messenger: Messenger, participants: Participants, party: str, hide: int
) -> None:
    """Have the label party answer what a passive party asks."""
    passive, label = participants.passive, participants.label
    check_name("passive party", party, passive)
    if not hide and (len(passive) > 1 or label.shape):
        raise ConfigError(
            "other parties also have features and must know the rows: hide the row in "
            "a batch, for example with hide=100"
        )

    def ask(name: str, content: Content) -> Content:
        return messenger.ask(Verb.SERVE, {name: content})[name]

    def predict(embeddings: Mapping[str, Array], number: int) -> Array:
        config: dict[str, Value] = {"stage": "predict", "batch": number, "hide": hide}
        config["party"] = party  # whom the predictions are for
        return ask(label.name, Content(config, embeddings)).arrays["predictions"]

    asked = ask(party, Content({"stage": "ask", "hide": hide}))
    found: dict[str, Array] = {}
    if hide:
        for number in cast(list[int], asked.config["batches"]):
            where: dict[str, Value] = {"stage": "embed", "batch": number, "hide": hide}
            requests = {name: Content(dict(where)) for name in passive}
            replies = messenger.ask(Verb.SERVE, requests)
            embeddings = {name: reply.arrays[name] for name, reply in replies.items()}
            found[str(number)] = predict(embeddings, number)
    elif asked.arrays:
        found["predictions"] = predict(asked.arrays, 0)
    ask(party, Content({"stage": "tell", "hide": hide}, found))
