"""The record of every private step that a model has taken.

A `PrivacyLedger` only grows. It belongs to a model, not to an optimizer or to
weights, so that neither compiling again nor loading a checkpoint loses a step;
with a path it is also written ahead of the steps, so that a crash does not.
"""

import dataclasses
import hashlib
import json
import math
import operator
import os
import uuid

import dp_accounting

from tf_dpsub import files
from tf_dpsub.accounting import accountants

SAMPLERS = ("poisson", "batches")

_FORMAT = "tf_dpsub privacy ledger"
_VERSION = 1


def _plain_flag(value):
    if value not in (True, False):
        raise ValueError(f"Expected True or False, got {value!r}.")
    return bool(value)


_PLAIN = {
    "mechanism": str,
    "noise_multiplier": float,
    "l2_norm_clip": float,
    "batch_size": operator.index,
    "examples": operator.index,
    "sampler": str,
    "each_example_once_per_epoch": _plain_flag,
    "fixed_seed": _plain_flag,
    "private_selection": _plain_flag,
    "private_state": _plain_flag,
    "steps": operator.index,
    "epochs": operator.index,
    "notes": tuple,
    "uncovered": tuple,
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

    def __post_init__(self):
        if not self.mechanism or not isinstance(self.mechanism, str):
            raise ValueError(
                f"Expected mechanism to be a name, got {self.mechanism!r}."
            )
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(
                "Expected 0 <= noise_multiplier < inf, got "
                f"{self.noise_multiplier}."
            )
        if not self.l2_norm_clip > 0:
            raise ValueError(
                f"Expected l2_norm_clip > 0, got {self.l2_norm_clip}."
            )
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
        if self.sampler not in SAMPLERS:
            raise ValueError(
                f"Expected sampler to be one of {SAMPLERS}, got "
                f"{self.sampler!r}."
            )
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
        # Plain Python values, so that equal entries are equal after a round
        # trip through JSON.
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, _PLAIN[field.name](value))

    @property
    def sampling_rate(self):
        """Expected share of the examples in a batch; `None` if unknown."""
        if self.examples is None:
            return None
        return self.batch_size / self.examples

    @property
    def description(self):
        """The entry without its counts."""
        return dataclasses.replace(self, steps=0, epochs=0)

    def step_event(self):
        """The dp-accounting event of one step (or one epoch, where it counts).

        Returns:
            A `dp_accounting.DpEvent`.
        """
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
        """As `event`, with every step a Gaussian that may use every example.

        Returns:
            A `dp_accounting.DpEvent`.
        """
        return _repeat(
            accountants.sampled_gaussian(self._accounted_multiplier(), 1),
            max(self.steps, self._participations()),
        )

    def _accounted_multiplier(self):
        return 0.0 if self.private_state else self.noise_multiplier

    def _participations(self):
        """How many steps may have used the same example."""
        if self.each_example_once_per_epoch and self.epochs > 0:
            return self.epochs
        return self.steps


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
        self._path = None if path is None else os.fspath(path)
        self._block = block
        self._segments = []
        self._open: _Segment | None = None
        self._reserved_steps = 0
        self._reserved_epochs = 0
        self._on_disk = None
        if self._path is not None:
            self._on_disk = self._read()
            if self._on_disk is not None:
                try:
                    self._segments = _decode(self._on_disk)
                except ValueError as error:
                    raise ValueError(
                        f"{self._path}: {error} The file was left as it is. "
                        "Restore it, or, if the steps of its run need not be "
                        "counted, use another folder."
                    ) from error

    @property
    def path(self):
        """The file that is written ahead, or `None`."""
        return self._path

    @property
    def entries(self):
        """Tuple of `LedgerEntry`, in the order in which they were begun."""
        entries = []
        for segment in self._segments:
            entry = segment.entry()
            if entries and _extends(entries[-1], entry):
                entry = dataclasses.replace(
                    entry,
                    steps=entries[-1].steps + entry.steps,
                    epochs=entries[-1].epochs + entry.epochs,
                )
                entries.pop()
            if entry.steps or entry.epochs:
                entries.append(entry)
        return tuple(entries)

    @property
    def steps(self):
        """Total number of steps."""
        return sum(segment.steps for segment in self._segments)

    def create(self):
        """Writes the file, without any step, unless there is one."""
        if self._path is not None and self._on_disk is None:
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
        if self._path is None:
            return
        self._reserved_steps -= steps
        self._reserved_epochs -= epochs
        if self._reserved_steps < 0 or self._reserved_epochs < 0:
            block = (
                self._block if planned is None else min(self._block, planned)
            )
            self._write(ahead=(max(block - steps, 0), 0))

    def reserve(self, entry, steps: int, epochs: int = 0):
        """Durably records a block of steps before it runs.

        What an earlier block has left is given back. In memory nothing happens.

        Args:
            entry: `LedgerEntry` without counts, what the steps will be.
            steps: int, number of steps in the block.
            epochs: int, number of epochs that begin in it. Defaults to 0.
        """
        if self._path is None:
            return
        self._opened(entry, steps, epochs)
        self._write(ahead=(steps, epochs))

    def settle(self):
        """Writes the true counts: what is left of a block is given back."""
        if self._path is not None and self._segments:
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
            grows |= (
                theirs.steps > segment.steps or theirs.epochs > segment.epochs
            )
            segment.steps = max(segment.steps, theirs.steps)
            segment.epochs = max(segment.epochs, theirs.epochs)
        if grows and self._path is not None:
            self._write(ahead=(self._reserved_steps, self._reserved_epochs))

    def epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """Epsilon spent so far.

        Args:
            delta: float in (0, 1).
            accountant: str, `"rdp"` or `"pld"`. Defaults to `"rdp"`.

        Returns:
            A float, 0.0 before the first step, infinite if a step had no noise.
        """
        return accountants.composed_epsilon(
            self.events(), delta=delta, accountant=accountant
        )

    def epsilon_without_amplification(
        self, delta: float, accountant: str = "rdp"
    ) -> float:
        """Epsilon if every step may have used every example.

        It assumes nothing of the batches but that each example is at most once
        in each.

        Args:
            delta: float in (0, 1).
            accountant: str, `"rdp"` or `"pld"`. Defaults to `"rdp"`.

        Returns:
            A float.
        """
        return accountants.composed_epsilon(
            [entry.event_without_amplification() for entry in self.entries],
            delta=delta,
            accountant=accountant,
        )

    def delta(self, epsilon: float, accountant: str = "rdp") -> float:
        """Delta spent so far.

        Args:
            epsilon: float, > 0.
            accountant: str, `"rdp"` or `"pld"`. Defaults to `"rdp"`.

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
        accountant: str = "rdp",
    ) -> float:
        """Epsilon that would be spent after further steps.

        Args:
            entry: `LedgerEntry`, what the steps would be.
            steps: int, number of further steps.
            delta: float in (0, 1).
            epochs: int, number of further epochs. Defaults to 0.
            accountant: str, `"rdp"` or `"pld"`. Defaults to `"rdp"`.

        Returns:
            A float.
        """
        further = dataclasses.replace(entry, steps=steps, epochs=epochs)
        return accountants.composed_epsilon(
            [*self.events(), further.event()],
            delta=delta,
            accountant=accountant,
        )

    def steps_within(
        self, entry, *, epsilon: float, delta: float, accountant: str = "rdp"
    ) -> int:
        """How many further steps keep a budget.

        Args:
            entry: `LedgerEntry`, what the steps would be.
            epsilon: float, > 0, the whole budget, of which a part may be spent.
            delta: float in (0, 1).
            accountant: str, `"rdp"` or `"pld"`. Defaults to `"rdp"`.

        Returns:
            An int: epochs instead of steps where `entry` states
            `each_example_once_per_epoch`.
        """
        return accountants.further_steps(
            entry.step_event(),
            epsilon=epsilon,
            delta=delta,
            accountant=accountant,
            spent=self.events(),
        )

    def events(self):
        """List of `dp_accounting.DpEvent`, one for each entry."""
        return [entry.event() for entry in self.entries]

    def to_json(self) -> str:
        """The ledger as text, without any block that is reserved.

        Returns:
            A str, which `from_json` reads.
        """
        return _encode(self._segments)

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
        ledger._segments = _decode(text)
        return ledger

    def __reduce__(self):
        # A copy must not go on with a segment that the original extends, nor
        # write to its file.
        return (PrivacyLedger.from_json, (self.to_json(),))

    def __repr__(self):
        return (
            f"PrivacyLedger(steps={self.steps}, entries={len(self.entries)}, "
            f"path={self._path!r})"
        )

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
            segment = _Segment(name=uuid.uuid4().hex, described=entry)
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

    def _read(self):
        try:
            with open(self._path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def _write(self, ahead=(0, 0)):
        """Replaces the file, and waits until that is durable."""
        # Should this fail, nothing is reserved.
        self._reserved_steps = self._reserved_epochs = 0
        if self._read() != self._on_disk:
            raise RuntimeError(
                f"Expected {self._path} as this ledger left it, but something "
                "else has changed it. Two runs must not share a ledger: its "
                "steps would be lost. Give each run a folder of its own."
            )
        data = _encode(self._segments_with(ahead)).encode()
        files.make_folder(os.path.dirname(os.path.abspath(self._path)))
        files.write_bytes(self._path, data)
        self._on_disk = data
        self._reserved_steps, self._reserved_epochs = ahead


@dataclasses.dataclass
class _Segment:
    """Steps that one ledger counted without interruption."""

    name: str
    described: LedgerEntry
    steps: int = 0
    epochs: int = 0

    def entry(self):
        return dataclasses.replace(
            self.described, steps=self.steps, epochs=self.epochs
        )


def _repeat(event, count):
    if count == 0:
        return dp_accounting.NoOpDpEvent()
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        return event
    return dp_accounting.SelfComposedDpEvent(event, count)


def _extends(entry, other):
    """Whether one event describes both: epochs and single steps do not add."""
    return entry.description == other.description and (
        not entry.each_example_once_per_epoch
        or (entry.epochs > 0) == (other.epochs > 0)
    )


def _require_alike(segment, other):
    """Refuses two accounts of the same steps of which one must be wrong."""
    changes = [
        f"{field.name} is {getattr(segment.described, field.name)!r} in one "
        f"and {getattr(other.described, field.name)!r} in the other"
        for field in dataclasses.fields(LedgerEntry)
        if getattr(segment.described, field.name)
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


def _encode(segments):
    entries = []
    for segment in segments:
        if not segment.steps and not segment.epochs:
            continue
        fields = dataclasses.asdict(segment.entry())
        if math.isinf(segment.described.l2_norm_clip):
            fields["l2_norm_clip"] = "inf"
        entries.append({"name": segment.name, **fields})
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "entries": entries,
        "sha256": _digest(entries),
    }
    return json.dumps(content, indent=2, allow_nan=False)


def _digest(entries):
    text = json.dumps(
        entries, sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _decode(text):
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            raise ValueError(
                f"it says {content['format']!r}, version {content['version']}"
            )
        more = content.keys() - {"format", "version", "entries", "sha256"}
        if more:
            raise ValueError(f"it has {sorted(more)}")
        # Ledgers of earlier versions have none.
        if "sha256" in content and content["sha256"] != _digest(
            content["entries"]
        ):
            raise ValueError("its entries are not those of its SHA-256")
        segments = [_decode_segment(fields) for fields in content["entries"]]
        if len({segment.name for segment in segments}) < len(segments):
            raise ValueError("two entries have the same name")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"Expected a {_FORMAT} of version {_VERSION}, got something else, "
            f"or a damaged one ({type(error).__name__}: {error})."
        ) from error
    return segments


def _decode_segment(fields):
    fields = dict(fields)
    name = fields.pop("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"an entry's name is {name!r}")
    # Earlier ledgers have no steps of these kinds.
    fields = {"private_state": False, "uncovered": (), **fields}
    missing = sorted(_PLAIN.keys() - fields.keys())
    if missing:
        raise ValueError(f"an entry lacks {missing}")
    if fields["l2_norm_clip"] == "inf":
        fields["l2_norm_clip"] = math.inf
    for field in ("notes", "uncovered"):
        fields[field] = tuple(fields[field])
    entry = LedgerEntry(**fields)
    return _Segment(
        name=name,
        described=entry.description,
        steps=entry.steps,
        epochs=entry.epochs,
    )
