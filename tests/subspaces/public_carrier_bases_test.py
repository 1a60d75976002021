"""RGP from public gradients: what carriers follow, and what they may read."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.optimizers import rgp_models
from tests.optimizers.rgp_models import (
    LOSS,
    RANK,
    X,
    Y,
    assert_orthonormal,
    carriers,
    factors,
    private,
    rgp,
    small_network,
)
from tf_dpsub import layers
from tf_dpsub.optimizers import RGP
from tf_dpsub.subspaces import public_carrier_bases

EXAMPLES = 11
_random = np.random.default_rng(5)
PUBLIC = _random.normal(size=(EXAMPLES, *X.shape[1:])).astype("float32")
LABELS = _random.integers(0, 3, EXAMPLES)

SPEC = {
    "x": tf.TensorSpec(X.shape, tf.float32),
    "y": tf.TensorSpec(Y.shape, tf.int64),
    "real": tf.TensorSpec([len(X)], tf.float32),
}


def public_rgp(inner=None, **arguments):
    defaults = {"carriers": "public", "x_public": PUBLIC, "y_public": LABELS}
    return rgp(inner, **{**defaults, **arguments})


def attached(optimizer, model=None, **compiled):
    """A model whose step is built, without a step."""
    model = private(optimizer, model=model, **compiled)
    model.prepare_training(SPEC)
    return model


def kernel_gradients(model, x, y):
    """Gradients of each kernel for each example, `[examples, p, d]`."""
    own = carriers(model)
    kernels = [c.kernel.value for c in own.values()]

    @tf.function(autograph=False)
    def gradients(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y[None], model.model(x[None], training=False))
        return tape.gradient(loss, kernels)

    rows = [gradients(*map(tf.constant, pair)) for pair in zip(x, y)]
    return {
        name: np.stack([c.matrix(row).numpy() for row in r]).astype(float)
        for (name, c), r in zip(own.items(), zip(*rows))
    }


def projector(columns):
    return columns @ columns.T


def after_a_pass(rows, left, right):
    """L and R^T after one power iteration, by NumPy."""
    return [
        np.linalg.qr(moment @ start)[0]
        for moment, start in (
            (np.einsum("npd,nqd->pq", rows, rows), left),
            (np.einsum("npd,npe->de", rows, rows), right.T),
        )
    ]


def kept(rows, left, right):
    """Share of the energy of gradients that their projection keeps."""
    lost = rows - left @ (left.T @ rows)
    lost -= (lost @ right.T) @ right
    return 1 - np.sum(lost**2) / np.sum(rows**2)


def wide_network():
    """Kernels whose rows are never stored, where graphs are walked."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input(X.shape[1:])
    x = keras.layers.Dense(40, "tanh", name="hidden")(inputs)
    x = keras.layers.MultiHeadAttention(2, 20, name="attention")(x, x)
    x = keras.layers.Flatten()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(x))


