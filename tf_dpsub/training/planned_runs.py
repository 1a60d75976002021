"""The run that a call of `fit` makes, before its first step."""

from tf_dpsub.training import (
    calibration,
    released_metrics,
    requirements,
    run,
    workers,
)


def planned(
    model,
    batches,
    *,
    epochs: int,
    initial_epoch: int,
    verbose,
    callbacks,
    public_data,
    allow_private_selection: bool,
) -> run.Run:
    """Makes a run, with its noise and all that the ledger will say of it.

    Nothing is charged, and the step is built.

    Args:
        model: compiled `PrivateModel`.
        batches: `private_batches.PrivateBatches`.
        epochs, initial_epoch, verbose, callbacks, allow_private_selection: as
            for `PrivateModel.fit`.
        public_data: validation data that are public, or None.

    Returns:
        A `run.Run`.

    Raises:
        ValueError: if the data, a callback or a target do not fit.
    """
    sampling = run.sampling_of(model, batches)
    all_callbacks = requirements.all_callbacks(callbacks)
    beside = released_metrics.planned_entries(
        model,
        all_callbacks,
        initial_epoch,
        epochs,
        sampling["unit"],
    )
    target = calibration.calibrate(
        model,
        sampling,
        batches.steps_per_epoch,
        epochs,
        initial_epoch,
        verbose,
        beside,
    )
    workers.require_same_training(model, batches, epochs, initial_epoch)
    workers.require_all_examples(model.distribute_strategy, batches.poisson)
    stated = requirements.stated(
        model,
        batches.inputs,
        callbacks,
        public_data,
        allow_private_selection,
    )
    model.prepare_training(batches.spec, batches.views)
    requirements.warn_of_equal_views(model, batches)
    requirements.check_map(model, batches.poisson)
    return run.Run(
        model,
        run.entry_of(model, batches, target=target, **stated),
        steps_per_epoch=batches.steps_per_epoch,
        last_epoch=epochs,
        first_epoch=initial_epoch,
        inputs=batches.inputs,
        beside=beside,
        releasing=released_metrics.releasing_among(all_callbacks),
        require_unchanged=(
            None
            if batches.poisson is None
            else batches.poisson.require_unchanged
        ),
    )
