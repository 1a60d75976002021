"""Requirements of private training, and assumptions that it rests on."""

import os
import pathlib
import re
import warnings

import keras
import tensorflow as tf
from keras.src.callbacks.monitor_callback import MonitorCallback

from tf_dpsub.data import overlap, public_origins
from tf_dpsub.gradients import ReadsState, precision
from tf_dpsub.gradients.graph import sources
from tf_dpsub.layers import (
    PatchDictionary,
    PublicNormalization,
    PublicProjection,
)
from tf_dpsub.models import batch_normalization
from tf_dpsub.optimizers.private_optimizer import PrivateOptimizer
from tf_dpsub.training.released_metrics import ReleasedMetrics

# Environment variables, and values of them that leave float32 as it is.
_NARROWING = (
    "TF_ENABLE_AUTO_MIXED_PRECISION",
    "TF_SET_ONEDNN_FPMATH_MODE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
)
_STRICT = ("", "0", "false", "strict")
# Flags of environment variables, and values of them that change nothing.
_FLAGS = {
    "TF_XLA_FLAGS": ("tf_xla_auto_jit", ("0", "-1", "off")),
    "XLA_FLAGS": (r"xla_[cg]pu_enable_fast_[a-z_]+", ("0", "false")),
}
_CURE_OF_SELECTION = (
    "Pass public data, `fit(..., validation_data=..., "
    "validation_data_is_public=True)` without validation_split, and monitor a "
    "`val_` metric; or put `tf_dpsub.callbacks.PrivateValidation` before them, "
    "and monitor a `val_private_` metric of it; "
    "or pass `allow_private_selection=True`: the statement then says that "
    "epsilon does not cover the selection."
)


def check_model(model):
    if not isinstance(model, keras.Model):
        raise ValueError(f"Expected a keras.Model, got {type(model).__name__}.")
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            "Expected a model with Keras's own train_step, got "
            f"'{model.name}', whose {type(model).__name__} overrides it: what "
            "it does would not happen in private training. Leave it out: "
            "compute in `call` what the loss needs, and there call "
            "`self.add_loss(losses)` with one value for each example, of shape "
            "[batch]; or override `compute_loss`."
        )
    if not model.built:
        raise ValueError(
            f"Expected a built model, got '{model.name}', whose weights do not "
            "exist yet. Give it a `keras.Input`, or call it once on a batch."
        )
    check_layers(model)


def check_layers(model):
    if not model.trainable_variables:
        raise ValueError(
            f"Expected a model with trainable weights, got '{model.name}', "
            "which has none. Set `trainable = True` on the layers to train."
        )
    mixing = batch_normalization.trainable_batch_normalizations(model)
    if mixing:
        names = [f"'{layer.name}'" for layer in mixing[:3]]
        if len(mixing) > 3:
            names[2:] = [f"{len(mixing) - 2} more"]
        raise ValueError(
            f"Expected layers that treat examples alike, alone or in a batch, "
            f"got BatchNormalization {', '.join(names)}, which mix them and "
            "store their statistics. Replace them all: "
            "`tf_dpsub.models.replace_batch_normalization(model)`; or freeze "
            "them: `layer.trainable = False`."
        )


def check_compile(optimizer, arguments: dict):
    """Checks what `PrivateModel.compile` is given.

    Args:
        optimizer: Keras optimizer.
        arguments: dict, other arguments by their names.

    Raises:
        ValueError: if the optimizer is not private, or scales the loss.
    """
    if not isinstance(optimizer, PrivateOptimizer):
        raise ValueError(
            f"Expected a private optimizer, got {type(optimizer).__name__}. "
            "Wrap it: `tf_dpsub.optimizers.DPSGD(optimizer, l2_norm_clip=..., "
            "noise_multiplier=..., batch_size=...)`."
        )
    if arguments.get("auto_scale_loss"):
        raise ValueError(
            "Expected auto_scale_loss=False, got True: a scale that follows "
            "overflows in the data is not private. float16 losses are scaled "
            "by a constant."
        )


def check_map(model, poisson):
    """Refuses a `map` that reads a metric: what it holds is not public.

    Args:
        model: `PrivateModel`, whose step is built.
        poisson: `data.PoissonBatches`, or None.

    Raises:
        ReadsState: names the metric.
    """
    read = {id(h) for h in (() if poisson is None else poisson.read_by_map)}
    for metric in model.metrics if read else ():
        for variable in metric.variables:
            if read & sources.handles(variable).keys():
                raise ReadsState(
                    "Expected a `map` that reads public values alone, got one "
                    f"that reads the metric '{variable.path}': it follows "
                    "from all examples, and one of them would change the rows "
                    "of the others. Leave it out."
                )


