"""The trackers by name. A package is imported only if its tracker is asked for."""

from atoll.config.schema import TrackerName
from atoll.tracking.tracker import Tracker


def make_tracker(name: TrackerName) -> Tracker:
    """Imports the tracker's package."""
    match name:
        case "tensorboard":
            from atoll.tracking.tensorboard import TensorBoardTracker

            return TensorBoardTracker()
        case "wandb":
            from atoll.tracking.wandb import WandbTracker

            return WandbTracker()
        case "mlflow":
            from atoll.tracking.mlflow import MlflowTracker

            return MlflowTracker()
        case "swanlab":
            from atoll.tracking.swanlab import SwanLabTracker

            return SwanLabTracker()
        case "trackio":
            from atoll.tracking.trackio import TrackioTracker

            return TrackioTracker()
