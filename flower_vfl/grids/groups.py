"""Requests to parties that one node answers for, and how its reply is divided."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from flower_vfl.protocol.messages import GRADIENT, Content, TensorArray, Verb, to_tensor

TOGETHER = (Verb.FORWARD, Verb.BACKWARD, Verb.EMBED)


class NodeGroup(NamedTuple):
    """Parties that one node answers for, with one array for all of them."""

    name: str
    node: int
    members: tuple[str, ...]


def join_requests(
    groups: Sequence[NodeGroup], contents: Mapping[str, Content]
) -> dict[str, Content]:
    """Return one request for each group whose parties can be asked together."""
    found = dict(contents)
    for group in groups:
        joined = _joined([contents.get(name) for name in group.members])
        if joined is not None:
            for name in group.members:
                del found[name]
            found[group.name] = joined
    return found


def _joined(contents: Sequence[Content | None]) -> Content | None:
    """Return one request for all parties; None if they are to be asked one by one.

    That is where one of them is left out, where its gradient was withheld or differs in
    shape (the party itself reports that), and where parties measure something.
    """
    first, gradients = contents[0], []
    for each in contents:
        if first is None or each is None or each.labels is not None:
            return None
        if "probe" in each.config or each.config != first.config:
            return None
        if each.gradient_step:
            if GRADIENT not in each.arrays:
                return None
            gradients.append(to_tensor(each.arrays[GRADIENT]))
    if first is None or len({(g.shape, g.dtype) for g in gradients}) > 1:
        return None
    arrays = {GRADIENT: TensorArray(torch.stack(gradients))} if gradients else {}
    return replace(first, arrays=arrays)


def split_replies(
    groups: Sequence[NodeGroup], replies: Mapping[str, Content]
) -> dict[str, Content]:
    """Return one reply for each party."""
    found = dict(replies)
    for group in groups:
        if group.name not in found:
            continue
        reply = found.pop(group.name)
        if group.name not in reply.arrays:
            found |= {name: Content() for name in group.members}
            continue
        parts = to_tensor(reply.arrays[group.name]).unbind()
        for name, part in zip(group.members, parts, strict=True):
            found[name] = Content(arrays={name: TensorArray(part)})
    return found
