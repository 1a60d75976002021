"""Plans from training configs."""

import copy
import shlex

import keras
import ml_collections

from tf_dpsub import accounting, data, planning
from tf_dpsub.launchers.training import (
    config_checks,
    objects,
    recipes,
    tasks,
    tokens,
)
from tf_dpsub.planning import representations

LABELLED = ("public", "test")
_NO_LABELS = (
    "Expected labelled public examples, got none. Set public_examples in the "
    "config, or ridge_start_examples where public_data names a file, or look "
    "at the test split, which is taken to be public, by --labelled=test."
)
# Fields of a config that a recommended one keeps.
_KEPT = (
    "dataset",
    "data_dir",
    "private_examples",
    "public_examples",
    "public_data",
    "random_public_labels",
    "delta",
    "seed",
)


def plan_of(
    config,
    labelled="public",
    max_examples=1000,
    *,
    best_batch_size=False,
    search=None,
    simulation=None,
    measure_cost=True,
):
    """Plans the run that a config describes, from public examples.

    Formal guarantees: of the private examples, only their number is read.

    Args:
        config: `ml_collections.ConfigDict`. Its optimizer, clip and learning
            rate are those of the simulated run.
        labelled: string, the labelled examples that stand for the private ones:
            `"public"`, those of the config, or `"test"`, the test split, which
            is taken to be public. Defaults to `"public"`.
        max_examples: int, the largest number of labelled examples to use.
            Defaults to `1000`.
        best_batch_size: bool, whether the plan chooses the batch size, instead
            of the config. Defaults to `False`.
        search: dict, arguments of `tf_dpsub.planning.SearchSpace` beside those
            that the config has. Defaults to `None`.
        simulation: dict, arguments of `tf_dpsub.planning.Simulation` beside
            the config's optimizer and clip. Defaults to `None`.
        measure_cost: bool, as for `tf_dpsub.planning.plan`. Defaults to `True`.

    Returns:
        A `tf_dpsub.planning.Plan`.

    Raises:
        ValueError: if the config does not fit, or there are no such examples.
    """
    config_checks.check(config)
    config_checks.require_rows(config)
    config_checks.choose(dict.fromkeys(LABELLED), labelled, "a split")
    config = copy.deepcopy(config)
    carriers = config.reparametrize.to_dict()
    carriers.pop("rank", None)
    config.reparametrize = {}
    keras.utils.set_random_seed(config.seed)
    dataset = objects.dataset(config)
    plain = objects.plain_model(config, dataset)
    task = tasks.of(dataset)
    dataset = tokens.tokenized(dataset, plain)
    if getattr(plain, "preprocessor", None) is not None:
        plain.preprocessor = None
    x, y = keras.tree.map_structure(
        lambda a: a[:max_examples],
        (getattr(dataset, f"x_{labelled}"), getattr(dataset, f"y_{labelled}")),
    )
    if not len(y):
        raise ValueError(_NO_LABELS)
    basis = None
    if config.public_data is not None:
        (images,) = objects.public_examples(config, dataset)
        basis = (images, None)
    has_budget = config.noise_multiplier is None
    return planning.plan(
        plain,
        x,
        y,
        loss=task.loss(),
        run=planning.PlannedRun(
            examples=len(dataset.y_train),
            epochs=config.epochs,
            delta=config.delta,
            epsilon=config.epsilon if has_budget else None,
            noise_multiplier=config.noise_multiplier,
            batch_size=None if best_batch_size else config.batch_size,
            accountant=config.accountant,
            sampling=config.sampling,
        ),
        search=planning.SearchSpace(
            carriers=carriers,
            groups=config.subspace_kwargs.get("groups", 1),
            basis=basis,
            **(search or {}),
        ),
        simulation=planning.Simulation(
            # A constant rate: the simulation ends before a schedule would.
            optimizer=objects.inner_optimizer(_constant(config), 1),
            l2_norm_clip=config.l2_norm_clip,
            **(simulation or {}),
        ),
        measure_cost=measure_cost,
        seed=config.seed,
    )


def _constant(config):
    config = copy.deepcopy(config)
    config.learning_rate_schedule = "constant"
    return config


