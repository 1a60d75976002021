"""Objects that a training config names: data, model, optimizer, devices.

Not by `keras.optimizers.get` and `schedules.deserialize`: their errors neither
suggest a name nor tell which part of a config is wrong, and a schedule is as
long as the run, which a config does not know.
"""

import functools
import inspect

import keras
import tensorflow as tf

from tf_dpsub import (
    accounting,
    callbacks,
    data,
    heads,
    models,
    optimizers,
    subspaces,
)
from tf_dpsub.data import npz
from tf_dpsub.data import public_images as image_files
from tf_dpsub.launchers.training import trained_parts
from tf_dpsub.launchers.training.config_checks import choose, construct

_PRIVATE_OPTIMIZERS = {
    name: getattr(optimizers, name)
    for name in optimizers.__all__
    if name != "PrivateOptimizer"
}
# Names images of a random process instead of a file, and how many of them.
DEAD_LEAVES = "dead_leaves"
_DRAWN_IMAGES = 2000
# Number of examples whose gradients are recorded.
_RECORDED_EXAMPLES = 1000
# Models whose targets are texts.
_TEXT_GENERATORS = ("gpt2",)
# Of gradients of public examples.
_PUBLIC_SUBSPACES = ("KroneckerSubspace", "PublicSubspace")
_SUBSPACES = ("FixedSubspace", *_PUBLIC_SUBSPACES, "RandomSubspace")
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


def _halfway(rate, steps):
    last_of_first_half = (steps + 1) // 2 - 1
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [last_of_first_half], [rate, rate / 10]
    )


_SCHEDULES = {
    "constant": lambda rate, steps: rate,
    "halfway": _halfway,
    "linear": lambda rate, steps: keras.optimizers.schedules.PolynomialDecay(
        rate, steps, end_learning_rate=0.0
    ),
    "cosine": keras.optimizers.schedules.CosineDecay,
}
_STRATEGIES = {
    "none": tf.distribute.get_strategy,
    "mirrored": tf.distribute.MirroredStrategy,
    "multi_worker": tf.distribute.MultiWorkerMirroredStrategy,
}


def strategy(config):
    """The `tf.distribute.Strategy` that a config names."""
    return choose(_STRATEGIES, config.distribution, "a distribution")()


def labelled_public(config) -> int:
    """Number of labelled public examples that a config takes of its data."""
    examples = 0 if config.public_data else config.public_examples
    return max(examples, config.ridge_start_examples)


def dataset(config):
    """Loads the data that a config names, as a `tf_dpsub.data.Dataset`."""
    return _load(
        config.dataset,
        config.data_dir,
        private=config.private_examples,
        public=labelled_public(config),
        seed=config.seed,
    )


@functools.lru_cache(maxsize=1)
def _load(*args, **kwargs):
    """Loads data, cached: successive runs in a process often share it."""
    return data.load(*args, **kwargs)


def plain_model(config, loaded):
    """Builds the model that a config names for a `tf_dpsub.data.Dataset`."""
    generates = config.model in _TEXT_GENERATORS
    is_text = config.model in models.TEXT_NAMES
    if is_text != loaded.is_text or generates != (loaded.num_classes is None):
        kind = "texts" if loaded.is_text else "numbers"
        if loaded.num_classes is None:
            kind = "prompts and responses"
        raise ValueError(
            f"Expected a model that fits the data, got {config.model!r} for "
            f"{config.dataset!r}, which holds {kind}. Models of texts are "
            f"{', '.join(models.TEXT_NAMES)}, of which "
            f"{', '.join(_TEXT_GENERATORS)} writes them."
        )
    if config.model == "feature_classifier":
        model = _feature_classifier(config, loaded)
    elif config.model == "sentence_classifier":
        model = _sentence_classifier(config, loaded)
    else:
        model = construct(
            models.get,
            config.model_kwargs,
            config.model,
            config.model,
            loaded.input_shape,
            loaded.num_classes,
        )
    if config.initial_weights is not None:
        _load_weights(model, config.initial_weights)
    trained_parts.prepare(model, config)
    return model


