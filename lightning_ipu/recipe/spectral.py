"""Spectral norm's buffers for averaged weights: the singular vectors of the weights themselves, found by power iteration.

The average of several vectors u or v is shorter than one and fits none of the weights: the largest singular value is then estimated
too small, and outputs grow without bound. Both of torch's kinds (utils.spectral_norm, utils.parametrizations.spectral_norm) are recognised by
their names in a state_dict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import normalize

_U = re.compile(r"(?P<prefix>(?:.+\.)?parametrizations\.[^.]+)\.0\._u|(?P<old>.+)_u")
_TURNS, _CLOSE = 1000, 1e-9


def vectors_in(names: Iterable[str]) -> list[tuple[str, str, str]]:
    """The names (weight, u, v) of every spectral norm in a state_dict."""
    names, found = set(names), []
    for u in sorted(names):
        if match := _U.fullmatch(u):
            weight = f"{match['old']}_orig" if match["prefix"] is None else f"{match['prefix']}.original"
            v = f"{u[:-1]}v"
            if {weight, v} <= names:
                found.append((weight, u, v))
    return found


def renewed_vectors(averaged: Mapping[str, Tensor], latest: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Vectors u and v by name for averaged weights.

    Args:
        averaged: weights by their names.
        latest: the state_dict of the latest weights, or a part of it; the iteration starts from its u and v.
    """
    renewed = {}
    for weight, u, v in vectors_in(latest):
        if weight in averaged:
            first, second = _singular_vectors(averaged[weight], latest[weight], latest[u], latest[v])
            renewed |= {u: first.to(latest[u]), v: second.to(latest[v])}
    return renewed


@torch.no_grad()
def _singular_vectors(weight: Tensor, latest: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    u, v = u.double().to(weight.device), v.double().to(weight.device)
    # The dimension of the outputs is the first, or in transposed convolutions the second: u and v of the latest weights tell.
    fitting = [dim for dim, size in enumerate(weight.shape) if size == len(u) and weight.numel() == len(u) * len(v)]
    latest = latest.double().to(weight.device)
    dim = max(fitting, key=lambda dim: float(u @ latest.movedim(dim, 0).flatten(1) @ v))
    matrix = weight.double().movedim(dim, 0).flatten(1)
    value = -1.0
    for _ in range(_TURNS):
        v = normalize(matrix.T @ u, dim=0, eps=1e-12)
        u = normalize(matrix @ v, dim=0, eps=1e-12)
        before, value = value, float(u @ matrix @ v)
        if abs(value - before) <= _CLOSE * value:
            break
    return u, v
