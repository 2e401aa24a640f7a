"""Which token fills the slots that a block draft is asked to predict: one that text never contains."""

from speculators.errors import UserError
from speculators.verifier import Verifier


def choose(verifier: Verifier, asked: int | None) -> int:
    """The mask token's id: `asked` if given, else an unused special token, else an id past the tokenizer's last token.

    Raises:
        UserError: the token asked for is outside the vocabulary, or pad, EOS or BOS; or none is free.
    """
    taken = {*verifier.eos_token_ids, verifier.pad_token_id, verifier.bos_token_id}
    if asked is not None:
        if not 0 <= asked < verifier.vocab_size:
            raise UserError(
                f"--mask-token-id: {asked} is outside the verifier's vocabulary; "
                f"allowed are 0 to {verifier.vocab_size - 1}."
            )
        if asked in taken:
            raise UserError(
                f"--mask-token-id: {asked} is the verifier's pad, EOS or BOS token, which text contains; "
                "choose a token that never occurs, or leave the option out."
            )
        return asked
    tokenizer = verifier.tokenizer
    taken |= set(tokenizer.all_special_ids)
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    added = sorted(tokenizer.added_tokens_decoder.items())
    free = [i for i, token in added if token.special and i not in taken and token.content not in template]
    if free:
        return free[-1]
    if len(tokenizer) < verifier.vocab_size:
        return len(tokenizer)
    raise UserError(
        f"--mask-token-id: the tokenizer of {verifier.path} has no unused special token; "
        "name a token that never occurs."
    )
