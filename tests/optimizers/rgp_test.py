"""RGP: carriers are released, kernels are trained."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.optimizers import hostile_steps
from tests.optimizers.rgp_models import (
    BATCH,
    LOSS,
    RANK,
    X,
    Y,
    assert_orthonormal,
    carriers,
    factors,
    network,
    private,
    rgp,
    small_network,
)
from tf_dpsub import gradients, layers
from tf_dpsub.optimizers import DPSGD, RGP

_random = np.random.default_rng(0)


def kernel(model, name):
    own = carriers(model)[name]
    return own.matrix(tf.constant(own.kernel.numpy())).numpy()


def true_gradients(model):
    variables = [v.value for v in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = LOSS(Y, model.model(X, training=True))
    return [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]


def step(model):
    """The gradients that the inner optimizer got, with rate 1."""
    before = model.get_weights()
    model.train_on_batch(X, Y)
    return [a - b for a, b in zip(before, model.get_weights())]


def by_kernel(model, tensors):
    """Matrices of the kernels that have carriers."""
    of = {id(c.kernel): (n, c) for n, c in carriers(model).items()}
    return {
        of[id(v)][0]: of[id(v)][1].matrix(tf.constant(t)).numpy()
        for v, t in zip(model.trainable_variables, tensors)
        if id(v) in of
    }


def prepared(optimizer, **arguments):
    """A model whose carriers are made, without a step."""
    model = private(optimizer, **arguments)
    model.optimizer.build_for(model)
    model.optimizer.prepare()
    return model


@pytest.fixture(name="whole_step", scope="module")
def _whole_step():
    """A model, its gradients before its one step, and those of that step."""
    model = private(rgp())
    expected = true_gradients(model)
    return model, expected, step(model)


@pytest.fixture(name="clipped_step", scope="module")
def _clipped_step():
    """The gradients of a step with a clip, which is not compiled."""
    model = private(
        rgp(l2_norm_clip=0.1, per_example="graph"), jit_compile=False
    )
    found = step(model)
    assert not model.training_step.is_compiled
    return found


class TestGradient:
    def test_is_projected_on_columns_of_l_and_rows_of_r(self, whole_step):
        model, expected, found = whole_step
        expected, found = (by_kernel(model, g) for g in (expected, found))
        assert len(found) == 4 + 1 + 1 + 1
        for name, own in carriers(model).items():
            left, right = factors(own)
            gradient = expected[name]
            inside = left @ left.T @ gradient
            inside += (gradient - inside) @ right.T @ right
            np.testing.assert_allclose(found[name], inside, atol=1e-6)

    @pytest.mark.parametrize("rank", [2, 8])
    def test_the_common_part_counts_once(self, rank):
        """A wrong sign in the gradient would count it three times."""
        model = small_network()
        layers.reparametrize(model, rank, include=["hidden"])
        model = private(rgp(), rank=None, model=model)
        gradient = by_kernel(model, true_gradients(model))["hidden"]
        found = by_kernel(model, step(model))["hidden"]
        left, right = factors(carriers(model)["hidden"])
        by_left, by_right = gradient @ right.T, left.T @ gradient
        both = by_left @ right + left @ by_right
        common = left @ (left.T @ by_left) @ right
        np.testing.assert_allclose(found, both - common, atol=1e-6)
        assert np.abs(found - (both + common)).max() > 1e-3
        if rank == 8:
            np.testing.assert_allclose(found, gradient, atol=1e-6)

    def test_projecting_again_changes_nothing(self, whole_step):
        model, _, found = whole_step
        found = by_kernel(model, found)
        for name, own in carriers(model).items():
            left, right = factors(own)
            once = found[name]
            inside = left @ left.T @ once
            twice = inside + (once - inside) @ right.T @ right
            np.testing.assert_allclose(twice, once, atol=1e-6)

    def test_is_the_true_one_at_full_rank(self):
        model = network()
        for layer in ("query", "key", "value", "output", "hidden"):
            layers.reparametrize(model, 8, include=[layer])
        layers.reparametrize(model, 6, include=["convolution"])
        layers.reparametrize(model, 3, include=["logits"])
        self.check_is_true(private(rgp(), rank=None, model=model))

    @pytest.mark.parametrize("kind", ["weight", "random"])
    def test_is_the_true_one_at_full_rank_of_other_carriers(self, kind):
        model = small_network()
        layers.reparametrize(model, 8, include=["hidden"])
        layers.reparametrize(model, 3, include=["logits"])
        self.check_is_true(private(rgp(carriers=kind), rank=None, model=model))

    def check_is_true(self, model):
        expected = true_gradients(model)
        for found, wanted in zip(step(model), expected):
            np.testing.assert_allclose(found, wanted, atol=2e-6)

    def test_other_weights_get_their_whole_gradient(self, whole_step):
        model, expected, found = whole_step
        names = {id(own.kernel) for own in carriers(model).values()}
        others = 0
        for v, a, b in zip(model.trainable_variables, found, expected):
            if id(v) not in names:
                np.testing.assert_allclose(a, b, atol=1e-6)
                others += 1
        assert others == len(expected) - 7

    def test_implementations_agree(self, clipped_step):
        """In microbatches, too."""
        self.check_is_same(
            private(
                rgp(
                    l2_norm_clip=0.1,
                    per_example="vectorized_map",
                    microbatch_size=5,
                ),
                jit_compile=False,
            ),
            clipped_step,
        )

    @pytest.mark.slow
    def test_compiles(self, clipped_step):
        model = private(
            rgp(l2_norm_clip=0.1, microbatch_size=5), jit_compile=True
        )
        self.check_is_same(model, clipped_step)
        assert model.training_step.is_compiled

    def check_is_same(self, model, expected):
        for a, b in zip(step(model), expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)

    def test_inner_optimizer_sees_whole_kernels_alone(self):
        model = prepared(rgp(keras.optimizers.Adam()))
        shapes = [tuple(v.shape) for v in model.trainable_variables]
        inner = model.optimizer.inner_optimizer
        assert inner._trainable_variables == model.trainable_variables
        assert [tuple(v.shape) for v in inner._momentums] == shapes


class TestRelease:
    def sums(self, model, rows, keep=None):
        keep = tf.ones([len(rows[0])]) if keep is None else keep
        stored = gradients.StoredGradients(
            model.optimizer.per_example_variables,
            [tf.constant(r, tf.float32) for r in rows],
        )
        sums = model.optimizer.clipped_sums(stored, tf.cast(keep, tf.float32))
        return np.concatenate([np.ravel(s) for s in sums]).astype("float64")

    def rows(self, model, scale=1.0):
        return [
            scale * _random.normal(size=[BATCH, *v.shape])
            for v in model.optimizer.per_example_variables
        ]

    def test_is_as_small_as_the_carriers(self):
        model = prepared(rgp())
        released = sum(np.prod(s) for s in model.optimizer.sum_shapes())
        parts = carriers(model).values()
        kernels = sum(own.inputs * own.outputs for own in parts)
        assert released == model.count_params() - kernels + sum(
            RANK * (own.inputs + own.outputs) for own in parts
        )

    def test_one_example_moves_it_by_the_clip(self):
        model = prepared(rgp(l2_norm_clip=0.7))
        for scale in (1e-30, 1e-6, 1.0, 1e6, 1e15, 1e25, np.inf, np.nan):
            rows = self.rows(model)
            for row in rows:
                row[3] *= scale
            keep = np.ones(BATCH)
            with_it = self.sums(model, rows, keep)
            keep[3] = 0
            moved = np.linalg.norm(with_it - self.sums(model, rows, keep))
            assert np.all(np.isfinite(with_it)), scale
            assert moved <= 0.7, scale
            if 1 <= scale <= 1e15:
                assert moved > 0.69, scale

    @pytest.mark.parametrize("dtype", hostile_steps.DTYPES)
    @pytest.mark.parametrize("rank", [1, 3])
    @pytest.mark.parametrize(
        "model",
        [
            hostile_steps.dense,
            hostile_steps.dense_by_gram,
            hostile_steps.dense_by_rows,
            hostile_steps.conv,
        ],
    )
    def test_hostile_examples_move_it_by_the_clip(self, model, rank, dtype):
        """Those of DP-SGD's tests, where norms are not of rows."""
        plain = layers.reparametrize(model(dtype), rank)
        private = tf_dpsub.make_private(plain)
        optimizer = rgp(
            l2_norm_clip=hostile_steps.CLIP,
            batch_size=hostile_steps.BATCH,
            carriers="random",
        )
        private.compile(optimizer, "mse")
        optimizer.build_for(private)
        optimizer.prepare()
        losses, scale = hostile_steps.losses_of(plain, dtype)

        @tf.function(autograph=False)
        def sums(x, t, keep):
            rows, _ = gradients.per_example_gradients(
                losses,
                {"x": x, "t": t},
                optimizer.per_example_variables,
                "graph",
                scale,
            )
            return [[*optimizer.clipped_sums(rows, keep), rows.valid]]

        (of_rgp,) = hostile_steps.steps_of(plain, sums, 1)
        reached = hostile_steps.check_sensitivity(of_rgp)
        assert reached["ordinary"][0] > 0.99

    def test_all_parts_are_clipped_as_one(self):
        """Carriers apart, each would have a clip of its own."""
        model = prepared(rgp(l2_norm_clip=1.0))
        rows = self.rows(model)
        sums = self.sums(model, rows, np.eye(BATCH)[0])
        expected = np.concatenate([np.ravel(row[0]) for row in rows])
        expected /= np.linalg.norm(expected)
        np.testing.assert_allclose(
            sums, expected * (1 - 1.25 * 2.0**-10), atol=1e-6
        )

    def test_noise_is_that_of_the_clip(self):
        model = prepared(rgp(noise_multiplier=2.0, l2_norm_clip=0.5))
        shapes = model.optimizer.sum_shapes()
        assert model.optimizer.noise_stddevs() == [1.0] * len(shapes)
        draws = model.optimizer.add_noise(
            tf.constant([1, 2], tf.int64),
            [tf.zeros(shape) for shape in shapes],
            "float32",
        )
        values = np.concatenate([np.ravel(d) for d in draws])
        assert 0.9 < np.std(values) < 1.1

    def test_is_accounted_for_as_dpsgd(self):
        found = []
        for make in (RGP, DPSGD):
            optimizer = make(
                keras.optimizers.SGD(0.1),
                noise_multiplier=1.3,
                l2_norm_clip=1.0,
                batch_size=4,
            )
            model = private(optimizer, model=small_network())
            model.fit(X, Y, epochs=2, verbose=0)
            found.append(model.epsilon(1e-5))
        assert found[0] == found[1] > 0
        assert "RGP" not in model.privacy_statement(1e-5)


