"""From instructions to calls of an actor's methods.

One method per instruction, named after TVM's operator with dots as underscores.  Operands come first, then modifiers as
strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_comfuse.verify.interpreter.expressions import Context, Expressions, Local
from tvm_comfuse.verify.interpreter.tree import Buffer, Expr, UnsupportedError, show
from tvm_comfuse.verify.interpreter.values import Value

WRAPPERS = ("address_of", "cuda.cvta_generic_to_shared", "reinterpret")
WORD_TYPES = {"u8": "uint8", "u16": "uint16", "b16": "uint16", "u32": "uint32", "b32": "uint32", "u64": "uint64"}
WORD_TYPES |= {"b64": "uint64", "f32": "float32", "s32": "int32", "f64": "float64"}
VECTORS = {"v2": 2, "v4": 4}


def split(call: Expr) -> tuple[list[Expr], list[str]]:
    """(operands, modifiers that are not empty) of an instruction."""
    operands = [arg for arg in call.args if arg.dtype != "string"]
    return operands, [arg.value for arg in call.args if arg.dtype == "string" and arg.value]


def pointee(expr: Expr) -> Expr:
    """The load or variable that a pointer expression is the address of."""
    while expr.op == "call" and expr.value in WRAPPERS:
        expr = expr.args[0]
    return expr


@dataclass(frozen=True)
class Pointer:
    """An address: a buffer, leading indices, and bytes behind the start of that row (of the buffer for shared memory)."""

    buffer: Buffer
    leading: list[Value]
    offset: Value


class Calls(Expressions):
    """Writes instructions."""

    def __init__(self, lanes: int, tensors: dict[Buffer, str], accumulators: set[Buffer], maps: dict[Any, str]):
        super().__init__(lanes, tensors, accumulators)
        self.maps = maps
        self.pointers: dict[Any, Pointer] = {}

    def instruction(self, call: Expr, context: Context) -> None:
        """A statement that executes an instruction."""
        name = str(call.value)
        method = getattr(self, name.replace(".", "_"), None)
        if method is None and name.startswith("ptx.wgmma_"):
            method = self.ptx_wgmma
        if "prefetch" in name:
            return  # a hint: moves nothing that anybody can see
        if method is None:
            raise UnsupportedError(f"instruction {name}")
        method(call, context)

    def text(self, call: Expr, operands: list[Expr]) -> str:
        """An instruction for messages, as source text of a string."""
        return repr(
            f"{str(call.value).removeprefix('ptx.').removeprefix('cuda.')}({', '.join(map(show, operands))})"[:120]
        )

    # --- operands -----------------------------------------------------------------------------------------------------

    def code(self, expr: Expr, context: Context) -> str:
        """Source of an operand."""
        return self.value(expr, context).code

    def mbarrier(self, expr: Expr, context: Context) -> str:
        """Source of (array name, index) of the mbarrier an operand points to."""
        place = pointee(expr)
        if place.op != "load" or place.value.scope != "shared":
            raise UnsupportedError(f"an mbarrier at {show(expr)}")
        return f"{place.value.name!r}, {self.code(place.args[0], context)}"

    def pointer(self, expr: Expr, context: Context) -> Pointer:
        """The address an operand holds."""
        if expr.op == "var" and expr.value in self.pointers:
            base = self.pointers[expr.value]
            leading = [self.narrowed(part, context) for part in base.leading]
            return Pointer(base.buffer, leading, self.narrowed(base.offset, context))
        if expr.op == "call" and expr.value == "handle_add_byte_offset":
            base, more = self.pointer(expr.args[0], context), self.value(expr.args[1], context)
            return Pointer(
                base.buffer, base.leading, self.made(f"({base.offset.code} + {more.code})", [base.offset, more])
            )
        if expr.op == "call" and expr.value in WRAPPERS:
            return self.pointer(expr.args[0], context)
        if expr.op != "load" or expr.value.scope not in ("global", "shared.dyn"):
            raise UnsupportedError(f"an address {show(expr)}")
        if expr.value.scope == "shared.dyn":
            return Pointer(expr.value, [], self.byte_address(expr.value, expr.args, context))
        *leading, last = [self.value(index, context) for index in expr.args]
        return Pointer(expr.value, leading, self.made(f"({last.code} * {expr.value.item})", [last]))

    def is_pointer(self, expr: Expr) -> bool:
        """Whether an expression is an address of global or dynamic shared memory."""
        while expr.op == "call" and expr.value in (*WRAPPERS, "handle_add_byte_offset"):
            if expr.value == "reinterpret" and not expr.dtype.startswith("T.handle"):
                return False
            expr = expr.args[0]
            if expr.op == "load":
                return expr.value.scope in ("global", "shared.dyn")
        return expr.op == "var" and expr.value in self.pointers

    def keep_pointer(self, variable: Any, expr: Expr, context: Context) -> None:
        """Binds a variable to an address."""
        pointer = self.pointer(expr, context)

        def kept(value: Value) -> Value:
            return value if value.is_known else Value(self.temporary(value.code, "p"), value.varying)

        self.pointers[variable] = Pointer(
            pointer.buffer, [kept(part) for part in pointer.leading], kept(pointer.offset)
        )

    def shared(self, expr: Expr, context: Context) -> str:
        """Source of the byte address in shared memory an operand holds."""
        pointer = self.pointer(expr, context)
        if pointer.buffer.scope != "shared.dyn":
            raise UnsupportedError(f"{show(expr)} where an address in shared memory is needed")
        return pointer.offset.code

    def element(self, pointer: Pointer) -> tuple[str, bool]:
        """Source of (tensor, indices) of an address in global memory, and whether it differs between lanes."""
        indices = ", ".join(
            [*(part.code for part in pointer.leading), f"{pointer.offset.code} // {pointer.buffer.item}"]
        )
        varying = any(part.varying for part in (*pointer.leading, pointer.offset))
        return f"{self.tensors[pointer.buffer]}, ({indices},)", varying

    def target(self, expr: Expr, context: Context) -> tuple[Local, Value]:
        """The register an operand writes to."""
        place = pointee(expr)
        return self.locals[place.value], self.index(place.value, place.args, context)

    def write(self, cells: Local, index: Value, value: Value, context: Context) -> None:
        """Stores to a register."""
        raise NotImplementedError

    def put(self, expr: Expr, code: str, context: Context, varying: bool | None = None) -> None:
        """Stores source text to the register that an operand names."""
        cells, index = self.target(expr, context)
        self.write(cells, index, Value(code, context.lane is None if varying is None else varying), context)

    # --- barriers -----------------------------------------------------------------------------------------------------

    def ptx_mbarrier_init(self, call: Expr, context: Context) -> None:
        (barrier, count), _ = split(call)
        where = self.text(call, [barrier])
        arguments = f"{self.mbarrier(barrier, context)}, {self.code(count, context)}, {context.argument}, {where}"
        self.emit(f"ag.mbarrier_init({arguments})")

    def ptx_mbarrier_arrive(self, call: Expr, context: Context, method: str = "arrive") -> None:
        (barrier, count), _ = split(call)
        where = self.text(call, [barrier])
        arguments = f"{self.mbarrier(barrier, context)}, {self.code(count, context)}, {context.argument}, {where}"
        self.emit(f"ag.{method}({arguments})")

    def ptx_mbarrier_arrive_expect_tx(self, call: Expr, context: Context) -> None:
        self.ptx_mbarrier_arrive(call, context, "arrive_expect")

    def cuda_mbarrier_wait(self, call: Expr, context: Context) -> None:
        (barrier, parity), _ = split(call)
        where = self.text(call, [barrier])
        arguments = f"{self.mbarrier(barrier, context)}, {self.code(parity, context)}, {context.argument}, {where}"
        self.emit(f"yield from ag.wait({arguments})")

    def func_comfuse_arrive_at(self, call: Expr, context: Context) -> None:
        barrier, rank = call.args
        where = self.text(call, [barrier])
        arguments = f"{self.mbarrier(barrier, context)}, {self.code(rank, context)}, {context.argument}, {where}"
        self.emit(f"ag.arrive_at({arguments})")

    def cuda_cta_sync(self, call: Expr, context: Context) -> None:
        self.emit(f"yield from ag.named_sync(None, None, {context.argument}, 'cta_sync')")

    def cuda_warp_sync(self, call: Expr, context: Context) -> None:
        """Lanes of a warp go in step here."""

    def ptx_barrier_sync_count(self, call: Expr, context: Context, method: str = "named_sync") -> None:
        operands, _ = split(call)
        number, count = (self.code(operand, context) for operand in operands)
        self.emit(f"yield from ag.{method}({number}, {count}, {context.argument}, {self.text(call, operands)})")

    def ptx_barrier_arrive(self, call: Expr, context: Context) -> None:
        self.ptx_barrier_sync_count(call, context, "named_arrive")

    def ptx_barrier_cluster_arrive(self, call: Expr, context: Context) -> None:
        self.emit(f"yield from ag.cluster_arrive({context.argument}, 'barrier.cluster.arrive')")

    def ptx_barrier_cluster_wait(self, call: Expr, context: Context) -> None:
        self.emit(f"yield from ag.cluster_wait({context.argument}, 'barrier.cluster.wait')")

    def ptx_griddepcontrol(self, call: Expr, context: Context) -> None:
        """The wait for the kernel in front; that the next one may start changes nothing here."""
        if "wait" in split(call)[1]:
            self.emit("ag.depends = False")

    def ptx_fence_mbarrier_init(self, call: Expr, context: Context) -> None:
        self.emit("ag.fence_init()")

    def ptx_fence_proxy(self, call: Expr, context: Context) -> None:
        _, modifiers = split(call)
        if "async" in modifiers:
            self.emit(f"ag.fence_proxy({context.argument})")

    def ptx_setmaxnreg(self, call: Expr, context: Context) -> None:
        (count,), modifiers = split(call)
        where = self.text(call, [count])
        more = "inc" in modifiers
        self.emit(f"yield from ag.set_registers({self.code(count, context)}, {more}, {context.argument}, {where})")

    # --- TMA ----------------------------------------------------------------------------------------------------------

    def tensor_map(self, expr: Expr) -> str:
        """Source of the tensor map that an operand points to."""
        place = pointee(expr)
        if place.value not in self.maps:
            raise UnsupportedError(f"a tensor map at {show(expr)}")
        return self.maps[place.value]

    def ptx_cp_async_bulk_tensor_g2s_cluster(self, call: Expr, context: Context) -> None:
        operands, modifiers = split(call)
        multicast = "multicast::cluster" in modifiers
        rank = next((rank for rank in (2, 5) if f"{rank}d" in modifiers), 0)
        if not rank or len(operands) != 3 + rank + multicast:
            raise UnsupportedError(f"a TMA load with {modifiers}")
        smem, tensor_map, *coordinates = operands[: 2 + rank]
        barrier = operands[2 + rank]
        at = f"({', '.join(self.code(coordinate, context) for coordinate in coordinates)})"
        targets = self.code(operands[-1], context) if multicast else "None"
        arguments = (
            f"{self.tensor_map(tensor_map)}, {at}, {self.shared(smem, context)}, ({self.mbarrier(barrier, context)})"
        )
        self.emit("yield None")
        self.emit(f"ag.tma_load({arguments}, {targets}, {context.argument}, {self.text(call, [smem, tensor_map])})")

    def ptx_cp_async_bulk_tensor_s2g(self, call: Expr, context: Context) -> None:
        operands, modifiers = split(call)
        if "2d" not in modifiers or len(operands) != 4:
            raise UnsupportedError(f"a TMA store with {modifiers}")
        tensor_map, column, row, smem = operands
        at = f"({self.code(column, context)}, {self.code(row, context)})"
        arguments = f"{self.tensor_map(tensor_map)}, {at}, {self.shared(smem, context)}, {context.argument}"
        self.emit("yield None")
        self.emit(f"ag.tma_store({arguments}, {self.text(call, [tensor_map, smem])})")

    def ptx_cp_async_bulk_prefetch_tensor(self, call: Expr, context: Context) -> None:
        """Brings nothing but speed."""

    def ptx_cp_async_bulk_commit_group(self, call: Expr, context: Context) -> None:
        self.emit(f"ag.bulk_commit({context.argument})")

    def ptx_cp_async_bulk_wait_group(self, call: Expr, context: Context) -> None:
        (most,), _ = split(call)
        self.emit("yield None")
        self.emit(f"ag.bulk_wait({self.code(most, context)}, {context.argument})")

    # --- wgmma --------------------------------------------------------------------------------------------------------

    def cuda_wgmma_encode_matrix_descriptor(self, call: Expr, context: Context) -> None:
        (cell, address, *fields), _ = split(call)
        numbers = ", ".join(self.code(field, context) for field in fields)
        where = self.text(call, [address])
        self.put(
            cell, f"ag.encode({self.shared(address, context)}, {numbers}, {context.argument}, {where})", context, False
        )

    def ptx_wgmma_fence(self, call: Expr, context: Context) -> None:
        self.emit(f"ag.wgmma_fence({context.argument}, 'wgmma.fence')")

    def ptx_wgmma_commit_group(self, call: Expr, context: Context) -> None:
        self.emit(f"ag.wgmma_commit({context.argument}, 'wgmma.commit_group')")

    def ptx_wgmma_wait_group(self, call: Expr, context: Context) -> None:
        (most,), _ = split(call)
        self.emit("yield None")
        self.emit(f"ag.wgmma_wait({self.code(most, context)}, {context.argument}, 'wgmma.wait_group')")

    def ptx_wgmma(self, call: Expr, context: Context) -> None:
        """wgmma.mma_async of two descriptors."""
        operands, modifiers = split(call)
        shape = next((m for m in modifiers if m.startswith("m64n")), "")
        if not str(call.value).endswith("_ss") or not shape.endswith("k16") or "f32" not in modifiers:
            raise UnsupportedError(f"{call.value} with {modifiers}")
        columns = int(shape[4:-3])
        registers, rest = operands[: columns // 2], operands[columns // 2 :]
        a, b, add, *signs = rest
        signs, transposed = signs[:2], signs[2:]
        cells, first = self.target(registers[0], context)
        places = [self.target(register, context) for register in registers]
        if any(p[0] is not cells or p[1].known != first.known + i for i, p in enumerate(places)) or any(
            self.value(sign, context).known != 1 for sign in signs
        ):
            raise UnsupportedError(f"{call.value} with scattered accumulators or negated operands")
        a_code, b_code, add_code = (self.code(expr, context) for expr in (a, b, add))
        a_flip, b_flip = (self.code(expr, context) for expr in transposed)
        half = "bf16" if "bf16" in modifiers else "f16"
        where = repr(f"wgmma {shape} to {cells.buffer.name}[{first.code}..]")
        self.emit(
            f"ag.wgmma_issue({cells.name}, {first.code}, {cells.valid}, {columns}, ({a_code}, {a_flip}, {b_code}, {b_flip}), "
            f"{add_code}, {half!r}, {context.argument}, {where})"
        )

    def func_comfuse_pin(self, call: Expr, context: Context) -> None:
        """Keeps a register where it is."""
        place = pointee(call.args[0])
        if place.op == "load" and place.value in self.locals:
            self.check_flight(self.locals[place.value])

    def func_comfuse_opaque(self, call: Expr, context: Context) -> None:
        """Only the CUDA compiler cares."""

    # --- loads, stores, conversions -----------------------------------------------------------------------------------

    def ptx_ld_vec(self, call: Expr, context: Context) -> None:
        self.ptx_ld(call, context)

    def ptx_ld(self, call: Expr, context: Context) -> None:
        (*outputs, address), modifiers = split(call)
        count = next((VECTORS[m] for m in modifiers if m in VECTORS), 1)
        dtype = self.dtype(next(WORD_TYPES[m] for m in modifiers if m in WORD_TYPES))
        where = self.text(call, [address])
        pointer = self.pointer(address, context)
        if pointer.buffer.scope == "shared.dyn":
            code = f"ag.load_shared({pointer.offset.code}, {dtype}, {count}, {context.argument}, {where})"
            got, varying = self.temporary(code), context.lane is None
        else:
            place, varying = self.element(pointer)
            got = self.temporary(f"ag.load_global({place}, {count}, {context.argument}, {where}, {dtype})")
            varying = varying or context.mask is not None
        for number, output in enumerate(outputs):
            self.put(output, f"{got}[{number}]", context, varying)

    def ptx_st_vec(self, call: Expr, context: Context) -> None:
        self.ptx_st(call, context)

    def ptx_st(self, call: Expr, context: Context) -> None:
        (address, *inputs), modifiers = split(call)
        dtype = self.dtype(next(WORD_TYPES[m] for m in modifiers if m in WORD_TYPES))
        where = self.text(call, [address])
        values = "[" + ", ".join(self.code(value, context) for value in inputs) + "]"
        pointer = self.pointer(address, context)
        if pointer.buffer.scope == "shared.dyn":
            self.emit(f"ag.store_shared({pointer.offset.code}, {values}, {dtype}, {context.argument}, {where})")
            return
        place, _ = self.element(pointer)
        self.emit(f"ag.store_global({place}, {values}, {context.argument}, {where}, {dtype})")

    def ptx_ldmatrix(self, call: Expr, context: Context) -> None:
        (*outputs, address), modifiers = split(call)
        self.plain_matrix(modifiers)
        where = self.text(call, [address])
        code = f"ag.load_matrix({self.shared(address, context)}, {len(outputs)}, {context.argument}, {where})"
        got = self.temporary(code)
        for number, output in enumerate(outputs):
            self.put(output, f"{got}[{number}]", context)

    def ptx_stmatrix(self, call: Expr, context: Context) -> None:
        (address, *inputs), modifiers = split(call)
        self.plain_matrix(modifiers)
        values = "[" + ", ".join(self.code(value, context) for value in inputs) + "]"
        where = self.text(call, [address])
        self.emit(f"ag.store_matrix({self.shared(address, context)}, {values}, {context.argument}, {where})")

    def plain_matrix(self, modifiers: list[str]) -> None:
        """Raises UnsupportedError for a matrix instruction of other elements or order."""
        if "m8n8" not in modifiers or "b16" not in modifiers or "trans" in modifiers:
            raise UnsupportedError(f"a matrix instruction with {modifiers}")

    def ptx_cvt_bf16x2_f32(self, call: Expr, context: Context, dtype: str = "bfloat16") -> None:
        (output, high, low), modifiers = split(call)
        if "rn" not in modifiers:
            raise UnsupportedError(f"a conversion with {modifiers}")
        parts = [self.value(high, context), self.value(low, context)]
        self.put(output, f"pack({parts[0].code}, {parts[1].code}, {dtype})", context, any(p.varying for p in parts))

    def ptx_cvt_f16x2_f32(self, call: Expr, context: Context) -> None:
        self.ptx_cvt_bf16x2_f32(call, context, "np.float16")
