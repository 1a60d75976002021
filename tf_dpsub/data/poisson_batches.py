"""Batches in which every example is drawn independently."""

import collections
import copy
import itertools
import math
import secrets
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from scipy import stats

from tf_dpsub.checks import (
    check_count,
    check_nonnegative,
    check_seed,
    is_int,
)
from tf_dpsub.data import (
    arrow_rows,
    row_gathers,
    row_maps,
    row_rates,
    row_sources,
)

# Probability that a draw needs more rows than the capacity. Such a draw is
# padded to a multiple of it: this number steers speed and memory only.
_TAIL = 1e-12
# For the statement, where hosts hold examples of their own.
_ONE_HOST = "that every example is at one host alone"
# Of the rule that splits examples into groups: a public constant.
_SEED_OF_GROUPS = 0


class PoissonBatches:
    """Draws every example independently, with a known probability.

    At every step each of the `n` examples is in the batch with probability
    `q = batch_size / n`, independently of the others and of earlier steps.
    Batches therefore differ in size, and in one "epoch" of
    `ceil(n / batch_size)` steps about 63 % (`1 - 1/e`) of the examples are
    drawn at least once; the others, none at all.

    `dataset()` pads the batches to a static number of rows, so that a
    training step can be compiled once. A batch is never truncated: a draw
    that exceeds the capacity is padded to a multiple of it.

    Formal guarantees: this is Poisson sampling with rate `q`, the sampler of
    `PoissonSampledDpEvent(q, ...)`, without any cap on the size of a batch.
    The number of examples, `q`, the batch size and the number of steps are
    public. Which examples were drawn, and how many, is private: the keys of
    the sampler come from the operating system, anew for each iterator, and
    are never stored. With a fixed `seed` the draws can be predicted, so that
    no amplification by sampling may be claimed against who knows it. Padding
    rows are zeros and carry no example.

    With `sampling_rates` example `i` is drawn with a rate `qᵢ` of its own: for
    it the sampler is `PoissonSampledDpEvent(qᵢ, ...)`, and for the data set
    that of the largest rate, which is public. `qᵢ` has to follow from example
    `i` alone, as from its label, and from public numbers: a rate that follows
    from how many private examples have a label depends on all of them, and
    nothing accounts for that.

    Args:
        x: inputs. Either a (nested) structure of arrays whose first axis
            counts the examples: NumPy arrays, `tf.Tensor`s, other array-likes
            (read into memory), NumPy memory maps (never read into memory as a
            whole); or a random-access source: an object with `__len__` and
            `__getitem__(indices)`, which takes ascending, distinct indices
            (`np.ndarray` of int64) and returns the batch of these examples
            as `x`, `(x, y)` or `(x, y, sample_weight)`. Where it takes no
            array, it is asked for a list of rows by `__getitems__`, or for one
            at a time, by an int: as the sources of TensorFlow Datasets, of
            ArrayRecord files and of PyTorch take them. A `tf.data.Dataset` of
            rows is one too, if TensorFlow can read it by index; a
            `keras.utils.PyDataset`, of which each batch is read that holds a
            drawn row, and no method called at the end of epochs; a
            `pyarrow.Table`, as of a memory map; and a `datasets.Dataset` of
            Hugging Face. The last two give dicts of their columns.
        y: targets, a structure of arrays, or `None`. Must be `None` if `x` is
            a source. Defaults to `None`.
        sample_weight: weights, a structure of arrays, or `None`. Must be
            `None` if `x` is a source. Defaults to `None`.
        batch_size: int, the expected number of examples in a batch, at most
            the number of examples.
        map: function of the tensors of one row, as the source gives it: `x`,
            `(x, y)` or `(x, y, sample_weight)`, without a batch axis. It
            decodes or augments the row each time that it is drawn, and
            returns what the model is to see of it. Random layers of Keras are
            seeded anew for each row; an argument named `seed`, int64 of shape
            `[2]`, is for TensorFlow's stateless functions. Defaults to
            `None`.
        sampling_rates: array of floats in (0, 1], `[examples]`, the probability
            of each, or `None` for `batch_size / n`. Their sum should be about
            `batch_size`, by which sums of gradients are divided still. Defaults
            to `None`.
        total_examples: int, the number of examples at all hosts together, if
            `x` are those of this host alone, or `None`. `batch_size` and `n`
            then are those of all hosts, and every host draws from its own
            examples with its own key. Defaults to `None`, all are here.
        read_ahead: int, how many batches are read at the same time, while
            steps are made. With more than one, a source is asked by several
            threads. Defaults to `1`.
        seed: int or `None`. Fixes the draws, for experiments: two objects
            with the same seed draw the same batches. Each further iteration
            over the same object draws new ones. Defaults to `None`, fresh
            entropy of the operating system.

    Attributes:
        examples: int, the number of examples `n`, at all hosts.
        own_examples: int, the number of those at this host.
        batch_size: int, the expected number of examples in a batch.
        sampling_rate: float, `q = batch_size / n`.
        largest_rate: float, the largest of `sampling_rates`, or `None`.
        unit: string, what is drawn: `"example"`.
        steps_per_epoch: int, `ceil(n / batch_size)`.
        groups: int, from how many groups steps draw, as `in_groups` says.
        seed: int or `None`, as given.
        inputs: structure of arrays, the inputs of all examples; `None` for a
            source, or where `map` makes others of them.
        comparable_inputs: the inputs as `overlap.count_common` takes them, also
            of a source; `None` where `map` makes others of them.
        map_may_draw: bool, whether `map` may make a row differently each time.
        assumptions: tuple of strings, on which the privacy statement rests.

    Raises:
        ValueError: if there are no examples, if `x`, `y` and `sample_weight`
            are not arrays of one length, if `batch_size` is not between 1 and
            the number of examples, if `y` or `sample_weight` is given with a
            source, if `map` keeps a state, draws without a seed or returns
            tensors of unknown shape, if `sampling_rates` are not one
            probability for each example, if they are given with
            `total_examples`, if there are more examples here than in total, if
            `read_ahead` is no positive int, or if `seed` is not a non-negative
            int.

    Example:

    ```python
    batches = tf_dpsub.data.PoissonBatches(x, y, batch_size=250)
    for batch in batches.dataset(multiple_of=64).take(3):
        print(batch["x"].shape, int(tf.reduce_sum(batch["real"])))
    ```

    Images that are flipped anew each time they are drawn:

    ```python
    def augment(image, label, seed):
        return tf.image.stateless_random_flip_left_right(image, seed), label

    batches = tf_dpsub.data.PoissonBatches(x, y, batch_size=250, map=augment)
    ```

    A rare class that is drawn ten times as often, if it is publicly known that
    about 2 % of the examples have it:

    ```python
    often = 250 / len(y) / (0.98 + 10 * 0.02)
    rates = often * np.array([1.0, 10.0])[y]
    batches = tf_dpsub.data.PoissonBatches(
        x, y, batch_size=250, sampling_rates=rates
    )
    ```
    """

    # As an argument of `fit`.
    sampling = "poisson"

    def __init__(
        self,
        x,
        y=None,
        sample_weight=None,
        *,
        batch_size: int,
        map: Callable | None = None,
        sampling_rates=None,
        total_examples: int | None = None,
        read_ahead: int = 1,
        seed: int | None = None,
    ):
        self._targets = None
        if _is_source(x):
            if y is not None or sample_weight is not None:
                raise ValueError(
                    "Expected y=None and sample_weight=None with a "
                    f"random-access source, got x={type(x).__name__} and "
                    "targets or weights beside it. Let the source return "
                    "(x, y) or (x, y, sample_weight)."
                )
            x = row_sources.as_source(x)
            self._own_examples = len(x)
            self.inputs = None
            reader = row_gathers.SourceReader(x, _named_parts)
            self.comparable_inputs = reader.inputs_in_chunks
        else:
            parts = _named_parts(x, y, sample_weight)
            self._targets = {"y": parts.get("y"), "w": parts.get("w")}
            arrays = {k: _checked_arrays(k, v) for k, v in parts.items()}
            self._own_examples = _common_length(arrays)
            self.inputs = self.comparable_inputs = arrays["x"]
            reader = row_gathers.MemoryMapReader.of(arrays)
        self._total_examples = total_examples
        check_count("read_ahead", read_ahead)
        self._read_ahead = int(read_ahead)
        self._set_size(
            _checked_total(total_examples, self.own_examples, sampling_rates),
            batch_size,
        )
        self._largest_rate: float | None = None
        self._rates = None
        if sampling_rates is not None:
            self._rates = row_rates.checked(
                sampling_rates, self.examples, self.batch_size
            )
            self._largest_rate = float(self._rates.max())
        self._groups = 1
        self._members: list[np.ndarray] = []
        check_seed(seed)
        self._seed = seed
        self._iterators: dict = collections.defaultdict(itertools.count)
        self._reader = reader
        self._gather = (
            row_gathers.ArrayRows(arrays)
            if reader is None
            else row_gathers.ReaderRows(reader)
        )
        self.assumptions = getattr(x, "assumptions", ())
        if self._rates is not None:
            self.assumptions = (*self.assumptions, row_rates.ASSUMPTION)
        if self.is_part:
            self.assumptions = (*self.assumptions, _ONE_HOST)
        self._map, self.map_may_draw = None, False
        self._views_given: int | None = None
        if map is not None:
            self._map_with(row_maps.RowMap(map, self._gather))

    # The ledger rests on them: they stay as the batches were made.
    unit = property(lambda self: "example")
    examples = property(lambda self: self._examples)
    own_examples = property(lambda self: self._own_examples)
    batch_size = property(lambda self: self._batch_size)
    sampling_rate = property(lambda self: self._sampling_rate)
    largest_rate = property(lambda self: self._largest_rate)
    steps_per_epoch = property(lambda self: self._steps_per_epoch)
    groups = property(lambda self: self._groups)
    seed = property(lambda self: self._seed)

    @property
    def ledger_fields(self):
        """Fields of a ledger's entry that say how its batches were drawn."""
        return {
            "sampler": "poisson",
            "examples": self.examples,
            "each_example_once_per_epoch": False,
            "unit": self.unit,
            "largest_rate": self.largest_rate,
        }

    @property
    def is_part(self) -> bool:
        """Whether other hosts hold examples of their own."""
        return self._total_examples is not None

    def require_unchanged(self):
        """Refuses data that are not as they were when the batches were made.

        Raises:
            ValueError: if a source has another number of rows, or if a file of
                rows was changed.
        """
        if self._reader is not None:
            self._reader.require_unchanged()

    @property
    def holds_arrays(self) -> bool:
        """Whether the rows are those of arrays, and not of a source."""
        return self._targets is not None

    @property
    def expected_size(self) -> float:
        """Expected number of examples in a batch."""
        if self._rates is None:
            return self.batch_size
        return float(self._rates.sum())

    @property
    def has_map(self) -> bool:
        """Whether a function makes other rows of those that were given."""
        return self._map is not None

    @property
    def read_by_map(self) -> list:
        """Handles of the variables that `map` reads."""
        return [] if self._map is None else self._map.reads

    @property
    def row_spec(self) -> dict:
        """Structures of `tf.TensorSpec` of the parts of a row."""
        if self._map is not None:
            return self._map.spec
        return self._gather.row_spec

    def with_inputs(self, x):
        """Returns batches of the same draws, of other inputs.

        Args:
            x: structure of arrays, for each example of `inputs` its own.

        Returns:
            A `PoissonBatches`. Both draw from one sequence: no draw is made
            twice.

        Raises:
            ValueError: if `inputs` are not arrays, or of another length.
        """
        if self.inputs is None:
            raise ValueError(
                "Expected batches of arrays, got those of a source or of a map."
            )
        return self._like(x, self._targets["y"], self._targets["w"])

    def with_map_of_inputs(self, function, may_read):
        """Returns batches of the same draws, with one more function in `map`.

        Args:
            function: function of the inputs of one row, as `map` leaves them.
            may_read: `gradients.Sources`, all that it may read.

        Returns:
            A `PoissonBatches`, as `with_inputs` says.

        Raises:
            ValueError, gradients.Unproven: as of `RowMap.chained`.
        """
        batches = copy.copy(self)
        batches._map_with(
            row_maps.RowMap.chained(self._map, function, self._gather, may_read)
        )
        return batches

    def in_groups(self, groups: int):
        """Returns batches of which each comes from one group of the examples.

        A public rule, the same each time, splits the examples into groups of
        equal sizes, to within one. Step t of an iterator draws each example of
        group t modulo `groups` independently with probability
        `groups * batch_size / n`, and no other: the expected batch size stays.

        Formal guarantees: of so many steps in succession, an example may be in
        one. This is `ceil(steps / groups)` times Poisson sampling with that
        rate. Sizes of the groups are public, as `n` is.

        Args:
            groups: int, at most `n / batch_size`.

        Returns:
            A `PoissonBatches`, as `with_inputs` says.

        Raises:
            ValueError: if there are too many groups for a batch, or if more
                than one are to be drawn from otherwise than with one rate.
        """
        check_count("groups", groups)
        if groups > 1 and self.is_part:
            raise ValueError(
                f"Expected one group, got {groups} (`bands` of the optimizer), "
                "with total_examples: groups are made of all examples. Take "
                "bands=1, or give all examples to every host."
            )
        if groups > 1 and (
            self.largest_rate is not None or self.sampling != "poisson"
        ):
            raise ValueError(
                f"Expected one group, got {groups} (`bands` of the optimizer): "
                "from groups examples are drawn by Poisson sampling with one "
                "rate. Leave out sampling_rates, and sampling="
                f'"{self.sampling}", or take bands=1.'
            )
        if groups * self.batch_size > self.examples:
            raise ValueError(
                f"Expected at most {self.examples // self.batch_size} groups, "
                f"of {self.examples} examples in batches of {self.batch_size}, "
                f"got {groups}: a batch comes from one of them. Take fewer "
                "(`bands` of the optimizer), or smaller batches."
            )
        batches = copy.copy(self)
        batches._groups, batches._members = int(groups), []
        if groups > 1:
            order = np.random.default_rng(_SEED_OF_GROUPS).permutation(
                self.examples
            )
            batches._members = [
                np.sort(order[g::groups]) for g in range(groups)
            ]
        return batches

    def views_drawn_once(self, views: int, rows: int):
        """Yields so many views of each example, as `map` makes them.

        Formal guarantees: as of `data.row_maps.RowMap`. The key of all draws
        is secret, and new for each call.

        Args:
            views: int.
            rows: int, the number of examples at a time.

        Yields:
            dict of structures of NumPy arrays `[rows, views, ...]`, of `"x"`;
            and of `"y"` and `"w"` where there are any; of all examples in their
            order.
        """
        number = next(self._iterators["views drawn once"])
        key = _fresh_key(self.seed, (number,), 2)

        def made(indices, key):
            parts = self._map(self._gather(indices), indices, key, views)
            return with_views(parts, tf.size(indices), views)

        indices = tf.data.Dataset.range(self.own_examples).batch(rows)
        # A part of the data, not a constant of the function.
        keys = tf.data.Dataset.from_tensors(key).repeat()
        yield from (
            tf.data.Dataset.zip(indices, keys).map(made).as_numpy_iterator()
        )

    def with_views(self, x, y, sample_weight, views: int):
        """Returns batches of the same draws, of views that are made already.

        Args:
            x, y, sample_weight: structures of arrays `[examples, views, ...]`;
                `y` and `sample_weight` may be `None`.
            views: int, which `dataset` is to be given, too.

        Returns:
            A `PoissonBatches`, as `with_inputs` says.

        Raises:
            ValueError: if they are of another length.
        """
        batches = self._like(x, y, sample_weight)
        batches._views_given, batches.map_may_draw = views, True
        batches.inputs = batches.comparable_inputs = None
        return batches

    def _set_size(self, examples, batch_size):
        self._examples = examples
        self._batch_size = _checked_batch_size(batch_size, examples, self.unit)
        self._sampling_rate = self.batch_size / examples
        self._steps_per_epoch = math.ceil(examples / self.batch_size)

    def _like(self, x, y, sample_weight):
        batches = type(self)(
            x,
            y,
            sample_weight,
            batch_size=self.batch_size,
            sampling_rates=self._rates,
            total_examples=self._total_examples,
            read_ahead=self._read_ahead,
            seed=self.seed,
        )
        if batches.own_examples != self.own_examples:
            raise ValueError(
                f"Expected {self.own_examples} inputs, got "
                f"{batches.own_examples}."
            )
        batches._iterators = self._iterators
        return batches.in_groups(self.groups)

    def _map_with(self, row_map):
        self._map, self.map_may_draw = row_map, row_map.may_draw
        self.assumptions = tuple(
            dict.fromkeys((*self.assumptions, *row_map.assumptions))
        )
        self.inputs = self.comparable_inputs = None

    def capacity(self, multiple_of: int = 1, replicas: int = 1) -> int:
        """Rows to which the batches of one replica are padded.

        The smallest multiple of `multiple_of` which a draw exceeds with
        probability at most 1e-12, of however many examples: a step that is
        traced for this number of rows serves other data, too. It is no more
        than a shard has examples. Where rates differ, shards are taken to have
        like ones: a larger draw of one is padded to a multiple.

        Args:
            multiple_of: int, the size of a microbatch. Defaults to `1`.
            replicas: int, number of shards the examples are dealt to.
                Defaults to `1`.

        Returns:
            int, at least `multiple_of`.

        Raises:
            ValueError: if an argument is not a positive int.
        """
        check_count("multiple_of", multiple_of)
        check_count("replicas", replicas)
        # A sum of independent draws varies at most as the Poisson distribution
        # of its mean does, into which it turns if there are many.
        share = self.own_examples / self.examples / replicas
        rows = int(stats.poisson.isf(_TAIL, self.expected_size * share))
        rows = max(1, min(rows, self._largest_shard(replicas)))
        return math.ceil(rows / multiple_of) * multiple_of

    def dataset(
        self,
        *,
        multiple_of: int = 1,
        shard=(0, 1),
        views: int = 1,
        host: int = 0,
    ):
        """Builds the infinite `tf.data.Dataset` of batches.

        Every element is a dict: `"x"`; `"y"` and `"w"` (float32) if there are
        targets and sample weights; and `"real"` (float32, `[rows]`), 1 on
        drawn rows and 0 on padding. Drawn rows come first, padding rows are
        all zeros (or empty strings). Floating-point data comes as
        `keras.config.floatx()`, as in Keras's `fit`, and lists become tuples.
        Every iterator draws afresh.

        Args:
            multiple_of: int, the number of rows is a multiple of it: the size
                of a microbatch. Defaults to `1`.
            shard: pair of ints `(r, replicas)`: draw only from the examples
                `i` with `i % replicas == r`. Each replica draws its shard
                independently with the same rate, so that together they draw
                one Poisson batch. Defaults to `(0, 1)`, all examples.
            views: int, how many views of each row `map` makes, with draws of
                their own. With more than one, all parts but `"real"` are
                `[rows, views, ...]`; without a `map`, whose views would be
                equal, `[rows, 1, ...]`. Defaults to `1`.
            host: int, the number of this host, where each has examples of its
                own and `shard` is one of these: with a `seed`, hosts draw
                differently. Defaults to `0`.

        Returns:
            A `tf.data.Dataset`. The number of rows is `None` in its element
            spec; all other dimensions are static.

        Raises:
            ValueError: if `multiple_of` or `views` is not a positive int, if
                `host` is no int from 0 on, or unless `0 <= r < replicas`.
        """
        index, replicas = shard
        check_count("views", views)
        check_nonnegative("host", host)
        capacity = self.capacity(multiple_of, replicas)
        if not (is_int(index) and 0 <= index < replicas):
            raise ValueError(
                f"Expected shard = (r, replicas) with 0 <= r < replicas, got "
                f"{tuple(shard)}."
            )
        if self._views_given not in (None, views):
            raise ValueError(
                f"Expected views={self._views_given}, as many as were made, "
                f"got {views}."
            )

        def batch(gather, indices, key, step):
            drawn = tf.size(indices)
            passes = tf.maximum(1, -(-drawn // capacity))
            padding = passes * capacity - drawn
            parts = self._drawn_parts(gather, indices, (key[2:], step), views)
            parts = parts | {"real": tf.ones([drawn])}
            return {
                name: keras.tree.map_structure(
                    lambda rows: _pad(_cast(name, rows), padding), part
                )
                for name, part in parts.items()
            }

        def from_reader(*draw):
            return batch(self._gather, *draw)

        def from_arrays(tensors, draw):
            return batch(row_gathers.ArrayRows.of(tensors), *draw)

        draws = self._draws(index, replicas, self._keys(index, replicas, host))
        mapped: Callable = from_reader
        if isinstance(self._gather, row_gathers.ArrayRows):
            tensors = tf.data.Dataset.from_tensors(self._gather.tensors)
            draws = tf.data.Dataset.zip(tensors.repeat(), draws)
            mapped = from_arrays
        if not self.has_map:
            # Control flow of a user's `map` is converted.
            mapped = tf.autograph.experimental.do_not_convert(mapped)
        infinite = tf.data.experimental.assert_cardinality(
            tf.data.INFINITE_CARDINALITY
        )
        # Those of several threads come in the order of their steps, too.
        threads = self._read_ahead if self._read_ahead > 1 else None
        batches = draws.map(mapped, num_parallel_calls=threads)
        # Nothing is left to tune, and an iterator whose thread for that sleeps
        # takes seconds to end.
        options = tf.data.Options()
        options.autotune.enabled = False
        return batches.apply(infinite).prefetch(2).with_options(options)

    def _drawn_parts(self, gather, indices, key, views):
        """The parts of the drawn examples.

        Args:
            gather: function of numbers of rows that gives these.
            indices: int64 tensor `[drawn]`, numbers of examples.
            key: pair of tensors, from which all random numbers follow.
            views: int, as for `dataset`.

        Returns:
            dict of structures of tensors `[drawn, ...]`.
        """
        parts = gather(indices)
        if self._map is not None:
            parts = self._map(parts, indices, step_key(*key), views)
        if views > 1 and self._views_given is None:
            made = 1 if self._map is None else views
            parts = with_views(parts, tf.size(indices), made)
        return parts

    @property
    def _draws_of_rows(self) -> bool:
        """Whether rows need random numbers beside those that draw them."""
        return self._map is not None

    def _draws(self, index, replicas, keys):
        """Draws of the examples of a shard.

        Args:
            index, replicas: ints, the shard, as for `dataset`.
            keys: infinite `tf.data.Dataset` of a key, the same each time: an
                int64 tensor, the first two numbers of which are for the draws.

        Returns:
            A `tf.data.Dataset`, infinite, of numbers of examples, an int64
            tensor `[drawn]`, of the key, and of the step that they are for, an
            int64 scalar.
        """
        rate = self.largest_rate or self.sampling_rate
        shard = self._largest_shard(replicas)
        chunk = int(stats.binom.isf(_TAIL, shard, rate * self.groups)) + 1
        if self.groups > 1:
            return self._draws_of_groups(index, replicas, keys, chunk)
        shard_examples = len(range(index, self.own_examples, replicas))
        shares = None
        if self._rates is not None:
            with tf.device("CPU"):
                shares = tf.constant(self._rates / rate)

        # It has no control flow of Python's to convert, which takes long.
        @tf.autograph.experimental.do_not_convert
        def draw(step, key):
            drawn = index + replicas * _draw(
                shard_examples, rate, key[:2], step, chunk
            )
            if shares is not None:
                drawn = row_rates.kept(drawn, shares, key[:2], step)
            return drawn, key, step

        return keys.enumerate().map(draw)

    def _draws_of_groups(self, index, replicas, keys, chunk):
        """As `_draws`: each step draws from the next group."""
        rate = self.groups * self.sampling_rate
        with tf.device("CPU"):
            members = tf.constant(np.concatenate(self._members))
            # [groups + 1]
            ends = tf.constant(np.cumsum([0, *map(len, self._members)]))

        @tf.autograph.experimental.do_not_convert
        def draw(step, key):
            begin, end = tf.unstack(
                tf.gather(ends, step % self.groups + [0, 1])
            )
            shard_examples = (end - begin - index - 1) // replicas + 1
            places = _draw(
                tf.cast(shard_examples, tf.float64),
                rate,
                key[:2],
                step,
                chunk,
            )
            places = begin + index + replicas * places
            return tf.gather(members, places), key, step

        return keys.enumerate().map(draw)

    def _keys(self, index, replicas, host):
        """Infinite dataset of one key: a new one for each iteration over it.

        Python is called for the key only. A Python generator of the draws is
        slower, and can block a process that exits while tf.data prefetches.
        """

        numbers = 4 if self._draws_of_rows else 2
        # TensorFlow keeps the function forever: it must not hold the data.
        seed, iterators = self.seed, self._iterators

        # The first host draws as one alone does.
        place = (index, replicas, host) if host else (index, replicas)

        def fresh_key():
            iterator = next(iterators[place])
            return _fresh_key(seed, (*place, iterator), numbers)

        @tf.autograph.experimental.do_not_convert
        def key(_):
            return tf.ensure_shape(
                tf.numpy_function(fresh_key, [], tf.int64), [numbers]
            )

        @tf.autograph.experimental.do_not_convert
        def always(key):
            return tf.data.Dataset.from_tensors(key).repeat()

        return tf.data.Dataset.range(1).map(key).flat_map(always)

    def _largest_shard(self, replicas):
        """How many examples a step may draw of, at most."""
        return math.ceil(math.ceil(self.own_examples / self.groups) / replicas)


def _draw(examples, rate, key, step, chunk):
    """Draws each of `range(examples)` independently with probability `rate`.

    The distance from one drawn example to the next is geometric: the cost
    follows the batch, not the data. `chunk` distances are drawn at a time.
    """
    log_miss = math.log1p(-rate) if rate < 1 else -math.inf

    def extend(positions, chunks):
        seed = key + tf.stack([chunks, step])
        uniform = tf.random.stateless_uniform([chunk], seed, dtype=tf.float64)
        distances = tf.floor(tf.math.log(1.0 - uniform) / log_miss) + 1.0
        more = positions[-1] + tf.cumsum(distances)
        return tf.concat([positions, more], 0), chunks + 1

    before_first = tf.constant([-1.0], tf.float64)
    positions, _ = tf.while_loop(
        lambda positions, _: positions[-1] < examples,
        extend,
        (before_first, tf.constant(0, tf.int64)),
        shape_invariants=(tf.TensorShape([None]), tf.TensorShape([])),
    )
    drawn = tf.boolean_mask(positions[1:], positions[1:] < examples)
    return tf.cast(drawn, tf.int64)


def _fresh_key(seed, spawn_key, numbers):
    """A secret key; with a seed, the one of this place in its draws."""
    if seed is None:
        return np.frombuffer(secrets.token_bytes(8 * numbers), np.int64)
    sequence = np.random.SeedSequence(seed, spawn_key=spawn_key)
    return sequence.generate_state(numbers, np.uint64).view(np.int64)


def step_key(key, step):
    """Derives the key of a step, `[2]`, from that of an iterator."""
    seed = key + tf.stack([tf.constant(0, tf.int64), step])
    return tf.random.stateless_uniform([2], seed, None, None, tf.int64)


def _checked_total(total_examples, own_examples, sampling_rates):
    """The number of examples at all hosts."""
    if total_examples is None:
        return own_examples
    check_count("total_examples", total_examples)
    if total_examples < own_examples:
        raise ValueError(
            f"Expected total_examples >= {own_examples}, the number of "
            f"examples of this host alone, got {total_examples}. It is their "
            "number at all hosts together."
        )
    if sampling_rates is not None:
        raise ValueError(
            "Expected no sampling_rates with total_examples, got both: no host "
            "knows the rates of all examples. Leave one of them out."
        )
    return int(total_examples)


def _checked_batch_size(batch_size, examples, unit):
    if examples < 1:
        raise ValueError("Expected at least one example, got empty data.")
    check_count("batch_size", batch_size)
    if batch_size > examples:
        raise ValueError(
            f"Expected batch_size <= {examples}, the number of {unit}s, got "
            f"{batch_size}. The sampling rate batch_size / {unit}s is a "
            f"probability: give more {unit}s or a smaller batch size."
        )
    return int(batch_size)


def _is_array(value):
    # Composite tensors (ragged, sparse) have a shape, but no `__array__`.
    return hasattr(value, "__array__") and hasattr(value, "shape")


def _is_source(x):
    if isinstance(x, (keras.utils.PyDataset, tf.data.Dataset)):
        return True
    if arrow_rows.is_table(x):
        return True
    if isinstance(x, (str, bytes)) or _is_array(x) or tf.is_tensor(x):
        return False
    if keras.tree.is_nested(x):
        return False
    return hasattr(x, "__len__") and hasattr(x, "__getitem__")


def _named_parts(x, y, sample_weight):
    parts = {"x": x, "y": y, "w": sample_weight}
    # tf.data would stack the entries of a list into one tensor.
    return {
        name: keras.tree.lists_to_tuples(part)
        for name, part in parts.items()
        if name == "x" or part is not None
    }


def _checked_arrays(name, part):
    name = {"w": "sample_weight"}.get(name, name)

    def check(array):
        if not _is_array(array) or len(array.shape) == 0:
            raise ValueError(
                f"Expected {name} to be made of arrays whose first axis counts "
                f"the examples, got a {type(array).__name__}. Make arrays of "
                "lists by `numpy.asarray`. Give NumPy arrays, dense tensors or "
                "memory maps; or as x an object with `__len__` and "
                "`__getitem__`, of which rows can be drawn, not those of a "
                "generator. `PoissonBatches(rows, map=...)` decodes and "
                "augments each row when it is drawn."
            )
        return array if tf.is_tensor(array) else np.asanyarray(array)

    return keras.tree.map_structure(check, part)


def _common_length(parts):
    lengths = {
        name: sorted({array.shape[0] for array in keras.tree.flatten(part)})
        for name, part in parts.items()
    }
    distinct = set().union(*lengths.values())
    if len(distinct) != 1:
        raise ValueError(
            "Expected x, y and sample_weight to hold the same number of "
            f"examples, got lengths {lengths}."
        )
    return distinct.pop()


def with_views(parts, rows, views):
    """Parts `[rows * views, ...]` as `[rows, views, ...]`."""
    return keras.tree.map_structure(
        lambda t: tf.reshape(t, [rows, views, *t.shape[1:]]), parts
    )


def _cast(name, rows):
    if name in ("w", "real", "rows"):
        return tf.cast(rows, tf.float32)
    if rows.dtype.is_floating:
        return tf.cast(rows, keras.config.floatx())
    return rows


def _pad(rows, padding):
    shape = tf.concat([[padding], tf.shape(rows)[1:]], 0)
    return tf.concat([rows, tf.zeros(shape, rows.dtype)], 0)
