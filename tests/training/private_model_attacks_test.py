"""Ways around the accounting, and leaks beside the noisy sums."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tf_dpsub.data import given_batches

L = keras.layers


def _private(*layers, loss="mse", optimizer=None, **kwargs):
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((3,)), *layers])
    model = tf_dpsub.make_private(plain)
    arguments = dict(noise_multiplier=1.0, l2_norm_clip=1.0, batch_size=8)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            optimizer or keras.optimizers.SGD(0.1), **(arguments | kwargs)
        ),
        loss=loss,
    )
    return model


def _data(n=40):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3)).astype("float32")
    return x, rng.normal(size=(n, 1)).astype("float32")


def test_arrays_are_not_seen_once_an_epoch():
    model = _private(L.Dense(1))
    with pytest.raises(ValueError, match="that `fit` draws. Leave it out"):
        model.fit(*_data(), verbose=0, each_example_once_per_epoch=True)
    assert model.ledger.steps == 0


def test_a_repeated_dataset_is_not_seen_once_an_epoch():
    model = _private(L.Dense(1))
    dataset = tf.data.Dataset.from_tensor_slices(_data()).batch(8)
    with pytest.raises(ValueError, match="Do not repeat"):
        model.fit(
            dataset.repeat(),
            steps_per_epoch=50,
            verbose=0,
            each_example_once_per_epoch=True,
        )
    with pytest.raises(ValueError, match="no longer than it"):
        model.fit(
            dataset,
            steps_per_epoch=6,
            verbose=0,
            each_example_once_per_epoch=True,
        )


def test_a_step_outside_of_a_run_is_refused():
    model = _private(L.Dense(1))
    x, y = _data()
    model.fit(x, y, verbose=0)
    before = [v.numpy() for v in model.trainable_variables]
    batch = given_batches.padded(given_batches.named(x, y), 8)
    with pytest.raises(RuntimeError, match="not be accounted for"):
        model.train_step(batch)
    for variable, value in zip(model.trainable_variables, before):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_replaced_optimizer_is_refused():
    """The compiled step would go on with the old one's noise."""
    model = _private(L.Dense(1))
    x, y = _data()
    model.fit(x, y, verbose=0)
    model.optimizer = tf_dpsub.optimizers.DPSGD(
        keras.optimizers.SGD(0.0),
        noise_multiplier=10.0,
        l2_norm_clip=1.0,
        batch_size=8,
    )
    with pytest.raises(ValueError, match="Call `compile`"):
        model.fit(x, y, verbose=0)


