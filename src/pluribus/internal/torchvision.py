"""The only module that imports torchvision. Import it late: torchvision and timm take seconds to import.

    from pluribus.internal.torchvision import torchvision

Torch from the CPU-only index with torchvision from the registry cannot load torchvision's compiled operators, and
`import torchvision` fails with `operator torchvision::nms does not exist` while it registers two of them for the meta
device. No classifier uses those two, so this module declares them, without an implementation, if they are missing.
timm imports torchvision, so import this module before timm.
"""

from __future__ import annotations

import torch

# A module-level name, because torch drops the declarations of a Library that is garbage collected.
_stand_ins: torch.library.Library | None = None

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    _stand_ins = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for _operator in ("nms", "qnms"):
        _schema = f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        _stand_ins.define(_schema)  # type: ignore[no-untyped-call]
    import torchvision

__all__ = ["torchvision"]