class TestCarriers:
    def plant(self, own, base=0.0):
        """Adds a matrix of three strong directions to a kernel."""
        rows, columns = (
            np.linalg.qr(_random.normal(size=(n, min(own.inputs, own.outputs))))
            for n in (own.inputs, own.outputs)
        )
        rows, columns = rows[0], columns[0]
        values = np.where(np.arange(rows.shape[1]) < RANK, 1.0, 0.01)
        own.kernel.assign(
            base
            + own.like_kernel(
                tf.constant((rows * values) @ columns.T, tf.float32)
            )
        )
        return rows[:, :RANK], columns[:, :RANK]

    @pytest.mark.parametrize(
        "kind, steps, start",
        [
            ("weight", 4, "gaussian"),
            ("weight", 5, "warm"),
            ("history", 4, "warm"),
            ("history", 5, "warm"),
            ("history", 5, "gaussian"),
        ],
    )
    def test_follow_the_weights_and_then_the_history(self, kind, start, steps):
        model = prepared(
            rgp(carriers=kind, start=start, warmup_steps=5, power_iterations=3)
        )
        has_history = kind == "history" and steps >= 5
        for name, own in carriers(model).items():
            base = own.kernel.numpy() if has_history else 0.0
            planted = self.plant(own, base)
            model.optimizer.inner_optimizer.iterations.assign(steps)
            model.optimizer.prepare()
            left, right = factors(own)
            for found, expected in zip((left, right.T), planted):
                overlap = np.linalg.svd(expected.T @ found, compute_uv=False)
                assert overlap.min() > 0.999, name

    def test_a_warm_start_needs_one_iteration(self):
        """The last R is near what the next one will be."""
        missed = {}
        for start in ("warm", "gaussian"):
            model = prepared(
                rgp(carriers="weight", start=start), model=small_network()
            )
            u, s, _ = np.linalg.svd(kernel(model, "hidden"))
            prepare = tf.function(model.optimizer.prepare, autograph=False)
            for step in range(100):
                model.optimizer.inner_optimizer.iterations.assign(step)
                prepare()
            left, _ = factors(carriers(model)["hidden"])
            missed[start] = RANK - np.linalg.norm(u[:, :RANK].T @ left) ** 2
        assert missed["warm"] < 1e-3 < 0.1 < missed["gaussian"]

    def test_are_orthonormal_without_any_history(self):
        model = prepared(rgp(warmup_steps=0))
        for own in carriers(model).values():
            assert_orthonormal(own)
            # Random directions, no axes.
            left, _ = factors(own)
            assert np.count_nonzero(np.abs(left) > 1e-3) > left.size / 2

    @pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
    @pytest.mark.parametrize("rank", [1, 2])
    def test_are_orthonormal_where_the_history_has_a_lower_rank(
        self, rank, scale
    ):
        model = prepared(rgp(carriers="weight"))
        for own in carriers(model).values():
            matrix = _random.normal(size=(own.inputs, rank)) @ (
                _random.normal(size=(rank, own.outputs))
            )
            own.kernel.assign(
                own.like_kernel(tf.constant(scale * matrix, tf.float32))
            )
        expected = {name: kernel(model, name) for name in carriers(model)}
        for _ in range(2):
            model.optimizer.prepare()
        for name, own in carriers(model).items():
            assert_orthonormal(own)
            left, _ = factors(own)
            u, _, _ = np.linalg.svd(expected[name])
            overlap = np.linalg.svd(u[:, :rank].T @ left, compute_uv=False)
            assert overlap.min() > 0.999

    def test_random_ones_are_drawn_at_each_step(self):
        seen = []
        for seed, steps in ((0, 0), (0, 1), (0, 0), (1, 0)):
            model = prepared(rgp(carriers="random", seed=seed))
            model.optimizer.inner_optimizer.iterations.assign(steps)
            model.optimizer.prepare()
            for own in carriers(model).values():
                assert_orthonormal(own)
            # Layers of one shape have their own.
            seen += [factors(carriers(model)[n])[0] for n in ("query", "key")]
        np.testing.assert_array_equal(seen[0], seen[4])
        del seen[4:6]
        for k, first in enumerate(seen):
            for second in seen[:k]:
                assert np.abs(first - second).max() > 0.1

    def test_frozen_weights_stay_what_they_are(self):
        model = small_network()
        layers.reparametrize(model, RANK)
        model.get_layer("hidden").trainable = False
        frozen = [w.copy() for w in model.get_layer("hidden").get_weights()]
        model = private(
            rgp(noise_multiplier=1.0, l2_norm_clip=1.0), None, model
        )
        model.fit(X, Y, epochs=2, verbose=0)
        after = model.model.get_layer("hidden").get_weights()
        for a, b in zip(frozen, after):
            np.testing.assert_array_equal(a, b)


