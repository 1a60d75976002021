"""What the planner makes of a training config."""

import copy

import keras

from launchers.training import config_checks, objects, tasks, tokens
from tf_dpsub import planning

LABELLED = ("public", "test")


def plan_of(config, labelled="public", most=1000, **kwargs):
    """Plans the run that a config describes, from public examples.

    Formal guarantees: private examples are counted, and not looked at.

    Args:
        config: `ml_collections.ConfigDict`. Its optimizer, clip and learning
            rate are those of the simulated path; which method is best, the
            plan says.
        labelled: string, which labelled examples stand for the private ones:
            `"public"`, those of the config, or `"test"`, the test split, which
            is taken to be public. Defaults to `"public"`.
        most: int, how many of them. Defaults to `1000`.
        **kwargs: further arguments of `tf_dpsub.planning.plan`, which take the
            place of the config's.

    Returns:
        A `tf_dpsub.planning.Plan`.

    Raises:
        ValueError: if the config does not fit, or there are no such examples.
    """
    config_checks.check(config)
    config_checks.choose(dict.fromkeys(LABELLED), labelled, "a split")
    config = copy.deepcopy(config)
    carriers = config.reparametrize.to_dict()
    carriers.pop("rank", None)
    config.reparametrize = {}
    keras.utils.set_random_seed(config.seed)
    loaded = objects.dataset(config)
    plain = objects.plain_model(config, loaded)
    task = tasks.of(loaded)
    loaded = tokens.tokenized(loaded, plain)
    if getattr(plain, "preprocessor", None) is not None:
        plain.preprocessor = None
    if labelled == "public" and not len(loaded.y_public):
        raise ValueError(
            "Expected labelled public examples, got none. Set public_examples "
            "in the config, or look at the test split, which is taken to be "
            "public, by --labelled=test."
        )
    x, y = keras.tree.map_structure(
        lambda a: a[:most],
        (getattr(loaded, f"x_{labelled}"), getattr(loaded, f"y_{labelled}")),
    )
    basis = None
    if config.public_data is not None:
        (images,) = objects.public_examples(config, loaded)
        basis = (images, None)
    own = {
        "examples": len(loaded.y_train),
        "epsilon": config.epsilon,
        "noise_multiplier": config.noise_multiplier,
        "delta": config.delta,
        "epochs": config.epochs,
        "accountant": config.accountant,
        "batch_size": config.batch_size,
        "l2_norm_clip": config.l2_norm_clip,
        "groups": config.subspace_kwargs.get("groups", 1),
        "carriers": carriers,
        "basis": basis,
        "seed": config.seed,
    }
    if config.noise_multiplier is not None:
        own["epsilon"] = None
    return planning.plan(
        plain,
        x,
        y,
        loss=task.loss(),
        # Of a rate that does not fall: the path ends early.
        optimizer=objects.inner_optimizer(_constant(config), 1),
        **(own | kwargs),
    )


def _constant(config):
    config = copy.deepcopy(config)
    config.learning_rate_schedule = "constant"
    return config
