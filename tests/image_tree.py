"""A small ImageNet for the tests: every kind of file that a real one holds, made with Pillow."""

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat", "dog")


def photo(seed: int, *, height: int = 60, width: int = 80) -> Image.Image:
    """A smooth coloured picture."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def without_segment(jpeg: bytes, marker: int) -> bytes:
    """A JPEG without its segments of one kind."""
    at, kept = 2, [jpeg[:2]]
    while jpeg[at + 1] != 0xDA:
        length = 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if jpeg[at + 1] != marker:
            kept.append(jpeg[at : at + length])
        at += length
    return b"".join(kept) + jpeg[at:]


def with_orientation(image: Image.Image, orientation: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x112] = orientation
    return encoded(image, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))


def oddities() -> dict[str, bytes]:
    """Readable images of every kind, by file name; names lie about a few of them."""
    picture = photo(100)
    inks = picture.convert("CMYK")
    adobe = encoded(inks, "JPEG", quality=95)  # Pillow stores it inverted, with Adobe's marker
    grey16 = Image.fromarray((np.arange(60 * 80).reshape(60, 80) * 13).astype(np.uint16))
    palette = picture.quantize(16)
    red = Image.new("RGBA", (40, 30), (255, 0, 0, 0))
    return {
        "adobe_cmyk.jpg": adobe,
        "plain_cmyk.jpg": without_segment(encoded(Image.fromarray(255 - np.asarray(inks), "CMYK"), "JPEG", quality=95), 0xEE),
        "grey.jpg": encoded(picture.convert("L"), "JPEG"),
        "progressive.JPG": encoded(picture, "JPEG", progressive=True),
        "turned.jpeg": with_orientation(picture, 6),
        "mirrored.png": with_orientation(picture, 2, "PNG"),
        "grey16.png": encoded(grey16, "PNG"),
        "palette.png": encoded(palette, "PNG"),
        "palette_transparent.png": encoded(palette, "PNG", transparency=3),
        "transparent_red.png": encoded(red, "PNG"),
        "grey_alpha.png": encoded(picture.convert("LA"), "PNG"),
        "black_and_white.png": encoded(picture.convert("1"), "PNG"),
        "really_a_png.JPEG": encoded(picture, "PNG"),
        "really_a_jpeg.png": encoded(picture, "JPEG"),
        "modern.webp": encoded(picture, "WEBP"),
        "animated.gif": encoded(photo(1), "GIF", save_all=True, append_images=[photo(2)]),
        "scan.tif": encoded(picture, "TIFF"),
        "old.bmp": encoded(picture, "BMP"),
        "tiny.png": encoded(photo(3, height=1, width=1), "PNG"),
        "long.png": encoded(photo(4, height=3, width=200), "PNG"),
        "größe\nneue zeile.jpg": encoded(picture, "JPEG"),
    }


BAD = {
    "cut_off.jpg": encoded(photo(7), "JPEG")[:400],
    "web_page.jpg": b"<html>not found</html>",
    "empty.png": b"",
    "pointer.jpg": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


def make_tree(root: Path, *, bad: bool = False) -> Path:
    """train/ with 60 images and more in four classes, val/ with 12, and noise of every kind between them."""
    for split, count in (("train", 10), ("val", 3)):
        for number, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                (folder / f"{name}_{k}.JPEG").write_bytes(encoded(photo(1000 * (split == "val") + 100 * number + k), "JPEG"))
    for number, (name, data) in enumerate(oddities().items()):
        nested = root / "train" / CLASSES[number % 4] / ("nested/deeper" if number % 5 == 0 else "")
        nested.mkdir(parents=True, exist_ok=True)
        (nested / name).write_bytes(data)
    for name in (".ipynb_checkpoints", "__MACOSX"):
        (root / "train" / name).mkdir()
        (root / "train" / name / "ant_0.JPEG").write_bytes(b"")
    for name in (".DS_Store", "Thumbs.db", "._ant_0.JPEG", "notes.txt"):
        (root / "train" / "ant" / name).write_bytes(b"noise")
    os.symlink("..", root / "train" / "bee" / "up")
    os.symlink("nowhere.jpg", root / "train" / "bee" / "dangling.jpg")
    os.symlink("self", root / "train" / "bee" / "self")
    if bad:
        for name, data in BAD.items():
            (root / "train" / "dog" / name).write_bytes(data)
    return root
