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
    "Two dice are thrown. How likely is it that the sum is at least 10? Write the answer as a fraction.",
    "Anna is older than Ben, Ben is older than Carla, and Dora is younger than Carla. Who is the second youngest?",
    "A train leaves at 14:35 and arrives at 17:10 after 201.5 km. What was its mean speed in km/h?",
    "In how many ways can the letters of the word LEVEL be arranged?",
    "Prove that the sum of two odd integers is always even.",
    "A farmer has chickens and rabbits, together 35 heads and 94 legs. How many rabbits does he have?",
    "What is the remainder when 7^100 is divided by 5? Show your steps.",
    "A shirt costs 12 euros more than a tie, and three ties cost as much as one shirt and a 4 euro belt. What does the "
    "tie cost?",
    "If today is a Wednesday, which day of the week is it in 100 days?",
    "A recipe for 4 people needs 300 g of rice and 0.6 litres of water. How much of each do 7 people need?",
    "Solve the system of equations 2x + 3y = 13 and x - y = -1.",
    "A box holds 5 red, 3 blue and 2 green balls. Two are drawn without putting back. How likely are both red?",
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
    "Write a Python generator that yields the prime numbers in order.",
    "Complete this Python function:\n```python\ndef merge_intervals(intervals: list[tuple[int, int]]) -> "
    'list[tuple[int, int]]:\n    """Join intervals that overlap and return them in ascending order."""\n```',
    "Write a JavaScript function that waits until its argument function has not been called for 300 ms, then calls it.",
    "Write a Python decorator that repeats a function up to three times when it raises an exception.",
    "Write a bash script that renames every .jpeg file in a folder to .jpg and prints how many it renamed.",
    'Complete this Python function:\n```python\ndef roman_to_int(numeral: str) -> int:\n    """Return the value of a '
    'Roman numeral such as MCMXCIV."""\n```',
    "Write a C function that reverses a singly linked list, and describe what it does with an empty list.",
    "This Python code is slow for long lists. Why, and how would you write it?\n```python\ndef unique(values):\n    "
    "result = []\n    for value in values:\n        if value not in result:\n            result.append(value)\n    "
    "return result\n```",
    "Write a regular expression that matches dates of the form 2024-03-31, and a Python function that uses it.",
    "Write unit tests with pytest for a function `slugify(title)` that makes URL parts out of titles.",
    "Write a Rust function that counts the vowels of a string slice.",
    'Complete this Python function:\n```python\ndef transpose(matrix: list[list[int]]) -> list[list[int]]:\n    """'
    'Swap rows and columns of a rectangular matrix."""\n```',
)

BUILTIN_CHAT = (  # two turns each
    ("Suggest a weekend trip for a family that likes animals and hates long drives.", "And if it rains on both days?"),
    (
        "Write a short poem about a lighthouse in winter.",
        "Now rewrite it so that every line starts with the same letter.",
    ),
    (
        "I have a job interview tomorrow and I am nervous. What should I do tonight?",
        "Give me three questions to practise.",
    ),
    ("Explain to a ten-year-old why the sky is blue.", "Now explain it to a physics student."),
    ("Write a polite email to a landlord about a broken heater.", "Make it half as long and a little firmer."),
    ("What are the pros and cons of working from home?", "Put your answer into a table."),
    ("Pretend that you are a museum guide in front of a dinosaur skeleton.", "A visitor asks how we know its colour."),
    ("Plan a vegetarian dinner for six people.", "One guest cannot eat nuts. What changes?"),
    (
        "Compare learning the piano with learning the guitar as an adult.",
        "Which one would you recommend to me, and why?",
    ),
    (
        "Write the opening paragraph of a detective story set in a bakery.",
        "Continue with a dialogue between two suspects.",
    ),
    ("How do I keep houseplants alive when I travel for two weeks?", "I also have a cactus. Does it need anything?"),
    ("Give me a motto for a bicycle repair shop.", "Give me five more, each with a different mood."),
    ("Why do people disagree about the best way to load a dishwasher?", "Settle the matter with a mock court ruling."),
    ("Describe the taste of a lemon to someone who has never eaten one.", "Now describe the smell of rain."),
    ("My friend forgot my birthday. How should I bring it up?", "Write the message that I could send."),
    ("List ways to save electricity in a small flat.", "Sort them by how much they save, with your reasons."),
    (
        "What would daily life be like if people could breathe under water?",
        "Name two new professions that would appear.",
    ),
    (
        "Translate 'The early bird catches the worm' into French and German.",
        "Is there a saying that means the opposite?",
    ),
    ("Help me to name a small grey kitten.", "I like the third one. Invent a story of how it got that name."),
    ("What should a beginner know before running a first 10 km race?", "Make a training plan for the last four weeks."),
)

BUILTIN_QA = (
    "Which planet has the shortest year, and how long is it?",
    "What does the heart's left ventricle do?",
    "Who wrote the play in which a Danish prince sees his father's ghost?",
    "What is the difference between weather and climate?",
    "Why does ice float on water?",
    "What is the capital of New Zealand?",
    "How does a vaccine protect against a disease?",
    "What was the Silk Road?",
    "Which gas do plants take in for photosynthesis?",
    "What does the abbreviation HTTP stand for?",
    "Why are there leap years?",
    "What is inflation, in one paragraph?",
    "Which instruments play in a string quartet?",
    "How do bees tell each other where food is?",
    "What is the longest bone of the human body?",
    "What causes the tides?",
    "In which year did the first human walk on the moon, and who was it?",
    "What is the difference between a virus and a bacterium?",
    "Why does bread rise?",
    "What is a hash function used for?",
)
