"""A file with one trained model: its tensors, and the facts that build it again without its run, data and method."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pluribus import draws
from pluribus.errors import ConfigError, DamagedFileError, MismatchError, UnknownNameError, UserCodeError
from pluribus.inputs import Input
from pluribus.internal.blame import first_line
from pluribus.models import OwnModel, TwoPartModel, build, entries
from pluribus.models.adapters import merge_adapters
from pluribus.models.capacity import architecture_of
from pluribus.models.meta import without_numbers
from pluribus.models.prompts import Prompting, prompting_of
from pluribus.settings import convert_fields
from pluribus.storage.code import ADD, Allow, check_code
from pluribus.storage.files import write_tensors


@dataclass(frozen=True)
class ModelFacts:
    """What builds a model again, and where it comes from."""

    model: str
    input: Input
    classes: int
    names: tuple[str, ...]
    """Names of the classes, by number."""
    width: int | None
    projector: str
    method: str
    view: str
    client: int
    round: int
    pluribus: str
    """The version that wrote the file."""
    prompting: dict[str, Any] | None = None

    split: str | None = None
    """The layer where a user's classifier is split."""

    def build(self, own: Any = None) -> nn.Module:
        """A new model of this architecture. `own` is a builder or module that replaces the one of its name."""
        how: dict[str, Any] = {"shape": self.input, "classes": self.classes, "width": self.width}
        how |= {"projector": self.projector, "split": self.split}
        with draws.seeded("load model"):  # the caller's random numbers do not change
            model = build(self.model if own is None else OwnModel(self.model, own), **how)
        if self.prompting is not None:
            Prompting(**self.prompting).attach(model, self.input.shape)
        return model

    def to_metadata(self) -> dict[str, str]:
        return {name: json.dumps(value) for name, value in asdict(self).items()}

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, str]) -> ModelFacts:
        if "shape" in metadata:  # a file of version 0.1
            shape = Input("image", tuple(json.loads(metadata["shape"])))
            metadata = {**metadata, "input": json.dumps(shape.facts())}
        read = {one.name: json.loads(metadata[one.name]) for one in fields(cls)}
        read = convert_fields(cls, read | {"input": Input.of(read["input"])})
        if read["prompting"] is not None:
            read["prompting"] = asdict(Prompting(**convert_fields(Prompting, read["prompting"])))
        return cls(**read)


def write_model(path: Path, model: nn.Module, facts: ModelFacts, skeleton: TwoPartModel) -> None:
    """Write a model. `skeleton` is a new one of its architecture, on the meta device: refuse a model that differs."""
    model = merge_adapters(model)  # the file needs to know nothing about them
    if (prompting := prompting_of(model)) is not None:
        facts = replace(facts, prompting=asdict(prompting))
        with torch.device("meta"):
            prompting.attach(skeleton, facts.input.shape)
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}
    if changed := _differing(skeleton.state_dict(), tensors):
        raise MismatchError(
            f"the model of client {facts.client} cannot be saved in a file: method '{facts.method}' changed the "
            f"architecture '{facts.model}' ('{changed[0]}' differs). Use result.model({facts.client})."
        )
    write_tensors(path, tensors, facts.to_metadata())


def read_model(path: Path, own: Any = None, allow: Allow = False) -> nn.Module:
    """Read a model, in eval mode. Its builder, if the file names one by a dotted path, needs permission."""
    facts, tensors = _read(path)
    if own is None:
        check_code(path, {"models": facts.model}, allow, f"{ADD}, or give its builder: load_model(path, model=...)")
    try:
        if (
            own is None and architecture_of(facts.model) in entries()
        ):  # facts that do not fit the tensors must not take memory
            _check_tensors(path, facts, _build_skeleton(path, facts), tensors)
        model = facts.build(own)
    except (UnknownNameError, UserCodeError) as error:
        raise type(error)(
            f"{path} has a model '{facts.model}' that cannot be built here: {str(error).rstrip('.')}. "
            f"Give its builder: load_model(path, model=...)."
        ) from error
    _check_tensors(path, facts, model, tensors)
    model.load_state_dict(tensors)
    return model.eval()


def _build_skeleton(path: Path, facts: ModelFacts) -> nn.Module:
    """The model without numbers. Refuse facts of which no model can be made."""
    try:
        with without_numbers():
            return facts.build()
    except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} describes a model that cannot be built ({first_line(error)}).") from error


def _check_tensors(path: Path, facts: ModelFacts, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of the model."""
    if wrong := _differing(model.state_dict(), tensors):
        raise MismatchError(
            f"the tensors in {path} do not fit a model '{facts.model}': '{wrong[0]}' is missing on one side or has "
            f"another shape. Give the builder that made it: load_model(path, model=...)."
        )


def _read(path: Path) -> tuple[ModelFacts, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path} cannot be read as safetensors ({error}).") from error
    if "pluribus" not in metadata:
        raise DamagedFileError(f"{path} does not say how its model is built: write it with result.save_model.")
    try:
        return ModelFacts.of_metadata(metadata), tensors
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, ConfigError) as error:
        raise DamagedFileError(f"{path} does not say how its model is built ({error!r}).") from error


def _differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that only one side has, or that differ in shape."""
    names = [*one, *(name for name in other if name not in one)]
    shapes = [{n: v.shape for n, v in side.items()} for side in (one, other)]
    return [name for name in names if shapes[0].get(name) != shapes[1].get(name)]
