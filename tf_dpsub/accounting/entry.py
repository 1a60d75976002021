"""The description of private steps that share a mechanism and a sampler."""

import dataclasses
import math
import operator

import dp_accounting

from tf_dpsub.accounting import accountants, selection
from tf_dpsub.checks import (
    check_choice,
    check_count,
    check_noise_multiplier,
    check_positive,
)

SAMPLERS = ("poisson", "batches", "allocation")
UNITS = ("example", "person")

# The mechanism that releases metrics of private rows.
VALIDATION = "PrivateValidation"
# Mechanisms whose releases are no steps of an optimizer.
_WITHOUT_OPTIMIZER = (VALIDATION, "PrivateRidge", "PATE check", "PATE answer")


def _plain_flag(value):
    if value not in (True, False):
        raise ValueError(f"Expected True or False, got {value!r}.")
    return bool(value)


# By the annotation of a field: values of plain Python, so that equal entries
# are equal after a round trip through JSON.
_PLAIN = {
    str: str,
    float: float,
    int: operator.index,
    int | None: lambda value: None if value is None else operator.index(value),
    float | None: lambda value: None if value is None else float(value),
    bool: _plain_flag,
    tuple[str, ...]: tuple,
    "tuple[LedgerEntry, ...]": tuple,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """Identical steps of one mechanism under one way of sampling.

    Formal guarantees: what is released is, at every step, a sum over the drawn
    examples in which each example has norm at most `l2_norm_clip`, with
    Gaussian noise of standard deviation `noise_multiplier * l2_norm_clip`.
    `event` accounts for it, in one of four ways:

    | sampler | each example once per epoch | event |
    |---|---|---|
    | `"poisson"` | | `steps` Poisson-sampled Gaussians |
    | `"poisson"`, with bands | | one for `bands` steps, at `bands` times q |
    | `"batches"` | not stated | `steps` Gaussians |
    | `"batches"` | stated | `epochs` Gaussians |
    | `"allocation"` | ensured | `epochs` random allocations |

    Of a search, it releases the best of a random number of trials, each of
    which releases what `trial` says; `selection.selection_event` accounts for
    that.

    Where it is stated, but no epoch was counted, the steps count. Without noise
    the event is not private.

    With `unit="person"` an example is all rows of one person: their share
    together has norm at most `l2_norm_clip`, persons are what is drawn, and
    `examples` and `batch_size` count them. With `largest_rate` each example is
    drawn with a rate of its own, of which the event has the largest: for an
    example of a smaller one it is an upper bound.

    With bands, an example is in one of `bands` groups, of which steps take one
    after the other: so many steps in succession draw it once at most. Of all
    that it changes thereafter, each time that it is drawn, one Gaussian of
    `noise_multiplier` accounts, as `primitives.carried_noise` says. Entries of
    two runs are two: each begins a cycle. Several rows of a person may be in
    several groups. Together they move `C G` by at most as many sensitivities
    as there are rows: their event is of Gaussians without sampling.

    Args:
        mechanism: str, name of the mechanism, e.g. `"DPSGD"`.
        noise_multiplier: float, >= 0, of the single Gaussian that a step
            amounts to. 0 is not private.
        l2_norm_clip: float, > 0, bound on the norm of an example's share.
            `math.inf` only without noise.
        batch_size: int, the public, expected number of examples in a batch.
        examples: int or `None`, number of examples in the data set, where
            known. Required by `"poisson"` and `"allocation"`.
        sampler: str, `"poisson"` (each example is drawn independently with
            probability `batch_size / examples`), `"batches"` (the user's
            own batches: each example at most once in each) or `"allocation"`
            (in each epoch each example is drawn at one step, chosen uniformly
            and independently: see `random_allocation`).
        each_example_once_per_epoch: bool, whether the user states, or the
            sampler ensures, that an epoch holds each example at most once.
            Required by `"allocation"`. Defaults to `False`.
        fixed_seed: bool, whether noise or sampling came from a fixed seed.
            Defaults to `False`.
        private_selection: bool, whether a callback was allowed to steer the run
            by private results. Defaults to `False`.
        private_state: bool, whether steps used what was computed from private
            data and is not accounted for, such as a basis. They are then not
            private. Defaults to `False`.
        steps: int, number of steps. Defaults to 0.
        epochs: int, number of epochs begun. Defaults to 0.
        notes: tuple of str, what else is taken to be public, as nouns for the
            statement. Defaults to `()`.
        uncovered: tuple of str, what the guarantee does not cover, as nouns
            for a warning in the statement. Defaults to `()`.
        target: str, the (ε, δ) for which the noise was found. Defaults to `""`,
            for none.
        unit: str, what is protected: `"example"`, one row, or `"person"`, all
            rows of one person. Defaults to `"example"`.
        largest_rate: float in (0, 1], the largest probability with which a step
            draws an example, where they differ. Defaults to `None`: all are
            `batch_size / examples`.
        epoch_steps: int, >= 1, number of steps of an epoch of `"allocation"`.
            Defaults to `None`, for other samplers.
        bands: int, number of steps that share their noise. Defaults to 1.
        trial: tuple of `LedgerEntry` with counts, all that one trial of a
            search releases. `steps` then counts searches, of each of which the
            best trial is released, and the sampler is that of the first of
            them. Defaults to `()`, no search.
        mean_trials: float, > 1, the expected number of trials of a search.
            Defaults to 0.0, no search.
        trials_shape: float, >= 0, the shape of the distribution of that number.
            Defaults to 0.0, the logarithmic one.

    Raises:
        ValueError: If a field is out of its range.
    """

    mechanism: str
    noise_multiplier: float
    l2_norm_clip: float
    batch_size: int
    examples: int | None
    sampler: str
    each_example_once_per_epoch: bool = False
    fixed_seed: bool = False
    private_selection: bool = False
    private_state: bool = False
    steps: int = 0
    epochs: int = 0
    notes: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    target: str = ""
    unit: str = "example"
    largest_rate: float | None = None
    epoch_steps: int | None = None
    bands: int = 1
    trial: "tuple[LedgerEntry, ...]" = ()
    mean_trials: float = 0.0
    trials_shape: float = 0.0

    def __post_init__(self):
        if not self.mechanism or not isinstance(self.mechanism, str):
            raise ValueError(
                f"Expected mechanism to be a name, got {self.mechanism!r}."
            )
        check_noise_multiplier(self.noise_multiplier)
        check_positive("l2_norm_clip", self.l2_norm_clip)
        if self.sampler == "poisson" and self.each_example_once_per_epoch:
            raise ValueError(
                "Expected each_example_once_per_epoch=False with "
                "sampler='poisson', got True: every step draws anew."
            )
        if self.noise_multiplier > 0 and math.isinf(self.l2_norm_clip):
            raise ValueError(
                "Expected a finite l2_norm_clip with noise_multiplier="
                f"{self.noise_multiplier}, got inf. The noise is a multiple of "
                "the clip: set a clip, or noise_multiplier=0 (not private)."
            )
        check_choice("sampler", self.sampler, SAMPLERS)
        if self.sampler != "batches" and self.examples is None:
            raise ValueError(
                f"Expected examples with sampler={self.sampler!r}, got None. "
                "The sampling rate is batch_size / examples."
            )
        check_choice("unit", self.unit, UNITS)
        if self.largest_rate is not None and not (
            self.sampler == "poisson" and 0 < self.largest_rate <= 1
        ):
            raise ValueError(
                "Expected 0 < largest_rate <= 1 with sampler='poisson', or "
                f"None, got {self.largest_rate} with sampler={self.sampler!r}."
            )
        if (
            self.unit == "person"
            and self.sampler == "batches"
            and not self.is_validation
        ):
            raise ValueError(
                "Expected sampler='poisson' or 'allocation' with "
                "unit='person', got 'batches': persons are drawn."
            )
        self._check_epoch_steps()
        if self.batch_size < 1 or (
            self.examples is not None and self.batch_size > self.examples
        ):
            raise ValueError(
                "Expected 1 <= batch_size <= examples, got "
                f"batch_size={self.batch_size}, examples={self.examples}."
            )
        if self.bands < 1 or (self.bands > 1 and self.sampler != "poisson"):
            raise ValueError(
                "Expected bands=1, or bands >= 1 with sampler='poisson', got "
                f"bands={self.bands} with {self.sampler!r}: with bands, steps "
                "must draw from groups of the examples in turn. Train by "
                "`fit` on arrays or `PoissonBatches`."
            )
        if self.bands > 1 and self.bands * self.batch_size > self.examples:
            raise ValueError(
                "Expected bands * batch_size <= examples, got bands="
                f"{self.bands}, batch_size={self.batch_size}, examples="
                f"{self.examples}: a batch comes from one of so many groups. "
                "Take fewer bands, or smaller batches."
            )
        if self.steps < 0 or self.epochs < 0:
            raise ValueError(
                f"Expected steps >= 0 and epochs >= 0, got {self.steps} and "
                f"{self.epochs}."
            )
        if self.trial:
            selection.check_trials(self.mean_trials, self.trials_shape)
        elif self.mean_trials or self.trials_shape:
            raise ValueError(
                "Expected mean_trials=0 and trials_shape=0 without a trial, "
                f"got {self.mean_trials} and {self.trials_shape}."
            )
        for field in dataclasses.fields(self):
            value = _PLAIN[field.type](getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @property
    def sampling_rate(self):
        """Probability with which an example is drawn; `None` if unknown.

        Where rates differ, it is the largest of them.
        """
        if self.largest_rate is not None:
            return self.largest_rate
        if self.examples is None:
            return None
        return self.batch_size / self.examples

    @property
    def is_validation(self) -> bool:
        """True if its steps release metrics: they train nothing."""
        return self.mechanism == VALIDATION

    @property
    def description(self):
        """The entry without its counts."""
        return dataclasses.replace(self, steps=0, epochs=0)

    def step_event(self, rows_per_person: int = 1):
        """The dp-accounting event of one step (or one epoch, where it counts).

        With bands, it is that of a cycle of `bands` steps.

        Args:
            rows_per_person: int, the most rows of one person, for the event of
                all of them together. Defaults to `1`, that of one `unit`. It
                changes nothing where the unit is a person.

        Returns:
            A `dp_accounting.DpEvent`.
        """
        if self.trial:
            return self._selection(e.event(rows_per_person) for e in self.trial)
        if self.epoch_steps is not None:
            check_count("rows_per_person", rows_per_person)
            return accountants.allocated_gaussian(
                self._accounted_multiplier(),
                self.epoch_steps,
                1 if self.unit == "person" else rows_per_person,
            )
        if self.sampler == "poisson":
            of_rows = self.unit != "person" and rows_per_person > 1
            rate = self.bands * self.sampling_rate
            return self._step_event(
                1 if of_rows and self.bands > 1 else rate, rows_per_person
            )
        return self._step_event(1, rows_per_person)

    def event(self, rows_per_person: int = 1):
        """The dp-accounting event of all steps of the entry.

        Args: as `step_event`.

        Returns:
            A `dp_accounting.DpEvent`.
        """
        return _repeat(self.step_event(rows_per_person), self.step_events)

    def event_without_amplification(self, rows_per_person: int = 1):
        """`event`, if every step were a Gaussian that may use every example.

        With bands, every step may use every example of its group.

        Args: as `step_event`.

        Returns:
            A `dp_accounting.DpEvent`.
        """
        if self.trial:
            event = self._selection(
                e.event_without_amplification(rows_per_person)
                for e in self.trial
            )
            return _repeat(event, self.steps)
        return _repeat(
            self._step_event(1, rows_per_person),
            self.step_events
            if self.bands > 1
            else max(self.steps, self.step_events),
        )

    def _step_event(self, sampling_rate, rows_per_person):
        check_count("rows_per_person", rows_per_person)
        return accountants.sampled_gaussian(
            self._accounted_multiplier(),
            sampling_rate,
            1 if self.unit == "person" else rows_per_person,
        )

    @property
    def steps_of_optimizer(self) -> int:
        """Number of steps by which one model was trained."""
        if self.trial:
            return self.steps * sum(e.steps_of_optimizer for e in self.trial)
        return 0 if self.mechanism in _WITHOUT_OPTIMIZER else self.steps

    def _selection(self, events):
        """The event of one search whose trials compose these events."""
        return selection.selection_event(
            events, self.mean_trials, self.trials_shape
        )

    def _accounted_multiplier(self):
        return 0.0 if self.private_state else self.noise_multiplier

    @property
    def step_events(self) -> int:
        """Number of `step_event` that all steps of the entry compose."""
        if not (self.each_example_once_per_epoch and self.epochs > 0):
            return -(-self.steps // self.bands)
        if self.epoch_steps is None:
            return self.epochs
        # No epoch of an allocation is longer than it says.
        return max(self.epochs, -(-self.steps // self.epoch_steps))

    def _check_epoch_steps(self):
        if self.sampler != "allocation":
            if self.epoch_steps is not None:
                raise ValueError(
                    f"Expected epoch_steps=None with sampler={self.sampler!r}, "
                    f"got {self.epoch_steps}: only an allocation has epochs of "
                    "a length that counts."
                )
            return
        check_count("epoch_steps", self.epoch_steps)
        if not self.each_example_once_per_epoch:
            raise ValueError(
                "Expected each_example_once_per_epoch=True with "
                "sampler='allocation', got False: an example is drawn at one "
                "step of an epoch."
            )


def _repeat(event, count):
    if count == 0:
        return dp_accounting.NoOpDpEvent()
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        return event
    return dp_accounting.SelfComposedDpEvent(event, count)
