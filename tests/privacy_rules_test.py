"""Rules of privacy that hold for whole private models, not for one module.

Steps are taken by `fit` and `train_on_batch`, with an inner optimizer that
subtracts the gradient, so that weights tell what a step released.
"""

import math
import pickle
import secrets
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tf_dpsub
from tests import graphs
from tests.training.plain_models import (
    EXACT,
    EXAMPLES,
    FEATURES,
    X,
    Y,
    dpsgd,
    linear,
    loss,
    mlp,
    private,
)
from tf_dpsub import accounting, data

layers = keras.layers


def subtract():
    return keras.optimizers.SGD(1.0)


def no_loss(y_true, y_pred):
    """Its gradient is zero: what moves the weights is noise."""
    return 0.0 * y_pred[:, 0]


def movements(model, train, steps=1):
    """Changes that each step subtracts from the trainable weights."""
    moved = []
    for _ in range(steps):
        before = [v.numpy() for v in model.trainable_variables]
        train()
        moved.append(
            [b - v.numpy() for b, v in zip(before, model.trainable_variables)]
        )
    return moved


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays]).astype("float64")


SIGMA, CLIP, BATCH_SIZE = 2.0, 0.5, 10
STDDEV = SIGMA * CLIP / BATCH_SIZE


def noisy(plain, **arguments):
    """A model that is moved by noise alone."""
    optimizer = dpsgd(
        subtract(),
        noise_multiplier=SIGMA,
        l2_norm_clip=CLIP,
        batch_size=BATCH_SIZE,
        **arguments,
    )
    return private(plain, optimizer, loss=no_loss)


@pytest.fixture(scope="module")
def noise_of_steps():
    """Noise of three steps of four microbatches, in every weight."""
    plain = keras.Sequential(
        [
            keras.Input((256,)),
            layers.Dense(200),
            layers.LayerNormalization(),
            layers.Dense(100, use_bias=False),
        ]
    )
    model = noisy(plain, seed=0)
    x = np.zeros([16, 256])
    return movements(model, lambda: model.train_on_batch(x, x), steps=3)


class TestNoise:
    def test_has_its_variance_in_every_weight(self, noise_of_steps):
        """One draw a step: four would have four times the variance."""
        for moved in noise_of_steps:
            assert len(moved) == 5
            for noise in moved:
                total = np.sum(np.square(noise / STDDEV, dtype="float64"))
                assert 1e-4 < stats.chi2.cdf(total, noise.size) < 1 - 1e-4

    def test_is_normal_around_zero(self, noise_of_steps):
        z = flat([flat(moved) for moved in noise_of_steps]) / STDDEV
        assert abs(z.mean()) < 4 / np.sqrt(z.size)
        assert stats.kstest(z, "norm").pvalue > 1e-3

    def test_is_independent_across_steps(self, noise_of_steps):
        z = np.stack([flat(moved) for moved in noise_of_steps])
        correlations = np.corrcoef(z) - np.eye(3)
        assert np.abs(correlations).max() < 4.5 / np.sqrt(z.shape[1])

    def test_is_independent_across_weights(self, noise_of_steps):
        kernel, *rest = noise_of_steps[0]
        assert (
            np.unique(flat(noise_of_steps[0])).size
            > 0.99 * flat(noise_of_steps[0]).size
        )
        # Rows and columns of one kernel, and the vectors of one length.
        vectors = np.stack([*kernel[:20], *rest[:3]])
        correlations = np.corrcoef(vectors) - np.eye(len(vectors))
        assert np.abs(correlations).max() < 5 / np.sqrt(200)

    @pytest.mark.parametrize("jit_compile", [False, True])
    def test_secure(self, jit_compile):
        plain = keras.Sequential([keras.Input((64,)), layers.Dense(50)])
        model = noisy(plain, secure_noise=True)
        model.jit_compile = jit_compile
        x = np.zeros([16, 64])
        steps = movements(model, lambda: model.train_on_batch(x, x), steps=2)
        for moved in steps:
            z = flat(moved) / STDDEV
            assert abs(np.square(z).mean() - 1) < 6 * np.sqrt(2 / z.size)
        assert np.abs(np.corrcoef(*map(flat, steps))[0, 1]) < 6 / 57


