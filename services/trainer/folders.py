"""Restricts the folders of models that a trainer reads and writes to its run's folder."""

from dataclasses import dataclass
from pathlib import Path

from atoll.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class AllowedFolders:
    run: Path
    exports: tuple[Path, ...] = ()  # named when the trainer was started

    def check(self, path: str) -> None:
        """Raises UserError for any other path, since what is there would be replaced. Links that the run's
        owner has put into its folder are followed."""
        asked = Path(path).absolute()
        is_ours = self.run.absolute() in asked.parents or asked in {each.absolute() for each in self.exports}
        if not is_ours or ".." in asked.parts:
            raise UserError(f"got path {path}, expected one below the run's folder {self.run}, without ..")
