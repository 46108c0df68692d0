"""Images of other people's files: every format, and what is wrong with them by name."""

import gzip
import io
import pickle
import struct
import tarfile
import zlib

import numpy as np
import pytest

PIL = pytest.importorskip("PIL.Image")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from blocksparse.models.images import (  # noqa: E402
    ImagesError,
    grid,
    of_channels,
    read_all,
    read_batch,
    read_idx,
    read_images,
    shrink,
    write_png,
)


def some(n=6, height=4, width=5, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, height, width, channels), np.uint8)


def save(folder, images, suffix=".png", first=0):
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        PIL.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(folder / f"{first + i:04}{suffix}")


def cifar(n, seed):
    return some(n, 32, 32, 3, seed), np.arange(n, dtype=np.uint8) % 10


def write_binary(path, images, classes):
    rows = np.concatenate([classes[:, None], images.transpose(0, 3, 1, 2).reshape(len(images), -1)], 1)
    path.write_bytes(rows.tobytes())


def write_pickle(path, images, classes):
    data = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    path.write_bytes(pickle.dumps({b"data": data, b"labels": classes.tolist()}, 2))


def batch_of(data):
    return pickle.dumps({b"data": data, b"labels": [0, 0]}, 2)


@pytest.mark.parametrize(("write", "suffix"), [(write_binary, ".bin"), (write_pickle, "")])
def test_batches_of_cifar(tmp_path, write, suffix):
    parts = {f"data_batch_{i}": cifar(3, i) for i in (1, 2)} | {"test_batch": cifar(4, 9)}
    for name, part in parts.items():
        write(tmp_path / f"{name}{suffix}", *part)
    found = read_images(str(tmp_path), 3)
    assert np.array_equal(found.train, np.concatenate([parts["data_batch_1"][0], parts["data_batch_2"][0]]))
    assert np.array_equal(found.test, parts["test_batch"][0])
    for i in (1, 2):
        (tmp_path / f"data_batch_{i}{suffix}").unlink()
    assert np.array_equal(read_images(tmp_path, 3).test, parts["test_batch"][0])
    images, classes = read_batch(tmp_path / f"test_batch{suffix}")
    assert np.array_equal(classes, parts["test_batch"][1])
    assert np.array_equal(images, found.test)


