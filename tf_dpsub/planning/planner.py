"""Recommendation of a private method for a model, from public examples."""

import dataclasses
import warnings

from tf_dpsub.methods import PLANNED
from tf_dpsub.planning.search import Candidate, Search
from tf_dpsub.planning.settings import (
    PlannedRun,
    SearchSpace,
    Simulation,
    smallest_quiet_batch,
)

# A method has to be better than a cheaper one by so much.
_WORTH = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `plan`.

    Attributes:
        candidates: list of `Candidate`, all that were tried.
        batch_size: int.
        steps: int, of the run.
        noise_multiplier: float, the effective one of every method.
        batch_noise: dict from batch sizes that were tried to the standard
            deviation of the noise that is left in the mean over the run,
            relative to the clip, in one coordinate.
        median_norm: float, of public gradients, that clips are relative to.
        reasons: list of string, for what is recommended.
        recommended: `Candidate`.
    """

    candidates: list
    batch_size: int
    steps: int
    noise_multiplier: float
    batch_noise: dict
    median_norm: float
    reasons: list = dataclasses.field(default_factory=list)
    recommended: Candidate | None = None

    @property
    def best(self):
        """The best candidate of each method, best method first."""
        best = {}
        for candidate in self.candidates:
            earlier = best.get(candidate.method)
            if earlier is None or candidate.alignment > earlier.alignment:
                best[candidate.method] = candidate
        return sorted(best.values(), key=lambda c: -c.alignment)


def plan(
    model,
    x_public,
    y_public,
    *,
    loss,
    run: PlannedRun | None = None,
    search: SearchSpace | None = None,
    simulation: Simulation | None = None,
    measure_cost: bool = True,
    seed: int = 0,
    **flat,
):
    """Predicts how well private methods suit a model, and recommends one.

    A part of the public examples stands for the private ones: the model is
    trained on them by DP-SGD, with the noise that a step of the run would
    have. At points along this path, each mechanism works on the public
    examples that were held out, with each clip and rank. What counts is the
    expected cosine between the gradient and the mean of what the steps of the
    run release (`Candidate.alignment`): energy that a subspace loses is lost at
    every step, noise averages out over them.

    Formal guarantees: no private example is read. What is planned with is the
    number of private examples, which has to be public, as it is for
    accounting. The public examples must not be private ones. Nothing is
    released.

    Args:
        model: built plain `keras.Model`, with its initial weights, which are
            what they were afterwards.
        x_public: array, or structure of arrays, labelled public examples, as
            much alike the private ones as can be had.
        y_public: the same for targets.
        loss: as for `keras.Model.compile`.
        run: `PlannedRun`, the run that a method is sought for.
        search: `SearchSpace`, what is compared. Defaults to all methods.
        simulation: `Simulation`, how it is tried. Defaults to SGD on half of
            the public examples.
        measure_cost: bool, whether steps are timed, and their memory measured.
            Defaults to `True`.
        seed: int, of the splits and of the simulation. Defaults to `0`.
        **flat: until version 0.2, arguments of `run`, `search` and
            `simulation`.

    Returns:
        A `Plan`.

    Raises:
        ValueError: if an argument is out of range, or there are too few public
            examples.

    Example:

    ```python
    plan = tf_dpsub.planning.plan(
        model, x_public, y_public,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        run=tf_dpsub.planning.PlannedRun(
            examples=60_000, epochs=20, epsilon=2.0, delta=1e-5
        ),
    )
    print(plan.recommended, *plan.reasons, sep="\\n")
    ```
    """
    if flat:
        run, search, simulation = _grouped(flat, run, search, simulation)
    if run is None:
        raise TypeError("Expected run=PlannedRun(...), got none.")
    batch_noise = run.batch_noise()
    batch_size = smallest_quiet_batch(batch_noise)
    noise_multiplier = run.effective_noise_multiplier(batch_size)
    tried = Search(
        model,
        loss,
        search or SearchSpace(),
        simulation or Simulation(),
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        steps=run.steps(batch_size),
        seed=seed,
    )
    weights = model.get_weights()
    try:
        candidates = tried.run(x_public, y_public, measure_cost)
    finally:
        model.set_weights(weights)
    recommendation = _with_recommendation(
        Plan(
            candidates=candidates,
            batch_size=batch_size,
            steps=run.steps(batch_size),
            noise_multiplier=noise_multiplier,
            batch_noise=batch_noise,
            median_norm=tried.median_norm,
        )
    )
    return _with_bands(recommendation, run)


def _grouped(flat, run, search, simulation):
    """The groups of arguments, with those that were given one by one."""
    kinds = {PlannedRun: run, SearchSpace: search, Simulation: simulation}
    owners = {
        field.name: kind for kind in kinds for field in dataclasses.fields(kind)
    }
    unknown = flat.keys() - owners.keys()
    if unknown:
        raise TypeError(
            "Expected arguments of tf_dpsub.planning.plan, got "
            f"{', '.join(map(repr, sorted(unknown)))}."
        )
    warnings.warn(
        f"Expected run=PlannedRun(...), search=SearchSpace(...) and "
        f"simulation=Simulation(...), got {', '.join(flat)} by themselves; "
        "that goes in version 0.2.",
        FutureWarning,
        stacklevel=3,
    )
    groups = []
    for kind, group in kinds.items():
        changes = {n: v for n, v in flat.items() if owners[n] is kind}
        if group is not None:
            groups.append(dataclasses.replace(group, **changes))
        else:
            groups.append(kind(**changes) if changes else None)
    return groups


def _with_bands(plan, run):
    """Adds the best number of bands, where the method can have any."""
    if plan.recommended.method != "DP-SGD":
        return plan
    noise = run.band_noise(plan.batch_size)
    bands = min(noise, key=noise.__getitem__, default=1)
    if bands == 1:
        return plan
    less = 1 - noise[bands] / noise[1]
    reason = (
        f"With bands={bands} of DPSGD, later steps take noise back: "
        f"{100 * less:.0f} % less of it is left in the weights, over the run, "
        "at the same epsilon. No example was read for that."
    )
    return dataclasses.replace(plan, reasons=[*plan.reasons, reason])


def _with_recommendation(plan):
    """Adds the cheapest of the methods that are about as good as the best."""
    best = plan.best
    first = best[0]
    close = [c for c in best if c.alignment >= (1 - _WORTH) * first.alignment]
    chosen = min(close, key=lambda c: PLANNED.index(c.method))
    if all(c.cost is not None for c in close):
        chosen = min(close, key=lambda c: c.cost.seconds(plan.batch_size))
    reasons = [
        f"Batches of {plan.batch_size:,}: larger ones would leave hardly less "
        "noise in the mean over the run, smaller ones more."
        if len(plan.batch_noise) > 1
        else f"Batches of {plan.batch_size:,}, as given.",
        f"{plan.steps:,} steps with noise multiplier "
        f"{plan.noise_multiplier:.3g}.",
    ]
    for candidate in best:
        reasons.append(
            f"{candidate.name}, clip {candidate.l2_norm_clip:g}: keeps "
            f"{100 * candidate.kept:.0f} % of the gradient's energy; a step "
            f"has a signal-to-noise ratio of {candidate.snr:.2g}; the mean "
            "over the run is aligned with the gradient to "
            f"{candidate.alignment:.2f}."
        )
    if chosen is not first:
        reasons.append(
            f"{chosen.name} costs least of those within "
            f"{100 * _WORTH:.0f} % of the best, {first.name}."
        )
    return dataclasses.replace(plan, reasons=reasons, recommended=chosen)
