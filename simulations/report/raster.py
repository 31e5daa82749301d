"""A chart as PNG, drawn with Pillow: the same shapes as in the page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from flower_vfl.errors import ConfigError

from .scene import COLOURS, Bar, Line, Marks, Point, Scene, Text, shape_path

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

SCALE = 2  # pixels of the picture for each of the chart's
_SMOOTH = 2  # and as many more while it is drawn, for smooth edges


def write_png(scene: Scene, path: Path) -> None:
    """Write a chart as PNG."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise ConfigError(
            "PNG pictures need Pillow: pip install 'flower-vfl[sim]'"
        ) from error
    factor = SCALE * _SMOOTH
    size = round(scene.width * factor), round(scene.height * factor)
    image = Image.new("RGB", size, COLOURS["paper"])
    for item in scene.items:
        if isinstance(item, Text):
            _text(image, item, factor)
        elif isinstance(item, Marks):
            _marks(image, item, factor)
        else:
            _stroke(ImageDraw.Draw(image), item, factor)
    small = round(scene.width * SCALE), round(scene.height * SCALE)
    image.resize(small, Image.Resampling.LANCZOS).save(path, optimize=True)


def _stroke(draw: ImageDraw.ImageDraw, item: Line | Bar, factor: float) -> None:
    if isinstance(item, Bar):
        ends = item.x, item.y, item.x + max(item.width, 0.5), item.y + item.height
        draw.rectangle([value * factor for value in ends], COLOURS[item.colour])
        return
    width = max(round(item.width * factor), 1)
    colour = COLOURS[item.style.colour]
    for piece in dashed(item.points, item.style.dash):
        scaled = [(x * factor, y * factor) for x, y in piece]
        draw.line(scaled, colour, width, joint="curve")


def dashed(points: tuple[Point, ...], dash: tuple[float, ...]) -> Iterator[list[Point]]:
    """Yield the pieces of a dashed line."""
    if not dash:
        yield list(points)
        return
    place, left = 0, dash[0]
    piece = [points[0]]
    for (x0, y0), (x1, y1) in pairwise(points):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        done = 0.0
        while length - done >= left:
            done += left
            at = x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length
            if place % 2 == 0:
                yield [*piece, at]
            piece = [at]
            place += 1
            left = dash[place % len(dash)]
        left -= length - done
        piece.append((x1, y1))
    if place % 2 == 0 and len(piece) > 1:
        yield piece


def _marks(image: Image.Image, item: Marks, factor: float) -> None:
    from PIL import ImageDraw

    # On a layer of its own, so that many points shine through each other.
    draw = ImageDraw.Draw(image, "RGBA")
    colour = _rgba(COLOURS[item.style.colour], item.opacity)
    paper = _rgba(COLOURS["paper"], item.opacity)
    edge, thick = round(0.5 * factor), round(1.5 * factor)
    r = item.size * factor
    for x, y in ((x * factor, y * factor) for x, y in item.points):
        lines = shape_path(item.style.marker, x, y, r)
        if not lines:
            draw.ellipse([x - r, y - r, x + r, y + r], colour, paper, edge)
        elif len(lines) == 1:
            draw.polygon(lines[0], colour, paper, edge)
        else:
            for line in lines:
                draw.line(line, colour, thick)


def _rgba(colour: str, opacity: float) -> tuple[int, int, int, int]:
    red, green, blue = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return red, green, blue, round(255 * opacity)


def _text(image: Image.Image, item: Text, factor: float) -> None:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(item.size * factor)  # one that comes with Pillow
    colour = COLOURS[item.colour]
    if not item.turned:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[item.anchor]
        at = item.x * factor, item.y * factor
        ImageDraw.Draw(image).text(at, item.text, colour, font, anchor)
        return
    width, height = (
        round(font.getlength(item.text)) + 2,
        round(item.size * factor * 1.4),
    )
    layer = Image.new("L", (width, height))
    ImageDraw.Draw(layer).text((width / 2, height * 0.75), item.text, 255, font, "ms")
    layer = layer.transpose(Image.Transpose.ROTATE_90)
    corner = item.x * factor - height * 0.75, item.y * factor - width / 2
    image.paste(colour, (round(corner[0]), round(corner[1])), layer)
