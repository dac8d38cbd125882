"""Instructions the PTX table lacks, or that need a value back: one-line CUDA wrappers, each with the reason it exists."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_comfuse.tir_passes.emit.dsl import do

Expr = Any

TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
TMA_LOAD_5D = TMA_LOAD.replace("2d", "5d")
MULTICAST = ".multicast::cluster"
TMA_PREFETCH = "cp.async.bulk.prefetch.tensor.2d.L2.global"
TMA_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"

_EXTREME = """__device__ __forceinline__ float comfuse_{op}(float a, float b) {{ float r;
  asm("{op}.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }}
"""
#: PTX ISA: tanh.approx has a relative error of 2**-11, ex2.approx one of 2**-22; 1.442695 is log2(e)
_APPROXIMATE = {
    "tanh": """__device__ __forceinline__ float comfuse_tanh(float x) { float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
""",
    "exp": """__device__ __forceinline__ float comfuse_exp(float x) { float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x * 1.4426950408889634f)); return r; }
""",
}
_PIN = """__device__ __forceinline__ void comfuse_pin(float& r) { asm volatile("" : "+f"(r) :: "memory"); }
__device__ __forceinline__ void comfuse_pin(unsigned& r) { asm volatile("" : "+r"(r) :: "memory"); }
"""
#: on the two half-precision numbers of a word.  The instruction table has them too, as statements that the compiler may not
#: move; these are expressions
_PACKED = {
    "fma": ("fma.rn.{kind} %0, %1, %2, %3;", 3),
    "add": ("add.rn.{kind} %0, %1, %2;", 2),
    "sub": ("sub.rn.{kind} %0, %1, %2;", 2),
    "mul": ("mul.rn.{kind} %0, %1, %2;", 2),
    "max": ("max.NaN.{kind} %0, %1, %2;", 2),
}
_PACK = """__device__ __forceinline__ unsigned comfuse_pack_{kind}(float low, float high) {{ unsigned r;
  asm("cvt.rn.{kind}.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }}
"""
#: packed types by what they are two of
_PACKED_KINDS = {"bfloat16": "bf16x2", "float16": "f16x2"}
_OPAQUE = '__device__ __forceinline__ void comfuse_opaque(int& r) { asm volatile("" : "+r"(r)); }\n'
_ANY = """__device__ __forceinline__ bool comfuse_any(int held) { return __any_sync(0xffffffffu, held); }
"""
_ARRIVE_AT = """__device__ __forceinline__ void comfuse_arrive_at(void* bar, unsigned rank) {
  unsigned a = (unsigned)__cvta_generic_to_shared(bar), r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(r) : "memory"); }
"""
_POST_CLUSTER = """__device__ __forceinline__ void comfuse_post_cluster(void* slot, unsigned rank, float v, unsigned tag) {
  unsigned a = (unsigned)__cvta_generic_to_shared(slot), r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
  unsigned long long w = ((unsigned long long)tag << 32) | __float_as_uint(v);
  asm volatile("st.relaxed.cluster.shared::cluster.b64 [%0], %1;" :: "r"(r), "l"(w) : "memory"); }
"""
_POST_GRID = """__device__ __forceinline__ void comfuse_post_grid(void* slot, float v, unsigned tag) {
  unsigned long long w = ((unsigned long long)tag << 32) | __float_as_uint(v);
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" :: "l"(slot), "l"(w) : "memory"); }
"""
_CLOCK = """__device__ __forceinline__ unsigned comfuse_clock() { unsigned now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)); return now; }
"""
#: without a branch, and never 0, which is a stamp that is not there
_STAMP = """__device__ __forceinline__ void comfuse_stamp(void* at, int keep) {
  asm volatile("{ .reg .pred p; .reg .u32 now; setp.ne.s32 p, %1, 0; mov.u32 now, %%clock; max.u32 now, now, 1;"
               " @p st.global.u32 [%0], now; }" :: "l"(at), "r"(keep) : "memory"); }
"""
_ANCHOR = """__device__ __forceinline__ void comfuse_anchor(void* at, unsigned entry) {
  unsigned now; unsigned long long time;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(at), "r"(entry), "r"(now), "r"((unsigned)time), "r"((unsigned)(time >> 32)) : "memory"); }
"""
#: how a slot's word is read, by scope
_TAKE_LOADS = {
    "cluster": 'asm volatile("ld.relaxed.cluster.shared::cta.b64 %0, [%1];" : "=l"(w{i}) '
    ': "r"((unsigned)__cvta_generic_to_shared(s{i})) : "memory");',
    "grid": 'asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(w{i}) : "l"(s{i}) : "memory");',
}


def extreme(op: str, a: Expr, b: Expr) -> Expr:
    """`max` or `min` of two float32 numbers, NaN if one of them is.  T.max and T.min give the other one then, as CUDA's
    functions do."""
    return T.cuda.func_call(f"comfuse_{op}", a, b, source_code=_EXTREME.format(op=op), return_type="float32")


def approximate(op: str, argument: Expr) -> Expr | None:
    """`tanh` or `exp` of a float32 number by the special function unit; None for other functions."""
    if op not in _APPROXIMATE:
        return None
    return T.cuda.func_call(f"comfuse_{op}", argument, source_code=_APPROXIMATE[op], return_type="float32")


def packed(op: str, dtype: str, *words: Expr) -> Expr:
    """fma, add, sub, mul or max (NaN if one is) of the two half-precision numbers in each word; each result is rounded once."""
    text, count = _PACKED[op]
    kind, names = _PACKED_KINDS[dtype], "abc"[:count]
    name = f"comfuse_{op}_{kind}"
    parameters, inputs = (", ".join(form.format(n) for n in names) for form in ("unsigned {}", '"r"({})'))
    source = (
        f"__device__ __forceinline__ unsigned {name}({parameters}) {{ unsigned r;\n"
        f'  asm("{text.format(kind=kind)}" : "=r"(r) : {inputs}); return r; }}\n'
    )
    return T.cuda.func_call(name, *words, source_code=source, return_type="uint32")


def packed_of(low: Expr, high: Expr, dtype: str) -> Expr:
    """Two float32 numbers, rounded, as a word."""
    kind = _PACKED_KINDS[dtype]
    return T.cuda.func_call(
        f"comfuse_pack_{kind}", low, high, source_code=_PACK.format(kind=kind), return_type="uint32"
    )


def pin(register: Expr) -> None:
    """Keeps the compiler from moving reads of an accumulator above the wait for its wgmma.

    `T.cuda.wgmma.noop_barrier` is meant for this; in TVM 0.27 it takes the register by value.
    """
    do(T.cuda.func_call("comfuse_pin", register, source_code=_PIN))


def any_of_warp(held: Expr) -> Expr:
    """Whether an integer is not zero in some lane of the warp, all of whose lanes ask."""
    return T.cuda.func_call("comfuse_any", held, source_code=_ANY, return_type="bool")


def opaque(register: Expr) -> None:
    """Makes the compiler forget where an integer comes from, so that nothing computed from it moves to an earlier place."""
    do(T.cuda.func_call("comfuse_opaque", register, source_code=_OPAQUE))


def arrive_at(barrier: Expr, rank: Expr) -> None:
    """Arrives on the same barrier of CTA `rank` of the cluster."""
    do(T.cuda.func_call("comfuse_arrive_at", barrier, T.cast(rank, "uint32"), source_code=_ARRIVE_AT))


def post_cluster(slot: Expr, rank: Expr, value: Expr, tag: Expr) -> None:
    """Writes (value, tag) as one 8-byte store to the slot's counterpart in CTA `rank`."""
    do(T.cuda.func_call("comfuse_post_cluster", slot, T.cast(rank, "uint32"), value, tag, source_code=_POST_CLUSTER))


def post_grid(slot: Expr, value: Expr, tag: Expr) -> None:
    """Writes (value, tag) as one 8-byte store to a slot in global memory."""
    do(T.cuda.func_call("comfuse_post_grid", slot, value, tag, source_code=_POST_GRID))


def take(scope: str, tag: Expr, slots: list[Expr], registers: list[Expr]) -> None:
    """Waits until every slot, in this CTA's shared memory (cluster) or in global memory (grid), has the tag; then the
    registers hold their values.

    All slots are read in each round of the wait: their latencies overlap.
    """
    count = range(len(slots))
    name = f"comfuse_take_{scope}_{len(slots)}"
    parameters = [f"void* s{i}" for i in count] + [f"float& v{i}" for i in count]
    lines = [
        f"__device__ __forceinline__ void {name}(unsigned tag, {', '.join(parameters)}) {{",
        f"  unsigned long long {', '.join(f'w{i}' for i in count)};",
        "  do {",
        *[f"    {_TAKE_LOADS[scope].format(i=i)}" for i in count],
        f"  }} while ({' || '.join(f'(unsigned)(w{i} >> 32) != tag' for i in count)});",
        *[f"  v{i} = __uint_as_float((unsigned)w{i});" for i in count],
        "}",
        "",
    ]
    do(T.cuda.func_call(name, tag, *slots, *registers, source_code="\n".join(lines)))


def clock() -> Expr:
    """The cycles of this SM's clock, uint32: it wraps."""
    return T.cuda.func_call("comfuse_clock", source_code=_CLOCK, return_type="uint32")


def stamp(at: Expr, keep: Expr) -> None:
    """Writes this SM's clock, uint32, to global memory where `keep` holds."""
    do(T.cuda.func_call("comfuse_stamp", at, T.cast(keep, "int32"), source_code=_STAMP))


def anchor(at: Expr, entry: Expr) -> None:
    """Writes four words to global memory: `entry`, this SM's clock, and the GPU's nanoseconds, the low word first."""
    do(T.cuda.func_call("comfuse_anchor", at, entry, source_code=_ANCHOR))
