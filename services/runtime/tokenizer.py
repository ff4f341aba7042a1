"""Tokenizer fingerprint."""

import hashlib
from pathlib import Path


def tokenizer_digest(model_path: Path) -> str:
    """SHA-256 of the model folder's tokenizer.json."""
    return hashlib.sha256((model_path / "tokenizer.json").read_bytes()).hexdigest()
