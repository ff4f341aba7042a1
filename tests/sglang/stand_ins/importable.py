"""Modules that can be imported under any sub-module's name, and whose attributes are inert."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Attributes(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attributes(name, (Inert,), {})


class Inert(metaclass=_Attributes):
    """A class, a decorator, a function, a type: whatever an import-time use asks for."""

    def __init__(self, *arguments: object, **settings: object) -> None:
        pass

    def __call__(self, *arguments: Any, **settings: object) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()

    def __getitem__(self, key: object) -> Any:
        return self


class InertModule(ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Attributes(name, (Inert,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str, attributes: dict[str, object]) -> None:
        self._prefix = f"{package}."
        self._attributes = attributes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        mine = name.startswith(self._prefix)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return InertModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._attributes)


def stand_in(package: str, **attributes: object) -> None:
    """Every sub-module of the package can be imported from now on, and has the attributes."""
    sys.meta_path.append(Finder(package, attributes))
