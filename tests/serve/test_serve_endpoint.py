import pytest

from serve.endpoint import Endpoint, parse_acceptance
from speculators.acceptance import Acceptance
from speculators.errors import UserError

METRICS = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 4.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.78e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 0.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="2"} 1.0
"""


def test_counters_add_up_over_engines_in_any_order():
    assert parse_acceptance(METRICS) == Acceptance(histogram=(7, 3, 3, 1), drafted=42)


def test_a_server_without_speculation_has_no_counters():
    assert parse_acceptance('vllm:num_requests_running{engine="0"} 0.0\n') is None


def test_an_address_where_nothing_answers_is_named():
    with pytest.raises(UserError, match=r"--endpoint: http://127.0.0.1:1/v1/models does not answer"):
        Endpoint.connect("http://127.0.0.1:1/v1")
