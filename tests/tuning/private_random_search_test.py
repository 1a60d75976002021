import gc
import itertools
import math

import keras
import keras_tuner
import numpy as np
import pytest

import tf_dpsub
from tf_dpsub.accounting import PrivacyLedger, selection
from tf_dpsub.callbacks import PrivateValidation
from tf_dpsub.tuning import PrivateRandomSearch, random_oracle

_SECRET_SEED = random_oracle.secret_seed
GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((40, 3)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _private(rate=0.1, ledger_path=None, metrics=None, **kwargs):
    model = tf_dpsub.make_private(
        tf_dpsub.models.mlp((3,), (), 2), ledger_path=ledger_path
    )
    kwargs = {"noise_multiplier": 3.0, "l2_norm_clip": 1.0, **kwargs}
    model.compile(
        tf_dpsub.optimizers.DPSGD(
            keras.optimizers.SGD(rate, momentum=0.9), batch_size=20, **kwargs
        ),
        LOSS,
        metrics=metrics,
    )
    return model


def _build(hp):
    return _private(
        hp.Choice("rate", [1e-3, 1e-2, 1e-1]),
        l2_norm_clip=hp.Float("clip", 0.5, 2.0),
    )


def _validation(noise_multiplier=10.0):
    return PrivateValidation(X, Y, noise_multiplier=noise_multiplier)


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """KerasTuner collects garbage twice for each model: half of the time."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


@pytest.fixture(autouse=True)
def _same_seeds(monkeypatch):
    """Proposals and initial weights that are those of every run of a test."""
    seeds = itertools.count()
    monkeypatch.setattr(random_oracle, "secret_seed", lambda: next(seeds))


@pytest.fixture
def trials(monkeypatch):
    """Sets the number of trials that searches draw: 1, unless changed."""
    number = [1]
    monkeypatch.setattr(selection, "draw_trials", lambda *_: number[0])
    return number


@pytest.fixture
def tuner_of(tmp_path, trials):
    def make(hypermodel=_build, objective="val_private_accuracy", **kwargs):
        kwargs = {
            "mean_trials": 5.0,
            "directory": str(tmp_path),
            "ledger_path": str(tmp_path / "ledger.json"),
            **kwargs,
        }
        return PrivateRandomSearch(hypermodel, objective, **kwargs)

    return make


def _search(tuner, **kwargs):
    kwargs = {"epochs": 2, "callbacks": [_validation()], **kwargs}
    tuner.search(X, Y, **kwargs)


def test_the_best_of_the_trials_is_one_release(
    tuner_of, trials, tmp_path, capsys
):
    trials[0] = 3
    tuner = tuner_of()
    _search(tuner)
    found = list(tuner.oracle.trials.values())
    assert len(found) == 3
    (model,) = tuner.get_best_models()
    (best,) = tuner.oracle.get_best_trials()
    assert best.score == max(trial.score for trial in found)
    (values,) = tuner.get_best_hyperparameters()
    assert float(model.optimizer.l2_norm_clip) == values["clip"]
    written = PrivacyLedger(tmp_path / "ledger.json")
    (entry,) = written.entries
    assert entry.mean_trials == 5.0 and entry.steps == 1
    assert [(e.mechanism, e.steps) for e in entry.trial] == [
        ("Private training", 4),
        ("PrivateValidation", 2),
    ]
    # One trial, independently composed, and selected from.
    assert model.epsilon(1e-5) == written.epsilon(1e-5)
    assert written.epsilon(1e-5) == pytest.approx(
        selection_of_trial(5.0), rel=1e-9
    )
    assert tuner.epsilon(1e-5) == written.epsilon(1e-5)
    assert tuner.epsilon_of_all_trials(1e-5) > 0
    # Nothing of the trials was printed.
    assert "Trial" not in capsys.readouterr().out
    tuner.results_summary()
    assert str(best.score) in capsys.readouterr().out
    folder = tmp_path / "untitled_project" / "private"
    assert folder.stat().st_mode & 0o077 == 0
    # To train it further, or once more, composes.
    model.fit(X, Y, verbose=0)
    again = PrivacyLedger(tmp_path / "ledger.json")
    assert again.epsilon(1e-5) > written.epsilon(1e-5)


def selection_of_trial(mean):
    step = tf_dpsub.accounting.accountants.sampled_gaussian(3.0, 0.5)
    release = tf_dpsub.accounting.accountants.sampled_gaussian(10.0, 1.0)
    event = selection.selection_event([step] * 4 + [release] * 2, mean, 0.0)
    return tf_dpsub.accounting.accountants.composed_epsilon([event], delta=1e-5)


def test_the_weights_are_those_of_the_best_epoch(tuner_of, trials):
    trials[0] = 2
    kept = {}

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            weights = self.model.model.get_weights()
            kept[logs["val_private_accuracy"]] = weights

    tuner = tuner_of()
    tuner._deepcopy_callbacks = list
    _search(tuner, callbacks=[_validation(100.0), Keep()])
    assert len(kept) == 4
    (model,) = tuner.get_best_models()
    for weight, expected in zip(model.model.get_weights(), kept[max(kept)]):
        np.testing.assert_array_equal(weight, expected)


def test_the_ledger_has_it_before_the_first_step(tuner_of, trials, tmp_path):
    trials[0] = 2

    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _search(tuner_of(), callbacks=[_validation(), Stop()])
    (entry,) = PrivacyLedger(tmp_path / "ledger.json").entries
    assert entry.trial[0].steps == 4
    # It goes on, counts once, and does not draw that trial again.
    tuner = tuner_of()
    _search(tuner)
    assert len(tuner.oracle.begun) == 2
    assert PrivacyLedger(tmp_path / "ledger.json").entries == (entry,)
    scores = [trial.score for trial in tuner.oracle.trials.values()]
    assert [math.isfinite(score) for score in scores] == [False, True]
    assert tuner.get_best_models()


def test_a_failing_trial_has_the_worst_score(tuner_of, trials):
    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise ArithmeticError("of private values")

    trials[0] = 2
    tuner = tuner_of()
    _search(tuner, epochs=1, callbacks=[_validation(), Fail()])
    assert len(tuner.oracle.trials) == 2
    with pytest.raises(ValueError, match="all of them failed"):
        tuner.get_best_models()


def test_a_score_that_is_not_finite_is_the_worst(tuner_of):
    class Diverge(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_private_accuracy"] = math.nan

    tuner = tuner_of()
    _search(tuner, epochs=1, callbacks=[_validation(), Diverge()])
    assert {t.score for t in tuner.oracle.trials.values()} == {-math.inf}


def test_ties_are_broken_by_chance(tuner_of, trials):
    trials[0] = 60
    chosen = set()
    for _ in range(20):
        oracle = random_oracle.RandomOracle(
            keras_tuner.Objective("val_private_accuracy", "max"), 5.0, 0.0
        )
        for name in "ab":
            values = oracle.populate_space(name)["values"]
            oracle.trials[name] = keras_tuner.engine.trial.Trial(
                keras_tuner.HyperParameters(), name
            )
            oracle.trials[name].score, _ = 0.5, values
        oracle.end_order = ["a"] * 60
        chosen.add(oracle.get_best_trials()[0].trial_id)
    # By the order alone it would be one of them: a chance of 2e-6.
    assert chosen == {"a", "b"}


def test_proposals_are_drawn_with_replacement(tuner_of, trials):
    """Keras's own search ends where all values were tried."""
    trials[0] = 30

    def build(hp):
        hp.Choice("unused", [1, 2])
        return _private()

    oracle = tuner_of(build).oracle
    drawn = [oracle.create_trial(f"tuner{k}") for k in range(31)]
    assert [trial.status for trial in drawn] == ["RUNNING"] * 30 + ["STOPPED"]
    values = [trial.hyperparameters.values["unused"] for trial in drawn[:30]]
    # A chance of 2e-9 that they are all alike.
    assert set(values) == {1, 2}


def test_public_validation_data_may_score(tuner_of):
    tuner = tuner_of(lambda hp: _private(metrics=["accuracy"]), "val_accuracy")
    _search(
        tuner,
        epochs=1,
        callbacks=None,
        validation_data=(X + 5, Y),
        validation_data_is_public=True,
    )
    (entry,) = tuner.get_best_models()[0].ledger.entries
    assert len(entry.trial) == 1


@pytest.mark.parametrize("first", [1.0, 2.0])
def test_the_entry_tells_no_setting_that_is_searched(
    tuner_of, trials, tmp_path, first
):
    """Whichever trial comes first: another one was the best, perhaps."""
    trials[0] = 2
    clips = iter([9.0, first, 3.0 - first])

    def build(hp):
        clip = next(clips, first)
        model = tf_dpsub.make_private(tf_dpsub.models.mlp((3,), (), 2))
        model.compile(
            tf_dpsub.optimizers.AdaptiveDPSGD(
                "sgd",
                noise_multiplier=3.0,
                l2_norm_clip=clip,
                target_unclipped_quantile=clip / 10,
                clipped_count_stddev=10.0,
                batch_size=20,
            ),
            LOSS,
        )
        return model

    tuner = tuner_of(build)
    _search(tuner, epochs=1)
    assert len(tuner.oracle.begun) == 2
    (entry,) = PrivacyLedger(tmp_path / "ledger.json").entries
    training, validation = entry.trial
    assert (training.mechanism, training.l2_norm_clip) == (
        "Private training",
        1.0,
    )
    assert (entry.l2_norm_clip, entry.notes) == (1.0, ())
    assert (training.notes, validation.notes) == ((), ())
    assert "Adaptive" not in (tmp_path / "ledger.json").read_text()
    # What the best one takes as public is said with it.
    best = tuner.oracle.get_best_trials()[0].trial_id
    tuner.oracle.notes = {best: ["a public rule"], "other": ["another one"]}
    tuner.results_summary()
    (entry,) = PrivacyLedger(tmp_path / "ledger.json").entries
    assert entry.notes == ("a public rule",)


class OtherScore(keras_tuner.HyperModel):
    def build(self, hp):
        return _private()

    def fit(self, hp, model, *args, **kwargs):
        model.fit(*args, **kwargs)
        return 1.0


class LaterRelease(OtherScore):
    def fit(self, hp, model, *args, **kwargs):
        history = model.fit(*args, **kwargs)
        model.evaluate_privately(X, Y, noise_multiplier=10.0)
        return history


class TwoRuns(OtherScore):
    def fit(self, hp, model, *args, **kwargs):
        model.fit(*args, **kwargs)
        return model.fit(*args, **kwargs)


class SmallNoise(OtherScore):
    """Spends more in a later trial, without saying so beforehand."""

    made = 0

    def build(self, hp):
        SmallNoise.made += 1
        return _private(noise_multiplier=3.0 if self.made < 3 else 1.0)

    def fit(self, hp, model, *args, **kwargs):
        return model.fit(*args, **kwargs)


def _of(noise_multiplier):
    return lambda hp: _private(noise_multiplier=noise_multiplier)


@pytest.mark.parametrize(
    ("hypermodel", "kwargs", "message"),
    [
        (_build, {"callbacks": None}, "steer by private results"),
        (_build, {"allow_private_selection": True}, "Leave it out"),
        (_build, {"initial_epoch": 1}, "Leave it out"),
        (
            _build,
            {"callbacks": [_validation(), keras.callbacks.EarlyStopping()]},
            "steer by private results",
        ),
        (
            _build,
            {"callbacks": [keras.callbacks.BackupAndRestore("backup")]},
            "begin anew",
        ),
        (lambda hp: _private().model, {}, "trials of private models"),
        (
            lambda hp: _private(ledger_path="trial.json"),
            {},
            "without a ledger",
        ),
    ],
)
def test_what_breaks_the_theorem_charges_nothing(
    tuner_of, hypermodel, kwargs, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tuner = tuner_of(hypermodel)
    with pytest.raises(ValueError, match=message):
        _search(tuner, **kwargs)
    assert not PrivacyLedger(tmp_path / "ledger.json").entries
    assert not tuner.oracle.begun


@pytest.mark.parametrize(
    ("hypermodel", "message"),
    [
        (OtherScore, "another score"),
        (LaterRelease, "more of PrivateValidation"),
        (TwoRuns, "one call of `fit`"),
        (SmallNoise, "noise_multiplier 1.0 instead of 3.0"),
    ],
)
def test_trials_that_break_the_theorem(tuner_of, trials, hypermodel, message):
    trials[0] = 2
    tuner = tuner_of(hypermodel())
    with pytest.raises(ValueError, match=message):
        _search(tuner, epochs=1)
    with pytest.raises(ValueError, match="Expected a finished search"):
        tuner.get_best_models()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_trials": 3}, "pass mean_trials"),
        ({"executions_per_trial": 2}, "one model"),
        ({"max_retries_per_trial": 2}, "never drawn again"),
        ({"oracle": None}, "earlier results"),
        ({"colour": 2}, "not known"),
        ({"mean_trials": 1.0}, "1 < mean_trials"),
        ({"distribution": "poisson"}, "one of"),
        ({"hypermodel": None}, "Expected a hypermodel"),
        ({"objective": ["loss", "accuracy"]}, "one score"),
        ({"objective": "val_my_metric"}, "whose direction is known"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    arguments = {
        "hypermodel": _build,
        "objective": "val_private_accuracy",
        "mean_trials": 3.0,
        "directory": str(tmp_path),
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        PrivateRandomSearch(**arguments)


def test_one_trial_alone_leaves_the_search(tuner_of):
    tuner = tuner_of()
    for look in (
        tuner.get_best_models,
        tuner.get_best_hyperparameters,
        tuner.results_summary,
    ):
        with pytest.raises(ValueError, match="finished search"):
            look()
        with pytest.raises(ValueError, match="best trial alone"):
            look(2)


def test_another_distribution_in_the_same_folder(tuner_of):
    tuner_of().save()
    with pytest.raises(ValueError, match="mean_trials with which"):
        tuner_of(mean_trials=4.0)


def test_two_searches_compose(tuner_of, tmp_path):
    _search(tuner_of(), epochs=1)
    once = PrivacyLedger(tmp_path / "ledger.json").epsilon(1e-5)
    tuner = tuner_of(overwrite=True)
    _search(tuner, epochs=1)
    folder = tmp_path / "untitled_project" / "private"
    assert folder.stat().st_mode & 0o077 == 0
    twice = PrivacyLedger(tmp_path / "ledger.json")
    assert twice.entries[0].steps == 2
    assert twice.epsilon(1e-5) > once


@pytest.mark.parametrize(
    ("objective", "direction"),
    [
        ("val_private_accuracy", "max"),
        ("val_private_loss", "min"),
        ("val_mean_absolute_error", "min"),
    ],
)
def test_directions(tuner_of, objective, direction):
    assert tuner_of(objective=objective).oracle.objective.direction == direction


def test_a_seed_of_the_program_does_not_tell_the_trial(tmp_path, monkeypatch):
    """A proposal that followed from a seed would give the number of trials."""
    monkeypatch.setattr(random_oracle, "secret_seed", _SECRET_SEED)
    proposals = []
    for name in ("first", "second"):
        keras.utils.set_random_seed(0)
        tuner = PrivateRandomSearch(
            _build,
            "val_private_accuracy",
            mean_trials=5.0,
            directory=str(tmp_path / name),
        )
        proposals.append(tuner.oracle.populate_space("0")["values"]["clip"])
    assert proposals[0] != proposals[1]


def test_initial_weights_do_not_tell_the_trial(tuner_of, monkeypatch):
    monkeypatch.setattr(random_oracle, "secret_seed", _SECRET_SEED)
    weights = []

    def build(hp):
        model = _build(hp)
        weights.append(model.get_weights()[0].copy())
        return model

    tuner = tuner_of(build)
    weights.clear()
    for _ in range(2):
        keras.utils.set_random_seed(0)
        _search(tuner)
        tuner.oracle.end_order.clear()
        tuner.oracle.max_trials += 1
    assert not np.array_equal(weights[0], weights[1])
