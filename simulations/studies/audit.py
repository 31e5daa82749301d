"""An audit of recorded gradients: every attack on them, and what defenses would do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from flwr.app import MetricRecord
from numpy.typing import NDArray

from flower_vfl.errors import ConfigError, PartyError
from flower_vfl.leakage.attacks.registry import build_attack
from flower_vfl.leakage.monitor import Leakage, LeakageMonitor
from flower_vfl.leakage.recording import Recording
from flower_vfl.metrics import METRICS
from flower_vfl.objectives import Task
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.datasets import infer_task
from flower_vfl.simulations.results import RUN, result_document, save_result
from flower_vfl.strategies import VerticalResult, build_defense
from flower_vfl.transform import Defender, Seen

from .methods import VANILLA
from .run_metrics import largest_leaks
from .study import Study, check_folder

AUDIT, ENGINE = "audit", "recording"
DEFENSES = ("max-norm", "iso:t=4", "marvell:s=4")
_ALWAYS = ["norm", "spectral"]
_CLASSES = ["cosine", "mean:held_out=true", "median", "stale", "similarity"]
_CLASSES += ["similarity:known=false"]
# What a party's own embeddings show, which no transform of gradients changes.
OF_EMBEDDINGS = ("embedding", "similarity:on=embedding,known=false")
_SEED = 0  # of the noise: nothing leaves


def fitting_attacks(recording: Recording, task: Task) -> list[str]:
    """Return the attacks that can be made on a recording."""
    first = next(iter(recording.parties.values()))
    whole = all("embedding" in own for own in recording.parties.values())
    found, columns = [*_ALWAYS, *_CLASSES], 1
    of_embeddings = [*OF_EMBEDDINGS, "exploit"]
    if task == "regression":
        found, of_embeddings = [*_ALWAYS, "stale:score=spectral"], ["embedding"]
    elif task == "multiclass":
        columns = int(recording.labels.max()) + 1
    found += ["direct"] if first["gradient"].shape[1] == columns else []
    return [*found, *(of_embeddings if whole else ())]


def audit(
    recording: Recording,
    folder: Path,
    source: str,
    attacks: Sequence[str] = (),
    defenses: Sequence[str] = DEFENSES,
    task: Task | None = None,
) -> Study:
    """Attack a recording as it is and behind each defense; keep a study of it all."""
    check_folder(folder, AUDIT)
    known = infer_task(recording.labels, task)
    task, recording = known.task, _with_labels(recording, known.labels)
    attacks = list(attacks) or fitting_attacks(recording, task)
    for attack in attacks:
        build_attack(attack, task)
    study = Study(folder, AUDIT, f"{source}: audit", {"task": task})
    for text in dict.fromkeys([VANILLA, *defenses]):
        transforms = [] if text == VANILLA else [build_defense(text)]
        monitor = LeakageMonitor(Leakage(tuple(attacks)), task)
        started = time.time()
        result = _replay(recording, Defender(transforms, _SEED, monitor))
        if text == VANILLA:
            result.evaluations[1] = _predicted(recording, task)
        defense, parties = "" if text == VANILLA else text, len(recording.parties)
        config = RunConfig(dataset=source, parties=parties, defense=defense)
        config = replace(config, attack=",".join(attacks))
        document = result_document(config, ENGINE, result, time.time() - started)
        study.trials.append({"key": text, "digest": "", "labels": {"defense": text}})
        study.documents[text] = document
        save_result(document, study.run_folder(text))
    study.save()
    study.write_table()
    return study


def _with_labels(recording: Recording, labels: NDArray[Any]) -> Recording:
    """Return a recording with other labels in the places of its own."""
    sizes = [len(own["label"]) for own in recording.parties.values()]
    parts = np.split(labels, np.cumsum(sizes)[:-1])
    both = zip(recording.parties.items(), parts, strict=True)
    return Recording({party: {**own, "label": part} for (party, own), part in both})


def _replay(recording: Recording, defender: Defender) -> VerticalResult:
    """Send the recorded gradients once more; attacks on an epoch look at the last."""
    started, batches = time.perf_counter(), list(recording.batches())
    remedy = "Record the rows of a step in the same order for all parties"
    result = VerticalResult()
    for number, (step, parties) in enumerate(batches, start=1):
        first, own = next(iter(parties.items()))
        for party, other in parties.items():
            for name in ("label", "row"):
                if not torch.equal(own[name], other[name]):
                    problem = f"its {name}s differ from those of '{first}'"
                    raise PartyError(party, problem, remedy, step)
        gradients = {party: part["gradient"] for party, part in parties.items()}
        with_sent = {p: part for p, part in parties.items() if "embedding" in part}
        sent = {party: part["embedding"] for party, part in with_sent.items()}
        seen, last = Seen(sent, own["row"]), number == len(batches)
        if defender.sees_embeddings and len(sent) < len(parties):
            raise ConfigError("a defense needs embeddings, which were not recorded")
        given = gradients, own["label"], number, 1
        result.records += defender.defend(*given, seen=seen, last=last)[1]
    spent = time.perf_counter() - started
    cost = MetricRecord({"steps": len(batches), "seconds": spent})
    result.train_metrics_clientapp[1] = cost
    return result


def _predicted(recording: Recording, task: Task) -> dict[str, dict[str, float]]:
    """Return what the recorded predictions are worth, those of each row's last step."""
    for own in recording.parties.values():
        if "prediction" in own:
            names = ("prediction", "label")
            table = pd.DataFrame({name: own[name] for name in ("row", *names)})
            last = table.drop_duplicates("row", keep="last")
            scores, truth = (last[n].to_numpy(float, copy=True) for n in names)
            found = METRICS[task](scores, truth)
            model = {"model_leak": found["auc"]} if "auc" in found else {}
            return {"train": {**found, **model}}
    return {}


