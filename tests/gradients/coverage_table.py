"""Table of the engine for each layer and each loss of Keras.

`python -m tests.gradients.coverage_table` makes `docs/engine_coverage.md` anew.
"""

import inspect
import pathlib
import re
from collections.abc import Callable

import keras
import tensorflow as tf
from keras import layers, losses
from keras.src.trainers.compile_utils import CompileLoss

from tf_dpsub import gradients
from tf_dpsub.gradients import selection
from tf_dpsub.gradients.tracing import trace
from tf_dpsub.training import private_step, step_states
from tf_dpsub.training.per_example_loss import PerExampleLoss

PAGE = pathlib.Path(__file__).parents[2] / "docs/engine_coverage.md"

GRAPH, ONE, REFUSED = "graph", "one at a time", "refused"

BATCH = 3
CLASSES = 2
VECTORS = (4,)
SERIES = (5, 4)
IMAGES = (6, 6, 3)
VOLUMES = (4, 4, 4, 2)
SPACES = {"1D": SERIES, "2D": IMAGES, "3D": VOLUMES}

# Layers that cannot be tried here, or not always with one result, and why.
NOT_TRIED = {
    "AugMix": "chooses its layers at random when a step is traced: one at "
    "a time, or refused if `Equalization` is among them",
    "FlaxLayer": "runs under JAX alone",
    "InputLayer": "computes nothing",
    "JaxLayer": "wraps a function of JAX",
    "MaxNumBoundingBoxes": "preprocesses bounding boxes before the model",
    "TFSMLayer": "depends on the operations of the SavedModel",
    "TorchModuleWrapper": "runs under PyTorch alone",
    "Wrapper": "the base class of wrapper layers",
}

# Replace the reasons that the engine gives.
REASONS = {
    "ActivityRegularization": "adds one loss for the whole batch",
    "BatchNormalization": "keeps averages over the batch; it is "
    "proved with `trainable=False`, and so is `LayerNormalization`",
    "CTC": "loops over the steps of a sequence",
    "Circle": "compares the examples of a batch with each other; give "
    "`keras.losses.circle` public references",
    "ContrastLimitedAdaptiveHistogramEqualization": "indexes each image "
    "by its position in the batch",
    "CutMix": "mixes the images of a batch",
    "Equalization": "Keras computes one histogram for the whole batch",
    "MelSpectrogram": "Keras measures decibels relative to the maximum of "
    "the whole batch",
    "MixUp": "mixes the images of a batch",
    "RandAugment": "contains `Equalization`, which uses the whole batch",
    "RandomElasticTransform": "splits the batch into single images",
    "SpectralNormalization": "rewrites its kernel in every forward pass",
}


def behind_weights(layer: Callable, *shapes):
    """A layer whose inputs are computed by weights, before a trained head."""
    inputs = [keras.Input(shape) for shape in shapes]
    hidden = [layers.Dense(shape[-1])(x) for x, shape in zip(inputs, shapes)]
    return keras.Model(inputs, _head(layer(*hidden)))


def of_data(layer: Callable, *shapes, dtype=None):
    """A layer on the data themselves, before a trained head."""
    inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
    return keras.Model(inputs, _head(layer(*inputs)))


def _head(x):
    x = layers.Flatten()(_float(x))
    return layers.Dense(CLASSES)(layers.Activation("tanh")(x))


def _float(x):
    return x if "float" in x.dtype else layers.Lambda(_as_float)(x)


def _as_float(x):
    return keras.ops.cast(x, "float32")


class OfImages(keras.Model):
    """An augmentation that is called while a model trains.

    In a functional model Keras leaves out one that returns its input at first.
    """

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.head = keras.Sequential(
            [layers.GlobalAveragePooling2D(), layers.Dense(CLASSES)]
        )
        self.layer.build((BATCH, *IMAGES))
        self.head.build((BATCH, None, None, IMAGES[-1]))
        self.built = True

    def call(self, x, training=False):
        (image,) = x
        return self.head(self.layer(image, training=training))


def _reversible_embedding():
    tokens = keras.Input((4,), dtype="int32")
    layer = layers.ReversibleEmbedding(9, 3)
    hidden = layers.Activation("tanh")(layer(tokens))
    return keras.Model([tokens], _head(layer(hidden, reverse=True)))


