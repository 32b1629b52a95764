"""Data sources, the transforms, and the checks that come before the evaluation."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import types
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from qvit.errors import ConfigError, DataError
from qvit.evaluation.config import IMAGENET, DataSettings, load_model_config
from qvit.evaluation.data import (
    HubSource,
    Source,
    check_source,
    demo_split,
    first_pictures,
    make_loader,
    open_picture,
    open_source,
    spread,
    training_sibling,
)
from qvit.evaluation.transforms import TensorTransform, build_transform

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

WNIDS = ["n01440764", "n01443537", "n01484850", "n01491361"]
COLOUR = (200, 60, 30)


def encode(mode: str = "RGB", kind: str = "JPEG", **options) -> bytes:
    """One picture in plain COLOUR, as bytes; JPEG changes it by a few grey levels."""
    buffer = io.BytesIO()
    Image.new("RGB", (24, 16), COLOUR).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def with_segment(jpeg: bytes, payload: bytes) -> bytes:
    """The JPEG with an APP1 segment after its first marker."""
    return jpeg[:2] + b"\xff\xe1" + (len(payload) + 2).to_bytes(2, "big") + payload + jpeg[2:]


def image_folder(root: Path, names: list[str], count: int = 2) -> Path:
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for picture in range(count):
            colour = (10 * number, 20 * picture, 0)
            Image.new("RGB", (8, 8), colour).save(root / name / f"p{picture}.JPEG", "JPEG")
    return root


def hub_table(pictures: list[bytes], labels: list, names: list[str] | None):
    rows = [{"bytes": content, "path": f"p{i}.JPEG"} for i, content in enumerate(pictures)]
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
    if names is None:
        features["label"] = {"_type": "Value", "dtype": "int64"}
    table = pa.table({"image": rows, "label": labels})
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def write_parquet(path: Path, labels: list, names: list[str] | None = WNIDS, group: int = 3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = [encode_label(int(label or 0), i) for i, label in enumerate(labels)]
    pq.write_table(hub_table(pictures, labels, names), path, row_group_size=group)
    return path


def encode_label(label: int, number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (label, number, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def tensor(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


class Labels(Source):
    """A source with labels only."""

    def __init__(self, labels, classes, name: str = "data") -> None:
        self.name, self.labels, self.classes = name, np.asarray(labels), classes


ODD_PICTURES = {
    "rgb": encode(),
    "cmyk": encode("CMYK"),
    "png_in_jpeg": encode(kind="PNG"),
    "palette": encode("P", "PNG"),
    "rgba": encode("RGBA", "PNG"),
    "broken_exif": with_segment(encode(), b"Exif\x00\x00MM\x00*\xff\xff\xff\xff\x00\x01"),
    "xmp_not_utf8": with_segment(encode(), b"http://ns.adobe.com/xap/1.0/\x00\xff\xfe\xfa<x:xmpmeta/>"),
}


@pytest.mark.parametrize("kind", ODD_PICTURES)
def test_odd_pictures_become_rgb(kind: str) -> None:
    picture = open_picture(ODD_PICTURES[kind], kind)
    assert (picture.mode, picture.size) == ("RGB", (24, 16))
    assert np.abs(np.array(picture).mean((0, 1)) - COLOUR).max() <= 8  # the palette dithers


@pytest.mark.parametrize("mode", ["L", "LA", "1"])
def test_grey_becomes_three_equal_channels(mode: str) -> None:
    pixels = np.array(open_picture(encode(mode, "PNG"), mode))
    assert pixels.shape == (16, 24, 3)
    assert (pixels == pixels[..., :1]).all()


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 4), 128 * 256, np.uint16)).save(buffer, "PNG")
    assert np.array(open_picture(buffer.getvalue(), "deep")).max() == 128


@pytest.mark.parametrize("content", [b"", b"no picture", encode()[: len(encode()) // 2]], ids=["empty", "text", "cut"])
def test_a_broken_picture_is_named(content: bytes) -> None:
    with pytest.raises(DataError, match=r"n01440764/x\.JPEG"):
        open_picture(content, "n01440764/x.JPEG")


def test_a_broken_picture_is_named_by_a_worker_without_its_traceback(tmp_path: Path) -> None:
    from qvit.evaluation.accuracy import evaluate

    root = image_folder(tmp_path, WNIDS)
    (root / WNIDS[1] / "p0.JPEG").write_bytes(encode()[:200])
    source = open_source(str(root))
    options = {"batch_size": 4, "workers": 1, "pin_memory": False, "strict": True}
    loader = make_loader(source, TO_TENSOR, np.arange(len(source)), **options)
    with pytest.raises(DataError) as caught:
        evaluate({"float": torch.nn.Flatten()}, loader, "cpu")
    assert f"{WNIDS[1]}/p0.JPEG" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def bomb() -> bytes:
    """A PNG of a few bytes that says it has 2^32 pixels."""
    content = bytearray(encode(kind="PNG"))
    content[16:24] = (65536).to_bytes(4, "big") * 2
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    return bytes(content)


HAZARDS = {
    "zero_bytes": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(encode()[:200]),
    "bomb": lambda path: path.write_bytes(bomb()),
    "link_to_itself": lambda path: path.symlink_to(path),
    "link_to_nothing": lambda path: path.symlink_to("nowhere"),
    "folder_in_its_place": lambda path: path.symlink_to(path.parent),
}


@pytest.mark.parametrize("workers", [0, 2])
def test_hazards_are_left_out_and_counted(tmp_path: Path, workers: int) -> None:
    root = image_folder(tmp_path, WNIDS, count=5)
    listed = {kind for kind in HAZARDS if kind != "folder_in_its_place"}  # a link to a folder is no picture
    for kind, make in HAZARDS.items():
        make(root / WNIDS[0] / f"{kind}.JPEG")
    (root / WNIDS[1] / "loop").symlink_to(root)  # back to where we came from
    source = open_source(str(root))
    assert len(source) == 20 + len(listed)
    indices = np.arange(len(source))
    loader = make_loader(source, TO_TENSOR, indices, batch_size=3, workers=workers, pin_memory=False)
    batches = list(loader)
    assert sum(len(labels) for _, labels in batches) == 20
    assert torch.cat([labels for _, labels in batches]).bincount().tolist() == [5] * 4
    named = {kind for kind in HAZARDS for line in loader.unreadable if f"/{kind}.JPEG" in line}
    assert named == listed and len(loader.unreadable) == len(listed)


def test_a_batch_without_a_readable_picture_is_none(tmp_path: Path) -> None:
    root = image_folder(tmp_path, WNIDS, count=1)
    for path in root.rglob("*.JPEG"):
        path.write_bytes(b"")
    loader = make_loader(open_source(str(root)), TO_TENSOR, np.arange(4), batch_size=2, workers=0, pin_memory=False)
    assert list(loader) == [] and len(loader.unreadable) == 4


def test_a_file_without_permission_is_left_out(tmp_path: Path, monkeypatch) -> None:
    source = open_source(str(image_folder(tmp_path, WNIDS)))

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Image, "open", denied)
    loader = make_loader(source, TO_TENSOR, np.arange(8), batch_size=4, workers=0, pin_memory=False)
    assert list(loader) == [] and all("Permission denied" in line for line in loader.unreadable)


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch) -> None:
    root = image_folder(tmp_path, WNIDS)
    scandir = os.scandir

    def denied(path):
        if Path(path).name == WNIDS[2]:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match=f"cannot read the folder .*{WNIDS[2]}: Permission denied"):
        open_source(str(root))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(sorted(ODD_PICTURES)), st.integers(0, 10**6), st.integers(1, 255), st.integers(1, 10**6))
def test_damaged_pictures_are_read_or_refused_by_name(kind: str, position: int, change: int, length: int) -> None:
    content = bytearray(ODD_PICTURES[kind])
    content[position % len(content)] ^= change
    try:
        picture = open_picture(bytes(content[: 1 + length % len(content)]), "here.jpg")
    except DataError as error:
        assert "here.jpg" in str(error)
    else:
        assert picture.mode == "RGB"


TO_TENSOR = TensorTransform(
    size=8, interpolation="bilinear", crop_pct=1.0, crop_mode="center", mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
)


# ImageFolder


def test_image_folder_labels_follow_the_sorted_names(tmp_path: Path) -> None:
    source = open_source(str(image_folder(tmp_path, WNIDS[::-1])))
    assert source.classes == tuple(WNIDS)
    assert source.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    # the pictures' red value says which folder they were written into, and folders were written in reverse
    assert tensor(source.picture(0))[0].float().mean() == pytest.approx(30, abs=4)
    check_source(source, 4, limited=False)


def test_image_folder_with_val_and_train(tmp_path: Path) -> None:
    image_folder(tmp_path / "val", WNIDS, count=1)
    image_folder(tmp_path / "train", WNIDS, count=3)
    assert len(open_source(str(tmp_path))) == 4
    assert len(open_source(str(tmp_path / "val"))) == 4
    assert len(training_sibling(str(tmp_path))) == 12
    assert len(training_sibling(str(tmp_path / "val"))) == 12


def test_numbered_folders_are_refused(tmp_path: Path) -> None:
    source = open_source(str(image_folder(tmp_path, [str(i) for i in range(12)], count=1)))
    with pytest.raises(DataError, match="wnids"):
        check_source(source, 12, limited=True)


def test_a_thousand_numbered_folders_are_refused_even_when_padded() -> None:
    names = tuple(f"{i:04d}" for i in range(1000))
    with pytest.raises(DataError, match="wnids"):
        check_source(Labels(np.arange(1000), names), 1000, limited=True)


def test_few_numbered_classes_in_order_are_fine() -> None:
    check_source(Labels(np.arange(10), tuple("0123456789")), 10, limited=False)


def test_a_class_folder_without_pictures(tmp_path: Path) -> None:
    image_folder(tmp_path, WNIDS)
    for file in (tmp_path / WNIDS[2]).iterdir():
        file.unlink()
    with pytest.raises(DataError, match=WNIDS[2]):
        open_source(str(tmp_path))


def test_a_flat_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ILSVRC2012_val_00000001.JPEG").write_bytes(encode())
    with pytest.raises(DataError, match="one folder of pictures for each class"):
        open_source(str(tmp_path))


# The ImageNet checks


@pytest.fixture(scope="module")
def imagenet_wnids() -> tuple[str, ...]:
    from timm.data import ImageNetInfo

    return tuple(ImageNetInfo("imagenet-1k").label_names())


def test_a_whole_imagenet_passes(imagenet_wnids) -> None:
    check_source(Labels(np.repeat(np.arange(1000), 50), imagenet_wnids), 1000, limited=False)


def test_a_missing_class_is_named(imagenet_wnids) -> None:
    source = Labels(np.repeat(np.arange(999), 50), imagenet_wnids[:7] + imagenet_wnids[8:])
    with pytest.raises(DataError, match=imagenet_wnids[7]):
        check_source(source, 1000, limited=True)


def test_an_extra_folder_is_refused(imagenet_wnids) -> None:
    source = Labels(np.repeat(np.arange(1001), 50)[:50000], (*imagenet_wnids, "n99999999"))
    with pytest.raises(DataError, match="1001 classes"):
        check_source(source, 1000, limited=True)


def test_an_imagenet_in_another_order_is_refused(imagenet_wnids) -> None:
    shuffled = (imagenet_wnids[1], imagenet_wnids[0], *imagenet_wnids[2:])
    with pytest.raises(DataError, match="order"):
        check_source(Labels(np.repeat(np.arange(1000), 50), shuffled), 1000, limited=True)


@pytest.mark.parametrize("classes", ["wnids", "words", None])
def test_a_truncated_imagenet_is_refused_unless_limited(imagenet_wnids, classes) -> None:
    words = ("tench, Tinca tinca", *map(str, range(1, 1000)))
    names = {"wnids": imagenet_wnids, "words": words, None: None}[classes]
    source = Labels(np.repeat(np.arange(1000), 50)[:-1], names)
    with pytest.raises(DataError, match=r"49999 pictures.*1 class \(999\).*--limit"):
        check_source(source, 1000, limited=False)
    check_source(source, 1000, limited=True)


def test_a_thousand_classes_of_another_set_may_have_any_size() -> None:
    names = tuple(f"class_{i:04d}" for i in range(1000))
    check_source(Labels(np.arange(1000), names), 1000, limited=False)


def test_classes_of_data_and_model_must_agree() -> None:
    with pytest.raises(DataError, match=r"4 classes, the model 200.*--checkpoint"):
        check_source(Labels([0, 1, 2, 3], tuple(WNIDS)), 200, limited=True)
    with pytest.raises(DataError, match="labels up to 3"):
        check_source(Labels([0, 1, 2, 3], None), 3, limited=True)


def test_labels_of_a_test_split_and_no_labels() -> None:
    with pytest.raises(DataError, match="test split"):
        check_source(Labels([-1, -1], None), 1000, limited=True)
    with pytest.raises(DataError, match="empty"):
        check_source(Labels([], None), 1000, limited=True)


# Parquet and arrow


def test_parquet_gives_pictures_and_labels_by_position(tmp_path: Path) -> None:
    write_parquet(tmp_path / "part-0.parquet", [3, 1, 0, 2, 1])
    write_parquet(tmp_path / "part-1.parquet", [2, 0])
    source = open_source(str(tmp_path))
    assert source.classes == tuple(WNIDS)
    assert source.labels.tolist() == [3, 1, 0, 2, 1, 2, 0]
    for index in (0, 6, 3, 5, 2, 4, 1):
        label, number, _ = source.picture(index).getpixel((0, 0))
        assert (label, number) == (source.labels[index], index % 5)
    check_source(source, 4, limited=False)


def test_parquet_through_workers_keeps_the_order(tmp_path: Path) -> None:
    source = open_source(str(write_parquet(tmp_path / "x.parquet", [0, 1, 2, 3, 2, 1, 0])))
    source.picture(0)  # leaves a row group open in this process
    loader = make_loader(source, TO_TENSOR, np.arange(7), batch_size=2, workers=2, pin_memory=False)
    images, labels = (torch.cat(parts) for parts in zip(*loader))
    assert labels.tolist() == [0, 1, 2, 3, 2, 1, 0]
    assert (images[:, 1, 0, 0] * 255).round().tolist() == list(range(7))


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_arrow(tmp_path: Path, kind: str) -> None:
    table = hub_table([encode_label(label, i) for i, label in enumerate([1, 0, 3])], [1, 0, 3], WNIDS)
    path = tmp_path / "data-00000-of-00001.arrow"
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    source = open_source(str(tmp_path))
    assert (source.classes, source.labels.tolist()) == (tuple(WNIDS), [1, 0, 3])
    assert source.picture(2).getpixel((0, 0)) == (3, 2, 0)


@pytest.mark.parametrize(
    "names",
    [
        ("data/validation-00000-of-00001.parquet", "data/train-00000-of-00001.parquet"),
        ("val/part.parquet", "train/part.parquet"),
        ("imagenet-1k-validation.parquet", "imagenet-1k-train.parquet"),
    ],
)
def test_splits_are_found_by_their_names(tmp_path: Path, names: tuple[str, str]) -> None:
    write_parquet(tmp_path / names[0], [0, 1])
    write_parquet(tmp_path / names[1], [0, 1, 2])
    assert len(open_source(str(tmp_path))) == 2
    assert len(training_sibling(str(tmp_path))) == 3


def test_only_a_training_split_is_no_validation_set(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-00000-of-00001.parquet", [0, 1, 2])
    with pytest.raises(DataError, match="none of them of the split 'val'"):
        open_source(str(tmp_path))


def test_no_training_sibling(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "part.parquet", [0, 1])
    assert training_sibling(str(tmp_path)) is None
    assert training_sibling(str(path)) is None


def test_a_truncated_parquet_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "validation.parquet", [0, 1, 2])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"validation\.parquet.*cut off"):
        open_source(str(tmp_path))


def test_parquet_of_another_layout(tmp_path: Path) -> None:
    pq.write_table(pa.table({"img": [1], "label": [0]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column image; it has img, label"):
        open_source(str(tmp_path / "a.parquet"))


def test_parquet_files_of_different_sets(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [0, 1])
    write_parquet(tmp_path / "b.parquet", [0, 1], names=WNIDS[::-1])
    with pytest.raises(DataError, match="disagree"):
        open_source(str(tmp_path))


def test_rows_without_label_or_picture(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [0, None])
    with pytest.raises(DataError, match="1 rows without a label"):
        open_source(str(tmp_path / "a.parquet"))
    empty = pa.table({"image": pa.array([None], pa.struct([("bytes", pa.binary())])), "label": [0]})
    pq.write_table(empty, tmp_path / "b.parquet")
    with pytest.raises(DataError, match="no picture in row 0"):
        open_source(str(tmp_path / "b.parquet")).picture(0)


# The Hub


@pytest.mark.parametrize("spec", ["imagenet-1k", "ILSVRC/imagenet-1K", "ilsvrc/imagenet-1k"])
def test_a_misspelt_hub_name_is_corrected(spec: str) -> None:
    with pytest.raises(DataError, match=IMAGENET):
        open_source(spec)


@pytest.mark.parametrize("spec", ["/no/such/folder", "./missing", "missing", "~/a/b"])
def test_a_missing_path_says_what_a_source_is(spec: str) -> None:
    with pytest.raises(DataError, match=r"no such data.*demo"):
        open_source(spec)


def test_local_data_cannot_be_streamed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--streaming"):
        open_source("demo", streaming=True)


def test_no_datasets_library(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'qvit\[data\]'"):
        open_source(IMAGENET)


def test_no_access_names_the_token_step(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise ConnectionError("401 gated")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=refuse))
    with pytest.raises(DataError, match="401 gated.*huggingface-cli login"):
        open_source(IMAGENET)


def test_no_network_with_the_real_library() -> None:
    pytest.importorskip("datasets")
    script = (
        "from qvit.evaluation.data import open_source\nfrom qvit import DataError\n"
        "try:\n    open_source('ILSVRC/imagenet-1k')\nexcept DataError as e:\n    print('found:', e)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert "huggingface-cli login" in done.stdout.split("found:")[1]


@pytest.fixture
def hub(monkeypatch, tmp_path: Path):
    """`datasets.load_dataset` gives three local files of three, three and two rows, whatever it is asked for."""
    datasets = pytest.importorskip("datasets")
    calls = []
    rows = [[0, 1, 2], [3, 0, 1], [2, 3]]
    files = []
    for i, labels in enumerate(rows):
        table = datasets.Dataset.from_dict(
            {"image": [{"bytes": encode("CMYK"), "path": None} for _ in labels], "label": labels},
            features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=WNIDS)}),
        )
        files.append(str(tmp_path / f"{i}.parquet"))
        table.to_parquet(files[-1])
    real = datasets.load_dataset

    def load(name, split, streaming, **more):
        calls.append({"name": name, "split": split, **more})
        cache = str(tmp_path / "cache")
        return real("parquet", data_files={split: files}, split=split, streaming=streaming, cache_dir=cache)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def test_hub_downloads_only_its_split(hub) -> None:
    source = open_source(IMAGENET)
    assert hub[0]["split"] == "validation"
    assert hub[0]["data_files"] == {"validation": "data/validation-*"}
    assert source.labels.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert source.classes == tuple(WNIDS)
    assert source.picture(7).mode == "RGB"


@pytest.mark.parametrize("workers", [0, 2, 5])
def test_hub_streaming_reads_every_picture_once(hub, workers: int) -> None:
    source = open_source("owner/name", streaming=True)
    loader = make_loader(source, TO_TENSOR, None, batch_size=2, workers=workers, pin_memory=False)
    labels = torch.cat([labels for _, labels in loader])
    assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_stream_of_the_wrong_size_is_refused(imagenet_wnids) -> None:
    source = HubSource.__new__(HubSource)
    source.name, source.streaming, source.labels, source.classes, source._count = IMAGENET, True, None, None, 49_000
    with pytest.raises(DataError, match="49000 pictures"):
        check_source(source, 1000, limited=False)


def test_a_class_called_train_is_no_training_split(tmp_path: Path) -> None:
    image_folder(tmp_path, ["apple", "bicycle", "train"])
    assert training_sibling(str(tmp_path)) is None


def test_hub_data_calibrates_on_its_streamed_training_split(hub) -> None:
    source = training_sibling("owner/name")
    assert (hub[-1]["split"], source.streaming) == ("train", True)


# Choosing pictures


def test_spread_covers_the_whole_set() -> None:
    assert spread(10, 4).tolist() == [0, 2, 5, 7]
    assert spread(3, 5).tolist() == [0, 1, 2]
    assert len(set(spread(50_000, 256).tolist())) == 256


def test_first_pictures_cuts_the_last_batch() -> None:
    batches = [(torch.zeros(4, 1), torch.arange(4 * i, 4 * i + 4)) for i in range(3)]
    assert torch.cat([labels for _, labels in first_pictures(batches, 6)]).tolist() == list(range(6))
    assert sum(len(labels) for _, labels in first_pictures(batches, None)) == 12


def test_demo_is_the_same_everywhere_and_its_splits_are_disjoint() -> None:
    pytest.importorskip("sklearn")
    images, labels = demo_split("val")
    assert (images.dtype, images.shape[1:], len(images)) == (torch.uint8, (3, 32, 32), len(labels))
    assert sorted(set(labels.tolist())) == list(range(10))
    again, _ = demo_split("val")
    assert torch.equal(images, again)
    train = {picture.numpy().tobytes() for picture in demo_split("train")[0]}
    assert not any(picture.numpy().tobytes() in train for picture in images)
    with pytest.raises(DataError, match="splits"):
        demo_split("test")


def test_demo_needs_scikit_learn(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'qvit\[demo\]'"):
        open_source("demo")


# Transforms


def noise(height: int, width: int) -> Image.Image:
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Image.fromarray(pixels.numpy())


def test_without_antialias_it_is_torch_interpolate() -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    transform = TensorTransform(size=224, interpolation="bicubic", crop_pct=1.0, crop_mode="center", mean=mean, std=std)
    picture = noise(64, 64)
    pixels = tensor(picture)[None].float() / 255
    pixels = F.interpolate(pixels, size=(224, 224), mode="bicubic", antialias=False, align_corners=False)
    assert pixels.max() > 1 and pixels.min() < 0  # the clamp has something to do
    wanted = (pixels.clamp(0, 1)[0] - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(transform(picture), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode, size", [("center", (96, 64)), ("center", (64, 65)), ("squash", (96, 64))])
def test_without_antialias_any_shape_becomes_the_square(mode: str, size: tuple[int, int]) -> None:
    transform = TensorTransform(
        size=32, interpolation="nearest", crop_pct=0.9, crop_mode=mode, mean=(0.0,) * 3, std=(1.0,) * 3
    )
    assert transform(noise(*size)).shape == (3, 32, 32)
    assert transform(noise(*size[::-1])).shape == (3, 32, 32)


def tiny_model():
    import timm

    return timm.create_model("vit_small_patch14_dinov2", depth=1, embed_dim=64, num_heads=2, img_size=224).eval()


def test_the_transform_follows_the_models_picture_size() -> None:
    """timm's own settings of this model say 518, whatever picture size it was built with."""
    transform, resolved = build_transform(tiny_model(), DataSettings())
    assert resolved["input_size"] == (3, 224, 224)
    assert transform(noise(300, 280)).shape == (3, 224, 224)
    assert "Normalize" in resolved["transform"]


