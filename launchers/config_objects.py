"""What a training config names: data, model, optimizer, devices."""

import difflib

import keras
import tensorflow as tf

from launchers import train_config
from tf_dpsub import accounting, data, models, optimizers

_PRIVATE_OPTIMIZERS = {
    name: getattr(optimizers, name)
    for name in optimizers.__all__
    if name != "PrivateOptimizer"
}
_INNER_OPTIMIZERS = {
    name: getattr(keras.optimizers, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adafactor",
        "Adamax",
        "Nadam",
        "Ftrl",
        "Lion",
        "Lamb",
    )
}
_SCHEDULES = {
    "constant": lambda rate, steps: rate,
    "linear": lambda rate, steps: keras.optimizers.schedules.PolynomialDecay(
        rate, steps, end_learning_rate=0.0
    ),
    "cosine": keras.optimizers.schedules.CosineDecay,
}
_STRATEGIES = {
    "none": tf.distribute.get_strategy,
    "mirrored": tf.distribute.MirroredStrategy,
}


def check(config):
    """Checks what the library would not check, or only after a while.

    Args:
        config: `ml_collections.ConfigDict`.

    Raises:
        ValueError: names the field.
    """
    known = set(train_config.default_config())
    for fields, problem in (
        (known - set(config), "lacks"),
        (set(config) - known, "has unknown"),
    ):
        if fields:
            raise ValueError(
                "Expected a config with the fields of "
                "train_config.default_config(), got one that "
                f"{problem} {', '.join(sorted(fields))}."
            )
    for field in ("batch_size", "epochs", "steps_per_execution"):
        if config[field] < 1:
            raise ValueError(f"Expected {field} >= 1, got {config[field]}.")
    if config.seed < 0:
        raise ValueError(f"Expected seed >= 0, got {config.seed}.")
    if not config.learning_rate > 0:
        raise ValueError(
            f"Expected learning_rate > 0, got {config.learning_rate}."
        )
    if not 0 < config.delta < 1:
        raise ValueError(
            f"Expected 0 < delta < 1, got {config.delta}. It should lie well "
            "below 1 / (number of examples)."
        )
    if config.epsilon is not None and not config.epsilon > 0:
        raise ValueError(f"Expected epsilon > 0, got {config.epsilon}.")
    if config.noise_multiplier is None and config.epsilon is None:
        raise ValueError(
            "Expected a noise_multiplier, or an epsilon to calibrate it for, "
            "got neither. Set one of them, or both: epsilon is then a budget."
        )
    choose({"rdp": None, "pld": None}, config.accountant, "an accountant")


def choose(choices, name, what):
    """Looks a name up.

    Args:
        choices: dict.
        name: string.
        what: string, what it names, for the message.

    Returns:
        The value for `name`.

    Raises:
        ValueError: if there is none.
    """
    if name not in choices:
        close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"Expected the name of {what}, one of {', '.join(choices)}, got "
            f"{name!r}.{hint}"
        )
    return choices[name]


def strategy(config):
    """The `tf.distribute.Strategy` that a config names."""
    return choose(_STRATEGIES, config.distribution, "a distribution")()


def dataset(config):
    """Loads the images that a config names, as a `tf_dpsub.data.Dataset`."""
    loaded = data.load(
        config.dataset,
        config.data_dir,
        private=config.private_examples,
        public=config.public_examples,
        seed=config.seed,
    )
    if not loaded.input_shape:
        raise ValueError(
            f"Expected a data set of images, got {config.dataset!r}, which "
            "holds texts. Train on texts through the library: a model that "
            "reads strings, and `tf_dpsub.make_private`."
        )
    return loaded


def plain_model(config, loaded):
    """Builds the model that a config names for a `tf_dpsub.data.Dataset`."""
    return _construct(
        models.get,
        config.model_kwargs,
        config.model,
        config.model,
        loaded.input_shape,
        loaded.num_classes,
    )


def private_optimizer(config, batches):
    """Makes the optimizer that a config names.

    Where the config gives no noise multiplier, it is the smallest one that
    keeps the budget.

    Args:
        config: `ml_collections.ConfigDict`.
        batches: `tf_dpsub.data.PoissonBatches` to train on.

    Returns:
        A `tf_dpsub.optimizers.PrivateOptimizer`.
    """
    mechanism = choose(
        _PRIVATE_OPTIMIZERS, config.optimizer, "a private optimizer"
    )
    inner = choose(
        _INNER_OPTIMIZERS, config.inner_optimizer, "an inner optimizer"
    )
    schedule = choose(
        _SCHEDULES, config.learning_rate_schedule, "a learning rate schedule"
    )
    steps = config.epochs * batches.steps_per_epoch

    def make(noise_multiplier):
        return _construct(
            mechanism,
            config.optimizer_kwargs,
            config.optimizer,
            _construct(
                inner,
                config.inner_optimizer_kwargs,
                config.inner_optimizer,
                schedule(config.learning_rate, steps),
            ),
            noise_multiplier=noise_multiplier,
            l2_norm_clip=config.l2_norm_clip,
            batch_size=config.batch_size,
            microbatch_size=config.microbatch_size,
            seed=config.fixed_noise_seed,
        )

    if config.noise_multiplier is not None:
        return make(config.noise_multiplier)
    effective = accounting.noise_multiplier(
        epsilon=config.epsilon,
        delta=config.delta,
        sampling_rate=batches.sampling_rate,
        steps=steps,
        accountant=config.accountant,
    )
    # A mechanism with several releases a step needs more on each of them.
    return make(effective / make(1.0).effective_noise_multiplier)


def _construct(function, kwargs, name, *args, **own):
    """Calls a function with arguments from a config, which may not fit it."""
    try:
        return function(*args, **own, **kwargs.to_dict())
    except TypeError as error:
        raise ValueError(
            f"Expected arguments of {name} in the config, got "
            f"{kwargs.to_dict()}: {error}."
        ) from error
