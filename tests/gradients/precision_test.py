"""Products whose operands a GPU may round."""

import ast
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.gradients import tensor_cores
from tests.optimizers import hostile_steps
from tests.training.plain_models import X, Y, dpsgd, linear, private
from tf_dpsub import gradients, optimizers
from tf_dpsub.gradients import per_example, precision
from tf_dpsub.gradients import rows as rows_of_batch
from tf_dpsub.gradients.graph import convolutions, graph_gradients, sites
from tf_dpsub.subspaces import PublicSubspace

TF32 = tf.config.experimental


@pytest.fixture(autouse=True)
def switched_on():
    TF32.enable_tensor_float_32_execution(True)
    yield
    TF32.enable_tensor_float_32_execution(True)


def significant_bits(x, bits=11):
    """Numbers rounded to some significant bits, in float64."""
    mantissa, exponent = np.frexp(np.asarray(x, "float64"))
    scaled = mantissa * 2.0**bits
    halfway_away = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)
    return np.ldexp(halfway_away, exponent - bits)


class TestRounded:
    def test_has_eleven_bits(self, monkeypatch):
        tensor_cores.pretend_a_gpu(monkeypatch)
        random = np.random.default_rng(0)
        scales = 2.0 ** random.integers(-100, 100, 10_000)
        x = (scales * random.normal(size=10_000)).astype("float32")
        halfway = np.float32([1 + 2**-11, -1 - 2**-11, 1 + 2**-11 - 2**-23])
        x = np.concatenate([x, halfway, [0, -0.0, 2 - 2**-23]])
        x = x.astype("float32")
        rounded = precision.rounded(tf.constant(x)).numpy()
        np.testing.assert_array_equal(rounded, significant_bits(x))
        np.testing.assert_array_equal(
            precision.rounded(tf.constant(rounded)), rounded
        )

    def test_compiled(self, monkeypatch):
        """XLA takes no part of it for zero."""
        tensor_cores.pretend_a_gpu(monkeypatch)
        x = np.random.default_rng(0).normal(size=1000).astype("float32")
        compiled = tf.function(precision.rounded, jit_compile=True)
        np.testing.assert_array_equal(
            compiled(tf.constant(x)), significant_bits(x)
        )

    def test_what_is_not_finite_stays_so(self, monkeypatch):
        tensor_cores.pretend_a_gpu(monkeypatch)
        nans = np.uint32([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001])
        x = np.concatenate(
            [nans.view("float32"), np.float32([np.inf, -np.inf])]
        )
        assert not np.isfinite(precision.rounded(tf.constant(x))).any()
        largest = np.finfo("float32").max
        assert np.isinf(precision.rounded(tf.constant(largest)))

    @pytest.mark.parametrize("is_on", [False, True])
    def test_nothing_is_done_where_nothing_is_narrowed(
        self, monkeypatch, is_on
    ):
        """Without a GPU, or with full precision on one."""
        TF32.enable_tensor_float_32_execution(is_on)
        if not is_on:
            tensor_cores.pretend_a_gpu(monkeypatch)
        x = tf.constant([1 / 3])
        assert precision.rounded(x) is x
        calls = []
        precision.bilinear(lambda a, b: calls.append((a, b)), x, x)
        ((a, b),) = calls
        assert a is x and b is x
        assert precision.norm_margin(1000) == 0
        assert precision.bound(x) is x


