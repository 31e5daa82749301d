"""Engines that execute a run: this process, or Flower's runtimes."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from flower_vfl.errors import ConfigError
from flower_vfl.grids.in_process import InProcessGrid
from flower_vfl.grids.stacked import StackedGrid
from flower_vfl.simulations.app import client_app, train
from flower_vfl.simulations.capture import CapturingGrid, check_capture
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.parties import check_files
from flower_vfl.simulations.results import PARTIES_FOLDER, load_result, save_result

from ..attacks import check_attacks, complete_models, completions_of

_EVERY = 0.25  # seconds between two samples of the memory


def run_in_process(config: RunConfig, verbose: bool, bar: bool) -> dict[str, Any]:
    """Run in this process and return the result document.

    Examples
    --------
    >>> config = RunConfig(epochs=1, batch_size=128)
    >>> run_in_process(config, verbose=False, bar=False)["engine"]
    'in-process'
    """
    set_log(verbose, config.resume)
    nodes = config.parties + 1
    progress = None if bar else False
    with InProcessGrid(client_app, nodes, config.to_run_config()) as grid:
        if not config.capture:
            return train(grid, config, "in-process", progress)
        capturing = CapturingGrid(grid)
        return train(capturing, config, "in-process", progress, capturing.save)


def run_stacked(config: RunConfig, verbose: bool, bar: bool) -> dict[str, Any]:
    """Run in this process, with passive parties of one shape computed as one."""
    set_log(verbose, config.resume)
    nodes, progress = config.parties + 1, None if bar else False
    with StackedGrid(client_app, nodes, config.to_run_config()) as grid:
        return train(grid, config, "stacked", progress)


def set_log(verbose: bool, warnings: bool = False) -> None:
    """Show Flower's log or silence it; errors are printed at the end anyway."""
    level, logger = logging.CRITICAL, logging.getLogger("flwr")
    level = logging.WARNING if warnings else level
    logger.setLevel(logging.INFO if verbose else level)
    only = warnings and not verbose
    logger.filters[:] = [lambda line: line.levelno == logging.WARNING] if only else []


def run_on_flower(config: RunConfig, verbose: bool, bar: bool) -> dict[str, Any]:
    """Run as Flower clients under ``flwr run`` and return the result document."""
    from .flower_runtime import run_app

    console = Console(stderr=True, highlight=False, markup=False)
    status = console.status("starting Flower and Ray, which takes about 15 s")

    def show(line: str) -> None:
        if verbose or (config.resume and "WARNING" in line):
            console.print(line, soft_wrap=True)
        elif "epoch" in line:
            status.update(line.partition(":")[2].strip())

    with tempfile.TemporaryDirectory() as temporary:
        placed = config if config.out else replace(config, out=temporary)
        with status if bar and console.is_terminal else nullcontext():
            run_app(
                Path(__file__).parents[1] / "label_leakage",
                run_config=placed.to_run_config(),
                nodes=config.parties + 1,
                on_line=show,
            )
        return load_result(Path(placed.out))


def can_watch_memory() -> bool:
    """Return whether psutil is installed."""
    return importlib.util.find_spec("psutil") is not None


class MemoryWatch:
    """Samples the memory of this process and its descendants and keeps the peak."""

    def __init__(self) -> None:
        if not can_watch_memory():
            raise ConfigError("memory is measured with psutil: pip install psutil")
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        import psutil  # type: ignore[import-untyped]  # it is optional

        own = psutil.Process()
        while True:
            total = 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    total += process.memory_full_info().uss
                except psutil.Error:
                    continue  # it has just ended
            self.peak = max(self.peak, total)
            if self._done.wait(_EVERY):
                return


ENGINES: dict[str, Callable[[RunConfig, bool, bool], dict[str, Any]]] = {
    "in-process": run_in_process,
    "stacked": run_stacked,
    "ray": run_on_flower,
    "flower": run_on_flower,
}


def run_and_attack(
    config: RunConfig, engine: str, verbose: bool = False, bar: bool = False
) -> dict[str, Any]:
    """Run, then run the model-completion attacks that the settings ask for."""
    check_capture(config, engine)
    check_attacks(config)  # before the training, which may take long
    for line in check_files(config):
        if bar:
            print(line)
    completing = bool(completions_of(config))
    temporary = completing and not config.out
    with tempfile.TemporaryDirectory() if temporary else nullcontext("") as folder:
        placed = config
        if temporary:
            state_dir = str(Path(folder) / PARTIES_FOLDER)
            placed = replace(config, out=folder, state_dir=state_dir)
        with MemoryWatch() if config.watch_memory else nullcontext() as memory:
            document = ENGINES[engine](placed, verbose, bar)
        if memory is not None:
            document["memory"] = {"peak": memory.peak}
        if completing:
            begun = time.monotonic()
            found = complete_models(placed, Path(placed.state_dir))
            document["completion"] = found
            document["seconds"]["completion"] = time.monotonic() - begun
        if config.out and (completing or memory is not None):
            save_result(document, Path(config.out))
    document["config"] |= {"out": config.out, "state_dir": config.state_dir}
    return document
