"""Real data sets of which tests read the first examples only."""

from tf_dpsub.data import datasets


def read_at_most(monkeypatch, train, test):
    """Reads so many examples of the splits of TensorFlow Datasets."""
    read = datasets._read

    def read_first(builder, split, keys):
        count = train if split == "train" else test
        return read(builder, f"{split}[:{count}]", keys)

    monkeypatch.setattr(datasets, "_read", read_first)
