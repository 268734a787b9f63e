"""Pictures: a universe's slices with its power spectrum beside theory, and predicted against true parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from cosmoflow_ipu.universe import CENTRE, REDSHIFTS, SYMBOLS, Universes, power_spectrum, to_physical
from lightning_ipu.files import atomic_write


def draw_universe(universes: Universes, index: int, *, path: Path) -> None:
    """Draw a universe to a PNG: a slice of its counts at each redshift, and the spectra of counts and linear theory.

    Raises ModuleNotFoundError where matplotlib is not installed, OSError where the file cannot be written.
    """
    cosmology, counts = universes.cosmology(index), universes.counts(index)
    box = universes.box(cosmology)
    figure, axes = _figure(1, 5, width=19, height=4.2)
    for channel, (axis, z) in enumerate(zip(axes, REDSHIFTS, strict=False)):
        image = axis.imshow(counts[: max(1, universes.cells // 16), :, :, channel].float().mean(0).log1p(), cmap="magma", origin="lower")
        image.set_extent((0, box, 0, box))
        axis.set(title=f"z = {z:g}", xlabel="Mpc/h")
        k, power, _ = power_spectrum(counts[..., channel].float(), box=box)
        (line,) = axes[4].loglog(k, power, ".", markersize=4, label=f"z = {z:g}")
        axes[4].loglog(k, cosmology.linear_power(k, z=z), color=line.get_color(), linewidth=1)
    axes[4].set(title="power: counts (dots), linear theory (lines)", xlabel="k in h/Mpc", ylabel="P in (Mpc/h)³")
    axes[4].xaxis.set_minor_formatter("")
    axes[4].legend(fontsize=8)
    values = to_physical(universes.targets(index).astype(np.float64), spread=universes.spread)
    figure.suptitle(
        f"universe {index}: " + ", ".join(f"{symbol} = {value:.4g}" for symbol, value in zip(SYMBOLS, values, strict=True)), fontsize=11
    )
    _save(figure, path)


def draw_predictions(predictions: np.ndarray, targets: np.ndarray, *, path: Path, spread: float | None) -> None:
    """Draw predicted against true parameters (n, 4) from -1 to 1 to a PNG, in physical units where the spread is known.

    Does nothing where matplotlib is not installed: training does not need it.
    """
    try:
        figure, axes = _figure(1, 4, width=15, height=4.2)
    except ModuleNotFoundError:
        return
    errors = np.abs(predictions - targets).mean(0)
    if spread:
        predictions, targets = to_physical(predictions, spread=spread), to_physical(targets, spread=spread)
    for number, axis in enumerate(axes):
        centre, reach = (CENTRE[number], CENTRE[number] * spread) if spread else (0.0, 1.0)
        axis.plot(targets[:, number], predictions[:, number], ".", markersize=max(1.0, 6 - math.log10(len(targets))), alpha=0.5)
        axis.axline((centre, centre), slope=1, color="black", linewidth=1)
        limits = (centre - 1.2 * reach, centre + 1.2 * reach)
        axis.set(title=f"{SYMBOLS[number]}: MAE {errors[number]:.3f} of its half-range", xlabel="true", ylabel="predicted")
        axis.set(xlim=limits, ylim=limits, aspect="equal")
    _save(figure, path)


def _figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns)


def _save(figure: Any, path: Path) -> None:
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=110)
