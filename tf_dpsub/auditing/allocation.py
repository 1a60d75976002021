"""Attacks on the steps at which a sampler draws its examples."""

import numpy as np
from scipy import special, stats

from tf_dpsub import accounting
from tf_dpsub.auditing.lower_bounds import epsilon_of_rates
from tf_dpsub.auditing.statistics import SIGNIFICANCE, Finding


def check_allocation(
    batches,
    *,
    epochs: int = 96,
    epochs_of_run: int = 16,
    noise_multiplier: float = 2.0,
    delta: float = 1e-5,
    confidence: float = 0.999,
    seed: int = 0,
) -> list:
    """Audits a sampler that says to draw each example once in an epoch.

    Every example is attacked, by what the sampler does with it: the first half
    of the epochs tells the attacker how often it takes each step. In the other
    half, runs of a few epochs release, for each step, Gaussian noise and 1 if
    the example is in its batch, which is the worst that DP-SGD can do; and the
    attacker guesses from the likelihood of all releases of a run whether the
    example took part. What it proves is compared with the claim of random
    allocation.

    Args:
        batches: `tf_dpsub.data.OncePerEpoch` whose targets are the numbers of
            its examples, from 0 on.
        epochs: int, how many are drawn. Defaults to `96`.
        epochs_of_run: int, of an attacked run. Defaults to `16`.
        noise_multiplier: float, of the releases. Defaults to `2`.
        delta: float, of the claim. Defaults to `1e-5`.
        confidence: float, of the bound. Defaults to `0.999`.
        seed: int, of the noise of the releases. Defaults to `0`.

    Returns:
        List of three `Finding`: whether each example is drawn once in each
        epoch (`"once per epoch"`), whether their steps are uniform and
        independent of those of the epoch before (`"random steps"`), and the
        epsilon that is proved (`"epsilon of epochs"`).
    """
    chosen, drawn = _chosen_steps(batches, epochs)
    once = Finding(
        check="once per epoch",
        passed=bool((drawn == 1).all()),
        value=float(drawn.max()),
        detail=f"Of {drawn.size:,} examples of epochs, "
        f"{int((drawn != 1).sum()):,} were not drawn exactly once.",
    )
    return [
        once,
        _randomness(chosen, batches.steps_per_epoch),
        _attack(
            chosen,
            batches.steps_per_epoch,
            epochs_of_run,
            noise_multiplier,
            delta,
            confidence,
            np.random.default_rng(seed),
        ),
    ]


def _chosen_steps(batches, epochs):
    """The last step of each example in each epoch, and how often it is drawn.

    Returns:
        Arrays of int, [epochs, examples]. Step 0 stands for none.
    """
    steps = batches.steps_per_epoch
    chosen = np.zeros((epochs, batches.examples), np.int64)
    drawn = np.zeros_like(chosen)
    parts = batches.dataset().take(epochs * steps).as_numpy_iterator()
    for place, batch in enumerate(parts):
        epoch, step = divmod(place, steps)
        indices = batch["y"][batch["real"] == 1]
        np.add.at(drawn[epoch], indices, 1)
        chosen[epoch, indices] = step
    return chosen, drawn


def _randomness(chosen, steps):
    """Chi-square tests of steps, and of pairs of them in following epochs."""
    pairs = (chosen[1:] * steps + chosen[:-1]).ravel()
    tails = []
    for values, cells in ((chosen.ravel(), steps), (pairs, steps**2)):
        counts = np.bincount(values, minlength=cells)
        expected = values.size / cells
        statistic = np.sum((counts - expected) ** 2) / expected
        tails.append(float(stats.chi2.sf(statistic, cells - 1)))
    return Finding(
        check="random steps",
        passed=bool(min(tails) > SIGNIFICANCE / 2),
        value=min(tails),
        detail=f"Steps are uniform with p = {tails[0]:.2g}, and pairs of those "
        f"of following epochs with p = {tails[1]:.2g}.",
    )


def _attack(
    chosen, steps, epochs_of_run, noise_multiplier, delta, confidence, generator
):
    half = len(chosen) // 2
    # [examples, steps]: what the attacker has learnt, and a doubt.
    frequency = np.stack([(chosen[:half] == s).sum(0) for s in range(steps)], 1)
    log_prior = np.log((frequency + 1) / (half + steps))
    runs = (len(chosen) - half) // epochs_of_run
    attacked = chosen[half : half + runs * epochs_of_run]
    scores = []
    for is_in in (True, False):
        # [epochs, examples, steps]
        released = generator.standard_normal((*attacked.shape, steps))
        released *= noise_multiplier
        if is_in:
            released += attacked[..., None] == np.arange(steps)
        ratio = (released - 0.5) / noise_multiplier**2 + log_prior
        of_epochs = special.logsumexp(ratio, axis=-1)
        of_runs = of_epochs.reshape(runs, epochs_of_run, -1).sum(1)
        scores.append(of_runs.ravel())
    claimed = accounting.epsilon(
        noise_multiplier=noise_multiplier,
        sampling_rate=1 / steps,
        steps=steps * epochs_of_run,
        delta=delta,
        sampling="once_per_epoch",
    )
    bound = _proved(*scores, delta, confidence)
    return Finding(
        check="epsilon of epochs",
        passed=bool(bound <= claimed),
        value=bound,
        detail=f"In {scores[0].size:,} runs of {epochs_of_run} epochs an "
        f"attacker proves ε ≥ {bound:.3f}, of ε = {claimed:.3f} claimed, at "
        f"δ = {delta:g}.",
    )


def _proved(inside, outside, delta, confidence):
    """Lower bound on epsilon, by the threshold that other runs proved best."""

    def bound(threshold, first):
        ins, outs = inside[first::2], outside[first::2]
        return epsilon_of_rates(
            int(np.sum(ins >= threshold)),
            len(ins),
            int(np.sum(outs >= threshold)),
            len(outs),
            delta=delta,
            confidence=confidence,
        )

    candidates = np.quantile(
        np.concatenate([inside[0::2], outside[0::2]]),
        np.linspace(0.002, 0.998, 100),
    )
    return bound(max(candidates, key=lambda t: bound(t, 0)), 1)
