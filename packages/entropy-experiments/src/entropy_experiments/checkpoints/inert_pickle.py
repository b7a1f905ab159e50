"""A stranger's pickle, read without building any class that it names.

The names that a format is known to use stand for inert records: a record keeps what the pickle
says about it and does nothing. Any other name is refused before it is looked up, so no code runs,
whoever wrote the file; and a format can be read whatever version of a library its classes are of.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Mapping
from typing import Any, BinaryIO

import torch

Name = tuple[str, str]
"""Module and name, as a pickle writes them."""


class Record:
    """Stands for a class of a format; keeps the arguments and the state of one object."""

    kind = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *arguments: Any) -> Record:
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class RefusedName(pickle.UnpicklingError):
    """The pickle asks for a name that its format does not have."""


class InertUnpickler(pickle.Unpickler):
    """Reads records of the listed names, plain values and torch's dtypes; refuses all else.

    Args:
        file: The pickle.
        records: Names of classes: objects of them become a `Record` of that `kind`.
        calls: What is put in place of other names, functions mostly.
        storages: What a persistent id stands for; None: there are none in this format.
    """

    def __init__(
        self,
        file: BinaryIO,
        *,
        records: Collection[Name],
        calls: Mapping[Name, Any],
        storages: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(file)
        # Of this reading alone: a pickle can set attributes of a class that it is given.
        self.substitutes: dict[Name, Any] = {
            (module, name): type(name, (Record,), {"kind": name}) for module, name in records
        }
        self.substitutes |= calls
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.substitutes:
            return self.substitutes[module, name]
        # Not getattr, which imports what torch loads lazily.
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise RefusedName(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        if self._storages is None:
            raise pickle.UnpicklingError("a persistent id, which this format does not use")
        return self._storages(pid)


DAMAGED_PICKLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the reader of pickles raises on changed bytes."""
