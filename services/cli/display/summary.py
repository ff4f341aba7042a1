"""Prints how a run ended, from its summary.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.config.load import read_json
from atoll.config.schema import RunSection
from atoll.coordinator.summary import SUMMARY_FILE, Outcome
from atoll.runtime.errors import UserError
from atoll.runtime.telemetry import METRICS_FILE

VALIDATION = "val/"


def read_summary(folder: Path) -> dict[str, Any] | None:
    """None if the run has left no summary. Raises ConfigError or UserError for a file that is no summary."""
    path = folder / SUMMARY_FILE
    if not path.exists():
        return None
    try:
        summary = read_json(path)
        return {**summary, "outcome": Outcome(summary["outcome"])}
    except (KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is not a run's summary ({what}): delete it; nothing else needs it") from None


def describe_summary(summary: Mapping[str, Any], folder: Path, resume: str = "") -> str:
    """`resume`: the command that continues this run."""
    lines = [f"{summary['run']}: {_ending(summary)}"]
    if summary["outcome"] not in (Outcome.FINISHED, Outcome.TARGET_REACHED):
        lines.append(f"  continue    {resume or 'atoll run FILE --resume'}")
    lines += _results(summary)
    lines.append(f"  checkpoint  {summary['checkpoint'] or 'none'}")
    lines.append(f"  metrics     {folder / METRICS_FILE}")
    if summary["hint"]:
        lines.append(f"  hint        {summary['hint']}")
    lines.append(f"  next        {'; '.join(_next_commands(summary, folder))}")
    return "\n".join(lines)


def clock(seconds: float) -> str:
    """12:34 or 1:02:03."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def is_result(name: str) -> bool:
    """avg@k, pass@k or nll, but not lengths and drops."""
    return name.startswith(VALIDATION) and ("@" in name or name.endswith("/nll"))


def _ending(summary: Mapping[str, Any]) -> str:
    outcome, steps, all_steps = Outcome(summary["outcome"]), summary["steps"], summary["num_steps"]
    took = "" if summary["seconds"] is None else f" in {clock(summary['seconds'])}"
    reason = f": {summary['reason']}" if summary["reason"] else ""
    match outcome:
        case Outcome.FINISHED:
            return f"finished {steps} steps{took}"
        case Outcome.TARGET_REACHED:
            target = summary["target_reward"]
            return f"reached run.target_reward = {target:g} after {steps} of {all_steps} steps{took}"
        case Outcome.INTERRUPTED | Outcome.STOPPED_BY_GUARD | Outcome.FAILED:
            return f"{outcome} after step {steps} of {all_steps}{took}{reason}"


def _results(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    window, last = summary["reward_window"], summary["reward_last"]
    if window:
        steps = "the first and last step" if window == 1 else f"means of the first and last {window} steps"
        lines.append(f"  reward      {summary['reward_first']:.3f} -> {last:.3f} ({steps})")
    elif last is not None:
        lines.append(f"  reward      {last:.3f} (one step)")
    for name, first in summary["validation_first"].items():
        if is_result(name) and name in summary["validation_last"]:
            result = summary["validation_last"][name]
            lines.append(f"  {name.removeprefix(VALIDATION)}  {first:.3f} -> {result:.3f}")
    if best := summary["best"]:
        lines.append(f"  best        {best['value']:.3f} at step {best['step']}")
    return lines


def _next_commands(summary: Mapping[str, Any], folder: Path) -> list[str]:
    run = folder.name if folder.parent == RunSection.model_fields["dir"].default else folder
    commands = [f"atoll samples {run}", f"atoll plot {run}"]
    if summary["checkpoint"]:
        commands.append(f"atoll export {run} --out FOLDER")
    return commands
