"""Where the pictures come from: the Hugging Face Hub, parquet or arrow files, an ImageFolder, or the demo's digits.

`open_source` looks at a source without decoding a picture, and `check_source` refuses one whose classes or size are
not what the model needs, so that a wrong class order costs seconds and not an evaluation.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from qvit.errors import DataError
from qvit.evaluation.config import IMAGENET
from qvit.evaluation.demo import demo_normalise, demo_split

__all__ = [
    "DemoSource",
    "FolderSource",
    "HubSource",
    "PictureLoader",
    "Pictures",
    "Source",
    "StreamedPictures",
    "TableSource",
    "check_source",
    "demo_normalise",
    "demo_split",
    "first_pictures",
    "make_loader",
    "open_picture",
    "open_source",
    "spread",
    "training_sibling",
]

IMAGENET_CLASSES, IMAGENET_VALIDATION = 1000, 50_000
_PICTURE_SUFFIXES = {".jpeg", ".jpg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_TABLE_SUFFIXES = {".parquet", ".arrow"}
_SPLIT_WORDS = {"val": "val", "validation": "val", "train": "train", "training": "train", "test": "test"}


def open_picture(content: bytes | Path, where: str) -> Image.Image:
    """Decode a picture of any kind (CMYK, grey, 16 bit, palette, wrong suffix, broken EXIF) into RGB.

    Raises:
        DataError: The content is no picture, or is cut off; the message names `where`.
    """
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as picture:
            if picture.mode.startswith("I;16"):  # convert() would clip the sixteen bits instead of scaling them
                picture = Image.fromarray((np.asarray(picture, dtype=np.uint16) >> 8).astype(np.uint8))
            return picture.convert("RGB")
    except Exception as error:  # on damaged bytes, decoders raise whatever comes up: struct.error, KeyError, ...
        what = str(error) or type(error).__name__
        raise DataError(f"cannot read the picture {where}: {what}; fetch this file again") from error


def spread(count: int, wanted: int) -> np.ndarray:
    """Choose `wanted` of `count` positions, evenly spread, so that a set sorted by class gives all classes."""
    return np.arange(count) if wanted >= count else np.arange(wanted) * count // wanted


class Source:
    """Pictures with labels, by position. Cheap to pickle: DataLoader workers get a copy.

    Attributes:
        name: What the user gave.
        labels: (n,) int64, or None for a stream.
        classes: Class names in label order, or None when the source has none.
    """

    name: str
    labels: np.ndarray | None
    classes: tuple[str, ...] | None

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, index: int) -> Image.Image:
        """Decode the picture at a position into RGB."""
        raise NotImplementedError


class DemoSource(Source):
    """scikit-learn's digits."""

    def __init__(self, split: str) -> None:
        images, labels = demo_split(split)
        self.name, self.labels, self.classes = f"demo ({split})", labels.numpy(), tuple("0123456789")
        self._images = images.permute(0, 2, 3, 1).numpy()

    def picture(self, index: int) -> Image.Image:
        return Image.fromarray(self._images[index])


class FolderSource(Source):
    """A folder with one folder a class; sorted names are the classes, as in torchvision's ImageFolder."""

    def __init__(self, root: Path) -> None:
        self.name, self.classes = str(root), tuple(_subfolders(root))
        if not self.classes:
            raise DataError(f"{root} has neither parquet or arrow files nor one folder of pictures for each class")
        self._files = [_picture_files(root / name) for name in self.classes]
        empty = [name for name, files in zip(self.classes, self._files) if not files]
        if empty:
            raise DataError(f"{root}: {_some(empty)} without pictures; unpack the data again")
        self.labels = np.repeat(np.arange(len(self.classes)), [len(files) for files in self._files])
        self._files = [f for files in self._files for f in files]

    def picture(self, index: int) -> Image.Image:
        return open_picture(self._files[index], str(self._files[index]))


