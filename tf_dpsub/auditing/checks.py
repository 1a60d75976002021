"""Checks of what a mechanism claims of a single step."""

import math

import numpy as np
from scipy import stats

from tf_dpsub import accounting
from tf_dpsub.auditing import banded_steps, statistics
from tf_dpsub.auditing.hard_batches import Climb, hard_batch, mutated
from tf_dpsub.auditing.lower_bounds import epsilon_of_rates
from tf_dpsub.auditing.statistics import Finding
from tf_dpsub.auditing.step_audit import StepAudit
from tf_dpsub.checks import check_count


class MechanismAudit(StepAudit):
    """Checks single steps of a mechanism on gradients that are given.

    The model has two kernels, and a loss that is linear in them: the gradient
    of an example is an outer product of its inputs and its targets for each.

    Args: as `StepAudit`.
    """

    def check_noise(self, steps: int = 2000) -> list:
        """Compares the noise in what is released with what is claimed.

        In units of the claimed noise, the sum of squares of each number over
        steps is that of so many standard normal numbers, all of them together
        are distributed as such, and no two of them, in a step or in steps that
        follow each other, are correlated.

        Args:
            steps: int. Defaults to `2000`.

        Returns:
            List of `Finding`.
        """
        z, _ = self.released(self.nothing(), steps)
        return [
            statistics.variance(z),
            statistics.distribution(z),
            statistics.independence(z),
        ]

    def check_restart(self, other, steps: int = 500) -> list:
        """Checks that noise is independent across process restarts.

        Args:
            other: `MechanismAudit` of the same mechanism, made anew.
            steps: int. Defaults to `500`.

        Returns:
            List of one `Finding`.
        """
        pairs = [a.released(self.nothing(), steps)[0] for a in (self, other)]
        correlation = statistics.correlation(*pairs)
        return [
            Finding(
                check="restart",
                passed=statistics.is_likely(correlation, pairs[0].size, 1),
                value=correlation,
                detail=f"The noise of two starts is correlated by "
                f"{correlation:.4f}.",
            )
        ]

    def check_divisor(self, steps: int = 2000) -> list:
        """Checks that gradients are divided by a public number.

        With one real row fewer the noise in the gradients has to be the same.

        Args:
            steps: int. Defaults to `2000`.

        Returns:
            List of one `Finding`.
        """
        empty, few = self.nothing(), max(1, self.batch_size - 1)
        variances = [
            np.mean(self.released(empty, steps, rows)[1] ** 2)
            for rows in (None, few)
        ]
        ratio = variances[1] / variances[0] if variances[0] else math.inf
        # Sums of squares of as many normal numbers as are released.
        spread = 2 / math.sqrt(steps * self.released_numbers)
        limit = stats.norm.isf(statistics.SIGNIFICANCE / 2) * spread
        return [
            Finding(
                check="divisor",
                passed=bool(abs(math.log(ratio)) < limit),
                value=float(ratio),
                detail=f"With {few} rows instead of {self.batch_size} the "
                f"gradient's noise has {ratio:.4f} times the variance.",
            )
        ]

    def check_sensitivity(
        self, cases: int = 300, seed: int = 0, until: float = math.inf
    ) -> list:
        """Searches for an example that moves what is released too far.

        Neighbouring batches are drawn of kinds that are hard: gradients that
        are huge, tiny, zero, not finite, denormal, repeated, of one kernel
        alone, as large as the clip, or such that rounding of sums differs. The
        search goes on from the worst of them by changing it at random, and from
        others by gradient ascent.

        Args:
            cases: int, pairs of batches. Defaults to `300`.
            seed: int. Defaults to `0`.
            until: float, ends the search at the first pair that moves it
                further, in units of what is claimed. Defaults to `inf`.

        Returns:
            List of one `Finding`.

        Raises:
            ValueError: if `cases` is not positive.
        """
        check_count("cases", cases)
        generator = np.random.default_rng(seed)
        worst, worst_batch = 0.0, None
        climb = Climb(self, generator)
        for k in range(cases):
            if k % 3 == 0 or worst_batch is None:
                batch = hard_batch(self, generator, k // 3)
            elif k % 3 == 1:
                batch = mutated(worst_batch, generator)
            else:
                batch = climb.next_batch()
            moved = self.movement(batch)
            if k % 3 == 2:
                climb.tell(batch, moved)
            if not moved <= worst:
                worst, worst_batch = moved, batch
            if not worst <= until:
                break
        policy = self.dtype_policy
        in_policy = "" if policy == "float32" else f", {policy}"
        return [
            Finding(
                check=f"sensitivity{in_policy}",
                passed=bool(worst <= 1),
                value=worst,
                detail=f"Of {k + 1} pairs of batches, one example moves what "
                f"is released by at most {worst:.6f} of what is claimed.",
            )
        ]

    def check_epsilon(
        self,
        *,
        delta: float = 1e-5,
        runs: int = 4000,
        confidence: float = 0.999,
    ) -> list:
        """Checks that an attacker proves no more than the claimed epsilon.

        Half of the runs of one step have an example with a huge gradient, half
        do not; the attacker knows all else, and looks along the direction in
        which the example moves what is released.

        Args:
            delta: float. Defaults to `1e-5`.
            runs: int, of each kind. Defaults to `4000`.
            confidence: float, of the bound. Defaults to `0.999`.

        Returns:
            List of one `Finding`.
        """
        batch = self.canary()
        claimed = self._claimed_epsilon(delta)
        (inside, shifts), (outside, _) = (
            self.scores(batch, runs, rows)
            for rows in (None, self.batch_size - 1)
        )
        bound, shift = 0.0, float(np.mean(shifts))
        if shift > 0:
            # Each may be wrong.
            each = (1 + confidence) / 2
            bound = max(
                epsilon_of_rates(
                    int(np.sum(inside >= threshold)),
                    len(inside),
                    int(np.sum(outside >= threshold)),
                    len(outside),
                    delta=delta,
                    confidence=each,
                )
                # The best one for the noise that is claimed, and the middle,
                # where noise that is too small shows.
                for threshold in (
                    statistics.best_threshold(shift, runs, delta, each),
                    shift / 2,
                )
            )
        return [
            Finding(
                check="epsilon",
                passed=bool(bound <= claimed),
                value=bound,
                detail=f"An attacker proves ε ≥ {bound:.3f}, of ε = "
                f"{claimed:.3f} claimed, at δ = {delta:g}.",
            )
        ]

    def check_low_bits(
        self, *, delta: float = 1e-5, runs: int = 500, confidence: float = 0.999
    ) -> list:
        """Checks that low bits do not tell what noise was added to.

        As `check_epsilon`, by an attacker who knows both sums that are
        possible, and asks of each number that is released whether any float32
        noise makes it of the one sum, and of the other.

        Args:
            delta: float. Defaults to `1e-5`.
            runs: int, of each kind. Defaults to `500`.
            confidence: float, of the bound. Defaults to `0.999`.

        Returns:
            List of one `Finding`.

        Reference:
            - [Mironov, 2012](https://doi.org/10.1145/2382196.2382264)
        """
        batch = self.random(np.random.default_rng(0))
        inside, outside = (
            self.refuted(batch, runs, rows)
            for rows in (None, self.batch_size - 1)
        )
        claimed = self._claimed_epsilon(delta)
        bound = epsilon_of_rates(
            int(np.sum(inside > 0)),
            runs,
            int(np.sum(outside > 0)),
            runs,
            delta=delta,
            confidence=confidence,
        )
        return [
            Finding(
                check="low bits",
                passed=bool(bound <= claimed),
                value=bound,
                detail=f"By low bits an attacker proves ε ≥ {bound:.3f}, of "
                f"ε = {claimed:.3f} claimed, at δ = {delta:g}.",
            )
        ]

    def check_groups(self, cycles: int = 20) -> list:
        """Checks that no example is drawn again while steps share its noise.

        Of batches as `fit` draws them, where an optimizer has bands.

        Args:
            cycles: int, of so many steps as there are bands. Defaults to `20`.

        Returns:
            List of one `Finding`.
        """
        drawn = banded_steps.drawn(self.optimizer, cycles)  # [steps, examples]
        bands = self.optimizer.bands
        windows = np.lib.stride_tricks.sliding_window_view(drawn, bands, 0)
        most = int(windows.sum(-1).max())
        return [
            Finding(
                check="groups",
                passed=bool(most <= 1),
                value=most,
                detail=f"Of {bands} steps in succession, an example is in "
                f"{most} at most.",
            )
        ]

    def _claimed_epsilon(self, delta):
        """Epsilon of one step on a given batch, without sampling."""
        return accounting.epsilon(
            noise_multiplier=self.optimizer.effective_noise_multiplier,
            sampling_rate=1.0,
            steps=1,
            delta=delta,
            accountant="pld",
        )

    def run(self, *, steps=2000, cases=300, runs=4000) -> list:
        """Runs all checks but that of a restart.

        Returns:
            List of `Finding`.
        """
        return [
            *self.check_noise(steps),
            *self.check_divisor(steps),
            *self.check_sensitivity(cases),
            *self.check_epsilon(runs=runs),
            *self.check_low_bits(runs=max(1, runs // 2)),
            *(self.check_groups() if self.optimizer.bands > 1 else ()),
        ]