def train_with_noise_alone(**arguments):
    """The weights after two steps of noise."""
    steps_per_execution = arguments.pop("steps_per_execution", 1)
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(50)])
    model = private(
        plain,
        dpsgd(subtract(), **arguments),
        loss=no_loss,
        steps_per_execution=steps_per_execution,
    )
    model.fit(X, Y, steps_per_epoch=2, verbose=0)
    return flat(plain.get_weights())


class TestFreshness:
    def test_nothing_repeats_without_a_seed(self):
        """This includes a second optimizer and run, after Keras's own seed."""
        first, second = train_with_noise_alone(), train_with_noise_alone()
        assert np.abs(first - second).min() > 0

    def test_everything_repeats_with_a_seed(self):
        """Sampling and noise, however the steps are run."""
        first = train_with_noise_alone(seed=5)
        for steps_per_execution in (1, 2):
            np.testing.assert_allclose(
                train_with_noise_alone(
                    seed=5, steps_per_execution=steps_per_execution
                ),
                first,
                rtol=1e-6,
            )
        assert np.abs(train_with_noise_alone(seed=6) - first).min() > 0

    def test_second_run_with_a_seed_draws_other_batches(self):
        drawn = []

        class Drawn(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                drawn[-1].append(logs["loss"])

        model = private(
            linear(), dpsgd(keras.optimizers.SGD(0.0), seed=1, **EXACT)
        )
        for _ in range(2):
            drawn.append([])
            model.fit(X, Y, epochs=2, callbacks=[Drawn()], verbose=0)
        # Weights stand still: equal losses are those of equal batches.
        assert drawn[0] != drawn[1]

    def test_noise_goes_on_over_runs(self):
        plain = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(50)])
        model = private(plain, dpsgd(subtract(), seed=1), loss=no_loss)
        first, second = movements(
            model, lambda: model.fit(X, Y, steps_per_epoch=1, verbose=0), 2
        )
        assert np.abs(flat(first) - flat(second)).min() > 0


def halves_of(key):
    return {int(half) for half in np.ravel(key)}


@pytest.fixture
def secrets_drawn(monkeypatch):
    """All words that were drawn from the system's entropy, of 64 bits."""
    drawn = []
    randbits, token_bytes = secrets.randbits, secrets.token_bytes

    def recorded_bits(bits):
        value = randbits(bits)
        # A key of TensorFlow is signed.
        halves = [(value >> k) % 2**64 for k in range(0, bits, 64)]
        drawn.append({v - s for v in halves for s in (0, 2**63, 2**64)})
        return value

    def recorded_bytes(count):
        value = token_bytes(count)
        drawn.append(halves_of(np.frombuffer(value, "<i8")))
        return value

    monkeypatch.setattr(secrets, "randbits", recorded_bits)
    monkeypatch.setattr(secrets, "token_bytes", recorded_bytes)
    return drawn


class RecordKeys(keras.callbacks.Callback):
    """Records the key after each step, and the one that was used."""

    def __init__(self):
        super().__init__()
        self.keys = set()

    def on_train_batch_begin(self, batch, logs=None):
        kept = self.model.optimizer._noise_key._variable.numpy()
        following = tf.random.experimental.stateless_split(kept, 2).numpy()
        self.keys |= halves_of(kept) | halves_of(following)