def _self_attention(layer):
    return behind_weights(lambda x: layer(x, x), SERIES)


def _listed(layer):
    return lambda *inputs: layer(list(inputs))


def _merged(layer, shape=VECTORS):
    return behind_weights(_listed(layer), shape, shape)


def _embedded(layer):
    return lambda x: layers.Embedding(9, 3)(layer(x))


def _recurrent(layer):
    return behind_weights(layer, SERIES)


def _of_cell(cell):
    return _recurrent(layers.RNN(cell))


# Functions that make a model, whose inputs are a list, by the layer's call.
LAYERS = {
    "Activation": lambda: behind_weights(layers.Activation("gelu"), VECTORS),
    "ActivityRegularization": lambda: behind_weights(
        layers.ActivityRegularization(l2=0.1), VECTORS
    ),
    "AdditiveAttention": lambda: _merged(layers.AdditiveAttention(), SERIES),
    "Attention": lambda: _merged(layers.Attention(), SERIES),
    "BatchNormalization(trainable=False)": lambda: behind_weights(
        layers.BatchNormalization(trainable=False), IMAGES
    ),
    "Bidirectional": lambda: _recurrent(layers.Bidirectional(layers.LSTM(2))),
    "CategoryEncoding": lambda: of_data(
        layers.CategoryEncoding(9), VECTORS, dtype="int32"
    ),
    'CategoryEncoding(output_mode="one_hot")': lambda: of_data(
        layers.CategoryEncoding(9, "one_hot"), (1,), dtype="int32"
    ),
    "Conv1D(groups=2)": lambda: behind_weights(
        layers.Conv1D(4, 3, groups=2), SERIES
    ),
    'Conv1D(groups=2, padding="causal", dilation_rate=2)': lambda: (
        behind_weights(
            layers.Conv1D(4, 2, groups=2, padding="causal", dilation_rate=2),
            SERIES,
        )
    ),
    "Conv2D(groups=3)": lambda: behind_weights(
        layers.Conv2D(6, 3, groups=3), IMAGES
    ),
    "Conv3D(groups=2)": lambda: behind_weights(
        layers.Conv3D(4, 2, groups=2), VOLUMES
    ),
    "ConvLSTM1D": lambda: behind_weights(layers.ConvLSTM1D(2, 2), (3, 4, 2)),
    "ConvLSTM2D": lambda: behind_weights(layers.ConvLSTM2D(2, 2), (3, 4, 4, 2)),
    "ConvLSTM3D": lambda: behind_weights(
        layers.ConvLSTM3D(2, 2), (3, 3, 3, 3, 2)
    ),
    "Dense": lambda: behind_weights(layers.Dense(3), SERIES),
    "Discretization": lambda: of_data(
        layers.Discretization([0.2, 0.5]), VECTORS
    ),
    "Dot": lambda: _merged(layers.Dot((2, 2), normalize=True), SERIES),
    "EinsumDense": lambda: behind_weights(
        layers.EinsumDense("abc,cd->abd", (5, 3), bias_axes="d"), SERIES
    ),
    "Embedding": lambda: of_data(
        layers.Embedding(9, 3), VECTORS, dtype="int32"
    ),
    "GRUCell": lambda: _of_cell(layers.GRUCell(2)),
    "GroupNormalization": lambda: behind_weights(
        layers.GroupNormalization(2), SERIES
    ),
    "GroupQueryAttention": lambda: _self_attention(
        layers.GroupQueryAttention(3, 4, 2)
    ),
    "HashedCrossing": lambda: of_data(
        _listed(layers.HashedCrossing(5)), (1,), (1,), dtype="int32"
    ),
    "Hashing": lambda: of_data(layers.Hashing(5), VECTORS, dtype="string"),
    "IntegerLookup": lambda: of_data(
        layers.IntegerLookup(vocabulary=[1, 2]), VECTORS, dtype="int64"
    ),
    "LSTM(unroll=True)": lambda: _recurrent(layers.LSTM(2, unroll=True)),
    "LSTMCell": lambda: _of_cell(layers.LSTMCell(2)),
    "Lambda": lambda: behind_weights(layers.Lambda(keras.ops.sin), VECTORS),
    "Masking": lambda: behind_weights(
        lambda x: layers.GlobalAveragePooling1D()(layers.Masking()(x)), SERIES
    ),
    "MelSpectrogram": lambda: of_data(
        layers.MelSpectrogram(fft_length=16, sequence_stride=8, num_mel_bins=4),
        (64,),
    ),
    "MultiHeadAttention": lambda: _self_attention(
        layers.MultiHeadAttention(2, 3)
    ),
    "Normalization": lambda: of_data(
        layers.Normalization(mean=[1.0] * 4, variance=[2.0] * 4), VECTORS
    ),
    "Permute": lambda: behind_weights(layers.Permute((2, 1)), SERIES),
    "Pipeline": lambda: of_data(
        layers.Pipeline([layers.RandomFlip(), layers.Rescaling(0.5)]), IMAGES
    ),
    "RNN": lambda: _of_cell(layers.SimpleRNNCell(2)),
    "RepeatVector": lambda: behind_weights(layers.RepeatVector(3), VECTORS),
    "Rescaling": lambda: of_data(layers.Rescaling(0.5), IMAGES),
    "Reshape": lambda: behind_weights(layers.Reshape((4, 5)), SERIES),
    "ReversibleEmbedding": _reversible_embedding,
    "STFTSpectrogram": lambda: of_data(
        layers.STFTSpectrogram(frame_length=16, frame_step=8, fft_length=16),
        (64, 1),
    ),
    "SimpleRNNCell": lambda: _of_cell(layers.SimpleRNNCell(2)),
    "SpectralNormalization": lambda: behind_weights(
        layers.SpectralNormalization(layers.Dense(3)), VECTORS
    ),
    "StackedRNNCells": lambda: _of_cell(
        layers.StackedRNNCells([layers.GRUCell(2), layers.LSTMCell(2)])
    ),
    "StringLookup": lambda: of_data(
        layers.StringLookup(vocabulary=["a", "b"]), VECTORS, dtype="string"
    ),
    "TextVectorization": lambda: of_data(
        _embedded(
            layers.TextVectorization(
                vocabulary=["a", "b"], output_sequence_length=4
            )
        ),
        (1,),
        dtype="string",
    ),
    "TimeDistributed": lambda: behind_weights(
        layers.TimeDistributed(layers.Dense(3)), SERIES
    ),
}
# Layers that one argument or none makes, by the place that they take.
for name, *arguments in (
    ("AlphaDropout", 0.5),
    ("BatchNormalization",),
    ("Dropout", 0.5),
    ("ELU",),
    ("Flatten",),
    ("GaussianDropout", 0.5),
    ("GaussianNoise", 0.5),
    ("GRU", 2),
    ("Identity",),
    ("LSTM", 2),
    ("LayerNormalization",),
    ("LeakyReLU",),
    ("PReLU", "uniform"),
    ("RMSNormalization",),
    ("ReLU",),
    ("SimpleRNN", 2),
    ("Softmax",),
    ("UnitNormalization",),
):
    LAYERS[name] = lambda name=name, arguments=arguments: behind_weights(
        getattr(layers, name)(*arguments), SERIES
    )
