import numpy as np
import pytest

from tf_dpsub.launchers.audits import digits_membership


def test_shadow_models_see_half_of_the_examples():
    """The attack with them finds who a model knows by heart."""

    class Memory:
        def __init__(self, x, y, hardness):
            self.known = {row.tobytes() for row in x}
            self.hardness = hardness

        def predict(self, x, verbose):
            # Members have a higher score, which hard examples hide.
            logits = np.zeros((len(x), 10))
            for row, row_logits in zip(x, logits):
                row_logits[0] = self.hardness[row.tobytes()]
                row_logits[0] += 1.0 * (row.tobytes() in self.known)
            return logits

    seen = []
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 3))
    hardness = dict(zip(map(np.ndarray.tobytes, x), 5 * x[:, 0]))

    def train(images, y, seed):
        seen.append(len(images))
        return Memory(images, y, hardness)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            digits_membership, "_digits", lambda: (x, np.zeros(400, int))
        )
        attacks = digits_membership.attacked(train, shadow_models=4)
    assert seen == [200] * 5
    assert attacks.likelihood_ratio.success == 1
    assert attacks.loss_threshold.success < 0.7