class TestProducts:
    """They are float32's, whatever the GPU rounds."""

    def errors(self, monkeypatch, as_written=False):
        """Largest ones, as shares of the magnitudes that are added up."""
        tensor_cores.narrow(monkeypatch, as_written)
        random = np.random.default_rng(0)
        a, b = random.normal(size=(2, 40, 40)).astype("float32")
        column = b[:, 0]
        a64, b64 = a.astype("float64"), b.astype("float64")
        sizes = np.abs(a64) @ np.abs(b64)
        image = a[None, :, :, None]
        taps = b[:3, :3, None, None]
        patches = np.lib.stride_tricks.sliding_window_view(a64, (3, 3))
        of_taps = np.einsum("xyij,ij->xy", patches, b64[:3, :3])
        of_magnitudes = np.einsum(
            "xyij,ij->xy", np.abs(patches), np.abs(b64[:3, :3])
        )
        return {
            name: np.max(np.abs(result - exact) / magnitudes)
            for name, result, exact, magnitudes in (
                ("matmul", precision.matmul(a, b), a64 @ b64, sizes),
                (
                    "transposed",
                    precision.matmul(a.T, b.T, True, transpose_b=True),
                    a64 @ b64,
                    sizes,
                ),
                (
                    "einsum",
                    precision.einsum("ij,jk->ik", a, b),
                    a64 @ b64,
                    sizes,
                ),
                (
                    "matvec",
                    precision.matvec(a, column),
                    a64 @ b64[:, 0],
                    sizes[:, 0],
                ),
                (
                    "convolution",
                    precision.bilinear(
                        lambda x, f: tf.nn.conv2d(x, f, 1, "VALID"), image, taps
                    )[0, :, :, 0],
                    of_taps,
                    of_magnitudes,
                ),
            )
        }

    def test_taken_apart(self, monkeypatch):
        for name, error in self.errors(monkeypatch).items():
            assert error < 2**-22, name

    def test_as_written_they_are_narrow(self, monkeypatch):
        errors = self.errors(monkeypatch, as_written=True)
        for name, error in errors.items():
            assert error > 2**-14, name

    def test_of_rounded_numbers_is_one(self, monkeypatch):
        tensor_cores.pretend_a_gpu(monkeypatch)
        calls = []

        def product(a, b):
            calls.append((a, b))
            return a * b

        a = precision.rounded(tf.constant([1 / 3]))
        b = tf.constant([0.7])
        for short, count in (((True, True), 1), ((True, False), 2)):
            calls.clear()
            precision.bilinear(product, a, b, short)
            assert len(calls) == count

    def test_other_types_are_left_alone(self, monkeypatch):
        tensor_cores.pretend_a_gpu(monkeypatch)
        x = tf.constant([[1 / 3]], tf.float64)
        assert precision.rounded(x) is x
        assert precision.matmul(x, x).numpy() == (1 / 3) ** 2


def cut(x):
    """Float32 numbers, rounded towards zero from float64."""
    nearest = np.float32(x)
    too_far = np.abs(nearest.astype("float64")) > np.abs(x)
    return np.where(too_far, np.nextafter(nearest, np.float32(0)), nearest)


def added_by_fours(a, b):
    """`sum(a * b)` over axis 0, four products at a time, rounded to zero."""
    total = np.zeros(a.shape[1:], "float32")
    for k in range(0, len(a), 4):
        products = a[k : k + 4].astype("float64") * b[k : k + 4]
        total = cut(total + products.sum(0))
    return total


@pytest.mark.parametrize("terms", [64, 1024, 8192])
def test_norms_have_room_for_sums_rounded_to_zero(monkeypatch, terms):
    """Also of sums in which every addition loses something."""
    tensor_cores.pretend_a_gpu(monkeypatch)
    random = np.random.default_rng(0)
    lost = []
    for offset in (0.0, 1.0):
        a = (offset + random.uniform(size=(terms, 500))).astype("float32")
        a = significant_bits(a).astype("float32")
        exact = np.square(a.astype("float64")).sum(0)
        lost.append((exact - added_by_fours(a, a)) / exact)
    margin = precision.norm_margin(terms)
    assert np.max(lost) < margin
    # It is no larger than it has to be, either.
    assert np.max(lost) > margin / 8


