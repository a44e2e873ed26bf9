"""Functions that several methods share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import jvp
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pluribus.client import Client
from pluribus.errors import ConfigError, MismatchError
from pluribus.internal.devices import double as double
from pluribus.internal.steps import SWEEP_BATCH, Map
from pluribus.message import Message, Rows
from pluribus.models.layers import recurrent as recurrent
from pluribus.server import Server

Weighting = Literal["samples", "uniform"]
Tensors = Mapping[str, Tensor]

# ---- classes and logits --------------------------------------------------------------------------------------------


def onehot(y: Tensor, classes: int) -> Tensor:
    """One row per label. It only compares, and reads no value on the CPU, so that captured steps can use it."""
    return (y[:, None] == torch.arange(classes, device=y.device)).to(torch.float32)


def class_means(client: Client, on: str = "train", rows: Map = Client.features) -> Rows:
    """Mean feature (or other row) per held class, over all samples, in eval mode: exact for every batch size."""
    members = onehot(client.data[on].labels(), client.task.classes)
    return row_means(*class_sums(client, members, client.sweep(rows, on)))


def class_sums(client: Client, members: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of private rows per class, and their numbers. `members` (rows, classes) says which class a row counts for.

    In a private run the vector of each row is clipped, and sums and numbers are noised.
    """
    if client.guard is not None:
        return client.guard.class_sums(client, members, values)
    # a matrix product, not `index_add_`: its order of summation is fixed on every device
    return members.T @ values, members.sum(0)


def class_counts(client: Client, on: str = "train") -> Tensor:
    """Number of private rows per class. In a private run, with noise."""
    members = onehot(client.data[on].labels(), client.task.classes)
    return members.sum(0) if client.guard is None else client.guard.class_counts(client, members)


def row_means(sums: Tensor, counts: Tensor) -> Rows:
    """Sums per class divided by counts. A class with count 0 has no mean."""
    return Rows(sums / counts.clamp(min=1)[:, None], counts > 0)


class Tally(nn.Module):
    """Sums per class over a client's training steps. It is part of `client.state`, and each step adds to it.

    In a private run, training adds nothing: the sums are those of one pass over the rows after it.

    >>> tally = Tally(3, 2)
    >>> tally.add(torch.tensor([0, 0, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    >>> tally.means().value.tolist()
    [[2.0, 3.0], [0.0, 0.0], [5.0, 6.0]]
    """

    sums: Tensor
    counts: Tensor

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(classes, width))
        self.register_buffer("counts", torch.zeros(classes))
        self.collected: list[tuple[Tensor, Tensor]] | None = None  # in place of sums, where a private run collects rows

    def reset(self) -> None:
        self.sums.zero_()
        self.counts.zero_()

    def add(self, y: Tensor, values: Tensor) -> None:
        if self.collected is not None:
            self.collected.append((y.detach(), values.detach().float()))
            return
        members = onehot(y, len(self.counts))
        self.sums += members.T @ values.detach().float()
        self.counts += members.sum(0)

    def means(self) -> Rows:
        return row_means(self.sums, self.counts)


def rows_mean(reports: Sequence[Rows], weights: Sequence[Tensor] | None = None) -> Rows:
    """Mean per class over the reports that hold it. `weights` has a number per class for each report; default: 1."""
    held = torch.stack([r.held for r in reports])
    share = held.float() if weights is None else held * torch.stack(list(weights)).float()
    total = (torch.stack([r.value for r in reports]) * share[:, :, None]).sum(0)
    return Rows(total / share.sum(0).where(held.any(0), 1.0)[:, None], held.any(0))


def distance_to_rows(values: Tensor, rows: Rows, y: Tensor) -> Tensor:
    """Mean squared error to the vector of each sample's class. Samples of a class without one have no error."""
    held = rows.held[y, None]
    return F.mse_loss(values * held, rows.value[y] * held)


def nearest(values: Tensor, rows: Rows) -> Tensor:
    """Scores by distance: minus the squared distance to each class's vector, minus infinity for a class without one."""
    squared = (values[:, None] - rows.value).square().sum(2)
    return (-squared).masked_fill(~rows.held, -torch.inf)


def kl(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """KL divergence of the student's softmax from the teacher's, for each row of logits: summed over classes."""
    target, given = (teacher / temperature).log_softmax(1), (student / temperature).log_softmax(1)
    return (target.exp() * (target - given)).sum(1)  # torch's kl_div cannot be stacked


# ---- models --------------------------------------------------------------------------------------------------------


def weighted_mean(parts: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]) -> dict[str, Tensor]:
    """Mean of named tensors over clients. Of integers (counters), the maximum: their mean may not be an integer."""
    total = sum(weights[k] for k in parts)
    mean: dict[str, Tensor] = {}
    for name in next(iter(parts.values())):
        values = [part[name] for part in parts.values()]
        if values[0].is_floating_point():
            mean[name] = sum((v * (weights[k] / total) for k, v in zip(parts, values, strict=True)), torch.zeros(()))
        else:
            mean[name] = torch.stack(values).amax(0)
    return mean


