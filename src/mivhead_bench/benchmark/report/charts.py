"""Charts of a comparison, drawn with matplotlib as SVG."""

from __future__ import annotations

import math
from io import BytesIO, StringIO
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text

from mivhead.diagnostics.pictures import FOR, INK, PALE
from mivhead_bench.benchmark.compare import Comparison, merge_bins
from mivhead_bench.benchmark.report.accuracy import Series, reference, set_title
from mivhead_bench.benchmark.report.costs import costliest, latency
from mivhead_bench.benchmark.report.formats import Chart

OURS = FOR
COLOURS = ("#3b6fb6", "#c2703d", "#8457a6", "#b83b5e", "#6b8e23", "#4fa3a5", "#946c3c", "#666f78")
COLUMNS = 4  # panels side by side
PNG_DPI = 200
MAX_CURVES = 6  # methods in a calibration chart
LABEL = {"fontsize": 9, "color": INK, "parse_math": False}  # a $ in a name is a dollar sign


def accuracy_bars(comparison: Comparison) -> Chart:
    """Draw one panel per set with a bar per method and its interval."""
    colours, methods = _colours(comparison), comparison.methods
    rows = math.ceil(len(comparison.sets) / COLUMNS)
    columns = min(COLUMNS, len(comparison.sets))
    figure = _figure(3.1 * columns + 0.6, rows * (0.55 + 0.24 * len(methods)))
    for place, name in enumerate(comparison.sets):
        axes = _axes(figure, rows, columns, place + 1)
        axes.set_title(set_title(name), fontsize=9, color=INK, loc="left")
        for row, method in enumerate(methods):
            cell = comparison.cell(name, method)
            if cell.summary is None:
                axes.text(1, row, cell.state, fontsize=7, va="center", color=INK)
                continue
            value, half = 100 * cell.summary.mean, 100 * cell.summary.half_width
            axes.barh(row, value, height=0.68, color=colours[method])
            axes.errorbar(value, row, xerr=half, ecolor=INK, capsize=2, linewidth=0.9)
            axes.text(2, row, f"{value:.1f}", va="center", fontsize=7, color="white")
        axes.set(xlim=(0, 100), ylim=(len(methods) - 0.5, -0.5))
        names = methods if place % columns == 0 else [""] * len(methods)
        axes.set_yticks(range(len(methods)), names, parse_math=False)
    return _chart("Accuracy in % with 95% intervals", comparison, figure)


def series_chart(comparison: Comparison, series: Series) -> Chart:
    """Draw accuracy as a line and GFLOPs as bars."""
    figure = _figure(5.2, 3.4)
    bars = _axes(figure)
    numbers = [p.number for p in series.points]
    bars.bar(numbers, [p.gflops for p in series.points], color="#cfdce6", width=0.5)
    bars.set_ylabel("GFLOPs as the paper counts (bars)", **LABEL)
    bars.set_xlabel(series.title, **LABEL)
    bars.set_xticks(numbers)
    line = bars.twinx()
    line.plot(numbers, [p.accuracy for p in series.points], color=OURS, marker="o")
    line.set_ylabel("accuracy in % (line)", fontsize=9, color=OURS)
    line.margins(y=0.3)
    for point in series.points:
        line.annotate(
            f"{point.accuracy:.1f}",
            (point.number, point.accuracy),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=OURS,
        )
    line.spines[["top", "left"]].set_visible(False)
    line.tick_params(colors=INK, labelsize=8)
    return _chart(f"Accuracy and GFLOPs over {series.title}", comparison, figure)


