"""A short prompt, and long ones that are unique for a seed, so that no prefix cache has them."""

import hashlib

SHORT = "What is the code of the red box?"
LONG_TOKENS = 300
"""A long prompt has at least this many tokens, so that the graph prefills it remotely."""


def long(seed: str) -> str:
    """Return a text of about 400 tokens, unique for the seed."""
    colours = ("red", "blue", "green", "black", "white", "brown")
    facts = []
    for number in range(30):
        digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
        code = int.from_bytes(digest[:2], "big") % 9000 + 1000
        facts.append(f"The code of the {colours[digest[3] % len(colours)]} box is {code}.")
    return " ".join(facts) + " What is the code of the red box?"


def ids(seed: str, count: int = LONG_TOKENS) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        digest = hashlib.sha256(f"{seed} {len(found)}".encode()).digest()
        found += [20 + (digest[i] * 256 + digest[i + 1]) % 580 for i in range(0, 32, 2)]
    return found[:count]
