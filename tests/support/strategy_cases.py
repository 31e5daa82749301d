"""A strategy from flat options, for tests that vary one of them at a time."""

from __future__ import annotations

from typing import Any

from flower_vfl.strategies import Alignment, Checkpoints, Defense, VerticalStrategy


def build_strategy(**options: Any) -> VerticalStrategy:
    """Return a strategy; flat options become the groups that it takes."""

    def group(names: dict[str, str]) -> dict[str, Any]:
        return {new: options.pop(old) for old, new in names.items() if old in options}

    defense = group(
        {"transforms": "what", "placement": "at", "noise_seed": "noise_seed"}
    )
    checkpoints = group(
        {"checkpoint_every": "every", "state_dir": "folder", "keep_final": "keep_final"}
    )
    alignment = group(
        {
            "method": "method",
            "group": "group",
            "padding": "padding",
            "relay_bytes": "relay_bytes",
        }
    )
    if defense:
        options["defense"] = Defense(**defense)
    if checkpoints:
        options["checkpoints"] = Checkpoints(**checkpoints)
    if alignment:
        options["alignment"] = Alignment(**alignment)
    return VerticalStrategy(**options)
