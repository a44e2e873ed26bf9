"""What every model promises, one line each, and the check of one model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pluribus import draws
from pluribus.conformance.bits import differing, same_bits, tensor_difference
from pluribus.conformance.promise import BrokenError, Promise, SkippedError
from pluribus.conformance.report import Line
from pluribus.errors import FormatError
from pluribus.inputs import MANY, PADDING, Input, Kind, as_input
from pluribus.internal.lookup import import_dotted
from pluribus.models import TwoPartModel, build, entries, take_models
from pluribus.models.hf import HF
from pluribus.models.probe import Shape, shape_text
from pluribus.models.timm import TIMM

Model = str | nn.Module | Callable[..., nn.Module]
ROWS = 6
DIGITS = Input("image", (1, 8, 8))
# The rows that a model is built for, by the first kind that it takes.
USUAL: dict[Kind, Input] = {
    "image": DIGITS,
    "signal": Input("signal", (6, 32)),
    "tokens": Input("tokens", (16,), vocabulary=64),
    "table": Input("table", (8,), categories=(3, 2)),
    "tensor": Input("tensor", (8,)),
}


def usual_input(model: Model, shape: Shape | None = None) -> Input:
    """The rows for a model: of the given shape, or small ones of the first kind that it takes."""
    kinds = _kinds(model)
    if shape is None:
        return USUAL[kinds[0]]
    for kind in kinds:
        if kind == "tensor" or len(USUAL[kind].shape) == len(shape):
            return replace(USUAL[kind], shape=shape, categories=())
    sizes = " or ".join(f"{shape_text(USUAL[kind].shape)} for {MANY[kind]}" for kind in kinds)
    raise FormatError(
        f"shape must be the sizes of one row that the model takes, such as {sizes}, not {shape_text(shape)}."
    )


def _kinds(model: Model) -> tuple[Kind, ...]:
    """The kinds of rows that a model takes. A builder that asks for `vocabulary` takes tokens, `categories` tables."""
    if isinstance(model, str):
        if model in entries():
            return entries()[model].takes
        if model.startswith((TIMM, HF)):
            return ("image",) if model.startswith(TIMM) else ("tokens",)
    source = import_dotted(model, "model") if isinstance(model, str) else model
    try:
        asked = () if isinstance(source, nn.Module) else inspect.signature(source).parameters
    except (TypeError, ValueError):  # some functions in C have no signature
        asked = ()
    if "vocabulary" in asked:
        return ("tokens",)
    return ("table",) if "categories" in asked else ("image", "signal", "table", "tensor")


@dataclass(frozen=True)
class ModelCase:
    """One way to build a model."""

    model: Model
    shape: Input = DIGITS
    classes: int = 10

    def but(self, **settings: Any) -> Self:
        return replace(self, **settings)

    def call(self) -> str:
        if isinstance(self.model, str):
            shown = self.shape.shape if self.shape == as_input(self.shape.shape) else repr(self.shape)
            return f'pluribus.models.build("{self.model}", shape={shown}, classes={self.classes})'
        shape = shape_text(self.shape.shape)
        return f'pluribus.check({_name(self.model)}, shape="{shape}", classes={self.classes})'

    def build(self, seed: int = 0) -> TwoPartModel:
        with draws.seeded("check", seed):
            return build_model(self.model, self.shape, self.classes)

    def rows(self) -> Tensor:
        """Rows as a client sees them: numbers from -1 to 1, tokens with padding after them, or categories."""
        form, draw = self.shape, draws.generator("images")
        if form.kind == "tokens":
            x = torch.randint(1, form.vocabulary, (ROWS, *form.shape), generator=draw)
            length = torch.arange(ROWS)[:, None] % form.shape[0] + 1
            return torch.where(torch.arange(form.shape[0]) < length, x, PADDING)
        x = torch.rand(ROWS, *form.shape, generator=draw) * 2 - 1
        for at, size in enumerate(form.categories, form.shape[0] - len(form.categories)):
            x[:, at] = torch.randint(size, (ROWS,), generator=draw).float()
        return x

    @property
    def is_object(self) -> bool:
        return isinstance(self.model, nn.Module)


def build_model(model: Model, shape: Input, classes: int) -> TwoPartModel:
    """Build a model from a name, a builder or a module, as a run does."""
    taken = model if isinstance(model, str) else take_models([model])[0]
    return build(taken, shape=shape, classes=classes)


def _name(model: Model) -> str:
    return getattr(model, "__name__", type(model).__name__)


# ---- promises ------------------------------------------------------------------------------------------------------


def builds(case: ModelCase) -> None:
    """It returns one score per class, in train and in eval mode."""
    model = case.build()
    for mode in (True, False):
        scores = model.train(mode)(case.rows())
        if not isinstance(scores, Tensor) or scores.shape != (ROWS, case.classes):
            found = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise BrokenError(f"the output for {ROWS} rows is {found}, not ({ROWS}, {case.classes})")


def width_is_right(case: ModelCase) -> None:
    """The features have the declared width, and the head of the features is the output."""
    model = case.build().eval()
    features = model.features(case.rows())
    if tuple(features.shape) != (ROWS, model.width):
        raise BrokenError(f"the features are {tuple(features.shape)}, but width is {model.width}")
    if not same_bits(model.head(features), model(case.rows())):
        raise BrokenError("head(features(x)) differs from model(x)")


def finite_output(case: ModelCase) -> None:
    """The output and its gradients are finite."""
    model = case.build().train()
    loss = _loss(model, case)
    grads = torch.autograd.grad(loss, list(_trained(model).values()), allow_unused=True)
    if not bool(loss.isfinite()) or not all(bool(g.isfinite().all()) for g in grads if g is not None):
        raise BrokenError(f"the loss of {ROWS} random rows is {float(loss):g}, or a gradient is not finite")


def gradients_reach_everything(case: ModelCase) -> None:
    """Every trainable parameter has a gradient."""
    model = case.build().train()
    parameters = _trained(model)
    if not parameters:
        raise BrokenError("the model has no trainable parameter")
    grads = torch.autograd.grad(_loss(model, case), list(parameters.values()), allow_unused=True)
    unused = [name for name, grad in zip(parameters, grads, strict=True) if grad is None]
    if unused:
        raise BrokenError(f"{len(unused)} of {len(parameters)} parameters are not used: {', '.join(unused[:3])}")


def _loss(model: nn.Module, case: ModelCase) -> Tensor:
    return F.cross_entropy(model(case.rows()), torch.arange(ROWS) % case.classes)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def seed_decides(case: ModelCase) -> None:
    """Built twice under one seed, it has the same weights."""
    if case.is_object:
        raise SkippedError("a module is copied, not built.")
    if found := tensor_difference(_state(case.build()), _state(case.build())):
        raise BrokenError(f"built twice under the same seed, {found}")


def _state(model: nn.Module) -> Mapping[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def input_is_unchanged(case: ModelCase) -> None:
    """It does not change its rows in place."""
    model, x = case.build(), case.rows()
    for mode in (True, False):
        model.train(mode)(x)
        if not same_bits(x, case.rows()):
            raise BrokenError(f"the forward pass changes its rows in place ({'train' if mode else 'eval'} mode)")


def evaluation_is_repeatable(case: ModelCase) -> None:
    """In eval mode it draws no random numbers and changes no statistics."""
    model = case.build().eval()
    before, first = _state(model), model(case.rows())
    if not same_bits(first, model(case.rows())):
        raise BrokenError("in eval mode the same rows give other scores the second time")
    if changed := sorted(differing(before, _state(model))):
        raise BrokenError(f"a forward pass in eval mode changes '{changed[0]}'")


def one_row_at_a_time(case: ModelCase) -> None:
    """In eval mode a row gets the same scores alone and in a batch, up to rounding."""
    model = case.build().eval()
    alone, together = model(case.rows()[:1]), model(case.rows())[:1]
    if not torch.allclose(alone, together, rtol=1e-3, atol=1e-4):
        most = (alone - together).abs().max()
        raise BrokenError(f"alone, the first row gets scores that differ by up to {most:.3g} from those in a batch")


def builds_without_numbers(case: ModelCase) -> None:
    """On the meta device it has the same names and shapes: this is how the library measures it."""
    if case.is_object:
        raise SkippedError("a module is copied, not built.")
    with torch.device("meta"):
        empty = case.build().state_dict()
    real = case.build().state_dict()
    if empty.keys() != real.keys():
        raise BrokenError(f"without numbers it has other tensors: {sorted(empty.keys() ^ real.keys())[0]}")
    for name, value in real.items():
        if empty[name].shape != value.shape:
            raise BrokenError(f"'{name}' is {tuple(value.shape)}, but {tuple(empty[name].shape)} on the meta device")


def saves_and_loads(case: ModelCase) -> None:
    """Saved as safetensors and loaded into another one, it gives the same scores."""
    model, other = case.build(), case.build(seed=1)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    other.load_state_dict(safetensors.torch.load(safetensors.torch.save(tensors)))
    if not same_bits(model.eval()(case.rows()), other.eval()(case.rows())):
        raise BrokenError("after saving and loading, the same rows get other scores")


PLAIN = "Let forward return one tensor, (rows, width) for a backbone or (rows, classes) for a TwoPartModel."
PROMISES: tuple[Promise[ModelCase], ...] = (
    Promise("builds and returns one score per class", builds, PLAIN),
    Promise("features have the declared width", width_is_right, "Let width say how many numbers features returns."),
    Promise("its numbers are finite", finite_output, "Normalize or scale what grows, and guard divisions."),
    Promise(
        "gradients reach every parameter",
        gradients_reach_everything,
        "Use these parameters in forward, or remove or freeze them.",
    ),
    Promise("same seed, same weights", seed_decides, "Initialize with torch's global generator, which is seeded."),
    Promise("rows are not changed in place", input_is_unchanged, "Copy x before an in-place operation."),
    Promise(
        "evaluation is repeatable",
        evaluation_is_repeatable,
        "Draw random numbers and update buffers only if self.training is True.",
    ),
    Promise(
        "one row at a time",
        one_row_at_a_time,
        "In eval mode, normalize with running statistics, and keep the dimension of the batch.",
    ),
    Promise(
        "builds without numbers",
        builds_without_numbers,
        "Create all parameters in the constructor, and look at no value of a tensor there.",
    ),
    Promise("saves and loads", saves_and_loads, "Keep all tensors as parameters or buffers; share no memory."),
)


def check_model(model: Model, shape: Shape | None = None, classes: int = 10) -> Iterator[Line]:
    """Check all promises of a model. If it cannot be built, the others are skipped."""
    case = ModelCase(model, usual_input(model, shape), classes)
    first = PROMISES[0].check(case)
    yield first
    for promise in PROMISES[1:]:
        failed = first.status == "failed"
        yield Line(promise.name, "skipped", "it does not build yet.") if failed else promise.check(case)
