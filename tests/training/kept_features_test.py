import os
import stat

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tf_dpsub.training import kept_features

_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_N, _SHAPE = 300, (6,)


@pytest.fixture(scope="module")
def data():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((_N, *_SHAPE)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64")


class BatchMean(keras.layers.Layer):
    """Mixes the examples of a batch."""

    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, 0)


class Counting(keras.layers.Layer):
    """Counts in Python how often its function is traced."""

    calls = 0

    def call(self, inputs):
        type(self).calls += 1
        return keras.ops.tanh(inputs)


def _classifier(features):
    return tf_dpsub.models.feature_classifier(features, 2, _SHAPE)


def _dense(seed=0, units=4, activation="tanh"):
    initializer = keras.initializers.GlorotUniform(seed)
    return keras.layers.Dense(
        units, activation=activation, kernel_initializer=initializer
    )


def _noise():
    return keras.layers.GaussianNoise(0.5)


def _augmented(layer=None, features=None):
    """A classifier of features of inputs that a layer augments."""
    inputs = keras.Input(_SHAPE)
    frozen = tf_dpsub.layers.FrozenFeatures(features or _dense())
    logits = keras.layers.Dense(2, kernel_initializer="zeros")
    return keras.Model(inputs, logits(frozen((layer or _noise())(inputs))))


def _shifted(x, y, seed):
    return x + tf.random.stateless_normal(_SHAPE, seed), y


def _mapped(data, function=_shifted, batch_size=50, seed=0):
    return tf_dpsub.data.PoissonBatches(
        *data, batch_size=batch_size, map=function, seed=seed
    )


def _keeps(model):
    """Whether the steps of the last run were given features."""
    x = model.training_step.spec["x"]
    return isinstance(x, dict) and x.keys() == {kept_features.KEY}


def _private(plain, noise_multiplier=1.0, batch_size=50, **kwargs):
    model = tf_dpsub.make_private(plain)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(1.0),
            l2_norm_clip=0.5,
            noise_multiplier=noise_multiplier,
            batch_size=batch_size,
            seed=0,
            **kwargs,
        ),
        _LOSS,
        metrics=["accuracy"],
    )
    return model


def _begin(model, *args, **kwargs):
    """Calls `fit` until the first step, which is proved and not taken."""

    def interrupt(logs):
        raise KeyboardInterrupt

    callback = keras.callbacks.LambdaCallback(on_train_begin=interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*args, verbose=0, callbacks=[callback], **kwargs)


def test_training_is_that_without_keeping(data):
    weights, losses = [], []
    for keep in (True, False):
        model = _private(_classifier(_dense()))
        history = model.fit(*data, epochs=2, verbose=0, keep_features=keep)
        weights.append(model.get_weights())
        losses.append(history.history["loss"])
        assert model.kept_features is None
        # The step computes only the head.
        assert _keeps(model) == keep
        if keep:
            (spec,) = model.training_step.spec["x"][kept_features.KEY]
            assert spec.shape[1:] == (4,)
    for kept, anew in zip(*weights):
        np.testing.assert_allclose(kept, anew, atol=1e-5)
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_features_are_computed_once(data):
    Counting.calls = 0
    model = _private(_classifier(Counting()))
    first = Counting.calls
    model.fit(*data, epochs=3, verbose=0)
    # Traced for the draws and the proof and to run, not in any step.
    assert Counting.calls - first <= 3
    assert model.training_step.spec["x"].keys() == {kept_features.KEY}
    assert model.training_step.implementation == "graph"


def test_validation_data_go_the_same_way(data):
    model = _private(_classifier(_dense()))
    history = model.fit(*data, epochs=2, validation_data=data, verbose=0)
    loss, accuracy = model.evaluate(*data, verbose=0)
    assert history.history["val_loss"][-1] == pytest.approx(loss, rel=1e-5)
    assert history.history["val_accuracy"][-1] == pytest.approx(accuracy)
    outputs = model.predict(data[0], verbose=0)
    np.testing.assert_allclose(
        outputs, model.model(data[0]), rtol=1e-5, atol=1e-6
    )


