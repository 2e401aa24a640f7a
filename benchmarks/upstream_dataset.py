"""Runs in upstream's interpreter: token ids as the directory that its `generate-offline-data` reads.

python upstream_dataset.py PROMPTS.json DIRECTORY
"""

import json
import sys
from pathlib import Path

from datasets import Dataset  # type: ignore[import-untyped,import-not-found,unused-ignore]


def write(prompts: list[list[int]], directory: str) -> None:
    """A dataset of `input_ids` and `loss_mask` (all ones: this step does not look at it), as tensors."""
    columns = {"input_ids": prompts, "loss_mask": [[1] * len(ids) for ids in prompts]}
    Dataset.from_dict(columns).with_format("torch").save_to_disk(directory)


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
