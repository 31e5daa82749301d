"""Private set union: exponentiations per second, beside the library's own speed.

For each group the speed of the library's exponentiation in a tight loop, on all cores;
then the whole union of two parties (hashing, exponentiations, checks, sorting,
encryption, lookups) and its exponentiations per second as a share of that speed,
measured before and after. An exponentiation of a modp group with the product of two or
three short keys counts as two or three. Both parties run in this process, one after the
other, each on all cores: the time is that of the work of both. Memory is the growth of
the process at its peak, for both.

    python benchmarks/psu.py --ids 100000
    python benchmarks/psu.py --ids 1000000 --groups ristretto255
    python benchmarks/psu.py --ids 100000 --groups ristretto255 --handshake

With --handshake the union is that of `VerticalStrategy(alignment=Alignment("psu"))`, as
Flower messages over an `InProcessGrid`, from the hello to the configuration.

Where openmined-psi is installed, its intersection of the same ids follows (one core);
`pip install --no-deps openmined-psi` leaves alone the newer protobuf that Flower needs.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import logging
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from flower_vfl import CrossEntropy, LabelParty, PassiveParty, in_process
from flower_vfl.alignment import GROUPS, METHODS, Identity, encode_ids
from flower_vfl.alignment.channel import ChunkCodec, SecureChannel
from flower_vfl.alignment.elements import Elements, Group, cores
from flower_vfl.alignment.groups import Modp, make_group
from flower_vfl.alignment.handshake import Member
from flower_vfl.alignment.messages import HandshakeConfig, RoundMessage
from flower_vfl.strategies import Alignment, VerticalStrategy

NAMES = ("a", "p")
CHUNK = 1 << 16  # elements of a chunk: 2 MiB of ristretto255


def tight_loop(group: Group, calls: int) -> Callable[[], None]:
    """Return a function that raises one element many times, without any list."""
    element = group.hash([b"element"])
    key = group.random_key()
    if isinstance(group, Modp):
        base = group._integer.from_bytes(element.tobytes())
        exponent, modulus = group._integer(key), group._prime

        def loop() -> None:
            for _ in range(calls):
                pow(base, exponent, modulus)

        return loop
    multiply = group._sodium.crypto_scalarmult_ristretto255  # type: ignore[attr-defined]
    scalar = ctypes.create_string_buffer(key.to_bytes(32, "little"), 32)

    def sodium_loop() -> None:
        target = ctypes.create_string_buffer(32)
        place, source = ctypes.addressof(target), element.ctypes.data
        at = ctypes.addressof(scalar)
        for _ in range(calls):
            multiply(place, at, source)

    return sodium_loop


def tight_speed(group: Group, calls: int) -> float:
    """Return the exponentiations per second of the tight loop on all cores at once."""
    threads = [
        threading.Thread(target=tight_loop(group, calls)) for _ in range(cores())
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return calls * len(threads) / (time.perf_counter() - start)


def make_codecs(method: str, group: Group) -> dict[str, ChunkCodec]:
    """Return the codecs of two parties that have pinned each other's keys."""
    identities = {name: Identity() for name in NAMES}
    session = secrets.token_bytes(16)
    agreed = HandshakeConfig(session, method, group.name, NAMES, 0, CHUNK).agreed()
    channels = {}
    for name, other in zip(NAMES, reversed(NAMES), strict=True):
        pins = {other: identities[other].public}
        channels[name] = SecureChannel(name, session, agreed, identities[name], pins)
    hellos = [channel.hello() for channel in channels.values()]
    for channel in channels.values():
        channel.exchange_keys(hellos)
    return {name: ChunkCodec(channels[name], group, CHUNK) for name in NAMES}


@contextmanager
def counted_exponentiations(usual: int) -> Iterator[list[float]]:
    """Count exponentiations; those with keys longer than usual as so many more."""
    exponentiations = [0.0]
    raise_list = Group.power

    def counted(self: Group, elements: Elements, key: int) -> Elements:
        longer = key.bit_length() / usual if isinstance(self, Modp) else 1
        exponentiations[0] += len(elements) * longer
        return raise_list(self, elements, key)

    Group.power = counted  # type: ignore[method-assign]
    try:
        yield exponentiations
    finally:
        Group.power = raise_list  # type: ignore[method-assign]


