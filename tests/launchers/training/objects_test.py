import numpy as np
import pytest

from tests.launchers.training.configs import changed
from tf_dpsub import accounting, data, heads, subspaces
from tf_dpsub.launchers.training import config_checks, objects

PDP = {
    "optimizer": "ProjectedDPSGD",
    "subspace": "PublicSubspace",
    "subspace_kwargs": {"rank": 4},
    "public_examples": 40,
}
GEP = PDP | {
    "optimizer": "GEP",
    "optimizer_kwargs": {"residual_norm_clip": 0.2},
}


def optimizer_and_subspace(config):
    """The optimizer and the subspace of a config, on digits."""
    config_checks.check(config)
    loaded = objects.dataset(config)
    batches = data.PoissonBatches(
        loaded.x_train, loaded.y_train, batch_size=config.batch_size
    )
    subspace = objects.subspace(config, loaded)
    examples = objects.carrier_examples(config, loaded)
    return (
        objects.private_optimizer(config, batches, subspace, examples),
        subspace,
    )


@pytest.fixture
def images(tmp_path):
    file = tmp_path / "images.npz"
    rng = np.random.default_rng(0)
    np.savez(file, images=rng.integers(0, 256, (30, 32, 32, 3), np.uint8))
    return str(file)


class TestRidgeStart:
    @staticmethod
    def _started(**changes):
        config = changed(
            model="feature_classifier", features={"rank": 9}, **changes
        )
        loaded = objects.dataset(config)
        model = objects.plain_model(config, loaded)
        objects.start_head(config, model, loaded)
        return loaded, model

    def test_of_the_public_examples(self):
        loaded, model = self._started(
            public_examples=40, ridge_start_examples=40
        )
        assert len(loaded.x_public) == 40
        expected = objects.plain_model(
            changed(
                model="feature_classifier",
                features={"rank": 9},
                public_examples=40,
            ),
            loaded,
        )
        heads.fit_public_ridge(expected, loaded.x_public, loaded.y_public)
        kernel = model.get_weights()[-1]
        assert np.abs(kernel).max() > 0
        np.testing.assert_allclose(
            kernel, expected.get_weights()[-1], rtol=1e-4, atol=1e-5
        )

    def test_beside_images_of_a_file(self, images):
        loaded, model = self._started(
            public_data=images, ridge_start_examples=60
        )
        assert (len(loaded.y_public), len(loaded.y_train)) == (60, 1378)
        counts = [
            (origin.examples, origin.purpose)
            for origin in data.public_origins.origins_of(model)
        ]
        assert counts == [
            (30, "that features are made of"),
            (60, "that the head was started from"),
        ]

    def test_more_than_the_public_examples(self):
        """Features and subspaces are of these alone."""
        config = changed(public_examples=40, ridge_start_examples=60)
        loaded = objects.dataset(config)
        assert len(loaded.y_public) == 60
        x, y = objects.public_examples(config, loaded)
        assert len(x) == len(y) == 40

    def test_of_no_features(self):
        config = changed(ridge_start_examples=60)
        loaded = objects.dataset(config)
        model = objects.plain_model(config, loaded)
        with pytest.raises(ValueError, match="frozen features"):
            objects.start_head(config, model, loaded)

    def test_none_by_default(self):
        _, model = self._started(public_examples=40)
        np.testing.assert_array_equal(model.get_weights()[-1], 0)


