"""The noise with which a run keeps the (ε, δ) of its optimizer."""

import dataclasses

from absl import logging

from tf_dpsub import accounting
from tf_dpsub.accounting.accountants import least_noise

# That of the calibration, and of what is checked before a step.
_ACCOUNTANT = "pld"
# What is the same in an entry of steps that a run goes on with.
_SAME = (
    "l2_norm_clip",
    "batch_size",
    "examples",
    "sampler",
    "each_example_once_per_epoch",
    "private_state",
)


def calibrate(
    model, sampling: dict, steps_per_epoch: int | None, epochs: int, verbose
):
    """Finds the noise of a run whose optimizer has a target.

    A run that goes on where one of the same target and sampling was
    interrupted keeps the noise of that one. Any other gets the least noise
    with which its steps, and all those in the ledger, keep the target.

    Formal guarantees: nothing private is read. The noise is a function of the
    target, of what the ledger has counted, and of the number of examples, the
    batch size and the number of steps, which are public.

    Args:
        model: compiled `PrivateModel`.
        sampling: dict, the fields of `accounting.LedgerEntry` that say how
            batches are drawn, and `private_state`.
        steps_per_epoch: int, or None where it is not known.
        epochs: int, the epochs of the run.
        verbose: as for `fit`; 0 prints nothing.

    Raises:
        ValueError: if the target is spent, or no noise keeps it.
    """
    optimizer, ledger = model.optimizer, model.ledger
    target = optimizer.target
    if target is None:
        return
    spent = ledger.epsilon(target.delta, _ACCOUNTANT)
    if spent >= target.epsilon:
        _refuse(target, spent)
    described = accounting.LedgerEntry(
        mechanism=type(optimizer).__name__,
        noise_multiplier=1.0,
        l2_norm_clip=optimizer.l2_norm_clip,
        batch_size=optimizer.batch_size,
        **sampling,
    )
    is_kept = _keep_earlier(optimizer, ledger, described)
    if not is_kept:
        steps = None if steps_per_epoch is None else steps_per_epoch * epochs
        found = _least_noise(ledger, target, described, steps, epochs)
        optimizer.calibrate(found)
        # The noise is a constant of a step that is traced already.
        model.make_train_function(force=True)
    if verbose:
        how = "as before the interruption" if is_kept else "PLD accounting"
        print(
            f"Noise multiplier {optimizer.noise_multiplier:.6g} for {target} "
            f"({how}).",
            flush=True,
        )


def _keep_earlier(optimizer, ledger, described) -> bool:
    """Takes the noise of earlier steps of the same target, if there are any."""
    for entry in reversed(ledger.entries):
        if entry.target == str(optimizer.target) and all(
            getattr(entry, name) == getattr(described, name) for name in _SAME
        ):
            optimizer.calibrate(entry.noise_multiplier)
            if optimizer.mechanism == entry.mechanism:
                return True
    return False


def _least_noise(ledger, target, described, steps, epochs):
    if described.private_state:
        raise ValueError(
            f"Expected a step that noise makes private, for {target}, got one "
            "in a basis of private data, which no epsilon covers. Take public "
            "examples, or give noise_multiplier instead."
        )
    if steps is None:
        raise ValueError(
            "Expected a known number of steps, from which the noise for "
            f"{target} follows, got a dataset of unknown length. Pass "
            "steps_per_epoch, or give noise_multiplier instead."
        )

    def event(multiplier):
        return dataclasses.replace(
            described,
            noise_multiplier=multiplier,
            steps=max(1, steps),
            epochs=max(1, epochs),
        ).event()

    found = least_noise(
        event,
        epsilon=target.epsilon,
        delta=target.delta,
        accountant=_ACCOUNTANT,
        spent=ledger.events(),
    )
    if found is None:
        _refuse(target, ledger.epsilon(target.delta, _ACCOUNTANT))
    return found


def keep_target(run, ledger):
    """Ends a run where its target is spent, before its first step.

    That is needed where a run goes on, and has lost steps that count.

    Args:
        run: `training.run.Run`, whose first epoch begins.
        ledger: `accounting.PrivacyLedger`.

    Raises:
        ValueError: if not one step is left.
    """
    target = run.optimizer.target
    if target is None or run.keeps(target.epsilon, target.delta, _ACCOUNTANT):
        return
    fitting = run.steps_within(target.epsilon, target.delta, _ACCOUNTANT)
    by_epoch = run.entry.each_example_once_per_epoch
    if by_epoch and run.steps_per_epoch is not None:
        fitting *= run.steps_per_epoch
    if fitting == 0:
        _refuse(target, ledger.epsilon(target.delta, _ACCOUNTANT))
    run.limit(fitting)
    logging.warning(
        "The run ends after %d steps: %s is spent then. Steps of earlier runs "
        "count, those that a crash has lost as well.",
        fitting,
        target,
    )


def require_one_step(optimizer, ledger, entry):
    """Refuses a single step beyond the target of an optimizer.

    Args:
        optimizer: private optimizer.
        ledger: `accounting.PrivacyLedger`.
        entry: `accounting.LedgerEntry` of the step.

    Raises:
        ValueError: if it would spend too much.
    """
    target = optimizer.target
    if target is None:
        return
    after = ledger.epsilon_after(entry, 1, target.delta, accountant=_ACCOUNTANT)
    if after > target.epsilon:
        _refuse(target, ledger.epsilon(target.delta, _ACCOUNTANT))


def _refuse(target, spent):
    raise ValueError(
        f"Expected a target of which something is left, got {target}, of which "
        f"ε = {spent:.4g} is spent already, by the steps in the ledger. No "
        "further step fits. Compile with an optimizer of a larger epsilon."
    )