class TestSums:
    @pytest.mark.parametrize("model", hostile_steps.MODELS)
    @pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
    def test_move_by_at_most_the_clip(self, monkeypatch, model, dtype):
        tensor_cores.narrow(monkeypatch)
        step = hostile_steps.build_step(model, dtype)
        reached = hostile_steps.check_sensitivity(step)
        share, valid = reached["aligned"]
        assert valid and share > 0.99

    def test_compiled_move_by_at_most_the_clip(self, monkeypatch):
        tensor_cores.narrow(monkeypatch)
        step = hostile_steps.build_step(
            hostile_steps.dense_by_gram, "float32", jit_compile=True
        )
        hostile_steps.check_sensitivity(step)

    def test_of_rows_move_by_at_most_the_clip(self, monkeypatch):
        tensor_cores.narrow(monkeypatch)
        step = hostile_steps.build_step(
            hostile_steps.dense_by_rows, "float32", "vectorized_map"
        )
        hostile_steps.check_sensitivity(step)

    @pytest.mark.parametrize("as_written", [False, True])
    def test_of_terms_that_nearly_cancel(self, monkeypatch, as_written):
        """As they are written, TensorFloat-32 breaks the clip.

        All terms are multiples of one matrix, so that what rounding does to
        one entry of them it does to all.
        """
        tensor_cores.narrow(monkeypatch, as_written)
        tensor_cores.merge_terms(monkeypatch)
        if as_written:
            monkeypatch.setattr(precision, "gram_margin", lambda *_: 0.0)
        # What terms cancel limits the factor of a row, for its sum with others.
        monkeypatch.setattr(
            graph_gradients.GraphGradients,
            "sq_levels",
            per_example.PerExampleGradients.sq_levels,
        )

        def model(dtype):
            layer = keras.layers.Dense(32, use_bias=False, dtype=dtype)
            return keras.Sequential([keras.Input((4, 32)), layer])

        clips = np.geomspace(1.0, 1.93, 12)
        steps = hostile_steps.build_steps(
            model, "float32", [{"l2_norm_clip": float(c)} for c in clips]
        )
        x = np.zeros([hostile_steps.BATCH, 4, 32], "float32")
        keep = np.ones(hostile_steps.BATCH)
        x[0] = 1
        t = np.zeros_like(x)
        reached = []
        for numerator in range(927, 990, 18):
            # In 11 bits, all of them: the norm is exact.
            share = numerator / 1024
            t[0] = np.float32([1, 1, -share, -share])[:, None]
            for step, clip in zip(steps, clips):
                total, valid = step(x, t, keep)
                assert valid.all()
                reached.append(np.linalg.norm(total) / clip)
        if as_written:
            assert max(reached) > 1.002
        else:
            assert max(reached) < 1
            assert min(reached) > 0.98


