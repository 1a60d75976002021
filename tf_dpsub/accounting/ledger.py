"""The record of every private step that a model has taken.

A `PrivacyLedger` only grows. It belongs to a model, not to an optimizer or to
weights, so that neither compiling again nor loading a checkpoint loses a step;
with a path it is also written ahead of the steps, so that a crash does not.
"""

import dataclasses
import operator
import uuid

from tf_dpsub.accounting import accountants, ledger_file
from tf_dpsub.accounting.entry import LedgerEntry
from tf_dpsub.accounting.ledger_file import LedgerFile, Segment
from tf_dpsub.checks import check_count


class PrivacyLedger:
    """Every private step that was taken, and what they cost together.

    A ledger is a list of segments. A segment is extended only by the ledger
    that began it, carries a random name, and is never shortened; a ledger read
    from a file or copied begins a new one. `merge` can therefore tell the same
    steps, seen twice, from steps that were taken twice.

    With a `path` the file is written ahead: a block of steps is recorded
    durably before the first of them runs, by `reserve`, or by the `charge` that
    finds none; `charge` counts inside the block without touching the disk, and
    `settle` writes the true count at a normal end. A process that dies leaves
    the whole block, which counts as spent from then on.

    Formal guarantees: `epsilon` composes every segment, adaptively, hence holds
    for the weights after every step. Merging takes the larger count of a
    segment that both sides have and adds all others: it never lowers epsilon.
    What two sides describe differently is refused. The text of a ledger ends
    with a SHA-256 of its entries: one that was damaged is refused, one that
    was forged is not.

    Args:
        path: str or `os.PathLike`, file to write ahead to, usually in a run's
            folder. An existing one is read. Defaults to `None`: in memory only.
        block: int, >= 1, how many steps `charge` records ahead. Defaults to
            100.

    Raises:
        ValueError: If the file holds no ledger. It is left as it is.

    Example:

    ```python
    ledger = PrivacyLedger("out/run/privacy_ledger.json")
    entry = LedgerEntry(
        mechanism="DPSGD", noise_multiplier=1.3, l2_norm_clip=1.0,
        batch_size=150, examples=60000, sampler="poisson",
    )
    for _ in range(400):
        ledger.charge(entry)
        ...  # the step
    ledger.settle()
    ledger.epsilon(delta=1e-5)
    ```
    """

    def __init__(self, path=None, block: int = 100):
        if block < 1:
            raise ValueError(f"Expected block >= 1, got {block}.")
        self._block = block
        self._file = None if path is None else LedgerFile(path)
        self._segments: list[Segment] = []
        if self._file is not None:
            self._segments = self._file.segments()
        self._open: Segment | None = None
        # The last one with bands, whose cycle goes on after a release of
        # metrics.
        self._paused: Segment | None = None
        self._reserved_steps = 0
        self._reserved_epochs = 0

    @property
    def path(self):
        """The file that is written ahead, or `None`."""
        return None if self._file is None else self._file.path

    @property
    def entries(self):
        """Tuple of `LedgerEntry`, in the order in which they were begun."""
        entries = []
        for segment in self._segments:
            entry = segment.entry()
            place = _place_of_same(entries, entry)
            if place is not None:
                entries[place] = dataclasses.replace(
                    entry,
                    steps=entries[place].steps + entry.steps,
                    epochs=entries[place].epochs + entry.epochs,
                )
            elif entry.steps or entry.epochs:
                entries.append(entry)
        return tuple(entries)

    @property
    def steps(self):
        """Total number of steps."""
        return sum(segment.steps for segment in self._segments)

    @property
    def counts(self) -> tuple[int, int]:
        """Total numbers of steps and of epochs, of which neither ever falls."""
        epochs = sum(segment.epochs for segment in self._segments)
        return self.steps, epochs

    @property
    def unit(self):
        """What all steps protect, `"example"` or `"person"`; None if both."""
        units = {entry.unit for entry in self.entries}
        if len(units) > 1:
            return None
        return units.pop() if units else "example"

    def require_unit(self, unit: str):
        """Refuses steps that protect something else than those before.

        Args:
            unit: str, what they protect.

        Raises:
            ValueError: if others than these were counted.
        """
        if self.entries and unit != self.unit:
            raise ValueError(
                f"Expected steps and releases that protect one "
                f"{self.unit or 'unit'}, as those in the ledger do, got some "
                f"that protect one {unit}: no epsilon covers both. Give "
                "person_ids to all of them, or to none."
            )

    def create(self):
        """Writes the file, without any step, unless there is one."""
        if self._file is not None and not self._file.exists:
            self._write()

    def charge(
        self, entry, steps: int = 1, epochs: int = 0, planned: int | None = None
    ):
        """Counts steps, before they run.

        An epoch is charged with or before its first step. Steps of an entry
        with `each_example_once_per_epoch` that come before any epoch count one
        by one.

        Args:
            entry: `LedgerEntry` without counts, what the steps are. If it
                differs from the last one, a new entry begins.
            steps: int, number of steps. Defaults to 1.
            epochs: int, number of epochs that begin. Defaults to 0.
            planned: int, how many steps will be charged at most, these
                included: no more are written ahead. Defaults to `None`.
        """
        segment = self._opened(entry, steps, epochs)
        segment.steps += steps
        segment.epochs += epochs
        if self._file is None:
            return
        self._reserved_steps -= steps
        self._reserved_epochs -= epochs
        if self._reserved_steps < 0 or self._reserved_epochs < 0:
            block = (
                self._block if planned is None else min(self._block, planned)
            )
            self._write(ahead=(max(block - steps, 0), 0))

    def end_entry(self):
        """Lets the next steps begin an entry, even if it is like the last."""
        if self._open is not None or self._paused is not None:
            self.settle()
            self._open = self._paused = None
            self._reserved_steps = self._reserved_epochs = 0

    def reserve(self, entry, steps: int, epochs: int = 0):
        """Durably records a block of steps before it runs.

        Unused steps of an earlier block are given back. Does nothing in memory.

        Args:
            entry: `LedgerEntry` without counts, what the steps will be.
            steps: int, number of steps in the block.
            epochs: int, number of epochs that begin in it. Defaults to 0.
        """
        if self._file is None:
            return
        self._opened(entry, steps, epochs)
        self._write(ahead=(steps, epochs))

    def settle(self):
        """Writes the true counts; unused steps of a block are given back."""
        if self._file is not None and self._segments:
            self._write()

    def merge(self, other):
        """Takes over what another ledger has counted; never counts less.

        Args:
            other: `PrivacyLedger`, e.g. of a checkpoint.

        Raises:
            ValueError: If both describe the same steps, but not alike. Nothing
                is taken over then.
        """
        mine = {segment.name: segment for segment in self._segments}
        for theirs in other._segments:
            if theirs.name in mine:
                _require_alike(mine[theirs.name], theirs)
        grows = False
        for theirs in other._segments:
            segment = mine.get(theirs.name)
            if segment is None:
                self._segments.append(dataclasses.replace(theirs))
                grows = True
                continue
            uncovered = (
                *segment.described.uncovered,
                *theirs.described.uncovered,
            )
            uncovered = tuple(dict.fromkeys(uncovered))
            if uncovered != segment.described.uncovered:
                grows = True
                segment.described = dataclasses.replace(
                    segment.described, uncovered=uncovered
                )
            grows |= (
                theirs.steps > segment.steps or theirs.epochs > segment.epochs
            )
            segment.steps = max(segment.steps, theirs.steps)
            segment.epochs = max(segment.epochs, theirs.epochs)
        if grows and self._file is not None:
            self._write(ahead=(self._reserved_steps, self._reserved_epochs))

    def add(self, name: str, entry):
        """Counts what has a name of the caller's, once for each name.

        Called again with the same name, it takes over further notes.

        Args:
            name: str, random.
            entry: `LedgerEntry` with counts.

        Raises:
            ValueError: If what has this name was something else.
        """
        segment = next((s for s in self._segments if s.name == name), None)
        notes = entry.notes
        if segment is not None:
            notes = (*segment.described.notes, *notes)
        notes = tuple(dict.fromkeys(notes))
        if segment is not None and notes != segment.described.notes:
            segment.described = dataclasses.replace(
                segment.described, notes=notes
            )
            self.settle()
        added = PrivacyLedger()
        described = dataclasses.replace(entry.description, notes=notes)
        added._segments = [Segment(name, described, entry.steps, entry.epochs)]
        self.merge(added)

    def epsilon(
        self,
        delta: float,
        accountant: str = "pld",
        rows_per_person: int | None = None,
    ) -> float:
        """Epsilon spent so far.

        Args:
            delta: float in (0, 1).
            accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.
            rows_per_person: int, as for `events`. Defaults to `None`.

        Returns:
            A float, 0.0 before the first step, infinite if a step had no noise.

        Raises:
            ValueError: As `events`, or if an argument is out of its range.
        """
        return accountants.composed_epsilon(
            self.events(rows_per_person), delta=delta, accountant=accountant
        )

    def epsilon_without_amplification(
        self,
        delta: float,
        accountant: str = "pld",
        rows_per_person: int | None = None,
    ) -> float:
        """Epsilon if every step may have used every example.

        It assumes nothing of the batches but that each example is at most once
        in each.

        Args:
            delta: float in (0, 1).
            accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.
            rows_per_person: int, as for `events`. Defaults to `None`.

        Returns:
            A float.
        """
        rows = self._checked_rows(rows_per_person)
        return accountants.composed_epsilon(
            [entry.event_without_amplification(rows) for entry in self.entries],
            delta=delta,
            accountant=accountant,
        )

    def delta(self, epsilon: float, accountant: str = "pld") -> float:
        """Delta spent so far.

        Args:
            epsilon: float, > 0.
            accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.

        Returns:
            A float.
        """
        return accountants.composed_delta(
            self.events(), epsilon=epsilon, accountant=accountant
        )

    def epsilon_after(
        self,
        entry,
        steps: int,
        delta: float,
        epochs: int = 0,
        accountant: str = "pld",
        beside=(),
        rows_per_person: int | None = None,
    ) -> float:
        """Epsilon that would be spent after further steps.

        Args:
            entry: `LedgerEntry`, what the steps would be.
            steps: int, number of further steps.
            delta: float in (0, 1).
            epochs: int, number of further epochs. Defaults to 0.
            accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.
            beside: iterable of `LedgerEntry` with counts, what else would run.
                Defaults to nothing.
            rows_per_person: int, as for `events`. Defaults to `None`.

        Returns:
            A float.
        """
        rows = self._checked_rows(rows_per_person)
        further = dataclasses.replace(entry, steps=steps, epochs=epochs)
        begun = self._begun_steps(entry)
        if begun:
            # Of those, the last cycle goes on.
            further = dataclasses.replace(
                entry, steps=max(0, steps - -begun % entry.bands)
            )
        return accountants.composed_epsilon(
            [e.event(rows) for e in (*self.entries, *beside, further)],
            delta=delta,
            accountant=accountant,
        )

    def steps_within(
        self,
        entry,
        *,
        epsilon: float,
        delta: float,
        accountant: str = "pld",
        beside=(),
        rows_per_person: int | None = None,
    ) -> int:
        """Number of further steps that keep a budget.

        Args:
            entry: `LedgerEntry`, what the steps would be.
            epsilon: float, > 0, the whole budget, of which a part may be spent.
            delta: float in (0, 1).
            accountant: str, `"rdp"` or `"pld"`. Defaults to `"pld"`.
            beside: iterable of `LedgerEntry`, as for `epsilon_after`.
            rows_per_person: int, as for `events`. Defaults to `None`.

        Returns:
            An int: epochs instead of steps where `entry` states
            `each_example_once_per_epoch`.
        """
        rows = self._checked_rows(rows_per_person)
        fitting = accountants.further_steps(
            entry.step_event(rows),
            epsilon=epsilon,
            delta=delta,
            accountant=accountant,
            spent=[e.event(rows) for e in (*self.entries, *beside)],
        )
        # The rest of a cycle that has begun is paid for.
        return entry.bands * fitting + -self._begun_steps(entry) % entry.bands

    def events(self, rows_per_person: int | None = None):
        """List of `dp_accounting.DpEvent`, one for each entry.

        Args:
            rows_per_person: int, the most rows of one person: the events are
                those of all of them together. Defaults to `None`, of what the
                entries protect.

        Raises:
            ValueError: If it is no positive int; or if some entries protect a
                person and others an example, and it is not given.
        """
        rows = self._checked_rows(rows_per_person)
        return [entry.event(rows) for entry in self.entries]

    def _checked_rows(self, rows_per_person):
        check_count("rows_per_person", rows_per_person, optional=True)
        if rows_per_person is None and self.unit is None:
            raise ValueError(
                "Expected steps that protect the same, got some that protect "
                "one example and some that protect one person. Pass "
                "rows_per_person, the most rows of one person: ε is then that "
                "of a person for all of them."
            )
        return rows_per_person or 1

    def to_json(self) -> str:
        """The ledger as text, without any block that is reserved.

        Returns:
            A str, which `from_json` reads.
        """
        return ledger_file.encode(self._segments)

    @classmethod
    def from_json(cls, text):
        """The ledger that `to_json` wrote, in memory.

        Args:
            text: str or bytes.

        Returns:
            A `PrivacyLedger`.

        Raises:
            ValueError: If `text` is not a ledger.
        """
        ledger = cls()
        ledger._segments = ledger_file.decode(text)
        return ledger

    def __reduce__(self):
        # A copy must not go on with a segment that the original extends, nor
        # write to its file.
        return (PrivacyLedger.from_json, (self.to_json(),))

    def __repr__(self):
        return (
            f"PrivacyLedger(steps={self.steps}, entries={len(self.entries)}, "
            f"path={self.path!r})"
        )

    def _begun_steps(self, entry):
        """Steps of the present entry, if it has bands and goes on."""
        segment = self._cycle_of(entry)
        return 0 if segment is None else segment.steps

    def _cycle_of(self, entry):
        """The segment with bands that an entry goes on with; None without."""
        for segment in (self._open, self._paused):
            if segment is not None and segment.described.bands > 1:
                described = dataclasses.replace(
                    segment.described, uncovered=entry.uncovered
                )
                if described == entry:
                    return segment
        return None

    def _opened(self, entry, steps, epochs):
        if operator.index(steps) < 0 or operator.index(epochs) < 0:
            raise ValueError(
                f"Expected steps >= 0 and epochs >= 0, got {steps} and "
                f"{epochs}. A ledger only grows."
            )
        if entry.steps or entry.epochs:
            raise ValueError(
                "Expected an entry without counts, got "
                f"steps={entry.steps}, epochs={entry.epochs}. Pass the counts "
                "as arguments, and `entry.description` as the entry."
            )
        if self._open is not None and self._open.described.bands > 1:
            self._paused = self._open
        cycle = self._cycle_of(entry)
        if cycle is not None:
            # It goes on, whatever was released or changed in between. What is
            # not covered from now on is stated of all its steps.
            if cycle is not self._open or cycle.described != entry:
                self._reserved_steps = self._reserved_epochs = 0
            self._open, cycle.described = cycle, entry
        segment = self._open
        if (
            segment is None
            or not (segment.described is entry or segment.described == entry)
            or (
                # Steps taken before any epoch must go on counting one by one.
                epochs > 0
                and entry.each_example_once_per_epoch
                and segment.steps > 0
                and segment.epochs == 0
            )
        ):
            segment = Segment(name=uuid.uuid4().hex, described=entry)
            self._open = segment
            self._segments.append(segment)
            self._reserved_steps = self._reserved_epochs = 0
        return segment

    def _segments_with(self, ahead):
        """Copies of the segments, with a block of (steps, epochs) on top."""
        segments = [dataclasses.replace(segment) for segment in self._segments]
        for segment, original in zip(segments, self._segments):
            if original is self._open:
                segment.steps += ahead[0]
                segment.epochs += ahead[1]
        return segments

    def _write(self, ahead=(0, 0)):
        """Replaces the file, and waits until that is durable."""
        # Should this fail, nothing is reserved.
        self._reserved_steps = self._reserved_epochs = 0
        self._file.write(self._segments_with(ahead))
        self._reserved_steps, self._reserved_epochs = ahead


