"""Files that run inside the interpreter of vLLM; they import nothing of ours."""
