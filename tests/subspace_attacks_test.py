"""Sensitivity of the releases of subspace methods, and attacks on it.

Batches differ in one example, which is empty in one of them. Whatever it and
the others are, coordinates move by at most the clip, and so do the embedding
and the residual of GEP, each by its own.
"""

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.gradients import tensor_cores
from tests.optimizers import hostile_steps
from tests.subspaces.linear_models import (
    PARAMETERS,
    ScaledSubspace,
    attach,
    attach_basis,
    batch_of,
    flat,
    make_private,
    network,
    orthonormal,
    product,
    projected,
    stored,
)
from tf_dpsub import data, gradients
from tf_dpsub.optimizers import GEP, ProjectedDPSGD
from tf_dpsub.subspaces import FixedSubspace, PublicSubspace

SIZES = (10, 14)
SIZE, RANK, BATCH = sum(SIZES), 4, 16
VICTIM = 5  # the example that differs

BASIS = orthonormal(SIZE, RANK, 3)
COMPLEMENT = np.linalg.svd(BASIS)[0][:, RANK:]

# As far apart as scales of a whitened subspace are, with a r.m.s. of 1.
SCALES = np.array([1.0, 31.6, 5.0, 0.9])
SCALES /= np.sqrt(np.mean(SCALES**2))

_SCALED = " in scaled coordinates"
METHODS = (
    "pdp",
    "pdp from a step on",
    "pdp, ambient",
    "b-gep",
    "gep",
    "pdp" + _SCALED,
    "pdp from a step on" + _SCALED,
    "pdp, untruncated" + _SCALED,
    "b-gep" + _SCALED,
    "gep" + _SCALED,
)


def subspace_of(method):
    """The subspace that a method has, spanned by `BASIS`."""
    if method.endswith(_SCALED):
        return ScaledSubspace(BASIS, SCALES)
    return FixedSubspace(BASIS, public=True)


def make_optimizer(method, subspace, clips=(1.0, 0.2), **arguments):
    method = method.removesuffix(_SCALED)
    arguments = {
        "noise_multiplier": 0.0,
        "l2_norm_clip": clips[0],
        "batch_size": BATCH,
        "subspace": subspace,
        **arguments,
    }
    if method == "gep":
        return GEP("sgd", residual_norm_clip=clips[1], **arguments)
    if method == "b-gep":
        return GEP("sgd", residual=False, **arguments)
    if method == "pdp, ambient":
        arguments["noise"] = "ambient"
    if method == "pdp, untruncated":
        arguments["truncate"] = False
    if method == "pdp from a step on":
        arguments["start_step"] = 1  # the first step is of DP-SGD
    return ProjectedDPSGD("sgd", **arguments)


def parts_of(method, released):
    """The release, as one vector for each clip."""
    released = [np.ravel(r).astype("float64") for r in released]
    if method.startswith("gep"):
        return [released[0], np.concatenate(released[1:])]
    return [np.concatenate(released)]


class Mechanism:
    """The releases of a method for given rows, without noise."""

    def __init__(self, method, clips=(1.0, 0.2)):
        self._subspace = subspace_of(method)
        optimizer = make_optimizer(method, self._subspace, clips)
        model = attach_basis(make_private(optimizer, SIZES))
        self.clips = clips
        vector = tf.TensorSpec([None], tf.float64)
        parts = 2 if method.startswith("gep") else 1

        def released(rows, keep):
            sums = optimizer.clipped_sums(stored(model, rows), keep)
            sums = [
                tf.reshape(tf.cast(part, tf.float64), [-1])
                for part in optimizer.released_sums(sums)
            ]
            if parts == 2:
                return [sums[0], tf.concat(sums[1:], 0)]
            return [tf.concat(sums, 0)]

        @tf.function(
            autograph=False,
            input_signature=[
                tf.TensorSpec([None, BATCH, SIZE]),
                tf.TensorSpec([BATCH]),
            ],
        )
        def all_released(batches, keep):
            return tf.map_fn(
                lambda rows: released(rows, keep),
                batches,
                fn_output_signature=[vector] * parts,
            )

        self._released = all_released

    def use(self, basis):
        """Puts another basis in place."""
        for block, part in zip(
            self._subspace._blocks[0], np.split(basis, [SIZES[0]])
        ):
            block.assign(part)

    def __call__(self, batches, keep):
        """The releases of several batches, as vectors for each clip."""
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            batches = np.asarray(batches).astype("float32")
        return [p.numpy() for p in self._released(batches, keep)]

    def movements(self, batches, victim=VICTIM):
        """Distances by which an example moves each part, in clips.

        Returns:
            Array `[batches, parts]`.
        """
        keep = np.ones(BATCH, np.float32)
        with_it = self(batches, keep)
        keep[victim] = 0
        # The values of an empty example do not matter.
        without = self(batches, keep)
        assert all(np.isfinite(p).all() for p in with_it + without)
        return np.stack(
            [
                np.linalg.norm(a - b, axis=1) / clip
                for a, b, clip in zip(with_it, without, self.clips)
            ],
            1,
        )


