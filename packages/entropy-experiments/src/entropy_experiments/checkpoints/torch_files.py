"""Files of torch.save, read safely: nothing in them is executed, and their checksums are right.

A file of torch.save is a zip archive of uncompressed records, each with its CRC-32, at which
torch.load does not look. One flipped bit in an optimizer's moments loads without a word, and is
another number: so every record is summed up before anything is taken from the file. Reading it once
more costs about a second a gigabyte.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from entropy_experiments.input_errors import check_regular, words_of

ZIP = b"PK\x03\x04"
PIECE = 2**20
"""Numbers that are looked at together."""


def load_safely(path: Path, *, mmap: bool = False) -> Any:
    """torch.load that runs no code and takes no damaged number: such files are refused."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            if is_zip(file):
                check_crc(file)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} was refused: it holds more than tensors and plain values, and nothing in it "
            f"was executed ({first}). Expected a state dict: if you trust the file, save its "
            "tensors again in that form (weights as safetensors)."
        ) from error
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path} cannot be read: it is truncated or damaged ({error}); expected the bytes "
            "that torch.save wrote. Copy the file again, or use another checkpoint."
        ) from error
    except Exception as error:  # the reader of pickles raises whatever a damaged byte leads it to
        raise ValueError(
            f"{path} cannot be read ({words_of(error)}). It is truncated or not a torch file: use "
            "an earlier checkpoint."
        ) from error


def all_finite(value: Tensor) -> bool:
    """Whether every number is; in pieces, for isfinite makes temporaries as large as its input."""
    return all(bool(torch.isfinite(piece).all()) for piece in value.reshape(-1).split(PIECE))


def is_zip(file: BinaryIO) -> bool:
    """Whether it is of torch.save since 1.6; what is older has no checksums."""
    file.seek(0)
    return file.read(len(ZIP)) == ZIP


def check_crc(file: BinaryIO) -> None:
    """Raise zipfile.BadZipFile unless every record has the checksum it was written with."""
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise zipfile.BadZipFile("a record is compressed, as torch.save writes none")
            # None at all: the trainer asked for that (torch.serialization.set_crc32_options).
            written = any(record.CRC for record in records if record.file_size)
            bad = archive.testzip() if written else None
    except (struct.error, ArithmeticError, ValueError, NotImplementedError, EOFError) as error:
        raise zipfile.BadZipFile(str(error)) from error
    if bad is not None:
        raise zipfile.BadZipFile(f"the CRC of {bad!r} is another one than was written")
