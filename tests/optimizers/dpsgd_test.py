"""One step of DP-SGD: what it computes, and how far one example moves it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.hostile_steps import (
    BATCH,
    CLIP,
    DTYPES,
    MODELS,
    build_step,
    build_steps,
    check_sensitivity,
    conv,
    dense,
    dense_by_gram,
    dense_by_rows,
    layer_norm,
    tied_embedding,
)
from tf_dpsub import optimizers
from tf_dpsub.gradients.graph import convolutions, sites, tied

layers = keras.layers


class TestSensitivity:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("model", MODELS)
    def test_graph(self, model, dtype):
        rules = ("flat", "automatic", "unit_norm")
        steps = build_steps(
            model, dtype, [{"clipping": rule} for rule in rules]
        )
        for step in steps:
            self.check_not_vacuous(check_sensitivity(step), dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("model", [dense, dense_by_gram, conv, layer_norm])
    def test_one_example_at_a_time(self, model, dtype):
        step = build_step(model, dtype, "vectorized_map")
        self.check_not_vacuous(check_sensitivity(step), dtype)

    @pytest.mark.parametrize(
        ("model", "implementation"),
        [
            (dense_by_rows, "graph"),
            (layer_norm, "graph"),
            (conv, "graph"),
            (dense, "vectorized_map"),
        ],
    )
    def test_unit_norm_of_squares_that_underflow(self, model, implementation):
        clips = (1e-12, 1.0, 1e20)
        steps = build_steps(
            model,
            "float32",
            [{"l2_norm_clip": c, "clipping": "unit_norm"} for c in clips],
            implementation,
        )
        for clip, step in zip(clips, steps):
            x, t = step.ordinary(np.random.default_rng(0))
            norms = []
            for size in 10.0 ** np.arange(-45, 18):
                with np.errstate(under="ignore"):
                    sums, _ = step(x, np.float32(size) * t, np.eye(BATCH)[0])
                norms.append(np.linalg.norm(sums))
            assert norms[0] == 0
            assert 0.99 * clip < max(norms) <= clip

    @pytest.mark.parametrize("model", [dense_by_gram, conv, tied_embedding])
    def test_compiled(self, model):
        step = build_step(model, "float32", jit_compile=True)
        self.check_not_vacuous(check_sensitivity(step), "float32")

    @pytest.mark.parametrize(
        ("model", "kind"),
        [
            (dense_by_gram, sites.OuterProducts),
            (dense_by_rows, sites.OuterProducts),
            (conv, convolutions.Convolution),
            (tied_embedding, tied.Tied),
        ],
    )
    def test_rows_that_are_too_large_to_keep(self, model, kind, monkeypatch):
        built = []
        monkeypatch.setattr(sites, "KEPT_ROWS", 0)
        monkeypatch.setattr(convolutions, "KEPT_TIMES", 0)
        original = kind.__init__

        def record(self, *args):
            built.append(self)
            original(self, *args)

        monkeypatch.setattr(kind, "__init__", record)
        step = build_step(model, "float32")
        self.check_not_vacuous(check_sensitivity(step), "float32")
        assert built

    @pytest.mark.parametrize("model", [dense_by_rows, conv])
    def test_among_many(self, model, monkeypatch):
        """A sum of hundreds of clips is not rounded by a clip."""
        monkeypatch.setattr(sites, "KEPT_ROWS", 0)
        monkeypatch.setattr(convolutions, "KEPT_TIMES", 0)
        step = build_step(model, "mixed_bfloat16")
        x, t = step.ordinary(np.random.default_rng(0), batch=512)
        x[:], t[:] = x[0], t[0]
        full, _ = step(x, t, np.ones(512))
        # A share of the clip is left for rounding.
        assert np.linalg.norm(full) > 0.985 * 512 * CLIP
        for i in (0, 200, 511):
            others, _ = step(x, t, np.arange(512) != i)
            moved = np.linalg.norm(full - others)
            assert 0.985 * CLIP < moved <= CLIP

    @pytest.mark.parametrize(
        ("model", "implementation"),
        [
            (dense_by_rows, "graph"),
            (layer_norm, "graph"),
            (dense, "vectorized_map"),
        ],
    )
    def test_clip_whose_square_underflows(self, model, implementation):
        clip = 1e-12  # the smallest that is accepted
        step = build_step(model, "float32", implementation, l2_norm_clip=clip)
        x, t = step.ordinary(np.random.default_rng(0))
        for size in 10.0 ** np.arange(-25, -6):
            sums, _ = step(x, np.float32(size) * t, np.eye(BATCH)[0])
            assert np.linalg.norm(sums) <= clip

    def check_not_vacuous(self, reached, dtype):
        """The clip is reached, and what is not finite has been dropped."""
        moved, valid = reached["aligned"]
        assert valid and 0.99 < moved
        for kind in ("nan_gradient", "infinite_gradient"):
            assert reached[kind] == (0.0, False)
        if dtype == "float32":
            moved, valid = reached["ordinary"]
            assert valid and 0.99 < moved


class TestClippedSums:
    """For one Dense layer, rows are known in closed form."""

    random = np.random.default_rng(1)
    x = random.normal(size=(BATCH, 6)).astype("float32")
    t = random.normal(size=(BATCH, 4)).astype("float32")
    rows = np.concatenate(
        [(x[:, :, None] * t[:, None, :]).reshape(BATCH, -1), t], axis=1
    ).astype("float64")
    norms = np.linalg.norm(rows, axis=1)

    @pytest.mark.parametrize("implementation", ["graph", "vectorized_map"])
    def test_equal_the_definition(self, implementation):
        clips = np.median(self.norms) * np.array([0.1, 1.0, 10.0, np.inf])
        steps = build_steps(
            dense,
            "float32",
            [{"l2_norm_clip": float(clip)} for clip in clips],
            implementation,
        )
        keep = np.array([1, 1, 0, 1, 1, 1])
        for clip, step in zip(clips, steps):
            factors = np.minimum(1, clip * (1 - 1.25 * 2.0**-10) / self.norms)
            sums, _ = step(self.x, self.t, keep)
            expected = (keep * factors) @ self.rows
            error = np.linalg.norm(sums - expected)
            assert error < 1e-5 * np.linalg.norm(expected)

    @pytest.mark.parametrize("implementation", ["graph", "vectorized_map"])
    def test_rules_equal_their_definition(self, implementation):
        rules = [
            (clip, clipping, stability, gamma)
            for clip in (1e-3, 1.0, 1e3)
            for clipping, stability, gamma in (
                ("automatic", None, 0.01),
                ("automatic", 3.0, 3.0),
                ("unit_norm", None, 0.0),
            )
        ]
        steps = build_steps(
            dense,
            "float32",
            [
                {"l2_norm_clip": c, "clipping": rule, "stability": stability}
                for c, rule, stability, _ in rules
            ],
            implementation,
        )
        keep = np.array([1, 1, 0, 1, 1, 1])
        for (clip, *_, gamma), step in zip(rules, steps):
            factors = clip * (1 - 1.25 * 2.0**-10) / (self.norms + gamma)
            sums, _ = step(self.x, self.t, keep)
            expected = (keep * factors) @ self.rows
            error = np.linalg.norm(sums - expected)
            assert error < 1e-5 * np.linalg.norm(expected)

    @pytest.mark.parametrize("clipping", ["automatic", "unit_norm"])
    def test_gradient_of_zero_contributes_zero(self, clipping):
        step = build_step(dense, "float32", l2_norm_clip=1.0, clipping=clipping)
        sums, _ = step(self.x, 0 * self.t, np.ones(BATCH))
        np.testing.assert_array_equal(sums, 0)

    def test_examples_below_the_clip_are_not_touched(self):
        clip = 2 * float(self.norms.max())
        step = build_step(dense, "float32", l2_norm_clip=clip)
        for i, one in enumerate(np.eye(BATCH)):
            sums, _ = step(self.x, self.t, one)
            np.testing.assert_allclose(sums, self.rows[i], rtol=1e-6)

    @pytest.mark.parametrize("implementation", ["graph", "vectorized_map"])
    def test_norm_and_sum_see_the_same_dropout(self, implementation):
        """Two passes with different masks would clip the wrong norm."""

        def dropped(dtype):
            return keras.Sequential(
                [
                    keras.Input((6,)),
                    layers.Dropout(0.5, seed=1),
                    layers.Dense(4),
                ]
            )

        step = build_step(dropped, "float32", implementation, l2_norm_clip=0.01)
        found = set()
        for one in np.eye(BATCH):
            sums, _ = step(self.x, self.t, one)
            assert 0.01 * (1 - 2.0**-9) < np.linalg.norm(sums) <= 0.01
            found.add(np.count_nonzero(sums))
        assert len(found) > 1

    def test_all_weights_of_an_example_are_clipped_together(self):
        """Kernel and bias share one clip: not one each."""
        step = build_step(dense, "float32", l2_norm_clip=0.5)
        for one in np.eye(BATCH):
            sums, _ = step(self.x, self.t, one)
            assert 0.5 * (1 - 2.0**-9) < np.linalg.norm(sums) <= 0.5


def test_noise_follows_clip_and_multiplier():
    optimizer = optimizers.DPSGD(
        "sgd", noise_multiplier=3.0, l2_norm_clip=0.5, batch_size=10
    )
    optimizer.build(dense("float32").trainable_variables)
    assert optimizer.noise_stddevs() == [1.5, 1.5]
    assert optimizer.effective_noise_multiplier == 3.0
    assert [tuple(s) for s in optimizer.sum_shapes()] == [(6, 4), (4,)]


def test_divides_by_the_public_batch_size():
    optimizer = optimizers.DPSGD(
        "sgd", noise_multiplier=1.0, l2_norm_clip=1.0, batch_size=10
    )
    (gradient,) = optimizer.privatize([tf.constant([5.0])])
    np.testing.assert_allclose(gradient, [0.5])
