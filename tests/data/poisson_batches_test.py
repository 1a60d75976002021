import math
import re
import secrets

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tests.data.drawn_batches import EXAMPLES, batches_of, drawn_indices
from tf_dpsub.data import OncePerEpoch, PoissonBatches, poisson_batches
from tf_dpsub.gradients import Sources

STEPS = 3000


class Source:
    """A random-access source that records the indices it is asked for."""

    def __init__(self, n, make):
        self.n = n
        self.make = make
        self.asked = []

    def __len__(self):
        return self.n

    def __getitem__(self, indices):
        self.asked.append(indices)
        return self.make(indices)


@pytest.fixture(scope="module")
def included():
    """Mask of the examples (columns) drawn at each step (rows)."""
    _, batches = batches_of()
    included = np.zeros((STEPS, EXAMPLES), bool)
    for step, drawn in enumerate(drawn_indices(batches.dataset(), STEPS)):
        assert len(set(drawn)) == len(drawn)
        included[step, drawn] = True
    return included


class TestLaw:
    def test_every_example_has_the_rate(self, included):
        # Chi-square statistic of independent binomials; the bounds leave
        # out one in 1e4 on either side.
        q, counts = 0.2, included.sum(axis=0)
        statistic = np.sum((counts - STEPS * q) ** 2) / (STEPS * q * (1 - q))
        low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], EXAMPLES)
        assert low < statistic < high

    def test_batch_sizes_are_binomial(self, included):
        sizes = included.sum(axis=1)
        observed = np.bincount(sizes, minlength=EXAMPLES + 1)
        expected = STEPS * stats.binom.pmf(
            np.arange(EXAMPLES + 1), EXAMPLES, 0.2
        )
        frequent = expected > 5
        statistic = np.sum(
            (observed - expected)[frequent] ** 2 / expected[frequent]
        )
        assert statistic < stats.chi2.ppf(1 - 1e-4, frequent.sum())

    def test_examples_are_independent_of_each_other(self, included):
        correlation = np.corrcoef(included.T)
        off_diagonal = correlation[~np.eye(EXAMPLES, dtype=bool)]
        assert np.abs(off_diagonal).max() < 5 / math.sqrt(STEPS)
        # A fixed batch size would make this -1 / (n - 1) = -0.017.
        assert abs(off_diagonal.mean()) < 2e-3

    def test_steps_are_independent(self, included):
        both = included[1:] & included[:-1]
        rate = both.mean()
        deviation = math.sqrt(0.04 * 0.96 / both.size)
        assert abs(rate - 0.04) < 4 * deviation

    def test_distances_between_drawn_examples_are_geometric(self):
        _, batches = batches_of(n=100_000, batch_size=10_000)
        distances = np.concatenate(
            [np.diff(drawn) for drawn in drawn_indices(batches.dataset(), 10)]
        )
        observed = np.bincount(np.minimum(distances, 50))[1:]
        law = stats.geom(0.1)
        expected = law.pmf(np.arange(1, 51))
        expected[-1] = law.sf(49)
        expected *= len(distances)
        statistic = np.sum((observed - expected) ** 2 / expected)
        assert statistic < stats.chi2.ppf(1 - 1e-4, 49)

    def test_an_epoch_touches_63_percent(self):
        _, batches = batches_of(n=5000, batch_size=100)
        drawn = drawn_indices(batches.dataset(), batches.steps_per_epoch)
        touched = len(set().union(*drawn)) / 5000
        assert touched == pytest.approx(1 - math.exp(-1), abs=0.03)

    def test_rate_one_draws_everything(self):
        _, batches = batches_of(n=7, batch_size=7)
        assert drawn_indices(batches.dataset(), 3) == [list(range(7))] * 3


