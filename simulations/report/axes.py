"""Axes: from values to places in a chart, with round numbers along them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .scene import Line, Scene, Style, Text

LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 12.0, 42.0  # room around the plot itself


@dataclass(frozen=True)
class Scale:
    """Turns values into places along one axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    whole: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value; one beyond an end is put there."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return round values along the axis."""
        if self.log:
            return _powers(self.low, self.high)
        step = _round_step((self.high - self.low) / count, self.whole)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]

    def text(self, name: str) -> str:
        """Return the axis as text, from which a page reads values back."""
        ends = f"{self.start:g} {self.end:g} {self.low:.10g} {self.high:.10g}"
        return f"{ends} {int(self.log)} {name}"


def tick_texts(values: Sequence[float]) -> list[str]:
    """Return round values with as many digits as they have."""
    for digits in range(3, 8):
        texts = [shown(value, digits) for value in values]
        told = zip(map(float, texts), values, strict=True)
        if all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in told):
            break
    return texts


def _round_step(step: float, whole: bool) -> float:
    if whole:
        step = max(step, 1.0)
    power = 10.0 ** math.floor(math.log10(step))
    sizes = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    return next(n * power for n in sizes if n * power >= step * 0.999)


def _powers(low: float, high: float) -> list[float]:
    base = 10.0 if high / low > 300 else 2.0
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    step = max(1, (last - first) // 6 + 1)
    return [base**number for number in range(first, last + 1, step)]


def shown(value: float, digits: int = 3) -> str:
    """Return a number for a reader."""
    if value == 0:
        return "0"
    size = abs(value)
    if not 1e-3 <= size < 1e6:
        mantissa, _, power = f"{value:.{digits - 2}e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:.0f}" if size >= 1e3 else f"{value:.{digits}g}"


def span(values: Iterable[float], margin: float = 0.06) -> tuple[float, float]:
    """Return ends of an axis that leave some room around all values."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    room = (high - low) * margin or max(abs(high) * 0.05, 1e-9)
    return low - room, high + room


def frame(
    scene: Scene,
    x: tuple[float, float],
    y: tuple[float, float],
    names: tuple[str, str],
    log_x: bool = False,
    whole_x: bool = False,
    ticks: bool = True,
) -> tuple[Scale, Scale]:
    """Draw grid, numbers and names of two axes; return their scales."""
    left = LEFT if ticks else 24.0
    bottom = scene.height - (BOTTOM if ticks else 24.0)
    across = Scale(*x, left, scene.width - RIGHT, log_x, whole_x)
    up = Scale(*y, bottom, TOP)
    values = across.ticks() if ticks else []
    for value, text in zip(values, tick_texts(values), strict=True):
        at = across(value)
        scene.items.append(Line(((at, TOP), (at, bottom))))
        scene.items.append(Text(at, bottom + 15, text, 11, colour="soft"))
    values = up.ticks() if ticks else []
    for value, text in zip(values, tick_texts(values), strict=True):
        at = up(value)
        scene.items.append(Line(((left, at), (across.end, at))))
        scene.items.append(Text(left - 6, at + 4, text, 11, "end", "soft"))
    corners = ((left, TOP), (left, bottom), (across.end, bottom))
    scene.items.append(Line(corners, Style("soft")))
    middle = (left + across.end) / 2
    scene.items.append(Text(middle, scene.height - 7, names[0], 12))
    scene.items.append(Text(13, (TOP + bottom) / 2, names[1], 12, turned=True))
    scene.scales = {"x": across.text(names[0]), "y": up.text(names[1])}
    return across, up
