"""What a model has spent: a list that only grows."""

import dataclasses
import json
import os

import dp_accounting

from tf_dpsub.accounting import accountants

SAMPLERS = ("poisson", "batches")
_FORMAT = "tf_dpsub ledger, version 1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """Identical steps of one mechanism.

    Attributes:
        mechanism: string, name of the optimizer.
        noise_multiplier: float, that of the one Gaussian which accounts for a
            step. 0 if a step is not private.
        l2_norm_clip: float.
        batch_size: int, the public, expected batch size.
        examples: int, how many there are; None if that is not known.
        sampler: string, `"poisson"` (every step draws each example
            independently) or `"batches"` (given ones: no amplification).
        each_example_once_per_epoch: bool, whether the user states so.
        fixed_seed: bool, whether noise or sampling were reproducible.
        private_selection: bool, whether callbacks steered by private results.
        notes: tuple of strings, what else is taken as public.
        steps: int, how many have been charged.
        epochs: int, how many have been begun.
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
    notes: tuple = ()
    steps: int = 0
    epochs: int = 0

    def __post_init__(self):
        if self.sampler not in SAMPLERS:
            raise ValueError(
                f"Expected sampler in {SAMPLERS}, got {self.sampler!r}."
            )
        if self.sampler == "poisson" and not (
            self.examples and self.batch_size <= self.examples
        ):
            raise ValueError(
                "Expected examples >= batch_size with Poisson sampling, got "
                f"examples={self.examples}, batch_size={self.batch_size}."
            )
        object.__setattr__(self, "notes", tuple(self.notes))

    @property
    def sampling_rate(self):
        """Probability that a step draws an example; None for given batches."""
        if self.sampler == "batches":
            return None
        return self.batch_size / self.examples

    def description(self):
        """The entry without its counts."""
        return dataclasses.replace(self, steps=0, epochs=0)

    def with_further(self, steps, epochs):
        """The entry with more steps and epochs."""
        return dataclasses.replace(
            self, steps=self.steps + steps, epochs=self.epochs + epochs
        )

    def step_event(self, amplified=True):
        """`dp_accounting.DpEvent` of one step."""
        if self.noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        event = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if amplified and self.sampling_rate is not None:
            event = dp_accounting.PoissonSampledDpEvent(
                self.sampling_rate, event
            )
        return event

    def event(self, amplified=True):
        """`dp_accounting.DpEvent` of all steps.

        Args:
            amplified: bool, whether sampling, or the user's statement that an
                epoch gives each example at most once, counts. Defaults to
                `True`.
        """
        releases = self.steps
        if amplified and self.each_example_once_per_epoch:
            releases = min(self.epochs, self.steps)
        return dp_accounting.SelfComposedDpEvent(
            self.step_event(amplified), releases
        )


