"""Engines that execute a run: this process, or Flower's runtimes."""

import importlib.util
import logging
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
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
    nodes, progress = config.parties + 1, None if bar else False
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
    logger, only = logging.getLogger("flwr"), warnings and not verbose
    quiet = logging.WARNING if warnings else logging.CRITICAL
    logger.setLevel(logging.INFO if verbose else quiet)
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
        app, nodes = Path(__file__).parents[1] / "label_leakage", config.parties + 1
        settings = placed.to_run_config()
        with status if bar and console.is_terminal else nullcontext():
            run_app(app, run_config=settings, nodes=nodes, on_line=show)
        return load_result(Path(placed.out))


def can_watch_memory() -> bool:
    """Return whether psutil is installed."""
    return importlib.util.find_spec("psutil") is not None


@contextmanager
def watch_memory() -> Iterator[dict[str, int]]:
    """Sample the memory of this process and its descendants and keep the peak."""
    if not can_watch_memory():
        raise ConfigError("memory is measured with psutil: pip install psutil")
    import psutil  # type: ignore[import-untyped]  # it is optional

    found, done, own = {"peak": 0}, threading.Event(), psutil.Process()

    def sample() -> None:
        while True:
            total = 0
            for process in [own, *own.children(recursive=True)]:
                with suppress(psutil.Error):  # it has just ended
                    total += process.memory_full_info().uss
            found["peak"] = max(found["peak"], total)
            if done.wait(_EVERY):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


ENGINES = {"in-process": run_in_process, "stacked": run_stacked}
ENGINES |= {"ray": run_on_flower, "flower": run_on_flower}


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
        with watch_memory() if config.watch_memory else nullcontext() as memory:
            document = ENGINES[engine](placed, verbose, bar)
        if memory is not None:
            document["memory"] = memory
        if completing:
            begun = time.monotonic()
            document["completion"] = complete_models(placed, Path(placed.state_dir))
            document["seconds"]["completion"] = time.monotonic() - begun
        if config.out and (completing or memory is not None):
            save_result(document, Path(config.out))
    document["config"] |= {"out": config.out, "state_dir": config.state_dir}
    return document
