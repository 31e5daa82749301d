"""Hostile streams beside a training over sessions that starts, reconnects and ends.

    python benchmarks/hostile_streams.py --streams 200

Attackers in another process open streams as fast as they lose them: silent, slow,
garbage, half a proof, and connections without a stream. They know the ids of the run
and of the nodes. Prints the seconds in which all nodes have joined, at the start and
after each cut, without and with the attackers, and whether the weights are bit-equal.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from hostile_cases import CutGrid, HostileStreams, train
from vertical_cases import assert_equal


class Lines(logging.Handler):
    """Counts the lines of the server's log that report refusals."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count a line."""
        self.count += record.getMessage().startswith("Session refused")


def attack(pipe: Connection, address: str, count: int, *known: Any) -> None:
    """Run the attackers until the other process says stop."""
    hostile = HostileStreams(address, count, run_id=known[0], nodes=known[1])
    while sum(hostile.opened.values()) < count:
        time.sleep(0.01)
    time.sleep(1.0)
    pipe.send(None)
    pipe.recv()
    pipe.send((dict(hostile.opened), hostile.admitted))
    hostile.stop()


def main() -> None:
    """Train twice and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    lines, logger = Lines(), logging.getLogger("flwr")
    logger.handlers[:] = [lines]

    calm = CutGrid(parties=3, cut_every=20)
    expected = train(calm, given.epochs)
    print(f"without: {figures(calm.joined)}", flush=True)

    grid = CutGrid(parties=3, cut_every=20)
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    known = (grid.run.run_id, list(grid.get_node_ids()))
    process = context.Process(
        target=attack, args=(far, grid.listen(), given.streams, *known), daemon=True
    )
    process.start()
    pipe.recv()
    start = time.monotonic()
    found = train(grid, given.epochs)
    seconds = time.monotonic() - start
    pipe.send(None)
    opened, admitted = pipe.recv()
    process.join(10)
    print(f"with {given.streams}: {figures(grid.joined)} in {seconds:.1f} s")
    each = ", ".join(f"{kind} {number}" for kind, number in opened.items())
    print(f"streams opened: {sum(opened.values())} ({each}), admitted: {admitted}")
    print(f"log lines of refusals: {lines.count}")
    assert_equal(found, expected)
    print("weights: bit-equal")
    if admitted or max(grid.joined) > 2.0:
        raise SystemExit("a stranger was admitted, or a node took more than 2 s")


def figures(joined: list[float]) -> str:
    """Return the number of times that all nodes joined, and the slowest."""
    return f"all nodes joined {len(joined)} times, within {max(joined):.3f} s"


if __name__ == "__main__":
    main()
