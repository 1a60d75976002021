"""A source whose rows depend on which others are asked for."""

import numpy as np


class Mixing:
    """A source that standardises the rows of each request."""

    assumed = "what the source gives for an example depends on that example"

    def __init__(self, mix):
        self._rows = np.random.default_rng(0).normal(size=(9, 3))
        self._mix = mix

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, indices):
        return self._mix(self._rows[indices])
