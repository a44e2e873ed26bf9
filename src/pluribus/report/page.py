"""One self-contained HTML page about runs. Its content security policy forbids it to load anything else.

Everything from a run folder is text: Jinja escapes it in the page, `_label` in plots, and `_inline` in the embedded
JSON. The policy lists the scripts by their hashes, so an injected script does not run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from pluribus.report.numbers import Run, metrics_text, selection_of
from pluribus.report.plots import Plot, Section, Series
from pluribus.storage.files import to_json
from pluribus.terminal import format_bytes

# Colors of Okabe and Ito, distinct for people with any color vision; on a dark page, lighter colors of the same hues.
PALETTE = {
    "light": ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b"],
    "dark": ["#4ea6e0", "#ff8a4c", "#2fc79c", "#e8a3c8", "#f2bf4d", "#9ad4f7", "#b5b5b5"],
}
SYMBOLS = ["circle", "diamond", "square", "cross", "triangle-up", "x"]
DASHES = ["solid", "dash", "dashdot", "longdash"]
LONGEST = 24  # characters of a label on an axis
MOST_TICKS = 40
ROW = 22  # pixels of a row with a label
HEIGHT = 400
LARGEST = 30  # diameter of the largest circle in pixels


def page(runs: Sequence[Run], sections: Sequence[Section], live: bool = False, listed: bool = False) -> str:
    """Render the page. A live page asks its server for updates. A listed page links to the list of runs."""
    data, plotly, script = map(Markup, (_inline(content(runs, sections)), _plotly(), _script()))
    values = _values(runs) | {"data": data, "plotly": plotly, "script": script, "style": page_style()}
    policy = page_policy(_plotly(), _script(), live=live)
    return _template().render(values, sections=sections, policy=policy, live=live, listed=listed)


def content(runs: Sequence[Run], sections: Sequence[Section]) -> dict[str, Any]:
    """The part of the page that changes during a run, as plain values."""
    template = _template()
    summary = "".join(template.blocks["summary"](template.new_context(_values(runs))))
    return {
        "palette": PALETTE,
        "summary": summary,
        "finished": all(run.state == "finished" for run in runs),
        "sections": [_section(one) for one in sections],
    }


def _values(runs: Sequence[Run]) -> dict[str, Any]:
    from pluribus import __version__

    title = " and ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs"
    about = {"title": title, "version": __version__, "selection": selection_of(runs)}
    about["metric"] = metrics_text(runs)
    private = any(run.epsilon is not None for run in runs)
    return about | {"private": private, "runs": runs, "human": format_bytes, "number": _format}


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _template() -> Template:
    return read_template("pluribus.report")


@cache
def read_template(package: str, name: str = "template.html") -> Template:
    """The template of a page, which escapes all values."""
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text)


def page_style() -> Markup:
    """The look of all pages."""
    return Markup(files("pluribus.report").joinpath("style.css").read_text(encoding="utf-8"))


def _plotly() -> str:
    """plotly.js with the plots that pages draw. `scripts/make_plotly.py` makes it."""
    return read_script("plotly.min.js")


def _script() -> str:
    return read_script("page.js")


@cache
def read_script(name: str) -> str:
    """A script of a page."""
    return files("pluribus.report").joinpath(name).read_text(encoding="utf-8")


def page_policy(*scripts: str, live: bool) -> str:
    """The content security policy of a page with these scripts."""
    digests = [hashlib.sha256(source.encode()).digest() for source in scripts]
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _inline(value: Any) -> str:
    """Write JSON that cannot close the HTML element around it."""
    return to_json(value).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _section(section: Section) -> dict[str, Any]:
    return {
        "key": section.key,
        "says": section.says if section.plots else section.missing,
        "plots": [{"name": plot.name, "data": _traces(plot), "layout": _layout(plot)} for plot in section.plots],
    }


def _label(text: str) -> str:
    """Escape a label, because Plotly interprets tags as markup."""
    return html.escape(text, quote=False)


def _traces(plot: Plot) -> list[dict[str, Any]]:
    largest = max((size for one in plot.series for size in one.sizes), default=1.0)
    return [_trace(one, largest) for one in plot.series]


def _trace(one: Series, largest: float) -> dict[str, Any]:
    """A trace of Plotly. `color` is an index into the light or dark palette, which the page resolves."""
    turn = one.color // len(PALETTE["light"])
    common: dict[str, Any] = {
        "name": _label(one.name),
        "x": list(one.x),
        "y": list(one.y),
        "text": [_label(text) for text in one.text],
        "hovertemplate": "%{text}<extra></extra>",
        "textposition": "none" if one.kind in ("bars", "stack") else None,
        "color": one.color % len(PALETTE["light"]),
    }
    if one.kind == "line":
        line = {"dash": "dot" if one.faint else DASHES[turn % len(DASHES)], "width": 2}
        return common | {"type": "scatter", "mode": "lines+markers", "line": line, "marker": {"size": 4}}
    if one.kind == "dots":
        symbol = SYMBOLS[turn % len(SYMBOLS)] + ("-open" if one.faint else "")
        sized = {"size": list(one.sizes), "sizemode": "area", "sizeref": 2 * largest / LARGEST**2}
        marker = {"symbol": symbol, "opacity": 0.85, **(sized if one.sizes else {"size": 9})}
        return common | {"type": "scatter", "mode": "markers", "marker": marker}
    pattern = {"shape": "/" if one.faint else "", "fillmode": "overlay", "size": 6}
    return common | {"type": "bar", "orientation": "h" if one.kind == "bars" else "v", "marker": {"pattern": pattern}}


def _layout(plot: Plot) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "xaxis": _axis(plot.x, plot.x_names, plot.bytes == "x"),
        "yaxis": _axis(plot.y, plot.y_names, plot.bytes == "y"),
        "height": max(HEIGHT, ROW * len(plot.y_names) + 140),
        "barmode": "stack" if any(one.kind == "stack" for one in plot.series) else "group",
        "showlegend": len(plot.series) > 1,
    }
    if plot.y_names:
        layout["yaxis"]["range"] = [len(plot.y_names) - 0.4, -0.6]
    if plot.square:
        for axis in ("xaxis", "yaxis"):
            layout[axis] |= {"showticklabels": False, "showgrid": False}
    return layout


def _axis(title: str, names: Sequence[str], of_bytes: bool) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": _label(title), "standoff": 12}, "automargin": True, "zeroline": False}
    if names:
        shown = range(0, len(names), math.ceil(len(names) / MOST_TICKS))
        ticks = {"tickvals": list(shown), "ticktext": [_label(_shorten(names[at])) for at in shown]}
        return axis | {"tickmode": "array", **ticks}
    return axis | ({"tickformat": "~s", "ticksuffix": "B", "rangemode": "tozero"} if of_bytes else {})


def _shorten(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