def test_rows_that_mix_are_computed_alone(data):
    model = _private(_classifier(BatchMean()))
    features = kept_features.KeptFeatures(model.model)
    (kept,) = features.of(data[0])[kept_features.KEY]
    # Minus its own mean, each row is zero.
    np.testing.assert_array_equal(kept, 0)


def test_one_example_changes_its_own_features_alone(data):
    model = _private(_classifier(_dense()))
    features = kept_features.KeptFeatures(model.model)
    x = data[0].copy()
    before = features.of(x)[kept_features.KEY][0]
    for hostile in (np.nan, np.inf, 1e30):
        x[17] = hostile
        after = features.of(x)[kept_features.KEY][0]
        others = np.arange(_N) != 17
        np.testing.assert_array_equal(before[others], after[others])


def test_features_that_are_not_finite_contribute_nothing(data):
    x, y = data
    x = x.copy()
    x[:100] = np.nan
    model = _private(
        _classifier(keras.layers.Rescaling(1.0)), noise_multiplier=0.0
    )
    history = model.fit(x, y, epochs=1, verbose=0)
    assert np.isfinite(model.get_weights()[-1]).all()
    assert np.isfinite(history.history["loss"]).all()


def test_large_features_are_kept_in_a_file_of_the_owner(data, monkeypatch):
    monkeypatch.setattr(kept_features, "_LARGEST_IN_MEMORY", 100)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            folder = self.model.kept_features._folder
            modes = [os.stat(folder).st_mode]
            for name in os.listdir(folder):
                modes.append(os.stat(os.path.join(folder, name)).st_mode)
            seen.append((folder, modes))

    model = _private(_classifier(_dense()))
    model.fit(*data, epochs=1, verbose=0, callbacks=[Look()])
    ((folder, modes),) = seen
    assert len(modes) == 2
    assert stat.S_IMODE(modes[0]) == 0o700
    assert not os.path.exists(folder)
    in_memory = _private(_classifier(_dense()))
    monkeypatch.undo()
    in_memory.fit(*data, epochs=1, verbose=0)
    np.testing.assert_allclose(
        model.get_weights()[-1], in_memory.get_weights()[-1], atol=1e-6
    )


def test_files_are_deleted_after_an_error(data, monkeypatch):
    monkeypatch.setattr(kept_features, "_LARGEST_IN_MEMORY", 100)
    folders = []

    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            folders.append(self.model.kept_features._folder)
            raise KeyboardInterrupt

    model = _private(_classifier(_dense()))
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data, epochs=1, verbose=0, callbacks=[Fail()])
    assert folders and not os.path.exists(folders[0])
    assert model.kept_features is None


@pytest.mark.parametrize("seed", [None, 3])
def test_features_that_are_drawn_raise(data, seed):
    class Noise(keras.layers.Layer):
        def call(self, inputs):
            return inputs + tf.random.normal(tf.shape(inputs), seed=seed)

    model = _private(_classifier(Noise()))
    with pytest.raises(ValueError, match="keep_features=False"):
        model.fit(*data, verbose=0)
    assert model.ledger.steps == 0


def test_features_that_read_a_metric_raise(data):
    metric = keras.metrics.Sum()

    class ReadsMetric(keras.layers.Layer):
        def call(self, inputs):
            return inputs + metric.total

    model = _private(_classifier(ReadsMetric()))
    with pytest.raises(ValueError, match="no weight of the model"):
        model.fit(*data, verbose=0)
    assert model.ledger.steps == 0
    assert model.kept_features is None