@pytest.fixture(name="mechanisms", scope="module")
def _mechanisms():
    """Made as they are asked for, and given a basis: each is traced once."""
    made = {}

    def get(method, clips=(1.0, 0.2), basis=BASIS):
        if (method, clips) not in made:
            made[method, clips] = Mechanism(method, clips)
        made[method, clips].use(basis)
        return made[method, clips]

    return get


def inside(random, n=1):
    return random.normal(size=(n, RANK)) @ BASIS.T


def outside(random, n=1):
    return random.normal(size=(n, SIZE - RANK)) @ COMPLEMENT.T


def one_entry(value):
    def make(random):
        row = random.normal(size=SIZE)
        row[random.integers(SIZE)] = value
        return row

    return make


def scaled(make):
    """Rows of any size in float32, and of some whose squares overflow."""
    return lambda random: make(random)[0] * 10.0 ** random.uniform(-30, 19)


VICTIMS = {
    "ordinary": scaled(lambda random: random.normal(size=(1, SIZE))),
    "inside": scaled(inside),
    "outside": scaled(outside),
    "almost inside": scaled(
        lambda random: (
            inside(random) + 10.0 ** random.uniform(-8, -1) * outside(random)
        )
    ),
    "almost outside": scaled(
        lambda random: (
            outside(random) + 10.0 ** random.uniform(-8, -1) * inside(random)
        )
    ),
    "few entries": scaled(
        lambda random: np.eye(SIZE)[random.integers(SIZE, size=1)]
    ),
    "of all sizes": lambda random: (
        random.normal(size=SIZE) * 10.0 ** random.uniform(-40, 18, SIZE)
    ),
    "zero": lambda random: np.zeros(SIZE),
    "denormal": lambda random: 1e-40 * random.normal(size=SIZE),
    "too large": lambda random: 1e30 * random.normal(size=SIZE),
    "nan": one_entry(np.nan),
    "infinite": one_entry(-np.inf),
    "largest": one_entry(3.4e38),
}


def almost_inside(random):
    """Other rows, as large in the sum of residuals as they can be.

    Their parts outside of the subspace are below the margin of 2^-10 of
    their energy that keeps them from being scaled up further: that is 32 clips
    each, which cancel but for rounding.
    """
    row = inside(random)
    size = np.linalg.norm(row)
    row = row + 2.0**-7 * size * outside(random)
    return np.tile(10.0 ** random.uniform(0, 15) * row, (BATCH, 1))


OTHERS = {
    "ordinary": lambda random: random.normal(size=(BATCH, SIZE)),
    "all sizes": lambda random: (
        random.normal(size=(BATCH, SIZE))
        * 10.0 ** random.uniform(-20, 18, (BATCH, 1))
    ),
    "alike": lambda random: np.tile(random.normal(size=SIZE), (BATCH, 1)),
    "cancelling": lambda random: (
        (-1.0) ** np.arange(BATCH)[:, None] * 1e6 * random.normal(size=SIZE)
    ),
    "almost inside": almost_inside,
    "empty": lambda random: np.zeros((BATCH, SIZE)),
    "not finite": lambda random: np.where(
        np.arange(BATCH)[:, None] % 2, np.nan, random.normal(size=SIZE)
    ),
}


@functools.cache
def hostile_batches(cases, seed=0):
    """Batches, their kinds of victims, and those of their other rows."""
    random = np.random.default_rng(seed)
    batches, kinds, others = [], [], []
    for case in range(cases):
        kinds.append(list(VICTIMS)[case % len(VICTIMS)])
        others.append(random.choice(list(OTHERS)))
        with np.errstate(over="ignore"):
            rows = OTHERS[others[-1]](random)
            rows[VICTIM] = VICTIMS[kinds[-1]](random)
        batches.append(rows)
    return np.stack(batches), kinds, others