class PrivacyLedger:
    """All private steps of a model, in order.

    Formal guarantees: entries are appended or counted up, never changed or
    removed; compiling again, loading weights or a new optimizer cannot shorten
    the ledger. `epsilon` composes all of them. With a `path`, a block of steps
    is written, durably, before the first of it runs; what is found in the file
    at the next start counts as spent, so a crash loses no step.

    Args:
        path: string or path-like, the file; None to keep the ledger in memory.
            An existing file is continued. Defaults to `None`.
        block: int, how many steps are written ahead at a time. Defaults to
            `100`.

    Attributes:
        entries: tuple of `LedgerEntry`.

    Raises:
        ValueError: if the file is damaged or not a ledger; it is left alone.
    """

    def __init__(self, path=None, block=100):
        self.path = None if path is None else os.fspath(path)
        self._block = block
        self._entries = []
        self._ahead = (None, 0, 0)  # what the file has and the list has not
        if self.path is not None and os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                text = file.read()
            try:
                self._entries = _parse(text)
            except ValueError as e:
                raise ValueError(
                    f"Expected a ledger in {self.path}, got something else: "
                    f"{e} The file was not changed. Name another one, or "
                    "restore it: privacy spent before would not be counted."
                ) from e

    @property
    def entries(self):
        return tuple(self._entries)

    @property
    def steps(self):
        """Number of steps charged."""
        return sum(entry.steps for entry in self._entries)

    def charge(self, entry, steps=1, epochs=0):
        """Counts steps that are about to run.

        Args:
            entry: `LedgerEntry`; its own counts are not used.
            steps: int, how many steps. Defaults to `1`.
            epochs: int, how many epochs begin with them. Defaults to `0`.
        """
        entry = entry.description()
        if self.path is not None:
            known, steps_ahead, epochs_ahead = self._ahead
            if known != entry or steps_ahead < steps or epochs_ahead < epochs:
                block = max(steps, self._block)
                self._write(_extended(self._entries, entry, block, epochs))
                steps_ahead, epochs_ahead = block, epochs
            self._ahead = (entry, steps_ahead - steps, epochs_ahead - epochs)
        self._entries = _extended(self._entries, entry, steps, epochs)

    def settle(self):
        """Writes the true count, at a regular end of a run."""
        if self.path is not None:
            self._write(self._entries)
            self._ahead = (None, 0, 0)

    def merge(self, other):
        """Adds what another ledger of the same model has counted.

        Of two ledgers of which one continues the other, the longer one is
        kept. Where they differ, both are composed after what they share.

        Args:
            other: `PrivacyLedger`, as from a checkpoint.
        """
        ours, theirs = self._entries, list(other.entries)
        shared = 0
        while (
            shared < min(len(ours), len(theirs))
            and ours[shared] == theirs[shared]
        ):
            shared += 1
        ours, theirs = ours[shared:], theirs[shared:]
        merged = self._entries[:shared]
        if ours and theirs and ours[0].description() == theirs[0].description():
            # One of them went on with the same entry.
            first = max(ours[0], theirs[0], key=lambda e: (e.steps, e.epochs))
            if first.epochs < max(ours[0].epochs, theirs[0].epochs):
                first = dataclasses.replace(
                    first, epochs=max(ours[0].epochs, theirs[0].epochs)
                )
            merged, ours, theirs = [*merged, first], ours[1:], theirs[1:]
        self._entries = [*merged, *ours, *theirs]
        if self.path is not None:
            self.settle()

    def epsilon(self, delta, accountant="rdp"):
        """Epsilon of everything so far.

        Args:
            delta: float in (0, 1).
            accountant: string, `"rdp"` or `"pld"`. Defaults to `"rdp"`.

        Returns:
            float, `inf` if a step was not private.
        """
        return accountants.composed_epsilon(
            [entry.event() for entry in self._entries],
            delta=delta,
            accountant=accountant,
        )

    def epsilon_without_amplification(self, delta, accountant="rdp"):
        """As `epsilon`, as if every step had seen every example."""
        return accountants.composed_epsilon(
            [entry.event(amplified=False) for entry in self._entries],
            delta=delta,
            accountant=accountant,
        )

    def delta(self, epsilon, accountant="rdp"):
        """Delta of everything so far, for a given epsilon > 0."""
        return accountants.composed_delta(
            [entry.event() for entry in self._entries],
            epsilon=epsilon,
            accountant=accountant,
        )

    def epsilon_after(self, entry, steps, delta, epochs=0, accountant="rdp"):
        """Epsilon if further steps were made.

        Args:
            entry: `LedgerEntry` of the further steps.
            steps: int.
            delta: float in (0, 1).
            epochs: int, how many epochs would begin. Defaults to `0`.
            accountant: string. Defaults to `"rdp"`.

        Returns:
            float.
        """
        entries = _extended(self._entries, entry.description(), steps, epochs)
        return accountants.composed_epsilon(
            [entry.event() for entry in entries],
            delta=delta,
            accountant=accountant,
        )

    def steps_within(self, entry, *, epsilon, delta, accountant="rdp"):
        """How many further steps keep a budget.

        Where the user states that an epoch gives each example at most once,
        every step is nevertheless counted as a release: epochs may be cut.

        Args:
            entry: `LedgerEntry` of the further steps.
            epsilon: float > 0, the budget, all earlier steps included.
            delta: float in (0, 1).
            accountant: string. Defaults to `"rdp"`.

        Returns:
            int.
        """
        if entry.noise_multiplier == 0:
            return 0
        return accountants.further_steps(
            entry.step_event(),
            epsilon=epsilon,
            delta=delta,
            accountant=accountant,
            spent=[entry.event() for entry in self._entries],
        )

    def to_json(self):
        """The entries as a JSON string."""
        return _dump(self._entries)

    @classmethod
    def from_json(cls, text):
        """A ledger in memory from `to_json`.

        Raises:
            ValueError: if the string is not a ledger.
        """
        ledger = cls()
        ledger._entries = _parse(text)
        return ledger

    def _write(self, entries):
        """Replaces the file atomically, and waits until it is on disk."""
        folder = os.path.dirname(os.path.abspath(self.path))
        os.makedirs(folder, exist_ok=True)
        temporary = f"{self.path}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(_dump(entries))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _extended(entries, entry, steps, epochs):
    """Entries with further steps of one that may be new."""
    if entries and entries[-1].description() == entry:
        return [*entries[:-1], entries[-1].with_further(steps, epochs)]
    return [*entries, entry.with_further(steps, epochs)]


def _dump(entries):
    return json.dumps(
        {
            "format": _FORMAT,
            "entries": [dataclasses.asdict(entry) for entry in entries],
        },
        indent=2,
    )


def _parse(text):
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}.")
        return [LedgerEntry(**entry) for entry in content["entries"]]
    except (KeyError, TypeError, json.JSONDecodeError) as e:
        raise ValueError(f"{type(e).__name__}: {e}.") from e
