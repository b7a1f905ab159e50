"""The checksums that torch.save writes and torch.load does not look at.

A file of torch.save is a zip archive of uncompressed records, each with its CRC-32. One flipped bit
in an optimizer's moments loads without a word, and is another number: so every record is summed up
before anything is taken from the file. Reading it once more costs about a second a gigabyte.
"""

from __future__ import annotations

import struct
import zipfile
from typing import BinaryIO

ZIP = b"PK\x03\x04"


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