def search(mechanism, cases):
    """The largest movements, by part and by kind of victim."""
    batches, kinds, others = hostile_batches(cases)
    reached = {}
    for kind, other, moved in zip(
        kinds, others, mechanism.movements(batches), strict=True
    ):
        assert max(moved) <= 1, (kind, other)
        old = reached.get(kind, np.zeros(len(moved)))
        reached[kind] = np.maximum(old, moved)
    return reached


class TestSensitivity:
    @pytest.mark.parametrize(
        "clips", [(1.0, 0.2), (3e-12, 2e-12), (1e6, 1e3)], ids=str
    )
    @pytest.mark.parametrize("method", METHODS)
    def test_search(self, method, clips, mechanisms):
        reached = search(mechanisms(method, clips), cases=260)
        # The clips are reached: the search can find violations.
        assert reached["inside"][0] > 0.99
        if method.startswith("gep"):
            assert reached["outside"][1] > 0.99
        for kind in ("zero", "nan", "infinite", "largest", "too large"):
            assert not reached[kind].any()
        if method in ("pdp", "pdp, ambient"):
            # Rows are clipped as a whole, with the part that is projected away.
            assert reached["outside"][0] < 1e-3

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("rank", [1, RANK])
    @pytest.mark.parametrize("method", METHODS)
    def test_basis_is_as_bad_as_it_may_be(self, method, rank, sign, mechanisms):
        """`||V^T V - I||_F <= 2^-13`, in one direction or in all."""
        scale = np.ones(RANK)
        scale[:rank] += sign * 2.0**-14 / math.sqrt(rank)
        basis = (BASIS * scale).astype("float32")
        error = np.linalg.norm(np.float64(basis.T) @ basis - np.eye(RANK))
        assert 0.9 * 2.0**-13 < error < 1.01 * 2.0**-13
        search(mechanisms(method, basis=basis), cases=130)

    def test_residual_margin_is_needed(self, mechanisms):
        """The residual of a row inside is rounding alone, and not scaled up."""
        random = np.random.default_rng(0)
        rows = 1e10 * inside(random, BATCH)
        ((_, residual),) = mechanisms("gep").movements([rows])
        # 32 clips of what float32 rounds off.
        assert 0 < residual < 32 * 30 * 2.0**-24

    @pytest.mark.parametrize("method", METHODS)
    def test_empty_examples_leave_no_trace(self, method, mechanisms):
        mechanism = mechanisms(method)
        random = np.random.default_rng(0)
        rows = random.normal(size=(BATCH, SIZE))
        keep = np.ones(BATCH, np.float32)
        keep[VICTIM] = 0
        batches = [rows]
        for value in (0, 1e18, 1e30, np.nan, np.inf):
            batches.append(rows.copy())
            batches[-1][VICTIM] = value
        for first, *others in mechanism(batches, keep):
            for other in others:
                np.testing.assert_array_equal(other, first)


class TestRunningSums:
    """Sums over microbatches, as a step adds them up."""

    @pytest.mark.parametrize("microbatch_size", [2, 64])
    @pytest.mark.parametrize("method", METHODS)
    def test_many_microbatches(self, method, microbatch_size):
        """Large float32 sums would round the contribution of one example."""
        subspace = subspace_of(method)
        clips = (1.0, 0.2)
        optimizer = make_optimizer(
            method,
            subspace,
            clips,
            batch_size=1024,
            microbatch_size=microbatch_size,
        )
        model = make_private(optimizer, SIZES)
        attach(model)
        random = np.random.default_rng(1)
        for kind in ("alike", "almost inside", "inside"):
            if kind == "inside":
                rows = np.tile(100 * inside(random), (1024, 1))
            else:
                rows = np.tile(OTHERS[kind](random)[:1], (1024, 1))
            for make in (inside, outside):
                changed = rows.copy()
                changed[700] = 50 * make(random)[0]
                totals = []
                for x in (
                    changed,
                    np.where(np.arange(1024)[:, None] == 700, 0, changed),
                ):
                    batch = batch_of(model, x)
                    totals.append(
                        parts_of(
                            method,
                            optimizer.released_sums(model.training_step(batch)),
                        )
                    )
                for one, other, clip in zip(*totals, clips):
                    assert np.linalg.norm(one - other) <= clip

    @pytest.mark.parametrize("method", METHODS)
    def test_are_the_same_however_they_are_cut(self, method):
        random = np.random.default_rng(2)
        rows = almost_inside(random) + random.normal(size=(BATCH, SIZE))
        releases = []
        for size in (2, 16):
            optimizer = make_optimizer(
                method, subspace_of(method), microbatch_size=size
            )
            model = attach(make_private(optimizer, SIZES))
            sums = model.training_step(batch_of(model, rows))
            releases.append(
                np.concatenate(parts_of(method, optimizer.released_sums(sums)))
            )
        error = np.linalg.norm(releases[1] - releases[0])
        # Roundings of 16 rows of 32 residual clips. How many numbers are added
        # at once depends on the processor.
        assert error < 16 * 32 * 0.2 * 2.0**-21


