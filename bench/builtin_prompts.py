"""Prompts written for this project, so that a benchmark can run without any download."""

BUILTIN_REASONING = (
    "A baker makes 36 rolls in the morning and twice as many in the afternoon. She packs them in bags of 6. "
    "How many bags does she fill in a day?",
    "Lena cycles to work at 18 km/h and the ride takes 25 minutes. How long is her way to work?",
    "A shop sells a jacket for 80 euros after a discount of 20 percent. What did it cost before the discount?",
    "Find all integers n for which n^2 - 5n + 6 is smaller than zero or equal to zero. Explain each step.",
    "Three friends share a bill of 54 euros. One pays twice as much as each of the others. How much does each pay?",
    "A tank holds 240 litres. One pipe fills it in 4 hours, another in 6 hours. How long do both together need?",
    "What is the sum of all odd numbers from 1 to 99? Show how you found it.",
    "A rectangle is 3 cm longer than it is wide and has an area of 40 square centimetres. How long are its sides?",
)

BUILTIN_CODE = (
    "Write a Python function that returns the second largest number of a list without sorting it.",
    "Write a Python function that checks whether two strings are anagrams of each other, and explain its running time.",
    'Complete this Python function:\n```python\ndef running_mean(values: list[float]) -> list[float]:\n    """Return '
    'the mean of the first i + 1 values for every i."""\n```',
    "Write a Python class Stack with push, pop and peek that raises an exception when it is empty.",
    'Complete this Python function:\n```python\ndef count_words(text: str) -> dict[str, int]:\n    """Count each '
    'word of the text, ignoring case."""\n```',
    "Write a Python function that reads a CSV file and returns the average of one of its columns, given by name.",
    "Write a Python function that flattens a list of lists of any depth.",
    "Write a SQL query that lists the three customers with the most orders in the last year.",
)
