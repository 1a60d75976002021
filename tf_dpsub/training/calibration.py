"""The noise with which a run keeps the (ε, δ) of its optimizer."""

import dataclasses
from typing import NamedTuple

from absl import logging

from tf_dpsub import accounting
from tf_dpsub.accounting.accountants import composed_epsilon, least_noise

# That of the calibration, and of what is checked before a step.
_ACCOUNTANT = "pld"
# Calibration leaves a smaller share of ε, for which no run is worth its noise.
_NOTHING_LEFT = 1e-3
# Noise so many times what the run would need alone is worth a warning.
_MUCH_NOISE = 2
# What is the same in an entry of steps that a run goes on with.
_SAME = (
    "target",
    "l2_norm_clip",
    "batch_size",
    "examples",
    "sampler",
    "bands",
    "each_example_once_per_epoch",
    "epoch_steps",
    "private_state",
    "unit",
    "largest_rate",
)


class Budget(NamedTuple):
    """An (ε, δ) that all steps and releases in a ledger keep together.

    Attributes:
        epsilon: float, > 0.
        delta: float in (0, 1).
        accountant: string, `"rdp"` or `"pld"`. Defaults to `"pld"`.
        rows_per_person: int, as for `PrivateModel.epsilon`. Defaults to `None`.
    """

    epsilon: float
    delta: float
    accountant: str = _ACCOUNTANT
    rows_per_person: int | None = None

    def __str__(self):
        text = f"(ε = {self.epsilon:.12g}, δ = {self.delta:.12g})"
        if self.rows_per_person is None:
            return text
        rows = f"{self.rows_per_person} row" + "s" * (self.rows_per_person > 1)
        return f"{text} of a person with at most {rows}"


def budgets_of(optimizer) -> list[Budget]:
    """The budget that is the target of a private optimizer, if it has one."""
    target = optimizer.target
    return [] if target is None else [Budget(target.epsilon, target.delta)]


def calibrate(
    model,
    sampling: dict,
    steps_per_epoch: int | None,
    epochs: int,
    initial_epoch: int,
    verbose,
    beside=(),
) -> str:
    """Finds the noise of a run whose optimizer has a target.

    A run that goes on where one of the same plan, that is target, sampling and
    number of epochs, was interrupted keeps the noise of that one. Any other
    gets the least noise with which its steps, and all those in the ledger, keep
    the target.

    Formal guarantees: nothing private is read. The noise is a function of the
    target, of what the ledger has counted, and of the number of examples, the
    batch size and the number of steps, which are public. That a step has the
    noise which the ledger records is checked before each
    (`Run.require_claims`), and that the ledger keeps the target before the
    first, and whenever others have added to it.

    Args:
        model: compiled `PrivateModel`.
        sampling: dict, the fields of `accounting.LedgerEntry` that say how
            batches are drawn, and `private_state`.
        steps_per_epoch: int, or None where it is not known.
        epochs: int, the epoch at which the run ends.
        initial_epoch: int, the one at which it begins.
        verbose: as for `fit`; 0 prints nothing.
        beside: sequence of `accounting.LedgerEntry` with counts, what else the
            run releases. Defaults to nothing.

    Returns:
        string, the plan for `accounting.LedgerEntry.target`; empty without a
        target.

    Raises:
        ValueError: if the target is spent, or no noise keeps it.
    """
    optimizer, ledger = model.optimizer, model.ledger
    target = optimizer.target
    if target is None:
        return ""
    spent = ledger.epsilon(target.delta, _ACCOUNTANT)
    if spent >= target.epsilon * (1 - _NOTHING_LEFT):
        _refuse(target, spent)
    if steps_per_epoch is None:
        raise ValueError(
            "Expected a known number of steps, from which the noise for "
            f"{target} follows, got a dataset of unknown length. Pass "
            "steps_per_epoch, or give noise_multiplier instead."
        )
    described = accounting.LedgerEntry(
        mechanism=type(optimizer).__name__,
        noise_multiplier=1.0,
        l2_norm_clip=optimizer.l2_norm_clip,
        batch_size=optimizer.batch_size,
        target=f"{target}, {epochs} epochs of {steps_per_epoch} steps",
        **sampling,
    )
    before = optimizer.is_calibrated and optimizer.effective_noise_multiplier
    is_kept = _keep_earlier(optimizer, ledger, described)
    if not is_kept:
        run = dataclasses.replace(
            described,
            steps=max(1, steps_per_epoch * (epochs - initial_epoch)),
            epochs=max(1, epochs - initial_epoch),
        )
        optimizer.calibrate(_least_noise(ledger, target, run, beside))
    if before and before != optimizer.effective_noise_multiplier:
        # What follows public data may have chosen by the noise.
        model.forget_steps()
    if verbose:
        how = "as before the interruption" if is_kept else "by PLD accounting"
        print(
            f"Noise multiplier {optimizer.noise_multiplier:.6g} for {target}, "
            f"{how}.",
            flush=True,
        )
    return described.target


