"""Private examples that are also public are found in any form."""

import numpy as np
import pytest
import tensorflow as tf

from tf_dpsub.data import overlap

_random = np.random.default_rng(0)
IMAGES = _random.integers(0, 256, (30, 4, 4, 1)).astype("uint8")
TOKENS = _random.integers(0, 30000, (30, 6))
TEXTS = np.array(
    ["a cat", "a dog", "ein Bär", ""] + [str(i) for i in range(26)]
)
COMMON = [3, 7, 8]


def halves(examples):
    """20 private examples, and 13 public ones, of which three are private."""
    return examples[:20], np.concatenate([examples[20:], examples[COMMON]])


def count(public, private):
    return overlap.count_common(public, private)


@pytest.mark.parametrize("examples", [IMAGES, TOKENS, TEXTS, TOKENS[:, 0]])
def test_counts_private_examples_that_are_public(examples):
    private, public = halves(examples)
    assert count(public, private) == 3
    assert count(examples[20:], private) == 0
    assert count(private, private) == 20


@pytest.mark.parametrize("block", [1, 2, 7, 1024])
def test_any_number_of_rows_is_read_at_a_time(block, monkeypatch):
    monkeypatch.setattr(overlap, "_ROWS", block)
    private, public = halves(IMAGES)
    assert count(public, private) == 3


FORMS = {
    "float32": lambda a: a.astype("float32"),
    "float64": lambda a: a.astype("float64"),
    "float16": lambda a: a.astype("float16"),
    "bfloat16": lambda a: tf.cast(a, tf.bfloat16).numpy(),
    "int64": lambda a: a.astype("int64"),
    "tensor": tf.constant,
    "strided": lambda a: np.repeat(a, 2, 0)[::2],
    "column by column": np.asfortranarray,
    "big-endian": lambda a: a.astype(">f4"),
}


@pytest.mark.parametrize("form", FORMS)
def test_copies_of_another_type(form):
    """The model sees the same numbers."""
    private, public = halves(IMAGES)
    assert count(FORMS[form](public), private) == 3
    assert count(public, FORMS[form](private)) == 3


def test_signs_of_zero():
    zeros = np.zeros((2, 3), "float32")
    assert count(-zeros, zeros) == 2


def test_rounding_to_what_the_model_sees():
    x = _random.normal(size=(5, 3))
    assert count(x.astype("float32"), x) == 5


def test_what_is_not_finite():
    x = np.full((2, 3), np.nan)
    x[1] = np.inf
    assert count(x[:1], x) == 1
    assert count(x[1:], x) == 1


@pytest.mark.parametrize("change", [1.0, 1e-6])
def test_other_examples_are_not_counted(change):
    x = _random.uniform(1, 2, (5, 3)).astype("float32")
    other = x.copy()
    other[:, 2] += change
    assert count(other, x) == 0


def test_repeated_examples():
    """All private copies are counted, however often they are public."""
    private = np.repeat(TOKENS[:2], 3, 0)
    assert count(np.repeat(TOKENS[:1], 5, 0), private) == 3


class TestStructures:
    def test_all_parts_have_to_agree(self):
        private = {"a": TOKENS, "b": IMAGES}
        assert count({"b": IMAGES, "a": TOKENS}, private) == 30
        other = {"a": TOKENS, "b": IMAGES[::-1]}
        assert count(other, private) == 0
        assert count([TOKENS, IMAGES], (TOKENS, IMAGES)) == 30

    def test_texts_as_bytes_and_by_columns(self):
        texts = np.stack([TEXTS, TEXTS[::-1]], 1)
        encoded = tf.constant(texts.tolist())
        assert count(encoded, texts) == 30
        # The same letters, cut elsewhere.
        one, other = np.array([["ab", "c"]]), np.array([["a", "bc"]])
        assert count(one, other) == 0


def test_sources_are_read_in_blocks(monkeypatch):
    """A memory map, or a folder of files, may not fit into memory."""
    monkeypatch.setattr(overlap, "_ROWS", 8)

    class Source:
        reads = []

        def __len__(self):
            return 20

        def __getitem__(self, part):
            self.reads.append(part)
            return IMAGES[:20][part]

    private, public = halves(IMAGES)
    assert count(public, Source()) == 3
    assert all(p.stop - p.start <= 8 for p in Source.reads)
