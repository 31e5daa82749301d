"""The parties."""

import os

from flwr.app import Context

from flower_vfl import CrossEntropy, LabelParty, PassiveParty, vertical_client_app
from flower_vfl.alignment import AlignmentSettings
from flower_vfl.grids.resident import resident

from . import trace
from .work import bottom_model, features, labels, top_model

if trace.FOLDER in os.environ:
    trace.install()


def passive(context: Context) -> PassiveParty:
    """Return the passive party of a node."""
    width = int(context.run_config["width"])
    party = int(context.node_config["partition-id"])
    return PassiveParty(features(party), bottom_model(width), device="cpu")


def label(context: Context) -> LabelParty:
    """Return the label party."""
    parties, width = (int(context.run_config[key]) for key in ("parties", "width"))
    objective = CrossEntropy(top_model(parties, width))
    return LabelParty(labels(), objective, device="cpu")


def trusting(context: Context) -> AlignmentSettings:
    """Return the settings of a simulated node, which needs no pinned keys."""
    return AlignmentSettings(trust_server=True)


app = resident(vertical_client_app(passive, label, alignment=trusting))
