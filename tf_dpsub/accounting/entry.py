"""The description of private steps that share a mechanism and a sampler."""

import dataclasses
import math
import operator

import dp_accounting

from tf_dpsub.accounting import accountants, selection
from tf_dpsub.checks import check_choice, check_noise_multiplier, check_positive

SAMPLERS = ("poisson", "batches")

# The mechanism that releases metrics of private rows.
VALIDATION = "PrivateValidation"


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
    `event` accounts for it, in one of three ways:

    | sampler | each example once per epoch | event |
    |---|---|---|
    | `"poisson"` | | `steps` Poisson-sampled Gaussians |
    | `"batches"` | not stated | `steps` Gaussians |
    | `"batches"` | stated | `epochs` Gaussians |

    Of a search, it releases the best of a random number of trials, each of
    which releases what `trial` says; `selection.selection_event` accounts for
    that.

    Where it is stated, but no epoch was counted, the steps count. Without noise
    the event is not private.

    Args:
        mechanism: str, name of the mechanism, e.g. `"DPSGD"`.
        noise_multiplier: float, >= 0, of the single Gaussian that a step
            amounts to. 0 is not private.
        l2_norm_clip: float, > 0, bound on the norm of an example's share.
            `math.inf` only without noise.
        batch_size: int, the public, expected number of examples in a batch.
        examples: int or `None`, number of examples in the data set, where
            known. Required by `"poisson"`.
        sampler: str, `"poisson"` (each example is drawn independently with
            probability `batch_size / examples`) or `"batches"` (the user's
            own batches: each example at most once in each).
        each_example_once_per_epoch: bool, whether the user states that an epoch
            holds each example at most once. Defaults to `False`.
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
        if self.sampler == "poisson" and self.examples is None:
            raise ValueError(
                "Expected examples with sampler='poisson', got None. The "
                "sampling rate is batch_size / examples."
            )
        if self.batch_size < 1 or (
            self.examples is not None and self.batch_size > self.examples
        ):
            raise ValueError(
                "Expected 1 <= batch_size <= examples, got "
                f"batch_size={self.batch_size}, examples={self.examples}."
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
        """Expected share of the examples in a batch; `None` if unknown."""
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

    def step_event(self):
        """The dp-accounting event of one step (or one epoch, where it counts).

        Returns:
            A `dp_accounting.DpEvent`.
        """
        if self.trial:
            return self._selection(entry.event() for entry in self.trial)
        return accountants.sampled_gaussian(
            self._accounted_multiplier(),
            self.sampling_rate if self.sampler == "poisson" else 1,
        )

    def event(self):
        """The dp-accounting event of all steps of the entry.

        Returns:
            A `dp_accounting.DpEvent`.
        """
        return _repeat(self.step_event(), self._participations())

    def event_without_amplification(self):
        """`event`, if every step were a Gaussian that may use every example.

        Returns:
            A `dp_accounting.DpEvent`.
        """
        if self.trial:
            event = self._selection(
                entry.event_without_amplification() for entry in self.trial
            )
            return _repeat(event, self.steps)
        return _repeat(
            accountants.sampled_gaussian(self._accounted_multiplier(), 1),
            max(self.steps, self._participations()),
        )

    @property
    def steps_of_optimizer(self) -> int:
        """Number of steps by which one model was trained."""
        if self.trial:
            return self.steps * sum(e.steps_of_optimizer for e in self.trial)
        return 0 if self.is_validation else self.steps

    def _selection(self, events):
        """The event of one search whose trials compose these events."""
        return selection.selection_event(
            events, self.mean_trials, self.trials_shape
        )

    def _accounted_multiplier(self):
        return 0.0 if self.private_state else self.noise_multiplier

    def _participations(self):
        """Number of steps that may have used the same example."""
        if self.each_example_once_per_epoch and self.epochs > 0:
            return self.epochs
        return self.steps


def _repeat(event, count):
    if count == 0:
        return dp_accounting.NoOpDpEvent()
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        return event
    return dp_accounting.SelfComposedDpEvent(event, count)
