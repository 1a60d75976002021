import numpy as np
import pytest
import tensorflow_datasets as tfds
from sklearn import datasets as sklearn_datasets

from tests.data.short_splits import read_at_most
from tf_dpsub.data import load


def rows(*arrays):
    """Examples of arrays, as a set of bytes."""
    return {row.tobytes() for array in arrays for row in array}


class TestDigits:
    def test_all_1797_digits_are_split_without_loss(self):
        data = load("digits", public=100)
        assert data.name == "digits"
        assert data.num_classes == 10
        assert data.input_shape == (8, 8, 1)
        lengths = [len(data.y_train), len(data.y_public), len(data.y_test)]
        assert lengths == [1338, 100, 359]
        digits = sklearn_datasets.load_digits()
        parts = (data.x_train, data.x_public, data.x_test)
        assert {(x.dtype, x.shape[1:]) for x in parts} == {
            (np.dtype("float32"), (8, 8, 1))
        }
        loaded = np.concatenate(parts)[..., 0] * 16
        labels = np.concatenate([data.y_train, data.y_public, data.y_test])
        assert sorted(
            (image.tobytes(), int(label))
            for image, label in zip(loaded.astype(int), labels)
        ) == sorted(
            (image.tobytes(), int(label))
            for image, label in zip(digits.images.astype(int), digits.target)
        )

    def test_the_seed_fixes_the_split(self):
        first, same = load("digits", seed=3), load("digits", seed=3)
        np.testing.assert_array_equal(first.x_train, same.x_train)
        np.testing.assert_array_equal(first.y_test, same.y_test)
        other = load("digits", seed=4)
        assert rows(first.x_test) != rows(other.x_test)

    def test_every_part_has_all_classes(self):
        data = load("digits", public=200)
        for labels in (data.y_train, data.y_public, data.y_test):
            assert labels.dtype == np.int64
            assert set(labels) == set(range(10))

    def test_public_and_private_are_disjoint(self):
        data = load("digits", private=500, public=300)
        private, public = rows(data.x_train), rows(data.x_public)
        assert len(data.x_train) == 500
        assert len(data.x_public) == 300
        # All 1,797 digits are distinct images.
        assert len(private | public | rows(data.x_test)) == 500 + 300 + 359

    def test_private_examples_do_not_depend_on_the_number_of_public(self):
        few, many = (load("digits", private=500, public=p) for p in (0, 900))
        np.testing.assert_array_equal(few.x_train, many.x_train)
        np.testing.assert_array_equal(few.x_test, many.x_test)

    @pytest.mark.parametrize(
        "sizes, message",
        [
            ({"public": -1}, "Expected public >= 0, got -1"),
            ({"private": 0}, "Expected private >= 1, got 0"),
            ({"private": 1400, "public": 39}, "<= 1438.*1400 \\+ 39"),
            ({"public": 1438}, "<= 1438.*1 \\+ 1438"),
        ],
    )
    def test_refuses_sizes_that_do_not_fit(self, sizes, message):
        with pytest.raises(ValueError, match=message):
            load("digits", **sizes)


