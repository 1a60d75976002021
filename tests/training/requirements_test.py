import types

import keras
import keras_tuner
import numpy as np
import pytest
import tensorflow as tf
from keras_tuner.src.engine import objective, tuner_utils

from tf_dpsub.callbacks import PrivacyBudget
from tf_dpsub.training.requirements import (
    compared_validation,
    reads_private_results,
    require_public_selection,
)

STEERING = {
    "EarlyStopping": keras.callbacks.EarlyStopping,
    "ReduceLROnPlateau": keras.callbacks.ReduceLROnPlateau,
    "ModelCheckpoint": lambda monitor: keras.callbacks.ModelCheckpoint(
        "best.weights.h5",
        monitor=monitor,
        save_best_only=True,
        save_weights_only=True,
    ),
}
HARMLESS = {
    "ModelCheckpoint of every epoch": lambda: keras.callbacks.ModelCheckpoint(
        "each.weights.h5", monitor="loss", save_weights_only=True
    ),
    "LearningRateScheduler": lambda: keras.callbacks.LearningRateScheduler(
        lambda epoch, rate: rate / 2
    ),
    "CSVLogger": lambda: keras.callbacks.CSVLogger("log.csv"),
    "BackupAndRestore": lambda: keras.callbacks.BackupAndRestore("backup"),
    "PrivacyBudget": lambda: PrivacyBudget(1.0, 1e-5),
}


@pytest.mark.parametrize("name", STEERING)
@pytest.mark.parametrize(
    "monitor, validation_data_is_public, private",
    [
        ("loss", False, True),
        ("accuracy", True, True),
        ("val_loss", False, True),
        ("val_loss", True, False),
    ],
)
def test_steering_is_private_unless_by_public_validation_data(
    name, monitor, validation_data_is_public, private
):
    callback = STEERING[name](monitor=monitor)
    found = reads_private_results([callback], validation_data_is_public)
    assert found == ([f"{name}(monitor={monitor!r})"] if private else [])


@pytest.mark.parametrize("validation_data_is_public", [False, True])
def test_termination_by_a_training_loss_is_private(validation_data_is_public):
    callbacks = [keras.callbacks.TerminateOnNaN()]
    found = reads_private_results(callbacks, validation_data_is_public)
    assert found == ["TerminateOnNaN"]


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_not_steer_is_accepted(name):
    require_public_selection([HARMLESS[name]()], False)


def test_a_subclass_steers_too():
    class Patient(keras.callbacks.EarlyStopping):
        pass

    callbacks = [Patient(monitor="loss")]
    found = reads_private_results(callbacks, False)
    assert found == ["Patient(monitor='loss')"]


def test_tuners_are_known_by_their_module():
    class TunerCallback(keras.callbacks.Callback):
        __module__ = "keras_tuner.engine.tuner_utils"

    assert reads_private_results([TunerCallback()], True) == ["TunerCallback"]


@pytest.mark.parametrize(
    ("names", "public", "is_found"),
    [
        (["val_accuracy"], True, False),
        (["val_accuracy"], False, True),
        (["accuracy"], True, True),
        (["val_loss", "val_accuracy"], True, False),
        (["val_loss", "loss"], True, True),
    ],
)
def test_tuners_choose_by_their_objective(names, public, is_found):
    single = keras_tuner.Objective(names[0], "max")
    chosen = (
        single
        if len(names) == 1
        else objective.MultiObjective(
            [keras_tuner.Objective(n, "max") for n in names]
        )
    )
    tuner = types.SimpleNamespace(
        oracle=types.SimpleNamespace(objective=chosen)
    )
    callbacks = [
        tuner_utils.TunerCallback(tuner, trial=None),
        tuner_utils.SaveBestEpoch(single, "weights.h5"),
    ]
    found = reads_private_results(callbacks, public)
    assert (f"TunerCallback(objective={', '.join(names)!r})" in found) == (
        is_found
    )
    first = names[0].startswith("val_") and public
    assert any(f.startswith("SaveBestEpoch") for f in found) == (not first)


class Holder(keras.callbacks.Callback):
    def __init__(self, inner):
        super().__init__()
        self.inner = [inner, self]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda callback: callback,
        lambda callback: [PrivacyBudget(1.0, 1e-5), callback],
        lambda callback: (callback,),
        lambda callback: [[PrivacyBudget(1.0, 1e-5), [callback]]],
        lambda callback: keras.callbacks.CallbackList([callback]),
        lambda callback: [keras.callbacks.CallbackList([callback])],
        lambda callback: [Holder({"inner": [callback]})],
    ],
    ids=[
        "alone",
        "list",
        "tuple",
        "nested",
        "CallbackList",
        "nested CallbackList",
        "of a callback",
    ],
)
def test_finds_callbacks_however_they_are_given(wrap):
    callback = keras.callbacks.EarlyStopping(monitor="loss")
    assert reads_private_results(wrap(callback), False)


@pytest.mark.parametrize("none", [None, [], ()])
def test_no_callbacks(none):
    require_public_selection(none, False)


def test_the_error_names_all_of_them_and_the_cure():
    callbacks = [
        keras.callbacks.EarlyStopping(monitor="val_loss"),
        keras.callbacks.TerminateOnNaN(),
    ]
    with pytest.raises(ValueError) as error:
        require_public_selection(callbacks, False)
    message = str(error.value)
    assert "EarlyStopping(monitor='val_loss'), TerminateOnNaN" in message
    assert "validation_data_is_public=True" in message
    assert "allow_private_selection=True" in message


ROWS = np.arange(12.0).reshape(6, 2)
LABELS = np.zeros(6)


@pytest.mark.parametrize(
    "validation_data",
    [
        (ROWS[3:] + 1, LABELS[3:]),
        tf.data.Dataset.from_tensor_slices((ROWS + 100, LABELS)).batch(4),
    ],
    ids=["arrays", "dataset"],
)
def test_other_validation_data_are_taken_as_public(validation_data):
    note, is_private = compared_validation(validation_data, ROWS, False)
    assert "none of them equals a private example" in note
    assert not is_private


@pytest.mark.parametrize(
    "validation_data",
    [
        (ROWS[5:], LABELS[5:]),
        tf.data.Dataset.from_tensor_slices((ROWS, LABELS)).batch(4),
        tf.data.Dataset.from_tensor_slices(ROWS.astype("float32")).batch(4),
    ],
    ids=["arrays", "dataset", "dataset of inputs"],
)
def test_private_rows_are_not_public_validation_data(validation_data):
    with pytest.raises(ValueError, match="got some of the private examples"):
        compared_validation(validation_data, ROWS, False)
    note, is_private = compared_validation(validation_data, ROWS, True)
    assert note.startswith("the other validation data") and is_private


def test_what_cannot_be_compared_is_said():
    for public, private in (((ROWS, LABELS), None), (object(), ROWS)):
        note, is_private = compared_validation(public, private, False)
        assert note.endswith("unchecked") and not is_private
