"""Search of hyper-parameters whose choice is covered by ε."""

from tf_dpsub import extras

extras.require("keras_tuner", "tuning")

from tf_dpsub.tuning.private_random_search import (  # noqa: E402
    PrivateRandomSearch,
)

__all__ = ["PrivateRandomSearch"]
