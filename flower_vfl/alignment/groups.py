"""The groups by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flower_vfl.errors import unknown_name

from .elements import Group
from .modp import Modp
from .ristretto import Ristretto255

DEFAULT_GROUP = "ristretto255"

GROUPS: dict[str, Callable[[], Group]] = {
    "ristretto255": Ristretto255,
    "modp2048": partial(Modp, 2048),
    "modp3072": partial(Modp, 3072),
}


def make_group(name: str = DEFAULT_GROUP) -> Group:
    """Return a group by its name.

    Parameters
    ----------
    name : str (default: "ristretto255")
        One of `GROUPS`.
    """
    if name not in GROUPS:
        raise unknown_name("group", name, GROUPS)
    return GROUPS[name]()