def public_inputs(config, loaded):
    """The public inputs that frozen features are scaled by.

    Args:
        config: `ml_collections.ConfigDict`.
        loaded: `tf_dpsub.data.Dataset`.

    Returns:
        Array of images, or sequence of texts.
    """
    if loaded.is_text and config.public_data is not None:
        texts = data.load_texts(config.public_data)
        return texts[: config.public_examples or None]
    return public_examples(config, loaded)[0]


def _feature_classifier(config, loaded):
    """A head on features that are computed from public inputs alone."""
    make = models.image_features
    if len(loaded.input_shape) == 1:
        make = models.vector_features
    features = construct(
        functools.partial(make, public_inputs(config, loaded)),
        config.features,
        make.__name__,
    )
    return construct(
        models.feature_classifier,
        config.model_kwargs,
        config.model,
        features,
        loaded.num_classes,
    )


def _sentence_classifier(config, loaded):
    """A head on features of texts, scaled by public ones."""
    return construct(
        models.sentence_classifier,
        config.model_kwargs,
        config.model,
        loaded.input_shape,
        loaded.num_classes,
        public_texts=public_inputs(config, loaded),
    )


def start_head(config, model, loaded):
    """Starts the head of a model from labelled public examples, if it is to.

    Args:
        config: `ml_collections.ConfigDict`.
        model: plain model.
        loaded: `tf_dpsub.data.Dataset`, with inputs as the model takes them.
    """
    count = config.ridge_start_examples
    if count:
        heads.fit_public_ridge(
            model,
            keras.tree.map_structure(lambda a: a[:count], loaded.x_public),
            loaded.y_public[:count],
        )


def _load_weights(model, path):
    """Loads the weights of a saved Keras model into one like it."""
    try:
        model.set_weights(
            keras.models.load_model(path, compile=False).get_weights()
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            "Expected initial_weights to name a .keras file with the model of "
            f"the config, got {path}: {reason}"
        ) from error


def subspace(config, loaded):
    """Makes the subspace that a config names; None if it names none.

    Args:
        config: `ml_collections.ConfigDict`.
        loaded: `tf_dpsub.data.Dataset`. Its public examples give the basis,
            unless the config names a file of public images.
    """
    if config.whiten is not None and config.subspace != "PublicSubspace":
        raise ValueError(
            "Expected a PublicSubspace to whiten, got subspace="
            f"{config.subspace!r} and whiten={config.whiten!r}. Leave whiten "
            "out."
        )
    if config.subspace is None:
        return None
    kinds = {name: getattr(subspaces, name) for name in _SUBSPACES}
    kind = choose(kinds, config.subspace, "a subspace")
    if config.subspace == "FixedSubspace":
        return construct(_fixed_subspace, config.subspace_kwargs, kind.__name__)
    public, scales = (), {}
    if config.subspace in _PUBLIC_SUBSPACES:
        public = public_examples(config, loaded)
        if config.whiten is not None:
            scales = {"whiten": config.whiten}
    return construct(
        kind, config.subspace_kwargs, config.subspace, *public, **scales
    )


def _fixed_subspace(basis, rank, **kwargs):
    """The subspace that the first directions in a file span."""
    (directions,) = npz.read_arrays(basis, ("directions",))
    if not 1 <= rank <= directions.shape[1]:
        raise ValueError(
            f"Expected 1 <= rank <= {directions.shape[1]}, the directions in "
            f"{basis}, got {rank}."
        )
    return subspaces.FixedSubspace(directions[:, :rank], **kwargs)


def carrier_examples(config, loaded) -> dict:
    """Arguments of RGP with the public examples that its carriers follow.

    Args:
        config: `ml_collections.ConfigDict`.
        loaded: `tf_dpsub.data.Dataset`, as for `subspace`.

    Returns:
        dict, empty unless the carriers of the config are public ones.
    """
    if config.optimizer_kwargs.get("carriers") != "public":
        return {}
    names = ("x_public", "y_public")
    return dict(zip(names, public_examples(config, loaded)))


