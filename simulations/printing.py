"""Tables and names of metrics for people: on a terminal and in Markdown."""

import json
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

_SCREEN = 80  # columns of a terminal, if it is not narrower
_WIDTHS = ((80, 80), (20, 80), (18, 8))  # of names and heads: the first that fits


def metric_name(metric: str) -> str:
    """Return the name of a metric for a reader."""
    names = metric.replace("auc", "AUC").replace("pearson", "Pearson's ρ")
    return names.replace("_", " ")


Rows = Sequence[Sequence[str]]


def text_table(
    heads: Sequence[str], rows: Rows, left: int = 1, lines: bool = False
) -> Table:
    """Return a table for the terminal; all but the first columns are numbers."""
    table = Table(show_lines=lines)
    for place, head in enumerate(heads):
        justify = "left" if place < left else "right"
        table.add_column(head, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    return table


def text_tables(
    heads: Sequence[str], rows: Rows, left: int = 1, lines: bool = False
) -> Iterator[Table]:
    """Yield one table, or several with the same first columns that each fit a screen.

    A name that is too wide is folded, a number never.
    """
    names, columns = max(left, 1), list(zip(heads, *rows, strict=True))
    screen = min(_SCREEN, Console().width)
    lengths = [max(map(len, head.splitlines()), default=0) for head in heads]
    cells = [max(map(len, "\n".join(column[1:]).split("\n"))) for column in columns]
    for name, head in _WIDTHS:
        words = [min(length, head) for length in lengths]
        widths = list(map(max, words, cells))
        widths[:names] = [min(width, name) for width in widths[:names]]
        if sum(width + 3 for width in widths) < screen:
            break
    if words != lengths:  # heads are folded, if possible after the attack's name
        heads = [head.replace(":", ":\n") for head in heads]
    left_over = list(range(names, len(heads)))
    while True:
        shown, left_over = [*range(names), *left_over[:1]], left_over[1:]
        room = screen - 1 - sum(widths[place] + 3 for place in shown)
        while left_over and (room := room - widths[left_over[0]] - 3) >= 0:
            shown.append(left_over.pop(0))
        part = [[row[place] for place in shown] for row in (heads, *rows)]
        table = text_table(part[0], part[1:], left, lines)
        for place, made in zip(shown, table.columns, strict=True):
            made.max_width = widths[place]
        yield table
        if not left_over:
            return


def markdown_table(heads: Sequence[str], rows: Rows, left: int = 1) -> str:
    """Return a table in Markdown; all but the first columns are numbers."""
    ruler = "|" + "---|" * left + "---:|" * (len(heads) - left)
    cells = ([cell.replace("|", "\\|") for cell in row] for row in (heads, *rows))
    head, *others = (f"| {' | '.join(row)} |" for row in cells)
    return "\n".join([head, ruler, *others])


def print_json(document: object) -> None:
    """Print JSON, which has no numbers that are not finite: these are null."""
    text = json.dumps(document)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda name: None))
    print(text)
