"""Recognizes ids of the Hugging Face Hub, which are not downloaded."""

import re
from pathlib import Path

MODELS = Path("models")  # where downloads go
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def is_hub_id(path: Path) -> bool:
    """Whether a path that does not exist looks like ORG/NAME rather than a file of an existing folder."""
    is_file = path.suffix in (".parquet", ".jsonl", ".json", ".csv", ".toml")
    is_ours = path.parent == MODELS  # a folder that was advised below
    return bool(_ID.fullmatch(str(path))) and not (is_file or is_ours or path.parent.exists())


def missing_model(folder: Path) -> str:
    """What to do about a model folder without config.json."""
    if not is_hub_id(folder):
        return (
            "expected a Hugging Face folder with config.json, *.safetensors and tokenizer.json; `atoll data` "
            "makes the examples' models"
        )
    target = MODELS / folder.name
    return (
        "Atoll does not download models: run\n"
        f"  hf download {folder} --local-dir {target}\n"
        "or, from ModelScope,\n"
        f"  modelscope download --model {folder} --local_dir {target}\n"
        f'and set path = "{target}"'
    )
