"""Normal form: structure after each rule, and the same numbers before and after."""

import pytest
import torch
import tvm
from torch import nn
from tvm import relax

from tvm_comfuse.frontend import from_torch, normalize, run_module, simplify_views
from tvm_comfuse.frontend.shapes import merge_groups, split_groups
from tvm_comfuse.verify.numeric import relative_error


def calls(mod):
    """The Relax operator calls of main, in order."""
    return [
        binding.value
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, tvm.ir.Call) and isinstance(binding.value.op, tvm.ir.Op)
    ]


def ops(mod):
    return [call.op.name.removeprefix("relax.") for call in calls(mod)]


def data_ops(mod):
    """As ``ops``, without the transpositions of constant weights."""
    return [
        call.op.name.removeprefix("relax.")
        for call in calls(mod)
        if not (call.op.name == "relax.permute_dims" and isinstance(call.args[0], tvm.ir.GenericConst))
    ]


def build(function, *shapes, dtype="float32"):
    """A module whose main is ``function(emit, *params)``; the extent "m" is symbolic."""
    m = tvm.tirx.Var("m", "int64")
    params = [
        relax.Var(f"p{i}", relax.TensorType([m if extent == "m" else extent for extent in shape], dtype))
        for i, shape in enumerate(shapes)
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = function(builder.emit, *params)
            out = builder.emit_output(result)
        builder.emit_func_output(out)
    return builder.finalize()


def normalized(function, *shapes, m=6):
    """The normal form; the numbers before and after are compared on the way."""
    mod = build(function, *shapes)
    before = mod.script()
    after = normalize()(mod)
    relax.analysis.well_formed(after)
    assert mod.script() == before
    inputs = [torch.randn([m if extent == "m" else extent for extent in shape]) for shape in shapes]
    for old, new in zip(run_module(mod, inputs), run_module(after, inputs), strict=True):
        assert relative_error(new, old.double()) < 1e-6
    return after


permute, reshape, op = relax.op.permute_dims, relax.op.reshape, relax.op


def test_reshapes_merge_and_vanish():
    assert ops(normalized(lambda e, x: op.negative(e(reshape(e(reshape(x, [12, 2])), [4, 6]))), (4, 6))) == ["negative"]
    after = normalized(lambda e, x: e(op.squeeze(e(op.expand_dims(e(reshape(x, [24])), 0)), 0)), (4, 6))
    assert ops(after) == ["reshape"]


def test_permutations_merge_and_vanish():
    twice = normalized(lambda e, x: op.negative(e(permute(e(permute(x, [2, 0, 1])), [1, 2, 0]))), (2, 3, 4))
    assert ops(twice) == ["negative"]
    merged = normalized(lambda e, x: e(permute(e(permute(x, [1, 0, 2])), [2, 1, 0])), (2, 3, 4))
    assert ops(merged) == ["permute_dims"]
    assert list(map(int, calls(merged)[0].attrs.axes)) == [2, 0, 1]


def test_a_permutation_of_unit_axes_is_a_reshape():
    assert ops(normalized(lambda e, x: e(permute(x, [1, 0, 2])), (1, 4, 6))) == ["reshape"]
    assert ops(normalized(lambda e, x: e(permute(x, [1, 0])), ("m", 1))) == ["reshape"]
    assert ops(normalized(lambda e, x: e(permute(x, [1, 0])), ("m", 2))) == ["permute_dims"]


def test_heads_split_behind_a_transposition_need_one_permutation():
    """[S, B*H, D] -> [B*H, S, D] -> [B, H, S, D] -> [B, S, H, D], as in nn.MultiheadAttention."""

    def heads(e, x):
        turned = e(permute(e(reshape(x, [5, 12, 4])), [1, 0, 2]))
        return e(permute(e(reshape(turned, [3, 4, 5, 4])), [0, 2, 1, 3]))

    assert ops(normalized(heads, (5, 3, 16))) == ["reshape", "permute_dims"]


def test_heads_merged_in_front_of_a_transposition_need_one_permutation():
    """[B, H, S, D] -> [S, B, H, D] -> [S, B, H*D] -> [B, S, H*D]"""

    def heads(e, x):
        merged = e(reshape(e(permute(x, [2, 0, 1, 3])), [5, 3, 16]))
        return e(permute(merged, [1, 0, 2]))

    after = normalized(heads, (3, 4, 5, 4))
    assert ops(after) == ["permute_dims", "reshape"]


def test_a_reshape_that_mixes_axes_stays_between_its_permutations():
    mixed = normalized(lambda e, x: e(permute(e(reshape(e(permute(x, [1, 0])), [6, 4])), [1, 0])), (3, 8))
    assert ops(mixed) == ["permute_dims", "reshape", "permute_dims"]


def test_a_slice_moves_in_front_of_a_permutation():
    def sliced(e, x):
        part = e(op.strided_slice(e(permute(x, [2, 0, 1])), [0], [1], [2]))
        return e(permute(part, [1, 2, 0]))

    assert ops(normalized(sliced, (3, 4, 5))) == ["strided_slice"]


def test_a_strided_slice_keeps_its_step():
    def sliced(e, x):
        part = e(op.strided_slice(e(permute(x, [2, 0, 1])), [0, -1], [0, 1], [6, 4], [2, 2]))
        return e(permute(part, [1, 2, 0]))

    assert ops(normalized(sliced, (3, 4, 6))) == ["strided_slice"]


def linear(e, x, w, b):
    return e(op.add(e(op.matmul(x, w)), b))


@pytest.mark.parametrize("rows", [4, "m"])
def test_row_permutation_moves_in_front_of_a_linear_layer(rows):
    def model(e, x, w, b, residual):
        y = e(reshape(linear(e, x, w, b), [3, rows_of(x), 16]))
        return e(op.add(e(permute(y, [1, 0, 2])), residual))

    def rows_of(x):
        return x.ty.shape.values[0] // 3 if rows != "m" else x.ty.shape.values[1]

    if rows == "m":  # 3-D, without a reshape

        def model(e, x, w, b, residual):
            return e(op.add(e(permute(linear(e, x, w, b), [1, 0, 2])), residual))

        after = normalized(model, (3, "m", 8), (8, 16), (16,), ("m", 3, 16))
        assert ops(after) == ["permute_dims", "matmul", "add", "add"]
    else:
        after = normalized(model, (12, 8), (8, 16), (16,), (4, 3, 16))
        assert ops(after) == ["reshape", "permute_dims", "matmul", "add", "add"]


def test_row_reshape_moves_in_front_of_a_linear_layer_with_any_vector_operand():
    def model(e, x, w, b):
        y = e(op.nn.gelu(e(op.multiply(relax.const(2.0), linear(e, x, w, b)))))
        return e(op.negative(e(reshape(y, [12, 16]))))

    names = ops(normalized(model, (3, 4, 8), (8, 16), (1, 1, 16)))
    assert names[0] == "reshape"
    assert names[-1] == "negative"
    assert [name for name in names if name != "reshape"] == ["matmul", "add", "multiply", "nn.gelu", "negative"]


def test_a_weight_with_a_batch_of_one_is_a_plain_weight():
    after = normalized(lambda e, x, w: e(op.matmul(x, w)), (3, 4, 8), (1, 8, 16))
    assert ops(after) == ["reshape", "matmul"]
    assert len(calls(after)[-1].args[1].ty.shape) == 2
    wider = normalized(lambda e, x, w: e(op.matmul(x, w)), (4, 8), (1, 8, 16))  # the result has three axes
    assert ops(wider) == ["matmul"]


def test_what_depends_on_the_row_is_not_moved():
    def tile(e, x, w, r):
        return e(permute(e(op.add(e(op.matmul(x, w)), r)), [1, 0, 2]))

    assert ops(normalized(tile, (3, 4, 8), (8, 16), (3, 4, 16))) == ["matmul", "add", "permute_dims"]
    assert ops(normalized(tile, (3, 4, 8), (8, 16), (3, 4, 1))) == ["matmul", "add", "permute_dims"]

    def features(e, x, w):
        return e(permute(e(op.matmul(x, w)), [0, 2, 1]))

    assert ops(normalized(features, (3, 4, 8), (8, 16))) == ["matmul", "permute_dims"]

    def batched(e, x, w):
        return e(permute(e(op.matmul(x, w)), [1, 0, 2]))

    assert ops(normalized(batched, (3, 4, 8), (3, 8, 16))) == ["matmul", "permute_dims"]


def test_a_product_that_is_read_twice_is_not_computed_twice():
    def model(e, x, w):
        y = e(op.matmul(x, w))
        return e(relax.Tuple([e(permute(y, [1, 0, 2])), e(op.negative(y))]))

    assert ops(normalized(model, (3, 4, 8), (8, 16))).count("matmul") == 1

    def returned(e, x, w):
        y = e(op.matmul(x, w))
        return e(relax.Tuple([e(permute(y, [1, 0, 2])), y]))

    assert ops(normalized(returned, (3, 4, 8), (8, 16))).count("matmul") == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_batch_first_encoder_layer_has_no_permutation(dynamic):
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    shapes = ({0: torch.export.Dim("b", min=2, max=64)},) if dynamic else None
    mod = from_torch(layer, (torch.randn(4, 8, 32),), shapes)
    names = data_ops(mod)
    assert "permute_dims" not in names
    projection = names.index("nn.attention")
    assert names[projection + 1 :] == [
        *["reshape", "matmul", "add", "add", "nn.layer_norm"],
        *["matmul", "add", "nn.relu"],
        *["matmul", "add", "add", "nn.layer_norm"],
    ]
    assert names[:2] == ["matmul", "add"]


def test_sequence_first_encoder_layer_keeps_products_and_norms_adjacent():
    mod = from_torch(nn.TransformerEncoderLayer(32, 2, 64, batch_first=False), (torch.randn(8, 4, 32),))
    names = data_ops(mod)
    assert names[names.index("nn.attention") + 1 :][:6] == [
        "permute_dims", "reshape", "matmul", "add", "add", "nn.layer_norm"
    ]  # fmt: skip


@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_layer_has_the_same_numbers_before_and_after(batch_first):
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(32, 2, 64, batch_first=batch_first), torch.randn(4, 8, 32)
    plain = from_torch(layer, (x,), normalize=False)
    assert len(data_ops(normalize()(plain))) < len(data_ops(plain))
    (before,), (after,) = run_module(plain, [x]), run_module(normalize()(plain), [x])
    assert relative_error(after, before.double()) < 1e-6


def test_normal_form_is_reached_at_once():
    mod = from_torch(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), (torch.randn(4, 8, 32),))
    tvm.ir.assert_structural_equal(normalize()(mod), mod)


