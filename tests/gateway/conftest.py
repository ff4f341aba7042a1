"""Model folders of real tokenizers and chat templates, each written once."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.gateway.model_folders import make_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family, by its name in model_folders.FAMILIES."""

    @cache
    def folder(family: str) -> Path:
        return make_folder(tmp_path_factory.mktemp(family), family)

    return folder
