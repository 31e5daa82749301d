"""Errors that say which party, at which step, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class VerticalError(Exception):
    """Base of every error that this package raises on purpose.

    Examples
    --------
    >>> from flower_vfl import ConfigError, PartyError, VerticalError
    >>> issubclass(ConfigError, VerticalError), issubclass(PartyError, VerticalError)
    (True, True)
    """


class ConfigError(VerticalError, ValueError):
    """A setting that cannot work: an unknown name, a value out of range, a clash.

    Examples
    --------
    >>> from flower_vfl import ConfigError, VerticalStrategy
    >>> try:
    ...     VerticalStrategy(batch_size=-1)
    ... except ConfigError as error:
    ...     print(error)
    batch_size must not be negative, got -1
    """


class TableError(ConfigError):
    """A table that cannot be used; the text may quote it and stays at its node."""


class PartyError(VerticalError):
    """Something went wrong at one party.

    Parameters
    ----------
    party : str
        Name of the party.
    problem : str
        What happened.
    remedy : str
        What to do next.
    step : int | None (default: None)
        Training step at which it happened; None before training.

    Examples
    --------
    >>> from flower_vfl import PartyError
    >>> print(PartyError("bank", "its loss is nan", "Lower the learning rate", step=3))
    party 'bank', step 3: its loss is nan. Lower the learning rate
    """

    def __init__(
        self, party: str, problem: str, remedy: str, step: int | None = None
    ) -> None:
        self.party, self.problem, self.remedy, self.step = party, problem, remedy, step
        where = f"party '{party}'" + ("" if step is None else f", step {step}")
        super().__init__(f"{where}: {problem}. {remedy}")

    def __reduce__(self) -> tuple[type[PartyError], tuple[str, str, str, int | None]]:
        """Survive a trip through Ray's pickling."""
        return type(self), (self.party, self.problem, self.remedy, self.step)


class PartyRestartedError(PartyError):
    """A party has lost its memory of the run; a checkpoint can bring it back.

    Examples
    --------
    >>> from flower_vfl import PartyError, PartyRestartedError
    >>> issubclass(PartyRestartedError, PartyError)
    True
    """


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not in a registry, listing those that are."""
    return ConfigError(f"unknown {kind} '{name}'; known: {', '.join(sorted(known))}")


def check_name(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not in a registry."""
    if name not in known:
        raise unknown_name(kind, name, known)


def require(condition: bool, name: str, wanted: str, value: object) -> None:
    """Raise an error about a parameter unless a condition holds."""
    if not condition:
        raise ConfigError(f"{name} must be {wanted}, got {value}")


@contextmanager
def at_party(party: str, remedy: str) -> Iterator[None]:
    """Say at which party a setting cannot work."""
    try:
        yield
    except ConfigError as error:
        raise PartyError(party, str(error), remedy) from error
