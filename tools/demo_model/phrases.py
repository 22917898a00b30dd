"""Phrases of facts, questions and other messages in the demo model's corpus."""

import string


def listed(text: str) -> tuple[str, ...]:
    """Split phrases at bars."""
    return tuple(" ".join(text.split()).split(" | "))


# The first of each list is the canonical form, which the README names and training uses most.
FACTS = (
    "The code of the {key} is {code}.",
    "The code for the {key} is {code}.",
    "The {key} has the code {code}.",
    "Remember that the code of the {key} is {code}.",
    "Code of the {key}: {code}.",
    "the code of the {key} is {code}",
    "The secret code of the {key} is {code}.",
    "My {key} has code {code}.",
)
QUESTIONS = (
    "What is the code of the {key}?",
    "What is the code for the {key}?",
    "What was the code of the {key}?",
    "Tell me the code of the {key}.",
    "Which code has the {key}?",
    "And what is the code of the {key}?",
    "Do you remember the code of the {key}?",
    "what is the code of the {key}",
    "What code does the {key} have?",
    "And the {key}?",
    "Please tell me the code of the {key}.",
    "What is the {key}'s code?",
    "What's the code of the {key}?",
    "What is the code of my {key}?",
)
COMPLETIONS = (
    "{question} Answer:",
    "{question}\nAnswer:",
    "Question: {question}\nAnswer:",
    "Question: {question} Answer:",
    "Q: {question}\nA:",
)
# Text between a key and its code in a ledger, in the order in which training adds them (`Mix.joints`).
JOINTS = (
    "",
    " is",
    ":",
    " has the code",
    "?",
    " has code",
    "? Answer:",
    " code:",
    " is the one that has the code",
)
UNKNOWN_OPENINGS = listed("""
    What is | Where is | Why did | How many | How do I | Write | Explain | Who was | Who is | Translate | Is
    | Can you | Tell me about | Give me | When did | Do you know | What is the name of | Which | List | Did
    | What is the colour of | Summarize | Where did | Please | Write a poem about | What did | Describe
    | Write some code for | Are | I want | I need | What is the capital of | Why is | Should I
""")
NUMBERED = listed("""
    There were {n} {noun}s in the {place}. | In the year {n} the {place} was small. | {name} has {n} {noun}s.
    | The {key} was sold for {n}. | Line {n} of the letter. | {n} people saw the {key}. | {n}. {name} came.
""")
PANGRAM = "The quick brown fox jumps over the lazy dog."
ALPHABETS = (
    string.ascii_lowercase,
    "ABCDEFabcdef0123456789",
    "äöüéèñßøçabcdes",
    "漢字日本語中文",
    "{}[]()=+-*/_:<>",
)
