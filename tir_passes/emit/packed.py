"""Expressions of a tail in packed half precision: one instruction computes two neighbours and rounds both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import tirx

from tvm_comfuse.errors import LoweringError
from tvm_comfuse.schedules.packed import positive_part
from tvm_comfuse.tir_passes.emit import operands
from tvm_comfuse.tir_passes.emit.dsl import f32, u32
from tvm_comfuse.tir_passes.emit.expressions import Affine, Binding, Rebinder
from tvm_comfuse.tir_passes.emit.instructions import packed, packed_of

Expr = Any
_SUMS = {tirx.Add: "add", tirx.Sub: "sub"}


def splat(value: Expr, dtype: str) -> Expr:
    """A float32 number, rounded, in both halves of a word."""
    return packed_of(value, value, dtype)


def affine_word(word: Expr, value: Affine, hoist: Callable[[Expr], Expr], dtype: str) -> Expr:
    """word * scale + shift.

    The scale comes in two parts, the rounded one and what that lacks: one rounding of it would be the same error in all
    elements of a row.
    """
    if value.scale is None:
        return word if value.shift is None else packed("add", dtype, word, hoist(splat(value.plain_shift, dtype)))
    rounded = splat(value.scale, dtype)
    rest = hoist(splat(value.scale - operands.unpack(rounded, dtype)[0], dtype))
    inner = (
        packed("mul", dtype, word, rest)
        if value.shift is None
        else packed("fma", dtype, word, rest, hoist(splat(value.plain_shift, dtype)))
    )
    return packed("fma", dtype, word, hoist(rounded), inner)


class Packer:
    """Walks an expression.

    binding  of what is the same for a whole row, which stays float32 until it meets a word
    word_of  (load) gives the word of two neighbours; None if the load is of the carried value
    carried  (what is done to the carried value) gives its word
    """

    def __init__(
        self,
        whole: Expr,
        binding: Binding,
        dtype: str,
        word_of: Callable[[Any], Expr | None],
        carried: Callable[[Affine], Expr],
    ):
        self.scalar, self.dtype, self.word_of, self.carried = Rebinder(whole, binding), dtype, word_of, carried

    def word(self, node: Expr) -> Expr:
        """The word of a node's two neighbours.  Raises LoweringError for a node that has none."""
        if isinstance(node, tirx.Cast):
            return self.word(node.value)
        if isinstance(node, tirx.FloatImm):
            return splat(f32(float(node.value)), self.dtype)
        if self.scalar.is_of_row(node):
            return self.scalar.binding.hoist(splat(self.scalar.plain(node), self.dtype))
        affine = self.scalar.affine(node)
        if isinstance(affine.base, tvm.ir.TensorLoad):
            word = self.word_of(affine.base)
            return self.carried(affine) if word is None else self._affine(word, affine)
        if affine.base is not node:
            return self._affine(self.word(affine.base), affine)
        return self._plain(node)

    def _affine(self, word: Expr, value: Affine) -> Expr:
        return affine_word(word, value, self.scalar.binding.hoist, self.dtype)

    def _plain(self, node: Expr) -> Expr:
        positive = positive_part(node)
        if positive is not None:
            return packed("max", self.dtype, self.word(positive), u32(0))
        if isinstance(node, tirx.Mul):
            return packed("mul", self.dtype, self.word(node.a), self.word(node.b))
        if type(node) in _SUMS:
            for product, other in ((node.a, node.b), (node.b, node.a)):
                if isinstance(node, tirx.Add) and self._is_product(product):
                    return packed("fma", self.dtype, *map(self.word, (product.a, product.b, other)))
            return packed(_SUMS[type(node)], self.dtype, self.word(node.a), self.word(node.b))
        raise LoweringError("an expression with packed instructions", f"{node}", "set packed_tail to false")

    def _is_product(self, node: Expr) -> bool:
        """Whether a node is a product of two words, which joins an addition."""
        return isinstance(node, tirx.Mul) and not any(map(self.scalar.is_of_row, (node, node.a, node.b)))