def align(method: str, group: Group, ids: dict[str, list[str]]) -> tuple[float, int]:
    """Return seconds and aligned ids of the protocol without Flower's messages."""
    start = time.perf_counter()
    codecs = make_codecs(method, group)
    members = {
        name: Member(
            METHODS[method](name, NAMES, encode_ids(ids[name]), group, b"benchmark")
        )
        for name in NAMES
    }
    messages: list[RoundMessage] = []
    for member in members.values():
        messages += member.start()
    while messages:
        message = messages.pop(0)
        sender, receiver = message.header.sender, message.header.receiver
        for number in range(codecs[sender].chunks(message)):
            chunk = codecs[sender].encode(message, number)
            arrived = codecs[receiver].decode(chunk)
            if arrived is not None:
                messages += members[receiver].receive(arrived)
    aligned = members["a"].aligned
    assert aligned is not None
    return time.perf_counter() - start, len(aligned.universe)


def run_handshake(
    method: str, group: Group, ids: dict[str, list[str]]
) -> tuple[float, int]:
    """Return seconds and aligned ids of the strategy's handshake."""
    top = CrossEntropy(nn.Linear(1, 1))
    labels = torch.arange(len(ids["a"])) % 2
    features = torch.zeros(len(ids["p"]), 1)
    parties = [
        LabelParty(labels, top, ids=ids["a"], device="cpu"),
        PassiveParty(features, nn.Linear(1, 1), ids=ids["p"], device="cpu"),
    ]
    strategy = VerticalStrategy(
        progress=False, alignment=Alignment(method, group=group.name)
    )
    with in_process(parties) as grid:
        start = time.perf_counter()
        training = strategy.connect(grid)
        return time.perf_counter() - start, training.participants.label.rows


def peak() -> float:
    """Return the largest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(
    method: str, name: str, count: int, overlap: float, handshake: bool
) -> None:
    """Print one line about one method in one group."""
    group = make_group(name)
    calls = 60_000 if name == "ristretto255" else 3000  # some seconds
    before_memory = peak()
    shared = int(count * overlap)
    ids = {
        "a": [f"person-{n}@example.org" for n in range(count)],
        "p": [
            f"person-{n}@example.org" for n in range(count - shared, 2 * count - shared)
        ],
    }
    before = tight_speed(group, calls)
    with counted_exponentiations(group.random_key().bit_length()) as done:
        seconds, aligned = (run_handshake if handshake else align)(method, group, ids)
    exponentiations = done[0]
    after = tight_speed(group, calls)
    speed, whole = (before + after) / 2, exponentiations / seconds
    memory = peak() - before_memory
    how = " as Flower messages" if handshake else ""
    print(
        f"{method} {name}{how}: {count} and {count} ids, {aligned} aligned: "
        f"{seconds:.1f} s; {exponentiations:.0f} exponentiations, "
        f"{exponentiations / count:.2f} per id, {whole:.0f}/s; "
        f"tight loop {speed:.0f}/s on {cores()} cores "
        f"(before {before:.0f}, after {after:.0f}); "
        f"share {whole / speed:.2f}; {memory:.0f} MiB, "
        f"{memory * 2**20 / (2 * count):.0f} bytes per id and party",
        flush=True,
    )


def measure_openmined(count: int, overlap: float) -> None:
    try:
        psi = importlib.import_module("private_set_intersection.python")
    except ImportError:
        print("openmined-psi is not installed")
        return
    shared = int(count * overlap)
    theirs = [f"person-{n}@example.org" for n in range(count)]
    ours = [
        f"person-{n}@example.org" for n in range(count - shared, 2 * count - shared)
    ]
    start = time.perf_counter()
    client = psi.client.CreateWithNewKey(True)
    server = psi.server.CreateWithNewKey(True)
    setup = server.CreateSetupMessage(0.0, count, ours, psi.DataStructure.RAW)
    response = server.ProcessRequest(client.CreateRequest(theirs))
    found = client.GetIntersection(setup, response)
    seconds = time.perf_counter() - start
    print(
        f"openmined-psi: {count} and {count} ids, {len(found)} shared: {seconds:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=100_000, help="of each party")
    parser.add_argument("--modp-ids", type=int, default=300, help="for modp groups")
    parser.add_argument("--overlap", type=float, default=0.5)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=[*GROUPS])
    parser.add_argument("--handshake", action="store_true", help="by the strategy")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["psu"])
    given = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    for method in given.methods:
        for name in given.groups:
            count = given.ids if name == "ristretto255" else given.modp_ids
            measure(method, name, count, given.overlap, given.handshake)
    measure_openmined(given.ids, given.overlap)


if __name__ == "__main__":
    main()
