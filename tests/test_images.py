"""Images from their bytes: the same pixels by either decoder, one rule for every kind of file, crops like torchvision's and Pillow's."""

import struct
import zlib

import numpy as np
import pytest
import torch
from image_tree import BAD, encoded, oddities, photo, with_orientation, without_segment
from PIL import Image
from torchvision.transforms import v2

from resnet_ipu.imagenet import images

PICTURE = photo(100)


def decoded(data: bytes) -> np.ndarray:
    """Height x width x 3, as numbers that can be subtracted."""
    return images.decode(np.frombuffer(data, np.uint8)).permute(1, 2, 0).numpy().astype(int)


def rgb(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB")).astype(int)


@pytest.mark.parametrize(
    "data",
    [
        *(encoded(PICTURE, "JPEG", quality=90, subsampling=sampling) for sampling in (0, 1, 2)),
        encoded(PICTURE, "JPEG", progressive=True),
        encoded(PICTURE.convert("L"), "JPEG"),
        *(with_orientation(PICTURE, orientation) for orientation in range(1, 9)),
    ],
)
def test_plain_jpegs_give_the_same_pixels_by_torchvision_and_by_pillow(data):
    bytes_ = np.frombuffer(data, np.uint8)
    theirs = images.decode_with_pillow(bytes_).int()
    assert images._decode_jpeg is not None
    ours = images._decode_jpeg(torch.from_numpy(bytes_.copy()), images._RGB, True).int()
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() <= 2
    assert torch.equal(images.decode(bytes_).int(), ours)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_every_exif_orientation_is_carried_out(kind):
    turned = {  # what the tag says of the rows and columns as stored (EXIF 2.3, tag 0x112)
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.transpose(1, 0, 2),
        6: lambda x: x.transpose(1, 0, 2)[:, ::-1],
        7: lambda x: x[::-1, ::-1].transpose(1, 0, 2),
        8: lambda x: x.transpose(1, 0, 2)[::-1],
    }
    for orientation, turn in turned.items():
        expected, found = turn(rgb(PICTURE)), decoded(with_orientation(PICTURE, orientation, kind))
        assert found.shape == expected.shape and abs(found - expected).mean() < (0.1 if kind == "PNG" else 6), orientation


def test_each_kind_of_file_has_its_rule():
    files = oddities()
    found = {name: decoded(data) for name, data in files.items()}
    for name in ("adobe_cmyk.jpg", "plain_cmyk.jpg"):  # inks inverted with Adobe's marker, as they are without it: the same picture
        assert b"Adobe" in files["adobe_cmyk.jpg"] and b"Adobe" not in files["plain_cmyk.jpg"]
        assert abs(found[name] - rgb(PICTURE)).mean() < 4, name
    assert (found["grey.jpg"] == found["grey.jpg"][:, :, :1]).all()
    upper = (np.arange(60 * 80).reshape(60, 80) * 13 % 65536) >> 8
    assert (found["grey16.png"] == upper[:, :, None]).all()
    palette = PICTURE.quantize(16)
    assert (found["palette.png"] == rgb(palette)).all()
    hidden = np.asarray(palette) == 3
    assert hidden.any() and (found["palette_transparent.png"][hidden] == 255).all()
    assert (found["palette_transparent.png"][~hidden] == rgb(palette)[~hidden]).all()
    assert (found["transparent_red.png"] == 255).all()  # not the red beneath
    assert (found["grey_alpha.png"] == rgb(PICTURE.convert("L"))).all()
    assert (found["really_a_png.JPEG"] == rgb(PICTURE)).all() and (found["old.bmp"] == rgb(PICTURE)).all()
    assert (found["scan.tif"] == rgb(PICTURE)).all()
    assert abs(found["modern.webp"] - rgb(PICTURE)).mean() < 6
    assert abs(found["animated.gif"] - rgb(photo(1))).mean() < 12  # the first picture, in 256 colours
    half = encoded(Image.new("RGBA", (8, 8), (255, 0, 0, 128)), "PNG")
    assert abs(decoded(half) - [255, 127, 127]).max() <= 1  # on white


def test_a_grey_16_bit_png_with_a_transparent_value_lies_on_white():
    pixels = np.array([[0, 256], [512, 65535]], dtype=np.uint16)
    data = encoded(Image.fromarray(pixels), "PNG", transparency=512)
    assert decoded(data)[:, :, 0].tolist() == [[0, 1], [255, 255]]


def test_what_is_no_image_says_why():
    causes = {name: None for name in BAD}
    for name, data in BAD.items():
        with pytest.raises(ValueError) as error:
            decoded(data)
        causes[name] = str(error.value)
    assert "cannot be decoded" in causes["cut_off.jpg"] and "web page" in causes["web_page.jpg"]
    assert "empty" in causes["empty.png"] and "Git LFS" in causes["pointer.jpg"]
    with pytest.raises(ValueError, match="no image of a known kind: it begins with b'PK"):
        decoded(b"PK\x03\x04 and so on")
    with pytest.raises(
        ValueError, match="no image of a known kind: it begins with b'%!PS"
    ):  # never handed to Ghostscript, which runs programs
        decoded(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with pytest.raises(ValueError, match="floating-point"):
        decoded(encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"))
    whole = encoded(PICTURE, "PNG")
    with pytest.raises(ValueError, match="cannot be decoded"):
        decoded(whole[: len(whole) // 2])


def png_chunk(kind: bytes, content: bytes, *, whole: bool = True) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content) ^ (not whole))


def jpeg_segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


BROKEN_EXIF = b"\0\x08\0\x02\x01\x12\0\x03"  # no byte order, and cut off
LARGE = zlib.compress(b"a" * 2_000_000)


@pytest.mark.parametrize(
    "chunk",
    [
        png_chunk(b"eXIf", BROKEN_EXIF),
        png_chunk(b"zTXt", b"a\0\0" + LARGE),
        png_chunk(b"iTXt", b"a\0\x01\0\0\0" + LARGE),
        png_chunk(b"iCCP", b"a\0\0" + LARGE),
        png_chunk(b"iCCP", b"a\0\0no profile"),
        png_chunk(b"tEXt", b"a\0b", whole=False),
        png_chunk(b"eXIf", BROKEN_EXIF, whole=False),
        png_chunk(b"pHYs", b"short"),
    ],
    ids=["EXIF", "zTXt", "iTXt", "large profile", "no profile", "checksum of a text", "checksum of EXIF", "resolution"],
)
def test_metadata_never_decide_about_a_pngs_pixels(chunk):
    plain = encoded(PICTURE, "PNG")
    for at in (33, len(plain) - 12):  # before the pixels, and after
        data = plain[:at] + chunk + plain[at:]
        assert (decoded(data) == rgb(PICTURE)).all()
        assert images.image_facts(np.frombuffer(data, np.uint8)) == (60, 80, "PNG")
        with pytest.raises(ValueError, match="cannot be decoded"):  # nor do they save a file whose pixels are cut off
            decoded(data[:33] + chunk + plain[33 : len(plain) // 2])
    turned = with_orientation(PICTURE, 6, "PNG")
    assert (decoded(turned[:33] + chunk + turned[33:]) == decoded(turned)).all() or chunk[4:8] == b"eXIf"  # a second one


def test_metadata_never_decide_about_the_pixels_of_other_files():
    segment = jpeg_segment(0xE1, b"Exif\0\0" + BROKEN_EXIF)
    for picture in (PICTURE, PICTURE.convert("CMYK")):  # by torchvision, and by Pillow
        plain = encoded(picture, "JPEG")
        profile = jpeg_segment(0xE2, b"ICC_PROFILE\0\x01\x09no profile"), jpeg_segment(0xE2, b"ICC_PROFILE\0")
        others = jpeg_segment(0xED, b"Photoshop 3.0\x008BIM\xff"), jpeg_segment(0xE0, b"JFIF\0\x01"), jpeg_segment(0xEE, b"Adobe")
        for extra in (segment, *profile, *others):
            data = plain[:2] + extra + plain[2:]
            assert (decoded(data) == decoded(plain)).all()
            assert images.image_facts(np.frombuffer(data, np.uint8)) == (60, 80, "JPEG")
            turned = with_orientation(picture, 6)
            if extra is not segment:  # which would be a second one
                assert (decoded(turned[:2] + extra + turned[2:]) == decoded(turned)).all()
        with pytest.raises(ValueError, match="cannot be decoded"):
            decoded(plain[:2] + others[1] + plain[2 : len(plain) // 2])
    plain = encoded(PICTURE, "WEBP", lossless=True)
    assert (decoded(encoded(PICTURE, "WEBP", lossless=True, exif=BROKEN_EXIF)) == decoded(plain)).all()


def test_a_jpegs_header_is_read_past_whatever_stands_before_it():
    data = with_orientation(photo(5, height=30, width=50), 1)
    assert images.jpeg_header(np.frombuffer(data, np.uint8)) == (30, 50, 3, True)
    assert images.jpeg_header(np.frombuffer(without_segment(data, 0xE1), np.uint8)) == (30, 50, 3, False)
    assert images.jpeg_header(np.frombuffer(b"\xff\xd8", np.uint8)) is None
    assert images.jpeg_header(np.frombuffer(encoded(PICTURE, "PNG"), np.uint8)) is None


def test_random_parts_have_the_published_areas_and_shapes():
    generator = torch.Generator().manual_seed(1)
    shares, ratios = [], []
    for _ in range(2000):
        top, left, high, wide = images.random_crop_box(375, 500, torch.rand(images.UNIFORMS, generator=generator).tolist())
        assert 0 <= top <= 375 - high and 0 <= left <= 500 - wide
        shares.append(high * wide / (375 * 500))
        ratios.append(wide / high)
    assert 0.078 < min(shares) < 0.1 and max(shares) <= 1
    assert 0.73 < min(ratios) < 0.77 and 1.3 < max(ratios) < 1.36
    torch.manual_seed(1)
    theirs = [v2.RandomResizedCrop(224).make_params([torch.empty(3, 375, 500)]) for _ in range(2000)]
    assert abs(np.mean(shares) - np.mean([one["height"] * one["width"] / (375 * 500) for one in theirs])) < 0.02
    assert images.random_crop_box(3, 200, [0.9] * images.UNIFORMS) == (0, 98, 3, 4)  # nothing fits: the largest allowed part of the middle


def test_crops_are_pillows_within_rounding():
    data = np.frombuffer(encoded(photo(8, height=375, width=500), "PNG"), np.uint8)
    picture = photo(8, height=375, width=500)
    uniforms = torch.rand(images.UNIFORMS, generator=torch.Generator().manual_seed(3)).tolist()
    top, left, high, wide = images.random_crop_box(375, 500, uniforms)
    theirs = picture.crop((left, top, left + wide, top + high)).resize((64, 64), Image.Resampling.BILINEAR)
    for last, turn in ((0.9, lambda x: x), (0.1, lambda x: x[:, ::-1])):
        ours = images.training_crop(data, size=64, uniforms=[*uniforms[:-1], last]).permute(1, 2, 0).numpy().astype(int)
        assert abs(ours - turn(rgb(theirs))).max() <= 1
    evaluation = v2.Compose([v2.Resize(73), v2.CenterCrop(64)])(picture)
    assert abs(images.center_crop(data, size=64, resize=73).permute(1, 2, 0).numpy().astype(int) - rgb(evaluation)).max() <= 1


@pytest.mark.parametrize(("height", "width"), [(1, 100), (1, 101), (3, 200), (200, 3), (5, 20), (20, 5), (1, 20_000), (20_001, 1)])
def test_an_evaluation_cuts_a_long_picture_before_it_scales_it(height, width, monkeypatch):
    generator = np.random.default_rng(1)
    picture = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))
    scaled, resize_image = [], images.v2.resize_image

    def resize(image, *args, **options):
        scaled.append(max(image.shape[2:]) / min(image.shape[2:]))
        return resize_image(image, *args, **options)

    monkeypatch.setattr(images.v2, "resize_image", resize)
    ours = images.center_crop(np.frombuffer(encoded(picture, "PNG"), np.uint8), size=14, resize=16)
    # The whole scaled by Pillow; of the longest, what is around the middle, which a filter of one pixel sees nothing beside.
    long = max(height, width)
    part = (
        picture
        if long < 1000
        else picture.crop((long // 2 - 50, 0, (long + 1) // 2 + 50, 1) if height == 1 else (0, long // 2 - 50, 1, (long + 1) // 2 + 50))
    )
    theirs = v2.Compose([v2.Resize(16), v2.CenterCrop(14)])(part)
    assert abs(ours.permute(1, 2, 0).numpy().astype(int) - rgb(theirs)).max() <= 1
    assert max(scaled) <= 5


def test_half_scale_shows_the_same_part_of_large_crops_and_leaves_small_ones_alone():
    pytest.importorskip("simplejpeg")
    decode_half, calls = images.half_scale_decoder(), []

    def counted(data, header):
        calls.append(header)
        return decode_half(data, header)

    generator = torch.Generator().manual_seed(2)
    data = np.frombuffer(encoded(photo(9, height=375, width=501), "JPEG", quality=95), np.uint8)
    for _ in range(20):
        uniforms = torch.rand(images.UNIFORMS, generator=generator).tolist()
        calls.clear()
        fast = images.training_crop(data, size=100, uniforms=uniforms, decode_half=counted).int()
        full = images.training_crop(data, size=100, uniforms=uniforms).int()
        large = min(images.random_crop_box(375, 501, uniforms)[2:]) >= 200  # its half has the 100 pixels that are needed: none is made up
        assert len(calls) == large
        difference = (fast - full).abs().float().mean()
        assert difference < 3 if large else difference == 0
    assert decode_half(data, images.jpeg_header(data)).shape == (3, 188, 251)
    turned = np.frombuffer(with_orientation(photo(9, height=375, width=501), 6), np.uint8)
    calls.clear()
    images.training_crop(turned, size=8, uniforms=[0.5] * images.UNIFORMS, decode_half=counted)
    assert not calls  # its header's sides are not the picture's