def cost_bars(comparison: Comparison) -> Chart | None:
    """Draw the cost per set of the costliest rival, and ours as a percentage of it."""
    ours, rival = reference(comparison), costliest(comparison)
    if rival is None or not comparison.complete:
        return None
    figure = _figure(max(6.0, 0.62 * len(comparison.complete) + 2), 5.4)
    for place, title in enumerate(("GFLOPs (the paper's count)", "seconds")):
        axes = _axes(figure, 2, 1, place + 1)
        for column, name in enumerate(comparison.complete):
            cells = [comparison.cell(name, m) for m in (rival, ours)]
            rival_cost, our_cost = (
                c.mean("gflops_authors") if place == 0 else latency(c).train for c in cells
            )
            axes.bar(column - 0.19, rival_cost, width=0.38, color="#5b7c99", label=rival)
            axes.bar(column + 0.19, our_cost, width=0.38, color="#a9d5c3", label=ours)
            text = f"{100 * our_cost / rival_cost:.0f}%" if rival_cost else "-"
            axes.text(
                column + 0.19, our_cost, text, ha="center", va="bottom", fontsize=7, color=INK
            )
        axes.set_ylabel(f"{title} of adaptation", **LABEL)
        axes.margins(y=0.15)
        names = [set_title(s) for s in comparison.complete] if place else []
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right", parse_math=False)
        if place == 0:
            handles, labels = axes.get_legend_handles_labels()
            style: dict[str, Any] = {"fontsize": 8, "frameon": False, "ncols": 2}
            figure.legend(handles[:2], labels[:2], loc="outside upper left", **style)
    caption = f"Cost of adaptation per task: {ours}, as a percentage of {rival}"
    return _chart(caption, comparison, figure)


def reliability(comparison: Comparison) -> Chart | None:
    """Draw accuracy over confidence; None if no confidences were recorded."""
    colours, figure = _colours(comparison), _figure(4.8, 4.2)
    axes = _square(figure)
    for method in comparison.methods[:MAX_CURVES]:
        results = (r for s in comparison.sets for r in comparison.cell(s, method).results)
        bins = merge_bins(r.calibration for r in results)
        bins = bins[bins[:, 0] > 0]
        if len(bins):
            confidence, right = 100 * bins.T[1:] / bins[:, 0]
            style: dict[str, Any] = {"marker": "o", "markersize": 3, "color": colours[method]}
            axes.plot(confidence, right, label=method, **style)
    if not axes.get_legend_handles_labels()[0]:
        return None
    axes.set_xlabel("confidence in %", **LABEL)
    axes.set_ylabel("accuracy in %", **LABEL)
    axes.legend(fontsize=7, frameon=False)
    return _chart("Calibration: the diagonal is perfect", comparison, figure)


def _colours(comparison: Comparison) -> dict[str, str]:
    ours = reference(comparison)
    others = [m for m in comparison.methods if m != ours]
    return {ours: OURS} | {m: COLOURS[i % len(COLOURS)] for i, m in enumerate(others)}


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _axes(figure: Figure, *place: int) -> Any:
    """Add a panel without a frame at the top and on the right."""
    axes = figure.add_subplot(*place)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.tick_params(which="both", colors=INK, labelsize=8)
    return axes


def _square(figure: Figure) -> Any:
    """Add a square panel of percentages with its diagonal."""
    axes = _axes(figure)
    axes.plot([0, 100], [0, 100], color=PALE, linewidth=1)
    axes.set(xlim=(0, 101), ylim=(0, 101), box_aspect=1)
    return axes


def _chart(caption: str, comparison: Comparison, figure: Figure) -> Chart:
    """Write a figure as SVG, PDF and PNG; the same figure always gives the same files."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a $ in a name is a dollar sign
    out, pdf, png = StringIO(), BytesIO(), BytesIO()
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "mivhead",
        "font.family": "sans-serif",
    }
    with rc_context(settings):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(pdf, format="pdf", metadata={"CreationDate": None, "Creator": None})
        figure.savefig(png, format="png", dpi=PNG_DPI)
    title = f"{caption} ({comparison.backbone}, {comparison.protocol})"
    return Chart(title, out.getvalue(), {"pdf": pdf.getvalue(), "png": png.getvalue()})
