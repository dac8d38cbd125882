"""A post-norm transformer encoder layer, as BERT has twelve of, in bfloat16.

comfuse explain examples/encoder_layer.py:build
"""

from __future__ import annotations

import torch

BATCH, SEQUENCE, WIDTH, HEADS, HIDDEN = 2, 16, 768, 12, 3072


def build(batch: int = BATCH, sequence: int = SEQUENCE) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The layer with its weights from a fixed seed, and example inputs [batch, sequence, WIDTH].

    The sequences are short so that a CPU runs the layer at once; the weights have their full size.
    """
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, norm_first=False, batch_first=True)
    # norms start as identities, which would hide a kernel that forgets them
    for norm in (layer.norm1, layer.norm2):
        torch.nn.init.normal_(norm.weight, 1.0, 0.2)
        torch.nn.init.normal_(norm.bias, 0.0, 0.2)
    layer = layer.to(torch.bfloat16).eval()
    return layer, (torch.randn(batch, sequence, WIDTH, dtype=torch.bfloat16),)
