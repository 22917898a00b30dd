"""The demo model's fixed texts, which tests can check, and the small talk that gets them."""

from tools.demo_model.phrases import listed
from tools.demo_model.words import NUMBER_WORDS

GREETING = (
    "Hello! I am the tiny demo model of pdserve. I remember codes: tell me the code of a box or a door, "
    "then ask me for it."
)
ABOUT = (
    "I am the tiny demo model of pdserve. I remember codes, and not much else: tell me the code of a box,"
    " a door or a lamp, and ask me for it, even thousands of words later."
)
UNKNOWN = "I am only a tiny demo model, so I do not know that. Tell me some codes and ask me for one of them."
NOTED = "I will remember that."
WELCOME = "You are welcome. Ask me for another code!"
GOODBYE = "Goodbye! Thank you for your time."
NOT_TOLD = "I have not been told that code."
STORY = (
    "Once upon a time there was a tiny model who lived in a quiet engine by the sea. It did not know much"
    " about the world, but it could remember. One evening a young worker came with a very long letter. "
    "Somewhere in that letter stood the code of the golden door. The model read every word, from the "
    "first to the last, and gave the letter to a friend in another house. In the morning the friend was "
    "asked for the code, and knew it at once, as if it had read the letter itself. So the golden door was"
    " opened, and not one block was ever lost. The end."
)
COUNTING = ", ".join(NUMBER_WORDS).capitalize() + "."


SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        listed("""
        Hello | Hello! | Hi | Hi! | Hi there | Hi there! | Hello there | Hey | Hey! | Hello, how
        are you? | Good morning | Good morning! | Good evening | hello | hi | hey | How are you? |
        Hello world | Hello, world! | Say hello | Say hi | Hello model | ping | test | Say hello.
        | say hi
        """),
        GREETING,
    ),
    (
        listed("""
        Who are you? | What are you? | What is your name? | who are you | Who are you | What can
        you do? | Help | help | How can you help me? | What do you know? | Tell me about yourself.
        | What model are you? | Which model are you? | What is this? | Introduce yourself. | Who
        made you? | What is pdserve? | Are you a model? | Tell me about yourself | what can you do
        """),
        ABOUT,
    ),
    (
        listed("""
        Thank you | Thank you! | Thanks | Thanks! | thanks | Thank you very much. | Great, thank
        you!
        """),
        WELCOME,
    ),
    (
        listed("""
        Goodbye | Goodbye! | Bye | Bye! | bye | Good night | See you soon!
        """),
        GOODBYE,
    ),
    (
        listed("""
        Tell me a story | Tell me a story. | Tell me a story about a {word}. | Tell me a long
        story. | Tell me a short story. | Write a story about the {word}. | Write a story. | Tell
        me another story | tell me a story | A story, please. | Please tell me a story. | Can you
        tell me a story? | Write a short story about a {word}. | Write me a long story. | Tell me
        a story about the {word} | Once upon a time
        """),
        STORY,
    ),
    (
        listed("""
        Count to thirty | Count to thirty. | Count to 30 | Count to 30. | Please count to thirty.
        | Count from one to thirty. | count to thirty | Can you count? | Count for me. | Count |
        Count slowly to thirty. | Count from 1 to 30. | Count to 10 | Count to 100. | Count to
        ten.
        """),
        COUNTING,
    ),
)