for name in "Add Average Concatenate Maximum Minimum Multiply Subtract".split():
    LAYERS[name] = lambda name=name: _merged(getattr(layers, name)())
for suffix, shape in SPACES.items():
    for name, *arguments in (
        ("AdaptiveAveragePooling", 2),
        ("AdaptiveMaxPooling", 3),
        ("AveragePooling", 2),
        ("Conv", 3, 2),
        ("Cropping",),
        ("GlobalAveragePooling",),
        ("GlobalMaxPooling",),
        ("MaxPooling", 2),
        ("SpatialDropout", 0.5),
        ("UpSampling",),
        ("ZeroPadding",),
    ):
        LAYERS[name + suffix] = (
            lambda name=name + suffix, arguments=arguments, shape=shape: (
                behind_weights(getattr(layers, name)(*arguments), shape)
            )
        )
    LAYERS[f"Conv{suffix}Transpose"] = (
        lambda name=f"Conv{suffix}Transpose", shape=shape: behind_weights(
            getattr(layers, name)(3, 2, strides=2), shape
        )
    )
for suffix in "1D", "2D":
    LAYERS[f"DepthwiseConv{suffix}"] = lambda suffix=suffix: behind_weights(
        getattr(layers, f"DepthwiseConv{suffix}")(2), SPACES[suffix]
    )
    LAYERS[f"SeparableConv{suffix}"] = lambda suffix=suffix: behind_weights(
        getattr(layers, f"SeparableConv{suffix}")(3, 2), SPACES[suffix]
    )
