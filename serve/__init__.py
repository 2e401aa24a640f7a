"""Serving with vLLM: what to start (`spec`), starting and stopping it (`vllm`), and talking to it (`endpoint`).

vLLM is a program that is started, never an import; only the files in `vllm_side` run inside its interpreter.
"""
