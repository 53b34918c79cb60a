"""`transform_columns`: the random Hadamard transform of NVFP4's column-wise copies.

FP4 has eight magnitudes. One outlier among 16 values that share a scale pushes the other values to
zero. The transform mixes the 16 values, so that each result has a share of the outlier:

    y = H d x / 4        H_ij = (-1)^(number of 1s in i & j), d a fixed vector of signs

H / 4 is orthogonal. So both operands of the weight gradient can be transformed along the summed
dimension M without a change of the product: (H d a)^T (H d b) / 16 = a^T b. Without d, a constant
input would be collected in a single result.

1. Multiply by the signs, which is exact.
2. Compute four rounds of butterflies, (a, b) -> (a + b, a - b), over distances 1, 2, 4 and 8, in
   FP32. This order of additions is part of the definition here. A tensor core of a GPU adds in an
   undocumented order.
3. Multiply by 1/4, which is exact, and round to BF16. Amax and codes are taken of the BF16 values,
   as in Transformer Engine.

Source: Transformer Engine 2.20 pytorch/tensor/nvfp4_tensor.py:49-103 (signs, matrix), and
common/hadamard_transform/row_cast_col_hadamard_transform_cast_fusion.cu:775-785 (BF16 rounding).

Shapes: M rows (tokens), K columns, G groups of 16 rows.
"""

# ruff: noqa: N803  (shape suffixes are capitals)
import torch

from bridge.runtime.numerics.tiles import iterate_row_chunks

HADAMARD_SIZE = 16
"""The number of rows that are mixed."""
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs d. They must be equal on all ranks whose results are multiplied together."""


def transform_columns(x_MK: torch.Tensor) -> torch.Tensor:
    """Return the transform of each group of 16 rows, (16 * ceil(M / 16), K) in BF16.

    Rows of any floating dtype are padded with zeros to a multiple of 16, and the padding becomes
    part of the transform. Infinity and NaN spread to the 16 results of their group.

    *Differs*: Transformer Engine takes BF16 input and multiples of 16 only.
    """
    rows = -(-x_MK.shape[0] // HADAMARD_SIZE) * HADAMARD_SIZE
    out = torch.zeros(rows, x_MK.shape[1], dtype=torch.bfloat16, device=x_MK.device)
    signs = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32, device=x_MK.device)[None, :, None]
    for start, end in iterate_row_chunks(x_MK, HADAMARD_SIZE):
        chunk = x_MK[start:end].float()
        if (end - start) % HADAMARD_SIZE:
            chunk = torch.nn.functional.pad(chunk, (0, 0, 0, -(end - start) % HADAMARD_SIZE))
        groups = chunk.view(-1, HADAMARD_SIZE, x_MK.shape[1]) * signs
        for distance in (1, 2, 4, 8):
            pairs = groups.view(-1, HADAMARD_SIZE // (2 * distance), 2, distance, x_MK.shape[1])
            first, second = pairs[:, :, 0], pairs[:, :, 1]
            groups = torch.stack((first + second, first - second), dim=2)
        out[start : start + chunk.shape[0]] = (groups * 0.25).view(-1, x_MK.shape[1])
    return out
