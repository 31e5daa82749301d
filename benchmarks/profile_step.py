"""Where the time of a training step under Ray goes.

Trains over gRPC streams and then over Unix sockets. Follows the last reply of each of
the two hops of a step, because the step waits for it, from the strategy through the
sockets and threads to the party and back. The parts add up to the step. The second
table has the processor time of all processes, which other work on the machine disturbs
less.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from flower_vfl.simulations.runtime.flower_runtime import run_app

APP = Path(__file__).parent / "step_app"
sys.path.insert(0, str(APP))

from step_app.trace import FOLDER  # noqa: E402

PASSIVE, LABEL = "train.vfl_forward", "train.vfl_step"
NAMES = {PASSIVE: "passive party", LABEL: "label party"}
WARM_UP = 8  # steps
PAUSE = 0.05  # seconds of the server without an event, after which another run begins
Key = tuple[int, int]
Event = tuple[str, Any, float, float, float, float]


def record(
    advertise: str, batch_size: int, parties: int, width: int, turns: int
) -> list[list[Event]]:
    """Train under Ray; return the events of the server and of the other processes."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        config = {
            "out": f"{folder}/seconds.json",
            "batch-size": batch_size,
            "parties": parties,
            "width": width,
            "turns": turns,
            "advertise": advertise,
        }
        run_app(APP, run_config=config, nodes=parties + 1, timeout=600)
        files = [path.read_text() for path in Path(folder).glob("*.jsonl")]
    found = [[json.loads(line) for line in text.splitlines()] for text in files]
    return sorted(found, key=lambda events: all(e[0] != "wait" for e in events))


class Trace:
    """The events of a run by request."""

    def __init__(self, processes: list[list[Event]]) -> None:
        self.server, *self.nodes = processes
        self.times: dict[str, dict[Key, tuple[float, float, float]]]
        self.times = defaultdict(dict)
        self.answers: list[dict[Key, tuple[float, float]]] = []
        for events in processes:
            answered = {}
            for kind, key, start, end, busy, _ in events:
                if isinstance(key, list):
                    self.times[kind][key[0], key[1]] = start, end, busy
                    if kind == "answer":
                        answered[key[0], key[1]] = start, end
            self.answers.append(answered)

    def hops(self) -> list[tuple[str, float, float, list[Key]]]:
        """Return kind, start, end and requests of each hop of training."""
        found, keys, start = [], [], 0.0
        for kind, key, begin, end, *_ in self.server:
            if kind == "put":
                keys.append(key)
            elif kind == "send":
                start = begin
            elif kind == "wait":
                if keys and keys[0][2] in NAMES:
                    requests = [(key[0], key[1]) for key in keys]
                    found.append((keys[0][2], start, end, requests))
                keys = []
        return found

    def behind_others(self, key: Key, since: float, until: float) -> float:
        """Return the seconds in which the process of a party answered others."""
        for answered in self.answers:
            if key in answered:
                spans = answered.values()
                return sum(
                    max(0.0, min(end, until) - max(start, since))
                    for start, end in spans
                )
        return 0.0

    def path(
        self, kind: str, start: float, end: float, keys: list[Key]
    ) -> dict[str, float]:
        """Return the parts of a hop, along its last reply."""
        times = self.times
        key = max(keys, key=lambda each: times["receive"][each][0])
        put = times["put"][key][1]
        arrival = times["arrival"][key][0]
        begin, _, _ = times["answer"][key]
        called, returned, _ = times["app"][key]
        received, decoded, _ = times["receive"][key]
        # A node reads a Unix socket when it has answered the request before.
        unread = self.behind_others(key, put, arrival)
        queued = self.behind_others(key, arrival, begin)
        name = NAMES[kind]
        return {
            f"{name}: compute": returned - called,
            f"{name}: waits for another party in its process": unread + queued,
            "serialisation": (put - start)
            + (called - begin)
            + (times["encode"][key][1] - returned)
            + (decoded - received),
            "bytes under way": (arrival - put - unread)
            + (received - times["encode"][key][1]),
            "thread switches": (begin - arrival - queued) + (end - decoded),
        }


def critical_path(trace: Trace) -> pd.Series[float]:
    """Return the mean milliseconds of a step by part."""
    hops = trace.hops()[2 * WARM_UP :]
    parts: dict[str, float] = defaultdict(float)
    steps = sum(kind == LABEL for kind, *_ in hops)
    for before, hop in zip([None, *hops], hops, strict=False):
        for part, seconds in trace.path(*hop).items():
            parts[part] += seconds
        gap = 0.0 if before is None else hop[1] - before[2]
        if gap < PAUSE:
            parts["strategy"] += gap
    return pd.Series(parts) / steps * 1e3


def processor_time(trace: Trace) -> pd.Series[float]:
    """Return the milliseconds of processor time of a step by part."""
    hops = trace.hops()[2 * WARM_UP :]
    steps = sum(kind == LABEL for kind, *_ in hops)
    parts: dict[str, float] = defaultdict(float)
    for events in (trace.server, *trace.nodes):
        name = "server" if events is trace.server else "nodes"
        inside = [e for e in events if hops[0][1] <= e[2] <= hops[-1][2]]
        for before, (kind, _, start, _, busy, total) in pairwise(inside):
            if name == "nodes" or start - before[3] < PAUSE:
                parts[f"{name}: transport"] += total - before[5]
            if kind in ("app", "encode", "decode"):
                part = "compute of the parties" if kind == "app" else "serialisation"
                parts[part] += busy
                parts[f"{name}: transport"] -= busy
    parts["server: strategy and transport"] = parts.pop("server: transport")
    parts["nodes: transport, and Ray's own threads"] = parts.pop("nodes: transport")
    return pd.Series(parts) / steps * 1e3


def show(title: str, parts: dict[str, pd.Series[float]]) -> None:
    """Print a table of milliseconds with a column for each transport."""
    table = pd.DataFrame(parts).fillna(0.0)
    table = table.sort_values(table.columns[-1], ascending=False)
    table.loc["sum"] = table.sum()
    print(f"\n{title}, in ms")
    print(table.to_string(float_format="{:.2f}".format))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--parties", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    shape = args.batch_size, args.parties, args.width
    traces = {
        name: Trace(record(advertise, *shape, args.turns))
        for name, advertise in (("gRPC", "127.0.0.1"), ("Unix socket", ""))
    }
    paths = {name: critical_path(trace) for name, trace in traces.items()}
    times = {name: processor_time(trace) for name, trace in traces.items()}
    name = "B={} parties={} d={}".format(*shape)
    show(f"{name}: a step under Ray, along its last replies", paths)
    show(f"{name}: processor time of a step", times)


if __name__ == "__main__":
    main()
