"""A kernel as a tree of light Python objects.

TVM's nodes live behind a foreign-function interface, where each attribute costs about a microsecond.  The interpreter looks
at every node several times (once per role and pass), so it copies the kernel once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import tirx

from tvm_comfuse.errors import ComfuseError

#: attribute with the tags of a launch, and the tag of a dependent one (names of TVM's runtime)
LAUNCH_PARAMS, DEPENDENT = "tirx.kernel_launch_params", "tirx.use_programtic_dependent_launch"
#: scope numbers of TVM's ScopeIdDef, as this package's kernels use them
SCOPES = {0: "cluster", 1: "cta", 2: "rank", 3: "warp_group", 5: "warp", 6: "lane"}
BINARY = {
    "Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Mod": "%", "FloorDiv": "//", "FloorMod": "%", "Min": "min", "Max": "max",
    "EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">=", "And": "and", "Or": "or",
    "BitwiseAnd": "&", "BitwiseOr": "|", "BitwiseXor": "^", "LShift": "<<", "RShift": ">>",
}  # fmt: skip
#: operators that are calls in TVM and binary operators here
BINARY_CALLS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "shift_left": "<<", "shift_right": ">>"}
SIZES = {"uint8": 1, "int8": 1, "bool": 1, "float16": 2, "bfloat16": 2, "uint16": 2, "int16": 2}
SIZES |= {"float32": 4, "int32": 4, "uint32": 4, "float64": 8, "int64": 8, "uint64": 8}


class UnsupportedError(ComfuseError, NotImplementedError):
    """The kernel uses something the interpreter does not model."""

    def __init__(self, found: str):
        super().__init__("an instruction that the interpreter models", found, "add it to verify/interpreter/calls.py")


@dataclass(eq=False)
class Buffer:
    """A buffer: scope is global, shared.dyn, shared or local; `view` a (buffer, byte offset) for a view of another."""

    name: str
    dtype: str
    shape: list[Expr]
    scope: str
    view: tuple[Buffer, int] | None = None

    @property
    def size(self) -> int:
        """Elements of a buffer of constant shape."""
        count = 1
        for extent in self.shape:
            count *= int(extent.value)
        return count

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return SIZES[self.dtype]


@dataclass(eq=False)
class Expr:
    """op: const, var, load, cast, select, call, not, or a binary operator; value: the number, Var, Buffer or callee."""

    op: str
    dtype: str
    args: list[Expr] = field(default_factory=list)
    value: Any = None


@dataclass(eq=False)
class Variable:
    """An immutable variable."""

    name: str


@dataclass(eq=False)
class Stmt:
    """kind: if (args [condition], body, other), for (value variable, args [min, extent], body), store (value buffer, args
    indices + [value]), eval (args [call]), alloc (value buffer), bind (value variable, args [value])."""

    kind: str
    args: list[Expr] = field(default_factory=list)
    value: Any = None
    body: list[Stmt] = field(default_factory=list)
    other: list[Stmt] = field(default_factory=list)


@dataclass
class Kernel:
    """params: the buffers of the parameters; host: statements before the device entry; scopes: (scope, variable, extent);
    sources: CUDA text of the wrappers that are called, by name; dependent: it may start before the kernel in front has
    ended."""

    params: list[Buffer]
    host: list[Stmt]
    device: list[Stmt]
    scopes: list[tuple[str, Variable, int]]
    shared: list[Buffer]
    sources: dict[str, str] = field(default_factory=dict)
    dependent: bool = False


def read_kernel(func: tirx.PrimFunc) -> Kernel:
    """Copies a lowered kernel.  Raises UnsupportedError for a node that no kernel of this package has."""
    reader = _Reader()
    return reader.read(func)


class _Reader:
    def __init__(self) -> None:
        self.names: dict[Any, Any] = {}
        self.kernel = Kernel([], [], [], [], [])
        self.target = self.kernel.host
        self.binary: dict[str, str] = BINARY

    def read(self, func: tirx.PrimFunc) -> Kernel:
        for param in func.params:
            self.kernel.params.append(self.buffer(param, "global"))
        self.kernel.host.extend(self.stmts(func.body))
        self.kernel.dependent = DEPENDENT in [str(tag) for tag in (func.attrs or {}).get(LAUNCH_PARAMS, [])]
        return self.kernel

    # --- buffers and variables ----------------------------------------------------------------------------------------

    def buffer(self, node: Any, scope: str | None = None) -> Buffer:
        if node not in self.names:
            shape = [self.expr(extent) for extent in node.shape]
            self.names[node] = Buffer(str(node.name), str(node.dtype), shape, scope or str(node.scope()))
        return self.names[node]

    def variable(self, node: Any) -> Any:
        if node not in self.names:
            self.names[node] = Variable(str(node.name))
        return self.names[node]

    # --- statements ---------------------------------------------------------------------------------------------------

    def stmts(self, node: Any) -> list[Stmt]:
        method: Callable[[Any], list[Stmt]] | None = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise UnsupportedError(f"statement {type(node).__name__}")
        return method(node)

    def _seqstmt(self, node: Any) -> list[Stmt]:
        return [stmt for part in node.seq for stmt in self.stmts(part)]

    def _attrstmt(self, node: Any) -> list[Stmt]:
        body = self.stmts(node.body)
        if str(node.attr_key) == "tirx.device_entry":
            self.kernel.device.extend(body)
            return []
        return body

    def _scopeiddefstmt(self, node: Any) -> list[Stmt]:
        definition = getattr(node, "def")
        scope = SCOPES.get(int(definition.scope))
        if scope is None or len(definition.def_ids) != 1:
            raise UnsupportedError(f"scope id {definition}")
        extent = int(definition.extents[0])
        self.kernel.scopes.append((scope, self.variable(definition.def_ids[0]), extent))
        return []

    def _allocbuffer(self, node: Any) -> list[Stmt]:
        buffer = self.buffer(node.buffer)
        if buffer.scope in ("shared", "shared.dyn"):
            self.kernel.shared.append(buffer)
            return []
        return [Stmt("alloc", value=buffer)]

    def _declbuffer(self, node: Any) -> list[Stmt]:
        base = self.names[node.data.args[0]]
        buffer = self.buffer(node.buffer)
        buffer.view = (base, int(node.buffer.elem_offset) * buffer.item)
        return []

    def _bind(self, node: Any) -> list[Stmt]:
        return [Stmt("bind", [self.expr(node.value)], self.variable(node.var))]

    def _ifthenelse(self, node: Any) -> list[Stmt]:
        other = self.stmts(node.else_case) if node.else_case is not None else []
        return [Stmt("if", [self.expr(node.condition)], None, self.stmts(node.then_case), other)]

    def _for(self, node: Any) -> list[Stmt]:
        if node.step is not None and int(node.step) != 1:
            raise UnsupportedError(f"loop step {node.step}")
        bounds = [self.expr(node.min), self.expr(node.extent)]
        return [Stmt("for", bounds, self.variable(node.loop_var), self.stmts(node.body))]

    def _bufferstore(self, node: Any) -> list[Stmt]:
        indices = [self.expr(index) for index in node.indices]
        return [Stmt("store", [*indices, self.expr(node.value)], self.buffer(node.buffer))]

    def _evaluate(self, node: Any) -> list[Stmt]:
        value = self.expr(node.value)
        return [] if value.op == "const" else [Stmt("eval", [value])]

    # --- expressions --------------------------------------------------------------------------------------------------

    def expr(self, node: Any) -> Expr:
        kind = type(node).__name__
        if kind in ("IntImm", "FloatImm", "StringImm"):
            return self._constant(node, kind)
        if kind == "TensorLoad":
            indices = [self.expr(index) for index in node.indices]
            return Expr("load", str(node.ty), indices, self.buffer(node.source))
        if kind in self.binary:
            return Expr(self.binary[kind], str(node.ty), [self.expr(node.a), self.expr(node.b)], kind)
        if kind == "Call":
            return self._call(node)
        if kind == "Cast":
            return Expr("cast", str(node.ty), [self.expr(node.value)])
        if kind == "Select":
            return Expr(
                "select", str(node.ty), [self.expr(e) for e in (node.condition, node.true_value, node.false_value)]
            )
        if kind == "Not":
            return Expr("not", "bool", [self.expr(node.a)])
        if isinstance(node, tirx.Var):
            known = self.names.get(node)
            if isinstance(known, Buffer):
                return Expr("buffer", "handle", value=known)
            return Expr("var", str(node.ty), value=self.variable(node))
        raise UnsupportedError(f"expression {kind}")

    def _constant(self, node: Any, kind: str) -> Expr:
        if kind == "StringImm":
            return Expr("const", "string", value=str(node.value))
        dtype = str(node.ty)
        if dtype == "bool":
            return Expr("const", dtype, value=bool(node.value))
        return Expr("const", dtype, value=int(node.value) if kind == "IntImm" else float(node.value))

    def _call(self, node: Any) -> Expr:
        name = str(node.op.name).split(".", 1)[1] if isinstance(node.op, tvm.ir.Op) else str(node.op)
        args = [self.expr(arg) for arg in node.args]
        if name == "cuda.func_call":
            # the callee's name, then its arguments; its source text, a keyword, comes last
            self.kernel.sources[args[0].value] = args[-1].value
            return Expr("call", str(node.ty), args[1:-1], f"func.{args[0].value}")
        if name in BINARY_CALLS:
            return Expr(BINARY_CALLS[name], str(node.ty), args, "Bitwise")
        return Expr("call", str(node.ty), args, name)


def show(expr: Expr) -> str:
    """An expression as a person would write it, for messages."""
    if expr.op == "const":
        return str(expr.value)
    if expr.op in ("var", "buffer"):
        return expr.value.name
    if expr.op == "load":
        return f"{expr.value.name}[{', '.join(map(show, expr.args))}]"
    if expr.op == "cast":
        return show(expr.args[0])
    if expr.op == "call":
        if expr.value in ("address_of", "cuda.cvta_generic_to_shared", "reinterpret") and expr.args:
            return show(expr.args[0])
        return f"{expr.value}({', '.join(show(a) for a in expr.args if a.dtype != 'string')})"
    if len(expr.args) == 2:
        return f"({show(expr.args[0])} {expr.op} {show(expr.args[1])})"
    return f"{expr.op}({', '.join(map(show, expr.args))})"
