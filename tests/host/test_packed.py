"""Packed tails: which expressions they have, what they need, and what they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from canonical_examples import EXAMPLES
from interpreted_kernels import BASE
from tvm import tirx
from verified_kernels import case

from tvm_comfuse.schedules.analysis import analyze
from tvm_comfuse.schedules.device import H200
from tvm_comfuse.schedules.legality import legality
from tvm_comfuse.schedules.packed import packable, positive_part
from tvm_comfuse.schedules.split import tail_blocks
from tvm_comfuse.schedules.tails import packed_vectors, packs
from tvm_comfuse.verify.interpreter import Program
from tvm_comfuse.verify.interpreter.values import WORDS, pack

J = tirx.Var("j", "int32")
DIRECT = replace(BASE, operands=("global",), store=("global",), w_order="quads", pipeline_depth=2, packed_tail=True)


def f32(value: float) -> Any:
    return tirx.const(value, "float32")


def load(name: str, dtype: str = "float32", varies: bool = True) -> Any:
    value = tirx.decl_buffer((64,), dtype, name=name)[J if varies else 0]
    return value if dtype == "float32" else tirx.Cast("float32", value)


def below(bound: float) -> Any:
    return tirx.LT(V, f32(bound))


V, GAMMA, SHIFT = load("v"), load("gamma", "bfloat16"), load("mean", varies=False)


@pytest.mark.parametrize(
    ("value", "can"),
    [
        (V * GAMMA + SHIFT, True),
        (V - tirx.sqrt(SHIFT), True),
        (V * f32(0.5), True),
        (V * f32(0.1), False),
        (tirx.exp(V), False),
        (V / GAMMA, False),
        (tirx.Select(below(0), f32(0), V), True),
        (tirx.Select(below(0), f32(0), tirx.exp(V)), False),
        (tirx.Select(below(1), f32(0), V), False),
        (tirx.Select(below(0), V * f32(0.5), V), False),
    ],
)
def test_what_can_be_packed(value: Any, can: bool) -> None:
    assert packable(value, J) == can


def test_a_positive_part_is_of_the_compared_value() -> None:
    assert positive_part(tirx.Select(below(0), f32(0), V)).same_as(V)
    assert positive_part(tirx.Select(below(0), f32(0), GAMMA)) is None
    assert positive_part(tirx.Select(tirx.GT(V, f32(0)), f32(0), V)) is None


def codes(example: str, **changes: Any) -> set[str]:
    spec = analyze(EXAMPLES[example].build(256, 512, 512, "bfloat16"))
    tiles, outputs = len(spec.tile_operands), len(spec.tile_outputs)
    placed = {"operands": ("global",) * tiles, "store": ("global",) * outputs}
    found = legality(replace(DIRECT, **{**placed, **changes}), spec, H200)
    return {refusal.code for refusal in found if refusal.code.startswith("packed")}


def test_what_a_packed_tail_needs() -> None:
    assert codes("layer_norm") == set()
    assert codes("rms_residual") == set()
    # an operand of the head may come as it likes
    assert codes("layer_norm", w_order="rows") == set()
    assert codes("rms_residual", w_order="rows") == {"packed-placement"}
    assert codes("rms_residual", w_order="rows", operands=("tma",)) == set()
    assert codes("softmax_cap") == {"packed-expression"}
    assert codes("bias_gelu", exchange="none") >= {"packed-outputs"}


def test_only_vectors_of_the_tail_are_kept_in_words() -> None:
    spec = analyze(EXAMPLES["layer_norm"].build(256, 512, 512, "bfloat16"))
    kept = packed_vectors(DIRECT, spec)
    readers = {operand.name: set(operand.readers) for operand in spec.col_operands}
    assert packs(spec)
    assert kept
    assert kept == {name for name, blocks in readers.items() if blocks <= tail_blocks(spec)}
    assert packed_vectors(replace(DIRECT, packed_tail=False), spec) == set()


def test_one_instruction_for_two_neighbours() -> None:
    """(v - mean) rstd gamma + beta: two for the row's scale, whose rounding is made good, and one for gamma and beta."""
    text, plain = (case(name).kernel.script() for name in ("packed_grid", "deferred_grid"))
    # 128 columns of 64 rows, two of a word; the tail of the last step stands behind the loop once more
    words = 2 * (64 * 128 // 128 // 2)
    assert text.count('T.cuda.func_call("comfuse_fma_bf16x2"') == 3 * words
    assert "comfuse_fma" not in plain


@pytest.mark.parametrize("name", ["packed_grid", "packed_residual", "packed_tiles", "packed_relu"])
def test_the_numbers(name: str) -> None:
    """Within twice what eager PyTorch is off, which rounds as often."""
    given = case(name)
    result = Program(given.kernel).run(given.inputs)
    assert not result.findings, result.findings[0]
    (out,), (exact,) = result.outputs.values(), given.references
    error = np.linalg.norm(out.astype(np.float64) - exact) / np.linalg.norm(exact)
    once = np.linalg.norm(exact.astype(out.dtype).astype(np.float64) - exact) / np.linalg.norm(exact)
    assert once < error < 2 * once


@pytest.mark.parametrize("kind", ["bf16x2", "f16x2"])
def test_words_in_the_interpreter(kind: str) -> None:
    """Each half by itself, rounded once; by numbers that a product and a sum of this precision have not."""
    dtype = {"bf16x2": "bfloat16", "f16x2": "float16"}[kind]
    low, high = np.float32([1.5, -2.0, np.nan]), np.float32([3.0, 0.25, 1.0])
    as_dtype = np.zeros(1, dtype).dtype
    word = pack(high, low, as_dtype)
    thirds = pack(np.full(3, 1 / 3, np.float32), np.full(3, 1 / 3, np.float32), as_dtype)

    def halves(words: Any) -> list[Any]:
        both = np.asarray(words, np.uint32)[:, None].view(np.uint16).view(as_dtype).astype(np.float64)
        return [both[:, 0], both[:, 1]]

    third = float(np.float32(1 / 3).astype(as_dtype))
    found = halves(WORDS[f"func.comfuse_fma_{kind}"](word, thirds, word))
    for half, value in zip(found, (low, high), strict=True):
        expected = (value.astype(np.float64) * third + value).astype(np.float32).astype(as_dtype).astype(np.float64)
        np.testing.assert_array_equal(half, expected)
    largest = halves(WORDS[f"func.comfuse_max_{kind}"](word, np.zeros(3, np.uint32)))
    np.testing.assert_array_equal(largest[0], [1.5, 0.0, np.nan])
