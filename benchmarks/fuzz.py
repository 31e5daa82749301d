"""Mutated frames and messages from a stranger and from an admitted node.

    python benchmarks/fuzz.py --cases 10000 --seed 1

Bits are flipped, frames cut, parts repeated and swapped, lengths made huge, types and
party names exchanged. Prints how the cases of each campaign ended, and the failures:
a crash, the admission of a stranger, other weights, or an error that is not one of
flower-vfl's.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from fuzz_campaigns import CAMPAIGNS, run_campaign


def main() -> None:
    """Run the campaigns and print how their cases ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="part of a campaign's name", default="")
    given = parser.parse_args()
    logging.disable()
    total, failures = 0, []
    for name in CAMPAIGNS:
        if given.only not in name:
            continue
        found, seconds = run_campaign(name, given.seed, given.cases)
        cases = sum(found.ended.values())
        ended = ", ".join(f"{how} {n}" for how, n in sorted(found.ended.items()))
        print(f"{name}: {cases} cases in {seconds:.0f} s: {ended}", flush=True)
        for text in found.failures[:10]:
            print(f"  {text}", flush=True)
        total += cases
        failures += found.failures
    print(f"{total} cases, {len(failures)} failures")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