class TestKeys:
    @pytest.mark.filterwarnings("ignore:Expected a ledger_path:UserWarning")
    def test_are_in_no_file(self, tmp_path, secrets_drawn):
        record = RecordKeys()
        model = private(linear(), dpsgd(keras.optimizers.Adam()))
        model.fit(
            X,
            Y,
            epochs=2,
            callbacks=[
                record,
                keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
                keras.callbacks.BackupAndRestore(
                    tmp_path / "backup", delete_checkpoint=False
                ),
                keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            ],
            verbose=0,
        )
        model.save_weights(tmp_path / "model.weights.h5")
        model.model.save(tmp_path / "plain.keras")
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(
            tmp_path / "checkpoint"
        )
        model.model.export(tmp_path / "exported", verbose=False)
        (tmp_path / "pickled").write_bytes(pickle.dumps(model))
        (tmp_path / "told").write_text(
            f"{model.get_config()}{model.optimizer.get_config()}"
            f"{model.get_compile_config()}{model.ledger.to_json()}"
            f"{model.privacy_statement(1e-5)}{vars(model.optimizer)}"
        )
        contents = {}
        for path in tmp_path.rglob("*"):
            if path.is_file():
                contents[path.name] = path.read_bytes()
                if zipfile.is_zipfile(path):
                    with zipfile.ZipFile(path) as archive:
                        for name in archive.namelist():
                            contents[path.name + name] = archive.read(name)
        assert len(contents) > 15
        # Two halves of the noise's key, and the key of the sampler.
        assert len(record.keys) > 30 and len(secrets_drawn) >= 3
        for key in record.keys.union(*secrets_drawn):
            bits = key % 2**64
            for form in (
                bits.to_bytes(8, "little"),
                bits.to_bytes(8, "big"),
                str(key).encode(),
                f"{bits:x}".encode(),
            ):
                for name, content in contents.items():
                    assert form not in content, name

    def test_are_no_variables_that_keras_knows(self):
        model = private(linear(), dpsgd())
        model.fit(X, Y, verbose=0)
        key = model.optimizer._noise_key._variable
        variables = [*model.variables, *model.optimizer.variables]
        assert all(variable.value is not key for variable in variables)

    def test_are_no_constants_of_the_step(self, monkeypatch, secrets_drawn):
        steps = graphs.recorded_steps(monkeypatch)
        record = RecordKeys()
        model = private(linear(), dpsgd(), steps_per_execution=2)
        model.fit(X, Y, callbacks=[record], verbose=0)
        definition = steps[0].as_graph_def()
        bodies = [definition.node]
        bodies += [f.node_def for f in definition.library.function]
        constants = set()
        for node in (node for body in bodies for node in body):
            if node.op == "Const":
                value = tf.make_ndarray(node.attr["value"].tensor)
                if value.dtype.kind in "iu":
                    constants |= halves_of(value)
        assert constants
        assert len(secrets_drawn) >= 3
        assert not constants & record.keys.union(*secrets_drawn)


