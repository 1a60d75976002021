"""Steps run the trace that was checked before the first of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.training.plain_models import (
    CLASSES,
    EXACT,
    EXAMPLES,
    X,
    Y,
    assert_same_weights,
    dpsgd,
    fit_plainly,
    linear,
    mlp,
    private,
    twin,
)
from tf_dpsub import optimizers, subspaces
from tf_dpsub.gradients import selection

layers = keras.layers


@pytest.fixture(autouse=True)
def none_passed_yet(monkeypatch):
    """What passed before would not be checked."""

    class Never(dict):
        def __setitem__(self, key, value):
            """Keeps nothing."""

    monkeypatch.setattr(selection, "_CHECKED", Never())


class _Counted(keras.losses.SparseCategoricalCrossentropy):
    """A loss that counts its traces."""

    def __init__(self):
        super().__init__(from_logits=True)
        self.traces = 0

    def call(self, y_true, y_pred):
        self.traces += 1
        return super().call(y_true, y_pred)


def _traces(**arguments):
    """How often the loss of a model is traced until its first step is made."""
    loss = _Counted()
    model = private(linear(), dpsgd(), loss=loss, **arguments)
    model.fit(X, Y, verbose=0)
    return loss.traces


def test_the_loss_is_traced_once_less():
    assert _traces(jit_compile=True) == _traces() + 1


def test_a_graph_that_passed_before_is_traced_for_its_steps(monkeypatch):
    monkeypatch.setattr(selection, "_CHECKED", {})
    assert _traces() == _traces()


def test_a_subspace_is_not_there_yet():
    subspace = subspaces.PublicSubspace(-X[:8], Y[:8], rank=2)
    optimizer = optimizers.ProjectedDPSGD(
        keras.optimizers.SGD(0.1),
        subspace=subspace,
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        batch_size=4,
        microbatch_size=4,
    )
    model = private(linear(), optimizer)
    model.fit(X, Y, verbose=0)
    assert model.training_step._traced is None


@pytest.mark.parametrize("batch_size", [EXAMPLES, 7])
def test_trains_as_keras_does(batch_size):
    """All examples are counted, in as many microbatches as there are."""
    plain = mlp()
    expected = twin(plain)
    model = private(
        plain,
        dpsgd(batch_size=EXAMPLES, **EXACT, microbatch_size=batch_size),
        metrics=["accuracy"],
    )
    history = model.fit(X, Y, epochs=3, verbose=0).history
    assert model.training_step._traced is not None
    reference = fit_plainly(expected, keras.optimizers.SGD(0.1))
    assert_same_weights(plain, expected)
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(history[name], reference[name], rtol=1e-5)


def test_masks_of_predictions_reach_metrics():
    """They are lost where a function ends."""
    ids = np.array([[1, 2, 0, 0], [3, 0, 0, 0]] * 10)
    labels = np.zeros([EXAMPLES, 4], int)
    plain = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Embedding(4, 3, mask_zero=True),
            layers.Dense(CLASSES, kernel_initializer="zeros"),
        ]
    )
    # Right where the mask is, wrong where it is not.
    labels[ids != 0] = 1
    model = private(
        plain,
        dpsgd(keras.optimizers.SGD(0.0)),
        metrics=["accuracy"],
    )
    history = model.fit(ids, labels, verbose=0).history
    assert model.training_step._traced is not None
    assert history["accuracy"] == [0.0]


def test_every_pass_draws_anew():
    """Equal examples of two microbatches have other dropout masks."""
    features = 4096
    model = private(
        keras.Sequential(
            [
                keras.Input((features,)),
                layers.Dropout(0.5),
                layers.Dense(CLASSES),
            ]
        ),
        dpsgd(microbatch_size=2, **EXACT),
    )
    batch = {
        "x": tf.ones([4, features]),
        "y": tf.zeros([4], tf.int64),
        "real": tf.ones([4]),
    }
    model.prepare_training(
        tf.nest.map_structure(
            lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), batch
        )
    )
    assert model.training_step._traced is not None
    kernel, _ = model.training_step(batch)
    dropped = np.mean(kernel[:, 0] == 0.0)
    # In all of four masks, 1 of 16; of two, 1 of 4.
    assert 0.03 < dropped < 0.15


def test_a_metric_that_writes_a_weight_is_still_refused():
    """Metrics are updated outside of the shared trace."""
    from tf_dpsub import gradients

    plain = linear()

    class Leak(keras.metrics.Metric):
        def update_state(self, y_true, y_pred, sample_weight=None):
            plain.layers[0].bias.assign(tf.reduce_mean(y_pred, 0))

        def result(self):
            return 0.0

    model = private(plain, dpsgd(), metrics=[Leak()])
    with pytest.raises(gradients.UpdatesState, match="own variables alone"):
        model.fit(X, Y, verbose=0)


class _Kept(layers.Dense):
    """A dense layer that keeps its output."""

    def call(self, x):
        self.kept = super().call(x)
        return self.kept


def test_a_metric_reads_what_the_model_kept():
    """It is a tensor of the trace of a pass, which is then not shared."""
    layer = _Kept(4)

    class Norm(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            norms = tf.norm(layer.kept, axis=-1)
            return super().update_state(norms, sample_weight=sample_weight)

    plain = keras.Sequential(
        [keras.Input(X.shape[1:]), layer, layers.Dense(CLASSES)]
    )
    model = private(plain, dpsgd(), metrics=[Norm(name="norm")])
    assert model.fit(X, Y, verbose=0).history["norm"][0] > 0
    assert model.training_step._traced is None


class _Scale(layers.Layer):
    """Multiplies by a number that may be set."""

    factor = 1.0

    def call(self, x):
        return x * self.factor


@pytest.mark.parametrize("when", ["on_train_begin", "on_epoch_begin"])
def test_attributes_set_by_callbacks_count(when):
    """They are set after the check, and before the first step."""

    def trained(scale, *callbacks):
        plain = keras.Sequential(
            [
                keras.Input(X.shape[1:]),
                scale,
                layers.Dense(CLASSES, kernel_initializer="zeros"),
            ]
        )
        model = private(plain, dpsgd(batch_size=EXAMPLES, **EXACT))
        model.fit(X, Y, verbose=0, callbacks=list(callbacks))
        return plain.layers[-1].kernel.numpy()

    doubled, late = _Scale(), _Scale()
    doubled.factor = 2.0

    def double(*args, **kwargs):
        late.factor = 2.0

    callback = keras.callbacks.Callback()
    setattr(callback, when, double)
    kernel = trained(late, callback)
    np.testing.assert_allclose(kernel, trained(doubled), rtol=1e-6)
    assert np.abs(kernel - trained(_Scale())).max() > 1e-3