def leak_table(study: Study) -> pd.DataFrame:
    """Return what each attack finds, a column for the recording and each defense."""
    found = largest_leaks(study.records())
    wide = found.pivot(index="attack", columns=RUN, values="leak")
    return wide.reindex(index=found["attack"].unique(), columns=study.finished)


def no_leak(study: Study) -> float:
    """Return the value of an attack that finds nothing: 0.5, or 0 for |ρ|."""
    return 0.0 if study.extra["task"] == "regression" else 0.5


def findings(study: Study) -> Iterator[str]:
    """Yield what an audit amounts to: the largest leak, and what would lower it."""
    table = leak_table(study)
    plain = table[VANILLA].dropna()
    if plain.empty:
        yield "Nothing could be measured: each step needs rows of two classes."
        return
    nothing = no_leak(study)
    yield f"Largest leak: {plain.max():.2f}, by the {plain.idxmax()} attack."
    gradients = table.drop(index=["exploit", *OF_EMBEDDINGS], errors="ignore")
    largest = gradients.max()
    best = str(largest.drop(VANILLA).idxmin()) if len(largest) > 1 else VANILLA
    change = f"from {largest[VANILLA]:.2f} to {largest[best]:.2f}"
    if largest[best] < largest[VANILLA] - 0.02:
        yield (
            f"{best} lowers what gradients leak {change}, applied to the recorded "
            "gradients: run a comparison to see what it costs and what a training "
            "with it leaks."
        )
        both = table[best].get("exploit", largest[best])  # it sees embeddings, too
        if both > largest[best]:
            yield f"With the embeddings, exploit finds {both:.2f} behind {best}."
    elif largest[VANILLA] > nothing + 0.1:
        yield "None of the defenses that were tried lowers what these gradients leak."
    shown = table.loc[[n for n in OF_EMBEDDINGS if n in table.index], VANILLA]
    if len(shown) and shown.max() > nothing + 0.1:
        yield (
            f"The embeddings alone leak {shown.max():.2f}, whatever is done to the "
            "gradients: a party that trains a good model can predict the labels."
        )
