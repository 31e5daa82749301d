"""The weakest setting of each defense that keeps the largest leak below a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flower_vfl.specs import parse_spec

from .methods import Method, full_name

# By name its parameter of strength, a weak value and a strong one.
STRENGTHS: dict[str, tuple[str, float, float]] = {
    "marvell": ("s", 0.05, 500.0),
    "iso": ("t", 0.1, 3000.0),
    "noisy-gradients": ("scale", 1e-5, 1.0),
    "gradient-compression": ("keep", 1.0, 1e-3),
    "ppdl": ("theta", 1.0, 1e-3),
    "label_dp": ("epsilon", 8.0, 0.1),
}
_ROUNDS, _MORE = 5, 3  # settings that are tried, and stronger ones for all seeds
_NEAR = 0.02  # below the target is close enough
_FIXED = {"auc", "over"}  # parameters that decide the strength

# Returns the largest leak of each method by its text, of the first seed or of all.
Measure = Callable[[Sequence[Method], bool], Mapping[str, float]]


@dataclass
class Search:
    """A bisection over one method's strength, from 0 (weak) to 1, by logarithms."""

    method: Method
    weak: float = 0.0
    strong: float = 1.0
    chosen: float | None = None  # the weakest that keeps the target
    tried: dict[str, float] = field(default_factory=dict)  # leaks

    @property
    def varied(self) -> tuple[str, str, dict[str, str]] | None:
        """The setting that is varied, the name in it and its parameters."""
        for setting, prefix in (("label_dp", "label_dp:"), ("defense", "")):
            text = self.method.settings.get(setting, "")
            if text and not set("|;@") & set(text):  # not several of them
                name, given = parse_spec(prefix + text)
                if full_name(name) in STRENGTHS and not _FIXED & set(given):
                    return setting, name, given
        return None

    def at(self, position: float) -> Method:
        """Return the method with a strength; unchanged if it has none to vary."""
        if (varied := self.varied) is None:
            return self.method
        setting, name, given = varied
        parameter, weak, strong = STRENGTHS[full_name(name)]
        value = f"{float(f'{weak * (strong / weak) ** position:.2g}'):g}"
        texts = [f"{key}={each}" for key, each in (given | {parameter: value}).items()]
        new = ("" if setting == "label_dp" else f"{name}:") + ",".join(texts)
        old = self.method.settings[setting]
        settings = {**self.method.settings, setting: new}
        return Method(self.method.text.replace(old, new), settings)

    @property
    def open(self) -> bool:
        """Whether a weaker setting may keep the target."""
        return self.varied is not None and self.chosen != self.weak

    def note(self, position: float, leak: float, target: float) -> None:
        """Take in what a setting leaks, and go on with a weaker or a stronger one."""
        self.tried[self.at(position).text] = leak
        if leak > target:
            self.weak = position
        else:
            self.strong = self.chosen = position
            if leak > target - _NEAR:
                self.weak = position  # good enough


def find_settings(
    methods: Sequence[Method], target: float, measure: Measure
) -> list[Search]:
    """Return each method's search; its ``at(strong)`` is what to compare.

    Settings are chosen by the leak of the first seed; stronger ones are tried if the
    mean over all seeds exceeds the target.
    """
    searches = [Search(method) for method in methods]
    for _ in range(_ROUNDS):
        still = [each for each in searches if each.open]
        asked = [(each, (each.weak + each.strong) / 2) for each in still]
        if not asked:
            break
        leaks = measure([each.at(place) for each, place in asked], False)
        for each, place in asked:
            leak = leaks.get(each.at(place).text, float("inf"))
            each.note(place, leak, target)
    for left in reversed(range(_MORE)):
        leaks = measure([each.at(each.strong) for each in searches], True)
        for each in searches:
            text = each.at(each.strong).text
            each.tried[text] = leaks.get(text, float("inf"))
        late = [each for each in searches if each.varied and each.strong < 1.0]
        late = [each for each in late if each.tried[each.at(each.strong).text] > target]
        if not (late and left):
            break
        for each in late:
            each.strong = min(1.0, each.strong + 2.0 * 2.0**-_ROUNDS)
    return searches