def recommendation_of(config, labelled="public", most=1000):
    """Recommends a representation, a start and a head for a config's data.

    Formal guarantees: of the private examples, only their number is read.

    Args:
        config: `ml_collections.ConfigDict`.
        labelled: string, as for `plan_of`. Defaults to `"public"`.
        most: int, the largest number of test examples that are looked at.
            Defaults to `1000`.

    Returns:
        A `tf_dpsub.planning.Recommendation`; None for data that it is not for:
        targets that are no classes, and inputs that are neither texts, images
        nor vectors.

    Raises:
        ValueError: if the config does not fit, or there are no public examples.
    """
    config_checks.check(config)
    config_checks.require_rows(config)
    config_checks.choose(dict.fromkeys(LABELLED), labelled, "a split")
    keras.utils.set_random_seed(config.seed)
    loaded = objects.dataset(config)
    x, y = (getattr(loaded, f"{name}_{labelled}") for name in "xy")
    if labelled == "test":
        x, y = x[:most], y[:most]
    if not len(y) and config.public_data is None:
        raise ValueError(_NO_LABELS)
    if loaded.num_classes is None or not _is_supported(loaded):
        return None
    others = None
    if config.public_data is not None and loaded.is_text:
        others = data.load_texts(config.public_data)
    elif config.public_data is not None:
        others = objects.public_images(config, loaded)
    model = None
    if len(y) and not (loaded.is_text or recipes.has_features(config)):
        model = objects.plain_model(config, loaded)
    return planning.recommend(
        x,
        None if config.random_public_labels else y,
        examples=len(loaded.y_train),
        epsilon=_epsilon(config, len(loaded.y_train)),
        delta=config.delta,
        other_public=others,
        text_encoder=_encoder(config) or None,
        model=model,
        num_classes=loaded.num_classes,
        seed=config.seed,
    )


def _is_supported(loaded):
    """Whether inputs are of a kind that is known by its shape."""
    try:
        representations.kind_of(loaded.x_train[:0])
    except ValueError:
        return False
    return True


def _epsilon(config, examples):
    """The budget, or what the noise multiplier of the config spends."""
    if config.epsilon is not None:
        return config.epsilon
    bands = config.bands if isinstance(config.bands, int) else 1
    rate = min(1.0, bands * config.batch_size / examples)
    return accounting.epsilon(
        noise_multiplier=config.noise_multiplier,
        sampling_rate=rate,
        steps=-(-config.epochs * -(-examples // config.batch_size) // bands),
        delta=config.delta,
        accountant=config.accountant,
        sampling=config.sampling,
    )


def command_of(recommendation, config):
    """The command line that trains as it is recommended.

    Args:
        recommendation: `tf_dpsub.planning.Recommendation`.
        config: `ml_collections.ConfigDict` that it is for.

    Returns:
        String; None if no config describes it.
    """
    if recommendation.recommended.mechanism != "FullBatch":
        return None
    path = recipes.path(config.dataset, recommendation.kind)
    recipe = recipes.config_at(path)
    changes = [
        f"--config.{name}={_written(value)}"
        for name, value in _of_head(recommendation, config, recipe).items()
        if value != recipe[name]
    ]
    return shlex.join(["tf-dpsub", "train", f"--config={path}", *changes])


def _of_head(recommendation, config, recipe):
    """The recipe's config, with what is recommended."""
    chosen = recommendation.recommended
    wanted = recipe.copy_and_resolve_references()
    for name in _KEPT:
        wanted[name] = config[name]
    wanted.epsilon = recommendation.epsilon
    if chosen.start == "ridge":
        wanted.ridge_start_examples = objects.labelled_public(config)
    scales = {"rank": chosen.rank, "whiten": chosen.whiten}
    if recommendation.kind == "texts":
        encoder = _encoder(config) or _encoder(recipe)
        wanted.model_kwargs = encoder | scales
    elif recommendation.kind == "vectors":
        wanted.features = scales
    else:
        wanted.features = representations.image_arguments(
            chosen, 1 if recommendation.kind == "grey images" else 3
        ) | {"seed": config.seed}
    return wanted


def _encoder(config):
    """Arguments of a config that name an encoder of texts, or none."""
    names = ("folder", "preset", "sequence_length")
    encoder = {
        n: config.model_kwargs[n] for n in names if n in config.model_kwargs
    }
    return encoder if {"folder", "preset"} & set(encoder) else {}


def _written(value):
    """A value as a flag has it."""
    if isinstance(value, ml_collections.ConfigDict):
        value = value.to_dict()
    return value if isinstance(value, str) else repr(value)
