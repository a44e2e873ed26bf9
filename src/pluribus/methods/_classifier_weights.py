"""FedPAC's weights of heads: a quadratic program on the simplex for each client, from class statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from pluribus.message import LARGEST

RIDGE = 1e-9  # relative to the mean of the diagonal: of several solutions, the one with the most equal weights


def combining_weights(moments: Tensor, variances: Tensor) -> Tensor:
    """Row i has the weights of all heads in the head of client i: they minimize

        sum_j alpha_j^2 V_j + sum_y ||h_i^y - sum_j alpha_j h_j^y||^2    with alpha_j >= 0 and sum_j alpha_j = 1.

    `moments` has h_j^y = p_j(y) mu_j^y, of shape (clients, classes, width), `variances` has V_j.
    """
    h = moments.flatten(1).double()
    if not all(bool((numbers.abs() <= LARGEST).all()) for numbers in (h, variances)):
        raise ValueError("class statistics that no features have")  # the sender is left out, and named
    rows = []
    for i in range(len(h)):
        apart = h[i] - h  # alpha sums to 1, so the second term is ||sum_j alpha_j (h_i - h_j)||^2
        rows.append(smallest_on_simplex(apart @ apart.T + variances.double().diag()))
    return torch.stack(rows)


def smallest_on_simplex(p: Tensor) -> Tensor:
    """The point of the simplex where alpha^T P alpha is smallest, for a positive semidefinite P.

    If x >= 0 minimizes x^T P x / 2 - sum_j x_j, then P x >= 1, with equality where x > 0. So x / sum x fulfills the
    conditions of the minimum on the simplex. With P = L L^T, x is a nonnegative least-squares solution.
    """
    from scipy.optimize import nnls  # here, because its import takes a quarter of a second

    scale = p.diagonal().mean()
    p = (p / scale if scale > 0 else p) + RIDGE * torch.eye(len(p), dtype=p.dtype)
    lower = torch.linalg.cholesky(p)
    ones = torch.ones(len(p), 1, dtype=p.dtype)
    target = torch.linalg.solve_triangular(lower, ones, upper=False)
    x = torch.from_numpy(nnls(lower.T.numpy(), target.flatten().numpy())[0])
    return x / x.sum()
