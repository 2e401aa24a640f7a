"""A small whole world: verifier with weights, prepared data, and states that its head reads as the data's text."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parent / "data"))
from chatml_verifier import CHATML, chat, write_jsonl, write_verifier

from speculators.data.hidden_states import CacheManifest, HiddenStateCache, HiddenStates
from speculators.data.prepare import PrepareOptions, prepare
from speculators.data.samples import SPLITS, DataDirectory, SplitStats, TokenizedSample
from speculators.training.options import TrainOptions
from speculators.verifier import Verifier

H, LAYERS = 16, (2, 4, 5)
ROWS = [{"id": f"c{i}", "messages": chat(f"hello {i}", f"the answer is {i} and {i}")} for i in range(40)]


def make_world(root: Path, template: str = CHATML, rows: list[dict[str, Any]] | None = None) -> Path:
    """Verifier in `v`, data in `d`, states in `h`: each token's state is the output row of the next one."""
    write_verifier(root / "v", template)
    config = json.loads((root / "v" / "config.json").read_text())
    V = config["vocab_size"] = config["vocab_size"] + 2  # ids that the tokenizer leaves free
    (root / "v" / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.functional.normalize(torch.randn(V, H, generator=generator), dim=-1)
    tensors = {"model.embed_tokens.weight": head.clone(), "model.norm.weight": torch.ones(H), "lm_head.weight": head}
    save_file({name: t.bfloat16() for name, t in tensors.items()}, root / "v" / "model.safetensors")
    file = write_jsonl(root / "rows.jsonl", rows or ROWS)
    prepare(PrepareOptions(verifier=str(root / "v"), data=(file,), output=root / "d", draft_vocab_size=64))
    fill_cache(root, lambda following: head[following].bfloat16())
    return root


def fill_cache(root: Path, last_hidden: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """States of every sample; `last_hidden` makes them [T, H] from the next tokens' ids [T]."""
    verifier = Verifier.read(root / "v")
    cache = HiddenStateCache.create(root / "h", CacheManifest.of(verifier, LAYERS))
    for split in SPLITS:
        for sample in DataDirectory(root / "d").split(split):
            ids = torch.from_numpy(np.array(sample.ids))
            aux = torch.randn(len(ids), len(LAYERS), H, generator=torch.Generator().manual_seed(1)).bfloat16()
            cache.write(sample.sample_id, HiddenStates(ids, aux, last_hidden(ids.roll(-1).long())))


def rewrite_data(root: Path, change: Callable[[TokenizedSample], TokenizedSample]) -> None:
    """The data directory with every training sample changed."""
    data = DataDirectory(root / "d")
    splits = {"train": [change(s) for s in data.split("train")], "validation": list(data.split("validation"))}
    stats = {name: SplitStats.of(part) for name, part in splits.items()}
    counts = data.token_counts
    DataDirectory.write(root / "d", data.manifest.model_copy(update={"splits": stats}), counts, dict(splits))


def flags(root: Path, algorithm: str = "dflash", **changes: Any) -> Iterator[str]:
    """The options of `options` as flags."""
    for name, value in values(root, algorithm, **changes).items():
        yield from (f"--{name.replace('_', '-')}", str(value))


def values(root: Path, algorithm: str, **changes: Any) -> dict[str, Any]:
    places = {"verifier": str(root / "v"), "data": root / "d", "hidden_states": root / "h", "output": root / "run"}
    given = {"draft_vocab_size": 300, "row_length": 64, "device": "cpu", "precision": "float32"}
    return {**places, "speculator_type": algorithm, **given, **changes}


def options(root: Path, algorithm: str = "dflash", **changes: Any) -> TrainOptions:
    """A small run in this world."""
    return TrainOptions(**values(root, algorithm, **changes))
