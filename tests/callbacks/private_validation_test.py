import copy

import dp_accounting
import keras
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub.callbacks import PrivacyBudget, PrivateValidation
from tf_dpsub.training.requirements import reads_private_results

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((60, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")


def _model(metrics=None, **kwargs):
    kwargs = kwargs or {"noise_multiplier": 3.0}
    model = tf_dpsub.make_private(tf_dpsub.models.mlp((4,), (), 2))
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(0.5), l2_norm_clip=1.0, batch_size=20, **kwargs
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=metrics,
    )
    return model


def _validation(**kwargs):
    kwargs = {"noise_multiplier": 20.0, "seed": 0, **kwargs}
    return PrivateValidation(X[:30], Y[:30], **kwargs)


def _stopping(**kwargs):
    return keras.callbacks.EarlyStopping(
        "val_private_accuracy", mode="max", **kwargs
    )


# There is none in the first epoch.
@pytest.mark.filterwarnings("ignore:Can save best model only:UserWarning")
def test_steers_a_run_and_is_counted(tmp_path):
    model = _model()
    validation = _validation(every=2, metrics={"accuracy": 1.0, "loss": 5.0})
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "{epoch}.weights.h5",
        "val_private_loss",
        save_best_only=True,
        save_weights_only=True,
        initial_value_threshold=1e9,
        mode="min",
    )
    history = model.fit(
        X, Y, epochs=5, verbose=0, callbacks=[validation, best]
    ).history
    assert list(validation.history) == [2, 4]
    for name in ("accuracy", "loss"):
        first, second = (e[name].value for e in validation.history.values())
        # Between releases it is repeated.
        logged = history[f"val_private_{name}"]
        assert logged == [first, first, second, second]
    assert list(tmp_path.iterdir())
    training, releases = model.ledger.entries
    assert (training.steps, training.epochs, releases.steps) == (15, 5, 2)
    assert not training.private_selection
    step = dp_accounting.PoissonSampledDpEvent(
        1 / 3, dp_accounting.GaussianDpEvent(3.0)
    )
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(step, 15)
    accountant.compose(dp_accounting.GaussianDpEvent(20.0), 2)
    assert model.epsilon(1e-5) == pytest.approx(
        accountant.get_epsilon(1e-5), rel=1e-3
    )
    assert "steer" not in model.privacy_statement(1e-5)


def test_stops_early_by_what_was_released():
    model = _model()
    validation = _validation(noise_multiplier=1e3)
    model.fit(X, Y, epochs=9, verbose=0, callbacks=[validation, _stopping()])
    values = [e["accuracy"].value for e in validation.history.values()]
    best = next(k for k in range(1, 9) if values[k] <= max(values[:k]))
    assert len(values) == best + 1
    assert model.ledger.entries[1].steps == len(values)


@pytest.mark.parametrize(
    ("callbacks", "is_public", "steers"),
    [
        ([_validation(), _stopping()], False, False),
        ([_stopping(), _validation()], False, True),
        ([_stopping()], False, True),
        # A metric of compile may have this name: it has no noise.
        ([_stopping()], True, True),
        ([_validation(metrics={"loss": 1.0}), _stopping()], False, True),
        ([_validation(), keras.callbacks.EarlyStopping("loss")], False, True),
    ],
)
def test_what_passes_as_released(callbacks, is_public, steers):
    assert bool(reads_private_results(callbacks, is_public)) == steers


def test_a_target_covers_steps_and_releases():
    model = _model(epsilon=2.0, delta=1e-5)
    model.fit(X, Y, epochs=4, verbose=0, callbacks=[_validation(every=2)])
    assert model.ledger.entries[0].steps == 12
    assert model.ledger.entries[1].steps == 2
    assert 1.99 < model.epsilon(1e-5) <= 2.0


def test_a_target_that_releases_spend_is_refused():
    model = _model(epsilon=2.0, delta=1e-5)
    with pytest.raises(ValueError, match="Raise their noise_multiplier"):
        model.fit(X, Y, callbacks=[_validation(noise_multiplier=1.0)])
    assert model.ledger.steps == 0


