"""Tables and names of metrics for people: on a terminal and in Markdown."""

from collections.abc import Iterable, Sequence

from rich.table import Table


def metric_name(metric: str) -> str:
    """Return the name of a metric for a reader."""
    words = metric.replace("_", " ").replace("auc", "AUC")
    return words.replace("pearson", "Pearson's ρ")


def text_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 1,
    lines: bool = False,
) -> Table:
    """Return a table for the terminal; all but the first columns are numbers."""
    table = Table(show_lines=lines)
    for place, head in enumerate(heads):
        justify = "left" if place < left else "right"
        table.add_column(head, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1
) -> str:
    """Return a table in Markdown; all but the first columns are numbers."""
    ruler = "|" + "---|" * left + "---:|" * (len(heads) - left)
    cells = ([cell.replace("|", "\\|") for cell in row] for row in (heads, *rows))
    head, *others = (f"| {' | '.join(row)} |" for row in cells)
    return "\n".join([head, ruler, *others])