class TestLongSums:
    """What is added to a sum below a power of two is not lost; above, it is."""

    def moved(self, model, rows):
        """By one example, as a share of its norm, where none has a larger."""

        @tf.function(autograph=False)
        def summed(x, t, keep):
            gradients_of_rows, _ = gradients.per_example_gradients(
                lambda batch: (
                    tf.reduce_sum(
                        model(batch["x"], training=True) * batch["t"], [1, 2]
                    ),
                    None,
                ),
                {"x": x, "t": t},
                model.trainable_variables,
                "graph",
            )
            return gradients_of_rows.weighted_sum(keep)[0]

        x = np.zeros([rows, *model.inputs[0].shape[1:]], model.inputs[0].dtype)
        if x.ndim == 3:
            x[:, :, 0] = 1
        power = 2.0 ** np.floor(np.log2(rows / 2))
        first = int(power / 0.9) + 1
        t = np.zeros([rows, *model.outputs[0].shape[1:]], "float32")
        t[:first, 0, 0] = 0.9
        t[first - 1, 0, 0] = power - 0.9 * (first - 1) - 0.25
        t[first, 0, 0] = 1  # the example
        # Just less than half of the spacing of floats above the power.
        t[first + 1 :, :, 0] = -0.4902 * power * 2.0**-23
        keep = np.ones(rows, "float32")
        with_it = summed(x, t, keep).numpy()
        keep[first] = 0
        return np.linalg.norm(with_it - summed(x, t, keep))

    def dense(self, monkeypatch, rows, terms):
        monkeypatch.setattr(rows_of_batch, "MOST_MERGED_TERMS", terms)
        monkeypatch.setattr(rows_of_batch, "_NARROW", 1)
        tensor_cores.merge_terms(monkeypatch)
        # Rows of small kernels would be kept, and added up without their terms.
        monkeypatch.setattr(sites, "KEPT_ROWS", 0)
        layer = keras.layers.Dense(2, use_bias=False)
        model = keras.Sequential([keras.Input((terms, 2)), layer])
        return self.moved(model, rows)

    @pytest.mark.parametrize("is_limited", [True, False])
    def test_on_a_gpu(self, monkeypatch, is_limited):
        tensor_cores.pretend_a_gpu(monkeypatch)
        TF32.enable_tensor_float_32_execution(False)
        monkeypatch.setattr(
            precision, "bilinear", tensor_cores.one_after_another
        )
        if not is_limited:
            monkeypatch.setattr(precision, "_LONGEST_SUM_ON_GPU", 2**30)
        moved = self.dense(monkeypatch, 96, 300)
        assert abs(moved - 1) < 1e-3 if is_limited else moved > 1.002

    def test_parts_add_up(self, monkeypatch):
        """Of rows that they do not divide, in groups."""
        monkeypatch.setattr(sites, "KEPT_ROWS", 0)
        tensor_cores.merge_terms(monkeypatch)
        monkeypatch.setattr(rows_of_batch, "_NARROW", 1)
        layer = keras.layers.EinsumDense("btgd,gde->btge", (None, 3, 5))
        model = keras.Sequential([keras.Input((8, 3, 4)), layer])
        random = np.random.default_rng(0)
        x = random.normal(size=(10, 8, 3, 4)).astype("float32")
        t = random.normal(size=(10, 8, 3, 5)).astype("float32")
        c = tf.constant(random.uniform(size=10), tf.float32)

        def total():
            rows, _ = gradients.per_example_gradients(
                lambda batch: (
                    tf.reduce_sum(model(batch["x"]) * batch["t"], [1, 2, 3]),
                    None,
                ),
                {"x": tf.constant(x), "t": tf.constant(t)},
                model.trainable_variables,
                "graph",
            )
            return rows.weighted_sum(c)[0]

        whole = tf.function(total, autograph=False)()
        monkeypatch.setattr(precision, "_LONGEST_SUM", 8 * 3)
        parts = tf.function(total, autograph=False)
        graph = parts.get_concrete_function().graph
        assert any("While" in op.type for op in graph.get_operations())
        np.testing.assert_allclose(parts(), whole, rtol=1e-5, atol=1e-6)

    def test_of_a_convolution_are_those_of_rows(self, monkeypatch):
        monkeypatch.setattr(sites, "KEPT_ROWS", 0)
        monkeypatch.setattr(convolutions, "KEPT_TIMES", 0)
        step = hostile_steps.build_step(hostile_steps.conv, "float32")
        random = np.random.default_rng(0)
        batch = *step.ordinary(random), np.ones(hostile_steps.BATCH)
        whole, _ = step(*batch)
        monkeypatch.setattr(precision, "_LONGEST_SUM", 20)
        formed = []
        monkeypatch.setattr(
            sites,
            "_weighted_sum",
            lambda c, rows, of=sites._weighted_sum: (
                formed.append(rows.shape) or of(c, rows)
            ),
        )
        step = hostile_steps.build_step(hostile_steps.conv, "float32")
        parts, _ = step(*batch)
        # Those of the filter, and of the bias.
        assert len(formed) > 1
        hostile_steps.check_sensitivity(step)
        # The loss is linear, so that weights do not matter. More is left of the
        # clip for rounding where terms of all rows are added up together.
        parts, whole = (s / np.linalg.norm(s) for s in (parts, whole))
        np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-6)

    def test_of_a_table(self):
        """One entry of it gets all, one after another, on any device."""
        tokens = keras.Input((300,), dtype="int32")
        table = keras.layers.Embedding(40, 300)
        model = keras.Model(tokens, table(tokens))
        assert abs(self.moved(model, 96) - 1) < 1e-3


