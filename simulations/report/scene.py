"""A chart as a list of shapes, drawn once and then written as SVG or as PNG.

Colours are names (see :data:`COLOURS`), so that a page can change them with the
reader's light or dark screen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .markup import Markup, element, join

Point = tuple[float, float]

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart;
# without yellow, which is lost on paper. The first is the ink itself.
COLOURS = {
    "ink": "#1a1a1a",
    "soft": "#5b5b5b",
    "grid": "#dddddd",
    "paper": "#ffffff",
    "s0": "#1a1a1a",
    "s1": "#0072b2",
    "s2": "#d55e00",
    "s3": "#009e73",
    "s4": "#cc79a7",
    "s5": "#e69f00",
    "s6": "#56b4e9",
}
SERIES = [name for name in COLOURS if name.startswith("s") and name[1:].isdigit()]
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "down", "plus")
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 3), (2, 3), (9, 3, 2, 3), (4, 2))
FONT = "system-ui, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"


@dataclass(frozen=True)
class Style:
    """How a series looks: three ways to tell it from the others."""

    colour: str = "s0"
    marker: str = "circle"
    dash: tuple[float, ...] = ()

    @classmethod
    def number(cls, colour: int, shape: int) -> Style:
        """Return a style by numbers, which begin again where the list ends."""
        return cls(
            SERIES[colour % len(SERIES)],
            MARKERS[shape % len(MARKERS)],
            DASHES[shape % len(DASHES)],
        )


@dataclass(frozen=True)
class Text:
    """A line of text; `anchor` is start, middle or end, `turned` reads upwards.

    Like all shapes it belongs to the groups of `series`, and goes when all of them do.
    """

    x: float
    y: float
    text: str
    size: float = 12
    anchor: str = "middle"
    colour: str = "ink"
    turned: bool = False
    series: tuple[int, ...] = ()


@dataclass(frozen=True)
class Line:
    """A line through points; one with a `name` tells its values to who points at it."""

    points: tuple[Point, ...]
    style: Style = Style("grid")
    width: float = 1.0
    series: tuple[int, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Marks:
    """Points of one shape; with `tips`, each says something to who points at it.

    `series` are the groups of each point, or one for all of them.
    """

    points: tuple[Point, ...]
    style: Style
    size: float = 4.0
    opacity: float = 1.0
    series: tuple[int, ...] = ()
    tips: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bar:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    series: tuple[int, ...] = ()
    tip: str = ""


Item = Text | Line | Marks | Bar


@dataclass
class Scene:
    """A chart."""

    title: str
    width: float = 420
    height: float = 290
    items: list[Item] = field(default_factory=list)
    scales: dict[str, str] = field(default_factory=dict)

    def swatch(self) -> Markup:
        """Return it as SVG for a legend in a page, next to its name."""
        drawn = [_draw(item, _of_page) for item in self.items]
        return element(
            "svg", *drawn, viewBox=self._size, class_="swatch", aria_hidden="true"
        )

    @property
    def _size(self) -> str:
        return f"0 0 {self.width:g} {self.height:g}"

    def svg(self, standalone: bool = False) -> Markup:
        """Return the chart as SVG."""
        colour = COLOURS.__getitem__ if standalone else _of_page
        drawn = [_draw(item, colour) for item in self.items]
        title = element("title", self.title)
        if not standalone:
            return element(
                "svg",
                title,
                *drawn,
                viewBox=self._size,
                role="img",
                aria_label=self.title,
                tabindex=0,
                data_x=self.scales.get("x"),
                data_y=self.scales.get("y"),
            )
        paper = element("rect", width="100%", height="100%", fill=colour("paper"))
        return element(
            "svg",
            title,
            paper,
            *drawn,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=self._size,
            width=f"{self.width:g}",
            height=f"{self.height:g}",
            font_family=FONT,
        )


def _of_page(name: str) -> str:
    return f"var(--{name})"


def shape_path(marker: str, x: float, y: float, r: float) -> list[list[Point]]:
    """Return the corners of a marker, as one or more lines; a circle has none."""
    a, b = 1.25 * r, 0.75 * r
    corners: dict[str, list[list[Point]]] = {
        "circle": [],
        "square": [[(-r, -r), (r, -r), (r, r), (-r, r)]],
        "triangle": [[(0, -a), (a, b), (-a, b)]],
        "down": [[(0, a), (a, -b), (-a, -b)]],
        "diamond": [[(0, -a), (a, 0), (0, a), (-a, 0)]],
        "cross": [[(-r, -r), (r, r)], [(-r, r), (r, -r)]],
        "plus": [[(-a, 0), (a, 0)], [(0, -a), (0, a)]],
    }
    return [[(x + dx, y + dy) for dx, dy in line] for line in corners[marker]]


def _marker(marker: str, x: float, y: float, r: float) -> str:
    """Return the path of a marker; round, since many of them are in one file."""
    if marker == "circle":
        half = f"a{r:g},{r:g} 0 1 0 "
        return f"M{x - r:.1f},{y:.1f}{half}{2 * r:g},0{half}{-2 * r:g},0"
    lines = shape_path(marker, x, y, r)
    close = "z" if len(lines) == 1 else ""
    return "".join(
        "M" + "L".join(f"{px:.1f},{py:.1f}" for px, py in line) + close
        for line in lines
    )


def _draw(item: Item, colour: Callable[[str], str]) -> Markup:
    if isinstance(item, Text):
        at = f"{item.x:.1f}", f"{item.y:.1f}"
        turn = f"rotate(-90 {at[0]} {at[1]})" if item.turned else None
        return element(
            "text",
            item.text,
            x=at[0],
            y=at[1],
            font_size=f"{item.size:g}",
            text_anchor=item.anchor,
            fill=colour(item.colour),
            transform=turn,
            data_series=listed(item.series),
        )
    if isinstance(item, Bar):
        return element(
            "rect",
            x=f"{item.x:.1f}",
            y=f"{item.y:.1f}",
            width=f"{max(item.width, 0.5):.1f}",
            height=f"{item.height:.1f}",
            fill=colour(item.colour),
            class_="mark" if item.tip else None,
            data_series=listed(item.series),
            data_at=f"{item.x + item.width:.1f},{item.y + item.height / 2:.1f}",
            data_tip=item.tip or None,
        )
    if isinstance(item, Line):
        return element(
            "polyline",
            points=" ".join(f"{x:.1f},{y:.1f}" for x, y in item.points),
            fill="none",
            stroke=colour(item.style.colour),
            stroke_width=f"{item.width:g}",
            stroke_dasharray=" ".join(f"{d:g}" for d in item.style.dash) or None,
            stroke_linejoin="round",
            class_="line" if item.name else None,
            data_series=listed(item.series),
            data_name=item.name or None,
        )
    return _draw_marks(item, colour)


def _draw_marks(item: Marks, colour: Callable[[str], str]) -> Markup:
    hollow = item.style.marker in ("cross", "plus")
    paint = colour(item.style.colour)
    shared: dict[str, str | int | None] = {
        "fill": "none" if hollow else paint,
        "stroke": paint if hollow else colour("paper"),
        "stroke_width": "1.5" if hollow else "0.5",
        "opacity": f"{item.opacity:g}" if item.opacity < 1 else None,
    }
    paths = [_marker(item.style.marker, x, y, item.size) for x, y in item.points]
    if not item.tips:  # many, close to each other
        shared |= {} if hollow else {"stroke": "none"}
        series = listed(item.series)
        whole = "".join(paths)
        return element("path", d=whole, class_="points", data_series=series, **shared)
    each = len(item.series) == len(item.points)
    drawn = []
    for n, (x, y) in enumerate(item.points):
        series = listed(item.series[n : n + 1] if each else item.series)
        at, tip = f"{x:.1f},{y:.1f}", item.tips[n]
        told = {"class_": "mark", "data_at": at, "data_tip": tip, "data_series": series}
        drawn.append(element("path", d=paths[n], **told, **shared))
    return join(*drawn)


def listed(series: tuple[int, ...]) -> str | None:
    """Return numbers of groups as the text of an attribute; None if there are none."""
    return " ".join(map(str, dict.fromkeys(series))) or None
