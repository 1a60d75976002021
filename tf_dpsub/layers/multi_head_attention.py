"""Attention whose projections have low-rank gradient carriers."""

import keras

from tf_dpsub.layers.carriers import HasCarrierRank
from tf_dpsub.layers.einsum_dense import RGPEinsumDense


@keras.saving.register_keras_serializable("tf_dpsub")
class RGPMultiHeadAttention(HasCarrierRank, keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` with carriers in its projections.

    It computes the same as `MultiHeadAttention`, has the same weights, and
    trains like it, unless `tf_dpsub.optimizers.RGP` trains it. The query, key,
    value and output projections are `RGPEinsumDense`.

    Args:
        num_heads: int, number of attention heads.
        key_dim: int, size of the queries and keys of a head.
        rank: int, the rank of the carriers of each projection. A kernel that
            is narrower has none.
        **kwargs: the other arguments of `keras.layers.MultiHeadAttention`.

    Reference:
        - [Yu et al., 2021](https://arxiv.org/abs/2106.09352)
    """

    plain = keras.layers.MultiHeadAttention

    def __init__(self, num_heads, key_dim, *args, rank: int, **kwargs):
        super().__init__(num_heads, key_dim, *args, **kwargs)
        self._set_carrier_rank(rank)

    def build(self, query_shape, value_shape, key_shape=None):
        super().build(query_shape, value_shape, key_shape)
        for layer in self._flatten_layers(include_self=False):
            if type(layer) is keras.layers.EinsumDense:
                RGPEinsumDense.convert(layer, self.carrier_rank)