def _keep_earlier(optimizer, ledger, described) -> bool:
    """Takes the noise of earlier steps of the same plan, if there are any."""
    for entry in reversed(ledger.entries):
        if any(getattr(entry, n) != getattr(described, n) for n in _SAME):
            continue
        try:
            optimizer.calibrate(entry.noise_multiplier)
        except ValueError:
            # The noise of another mechanism.
            continue
        if optimizer.mechanism == entry.mechanism:
            return True
    optimizer.calibrate(None)
    return False


def _least_noise(ledger, target, run, beside=()):
    if run.private_state:
        raise ValueError(
            f"Expected a step that noise makes private, for {target}, got one "
            "in a basis of private data, which no epsilon covers. Take public "
            "examples, or give noise_multiplier instead."
        )

    def least_after(spent):
        return least_noise(
            lambda sigma: dataclasses.replace(
                run, noise_multiplier=sigma
            ).event(),
            epsilon=target.epsilon,
            delta=target.delta,
            accountant=_ACCOUNTANT,
            spent=spent,
        )

    spent = [*ledger.events(), *(entry.event() for entry in beside)]
    releases_spend = beside and target.epsilon <= composed_epsilon(
        spent, delta=target.delta, accountant=_ACCOUNTANT
    )
    multiplier = None if releases_spend else least_after(spent)
    if multiplier is None and beside:
        raise ValueError(
            f"Expected a target that metrics leave something of, got {target}, "
            "which the noisy metrics of the run spend. Raise their "
            "noise_multiplier, or release them less often."
        )
    if multiplier is None:
        _refuse(target, ledger.epsilon(target.delta, _ACCOUNTANT))
    alone = least_after(()) if spent else multiplier
    if multiplier > _MUCH_NOISE * alone:
        logging.warning(
            "The noise multiplier is %.3g, and would be %.3g if nothing were "
            "spent: of %s, the ledger holds ε = %.3g already.",
            multiplier,
            alone,
            target,
            ledger.epsilon(target.delta, _ACCOUNTANT),
        )
    return multiplier


def keep_target(run, ledger):
    """Ends a run where its target is spent, before its first step.

    That is needed where a run goes on, and has lost steps that count.

    Args:
        run: `training.run.Run`, whose first epoch begins.
        ledger: `accounting.PrivacyLedger`.

    Raises:
        ValueError: if not one step is left.
    """
    for target in budgets_of(run.optimizer):
        if run.keeps(*target):
            return
        fitting = run.steps_within(*target)
        if fitting == 0:
            _refuse(target, ledger.epsilon(target.delta, _ACCOUNTANT))
        by_epoch = run.entry.each_example_once_per_epoch
        (run.limit_epochs if by_epoch else run.limit)(fitting)
        _warn_of_end(fitting, by_epoch, target)


def keep_budgets(run, epochs_to_charge: int):
    """Ends a run where a budget is spent, after others added to the ledger.

    Args:
        run: `training.run.Run`.
        epochs_to_charge: int, epochs that its next step counts.
    """
    by_epoch = run.entry.each_example_once_per_epoch
    for budget in run.budgets:
        fitting = run.steps_within(*budget)
        if not by_epoch:
            run.limit(fitting)
        elif fitting < epochs_to_charge:
            run.limit(0)
        else:
            run.limit_epochs(fitting - epochs_to_charge)
        to_come = run.steps_to_come
        if to_come is not None and fitting < to_come:
            _warn_of_end(fitting, by_epoch, budget)


def require_release(run, ledger, entry):
    """Refuses a release that was not planned, and that a budget does not cover.

    Args:
        run: `training.run.Run`.
        ledger: `accounting.PrivacyLedger`.
        entry: `accounting.LedgerEntry` without counts.

    Raises:
        ValueError: if it would cross a budget of the run.
    """
    for budget in run.budgets:
        after = ledger.epsilon_after(
            entry,
            1,
            budget.delta,
            accountant=budget.accountant,
            beside=run.planned_releases,
            rows_per_person=budget.rows_per_person,
        )
        if after > budget.epsilon:
            raise ValueError(
                f"Expected releases that keep {budget}, got one of "
                f"{entry.mechanism} beyond those that were planned, which "
                f"would raise ε to {after:.4g}. Plan it: pass the callback to "
                "`fit`."
            )


def _warn_of_end(fitting, by_epoch, budget):
    logging.warning(
        "The run ends after %d %s: %s is spent then. Steps of earlier runs and "
        "releases beside it count, and steps that a crash has lost as well.",
        fitting,
        "epochs" if by_epoch else "steps",
        budget,
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
        raise ValueError(
            f"Expected a step that keeps {target}, got one that raises ε to "
            f"{after:.4g}: a batch that is given as a whole has no "
            "amplification by sampling. Train by `fit`."
        )


def _refuse(target, spent):
    raise ValueError(
        f"Expected a target of which something is left, got {target}, of which "
        f"ε = {spent:.4g} is spent already, by the steps in the ledger. No "
        "further step fits. Compile with an optimizer of a larger epsilon."
    )
