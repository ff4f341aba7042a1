"""Parquet files in verl's schema, one row of each kind, from the file to the verdict of a reward service."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.config.schema import GraderConfig
from atoll.coordinator.data.dataset_rows import Dataset, read_rows
from atoll.wire.types import FinishReason, Graded, GradingError, GroupId, SampleId, ScoreItem
from tests.integration.test_reward_service import grading

CASES = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"

# data_source, reward_model.ground_truth, response, the score that verl's rule gives it
TEXTS = [
    ("openai/gsm8k", "72", "48 + 24 = 72\n#### 72", 1.0),
    ("openai/gsm8k", "72", "The answer is 72", 0.0),
    ("lighteval/MATH", r"\frac{1}{2}", r"So $\boxed{\frac{1}{2}}$.", 1.0),
    ("DigitalLearningGmbH/MATH-lighteval", r"\frac{1}{2}", r"So $\boxed{\frac{1}{3}}$.", 0.0),
    ("HuggingFaceH4/MATH-500", "2", "So it is 2.", 0.0),
    ("math_dapo", "34", "First I add.\nAnswer: 34", 1.0),
    ("math_dapo_reasoning", "34", "First I add.\nAnswer: 35", -1.0),
    ("math", "34", "34", -1.0),
    ("aime2024", "204", "Answer: $204$", 1.0),
    ("numina_olympiads", "5", r"It is \boxed{5}", 1.0),
    ("numina_cn_k12", "5", r"It is \boxed{6}", 0.0),
    ("apps", CASES, ADD, 1.0),
    ("codecontests", CASES, ADD.replace("a + b", "3"), 0.5),  # of two cases, one
    ("taco", CASES, "I do not know", 0.0),
]
TARGETS = [
    ("searchR1_nq", {"target": ["Wilhelm Röntgen"]}, "<answer>wilhelm röntgen.</answer>", 1.0),
    ("searchR1_hotpotqa", {"target": ["yes", "indeed"]}, "<answer>Indeed</answer>", 1.0),
    ("searchR1_musique", {"target": ["yes"]}, "yes", 0.0),
]


def items(folder: Path, rows: Sequence[tuple[str, Any, str, float]]) -> list[ScoreItem]:
    """Of what verl's preprocessing writes."""
    file = folder / "train.parquet"
    records = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"question {index}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": index},
        }
        for index, (source, truth, _, _) in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(records), file)
    return [
        ScoreItem(
            id=SampleId(GroupId("verl", 0, index), 0),
            prompt=row.messages[0].content,
            response=response,
            ground_truth=row.ground_truth,
            data_source=row.data_source,
            finish_reason=FinishReason.STOP,
            response_length=10,
            extra=row.extra,
        )
        for index, (row, (_, _, response, _)) in enumerate(zip(read_rows(Dataset(file)), rows, strict=True))
    ]


@pytest.mark.long
async def test_rows_of_every_kind_get_the_verdicts_of_verls_rules(tmp_path: Path) -> None:
    async with grading(GraderConfig(name="data_source")) as client:
        for rows in (TEXTS, TARGETS):
            asked = items(tmp_path, rows)
            verdicts = {verdict.id: verdict for verdict in await client.score(asked)}
            assert not [verdict for verdict in verdicts.values() if isinstance(verdict, GradingError)]
            scores = [verdict.value for item in asked if isinstance(verdict := verdicts[item.id], Graded)]
            assert scores == [score for *_, score in rows]