def test_a_budget_counts_planned_releases():
    model = _model()
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[_validation()])
    spent = model.epsilon(1e-5)
    for epsilon, is_kept in ((spent * 1.001, True), (spent * 0.999, False)):
        model = _model()
        callbacks = [PrivacyBudget(epsilon, 1e-5), _validation()]
        if is_kept:
            model.fit(X, Y, epochs=2, verbose=0, callbacks=callbacks)
            continue
        with pytest.raises(ValueError, match="keeps the budget"):
            model.fit(X, Y, epochs=2, verbose=0, callbacks=callbacks)
        assert model.ledger.steps == 0


@pytest.mark.parametrize(
    ("callbacks", "metrics", "message"),
    [
        ([_validation(every=2)], None, "none is due"),
        ([_validation(), _validation()], None, "two for val_private_accuracy"),
        ([_validation(metrics={"auc": 1.0})], None, "mean over rows"),
        (
            [_validation()],
            [keras.metrics.SparseCategoricalAccuracy("private_accuracy")],
            "Rename it",
        ),
    ],
)
def test_bad_input_charges_nothing(callbacks, metrics, message):
    model = _model(metrics)
    with pytest.raises(ValueError, match=message):
        model.fit(X, Y, verbose=0, callbacks=callbacks)
    assert model.ledger.steps == 0


@pytest.mark.parametrize(
    "arguments",
    [{"noise_multiplier": 0.0}, {"every": 0}, {"metrics": {"loss": 0.0}}],
)
def test_arguments_out_of_range(arguments):
    with pytest.raises(ValueError, match="Expected"):
        _validation(**arguments)


def test_refuses_a_plain_model():
    plain = tf_dpsub.models.mlp((4,), (), 2)
    plain.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="Expected a private model"):
        plain.fit(X, Y, verbose=0, callbacks=[_validation()])


def test_refuses_a_metric_of_its_name_without_noise():
    class Other(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_private_accuracy"] = 1.0

    with pytest.raises(ValueError, match="it has no noise"):
        _model().fit(X, Y, verbose=0, callbacks=[Other(), _validation()])


def test_a_copy_has_noise_of_its_own():
    values = []
    validation = PrivateValidation(X, Y, noise_multiplier=1e3)
    for callback in (validation, copy.deepcopy(validation)):
        _model().fit(X, Y, verbose=0, callbacks=[callback])
        values.append(callback.history[1]["accuracy"].value)
    assert values[0] != values[1]


class Snapshot(keras.callbacks.Callback):
    """Keeps what each epoch's model says of the releases in its ledger."""

    def on_train_begin(self, logs=None):
        self.releases = []

    def on_epoch_end(self, epoch, logs=None):
        entries = self.model.ledger.entries
        self.releases.append(sum(e.steps for e in entries if e.is_validation))


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_saved_at_an_epoch_has_its_release(tmp_path, place):
    """Wherever it is in the list, and in a list of Keras."""
    saves = keras.callbacks.ModelCheckpoint(
        tmp_path / "{epoch}.weights.h5", save_weights_only=True
    )
    callbacks = [Snapshot(), saves]
    callbacks.insert(2 * place, _validation())
    model = _model()
    if place:
        callbacks = keras.callbacks.CallbackList(
            callbacks, add_history=True, model=model
        )
    model.fit(X, Y, epochs=2, verbose=0, callbacks=callbacks)
    assert [model.ledger.entries[k].steps for k in (0, 1)] == [6, 2]
    for epoch in (1, 2):
        loaded = _model()
        loaded.load_weights(tmp_path / f"{epoch}.weights.h5")
        training, releases = loaded.ledger.entries
        assert (training.steps, releases.steps) == (3 * epoch, epoch)
    if not place:
        assert callbacks[1].releases == [1, 2]


def test_weights_that_a_callback_changes_before_a_release():
    class Changes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.set_weights([w + 1 for w in self.model.get_weights()])

    model = _model()
    model.fit(X, Y, verbose=0, callbacks=[Changes(), _validation()])
    assert "changes of the weights" in model.ledger.entries[-1].uncovered[0]


def test_steps_that_are_not_counted_are_noticed_beside_releases():
    model = _model()
    model.fit(X, Y, verbose=0, callbacks=[_validation()])
    model.optimizer.iterations.assign_add(1)
    with pytest.raises(ValueError, match="counts all steps"):
        model.epsilon(1e-5)