def with_history():
    return private(
        rgp(keras.optimizers.Adam(0.1), warmup_steps=2, carriers="history"),
        model=small_network(),
    )


@pytest.fixture(name="saved", scope="module")
def _saved(tmp_path_factory):
    """Files of a run after four steps, and its weights after the fifth."""
    folder = tmp_path_factory.mktemp("saved")
    model = with_history()
    for _ in range(4):
        model.train_on_batch(X, Y)
    model.save_weights(folder / "model.weights.h5")
    model.save(folder / "model.keras")
    model.train_on_batch(X, Y)
    return folder, model.get_weights()


class TestState:
    def test_history_begins_with_the_first_step(self):
        """Weights may be loaded after the optimizer was built."""
        model = private(rgp(), model=small_network())
        model.optimizer.build_for(model)
        weights = [w + 1 for w in model.get_weights()]
        model.set_weights(weights)
        step(model)
        own = carriers(model)["hidden"]
        bases = model.optimizer.public_state
        (initial,) = [
            v for v, c in zip(bases._initial, bases.of_variables) if c is own
        ]
        index = [id(v) for v in model.weights].index(id(own.kernel))
        np.testing.assert_array_equal(initial, weights[index])
        step(model)
        np.testing.assert_array_equal(initial, weights[index])

    def test_a_resumed_run_goes_on_as_it_would_have(self, saved):
        folder, expected = saved
        resumed = with_history()
        resumed.optimizer.build_for(resumed)
        resumed.load_weights(folder / "model.weights.h5")
        resumed.train_on_batch(X, Y)
        for a, b in zip(resumed.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_a_saved_model_goes_on_as_it_would_have(self, saved):
        folder, expected = saved
        resumed = keras.saving.load_model(folder / "model.keras")
        resumed.train_on_batch(X, Y)
        for a, b in zip(resumed.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_another_rank_is_refused(self, saved):
        folder, _ = saved
        other = private(
            rgp(keras.optimizers.Adam(0.1)), rank=2, model=small_network()
        )
        other.optimizer.build_for(other)
        with pytest.raises(ValueError, match="Reparametrize.*ranks"):
            other.load_weights(folder / "model.weights.h5")

    def test_config_is_whole(self):
        optimizer = rgp(
            carriers="weight",
            warmup_steps=7,
            power_iterations=2,
            start="gaussian",
        )
        again = RGP.from_config(optimizer.get_config())
        assert again.get_config() == optimizer.get_config()
        assert (again.carriers, again.warmup_steps) == ("weight", 7)
        assert (again.power_iterations, again.start) == (2, "gaussian")


class TestErrors:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"carriers": "past"}, "carriers to be one of.*got 'past'"),
            ({"start": "cold"}, "start to be one of.*got 'cold'"),
            ({"warmup_steps": -1}, "Expected warmup_steps >= 0"),
            ({"warmup_steps": 1.5}, "Expected warmup_steps >= 0"),
            ({"power_iterations": 0}, "Expected power_iterations >= 1"),
        ],
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            rgp(**arguments)

    def test_a_model_without_carriers(self):
        model = private(rgp(), rank=None)
        with pytest.raises(ValueError, match="carriers.*reparametrize"):
            model.fit(X, Y, verbose=0)

    def test_a_model_whose_carriers_are_frozen(self):
        model = network()
        layers.reparametrize(model, RANK, include=["hidden"])
        model.get_layer("hidden").trainable = False
        model = private(rgp(), rank=None, model=model)
        with pytest.raises(ValueError, match="none of whose trainable layers"):
            model.fit(X, Y, verbose=0)

    def test_weights_alone(self):
        with pytest.raises(RuntimeError, match="without a model"):
            rgp().build(network().trainable_variables)
