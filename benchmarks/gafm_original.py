"""What the tables of the original GAFM leave open, found out with scikit-learn.

``decisions``: logistic regression on Spambase and credit default, mean of 5 splits,
with columns as they are and scaled: the AUC of decisions (0 or 1) and of probabilities.
Table 1 of the paper has 0.931 and 0.911, 0.500 and 0.499 (training and test rows).

``split``: splits whose linear regression has the rho that Table 3 prints for it, of the
first random states of ``train_test_split`` and several shares of test rows; and the rho
of its predictions behind a LeakyReLU, which is what the table prints for vanilla.
"""

import argparse
import warnings

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from flower_vfl.simulations.datasets import load_dataset

PRINTED = {"boston": (0.869, 0.815), "diabetes": (0.708, 0.759)}
SHARES = (0.1, 0.2, 0.25, 0.3, 0.33, 0.4, 0.5)


def table(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return columns and labels, categories as the numbers in the file."""
    dataset = load_dataset(name)
    assert dataset.table is not None
    return dataset.table.to_numpy(float), dataset.labels.astype(float)


def print_decisions(seeds: int) -> None:
    """Print the AUC of logistic regression."""
    warnings.simplefilter("ignore", ConvergenceWarning)
    print("| data | columns | decisions, train | test | probabilities, train | test |")
    print("|---|---|---|---|---|---|")
    for name in ("spambase", "credit-default"):
        rows, labels = table(name)
        for columns in ("as they are", "scaled"):
            found = []
            for seed in range(seeds):
                parts = train_test_split(rows, labels, test_size=0.2, random_state=seed)
                steps = [StandardScaler()] if columns == "scaled" else []
                model = make_pipeline(*steps, LogisticRegression())
                model.fit(parts[0], parts[2])
                found.append(
                    [
                        roc_auc_score(truth, score(part))
                        for score in (model.predict, model.decision_function)
                        for part, truth in zip(parts[:2], parts[2:], strict=True)
                    ]
                )
            cells = " | ".join(f"{value:.3f}" for value in np.mean(found, axis=0))
            print(f"| {name} | {columns} | {cells} |")


def rho(left: np.ndarray, right: np.ndarray) -> float:
    """Return Pearson's rho."""
    return float(np.corrcoef(left, right)[0, 1])


def print_splits(states: int) -> None:
    """Print the splits that fit, and how linear regression does on all of them."""
    for name, printed in PRINTED.items():
        rows, labels = table(name)
        for share in SHARES:
            tests = []
            for state in range(states):
                parts = train_test_split(
                    rows, labels, test_size=share, random_state=state
                )
                model = LinearRegression().fit(parts[0], parts[2])
                outputs = [model.predict(part) for part in parts[:2]]
                found = [rho(o, y) for o, y in zip(outputs, parts[2:], strict=True)]
                tests.append(found[1])
                if np.allclose(found, printed, rtol=0.0, atol=0.0006):
                    behind = [np.where(o > 0, o, 0.01 * o) for o in outputs]
                    leaky = [rho(o, y) for o, y in zip(behind, parts[2:], strict=True)]
                    print(
                        f"{name}, {share:.0%} test rows, random state {state}: "
                        f"{found[0]:.4f} {found[1]:.4f}, behind a LeakyReLU "
                        f"{leaky[0]:.4f} {leaky[1]:.4f}"
                    )
            print(
                f"{name}, {share:.0%} test rows, all: test "
                f"{np.mean(tests):.3f} ± {np.std(tests):.3f}"
            )


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("decisions", "split"))
    parser.add_argument("--states", type=int, default=1000, help="random states")
    parser.add_argument("--seeds", type=int, default=5, help="splits of decisions")
    arguments = parser.parse_args()
    if arguments.what == "decisions":
        print_decisions(arguments.seeds)
    else:
        print_splits(arguments.states)


if __name__ == "__main__":
    main()