class TestRows:
    def test_drawn_rows_come_first_and_are_the_examples(self):
        x, batches = batches_of()
        for batch in batches.dataset(multiple_of=8).take(50):
            real = batch["real"].numpy()
            drawn = int(real.sum())
            np.testing.assert_array_equal(real, np.arange(len(real)) < drawn)
            np.testing.assert_array_equal(
                batch["x"][:drawn], x[batch["y"][:drawn]]
            )

    def test_padding_carries_no_example(self):
        x = {"a": np.ones((9, 2)), "b": np.array(["text"] * 9)}
        batches = PoissonBatches(x, np.ones(9), np.ones(9), batch_size=3)
        for batch in batches.dataset().take(20).as_numpy_iterator():
            padding = batch["real"] == 0
            assert not batch["x"]["a"][padding].any()
            assert set(batch["x"]["b"][padding]) <= {b""}
            assert not batch["y"][padding].any()
            assert not batch["w"][padding].any()

    def test_a_larger_draw_is_padded_to_a_multiple_never_cut(self, monkeypatch):
        monkeypatch.setattr(poisson_batches, "_TAIL", 0.9)
        x, batches = batches_of()
        capacity = batches.capacity(multiple_of=4)
        sizes, rows = [], []
        for batch in batches.dataset(multiple_of=4).take(400):
            drawn = int(tf.reduce_sum(batch["real"]))
            np.testing.assert_array_equal(
                batch["x"][:drawn], x[batch["y"][:drawn]]
            )
            sizes.append(drawn)
            rows.append(len(batch["real"]))
        sizes, rows = np.array(sizes), np.array(rows)
        np.testing.assert_array_equal(
            rows, np.maximum(1, -(-sizes // capacity)) * capacity
        )
        assert (rows > capacity).any()
        assert sizes.mean() == pytest.approx(12, abs=4 * 3.1 / 20)

    def test_nan_and_infinity_are_left_alone_and_stay_in_their_row(self):
        x = np.arange(5.0)
        x[0], x[3] = np.nan, np.inf
        batches = PoissonBatches(x, np.arange(5), batch_size=4, seed=0)
        for batch in batches.dataset(multiple_of=8).take(20):
            drawn = int(tf.reduce_sum(batch["real"]))
            np.testing.assert_array_equal(
                batch["x"][:drawn], x[batch["y"][:drawn]]
            )
            assert not np.any(batch["x"][drawn:])

    @pytest.mark.parametrize("kind", ["memory", "memory map", "source"])
    def test_an_empty_draw_is_all_padding(self, kind, tmp_path):
        x = np.full((3, 2), np.nan, np.float32)
        if kind == "memory map":
            x = np.memmap(tmp_path / "x", "float32", "w+", shape=(3, 2))
            x[:] = np.nan
        if kind == "source":
            x = Source(3, lambda i: np.full((len(i), 2), np.nan, np.float32))
        dataset = PoissonBatches(x, batch_size=1, seed=0).dataset(multiple_of=4)
        empty = [b for b in dataset.take(40) if not np.any(b["real"])]
        assert len(empty) > 3
        for batch in empty:
            np.testing.assert_array_equal(batch["x"], np.zeros((4, 2)))
        if kind == "source":
            assert all(len(indices) for indices in x.asked)


class TestCapacity:
    @pytest.mark.parametrize("multiple_of", [1, 8, 64, 100])
    @pytest.mark.parametrize(
        "n, batch_size",
        [(10_000, 250), (60_000, 1000), (60, 12), (7, 7), (1, 1)],
    )
    def test_is_the_smallest_multiple_above_the_quantile(
        self, n, batch_size, multiple_of
    ):
        batches = PoissonBatches(np.zeros(n), batch_size=batch_size)
        capacity = batches.capacity(multiple_of)
        assert capacity % multiple_of == 0
        assert capacity <= math.ceil(n / multiple_of) * multiple_of
        assert stats.binom(n, batch_size / n).sf(capacity) <= 1e-12
        law = stats.poisson(batch_size)
        if capacity < n:
            assert law.sf(capacity) <= 1e-12
        if capacity > multiple_of:
            assert law.sf(capacity - multiple_of) > 1e-12

    def test_papers_setting(self):
        batches = PoissonBatches(np.zeros(10_000), batch_size=250)
        assert batches.capacity() == 369
        assert batches.capacity(64) == 384

    def test_examples_do_not_matter(self):
        assert {
            PoissonBatches(np.zeros(n), batch_size=40).capacity(8)
            for n in (90, 100, 10**6)
        } == {96}

    def test_replicas_share_the_examples(self):
        batches = PoissonBatches(np.zeros(10_000), batch_size=250)
        assert batches.capacity(1, replicas=4) == int(
            stats.poisson.isf(1e-12, 62.5)
        )

    def test_a_host_with_a_part_has_its_share(self):
        part = PoissonBatches(
            np.zeros(2500), batch_size=250, total_examples=10_000
        )
        assert part.capacity() == int(stats.poisson.isf(1e-12, 62.5))

    def test_is_no_more_than_a_shard_has(self):
        whole = PoissonBatches(np.zeros(60), batch_size=60)
        assert [whole.capacity(1, replicas=r) for r in (1, 4)] == [60, 15]

    @pytest.mark.parametrize("value", [0, -8, 2.0, True, None])
    @pytest.mark.parametrize("name", ["multiple_of", "replicas"])
    def test_refuses_all_but_positive_ints(self, name, value):
        _, batches = batches_of()
        with pytest.raises(ValueError, match=f"Expected {name} >= 1"):
            batches.capacity(**{name: value})


class TestAttributes:
    def test_follow_from_data_and_batch_size(self):
        batches = PoissonBatches(np.zeros(10), batch_size=4, seed=3)
        assert batches.examples == 10
        assert batches.batch_size == 4
        assert batches.sampling_rate == 0.4
        assert batches.steps_per_epoch == 3
        assert batches.seed == 3

    def test_dataset_is_infinite_with_static_rows(self):
        _, batches = batches_of()
        dataset = batches.dataset()
        assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        assert dataset.element_spec == {
            "x": tf.TensorSpec((None, 2, 3), tf.float32),
            "y": tf.TensorSpec((None,), tf.int64),
            "real": tf.TensorSpec((None,), tf.float32),
        }

    def test_no_thread_tunes_what_is_fixed(self):
        """Where one sleeps, TensorFlow waits for it when an iterator ends."""
        _, batches = batches_of()
        assert batches.dataset().options().autotune.enabled is False


class TestShards:
    def test_draw_their_own_examples_with_the_same_rate(self):
        _, batches = batches_of()
        counts = np.zeros(EXAMPLES)
        for r in range(4):
            dataset = batches.dataset(multiple_of=2, shard=(r, 4))
            for drawn in drawn_indices(dataset, 250):
                assert all(i % 4 == r for i in drawn)
                counts[drawn] += 1
        statistic = np.sum((counts - 50) ** 2) / (250 * 0.2 * 0.8)
        assert statistic < stats.chi2.ppf(1 - 1e-4, EXAMPLES)

    def test_of_one_seed_draw_differently(self):
        _, batches = batches_of()
        drawn = [
            drawn_indices(batches.dataset(shard=(r, 2)), 10) for r in (0, 1)
        ]
        assert [[i // 2 for i in d] for d in drawn[0]] != [
            [i // 2 for i in d] for d in drawn[1]
        ]

    def test_pad_to_the_same_rows(self):
        _, batches = batches_of(n=61)
        rows = {
            len(b["real"])
            for r in range(3)
            for b in batches.dataset(multiple_of=4, shard=(r, 3)).take(5)
        }
        assert rows == {batches.capacity(4, replicas=3)}

    def test_more_replicas_than_examples_leave_some_empty(self):
        batches = PoissonBatches(np.ones(2), batch_size=2)
        (batch,) = batches.dataset(shard=(2, 3)).take(1)
        assert not np.any(batch["real"])

    @pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0.0, 1)])
    def test_refuses_an_unknown_replica(self, shard):
        _, batches = batches_of()
        with pytest.raises(ValueError, match="0 <= r < replicas"):
            batches.dataset(shard=shard)


class TestKeys:
    def test_same_seed_same_batches(self):
        first, second, other = (
            drawn_indices(batches_of(seed=s)[1].dataset(), 10)
            for s in (5, 5, 6)
        )
        assert first == second
        assert first != other

    def test_a_fixed_seed_does_not_replay_and_is_reproducible(self):
        runs = []
        for steps in (10, 4):
            _, batches = batches_of(seed=5)
            dataset = batches.dataset()
            first = drawn_indices(dataset, steps)
            # A new dataset of the same object goes on, too.
            second = drawn_indices(dataset, 10)
            third = drawn_indices(batches.dataset(), 10)
            assert first[:4] != second[:4] != third[:4] != first[:4]
            runs.append((first[:4], second, third))
        # Whatever was prefetched and never used changes nothing.
        assert runs[0] == runs[1]

    def test_without_a_seed_nothing_replays(self):
        drawn = []
        for _ in range(2):
            keras.utils.set_random_seed(0)
            _, batches = batches_of(seed=None)
            dataset = batches.dataset()
            drawn += [drawn_indices(dataset, 10) for _ in range(2)]
        assert all(a != b for i, a in enumerate(drawn) for b in drawn[i + 1 :])

    def test_keys_come_from_the_operating_system_for_each_iterator(
        self, monkeypatch
    ):
        sizes = []

        def token_bytes(count):
            sizes.append(count)
            return b"0" * count

        monkeypatch.setattr(secrets, "token_bytes", token_bytes)
        _, batches = batches_of(seed=None)
        dataset = batches.dataset()
        first = drawn_indices(dataset, 5)
        assert sizes == [16]
        assert drawn_indices(dataset, 5) == first
        assert sizes == [16, 16]


class TestInMemory:
    def test_structures_dtypes_and_weights(self):
        n = 8
        x = {
            "image": np.random.default_rng(0).normal(size=(n, 2)),
            "tokens": [np.arange(n, dtype=np.int32), tf.range(n)],
            "text": np.array([f"é{i}" for i in range(n)], dtype=object),
        }
        y = (np.arange(n) % 2 == 0, np.arange(n, dtype=np.uint8))
        batches = PoissonBatches(x, y, np.arange(n), batch_size=6, seed=0)
        dataset = batches.dataset()
        spec = {k: dataset.element_spec[k] for k in ("x", "y", "w")}
        assert keras.tree.map_structure(lambda s: s.dtype, spec) == {
            "x": {
                "image": tf.float32,
                "tokens": (tf.int32, tf.int32),
                "text": tf.string,
            },
            "y": (tf.bool, tf.uint8),
            "w": tf.float32,
        }
        (batch,) = dataset.take(1).as_numpy_iterator()
        i = batch["w"][batch["real"] == 1].astype(int)
        assert len(i) > 2
        rows = slice(0, len(i))
        np.testing.assert_allclose(batch["x"]["image"][rows], x["image"][i])
        for tokens in batch["x"]["tokens"]:
            np.testing.assert_array_equal(tokens[rows], i)
        texts = [text.decode() for text in batch["x"]["text"][rows]]
        assert texts == [f"é{j}" for j in i]
        np.testing.assert_array_equal(batch["y"][0][rows], i % 2 == 0)
        np.testing.assert_array_equal(batch["y"][1][rows], i)

    def test_floating_point_data_comes_as_floatx(self, monkeypatch):
        monkeypatch.setattr(keras.config, "floatx", lambda: "float16")
        batches = PoissonBatches(
            np.ones(4), np.ones(4, np.float32), np.ones(4), batch_size=2
        )
        spec = batches.dataset().element_spec
        assert spec["x"].dtype == spec["y"].dtype == tf.float16
        assert spec["w"].dtype == spec["real"].dtype == tf.float32

    def test_later_changes_of_the_array_do_not_matter(self):
        x = np.ones(4, np.float32)
        batches = PoissonBatches(x, batch_size=4)
        x[:] = 2
        (batch,) = batches.dataset().take(1)
        np.testing.assert_array_equal(batch["x"], np.ones(4))


class TestMemoryMap:
    def test_is_never_read_as_a_whole(self, tmp_path):
        # A sparse file of 1 TiB: reading or copying all of it must fail.
        x = np.memmap(tmp_path / "x", "float32", "w+", shape=(2**28, 1024))
        x[0], x[-1] = 1, 2
        batches = PoissonBatches(x, batch_size=3, seed=0)
        (batch,) = batches.dataset(multiple_of=4).take(1)
        assert batch["x"].shape == (batches.capacity(4), 1024)

    @pytest.mark.parametrize("view", [False, True])
    def test_gives_the_same_batches_as_memory(self, tmp_path, view):
        x, in_memory = batches_of()
        mapped = np.memmap(tmp_path / "x", "float32", "w+", shape=x.shape)
        mapped[:] = x
        if view:
            mapped = np.asarray(mapped)[:]
        on_disk = PoissonBatches(
            {"a": mapped, "b": tf.constant(x)},
            np.arange(EXAMPLES),
            np.ones(EXAMPLES),
            batch_size=12,
            seed=0,
        )
        for disk, memory in zip(
            on_disk.dataset().take(5), in_memory.dataset().take(5)
        ):
            np.testing.assert_array_equal(disk["x"]["a"], memory["x"])
            np.testing.assert_array_equal(disk["x"]["b"], memory["x"])
            np.testing.assert_array_equal(disk["y"], memory["y"])
            np.testing.assert_array_equal(disk["w"], memory["real"])

    def test_view_as_plain_array_is_recognised(self, tmp_path):
        x = np.memmap(tmp_path / "x", "float32", "w+", shape=(2**28, 1024))
        PoissonBatches(np.asarray(x)[1:], batch_size=3)


class TestSource:
    def test_gets_ascending_distinct_indices(self):
        source = Source(EXAMPLES, lambda i: (i * 2.0, i))
        batches = PoissonBatches(source, batch_size=12, seed=0)
        # Whether it takes an array, and what a row is like.
        asked = [a.tolist() for a in source.asked]
        assert asked[0] == [0, 1] and asked[-1] == [0]
        drawn = drawn_indices(batches.dataset(), 5)
        for indices, expected in zip(source.asked[len(asked) :], drawn):
            assert isinstance(indices, np.ndarray)
            assert indices.dtype == np.int64
            assert (np.diff(indices) > 0).all()
            assert indices.tolist() == expected

    @pytest.mark.parametrize(
        "make, keys",
        [
            (lambda i: i, {"x", "real"}),
            (lambda i: (i, i), {"x", "y", "real"}),
            (lambda i: (i, i, i), {"x", "y", "w", "real"}),
            (lambda i: (i, None, i), {"x", "w", "real"}),
        ],
    )
    def test_parts(self, make, keys):
        batches = PoissonBatches(Source(9, make), batch_size=6, seed=0)
        dataset = batches.dataset()
        assert set(dataset.element_spec) == keys
        (batch,) = dataset.take(1).as_numpy_iterator()
        assert set(batch) == keys
        for key in keys - {"real"}:
            assert set(batch[key][batch["real"] == 1]) <= set(range(9))

    def test_structures_and_text(self):
        source = Source(
            9,
            lambda i: (
                {"a": [np.ones((len(i), 2)), i], "b": i.astype(str)},
                tf.constant(i),
            ),
        )
        dataset = PoissonBatches(source, batch_size=6, seed=0).dataset()
        assert dataset.element_spec["x"] == {
            "a": (
                tf.TensorSpec((None, 2), tf.float32),
                tf.TensorSpec((None,), tf.int64),
            ),
            "b": tf.TensorSpec((None,), tf.string),
        }
        (batch,) = dataset.take(1).as_numpy_iterator()
        drawn = batch["y"][batch["real"] == 1]
        texts = batch["x"]["b"][batch["real"] == 1]
        assert [int(text) for text in texts] == drawn.tolist()

    @pytest.mark.parametrize(
        "make",
        [
            lambda i: np.zeros((len(i), len(i) + 1)),
            lambda i: np.zeros((2, 1)) if len(i) > 1 else np.zeros((1, 1)),
            lambda i: i if len(i) == 1 else i.astype(np.float64),
            lambda i: (i, i) if len(i) == 1 else i,
        ],
        ids=["width", "rows", "dtype", "parts"],
    )
    def test_batches_unlike_the_first_example_raise(self, make):
        batches = PoissonBatches(Source(50, make), batch_size=40, seed=0)
        with pytest.raises(tf.errors.InvalidArgumentError, match="first one"):
            list(batches.dataset().take(1))

    def test_one_row_for_each_index(self):
        with pytest.raises(ValueError, match=r"one row.*got shape \(3,\)"):
            PoissonBatches(Source(5, lambda i: np.zeros(3)), batch_size=2)


class TestErrors:
    @pytest.mark.parametrize("batch_size", [0, -1, 2.5, None, True])
    def test_batch_size_that_is_no_positive_int(self, batch_size):
        with pytest.raises(ValueError, match="Expected batch_size >= 1"):
            PoissonBatches(np.zeros(4), batch_size=batch_size)

    def test_batch_size_above_the_examples(self):
        with pytest.raises(
            ValueError, match="Expected batch_size <= 4.*got 5.*smaller"
        ):
            PoissonBatches(np.zeros(4), batch_size=5)

    @pytest.mark.parametrize(
        "x", [np.zeros((0, 3)), Source(0, lambda i: i)], ids=["array", "source"]
    )
    def test_no_examples(self, x):
        with pytest.raises(ValueError, match="at least one example"):
            PoissonBatches(x, batch_size=1)

    @pytest.mark.parametrize(
        "x, y, w",
        [
            (np.zeros(4), np.zeros(5), None),
            (np.zeros(4), np.zeros(4), np.zeros(3)),
            ({"a": np.zeros(4), "b": np.zeros(3)}, None, None),
        ],
    )
    def test_unequal_lengths(self, x, y, w):
        with pytest.raises(
            ValueError, match="same number of examples, got lengths"
        ):
            PoissonBatches(x, y, w, batch_size=2)

    @pytest.mark.parametrize("name", ["y", "sample_weight"])
    def test_targets_beside_a_source(self, name):
        with pytest.raises(ValueError, match=r"return \(x, y\)"):
            PoissonBatches(
                Source(4, lambda i: i), batch_size=2, **{name: np.zeros(4)}
            )

    @pytest.mark.parametrize(
        "x",
        [
            None,
            "text",
            [[1, 2], [3, 4]],
            {"a": np.zeros(4), "b": "text"},
            np.float32(3),
            tf.constant(3.0),
            tf.ragged.constant([[1], [2, 3]]),
            (row for row in range(4)),
            object(),
        ],
        ids=lambda x: type(x).__name__,
    )
    def test_inputs_that_are_not_arrays(self, x):
        with pytest.raises(ValueError, match="Expected x to be made of arrays"):
            PoissonBatches(x, batch_size=1)

    def test_no_private_number_is_in_the_message(self):
        with pytest.raises(ValueError, match="numpy.asarray") as error:
            PoissonBatches([[0.1234, 5678.0]], batch_size=1)
        assert not re.search("1234|5678", str(error.value))

    def test_targets_that_are_not_arrays(self):
        with pytest.raises(ValueError, match="Expected y to be made of arrays"):
            PoissonBatches(np.zeros(2), [1, 2], batch_size=1)
        with pytest.raises(ValueError, match="Expected sample_weight to be"):
            PoissonBatches(np.zeros(2), None, [1, 2], batch_size=1)

    @pytest.mark.parametrize("seed", [-1, 0.5, "a", True])
    def test_seed(self, seed):
        with pytest.raises(ValueError, match="Expected seed >= 0"):
            PoissonBatches(np.zeros(2), batch_size=1, seed=seed)


class TestViewsDrawnOnce:
    @staticmethod
    def _batches(seed=4, function=None):
        def noisy(x, y, w, seed):
            return x + tf.random.stateless_normal([], seed), y, w

        return PoissonBatches(
            np.zeros(10, np.float32),
            np.arange(10),
            np.ones(10),
            batch_size=10,
            map=function or noisy,
            seed=seed,
        )

    def test_all_examples_in_their_order(self):
        (whole,) = self._batches().views_drawn_once(3, rows=10)
        chunks = list(self._batches().views_drawn_once(3, rows=4))
        assert [len(chunk["x"]) for chunk in chunks] == [4, 4, 2]
        # Draws follow from the example, not from what is made with it.
        for name in ("x", "y"):
            together = np.concatenate([chunk[name] for chunk in chunks])
            np.testing.assert_array_equal(together, whole[name])
        assert len(np.unique(whole["x"])) == 30
        np.testing.assert_array_equal(whole["y"][:, 1], np.arange(10))

    def test_each_call_draws_anew(self):
        batches = self._batches()
        (first,), (second,) = (
            batches.views_drawn_once(2, rows=10) for _ in range(2)
        )
        assert (first["x"] != second["x"]).all()

    def test_further_function_of_inputs(self):
        def branching(x, y, w, seed):
            if y > 4:  # by AutoGraph
                x -= 100.0
            return x + tf.random.stateless_uniform([], seed), y

        batches = self._batches(function=branching)
        (before,) = self._batches(function=branching).views_drawn_once(2, 10)
        doubled = batches.with_map_of_inputs(lambda x: 2 * x, Sources([]))
        (after,) = doubled.views_drawn_once(2, 10)
        np.testing.assert_array_equal(after["x"], 2 * before["x"])
        assert (after["x"][5:] < -100).all() and (after["x"][:5] >= 0).all()
        # The batches themselves stay as they are.
        (batch,) = batches.dataset().take(1)
        assert (batch["x"][:5] < 1).numpy().all()

    def test_given_views(self):
        batches = self._batches()
        x = np.arange(20.0, dtype=np.float32).reshape(10, 2)
        given = batches.with_views(x, x.astype(int), None, views=2)
        (batch,) = given.dataset(views=2).take(1)
        np.testing.assert_array_equal(batch["x"], x)
        assert given.inputs is None and given.comparable_inputs is None
        with pytest.raises(ValueError, match="Expected views=2"):
            given.dataset(views=3)


class TestWithInputs:
    def test_draws_are_those_of_the_same_batches(self):
        x = np.arange(100.0, dtype=np.float32)
        weights = np.ones(100)
        batches, same = (
            PoissonBatches(x, x.astype(int), weights, batch_size=9, seed=4)
            for _ in range(2)
        )
        other = batches.with_inputs({"double": 2 * x})
        for ours, theirs in zip(
            other.dataset().take(3), same.dataset().take(3)
        ):
            np.testing.assert_array_equal(ours["x"]["double"], 2 * theirs["x"])
            np.testing.assert_array_equal(ours["y"], theirs["y"])
            np.testing.assert_array_equal(ours["w"], theirs["w"])

    def test_no_draw_is_made_twice(self):
        x = np.arange(100.0, dtype=np.float32)
        batches = PoissonBatches(x, batch_size=50, seed=4)
        first, second = (
            next(iter(of.dataset()))["x"].numpy()
            for of in (batches, batches.with_inputs(x))
        )
        assert first.shape != second.shape or np.any(first != second)

    def test_another_number_of_inputs(self):
        batches = PoissonBatches(np.zeros(10), batch_size=5)
        with pytest.raises(ValueError, match="Expected 10 inputs, got 9"):
            batches.with_inputs(np.zeros(9))

    def test_sources(self):
        rows = tf.data.Dataset.from_tensor_slices(np.zeros(10))
        batches = PoissonBatches(rows, batch_size=5)
        with pytest.raises(ValueError, match="batches of arrays"):
            batches.with_inputs(np.zeros(10))


@pytest.mark.parametrize(
    "name",
    [
        "examples",
        "own_examples",
        "batch_size",
        "sampling_rate",
        "largest_rate",
        "steps_per_epoch",
        "groups",
        "seed",
        "unit",
    ],
)
@pytest.mark.parametrize("kind", [PoissonBatches, OncePerEpoch])
def test_what_the_ledger_rests_on_cannot_be_set(kind, name):
    batches = kind(np.zeros((20, 1), "float32"), batch_size=2)
    with pytest.raises(AttributeError):
        setattr(batches, name, 1)
