"""What vLLM, torch and the hub print when a server cannot start, told in a sentence with their own lines after it."""

import pytest

from serve.explain import CAUSES, explain

PREFIX = "(EngineCore pid=7) ERROR 12-01 08:46:07 [core.py:133] "
LOGS = {
    "does not know an option": "usage: vllm [-h]\nvllm serve: error: unrecognized arguments: --foo",
    "took the port": "OSError: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address "
    "already in use",
    "only permitted users": "OSError: You are trying to access a gated repo.\nMake sure to have access to it at",
    "hub cannot be reached": "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't "
    "find them in the cached files.",
    "no such model on the hub": "OSError: a/b is not a local folder and is not a valid model identifier listed on",
    "model's architecture": "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
    "  Value error, Model architectures ['X'] are not supported for now. Supported architectures: dict_keys([])",
    "no usable GPU": "RuntimeError: Failed to infer device type, please set the environment variable",
    "memory does not suffice": f"{PREFIX}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    "RuntimeError: Engine core initialization failed. See root cause above.",
    "cannot be shared among": "ValueError: World size (8) is larger than the number of available GPUs (2) in this",
    "pipeline stages": "ValueError: MiMoForCausalLM does not support eagle3 with pipeline parallelism",
    "its prompt computed in parts": f"{PREFIX}RuntimeError: CPU Generator does not use offset",
    "arctic-inference in vLLM's environment": "ImportError: Arctic Inference is required for suffix decoding.",
}


@pytest.mark.parametrize("words", LOGS)
def test_a_known_cause_is_a_sentence_and_then_the_lines(words):
    told = explain(LOGS[words])
    assert words in told.partition(" Its last lines: ")[0]
    lines = told.partition(" Its last lines: ")[2]
    assert lines
    assert "root cause above" not in lines
    assert any(
        line.removeprefix("vllm serve: ").strip() in lines for line in LOGS[words].replace(PREFIX, "").splitlines()
    )


def test_every_cause_has_a_log_that_shows_it():
    assert {cause.sentence for cause in CAUSES} == {
        cause.sentence for cause in CAUSES for words in LOGS if words in cause.sentence
    }


def test_an_unknown_cause_keeps_its_lines_alone():
    assert explain("one\n\ntwo\n(W pid=3) INFO 12-01 08:46:07 [a.py:1] three\nfour") == "two | three | four"
    assert explain(f"{PREFIX}KeyError: 'x'\n{PREFIX}KeyError: 'x'") == "KeyError: 'x'"
    assert explain("") == "it printed nothing"


def test_a_harmless_mention_far_above_is_not_the_cause():
    chatter = "WARNING 12-01 08:46:07 [p.py:1] Address already in use. Retrying with a new port.\n" + "step\n" * 200
    assert explain(chatter + "the end") == "step | step | the end"
