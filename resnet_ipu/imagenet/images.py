"""One image, from the bytes of its file to uint8 pixels: a rule for every kind of file, and the crops of training and evaluation.

Plain JPEGs are decoded by torchvision, everything else by Pillow, which gives the same pixels for a JPEG but takes longer to hand them over.
The rules are the same wherever an image is read, in training, validation, prediction and after conversion to TFRecords:

* The bytes decide what a file is, not its name: a PNG called .JPEG is a PNG. Of an animation the first frame counts.
* Grey becomes three equal channels. Of 16 bits the upper eight are kept.
* CMYK: where there is an Adobe marker the inks are stored inverted, as Adobe's programs do; where there is none, as they are.
* Transparent pixels, palettes included, lie on white; the colour hidden under them does not show.
* An EXIF orientation is carried out. Metadata that cannot be read count as absent: pixels alone decide whether a file is whole.
* Floating-point pixels have no range to go by and are refused, and so is whatever is cut off or no image.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torchvision.io  # noqa: F401 -- registers the operator below
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as v2

from lightning_ipu.errors import UserError

__all__ = [
    "MEAN",
    "STD",
    "UNIFORMS",
    "ImageError",
    "center_crop",
    "decode",
    "half_scale_decoder",
    "image_facts",
    "random_crop_box",
    "training_crop",
]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels in [0, 1], as torchvision's weights were trained with
UNIFORMS = 23  # random numbers that a training crop takes
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a training crop: share of the image's area; width / height

_FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "GIF",
    "BMP",
    "DIB",
    "TIFF",
    "PPM",
    "AVIF",
    "JPEG2000",
)  # none, as EPS would be, that Pillow runs a program for
_TURNS = {  # by EXIF's orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PNG = b"\x89PNG\r\n\x1a\n"  # how one begins
_LONGEST = 4  # times its shorter side that an image's longer one may have before an evaluation scales it
_LARGEST = 2 * (Image.MAX_IMAGE_PIXELS or 1 << 62)  # pixels from which on Pillow refuses an image
Image.init()  # without which Pillow knows the commonest formats only
_RGB = 3  # torchvision's ImageReadMode.RGB
# The operator beneath torchvision.io.decode_jpeg, which from 0.29 on warns at every call; without it Pillow decodes.
_T = TypeVar("_T")
_decode_jpeg = getattr(torch.ops.image, "decode_jpeg", None) if hasattr(torch.ops, "image") else None


class ImageError(UserError):
    """An image that cannot be used; the message is one line with its place and the cause."""

    def __init__(self, place: str | os.PathLike[str], cause: str) -> None:
        super().__init__(f"{os.fspath(place)}: {cause}")
        self.place, self.cause = os.fspath(place), cause

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), (self.place, self.cause)  # it may come from another process


# -- decoding -----------------------------------------------------------------------------------------------------------------


class JpegHeader(NamedTuple):
    """What a JPEG says of itself before its pixels: sides, channels, and whether it has EXIF data, which may turn it."""

    height: int
    width: int
    channels: int
    has_exif: bool


def jpeg_header(data: np.ndarray) -> JpegHeader | None:
    """The header of a JPEG's bytes; None for other bytes."""
    view, at, has_exif = memoryview(data), 2, False
    if bytes(view[:2]) != b"\xff\xd8":
        return None
    while at + 9 < len(view) and view[at] == 0xFF:
        marker = view[at + 1]
        if marker == 0xFF:  # filling
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = view[at + 5] << 8 | view[at + 6], view[at + 7] << 8 | view[at + 8]
            return JpegHeader(height, width, view[at + 9], has_exif)
        elif 0xD0 <= marker <= 0xD8 or marker == 0x01:  # without a length
            at += 2
        else:
            has_exif |= marker == 0xE1 and bytes(view[at + 4 : at + 8]) == b"Exif"
            at += 2 + (view[at + 2] << 8 | view[at + 3])
    return None


def decode(data: np.ndarray) -> Tensor:
    """Pixels [3, height, width] uint8 of an image file's bytes, given as a uint8 array; pixel by pixel in memory where it can be.

    Raises:
        ValueError: with the cause, where the bytes are no image, cut off, or of a kind that there is no rule for.
    """
    header = jpeg_header(data)
    if header is not None and header.channels in (1, 3) and header.height * header.width <= _LARGEST and _decode_jpeg is not None:
        try:
            return _decode_jpeg(torch.from_numpy(data if data.flags.writeable else data.copy()), _RGB, True)
        except RuntimeError:  # Pillow says what is wrong, or forgives a missing end
            pass
    return decode_with_pillow(data)


