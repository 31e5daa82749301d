"""Predictions for a passive party that does not say whom it asks about.

Sun et al., FLORIST, appendix D. https://arxiv.org/abs/2106.05508

docs/alignment.md ("Predictions for a passive party") says what that tells. The same row
is always hidden in the same batch, so that asking again tells nothing new.
"""

from collections.abc import Callable

import torch
from flwr.app import Context
from torch import Tensor

from flower_vfl.errors import ConfigError, PartyError, check_name
from flower_vfl.parties.base import Party
from flower_vfl.parties.label import LabelParty
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.randomness import generator

from .messages import Content, TensorArray
from .replay import Session
from .sealing import serving_use


def serving_batches(rows: int, seed: int, size: int) -> list[Tensor]:
    """Return the rows of a run in random batches, the same at every party."""
    if size < 2:
        raise ConfigError(f"hide must be at least 2 rows, got {size}")
    order = torch.randperm(rows, generator=generator(seed, "serving", size))
    return list(order.tensor_split(max(1, -(-rows // size))))


def batch_rows(party: Party, number: int, size: int) -> Tensor:
    """Return the rows of one such batch, where a party computes."""
    seed = party.configured().plan.seed
    return serving_batches(party.rows, seed, size)[number].to(party.device)


def find_batches(party: PassiveParty, own: Tensor, size: int) -> Tensor:
    """Return the number of the batch, and the place in it, of some own rows."""
    numbers = torch.arange(party.own_rows)
    if party.row_index is not None:
        numbers = torch.full((party.own_rows,), -1)
        held = party.row_index.held.nonzero().flatten()
        numbers[party.row_index.local[held]] = held
    wanted = numbers[own]
    if bool((wanted < 0).any()):
        problem = "asks about a row that was not aligned"
        remedy = "Align its id first, or ask without a batch where that is possible"
        raise PartyError(party.name, problem, remedy)
    where = torch.empty(party.rows, 2, dtype=torch.int64)
    seed = party.configured().plan.seed
    for number, batch in enumerate(serving_batches(party.rows, seed, size)):
        where[batch, 0] = number
        where[batch, 1] = torch.arange(len(batch))
    return where[wanted]


def serve(session: Session, content: Content, context: Context) -> Content:
    """Do a party's part in serving predictions."""
    stage = content.text("stage")
    check_name("stage", stage, _PARTS)
    return _PARTS[stage](session, content)


def _packed(session: Session, embedding: Tensor, number: int, size: int) -> Content:
    """Return the embedding of a passive party, encrypted in a sealed run."""
    party = session.party
    if session.seals is None:
        return Content(arrays={party.name: TensorArray(embedding)})
    at = serving_use(number, size), party.step
    return Content(arrays={party.name: session.seals.embedding(embedding, *at)})


def _ask(session: Session, content: Content) -> Content:
    """Return the embedding of what is asked about, or the batches it hides in."""
    asking, size = _passive(session.party), content.number("hide")
    own = torch.as_tensor(asking.questions, dtype=torch.int64)
    if not size and not len(own):
        return Content()
    if not size:
        embedding = asking.embed_for_use(own.to(asking.device))
        return _packed(session, embedding, 0, size)
    batches = find_batches(asking, own, size)[:, 0].tolist()
    return Content({"batches": sorted(set(batches))})


def _embed(session: Session, content: Content) -> Content:
    party = _passive(session.party)
    number, size = content.number("batch"), content.number("hide")
    rows = batch_rows(party, number, size)
    embedding = party.embed_for_use(rows, ("serving", number))
    return _packed(session, embedding, number, size)


def _predict(session: Session, content: Content) -> Content:
    party, seals = session.party, session.seals
    if not isinstance(party, LabelParty):
        raise ConfigError(f"party '{party.name}' is not the label party")
    number, size = content.number("batch"), content.number("hide")
    at = serving_use(number, size), party.step
    if seals is None:
        embeddings = content.tensors(party.codec is not None)
    else:
        embeddings = seals.embeddings(content.arrays, *at)
    if size:
        rows = batch_rows(party, number, size)
    elif party.model is None:
        rows = torch.empty(len(next(iter(embeddings.values()))))
    else:
        problem = "has features and cannot predict a row that it does not know"
        raise PartyError(party.name, problem, "Request a batch, e.g. hide=100")
    session.policy.check_evaluation(party.name, len(rows))
    found = party.predict_rows(rows, ("serving", number), embeddings)
    found = session.policy.predictions(party.name, found)
    if seals is None:
        return Content(arrays={"predictions": TensorArray(found)})
    answer = seals.answer(content.text("party"), found, *at)
    return Content(arrays={"predictions": answer})


def _tell(session: Session, content: Content) -> Content:
    """Take the answers; of a batch only those that were asked for."""
    asking, size = _passive(session.party), content.number("hide")
    found: dict[str, Tensor] = {}
    if session.seals is None:
        found = content.tensors()
    else:
        for name, array in content.arrays.items():
            use = serving_use(int(name) if size else 0, size)
            answer = session.seals.answered(array, use, asking.step)
            found[name] = torch.empty(0) if answer is None else answer
    own = torch.as_tensor(asking.questions, dtype=torch.int64)
    if not size:
        asking.answers = found.get("predictions", torch.empty(0))
        return Content()
    where = find_batches(asking, own, size).tolist()
    rows = [found[str(number)][place] for number, place in where]
    asking.answers = torch.stack(rows) if rows else torch.empty(0)
    return Content()


def _passive(party: Party) -> PassiveParty:
    if not isinstance(party, PassiveParty):
        raise ConfigError(f"party '{party.name}' is not a passive party")
    return party


_PARTS: dict[str, Callable[[Session, Content], Content]] = {
    "ask": _ask,
    "embed": _embed,
    "predict": _predict,
    "tell": _tell,
}
