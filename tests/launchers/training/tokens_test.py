import dataclasses
import stat

import numpy as np
import pytest

from tests.models.checkpoints import write, write_gpt2_of_bytes
from tf_dpsub import data, models
from tf_dpsub.launchers.training import tokens


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tf_dpsub" / "tokens"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    return write(path, "bert")


def texts(*words):
    return np.array(words, dtype=object)


def dataset(**changes):
    split_data = data.Dataset(
        name="reviews",
        x_train=texts("a good film", "bad", "a film"),
        y_train=np.array([1, 0, 1]),
        x_public=texts(),
        y_public=np.array([], int),
        x_test=texts("good"),
        y_test=np.array([1]),
        num_classes=2,
    )
    return dataclasses.replace(split_data, **changes)


def classifier(folder, sequence_length=6):
    return models.bert_classifier(
        folder=folder, sequence_length=sequence_length
    )


def test_texts_become_the_tokens_of_the_model(folder):
    loaded, model = dataset(), classifier(folder)
    tokenized = tokens.tokenized(loaded, model)
    expected = model.preprocessor(["a good film", "bad", "a film"])
    assert tokenized.x_train.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(tokenized.x_train[name], array)
    assert tokenized.x_public["token_ids"].shape == (0, 6)
    assert tokenized.x_test["token_ids"].shape == (1, 6)
    np.testing.assert_array_equal(tokenized.y_train, loaded.y_train)


def test_in_any_number_of_chunks(folder, monkeypatch, cache):
    model = classifier(folder)
    whole = tokens.tokenized(dataset(), model).x_train
    for file in cache.iterdir():
        file.unlink()
    monkeypatch.setattr(tokens, "_CHUNK", 2)
    parts = tokens.tokenized(dataset(), model).x_train
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array)


def test_the_same_texts_are_read_from_the_cache(folder, monkeypatch, cache):
    first = tokens.tokenized(dataset(), classifier(folder))
    assert len(list(cache.iterdir())) == 3
    model = classifier(folder)
    monkeypatch.setattr(
        type(model.preprocessor), "call", lambda *_, **__: pytest.fail()
    )
    second = tokens.tokenized(dataset(), model)
    for name, array in first.x_train.items():
        np.testing.assert_array_equal(second.x_train[name], array)


def test_the_cache_is_its_owners_alone(folder, cache):
    tokens.tokenized(dataset(), classifier(folder))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    for file in cache.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_another_text_or_tokenizer_is_not(folder, cache):
    tokens.tokenized(dataset(), classifier(folder))
    assert len(list(cache.iterdir())) == 3
    tokens.tokenized(dataset(x_test=texts("bad")), classifier(folder))
    assert len(list(cache.iterdir())) == 4
    shorter = tokens.tokenized(dataset(), classifier(folder, 4))
    assert shorter.x_train["token_ids"].shape == (3, 4)
    assert len(list(cache.iterdir())) == 7
    lines = (folder / "vocab.txt").read_text("utf-8").split("\n")
    lines[5:7] = lines[6:4:-1]
    (folder / "vocab.txt").write_text("\n".join(lines), "utf-8")
    other = tokens.tokenized(dataset(), classifier(folder))
    assert other.x_train["token_ids"][1, 1] == 5


def test_pairs_of_texts(folder):
    pairs = texts("a", "good film", "a film", "bad").reshape(2, 2)
    loaded = dataset(x_train=pairs, x_public=pairs[:0], x_test=pairs[:1])
    model = classifier(folder)
    tokenized = tokens.tokenized(loaded, model)
    segments = (["a", "a film"], ["good film", "bad"])
    expected = model.preprocessor(segments, y=None)
    for name, array in expected.items():
        np.testing.assert_array_equal(tokenized.x_train[name], array)
    assert tokenized.x_train["segment_ids"].any()
    assert tokenized.x_public["token_ids"].shape == (0, 6)
    # Other texts than the same ones one by one.
    flat = dataset(x_train=pairs.ravel(), x_public=texts(), x_test=texts("a"))
    alone = tokens.tokenized(flat, model)
    assert alone.x_train["token_ids"].shape == (4, 6)


def test_prompts_and_responses(tmp_path):
    model = models.gpt2(
        folder=write_gpt2_of_bytes(tmp_path), sequence_length=12
    )
    prompts, responses = texts("ab", "a long prompt", "a"), texts("th", "x", "")
    loaded = dataset(
        num_classes=None,
        **{f"x_{split}": prompts for split in ("train", "public", "test")},
        **{f"y_{split}": responses for split in ("train", "public", "test")},
    )
    loaded = dataclasses.replace(
        loaded, x_public=prompts[:0], y_public=responses[:0]
    )
    tokenized = tokens.tokenized(loaded, model)
    vocabulary = list(model.preprocessor.tokenizer.get_vocabulary())
    first = tokenized.y_train[0]
    words = [vocabulary[k] if k >= 0 else "-" for k in first]
    assert words == [*"---", "th", "<|endoftext|>", *"-------"]
    # The prompt alone is too long: nothing is left to learn.
    assert (tokenized.y_train[1] == -1).all()
    assert tokenized.y_train.dtype == np.int32
    assert tokenized.y_public.shape == (0, 12)
    again = tokens.tokenized(loaded, model)
    np.testing.assert_array_equal(again.y_train, tokenized.y_train)
    assert again.x_train.keys() == {"token_ids", "padding_mask"}


def test_images_stay_what_they_are():
    loaded = dataset(x_train=np.zeros((3, 8, 8, 1), "float32"))
    assert tokens.tokenized(loaded, None) is loaded


def test_a_model_without_a_tokenizer():
    model = models.bert_classifier(
        sequence_length=6,
        vocabulary_size=9,
        num_layers=1,
        num_heads=1,
        hidden_dim=4,
        intermediate_dim=4,
    )
    with pytest.raises(ValueError, match="with a tokenizer for 'reviews'"):
        tokens.tokenized(dataset(), model)
