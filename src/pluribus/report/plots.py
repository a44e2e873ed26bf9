"""The plots of a report as series of numbers. Two back ends draw them: a web page, and files for papers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pluribus.evaluate import evaluated_clients
from pluribus.internal.digits import is_whole
from pluribus.internal.views import view_text
from pluribus.report.embeddings import Embedding
from pluribus.report.numbers import Run, metrics_text, selection_of
from pluribus.terminal import format_bytes

FEW = 3  # with up to so many runs, a plot shows means and worst clients
SPREAD = 0.4  # share of a row, over which the runs of a client are spread
MOST_CLIENTS = 100  # in the plot of the metric per client
MOST_BARS = 36  # of tensors, for all runs together
MOST_NAMED = 8  # runs in a sentence
MOST_LAYERS = 6  # of a stack, per direction


Kind = Literal["line", "dots", "bars", "stack"]
Point = tuple[float, float, str]  # x, y, text


@dataclass(frozen=True)
class Series:
    """Points with the same color and one entry in the legend."""

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]
    color: int  # index into the palette; series with the same color differ by marker or dashes
    kind: Kind = "line"
    text: Sequence[str] = ()  # text of each point, shown on hover
    sizes: Sequence[float] = ()  # areas of the dots; empty: all have the same size
    faint: bool = False  # whether the series is secondary and is drawn dotted, hollow or hatched


def _make_series(name: str, points: Sequence[Point], color: int, kind: Kind, faint: bool = False) -> Series:
    xs, ys, texts = [x for x, _, _ in points], [y for _, y, _ in points], [text for _, _, text in points]
    return Series(name, xs, ys, color, kind, texts, faint=faint)


@dataclass(frozen=True)
class Plot:
    """One plot. If an axis has names, its numbers are positions in that list, and the first is at the top."""

    name: str
    x: str
    y: str
    series: list[Series]
    x_names: list[str] = field(default_factory=list)
    y_names: list[str] = field(default_factory=list)
    bytes: Literal["", "x", "y"] = ""  # the axis in bytes, if any
    square: bool = False  # whether the axes have no units


@dataclass(frozen=True)
class Section:
    """Plots of one topic. The page shows one of them at a time."""

    key: str
    title: str
    says: str
    plots: list[Plot]
    missing: str  # text if there is no plot; empty: the section is hidden


def sections(runs: Sequence[Run], embedded: Sequence[Embedding] = (), why_not: str = "") -> list[Section]:
    """All sections of a report about some runs."""
    first = [make(runs) for make in (headline, per_client, confusion, partition, traffic, losses)]
    return [*first, embeddings(embedded, why_not), decisions(runs), notes(runs)]


Record = dict[str, Any]
Axis = Callable[[Run], Sequence[float]]
Value = Callable[[Record], float | None]

OVER = ("mean", "worst")
AXES: dict[str, tuple[str, Axis]] = {
    "rounds": ("round", lambda run: [record["round"] + 1 for record in run.history]),
    "bytes": ("bytes up and down so far", lambda run: run.cumulate(lambda one: sum(one["bytes"].values()))),
    "seconds": ("seconds in rounds so far", lambda run: run.cumulate(lambda one: one["seconds"])),
}


def headline(runs: Sequence[Run]) -> Section:
    """The test metric against rounds, bytes and seconds."""
    few = len(runs) <= FEW
    shown: list[tuple[str, str, tuple[str, ...]]] = [(axis, axis, OVER if few else ("mean",)) for axis in AXES]
    shown += [] if few else [("worst client", "rounds", ("worst",))]
    plots = [_curves(runs, *one) for one in shown]
    views = " and ".join(dict.fromkeys(view_text(run.view) for run in runs))
    whose = evaluated_clients(run.history for run in runs if run.history)
    lines = f"Lines are the mean over {whose}."
    if few:
        lines = f"Solid lines are the mean over {whose}, dotted lines are the worst client of each round."
    click = "Click a name below the plot to hide or show its line."
    metric = metrics_text(runs)
    says = f"Test {metric} {views}, each client on its own test data. {lines} {click}"
    drawn, title = [plot for plot in plots if plot.series], f"{metric[0].upper()}{metric[1:]}"
    # the key is in links and names of files, so it is the same for all metrics
    return Section("accuracy", title, says, drawn, "No round has been evaluated yet.")


def _curves(runs: Sequence[Run], name: str, axis: str, over: Sequence[str]) -> Plot:
    title, of = AXES[axis]
    lines = [line for number, run in enumerate(runs) for one in over for line in _curve(run, number, of, one)]
    return Plot(name, title, f"test {metrics_text(runs)}", lines, bytes="x" if axis == "bytes" else "")


def _curve(run: Run, color: int, axis: Axis, over: str) -> Iterator[Series]:
    name = run.name if over == "mean" else f"{run.name}, worst client"
    return _line(run, name, color, axis, lambda one: _mean(one, run.view, "test", over), faint=over == "worst")


def _mean(record: Record, view: str, metric: str, over: str) -> float | None:
    return record["mean"].get(view, {}).get(metric, {}).get(over)  # type: ignore[no-any-return]


def _line(run: Run, name: str, color: int, axis: Axis, of: Value, faint: bool = False) -> Iterator[Series]:
    """A line through the rounds that have a value, if there is any."""
    rounds = zip(axis(run), run.history, strict=True)
    points = [(x, y, f"{name}: {y:.4g} in round {one['round'] + 1}") for x, one in rounds if (y := of(one)) is not None]
    if points:
        yield _make_series(name, points, color, "line", faint)


def losses(runs: Sequence[Run]) -> Section:
    """The loss of the original task against rounds."""
    shown: dict[str, Callable[[Run], Value]] = {
        "test loss": lambda run: lambda one: _mean(one, run.view, "test_loss", "mean"),
        "training loss": lambda run: lambda one: one["loss"],
    }
    says = (
        "The test loss is the loss of the task itself on each client's own test data, mean over clients: the "
        "cross-entropy, or the distance of numbers. The training loss includes all terms that the method adds, so it "
        "compares runs of one method only."
    )
    plots = [_against_rounds(runs, name, of) for name, of in shown.items()]
    return Section("loss", "Loss", says, [plot for plot in plots if plot.series], "No loss has been recorded yet.")


def _against_rounds(runs: Sequence[Run], name: str, of: Callable[[Run], Value]) -> Plot:
    title, axis = AXES["rounds"]
    lines = [one for number, run in enumerate(runs) for one in _line(run, run.name, number, axis, of(run))]
    return Plot(name, title, name, lines)


def notes(runs: Sequence[Run]) -> Section:
    """Numbers that the server of a method records in each round."""

    def noted(name: str) -> Callable[[Run], Value]:
        return lambda run: lambda one: _plain(one["notes"].get(name))

    noticed = [pair for run in runs for one in run.history for pair in one["notes"].items()]
    names = dict.fromkeys(str(name) for name, value in noticed if _plain(value) is not None)
    plots = [_against_rounds(runs, name, noted(name)) for name in names]
    says = "Numbers that the server of a method records in each round. The documentation of the method explains them."
    return Section("notes", "Notes of the server", says, plots, "")


def _plain(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _on_same_data(runs: Sequence[Run]) -> list[list[tuple[int, Run]]]:
    """Groups of runs whose clients hold the same rows. Each run has the index of its color."""
    groups: dict[str, list[tuple[int, Run]]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(run.partition, []).append((number, run))
    return list(groups.values())


def _join_names(group: Sequence[tuple[int, Run]]) -> str:
    return ", ".join(run.name for _, run in group)


def per_client(runs: Sequence[Run]) -> Section:
    """The metric of every client, worst first."""
    groups = [[(n, run) for n, run in group if _test_values(run)] for group in _on_same_data(runs)]
    plots = [_clients(group) for group in groups if group]
    firsts = [(run, *pair) for run in runs[:MOST_NAMED] for pair in list(_test_values(run).items())[:1]]
    worst = "; ".join(f"client {run.client(k)} with {value:.3f} ({run.name})" for run, k, value in firsts)
    says = (
        f"Test {metrics_text(runs)} of each client, {selection_of(runs)}, sorted by the first run, with the worst "
        f"client at the top. A client is labeled with its number and model. The worst: {worst}."
    )
    return Section("clients", "Clients", says, plots, "No client has been evaluated yet.")


def _test_values(run: Run) -> dict[int, float]:
    """The test metric by client, worst first."""
    known = {k: value for k, one in run.chosen.items() if (value := one.selected.get("test")) is not None}
    return dict(sorted(known.items(), key=lambda pair: pair[1], reverse=run.metric.smaller))


def _clients(group: Sequence[tuple[int, Run]]) -> Plot:
    order = list(dict.fromkeys(k for _, run in group for k in _test_values(run)))[:MOST_CLIENTS]
    position = {k: at for at, k in enumerate(order)}
    series = []
    for at, (number, run) in enumerate(group):
        # without this distance, equal values hide each other
        aside = SPREAD * (at / (len(group) - 1) - 0.5) if len(group) > 1 else 0.0
        points = [
            (value, position[k] + aside, f"{run.name}, client {run.client(k)}: {value:.3f}{_holds(run, k)}")
            for k, value in _test_values(run).items()
            if k in position
        ]
        series.append(_make_series(run.name, points, number, "dots"))
    first, metric = group[0][1], metrics_text(run for _, run in group)
    return Plot(_join_names(group), f"test {metric}", "client", series, y_names=[first.client(k) for k in order])


def confusion(runs: Sequence[Run]) -> Section:
    """How often each class was predicted for rows of each class, as circles."""
    plots = [_confused(run) for run in runs if run.confusion]
    says = (
        "Test predictions of the selected models, all clients together. The area of a circle is the number of rows of "
        "a true class for which a class was predicted. On the diagonal, the two are the same."
    )
    return Section("confusion", "Confusion", says, plots, "")


def _confused(run: Run) -> Plot:
    names = [run.class_name(number) for number in range(len(run.confusion))]
    found = [(p, y, count) for y, row in enumerate(run.confusion) for p, count in enumerate(row) if count]
    text = [
        f"{count} of {sum(run.confusion[y])} rows of class {names[y]} are taken for class {names[p]}"
        for p, y, count in found
    ]
    xs, ys, sizes = [p for p, _, _ in found], [y for _, y, _ in found], [float(count) for _, _, count in found]
    dots = Series("rows", xs, ys, 0, "dots", text, sizes)
    return Plot(run.name, "predicted class", "true class", [dots], names, names)


def _holds(run: Run, k: int) -> str:
    if k >= len(run.counts):
        return ""
    names = [run.class_name(number) for number, count in enumerate(run.counts[k]) if count]
    return f", holds {', '.join(names)}" if len(names) <= 5 else f", holds {len(names)} classes"


def partition(runs: Sequence[Run]) -> Section:
    """Rows of each class at each client, as circles."""
    plots = [_bubbles(group) for group in _on_same_data(runs) if group[0][1].counts]
    says = "Classes of each client. The area of a circle is the number of rows of a class that a client holds."
    missing = "The partition is unknown: partition.json is missing, as in a federation of real sites, or it is damaged."
    return Section("partition", "Data of each client", says, plots, missing)


def _bubbles(group: Sequence[tuple[int, Run]]) -> Plot:
    run = group[0][1]
    held = [(k, c, count) for k, row in enumerate(run.counts) for c, count in enumerate(row) if count]
    text = [f"client {run.client(k)}: {count} rows of class {run.class_name(c)}" for k, c, count in held]
    xs, ys, sizes = [k for k, _, _ in held], [c for _, c, _ in held], [float(count) for _, _, count in held]
    classes = [run.class_name(number) for number in range(max(map(len, run.counts)))]
    dots = Series("rows", xs, ys, 0, "dots", text, sizes)
    return Plot(_join_names(group), "client", "class", [dots], [str(k) for k in range(len(run.counts))], classes)


WAYS = ("up", "down")
OTHERS = "others"


def traffic(runs: Sequence[Run]) -> Section:
    """Bytes by tensor, in total and per round."""
    sending = [run for run in runs if any(way in WAYS for way, _ in run.traffic)]
    plots = [_in_total(sending), *map(_per_round, sending)] if sending else []
    what = "Serialized bytes of all clients by tensor; (header) is the header of a message."
    says = f"{what} Downloads for evaluation only are left out."
    return Section("traffic", "Communication", says, plots, "Nothing has been sent.")


def _shares(run: Run, way: str, named: Sequence[str]) -> dict[str, Counter[int]]:
    """Bytes per round by tensor. Tensors that are not in `named` are added up."""
    shares: dict[str, Counter[int]] = {}
    for (one, tensor), rounds in run.traffic.items():
        if one == way:
            shares.setdefault(tensor if tensor in named else OTHERS, Counter()).update(rounds)
    return shares


def _largest(run: Run, ways: Sequence[str], most: int) -> list[str]:
    sums: Counter[str] = Counter()
    for (way, tensor), rounds in run.traffic.items():
        if way in ways:
            sums[tensor] += sum(rounds.values())
    return [tensor for tensor, _ in sums.most_common(most)]


def _in_total(runs: Sequence[Run]) -> Plot:
    rows: list[str] = []
    bars: dict[str, list[Point]] = {way: [] for way in WAYS}
    for run in runs:
        named = _largest(run, WAYS, max(2, MOST_BARS // len(runs)))
        shares = {way: _shares(run, way, named) for way in WAYS}
        for tensor in [*named, OTHERS]:
            sizes = {way: sum(share[tensor].values()) for way, share in shares.items() if tensor in share}
            for way, size in sizes.items():
                bars[way].append((size, len(rows), f"{run.name}, {way}: {format_bytes(size)} of {tensor}"))
            rows += [f"{run.name}: {tensor}" if len(runs) > 1 else tensor] if sizes else []
    known = [(number, way) for number, way in enumerate(WAYS) if bars[way]]
    series = [_make_series(way, bars[way], number, "bars", way == "down") for number, way in known]
    return Plot("in all", "bytes", "", series, y_names=rows, bytes="x")


def _per_round(run: Run) -> Plot:
    series: list[Series] = []
    for way in WAYS:
        shares = _shares(run, way, _largest(run, [way], MOST_LAYERS))
        for tensor, rounds in sorted(shares.items(), key=lambda pair: -sum(pair[1].values())):
            name = f"{way}: {tensor}"
            points = [(t + 1, rounds[t], f"{name}, {format_bytes(rounds[t])} in round {t + 1}") for t in sorted(rounds)]
            series.append(_make_series(name, points, len(series), "stack", way == "down"))
    return Plot(f"{run.name}, per round", "round", "bytes", series, bytes="y")


def embeddings(embedded: Sequence[Embedding], why_not: str = "") -> Section:
    """Features of test rows in two dimensions."""
    plots = [Plot(one.name, "", "", _points(one), square=True) for one in embedded]
    says = " ".join(dict.fromkeys(one.says for one in embedded))
    return Section("embeddings", "Features", says, plots, why_not or "Features are not shown.")


def _points(one: Embedding) -> list[Series]:
    series, all_points = [], list(zip(one.labels, one.points, one.where, strict=True))
    for number, name in enumerate(one.classes):
        if points := [(*at, f"class {name}, {where}") for label, at, where in all_points if label == number]:
            series.append(_make_series(name, points, number, "dots"))
    return series


def decisions(runs: Sequence[Run]) -> Section:
    """The layer of the global model that each client took in each round."""
    plots = [_layers(run) for run in runs if any(_layer_decisions(one) for one in run.history)]
    says = (
        "For each client and round, the layer that a layer of the global model replaces, because it has the largest "
        "expected gain of knowledge (FedFree, Section 3.5); none if no layer has a gain."
    )
    return Section("layers", "Layer decisions", says, plots, "")


def _layer_decisions(record: Record) -> dict[int, Any]:
    layers = record["notes"].get("layers")
    return {int(k): one for k, one in layers.items() if is_whole(k)} if isinstance(layers, dict) else {}


def _layers(run: Run) -> Plot:
    found: dict[str, list[tuple[int, int, str]]] = {}
    for record in run.history:
        for k, one in _layer_decisions(record).items():
            t, client = record["round"] + 1, f"round {record['round'] + 1}, client {run.client(k)}"
            layer, text = "none", f"{client}: none"
            if isinstance(one, dict):
                layer, gain = str(one.get("layer")), _plain(one.get("gain"))
                text = f"{client}: {layer} from {one.get('global')}" + (f", gain {gain:.3g}" if gain else "")
            found.setdefault(layer, []).append((t, k, text))
    clients = sorted({k for decided in found.values() for _, k, _ in decided})
    position = {k: at for at, k in enumerate(clients)}
    series: list[Series] = []
    for name, decided in sorted(found.items(), key=lambda pair: (pair[0] == "none", -len(pair[1]))):
        points = [(t, position[k], text) for t, k, text in decided]
        series.append(_make_series(name, points, len(series), "dots", faint=name == "none"))
    return Plot(run.name, "round", "client", series, y_names=[run.client(k) for k in clients])