PACKAGE = pathlib.Path(precision.__file__).parents[1]
MULTIPLIED = {"matmul", "einsum", "tensordot", "matvec"}


@pytest.mark.parametrize("folder", ["gradients", "subspaces"])
def test_no_product_is_as_written(folder):
    """Where norms, sums and bases come from, all are of one module."""
    count = 0
    for file in (PACKAGE / folder).rglob("*.py"):
        if file.samefile(precision.__file__):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            # Of NumPy's arrays.
            is_numpy = file.name == "fixed_subspace.py"
            assert not isinstance(node, ast.MatMult) or is_numpy, file
            if isinstance(node, ast.Attribute) and node.attr in MULTIPLIED:
                assert ast.unparse(node.value) == "precision", (
                    f"{file}:{node.lineno}"
                )
                count += 1
    assert count > 5


def test_xla_on_a_cpu_narrows_nothing():
    """Nothing is done about TensorFloat-32 there, which may be on."""
    TF32.enable_tensor_float_32_execution(True)
    a, b = np.random.default_rng(0).normal(size=(2, 64, 64)).astype("float32")
    product = tf.function(tf.matmul, jit_compile=True)(a, b)
    a, b = a.astype("float64"), b.astype("float64")
    error = np.abs(product - a @ b) / (np.abs(a) @ np.abs(b))
    assert np.max(error) < 2**-20


class TestSwitch:
    def test_stays_as_it_was(self):
        """The process may have other uses for it."""
        for is_on in (True, False):
            TF32.enable_tensor_float_32_execution(is_on)
            private(linear(), dpsgd()).fit(X, Y, verbose=0)
            assert TF32.tensor_float_32_execution_enabled() is is_on

    def test_of_programs_for_other_devices(self, monkeypatch):
        tensor_cores.pretend_a_gpu(monkeypatch)
        with precision.tensor_float_32(False):
            assert not precision.narrowed()
            assert not TF32.tensor_float_32_execution_enabled()
        assert precision.narrowed()
        precision.require_as_traced()

    def test_is_off_on_other_devices(self, monkeypatch):
        devices = [tf.config.PhysicalDevice("a", "CPU")]
        for kind, is_on in (("GPU", True), ("TPU", False)):
            devices.append(tf.config.PhysicalDevice("b", kind))
            monkeypatch.setattr(
                tf.config,
                "get_visible_devices",
                lambda kind=None: [
                    d for d in devices if kind in (None, d.device_type)
                ],
            )
            precision.require_as_traced()
            assert TF32.tensor_float_32_execution_enabled() is is_on
            assert precision.narrowed() is is_on

    def test_turned_on_after_a_trace(self, monkeypatch):
        tensor_cores.pretend_a_gpu(monkeypatch)
        TF32.enable_tensor_float_32_execution(False)
        model = private(linear(), dpsgd())
        model.fit(X, Y, verbose=0)
        steps = model.ledger.steps
        TF32.enable_tensor_float_32_execution(True)
        with pytest.raises(ValueError, match="TensorFloat-32 to stay off"):
            model.fit(X, Y, verbose=0)
        assert model.ledger.steps == steps
        TF32.enable_tensor_float_32_execution(False)
        model.fit(X, Y, verbose=0)
        assert model.ledger.steps > steps

    def test_replicas_trace_with_it(self, monkeypatch):
        """Each in a thread of its own, while others may be checked."""
        tensor_cores.pretend_a_gpu(monkeypatch)
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            model = private(linear(), dpsgd())
        model.fit(X, Y, verbose=0)
        assert not precision._traced_as_is
        model.fit(X, Y, verbose=0)

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_steps_train(self, monkeypatch, jit_compile):
        """Also those of the longest sums, in parts."""
        tensor_cores.pretend_a_gpu(monkeypatch)
        monkeypatch.setattr(sites, "KEPT_ROWS", 0)
        monkeypatch.setattr(precision, "_LONGEST_SUM_ON_GPU", 16)
        random = np.random.default_rng(0)
        x = random.normal(size=(24, 6, 6, 2)).astype("float32")
        y = random.integers(0, 3, 24)
        plain = keras.Sequential(
            [
                keras.Input((6, 6, 2)),
                keras.layers.Dense(4),
                keras.layers.Conv2D(4, 3, strides=2),
                keras.layers.Flatten(),
                keras.layers.Dense(3),
            ]
        )
        subspace = PublicSubspace(x[:8], y[:8], rank=4, allow_private=True)
        optimizer = optimizers.GEP(
            keras.optimizers.SGD(0.1),
            subspace=subspace,
            l2_norm_clip=1.0,
            residual_norm_clip=0.5,
            noise_multiplier=1.0,
            batch_size=8,
        )
        model = tf_dpsub.make_private(plain)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=jit_compile)
        before = [v.numpy() for v in model.trainable_variables]
        model.fit(x, y, verbose=0)
        assert model.ledger.steps == 3
        for old, new in zip(before, model.trainable_variables):
            assert np.isfinite(new.numpy()).all()
            assert np.any(new.numpy() != old)

    def test_turned_off_after_a_trace(self, monkeypatch):
        """Products in parts are as precise without it."""
        tensor_cores.pretend_a_gpu(monkeypatch)
        model = private(linear(), dpsgd())
        model.fit(X, Y, verbose=0)
        TF32.enable_tensor_float_32_execution(False)
        model.fit(X, Y, verbose=0)