class TableSource(Source):
    """Parquet or arrow files in the Hugging Face layout: `image` {bytes, path} and `label`, read with pyarrow."""

    def __init__(self, name: str, files: Sequence[Path]) -> None:
        self.name, self._files = name, list(files)
        self._open: tuple[tuple, object] = ((), None)
        labels, names, starts, groups = [], set(), [0], []
        for number, file in enumerate(self._files):
            with _TableFile(file) as table:
                names.add(table.class_names())
                labels.append(table.labels())
                for group, rows in enumerate(table.group_rows()):
                    starts.append(starts[-1] + rows)
                    groups.append((number, group))
        if len(names) > 1:
            raise DataError(f"{name}: the files disagree on the names of the classes; give one set, not several")
        self.classes = names.pop()
        self.labels = np.concatenate(labels)
        self._starts, self._groups = np.asarray(starts), groups

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_open": ((), None)}

    def picture(self, index: int) -> Image.Image:
        position = int(np.searchsorted(self._starts, index, side="right")) - 1
        number, group = self._groups[position]
        # One open group a process: a forked worker must not read through its parent's file.
        key = (os.getpid(), number, group)
        if self._open[0] != key:
            with _TableFile(self._files[number]) as table:
                self._open = (key, table.images(group))
        file, row = self._files[number], index - int(self._starts[position])
        content = self._open[1][row].as_py()
        content = content if isinstance(content, dict) else {"bytes": content}
        path = content.get("path")
        where = f"{path or 'without a name'} (row {index} of {self.name})"
        if content["bytes"] is None and not path:
            raise DataError(f"there is no picture in row {index} of {self.name}")
        return open_picture(file.parent / path if content["bytes"] is None else content["bytes"], where)