def _place_of_same(entries, entry):
    """Index of the entry that can count another one too, None without one.

    Steps between which metrics were released are one entry, and so are the
    releases.
    """
    for place in reversed(range(len(entries))):
        if _extends(entries[place], entry):
            return place
        if entries[place].is_validation == entry.is_validation:
            return None
    return None


def _extends(entry, other):
    """True if one entry can count both: epochs and single steps do not add."""
    # Each run begins a cycle of its bands.
    return (
        entry.bands == 1
        and entry.description == other.description
        and (
            not entry.each_example_once_per_epoch
            or (entry.epochs > 0) == (other.epochs > 0)
        )
    )


def _require_alike(segment, other):
    """Refuses two accounts of the same steps of which one must be wrong."""
    changes = [
        f"{field.name} is {getattr(segment.described, field.name)!r} in one "
        f"and {getattr(other.described, field.name)!r} in the other"
        for field in dataclasses.fields(LedgerEntry)
        # A cycle of bands goes on where something is no longer covered.
        if (field.name != "uncovered" or segment.described.bands == 1)
        and getattr(segment.described, field.name)
        != getattr(other.described, field.name)
    ]
    # Steps that began before any epoch never count by epochs.
    if segment.described.each_example_once_per_epoch and any(
        a.steps > 0 and a.epochs == 0 < b.epochs
        for a, b in ((segment, other), (other, segment))
    ):
        changes.append("one counts steps and the other epochs")
    if changes:
        raise ValueError(
            "Expected two ledgers to describe the same steps alike, got "
            f"others: {'; '.join(changes)}. One of them was changed: restore "
            "it."
        )
