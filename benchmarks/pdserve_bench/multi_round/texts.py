"""What users say: words that are a token each in the vocabularies of most models, so that a prompt of so many words has
about so many tokens."""

from random import Random

_VOCABULARY = """
about after again all answer bird boat book bread bridge city clock cold door end first forest friend garden good house
key lake letter light long moon night old paper rain river road sea ship snow song star stone story summer tree water
"""
_WORDS = _VOCABULARY.split()


class Texts:
    """The texts of one run. The same seed makes the same texts; another seed makes others from the first word on, so
    that a server's prefix cache that has seen a run does not know the next."""

    def __init__(self, shared: int, history: int, seed: int) -> None:
        """So many words of the system prompt that all users share, and of each user's own history."""
        self._seed, self._history = seed, history
        self._shared = self._words("shared", shared)

    def first(self, user: int) -> str:
        """What a user's first message begins with: the prompt that all share, then what is its own."""
        history = self._words(f"user {user}", self._history)
        return f"{self._shared}. I am user {user}, and this is what we spoke about: {history}. "

    def question(self, number: int) -> str:
        return f"Question {number}: can you tell me another long story with a happy end?"

    def warm_up(self, number: int) -> str:
        return f"Warm-up {number}: {self._words(f'warm-up {number}', 100)}."

    def _words(self, purpose: str, count: int) -> str:
        return " ".join(Random(f"{self._seed} {purpose}").choices(_WORDS, k=count))
