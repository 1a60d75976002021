"""Texts of a data set as the tokens of a model, kept on disk."""

import dataclasses
import hashlib
import json
import os
import pathlib

import keras
import numpy as np

# Texts at a time.
_CHUNK = 4096


def tokenized(loaded, model):
    """A data set of texts, as the inputs of a model of texts.

    Tokens are kept in the user's cache folder, and read from there when the
    same texts meet the same tokenizer again.

    Args:
        loaded: `tf_dpsub.data.Dataset`.
        model: `keras.Model`, with a keras_hub preprocessor for texts.

    Returns:
        A `tf_dpsub.data.Dataset` whose inputs are dicts of arrays; `loaded` if
        it holds no texts.

    Raises:
        ValueError: if the model takes no texts.
    """
    if loaded.input_shape != ():
        return loaded
    preprocessor = getattr(model, "preprocessor", None)
    if preprocessor is None:
        raise ValueError(
            f"Expected a model with a tokenizer for {loaded.name!r}, got "
            f"'{model.name}', which has none. Give it a preset or a folder."
        )
    parts = {
        name: _tokens(getattr(loaded, name), preprocessor)
        for name in ("x_train", "x_public", "x_test")
    }
    return dataclasses.replace(loaded, **parts)


def _tokens(texts, preprocessor):
    path = _cache_folder() / f"{_key(texts, preprocessor)}.npz"
    if path.is_file():
        with np.load(path) as file:
            return dict(file)
    chunks = [
        keras.tree.map_structure(np.asarray, preprocessor(list(part)))
        for part in np.split(texts, range(_CHUNK, len(texts), _CHUNK))
        if len(part)
    ]
    if not chunks:
        chunks = [
            keras.tree.map_structure(lambda t: np.asarray(t)[:0], one)
            for one in [preprocessor([""])]
        ]
    tokens = {
        name: np.concatenate([chunk[name] for chunk in chunks])
        for name in chunks[0]
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all, whoever else writes it.
    unfinished = path.with_suffix(f".{os.getpid()}.npz")
    np.savez(unfinished, **tokens)
    os.replace(unfinished, path)
    return tokens


def _cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "tf_dpsub" / "tokens"


def _without_names(config):
    """A config without the names that Keras counts up."""
    if not isinstance(config, dict):
        return config
    return {k: _without_names(v) for k, v in config.items() if k != "name"}


def _key(texts, preprocessor):
    """A digest of the texts and of all that makes tokens of them."""
    tokenizer = preprocessor.tokenizer
    settings = {
        "type": type(preprocessor).__name__,
        "preprocessor": _without_names(preprocessor.get_config()),
        "vocabulary": tokenizer.get_vocabulary(),
        "merges": list(getattr(tokenizer, "merges", ())),
    }
    digest = hashlib.sha256(json.dumps(settings, default=str).encode())
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()