class TestDropping:
    """An example that is not finite contributes nothing, and is counted."""

    HOSTILE = [np.nan, np.inf, -np.inf, 1e38]

    def hostile(self):
        x = X[:12].copy()
        x[[0, 4, 5, 6, 7, 10], 1] = [*self.HOSTILE, np.nan, np.nan]
        return x, np.delete(np.arange(12), [0, 4, 5, 6, 7, 10])

    @pytest.mark.parametrize("per_example", ["graph", "vectorized_map"])
    def test_the_others_are_summed_as_if_it_were_not_there(self, per_example):
        x, others = self.hostile()
        moved, logs = [], []
        for rows, targets in ((x, Y[:12]), (X[others], Y[others])):
            plain = linear()
            plain.set_weights([np.ones_like(w) for w in plain.get_weights()])
            optimizer = dpsgd(
                subtract(), noise_multiplier=0, per_example=per_example
            )
            model = private(plain, optimizer, metrics=["accuracy"])
            moved += movements(
                model,
                lambda: logs.append(
                    model.train_on_batch(rows, targets, return_dict=True)
                ),
            )
        np.testing.assert_allclose(flat(moved[0]), flat(moved[1]), rtol=1e-5)
        assert [each.pop("dropped") for each in logs] == [6, 0]
        assert logs[0] == pytest.approx(logs[1], rel=1e-5)

    def test_is_counted_in_each_epoch(self):
        x = X.copy()
        x[:3] = np.nan
        model = private(
            linear(), dpsgd(batch_size=EXAMPLES, noise_multiplier=0)
        )
        history = model.fit(x, Y, epochs=2, verbose=0).history
        assert history["dropped"] == [3.0, 3.0]
        assert np.isfinite(history["loss"]).all()
        assert np.isfinite(flat(model.model.get_weights())).all()
        # Evaluation shows no such metric.
        assert "dropped" not in model.evaluate(
            X, Y, verbose=0, return_dict=True
        )

    def test_targets_and_weights_may_be_hostile_too(self):
        w = np.ones(8, "float32")
        w[[1, 5]] = np.nan, np.inf
        model = private(linear(), dpsgd(noise_multiplier=0))
        logs = model.train_on_batch(X[:8], Y[:8], w, return_dict=True)
        assert logs["dropped"] == 2
        assert np.isfinite(flat(model.get_weights())).all()

    def test_batch_of_nothing_else_is_noise(self):
        model = private(linear(), dpsgd(subtract(), seed=0))
        x = np.full_like(X[:4], np.nan)
        (moved,) = movements(model, lambda: model.train_on_batch(x, Y[:4]))
        assert 0.02 < np.std(flat(moved)) < 1.0

    def test_no_example_moves_the_weights_by_more_than_its_clip(self):
        clip, batch_size = 0.5, 4
        plain = mlp()
        weights = plain.get_weights()
        optimizer = dpsgd(
            keras.optimizers.SGD(float(batch_size)),
            noise_multiplier=0,
            l2_norm_clip=clip,
            batch_size=batch_size,
        )
        model = private(plain, optimizer)
        for value in (1.0, 1e3, 1e18, 1e30, np.inf, np.nan):
            after = []
            # The neighbour: an empty example, of weight zero.
            for factor, weight in ((value, 1.0), (1.0, 0.0)):
                plain.set_weights(weights)
                x, w = X[:6].copy(), np.ones(6)
                x[3] *= factor
                w[3] = weight
                model.train_on_batch(x, Y[:6], w)
                after.append(flat(plain.get_weights()))
            assert np.linalg.norm(after[0] - after[1]) <= clip, value


def fit_and_watch(model, read, seed=0, steps=40):
    """Pairs of the number of drawn rows and `read()`, one for each step."""
    batch_size = model.optimizer.batch_size
    first, same = (
        data.PoissonBatches(X, Y, batch_size=batch_size, seed=seed)
        for _ in range(2)
    )
    values = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: values.append(read())
    )
    model.fit(first, steps_per_epoch=steps, callbacks=[watch], verbose=0)
    drawn = [int(tf.reduce_sum(b["real"])) for b in same.dataset().take(steps)]
    return list(zip(drawn, values, strict=True))


