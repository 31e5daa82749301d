"""Flower's four methods of a round, for vertical training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError
from flower_vfl.protocol.arrays import to_tensor
from flower_vfl.protocol.messages import (
    Content,
    Value,
    Verb,
    array_record,
    gradient_arrays,
)

from .messenger import embeddings, noted

if TYPE_CHECKING:
    from .training import Training


class VerticalRounds(Strategy):
    """Makes the messages of a training and reads the replies."""

    _training: Training | None = None

    def predict(self, split: str = "test") -> NDArray[Any]:
        """Return the model's predictions for a split, in row order."""
        parts = [to_tensor(part).numpy() for part in self._running().predict(split)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.float32)

    def _running(self) -> Training:
        if self._training is None:
            raise ConfigError("call start or connect first: no party is known yet")
        return self._training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests of one step to the passive parties."""
        return self._requests(Verb.FORWARD, arrays, {**config, "epoch": server_round})

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the embeddings of one step by party name, and what was measured."""
        training = self._running()
        contents = training.messenger.collect(replies, training.state.step + 1)
        found = embeddings(contents, training.state.step + 1)
        measured = MetricRecord(dict(noted(contents)))
        return array_record(found), measured if measured else None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests for the embeddings of a part of a split."""
        return self._requests(Verb.EMBED, arrays, dict(config))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the metrics that the label party reports after the last part."""
        training = self._running()
        for content in training.messenger.collect(
            replies, training.state.step
        ).values():
            if content.metrics:
                return MetricRecord(dict(content.metrics))
        return None

    def _requests(
        self, verb: Verb, gradients: ArrayRecord, config: Mapping[str, Any]
    ) -> list[Message]:
        training = self._running()
        settings: dict[str, Value] = dict(config)
        return training.messenger.messages(
            verb,
            {
                name: Content(
                    dict(settings),
                    gradient_arrays(gradients.get(name)),
                    labels=training.labels,
                )
                for name in training.participants.passive
            },
        )