def public_examples(config, loaded):
    """The public examples that a config names for its subspace or carriers.

    Args:
        config: `ml_collections.ConfigDict`.
        loaded: `tf_dpsub.data.Dataset`.

    Returns:
        Tuple of inputs and labels; of inputs alone if labels are to be random.
    """
    if config.public_data is not None:
        images = public_images(config, loaded)
        count = config.public_examples or len(images)
        if count > len(images):
            raise ValueError(
                f"Expected public_examples <= {len(images)}, the images in "
                f"{config.public_data}, got {count}."
            )
        return (images[:count],)
    if not config.public_examples or not len(loaded.y_public):
        raise ValueError(
            "Expected public examples, got none. Set "
            "public_examples to take some of the data set, or public_data to "
            "the path of an .npz file with images, or of a file with texts; "
            f"or, if there are no images, to {DEAD_LEAVES!r}."
        )
    x, y = keras.tree.map_structure(
        lambda a: a[: config.public_examples],
        (loaded.x_public, loaded.y_public),
    )
    return (x,) if config.random_public_labels else (x, y)


def public_images(config, loaded):
    """The public images that a config names, fitted to the model's input.

    Args:
        config: `ml_collections.ConfigDict`.
        loaded: `tf_dpsub.data.Dataset`.

    Returns:
        float32 array, as `data.load_images` returns it: of the file
        `public_data`, or, where that is `"dead_leaves"`, `public_examples`
        (0: 2,000) images of that random process, drawn from the config's seed.
    """
    shape = loaded.input_shape
    if config.public_data != DEAD_LEAVES:
        return data.load_images(config.public_data, shape)
    height, width, _ = image_files.checked_shape(shape)
    count = config.public_examples or _DRAWN_IMAGES
    images = data.dead_leaves(count, (height, width), config.seed)
    return image_files.fitted(images, shape)


def inner_optimizer(config, steps):
    """Makes the inner optimizer.

    Args:
        config: `ml_collections.ConfigDict`.
        steps: int, over which the learning rate follows its schedule.

    Returns:
        A `keras.optimizers.Optimizer`.
    """
    inner = choose(
        _INNER_OPTIMIZERS, config.inner_optimizer, "an inner optimizer"
    )
    schedule = choose(
        _SCHEDULES, config.learning_rate_schedule, "a learning rate schedule"
    )
    return construct(
        inner,
        config.inner_optimizer_kwargs,
        config.inner_optimizer,
        schedule(config.learning_rate, steps),
    )