def test_antialias_off_is_a_different_transform() -> None:
    model, picture = tiny_model(), noise(300, 280)
    on, _ = build_transform(model, DataSettings())
    off, resolved = build_transform(model, DataSettings(antialias=False))
    assert "antialias=False" in resolved["transform"]
    assert (on(picture) - off(picture)).abs().max() > 0.1


def test_a_picture_size_that_the_model_does_not_take() -> None:
    with pytest.raises(ConfigError, match="img_size"):
        build_transform(tiny_model(), DataSettings(input_size=256))


# Configurations

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("*.yaml")))
def test_configurations_load_and_timm_knows_the_models(name: str) -> None:
    import timm

    config = load_model_config(name, CONFIGS)
    assert timm.is_model(config.model)
    if config.checkpoint is None and config.data.source == IMAGENET:
        assert config.model in timm.list_pretrained()
        assert timm.get_pretrained_cfg(config.model).num_classes == 1000


@pytest.mark.parametrize(
    "text, message",
    [
        ("model: x\nallowed_drops: 1", "'allowed_drops'.*allowed_drop"),
        ("model: x\ndata: {antialiasing: no}", "'antialiasing'"),
        ("model: x\ndata: {interpolation: lanczos}", "data.interpolation.*bicubic"),
        ("model: x\ndata: {antialias: false, crop_mode: border}", "crop_mode"),
        ("model: x\ndata: {mean: 0.5}", "three numbers"),
        ("model: x\nexpected_swapped: 0", "expected_swapped"),
        ("kwargs: {}", "model"),
        ("- model", "mapping"),
        ("model: [", "not valid YAML"),
        ("model: !!python/object/apply:os.getcwd []", "not valid YAML"),
        pytest.param("[" * 1_500, "not valid YAML", id="nested"),
    ],
)
def test_a_wrong_configuration_says_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model_config("x", tmp_path)


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="deit_small"):
        load_model_config("deit_smal", CONFIGS)


def test_a_checkpoint_is_relative_to_its_yaml(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("model: x\ncheckpoint: weights/x.safetensors")
    assert load_model_config(str(tmp_path / "x.yaml"), CONFIGS).checkpoint == str(tmp_path / "weights/x.safetensors")
