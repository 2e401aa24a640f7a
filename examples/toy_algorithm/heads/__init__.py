"""A toy algorithm: K small heads on one state guess the next K tokens, each without knowing the others' guesses."""