def private_optimizer(config, batches, subspace=None, carrier_examples=None):
    """Makes the optimizer that a config names.

    Where the config gives no noise multiplier, it is the smallest one that
    keeps the budget.

    Args:
        config: `ml_collections.ConfigDict`.
        batches: `tf_dpsub.data.PoissonBatches` or `OncePerEpoch` to train on.
        subspace: as `subspace` makes it. Defaults to `None`.
        carrier_examples: dict, as `carrier_examples` makes it. Defaults to
            `None`, none.

    Returns:
        A `tf_dpsub.optimizers.PrivateOptimizer`.
    """
    mechanism = choose(
        _PRIVATE_OPTIMIZERS, config.optimizer, "a private optimizer"
    )
    steps = config.epochs * batches.steps_per_epoch
    extra_arguments = _subspace_arguments(
        config, mechanism, subspace, batches
    ) | (carrier_examples or {})
    bands = _bands(config, batches)
    if bands > 1:
        extra_arguments["bands"] = bands

    def make(**noise):
        return construct(
            mechanism,
            config.optimizer_kwargs,
            config.optimizer,
            inner_optimizer(config, steps),
            **noise,
            l2_norm_clip=config.l2_norm_clip,
            batch_size=config.batch_size,
            microbatch_size=config.microbatch_size,
            seed=config.fixed_noise_seed,
            **extra_arguments,
        )

    if config.noise_multiplier is not None:
        return make(noise_multiplier=config.noise_multiplier)
    rate, rows = batches.batch_size / batches.examples, config.rows_per_person
    if bands > 1:
        # Several rows of a person may be in several groups.
        rate = bands * rate if (rows or 1) == 1 else 1
    effective = accounting.noise_multiplier(
        epsilon=config.epsilon,
        delta=config.delta,
        sampling_rate=rate,
        steps=-(-steps // bands),
        accountant=config.accountant,
        sampling=batches.sampling,
        rows_per_person=rows or 1,
    )
    with_target = make(epsilon=config.epsilon, delta=config.delta)
    with_target.calibrate(effective)
    return make(noise_multiplier=with_target.noise_multiplier)


def _bands(config, batches):
    """Number of steps that share their noise."""
    if config.bands is None:
        return 1
    if config.bands == "auto":
        return accounting.best_bands(
            batches.examples,
            batches.batch_size,
            config.epochs * batches.steps_per_epoch,
            config.epsilon,
            config.delta,
        )
    batches.in_groups(config.bands)
    return config.bands


def _subspace_arguments(config, mechanism, subspace, batches):
    """Arguments for a mechanism that works in a subspace."""
    parameters = inspect.signature(mechanism).parameters
    if ("subspace" in parameters) != (subspace is not None):
        needed = "a subspace" if subspace is None else "no subspace"
        raise ValueError(
            f"Expected {needed} for the optimizer {config.optimizer}, got "
            f"subspace={config.subspace!r}."
        )
    arguments = {} if subspace is None else {"subspace": subspace}
    if "start_step" in parameters:
        start = (config.start_epoch - 1) * batches.steps_per_epoch
        arguments["start_step"] = start
    elif config.start_epoch > 1:
        raise ValueError(
            f"Expected start_epoch=1 for the optimizer {config.optimizer}, "
            f"which has no start, got {config.start_epoch}."
        )
    return arguments


def recorders(config, folder, loaded):
    """Makes the gradient recorders that a config names.

    They use 1,000 examples: of the test split, which is taken to be public, or
    private ones, where the name of the recorder says so.

    Args:
        config: `ml_collections.ConfigDict`.
        folder: `pathlib.Path`, for the files that they write.
        loaded: `tf_dpsub.data.Dataset`.

    Returns:
        List of callbacks.
    """
    test, private = (
        keras.tree.map_structure(lambda a: a[:_RECORDED_EXAMPLES], (x, y))
        for x, y in (
            (loaded.x_test, loaded.y_test),
            (loaded.x_train, loaded.y_train),
        )
    )
    spread = {1, (config.epochs + 1) // 2, config.epochs}
    makers = {
        "test_projection_error": lambda: callbacks.ProjectionErrorRecorder(
            *test, folder / "test_projection_error.csv"
        ),
        "test_projection_residual": lambda: (
            callbacks.ProjectionResidualRecorder(
                *test, folder / "test_projection_residual.csv"
            )
        ),
        "test_spectrum": lambda: callbacks.SpectrumRecorder(
            *test, folder / "test_spectrum.npz", epochs=spread
        ),
        "private_spectrum": lambda: callbacks.PrivateSpectrumRecorder(
            *private, folder / "private_spectrum.npz", epochs=spread
        ),
        "private_gradients": lambda: construct(
            callbacks.PrivateGradientRecorder,
            config.private_gradients_kwargs,
            "PrivateGradientRecorder",
            folder / "gradients",
        ),
    }
    chosen = [choose(makers, name, "a recorder") for name in config.recorders]
    if "test_projection_error" in config.recorders and config.subspace is None:
        raise ValueError(
            "Expected a subspace for the recorder test_projection_error, got "
            "none. Leave the recorder out."
        )
    return [make() for make in chosen]