class TestSubspace:
    def test_none_by_default(self):
        optimizer, subspace = optimizer_and_subspace(changed())
        assert subspace is None
        assert type(optimizer).__name__ == "DPSGD"

    def test_public_examples_and_their_labels(self):
        config = changed(**PDP)
        optimizer, subspace = optimizer_and_subspace(config)
        assert optimizer.subspace is subspace
        loaded = objects.dataset(config)
        np.testing.assert_array_equal(subspace.public_inputs, loaded.x_public)
        assert len(loaded.x_public) == 40
        assert any("with their labels" in note for note in subspace.notes)

    def test_random_labels_on_demand(self):
        _, subspace = optimizer_and_subspace(
            changed(**PDP, random_public_labels=True)
        )
        assert any("random labels" in note for note in subspace.notes)

    def test_images_of_a_file_fit_the_model_and_have_random_labels(
        self, images
    ):
        config = changed(**PDP | {"public_examples": 0, "public_data": images})
        _, subspace = optimizer_and_subspace(config)
        assert subspace.public_inputs.shape == (30, 8, 8, 1)
        assert any("random labels" in note for note in subspace.notes)

    @pytest.mark.parametrize("given, drawn", [(0, 2000), (30, 30)])
    def test_images_of_a_random_process(self, given, drawn):
        config = changed(
            **PDP | {"public_examples": given, "public_data": "dead_leaves"}
        )
        loaded = objects.dataset(config)
        images = objects.public_images(config, loaded)
        leaves = data.dead_leaves(drawn, (8, 8), config.seed)
        luma = leaves @ np.float32([0.2989, 0.587, 0.114]) / 255
        np.testing.assert_allclose(images, luma[..., None], atol=1e-3)
        (inputs,) = objects.public_examples(config, loaded)
        np.testing.assert_array_equal(inputs, images)
        assert len(loaded.y_train) == 1438

    def test_some_images_of_a_file_leave_all_examples_private(self, images):
        config = changed(**PDP | {"public_examples": 12, "public_data": images})
        _, subspace = optimizer_and_subspace(config)
        assert len(subspace.public_inputs) == 12
        assert len(objects.dataset(config).y_train) == 1438

    @pytest.mark.parametrize("whiten", [0.5, "auto"])
    def test_whitened_on_demand(self, whiten):
        optimizer, subspace = optimizer_and_subspace(
            changed(**PDP, whiten=whiten)
        )
        assert subspace.get_config()["whiten"] == whiten
        assert "in whitened coordinates" in optimizer.description

    def test_pairs_follow_public_examples(self):
        changes = {"subspace": "KroneckerSubspace"}
        _, subspace = optimizer_and_subspace(changed(**PDP | changes))
        assert isinstance(subspace, subspaces.KroneckerSubspace)
        assert len(subspace.public_inputs) == 40

    def test_random_subspace_needs_no_public_data(self):
        changes = {"subspace": "RandomSubspace", "public_examples": 0}
        _, subspace = optimizer_and_subspace(changed(**PDP | changes))
        assert isinstance(subspace, subspaces.RandomSubspace)
        assert subspace.public_inputs is None

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"public_examples": 0}, "Expected public examples"),
            ({"public_examples": -1}, "public_examples >= 0, got -1"),
            ({"subspace": "PublicSpace"}, "'PublicSpace'. .*'PublicSubspace'"),
            ({"subspace": None}, "Expected a subspace for the optimizer"),
            ({"optimizer": "DPSGD"}, "no subspace for the optimizer DPSGD"),
            ({"subspace_kwargs": {}}, "arguments of PublicSubspace .*'rank'"),
            ({"subspace_kwargs": {"rank": 0}}, "rank >= 1"),
            ({"public_data": "none.npz"}, "none.npz, which does not exist"),
            ({"start_epoch": 0}, "start_epoch >= 1, got 0"),
            ({"whiten": 2.0}, "whiten in .0, 1. or 'auto', got 2.0"),
            (
                {"whiten": 0.5, "subspace": "RandomSubspace"},
                "PublicSubspace to whiten, got subspace='RandomSubspace'",
            ),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_mistakes(self, changes, message):
        with pytest.raises(ValueError, match=message):
            optimizer_and_subspace(changed(**PDP | changes))

    def test_more_images_than_the_file_has(self, images):
        config = changed(**PDP | {"public_examples": 31, "public_data": images})
        with pytest.raises(ValueError, match="public_examples <= 30"):
            optimizer_and_subspace(config)


CARRIERS = {
    "optimizer": "RGP",
    "optimizer_kwargs": {"carriers": "public", "update_every": 2},
    "public_examples": 40,
}


class TestCarriers:
    def test_public_examples_and_their_labels(self):
        config = changed(**CARRIERS)
        optimizer, _ = optimizer_and_subspace(config)
        state = optimizer.public_state
        loaded = objects.dataset(config)
        np.testing.assert_array_equal(state.public_inputs, loaded.x_public)
        assert any("40 examples with their labels" in n for n in state.notes)

    def test_random_labels_on_demand(self):
        optimizer, _ = optimizer_and_subspace(
            changed(**CARRIERS, random_public_labels=True)
        )
        assert any("random labels" in n for n in optimizer.public_state.notes)

    def test_images_of_a_file(self, images):
        config = changed(
            **CARRIERS | {"public_examples": 0, "public_data": images}
        )
        optimizer, _ = optimizer_and_subspace(config)
        assert optimizer.public_state.public_inputs.shape == (30, 8, 8, 1)

    def test_others_need_none(self):
        config = changed(**CARRIERS | {"optimizer_kwargs": {}})
        optimizer, _ = optimizer_and_subspace(config)
        assert optimizer.public_state.public_inputs is None

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"public_examples": 0}, "Expected public examples"),
            ({"optimizer": "DPSGD"}, "Expected arguments of DPSGD"),
        ],
    )
    def test_mistakes(self, changes, message):
        with pytest.raises(ValueError, match=message):
            optimizer_and_subspace(changed(**CARRIERS | changes))


