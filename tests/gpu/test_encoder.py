"""A whole post-norm encoder layer, through torch.export, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tvm_comfuse
from tvm_comfuse.verify.numeric import check

BATCH, SEQUENCE, WIDTH, HEADS, INNER = 32, 512, 768, 12, 3072


@pytest.fixture
def plain_attention() -> Iterator[None]:
    """Without PyTorch's own fused encoder layer, which torch.export and float64 do not take."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_post_norm_encoder_layer(seed: int, plain_attention: None) -> None:
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, norm_first=False, batch_first=True).eval()
    # weights of the half-precision model are the truth: float64 starts from their rounded values
    layer = layer.to(torch.bfloat16)
    x = torch.randn(BATCH, SEQUENCE, WIDTH).to(torch.bfloat16)
    with torch.no_grad():
        compiled = tvm_comfuse.compile(layer, "cuda", example_args=(x,), form="fused")
        fused = [matmul.ops for matmul in compiled.explanation.matmuls if matmul.fused]
        # two post-norm clusters and two plain ones; attention's own products are not fused
        assert len(fused) >= 4, str(compiled.explanation)
        assert sum("relax.nn.layer_norm" in ops for ops in fused) == 2, fused
        out = compiled.run(x.cuda())
        eager = layer.cuda()(x.cuda())
        reference = layer.double()(x.cuda().double())
    assert out.shape == x.shape
    assert out.dtype == torch.bfloat16
    report = check(out, reference, eager)
    assert report.passed, report