def decode_with_pillow(data: np.ndarray) -> Tensor:
    """`decode` by Pillow alone."""
    if len(data) == 0:
        raise ValueError("the file is empty")
    return torch.from_numpy(_opened(data, _to_rgb, "the image cannot be decoded")).permute(2, 0, 1)


def _opened(data: np.ndarray, use: Callable[[Image.Image], _T], failure: str) -> _T:
    """The result of `use` on an image file; if it fails on a PNG or JPEG, on the file without its metadata.

    Pillow refuses a whole file for a broken or large text or colour profile.
    """
    try:
        try:
            with Image.open(io.BytesIO(memoryview(data)), formats=_FORMATS) as image:
                return use(image)
        except Exception:
            if (bare := _bare(data)) is None:
                raise
        with Image.open(io.BytesIO(bare), formats=("PNG", "JPEG")) as image:
            return use(image)
    except Image.UnidentifiedImageError:
        raise ValueError(_what_else(data)) from None
    except Exception as error:  # a damaged file can raise nearly anything
        raise ValueError(f"{failure}: {error or type(error).__name__}") from error


def _bare(data: np.ndarray) -> bytes | None:
    """A PNG or JPEG reduced to what its pixels depend on, including the orientation; None for other files."""
    view = memoryview(data)
    if bytes(view[:8]) == _PNG:
        return _PNG + b"".join(chunk for kind, chunk in _png_chunks(view) if _is_needed(kind, chunk))
    if bytes(view[:2]) == b"\xff\xd8":
        return b"\xff\xd8" + b"".join(segment for marker, segment in _jpeg_segments(view) if _tells_of_pixels(marker, segment))
    return None


def _png_chunks(view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    at = 8
    while at + 8 <= len(view):
        length, kind = struct.unpack(">I4s", view[at : at + 8])
        yield kind, view[at : at + 12 + length]
        at += 12 + length


def _is_needed(kind: bytes, chunk: memoryview) -> bool:
    whole = kind == b"eXIf" and zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:], "big")
    return whole or kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")


def _jpeg_segments(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The segments before the pixels; then, as the last one, these and all that follows."""
    at = 2
    while at + 4 <= len(view) and view[at] == 0xFF and view[at + 1] not in (0xDA, 0xFF):
        end = at + 2 + (view[at + 2] << 8 | view[at + 3])
        yield view[at + 1], view[at:end]
        at = end
    yield 0xDA, view[at:]


def _tells_of_pixels(marker: int, segment: memoryview) -> bool:
    if marker == 0xEE:  # Adobe's marker, which says how colours are stored
        return len(segment) >= 16
    return marker == 0xE1 or not (0xE0 <= marker <= 0xEF or marker == 0xFE)  # of applications and comments, EXIF alone


def half_scale_decoder() -> Callable[[np.ndarray, JpegHeader], Tensor]:
    """What decodes a JPEG [3, height, width] uint8 at half its sides, rounded up: libjpeg-turbo, through simplejpeg.

    Pillow can do it too, but then takes as long as for the whole.

    Raises:
        UserError: simplejpeg is not installed. ValueError: from the decoder, where it cannot decode the bytes.
    """
    try:
        from simplejpeg import decode_jpeg
    except ImportError:
        raise UserError("fast_decode needs the package simplejpeg, which is not installed: pip install 'lightning-ipu[images]'") from None

    def decode_half(data: np.ndarray, header: JpegHeader) -> Tensor:
        pixels = decode_jpeg(data, min_height=-(-header.height // 2), min_width=-(-header.width // 2), min_factor=2)
        return torch.from_numpy(pixels).permute(2, 0, 1)

    return decode_half


def _to_rgb(image: Image.Image) -> np.ndarray:
    """Pixels (height, width, 3) uint8 by the rules at the top."""
    image.load()
    inverted = image.mode == "CMYK" and image.format == "JPEG" and "adobe" not in image.info  # Pillow takes every JPEG for Adobe's
    transparent = image.info.get("transparency")
    if (turn := _TURNS.get(_orientation(image))) is not None:
        image = image.transpose(turn)
    if image.mode == "F":
        raise ValueError("floating-point pixels have no range to go by")
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 0xFFFF:
            raise ValueError(f"grey values from {grey.min()} to {grey.max()} are not of 16 bits")
        pixels = np.where(grey == transparent, 255, grey >> 8) if isinstance(transparent, int) else grey >> 8
        return np.repeat(pixels.astype(np.uint8)[:, :, None], 3, axis=2)
    if inverted:
        image = Image.fromarray(255 - np.asarray(image), "CMYK")
    if transparent is not None or image.mode in ("PA", "LA", "La", "RGBA", "RGBa"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _orientation(image: Image.Image) -> int | None:
    try:
        return image.getexif().get(0x0112)
    except Exception:  # broken metadata can raise nearly anything
        return None


def _what_else(data: np.ndarray) -> str:
    head = bytes(memoryview(data)[:64])
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the image: the file itself was not fetched"
    if head.lstrip().startswith(b"<"):
        return "a web page or drawing in XML, not an image of pixels"
    return f"no image of a known kind: it begins with {head[:8]!r}"


# -- crops --------------------------------------------------------------------------------------------------------------------


def random_crop_box(height: int, width: int, uniforms: Sequence[float]) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part of an image: 8 to 100 % of its area, from 3:4 to 4:3 (Szegedy et al., 2015).

    As in torchvision's RandomResizedCrop, ten shapes are tried, each from two of the `uniforms` (22 numbers in [0, 1)), the last two of which
    place the first that fits; if none does, it is the largest middle part of an allowed shape.
    """
    for number in range(10):
        area = height * width * (SCALE[0] + (SCALE[1] - SCALE[0]) * uniforms[2 * number])
        ratio = math.exp(math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * uniforms[2 * number + 1])
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return int((height - high + 1) * uniforms[20]), int((width - wide + 1) * uniforms[21]), high, wide
    wide, high = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return (height - high) // 2, (width - wide) // 2, high, wide


def resized_crop(image: Tensor, box: tuple[int, int, int, int], size: int) -> Tensor:
    """A part (top, left, height, width) of an image [3, height, width] uint8, scaled to [3, size, size], antialiased."""
    return v2.resized_crop_image(_as_batch(image), *box, [size, size], antialias=True)[0]


def _as_batch(image: Tensor) -> Tensor:
    """A batch of one that shows by its strides that it is pixel by pixel in memory: resizing then is quicker, and stays so."""
    return image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)