@pytest.mark.parametrize("mixes", [False, True])
def test_an_id_out_of_range_contributes_nothing(mixes):
    class Tokens(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            initializer = keras.initializers.GlorotUniform(0)
            self.embedding = keras.layers.Embedding(
                9, 4, embeddings_initializer=initializer
            )

        def build(self, input_shape):
            self.embedding.build(input_shape)

        def call(self, inputs):
            features = keras.ops.mean(self.embedding(inputs), 1)
            # Then they are computed one example at a time.
            return features + 0 * keras.ops.mean(features, 0) * mixes

    x = np.random.default_rng(0).integers(9, size=(_N, 2)).astype("int32")
    x[7] = [3, 4711]
    classifier = tf_dpsub.models.feature_classifier
    model = _private(classifier(Tokens(), 2, (2,)), 0.0, batch_size=_N)
    features = kept_features.KeptFeatures(model.model)
    (kept,) = features.of(x)[kept_features.KEY]
    assert np.isnan(kept[7]).all() and np.isfinite(np.delete(kept, 7, 0)).all()
    history = model.fit(x, x[:, 0] % 2, epochs=1, verbose=0)
    assert history.history["dropped"] == [1.0]


def test_features_that_store_an_example_raise(data):
    """The features of each example would hold those of earlier ones."""

    class Stores(keras.layers.Layer):
        def call(self, inputs):
            name = {"shared_name": self.name, "dtypes": [tf.float32]}
            stored = tf.raw_ops.MapSize(**name)
            store = tf.raw_ops.MapStage(
                key=tf.cast(stored, tf.int64),
                indices=[0],
                values=[tf.reduce_sum(inputs)],
                **name,
            )
            with tf.control_dependencies([store]):
                return inputs + tf.cast(stored, tf.float32)

    model = _private(_classifier(Stores()))
    with pytest.raises(ValueError, match="one example would enter"):
        model.fit(*data, verbose=0)
    assert model.ledger.steps == 0


def test_python_functions_are_stated(data):
    class Python(keras.layers.Layer):
        def call(self, inputs):
            outputs = tf.numpy_function(np.tanh, [inputs], tf.float32)
            outputs.set_shape(inputs.shape)
            return outputs

    model = _private(_classifier(Python()))
    model.fit(*data, epochs=1, verbose=0)
    statement = " ".join(model.privacy_statement(1e-5).split())
    assert "what Python functions of the features keep" in statement


def test_dropout_in_frozen_features_is_off(data):
    features = keras.Sequential([_dense(), keras.layers.Dropout(0.9)])
    plain = _classifier(features)
    np.testing.assert_array_equal(
        plain(data[0], training=True), plain(data[0], training=False)
    )
    model = _private(plain)
    _begin(model, *data)
    assert len(model.trainable_variables) == 1


def test_public_subspace_of_kept_features(data):
    x, y = data
    generator = np.random.default_rng(1)
    public = generator.standard_normal((30, *_SHAPE)).astype("float32")
    model = tf_dpsub.make_private(_classifier(_dense()))
    subspace = tf_dpsub.subspaces.PublicSubspace(public, rank=3, method="gram")
    model.compile(
        tf_dpsub.optimizers.ProjectedDPSGD(
            keras.optimizers.SGD(1.0),
            subspace=subspace,
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            batch_size=50,
        ),
        _LOSS,
    )
    model.fit(x, y, epochs=1, verbose=0)
    assert np.abs(model.get_weights()[-1]).max() > 0


def test_public_examples_among_the_private_ones_raise(data):
    x, y = data
    model = tf_dpsub.make_private(_classifier(_dense()))
    model.compile(
        tf_dpsub.optimizers.ProjectedDPSGD(
            keras.optimizers.SGD(1.0),
            subspace=tf_dpsub.subspaces.PublicSubspace(x[:9], rank=3),
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            batch_size=50,
        ),
        _LOSS,
    )
    with pytest.raises(ValueError, match="public examples"):
        model.fit(x, y, epochs=1, verbose=0)


def test_poisson_batches_of_arrays(data):
    model = _private(_classifier(_dense()))
    batches = tf_dpsub.data.PoissonBatches(*data, batch_size=50)
    _begin(model, batches)
    assert model.training_step.spec["x"].keys() == {kept_features.KEY}


def test_datasets_go_through_the_whole_model(data):
    model = _private(_classifier(_dense()))
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(50)
    model.fit(dataset, epochs=1, verbose=0)
    assert model.training_step.spec["x"].shape[1:] == _SHAPE


def test_several_inputs():
    generator = np.random.default_rng(0)
    x = {
        name: generator.standard_normal((_N, 3)).astype("float32")
        for name in "ab"
    }
    inputs = {name: keras.Input((3,), name=name) for name in "ab"}
    both = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    features = keras.Model(inputs, _dense(activation="relu")(both))
    model = _private(tf_dpsub.models.feature_classifier(features, 2))
    y = (x["a"][:, 0] > x["b"][:, 0]).astype("int64")
    model.fit(x, y, epochs=2, verbose=0)
    (spec,) = model.training_step.spec["x"][kept_features.KEY]
    assert spec.shape[1:] == (4,)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), model.model(x), rtol=1e-5, atol=1e-6
    )