def check_one_replica(model):
    """Refuses a batch that is given as a whole, on several replicas.

    Args:
        model: `PrivateModel`.

    Raises:
        ValueError: if there is more than one.
    """
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            f"Expected one replica for train_on_batch, got {replicas}: each of "
            "them would add the whole batch, and an example would count "
            "several times. Pass a `tf.data.Dataset` of batches to `fit`, "
            "which deals them out."
        )


def require_full_precision():
    """Refuses what narrows float32 where the graph does not say so.

    Formal guarantees: what is clipped is what is summed only if both are
    computed as written. TensorFlow's rewriting of graphs to float16 or bfloat16
    comes after the step was proved, and moved a sum by 1.59 C. With
    TensorFloat-32 on, products that a norm or sum follows from are written
    differently: see `tf_dpsub.gradients.precision`. What XLA compiles has to
    be known where it is traced, to be stored once: parts of a graph that
    TensorFlow has XLA compile unasked may compute rows twice, and otherwise.

    Raises:
        ValueError: names the option or variable, and the cure.
    """
    precision.require_as_traced()
    options = tf.config.optimizer.get_experimental_options()
    on = [
        f"the option {name}"
        for name, value in options.items()
        if value
        and (
            name.startswith("auto_mixed_precision")
            # Removes assertions, one of them of orthonormal bases.
            or name == "debug_stripper"
        )
    ]
    if tf.config.optimizer.get_jit():
        on.append("tf.config.optimizer.set_jit")
    on += [
        f"{flag[0]} in {name} of the environment"
        for name, (pattern, off) in _FLAGS.items()
        for flag in re.finditer(rf"{pattern}(?:=(\S+))?", _flags_in(name))
        if flag[1] is None or flag[1].lower() not in off
    ]
    on += [
        f"{name}={os.environ[name]} in the environment"
        for name in os.environ
        if name.startswith(_NARROWING)
        and os.environ[name].lower() not in _STRICT
    ]
    if on:
        raise ValueError(
            "Expected float32 to be computed as such, got "
            f"{' and '.join(on)}: sums of clipped gradients would be narrowed, "
            "or computed otherwise than was proved. Turn it off; to compile, "
            "`compile(..., jit_compile=True)`; for mixed precision, "
            '`keras.config.set_dtype_policy("mixed_bfloat16")`.'
        )


def warn_of_equal_views(model, batches):
    """Warns of views that are all the same: they only cost time.

    Args:
        model: compiled `PrivateModel`, whose step is built.
        batches: `PrivateBatches` of the run.
    """
    if batches.views == 1 or batches.views_may_differ:
        return
    if not model.training_step.is_random:
        warnings.warn(
            f"Expected views that differ, got {batches.views} equal ones of "
            "each example: nothing draws random numbers for each of them, and "
            "their mean gradient is that of one. Augment in "
            "`PoissonBatches(..., map=...)`, by an argument `seed` or random "
            "layers of Keras; or put such layers, as "
            "`keras.layers.RandomFlip`, into the model.",
            # Two decorators of `fit` stand between it and its caller.
            stacklevel=6,
        )


def public_assumptions(model):
    """Names of what the statement has to take as public."""
    adapted = (
        keras.layers.Normalization,
        keras.layers.TextVectorization,
        keras.layers.StringLookup,
        keras.layers.IntegerLookup,
        keras.layers.Discretization,
    )
    statistical = (PublicNormalization, PublicProjection)
    layers = model._flatten_layers()
    return tuple(
        f"the {what} of {type(layer).__name__} '{layer.name}'"
        for layer in layers
        for what, holds in (
            ("adapted state", isinstance(layer, adapted)),
            ("statistics", batch_normalization.has_statistics(layer)),
            ("statistics", isinstance(layer, statistical)),
            ("words", isinstance(layer, PatchDictionary)),
        )
        if holds
    )


