"""Weights of Hugging Face checkpoints in models of keras_hub.

Not by its `from_preset`: in keras_hub 0.32, RoBERTa leaves the token type
embedding out, and BERT has the tanh form of GELU instead of the exact one.

A checkpoint is a folder with `config.json` and `.safetensors` files, as
`save_pretrained` writes it, and the files of its tokenizer.
"""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Callable

import numpy as np

from tf_dpsub import extras

# Tensors that a classifier does not take, such as heads for other tasks.
_UNUSED = re.compile(
    r"(^|\.)(position_ids|masked_bias|attn\.bias)$"
    r"|^(cls|lm_head|classifier|qa_outputs|pooler)\."
)
# Tensors of one layer of an encoder.
_LAYER = re.compile(r"encoder\.layer\.(\d+)\.")


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint in memory.

    Attributes:
        path: `pathlib.Path` of the folder.
        config: dict, the content of `config.json`.
        tensors: dict from names, without the prefix of the encoder, to arrays.
    """

    path: pathlib.Path
    config: dict
    tensors: dict

    @classmethod
    def read(cls, folder, prefix: str):
        """Reads a checkpoint from a folder.

        Args:
            folder: string or path-like.
            prefix: string, which names of the encoder may begin with.

        Raises:
            ValueError: if a file is missing, or the model is of another type.
        """
        safetensors = extras.require("safetensors.numpy", "nlp")

        path = pathlib.Path(folder)
        files = sorted(path.glob("*.safetensors"))
        if not (path / "config.json").is_file() or not files:
            raise ValueError(
                f"Expected a folder with config.json and .safetensors files, "
                f"got {str(path)!r}, which has not both."
            )
        config = json.loads((path / "config.json").read_text("utf-8"))
        tensors = {}
        for file in files:
            for name, tensor in safetensors.load_file(file).items():
                tensors[_short(name, prefix)] = tensor
        return cls(path, config, tensors)

    def expect(self, model_type):
        """The config, if it is of a type of model.

        Raises:
            ValueError: if it is of another type.
        """
        actual = self.config.get("model_type")
        if actual != model_type:
            raise ValueError(
                f"Expected a checkpoint of type {model_type!r} in {self.path}, "
                f"got {actual!r}."
            )
        return self.config

    def cut(self, layers: int):
        """The checkpoint with the first layers of its encoder alone.

        Raises:
            ValueError: if it has fewer.
        """
        available = self.config["num_hidden_layers"]
        if not 1 <= layers <= available:
            raise ValueError(
                f"Expected 1 <= first_layers <= {available}, the layers that "
                f"{self.path} has, got {layers}."
            )
        tensors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if not (layer := _LAYER.match(name)) or int(layer[1]) < layers
        }
        config = self.config | {"num_hidden_layers": layers}
        return dataclasses.replace(self, config=config, tensors=tensors)

    def take(self, name, shape):
        """One tensor.

        Raises:
            ValueError: if it is missing, or has another shape.
        """
        tensor = self.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            actual = "none" if tensor is None else f"shape {list(tensor.shape)}"
            raise ValueError(
                f"Expected {name} of shape {list(shape)} in {self.path}, got "
                f"{actual}. A model without a head for masked words cannot be "
                "asked for words."
            )
        return tensor

    def fill(self, model, source_of: Callable):
        """Assigns all weights of a model, from all tensors.

        Tensors of heads, which are for another task, are left over.

        Args:
            model: `keras.Model`.
            source_of: callable of the path of a variable and its shape, which
                returns a `Source`.

        Raises:
            ValueError: lists tensors that are missing, that have another
                shape, and that nothing uses. Nothing is assigned then.
        """
        assignments, missing, misshapen, used = [], [], [], set()
        for variable in model.weights:
            source = source_of(variable.path, tuple(variable.shape))
            tensors = [self.tensors.get(name) for name in source.names]
            used.update(source.names)
            wrong = [
                f"{name} {list(t.shape)} instead of {list(shape)}"
                for name, t, shape in zip(source.names, tensors, source.shapes)
                if t is not None and t.shape != shape
            ]
            absent = [n for n, t in zip(source.names, tensors) if t is None]
            missing += absent
            misshapen += wrong
            if not wrong and not absent:
                assignments.append((variable, source.convert(*tensors)))
        extra = [
            name
            for name in self.tensors
            if name not in used and not _UNUSED.search(name)
        ]
        problems = {
            "missing": missing,
            "of another shape": misshapen,
            "unknown": extra,
        }
        if any(problems.values()):
            raise ValueError(
                f"Expected the weights of '{model.name}' in {self.path}, got "
                "tensors that do not fit. "
                + " ".join(
                    f"{kind.capitalize()}: {', '.join(sorted(set(names)))}."
                    for kind, names in problems.items()
                    if names
                )
            )
        for variable, value in assignments:
            variable.assign(np.reshape(value, variable.shape))


def model_type(folder):
    """The type of model in a folder; None without a folder or a config."""
    if folder is None:
        return None
    file = pathlib.Path(folder) / "config.json"
    if not file.is_file():
        return None
    return json.loads(file.read_text("utf-8")).get("model_type")


def _short(name, prefix):
    """Name of a tensor within the encoder, in the current spelling."""
    name = name.removeprefix(f"{prefix}.")
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)


@dataclasses.dataclass(frozen=True)
class Source:
    """Tensors of a checkpoint that make a variable.

    Attributes:
        names: tuple of string, of tensors.
        shapes: tuple of the shapes that they must have.
        convert: callable of the tensors, which returns the variable's numbers
            in their order.
    """

    names: tuple
    shapes: tuple
    convert: Callable = staticmethod(lambda tensor: tensor)


_ENCODER_PARTS = {
    "self_attention_layer/query": "attention.self.query",
    "self_attention_layer/key": "attention.self.key",
    "self_attention_layer/value": "attention.self.value",
    "self_attention_layer/attention_output": "attention.output.dense",
    "self_attention_layer_norm": "attention.output.LayerNorm",
    "feedforward_intermediate_dense": "intermediate.dense",
    "feedforward_output_dense": "output.dense",
    "feedforward_layer_norm": "output.LayerNorm",
}
_BERT_PARTS = {
    "token_embedding": "embeddings.word_embeddings",
    "position_embedding": "embeddings.position_embeddings",
    "segment_embedding": "embeddings.token_type_embeddings",
    "embeddings_layer_norm": "embeddings.LayerNorm",
    "pooled_dense": "pooler.dense",
}
_ROBERTA_PARTS = {
    "embeddings/token_embedding": "embeddings.word_embeddings",
    "embeddings_layer_norm": "embeddings.LayerNorm",
}
_GPT2_PARTS = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "layer_norm": "ln_f",
}
_DECODER_PARTS = {
    "self_attention/attention_output": "attn.c_proj",
    "self_attention_layer_norm": "ln_1",
    "feedforward_intermediate_dense": "mlp.c_fc",
    "feedforward_output_dense": "mlp.c_proj",
    "feedforward_layer_norm": "ln_2",
}
_SUFFIXES = {
    "kernel": "weight",
    "embeddings": "weight",
    "gamma": "weight",
    "beta": "bias",
    "bias": "bias",
}


def bert(path, shape):
    """`Source` of a variable of `keras_hub.models.BertBackbone`."""
    return _of_encoder(path, shape, _BERT_PARTS)


def roberta(path, shape):
    """`Source` of a variable of `keras_hub.models.RobertaBackbone`.

    The two positions before the first are of padding; the one type of token is
    added to all positions.
    """
    if path == "embeddings/position_embedding/embeddings":
        positions, width = shape
        return Source(
            (
                "embeddings.position_embeddings.weight",
                "embeddings.token_type_embeddings.weight",
            ),
            ((positions + 2, width), (1, width)),
            lambda position, kind: position[2:] + kind,
        )
    return _of_encoder(path, shape, _ROBERTA_PARTS)


def gpt2(path, shape):
    """`Source` of a variable of `keras_hub.models.GPT2Backbone`."""
    layer, part, kind = _split(path)
    if layer is None:
        return Source((f"{_GPT2_PARTS[part]}.{_SUFFIXES[kind]}",), (shape,))
    name = f"h.{layer}."
    projection = part.removeprefix("self_attention/")
    if projection in ("query", "key", "value"):
        # One tensor holds all three, along its last axis.
        k = ("query", "key", "value").index(projection)
        width = math.prod(shape[-2:])
        whole = (*shape[:-2], 3 * width)
        return Source(
            (f"{name}attn.c_attn.{_SUFFIXES[kind]}",),
            (whole,),
            lambda t: t[..., k * width : (k + 1) * width],
        )
    if kind == "kernel":
        split = _input_axes(part)
        shape = (math.prod(shape[:split]), math.prod(shape[split:]))
    return Source(
        (f"{name}{_DECODER_PARTS[part]}.{_SUFFIXES[kind]}",), (shape,)
    )


def _of_encoder(path, shape, parts):
    layer, part, kind = _split(path)
    if layer is None:
        name = parts[part]
    else:
        name = f"encoder.layer.{layer}.{_ENCODER_PARTS[part]}"
    name = f"{name}.{_SUFFIXES[kind]}"
    if kind != "kernel":
        # A bias of heads is a vector.
        size = (math.prod(shape),) if kind == "bias" else shape
        return Source((name,), (size,))
    split = _input_axes(part)
    inputs, outputs = math.prod(shape[:split]), math.prod(shape[split:])
    return Source((name,), ((outputs, inputs),), np.transpose)


def _split(path):
    """The number of the layer or None, the part of it, the kind of weight."""
    part, _, kind = path.rpartition("/")
    match = re.match(r"transformer_layer_(\d+)/(.*)", part)
    return (match[1], match[2], kind) if match else (None, part, kind)


def _input_axes(part):
    # The output projection of attention sums over heads and their width.
    return 2 if part.endswith("attention_output") else 1