class TestStart:
    def test_epochs_become_steps(self):
        config = changed(**PDP, start_epoch=3, batch_size=256)
        optimizer, _ = optimizer_and_subspace(config)
        # 1,398 private digits: six steps an epoch, of which two go before.
        assert optimizer.get_config()["start_step"] == 12

    def test_the_first_epoch_is_the_first_step(self):
        optimizer, _ = optimizer_and_subspace(changed(**PDP))
        assert optimizer.get_config()["start_step"] == 0

    @pytest.mark.parametrize("changes", [GEP, {}])
    def test_mechanisms_that_have_no_start(self, changes):
        with pytest.raises(ValueError, match="start_epoch=1 for the optimizer"):
            optimizer_and_subspace(changed(**changes, start_epoch=2))


class TestSchedule:
    @pytest.mark.parametrize("epochs, steps", [(2, 24), (1, 12)])
    def test_halfway(self, epochs, steps):
        config = changed(
            learning_rate=0.3, learning_rate_schedule="halfway", epochs=epochs
        )
        optimizer, _ = optimizer_and_subspace(config)
        schedule = optimizer.inner_optimizer._learning_rate
        rates = [float(schedule(step)) for step in range(steps)]
        half = steps // 2
        assert rates == pytest.approx([0.3] * half + [0.03] * half)

    @pytest.mark.parametrize("steps, first", [(1, 1), (3, 2)])
    def test_halfway_of_an_odd_number(self, steps, first):
        schedule = config_checks.choose(
            objects._SCHEDULES, "halfway", "a schedule"
        )(1.0, steps)
        rates = [float(schedule(step)) for step in range(steps)]
        assert rates == pytest.approx([1.0] * first + [0.1] * (steps - first))


class TestCalibration:
    def epsilon(self, optimizer, steps):
        return accounting.epsilon(
            noise_multiplier=optimizer.effective_noise_multiplier,
            sampling_rate=256 / 1398,
            steps=steps,
            delta=1e-5,
        )

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"residual_norm_clip": 0.2},
            {"residual": False},
            {"residual_norm_clip": 0.2, "residual_noise_multiplier": 8.0},
        ],
        ids=["equal noise", "no residual", "noise of its own"],
    )
    def test_both_releases_of_a_step_keep_the_budget(self, kwargs):
        config = changed(
            **GEP | {"optimizer_kwargs": kwargs},
            epsilon=3.0,
            noise_multiplier=None,
            batch_size=256,
            epochs=2,
        )
        optimizer, _ = optimizer_and_subspace(config)
        assert 2.999 < self.epsilon(optimizer, 12) <= 3.0
        residual_noise = kwargs.get("residual_noise_multiplier")
        if residual_noise is not None:
            assert optimizer.residual_noise_multiplier == residual_noise

    @pytest.mark.parametrize("residual_noise", [0.0, 0.5])
    def test_a_residual_that_spends_the_budget_alone(self, residual_noise):
        kwargs = {
            "residual_norm_clip": 0.2,
            "residual_noise_multiplier": residual_noise,
        }
        config = changed(
            **GEP | {"optimizer_kwargs": kwargs},
            epsilon=3.0,
            noise_multiplier=None,
        )
        with pytest.raises(ValueError, match="a part of the budget"):
            optimizer_and_subspace(config)


class TestRecorders:
    def recorders(self, folder, **changes):
        config = changed(**changes)
        loaded = objects.dataset(config)
        return objects.recorders(config, folder, loaded)

    def test_none_by_default(self, tmp_path):
        assert self.recorders(tmp_path) == []

    def test_by_name(self, tmp_path):
        names = ("private_spectrum", "test_projection_error")
        recorders = self.recorders(tmp_path, **PDP, recorders=names)
        assert [type(recorder).__name__ for recorder in recorders] == [
            "PrivateSpectrumRecorder",
            "ProjectionErrorRecorder",
        ]

    @pytest.mark.parametrize(
        "name, message",
        [
            ("private_spektrum", "'private_spektrum'. .*'private_spectrum'"),
            ("test_projection_error", "Expected a subspace for the recorder"),
        ],
    )
    def test_mistakes(self, tmp_path, name, message):
        with pytest.raises(ValueError, match=message):
            self.recorders(tmp_path, recorders=(name,))
