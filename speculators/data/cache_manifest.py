"""What the states in a hidden-state cache are states of, and how they are stored. No torch here.

The trap: each way of storing has a format version of its own, so that a reader refuses what it does not know.
"""

from pathlib import Path
from typing import Literal

from speculators.errors import UserError
from speculators.schema import Strict, read_json
from speculators.verifier import Verifier

Store = Literal["bf16", "fp8"]

DTYPES: dict[Store, str] = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}
_FORMAT_VERSIONS = {"bfloat16": 1, "float8_e4m3fn": 2}


class CacheManifest(Strict):
    """The file `manifest.json`. `tokenizer_hash` is "" in a cache that was made before it was recorded."""

    format_version: int
    verifier: str
    verifier_revision: str
    template_hash: str
    tokenizer_hash: str = ""
    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str

    @classmethod
    def of(cls, verifier: Verifier, aux_layer_ids: tuple[int, ...], store: Store = "bf16") -> "CacheManifest":
        """The manifest of a new cache for this verifier."""
        return cls(
            format_version=_FORMAT_VERSIONS[DTYPES[store]],
            verifier=verifier.path,
            verifier_revision=verifier.revision,
            template_hash=verifier.template_hash,
            tokenizer_hash=verifier.tokenizer_hash,
            aux_layer_ids=aux_layer_ids,
            hidden_size=verifier.hidden_size,
            dtype=DTYPES[store],
        )

    @classmethod
    def read(cls, cache: Path) -> "CacheManifest":
        """Read the manifest of the cache at this path.

        Raises:
            UserError: no cache there, or one of a format that is not known here.
        """
        file = cache / "manifest.json"
        if not file.exists():
            raise UserError(
                f"--hidden-states: {cache} is not a hidden-state cache (no manifest.json); "
                "make one with `speculators extract`."
            )
        manifest = read_json(file, cls, "a hidden-state manifest")
        if _FORMAT_VERSIONS.get(manifest.dtype) != manifest.format_version:
            known = ", ".join(f"{version} ({dtype})" for dtype, version in _FORMAT_VERSIONS.items())
            raise UserError(
                f"--hidden-states: {cache} has the format {manifest.format_version} ({manifest.dtype}), this version "
                f"reads {known}; extract again or use the version that wrote it."
            )
        return manifest

    @property
    def token_bytes(self) -> int:
        """What one token takes on the disk: its id, and a value a channel (with fp8 also a scale) of every stream."""
        stream = self.hidden_size * 2 if self.dtype == "bfloat16" else self.hidden_size + 4
        return 4 + (len(self.aux_layer_ids) + 1) * stream

    def check_same_source(self, wanted: "CacheManifest", cache: Path) -> None:
        """Raises UserError when the states come from another verifier, chat template or tokenizer than `wanted`."""
        for what, seen, needed in (
            ("verifier", self.verifier_revision, wanted.verifier_revision),
            ("chat template", self.template_hash, wanted.template_hash),
            ("tokenizer", self.tokenizer_hash or wanted.tokenizer_hash, wanted.tokenizer_hash),
        ):
            if seen != needed:
                raise UserError(
                    f"--hidden-states: {cache} was made with another {what} ({seen}; {wanted.verifier} has {needed}); "
                    "extract again for this verifier."
                )

    def check_same_contents(self, wanted: "CacheManifest", cache: Path) -> None:
        """Raises UserError when `wanted` has other layers or is stored in another way."""
        if self.aux_layer_ids != wanted.aux_layer_ids:
            raise UserError(
                f"{cache}: holds layers {list(self.aux_layer_ids)}, asked for {list(wanted.aux_layer_ids)}; "
                "choose another output directory or the same layers."
            )
        if self.dtype != wanted.dtype:
            store = next(store for store, dtype in DTYPES.items() if dtype == self.dtype)
            raise UserError(
                f"--store: {cache} holds {self.dtype}, asked for {wanted.dtype}, and one cache is stored in one way; "
                f"choose another output directory or --store {store}."
            )
