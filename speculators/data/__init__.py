"""From prompts to training rows: conversations, tokens and masks, the draft vocabulary, hidden states, packing."""
