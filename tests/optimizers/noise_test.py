"""Noise is Gaussian, fresh, and its key is nowhere but in memory."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tf_dpsub.optimizers import noise

# The statistics are of fixed keys: they do not fail by chance.
KEY = tf.constant([1, 2], tf.int64)
NUMBERS = 200_000


def draw(shapes, stddevs=None, key=KEY, secure=False):
    stddevs = [1.0] * len(shapes) if stddevs is None else stddevs
    draws = noise.gaussian(key, shapes, stddevs, secure)
    assert [z.shape for z in draws] == [tf.TensorShape(s) for s in shapes]
    assert {z.dtype for z in draws} == {tf.float32}
    return [z.numpy() for z in draws]


@pytest.fixture
def system(monkeypatch):
    """The generator of the system, made reproducible."""
    monkeypatch.setattr(os, "urandom", np.random.default_rng(0).bytes)


@pytest.fixture
def on_cpu(monkeypatch):
    """What a machine without a GPU does."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])


def assert_standard_normal(z, level=1e-4):
    """Mean, variance, kurtosis, tails and the whole distribution."""
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
        found = np.count_nonzero(np.abs(z) > bound)
        assert stats.binom.cdf(found, z.size, expected) > level
        assert stats.binom.sf(found - 1, z.size, expected) > level


