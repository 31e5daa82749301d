"""What the label party does to gradients before they leave, and what it refuses."""

from collections.abc import Callable

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor
from flower_vfl.objectives import Objective, Task
from flower_vfl.protocol.config import TrainingConfig
from flower_vfl.randomness import draw_secret
from flower_vfl.transform import Defender, GradientTransform

DefenseFactory = Callable[[str], GradientTransform]


class DefensePolicy:
    """What the label party does to gradients before they leave, and what it refuses."""

    def __init__(
        self, own: GradientTransform | None, build: DefenseFactory | None
    ) -> None:
        self._own = [] if own is None else [own]
        self._build = build

    def prepare(
        self,
        config: TrainingConfig,
        name: str,
        objective: Objective,
        trust_server: bool,
    ) -> tuple[Defender, int]:
        """Return the defender of a run, and the key of all that hides labels."""
        known = config.noise_seed if trust_server else ""
        key = int(known, 16) if known else draw_secret()
        found = self._defender(config, name, objective.task, trust_server, key)
        protects = config.defended or found.transforms or objective.hides
        return found, key if protects else 0

    def _defender(
        self,
        config: TrainingConfig,
        name: str,
        task: Task,
        trust_server: bool,
        seed: int,
    ) -> Defender:
        """Return the defender of a run, or refuse what the strategy asks for."""
        if config.defended == "strategy" and not (trust_server or self._own):
            raise untrusted(name, "the raw gradients", None)
        transforms = list(self._own)
        if config.defended == "label":
            transforms.append(self._named(config.defense, name))
        leakage = Leakage.from_text(config.leakage) if config.leakage else None
        if leakage is None:
            return Defender(transforms, seed)
        if leakage.shows_labels and not trust_server:
            raise PartyError(
                name,
                "measuring every layer, or embeddings with labels, shows the labels to "
                "the server and the passive parties, and this node does not trust the "
                "server",
                "Measure without layers, and membership without labels; both are for "
                "simulations",
            )
        if config.defended != "strategy":
            return Defender(transforms, seed, LeakageMonitor(leakage, task))
        if leakage.membership:
            raise PartyError(
                name,
                "is asked how well its synthetic labels hide, and a defense at the "
                "strategy changes its gradients after they left",
                'Have this node apply the defense: Defense(..., at="label") at the '
                'strategy (defense-at="label" in the run config)',
            )
        return Defender(transforms, seed)

    def _named(self, defense: str, name: str) -> GradientTransform:
        if self._build is None:
            raise PartyError(
                name,
                f"is told to apply the defense '{defense}' and cannot build one",
                "Give LabelParty(build_defense=flower_vfl.strategies.build_defense)",
            )
        try:
            return self._build(defense)
        except ConfigError as error:
            remedy = "Correct the defense in the strategy's settings"
            raise PartyError(name, str(error), remedy) from error


def untrusted(name: str, what: str, step: int | None) -> PartyError:
    """Return the error of a label party that is asked for too much."""
    return PartyError(
        name,
        f"a defense at the strategy asks for {what}, and this node does not trust the "
        "server with them",
        "Set trust-server=true in this node's config, or have this node apply the "
        'defense itself: Defense(..., at="label") at the strategy '
        '(defense-at="label" in the run config)',
        step,
    )
