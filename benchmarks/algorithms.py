"""Learning curves of all recipes on the arithmetic task, from one warmed-up model and one seed.

    python -m benchmarks.algorithms                  # all recipes, 100 steps each
    python -m benchmarks.algorithms ppo dapo --steps 200

Runs lie in runs/algorithms; those that are there from before are part of the picture and the table, which
go to docs/learning_curves.svg and docs/algorithms.md. Wants the extra `docs`: `pip install -e '.[docs]'`.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "algorithms.md"
PICTURE = ROOT / "docs" / "learning_curves.svg"
BEGIN, END = "<!-- learning curves: begin -->\n", "<!-- learning curves: end -->\n"

RECIPES = sorted({path.stem for path in EXAMPLES.glob("*.toml")} - {"arithmetic", "gsm8k"})
RUNS = Path("runs/algorithms")
WARM = RUNS / "warm" / "warm"  # the model that all begin with
VALIDATION_EVERY = 5  # steps
VALIDATION = "val/arithmetic/avg@1"
WINDOW = 10  # steps whose mean score is shown
COLUMNS = 4  # of the picture


@dataclass(frozen=True, slots=True)
class Curve:
    recipe: str
    scores: tuple[float, ...]  # mean of each step's batch
    validation: tuple[tuple[int, float], ...]  # step, mean score of answers to other sums
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(RECIPES)}; none: all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if unknown := set(arguments.recipes) - set(RECIPES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(RECIPES)}")
    if not (ROOT / WARM).exists():
        warm_up(arguments.seed)
    for recipe in arguments.recipes or RECIPES:
        train(recipe, arguments.steps, arguments.seed)
    curves = [read(recipe) for recipe in RECIPES if (ROOT / RUNS / recipe / "summary.json").exists()]
    draw(curves)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(curves) + END + rest.partition(END)[2])


def warm_up(seed: int) -> None:
    """One step of PPO's recipe: its critic begins at the warmed-up policy, which the run leaves in WARM."""
    atoll("data", "arithmetic")
    run("ppo", name="warm", **{"run.seed": seed, "run.steps": 1})


def train(recipe: str, steps: int, seed: int) -> None:
    settings = {
        "model.path": WARM,
        "warmup": "{}",
        "run.seed": seed,
        "run.steps": steps,
        "run.target_reward": 100.0,  # never reached
        "validation.every": VALIDATION_EVERY,
    }
    run(recipe, name=recipe, **settings)


def run(recipe: str, name: str, **settings: object) -> None:
    """Anew, in RUNS/name."""
    shutil.rmtree(ROOT / RUNS / name, ignore_errors=True)
    settings |= {"run.dir": RUNS, "run.name": name, "checkpoint.at_end": "false"}
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    atoll("run", f"examples/{recipe}.toml", *overrides)


def atoll(*words: str) -> None:
    subprocess.run([Path(sys.executable).with_name("atoll"), *words], cwd=ROOT, check=True)


def read(recipe: str) -> Curve:
    folder = ROOT / RUNS / recipe
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Curve(
        recipe,
        scores=tuple(row["critic/score/mean"] for row in rows if "critic/score/mean" in row),
        validation=tuple((row["step"], row[VALIDATION]) for row in rows if VALIDATION in row),
        seconds=json.loads((folder / "summary.json").read_text())["seconds"],
    )


def table(curves: list[Curve]) -> str:
    lines = [
        f"![Mean score of answers to held-out sums, by step and recipe]({PICTURE.name})",
        "",
        f"Score: mean score of the batches of the first and the last {WINDOW} steps. Held out: mean score of "
        "greedy answers to 256 sums outside the training data, before and after; the picture shows it. A "
        "right answer scores 1; `own_functions` gives partial credit for close ones. Compare recipes by the "
        "held-out score, since a filter changes the score of a batch.",
        "",
        "| recipe | score, first | last | held out, before | after | steps | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for curve in curves:
        numbers = (
            mean(curve.scores[:WINDOW]),
            mean(curve.scores[-WINDOW:]),
            curve.validation[0][1],
            curve.validation[-1][1],
        )
        cells = [curve.recipe, *(f"{x:.2f}" for x in numbers), len(curve.scores), f"{curve.seconds:.0f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def draw(curves: list[Curve]) -> None:
    """One panel a recipe, with all others in grey behind it."""
    import matplotlib  # here, since runs do without
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "atoll"  # equal curves, equal bytes
    num_rows = -(-len(curves) // COLUMNS)
    figure, panels = pyplot.subplots(
        num_rows,
        COLUMNS,
        figsize=(11, 2.2 * num_rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel in panels.flat[len(curves) :]:
        panel.set_visible(False)
    for panel, shown in zip(panels.flat, curves, strict=False):  # the last row may have room
        for curve in curves:
            panel.plot(*zip(*curve.validation, strict=True), color="0.85", linewidth=0.8)
        panel.plot(*zip(*shown.validation, strict=True), color="C0", linewidth=1.8)
        panel.set_title(shown.recipe, fontsize=9)
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=7)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("mean score of answers to held-out sums", fontsize=9)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