def layer_steps(methods, model, dtype, clip):
    """`hostile_steps.Step` for some methods, on a model with that layer.

    They clip the same per-example gradients, which are traced once.
    """
    plain = model(dtype)
    made = []
    for method in methods:
        subspace = FixedSubspace(
            orthonormal(plain.count_params(), RANK), public=True
        )
        made.append(
            make_optimizer(
                method, subspace, (clip, clip), batch_size=hostile_steps.BATCH
            )
        )
        private = tf_dpsub.make_private(plain)
        private.compile(made[-1], loss=product)
        attach_basis(private)
    losses, scale = hostile_steps.losses_of(plain, dtype)

    @tf.function(autograph=False)
    def released_by_all(x, t, keep):
        rows, _ = gradients.per_example_gradients(
            losses,
            {"x": x, "t": t},
            plain.trainable_variables,
            "graph",
            scale,
        )
        return [
            optimizer.released_sums(optimizer.clipped_sums(rows, keep))
            for optimizer in made
        ]

    return hostile_steps.steps_of(plain, released_by_all, len(made))


class TestLayers:
    """The hostile inputs of DP-SGD's tests, where norms are not of rows."""

    @pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
    @pytest.mark.parametrize("model", hostile_steps.MODELS)
    def test_one_example_moves_it_by_the_clip(self, model, dtype):
        clip, methods = hostile_steps.CLIP, ("pdp", "gep")
        steps = layer_steps(methods, model, dtype, clip)
        for method, step in zip(methods, steps):
            largest = self.check_movements(method, step, clip)
            if method == "gep":
                assert largest > 0.98 * clip

    @pytest.mark.parametrize(
        "model", [hostile_steps.dense_by_gram, hostile_steps.conv]
    )
    def test_with_tensor_float_32(self, monkeypatch, model):
        tensor_cores.narrow(monkeypatch)
        self.test_one_example_moves_it_by_the_clip(model, "float32")

    def check_movements(self, method, step, clip):
        """Checks each movement, and returns the largest."""
        hostile = hostile_steps.HOSTILE
        random = np.random.default_rng(0)
        x, t = step.ordinary(random)
        everyone = np.ones(hostile_steps.BATCH)
        others = everyone.copy()
        others[hostile] = 0
        batches = [(x.copy(), t.copy(), others)]
        kinds = [kind for kind in hostile_steps.KINDS for _ in range(2)]
        for kind in kinds:
            x[hostile], t[hostile] = hostile_steps.hostile_example(
                step, kind, random
            )
            batches.append((x.copy(), t.copy(), everyone))
        releases = zip(*step.of_batches(batches))
        without, *with_it = (parts_of(method, r) for r in releases)
        largest = 0
        for kind, parts in zip(kinds, with_it, strict=True):
            for one, other in zip(parts, without):
                assert np.isfinite(one).all(), kind
                moved = np.linalg.norm(one - other)
                assert moved <= clip, kind
                largest = max(largest, moved)
        return largest


_random = np.random.default_rng(0)
X = _random.integers(0, 256, (20, PARAMETERS)).astype("uint8")
Y = np.ones((20, 1), "float32")
PUBLIC = _random.integers(0, 256, (9, PARAMETERS)).astype("uint8")
MIXED = np.concatenate([PUBLIC, X[3:5]])


def words(model):
    return " ".join(model.privacy_statement(1e-5).split())


def model_with(public, **arguments):
    subspace = PublicSubspace(public, Y[: len(public)], rank=2, **arguments)
    return make_private(projected(subspace, inner=keras.optimizers.SGD(1e-3)))


