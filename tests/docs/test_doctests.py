"""Every public class and function has an example, and every example runs."""

from __future__ import annotations

import doctest
import inspect
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

PACKAGES = (
    "flower_vfl",
    "flower_vfl.strategies",
    "flower_vfl.objectives",
    "flower_vfl.attacks",
    "flower_vfl.alignment",
    "flower_vfl.grids.resident",
)


def documented() -> dict[str, object]:
    """Return every public class and function under the first name it is public by."""
    found: dict[str, object] = {}
    for package in PACKAGES:
        module = import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            is_code = inspect.isclass(value) or inspect.isroutine(value)
            is_new = all(value is not known for known in found.values())
            if is_code and is_new and typing.get_origin(value) is None:
                found[f"{package}.{name}"] = value
    return found


PUBLIC = documented()


@pytest.fixture
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder with a known random state, and restore it."""
    monkeypatch.chdir(tmp_path)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)


def test_all_public_classes_and_functions_have_examples() -> None:
    missing = [
        name
        for name, value in PUBLIC.items()
        if "Examples\n" not in (value.__doc__ or "") or ">>>" not in value.__doc__
    ]
    assert not missing, "without an Examples section:\n" + "\n".join(missing)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_examples_of_a_public_name_run(name: str, undisturbed: None) -> None:
    value = PUBLIC[name]
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    output: list[str] = []
    for example in doctest.DocTestFinder().find(value, name):
        runner.run(example, out=output.append)
    assert not runner.failures, "".join(output)