class _Counter(keras.layers.Layer):
    """Counts its calls, in a function of its own."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), trainable=False, name="count")
        self.function = tf.function(
            lambda: self.count.value.assign_add(1.0), autograph=False
        )

    def call(self, x):
        self.function()
        return x


def _step_on(model, drawn):
    """One step on a padded batch of which `drawn` rows are real."""
    x, y = _data(drawn)
    batch = given_batches.padded(given_batches.named(x, y), 40)
    model.prepare_training(
        tf.nest.map_structure(tf.type_spec_from_value, batch)
    )
    return model.training_step(batch)


@pytest.mark.parametrize("per_example", ["graph", "vectorized_map"])
def test_counters_do_not_tell_how_many_were_drawn(per_example):
    counts = []
    for drawn in (2, 40):
        counter = _Counter()
        model = _private(
            L.Dense(1), counter, microbatch_size=4, per_example=per_example
        )
        _step_on(model, drawn)
        counts.append(counter.count.numpy())
    assert counts[0] == counts[1] > 0


def test_a_counter_that_is_no_weight_is_refused():
    untracked = [tf.Variable(0.0, trainable=False)]

    class Hidden(keras.layers.Layer):
        def call(self, x):
            untracked[0].assign_add(1.0)
            return x

    model = _private(L.Dense(1), Hidden())
    with pytest.raises(
        tf_dpsub.gradients.UpdatesState, match="how many examples were drawn"
    ):
        model.fit(*_data(), verbose=0)


def test_the_running_sum_keeps_the_sensitivity():
    """In float32, later rows round more coarsely beyond a power of two."""
    size, exponent = 64, 12
    keras.utils.set_random_seed(0)
    plain = keras.Sequential(
        [
            keras.Input((1,)),
            L.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    model = tf_dpsub.make_private(plain)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.0),
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            batch_size=4096,
            microbatch_size=size,
        ),
        loss=lambda y, p: -keras.ops.sum(p, -1),
    )

    def total(x):
        parts = given_batches.named(tf.constant(x), tf.zeros([len(x), 1]))
        batch = given_batches.padded(parts, size)
        if model.training_step is None:
            model.prepare_training(
                tf.nest.map_structure(tf.type_spec_from_value, batch)
            )
        return float(model.training_step(batch)[0][0, 0])

    unit, ulp = 1 - 1.25 * 2.0**-10, 2.0 ** (exponent - 24)
    large = int((2**exponent - 1.0) // unit)
    rows = (-(-(large + 1) // size) + 1) * size
    x = np.zeros((rows, 1), "float32")
    x[:large] = 5.0
    # The sum lands just below the power of two; one example more crosses it.
    x[large] = np.float32(2**exponent - unit - total(x) + 2 * ulp)
    small = np.zeros((int(0.05 / ulp) * size // 8, 1), "float32")
    small[::size] = 1.02 * ulp
    without = np.concatenate([x, small])
    with_one = without.copy()
    with_one[rows - size] = 5.0
    assert abs(total(with_one) - total(without)) <= 1.0


def test_a_training_metric_does_not_pass_for_public_validation():
    model = _private(L.Dense(1))
    stop = keras.callbacks.EarlyStopping(monitor="val_loss")
    with pytest.raises(ValueError, match="steer by private results"):
        model.fit(
            *_data(),
            verbose=0,
            callbacks=[stop],
            validation_data_is_public=True,
        )


def test_one_target_that_is_nan_spoils_no_metric():
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((3,)), L.Dense(1)])
    model = tf_dpsub.make_private(plain)
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.1),
            noise_multiplier=1.0,
            l2_norm_clip=1.0,
            batch_size=40,
        ),
        loss="mse",
        metrics=["mae"],
        weighted_metrics=["mse"],
    )
    x, y = _data()
    y[3] = np.nan
    weight = np.ones(40, "float32")
    weight[5] = np.nan
    history = model.fit(x, y, sample_weight=weight, verbose=0).history
    assert history["dropped"] == [2]
    assert all(np.isfinite(values).all() for values in history.values())


class _Writes(keras.metrics.Metric):
    """A metric that keeps a private value in a variable of another."""

    def __init__(self):
        super().__init__(name="writes")
        self.target = lambda: ()

    def update_state(self, y_true, y_pred, sample_weight=None):
        for variable in self.target():
            value = tf.reduce_max(tf.abs(y_pred))
            variable.assign(
                tf.cast(tf.fill(variable.shape, value), variable.dtype)
            )

    def result(self):
        return 0.0


@pytest.mark.parametrize(
    "choose",
    [
        lambda optimizer: optimizer.clip_variable,
        lambda optimizer: optimizer.inner_optimizer.variables[-1],
        lambda optimizer: optimizer.inner_optimizer._learning_rate,
    ],
    ids=["clip", "momentum", "learning_rate"],
)
def test_metrics_that_write_to_the_optimizer_are_refused(choose):
    """Its variables are released, or scale what is."""
    optimizer = tf_dpsub.optimizers.AdaptiveDPSGD(
        keras.optimizers.SGD(0.1, momentum=0.9),
        noise_multiplier=1.0,
        l2_norm_clip=1.0,
        batch_size=8,
        microbatch_size=4,
        clipped_count_stddev=1.0,
    )
    writes = _Writes()
    model = tf_dpsub.make_private(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    )
    model.compile(optimizer, "mse", metrics=[writes])
    writes.target = lambda: (choose(optimizer),)
    x = np.ones((16, 4), "float32")
    with pytest.raises(
        tf_dpsub.gradients.UpdatesState, match="variable of the optimizer"
    ):
        model.fit(x, x[:, :1], verbose=0)
