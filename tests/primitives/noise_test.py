"""Noise is Gaussian and fresh, and its key is in memory alone."""

import copy
import pickle
import secrets
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_dpsub.primitives import noise
from tf_dpsub.primitives.grid import GridNoise, spacing

# Keys are fixed, so that statistics do not fail by chance.
KEY = tf.constant([1, 2], tf.int64)
NUMBERS = 200_000


def grid_noise(stddev):
    return GridNoise(stddev, spacing(stddev, stddev, NUMBERS))


def draw(shapes, stddevs=None, key=KEY, secure=False):
    stddevs = [1.0] * len(shapes) if stddevs is None else stddevs
    noises = [grid_noise(stddev) if stddev else None for stddev in stddevs]
    sums = [tf.zeros(shape) for shape in shapes]
    draws = noise.noisy(key, sums, noises, secure)
    assert [z.shape for z in draws] == [tf.TensorShape(s) for s in shapes]
    assert {z.dtype for z in draws} == {tf.float32}
    return [z.numpy() for z in draws]


@pytest.fixture
def on_cpu(monkeypatch):
    """Hides GPUs."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])


def assert_standard_normal(z, level=1e-4):
    """Checks mean, variance, kurtosis, tails and the distribution."""
    z = np.ravel(z).astype("float64")
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    variance = np.square(z).sum()
    assert stats.chi2.cdf(variance, z.size) > level
    assert stats.chi2.sf(variance, z.size) > level
    assert stats.kstest(z, "norm").pvalue > level
    # Halves of two and of four numbers have the kurtosis of Gaussians only.
    assert abs(stats.kurtosis(z)) < 5 * np.sqrt(24 / z.size)
    for bound in (2, 3, 4):
        expected = 2 * stats.norm.sf(bound)
        count = np.count_nonzero(np.abs(z) > bound)
        assert stats.binom.cdf(count, z.size, expected) > level
        assert stats.binom.sf(count - 1, z.size, expected) > level


class TestNoisy:
    @pytest.mark.parametrize("secure", [False, True])
    def test_is_standard_normal(self, secure):
        (z,) = draw([[NUMBERS]], secure=secure)
        assert_standard_normal(z)

    @pytest.mark.parametrize("secure", [False, True])
    def test_every_tensor_has_its_own_stddev(self, secure):
        stddevs = [1e-3, 1.0, 50.0, 0.0]
        draws = draw(
            [[100, 50], [5000], [10, 10, 50], [7]], stddevs, KEY, secure
        )
        for z, stddev in zip(draws[:-1], stddevs):
            assert_standard_normal(z / stddev)
        np.testing.assert_array_equal(draws[-1], np.zeros(7))

    @pytest.mark.parametrize("secure", [False, True])
    def test_tensors_are_independent(self, secure):
        draws = np.stack(draw([[20_000]] * 4, secure=secure))
        correlations = np.corrcoef(draws) - np.eye(4)
        assert np.abs(correlations).max() < 5.5 / np.sqrt(20_000)

    @pytest.mark.parametrize("secure", [False, True])
    def test_any_shape(self, secure):
        draws = draw([[], [1], [2, 0], [3, 4]], secure=secure)
        assert draws[0] != draws[1][0]

    @pytest.mark.parametrize("secure", [False, True])
    def test_sums_lie_on_the_grid_and_noise_is_added_exactly(self, secure):
        law = grid_noise(1.0)
        sums = [
            tf.constant([3.7, -1e-9, 1e6 + 1 / 3], tf.float64),
            tf.zeros([3], tf.float64),
        ]

        def noisy(sums):
            return noise.noisy(KEY, sums, [law] * 2, secure, "float64")

        results = noisy(sums)
        for values in results:
            multiples = values.numpy() / law.spacing
            np.testing.assert_array_equal(multiples, np.round(multiples))
        if not secure:
            (drawn, _), (moved, _) = noisy([tf.zeros([3])] * 2), results
            np.testing.assert_array_equal(
                (moved - drawn) / law.spacing,
                np.round(sums[0].numpy() / law.spacing),
            )

    @pytest.mark.parametrize("secure", [False, True])
    def test_sums_without_noise_are_unchanged(self, secure):
        values = [1 / 3, 1e-30]
        result, _ = noise.noisy(
            KEY,
            [tf.constant(values), tf.zeros([2])],
            [None, grid_noise(1.0)],
            secure,
        )
        np.testing.assert_array_equal(result, np.float32(values))

    @pytest.mark.parametrize("secure", [False, True])
    def test_in_a_traced_step(self, secure):
        @tf.function
        def traced(sums):
            return noise.noisy(KEY, [sums], [grid_noise(1.0)], secure)

        (z,) = traced(tf.zeros([3, 4]))
        assert z.shape == (3, 4)
        assert np.unique(z).size == 12

    def test_depends_on_the_key_alone(self):
        (first,), (same,) = draw([[5]]), draw([[5]])
        np.testing.assert_array_equal(first, same)
        keras.utils.set_random_seed(7)
        np.testing.assert_array_equal(draw([[5]])[0], first)
        for other in ([2, 1], [1, 3], [1, 2 + 2**32], [1 + 2**32, 2]):
            key = tf.constant(other, tf.int64)
            assert not np.isin(draw([[5]], key=key)[0], first).any()

    @pytest.mark.parametrize("wrap", [lambda f: f, tf.function])
    def test_secure_noise_depends_on_no_key(self, wrap):
        step = wrap(
            lambda: noise.noisy(KEY, [tf.zeros([5])], [grid_noise(1.0)], True)
        )
        (first,), (other,) = step(), step()
        assert not np.isin(first, other).any()

    def test_draws_in_pieces(self, on_cpu, monkeypatch):
        """No piece repeats another, whether tensors share it or fill many."""
        monkeypatch.setattr(noise, "PIECE", 1000)
        monkeypatch.setattr(noise, "PIECES_MULTIPLE", 100)
        monkeypatch.setattr(noise, "COMPILED", 182_397)
        shapes = [[7], [90_500], [990], [30, 30], [300, 300]]
        draws = [np.ravel(z) for z in draw(shapes)]
        for z in (*draws[1::3], np.concatenate(draws)):
            assert_standard_normal(z)
        assert np.unique(np.concatenate(draws)).size > 0.98 * 182_397
        pieces = np.concatenate(draws)[: 182 * 1000].reshape(182, 1000)
        correlations = np.corrcoef(pieces) - np.eye(182)
        assert np.abs(correlations).max() < 6 / np.sqrt(1000)

    def test_pieces_are_of_the_sums_that_they_belong_to(
        self, on_cpu, monkeypatch
    ):
        monkeypatch.setattr(noise, "PIECE", 100)
        monkeypatch.setattr(noise, "PIECES_MULTIPLE", 10)
        monkeypatch.setattr(noise, "COMPILED", 1)
        sums = [tf.range(1e6, 1e6 + n) for n in (7, 100, 333)]
        law = GridNoise(1e-3, 2.0**-30)
        for result, s in zip(noise.noisy(KEY, sums, [law] * 3), sums):
            np.testing.assert_allclose(result, s, rtol=0, atol=0.07)

    def test_only_much_noise_is_compiled(self, on_cpu, monkeypatch):
        """For few numbers, compiling would take longer than it saves."""
        monkeypatch.setattr(noise, "COMPILED", 100)

        def compiles(counts):
            step = tf.function(
                lambda: noise.noisy(
                    KEY,
                    [tf.zeros([n]) for n in counts],
                    [grid_noise(1.0)] * len(counts),
                )
            )
            graph = step.get_concrete_function().graph.as_graph_def()
            return any(
                "_XlaMustCompile" in function.attr
                and function.attr["_XlaMustCompile"].b
                for function in graph.library.function
            )

        assert compiles([50, 50]) and not compiles([50, 49])

    def test_every_bit_of_a_compiled_piece_s_key_counts(self):
        """128 secret bits, in two words, of which neither is cut."""
        keys = np.zeros([129, 2], np.uint64)
        for k in range(128):
            keys[k + 1, k // 64] = np.uint64(1) << np.uint64(k % 64)
        drawn = noise._compiled(grid_noise(1.0), 6, "float32")
        draws = [
            drawn(key.view(np.int64), tf.zeros([6], tf.float64)).numpy()
            for key in keys
        ]
        assert np.unique(draws, axis=0).shape == (129, 6)

    def test_no_block_is_encrypted_twice(self):
        """This holds even where counters begin at their last values."""
        count = 2**16
        for begin in (0, 2**32 - 1, 2**32 - 2**15):
            words = np.array([1, 2, begin, begin], np.uint32)
            key = tf.constant(words.view(np.int64))
            pairs = tf.function(
                lambda key: list(noise._threefry_blocks(key, 0, count, 2)),
                jit_compile=True,
                autograph=False,
            )(key)
            blocks = np.array(pairs).transpose(0, 2, 1).reshape(-1, 2)
            # Encryption is one to one.
            assert len(np.unique(blocks, axis=0)) == 2 * count

    def test_more_numbers_than_the_counter_counts(self):
        sums = [tf.TensorSpec([2**32 + 1])]
        with pytest.raises(
            ValueError, match=r"at most 2\^32 .*, got 4,294,967,"
        ):
            noise._keys_of_one_count(KEY, [[0]], sums)

    def test_every_number_is_drawn_once_where_xla_compiles(self):
        """This holds for tensors large and small, and for all keys."""
        shapes = [[7], [101], [10, 10], [50], []]
        step = tf.function(
            lambda key: noise.noisy(
                key, [tf.zeros(s) for s in shapes], [grid_noise(1.0)] * 5
            ),
            jit_compile=True,
        )
        keys = [[1, 2], [2, 2], [1 + 2**32, 2], [1, 2 + 2**40], [1, 2 + 2**20]]
        drawn = [
            np.ravel(z) for k in keys for z in step(tf.constant(k, tf.int64))
        ]
        count = len(keys) * (7 + 101 + 100 + 50 + 1)
        # Two of so many numbers may round to the same one.
        assert np.unique(np.concatenate(drawn)).size > count - 3

    def test_draws_as_a_whole_where_xla_compiles(self, on_cpu, monkeypatch):
        monkeypatch.setattr(noise, "COMPILED", 1000)
        monkeypatch.setattr(noise, "PIECE", 1000)

        def loops(jit_compile):
            step = tf.function(
                lambda: noise.noisy(
                    KEY, [tf.zeros([NUMBERS])], [grid_noise(1.0)]
                ),
                jit_compile=jit_compile,
            )
            graph = step.get_concrete_function().graph
            assert_standard_normal(step()[0])
            return any("While" in op.type for op in graph.get_operations())

        assert loops(False) and not loops(True)

    def test_compiled_program_keeps_no_counter(self):
        """What a program stores does not grow with the numbers it draws."""

        def length(count):
            step = tf.function(
                lambda key: noise.noisy(
                    key, [tf.zeros([count])], [grid_noise(1.0)]
                ),
                jit_compile=True,
            )
            program = step.experimental_get_compiler_ir(KEY)
            return len(program(stage="stablehlo"))

        # A stored number takes eight characters.
        assert length(2**20) < length(2**16) + 2**17

    @pytest.mark.parametrize("count", [0, 1, 4095, 4096, 4097, 10_000])
    def test_numbers_are_consecutive(self, count):
        begin = tf.constant(2**32 - 5, tf.uint32)
        numbers = noise._numbers_from(begin, count).numpy()
        expected = (2**32 - 5 + np.arange(count)) % 2**32
        np.testing.assert_array_equal(numbers, expected)

    def test_secure_draws_are_of_the_system(self, monkeypatch):
        """128 bits a number; all ones choose the last entry, and its alias."""
        sizes = []

        def ones(count):
            sizes.append(count)
            return b"\xff" * count

        monkeypatch.setattr(secrets, "token_bytes", ones)
        (z,) = draw([[3]], secure=True)
        assert sum(sizes) == 3 * 16
        assert np.isfinite(z).all() and np.unique(z).size == 1


def advanced(key, steps):
    return [tuple(key.advance().numpy()) for _ in range(steps)]


class TestNoiseKey:
    def test_a_forked_process_is_refused(self, monkeypatch):
        secret, known = noise.NoiseKey(), noise.NoiseKey(3)
        secret.require_own_process()
        monkeypatch.setattr(noise.os, "getpid", lambda: -1)
        known.require_own_process()
        with pytest.raises(RuntimeError, match="forked from it.*spawn"):
            secret.advance()

    def test_never_repeats(self):
        keys = advanced(noise.NoiseKey(), 1000)
        assert len(set(keys)) == 1000
        # Nor a half of it.
        assert len({half for key in keys for half in key}) == 2000

    def test_has_64_bits_in_each_half(self):
        keys = np.array([advanced(noise.NoiseKey(), 1)[0] for _ in range(50)])
        assert (np.abs(keys) > 2**33).mean() > 0.9
        entropy = np.stack(
            [noise.NoiseKey()._variable.numpy() for _ in range(50)]
        )
        assert np.unique(entropy).size == 100
        # Every bit of the entropy is both 0 and 1.
        bits = (
            entropy.view(np.uint64)[..., None] >> np.arange(64, dtype="u8")
        ) & 1
        assert (bits.min((0, 1)) == 0).all() and (bits.max((0, 1)) == 1).all()

    def test_is_fresh_whatever_the_global_seeds(self):
        keys = []
        for _ in range(2):
            keras.utils.set_random_seed(0)
            tf.random.set_seed(0)
            keys += advanced(noise.NoiseKey(), 2)
        assert len(set(keys)) == 4

    def test_is_reproducible_with_a_seed(self):
        assert advanced(noise.NoiseKey(3), 4) == advanced(noise.NoiseKey(3), 4)
        both = advanced(noise.NoiseKey(3), 4) + advanced(noise.NoiseKey(4), 4)
        assert len(set(both)) == 8

    def test_copies_have_other_keys(self):
        key = noise.NoiseKey()
        kept = pickle.dumps(key)
        own = key._variable.numpy()
        assert own.tobytes() not in kept
        copies = [pickle.loads(kept), pickle.loads(kept), copy.deepcopy(key)]
        used = [k for c in (key, *copies) for k in advanced(c, 2)]
        assert len(set(used)) == 8

    def test_copies_keep_a_seed(self):
        same = copy.deepcopy(noise.NoiseKey(3))
        assert advanced(same, 2) == advanced(noise.NoiseKey(3), 2)

    def test_does_not_tell_earlier_keys(self):
        """The state is neither the key that was used nor its seed."""
        key = noise.NoiseKey(3)
        before = tuple(key._variable.numpy())
        used = advanced(key, 1)[0]
        assert not set(key._variable.numpy()) & {*used, *before}

    def test_is_an_argument_of_a_traced_step(self):
        """A constant would be drawn from at every step, and be in a file."""
        key = noise.NoiseKey()
        start = set(key._variable.numpy())
        step = tf.function(key.advance)
        keys = [tuple(step().numpy()) for _ in range(3)]
        assert len(set(keys)) == 3
        secrets = start.union(*keys, key._variable.numpy())
        for node in step.get_concrete_function().graph.as_graph_def().node:
            if node.op == "Const":
                value = tf.make_ndarray(node.attr["value"].tensor)
                assert not secrets & set(np.ravel(value).tolist())

    def test_may_be_created_while_tracing(self):
        @tf.function
        def step():
            if not keys:
                keys.append(noise.NoiseKey(3))
            return keys[0].advance()

        keys = []
        traced = [tuple(step().numpy()) for _ in range(2)]
        assert traced == advanced(noise.NoiseKey(3), 2)

    def test_is_not_tracked(self):
        module = tf.Module()
        module.key = noise.NoiseKey()
        assert not module.variables
        layer = keras.layers.Layer()
        layer.key = noise.NoiseKey()
        assert not layer.variables

    @pytest.mark.slow
    def test_is_fresh_in_a_new_process(self):
        """Two processes, which have imported TensorFlow in common."""
        program = (
            "from tf_dpsub.primitives import noise\n"
            "import keras, os\n"
            "for _ in range(2):\n"
            "    process = os.fork()\n"
            "    if not process:\n"
            "        keras.utils.set_random_seed(0)\n"
            "        key = noise.NoiseKey().advance().numpy().tolist()\n"
            "        print(key, flush=True)\n"
            "        os._exit(0)\n"
            "    assert os.waitpid(process, 0)[1] == 0\n"
        )
        outputs = subprocess.run(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.splitlines()
        assert len(outputs) == 2
        assert all(output.startswith("[") for output in outputs)
        assert outputs[0] != outputs[1]
