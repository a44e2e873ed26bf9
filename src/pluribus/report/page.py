"""One self-contained HTML page about runs. Its content security policy forbids it to load anything else.

Everything from a run folder is text: Jinja and markupsafe escape it in the page, page.js in plots, and `_inline` in the
embedded JSON. The policy lists the scripts by their hashes, so an injected script does not run.
"""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from pluribus.internal.tables import Table
from pluribus.report.groups import Group, all_runs, group_runs, seeds_text, what_names
from pluribus.report.numbers import Parameters, Run, metrics_text, selection_of
from pluribus.report.plots.series import Plot, Section, Series
from pluribus.report.views import about_view, known_views
from pluribus.storage.files import to_json
from pluribus.study.standings import Spread
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
COUNTED = ("round", "trial")  # axes of whole numbers
MOST_NAMED = 3  # groups in the title, or in a cell
ROW = 22  # pixels of a row with a label
HEIGHT = 400
LARGEST = 30  # diameter of the largest circle in pixels


def page(runs: Sequence[Run], sections: Sequence[Section], live: bool = False, listed: bool = False) -> str:
    """Render the page. A live page asks its server for updates. A listed page links to the list of runs."""
    shown, groups = content(runs, sections), group_runs(runs)
    data, plotly, script = map(Markup, (_inline(shown), _plotly(), _script()))
    values = _values(groups) | {"data": data, "plotly": plotly, "script": script, "style": page_style()}
    summary, tables = Markup(shown["views"][0]["summary"]), {one.key: _tables(one) for one in sections}
    parts = {"summary": summary, "sections": sections, "tables": tables, "parameters": _parameters(groups)}
    policy = page_policy(_plotly(), _script(), live=live)
    return _template().render(values | parts, policy=policy, live=live, listed=listed)


def content(runs: Sequence[Run], sections: Sequence[Section]) -> dict[str, Any]:
    """The part of the page that changes during a run, as plain values."""
    groups = group_runs(runs)
    views = known_views(groups)
    first = next(iter(views))
    return {
        "palette": PALETTE,
        "views": [
            {"key": view, "text": text, "says": about_view(groups, view), "summary": _summary(groups, view)}
            for view, text in views.items()
        ],
        "finished": all(run.state == "finished" for run in runs),
        "sections": [_section(one, first) for one in sections],
    }


def _values(groups: Sequence[Group]) -> dict[str, Any]:
    from pluribus import __version__

    runs, seeds = all_runs(groups), seeds_text(groups)
    title = f"{len(runs)} runs"
    if len(groups) <= MOST_NAMED:
        *others, last = [group.name for group in groups]
        names = f"{', '.join(others)} and {last}" if others else last
        title = f"{names}, {seeds}" if seeds else names
    about = {"title": title, "version": __version__, "selection": selection_of(runs), "metric": metrics_text(runs)}
    private = any(run.epsilon is not None for run in runs)
    return (
        about
        | {"private": private, "groups": groups, "seeds": seeds, "human": format_bytes, "number": _format}
        | {"what": what_names(groups)}
    )


def _parameters(groups: Sequence[Group]) -> list[tuple[str, Parameters]]:
    """Sizes of clients, and the names of the groups that have them."""
    whose: dict[Parameters, list[str]] = {}
    for group in groups:
        for row in group.first.parameters:
            whose.setdefault(row, []).append(group.name)
    return [(_join(names, len(groups)), row) for row, names in whose.items()]


def _join(names: Sequence[str], count: int) -> str:
    if 1 < len(names) == count:
        return "all"
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def _summary(groups: Sequence[Group], view: str) -> str:
    """The table of groups, and what their runs say, as HTML."""
    rows, runs = [_row(group.see(view)) for group in groups], all_runs(groups)
    return _template("summary.html").render(_values(groups), rows=rows, runs=runs, warnings=_warnings(runs))


