"""Two vertical Flower apps as someone else would write them, with flwr and torch only.

In the first the server holds the labels, as in Flower's own vertical example; in the
second one of the clients does. Of this project they know one adapter each, on the line
after "NEW".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from flower_vfl.strategies import defended_grid, defense_mod

# --- the first app: tumours, two clinics with columns, labels at the server -----------

TUMOUR_ROUNDS = 30
TUMOUR_TRAIN = 400


@cache
def tumours() -> tuple[Tensor, Tensor]:
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x = (x - x.mean(0)) / x.std(0)
    x, y = x[order], 1 - y[order]  # 1 is malignant
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def part_of(rows: str) -> slice:
    return slice(TUMOUR_TRAIN) if rows == "train" else slice(TUMOUR_TRAIN, None)


def load_model(model: nn.Module, state: RecordDict, seed: int) -> nn.Module:
    """Put the saved weights, or fresh ones, into a model."""
    torch.manual_seed(seed)
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.reset_parameters()
    if "model" in state:
        model.load_state_dict(state["model"].to_torch_state_dict())
    return model


def gradient_step(model: nn.Module, state: RecordDict, lr: float) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight -= lr * weight.grad
    state["model"] = ArrayRecord(model.state_dict())


tumour_client = ClientApp()


def clinic(context: Context) -> tuple[Tensor, nn.Module]:
    pos = int(context.node_config["partition-id"])
    columns = tumours()[0][:, pos * 15 : (pos + 1) * 15]
    model = nn.Sequential(nn.Linear(15, 8), nn.Tanh())
    return columns, load_model(model, context.state, seed=pos)


@tumour_client.query("generate_embeddings")
def generate_embeddings(message: Message, context: Context) -> Message:
    columns, model = clinic(context)
    rows = part_of(str(message.content["config"]["rows"]))
    embedding = Array(model(columns[rows]).detach().numpy())
    pos = int(context.node_config["partition-id"])
    records = {"arrays": ArrayRecord({"embedding": embedding})}
    records["config"] = ConfigRecord({"pos": pos})
    return Message(RecordDict(records), reply_to=message)


@tumour_client.train("apply_gradients")
def apply_gradients(message: Message, context: Context) -> Message:
    columns, model = clinic(context)
    gradient = message.content["gradients"]["local-gradients"].numpy()
    model(columns[part_of("train")]).backward(torch.from_numpy(gradient))
    gradient_step(model, context.state, lr=0.2)
    return Message(RecordDict(), reply_to=message)


tumour_server = ServerApp()


@tumour_server.main()
def tumour_main(grid: Grid, context: Context) -> None:
    labels = tumours()[1][part_of("train")].unsqueeze(1)
    if defense := context.run_config.get("defense"):
        # NEW
        grid = defended_grid(
            grid,
            defense,
            message_type="train.apply_gradients",
            record="gradients",
            labels=labels,
            seed=context.run_config.get("seed"),
        )
    head = load_model(nn.Sequential(nn.Linear(16, 1)), RecordDict(), seed=9)
    for _ in range(TUMOUR_ROUNDS):
        embeddings, positions = ask_embeddings(grid, "train")
        embeddings.requires_grad_()
        loss = nn.functional.binary_cross_entropy_with_logits(head(embeddings), labels)
        head.zero_grad()
        loss.backward()
        gradient_step(head, context.state, lr=0.2)
        gradients = embeddings.grad.split(8, dim=1)
        grid.push_messages(
            Message(
                RecordDict(
                    {
                        "gradients": ArrayRecord(
                            {"local-gradients": Array(gradients[pos].numpy())}
                        )
                    }
                ),
                node,
                "train.apply_gradients",
            )
            for node, pos in positions.items()
        )
    embeddings, _ = ask_embeddings(grid, "test")
    auc = roc_auc_score(tumours()[1][part_of("test")], head(embeddings).detach())
    context.state["metrics"] = MetricRecord({"loss": loss.item(), "auc": float(auc)})


def ask_embeddings(grid: Grid, rows: str) -> tuple[Tensor, dict[int, int]]:
    ask = RecordDict({"config": ConfigRecord({"rows": rows})})
    nodes = grid.get_node_ids()
    messages = [Message(ask, node, "query.generate_embeddings") for node in nodes]
    embeddings, positions = {}, {}
    for reply in grid.send_and_receive(messages):
        pos = reply.content["config"]["pos"]
        positions[reply.metadata.src_node_id] = pos
        embeddings[pos] = torch.from_numpy(reply.content["arrays"]["embedding"].numpy())
    return torch.cat([embeddings[pos] for pos in sorted(embeddings)], 1), positions


# --- the second app: digits, two halves of an image, labels at a client --------------

DIGIT_EPOCHS = 3
DIGIT_TRAIN = 1280
DIGIT_BATCH = 128


@cache
def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return images, torch.tensor(y == 3, dtype=torch.float32)  # one in ten


def rows_of(message: Message) -> Tensor:
    return torch.from_numpy(message.content["batch"]["rows"].numpy())


def digit_client(defense: Any = None, seed: int | None = None) -> ClientApp:
    """Return the app of all three nodes; the first one holds the labels."""
    app = ClientApp()

    def half(context: Context) -> tuple[Tensor, nn.Module]:
        side = int(context.node_config["partition-id"]) - 1
        model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh())
        columns = digits()[0][..., side * 4 : side * 4 + 4]
        return columns, load_model(model, context.state, seed=side)

    @app.query("holds")
    def holds(message: Message, context: Context) -> Message:
        what = "labels" if context.node_config["partition-id"] == 0 else "half"
        reply = RecordDict({"config": ConfigRecord({"holds": what})})
        return Message(reply, reply_to=message)

    @app.query("embed")
    def embed(message: Message, context: Context) -> Message:
        images, model = half(context)
        embedding = Array(model(images[rows_of(message)]).detach().numpy())
        side = ("left", "right")[int(context.node_config["partition-id"]) - 1]
        reply = RecordDict({"embeddings": ArrayRecord({side: embedding})})
        return Message(reply, reply_to=message)

    @app.train("backward")
    def backward(message: Message, context: Context) -> Message:
        images, model = half(context)
        (gradient,) = message.content["cut-layer"].to_numpy_ndarrays()
        model(images[rows_of(message)]).backward(torch.from_numpy(gradient))
        gradient_step(model, context.state, lr=0.3)
        return Message(RecordDict(), reply_to=message)

    def scores(message: Message, context: Context) -> tuple[Any, Tensor, nn.Module]:
        sides = message.content["embeddings"].to_torch_state_dict()
        embeddings = {side: sides[side].requires_grad_() for side in sorted(sides)}
        model = nn.Sequential(nn.Flatten(), nn.Linear(128, 1))
        load_model(model, context.state, seed=9)
        logits = model(torch.cat(list(embeddings.values()), dim=3)).squeeze(1)
        return embeddings, logits, model

    mods = []
    if defense:
        # NEW
        mods = [
            defense_mod(
                defense,
                record="cut-layer",
                labels=lambda message, context: digits()[1][rows_of(message)],
                seed=seed,
            )
        ]

    @app.train("label_step", mods=mods)
    def label_step(message: Message, context: Context) -> Message:
        embeddings, logits, model = scores(message, context)
        y = digits()[1][rows_of(message)]
        nn.functional.binary_cross_entropy_with_logits(logits, y).backward()
        gradient_step(model, context.state, lr=0.3)
        gradients = ArrayRecord(
            {s: Array(e.grad.numpy()) for s, e in embeddings.items()}
        )
        return Message(RecordDict({"cut-layer": gradients}), reply_to=message)

    @app.evaluate("auc")
    def auc(message: Message, context: Context) -> Message:
        _, logits, _ = scores(message, context)
        value = float(roc_auc_score(digits()[1][rows_of(message)], logits.detach()))
        reply = RecordDict({"metrics": MetricRecord({"auc": value})})
        return Message(reply, reply_to=message)

    return app


digit_server = ServerApp()


@digit_server.main()
def digit_main(grid: Grid, context: Context) -> None:
    ask = [Message(RecordDict(), node, "query.holds") for node in grid.get_node_ids()]
    found = {
        reply.metadata.src_node_id: reply.content["config"]["holds"]
        for reply in grid.send_and_receive(ask)
    }
    halves = [node for node, what in found.items() if what == "half"]
    (label_node,) = set(found) - set(halves)
    for rows in batches():
        batch = ArrayRecord({"rows": Array(rows)})
        sides, embeddings = embeddings_of(grid, halves, batch)
        (reply,) = tell(grid, "train.label_step", {label_node: embeddings}, batch)
        gradients = reply.content["cut-layer"]
        each = {n: ArrayRecord({"g": gradients[s]}) for s, n in sides.items()}
        tell(grid, "train.backward", each, batch, name="cut-layer")
    batch = ArrayRecord({"rows": Array(np.arange(DIGIT_TRAIN, len(digits()[1])))})
    _, embeddings = embeddings_of(grid, halves, batch)
    (reply,) = tell(grid, "evaluate.auc", {label_node: embeddings}, batch)
    context.state["metrics"] = reply.content["metrics"]


def batches() -> Iterable[np.ndarray]:
    order = np.random.default_rng(1)
    for _ in range(DIGIT_EPOCHS):
        rows = order.permutation(DIGIT_TRAIN)
        yield from np.split(rows, DIGIT_TRAIN // DIGIT_BATCH)


def embeddings_of(
    grid: Grid, nodes: list[int], batch: ArrayRecord
) -> tuple[dict[str, int], ArrayRecord]:
    sides, embeddings = {}, ArrayRecord()
    replies = tell(grid, "query.embed", dict.fromkeys(nodes, ArrayRecord()), batch)
    for reply in replies:
        for side, array in reply.content["embeddings"].items():
            sides[side], embeddings[side] = reply.metadata.src_node_id, array
    return sides, embeddings


def tell(
    grid: Grid,
    kind: str,
    arrays: dict[int, ArrayRecord],
    batch: ArrayRecord,
    name: str = "embeddings",
) -> list[Message]:
    messages = [
        Message(RecordDict({name: record, "batch": batch}), node, kind)
        for node, record in arrays.items()
    ]
    replies = list(grid.send_and_receive(messages))
    for reply in replies:
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
    return replies


# --- a run, and what the parties without labels see of it ----------------------------

GridOf = Callable[[Any, int], Grid]


@dataclass
class Outcome:
    """How a run ended and what it gave away."""

    weights: dict[str, Tensor]
    auc: float
    received: list[tuple[np.ndarray, np.ndarray]]  # gradients and their labels

    @cached_property
    def leaks(self) -> dict[str, float]:
        """The leak AUC of two attacks, the mean over batches and parties."""
        both = [(norm_auc(*batch), cosine_auc(*batch)) for batch in self.received]
        norm, cosine = np.mean(both, axis=0)
        return {"norm": float(norm), "cosine": float(cosine)}


def norm_auc(gradient: np.ndarray, labels: np.ndarray) -> float:
    norms = np.linalg.norm(gradient.reshape(len(labels), -1), axis=1)
    return float(roc_auc_score(labels, norms))


def cosine_auc(gradient: np.ndarray, labels: np.ndarray) -> float:
    """Return the AUC of the cosine to the mean of half of the rows whose label is 1.

    The attacker knows that half; the other rows are scored.
    """
    rows = gradient.reshape(len(labels), -1).astype(np.float64)
    known = np.flatnonzero(labels)[::2]
    others = np.delete(np.arange(len(labels)), known)
    cosines = rows @ rows[known].mean(axis=0) / (np.linalg.norm(rows, axis=1) + 1e-300)
    return float(roc_auc_score(labels[others], cosines[others]))


def run_tumours(grid_of: GridOf, **run_config: Any) -> Outcome:
    y = tumours()[1][part_of("train")]
    return run(grid_of, tumour_client, 2, tumour_server, run_config, lambda _: y)


def run_digits(
    grid_of: GridOf, defense: Any = None, seed: int | None = None
) -> Outcome:
    client = digit_client(defense, seed)
    return run(grid_of, client, 3, digit_server, {}, lambda m: digits()[1][rows_of(m)])


def run(
    grid_of: GridOf,
    client: ClientAppCallable,
    nodes: int,
    server: ServerApp,
    run_config: dict[str, Any],
    labels: Callable[[Message], Tensor],
) -> Outcome:
    received, states = [], {}

    def listening(message: Message, context: Context) -> Message:
        states[f"node-{context.node_id}"] = context.state
        for record in ("gradients", "cut-layer"):
            if record in message.content:
                (gradient,) = message.content[record].to_numpy_ndarrays()
                received.append((gradient, labels(message).numpy()))
        return client(message, context)

    context = Context(1, 1, {}, RecordDict(), run_config)
    server(grid_of(listening, nodes), context)
    states["server"] = context.state
    weights = {
        f"{place}.{name}": weight
        for place, state in states.items()
        if "model" in state
        for name, weight in state["model"].to_torch_state_dict().items()
    }
    return Outcome(weights, float(context.state["metrics"]["auc"]), received)


DOCUMENT = Path(__file__).parents[2] / "docs" / "existing-deployments.md"


def documented(adapter: str, defense: str) -> list[float]:
    """Return test AUC and leak AUCs of a run as the documentation shows them."""
    first, lines = f"| {adapter} | {defense} |", DOCUMENT.read_text().splitlines()
    [line] = [each for each in lines if each.startswith(first)]
    return [float(cell) for cell in line.split("|")[3:6]]