class _TableFile:
    """One open parquet or arrow file; pyarrow's errors become `DataError` with the file's name."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise DataError("parquet and arrow files need pyarrow: pip install 'qvit[data]'") from error
        self.path, self._parquet = path, path.suffix == ".parquet"
        try:
            self._file = pq.ParquetFile(path) if self._parquet else _open_arrow(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"cannot read {path}: {error}; it is empty or cut off, fetch it again") from error
        self._schema = self._file.schema_arrow if self._parquet else self._file.schema
        missing = {"image", "label"} - set(self._schema.names)
        if missing:
            found = ", ".join(self._schema.names)
            raise DataError(f"{path} has no column {' and '.join(sorted(missing))}; it has {found}")

    def __enter__(self) -> _TableFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._parquet:
            self._file.close()

    def class_names(self) -> tuple[str, ...] | None:
        features = json.loads((self._schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features")
        names = (features or {}).get("label", {}).get("names")
        return tuple(names) if names else None

    def labels(self) -> np.ndarray:
        column = self._file.read(["label"]).column(0) if self._parquet else self._file.column("label")
        if column.null_count:
            raise DataError(f"{self.path} has {column.null_count} rows without a label")
        return column.to_numpy().astype(np.int64)

    def group_rows(self) -> list[int]:
        if self._parquet:
            metadata = self._file.metadata
            return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        return [len(chunk) for chunk in self._file.column("image").chunks]

    def images(self, group: int):
        if self._parquet:
            return self._file.read_row_group(group, ["image"], use_threads=False).column(0)
        return self._file.column("image").chunk(group)


def _open_arrow(path: Path):
    """Map an arrow file; `datasets` writes streams, other tools the random-access format."""
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


class HubSource(Source):
    """A data set of the Hugging Face Hub through `datasets`, downloaded or streamed."""

    def __init__(self, name: str, split: str, *, streaming: bool) -> None:
        self.name, self.streaming = name, streaming
        rows = _load_from_hub(name, {"val": "validation"}.get(split, split), streaming)
        features = rows.features or {}
        missing = {"image", "label"} - set(features)
        if missing:
            raise DataError(f"{name} has no column {' and '.join(sorted(missing))}; it has {', '.join(features)}")
        from datasets import Image as ImageFeature

        names = getattr(features["label"], "names", None)
        self.classes = tuple(names) if names else None
        # Undecoded: the decoder of `datasets` stumbles over broken EXIF.
        self.rows = rows.cast_column("image", ImageFeature(decode=False))
        splits = getattr(rows.info, "splits", None) or {}
        declared = splits.get(str(rows.split)) if rows.split else None
        self._count = declared.num_examples if declared else None
        self.labels = None if streaming else np.asarray(rows["label"][:], dtype=np.int64)

    def __len__(self) -> int:
        if not self.streaming:
            return len(self.labels)
        if self._count is None:
            raise TypeError(f"{self.name} does not say how many pictures it has")
        return self._count

    def picture(self, index: int) -> Image.Image:
        return self.decode(self.rows[index], index)

    def decode(self, row: dict, index: int) -> Image.Image:
        """Decode the picture of one undecoded row."""
        content, path = row["image"]["bytes"], row["image"]["path"]
        where = f"{path or 'without a name'} (row {index} of {self.name})"
        if content is None and not path:
            raise DataError(f"there is no picture in row {index} of {self.name}")
        return open_picture(Path(path) if content is None else content, where)


def _load_from_hub(name: str, split: str, streaming: bool):
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name} needs the library datasets: pip install 'qvit[data]'") from error
    only: dict = {}
    if name == IMAGENET and not streaming:
        # Without this, datasets downloads all splits, 150 GB of them, and with it misses the splits left out.
        only = {"data_files": {split: f"data/{split}-*"}, "verification_mode": "no_checks"}
    try:
        return datasets.load_dataset(name, split=split, streaming=streaming, **only)
    except Exception as error:  # the Hub's clients raise their transports' own errors, which have no common base
        raise DataError(
            f"cannot get {name} ({split}) from the Hugging Face Hub: {type(error).__name__}: {error}. {IMAGENET} is "
            f"gated: accept its terms at https://huggingface.co/datasets/{IMAGENET}, make a token and run "
            "`huggingface-cli login` (or `hf auth login`); without a network give a local folder with --data, or "
            "--data demo"
        ) from error


def open_source(spec: str, split: str = "val", *, streaming: bool = False) -> Source:
    """Open a source without decoding a picture.

    Args:
        spec: "demo"; a folder or file of parquet or arrow; a folder of class folders (or with `val/` and `train/` in
            it); or a Hub name, "owner/name".
        split: "val" or "train". Files and folders without a split in their names count as "val".
        streaming: Read a Hub data set while it is evaluated instead of downloading it first.

    Raises:
        DataError: There is no such source, or it is empty, cut off or without labels.
    """
    path = Path(spec).expanduser()
    if streaming and (spec == "demo" or path.exists()):
        raise DataError(f"only a Hub data set can be streamed, and {spec} is local: leave --streaming out")
    if spec == "demo":
        return DemoSource(split)
    if path.exists():
        return _open_local(path, split)
    if spec != IMAGENET and spec.lower() in (IMAGENET.lower(), "imagenet-1k", "imagenet"):
        raise DataError(f"the Hub's name of this data set is {IMAGENET}, written exactly so, not {spec}")
    if spec.count("/") != 1 or spec.startswith((".", "/", "~")):
        raise DataError(
            f"no such data: {spec!r} is no file or folder, no Hub name (owner/name, such as {IMAGENET}) and not 'demo'"
        )
    return HubSource(spec, split, streaming=streaming)


def _open_local(path: Path, split: str) -> Source:
    if path.is_file():
        if path.suffix not in _TABLE_SUFFIXES:
            raise DataError(f"{path} is neither parquet nor arrow; give such a file, or a folder")
        return TableSource(str(path), [path])
    if tables := _table_files(path):
        found = {p: _split_of(p.relative_to(path)) for p in tables}
        chosen = [p for p in tables if found[p] == split]
        if not chosen and split == "val":
            chosen = [p for p in tables if found[p] is None]
        if not chosen:
            raise DataError(f"{path} has {len(tables)} parquet or arrow files, none of them of the split {split!r}")
        return TableSource(str(path), chosen)
    inner = [name for name in _subfolders(path) if _SPLIT_WORDS.get(name.lower()) == split]
    if len(inner) == 1:
        return FolderSource(path / inner[0])
    if split == "train":
        raise DataError(f"{path} has no folder train/ with class folders")
    return FolderSource(path)


def _picture_files(folder: Path) -> list[Path]:
    """Pictures of a class, in any depth; links to folders are not followed, for they may lead back."""

    def refuse(error: OSError) -> None:  # by default os.walk would be silent, and the pictures missing
        raise DataError(f"cannot read the folder {error.filename}: {error.strerror}; see to its permissions") from error

    found = (Path(parent) / name for parent, _, names in os.walk(folder, onerror=refuse) for name in names)
    return sorted(p for p in found if p.suffix.lower() in _PICTURE_SUFFIXES)


def _table_files(folder: Path) -> list[Path]:
    """Parquet and arrow files in a folder and its subfolders; no deeper, where an ImageFolder has a million files."""
    found = (p for pattern in ("*", "*/*") for p in folder.glob(pattern))
    return sorted(p for p in found if p.suffix in _TABLE_SUFFIXES and not p.name.startswith("."))


def _subfolders(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def _split_of(path: Path) -> str | None:
    """The split that a path names, as in `data/validation-00000-of-00014.parquet`."""
    for part in path.parts:
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return None


def training_sibling(spec: str) -> Source | None:
    """The training split that belongs to a source, for calibration: the Hub's is streamed; None where there is none."""
    path = Path(spec).expanduser()
    if not path.exists():
        return open_source(spec, "train", streaming=spec != "demo")
    if path.is_file():
        return None
    if _split_of(Path(path.name)) == "val" and (path.parent / "train").is_dir():
        return open_source(str(path.parent / "train"))
    tables = _table_files(path)
    # A folder of pictures may be that of a class called train: only beside the other split is it one.
    folders = set() if tables else {_SPLIT_WORDS.get(name.lower()) for name in _subfolders(path)}
    if any(_split_of(p.relative_to(path)) == "train" for p in tables) or {"train", "val"} <= folders:
        return _open_local(path, "train")
    return None


