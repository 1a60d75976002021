"""The audit of one mechanism: of single steps, and of whole runs."""

import dataclasses
import math
import time

import numpy as np

from tf_dpsub.launchers.audits import digits_membership, private_search
from tf_dpsub.methods import METHODS

DELTA = 1e-5
STEP_EPSILON = 1.0
_CLIP, _RESIDUAL_CLIP = 0.7, 0.2
_RANK, _CARRIER_RANK = 5, 2
# The most directions of a side of a kernel.
_LARGEST_SIDE = 32
# Random examples that carriers of single steps and of one run follow.
_PUBLIC = 8
# Rows of the canaries that are persons.
_ROWS_PER_PERSON = 4
# Budget of whole training runs on digits.
RUN_EPSILON = 8.0
PATE = "PATE"
NAMES = (*METHODS, PATE, private_search.NAME)
# Arguments that the audit chooses.
_KWARGS = {
    "RGP": {"warmup_steps": 5},
    "RGP-public": {"update_every": 5},
    "DP-PowerSGD": {"rank": _CARRIER_RANK},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the parts of an audit.

    Attributes:
        steps: int, number of steps whose noise is tested.
        cases: int, number of pairs of neighbouring batches.
        runs: int, number of runs of one step, with and without an example.
        canaries: int, number of canaries in one run.
    """

    steps: int
    cases: int
    runs: int
    canaries: int


SHORT = Sizes(steps=1000, cases=300, runs=2000, canaries=500)
LONG = Sizes(steps=10_000, cases=10_000, runs=50_000, canaries=5000)


def maker(name, epsilon, public, *, batch_size, sampling_rate=1.0, steps=1):
    """Returns a function that makes an optimizer calibrated to a budget.

    Args:
        name: string, one of `METHODS`.
        epsilon: float, the budget.
        public: pair of arrays, inputs and targets of public examples, for
            mechanisms that follow their gradients.
        batch_size: int.
        sampling_rate: float. Defaults to `1`.
        steps: int. Defaults to `1`, or what bands make of one.

    Returns:
        Function of an inner optimizer and of the number of weights.
    """
    from tf_dpsub import accounting, optimizers, subspaces

    # An example is in one step of a cycle of bands.
    bands = METHODS[name].bands
    effective = accounting.noise_multiplier(
        epsilon=epsilon,
        delta=DELTA,
        sampling_rate=min(1.0, bands * sampling_rate),
        steps=-(-steps // bands),
        accountant="pld",
    )
    settings = {
        "noise_multiplier": effective,
        "l2_norm_clip": _CLIP,
        "batch_size": batch_size,
    }
    method = METHODS[name]
    if method.has_residual:
        # Two releases, which together have the effective noise multiplier.
        settings["noise_multiplier"] = math.sqrt(2) * effective
        settings["residual_norm_clip"] = _RESIDUAL_CLIP
    optimizer_class = getattr(optimizers, method.optimizer)
    kwargs = settings | method.kwargs | _KWARGS.get(name, {})
    if method.follows_public_examples:
        kwargs |= dict(zip(("x_public", "y_public"), public))

    def make_optimizer(inner, weights):
        if not method.needs_subspace:
            return optimizer_class(inner, **kwargs)
        rank = max(_RANK, weights // 10)
        if method.has_pairs:
            rank = min(rank, _LARGEST_SIDE)
            subspace = subspaces.KroneckerSubspace(
                *public, rank=rank, side_rank=rank
            )
        else:
            subspace = subspaces.RandomSubspace(rank)
        return optimizer_class(inner, **kwargs, subspace=subspace)

    return make_optimizer


def audited(name, sizes, infers=True, shadow_models=0):
    """Audits one mechanism; returns a result that JSON can hold.

    Args:
        name: string, one of `NAMES`.
        sizes: `Sizes`.
        infers: bool, whether membership inference attacks models that are
            trained on digits. Defaults to `True`.
        shadow_models: int, for these attacks. Defaults to `0`.
    """
    from tf_dpsub import auditing
    from tf_dpsub.auditing import step_audit

    if name == PATE:
        return _audited_votes(sizes)
    if name == private_search.NAME:
        return private_search.audited(sizes, STEP_EPSILON)
    began = time.monotonic()
    has_carriers = METHODS[name].needs_carriers
    step, half_precision = (
        auditing.MechanismAudit(
            maker(
                name,
                STEP_EPSILON,
                _random(sum(step_audit.INPUTS), sum(step_audit.OUTPUTS)),
                batch_size=16,
            ),
            carrier_rank=_CARRIER_RANK if has_carriers else None,
            dtype_policy=policy,
        )
        for policy in ("float32", "mixed_float16")
    )
    findings = step.run(steps=sizes.steps, cases=sizes.cases, runs=sizes.runs)
    findings += half_precision.check_sensitivity(sizes.cases)
    bands = METHODS[name].bands
    for check, rows, settings in _runs(sizes.canaries, bands):
        run = auditing.audit_by_gradients(
            maker(
                name,
                STEP_EPSILON,
                _random(sizes.canaries, 1),
                # One step has them all, or one step of a cycle each of them.
                batch_size=sizes.canaries * rows // bands,
            ),
            canaries=sizes.canaries,
            delta=DELTA,
            guesses=max(2, sizes.canaries // 5),
            carrier_rank=1 if has_carriers else None,
            confidence=0.999,
            **settings,
        )
        findings.append(
            auditing.Finding(
                check=check,
                passed=run.passed,
                value=run.bound,
                detail=f"Of {run.canaries:,} canaries in one run {run.correct} "
                f"of {run.guesses} guesses are right: ε ≥ {run.bound:.3f}, of "
                f"ε = {run.claimed:.3f} claimed.",
            )
        )
    result = {
        "mechanism": name,
        "claimed_epsilon": STEP_EPSILON,
        "findings": [dataclasses.asdict(f) for f in findings],
        "passed": all(f.passed for f in findings),
    }
    if infers:
        result["membership"] = dataclasses.asdict(attacked(name, shadow_models))
    result["seconds"] = time.monotonic() - began
    return result


def _runs(canaries, bands):
    """The runs with canaries: examples, persons of several rows, and rates.

    With bands, canaries are examples: groups have no rates of their rows.

    Yields:
        Name of the check, rows in a batch for each canary, and settings for
        `auditing.audit_by_gradients`.
    """
    yield "one run", 1, {}
    if bands > 1:
        return
    persons = {"rows_per_person": _ROWS_PER_PERSON}
    yield "one run, persons", 1, {**persons, "draws_persons": True}
    yield "one run, rows of persons", _ROWS_PER_PERSON, persons
    rates = np.where(np.arange(canaries) % 2, 1.0, 0.5)
    yield "one run, rates", 1, {"sampling_rates": rates}


def _audited_votes(sizes):
    """Audits PATE, which releases votes instead of gradients."""
    from tf_dpsub import auditing, pate

    began = time.monotonic()
    findings = auditing.VoteAudit(pate.ConfidentGNMax).run(
        queries=4 * sizes.steps, cases=sizes.cases, runs=sizes.runs
    )
    return {
        "mechanism": PATE,
        "claimed_epsilon": STEP_EPSILON,
        "findings": [dataclasses.asdict(f) for f in findings],
        "passed": all(f.passed for f in findings),
        "seconds": time.monotonic() - began,
    }


def _random(inputs, targets):
    """A few random examples, of so many inputs and targets."""
    generator = np.random.default_rng(0)
    return tuple(
        generator.normal(size=(_PUBLIC, numbers)).astype(np.float32)
        for numbers in (inputs, targets)
    )


def attacked(name=None, shadow_models=0):
    """Attacks a model trained on digits with ε = 8 by membership inference.

    Args:
        name: string, one of `METHODS`; None for training that is not private.
        shadow_models: int. Defaults to `0`.

    Returns:
        A `digits_membership.Attacks`.
    """
    import keras

    import tf_dpsub

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train(x, y, seed):
        keras.utils.set_random_seed(seed)
        model = tf_dpsub.models.get("mlp", x.shape[1:], 10, hidden=(128,))
        if name is None:
            model.compile(keras.optimizers.Adam(3e-3), loss)
            model.fit(x, y, 32, digits_membership.EPOCHS, verbose=0)
            return model
        if METHODS[name].needs_carriers:
            tf_dpsub.layers.reparametrize(model, _CARRIER_RANK)
        private = tf_dpsub.make_private(model)
        batch_size = digits_membership.BATCH_SIZE
        make = maker(
            name,
            RUN_EPSILON,
            digits_membership.public_examples(),
            batch_size=batch_size,
            sampling_rate=batch_size / len(x),
            steps=digits_membership.EPOCHS * math.ceil(len(x) / batch_size),
        )
        inner = keras.optimizers.SGD(0.5, momentum=0.9)
        private.compile(make(inner, model.count_params()), loss)
        private.fit(x, y, epochs=digits_membership.EPOCHS, verbose=0)
        return model

    return digits_membership.attacked(train, shadow_models)
