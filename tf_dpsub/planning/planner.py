"""Which private method suits a model, told from public examples alone."""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import tree

from tf_dpsub import accounting, layers, optimizers, subspaces
from tf_dpsub.checks import check_count
from tf_dpsub.planning.signals import Signal, SignalMeter, mean_signal
from tf_dpsub.planning.step_cost import StepCost, measure_step
from tf_dpsub.training.private_model import make_private

METHODS = ("DP-SGD", "PDP-SGD", "B-GEP", "GEP", "RGP")
# Clips that are tried, relative to the median norm of public gradients.
_CLIPS = (0.1, 0.3, 1.0)
_RANKS = (10, 50, 200)
_CARRIER_RANKS = (2, 8, 16)
# Batch sizes that are tried where none is given.
_BATCH_SIZES = tuple(2**k for k in range(5, 15))
# The smallest batch whose noise over the run is at most this much above the
# least is taken.
_ENOUGH = 1.1
# A method has to be better than a cheaper one by so much.
_WORTH = 0.02
# Of the clip of embeddings, as usual for GEP.
_RESIDUAL_CLIP = 0.2
_BATCHES = 8
# Public examples up to which eigenspaces are computed exactly.
_FEW = 512
# Power iterations by which carriers follow weights that have moved at once.
_CATCHING_UP = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A method with its settings, and what is expected of it.

    Attributes:
        method: string, one of `METHODS`.
        rank: int, number of directions, or of carriers; None where it has none.
        l2_norm_clip: float.
        noise_multiplier: float, the one to give to the optimizer.
        snr: float, signal-to-noise ratio of a step, of energies.
        alignment: float, the cosine between the gradient and the mean of what
            the run releases, in [0, 1].
        kept: float, the share of the gradient's energy in what is released,
            before noise: 1 less the error of the projection and of the clip.
        signal: `Signal`, mean over the simulated path.
        cost: `StepCost`, or None where it was not measured.
    """

    method: str
    rank: int | None
    l2_norm_clip: float
    noise_multiplier: float
    snr: float
    alignment: float
    kept: float
    signal: Signal
    cost: StepCost | None = None

    @property
    def name(self):
        if self.rank is None:
            return self.method
        letter = "r" if self.method == "RGP" else "k"
        return f"{self.method}, {letter} = {self.rank}"

    @property
    def residual_norm_clip(self):
        """That of GEP, as a float; None of other methods."""
        if self.method == "GEP":
            return _RESIDUAL_CLIP * self.l2_norm_clip
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What `plan` found.

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
            known = best.get(candidate.method)
            if known is None or candidate.alignment > known.alignment:
                best[candidate.method] = candidate
        return sorted(best.values(), key=lambda c: -c.alignment)


def plan(
    model,
    x_public,
    y_public,
    *,
    loss,
    examples: int,
    epsilon: float,
    delta: float,
    epochs: int,
    optimizer="sgd",
    l2_norm_clip: float | None = None,
    methods=METHODS,
    batch_size: int | None = None,
    clips=None,
    ranks=_RANKS,
    carrier_ranks=_CARRIER_RANKS,
    carriers: dict | None = None,
    groups=1,
    basis: tuple | None = None,
    held_out: float = 0.5,
    splits: int = 1,
    simulated_steps: int = 1000,
    points: int = 5,
    measure_cost: bool = True,
    noise_multiplier: float | None = None,
    accountant: str = "rdp",
    seed: int = 0,
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
        examples: int, the number n of private examples.
        epsilon: float, the budget.
        delta: float.
        epochs: int, how often each private example is expected to be drawn.
        optimizer: inner Keras optimizer, or its name, for the simulated path.
            Defaults to `"sgd"`.
        l2_norm_clip: float, the clip of the simulated path, which goes with
            the learning rate. Defaults to `None`: the smallest of `clips`.
        methods: collection of string, some of `METHODS`. Defaults to all.
        batch_size: int, the expected one. Defaults to `None`: the smallest
            whose noise over the run is at most a tenth above the least.
        clips: collection of float. Defaults to `None`: 0.1, 0.3 and 1 times
            the median norm of public gradients.
        ranks: collection of int, of subspaces; those above what the public
            examples span are left out. Defaults to `(10, 50, 200)`.
        carrier_ranks: collection of int, of RGP. Defaults to `(2, 8, 16)`.
        carriers: dict, further arguments of `tf_dpsub.layers.reparametrize`,
            such as `exclude`. Defaults to `None`.
        groups: as for `tf_dpsub.subspaces.PublicSubspace`. Defaults to `1`.
        basis: tuple of inputs and targets (None for random labels) of public
            examples that make the subspaces. Defaults to `None`: those of
            `x_public` that are not held out.
        held_out: float, the share of the public examples that are looked at
            alone. Defaults to `0.5`.
        splits: int, over how many random splits of the public examples, and
            simulated paths, all is averaged: more than one is for few examples.
            Defaults to `1`.
        simulated_steps: int, the most steps of the path. Defaults to `1000`.
        points: int, at how many weights gradients are looked at. Defaults to
            `5`.
        measure_cost: bool, whether steps are timed, and their memory measured.
            Defaults to `True`.
        noise_multiplier: float, to take this one instead of a budget:
            `epsilon` is then None. Defaults to `None`.
        accountant: string, `"rdp"` or `"pld"`. Defaults to `"rdp"`.
        seed: int, of the split and of the simulation. Defaults to `0`.

    Returns:
        A `Plan`.

    Raises:
        ValueError: if an argument is out of range, or there are too few public
            examples.

    Example:

    ```python
    found = tf_dpsub.planning.plan(
        model, x_public, y_public,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        examples=60_000, epsilon=2.0, delta=1e-5, epochs=20,
    )
    print(found.recommended, *found.reasons, sep="\\n")
    ```
    """
    for name, value in (
        ("examples", examples),
        ("epochs", epochs),
        ("simulated_steps", simulated_steps),
        ("points", points),
        ("splits", splits),
    ):
        check_count(name, value)
    unknown = [m for m in methods if m not in METHODS]
    if unknown or not methods:
        raise ValueError(
            f"Expected methods among {', '.join(METHODS)}, got "
            f"{', '.join(map(str, unknown)) or 'none'}."
        )
    if not 0 < held_out < 1:
        raise ValueError(f"Expected 0 < held_out < 1, got {held_out}.")
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            "Expected epsilon or noise_multiplier, and one of them None, got "
            f"{epsilon} and {noise_multiplier}."
        )
    if noise_multiplier is not None and batch_size is None:
        raise ValueError(
            "Expected batch_size with noise_multiplier, got None: which batch "
            "is best is asked for a budget."
        )
    run = _Run(
        examples=examples,
        epochs=epochs,
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        noise_multiplier=noise_multiplier,
    )
    if batch_size is None:
        sizes = [b for b in _BATCH_SIZES if 4 * b <= examples] or [examples]
    else:
        sizes = [batch_size]
    batch_noise = {b: run.noise(b) for b in sizes}
    least = min(batch_noise.values())
    chosen = min(b for b in sizes if batch_noise[b] <= _ENOUGH * least)
    search = _Search(
        model=model,
        loss=loss,
        optimizer=keras.optimizers.get(optimizer),
        batch_size=chosen,
        noise_multiplier=run.noise_multiplier_for(chosen),
        steps=run.steps(chosen),
        carriers=carriers or {},
        groups=groups,
        basis=basis,
        seed=seed,
    )
    weights = model.get_weights()
    try:
        for k in range(splits):
            trained, batches = _split(x_public, y_public, held_out, seed + k)
            search.take(trained, batches, clips, l2_norm_clip)
            search.walk(simulated_steps, points)
            for method in methods:
                logging.info(
                    "Looking at %s, split %d of %d.", method, k + 1, splits
                )
                search.try_method(
                    method, carrier_ranks if method == "RGP" else ranks
                )
            model.set_weights(weights)
        candidates = search.candidates(measure_cost)
        _check_gradient(candidates)
    finally:
        model.set_weights(weights)
    found = Plan(
        candidates=candidates,
        batch_size=chosen,
        steps=run.steps(chosen),
        noise_multiplier=search.noise_multiplier,
        batch_noise=batch_noise,
        median_norm=search.median_norm,
    )
    return _with_recommendation(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A run that is planned."""

    examples: int
    epochs: int
    epsilon: float | None
    delta: float
    accountant: str
    noise_multiplier: float | None

    def steps(self, batch_size):
        return self.epochs * math.ceil(self.examples / batch_size)

    def noise_multiplier_for(self, batch_size):
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        return accounting.noise_multiplier(
            epsilon=self.epsilon,
            delta=self.delta,
            sampling_rate=min(1.0, batch_size / self.examples),
            steps=self.steps(batch_size),
            accountant=self.accountant,
        )

    def noise(self, batch_size):
        """Standard deviation of the noise in the mean over the run."""
        multiplier = self.noise_multiplier_for(batch_size)
        return multiplier / (batch_size * math.sqrt(self.steps(batch_size)))


def _split(x, y, held_out, seed):
    """Public examples that are trained on, and batches of those held out."""
    count = len(tree.flatten(x)[0])
    if y is None or len(tree.flatten(y)[0]) != count:
        raise ValueError(
            f"Expected targets for the {count} public examples, got "
            f"{'none' if y is None else len(tree.flatten(y)[0])}: the model is "
            "trained on them as on private ones. Images with random labels go "
            "to `basis`."
        )
    some = round(held_out * count)
    size = some // _BATCHES
    if size < 2 or count - some < 2:
        raise ValueError(
            f"Expected {2 * _BATCHES} public examples at least to hold out, "
            f"and two to train on, got {count} with held_out={held_out}."
        )
    order = np.random.default_rng(seed).permutation(count)
    trained, looked_at = order[some:], order[: size * _BATCHES]

    def take(indices):
        return tree.map_structure(lambda a: np.asarray(a)[indices], (x, y))

    batches = [
        tree.map_structure(tf.convert_to_tensor, {"x": part[0], "y": part[1]})
        for part in map(take, np.split(looked_at, _BATCHES))
    ]
    return take(trained), batches


def _check_gradient(candidates):
    """All share the gradient: what is known of it depends on the examples."""
    if candidates and not candidates[0].signal.gradient > 0:
        raise ValueError(
            "Expected public examples whose gradients have a direction in "
            "common, got none that so few show. Hold out more of them "
            "(held_out), or average over splits."
        )


class _Search:
    """Tries mechanisms at weights along simulated paths."""

    def __init__(
        self,
        *,
        model,
        loss,
        optimizer,
        batch_size,
        noise_multiplier,
        steps,
        carriers,
        groups,
        basis,
        seed,
    ):
        self._model, self._loss = model, loss
        self._inner = optimizer
        self._batch_size = batch_size
        self.noise_multiplier = noise_multiplier
        self._steps = steps
        self._carriers = carriers
        self._groups = groups
        self._given_basis = basis
        self._seed = seed
        self._clips = None
        # By method, rank and clip.
        self._signals, self._effective = {}, {}

    # The path.

    def take(self, trained, batches, clips, path_clip):
        """Takes up a split of the public examples; the first fixes clips."""
        self._trained, self._batches = trained, batches
        self._basis = self._given_basis or trained
        plain = optimizers.DPSGD(
            "sgd",
            noise_multiplier=0.0,
            l2_norm_clip=math.inf,
            batch_size=self._batch_size,
        )
        self._gradients = self._meter([plain])
        if self._clips is None:
            self.median_norm = self._median_norm()
            self._clips = sorted(
                clips or [_rounded(c * self.median_norm) for c in _CLIPS]
            )
        self._path_clip = path_clip or self._clips[0]

    def walk(self, simulated_steps, points):
        """Trains on public examples as noisily as the run; keeps weights."""
        steps = min(self._steps, simulated_steps)
        ends = np.linspace(0, steps, points).round().astype(int)
        simulated = self._simulated()
        self._path = [self._model.get_weights()]
        for first, last in zip(ends, ends[1:]):
            if last > first:
                simulated.fit(
                    *self._trained, steps_per_epoch=int(last - first), verbose=0
                )
                self._path.append(self._model.get_weights())

    def _median_norm(self):
        """Of the gradients of single public examples, at the start."""
        step = self._gradients.model.training_step

        @tf.function(autograph=False, jit_compile=step.is_compiled)
        def norms(batch):
            gradients, _ = step.per_example_gradients(batch)
            return tf.sqrt(gradients.sq_norms())

        found = []
        for batch in self._batches:
            size = len(tree.flatten(batch["x"])[0])
            found.append(norms(batch | {"real": tf.ones([size])}))
        median = float(np.median(np.concatenate(found)))
        if not 0 < median < math.inf:
            raise ValueError(
                "Expected public examples with finite gradients, not all zero, "
                f"got norms with the median {median}."
            )
        return median

    def _simulated(self):
        """A private model whose steps are as noisy as those of the run."""
        count = len(tree.flatten(self._trained[0])[0])
        own = min(count, self._batch_size)
        model = make_private(self._model)
        model.compile(
            optimizers.DPSGD(
                self._new_inner(),
                noise_multiplier=self.noise_multiplier * own / self._batch_size,
                l2_norm_clip=self._path_clip,
                batch_size=own,
                seed=self._seed,
            ),
            loss=self._loss,
        )
        return model

    # Mechanisms.

    def try_method(self, method, ranks):
        """Measures the signals of a method, with all clips."""
        if method == "DP-SGD":
            self._try(method, None)
            return
        for rank in ranks:
            if method == "RGP":
                self._try_carriers(rank)
            elif rank <= self._largest_rank:
                self._try(method, rank)
            else:
                logging.info(
                    "%s with k = %d is left out: of %d public examples or "
                    "weights there are no more directions.",
                    method,
                    rank,
                    self._largest_rank,
                )

    @property
    def _largest_rank(self):
        count = len(tree.flatten(self._basis[0])[0])
        weights = sum(math.prod(v.shape) for v in self._model.trainable_weights)
        return min(count, weights)

    def _try_carriers(self, rank):
        try:
            self._reparametrize(rank)
        except ValueError as error:
            logging.info("RGP with rank %d is left out. %s", rank, error)
            return
        try:
            self._try("RGP", rank)
        finally:
            layers.merge(self._model)

    def _reparametrize(self, rank):
        layers.reparametrize(self._model, rank, **self._carriers)

    def _try(self, method, rank):
        optimizers = self._optimizers(method, rank, self._clips)
        meter = self._meter(optimizers)
        for k, weights in enumerate(self._path):
            self._model.set_weights(weights)
            if method == "RGP":
                _follow(meter, is_start=k == 0)
            signals = meter.measure(self._gradients.means()[0])
            for optimizer, signal in zip(optimizers, signals):
                key = method, rank, optimizer.l2_norm_clip
                self._signals.setdefault(key, []).append(signal)
                self._effective[key] = optimizer.effective_noise_multiplier

    def _meter(self, optimizers):
        return SignalMeter(self._model, self._loss, optimizers, self._batches)

    def _optimizers(self, method, rank, clips):
        """One optimizer for each clip, with noise multiplier 1."""
        make = {
            "DP-SGD": optimizers.DPSGD,
            "PDP-SGD": optimizers.ProjectedDPSGD,
            "B-GEP": optimizers.GEP,
            "GEP": optimizers.GEP,
            "RGP": optimizers.RGP,
        }[method]
        own = {}
        if method in ("PDP-SGD", "B-GEP", "GEP"):
            own["subspace"] = self._subspace(rank)
        if method == "B-GEP":
            own["residual"] = False
        made = []
        for clip in clips:
            if method == "GEP":
                own["residual_norm_clip"] = _RESIDUAL_CLIP * clip
            made.append(
                make(
                    self._new_inner(),
                    noise_multiplier=1.0,
                    l2_norm_clip=clip,
                    batch_size=self._batch_size,
                    **own,
                )
            )
        return made

    def _new_inner(self):
        return type(self._inner).from_config(self._inner.get_config())

    def _subspace(self, rank):
        count = len(tree.flatten(self._basis[0])[0])
        return subspaces.PublicSubspace(
            *self._basis,
            rank=rank,
            groups=self._groups,
            method="gram" if count <= _FEW else "power",
            seed=self._seed,
        )

    # What comes of it.

    def candidates(self, measure_cost):
        """All candidates, with the costs of their steps on demand."""
        found = [
            self._candidate(*key, mean_signal(signals))
            for key, signals in self._signals.items()
        ]
        if not measure_cost:
            return found
        costs = {
            (c.method, c.rank): c.l2_norm_clip
            for c in sorted(found, key=lambda c: c.alignment)
        }
        for (method, rank), clip in costs.items():
            costs[method, rank] = self._cost(method, rank, clip)
        return [
            dataclasses.replace(c, cost=costs[c.method, c.rank]) for c in found
        ]

    def _candidate(self, method, rank, clip, signal):
        sigma, batch_size = self.noise_multiplier, self._batch_size
        return Candidate(
            method=method,
            rank=rank,
            l2_norm_clip=clip,
            noise_multiplier=sigma / self._effective[method, rank, clip],
            snr=signal.snr(sigma, batch_size),
            alignment=signal.alignment(sigma, batch_size, self._steps),
            kept=signal.alignment(0.0, 10**9, 1) ** 2,
            signal=signal,
        )

    def _cost(self, method, rank, clip):
        if method == "RGP":
            self._reparametrize(rank)
        try:
            (optimizer,) = self._optimizers(method, rank, [clip])
            model = make_private(self._model)
            model.compile(optimizer, loss=self._loss)
            return measure_step(model, *self._trained)
        finally:
            if method == "RGP":
                layers.merge(self._model)


def _follow(meter, is_start):
    """Lets carriers catch up with weights that have moved."""
    optimizer = meter.optimizers[0]
    iterations = 0 if is_start else optimizer.warmup_steps
    optimizer.iterations.assign(iterations)
    for _ in range(1 if is_start else _CATCHING_UP):
        meter.prepare()


def _rounded(clip):
    """To two significant digits."""
    return float(f"{clip:.1e}")


def _with_recommendation(found):
    """The cheapest of the methods that are about as good as the best."""
    best = found.best
    first = best[0]
    close = [c for c in best if c.alignment >= (1 - _WORTH) * first.alignment]
    chosen = min(close, key=lambda c: METHODS.index(c.method))
    if all(c.cost is not None for c in close):
        chosen = min(close, key=lambda c: c.cost.seconds(found.batch_size))
    reasons = [
        f"Batches of {found.batch_size:,}: larger ones would leave hardly less "
        "noise in the mean over the run, smaller ones more."
        if len(found.batch_noise) > 1
        else f"Batches of {found.batch_size:,}, as given.",
        f"{found.steps:,} steps with noise multiplier "
        f"{found.noise_multiplier:.3g}.",
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
    return dataclasses.replace(found, reasons=reasons, recommended=chosen)