def training_crop(
    data: np.ndarray, *, size: int, uniforms: Sequence[float], decode_half: Callable[[np.ndarray, JpegHeader], Tensor] | None = None
) -> Tensor:
    """A random part of an image file's picture, mirrored by even chance: [3, size, size] uint8.

    Args:
        data: the file's bytes.
        size: side of the result in pixels.
        uniforms: the `UNIFORMS` random numbers in [0, 1) that decide it.
        decode_half: decodes a plain JPEG at half its sides where the half of the part still has `size` pixels each way.

    Raises:
        ValueError: as `decode`.
    """
    image = None
    if decode_half is not None and (header := jpeg_header(data)) is not None and header.channels in (1, 3) and not header.has_exif:
        box = random_crop_box(header.height, header.width, uniforms)
        if min(box[2:]) >= 2 * size:
            with contextlib.suppress(ValueError):  # which the whole decoding then explains
                image, box = decode_half(data, header), tuple(value // 2 for value in box)
    if image is None:
        image = decode(data)
        box = random_crop_box(image.shape[1], image.shape[2], uniforms)
    image = resized_crop(image, box, size)
    return v2.horizontal_flip_image(image) if uniforms[22] < 0.5 else image


def center_crop(data: np.ndarray, *, size: int, resize: int) -> Tensor:
    """The middle [3, size, size] uint8 of an image file's picture, scaled so that its shorter side is `resize` pixels; for evaluation.

    An image with sides of more than 4 : 1 is cut to its middle first, so that memory depends on `resize` alone.

    Raises:
        ValueError: as `decode`.
    """
    image = decode(data)
    for side, other in ((1, 2), (2, 1)):
        if (over := image.shape[side] - _LONGEST * image.shape[other]) > 0:
            image = image.narrow(side, over // 2, image.shape[side] - over // 2 * 2)  # as much off either end: the middle stays
    return v2.center_crop_image(v2.resize_image(_as_batch(image), [resize], antialias=True), [size, size])[0]


def image_facts(data: np.ndarray) -> tuple[int, int, str]:
    """Height and width as stored, and the kind (JPEG, PNG, ...) of an image file's bytes, from its header alone.

    Raises:
        ValueError: the bytes are no image of a known kind.
    """
    return _opened(data, lambda image: (image.height, image.width, image.format or ""), "the image cannot be read")