class TestPreparedFolder:
    """Real data sets, from the folder that `TFDS_DATA_DIR` names.

    MNIST and SST-2 are read whole.
    """

    def test_mnist(self):
        data = load("mnist")
        assert data.num_classes == 10
        assert data.x_train.shape == (60_000, 28, 28, 1)
        assert data.x_test.shape == (10_000, 28, 28, 1)
        assert data.x_public.shape == (0, 28, 28, 1)
        assert data.x_train.dtype == np.float32
        assert data.y_train.dtype == np.int64
        assert np.bincount(data.y_train).tolist() == [
            5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949
        ]  # fmt: skip
        assert data.x_train.min() == 0 and data.x_train.max() == 1
        assert data.x_train.mean() == pytest.approx(0.1307, abs=1e-4)
        assert data.x_train.std() == pytest.approx(0.3081, abs=1e-4)
        # Shuffled, and images kept with their labels: class means of the
        # two splits agree, and are far apart between classes.
        assert len(set(data.y_train[:100])) == 10
        means = [
            np.stack([x[y == k].mean(axis=0).ravel() for k in range(10)])
            for x, y in (
                (data.x_train, data.y_train),
                (data.x_test, data.y_test),
            )
        ]
        distance = np.linalg.norm(means[0][:, None] - means[1][None], axis=-1)
        assert distance.argmin(axis=1).tolist() == list(range(10))

    def test_papers_split_of_fashion_mnist(self, monkeypatch):
        read_at_most(monkeypatch, train=10_100, test=10_000)
        data = load("fashion_mnist", private=10_000, public=100, seed=1)
        assert data.x_train.shape == (10_000, 28, 28, 1)
        assert data.x_public.shape == (100, 28, 28, 1)
        assert np.bincount(data.y_test).tolist() == [1000] * 10
        assert not rows(data.x_train) & rows(data.x_public)

    def test_cifar10(self, monkeypatch):
        read_at_most(monkeypatch, train=500, test=100)
        data = load("cifar10", private=500)
        assert data.x_train.shape == (500, 32, 32, 3)
        assert data.input_shape == (32, 32, 3)
        assert 0 <= data.x_train.min() < 0.1 and 0.9 < data.x_train.max() <= 1
        assert data.num_classes == 10

    def test_sst2_tests_on_validation_because_test_labels_are_hidden(self):
        data = load("glue/sst2", public=7)
        assert data.num_classes == 2
        assert data.input_shape == ()
        counts = np.bincount(data.y_train) + np.bincount(data.y_public)
        assert counts.tolist() == [29_780, 37_569]
        assert np.bincount(data.y_test).tolist() == [428, 444]
        assert data.x_train.shape == (67_342,)
        assert all(isinstance(text, str) for text in data.x_test)
        assert sum("movie" in text for text in data.x_train) > 1000

    def test_folder_that_lacks_the_set(self, tmp_path):
        with pytest.raises(
            ValueError, match=f"{tmp_path}.*'mnist/.*tfds build mnist"
        ):
            load("mnist", data_dir=tmp_path)

    def test_environment_names_the_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
        with pytest.raises(ValueError, match=f"{tmp_path}.*'svhn_cropped/"):
            load("svhn_cropped")
        assert not list(tmp_path.iterdir())

    def test_name_without_configuration_says_which_one_is_missing(self):
        with pytest.raises(ValueError, match="'glue/cola/"):
            load("glue")


class TestNames:
    def test_unknown_name_lists_known_names_and_close_matches(self):
        with pytest.raises(
            ValueError,
            match="digits, mnist, .*glue/sst2.*'fashion_mnits'.*"
            "Close matches: fashion_mnist",
        ):
            load("fashion_mnits")

    def test_close_match_of_the_embedded_set(self):
        with pytest.raises(ValueError, match="Close matches: digits"):
            load("digit")

    def test_unknown_configuration(self):
        with pytest.raises(ValueError, match="BuilderConfig sst22 not found"):
            load("glue/sst22")


class SmallSet(tfds.core.GeneratorBasedBuilder):
    """A generated set; a label k makes an image of the constant 51 k."""

    VERSION = tfds.core.Version("1.0.0")
    image_shape = (4, 4, 1)
    label = tfds.features.ClassLabel(num_classes=3)
    splits = {"train": [0, 1, 2, 0, 1], "test": [2, 1]}

    def _info(self):
        image = tfds.features.Image(shape=self.image_shape)
        features = tfds.features.FeaturesDict(
            {"image": image, "label": self.label}
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {k: self._generate_examples(v) for k, v in self.splits.items()}

    def _generate_examples(self, labels):
        for i, label in enumerate(labels):
            shape = [4 if side is None else side for side in self.image_shape]
            image = np.full(shape, 51 * max(label, 0), np.uint8)
            yield i, {"image": image, "label": label}


class ImagesOfAnySize(SmallSet):
    image_shape = (None, None, 1)


class NumberAsLabel(SmallSet):
    label = tfds.features.Scalar(np.float32)


class HiddenTestLabels(SmallSet):
    splits = {"train": [0, 1], "test": [-1, -1], "validation": [2, 0, 1]}


class TrainOnly(SmallSet):
    splits = {"train": [0, 1]}


class PairsOfTexts(SmallSet):
    """A set like MNLI: no split named test, and hidden labels."""

    splits = {
        "train": [0, 1, 2],
        "validation_mismatched": [2, 2, 2],
        "test_matched": [-1, -1],
        "validation_matched": [0, 1],
    }

    def _info(self):
        text = tfds.features.Text()
        features = {"hypothesis": text, "label": self.label, "premise": text}
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )

    def _generate_examples(self, labels):
        for i, k in enumerate(labels):
            yield i, {"premise": f"p{k}", "hypothesis": f"h{k}é", "label": k}