def check_optimizer(model):
    """Refuses an optimizer of other weights, or other than the compiled one.

    Args:
        model: compiled `PrivateModel`, whose optimizer is built.

    Raises:
        ValueError: if it is.
    """
    built_for = [id(v) for v in model.optimizer._trainable_variables]
    if built_for != [id(v) for v in model.trainable_variables]:
        raise ValueError(
            "Expected an optimizer for the trainable weights of "
            f"'{model.name}', got one that was built for others. Make "
            "a new optimizer for each model, and after layers were frozen "
            "or unfrozen."
        )
    step = model.training_step
    if step is not None and step.optimizer is not model.optimizer:
        raise ValueError(
            "Expected the optimizer given to `compile`, got another "
            "one, which the compiled step does not use. Call `compile` "
            "with it."
        )


def _flags_in(name):
    """Flags in a variable of the environment, which may name a file of them."""
    flags = os.environ.get(name, "")
    if not flags or flags.lstrip().startswith("-"):
        return flags
    try:
        return pathlib.Path(flags.strip()).read_text("utf-8", "replace")
    except OSError:
        return ""


def check_callbacks(
    model, callbacks, validation_data_is_public: bool, allow_private_selection
):
    """Checks callbacks of a run: what steers it, and what it goes on from.

    Args:
        model: `PrivateModel`.
        callbacks: as `reads_private_results`.
        validation_data_is_public: bool.
        allow_private_selection: bool, whether callbacks may steer by private
            results.

    Raises:
        ValueError: if callbacks do, and may not.
    """
    if not allow_private_selection:
        require_public_selection(callbacks, validation_data_is_public)
    _check_averages(callbacks)
    _warn_of_backups(model, callbacks)


def require_public_selection(callbacks, validation_data_is_public):
    """Raises unless all callbacks decide by public results alone.

    Args: as `reads_private_results`.

    Raises:
        ValueError: names the callbacks and the cure.
    """
    names = reads_private_results(callbacks, validation_data_is_public)
    if names:
        raise ValueError(
            f"Expected callbacks that do not steer by private results, got "
            f"{', '.join(names)}. {_CURE_OF_SELECTION}"
        )


def reads_private_results(callbacks, validation_data_is_public: bool) -> list:
    """Names the callbacks whose decisions depend on private data.

    Formal guarantees: what a callback of Keras decides by a training metric,
    or by validation data that was not declared public, is chosen by looking at
    private data, and not covered by any epsilon. What a `ReleasedMetrics`
    before it in the list has released is covered. Callbacks of others cannot be
    known: those of KerasTuner are, by their module, and choose by the objective
    of the tuner.

    Args:
        callbacks: `keras.callbacks.Callback`, any nesting of them, or a
            `CallbackList`.
        validation_data_is_public: bool.

    Returns:
        List of strings, such as `"EarlyStopping(monitor='loss')"`.
    """
    names: list = []
    released: set = set()

    def may_steer(metric):
        return metric in released or (
            validation_data_is_public
            and str(metric).startswith("val_")
            and not str(metric).startswith("val_private_")
        )

    for callback in all_callbacks(callbacks):
        name = type(callback).__name__
        if isinstance(callback, ReleasedMetrics):
            released.update(callback.released_names)
        if isinstance(callback, keras.callbacks.TerminateOnNaN):
            names.append(name)
        elif type(callback).__module__.startswith("keras_tuner"):
            objectives = _objectives(callback)
            if not objectives:
                names.append(name)
            elif not all(map(may_steer, objectives)):
                names.append(f"{name}(objective={', '.join(objectives)!r})")
        elif _selects(callback):
            if not may_steer(callback.monitor):
                names.append(f"{name}(monitor={callback.monitor!r})")
    return names


def all_callbacks(callbacks) -> list:
    """Every callback, those that other callbacks hold among them.

    Args: as `reads_private_results`.

    Returns:
        List of `keras.callbacks.Callback`.
    """
    flat, seen, waiting = [], set(), [callbacks]
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, keras.callbacks.Callback):
            flat.append(one)
            waiting += vars(one).values()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
    return flat


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


def _check_averages(callbacks):
    """Checks that averages of weights leave those alone that are trained."""
    swaps = False
    for callback in all_callbacks(callbacks):
        swaps |= getattr(callback, "swap_on_epoch", False)
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            raise ValueError(
                "Expected tf_dpsub.callbacks.SwapEMAWeights, got that of "
                "Keras, which rounds the weights when it swaps them: they "
                "would no longer be those that private steps have made. Use "
                "ours, with the same arguments."
            )
        if swaps and isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "Expected BackupAndRestore before SwapEMAWeights in the list "
                "of callbacks, got it after: it would back up the average as "
                "the weights that are trained. Put it first."
            )


