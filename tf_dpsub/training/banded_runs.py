"""Batches of runs whose steps share their noise."""


def in_groups(optimizer, poisson, steps_per_epoch: int | None, epochs: int):
    """Batches as the bands of an optimizer need them, which it chooses first.

    Formal guarantees: as of `PoissonBatches.in_groups`, with as many groups as
    there are bands: of so many steps in succession, an example is in one.

    Args:
        optimizer: private optimizer.
        poisson: `data.PoissonBatches`, or None where the user gives batches.
        steps_per_epoch: int, or None for those of `poisson`.
        epochs: int, of the whole run, with those before an interruption.

    Returns:
        `data.PoissonBatches`, or None.

    Raises:
        ValueError: if there are groups without bands; or if there are bands,
            and batches that the user gives, or fewer examples than a batch of
            each group takes.
    """
    banded_noise = getattr(optimizer, "banded_noise", None)
    if banded_noise is None or banded_noise.given == 1:
        if poisson is not None and poisson.groups > 1:
            raise ValueError(
                f"Expected batches that are drawn from all examples with "
                f"bands=1, got batches of {poisson.groups} groups in turn. "
                "Leave `in_groups` out: `fit` makes groups where an optimizer "
                "has bands."
            )
        return poisson
    if poisson is None:
        raise ValueError(
            f"Expected bands=1 with a tf.data.Dataset of batches, got "
            f"{banded_noise.given!r}: with bands, steps must draw from groups "
            "of the examples in turn. Pass arrays or "
            "`tf_dpsub.data.PoissonBatches`."
        )
    steps = (steps_per_epoch or poisson.steps_per_epoch) * epochs
    banded_noise.plan(poisson.examples, steps)
    return poisson.in_groups(optimizer.bands)
