"""``flower-vfl align`` and ``flower-vfl key``: alignment from the command line."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from flower_vfl.alignment import DEFAULT_GROUP, METHODS
from flower_vfl.alignment.channel import Identity
from flower_vfl.alignment.handshake import Handshake
from flower_vfl.alignment.ids import encode_ids
from flower_vfl.alignment.keys import AlignmentSettings, key_text, write_key
from flower_vfl.alignment.psu import AlignedIds
from flower_vfl.errors import ConfigError
from flower_vfl.parties.checkpoints import write_private
from flower_vfl.simulations.config import parts
from flower_vfl.simulations.datasets import read_party_file
from flower_vfl.simulations.datasets.party_files import check_spelling
from flower_vfl.simulations.printing import print_json
from flower_vfl.strategies.alignment import Alignment, Relay
from flower_vfl.strategies.progress import AlignmentProgress

_FLOAT = re.compile(r"[+-]?\d+\.\d*(e[+-]?\d+)?", re.IGNORECASE)


def align(
    files: list[Path],
    id_column: str = "id",
    method: str = "psu",
    group: str = DEFAULT_GROUP,
    padding: int = 0,
    normalise: str = "none",
    out_dir: Path | None = None,
    as_json: bool = False,
) -> None:
    """Align the ids of several files in one process.

    For each file, writes a mapping from its own ids to rows of the alignment.
    """
    plan = Alignment(method, group=group, padding=padding)
    if not plan:
        raise ConfigError(f"--method must be one of {', '.join(METHODS)}")
    sources = _by_name(files)
    given = parts(id_column)
    given = given * len(files) if len(given) == 1 else given
    if len(given) != len(files):
        raise ConfigError(f"{len(given)} id columns are given for {len(files)} files")
    columns = dict(zip(sources, given, strict=True))
    ids = {name: read_ids(path, columns[name]) for name, path in sources.items()}
    try:
        if normalise == "none":
            check_spelling({str(sources[name]): own for name, own in ids.items()})
    except ConfigError as error:
        print(f"flower-vfl: warning: {error}", file=sys.stderr)
    started = time.perf_counter()
    found = align_ids(ids, plan, normalise, progress=False if as_json else None)
    seconds = time.perf_counter() - started
    written = {}
    for name, path in sources.items():
        target = (out_dir or path.parent) / f"{name}.aligned.csv"
        target.parent.mkdir(parents=True, exist_ok=True)
        table = pd.DataFrame({columns[name]: ids[name], "row": found[name].positions})
        held = table[table["row"] >= 0].to_csv(index=False)
        write_private(target, held.encode())
        written[name] = str(target)
    document: dict[str, Any] = {"method": method, "group": group, "padding": padding}
    document |= {**revealed(found, plan), "files": written, "seconds": seconds}
    if as_json:
        print_json(document)
        return
    rows = f"{document['aligned']} rows aligned by {method} in {seconds:.1f} s"
    _print_lines(
        f"{rows}. What each one learns:",
        *(f"  {name}: {what}" for name, what in document["revealed"].items()),
        *(f"written: {path}" for path in written.values()),
    )


def key(file: Path) -> None:
    """Create the key pair that other parties pin before an alignment."""
    public = key_text(write_key(file).public)
    _print_lines(
        f"private key: {file} (only you can read it; keep it secret)",
        f"public key:  {public}",
        "Node config of this party, with the public keys of the other parties:",
        f'  alignment-key="{file.resolve()}" alignment-pins="other=KEY,third=KEY"',
        "Entry that the other parties pin, with this party's name:",
        f"  NAME={public}",
    )


def read_ids(path: Path, column: str) -> list[str]:
    """Return the ids of a file as text."""
    ids = [str(each) for each in read_party_file(path, column, check="id").ids]
    if all(map(_FLOAT.fullmatch, ids)):
        text = "are floats, as if some were missing; export whole numbers or text"
        raise ConfigError(f"the ids in '{column}' of '{path}' {text}")
    return ids


def align_ids(
    ids: Mapping[str, Sequence[object]],
    plan: Alignment,
    normalise: str = "none",
    progress: bool | None = False,
) -> dict[str, AlignedIds]:
    """Return the aligned ids of every party after a handshake in this process."""
    identities = {name: Identity() for name in ids}
    pins = {name: identity.public for name, identity in identities.items()}
    config = plan.handshake(list(ids))
    sides = {}
    for name, own in ids.items():
        try:
            encoded = encode_ids(own, normalise)
        except ConfigError as error:
            raise ConfigError(f"'{name}': {error}") from None
        settings = AlignmentSettings(identities[name], pins)
        sides[name] = Handshake(name, config, settings, encoded)
    relay = Relay(list(ids), plan.relay_bytes)
    counts = [len(own) + plan.padding for own in ids.values()]
    hellos = [side.hello() for side in sides.values()]
    with AlignmentProgress(counts, plan.method, progress) as bar:

        def answered(name: str) -> None:
            side = sides[name]
            relay.collect(name, side.next_chunks(plan.relay_bytes), side.has_more)
            bar.done(name, side.exponentiations, relay.merged)

        for name, side in sides.items():
            side.exchange_keys(hellos)
            answered(name)
        while due := relay.due():
            for name, chunks in due.items():
                sides[name].receive(chunks)
                answered(name)
    return {name: side.finish().aligned for name, side in sides.items()}


def revealed(found: Mapping[str, AlignedIds], plan: Alignment) -> dict[str, Any]:
    """Return the sizes that an alignment has revealed, and to whom."""
    first = next(iter(found.values()))
    counts, aligned = dict(first.counts), len(first.universe)
    listed = ", ".join(f"{name} {count}" for name, count in counts.items())
    dummies = f", including {plan.padding} dummies each" if plan.padding else ""
    sizes = f"the number of ids of each party ({listed}{dummies})"
    merged = f"the number of aligned rows ({aligned})"
    which = ", but not which ids are shared"
    if plan.method == "psi":
        which = ", and which of its own ids all others have"
    elif len(found) == 2 and not plan.padding:
        shared = sum(counts.values()) - aligned
        which = f", so {shared} ids are shared, but not which ones"
    carried = "the size of the merged list with dummies" if plan.padding else merged
    told = {
        "every party": f"{sizes} and {merged}{which}",
        "the server that relays the messages": f"{sizes} and {carried}",
    }
    if len(found) > 2:
        text = "as the merging party: how many ids each combination of parties shares"
        told[next(iter(found))] = text
    return {"ids": counts, "aligned": aligned, "revealed": told}


def _by_name(files: Sequence[Path]) -> dict[str, Path]:
    if len(files) < 2:
        raise ConfigError("alignment needs two or more files, one for each party")
    sources: dict[str, Path] = {}
    for path in files:
        name = path.name.split(".")[0]
        if name in sources:
            both = f"'{sources[name]}' and '{path}'"
            raise ConfigError(f"{both} have the same party name; rename one")
        sources[name] = path
    return sources


def _print_lines(*lines: str) -> None:
    for line in lines:
        Console().print(line, highlight=False, soft_wrap=True, markup=False)