def test_batches_that_are_none(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("evil",)

    for name, content, message in (
        ("data_batch_1.bin", bytes(3072), "has 3072 bytes, needs a multiple of 3073"),
        ("data_batch_1.bin", b"", "has 0 bytes"),
        ("data_batch_1", b"nonsense", "is no batch of CIFAR-10"),
        ("data_batch_1", pickle.dumps({b"data": [1]}), "is no batch of CIFAR-10"),
        ("data_batch_1", pickle.dumps(Evil()), "data_batch_1 holds a .*print, which no batch of CIFAR-10 does"),
        ("data_batch_1", batch_of(np.ones((2, 3072))), r"has data of float64 \[2, 3072\]"),
        ("data_batch_1", batch_of(np.ones((1, 6144), np.uint8)), r"has data of uint8 \[1, 6144\] and 2 classes"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ImagesError, match=message):
            read_images(tmp_path, 3)
        path.unlink()


def write_idx(path, images, packed):
    data = bytes((0, 0, 8, 3)) + struct.pack(">3i", *images.shape[:3]) + images.tobytes()
    path.write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize("packed", [False, True])
def test_the_format_of_mnist(tmp_path, packed):
    train, test = some(5, 4, 6, 1), some(2, 4, 6, 1, seed=1)
    for name, images in (("train", train), ("t10k", test)):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte{'.gz' if packed else ''}", images, packed)
    found = read_images(tmp_path, 1)
    assert np.array_equal(found.train, train)
    assert np.array_equal(found.test, test)
    assert np.array_equal(read_images(tmp_path, 3).train, np.repeat(train, 3, -1))


def test_files_of_mnist_that_are_none(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte"
    head = bytes((0, 0, 8, 3))
    huge = head + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 1) + b"1"  # the product is 1 in 64 bits
    for content in (b"", head, head + struct.pack(">3i", 2, 2, 2) + bytes(7), huge):
        path.write_bytes(content)
        with pytest.raises(ImagesError, match="is no file of 3 sizes in the format of MNIST"):
            read_idx(path, 3)
    path.unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8bnonsense")
    with pytest.raises(ImagesError, match=r"ubyte\.gz"):
        read_idx(path, 3)
    with pytest.raises(FileNotFoundError, match="dataset-fashion-mnist has it"):
        read_idx(tmp_path / "t10k-images-idx3-ubyte", 3)
    path.write_bytes(head + struct.pack(">3i", 2, 0, 3))
    with pytest.raises(ImagesError, match="has images of 0 x 3 pixels, needs some"):
        read_images(tmp_path, 1)


def test_folders_and_tar_files(tmp_path):
    train, test = some(4), some(2, seed=1)
    save(tmp_path / "set" / "train" / "a", train[:2])
    save(tmp_path / "set" / "train" / "b", train[2:])
    save(tmp_path / "set" / "test" / "a", test)
    (tmp_path / "set" / "notes.txt").write_text("no picture")
    with tarfile.open(tmp_path / "set.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "set", ".")
    for path in (tmp_path / "set", tmp_path / "set.tar.xz"):
        found = read_images(path, 3)
        assert np.array_equal(found.train, train)
        assert np.array_equal(found.test, test)


def test_links_are_followed(tmp_path):
    train, test = some(2), some(2, seed=1)
    save(tmp_path / "elsewhere", test)
    save(tmp_path / "set", train)
    (tmp_path / "set" / "test").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "around").symlink_to(tmp_path / "set")
    found = read_images(tmp_path / "set", 3)
    assert np.array_equal(found.train, train)
    assert np.array_equal(found.test, test)
    (tmp_path / "set" / "nowhere.png").symlink_to("none.png")
    (tmp_path / "set" / "itself.png").symlink_to("itself.png")
    found = read_images(tmp_path / "set", 3, "skip")
    assert np.array_equal(found.train, train)
    assert len(found.left_out) == 2


def test_links_in_tar_files_are_followed(tmp_path):
    images = some(2)
    save(tmp_path / "set", images)
    for name, link in (("0002", "symlink_to"), ("0003", "hardlink_to")):
        target = "0000.png" if link == "symlink_to" else tmp_path / "set" / "0001.png"
        getattr(tmp_path / "set" / f"{name}.png", link)(target)
    with tarfile.open(tmp_path / "set.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "set", ".")
    assert np.array_equal(read_images(tmp_path / "set.tar.gz", 3).train, images[[0, 1, 0, 1]])
    (tmp_path / "set" / "nowhere.png").symlink_to("none.png")
    (tmp_path / "set" / "itself.png").symlink_to("itself.png")
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        archive.add(tmp_path / "set", ".")
    found = read_images(tmp_path / "set.tar", 3, "skip")
    assert len(found.train) == 4
    assert len(found.left_out) == 2


def test_sheets(tmp_path):
    images = some(3, 4, 4)
    PIL.fromarray(images.reshape(3, 16, 3)).save(tmp_path / "sheet.png")
    found = read_images(tmp_path / "sheet.png", 3)
    assert np.array_equal(found.train, images)
    assert len(found.test) == 0
    PIL.fromarray(some(1, 3, 15)[0]).save(tmp_path / "odd.png")
    with pytest.raises(ImagesError, match="is 15 pixels wide, a sheet needs a square number"):
        read_images(tmp_path / "odd.png", 3)


def write_deep_colours(path, height, width):
    """A PNG file of 16 bits a colour, which Pillow reads and does not write."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    rows = zlib.compress(bytes(height * (1 + 6 * width)))
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def test_other_modes_are_converted_or_refused_by_name(tmp_path):
    grey, colour = some(1, channels=1)[0][..., 0], some(1)[0]
    opaque = np.concatenate([colour, np.full((4, 5, 1), 255, np.uint8)], -1)
    PIL.fromarray(grey).save(tmp_path / "grey.png")
    PIL.fromarray(colour).quantize(20).save(tmp_path / "palette.png")
    PIL.fromarray(opaque).save(tmp_path / "rgba.png")
    found = read_images(tmp_path, 3)
    assert np.array_equal(found.train[0], np.repeat(grey[..., None], 3, -1))
    assert np.array_equal(found.train[1], colour)
    assert np.array_equal(found.train[2], colour)
    as_grey = np.asarray(PIL.fromarray(colour).convert("L"))
    assert np.array_equal(read_images(tmp_path, 1).train[2][..., 0], as_grey)
    assert np.array_equal(of_channels(colour, 1)[..., 0], as_grey)
    opaque[1, 2, 3] = 0
    PIL.fromarray(opaque).save(tmp_path / "seen-through.png")
    with pytest.raises(ImagesError, match=r"seen-through\.png has transparent pixels, needs opaque ones"):
        read_images(tmp_path, 3)
    (tmp_path / "seen-through.png").unlink()
    PIL.fromarray(grey.astype(np.uint16) * 256).save(tmp_path / "sixteen.png")
    with pytest.raises(ImagesError, match=r"sixteen\.png has pixels of 16 or 32 bits, needs 8 bits"):
        read_images(tmp_path, 3)
    write_deep_colours(tmp_path / "sixteen.png", 4, 5)
    with pytest.raises(ImagesError, match=r"sixteen\.png has pixels of 16 or 32 bits, needs 8 bits"):
        read_images(tmp_path, 3)


def test_broken_pictures_end_it_or_are_left_out(tmp_path):
    images = some(3)
    save(tmp_path, images)
    broken = tmp_path / "0001.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(ImagesError, match=r"0001\.png is broken"):
        read_images(tmp_path, 3)
    found = read_images(tmp_path, 3, "skip")
    assert np.array_equal(found.train, images[[0, 2]])
    assert len(found.left_out) == 1
    save(tmp_path, some(1, 6, 5), first=9)
    broken.unlink()
    with pytest.raises(ImagesError, match=r"0009\.png has 6 x 5 pixels, needs 4 x 5 as 0000\.png has"):
        read_images(tmp_path, 3)
    found = read_images(tmp_path, 3, "skip")
    assert found.left_out == [f"{tmp_path}: 0009.png has 6 x 5 pixels, needs 4 x 5 as 0000.png has"]


def test_the_size_is_that_of_most_pictures(tmp_path):
    save(tmp_path, some(1, 6, 5))
    save(tmp_path, some(2), first=1)
    with pytest.raises(ImagesError, match=r"0000\.png has 6 x 5 pixels, needs 4 x 5 as 0001\.png has"):
        read_images(tmp_path, 3)
    found = read_images(tmp_path, 3, "skip")
    assert np.array_equal(found.train, some(2))


def test_what_holds_no_images(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no"):
        read_images(tmp_path / "none", 3)
    with pytest.raises(ImagesError, match="holds no pictures that can be read"):
        read_images(tmp_path, 3)
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ImagesError, match="is no folder, tar file or PNG sheet"):
        read_images(tmp_path / "text.txt", 3)
    save(tmp_path / "a", some(2))
    save(tmp_path / "b", some(2, 5, 5))
    with pytest.raises(ImagesError, match="hold images of 4 x 5, 5 x 5 pixels, need one size"):
        read_all([tmp_path / "a", tmp_path / "b"], 3)
    assert np.array_equal(read_all(str(tmp_path / "a"), 3).train, read_images(tmp_path / "a", 3).train)


@settings(max_examples=25, deadline=None)
@given(st.binary(max_size=400), st.sampled_from(["a.png", "a.jpg", "a.gif", "a.tif"]))
def test_files_of_any_bytes_are_refused(tmp_path_factory, content, name):
    folder = tmp_path_factory.mktemp("any")
    (folder / name).write_bytes(content)
    with pytest.raises(ImagesError):
        read_images(folder, 3)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000))
def test_tar_files_that_are_cut_off(tmp_path_factory, end):
    folder = tmp_path_factory.mktemp("cut")
    made = io.BytesIO()
    save(folder / "set", some(2))
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        archive.add(folder / "set", "set")
    content = made.getvalue()[: min(end, len(made.getvalue()) - 30)]
    (folder / "set.tar.gz").write_bytes(content)
    with pytest.raises(ImagesError, match=r"cut off|damaged|is no folder"):
        read_images(folder / "set.tar.gz", 3)


def test_means_and_grids(tmp_path):
    images = some(2, 4, 6, 1)
    means = shrink(images, 2)
    assert means[1, 1, 2, 0] == int(images[1, 2:4, 4:6, 0].mean() + 0.5)
    with pytest.raises(ImagesError, match="4 x 6 pixels cannot be shrunk by 3"):
        shrink(images, 3)
    picture = grid(some(3), 2)
    assert picture.shape == (9, 11, 3)
    assert np.array_equal(picture[5:9, 0:5], some(3)[2])
    write_png(tmp_path / "grid.png", some(3), 2)
    assert np.array_equal(np.asarray(PIL.open(tmp_path / "grid.png")), picture)