def test_a_call_of_the_model_itself_is_not_left_out(data):
    """Training would be that of another model than the one that is saved."""

    class Negative(keras.Model):
        def call(self, inputs, training=None):
            return -super().call(inputs, training=training)

    inputs = keras.Input(_SHAPE)
    frozen = tf_dpsub.layers.FrozenFeatures(_dense())
    plain = Negative(inputs, _dense(units=2)(frozen(inputs)))
    assert not kept_features.has_frozen_features(plain)


_PATHS = {
    "sequential": (True, lambda x, frozen: _dense()(frozen(x))),
    "augmented": (True, lambda x, frozen: _dense()(frozen(_noise()(x)))),
    "two_steps": (True, lambda x, frozen: frozen(_noise()(_noise()(x)))),
    "trained": (False, lambda x, frozen: _dense()(x)),
    "behind": (False, lambda x, frozen: frozen(_dense()(x))),
    "beside": (False, lambda x, frozen: frozen(x) + keras.ops.sum(x)),
    "beside_augmented": (False, lambda x, frozen: _beside(_noise()(x), frozen)),
    "shown": (False, lambda x, frozen: _shown(_noise()(x), frozen)),
}


def _beside(x, frozen):
    return frozen(x) + keras.layers.Dense(4)(x)


def _shown(x, frozen):
    return [x, _dense()(frozen(x))]


@pytest.mark.parametrize("kind", _PATHS)
def test_which_models_have_frozen_features(kind):
    expected, path = _PATHS[kind]
    inputs = keras.Input(_SHAPE)
    frozen = tf_dpsub.layers.FrozenFeatures(_dense())
    plain = keras.Model(inputs, path(inputs, frozen))
    assert kept_features.has_frozen_features(plain) == expected


def test_sequential_models_have_them():
    frozen = tf_dpsub.layers.FrozenFeatures(_dense())
    layers = [keras.Input(_SHAPE), _noise(), frozen, _dense()]
    assert kept_features.has_frozen_features(keras.Sequential(layers))