def test_functions_that_are_called_are_rewritten_too():
    builder = relax.BlockBuilder()
    y = relax.Var("y", relax.TensorType([2, 3], "float32"))
    with builder.function("inner", [y], private=True):
        turned = builder.emit(permute(builder.emit(permute(y, [1, 0])), [1, 0]))
        builder.emit_func_output(builder.emit(op.negative(turned)))
    inner = builder.get().get_global_var("inner")
    x = relax.Var("x", relax.TensorType([2, 3], "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.Call(inner, [x])))
    after = simplify_views()(builder.finalize())
    assert "permute_dims" not in after.script()
    assert "negative" in after["inner"].script()


@pytest.mark.parametrize(
    ("old", "new", "groups"),
    [
        ([5, 12, 4], [5, 3, 4, 4], [[0], [1, 2], [3]]),
        ([12], [3, 4, 1], [[0, 1, 2]]),
        ([3, 4], [12], None),
        ([3, 8], [4, 6], None),
        ([3, 4], [3, 4], [[0], [1]]),
        ([3, 4], [3], None),
    ],
)
def test_split_and_merge_groups(old, new, groups):
    assert split_groups(old, new) == groups
    assert merge_groups(new, old) == groups


def test_groups_of_symbolic_extents():
    m, n = tvm.tirx.Var("m", "int64"), tvm.tirx.Var("n", "int64")
    assert split_groups([m * 4, 8], [m, 4, 8]) == [[0, 1], [2]]
    assert split_groups([m, 8], [n, 8]) is None
