"""What a look into models shows: features of test rows, and the layers that clients took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pluribus.internal.digits import is_whole
from pluribus.report.embeddings import Embedding
from pluribus.report.groups import Group, seeds_text
from pluribus.report.numbers import Run
from pluribus.report.plots.curves import Record, plain
from pluribus.report.plots.series import Plot, Section, Series, make_series


def embeddings(embedded: Sequence[Embedding], why_not: str = "") -> Section:
    """Features of test rows in two dimensions."""
    plots = [Plot(one.name, "", "", _points(one), square=True) for one in embedded]
    says = " ".join(dict.fromkeys(one.says for one in embedded))
    return Section("embeddings", "Features", says, plots, why_not or "Features are not shown.")


def _points(one: Embedding) -> list[Series]:
    series, all_points = [], list(zip(one.labels, one.points, one.where, strict=True))
    for number, name in enumerate(one.classes):
        if points := [(*at, f"class {name}, {where}") for label, at, where in all_points if label == number]:
            series.append(make_series(name, points, number, "dots"))
    return series


def decisions(groups: Sequence[Group]) -> Section:
    """The layer of the global model that each client took in each round."""
    firsts = [group.first for group in groups]
    plots = [_layers(run) for run in firsts if any(_layer_decisions(one) for one in run.history)]
    says = (
        "For each client and round, the layer that a layer of the global model replaces, because it has the largest "
        "expected gain of knowledge (FedFree, Section 3.5); none if no layer has a gain."
        f"{' Shown is the first seed.' if seeds_text(groups) else ''}"
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
                layer, gain = str(one.get("layer")), plain(one.get("gain"))
                text = f"{client}: {layer} from {one.get('global')}" + (f", gain {gain:.3g}" if gain else "")
            found.setdefault(layer, []).append((t, k, text))
    clients = sorted({k for decided in found.values() for _, k, _ in decided})
    position = {k: at for at, k in enumerate(clients)}
    series: list[Series] = []
    for name, decided in sorted(found.items(), key=lambda pair: (pair[0] == "none", -len(pair[1]))):
        points = [(t, position[k], text) for t, k, text in decided]
        series.append(make_series(name, points, len(series), "dots", faint=name == "none"))
    return Plot(run.name, "round", "client", series, y_names=[run.client(k) for k in clients])
