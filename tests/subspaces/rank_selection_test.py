"""Ranks chosen by held-out public examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_dpsub
from tests.subspaces.linear_models import (
    attach,
    make_private,
    matrix_of,
    network_of_rows,
    orthonormal,
    product,
    projected,
    stored,
)
from tf_dpsub.subspaces import PublicSubspace

PARAMETERS, PLANTED, MOST = 24, 5, 12
EXAMPLES = 60

_random = np.random.default_rng(0)


def planted(seed=0, shared=1.0):
    """Rows with a mean in five directions, and a little of all others.

    Along each of the five, a row has an energy of about 1, of which `shared`
    is that of the mean; along each other direction, 1e-4.
    """
    random = np.random.default_rng(seed)
    axes = orthonormal(PARAMETERS, PARAMETERS, 3)
    rows = random.normal(size=(EXAMPLES, PARAMETERS))
    rows[:, :PLANTED] = (1 - shared) ** 0.5 * rows[:, :PLANTED]
    rows[:, :PLANTED] += shared**0.5
    rows[:, PLANTED:] *= 1e-2
    return (rows @ axes.T).astype("float32")


# Half of the energy varies, so that the second moment has five directions.
ROWS = planted(shared=0.5)
ONES = np.ones((EXAMPLES, 1), "float32")
# Private data.
X = np.ones((100, PARAMETERS), "float32")
Y = np.ones((100, 1), "float32")
# Energy of a row along the five directions together, and half of it.
CLIP = 10.0


def public(rows=ROWS, **arguments):
    defaults = {"rank": "auto", "max_rank": MOST, "method": "gram", "seed": 0}
    return PublicSubspace(rows, ONES[: len(rows)], **{**defaults, **arguments})


def with_noise(subspace, noise, clip=CLIP):
    optimizer = projected(
        subspace,
        noise_multiplier=noise * 100 / clip,
        l2_norm_clip=clip,
        batch_size=100,
    )
    assert optimizer.coordinate_stddev == pytest.approx(noise)
    return optimizer


def attached(
    subspace, noise=1.0, clip=CLIP, steps=1, sizes=(PARAMETERS,), **compiled
):
    """A model whose gradients have noise of standard deviation `noise`."""
    optimizer = with_noise(subspace, noise, clip)
    return attach(make_private(optimizer, sizes, **compiled), steps)


def directions(subspace):
    """The directions in use."""
    basis = matrix_of(subspace)
    used = np.any(basis != 0, 0)
    # The leading ones.
    assert not np.any(np.diff(used.astype(int)) > 0)
    return basis[:, used]


def chosen(subspace, *args, **kwargs):
    """Number of directions that the first step uses."""
    model = attached(subspace, *args, **kwargs)
    model.optimizer.prepare()
    return directions(subspace).shape[1]


class GivenRows:
    """A subspace of rows that may change, all refreshed in one graph."""

    def __init__(self, noise=1.0, clip=CLIP):
        self.subspace = public(np.eye(EXAMPLES))
        plain = network_of_rows(EXAMPLES, PARAMETERS)
        self._rows = plain.get_layer("rows")
        self._model = tf_dpsub.make_private(plain)
        self._model.compile(with_noise(self.subspace, noise, clip), product)
        attach(self._model, 1)

    def chosen(self, rows, steps=1):
        """Number of directions that the first step of a run uses."""
        self._rows.set_weights([rows])
        self.subspace.selection._refreshes.assign(0)
        self._model.optimizer.public_state.begin_run(steps)
        self._model.optimizer.prepare()
        return directions(self.subspace).shape[1]


class TestChoice:
    def test_averages_noise_over_the_steps_of_a_run(self):
        given = GivenRows()
        # The mean has an energy of 0.5 along each of the five.
        for steps in (400, 1000, 2500):
            assert given.chosen(ROWS, steps) == PLANTED
            self.check_is_of_the_best(given.subspace)
        assert given.chosen(ROWS, 1) == 1
        assert given.chosen(ROWS, 10**9) == MOST
        # Directions of falling energies: noise costs the same in each.
        energies = 0.5 ** np.arange(PARAMETERS)
        rows = _random.normal(size=(EXAMPLES, PARAMETERS)) + 1
        rows = (rows * energies**0.5).astype("float32")
        found = [given.chosen(rows, n) for n in (100, 1100, 10**4, 10**14)]
        assert found == sorted(found)
        assert len(set(found)) == 4 and found[-1] == MOST
        # A horizon that is given takes the place of the steps.
        assert chosen(public(horizon=1000), 1.0, steps=1) == PLANTED

    def check_is_of_the_best(self, subspace):
        basis = directions(subspace)
        axes = orthonormal(PARAMETERS, PARAMETERS, 3)[:, :PLANTED]
        outside = axes - basis @ (basis.T @ axes)
        # The accuracy that 48 rows allow, with 1 % of each other direction.
        assert np.linalg.norm(outside, 2) < 0.05

    def test_follows_the_noise(self):
        assert chosen(public(), 100.0) == 1
        assert chosen(public(), 1e-5) == MOST

    def test_sees_gradients_as_clipped(self):
        """Beyond the clip, larger gradients are not worth more noise."""
        given = GivenRows(0.02, clip=1.0)
        for scale in (1, 1e3, 1e6):
            assert given.chosen(np.float32(scale) * ROWS) == PLANTED

    def test_asks_what_a_residual_releases_anyway(self):
        found = []
        for residual in ({"residual": False}, {"residual_norm_clip": 100.0}):
            subspace = public()
            optimizer = tf_dpsub.optimizers.GEP(
                "sgd",
                subspace=subspace,
                noise_multiplier=0.02 * 100 / CLIP,
                l2_norm_clip=CLIP,
                batch_size=100,
                **residual,
            )
            attach(make_private(optimizer, (PARAMETERS,)), steps=1)
            optimizer.prepare()
            found.append(directions(subspace).shape[1])
        # A residual that is not clipped loses nothing.
        assert found == [PLANTED, 1]

    def test_is_made_for_each_group(self):
        """One of the groups has a mean, the other next to nothing."""
        rows = np.concatenate([ROWS, 1e-3 * planted(1)], 1)
        subspace = public(rows, groups="layers", max_rank=2 * MOST)
        model = attached(subspace, 0.02, sizes=(PARAMETERS, PARAMETERS))
        model.optimizer.prepare()
        assert subspace.ranks == [MOST, MOST]
        basis = matrix_of(subspace)
        first, second = np.split(np.any(basis != 0, 0), 2)
        assert (first.sum(), second.sum()) == (PLANTED, 1)

    @pytest.mark.parametrize("max_rank", [1, 3])
    def test_never_exceeds_its_bound(self, max_rank):
        subspace = public(max_rank=max_rank)
        assert chosen(subspace, 1e-6) == max_rank == subspace.rank

    def test_never_exceeds_what_the_examples_span(self):
        subspace = public(ROWS[:10], held_out=4)
        with pytest.warns(UserWarning, match="got 12: 6 is taken"):
            assert chosen(subspace, 1e-6) == 6

    def test_compiles(self):
        """It sees a basis, whatever the method that made it."""
        subspace = public(method="power")
        assert chosen(subspace, 1e-6, jit_compile=True) == MOST


class TestHeldOut:
    """Examples of different directions tell nothing of each other."""

    examples = np.float32(3) * np.eye(PARAMETERS, dtype="float32")[:10]

    def test_examples_of_the_basis_are_not_asked(self):
        """The examples of the basis would make it look worth any noise."""
        for held_out in (None, 5):
            size = held_out or 2  # a fifth
            subspace = public(
                self.examples, held_out=held_out, max_rank=10 - size
            )
            assert chosen(subspace, 1e-6) == 1

    def test_others_are_held_out_at_each_refresh(self):
        subspace = public(self.examples, held_out=4, max_rank=6)
        attached(subspace, 1e-6)
        seen = []
        for step in range(8):
            subspace.prepare(tf.constant(step))
            whole = np.concatenate(
                [np.concatenate(b, 0) for b in subspace._blocks]
            )
            inside = np.sum(np.square(whole), 1)[:10]
            # The basis spans the axes of the six other examples.
            np.testing.assert_allclose(
                np.sort(inside), [0] * 4 + [1] * 6, 0, 1e-4
            )
            seen.append(tuple(np.flatnonzero(inside < 0.5)))
        assert len(set(seen)) > 1

    def test_without_a_choice_all_examples_span(self):
        subspace = PublicSubspace(
            self.examples, ONES[:10], rank=10, method="gram"
        )
        model = attached(subspace)
        model.optimizer.prepare()
        inside = np.sum(np.square(matrix_of(subspace)), 1)[:10]
        np.testing.assert_allclose(inside, 1, atol=1e-4)


class TestDirectionsThatAreOff:
    def test_hold_nothing_of_a_gradient(self):
        """GEP does not clip as residual what lies inside the subspace."""
        subspace = public()
        model = attached(subspace, 0.02)
        model.optimizer.prepare()
        basis = matrix_of(subspace)
        vector = _random.normal(size=(PARAMETERS, 1)).astype("float32")
        coordinates = subspace.coordinates([tf.constant(vector)]).numpy()
        assert not coordinates[PLANTED:].any()
        assert coordinates[:PLANTED].all()
        np.testing.assert_allclose(
            coordinates, basis.T @ vector[:, 0], atol=1e-5
        )
        rows = _random.normal(size=(7, PARAMETERS)).astype("float32")
        embeddings = subspace.project(stored(model, rows)).numpy()
        assert embeddings[:, :PLANTED].all()
        np.testing.assert_allclose(embeddings, rows @ basis, atol=1e-5)

    def test_do_not_move_the_weights(self):
        """Noise in them would be paid for nothing."""
        subspace = public(update_every=10)
        model = attached(subspace, 0.02)
        model.fit(X, Y, verbose=0)
        basis = directions(subspace)
        (weights,) = model.get_weights()
        assert np.linalg.norm(weights) > 0
        outside = weights - basis @ (basis.T @ weights)
        assert np.linalg.norm(outside) < 1e-5 * np.linalg.norm(weights)


class TestRuns:
    def test_says_what_it_chose_and_why(self, caplog):
        caplog.set_level("INFO", logger="absl")
        subspace = public()
        attached(subspace, 0.02)
        for step in range(3):
            subspace.prepare(tf.constant(step))
        lines = [r.getMessage() for r in caplog.records]
        lines = [line for line in lines if "rank" in line]
        # Logged once: it did not change.
        assert len(lines) == 1
        for part in ("Step 0", "rank 5 of at most 12", "energy", "noise"):
            assert part in lines[0]

    def test_needs_a_horizon_where_steps_are_not_known(self):
        model = attached(public(), 0.02)
        with pytest.raises(ValueError, match="Expected a horizon.*Pass"):
            model.train_on_batch(X, Y)
        model = attached(public(horizon=100), 0.02)
        model.train_on_batch(X, Y)
        assert model.ledger.steps == 1

    def test_follows_another_optimizer(self):
        subspace = public()
        model = attached(subspace, 0.02)
        model.optimizer.prepare()
        assert directions(subspace).shape[1] == PLANTED
        quiet = projected(
            subspace, noise_multiplier=1e-4, l2_norm_clip=CLIP, batch_size=100
        )
        model.compile(quiet, loss=lambda y, p: keras.ops.sum(y * p, -1))
        attach(model, steps=1)
        model.optimizer.prepare()
        assert directions(subspace).shape[1] == MOST

    def test_touches_nothing_private(self):
        subspace = public()
        model = attached(subspace, 0.02)
        optimizer = model.optimizer
        optimizer.learning_rate = 0.0
        found = []
        for x in (X, np.full_like(X, np.nan)):
            optimizer.inner_optimizer.iterations.assign(0)
            subspace.selection._refreshes.assign(0)
            model.fit(x, Y, steps_per_epoch=2, verbose=0)
            found.append(matrix_of(subspace))
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"held_out": 1}, "2 <= held_out < 60.*got 1"),
        ({"held_out": 60}, "2 <= held_out < 60.*got 60"),
        ({"held_out": 2.5}, "2 <= held_out < 60"),
        ({"horizon": 0}, "horizon >= 1 .int. or None, got 0"),
        ({"rank": 3, "max_rank": None, "held_out": 5}, "rank='auto' alone"),
        ({"rank": 3, "max_rank": None, "horizon": 5}, "rank='auto' alone"),
        ({"rows": ROWS[:2]}, "3 public examples at least.*got 2"),
    ],
)
def test_invalid(arguments, message):
    with pytest.raises(ValueError, match=f"Expected.*{message}"):
        public(**arguments)
