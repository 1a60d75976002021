"""The audit of PATE: of noisy votes, and of what is charged for them.

What a call answers is compared with what the ledger was charged, by a
sensitivity that is said here once more, apart from the mechanism's own code.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import stats

from tf_dpsub import accounting
from tf_dpsub.auditing import statistics
from tf_dpsub.auditing.lower_bounds import epsilon_of_rates
from tf_dpsub.auditing.statistics import Finding
from tf_dpsub.pate.confident_gnmax import ANSWER, CHECK

# One vote leaves a class for another: by how much it moves the largest count,
# and all counts together.
_SENSITIVITIES = {CHECK: 1.0, ANSWER: math.sqrt(2)}
_TEACHERS = 101
# Below all noisy counts: every query passes.
_NO_THRESHOLD = -1e6
# Of one run that is attacked, and the share of checks in its cost.
_QUERIES, _SHARE_OF_CHECKS = 50, 0.1


class VoteAudit:
    """Checks what `tf_dpsub.pate.ConfidentGNMax` claims.

    Args:
        make_aggregator: function of the arguments of `ConfidentGNMax` that
            returns one.
    """

    def __init__(self, make_aggregator: Callable):
        self._make = make_aggregator

    def check_noise(self, queries: int = 4000) -> list:
        """Compares the noise of checks and answers with what is charged.

        Of many equal queries, as many pass the check, and as many answers name
        the larger of two classes, as the noise multipliers of the ledger say;
        and the outcomes of queries that follow each other are not correlated.

        Args:
            queries: int. Defaults to `4000`.

        Returns:
            List of `Finding`.
        """
        settings = {"threshold_noise": 20.0, "noise": 10.0}
        checked = self._aggregator(threshold=50.5, **settings)
        labels = checked.aggregate(_votes(queries, 77))
        outcomes = {CHECK: (labels >= 0, 26.5, _claim(checked, CHECK))}
        answering = self._aggregator(threshold=_NO_THRESHOLD, **settings)
        labels = answering.aggregate(_votes(queries, 61))
        # The difference of two noisy counts has the noise of both.
        outcomes[ANSWER] = (
            labels == 0,
            21.0,
            math.sqrt(2) * _claim(answering, ANSWER),
        )
        return [
            _variance(outcomes),
            _independence([o for o, *_ in outcomes.values()]),
        ]

    def check_sensitivity(self, cases: int = 300, seed: int = 0) -> list:
        """Searches for votes of one teacher that move counts too far.

        Args:
            cases: int, pairs of votes. Defaults to `300`.
            seed: int. Defaults to `0`.

        Returns:
            List of one `Finding`.
        """
        generator = np.random.default_rng(seed)
        aggregator = self._aggregator(
            teachers=9, classes=4, threshold=0, threshold_noise=1.0, noise=1.0
        )
        worst = 0.0
        for case in range(cases):
            dtype = (np.int8, np.uint8, np.int64, np.uint64)[case % 4]
            limits = np.iinfo(dtype)
            hard = np.array([limits.min, limits.max, 0, 1, 2, 3, 4, 127], dtype)
            votes = generator.integers(0, 4, (8, 9)).astype(dtype)
            pair = []
            for _ in range(2):
                votes[:, case % 9] = generator.choice(hard, len(votes))
                pair.append(np.asarray(aggregator.counts(votes), np.float64))
            checks = np.abs(pair[0].max(1) - pair[1].max(1))
            answers = np.linalg.norm(pair[0] - pair[1], axis=1)
            worst = max(
                worst,
                float(checks.max()) / _SENSITIVITIES[CHECK],
                float(answers.max()) / _SENSITIVITIES[ANSWER],
            )
        return [
            Finding(
                check="sensitivity",
                # Of whole numbers, but for the root.
                passed=bool(worst <= 1 + 1e-12),
                value=worst,
                detail=f"Of {cases} pairs of votes, one teacher moves counts "
                f"by at most {worst:.6f} of what is claimed.",
            )
        ]

    def check_ledger(self) -> list:
        """Checks that what is charged is enough, and follows from no vote.

        Returns:
            List of one `Finding`.
        """
        settings = {"threshold": 80, "threshold_noise": 20.0, "noise": 10.0}
        charged = []
        for largest in (_TEACHERS, 51):
            aggregator = self._aggregator(**settings)
            aggregator.aggregate(_votes(40, largest), answers=20)
            charged.append(
                sum(
                    entry.steps / entry.noise_multiplier**2
                    for entry in aggregator.ledger.entries
                )
            )
        due = 40 / 20.0**2 + 20 * 2 / 10.0**2
        share = min(charged) / due
        differ = "" if charged[0] == charged[1] else ", and follows from votes"
        return [
            Finding(
                check="ledger",
                passed=bool(not differ and share >= 1 - 1e-9),
                value=share,
                detail=f"The ledger is charged {share:.4f} of what the checks "
                f"and answers cost{differ}.",
            )
        ]

    def check_epsilon(
        self,
        *,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        runs: int = 2000,
        confidence: float = 0.999,
    ) -> list:
        """Checks that an attacker proves no more than the ledger's epsilon.

        In half of the runs one teacher has another vote for all queries, in
        each of which the others are divided. The attacker knows all votes but
        that one, and counts the answers.

        Args:
            epsilon: float, of a run. Defaults to `1.0`.
            delta: float. Defaults to `1e-5`.
            runs: int, of each kind. Defaults to `2000`.
            confidence: float, of the bound. Defaults to `0.999`.

        Returns:
            List of one `Finding`.
        """
        precision = (
            accounting.noise_multiplier(
                epsilon=epsilon, delta=delta, sampling_rate=1.0, steps=1
            )
            ** -2
        )
        settings = {
            "threshold": _NO_THRESHOLD,
            "threshold_noise": math.sqrt(
                _QUERIES / (_SHARE_OF_CHECKS * precision)
            ),
            "noise": math.sqrt(
                2 * _QUERIES / ((1 - _SHARE_OF_CHECKS) * precision)
            ),
        }
        one_run = self._aggregator(**settings)
        one_run.aggregate(_votes(_QUERIES, 51))
        claimed = one_run.ledger.epsilon(delta)
        many = self._aggregator(**settings)
        inside, outside = (
            np.sum(
                many.aggregate(_votes(runs * _QUERIES, largest)).reshape(
                    runs, _QUERIES
                )
                == 0,
                axis=1,
            )
            for largest in (51, 50)
        )
        # A majority of one, of two counts with noise; then all queries.
        right = stats.norm.cdf(1 / (math.sqrt(2) * settings["noise"]))
        middle, spread = _QUERIES / 2, math.sqrt(_QUERIES) / 2
        shift = 2 * _QUERIES * (right - 0.5) / spread
        each = (1 + confidence) / 2
        best = statistics.best_threshold(shift, runs, delta, each)
        bound = max(
            epsilon_of_rates(
                int(np.sum(inside >= threshold)),
                runs,
                int(np.sum(outside >= threshold)),
                runs,
                delta=delta,
                confidence=each,
            )
            # The best one for the noise that is claimed, and the middle.
            for threshold in (middle + (best - shift / 2) * spread, middle)
        )
        return [
            Finding(
                check="epsilon",
                passed=bool(bound <= claimed),
                value=bound,
                detail=f"An attacker proves ε ≥ {bound:.3f}, of ε = "
                f"{claimed:.3f} charged, at δ = {delta:g}.",
            )
        ]

    def run(self, *, queries=4000, cases=300, runs=2000) -> list:
        """Runs all checks.

        Returns:
            List of `Finding`.
        """
        return [
            *self.check_noise(queries),
            *self.check_sensitivity(cases),
            *self.check_ledger(),
            *self.check_epsilon(runs=runs),
        ]

    def _aggregator(self, **settings):
        return self._make(
            **{"teachers": _TEACHERS, "classes": 2, "examples": 1000} | settings
        )


def _votes(queries, largest):
    """Equal queries, with so many votes for class 0, the others for 1."""
    row = np.repeat(np.int8([0, 1]), [largest, _TEACHERS - largest])
    return np.tile(row, (queries, 1))


def _claim(aggregator, mechanism):
    """Standard deviation of the noise, by what the ledger was charged."""
    multipliers = [
        entry.noise_multiplier
        for entry in aggregator.ledger.entries
        if entry.mechanism == mechanism
    ]
    return max(multipliers, default=math.inf) * _SENSITIVITIES[mechanism]


def _variance(outcomes):
    """Compares shares of outcomes with those of normal noise.

    Args:
        outcomes: dict from mechanisms to a bool array of outcomes, the margin
            by which the noise must not fall short, and its claimed standard
            deviation.
    """
    worst, detail, ratio = 1.0, [], 1.0
    for mechanism, (outcome, margin, stddev) in outcomes.items():
        expected = stats.norm.cdf(margin / stddev)
        seen, trials = int(outcome.sum()), len(outcome)
        p_value = stats.binomtest(seen, trials, expected).pvalue
        quantile = stats.norm.ppf(seen / trials)
        measured = (margin / (quantile * stddev)) ** 2 if quantile else math.inf
        detail.append(
            f"{mechanism}: {measured:.3f} times the variance that was charged"
        )
        if p_value <= worst:
            worst, ratio = p_value, measured
    return Finding(
        check="variance",
        passed=bool(worst > statistics.SIGNIFICANCE / len(outcomes)),
        value=float(ratio),
        detail=f"Noise of a {'; of a '.join(detail)}.",
    )


def _independence(outcomes):
    """Correlates outcomes of queries with those of the next ones."""
    largest = 0.0
    for outcome in outcomes:
        centred = outcome - outcome.mean()
        spread = np.mean(centred**2)
        if spread == 0:
            largest = 1.0
            break
        correlation = np.mean(centred[1:] * centred[:-1]) / spread
        largest = max(largest, float(abs(correlation)))
    return Finding(
        check="independence",
        passed=statistics.is_likely(largest, len(outcomes[0]), len(outcomes)),
        value=largest,
        detail=f"Outcomes of a query and of the next one are correlated by "
        f"{largest:.3f}.",
    )
