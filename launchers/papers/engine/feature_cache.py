"""Frozen features of a data set, computed once and kept in files."""

import dataclasses
import functools
import hashlib
import json
import pathlib

import numpy as np

from tf_dpsub import files

# Examples of one file: what a killed program loses at most.
_SHARD = 5000
# All features are many numbers, of which a step reads a few examples at a time.
_KEPT_AS = np.float16
# Examples whose coordinates are computed at a time.
_CHUNK = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Features with labels.

    Attributes:
        x_train: array `[examples, features]`: float32 on public directions,
            float16 of all features.
        y_train: int64 array `[examples]`.
        x_test, y_test: likewise.
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    def held_out(self, count):
        """The training examples alone, of which the last are the test."""
        return Split(
            x_train=self.x_train[:-count],
            y_train=self.y_train[:-count],
            x_test=self.x_train[-count:],
            y_test=self.y_train[-count:],
        )


class FeatureCache:
    """The features of a config, and their main public directions.

    Formal guarantees: features are functions of one example, of frozen weights
    and of public examples. They are private, as the examples are: others than
    the owner of the folder can read none of its files. Nothing is released.

    Args:
        folder: `pathlib.Path`.
        config: `ml_collections.ConfigDict`, with a model on frozen features
            that keeps all of them: without a rank.

    Attributes:
        folder: as given.
    """

    def __init__(self, folder, config):
        self.folder = folder
        self._config = config

    @property
    def key(self):
        """What features depend on, as a dict that JSON can hold."""
        config = self._config
        public = pathlib.Path(config.public_data).read_bytes()
        return {
            "dataset": config.dataset,
            "private_examples": config.private_examples,
            "model": config.model,
            "model_kwargs": config.model_kwargs.to_dict(),
            "features": config.features.to_dict(),
            "public_data": hashlib.sha256(public).hexdigest(),
            "public_examples": config.public_examples,
        }

    def prepare(self):
        """Computes what the folder lacks.

        Raises:
            ValueError: if the folder holds other features.
        """
        files.make_folder(self.folder)
        key, file = json.loads(json.dumps(self.key)), self.folder / "key.json"
        if file.exists() and files.read_json(file) != key:
            raise ValueError(
                f"Expected {self.folder} to hold the features of "
                f"{self._config.dataset} as they are configured now, got "
                "others. Name another workdir."
            )
        files.write_text(file, json.dumps(key, indent=2) + "\n")
        if not (self.folder / "labels.npz").exists():
            self._compute()

    def _compute(self):
        from tf_dpsub.launchers.training import objects

        loaded = objects.dataset(self._config)
        public = objects.public_inputs(self._config, loaded)
        of = _features_of(self._config, loaded)
        projection = _projection(of(public))
        for part, inputs in (
            ("public", public),
            ("train", loaded.x_train),
            ("test", loaded.x_test),
        ):
            self._write(part, inputs, of, _in_chunks(projection))
        files.replace(
            self.folder / "labels.npz",
            lambda p: np.savez(p, train=loaded.y_train, test=loaded.y_test),
        )

    def _write(self, part, inputs, of, coordinates_of):
        """Writes features and coordinates, some examples at a time."""
        for number, start in enumerate(range(0, len(inputs), _SHARD)):
            ending = f"{part}_{number:02d}.npy"
            file = self.folder / f"coordinates_{ending}"
            if file.exists():
                continue
            features = of(inputs[start : start + _SHARD])
            _save(self.folder / ending, features.astype(_KEPT_AS))
            _save(file, coordinates_of(features))
            print(f"{file}: {features.shape}", flush=True)

    def _all(self, part):
        """All that was written of a part, as one array."""
        shards = [
            np.load(file, mmap_mode="r")
            for file in sorted(self.folder.glob(f"{part}_[0-9][0-9].npy"))
        ]
        count = sum(map(len, shards))
        whole = np.empty((count, *shards[0].shape[1:]), shards[0].dtype)
        return np.concatenate(shards, out=whole)

    @property
    def examples(self):
        """Number of training examples."""
        with np.load(self.folder / "labels.npz") as labels:
            return len(labels["train"])

    @property
    def largest_rank(self):
        """Number of public directions, an int."""
        (file, *_) = sorted(self.folder.glob("coordinates_public_*.npy"))
        return np.load(file, mmap_mode="r").shape[1]

    @functools.lru_cache(maxsize=1)
    def split(self, rank, whiten):
        """The features that a head is trained on.

        Args:
            rank: int, number of public directions; None for all features,
                scaled by their public standard deviations.
            whiten: float, exponent of the public variances, with a rank.

        Returns:
            A `Split`.
        """
        if rank is None:
            parts = {part: self._all(part) for part in ("train", "test")}
        else:
            parts = self._whitened(rank, whiten)
        with np.load(self.folder / "labels.npz") as labels:
            return Split(
                x_train=parts["train"],
                y_train=labels["train"],
                x_test=parts["test"],
                y_test=labels["test"],
            )

    def public(self, rank, whiten):
        """The features of public examples, as those of `split`."""
        return self._whitened(rank, whiten, ("public",))["public"]

    def _whitened(self, rank, whiten, parts=("train", "test")):
        from tf_dpsub import layers

        # Principal directions of coordinates are the coordinates.
        public = self._all("coordinates_public")
        of = _in_chunks(
            layers.PublicProjection.from_features(public, rank, whiten=whiten)
        )
        return {part: of(self._all(f"coordinates_{part}")) for part in parts}


def write_npz(path, config):
    """Writes the features of a data set, and its labels, as one .npz file.

    Formal guarantees: as for `FeatureCache`.

    Args:
        path: string or path-like, the file: `dataset` of a config may name it.
        config: `ml_collections.ConfigDict`, with a model on frozen features.
    """
    from tf_dpsub.launchers.training import objects

    loaded = objects.dataset(config)
    of = _features_of(config, loaded)
    arrays = {}
    for part in ("train", "test"):
        inputs = getattr(loaded, f"x_{part}")
        arrays[f"x_{part}"] = np.concatenate(
            [
                of(inputs[start : start + _SHARD])
                for start in range(0, len(inputs), _SHARD)
            ]
        )
        arrays[f"y_{part}"] = getattr(loaded, f"y_{part}")
    files.make_folder(pathlib.Path(path).parent)
    files.replace(path, lambda incomplete: np.savez(incomplete, **arrays))


def _features_of(config, loaded):
    """A function of inputs that returns features `[inputs, features]`."""
    from tf_dpsub import make_private
    from tf_dpsub.launchers.training import objects
    from tf_dpsub.training.kept_features import KEY, KeptFeatures

    plain = objects.plain_model(config, loaded)
    model = make_private(plain)
    kept = KeptFeatures(plain)

    def of(inputs):
        try:
            (features,) = kept.of(model.preprocessed((inputs,))[0])[KEY]
            return np.array(features.reshape(len(features), -1))
        finally:
            kept.close()

    return of


def _save(file, array):
    files.replace(file, lambda incomplete: np.save(incomplete, array))


def _projection(public):
    """The projection on all directions that public features span."""
    from tf_dpsub import layers

    rank = min(len(public) - 1, public.shape[1])
    return layers.PublicProjection.from_features(public, rank, whiten=0.0)


def _in_chunks(layer):
    """A function of arrays that applies a layer to some rows at a time."""

    def of(features):
        return np.concatenate(
            [
                np.asarray(layer(features[start : start + _CHUNK]))
                for start in range(0, len(features), _CHUNK)
            ]
        )

    return of