class TestViews:
    """Features of so many augmentations of each example, drawn once."""

    def test_each_step_takes_the_mean_over_all_of_them(self, data):
        """Training is that on the same views at every step."""
        batches = _mapped(data, batch_size=_N)
        (views,) = _mapped(data, batch_size=_N).views_drawn_once(3, _N)
        plain = _classifier(_dense())
        twin = _classifier(_dense())
        model = tf_dpsub.make_private(plain)
        model.compile(
            tf_dpsub.optimizers.DPSGD(
                keras.optimizers.SGD(1.0),
                l2_norm_clip=np.inf,
                noise_multiplier=0.0,
                batch_size=_N,
            ),
            _LOSS,
        )
        model.fit(batches, views=3, epochs=3, verbose=0)
        assert _keeps(model) and model.kept_features is None
        assert model.training_step.implementation == "graph"
        twin.compile(keras.optimizers.SGD(1.0), _LOSS)
        x, y = views["x"].reshape(-1, *_SHAPE), views["y"].reshape(-1)
        twin.fit(x, y, batch_size=3 * _N, epochs=3, shuffle=False, verbose=0)
        np.testing.assert_allclose(
            plain.get_weights()[-1], twin.get_weights()[-1], atol=1e-5
        )

    def test_they_are_those_of_their_own_example_alone(self, data):
        model = _augmented()
        y = np.arange(_N)

        def features(x):
            kept = kept_features.KeptFeatures(model)
            batches = tf_dpsub.data.PoissonBatches(x, y, batch_size=_N, seed=0)
            batches = kept.of_views(kept.augmented(batches), 3)
            (batch,) = batches.dataset(views=3).take(1)
            np.testing.assert_array_equal(
                batch["y"], np.repeat(y[:, None], 3, 1)
            )
            return batch["x"][kept_features.KEY][0].numpy()

        before = features(data[0])
        assert before.shape == (_N, 3, 4)
        # All views differ, and so do those of equal examples.
        alike = features(np.zeros_like(data[0]))
        assert len(np.unique(alike.reshape(-1, 4), axis=0)) == 3 * _N
        # Among them a finite one.
        hostile = {17: np.nan, 100: np.inf, 299: 1e30}
        x = data[0].copy()
        for row, value in hostile.items():
            x[row] = value
        after = features(x)
        others = ~np.isin(np.arange(_N), list(hostile))
        np.testing.assert_array_equal(before[others], after[others])
        for row in hostile:
            assert (before[row] != after[row]).all()

    def test_draws_are_secret_and_new_for_each_run(self, data):
        batches = _mapped(data, seed=None)
        drawn = []
        for _ in range(2):
            keras.utils.set_random_seed(0)
            (views,) = batches.views_drawn_once(2, _N)
            drawn.append(views["x"] - data[0][:, None])
        numbers = np.concatenate(drawn).reshape(-1)
        # Of float32: a few of 7,200 may be equal.
        assert len(np.unique(numbers)) > 0.99 * len(numbers)

    def test_layers_of_the_model_draw_them(self, data):
        plain = _augmented()
        model = _private(plain)
        history = model.fit(
            *data, views=2, epochs=2, validation_data=data, verbose=0
        )
        assert _keeps(model)
        # Validation sees examples as they are.
        loss, _ = model.evaluate(*data, verbose=0)
        assert history.history["val_loss"][-1] == pytest.approx(loss, rel=1e-5)
        one_view = tf_dpsub.accounting.epsilon(
            noise_multiplier=1.0, sampling_rate=50 / _N, steps=12, delta=1e-5
        )
        assert model.epsilon(1e-5) == pytest.approx(one_view)

    def test_a_crop_that_a_batch_shares_is_drawn_for_each_view(self, data):
        """One row at a time, it is its own."""
        inputs = keras.Input(_SHAPE)
        images = keras.layers.Reshape((3, 2, 1))(inputs)
        cropped = keras.layers.RandomCrop(2, 1)(images)
        frozen = tf_dpsub.layers.FrozenFeatures(keras.layers.Flatten())
        plain = keras.Model(inputs, _dense(units=2)(frozen(cropped)))
        kept = kept_features.KeptFeatures(plain)
        batches = tf_dpsub.data.PoissonBatches(*data, batch_size=_N, seed=0)
        (views,) = kept.augmented(batches).views_drawn_once(2, _N)
        # [examples, views]: whether it begins in the first of four corners.
        starts = views["x"][:, :, 0, 0, 0] == data[0][:, :1]
        assert 0.1 < starts.mean() < 0.4
        assert 0.2 < np.mean(starts[:, 0] != starts[:, 1]) < 0.55

    @pytest.mark.parametrize("kind", ["map", "layer"])
    def test_features_are_drawn_anew_on_demand_and_with_one_view(
        self, data, kind
    ):
        if kind == "map":
            model, x = _private(_classifier(_dense())), (_mapped(data),)
        else:
            model, x = _private(_augmented()), data
        _begin(model, *x, views=2, keep_features=False)
        assert not _keeps(model)
        _begin(model, *x)
        assert not _keeps(model)

    @pytest.mark.parametrize(
        "kind, message",
        [
            ("draws", "secret random numbers"),
            ("reads", "no weight of the model"),
            ("stores", "MapStage"),
        ],
    )
    def test_what_cannot_be_kept_is_left_to_the_step(self, data, kind, message):
        """It proves, or refuses, what the layers before the features do."""
        metric = keras.metrics.Sum()

        class Hostile(keras.layers.Layer):
            def call(self, inputs):
                if kind == "draws":
                    return inputs + tf.random.normal(tf.shape(inputs))
                if kind == "reads":
                    return inputs + metric.total
                name = {"shared_name": self.name, "dtypes": [tf.float32]}
                store = tf.raw_ops.MapStage(
                    key=0, indices=[0], values=[tf.reduce_sum(inputs)], **name
                )
                with tf.control_dependencies([store]):
                    return inputs + tf.cast(
                        tf.raw_ops.MapSize(**name), tf.float32
                    )

        both = keras.Sequential([keras.Input(_SHAPE), _noise(), Hostile()])
        model = _private(_augmented(both))
        kept = kept_features.KeptFeatures(model.model)
        batches = tf_dpsub.data.PoissonBatches(*data, batch_size=50)
        refused = (ValueError, tf_dpsub.gradients.Unproven)
        with pytest.raises(refused, match=message):
            kept.augmented(batches)
        assert kept_features.of_batches(model, batches, 2) is batches
        assert model.kept_features is None

    def test_views_that_cannot_differ_are_not_kept(self, data):
        model = _private(_classifier(_dense()))
        batches = _mapped(data, lambda x, y: (2 * x, y))
        # A warning is an error, which ends the run here.
        with pytest.raises(UserWarning, match="2 equal ones"):
            model.fit(batches, views=2, epochs=1, verbose=0)
        assert not _keeps(model)

    def test_one_view_that_is_not_finite_leaves_the_example_out(self, data):
        def broken(x, y, seed):
            draw = tf.random.stateless_uniform([], seed)
            return tf.where((x[0] > 5) & (draw < 0.5), np.nan, x), y

        x = data[0].copy()
        x[:20, 0] = 10.0
        model = _private(_classifier(_dense()), 0.0, batch_size=_N)
        batches = _mapped((x, data[1]), broken, batch_size=_N)
        history = model.fit(batches, views=8, epochs=2, verbose=0)
        assert _keeps(model)
        # Each of them has such a view, but for one in 256.
        first, second = history.history["dropped"]
        assert 15 < first <= 20 and first == second
        assert np.isfinite(model.get_weights()[-1]).all()

    def test_weights_and_several_inputs(self):
        generator = np.random.default_rng(0)
        x = {
            name: generator.standard_normal((_N, 3)).astype("float32")
            for name in "ab"
        }
        inputs = {name: keras.Input((3,), name=name) for name in "ab"}
        both = keras.layers.Concatenate()([inputs["a"], _noise()(inputs["b"])])
        frozen = tf_dpsub.layers.FrozenFeatures(_dense())(both)
        model = _private(keras.Model(inputs, _dense(units=2)(frozen)))
        y = (x["a"][:, 0] > x["b"][:, 0]).astype("int64")
        model.fit(x, y, sample_weight=np.ones(_N), views=2, verbose=0)
        assert _keeps(model)
        assert "w" in model.training_step.spec

    def test_public_examples_among_the_private_ones_raise(self, data):
        model = tf_dpsub.make_private(_augmented())
        model.compile(
            tf_dpsub.optimizers.ProjectedDPSGD(
                keras.optimizers.SGD(1.0),
                subspace=tf_dpsub.subspaces.PublicSubspace(data[0][:9], rank=3),
                l2_norm_clip=1.0,
                noise_multiplier=1.0,
                batch_size=50,
            ),
            _LOSS,
        )
        with pytest.raises(ValueError, match="public examples"):
            model.fit(*data, views=2, epochs=1, verbose=0)
        assert model.ledger.steps == 0

    def test_large_ones_are_kept_in_a_file(self, data, monkeypatch):
        weights, folders = [], []

        class Look(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                folders.append(self.model.kept_features._folder)

        for most in (2**31, 100):
            monkeypatch.setattr(kept_features, "_LARGEST_IN_MEMORY", most)
            model = _private(_augmented())
            model.fit(*data, views=3, verbose=0, callbacks=[Look()])
            weights.append(model.get_weights()[-2])
        np.testing.assert_array_equal(*weights)
        assert folders[0] is None and not os.path.exists(folders[1])

    def test_files_are_deleted_after_an_error_in_the_features(
        self, data, monkeypatch
    ):
        monkeypatch.setattr(kept_features, "_LARGEST_IN_MEMORY", 100)
        folders = []
        stored = kept_features.KeptFeatures._stored

        def fail_second(self, kept, *args):
            if kept:
                folders.append(self._folder)
                raise OSError("no space left")
            return stored(self, kept, *args)

        monkeypatch.setattr(kept_features.KeptFeatures, "_stored", fail_second)
        model = _private(_augmented())
        with pytest.raises(OSError, match="no space"):
            model.fit(*data, views=2, verbose=0)
        assert folders and not os.path.exists(folders[0])
        assert model.kept_features is None and model.ledger.steps == 0
