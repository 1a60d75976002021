"""Callbacks that steer a run by private results."""

import keras
from keras.src.callbacks.monitor_callback import MonitorCallback

from tf_dpsub.data import overlap

_CURE = (
    "Pass public data, `fit(..., validation_data=..., "
    "validation_data_is_public=True)` without validation_split, and monitor a "
    "`val_` metric, "
    "or pass `allow_private_selection=True`: the statement then says that "
    "epsilon does not cover the selection."
)


def reads_private_results(callbacks, validation_data_is_public: bool) -> list:
    """Names the callbacks whose decisions depend on private data.

    Formal guarantees: what a callback of Keras decides by a training metric,
    or by validation data that was not declared public, is chosen by looking at
    private data, and not covered by any epsilon. Callbacks of others cannot be
    known: those of KerasTuner are, by their module, and choose by the objective
    of the tuner.

    Args:
        callbacks: `keras.callbacks.Callback`, any nesting of them, or a
            `CallbackList`.
        validation_data_is_public: bool.

    Returns:
        List of strings, such as `"EarlyStopping(monitor='loss')"`.
    """
    found = []
    for callback in all_of(callbacks):
        name = type(callback).__name__
        if isinstance(callback, keras.callbacks.TerminateOnNaN):
            found.append(name)
        elif type(callback).__module__.startswith("keras_tuner"):
            objectives = _objectives(callback)
            if not objectives:
                found.append(name)
            elif not (
                validation_data_is_public
                and all(o.startswith("val_") for o in objectives)
            ):
                found.append(f"{name}(objective={', '.join(objectives)!r})")
        elif _selects(callback):
            monitor = callback.monitor
            if not (
                validation_data_is_public and str(monitor).startswith("val_")
            ):
                found.append(f"{name}(monitor={monitor!r})")
    return found


def all_of(callbacks) -> list:
    """Every callback, those that other callbacks hold among them.

    Args: as `reads_private_results`.

    Returns:
        List of `keras.callbacks.Callback`.
    """
    found, seen, waiting = [], set(), [callbacks]
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, keras.callbacks.Callback):
            found.append(one)
            waiting += vars(one).values()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
    return found


def compared_validation(validation_data, private, allow_private: bool):
    """Compares validation data that callbacks decide by with the private ones.

    Formal guarantees: what a callback decides by private examples is not
    covered, whatever they are called. Inputs that equal each other are found;
    whether the others are public is for the user to know.

    Args:
        validation_data: as `keras.Model.fit` takes it.
        private: private inputs, as `overlap.count_common` takes them; None
            where they cannot be compared.
        allow_private: bool, whether private examples may be among them.

    Returns:
        string, what the statement has to take as public, and whether private
        examples are among them.

    Raises:
        ValueError: if they are, and may not be.
    """
    public = overlap.inputs_of(validation_data)
    if public is None or private is None:
        return "the validation data that callbacks decide by, unchecked", False
    if not overlap.count_common(public, private):
        return (
            "the validation data that callbacks decide by (none of them equals "
            "a private example)"
        ), False
    if allow_private:
        return "the other validation data that callbacks decide by", True
    raise ValueError(
        "Expected validation data that are public, got some of the private "
        "examples among them: callbacks would decide by these. Take them out "
        "of either, or pass `allow_private_selection=True`: the statement then "
        "says that epsilon does not cover the selection."
    )


def _objectives(callback):
    """Names of the metrics that a callback of KerasTuner chooses by."""
    objective = getattr(callback, "objective", None)
    if objective is None:
        oracle = getattr(getattr(callback, "tuner", None), "oracle", None)
        objective = getattr(oracle, "objective", None)
    several = getattr(objective, "objectives", [objective])
    return [o.name for o in several if o is not None]


def _selects(callback):
    if not isinstance(callback, MonitorCallback):
        return False
    # Checkpoints select only if they keep the best; the others always do.
    return getattr(callback, "save_best_only", True)


def require_public_selection(callbacks, validation_data_is_public):
    """Raises unless all callbacks decide by public results alone.

    Args: as `reads_private_results`.

    Raises:
        ValueError: names the callbacks and the cure.
    """
    found = reads_private_results(callbacks, validation_data_is_public)
    if found:
        raise ValueError(
            f"Expected callbacks that do not steer by private results, got "
            f"{', '.join(found)}. {_CURE}"
        )
