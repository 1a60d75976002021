"""Texts of a data set as the tokens of a model, kept on disk."""

import dataclasses
import hashlib
import json
import os
import pathlib

import numpy as np

from tf_dpsub import files
from tf_dpsub.launchers.training import tasks

# Texts at a time.
_CHUNK = 4096
# Beside the inputs of a model that writes.
_TARGETS = "targets"


def tokenized(loaded, model):
    """A data set of texts, as the inputs of a model of texts.

    Tokens are kept in the user's cache folder, which others cannot read, and
    read from there when the same texts meet the same tokenizer again.

    Args:
        loaded: `tf_dpsub.data.Dataset`.
        model: `keras.Model`, with a keras_hub preprocessor for texts.

    Returns:
        A `tf_dpsub.data.Dataset` whose inputs are dicts of arrays, and whose
        targets, if they are texts, tokens; `loaded` if it holds no texts.

    Raises:
        ValueError: if the model takes no texts.
    """
    if not loaded.is_text:
        return loaded
    preprocessor = getattr(model, "preprocessor", None)
    if preprocessor is None:
        raise ValueError(
            f"Expected a model with a tokenizer for {loaded.name!r}, got "
            f"'{model.name}', which has none. Give it a preset or a folder."
        )
    is_generation = loaded.num_classes is None
    parts = {}
    for split in ("train", "public", "test"):
        x, y = getattr(loaded, f"x_{split}"), getattr(loaded, f"y_{split}")
        if is_generation:
            x = np.stack([x, y], axis=1)
        inputs = _tokens(x, preprocessor, is_generation)
        if is_generation:
            parts[f"y_{split}"] = inputs.pop(_TARGETS)
        parts[f"x_{split}"] = inputs
    return dataclasses.replace(loaded, **parts)


def _tokens(texts, preprocessor, is_generation):
    """A dict of arrays, from texts or pairs of them."""
    key = _key(texts, preprocessor, is_generation)
    path = _cache_folder() / f"{key}.npz"
    if path.is_file():
        with np.load(path) as file:
            return dict(file)
    # None of them still tells what tokens are like.
    some = texts if len(texts) else np.full((1, *texts.shape[1:]), "", object)
    chunks = [
        _chunk(part, preprocessor, is_generation)
        for part in np.split(some, range(_CHUNK, len(some), _CHUNK))
    ]
    tokens = {
        name: np.concatenate([chunk[name] for chunk in chunks])[: len(texts)]
        for name in chunks[0]
    }
    files.make_folder(path.parent)
    files.replace(path, lambda path: np.savez(path, **tokens))
    return tokens


def _chunk(texts, preprocessor, is_generation):
    if is_generation:
        prompts, responses = map(list, texts.T)
        inputs, targets, weights = preprocessor(
            {"prompts": prompts, "responses": responses}
        )
        targets = tasks.masked_targets(targets, weights)
        inputs = {**inputs, _TARGETS: targets}
    elif texts.ndim == 2:
        # A tuple alone would be taken for inputs and labels.
        inputs = preprocessor(tuple(map(list, texts.T)), y=None)
    else:
        inputs = preprocessor(list(texts))
    return {name: np.asarray(array) for name, array in inputs.items()}


def _cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "tf_dpsub" / "tokens"


def _without_names(config):
    """A config without the names that Keras counts up."""
    if not isinstance(config, dict):
        return config
    return {k: _without_names(v) for k, v in config.items() if k != "name"}


def _key(texts, preprocessor, is_generation):
    """A digest of the texts and of all that makes tokens of them."""
    tokenizer = preprocessor.tokenizer
    settings = {
        "type": type(preprocessor).__name__,
        "preprocessor": _without_names(preprocessor.get_config()),
        "vocabulary": list(tokenizer.get_vocabulary()),
        "merges": list(getattr(tokenizer, "merges", ())),
        "shape": [is_generation, *texts.shape],
    }
    digest = hashlib.sha256(json.dumps(settings, default=str).encode())
    for text in texts.flat:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()
