"""What passive parties measure about their own gradients, for simulations."""

from dataclasses import replace
from typing import cast

from torch import Tensor

from flower_vfl.errors import PartyError
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor, members
from flower_vfl.objectives import Task
from flower_vfl.parties.passive import PassiveParty
from flower_vfl.records import Measurement

from .messages import CLEAN, Content, to_floats, to_tensor


def probe(
    party: PassiveParty, step: int, gradient: Tensor | None, content: Content
) -> list[Measurement]:
    """Train on a gradient and measure layers and membership, for simulations."""
    settings, task = Leakage.from_text(content.text("probe")), content.text("task")
    labels = None if content.labels is None else to_tensor(content.labels)
    clean = {}
    if settings.layers and CLEAN in content.arrays:
        clean = party.trace_layers(step, to_floats(content.arrays[CLEAN]))
    layers = party.backward(step, gradient, probed=settings.layers)
    measured: list[Measurement] = []
    if layers and labels is not None:
        alone = replace(settings, coalitions=(), baseline=False)
        monitor = LeakageMonitor(alone, cast(Task, task))
        measured = monitor.measure_layers(layers, labels, step, party.name, clean)
    if settings.membership and step % settings.every == 0:
        known = labels if settings.membership == "joint" else None
        aucs = party.membership(known, cast(Task, task))
        measured += members("embedding", aucs, step, party.name)
    return measured


def refuse_probe(name: str, content: Content) -> None:
    """Refuse a measurement that tells the server about an encrypted gradient."""
    if "probe" in content.config:
        problem = "is asked to measure gradients that the server must not see"
        remedy = "Measure layers and membership in a run that is not sealed"
        raise PartyError(name, problem, remedy, content.gradient_step)