class TestGaussian:
    @pytest.mark.parametrize("secure", [False, True])
    def test_is_standard_normal(self, secure, system):
        (z,) = draw([[NUMBERS]], secure=secure)
        assert_standard_normal(z)

    @pytest.mark.parametrize("secure", [False, True])
    def test_every_tensor_has_its_own_stddev(self, secure, system):
        stddevs = [1e-3, 1.0, 50.0, 0.0]
        draws = draw(
            [[100, 50], [5000], [10, 10, 50], [7]], stddevs, KEY, secure
        )
        for z, stddev in zip(draws[:-1], stddevs):
            assert_standard_normal(z / stddev)
        np.testing.assert_array_equal(draws[-1], np.zeros(7))

    @pytest.mark.parametrize("secure", [False, True])
    def test_tensors_are_independent(self, secure, system):
        draws = np.stack(draw([[20_000]] * 4, secure=secure))
        correlations = np.corrcoef(draws) - np.eye(4)
        assert np.abs(correlations).max() < 5.5 / np.sqrt(20_000)

    @pytest.mark.parametrize("secure", [False, True])
    def test_any_shape(self, secure):
        draws = draw([[], [1], [2, 0], [3, 4]], secure=secure)
        assert draws[0] != draws[1][0]

    @pytest.mark.parametrize("secure", [False, True])
    def test_shapes_of_variables(self, secure):
        """Shapes come as `tf.TensorShape`, in a traced step too."""
        variable = keras.Variable(np.zeros([3, 4], "float32"))

        @tf.function
        def traced():
            return noise.gaussian(KEY, [variable.value.shape], [1.0], secure)

        (z,) = traced()
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
        step = wrap(lambda: noise.gaussian(KEY, [[5]], [1.0], secure=True))
        (first,), (other,) = step(), step()
        assert not np.isin(first, other).any()

    @pytest.mark.parametrize("bits", [0, 2**31 - 1, -(2**31)])
    def test_two_draws_reach_beyond_the_tail_of_one(self, bits, monkeypatch):
        """One draw of TensorFlow never exceeds 5.678."""

        def equal(shape, key, *args):
            return tf.fill(shape, tf.constant(bits, tf.int32))

        monkeypatch.setattr(tf.random, "stateless_uniform", equal)
        largest = 2**0.5 * np.sqrt(2 * 32 * np.log(2)) if bits == 0 else 0
        # Numbers of a pair are the cosine and the sine.
        np.testing.assert_allclose(draw([[2]])[0], [largest, 0], atol=1e-6)

    def test_each_number_has_two_draws_of_its_own_bits(self, monkeypatch):
        """Each of the four uniforms changes both numbers of a pair."""
        generator = np.random.default_rng(0)
        uniforms = generator.integers(-(2**31), 2**31, [4, 50], np.int32)
        given = uniforms.copy()

        def uniform(shape, key, *args):
            assert shape == [4, 50]
            return tf.constant(given)

        monkeypatch.setattr(tf.random, "stateless_uniform", uniform)
        (z,) = draw([[100]])
        for k in range(4):
            given = uniforms.copy()
            given[k] = np.roll(given[k], 1)
            assert not np.isclose(draw([[100]])[0], z, rtol=1e-6).any()

    @pytest.mark.parametrize("is_compiled", [False, True])
    def test_draws_in_pieces(self, is_compiled, on_cpu, monkeypatch):
        """No piece repeats another, whether tensors share it or fill many."""
        monkeypatch.setattr(noise, "AT_ONCE", 1000)
        monkeypatch.setattr(noise, "PIECE", 1000)
        monkeypatch.setattr(noise, "COMPILED", 182_397 + (not is_compiled))
        shapes = [[7], [90_500], [990], [30, 30], [300, 300]]
        draws = [np.ravel(z) for z in draw(shapes)]
        for z in (*draws[1::3], np.concatenate(draws)):
            assert_standard_normal(z)
        assert np.unique(np.concatenate(draws)).size > 0.99 * 182_397
        pieces = np.concatenate(draws)[: 182 * 1000].reshape(182, 1000)
        correlations = np.corrcoef(pieces) - np.eye(182)
        assert np.abs(correlations).max() < 6 / np.sqrt(1000)

    def test_only_much_noise_is_compiled(self, on_cpu, monkeypatch):
        """For little, the memory that XLA takes is not worth its speed."""
        monkeypatch.setattr(noise, "AT_ONCE", 10)
        monkeypatch.setattr(noise, "PIECE", 10)
        monkeypatch.setattr(noise, "COMPILED", 100)

        def compiles(counts):
            step = tf.function(
                lambda: noise.gaussian(KEY, counts, [1.0] * len(counts))
            )
            graph = step.get_concrete_function().graph.as_graph_def()
            return any(
                "_XlaMustCompile" in function.attr
                and function.attr["_XlaMustCompile"].b
                for function in graph.library.function
            )

        assert compiles([[50], [50]]) and not compiles([[50], [49]])

    @pytest.mark.parametrize("bits", [0, 2**31 - 1, -(2**31)])
    def test_two_compiled_draws_reach_beyond_the_tail_of_one(
        self, bits, monkeypatch
    ):
        def equal(key, count, blocks):
            word = tf.fill([count], tf.constant(bits, tf.int32))
            return [(word, word)] * blocks

        monkeypatch.setattr(noise, "_threefry_blocks", equal)
        largest = 2**0.5 * np.sqrt(2 * 32 * np.log(2)) if bits == 0 else 0
        compiled = tf.function(noise._pairs, jit_compile=True, autograph=False)
        np.testing.assert_allclose(compiled(KEY, 1), [largest], atol=1e-6)

    def test_every_bit_of_a_compiled_piece_s_key_counts(self):
        """128 secret bits, in two words, of which neither is cut."""
        keys = np.zeros([129, 2], np.uint64)
        for k in range(128):
            keys[k + 1, k // 64] = np.uint64(1) << np.uint64(k % 64)
        draws = [
            noise._sums_of_two_by_xla(key.view(np.int64), 6).numpy()
            for key in keys
        ]
        assert np.unique(draws, axis=0).shape == (129, 6)

    def test_no_block_is_encrypted_twice(self):
        """Even where the words of the counter begin at their last values."""
        count = 2**16
        for begin in (0, 2**32 - 1, 2**32 - 2**15):
            words = np.array([1, 2, begin, begin], np.uint32)
            key = tf.constant(words.view(np.int64))
            found = tf.function(
                lambda key: list(noise._threefry_blocks(key, count, 2)),
                jit_compile=True,
                autograph=False,
            )(key)
            blocks = np.array(found).transpose(0, 2, 1).reshape(-1, 2)
            # They are encrypted one to one.
            assert len(np.unique(blocks, axis=0)) == 2 * count

    def test_more_numbers_than_the_counter_counts(self):
        with pytest.raises(
            ValueError, match=r"at most 2\^32 .*, got 4,294,967,"
        ):
            noise._pairs(KEY, 2**32 + 1)

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_polynomials_are_cosine_and_sine(self, jit_compile):
        directions = np.random.default_rng(0).integers(
            -(2**31), 2**31, 100_000, np.int32
        )
        # Where a quadrant begins or ends.
        edges = np.arange(-8, 8) * 2**28
        directions[:48] = np.ravel([edges - 1, edges, edges + 1]).clip(-(2**31))
        directions[48] = 2**31 - 1
        found = tf.function(
            noise._cosine_and_sine_by_polynomials, jit_compile=jit_compile
        )(tf.constant(directions))
        angle = np.pi * 2.0**-31 * directions
        np.testing.assert_allclose(
            found, [np.cos(angle), np.sin(angle)], rtol=0, atol=2e-7
        )

    def test_every_number_is_drawn_once_where_xla_compiles(self, monkeypatch):
        """Of each tensor, large or small, and of each key."""
        monkeypatch.setattr(noise, "AT_ONCE", 50)
        shapes = [[7], [101], [10, 10], [50], []]
        step = tf.function(
            lambda key: noise.gaussian(key, shapes, [1.0] * 5),
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
        monkeypatch.setattr(noise, "AT_ONCE", 1000)

        def loops(jit_compile):
            step = tf.function(
                lambda: noise.gaussian(KEY, [[NUMBERS]], [1.0]),
                jit_compile=jit_compile,
            )
            graph = step.get_concrete_function().graph
            assert_standard_normal(step()[0])
            return any("While" in op.type for op in graph.get_operations())

        assert loops(False) and not loops(True)

    def test_secure_draws_use_all_bits_of_the_system(self, monkeypatch):
        """Four draws of 53 bits each: up to 8.57 standard deviations."""
        asked = []

        def ones(count):
            asked.append(count)
            return b"\xff" * count

        monkeypatch.setattr(os, "urandom", ones)
        (z,) = draw([[3]], secure=True)
        assert sum(asked) >= 3 * 4 * 8
        # Both uniforms are 1 - 2^-53: radius sqrt(2 * 53 ln 2), angle 2 pi.
        np.testing.assert_allclose(z, np.sqrt(2 * 53 * np.log(2)), rtol=1e-6)

    def test_secure_draw_of_zeros_is_finite(self, monkeypatch):
        monkeypatch.setattr(os, "urandom", bytes)
        assert np.isfinite(draw([[3]], secure=True)[0]).all()


def advanced(key, steps):
    return [tuple(key.advance().numpy()) for _ in range(steps)]


class TestNoiseKey:
    def test_never_repeats(self):
        keys = advanced(noise.NoiseKey(), 1000)
        assert len(set(keys)) == 1000
        # Nor a half of it.
        assert len({half for key in keys for half in key}) == 2000

    def test_has_64_bits_in_each_half(self):
        keys = np.array([advanced(noise.NoiseKey(), 1)[0] for _ in range(50)])
        assert (np.abs(keys) > 2**33).mean() > 0.9
        own = np.stack([noise.NoiseKey()._variable.numpy() for _ in range(50)])
        assert np.unique(own).size == 100
        # Every bit of the entropy is both 0 and 1.
        bits = (own.view(np.uint64)[..., None] >> np.arange(64, dtype="u8")) & 1
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

    def test_does_not_tell_earlier_keys(self):
        """What is kept is neither the key that was used nor its seed."""
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
        program = (
            "from tf_dpsub.optimizers import noise\n"
            "import keras\n"
            "keras.utils.set_random_seed(0)\n"
            "print(noise.NoiseKey().advance().numpy().tolist())\n"
        )
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        outputs = [process.communicate()[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
        assert all(output.startswith("[") for output in outputs)
        assert outputs[0] != outputs[1]