class TestPublicExamplesThatArePrivate:
    """The basis depends on them, and no noise covers that."""

    @pytest.mark.parametrize("private", [np.uint8, np.float32, np.float64])
    @pytest.mark.parametrize("public", [np.uint8, np.float32])
    def test_raise(self, public, private):
        """Copies of another type raise, too."""
        model = model_with(MIXED.astype(public))
        with pytest.raises(ValueError, match="that are not private.*allow_pri"):
            model.fit(X.astype(private), Y, verbose=0)
        assert model.ledger.steps == 0

    def test_raise_in_any_way_of_training(self):
        model = model_with(MIXED)
        x = X.astype("float32")
        with pytest.raises(ValueError, match="that are not private"):
            model.train_on_batch(x[:8], Y[:8])
        batches = data.PoissonBatches(x, Y, batch_size=4)
        with pytest.raises(ValueError, match="that are not private"):
            model.fit(batches, verbose=0)
        with pytest.raises(ValueError, match="that are not private"):
            model.fit(tf.constant(x), tf.constant(Y), verbose=0)
        assert model.ledger.steps == 0

    def test_raise_with_gep(self):
        subspace = PublicSubspace(MIXED, Y[:11], rank=2)
        model = make_private(make_optimizer("gep", subspace, batch_size=4))
        with pytest.raises(ValueError, match="that are not private"):
            model.fit(X.astype("float32"), Y, verbose=0)

    def test_are_stated_if_they_are_allowed(self):
        model = model_with(MIXED, allow_private=True)
        model.fit(X.astype("float32"), Y, verbose=0)
        assert model.ledger.steps == 5
        text = words(model)
        assert "ε does not cover the private examples among the public" in text
        # Steps with others take nothing back.
        clean = projected(PublicSubspace(PUBLIC, Y[:9], rank=2))
        model.compile(clean, loss=product)
        model.fit(X.astype("float32"), Y, verbose=0)
        assert "does not cover the private examples among" in words(model)

    @pytest.mark.parametrize("allow_private", [False, True])
    def test_where_there_are_none_nothing_is_uncovered(self, allow_private):
        model = model_with(PUBLIC, allow_private=allow_private)
        model.fit(X.astype("float32"), Y, verbose=0)
        assert "does not cover" not in words(model)
        assert "9 examples with their labels" in words(model)

    def test_are_not_looked_for_in_a_dataset(self):
        """The statement says what cannot be checked."""
        model = model_with(MIXED)
        dataset = tf.data.Dataset.from_tensor_slices((X.astype("float32"), Y))
        model.fit(dataset.batch(4), verbose=0)
        taken = words(model).split("Taken as public:")[1]
        assert "no public example is private, unchecked" in taken

    def test_are_those_that_span_the_basis(self):
        """Examples written into the array later would escape the comparison."""
        public = PUBLIC.copy()
        subspace = PublicSubspace(public, Y[:9], rank=2)
        public[:2] = X[:2]
        np.testing.assert_array_equal(subspace.public_inputs, PUBLIC)


class TestWaysAround:
    def test_no_other_subspace_after_compiling(self):
        optimizer = projected(FixedSubspace(orthonormal(PARAMETERS, 2)))
        public = FixedSubspace(orthonormal(PARAMETERS, 2), public=True)
        with pytest.raises(AttributeError):
            optimizer.subspace = public

    def test_a_private_basis_stays_private(self):
        subspace = FixedSubspace(orthonormal(PARAMETERS, 2))
        with pytest.raises(AttributeError):
            subspace.is_public = True

    def test_a_basis_is_not_that_of_the_array_later(self):
        basis = orthonormal(PARAMETERS, 2).astype("float32")
        subspace = FixedSubspace(basis, public=True)
        expected = basis.copy()
        basis[:] = 7.0
        model = attach_basis(make_private(projected(subspace)))
        lifted = flat(subspace.lift(tf.constant([1.0, 0.0])))
        assert abs(abs(lifted @ expected[:, 0]) - 1) < 1e-5
        assert model.ledger.steps == 0

    def test_public_data_buy_no_privacy(self):
        """A larger, or a smaller, public set changes no epsilon."""
        epsilons = set()
        for public in (PUBLIC, PUBLIC[:3]):
            model = model_with(public)
            model.fit(X.astype("float32"), Y, verbose=0)
            epsilons.add(model.epsilon(1e-5))
        model = tf_dpsub.make_private(network())
        model.compile(
            tf_dpsub.optimizers.DPSGD(
                keras.optimizers.SGD(1e-3),
                noise_multiplier=1.0,
                l2_norm_clip=1.0,
                batch_size=4,
            ),
            loss=product,
        )
        model.fit(X.astype("float32"), Y, verbose=0)
        assert epsilons == {model.epsilon(1e-5)}