class TestSampling:
    def test_empty_draw_is_noise_of_the_same_variance(self):
        plain = keras.Sequential([keras.Input((FEATURES,)), layers.Dense(100)])
        start = flat(plain.get_weights())
        optimizer = dpsgd(
            subtract(),
            noise_multiplier=3.0,
            l2_norm_clip=0.5,
            batch_size=1,
            seed=0,
        )
        model = private(plain, optimizer, loss=no_loss)
        steps = fit_and_watch(model, lambda: flat(plain.get_weights()))
        weights = np.stack([start, *(after for _, after in steps)])
        empty = [drawn == 0 for drawn, _ in steps]
        assert 5 < sum(empty) < 35
        z = np.diff(weights, axis=0)[empty] / 1.5
        assert 1e-4 < stats.chi2.cdf(np.square(z).sum(), z.size) < 1 - 1e-4
        for one in z:
            assert 1e-6 < stats.chi2.cdf(np.square(one).sum(), one.size)

    def test_divisor_is_the_public_batch_size(self):
        """Sums of equal examples follow their number; the divisor does not."""
        plain = linear()
        optimizer = dpsgd(subtract(), batch_size=4, **EXACT)
        model = private(plain, optimizer, loss=lambda y, p: p[:, 0])
        bias = plain.layers[-1].bias
        steps = fit_and_watch(model, lambda: -float(bias.numpy()[0]))
        drawn = [number for number, _ in steps]
        assert len(set(drawn)) > 4
        np.testing.assert_allclose(
            [moved for _, moved in steps], np.cumsum(drawn) / 4, rtol=1e-5
        )

    def test_states_do_not_tell_how_many_were_drawn(self):
        """Dropout draws from secret keys, and its seed stays what it was."""
        runs = []
        for seed in (0, 1):
            plain = mlp(layers.Dropout(0.5, seed=1), layers.Dense(4))
            (state,) = plain.non_trainable_variables
            model = private(plain, dpsgd(batch_size=4, microbatch_size=2))
            steps = fit_and_watch(model, lambda: tuple(state.numpy()), seed)
            runs.append(steps)
        passes = [[-(-drawn // 2) for drawn, _ in steps] for steps in runs]
        assert sum(a != b for a, b in zip(*passes)) > 20
        first, second = ([state for _, state in steps] for steps in runs)
        assert first == second
        assert len(set(first)) == 1

    def test_states_that_cannot_be_reset_raise(self):
        """Keras's own seed is no weight, and would advance with the draw."""

        class Unseeded(layers.Layer):
            def call(self, inputs, training=False):
                return keras.random.dropout(inputs, 0.5)

        model = private(mlp(Unseeded(), layers.Dense(4)), dpsgd())
        with pytest.raises(ValueError, match="drawn.*SeedGenerator"):
            model.fit(X, Y, verbose=0)

    def test_epsilon_is_that_of_the_sampler(self):
        model = private(linear(), dpsgd(noise_multiplier=2.0))
        model.fit(X, Y, epochs=3, verbose=0)
        for accountant in ("rdp", "pld"):
            expected = accounting.epsilon(
                noise_multiplier=2.0,
                sampling_rate=4 / EXAMPLES,
                steps=15,
                delta=1e-5,
                accountant=accountant,
            )
            assert model.epsilon(1e-5, accountant) == pytest.approx(expected)


class TestLedger:
    def test_survives_compiling_again(self):
        """A second optimizer's steps are added, as its own entry."""
        model = private(linear(), dpsgd(noise_multiplier=2.0))
        model.fit(X, Y, verbose=0)
        before = model.epsilon(1e-5)
        model.compile(dpsgd(noise_multiplier=4.0), loss())
        assert model.epsilon(1e-5) == before
        model.fit(X, Y, epochs=2, verbose=0)
        counts = [(e.noise_multiplier, e.steps) for e in model.ledger.entries]
        assert counts == [(2.0, 5), (4.0, 10)]
        assert model.epsilon(1e-5) > before

    def test_composes_samplers(self):
        model = private(linear(), dpsgd())
        model.fit(X, Y, verbose=0)
        model.train_on_batch(X[:4], Y[:4])
        assert len(model.ledger.entries) == 2
        alone = private(linear(), dpsgd())
        alone.fit(X, Y, verbose=0)
        assert model.epsilon(1e-5) > alone.epsilon(1e-5)

    def test_records_a_step_before_it_runs(self, monkeypatch):
        """A step that fails has been charged: it may have released."""
        recorded = []
        model = private(linear(), dpsgd())
        noisy = model.optimizer.noisy

        def watched(*args):
            tf.py_function(lambda: recorded.append(model.ledger.steps), [], [])
            return noisy(*args)

        monkeypatch.setattr(model.optimizer, "noisy", watched)
        model.fit(X, Y, verbose=0)
        assert recorded == [1, 2, 3, 4, 5]

    def test_steps_within_a_budget(self):
        """A callback gets the number of steps that the ledger would charge."""
        answers = []

        class Ask(keras.callbacks.Callback):
            def on_train_begin(self, logs=None):
                answers.append(self.model.current_run.steps_within(3.0, 1e-5))

        model = private(linear(), dpsgd(noise_multiplier=2.0))
        model.fit(X, Y, callbacks=[Ask()], verbose=0)
        fits, one_more = (
            accounting.epsilon(
                noise_multiplier=2.0,
                sampling_rate=4 / EXAMPLES,
                steps=answers[0] + extra,
                delta=1e-5,
            )
            for extra in (0, 1)
        )
        assert fits <= 3.0 < one_more


def words(model):
    """The statement in lower case, on one line."""
    return " ".join(model.privacy_statement(1e-5).lower().split())


class TestStatement:
    def test_without_noise_is_not_private(self):
        model = private(linear(), dpsgd(**EXACT))
        model.fit(X, Y, verbose=0)
        assert model.epsilon(1e-5) == math.inf
        assert "not private" in words(model)

    def test_one_step_without_noise_spoils_all(self):
        model = private(linear(), dpsgd())
        model.fit(X, Y, verbose=0)
        assert math.isfinite(model.epsilon(1e-5))
        assert "not private" not in words(model)
        model.compile(dpsgd(noise_multiplier=0), loss())
        model.train_on_batch(X[:4], Y[:4])
        assert model.epsilon(1e-5) == math.inf
        assert "not private" in words(model)

    def test_lists_adapted_preprocessing(self):
        norm = layers.Normalization(name="standardize")
        norm.adapt(X)
        model = private(mlp(norm, layers.Dense(4)), dpsgd())
        model.fit(X, Y, verbose=0)
        assert "adapted state of normalization 'standardize'" in words(model)

    def test_lists_adapted_vocabularies(self):
        texts = tf.constant(["a b", "b c d", "d", "e a b"] * 5)
        words_of = layers.TextVectorization(
            max_tokens=10, output_sequence_length=4, name="split"
        )
        words_of.adapt(texts)
        plain = keras.Sequential(
            [
                keras.Input((), dtype="string"),
                words_of,
                layers.Embedding(10, 4),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3),
            ]
        )
        model = private(plain, dpsgd())
        model.fit(texts, Y, verbose=0)
        assert "adapted state of textvectorization 'split'" in words(model)

    def test_lists_statistics_of_public_examples(self):
        rng = np.random.default_rng(0)
        images = rng.random((20, 8, 8, 1), "float32")
        features = tf_dpsub.models.image_features(
            images, kinds=("patches",), words=2, rank=3
        )
        plain = tf_dpsub.models.feature_classifier(features, 3)
        model = private(plain, dpsgd())
        model.fit(rng.random((20, 8, 8, 1), "float32"), Y, verbose=0)
        for what in (
            "words of patchdictionary",
            "statistics of publicnormalization",
            "statistics of publicprojection",
        ):
            assert what in words(model)

    @pytest.mark.parametrize("seed", [None, 0])
    def test_tells_of_a_fixed_seed(self, seed):
        model = private(linear(), dpsgd(seed=seed))
        model.fit(X, Y, verbose=0)
        assert ("fixed seed" in words(model)) == (seed is not None)
        assert "adapted state" not in words(model)

    def test_says_that_earlier_training_is_not_counted(self):
        plain = linear()
        private(plain, dpsgd()).fit(X, Y, verbose=0)
        model = private(plain, dpsgd())
        assert model.epsilon(1e-5) == 0
        model.fit(X, Y, verbose=0)
        assert "earlier training" in words(model)


class Tuner(keras.callbacks.Callback):
    """Stands for a callback of KerasTuner, which is not installed."""


Tuner.__module__ = "keras_tuner.engine.tuner_utils"


class PatientStopping(keras.callbacks.EarlyStopping):
    """A subclass selects as its parent does."""


def best_only(monitor):
    return keras.callbacks.ModelCheckpoint(
        "best.keras", monitor=monitor, save_best_only=True
    )


class TestPrivateSelection:
    STEERING = {
        "early_stopping": lambda: keras.callbacks.EarlyStopping("loss"),
        "subclass": lambda: PatientStopping("val_loss"),
        "best_checkpoint": lambda: best_only("val_accuracy"),
        "plateau": lambda: keras.callbacks.ReduceLROnPlateau("val_loss"),
        "nan": keras.callbacks.TerminateOnNaN,
        "tuner": Tuner,
    }

    @pytest.mark.parametrize("callback", STEERING)
    def test_raises(self, callback):
        model = private(linear(), dpsgd())
        callback = self.STEERING[callback]()
        listed = keras.callbacks.CallbackList([callback], model=model)
        for callbacks in ([callback], callback, listed):
            with pytest.raises(
                ValueError,
                match=f"{type(callback).__name__}.*validation_data_is_public"
                ".*allow_private_selection",
            ):
                model.fit(X, Y, validation_split=0.2, callbacks=callbacks)
        assert model.ledger.steps == 0

    @pytest.mark.parametrize("callback", ["nan", "early_stopping"])
    def test_training_metrics_are_private_beside_public_data(self, callback):
        model = private(linear(), dpsgd())
        with pytest.raises(ValueError, match="steer by private results"):
            model.fit(
                X,
                Y,
                validation_data=(X, Y),
                validation_data_is_public=True,
                callbacks=[self.STEERING[callback]()],
            )

    def test_is_told_where_it_is_allowed(self):
        stopping = keras.callbacks.EarlyStopping("loss", patience=9)
        model = private(linear(), dpsgd())
        model.fit(
            X,
            Y,
            callbacks=[stopping],
            allow_private_selection=True,
            verbose=0,
        )
        assert "does not cover" in words(model).split("steer")[1]
        assert model.ledger.entries[0].private_selection

    def test_is_not_told_where_there_is_none(self):
        model = private(linear(), dpsgd())
        model.fit(X, Y, allow_private_selection=True, verbose=0)
        assert "steer" not in words(model)
        assert not model.ledger.entries[0].private_selection

    def test_private_rows_that_are_called_public(self):
        model = private(linear(), dpsgd())
        data = {
            "validation_data": (X[15:], Y[15:]),
            "validation_data_is_public": True,
            "callbacks": [keras.callbacks.EarlyStopping("val_loss")],
        }
        with pytest.raises(ValueError, match="some of the private examples"):
            model.fit(X, Y, **data)
        assert model.ledger.steps == 0
        model.fit(X, Y, allow_private_selection=True, verbose=0, **data)
        assert "steer the run by private results" in words(model)
        # Nothing is decided by them.
        del data["callbacks"]
        model.fit(X, Y, verbose=0, **data)
        assert not model.ledger.entries[1].private_selection

    def test_public_data_may_steer(self):
        stopping = keras.callbacks.EarlyStopping("val_loss", patience=9)
        model = private(linear(), dpsgd())
        model.fit(
            X,
            Y,
            callbacks=[stopping, keras.callbacks.History()],
            validation_data=(X + 1, Y),
            validation_data_is_public=True,
            verbose=0,
        )
        assert not model.ledger.entries[0].private_selection

    def test_callbacks_that_do_not_select_are_fine(self, tmp_path):
        model = private(linear(), dpsgd())
        model.fit(
            X,
            Y,
            callbacks=[
                keras.callbacks.ModelCheckpoint(tmp_path / "last.keras"),
                keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
            ],
            verbose=0,
        )
        assert model.ledger.steps == 5