def check_source(source: Source, num_classes: int, *, limited: bool) -> None:
    """Refuse data whose classes, order or size are not what the model was trained for.

    Args:
        source: An opened source.
        num_classes: Classes of the model's head.
        limited: The user asked for a part of the pictures, so that their number proves nothing.

    Raises:
        DataError: With what to do about it.
    """
    if source.labels is not None:
        _check_labels(source, num_classes)
    if source.classes is not None:
        _check_classes(source, num_classes)
    if num_classes == IMAGENET_CLASSES and not limited and _is_imagenet(source):
        _check_complete(source)


def _check_labels(source: Source, num_classes: int) -> None:
    if len(source.labels) == 0:
        raise DataError(f"{source.name} is empty; the data set may be misspelt (the Hub's name is {IMAGENET})")
    low, high = int(source.labels.min()), int(source.labels.max())
    if low < 0:
        raise DataError(
            f"{source.name} has the label {low}: this is a test split without labels, use the validation split"
        )
    if high >= num_classes:
        raise DataError(
            f"{source.name} has labels up to {high}, the model only {num_classes} classes: the data and the checkpoint "
            "do not belong together"
        )


def _check_classes(source: Source, num_classes: int) -> None:
    names, count = source.classes, len(source.classes)
    numbered = all(name.isdigit() for name in names)
    if numbered and (count >= IMAGENET_CLASSES or [int(n) for n in names] != sorted(int(n) for n in names)):
        raise DataError(
            f"{source.name}: the classes are numbers, and their order as text ({', '.join(names[:4])}, ...) is not the "
            "model's; ImageNet's classes are the sorted wnids, so the folders must have names such as n01440764"
        )
    known = _imagenet_names() if num_classes == IMAGENET_CLASSES else []
    missing = sorted(set(known) - set(names))
    if known and missing and len(missing) < IMAGENET_CLASSES // 2:
        raise DataError(f"{source.name}: {_some(missing)} missing, so all later labels are shifted; get the whole set")
    if count != num_classes:
        raise DataError(
            f"{source.name} has {count} classes, the model {num_classes}: evaluate a checkpoint with the classes of "
            "this data (--checkpoint), or give the data that the model was trained for"
        )
    if known and not missing and list(names) != known:
        raise DataError(f"{source.name}: the classes are not in the order of the sorted wnids; sort them")


def _is_imagenet(source: Source) -> bool:
    """Whether a thousand classes are ImageNet's, by wnid; the Hub's set names them in words but has their number."""
    return (
        source.classes is None
        or source.name == IMAGENET
        or list(source.classes) == _imagenet_names()
        or ("tench" in source.classes[0] if source.classes else False)
    )


