"""The picture of a profile: the lanes of one CTA over time, and the time of all CTAs by kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tvm_comfuse.profile.report import Profile, ProfileError
from tvm_comfuse.profile.timeline import OUTSIDE, CtaTimeline, segments
from tvm_comfuse.schedules.plan import Plan
from tvm_comfuse.tir_passes.emit.stamps import MMA, WAITS, WORK

SUFFIXES = (".svg", ".png")
#: work in cold colours, waits in warm ones, what no span covers in greys
_COLOURS = dict(
    zip(
        (*WORK, *WAITS, *OUTSIDE),
        (
            "#9ecae1", "#6baed6", "#2166ac", "#053061", "#1a9850", "#66bd63", "#a6d96a", "#762a83", "#00a6a6", "#80cdc1",
            "#fdae61", "#fee08b", "#f46d43", "#d9a05b", "#e7298a", "#d73027", "#fdbf6f", "#fb9a99", "#a50026",
            "#ffd92f",
            "#d9d9d9", "#bdbdbd", "#969696",
        ),
        strict=True,
    )
)  # fmt: skip
#: bars are an image in the SVG, which would have a path for each otherwise; dots an inch
_DPI = 110
_SIZE = (11.0, 6.4)


def draw(profile: Profile, path: Path, cta: int = 0) -> None:
    """Writes the picture of a profile, SVG or PNG by the file's suffix.

    cta  which of the kept timelines is drawn
    Raises ProfileError without matplotlib or for another suffix, OSError if the file cannot be written.
    """
    check_suffix(path)
    with _plotting() as pyplot:
        figure, (above, below) = pyplot.subplots(
            2, 1, figsize=_SIZE, height_ratios=(3, 2), layout="constrained", dpi=_DPI
        )
        shown = _lanes(above, profile.timelines[cta]) | _ctas(below, profile)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in _COLOURS if kind in shown]
        names = [_label(kind) for kind in _COLOURS if kind in shown]
        figure.legend(handles, names, loc="outside right center", fontsize=7, frameon=False)
        figure.suptitle(_title(profile), fontsize=9)
        # the same profile gives the same file
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(path, metadata=nothing if path.suffix == ".svg" else None)
        pyplot.close(figure)


def check_suffix(path: Path) -> None:
    """Raises ProfileError for a file that is not drawn to, or without matplotlib."""
    if path.suffix not in SUFFIXES:
        raise ProfileError(f"a picture that ends in {' or '.join(SUFFIXES)}", str(path), f"{path.stem}.svg")
    with _plotting():
        pass


@contextmanager
def _plotting() -> Iterator[Any]:
    """matplotlib without a window, with text as text."""
    try:
        import matplotlib
    except ImportError as error:
        raise ProfileError("matplotlib", str(error), 'pip install "tvm-comfuse[report]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "comfuse", "font.size": 8}):
        yield pyplot


def _lanes(axes: Any, timeline: CtaTimeline) -> set[str]:
    """One lane for each thread that stamps; the kinds that are shown."""
    micro, flat = timeline.cycle_ns / 1e3, segments(timeline)
    lanes = list(dict.fromkeys(segment.lane for segment in flat))
    for kind in dict.fromkeys(segment.kind for segment in flat):
        for height, lane in enumerate(lanes):
            bars = [(s.begin * micro, s.cycles * micro) for s in flat if (s.kind, s.lane) == (kind, lane)]
            axes.broken_barh(bars, (height - 0.32, 0.64), color=_COLOURS[kind], linewidth=0, rasterized=True)
    for span in timeline.spans:
        if span.kind == "main loop":
            at = (span.begin * micro, lanes.index(span.lane) - 0.35)
            axes.annotate(f"step {span.step}", at, fontsize=6, va="bottom")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.cycles * micro)
    axes.set_xlabel(f"microseconds since the kernel's entry, CTA {timeline.cta}")
    return {segment.kind for segment in flat}


def _ctas(axes: Any, profile: Profile) -> set[str]:
    """A stacked bar for each CTA, from when it began: what its MMA warp groups did; the kinds that are shown."""
    summary, micro = profile.summary, profile.timelines[0].cycle_ns / 1e3
    order = [kind for kind in _COLOURS if kind in summary.kinds]
    bottom = [begin / 1e3 for begin in summary.begins_ns]
    for kind in order:
        heights = [cta[summary.kinds.index(kind)] * micro for cta in summary.ctas]
        axes.bar(range(len(heights)), heights, 1.0, bottom=bottom, color=_COLOURS[kind], linewidth=0, rasterized=True)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(-0.5, max(len(bottom) - 0.5, 0.5))
    axes.set_xlabel("CTA")
    axes.set_ylabel(f"microseconds, {MMA}s (mean)")
    return set(order)


def _label(kind: str) -> str:
    return f"waits: {kind}" if kind in WAITS else f"({kind})" if kind in OUTSIDE else kind


def _title(profile: Profile) -> str:
    times = "" if profile.us is None else f", {profile.us:.1f} us a call ({profile.us_instrumented:.1f} with stamps)"
    shape = " x ".join(map(str, profile.shape))
    return f"{profile.name} ({shape}) on {profile.device}{times}\n{Plan.from_dict(profile.plan).short()}"
