"""A draft trained elsewhere becomes one of ours: in memory to train on (`read_draft`), or on disk (`convert`).

No torch at module level. The trap: a directory can be a draft of the right sizes for another verifier; sizes are all
that can be checked, so the source and its hash are written down beside the result.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from speculators import checkpoint
from speculators.algorithms.draft_config import DraftConfig
from speculators.errors import UserError
from speculators.foreign_config import Format, read_foreign_config
from speculators.provenance import Provenance
from speculators.schema import Strict, read_json_dict
from speculators.verifier import Verifier

if TYPE_CHECKING:
    from torch import Tensor

RECORD = "conversion.json"


class ConvertOptions(Strict):
    """Turn a draft trained elsewhere into one that `speculators serve`, `replay` and `train` take."""

    source: Path = Field(
        description="Directory of the draft: speculators format, z-lab DFlash, or EAGLE-3 research format.",
        json_schema_extra={"argument": True},
    )
    verifier: str = Field(description="Directory of the verifier that it drafts for.")
    output: Path = Field(description="Directory to write; must not exist.")
    json_output: bool = Field(False, description="Print the record as JSON.", json_schema_extra={"flags": ["--json"]})


class Conversion(Strict):
    """What a draft was made of, saved beside it.

    Attributes:
        source: its directory.
        sha256: of its config.json and weight files, names and contents.
        notes: sentences about what was decided or left behind.
    """

    source: str
    sha256: str
    format: Format
    algorithm: str
    verifier: str
    verifier_revision: str
    notes: tuple[str, ...]
    provenance: Provenance


class ReadDraft(NamedTuple):
    """A draft in memory: our config, the tensors of a checkpoint of it, and where they came from."""

    config: DraftConfig
    tensors: "dict[str, Tensor]"
    record: Conversion


def read_draft(source: Path, verifier: Verifier) -> ReadDraft:
    """Read a draft in any known format; a run directory of ours means its best checkpoint.

    Raises:
        UserError: no draft there, of an unknown format, with something that can't be represented, or damaged.
    """
    directory = checkpoint.resolve(source)
    file = directory / "config.json"
    raw = read_json_dict(file, "a draft's config")
    if (directory / checkpoint.MASK_EMBEDDING_FILE).exists():
        raw["learn_mask_embedding"] = True
    form, config, notes = read_foreign_config(raw, str(file), verifier)

    from speculators.foreign_tensors import read_foreign_tensors, weight_files

    tensors, more = read_foreign_tensors(directory, config, verifier)
    record = Conversion(
        source=str(directory.resolve()),
        sha256=_sha256([file, *weight_files(directory)]),
        format=form,
        algorithm=config.algorithm,
        verifier=verifier.path,
        verifier_revision=verifier.revision,
        notes=(*notes, *more),
        provenance=Provenance.collect(),
    )
    return ReadDraft(config, tensors, record)


def convert(options: ConvertOptions) -> Conversion:
    """Write the draft as a checkpoint directory of ours, whole or not at all.

    Raises:
        UserError: as `read_draft`; or the output is there already, or can't be written.
    """
    if options.output.exists():
        raise UserError(f"--output: {options.output} exists already; give a directory that does not.")
    draft = read_draft(options.source, Verifier.read(options.verifier))
    try:
        checkpoint.write(options.output, draft.config.to_json(), draft.tensors, notes={RECORD: draft.record})
    except OSError as error:
        raise UserError(f"--output: {options.output} cannot be written ({error.strerror}).") from None
    checkpoint.check_tensors(options.output, checkpoint.read_config(options.output))
    return draft.record


def _sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