def _warnings(runs: Sequence[Run]) -> list[str]:
    """Warnings of runs and problems with their files, each once."""
    by_text: dict[str, list[str]] = {}
    for run in runs:
        for text in run.warnings:
            by_text.setdefault(text, []).append(run.name)
    more = {text: f" and {len(names) - 1} more" if len(names) > 1 else "" for text, names in by_text.items()}
    problems = dict.fromkeys(text for run in runs for text in run.problems)
    return [*(f"{names[0]}{more[text]}: {text}" for text, names in by_text.items()), *problems]


def _row(group: Group) -> dict[str, Any]:
    runs = group.runs
    states = Counter(run.state for run in runs)
    spent = [run.epsilon for run in runs if run.epsilon is not None]
    return {
        "name": group.name,
        "seeds": len(runs),
        "data": group.first.experiment.data.rpartition("/")[2],
        "state": ", ".join(state if len(states) == 1 else f"{count} {state}" for state, count in states.items()),
        "left": group.first.left if len(runs) == 1 else None,  # the list of runs has that of each seed
        "rounds": min(len(run.history) for run in runs),
        "planned": group.first.rounds,
        **{over: _spread([run.score[over] for run in runs]) for over in ("mean", "worst")},
        "up": _mean_sum(runs, lambda one: one["bytes"]["up"]),
        "down": _mean_sum(runs, lambda one: one["bytes"]["down"]),
        "seconds": _mean_sum(runs, lambda one: one["seconds"]),
        "epsilon": max(spent, default=None),
    }


def _mean_sum(runs: Sequence[Run], of: Callable[[dict[str, Any]], float]) -> float:
    """The sum over rounds, mean over seeds."""
    return statistics.fmean(math.fsum(map(of, run.history)) for run in runs)


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return str(Spread.of(known)) if known and len(known) == len(values) else _format(None)


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _template(name: str = "template.html") -> Template:
    return read_template("pluribus.report", name)


@cache
def read_template(package: str, name: str = "template.html") -> Template:
    """The template of a page or of a part of it, which escapes all values."""
    loader = FunctionLoader(partial(_read_text, "pluribus.report"))  # of parts that pages share, such as head.html
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=loader
    )
    return environment.from_string(_read_text(package, name))


def _read_text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")


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


def _section(section: Section, view: str) -> dict[str, Any]:
    """A section by view. One that is the same in all views has no name of a view."""
    seen = {view: section, **section.views} if section.views else {"": section}
    return {"key": section.key, "views": {view: _shown(one) for view, one in seen.items()}}


def _shown(section: Section) -> dict[str, Any]:
    return {"says": section.text, "tables": _tables(section), "plots": [_plot(plot) for plot in section.plots]}


def _plot(plot: Plot) -> dict[str, Any]:
    return {
        "name": plot.name,
        "says": plot.says,
        "data": _traces(plot),
        "layout": _layout(plot),
        "axes": {"x": plot.x, "y": plot.y},
        "names": {"x": plot.x_names, "y": plot.y_names},
    }


def _tables(section: Section) -> Markup:
    """Tables, notes and folded texts as HTML."""
    scroll = Markup('<div class="scroll" tabindex="0" role="region" aria-label="{}">{}</div>')
    count = len(section.tables)
    labels = [f"{section.title}, table {number} of {count}" for number in range(1, count + 1)]
    tables = [scroll.format(label, _table(table)) for label, table in zip(labels, section.tables, strict=True)]
    notes = [Markup('<p class="quiet">{}</p>').format(note) for note in section.notes]
    details = Markup('<details><summary>{}</summary><pre tabindex="0">{}</pre></details>')
    return Markup("").join([*tables, *notes, *(details.format(*pair) for pair in section.folded.items())])


def _table(table: Table) -> Markup:
    heading = Markup("").join(Markup("<th>{}" if column else "<td>").format(column) for column in table.columns)
    rows = [
        Markup("").join(Markup("<td><b>{}</b>" if one.best else "<td>{}").format(one.text) for one in row)
        for row in table.rows
    ]
    body = Markup("").join(Markup("<tr>{}</tr>").format(row) for row in rows)
    return Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(heading, body)


