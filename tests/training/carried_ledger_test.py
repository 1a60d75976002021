"""The ledger goes where the weights go, and knows when they are changed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import X, Y, dpsgd, linear, loss, private

CHANGED = "the weights were changed after the last private step"
BETWEEN = "changes of the weights between private steps"
BEFORE = "data that they had seen before the first private step"
STEPS = 5
ENTRY = tf_dpsub.accounting.LedgerEntry(
    mechanism="DPSGD",
    noise_multiplier=1.0,
    l2_norm_clip=1.0,
    batch_size=4,
    examples=20,
    sampler="poisson",
)


def fresh():
    return private(linear(), dpsgd())


@pytest.fixture(name="model", scope="module")
def _model():
    """Trained; tests leave it alone."""
    model = fresh()
    model.fit(X, Y, verbose=0)
    return model


def trained():
    model = fresh()
    model.fit(X, Y, verbose=0)
    return model


def stated(model):
    return " ".join(model.privacy_statement(1e-5).split())


def by_checkpoint(model, other, folder):
    path = tf.train.Checkpoint(model=model).write(folder / "checkpoint")
    tf.train.Checkpoint(model=other).read(path).expect_partial()


def by_manager(model, other, folder):
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=model, optimizer=model.optimizer), folder, 2
    )
    manager.save()
    other.optimizer.build_for(other)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(
        manager.latest_checkpoint
    ).expect_partial()


def by_state_tree(value_format):
    def way(model, other, folder):
        other.optimizer.build_for(other)
        other.set_state_tree(model.get_state_tree(value_format))

    return way


def by_weights_of_a_state_tree(model, other, folder):
    state_tree = model.get_state_tree("numpy_array")
    other.set_state_tree(
        {
            kind: state_tree[kind]
            for kind in ("trainable_variables", "non_trainable_variables")
        }
    )


def by_weights(model, other, folder):
    # A copy, as of a list that went through other hands.
    other.set_weights([np.array(w) for w in model.get_weights()])


WAYS = {
    "tf.train.Checkpoint": by_checkpoint,
    "CheckpointManager": by_manager,
    "state tree": by_state_tree("numpy_array"),
    "state tree of tensors": by_state_tree("backend_tensor"),
    "weights of a state tree": by_weights_of_a_state_tree,
    "set_weights": by_weights,
}


@pytest.mark.filterwarnings("ignore:The path .* not found:UserWarning")
@pytest.mark.parametrize("way", WAYS)
class TestWeightsBringTheirSteps:
    def test_to_a_new_model(self, model, tmp_path, way):
        other = fresh()
        for _ in range(2):
            WAYS[way](model, other, tmp_path)
            assert other.ledger.entries == model.ledger.entries
        assert other.epsilon(1e-5) == model.epsilon(1e-5) > 0

    def test_which_are_added_to_its_own(self, model, tmp_path, way):
        other = fresh()
        other.ledger.charge(ENTRY, 7)
        WAYS[way](model, other, tmp_path)
        assert other.ledger.steps == 7 + STEPS

    def test_never_shortened(self, tmp_path, way):
        model, early = fresh(), fresh()
        model.ledger.charge(ENTRY, STEPS)
        early.ledger.merge(model.ledger)
        model.ledger.charge(ENTRY, 7)
        WAYS[way](early, model, tmp_path)
        assert model.ledger.steps == STEPS + 7


def test_a_clone_with_the_weights(model):
    clone = keras.models.clone_model(model)
    assert clone.ledger.steps == 0
    clone.set_weights(model.get_weights())
    assert clone.ledger.entries == model.ledger.entries


def test_checkpoints_write_the_ledger_file(model, tmp_path):
    path = tmp_path / "ledger.json"
    other = tf_dpsub.make_private(linear(), ledger_path=path)
    by_checkpoint(model, other, tmp_path)
    assert tf_dpsub.accounting.PrivacyLedger(path).steps == STEPS


class TestStepsWithoutALedger:
    @pytest.fixture(name="restored")
    def _restored(self, model, tmp_path):
        """Whose checkpoint knows of no ledger, as those of old."""
        path = tf.train.Checkpoint(
            model=model.model, optimizer=model.optimizer
        ).write(tmp_path / "checkpoint")
        other = fresh()
        other.optimizer.build_for(other)
        tf.train.Checkpoint(
            model=other.model, optimizer=other.optimizer
        ).restore(path).expect_partial()
        return other

    @pytest.mark.parametrize(
        "use",
        [
            lambda model: model.epsilon(1e-5),
            lambda model: model.privacy_statement(1e-5),
            lambda model: model.fit(X, Y, verbose=0),
            lambda model: model.train_on_batch(X[:4], Y[:4]),
        ],
        ids=["epsilon", "statement", "fit", "train_on_batch"],
    )
    def test_raise(self, restored, use):
        with pytest.raises(
            ValueError, match="got 0 steps in the ledger and 5 of the optimizer"
        ):
            use(restored)
        assert restored.ledger.steps == 0

    def test_unless_they_are_taken_over(self, restored, model):
        restored.ledger.merge(model.ledger)
        assert restored.epsilon(1e-5) == model.epsilon(1e-5)

    def test_are_not_those_before_the_model_was_private(self, tmp_path):
        plain, inner = linear(), keras.optimizers.SGD(0.1)
        plain.compile(inner, loss())
        plain.fit(X, Y, verbose=0)
        model = private(plain, dpsgd(inner))
        assert model.epsilon(1e-5) == 0
        for _ in range(2):
            model.fit(X, Y, verbose=0)
            # Compiled again with the same optimizer.
            model.compile(model.optimizer, loss())
        assert model.ledger.steps == 2 * STEPS
        assert model.epsilon(1e-5) > 0
        # Nor are they after loading.
        other = fresh()
        by_manager(model, other, tmp_path)
        assert int(other.optimizer.iterations) > other.ledger.steps
        assert other.epsilon(1e-5) == model.epsilon(1e-5)


def train_plainly(model):
    model.model.compile("sgd", loss())
    model.model.fit(X, Y, verbose=0)


def train_inside_of_another(model):
    outer = keras.Sequential([keras.Input((4,)), model, keras.layers.Dense(3)])
    outer.compile("sgd", loss())
    outer.fit(X, Y, verbose=0)


def load_plain_weights(model):
    model.model.set_weights([w + 1 for w in model.model.get_weights()])


class TestWeightsChangedElsewhere:
    def test_is_said_and_stays_said(self):
        model = trained()
        for change in (
            train_inside_of_another,
            train_plainly,
            load_plain_weights,
        ):
            weights = model.get_weights()
            assert CHANGED not in stated(model)
            change(model)
            assert CHANGED in stated(model)
            model.set_weights(weights)
        change(model)
        spent = model.epsilon(1e-5)
        assert BETWEEN not in stated(model)
        model.fit(X, Y, verbose=0)
        # The present weights are those of a private step again.
        assert CHANGED not in stated(model)
        assert f"ε does not cover {BETWEEN}" in stated(model)
        assert model.epsilon(1e-5) > spent

    def test_is_logged_once(self, model, caplog):
        other = fresh()
        other.set_weights(model.get_weights())
        other.epsilon(1e-5)
        assert not caplog.records
        load_plain_weights(other)
        for _ in range(2):
            other.epsilon(1e-5)
        (record,) = caplog.records
        assert "epsilon does not cover that" in record.message

    def test_after_single_steps(self):
        model = fresh()
        for _ in range(2):
            model.train_on_batch(X[:4], Y[:4])
            assert CHANGED not in stated(model)
        assert BETWEEN not in stated(model)
        load_plain_weights(model)
        assert CHANGED in stated(model)

    def test_before_the_first_private_step(self, model, tmp_path):
        plain = linear()
        first, second = private(plain, dpsgd()), private(plain, dpsgd())
        assert BEFORE not in stated(second)
        first.train_on_batch(X[:4], Y[:4])
        assert BEFORE not in stated(first)
        # Also after saving.
        second.save(tmp_path / "second.keras")
        for other in second, keras.models.load_model(tmp_path / "second.keras"):
            assert BEFORE in stated(other)
            other.train_on_batch(X[:4], Y[:4])
            assert CHANGED not in stated(other)
            assert BETWEEN not in stated(other)
            assert f"ε does not cover what the weights tell of {BEFORE}" in (
                stated(other)
            )
        # A list brings its steps only as it is.
        other = fresh()
        other.set_weights([w + 1e-6 for w in model.get_weights()])
        assert other.ledger.steps == 0
        assert BEFORE in stated(other)

    @pytest.mark.parametrize("event", ["on_epoch_begin", "on_epoch_end"])
    def test_between_epochs(self, event):
        model = fresh()

        def change(epoch, logs=None):
            if (epoch, event) in ((1, "on_epoch_begin"), (0, "on_epoch_end")):
                load_plain_weights(model)

        callback = keras.callbacks.LambdaCallback(**{event: change})
        model.fit(X, Y, epochs=3, callbacks=[callback], verbose=0)
        assert model.ledger.steps == 3 * STEPS
        assert CHANGED not in stated(model)
        assert stated(model).count(BETWEEN) == 1

    def test_after_the_last_epoch(self):
        model = fresh()
        model.fit(
            X,
            Y,
            callbacks=[
                keras.callbacks.LambdaCallback(
                    on_epoch_end=lambda *_: load_plain_weights(model)
                )
            ],
            verbose=0,
        )
        assert CHANGED in stated(model)

    def test_also_after_saving(self, model, tmp_path):
        model.save(tmp_path / "same.keras")
        changed = keras.models.load_model(tmp_path / "same.keras")
        assert CHANGED not in stated(changed)
        load_plain_weights(changed)
        changed.save(tmp_path / "changed.keras")
        loaded = keras.models.load_model(tmp_path / "changed.keras")
        assert CHANGED in stated(loaded)

    def test_not_by_weights_of_private_steps(self, model, tmp_path):
        other = fresh()
        by_checkpoint(model, other, tmp_path)
        assert CHANGED not in stated(other)
        other.fit(X, Y, verbose=0)
        assert BETWEEN not in stated(other)

    def test_not_by_what_a_run_does(self):
        """Best weights, averages and files of a run are those of its steps."""
        model = private(
            linear(), dpsgd(keras.optimizers.SGD(0.1, use_ema=True))
        )
        stop = keras.callbacks.EarlyStopping(
            "val_loss", mode="max", restore_best_weights=True
        )
        public = np.zeros_like(X), np.zeros_like(Y)
        model.fit(
            X,
            Y,
            epochs=3,
            validation_data=public,
            validation_data_is_public=True,
            callbacks=[stop],
            verbose=0,
        )
        assert CHANGED not in stated(model)
        assert BETWEEN not in stated(model)
        assert BEFORE not in stated(model)
        model.evaluate(X, Y, verbose=0)
        model.predict(X, verbose=0)
        assert CHANGED not in stated(model)

    def test_not_by_averages_of_private_steps(self):
        model = private(
            linear(), dpsgd(keras.optimizers.SGD(0.1, use_ema=True))
        )
        model.fit(X, Y, verbose=0)
        assert CHANGED not in stated(model)
        load_plain_weights(model)
        assert CHANGED in stated(model)

    def test_files_of_a_run_in_progress(self, tmp_path):
        model, path = fresh(), tmp_path / "{epoch}.weights.h5"
        save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        model.fit(X, Y, epochs=2, callbacks=[save], verbose=0)
        for epoch in (1, 2):
            other = fresh()
            other.load_weights(str(path).format(epoch=epoch))
            assert CHANGED not in stated(other)

    def test_files_without_a_digest_say_nothing(self, model):
        store = {}
        model.save_own_variables(store)
        del store["state"]
        other = fresh()
        other.load_own_variables(store)
        assert other.ledger.steps == STEPS
        assert CHANGED not in stated(other)

    def test_of_large_variables(self):
        plain = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(40_000, name="wide")]
        )
        model = private(plain, dpsgd(), loss="mse")
        model.train_on_batch(X[:4], np.zeros((4, 40_000), "float32"))
        assert CHANGED not in stated(model)
        kernel = plain.get_layer("wide").kernel
        kernel.assign(kernel + 1e-6 * tf.sign(kernel))
        assert CHANGED in stated(model)


class Exchange(keras.callbacks.Callback):
    """Puts another optimizer in, once the run has begun."""

    def __init__(self, compiles):
        super().__init__()
        self._compiles = compiles

    def on_train_begin(self, logs=None):
        model, spec = self.model, self.model.training_step.spec
        other = dpsgd(noise_multiplier=1e-6)
        if self._compiles:
            model.compile(other, loss())
            model.prepare_training(spec)
            model.make_train_function()
        else:
            other.build_for(model)
            model.optimizer = other


@pytest.mark.parametrize("compiles", [False, True])
def test_no_step_of_an_optimizer_that_is_not_in_the_ledger(compiles):
    model = fresh()
    weights = model.model.get_weights()
    with pytest.raises(ValueError, match="optimizer that the run began with"):
        model.fit(X, Y, callbacks=[Exchange(compiles)], verbose=0)
    for before, after in zip(weights, model.model.get_weights(), strict=True):
        np.testing.assert_array_equal(after, before)
