"""Every step of a run is recorded, and callbacks work as for any model."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.training.plain_models import (
    X,
    Y,
    assert_same_weights,
    dpsgd,
    linear,
    loss,
    private,
    twin,
)
from tf_dpsub.data import given_batches
from tf_dpsub.training import fit_callbacks, private_step

layers = keras.layers


@pytest.fixture(scope="module")
def shared():
    """A model of several tests, whose step is traced once."""
    return private(linear(), dpsgd())


@pytest.fixture
def steps_taken(shared):
    """Number of steps of the shared model since the test began."""
    before = shared.ledger.steps

    def count():
        assert shared.ledger.steps == int(shared.optimizer.iterations)
        return shared.ledger.steps - before

    return count


class TestSteps:
    def test_a_forked_process_is_refused_uncharged(self, monkeypatch):
        model = private(linear(), dpsgd(seed=None))
        model.fit(X, Y, verbose=0)
        steps = model.ledger.steps
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="forked from it"):
            model.fit(X, Y, verbose=0)
        assert model.ledger.steps == steps

    def test_ledger_holds_every_step(self, shared, steps_taken):
        shared.fit(X, Y, epochs=2, verbose=0)
        assert steps_taken() == 10

    @pytest.mark.parametrize("steps_per_execution", [3, 64])
    def test_ledger_holds_every_step_of_executions(self, steps_per_execution):
        model = private(
            linear(), dpsgd(), steps_per_execution=steps_per_execution
        )
        model.fit(X, Y, epochs=2, verbose=0)
        assert model.ledger.steps == 10
        assert int(model.optimizer.iterations) == 10

    def test_epoch_is_rounded_up(self, shared, steps_taken):
        shared.fit(X[:18], Y[:18], verbose=0)
        assert steps_taken() == 5

    def test_initial_epoch_and_steps_per_epoch(self, shared, steps_taken):
        shared.fit(
            X, Y, initial_epoch=1, epochs=3, steps_per_epoch=4, verbose=0
        )
        assert steps_taken() == 8

    def test_limit_holds_inside_of_an_execution(self):
        class Limit(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                assert self.model.current_run.steps == 15
                self.model.current_run.limit(7)

        model = private(linear(), dpsgd(), steps_per_execution=3)
        model.fit(X, Y, epochs=3, callbacks=[Limit()], verbose=0)
        assert model.ledger.steps == int(model.optimizer.iterations) == 7
        # The limit ends with the run.
        model.fit(X, Y, verbose=0)
        assert model.ledger.steps == int(model.optimizer.iterations) == 12

    def test_a_map_is_tried_once_before_it_is_traced(self, monkeypatch):
        """Its conversion takes longer than all else before the first step."""
        calls = []
        original = tf.vectorized_map

        def counted(*args, **kwargs):
            calls.append(args)
            return original(*args, **kwargs)

        monkeypatch.setattr(tf, "vectorized_map", counted)
        model = private(linear(), dpsgd(per_example="vectorized_map"))
        model.fit(X, Y, verbose=0)
        assert model.training_step.implementation == "vectorized_map"
        assert len(calls) == 2

    def test_are_traced_once(self):
        """Whatever the size of a Poisson batch, and for later runs, too."""
        traces = []

        class Traced(keras.losses.SparseCategoricalCrossentropy):
            def call(self, y_true, y_pred):
                traces.append(1)
                return super().call(y_true, y_pred)

        after_steps = []
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: after_steps.append(
                len(traces)
            )
        )
        model = private(linear(), dpsgd(), loss=Traced(from_logits=True))
        for epochs in (4, 2):
            model.fit(X, Y, epochs=epochs, callbacks=[look], verbose=0)
        assert len(after_steps) == 30
        assert len(set(after_steps)) == 1

    def test_other_data_trace_nothing_again(self, monkeypatch):
        """Other numbers of rows, sampling rates and epochs."""
        traces = []
        original = private_step.PrivateStep._microbatch_sums

        def counted(self, part):
            traces.append(part["real"].shape[0])
            return original(self, part)

        monkeypatch.setattr(
            private_step.PrivateStep, "_microbatch_sums", counted
        )
        x, y = (np.repeat(a, 8, 0)[:120] for a in (X, Y))
        model = private(linear(), dpsgd(batch_size=20))
        for rows, epochs in ((90, 1), (90, 2), (120, 1), (100, 3)):
            model.fit(x[:rows], y[:rows], epochs=epochs, verbose=0)
            assert len(traces) == 1

    def test_sums_take_no_memory_beside_the_first_microbatch(self, shared):
        shared.fit(X, Y, verbose=0)
        batches = tf.nest.map_structure(
            lambda s: tf.TensorSpec([None, *s.shape[1:]], s.dtype),
            shared.training_step.spec,
        )
        step = tf.function(shared.training_step._sums, autograph=False)
        made = {
            op.type
            for op in step.get_concrete_function(batches).graph.get_operations()
            for t in op.outputs
            if t.dtype == tf.float64 and t.shape.rank != 0
        }
        assert "EnsureShape" in made and not made & {"Const", "Fill"}

    def test_are_built_once_for_each_kind_of_batch(self, monkeypatch):
        built = []
        step = private_step.PrivateStep
        monkeypatch.setattr(
            private_step,
            "PrivateStep",
            lambda *args: built.append(args) or step(*args),
        )
        model = private(linear(), dpsgd())
        x, y = X[:4], Y[:4]
        for weights in (None, np.ones(4), None, np.ones(4)):
            model.train_on_batch(x, y, sample_weight=weights)
            assert ("w" in model.training_step.spec) == (weights is not None)
        assert len(built) == 2
        # Nor does a run need others.
        model.fit(x, y, verbose=0)
        assert len(built) == 2
        model.compile(dpsgd(), loss=loss())
        model.train_on_batch(x, y)
        assert len(built) == 3

    def test_limit_of_no_steps(self, shared, steps_taken):
        class Limit(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                self.model.current_run.limit(0)

        before = shared.get_weights()
        shared.fit(X, Y, callbacks=[Limit()], verbose=0)
        assert steps_taken() == 0
        for own, other in zip(shared.get_weights(), before, strict=True):
            np.testing.assert_array_equal(own, other)

    def test_a_run_that_is_refused_leaves_none_in_progress(self, monkeypatch):
        """Steps would be taken in it, and not counted."""
        model = private(linear(), dpsgd())

        def refuse(optimizer, steps):
            assert model.current_run is not None
            raise ValueError("refused")

        monkeypatch.setattr(
            type(model.optimizer.public_state), "begin_run", refuse
        )
        for train in (model.fit, model.train_on_batch):
            with pytest.raises(ValueError, match="refused"):
                train(X[:4], Y[:4])
            assert model.current_run is None
            with pytest.raises(RuntimeError, match="outside of fit"):
                model.train_step({"x": X[:4]})
        assert model.ledger.steps == 0

    @pytest.mark.parametrize(
        "hook, steps",
        [
            ("on_train_begin", 0),
            ("on_epoch_begin", 0),
            ("on_train_batch_begin", 0),
            ("on_train_batch_end", 1),
            ("on_epoch_end", 5),
        ],
    )
    @pytest.mark.parametrize("is_list", [False, True])
    def test_a_step_of_a_callback_is_refused(
        self, shared, steps_taken, hook, steps, is_list
    ):
        """Its batch was chosen, and would count as one that was drawn."""
        batch = given_batches.padded(given_batches.named(X[:4], Y[:4]), 4)
        foreign = iter([batch])

        def take(*args, **kwargs):
            shared.train_function(foreign)

        callback = keras.callbacks.Callback()
        setattr(callback, hook, take)
        callbacks = [callback]
        if is_list:
            callbacks = keras.callbacks.CallbackList(callbacks, model=shared)
        with pytest.raises(RuntimeError, match="between its steps"):
            shared.fit(X, Y, callbacks=callbacks, verbose=0)
        assert steps_taken() == steps
        assert next(foreign) is batch

    @pytest.mark.parametrize(
        "hook", ["on_epoch_begin", "on_train_batch_begin", "on_epoch_end"]
    )
    def test_a_train_step_of_a_callback_is_refused(
        self, shared, steps_taken, hook
    ):
        """Nothing would be charged for it."""
        batch = given_batches.padded(given_batches.named(X[:4], Y[:4]), 4)
        callback = keras.callbacks.Callback()
        setattr(callback, hook, lambda *args, **_: shared.train_step(batch))
        with pytest.raises(RuntimeError, match="between their steps"):
            shared.fit(X, Y, callbacks=[callback], verbose=0)
        assert steps_taken() == (5 if hook == "on_epoch_end" else 0)

    def test_a_step_that_is_due_twice_is_refused(self, shared, steps_taken):
        """A list of callbacks may call its hooks more often than Keras does."""

        class Twice(keras.callbacks.CallbackList):
            def on_train_batch_begin(self, batch, logs=None):
                super().on_train_batch_begin(batch, logs)
                super().on_train_batch_begin(batch, logs)

        with pytest.raises(RuntimeError, match="more than once"):
            shared.fit(X, Y, callbacks=Twice(model=shared), verbose=0)
        assert steps_taken() == 0

    def test_a_train_step_of_two_steps_is_refused(self):
        class Twice(tf_dpsub.PrivateModel):
            def train_step(self, data):
                super().train_step(data)
                return super().train_step(data)

        model = Twice(linear())
        model.compile(dpsgd(), loss())
        with pytest.raises(RuntimeError, match="or twice in one"):
            model.fit(X, Y, verbose=0)
        assert int(model.optimizer.iterations) == 0

    def test_weights_of_another_run_are_refused(self):
        """The ledger of neither would hold all steps that they take."""
        plain = linear()
        model, other = private(plain, dpsgd()), private(plain, dpsgd())

        class Nested(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                other.train_on_batch(X[:4], Y[:4])

        with pytest.raises(RuntimeError, match="no other model trains"):
            model.fit(X, Y, callbacks=[Nested()], verbose=0)
        assert (model.ledger.steps, other.ledger.steps) == (1, 0)
        other.train_on_batch(X[:4], Y[:4])
        assert other.ledger.steps == 1

    @pytest.mark.parametrize("method", ["fit", "train_on_batch"])
    def test_another_run_within_it_is_refused(
        self, shared, steps_taken, method
    ):
        """It would end the one in progress, and nothing would be charged."""

        class Nested(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                getattr(self.model, method)(X[:4], Y[:4])

        with pytest.raises(RuntimeError, match="fit` in progress, got one"):
            shared.fit(X, Y, callbacks=[Nested()], verbose=0)
        assert steps_taken() == 1
        assert shared.current_run is None

    def test_steps_of_an_interrupted_run_count(self, shared, steps_taken):
        class Interrupt(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 2:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            shared.fit(X, Y, callbacks=[Interrupt()], verbose=0)
        assert steps_taken() == 3
        assert shared.current_run is None
        shared.fit(X, Y, verbose=0)
        assert steps_taken() == 8


class TestOldNames:
    """Of version 0.1, when a callback spoke to the model."""

    def test_are_those_of_the_run(self):
        class Ask(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                model, current = self.model, self.model.current_run
                assert model.planned_steps == current.steps == 5
                with pytest.warns(FutureWarning, match="steps_within"):
                    assert model.steps_within(3.0, 1e-5) == (
                        current.steps_within(3.0, 1e-5)
                    )
                with pytest.warns(FutureWarning, match="current_run.limit;"):
                    model.limit_steps(2)
                with pytest.warns(FutureWarning, match="observe_sums"):
                    model.observe_sums(lambda sums: None, "what it sees")

        model = private(linear(), dpsgd())
        assert model.planned_steps is None
        model.fit(X, Y, callbacks=[Ask()], verbose=0)
        assert model.ledger.steps == 2
        assert model.ledger.entries[0].uncovered == ("what it sees",)

    @pytest.mark.filterwarnings("ignore:PrivateModel.limit_steps")
    def test_want_a_run(self):
        model = private(linear(), dpsgd())
        with pytest.raises(RuntimeError, match="call of `fit` in progress"):
            model.limit_steps(2)


def _epochs(model):
    return sum(entry.epochs for entry in model.ledger.entries)


class TestCallbacks:
    def test_dropped_examples_are_shown_if_there_are_any(self, capsys):
        model = private(linear(), dpsgd(batch_size=len(X)))
        for dropped in (0, 1):
            x = X.copy()
            x[:dropped] = np.inf
            history = model.fit(x, Y, verbose=2).history
            assert history["dropped"] == [dropped]
            assert ("dropped" in capsys.readouterr().out) == bool(dropped)

    def test_log_rates_and_checkpoints(self, tmp_path):
        model = private(linear(), dpsgd(), metrics=["accuracy"])
        model.fit(
            X,
            Y,
            epochs=2,
            validation_data=(X, Y),
            callbacks=[
                keras.callbacks.LearningRateScheduler(lambda epoch: 0.5**epoch),
                keras.callbacks.CSVLogger(tmp_path / "log.csv"),
                keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
            ],
            verbose=0,
        )
        with open(tmp_path / "log.csv") as log:
            header, *rows = [line.strip().split(",") for line in log]
        assert header == [
            "epoch",
            "accuracy",
            "dropped",
            "learning_rate",
            "loss",
            "val_accuracy",
            "val_loss",
        ]
        assert [float(row[3]) for row in rows] == [1.0, 0.5]
        for epoch, steps in ((1, 5), (2, 10)):
            loaded = keras.models.load_model(tmp_path / f"{epoch}.keras")
            assert loaded.ledger.steps == steps
        assert_same_weights(loaded, model)

    def test_one_callback_or_a_list_of_keras(self, shared, steps_taken):
        seen = []
        callback = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])
        )
        epochs = _epochs(shared)
        shared.fit(X, Y, callbacks=callback, verbose=0)
        listed = keras.callbacks.CallbackList(
            [callback], add_history=True, model=shared
        )
        shared.fit(X, Y, callbacks=listed, verbose=0)
        listed.callbacks.insert(0, keras.callbacks.Callback())
        shared.fit(X, Y, callbacks=listed, verbose=0)
        # The run counts epochs before any of them, wherever it was put.
        assert isinstance(listed.callbacks[0], fit_callbacks.EpochCounter)
        assert len(seen) == 3
        assert steps_taken() == 15
        # The ledger counts each epoch once.
        assert _epochs(shared) == epochs + 3

    @pytest.mark.filterwarnings("ignore:Expected a ledger_path:UserWarning")
    def test_resumes_after_a_crash(self, tmp_path):
        class Crash(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 2:
                    raise RuntimeError("crash")

        def fit(model, *callbacks):
            backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
            model.fit(X, Y, epochs=4, callbacks=[backup, *callbacks], verbose=0)

        plain = linear()
        model = private(plain, dpsgd(keras.optimizers.SGD(0.1, 0.9)))
        with pytest.raises(RuntimeError, match="crash"):
            fit(model, Crash())
        again = private(twin(plain), dpsgd(keras.optimizers.SGD(0.1, 0.9)))
        fit(again)
        # Two epochs of each: what the first one spent is not forgotten.
        assert again.ledger.steps == int(again.optimizer.iterations) == 20

    @pytest.mark.parametrize("with_ledger", [True, False])
    def test_backups_want_a_ledger(self, tmp_path, recwarn, with_ledger):
        path = tmp_path / "ledger.json" if with_ledger else None
        model = tf_dpsub.make_private(linear(), ledger_path=path)
        model.compile(dpsgd(), loss())
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        model.fit(X, Y, callbacks=[[backup]], verbose=0)
        told = [w for w in recwarn if "ledger_path" in str(w.message)]
        assert len(told) == (0 if with_ledger else 1)
        assert all(w.filename == __file__ for w in told)
