"""The only module that imports torchvision. Import it late: torchvision and timm take time to import.

    from pluribus.internal.torchvision import torchvision

Torch from the CPU-only index with torchvision from the registry cannot load torchvision's compiled operators, and
`import torchvision` fails with `operator torchvision::nms does not exist` while it registers two of them for the meta
device. No classifier uses those two, so this module declares them, without an implementation, if they are missing.
timm imports torchvision, so import this module before timm.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

COMPILER = ("torch._dynamo", "torch._dynamo.utils")

# A module-level name, because torch drops the declarations of a Library that is garbage collected.
_stand_ins: torch.library.Library | None = None


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Do not import torch's compiler, which is most of the time of an import of torchvision: it takes one function of
    it. That function stays what it is, but the compiler is imported when it is called."""
    if COMPILER[0] in sys.modules:
        yield
        return
    modules = {name: ModuleType(name) for name in COMPILER}
    setattr(modules[COMPILER[1]], "is_compile_supported", _is_compile_supported)  # noqa: B010
    sys.modules |= modules
    try:
        yield
    finally:
        for name in COMPILER:
            del sys.modules[name]


def _is_compile_supported(device: Any) -> Any:
    return importlib.import_module(COMPILER[1]).is_compile_supported(device)


try:
    with _without_compiler():
        import torchvision
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    _stand_ins = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for _operator in ("nms", "qnms"):
        _schema = f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        _stand_ins.define(_schema)  # type: ignore[no-untyped-call]
    with _without_compiler():
        import torchvision
except (ImportError, AttributeError):  # a torchvision that takes more of the compiler
    import torchvision

__all__ = ["torchvision"]
