"""``flower-vfl run``: one run, from the command line or a TOML file."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from flower_vfl.errors import ConfigError, check_name
from flower_vfl.leakage.monitor import MEMBERSHIP
from flower_vfl.privacy import Guarantee
from flower_vfl.simulations.config import RunConfig
from flower_vfl.simulations.printing import metric_name, print_json, text_tables
from flower_vfl.simulations.runtime.engines import ENGINES, run_and_attack
from flower_vfl.simulations.studies.run_metrics import leaks, main_metric, utilities
from flower_vfl.simulations.studies.tradeoff import untrained
from flower_vfl.simulations.studies.trials import guess, train_alone
from flower_vfl.specs import parse_spec
from flower_vfl.strategies.setup import RESERVED
from flower_vfl.transform import AUC_BOUND

from .. import results
from .options import takes_settings

_SUCCESSES = ("train", "test", "labels_only_train", "labels_only_test")
# Settings with which probabilities may be off, so that their error is shown.
_LACKING = ("absent_labels", "absent_features", "calibration", "label_dp")


@takes_settings()
def run(
    config: RunConfig,
    resume: bool = False,
    engine: str = "in-process",
    out: Path | None = None,
    overwrite: bool = False,
    alone: bool = True,
    as_json: bool = False,
    verbose: bool = False,
) -> None:
    """Train one model over several parties; report its metrics and what leaks.

    For example:
    flower-vfl run --dataset digits --defense max-norm --attack norm
    flower-vfl run --label-party bank.csv --label-column y --passive shop.csv
    """
    check_name("engine", engine, ENGINES)
    if resume and out is None:
        raise ConfigError("--resume needs the --out folder of the run to continue")
    files = results.RESULT_FILE, f"{results.PARTIES_FOLDER}/{RESERVED}/*.pt"
    found = out and any(any(out.glob(pattern)) for pattern in files)  # of another run
    if found and not (resume or overwrite):
        raise ConfigError(
            f"'{out}' already holds a run; choose another --out, continue that run "
            "with --resume, or replace it with --overwrite"
        )
    transport = "plain" if engine == "flower" else "resident"
    config = replace(config, resume=resume, transport=transport)
    if out is not None:
        state_dir = str(out.resolve() / results.PARTIES_FOLDER)
        config = replace(config, out=str(out.resolve()), state_dir=state_dir)
    try:
        document = run_and_attack(config, engine, verbose, not as_json)
    except KeyboardInterrupt:
        kept = out and [*Path(config.state_dir).glob(f"{RESERVED}/step-*.pt")]
        continued = "the same command with --resume continues it"
        none = "no checkpoint was kept; give --out and --checkpoint-every to keep some"
        raise KeyboardInterrupt(continued if kept else none) from None
    if alone:
        add_alone(document, config)
    if as_json:
        print_json(document)
    else:
        show_result(document)


def add_alone(document: dict[str, Any], config: RunConfig) -> None:
    """Add what the label party reaches alone to a result, and save it."""
    records = results.table(document).assign(**{results.RUN: ""})
    split, _, metric = main_metric(records).partition("_")
    if not metric:  # nothing was evaluated
        return
    document[results.GUESS] = guess(config)
    document[results.ALONE] = train_alone(config, int(records["epoch"].max()), split)
    if config.out:
        results.save_result(document, Path(config.out))


def alone_line(document: dict[str, Any], records: pd.DataFrame) -> str:
    """Return what the label party reaches alone and with others, and what leaks."""
    config, found = document["config"], utilities(records)
    metric, value = found.iloc[0][["metric", "value"]]
    own = Path(config["label_party"]).name or "the label party"
    alone = document[results.ALONE]
    text = f"{own} alone: {metric_name(metric)} {alone.get(metric, 0):.3f}"
    if not alone:
        text = f"{own} has no columns of its own (a guess: {metric_name(metric)} "
        text += f"{document[results.GUESS]:.3f})"
    text += f"; with {_passive(config)}: {value:.3f}"
    if untrained(records).any():
        text += ", which did not train"
    measured = leaks(records).query("layer == '' and not random")
    if measured.empty:
        return text
    worst = measured.nlargest(1, "leak").iloc[0]
    where = f"{worst['attack']} at {worst['party']}"
    return f"{text}; largest leak {worst['leak']:.2f} ({where})"


def _passive(config: dict[str, Any]) -> str:
    return f"{config['parties']} passive part{'y' if config['parties'] == 1 else 'ies'}"


def show_result(document: dict[str, Any]) -> None:
    """Print a result document."""
    config, seconds = document["config"], document["seconds"]
    records = results.table(document).assign(**{results.RUN: ""})
    source = Path(config["label_party"]).name or config["dataset"] or "own files"
    title = f"{source}: {_passive(config)}"
    if config["defense"]:
        private = RunConfig(**config).label_privacy() is not None
        place = "label" if private else config["defense_at"]
        title += f", {config['defense']} at the {place}"
    console = Console(highlight=False)
    console.print(title)
    hidden = {"loss", "f1", "model_leak"}
    hidden |= set() if any(config.get(name) for name in _LACKING) else {"ace"}
    hidden |= set() if config["train_metrics"] else {"train"}
    console.print(*_epochs(records, hidden))
    found = leaks(records)
    if not found.empty:
        regression = utilities(records)["regression"].any()
        what = "|rho| of score and label" if regression else "leak AUC"
        none = 0 if regression else 0.5
        console.print(f"{what}, mean over all batches ({none}: nothing leaks)")
        console.print(*_leakage(found))
    members = records[records["metric"] == MEMBERSHIP]
    if not members.empty:
        text = "AUC of finding synthetic rows, mean over all batches (0.5: a guess)"
        groups = members.groupby(["party", "attack", "layer"], sort=False)
        means = groups["value"].mean().rename("leak").reset_index()
        console.print(text)
        console.print(*_leakage(means.assign(random=False)))
    for line in [*_defense_lines(records), *_audit_lines(records)]:
        console.print(line)
    promised = Guarantee.from_dict(document[results.PRIVACY]).sentence
    console.print(f"Labels: {promised}")
    if losses := document[results.LOSSES]:
        tried = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
        console.print(f"the loss was chosen on the validation rows: {tried}")
    if document.get("completion"):
        console.print("model completion, and what the known labels alone achieve")
        console.print(*_completion(document["completion"]))
    if results.ALONE in document:
        console.print(alone_line(document, records), style="bold", markup=False)
    if document["stopped"]:
        console.print(f"stopped early: {document['stopped']}")
    step = f"{seconds['step'] * 1e3:.2f} ms per step"
    console.print(f"{seconds['total']:.1f} s on {document['engine']}, {step}")
    if config["out"]:
        console.print(f"saved in {config['out']}", soft_wrap=True)


def _epochs(records: pd.DataFrame, hidden: set[str]) -> Iterator[Table]:
    """Return loss and evaluation of the first, the middle and the last epoch."""
    training = records.query("metric == 'loss' and split == 'train' and step == 0")
    losses = training.set_index("epoch")["value"]
    found = records.query("step > 0 and party == '' and attack == ''")
    found = found[~found["metric"].isin(hidden) & ~found["split"].isin(hidden)]
    names = found["split"] + " " + found["metric"].str.replace("_", " ")
    values = found.assign(name=names).set_index(["epoch", "name"])["value"]
    rows = []
    for place in sorted({0, len(losses) // 2, len(losses) - 1}):
        epoch = losses.index[place]
        cells = [losses[epoch], *(values.get((epoch, name)) for name in names.unique())]
        texts = ["" if value is None else f"{value:.4f}" for value in cells]
        rows.append([str(epoch), *texts])
    return text_tables(["epoch", "loss", *names.unique()], rows, left=0)


def _leakage(found: pd.DataFrame) -> Iterator[Table]:
    """Return one figure of each attack on each party, and on each of its layers."""
    attacks, lines = list(found["attack"].unique()), []
    for (party, random), own in found.groupby(["party", "random"], sort=False):
        ordered = own.sort_values("layer", key=lambda names: names != "", kind="stable")
        for layer, rows in ordered.groupby("layer", sort=False):
            name = f"  layer {layer!s}" if layer else str(party)
            name += " random" if random and not layer else ""
            values = rows.set_index("attack")["leak"].reindex(attacks)
            cells = ["" if value != value else f"{value:.3f}" for value in values]
            lines.append([name, *cells])
    return text_tables(["party", *attacks], lines)


def _completion(entries: list[dict[str, Any]]) -> Iterator[Table]:
    """Return the success of model completion beside what the labels alone give."""
    heads = ["attack", "party", "metric", "train", "test"]
    heads += ["alone: train", "alone: test"]
    lines = []
    groups = pd.DataFrame(entries).groupby(["attack", "party"], sort=False)
    for (attack, party), own in groups:
        cells = [parse_spec(str(attack))[0], str(party), str(own["metric"].iloc[0])]
        for key in _SUCCESSES:
            values = own[key].dropna().astype(float)
            spread = f" ± {values.std():.3f}" if len(values) > 1 else ""
            cells.append("" if values.empty else f"{values.mean():.3f}{spread}")
        lines.append(cells)
    return text_tables(heads, lines, left=3)


def _audit_lines(records: pd.DataFrame) -> Iterator[str]:
    """Yield what a whole training shows beyond its model, and about canaries."""
    stale = leaks(records).dropna(subset="beyond")
    for attack, own in stale.groupby("attack", sort=False):
        worst = own.nlargest(1, "beyond").iloc[0]
        yield (
            f"over all epochs {attack} finds {worst['leak']:.3f} at {worst['party']}, "
            f"{worst['beyond']:+.3f} beyond the model's own predictions for these rows"
        )
    canary = records[records["metric"].str.startswith("canary")].sort_values("step")
    last = canary.groupby("metric")["value"].last()
    if not last.empty:
        yield (
            "canaries: everything that left tells them apart with an AUC of "
            f"{last['canary_auc']:.3f}; epsilon is at least "
            f"{last['canary_epsilon']:.2f}, the AUC at least "
            f"{last['canary_auc_low']:.3f} (99.9 % confidence)"
        )


def _defense_lines(records: pd.DataFrame) -> Iterator[str]:
    """Yield what a defense guarantees and found, party by party."""
    series = records.query("step > 0 and party != ''").set_index("step")
    values = dict(list(series.groupby(["metric", "party"], sort=False)["value"]))
    for (metric, party), found in values.items():
        if metric == AUC_BOUND:
            yield (
                "under the defense's assumptions, no attack on the gradients of "
                f"{party} has an AUC above {found.max():.3f} in any step, "
                f"{found.mean():.3f} on average"
            )
        if metric == "withheld" and found.any():
            yield f"{party} got no gradient in {found.sum():.0f} of {len(found)} steps"
        if metric == "suspected" and found.any():
            yield (
                f"{party} is suspected from step {found.idxmax()} on: relative to its "
                "gradients, its embeddings change up to "
                f"{values['response', party].max():.1f} times as much as those of the "
                "other parties"
            )
