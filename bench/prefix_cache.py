"""Prompts that were seen before must not look fast.

Servers that bench starts run without prefix caching, or with it (`--prefix-caching`) and a reset before each repeat of
each point. Besides, every request carries a salt of its point and repeat, which works on servers of others too.
"""

import requests

from serve.endpoint import Endpoint

ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # without it vLLM has no POST /reset_prefix_cache
OFF = "off"
RESET = "on, reset before each repeat of each point"
SALTED = "as its server has it; prompts of different points and repeats are salted, so they share no prefix"
_TIMEOUT_S = 30.0


def reset(endpoint: Endpoint) -> bool:
    """Empty the server's prefix cache; False when it knows no such request or does not answer."""
    session = requests.Session()
    session.trust_env = False
    try:
        return session.post(f"{endpoint.base_url}/reset_prefix_cache", timeout=_TIMEOUT_S).status_code == 200
    except requests.RequestException:
        return False