class TestOtherNames:
    @pytest.fixture
    def default_folder(self, tmp_path, monkeypatch):
        monkeypatch.delenv("TFDS_DATA_DIR")
        monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
        return tmp_path

    @pytest.fixture
    def prepared(self, default_folder):
        def prepare(builder_class):
            builder_class(data_dir=default_folder).download_and_prepare()
            return builder_class.name

        return prepare

    def test_a_missing_set_is_prepared_in_the_default_folder(
        self, default_folder
    ):
        data = load("small_set")
        assert (default_folder / "small_set").is_dir()
        assert data.num_classes == 3
        np.testing.assert_array_equal(
            data.x_train,
            np.ones((1, 4, 4, 1), np.float32)
            * np.float32(0.2)
            * data.y_train[:, None, None, None],
        )
        assert sorted(data.y_train) == [0, 0, 1, 1, 2]
        assert sorted(data.y_test) == [1, 2]

    def test_a_prepared_set_is_not_prepared_again(self, prepared, monkeypatch):
        name = prepared(SmallSet)
        monkeypatch.setattr(SmallSet, "_generate_examples", None)
        assert len(load(name).y_train) == 5

    def test_hidden_test_labels(self, prepared):
        assert sorted(load(prepared(HiddenTestLabels)).y_test) == [0, 1, 2]

    def test_pairs_of_texts_and_a_matched_validation_split(self, prepared):
        data = load(prepared(PairsOfTexts), public=1)
        assert data.is_text
        assert data.input_shape == (2,)
        assert data.x_public.shape == (1, 2)
        assert sorted(data.y_test) == [0, 1]
        for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
            assert x.tolist() == [[f"p{k}", f"h{k}é"] for k in y]

    @pytest.mark.parametrize(
        "builder_class, message",
        [
            (ImagesOfAnySize, r"images of one size.*\(None, None, 1\)"),
            (NumberAsLabel, r"class 'label'.*\['image', 'label'\]"),
            (TrainOnly, r"test or validation split.*\['train'\]"),
        ],
    )
    def test_refuses_sets_without_classes(
        self, prepared, builder_class, message
    ):
        name = prepared(builder_class)
        with pytest.raises(ValueError, match=message):
            load(name)


class TestFile:
    ARRAYS = {
        "x_train": np.random.default_rng(0).normal(size=(50, 7)),
        "y_train": np.arange(50) % 4,
        "x_test": np.random.default_rng(1).normal(size=(9, 7)),
        "y_test": np.arange(9) % 3,
    }

    def written(self, folder, **changes):
        file = folder / "features.npz"
        np.savez(file, **self.ARRAYS | changes)
        return str(file)

    def test_is_split_as_named_sets_are(self, tmp_path):
        data = load(self.written(tmp_path), private=30, public=15, seed=2)
        assert data.input_shape == (7,)
        assert data.num_classes == 4
        assert {
            x.dtype for x in (data.x_train, data.x_public, data.x_test)
        } == {np.dtype("float32")}
        assert {
            y.dtype for y in (data.y_train, data.y_public, data.y_test)
        } == {np.dtype("int64")}
        # Rows keep their labels, and no example is in both parts.
        labels = {
            row.tobytes(): label
            for row, label in zip(
                self.ARRAYS["x_train"].astype(np.float32),
                self.ARRAYS["y_train"],
            )
        }
        drawn = [
            *zip(data.x_train, data.y_train),
            *zip(data.x_public, data.y_public),
        ]
        assert all(labels[row.tobytes()] == label for row, label in drawn)
        assert len(rows(data.x_train, data.x_public)) == 45
        np.testing.assert_allclose(
            data.x_test, self.ARRAYS["x_test"], rtol=1e-6
        )
        np.testing.assert_array_equal(data.y_test, self.ARRAYS["y_test"])

    def test_a_class_that_only_the_test_split_has_counts(self, tmp_path):
        file = self.written(tmp_path, y_test=np.full(9, 6))
        assert load(file).num_classes == 7

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"x_test": np.ones((9, 6))}, r"one shape .*\[7\] and \[6\]"),
            ({"y_train": np.arange(49)}, r"shape \[50\] as y_train"),
            ({"y_test": np.ones(9)}, "Expected integers .* y_test"),
            ({"y_train": np.arange(50) - 1}, "labels 0, 1, 2, .* got -1"),
            ({"x_train": np.full((50, 7), np.nan)}, "finite numbers as x_tr"),
            ({"x_train": np.ones(50)}, r"\[examples, ...\] as x_train"),
            ({"x_test": np.array([["a"]] * 9)}, "Expected numbers"),
        ],
    )
    def test_refuses_arrays_that_do_not_fit(self, tmp_path, changes, message):
        with pytest.raises(ValueError, match=message):
            load(self.written(tmp_path, **changes))

    def test_a_file_that_lacks_an_array(self, tmp_path):
        file = tmp_path / "features.npz"
        np.savez(file, x_train=np.ones((3, 2)), y_train=np.zeros(3, int))
        with pytest.raises(ValueError, match="x_test, y_test in .*got x_train"):
            load(str(file))
