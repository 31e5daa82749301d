"""Named combinations of objective and defense."""

from __future__ import annotations

from collections.abc import Callable

from flower_vfl.objectives.ladistill import FirstEpoch
from flower_vfl.specs import build_from_spec

Settings = dict[str, str]


def ladsg(
    distill: bool = True,
    substitute: bool = True,
    detect: bool = True,
    k: int = 2,
    eps: float = 0.3,
    teacher: str = "auto",
    epochs: int = 50,
    first_epoch: FirstEpoch = "vanilla",
) -> Settings:
    """Return LADSG: LADistill, SGSub and Geno, each of which is optional."""
    stages = [name for name, on in (("sgsub", substitute), ("geno", detect)) if on]
    objective = "auto"
    if distill:
        objective = f"ladistill:k={k},eps={eps:g},teacher={teacher},epochs={epochs}"
        if first_epoch != "vanilla":
            objective += f",first_epoch={first_epoch}"
    return {"objective": objective, "defense": " | ".join(stages)}


PRESETS: dict[str, Callable[..., Settings]] = {"ladsg": ladsg}


def preset(text: str) -> Settings:
    """Return the settings that a preset stands for."""
    return build_from_spec("preset", text, PRESETS)
