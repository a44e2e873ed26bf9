"""One self-contained HTML page about an audit. It has no script, and its content security policy forbids any."""

from __future__ import annotations

import base64
import io
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from pluribus.audit.findings import CARD, Finding, Picture
from pluribus.report.page import page_style, read_template

if TYPE_CHECKING:
    from pluribus.audit.audit import Audit

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
LOWEST, HIGHEST, WIDTH = 0.3, 1.0, 240  # of the axis of areas, and its pixels


class Shown(NamedTuple):
    """Images as data of a page, with a caption each."""

    text: str
    images: list[tuple[str, str]]


def page(audit: Audit) -> str:
    """Render the page."""
    from pluribus import __version__

    names = [run.name for run in audit.runs]
    title = f"Audit of {', '.join(names) if len(names) <= 3 else f'{len(names)} runs'}"
    fields = dict.fromkeys(key for run in audit.runs for key in run.fields() if key[0] != CARD)
    return read_template("pluribus.audit").render(
        policy=POLICY,
        style=page_style(),
        title=title,
        version=__version__,
        runs=audit.runs,
        clients=audit.clients,
        fields=[_field(audit, *key) for key in fields],
        card=CARD,
        x=_x,
        width=WIDTH,
        shown=show,
    )


def _field(audit: Audit, name: str, source: str) -> dict[str, Any]:
    """The findings of a field in all runs, by attack."""
    found = {run.name: run.fields().get((name, source), {}) for run in audit.runs}
    attacks: dict[str, dict[str, Finding]] = {}
    for run, by_attack in found.items():
        for attack, one in by_attack.items():
            attacks.setdefault(attack, {})[run] = one
    return {"name": name, "source": source, "attacks": attacks}


def _x(value: float) -> float:
    """The position of an area on its axis, in pixels."""
    share = (min(max(value, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)
    return round(4 + share * (WIDTH - 8), 1)


def show(one: Picture) -> Shown:
    """The images of a picture, from what is private to what was made of it."""
    guess = one.guess
    is_mean = guess.nearest is not None
    images = [
        ("mean of the class" if is_mean else "private row", guess.original),
        (f"found, {_decibels(guess.psnr)}", guess.found),
    ]
    if guess.nearest is not None and guess.nearest_psnr is not None:
        images.append((f"nearest row, {_decibels(guess.nearest_psnr)}", guess.nearest))
    return Shown(f"client {one.client}, class {one.label}", [(text, _png(image, one)) for text, image in images])


def _decibels(value: float) -> str:
    return "exact" if math.isinf(value) else f"{value:.1f} dB"


def _png(image: Tensor, one: Picture) -> str:
    """An image as the address of its own data. Models see one channel of gray or three of color; others lose some."""
    unit = (image - one.span.low) / one.span.size
    pixels = (unit.clamp(0, 1) * 255).round().byte().numpy()
    colors = pixels[0] if len(pixels) < 3 else np.moveaxis(pixels[:3], 0, 2)
    file = io.BytesIO()
    Image.fromarray(colors).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