def _warn_of_backups(model, callbacks):
    """Warns of backups from which a run would go on without its ledger."""
    backs_up = any(
        isinstance(callback, keras.callbacks.BackupAndRestore)
        for callback in all_callbacks(callbacks)
    )
    writes = model.distribute_strategy.extended.should_checkpoint
    if backs_up and writes and model.ledger.path is None:
        warnings.warn(
            "Expected a ledger_path beside BackupAndRestore, got none: "
            "steps since the last backup would be forgotten if the process "
            "died, and epsilon reported too low. Pass it to make_private.",
            stacklevel=6,
        )


def stated(
    model, inputs, callbacks, public_validation, allow_private_selection: bool
) -> dict:
    """States what is public, and what is not covered, of the data of a run.

    Args:
        model: compiled `PrivateModel`.
        inputs: private inputs, as `overlap.count_common` takes them; None
            where they cannot be compared.
        callbacks: as `reads_private_results`.
        public_validation: validation data that the user states to be public,
            None without any.
        allow_private_selection: bool, whether callbacks may steer by private
            results.

    Returns:
        dict of fields of the ledger's entry.

    Raises:
        ValueError: if data are both public and private, and may not be.
    """
    fields = stated_overlap(model, inputs)
    is_public = public_validation is not None
    selects = bool(reads_private_results(callbacks, is_public))
    if is_public and reads_private_results(callbacks, False):
        note, is_private = compared_validation(
            public_validation, inputs, allow_private_selection
        )
        fields["notes"] = (*fields.get("notes", ()), note)
        selects = selects or is_private
    fields["private_selection"] = allow_private_selection and selects
    return fields


def stated_overlap(model, x) -> dict:
    """Compares private inputs with those of public examples.

    Args:
        model: compiled `PrivateModel`.
        x: private inputs, as the model takes them; None where they cannot be
            compared.

    Returns:
        dict of fields of the ledger's entry.

    Raises:
        ValueError: if they have examples in common, and may not.
    """
    fields = stated_origins(model, x)
    of_optimizer = _stated_overlap_of_optimizer(model, x)
    return {
        name: (*fields[name], *of_optimizer.get(name, ())) for name in fields
    }


def stated_origins(model, inputs) -> dict:
    """States which public examples weights were computed from.

    Args:
        model: `PrivateModel`.
        inputs: private inputs, as `overlap.count_common` takes them; None where
            they cannot be compared.

    Returns:
        dict of `notes` and `uncovered`, fields of the ledger's entry.

    Raises:
        ValueError: if some of them are private, and may not be.
    """
    notes, uncovered = [], []
    for origin in public_origins.origins_of(model.model):
        note = f"{origin.examples} examples {origin.purpose}"
        if inputs is None:
            notes.append(f"{note}, unchecked")
            continue
        public = origin.inputs
        if not origin.are_preprocessed:
            public = model.preprocessed((public,))[0]
        if not overlap.count_common(public, inputs):
            notes.append(f"{note} (none equals a private one)")
        elif origin.allow_private:
            notes.append(note)
            uncovered.append(f"the private examples {origin.purpose}")
        else:
            raise ValueError(
                "Expected public examples that are not private, got some of "
                f"the private ones among those {origin.purpose}: the "
                "guarantee would not cover them. Take them out of either, or "
                "state it by `allow_private=True` where they were given."
            )
    return {"notes": tuple(notes), "uncovered": tuple(uncovered)}


def _stated_overlap_of_optimizer(model, x):
    """As `stated_overlap`, of the public examples of the optimizer alone."""
    public = model.optimizer.public_state.public_inputs
    if public is None:
        return {}
    if x is None:
        return {"notes": ("that no public example is private, unchecked",)}
    public = model.preprocessed((public,))[0]
    if not overlap.count_common(public, x):
        return {
            "notes": (
                "that no public example nearly equals a private one (none "
                "equals one)",
            )
        }
    if not model.optimizer.public_state.allow_private:
        raise ValueError(
            "Expected public examples that are not private, got some of "
            "the private ones among them: the guarantee would not cover "
            "them. Take them out of either, or state it by "
            "`allow_private=True`."
        )
    # Not how many: their number is private, and differs by batch.
    return {
        "uncovered": ("the private examples among the public ones",),
    }
