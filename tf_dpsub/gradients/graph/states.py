"""States of tensors: what they may depend on; and errors of the proof."""

import dataclasses


class Unproven(Exception):
    """It could not be proved that a row depends on its own example alone."""


class MixesExamples(Unproven):
    """It was proved that an operation mixes the examples of a batch."""


class UpdatesState(ValueError):
    """A state that outlives the step is computed from the batch."""

    # AutoGraph keeps the type of exceptions with this constructor alone.
    __init__ = Exception.__init__


class ReadsState(ValueError):
    """A state is read that may have been computed from private data."""

    __init__ = Exception.__init__


class _Public:
    def __repr__(self):
        return "PUBLIC"


PUBLIC = _Public()


@dataclasses.dataclass(frozen=True)
class PerExample:
    """Each slice along an axis depends on one example only.

    The axis may hold other axes merged with that of the batch: its size is
    `outer * batch_size * inner`, and the slice `(o * batch_size + b) * inner
    + i` depends on example `b`.

    Attributes:
        axis: int, the axis.
        outer: int, size of the axes that were merged in front of the batch.
        inner: int, size of those that were merged behind it.
    """

    axis: int
    outer: int
    inner: int

    def moved_to(self, axis):
        """Returns the state with the same merging on another axis."""
        return PerExample(axis, self.outer, self.inner)


@dataclasses.dataclass(frozen=True)
class Key:
    """Computed from secret keys of the step, and from public values.

    Attributes:
        seeds: frozenset of pairs: which seed, and which of its keys, as how
            often it had been set when it was read, what was added since, and
            how its numbers were converted; None for the handle of its variable.
        is_whole: bool, whether it is as secret as they are, and no other key:
            not so for what was added to a part of one, or taken of it.
    """

    seeds: frozenset
    is_whole: bool = True

    @property
    def is_handle(self):
        """True for the handle of a variable that holds a key."""
        return any(which is None for _, which in self.seeds)


@dataclasses.dataclass(frozen=True)
class Draw:
    """One operation that draws random numbers.

    Attributes:
        seeds: frozenset, those of its key; empty where no variable determines
            the numbers, so that each call draws others.
        kind: tuple that determines the numbers together with the seeds: type
            and shape.
    """

    seeds: frozenset
    kind: tuple


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Random numbers, entry by entry independent and of one law.

    Which of its axes holds the batch shows where they meet it.

    Attributes:
        draws: frozenset of `Draw`.
        layout: tuple, the transpositions since.
    """

    draws: frozenset
    layout: tuple = ()


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Nothing has been proved.

    Attributes:
        reason: str, names the operation, and says what is not proved.
        mixes: bool, whether that operation is known to mix examples.
    """

    reason: str
    mixes: bool
