"""`pluribus join --check`: tries what a site brings, on its own machine alone."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from pluribus.data.scaling import choose_normalize
from pluribus.errors import DataError
from pluribus.method import hyperparameters, methods
from pluribus.models import TwoPartModel
from pluribus.optim import Rule
from pluribus.sites.agreement import Agreement
from pluribus.sites.config import SiteFile, read_site
from pluribus.sites.envelope import seal, unseal
from pluribus.sites.holdings import fit, take_part
from pluribus.sites.join import check_keys, lock_state
from pluribus.sites.responder import Responder, SiteResources
from pluribus.sites.trainer import known_classes, load_resources
from pluribus.targets import Target

METHOD = "local"  # needs nothing of other sites
BATCH = 16  # rows of the one training step


def check_site(config: str | Path, *, tell: Callable[[str], None] = print) -> None:
    """Load keys, data and model of a site, train for one step and evaluate. Nothing is sent, and nothing is kept."""
    file = Path(config)
    site = read_site(file)
    key = check_keys(site)
    sys.path.insert(0, str(file.absolute().parent))
    with lock_state(site.state), tempfile.TemporaryDirectory(prefix="pluribus-") as scratch:
        means = load_resources(site)
        agreement = _agree_with_itself(site, means)
        model, loss, measured = _rehearse(means, agreement, Path(scratch))
    tell(f"keys      {key.name} and ca.crt are those of {site.name}")
    for line in _describe_data(means):
        tell(line)
    parameters = sum(one.numel() for one in model.parameters())
    tell(f"model     {site.model}: {parameters:,} parameters, features of width {model.width}")
    tell(f"device    {means.device}")
    tell(f"state     {site.state} can be written")
    tell(f"training  one step, loss {loss:.3f}; then, untrained as it is, {measured}")
    tell(f"{site.name} can join. The server at {site.server} was not asked.")


def _agree_with_itself(site: SiteFile, means: SiteResources) -> Agreement:
    """An agreement as a federation would offer it, of this site alone, with the classes and values of all its sets."""
    train = means.own["train"]
    sets = [one for one in means.own.values() if one.columns == train.columns]
    values = zip(*(one.categories for one in sets), strict=False)
    categories = tuple(tuple(dict.fromkeys(chain(*known))) for known in values)
    return Agreement(
        run="check",
        method=METHOD,
        hyper=hyperparameters(methods()[METHOD]()),
        classes=known_classes(site, means.own),
        input=replace(train.input, categories=tuple(map(len, categories))),
        width=None,
        projector="pool",
        clients=1,
        rounds=1,
        seed=0,
        rule=Rule(),
        epochs=1,
        batch=BATCH,
        target=Target(train.target),
        columns=train.columns,
        categories=categories,
        share_counts=means.share_counts,
    )


def _rehearse(means: SiteResources, agreement: Agreement, scratch: Path) -> tuple[TwoPartModel, float, str]:
    """One training step on the first rows, and one evaluation. Returns the model, the loss and the metrics in words."""
    if means.public is not None:
        public = means.public.dataset
        fit(public, replace(agreement, classes=public.classes), "public ")
    first = take_part(means.own["train"], np.arange(min(BATCH, len(means.own["train"].y))), "train")
    responder = Responder(replace(means, own={**means.own, "train": first}, public=None, folder=scratch))
    head = {"client": 0, "t": 0, "stage": 0, "agreement": agreement.facts()}
    loss = unseal(responder.answer(seal(head | {"verb": "work"}, {}))).head["loss"]
    if loss is None:
        raise DataError(
            "the first training step gives no finite loss: look for large numbers in the data, see 'normalize' in "
            "site.toml, or give the site more rows."
        )
    figures = unseal(responder.answer(seal(head | {"verb": "evaluate"}, {}))).head["figures"]["after"]
    known = [f"{name} {value:.3f}" for name, value in figures.items() if value is not None]
    weights = {} if means.weights is None else {means.model: means.weights}
    return agreement.task(weights).shape_of(means.model), loss, ", ".join(known) or "nothing to evaluate"


def _describe_data(means: SiteResources) -> Iterator[str]:
    train = means.own["train"]
    sizes = ", ".join(f"{len(one.y):,} {name}" for name, one in means.own.items())
    yield f"data      {sizes}: {train.input}, {str(train.x.dtype).removeprefix('torch.')}"
    if train.target == "classes":
        held = torch.bincount(train.y, minlength=len(train.classes)).tolist()
        counts = ", ".join(f"{name} {count:,}" for name, count in zip(train.classes, held, strict=True))
        yield f"classes   {counts} in training"
    else:
        yield f"{train.target:<9} {', '.join(train.classes)}"
    yield f"normalize {choose_normalize(means.normalize, train).mode}"
    if means.public is not None:
        yield f"public    {len(means.public.dataset.y):,} rows"
