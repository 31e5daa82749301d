"""The ClientApp of every party."""

from flwr.app import Context

from flower_vfl import (
    CrossEntropy,
    LabelParty,
    PassiveParty,
    resident,
    vertical_client_app,
)
from flower_vfl.strategies import build_defense
from my_app.task import bottom_model, load_features, load_labels, top_model


def passive(context: Context) -> PassiveParty:
    """Make a passive party at its node."""
    features, ids = load_features(context)
    return PassiveParty(features, bottom_model(features.shape[1]), ids=ids)


def label(context: Context) -> LabelParty:
    """Make the label party at its node."""
    labels, ids = load_labels(context)
    objective = CrossEntropy(top_model(int(context.run_config["parties"])))
    return LabelParty(labels, objective, ids=ids, build_defense=build_defense)


app = resident(vertical_client_app(passive, label))
