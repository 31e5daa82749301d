"""Time to a test AUC over a distance: exact, pipelined, compressed, local updates.

A deployment (a SuperLink and three SuperNodes, each a process of its own) trains on
credit default, with two passive parties. The sessions of all parties pass a proxy on
loopback that delays every byte by half a round-trip time and limits the rate of each
connection in each direction, as if each organisation had a line of its own. One line
per way of training: seconds until the test AUC is at most 0.005 below that of the exact
run at its end, evaluations included, bytes on the wire until then, and the mean leak
AUC of the strongest attack. Times start with the first step: starting Flower takes the
same for all. The settings of all together were chosen on validation rows with the
seeds 100 to 102 (docs/how-to/distance.md).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flower_vfl.simulations.config import ConfigValue
from flower_vfl.simulations.deployment.cluster import (
    ID_COLUMN,
    LABEL_COLUMN,
    Cluster,
    write_party_files,
)
from flower_vfl.simulations.results import load_result
from flower_vfl.simulations.runtime.flower_runtime import (
    LOOPBACK,
    free_port,
    write_settings,
)

Settings = dict[str, ConfigValue]
CHUNK = 2**14  # bytes that are read at once
MARGIN = 0.005  # of the test AUC of the exact run
SOONER, FEWER = 5.0, 0.9  # what all together must reach at 50 ms and 100 Mbit/s
EXACT, TOGETHER = "exact", "all together"
WAYS = (EXACT, "pipelined", "compressed", "local updates", TOGETHER)


class Link(NamedTuple):
    """A line between a party and the server."""

    milliseconds: float  # round-trip time
    megabits: float  # per second, in each direction


@dataclass
class Proxy:
    """Forwards TCP connections with a delay and a rate; counts their bytes."""

    link: Link
    upstream: int
    counted: list[tuple[float, int]] = field(default_factory=list)  # time, bytes
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def connect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward both directions of one connection."""
        far_reader, far_writer = await asyncio.open_connection(LOOPBACK, self.upstream)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self.forward(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def forward(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        """Pass on the bytes of one direction, in order, each one when it is due."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(due - time.monotonic())
                if not data:
                    target.close()
                    return
                target.write(data)
                await target.drain()

        delivery = asyncio.create_task(deliver())
        free = 0.0  # when the line has sent what it got so far
        try:
            with suppress(ConnectionError):
                while data := await source.read(CHUNK):
                    free = max(free, time.monotonic()) + self.seconds(len(data))
                    self.counted.append((time.time(), len(data)))
                    under_way.put_nowait((free + self.link.milliseconds / 2e3, data))
            under_way.put_nowait((free + self.link.milliseconds / 2e3, b""))
            with suppress(ConnectionError):
                await delivery
        finally:
            delivery.cancel()
            target.close()

    async def stop(self, server: asyncio.Server) -> None:
        """Accept no more connections and close those that are open."""
        server.close()
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def seconds(self, size: int) -> float:
        """Return how long the line takes for so many bytes."""
        return size * 8e-6 / self.link.megabits

    def bytes_until(self, moment: float) -> int:
        """Return the bytes of both directions up to a time."""
        return sum(size for at, size in self.counted if at <= moment)


@contextmanager
def proxied(link: Link, upstream: int) -> Iterator[tuple[Proxy, int]]:
    """Run a proxy in a thread; yields it and its port."""
    proxy, loop = Proxy(link, upstream), asyncio.new_event_loop()
    server = loop.run_until_complete(
        asyncio.start_server(proxy.connect, LOOPBACK, 0, limit=CHUNK)
    )
    thread = threading.Thread(target=loop.run_forever, name="proxy", daemon=True)
    thread.start()
    try:
        yield proxy, server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(proxy.stop(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Run(NamedTuple):
    """A run: test AUC, seconds and bytes after each epoch, and its leak AUC."""

    aucs: list[float]
    seconds: list[float]
    bytes: list[int]
    leak: float
    step: float  # seconds

    def first(self, target: float) -> int | None:
        """Return the position of the first epoch that reaches an AUC."""
        reached = [i for i, auc in enumerate(self.aucs) if auc >= target]
        return reached[0] if reached else None


def train(cluster: Cluster, link: Link, settings: Mapping[str, ConfigValue]) -> Run:
    """Train once behind the proxy."""
    port, folder = free_port(), Path(tempfile.mkdtemp(dir=cluster.server))
    table = folder / "nodes.toml"
    roles = {name: f"{p.role} {name}" for name, p in cluster.parties.items()}
    write_settings(table, roles)
    with proxied(link, port) as (proxy, dialled):
        run_id = cluster.submit(
            {
                "address": f"{LOOPBACK}:{port}",
                "advertise": f"{LOOPBACK}:{dialled}",
                "out": str(folder),
                "nodes": str(table),
                "track": "tensorboard",
                **settings,
            }
        )
        lines: list[str] = []
        cluster.follow(run_id, lines.append)
        status, details = cluster.status(run_id)
    if status != "finished:completed":
        raise SystemExit("\n".join([*lines[-20:], f"the run is {status}: {details}"]))
    return read(folder, proxy)


def read(folder: Path, proxy: Proxy) -> Run:
    """Return what a run measured; TensorBoard's events say when."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    tests = events.Scalars("epoch/test_auc")
    began = events.Tensors("settings/text_summary")[0].wall_time
    document = load_result(folder)
    records = pd.DataFrame(document["records"]).query("metric == 'leak_flipped'")
    return Run(
        [event.value for event in tests],
        [event.wall_time - began for event in tests],
        [proxy.bytes_until(e.wall_time) - proxy.bytes_until(began) for e in tests],
        records.groupby(["party", "attack"])["value"].mean().max(),
        document["seconds"]["step"],
    )


def show(link: Link, seed: int, runs: Mapping[str, Run]) -> None:
    """Print a line per way of training, and the ratios of all together."""
    exact = runs[EXACT]
    target = exact.aucs[-1] - MARGIN
    place = f"{link.milliseconds:g} ms, {link.megabits:g} Mbit/s, seed {seed}"
    print(f"\n{place}: to a test AUC of {target:.4f}", flush=True)
    found = {}
    for way, run in runs.items():
        at = run.first(target)
        text = f"not reached (best {max(run.aucs):.4f})"
        if at is not None:
            found[way] = run.seconds[at], run.bytes[at]
            text = (
                f"epoch {at + 1}, {run.seconds[at]:.1f} s, {run.bytes[at] / 1e6:.1f} MB"
            )
        print(
            f"{way}: {text}; {run.step * 1e3:.0f} ms per step, "
            f"leak AUC {run.leak:.3f}, test AUC at the end {run.aucs[-1]:.4f}"
        )
    for way in [each for each in found if each != EXACT]:
        sooner = found[EXACT][0] / found[way][0]
        fewer = 1.0 - found[way][1] / found[EXACT][1]
        limit = ""
        if way == TOGETHER and link == Link(50, 100):
            good = sooner >= SOONER and fewer >= FEWER
            limit = f"   limit {SOONER:g} and {FEWER:.0%}: {'ok' if good else 'MISSED'}"
        print(
            f"{place}, {way}: {sooner:.1f} times sooner, {fewer:.0%} fewer bytes{limit}"
        )


def ways_of_training(given: argparse.Namespace) -> dict[str, Settings]:
    """Return the settings of each way of training."""
    pipelined: Settings = {"pipeline": given.pipeline}
    if given.pipeline:
        pipelined["learning-rate"] = given.learning_rate
    compressed: Settings = {
        "compress-embeddings": given.embeddings,
        "compress-gradients": given.gradients,
    }
    local: Settings = {"local-steps": given.local_steps}
    everything = pipelined | compressed  # local updates cost AUC, see distance.md
    settings = ({}, pipelined, compressed, local, everything)
    ways = dict(zip(WAYS, settings, strict=True))
    return {way: ways[way] for way in given.ways.split(",")}


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    """Measure every way of training over every line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rtt", type=numbers, default=[5, 50, 200], help="in ms")
    parser.add_argument("--rate", type=numbers, default=[1000, 100], help="in Mbit/s")
    parser.add_argument("--ways", default=",".join(WAYS), help="of training")
    parser.add_argument("--dataset", default="credit-default")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--width", type=int, default=128, help="of the cut layer")
    parser.add_argument("--seeds", type=int, default=1, help="from 0")
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--learning-rate", default="0.0025", help="if pipelined")
    parser.add_argument("--embeddings", default="int4", help="codec")
    parser.add_argument("--gradients", default="lowrank", help="codec")
    parser.add_argument("--local-steps", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a small run, for a test")
    given = parser.parse_args()
    if given.quick:
        given.dataset, given.batch_size, given.width = "breast-cancer", 128, 16
        given.epochs, given.rtt, given.rate = 2, [5], [100]
    settings: Settings = {
        "id-column": ID_COLUMN,
        "label-column": LABEL_COLUMN,
        "parties": 2,
        "width": given.width,
        "epochs": given.epochs,
        "batch-size": given.batch_size,
        "attack": "norm,cosine",
        "leak-every": 5,
    }
    ways = ways_of_training(given)
    with tempfile.TemporaryDirectory(prefix="vfl-wan-") as folder:
        parties = write_party_files(Path(folder), given.dataset)
        with Cluster(Path(folder), parties, lambda _: None) as cluster:
            for rtt, rate, seed in product(given.rtt, given.rate, range(given.seeds)):
                link, common = Link(rtt, rate), settings | {"seed": seed}
                found = {w: train(cluster, link, common | ways[w]) for w in ways}
                show(link, seed, found)


if __name__ == "__main__":
    main()