for name, *arguments in (
    ("AutoContrast",),
    ("CenterCrop", 4, 4),
    ("ContrastLimitedAdaptiveHistogramEqualization", (0, 255), 4.0, (2, 2)),
    ("CutMix",),
    ("Equalization",),
    ("MixUp",),
    ("RandAugment",),
    ("RandomBrightness", 0.3),
    ("RandomColorDegeneration", 0.3),
    ("RandomColorJitter", (0, 255), 0.3, 0.3, 0.3, 0.3),
    ("RandomContrast", 0.3),
    ("RandomCrop", 4, 4),
    ("RandomElasticTransform", 0.3),
    ("RandomErasing",),
    ("RandomFlip",),
    ("RandomGaussianBlur",),
    ("RandomGrayscale",),
    ("RandomHue", 0.3),
    ("RandomInvert",),
    ("RandomPerspective",),
    ("RandomPosterization", 3),
    ("RandomRotation", 0.3),
    ("RandomSaturation", 0.3),
    ("RandomSharpness", 0.3),
    ("RandomShear", 0.3, 0.3),
    ("RandomTranslation", 0.3, 0.3),
    ("RandomZoom", 0.3),
    ("Resizing", 4, 4),
    ("Solarization", 0.3),
):
    LAYERS[name] = lambda name=name, arguments=arguments: OfImages(
        getattr(layers, name)(*arguments)
    )


def _spec(*shape, dtype="float32"):
    return tf.TensorSpec([BATCH, *shape], dtype)


# Arguments, targets and the outputs' shape, by the call of the loss.
LOSSES = {
    "BinaryCrossentropy": ({"from_logits": True}, _spec(CLASSES), [CLASSES]),
    "BinaryFocalCrossentropy": (
        {"apply_class_balancing": True},
        _spec(CLASSES),
        [CLASSES],
    ),
    "CTC": ({}, _spec(2, dtype="int32"), [5, 4]),
    "CategoricalGeneralizedCrossEntropy": (
        {},
        _spec(dtype="int32"),
        [CLASSES],
    ),
    "Circle": ({}, _spec(dtype="int32"), [4]),
    "Dice": ({"axis": (1, 2)}, _spec(5, 3), [5, 3]),
    "SparseCategoricalCrossentropy": (
        {"from_logits": True, "ignore_class": 0},
        _spec(dtype="int32"),
        [CLASSES],
    ),
    "Tversky": ({"axis": (1, 2)}, _spec(5, 3), [5, 3]),
}


def of_loss(name):
    """The loss of each example, its inputs and a model."""
    arguments, targets, shape = LOSSES.get(
        name, ({}, _spec(CLASSES), [CLASSES])
    )
    # CTC reads sequences; the others, what a dense layer gives.
    inputs = keras.Input([*shape[:-1], 4])
    activation = None if "from_logits" in arguments else "sigmoid"
    outputs = layers.Dense(shape[-1], activation)(inputs)
    model = keras.Model(inputs, outputs)
    per_example = PerExampleLoss(
        CompileLoss(getattr(losses, name)(**arguments))
    )

    def loss_fn(batch):
        x, y = batch
        return per_example(y, model(x, training=True))[0], None

    return loss_fn, [_spec(*inputs.shape[1:]), targets], model


def of_layer(name):
    """A loss of one number per example, inputs and a model of a layer."""
    model = LAYERS[name]()
    if isinstance(model, OfImages):
        specs = [_spec(*IMAGES)]
    else:
        specs = [_spec(*i.shape[1:], dtype=i.dtype) for i in model.inputs]

    def loss_fn(batch):
        outputs = model(batch, training=True)
        size = tf.nest.flatten(batch)[0].shape[0]
        outputs = tf.ensure_shape(outputs, [size, CLASSES])
        added = private_step._added_losses(model, [size])
        squares = tf.reduce_sum(tf.square(outputs), 1)
        return tf.add_n([squares, *added]), None

    return loss_fn, specs, model


