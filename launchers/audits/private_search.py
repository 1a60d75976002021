"""The audit of a private search, and of the noisy scores that it chooses by."""

import dataclasses
import functools
import math
import tempfile
import time

import numpy as np
from scipy import stats

NAME = "PrivateRandomSearch"
DELTA = 1e-5
MEAN_TRIALS = 10.0
SHAPE = 0.0
# Rows that scores of the audit are of, and classes.
_ROWS, _INPUTS, _CLASSES = 40, 4, 3
_METRICS = {"accuracy": 1.0, "loss": 2.0}
_CONFIDENCE = 0.999


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a search that are audited; a broken twin has another one.

    Attributes:
        evaluation: class, `training.private_evaluation.PrivateEvaluation`.
        oracle: class, `tuning.random_oracle.RandomOracle`.
        tuner: class, `tuning.PrivateRandomSearch`.
    """

    evaluation: type
    oracle: type
    tuner: type


def parts() -> Parts:
    """The parts of this package."""
    from tf_dpsub import tuning
    from tf_dpsub.training import private_evaluation
    from tf_dpsub.tuning import random_oracle

    return Parts(
        private_evaluation.PrivateEvaluation,
        random_oracle.RandomOracle,
        tuning.PrivateRandomSearch,
    )


def audited(sizes, epsilon: float, audited_parts: Parts | None = None) -> dict:
    """Audits a private search; returns a result that JSON can hold.

    Args:
        sizes: `mechanism.Sizes`.
        epsilon: float, of the search, from which the noise of its scores
            follows.
        audited_parts: `Parts`. Defaults to `None`, those of this package.
    """
    audited_parts = audited_parts or parts()
    began = time.monotonic()
    findings = [
        *noise(audited_parts, sizes.steps),
        sensitivity(audited_parts, sizes.cases),
        trials(audited_parts, sizes.runs),
        attack(audited_parts, max(20, sizes.runs // 5), epsilon),
        ledger(audited_parts),
    ]
    return {
        "mechanism": NAME,
        "claimed_epsilon": epsilon,
        "findings": [dataclasses.asdict(f) for f in findings],
        "passed": all(f.passed for f in findings),
        "seconds": time.monotonic() - began,
    }


def noise(audited_parts: Parts, steps: int) -> list:
    """Compares the noise in scores with what is claimed of it.

    Args:
        audited_parts: `Parts`.
        steps: int, number of releases.

    Returns:
        List of `auditing.Finding`.
    """
    from tf_dpsub.auditing import statistics

    evaluation = _evaluation(audited_parts, _rows(1, 0), 3.0)
    nothing = np.zeros((1, len(_METRICS)))
    stddev = 3.0 * math.sqrt(len(_METRICS))
    z = np.array(
        [
            [e.value / _METRICS[n] for n, e in released.items()]
            for released in (evaluation.released(nothing) for _ in range(steps))
        ]
    )  # [steps, metrics]
    return [
        statistics.variance(z / stddev),
        statistics.distribution(z / stddev),
        statistics.independence(z / stddev),
    ]


def sensitivity(audited_parts: Parts, cases: int):
    """Searches for a row that moves scores too far.

    Args:
        audited_parts: `Parts`.
        cases: int, number of rows.

    Returns:
        `auditing.Finding`.
    """
    from tf_dpsub import auditing

    x, y = _rows(cases, 1)
    scales = np.float32([1e-30, 1.0, 30.0, 1e18, 3e38, np.inf, np.nan, 0.0])
    with np.errstate(over="ignore", invalid="ignore"):
        x *= np.resize(scales, cases)[:, None]
    bound = math.sqrt(len(_METRICS))
    values = _evaluation(audited_parts, (x, y), 1.0).checked()
    moved = np.linalg.norm(values, axis=1).max() / bound
    # A row must not move the values of others either.
    others = _evaluation(audited_parts, (x[1:], y[1:]), 1.0).checked()
    with_first = np.linalg.norm(values.sum(0) - others.sum(0)) / bound
    worst = float(max(moved, with_first))
    return auditing.Finding(
        check="sensitivity",
        passed=bool(worst <= 1 + 1e-9),
        value=worst,
        detail=f"Of {cases} rows, one moves the sum of scores by at most "
        f"{worst:.6f} of what is claimed.",
    )


def trials(audited_parts: Parts, draws: int):
    """Compares the numbers of trials with the distribution that is claimed.

    Args:
        audited_parts: `Parts`.
        draws: int.

    Returns:
        `auditing.Finding`.
    """
    from tf_dpsub import auditing
    from tf_dpsub.auditing import statistics

    counts = np.array([_oracle(audited_parts).max_trials for _ in range(draws)])
    edges = [1, 2, 3, 5, 10, 20, 50]
    shares = _shares(edges)
    seen = np.array(
        [
            np.sum((counts >= a) & (counts < b))
            for a, b in zip(edges, [*edges[1:], math.inf])
        ]
    )
    p_value = float(stats.chisquare(seen, draws * shares).pvalue)
    return auditing.Finding(
        check="trials",
        passed=bool(p_value > statistics.SIGNIFICANCE),
        value=float(counts.mean()),
        detail=f"Of {draws:,} searches, {counts.mean():.2f} trials on average "
        f"of {MEAN_TRIALS:g} expected; their numbers have p = {p_value:.2g}.",
    )


def _shares(edges):
    """Probabilities of numbers of trials between edges, by their series."""
    numbers = np.arange(1, 100_000)
    # The mean falls with gamma.
    low, high = 1e-6, 1 - 1e-6
    for _ in range(100):
        gamma = math.sqrt(low * high)
        weights = np.exp(numbers * math.log1p(-gamma) - np.log(numbers))
        weights /= weights.sum()
        low, high = (
            (gamma, high) if weights @ numbers > MEAN_TRIALS else (low, gamma)
        )
    return np.add.reduceat(weights, np.array(edges) - 1)


def attack(audited_parts: Parts, runs: int, epsilon: float):
    """Checks that an attacker proves no more than the epsilon of a search.

    Half of the searches score all trials on one row more, which all of them
    classify rightly; the attacker sees the score of the best trial.

    Args:
        audited_parts: `Parts`.
        runs: int, of each kind.
        epsilon: float, of the search.

    Returns:
        `auditing.Finding`.
    """
    import dp_accounting

    from tf_dpsub import auditing
    from tf_dpsub.accounting import accountants, selection

    sigma = accountants.least_noise(
        lambda multiplier: selection.selection_event(
            [dp_accounting.GaussianDpEvent(multiplier)], MEAN_TRIALS, SHAPE
        ),
        epsilon=epsilon,
        delta=DELTA,
        accountant="rdp",
    )
    evaluation = _evaluation(
        audited_parts, _rows(1, 0), sigma, {"accuracy": 1.0}
    )
    outside, inside = (
        np.array(
            [_best_score(audited_parts, evaluation, share) for _ in range(runs)]
        )
        for share in (0.0, 1.0)
    )
    together = np.quantile(
        np.concatenate([outside, inside]), [0.02, 0.1, 0.5, 0.9, 0.98]
    )
    # Each of them may be wrong.
    each = 1 - (1 - _CONFIDENCE) / len(together)
    bound = max(
        auditing.epsilon_of_rates(
            int(np.sum(inside > threshold)),
            runs,
            int(np.sum(outside > threshold)),
            runs,
            delta=DELTA,
            confidence=each,
        )
        for threshold in together
    )
    return auditing.Finding(
        check="epsilon",
        passed=bool(bound <= epsilon),
        value=bound,
        detail=f"An attacker proves ε ≥ {bound:.3f} of {runs:,} searches, of "
        f"ε = {epsilon:.3f} claimed, at δ = {DELTA:g}.",
    )


def _best_score(audited_parts, evaluation, share):
    """The score of the best trial of one search."""
    import keras_tuner

    oracle = _oracle(audited_parts)
    values = np.full((1, 1), share)
    for number in range(oracle.max_trials):
        name = str(number)
        oracle.populate_space(name)
        trial = keras_tuner.engine.trial.Trial(None, name)
        trial.score = evaluation.released(values)["accuracy"].value
        oracle.trials[name] = trial
        oracle.end_order.append(name)
    (best,) = oracle.get_best_trials()
    return best.score


def ledger(audited_parts: Parts):
    """Checks that the ledger of a search has at least what its trials spend.

    Args:
        audited_parts: `Parts`.

    Returns:
        `auditing.Finding`.
    """
    import dp_accounting
    from dp_accounting import dp_event

    import tf_dpsub
    from tf_dpsub import auditing

    x, y = _rows(_ROWS, 2)
    spent: list = []

    class Count(tf_dpsub.callbacks.PrivateValidation):
        """Counts what a trial has really taken."""

        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            spent.append((epoch, int(self.model.optimizer.iterations.numpy())))

        def __deepcopy__(self, memo):
            return self

    with tempfile.TemporaryDirectory() as folder:
        tuner = audited_parts.tuner(
            lambda hp: _model(),
            "val_private_accuracy",
            mean_trials=2.0,
            directory=folder,
        )
        tuner.search(
            x, y, epochs=2, callbacks=[Count(x, y, noise_multiplier=9.0)]
        )
        claimed = tuner.ledger.epsilon(DELTA)
    steps = max(steps for _, steps in spent)
    releases = max(epoch for epoch, _ in spent) + 1
    accountant = dp_accounting.rdp.RdpAccountant()
    step = dp_accounting.PoissonSampledDpEvent(
        0.5, dp_accounting.GaussianDpEvent(2.0)
    )
    trial = dp_accounting.ComposedDpEvent(
        (
            dp_accounting.SelfComposedDpEvent(step, steps),
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.GaussianDpEvent(9.0), releases
            ),
        )
    )
    accountant.compose(dp_event.RepeatAndSelectDpEvent(trial, 2.0, SHAPE))
    expected = accountant.get_epsilon(DELTA)
    return auditing.Finding(
        check="ledger",
        # Other orders give slightly other bounds.
        passed=bool(claimed >= 0.999 * expected),
        value=claimed / expected,
        detail=f"The ledger of a search has ε = {claimed:.4f}; what its trials "
        f"took, selected from, has ε = {expected:.4f}.",
    )


def _oracle(audited_parts):
    import keras_tuner

    return audited_parts.oracle(
        keras_tuner.Objective("val_private_accuracy", "max"),
        MEAN_TRIALS,
        SHAPE,
    )


def _evaluation(audited_parts, rows, noise_multiplier, metrics=None):
    return audited_parts.evaluation(
        _scored_model(),
        *rows,
        metrics=metrics or _METRICS,
        noise_multiplier=noise_multiplier,
    )


def _model():
    import keras

    import tf_dpsub

    model = tf_dpsub.make_private(tf_dpsub.models.mlp((_INPUTS,), (), _CLASSES))
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            "sgd",
            noise_multiplier=2.0,
            l2_norm_clip=1.0,
            batch_size=_ROWS // 2,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


# Scores need none that is new.
_scored_model = functools.cache(_model)


def _rows(count, seed):
    """Random inputs, and labels in and out of range."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((count, _INPUTS)).astype("float32")
    return x, generator.integers(-1, _CLASSES + 1, count)