def _check_complete(source: Source) -> None:
    try:
        count = len(source)
    except TypeError:  # a stream of unknown length
        return
    if count == IMAGENET_VALIDATION:
        return
    hint = "give --limit to evaluate a part on purpose"
    if source.labels is not None:
        per_class = np.bincount(source.labels, minlength=IMAGENET_CLASSES)
        odd = [str(i) for i in np.flatnonzero(per_class != IMAGENET_VALIDATION // IMAGENET_CLASSES)]
        hint = f"{_some(odd, 'class')} without exactly 50 pictures; {hint}"
    raise DataError(f"{source.name} has {count} pictures, ImageNet's validation set {IMAGENET_VALIDATION}: {hint}")


def _imagenet_names() -> list[str]:
    from timm.data import ImageNetInfo

    return list(ImageNetInfo("imagenet-1k").label_names())


def _some(names: Sequence[str], what: str = "class") -> str:
    """The first few names and how many there are, for a message."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {what}{'es' if len(names) != 1 else ''} ({shown})"


class Pictures(Dataset):
    """Some pictures of a source, transformed: items are (tensor (3, S, S), label), or the message of an unreadable one.

    With `strict`, an unreadable picture raises instead.
    """

    def __init__(self, source: Source, transform: Callable, indices: np.ndarray, *, strict: bool = True) -> None:
        self.source, self.transform, self.indices, self.strict = source, transform, indices, strict

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> tuple[torch.Tensor, int] | str:
        index = int(self.indices[item])
        try:
            return self.transform(self.source.picture(index)), int(self.source.labels[index])
        except DataError as error:
            return _message(error, self.strict)


class StreamedPictures(IterableDataset):
    """The pictures of a streamed Hub data set; `datasets` itself shares its files out among the workers."""

    def __init__(self, source: HubSource, transform: Callable, *, strict: bool = True) -> None:
        self.source, self.transform, self.strict = source, transform, strict

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int] | str]:
        for index, row in enumerate(self.source.rows):
            try:
                yield self.transform(self.source.decode(row, index)), int(row["label"])
            except DataError as error:
                yield _message(error, self.strict)


def _message(error: DataError, strict: bool) -> str:
    if strict:
        raise error
    return str(error)


class PictureLoader:
    """Batches (images, labels). Pictures that cannot be read are left out of them.

    Attributes:
        unreadable: A message for each picture that was left out so far.
    """

    def __init__(self, batches: DataLoader) -> None:
        self._batches = batches
        self.unreadable: list[str] = []

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels, unreadable in self._batches:
            self.unreadable += unreadable
            if len(labels):
                yield images, labels


def _collate(items: list[tuple[torch.Tensor, int] | str]) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    read = [item for item in items if not isinstance(item, str)]
    images, labels = default_collate(read) if read else (torch.empty(0), torch.empty(0, dtype=torch.int64))
    return images, labels, [item for item in items if isinstance(item, str)]


def make_loader(
    source: Source,
    transform: Callable,
    indices: np.ndarray | None,
    *,
    batch_size: int,
    workers: int,
    pin_memory: bool,
    strict: bool = False,
) -> PictureLoader:
    """Batches of some pictures of a source (of a stream: of all), decoded by `workers` processes (0: in this one).

    With `strict`, a picture that cannot be read raises; without, it is left out, and the loader counts it.
    """
    if isinstance(source, HubSource) and source.streaming:
        data, workers = StreamedPictures(source, transform, strict=strict), min(workers, source.rows.num_shards)
    else:
        data = Pictures(source, transform, indices, strict=strict)
    batches = DataLoader(data, batch_size=batch_size, num_workers=workers, pin_memory=pin_memory, collate_fn=_collate)
    return PictureLoader(batches)


def first_pictures(
    loader: Iterable[tuple[torch.Tensor, torch.Tensor]], limit: int | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The first `limit` pictures of a loader, in its batches; all of them without a limit."""
    left = limit
    for images, labels in loader:
        if left is not None:
            images, labels = images[:left], labels[:left]
            left -= len(labels)
        yield images, labels
        if left == 0:
            return
