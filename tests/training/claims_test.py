"""Sums, their noise and the ledger follow the same claims of an optimizer."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import loss
from tf_dpsub import optimizers

ROWS = 20
X = 10 * np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
Y = np.arange(ROWS) % 3


class Mutable(optimizers.DPSGD):
    """A mechanism of a user's own: its clip is a plain attribute."""

    bound = 1.0
    l2_norm_clip = property(lambda self: self.bound)


def private(optimizer_class=Mutable, **kwargs):
    keras.utils.set_random_seed(0)
    model = tf_dpsub.make_private(
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    )
    optimizer = optimizer_class(
        keras.optimizers.SGD(0.0),
        noise_multiplier=1.0,
        batch_size=ROWS,
        microbatch_size=4,
        **{"l2_norm_clip": 1.0, **kwargs},
    )
    model.compile(optimizer, loss())
    return model


class Sums(keras.callbacks.Callback):
    """Norm of the sums of the last step."""

    def on_train_begin(self, logs=None):
        self.norm = tf.Variable(0.0)
        self.model.current_run.observe_sums(
            lambda sums: self.norm.assign(
                tf.linalg.global_norm([tf.cast(s, tf.float32) for s in sums])
            ),
            "the norm of sums",
        )


def fit(model, *callbacks):
    sums = Sums()
    model.fit(X, Y, callbacks=[sums, *callbacks], verbose=0)
    return float(sums.norm)


def changed_between_fits(model):
    before = fit(model)
    model.optimizer.bound = 0.01
    return before, fit(model)


def test_a_clip_that_changes_between_runs_is_that_of_sums_and_noise():
    model = private()
    before, after = changed_between_fits(model)
    # Norms of gradients are above both clips: all sums are scaled alike.
    assert 0.1 < before <= ROWS
    assert after == pytest.approx(0.01 * before, rel=0.5)
    assert model.optimizer.noise_stddevs() == [0.01, 0.01]
    assert [e.l2_norm_clip for e in model.ledger.entries] == [1.0, 0.01]


def test_split_clips_follow_a_clip_that_changes_between_runs():
    before, after = changed_between_fits(private(layer_clips="equal"))
    assert after == pytest.approx(0.01 * before, rel=0.5)


@pytest.mark.parametrize("when", ["train", "epoch", "train_batch"])
def test_a_clip_that_changes_within_a_run_is_refused(when):
    model = private()

    class Change(keras.callbacks.Callback):
        def change(self, *args, **kwargs):
            self.model.optimizer.bound = 0.01

    setattr(Change, f"on_{when}_begin", Change.change)
    with pytest.raises(
        RuntimeError, match="clip 1 with noise multiplier 1, got .* clip 0.01"
    ):
        fit(model, Change())
    assert model.ledger.steps == 0


def test_traced_sums_want_the_clip_that_they_have():
    model = private()
    fit(model)
    step = model.training_step
    batch = {"x": X[:4], "y": Y[:4], "real": np.ones(4, "float32")}
    step(tf.nest.map_structure(tf.constant, batch))
    model.optimizer.bound = 0.01
    with pytest.raises(RuntimeError, match="where its sums were traced"):
        step(tf.nest.map_structure(tf.constant, batch))


@pytest.mark.parametrize(
    ("change", "is_traced_again"),
    [
        (lambda optimizer: None, False),
        (lambda optimizer: setattr(optimizer, "secure_noise", True), True),
    ],
    ids=["nothing", "secure_noise"],
)
def test_steps_are_traced_again_where_claims_change(change, is_traced_again):
    model = private(optimizers.DPSGD)
    model.fit(X, Y, verbose=0)
    function, step = model.train_function, model.training_step
    change(model.optimizer)
    model.fit(X, Y, verbose=0)
    assert (model.train_function is not function) == is_traced_again
    assert (model.training_step is not step) == is_traced_again
