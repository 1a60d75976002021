"""Named data sets, split into private, public and test examples."""

import dataclasses
import difflib
import os

import numpy as np

from tf_dpsub.data import e2e, npz

NAMES = (
    "digits",
    "mnist",
    "fashion_mnist",
    "cifar10",
    "svhn_cropped",
    "glue/sst2",
    "glue/mnli",
    "glue/qnli",
    "glue/qqp",
    "e2e",
)

# Features that make an input: the first of these that a data set has.
_INPUT_FEATURES = (
    ("image",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence",),
    ("text",),
)
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A data set in memory.

    Inputs are float32 images `[examples, height, width, channels]` in [0, 1],
    object arrays of `str`, `[examples]` or, for pairs of texts,
    `[examples, 2]`, or the numbers of a file, as float32. Targets are int64
    labels, `[examples]`, or the texts that answer the inputs.

    Attributes:
        name: str, the name it was loaded by.
        x_train: array, inputs of the private training examples.
        y_train: array, their targets.
        x_public: array, inputs of the public examples; none of them is in
            `x_train`.
        y_public: array, their targets.
        x_test: array, inputs of the test examples.
        y_test: array, their targets.
        num_classes: int, number of classes; None if targets are texts.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_public: np.ndarray
    y_public: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int | None

    @property
    def input_shape(self):
        """Shape of one input: `()` for text."""
        return self.x_train.shape[1:]

    @property
    def is_text(self):
        """True if inputs are texts, or pairs of them."""
        return getattr(self.x_train, "dtype", None) == object


def load(
    name: str,
    data_dir=None,
    *,
    public: int = 0,
    seed: int = 0,
    private: int | None = None,
):
    """Loads a data set by name and splits it by a seeded permutation.

    The training split is shuffled by `seed`; the first `private` examples are
    for private training, the `public` ones after them serve as public data.
    The same seed gives the same private examples however many are public. The
    test split is whole.

    `"digits"`, scikit-learn's 1,797 real 8×8 digits, is embedded there and
    needs no download; 20 % of it, drawn by `seed`, is the test split. A name
    that ends in `.npz` is a file with the arrays `x_train`, `y_train`, `x_test`
    and `y_test`, such as features that a pretrained model has computed; floats
    are taken as they are, integers scaled as those of images. `"e2e"` is the
    [E2E NLG data](https://arxiv.org/abs/1706.09254), whose targets are texts;
    an example is one of them, with the description that it answers. Every other
    name is a TensorFlow Datasets name whose features are an image, a text or
    two, and a class label. Where the labels of its test split are hidden (as in
    GLUE), the validation split is the test split, for `"glue/mnli"` the matched
    one.

    Args:
        name: str, for instance `"digits"`, `"mnist"`, `"fashion_mnist"`,
            `"cifar10"`, `"svhn_cropped"`, `"glue/sst2"`, `"e2e"`, or the path
            of an .npz file.
        data_dir: str or path, folder of prepared TensorFlow Datasets, or, for
            `"e2e"`, the folder with the release's trainset.csv and
            testset_w_refs.csv. A given folder is only read. Defaults to `None`:
            the environment variable `TFDS_DATA_DIR` (for `"e2e"`,
            `E2E_DATA_DIR`), or else the default folder of TensorFlow Datasets,
            into which a missing set is downloaded.
        public: int, number of public examples. Defaults to `0`.
        seed: int, seed of the permutation. Defaults to `0`.
        private: int, number of private examples. Defaults to `None`, all
            that remain.

    Returns:
        A `Dataset`.

    Raises:
        ValueError: if no data set has that name, if the folder does not hold
            it, if it is no classification of images or texts, if a file does
            not hold arrays that fit together, or if the training split has
            fewer than `private + public` examples.

    Example:

    ```python
    data = tf_dpsub.data.load("mnist", private=10_000, public=100)
    ```
    """
    if name == "digits":
        train, test, num_classes = _digits(seed)
    elif name == "e2e":
        (train, test), num_classes = e2e.read(data_dir), None
    elif name.endswith(".npz"):
        train, test, num_classes = _from_npz(name)
    else:
        train, test, num_classes = _from_tfds(name, data_dir)
    examples = len(train[1])
    private, public = _checked_sizes(name, examples, private, public)
    order = np.random.default_rng(seed).permutation(examples)
    private_rows, public_rows = (
        order[:private],
        order[private : private + public],
    )
    x, y = train
    return Dataset(
        name=name,
        x_train=_inputs(x[private_rows]),
        y_train=y[private_rows],
        x_public=_inputs(x[public_rows]),
        y_public=y[public_rows],
        x_test=_inputs(test[0]),
        y_test=test[1],
        num_classes=num_classes,
    )


def _checked_sizes(name, examples, private, public):
    if public < 0:
        raise ValueError(f"Expected public >= 0, got {public}.")
    if private is None:
        private = max(examples - public, 1)
    if private < 1:
        raise ValueError(f"Expected private >= 1, got {private}.")
    if private + public > examples:
        raise ValueError(
            f"Expected private + public <= {examples}, the training examples "
            f"of {name!r}, got {private} + {public}. Public examples are "
            "never private ones too: ask for fewer."
        )
    return private, public


def _digits(seed):
    from sklearn import datasets

    digits = datasets.load_digits()
    x = (digits.images[..., np.newaxis] / 16).astype(np.float32)
    y = digits.target.astype(np.int64)
    order = np.random.default_rng([seed, 1]).permutation(len(y))
    test, train = np.split(order, [len(y) // 5])
    return (x[train], y[train]), (x[test], y[test]), 10


def _from_npz(path):
    x_train, y_train, x_test, y_test = npz.read_arrays(path, _ARRAYS)
    for split, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.dtype.kind not in "iuf" or x.ndim < 2 or not x.size:
            raise ValueError(
                f"Expected numbers of shape [examples, ...] as x_{split} in "
                f"{path}, got {x.dtype} {list(x.shape)}."
            )
        if not np.isfinite(x).all():
            raise ValueError(
                f"Expected finite numbers as x_{split} in {path}, got "
                "infinite ones or NaN."
            )
        if not np.issubdtype(y.dtype, np.integer) or y.shape != x.shape[:1]:
            raise ValueError(
                f"Expected integers of shape [{len(x)}] as y_{split} in "
                f"{path}, one label for each example, got {y.dtype} "
                f"{list(y.shape)}."
            )
        if y.min() < 0:
            raise ValueError(
                f"Expected labels 0, 1, 2, ... as y_{split} in {path}, got "
                f"{y.min()}."
            )
    if x_train.shape[1:] != x_test.shape[1:]:
        raise ValueError(
            f"Expected x_train and x_test of one shape in {path}, got "
            f"{list(x_train.shape[1:])} and {list(x_test.shape[1:])}."
        )
    num_classes = int(max(y_train.max(), y_test.max())) + 1
    train, test = (
        (x, y.astype(np.int64))
        for x, y in ((x_train, y_train), (x_test, y_test))
    )
    return train, test, num_classes


def _from_tfds(name, data_dir):
    builder = _prepared_builder(name, data_dir)
    features = builder.info.features
    inputs = [keys for keys in _INPUT_FEATURES if set(keys) <= set(features)]
    labelled = "label" in features and hasattr(features["label"], "num_classes")
    if not (inputs and labelled):
        raise ValueError(
            "Expected a data set with a class 'label' and one of "
            f"{', '.join(map(' and '.join, _INPUT_FEATURES))}, got {name!r} "
            f"with the features {sorted(features)}. Load it yourself and pass "
            "arrays to fit."
        )
    keys = inputs[0]
    shape = features[keys[0]].shape
    if None in shape:
        raise ValueError(
            f"Expected images of one size, got {name!r} with images of shape "
            f"{shape}. Resize them yourself and pass arrays to fit."
        )
    train = _read(builder, "train", keys)
    return train, _read_test(builder, keys), features["label"].num_classes


def _prepared_builder(name, data_dir):
    import tensorflow_datasets as tfds

    folder = data_dir or os.environ.get("TFDS_DATA_DIR")
    try:
        builder = tfds.builder(name, data_dir=folder)
    except ValueError as error:
        names = set(tfds.list_builders(with_community_datasets=False))
        if name.partition("/")[0] in names:
            raise
        close = difflib.get_close_matches(name, {*NAMES, *names}, n=3)
        hint = f" Close matches: {', '.join(close)}." if close else ""
        raise ValueError(
            f"Expected the name of a data set: {', '.join(NAMES)}, or any "
            "other image or text classification of TensorFlow Datasets, got "
            f"{name!r}.{hint}"
        ) from error
    if not builder.is_prepared():
        if folder is not None:
            raise ValueError(
                f"Expected the data folder {os.fspath(folder)!r} to hold "
                f"{builder.info.full_name!r}, got no such prepared data set "
                f"there. Prepare it with `tfds build {name} --data_dir "
                f"{os.fspath(folder)}`, name another folder, or give no "
                "data_dir and unset TFDS_DATA_DIR to download it."
            )
        builder.download_and_prepare()
    return builder


def _read(builder, split, keys):
    import tensorflow_datasets as tfds

    # Files one after the other, uncached: twice as fast for a single pass.
    config = tfds.ReadConfig(try_autocache=False, interleave_cycle_length=1)
    data = builder.as_dataset(
        split=split, batch_size=-1, shuffle_files=False, read_config=config
    )
    inputs = [data[key].numpy() for key in keys]
    x = inputs[0] if len(keys) == 1 else np.stack(inputs, axis=1)
    return x, data["label"].numpy()


def _read_test(builder, keys):
    for split in ("test", "validation", "test_matched", "validation_matched"):
        if split in builder.info.splits:
            x, y = _read(builder, split, keys)
            # A negative label stands for a hidden one.
            if y.min() >= 0:
                return x, y
    raise ValueError(
        "Expected a test or validation split with labels, got "
        f"{builder.info.full_name!r} with the splits "
        f"{sorted(builder.info.splits)}. Load it yourself and pass arrays to "
        "fit."
    )


def _inputs(x):
    if x.dtype == object:
        decoded = [t.decode() if isinstance(t, bytes) else t for t in x.flat]
        return np.array(decoded, dtype=object).reshape(x.shape)
    if np.issubdtype(x.dtype, np.integer):
        return x.astype(np.float32) / np.float32(np.iinfo(x.dtype).max)
    return x.astype(np.float32, copy=False)