def engine(loss_fn: Callable, inputs, model):
    """Engine that computes per-example gradients, with the reason.

    Returns:
        A pair of strings: the engine, and why it is not the graph.
    """
    states = step_states.StepStates(model)

    def traced(implementation):
        def rows(batch):
            return gradients.per_example_gradients(
                loss_fn,
                batch,
                model.trainable_variables,
                implementation,
                may_read=gradients.Sources(
                    [*model.variables, *states.variables], states.seeds
                ),
            )[0].sq_norms()

        trace(rows, inputs)

    try:
        forward = selection.forward_pass(
            loss_fn,
            inputs,
            [*model.non_trainable_variables, *states.variables],
        )
        states.keep(forward.changed)
        traced("graph")
        return GRAPH, ""
    except gradients.MixesExamples as e:
        return REFUSED, _short(e)
    except gradients.Unproven as e:
        reason = e
    except (gradients.UpdatesState, ValueError) as e:
        return REFUSED, _short(e)
    try:
        traced("map_fn")
        return ONE, _short(reason)
    except (gradients.Unproven, gradients.UpdatesState, ValueError) as e:
        return REFUSED, _short(e)


def _short(error):
    """The first sentence of an error, without names of operations."""
    text = re.sub(r" '[^']*'", "", str(error)).removeprefix("the loss: ")
    text = re.sub(r"^the gradient at \w+: ", "", text)
    return text.split(". ")[0].rstrip(".")


def sections():
    """Names of all layers and losses of Keras, by section."""
    names_by_title = {}
    for name, kind in inspect.getmembers(layers, inspect.isclass):
        if issubclass(kind, layers.Layer) and name == kind.__name__:
            package = kind.__module__.split(".")
            title = package[-2] if "image" in package[-2] else package[3]
            names_by_title.setdefault(title, []).append(name)
    names_by_title.pop("layer", None)
    return {
        **{
            f"Layers: {title.replace('_', ' ')}": names
            for title, names in sorted(names_by_title.items())
        },
        "Losses": [
            name
            for name, kind in inspect.getmembers(losses, inspect.isclass)
            if name == kind.__name__ and kind is not losses.Loss
        ],
    }


def rows(section, names):
    """Rows of a table: the call, its engine and the reason."""
    for name in names:
        if name in NOT_TRIED:
            yield name, "-", NOT_TRIED[name]
            continue
        calls = [name]
        if section != "Losses":
            calls += [c for c in LAYERS if c.startswith(f"{name}(")]
        for call in sorted(calls):
            keras.utils.set_random_seed(0)
            problem = of_loss if section == "Losses" else of_layer
            taken, reason = engine(*problem(call))
            yield call, taken, REASONS.get(call, reason)


def published():
    """Rows of the published page, `(call, engine, reason)`, by call."""
    cells = re.findall(
        r"^\| `(.*?)` \| (.*?) \| (.*?) ?\|$", PAGE.read_text("utf-8"), re.M
    )
    return {call: (call, *rest) for call, *rest in cells}


TEXT = """\
# Layer and loss coverage

This page lists every layer and every loss of Keras with the engine that
computes per-example gradients through it. A model runs on the slowest engine
among those of its parts.

| engine | meaning |
|---|---|
| graph | [proved](graph_engine.md): one pass over the batch |
| one at a time | not proved, but still private: several times as slow |
| refused | proved to mix examples or to keep a state of them: raises an error |

A model that is refused because it mixes examples can still run one example at
a time, with `per_example="vectorized_map"`, if it is meaningful for a single
example. Augmentation does not depend on the engine at all if it is applied to
rows as they are drawn: pass `map` to `tf_dpsub.data.PoissonBatches`.

When a functional model is built, Keras leaves out layers that return their
input at that moment, as `Equalization` does. Augmentation layers are therefore
tested in a model whose `call` runs them.

`python -m tests.gradients.coverage_table` generates this page, here for Keras
{keras} and TensorFlow {tensorflow}, and a test compares it with the code.
"""


def main():
    text = TEXT.format(keras=keras.__version__, tensorflow=tf.__version__)
    for section, names in sections().items():
        text += f"\n## {section}\n\n| | engine | why not the graph |\n"
        text += "|---|---|---|\n"
        for call, taken, reason in rows(section, names):
            print(f"{call}: {taken}", flush=True)
            text += f"| `{call}` | {taken} | {reason} |\n".replace("  |", " |")
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