class TestParts:
    """Sums of at most so many float32 products are added up in float64."""

    @pytest.mark.parametrize("transpose_b", [False, True])
    @pytest.mark.parametrize("transpose_a", [False, True])
    @pytest.mark.parametrize("count", [5, 64, 65, 300, 2000])
    def test_are_a_product(self, count, transpose_a, transpose_b):
        rng = np.random.default_rng(0)
        a, b = rng.normal(size=(2, 3, 4, count)).astype("float32")
        expected = a.astype("float64") @ np.swapaxes(b, 1, 2)
        if transpose_a:
            a = np.swapaxes(a, 1, 2)
        if not transpose_b:
            b = np.swapaxes(b, 1, 2)
        found = precision.matmul_in_parts(
            tf.constant(a),
            tf.constant(b),
            transpose_a,
            transpose_b,
            longest=64,
            dtype=tf.float64,
        )
        assert found.dtype == tf.float64
        np.testing.assert_allclose(found, expected, atol=64 * 2.0**-20)

    @pytest.mark.parametrize(
        "function", [precision.matmul_in_parts, rows_of_batch.outer_sums]
    )
    def test_round_little_in_any_order(self, function, monkeypatch):
        """Each of many small products is lost beside the first."""
        monkeypatch.setattr(precision, "bilinear", tensor_cores.all_in_order)
        count = 2**14
        terms = np.full([1, count, 8], 0.49 * 2.0**-23, "float32")
        terms[:, 0] = 1
        ones = np.ones([1, count, 8], "float32")
        found = function(
            *map(tf.constant, (terms, ones)), **_TRANSPOSED[function]
        )
        exact = terms[0, :, 0].sum(dtype="float64")
        error = np.max(np.abs(found - exact))
        # All of them, in one sum: 2^-11.
        assert error <= 2.0**-14


_TRANSPOSED = {
    precision.matmul_in_parts: {"transpose_a": True},
    rows_of_batch.outer_sums: {},
}