def client_weights(server: Server, clients: Iterable[int], weighting: Weighting) -> dict[int, int]:
    """The weight of each client in a mean: its number of training samples, or 1."""
    return {k: server.cards[k].samples if weighting == "samples" else 1 for k in clients}


def average_uploads(
    server: Server, uploads: Mapping[int, Message], prefix: str = "", weighting: Weighting = "samples"
) -> dict[str, Tensor]:
    """Mean over clients of the tensors that they sent under a prefix."""
    parts = {k: upload.part(prefix) for k, upload in uploads.items()}
    return weighted_mean(parts, client_weights(server, uploads, weighting))


@torch.no_grad()
def gather_statistics(client: Client) -> None:
    """Let batch norm in the client's model normalize by the statistics of the client's training rows: one pass."""
    norms: list[Any] = [module for module in client.model.modules() if isinstance(module, _BatchNorm)]
    data = client.data["train"]
    if not norms or len(data) < 2:  # one row may have no variance
        return
    client.set_mode(False)
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over batches
        norm.train()
    for positions in torch.tensor_split(torch.arange(len(data), device=client.device), -(-len(data) // SWEEP_BATCH)):
        client.model(data.take(positions)[0])
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
        norm.eval()


@torch.no_grad()
def sgd_step(module: nn.Module, loss: Tensor, lr: float) -> None:
    """Take one plain gradient step on all parameters of a module."""
    parameters = list(module.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.sub_(g, alpha=lr)


@contextmanager
def blamed_on(flag: str) -> Iterator[None]:
    """Put the flag that names a model before the sentence of any error about that model."""
    try:
        yield
    except ConfigError as error:
        # a model that fails on images of this shape: the zoo has caught a RuntimeError of its layers
        too_small = isinstance(error, MismatchError) and isinstance(error.__cause__, RuntimeError)
        hint = " Enlarge them, for example --image-size 32." if too_small else ""
        raise type(error)(f"{flag}: {error.sentence}{hint}") from error


# ---- gradients -----------------------------------------------------------------------------------------------------


def flatten(grads: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """Gradients as one vector in the order of the parameters; a missing one counts as zero."""
    return torch.cat([(grads[n] if n in grads else torch.zeros_like(p)).flatten() for n, p in parameters.items()])


def unflatten(vector: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `flatten`."""
    parts = torch.split(vector, [p.numel() for p in parameters.values()])
    return {name: part.view_as(p) for part, (name, p) in zip(parts, parameters.items(), strict=True)}


@contextmanager
def derivable(client: Client) -> Iterator[None]:
    """Run attention and recurrent layers with kernels that torch differentiates twice, even if faster ones exist."""
    with sdpa_kernel(SDPBackend.MATH):
        if client.device.type != "cuda" or not recurrent(client.model):
            yield
            return
        with _cudnn_lock, torch.backends.cudnn.flags(enabled=False):  # a global flag
            yield


_cudnn_lock = threading.Lock()
ONLY_ONCE = ("not implemented", "differentiate twice")  # in torch's error if a layer has no second derivative


def backward_again(client: Client, value: Tensor, instead: str) -> None:
    """Backward through gradients, into `grad` of every leaf. If that fails, the error advises to use `instead`.

    Not `autograd.grad`: it follows only the paths to its inputs, and so silently skips layers that have no second
    derivative.
    """
    try:
        value.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if not any(words in str(error) for words in ONLY_ONCE):
            raise
        raise MismatchError(
            f"this method differentiates twice, and '{client.card.model}' has a layer that torch differentiates only "
            f"once ({str(error).strip().splitlines()[0].rstrip('.')}). Use {instead}."
        ) from error


def directional(client: Client, function: Callable[[Tensors], Tensor], at: Tensors, direction: Tensors) -> Tensor:
    """J g: the derivative of a function of parameters along a direction, in forward mode where all layers have one."""
    if recurrent(client.model):
        return jvp_by_double_backward(client, function, at, direction)
    return jvp(function, (at,), (direction,))[1]  # type: ignore[no-any-return]


def jvp_by_double_backward(
    client: Client, function: Callable[[Tensors], Tensor], at: Tensors, direction: Tensors
) -> Tensor:
    """J g without forward mode: J^T u is linear in u, and u's gradient of <J^T u, g> is J g."""
    theta = {name: value.requires_grad_() for name, value in at.items()}
    a = function(theta)
    u = torch.zeros_like(a, requires_grad=True)
    pulled = torch.autograd.grad(a, list(theta.values()), u, create_graph=True, allow_unused=True)
    pairs = zip(theta, pulled, strict=True)
    along = torch.stack([(g * direction[n]).sum() for n, g in pairs if g is not None]).sum()
    backward_again(client, along, "another model")
    assert u.grad is not None
    return u.grad


def turn_into_gradients(loss: Callable[[], Tensor], variables: Mapping[str, Tensor]) -> None:
    """Replace tensors by the gradients of a loss with respect to them, in place: both are as large as a model.

    Each gradient overwrites its variable as soon as it is computed: from then on nothing needs the old value.
    """
    linear = _OverwritingLinear(variables.values())
    unused = {id(variable): variable for variable in variables.values()}

    def overwrite(variable: Tensor) -> None:
        """Called when all gradients of the variable are there."""
        parts = [part for part in (variable.grad, linear.take_sum(variable)) if part is not None]
        variable.grad = None
        if parts:
            unused.pop(id(variable)).data.copy_(parts[0] if len(parts) == 1 else parts[0] + parts[1])

    for variable in variables.values():
        variable.requires_grad_()
        variable.register_post_accumulate_grad_hook(overwrite)  # type: ignore[no-untyped-call]
    with linear:
        value = loss()
    torch.autograd.backward(value)
    for key, variable in unused.items():
        if key not in linear.overwritten:
            variable.data.zero_()
    for variable in variables.values():
        variable.requires_grad_(False)


class _OverwritingLinear(TorchFunctionMode):
    """Linear layers that write the gradient of their weight over the weight. Other layers need memory for both at once,
    and the weight of a linear layer may be most of a model."""

    def __init__(self, variables: Iterable[Tensor]) -> None:
        super().__init__()
        self._uses = {id(variable): 0 for variable in variables}  # whose gradient is still to come
        self._shared: set[int] = set()  # variables that something else uses, too
        self._sums: dict[int, Tensor] = {}
        self.overwritten: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and self._suits(*args):
            x, weight, bias = (*args, None)[:3]
            self._uses[id(weight)] += 1
            return _Linear.apply(x, weight, bias, self._take_gradient)  # type: ignore[no-untyped-call]
        self._shared |= {id(value) for value in tree_leaves((args, kwargs)) if id(value) in self._uses}
        return func(*args, **(kwargs or {}))

    def _suits(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        return id(weight) in self._uses and x.dim() > 1 and not torch.is_autocast_enabled(x.device.type)

    def _take_gradient(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left @ right to the gradient of a weight. The last one overwrites it, if nothing else needs it."""
        key = id(weight)
        self._uses[key] -= 1
        if self._uses[key] or key in self._shared:
            product = left @ right
            self._sums[key] = product + self._sums[key] if key in self._sums else product
            return
        torch.mm(left, right, out=weight.data)
        if key in self._sums:
            weight.data.add_(self._sums.pop(key))
        self.overwritten.add(key)

    def take_sum(self, variable: Tensor) -> Tensor | None:
        """The gradients of linear layers that could not overwrite the variable."""
        return self._sums.pop(id(variable), None)


class _Linear(torch.autograd.Function):
    """A linear layer. Its backward pass passes the two factors of the weight's gradient on, and does not return it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, take: Callable[[Tensor, Tensor, Tensor], None]
    ) -> Tensor:
        ctx.x, ctx.weight, ctx.take = x, weight, take
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows = gradient.flatten(0, -2)
        passed = gradient @ ctx.weight if ctx.needs_input_grad[0] else None
        ctx.take(ctx.weight, rows.T, ctx.x.flatten(0, -2))
        return passed, None, rows.sum(0) if ctx.needs_input_grad[2] else None, None


def project(gradient: Tensor, reference: Tensor, margin: float = 0.0, eps: float = 0.0) -> Tensor:
    """The vector nearest to the gradient with <., reference> >= 0. Without a conflict this is the gradient itself.

    The dual of this quadratic program has one variable, so its solution has a closed form: g + v r with
    v = max(0, -<g, r> / <r, r>). GEM's solver uses v >= margin and <r, r> + eps.
    Sums use double precision: the vectors have as many entries as a model has weights.
    """
    g, r = double(gradient), double(reference)
    inner = g @ r
    conflict = inner < 0
    v = (-inner / torch.where(conflict, r @ r + eps, 1.0)).clamp(min=margin)
    return torch.where(conflict.to(gradient.device), (g + v * r).to(gradient), gradient)