class TestBases:
    @pytest.mark.parametrize(
        "network, settings",
        [
            pytest.param(rgp_models.network, {}, id="all kinds of layers"),
            pytest.param(wide_network, {}, id="rows that are not stored"),
            pytest.param(
                rgp_models.network,
                {"per_example": "vectorized_map"},
                id="one example at a time",
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_a_refresh_is_a_power_iteration(self, network, settings):
        """From the last carriers, in chunks of four examples."""
        model = attached(
            public_rgp(microbatch_size=4, **settings),
            network(),
            jit_compile=False,
        )
        start = {}
        for name, own in carriers(model).items():
            first = [
                np.linalg.qr(_random.normal(size=(n, own.rank)))[0]
                for n in (own.inputs, own.outputs)
            ]
            own.assign(*(f.astype("float32") for f in (first[0], first[1].T)))
            start[name] = first[0], first[1].T
        rows = kernel_gradients(model, PUBLIC, LABELS)
        model.optimizer.prepare()
        for name, own in carriers(model).items():
            assert_orthonormal(own)
            left, right = factors(own)
            expected = after_a_pass(rows[name], *start[name])
            for found, wanted in zip((left, right.T), expected):
                np.testing.assert_allclose(
                    projector(found), projector(wanted), atol=1e-3
                )

    @pytest.mark.parametrize(
        "jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)]
    )
    def test_are_the_top_eigenvectors(self, jit_compile):
        model = attached(public_rgp(), small_network(), jit_compile=jit_compile)
        assert model.training_step.is_compiled == jit_compile
        rows = kernel_gradients(model, PUBLIC, LABELS)
        prepare = tf.function(model.optimizer.prepare, autograph=False)
        for _ in range(100):
            prepare()
        for name, own in carriers(model).items():
            left, right = factors(own)
            for basis, moment in (
                (left, np.einsum("npd,nqd->pq", rows[name], rows[name])),
                (right.T, np.einsum("npd,npe->de", rows[name], rows[name])),
            ):
                best = np.linalg.eigvalsh(moment)[::-1][: own.rank].sum()
                found = np.trace(basis.T @ moment @ basis)
                assert 0.999 * best < found < 1.0001 * best

    def test_rows_are_stored_for_as_many_examples_as_fit(self, monkeypatch):
        found = []
        for limit in (None, 1, 300):
            if limit is not None:
                monkeypatch.setattr(public_carrier_bases, "_STORED", limit)
            model = attached(public_rgp(), small_network(), jit_compile=False)
            model.optimizer.prepare()
            found.append([factors(c)[0] for c in carriers(model).values()])
            gradients = model.optimizer.public_state._gradients
            drawn = gradients.draw(tf.constant([1, 2], tf.int64))
            # The largest kernel has 150 numbers; a batch of one has no axis.
            assert (drawn["real"].shape[1] == 2) == (limit is not None)
        for other in found[1:]:
            for a, b in zip(found[0], other, strict=True):
                np.testing.assert_allclose(
                    projector(a), projector(b), atol=1e-4
                )

    @pytest.mark.parametrize("scale", [0.0, 1e-30, 1e15, np.inf])
    def test_are_orthonormal_without_gradients_to_speak_of(self, scale):
        model = attached(public_rgp(x_public=scale * PUBLIC), small_network())
        for _ in range(2):
            model.optimizer.prepare()
            for own in carriers(model).values():
                assert_orthonormal(own)

    def test_keep_more_of_other_gradients_than_others_do(self):
        """Of digits: more than random ones and than the mean gradient's."""
        data = tf_dpsub.data.load("digits", public=100)
        keras.utils.set_random_seed(0)
        plain = tf_dpsub.models.mlp(data.input_shape, (32,), data.num_classes)
        model = layers.reparametrize(plain, 4)
        model = private(
            public_rgp(
                x_public=data.x_public,
                y_public=data.y_public,
                power_iterations=4,
                batch_size=16,
            ),
            rank=None,
            model=model,
        )
        model.prepare_training(
            {
                "x": tf.TensorSpec([16, *data.input_shape], tf.float32),
                "y": tf.TensorSpec([16], data.y_train.dtype),
                "real": tf.TensorSpec([16], tf.float32),
            }
        )
        for _ in range(2):
            model.optimizer.prepare()
        public, held_out = (
            kernel_gradients(model, x, y)
            for x, y in (
                (data.x_public, data.y_public),
                (data.x_test[:100], data.y_test[:100]),
            )
        )
        for name, own in carriers(model).items():
            found = kept(held_out[name], *factors(own))
            u, _, v = np.linalg.svd(public[name].mean(0))
            of_mean = kept(held_out[name], u[:, : own.rank], v[: own.rank])
            drawn = [
                np.linalg.qr(_random.normal(size=(n, own.rank)))[0]
                for n in (own.inputs, own.outputs)
            ]
            of_random = kept(held_out[name], drawn[0], drawn[1].T)
            assert found > of_mean > of_random
            assert found > 0.8

    def test_given_labels_are_used(self):
        found = []
        for labels in (LABELS, (LABELS + 1) % 3):
            model = attached(public_rgp(y_public=labels), small_network())
            model.optimizer.prepare()
            found.append(factors(carriers(model)["logits"])[0])
        assert np.abs(projector(found[0]) - projector(found[1])).max() > 0.01

    def test_random_labels_are_new_at_each_refresh(self):
        """And the same for the same seed and step."""
        found = []
        for seed, steps in ((0, (0,)), (0, (0, 1)), (1, (0,))):
            optimizer = public_rgp(y_public=None, seed=seed, start="gaussian")
            model = attached(optimizer, small_network(), jit_compile=False)
            for step in steps:
                optimizer.inner_optimizer.iterations.assign(step)
                optimizer.prepare()
                found.append(factors(carriers(model)["hidden"])[0])
        np.testing.assert_array_equal(found[0], found[1])
        for other in found[2:]:
            assert np.abs(found[0] - other).max() > 0.01


class TestRefresh:
    def test_comes_as_often_as_it_is_asked_for(self):
        model = private(
            public_rgp(keras.optimizers.SGD(0.1), update_every=3),
            model=small_network(),
        )
        seen = []
        for _ in range(6):
            model.train_on_batch(X, Y)
            seen.append(factors(carriers(model)["hidden"]))
        for step, (before, after) in enumerate(zip(seen, seen[1:]), start=1):
            for a, b in zip(before, after):
                assert np.array_equal(a, b) == (step % 3 != 0)

    def test_comes_first_whatever_the_number_of_steps(self):
        optimizer = public_rgp(update_every=3)
        model = attached(optimizer, small_network())
        optimizer.inner_optimizer.iterations.assign(4)
        optimizer.prepare()
        for own in carriers(model).values():
            assert_orthonormal(own)

    def test_follows_a_loss_that_is_compiled_later(self):
        optimizer = public_rgp()
        model = private(optimizer, model=small_network())
        found = []
        for loss in (LOSS, lambda y, p: keras.ops.sum(p, -1)):
            model.compile(optimizer, loss=loss)
            model.prepare_training(SPEC)
            optimizer.prepare()
            found.append(factors(carriers(model)["logits"])[0])
        assert np.abs(projector(found[0]) - projector(found[1])).max() > 0.01


def with_noise():
    """Noise of a seed, with which a run is the same each time."""
    return private(
        public_rgp(
            keras.optimizers.Adam(0.1), y_public=None, update_every=3, seed=7
        ),
        model=small_network(),
    )


class TestState:
    def test_a_resumed_run_goes_on_as_it_would_have(self, tmp_path):
        """Between two refreshes, and at the next."""
        whole = with_noise()
        for _ in range(2):
            whole.train_on_batch(X, Y)
        whole.save_weights(tmp_path / "m.weights.h5")
        whole.save(tmp_path / "m.keras")
        resumed = with_noise()
        resumed.optimizer.build_for(resumed)
        resumed.load_weights(tmp_path / "m.weights.h5")
        models = [
            whole,
            resumed,
            keras.saving.load_model(tmp_path / "m.keras"),
        ]
        for _ in range(2):
            for model in models:
                model.train_on_batch(X, Y)
            for model in models[1:]:
                for a, b in zip(
                    whole.get_weights(), model.get_weights(), strict=True
                ):
                    np.testing.assert_array_equal(a, b)

    @pytest.mark.parametrize("labels", [LABELS, None])
    def test_config_is_whole(self, labels):
        optimizer = public_rgp(
            y_public=labels,
            update_every=4,
            power_iterations=2,
            allow_private=True,
        )
        config = json.loads(json.dumps(optimizer.get_config()))
        again = RGP.from_config(config)
        assert again.get_config() == optimizer.get_config()
        state = again.public_state
        np.testing.assert_array_equal(state.public_inputs, PUBLIC)
        assert (state.update_every, state.allow_private) == (4, True)
        assert again.description == "RGP, from gradients of public examples"


class TestPrivacy:
    """Carriers are not covered by noise."""

    def test_no_private_example_moves_carriers(self):
        found = []
        for scale in (1.0, -3.0):
            model = private(public_rgp(), model=small_network())
            model.train_on_batch(scale * X, (Y + (scale < 0)) % 3)
            found.append([factors(c) for c in carriers(model).values()])
        for a, b in zip(*found, strict=True):
            np.testing.assert_array_equal(a[0], b[0])
            np.testing.assert_array_equal(a[1], b[1])

    def mixed(self, **arguments):
        x = np.concatenate([PUBLIC, X[3:5]])
        y = np.concatenate([LABELS, Y[3:5]])
        optimizer = public_rgp(
            keras.optimizers.SGD(0.01),
            x_public=x,
            y_public=y,
            noise_multiplier=1.0,
            l2_norm_clip=1.0,
            batch_size=4,
            **arguments,
        )
        return private(optimizer, model=small_network())

    def test_private_examples_among_the_public_ones_raise(self):
        model = self.mixed()
        with pytest.raises(ValueError, match="that are not private.*allow_pri"):
            model.fit(X.astype("float64"), Y, verbose=0)
        with pytest.raises(ValueError, match="that are not private"):
            model.train_on_batch(X[:4], Y[:4])
        assert model.ledger.steps == 0

    def test_are_stated_if_they_are_allowed(self):
        model = self.mixed(allow_private=True)
        model.fit(X, Y, verbose=0)
        text = " ".join(model.privacy_statement(1e-5).split())
        assert "ε does not cover the private examples among the public" in text

    def test_the_statement_takes_them_as_public(self):
        (note,) = public_rgp(y_public=None).public_state.notes
        assert "11 examples with random labels, along whose" in note
        optimizer = public_rgp(
            noise_multiplier=1.0, l2_norm_clip=1.0, batch_size=4
        )
        model = private(optimizer, model=small_network())
        model.fit(X, Y, verbose=0)
        assert np.isfinite(model.epsilon(1e-5))
        text = " ".join(model.privacy_statement(1e-5).split())
        taken = text.split("Taken as public:")[1]
        assert "11 examples with their labels, along whose gradients" in taken
        assert all(note in taken for note in optimizer.public_state.notes)
        assert "no public example nearly equals a private one" in taken
        assert "does not cover" not in text


class TestErrors:
    @pytest.mark.parametrize(
        "arguments, message",
        [
            (
                {"carriers": "public"},
                "Expected x_public with carriers='public', got None",
            ),
            (
                {"carriers": "public", "y_public": LABELS},
                "Expected x_public with carriers='public', got None",
            ),
            (
                {"x_public": PUBLIC},
                "carriers='public' alone, got carriers='history'",
            ),
            (
                {"carriers": "random", "y_public": LABELS},
                "carriers='public' alone, got carriers='random'",
            ),
            (
                {"carriers": "public", "x_public": PUBLIC[:0]},
                "Expected public data with the same number",
            ),
            (
                {
                    "carriers": "public",
                    "x_public": PUBLIC,
                    "y_public": LABELS[:3],
                },
                "Expected public data with the same number",
            ),
            (
                {
                    "carriers": "public",
                    "x_public": PUBLIC,
                    "update_every": 0,
                },
                "Expected update_every >= 1",
            ),
        ],
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            rgp_models.rgp(**arguments)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ({"x_public": PUBLIC[:, :, 1:]}, "public x of the shapes of the"),
            ({"y_public": LABELS[:, None, None]}, "public y of the shapes"),
        ],
    )
    def test_data_of_another_shape(self, arguments, message):
        model = private(public_rgp(**arguments), model=small_network())
        with pytest.raises(ValueError, match=message):
            model.fit(X, Y, verbose=0)
        assert model.ledger.steps == 0

    def test_labels_that_cannot_be_drawn(self):
        model = small_network()
        layers.reparametrize(model, RANK)
        model = tf_dpsub.make_private(model)
        model.compile(public_rgp(y_public=None), loss="mse")
        with pytest.raises(ValueError, match="Pass `y_public`"):
            model.fit(X, np.ones((len(X), 3), "float32"), verbose=0)
        assert model.ledger.steps == 0

    def test_a_model_without_carriers(self):
        model = tf_dpsub.make_private(small_network())
        model.compile(public_rgp(), LOSS)
        with pytest.raises(ValueError, match="carriers.*reparametrize"):
            model.fit(X, Y, verbose=0)
