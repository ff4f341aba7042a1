"""TRL's GRPOTrainer on the work of the quickstart; runs in TRL's own environment (see trl_loop.py).

Prints one JSON line: wall and CPU seconds of the measured steps.
"""

import argparse
import json
import time
from pathlib import Path

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, MAX_NEW_TOKENS = 16, 8, 8


class Stopwatch(TrainerCallback):
    """Reads both clocks after the warm-up steps and after the last one."""

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps
        self.start = self.end = (0.0, 0.0)

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        self.end = (time.perf_counter(), time.process_time())
        if state.global_step == self._warmup_steps:  # type: ignore[attr-defined]
            self.start = self.end


def exact_match(completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [float(text.strip() == truth) for text, truth in zip(completions, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="parquet in verl's schema, plain text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    rows = [
        {"prompt": row["prompt"][0]["content"], "answer": row["reward_model"]["ground_truth"]}
        for row in pq.read_table(args.data).to_pylist()
    ]
    stopwatch = Stopwatch(args.warmup_steps)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        reward_funcs=exact_match,
        train_dataset=Dataset.from_list(rows),
        callbacks=[stopwatch],
        args=GRPOConfig(
            output_dir=str(args.out),
            max_steps=args.warmup_steps + args.steps,
            per_device_train_batch_size=PROMPTS_PER_STEP * SAMPLES_PER_PROMPT,
            num_generations=SAMPLES_PER_PROMPT,
            max_completion_length=MAX_NEW_TOKENS,
            learning_rate=2e-4,
            bf16=args.dtype == "bfloat16",
            use_cpu=True,
            gradient_checkpointing=False,  # TRL's default is slower on a model of this size
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    (wall_0, cpu_0), (wall_1, cpu_1) = stopwatch.start, stopwatch.end
    print(json.dumps({"wall_s": wall_1 - wall_0, "cpu_s": cpu_1 - cpu_0, "steps": args.steps}))


if __name__ == "__main__":
    main()
