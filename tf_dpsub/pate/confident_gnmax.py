"""Confident-GNMax: noisy votes of teachers, where enough of them agree."""

import math

import dp_accounting
import numpy as np
import tensorflow as tf

from tf_dpsub import accounting
from tf_dpsub.accounting import accountants
from tf_dpsub.accounting.statement import round_up
from tf_dpsub.checks import (
    check_count,
    check_delta,
    check_epsilon,
    check_nonnegative,
    check_seed,
)
from tf_dpsub.pate.data_dependent import (
    UnpublishableEpsilon,
    answer_rdp,
    check_rdp,
)
from tf_dpsub.primitives import grid
from tf_dpsub.primitives.noise import NoiseKey, noisy

CHECK, ANSWER = "PATE check", "PATE answer"
# By how much one vote moves the largest count, and all counts together: it
# leaves one class for another.
CHECK_SENSITIVITY, ANSWER_SENSITIVITY = 1.0, math.sqrt(2)


class ConfidentGNMax:
    """Labels public inputs by the votes of teachers, privately.

    Each teacher is a model that is trained on private examples of its own (see
    `disjoint_parts`) and votes for one class of each query, a public input. If
    the largest count of a query, with noise, reaches `threshold`, the query is
    answered by the class whose count, with new noise, is the largest. A student
    that learns from the answers alone is private. Teachers and votes are not.

    Formal guarantees: an example is in the part of one teacher, so replacing it
    by an empty one changes at most one vote of each query: it leaves a class,
    and goes to another one or to none. The largest count moves by at most 1,
    and all counts together by at most sqrt(2) in Euclidean norm. A call of
    `aggregate` with Q queries and A answers makes Q checks, each a Gaussian
    release of multiplier `threshold_noise`, and after them A answers at most,
    each a Gaussian release of multiplier `noise / sqrt(2)`. The ledger is
    charged with Q checks and A answers before either: A is stated beforehand,
    and nothing is given back where fewer queries pass, as their number follows
    from private votes. Which queries are answered follows from the checks, so
    the call is an adaptive composition of a fixed sequence, whose cost the
    ledger states without reading a vote. Noise is drawn on a public grid, of
    which whole counts are points.

    Which examples a teacher has must be decided by their places alone, and the
    training of a teacher must depend on its own examples, public data and
    random numbers of its own: a scaling or an early stop that all teachers
    share, taken from private examples, would change all votes.

    Args:
        teachers: int, number of teachers.
        classes: int, >= 2, number of classes.
        examples: int, number of private examples of all teachers together.
        threshold: float, noisy count from which on a query is answered.
        threshold_noise: float, > 0, standard deviation of the noise in the
            check, in votes.
        noise: float, > 0, standard deviation of the noise in each count of an
            answer, in votes.
        epsilon: float, a budget that calls must keep together with all that the
            ledger holds, by PLD. Defaults to `None`, none.
        delta: float, of the budget. Defaults to `None`; required with
            `epsilon`.
        ledger: `tf_dpsub.accounting.PrivacyLedger`, which several objects may
            share, or continue one after another by a file: all that they
            answer is composed. Defaults to `None`, a new one in memory.
        seed: int, makes the noise reproducible, for experiments. Defaults to
            `None`, fresh entropy.
        secure_noise: bool, as for `tf_dpsub.optimizers.DPSGD`. Defaults to
            `False`.

    Attributes:
        ledger: the ledger that is charged.

    Raises:
        ValueError: if an argument is out of range, or only one of `epsilon` and
            `delta` is given.
        TypeError: if it is copied or pickled: what the copy answers would be in
            a ledger of its own.

    Example:

    ```python
    aggregator = tf_dpsub.pate.ConfidentGNMax(
        teachers=250, classes=10, examples=60_000,
        threshold=200, threshold_noise=150, noise=40,
    )
    labels = aggregator.aggregate(votes, answers=286)  # votes: [640, 250]
    student.fit(x_public[labels >= 0], labels[labels >= 0])
    aggregator.ledger.epsilon(delta=1e-5)  # 2.543
    ```

    Reference:
        - [Papernot, Song, Mironov, Raghunathan, Talwar, Erlingsson, 2018](
          https://arxiv.org/abs/1802.08908), Algorithm 1
    """

    def __init__(
        self,
        *,
        teachers: int,
        classes: int,
        examples: int,
        threshold: float,
        threshold_noise: float,
        noise: float,
        epsilon: float | None = None,
        delta: float | None = None,
        ledger=None,
        seed: int | None = None,
        secure_noise: bool = False,
    ):
        check_count("teachers", teachers)
        check_count("examples", examples)
        if examples < teachers:
            raise ValueError(
                "Expected an example for each teacher, got "
                f"examples={examples} and teachers={teachers}."
            )
        check_count("classes", classes)
        if classes < 2:
            raise ValueError(f"Expected classes >= 2, got {classes}.")
        if not math.isfinite(threshold):
            raise ValueError(f"Expected a finite threshold, got {threshold}.")
        for name, stddev in (
            ("threshold_noise", threshold_noise),
            ("noise", noise),
        ):
            # The noise of any number of counts then lies on a grid.
            if not 1e-3 <= stddev <= 1e5:
                raise ValueError(
                    f"Expected 0.001 <= {name} <= 100000, got {stddev}. It is "
                    "the standard deviation of the noise, in votes."
                )
        if (epsilon is None) != (delta is None):
            raise ValueError(
                "Expected both or neither of epsilon and delta, got "
                f"{epsilon} and {delta}."
            )
        if epsilon is not None:
            check_epsilon(epsilon)
            check_delta(delta)
        check_seed(seed)
        self.teachers, self.classes = int(teachers), int(classes)
        self.examples = int(examples)
        self.threshold = float(threshold)
        self.threshold_noise = float(threshold_noise)
        self.noise = float(noise)
        self.epsilon, self.delta = epsilon, delta
        self.ledger = accounting.PrivacyLedger() if ledger is None else ledger
        self.secure_noise = bool(secure_noise)
        self._seed = seed
        self._noise_key = NoiseKey(seed)
        # Of what was released so far, by the private votes: [orders].
        self._private_rdp = np.zeros(len(accountants.RDP_ORDERS))

    def aggregate(self, votes, answers: int | None = None):
        """Labels of queries, as far as teachers agree on them.

        Args:
            votes: int array `[queries, teachers]`, the class that each teacher
                votes for. A number that is no class is no vote.
            answers: int, how many queries may be answered at most: the first of
                those that pass the check. Defaults to `None`, all queries.

        Returns:
            Int array `[queries]`, labels, and -1 where there is no answer.

        Raises:
            ValueError: if votes are no ints of that shape, if `answers` is out
                of range, or if the budget would be exceeded. Nothing is charged
                or drawn then.
        """
        counts = self.counts(votes)
        queries = len(counts)
        answers = queries if answers is None else answers
        check_nonnegative("answers", answers)
        if answers > queries:
            raise ValueError(
                f"Expected at most {queries} answers, one for each query, got "
                f"answers={answers}."
            )
        if not queries:
            return np.zeros(0, int)
        self._require_budget(queries, int(answers))
        self._noise_key.require_own_process()
        self._charge(queries, int(answers))
        passed = self._noisy(counts.max(1), self.threshold_noise)
        answered = np.flatnonzero(passed >= self.threshold)[:answers]
        labels = np.full(queries, -1)
        if len(answered):
            labels[answered] = self._noisy(counts[answered], self.noise).argmax(
                axis=1
            )
        self._count_privately(counts, answered)
        return labels

    def counts(self, votes):
        """Number of votes for each class: private, before any noise.

        Args:
            votes: as for `aggregate`.

        Returns:
            Int array `[queries, classes]`.

        Raises:
            ValueError: if votes are no ints of that shape.
        """
        votes = np.asarray(votes)
        if votes.dtype.kind not in "iu":
            raise ValueError(
                f"Expected votes that are ints, got {votes.dtype}. Pass the "
                "number of the class that each teacher votes for: "
                "`outputs.argmax(-1)`."
            )
        if votes.ndim != 2 or votes.shape[1] != self.teachers:
            raise ValueError(
                f"Expected votes [queries, {self.teachers}], one of each "
                f"teacher in a row, got the shape {votes.shape}. Transpose "
                "votes that have a row for each teacher."
            )
        return np.stack(
            [np.sum(votes == k, axis=1) for k in range(self.classes)], axis=1
        )

    def entries(self):
        """What the ledger is charged with.

        Returns:
            Pair of `tf_dpsub.accounting.LedgerEntry`, of a check and of an
            answer.
        """
        check, answer = (
            accounting.LedgerEntry(
                mechanism=mechanism,
                noise_multiplier=stddev / sensitivity,
                l2_norm_clip=sensitivity,
                batch_size=self.examples,
                examples=self.examples,
                sampler="batches",
                fixed_seed=self._seed is not None,
                notes=(
                    "the queries that teachers were asked",
                    "the part of each teacher, by the places of examples",
                ),
                uncovered=("the teachers", "their votes"),
            )
            for mechanism, stddev, sensitivity in (
                (CHECK, self.threshold_noise, CHECK_SENSITIVITY),
                (ANSWER, self.noise, ANSWER_SENSITIVITY),
            )
        )
        return check, answer

    def answers_within(self, queries: int) -> int:
        """Number of answers that the budget leaves for further queries.

        Args:
            queries: int, >= 0, number of queries, all of which are checked.

        Returns:
            An int, at most `queries`; -1 if not even the checks fit.

        Raises:
            ValueError: if there is no budget, or an argument is out of range.
        """
        check_nonnegative("queries", queries)
        if self.epsilon is None:
            raise ValueError(
                "Expected a budget, got none. Pass epsilon and delta to "
                "ConfidentGNMax."
            )
        if self._epsilon_after(queries, 0) > self.epsilon:
            return -1
        # Bisection: the first number fits, the last one does not.
        fits, too_many = 0, int(queries) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._epsilon_after(queries, middle) <= self.epsilon:
                fits = middle
            else:
                too_many = middle
        return fits

    def data_dependent_epsilon(self, delta: float) -> UnpublishableEpsilon:
        """ε of what this object has released, for the very votes of its calls.

        Formal guarantees: nothing is released, and the result is private: it is
        a function of votes, of how many queries passed, and of nothing that
        noise protects. It must not be published, nor decide on what is
        released. What may be published is `ledger.epsilon(delta)`.

        Args:
            delta: float in (0, 1).

        Returns:
            An `UnpublishableEpsilon`.

        Raises:
            ValueError: if `delta` is out of its range.
        """
        check_delta(delta)
        spent = 0.0
        if self._private_rdp.any():
            spent, _ = dp_accounting.rdp.compute_epsilon(
                accountants.RDP_ORDERS, self._private_rdp, delta
            )
        return UnpublishableEpsilon(float(spent), delta)

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "Expected one ConfidentGNMax for all queries, got a copy or a "
            "pickle of it: what both answer would be composed nowhere. Make "
            "another one with `ledger=` the ledger of this one; in another "
            "process, with `ledger=accounting.PrivacyLedger(path)` of the file "
            "in which this one keeps its ledger."
        )

    def _require_budget(self, queries, answers):
        if self.epsilon is None:
            return
        after = self._epsilon_after(queries, answers)
        if after <= self.epsilon:
            return
        fit = self.answers_within(queries)
        cure = (
            f"With {fit} answers they fit: pass answers={fit}."
            if fit >= 0
            else "Not even the checks fit: ask fewer queries."
        )
        raise ValueError(
            f"Expected queries within ε = {self.epsilon:g} at δ = "
            f"{self.delta:g}, got {queries} queries with {answers} answers, "
            f"after which ε would be {round_up(after)}. {cure}"
        )

    def _epsilon_after(self, queries, answers):
        check, answer = (entry.step_event() for entry in self.entries())
        return accountants.composed_epsilon(
            [
                *self.ledger.events(),
                dp_accounting.SelfComposedDpEvent(check, int(queries)),
                dp_accounting.SelfComposedDpEvent(answer, int(answers)),
            ],
            delta=self.delta,
            accountant="pld",
        )

    def _charge(self, queries, answers):
        """Records both parts durably, before anything is drawn."""
        self.ledger.require_unit("example")
        for entry, steps in zip(self.entries(), (queries, answers)):
            if steps:
                self.ledger.charge(entry, steps, planned=steps)
        self.ledger.settle()

    def _noisy(self, counts, stddev):
        """Counts with noise, a float64 array of the same shape."""
        # Counts are points of any grid: there is no rounding to share out.
        spacing = grid.spacing(stddev, 1.0, 1)
        (released,) = noisy(
            self._noise_key.advance(),
            [tf.constant(counts, tf.float64)],
            [grid.GridNoise(stddev, spacing)],
            self.secure_noise,
            "float64",
        )
        return released.numpy()

    def _count_privately(self, counts, answered):
        orders = accountants.RDP_ORDERS
        # Equal counts cost the same: they are computed once.
        checked, times = np.unique(counts, axis=0, return_counts=True)
        self._private_rdp = self._private_rdp + times @ check_rdp(
            checked, self.threshold, self.threshold_noise, orders
        )
        if len(answered):
            checked, times = np.unique(
                counts[answered], axis=0, return_counts=True
            )
            self._private_rdp += times @ answer_rdp(checked, self.noise, orders)