def _traces(plot: Plot) -> list[dict[str, Any]]:
    largest = max((size for one in plot.series for size in one.sizes), default=1.0)
    return [_trace(one, largest) for one in plot.series]


def _trace(one: Series, largest: float) -> dict[str, Any]:
    """A trace of Plotly. `color` is an index into the light or dark palette, which the page resolves."""
    if one.kind == "heat":
        cells = [[None if cell is None else round(cell, 4) for cell in row] for row in one.cells]
        return {"type": "heatmap", "name": one.name, "z": cells, "marks": one.marks}
    turn = one.color // len(PALETTE["light"])
    common: dict[str, Any] = {
        "name": one.name,
        "legendgroup": one.name,
        "x": list(one.x),
        "y": list(one.y),
        "text": list(one.text),
        "hovertemplate": "%{text}<extra></extra>",
        "textposition": "none" if one.kind in ("bars", "stack") else None,
        "color": one.color % len(PALETTE["light"]),
        **({"low": list(one.low), "high": list(one.high)} if one.low else {}),
    }
    if one.kind in ("line", "steps"):
        line = {"dash": "dot" if one.faint else DASHES[turn % len(DASHES)], "width": 2}
        if one.kind == "steps":
            line |= {"shape": "hv"}
        return common | {"type": "scatter", "mode": "lines+markers", "line": line, "marker": {"size": 4}}
    if one.kind == "dots":
        symbol = SYMBOLS[turn % len(SYMBOLS)] + ("-open" if one.faint else "")
        sized = {"size": list(one.sizes), "sizemode": "area", "sizeref": 2 * largest / LARGEST**2}
        marker = {"symbol": symbol, "opacity": 0.85, **(sized if one.sizes else {"size": 9})}
        return common | {"type": "scatter", "mode": "markers", "marker": marker}
    pattern = {"shape": "/" if one.faint else "", "fillmode": "overlay", "size": 6}
    return common | {"type": "bar", "orientation": "h" if one.kind == "bars" else "v", "marker": {"pattern": pattern}}


def _layout(plot: Plot) -> dict[str, Any]:
    stacked = plot.stacked or any(one.kind == "stack" for one in plot.series)
    layout: dict[str, Any] = {
        "xaxis": _axis(plot.x, plot.x_names, plot.bytes == "x", plot.log == "x"),
        "yaxis": _axis(plot.y, plot.y_names, plot.bytes == "y"),
        "height": _height(len(plot.y_names)),
        "barmode": "stack" if stacked else "group",
        "showlegend": len(plot.series) > 1,
    }
    if plot.x in COUNTED and max((x or 0 for one in plot.series for x in one.x), default=0) <= MOST_TICKS / 3:
        layout["xaxis"]["dtick"] = 1
    if plot.zero:
        layout["xaxis"] |= {"zeroline": True, "rangemode": "tozero"}
    if plot.y_names:
        layout["yaxis"]["range"] = [len(plot.y_names) - 0.4, -0.6]
    if plot.square:
        for axis in ("xaxis", "yaxis"):
            layout[axis] |= {"showticklabels": False, "showgrid": False}
    return layout


def _height(rows: int) -> int:
    """Pixels of a plot. One without rows has the usual height, and few rows take less."""
    return max(ROW * rows + 140, min(HEIGHT, 60 * rows + 120) if rows else HEIGHT)


def _axis(title: str, names: Sequence[str], of_bytes: bool, logarithmic: bool = False) -> dict[str, Any]:
    axis: dict[str, Any] = {"title": {"text": title, "standoff": 12}, "automargin": True, "zeroline": False}
    if names:
        shown = range(0, len(names), math.ceil(len(names) / MOST_TICKS))
        ticks = {"tickvals": list(shown), "ticktext": [_shorten(names[at]) for at in shown]}
        return axis | {"tickmode": "array", **ticks}
    scale = {"type": "log", "nticks": 6} if logarithmic else {"rangemode": "tozero"} if of_bytes else {}
    return axis | ({"tickformat": "~s", "ticksuffix": "B"} if of_bytes else {}) | scale


def _shorten(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
