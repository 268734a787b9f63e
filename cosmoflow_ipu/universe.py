"""Universes in a box: from four parameters to the counts of dark-matter particles at four redshifts.

parameters -> spectrum of Eisenstein and Hu, normalised to sigma_8 -> Gaussian field -> displacements to second order in Lagrangian
perturbation theory -> particles counted in voxels. The recipe is that of CosmoFlow's data set (2019_05_4parE: initial conditions with that
spectrum, Omega_b = 0.045, flat, redshifts 0, 0.5, 1.5 and 3, one particle per voxel on average, the box of one size in Mpc whatever h is),
except that there a particle-mesh code moves the particles: below about 5 Mpc/h at redshifts under 1 its voxels are clumpier than these.
A universe is a function of (seed, index) alone; number of threads and processes change no bit of it.

Eisenstein and Hu, "Baryonic features in the matter transfer function", https://arxiv.org/abs/astro-ph/9709112 (numbers of equations below);
displacements: Bouchet et al., https://arxiv.org/abs/astro-ph/9406013.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lightning_ipu.errors import UserError
from lightning_ipu.randomness import mix, name_word

PARAMETERS = ("omega_m", "sigma_8", "n_s", "h_0")
CENTRE = (0.3, 0.8, 0.96, 70.0)  # of the parameters; they lie within a share of it, the spread, on either side
SYMBOLS = ("Ω_m", "σ_8", "n_s", "H_0")
REDSHIFTS = (0.0, 0.5, 1.5, 3.0)
OMEGA_B = 0.045
CMB_KELVIN = 2.7255

_TARGETS, _NOISE = name_word("universe's parameters"), name_word("universe's noise")
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


@dataclass(frozen=True, kw_only=True)
class Cosmology:
    """A flat universe of cold dark matter, baryons and a cosmological constant.

    Args:
        omega_m: density of matter today, baryons included, in units of the critical one.
        sigma_8: root mean square of linear density contrast today in spheres of 8 Mpc/h.
        n_s: slope of the primordial spectrum.
        h_0: expansion rate today in km/s/Mpc.
        omega_b: density of baryons.
    """

    omega_m: float
    sigma_8: float
    n_s: float
    h_0: float
    omega_b: float = OMEGA_B

    @property
    def h(self) -> float:
        return self.h_0 / 100

    def transfer(self, k: np.ndarray) -> np.ndarray:
        """Transfer function of matter with its baryonic wiggles, at wave numbers k > 0 in h/Mpc; 1 for k -> 0."""
        om, ob = self.omega_m * self.h**2, self.omega_b * self.h**2
        fb = self.omega_b / self.omega_m
        fc, theta = 1 - fb, CMB_KELVIN / 2.7
        k = np.asarray(k, dtype=np.float64) * self.h  # 1/Mpc

        z_eq = 2.50e4 * om * theta**-4  # (2)
        k_eq = 7.46e-2 * om * theta**-2  # (3)
        b1 = 0.313 * om**-0.419 * (1 + 0.607 * om**0.674)
        b2 = 0.238 * om**0.223
        z_drag = 1291 * om**0.251 / (1 + 0.659 * om**0.828) * (1 + b1 * ob**b2)  # (4)
        r_drag, r_eq = (31.5 * ob * theta**-4 * 1000 / z for z in (z_drag, z_eq))  # (5)
        sound = 2 / (3 * k_eq) * math.sqrt(6 / r_eq)
        sound *= math.log((math.sqrt(1 + r_drag) + math.sqrt(r_drag + r_eq)) / (1 + math.sqrt(r_eq)))  # (6)
        k_silk = 1.6 * ob**0.52 * om**0.73 * (1 + (10.4 * om) ** -0.95)  # (7)
        q, ks = k / (13.41 * k_eq), k * sound  # (10)

        a1 = (46.9 * om) ** 0.670 * (1 + (32.1 * om) ** -0.532)
        a2 = (12.0 * om) ** 0.424 * (1 + (45.0 * om) ** -0.582)
        alpha_c = a1**-fb * a2 ** -(fb**3)  # (11)
        b1 = 0.944 / (1 + (458 * om) ** -0.708)
        b2 = (0.395 * om) ** -0.0266
        beta_c = 1 / (1 + b1 * (fc**b2 - 1))  # (12)
        y = (1 + z_eq) / (1 + z_drag)
        root = math.sqrt(1 + y)
        g = y * (-6 * root + (2 + 3 * y) * math.log((root + 1) / (root - 1)))  # (15)
        alpha_b = 2.07 * k_eq * sound * (1 + r_drag) ** -0.75 * g  # (14)
        beta_b = 0.5 + fb + (3 - 2 * fb) * math.sqrt((17.2 * om) ** 2 + 1)  # (24)
        beta_node = 8.41 * om**0.435  # (23)

        def pressureless(alpha: float, beta: float) -> np.ndarray:  # (19), (20)
            c = 14.2 / alpha + 386 / (1 + 69.9 * q**1.08)
            logarithm = np.log(math.e + 1.8 * beta * q)
            return logarithm / (logarithm + c * q**2)

        f = 1 / (1 + (ks / 5.4) ** 4)  # (18)
        cold = f * pressureless(1, beta_c) + (1 - f) * pressureless(alpha_c, beta_c)  # (17)
        ks_node = ks / (1 + (beta_node / ks) ** 3) ** (1 / 3)  # (22)
        baryons = pressureless(1, 1) / (1 + (ks / 5.2) ** 2)
        baryons += alpha_b / (1 + (beta_b / ks) ** 3) * np.exp(-((k / k_silk) ** 1.4))
        baryons *= np.sinc(ks_node / np.pi)  # (21)
        return fb * baryons + fc * cold  # (16)

    def linear_power(self, k: np.ndarray, *, z: float = 0.0) -> np.ndarray:
        """Linear power spectrum in (Mpc/h)^3 at wave numbers k > 0 in h/Mpc and redshift z."""
        x = np.linspace(math.log(1e-4), math.log(60.0), 1200)
        r = np.exp(x) * 8.0
        window = 3 * (np.sin(r) - r * np.cos(r)) / r**3
        variance = np.sum(self._shape(np.exp(x)) * window**2 * np.exp(3 * x)) * (x[1] - x[0]) / (2 * math.pi**2)
        return self._shape(k) * (self.sigma_8**2 / variance * self.growth(z) ** 2)

    def _shape(self, k: np.ndarray) -> np.ndarray:
        return np.asarray(k, dtype=np.float64) ** self.n_s * self.transfer(k) ** 2

    def growth(self, z: float) -> float:
        """Growth of linear density contrast up to redshift z, 1 at z = 0."""
        return self._growing_mode(1 / (1 + z)) / self._growing_mode(1.0)

    def _growing_mode(self, a: float) -> float:
        """H(a) times the integral of 1 / (a H)^3 (Heath 1977), by Gauss-Legendre in the square root of a, where it is smooth."""
        s = math.sqrt(a) * (_NODES + 1) / 2
        ratio = (1 - self.omega_m) / self.omega_m
        integrand = 2 * s**4 / (1 + ratio * s**6) ** 1.5
        return math.sqrt(1 / a**3 + ratio) * math.sqrt(a) / 2 * float(_WEIGHTS @ integrand)

    def second_growth(self, z: float) -> float:
        """Factor of the second-order displacement: -3/7 D^2 Omega_m(z)^(-1/143)."""
        matter = self.omega_m * (1 + z) ** 3
        return -3 / 7 * self.growth(z) ** 2 * (matter / (matter + 1 - self.omega_m)) ** (-1 / 143)


@dataclass(frozen=True, kw_only=True)
class Universes:
    """A family of universes, one for each index; where their parameters lie and how finely they are resolved.

    Args:
        cells: voxels along each side of the periodic box.
        voxel_size: side of a voxel in Mpc/h where H_0 = 70.
        oversample: particles along each side of a voxel. With 1, the data set's, voxels of 4 Mpc/h and more stay at one particle at high
            redshifts, since displacements are shorter than half a voxel: use 2 for those.
        fixed_mpc: the box has one size in Mpc, so that H_0 can be told from it; else one size in Mpc/h.
        spread: parameters lie within this share of their centre on either side, evenly.
        seed: of the whole family.

    Raises:
        UserError: a number out of range.
    """

    cells: int
    voxel_size: float = 1.0
    oversample: int = 1
    fixed_mpc: bool = True
    spread: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("cells", 4, 1024), ("voxel_size", 0.1, 100), ("oversample", 1, 4), ("spread", 0, 0.5), ("seed", 0, 2**63)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UserError(f"{name}={value} must lie between {low} and {high}")
        if self.cells * self.oversample % 2:
            raise UserError(f"cells={self.cells} with oversample={self.oversample} must make an even number of particles a side")

    def targets(self, index: int) -> np.ndarray:
        """The universe's parameters (4,) float32 from -1 to 1: where each lies between centre - spread and centre + spread."""
        generator = torch.Generator().manual_seed(mix(self.seed, _TARGETS, index))
        return (2 * torch.rand(4, generator=generator, dtype=torch.float64) - 1).float().numpy()

    def cosmology(self, index: int) -> Cosmology:
        """The universe's parameters in physical units."""
        return Cosmology(**dict(zip(PARAMETERS, to_physical(self.targets(index).astype(np.float64), spread=self.spread), strict=True)))

    def box(self, cosmology: Cosmology) -> float:
        """Side of the box in Mpc/h."""
        return self.cells * self.voxel_size * (cosmology.h_0 / CENTRE[3] if self.fixed_mpc else 1.0)

    def field(self, index: int, *, device: torch.device | str = "cpu") -> Tensor:
        """Spectrum (n, n, n // 2 + 1) of the linear density contrast at z = 0 on the grid of particles, as `torch.fft.rfftn` has it."""
        n, cosmology = self.cells * self.oversample, self.cosmology(index)
        generator = torch.Generator().manual_seed(mix(self.seed, _NOISE, index))
        # Drawn on the CPU for every device: a universe must not depend on where it is made.
        noise = torch.randn(n, n, n, generator=generator).to(device)
        table, box = np.zeros(3 * (n // 2) ** 2 + 1), self.box(cosmology)
        k = 2 * math.pi / box * np.sqrt(np.arange(1, len(table)))
        table[1:] = np.sqrt(cosmology.linear_power(k) * n**3 / box**3)
        amplitude = torch.from_numpy(table.astype(np.float32)).to(device)
        squares = _squares(n, str(noise.device))
        return _forward(noise).mul_(amplitude.index_select(0, squares.view(-1)).view(squares.shape))

    def counts(self, index: int, *, device: torch.device | str = "cpu") -> Tensor:
        """Particles in every voxel: (cells, cells, cells, 4) int16, redshifts last, on the CPU."""
        cosmology = self.cosmology(index)
        first, second = displacements(self.field(index, device=device))
        n, scale = self.cells * self.oversample, self.cells / (2 * math.pi)  # displacements in voxels
        lattice = (torch.arange(n, device=device) + 0.5) / self.oversample
        counts = torch.empty(self.cells**3, len(REDSHIFTS), dtype=torch.int16)
        for column, z in enumerate(REDSHIFTS):
            flat = torch.zeros((), dtype=torch.int32, device=device)
            d1, d2 = cosmology.growth(z) * scale, cosmology.second_growth(z) * scale
            for axis in range(3):
                position = torch.add(lattice.view([-1 if a == axis else 1 for a in range(3)]), first[axis], alpha=d1)
                position.add_(second[axis], alpha=d2).floor_()
                position.sub_((position / self.cells).floor_(), alpha=self.cells)  # back into the periodic box
                flat = (flat * self.cells).add(position.to(torch.int32))
            counted = torch.bincount(flat.view(-1), minlength=self.cells**3)
            if (most := int(counted.max())) > torch.iinfo(torch.int16).max:
                raise UserError(
                    f"universe {index} has a voxel of {most:,} particles, more than int16 holds: lower voxel_size or oversample"
                )
            counts[:, column] = counted
        return counts.view(self.cells, self.cells, self.cells, len(REDSHIFTS))


def to_physical(targets: np.ndarray | Tensor, *, spread: float) -> np.ndarray | Tensor:
    """Parameters (..., 4) in physical units of targets from -1 to 1."""
    centre = torch.tensor(CENTRE, dtype=targets.dtype, device=targets.device) if isinstance(targets, Tensor) else np.array(CENTRE)
    return centre * (1 + spread * targets)


def cut(counts: Tensor, size: int) -> Tensor:
    """Cubes (cubes, size, size, size, 4) that a box (cells, cells, cells, 4) is cut into, the first axis slowest."""
    parts = counts.shape[0] // size
    blocks = counts.view(parts, size, parts, size, parts, size, -1).permute(0, 2, 4, 1, 3, 5, 6)
    return blocks.reshape(parts**3, size, size, size, -1)


def displacements(field: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """First- and second-order displacements of particles on a grid, for growth factors of 1.

    Args:
        field: spectrum (n, n, n // 2 + 1) complex of the linear density contrast.

    Returns:
        -grad phi_1 and grad phi_2, three axes (n, n, n) each, in units of box / 2 pi, where laplace phi_1 is the contrast and laplace phi_2
        the sum over pairs of axes i < j of phi_1,ii phi_1,jj - phi_1,ij^2. Transforms along one axis are shared by all that need them:
        29 in place of 39.
    """
    n, device = field.shape[0], str(field.device)
    inverse = _inverse_squares(n, device)
    x, y, z = _wave_numbers(n, device)
    potential = field * -inverse
    along_x, along_y, along_z = (
        (lambda f: torch.fft.ifft(f, dim=0)),
        (lambda f: torch.fft.ifft(f, dim=1)),
        lambda f: torch.fft.irfft(f, n=n),
    )

    p, px, pxx = along_x(potential), along_x(potential * x), along_x(potential * _squared(x))
    pyy, py, p0 = along_y(p * _squared(y)), along_y(p * y), along_y(p)
    pxy, px, pxx = along_y(px * y), along_y(px), along_y(pxx)
    first = [along_z(px).neg_(), along_z(py).neg_(), along_z(p0 * z).neg_()]

    xx, yy, zz = along_z(pxx), along_z(pyy), along_z(p0 * _squared(z))
    source = xx.mul_(yy + zz).addcmul_(yy, zz)
    for mixed in (pxy, px * z, py * z):
        mixed = along_z(mixed)
        source.addcmul_(mixed, mixed, value=-1)
    potential = _forward(source).mul_(-inverse)
    p, px = along_x(potential), along_x(potential * x)
    p0, py = along_y(p), along_y(p * y)
    return first, [along_z(along_y(px)), along_z(py), along_z(p0 * z)]


def power_spectrum(field: Tensor, *, box: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Power spectrum of a periodic field, in shells as wide as the box's own wave number, up to Nyquist's.

    Args:
        field: (n, n, n); its mean is taken off and, where it is not 0 as of counts, divided by.
        box: side of the box in Mpc/h.

    Returns:
        For each shell: mean wave number in h/Mpc, power in (Mpc/h)^3, number of independent modes.
    """
    n, field = field.shape[0], field.double()
    mean = field.mean()
    contrast = field / mean - 1 if abs(mean) > 1e-6 else field
    power = torch.fft.rfftn(contrast).abs().square().mul_(box**3 / n**6).numpy().ravel()
    numbers = np.sqrt(_squares(n, "cpu").numpy().ravel())
    weight = np.ones((n, n, n // 2 + 1))
    weight[..., [0, -1]] = 0.5  # these planes hold each mode twice, as itself and as its mirror image
    weight, shell = weight.ravel(), np.rint(numbers).astype(np.int64)

    def sums(values: np.ndarray) -> np.ndarray:
        return np.bincount(shell, values)[1 : n // 2]

    modes = sums(weight)
    return sums(weight * numbers) / modes * (2 * math.pi / box), sums(weight * power) / modes, modes


def _forward(field: Tensor) -> Tensor:
    """`torch.fft.rfftn`, axis by axis, which is faster."""
    return torch.fft.fft(torch.fft.fft(torch.fft.rfft(field), dim=1), dim=0)


@cache
def _squares(n: int, device: str) -> Tensor:
    """Squared wave numbers (n, n, n // 2 + 1) int32 in units of the box's own, for the half that a real transform keeps."""
    full = torch.fft.fftfreq(n, 1 / n).square().int()
    half = torch.arange(n // 2 + 1).square().int()
    return (full.view(n, 1, 1) + full.view(1, n, 1) + half.view(1, 1, -1)).to(device)


@cache
def _inverse_squares(n: int, device: str) -> Tensor:
    return _squares(n, device).float().reciprocal_().nan_to_num_(posinf=0.0)


@cache
def _wave_numbers(n: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """i times the wave number along each axis: a derivative. Nyquist's, which has no sign, is 0."""
    full = torch.fft.fftfreq(n, 1 / n)
    full[n // 2] = 0
    half = full[: n // 2 + 1]
    return tuple((1j * values).to(torch.complex64).to(device) for values in (full.view(n, 1, 1), full.view(1, n, 1), half.view(1, 1, -1)))


def _squared(derivative: Tensor) -> Tensor:
    return (derivative * derivative).real
