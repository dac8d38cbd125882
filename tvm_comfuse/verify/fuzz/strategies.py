"""Draws examples.  Everything shrinks towards one step, one tile, one CTA."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from tvm_comfuse.verify.fuzz.case import Case, Choose
from tvm_comfuse.verify.fuzz.models import INNER_ROWS, STEPS, Model, Result, Step, build
from tvm_comfuse.verify.fuzz.plans import LAYOUTS, TILES, Choice, fit

MOST_STEPS, MOST_RESULTS = 7, 3
HALVES = ("bfloat16", "float16")
#: actors as slow as possible; those that a kernel does not have slow nobody down
SLOW = (None, "wg0.w0", "wg0.w1", "wg1", "wg2", "wg3", "cta0", "cta1", "load", "store")


@dataclass(frozen=True)
class Example:
    """A model with a shape, a plan and an order of execution."""

    model: Model
    choice: Choice
    seed: int
    slow: str | None
    launches: int

    def case(self) -> tuple[Case, Choose]:
        """The case without its plan, and what chooses the plan."""
        from tvm_comfuse.schedules.device import H200

        rows, columns, depth = self.choice.sizes(self.model.row_multiple())
        module = build(self.model, rows, columns, depth)
        symbol = rows // (INNER_ROWS if self.model.leading > 1 else 1)
        case = Case(module, symbol, self.seed, self.slow, self.launches)
        return case, lambda spec: fit(self.choice, spec, H200)


_position = st.integers(0, 5)
#: what exchanges, broadcasts and keeps values alive comes more often than what only computes
_OFTEN = ("operand", "operand", "operand", "earlier", "with_row", "row_operand", "max", "sum", "layer_norm", "softmax")
_steps = st.builds(
    Step,
    name=st.one_of(st.sampled_from(_OFTEN), st.sampled_from(list(STEPS))),
    value=st.one_of(st.just(0), _position),
    other=st.integers(0, 13),
    operand=st.sampled_from(["col", "tile", "tile", "tile", "row", "scalar", "number", "const"]),
    wide=st.sampled_from([False, False, True]),
    again=st.booleans(),
)
_results = st.builds(
    Result,
    value=st.integers(0, 3),
    row=st.booleans(),
    dtype=st.sampled_from(["", *HALVES, "float32"]),
    transposed=st.sampled_from([False, False, False, False, False, True]),
)
#: the newest value always leaves, as it is or cast
_newest = st.builds(Result, dtype=st.sampled_from(["", *HALVES, "float32"]))


#: short ones first, which is where shrinking goes
_chains = st.one_of(
    st.lists(_steps, min_size=1, max_size=2),
    st.lists(_steps, min_size=2, max_size=5),
    st.lists(_steps, min_size=3, max_size=MOST_STEPS),
    st.lists(_steps, max_size=MOST_STEPS),
)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Models of one matmul."""
    more = draw(st.one_of(st.just([]), st.lists(_results, min_size=1, max_size=MOST_RESULTS - 1)))
    return Model(
        steps=tuple(draw(_chains)),
        results=(draw(_newest), *more),
        dtype=draw(st.sampled_from(HALVES)),
        layout=draw(st.sampled_from(["NK", "KN"])),
        wide=draw(st.booleans()),
        leading=draw(st.sampled_from([1, 1, 2])),
        symbolic=draw(st.booleans()),
        casts=draw(st.sampled_from([False, False, False, True])),
    )


def choices() -> st.SearchStrategy[Choice]:
    """Shapes and plans."""
    return st.builds(
        Choice,
        tile=st.integers(0, len(TILES) - 1),
        layout=st.integers(0, len(LAYOUTS) - 1),
        parts=st.sampled_from([1, 1, 1, 1, 2, 2, 3, 4, 5, 8]),
        near=st.booleans(),
        cluster_m=st.sampled_from([1, 1, 2, 4]),
        row_groups=st.integers(1, 3),
        units=st.integers(1, 7),
        missing_rows=st.one_of(st.just(0), st.integers(0, 255)),
        missing_columns=st.one_of(st.just(0), st.integers(0, 31)),
        slots=st.integers(1, 6),
        missing_depth=st.one_of(st.just(0), st.integers(0, 7)),
        depth=st.integers(2, 5),
        # few models have an operand that TMA can bring, so mostly it does
        operands=st.sampled_from([0, 0, 0, 0, 1, 2, 4, 7]),
        stores=st.integers(0, 7),
        resident=st.booleans(),
        defer=st.sampled_from([False, True, True]),
        quads=st.booleans(),
        fast=st.sampled_from([False, False, True]),
        dependent=st.sampled_from([False, False, True]),
        packed=st.booleans(),
        narrow=st.booleans(),
        in_turn=st.booleans(),
        groups=st.integers(2, 4),
        share=st.booleans(),
    )


def examples() -> st.SearchStrategy[Example]:
    """Everything of one example."""
    return st.builds(
        Example,
        model=models(),
        choice=choices(),
        seed=st.integers(0, 255),
        slow=st.sampled_from(SLOW),
        launches=st.sampled_from([1, 1, 1, 1, 2]),
    ).map(_handed_over)


def _handed_over(example: Example) -> Example:
    """For the memory layout a model with products and results in half precision; others cannot have it, and it would hardly be
    met."""
    if LAYOUTS[example.choice.layout][0] != "memory":
        return example
    model = example.model
    results = tuple(replace(each, dtype="" if each.dtype == "float32" else each.dtype) for each in model.results)
    return replace(example, model=replace(model, wide=False, results=results))
